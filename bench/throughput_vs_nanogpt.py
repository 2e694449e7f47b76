"""evener's loop beside nanoGPT's model trained in its way: one process, a step of one and a step of the other.

    python bench/throughput_vs_nanogpt.py --nanogpt DIR [--dropout 0.2] [--compile] [--dtype bf16] [--steps 20]

DIR is a checkout of nanoGPT. The ratio is tokens/s of evener / tokens/s of nanoGPT, the median of pairs. With --compile
both run torch.compile on the whole model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator

from common import evener_steps, load_nanogpt_module, nanogpt_checkout, resolve_benchmark_run

from evener.core.run.resolve import ResolvedRun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=nanogpt_checkout, required=True, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", default="fp32", help="evener's; nanoGPT trains in fp32 on a CPU")
    options = parser.parse_args()
    for variable in ("RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)

    from evener.worker.train.run import join

    flags = ["--dropout", str(options.dropout), "--dtype", options.dtype]
    flags += ["--compile", "on" if options.compile else "off"]
    what = resolve_benchmark_run("char", options.batch, options.steps, *flags)
    seconds: dict[str, list[float]] = {"evener": [], "nanoGPT": []}
    with join(what.spec, what) as run:
        ours, theirs = evener_steps(run, what), nanogpt_steps(what, options)
        began = time.perf_counter()
        next(theirs)
        next(theirs)
        print(f"nanoGPT's first two steps took {time.perf_counter() - began:.1f} s", flush=True)
        for _ in range(options.steps - 1):
            for name, steps in (("evener", ours), ("nanoGPT", theirs)):
                began = time.perf_counter()
                took = next(steps)
                if name == "evener" and not seconds[name]:
                    print(f"evener's rehearsal and first step took {time.perf_counter() - began:.1f} s", flush=True)
                seconds[name].append(took)
    ratios = [theirs / ours for theirs, ours in zip(seconds["nanoGPT"], seconds["evener"], strict=True)]
    for name, values in seconds.items():
        print(f"{name:>7}: step p50 {statistics.median(values) * 1e3:.1f} ms")
    how = f"{'compiled' if options.compile else 'eager'}, {options.dtype}"
    print(
        f"evener / nanoGPT tokens/s, char, dropout {options.dropout}, {how}: {statistics.median(ratios):.3f}, "
        f"median of {len(ratios)} pairs"
    )


def nanogpt_steps(what: ResolvedRun, options: argparse.Namespace) -> Iterator[float]:
    """What nanoGPT's train.py does in a step, each time: its get_batch, clip at 1.0, its AdamW."""
    import numpy as np
    import torch

    nanogpt, shape = load_nanogpt_module(options.nanogpt), what.shape
    config = nanogpt.GPTConfig(
        block_size=shape.block_size,
        vocab_size=shape.vocab_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_embd=shape.width,
        dropout=options.dropout,
        bias=shape.bias,
    )
    model = nanogpt.GPT(config)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    if options.compile:
        model = torch.compile(model)
    data_file, block = what.corpus.split_path("train"), shape.block_size
    while True:
        began = time.perf_counter()
        data = np.memmap(data_file, dtype=np.uint16, mode="r")
        positions = torch.randint(len(data) - block, (options.batch,))
        x = torch.stack([torch.from_numpy(data[i : i + block].astype(np.int64)) for i in positions])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block].astype(np.int64)) for i in positions])
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield time.perf_counter() - began


main()
