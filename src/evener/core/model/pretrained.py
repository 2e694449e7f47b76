"""A pretrained model in a folder, as transformers saves it: what its files say about it, without torch.

    model = read_pretrained("some-model", block_size=None, lora_rank=16)
    model.block_size, model.num_params()      # the sequence length, and the parameters that are trained

A `PretrainedModel` stands in the place of a `GPTShape` in a run: it is part of the manifest and of every rank's
fingerprint. Only config.json and the headers of the safetensors files are read, and a sample of their content is
hashed. Nothing in the folder is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.errors import UsageError
from evener.core.base.file_io import open_file, read_file
from evener.core.base.shell import quote_command
from evener.core.model.corpus import hash_bytes, sample_blocks
from evener.core.model.gradients import GradientTensor
from evener.core.model.shape import GPTShape

DEFAULT_BLOCK_SIZE = 1024  # TRL's max_length (SFTConfig)
FINE_TUNING_EXTRA = "hf"  # of pyproject.toml, with the packages of `fine_tuning_packages`
EXTRA_HINT = "pip install 'evener[hf]'; for the hosts of a fleet: evener setup --extra hf"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
Quantization = Literal["off", "nf4", "int8"]  # 4 bits a weight, in blocks of 64 [QLoRA]; 8 bits, a scale for each row
NF4_BLOCK = 64  # weights that share a scale
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TRANSPOSED = ("gpt2", "openai-gpt")  # architectures whose linear layers transformers stores as (in, out)
HUB_CACHE_PATTERN = re.compile(r"/models--[^/]+?--([^/]+)/snapshots/[^/]+$")  # the name of a model in the hub's cache
LAYER_PATTERN = re.compile(r"\.\d+\.")  # "model.layers.0.self_attn.q_proj.weight", but not "lm_head.weight"


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder's layers: its FLOPs and its activations follow from them. All layers are alike."""

    num_layers: int
    width: int  # of the residual stream
    attention_width: int  # of the queries: heads × size of a head
    kv_width: int  # of keys and of values: less with grouped queries
    mlp_width: int  # of the MLP's hidden layer
    has_gate: bool  # the MLP multiplies two hidden layers, as Llama's does, instead of one


class PretrainedModel(msgspec.Struct, frozen=True, kw_only=True, tag="pretrained"):
    """A causal language model of transformers that a run fine-tunes: all of its weights, or LoRA adapters."""

    name: str  # of its folder
    architecture: str  # transformers' model_type
    weights_hash: str  # sampled, as `Corpus.content_hash` of a large corpus
    tokenizer_hash: str  # SHA-256 of its tokenizer.json
    vocab_size: int
    block_size: int  # the longest sequence of the run, in tokens
    lora_rank: int | None  # None: all weights are trained
    has_dora: bool = False  # of the adapters
    quantization: Quantization = "off"  # of the frozen weights
    num_frozen: int  # parameters that no step changes
    num_linear: int  # parameters of the linear layers in its blocks, frozen or not
    layers: Layers | None  # None: of a kind that evener does not know, such as a mixture of experts
    gradients: tuple[GradientTensor, ...]  # of what is trained

    dropout: ClassVar[float] = 0.0  # any division of a batch then trains the same model

    def num_params(self) -> int:
        """Return the number of parameters that are trained: these are exchanged, saved, and have optimizer states."""
        return sum(tensor.num_params for tensor in self.gradients)

    def params_by_group(self) -> dict[str, int]:
        """Return the numbers of trained and of frozen parameters."""
        return {"trained": self.num_params(), "frozen": self.num_frozen}


TrainedModel = GPTShape | PretrainedModel


class PretrainedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of config.json that are read; transformers reads all."""

    model_type: str
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    n_positions: int | None = None  # GPT-2's name for it
    quantization_config: dict[str, Any] | None = None
    text_config: dict[str, Any] | None = None  # of a model that also takes images or sound
    num_hidden_layers: int | None = None
    n_layer: int | None = None  # GPT-2's
    hidden_size: int | None = None
    n_embd: int | None = None  # GPT-2's
    num_attention_heads: int | None = None
    n_head: int | None = None  # GPT-2's
    num_key_value_heads: int | None = None
    head_dim: int | None = None


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]  # in the file, behind the header


def fine_tuning_packages(quantization: Quantization) -> tuple[str, ...]:
    """Return what a rank that fine-tunes imports besides evener's own dependencies."""
    return ("transformers", "peft", *["bitsandbytes"] * (quantization != "off"))


def require_libraries(quantization: Quantization = "off") -> None:
    """Raise UsageError if a package that fine-tuning needs is not installed."""
    for name in fine_tuning_packages(quantization):
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--model hf:FOLDER: it needs {name}", hint=EXTRA_HINT)


def model_name(folder: Path) -> str:
    """Return the name of a model's folder; that of its model if it lies in the hub's cache.

    >>> model_name(Path("/models/qwen")), model_name(Path("/hub/models--Qwen--Qwen2.5-0.5B/snapshots/060db6499f32"))
    ('qwen', 'Qwen2.5-0.5B')
    """
    cached = HUB_CACHE_PATTERN.search(str(folder.absolute()))
    return cached.group(1) if cached else folder.absolute().name


