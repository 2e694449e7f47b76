"""Find the root cause of a failed run: when one rank dies, others fail because of it, often louder, on other hosts.

A rank that reported its error itself comes first; then an independent failure of a rank or a host; and last a rank
that only lost its peers. If all that is known is a launcher's exit status or a lost peer, as after a start that failed
again and again, the first error in the logs of all ranks and hosts is added.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from evener.core.base import errors
from evener.core.base.decoding import from_json
from evener.core.base.errors import EvenerError, RunError, UsageError
from evener.core.base.file_io import open_file, read_last_lines
from evener.core.base.shell import quote_word
from evener.core.run.membership_epoch import EXIT_DISK_FULL, EXIT_HOST_LEFT, EXIT_RUN_FAILED, EXIT_TERMINATED
from evener.core.run.peer_failure import PEER_FAILURE_PATTERN
from evener.core.run.run_plan import HostPlan, Plan
from evener.core.run.rundir import RunDir
from evener.core.script.call_ring import RankCalls
from evener.core.script.mismatch import SAME_CALL_HINT, find_mismatch
from evener.launch.script.python_traceback import PrintedException, last_exception
from evener.launch.script.script_hints import gpu_required_line, script_failure_hint
from evener.transfer.mirror import SupervisorState

SHOWN_LINES = 15  # lines of a log that are shown
TAIL_BYTES = 4 << 20  # of a log, in which its last lines are
STDERR_LINES = 2000  # searched for a traceback: what a program had buffered for stdout follows it
SEARCHED_LINES = 200  # a C++ stack is printed below its error message
PARTITION_PATTERN = re.compile(r"^evener: ending the ranks on \S+: (nothing was heard of .*|the store on \S+ is gone)")
# The line with which Python, libstdc++, or evener itself ends a program that failed.
PRINTED_ERROR_PATTERN = re.compile(
    r"(\[rank\d+\]: )?(error: |([\w.]+\.)?\w*(Error|Exception): |SystemExit: |Fatal Python error: |terminate called )"
)
MAX_ERROR_CHARS = 300
STOP_RACE_S = 10.0  # a failure this long before a stop was not caused by it; host clocks differ
DISK_FULL_PATTERN = re.compile("No space left on device|Disk quota exceeded")
DISK_CHECK_S = 5.0  # between a rank's exit and the next check of the disk
OOM_CHECK_S = 10.0  # between a check of the kernel's counter and a rank's exit

OOM_HINT = (
    "use less memory there: a smaller --micro-batch, --recompute, fewer ranks; evener plan shows what a rank needs"
)


class RunFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure of a rank, or of a host or its launcher."""

    host: str
    rank: int | None  # None: the host itself or its launcher
    message: str  # "rank 1 on b was killed by SIGKILL"
    time: float
    log: Path
    run_started_at: float  # start of this attempt; earlier lines of the log are of earlier ones
    is_independent: bool  # not a consequence of another failure
    hint: str = ""
    error_type: type[EvenerError] = RunError  # or the UsageError of a wrong request

    @property
    def output(self) -> str:
        """Return the traceback in its log, or else the last lines; empty if a hint explains the failure."""
        if self.hint:
            return ""
        # Of a rank that was killed, an earlier traceback says nothing.
        is_exit = "exited with status" in self.message
        exception = _printed_exception(self.log, self.run_started_at) if is_exit else None
        return "\n".join(exception.traceback if exception else tail_log(self.log, SHOWN_LINES, self.run_started_at))

    def to_error(self, rundir: RunDir, plan: Plan) -> EvenerError:
        """Return the error to raise, with a hint on how to continue."""
        if self.error_type is not RunError:
            return self.error_type(self.message, hint=self.hint)
        hint = self.hint or f"its whole output: {self.log}"
        if plan.kind == "launch":
            lines = tail_log(self.log, SEARCHED_LINES, self.run_started_at)
            fleet = None if plan.is_local_run else plan.fleet
            hint = script_failure_hint(lines, self.host, plan.project, fleet) or hint
        local_steps, saved_step = rundir.checkpoint_steps(), rundir.last_saved_step()
        if plan.kind == "train" and local_steps and "--resume" not in hint:
            hint += f"; evener train --resume {quote_word(rundir)} goes on from step {local_steps[-1]}"
        if not plan.is_local_run and saved_step is not None and saved_step not in local_steps:
            hint += f"; step {saved_step} was saved on {plan.hosts[0].name} alone: evener fetch {quote_word(rundir)}"
        return RunError(self.message, hint=hint, output=self.output)


