"""Texts as people have them, files, folders, tables and datasets, become the same documents."""

from __future__ import annotations

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars
import pyarrow
import pytest

from evener.core.base.errors import DataError, UsageError
from evener.corpus import prepare_corpus
from evener.corpus.documents import read_text, whole_document
from evener.corpus.text_cache import choose_tokenizer, prepare_texts
from evener.corpus.text_sources import TextSources, find_texts

ROWS = ["Der erste Text, mit Komma", 'der "zweite"\nüber zwei Zeilen', "", "снова 三"]
TEXTS = [text for text in ROWS if text]  # an empty one is none


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "evener" / "corpora"


def found(tmp_path: Path, *paths: object, column: str | None = None) -> TextSources:
    spool = tmp_path / "spool"
    spool.mkdir(exist_ok=True)
    return find_texts([str(path) for path in paths], spool, column=column, skip=lambda folder: False)


def texts_of(sources: TextSources) -> list[str]:
    return ["".join(read_text(whole_document(document))).removesuffix("\n") for document in sources.documents]


def write_table(path: Path, column: str) -> Path:
    """A table as another program writes it."""
    frame = polars.DataFrame({"id": range(len(ROWS)), column: ROWS})
    match path.suffix:
        case ".jsonl" | ".ndjson":
            frame.write_ndjson(path)
        case ".csv":
            frame.write_csv(path)
        case ".tsv":
            frame.write_csv(path, separator="\t")
        case _:
            frame.write_parquet(path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"])
def test_tables_give_the_text_of_each_row(tmp_path, suffix):
    plain, named = (write_table(tmp_path / f"{name}{suffix}", name) for name in ("text", "body"))
    assert texts_of(found(tmp_path, plain)) == TEXTS
    assert texts_of(found(tmp_path, named, column="body")) == TEXTS
    with pytest.raises(DataError, match=r"has no column text; its columns: id and body") as caught:
        found(tmp_path, named)
    assert caught.value.hint.startswith("--column NAME")
    notes = found(tmp_path, plain, write_table(tmp_path / f"other{suffix}", "text")).notes()
    assert notes == [f"column text of text{suffix} and other{suffix}"]


def test_a_dataset_on_disk_gives_the_text_of_each_row(tmp_path):
    """As `datasets.Dataset.save_to_disk` and `DatasetDict.save_to_disk` write them: streams of Arrow."""
    table = pyarrow.table({"text": ROWS})
    for folder in (tmp_path / "one", tmp_path / "splits" / "train", tmp_path / "splits" / "test"):
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").write_text("{}")
        half = len(ROWS) // 2
        for i, part in enumerate((table[:half], table[half:])):
            path = str(folder / f"data-{i:05}-of-00002.arrow")
            with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(part)
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts_of(found(tmp_path, tmp_path / "one")) == TEXTS
    assert texts_of(found(tmp_path, tmp_path / "splits")) == TEXTS
    (tmp_path / "splits" / "train" / "data-00000-of-00002.arrow").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"data-00000-of-00002\.arrow: not Arrow"):
        found(tmp_path, tmp_path / "splits")


def test_folders_leave_out_what_is_no_text(tmp_path):
    folder = tmp_path / "mine"
    (folder / "chapters").mkdir(parents=True)
    (folder / "chapters" / "one.txt").write_text("eins ä")
    (folder / "latin.txt").write_bytes("zwei ä".encode("latin1"))
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\x00\x01")
    (folder / ".hidden").write_text("nein")
    write_table(folder / "kept.csv", "text")
    write_table(folder / "other.jsonl", "body")
    binaries = tmp_path / "binaries"
    binaries.mkdir()
    (binaries / "a.bin").write_bytes(b"\0\1")
    sources = found(tmp_path, folder)
    assert sorted(texts_of(sources)) == sorted(["eins ä", *TEXTS])
    assert sources.notes() == [
        "left out 2 files that hold no text in UTF-8",
        "left out 1 table without a column text",
        "column text of kept.csv",
    ]
    with pytest.raises(DataError, match="no text in"):
        found(tmp_path, binaries)


def test_text_cut_within_a_character_is_text(tmp_path):
    (tmp_path / "folder").mkdir()
    text = "a" * 65535 + "ä" * 10  # the first 64 KiB end within a character
    (tmp_path / "folder" / "long.txt").write_text(text)
    assert texts_of(found(tmp_path, tmp_path / "folder")) == [text]


def test_standard_input_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("von außen".encode())))
    assert texts_of(found(tmp_path, "-")) == ["von außen"]


