"""Generate text with a fine-tuned model: `python -m evener.worker.finetune.generate MODEL <prompts`.

MODEL is JSON: a FineTunedCheckpoint. Each line of standard input is a prompt, JSON again: {"prompt": text, "is_chat",
"num_tokens", "temperature", "top_k", "seed"}. After each token it prints the text so far, as JSON, and at the end an
empty line. Of a chat this is the answer; of another text, the prompt and its continuation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from evener.core.base.decoding import from_json
from evener.core.base.errors import exit_status_of
from evener.worker.finetune.fine_tuned_checkpoint import FineTunedCheckpoint
from evener.worker.finetune.libraries import load_tokenizer


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The text to continue, or the message to answer, and how to choose each token."""

    prompt: str
    is_chat: bool
    num_tokens: int
    temperature: float
    top_k: int | None
    seed: int


class TokenPrinter:
    """A streamer of transformers: it prints the text so far after each token."""

    def __init__(self, tokenizer: Any, prompt: str) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._ids: list[int] | None = None  # None: the prompt has not come by

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt, and then one token after the other."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += tokens.flatten().tolist()
        print(json.dumps(self._prompt + self._tokenizer.decode(self._ids, skip_special_tokens=True)), flush=True)

    def end(self) -> None:
        print(flush=True)


def end_of_answer(tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: the tokenizer's, and of a chat the one behind an answer.

    Most templates end an answer with a token such as <|im_end|>.
    """
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template is not None:
        answer = "ANSWER"
        chat = [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}]
        behind = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(answer)[2].strip()
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        ends += [
            token for token in ids[:1] if token in tokenizer.all_special_ids or token in tokenizer.added_tokens_decoder
        ]
    return ends


@torch.no_grad()
def print_texts() -> None:
    """Print the text that continues each prompt."""
    request = from_json(sys.argv[1], FineTunedCheckpoint)
    model, tokenizer = request.load(), load_tokenizer(Path(request.model))
    for line in sys.stdin:
        prompt = from_json(line, TextPrompt)
        torch.manual_seed(prompt.seed)
        if prompt.is_chat:
            chat = [{"role": "user", "content": prompt.prompt}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        else:
            text = prompt.prompt
        encoded = tokenizer(text, add_special_tokens=not prompt.is_chat, return_tensors="pt")
        how: dict[str, Any] = {"do_sample": prompt.temperature > 0}
        if prompt.temperature > 0:
            how |= {"temperature": prompt.temperature, "top_k": prompt.top_k or 0}
        model.generate(
            input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"], max_new_tokens=prompt.num_tokens,
            streamer=TokenPrinter(tokenizer, "" if prompt.is_chat else prompt.prompt),
            eos_token_id=end_of_answer(tokenizer) or None, pad_token_id=tokenizer.eos_token_id, **how,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(exit_status_of(print_texts))
