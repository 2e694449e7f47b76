"""Compare a run's losses and gradient norms with those of its replay, and name the first difference."""

from __future__ import annotations

import pytest

from evener.report.explain.replay_check import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    ReplayEvidence,
    ReplayPoint,
    compare_replay,
    compare_replay_by_rank,
    replay_tolerance,
)

LOSSES, NORMS = [4.0, 3.5, 3.1, 2.8, 2.6, 2.5], [1.0, 0.9, 0.8, 0.85, 0.7, 0.6]


def points(losses=LOSSES, norms=NORMS, first=10):
    return [
        ReplayPoint(step=first + i, loss=loss, grad_norm=norm)
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]


def off(values, factors):
    """The values, with those from some place on changed by these factors."""
    return [value * (1 + factor) for value, factor in zip(values, factors, strict=True)]


REPLAYED = points()
AT_ONCE = [0.0, 0.0, 0.0, 1e-2, 2e-2, 2e-2]


@pytest.mark.parametrize(
    ("losses", "norms", "more", "kind", "step"),
    [
        (LOSSES, NORMS, {}, "agree", None),
        (off(LOSSES, [5e-6] * 6), off(NORMS, [5e-5] * 6), {}, "agree", None),
        (LOSSES, NORMS, {"corpus_changed": True}, "agree", None),
        (off(LOSSES, [1e-2] * 6), off(NORMS, [3e-2] * 6), {}, "data", 10),
        (off(LOSSES, [1e-2] * 6), off(NORMS, [3e-2] * 6), {"corpus_changed": True}, "data", 10),
        (off(LOSSES, [1e-2] * 6), off(NORMS, [3e-2] * 6), {"mismatched_tensor": "norm.weight"}, "weights", 10),
        (off(LOSSES, AT_ONCE), off(NORMS, AT_ONCE), {"corpus_changed": True}, "data", 13),
        (off(LOSSES, [0, *[1e-2] * 5]), off(NORMS, [1.0] * 6), {}, "reduction", 10),
        (LOSSES, off(NORMS, [1.0] * 6), {}, "reduction", 10),  # Adam does not mind a factor
        (off(LOSSES, [0, *[1e-2] * 5]), off(NORMS, [0, *[1e-2] * 5]), {}, "reduction", 11),
        (off(LOSSES, AT_ONCE), off(NORMS, AT_ONCE), {}, "jump", 13),
        (off(LOSSES, [0, 0, 0, 0, 1e-2, 1e-2]), off(NORMS, AT_ONCE), {}, "jump", 13),
        (off(LOSSES, [1e-7, 4e-7, 1e-6, 3e-6, 9e-6, 2e-5]), NORMS, {}, "drift", 15),
        (off(LOSSES, [0, 0, 1e-3, 0, 0, 0]), NORMS, {}, "record", 12),
        (off(LOSSES, [1e-3, 0, 0, 0, 0, 0]), NORMS, {}, "record", 10),
        (LOSSES, off(NORMS, [0, 0, 0, 1e-2, 0, 0]), {}, "record", 13),
        ([*LOSSES[:4], None, 2.5], NORMS, {}, "nonfinite", 14),
        ([*LOSSES[:4], float("inf"), 2.5], NORMS, {}, "nonfinite", 14),
        (LOSSES, [*NORMS[:4], None, 0.6], {}, "nonfinite", 14),
        (LOSSES, [None] * 6, {"has_grad_norms": False}, "agree", None),
        ([*off(LOSSES[:4], [1e-2] * 4), None, 2.5], NORMS, {}, "data", 10),  # what came first
    ],
)
def test_first_difference_determines_replay_verdict(losses, norms, more, kind, step):
    found = compare_replay(points(losses, norms), REPLAYED, FP32_TOLERANCE, ReplayEvidence(**more))
    assert (found.kind, found.step) == (kind, step), found.sentence
    assert found.is_match == (kind == "agree")
    assert step is None or found.sentence.startswith(f"step {step + 1}: ")
    assert "\n" not in found.sentence


def test_non_finite_replay_is_reported():
    replay = [*REPLAYED[:2], ReplayPoint(step=12, loss=None, grad_norm=1.0)]  # it ends there
    assert "replayed loss is not finite" in compare_replay(points(), replay, FP32_TOLERANCE).sentence
    both = compare_replay([*points()[:2], ReplayPoint(step=12, loss=None, grad_norm=1.0)], replay, FP32_TOLERANCE)
    assert (both.kind, both.step) == ("nonfinite", 12)
    assert "here either" in both.sentence


def test_single_rank_record_difference_is_attributed():
    recorded = {0: points(), 1: points(off(LOSSES, [0, 0, 1e-3, 0, 0, 0]))}
    found = compare_replay_by_rank(recorded, REPLAYED, FP32_TOLERANCE)
    assert (found.kind, found.step, found.rank) == ("record", 12, 1)
    assert "only those of rank 1 differ" in found.sentence
    assert compare_replay_by_rank({0: points(), 1: points()}, REPLAYED, FP32_TOLERANCE).is_match


def test_tolerance_depends_on_dtype_and_strategy():
    assert replay_tolerance({"fp32"}, ["ddp"]) == replay_tolerance({"fp32"}, ["none", "packed"]) == FP32_TOLERANCE
    assert replay_tolerance({"fp32", "bf16"}, ["ddp"]) == BF16_TOLERANCE
    lossy = replay_tolerance({"fp32"}, ["ddp", "powersgd:4+sparse"])
    assert lossy.first == (FP32_TOLERANCE.first[0], None)  # weights were in common before it
    assert lossy.later[0] > FP32_TOLERANCE.later[0]
    assert "powersgd:4" in lossy.why
    assert replay_tolerance({"fp32"}, ["int8"]).first[1] > FP32_TOLERANCE.first[1]
    assert compare_replay(points(norms=off(NORMS, [0.3] * 6)), REPLAYED, lossy).is_match
    # only its first loss is exact
    assert compare_replay(points(off(LOSSES, [1e-3] * 6)), REPLAYED, lossy).kind == "record"
    assert compare_replay(points(off(LOSSES, [1e-1] * 6)), REPLAYED, lossy).kind == "data"


def test_gradient_norm_jump_is_reported():
    norms = [*NORMS[:3], 80.0, *NORMS[4:]]
    found = compare_replay(points(off(LOSSES, AT_ONCE), norms), points(norms=norms), FP32_TOLERANCE)
    assert found.kind == "jump"
    assert "times the usual" in found.sentence
