"""Does evener learn what nanoGPT learns? Its own files train beside evener, and both are judged by the same code.

    python bench/loss_vs_nanogpt.py --nanogpt DIR [--data FOLDER] [--batches 12:1000,64:300] [--seeds 1,2,3]

DIR is a checkout of nanoGPT, whose train.py runs as it is. The shape is the one that its README names for a processor;
prepared folder, schedule, optimizer and tokens are the same, in fp32 and without dropout. What counts is the mean loss
over the whole validation split: all weights are loaded into nanoGPT's model, which reads it in the same blocks.

Equal terms need three things. nanoGPT's cosine ends at step lr_decay_iters, evener's at its last step, steps - 1: that
is what nanoGPT is told. It saves at the top of its loop: what it saves at step N are the weights after N updates, and
the one more that it makes then is not kept. And its seed stands in its text: a configuration file, which is Python,
changes it.

The exit status is 1 where the mean over seeds of evener's default is worse than nanoGPT's by more than the spread,
which is the largest difference between two seeds of one program.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from common import ensure_verb_corpus, load_nanogpt_module, nanogpt_checkout
from safetensors.torch import load_file
from torch import Tensor

from evener.core.model.corpus import Corpus, load_corpus
from evener.core.run.run_spec import TrainSpec
from evener.core.run.rundir import SAMPLERS, RunDir
from evener.worker.train.gpt2 import gpt2_name

BLOCK_SIZE = 64
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": BLOCK_SIZE, "dropout": 0.0, "bias": False}
LR, MIN_LR, WARMUP, BETA2 = 1e-3, 1e-4, 100, 0.99  # nanoGPT's for characters; the rest is both programs' default
VAL_BATCH = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=nanogpt_checkout, required=True, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument("--data", type=Path, help="a prepared folder [data/verbs]")
    parser.add_argument("--batches", default="12:1000,64:300", help="sequences of a batch : steps, …")
    parser.add_argument("--seeds", default="1,2,3")
    options = parser.parse_args()
    data = load_corpus(options.data or ensure_verb_corpus())
    model = load_nanogpt_module(options.nanogpt)
    programs = ["nanoGPT", *SAMPLERS]
    worse = False
    print("| batch | steps | seed |", *(f"{name} |" for name in programs))
    print("|--:|--:|--:|" + "--:|" * len(programs), flush=True)
    for pair in options.batches.split(","):
        batch, steps = map(int, pair.split(":"))
        losses: dict[str, list[float]] = {name: [] for name in programs}
        for seed in map(int, options.seeds.split(",")):
            with tempfile.TemporaryDirectory() as work:
                for name in programs:
                    if name == "nanoGPT":
                        weights = train_nanogpt(options.nanogpt, data, Path(work), batch, steps, seed)
                    else:
                        weights = train_evener(data, Path(work) / name, batch, steps, seed, name)
                    losses[name].append(val_loss(model, weights, data))
            print(f"| {batch} | {steps} | {seed} |", *(f"{values[-1]:.4f} |" for values in losses.values()), flush=True)
        mean = {name: statistics.mean(values) for name, values in losses.items()}
        print(f"| {batch} | {steps} | mean |", *(f"{value:.4f} |" for value in mean.values()))
        spread = max(max(values) - min(values) for values in losses.values())
        print(f"| {batch} | {steps} | spread |", *(f"{max(v) - min(v):.4f} |" for v in losses.values()), flush=True)
        worse = worse or mean[TrainSpec().sampling] - mean["nanoGPT"] > spread
    print(f"evener is {'worse than nanoGPT, beyond' if worse else 'not worse than nanoGPT beyond'} the spread of seeds")
    return int(worse)


def train_evener(corpus: Corpus, out: Path, batch: int, steps: int, seed: int, sampling: str) -> dict[str, Tensor]:
    """evener's weights after `steps`, by nanoGPT's names."""
    settings = {
        "data": os.path.abspath(corpus.path),
        "out": out,
        "model": "char",
        "num-layers": SHAPE["n_layer"],
        "num-heads": SHAPE["n_head"],
        "width": SHAPE["n_embd"],
        "block-size": SHAPE["block_size"],
        "dropout": SHAPE["dropout"],
        "batch": batch,
        "steps": steps,
        "seed": seed,
        "sampling": sampling,
        "lr": LR,
        "min-lr": MIN_LR,
        "warmup": WARMUP,
        "beta2": BETA2,
        "dtype": "fp32",
        "compile": "off",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "eval-every": 0,
        "checkpoint-every": 0,
    }
    run_command(
        [sys.executable, "-m", "evener.worker", *(f"--{name}={value}" for name, value in settings.items())], out.parent
    )
    weights = load_file(RunDir(out).checkpoint_path(steps) / "weights.safetensors")
    return {f"transformer.{gpt2_name(name)}": weight for name, weight in weights.items()}


def train_nanogpt(checkout: Path, corpus: Corpus, work: Path, batch: int, steps: int, seed: int) -> dict[str, Tensor]:
    """nanoGPT's weights after `steps`. It runs in a folder of its own, with links to corpus and configurator."""
    data = work / "data" / "corpus"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        (data / f"{split}.bin").symlink_to(Path(corpus.split_path(split)).absolute())
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.vocab_size}))
    (work / "configurator.py").symlink_to(checkout / "configurator.py")
    (work / "seed.py").write_text(f"_seed = torch.manual_seed\ntorch.manual_seed = lambda _: _seed({seed})\n")
    settings = SHAPE | {
        "dataset": "corpus",
        "out_dir": "out",
        "batch_size": batch,
        "gradient_accumulation_steps": 1,
        "learning_rate": LR,
        "min_lr": MIN_LR,
        "warmup_iters": WARMUP,
        "lr_decay_iters": steps - 1,
        "beta2": BETA2,
        "max_iters": steps,
        "eval_interval": steps,
        "eval_iters": 1,
        "always_save_checkpoint": True,
        "device": "cpu",
        "dtype": "float32",
        "compile": False,
    }
    argv = [sys.executable, str(checkout / "train.py"), "seed.py"]
    run_command([*argv, *(f"--{name}={value}" for name, value in settings.items())], work)
    checkpoint = torch.load(work / "out" / "ckpt.pt", weights_only=True)
    assert checkpoint["iter_num"] == steps
    weights: dict[str, Tensor] = checkpoint["model"]
    return weights