def first_failure(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState]) -> RunFailure | None:
    """Return the first failure, from the hosts' last states; None if the run did not fail, or was stopped."""
    if _was_stopped(plan, states):
        return None
    failures = [*_rank_failures(rundir, plan, states), *_host_failures(rundir, plan, states)]
    if not failures or _has_training_finished(rundir, plan, states):
        return None
    if reported := _reported_failure(rundir, plan, states):
        return reported
    first = min(failures, key=lambda failure: (not failure.is_independent, failure.time))
    if plan.kind == "launch" and (mismatch := _collective_mismatch(rundir, plan, states, first)) is not None:
        return mismatch
    is_explained = first.hint or (first.is_independent and first.rank is not None)
    if is_explained or (printed := _first_printed_error(rundir, plan, states)) is None:
        return first
    log, error = printed
    return msgspec.structs.replace(first, message=f"{first.message}; the first error, in {log.name}: {error}", log=log)


def _collective_mismatch(
    rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState], first: RunFailure
) -> RunFailure | None:
    """Return the failure of ranks that called different collectives, from what they called last; None if they agree.

    A rank that ended its program explains a failure only of a rank that lost a peer.
    """
    calls: dict[int, RankCalls] = {}
    for event in rundir.events():
        if event["event"] == "collectives" and event["time"] >= min(map(_started_at, states.values())):
            with contextlib.suppress(msgspec.MsgspecError):  # damaged
                calls |= from_json(msgspec.json.encode(event.get("ranks")), dict[int, RankCalls])
    mismatch = find_mismatch({rank: known for rank, known in calls.items() if 0 <= rank < plan.world_size})
    if mismatch is None or (mismatch.other_call is None and first.is_independent):
        return None
    host = plan.host_of_rank(mismatch.rank).name
    return msgspec.structs.replace(
        first,
        host=host,
        rank=mismatch.rank,
        message=f"rank {mismatch.rank} on {host} {mismatch.describe()}; {first.message}",
        hint=SAME_CALL_HINT,
    )


def _first_printed_error(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState]) -> tuple[Path, str] | None:
    """Return (log, line) of the first error that a rank or launcher of any host printed since the run's start."""
    found: list[tuple[str, Path, str]] = []
    for host in plan.hosts:
        since = _format_timestamp(_started_at(states.get(host.name, {})))
        ranks = range(host.first_rank, host.first_rank + host.num_ranks)
        for log in {host.log_path(rundir), *(rundir.log_path(host.name, rank) for rank in ranks)}:
            with contextlib.suppress(OSError), open_file(log) as lines:
                for line in lines:
                    timestamp, _, text = [*line.decode(errors="replace").rstrip("\n").split(" ", 2), "", ""][:3]
                    is_error = PRINTED_ERROR_PATTERN.match(text) and not PEER_FAILURE_PATTERN.search(text)
                    if timestamp >= since and is_error:
                        found.append((timestamp, log, text[:MAX_ERROR_CHARS]))
                        break
    return min(found)[1:] if found else None


def has_exited_cleanly(host: HostPlan, state: SupervisorState) -> bool:
    """Return whether the run ended successfully on this host, or the host left it."""
    return state.get("status") == 0 or (host.agent is not None and state.get("status") == EXIT_HOST_LEFT)


def _was_stopped(plan: Plan, states: Mapping[str, SupervisorState]) -> bool:
    """Return whether the run was stopped on request, rather than after the failure of a host."""
    if plan.has_dynamic_membership:
        return any(state.get("stopped") for state in states.values()) and all(
            state.get("status") != EXIT_RUN_FAILED for state in states.values()
        )
    stopped = [state.get("ended") or math.inf for state in states.values() if state.get("stopped")]
    failed = [state.get("ended") or math.inf for name, state in states.items() if not state.get("stopped")
              and state.get("status") is not None and not has_exited_cleanly(plan.host(name), state)]  # fmt: skip
    return bool(stopped) and not (failed and min(failed) + STOP_RACE_S <= min(stopped))


