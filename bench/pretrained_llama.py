"""Llamas, their tokenizer and samples to train them on, made of the source of Python's library."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from evener.corpus.stdlib_source import stdlib_documents

VOCAB_SIZE = 8000


def make_llama(folder: Path, *, width: int, mlp_width: int, num_layers: int, num_heads: int, block_size: int) -> None:
    """Write a Llama with random weights, and a byte-level BPE tokenizer of the library's source."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=block_size, hidden_size=width, intermediate_size=mlp_width,
        num_hidden_layers=num_layers, num_attention_heads=num_heads, num_key_value_heads=num_heads // 2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer(folder)


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer of the library's source."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    engine.train_from_iterator(source_texts(), trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|endoftext|>").save_pretrained(folder)


def pretrain_llama(folder: Path, *, steps: int) -> tuple[Path, Path]:
    """Return the folders of a Llama of 10M parameters, trained on every second module of the library, and of samples of
    the others: functions, whose bodies carry loss. Make what is missing.
    """
    model, corpus = folder / "llama", folder / "functions"
    if not model.exists():
        make_llama(folder / "random", width=256, mlp_width=688, num_layers=8, num_heads=4, block_size=256)
        write_rows(folder / "modules.jsonl", ({"text": text} for text in source_texts()[::2]))
        evener = [sys.executable, "-m", "evener"]
        train = ["train", "modules.jsonl", "--model", "hf:random", "--steps", str(steps), "--lr", "1e-3"]
        subprocess.run([*evener, *train, "--out", "run"], cwd=folder, check=True)
        subprocess.run([*evener, "export", "run", "--out", "llama"], cwd=folder, check=True)
    if not corpus.exists():
        write_rows(folder / "functions.jsonl", function_samples(source_texts()[1::2]))
        request = {"paths": [str(folder / "functions.jsonl")], "column": None, "model": str(model), "out": str(corpus)}
        tokenize = [sys.executable, "-m", "evener.worker.finetune.tokenize_samples", json.dumps(request)]
        subprocess.run(tokenize, check=True)
    return model, corpus


def function_samples(sources: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield each function that has a docstring: the prompt is its head with the docstring, the completion its body."""
    for source in sources:
        try:
            tree = ast.parse(source)
        except SyntaxError:  # among the library's tests, on purpose
            continue
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).splitlines(keepends=True)
                head = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
                yield {"prompt": "".join(text[:head]), "completion": "".join(text[head:])}


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def source_texts() -> list[str]:
    documents, _ = stdlib_documents()
    paths = [document.source for document in documents]
    return [path.read_text() for path in sorted(path for path in paths if isinstance(path, Path))]
