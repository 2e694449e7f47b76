"""The state directory of a lab, from which any process can find, inspect and remove it.

/var/tmp/evener-lab-UID/LAB/
  lab.json         the spec, the processes with their start times, the addresses; written last, when the lab is complete
  maker            the creating process: a lab without lab.json whose maker is gone is incomplete, and is removed
  id_ed25519       the user's key; known_hosts
  hosts/NAME/      home, host key, sshd's settings, logs, overriding files
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

from evener.core.base.decoding import from_json
from evener.core.base.errors import EvenerError
from evener.core.base.shell import quote_word
from evener.lab import cgroup, disk
from evener.lab.lab_spec import LabSpec

INIT_PROGRAM = Path(__file__).parent / "programs" / "init.py"
INIT_PATH_SUFFIX = "/evener/lab/programs/init.py"  # the end of its path in any checkout or version
READY_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 20.0


class LabProcess(msgspec.Struct, frozen=True):
    """A process of this machine; its start time distinguishes it from a later process with the same pid."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return _start_ticks(self.pid) == self.start_ticks

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """The first process, the addresses and the switch port of a host."""

    init: LabProcess
    address: str
    address6: str
    port: str  # its interface at the controller's switch
    is_off: bool = False  # powered off on purpose; a host that neither is off nor runs has crashed


class LabState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of lab.json: a lab that was completely created."""

    spec: LabSpec
    rootless: bool
    controller: LabProcess = msgspec.field(name="desk")
    hosts: dict[str, HostState]
    fleet_file: str | None
    fleet_text: str


class LabFolder:
    """A lab's state directory and its current content, shared by the lab and its hosts."""

    def __init__(self, path: Path, state: LabState) -> None:
        self.path = path
        self.state = state

    def write(self, state: LabState) -> None:
        """Replace lab.json."""
        self.state = state
        save(self.path, state)

    def update_host(self, name: str, **values: Any) -> HostState:
        """Record changes of a host, and keep what other processes recorded of other hosts. Call it in `lock_labs()`."""
        current = load(self.path) or self.state
        host = msgspec.structs.replace(current.hosts[name], **values)
        self.write(msgspec.structs.replace(current, hosts={**current.hosts, name: host}))
        return host

    def host_folder(self, name: str) -> Path:
        """Return the folder of a host."""
        return self.path / "hosts" / name


def labs_root() -> Path:
    """Return the folder of this user's labs; create it, and check that only this user can access it."""
    path = Path(f"/var/tmp/evener-lab-{os.getuid()}")  # noqa: S108  owner and mode are checked
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or path.is_symlink():
        raise EvenerError(f"{path}: another user created it or can access it", hint=f"remove {path}")
    return path


@contextlib.contextmanager
def lock_labs() -> Iterator[Path]:
    """Hold the lock under which one process at a time claims and releases lab names."""
    fd = os.open(labs_root(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield labs_root()
    finally:
        os.close(fd)


def lab_names() -> list[str]:
    """Return the names of this user's labs, incomplete ones included."""
    return sorted(path.name for path in labs_root().iterdir() if path.is_dir())


def process_by_pid(pid: int) -> LabProcess:
    """Return the process that has this pid now; raise ProcessLookupError if there is none."""
    ticks = _start_ticks(pid)
    if ticks is None:
        raise ProcessLookupError(pid)
    return LabProcess(pid, ticks)


def load(path: Path) -> LabState | None:
    """Return the lab of a state directory; None if its creation was never completed."""
    try:
        return from_json((path / "lab.json").read_bytes(), LabState)
    except (FileNotFoundError, msgspec.DecodeError):  # or of another version of evener: to be removed
        return None


def save(path: Path, state: LabState) -> None:
    """Write lab.json atomically."""
    draft = path / f"lab.json.{os.getpid()}"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    draft.replace(path / "lab.json")


def claim_name(name: str) -> Path:
    """Return the empty state directory of a new lab, after removing what a crashed lab of this name left."""
    with lock_labs() as labs:
        path = labs / name
        state = load(path)
        inits = [host.init for host in state.hosts.values() if not host.is_off] if state is not None else []
        if state is not None and all(p.is_alive() for p in (state.controller, *inits)):
            raise EvenerError(
                f"lab {name} is up already: {', '.join(state.hosts)}", hint=f"evener lab down {quote_word(name)}"
            )
        if (maker := _read_maker(path)) is not None and maker.pid != os.getpid() and maker.is_alive():
            raise EvenerError(f"process {maker.pid} is creating lab {name}", hint="--name gives your lab another name")
        remove_lab(path)
        path.mkdir(mode=0o700)
        (path / "maker").write_bytes(msgspec.json.encode(process_by_pid(os.getpid())))
        return path


def remove_lab(path: Path) -> None:
    """Remove a lab completely: processes with their network and mounts, cgroups, files. Idempotent."""
    state = load(path)
    controller = state.controller if state is not None else None
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    alive: set[LabProcess] = set()  # a dying process loses its command line before its host is gone
    empty_scans = 0  # a process may fork and end between our listing and our reading of its entry, so scan twice
    while empty_scans < 2:
        alive = {p for p in alive.union(find_processes(path)) if p.is_alive()}
        empty_scans = 0 if alive else empty_scans + 1
        if alive and time.monotonic() > deadline:
            pid = min(p.pid for p in alive)
            raise EvenerError(
                f"lab {path.name}: process {pid} still exists {EXIT_TIMEOUT_S:.0f} s after SIGKILL",
                hint=f"cat /proc/{pid}/stack shows what it waits for",
            )
        for target in alive - {controller} or alive:  # the controller last: it reaps the hosts
            target.kill()
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


def find_processes(path: Path) -> list[LabProcess]:
    """Return the controller and the hosts' first processes: those that run an init.py of evener for this directory."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                if str(path).encode() in argv and any(word.endswith(INIT_PATH_SUFFIX.encode()) for word in argv):
                    processes.append(process_by_pid(int(entry.name)))
    return processes


def host_pids(init: LabProcess) -> list[int]:
    """Return the pids of the host whose first process this is; none if it has ended."""
    if not init.is_alive():
        return []
    namespace = os.readlink(f"/proc/{init.pid}/ns/pid")
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/pid") == namespace:
                    pids.append(int(entry.name))
    return sorted(pids)


def wait_until(condition: Callable[[], bool], failure: str) -> None:
    """Poll until the condition holds; raise EvenerError with this text on a timeout."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise EvenerError(f"{failure} within {READY_TIMEOUT_S:.0f} s")
        time.sleep(0.005)


def _read_maker(path: Path) -> LabProcess | None:
    try:
        return from_json((path / "maker").read_bytes(), LabProcess)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _start_ticks(pid: int) -> int | None:
    """Return the clock ticks from the machine's boot to the start of a process; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None