def _has_training_finished(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState]) -> bool:
    """Return whether training finished successfully although supervisors, or hosts that it could lose, are gone."""
    if plan.has_dynamic_membership and any(state.get("status") == 0 for state in states.values()):
        return True
    nobody_failed = all(not state.get("failures") and state.get("status") in (0, None) for state in states.values())
    if not nobody_failed or not rundir.is_run():
        return False
    manifest, of_rank_0 = rundir.manifest(), states.get(plan.hosts[0].name, {})  # both by its clock
    return manifest.verdict == "finished" and (manifest.ended or 0.0) >= _started_at(of_rank_0)


def _rank_failures(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState]) -> list[RunFailure]:
    failures = []
    for host, state in states.items():
        since = _started_at(state)
        for failed in state.get("failures", []):
            log = rundir.log_path(host, failed["rank"])
            is_independent = not PEER_FAILURE_PATTERN.search("\n".join(tail_log(log, SEARCHED_LINES, since)))
            message = f"rank {failed['rank']} on {host} {_exit_description(failed['exitcode'], failed.get('signal'))}"
            hint = ""
            if failed["exitcode"] > 0 and (exception := _printed_exception(log, since)) is not None:
                message += f": {exception.text[:MAX_ERROR_CHARS]}{exception.where and f', at {exception.where}'}"
            if is_disk_full(state, failed["time"]) and is_independent:
                message, hint = f"disk.space: {message}: the disk of {host} is full", _disk_space_hint(plan.host(host))
            elif (
                failed.get("signal") == "SIGKILL" and abs((state.get("oom_at") or 0.0) - failed["time"]) <= OOM_CHECK_S
            ):
                message, hint = f"run.oom: {message}: {host} had no memory left", OOM_HINT
            failures.append(
                RunFailure(
                    host=host,
                    rank=failed["rank"],
                    message=message,
                    time=failed["time"],
                    log=log,
                    run_started_at=since,
                    is_independent=is_independent,
                    hint=hint,
                )
            )
    return failures


def _host_failures(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState]) -> list[RunFailure]:
    """Return failures of launchers that reported no failed rank, and of lost hosts."""
    failures = []
    for host, state in states.items():
        log, ended = plan.host(host).log_path(rundir), state.get("ended") or 0.0
        status, is_independent, hint = state.get("status"), True, ""
        if state.get("lost"):
            message = f"{host}: {state['lost']}"
        elif status is not None and not has_exited_cleanly(plan.host(host), state) and not state.get("failures"):
            message = f"the launcher on {host} {_exit_description(status, state.get('signal'))}"
            is_independent = status != EXIT_TERMINATED
            if reason := _partition_reason(tail_log(log, SHOWN_LINES, _started_at(state))):
                message = f"run.cut-off: {host} ended its ranks: {reason}"
            elif is_disk_full(state, ended):
                message, hint = f"disk.space: {message}: the disk of {host} is full", _disk_space_hint(plan.host(host))
        else:
            continue
        failures.append(
            RunFailure(host=host, rank=None, message=message, time=ended, log=log, run_started_at=_started_at(state),
                    is_independent=is_independent, hint=hint)
        )  # fmt: skip
    return failures


def is_disk_full(state: SupervisorState, at: float) -> bool:
    """Return whether a host's disk was full around time `at`. The supervisor checks it every second."""
    full_at = state.get("full_at")
    return full_at is not None and abs(at - full_at) <= DISK_CHECK_S


def _disk_space_hint(host: HostPlan) -> str:
    folder = "its run directory" if host.run is None else quote_word(host.run.rpartition("/runs/")[0] or host.run)
    return f"on {host.name}: du -xh {folder} | sort -h | tail shows the largest folders"


def _partition_reason(lines: Iterable[str]) -> str | None:
    """Return why an agent killed its ranks by its own decision, from its log; None if it does not say."""
    for line in lines:
        if match := PARTITION_PATTERN.search(line):
            return match[1]
    return None


