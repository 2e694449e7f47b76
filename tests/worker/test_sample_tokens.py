"""Records become tokens as transformers makes them; what carries loss is what the model is to say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import pre_tokenizers, processors

from evener.core.base.errors import DataError
from evener.core.model.corpus import BEGIN, LOSS, TEXT
from evener.corpus.sample_records import Chat, Completion, Message, Record, Text, read_records
from evener.worker.finetune.tokenize_samples import (
    Sample,
    SamplesRequest,
    SampleTokenizer,
    prepare_samples,
    split_records,
)

from ..pretrained import TEMPLATE, make_chats, make_tokenizer

MARKED = TEMPLATE.replace(
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}",
    "<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}<|im_end|>\n{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}",
)
# Thoughts of earlier answers are dropped, as in Qwen3's template.
THINKING = TEMPLATE.replace(
    "{{ message['content'] }}<|im_end|>",
    "{% if message['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ message['content'] }}<|im_end|>",
)
FAILING = "{{ raise_exception('roles must alternate') }}"


def chat(*contents: str) -> Chat:
    roles = ("user", "assistant") * len(contents)
    return Chat(messages=[Message(role=role, content=text) for role, text in zip(roles, contents, strict=False)])


def decoded(tokenizer, samples: list[Sample]) -> list[tuple[str, str]]:
    """Return the text of each sample, and of it what carries loss."""
    return [(tokenizer.decode(one.ids), tokenizer.decode(one.ids[(one.flags & LOSS) > 0])) for one in samples]


def tokenize(folder: Path, record: Record) -> list[tuple[str, str]]:
    samples = list(SampleTokenizer(folder).samples("row 7", record))
    assert all(one.flags[0] & BEGIN and not one.flags[0] & LOSS for one in samples)
    assert all(not (one.flags[1:] & BEGIN).any() for one in samples)
    return decoded(transformers.AutoTokenizer.from_pretrained(folder), samples)


@pytest.mark.parametrize("trims_offsets", [False, True])  # GPT-2's tokenizer gives white space no width
def test_only_answers_of_a_chat_carry_loss(tmp_path, trims_offsets):
    make_tokenizer(tmp_path)
    if trims_offsets:
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer.save_pretrained(tmp_path)
    contents = ("why? 🐎\n", "yes, no\n\nthe horse 🐎🛒", "and\t", " then ")
    ((text, said),) = tokenize(tmp_path, chat(*contents))
    assert said == "yes, no\n\nthe horse 🐎🛒<|im_end|>\n then <|im_end|>\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": message.role, "content": message.content} for message in chat(*contents).messages]
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)


def test_mask_equals_that_of_transformers_generation_mark(tmp_path):
    make_tokenizer(tmp_path / "plain")
    make_tokenizer(tmp_path / "marked", MARKED)
    chats = make_chats(tmp_path / "chats.jsonl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "marked")
    plain, marked = SampleTokenizer(tmp_path / "plain"), SampleTokenizer(tmp_path / "marked")
    rows = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    for messages, (where, record) in zip(rows, read_records([chats], None, tmp_path / "plain"), strict=True):
        theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        for ours in (plain, marked):
            (sample,) = ours.samples(where, record)
            assert sample.ids.tolist() == theirs["input_ids"]
            assert (sample.flags & LOSS).tolist() == theirs["assistant_masks"]


def test_template_that_changes_earlier_answers_gives_a_sample_an_answer(tmp_path):
    make_tokenizer(tmp_path, THINKING)
    first, second = tokenize(tmp_path, chat("a", "b", "c", "d"))
    assert first[1] == "<think></think>b<|im_end|>\n"
    assert second[1] == "<think></think>d<|im_end|>\n"
    assert second[0].count("<think>") == 1  # as the model will see it


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("the ", "horse"), ("the\n\n", "horse runs\n"), ("the", " horse"), ("🐎", "🛒🐎"), ("a \n", " \n b"), ("", "b")],
)
def test_completion_and_its_end_carry_loss(tmp_path, prompt, completion):
    make_tokenizer(tmp_path)
    ((text, said),) = tokenize(tmp_path, Completion(prompt=prompt, completion=completion))
    assert text == f"{prompt}{completion}<|endoftext|>"
    assert said == (f"{completion}<|endoftext|>" if prompt else "<|endoftext|>")  # nothing precedes a first token


def test_beginning_that_the_tokenizer_adds_carries_no_loss(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save_pretrained(tmp_path)
    completed = tokenize(tmp_path, Completion(prompt="a", completion=" b"))
    assert completed == [("<|im_start|>a b<|endoftext|>", " b<|endoftext|>")]
    assert tokenize(tmp_path, Text(text="a b")) == [("<|im_start|>a b<|endoftext|>", "a b<|endoftext|>")]


def test_template_that_fails_is_named_with_its_line(tmp_path):
    make_tokenizer(tmp_path, FAILING)
    with pytest.raises(DataError, match=r"^row 7: the chat template of .*: roles must alternate$"):
        tokenize(tmp_path, chat("a", "b"))


def test_greeting_carries_no_loss_and_a_chat_without_messages_is_refused(tmp_path):
    make_tokenizer(tmp_path)
    greeted = Chat(messages=[Message(role="assistant", content="welcome"), *chat("a", "b").messages])
    ((_, of_greeted),), ((_, of_chat),) = tokenize(tmp_path, greeted), tokenize(tmp_path, chat("a", "b"))
    assert of_greeted == of_chat
    with pytest.raises(DataError, match="the chat has no message"):
        tokenize(tmp_path, Chat(messages=[]))


@pytest.mark.parametrize("padding", [None, {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
                                            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|pad|>"}])  # fmt: skip
def test_truncation_and_padding_that_a_tokenizer_stores_do_not_apply(tmp_path, padding):
    make_tokenizer(tmp_path)
    path, text = tmp_path / "tokenizer.json", Text(text="word " * 50)
    before = tokenize(tmp_path, text)
    cut = {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": cut, "padding": padding}))
    assert tokenize(tmp_path, text) == before


def test_chat_for_a_model_without_a_template_is_refused(tmp_path):
    make_tokenizer(tmp_path, None)
    with pytest.raises(DataError, match=r"^row 7: the chat template of .*: it has none: it is no model for chats"):
        tokenize(tmp_path, chat("a", "b"))


def test_tenth_of_the_records_is_held_out():
    def sample(number: int, length: int = 3, flag: int = 0) -> Sample:
        return Sample(np.full(length, number), np.array([BEGIN | flag] + [LOSS] * (length - 1), dtype=np.uint8))

    splits = split_records([[sample(i), sample(i)] for i in range(50)])
    assert (len(splits["train"]), len(splits["val"])) == (90, 10)
    held_out = {int(one.ids[0]) for one in splits["val"]}
    assert not held_out & {int(one.ids[0]) for one in splits["train"]}  # both samples of a record are in one split
    text = split_records([[sample(0, 100, TEXT)]])
    assert (len(text["train"][0].ids), len(text["val"][0].ids)) == (90, 10)
    assert text["val"][0].flags[0] == BEGIN | TEXT
    with pytest.raises(DataError, match="1 samples"):
        split_records([[sample(0)]])


def test_failed_preparation_leaves_nothing(tmp_path):
    make_tokenizer(tmp_path / "model")
    rows = make_chats(tmp_path / "chats.jsonl", 3)
    rows.write_text(rows.read_text() + "{\n")
    request = SamplesRequest(
        paths=[str(rows)], column=None, model=str(tmp_path / "model"), out=str(tmp_path / "out" / "a")
    )
    with pytest.raises(DataError, match=r"chats.jsonl, line 4: not JSON"):
        prepare_samples(request)
    assert not (tmp_path / "out").exists()
