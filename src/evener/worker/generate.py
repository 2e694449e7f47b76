"""Generate text from a checkpoint. `python -m evener.worker.generate REQUEST` prints a token id a line.

REQUEST is JSON: {"checkpoint", "shape", "prompt": [ids], "num_tokens", "temperature", "top_k", "seed"}.
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


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to continue a prompt with a checkpoint."""

    checkpoint: str
    shape: GPTShape
    prompt: list[int]
    num_tokens: int
    temperature: float
    top_k: int | None
    seed: int


@torch.no_grad()
def print_tokens() -> None:
    """Print the ids of the tokens that continue the prompt; CheckpointError if the checkpoint is damaged."""
    request = from_json(sys.argv[1], GenerateRequest)
    model = GPT(request.shape).eval()
    load_weights(Path(request.checkpoint), model)
    generator = torch.Generator().manual_seed(request.seed)
    tokens = torch.tensor([request.prompt])
    for _ in range(request.num_tokens):
        tokens = model.generate(tokens, 1, request.temperature, request.top_k, generator)
        print(int(tokens[0, -1]), flush=True)


if __name__ == "__main__":
    sys.exit(exit_status_of(print_tokens))
