"""Load published GPT-2 weights into a GPT.

    shape, weights = load_gpt2(Path("gpt2/model.safetensors"))
    model = GPT(shape)
    model.load_state_dict(weights)

The file is Hugging Face's `model.safetensors`, of any of the four published sizes or of another GPT-2-like model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from evener.core.base.errors import CheckpointError
from evener.core.model.shape import GPT2, GPTShape
from evener.worker.train.model import GPT

PUBLISHED_HEAD_DIM = 64  # in all four sizes; the file does not say how many heads there are
GPT2_NAMES = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "blocks": "h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "norm": "ln_f",
}
ACTIVATION_BY_HF_NAME: dict[str, Literal["gelu", "gelu_tanh"]] = {"gelu": "gelu", "gelu_new": "gelu_tanh",
                                                       "gelu_pytorch_tanh": "gelu_tanh"}  # fmt: skip
OWN_NAME_PATTERN = re.compile("|".join(map(re.escape, GPT2_NAMES)))
CONV1D_PATTERN = re.compile(r"\.c_(attn|proj|fc)\.weight$")  # GPT-2's Conv1D stores (in, out), torch's Linear (out, in)
CAUSAL_MASK_PATTERN = re.compile(r"\.attn\.(masked_)?bias$")  # buffers in old files


def is_gpt2_file(path: Path) -> bool:
    """Return whether a weights file lacks our own tensor names; True also if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return "token_embedding.weight" not in file.keys()  # noqa: SIM118  not a dict
    except (OSError, SafetensorError):
        return True  # load_gpt2 raises the error


def load_gpt2(path: Path, num_heads: int | None = None, *, bias: bool = True) -> tuple[GPTShape, dict[str, Tensor]]:
    """Return the shape of the model in a file, and its weights in fp32, by the names of `GPT`'s parameters.

    Heads are 64 wide unless `num_heads` is given; the activation is GPT-2's unless a config.json beside the file names
    another. With `bias=False` biases that are all zero are dropped. Raise CheckpointError for a file that is not a
    GPT-2; it names the first missing or unexpected tensor.
    """
    tensors = _read_gpt2_tensors(path)
    if not bias and not any(tensor.any() for name, tensor in tensors.items() if name.endswith(".bias")):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".bias")}
    shape = _infer_shape(path, tensors, num_heads)
    with torch.device("meta"):
        model = GPT(shape)
    expected = {gpt2_name(name): (name, parameter) for name, parameter in model.named_parameters()}
    if missing := [name for name in expected if name not in tensors]:
        raise _not_gpt2(path, f"{missing[0]} is missing")
    weights = {}
    for name, tensor in tensors.items():
        if name not in expected:
            raise _not_gpt2(path, f"{name} is not part of one")
        our_name, parameter = expected[name]
        weight = tensor.t() if CONV1D_PATTERN.search(name) else tensor
        if weight.shape != parameter.shape:
            raise _not_gpt2(path, f"{name} is {tuple(tensor.shape)}, which does not go with {shape.width} of width")
        weights[our_name] = weight.float().contiguous()
    return shape, weights


def gpt2_name(name: str) -> str:
    """Return the name that GPT-2's files, and nanoGPT, use for a parameter of GPT.

    >>> gpt2_name("blocks.0.attention.qkv.weight")
    'h.0.attn.c_attn.weight'
    """
    return OWN_NAME_PATTERN.sub(lambda part: GPT2_NAMES[part[0]], name)


def _read_gpt2_tensors(path: Path) -> dict[str, Tensor]:
    """Read the file's tensors; drop a name prefix, causal masks, and the tied head's copy."""
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from None
    tensors = {
        name.removeprefix("transformer."): t for name, t in stored.items() if not CAUSAL_MASK_PATTERN.search(name)
    }
    head = tensors.pop("lm_head.weight", None)
    if head is not None and "wte.weight" in tensors and not torch.equal(head, tensors["wte.weight"]):
        raise _not_gpt2(path, "lm_head.weight differs from wte.weight, to which a GPT-2's head is tied")
    return tensors


def _infer_shape(path: Path, tensors: dict[str, Tensor], num_heads: int | None) -> GPTShape:
    for name in ("wte.weight", "wpe.weight"):
        if name not in tensors:
            raise _not_gpt2(path, f"{name} is missing")
        if tensors[name].dim() != 2:
            raise _not_gpt2(path, f"{name} is {tuple(tensors[name].shape)}, not a table")
    vocab_size, width = tensors["wte.weight"].shape
    if num_heads is None:
        if width % PUBLISHED_HEAD_DIM:
            raise CheckpointError(
                f"{path}: the number of heads is unknown: width {width} is no multiple of {PUBLISHED_HEAD_DIM}",
                hint="pass num_heads: it is n_head in the model's config.json",
            )
        num_heads = width // PUBLISHED_HEAD_DIM
    return msgspec.structs.replace(
        GPT2,
        vocab_size=vocab_size,
        block_size=tensors["wpe.weight"].shape[0],
        num_layers=max(1, sum(name.endswith(".ln_1.weight") for name in tensors)),
        num_heads=num_heads,
        width=width,
        activation=_activation(path),
        bias=any(name.endswith(".bias") for name in tensors),
    )


def _activation(path: Path) -> Literal["gelu", "gelu_tanh"]:
    """Return the activation that config.json beside the weights names; GPT-2's if there is none."""
    try:
        config = json.loads(path.with_name("config.json").read_text())
        return ACTIVATION_BY_HF_NAME.get(config["activation_function"], "gelu_tanh")
    except (OSError, ValueError, LookupError, TypeError):
        return "gelu_tanh"


def _not_gpt2(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: not a GPT-2: {reason}", hint="take the model.safetensors of a Hugging Face GPT-2")
