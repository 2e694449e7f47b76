"""Roll back to the newest checkpoint after a failure that all ranks detect, unless it would only recur.

Where hosts come and go, such a failure does not end the run: what is saved is finite, and all replicas agreed on it.

    failure on all ranks                first time    recurring
    a step that is not finite           roll back     in the same step the settings are the cause: the run ends
    replicas differ, a minority         roll back     on the same host: it leaves the run, as its memory is faulty
    replicas differ, no majority        roll back     in the same step the cause is the program or unknown: the run ends

A rollback is a regroup: the ranks exit together and restart from the newest checkpoint that any host has. Earlier
failures are in the events, which every host keeps: at least one host of the next epoch took part in this one. All ranks
gather what any host knows, so all decide alike.

With fixed membership a run ends with the failure, and the user resumes it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from evener.core.base.errors import DivergedError, HopelessError, NonFiniteError
from evener.core.cluster.host_info import local_host_info
from evener.core.run.membership_epoch import EXIT_REGROUP, exclude_host
from evener.core.run.runwriter import RunWriter
from evener.worker.rank.process_groups import ProcessGroups


class RegroupExit(SystemExit):
    """Exit this rank, so that the launcher restarts it in another membership epoch.

    A program that does not catch it ends with the exit status that the launcher expects.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_REGROUP)


@contextlib.contextmanager
def rollback_on_failure(rundir: RunWriter, group: ProcessGroups) -> Iterator[None]:
    """Log a failure that all ranks raise together, and roll back where that may help."""
    try:
        yield
    except NonFiniteError as error:
        if not group.has_dynamic_membership:
            if group.rank == 0:
                rundir.add_event("run.nonfinite", step=error.step, ranks=error.ranks)
            raise
        earlier = _earlier_events(rundir, group, "run.nonfinite")
        is_recurring = any(event["step"] == error.step for event in earlier)
        _add_event_on_all_hosts(
            rundir, group, "run.nonfinite", step=error.step, ranks=error.ranks, goes_back=not is_recurring
        )
        if not is_recurring:
            raise RegroupExit from error
        raise HopelessError(f"{error}, nor was it before the rollback", hint=error.hint) from None
    except DivergedError as error:
        if not group.has_dynamic_membership:
            if group.rank == 0:
                rundir.add_event("run.diverged", step=error.step, **error.facts)
            raise
        _handle_replica_mismatch(rundir, group, error)


def _handle_replica_mismatch(rundir: RunWriter, group: ProcessGroups, error: DivergedError) -> NoReturn:
    hosts = group.all_gather(local_host_info().host, str)  # by rank
    odd = sorted({hosts[group.member_ranks.index(rank)] for rank in error.outlier_ranks})
    earlier = _earlier_events(rundir, group, "run.diverged")
    leaving = [host for host in odd if any(host in event["odd"] for event in earlier)]
    is_over = any(event["step"] == error.step and not event["odd"] for event in earlier) and not odd
    is_over = is_over or set(leaving) == set(hosts)
    if leaving:
        hint = (
            f"faulty memory does this: test {' and '.join(leaving)} with memtester, or boot memtest86+; the next start "
            "of the run includes it again"
        )
    elif odd:
        hint = f"once may be chance; if {' and '.join(odd)} differs again, it leaves the run"
    else:
        hint = ("without a majority of equal hashes it is unknown which replica is wrong: run evener verify RUN "
                "--replay 20 on each host, which repeats steps and shows whose arithmetic is off")  # fmt: skip
    _add_event_on_all_hosts(rundir, group, "run.diverged", step=error.step, **error.facts, odd=odd, leaves=leaving,
          goes_back=not is_over, hint=hint)  # fmt: skip
    if is_over:
        raise HopelessError(f"{error}, again", hint=hint) from None

    def exclude() -> None:
        if hosts[group.rank] in leaving and group.local_rank == 0:
            exclude_host(f"{error}, for the second time on this host; {hint}")

    group.run_or_raise_on_all(exclude)  # its agent sees it before ranks of other hosts have exited
    raise RegroupExit from error


def _earlier_events(rundir: RunWriter, group: ProcessGroups, kind: str) -> list[dict[str, Any]]:
    """Return such events of earlier epochs that any host has logged; an epoch has at most one."""
    own = rundir.events() if group.local_rank == 0 else []
    own = [event for event in own if event["event"] == kind and event.get("run") == _run_start_id()]
    gathered = group.all_gather(own, list[dict[str, Any]])
    return list({event["world"]: event for events in gathered for event in events}.values())


def _add_event_on_all_hosts(rundir: RunWriter, group: ProcessGroups, kind: str, **facts: Any) -> None:
    """Add an event on every host, with the same time, so that copies merge into one."""
    now, epoch = group.all_gather(time.time(), float)[0], group.membership_epoch
    assert epoch is not None
    if group.is_writer:
        rundir.add_event(kind, run=_run_start_id(), world=epoch.number, **facts | {"time": now})


def _run_start_id() -> str:
    """Return the id of this start of the run; events of earlier starts do not count."""
    return os.environ.get("EVENER_RUN", "")
