"""Adapters from a torch Dataset or DataLoader to what `run.steps` reads: a pure function (seed, step) → samples.

evener replaces the sampler of a DataLoader, so that any number of ranks reads the same samples and a resumed run
continues with the next ones:

    batch_size        must be --batch, the global batch of all ranks together; `load` gets one micro-batch
    shuffle           every sample once an epoch, in an order drawn from --seed; without it in stored order
    drop_last         ignored: a batch may span the end of an epoch, so none is shorter
    collate_fn        used, on each micro-batch
    num_workers, …    ignored: the rank reads samples itself, and the report gives the time (data_s)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from evener.core.base.errors import UsageError
from evener.core.run.run_spec import RunSpec
from evener.corpus.sampling import epoch_indices
from evener.worker.rank.torch_private import tree_leaves

NUM_SAMPLED_VALUES = 1024  # of a tensor, evenly spaced
FLOAT_TOLERANCE = 0.05  # relative to the largest value: a larger difference means other data


class Dataset(Protocol):
    """A data set that `Run.steps` reads: the samples of each step, their weight, and their content."""

    def global_batch(self, seed: int, step: int, num_sequences: int) -> np.ndarray:
        """Return the samples of a step's global batch; must be a pure function."""

    def num_tokens(self, samples: np.ndarray) -> float:
        """Return the weight of these samples in the loss: their tokens, their number, or the sum of their weights."""

    def load(self, samples: np.ndarray, device: torch.device) -> Any:
        """Load the samples as the training program wants them."""


def as_dataset(source: Any, spec: RunSpec) -> Dataset:
    """Return `source` itself if it is a `Dataset`, else an adapter of a map-style torch Dataset or of its DataLoader.

    A sample of an adapter is an index, and counts as one token. Raise UsageError if `source` cannot be read.
    """
    if all(hasattr(source, name) for name in ("global_batch", "num_tokens", "load")):
        return source
    if isinstance(source, DataLoader):
        return _from_dataloader(source, spec.train.batch)
    return MapStyleDataset(source, default_collate, shuffle=True)


class MapStyleDataset:
    """Adapter of a map-style data set; `collate` makes a batch of its samples."""

    def __init__(self, source: Any, collate: Callable[[list[Any]], Any], *, shuffle: bool) -> None:
        name = type(source).__name__
        if isinstance(source, IterableDataset) or not hasattr(source, "__getitem__"):
            raise UsageError(
                f"run.steps: {name} cannot be read by index: no rank could read its own share of a batch, "
                "and no resumed run could continue where it was",
                hint="a data set with __getitem__ and __len__, or with evener's global_batch, num_tokens and load",
            )
        if not hasattr(source, "__len__") or len(source) == 0:
            raise UsageError(f"run.steps: {name} {'is empty' if hasattr(source, '__len__') else 'has no __len__'}")
        self._source, self._collate, self._shuffle = source, collate, shuffle

    def global_batch(self, seed: int, step: int, num_sequences: int) -> np.ndarray:
        """Return the indices of a step's samples: (num_sequences,) int64."""
        first = step * num_sequences
        if self._shuffle:
            return epoch_indices(len(self._source), seed, first, num_sequences)
        return np.arange(first, first + num_sequences, dtype=np.int64) % len(self._source)

    def num_tokens(self, samples: np.ndarray) -> int:
        """Return the number of samples: each counts as one token."""
        return len(samples)

    def load(self, samples: np.ndarray, device: torch.device) -> Any:
        """Load and collate the samples; tensors are on the device."""
        indices = samples.tolist()
        get_many = getattr(self._source, "__getitems__", None)  # torch's DataLoader does the same
        batch = self._collate(get_many(indices) if get_many else [self._source[index] for index in indices])
        return to_device(batch, device)


