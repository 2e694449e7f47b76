"""Compare the recorded losses and gradient norms of a run with a replay on one machine, and localize the fault.

A step's loss depends on its data and the weights before it; its gradient norm also on the ranks' reduction; the next
step's loss also on the update. So the first difference shows where to look:

    loss of the first step                the data, or the weights that the replay began with
    its norm, or the next step's loss     the reduction: data and weights were right
    later, all at once                    that step's data or reduction, or the update before it
    later, and more with each step        rounding
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from evener.core.base.units import median
from evener.core.run.roster import parse_sync

ReplayOutcome = Literal["agree", "data", "weights", "reduction", "jump", "drift", "record", "nonfinite"]
STEEP_NORM_RATIO = 5.0  # times the usual gradient norm
JUMP_RATIO = 10.0  # times the difference of the steps before: more than rounding grows by


class ReplayPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Loss and gradient norm of a step, recorded or replayed. None: not finite; for the norm also: clipping is off."""

    step: int
    loss: float | None
    grad_norm: float | None


class ReplayTolerance(msgspec.Struct, frozen=True, kw_only=True):
    """The largest relative differences that arithmetic explains."""

    first: tuple[float, float | None]  # (loss, norm) of the first step, in which the weights are the same
    later: tuple[float, float | None]  # (loss, norm) of later steps; None: not compared
    why: str


class ReplayEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What else is known of the run and of its replay."""

    has_grad_norms: bool = True  # norms were measured
    corpus_changed: bool = False  # its files differ from those the run recorded
    mismatched_tensor: str | None = None  # a tensor of the checkpoint that differs from what the ranks hashed


NO_EVIDENCE = ReplayEvidence()


class ReplayVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing a replay."""

    kind: ReplayOutcome
    sentence: str
    step: int | None = None  # the first that differs, counted from 0 as recorded
    rank: int | None = None  # whose records differ
    largest_loss: float | None = None  # relative difference
    largest_norm: float | None = None

    @property
    def is_match(self) -> bool:
        return self.kind == "agree"


# Measured: two ranks of `tiny` on the verb corpus at a learning rate of 3e-3, replayed by one process on the same
# processor over 50 to 100 steps, and over 20 in which norms rose to 80 times the usual. In the latter the difference
# between two replicas grows within one step, so with inexact arithmetic only the first step's norm is compared. The
# comments give the largest measured differences.
FP32_TOLERANCE = ReplayTolerance(first=(1e-5, 1e-4), later=(1e-5, 1e-3),  # 5e-8 and 1e-7; 1e-6 and 2e-5
                 why="fp32 sums in another order")  # fmt: skip
BF16_TOLERANCE = ReplayTolerance(first=(2**-9, 2**-6), later=(1e-2, None),  # 5e-5 and 5e-4, against fp32; 2e-3
                 why="bf16 rounds to 2^-9: loosely, and only the first norm")  # fmt: skip
LOSSY_LOSS_TOLERANCE = 5e-2  # 2e-2
LOSSY_NORM_TOLERANCES = {  # of the first step: gradients are sent lossily, but the loss is exact
    "bf16": 2**-8,  # 3e-5
    "int8": 3e-2,  # 4e-4
    "int4": None,  # larger by design
    "powersgd": None,  # smaller: by 0.26 at rank 4
}


def replay_tolerance(dtypes: Collection[str], syncs: Sequence[str]) -> ReplayTolerance:
    """Return the tolerance for a run with these dtypes and sync strategies against its replay in one process.

    >>> replay_tolerance({"fp32"}, ["ddp"]).later, replay_tolerance({"fp32"}, ["int8"]).later
    ((1e-05, 0.001), (0.05, None))
    """
    base = BF16_TOLERANCE if "bf16" in dtypes else FP32_TOLERANCE
    lossy = [sync for sync in syncs if parse_sync(sync).kind in LOSSY_NORM_TOLERANCES]
    if not lossy:
        return base
    norms = [base.first[1], *(LOSSY_NORM_TOLERANCES[parse_sync(sync).kind] for sync in lossy)]
    known = [norm for norm in norms if norm is not None]
    return ReplayTolerance(
        first=(base.first[0], max(known) if len(known) == len(norms) else None),
        later=(LOSSY_LOSS_TOLERANCE, None),
        why=f"--sync {' and '.join(lossy)} loses some of each gradient: loosely, and at most the first norm",
    )


