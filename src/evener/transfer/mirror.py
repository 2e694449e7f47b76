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
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.decoding import from_builtins, from_json
from evener.core.base.errors import CheckpointError, EvenerError, HostError, NoRoomError, RunError, UsageError
from evener.core.base.file_io import append_bytes, lock_file, read_file, read_lines, write_atomic
from evener.core.base.shell import quote_word
from evener.core.cluster.fleet_file import Fleet
from evener.core.model.corpus import TOKENIZER_FILES
from evener.core.run.hang_detector import ProcessSample
from evener.core.run.run_plan import Plan, read_plan
from evener.core.run.rundir import RunDir, parse_event
from evener.core.run.runwriter import RunWriter
from evener.node.remote import bundle
from evener.ssh.session import RemoteError, Session, open_run_session
from evener.transfer.file_transfer import REMOTE_WORK_TIMEOUT_S

RECONNECT_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
POLL_S, FIRST_STATE_TIMEOUT_S = 0.1, 60.0  # to wait for the states of other hosts
MAX_RESTARTS = 20  # restarts in a row of a host that goes down each time before it has trained
STREAM_TIMEOUT_S = 12.0  # a following host streams several items a second

RANK_0_FILES = ("manifest.json", *TOKENIZER_FILES)
REPLACED_FILES = (*RANK_0_FILES, "host/state.json")  # replaced on the host, not appended to: copied whole

SupervisorState = dict[str, Any]
GONE_STATE: SupervisorState = {
    "state": "ended",
    "status": None,
    "failures": [],
    "stopped": False,
    "lost": "its run folder is gone",
}


class _RankExit(msgspec.Struct, frozen=True):
    """The exit of a failed rank."""

    rank: int
    exitcode: int | None
    time: float
    signal: str | None = None


class _SupervisorStateFile(msgspec.Struct, frozen=True):
    """The fields that are validated in a host's state.json."""

    state: str
    status: int | None = None
    signal: str | None = None
    stopped: bool = False
    failures: list[_RankExit] = []
    started: float | None = None
    ended: float | None = None
    oom_at: float | None = None
    full_at: float | None = None


def parse_state(received: Any) -> SupervisorState:
    """Return the supervisor state received from a host or read from its file here; a lost state if it is malformed."""
    try:
        from_builtins(received, _SupervisorStateFile)
    except msgspec.ValidationError:
        return GONE_STATE | {"lost": "its state of the run is damaged"}
    return dict(received)


class StaleOffsetError(Exception):
    """Another program copies the same run and changed the file: request it again from its new end."""


class MirroredFile(msgspec.Struct, frozen=True):
    """The identities of a file on the host and of its copy here."""

    there: str  # identity of the file on the host
    here: int  # inode of the copy


