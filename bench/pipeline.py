"""Would a pipeline by layers beat what evener has, on two unequal machines and a slow link?

    python bench/pipeline.py --data FOLDER [--setups alone,pipeline,ddp@100Mbit,…] [--dtype bf16] [--steps 2]
    python bench/pipeline.py --data FOLDER --check

d8, 16 × 256 tokens a step, on emulated hosts of 1 and ½ core with a link that the kernel shapes. A prototype trains
evener's own GPT in two stages (bench/pipeline_rank.py): the ½ core has the embedding and the first blocks, the other
the rest and the head, cut where the slower stage is fastest, by FLOPs and cores. evener's strategies train on the same
batches in the same lab, with shares of 11 : 5 and one micro-batch a rank. Steps after the first are measured. DiLoCo
exchanges in every second step, of which the step of `diloco:10` is derived.

The predictions rest on the seconds of computation and update of `alone` (host a, measured once for each dtype). Those
of evener's strategies are its cost model's. With m micro-batches and stages that compute c₀ and c₁ seconds for one,

    step = m · max(c₀, c₁) + min(c₀, c₁) + (m + 1) · x + update       x = seconds of a micro-batch's activations

for 1F1B as torch schedules it waits for every exchange, in which activations and gradients cross. With c₀ = c₁ that is
the bubble of (p - 1) / (m + p - 1) for p = 2 stages. Every setup adds a line to bench/pipeline.jsonl. --check trains a
smaller model in fp32, and fails unless the losses of both stages equal those of one process within 1e-5. Needs Linux
and root, and nothing else running.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scaling_efficiency import COMMON_FLAGS, run_evener

from evener.core.cluster.link import LinkModel
from evener.core.model.shape import MLP_EXPANSION, GPTShape
from evener.core.run.prediction import Cluster, HostRates, Job
from evener.core.run.resolve import resolve
from evener.core.run.roster import Dtype, RankSlot
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import RunDir, code_hash
from evener.core.run.step_cost import StepRecord
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec
from evener.plan.cost.cost_model import predict_step

RESULTS = Path(__file__).with_name("pipeline.jsonl")
RANK = Path(__file__).with_name("pipeline_rank.py")
CPUS = {"a": 1.0, "b": 0.5}
RATE, SHARES, BATCH = "1Gbit", "11:5", 16
SETUPS = ("alone", "pipeline", "ddp", "ddp+sparse", "int8", "int8+sparse", "diloco:2:int8", "fsdp", "zero1")
DILOCO_EVERY = 10
PIPELINES = ((4, "float32"), (8, "float32"), (16, "float32"), (8, "bfloat16"))  # micro-batches, dtype sent
PAYLOAD = 1448 / 1538  # of a link's rate: TCP's part of a full Ethernet frame
LATENCY_S = 1e-4  # *assumption*: two namespaces of one machine
# Bytes sent, and as many received, per second of processor time: *measured* for messages in pairs (sync/pairwise.py).
SYNC_BPS = 2.5e9
PORT = 29600
CHECK_FLAGS = {"model": "d4", "width": 128, "num-heads": 2, "block-size": 64, "batch": 8, "steps": 4, "dtype": "fp32"}


class Basis(NamedTuple):
    """What a core does alone: forward and backward of the global batch, and the update of all weights."""

    compute_s: float
    update_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a prepared folder of 32,768 words")
    parser.add_argument("--setups", default=",".join([*SETUPS, *(f"{setup}@100Mbit" for setup in SETUPS[1:])]),
                        help="what to measure, at 1 Gbit/s or @RATE")  # fmt: skip
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--steps", type=int, default=2, help="measured ones, after one")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the lab is taken down
    hosts = {name: HostSpec(rate=RATE, cpus=cpus if cpus < 1 else None, cores=(core,))
             for core, (name, cpus) in enumerate(CPUS.items())}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="evener-pipeline-") as name:
        folder = Path(name)
        with EmulatedLab.up(LabSpec(name="pipeline", hosts=hosts), out=folder / "fleet.toml") as lab:
            if options.check:
                check_losses(lab, folder, options.data)
                return
            for text in options.setups.split(","):
                setup, _, rate = text.partition("@")
                for host in lab.hosts:
                    host.set_rate(rate or RATE)
                for row in measure(lab, folder, options, setup, rate or RATE):
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row, sort_keys=True) + "\n")
                    print(format_row(row), flush=True)


def check_losses(lab: EmulatedLab, folder: Path, data: Path) -> None:
    """Fail unless the pipeline's losses equal those of one process."""
    flags = flags_of(data, folder / "check", **CHECK_FLAGS)
    settings = [(num, "float32") for num in (2, 4)]
    losses = [row["loss"] for row in run_pipeline(lab, data, flags, 2, 2, settings)[1]]
    run_evener(folder, "train", "--fleet", "fleet.toml", "--hosts", "a", *flags)
    expected = [record.loss for record in RunDir(folder / "check").records(0)]
    worst = max(abs(found / loss - 1) for found, loss in zip(losses, expected, strict=True) if loss)
    print(f"losses of two stages {losses}, of one process {expected}: at most {worst:.1e} apart")
    if worst > 1e-5:
        raise SystemExit("the pipeline does not train the same model")


