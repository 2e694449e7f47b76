"""A state_dict is restored with the same values, types and bits."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from evener.core.base.errors import UsageError
from evener.core.run.runwriter import RunWriter
from evener.worker.state.checkpoint import load, save
from evener.worker.state.state_serialization import SAFETENSORS_DTYPES, flatten_state, unflatten_state


def there_and_back(state):
    """Through the very bytes of a file."""
    node, tensors = flatten_state(state, "mine")
    return unflatten_state(msgspec.json.decode(msgspec.json.encode(node)), tensors)


def same(a, b) -> bool:
    """Equal in type, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)  # -0.0 is not 0.0, nan is nan


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"))
keys = st.text(st.characters(codec="utf-8")) | st.integers() | st.booleans() | st.tuples(st.integers(), st.integers())
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@given(trees)
def test_any_tree_of_numbers_and_text_round_trips(tree):
    assert same(there_and_back(tree), tree)


def test_values_json_would_alter_round_trip():
    state = {0: "int key", "0": "text key", "n": 2**80, "f": 2.0, "i": 2, "b": True, "z": -0.0, "inf": -float("inf"),
             "nan": float("nan"), "none": None, "pair": (1, [2, ()]), "count": Counter({30: 2}), (1, 2): {},
             "ordered": OrderedDict(b=1, a=2), "dict": {"dict": [[1, 2]]}}  # fmt: skip
    assert same(there_and_back(state), state)


def test_tensors_arrays_and_random_states_round_trip():
    state = {
        "empty": torch.zeros(0, 3), "scalar": torch.tensor(7), "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "array": np.arange(6, dtype=">u2").reshape(2, 3).astype("u2").T, "np.float64": np.float64(0.1),
        "np.bool": np.bool_(True), "np.int8": np.int8(-3), "0d": np.array(1.5),
        "python": random.Random(3).getstate(), "legacy": np.random.RandomState(3).get_state(),
        "philox": np.random.Generator(np.random.Philox(3)).bit_generator.state,
        "pcg": np.random.default_rng(3).bit_generator.state, "torch": torch.Generator().manual_seed(3).get_state(),
    }  # fmt: skip
    assert same(there_and_back(state), state)


def test_tensors_under_keys_with_equal_paths_stay_separate():
    state = {0: torch.tensor(1), "0": torch.tensor(2), "a/b": torch.tensor(3), "a": {"b": torch.tensor(4)}}
    assert same(there_and_back(state), state)


class Foo:
    pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"lr_lambdas": [Foo()]}, "state of 'scheduler' holds a Foo at lr_lambdas[0]"),
        ({"a": {"f": len}}, "state of 'scheduler' holds a builtin_function_or_method at a.f"),
        ({"state": {0: {"x": Foo()}}}, "state of 'scheduler' holds a Foo at state[0].x"),
        ({"names": {1, 2}}, "state of 'scheduler' holds a set at names"),
        ({"dtype": torch.float32}, "state of 'scheduler' holds a dtype at dtype"),
        ({"x": torch.zeros(2).to_sparse()}, "state of 'scheduler' holds a tensor of torch.sparse_coo at x"),
        ({"x": torch.zeros(2, dtype=torch.complex128)}, "state of 'scheduler' holds a tensor of torch.complex128 at x"),
        ({"x": np.array(["a"])}, "state of 'scheduler' holds a ndarray of <U1 at x"),
        ({frozenset({1}): 1}, "state of 'scheduler' holds the key frozenset({1}) at [frozenset({1})]"),
        (Foo(), "state of 'scheduler' holds a Foo"),
    ],
)
def test_unsupported_object_is_refused_by_name(state, message):
    with pytest.raises(UsageError) as caught:
        flatten_state(state, "user/scheduler")
    assert str(caught.value) == message
    assert caught.value.hint == "checkpoints hold tensors, numbers, text, None, and lists, tuples and dicts of them"


def test_every_supported_dtype_round_trips(tmp_path):
    state = {str(dtype): torch.arange(3).to(dtype) for dtype in SAFETENSORS_DTYPES}
    folder = write(tmp_path, {}, {"all": state})
    loaded = load(folder).states["all"]
    assert {name: (t.dtype, t.view(torch.uint8).tolist()) for name, t in loaded.items()} == {
        name: (t.dtype, t.view(torch.uint8).tolist()) for name, t in state.items()
    }


def write(folder: Path, weights, states, step=1) -> Path:
    return save(RunWriter(folder), weights, states, step=step, val_loss=None, rng_states=[], replica_hashes=[[]])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "tensor lr": lambda p: torch.optim.Adam(p, torch.tensor(0.01)),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, history_size=3, max_iter=2),
}
SCHEDULERS = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [5, 5, 9]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, 40, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.StepLR(o, 3)]),
}


def learn(model, optimizer, scheduler, steps) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2].sin()).square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(losses[-1])
        elif scheduler is not None:
            scheduler.step()
    return losses


@pytest.mark.parametrize(
    ("optimizer", "scheduler"), [(name, None) for name in OPTIMIZERS] + [("momentum", name) for name in SCHEDULERS]
)
def test_optimizer_and_scheduler_resume_bit_for_bit(tmp_path, optimizer, scheduler):
    def make():
        model = net()
        opt = OPTIMIZERS[optimizer](model.parameters())
        return model, opt, SCHEDULERS[scheduler](opt) if scheduler else None

    whole = make()
    losses = learn(*whole, range(24))

    model, opt, sched = make()
    learn(model, opt, sched, range(11))
    states = {"optimizer": opt.state_dict()} | ({"user/scheduler": sched.state_dict()} if sched else {})
    saved = load(write(tmp_path, dict(model.named_parameters()), states))
    again, opt, sched = make()
    again.load_state_dict(saved.weights)
    opt.load_state_dict(saved.states["optimizer"])
    if sched:
        sched.load_state_dict(saved.states["user/scheduler"])
    assert learn(again, opt, sched, range(11, 24)) == losses[11:]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole[0].parameters(), strict=True))


def test_custom_param_groups_and_non_tensor_state_round_trip(tmp_path):
    model = net()
    opt = torch.optim.SGD([{"params": [p], "mine": i} for i, p in enumerate(model.parameters())], 0.1)
    opt.param_groups[1]["lr"] = 0.025
    for parameter in model.parameters():
        opt.state[parameter] = {"seen": 3, "why": "asked", "past": [0.1, (2, None)]}
    before = opt.state_dict()
    assert same(load(write(tmp_path, {}, {"optimizer": before})).states["optimizer"], before)


def test_grad_scaler_growth_interval_stays_int(tmp_path):
    """torch's kernel takes no float for it."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(scaler):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    scaler = torch.amp.GradScaler("cpu")
    step(scaler)
    saved = load(write(tmp_path, {}, {"scaler": scaler.state_dict()})).states["scaler"]
    assert same(saved, scaler.state_dict())
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(saved)
    step(again)
    step(scaler)
    assert again.state_dict() == scaler.state_dict()