def read_pretrained(
    folder: Path,
    block_size: int | None,
    lora_rank: int | None,
    *,
    has_dora: bool = False,
    quantization: Quantization = "off",
) -> PretrainedModel:
    """Read a model's folder. Raise UsageError if it holds no causal language model in safetensors with a tokenizer."""
    config = _read_config(folder)
    files = _weights_files(folder)
    longest = config.max_position_embeddings or config.n_positions
    if block_size is not None and longest is not None and block_size > longest:
        raise UsageError(f"--block-size {block_size}: {folder} has {longest} positions", hint=f"at most {longest}")
    assert config.vocab_size is not None
    tensors = {name: tensor.shape for file in files for name, tensor in _read_header(file).items()
               if tensor.dtype.startswith(("F", "BF")) and tensor.shape}  # fmt: skip
    if quantization == "nf4":
        _check_blocks(folder, tensors, is_transposed=config.model_type in TRANSPOSED)
    num_params = sum(math.prod(shape) for shape in tensors.values())
    return PretrainedModel(
        name=model_name(folder),
        architecture=config.model_type,
        weights_hash=_hash_weights(folder, files),
        tokenizer_hash=_hash_tokenizer(folder),
        vocab_size=config.vocab_size,
        block_size=block_size or min(DEFAULT_BLOCK_SIZE, longest or DEFAULT_BLOCK_SIZE),
        lora_rank=lora_rank,
        has_dora=has_dora,
        quantization=quantization,
        num_frozen=0 if lora_rank is None else num_params,
        num_linear=sum(math.prod(shape) for name, shape in tensors.items() if _is_linear(name, shape)),
        layers=_read_layers(config, tensors),
        gradients=_full_gradients(tensors)
        if lora_rank is None
        else _adapter_gradients(tensors, lora_rank, is_transposed=config.model_type in TRANSPOSED, has_dora=has_dora),
    )


def pretrained_files(folder: Path) -> dict[str, Path]:
    """Return the files of a model that a rank reads, by their names in the folder."""
    names = ["config.json", "generation_config.json", "model.safetensors.index.json", *TOKENIZER_FILES]
    files = {name: folder / name for name in names if (folder / name).is_file()}
    return files | {file.name: file for file in _weights_files(folder)}


def _read_config(folder: Path) -> PretrainedConfig:
    flag = f"--model hf:{folder}"
    if not folder.is_dir():
        raise UsageError(
            f"{flag}: no such folder",
            hint="what save_pretrained of transformers wrote, or `hf download NAME --local-dir FOLDER` downloaded",
        )
    if (folder / "adapter_config.json").exists():  # transformers would add them to the model
        raise UsageError(f"{flag}: it holds LoRA adapters", hint="a folder that holds the model alone")
    try:
        config = from_json(read_file(folder / "config.json"), PretrainedConfig)
    except OSError as error:
        raise UsageError(f"{flag}: not a model of transformers: config.json: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{flag}: config.json is not that of a model: {error}") from None
    if config.text_config is not None:
        raise UsageError(
            f"{flag}: a {config.model_type} takes more than text (its config.json has a text_config), and evener "
            "fine-tunes models of text alone",
            hint="the folder of a model whose config.json has a vocab_size and no text_config",
        )
    if config.vocab_size is None:
        raise UsageError(f"{flag}: a {config.model_type} without a vocabulary is not a causal language model")
    if config.quantization_config is not None:
        raise UsageError(f"{flag}: its weights are quantized", hint="the folder of the model in bf16, fp16 or fp32")
    return config


def _weights_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model: those of its index, or else the only one."""
    flag, index = f"--model hf:{folder}", folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted({*from_json(read_file(index), WeightsIndex).weight_map.values()})
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"{flag}: {index.name} is damaged: {error}") from None
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if "/" in name or not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in names]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles and not index.is_file():
        raise UsageError(
            f"{flag}: its weights are a pickle, {pickles[0]}, which can hold a program: evener reads safetensors only",
            hint=f"if you trust it: {_convert('AutoModelForCausalLM', folder)}",
        )
    raise UsageError(f"{flag}: {missing[0]} is not there", hint="download the model again")


def _convert(kind: str, folder: Path) -> str:
    """Return the command by which transformers loads a part of the model, and saves it in the format of today."""
    code = f"import sys, transformers as t; f = sys.argv[1]; t.{kind}.from_pretrained(f).save_pretrained(f)"
    return quote_command(["python", "-c", code, str(folder)])


class WeightsIndex(msgspec.Struct, frozen=True, kw_only=True):
    """model.safetensors.index.json: which file holds which tensor."""

    weight_map: dict[str, str]


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file: 8 bytes with its length, then JSON.   [safetensors, format]"""
    try:
        with open_file(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = from_json(msgspec.json.encode(header), dict[str, StoredTensor])
        expected = 8 + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
        if (found := path.stat().st_size) != expected:
            raise ValueError(f"it has {found} bytes of {expected}")
        return tensors
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path}: not a safetensors file: {error}", hint="download the model again") from None


