"""A corpus returns the text that it was made of, is complete or absent, and bad input is a one-line error."""

from __future__ import annotations

import doctest
import errno
import json
import os
import pickle
import random
import re
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from evener.cli.data import app
from evener.core.base.errors import DataError, EvenerError, UsageError
from evener.core.model import corpus as core_corpus
from evener.core.model.corpus import (
    Corpus,
    check_block_size,
    hash_content,
    load_corpus,
    mean_distinct_tokens,
)
from evener.corpus import prepare_corpus
from evener.corpus import tokenizer as tokenizer_module
from evener.corpus.documents import CorpusSplits, Document, find_documents, read_text, split_by_fraction, whole_document
from evener.corpus.prepare_corpus import prepare
from evener.corpus.stdlib_source import stdlib_documents
from evener.corpus.token_check import check_token_ids
from evener.corpus.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    LibraryTokenizer,
    Tokenizer,
    encode_documents,
    load_tokenizer,
    train_bpe,
)

from ..tiers import num_examples

TEXT = "The old horse pulls the load.\nAn eager horse pulls more: naïve, 重い, 🐎!\n" * 40


def documents(*texts: str) -> list[Document]:
    return [Document(f"{number}.txt", len(text.encode()), text.encode()) for number, text in enumerate(texts)]


def splits(text: str = TEXT, val_fraction: float = 0.1) -> CorpusSplits:
    return split_by_fraction(documents(text), val_fraction)


def tokens(corpus: Corpus, split: str) -> list[int]:
    return np.fromfile(corpus.split_path(split), f"<u{np.dtype(corpus.dtype).itemsize}").tolist()


def entries(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def nanogpt_folder(folder: Path, *, chars: str = "") -> Path:
    """As nanoGPT's prepare.py writes it."""
    folder.mkdir()
    np.array([1, 2, 0, 2, 1], np.uint16).tofile(folder / "train.bin")
    np.array([2, 1, 0], np.uint16).tofile(folder / "val.bin")
    if chars:
        stoi = {char: index for index, char in enumerate(chars)}
        table = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": stoi}
        (folder / "meta.pkl").write_bytes(pickle.dumps(table))
    return folder


@pytest.fixture(scope="module")
def bpe() -> LibraryTokenizer:
    return train_bpe([TEXT], len(TEXT.encode()), 400)


# What goes in comes out


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_corpus_round_trips_its_text(tmp_path: Path, kind: str) -> None:
    prepared = prepare(tmp_path / "c", splits(), tokenizer=kind, vocab_size=400 if kind == "bpe" else None)
    assert prepared.was_written
    corpus = load_corpus(tmp_path / "c")
    assert corpus == prepared.corpus
    tokenizer = load_tokenizer(tmp_path / "c")
    assert (tokenizer.kind, tokenizer.vocab_size) == (kind, corpus.vocab_size)
    train = tokenizer.decode(tokens(corpus, "train"))
    val = tokenizer.decode(tokens(corpus, "val"))
    assert (train + val).removesuffix("<|endoftext|>") == TEXT
    assert len(train.encode()) == pytest.approx(0.9 * len(TEXT.encode()), abs=4)
    assert (corpus.train_tokens, corpus.val_tokens) == (len(tokens(corpus, "train")), len(tokens(corpus, "val")))
    assert hash_content(Path(corpus.path)) == corpus.content_hash
    check_token_ids(corpus)
    assert entries(tmp_path) == ["c", "c/meta.json", "c/tokenizer.json", "c/train.bin", "c/val.bin"]


def test_byte_tokens_equal_utf8_bytes(tmp_path: Path) -> None:
    corpus = prepare(tmp_path / "c", splits("héllo horses", 0.25), tokenizer="byte").corpus
    assert (tmp_path / "c/train.bin").read_bytes() == b"h\0\xc3\0\xa9\0l\0l\0o\0 \0h\0o\0"
    assert (corpus.vocab_size, corpus.dtype, corpus.train_tokens, corpus.val_tokens) == (256, "uint16", 9, 4)


def test_char_corpus_equals_nanogpt(tmp_path: Path) -> None:
    """Against nanoGPT's data/shakespeare_char/prepare.py, restated."""
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 50
    chars = sorted(set(text))
    stoi = {char: index for index, char in enumerate(chars)}
    n = len(text)
    corpus = prepare(tmp_path / "ours", splits(text), tokenizer="char").corpus
    assert tokens(corpus, "train") == [stoi[char] for char in text[: int(n * 0.9)]]
    assert tokens(corpus, "val") == [stoi[char] for char in text[int(n * 0.9) :]]
    theirs = load_corpus(nanogpt_folder(tmp_path / "theirs", chars="".join(chars)))
    assert theirs.tokenizer_hash == corpus.tokenizer_hash


def test_large_vocabulary_uses_uint32(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000))) + "ab"
    corpus = prepare(tmp_path / "c", splits(text), tokenizer="char").corpus
    assert (corpus.vocab_size, corpus.dtype) == (70_002, "uint32")
    loaded = load_corpus(tmp_path / "c")
    assert load_tokenizer(tmp_path / "c").decode(tokens(loaded, "train") + tokens(loaded, "val")) == text


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_distinct_token_count_matches_expectation(tmp_path: Path, dtype: str) -> None:
    """Of n draws among V as many as V·(1 - (1 - 1/V)ⁿ) are different."""
    num, block = 1000, 64
    drawn = np.random.default_rng(0).integers(0, num, 1 << 17).astype(dtype)
    folder = nanogpt_folder(tmp_path / "it")
    found = msgspec.structs.replace(load_corpus(folder), dtype=dtype, train_tokens=len(drawn))
    drawn.tofile(found.split_path("train"))
    told = mean_distinct_tokens(found, block)
    assert len(told) == 9  # 1 to 256 of 2048 blocks
    expected = [num * (1 - (1 - 1 / num) ** (block << level)) for level in range(9)]
    assert told == pytest.approx(expected, rel=0.02)
    assert mean_distinct_tokens(found, 2 * len(drawn)) == []


