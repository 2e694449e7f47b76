"""A run's steps were taken again, on one machine: do the losses and gradient norms say that the fleet can be trusted?

A step's loss is that of its data under the weights before it; its gradient norm is what the ranks' sum came to; the
next loss is that of the weights that its update made. So what differs first tells where to look:

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

from evener.core.roster import parse_sync
from evener.core.units import median

Kind = Literal["agree", "data", "weights", "reduction", "jump", "drift", "record", "nonfinite"]
STEEP = 5.0  # times the usual gradient norm
JUMP = 10.0  # times as much as in the steps before is no rounding that grew


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A step, as the fleet recorded it or the replay found it; None: not finite, or, of a norm, without clipping."""

    step: int
    loss: float | None
    norm: float | None


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """Largest relative differences that are arithmetic and no fault."""

    first: tuple[float, float | None]  # (loss, norm) of the first step, of which the weights are the same
    later: tuple[float, float | None]  # of others; None: not compared
    why: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What follows."""

    kind: Kind
    sentence: str
    step: int | None = None  # in which it shows first, as recorded: counted from 0
    rank: int | None = None  # whose records
    largest_loss: float | None = None  # relative difference
    largest_norm: float | None = None

    @property
    def agrees(self) -> bool:
        return self.kind == "agree"


# Measured: two ranks of `tiny` on the verb corpus at a rate of 3e-3, replayed by one process on the same processor over
# 50 to 100 steps, and over 20 in which norms rose to 80 times the usual: what two replicas differ by then grows in one
# step, so that of what is not exact only the first step's norm is compared. The largest differences are beside each.
FP32 = Tolerance(first=(1e-5, 1e-4), later=(1e-5, 1e-3),  # 5e-8 and 1e-7; 1e-6 and 2e-5
                 why="fp32 sums in another order")  # fmt: skip
BF16 = Tolerance(first=(2**-9, 2**-6), later=(1e-2, None),  # 5e-5 and 5e-4, against fp32; 2e-3
                 why="bf16 rounds to 2^-9: loosely, and of norms the first")  # fmt: skip
LOSSY_LOSS = 5e-2  # 2e-2
LOSSY_NORMS = {  # of the first step: what is sent is not what ranks have, but the loss is exact
    "bf16": 2**-8,  # 3e-5
    "int8": 3e-2,  # 4e-4
    "int4": None,  # longer by design
    "powersgd": None,  # shorter: by 0.26 at rank 4
}


def tolerance_of(dtypes: Collection[str], syncs: Sequence[str]) -> Tolerance:
    """What may differ between a run in this arithmetic that agreed in these ways and one process that needs not agree.

    >>> tolerance_of({"fp32"}, ["ddp"]).later, tolerance_of({"fp32"}, ["int8"]).later
    ((1e-05, 0.001), (0.05, None))
    """
    base = BF16 if "bf16" in dtypes else FP32
    lossy = [sync for sync in syncs if parse_sync(sync).kind in LOSSY_NORMS]
    if not lossy:
        return base
    norms = [base.first[1], *(LOSSY_NORMS[parse_sync(sync).kind] for sync in lossy)]
    known = [norm for norm in norms if norm is not None]
    return Tolerance(
        first=(base.first[0], max(known) if len(known) == len(norms) else None),
        later=(LOSSY_LOSS, None),
        why=f"--sync {' and '.join(lossy)} loses some of each gradient: loosely, and of norms at most the first",
    )


def judge(
    recorded: Sequence[Point],
    replayed: Sequence[Point],
    tolerance: Tolerance,
    *,
    clips: bool = True,
    corpus_changed: bool = False,
    unlike: str | None = None,
) -> Verdict:
    """What follows from the same steps recorded and replayed.

    `clips`: norms were measured; `corpus_changed`: its files are not those of which the run tells; `unlike`: a tensor
    of the checkpoint that is not what the ranks had hashed.

    >>> points = [Point(step=step, loss=2.0, norm=1.0) for step in range(3)]
    >>> judge(points, points, FP32).kind
    'agree'
    """
    for i, (fleet, ours) in enumerate(zip(recorded, replayed, strict=False)):
        if told := _not_finite(fleet, ours, clips):
            recorded, replayed = recorded[:i], replayed[:i]
            before = _judge(recorded, replayed, tolerance, corpus_changed, unlike)
            return before if i and not before.agrees else Verdict(kind="nonfinite", step=fleet.step, sentence=told)
    return _judge(recorded, replayed, tolerance, corpus_changed, unlike)


def judge_ranks(
    recorded: Mapping[int, Sequence[Point]], replayed: Sequence[Point], tolerance: Tolerance, *, clips: bool = True,
    corpus_changed: bool = False, unlike: str | None = None,
) -> Verdict:  # fmt: skip
    """Of the records of several ranks, which tell the same: the first that does not agree, or what all come to."""
    found = {rank: judge(points, replayed, tolerance, clips=clips, corpus_changed=corpus_changed, unlike=unlike)
             for rank, points in recorded.items()}  # fmt: skip
    bad = [rank for rank, verdict in found.items() if not verdict.agrees]
    if not bad:
        return max(found.values(), key=lambda verdict: verdict.largest_loss or 0.0)
    first = min(bad, key=lambda rank: found[rank].step or 0)
    if len(bad) == len(found):
        return found[first]
    alone = f"; of {len(found)} ranks' records those of rank {', '.join(map(str, bad))} alone say so"
    return msgspec.structs.replace(found[first], rank=first, sentence=found[first].sentence + alone)


def _judge(
    recorded: Sequence[Point], replayed: Sequence[Point], tolerance: Tolerance, corpus_changed: bool, unlike: str | None
) -> Verdict:
    gaps = [(_gap(a.loss, b.loss), _gap(a.norm, b.norm)) for a, b in zip(recorded, replayed, strict=False)]
    over = []
    for i, (loss, norm) in enumerate(gaps):
        most_loss, most_norm = tolerance.later if i else tolerance.first
        over.append((loss / most_loss, norm / most_norm if most_norm else 0.0))
    at = next((i for i, pair in enumerate(over) if max(pair) > 1), None)
    if at is None:
        kind: Kind = "agree"
        sentence = f"losses and gradient norms of {len(gaps)} steps agree: the run can be trusted"
        if tolerance.later[1] is None:
            sentence = f"losses of {len(gaps)} steps agree as far as this arithmetic lets one tell"
        if corpus_changed:
            sentence += "; files of the corpus have changed since, though in no token that these steps read"
        if unlike:
            sentence += f"; but {unlike} of the checkpoint is not what the ranks hashed"
    else:
        kind, why = _cause(at, gaps, over, corpus_changed, unlike)
        sentence = f"step {recorded[at].step + 1}: {why}"
        steep = (replayed[at].norm or 0.0) / (median([point.norm for point in replayed if point.norm]) or 1.0)
        if kind == "jump" and steep > STEEP:
            sentence += f"; but its gradient is {steep:.0f} times the usual, and makes much of a little rounding"
    return Verdict(
        kind=kind,
        step=None if at is None else recorded[at].step,
        sentence=sentence,
        largest_loss=max((loss for loss, _ in gaps), default=0.0),
        largest_norm=max((norm for _, norm in gaps), default=0.0),
    )


def _cause(
    i: int,
    gaps: Sequence[tuple[float, float]],
    over: Sequence[tuple[float, float]],
    corpus_changed: bool,
    unlike: str | None,
) -> tuple[Kind, str]:
    """Why the first step that differs does."""
    loss_differs, norm_differs = (one > 1 for one in over[i])
    words = ("loss", "gradient norm")
    pairs = zip(words, gaps[i], over[i], strict=True)
    its = "its " + " and ".join(f"{word} differs by {gap:.1e}" for word, gap, one in pairs if one > 1)
    if loss_differs and corpus_changed:
        return "data", f"{its}, and the corpus has not the bytes that the run tells of: wrong data"
    if unlike:
        return "weights", f"{its}, and {unlike} of the checkpoint is not what the ranks hashed: wrong weights"
    later = [max(pair) for pair in over[i + 1 :]]
    if later and max(later) <= 1:
        return "record", f"{its}, and in no later step anything does: the record is wrong, not what was learned"
    if i == 0 and loss_differs:
        its += " before any update"
        return "data", f"{its}, though the corpus is the run's: other samples, or other weights, than it began with"
    if i == 0:
        return "reduction", f"its loss agrees, and {its}: right data and weights, wrong reduction of the gradients"
    if i == 1 and loss_differs:
        return "reduction", f"the step before agrees, and {its}: its update was another: wrong reduction"
    before = max(max(pair) for pair in over[max(0, i - 2) : i])
    if i > 1 and max(over[i]) <= JUMP * before:
        return "drift", f"{its}, after differences that grew step by step: rounding; fewer steps may agree"
    if loss_differs and norm_differs:
        return "jump", f"{its} all at once: its data, or the update before it, was another"
    where = "the update before it was another" if loss_differs else "wrong reduction of its gradients"
    return "jump", f"{its} all at once: {where}"


def _gap(recorded: float | None, replayed: float | None) -> float:
    if recorded is None or replayed is None:
        return 0.0
    return abs(recorded - replayed) / max(abs(replayed), 1e-30)


def _not_finite(fleet: Point, ours: Point, clips: bool) -> str:
    """What is not finite in a step, as a sentence; "" of one in which all is."""
    theirs_bad, ours_bad = (_bad(point, clips) for point in (fleet, ours))
    if theirs_bad and ours_bad:
        return (
            f"step {fleet.step + 1}: {theirs_bad} is not finite here either: not the machines, but the run's settings"
        )
    if theirs_bad:
        return f"step {fleet.step + 1}: the recorded {theirs_bad} is not finite, and the replayed one is"
    return f"step {fleet.step + 1}: the replayed {ours_bad} is not finite, and the recorded one is" if ours_bad else ""


def _bad(point: Point, clips: bool) -> str:
    if point.loss is None or not math.isfinite(point.loss):
        return "loss"
    if clips and (point.norm is None or not math.isfinite(point.norm)):
        return "gradient norm"
    return ""
