"""Which strategy does a Roster name?"""

from __future__ import annotations

from collections.abc import Callable

from evener.core.roster import Roster
from evener.worker.clock import Clock
from evener.worker.group import Group
from evener.worker.sync import Sync
from evener.worker.sync.alone import Alone
from evener.worker.sync.ddp import DDP


def make_sync(roster: Roster, group: Group, clock: Clock, lap: Callable[[str], None]) -> Sync:
    """The strategy of a run; `lap` charges the time since the last lap to a part of the step."""
    if roster.sync.kind == "none":
        return Alone()
    assert roster.sync.kind == "ddp", roster.sync
    return DDP(group, clock, lap)
