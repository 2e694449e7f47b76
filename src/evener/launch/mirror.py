"""How do a run's records and logs come home? Every host's files are read as they grow, and after a lost connection from
where the copy ends: no gap, no line twice.

    host's RUN/steps, spans, vitals, logs, manifest.json   → the same place here: names tell ranks and hosts apart
    … and the tokenizer's file
    host's RUN/events.jsonl, RUN/host/state.json    → RUN/hosts/NAME/…; RUN/events.jsonl is all of them by time

Of a run on this machine alone, whose folder is the run directory, there is nothing to copy: only its state is told.

What is not the mirror's own it never touches. Whose files these are plan.json says: when the run was started again
elsewhere, its earlier hosts have nothing more to tell here. And mirror.json says of every copy which file on the host
it is of and which file here it is: one that somebody has replaced meanwhile is not appended to.
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
POLL_S, UNHEARD_S = 0.1, 60.0  # for what other hosts say
MAX_BACK = 20  # times that a host that went down is started again
SILENCE_S = 12.0  # a host that follows tells several times a second

OF_RANK_0 = ("manifest.json", *TOKENIZER_FILES)
WHOLE = (*OF_RANK_0, "host/state.json")  # replaced on the host, not appended to: they come in one piece

State = dict[str, Any]
GONE: State = {"state": "ended", "status": None, "failures": [], "stopped": False, "lost": "its folder there is gone"}


class _Ended(msgspec.Struct, frozen=True):
    """How a rank failed."""

    rank: int
    exitcode: int | None
    time: float
    signal: str | None = None


class _State(msgspec.Struct, frozen=True):
    """What is read of a host's state.json."""

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
    """What a host tells of a run, or its file here; of one that is damaged, that it is lost."""
    try:
        from_tree(told, _State)
    except msgspec.ValidationError:
        return GONE | {"lost": "what it says of the run is damaged"}
    return dict(told)


class BehindError(Exception):
    """Another program copies the same run, and the file changed under us: ask again from where it is now."""


class Copy(msgspec.Struct, frozen=True):
    """Which file a copy is of, and which it is."""

    there: str  # the identity that the host told
    here: int  # inode


