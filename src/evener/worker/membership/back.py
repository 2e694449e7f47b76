"""When do ranks go back to their newest checkpoint, and when would it only be the same again?

Where hosts come and go, these are no end of a run: what is saved is finite, and all replicas had agreed on it.

    what all ranks found                the first time    again
    a step that is not finite           they go back      in the same step it is the settings, no machine: the run ends
    replicas differ, one from most      they go back      of the same host: it leaves the run, for its memory fails
    replicas differ, none can say who   they go back      in the same step it is the program, or nobody knows: it ends

They go back as they go to any other world: they leave together, and begin again with the newest checkpoint that any
host has. What was before is in the events, which every host keeps of these: whoever takes part in the next world, one
of its hosts was in this one. All tell what they know, so all come to the same.

Where nobody comes or goes, a run ends with what was found, and whoever started it resumes it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

from evener.core.decoding import from_json
from evener.core.errors import DivergedError, HopelessError, NonFiniteError
from evener.core.machine import this_machine
from evener.core.runwriter import RunWriter
from evener.core.world import REGROUP, keep_out
from evener.worker.group import Group


class Regroup(SystemExit):
    """The ranks leave together to begin again in another world. A program that does not catch it ends as its launcher
    expects.
    """

    def __init__(self) -> None:
        super().__init__(REGROUP)


@contextlib.contextmanager
def going_back(rundir: RunWriter, group: Group) -> Iterator[None]:
    """What all ranks raise together here is an event; where another world may help, they go there instead."""
    try:
        yield
    except NonFiniteError as found:
        if not group.is_in_world:
            if group.rank == 0:
                rundir.add_event("run.nonfinite", step=found.step, ranks=found.ranks)
            raise
        before = _known(rundir, group, "run.nonfinite")
        is_again = any(event["step"] == found.step for event in before)
        _tell(rundir, group, "run.nonfinite", step=found.step, ranks=found.ranks, goes_back=not is_again)
        if not is_again:
            raise Regroup from found
        raise HopelessError(f"{found}, nor was it when it was taken before", hint=found.hint) from None
    except DivergedError as found:
        if not group.is_in_world:
            if group.rank == 0:
                rundir.add_event("run.diverged", step=found.step, **found.facts)
            raise
        _after_diverged(rundir, group, found)


def _after_diverged(rundir: RunWriter, group: Group, found: DivergedError) -> NoReturn:
    hosts = [one.decode() for one in group.gather(this_machine().host.encode())]  # by rank
    odd = sorted({hosts[group.numbers.index(rank)] for rank in found.odd})
    before = _known(rundir, group, "run.diverged")
    leaves = [host for host in odd if any(host in event["odd"] for event in before)]
    is_over = any(event["step"] == found.step and not event["odd"] for event in before) and not odd
    is_over = is_over or set(leaves) == set(hosts)
    if leaves:
        hint = (
            f"memory that fails does this: test that of {' and '.join(leaves)} with memtester, or with memtest86+ "
            "instead of its system; the next start of the run takes it in again"
        )
    elif odd:
        hint = f"once it may be chance; should {' and '.join(odd)} be the odd one again, it leaves the run"
    else:
        hint = ("hashes do not tell who is right where most do not hold the same: evener verify RUN --replay 20, on "
                "each host, takes steps again and tells whose arithmetic is off")  # fmt: skip
    _tell(rundir, group, "run.diverged", step=found.step, **found.facts, odd=odd, leaves=leaves,
          goes_back=not is_over, hint=hint)  # fmt: skip
    if is_over:
        raise HopelessError(f"{found}, again", hint=hint) from None

    def leave() -> None:
        if hosts[group.rank] in leaves and group.local_rank == 0:
            keep_out(f"{found}, of this host for the second time; {hint}")

    group.all_or_none(leave)  # its agent sees that before any other's ranks have ended
    raise Regroup from found


def _known(rundir: RunWriter, group: Group, kind: str) -> list[dict[str, Any]]:
    """What any host knows of such events in worlds before this one; in each was one at most."""
    mine = rundir.events() if group.local_rank == 0 else []
    mine = [event for event in mine if event["event"] == kind and event.get("run") == _start()]
    told = [from_json(text, list[dict[str, Any]]) for text in group.gather(msgspec.json.encode(mine))]
    return list({event["world"]: event for events in told for event in events}.values())


def _tell(rundir: RunWriter, group: Group, kind: str, **facts: Any) -> None:
    """An event that every host has, with the same time: where they come together it is one."""
    at, world = group.gather(str(time.time()).encode())[0], group.world
    assert world is not None
    if group.keeps:
        rundir.add_event(kind, run=_start(), world=world.number, **facts | {"time": float(at)})


def _start() -> str:
    """Of the run: what was before it was started anew has been seen to."""
    return os.environ.get("EVENER_RUN", "")
