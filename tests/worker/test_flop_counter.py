"""FLOPs of forward and backward, against formulas: of layers, of a GPT, and the one that evener plans by."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from evener.core.model.flops import StepFlops
from evener.core.model.shape import preset_shape
from evener.worker.record import flop_counter
from evener.worker.record.flop_counter import FlopCounter
from tests.tiers import exhaustive


def count(step: Callable[[], object]) -> StepFlops:
    counter = FlopCounter(lambda: True)
    counter.start()
    step()
    assert counter.stop()
    assert _get_current_dispatch_mode() is None
    return counter.flops(1.0)


def fp32_flops(step: Callable[[], object]) -> int:
    flops = count(step)
    assert flops.missing == ""
    assert flops.by_dtype.keys() == {"fp32"}
    return flops.by_dtype["fp32"]


def train(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], object]:
    return lambda: model(x).square().mean().backward()


def test_linear_layers_cost_6_flops_a_weight_and_row():
    """2 in forward, 4 in backward; the gradient of the data is not computed."""
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    assert fp32_flops(train(net, torch.ones(7, 10))) == 7 * (4 * 10 * 20 + 6 * 20 * 5)
    accumulated = fp32_flops(lambda: [train(net, torch.ones(num, 10))() for num in (7, 3)])
    assert accumulated == 10 * (4 * 10 * 20 + 6 * 20 * 5)


def test_convolutions_cost_each_weight_once_a_place():
    data = torch.ones(2, 4, 9, 9, requires_grad=True)
    assert fp32_flops(train(nn.Conv2d(4, 8, 3), data)) == 6 * 2 * (7 * 7) * (8 * 4 * 3 * 3)
    assert fp32_flops(train(nn.Conv2d(4, 8, 3, stride=2, padding=1), data)) == 6 * 2 * (5 * 5) * (8 * 4 * 3 * 3)
    assert fp32_flops(train(nn.Conv2d(4, 4, 3, groups=4), data)) == 6 * 2 * (7 * 7) * (4 * 1 * 3 * 3)
    assert fp32_flops(train(nn.ConvTranspose2d(4, 8, 3), data)) == 6 * 2 * (9 * 9) * (4 * 8 * 3 * 3)
    assert fp32_flops(train(nn.Conv1d(4, 8, 3), torch.ones(2, 4, 9))) == 4 * 2 * 7 * (8 * 4 * 3)


@pytest.mark.parametrize(
    ("kind", "gates", "kwargs"),
    [(nn.LSTM, 4, {}), (nn.GRU, 3, {}), (nn.RNN, 1, {}), (nn.LSTM, 4, {"bidirectional": True, "num_layers": 2})],
)
def test_recurrent_layers_cost_their_matrices_once_a_time(kind, gates, kwargs):
    """An LSTM on a processor is one operation of oneDNN; the others are matrix products."""
    rnn, hidden = kind(8, 16, **kwargs), 16
    data, start = torch.ones(5, 3, 8, requires_grad=True), torch.ones(rnn.num_layers * (2 if kwargs else 1), 3, hidden)
    start.requires_grad_()
    weights = sum(one.numel() for one in rnn.parameters() if one.dim() == 2)
    assert weights == gates * hidden * (8 + hidden + (8 + hidden + 2 * (2 * hidden + hidden) if kwargs else 0))
    state = (start, start) if kind is nn.LSTM else start
    assert fp32_flops(lambda: rnn(data, state)[0].sum().backward()) == 6 * 5 * 3 * weights


def gpt_step(dropout: float) -> tuple[Callable[[], object], int]:
    """A step of a GPT as nanoGPT writes it, and 6·N + 12·L·W·T of its tokens."""
    width, heads, layers, length, words, batch = 32, 4, 3, 16, 50, 2

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                one.view(batch, length, heads, width // heads).transpose(1, 2)
                for one in self.qkv(self.ln_1(x)).split(width, 2)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.mlp(self.ln_2(x))

    table, blocks, head = nn.Embedding(words, width), nn.Sequential(*(Block() for _ in range(layers))), None
    head = nn.Linear(width, words, bias=False)
    head.weight = table.weight
    tokens = torch.arange(batch * length).view(batch, length)
    num_matmul = sum(one.numel() for one in blocks.parameters() if one.dim() == 2) + words * width
    per_token = 6 * num_matmul + 12 * layers * width * length

    def step() -> None:
        logits = head(blocks(table(tokens)))
        F.cross_entropy(logits.view(-1, words), tokens.view(-1)).backward()

    return step, batch * length * per_token


@pytest.mark.parametrize("dropout", [0.0, 0.1])  # of which the second is no fused kernel
def test_gpt_costs_6_flops_a_parameter_and_attention(dropout):
    step, expected = gpt_step(dropout)
    assert fp32_flops(step) == expected


def test_gpt_of_evener_costs_what_it_is_planned_with():
    from evener.worker.train.model import GPT

    shape = preset_shape("tiny", vocab_size=100)
    model = GPT(shape)
    tokens = torch.zeros(2, shape.block_size, dtype=torch.long)
    assert fp32_flops(lambda: model(tokens, tokens).sum().backward()) == tokens.numel() * shape.flops_per_token()


def test_dtypes_are_counted_apart():
    net = nn.Linear(10, 20)
    with torch.autocast("cpu", torch.bfloat16):
        low = net(torch.ones(7, 10))
    del low

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = net(torch.ones(7, 10))
        (hidden.float() @ torch.ones(20, 3)).sum().backward()

    assert count(step).by_dtype == {"bf16": 7 * 4 * 10 * 20, "fp32": 7 * 4 * 20 * 3}


def test_recomputed_layers_count_as_often_as_they_run():
    net, data = nn.Linear(10, 20), torch.ones(7, 10, requires_grad=True)
    own = fp32_flops(lambda: checkpoint(lambda x: net(x).square(), data, use_reentrant=True).sum().backward())
    assert own == 7 * 8 * 10 * 20


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


def test_own_autograd_functions_are_counted():
    x, weight = torch.ones(7, 10, requires_grad=True), torch.ones(10, 20, requires_grad=True)
    assert fp32_flops(lambda: Doubled.apply(x, weight).sum().backward()) == 7 * 6 * 10 * 20


def test_own_operations_are_named_as_missing():
    with torch.library._scoped_library("evener_test", "DEF") as library:
        library.define("product(Tensor x) -> Tensor")
        library.impl("product", lambda x: x @ x, "CPU")
        flops = count(lambda: [torch.ones(2, 2) @ torch.ones(2, 2), torch.ops.evener_test.product(torch.ones(2, 2))])
    assert (flops.by_dtype, flops.missing) == ({"fp32": 16}, "those of evener_test.product are missing")


def test_formula_that_fails_ends_the_count_alone(monkeypatch):
    def fail(*_: object, **__: object) -> int:
        raise ValueError

    monkeypatch.setitem(flop_counter.FORMULAS, torch.ops.aten.mm, fail)
    product = []
    flops = count(lambda: product.append(torch.ones(2, 3) @ torch.ones(3, 2)))
    assert torch.equal(product[0], torch.full((2, 2), 3.0))
    assert flops.by_dtype == {}
    assert flops.missing == "aten.mm.default with other arguments than expected: ValueError"


def test_step_without_samples_has_no_flops_a_sample():
    """As every second one of a program that updates twice a batch."""
    counter = FlopCounter(lambda: True)
    counter.start()
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.stop()
    assert counter.flops(0.0) == StepFlops(num_samples=0.0, missing="the step took no samples")


def test_nothing_counted_is_said():
    assert count(lambda: torch.ones(2) + 1).missing == "no matrix product was seen"


def test_numbers_that_autograd_saved_can_be_read():
    """As `--shares` does, to see how a loss is scaled."""
    node = (torch.ones(1, requires_grad=True) / 3).grad_fn
    read: list[float] = []
    count(lambda: read.append(float(node._saved_other)))
    assert read == [3.0]


class OwnMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_modes_of_the_program_stay_in_their_place():
    counter, own = FlopCounter(lambda: True), OwnMode()
    with own:  # before and after the count: there is none
        counter.start()
        assert _get_current_dispatch_mode() is own
        assert counter.stop()
    assert "dispatch mode of the program's own" in counter.flops(1.0).missing
    counter = FlopCounter(lambda: True)
    counter.start()
    with own:  # beyond the end of the count: it is left later
        assert not counter.stop()
        assert _get_current_dispatch_mode() is own
    assert counter.stop()
    assert _get_current_dispatch_mode() is None
    counter = FlopCounter(lambda: True)
    counter.start()
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: ended.append(counter.stop()))
    ended: list[bool] = []
    y.backward()
    assert ended == [False]
    assert counter.stop()
    assert _get_current_dispatch_mode() is None


def test_forked_process_does_not_count():
    counter = FlopCounter(lambda: True)
    counter.start()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: sys.exit(_get_current_dispatch_mode() is not None))
    process.start()
    process.join()
    assert counter.stop()
    assert process.exitcode == 0


def small_nets() -> dict[str, Callable[[], nn.Module]]:
    encoder = lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)  # noqa: E731
    return {
        "transformer": lambda: nn.Sequential(encoder(), nn.Linear(16, 3)),
        "convolution": lambda: nn.Sequential(
            nn.Conv1d(6, 8, 3),
            nn.BatchNorm1d(8),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Conv1d(8, 6, 3, groups=2),
            nn.Softplus(),
        ),
        "recurrent": lambda: nn.LSTM(16, 8, 2, dropout=0.2),
    }


@pytest.mark.parametrize("name", small_nets())
def test_counting_changes_no_bit(name):
    torch.manual_seed(0)
    net = small_nets()[name]()
    results = []
    for is_counted in (False, True):
        torch.manual_seed(1)
        model = copy.deepcopy(net)
        counter, optimizer = FlopCounter(lambda: True), torch.optim.AdamW(model.parameters(), 0.1)
        if is_counted:
            counter.start()
        for _ in range(3):
            out = model(torch.randn(5, 6, 16))
            out = out[0] if isinstance(out, tuple) else out
            loss = F.binary_cross_entropy_with_logits(out, torch.rand_like(out)) + out.logsumexp(-1).clamp(-3, 3).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        counter.stop()
        assert bool(counter.flops(1.0).by_dtype) == is_counted
        results.append([*model.state_dict().values(), loss.detach(), torch.get_rng_state()])
    assert all(itertools.starmap(torch.equal, zip(*results, strict=True)))


LIGHT = """
import sys, torch
from evener.worker.record.flop_counter import FlopCounter
counter = FlopCounter(lambda: True)
counter.start()
torch.nn.Linear(2, 2)(torch.ones(2, 2)).sum().backward()
counter.stop()
assert counter.flops(1.0).by_dtype == {"fp32": 32}
assert "torch._dynamo" not in sys.modules
"""
COMPILED = """
import torch
from evener.worker.record.flop_counter import FlopCounter
net, data, results = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager"), torch.ones(2, 4), []
for counts_before in (True, False):  # compiling under the counter, and before it
    counter = FlopCounter(lambda: True)
    counter.start()
    results.append(net(data))
    results[-1].sum().backward()
    assert counter.stop()
    flops = counter.flops(1.0)
    assert (flops.by_dtype, flops.missing) == ({}, "the program is compiled"), flops
assert torch.equal(*results)
assert torch._dynamo.utils.counters["frames"]["ok"] == 1
"""


def test_counting_does_not_import_torch_compile():
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


@exhaustive
def test_compiled_program_is_not_counted_and_stays_compiled():
    subprocess.run([sys.executable, "-c", COMPILED], check=True)