def test_documents_end_with_end_of_text(tmp_path: Path) -> None:
    parts = tuple(whole_document(document) for document in documents("one two\n", "three <|endoftext|>\n"))
    corpus = prepare(tmp_path / "c", CorpusSplits(parts, parts[:1]), tokenizer="bpe", vocab_size=300).corpus
    tokenizer = load_tokenizer(tmp_path / "c")
    assert tokens(corpus, "train").count(tokenizer.end_of_text or 0) == 2
    assert tokenizer.decode(tokens(corpus, "train")) == "one two\n<|endoftext|>three <|endoftext|>\n<|endoftext|>"


def test_gpt2_tokenizer_uses_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bytes for a vocabulary: GPT-2's own cannot be had without a network."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([value]): value for value in range(256)}
    small = tiktoken.Encoding(
        "gpt2", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: small)
    corpus = prepare(tmp_path / "c", splits("abc <|endoftext|> abc", 0.1), tokenizer="gpt2").corpus
    assert (corpus.vocab_size, corpus.dtype) == (50257, "uint16")
    assert tokens(corpus, "val") == [*b"abc", 50256]
    tokenizer = load_tokenizer(tmp_path / "c")
    assert tokenizer.decode(tokens(corpus, "train")) == "abc <|endoftext|> "
    assert load_corpus(nanogpt_folder(tmp_path / "n")).tokenizer_hash == corpus.tokenizer_hash
    assert load_tokenizer(tmp_path / "n").kind == "gpt2"


def test_missing_gpt2_vocabulary_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")

    def offline(name: str) -> None:
        raise ConnectionError("Failed to resolve 'openaipublic.blob.core.windows.net'")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(DataError, match=r"GPT-2's vocabulary is not on this machine .*ConnectionError") as caught:
        prepare(tmp_path / "c", splits(), tokenizer="gpt2")
    assert "--tokenizer bpe" in caught.value.hint
    assert entries(tmp_path) == []


@settings(max_examples=num_examples(50, 200), deadline=None)
@given(text=st.text())
def test_byte_round_trips_any_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=num_examples(50, 200), deadline=None)
@given(text=st.one_of(st.text(), st.text(" \t\n\r\x85\u3000aé'<|endoftext|>1")))
def test_bpe_round_trips_any_text(bpe: LibraryTokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text


@settings(max_examples=num_examples(50, 200), deadline=None)
@given(
    pieces=st.lists(
        st.tuples(
            st.text("ab'sé1.<|\x1c\u200b", max_size=9).map(lambda word: word + "1"),
            st.text(" \n\t\x85\u3000", min_size=1, max_size=4),
        ),
        max_size=60,
    ),
    seed=st.integers(0, 99),
)
def test_streamed_encoding_equals_whole_encoding(
    bpe: LibraryTokenizer, pieces: list[tuple[str, str]], seed: int
) -> None:
    text = "".join(word + space for word, space in pieces)
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(4))
    stream = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE_CHARS", 64)
        patch.setattr(tokenizer_module, "_BATCH_CHARS", 200)
        parts = list(encode_documents(bpe, [(stream, True)]))
    assert np.concatenate(parts).tolist() == [*bpe.encode(text), bpe.end_of_text]


