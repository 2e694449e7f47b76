"""`evener data`: prepare a corpus from generated or given text, and tokenize it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evener.cli.help import CliApp

if TYPE_CHECKING:
    from evener.corpus.documents import ProgressCallback
    from evener.corpus.prepare_corpus import PreparedCorpus

app = CliApp(help="Prepare a corpus: text in, a folder with train.bin, val.bin, meta.json and tokenizer.json out.")

COLUMN_HELP = "column of tables that holds the text [text]"
TOKENIZER_HELP = "bpe is trained on this text; FILE: a tokenizer.json, or the folder of a model with one"
Tokenizer = Annotated[str, typer.Option(metavar="byte|char|bpe|gpt2|FILE", help=TOKENIZER_HELP)]
VocabSize = Annotated[int | None, typer.Option(help="size of bpe's vocabulary [8192]")]
ValFraction = Annotated[float, typer.Option(help="share of the text for validation")]
Force = Annotated[bool, typer.Option("--force", help="prepare again, replacing another corpus in the folder")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]

_LINE_INTERVAL_S = 5.0


@app.command(epilog="evener data verbs --sentences 20000 --out data/verbs-small")
def verbs(
    out: Annotated[Path, typer.Option(help="folder to make")] = Path("data/verbs"),
    sentences: Annotated[int, typer.Option(help="how many sentences, all distinct")] = 100_000,
    seed: Annotated[int, typer.Option(help="another seed draws other sentences")] = 0,
    val_fraction: ValFraction = 0.1,
    tokenizer: Tokenizer = "char",
    vocab_size: VocabSize = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """English verbs in every person, tense, aspect, voice, polarity and question: generated, no download.

    Also writes train.jsonl and val.jsonl (one sentence a line, with its grammar). No sentence is in both.
    """
    from evener.corpus.prepare_corpus import prepare
    from evener.corpus.verbs import make_verb_corpus

    splits, files = make_verb_corpus(seed, sentences, val_fraction)
    with show_progress() as progress:
        prepared = prepare(
            out, splits, tokenizer=tokenizer, vocab_size=vocab_size, extra=files, force=force, progress=progress
        )
    _print_result(out, prepared, as_json)


@app.command(epilog="evener data python --tokenizer bpe --vocab-size 4096 --out data/python-bpe")
def python(
    out: Annotated[Path, typer.Option(help="folder to make")] = Path("data/python"),
    val_fraction: ValFraction = 0.1,
    tokenizer: Tokenizer = "byte",
    vocab_size: VocabSize = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """The source code of this Python's standard library: 10 to 30 MB of real text that every machine has."""
    from evener.corpus.documents import split_by_fraction
    from evener.corpus.prepare_corpus import prepare
    from evener.corpus.stdlib_source import stdlib_documents

    documents, num_refused = stdlib_documents()
    typer.echo(f"{len(documents)} modules; left out {num_refused} that are not UTF-8", err=True)
    splits = split_by_fraction(documents, val_fraction)
    with show_progress() as progress:
        prepared = prepare(out, splits, tokenizer=tokenizer, vocab_size=vocab_size, force=force, progress=progress)
    _print_result(out, prepared, as_json)


@app.command(epilog="evener data text README.md --out data/readme")
def text(
    paths: Annotated[
        list[Path], typer.Argument(help="texts in UTF-8, .jsonl, .csv and .parquet, folders of them; -: standard input")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="folder to make [data/ and PATH's name; of several data/text]"),
    ] = None,
    val_fraction: ValFraction = 0.1,
    tokenizer: Tokenizer = "byte",
    vocab_size: VocabSize = None,
    column: Annotated[str | None, typer.Option(metavar="NAME", help=COLUMN_HELP)] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Your own text. Folders are searched recursively, without hidden files and files that are not text.

    The last tenth is for validation. Several files are first shuffled by a hash of their names, for a fair sample.
    """
    import tempfile

    from evener.corpus.documents import split_by_fraction
    from evener.corpus.prepare_corpus import prepare
    from evener.corpus.text_sources import find_texts

    folder = out or Path("data") / ((paths[0].resolve().stem if len(paths) == 1 else "") or "text")
    with tempfile.TemporaryDirectory(prefix="evener-text-") as spool:
        skip = lambda place: place.resolve() == folder.resolve()  # noqa: E731
        texts = find_texts(paths, Path(spool), column=column, skip=skip)
        for note in texts.notes():
            typer.echo(note, err=True)
        splits = split_by_fraction(texts.documents, val_fraction)
        with show_progress() as progress:
            prepared = prepare(folder, splits, tokenizer=tokenizer, vocab_size=vocab_size, force=force,
                               progress=progress)  # fmt: skip
    _print_result(folder, prepared, as_json)


def _print_result(out: Path, prepared: PreparedCorpus, as_json: bool) -> None:
    import msgspec

    corpus = prepared.corpus
    if as_json:
        typer.echo(json.dumps({**msgspec.to_builtins(corpus), "written": prepared.was_written}, ensure_ascii=False))
        return
    state = "written" if prepared.was_written else "is up to date, nothing to do"
    typer.echo(
        f"{out} {state}: {corpus.train_tokens:,} tokens to train on, {corpus.val_tokens:,} to validate, "
        f"{corpus.tokenizer} vocabulary of {corpus.vocab_size:,}"
    )


@contextmanager
def show_progress() -> Iterator[ProgressCallback]:
    """Yield a progress callback: on a terminal a bar with rate and end, else a line every five seconds; on stderr."""
    from evener.cli.terminal import make_console

    where = make_console(stderr=True)
    if where.is_interactive:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TaskID,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=where, transient=True) as bars:
            tasks: dict[str, TaskID] = {}

            def show(doing: str, done: int, total: int) -> None:
                if doing not in tasks:
                    tasks[doing] = bars.add_task(doing, total=total)
                bars.update(tasks[doing], completed=done)

            yield show
        return

    now_doing, started, printed_at = "", 0.0, 0.0

    def line(doing: str, done: int, total: int) -> None:
        nonlocal now_doing, started, printed_at
        now = time.monotonic()
        if doing != now_doing:
            now_doing, started, printed_at = doing, now, now
        elif now - printed_at >= _LINE_INTERVAL_S:
            printed_at = now
            rate = done / (now - started)
            typer.echo(
                f"{doing}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {rate / 1e6:.1f} MB/s, "
                f"{(total - done) / rate:.0f} s left",
                err=True,
            )

    yield line
