"""The data of a run: a prepared folder, or texts that are prepared first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from evener.cli.data import show_progress
from evener.cli.run_output import print_status
from evener.core.base.errors import UsageError
from evener.core.base.units import format_bytes, pluralize
from evener.core.model.corpus import SPLITS, Corpus, hint_for_missing, load_corpus
from evener.core.model.pretrained import read_pretrained, require_libraries
from evener.core.run.run_spec import DataSpec, RunSpec
from evener.corpus.prepare_corpus import prepare
from evener.corpus.samples import read_samples, rows_of
from evener.corpus.text_cache import is_prepared, prepare_texts, samples_folder
from evener.corpus.text_sources import STDIN
from evener.launch.torch_subprocess import program_lines


def prepared_folder(paths: Sequence[str], tokenizer: str | None = None, vocab_size: int | None = None,
                    column: str | None = None, *, is_default: bool = False) -> str:  # fmt: skip
    """Return the folder of the corpus: the one that is named, or that of the texts, which are prepared in the cache.

    `is_default`: nobody named any data. The verb corpus is made then, if it is not there.
    """
    if is_default and not Path(paths[0]).exists() and paths[0] == DataSpec().data:
        _make_verbs(Path(paths[0]))
    prepared = [path for path in paths if is_prepared(Path(path))]
    if prepared:
        given = {"--tokenizer": tokenizer, "--vocab-size": vocab_size, "--column": column}
        for flag, value in given.items():
            if value is not None:
                kind = load_corpus(prepared[0]).tokenizer
                raise UsageError(f"{flag} {value}: {prepared[0]} is prepared already, with tokenizer {kind}",
                                 hint="name the text itself")  # fmt: skip
        if len(paths) > 1:
            raise UsageError(f"{prepared[0]} is prepared already: no other text can be added to it",
                             hint="name all texts themselves")  # fmt: skip
        return prepared[0]
    for path in paths:
        _check_exists(path)
    with show_progress() as progress:
        found = prepare_texts(paths, tokenizer=tokenizer, vocab_size=vocab_size, column=column, progress=progress)
    corpus = found.corpus
    for note in found.notes:
        print_status(note)
    chosen = "; --tokenizer chooses another" if found.tokenizer_was_chosen else ""
    print_status(
        f"{', '.join(paths)}: {format_bytes(found.num_text_bytes)} of text, {corpus.train_tokens:,} tokens to train "
        f"on, {corpus.val_tokens:,} to validate; tokenizer {corpus.tokenizer} of {corpus.vocab_size:,}{chosen}"
    )
    print_status(f"{'prepared in' if found.was_written else 'found prepared in'} {found.folder}")
    return str(found.folder)


def prepared_samples(paths: Sequence[str], spec: RunSpec, tokenizer: str | None, vocab_size: int | None,
                     column: str | None) -> str:  # fmt: skip
    """Return the folder of the samples that these files hold for the pretrained model of the spec; print what they are.

    It is the one that is named, or one in the cache, where the model's tokenizer prepares it.
    """
    model = spec.model.pretrained
    assert model is not None
    for flag, value in (("--tokenizer", tokenizer), ("--vocab-size", vocab_size)):
        if value is not None:
            raise UsageError(
                f"{flag} {value}: --model {spec.model.model} has its own tokenizer", hint=f"without {flag}"
            )
    require_libraries(spec.model.quantize)
    chosen = spec.model
    shape = read_pretrained(model, chosen.block_size, chosen.lora, has_dora=chosen.dora, quantization=chosen.quantize)
    if len(paths) == 1 and is_prepared(Path(paths[0])):
        folder = Path(paths[0])
    else:
        for path in paths:
            _check_exists(path)
            if path == STDIN:
                raise UsageError("-: what is fine-tuned on is read from files", hint="a .jsonl file")
        folder = samples_folder(paths, column, model)
        if not is_prepared(folder):
            print_status(f"{', '.join(paths)}: encoding with the tokenizer of {model}")
            request = {"paths": list(paths), "column": column, "model": str(model), "out": str(folder)}
            list(program_lines("evener.worker.finetune.tokenize_samples", json.dumps(request)))
    corpus = load_corpus(folder)
    if corpus.is_samples:
        for split in SPLITS:
            print_status(describe_samples(corpus, split, shape.block_size, packing=spec.train.packing))
    return str(folder)


def describe_samples(corpus: Corpus, split: str, block_size: int, *, packing: bool) -> str:
    """Return a sentence on the samples of a split: how many, and what is lost of them."""
    table = read_samples(corpus, split, block_size)
    what = "to train on" if split == "train" else "held out to validate"
    text = f"{pluralize(len(table.starts), 'sample')} {what}: {table.lengths.sum():,} tokens"
    text += f", {table.loss_tokens.sum():,} of them carry loss"
    if packing:
        text += f", in {pluralize(len(rows_of(table, block_size, packing=True)), 'sequence')} of {block_size}"
    if table.num_truncated:
        text += f"; {table.num_truncated:,} truncated at {block_size} tokens (--block-size)"
    if table.num_empty:
        text += f"; {table.num_empty:,} left out, of which nothing carries loss"
    return text


def _make_verbs(folder: Path) -> None:
    from evener.corpus.verbs import make_verb_corpus

    print_status(f"no text was named: training on generated English sentences, {folder}; evener train FILE: on yours")
    splits, files = make_verb_corpus(seed=0, num=100_000, val_fraction=0.1)
    with show_progress() as progress:
        prepare(folder, splits, tokenizer="char", extra=files, progress=progress)


def _check_exists(path: str) -> None:
    if not path:
        raise UsageError("an empty name: which text?", hint="evener train FILE; . is this folder")
    if path != STDIN and not Path(path).exists():
        raise UsageError(f"{path}: no such file or folder", hint=hint_for_missing(Path(path)))
