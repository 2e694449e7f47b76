"""The step time breakdown: StepCost and StepRecord. START HERE: every other file fills or reads these two types.

The planner fills a StepCost from formulas, the recorder fills it from clocks; explaining a run is a subtraction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

PHASES = ("data_s", "compute_s", "exposed_sync_s", "wait_s", "optimizer_s")  # in the order of a step
# how texts, tables and charts call them, in the order in which they list them
PHASE_NAMES = {
    "compute_s": "forward, backward",
    "exposed_sync_s": "exposed communication",
    "wait_s": "waiting for others",
    "optimizer_s": "update",
    "data_s": "input",
}
assert PHASE_NAMES.keys() == set(PHASES)
BLOCKED = "blocked"  # between the last gradient and the end of backward: exposed_sync_s and wait_s together


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The phases of one optimizer step of one rank, in seconds. None = not measured, never 0.

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
        """The sum of the phases that were measured."""
        return sum(getattr(self, phase) or 0.0 for phase in PHASES)


MIN_NOISE_SAMPLES = 5  # noise samples needed for an estimate


class GradientNoise(msgspec.Struct, frozen=True, kw_only=True):
    """Two unbiased estimates from the shares of one step's batch; either may therefore be negative.

    Averaged over steps, trace/norm_sq is the noise scale: the batch size, in tokens, up to which a larger batch makes
    steps better nearly in proportion.   [McCandlish, Kaplan, Amodei et al. 2018, appendix A.1]
    """

    norm_sq: float  # |G|²: of the true gradient, over the whole data distribution
    trace: float  # tr Σ: of the covariance of one token's gradient


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a lossy strategy's sum in one step, compared with the exact sum."""

    error: float  # |sum − exact| / |exact|
    cosine: float  # between the two


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one optimizer step on one rank: a line of `steps/rank-R.jsonl`."""

    step: int  # counted from 0
    epoch: int  # roster epoch: of the Roster that divided the global batch
    tokens: float  # this rank's share of the global batch; for a user's own program, the weight of its losses
    loss: float | None  # mean over the tokens of the *global* batch: the same on every rank
    wall_s: float  # the step from its first to its last lap; `cost` sums to it
    cost: StepCost
    sync_s: float | None  # all-reduces in flight, hidden or not; None if nothing is synchronized
    cpu_s: float | None  # CPU seconds of this process: less than wall × threads means it was not always running
    bytes: int  # payload this rank sends in its collectives, by the strategy's own formula
    members: int  # ranks that took part
    lr: float
    grad_norm: float | None  # global norm before clipping; None = clipping is off
    noise: GradientNoise | None = None  # in steps in which it was measured
    fidelity: Fidelity | None = None  # in steps in which it was measured
    ended: float  # Unix time


def gradient_noise(share_norms_sq: Sequence[float], batch_norm_sq: float, tokens: float) -> GradientNoise | None:
    """Return the gradient noise of a batch of T tokens with gradient g, divided into n shares of T_r with gradient g_r.

    `share_norms_sq` are (T_r/T)·|g_r|² of each share, 0 for a rank without one; `batch_norm_sq` is |g|².
    E|g|² = |G|² + trΣ/T and E Σ share_norms_sq = |G|² + n·trΣ/T, however the batch is divided. Return None if fewer
    than two shares are not 0.

    >>> gradient_noise([0.75, 0.75], 1.0, 100.0)
    GradientNoise(norm_sq=0.5, trace=50.0)
    """
    num_shares = sum(norm_sq > 0 for norm_sq in share_norms_sq)
    if num_shares < 2:
        return None
    total = sum(share_norms_sq)
    return GradientNoise(
        norm_sq=(num_shares * batch_norm_sq - total) / (num_shares - 1),
        trace=(total - batch_norm_sq) * tokens / (num_shares - 1),
    )


def noise_scale(records: Sequence[StepRecord]) -> float | None:
    """Return the noise scale in tokens, from one rank's records of a run's second half, or None with too few samples.

    It is the quotient of sums over steps, because in a single step either term may be negative.
    """
    samples = [record.noise for record in records[len(records) // 2 :] if record.noise is not None]
    norm_sq, trace = (sum(getattr(sample, name) for sample in samples) for name in ("norm_sq", "trace"))
    return trace / norm_sq if len(samples) >= MIN_NOISE_SAMPLES and norm_sq > 0 < trace else None


def token_multiplier(noise_tokens: float, batch_tokens: float, factor: float) -> float:
    """Return the factor by which batches `factor` times as large increase the tokens needed for the same loss.

    Steps to a loss grow as 1 + N/T for a noise scale N and batches of T tokens.   [McCandlish et al. 2018, eq. 2.7]

    >>> token_multiplier(4096.0, 4096.0, 2), round(token_multiplier(1e9, 4096.0, 2), 3)
    (1.5, 1.0)
    """
    return (factor * batch_tokens + noise_tokens) / (batch_tokens + noise_tokens)


def split_blocked(blocked_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return (exposed_sync_s, wait_s) of every rank from the time each was blocked at the end of backward.

    All ranks leave a collective together, so the minimum over ranks is transfer and the rest of each rank's time is
    waiting for the last to arrive. The ranks' clocks need not agree.

    >>> split_blocked([0.5, 0.125])
    [(0.125, 0.375), (0.125, 0.0)]
    """
    transfer = min(blocked_s)
    return [(transfer, blocked - transfer) for blocked in blocked_s]


def align_steps(records: Mapping[int, Iterable[StepRecord]]) -> list[dict[int, StepRecord]]:
    """Group the records of ranks by step: for each step, ascending, its records by rank.

    Ranks need not have the same steps; only steps that all participating ranks have recorded are returned. If a rank
    recorded a step twice, the later record counts; if a step was taken under several Rosters, the newest one counts.
    """
    by_step: dict[int, dict[int, dict[int, StepRecord]]] = {}  # by step, then by roster epoch, then by rank
    for rank, rank_records in sorted(records.items()):
        for record in rank_records:
            for by_rank in by_step.setdefault(record.step, {}).values():
                by_rank.pop(rank, None)
            by_step[record.step].setdefault(record.epoch, {})[rank] = record
    steps = []
    for _, epochs in sorted(by_step.items()):
        complete = [by_rank for _, by_rank in sorted(epochs.items())
                    if by_rank and all(len(by_rank) == record.members for record in by_rank.values())]  # fmt: skip
        steps += complete[-1:]
    return steps


def first_rank_record(by_rank: Mapping[int, StepRecord]) -> StepRecord:
    """Return a step's record of the first rank, for the fields that are equal on all ranks."""
    return by_rank[min(by_rank)]
