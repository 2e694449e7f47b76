"""What failed first? When one rank dies the others fail because of it, often louder, and on other hosts.

A rank that said itself what was wrong comes first; then what ended by itself, a rank or a host; and last a rank that
only lost its peers.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evener.core import errors
from evener.core.errors import EvenerError, RunError, UsageError
from evener.core.failure import CONSEQUENCE
from evener.core.plan import HostPlan, Plan
from evener.core.rundir import RunDir
from evener.core.world import LEFT, NO_ROOM, OVER
from evener.launch.scripts import hint_of, wants_gpu

LAST_LINES = 15  # that are shown
SEARCHED_LINES = 200  # a C++ stack stands below what it is about
CUT_OFF = re.compile(r"^evener: ending the ranks on \S+: (nothing was heard of .*|the store on \S+ is gone)")
ENDED_S = 10.0  # after which a failure is nothing that a stop brought about; the clocks of hosts are not one
FULL = re.compile("No space left on device|Disk quota exceeded")
FULL_S = 5.0  # between a rank's end and the next look at the disk's room
OOM_S = 10.0  # between a look at the kernel's counter and a rank's end
TOLD_TO_END = 143  # an agent that ended its ranks because another host's had failed

LESS_MEMORY = (
    "less at once there: a smaller --micro-batch, --recompute, fewer ranks; evener plan tells what a rank needs"
)

State = dict[str, Any]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong on one host."""

    host: str
    rank: int | None  # None: the launcher there, or the host itself
    how: str  # "rank 1 on b was killed by SIGKILL"
    time: float
    log: Path
    since: float  # when this start of the run began: what the log holds of earlier ones says nothing of this failure
    by_itself: bool  # not because of another
    hint: str = ""
    kind: type[EvenerError] = RunError  # or what the user asked for was wrong

    @property
    def output(self) -> str:
        """What it printed last; nothing of a rank that said what was wrong."""
        return "" if self.hint else "\n".join(last_lines(self.log, LAST_LINES, self.since))

    def error(self, rundir: RunDir, plan: Plan) -> EvenerError:
        """For a person."""
        if self.kind is not RunError:
            return self.kind(self.how, hint=self.hint)
        hint = self.hint or f"all that it printed: {self.log}"
        if plan.kind == "launch":
            said = last_lines(self.log, SEARCHED_LINES, self.since)
            hint = hint_of(said, self.host, plan.project, fleet=not plan.is_here) or hint
        here, saved = rundir.checkpoint_steps(), rundir.saved_step()
        if plan.kind == "train" and here and "--resume" not in hint:
            hint += f"; evener train --resume {rundir} goes on from step {here[-1]}"
        if not plan.is_here and saved is not None and saved not in here:
            hint += f"; step {saved} was saved on {plan.hosts[0].name} alone: evener fetch {rundir}"
        return RunError(self.how, hint=hint, output=self.output)


def first_failure(rundir: RunDir, plan: Plan, states: Mapping[str, State]) -> Failure | None:
    """The first failure; None of a run that did not fail, or was stopped. `states` are the hosts' last."""
    if _was_stopped(plan, states):
        return None
    found = [*_ranks(rundir, plan, states), *_hosts(rundir, plan, states)]
    if not found or _has_finished(rundir, plan, states):
        return None
    return _said(rundir, plan, states) or min(found, key=lambda one: (not one.by_itself, one.time))


def ended_well(host: HostPlan, state: State) -> bool:
    """Has the run ended on this host as it should, or has the host left it?"""
    return state.get("status") == 0 or (host.agent is not None and state.get("status") == LEFT)


def _was_stopped(plan: Plan, states: Mapping[str, State]) -> bool:
    """Did somebody stop it? Not where the rest of a run was ended long after a host had failed."""
    if plan.outlives_hosts:
        return any(one.get("stopped") for one in states.values()) and all(
            one.get("status") != OVER for one in states.values()
        )
    stopped = [state.get("ended") or math.inf for state in states.values() if state.get("stopped")]
    failed = [state.get("ended") or math.inf for name, state in states.items() if not state.get("stopped")
              and state.get("status") is not None and not ended_well(plan.host(name), state)]  # fmt: skip
    return bool(stopped) and not (failed and min(failed) + ENDED_S <= min(stopped))


