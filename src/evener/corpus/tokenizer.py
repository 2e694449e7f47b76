"""Tokenizers: encode text as token ids, and decode ids as text.

| tokenizer | its vocabulary | for |
|---|---|---|
| byte | the 256 bytes of UTF-8 | any text; nothing to train |
| char | the characters of the corpus, sorted | small corpora of one script, as nanoGPT's shakespeare_char |
| bpe | trained on the corpus, byte-level, GPT-2's word boundaries | larger corpora |
| gpt2 | GPT-2's 50,257 tokens, by tiktoken | comparison with GPT-2, its weights |
| FILE | that of a tokenizer.json, as the `tokenizers` library and Hugging Face's models have | a model of those |

bpe, gpt2 and most files end every document with an end-of-text token; byte and char have none, and their documents are
concatenated. "<|endoftext|>" in a text stays text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evener.core.base.errors import DataError, UsageError, did_you_mean
from evener.core.base.file_io import read_file
from evener.core.model.corpus import (
    GPT2_VOCAB_SIZE,
    TOKENIZER_FILES,
    TOKENIZERS,
    Corpus,
    describe_tokenizer,
    hash_bytes,
    read_nanogpt_chars,
    token_dtype,
)

BPE_VOCAB_SIZE = 8192
_END_OF_TEXT = "<|endoftext|>"
# GPT-2's, Llama 3's, Llama 2's, Gemma's, BERT's
_ENDS_OF_TEXT = (_END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_MAX_LOST_SHARE = 0.05  # of the letters of a text that a tokenizer from a file may drop: normalizers drop accents
_MIN_BPE_VOCAB_SIZE = 257  # the bytes and end of text
_SAMPLE_BYTES, _SAMPLE_CHARS, _DISTINCT_WORD_BYTES = 16_000_000, 4096, 2_000_000
_PIECE_CHARS = 16 * 1024
_CONTEXT_CHARS = 256  # at most, before and behind a cut: a token depends on its neighbours only
_MAX_TRIED_CUTS = 16
_BATCH_CHARS = 1 << 20
# Unicode's White_Space, which GPT-2's pattern calls \s. isspace() has four more.
_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))

TokenIds = NDArray[Any]
"""Token ids, in the dtype of the .bin file."""


class Tokenizer(Protocol):
    kind: str
    vocab_size: int
    end_of_text: int | None

    def encode(self, text: str) -> TokenIds:
        """Return the ids of a text. Raise DataError if the vocabulary cannot encode it."""

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the ids of each text, on several cores where that is faster."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, with U+FFFD for invalid UTF-8. Raise DataError for an id beyond the vocabulary."""

    def serialize(self) -> bytes:
        """Return the content of tokenizer.json."""


