"""Loss penalty: the relative loss that a lossy strategy costs at equal tokens, only as measured, with its source.

The penalty is that of the training or of the validation loss, whichever is larger, as a mean over seeds with a margin:
mean ± margin is a 90 % interval (`bench/loss.py`). The loss budget is held against the upper end. Measurements on text
that is read once count before those of the same strategy on a text that is read several times, which hides loss.

Where several models were measured, the penalty is interpolated linearly over log(parameters). Beyond the largest
measured model its penalty holds, because larger models lose less [Charles et al. 2025]; for DiLoCo we make no claim for
models smaller than the smallest one measured. What others measured is not taken: their outer optimizer is another one.
A measured gain holds only for models of about that size; elsewhere it
counts as 0. For compressed gradients, the measurement with two ranks holds for any number of ranks, because the errors
of more ranks cancel better. With DiLoCo, more replicas lose more, and unequal shares lose less than equal ones (see
`equivalent_replicas`). DiLoCo's penalty is interpolated linearly between the measured numbers of replicas. Only runs
with no more steps and no more tokens a step than the job count; of several such runs, the one that lost least counts.
The penalty never decreases with the number of replicas.

A measurement holds for its task alone: what pretraining loses says nothing of a fine-tuning of all weights, and neither
says anything of LoRA.
"""

from __future__ import annotations

import importlib.resources
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.units import format_count, sample_median
from evener.core.model.fine_tuning import FineTuning, ModelShape
from evener.core.model.pretrained import PretrainedModel
from evener.core.model.shape import GPTShape
from evener.core.run.prediction import EXACT_SOURCE
from evener.core.run.roster import Roster, SyncSpec
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


Task = Literal["pretraining", "fine-tuning", "LoRA"]  # fine-tuning: of all weights


class LossMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """The measured loss penalty of one model with one strategy."""

    task: Task = "pretraining"
    sync: str
    shares: tuple[int, ...]  # each rank's share of the batch, as ratios
    num_params: int
    # the training or the validation loss, the larger of the two, relative to one process or data parallel at equal
    # tokens, minus 1; negative: it was lower
    penalty: float
    margin: float  # penalty ± margin is a 90 % interval; 0: unknown
    min_steps: int  # not valid for shorter runs
    min_tokens: int = 0  # nor for fewer tokens a step, of all ranks together
    max_error: float | None = None  # largest error of the gradient sum in these runs, relative: see Fidelity
    source: str


def _from_bench() -> list[LossMeasurement]:
    """Return what `bench/loss.py --write` made of bench/loss.jsonl."""
    text = (importlib.resources.files("evener.plan.cost") / "loss_measurements.json").read_text(encoding="utf-8")
    return from_json(text, list[LossMeasurement])


LOSS_MEASUREMENTS = tuple(_from_bench())  # of equally fast strategies the planner takes the first


class LossPenalty(NamedTuple):
    """Says what a strategy costs in loss at equal tokens, relative to ddp, minus 1. Negative: the loss was lower."""

    loss: float | None  # 0 for an exact strategy; None: not measured
    source: str  # the nearest measurement, or EXACT_SOURCE; if not measured, the reason
    margin: float = 0.0  # loss ± margin is a 90 % interval

    @property
    def upper_end(self) -> float:
        """The upper end of the interval; infinity if not measured."""
        return math.inf if self.loss is None else self.loss + self.margin


def task_of(shape: ModelShape | PretrainedModel | None) -> Task:
    """Return the task of a run; a user's program counts as pretraining."""
    model = shape.model if isinstance(shape, FineTuning) else shape
    if not isinstance(model, PretrainedModel):
        return "pretraining"
    return "fine-tuning" if model.lora_rank is None else "LoRA"


def loss_penalty(sync: SyncSpec, num_params: int, shares: Sequence[float], num_steps: int | None = None,
                 num_tokens: int | None = None, task: Task = "pretraining") -> LossPenalty:  # fmt: skip
    """Return the loss penalty of a strategy for a model of `num_params` parameters on ranks with these shares.

    `num_tokens` are the tokens of a step.

    >>> from evener.core.run.roster import DDP, parse_sync
    >>> loss_penalty(DDP, 10**8, [4, 4])
    LossPenalty(loss=0.0, source='exact', margin=0.0)
    >>> loss_penalty(parse_sync("powersgd:1"), 10**8, [4, 4])
    LossPenalty(loss=None, source='nobody measured what it costs in loss', margin=0.0)
    >>> diloco = parse_sync("diloco:10:int8:streamed")
    >>> [round(loss_penalty(diloco, 10_745_088, shares).loss, 3) for shares in ([8, 8], [9, 5, 2], [1, 1, 1, 1])]
    [0.015, 0.038, 0.058]
    >>> loss_penalty(diloco, 126_000_000, [8, 8], num_steps=200).source
    'its loss was measured only with 1000 steps and more'
    """
    if sync.is_exact:
        return LossPenalty(0.0, EXACT_SOURCE)
    rows = _measurements_of(sync, task)
    if not rows:
        whom = "" if task == "pretraining" else f" {task}"
        return LossPenalty(None, f"nobody measured what it costs{whom} in loss")
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

    def mix(a: float, b: float) -> float:
        return a + fraction * (b - a)

    assert low.loss is not None
    assert high.loss is not None
    source = (low if fraction < 1 / 2 else high).source
    return LossPenalty(mix(low.loss, high.loss), source, mix(low.margin, high.margin))


