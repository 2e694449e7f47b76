"""Parameter counts match published figures, and invalid shapes are refused."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.base.errors import UsageError
from evener.core.model.shape import PRESETS, GPTShape, preset_shape


def test_d8_parameter_count_matches_nanochat():
    shape = preset_shape("d8", vocab_size=32768)
    assert shape.num_params() == 125_829_120 == 125_829_354 - 234
    assert shape.params_by_group() == {
        "token embeddings": 16_777_216,
        "position embeddings": 0,
        "value embeddings": 67_108_864,
        "attention": 8_388_608,
        "MLP": 16_777_216,
        "norms": 0,
        "head": 16_777_216,
    }


def test_gpt2_parameter_count_matches_published():
    assert preset_shape("gpt2", vocab_size=50257).num_params() == 124_439_808


@pytest.mark.parametrize(
    ("layers", "heads", "width", "published"),
    [(24, 16, 1024, 354_823_168), (36, 20, 1280, 774_030_080), (48, 25, 1600, 1_557_611_200)],
)
def test_larger_gpt2_parameter_counts_match_published(layers, heads, width, published):
    shape = preset_shape("gpt2", vocab_size=50257, num_layers=layers, num_heads=heads, width=width)
    assert shape.num_params() == published


def test_char_parameter_count_matches_nanogpt():
    shape = preset_shape("char", vocab_size=65)
    without_positions = shape.num_params() - shape.params_by_group()["position embeddings"]
    assert f"{without_positions / 1e6:.2f}M" == "10.65M"


def test_depth_sets_width_like_nanochat():
    assert {name: (PRESETS[name].width, PRESETS[name].num_heads) for name in ("d4", "d8", "d9", "d12", "d20")} == {
        "d4": (256, 2),
        "d8": (512, 4),
        "d9": (640, 5),  # 64 * 9 = 576 is no multiple of 128
        "d12": (768, 6),
        "d20": (1280, 10),
    }


@pytest.mark.parametrize(("name", "layers"), [("d8", [1, 3, 5, 7]), ("d9", [0, 2, 4, 6, 8]), ("gpt2", [])])
def test_value_embeddings_alternate_ending_with_last_layer(name, layers):
    shape = PRESETS[name]
    assert [layer for layer in range(shape.num_layers) if shape.has_value_embedding(layer)] == layers


def test_flops_count_only_matrix_products():
    shape = preset_shape("gpt2", vocab_size=50257)
    matmul_params = 12 * 12 * 768**2 + 50257 * 768  # the blocks' matrices and the tied head's
    assert shape.flops_per_token() == 6 * matmul_params + 12 * 12 * 768 * 1024
    untied = preset_shape("gpt2", vocab_size=50257, tied_head=False, bias=False, norm="rmsnorm")
    assert untied.flops_per_token() == shape.flops_per_token()
    d8 = preset_shape("d8", vocab_size=32768)
    plain = preset_shape("d8", vocab_size=32768, value_embeddings=False)
    assert plain.flops_per_token() == d8.flops_per_token()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_round_trips(name):
    shape = preset_shape(name, vocab_size=300)
    assert shape.vocab_size == 300
    assert msgspec.json.decode(msgspec.json.encode(shape), type=GPTShape) == shape


def test_preset_overrides_are_applied():
    shape = preset_shape("char", 65, 128, num_layers=3, dropout=0)
    assert (shape.block_size, shape.num_layers, shape.dropout) == (128, 3, 0.0)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (
            {"width": 98},
            "width 98 cannot be divided among 4 heads",
            "take width 100, or num_heads one of 1, 2, 7, 14, 49",
        ),
        ({"num_heads": 7}, "width 64 cannot be divided among 7 heads", "take width 70, or num_heads one of 1, 2, 4, 8"),
        ({"width": 36, "positions": "rotary"}, "a head has 9", "multiple of 2 * num_heads = 8"),
        ({"dropout": 1.0}, "dropout is 1.0", "less than 1"),
        ({"dropout": -0.1}, "dropout is -0.1", "at least 0"),
        ({"dropout": float("nan")}, "dropout is nan", "at least 0"),
        ({"num_layers": "six"}, "num_layers", "tiny"),
        ({"positions": "sinusoidal"}, "positions", "tiny"),
        ({"num_layer": 6}, 'no "num_layer"', 'did you mean "num_layers"?'),
        *(({field: 0}, f"{field} is 0", "at least 1") for field in ("num_layers", "num_heads", "width", "block_size")),
        ({"vocab_size": -1}, "vocab_size is -1", "at least 1"),
    ],
)
def test_invalid_shapes_are_refused(changes, message, hint):
    with pytest.raises(UsageError) as caught:
        preset_shape("tiny", **{"vocab_size": 256} | changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hint in caught.value.hint


def test_unknown_preset_gets_did_you_mean_hint():
    with pytest.raises(UsageError, match='unknown model preset "gtp2"') as caught:
        preset_shape("gtp2", vocab_size=50257)
    assert caught.value.hint == 'did you mean "gpt2"?'