def run_command(argv: list[str], folder: Path) -> None:
    """The program to its end; its last words where it fails."""
    done = subprocess.run(argv, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)}: exit status {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


@torch.no_grad()
def val_loss(nanogpt: ModuleType, weights: dict[str, Tensor], corpus: Corpus) -> float:
    """Mean loss of every token of the validation split but its first, read in blocks end to end."""
    with contextlib.redirect_stdout(None):  # it tells its size
        model = nanogpt.GPT(nanogpt.GPTConfig(vocab_size=corpus.vocab_size, **SHAPE)).eval()
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # it is tied to the token embedding
    assert not unknown, unknown
    tokens = torch.from_numpy(np.fromfile(corpus.split_path("val"), dtype=corpus.dtype).astype(np.int64))
    loss_sum, whole = 0.0, (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    inputs, targets = tokens[:whole].view(-1, BLOCK_SIZE), tokens[1 : whole + 1].view(-1, BLOCK_SIZE)
    for x, y in zip(inputs.split(VAL_BATCH), targets.split(VAL_BATCH), strict=True):
        loss_sum += model(x, y)[1].item() * y.numel()
    if rest := len(tokens) - 1 - whole:
        loss_sum += model(tokens[None, whole:-1], tokens[None, whole + 1 :])[1].item() * rest
    return loss_sum / (len(tokens) - 1)


if __name__ == "__main__":
    sys.exit(main())
