"""Where does the time of one training step go? START HERE: every other file fills or reads these two types.

The planner fills a StepCost from formulas, the recorder fills it from clocks; explaining a run is a subtraction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

PARTS = ("data_s", "compute_s", "exposed_sync_s", "wait_s", "optimizer_s")
BLOCKED = "blocked"  # between the last gradient and the end of backward: exposed_sync_s and wait_s together


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Where one optimizer step of one rank goes, in seconds. None = not measured, never 0.

    >>> StepCost(data_s=0.1, compute_s=2.0, exposed_sync_s=0.5, wait_s=0.0, optimizer_s=0.4).total_s
    3.0
    """

    data_s: float | None = None  # waiting for input
    compute_s: float | None = None  # forward, backward
    exposed_sync_s: float | None = None  # communication that backward did not hide
    wait_s: float | None = None  # idle for a slower rank
    optimizer_s: float | None = None  # clip, update

    @property
    def total_s(self) -> float:
        """Seconds of the parts that were measured."""
        return sum(getattr(self, part) or 0.0 for part in PARTS)


FEW_SAMPLES = 5  # of noise: fewer say nothing


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How much the gradients of a batch's parts differ, from one step; both unbiased, so that either may be negative.

    Averaged over steps, trace/norm_sq is the noise scale: the batch, in tokens, up to which a larger one makes steps
    better nearly in proportion.   [McCandlish, Kaplan, Amodei et al. 2018, appendix A.1]
    """

    norm_sq: float  # |G|²: of the gradient that all tokens there are would give
    trace: float  # tr Σ: of the covariance of one token's gradient


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """What a lossy strategy made of some numbers in one step, beside their exact sum."""

    error: float  # |sum − exact| / |exact|
    cosine: float  # between the two


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of one optimizer step: a line of `steps/rank-R.jsonl`."""

    step: int  # counted from 0
    epoch: int  # of the Roster by which the global batch was divided
    tokens: (
        float  # this rank's share of the global batch; of a program of the user's own, what its losses are weighed by
    )
    loss: float | None  # mean over the tokens of the *global* batch: the same on every rank
    wall_s: float  # the step by one clock, end to end; `cost` sums to it within 1 %
    cost: StepCost
    sync_s: float | None  # all-reduces in flight, hidden or not; None where nothing is synchronized
    cpu_s: float | None  # processor seconds of this process: less than wall × threads means it was not running
    bytes: int  # payload this rank sends in its collectives, by the strategy's own formula
    members: int  # ranks that took part
    lr: float
    grad_norm: float | None  # global norm before clipping; None = clipping is off
    noise: Noise | None = None  # of steps in which it was measured
    fidelity: Fidelity | None = None  # the same
    ended: float  # Unix time


def noise_of(parts_sq: Sequence[float], whole_sq: float, tokens: float) -> Noise | None:
    """The noise of a batch of T tokens, whose gradient is g, divided into n parts of T_r tokens, whose own are g_r.

    `parts_sq` are (T_r/T)·|g_r|² of each part, 0 of a rank that had none, `whole_sq` is |g|². E|g|² = |G|² + trΣ/T and
    E Σ parts = |G|² + n·trΣ/T, so that any division will do. None of one part.

    >>> noise_of([0.75, 0.75], 1.0, 100.0)
    Noise(norm_sq=0.5, trace=50.0)
    """
    num = sum(part > 0 for part in parts_sq)
    if num < 2:
        return None
    total = sum(parts_sq)
    return Noise(norm_sq=(num * whole_sq - total) / (num - 1), trace=(total - whole_sq) * tokens / (num - 1))


def noise_scale(records: Sequence[StepRecord]) -> float | None:
    """The noise scale in tokens, from one rank's records of a run's second half; None where they say too little.

    Means before the division: of one step either part may be negative.
    """
    found = [record.noise for record in records[len(records) // 2 :] if record.noise is not None]
    norm_sq, trace = (sum(getattr(one, name) for one in found) for name in ("norm_sq", "trace"))
    return trace / norm_sq if len(found) >= FEW_SAMPLES and norm_sq > 0 < trace else None


def more_tokens(noise_tokens: float, batch_tokens: float, factor: float) -> float:
    """How many times as many tokens the same loss takes with batches so many times as large.

    Steps to a loss grow as 1 + N/T for a noise scale N and batches of T tokens.   [McCandlish et al. 2018, eq. 2.7]

    >>> more_tokens(4096.0, 4096.0, 2), round(more_tokens(1e9, 4096.0, 2), 3)
    (1.5, 1.0)
    """
    return (factor * batch_tokens + noise_tokens) / (batch_tokens + noise_tokens)


def split_blocked(blocked_s: Sequence[float]) -> list[tuple[float, float]]:
    """(exposed_sync_s, wait_s) of every rank from the time that each was blocked at the end of backward.

    All ranks leave a collective together, so of what each spent in it the least over ranks is transfer
    and the rest is waiting for the last to arrive. No clocks need to agree.

    >>> split_blocked([0.5, 0.125])
    [(0.125, 0.375), (0.125, 0.0)]
    """
    transfer = min(blocked_s)
    return [(transfer, blocked - transfer) for blocked in blocked_s]


def aligned(records: Mapping[int, Iterable[StepRecord]]) -> list[dict[int, StepRecord]]:
    """Records of ranks, which need not be in step, as the records of steps: of each step by rank, steps ascending.

    Only steps that every rank which took part has recorded: what one rank did is beside nothing but what the others did
    in the same step. Where a rank recorded a step twice the later record counts; where ranks that are gone took it by
    an earlier Roster, those who took it by the newest.
    """
    by_step: dict[int, dict[int, dict[int, StepRecord]]] = {}
    for rank, of_rank in sorted(records.items()):
        for record in of_rank:
            for of_epoch in by_step.setdefault(record.step, {}).values():
                of_epoch.pop(rank, None)
            by_step[record.step].setdefault(record.epoch, {})[rank] = record
    found = []
    for _, epochs in sorted(by_step.items()):
        whole = [of_step for _, of_step in sorted(epochs.items())
                 if of_step and all(len(of_step) == record.members for record in of_step.values())]  # fmt: skip
        found += whole[-1:]
    return found


def first_of(of_step: Mapping[int, StepRecord]) -> StepRecord:
    """Of the first rank that took a step: what all ranks know of it alike, any tells."""
    return of_step[min(of_step)]
