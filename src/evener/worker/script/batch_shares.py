"""Give the ranks of a program parts of each batch in proportion to their shares: `evener launch --shares 2:1`.

    the program's batch size b on n ranks    the global batch of nb samples, as without shares
    rank r's share of it                     b_r samples; all b_r together are nb
    its gradient                             times n b_r / (nb), before the program averages over the ranks

DDP's average of n gradients, each a mean over b_r samples, is then the mean over nb samples. Batches are divided where
the program iterates over them: a DataLoader with a DistributedSampler, or with accelerate's BatchSamplerShard, as
transformers' Trainer has. What is evaluated, under no_grad or by a model in eval(), is not divided; the Trainer's own
training batches always are, as it takes the first one before it calls train(). Where the factor
would not be right for what backward is called with, the program is refused.

A short last batch is filled with samples of its own to a multiple that has these proportions.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any

from evener.core.run.roster import weighted_shares
from evener.worker.script.loss_graph import find_reduction
from evener.worker.script.module_changer import ModuleChange, collect_instances
from evener.worker.script.report import end_program, warn


def divide_batch(batch: int, weights: Sequence[float]) -> list[int]:
    """Return each rank's samples of a global batch: at least one, the rest in proportion to the weights.

    >>> divide_batch(12, [2, 1]), divide_batch(4, [9, 1, 1])
    ([8, 4], [2, 1, 1])
    """
    shares = weighted_shares(batch, weights)
    for rank in range(len(shares)):
        while shares[rank] < 1:
            shares[shares.index(max(shares))] -= 1
            shares[rank] += 1
    return shares


def own_part(whole: Sequence[Any], sizes: Sequence[int], rank: int) -> list[Any]:
    """Return a rank's part of a global batch, which may be a short last one.

    >>> own_part("abcdefghijkl", [8, 4], 1), own_part("abcde", [8, 4], 1)
    (['i', 'j', 'k', 'l'], ['e', 'a'])
    """
    parts = math.gcd(*sizes)
    unit = sum(sizes) // parts  # the smallest batch of these proportions
    num_units = min(parts, math.ceil(len(whole) / unit))
    filled = [whole[i % len(whole)] for i in range(num_units * unit)]
    begin, size = (num_units * number // parts for number in (sum(sizes[:rank]), sizes[rank]))
    return filled[begin : begin + size]


class BatchShares:
    """The share of this rank."""

    def __init__(self, weights: Sequence[float], rank: int, world_size: int) -> None:
        self._weights, self._rank, self._world_size = weights, rank, world_size
        self._factor: float | None = None  # of gradients
        self._refusal = "its batches come from no DataLoader with a DistributedSampler or with accelerate's sharding"
        self._depth = 0  # of backward passes: torch's checkpoints call backward inside
        self._is_weighted = False  # a backward pass was
        self._is_reduction_known = True  # False: a loss was taken as a mean without being seen as one
        self._trainer_weighs: bool | None = None  # in a step of transformers' Trainer: whether it weighs its loss
        self._token_factor: float | None = None  # in such a step: by which a sum over tokens would be weighted
        self._trainer_shards: weakref.WeakSet[Any] = weakref.WeakSet()  # accelerate's, of its training batches
        # DDP models, whose mode tells training from evaluation
        self.ddp_models: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def factor(self) -> float:
        """The samples of this rank, by the mean over all ranks; 1 before the first batch."""
        return self._factor or 1.0

    def _refuse(self, reason: str) -> None:
        shares = ":".join(f"{weight:g}" for weight in self._weights)
        end_program(
            f"--shares {shares}: {reason}",
            hint="leave --shares out, or write the loop with evener.join, which divides batches itself",
        )

    def sizes(self, batch: int) -> list[int]:
        """Return the ranks' parts of a global batch, and weigh this rank's gradients by its own from now on."""
        if batch < self._world_size:
            self._refuse(f"a batch of {batch} samples has less than one for each of {self._world_size} ranks")
        sizes = divide_batch(batch, self._weights)
        factor = self._world_size * sizes[self._rank] / batch
        if self._factor not in (None, factor):
            self._refuse("it trains with batches of several sizes, which cannot be divided in the same proportions")
        self._factor = factor
        return sizes

    def _is_training(self) -> bool:
        """Return whether batches are taken to train with them."""
        import torch

        models = list(self.ddp_models)
        if not torch.is_grad_enabled():
            return False
        if models and not any(model.module.training for model in models):
            self._refusal = "its model is in eval() when it begins to take batches; call model.train() before that"
            return False
        return True

    # --- loaders ----------------------------------------------------------------------------------------------------

    def divide_loader(self, sampler_of: Callable[[Any], Any]) -> property:
        """Return the property of a DataLoader that gives its batches of indices."""

        def divided(loader: Any) -> Any:
            from torch.utils.data import BatchSampler, DistributedSampler

            sampler, original = loader.sampler, sampler_of(loader)
            if not isinstance(sampler, DistributedSampler) or type(original) is not BatchSampler:
                return original
            if sampler.num_replicas != self._world_size:
                return original
            if type(sampler).__iter__ is not DistributedSampler.__iter__:
                self._refusal = f"its {type(sampler).__name__} chooses samples in a way of its own"
                return original
            return _DividedBatches(
                original, lambda: self._of_sampler(sampler, loader.batch_size, loader.drop_last), self._is_training
            )

        return property(divided)

    def check_loader(self, iterate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return DataLoader.__iter__ that refuses to train with batches that are not divided."""

        @functools.wraps(iterate)
        def checked(loader: Any) -> Any:
            shard = sys.modules.get("accelerate.data_loader")
            is_divided = isinstance(loader._index_sampler, _DividedBatches) or (
                shard is not None and isinstance(loader._index_sampler, shard.BatchSamplerShard)
            )
            if self._factor is not None and not is_divided and self._is_training():
                self._refuse(f"it also trains with batches that evener does not divide: {self._refusal}")
            return iterate(loader)

        return checked

    def _of_sampler(self, sampler: Any, batch_size: int, drop_last: bool) -> Iterator[list[Any]]:
        sizes = self.sizes(batch_size * self._world_size)
        passes = []
        for rank in range(self._world_size):
            # Its own pass is the program's sampler's, whose epoch `TrainingChecks` compares with the pass before.
            of_rank = sampler if rank == sampler.rank else copy.copy(sampler)
            of_rank.rank = rank
            passes.append(iter(of_rank))
        while whole := [index for indices in passes for index in islice(indices, batch_size)]:
            if len(whole) == sum(sizes) or not drop_last:
                yield own_part(whole, sizes, self._rank)

    def divide_shard(self, iterate: Callable[[Any], Iterator[list[Any]]]) -> Callable[[Any], Iterator[list[Any]]]:
        """Return the __iter__ of accelerate's BatchSamplerShard."""

        @functools.wraps(iterate)
        def divided(shard: Any) -> Iterator[list[Any]]:
            is_training = shard in self._trainer_shards or self._is_training()
            if not is_training or shard.num_processes != self._world_size:
                yield from iterate(shard)
                return
            if not shard.even_batches or shard.batch_size is None:
                self._refuse("accelerate's batches are uneven: even_batches=False, or batches of a size of their own")
            sizes = self.sizes(shard.batch_size * (1 if shard.split_batches else self._world_size))
            batches = _Batches(list(shard.batch_sampler), shard.batch_size)
            shards = []
            for rank in range(self._world_size):
                other = copy.copy(shard)
                other.batch_sampler, other.process_index = batches, rank
                shards.append(iterate(other))
            for parts in zip(*shards, strict=True):
                yield own_part([index for part in parts for index in part], sizes, self._rank)

        return divided

    # --- gradients --------------------------------------------------------------------------------------------------

    def weigh(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return torch.autograd.backward that multiplies gradients by this rank's factor."""

        @functools.wraps(backward)
        def weighted(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._depth == 0:
                self._is_weighted = True
                self._see_trainer_loss(tensors)
                if not self._trainer_weighs:
                    grad_tensors = self._weighted(tensors, grad_tensors)
            self._depth += 1
            try:
                backward(tensors, grad_tensors, *args, **kwargs)
            finally:
                self._depth -= 1

        return weighted

    def _weighted(self, tensors: Any, gradients: Any) -> Any:
        import torch

        factor = self._factor
        if factor is None:
            self._refuse(self._refusal)
            raise AssertionError("the program has ended")
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [gradients] if isinstance(gradients, torch.Tensor) or gradients is None else list(gradients)
        if len(given) < len(roots):
            given = [None] * len(roots)
        weighted = []
        for root, gradient in zip(roots, given, strict=True):
            if root.numel() == 1:  # a loss; the gradient of anything else follows from one
                self._check_is_mean(root)
                gradient = torch.full_like(root, factor) if gradient is None else gradient * factor
            weighted.append(gradient)
        return weighted

    def _see_trainer_loss(self, tensors: Any) -> None:
        """See from the graph whether the Trainer's loss is a sum over tokens, divided by those of all ranks.

        A model that ignores their number returns a mean; a subclass of the Trainer, as trl's, may divide by itself.
        """
        if self._token_factor is None:
            return
        reduction = find_reduction(tensors if hasattr(tensors, "grad_fn") else tensors[0])
        if reduction is not None and reduction.is_mean:
            self._trainer_weighs = None
        elif reduction is not None and math.isclose(reduction.factor, self._token_factor, rel_tol=1e-4):
            self._trainer_weighs = True

    def _check_is_mean(self, loss: Any) -> None:
        if self._trainer_weighs is not None:  # the Trainer's loss is a mean over the rank's tokens
            return
        reduction = find_reduction(loss)
        if reduction is None and self._is_reduction_known:
            self._is_reduction_known = False
            warn(
                "--shares: the loss is taken as a mean over the rank's samples, which its graph does not show",
                hint="if it is a sum, leave --shares out",
            )
        if reduction is not None and not reduction.is_mean_of_rows:
            self._refuse(
                "the loss is a sum and no mean over the rank's samples, so that the program's average over the ranks "
                "is not weighted by them"
            )

    def check_update(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before an optimizer's step, refuse gradients that no weighted backward pass made."""
        has_closure = len(args) > 1 or bool(kwargs)
        if not self._is_weighted and not has_closure:
            self._refuse("its gradients come from no call of backward")

    def note_trainer(self, step: Callable[..., Any], compute_loss: Any) -> Callable[..., Any]:
        """Return transformers' Trainer.training_step: it may divide a sum by the tokens of all ranks by itself.

        What it returns is weighted as its gradient is, because the Trainer logs the mean of it over the ranks.
        """

        @functools.wraps(step)
        def noted(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            is_own = type(trainer).compute_loss is compute_loss and trainer.compute_loss_func is None
            if num_items_in_batch is not None and trainer.model_accepts_loss_kwargs:
                averages = bool(trainer.args.average_tokens_across_devices)
                self._trainer_weighs = averages if is_own else None
                num_items = float(num_items_in_batch)  # 0 where no token of the batch has a label
                self._token_factor = self._world_size / num_items if averages and num_items else None
            try:
                loss = step(trainer, model, inputs, num_items_in_batch)
                return loss if self._trainer_weighs else loss * self.factor
            finally:
                self._trainer_weighs = self._token_factor = None

        return noted

    def note_train_loader(self, get_train_dataloader: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return transformers' Trainer.get_train_dataloader that notes the batches as those of training."""

        @functools.wraps(get_train_dataloader)
        def noted(trainer: Any) -> Any:
            loader = get_train_dataloader(trainer)
            shard = sys.modules.get("accelerate.data_loader")
            if shard is not None and isinstance(loader.batch_sampler, shard.BatchSamplerShard):
                self._trainer_shards.add(loader.batch_sampler)
            return loader

        return noted


class _Batches:
    """Batches of indices that are known, in the place of a BatchSampler."""

    def __init__(self, batches: list[list[Any]], batch_size: int) -> None:
        self._batches, self.batch_size = batches, batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        return (list(batch) for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _DividedBatches:
    """The batches of a DataLoader: divided in training, else as they are."""

    def __init__(
        self, original: Any, divide: Callable[[], Iterator[list[Any]]], is_training: Callable[[], bool]
    ) -> None:
        self._original, self._divide, self._is_training = original, divide, is_training

    def __iter__(self) -> Iterator[list[Any]]:
        return self._divide() if self._is_training() else iter(self._original)

    def __len__(self) -> int:
        return len(self._original)


def divide_batches(shares: BatchShares) -> dict[str, ModuleChange]:
    """Return what to change in the modules when each is imported."""

    def change_autograd(autograd: ModuleType) -> None:
        autograd.backward = shares.weigh(autograd.backward)  # type: ignore[attr-defined]

    def change_loader(module: ModuleType) -> None:
        module.DataLoader._index_sampler = shares.divide_loader(module.DataLoader._index_sampler.fget)
        module.DataLoader.__iter__ = shares.check_loader(module.DataLoader.__iter__)

    def change_accelerate(module: ModuleType) -> None:
        module.BatchSamplerShard.__iter__ = shares.divide_shard(module.BatchSamplerShard.__iter__)

    def change_trainer(module: ModuleType) -> None:
        module.Trainer.get_train_dataloader = shares.note_train_loader(module.Trainer.get_train_dataloader)
        module.Trainer.training_step = shares.note_trainer(module.Trainer.training_step, module.Trainer.compute_loss)

    def change_ddp(module: ModuleType) -> None:
        ddp = module.DistributedDataParallel
        ddp.__init__ = collect_instances(ddp.__init__, shares.ddp_models)

    return {
        "torch.autograd": change_autograd,
        "torch.nn.parallel.distributed": change_ddp,
        "torch.optim.optimizer": lambda module: module.register_optimizer_step_pre_hook(shares.check_update),
        "torch.utils.data.dataloader": change_loader,
        "accelerate.data_loader": change_accelerate,
        "transformers.trainer": change_trainer,
    }
