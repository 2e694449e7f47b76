"""A GGUF file holds the exported model: read by gguf's own reader, and computed as llama.cpp does."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from evener.core.base.errors import UsageError
from evener.worker.export_gguf import GgufRequest, export
from evener.worker.finetune.libraries import load_tokenizer
from evener.worker.gguf_vocabulary import BYTES, piece_scores, read_vocabulary

from ..pretrained import TEMPLATE, TEXT, make_model

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
LLAMA_LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
               "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
               "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def exported(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors and the metadata of the file, as gguf's reader reads them."""
    file = folder / "model.gguf"
    export(GgufRequest(folder=str(folder), name="mine", out=str(file)))
    reader = gguf.GGUFReader(file)
    return {t.name: t.data for t in reader.tensors}, {name: f.contents() for name, f in reader.fields.items()}


def stored(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def rotate_neighbours(x: np.ndarray, base: float, factors: np.ndarray | None) -> np.ndarray:
    """Return heads (T, heads, width) whose pairs 2i and 2i + 1 are rotated: ggml's normal mode of rope."""
    width = x.shape[-1]
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(0, width, 2) / width)
    angles = (angles if factors is None else angles / factors)[:, None, :]  # (T, 1, width / 2)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.stack([even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles)], -1)
    return turned.reshape(x.shape)