def flags_of(data: Path, out: Path, **more: object) -> list[str]:
    flags = COMMON_FLAGS | {"model": "d8", "batch": BATCH, "data": data.absolute(), "out": out} | more
    return [f"--{name}={value}" for name, value in flags.items()]


def measure(lab: EmulatedLab, folder: Path, options: argparse.Namespace, setup: str, rate: str) -> list[dict[str, Any]]:
    """Train with one setup; return a row for it, of the pipeline one for each way to cut and send the batch."""
    out = folder / f"{setup}-{rate}".replace(":", "-")
    flags = flags_of(options.data, out, steps=1 + options.steps * (2 if "diloco" in setup else 1), dtype=options.dtype)
    common = {"date": time.strftime("%Y-%m-%d"), "code": code_hash(), "rate": rate, "dtype": options.dtype}
    shape = resolve(parse_args(flags)).shape
    assert isinstance(shape, GPTShape)
    if setup == "pipeline":
        cut = best_cut(shape)
        ranks = run_pipeline(lab, options.data, flags, cut, 1 + options.steps, PIPELINES)
        rows = []
        for number, (num, sent_as) in enumerate(PIPELINES):
            first = number * (1 + options.steps) + 1
            timed = [rank[first : first + options.steps] for rank in ranks]
            steps = [max(step["step_s"] for step in both) for both in zip(*timed, strict=True)]
            rows.append(common | {
                "setup": f"pipeline:{num}:{sent_as}", "cut": cut, "steps_s": steps,
                "predicted_s": predict_pipeline_s(shape, options.dtype, rate, num, sent_as, cut),
                "bytes": max(rank[-1]["sent_bytes"] for rank in timed), "cpu_s": [rank[-1]["cpu_s"] for rank in timed],
                "peak_bytes": [rank[-1]["peak_bytes"] for rank in timed],
                "losses": [step["loss"] for step in ranks[1][first - 1 : first + options.steps]],
            })  # fmt: skip
        return rows
    where = ["--hosts", "a"] if setup == "alone" else ["--sync", setup, "--shares", SHARES, "--micro-batch", "11"]
    run_evener(folder, "train", "--fleet", "fleet.toml", *where, *flags)
    run = RunDir(out)
    manifest = run.manifest()
    records = [run.records(rank) for rank in range(manifest.world_size)]
    steps = [after.ended - before.ended for before, after in zip(records[0], records[0][1:], strict=False)]
    row = common | {
        "setup": setup, "steps_s": steps, "bytes": max(record.bytes for of_rank in records for record in of_rank),
        "cpu_s": [of_rank[-1].cpu_s for of_rank in records], "losses": [record.loss for record in records[0]],
        "peak_bytes": manifest.result and manifest.result.peak_memory_bytes,
        "compute_s": statistics.mean(record.cost.compute_s or 0.0 for record in records[0][1:]),
        "update_s": statistics.mean(record.cost.optimizer_s or 0.0 for record in records[0][1:]),
    }  # fmt: skip
    if "diloco" in setup:
        setup = setup.replace(":2", f":{DILOCO_EVERY}", 1)
        row |= {"setup": setup, "steps_s": [derived_diloco_s(records[0], steps)]}
    predicted_s = None if setup == "alone" else predict_evener_s(shape, options.dtype, rate, flags, setup)
    return [row | {"predicted_s": predicted_s}]


def derived_diloco_s(records: list[StepRecord], steps: list[float]) -> float:
    """Return the mean step of rounds of DILOCO_EVERY steps, from steps with and without an exchange."""
    exchanged, plain = ([step_s for step_s, record in zip(steps, records[1:], strict=True) if bool(record.bytes) == has]
                        for has in (True, False))  # fmt: skip
    return statistics.mean(plain) + (statistics.mean(exchanged) - statistics.mean(plain)) / DILOCO_EVERY