class HostMirror:
    """The copy of one host's part of a run."""

    def __init__(self, rundir: RunDir, plan: Plan, name: str,
                 is_wanted_back: Callable[[], bool | None] = lambda: False) -> None:  # fmt: skip
        """`is_wanted_back`: should a host that went down begin again, now that it is there? None: nobody knows yet."""
        self.name, self._fleet = name, plan.fleet
        self._rundir, self.plan = rundir, plan.host(name)
        self._folder, self._is_wanted_back = self.plan.state_path(rundir).parent, is_wanted_back
        self.state: State | None = None  # as the host told it last
        # New ones: the host's time, what its processes did, and which machines do not answer it.
        self.seen: list[tuple[float, dict[int | None, Look], list[str]]] = []
        self.error: HostError | None = None  # while the host cannot be reached
        self.lost_since: float | None = None  # time.monotonic() of the first of these errors
        self.broken: Exception | None = None  # what keeps this machine from copying at all
        self.is_done = False
        self._times_back = 0
        self._stop = threading.Event()

    def follow(self, on_change: Callable[[], None]) -> None:
        """Copy until the run on this host has ended and everything is here; reconnect as often as it takes."""
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
            except Exception as error:  # a full disk here, for one; whoever follows is told
                self.broken, self.is_done = error, True
            if self.is_done:
                on_change()
                return

    @property
    def _went_down(self) -> bool:
        """Did the run end here because its host did, or was killed?"""
        state = self.state or {}
        return "lost" in state and "supervisor" in state and not state["stopped"]

    def _shall_begin_again(self) -> bool:
        """Once that is known, if it is in time."""
        until = time.monotonic() + UNHEARD_S
        while (is_wanted := self._is_wanted_back()) is None and time.monotonic() < until:
            if self._stop.wait(POLL_S):
                break
        return bool(is_wanted)

    def catch_up(self) -> None:
        """Copy once what the host has and is not here; HostError where it cannot be reached."""
        for attempt in range(3):
            try:
                with contextlib.closing(open_session(self.name, self.plan.host)) as session:
                    self._copy(session, until_end=False, on_change=lambda: None)
                return
            except BehindError:
                if attempt == 2:
                    return  # somebody else is copying, and quicker
            except RemoteError as error:
                raise host_failed(error, self._fleet) from None

    def stop(self) -> None:
        """Follow no more."""
        self._stop.set()

    def _copy(self, session: Session, *, until_end: bool, on_change: Callable[[], None]) -> None:
        pending: dict[str, Any] | None = None
        dirty = False
        have = None if self.plan.is_here else self._have()
        run = self.plan.folder(self._rundir)
        for item in session.stream("runs", "follow", run=run, have=have, until_end=until_end, timeout_s=SILENCE_S):
            if isinstance(item, bytes):
                assert pending is not None
                self._add(pending, item)
                pending, dirty = None, True
            elif "path" in item:
                pending = item if item["size"] else None
                if item["size"] == 0:
                    self._add(item, b"")
            elif "looks" in item:
                looks = {rank: from_tree(look, Look) for rank, look in item["looks"]}
                self.seen.append((item["at"], looks, item["stuck"]))
            else:
                was, self.state = self.state, state_of(item["caught_up"] or GONE)
                if self.error is not None or was != self.state or dirty:
                    self.error, self.lost_since, dirty = None, None, False
                    on_change()
            if self._stop.is_set():
                return

    def _have(self) -> dict[str, list[Any]]:
        """What is here: a file counts with the bytes that it really has."""
        with self._locked():
            return {
                path: [copy.there, local.stat().st_size]
                for path, copy in self._known().items()
                if (local := self._local(path)) is not None and self._is_ours(path, local, copy)
            }

    def _add(self, header: dict[str, Any], content: bytes) -> None:
        """Write what lies beyond the end of the copy; a file that is another one now takes the copy's place."""
        name, offset = header["path"], header["offset"]
        path = self._local(name)
        if path is None:
            return
        with self._locked():
            known = self._known()
            copy = known.get(name)
            is_same = copy is not None and copy.there == header["identity"] and self._is_ours(name, path, copy)
            here = path.stat().st_size if is_same else 0
            if offset > here:
                raise BehindError
            if not is_same:
                write_atomic(path, content, mode=0o600)  # under a new inode: who follows the old one sees that
                known[name] = Copy(header["identity"], path.stat().st_ino)
                write_atomic(self._known_path, msgspec.json.encode(known))
            elif name not in WHOLE and len(content) > here - offset:
                with path.open("ab") as file:
                    file.write(content[here - offset :])

    @staticmethod
    def _is_ours(name: str, path: Path, copy: Copy) -> bool:
        """Is this still the file that was copied here? The controller itself may write its verdict into a manifest."""
        return path.exists() and (name in WHOLE or path.stat().st_ino == copy.here)

    @property
    def _known_path(self) -> Path:
        return self._folder / "mirror.json"

    def _known(self) -> dict[str, Copy]:
        """The copies that are here."""
        try:
            return from_json(read_file(self._known_path), dict[str, Copy])
        except (OSError, msgspec.MsgspecError):
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Two terminals may look at one run. RunError where the run has left this host, or this folder of it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "mirror.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (now := _part(self._rundir, self.name)) is None or now.run != self.plan.run:
                raise RunError(
                    f"{self._rundir}: it was started again elsewhere; {self.name} has nothing more to tell of it",
                    hint=f"evener logs -f {self._rundir}",
                )
            yield

    def _local(self, path: str) -> Path | None:
        """Where a file of the host has its copy; None of what is not this host's to write."""
        if path == "events.jsonl":
            return self.plan.events_path(self._rundir)
        if path == "host/state.json":
            return self.plan.state_path(self._rundir)
        host, first = re.escape(self.name), self.plan.first_rank
        if path in OF_RANK_0 and self.plan.agent is not None:  # whoever comes first may be another tomorrow
            return self._folder / path
        ranked = re.fullmatch(
            rf"(?:(?:steps|spans|profile|replicas)/rank-|logs/{host}\.)(\d+)\.(?:jsonl?|log|safetensors)", path
        )
        is_ours = (
            first <= int(ranked[1]) < first + self.plan.num_ranks  # else of an earlier start, when that rank was here
            if ranked
            else path in (f"logs/{self.name}.log", f"vitals/{self.name}.jsonl")
            or (path in OF_RANK_0 and self.plan.node_rank == 0)
        )
        return self._rundir.path / path if is_ours else None


