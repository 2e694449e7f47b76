"""Which text goes into a corpus, in what order, and which part of it validates?

A corpus is a list of documents (files, or text made in memory), cut into two splits. Two rules make the result the same
on every machine that holds the same files:

- The documents are taken in the order of the SHA-256 of their names. That is as good as random, so the validation split
  of a folder is not merely what sorts last in it.
- Of the bytes in that order, the last `val_fraction` validate. At most one document lies in both splits, cut in two.
  For a single file this is nanoGPT's split: the first 90 % train, the rest validates.

Text is UTF-8, strictly: what is not is an error with the file and the byte, never a replacement character.
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

from evener.core.errors import DataError, UsageError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text: `name` is what it is called inside the corpus, whatever the machine."""

    name: str
    size_bytes: int
    source: Path | bytes

    def __str__(self) -> str:
        return str(self.source) if isinstance(self.source, Path) else self.name

    def open(self) -> BinaryIO:
        return self.source.open("rb") if isinstance(self.source, Path) else io.BytesIO(self.source)


@dataclass(frozen=True)
class Part:
    """The bytes `start` to `stop` of a document; both lie between characters."""

    document: Document
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def is_ending(self) -> bool:
        """Whether the document ends here."""
        return self.stop == self.document.size_bytes


@dataclass(frozen=True)
class Splits:
    train: tuple[Part, ...]
    val: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.train + self.val)

    @property
    def num_documents(self) -> int:
        return len({id(part.document) for part in self.train + self.val})


@dataclass(frozen=True)
class Survey:
    """What one reading of all the text tells."""

    source_hash: str
    chars: str
    """Every character that occurs, sorted; empty where it was not asked for."""


def whole(document: Document) -> Part:
    return Part(document, 0, document.size_bytes)


def find_files(paths: Sequence[str | os.PathLike[str]], *, skip: Callable[[Path], bool]) -> list[Document]:
    """The files at `paths`; folders are searched through, but for hidden files, empty files and folders to `skip`.

    Raises UsageError for a path that is not there, DataError for a folder that cannot be read.
    """
    found: dict[str, Document] = {}
    for given in map(Path, paths):
        if given.is_dir():
            files = _walk(given, skip)
        elif given.is_file():
            files = iter([given])
        elif given.exists():
            raise UsageError(f"{given} is neither a file nor a folder", hint="save the text in a file first")
        else:
            raise UsageError(f"{given}: no such file or folder")
        for file in files:
            name = file.relative_to(given).as_posix() if file != given else file.name
            try:
                size_bytes = file.stat().st_size
            except OSError as error:
                raise DataError(f"{file}: {error.strerror}") from None
            if size_bytes:
                found.setdefault(os.path.realpath(file), Document(name, size_bytes, file))
    return list(found.values())


def _walk(folder: Path, skip: Callable[[Path], bool]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}")

    for place, subfolders, names in os.walk(folder, onerror=refuse):
        here = Path(place)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and not skip(here / name))
        for name in sorted(names):
            path = here / name
            if not name.startswith(".") and path.exists() and stat.S_ISREG(path.stat().st_mode):
                yield path


def split_by_fraction(documents: Iterable[Document], val_fraction: float) -> Splits:
    """Train on the first bytes, validate on the last `val_fraction`, documents in the order of their hashed names."""
    if not 0 < val_fraction < 1:
        raise UsageError(
            f"--val-fraction {val_fraction:g} is not between 0 and 1", hint="for example: --val-fraction 0.1"
        )
    ordered = sorted(documents, key=lambda document: hashlib.sha256(os.fsencode(document.name)).digest())
    left = int(sum(document.size_bytes for document in ordered) * (1 - val_fraction))
    train: list[Part] = []
    val: list[Part] = []
    for document in ordered:
        cut = min(left, document.size_bytes)
        left -= cut
        if 0 < cut < document.size_bytes:
            cut = _character_start(document, cut)
        if cut > 0:
            train.append(Part(document, 0, cut))
        if cut < document.size_bytes:
            val.append(Part(document, cut, document.size_bytes))
    return Splits(tuple(train), tuple(val))


def _character_start(document: Document, position: int) -> int:
    """The first byte at or after `position` that begins a character."""
    try:
        with document.open() as file:
            file.seek(position)
            following = file.read(4)
    except OSError as error:
        raise DataError(f"{document}: {error.strerror}") from None
    continuing = 0
    while continuing < len(following) and following[continuing] & 0xC0 == 0x80:
        continuing += 1
    return position + continuing


def read_bytes(part: Part) -> Iterator[bytes]:
    """The bytes of a part in blocks of a megabyte; DataError if the file is no longer as long as it was."""
    left = part.num_bytes
    try:
        with part.document.open() as file:
            file.seek(part.start)
            while left and (block := file.read(min(left, _READ_BYTES))):
                left -= len(block)
                yield block
    except OSError as error:
        raise DataError(f"{part.document}: {error.strerror}") from None
    if left:
        raise DataError(
            f"{part.document} became shorter while it was read", hint="run it again when the file is complete"
        )


def read_text(part: Part) -> Iterator[str]:
    """The text of a part, a piece for each megabyte; DataError names the file and the byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    position = part.start
    for block in read_bytes(part):
        pending = len(decoder.getstate()[0])
        yield _decode(decoder, block, part, position - pending)
        position += len(block)
    pending = len(decoder.getstate()[0])
    _decode(decoder, b"", part, position - pending)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, part: Part, position: int) -> str:
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{part.document} is not UTF-8: {error.reason} at byte {position + error.start}",
            hint="convert it (iconv -f latin1 -t utf-8 OLD > NEW), or name only the text files",
        ) from None


def survey(splits: Splits, *, want_chars: bool, progress: Progress) -> Survey:
    """Read all the text once: check that it is UTF-8, hash it, and collect its characters if wanted."""
    done, total = 0, splits.num_bytes
    digest = hashlib.sha256()
    chars: set[str] = set()
    for split, parts in (("train", splits.train), ("val", splits.val)):
        for part in parts:
            digest.update(f"{split} {part.num_bytes} {part.document.name}\n".encode("utf-8", "surrogateescape"))
            for text in read_text(part):
                content = text.encode()
                digest.update(content)
                if want_chars:
                    chars.update(text)
                done += len(content)
                progress("reading", done, total)
    return Survey(f"sha256:{digest.hexdigest()}", "".join(sorted(chars)))
