"""What does a way of agreeing cost in loss, at equal tokens? Only what somebody measured, with its source.

Where several models were measured, the penalty is read off the straight line over log(parameters); beyond them the
nearest holds: larger models lose less [Charles et al. 2025]. Coded gradients are judged by what two ranks measured
with them, whatever the number of ranks: errors of more ranks cancel better. DiLoCo's replicas are not: the more of
them drift, the more is lost.
"""

from __future__ import annotations

import itertools
import math
from collections import deque

import msgspec

from evener.core.roster import SyncSpec, parse_sync
from evener.core.units import median, plural
from evener.plan.sync import STRATEGIES

HALF_A_DIGIT = 5e-5  # of errors as the bench writes them


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one model lost with one way."""

    sync: str
    ranks: int
    num_params: int
    penalty: float  # loss relative to one process or data parallel at equal tokens, minus 1; below 0 it was lower
    least_steps: int  # of shorter runs it says nothing
    most_error: float | None = None  # of the exact sum, the largest that was seen meanwhile: see Fidelity
    source: str


def _published(ranks: int, num_params: float, penalty: float) -> Measured:
    """[Scaling laws for DiLoCo, arXiv 2503.09799, measured]"""
    return Measured(sync="diloco:30", ranks=ranks, num_params=round(num_params), penalty=penalty,
                    least_steps=30 * 40,  # theirs have more outer steps; with 13, tiny lost 2.4 % (measured)
                    source="arXiv 2503.09799, H = 30")  # fmt: skip


def _ours(sync: str, penalty: float, seeds: int, most_error: float | None = None) -> Measured:
    """[bench/loss.jsonl: the mean of its seeds, beside one process]"""
    drifts = parse_sync(sync).kind == "diloco"
    return Measured(sync=sync, ranks=2, num_params=1_025_536, penalty=penalty, least_steps=2000 if drifts else 0,
                    most_error=most_error,
                    source=f"bench/loss.py: 1.0M parameters, 2 ranks, 2000 steps, {plural(seeds, 'seed')}")  # fmt: skip


MEASURED = (
    _ours("bf16", 0.0018, 1, 0.0),  # these gradients were bf16 numbers anyway
    _ours("int8", 0.0023, 1, 0.0191),
    _ours("int4", 0.0153, 1, 0.2236),
    _ours("powersgd:4", 0.1431, 1, 1.2909),
    _ours("diloco:10", -0.0068, 1),
    _ours("diloco:10:int8", -0.0107, 1, 0.0165),
    _ours("diloco:10:int4:streamed", 0.0168, 1, 0.2649),
    _ours("diloco:30", 0.0295, 1),
    _ours("diloco:30:int8", 0.0333, 1),
    _ours("diloco:30:int4", 0.0353, 1),
    _ours("diloco:30:int4:streamed", 0.0347, 1),
    _ours("diloco:100", 0.1094, 1),
    _ours("diloco:100:int4:streamed", 0.093, 1),
    _published(2, 35e6, 0.007),
    _published(2, 90e6, 0.005),
    _published(2, 180e6, 0.003),
    _published(4, 35e6, 0.020),
    _published(4, 180e6, 0.011),
    _published(8, 35e6, 0.039),
)


def loss_penalty(
    sync: SyncSpec, num_params: int, num_ranks: int, num_steps: int | None = None
) -> tuple[float | None, str]:
    """(relative penalty, source): 0 of an exact strategy alone, None where nobody measured it.

    >>> from evener.core.roster import DDP
    >>> loss_penalty(DDP, 10**8, 4), loss_penalty(parse_sync("powersgd:1"), 10**8, 4)[0]
    ((0.0, 'exact'), None)
    >>> round(loss_penalty(parse_sync("diloco:30"), 126_000_000, 2)[0], 4)
    0.004
    """
    if STRATEGIES[sync.kind].is_exact:
        return 0.0, "exact"
    rows = sorted((row for row in _rows_of(sync) if num_steps is None or num_steps >= row.least_steps),
                  key=lambda row: row.num_params)  # fmt: skip
    if sync.kind == "diloco":
        rows = [row for row in rows if row.ranks == num_ranks]
    if not rows:
        return None, "not measured"
    for low, high in itertools.pairwise(rows):
        if low.num_params <= num_params <= high.num_params:
            share = math.log(num_params / low.num_params) / math.log(high.num_params / low.num_params)
            nearer = low if share < 1 / 2 else high
            return low.penalty + share * (high.penalty - low.penalty), nearer.source
    nearest = rows[0] if num_params <= rows[0].num_params else rows[-1]
    return nearest.penalty, nearest.source


def _rows_of(sync: SyncSpec) -> list[Measured]:
    """Tables that go row by row lose nothing."""
    name = str(msgspec.structs.replace(sync, sparse=False))
    return [row for row in MEASURED if row.sync == name]


def most_error(sync: SyncSpec) -> float:
    """The largest that was seen where its penalty was measured; infinite where nobody looked."""
    known = [row.most_error + HALF_A_DIGIT for row in _rows_of(sync) if row.most_error is not None]
    return max(known, default=math.inf)


class Watch:
    """Is what a lossy way makes of gradients still what it was where its penalty was measured? Fed by its samples."""

    SEEN = 5  # samples, of which the median counts: each is of another bucket

    def __init__(self, sync: SyncSpec) -> None:
        self.sync, self.most = sync, most_error(sync)
        self._seen: deque[float] = deque(maxlen=self.SEEN)
        self._is_beyond = False

    def hear(self, error: float) -> float | None:
        """The median of the latest samples, when it goes beyond what was measured; once, until it has come back."""
        self._seen.append(error)
        if len(self._seen) < self.SEEN:
            return None
        latest = median(list(self._seen)) or 0.0
        was_beyond, self._is_beyond = self._is_beyond, latest > self.most
        return latest if self._is_beyond and not was_beyond else None
