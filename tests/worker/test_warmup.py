"""Warmup tells a sum loss from a mean despite noise, and leaves no trace in the training state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evener.core.base.errors import UsageError
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.state.training_state import TrainingState
from evener.worker.train.warmup import WarmupStep, classify_loss_reduction

from ..tiers import exhaustively

GROUP = ProcessGroups("cpu")  # of one rank
NUM_PROGRAMS = 4
LOSSES = {
    "cross-entropy": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "squares": lambda out, y: (out - F.one_hot(y, 5)).square().sum(),
    "binary": lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 5).float(), reduction="sum"),
}


def trained(module: nn.Module) -> TrainingState:
    found = TrainingState(torch.amp.GradScaler("cpu", enabled=False))
    found.models.append(module)
    return found


def rehearse(module, loss, size: int, things=(), *, is_compiled: bool = False) -> int:
    """How many parts were run; UsageError where the loss is no sum."""
    known = trained(module)
    for name, thing in things:
        known.add_state(f"user/{name}", thing)
    rehearsal = WarmupStep(known, GROUP, is_user_program=True, is_compiled=is_compiled)
    exchanged = []
    for part, exchanges in rehearsal.micro_batches(np.arange(100, 100 + size), [size]):
        rehearsal.record_losses([float(loss(module, torch.from_numpy(part)).detach())])
        exchanged.append(exchanges)
    assert exchanged == [False] * (len(exchanged) - 1) + [True]
    rehearsal.finish(True, None)
    return len(exchanged)


def program(kind: str, dropout: float, normalizes: bool):
    """A small network and the samples by their numbers."""
    norm = nn.BatchNorm1d(32) if normalizes else nn.Identity()
    net = nn.Sequential(nn.Linear(16, 32), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 5))
    x, y = torch.randn(200, 16), torch.randint(5, (200,))
    return net, lambda module, part: LOSSES[kind](module(x[part]), y[part])


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("dropout", "normalizes"), [(0.0, False), (0.2, False), (0.5, False), (0.5, True)])
@pytest.mark.parametrize("size", [2, 5, 16])
def test_warmup_refuses_mean_loss_and_accepts_sum_loss(kind, dropout, normalizes, size):
    torch.manual_seed(size)
    for _ in range(NUM_PROGRAMS):
        net, loss = program(kind, dropout, normalizes)
        assert rehearse(net, loss, size) <= 2 * 64 + 1
        with pytest.raises(UsageError, match="got a mean: on rank 0 some samples give"):
            rehearse(net, lambda module, part, loss=loss: loss(module, part) / len(part), size)
        with pytest.raises(UsageError, match="got a sum multiplied by a count: on rank 0 some samples give"):
            rehearse(net, lambda module, part, loss=loss: loss(module, part) * len(part), size)


def contrastive(module, part):
    """The other samples of its micro-batch are what each sample is told from."""
    out = F.normalize(module(part), dim=1)
    return F.cross_entropy(out @ out.T / 0.1, torch.arange(len(part)), reduction="sum")


@pytest.mark.parametrize(
    ("loss", "refused"),
    [
        (lambda module, part: module(part).square().sum() * part.numel(), "sum multiplied by a count"),  # of elements
        (lambda module, part: module(part).square().sum() ** 2, "sum multiplied by a count"),  # grows like one
        (lambda module, part: -module(part).square().sum() * len(part), "sum multiplied by a count"),  # a reward
        (contrastive, "loss that is not a sum over its samples"),
        (lambda module, part: module(part).square().sum() * (1 + len(part)), "loss that is not a sum over its samples"),
    ],
)
def test_loss_that_grows_faster_than_its_samples_is_refused(loss, refused):
    torch.manual_seed(0)
    x = torch.randn(200, 16)
    with pytest.raises(UsageError, match=f"step.backward got a {refused}: on rank 0 some samples give"):
        rehearse(nn.Linear(16, 5), lambda module, part: loss(module, x[part]), 8)


@pytest.mark.parametrize("values_a_sample", [16, *exhaustively(1)])
def test_noisy_sum_is_not_mistaken_for_a_multiplied_sum(values_a_sample):
    """The loss of one sample is the sum of squares of that many normal values, as an untrained diffusion model's."""
    draw = np.random.default_rng(4)
    found = [classify(lambda num: (draw.normal(size=num * values_a_sample) ** 2).sum()) for _ in range(200)]
    assert found.count("sum multiplied by a count") == 0
    multiplied = [classify(lambda num: num * (draw.normal(size=num * 16) ** 2).sum()) for _ in range(50)]
    assert multiplied.count("sum multiplied by a count") > 45


