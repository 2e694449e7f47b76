"""Prepare a corpus folder from text, atomically: the folder is either complete or absent.

The folder is built next to its final path, as `.NAME.partial`, synced to the disk and renamed. The process that builds
it holds a lock on the partial folder; one without a lock was left by a killed run and is emptied by the next.
`load_corpus` refuses partial folders by their name.

The text is read twice (three times for bpe): first to check, hash and scan all of it, so that bad input is detected
before anything is written and an unchanged corpus is recognised; then to encode it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.errors import DataError, UsageError
from evener.core.base.file_io import fsync_path, make_folder, read_file, rename_durably
from evener.core.model.corpus import (
    CORPUS_FORMAT,
    MIN_SPLIT_TOKENS,
    PARTIAL_SUFFIX,
    Corpus,
    CorpusMeta,
    hash_bytes,
    join_digests,
    load_corpus,
    token_dtype,
)
from evener.corpus.documents import CorpusSplits, DocumentSlice, ProgressCallback, read_text, scan_text
from evener.corpus.tokenizer import (
    BPE_VOCAB_SIZE,
    ByteTokenizer,
    CharTokenizer,
    Gpt2Tokenizer,
    Tokenizer,
    check_keeps_letters,
    check_tokenizer_options,
    encode_documents,
    load_tokenizer_file,
    read_tokenizer_file,
    tokenizer_identity,
    train_bpe,
)

_CORPUS_FILES = {"train.bin", "val.bin", "meta.json", "tokenizer.json", "train.jsonl", "val.jsonl"}
SAMPLE_CHARS = 100_000  # of the text, on which a tokenizer from a file is tried
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class BeingPreparedError(DataError):
    """Raised when another process prepares the same folder."""


@dataclass(frozen=True)
class PreparedCorpus:
    corpus: Corpus
    was_written: bool
    """False if the folder already held this corpus."""


def prepare(
    out: Path,
    splits: CorpusSplits,
    *,
    tokenizer: str,
    vocab_size: int | None = None,
    extra: Mapping[str, bytes] | None = None,
    force: bool = False,
    progress: ProgressCallback = lambda doing, done, total: None,
) -> PreparedCorpus:
    """Write the corpus folder `out` from `splits`, with additional files `extra`, unless it already is this corpus.

    `tokenizer` is one of TOKENIZERS or the path of a tokenizer.json; `vocab_size` is only for bpe. `force` replaces
    another corpus, but never touches a folder with files that evener did not write. Raise DataError or UsageError, and
    leave `out` unchanged then.
    """
    extra = extra or {}
    check_tokenizer_options(tokenizer, vocab_size)
    _check_out(out)
    for name, parts in (("training", splits.train), ("validation", splits.val)):
        if not parts:
            raise DataError(f"there is no text for the {name} split of {out}", hint="give more text")
    if tokenizer == "gpt2":
        Gpt2Tokenizer()  # before the long work: its vocabulary may be missing
    if tokenizer == "bpe" and vocab_size is None:
        vocab_size = BPE_VOCAB_SIZE
    description = read_tokenizer_file(tokenizer)
    ready = None if description is None else load_tokenizer_file(tokenizer, description)
    if ready is not None:
        check_keeps_letters(tokenizer, ready, next(read_text(splits.train[0]), "")[:SAMPLE_CHARS])

    scan = scan_text(splits, collect_chars=tokenizer == "char", progress=progress)
    recipe: dict[str, str | int] = {"text": scan.source_hash, "tokenizer": tokenizer_identity(tokenizer),
                                    "vocab_size": vocab_size or 0}  # fmt: skip
    recipe |= {name: hash_bytes(content) for name, content in extra.items()}
    if not force and (existing := _load_existing(out, recipe, extra)):
        _remove_stale(out)
        return PreparedCorpus(existing, was_written=False)

    with build_folder(out, may_replace=force or _is_nonempty(out)) as partial:
        engine = ready or _make_tokenizer(tokenizer, vocab_size, scan.chars, splits, progress)
        _write_files(partial, out, splits, engine, recipe, extra, progress)
    return PreparedCorpus(load_corpus(out), was_written=True)


def _check_out(out: Path) -> None:
    """Raise UsageError if `out` is a file or holds files that are not part of a corpus."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", hint="name another folder with --out")
    try:
        foreign = sorted(set(os.listdir(out)) - _CORPUS_FILES) if out.exists() else []
    except OSError as error:
        raise DataError(f"{out}: {error.strerror}") from None
    if foreign:
        raise UsageError(
            f"{out} holds files that are not part of a corpus, such as {foreign[0]}",
            hint="name another folder with --out",
        )


def _load_existing(out: Path, recipe: dict[str, str | int], extra: Mapping[str, bytes]) -> Corpus | None:
    """Return the corpus at `out` if `recipe` makes it; None if there is none, or a damaged one of the same recipe.

    Raise UsageError for another corpus.
    """
    if not _is_nonempty(out):
        return None
    try:
        meta = from_json(read_file(out / "meta.json"), CorpusMeta)
    except (OSError, msgspec.DecodeError):
        meta = None
    if meta is None or meta.recipe != recipe:
        raise UsageError(
            f"{out} already holds another corpus", hint="replace it with --force, or name another folder with --out"
        )
    try:
        corpus = load_corpus(out)
    except DataError:
        return None
    return corpus if all((out / name).exists() for name in extra) else None


