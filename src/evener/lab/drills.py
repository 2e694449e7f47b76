"""Which drills are there, and what can no lab break? A row for every id of FAILURES.md that namespaces can produce."""

from __future__ import annotations

from evener.core.errors import UsageError, did_you_mean
from evener.lab import drills_hosts, drills_logins, drills_network, drills_runs
from evener.lab.drill import Drill

DRILLS: dict[str, Drill] = {
    drill.name: drill
    for drill in (*drills_network.DRILLS, *drills_logins.DRILLS, *drills_hosts.DRILLS, *drills_runs.DRILLS)
}

NOT_HERE: dict[str, str] = {
    "clock.skew": "all hosts of a lab have this machine's clock: Linux has no namespace for the time of day",
    "mem.swap": "swap is the machine's: to make one host swap, all would",
    "link.congestion": "which congestion control is the faster one hangs on the wire and on how busy the cores are",
    "link.idle": "the ways of a lab are short: after silence TCP is at full speed again at once",
    "gpu.p2p": "it needs two GPUs behind an IOMMU that translates between them",
    "run.collective-mismatch": "a program makes it, not a host",
    "run.nonfinite": "a program makes it, not a host: the run records which rank",
    "run.diverged": "it takes a flipped bit: evener verify names it, and its tests flip one",
    "run.straggler": "`evener report` names it, from the records of a longer run",
}

# Drills whose fix no lab can type as it stands: what is done instead is the drill's own.
UNTYPED: dict[str, str] = {
    "net.wrong-interface": "it is for the shell in which somebody types torchrun",
    "net.overlay": "it is for the shell in which somebody types torchrun",
    "net.mtu-ssh": "what stands on the way only its owner can find",
    "net.slow-link": "a cable, a port or a card",
    "net.slow-link-duplex": "a card that negotiates, which a lab's does not",
    "net.wireless": "a cable",
    "net.stack-loss": "a switch, or a setting that no measurement has recommended",
    "net.asymmetric": "a cable, a port or a card",
    "ssh.unreachable": "a cable",
    "ssh.unreachable-frozen": "whoever stands before the machine",
    "ssh.auth": "ssh-copy-id asks for a password",
    "ssh.key-passphrase": "ssh-add asks for the passphrase",
    "ssh.key-missing": "which key is meant, its owner knows",
    "ssh.key-server": "a file and a service that a lab has otherwise",
    "ssh.shell": "what ~/.bashrc is for, its owner knows",
    "ssh.shell-exits": "what ~/.bashrc is for, its owner knows",
    "ssh.shell-reads": "what ~/.bashrc is for, its owner knows",
    "ssh.shell-sleeps": "what ~/.bashrc is for, its owner knows",
    "ssh.shell-forced": "what the forced command is for, its owner knows",
    "ssh.hostkey": "never without looking: an attack looks like that, too",
    "version.python": "which interpreter is meant, its owner knows",
    "version.python-old": "which interpreter is meant, its owner knows",
    "version.torch": "evener setup fetches 200 MB: its own test does that",
    "version.torch-missing": "evener setup fetches 200 MB: its own test does that",
    "version.evener": "evener setup fetches 200 MB: its own test does that",
    "tty.attached": "it is about how a program is started the next time",
    "limit.nofile": "PAM reads limits.d, and a lab's sshd goes without PAM",
    "limit.memlock": "PAM reads limits.d, and a lab's sshd goes without PAM",
    "mem.space": "which program may be ended, its owner knows",
    "disk.space": "what may be removed, its owner knows",
    "shm.size": "in a container, as a lab may be in, it is a flag of docker run",
    "cpu.throttled": "a lab only shows the figure",
    "power.sleep": "a plug, and systemd, which a lab goes without",
    "dtype.slow": "there is nothing to mend",
    "env.ineffective-nccl": "there is nothing to mend: other programs may read it",
    "gpu.driver": "a driver, and a reboot",
    "rank.duplicate": "which of the two names is the right one, its owner knows",
}


def find(name: str) -> Drill:
    """The drill of this name."""
    if name in NOT_HERE:
        raise UsageError(f"{name}: a lab cannot break this: {NOT_HERE[name]}", hint="evener lab drill --list")
    if name not in DRILLS:
        raise UsageError(f"{name}: no such drill", hint=did_you_mean(name, DRILLS))
    return DRILLS[name]
