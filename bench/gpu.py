"""What holds on one GPU: a series of checks and measurements of at most eight minutes, appended to bench/gpu.jsonl.

    python bench/gpu.py --nanogpt DIR [--site DIR] [--only NAME,…]
    python bench/gpu.py --device cpu --quick --results FILE

Needs Python, a torch that sees the GPU, and this source tree: it is imported from here, and whatever else is missing
from the wheels or packages in --site. Each section is a program of its own with a time limit, so that one that fails,
hangs or breaks the device is a row with its error, and the next one begins. --quick runs the same sections with a model
of 0.1M parameters. `make docs-generate` writes the newest rows of each device to docs/figures/gpu.md.

    tests     the tests of tests/gpu
    nanogpt   tokens/s and MFU of gpt2 beside nanoGPT's model and its loop, both compiled and in bf16, in one run
    compute   the operations of a step: evener bench --preset compute
    one       one rank, uncompiled, beside its prediction
    two       two ranks that share the GPU, by Gloo, beside their prediction
    mixed     a rank on the GPU and one on the CPU, by Gloo, with shares of 15 : 1
    sharded   weights sharded by FSDP2 over a group of one (NCCL), beside the same steps without
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("gpu.jsonl")
TOTAL_S = 480.0
NUM_TOKENS = 1 << 20  # of the corpus, which is random: only times and equal losses are of interest
PADDED_VOCAB = 50304  # nanoGPT's: a multiple of 64
MIXED_PROGRAM = """
import os, runpy, sys
device = sys.argv.pop(1)
sys.argv += ["--device", device if os.environ["RANK"] == "0" else "cpu"]
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument("--site", type=Path, metavar="DIR", help="wheels or installed packages that Python lacks here")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--only", metavar="NAME,…", help=f"of {', '.join(SECTIONS)} [all]")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="rows are appended to it")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # runs it in this process, in --folder
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        print(json.dumps(SECTIONS[options.section][1](options)), flush=True)
        return
    names = options.only.split(",") if options.only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(SECTIONS)}")
    with tempfile.TemporaryDirectory(prefix="evener-gpu-") as temporary:
        run_sections(names, options, Path(temporary))