def _make_tokenizer(
    kind: str, vocab_size: int | None, chars: str, splits: CorpusSplits, progress: ProgressCallback
) -> Tokenizer:
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        return CharTokenizer(chars)
    if kind == "gpt2":
        return Gpt2Tokenizer()
    text_bytes = sum(part.num_bytes for part in splits.train)
    texts = chain.from_iterable(map(read_text, splits.train))
    return train_bpe(
        _with_progress(texts, "training bpe on a sample", text_bytes, progress), text_bytes, vocab_size or 0
    )


def _with_progress(texts: Iterator[str], doing: str, total: int, progress: ProgressCallback) -> Iterator[str]:
    done = 0
    for text in texts:
        yield text
        done += len(text.encode())
        progress(doing, done, total)


def _is_nonempty(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _partial_path(out: Path) -> Path:
    real = Path(os.path.realpath(out))
    return real.with_name(f".{real.name}{PARTIAL_SUFFIX}")


@contextlib.contextmanager
def build_folder(out: Path, *, may_replace: bool) -> Iterator[Path]:
    """Yield a locked, empty folder next to `out` that replaces `out` at the end, or is removed on any failure."""
    partial = _partial_path(out)
    created = [folder for folder in partial.parents if not folder.exists()]
    try:
        make_folder(partial.parent)
        lock = _lock(partial, out)
        try:
            _empty_folder(partial)
            yield partial
            fsync_path(partial)
            if _is_nonempty(out) and not may_replace:
                raise BeingPreparedError(f"another run has just prepared {out}", hint="run it again")
            _replace_folder(partial, Path(os.path.realpath(out)))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in created:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        finally:
            os.close(lock)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DataError(
                f"cannot write {out}: no space left on the disk ({_free_mb(partial)} MB free)",
                hint="make room, or put it on another disk with --out",
            ) from None
        raise DataError(f"cannot write {out}: {error.strerror}", hint="name another folder with --out") from None


def _lock(partial: Path, out: Path) -> int:
    """Return an open, locked descriptor of the folder `partial`, which is created if missing.

    Another run may rename or remove the folder between our open and our lock. Then the descriptor is of a folder that
    is no longer at this path, and we retry. A link in its place is removed: what it leads to must not be emptied.
    """
    while True:
        if partial.is_symlink():
            partial.unlink()
        partial.mkdir(exist_ok=True)
        try:
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(partial)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            raise BeingPreparedError(
                f"{out} is being prepared by another process", hint="wait until it is done"
            ) from None
        os.close(descriptor)


def wait_until_unlocked(out: Path) -> None:
    """Return when no other process prepares the folder `out`."""
    with contextlib.suppress(OSError):  # it is done: the partial folder is renamed or removed
        descriptor = os.open(_partial_path(out), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)


def _remove_stale(out: Path) -> None:
    """Remove a partial folder that a killed run left next to `out`, unless a live process holds its lock."""
    partial = _partial_path(out)
    if partial.exists():
        with contextlib.suppress(OSError, DataError):
            lock = _lock(partial, out)
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)


def _empty_folder(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.unlink()


def _replace_folder(partial: Path, real: Path) -> None:
    """Rename `partial` to `real`; an existing corpus is moved aside first and then removed."""
    aside = real.with_name(f".{real.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if _is_nonempty(real):
        os.rename(real, aside)
    rename_durably(partial, real)
    shutil.rmtree(aside, ignore_errors=True)


def _free_mb(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free // 1_000_000


def _write_files(
    partial: Path,
    out: Path,
    splits: CorpusSplits,
    tokenizer: Tokenizer,
    recipe: dict[str, str | int],
    extra: Mapping[str, bytes],
    progress: ProgressCallback,
) -> None:
    """Write all files of the corpus into `partial` and sync each of them."""
    dtype = token_dtype(tokenizer.vocab_size)
    done = 0

    def text_of(part: DocumentSlice) -> Iterator[str]:
        nonlocal done
        for text in read_text(part):
            yield text
            done += len(text.encode())
            progress("encoding", done, splits.num_bytes)

    counts, digests = {}, {}
    for split, parts in (("train", splits.train), ("val", splits.val)):
        digest = hashlib.sha256()
        num_tokens = 0
        with (partial / f"{split}.bin").open("wb") as file:
            for ids in encode_documents(tokenizer, ((text_of(part), part.ends_document) for part in parts)):
                content = ids.astype(f"<{ids.dtype.kind}{ids.dtype.itemsize}", copy=False).tobytes()
                digest.update(content)
                file.write(content)
                num_tokens += ids.size
            file.flush()
            os.fsync(file.fileno())
        if num_tokens < MIN_SPLIT_TOKENS:
            raise DataError(
                f"the text is too short for {out}: its {split} split has {num_tokens} tokens, fewer than "
                f"{MIN_SPLIT_TOKENS}",
                hint="give more text, or a larger --val-fraction",
            )
        counts[split], digests[split] = num_tokens, digest.digest()

    description = tokenizer.serialize()
    meta = CorpusMeta(
        format=CORPUS_FORMAT,
        name=out.absolute().name,
        tokenizer=tokenizer.kind,  # type: ignore[arg-type]
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        train_tokens=counts["train"],
        val_tokens=counts["val"],
        content_hash=join_digests(digests["train"], digests["val"]),
        tokenizer_hash=hash_bytes(description),
        num_documents=splits.num_documents,
        text_bytes=splits.num_bytes,
        recipe=recipe,
    )
    encoded_meta = msgspec.json.format(msgspec.json.encode(meta), indent=2) + b"\n"
    for name, content in {**extra, "tokenizer.json": description, "meta.json": encoded_meta}.items():
        with (partial / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
