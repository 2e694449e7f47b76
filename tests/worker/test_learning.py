"""Training reaches a bound on the loss, which reveals errors that all ranks make alike.

The corpus is a list of facts: a key, drawn at random, and the value that belongs to it. Nobody can foresee the key, so
the mean loss of a token has a floor, ln(keys) / 2. Who has read all facts comes close to it; a fact that was never read
cannot be known. AdamW hides the scale of the loss, since it divides by it; plain gradient descent shows it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evener.corpus.documents import Document, split_by_fraction
from evener.corpus.prepare_corpus import prepare

from ..conftest import ENV, TIMEOUT_S
from ..tiers import exhaustive

MARGIN = 0.15  # above the floor; what is broken misses it by as much again
MANY, FEW = 512, 16  # keys
RIGHT = {"epochs": MANY, "uniform": MANY, "plain descent": FEW}
WRONG = {
    "steps that overlap": MANY,  # as those of evener's first sampler did
    "a schedule that is over at half the steps": MANY,
    "a loss divided by the micro-batches once more": FEW,
    "a loss of which each micro-batch is the mean": FEW,
}

PROGRAM = """
import contextlib, json, sys
from unittest import mock

import numpy as np
import torch
from evener.core.base.errors import RunError
from evener.core.run.resolve import resolve
from evener.core.run.rundir import RunDir
from evener.core.run.run_spec import parse_args
from evener.worker.train import loop, optim
from evener.worker.train.model import GPT

folder = sys.argv[1]
FLAGS = ["--model=tiny", "--block-size=3", "--num-layers=1", "--num-heads=1", "--steps=60", "--warmup=6"]
FLAGS += ["--dtype=fp32", "--compile=off", "--threads=1", "--eval-tokens=1000000"]
FEW = [f"--data={folder}/few", "--batch=128", "--micro-batch=16", "--lr=0.2", "--clip=0", "--weight-decay=0"]
MANY = [f"--data={folder}/many", "--batch=240", "--lr=0.04", "--beta2=0.95"]
forward, learning_rate = GPT.forward, optim.learning_rate


def overlapping(num_positions, block_size, seed, first, count):
    draw = np.random.Generator(np.random.Philox(key=seed, counter=first // count))
    return draw.integers(num_positions, size=count)


def in_half_the_steps(step, spec):
    return learning_rate(2 * step, spec)


def descent(model, spec):
    return torch.optim.SGD(model.parameters(), lr=spec.lr, momentum=0.9)


def scaled(factor):
    return lambda self, *args: forward(self, *args) * (factor if self.training else 1)


def train(name, flags, **broken):
    places = {"sampler": "evener.worker.train.token_blocks.epoch_positions",
              "schedule": "evener.worker.train.optim.learning_rate",
              "optimizer": "evener.worker.train.loop.adamw", "scale": "evener.worker.train.model.GPT.forward"}
    out = f"{folder}/{name}"
    with contextlib.ExitStack() as stack:
        for part, by in broken.items():
            stack.enter_context(mock.patch(places[part], by))
        stack.enter_context(contextlib.redirect_stdout(None))
        try:
            loop.train(resolve(parse_args([*FLAGS, *flags, "--out", out])))
        except RunError as error:
            assert "not finite" in str(error)
            return float("inf")
    return RunDir(out).manifest().result.val_loss


few = {"optimizer": descent}
print(json.dumps({
    "epochs": train("epochs", MANY),
    "uniform": train("uniform", [*MANY, "--sampling=uniform"]),
    "plain descent": train("descent", FEW, **few),
    "steps that overlap": train("overlap", MANY, sampler=overlapping),
    "a schedule that is over at half the steps": train("schedule", MANY, schedule=in_half_the_steps),
    "a loss divided by the micro-batches once more": train("small", FEW, scale=scaled(1 / 8), **few),
    "a loss of which each micro-batch is the mean": train("large", FEW, scale=scaled(8), **few),
}))
"""


def make_facts(folder: Path, num_keys: int) -> None:
    """36,000 facts to learn, 4,000 to be asked for; a character for each key and each value."""
    draw = np.random.default_rng(0)
    values = draw.permutation(num_keys)
    keys = draw.integers(num_keys, size=40_000)
    text = "".join(chr(0x4E00 + key) + chr(0x5E00 + values[key]) for key in keys).encode()
    prepare(folder, split_by_fraction([Document("facts", len(text), text)], 0.1), tokenizer="char")


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Mean validation losses; the trainings share one process, whose start would cost more than they do."""
    folder = tmp_path_factory.mktemp("learning")
    make_facts(folder / "few", FEW)
    make_facts(folder / "many", MANY)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@exhaustive
@pytest.mark.parametrize("name", RIGHT)
def test_model_reaches_loss_bound(losses, name):
    floor = math.log(RIGHT[name]) / 2
    assert floor < losses[name] < floor + MARGIN


@exhaustive
@pytest.mark.parametrize("name", WRONG)
def test_broken_model_misses_loss_bound(losses, name):
    assert losses[name] > math.log(WRONG[name]) / 2 + 2 * MARGIN