def compare_replay(
    recorded: Sequence[ReplayPoint],
    replayed: Sequence[ReplayPoint],
    tolerance: ReplayTolerance,
    evidence: ReplayEvidence = NO_EVIDENCE,
) -> ReplayVerdict:
    """Compare the same steps, recorded and replayed.

    >>> points = [ReplayPoint(step=step, loss=2.0, grad_norm=1.0) for step in range(3)]
    >>> compare_replay(points, points, FP32_TOLERANCE).kind
    'agree'
    """
    for i, (fleet, ours) in enumerate(zip(recorded, replayed, strict=False)):
        if sentence := _nonfinite_sentence(fleet, ours, evidence.has_grad_norms):
            before = _compare_points(recorded[:i], replayed[:i], tolerance, evidence)
            is_first = before.is_match
            return ReplayVerdict(kind="nonfinite", step=fleet.step, sentence=sentence) if is_first else before
    return _compare_points(recorded, replayed, tolerance, evidence)


def compare_replay_by_rank(
    recorded: Mapping[int, Sequence[ReplayPoint]],
    replayed: Sequence[ReplayPoint],
    tolerance: ReplayTolerance,
    evidence: ReplayEvidence = NO_EVIDENCE,
) -> ReplayVerdict:
    """Compare the records of several ranks, which should be equal; return the first mismatch, else the worst match."""
    verdicts = {rank: compare_replay(points, replayed, tolerance, evidence) for rank, points in recorded.items()}
    bad = [rank for rank, verdict in verdicts.items() if not verdict.is_match]
    if not bad:
        return max(verdicts.values(), key=lambda verdict: verdict.largest_loss or 0.0)
    first = min(bad, key=lambda rank: verdicts[rank].step or 0)
    if len(bad) == len(verdicts):
        return verdicts[first]
    suffix = f"; of {len(verdicts)} ranks' records only those of rank {', '.join(map(str, bad))} differ"
    return msgspec.structs.replace(verdicts[first], rank=first, sentence=verdicts[first].sentence + suffix)


def _compare_points(
    recorded: Sequence[ReplayPoint],
    replayed: Sequence[ReplayPoint],
    tolerance: ReplayTolerance,
    evidence: ReplayEvidence,
) -> ReplayVerdict:
    gaps = [
        (_relative_difference(a.loss, b.loss), _relative_difference(a.grad_norm, b.grad_norm))
        for a, b in zip(recorded, replayed, strict=False)
    ]
    over = []
    for i, (loss, norm) in enumerate(gaps):
        most_loss, most_norm = tolerance.later if i else tolerance.first
        over.append((loss / most_loss, norm / most_norm if most_norm else 0.0))
    at = next((i for i, pair in enumerate(over) if max(pair) > 1), None)
    if at is None:
        kind: ReplayOutcome = "agree"
        sentence = f"losses and gradient norms of {len(gaps)} steps agree: the run can be trusted"
        if tolerance.later[1] is None:
            most = max((loss for loss, _ in gaps), default=0.0)
            sentence = (
                f"losses of {len(gaps)} steps agree: they differ by {most:.1e} at most, and {tolerance.later[0]:g} is "
                f"allowed ({tolerance.why}); a run with --dtype fp32 and an exact --sync would be held to "
                f"{FP32_TOLERANCE.later[0]:g}"
            )
        if evidence.corpus_changed:
            sentence += "; files of the corpus have changed since, but no token that these steps read"
        if evidence.mismatched_tensor:
            sentence += f"; but {evidence.mismatched_tensor} of the checkpoint is not what the ranks hashed"
    else:
        kind, why = _diagnose(at, gaps, over, evidence)
        sentence = f"step {recorded[at].step + 1}: {why}"
        steep = (replayed[at].grad_norm or 0.0) / (
            median([point.grad_norm for point in replayed if point.grad_norm]) or 1.0
        )
        if kind == "jump" and steep > STEEP_NORM_RATIO:
            sentence += f"; but its gradient is {steep:.0f} times the usual, which amplifies rounding"
    return ReplayVerdict(
        kind=kind,
        step=None if at is None else recorded[at].step,
        sentence=sentence,
        largest_loss=max((loss for loss, _ in gaps), default=0.0),
        largest_norm=max((norm for _, norm in gaps), default=0.0),
    )