def run_pipeline(
    lab: EmulatedLab, data: Path, flags: list[str], cut: int, num_steps: int, settings: Sequence[tuple[int, str]]
) -> list[list[dict[str, Any]]]:
    """Train `num_steps` with each setting, stage 0 on host b and stage 1 on a; return the steps of both.

    `data` is copied to both, whose /tmp is their own.
    """
    stages = [lab.host("b"), lab.host("a")]
    processes = []
    for rank, host in enumerate(stages):
        env = [f"RANK={rank}", "WORLD_SIZE=2", f"MASTER_ADDR={stages[0].address}", f"MASTER_PORT={PORT}",
               "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1"]  # fmt: skip
        corpus = host.home / "corpus"
        shutil.copytree(data, corpus, dirs_exist_ok=True)
        own_flags = [*flags, f"--data={corpus}", f"--out={host.home / 'pipeline'}"]
        job = json.dumps({"flags": own_flags, "cut": cut, "num_steps": num_steps, "settings": settings})
        argv = ["env", *env, sys.executable, str(RANK), job]
        processes.append(host.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    ended = [process.communicate(timeout=900) for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(errors for _, errors in ended))
    return [[json.loads(line) for line in output.splitlines()] for output, _ in ended]


def stage_flops(shape: GPTShape, cut: int) -> tuple[float, float]:
    """Return the FLOPs of a token, forward and backward, before and after the cut.   [PaLM, appendix B]"""
    block = 6 * (4 + 2 * MLP_EXPANSION) * shape.width**2 + 12 * shape.width * shape.block_size
    return cut * block, shape.flops_per_token() - cut * block


def best_cut(shape: GPTShape) -> int:
    """Return the number of blocks of stage 0, on host b, with which the slower stage is fastest."""

    def slower(cut: int) -> float:
        first, last = stage_flops(shape, cut)
        return max(first / CPUS["b"], last / CPUS["a"])

    return min(range(1, shape.num_layers), key=slower)


def measured_basis(dtype: str) -> Basis:
    """Return the newest measurement of `alone` in this dtype."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    found = [row for row in rows if row["setup"] == "alone" and row["dtype"] == dtype]
    if not found:
        raise SystemExit(f"measure --setups alone --dtype {dtype} first: predictions rest on it")
    return Basis(found[-1]["compute_s"], found[-1]["update_s"])


def link_of(rate: str) -> LinkModel:
    line_bps = HostSpec(rate=rate).up_bps
    assert line_bps is not None
    return LinkModel(latency_s=LATENCY_S, bandwidth_Bps=PAYLOAD * line_bps / 8)


def predict_pipeline_s(shape: GPTShape, dtype: Dtype, rate: str, num: int, sent_as: str, cut: int) -> float:
    """Return the step of the pipeline by the formula at the top of this file."""
    basis, link = measured_basis(dtype), link_of(rate)
    first, last = (flops / shape.flops_per_token() * basis.compute_s / num for flops in stage_flops(shape, cut))
    stages = first / CPUS["b"], last / CPUS["a"]
    sent = BATCH / num * shape.block_size * shape.width * (4 if sent_as == "float32" else 2)
    groups = shape.params_by_group()
    table = shape.vocab_size * shape.width
    in_blocks = cut * (groups["attention"] + groups["MLP"]) / shape.num_layers
    part = (table * (1 + shape.num_value_embeddings(cut)) + in_blocks) / shape.num_params()
    update_s = basis.update_s * max(part / CPUS["b"], (1 - part) / CPUS["a"])
    return num * max(stages) + min(stages) + (num + 1) * (link.latency_s + sent / link.bandwidth_Bps) + update_s


def predict_evener_s(shape: GPTShape, dtype: Dtype, rate: str, flags: list[str], sync: str) -> float:
    """Return the step of one of evener's strategies by its cost model."""
    basis = measured_basis(dtype)
    spec = parse_args([*flags, "--sync", sync, "--shares", SHARES, "--micro-batch", "11"])
    hosts = {name: HostRates(tokens_per_s={dtype: cpus * BATCH * shape.block_size / basis.compute_s},
                             update_s=basis.update_s / cpus, cpus=cpus, sync_Bps=SYNC_BPS)
             for name, cpus in CPUS.items()}  # fmt: skip
    slots = [RankSlot(host=name, device="cpu", has_bf16=dtype == "bf16") for name in CPUS]
    job = Job(spec=spec, shape=shape)
    cluster = Cluster(slots=slots, hosts=hosts, wire=link_of(rate))
    return predict_step(job, cluster, job.initial_roster(slots)).step_s


def format_row(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    predicted = f"predicted {row['predicted_s']:7.2f} s" if row["predicted_s"] else "not predicted    "
    peaks = " and ".join(f"{peak / 1e9:.2f}" for peak in row["peak_bytes"] or ())
    return (f"{row['rate']:8} {row['dtype']} {row['setup']:22} {statistics.mean(row['steps_s']):7.2f} s a step, "
            f"{predicted}, {row['bytes'] / 1e6:7.1f} MB sent, peaks {peaks} GB, losses {row['losses']}")  # fmt: skip


if __name__ == "__main__":
    main()
