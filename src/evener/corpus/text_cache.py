"""Prepare texts once, and find them prepared the next time.

A corpus lies in the cache under a name made of the text's own name and a hash of its content and of its tokenizer:
`~/.cache/evener/corpora/my-3fa94c1b`. A changed text is another corpus. Nothing is removed by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evener.core.base.errors import DataError
from evener.core.base.file_io import file_digest, make_folder
from evener.core.model.corpus import Corpus, hash_bytes
from evener.core.model.pretrained import TOKENIZER_FILES
from evener.corpus.documents import ProgressCallback, find_documents, scan_text, split_by_fraction
from evener.corpus.prepare_corpus import BeingPreparedError, prepare, wait_until_unlocked
from evener.corpus.text_sources import STDIN, find_texts
from evener.corpus.tokenizer import check_tokenizer_options, tokenizer_identity

VAL_FRACTION = 0.1
SAMPLES_FORMAT = 1  # grows when the same files give other samples
# Characters, or bytes, up to this size of text: a BPE vocabulary needs more text than that. *Assumption*
SMALL_TEXT_BYTES = 4_000_000
MAX_CHARS = 256  # a text with more different characters takes bytes
BPE_BYTES_PER_TOKEN = 4_000  # text per entry of a BPE vocabulary: *assumption*; 4096 for Python's library of 28 MB
MIN_BPE_SIZE, MAX_BPE_SIZE = 1024, 32768


@dataclass(frozen=True)
class CachedCorpus:
    """A corpus in the cache."""

    folder: Path
    corpus: Corpus
    was_written: bool
    num_text_bytes: int
    tokenizer_was_chosen: bool  # by `choose_tokenizer`
    notes: list[str]  # what was left out, and which columns were read


def cache_folder() -> Path:
    """Return the folder of all cached corpora."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evener" / "corpora"


def choose_tokenizer(num_bytes: int, num_chars: int) -> tuple[str, int | None]:
    """Return (tokenizer, size of a BPE vocabulary or None) for a text of so many bytes and different characters.

    >>> choose_tokenizer(1_100_000, 65), choose_tokenizer(1_000_000, 3000), choose_tokenizer(28_000_000, 200)
    (('char', None), ('byte', None), ('bpe', 4096))
    """
    if num_bytes < SMALL_TEXT_BYTES:
        return ("char" if num_chars <= MAX_CHARS else "byte"), None
    size = 1 << (num_bytes // BPE_BYTES_PER_TOKEN).bit_length() - 1
    return "bpe", min(max(size, MIN_BPE_SIZE), MAX_BPE_SIZE)


def prepare_texts(
    paths: Sequence[str | os.PathLike[str]],
    *,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    column: str | None = None,
    progress: ProgressCallback = lambda doing, done, total: None,
) -> CachedCorpus:
    """Return the corpus of these texts from the cache, after it was prepared if it is not there.

    Without a tokenizer, `choose_tokenizer` chooses one. Raise UsageError or DataError.
    """
    if tokenizer is not None:
        check_tokenizer_options(tokenizer, vocab_size)
    elif vocab_size is not None:
        tokenizer = "bpe"
    root = cache_folder()
    with _writable(root), tempfile.TemporaryDirectory(prefix=".spool-", dir=root) as spool:
        texts = find_texts(paths, Path(spool), column=column, skip=_is_of_evener)
        splits = split_by_fraction(texts.documents, VAL_FRACTION)
        scan = scan_text(splits, collect_chars=True, progress=progress)
        is_chosen = tokenizer is None
        if tokenizer is None:
            tokenizer, vocab_size = choose_tokenizer(splits.num_bytes, len(scan.chars))
        identity = tokenizer_identity(tokenizer)
        key = hash_bytes(f"{scan.source_hash} {identity} {vocab_size}".encode()).partition(":")[2][:8]
        folder = root / f"{_name(paths)}-{key}"
        found = None
        while found is None:
            try:
                found = prepare(folder, splits, tokenizer=tokenizer, vocab_size=vocab_size, progress=progress)
            except BeingPreparedError:  # the same text, by another process: its folder is as good
                progress("another process prepares this text", 0, splits.num_bytes)
                wait_until_unlocked(folder)
    return CachedCorpus(folder, found.corpus, found.was_written, splits.num_bytes, is_chosen, texts.notes())


def samples_folder(paths: Sequence[str | os.PathLike[str]], column: str | None, model: Path) -> Path:
    """Return the cached folder of these chats and texts in a pretrained model's tokens; it may not exist yet."""
    digest = hashlib.sha256(f"{SAMPLES_FORMAT} {column}".encode())
    documents = find_documents(paths, skip=lambda folder: is_no_text(folder, model))
    for file in [*(document.source for document in documents), *(model / name for name in TOKENIZER_FILES)]:
        assert isinstance(file, Path)
        if file.is_file():
            digest.update(file_digest(file).encode())
    root = cache_folder()
    with _writable(root):
        return root / f"{_name(paths)}-{digest.hexdigest()[:8]}"


@contextlib.contextmanager
def _writable(root: Path) -> Iterator[None]:
    """Make the cache; raise DataError for what its disk refuses."""
    try:
        make_folder(root)
        yield
    except OSError as error:
        hint = "XDG_CACHE_HOME=FOLDER before the command puts it elsewhere"
        raise DataError(f"cannot write {root}: {error.strerror}", hint=hint) from None


def _is_of_evener(folder: Path) -> bool:
    """Return whether a folder is the cache, a prepared corpus or a run: its files are not the person's texts."""
    is_cache = folder.resolve() == cache_folder().resolve()
    is_run = (folder / "manifest.json").is_file() and (folder / "events.jsonl").is_file()
    return is_cache or is_run or is_prepared(folder)


def is_no_text(folder: Path, model: Path) -> bool:
    """Return whether a folder is the model's, or one of evener's."""
    return folder.resolve() == model.resolve() or _is_of_evener(folder)


def is_prepared(folder: Path) -> bool:
    """Return whether a folder is a corpus that `evener data` or nanoGPT prepared."""
    has_meta = (folder / "meta.json").is_file() and (folder / "tokenizer.json").is_file()
    return has_meta or (folder / "train.bin").is_file()


def _name(paths: Sequence[str | os.PathLike[str]]) -> str:
    first = "stdin" if str(paths[0]) == STDIN else Path(paths[0]).resolve().stem
    return re.sub(r"[^\w.-]+", "-", first).strip("-.")[:40] or "text"