def library_tokenizer(name: str) -> LibraryTokenizer:
    """Return a small tokenizer as a kind of model has it, trained on TEXT."""
    from tokenizers import models, normalizers, pre_tokenizers

    is_unigram = name == "t5"
    engine = tokenizers.Tokenizer(models.Unigram() if is_unigram else models.BPE(byte_fallback=True, unk_token="<unk>"))
    if name == "llama2":  # a space before every text, and tokens that may span words
        engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif name == "mistral":
        engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif name == "t5":
        engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    else:
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=name == "roberta")
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if is_unigram:
        trainer = tokenizers.trainers.UnigramTrainer(
            vocab_size=600, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
    else:
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if "byte" in name or name == "roberta" else [],
        )
    engine.train_from_iterator(TEXT.splitlines(), trainer)
    return LibraryTokenizer(engine.to_str().encode())


@pytest.mark.parametrize("name", ["llama2", "mistral", "t5", "roberta", "byte-level"])
@pytest.mark.parametrize("separator", [" ", "\n", "\n\n  ", "", "。"])
def test_pieces_have_the_ids_of_the_whole_document(name: str, separator: str) -> None:
    """Cut into many pieces, a document has no spaces that it lacks, whatever precedes a piece."""
    tokenizer = library_tokenizer(name)
    words = re.findall(r"\S+", TEXT)
    rng = random.Random(7)
    text = separator.join(rng.choice(words) for _ in range(3000))
    stream = [text[start : start + 700] for start in range(0, len(text), 700)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE_CHARS", 300)
        patch.setattr(tokenizer_module, "_BATCH_CHARS", 40_000)
        ids = np.concatenate(list(encode_documents(tokenizer, [(stream, False)])))
    whole = tokenizers.Tokenizer.from_str(tokenizer.serialize().decode()).encode(text, add_special_tokens=False).ids
    assert ids.tolist() == whole


def test_long_run_without_spaces_round_trips(bpe: LibraryTokenizer) -> None:
    text = "ab" * 40_000 + " " * 40_000
    ids = np.concatenate(list(encode_documents(bpe, [([text], False)])))
    assert bpe.decode(ids) == text


def test_tokenizer_loads_without_corpus(tmp_path: Path, bpe: LibraryTokenizer) -> None:
    for tokenizer in (ByteTokenizer(), CharTokenizer("ab\n"), bpe):
        (tmp_path / "tokenizer.json").write_bytes(tokenizer.serialize())
        loaded: Tokenizer = load_tokenizer(tmp_path)
        assert loaded.serialize() == tokenizer.serialize()
        assert loaded.encode("ab\n").tolist() == tokenizer.encode("ab\n").tolist()


def test_bpe_is_trained_on_a_bounded_even_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{number:07d}\n" for number in range(200_000))  # 1.6 MB, 1.4 MB of distinct words

    def sample() -> list[str]:
        pieces = tokenizer_module._sample([text[:1_000_000], text[1_000_000:]], len(text))
        starts = [int(piece[:7]) for piece in pieces]
        gaps = [after - before for before, after in pairwise(starts)]
        assert max(gaps, default=0) * len(pieces) < 1.1 * 200_000
        return pieces

    assert "".join(sample()) == text
    monkeypatch.setattr(tokenizer_module, "_SAMPLE_BYTES", 400_000)
    assert sum(map(len, sample())) == pytest.approx(400_000, rel=0.02)
    monkeypatch.setattr(tokenizer_module, "_DISTINCT_WORD_BYTES", 70_000)
    assert sum(map(len, sample())) == pytest.approx(80_000, rel=0.1)
    monkeypatch.setattr(tokenizer_module, "_DISTINCT_WORD_BYTES", 1)
    assert len(sample()) == 1


# The same text gives the same corpus


def test_the_same_files_elsewhere_give_the_same_corpus(tmp_path: Path) -> None:
    made = []
    for place in ("here", "there/deep"):
        folder = tmp_path / place
        for number in range(20):
            path = folder / f"chapter {number}" / "text.txt"
            path.parent.mkdir(parents=True)
            path.write_text(f"Chapter {number}. " * 10)
        (folder / ".hidden").write_bytes(b"\xff")
        (folder / "empty.txt").touch()
        found = find_documents([folder, folder / "chapter 3" / "text.txt"], skip=lambda path: False)
        assert len(found) == 20
        made.append(prepare(tmp_path / f"{len(made)}", split_by_fraction(found, 0.1), tokenizer="char").corpus)
    assert made[0].content_hash == made[1].content_hash
    assert made[0].val_tokens == pytest.approx(0.1 * (made[0].train_tokens + made[0].val_tokens), abs=1)


def test_repeated_prepare_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "c"
    first = prepare(out, splits(), tokenizer="bpe", vocab_size=300, extra={"train.jsonl": b"{}\n"})
    stamps = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = prepare(out, splits(), tokenizer="bpe", vocab_size=300, extra={"train.jsonl": b"{}\n"})
    assert (again.was_written, again.corpus) == (False, first.corpus)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == stamps
    forced = prepare(out, splits(), tokenizer="bpe", vocab_size=300, extra={"train.jsonl": b"{}\n"}, force=True)
    assert (forced.was_written, forced.corpus) == (True, first.corpus)
    assert entries(tmp_path)[0] == "c"
    assert len(entries(tmp_path)) == 6


@pytest.mark.parametrize("damage", ["val.bin", "train.jsonl", "tokenizer.json"])
def test_damaged_corpus_is_rebuilt(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "c"
    first = prepare(out, splits(), tokenizer="char", extra={"train.jsonl": b"{}\n"})
    (out / damage).unlink()
    again = prepare(out, splits(), tokenizer="char", extra={"train.jsonl": b"{}\n"})
    assert (again.was_written, again.corpus) == (True, first.corpus)
    assert (out / damage).exists()


@pytest.mark.parametrize(
    "change", [{"tokenizer": "byte"}, {"splits": splits(TEXT + "!")}, {"splits": splits(val_fraction=0.2)}]
)
def test_different_corpus_is_replaced_only_with_force(tmp_path: Path, change: dict) -> None:
    out = tmp_path / "c"
    first = prepare(out, splits(), tokenizer="char").corpus
    arguments = {"splits": splits(), "tokenizer": "char"} | change
    with pytest.raises(UsageError, match=r"c already holds another corpus"):
        prepare(out, **arguments)
    assert load_corpus(out) == first
    assert prepare(out, **arguments, force=True).corpus.content_hash != first.content_hash
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("force", [False, True])
def test_folder_with_foreign_files_is_never_overwritten(tmp_path: Path, force: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds files that are not part of a corpus, such as thesis\.tex"):
        prepare(tmp_path, splits(), tokenizer="byte", force=force)
    with pytest.raises(UsageError, match=r"thesis\.tex is a file"):
        prepare(tmp_path / "thesis.tex", splits(), tokenizer="byte", force=force)
    assert entries(tmp_path) == ["thesis.tex"]


# Whole or not there


def test_concurrent_prepare_does_not_replace_finished_corpus(tmp_path: Path) -> None:
    def overtake(doing: str, done: int, total: int) -> None:
        if doing == "reading" and not (tmp_path / "c").exists():
            prepare(tmp_path / "c", splits(), tokenizer="char")

    with pytest.raises(UsageError, match="c already holds another corpus"):
        prepare(tmp_path / "c", splits(), tokenizer="byte", progress=overtake)

    def overtake_late(doing: str, done: int, total: int) -> None:
        if doing == "encoding" and not (tmp_path / "d").exists():
            (tmp_path / "c").rename(tmp_path / "d")

    with pytest.raises(DataError, match=r"another run has just prepared .*d"):
        prepare(tmp_path / "d", splits(), tokenizer="byte", progress=overtake_late)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert load_corpus(tmp_path / "d").tokenizer == "char"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, DataError])
def test_interrupted_prepare_leaves_no_files(tmp_path: Path, stop: type[BaseException]) -> None:
    def interrupt(doing: str, done: int, total: int) -> None:
        if doing == "encoding":
            raise stop("stop")

    with pytest.raises(stop):
        prepare(tmp_path / "new" / "c", splits(), tokenizer="byte", progress=interrupt)
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, r"cannot write .*c: no space left on the disk \(\d+ MB free\)"), (errno.EIO, "c: Input/output")],
)
def test_full_disk_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "c", splits(), tokenizer="byte")
    assert entries(tmp_path) == []


