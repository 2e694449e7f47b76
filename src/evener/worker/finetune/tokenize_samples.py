"""Turn chats, completions and texts into the samples of a corpus: `python -m evener.worker.finetune.tokenize_samples
REQUEST`.

REQUEST is JSON: {"paths", "column", "model", "out"}. The tokenizer and its chat template are those of the model's
folder, read by transformers; it runs the template in jinja2's sandbox. Of a chat, what the assistant says carries loss:
by the template's own `{% generation %}`, or else what the template adds behind a generation prompt.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import jinja2
import msgspec
import numpy as np

from evener.core.base.decoding import from_json
from evener.core.base.errors import DataError, exit_status_of
from evener.core.model.corpus import (
    BEGIN,
    CHAT_FILES,
    CORPUS_FORMAT,
    LOSS,
    TEXT,
    CorpusMeta,
    hash_bytes,
    hash_content,
    token_dtype,
)
from evener.corpus.prepare_corpus import build_folder
from evener.corpus.sample_records import Chat, Completion, Message, Record, read_records
from evener.worker.finetune.libraries import load_tokenizer

VAL_FRACTION = 0.1  # as of any text: corpus/text_cache.py
GENERATION_PATTERN = re.compile(r"\{%-?\s*generation\b")  # transformers' mark of what the assistant says
Span = tuple[int, int]  # of characters
Render = Callable[[list[Message], bool], str]  # messages, whether to add a generation prompt


class SamplesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to prepare samples."""

    paths: list[str]
    column: str | None
    model: str  # a folder
    out: str


class Sample(msgspec.Struct, frozen=True):
    """Token ids and their flags: (num_tokens,) int64 and uint8."""

    ids: np.ndarray
    flags: np.ndarray


def chat_texts(messages: list[Message], render: Render) -> list[tuple[str, list[Span]]]:
    """Return the texts to train on, each with the spans that the assistant says.

    A chat is one text. If its template shows earlier answers in another way than the last one, as those do that drop
    earlier thoughts, it is a text for each answer: what the model will see when it answers. Raise DataError if the
    template puts an answer elsewhere than behind its generation prompt.
    """
    answers = []
    for i, message in enumerate(messages):
        if message.role == "assistant":
            prompt, answered = render(messages[:i], True), render(messages[: i + 1], False)
            if not answered.startswith(prompt):
                raise DataError("the chat template does not put the answer behind its generation prompt")
            answers.append((answered, (len(prompt), len(answered))))
    whole = render(messages, False)
    if all(whole.startswith(answered) for answered, _ in answers):
        return [(whole, [span for _, span in answers])]
    return [(answered, [span]) for answered, span in answers]


class SampleTokenizer:
    """Tokenizes records with a model's own tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._tokenizer = folder, load_tokenizer(folder)
        self.vocab_size = len(self._tokenizer)
        template = self._tokenizer.chat_template
        self._marks_answers = isinstance(template, str) and GENERATION_PATTERN.search(template) is not None

    def samples(self, where: str, record: Record) -> Iterator[Sample]:
        """Yield the samples of a record. Raise DataError, which names `where`, if the template fails."""
        if isinstance(record, Chat):
            try:
                yield from self._chat_samples(record.messages)
            except (jinja2.TemplateError, TypeError, ValueError, KeyError, DataError) as error:
                raise DataError(f"{where}: the chat template of {self._folder}: {error}") from None
        elif isinstance(record, Completion):
            text = record.prompt + record.completion
            yield self._encode(text, [(len(record.prompt), len(text))], is_whole=True)
        else:
            yield self._encode(record.text, [(0, len(record.text))], is_whole=True, flag=TEXT)

    def _chat_samples(self, messages: list[Message]) -> Iterator[Sample]:
        if self._tokenizer.chat_template is None:
            raise DataError("it has none: it is no model for chats; take prompts with completions, or another model")
        if self._marks_answers:
            encoded = self._tokenizer.apply_chat_template(
                msgspec.to_builtins(messages), return_dict=True, return_assistant_tokens_mask=True
            )
            yield _sample(np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"]) > 0)
            return
        render = functools.cache(lambda num, prompts: self._render(messages[:num], prompts))
        for text, spans in chat_texts(messages, lambda some, prompts: render(len(some), prompts)):
            yield self._encode(text, spans, is_whole=False)

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            msgspec.to_builtins(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, spans: list[Span], *, is_whole: bool, flag: int = 0) -> Sample:
        """Encode a text; `is_whole`: with the tokenizer's tokens for the beginning and the end, which a chat has."""
        encoded = self._tokenizer(text, add_special_tokens=is_whole, return_offsets_mapping=True,
                                  return_special_tokens_mask=True, verbose=False)  # fmt: skip
        ids, added = encoded["input_ids"], encoded["special_tokens_mask"]
        carries, reached = [], 0
        for (start, end), is_added in zip(encoded["offset_mapping"], added, strict=True):
            at = start if end > start else reached  # GPT-2's tokenizer gives white space no width
            carries.append(not is_added and any(begin <= at < stop for begin, stop in spans))
            reached = max(reached, end)
        eos = self._tokenizer.eos_token_id
        if is_whole and eos is not None and (not ids or ids[-1] != eos):
            ids, carries = [*ids, eos], [*carries, False]
        if is_whole and ids and ids[-1] == eos:
            carries[-1] = True  # the model learns to stop
        return _sample(np.array(ids, dtype=np.int64), np.array(carries, dtype=bool), flag)