class ByteTokenizer:
    """A tokenizer with a token for every byte of UTF-8."""

    kind = "byte"
    vocab_size = 256
    end_of_text: int | None = None

    def encode(self, text: str) -> TokenIds:
        return np.frombuffer(_encode_text(text), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(_check_ids(ids, self.vocab_size)).decode("utf-8", errors="replace")

    def serialize(self) -> bytes:
        return describe_tokenizer(self.kind)


class CharTokenizer:
    """A tokenizer with a token for every character, with ids in the order of `chars`."""

    kind = "char"
    end_of_text: int | None = None

    def __init__(self, chars: str) -> None:
        self.chars = chars
        self.vocab_size = len(chars)
        dtype = np.dtype(token_dtype(self.vocab_size))
        codes = _code_points(chars)
        self._known = np.zeros(0x110000, np.bool_)
        self._known[codes] = True
        self._ids = np.zeros(0x110000, dtype)
        self._ids[codes] = np.arange(len(chars), dtype=dtype)

    def encode(self, text: str) -> TokenIds:
        codes = _code_points(text)
        known = self._known[codes]
        if not known.all():
            raise DataError(
                f"the corpus has no character {text[int(np.argmin(known))]!r}: "
                f"its char vocabulary is {_shorten(self.chars)!r}",
                hint="leave it out, or prepare the corpus with --tokenizer byte, which encodes any text",
            )
        return self._ids[codes]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[index] for index in _check_ids(ids, self.vocab_size))

    def serialize(self) -> bytes:
        return describe_tokenizer(self.kind, self.chars)


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library: byte-level BPE trained here, or any other one that a file describes.

    tokenizer.json is in the library's format, which transformers reads too.
    """

    def __init__(self, description: bytes) -> None:
        from tokenizers import Tokenizer as Engine

        try:
            self._engine = Engine.from_str(description.decode())
        except Exception as error:  # the library raises bare Exceptions
            raise DataError(f"not a tokenizer of the `tokenizers` library: {error}") from None
        self._engine.no_truncation()  # a file may have the settings of a model that reads short texts
        self._engine.no_padding()
        self._engine.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        self.kind = type(self._engine.model).__name__.lower()
        vocabulary: dict[str, int] = self._engine.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values(), default=0)
        self.end_of_text_name = next((name for name in _ENDS_OF_TEXT if name in vocabulary), None)
        self.end_of_text = None if self.end_of_text_name is None else vocabulary[self.end_of_text_name]
        self._description = description
        self._dtype = np.dtype(token_dtype(self.vocab_size))

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        for text in texts:
            _encode_text(text)
        try:
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions: of a character without a token
            raise DataError(f"this {self.kind} tokenizer cannot encode the text: {error}",
                            hint="another --tokenizer; bpe and byte encode any text") from None  # fmt: skip
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._engine.decode(_check_ids(ids, self.vocab_size), skip_special_tokens=False))

    def serialize(self) -> bytes:
        return self._description


class Gpt2Tokenizer:
    """GPT-2's tokens, by tiktoken, which fetches the vocabulary once and keeps it in its cache."""

    kind = "gpt2"
    vocab_size = GPT2_VOCAB_SIZE

    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError:
            raise DataError(
                "--tokenizer gpt2 needs tiktoken, which is not installed", hint="pip install 'evener[tiktoken]'"
            ) from None
        try:
            self._engine = tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever the network raises
            raise DataError(
                f"GPT-2's vocabulary is not on this machine and cannot be fetched ({type(error).__name__})",
                hint="once, with internet: python -c 'import tiktoken; tiktoken.get_encoding(\"gpt2\")'; "
                "or take --tokenizer bpe",
            ) from None
        self.end_of_text: int | None = self._engine.eot_token

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        for text in texts:
            _encode_text(text)
        threads = os.cpu_count() or 1
        return [
            np.array(ids, np.uint16) for ids in self._engine.encode_ordinary_batch(list(texts), num_threads=threads)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._engine.decode(_check_ids(ids, self.vocab_size)))

    def serialize(self) -> bytes:
        return describe_tokenizer(self.kind)


def check_tokenizer_options(kind: str, vocab_size: int | None) -> None:
    """Raise UsageError for an unknown tokenizer, or a vocabulary size that it cannot have."""
    if kind not in TOKENIZERS and not Path(kind).exists():
        files = "a tokenizer.json, or the folder of a model that has one, is named by its path"
        raise UsageError(f'--tokenizer "{kind}" is not known', hint=did_you_mean(kind, TOKENIZERS) or files)
    if vocab_size is not None and kind != "bpe":
        raise UsageError(f"--vocab-size is for --tokenizer bpe; {kind} has a vocabulary of its own")
    if vocab_size is not None and vocab_size < _MIN_BPE_VOCAB_SIZE:
        raise UsageError(
            f"--vocab-size {vocab_size} is too small: bpe begins with the 256 bytes and end of text",
            hint=f"for example: --vocab-size {BPE_VOCAB_SIZE}",
        )


def read_tokenizer_file(name: str) -> bytes | None:
    """Return the content of the tokenizer.json at a path, or in a folder; None if `name` is one of TOKENIZERS.

    Raise DataError if there is none.
    """
    if name in TOKENIZERS:
        return None
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        return read_file(path)
    except OSError as error:
        hint = "name a tokenizer.json, as the tokenizers library saves it"
        raise DataError(f"--tokenizer {name}: {path}: {error.strerror}", hint=hint) from None


def tokenizer_identity(name: str) -> str:
    """Return what tells one tokenizer from another: the name, or the hash of the tokenizer.json at a path."""
    description = read_tokenizer_file(name)
    return name if description is None else hash_bytes(description)