# Bad input, by the command line: each a line that names file and reason, nothing left behind


@pytest.mark.parametrize(
    ("content", "position", "reason"),
    [
        (b"abc\xffdef" * 9, 3, "invalid start byte"),
        ("é".encode()[:1] + b" is cut", 0, "invalid continuation byte"),
        (b"all is well" + "重".encode()[:2], 11, "unexpected end of data"),
        (b"a" * ((1 << 20) - 1) + b"\xe9\x87" + b"x" * 99, (1 << 20) - 1, "invalid continuation byte"),
    ],
)
def test_invalid_utf8_is_reported_with_byte_position(
    tmp_path: Path, content: bytes, position: int, reason: str
) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(content)
    refused([path], tmp_path, rf"latin\.txt is not UTF-8: {reason} at byte {position}")


def refused(arguments: list[object], folder: Path, message: str, *, verb: str = "text") -> EvenerError:
    """The error of `evener data …`, after a look that it left nothing in `folder`."""
    before = entries(folder)
    result = CliRunner().invoke(app, [verb, *map(str, arguments), "--out", str(folder / "data" / "out")])
    assert isinstance(result.exception, EvenerError), result.exception
    assert result.exception.exit_status == 2
    message_lines = str(result.exception).splitlines()
    assert len(message_lines) == 1
    assert re.search(message, message_lines[0]), message_lines
    assert entries(folder) == before
    return result.exception


