"""Launch, query and stop a run: each host runs a supervisor that needs no controller afterwards.

A run on this machine alone is launched the same way, but nothing is sent or copied, and it may be attached to the
program that started it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.errors import CheckpointError, HostError, NoRoomError, RunError, UsageError
from evener.core.base.file_io import lock_file, make_folder, read_file
from evener.core.base.shell import quote_word
from evener.core.base.units import format_bytes
from evener.core.cluster.finding import Finding
from evener.core.run.membership_epoch import (
    CHECKPOINT_REQUEST_FILE,
    CONSENSUS_STATE_FILE,
    EXCLUDED_FILE,
    EXIT_HOST_LEFT,
    KILLED_RANKS_FILE,
    NEEDED_BYTES_FILE,
    memory_limit_file,
)
from evener.core.run.run_plan import (
    CLUSTER_FILE,
    HostPlan,
    Plan,
    read_plan_text,
    restore_plan,
    write_plan,
)
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.core.run.trust import is_foreign_run
from evener.launch.root_cause import RunFailure, first_failure
from evener.node.remote import bundle
from evener.ssh.session import RemoteError, Session, Sessions, open_run_session, parallel_map
from evener.transfer.file_transfer import REMOTE_WORK_TIMEOUT_S, send_to_hosts
from evener.transfer.file_tree import FileTree
from evener.transfer.mirror import (
    GONE_STATE,
    HostMirror,
    SupervisorState,
    choose_manifest,
    merge_events,
    parse_state,
    record_controller_event,
    to_host_error,
)

STOP_TIMEOUT_S = 600.0
NOT_CONTACTED = "not contacted"  # the state of a run that came from elsewhere and may still be running

Notify = Callable[[str], None]


def stage_files(trees: list[FileTree], plan: Plan, sessions: Sessions, notify: Notify) -> None:
    """Send the blobs that the hosts lack, and update the project's folder on each."""
    for tree in trees:
        for name, arrived in send_to_hosts(sessions, plan.fleet, tree).items():
            if arrived.sent_bytes:
                notify(f"{format_bytes(arrived.sent_bytes)} sent to {name}")

    def sync(name: str) -> list[int]:
        host = plan.host(name)
        try:
            if host.code is not None:
                return list(
                    sessions[name].call(
                        "project_sync", "sync", tree=host.code, folder=host.cwd, timeout_s=REMOTE_WORK_TIMEOUT_S
                    )
                )
        except RemoteError as error:
            raise to_host_error(error, plan.fleet) from None
        return []

    for name, pids in parallel_map([host.name for host in plan.hosts], sync).items():
        if pids:
            notify(f"warning: {name}: another run of this project is active there (pid {pids[0]}): its changed files "
                "were replaced under that run too")  # fmt: skip


def start(
    rundir: RunDir,
    plan: Plan,
    sessions: Sessions,
    *,
    attached: bool = False,
    passed_env: Mapping[str, str] = MappingProxyType({}),
) -> contextlib.AbstractContextManager[object]:
    """Start the run on all hosts. If one cannot start, stop the others and raise a RunError that names it.

    `passed_env` holds the values of the plan's variables of that name. An attached run (on this machine alone) lasts as
    long as the returned lock: when it is closed, at the latest when this program ends for any reason, the ranks save
    and exit.
    """
    is_new, previous_text = not rundir.path.exists(), read_plan_text(rundir)
    attach_lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    try:
        make_folder(rundir.path)
        if attached:
            attach_lock = _take_attach_lock(rundir)
        write_plan(rundir, plan)
        if not plan.is_local_run:
            for host in plan.hosts:  # the state of an earlier start, after which the run would seem to have ended
                host.supervisor_state_path(rundir).unlink(missing_ok=True)
    except BlockingIOError:
        raise RunError(
            f"{rundir}: this run is running here already", hint=f"evener logs -f {quote_word(rundir)}"
        ) from None
    except (OSError, UsageError, CheckpointError) as problem:
        attach_lock.__exit__(None, None, None)
        if is_new:
            shutil.rmtree(rundir.path, ignore_errors=True)
        if isinstance(problem, OSError):
            full = NoRoomError.from_os_error(problem)
            raise full or UsageError(f"{rundir}: {problem.strerror}", hint="another --out") from None
        raise

    def start_one(name: str) -> str | None:
        return start_on_host(rundir, plan, name, sessions[name], attached=attached, passed_env=passed_env)

    def undo(names: list[str]) -> None:
        """Stop the hosts that were started, and restore the run directory."""
        stopped = stop(rundir, msgspec.structs.replace(plan, hosts=[plan.host(name) for name in names]), now=True)
        if is_new and not any(isinstance(result, HostError) for result in stopped.values()):
            shutil.rmtree(rundir.path)
        elif previous_text is not None:
            restore_plan(rundir, previous_text)

    names = [host.name for host in plan.hosts]
    try:
        results = parallel_map(names, start_one)
    except KeyboardInterrupt:
        undo(names)
        raise
    failed = {name: error for name, error in results.items() if error is not None}
    if failed:
        undo([name for name in names if name not in failed])
        name, error = next(iter(failed.items()))
        raise RunError(
            f"the run did not start on {name}: {error}", hint=f"evener doctor{plan.fleet.cli_flag} looks closer"
        )
    record_controller_event(rundir, plan, "launched", hosts=names, world_size=plan.world_size)
    return attach_lock


