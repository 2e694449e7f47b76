"""What the ranks of a program trained with, compared; and the graphs of losses from which sizes are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel.distributed import _DDPSink

from evener.core.script.training_facts import (
    BatchNormFacts,
    OptimizerFacts,
    RankFacts,
    ReplicaSample,
    TensorFacts,
    compare_batch_norms,
    compare_facts,
    compare_replicas,
)
from evener.worker.script.loss_graph import find_reduction


def facts(**given: Any) -> RankFacts:
    return RankFacts(num_steps=20, **given)


def optimizer(*idle: str, is_trainable: bool = True) -> OptimizerFacts:
    tensors = [TensorFacts(name=name, is_trainable=is_trainable) for name in idle]
    return OptimizerFacts(line="x.py:3 in <module>", num_tensors=4, idle=tensors)


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([facts(inputs=[1, 2, 3, 4]), facts(inputs=[1, 2, 3, 4, 5])], "ranks 0 and 1 train on the same samples"),
        ([facts(inputs=[*"12345"]), facts(inputs=[*"62345"])], ""),
        ([facts(inputs=[1, 2, 3]), facts(inputs=[1, 2, 3])], ""),  # too few to tell
        ([facts(inputs=[7] * 9), facts(inputs=[7] * 9)], ""),  # a constant batch
        ([facts(inputs=[*range(9)]) for _ in "ab"] + [facts(inputs=[*range(9, 18)])], "ranks 0 and 1 train"),
        ([facts(inputs=[*range(9)]), facts()], ""),  # no DDP model of all ranks
        ([facts(optimizers=[optimizer("a")]), facts(optimizers=[optimizer("b")])], ""),  # each rank trains the other's
        ([facts(optimizers=[optimizer("a", "b")]), facts(optimizers=[optimizer("b")])], "no rank gave b a gradient"),
        ([facts(optimizers=[optimizer("a", is_trainable=False)])], ""),  # frozen
        ([facts(optimizers=[optimizer(*"abcd")])], "holds 4 tensors, of 4, that no rank gave a gradient in 20 steps"),
        ([facts(optimizers=[optimizer(*"abcd", is_trainable=False)])], "holds 4 tensors, of 4"),
        ([facts(optimizers=[optimizer("a")], not_optimized=["b"])], "the model trains b, which no optimizer updates"),
        ([facts(optimizers=[optimizer()], not_optimized=["b"])], ""),  # meant: all that it holds it trains
        ([facts(optimizers=[optimizer("a")]), facts()], ""),  # ranks with different programs
    ],
)
def test_facts_of_ranks(ranks: list[RankFacts], found: str) -> None:
    findings = compare_facts(ranks)
    assert len(findings) == bool(found)
    assert not found or found in findings[0].error


def batch_norms(weights: int, statistics: int) -> BatchNormFacts:
    return BatchNormFacts(num_layers=1, weights=weights, statistics=statistics)


def test_equal_weights_with_different_statistics() -> None:
    assert "BatchNorm" in compare_batch_norms([batch_norms(1, 2), batch_norms(1, 3)])[0].error
    assert not compare_batch_norms([batch_norms(1, 2), batch_norms(1, 2)])
    assert not compare_batch_norms([batch_norms(1, 2), batch_norms(3, 4)])  # stages


def sample(*sizes: float) -> ReplicaSample:
    return ReplicaSample(
        step=20, names=[*"ab"[: len(sizes)]], digests=[hash(size) for size in sizes], sizes=list(sizes)
    )


def test_replicas_differ_by_more_than_rounding() -> None:
    assert compare_replicas([sample(1.0, 2.0), sample(1.0, 2.0)]) is None
    assert compare_replicas([sample(1.0, 2.0), sample(1.0001, 2.0)]) is None
    assert compare_replicas([sample(1.0, 2.0), sample(1.0, 2.0), sample(1.0)]) is None  # another model
    mistake = compare_replicas([sample(1.0, 2.0), sample(1.0, 2.0), sample(1.0, 1.5)])
    assert mistake is not None
    assert "the models of ranks 0 and 2 differ after 20 updates, first in b: by 25.0% of its" in mistake.error


X = torch.randn(6, 5, requires_grad=True)
CLASSES = torch.arange(6) % 5


class Sink:
    """Stands for the DDP model, to which the node refers."""

    _ddp_sink_clone = True


def through_ddp(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss as a DDP model with find_unused_parameters returns it, the second of its outputs."""
    return _DDPSink.apply(lambda: Sink, X * 2, loss)[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss", "expected"),  # expected: rows, factor, whether it is a mean, whether it is the plain mean of its rows
    [
        (F.cross_entropy(X, CLASSES), (6, 1.0, True, True)),
        (F.cross_entropy(X, CLASSES) / 4, (6, 0.25, True, True)),
        (F.cross_entropy(X, CLASSES, reduction="sum"), (6, 1.0, False, False)),
        (F.cross_entropy(X, CLASSES, reduction="sum") / 6, (6, 1 / 6, False, True)),
        (F.cross_entropy(X, CLASSES, reduction="none").sum() / torch.tensor(12), (6, 1 / 12, False, False)),
        (F.mse_loss(X, torch.zeros(6, 5)) * 3, (6, 3.0, True, True)),
        (F.binary_cross_entropy_with_logits(X, torch.ones(6, 5)).float(), (6, 1.0, True, True)),
        (0.5 * (X**2).mean(), (6, 0.5, True, True)),
        ((X**2).sum(), (6, 1.0, False, False)),
        (F.mse_loss(X, torch.zeros(6, 5)) + X.sum(), None),
        (X.mean() * X.sum(), None),
        (nn.Parameter(torch.ones(())), None),
        (X.sum() / torch.tensor(0), None),  # by the labels of a batch that has none
        (through_ddp(F.cross_entropy(X, CLASSES)) * 2, (6, 2.0, True, True)),
    ],
)
def test_reduction_of_loss(loss: torch.Tensor, expected: tuple[int, float, bool, bool] | None) -> None:
    found = find_reduction(loss)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.num_rows, found.is_mean, found.is_mean_of_rows) == (expected[0], *expected[2:])
        assert found.factor == pytest.approx(expected[1])
