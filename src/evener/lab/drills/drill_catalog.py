"""The catalog of fault drills: at least one for every check id whose fault Linux namespaces can produce."""

from __future__ import annotations

from evener.core.base.errors import UsageError, did_you_mean
from evener.lab.drills import drills_hosts, drills_network, drills_runs, drills_ssh
from evener.lab.drills.drill_runner import Drill

DRILLS: dict[str, Drill] = {
    drill.name: drill
    for drill in (
        *drills_network.NETWORK_DRILLS,
        *drills_ssh.SSH_DRILLS,
        *drills_hosts.HOST_DRILLS,
        *drills_runs.RUN_DRILLS,
    )
}

UNSUPPORTED_CHECKS: dict[str, str] = {
    "clock.skew": "all hosts of a lab have this machine's clock: Linux has no namespace for the time of day",
    "mem.swap": "all hosts share this machine's swap: making one host swap would make all swap",
    "link.congestion": "which congestion control is faster depends on the wire and on how busy the cores are",
    "link.idle": "round trips in a lab are short: after an idle time TCP is at full speed again at once",
    "gpu.p2p": "it needs two GPUs behind an IOMMU that translates between them",
    "net.strangers": "no fault: it says who else is on the network, and the remedies encrypt or close it",
    "run.collective-mismatch": "a program causes it, not a host",
    "version.packages": "doctor does not know what a run will fine-tune: the preflight of `evener train` reports it",
    "disk.stored": "a lab has no disk for 50 GB of earlier runs",
    "run.nonfinite": "a program causes it, not a host: the run records which rank",
    "run.diverged": "it needs a flipped bit in memory: evener verify detects it, and its tests flip one",
    "run.split-brain": "it needs a disk that loses what it confirmed just when the hosts decide: tests simulate that",
    "run.straggler": "`evener report` detects it in the records of a longer run",
}

# Why a lab cannot run the finding's own fix: the drill brings a fix of its own.
MANUAL_FIX_REASONS: dict[str, str] = {
    "net.wrong-interface": "it is for the shell in which somebody types torchrun",
    "net.overlay": "it is for the shell in which somebody types torchrun",
    "net.mtu-ssh": "only the owner of the network can find what drops the packets",
    "net.slow-link": "a cable, a port or a card",
    "net.slow-link-duplex": "a card that negotiates, which a lab's does not",
    "net.wireless": "a cable",
    "net.stack-loss": "a switch, or a setting that no measurement has recommended",
    "net.asymmetric": "a cable, a port or a card",
    "ssh.unreachable": "a cable",
    "ssh.unreachable-frozen": "somebody at the machine must do it",
    "ssh.auth": "ssh-copy-id asks for a password",
    "ssh.key-passphrase": "ssh-add asks for the passphrase",
    "ssh.key-missing": "only its owner knows which key is meant",
    "ssh.key-server": "a lab has another sshd_config and no systemd",
    "ssh.shell": "only its owner knows what ~/.bashrc is for",
    "ssh.shell-exits": "only its owner knows what ~/.bashrc is for",
    "ssh.shell-reads": "only its owner knows what ~/.bashrc is for",
    "ssh.shell-sleeps": "only its owner knows what ~/.bashrc is for",
    "ssh.shell-forced": "only its owner knows what the forced command is for",
    "ssh.hostkey": "never without a check: an attack looks the same",
    "version.python": "only its owner knows which interpreter is meant",
    "version.python-old": "only its owner knows which interpreter is meant",
    "version.torch": "evener setup downloads 200 MB: its own test does that",
    "version.torch-missing": "evener setup downloads 200 MB: its own test does that",
    "version.evener": "evener setup downloads 200 MB: its own test does that",
    "tty.attached": "it concerns how a program is started the next time",
    "limit.nofile": "PAM reads limits.d, and a lab's sshd does not use PAM",
    "limit.memlock": "PAM reads limits.d, and a lab's sshd does not use PAM",
    "mem.space": "only its owner knows which program may be ended",
    "disk.space": "only its owner knows what may be removed",
    "shm.size": "in a container, where a lab may run, it is a flag of docker run",
    "cpu.throttled": "a lab only shows the value",
    "power.sleep": "a power plug, and systemd, which a lab does not have",
    "dtype.slow": "there is nothing to fix",
    "env.ineffective-nccl": "there is nothing to fix: other programs may read it",
    "gpu.driver": "a driver, and a reboot",
    "rank.duplicate": "only its owner knows which of the two names is right",
}


def find_drill(name: str) -> Drill:
    """Return the drill with this name; raise UsageError if a lab cannot inject it or none has the name."""
    if name in UNSUPPORTED_CHECKS:
        raise UsageError(f"{name}: a lab cannot break this: {UNSUPPORTED_CHECKS[name]}", hint="evener lab drill --list")
    if name not in DRILLS:
        raise UsageError(f"{name}: no such drill", hint=did_you_mean(name, DRILLS))
    return DRILLS[name]
