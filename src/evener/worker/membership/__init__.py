"""Who takes part in this step? A Membership says so, as a Roster; what to do about a change is its business alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from evener.core.prediction import Cluster
from evener.core.resolve import Resolved
from evener.core.roster import Roster
from evener.core.spec import RunSpec
from evener.worker.record import News


class Membership(Protocol):
    """The Roster in force. All ranks hold the same one at the same step, because all derive it from the same News."""

    roster: Roster

    def follow(self, spec: RunSpec, resolved: Resolved | None, cluster: Cluster | None, *, one_size: bool) -> str:
        """What the spec leaves open follows what is measured: shares the ranks' speed, the way to agree the link.

        `cluster` is what the planner knows of the machines, None where there was none. With `one_size` a rank's
        micro-batches stay of the size that they have. Returns what a person must know of it, or "".
        """

    def hear(self, news: Sequence[News], next_step: int) -> Roster | None:
        """The Roster from `next_step` on, by what all ranks have told; None where nothing changes."""
