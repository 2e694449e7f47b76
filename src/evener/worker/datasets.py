"""How does a torch Dataset or DataLoader become what `run.steps` reads: a pure function from (seed, step) to samples?

What a loader knows beside its data set is evener's to decide, so that any number of ranks reads the same samples and a
resumed run goes on with the next ones:

    batch_size        must be --batch, the global batch of all ranks together; a micro-batch is what `load` gets
    shuffle           every sample once an epoch, in an order drawn from --seed; without it as they lie, again and again
    drop_last         says nothing: a batch may lie across the end of an epoch, so none is shorter
    collate_fn        used, on each micro-batch
    num_workers, …    not used: samples are read by the rank itself, and the report says how long that took (data_s)
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
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from evener.core.errors import UsageError
from evener.core.spec import RunSpec
from evener.worker.sampling import epoch_indices

LOOKED_AT = 1024  # numbers of a tensor, all over it
ROUNDING = 0.05  # of the largest number: what differs by more is other data


class Dataset(Protocol):
    """What `Run.steps` reads."""

    def global_batch(self, seed: int, step: int, num_sequences: int) -> np.ndarray:
        """Samples of the global batch of a step: a pure function."""

    def num_tokens(self, samples: np.ndarray) -> float:
        """What the losses of these samples are weighed by: their tokens, their number, the sum of their weights."""

    def load(self, samples: np.ndarray, device: torch.device) -> Any:
        """The samples as the training program wants them."""


def as_dataset(source: Any, spec: RunSpec) -> Dataset:
    """`source` itself if it is a `Dataset`, else the adapter of a map-style torch Dataset or of a DataLoader of one.

    A sample of an adapter is an index, and counts as one token. UsageError says why something else cannot be read.
    """
    if all(hasattr(source, name) for name in ("global_batch", "num_tokens", "load")):
        return source
    if isinstance(source, DataLoader):
        return _of_loader(source, spec.train.batch)
    return Indexed(source, default_collate, shuffle=True)


class Indexed:
    """Samples of a map-style data set, put together by `collate`."""

    def __init__(self, source: Any, collate: Callable[[list[Any]], Any], *, shuffle: bool) -> None:
        name = type(source).__name__
        if isinstance(source, IterableDataset) or not hasattr(source, "__getitem__"):
            raise UsageError(
                f"run.steps: {name} cannot be read by index: no rank could read its own part of a batch, "
                "nor a resumed run go on where it was",
                hint="a data set with __getitem__ and __len__, or with evener's global_batch, num_tokens and load",
            )
        if not hasattr(source, "__len__") or len(source) == 0:
            raise UsageError(f"run.steps: {name} {'is empty' if hasattr(source, '__len__') else 'has no __len__'}")
        self._source, self._collate, self._shuffle = source, collate, shuffle

    def global_batch(self, seed: int, step: int, num_sequences: int) -> np.ndarray:
        """Indices of the samples of a step: (num_sequences,) int64."""
        first = step * num_sequences
        if self._shuffle:
            return epoch_indices(len(self._source), seed, first, num_sequences)
        return np.arange(first, first + num_sequences, dtype=np.int64) % len(self._source)

    def num_tokens(self, samples: np.ndarray) -> int:
        """One for each."""
        return len(samples)

    def load(self, samples: np.ndarray, device: torch.device) -> Any:
        """The samples collated, their tensors on the device."""
        indices = samples.tolist()
        many = getattr(self._source, "__getitems__", None)  # as torch's own loader asks
        batch = self._collate(many(indices) if many else [self._source[index] for index in indices])
        return to_device(batch, device)


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors on the device, wherever they are in tuples, lists and dicts; what has a `to` of its own is asked."""
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


class Fingerprint(msgspec.Struct, frozen=True):
    """Of a step's samples and of what the first of them is when it is read."""

    exact: str  # digest of the samples' numbers, and of shapes, whole numbers and text
    floats: list[list[float]]  # of each part: machines may decode an image, or resize it, with other rounding

    def is_like(self, other: Fingerprint) -> bool:
        """Is it of the same data?"""
        return (self.exact == other.exact and len(self.floats) == len(other.floats)
                and all(map(_are_near, self.floats, other.floats)))  # fmt: skip


def _are_near(ours: list[float], theirs: list[float]) -> bool:
    if len(ours) != len(theirs):
        return False
    most = ROUNDING * np.max(np.abs(ours), initial=0.0)
    return bool(np.all(np.abs(np.subtract(ours, theirs)) <= most))


def fingerprint(dataset: Dataset, samples: np.ndarray) -> Fingerprint | None:
    """By which ranks see that they have the same data; None where reading a sample again gives another, as of images
    that are cropped at random.
    """
    once, again = (_fingerprint(samples, dataset.load(samples[:1], torch.device("cpu"))) for _ in range(2))
    return once if once == again else None


def _fingerprint(samples: np.ndarray, batch: Any) -> Fingerprint:
    digest, floats = hashlib.blake2b(repr(samples.tolist()).encode(), digest_size=16), []
    for leaf in tree_leaves(batch):
        values, is_image = [leaf.item() if isinstance(leaf, np.generic) else leaf], False
        if isinstance(leaf, np.ndarray) or (isinstance(leaf, Tensor) and _is_plain(leaf)):
            digest.update(repr(tuple(leaf.shape)).encode())
            flat = leaf.reshape(-1)
            values = flat[:: max(1, len(flat) // LOOKED_AT)].tolist()
            is_image = leaf.ndim > 1 and leaf.dtype in (torch.uint8, np.uint8)
        found = [float(value) for value in values if is_image or isinstance(value, float)]
        floats.append([value for value in found if math.isfinite(value)])
        digest.update(repr([value for value in values if isinstance(value, int | str) and not is_image]).encode())
    return Fingerprint(exact=digest.hexdigest(), floats=floats)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized


def _of_loader(loader: DataLoader[Any], batch: int) -> Indexed:
    if isinstance(loader.dataset, IterableDataset):
        return Indexed(loader.dataset, loader.collate_fn, shuffle=False)  # which refuses it
    remedy = "DataLoader(dataset, batch_size=…, shuffle=…); an order of your own: global_batch, num_tokens and load"
    if loader.batch_size is None:
        what = "no batch_size" if loader.batch_sampler is None else "a batch_sampler of its own"
        raise UsageError(f"run.steps: the DataLoader has {what}: evener divides batches over the ranks", hint=remedy)
    sampler = loader.sampler
    is_plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]  # map-style: see above
    )
    if not is_plain:
        raise UsageError(
            f"run.steps: the DataLoader has a {type(sampler).__name__} of its own: which samples a step reads must be "
            "the same on any number of ranks, and known without those of the steps before",
            hint=remedy,
        )
    if loader.batch_size != batch:
        raise UsageError(
            f"run.steps: the DataLoader has batch_size {loader.batch_size} and the run --batch {batch}",
            hint=f"batch_size=run.spec.train.batch, or --batch {loader.batch_size}: of all ranks together",
        )
    return Indexed(loader.dataset, loader.collate_fn, shuffle=type(sampler) is RandomSampler)
