"""Read the texts that a person names, as documents.

| what is named | its documents |
|---|---|
| a file, - for standard input | its text |
| a folder | each of its text files and tables; hidden files and files that are not text are left out, and counted |
| .jsonl .ndjson .csv .tsv .parquet | a row's text: the column `text`, or --column |
| a folder of Hugging Face datasets, as `save_to_disk` writes it | the same |

A table is never taken for raw text. The texts of its rows, and standard input, are copied into one file of the spool
folder, of which each document is a part: a row is no object in memory. A row ends with a new line, as tokenizers
without an end-of-text token would join it with the next one.
"""

from __future__ import annotations

import codecs
import csv
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from evener.core.base.decoding import json_decoder
from evener.core.base.errors import DataError, UsageError
from evener.core.base.units import join_names, pluralize
from evener.corpus.documents import Document, find_documents

STDIN = "-"
DEFAULT_COLUMN = "text"
PYARROW_HINT = "pip install 'evener[data]'"
_PROBED_BYTES = 65536  # of a file, to see whether it is text
_CSV_FIELD_BYTES = 1 << 30


class NoColumnError(DataError):
    """A table does not have the column."""


class TextSources:
    """The documents that were found, and what was left out."""

    def __init__(self, spool: Path, column: str | None) -> None:
        self.documents: list[Document] = []
        self.num_not_text = 0  # files of folders that are not text
        self.num_without_column = 0  # tables of folders without the column
        self.tables: list[str] = []  # those that were read
        self._spool, self._column = spool, column or DEFAULT_COLUMN
        self._num_spooled = 0

    def add(self, path: Path, *, skip: Callable[[Path], bool]) -> None:
        """Add a file or folder. Raise UsageError or DataError for one that holds no text."""
        if str(path) == STDIN:
            self._spool_texts(STDIN, iter([sys.stdin.buffer.read()]))
        elif path.is_dir() and not _is_dataset(path):
            for document in find_documents([path], skip=skip):
                assert isinstance(document.source, Path)
                self._add_file(document.source, document, is_named=False)
        elif path.is_dir():
            self._add_table(path)
        else:
            for document in find_documents([path], skip=skip):
                self._add_file(path, document, is_named=True)

    def notes(self) -> list[str]:
        """Return what was left out and which columns were read, as sentences."""
        notes = []
        if self.num_not_text:
            notes.append(f"left out {pluralize(self.num_not_text, 'file')} that hold no text in UTF-8")
        if self.num_without_column:
            notes.append(f"left out {pluralize(self.num_without_column, 'table')} without a column {self._column}")
        if self.tables:
            notes.append(f"column {self._column} of {join_names(self.tables)}")
        return notes

    def _add_file(self, path: Path, document: Document, *, is_named: bool) -> None:
        if path.suffix.lower() in _TABLES:
            num_before = len(self.documents)
            try:
                self._add_table(path)
            except NoColumnError:
                if is_named:
                    raise
                del self.documents[num_before:]
                self.num_without_column += 1
        elif is_named or is_text(path):
            self.documents.append(document)
        else:
            self.num_not_text += 1

    def _add_table(self, path: Path) -> None:
        read = _read_dataset if path.is_dir() else _TABLES[path.suffix.lower()]
        self._spool_texts(path.name, (text.encode("utf-8", "surrogatepass") for text in read(path, self._column)))
        self.tables.append(path.name)

    def _spool_texts(self, name: str, texts: Iterator[bytes]) -> None:
        self._num_spooled += 1
        target, offset = self._spool / f"{self._num_spooled}.txt", 0
        with target.open("wb") as file:
            for i, text in enumerate(texts):
                if text:
                    text = text if text.endswith(b"\n") or name == STDIN else text + b"\n"
                    file.write(text)
                    self.documents.append(Document(f"{name}:{i}", len(text), target, offset))
                    offset += len(text)