def _sample(ids: np.ndarray, carries_loss: np.ndarray, flag: int = 0) -> Sample:
    flags = carries_loss.astype(np.uint8) * np.uint8(LOSS)
    flags[:1] = BEGIN | flag  # the first token is predicted from nothing
    return Sample(ids, flags)


def split_records(records: list[list[Sample]]) -> dict[Literal["train", "val"], list[Sample]]:
    """Return the samples of each split: a tenth of the records is held out, and of a single text its end.

    Raise DataError if there are too few.
    """
    if len(records) == 1 and len(records[0]) == 1 and records[0][0].flags[:1] & TEXT:
        ids, flags = records[0][0].ids, records[0][0].flags
        cut = int(len(ids) * (1 - VAL_FRACTION))
        rest = flags[cut:].copy()
        rest[:1] = BEGIN | TEXT
        return {"train": [Sample(ids[:cut], flags[:cut])], "val": [Sample(ids[cut:], rest)]}
    if len(records) < 2:
        raise DataError(f"{len(records)} samples: one is held out to validate, and one at least is needed to train")
    held_out = {*random.Random(0).sample(range(len(records)), max(1, round(VAL_FRACTION * len(records))))}
    return {
        "train": [sample for i, samples in enumerate(records) if i not in held_out for sample in samples],
        "val": [sample for i, samples in enumerate(records) if i in held_out for sample in samples],
    }


def prepare_samples(request: SamplesRequest) -> None:
    """Write the corpus folder `out`, atomically."""
    folder, out = Path(request.model), Path(request.out)
    tokenizer = SampleTokenizer(folder)
    paths = list(map(Path, request.paths))
    found = [[sample for sample in tokenizer.samples(where, record) if len(sample.ids)]
             for where, record in read_records(paths, request.column)]  # fmt: skip
    splits = split_records([samples for samples in found if samples])
    files = {name: (folder / name).read_bytes() for name in ("tokenizer.json", *CHAT_FILES)
             if (folder / name).is_file()}  # fmt: skip
    kind = json.loads(files["tokenizer.json"])["model"]["type"].lower()
    dtype = token_dtype(tokenizer.vocab_size)
    with build_folder(out, may_replace=True) as partial:
        for split, samples in splits.items():
            files[f"{split}.bin"] = (
                np.concatenate([sample.ids for sample in samples]).astype(f"<{dtype[0]}{int(dtype[4:]) // 8}").tobytes()
            )
            files[f"{split}.flags.bin"] = np.concatenate([sample.flags for sample in samples]).tobytes()
        for name, content in files.items():
            _write_synced(partial / name, content)
        meta = CorpusMeta(
            format=CORPUS_FORMAT,
            name=out.absolute().name,
            tokenizer=kind,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            train_tokens=sum(len(sample.ids) for sample in splits["train"]),
            val_tokens=sum(len(sample.ids) for sample in splits["val"]),
            content_hash=hash_content(partial),
            tokenizer_hash=hash_bytes(files["tokenizer.json"]),
            num_documents=len(found),
            text_bytes=sum(path.stat().st_size for path in paths if path.is_file()),
            recipe={},
            is_samples=True,
        )
        _write_synced(partial / "meta.json", msgspec.json.format(msgspec.json.encode(meta), indent=2) + b"\n")


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def main() -> int:
    return exit_status_of(lambda: prepare_samples(from_json(sys.argv[1], SamplesRequest)))


if __name__ == "__main__":
    sys.exit(main())
