"""Write a model of transformers as a GGUF file, which llama.cpp loads: `python -m evener.worker.export_gguf REQUEST`.

REQUEST is JSON: {"folder": what `evener export` wrote, in fp32, "name", "out": a file}. Names, the order of rows and
the metadata are those of llama.cpp's convert_hf_to_gguf.py: matrices are in fp16, all else in fp32.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
from safetensors.numpy import load_file

from evener.core.base.decoding import from_json
from evener.core.base.errors import UsageError, exit_status_of
from evener.core.base.file_io import read_file
from evener.worker.gguf_vocabulary import is_sentencepiece, read_vocabulary

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "gpt2": gguf.MODEL_ARCH.GPT2}
# What llama.cpp computes of these architectures; a configuration that says otherwise is another model.
COMPUTED = {
    "hidden_act": "silu", "activation_function": "gelu_new", "use_sliding_window": False, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}  # fmt: skip
GELU_NAMES = ("gelu_new", "gelu_pytorch_tanh")  # transformers' two names of GELU's tanh approximation


class GgufRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to write a GGUF file."""

    folder: str
    name: str  # of the model
    out: str


def export(request: GgufRequest) -> None:
    """Write the file. Raise UsageError for a model or a tokenizer of which no equal is known in llama.cpp."""
    folder = Path(request.folder)
    config, tokenizer = (json.loads(read_file(folder / name)) for name in ("config.json", "tokenizer.json"))
    check_architecture(config)
    special = gguf.SpecialVocab(folder, load_merges=not is_sentencepiece(tokenizer))
    if is_sentencepiece(tokenizer):
        tokenizer, special.add_special_token["bos"] = tokenizer_as_trained(folder)
    vocabulary = read_vocabulary(tokenizer, config["vocab_size"])
    if vocabulary.warning:
        print(f"warning: {vocabulary.warning}", file=sys.stderr)
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(request.out, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(request.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, config)
    vocabulary.add_to(writer)
    special.add_to_gguf(writer, quiet=True)
    for name, tensor in gguf_tensors(folder, config):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_as_trained(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return a tokenizer as transformers makes it of the files of a folder, and whether it puts BOS before a text.

    It makes the handling of spaces of a Llama anew, as tokenizer_config.json says, whatever stands in tokenizer.json.
    """
    from evener.worker.finetune.libraries import load_tokenizer  # evener's own models need no transformers

    tokenizer = load_tokenizer(folder)
    begins_with_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    return json.loads(tokenizer.backend_tokenizer.to_str()), begins_with_bos


def check_architecture(config: dict[str, Any]) -> None:
    """Raise UsageError if llama.cpp would compute something else than transformers with this configuration."""
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise UsageError(f"--gguf: the architecture {kind} is not exported to GGUF, only {', '.join(ARCHITECTURES)}")
    for key, computed in COMPUTED.items():
        value = config.get(key, computed)
        if value != computed and not (computed in GELU_NAMES and value in GELU_NAMES):
            raise UsageError(
                f"--gguf: its config.json has {key} {value}, and llama.cpp computes a {kind} with {computed}"
            )
    if (kind_of_rope := rope_of(config).get("rope_type", "default")) not in ("default", "linear", "llama3"):
        raise UsageError(f"--gguf: rotary positions of the kind {kind_of_rope} are not exported to GGUF")


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions, which older files of transformers spread over several keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_type": rope.get("type", "default"), "rope_theta": config.get("rope_theta", 10_000.0)} | rope


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write what llama.cpp must know to compute with the tensors."""
    if config["model_type"] == "gpt2":
        width = config["n_embd"]
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(config.get("n_inner") or 4 * width)
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    rope, num_heads = rope_of(config), config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or num_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(rope["rope_theta"])
    width = head_width(config)
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def gguf_tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors by their names in GGUF: matrices in fp16, all else in fp32, rows as llama.cpp orders them."""
    kind = config["model_type"]
    num_layers = config["n_layer" if kind == "gpt2" else "num_hidden_layers"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], num_layers)
    heads: dict[str, Any] = {"q_proj": config.get("num_attention_heads")}
    heads["k_proj"] = config.get("num_key_value_heads") or heads["q_proj"]
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            layer, _, leaf = name.rpartition(".")
            projection = layer.rpartition(".")[2]
            if kind == "gpt2" and projection in ("c_attn", "c_proj", "c_fc") and leaf == "weight":
                tensor = tensor.T  # transformers stores (in, out) there
            if kind == "llama" and projection in heads:
                tensor = interleave_rotary_pairs(tensor, heads[projection])
            renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if renamed is None:
                raise UsageError(f"--gguf: a {kind} with a tensor {name} is not exported to GGUF")
            is_matrix = tensor.ndim > 1 and not renamed.startswith("position_embd")
            with np.errstate(over="ignore"):
                converted = np.ascontiguousarray(tensor.astype(np.float16 if is_matrix else np.float32))
            if not np.isfinite(converted).all():
                raise UsageError(f"--gguf: {name} has weights beyond what fp16 can hold")
            yield renamed, converted
    if (rope := rope_of(config))["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_rope_factors(rope, head_width(config))


def head_width(config: dict[str, Any]) -> int:
    """Return the width of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def interleave_rotary_pairs(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Return a projection (heads x width, …) with pairs side by side: llama.cpp rotates rows 2i and 2i + 1 of a head.

    transformers rotates rows i and i + width / 2.
    """
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def llama3_rope_factors(rope: dict[str, Any], width: int) -> np.ndarray:
    """Return by what Llama 3 divides each frequency: (width / 2,) fp32.   [convert_hf_to_gguf.py]"""
    factor, low, high = (rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length, factors = rope["original_max_position_embeddings"], []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / width)
        smooth = min(1.0, max(0.0, (length / wavelength - low) / (high - low)))  # 0: long waves, 1: short ones
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def main() -> int:
    return exit_status_of(lambda: export(from_json(sys.argv[1], GgufRequest)))


if __name__ == "__main__":
    sys.exit(main())
