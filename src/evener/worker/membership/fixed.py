"""Who takes part when nobody comes or goes? The ranks that began; their shares follow the weights that they tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evener.core.errors import RunError
from evener.core.roster import Roster
from evener.worker.record import News


class Fixed:
    """A run that loses a rank ends: whoever started it hears which, and can resume it."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._weights = [float(share) for share in roster.shares]

    def hear(self, news: Sequence[News], next_step: int) -> Roster | None:
        """Shares in proportion to the weights, where a rank told another one than before."""
        weights = [known if math.isnan(told.weight) else told.weight
                   for known, told in zip(self._weights, news, strict=True)]  # fmt: skip
        if weights == self._weights:
            return None
        if not any(weights):
            raise RunError(f"step {next_step}: every rank's weight is 0: nobody is left to train")
        self._weights = weights
        self.roster = self.roster.with_weights(weights, next_step)
        return self.roster