def _diagnose(
    i: int,
    gaps: Sequence[tuple[float, float]],
    over: Sequence[tuple[float, float]],
    evidence: ReplayEvidence,
) -> tuple[ReplayOutcome, str]:
    """Return (outcome, explanation) for the compared step of index `i`, the first that differs."""
    loss_differs, norm_differs = (ratio > 1 for ratio in over[i])
    names = ("loss", "gradient norm")
    pairs = zip(names, gaps[i], over[i], strict=True)
    mismatch = "its " + " and ".join(f"{name} differs by {gap:.1e}" for name, gap, ratio in pairs if ratio > 1)
    if loss_differs and evidence.corpus_changed:
        return "data", f"{mismatch}, and the corpus does not have the bytes that the run recorded: wrong data"
    if tensor := evidence.mismatched_tensor:
        return "weights", f"{mismatch}, and {tensor} of the checkpoint is not what the ranks hashed: wrong weights"
    later = [max(pair) for pair in over[i + 1 :]]
    if later and max(later) <= 1:
        return "record", f"{mismatch}, and no later step differs: the record is wrong, not the training"
    if i == 0 and loss_differs:
        mismatch += " before any update"
        return "data", f"{mismatch}, though the corpus is the run's: other samples, or other initial weights"
    if i == 0:
        return "reduction", f"its loss agrees, and {mismatch}: right data and weights, wrong reduction of the gradients"
    if i == 1 and loss_differs:
        return "reduction", f"the step before agrees, and {mismatch}: that update differed: wrong reduction"
    before = max(max(pair) for pair in over[max(0, i - 2) : i])
    if i > 1 and max(over[i]) <= JUMP_RATIO * before:
        return "drift", f"{mismatch}, after differences that grew step by step: rounding; fewer steps may agree"
    if loss_differs and norm_differs:
        return "jump", f"{mismatch} all at once: its data, or the update before it, differed"
    where = "the update before it differed" if loss_differs else "wrong reduction of its gradients"
    return "jump", f"{mismatch} all at once: {where}"


def _relative_difference(recorded: float | None, replayed: float | None) -> float:
    if recorded is None or replayed is None:
        return 0.0
    return abs(recorded - replayed) / max(abs(replayed), 1e-30)


def _nonfinite_sentence(fleet: ReplayPoint, ours: ReplayPoint, has_grad_norms: bool) -> str:
    """Return a sentence on what is not finite in a step; "" if everything is."""
    recorded_bad, replayed_bad = (_nonfinite_quantity(point, has_grad_norms) for point in (fleet, ours))
    step = f"step {fleet.step + 1}"
    if recorded_bad and replayed_bad:
        return f"{step}: {recorded_bad} is not finite here either: not the machines, but the run's settings"
    if recorded_bad:
        return f"{step}: the recorded {recorded_bad} is not finite, and the replayed one is"
    return f"{step}: the replayed {replayed_bad} is not finite, and the recorded one is" if replayed_bad else ""


def _nonfinite_quantity(point: ReplayPoint, has_grad_norms: bool) -> str:
    if point.loss is None or not math.isfinite(point.loss):
        return "loss"
    if has_grad_norms and (point.grad_norm is None or not math.isfinite(point.grad_norm)):
        return "gradient norm"
    return ""
