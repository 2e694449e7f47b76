"""evener's loop beside nanoGPT's model trained in its way: one process, a step of one and a step of the other.

    python bench/throughput_vs_nanogpt.py --nanogpt DIR [--threads 1] [--dropout 0.2] [--compile] [--dtype bf16]
                                          [--model gpt2] [--words 50304] [--device cuda]

DIR is a checkout of nanoGPT. The model is `char` and reads the verb corpus; with --words alone it has 4 layers of 256
and so many words. On a GPU both train in --dtype, and nanoGPT copies its batches as its train.py does. The ratio is
tokens/s of evener / tokens/s of nanoGPT, the median of pairs with its 90 % interval; pairs follow until half of it is
narrower than HALF_WIDTH. Of two pairs, evener is first in one and second in the other. With --compile both run
torch.compile on the whole model. Both have evener's setting of malloc, which keeps freed memory: without it nanoGPT's
logits cost new pages in each step, a fifth of its time with 50,304 words.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator

import msgspec
from common import evener_steps, load_nanogpt_module, median_interval, nanogpt_checkout, resolve_benchmark_run

from evener.core.run.resolve import ResolvedRun

HALF_WIDTH = 0.01  # of the ratio
MIN_PAIRS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=nanogpt_checkout, required=True, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument("--pairs", type=int, default=300, help="at most")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--model", help="char, if --words is not given")
    parser.add_argument("--words", type=int, help="the vocabulary; without --model of a model of 4 layers of 256")
    parser.add_argument("--data", help="a prepared folder [the verb corpus]")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object, last")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", default="fp32", help="evener's; nanoGPT's too on a GPU, on a CPU it has fp32")
    options = parser.parse_args()
    for variable in ("RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)

    from evener.worker.train.run import join

    flags = ["--dropout", str(options.dropout), "--dtype", options.dtype, "--threads", str(options.threads)]
    flags += ["--compile", "on" if options.compile else "off"]
    flags += ["--device", options.device]
    what = resolve_benchmark_run(options.model or "char", options.batch, options.pairs + 1, *flags, data=options.data)
    if options.words:
        size = {} if options.model else {"num_layers": 4, "num_heads": 8, "width": 256}
        shape = msgspec.structs.replace(what.shape, **size, vocab_size=options.words)
        what = msgspec.structs.replace(what, shape=shape)
    seconds: dict[str, list[float]] = {"evener": [], "nanoGPT": []}
    ratios: list[float] = []
    with join(what.spec, what) as run:
        ours, theirs = evener_steps(run, what), nanogpt_steps(what, options)
        began = time.perf_counter()
        next(theirs)
        next(theirs)
        print(f"nanoGPT's first two steps took {time.perf_counter() - began:.1f} s", flush=True)
        began = time.perf_counter()
        next(ours)
        print(f"evener's rehearsal and first two steps took {time.perf_counter() - began:.1f} s", flush=True)
        both = [("evener", ours), ("nanoGPT", theirs)]
        while len(ratios) < options.pairs - 1 and not is_precise(ratios):
            for name, steps in both:
                seconds[name].append(next(steps))
            both.reverse()
            ratios.append(seconds["nanoGPT"][-1] / seconds["evener"][-1])
    for name, values in seconds.items():
        print(f"{name:>7}: step p50 {statistics.median(values) * 1e3:.1f} ms")
    low, high = median_interval(ratios)
    model = options.model or ("4 x 256" if options.words else "char")
    model += f" of {options.words} words" if options.words else ""
    how = f"{'compiled' if options.compile else 'eager'}, {options.dtype}, threads: {options.threads}"
    print(
        f"evener / nanoGPT tokens/s, {model}, dropout {options.dropout}, {how}: {statistics.median(ratios):.3f} "
        f"({low:.3f} to {high:.3f}), median of {len(ratios)} pairs"
    )
    if options.json:
        tokens = options.batch * what.shape.block_size
        ours_s, theirs_s = (statistics.median(values) for values in seconds.values())
        print(json.dumps({
            "model": model, "dtype": options.dtype, "compiled": options.compile, "tokens": tokens,
            "flops": tokens * what.gpt_shape.flops_per_token(), "evener_step_s": ours_s, "nanogpt_step_s": theirs_s,
            "evener_tokens_per_s": tokens / ours_s, "ratio": statistics.median(ratios), "ratio_interval": [low, high],
            "pairs": len(ratios),
        }))  # fmt: skip


def is_precise(ratios: list[float]) -> bool:
    """Whether the 90 % interval of their median is narrow enough."""
    if len(ratios) < MIN_PAIRS or len(ratios) % MIN_PAIRS:
        return False
    low, high = median_interval(ratios)
    return high - low <= 2 * HALF_WIDTH


def nanogpt_steps(what: ResolvedRun, options: argparse.Namespace) -> Iterator[float]:
    """What nanoGPT's train.py does in a step, each time: its get_batch, clip at 1.0, its AdamW."""
    import numpy as np
    import torch

    from evener.worker.rank.precision import autocast

    on_gpu = options.device == "cuda"
    device = torch.device(options.device)
    if on_gpu:  # as train.py does
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    nanogpt, shape = load_nanogpt_module(options.nanogpt), what.gpt_shape
    config = nanogpt.GPTConfig(
        block_size=shape.block_size,
        vocab_size=shape.vocab_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_embd=shape.width,
        dropout=options.dropout,
        bias=shape.bias,
    )
    model = nanogpt.GPT(config).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), options.device)
    if options.compile:
        model = torch.compile(model)
    data_file, block = what.corpus.split_path("train"), shape.block_size
    while True:
        began = time.perf_counter()
        data = np.memmap(data_file, dtype=np.uint16, mode="r")
        positions = torch.randint(len(data) - block, (options.batch,))
        x = torch.stack([torch.from_numpy(data[i : i + block].astype(np.int64)) for i in positions])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block].astype(np.int64)) for i in positions])
        if on_gpu:
            x, y = (batch.pin_memory().to(device, non_blocking=True) for batch in (x, y))
        with autocast(device, options.dtype) if on_gpu else contextlib.nullcontext():
            _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        yield time.perf_counter() - began


main()