def _interpolate_replicas(penalties: dict[float, LossPenalty], num: float) -> LossPenalty:
    """Interpolate the penalty of `num` replicas from the measured numbers, of which the largest is at least `num`.

    Below the smallest measured number its penalty holds.
    """
    fewer, low = next(iter(penalties.items()))
    for more, measured in penalties.items():
        high = max(measured, low, key=lambda one: one.upper_end)
        if num <= more:
            return _interpolate(low, high, (num - fewer) / (more - fewer)) if num > fewer else low
        fewer, low = more, high
    raise ValueError(f"no measurement of {num:g} replicas or more")


def _interpolate_model_size(rows: Sequence[LossMeasurement], num_params: int) -> LossPenalty:
    """Interpolate the penalty of a model of this size from models of several sizes."""
    by_size: dict[int, LossPenalty] = {}
    for row in rows:
        measured = LossPenalty(row.penalty, row.source, row.margin)
        least = by_size.setdefault(row.num_params, measured)
        by_size[row.num_params] = min(least, measured, key=lambda one: one.upper_end)
    sizes = sorted(by_size)
    for low, high in itertools.pairwise(sizes):
        if low <= num_params <= high:
            return _interpolate(by_size[low], by_size[high], math.log(num_params / low) / math.log(high / low))
    nearest = sizes[0] if num_params <= sizes[0] else sizes[-1]
    measured = by_size[nearest]
    if nearest / SIMILAR_SIZE_FACTOR <= num_params <= nearest * SIMILAR_SIZE_FACTOR:
        return measured
    loss = max(0.0, measured.loss or 0.0)
    return measured._replace(loss=loss, margin=max(0.0, measured.upper_end) - loss)


def format_loss(loss: float, margin: float) -> str:
    """Return a relative loss with its interval, as text.

    >>> format_loss(-0.002, 0.0061), format_loss(0.005, 0)
    ('−0.2% ± 0.6%', '+0.5%')
    """
    return f"{loss:+.1%}".replace("-", "−") + (f" ± {margin:.1%}" if margin else "")


def why_too_lossy(penalty: LossPenalty, loss_budget: float) -> str:
    """Return why a strategy may exceed the loss budget (0.01 is 1 %); "" if it does not."""
    if penalty.loss is None:
        return penalty.source
    if not loss_budget and penalty.source != EXACT_SOURCE:
        return "not exact, and no loss may be spent"
    if penalty.upper_end > loss_budget:
        return f"may cost {penalty.upper_end:.1%} of loss, more than {loss_budget:.1%}"
    return ""


def why_no_longer_chosen(roster: Roster, spec: RunSpec, shape: GPTShape) -> str:
    """Return why `--sync auto` would not choose the run's current strategy among these ranks; "" if it would."""
    sync, tokens = roster.sync, roster.batch * shape.block_size
    penalty = loss_penalty(sync, shape.num_params(), roster.mean_shares, spec.train.steps, tokens)
    return why_too_lossy(penalty, spec.train.loss_budget / 100)


def _measurements_of(sync: SyncSpec, task: Task) -> list[LossMeasurement]:
    """Return the measurements of a strategy; +sparse is exact and makes no difference."""
    name = str(msgspec.structs.replace(sync, sparse=False))
    return [row for row in LOSS_MEASUREMENTS if (row.sync, row.task) == (name, task)]


def max_compression_error(sync: SyncSpec, num_ranks: int, task: Task = "pretraining") -> float:
    """Return the largest relative compression error with which the measured loss penalty holds.

    It is the largest error in the measured runs; infinity if none has one. For bf16 it is the largest rounding error.
    More than two ranks quantize twice: what they send, then the sums (`worker.sync.quantized`). The squares of the two
    errors add up, so errors measured with two ranks count √2 times.
    """
    if sync.kind == "bf16":
        return BF16_ROUNDING
    least = num_ranks if sync.drifts else 2
    rows = _measurements_of(sync, task)
    num_measured = min((len(row.shares) for row in rows if len(row.shares) >= least), default=0)
    factor = math.sqrt(2) if num_ranks > 2 and sync.kind != "powersgd" else 1.0
    known = [(row.max_error + ERROR_ROUNDING) * (factor if len(row.shares) == 2 else 1.0)
             for row in rows if len(row.shares) <= num_measured and row.max_error is not None]  # fmt: skip
    return max(known, default=math.inf)


class CompressionErrorMonitor:
    """Monitors whether the compression error of a lossy strategy stays within that of the runs with a known penalty."""

    NUM_SAMPLES = 5  # the median of so many samples counts; each is of another bucket

    def __init__(self, sync: SyncSpec, num_ranks: int, task: Task = "pretraining") -> None:
        self.sync, self.max_error = sync, max_compression_error(sync, num_ranks, task)
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