def test_invalid_paths_and_options_are_named(tmp_path: Path) -> None:
    good, empty, short = tmp_path / "good.txt", tmp_path / "empty.txt", tmp_path / "short.txt"
    good.write_text(TEXT)
    empty.touch()
    short.write_text("horses")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    refused([tmp_path / "gone.txt"], tmp_path, r"gone\.txt: no such file or folder")
    refused([good, tmp_path / "gone"], tmp_path, r"gone: no such file or folder")
    refused([tmp_path / "pipe"], tmp_path, "pipe is neither a file nor a folder")
    refused([empty], tmp_path, r"no text in .*empty\.txt")
    refused([tmp_path / "folder"], tmp_path, "no text in .*folder")
    refused([short], tmp_path, r"too short for .*out: its val split has 1 tokens")
    refused([good, "--val-fraction", "0"], tmp_path, "--val-fraction 0 is not between 0 and 1")
    refused([good, "--val-fraction", "nan"], tmp_path, "--val-fraction nan is not between 0 and 1")
    refused([good, "--vocab-size", "300"], tmp_path, "--vocab-size is for --tokenizer bpe")
    refused([good, "--tokenizer", "bpe", "--vocab-size", "256"], tmp_path, "--vocab-size 256 is too small")
    error = refused([good, "--tokenizer", "btye"], tmp_path, '--tokenizer "btye" is not known')
    assert error.hint == 'did you mean "byte"?'
    refused(["--sentences", "0"], tmp_path, "0 sentences .* leave one split empty", verb="verbs")


def test_file_changed_during_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("x" * 100)
    (document,) = find_documents([path], skip=lambda folder: False)
    path.write_text("x")
    with pytest.raises(DataError, match=r"log\.txt became shorter while it was read"):
        list(read_text(whole_document(document)))
    path.unlink()
    with pytest.raises(DataError, match=r"log\.txt: No such file or directory"):
        list(read_text(whole_document(document)))


