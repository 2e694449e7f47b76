"""In which ways can a host of a lab be broken? Each is a step of a drill: what a person would type, and its doing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from evener.core.errors import EvenerError
from evener.core.fleet import load_fleet
from evener.lab.drill import FLEET, Stage, Step, doctor, lab_step, on

STARTS_WITHIN_S = 20.0
PROBES = 4
ENVIRONMENT = "~/.ssh/environment"
PRIVATELY = doctor("--private", "--quick")
BF16 = ("amx_bf16", "avx512_bf16", "bf16")


def name_is(host: str, name: str, address: str) -> Step:
    """Another address for a name, in /etc/hosts; "" takes the name out."""
    gone = rf"sed -i '/[[:space:]]{name}$/d' /etc/hosts"
    return on(host, f"{gone}; echo '{address} {name}' >> /etc/hosts" if address else gone)


def set_env(host: str, name: str, value: str) -> Step:
    """A variable for every session there."""
    return on(host, f"mkdir -p ~/.ssh; echo '{name}={value}' >> {ENVIRONMENT}")


def unset_env(host: str, *names: str) -> Step:
    """And away with it."""
    return on(host, f"sed -i -E '/^({'|'.join(names)})=/d' {ENVIRONMENT}")


def guarded(host: str) -> Step:
    """The run's hosts alone may connect there."""

    def do(stage: Stage) -> None:
        [found] = [one for one in PRIVATELY(stage).findings if one.check == "net.private" and one.host == host]
        stage.host(host).exec(["sh", "-c", found.fix.partition(": ")[2]])

    return Step(f"$ evener doctor --private, and on {host} the command that it gives", do)


def firewall(host: str, *rules: str) -> Step:
    """nftables rules for what comes in; ssh's port always stays open here."""
    text = "; ".join(f"nft add rule inet evener input {rule}" for rule in rules) or "nft delete table inet evener"
    return lab_step(f"on {host}: {text}", lambda stage: stage.host(host).firewall(rules))


def cable(host: str, plugged_in: bool) -> Step:
    """The cable of its main interface."""
    what = "plug it in again" if plugged_in else "pull it out of the switch"
    return lab_step(f"the cable of {host}: {what}", lambda stage: stage.host(host).link_up(plugged_in))


def rate(host: str, up: str, down: str | None = None, *, policed: bool = False) -> Step:
    """How fast its link is."""
    how = f"{up} both ways" if down is None else f"{up} out, {down} in"
    dropped = ", and the switch drops what comes faster" if policed else ""
    return lab_step(
        f"the link of {host}: {how}{dropped}",
        lambda stage: stage.host(host).set_rate(None, up=up, down=down or up, policed=policed),
    )


def sysctl(host: str, name: str, value: str) -> Step:
    """A setting of its kernel, of those that each network has for itself."""
    return on(host, f"sysctl -w {name}='{value}'")


def probed(check: str) -> Step:
    """The wire is measured, and what was found stands in the fleet file; again where a busy machine has hidden it."""

    def do(stage: Stage) -> None:
        for _ in range(PROBES):
            stage.evener("probe", "wire", "--fleet", FLEET, "--no-iperf3", "--seconds", "0.5")
            links = load_fleet(stage.fleet).links
            if any(gain.check == check for to in links.values() for link in to.values() for gain in link.gains):
                return

    return lab_step(f"$ evener probe wire --fleet {FLEET}", do)


def limit(host: str, **limits: int) -> Step:
    """Resource limits of every session there, nofile=64: the soft ones, which alone count."""
    options = " ".join(f"--{name}={value}:" for name, value in limits.items())
    return on(host, f'prlimit --pid "$(pgrep -o sshd)" {options}')


def face(host: str, path: str, content: str) -> Step:
    """What the kernel would show in a file of /sys or /proc."""
    return lab_step(f"on {host}: {path} says {content}", lambda stage: stage.host(host).face(path, content + "\n"))