def _has_finished(rundir: RunDir, plan: Plan, states: Mapping[str, State]) -> bool:
    """Did a training end well by its own account, where only those who were to see it are gone, or hosts that it could
    do without?
    """
    if plan.outlives_hosts and any(state.get("status") == 0 for state in states.values()):
        return True
    nobody_failed = all(not state.get("failures") and state.get("status") in (0, None) for state in states.values())
    if not nobody_failed or not rundir.is_run():
        return False
    manifest, of_rank_0 = rundir.manifest(), states.get(plan.hosts[0].name, {})  # of one clock
    return manifest.verdict == "finished" and (manifest.ended or 0.0) >= _began(of_rank_0)


def _ranks(rundir: RunDir, plan: Plan, states: Mapping[str, State]) -> list[Failure]:
    found = []
    for host, state in states.items():
        since = _began(state)
        for one in state.get("failures", []):
            log = rundir.log_path(host, one["rank"])
            by_itself = not CONSEQUENCE.search("\n".join(last_lines(log, SEARCHED_LINES, since)))
            how = f"rank {one['rank']} on {host} {_ending(one['exitcode'], one.get('signal'))}"
            hint = ""
            if is_full(state, one["time"]) and by_itself:
                how, hint = f"disk.space: {how}: the disk of {host} is full", _make_room(plan.host(host))
            elif one.get("signal") == "SIGKILL" and abs((state.get("oom_at") or 0.0) - one["time"]) <= OOM_S:
                how, hint = f"run.oom: {how}: {host} had no memory left", LESS_MEMORY
            found.append(
                Failure(host=host, rank=one["rank"], how=how, time=one["time"], log=log, since=since,
                        by_itself=by_itself, hint=hint)
            )  # fmt: skip
    return found


def _hosts(rundir: RunDir, plan: Plan, states: Mapping[str, State]) -> list[Failure]:
    """Launchers that ended without a word of their ranks, and hosts that fell silent."""
    found = []
    for host, state in states.items():
        log, ended = plan.host(host).log_path(rundir), state.get("ended") or 0.0
        status, by_itself, hint = state.get("status"), True, ""
        if state.get("lost"):
            how = f"{host}: {state['lost']}"
        elif status is not None and not ended_well(plan.host(host), state) and not state.get("failures"):
            how = f"the launcher on {host} {_ending(status, state.get('signal'))}"
            by_itself = status != TOLD_TO_END
            if why := _ended_because(last_lines(log, LAST_LINES, _began(state))):
                how = f"run.cut-off: {host} ended its ranks: {why}"
            elif is_full(state, ended):
                how, hint = f"disk.space: {how}: the disk of {host} is full", _make_room(plan.host(host))
        else:
            continue
        found.append(
            Failure(host=host, rank=None, how=how, time=ended, log=log, since=_began(state), by_itself=by_itself,
                    hint=hint)
        )  # fmt: skip
    return found


def is_full(state: State, at: float) -> bool:
    """Was a host's disk full when something there ended? The supervisor looks every second."""
    full_at = state.get("full_at")
    return full_at is not None and abs(at - full_at) <= FULL_S


def _make_room(host: HostPlan) -> str:
    folder = "its run directory" if host.run is None else host.run.rpartition("/runs/")[0] or host.run
    return f"on {host.name}: du -xh {folder} | sort -h | tail shows what takes the room"


def _ended_because(said: Iterable[str]) -> str | None:
    """Why an agent ended its ranks, where no other has told it to."""
    for line in said:
        if found := CUT_OFF.search(line):
            return found[1]
    return None


