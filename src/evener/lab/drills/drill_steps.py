"""Steps that break or fix a host of a lab: what a user would type, and the function that does it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from evener.core.base.errors import EvenerError
from evener.core.cluster.fleet_file import load_fleet
from evener.lab.drills.drill_runner import FLEET_FILE, DrillContext, DrillStep, doctor_diagnosis, make_lab_step, on_host

START_TIMEOUT_S = 20.0
MAX_PROBES = 4
ENVIRONMENT = "~/.ssh/environment"
PRIVATE_DOCTOR = doctor_diagnosis("--private", "--quick")
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def set_hosts_entry(host: str, name: str, address: str) -> DrillStep:
    """Return the step that sets the address of a name in /etc/hosts; "" removes the name."""
    gone = rf"sed -i '/[[:space:]]{name}$/d' /etc/hosts"
    return on_host(host, f"{gone}; echo '{address} {name}' >> /etc/hosts" if address else gone)


def set_env(host: str, name: str, value: str) -> DrillStep:
    """Return the step that sets an environment variable of every ssh session."""
    return on_host(host, f"mkdir -p ~/.ssh; echo '{name}={value}' >> {ENVIRONMENT}")


def unset_env(host: str, *names: str) -> DrillStep:
    """Return the step that removes environment variables of every ssh session."""
    return on_host(host, f"sed -i -E '/^({'|'.join(names)})=/d' {ENVIRONMENT}")


def restrict_ports(host: str) -> DrillStep:
    """Return the step that admits only the run's hosts, by the command that `evener doctor --private` prints."""

    def do(stage: DrillContext) -> None:
        findings = PRIVATE_DOCTOR(stage).findings
        [finding] = [item for item in findings if item.check == "net.private" and item.host == host]
        stage.host(host).exec(["sh", "-c", finding.fix.partition(": ")[2]])

    return DrillStep(f"$ evener doctor --private, and on {host} the command that it prints", do)


def set_firewall(host: str, *rules: str) -> DrillStep:
    """Return the step that sets nftables rules for incoming packets; none: no firewall. The ssh port stays open."""
    text = "; ".join(f"nft add rule inet evener input {rule}" for rule in rules) or "nft delete table inet evener"
    return make_lab_step(f"on {host}: {text}", lambda stage: stage.host(host).set_firewall(rules))


def set_cable(host: str, plugged_in: bool) -> DrillStep:
    """Return the step that plugs in or pulls the cable of the main interface."""
    action = "plug it in again" if plugged_in else "pull it out of the switch"
    return make_lab_step(f"the cable of {host}: {action}", lambda stage: stage.host(host).set_link_up(plugged_in))


def set_link_rate(host: str, up: str, down: str | None = None, *, policed: bool = False) -> DrillStep:
    """Return the step that sets the link's rate; `policed`: the switch drops packets above `down`, not queues them."""
    rates = f"{up} both ways" if down is None else f"{up} out, {down} in"
    dropped = ", and the switch drops packets above that" if policed else ""
    return make_lab_step(
        f"the link of {host}: {rates}{dropped}",
        lambda stage: stage.host(host).set_rate(None, up=up, down=down or up, policed=policed),
    )


def set_sysctl(host: str, name: str, value: str) -> DrillStep:
    """Return the step that sets a kernel parameter of which each network namespace has its own value."""
    return on_host(host, f"sysctl -w {name}='{value}'")


def probe_wire(check: str) -> DrillStep:
    """Return the step that measures the links until the fleet file has the gain, which a busy machine can hide."""

    def do(stage: DrillContext) -> None:
        for _ in range(MAX_PROBES):
            stage.run_evener("probe", "wire", "--fleet", FLEET_FILE, "--no-iperf3", "--seconds", "0.5")
            links = load_fleet(stage.fleet_file).links
            if any(gain.check == check for to in links.values() for link in to.values() for gain in link.gains):
                return

    return make_lab_step(f"$ evener probe wire --fleet {FLEET_FILE}", do)


def set_limits(host: str, **limits: int) -> DrillStep:
    """Return the step that sets soft resource limits of every ssh session, such as nofile=64."""
    options = " ".join(f"--{name}={value}:" for name, value in limits.items())
    return on_host(host, f'prlimit --pid "$(pgrep -o sshd)" {options}')


def override_file(host: str, path: str, content: str) -> DrillStep:
    """Return the step that replaces the content of a file of /sys or /proc."""
    return make_lab_step(
        f"on {host}: {path} shows {content}", lambda stage: stage.host(host).override_file(path, content + "\n")
    )