def classify(loss):
    """The reduction of a loss of so many samples, from as many trials as it takes."""
    trials: list[tuple[float, float]] = []
    while (found := classify_loss_reduction(trials)) is None:
        trials.append((loss(1), loss(2)))
    return found


def test_rehearsal_of_deterministic_sum_loss_takes_three_passes():
    assert rehearse(*program("squares", 0.0, False), 8) == 3
    assert rehearse(*program("squares", 0.0, False), 1) == 1  # one sample has no half


def test_sum_loss_with_constant_term_is_refused():
    """A penalty on weights, once for each micro-batch: with two ranks it would count twice."""
    net, loss = program("squares", 0.0, False)

    def penalized(module, part):
        return loss(module, part) + 0.1 * sum(p.square().sum() for p in module.parameters())

    with pytest.raises(UsageError, match="got a mix of a sum and a mean: on rank 0 some samples give"):
        rehearse(net, penalized, 8)


def test_bf16_rounded_sums_are_accepted():
    torch.manual_seed(0)
    for size in (2, 5, 16):
        net, loss = program("squares", 0.0, False)
        rehearse(net, lambda module, part, loss=loss: loss(module, part).bfloat16(), size)


def test_noisy_loss_is_rarely_mistaken_for_mean():
    """A critic's, real against made up, before it has learned anything: its sums are random and near 0."""
    draw = np.random.default_rng(3)
    refused = 0
    for _ in range(4000):
        refused += classify(lambda num: draw.normal() * num**0.5) != "sum"
    assert refused <= 4  # ten losses of one sign are one in 512, and then their ratio decides


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 5)

    def forward(self, x):
        return self.linear(x).square()


def test_compiled_model_compiles_only_full_batch_size():
    sizes, net, x = [], Squares(), torch.randn(200, 16)

    def backend(graph, inputs):
        sizes.append({len(one) for one in inputs if one.ndim == 2 and not one.requires_grad})
        return graph.forward

    net.compile(backend=backend)
    with pytest.raises(UsageError, match="got a mean"):
        rehearse(net, lambda module, part: module(x[part]).mean(), 8, is_compiled=True)
    assert sizes == [{8}]


class Counter:
    """A state that its program moves inside of the loop over micro-batches."""

    def __init__(self) -> None:
        self.seen = torch.zeros(2)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Table(dict[int, int]):
    """One that has nothing to say at first."""

    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        self.clear()
        self.update(state)


def test_rehearsal_restores_buffers_states_and_generators():
    net = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    counter, table, x = Counter(), Table(), torch.randn(200, 16)

    def draw():
        return torch.randn(3).tolist(), np.random.randn(3).tolist(), [random.gauss(0, 1) for _ in range(3)]

    def loss(module, part):
        draw()
        counter.seen += len(part)
        table[len(part)] = 1
        return module(x[part]).square().sum()

    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(4)
    random.gauss(0, 1)  # half a pair is kept, in numpy's too
    np.random.randn(1)
    expected = draw()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(4)
    random.gauss(0, 1)
    np.random.randn(1)
    rehearse(net, loss, 8, [("counter", counter), ("table", table)])
    assert draw() == expected
    assert counter.seen.tolist() == [0.0, 0.0]
    assert table == {}
    assert net[1].num_batches_tracked == 0
    assert net[1].running_mean.abs().max() == 0
