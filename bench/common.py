"""What the benches share."""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from evener.core.run.resolve import ResolvedRun, resolve
from evener.core.run.run_spec import parse_args

if TYPE_CHECKING:
    from evener.worker.train.run import Run


def ensure_verb_corpus() -> Path:
    """The verb corpus, made where it is missing."""
    folder = Path("data/verbs")
    if not (folder / "meta.json").exists():
        from evener.cli.data import verbs

        verbs(out=folder)
    return folder


def median_interval(values: Sequence[float], confidence: float = 0.9) -> tuple[float, float]:
    """The interval in which the median lies, by drawing the values again [bootstrap: Efron 1979]; always the same."""
    draw, num = random.Random(0), len(values)
    medians = sorted(statistics.median(draw.choices(values, k=num)) for _ in range(2000))
    tail = round((1 - confidence) / 2 * len(medians))
    return medians[tail], medians[-1 - tail]


def nanogpt_checkout(text: str) -> Path:
    """For argparse: the folder of a checkout of https://github.com/karpathy/nanoGPT."""
    folder = Path(text).absolute()
    for name in ("train.py", "model.py", "configurator.py"):
        if not (folder / name).is_file():
            raise argparse.ArgumentTypeError(f"{text}: no checkout of nanoGPT: it has no {name}")
    return folder


def load_nanogpt_module(checkout: Path) -> ModuleType:
    """nanoGPT's own model.py."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", checkout / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def torchrun_command(script: str, args: list[str]) -> list[str]:
    """The script under torchrun, two ranks that share the cores."""
    ensure_verb_corpus()
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 2) // 2))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=0.1"]
    return [sys.executable, *torchrun, script, *args]


def resolve_benchmark_run(model: str, batch: int, steps: int, *flags: str, data: str | None = None) -> ResolvedRun:
    """A run of which nothing but steps is wanted: no evaluation, no checkpoint, no dropout."""
    return resolve(
        parse_args(
            [
                *("--data", data or str(ensure_verb_corpus()), "--model", model),
                *("--batch", str(batch), "--steps", str(steps)),
                *("--dropout", "0", "--eval-every", "0", "--checkpoint-every", "0", "--verify-every", "0"),
                *("--compile", "off", "--dtype", "fp32", "--shares", "equal"),
                *("--out", str(Path(tempfile.mkdtemp()) / "run"), *flags),
            ]
        )
    )


def evener_steps(run: Run, resolved: ResolvedRun) -> Iterator[float]:
    """evener's own loop, a step each time it is asked; the seconds it took. The first rehearses: it is left out."""
    from evener.worker.probe.sustained_bench import synchronize_device
    from evener.worker.train.loop import build_model
    from evener.worker.train.optim import adamw, set_hyperparameters
    from evener.worker.train.token_blocks import TokenBlocks

    train = resolved.spec.train
    model = run.model(build_model(resolved, run.member.dtype, is_new=True))
    optimizer = run.optimizer(adamw(model, train))
    began = time.perf_counter()
    for step in run.steps(TokenBlocks(resolved.corpus, "train", resolved.shape.block_size, train.sampling)):
        set_hyperparameters(optimizer, step.index, train)
        for tokens, targets in step.micro_batches():
            with run.autocast():
                loss_sum = model(tokens, targets)
            step.backward(loss_sum)
        step.update(optimizer)
        synchronize_device(run.device)
        if step.index:
            yield time.perf_counter() - began
        began = time.perf_counter()
