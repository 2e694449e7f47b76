"""Loss penalty: the relative loss that a lossy strategy costs at equal tokens, only as measured, with its source.

It has two figures. The loss budget is about *validation* loss, which bench/loss.py measures after about eight epochs of
a 1 MB corpus. That hides part of what replicas lose, so the *training* loss of the same runs is stated beside it: with
diloco:10:int8:streamed it is 2.9 % higher with two replicas and 5.8 % with four. Text that is read once was
measured with one seed: 1.1 and 1.5 % with two replicas.

Where several models were measured, the penalty is interpolated linearly over log(parameters). Beyond the largest
measured model its penalty holds, because larger models lose less [Charles et al. 2025]; for DiLoCo we make no claim for
models smaller than the smallest one measured. A measured gain holds only for models of about that size; elsewhere it
counts as 0. For compressed gradients, the measurement with two ranks holds for any number of ranks, because the errors
of more ranks cancel better. With DiLoCo, more replicas lose more, and unequal shares lose less than equal ones (see
`equivalent_replicas`). DiLoCo's penalty is interpolated linearly between the measured numbers of replicas. Only runs
with no more steps and no more tokens a step than the job count; of several such runs, the one that lost least counts.
The penalty never decreases with the number of replicas.

Rounding alone, with ddp, moved the loss by −0.02, −0.28 and +0.00 % (three seeds): smaller differences are noise.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from evener.core.base.units import format_count, pluralize, sample_median
from evener.core.model.shape import GPTShape
from evener.core.run.prediction import EXACT_SOURCE
from evener.core.run.roster import Roster, SyncSpec, parse_sync
from evener.core.run.run_spec import RunSpec
from evener.plan.cost.sync_traffic import averaging_efficiency

SIMILAR_SIZE_FACTOR = 3.0  # models count as of similar size up to this ratio of their parameters: *assumption*
# the ratio up to which models count as of the same size: they differ in their vocabulary at most
SAME_SIZE_FACTOR = 1.25
ERROR_ROUNDING = 5e-5  # rounding of the errors in the bench's output
# The largest relative error of rounding to bf16, which has 8 significant bits. With error feedback the error of
# gradients is 2.3e-3 of their norm between two ranks, 3.1e-3 among more (*measured*, normal numbers, 2026-11-22), for a
# model in fp32 at most 2.5e-3 (bench/loss.py); gradients of a model in bf16 are exact in bf16.
BF16_ROUNDING = 2**-8


class LossMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """The measured loss penalty of one model with one strategy."""

    sync: str
    shares: tuple[int, ...]  # each rank's share of the batch, as ratios
    num_params: int
    # validation loss relative to one process or data parallel at equal tokens, minus 1; negative: it was lower
    penalty: float
    train_penalty: float | None  # the same of the training loss of the last steps
    min_steps: int  # not valid for shorter runs
    min_tokens: int = 0  # nor for fewer tokens a step, of all ranks together
    max_error: float | None = None  # largest error of the gradient sum in these runs, relative: see Fidelity
    source: str


def _from_paper(ranks: int, num_params: float, penalty: float) -> LossMeasurement:
    """Return a measurement from "Scaling laws for DiLoCo", arXiv 2503.09799: momentum 0.9, the best learning rates."""
    return LossMeasurement(sync="diloco:30", shares=(1,) * ranks, num_params=round(num_params), penalty=penalty,
                    train_penalty=None,
                    min_steps=30 * 40,  # their runs have more outer steps; with 13, tiny lost 2.4 % (*measured*)
                    source="arXiv 2503.09799, H = 30")  # fmt: skip


def _from_bench(sync: str, penalty: float, runs: int, max_error: float | None = None, *,
          training: float | None = None, shape: str = "small", shares: str = "1:1", batch: int = 16,
          steps: int = 2000, dtype: str = "bf16", corpora: int = 1) -> LossMeasurement:  # fmt: skip
    """Return the mean of runs in bench/loss.jsonl, each relative to one process of the same seed on the same corpus."""
    drifts, num_params = parse_sync(sync).drifts, NUM_PARAMS[shape]
    corpus = "tinyshakespeare" if corpora == 1 else "two corpora"
    parts = tuple(map(int, shares.split(":")))
    ranks = f"{len(parts)} ranks" if len(set(parts)) == 1 else f"{len(parts)} ranks with shares of {shares}"
    setup = f"{ranks}, {steps} steps of {batch} × 256 tokens, {pluralize(runs, 'run')} on {corpus}, {dtype}"
    return LossMeasurement(
        sync=sync,
        shares=parts,
        num_params=num_params,
        penalty=penalty,
        train_penalty=training,
        min_steps=steps if drifts else 0,
        min_tokens=batch * 256 if drifts else 0,
        max_error=max_error,
        source=f"bench/loss.py: {num_params / 1e6:.1f}M parameters, {setup}",
    )


NUM_PARAMS = {"small": 1_025_536, "char": 10_745_088}  # parameters, with the characters of tinyshakespeare
LOSS_MEASUREMENTS = (  # of equally fast strategies the planner takes the first
    _from_bench("bf16", -0.0007, 3, 0.0, training=0),  # gradients of a bf16 model are exact in bf16
    # the later measurement counts: here rounding loses something
    _from_bench("bf16", -0.0009, 2, 0.0025, training=0.0007, dtype="fp32"),
    _from_bench("int8", 0.0027, 5, 0.0407, training=0.0011, corpora=2),
    _from_bench("int8", -0.0031, 4, 0.0659, training=-0.0016, shape="char", corpora=2),
    _from_bench("int8", 0.0043, 1, 0.0246, training=-0.0008, shares="1:1:1"),
    _from_bench("int4", 0.0199, 3, 0.2405, training=0.024),
    _from_bench("powersgd:4", 0.1399, 3, 1.4492, training=0.1939),
    _from_bench("powersgd:16", 0.0145, 3, 0.8562, training=0.0199),
    _from_bench("diloco:10", 0.0143, 3, training=0.0152),
    _from_bench("diloco:10", 0.0026, 1, training=0.0342, shape="char"),
    _from_bench("diloco:10:int8", 0.0149, 3, 0.0172, training=0.016),
    _from_bench("diloco:10:int8:streamed", 0.0105, 3, 0.0208, training=0.0142),
    _from_bench("diloco:10:int8:streamed", 0.0518, 1, 0.0161, training=0.0602, shares="1:1:1:1"),
    _from_bench("diloco:10:int8:streamed", 0.0213, 2, 0.0184, training=0.0239, shares="1:1:1:1", batch=32),
    _from_bench("diloco:10:int8:streamed", 0.0089, 4, 0.0127, training=0.0257, shape="char", corpora=2),
    _from_bench("diloco:10:int8:streamed", 0.0065, 3, 0.0165, training=0.0385, shape="char", shares="9:5:2"),
    _from_bench("diloco:10:int8:streamed", 0.0165, 1, 0.0155, training=0.0575, shape="char", shares="1:1:1:1"),
    _from_bench(
        "diloco:10:int8:streamed",
        0.0327,
        1,
        0.0159,
        training=0.0645,
        shape="char",
        shares="1:1:1:1",
        batch=32,
        steps=1000,
    ),
    _from_bench("diloco:10:int4:streamed", 0.0113, 3, 0.2961, training=0.0146),
    _from_bench("diloco:10:int4:streamed", 0.006, 2, 0.1681, training=0.0271, shape="char"),
    _from_bench("diloco:5:int8:streamed", 0.0086, 3, 0.0113, training=0.0271, shape="char"),
    _from_bench("diloco:30", 0.0418, 3, training=0.0541),
    _from_bench("diloco:30:int8", 0.0407, 3, 0.0178, training=0.0544),
    _from_bench("diloco:30:int4", 0.0405, 3, 0.2608, training=0.0532),
    _from_bench("diloco:100", 0.0811, 3, training=0.1077),
    _from_paper(2, 35e6, 0.007),
    _from_paper(2, 90e6, 0.005),
    _from_paper(2, 180e6, 0.003),
    _from_paper(4, 35e6, 0.020),
    _from_paper(4, 180e6, 0.011),
    _from_paper(8, 35e6, 0.039),
)


class LossPenalty(NamedTuple):
    """Says what a strategy costs in loss at equal tokens, relative to ddp, minus 1. Negative: the loss was lower."""

    validation: float | None  # 0 for an exact strategy; None: not measured
    source: str  # the nearest measurement, or EXACT_SOURCE; if not measured, the reason
    training: float | None = None


def loss_penalty(sync: SyncSpec, num_params: int, shares: Sequence[float], num_steps: int | None = None,
                 num_tokens: int | None = None) -> LossPenalty:  # fmt: skip
    """Return the loss penalty of a strategy for a model of `num_params` parameters on ranks with these shares.

    `num_tokens` are the tokens of a step.

    >>> from evener.core.run.roster import DDP
    >>> loss_penalty(DDP, 10**8, [4, 4])
    LossPenalty(validation=0.0, source='exact', training=0.0)
    >>> loss_penalty(parse_sync("powersgd:1"), 10**8, [4, 4])
    LossPenalty(validation=None, source='nobody measured what it costs in loss', training=None)
    >>> diloco = parse_sync("diloco:30")
    >>> [round(loss_penalty(diloco, 126_000_000, shares).validation, 4) for shares in ([8, 8], [9, 5, 2])]
    [0.004, 0.006]
    >>> loss_penalty(diloco, 126_000_000, [8, 8], num_steps=200).source
    'its loss was measured only with 1200 steps and more'
    """
    if sync.is_exact:
        return LossPenalty(0.0, EXACT_SOURCE, 0.0)
    rows = _measurements_of(sync)
    if not rows:
        return LossPenalty(None, "nobody measured what it costs in loss")
    long_enough = [row for row in rows if num_steps is None or num_steps >= row.min_steps]
    if not long_enough:
        return _measured_only(f"with {min(row.min_steps for row in rows)} steps and more")
    large_enough = [row for row in long_enough if num_tokens is None or num_tokens >= row.min_tokens]
    if not large_enough:
        return _measured_only(f"with {min(row.min_tokens for row in long_enough)} tokens a step and more")
    by_worth: dict[float, list[LossMeasurement]] = defaultdict(list)
    for row in large_enough:
        by_worth[equivalent_replicas(row.shares)].append(row)
    replicas, penalties = equivalent_replicas(shares) if sync.drifts else 2.0, dict[float, LossPenalty]()
    # Smaller models lose more, so measurements of larger models are used for them only if there are no others.
    for ratio in (SAME_SIZE_FACTOR, SIMILAR_SIZE_FACTOR) if sync.drifts else (math.inf,):
        if max(penalties, default=0.0) < replicas:
            penalties = {num: _interpolate_model_size(of_num, num_params) for num, of_num in sorted(by_worth.items())
                     if min(row.num_params for row in of_num) <= num_params * ratio}  # fmt: skip
    if not penalties:
        return _measured_only(f"of {format_count(min(row.num_params for row in large_enough))} parameters and more")
    if replicas > max(penalties):
        return _measured_only(f"of {max(penalties):g} equal replicas and fewer")
    return _interpolate_replicas(penalties, replicas)


def _measured_only(of_what: str) -> LossPenalty:
    return LossPenalty(None, f"its loss was measured only {of_what}")


def equivalent_replicas(shares: Sequence[float]) -> float:
    """Return how many replicas with equal shares of the batch progress as far, and lose as much, as these shares.

    *Measured*, 1.0M parameters, diloco:10:int8:streamed, one seed: two lose 1.9 %, 9 : 5 : 2 2.8 %, four 5.2 %, so 1.9,
    1.9 and 1.7 % for each equivalent replica beyond the first; with 10.7M 0.5, 0.4 and 0.5 %. With 35M two, four and
    eight lose 0.7, 0.7 and 0.6 % for each [arXiv 2503.09799].

    >>> [round(equivalent_replicas(shares), 2) for shares in ([9], [9, 0], [8, 8], [2, 1], [9, 5, 2], [4, 4, 4, 4])]
    [1.0, 1.0, 2.0, 1.84, 2.44, 4.0]
    """
    return round(averaging_efficiency(shares) ** -2, 6)


def _interpolate(low: LossPenalty, high: LossPenalty, fraction: float) -> LossPenalty:
    """Return what lies between two measurements: `low` at 0, `high` at 1. The source is the nearer one's."""

    def mix(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + fraction * (b - a)

    source = (low if fraction < 1 / 2 else high).source
    return LossPenalty(mix(low.validation, high.validation), source, mix(low.training, high.training))


def _interpolate_replicas(penalties: dict[float, LossPenalty], num: float) -> LossPenalty:
    """Interpolate the penalty of `num` replicas from the measured numbers, of which the largest is at least `num`.

    Below the smallest measured number its penalty holds.
    """
    fewer, low = next(iter(penalties.items()))
    for more, measured in penalties.items():
        high = max(measured, low, key=lambda one: one.validation or 0.0)
        if num <= more:
            return _interpolate(low, high, (num - fewer) / (more - fewer)) if num > fewer else low
        fewer, low = more, high
    raise ValueError(f"no measurement of {num:g} replicas or more")


def _interpolate_model_size(rows: Sequence[LossMeasurement], num_params: int) -> LossPenalty:
    """Interpolate the penalty of a model of this size from models of several sizes."""
    last = {(row.num_params, row.min_steps, row.min_tokens): row for row in rows}  # the later measurement counts
    ordered = sorted(last.values(), key=lambda row: (row.num_params, -row.penalty))
    rows = list({row.num_params: row for row in ordered}.values())  # of each model the run that lost least
    of = [LossPenalty(row.penalty, row.source, row.train_penalty) for row in rows]
    sizes = [row.num_params for row in rows]
    for i, (low, high) in enumerate(itertools.pairwise(sizes)):
        if low <= num_params <= high:
            return _interpolate(of[i], of[i + 1], math.log(num_params / low) / math.log(high / low))
    nearest, size = (of[0], sizes[0]) if num_params <= sizes[0] else (of[-1], sizes[-1])
    if size / SIMILAR_SIZE_FACTOR <= num_params <= size * SIMILAR_SIZE_FACTOR:
        return nearest
    training = None if nearest.training is None else max(0.0, nearest.training)
    return LossPenalty(max(0.0, nearest.validation or 0.0), nearest.source, training)


def why_too_lossy(penalty: float | None, source: str, loss_budget: float) -> str:
    """Return why a strategy exceeds the loss budget (0.01 is 1 %); "" if it does not."""
    if penalty is None:
        return source
    if not loss_budget and source != EXACT_SOURCE:
        return "not exact, and no loss may be spent"
    if penalty > loss_budget:
        return f"costs {penalty:.1%} of validation loss, more than {loss_budget:.1%}"
    return ""


def why_no_longer_chosen(roster: Roster, spec: RunSpec, shape: GPTShape) -> str:
    """Return why `--sync auto` would not choose the run's current strategy among these ranks; "" if it would."""
    sync, tokens = roster.sync, roster.batch * shape.block_size
    penalty = loss_penalty(sync, shape.num_params(), roster.mean_shares, spec.train.steps, tokens)
    return why_too_lossy(penalty.validation, penalty.source, spec.train.loss_budget / 100)


def _measurements_of(sync: SyncSpec) -> list[LossMeasurement]:
    """Return the measurements of a strategy; +sparse is exact and makes no difference."""
    name = str(msgspec.structs.replace(sync, sparse=False))
    return [row for row in LOSS_MEASUREMENTS if row.sync == name]


def max_compression_error(sync: SyncSpec, num_ranks: int) -> float:
    """Return the largest relative compression error with which the measured loss penalty holds.

    It is the largest error in the measured runs; infinity if none has one. For bf16 it is the largest rounding error.
    More than two ranks quantize twice: what they send, then the sums (`worker.sync.quantized`). The squares of the two
    errors add up, so errors measured with two ranks count √2 times.
    """
    if sync.kind == "bf16":
        return BF16_ROUNDING
    least = num_ranks if sync.drifts else 2
    rows = _measurements_of(sync)
    num_measured = min((len(row.shares) for row in rows if len(row.shares) >= least), default=0)
    factor = math.sqrt(2) if num_ranks > 2 and sync.kind != "powersgd" else 1.0
    known = [(row.max_error + ERROR_ROUNDING) * (factor if len(row.shares) == 2 else 1.0)
             for row in rows if len(row.shares) <= num_measured and row.max_error is not None]  # fmt: skip
    return max(known, default=math.inf)


class CompressionErrorMonitor:
    """Monitors whether the compression error of a lossy strategy stays within that of the runs with a known penalty."""

    NUM_SAMPLES = 5  # the median of so many samples counts; each is of another bucket

    def __init__(self, sync: SyncSpec, num_ranks: int) -> None:
        self.sync, self.max_error = sync, max_compression_error(sync, num_ranks)
        self._seen: deque[float] = deque(maxlen=self.NUM_SAMPLES)
        self._is_beyond = False

    def add_sample(self, error: float) -> float | None:
        """Add a sample. Return the median of the latest when it first exceeds the limit, once per excess; else None."""
        self._seen.append(error)
        if len(self._seen) < self.NUM_SAMPLES:
            return None
        latest = sample_median(self._seen)
        was_beyond, self._is_beyond = self._is_beyond, latest > self.max_error
        return latest if self._is_beyond and not was_beyond else None
