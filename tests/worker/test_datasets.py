"""A torch Dataset or DataLoader is read in reproducible epochs, or refused with a reason."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from evener.core.base.decoding import from_json
from evener.core.base.errors import UsageError
from evener.core.run.run_spec import RunSpec
from evener.worker.train.datasets import DataFingerprint, MapStyleDataset, as_dataset, fingerprint_data, to_device

CPU = torch.device("cpu")
DATA = TensorDataset(torch.arange(50.0)[:, None], torch.arange(50))
SPEC = RunSpec(train=msgspec.structs.replace(RunSpec().train, batch=8))


def numbers(dataset, num_steps: int, seed: int = 1, batch: int = 8) -> list[int]:
    return [int(i) for step in range(num_steps) for i in dataset.global_batch(seed, step, batch)]


@pytest.mark.parametrize("source", [DATA, DataLoader(DATA, batch_size=8, shuffle=True)], ids=["dataset", "loader"])
def test_every_sample_appears_once_per_epoch_in_new_order(source):
    dataset = as_dataset(source, SPEC)
    drawn = numbers(dataset, 25)  # four epochs
    epochs = [drawn[i : i + 50] for i in range(0, 200, 50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert numbers(dataset, 25, seed=2) != drawn
    assert numbers(dataset, 25) == drawn
    assert dataset.global_batch(1, 3, 8).dtype == np.int64


def test_unshuffled_loader_keeps_its_order():
    dataset = as_dataset(DataLoader(DATA, batch_size=8), SPEC)
    assert numbers(dataset, 13) == [i % 50 for i in range(104)]


def test_batches_equal_those_of_the_dataloader():
    loader = DataLoader(DATA, batch_size=8)
    dataset = as_dataset(loader, SPEC)
    for step, (x, y) in enumerate(loader):
        if len(x) == 8:
            samples = dataset.global_batch(0, step, 8)
            ours = dataset.load(samples, CPU)
            assert torch.equal(ours[0], x)
            assert torch.equal(ours[1], y)
            assert dataset.num_tokens(samples) == 8


def test_collate_fn_and_getitems_are_used():
    class Many(Dataset):
        def __len__(self):
            return 5

        def __getitems__(self, indices):
            return [f"item {i}" for i in indices]

        def __getitem__(self, index):
            raise AssertionError("asked one by one")

    loader = DataLoader(Many(), batch_size=8, collate_fn=lambda items: {"text": items})
    assert as_dataset(loader, SPEC).load(np.array([3, 1]), CPU) == {"text": ["item 3", "item 1"]}


def test_nested_tensors_are_moved_to_device():
    Pair = namedtuple("Pair", "x y")

    class Batch:
        def to(self, device):
            return ("batch on", device)

    meta = torch.device("meta")
    tensor = torch.ones(2)
    moved = to_device({"a": [tensor, (tensor, "text")], "b": Pair(tensor, 3), "c": Batch()}, meta)
    assert moved["a"][0].device == moved["a"][1][0].device == moved["b"].x.device == meta
    assert moved["a"][1][1] == "text"
    assert type(moved["b"]) is Pair
    assert moved["c"] == ("batch on", meta)


def test_evener_dataset_protocol_is_used_unchanged():
    class Own:
        def global_batch(self, seed, step, num_sequences): ...
        def num_tokens(self, samples): ...
        def load(self, samples, device): ...

    own = Own()
    assert as_dataset(own, SPEC) is own


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class NoLength:
    def __getitem__(self, index):
        return index


NOT_BY_INDEX = (
    "Stream cannot be read by index: no rank could read its own share of a batch, "
    "and no resumed run could continue where it was"
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Stream(), NOT_BY_INDEX),
        (DataLoader(Stream(), batch_size=8), NOT_BY_INDEX),
        (iter([1]), "list_iterator cannot be read by index"),
        (NoLength(), "NoLength has no __len__"),
        (TensorDataset(torch.zeros(0, 2)), "TensorDataset is empty"),
        (DataLoader(DATA, batch_size=4), "the DataLoader has batch_size 4 and the run --batch 8"),
        (DataLoader(DATA, batch_size=None), "the DataLoader has no batch_size"),
        (DataLoader(DATA, batch_sampler=BatchSampler(range(50), 8, False)), "has a batch_sampler of its own"),
        (DataLoader(DATA, batch_size=8, sampler=WeightedRandomSampler([1.0] * 50, 50)), "has a WeightedRandomSampler"),
        (DataLoader(DATA, batch_size=8, sampler=RandomSampler(DATA, replacement=True)), "has a RandomSampler of its"),
        (DataLoader(DATA, batch_size=8, sampler=RandomSampler(DATA, num_samples=20)), "has a RandomSampler of its own"),
        (DataLoader(DATA, batch_size=8, sampler=range(10)), "has a range of its own"),
    ],
)
def test_unshardable_dataset_is_refused_with_reason(source, message):
    with pytest.raises(UsageError) as caught:
        as_dataset(source, SPEC)
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.steps: ")


@pytest.mark.parametrize(
    ("change", "is_like"),
    [
        ({}, True),
        ({"x": lambda x: x * (1 + 1e-3)}, True),  # resized by another library
        ({"image": lambda image: image + 1}, True),  # decoded by another
        ({"x": lambda x: x.flip(1)}, False),  # beside a much larger number
        ({"x": lambda x: x[:, :5]}, False),
        ({"y": lambda y: y + 1}, False),
        ({"image": lambda image: 255 - image}, False),
        ({"name": lambda name: name + "s"}, False),
        ({"weight": lambda weight: 2 * weight}, False),
    ],
)
def test_fingerprints_are_equal_only_up_to_rounding_differences(change, is_like):
    """By the first sample, up to what machines may round otherwise, each part by itself."""
    torch.manual_seed(0)
    image = torch.randint(200, (1, 3, 64, 64), dtype=torch.uint8)
    image[:, :, :32] = 0  # a border
    batch = {
        "x": torch.rand(1, 6), "y": torch.arange(1), "image": image, "name": "verb", "weight": np.float64(0.5),
        "time": torch.tensor([1.7e9]), "none": None, "ragged": torch.nested.nested_tensor([torch.rand(2)]),
    }  # fmt: skip
    other = {name: change.get(name, lambda value: value)(value) for name, value in batch.items()}
    samples = np.arange(8)
    ours, theirs = (fingerprint_data(SimpleNamespace(load=lambda *_, one=one: one), samples) for one in (batch, other))
    assert from_json(msgspec.json.encode(ours), DataFingerprint).is_same_data(theirs) == is_like
    assert not ours.is_same_data(fingerprint_data(SimpleNamespace(load=lambda *_: batch), samples + 1))


def test_random_dataset_has_no_fingerprint():
    class Noisy(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(3)

    noisy = MapStyleDataset(Noisy(torch.zeros(40)), default_collate, shuffle=False)
    assert fingerprint_data(noisy, np.arange(8)) is None