def _said(rundir: RunDir, plan: Plan, states: Mapping[str, State]) -> Failure | None:
    """A rank's own account of this start of the run, if it is an error that its reader can mend."""
    events = rundir.events()
    last = max((i for i, event in enumerate(events) if event["event"] == "world"), default=0)
    for event in events[last:]:  # what happened in an earlier world was survived
        rank = event.get("rank")
        if event["event"] != "failure" or not isinstance(rank, int) or not 0 <= rank < plan.world_size:
            continue
        if any(not isinstance(event.get(name), str) for name in ("kind", "error", "hint")):
            continue  # damaged
        kind, host = getattr(errors, event["kind"], None), plan.host_of(rank).name
        if not isinstance(kind, type) or not issubclass(kind, EvenerError):
            continue
        if event["time"] >= _began(states[host]) and not CONSEQUENCE.search(event["error"]):
            of = event.get("of", rank)
            error = event["error"].removeprefix(f"rank {of}: ")  # whose disk is full can write nothing down: others do
            return _told(rundir, plan, states, of, event["time"], kind, error, event["hint"])
    if plan.kind == "train":
        for state in states.values():
            for one in state.get("failures", []):
                if one["exitcode"] in (UsageError.exit_status, NO_ROOM, OVER) and (
                    told := _printed(rundir, plan, state, one["rank"])
                ):
                    return _told(rundir, plan, states, one["rank"], one["time"], UsageError, *told)
    return None


def _printed(rundir: RunDir, plan: Plan, state: State, rank: int) -> tuple[str, str] | None:
    """(error, hint) as our worker prints them before it has a run to tell them to."""
    log = rundir.log_path(plan.host_of(rank).name, rank)
    for line, following in itertools.pairwise([*last_lines(log, SEARCHED_LINES, _began(state)), ""]):
        if line.startswith("error: "):
            hint = following.removeprefix("hint:  ") if following.startswith("hint:") else ""
            return line.removeprefix("error: "), hint
    return None


def _told(rundir: RunDir, plan: Plan, states: Mapping[str, State], rank: int, at: float, kind: type[EvenerError],
          error: str, hint: str) -> Failure:  # fmt: skip
    """What a rank itself says of its failure. What was asked for in vain is told as if this program had found it."""
    host = plan.host_of(rank).name
    log, is_refusal = rundir.log_path(host, rank), kind.exit_status == UsageError.exit_status
    if FULL.search(error):
        how, hint = f"disk.space: the disk of {host} is full: {error}", f"{_make_room(plan.host(host))}; {hint}"
    elif is_refusal and plan.is_here:
        how = error
    else:
        how, hint = f"rank {rank} on {host}: {error}", hint or f"all that it printed: {log}"
    return Failure(host=host, rank=rank, how=how, time=at, log=log, since=_began(states[host]), by_itself=True,
                   hint=hint, kind=kind if is_refusal else RunError)  # fmt: skip


def wants_gpus(rundir: RunDir, plan: Plan, states: Mapping[str, State]) -> str | None:
    """What a rank said that did nothing for want of GPUs, and ended as if all were well."""
    for host in plan.hosts:
        for rank in range(host.first_rank, host.first_rank + host.num_ranks):
            said = last_lines(rundir.log_path(host.name, rank), LAST_LINES, _began(states[host.name]))
            if line := wants_gpu(said):
                return line
    return None


def last_lines(log: Path, num: int, since: float) -> list[str]:
    """The end of a log from a time on (by the host's own clock, which wrote it), without the time stamps."""
    if not log.exists():
        return []
    first = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since)) + f".{int(since % 1 * 1000):03d}Z"
    lines = (line.split(" ", 2) for line in log.read_text(errors="replace").splitlines()[-num:])
    return [line[-1] for line in lines if line[0] >= first]


def _began(state: State) -> float:
    return state.get("started") or 0.0


def _ending(status: int, signal_name: str | None) -> str:
    return f"was killed by {signal_name or f'signal {-status}'}" if status < 0 else f"exited with status {status}"