def overlay_files(host: str, folder: str, files: dict[str, str]) -> DrillStep:
    """Return the step that adds files, which this machine does not have, to a folder of /sys."""
    existing = folder if Path(folder).is_dir() else str(Path(folder).parent)
    inside = "" if existing == folder else Path(folder).name + "/"
    layers = f"/run/evener-lab/{folder.replace('/', '-')}"
    lines = [f"mkdir -p {layers}/work"]
    for name, content in files.items():
        path = f"{layers}/upper/{inside}{name}"
        lines += [f"mkdir -p $(dirname {path})", f"echo {content} > {path}"]
    lines.append(f"D=$(readlink -f {existing})")

    def do(stage: DrillContext) -> None:
        options = f"lowerdir=$D,upperdir={layers}/upper,workdir={layers}/work" + ",userxattr" * stage.lab.rootless
        stage.host(host).exec(["sh", "-ec", "; ".join([*lines, f"mount -t overlay -o {options} overlay $D"])])

    return make_lab_step(
        f"on {host}, in {folder}: {', '.join(f'{name} shows {text}' for name, text in files.items())}", do
    )


def set_bf16_support(host: str, *, is_supported: bool = False) -> DrillStep:
    """Return the step that hides or shows bf16 flags in /proc/cpuinfo, whatever this machine's processor has."""

    def do(stage: DrillContext) -> None:
        lines = []
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            title, colon, words = line.partition(":")
            if title.strip() in ("flags", "Features"):
                flags = [word for word in words.split() if word not in BF16_FLAGS] + [BF16_FLAGS[1]] * is_supported
                line = f"{title}{colon} {' '.join(flags)}"
            lines.append(line)
        stage.host(host).override_file("/proc/cpuinfo", "\n".join(lines) + "\n")

    return make_lab_step(
        f"on {host}: /proc/cpuinfo has {BF16_FLAGS[1] if is_supported else 'no bf16'} among its flags", do
    )


def start_program(host: str, command: str, *, ready: str) -> DrillStep:
    """Return the step that starts a program in the background and waits until the shell test `ready` succeeds."""
    venv = Path(sys.executable).parent

    def do(stage: DrillContext) -> None:
        lab_host = stage.host(host)
        lab_host.exec(["sh", "-c", f"PATH={venv}:$PATH; cd; setsid -f {command} </dev/null >/dev/null 2>&1"])
        wait_until_ready(stage, host, ready)

    return DrillStep(f"on {host}: setsid {command} &", do)


def wait_until_ready(stage: DrillContext, host: str, ready: str) -> None:
    """Wait until a shell test succeeds on a host; raise EvenerError on a timeout."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while stage.host(host).exec(["sh", "-c", ready], check=False).returncode:
        if time.monotonic() > deadline:
            raise EvenerError(f"host {host}: {ready}: timed out after {START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def start_in_terminal(host: str, command: str, *, ready: str) -> DrillStep:
    """Return the step that starts a program in an ssh session with a terminal and waits until `ready` succeeds."""

    def do(stage: DrillContext) -> None:
        argv = stage.lab.ssh_argv(host, f"PATH={Path(sys.executable).parent}:$PATH; {command}")
        stage.processes.append(
            subprocess.Popen(
                [argv[0], "-tt", *argv[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        wait_until_ready(stage, host, ready)

    return DrillStep(f"$ ssh -t {host} {command}", do)


def write_file(host: str, name: str, text: str) -> DrillStep:
    """Return the step that writes a file in the host's home."""
    return make_lab_step(f"on {host}: write {name}", lambda stage: (stage.host(host).home / name).write_text(text))


def create_venv(host: str, folder: str, packages: dict[str, str]) -> DrillStep:
    """Return the step that creates a venv with this machine's packages, but other version numbers for `packages`."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = next(path for path in sys.path if path.endswith("site-packages"))

    def do(stage: DrillContext) -> None:
        home = stage.host(host).home
        stage.host(host).exec([sys.executable, "-m", "venv", "--without-pip", str(home / folder)])
        site = home / folder / "lib" / version / "site-packages"
        (site / "all.pth").write_text(f"import site; site.addsitedir({installed!r})\n")
        for package, number in packages.items():
            info = site / f"{package}-{number}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")

    versions = ", ".join(f"{package} {number}" for package, number in packages.items())
    return make_lab_step(f"on {host}: ~/{folder} is another venv{f', with {versions}' if versions else ''}", do)
