"""The model matches closed forms, transformers and nanochat."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from evener.core.base.errors import CheckpointError, UsageError
from evener.core.model.shape import PRESETS, GPTShape, preset_shape
from evener.worker.rank.linear_cross_entropy import linear_cross_entropy
from evener.worker.train.gpt2 import load_gpt2
from evener.worker.train.model import (
    GPT,
    MAX_BF16_STRIP_POSITIONS,
    STRIP_ROWS,
    FastCpuDropout,
    apply_rotary,
    causal_attention,
    rotary_angles,
)
from evener.worker.train.optim import param_groups

from ..tiers import exhaustive

FAMILIES = ("char", "gpt2", "d4")


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
def test_parameter_count_formula_matches_model(name):
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


def test_parameter_count_formula_includes_biases():
    shape = small("d4", bias=True, norm="layernorm")
    assert shape.num_params() == sum(p.numel() for p in GPT(shape).parameters())


def test_a_seed_fixes_the_weights():
    shape = small("d4")
    same, other = build(shape), build(shape, seed=1)
    for name, weight in build(shape).named_parameters():
        assert torch.equal(weight, same.get_parameter(name))
        assert not torch.equal(weight, other.get_parameter(name))


def test_weights_initialize_like_gpt2():
    model = build(small("gpt2", width=256))
    for entering in (model.token_embedding, model.blocks[0].attention.qkv):
        assert entering.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for residual in (model.blocks[1].attention.out, model.blocks[2].mlp.down):
        assert residual.weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 3), rel=0.02)
        assert residual.bias.count_nonzero() == 0
    assert (model.norm.weight == 1).all()


def test_weight_decay_applies_to_matrices_but_not_to_vectors():
    model = build(small("gpt2"))
    decayed, rest = param_groups(model, 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))
    assert len(param_groups(build(small("d4")), 0.1)) == 1  # it has no vectors


def test_invalid_shape_is_refused():
    with pytest.raises(UsageError, match="heads"):
        GPT(msgspec.structs.replace(PRESETS["tiny"], num_heads=7))


# What it computes


@pytest.mark.parametrize("name", FAMILIES)
def test_initial_loss_is_that_of_a_uniform_guess(name):
    shape = small(name)
    with torch.no_grad():
        loss_sum = build(shape)(*batch(shape))
    assert loss_sum.dtype == torch.float32
    assert loss_sum.shape == ()
    assert loss_sum / (4 * shape.block_size) == pytest.approx(math.log(shape.vocab_size), rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_of_a_batch_are_sums_over_its_parts(name):
    shape = small(name)
    model, (tokens, targets) = build(shape), batch(shape)
    whole = gradients(model, model(tokens, targets))
    parts = gradients(model, model(tokens[:1], targets[:1]) + model(tokens[1:], targets[1:]))
    rows = sum(model(tokens[[i]], targets[[i]]).item() for i in range(len(tokens)))
    assert model(tokens, targets).item() == pytest.approx(rows, rel=1e-6)
    for key in whole:
        torch.testing.assert_close(parts[key], whole[key], rtol=1e-4, atol=1e-5)


def test_targets_of_minus_one_add_no_loss():
    shape = small("char")
    model, (tokens, targets) = build(shape), batch(shape)
    losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    targets[:, ::3] = -1
    assert model(tokens, targets).item() == pytest.approx(losses[targets >= 0].sum().item(), rel=1e-6)


LARGE_HEAD = 600, 24, 9000  # rows, of which the last chunk has 88; width; words


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_loss_in_chunks_is_that_of_all_logits(dtype, tolerance):
    """Against torch's own loss in fp64; under autocast only products are rounded to bf16, never the loss."""
    rows, width, words = LARGE_HEAD
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    targets = torch.randint(words, (rows,))
    targets[[0, 511, 512, 599]] = -1
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=-1, reduction="sum")
    (expected / 7).backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        loss = linear_cross_entropy(x, weight, targets)
    assert loss.dtype == torch.float32
    (loss / 7).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6 if dtype == "fp32" else 1e-4)
    for found, of_all in zip((x, weight), exact, strict=True):
        assert (found.grad.double() - of_all.grad).norm() < tolerance * of_all.grad.norm()