def _hash_weights(folder: Path, files: list[Path]) -> str:
    digest = hashlib.sha256(read_file(folder / "config.json"))
    for file in files:
        for block in sample_blocks(file):
            digest.update(block)
    return f"sampled-sha256:{digest.hexdigest()}"


def _hash_tokenizer(folder: Path) -> str:
    try:
        return hash_bytes(read_file(folder / "tokenizer.json"))
    except OSError as error:
        raise UsageError(
            f"--model hf:{folder}: tokenizer.json: {error.strerror}",
            hint=f"one that has only tokenizer.model: {_convert('AutoTokenizer', folder)}",
        ) from None


def _read_layers(config: PretrainedConfig, tensors: dict[str, list[int]]) -> Layers | None:
    """Return the sizes of the layers; None if the linear layers are not those of an attention and one MLP a layer."""
    num_layers, width = config.num_hidden_layers or config.n_layer, config.hidden_size or config.n_embd
    heads = config.num_attention_heads or config.n_head
    if not num_layers or not width or not heads:
        return None
    head_dim = config.head_dim or width // heads
    attention_width, kv_width = heads * head_dim, (config.num_key_value_heads or heads) * head_dim
    num_attention = 2 * width * (attention_width + kv_width)  # queries and output, keys and values
    num_linear = sum(math.prod(shape) for name, shape in tensors.items() if _is_linear(name, shape))
    num_mlp, rest = divmod(num_linear - num_layers * num_attention, num_layers * width)
    mlp_width = max((max(shape) for name, shape in tensors.items() if _is_linear(name, shape) and "mlp" in name),
                    default=0)  # fmt: skip
    if rest or num_mlp not in (2 * mlp_width, 3 * mlp_width):
        return None
    return Layers(
        num_layers=num_layers,
        width=width,
        attention_width=attention_width,
        kv_width=kv_width,
        mlp_width=mlp_width,
        has_gate=num_mlp == 3 * mlp_width,
    )


def _gradient(name: str, rows: int, columns: int, ready: float, kind: Literal["linear", "other"]) -> GradientTensor:
    return GradientTensor(name=name, rows=rows, columns=columns, ready=ready, is_linear=kind == "linear")


def _check_blocks(folder: Path, tensors: dict[str, list[int]], *, is_transposed: bool) -> None:
    """Raise UsageError if bitsandbytes would decode a layer wrongly.

    On a processor 0.50.2 takes another block's scale in rows of 32, 96 or 160 weights. *Measured on x86-64 (2026-11)*
    """
    for name, shape in tensors.items():
        width = shape[0 if is_transposed else -1]
        if _is_linear(name, shape) and width % NF4_BLOCK:
            raise UsageError(
                f"--quantize nf4: {name} in {folder} has rows of {width} weights, and on processors "
                f"bitsandbytes decodes only multiples of {NF4_BLOCK} correctly",
                hint="--quantize int8",
            )


def _full_gradients(tensors: dict[str, list[int]]) -> tuple[GradientTensor, ...]:
    """Return the gradients of all weights; the last is ready first. Experts in one tensor are rows of it."""
    names = sorted(tensors, key=_layer_order, reverse=True)
    return tuple(
        _gradient(name, tensors[name][0], math.prod(tensors[name][1:]), (i + 1) / len(names),
                  "linear" if _is_linear(name, tensors[name]) else "other")
        for i, name in enumerate(names)
    )  # fmt: skip


def _adapter_gradients(
    tensors: dict[str, list[int]], rank: int, *, is_transposed: bool, has_dora: bool
) -> tuple[GradientTensor, ...]:
    """Return the gradients of LoRA adapters of every linear layer but the head's: A (rank, in) and B (out, rank).

    DoRA has a magnitude (out) as well. `is_transposed`: the layers are stored as (in, out).
    """
    names = sorted((name for name in tensors if _is_linear(name, tensors[name])), key=_layer_order, reverse=True)
    gradients = []
    for i, name in enumerate(names):
        out, width = tensors[name][::-1] if is_transposed else tensors[name]
        ready, layer = (i + 1) / len(names), name.removesuffix(".weight")
        gradients += [_gradient(f"{layer}.lora_magnitude_vector", out, 1, ready, "other")] * has_dora
        gradients += [_gradient(f"{layer}.lora_B", out, rank, ready, "linear"),
                      _gradient(f"{layer}.lora_A", rank, width, ready, "linear")]  # fmt: skip
    return tuple(gradients)


def _is_linear(name: str, shape: list[int]) -> bool:
    """Return whether a tensor is the matrix of a linear layer inside a block: embeddings and the head are outside."""
    return len(shape) == 2 and name.endswith(".weight") and LAYER_PATTERN.search(name) is not None


def _layer_order(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts layer 10 behind layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