class Mirror:
    """The copies of all hosts, each followed by a thread of its own."""

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
        """Has the run ended on every host, and is everything here?"""
        return all(host.is_done for host in self.hosts.values())

    def _goes_on(self) -> bool | None:
        """Is it running on any host, so that who comes back takes part again? None: some have not been heard yet."""
        if not self.plan.outlives_hosts:
            return False
        states = [host.state for host in self.hosts.values() if host.error is None]
        if any(state is not None and state["state"] == "running" for state in states):
            return True
        return None if None in states else False

    def wait(self, timeout_s: float) -> None:
        """Return when there is news, or after a while."""
        self._changed.wait(timeout_s)
        self._changed.clear()
        choose_manifest(self.rundir, self.plan)

    def _tell(self) -> None:
        self._changed.set()


def _part(rundir: RunDir, host: str) -> HostPlan | None:
    """The part that a host has in the run now."""
    return next((one for one in read_plan(rundir).hosts if one.name == host), None)


def host_failed(error: RemoteError, fleet: Fleet) -> HostError:
    """A function on a host raised: its disk is full, a file there is damaged."""
    return HostError(
        f"{error.host}: {error.message}", check="host.failed", host=error.host,
        hint=f"evener doctor{fleet.flag} looks closer", output=error.traceback,
    )  # fmt: skip


def choose_manifest(rundir: RunDir, plan: Plan) -> None:
    """Of a run that outlives its hosts each keeps the manifest: that of the newest world is the run's."""
    if not plan.outlives_hosts:
        return
    found: list[tuple[tuple[int, bool], Path]] = []
    for folder in (*(host.state_path(rundir).parent for host in plan.hosts), rundir.path):  # the launcher writes there
        with contextlib.suppress(EvenerError):  # none yet, or a damaged one
            manifest = RunDir(folder).manifest()
            found.append(((manifest.roster.epoch, manifest.verdict != "running"), folder))
    if not found:
        return
    newest = max(order for order, _ in found)
    folder = next(folder for order, folder in found if order == newest)
    for name in OF_RANK_0:
        path, here = folder / name, rundir.path / name
        if path.exists() and not (here.exists() and here.read_bytes() == path.read_bytes()):
            write_atomic(here, path.read_bytes(), mode=0o600)


def merge_events(rundir: RunDir, plan: Plan) -> None:
    """RUN/events.jsonl: what it holds already and what the hosts and the controller told, by time."""
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
            at = lines[line] = event["time"] if event is not None else at  # what is damaged stays where it is
    if lines:
        write_atomic(rundir.events_path, b"".join(line + b"\n" for line in sorted(lines, key=lines.__getitem__)))


def tell(rundir: RunDir, plan: Plan, event: str, **facts: Any) -> None:
    """An event that the controller itself saw."""
    if plan.is_here:
        RunWriter(rundir.path).add_event(event, **facts)
        return
    folder = rundir.path / "hosts" / ".controller"
    folder.mkdir(parents=True, exist_ok=True)
    line = msgspec.json.encode({"event": event, "time": time.time()} | facts) + b"\n"
    with (folder / "events.jsonl").open("ab") as file:
        file.write(line)
    merge_events(rundir, plan)