class HostMirror:
    """Copies one host's part of a run."""

    def __init__(self, rundir: RunDir, plan: Plan, name: str,
                 should_restart: Callable[[], bool | None] = lambda: False) -> None:  # fmt: skip
        """`should_restart` returns whether to restart a host that went down and is back; None: not known yet."""
        self.name, self._run_plan = name, plan
        self._rundir, self.plan, self._is_restart_wanted = rundir, plan.host(name), should_restart
        self.state: SupervisorState | None = None  # the last one received
        # Not consumed yet: the host's time, a sample of its processes, and the addresses that do not answer it.
        self.process_samples: list[tuple[float, dict[int | None, ProcessSample], list[str]]] = []
        self.error: HostError | None = None  # while the host cannot be reached
        self.unreachable_since: float | None = None  # time.monotonic() of the first of these errors
        self.local_error: Exception | None = None  # why this machine cannot write the copies
        self.is_done = False
        self._num_restarts = 0
        self._stop = threading.Event()

    def follow(self, on_change: Callable[[], None]) -> None:
        """Copy until the run on this host has ended and everything is copied; reconnect as often as necessary."""
        failures = 0
        while not self._stop.is_set():
            try:
                with contextlib.closing(open_run_session(self._rundir, self.plan)) as session:
                    self._copy(session, until_end=True, on_change=on_change)
                    if self._has_gone_down and self._num_restarts < MAX_RESTARTS and self._should_restart():
                        self._num_restarts += 1
                        self.state = restart_on_host(self._rundir, read_plan(self._rundir), self.name, session)
                        continue
                self.is_done = True
            except (HostError, RemoteError) as error:
                failures = 0 if self.error is None else failures + 1
                self.error = error if isinstance(error, HostError) else to_host_error(error, self._run_plan.fleet)
                self.unreachable_since = self.unreachable_since or time.monotonic()
                on_change()
                self._stop.wait(RECONNECT_BACKOFF_S[min(failures, len(RECONNECT_BACKOFF_S) - 1)])
            except StaleOffsetError:
                continue
            except Exception as error:  # such as a full disk here; the follower reports it
                self.local_error, self.is_done = error, True
            if self.is_done:
                on_change()
                return

    @property
    def _has_gone_down(self) -> bool:
        """Return whether the run ended on this host because the host went down or the supervisor was killed."""
        state = self.state or {}
        return "lost" in state and "supervisor" in state and not state["stopped"]

    def _should_restart(self) -> bool:
        """Return whether to restart the host; wait up to `FIRST_STATE_TIMEOUT_S` for the states that decide it."""
        deadline = time.monotonic() + FIRST_STATE_TIMEOUT_S
        while (is_wanted := self._is_restart_wanted()) is None and time.monotonic() < deadline:
            if self._stop.wait(POLL_S):
                break
        return bool(is_wanted)

    def copy_once(self) -> None:
        """Copy once what is new on the host.

        HostError if it cannot be reached, RunError or NoRoomError if nothing can be written here.
        """
        for attempt in range(3):
            try:
                with contextlib.closing(open_run_session(self._rundir, self.plan)) as session:
                    self._copy(session, until_end=False, on_change=lambda: None)
                return
            except StaleOffsetError:
                if attempt == 2:
                    return  # another program copies it faster
            except RemoteError as error:
                raise to_host_error(error, self._run_plan.fleet) from None
            except OSError as error:
                raise self.unwritable_error(error) from None

    def unwritable_error(self, error: Exception) -> EvenerError:
        """Return the error that says why the host's records cannot be written on this machine."""
        if isinstance(error, EvenerError) and not isinstance(error, NoRoomError):
            return error
        full = NoRoomError.from_os_error(error) if isinstance(error, OSError) else None
        return (NoRoomError if full else RunError)(
            f"the records of {self.name} cannot be written here: {full or error}",
            hint=f"the run goes on; evener logs -f {quote_word(self._rundir)} follows it again",
        )

    def stop(self) -> None:
        """Stop following."""
        self._stop.set()

    def _copy(self, session: Session, *, until_end: bool, on_change: Callable[[], None]) -> None:
        pending: dict[str, Any] | None = None
        dirty = False
        offsets = None if self.plan.is_local_run else self._copied_offsets()
        run = self.plan.run_folder(self._rundir)
        for item in session.stream(
            "run_control", "follow", run=run, have=offsets, until_end=until_end, timeout_s=STREAM_TIMEOUT_S
        ):
            if isinstance(item, bytes):
                assert pending is not None
                self._append(pending, item)
                if pending["path"].startswith("steps/"):
                    self._num_restarts = 0
                pending, dirty = None, True
            elif "path" in item:
                pending = item if item["size"] else None
                if item["size"] == 0:
                    self._append(item, b"")
            elif "looks" in item:
                looks = {rank: from_builtins(sample, ProcessSample) for rank, sample in item["looks"]}
                self.process_samples.append((item["at"], looks, item["stuck"]))
            else:
                previous, self.state = self.state, parse_state(item["caught_up"] or GONE_STATE)
                if self.error is not None or previous != self.state or dirty:
                    self.error, self.unreachable_since, dirty = None, None, False
                    on_change()
            if self._stop.is_set():
                return

    def _copied_offsets(self) -> dict[str, list[Any]]:
        """Return [identity, size in bytes] of every copy, by path; the size is that of the file on disk."""
        with self._locked():
            return {
                path: [copy.there, local_path.stat().st_size]
                for path, copy in self._read_copies().items()
                if (local_path := self.local_path(path)) is not None and self._is_own_copy(path, local_path, copy)
            }

    def _append(self, header: dict[str, Any], content: bytes) -> None:
        """Append what lies beyond the end of the copy; replace the copy if the host's file is a different one now."""
        name, offset = header["path"], header["offset"]
        path = self.local_path(name)
        if path is None:
            return
        with self._locked():
            copies = self._read_copies()
            copy = copies.get(name)
            is_same = copy is not None and copy.there == header["identity"] and self._is_own_copy(name, path, copy)
            copied_bytes = path.stat().st_size if is_same else 0
            if offset > copied_bytes:
                raise StaleOffsetError
            if not is_same:
                write_atomic(path, content, mode=0o600)  # under a new inode, which followers of the old one detect
                copies[name] = MirroredFile(header["identity"], path.stat().st_ino)
                write_atomic(self._copies_path, msgspec.json.encode(copies))
            elif name not in REPLACED_FILES and len(content) > copied_bytes - offset:
                append_bytes(path, content[copied_bytes - offset :])

    @staticmethod
    def _is_own_copy(name: str, path: Path, copy: MirroredFile) -> bool:
        """Return whether this is still the copied file. (The controller may write a verdict into a manifest.)"""
        return path.exists() and (name in REPLACED_FILES or path.stat().st_ino == copy.here)

    @property
    def _copies_path(self) -> Path:
        return self._rundir.inside("hosts", self.name, "mirror.json")

    def _read_copies(self) -> dict[str, MirroredFile]:
        """Read mirror.json; empty if it is missing or damaged."""
        try:
            return from_json(read_file(self._copies_path), dict[str, MirroredFile])
        except (OSError, msgspec.MsgspecError):
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the copies, as two terminals may follow one run. RunError if the run was restarted without this host."""
        with lock_file(self._rundir.inside("hosts", self.name, "mirror.lock"), is_blocking=True):
            parts = [(host.name, host.run) for host in read_plan(self._rundir).hosts]
            if (self.name, self.plan.run) not in parts:
                raise RunError(
                    f"{self._rundir}: the run was restarted; its earlier part on {self.name} is no longer copied",
                    hint=f"evener logs -f {quote_word(self._rundir)}",
                )
            yield

    def local_path(self, path: str) -> Path | None:
        """Return where a file of the host is copied to; None for a file that this host may not write."""
        if path == "events.jsonl":
            return self.plan.events_path(self._rundir)
        if path == "host/state.json":
            return self.plan.supervisor_state_path(self._rundir)
        host, first = re.escape(self.name), self.plan.first_rank
        if path in RANK_0_FILES and self.plan.agent is not None:  # the first host may change
            return self._rundir.inside("hosts", self.name, path)
        rank_match = re.fullmatch(
            rf"(?:(?:steps|spans|profile|replicas)/rank-|logs/{host}\.)(\d+)\.(?:jsonl?|log|safetensors)", path
        )
        is_ours = (
            first <= int(rank_match[1]) < first + self.plan.num_ranks  # else of an earlier start, with it here
            if rank_match
            else path in (f"logs/{self.name}.log", f"vitals/{self.name}.jsonl")
            or (path in RANK_0_FILES and self.plan.node_rank == 0)
        )
        return self._rundir.inside(path) if is_ours else None


class RunMirror:
    """Copies the parts of all hosts, each in its own thread."""

    def __init__(self, rundir: RunDir, plan: Plan) -> None:
        self.rundir, self.plan = rundir, plan
        self.hosts = {host.name: HostMirror(rundir, plan, host.name, self._is_run_alive) for host in plan.hosts}
        self._changed = threading.Event()
        self._threads = [
            threading.Thread(target=host.follow, args=(self._changed.set,), daemon=True) for host in self.hosts.values()
        ]

    def __enter__(self) -> RunMirror:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for host in self.hosts.values():
            host.stop()
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        try:
            merge_events(self.rundir, self.plan)
            choose_manifest(self.rundir, self.plan)
        except OSError:
            if kind is None:
                raise  # else the error that ends the block reports the full disk

    @property
    def is_done(self) -> bool:
        """Return whether the run has ended on every host and everything is copied."""
        return all(host.is_done for host in self.hosts.values())

    def _is_run_alive(self) -> bool | None:
        """Return whether the run is alive on any host, so that a host that is back rejoins; None: not known yet."""
        if not self.plan.has_dynamic_membership:
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


def restart_on_host(rundir: RunDir, plan: Plan, name: str, session: Session) -> SupervisorState:
    """Restart the run on a host that went down or left; return its state. RemoteError if it does not start.

    What is started comes from the plan and from this evener, not from the files of an earlier start on the host.
    """
    state: SupervisorState = session.call(
        "run_control", "restart_run", run=plan.host(name).run_folder(rundir), spec=plan.supervisor_spec(name),
        supervisor=bundle("supervisor"), files=plan.membership_files(name), timeout_s=REMOTE_WORK_TIMEOUT_S,
    )  # fmt: skip
    return state


def to_host_error(error: RemoteError, fleet: Fleet) -> HostError:
    """Convert an exception raised on a host (a full disk, a damaged file) to a HostError."""
    return HostError(
        f"{error.host}: {error.message}", check="host.failed", host=error.host,
        hint=f"evener doctor{fleet.cli_flag} looks closer", output=error.traceback,
    )  # fmt: skip


def choose_manifest(rundir: RunDir, plan: Plan) -> None:
    """Install the manifest of the newest epoch as the run's: with dynamic membership, each host writes one."""
    if not plan.has_dynamic_membership:
        return
    candidates: list[tuple[tuple[int, bool], Path]] = []
    # the launcher writes there
    for folder in (*(host.supervisor_state_path(rundir).parent for host in plan.hosts), rundir.path):
        with contextlib.suppress(EvenerError):  # none yet, or a damaged one
            manifest = RunDir(folder).manifest()
            candidates.append(((manifest.roster.epoch, manifest.verdict != "running"), folder))
    if not candidates:
        return
    newest = max(order for order, _ in candidates)
    folder = next(folder for order, folder in candidates if order == newest)
    for name in RANK_0_FILES:
        path, target = RunDir(folder).inside(name), rundir.inside(name)
        if path.exists() and not (target.exists() and read_file(target) == read_file(path)):
            write_atomic(target, read_file(path), mode=0o600)


