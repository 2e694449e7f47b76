"""Find the documents of a corpus, order them and split them into training and validation text.

A corpus is a list of documents (files, or text made in memory), cut into two splits. Two rules make the result the same
on every machine that holds the same files:

- Documents are ordered by the SHA-256 of their names. That is as good as random, so the validation split of a folder is
  not simply the files that sort last.
- Of the bytes in that order, the last `val_fraction` are for validation. At most one document lies in both splits, cut
  in two. For a single file this is nanoGPT's split: the first 90 % for training, the rest for validation.

Text must be valid UTF-8: anything else is an error with the file and the byte, never a replacement character.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from evener.core.base.errors import DataError, UsageError

ProgressCallback = Callable[[str, int, int], None]
"""Called with the name of the phase, the bytes done and the bytes in all."""

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text; `name` is its name in the corpus, the same on every machine."""

    name: str
    size_bytes: int
    source: Path | bytes
    offset: int = 0
    """Of its first byte in the source, which may hold several documents."""

    def __str__(self) -> str:
        return str(self.source) if isinstance(self.source, Path) else self.name

    def open_at(self, position: int) -> BinaryIO:
        """Return an open file whose next byte is this one of the document."""
        file = self.source.open("rb") if isinstance(self.source, Path) else io.BytesIO(self.source)
        file.seek(self.offset + position)
        return file


@dataclass(frozen=True)
class DocumentSlice:
    """The bytes `start` to `stop` of a document; both are character boundaries."""

    document: Document
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def ends_document(self) -> bool:
        """Return whether the document ends with this slice."""
        return self.stop == self.document.size_bytes


@dataclass(frozen=True)
class CorpusSplits:
    train: tuple[DocumentSlice, ...]
    val: tuple[DocumentSlice, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.train + self.val)

    @property
    def num_documents(self) -> int:
        return len({id(part.document) for part in self.train + self.val})


@dataclass(frozen=True)
class TextScan:
    """The result of reading all text once."""

    source_hash: str
    chars: str
    """Every character that occurs, sorted; empty if they were not collected."""


def whole_document(document: Document) -> DocumentSlice:
    return DocumentSlice(document, 0, document.size_bytes)


def find_documents(paths: Sequence[str | os.PathLike[str]], *, skip: Callable[[Path], bool]) -> list[Document]:
    """Return the files at `paths`, searching folders except for hidden files, empty files and folders to `skip`.

    Raise UsageError for a missing path, DataError for a folder that cannot be read.
    """
    documents: dict[str, Document] = {}
    for root in map(Path, paths):
        if root.is_dir():
            files = _walk(root, skip)
        elif root.is_file():
            files = iter([root])
        elif root.exists():
            raise UsageError(f"{root} is neither a file nor a folder", hint="save the text in a file first")
        else:
            raise UsageError(f"{root}: no such file or folder")
        for file in files:
            name = file.relative_to(root).as_posix() if file != root else file.name
            try:
                size_bytes = file.stat().st_size
            except OSError as error:
                raise DataError(f"{file}: {error.strerror}") from None
            if size_bytes:
                documents.setdefault(os.path.realpath(file), Document(name, size_bytes, file))
    return list(documents.values())


def _walk(folder: Path, skip: Callable[[Path], bool]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}")

    for dirpath, subfolders, names in os.walk(folder, onerror=refuse):
        parent = Path(dirpath)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and not skip(parent / name))
        for name in sorted(names):
            path = parent / name
            if not name.startswith(".") and path.exists() and stat.S_ISREG(path.stat().st_mode):
                yield path


def split_by_fraction(documents: Iterable[Document], val_fraction: float) -> CorpusSplits:
    """Split documents, in the order of their hashed names: the last `val_fraction` of the bytes for validation."""
    if not 0 < val_fraction < 1:
        raise UsageError(
            f"--val-fraction {val_fraction:g} is not between 0 and 1", hint="for example: --val-fraction 0.1"
        )
    ordered = sorted(documents, key=lambda document: hashlib.sha256(os.fsencode(document.name)).digest())
    remaining = int(sum(document.size_bytes for document in ordered) * (1 - val_fraction))
    train: list[DocumentSlice] = []
    val: list[DocumentSlice] = []
    for document in ordered:
        cut = min(remaining, document.size_bytes)
        remaining -= cut
        if 0 < cut < document.size_bytes:
            cut = _character_start(document, cut)
        if cut > 0:
            train.append(DocumentSlice(document, 0, cut))
        if cut < document.size_bytes:
            val.append(DocumentSlice(document, cut, document.size_bytes))
    return CorpusSplits(tuple(train), tuple(val))


def _character_start(document: Document, position: int) -> int:
    """Return the position of the first byte at or after `position` that begins a character."""
    try:
        with document.open_at(position) as file:
            following = file.read(min(4, document.size_bytes - position))
    except OSError as error:
        raise DataError(f"{document}: {error.strerror}") from None
    continuing = 0
    while continuing < len(following) and following[continuing] & 0xC0 == 0x80:
        continuing += 1
    return position + continuing


def read_bytes(part: DocumentSlice) -> Iterator[bytes]:
    """Yield the bytes of a slice in blocks of a megabyte. Raise DataError if the file has become shorter."""
    remaining = part.num_bytes
    try:
        with part.document.open_at(part.start) as file:
            while remaining and (block := file.read(min(remaining, _READ_BYTES))):
                remaining -= len(block)
                yield block
    except OSError as error:
        raise DataError(f"{part.document}: {error.strerror}") from None
    if remaining:
        raise DataError(
            f"{part.document} became shorter while it was read", hint="run it again when the file is complete"
        )


def read_text(part: DocumentSlice) -> Iterator[str]:
    """Yield the text of a slice, a megabyte at a time. Raise DataError with the file and the byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    position = part.start
    for block in read_bytes(part):
        pending = len(decoder.getstate()[0])
        yield _decode(decoder, block, part, position - pending)
        position += len(block)
    pending = len(decoder.getstate()[0])
    _decode(decoder, b"", part, position - pending)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, part: DocumentSlice, position: int) -> str:
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{part.document} is not UTF-8: {error.reason} at byte {position + error.start}",
            hint="convert it (iconv -f latin1 -t utf-8 OLD > NEW), or name only the text files",
        ) from None


def scan_text(splits: CorpusSplits, *, collect_chars: bool, progress: ProgressCallback) -> TextScan:
    """Read all text once: check that it is UTF-8, hash it, and collect its characters if `collect_chars`."""
    done, total = 0, splits.num_bytes
    digest = hashlib.sha256()
    chars: set[str] = set()
    for split, parts in (("train", splits.train), ("val", splits.val)):
        for part in parts:
            digest.update(f"{split} {part.num_bytes} {part.document.name}\n".encode("utf-8", "surrogateescape"))
            for text in read_text(part):
                content = text.encode()
                digest.update(content)
                if collect_chars:
                    chars.update(text)
                done += len(content)
                progress("reading", done, total)
    return TextScan(f"sha256:{digest.hexdigest()}", "".join(sorted(chars)))