def _reported_failure(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState]) -> RunFailure | None:
    """Return the failure that a rank reported itself in this start of the run; None if there is none."""
    events = rundir.events()
    epoch_start = max((i for i, event in enumerate(events) if event["event"] == "world"), default=0)
    for event in events[epoch_start:]:  # failures of earlier epochs were survived
        rank = event.get("rank")
        if event["event"] != "failure" or not isinstance(rank, int) or not 0 <= rank < plan.world_size:
            continue
        if any(not isinstance(event.get(name), str) for name in ("kind", "error", "hint")):
            continue  # damaged
        kind, host = getattr(errors, event["kind"], None), plan.host_of_rank(rank).name
        if not isinstance(kind, type) or not issubclass(kind, EvenerError):
            continue
        if event["time"] >= _started_at(states[host]) and not PEER_FAILURE_PATTERN.search(event["error"]):
            failed_rank = event.get("of", rank)
            # With a full disk a rank cannot record its failure: another one does.
            error = event["error"].removeprefix(f"rank {failed_rank}: ")
            return _failure_of_report(rundir, plan, states, failed_rank, event["time"], kind, error, event["hint"])
    if plan.kind == "train":
        for state in states.values():
            for failed in state.get("failures", []):
                if failed["exitcode"] in (UsageError.exit_status, EXIT_DISK_FULL, EXIT_RUN_FAILED) and (
                    printed := _printed_error(rundir, plan, state, failed["rank"])
                ):
                    return _failure_of_report(
                        rundir, plan, states, failed["rank"], failed["time"], UsageError, *printed
                    )
    return None


def _printed_error(rundir: RunDir, plan: Plan, state: SupervisorState, rank: int) -> tuple[str, str] | None:
    """Return the (error, hint) that our worker prints if it fails before it can record them in the run."""
    log = rundir.log_path(plan.host_of_rank(rank).name, rank)
    for line, following in itertools.pairwise([*tail_log(log, SEARCHED_LINES, _started_at(state)), ""]):
        if line.startswith("error: "):
            hint = following.removeprefix("hint:  ") if following.startswith("hint:") else ""
            return line.removeprefix("error: "), hint
    return None


def _failure_of_report(
    rundir: RunDir,
    plan: Plan,
    states: Mapping[str, SupervisorState],
    rank: int,
    at: float,
    kind: type[EvenerError],
    error: str,
    hint: str,
) -> RunFailure:
    """Return the failure that a rank reported. On this machine a UsageError reads as if this program had raised it."""
    host = plan.host_of_rank(rank).name
    log, is_refusal = rundir.log_path(host, rank), kind.exit_status == UsageError.exit_status
    if DISK_FULL_PATTERN.search(error):
        message, hint = (
            f"disk.space: the disk of {host} is full: {error}",
            f"{_disk_space_hint(plan.host(host))}; {hint}",
        )
    elif is_refusal and plan.is_local_run:
        message = error
    else:
        message, hint = f"rank {rank} on {host}: {error}", hint or f"its whole output: {log}"
    return RunFailure(
        host=host,
        rank=rank,
        message=message,
        time=at,
        log=log,
        run_started_at=_started_at(states[host]),
        is_independent=True,
        hint=hint,
        error_type=kind if is_refusal else RunError,
    )


def missing_gpu_message(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState]) -> str | None:
    """Return the line by which a rank reports that it did nothing for lack of GPUs, and exited with status 0."""
    for host in plan.hosts:
        for rank in range(host.first_rank, host.first_rank + host.num_ranks):
            lines = tail_log(rundir.log_path(host.name, rank), SHOWN_LINES, _started_at(states[host.name]))
            if line := gpu_required_line(lines):
                return line
    return None


def tail_log(log: Path, num: int, since: float) -> list[str]:
    """Return the last `num` lines of a log that were written after `since` (the host's clock), without time stamps."""
    return [text for _, text in _stamped_lines(log, num, since)]


def _printed_exception(log: Path, since: float) -> PrintedException | None:
    """Return the exception with which the program of a log ended in the run that began at `since`."""
    return last_exception([text for stream, text in _stamped_lines(log, STDERR_LINES, since) if stream in "Ee"])


def _stamped_lines(log: Path, num: int, since: float) -> list[tuple[str, str]]:
    """Return (stream, text) of the last lines of a log that were written after `since`, the host's clock."""
    first = _format_timestamp(since)
    try:
        tail = read_last_lines(log, TAIL_BYTES)[-num:]
    except OSError:
        return []
    lines = ([*line.decode(errors="replace").split(" ", 2), "", ""] for line in tail)
    return [(line[1], line[2]) for line in lines if line[0] >= first]


def _format_timestamp(at: float) -> str:
    """Format a time as the supervisor stamps lines."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}Z"


def _started_at(state: SupervisorState) -> float:
    return state.get("started") or 0.0


def _exit_description(status: int, signal_name: str | None) -> str:
    return f"was killed by {signal_name or f'signal {-status}'}" if status < 0 else f"exited with status {status}"
