"""What a pretrained model's files say, without torch; a folder that cannot be fine-tuned is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from evener.core.base.errors import UsageError
from evener.core.model.corpus import BEGIN, LOSS, CorpusMeta, hash_bytes
from evener.core.model.pretrained import pretrained_files, read_pretrained
from evener.core.run.resolve import resolve
from evener.core.run.run_spec import parse_args

CONFIG = {"model_type": "llama", "vocab_size": 50, "max_position_embeddings": 256}
WIDTH, HIDDEN, VOCAB, RANK = 8, 20, 50, 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model of two layers, of which each has an attention of two matrices and an MLP of one."""
    layer = {"q_proj.weight": (WIDTH, WIDTH), "q_proj.bias": (WIDTH,), "up.weight": (HIDDEN, WIDTH)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_parameters_are_counted_without_torch(folder):
    num_params = 2 * (WIDTH * WIDTH + WIDTH + HIDDEN * WIDTH) + 2 * VOCAB * WIDTH
    full = read_pretrained(folder, None, None)
    assert full.params_by_group() == {"trained": num_params, "frozen": 0}
    assert full.block_size == 256
    adapted = read_pretrained(folder, 64, RANK)
    adapters = 2 * RANK * ((WIDTH + WIDTH) + (WIDTH + HIDDEN))
    assert adapted.params_by_group() == {"trained": adapters, "frozen": num_params}
    assert adapted.block_size == 64
    dora = read_pretrained(folder, 64, RANK, has_dora=True)
    assert dora.num_params() == adapters + 2 * (WIDTH + HIDDEN)  # a magnitude for each row
    assert adapted.gradients[0].name == "model.layers.1.up.lora_B"  # backward completes the last layer first
    assert set(pretrained_files(folder)) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_experts_in_one_tensor_are_counted(folder):
    """Of three dimensions, as transformers' gpt-oss, Llama 4 and Qwen3-MoE have them: (experts, in, out)."""
    name, shape = "model.layers.0.mlp.experts.gate_up_proj", (4, WIDTH, HIDDEN)
    before, adapted = (read_pretrained(folder, None, rank) for rank in (None, RANK))
    save_file({name: np.zeros(shape, np.float32)}, folder / "experts.safetensors")
    files = {tensor.name: "model.safetensors" for tensor in before.gradients} | {name: "experts.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    full, adapters = (read_pretrained(folder, None, rank) for rank in (None, RANK))
    assert full.num_params() == before.num_params() + 4 * WIDTH * HIDDEN
    assert adapters.num_frozen == adapted.num_frozen + 4 * WIDTH * HIDDEN
    assert adapters.num_params() == adapted.num_params()  # peft adapts linear layers alone
    (experts,) = [tensor for tensor in full.gradients if tensor.name == name]
    assert (experts.rows, experts.columns, experts.is_linear) == (4, WIDTH * HIDDEN, False)


def test_rows_that_bitsandbytes_decodes_wrongly_are_refused(folder):
    with pytest.raises(UsageError, match=r"q_proj\.weight in .* has rows of 8 weights.* multiples of 64") as raised:
        read_pretrained(folder, None, RANK, quantization="nf4")
    assert raised.value.hint == "--quantize int8"
    assert read_pretrained(folder, None, RANK, quantization="int8").num_params() > 0


def test_changed_weights_have_another_hash(folder):
    before = read_pretrained(folder, None, None).weights_hash
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert read_pretrained(folder, None, None).weights_hash != before


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def leave_a_pickle(folder: Path) -> None:
    remove_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def leave_adapters(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def name_a_file_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))


def cut_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{")


def end_the_weights_early(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])


@pytest.mark.parametrize(
    ("break_it", "error", "hint"),
    [
        (leave_a_pickle, "its weights are a pickle, pytorch_model.bin", "if you trust it: python -c"),
        (remove_weights, "model.safetensors is not there", "download"),
        (leave_adapters, "it holds LoRA adapters", "the model alone"),
        (name_a_file_elsewhere, "../model.safetensors is not there", "download"),
        (cut_the_weights, "not a safetensors file", "download"),
        (end_the_weights_early, "not a safetensors file: it has ", "download"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: No such file", "AutoTokenizer"),
        (lambda folder: (folder / "config.json").unlink(), "not a model of transformers: config.json", ""),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not that of a model", ""),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "clip"}'), "without a vocabulary", ""),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "llava", "text_config": {}}'),
            "a llava takes more than text",
            "no text_config",
        ),
        (
            lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {}})),
            "its weights are quantized",
            "bf16, fp16 or fp32",
        ),
    ],
)
def test_folder_that_cannot_be_fine_tuned_is_refused(folder, break_it, error, hint):
    break_it(folder)
    with pytest.raises(UsageError, match=r"^[^\n]*$") as raised:
        read_pretrained(folder, None, None)
    assert error in str(raised.value)
    assert hint in raised.value.hint


def test_block_longer_than_positions_is_refused(folder):
    with pytest.raises(UsageError, match="has 256 positions"):
        read_pretrained(folder, 257, None)


@pytest.mark.parametrize(
    ("flags", "error", "hint"),
    [
        (["--dora"], "--dora: it needs the rank of its adapters", "--lora 16 --dora"),
        (["--quantize=nf4"], "--quantize nf4: quantized weights cannot be trained", "--lora 16 --quantize nf4"),
        (["--lora=4", "--dora", "--quantize=int8"], "peft has no DoRA of 8-bit layers", "--dora --quantize nf4"),
    ],
)
def test_adapters_that_cannot_be_are_refused(flags, error, hint):
    with pytest.raises(UsageError, match=error) as raised:
        parse_args(["--model=hf:llama", *flags])
    assert raised.value.hint == hint


@pytest.mark.parametrize("flag", ["--lora=4", "--packing"])
def test_flags_of_fine_tuning_need_a_pretrained_model(flag):
    with pytest.raises(UsageError, match="--model char is not pretrained"):
        parse_args([flag])


@pytest.mark.parametrize(
    ("vocab_size", "block_size", "micro_batch"), [(300, 1024, 16), (151_936, 256, 3), (151_936, 1024, 1)]
)
def test_defaults_follow_the_model(folder, tmp_path, vocab_size, block_size, micro_batch):
    """A large vocabulary has few sequences in a micro-batch: its logits would fill the memory."""
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "val"):
        np.zeros(4, np.uint16).tofile(data / f"{split}.bin")
        np.array([BEGIN, LOSS, LOSS, LOSS], np.uint8).tofile(data / f"{split}.flags.bin")
    (data / "tokenizer.json").write_text("{}")
    meta = CorpusMeta(format=1, name="d", tokenizer="bpe", vocab_size=300, dtype="uint16", train_tokens=4, val_tokens=4,
                      content_hash="", tokenizer_hash=hash_bytes(b"{}"), num_documents=1, text_bytes=1, recipe={},
                      is_samples=True)  # fmt: skip
    (data / "meta.json").write_bytes(msgspec.json.encode(meta))
    flags = [
        "--data",
        str(data),
        "--model",
        f"hf:{folder}",
        "--block-size",
        str(block_size),
        "--out",
        f"{tmp_path}/run",
    ]
    full, adapted = (resolve(parse_args([*flags, *more])).spec.train for more in ([], ["--lora", "4"]))
    assert (full.lr, adapted.lr) == (2e-5, 2e-4)
    assert full.micro_batch == micro_batch