def test_loss_in_chunks_differentiates_only_what_is_trained():
    rows, width, words = LARGE_HEAD
    x, weight, targets = torch.randn(rows, width), torch.randn(words, width), torch.randint(words, (rows,))
    expected = F.cross_entropy(x @ weight.T, targets, reduction="sum")
    for trained, frozen in ((x, weight), (weight, x)):
        trained.requires_grad_()
        loss = linear_cross_entropy(x, weight, targets)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert trained.grad is not None
        assert frozen.grad is None
        trained.requires_grad_(False).grad = None
    with pytest.raises(RuntimeError):
        linear_cross_entropy(x, weight, targets).backward()
    weight.requires_grad_()
    linear_cross_entropy(x[:0], weight, targets[:0]).backward()  # an empty micro-batch
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_is_causal(name):
    shape = small(name)
    model, (tokens, _) = build(shape), batch(shape)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % shape.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).flatten(2).any(dim=2).all()


def test_rotary_products_depend_only_on_distance():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)
    cos, sin = (x.double() for x in rotary_angles(40, 64, torch.device("cpu")))
    positions = (1, 40, 1, 64)
    q, k = apply_rotary(q.expand(positions), cos, sin)[0, :, 0], apply_rotary(k.expand(positions), cos, sin)[0, :, 0]
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


def test_dropout_keeps_rate_and_mean():
    torch.manual_seed(0)
    x = torch.ones(1001, 999, requires_grad=True)
    y = FastCpuDropout(0.2)(x)
    n = x.numel()
    assert (y == 0).sum() / n == pytest.approx(0.2, abs=5 * math.sqrt(0.2 * 0.8 / n))
    assert y.unique().tolist() == pytest.approx([0, 1.25], rel=1e-5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert FastCpuDropout(0.2).eval()(x) is x
    assert FastCpuDropout(0.0)(x).equal(x)


def test_dropout_of_neighbouring_elements_is_independent():
    torch.manual_seed(0)
    dropped = (FastCpuDropout(0.5)(torch.ones(400_000)) == 0).float() - 0.5
    for lag in range(1, 9):  # four neighbours share one random word
        correlation = 4 * (dropped[lag:] * dropped[:-lag]).mean().item()
        assert abs(correlation) < 5 / math.sqrt(dropped.numel())


class DropNothing(FastCpuDropout):
    """Asks for dropout, and so for strips, but keeps everything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("num_positions", [1, 7, STRIP_ROWS, 2 * STRIP_ROWS + 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_strip_attention_equals_full_attention(num_positions, dtype, tolerance):
    torch.manual_seed(0)
    values = torch.randn(4, 2, 3, num_positions, 8).to(dtype)
    q, k, v = (x.float().requires_grad_() for x in values[:3])
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = [reference, *torch.autograd.grad(reference, (q, k, v), values[3].float())]
    q, k, v = (x.requires_grad_() for x in values[:3])
    in_strips = causal_attention(q, k, v, DropNothing(0.5))
    for ours, theirs in zip([in_strips, *torch.autograd.grad(in_strips, (q, k, v), values[3])], expected, strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).norm() <= tolerance * max(theirs.norm(), 1)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_positions", [MAX_BF16_STRIP_POSITIONS, MAX_BF16_STRIP_POSITIONS + 1])
def test_without_dropout_only_short_bf16_attention_is_in_strips(num_positions, dtype, autocast, monkeypatch):
    fused = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: fused.append(q) or v)
    q = torch.zeros(1, 1, num_positions, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        causal_attention(q, q, q, FastCpuDropout(0.0))
        assert bool(fused) != ((autocast or dtype == torch.bfloat16) and num_positions == MAX_BF16_STRIP_POSITIONS)
        fused.clear()
        causal_attention(q, q, q, FastCpuDropout(0.5).eval())
        assert fused


def test_attention_dropout_applies_only_in_training():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind(0)
    reference = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(causal_attention(q, k, v, FastCpuDropout(0.5).eval()), reference)
    dropped = causal_attention(q, k, v, FastCpuDropout(0.5))
    first = (dropped[:, :, 0] / v[:, :, 0]).unique()  # the first position sees itself alone, or nothing
    assert all(value in (0, 2) for value in first.round(decimals=4).tolist())
    assert not torch.equal(dropped, reference)


def test_dropout_is_placed_like_nanogpt():
    shape = small("char", dropout=0.5)
    model, (tokens, targets) = build(shape), batch(shape)
    dropped = []
    for name, module in model.named_modules():
        if isinstance(module, FastCpuDropout):
            module.register_forward_hook(lambda _module, _args, y, name=name: dropped.append((name, tuple(y.shape))))
    model(tokens, targets)
    stream, weights = (4, 16, 32), (4, 2, 16, 16)
    expected = [("dropout", stream)]
    for layer in range(3):
        block = f"blocks.{layer}"
        expected += [(f"{block}.attention.dropout", weights), (f"{block}.attention.dropout", stream)]
        expected += [(f"{block}.mlp.dropout", stream)]
    assert dropped == expected


# Against transformers' GPT-2


def gpt2_of(shape: GPTShape, weights_of: GPT) -> torch.nn.Module:
    """transformers' model with the weights of ours; where ours has no biases, its own are 0."""
    config = transformers.GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.block_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_embd=shape.width,
        activation_function=shape.activation,
        attn_implementation="eager",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout),
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        for name, weight in weights_of.named_parameters():
            model.get_parameter(gpt2_name(name)).copy_(as_gpt2(name, weight))
    return model


