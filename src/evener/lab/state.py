"""What is written down about a lab, so that anyone can find it, ask it and end it?

/var/tmp/evener-lab-UID/LAB/
  lab.json         the spec, the processes with their start times, the addresses; written last: the lab is made
  maker            who makes it: a lab without lab.json whose maker is gone is half made, and is cleaned
  id_ed25519       the key of whoever logs in; known_hosts
  hosts/NAME/      home, host key, sshd's settings, logs, face files
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.decoding import from_json
from evener.core.errors import EvenerError
from evener.lab import cgroup, disk
from evener.lab.spec import LabSpec

INIT = Path(__file__).with_name("init.py")
INITS = "/evener/lab/init.py"  # how its path ends, from whatever checkout or version it runs
READY_WITHIN_S = 30.0
GONE_WITHIN_S = 20.0


class Process(msgspec.Struct, frozen=True):
    """A process of this machine; the start time tells it from a later one with its pid."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return _start_ticks(self.pid) == self.start_ticks

    def kill(self) -> None:
        """End it at once."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a host is."""

    init: Process
    address: str
    address6: str
    port: str  # its end at the switch, an interface of the desk
    is_off: bool = False  # on purpose: who neither is off nor lives has crashed


class LabState(msgspec.Struct, frozen=True, kw_only=True):
    """A lab that is made."""

    spec: LabSpec
    rootless: bool
    desk: Process
    hosts: dict[str, HostState]
    fleet_file: str | None
    fleet_text: str


class LabFolder:
    """A lab's state directory, and what is written there now: a lab and its hosts have it in common."""

    def __init__(self, path: Path, state: LabState) -> None:
        self.path = path
        self.state = state

    def write(self, state: LabState) -> None:
        """Replace lab.json."""
        self.state = state
        save(self.path, state)

    def change_host(self, name: str, **values: Any) -> HostState:
        """Write down what is new about a host, whatever others have written about the others. In `locked()`."""
        now = load(self.path) or self.state
        host = msgspec.structs.replace(now.hosts[name], **values)
        self.write(msgspec.structs.replace(now, hosts={**now.hosts, name: host}))
        return host

    def of_host(self, name: str) -> Path:
        """A host's own folder."""
        return self.path / "hosts" / name


def root() -> Path:
    """Where this user's labs are; made, and checked to be his alone."""
    path = Path(f"/var/tmp/evener-lab-{os.getuid()}")  # noqa: S108  owner and mode are checked
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or path.is_symlink():
        raise EvenerError(f"{path} is not this user's alone: somebody else made it", hint=f"remove {path}")
    return path


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """Names are taken and given back by one process at a time."""
    fd = os.open(root(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield root()
    finally:
        os.close(fd)


def lab_names() -> list[str]:
    """Every lab of this user, half-made ones too."""
    return sorted(path.name for path in root().iterdir() if path.is_dir())


def process(pid: int) -> Process:
    """The process that has this pid now."""
    ticks = _start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(pid)
    return Process(pid, ticks)


def load(path: Path) -> LabState | None:
    """The lab of a state directory; None where it was never made to the end."""
    try:
        return from_json((path / "lab.json").read_bytes(), LabState)
    except (FileNotFoundError, msgspec.DecodeError):  # of another version of evener: to be cleaned
        return None


def save(path: Path, state: LabState) -> None:
    """Write lab.json in one stroke."""
    draft = path / f"lab.json.{os.getpid()}"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    draft.replace(path / "lab.json")


def claim(name: str) -> Path:
    """The empty state directory of a new lab. What a crashed lab of this name left is removed first."""
    with locked() as labs:
        path = labs / name
        state = load(path)
        on = [host.init for host in state.hosts.values() if not host.is_off] if state is not None else []
        if state is not None and all(p.is_alive() for p in (state.desk, *on)):
            raise EvenerError(f"lab {name} is up already: {', '.join(state.hosts)}", hint=f"evener lab down {name}")
        if (maker := _maker(path)) is not None and maker.pid != os.getpid() and maker.is_alive():
            raise EvenerError(
                f"lab {name} is being made by process {maker.pid}", hint="--name gives yours another name"
            )
        clean(path)
        path.mkdir(mode=0o700)
        (path / "maker").write_bytes(msgspec.json.encode(process(os.getpid())))
        return path


def clean(path: Path) -> None:
    """Remove every trace of a lab: processes (network and mounts go with them), cgroups, files. Twice does no harm."""
    state = load(path)
    desk = state.desk if state is not None else None
    deadline = time.monotonic() + GONE_WITHIN_S
    ours: set[Process] = set()  # one that dies forgets its command line before its host is gone
    looks = 0  # in vain: one may fork and end between our list of processes and its line there, so look twice
    while looks < 2:
        ours = {p for p in ours.union(find_processes(path)) if p.is_alive()}
        looks = 0 if ours else looks + 1
        if ours and time.monotonic() > deadline:
            pid = min(one.pid for one in ours)
            raise EvenerError(
                f"lab {path.name}: process {pid} is still there {GONE_WITHIN_S:.0f} s after it was killed",
                hint=f"cat /proc/{pid}/stack tells what it waits for",
            )
        for one in ours - {desk} or ours:  # the desk last: it buries the hosts
            one.kill()
        time.sleep(0.005)
    cgroup.remove(path.name)
    disk.unmount_all(path)
    if state is not None and state.fleet_file is not None:
        file = Path(state.fleet_file)
        with contextlib.suppress(OSError):
            if file.read_text() == state.fleet_text:
                file.unlink()

    def is_removed() -> bool:
        shutil.rmtree(path, ignore_errors=True)  # a killed maker's ssh-keygen may still be writing there
        return not path.exists()

    wait_until(is_removed, f"{path} cannot be removed")


def find_processes(path: Path) -> list[Process]:
    """The desk and the first process of each host of a lab: whoever runs an init.py of evener's for this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                if str(path).encode() in argv and any(word.endswith(INITS.encode()) for word in argv):
                    found.append(process(int(entry.name)))
    return found


def pids_with(init: Process) -> list[int]:
    """Every process of the host whose first one this is; none where it has ended."""
    if not init.is_alive():
        return []
    namespace = os.readlink(f"/proc/{init.pid}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/pid") == namespace:
                    found.append(int(entry.name))
    return sorted(found)


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + READY_WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise EvenerError(f"{otherwise} within {READY_WITHIN_S:.0f} s")
        time.sleep(0.005)


def _maker(path: Path) -> Process | None:
    try:
        return from_json((path / "maker").read_bytes(), Process)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _start_ticks(pid: int) -> int | None:
    """Clock ticks from the machine's start to the process's; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None
