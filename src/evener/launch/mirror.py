"""Mirror a run's records and logs to the run directory here: read every host's files as they grow.

After a lost connection a copy resumes at the byte where it ends, so that no line is missing or duplicated.

    host's RUN/steps, spans, vitals, logs, manifest.json   → the same place here: names identify rank and host
    … and the tokenizer's file
    host's RUN/events.jsonl, RUN/host/state.json    → RUN/hosts/NAME/…; RUN/events.jsonl is all of them by time

A run on this machine alone needs no copies, since its folder is the run directory: only its state is streamed.

The mirror writes only files that belong to its host. plan.json decides which these are: after the run was restarted on
other hosts, its earlier hosts write nothing here. mirror.json records for every copy the identity of the file on the
host and of the file here, so that a file that was replaced meanwhile is not appended to.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.corpus import TOKENIZER_FILES
from evener.core.decoding import from_json, from_tree
from evener.core.errors import CheckpointError, EvenerError, HostError, RunError
from evener.core.files import read_file, write_atomic
from evener.core.fleet import Fleet
from evener.core.plan import HostPlan, Plan, read_plan
from evener.core.rundir import RunDir, event_of
from evener.core.runwriter import RunWriter
from evener.core.watch import Look
from evener.hosts.session import RemoteError, Session, open_session

RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
POLL_S, UNHEARD_S = 0.1, 60.0  # to wait for the states of other hosts
MAX_BACK = 20  # restarts of a host that went down
SILENCE_S = 12.0  # a following host streams several items a second

OF_RANK_0 = ("manifest.json", *TOKENIZER_FILES)
WHOLE = (*OF_RANK_0, "host/state.json")  # replaced on the host, not appended to: copied whole

State = dict[str, Any]
GONE: State = {"state": "ended", "status": None, "failures": [], "stopped": False, "lost": "its run folder is gone"}


class _Ended(msgspec.Struct, frozen=True):
    """The exit of a failed rank."""

    rank: int
    exitcode: int | None
    time: float
    signal: str | None = None


class _State(msgspec.Struct, frozen=True):
    """The fields that are validated in a host's state.json."""

    state: str
    status: int | None = None
    signal: str | None = None
    stopped: bool = False
    failures: list[_Ended] = []
    started: float | None = None
    ended: float | None = None
    oom_at: float | None = None
    full_at: float | None = None


def state_of(told: Any) -> State:
    """Return the supervisor state received from a host or read from its file here; a lost state if it is malformed."""
    try:
        from_tree(told, _State)
    except msgspec.ValidationError:
        return GONE | {"lost": "its state of the run is damaged"}
    return dict(told)


class BehindError(Exception):
    """Another program copies the same run and changed the file: request it again from its new end."""


class Copy(msgspec.Struct, frozen=True):
    """The identities of a file on the host and of its copy here."""

    there: str  # identity of the file on the host
    here: int  # inode of the copy


