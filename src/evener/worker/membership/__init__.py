"""Who takes part in this step? A Membership says so, as a Roster; what to do about a change is its business alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from evener.core.prediction import Cluster
from evener.core.resolve import Resolved
from evener.core.roster import Roster
from evener.core.spec import RunSpec
from evener.worker.group import Group
from evener.worker.journal import Journal
from evener.worker.keeper import Keeper
from evener.worker.record import News, Recorder
from evener.worker.sync import Sync
from evener.worker.trained import Trained

T = TypeVar("T")


class Learner(Protocol):
    """A rank, as far as a change of its world has to do with it."""

    spec: RunSpec
    group: Group
    trained: Trained
    sync: Sync
    recorder: Recorder
    moved: set[str]  # buffers that forward changes


class Membership(Protocol):
    """The Roster in force. All ranks hold the same one at the same step, because all derive it from the same News."""

    roster: Roster
    result: Any  # of the last piece
    is_lost: bool  # there is another world already: what is under way is for nothing

    def begin(self, learner: Learner, keeper: Keeper, journal: Journal, first: int) -> int:
        """Everything is given; the step to begin with. Where others train already, once they let this rank in."""

    def together(self, do: Callable[..., T], *args: Any) -> T:
        """A piece: what all ranks do at this point, and its result, which JSON can hold. Where others have it behind
        them, and their world is lost, it is not done here: their result is everybody's.
        """

    def again(self, do: Callable[..., T], *args: Any) -> T:
        """What can be done again and again until it could be done, whatever others have behind them."""

    def listen(self, recorder: Recorder, step: int) -> bool:
        """Read the news that are due before `step`. Do all stop now?"""

    def agree(self, loss_sum: Tensor) -> float | None:
        """Where a lost world is gone on from, the end of a pass, and a piece: all have its sums, and nobody goes on
        before that; the sum of all ranks' losses. Else None.
        """

    def is_behind(self, error: RuntimeError) -> bool:
        """A piece could not be done: after this the rank is in another world, with another Roster. Have others done it?
        Then so has this one. Raises the error, where it is of another kind.
        """

    def before_step(self, recorder: Recorder, keeper: Keeper, step: int) -> None:
        """All that came before `step` is done: it is saved, where somebody asked for that; hosts may leave, or be let
        in.
        """

    def begins_anew(self, recorder: Recorder) -> bool:
        """Do all begin anew, in another world, from the checkpoint that is due now?"""

    def after_save(self, recorder: Recorder) -> None:
        """A checkpoint is there: hosts may be let in."""

    def follow(self, spec: RunSpec, resolved: Resolved | None, cluster: Cluster | None, *, one_size: bool) -> str:
        """What the spec leaves open follows what is measured: shares the ranks' speed, the way to agree the link.

        `cluster` is what the planner knows of the machines, None where there was none. With `one_size` a rank's
        micro-batches stay of the size that they have. Returns what a person must know of it, or "".
        """

    def hear(self, news: Sequence[News], next_step: int) -> Roster | None:
        """The Roster from `next_step` on, by what all ranks have told; None where nothing changes."""
