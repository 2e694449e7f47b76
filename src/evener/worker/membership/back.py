"""When do ranks go back to their newest checkpoint, and when would it only be the same again?

Where hosts come and go, these are no end of a run: what is saved is finite, and all replicas had agreed on it.

    what all ranks found                the first time    again
    a step that is not finite           they go back      in the same step it is the settings, no machine: the run ends

They go back as they go to any other world: they leave together, and begin again with the newest checkpoint that any
host has. What was before is in the events, which every host keeps of these: whoever takes part in the next world, one
of its hosts was in this one. All tell what they know, so all come to the same.

Where nobody comes or goes, a run ends with what was found, and whoever started it resumes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from evener.core.decoding import from_json
from evener.core.errors import HopelessError, NonFiniteError
from evener.core.runwriter import RunWriter
from evener.core.world import REGROUP, told_world
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


def _known(rundir: RunWriter, group: Group, kind: str) -> list[dict[str, Any]]:
    """What any host knows of such events in worlds before this one; in each was one at most."""
    mine = rundir.events() if group.local_rank == 0 else []
    mine = [event for event in mine if event["event"] == kind and "world" in event]
    told = [from_json(text, list[dict[str, Any]]) for text in group.gather(msgspec.json.encode(mine))]
    return list({event["world"]: event for events in told for event in events}.values())


def _tell(rundir: RunWriter, group: Group, kind: str, **facts: Any) -> None:
    """An event that every host has, with the same time: where they come together it is one."""
    world, at = told_world(), group.gather(str(time.time()).encode())[0]
    assert world is not None
    if group.keeps:
        rundir.add_event(kind, world=world.number, **facts | {"time": float(at)})