def grow(host: str, folder: str, files: dict[str, str]) -> Step:
    """Files that the kernel would show in a folder of /sys where this machine has none."""
    existing = folder if Path(folder).is_dir() else str(Path(folder).parent)
    inside = "" if existing == folder else Path(folder).name + "/"
    layers = f"/run/evener-lab/{folder.replace('/', '-')}"
    lines = [f"mkdir -p {layers}/work"]
    for name, content in files.items():
        path = f"{layers}/upper/{inside}{name}"
        lines += [f"mkdir -p $(dirname {path})", f"echo {content} > {path}"]
    lines.append(f"D=$(readlink -f {existing})")

    def do(stage: Stage) -> None:
        options = f"lowerdir=$D,upperdir={layers}/upper,workdir={layers}/work" + ",userxattr" * stage.lab.rootless
        stage.host(host).exec(["sh", "-ec", "; ".join([*lines, f"mount -t overlay -o {options} overlay $D"])])

    return lab_step(f"on {host}, in {folder}: {', '.join(f'{name} says {text}' for name, text in files.items())}", do)


def without_bf16(host: str, *, has_it: bool = False) -> Step:
    """A processor without units for bf16, or with them, whatever this machine has."""

    def do(stage: Stage) -> None:
        lines = []
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            title, colon, words = line.partition(":")
            if title.strip() in ("flags", "Features"):
                kept = [word for word in words.split() if word not in BF16] + [BF16[1]] * has_it
                line = f"{title}{colon} {' '.join(kept)}"
            lines.append(line)
        stage.host(host).face("/proc/cpuinfo", "\n".join(lines) + "\n")

    return lab_step(f"on {host}: /proc/cpuinfo has {BF16[1] if has_it else 'no bf16'} among its flags", do)


def start(host: str, command: str, *, ready: str) -> Step:
    """A program that goes on by itself; `ready` is a shell test that holds once it is there."""
    venv = Path(sys.executable).parent

    def do(stage: Stage) -> None:
        one = stage.host(host)
        one.exec(["sh", "-c", f"PATH={venv}:$PATH; cd; setsid -f {command} </dev/null >/dev/null 2>&1"])
        wait_for(stage, host, ready)

    return Step(f"on {host}: setsid {command} &", do)


def wait_for(stage: Stage, host: str, ready: str) -> None:
    """Until a shell test holds on a host."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while stage.host(host).exec(["sh", "-c", ready], check=False).returncode:
        if time.monotonic() > deadline:
            raise EvenerError(f"host {host}: {ready}: not within {STARTS_WITHIN_S:.0f} s")
        time.sleep(0.05)


def in_terminal(host: str, command: str, *, ready: str) -> Step:
    """A program in somebody's ssh session, with a terminal."""

    def do(stage: Stage) -> None:
        argv = stage.lab.ssh_argv(host, f"PATH={Path(sys.executable).parent}:$PATH; {command}")
        stage.started.append(
            subprocess.Popen(
                [argv[0], "-tt", *argv[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        wait_for(stage, host, ready)

    return Step(f"$ ssh -t {host} {command}", do)


def write(host: str, name: str, text: str) -> Step:
    """A file in its home."""
    return lab_step(f"on {host}: write {name}", lambda stage: (stage.host(host).home / name).write_text(text))


def another_python(host: str, folder: str, packages: dict[str, str]) -> Step:
    """A venv that sees what this machine has installed, and of some packages the metadata of other versions."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    seen = next(path for path in sys.path if path.endswith("site-packages"))

    def do(stage: Stage) -> None:
        one = stage.host(host)
        one.exec([sys.executable, "-m", "venv", "--without-pip", str(one.home / folder)])
        site = one.home / folder / "lib" / version / "site-packages"
        (site / "all.pth").write_text(f"import site; site.addsitedir({seen!r})\n")
        for package, number in packages.items():
            info = site / f"{package}-{number}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")

    what = ", ".join(f"{package} {number}" for package, number in packages.items())
    return lab_step(f"on {host}: ~/{folder} is another venv{f', with {what}' if what else ''}", do)
