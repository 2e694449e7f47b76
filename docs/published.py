"""Write docs/published.md: what others measured, beside what evener predicts from what they stated. `make docs`.

docs/published/*.csv holds their figures; `source` names where each comes from.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec

from evener.core.prediction import Job, Wire
from evener.core.roster import SyncSpec
from evener.core.shape import PRESETS, GPTShape
from evener.core.spec import ModelSpec, RunSpec, TrainSpec
from evener.plan.cluster import uniform
from evener.plan.collectives import INFINITE, Ring, backend_s, bus_factor, ring
from evener.plan.cost import price
from evener.plan.penalty import loss_penalty
from evener.plan.scale import scale
from evener.plan.thumb import nanogpt, sentences

FOLDER = Path(__file__).with_name("published")
PAGE = Path(__file__).with_name("published.md")


class Row(NamedTuple):
    """One published figure."""

    name: str
    published: float
    ours: float | None  # None: they state too little
    unit: str
    source: str
    why: str  # from what ours follows, and why it misses
    is_stated: bool = False  # is the interconnect stated? Then ours must be near

    @property
    def error(self) -> float | None:
        """Relative."""
        return None if self.ours is None else self.ours / self.published - 1


def rows() -> dict[str, list[Row]]:
    """All figures, by section."""
    return {"Training": training(), "Collectives": collectives(), "Low communication": low_communication()}


# --- training ---------------------------------------------------------------------------------------------------------


def training() -> list[Row]:
    """Every row of training.csv."""
    table, source = read("training"), ""
    by_id = {row["id"]: row for row in table}
    found = []
    for row in table:
        source = source if row["source"] in ("same", "same author, one throttled GPU of 16") else row["source"]
        found += _training(row, by_id, source)
    return found


def _training(row: dict[str, str], by_id: dict[str, dict[str, str]], source: str) -> list[Row]:
    name, family = row["id"], row["id"].split("-")[0]
    stated = bool(row["link_busbw_GBps"])
    if family == "straggler7b":
        healthy, throttled = map(float, row["value"].split("/"))
        ours = healthy * 0.5 / 2.56
        return [Row(name, throttled, ours, "tokens/s", source,
                    "the step is the slowest rank's: 131,000 tokens/s × 500 ms / 2,560 ms")]  # fmt: skip
    if family == "nanogpt":
        (point,) = scale(nanogpt(), [int(name.rsplit("-", 1)[1])])
        middle = 0.5 * sum(map(float, row["value"].split("-")))
        why = f"the middle of {row['value']}; ours with a network that is not slow: see below"
        return [Row(name, middle, point.efficiency, "of linear", source, why)]
    value = float(row["value"])
    if family == "fsdp7b":
        return [_fsdp(row, by_id["fsdp7b-1"], source, stated)]
    if family == "homelab":
        rates = [60.0, 60.0 * 4 / 8]
        spec = RunSpec(model=ModelSpec(model="d8"), train=TrainSpec(batch=8, micro_batch=8))
        job = Job(spec=spec, shape=_with(PRESETS["d8"], block_size=512))
        wire = Wire(latency_s=1e-4, bandwidth_Bps=float(row["link_busbw_GBps"]) * 1e9)
        cluster = uniform(dict(zip(["i9", "laptop"], rates, strict=True)), wire)
        found = price(job, cluster, job.roster(cluster.seats))
        all_reduce_s = found.ranks[0].sync_s
        return [
            Row(name, value, found.tokens_per_s, "tokens/s", source,
                "60 tokens/s alone with 8 threads, so 30 with 4: half of the batch takes the laptop "
                f"{found.slowest.cost.compute_s:.0f} s", stated),
            Row(f"{name}: all-reduce", 4.3, all_reduce_s, "s", source, "503 MB at 0.117 GB/s, of 71.5 s", stated),
        ]  # fmt: skip
    if family.startswith("comm760m"):
        two = _two(Wire(latency_s=0.0, bandwidth_Bps=float(row["link_busbw_GBps"]) * 1e9))
        ours = backend_s("all_reduce", 2 * 760e6, two, "gloo")
        return [Row(name, value, ours, "s", source, "2(n-1)/n · 1.52 GB at 85 % of the line", stated)]
    if family == "mpt7b":
        ours = float(by_id["mpt7b-128"]["value"])
        why = "given" if name == "mpt7b-128" else "the network is not stated; if all of it is hidden, nothing changes"
        return [Row(name, value, ours, "tokens/s a GPU", source, why)]
    given = {"bert-1m1g": "given"}
    why = given.get(name, "neither the link nor the batch is stated")
    return [Row(name, value, value if name in given else None, "samples/s a GPU", source, why)]


def _fsdp(row: dict[str, str], alone: dict[str, str], source: str, stated: bool) -> Row:
    """Compute from the single node, where NVLink hides all; the network as stated."""
    value, per_gpu = float(row["value"]), float(alone["value"]) / 8
    if not stated:
        return Row(row["id"], value, value, "tokens/s", source, "given: one node's rate is that of its computing")
    nodes, busbw = int(row["nodes"]), float(row["link_busbw_GBps"]) * 1e9
    shape = like(float(row["params"]), num_layers=28, width=3584, block_size=2048)
    job = Job(spec=RunSpec(train=TrainSpec(batch=2 * 8 * nodes, micro_batch=2)), shape=shape)
    wire = Wire(latency_s=1e-5, bandwidth_Bps=busbw)
    cluster = uniform({f"n{i}": per_gpu for i in range(nodes)}, wire, [f"cuda:{i}" for i in range(8)], wire)
    found = price(job, cluster, _with(job.roster(cluster.seats), sync=SyncSpec(kind="fsdp")))
    why = f"two gathers and a reduce-scatter of 15.2 GB: {found.ranks[0].sync_s:.3g} s beside " \
          f"{found.slowest.cost.compute_s:.2f} s of computing"  # fmt: skip
    return Row(row["id"], value, found.tokens_per_s, "tokens/s", source, why, stated)


def _two(wire: Wire) -> Ring:
    """Two ranks on hosts of their own."""
    return ring(uniform({"a": 1.0, "b": 1.0}, wire), ["a", "b"])


def like(num_params: float, *, num_layers: int, width: int, block_size: int) -> GPTShape:
    """A GPT of so many layers and parameters: the vocabulary makes up for what its matrices lack."""
    shape = _with(PRESETS["gpt2-large"], num_layers=num_layers, num_heads=width // 128, width=width,
                  block_size=block_size, positions="rotary", vocab_size=1)  # fmt: skip
    return _with(shape, vocab_size=round((num_params - shape.num_params()) / width))


def _with(shape: GPTShape, **changes: object) -> GPTShape:
    return msgspec.structs.replace(shape, **changes)


# --- collectives ------------------------------------------------------------------------------------------------------


def collectives() -> list[Row]:
    """Every row of collectives.csv against one curve through all sizes of its machine."""
    found = []
    table = read("collectives")
    for hardware, num_ranks in (("8xH200 one node", 8), ("4 nodes of 8xB200", 32)):
        mine = [row for row in table if row["hardware"] == hardware]
        factor = bus_factor("all_reduce", num_ranks)
        points = [
            (int(row["size_bytes"]), factor * int(row["size_bytes"]) / (float(row["busbw_GBps"]) * 1e9)) for row in mine
        ]
        curve = fit_nccl(points, num_ranks)
        for row, (size_bytes, took_s) in zip(mine, points, strict=True):
            wire_GBps = factor * curve.bandwidth_Bps / 1e9
            why = f"{curve.fixed_s * 1e6:.0f} µs + {curve.root_s * 1e9:.1f} ns·√S + S at {wire_GBps:.0f} GB/s"
            if any(other < 0.5 * took_s for size, other in points if size > size_bytes):
                why = "an outlier: it took longer than a message many times as large; the figure has one digit"
            ours = curve.busbw_Bps(size_bytes) / 1e9
            name = f"{hardware}, {size_bytes:,} B"
            found.append(Row(name, float(row["busbw_GBps"]), ours, "GB/s busbw", row["source"], why))
    return found


class NcclCurve(msgspec.Struct, frozen=True, kw_only=True):
    """t = a + b·√S + S/β': what is fixed, what filling the pipe of segments costs, and the wire. See `pipelined_s`."""

    num_ranks: int
    fixed_s: float  # a
    root_s: float  # b, per square root of a byte
    bandwidth_Bps: float  # β', of S: bus_factor times less than the bus's

    def seconds(self, size_bytes: float) -> float:
        """Of an all-reduce."""
        return self.fixed_s + self.root_s * math.sqrt(size_bytes) + size_bytes / self.bandwidth_Bps

    def busbw_Bps(self, size_bytes: float) -> float:
        """As nccl-tests print it."""
        return bus_factor("all_reduce", self.num_ranks) * size_bytes / self.seconds(size_bytes)