def merge_events(rundir: RunDir, plan: Plan) -> None:
    """Merge the events of all hosts and of the controller into RUN/events.jsonl, by time."""
    if plan.is_local_run:
        return
    lines: dict[bytes, float] = {}
    for path in (rundir.events_path, *rundir.glob("hosts/*/events.jsonl")):
        try:
            complete = [*read_lines(path)] if path.exists() else []
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None
        at = 0.0
        for line in complete:
            event = parse_event(line)
            at = lines[line] = event["time"] if event is not None else at  # a damaged line keeps its place
    if lines:
        write_atomic(rundir.events_path, b"".join(line + b"\n" for line in sorted(lines, key=lines.__getitem__)))


def record_controller_event(rundir: RunDir, plan: Plan, event: str, **facts: Any) -> None:
    """Record an event that the controller itself detected."""
    if plan.is_local_run:
        RunWriter(rundir.path).add_event(event, **facts)
        return
    line = msgspec.json.encode({"event": event, "time": time.time()} | facts) + b"\n"
    path = rundir.inside("hosts", ".controller", "events.jsonl")
    try:
        append_bytes(path, line)
    except OSError as error:
        raise NoRoomError.from_os_error(error) or UsageError(f"{path}: {error.strerror}") from None
    merge_events(rundir, plan)