def check_keeps_letters(name: str, tokenizer: Tokenizer, sample: str) -> None:
    """Raise DataError if a tokenizer drops letters of a text, as one without a token for them does silently."""
    kept, letters = (sum(map(str.isalnum, text)) for text in (tokenizer.decode(tokenizer.encode(sample)), sample))
    if kept < (1 - _MAX_LOST_SHARE) * letters:
        raise DataError(f"--tokenizer {name}: it drops {1 - kept / letters:.0%} of the letters of this text",
                        hint=f"one made for such text; or one of {', '.join(TOKENIZERS)}")  # fmt: skip


def load_tokenizer_file(name: str, description: bytes) -> LibraryTokenizer:
    """Load the tokenizer that `read_tokenizer_file` has read."""
    try:
        return LibraryTokenizer(description)
    except DataError as error:
        raise DataError(f"--tokenizer {name}: {error}", hint=f"or one of {', '.join(TOKENIZERS)}") from None


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a prepared corpus, a nanoGPT folder, or any folder with a copy of tokenizer.json."""
    root = Path(folder)
    path = root / "tokenizer.json"
    try:
        if not path.exists():
            if (root / "meta.pkl").exists():
                return CharTokenizer(read_nanogpt_chars(root / "meta.pkl"))
            if (root / "train.bin").exists() and not (root / "meta.json").exists():
                return Gpt2Tokenizer()
            raise DataError(f"{path} is missing", hint="copy it from the corpus, or prepare the corpus again")
        content = read_file(path)
        record = json.loads(content)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}", hint="prepare the corpus again") from None
    if not isinstance(record, dict):
        raise DataError(f"{path} is damaged: it is not a JSON object", hint="prepare the corpus again")
    kind = record.get("kind", "bpe")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char" and isinstance(record.get("chars"), str):
        return CharTokenizer(record["chars"])
    if kind == "gpt2":
        return Gpt2Tokenizer()
    if kind == "bpe":
        try:
            return LibraryTokenizer(content)
        except DataError as error:
            raise DataError(f"{path} is damaged: {error}", hint="prepare the corpus again") from None
    raise DataError(f"{path} is damaged: no tokenizer of the kind {kind!r}", hint="prepare the corpus again")


def load_run_tokenizer(run: Path, corpus: Corpus) -> Tokenizer:
    """Load a run's own copy of the tokenizer, which outlives the corpus; else that of the corpus."""
    return load_tokenizer(run if any((run / name).exists() for name in TOKENIZER_FILES) else corpus.path)


def train_bpe(texts: Iterable[str], text_bytes: int, vocab_size: int) -> LibraryTokenizer:
    """Train byte-level BPE on at most 16 MB of `texts`, which have `text_bytes` bytes.

    Of a longer text the sample is every n-th piece of 4,096 characters from its beginning to its end: the same in every
    run. It is thinned further until its distinct words are at most 2 MB, because training's memory grows with them
    (about 100 bytes a byte, *measured* 2026-11-21): English stays below, but Chinese, written without spaces, has a new
    "word" in every clause. A text too small for `vocab_size` gives fewer tokens.
    """
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(_sample(texts, text_bytes), trainer)
    return LibraryTokenizer(engine.to_str().encode())


def encode_documents(tokenizer: Tokenizer, documents: Iterable[tuple[Iterable[str], bool]]) -> Iterator[TokenIds]:
    """Yield the ids of documents given as (pieces of text, whether the document ends after them), in bounded memory.

    The ids equal those of each document encoded as one string: pieces are joined and cut again between two tokens, and
    each is encoded behind the last words of the one before, whose ids are left out. So a tokenizer that puts a space
    before a text, as SentencePiece does, puts it before the document alone. Only a run of a million characters without
    a space, or of spaces only, is cut anywhere.
    """
    batch: list[tuple[str, str] | None] = []  # None: end of text
    num_chars = 0
    for texts, is_ending in documents:
        for context, piece in _cut_between_tokens(tokenizer, texts):
            batch.append((context, piece))
            num_chars += len(piece)
            if num_chars >= _BATCH_CHARS:
                yield _encode_pieces(tokenizer, batch)
                batch, num_chars = [], 0
        if is_ending and tokenizer.end_of_text is not None:
            batch.append(None)
    if batch:
        yield _encode_pieces(tokenizer, batch)