def fit_nccl(points: Sequence[tuple[int, float]], num_ranks: int) -> NcclCurve:
    """The curve with a, b, 1/β' ≥ 0 through measured all-reduces (bytes, seconds): least squares of relative errors.

    Every choice of terms that are not 0 is solved by its normal equations; the best without a negative one counts.
    A point that took more than twice as long as a larger one is left out: no curve that grows comes near both.

    >>> curve = fit_nccl([(n, 1e-5 + 1e-8 * n**0.5 + n / 1e11) for n in (1 << 10, 1 << 20, 1 << 25, 1 << 30)], 8)
    >>> round(curve.fixed_s * 1e6, 6), round(curve.root_s * 1e9, 6), round(curve.bandwidth_Bps / 1e9, 6)
    (10.0, 10.0, 100.0)
    """
    kept = [(size, t) for size, t in points if t <= 2 * min(other_s for other, other_s in points if other >= size)]
    rows = [(1 / t, math.sqrt(size) / t, size / t) for size, t in kept]
    fits = []
    for terms in (terms for num in (1, 2, 3) for terms in combinations(range(3), num) if num <= len(rows)):
        found = _least_squares([[row[term] for term in terms] for row in rows])
        if min(found) >= 0:
            errors = (sum(row[term] * x for term, x in zip(terms, found, strict=True)) - 1 for row in rows)
            fits.append((sum(error**2 for error in errors), dict(zip(terms, found, strict=True))))
    best = min(fits, key=lambda fit: fit[0])[1]
    return NcclCurve(
        num_ranks=num_ranks,
        fixed_s=best.get(0, 0.0),
        root_s=best.get(1, 0.0),
        bandwidth_Bps=1 / best[2] if best.get(2) else INFINITE,
    )


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """x that brings every row·x nearest to 1: normal equations of columns scaled to 1, Gauss and Jordan."""
    width = len(rows[0])
    scale = [max(row[i] for row in rows) for i in range(width)]
    unit = [[value / top for value, top in zip(row, scale, strict=True)] for row in rows]
    system = [[sum(row[i] * row[j] for row in unit) for j in range(width)] + [sum(row[i] for row in unit)]
              for i in range(width)]  # fmt: skip
    for i in range(width):
        if not system[i][i]:
            return [-1.0]  # two sizes are one: no answer with these terms
        for j in range(width):
            if j != i:
                ratio = system[j][i] / system[i][i]
                system[j] = [a - ratio * b for a, b in zip(system[j], system[i], strict=True)]
    return [system[i][width] / system[i][i] / scale[i] for i in range(width)]