def to_device(value: Any, device: torch.device) -> Any:
    """Move tensors in nested tuples, lists and dicts to the device; an object with a `to` method moves itself."""
    if isinstance(value, Tensor):
        if device.type == "cuda" and value.device.type == "cpu":
            return value.pin_memory().to(device, non_blocking=True)
        return value.to(device)
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(part, device) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(part, device) for part in value)
    if isinstance(value, Mapping):
        return {key: to_device(part, device) for key, part in value.items()}
    return value


class DataFingerprint(msgspec.Struct, frozen=True):
    """Fingerprint of a step's samples: their indices, and the content of the first one."""

    exact: str  # digest of the samples' indices, and of shapes, integers and text
    floats: list[list[float]]  # sampled from each leaf; compared with a tolerance: machines decode images differently

    def is_same_data(self, other: DataFingerprint) -> bool:
        """Return whether both are of the same data, up to rounding of floats."""
        return (self.exact == other.exact and len(self.floats) == len(other.floats)
                and all(map(_are_close, self.floats, other.floats)))  # fmt: skip


def _are_close(ours: list[float], theirs: list[float]) -> bool:
    if len(ours) != len(theirs):
        return False
    tolerance = FLOAT_TOLERANCE * np.max(np.abs(ours), initial=0.0)
    return bool(np.all(np.abs(np.subtract(ours, theirs)) <= tolerance))


def fingerprint_data(dataset: Dataset, samples: np.ndarray) -> DataFingerprint | None:
    """Return a fingerprint by which ranks compare their data; None if reading is random, as with random crops."""
    first, second = (_fingerprint_once(samples, dataset.load(samples[:1], torch.device("cpu"))) for _ in range(2))
    return first if first == second else None


def _fingerprint_once(samples: np.ndarray, batch: Any) -> DataFingerprint:
    digest, floats = hashlib.blake2b(repr(samples.tolist()).encode(), digest_size=16), []
    for leaf in tree_leaves(batch):
        values, is_image = [leaf.item() if isinstance(leaf, np.generic) else leaf], False
        if isinstance(leaf, np.ndarray) or (isinstance(leaf, Tensor) and _is_strided(leaf)):
            digest.update(repr(tuple(leaf.shape)).encode())
            flat = leaf.reshape(-1)
            values = flat[:: max(1, len(flat) // NUM_SAMPLED_VALUES)].tolist()
            is_image = leaf.ndim > 1 and leaf.dtype in (torch.uint8, np.uint8)
        numbers = [float(value) for value in values if is_image or isinstance(value, float)]
        floats.append([value for value in numbers if math.isfinite(value)])
        digest.update(repr([value for value in values if isinstance(value, int | str) and not is_image]).encode())
    return DataFingerprint(exact=digest.hexdigest(), floats=floats)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _from_dataloader(loader: DataLoader[Any], batch: int) -> MapStyleDataset:
    if isinstance(loader.dataset, IterableDataset):
        return MapStyleDataset(loader.dataset, loader.collate_fn, shuffle=False)  # its constructor refuses it
    remedy = "DataLoader(dataset, batch_size=…, shuffle=…); for your own order: global_batch, num_tokens and load"
    if loader.batch_size is None:
        problem = "no batch_size" if loader.batch_sampler is None else "a batch_sampler of its own"
        raise UsageError(f"run.steps: the DataLoader has {problem}: evener divides batches over the ranks", hint=remedy)
    sampler = loader.sampler
    is_plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]  # map-style: see above
    )
    if not is_plain:
        raise UsageError(
            f"run.steps: the DataLoader has a {type(sampler).__name__} of its own: a step's samples must be the same "
            "on any number of ranks, and known without those of the steps before",
            hint=remedy,
        )
    if loader.batch_size != batch:
        raise UsageError(
            f"run.steps: the DataLoader has batch_size {loader.batch_size} and the run --batch {batch}",
            hint=f"batch_size=run.spec.train.batch, or --batch {loader.batch_size}: of all ranks together",
        )
    return MapStyleDataset(loader.dataset, loader.collate_fn, shuffle=type(sampler) is RandomSampler)
