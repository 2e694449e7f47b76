"""Generate text from a checkpoint: `python -m evener.worker.generate MODEL <prompts`.

MODEL is JSON: {"checkpoint", "shape"}. Each line of standard input is a prompt, JSON again: {"prompt": [ids],
"num_tokens", "temperature", "top_k", "seed"}. For each it prints the ids that continue it, one a line, and then an
empty line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from evener.core.base.decoding import from_json
from evener.core.base.errors import exit_status_of
from evener.core.model.shape import GPTShape
from evener.worker.state.checkpoint import load_weights
from evener.worker.train.model import GPT


class CheckpointedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model that generates."""

    checkpoint: str
    shape: GPTShape


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The text to continue, and how to choose each token."""

    prompt: list[int]
    num_tokens: int
    temperature: float
    top_k: int | None
    seed: int


@torch.no_grad()
def print_tokens() -> None:
    """Print the ids of the tokens that continue each prompt; CheckpointError if the checkpoint is damaged."""
    loaded = from_json(sys.argv[1], CheckpointedModel)
    model = GPT(loaded.shape).eval()
    load_weights(Path(loaded.checkpoint), model)
    for line in sys.stdin:
        request = from_json(line, Prompt)
        generator = torch.Generator().manual_seed(request.seed)
        tokens = torch.tensor([request.prompt])
        for _ in range(request.num_tokens):
            tokens = model.generate(tokens, 1, request.temperature, request.top_k, generator)
            print(int(tokens[0, -1]), flush=True)
        print(flush=True)


if __name__ == "__main__":
    sys.exit(exit_status_of(print_tokens))