# --- low communication ------------------------------------------------------------------------------------------------


def low_communication() -> list[Row]:
    """Penalties are what the planner uses; the simulator's hours are repeated with what it must have assumed."""
    found = []
    for row in read("low_communication"):
        name, source = f"{row['model']} {row['method']}", row["source"]
        if row["metric"].startswith("loss penalty"):
            replicas = int(row["method"].split()[1])
            penalty, _ = loss_penalty(
                SyncSpec(kind="diloco", every=30), int(float(row["model"].rstrip("M")) * 1e6), replicas
            )
            found.append(Row(name, float(row["value"]), None if penalty is None else 100 * penalty, "% of loss", source,
                             "the planner's own table"))  # fmt: skip
        elif row["metric"].startswith("hours"):
            found.append(_streaming(row, name))
    return found


def _streaming(row: dict[str, str], name: str) -> Row:
    """1B parameters in bf16 over two replicas at 1 Gbit/s; steps of 2²⁰ tokens, 8 fragments: assumptions."""
    num_steps, compute_s = 25e9 / 2**20, 0.67 * 3600 / (25e9 / 2**20)
    wire = Wire(latency_s=0.0, bandwidth_Bps=1e9 / 8)
    two = _two(wire)
    if "streaming" in row["method"]:
        fragment_s = backend_s("all_reduce", 0.5e9 / 8, two, "gloo")
        step_s = compute_s + 8 * max(0.0, fragment_s - compute_s) / 100
        why = "4 bits, 8 fragments in 100 steps, each hidden behind one step (assumed, so that it comes out)"
    else:
        step_s = compute_s + backend_s("all_reduce", 2e9, two, "gloo")
        why = "2 GB of bf16 in every step; steps of 2²⁰ tokens and two replicas are assumed"
    return Row(name, float(row["value"]), num_steps * step_s / 3600, "hours", row["source"], why)


# --- the page ---------------------------------------------------------------------------------------------------------


def read(name: str) -> list[dict[str, str]]:
    """A table of docs/published."""
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def page() -> str:
    """The whole page."""
    lines = [
        "# Published figures beside ours",
        "",
        "Generated by `make docs` from [docs/published](published): what others measured (or simulated, or quote as a",
        "rule of thumb), and what evener's cost model says from what they stated. **Bold**: their interconnect is",
        "stated, so ours must come within 10 %, which a test checks. Where too little is stated, nothing is predicted.",
    ]
    for section, found in rows().items():
        lines += ["", f"## {section}", "", "| | published | ours | error | from what |", "|---|---:|---:|---:|---|"]
        for row in found:
            name = f"**{row.name}**" if row.is_stated else row.name
            ours = "–" if row.ours is None else f"{row.ours:,.4g}" if row.ours < 1e4 else f"{row.ours:,.0f}"
            published = f"{row.published:,.4g}" if row.published < 1e4 else f"{row.published:,.0f}"
            error = "–" if row.error is None or row.why.startswith("given") else f"{100 * row.error:+.1f} %"
            lines.append(f"| {name} | {published} {row.unit} | {ours} | {error} | {row.why} |")
        if section == "Collectives":
            lines += [
                "",
                "Each machine's curve has three numbers, fitted to the same points: that it passes near all of",
            ]
            lines += ["them shows the form to be right, and predicts nothing."]
        if section == "Training":
            lines += ["", *sentences(nanogpt())]
        sources = list(dict.fromkeys(row.source for row in found))
        lines += ["", "Sources: " + "; ".join(sources) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written", file=sys.stderr)