def run_sections(names: list[str], options: argparse.Namespace, folder: Path) -> None:
    """Run the sections one after the other, and append a row for each."""
    env = environment(options, folder)
    began, device = time.monotonic(), device_names(options, env)
    for name in names:
        limit_s = min(SECTIONS[name][0], TOTAL_S - (time.monotonic() - began))
        section_began = time.monotonic()
        found = run_section(name, options, folder, env, limit_s) if limit_s > 1 else {"error": "no time left"}
        took_s = round(time.monotonic() - section_began, 1)
        row = {"section": name, **device, "date": time.strftime("%Y-%m-%d"), "quick": options.quick, "took_s": took_s}
        line = json.dumps(found | row)
        with options.results.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def run_section(name: str, options: argparse.Namespace, folder: Path, env: dict[str, str],
                limit_s: float) -> dict[str, Any]:  # fmt: skip
    """Run one section in a process group of its own; return what it found, or its error."""
    argv = [sys.executable, __file__, "--section", name, "--folder", str(folder), "--device", options.device]
    argv += ["--quick"] if options.quick else []
    argv += ["--nanogpt", str(options.nanogpt.absolute())] if options.nanogpt else []
    with subprocess.Popen(
        argv, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            return {"error": f"not finished after {limit_s:.0f} s: {last_line(text)}"}
    if process.returncode:
        return {"error": last_line(text)}
    found: dict[str, Any] = json.loads(last_line(text))
    return found


def last_line(text: str) -> str:
    """Return the last line of an output that is not empty, or what it says of an error."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no output"]
    return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])


def environment(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the environment of the sections: evener from this tree, wheels unpacked, nothing in the home folder."""
    site = folder / "site"
    for wheel in sorted(options.site.glob("*.whl")) if options.site else []:
        zipfile.ZipFile(wheel).extractall(site)
    path = [ROOT / "src", *([site, options.site.absolute()] if options.site else [])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_STATE_HOME": str(folder / "state"),
    }


def device_names(options: argparse.Namespace, env: dict[str, str]) -> dict[str, Any]:
    """Return the names of the device and of torch's version."""
    code = "import torch; print(torch.__version__); print(torch.cuda.get_device_name() if torch.cuda.is_available()"
    done = subprocess.run([sys.executable, "-c", f"{code} else '')"], env=env, capture_output=True, text=True)
    version, gpu, *_ = [*done.stdout.splitlines(), "", ""]
    name = gpu if options.device == "cuda" else platform.machine()
    return {"device": name or "no GPU that torch can use", "torch": version or last_line(done.stderr)}


# --- sections: run in a process of their own --------------------------------------------------------------------------


def run_tests(options: argparse.Namespace) -> dict[str, Any]:
    """Run tests/gpu; raise where one failed."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "gpu")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {last_line(done.stdout + done.stderr)}")
    return {"result": last_line(done.stdout)}


def measure_nanogpt(options: argparse.Namespace) -> dict[str, Any]:
    """Measure steps of evener and nanoGPT in turns."""
    if options.nanogpt is None:
        return {"left_out": "needs --nanogpt DIR"}
    argv = [sys.executable, str(ROOT / "bench" / "throughput_vs_nanogpt.py"), "--nanogpt", str(options.nanogpt),
            "--device", options.device, "--data", str(corpus(options)), "--json"]  # fmt: skip
    if options.quick:
        argv += ["--model", "tiny", "--batch", "2", "--pairs", "4"]
    else:
        argv += ["--model", "gpt2", "--words", str(PADDED_VOCAB), "--batch", "16", "--pairs", "61", "--compile",
                 "--dtype", "bf16"]  # fmt: skip
    found: dict[str, Any] = json.loads(last_line(run_program(argv)))
    return found | {"published_mfu": published_mfu(found["flops"], found["evener_step_s"], options.device)}


def published_mfu(flops: float, step_s: float, device: str) -> float | None:
    """Return the share of the device's published bf16 peak; None for a CPU, or a device that the table lacks."""
    import torch

    from evener.core.base.errors import UsageError
    from evener.core.cluster.hardware import parse_hardware

    try:
        peak = parse_hardware(torch.cuda.get_device_name()).matmul_flops.get("bf16") if device == "cuda" else None
    except UsageError:
        return None
    return flops / step_s / peak if peak else None


def measure_compute(options: argparse.Namespace) -> dict[str, Any]:
    """Return the table of operations."""
    size = ["--model", "tiny", "--batch", "2", "--seconds", "1"] if options.quick else ["--model", "gpt2",
            "--vocab-size", str(PADDED_VOCAB), "--batch", "16", "--dtype", "bf16", "--seconds", "20"]  # fmt: skip
    flags = ["--preset", "compute", "--device", options.device, *size, "--json"]
    found: dict[str, Any] = json.loads(run_evener("bench", *flags))
    return found


def train_one(options: argparse.Namespace) -> dict[str, Any]:
    """Train on one rank, after this machine was probed."""
    return train(options, ranks=1)


def train_two(options: argparse.Namespace) -> dict[str, Any]:
    """Train on two ranks that share the device."""
    return train(options, ranks=2)


def train(options: argparse.Namespace, *, ranks: int) -> dict[str, Any]:
    """Probe the device if that was not done yet, train on it, and return the run's figures and its prediction."""
    fleet, out = options.folder / "fleet.toml", options.folder / f"run-{ranks}"
    if not fleet.exists():
        fleet.write_text('[hosts.here]\naddress = "local"\nranks = 1\n')
        model, seconds = ("tiny", "1") if options.quick else ("gpt2", "6")
        flags = ("--model", model, "--seconds", seconds, "--device", options.device)
        run_evener("probe", "host", "--fleet", str(fleet), *flags)
    hosts = options.folder / f"fleet-{ranks}.toml"
    hosts.write_text(fleet.read_text().replace("ranks = 1\n", f"ranks = {ranks}\n", 1))
    more = ["--fleet", str(hosts), "--trust", "--device", options.device, "--shares", "equal"]
    run_evener("train", *train_flags(options, out, *more), *(["--backend", "gloo"] if ranks > 1 else []))
    return figures_of(out)


def train_mixed(options: argparse.Namespace) -> dict[str, Any]:
    """Train on a rank of the device and one of the CPU, with unequal shares."""
    script, out = options.folder / "mixed.py", options.folder / "run-mixed"
    script.write_text(MIXED_PROGRAM)
    flags = train_flags(options, out, "--shares", "15:1", "--threads", str(max(1, (os.cpu_count() or 2) // 2)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run_program([sys.executable, *torchrun, str(script), options.device, *flags])
    return figures_of(out)


def train_sharded(options: argparse.Namespace) -> dict[str, Any]:
    """Take the same steps with and without sharded weights, over a group of this process alone."""
    import torch
    import torch.distributed as dist

    from evener.core.model.shape import preset_shape
    from evener.core.run.roster import Member, Roster, parse_sync
    from evener.core.run.run_spec import TrainSpec
    from evener.worker.rank.precision import autocast
    from evener.worker.sync.fully_sharded import shard_module
    from evener.worker.train.model import GPT
    from evener.worker.train.optim import adamw

    on_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    store = dist.FileStore(str(options.folder / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device if on_gpu else None)
    shape = preset_shape("tiny", 256) if options.quick else preset_shape("gpt2", PADDED_VOCAB)
    batch, num_steps = (2, 3) if options.quick else (8, 12)
    member = Member(rank=0, host="here", device=str(device), dtype="fp32", share=batch, micro_batch=batch)
    roster = Roster(members=[member], sync=parse_sync("fsdp"), backend="none")
    found: dict[str, list[list[float]]] = {}
    for name in ("whole", "sharded"):
        torch.manual_seed(0)
        model = GPT(shape).to(device)
        if name == "sharded":
            group: Any = SimpleNamespace(gradient_group=dist.group.WORLD, host_group=None, device=device)
            shard_module(model, group, roster)
        optimizer = adamw(model, TrainSpec(lr=1e-3))
        tokens = torch.randint(shape.vocab_size, (batch, shape.block_size + 1)).to(device)
        steps = found[name] = []
        for _ in range(num_steps):
            began = time.perf_counter()
            with autocast(device, "fp32"):
                loss = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append([float(loss), time.perf_counter() - began])  # waits for the device
        del model, optimizer
    dist.destroy_process_group()
    seconds = {name: sorted(took_s for _, took_s in steps[1:]) for name, steps in found.items()}
    step_s = {name: took[len(took) // 2] for name, took in seconds.items()}
    off = max(abs(ours[0] / theirs[0] - 1) for ours, theirs in zip(found["sharded"], found["whole"], strict=True))
    return {"backend": backend, "step_s": step_s["sharded"], "whole_step_s": step_s["whole"], "loss_off": off}


SECTIONS: dict[str, tuple[float, Callable[[argparse.Namespace], dict[str, Any]]]] = {  # with their limits in seconds
    "nanogpt": (130, measure_nanogpt),
    "compute": (60, measure_compute),
    "one": (70, train_one),
    "two": (60, train_two),
    "mixed": (60, train_mixed),
    "sharded": (40, train_sharded),
    "tests": (110, run_tests),
}


def corpus(options: argparse.Namespace) -> Path:
    """Return a folder as nanoGPT prepares one, of random tokens of GPT-2's vocabulary; for tiny sizes one of bytes."""
    folder: Path = options.folder / "corpus"
    if options.quick and not folder.exists():
        run_evener("data", "text", str(ROOT / "CHANGELOG.md"), "--tokenizer", "byte", "--out", str(folder))
    elif not folder.exists():
        folder.mkdir()
        draw = random.Random(0)
        for split, part in (("train", 1), ("val", 16)):
            tokens = array("H", (draw.randrange(50257) for _ in range(NUM_TOKENS // part)))
            (folder / f"{split}.bin").write_bytes(tokens.tobytes())
    return folder


def train_flags(options: argparse.Namespace, out: Path, *flags: str) -> list[str]:
    """Return the flags of a short training of which only its steps are of interest."""
    model, steps = ("tiny", "6") if options.quick else ("gpt2", "16")
    return ["--data", str(corpus(options)), "--model", model, "--batch", "16", "--steps", steps, "--compile", "off",
            "--sync", "ddp", "--eval-tokens", "2048", "--eval-every", "0", "--checkpoint-every", "0",
            "--out", str(out), *flags]  # fmt: skip


def figures_of(out: Path) -> dict[str, Any]:
    """Return what a run recorded, and what was predicted of it."""
    from evener.core.run.rundir import RunDir
    from evener.report.read.run_summary import summarize_run, summary_json

    run = summarize_run(RunDir(out))
    figures, roster = summary_json(run), run.manifest.roster
    names = ("tokens_per_s", "step_p50_s", "loss", "replicas_agree", "peak_memory_bytes")
    return {name: figures[name] for name in names} | {
        "predicted_step_s": figures["predicted"] and figures["predicted"]["step_s"],
        "backend": roster.backend,
        "shares": roster.shares,
        "dtypes": roster.dtypes_text,
    }


def run_evener(*args: str) -> str:
    """Run evener's command; return its standard output."""
    return run_program([sys.executable, "-m", "evener", *args])


def run_program(argv: list[str]) -> str:
    """Run a program; return its standard output. End with its last line if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(last_line(f"{done.stdout}\n{done.stderr}"))
    return done.stdout


if __name__ == "__main__":
    main()
