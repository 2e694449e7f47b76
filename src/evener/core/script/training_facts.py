"""Compare what the ranks of a program trained with, and name mistakes that no rank alone can see.

Each rank sends its facts once, after its first optimizer steps; rank 0 compares them. A mistake is named only where all
ranks agree on it: a parameter without a gradient on one rank may have one on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from evener.core.base.units import join_names

REPLICA_RTOL = 1e-3  # of a mean; unlike processors round differently
MIN_BATCHES = 4  # equal on two ranks before they are said to train on the same samples


class TensorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that an optimizer updates, or a parameter of a model."""

    name: str  # in its model, or its number in the optimizer and its shape
    is_trainable: bool = True  # requires_grad


class OptimizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An optimizer of a rank."""

    line: str  # that made it
    num_tensors: int
    idle: list[TensorFacts]  # its tensors that have had no gradient at any of its updates


class BatchNormFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The layers with which a rank first evaluates, whose statistics DDP does not copy; hashes of their values."""

    num_layers: int
    weights: int
    statistics: int


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The batches and optimizers with which a rank took its first optimizer steps."""

    num_steps: int
    inputs: list[int] = []  # hashes of the first batches of its DDP models of all ranks
    optimizers: list[OptimizerFacts] = []
    not_optimized: list[str] = []  # parameters of its DDP models that have gradients and are in no optimizer


class ReplicaSample(msgspec.Struct, frozen=True, kw_only=True):
    """Elements of the parameters of a rank's DDP models after an update; all ranks should have the same."""

    step: int  # updates until then
    names: list[str]  # of the parameters
    digests: list[int]  # of each one's elements
    sizes: list[float]  # the mean of their absolute values; -1: not a finite number


@dataclass(frozen=True)
class TrainingMistake:
    """A probable mistake of the program, and its remedy."""

    error: str
    hint: str


def compare_facts(ranks: Sequence[RankFacts]) -> list[TrainingMistake]:
    """Return the probable mistakes that the facts of all ranks, in order, show."""
    return [*_same_data(ranks), *_idle_tensors(ranks)]


def _same_data(ranks: Sequence[RankFacts]) -> list[TrainingMistake]:
    """Ranks whose models were given equal batches: together they learn what one of them would."""
    num = min(len(facts.inputs) for facts in ranks)
    by_inputs: dict[tuple[int, ...], list[int]] = {}
    for rank, facts in enumerate(ranks):
        by_inputs.setdefault(tuple(facts.inputs[:num]), []).append(rank)
    same = max(by_inputs.items(), key=lambda item: len(item[1]))
    if num < MIN_BATCHES or len(same[1]) < 2 or len(set(same[0])) < 2:  # a constant batch may be a test
        return []
    numbers = join_names([str(rank) for rank in same[1]])
    return [
        TrainingMistake(
            f"ranks {numbers} train on the same samples: the first {num} batches of their DDP models are "
            "equal, so that together they learn what one of them would",
            "give the DataLoader sampler=DistributedSampler(dataset), or seed what draws the samples by the rank",
        )
    ]


def _idle_tensors(ranks: Sequence[RankFacts]) -> list[TrainingMistake]:
    """Optimizers that hold other tensors than the model trains, and parameters that nothing trains."""
    findings = []
    not_optimized = sorted(set(ranks[0].not_optimized).intersection(*(facts.not_optimized for facts in ranks[1:])))
    for i, optimizer in enumerate(ranks[0].optimizers):
        others = [facts.optimizers[i] for facts in ranks[1:] if i < len(facts.optimizers)]
        if len(others) < len(ranks) - 1:
            continue
        idle_there = [{tensor.name for tensor in other.idle} for other in others]
        idle = [tensor for tensor in optimizer.idle if all(tensor.name in names for names in idle_there)]
        trainable = [tensor.name for tensor in idle if tensor.is_trainable]
        made = f"the optimizer made at {optimizer.line}"
        if idle and (len(idle) == optimizer.num_tensors or not_optimized):
            trains = (
                f"; the model trains {join_names(not_optimized)}, which no optimizer updates" if not_optimized else ""
            )
            findings.append(
                TrainingMistake(
                    f"{made} holds {len(idle)} tensors, of {optimizer.num_tensors}, that no rank gave a gradient in "
                    f"{ranks[0].num_steps} steps{trains}",
                    "make the optimizer last: after new layers, .to(device), fully_shard and DistributedDataParallel",
                )
            )
        elif trainable:
            findings.append(
                TrainingMistake(
                    f"no rank gave {join_names(trainable)} a gradient in {ranks[0].num_steps} steps, and so {made} "
                    "does not train it",
                    "is a layer left out of forward, or its result left out of the loss? If it is meant, set "
                    "requires_grad=False",
                )
            )
    return findings


def compare_replicas(ranks: Sequence[ReplicaSample]) -> TrainingMistake | None:
    """Return how the DDP models of the ranks differ by more than rounding; None if they do not."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if other.names != first.names:
            continue  # other models
        for i, name in enumerate(first.names):
            largest = max(abs(first.sizes[i]), abs(other.sizes[i]))
            if other.digests[i] != first.digests[i] and abs(other.sizes[i] - first.sizes[i]) > REPLICA_RTOL * largest:
                return TrainingMistake(
                    f"the models of ranks 0 and {rank} differ after {first.step} updates, first in {name}: by "
                    f"{abs(other.sizes[i] - first.sizes[i]) / largest:.1%} of its mean size",
                    "each rank must start from the same weights and update them in the same way: does one change them "
                    "after DistributedDataParallel was made, or load another checkpoint or learning rate?",
                )
    return None


def compare_batch_norms(ranks: Sequence[BatchNormFacts]) -> list[TrainingMistake]:
    """Return the mistake that replicas evaluate equal weights with different running statistics."""
    if len({(one.num_layers, one.weights) for one in ranks}) > 1:
        return []  # no replicas
    if len({one.statistics for one in ranks}) == 1:
        return []
    return [
        TrainingMistake(
            "the ranks' models differ: the running statistics of their BatchNorm layers are those of each rank's own "
            "samples, so each evaluates another model and a checkpoint holds one rank's",
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or DistributedDataParallel with its default, "
            "broadcast_buffers=True",
        )
    ]