# Reading a folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: os.truncate(c / "train.bin", 101), r"train\.bin is truncated: 101 bytes where meta\.json says \d+"),
        (lambda c: os.truncate(c / "val.bin", 0), r"val\.bin is truncated: 0 bytes"),
        (lambda c: (c / "val.bin").write_bytes(bytes(9999)), r"val\.bin is too long: 9999 bytes"),
        (lambda c: (c / "train.bin").unlink(), r"train\.bin is missing"),
        (lambda c: (c / "tokenizer.json").unlink(), r"tokenizer\.json: No such file"),
        (lambda c: (c / "tokenizer.json").write_text("{}"), r"tokenizer\.json is not the tokenizer that meta\.json"),
        (lambda c: (c / "meta.json").write_text("{"), r"meta\.json is damaged: .*truncated"),
        (lambda c: (c / "meta.json").write_bytes(b"\xff"), r"meta\.json is damaged"),
        (lambda c: edit(c, train_tokens="many"), r"meta\.json is damaged: Expected `int`, .* `\$.train_tokens`"),
        (lambda c: edit(c, trian_tokens=1), r"meta\.json is damaged: .*unknown field `trian_tokens`"),
        (lambda c: edit(c, format=2), r"meta\.json is of format 2; this evener reads 1"),
        (lambda c: edit(c, vocab_size=70_000), r"meta\.json is damaged: a vocabulary of 70000 in uint16"),
        (lambda c: edit(c, dtype="int8"), r"meta\.json is damaged: Invalid enum value 'int8'"),
    ],
)
def test_damaged_corpus_is_refused_with_file_and_reason(tmp_path: Path, damage: object, message: str) -> None:
    prepare(tmp_path / "c", splits(), tokenizer="char")
    damage(tmp_path / "c")  # type: ignore[operator]
    with pytest.raises(DataError, match=message) as caught:
        load_corpus(tmp_path / "c")
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def edit(folder: Path, **changes: object) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_non_corpus_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="gone: no such folder"):
        load_corpus(tmp_path / "gone")
    with pytest.raises(DataError, match=r"text\.txt is a file, not a prepared corpus") as caught:
        load_corpus(tmp_path / "text.txt")
    assert "evener data text" in caught.value.hint
    (tmp_path / "shakespeare").mkdir()
    for name, told in (("shakespear", f"did you mean {tmp_path}/shakespeare?"), ("wikitext", "evener train FILE")):
        with pytest.raises(DataError, match="no such folder") as caught:
            load_corpus(tmp_path / name)
        assert told in caught.value.hint
    with pytest.raises(DataError, match="no such folder") as caught:
        load_corpus("https://example.com/text.txt")
    assert caught.value.hint.startswith("evener downloads no data")
    with pytest.raises(DataError, match="empty holds no corpus"):
        load_corpus(tmp_path / "empty")


def test_nanogpt_folders_load_unchanged(tmp_path: Path) -> None:
    gpt2 = load_corpus(nanogpt_folder(tmp_path / "openwebtext"))
    assert (gpt2.name, gpt2.tokenizer, gpt2.vocab_size, gpt2.dtype) == ("openwebtext", "gpt2", 50257, "uint16")
    assert (gpt2.train_tokens, gpt2.val_tokens) == (5, 3)
    chars = load_corpus(nanogpt_folder(tmp_path / "shakespeare_char", chars="abc"))
    assert (chars.tokenizer, chars.vocab_size) == ("char", 3)
    assert load_tokenizer(chars.path).decode(tokens(chars, "train")) == "bcacb"
    assert chars.content_hash == gpt2.content_hash
    assert hash_content(Path(chars.path)) == chars.content_hash
    assert entries(tmp_path / "openwebtext") == ["train.bin", "val.bin"]

    os.truncate(tmp_path / "openwebtext" / "val.bin", 5)
    with pytest.raises(DataError, match=r"val\.bin is truncated: 5 bytes are not a whole number of uint16 tokens"):
        load_corpus(tmp_path / "openwebtext")
    (tmp_path / "openwebtext" / "val.bin").unlink()
    with pytest.raises(DataError, match=r"val\.bin is missing"):
        load_corpus(tmp_path / "openwebtext")
    os.truncate(tmp_path / "shakespeare_char" / "val.bin", 2)
    with pytest.raises(DataError, match=r"val\.bin holds 1 tokens: fewer than 2"):
        load_corpus(tmp_path / "shakespeare_char")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("touch hacked",))


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (pickle.dumps({"itos": Evil()}), r"it asks for posix\.system"),
        (pickle.dumps({"itos": np.zeros(2)}), "it asks for numpy"),
        (pickle.dumps({"itos": {0: "a", 1: "b"}})[:-9], "refused: "),
        (b"", "refused: "),
        (b"not a pickle", "refused: "),
        (pickle.dumps(["a"]), "no table `itos`"),
        (pickle.dumps({"itos": {}}), "no table `itos`"),
        (pickle.dumps({"itos": {0: "a", 2: "b"}}), "no table `itos`"),
        (pickle.dumps({"itos": {0: "a", 1: "bc"}}), "not every entry of `itos` is one character"),
        (pickle.dumps({"itos": {0: "a", 1: 5}}), "not every entry of `itos` is one character"),
    ],
)
def test_foreign_pickle_is_refused_without_execution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pickled: bytes, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = nanogpt_folder(tmp_path / "n", chars="abc")
    (folder / "meta.pkl").write_bytes(pickled)
    for load in (load_corpus, load_tokenizer):
        with pytest.raises(DataError, match=rf"meta\.pkl is refused: .*{reason}|meta\.pkl is {reason}"):
            load(folder)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(("split", "position", "token_id"), [("train", 4, 3), ("val", 0, 65535)])
