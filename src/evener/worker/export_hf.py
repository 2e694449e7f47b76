"""Export a checkpoint to a folder that transformers loads. `python -m evener.worker.export_hf REQUEST`

REQUEST is JSON: {"checkpoint", "shape", "end_of_text": id or null, "out": an existing folder}. A GPT-2-like model
differs from transformers' own by names and a transposition; missing biases become zeros.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from evener.core.base.decoding import from_json
from evener.core.base.errors import UsageError, exit_status_of
from evener.core.model.shape import GPTShape
from evener.worker.state.checkpoint import load_weights
from evener.worker.train.gpt2 import CONV1D_PATTERN, gpt2_name
from evener.worker.train.model import GPT

HF_ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}  # transformers' names for them


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to export a checkpoint."""

    checkpoint: str
    shape: GPTShape
    end_of_text: int | None
    out: str


def export(request: ExportRequest) -> None:
    """Write config.json and model.safetensors; raise UsageError for a model that transformers has no class for."""
    shape = request.shape
    is_gpt2 = (shape.positions, shape.norm, shape.tied_head, shape.value_embeddings, shape.qk_norm) == (
        "learned", "layernorm", True, False, False,
    )  # fmt: skip
    if not is_gpt2 or shape.activation not in HF_ACTIVATION_NAMES:
        raise UsageError(
            f"{request.checkpoint}: transformers has no class for this model: it is not GPT-2-like",
            hint="weights.safetensors has its parameters by name, and evener.worker.train.model.GPT computes with them",
        )
    model = GPT(shape)
    load_weights(Path(request.checkpoint), model)
    weights = {}
    for name, parameter in model.named_parameters():
        hf_name = gpt2_name(name)
        tensor = parameter.detach().t() if CONV1D_PATTERN.search(hf_name) else parameter.detach()
        weights[f"transformer.{hf_name}"] = tensor.contiguous()
        if hf_name.endswith(".weight") and hf_name not in ("wte.weight", "wpe.weight"):
            bias = f"transformer.{hf_name.removesuffix('weight')}bias"
            if bias not in weights:
                weights[bias] = torch.zeros(tensor.shape[-1])
    save_file(weights, Path(request.out) / "model.safetensors", {"format": "pt"})
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.block_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_embd": shape.width,
        "activation_function": HF_ACTIVATION_NAMES[shape.activation],
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": request.end_of_text,
        "eos_token_id": request.end_of_text,
    }
    (Path(request.out) / "config.json").write_text(json.dumps(config | dropout, indent=2) + "\n")


def main() -> int:
    return exit_status_of(lambda: export(from_json(sys.argv[1], ExportRequest)))


if __name__ == "__main__":
    sys.exit(main())