class HostMirror:
    """Copies one host's part of a run."""

    def __init__(self, rundir: RunDir, plan: Plan, name: str,
                 is_wanted_back: Callable[[], bool | None] = lambda: False) -> None:  # fmt: skip
        """`is_wanted_back`: should a host that went down restart now that it is back? None: not known yet."""
        self.name, self._fleet = name, plan.fleet
        self._rundir, self.plan = rundir, plan.host(name)
        self._folder, self._is_wanted_back = self.plan.state_path(rundir).parent, is_wanted_back
        self.state: State | None = None  # the last one received
        # Not consumed yet: the host's time, a sample of its processes, and the addresses that do not answer it.
        self.seen: list[tuple[float, dict[int | None, Look], list[str]]] = []
        self.error: HostError | None = None  # while the host cannot be reached
        self.lost_since: float | None = None  # time.monotonic() of the first of these errors
        self.broken: Exception | None = None  # why this machine cannot write the copies
        self.is_done = False
        self._times_back = 0
        self._stop = threading.Event()

    def follow(self, on_change: Callable[[], None]) -> None:
        """Copy until the run on this host has ended and everything is copied; reconnect as often as necessary."""
        failures = 0
        while not self._stop.is_set():
            try:
                with contextlib.closing(open_session(self.name, self.plan.host)) as session:
                    self._copy(session, until_end=True, on_change=on_change)
                    if self._went_down and self._times_back < MAX_BACK and self._shall_begin_again():
                        self._times_back += 1
                        self.state = session.call("runs", "start_again", run=self.plan.folder(self._rundir))
                        continue
                self.is_done = True
            except (HostError, RemoteError) as error:
                failures = 0 if self.error is None else failures + 1
                self.error = error if isinstance(error, HostError) else host_failed(error, self._fleet)
                self.lost_since = self.lost_since or time.monotonic()
                on_change()
                self._stop.wait(RETRY_S[min(failures, len(RETRY_S) - 1)])
            except BehindError:
                continue
            except Exception as error:  # such as a full disk here; the follower reports it
                self.broken, self.is_done = error, True
            if self.is_done:
                on_change()
                return

    @property
    def _went_down(self) -> bool:
        """Return whether the run ended on this host because the host went down or the supervisor was killed."""
        state = self.state or {}
        return "lost" in state and "supervisor" in state and not state["stopped"]

    def _shall_begin_again(self) -> bool:
        """Return whether to restart the host; wait up to `FIRST_STATE_TIMEOUT_S` for the states that decide it."""
        deadline = time.monotonic() + UNHEARD_S
        while (is_wanted := self._is_wanted_back()) is None and time.monotonic() < deadline:
            if self._stop.wait(POLL_S):
                break
        return bool(is_wanted)

    def catch_up(self) -> None:
        """Copy once what is new on the host. HostError if it cannot be reached."""
        for attempt in range(3):
            try:
                with contextlib.closing(open_session(self.name, self.plan.host)) as session:
                    self._copy(session, until_end=False, on_change=lambda: None)
                return
            except BehindError:
                if attempt == 2:
                    return  # another program copies it faster
            except RemoteError as error:
                raise host_failed(error, self._fleet) from None

    def stop(self) -> None:
        """Stop following."""
        self._stop.set()

    def _copy(self, session: Session, *, until_end: bool, on_change: Callable[[], None]) -> None:
        pending: dict[str, Any] | None = None
        dirty = False
        offsets = None if self.plan.is_here else self._have()
        run = self.plan.folder(self._rundir)
        for item in session.stream("runs", "follow", run=run, have=offsets, until_end=until_end, timeout_s=SILENCE_S):
            if isinstance(item, bytes):
                assert pending is not None
                self._add(pending, item)
                pending, dirty = None, True
            elif "path" in item:
                pending = item if item["size"] else None
                if item["size"] == 0:
                    self._add(item, b"")
            elif "looks" in item:
                looks = {rank: from_tree(sample, Look) for rank, sample in item["looks"]}
                self.seen.append((item["at"], looks, item["stuck"]))
            else:
                previous, self.state = self.state, state_of(item["caught_up"] or GONE)
                if self.error is not None or previous != self.state or dirty:
                    self.error, self.lost_since, dirty = None, None, False
                    on_change()
            if self._stop.is_set():
                return

    def _have(self) -> dict[str, list[Any]]:
        """Return [identity, size in bytes] of every copy, by path; the size is that of the file on disk."""
        with self._locked():
            return {
                path: [copy.there, local_path.stat().st_size]
                for path, copy in self._known().items()
                if (local_path := self._local(path)) is not None and self._is_ours(path, local_path, copy)
            }

    def _add(self, header: dict[str, Any], content: bytes) -> None:
        """Append what lies beyond the end of the copy; replace the copy if the host's file is a different one now."""
        name, offset = header["path"], header["offset"]
        path = self._local(name)
        if path is None:
            return
        with self._locked():
            copies = self._known()
            copy = copies.get(name)
            is_same = copy is not None and copy.there == header["identity"] and self._is_ours(name, path, copy)
            copied_bytes = path.stat().st_size if is_same else 0
            if offset > copied_bytes:
                raise BehindError
            if not is_same:
                write_atomic(path, content, mode=0o600)  # under a new inode, which followers of the old one detect
                copies[name] = Copy(header["identity"], path.stat().st_ino)
                write_atomic(self._known_path, msgspec.json.encode(copies))
            elif name not in WHOLE and len(content) > copied_bytes - offset:
                with path.open("ab") as file:
                    file.write(content[copied_bytes - offset :])

    @staticmethod
    def _is_ours(name: str, path: Path, copy: Copy) -> bool:
        """Return whether this is still the copied file. (The controller may write a verdict into a manifest.)"""
        return path.exists() and (name in WHOLE or path.stat().st_ino == copy.here)

    @property
    def _known_path(self) -> Path:
        return self._folder / "mirror.json"

    def _known(self) -> dict[str, Copy]:
        """Read mirror.json; empty if it is missing or damaged."""
        try:
            return from_json(read_file(self._known_path), dict[str, Copy])
        except (OSError, msgspec.MsgspecError):
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the copies, as two terminals may follow one run. RunError if this host has left the run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "mirror.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (host_plan := _part(self._rundir, self.name)) is None or host_plan.run != self.plan.run:
                raise RunError(
                    f"{self._rundir}: the run was restarted; its earlier part on {self.name} is no longer copied",
                    hint=f"evener logs -f {self._rundir}",
                )
            yield

    def _local(self, path: str) -> Path | None:
        """Return where a file of the host is copied to; None for a file that this host may not write."""
        if path == "events.jsonl":
            return self.plan.events_path(self._rundir)
        if path == "host/state.json":
            return self.plan.state_path(self._rundir)
        host, first = re.escape(self.name), self.plan.first_rank
        if path in OF_RANK_0 and self.plan.agent is not None:  # the first host may change
            return self._folder / path
        rank_match = re.fullmatch(
            rf"(?:(?:steps|spans|profile|replicas)/rank-|logs/{host}\.)(\d+)\.(?:jsonl?|log|safetensors)", path
        )
        is_ours = (
            first <= int(rank_match[1]) < first + self.plan.num_ranks  # else of an earlier start, with it here
            if rank_match
            else path in (f"logs/{self.name}.log", f"vitals/{self.name}.jsonl")
            or (path in OF_RANK_0 and self.plan.node_rank == 0)
        )
        return self._rundir.path / path if is_ours else None