def _encode_pieces(tokenizer: Tokenizer, batch: list[tuple[str, str] | None]) -> TokenIds:
    """Return the ids of (context, piece) pairs, without those of the contexts."""
    end = np.array([tokenizer.end_of_text or 0], np.dtype(token_dtype(tokenizer.vocab_size)))
    pairs = [pair for pair in batch if pair is not None]
    contexts = tokenizer.encode_batch([context for context, _ in pairs])
    whole = tokenizer.encode_batch([context + piece for context, piece in pairs])
    encoded = (ids[len(before) :] for before, ids in zip(contexts, whole, strict=True))
    return np.concatenate([end if pair is None else next(encoded) for pair in batch])


def _cut_between_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (context, piece): pieces of about 16,384 characters, and for each the end of the one before, "" at first.

    A piece becomes longer until a cut between two tokens is known, but not longer than a batch.
    """
    context, pending, max_chars = "", "", _PIECE_CHARS
    for text in texts:
        pending += text
        start = 0
        while len(pending) - start > max_chars + _CONTEXT_CHARS:
            cut = _find_cut(tokenizer, pending, start, start + max_chars)
            if cut is None and max_chars < _BATCH_CHARS:
                max_chars *= 2
                continue
            next_context, stop = cut or ("", start + max_chars)
            yield context, pending[start:stop]
            context, start, max_chars = next_context, stop, _PIECE_CHARS
        pending = pending[start:]
    if pending:
        yield context, pending


def _find_cut(tokenizer: Tokenizer, text: str, start: int, limit: int) -> tuple[str, int] | None:
    """Return (context before the cut, its position), at most at `limit`, where a word begins and no token spans it.

    The ids of the context must be the same with and without the text behind it. None: no such cut was found.
    """
    words = (at for at in range(limit, max(start, limit - _PIECE_CHARS), -1) if _is_word_start(text, at))
    for stop in islice(words, _MAX_TRIED_CUTS):
        first = max(start, stop - _CONTEXT_CHARS)
        begins = range(stop - _CONTEXT_CHARS // 2, first, -1)
        begin = next((at for at in begins if _is_word_start(text, at)), first)
        context = text[begin:stop]
        before, whole = tokenizer.encode_batch([context, text[begin : stop + _CONTEXT_CHARS]])
        if np.array_equal(before, whole[: len(before)]):
            return context, stop
    return None


def _is_word_start(text: str, at: int) -> bool:
    """Return whether a space follows a non-space here: no GPT-2 token spans it."""
    return text[at] in _SPACES and not text[at - 1].isspace()


def _sample(texts: Iterable[str], text_bytes: int) -> list[str]:
    pieces = (text[start : start + _SAMPLE_CHARS] for text in texts for start in range(0, len(text), _SAMPLE_CHARS))
    sample = list(_sample_evenly(pieces, min(1.0, _SAMPLE_BYTES / max(1, text_bytes))))
    while (num_bytes := _distinct_word_bytes(sample)) > _DISTINCT_WORD_BYTES and len(sample) > 1:
        sample = list(_sample_evenly(sample, _DISTINCT_WORD_BYTES / num_bytes)) or sample[:1]
    return sample


def _sample_evenly(items: Iterable[str], fraction: float) -> Iterator[str]:
    """Yield this fraction of the items, evenly spread."""
    credit = 0.0
    for item in items:
        credit += fraction
        if credit >= 1:
            credit -= 1
            yield item


def _distinct_word_bytes(texts: Iterable[str]) -> int:
    return sum(len(word.encode()) for word in {word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text)})


def _encode_text(text: str, encoding: str = "utf-8") -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        raise DataError(f"the text is not Unicode: {error.reason} at character {error.start}") from None


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(_encode_text(text, "utf-32-le"), "<u4").astype(np.uint32, copy=False)


def _check_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    checked = [int(index) for index in ids]
    for index in checked:
        if not 0 <= index < vocab_size:
            raise DataError(f"token id {index} is beyond the vocabulary of {vocab_size}")
    return checked


def _shorten(chars: str) -> str:
    return chars if len(chars) <= 100 else chars[:100] + "…"
