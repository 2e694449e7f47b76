"""The shape of a GPT, its number of parameters and its FLOPs per token.

    shape = preset_shape("d8", vocab_size=32768)
    shape.num_params(), shape.flops_per_token()

A shape is plain data: it is part of the run's TOML and of its checkpoints, and the planner uses it on machines without
torch. `evener.worker.train.model.GPT` is built from it and has exactly the parameters counted here.
"""

from __future__ import annotations

import bisect
import math
import re
from typing import Any, Literal

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import UsageError, did_you_mean

MLP_EXPANSION = 4  # the MLP's hidden layer is four times as wide as the model, in GPT-2 and in nanochat


class GPTShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="gpt"):
    """All properties that determine a GPT's parameters and arithmetic. No defaults: take a preset and change it."""

    vocab_size: int
    block_size: int  # the longest sequence, in tokens
    num_layers: int
    num_heads: int
    width: int  # of the residual stream
    positions: Literal["learned", "rotary"]
    norm: Literal["layernorm", "rmsnorm"]  # rmsnorm has no parameters, and also follows the token embedding
    activation: Literal["gelu", "gelu_tanh", "relu2"]  # gelu is exact; gelu_tanh is published GPT-2's approximation
    tied_head: bool  # the head's matrix is the token embedding
    value_embeddings: bool  # in alternating layers, the last included, each token adds a learned vector to its value
    qk_norm: bool  # RMSNorm of queries and keys, after the rotation
    bias: bool  # in the linear layers and LayerNorms
    dropout: float

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has a value embedding: every second one, ending with the last."""
        return self.value_embeddings and (self.num_layers - 1 - layer) % 2 == 0

    def num_value_embeddings(self, layers: int) -> int:
        """Return the number of value embeddings in the first `layers` layers.

        >>> shape = preset_shape("d8", vocab_size=256)
        >>> [shape.num_value_embeddings(layers) for layers in range(5)], shape.has_value_embedding(1)
        ([0, 0, 1, 1, 2], True)
        """
        return (layers + 1 - (self.num_layers - 1) % 2) // 2 if self.value_embeddings else 0

    @property
    def has_sparse_embeddings(self) -> bool:
        """Return whether some table is only looked up: a value embedding, or a token embedding without a tied head."""
        return not self.tied_head or self.value_embeddings

    def params_by_group(self) -> dict[str, int]:
        """Return the number of parameters by group, in closed form. Absent groups and a tied head count 0.

        >>> preset_shape("d8", vocab_size=32768).params_by_group()["value embeddings"]
        67108864
        """
        width, layers, bias = self.width, self.num_layers, int(self.bias)
        hidden = MLP_EXPANSION * width
        table = self.vocab_size * width
        return {
            "token embeddings": table,
            "position embeddings": self.block_size * width if self.positions == "learned" else 0,
            "value embeddings": table * self.num_value_embeddings(layers),
            "attention": layers * (4 * width * width + bias * 4 * width),  # query, key, value, output
            "MLP": layers * (2 * width * hidden + bias * (hidden + width)),  # up, down
            "norms": (2 * layers + 1) * (1 + bias) * width if self.norm == "layernorm" else 0,
            "head": 0 if self.tied_head else table,
        }

    def num_params(self) -> int:
        """Return the number of all parameters.

        >>> preset_shape("gpt2", vocab_size=50257).num_params()
        124439808
        """
        return sum(self.params_by_group().values())

    def flops_per_token(self) -> int:
        """Return the FLOPs of one training token, forward and backward: 6·N + 12·L·W·T.   [PaLM, appendix B]

        N is the number of parameters in matrix products: the matrices of attention and MLP, and the head's, tied or
        not. Embeddings, biases and norms do not count. T is the block size. As in the paper, the half of the attention
        matrix that is causally masked is counted.

        >>> preset_shape("char", vocab_size=65).flops_per_token()  # 6·10,641,792 + 12·6·384·256
        70928640
        """
        blocks = self.num_layers * (4 + 2 * MLP_EXPANSION) * self.width**2
        matmul_params = blocks + self.vocab_size * self.width
        return 6 * matmul_params + 12 * self.num_layers * self.width * self.block_size

    def check(self) -> None:
        """Raise UsageError for an invalid shape."""
        for field in ("vocab_size", "block_size", "num_layers", "num_heads", "width"):
            if getattr(self, field) < 1:
                raise UsageError(f"{field} is {getattr(self, field)}", hint=f"{field} must be at least 1")
        if self.width % self.num_heads:
            fitting = [str(heads) for heads in range(1, min(self.width, 64) + 1) if self.width % heads == 0]
            wider = -(-self.width // self.num_heads) * self.num_heads
            raise UsageError(
                f"width {self.width} cannot be divided among {self.num_heads} heads",
                hint=f"take width {wider}, or num_heads one of {', '.join(fitting)}",
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise UsageError(
                f"rotary positions turn pairs of numbers, but a head has {self.head_dim} (width {self.width} / "
                f"{self.num_heads} heads)",
                hint=f"width must be a multiple of 2 * num_heads = {2 * self.num_heads}",
            )
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout is {self.dropout}", hint="dropout is a probability: at least 0, less than 1")


def _depth(num_layers: int) -> GPTShape:
    """Return nanochat's model of this depth: a width of 64 per layer, rounded up to whole heads of 128.

    d8 has 125,829,120 parameters. nanochat itself counts 125,829,354: the other 234 are its scalars on the residual
    stream and its gates (on value embeddings and on the previous token), which we do not have; nor do we have its
    sliding windows, its soft cap on logits and its initialization.
    """
    head_dim = 128
    num_heads = -(-64 * num_layers // head_dim)
    return GPTShape(
        vocab_size=32768,
        block_size=2048,
        num_layers=num_layers,
        num_heads=num_heads,
        width=num_heads * head_dim,
        positions="rotary",
        norm="rmsnorm",
        activation="relu2",
        tied_head=False,
        value_embeddings=True,
        qk_norm=True,
        bias=False,
        dropout=0.0,
    )


GPT2 = GPTShape(  # the smallest of the four published
    vocab_size=50257,
    block_size=1024,
    num_layers=12,
    num_heads=12,
    width=768,
    positions="learned",
    norm="layernorm",
    activation="gelu_tanh",
    tied_head=True,
    value_embeddings=False,
    qk_norm=False,
    bias=True,
    dropout=0.0,
)
CHAR = msgspec.structs.replace(  # nanoGPT's config/train_shakespeare_char.py
    GPT2,
    vocab_size=65,
    block_size=256,
    num_layers=6,
    num_heads=6,
    width=384,
    activation="gelu",
    bias=False,
    dropout=0.2,
)
TINY = msgspec.structs.replace(  # for tests: a step takes milliseconds
    CHAR, vocab_size=256, block_size=64, num_layers=2, num_heads=4, width=64, dropout=0.0
)


def _nanogpt(num_layers: int) -> GPTShape:
    """Return the shape of nanoGPT's character model with this depth: a width of 64 a layer, heads of 64, no dropout.

    The smallest has two layers all the same: one alone cannot copy what followed a word before [Olsson et al. 2022].
    """
    return msgspec.structs.replace(
        CHAR, num_layers=max(2, num_layers), num_heads=num_layers, width=64 * num_layers, dropout=0.0
    )


def _gpt2(num_layers: int, num_heads: int, width: int) -> GPTShape:
    return msgspec.structs.replace(GPT2, num_layers=num_layers, num_heads=num_heads, width=width)


PRESETS: dict[str, GPTShape] = {
    "tiny": TINY,
    "char": CHAR,
    "gpt2": GPT2,
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-760m": _gpt2(24, 16, 1536),  # GPT-3's "Large", of 760 million   [Brown et al. 2020, table 2.1]
    "gpt2-xl": _gpt2(48, 25, 1600),
}
PRESETS |= {f"g{n}": _nanogpt(n) for n in range(1, 13)}  # g6 is char without dropout, g12 as large as gpt2
PRESETS |= {f"d{n}": _depth(n) for n in range(4, 21)}


def shape_of_size(text: str, base: GPTShape) -> GPTShape:
    """Return a shape of about this many parameters ("350M", "72b"), otherwise like `base`; width = 128 times depth.

    *Assumption*: GPT-3's largest models have this ratio, Llama's are a little narrower; the loss hardly depends on it
    [Kaplan et al. 2020, figure 5]. Raise UsageError if no such shape is within 10 %.

    >>> shape = shape_of_size("72b", PRESETS["gpt2"])
    >>> shape.num_layers, shape.width, round(shape.num_params() / 1e9, 1)
    (71, 9088, 70.8)
    """
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mbt])", text.strip(), re.IGNORECASE)
    wanted = float(matched[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[matched[2].lower()] if matched else 0.0
    if not 1e6 <= wanted <= 1e13:
        raise UsageError(f"--params {text}: expected a number of parameters", hint="350M, 7B or 1.5T")
    shapes = [shape for num_layers in range(1, 1000) for shape in _shapes_of_about(wanted, num_layers, base)]

    def error(shape: GPTShape) -> float:
        return abs(shape.num_params() / wanted - 1)

    best = min(shapes, key=lambda shape: (max(0.02, error(shape)), abs(math.log(shape.width / shape.num_layers / 128))))
    if error(best) > 0.1:
        raise UsageError(f"--params {text}: with a vocabulary of {base.vocab_size} no shape has about as many")
    return best


def _shapes_of_about(num_params: float, num_layers: int, base: GPTShape) -> list[GPTShape]:
    """Return the shapes of this depth within 2 % of `num_params`, and the nearest smaller and larger one."""

    def shape_with(heads: int) -> GPTShape:
        return msgspec.structs.replace(base, num_layers=num_layers, num_heads=heads, width=64 * heads)

    without_embeddings = (num_params / (12 * num_layers)) ** 0.5  # width
    all_heads = range(max(1, int(0.5 * without_embeddings / 64)), int(without_embeddings / 64) + 2)
    low, high = (
        bisect.bisect_left(all_heads, factor * num_params, key=lambda heads: shape_with(heads).num_params())
        for factor in (0.98, 1.02)
    )
    return [shape_with(heads) for heads in all_heads[max(0, low - 1) : high + 1]]


def preset_shape(name: str, vocab_size: int, block_size: int | None = None, **overrides: Any) -> GPTShape:
    """Return the checked preset for a vocabulary, with `overrides` of GPTShape's fields. Raise UsageError if invalid.

    >>> preset_shape("char", vocab_size=65, dropout=0.1).dropout
    0.1
    """
    if name not in PRESETS:
        raise UsageError(f'unknown model preset "{name}"', hint=did_you_mean(name, PRESETS))
    fields = msgspec.structs.asdict(PRESETS[name])
    for key in overrides:
        if key not in fields:
            raise UsageError(f'a model shape has no "{key}"', hint=did_you_mean(key, fields))
    fields |= overrides | {"vocab_size": vocab_size}
    if block_size is not None:
        fields["block_size"] = block_size
    try:
        shape = from_builtins(fields, GPTShape)
    except msgspec.ValidationError as error:  # "Expected `int`, got `str` - at `$.width`"
        raise UsageError(f"model shape: {error}", hint=f'start from preset "{name}" and change one field') from None
    shape.check()
    return shape
