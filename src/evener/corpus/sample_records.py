"""Read the chats, prompts with completions, and texts that a person names, as records to fine-tune on.

| a row of .jsonl | its record | what carries loss |
|---|---|---|
| `{"messages": [{"role", "content"}, …]}` | `Chat` | what the assistant says |
| `{"prompt": text, "completion": text}` | `Completion` | the completion |
| `{"text": text}`, or --column; any other file that is text | `Text` | everything |

These are the formats of TRL and of OpenAI's files for fine-tuning. A record is data: a chat template, which comes with
the model, turns it into text elsewhere (`evener.worker.finetune.tokenize_samples`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.decoding import from_builtins, json_decoder
from evener.core.base.errors import DataError
from evener.core.base.file_io import open_file
from evener.corpus.documents import find_documents
from evener.corpus.text_cache import is_no_text
from evener.corpus.text_sources import DEFAULT_COLUMN, is_text

ROWS = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".json")  # never trained on as the text that they are written in
FORMATS_HINT = (
    'a row is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}, '
    '{"prompt": "…", "completion": "…"} or {"text": "…"}'
)


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a chat; whoever adds another key, such as a weight or a call of a tool, means something by it."""

    role: str
    content: str


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation; without definitions of tools, which the template would have to show."""

    messages: list[Message]
    tools: None = None
    functions: None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and how it is to be completed."""

    prompt: str
    completion: str


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text of any length."""

    text: str


Record = Chat | Completion | Text


def read_records(paths: list[Path], column: str | None, model: Path) -> Iterator[tuple[str, Record]]:
    """Yield (where it is, record) of all rows and texts, without folders of evener and that of the model.

    Raise DataError, which names the line, for a malformed one.
    """
    for path in paths:
        for document in find_documents([path], skip=lambda folder: is_no_text(folder, model)):
            file = document.source
            assert isinstance(file, Path)
            if file.suffix.lower() in ROWS:
                yield from _read_rows(file, column or DEFAULT_COLUMN)
            elif file.suffix.lower() in TABLES:
                raise DataError(f"{file}: rows to fine-tune on are read from .jsonl", hint=FORMATS_HINT)
            elif is_text(file):
                yield str(file), Text(text=_read_text(file))
            elif file == path:
                raise DataError(f"{file}: neither .jsonl nor text in UTF-8", hint=FORMATS_HINT)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not text in UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from None


def _read_rows(path: Path, column: str) -> Iterator[tuple[str, Record]]:
    decoder = json_decoder(Any)
    try:
        with open_file(path) as file:
            for number, line in enumerate(file, 1):
                row_bytes = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not row_bytes.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = decoder.decode(row_bytes)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise DataError(f"{where}: not JSON: {error}") from None
                yield where, _to_record(row, column, where)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _to_record(row: Any, column: str, where: str) -> Record:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object", hint=FORMATS_HINT)
    try:
        if "messages" in row:
            return from_builtins(row, Chat)
        if "prompt" in row and "completion" in row:
            return from_builtins(row, Completion)
        if column in row:
            return from_builtins({"text": row[column]}, Text)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: {error}", hint=FORMATS_HINT) from None
    keys = ", ".join(map(str, row)) or "none"
    raise DataError(f"{where}: neither messages, nor prompt and completion, nor {column}; its keys: {keys}",
                    hint=FORMATS_HINT)  # fmt: skip
