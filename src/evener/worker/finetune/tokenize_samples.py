"""Turn chats, completions and texts into the samples of a corpus: `python -m evener.worker.finetune.tokenize_samples
REQUEST`.

REQUEST is JSON: {"paths", "column", "model", "out"}. The tokenizer and its chat template are those of the model's
folder, read by transformers; it runs the template in jinja2's sandbox. Of a chat, what the assistant says carries loss:
by the template's own `{% generation %}`, or else what the template adds behind a generation prompt.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import jinja2
import msgspec
import numpy as np
from tokenizers import Tokenizer

from evener.core.base.decoding import from_json
from evener.core.base.errors import DataError, exit_status_of
from evener.core.base.file_io import read_file, write_atomic
from evener.core.model.corpus import (
    BEGIN,
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
        if message.role == "assistant" and i > 0:  # a greeting answers nothing
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
        self._engine = _without_trimmed_offsets(self._tokenizer.backend_tokenizer)
        self.vocab_size = len(self._tokenizer)
        template = self._tokenizer.chat_template
        self._marks_answers = isinstance(template, str) and GENERATION_PATTERN.search(template) is not None

    def samples(self, where: str, record: Record) -> Iterator[Sample]:
        """Yield the samples of a record. Raise DataError, which names `where`, if the template fails."""
        if isinstance(record, Chat):
            try:
                yield from self._chat_samples(record.messages)
            except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, DataError) as error:
                raise DataError(f"{where}: the chat template of {self._folder}: {error}") from None
        elif isinstance(record, Completion):
            # Each alone, as the prompt is when the model is to complete it.
            prompt = self._engine.encode(record.prompt).ids
            prompt = prompt[:-1] if prompt[-1:] == [self._tokenizer.eos_token_id] else prompt
            completion = [*self._engine.encode(record.completion, add_special_tokens=False).ids, *self._end()]
            yield _sample(prompt + completion, [False] * len(prompt) + [True] * len(completion))
        else:
            ids = self._engine.encode(record.text).ids
            ids += [] if ids[-1:] == self._end() else self._end()
            yield _sample(ids, [True] * len(ids), TEXT)

    def _end(self) -> list[int]:
        """Return the token by which a text ends, so that the model learns to stop; [] if there is none."""
        eos = self._tokenizer.eos_token_id
        return [] if eos is None else [eos]

    def _chat_samples(self, messages: list[Message]) -> Iterator[Sample]:
        if not messages:
            raise DataError("the chat has no message")
        if self._tokenizer.chat_template is None:
            raise DataError("it has none: it is no model for chats; take prompts with completions, or another model")
        if self._marks_answers:
            encoded = self._tokenizer.apply_chat_template(
                msgspec.to_builtins(messages), return_dict=True, return_assistant_tokens_mask=True
            )
            yield _sample(encoded["input_ids"], [mask > 0 for mask in encoded["assistant_masks"]])
            return
        for text, spans in chat_texts(messages, self._render):
            answer = self._engine.encode(text, add_special_tokens=False)  # the template has those that a chat needs
            yield _sample(answer.ids, [any(begin <= at < end for begin, end in spans) for at, _ in answer.offsets])

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            msgspec.to_builtins(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert isinstance(text, str)
        return text


def _without_trimmed_offsets(engine: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose tokens lie where their text does: GPT-2's gives white space no width.

    It neither cuts nor pads, as some files ask for.
    """
    state = json.loads(engine.to_str()) | {"truncation": None, "padding": None}
    for part in (post := state.get("post_processor") or {}, *post.get("processors", [])):
        if "trim_offsets" in part:
            part["trim_offsets"] = False
    return Tokenizer.from_str(json.dumps(state))


def _sample(ids: list[int], carries_loss: list[bool], flag: int = 0) -> Sample:
    flags = np.array(carries_loss, dtype=np.uint8) * np.uint8(LOSS)
    flags[:1] = BEGIN | flag  # the first token is predicted from nothing
    return Sample(np.array(ids, dtype=np.int64), flags)


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
    found, num_chats = [], 0
    for where, record in read_records(paths, request.column, folder):
        found.append([sample for sample in tokenizer.samples(where, record) if len(sample.ids)])
        num_chats += isinstance(record, Chat)
    splits = split_records([samples for samples in found if samples])
    files = {"tokenizer.json": read_file(folder / "tokenizer.json")}
    kind = json.loads(files["tokenizer.json"])["model"].get("type", "BPE").lower()
    dtype = token_dtype(tokenizer.vocab_size)
    with build_folder(out, may_replace=True) as partial:
        for split, samples in splits.items():
            ids = np.concatenate([sample.ids for sample in samples])
            files[f"{split}.bin"] = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            files[f"{split}.flags.bin"] = np.concatenate([sample.flags for sample in samples]).tobytes()
        for name, content in files.items():
            write_atomic(partial / name, content)
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
            is_chat=num_chats > len(found) / 2,
        )
        write_atomic(partial / "meta.json", msgspec.json.format(msgspec.json.encode(meta), indent=2) + b"\n")


def main() -> int:
    return exit_status_of(lambda: prepare_samples(from_json(sys.argv[1], SamplesRequest)))


if __name__ == "__main__":
    sys.exit(main())