def start_on_host(
    rundir: RunDir,
    plan: Plan,
    name: str,
    session: Session,
    *,
    attached: bool = False,
    passed_env: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Start a host's part of the run. Return None, or the reason if it does not start."""
    host = plan.host(name)
    spec = plan.supervisor_spec(name, attached=_attach_lock_path(rundir) if attached else None)
    rank_files = [memory_limit_file(local_rank) for local_rank in range(host.num_ranks)]
    stale_files = (
        CLUSTER_FILE,
        CONSENSUS_STATE_FILE,
        NEEDED_BYTES_FILE,
        EXCLUDED_FILE,
        KILLED_RANKS_FILE,
        CHECKPOINT_REQUEST_FILE,
        *rank_files,
    )
    files = dict.fromkeys(stale_files, None) | plan.membership_files(name)
    if plan.prediction is not None and plan.spec is not None and plan.spec.train.sync == "auto":
        files[CLUSTER_FILE] = msgspec.json.encode(plan.prediction.cluster).decode()
    try:
        session.call("run_control", "start", run=host.run_folder(rundir), spec=spec, supervisor=bundle("supervisor"),
                     files=files, passed_env={variable: passed_env[variable] for variable in host.passed_env},
                     timeout_s=REMOTE_WORK_TIMEOUT_S)  # fmt: skip
    except RemoteError as error:
        return error.message
    except HostError as error:
        session.close()  # and with it the call that may still be running there
        return str(error)
    return None


def _take_attach_lock(rundir: RunDir) -> contextlib.AbstractContextManager[object]:
    """Take the lock that ties the run to this program; the kernel releases it however the program ends."""
    path = _attach_lock_path(rundir)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return lock_file(path, is_blocking=False)


def _attach_lock_path(rundir: RunDir) -> Path:
    return rundir.inside("host", "attached").absolute()


def record_preflight_warnings(rundir: RunDir, plan: Plan, warnings: Sequence[Finding]) -> None:
    """Record the preflight's warnings as events, so that a later report knows that a host was swapping."""
    for finding in warnings:
        facts = {"host": finding.host, "peer": finding.peer, "evidence": finding.evidence, "fix": finding.fix}
        record_controller_event(rundir, plan, finding.check, **facts)


def record_outcome(rundir: RunDir, plan: Plan, ended: Mapping[str, SupervisorState]) -> RunFailure | None:
    """Record how the run ended, from the hosts' last states, and return its first failure."""
    failure = first_failure(rundir, plan, ended)
    was_stopped = any(state.get("stopped") for state in ended.values())
    if plan.kind == "launch":  # its ranks cannot know how the others end
        close_manifest(rundir, "failed" if failure else "stopped" if was_stopped else "finished", is_certain=True)
    elif failure is None:
        close_manifest(rundir, "stopped")
    if failure is not None:
        _record_failure(rundir, plan, failure)
    return failure


def close_manifest(rundir: RunDir, verdict: str, *, is_certain: bool = False) -> None:
    """Write the verdict into the manifest if rank 0 could no longer do so or, if it `is_certain`, wrote another."""
    manifest = rundir.manifest() if rundir.is_run() else None
    if manifest is not None and (manifest.verdict == "running" or (is_certain and manifest.verdict != verdict)):
        ended = msgspec.structs.replace(manifest, verdict=verdict, ended=manifest.ended or time.time())
        RunWriter(rundir.path).write_manifest(ended)


def stop(rundir: RunDir, plan: Plan, *, now: bool = False) -> dict[str, SupervisorState | HostError]:
    """Stop the run on every host; return when no process of it is left on the reachable ones."""

    def end(session: Session, host: HostPlan) -> SupervisorState:
        state: SupervisorState = {}
        for item in session.stream(
            "run_control", "stop", run=host.run_folder(rundir), now=now, timeout_s=STOP_TIMEOUT_S
        ):
            state = item or GONE_STATE
        return parse_state(state)

    return _query_hosts(rundir, plan, end)


def stop_and_record(rundir: RunDir, plan: Plan, *, now: bool = False) -> dict[str, SupervisorState | HostError]:
    """Stop the run, mirror its last records, and record how it ended if all hosts were reached."""
    stopped = stop(rundir, plan, now=now)
    mirror_once(rundir, plan)
    ended = {name: state for name, state in stopped.items() if not isinstance(state, HostError)}
    if len(ended) == len(stopped):
        record_outcome(rundir, plan, ended)
    return stopped


def request_checkpoint(rundir: RunDir, plan: Plan) -> None:
    """Request a checkpoint after the next steps, through the first reachable host that takes part.

    Raises the last host's error if none can be reached.
    """
    training_hosts = set(rundir.manifest().roster.hosts)
    for host in [host for host in plan.hosts if host.name in training_hosts] or plan.hosts:
        try:
            with contextlib.closing(open_run_session(rundir, host)) as session:
                session.call("run_control", "put", run=host.run_folder(rundir), files={CHECKPOINT_REQUEST_FILE: ""})
            return
        except RemoteError as error:
            last_error = to_host_error(error, plan.fleet)
        except HostError as error:
            last_error = error
    raise last_error


def query_states(rundir: RunDir, plan: Plan) -> dict[str, SupervisorState | HostError]:
    """Query every host for the state of the run."""
    return _query_hosts(
        rundir,
        plan,
        lambda session, host: parse_state(
            session.call("run_control", "status", run=host.run_folder(rundir)) or GONE_STATE
        ),
    )


def cached_states(rundir: RunDir, plan: Plan) -> dict[str, SupervisorState]:
    """Return the last mirrored state of every host, without a query."""
    cached = {}
    for host in plan.hosts:
        try:
            cached[host.name] = parse_state(from_json(read_file(host.supervisor_state_path(rundir)), dict[str, Any]))
        except (OSError, msgspec.MsgspecError):  # missing or damaged: its host is queried again
            cached[host.name] = {}
    return cached


def query_run_state(rundir: RunDir, plan: Plan) -> tuple[dict[str, str], str]:
    """Return ({host: state}, state of the run); query the hosts unless all are recorded as ended.

    The hosts of a run that came from elsewhere are not queried.
    """
    states = cached_states(rundir, plan)
    if any(state.get("state") != "ended" for state in states.values()):
        if is_foreign_run(rundir):
            hosts = {name: _host_state(state) if state.get("state") == "ended" else NOT_CONTACTED
                     for name, state in states.items()}  # fmt: skip
            return hosts, NOT_CONTACTED
        answers = query_states(rundir, plan)
        states = {
            name: {"state": "unreachable"} if isinstance(answer, HostError) else answer
            for name, answer in answers.items()
        }
        if not any(isinstance(answer, HostError) for answer in answers.values()):
            mirror_once(rundir, plan)
    hosts = {name: _host_state(state) for name, state in states.items()}
    worst = ["failed", "running", "unreachable", "lost"]
    if plan.has_dynamic_membership:  # the run continues without a host that has left or failed
        worst = ["running", "finished", "stopped", *worst]
    values = list(hosts.values())
    return hosts, next((value for value in worst if value in values), values[0])


def mirror_once(rundir: RunDir, plan: Plan) -> dict[str, HostError]:
    """Mirror all hosts once; return the errors of those that could not be reached."""

    def copy(name: str) -> HostError | None:
        try:
            HostMirror(rundir, plan, name).copy_once()
        except HostError as error:
            return error
        return None

    copied = parallel_map([host.name for host in plan.hosts], copy)
    merge_events(rundir, plan)
    choose_manifest(rundir, plan)
    return {name: error for name, error in copied.items() if error is not None}


def _query_hosts(
    rundir: RunDir, plan: Plan, query: Callable[[Session, HostPlan], SupervisorState]
) -> dict[str, SupervisorState | HostError]:
    def ask(name: str) -> SupervisorState | HostError:
        host = plan.host(name)
        try:
            with contextlib.closing(open_run_session(rundir, host)) as session:
                return query(session, host)
        except RemoteError as error:
            return to_host_error(error, plan.fleet)
        except HostError as error:
            return error

    return parallel_map([host.name for host in plan.hosts], ask)


def _record_failure(rundir: RunDir, plan: Plan, failure: RunFailure) -> None:
    """Record the failure in the events, once for each start, and in the manifest if rank 0 could no longer do so."""
    since_start: list[str] = []
    for event in rundir.events():
        since_start = [] if event["event"] in ("launched", "world") else [*since_start, event["event"]]
    if "failure" not in since_start:
        record_controller_event(
            rundir, plan, "failure", host=failure.host, rank=failure.rank, kind="exit", error=failure.message,
            hint=failure.hint, output=failure.output,
        )  # fmt: skip
    close_manifest(rundir, "failed")


def _host_state(state: SupervisorState) -> str:
    if state.get("lost"):
        return "lost"
    if state.get("state") == "ended":
        ended = {0: "finished", EXIT_HOST_LEFT: "left"}
        return "stopped" if state.get("stopped") else ended.get(state.get("status") or 0, "failed")
    return str(state.get("state", "started"))