def gpt2_name(name: str) -> str:
    for ours, theirs in (
        ("attention_norm", "ln_1"),
        ("mlp_norm", "ln_2"),
        ("attention.qkv", "attn.c_attn"),
        ("attention.out", "attn.c_proj"),
        ("mlp.up", "mlp.c_fc"),
        ("mlp.down", "mlp.c_proj"),
        ("token_embedding", "wte"),
        ("position_embedding", "wpe"),
        ("blocks", "h"),
    ):
        name = name.replace(ours, theirs)
    return "transformer." + ("ln_f." + name.removeprefix("norm.") if name.startswith("norm.") else name)


def as_gpt2(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Its layers keep their matrices as (in, out); its tables are as ours."""
    return tensor.t() if tensor.dim() == 2 and "embedding" not in name else tensor


@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_match_gpt2(bias):
    shape = small("char", bias=bias)
    model, (tokens, targets) = build(shape), batch(shape)
    with torch.no_grad():
        for p in model.parameters():  # so that every part, biases too, shows in the loss
            p.add_(torch.randn_like(p) * 0.1)
    reference = gpt2_of(shape, model)
    loss = model(tokens, targets) / targets.numel()
    ours = gradients(model, loss)
    their_loss = F.cross_entropy(reference(tokens).logits.flatten(0, 1), targets.flatten())
    their_loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-6)
    for name, gradient in ours.items():
        theirs = reference.get_parameter(gpt2_name(name)).grad
        torch.testing.assert_close(as_gpt2(name, gradient), theirs, rtol=1e-5, atol=1e-6, msg=name)


# Against nanochat


def test_logits_match_nanochat_formula():
    """Rotation by complex numbers, softmax by hand, one head at a time."""
    shape = small("d4", width=32, num_heads=2)
    model, (tokens, _) = build(shape), batch(shape, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10)  # so that every part shows in the logits
    w = {name: p.detach().double() for name, p in model.named_parameters()}

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    position = torch.arange(16, dtype=torch.float64)[:, None]
    turn = torch.polar(torch.ones(16, 8).double(), -position * 10000 ** -(torch.arange(8) / 8).double())  # (T, D/2)

    def head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # (T, D) each
        q, k = (norm(torch.view_as_real(torch.complex(x[:, :8], x[:, 8:]) * turn).flatten(1)) for x in (q, k))
        future = torch.ones(16, 16).triu(1).bool()
        return (q @ k.T / 4).masked_fill(future, -math.inf).softmax(-1) @ v

    x = norm(w["token_embedding.weight"][tokens[0]])
    for layer in range(3):
        block = f"blocks.{layer}."
        q, k, v = (norm(x) @ w[block + "attention.qkv.weight"].T).split(32, dim=1)
        if layer in (0, 2):
            v = v + w[block + "attention.value_embedding.weight"][tokens[0]]
        y = torch.cat([head(q[:, i : i + 16], k[:, i : i + 16], v[:, i : i + 16]) for i in (0, 16)], dim=1)
        x = x + y @ w[block + "attention.out.weight"].T
        x = x + (norm(x) @ w[block + "mlp.up.weight"].T).clamp(min=0) ** 2 @ w[block + "mlp.down.weight"].T
    logits = norm(x) @ w["head.weight"].T
    torch.testing.assert_close(model(tokens)[0].detach().double(), logits, rtol=1e-4, atol=1e-4)


# Published weights


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """A small random GPT-2 and its saved file."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_positions=24, n_embd=128, n_layer=3, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # biases too, and large enough to show in the logits
            p.add_(torch.randn_like(p) * 0.1)
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return folder / "model.safetensors", model


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_weights_give_published_logits(huggingface, prefix, tmp_path):
    path, theirs = huggingface
    tensors = {name.replace("transformer.", prefix): tensor for name, tensor in load_file(path).items()}
    tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 24, 24)  # old files carry the causal mask
    save_file(tensors, tmp_path / "old.safetensors")
    shape, weights = load_gpt2(tmp_path / "old.safetensors")
    assert shape == preset_shape("gpt2", 97, 24, num_layers=3, num_heads=2, width=128)
    model = GPT(shape)
    model.load_state_dict(weights)
    tokens = torch.randint(97, (2, 24))
    with torch.no_grad():
        assert (model(tokens) - theirs(tokens).logits).abs().max() < 1e-4
        exact_gelu = GPT(msgspec.structs.replace(shape, activation="gelu"))
        exact_gelu.load_state_dict(weights)
        assert (exact_gelu(tokens) - theirs(tokens).logits).abs().max() > 1e-4  # so the activation matters


