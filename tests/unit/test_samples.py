"""Records of chats and texts are read with their lines; samples are found, cut and packed by pure functions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evener.core.base.errors import DataError
from evener.core.model.corpus import BEGIN, LOSS, TEXT, Corpus
from evener.core.model.fine_tuning import pack_rows, read_lengths
from evener.corpus.sample_records import Chat, Completion, Message, Text, read_records
from evener.corpus.samples import read_samples, rows_of

SAMPLES = [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0], [0, 1, 0, 1, 1, 1, 1, 1]]  # which tokens carry loss

MODEL = Path("no-model")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    flags = [np.array(loss) * LOSS + np.array([BEGIN] + [0] * (len(loss) - 1)) for loss in SAMPLES]
    text = np.full(10, LOSS)
    text[0] = BEGIN | TEXT
    every = np.concatenate([*flags, text]).astype(np.uint8)
    every.tofile(tmp_path / "train.flags.bin")
    return Corpus(path=str(tmp_path), name="", tokenizer="bpe", vocab_size=9, dtype="uint16", train_tokens=len(every),
                  val_tokens=0, content_hash="", tokenizer_hash="", is_samples=True)  # fmt: skip


def test_samples_are_cut_to_the_block_and_what_is_lost_is_counted(corpus):
    table = read_samples(corpus, "train", 5)
    # The second loses its only answer with its end, the third has none; the text is cut: each token is predicted once.
    assert table.starts.tolist() == [0, 12, 20, 24, 28]
    assert table.lengths.tolist() == [4, 5, 5, 5, 2]
    assert table.loss_tokens.tolist() == [2, 3, 4, 4, 1]
    assert (table.num_truncated, table.num_empty) == (2, 2)
    assert table.loss_tokens[2:].sum() == 9
    with pytest.raises(DataError, match="no sample carries loss within 1 tokens"):
        read_samples(corpus, "train", 1)
    with pytest.raises(DataError, match="no sample carries loss within 1 tokens"):
        read_lengths(corpus, 1, packing=False)


def test_packing_keeps_every_sample_and_no_row_is_too_long():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    rows = pack_rows(lengths.tolist(), 128)
    assert sorted(sample for row in rows for sample in row) == list(range(500))
    assert all(lengths[row].sum() <= 128 for row in rows)
    fewest = -(-lengths.sum() // 128)
    assert len(rows) <= 11 / 9 * fewest + 1  # Johnson 1974


def test_unpacked_rows_are_samples(corpus):
    table = read_samples(corpus, "train", 5)
    assert [row.tolist() for row in rows_of(table, 5, packing=False)] == [[i] for i in range(5)]
    assert len(rows_of(table, 10, packing=True)) < 5


@pytest.mark.parametrize(("block_size", "packing"), [(5, False), (10, False), (10, True), (3, False)])
def test_lengths_that_a_plan_reads_are_those_of_the_rows(corpus, block_size, packing):
    table = read_samples(corpus, "train", block_size)
    rows = rows_of(table, block_size, packing=packing)
    tokens = [table.lengths[row].sum() for row in rows]
    lengths = read_lengths(corpus, block_size, packing=packing)
    assert lengths.loss_tokens == pytest.approx(table.loss_tokens.sum() / len(rows))
    assert lengths.max_tokens == max(tokens)
    alone = lengths.micro_batches[0]
    assert (alone.tokens, alone.squares) == pytest.approx((np.mean(tokens), np.mean(np.square(tokens))))
    assert alone.logits == pytest.approx(lengths.loss_tokens)  # of a sequence alone, only where a token carries loss


def test_micro_batch_is_padded_to_its_longest_sequence(tmp_path):
    """Of two sequences of 2 and 10 tokens every micro-batch of two has 10, and logits where either has a target."""
    flags = np.array([BEGIN, LOSS, BEGIN, 0, *[LOSS] * 8], np.uint8)
    flags.tofile(tmp_path / "train.flags.bin")
    corpus = Corpus(path=str(tmp_path), name="", tokenizer="bpe", vocab_size=9, dtype="uint16", train_tokens=12,
                    val_tokens=0, content_hash="", tokenizer_hash="", is_samples=True)  # fmt: skip
    alone, both = read_lengths(corpus, 32, packing=False).micro_batches
    assert (alone.tokens, alone.squares, alone.logits) == (6.0, 52.0, 4.5)
    assert (both.tokens, both.squares, both.logits, both.max_loss_tokens) == (10.0, 100.0, 9.0, 9)


def test_records_of_all_formats_are_read(tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "id": 7}
    rows = [chat, {"prompt": "a", "completion": "b"}, {"text": "t"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "plain.txt").write_text("words")
    records = [record for _, record in read_records([tmp_path / "rows.jsonl", tmp_path / "plain.txt"], None, MODEL)]
    messages = [Message(role="user", content="hi"), Message(role="assistant", content="ho")]
    assert records == [Chat(messages=messages), Completion(prompt="a", completion="b"), Text(text="t"),
                       Text(text="words")]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"messages": [', "not JSON"),
        ('["a"]', "expected an object"),
        ('{"messages": [{"role": "user"}]}', "missing required field `content`"),
        ('{"messages": "hi"}', "Expected `array`"),
        ('{"messages": [{"role": "user", "content": "a", "weight": 0}]}', "unknown field `weight`"),
        ('{"prompt": "a"}', "neither messages, nor prompt and completion, nor text; its keys: prompt"),
        ('{"messages": [], "tools": [{"type": "function"}]}', "Expected `null`, got `array` - at `$.tools`"),
        ('{"text": 3}', "Expected `str`"),
        ('{"prompt": "a", "completion": null}', "Expected `str`"),
    ],
)
def test_malformed_row_is_named_by_its_line(tmp_path, line, error):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(DataError) as raised:
        list(read_records([path], None, MODEL))
    assert str(raised.value).startswith(f"{path}, line 3: ")
    assert error in str(raised.value)


def test_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\0\0\xff")
    with pytest.raises(DataError, match=r"neither \.jsonl nor text in UTF-8"):
        list(read_records([tmp_path / "model.gguf"], None, MODEL))
    (tmp_path / "late.txt").write_bytes(b"a" * 70_000 + b"\xff")
    with pytest.raises(DataError, match=r"late\.txt: not text in UTF-8: invalid start byte at byte 70000"):
        list(read_records([tmp_path / "late.txt"], None, MODEL))


@pytest.mark.parametrize("name", ["table.csv", "chats.json", "rows.parquet"])
def test_table_is_not_trained_on_as_text(tmp_path, name):
    (tmp_path / name).write_text("prompt,completion\na,b\n")
    with pytest.raises(DataError, match=r"rows to fine-tune on are read from \.jsonl"):
        list(read_records([tmp_path], "completion", MODEL))


def test_runs_and_the_model_are_no_texts(tmp_path):
    (tmp_path / "plain.txt").write_text("words")
    for folder, name in (("run", "manifest.json"), ("run", "events.jsonl"), ("model", "config.json")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text('{"step": 1}')
    records = [record for _, record in read_records([tmp_path], None, tmp_path / "model")]
    assert records == [Text(text="words")]