class Mirror:
    """Copies the parts of all hosts, each in its own thread."""

    def __init__(self, rundir: RunDir, plan: Plan) -> None:
        self.rundir, self.plan = rundir, plan
        self.hosts = {host.name: HostMirror(rundir, plan, host.name, self._goes_on) for host in plan.hosts}
        self._changed = threading.Event()
        self._threads = [
            threading.Thread(target=host.follow, args=(self._tell,), daemon=True) for host in self.hosts.values()
        ]

    def __enter__(self) -> Mirror:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.stop()
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        merge_events(self.rundir, self.plan)
        choose_manifest(self.rundir, self.plan)

    @property
    def is_done(self) -> bool:
        """Return whether the run has ended on every host and everything is copied."""
        return all(host.is_done for host in self.hosts.values())

    def _goes_on(self) -> bool | None:
        """Return whether the run is alive on any host, so that a host that is back rejoins; None: not known yet."""
        if not self.plan.outlives_hosts:
            return False
        states = [host.state for host in self.hosts.values() if host.error is None]
        if any(state is not None and state["state"] == "running" for state in states):
            return True
        return None if None in states else False

    def wait(self, timeout_s: float) -> None:
        """Return when a host's state or files changed, or after `timeout_s`."""
        self._changed.wait(timeout_s)
        self._changed.clear()
        choose_manifest(self.rundir, self.plan)

    def _tell(self) -> None:
        self._changed.set()


def _part(rundir: RunDir, host: str) -> HostPlan | None:
    """Return the host's part in the current plan; None if it has none."""
    return next((host_plan for host_plan in read_plan(rundir).hosts if host_plan.name == host), None)


def host_failed(error: RemoteError, fleet: Fleet) -> HostError:
    """Convert an exception raised on a host (a full disk, a damaged file) to a HostError."""
    return HostError(
        f"{error.host}: {error.message}", check="host.failed", host=error.host,
        hint=f"evener doctor{fleet.flag} looks closer", output=error.traceback,
    )  # fmt: skip


def choose_manifest(rundir: RunDir, plan: Plan) -> None:
    """Install the manifest of the newest epoch as the run's: in a run that outlives its hosts each host writes one."""
    if not plan.outlives_hosts:
        return
    candidates: list[tuple[tuple[int, bool], Path]] = []
    for folder in (*(host.state_path(rundir).parent for host in plan.hosts), rundir.path):  # the launcher writes there
        with contextlib.suppress(EvenerError):  # none yet, or a damaged one
            manifest = RunDir(folder).manifest()
            candidates.append(((manifest.roster.epoch, manifest.verdict != "running"), folder))
    if not candidates:
        return
    newest = max(order for order, _ in candidates)
    folder = next(folder for order, folder in candidates if order == newest)
    for name in OF_RANK_0:
        path, target = folder / name, rundir.path / name
        if path.exists() and not (target.exists() and target.read_bytes() == path.read_bytes()):
            write_atomic(target, path.read_bytes(), mode=0o600)


def merge_events(rundir: RunDir, plan: Plan) -> None:
    """Merge the events of all hosts and of the controller into RUN/events.jsonl, by time."""
    if plan.is_here:
        return
    lines: dict[bytes, float] = {}
    for path in (rundir.events_path, *sorted((rundir.path / "hosts").glob("*/events.jsonl"))):
        try:
            complete = read_file(path).split(b"\n")[:-1] if path.exists() else []
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        at = 0.0
        for line in complete:
            event = event_of(line)
            at = lines[line] = event["time"] if event is not None else at  # a damaged line keeps its place
    if lines:
        write_atomic(rundir.events_path, b"".join(line + b"\n" for line in sorted(lines, key=lines.__getitem__)))


def tell(rundir: RunDir, plan: Plan, event: str, **facts: Any) -> None:
    """Record an event that the controller itself detected."""
    if plan.is_here:
        RunWriter(rundir.path).add_event(event, **facts)
        return
    folder = rundir.path / "hosts" / ".controller"
    folder.mkdir(parents=True, exist_ok=True)
    line = msgspec.json.encode({"event": event, "time": time.time()} | facts) + b"\n"
    with (folder / "events.jsonl").open("ab") as file:
        file.write(line)
    merge_events(rundir, plan)