def llama_logits(tensors: dict[str, np.ndarray], fields: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Return the logits (T, V) that llama.cpp's graph of the architecture llama computes from the file's content."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    num_heads, num_kv = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    epsilon, base = fields["llama.attention.layer_norm_rms_epsilon"], fields["llama.rope.freq_base"]
    factors = w.get("rope_freqs.weight")
    x = w["token_embd.weight"][tokens]  # (T, C)
    future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for i in range(fields["llama.block_count"]):
        layer = {name: w[f"blk.{i}.{name}.weight"] for name in LLAMA_LAYER}
        h = rms_norm(x, layer["attn_norm"], epsilon)
        q, k, v = ((h @ layer[f"attn_{part}"].T).reshape(len(tokens), heads, -1)
                   for part, heads in (("q", num_heads), ("k", num_kv), ("v", num_kv)))  # fmt: skip
        q, k = rotate_neighbours(q, base, factors), rotate_neighbours(k, base, factors)
        k, v = (np.repeat(part, num_heads // num_kv, axis=1) for part in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1]) + future
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", weights, v).reshape(len(tokens), -1) @ layer["attn_output"].T
        h = rms_norm(x, layer["ffn_norm"], epsilon)
        gate = h @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    return rms_norm(x, w["output_norm.weight"], epsilon) @ w["output.weight"].T


@pytest.mark.parametrize("rope", [None, LLAMA3_ROPE])
def test_llama_computes_the_logits_of_transformers_from_the_file(tmp_path, rope):
    """Rows of q and k are ordered for rotations of neighbours; with another order, positions are lost."""
    make_model(tmp_path)
    if rope is not None:
        change_config(tmp_path, rope_parameters=rope)
    tensors, fields = exported(tmp_path)
    tokens = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # to what the file holds of it
            parameter.copy_(parameter.half().float() if parameter.dim() > 1 else parameter)
        expected = model(tokens).logits[0].numpy()
    assert np.allclose(llama_logits(tensors, fields, tokens[0].numpy()), expected, atol=1e-4)
    assert ("rope_freqs.weight" in tensors) == (rope is not None)
    unordered = tensors | {"blk.0.attn_q.weight": stored(tmp_path)["model.layers.0.self_attn.q_proj.weight"]}
    assert not np.allclose(llama_logits(unordered, fields, tokens[0].numpy()), expected, atol=1e-2)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("qwen2", {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
                  | {f"model.layers.1.{theirs}.weight": f"blk.1.{ours}.weight" for ours, theirs in LLAMA_LAYER.items()}
                  | {f"model.layers.0.self_attn.{part}_proj.bias": f"blk.0.attn_{part}.bias" for part in "qkv"}),
        ("gpt2", {"transformer.wte.weight": "token_embd.weight", "transformer.wpe.weight": "position_embd.weight",
                  "transformer.ln_f.bias": "output_norm.bias", "transformer.h.1.ln_2.weight": "blk.1.ffn_norm.weight",
                  "transformer.h.0.attn.c_attn.weight": "blk.0.attn_qkv.weight",
                  "transformer.h.0.attn.c_proj.weight": "blk.0.attn_output.weight",
                  "transformer.h.1.mlp.c_fc.weight": "blk.1.ffn_up.weight",
                  "transformer.h.1.mlp.c_proj.weight": "blk.1.ffn_down.weight"}),
    ],
)  # fmt: skip
def test_reader_of_gguf_reads_the_tensors(tmp_path, architecture, names):
    make_model(tmp_path, architecture)
    tensors, fields = exported(tmp_path)
    weights = stored(tmp_path)
    assert len(tensors) == len(weights)
    for theirs, ours in names.items():
        expected = weights[theirs].T if ".c_" in theirs and theirs.endswith("weight") else weights[theirs]
        is_matrix = expected.ndim == 2 and "wpe" not in theirs
        assert tensors[ours].dtype == (np.float16 if is_matrix else np.float32)
        assert np.array_equal(tensors[ours], expected.astype(tensors[ours].dtype)), ours
    assert fields["general.architecture"] == architecture
    assert (fields[f"{architecture}.context_length"], fields[f"{architecture}.embedding_length"]) == (128, 32)


def test_tokens_merges_and_chat_template_are_in_the_file(tmp_path):
    make_model(tmp_path)
    _, fields = exported(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    assert fields["tokenizer.ggml.merges"] == merges
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert all(tokens[i] == token for token, i in tokenizer["model"]["vocab"].items())
    assert (len(tokens), tokens[0], tokens[303]) == (304, "<|endoftext|>", "[PAD303]")
    assert (kinds[0], kinds[10], kinds[303]) == (3, 1, 5)  # control, normal, unused   [gguf.TokenType]
    assert fields["tokenizer.ggml.eos_token_id"] == 0
    assert fields["tokenizer.chat_template"] == TEMPLATE
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")


def pretokenizer(*parts: dict[str, Any]) -> dict[str, Any]:
    model = {"type": "BPE", "merges": [["a", "b"]], "vocab": {"a": 0, "b": 1, "ab": 2}}
    return {"model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}}


def split_by(pattern: str) -> dict[str, Any]:
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return pretokenizer({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                        bytes_alone)  # fmt: skip


@pytest.mark.parametrize(
    ("tokenizer", "name"),  # patterns as they stand in the published tokenizer.json, and in llama.cpp's llama-vocab.cpp
    [
        (split_by(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "llama-bpe"),
        (split_by(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "qwen2"),
        (pretokenizer({"type": "Digits", "individual_digits": True},
                      {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}),
         "smollm"),
        (split_by(r"\s+"), None),
        (pretokenizer(), None),
        ({"model": {"type": "Unigram"}}, None),
    ],
)  # fmt: skip
def test_split_of_words_is_named_or_refused(tokenizer, name):
    if name is None:
        with pytest.raises(UsageError, match="--gguf: its tokenizer"):
            read_vocabulary(tokenizer, 3)
    else:
        assert read_vocabulary(tokenizer, 3).split == name


FIRST = {"type": "Metaspace", "replacement": "▁", "split": False, "prepend_scheme": "first"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPENDED = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACES]}
SAMPLES = ("the horse pulls a cart, and stops", "  two   spaces ", "the<s>the red horse", "<s>", "not\nhere: ☃ 你",
           "aaaaaa", "blueblueblue<s><s> then")  # fmt: skip


def make_sentencepiece(folder: Path) -> dict[str, Any]:
    """Write a Llama with a tokenizer like SentencePiece's: all pairs that make a piece, the best piece first."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    make_model(folder)
    engine = Tokenizer(models.BPE())
    engine.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=304, special_tokens=special, show_progress=False)
    engine.train_from_iterator([TEXT] * 5, trainer)
    trained = json.loads(engine.to_str())["model"]
    vocabulary = {piece: i for piece, i in trained["vocab"].items() if i < 304}
    pieces = list(dict.fromkeys("".join(pair) for pair in trained["merges"]))
    merges = [[piece[:i], piece[i:]] for piece in pieces for i in range(1, len(piece))
              if piece in vocabulary and piece[:i] in vocabulary and piece[i:] in vocabulary]  # fmt: skip
    special_tokens = [{"id": i, "content": special[i], "single_word": False, "lstrip": False, "rstrip": False,
                       "normalized": False, "special": True} for i in range(2)]  # fmt: skip
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": True, "fuse_unk": True,
             "unk_token": "<unk>", "dropout": None}  # fmt: skip
    tokenizer = {"version": "1.0", "added_tokens": special_tokens, "normalizer": PREPENDED, "pre_tokenizer": None,
                 "post_processor": None, "decoder": None, "model": model}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    set_tokenizer_class(folder, "PreTrainedTokenizerFast")
    return tokenizer


def set_tokenizer_class(folder: Path, name: str, **more: Any) -> None:
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "<s>", "unk_token": "<unk>"} | more
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tokens_of_llama_cpp(text: str, fields: dict[str, Any]) -> list[int]:
    """Return the tokens that llama.cpp's SentencePiece makes with the file's content: the best pair first, by score."""
    numbers = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    scores, types = fields["tokenizer.ggml.scores"], fields["tokenizer.ggml.token_type"]
    special = [token for token, i in numbers.items() if types[i] == gguf.TokenType.CONTROL]
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, special))})", text):
        if part in special:
            ids.append(numbers[part])
        elif part:
            pieces = list((" " * fields["tokenizer.ggml.add_space_prefix"] + part).replace(" ", "▁"))
            while pairs := [(-scores[numbers[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(pieces))
                            if a + b in numbers]:  # fmt: skip
                _, i = min(pairs)
                pieces[i : i + 2] = ["".join(pieces[i : i + 2])]
            ids += [number for piece in pieces for number in ([numbers[piece]] if piece in numbers else
                    [numbers[f"<0x{byte:02X}>"] for byte in piece.encode()])]  # fmt: skip
    return ids


@pytest.mark.parametrize("has_prefix", [True, False])
def test_llama_cpp_splits_text_as_sentencepiece_does(tmp_path, has_prefix):
    tokenizer = make_sentencepiece(tmp_path)
    if not has_prefix:
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": SPACES}))
    _, fields = exported(tmp_path)
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.add_bos_token"] is False  # llama.cpp's default is True
    types = fields["tokenizer.ggml.token_type"]
    assert [types[i] for i in (0, 1, 2, 257, 303)] == [3, 3, 6, 6, 1]  # control, bytes, normal   [gguf.TokenType]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in SAMPLES:
        assert tokens_of_llama_cpp(text, fields) == theirs(text, add_special_tokens=False).input_ids, text


def test_runs_of_spaces_may_have_one_score():
    """As in LLaMA's published vocabulary: their merges stand among each other, by the length of the left part."""
    runs = ["▁" * size for size in (2, 3, 4)]
    vocabulary = dict.fromkeys([*BYTES, "a", "▁", "▁a", *runs], 0)
    pairs = [["▁" * i, "▁" * j] for i in (1, 2, 3) for j in (1, 2, 3) if i + j <= 4]
    tokenizer = {"model": {"vocab": vocabulary, "merges": [["▁", "a"], *pairs]}}
    assert piece_scores(tokenizer) == {"▁a": 0.0, "▁▁": -1.0, "▁▁▁": -2.0, "▁▁▁▁": -2.0}
    tokenizer["model"]["merges"].insert(3, tokenizer["model"]["merges"].pop(0))  # among them
    with pytest.raises(UsageError, match="has other merges between those that make '▁a'"):
        piece_scores(tokenizer)


def test_spaces_are_those_of_the_tokenizer_that_trains(tmp_path, capsys):
    """transformers makes them anew for a Llama, whatever tokenizer.json says."""
    tokenizer, bos = make_sentencepiece(tmp_path), {"SpecialToken": {"id": "<s>", "type_id": 0}}
    before_text = {"type": "TemplateProcessing", "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                   "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": before_text}))
    set_tokenizer_class(tmp_path, "LlamaTokenizer", legacy=False)
    _, fields = exported(tmp_path)
    assert "warning: llama.cpp puts a space before text behind a special token, too" in capsys.readouterr().err
    assert fields["tokenizer.ggml.add_space_prefix"]
    assert fields["tokenizer.ggml.add_bos_token"]
    theirs = load_tokenizer(tmp_path)
    for text in SAMPLES:
        if not text.startswith(" ") and "<s>" not in text:
            assert tokens_of_llama_cpp(text, fields) == theirs(text, add_special_tokens=False).input_ids, text


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda one: one["model"]["merges"].reverse(), None),  # still of scores, of others
        (lambda one: one["model"]["merges"].pop(), "does not come from such scores"),
        (lambda one: one["model"]["merges"].insert(0, one["model"]["merges"].pop()), "does not come from such scores"),
        (lambda one: one["model"]["vocab"].pop("<0x41>"), "falls back to bytes, but lacks tokens"),
        (lambda one: one.update(normalizer={"type": "NFKC"}), "normalizes text in another way"),
        (lambda one: one.update(normalizer=None, pre_tokenizer=FIRST), None),
        (lambda one: one.update(normalizer=None, pre_tokenizer=FIRST | {"prepend_scheme": "always"}), None),
        (lambda one: one["added_tokens"][1].update(normalized=True), "a token '<s>' with normalized"),
        (lambda one: one["added_tokens"][1].update(lstrip=True), "a token '<s>' with lstrip"),
        (lambda one: one["model"].update(ignore_merges=True), "has ignore_merges"),
        (lambda one: one["model"]["vocab"].update({"☃a": 303}), "does not merge '☃' and 'a'"),
    ],
)  # fmt: skip
def test_tokenizer_that_llama_cpp_has_no_equal_of_is_refused(tmp_path, change, error):
    tokenizer = make_sentencepiece(tmp_path)
    change(tokenizer)
    if error is None:
        read = read_vocabulary(tokenizer, 304)
        assert (read.space_before_text, bool(read.warning)) == (True, tokenizer["pre_tokenizer"] == FIRST)
    else:
        with pytest.raises(UsageError, match=error):
            read_vocabulary(tokenizer, 304)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_type": "mixtral"}, "the architecture mixtral is not exported to GGUF, only llama, qwen2, gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act gelu, and llama.cpp computes a llama with silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary positions of the kind yarn"),
    ],
)
def test_model_that_llama_cpp_would_compute_otherwise_is_refused(tmp_path, changes, error):
    make_model(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(UsageError, match=error):
        exported(tmp_path)
    assert not (tmp_path / "model.gguf").exists()


def test_weights_beyond_fp16_are_refused(tmp_path):
    make_model(tmp_path)
    weights = stored(tmp_path)
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * 1e9}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"lm_head\.weight has weights beyond what fp16 can hold"):
        exported(tmp_path)