def test_half_precision_weights_are_loaded_as_fp32(huggingface, tmp_path):
    tensors = {name: tensor.half() for name, tensor in load_file(huggingface[0]).items()}
    save_file(tensors, tmp_path / "half.safetensors")
    _, weights = load_gpt2(tmp_path / "half.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def change(tensors: dict[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    if what == "missing":
        del tensors["transformer.h.1.mlp.c_proj.weight"]
    elif what == "other model":
        return {"model.embed_tokens.weight": torch.zeros(3, 4)}
    elif what == "extra":
        tensors["transformer.h.0.crossattention.c_attn.weight"] = torch.zeros(2)
    elif what == "misshapen":
        tensors["transformer.h.0.attn.c_attn.weight"] = torch.zeros(384, 128)
    elif what == "untied":
        tensors["lm_head.weight"] = torch.zeros(97, 128)
    elif what == "no table":
        tensors["transformer.wpe.weight"] = torch.zeros(5)
    return tensors


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "h.1.mlp.c_proj.weight is missing"),
        ("other model", "wte.weight is missing"),
        ("extra", "h.0.crossattention.c_attn.weight is not part of one"),
        ("misshapen", r"h.0.attn.c_attn.weight is \(384, 128\)"),
        ("untied", "lm_head.weight differs"),
        ("no table", r"wpe.weight is \(5,\)"),
    ],
)
def test_non_gpt2_weights_are_refused(huggingface, tmp_path, what, message):
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(huggingface[0]), what), path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_gpt2(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 a pickle"])
def test_non_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_gpt2(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_gpt2(tmp_path)


def test_gpt2_weights_of_unknown_width_need_number_of_heads(tmp_path):
    model = build(small("gpt2", width=48, num_heads=3))
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=48, n_layer=3, n_head=3)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="number of heads is unknown"):
        load_gpt2(tmp_path / "model.safetensors")
    shape, weights = load_gpt2(tmp_path / "model.safetensors", num_heads=3)
    assert shape == model.shape
    model.load_state_dict(weights)


# Writing


def test_generation_is_deterministic_and_continues_the_prompt():
    shape = small("char", dropout=0.5)
    model, (tokens, _) = build(shape), batch(shape)[:2]
    written = [
        model.generate(tokens, 20, temperature=0.8, top_k=5, generator=torch.Generator().manual_seed(seed))
        for seed in (3, 3, 4)
    ]
    assert written[0].shape == (4, shape.block_size + 20)  # longer than a block
    assert torch.equal(written[0][:, : shape.block_size], tokens)
    assert torch.equal(written[0], written[1])
    assert not torch.equal(written[0], written[2])
    assert model.training


def test_temperature_zero_picks_likeliest_token():
    shape = small("d4")
    model, (tokens, _) = build(shape), batch(shape)
    tokens = tokens[:, :5]
    greedy = model.generate(tokens, 1, temperature=0)
    assert torch.equal(greedy[:, -1], model(tokens)[:, -1].argmax(dim=-1))
    assert torch.equal(greedy, model.generate(tokens, 1, top_k=1))
    model.generate(tokens, 1, top_k=1000)  # more than there are


@exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("name", ["char", "d4"])
def test_compiled_blocks_give_same_loss_and_gradients(name):
    shape = small(name)
    model = build(shape)
    loss = model(*batch(shape))
    eager = gradients(model, loss)
    model.compile_blocks()
    compiled_loss = model(*batch(shape))
    compiled = gradients(model, compiled_loss)
    assert compiled_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert compiled.keys() == eager.keys()  # the names stay
    for key in eager:
        torch.testing.assert_close(compiled[key], eager[key], rtol=1e-3, atol=1e-4)