def test_an_id_beyond_the_vocabulary_is_named(tmp_path: Path, split: str, position: int, token_id: int) -> None:
    corpus = load_corpus(nanogpt_folder(tmp_path / "n", chars="abc"))
    ids = np.fromfile(corpus.split_path(split), np.uint16)
    ids[position] = token_id
    ids.tofile(corpus.split_path(split))
    expected = rf"{split}\.bin holds token id {token_id} at position {position}, beyond the char vocabulary of 3"
    with pytest.raises(DataError, match=expected):
        check_token_ids(corpus)


def test_a_split_shorter_than_a_block_is_named(tmp_path: Path) -> None:
    corpus = load_corpus(nanogpt_folder(tmp_path / "n"))
    check_block_size(corpus, 2)
    with pytest.raises(DataError, match=r"val\.bin holds 3 tokens: too short for one block of 3 and the token after"):
        check_block_size(corpus, 3)


def test_changed_content_is_detected_by_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = prepare(tmp_path / "c", splits(), tokenizer="byte").corpus
    with corpus.split_path("train").open("r+b") as file:
        file.write(b"X")
    assert load_corpus(tmp_path / "c") == corpus
    assert hash_content(tmp_path / "c") != corpus.content_hash

    monkeypatch.setattr(core_corpus, "_SAMPLED_ABOVE_BYTES", 4)
    folder = nanogpt_folder(tmp_path / "n")
    sampled = load_corpus(folder)
    assert sampled.content_hash.startswith("sampled-sha256:")
    assert hash_content(folder, sampled=True) == sampled.content_hash
    assert sampled.content_hash != hash_content(folder).replace("sha256", "sampled-sha256")
    np.zeros(5, np.uint16).tofile(folder / "train.bin")
    assert hash_content(folder, sampled=True) != sampled.content_hash


@pytest.fixture(scope="module")
def unigram_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json as models of Hugging Face have it: Unigram with SentencePiece's spaces, ends with </s>."""
    engine = tokenizers.Tokenizer(tokenizers.models.Unigram())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    engine.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    engine.train_from_iterator([TEXT], trainer)
    file = tmp_path_factory.mktemp("model") / "tokenizer.json"
    engine.save(str(file))
    return file


def test_tokenizer_file_of_a_model_is_embedded(tmp_path: Path, unigram_file: Path) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(unigram_file))
    for name in (unigram_file, unigram_file.parent):  # the file, the model's folder
        corpus = prepare(tmp_path / name.name, splits(TEXT), tokenizer=str(name)).corpus
        assert (corpus.tokenizer, corpus.vocab_size) == ("unigram", theirs.get_vocab_size())
        train, val = ("".join(map("".join, map(read_text, parts))) for parts in (splits().train, splits().val))
        assert tokens(corpus, "train") == theirs.encode(train, add_special_tokens=False).ids
        assert tokens(corpus, "val") == [*theirs.encode(val, add_special_tokens=False).ids, theirs.token_to_id("</s>")]
        assert load_tokenizer(corpus.path).decode(tokens(corpus, "val")[:9]) == theirs.decode(tokens(corpus, "val")[:9])
    assert (tmp_path / "tokenizer.json" / "tokenizer.json").read_bytes() == unigram_file.read_bytes()


def test_truncation_of_a_tokenizer_file_does_not_cut_the_text(tmp_path: Path, bpe: LibraryTokenizer) -> None:
    engine = tokenizers.Tokenizer.from_str(bpe.serialize().decode())
    whole = engine.encode(TEXT).ids
    engine.enable_truncation(16)
    engine.enable_padding(length=32, pad_token="[PAD]")
    assert list(LibraryTokenizer(engine.to_str().encode()).encode(TEXT)) == whole