@pytest.mark.parametrize(("name", "content", "told"), [
    ("a.jsonl", '{"text": "x"}\n{"text": 5}\n', r"a\.jsonl, line 2: its text is no text but int"),
    ("a.jsonl", '{"text": "x"\n', r"a\.jsonl, line 1: not JSON"),
    ("a.jsonl", "[1]\n", r"a\.jsonl, line 1: expected an object or a text"),
    ("a.csv", 'text\n"open', r"a\.csv, after line 0: not a table"),
    ("a.csv", "id,text\n1,one\n2,two, three\n", r"a\.csv, line 3: more fields than the first line names"),
    ("a.csv", b"text\n\xff\n", r"a\.csv is not UTF-8"),
    ("a.parquet", "PAR1", r"a\.parquet: not Parquet"),
])  # fmt: skip
def test_damaged_table_is_a_one_line_error(tmp_path, name, content, told):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=told) as caught:
        found(tmp_path, path)
    assert "\n" not in str(caught.value)


def test_rows_are_not_joined_and_odd_rows_are_left_out(tmp_path):
    """A byte order mark, rows without the column, and quotes within a field of a .tsv."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n{"id": 2}\n{"text": "two\\n"}\n')
    documents = found(tmp_path, path).documents
    assert ["".join(read_text(whole_document(document))) for document in documents] == ["one\n", "two\n"]
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"quoted" start\n')
    assert texts_of(found(tmp_path, tmp_path / "a.tsv")) == ["quoted start"]
    folder = tmp_path / "folder"
    (folder / "web").mkdir(parents=True)
    (folder / "part.jsonl").write_text('{"id": 1}\n{"text": "late"}\n')
    (folder / "web" / "manifest.json").write_text("{}")  # of a web page, not of a run
    assert texts_of(found(tmp_path, folder)) == ["{}"]


def test_column_without_a_table_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match="--column body: no table is among the texts"):
        found(tmp_path, tmp_path / "a.txt", column="body")


def test_text_is_prepared_once(tmp_path, cache):
    path = tmp_path / "Mein Text.txt"
    path.write_text("abc " * 500)
    first, again = prepare_texts([path]), prepare_texts([path])
    assert (first.was_written, again.was_written) == (True, False)
    assert first.folder == again.folder == cache / first.folder.name
    assert first.folder.name.startswith("Mein-Text-")
    assert (first.corpus.tokenizer, first.corpus.vocab_size, first.tokenizer_was_chosen) == ("char", 4, True)
    assert first.corpus.train_tokens == 1800
    as_bytes = prepare_texts([path], tokenizer="byte")
    assert (as_bytes.corpus.tokenizer, as_bytes.was_written) == ("byte", True)
    path.write_text("abd " * 500)
    assert prepare_texts([path]).folder not in (first.folder, as_bytes.folder)
    assert not [entry for entry in cache.iterdir() if entry.name.startswith(".")]  # nothing was left


def test_own_runs_and_corpora_are_no_texts(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "runs" / "one").mkdir(parents=True)
    (home / "text.txt").write_text("xyz " * 500)
    before = prepare_texts([home])
    (home / "runs" / "one" / "manifest.json").write_text(json.dumps({"verdict": "finished"}))
    (home / "runs" / "one" / "events.jsonl").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert prepare_texts([home]).folder.name == prepare_texts([home]).folder.name == before.folder.name


@pytest.mark.parametrize(
    ("num_bytes", "num_chars", "expected"),
    [
        (1_115_394, 65, ("char", None)),  # tiny Shakespeare
        (900_000, 4000, ("byte", None)),
        (4_000_000, 80, ("bpe", 1024)),
        (28_000_000, 200, ("bpe", 4096)),
        (10**12, 200, ("bpe", 32768)),
    ],
)
def test_tokenizer_follows_the_size_of_the_text(num_bytes, num_chars, expected):
    assert choose_tokenizer(num_bytes, num_chars) == expected


def test_text_that_another_process_prepares_is_awaited_and_shared(tmp_path, monkeypatch):
    (tmp_path / "my.txt").write_text("one text for two runs. " * 500)
    is_waiting, write_files = threading.Event(), prepare_corpus._write_files

    def write_when_awaited(*args):
        assert is_waiting.wait(60)
        write_files(*args)

    def note_waiting(doing, done, total):
        if doing == "another process prepares this text":
            is_waiting.set()

    monkeypatch.setattr(prepare_corpus, "_write_files", write_when_awaited)
    with ThreadPoolExecutor(2) as threads:  # flock keeps threads apart as it does processes
        both = [threads.submit(prepare_texts, [tmp_path / "my.txt"], progress=note_waiting) for _ in range(2)]
        first, second = (one.result(120) for one in both)
    assert first.folder == second.folder
    assert sorted([first.was_written, second.was_written]) == [False, True]
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name]  # nothing is left behind