def is_text(path: Path) -> bool:
    """Return whether a file begins with valid UTF-8 without a zero byte."""
    try:
        with path.open("rb") as file:
            head = file.read(_PROBED_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    try:
        head.decode()
    except UnicodeDecodeError as error:
        # the last character may be cut
        return len(head) == _PROBED_BYTES and error.start > len(head) - 4 and b"\0" not in head
    return b"\0" not in head


def _text_of(row: Any, column: str, where: str) -> str:
    """Return the text of a row. Raise DataError if it has none."""
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object or a text")
    if column not in row:
        raise _no_column(where, column, row)
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: its {column} is no text but {type(text).__name__}", hint="--column NAME: which one?")
    return text


def _no_column(where: str, column: str, columns: Sequence[str] | dict[str, Any]) -> NoColumnError:
    known = join_names(list(map(str, columns)), 8) or "none"
    return NoColumnError(f"{where} has no column {column}; its columns: {known}", hint="--column NAME: which one?")


def _read_jsonl(path: Path, column: str) -> Iterator[str]:
    decoder, has_column = json_decoder(Any), False
    with _opened(path) as file:
        for i, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if i == 1 else line
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(f"{path}, line {i}: not JSON: {error}") from None
            if has_column and isinstance(row, dict) and column not in row:
                continue  # as if it were empty
            yield _text_of(row, column, f"{path}, line {i}")
            has_column = True


def _read_csv(path: Path, column: str) -> Iterator[str]:
    csv.field_size_limit(_CSV_FIELD_BYTES)
    is_tsv, line = path.suffix.lower() == ".tsv", 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t" if is_tsv else ",", strict=not is_tsv)
            if column not in (rows.fieldnames or ()):
                raise _no_column(str(path), column, rows.fieldnames or ())
            for row in rows:
                line = rows.line_num
                if None in row:
                    raise DataError(f"{path}, line {line}: more fields than the first line names",
                                    hint='a text with a comma needs quotes: "…"')  # fmt: skip
                yield row[column] or ""
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except csv.Error as error:
        raise DataError(f"{path}, after line {line}: not a table: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import_pyarrow(path)
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise _no_column(str(path), column, file.schema_arrow.names)
            for batch in file.iter_batches(columns=[column]):
                yield from _texts_of_arrow(batch.column(0), column, path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not Parquet: {error}") from None


def _read_dataset(folder: Path, column: str) -> Iterator[str]:
    """Yield the texts of a datasets folder: of its split `train`, where it has several splits."""
    import_pyarrow(folder)
    import pyarrow

    root = folder / "train" if (folder / "dataset_dict.json").is_file() else folder
    files = sorted(root.glob("*.arrow"))
    if not files:
        raise DataError(f"{root} holds no .arrow file", hint="a folder that datasets' save_to_disk wrote")
    for path in files:
        try:
            with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as reader:
                if column not in reader.schema.names:
                    raise _no_column(str(folder), column, reader.schema.names)
                for batch in reader:
                    yield from _texts_of_arrow(batch.column(column), column, path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not Arrow: {error}") from None


def _texts_of_arrow(values: Any, column: str, path: Path) -> Iterator[str]:
    for text in values.to_pylist():
        yield _text_of({column: text}, column, str(path))


def import_pyarrow(path: Path) -> None:
    """Raise DataError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise DataError(f"{path}: to read it, evener needs pyarrow", hint=PYARROW_HINT) from None


def _is_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


_TABLES: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet,
}  # fmt: skip


def find_texts(
    paths: Sequence[str | os.PathLike[str]], spool: Path, *, column: str | None, skip: Callable[[Path], bool]
) -> TextSources:
    """Return the texts at `paths`. Their rows are spooled into the folder `spool`, which must outlive the documents."""
    sources = TextSources(spool, column)
    for path in map(Path, paths):
        sources.add(path, skip=skip)
    if not sources.documents:
        names = ", ".join(map(str, paths))
        raise DataError(f"no text in {names}: every file is empty, hidden or not text, or there is none")
    if column is not None and not sources.tables:
        raise UsageError(f"--column {column}: no table is among the texts", hint="for .jsonl, .csv, .tsv and .parquet")
    return sources
