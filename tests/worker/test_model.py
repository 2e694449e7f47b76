"""The model against closed forms, nanoGPT and transformers."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from evener.core.errors import CheckpointError, UsageError
from evener.core.shape import PRESETS, GPTShape, preset_shape
from evener.worker.gpt2 import load_gpt2
from evener.worker.model import GPT, STRIP_ROWS, Dropout, attend, rotary_angles, rotate

FAMILIES = ("tiny", "char", "gpt2", "d4", "d5")


def small(name: str, **changes: object) -> GPTShape:
    """A preset's kind of model, in a size that a test can train."""
    sizes = {"num_layers": 3, "num_heads": 2, "width": 32, "dropout": 0.0}
    return preset_shape(name, 50, 16, **sizes | changes)


def build(shape: GPTShape, seed: int = 0, **options: bool) -> GPT:
    torch.manual_seed(seed)
    return GPT(shape, **options)


def batch(shape: GPTShape, num_sequences: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab_size, (num_sequences, shape.block_size + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(model: GPT, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# What it is made of


@pytest.mark.parametrize("name", PRESETS)
def test_the_closed_form_counts_the_real_parameters(name):
    shape = PRESETS[name]
    with torch.device("meta"):
        model = GPT(shape)
    assert shape.num_params() == sum(p.numel() for p in model.parameters())
    parts = {
        "token embeddings": "token_embedding.",
        "position embeddings": "position_embedding.",
        "value embeddings": "value_embedding.",
        "attention": ("attention.qkv.", "attention.out."),
        "MLP": ("mlp.up.", "mlp.down."),
        "norms": "norm.",
        "head": "head.",
    }
    for group, count in shape.params_by_group().items():
        keys = (parts[group],) if isinstance(parts[group], str) else parts[group]
        assert count == sum(p.numel() for n, p in model.named_parameters() if any(k in n for k in keys)), group


def test_biases_count_too():
    shape = small("d4", bias=True, norm="layernorm")
    assert shape.num_params() == sum(p.numel() for p in GPT(shape).parameters())


def test_a_seed_fixes_the_weights():
    shape = small("d4")
    same, other = build(shape), build(shape, seed=1)
    for name, weight in build(shape).named_parameters():
        assert torch.equal(weight, same.get_parameter(name))
        assert not torch.equal(weight, other.get_parameter(name))


def test_weights_start_as_gpt2s():
    model = build(small("gpt2", width=256))
    assert model.token_embedding.weight.std() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[0].attention.qkv.weight.std() == pytest.approx(0.02, rel=0.02)
    for residual in (model.blocks[1].attention.out, model.blocks[2].mlp.down):
        assert residual.weight.std() == pytest.approx(0.02 / math.sqrt(2 * 3), rel=0.02)
        assert residual.bias.count_nonzero() == 0
    assert (model.norm.weight == 1).all()


def test_matrices_decay_and_vectors_do_not():
    model = build(small("gpt2"))
    decayed, rest = model.param_groups(0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))
    assert len(build(small("d4")).param_groups(0.1)) == 1  # it has no vectors


def test_an_impossible_shape_is_refused():
    with pytest.raises(UsageError, match="heads"):
        GPT(PRESETS["tiny"].__class__(**{f: getattr(PRESETS["tiny"], f) for f in GPTShape.__struct_fields__} | {"num_heads": 7}))


# What it computes


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_loss_is_a_guess(name):
    shape = small(name)
    with torch.no_grad():
        loss_sum = build(shape)(*batch(shape))
    assert loss_sum.dtype == torch.float32
    assert loss_sum.shape == ()
    assert loss_sum / (4 * shape.block_size) == pytest.approx(math.log(shape.vocab_size), rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_the_sum_over_the_parts(name):
    shape = small(name)
    model, (tokens, targets) = build(shape), batch(shape)
    whole = gradients(model, model(tokens, targets))
    parts = gradients(model, model(tokens[:1], targets[:1]) + model(tokens[1:], targets[1:]))
    assert model(tokens, targets).item() == pytest.approx(sum(model(t[None], y[None]).item() for t, y in zip(tokens, targets, strict=True)), rel=1e-6)
    for key in whole:
        torch.testing.assert_close(parts[key], whole[key], rtol=1e-4, atol=1e-5)


def test_targets_of_minus_one_do_not_count():
    shape = small("char")
    model, (tokens, targets) = build(shape), batch(shape)
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    targets[:, ::3] = -1
    assert model(tokens, targets).item() == pytest.approx(losses[targets >= 0].sum().item(), rel=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_does_not_change_what_comes_before(name):
    shape = small(name)
    model, (tokens, _) = build(shape), batch(shape)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % shape.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).flatten(2).any(dim=2).all()


def test_rotated_products_depend_on_the_distance_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)
    cos, sin = (x.double() for x in rotary_angles(40, 64, torch.device("cpu")))
    positions = (1, 40, 1, 64)
    q, k = rotate(q.expand(positions), cos, sin)[0, :, 0], rotate(k.expand(positions), cos, sin)[0, :, 0]
    products = q @ k.T  # (40, 40): query position, key position
    for distance in (-5, 0, 1, 17):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert products[0, 0] != products[0, 1]
    torch.testing.assert_close(q.norm(dim=1), q[:1].norm(dim=1).expand(40))  # a rotation keeps lengths


@pytest.mark.parametrize("name", ["char", "d4"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_gives_the_same_gradients(name, dropout):
    shape = small(name, dropout=dropout)
    found = []
    for checkpoint_activations in (False, True):
        model = build(shape, checkpoint_activations=checkpoint_activations)
        found.append(gradients(model, model(*batch(shape))))
    for key in found[0]:
        assert torch.equal(found[0][key], found[1][key])


# Dropout on a CPU


def test_dropout_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(1001, 999, requires_grad=True)
    y = Dropout(0.2)(x)
    n = x.numel()
    assert (y == 0).sum() / n == pytest.approx(0.2, abs=5 * math.sqrt(0.2 * 0.8 / n))
    assert y.unique().tolist() == pytest.approx([0, 1.25], rel=1e-5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert Dropout(0.2).eval()(x) is x
    assert Dropout(0.0)(x).equal(x)


def test_neighbours_are_dropped_independently():
    torch.manual_seed(0)
    dropped = (Dropout(0.5)(torch.ones(400_000)) == 0).float() - 0.5
    for lag in range(1, 9):  # four neighbours share one random word
        correlation = 4 * (dropped[lag:] * dropped[:-lag]).mean().item()
        assert abs(correlation) < 5 / math.sqrt(dropped.numel())


@pytest.mark.parametrize("num_positions", [1, 7, STRIP_ROWS, 2 * STRIP_ROWS + 3])
def test_attention_in_strips_is_attention(num_positions):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, num_positions, 8, requires_grad=True).unbind(0)
    nearly_none = Dropout(1e-9)  # rounds to 1/65536: too rare for the values below
    ours = attend(q, k, v, nearly_none)
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    close = torch.isclose(ours, reference, rtol=1e-3, atol=1e-4).float().mean()
    assert close > 0.97


@pytest.mark.parametrize("num_positions", [5, STRIP_ROWS + 9])
def test_dropped_attention_is_attention_on_average(num_positions):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, num_positions, 4).unbind(0)
    dropout = Dropout(0.2)
    mean = torch.stack([attend(q, k, v, dropout) for _ in range(400)]).mean(0)
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (mean - reference).abs().max() < 0.15  # five deviations of the first position: 2 · 0.5 / √400 each
    assert not torch.equal(mean, reference)