def test_tokenizer_that_drops_letters_is_refused(tmp_path: Path) -> None:
    """A BPE without unknown token and bytes drops what it has no token for, and says nothing."""
    tokenizers.Tokenizer(tokenizers.models.BPE({"e": 0, "h": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"it drops \d\d% of the letters of this text"):
        prepare(tmp_path / "c", splits(TEXT), tokenizer=str(tmp_path))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0}, unk_token="[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="cannot encode the text"):
        prepare(tmp_path / "c", splits(TEXT), tokenizer=str(tmp_path))


@pytest.mark.parametrize("pairs", [[500, 198], [300, 0, 501, 1]])
def test_nanogpt_folder_of_characters_is_of_uint16(tmp_path: Path, pairs: list[int]) -> None:
    """Pairs of a rare and a common character look as uint32 would."""
    folder = nanogpt_folder(tmp_path / "n", chars="".join(map(chr, range(256, 858))))
    for split in ("train", "val"):
        np.array(pairs * 200, np.uint16).tofile(folder / f"{split}.bin")
    assert (load_corpus(folder).dtype, load_corpus(folder).train_tokens) == ("uint16", 200 * len(pairs))
    (folder / "meta.pkl").unlink()
    if 0 not in pairs:
        assert load_corpus(folder).dtype == "uint16"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", "not a tokenizer of the `tokenizers` library"),
        ("\xff", "not a tokenizer of the `tokenizers` library"),
        (None, "No such file or directory"),
    ],
)
def test_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: str | None, says: str) -> None:
    (tmp_path / "model").mkdir()
    if content is not None:
        (tmp_path / "model" / "tokenizer.json").write_text(content, "latin-1")
    with pytest.raises(DataError, match=re.escape(says)) as raised:
        prepare(tmp_path / "c", splits(TEXT), tokenizer=str(tmp_path / "model"))
    assert str(raised.value).startswith(f"--tokenizer {tmp_path / 'model'}: ")
    assert not (tmp_path / "c").exists()


def test_nanogpt_folder_of_uint32_needs_its_tokenizer(tmp_path: Path) -> None:
    """Ids above 65,535, as of Llama 3 or Qwen: 200 tokens, of which half are beyond."""
    folder = tmp_path / "n"
    folder.mkdir()
    ids = (np.arange(200) * 701 % 70_000).astype(np.uint32)
    for split in ("train", "val"):
        ids.tofile(folder / f"{split}.bin")
    with pytest.raises(DataError, match=r"train\.bin is of uint32, and nothing says which tokenizer made it"):
        load_corpus(folder)
    vocabulary = {f"t{index}": index for index in range(69_998)}
    added = [{"id": 69_999, "content": "</s>"}]
    description = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(description))
    corpus = load_corpus(folder)
    assert (corpus.tokenizer, corpus.vocab_size, corpus.dtype, corpus.train_tokens) == ("bpe", 70_000, "uint32", 200)
    check_token_ids(corpus)
    np.array([*ids[:7], 70_000], np.uint32).tofile(folder / "val.bin")
    with pytest.raises(DataError, match="holds token id 70000 at position 7"):
        check_token_ids(load_corpus(folder))
    (folder / "tokenizer.json").write_text('{"kind": "byte"}')  # of a corpus whose meta.json is lost
    with pytest.raises(DataError, match=r"meta\.json is missing"):
        load_corpus(folder)


def test_a_prompt_outside_the_vocabulary_is_named(bpe: LibraryTokenizer) -> None:
    with pytest.raises(DataError, match="the corpus has no character 'é': its char vocabulary is 'abc'"):
        CharTokenizer("abc").encode("abéc")
    for tokenizer in (ByteTokenizer(), CharTokenizer("abc"), bpe):
        with pytest.raises(DataError, match="not Unicode: surrogates not allowed at character 1"):
            tokenizer.encode("a\udcff")
        with pytest.raises(DataError, match="token id 50000 is beyond the vocabulary"):
            tokenizer.decode([0, 50_000])


# The command line


def test_data_commands_create_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    runner = CliRunner()
    made = [
        runner.invoke(app, arguments)
        for arguments in (
            ["text", "book.txt", "--json"],
            ["verbs", "--sentences", "500", "--json"],
            ["verbs", "--sentences", "500", "--json"],
        )
    ]
    assert [result.exit_code for result in made] == [0, 0, 0]
    records = [json.loads(result.stdout) for result in made]
    assert [record["path"] for record in records] == [
        str(tmp_path / "data" / name) for name in ("book", "verbs", "verbs")
    ]
    assert [record["written"] for record in records] == [True, True, False]
    assert load_corpus("data/verbs").content_hash == records[1]["content_hash"]
    assert sorted(path.name for path in Path("data/verbs").iterdir()) == [
        "meta.json", "tokenizer.json", "train.bin", "train.jsonl", "val.bin", "val.jsonl",
    ]  # fmt: skip
    told = runner.invoke(app, ["text", "book.txt"])
    assert told.stdout.startswith("data/book is up to date, nothing to do: ")


def test_python_standard_library_can_be_a_corpus() -> None:
    found, _ = stdlib_documents()
    assert sum(document.size_bytes for document in found) > 5_000_000
    names = {document.name for document in found}
    assert {"ast.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name or "_sysconfigdata" in name for name in names)


@pytest.mark.parametrize("module", [core_corpus, tokenizer_module, prepare_corpus])
def test_docstring_examples_pass(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
