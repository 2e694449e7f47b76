"""Write docs/figures/published.md: what others measured, beside what evener predicts from what they stated.

docs/figures/published/*.csv holds their figures; `source` names where each comes from.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import NamedTuple
from unittest import mock

import msgspec

from evener.core.cluster.link import LinkModel
from evener.core.model.shape import PRESETS, GPTShape
from evener.core.run.prediction import Cluster, Job, PlanOption
from evener.core.run.roster import SyncSpec
from evener.core.run.run_spec import ModelSpec, RunSpec, TrainSpec
from evener.plan.choice.cluster import uniform_cluster
from evener.plan.cost import sync_traffic
from evener.plan.cost.collective_cost import INFINITE, Ring, build_ring, bus_factor, collective_s
from evener.plan.cost.cost_model import predict_step, recompute_factor
from evener.plan.scaling.rule_of_thumb import describe_rule, nanogpt_scenario
from evener.plan.scaling.scaling_model import simulate_scaling

FOLDER = Path(__file__).parents[1] / "figures" / "published"
PAGE = FOLDER.with_suffix(".md")
ALPHA_S = 1e-5  # of a message between two GPUs, wherever they are: assumption
SLOWED = 0.95  # of what its GPUs would do among more of them: something other than the network was in the way


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


@cache
def rows() -> dict[str, list[Row]]:
    """All figures, by section."""
    return {
        "Training": training(),
        "Scaling": scaling(),
        "Collectives": collectives(),
        "Collectives by nodes": by_nodes(),
        "Low communication": low_communication(),
    }


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
        (point,) = simulate_scaling(nanogpt_scenario(), [int(name.rsplit("-", 1)[1])])
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
        wire = LinkModel(latency_s=1e-4, bandwidth_Bps=float(row["link_busbw_GBps"]) * 1e9)
        cluster = uniform_cluster(dict(zip(["i9", "laptop"], rates, strict=True)), wire)
        found = predict_step(job, cluster, job.initial_roster(cluster.slots))
        all_reduce_s = found.ranks[0].sync_s
        return [
            Row(name, value, found.tokens_per_s, "tokens/s", source,
                "60 tokens/s alone with 8 threads, so 30 with 4: half of the batch takes the laptop "
                f"{found.straggler_cost.cost.compute_s:.0f} s", stated),
            Row(f"{name}: all-reduce", 4.3, all_reduce_s, "s", source, "503 MB at 0.117 GB/s, of 71.5 s", stated),
        ]  # fmt: skip
    if family.startswith("comm760m"):
        two = _two(LinkModel(latency_s=0.0, bandwidth_Bps=float(row["link_busbw_GBps"]) * 1e9))
        ours = collective_s("all_reduce", 2 * 760e6, two, "gloo")
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
    wire = LinkModel(latency_s=ALPHA_S, bandwidth_Bps=busbw)
    cluster = uniform_cluster({f"n{i}": per_gpu for i in range(nodes)}, wire, [f"cuda:{i}" for i in range(8)], wire)
    found = _predict(job, cluster, "fsdp")
    why = f"two gathers and a reduce-scatter of 15.2 GB: {found.ranks[0].sync_s:.3g} s beside " \
          f"{found.straggler_cost.cost.compute_s:.2f} s of computing"  # fmt: skip
    return Row(row["id"], value, found.tokens_per_s, "tokens/s", source, why, stated)


# --- scaling ----------------------------------------------------------------------------------------------------------


def scaling() -> list[Row]:
    """Every row of scaling.csv: the smallest run gives the rate of computing, evener predicts the larger ones.

    node_GBps   out of a node, each direction: "line" as the network is rated, "busbw" as nccl-tests measured it there,
                "median busbw" of measurements that spread widely: then its rows are not counted
    micro_batch sequences in a forward and backward of a GPU; passes of them make a step
    recompute   1: activations are computed again, which the figure contains
    fitted      what was fitted to these rows, so that they are not counted: a message's latency, or how much of
                communication overlaps
    given       the run whose GPUs compute as fast; empty: this is it; "-": there is none
    """
    table = with_sources(read("scaling"))
    by_id = {row["id"]: row for row in table}
    found = []
    for row in table:
        larger = [other for other in table if other["given"] == row["given"] and int(other["gpus"]) > int(row["gpus"])]
        slowed = any(gpu_rate(row) < SLOWED * gpu_rate(other) for other in larger)
        found.append(_scaled(row, by_id.get(row["given"]), slowed))
    return found


FITTED = {"60 us": "60 µs a message", "overlap": "how much overlaps"}


def _scaled(row: dict[str, str], given: dict[str, str] | None, slowed: bool) -> Row:
    name, value, unit, source = row["id"], float(row["value"]), row["unit"], row["source"]
    if row["given"] == "-":
        return Row(name, value, None, unit, source, row["note"])
    if given is None:
        return Row(name, value, value, unit, source, "given")
    found = scaled_up(row, given)
    cost, in_flight_s = found.straggler_cost.cost, found.straggler_cost.sync_s
    showed = (figure_or_step_s(row, value) - cost.compute_s) / in_flight_s
    why = f"{in_flight_s:.3g} s of collectives beside {cost.compute_s:.3g} s of computing: " \
          f"{showed:.0%} of them show, by ours {cost.exposed_sync_s / in_flight_s:.0%}"  # fmt: skip
    if slowed:
        why = "an outlier: more GPUs did more, each of them; " + why
    if row["fitted"]:
        why = f"fitted to these: {FITTED[row['fitted']]}; {why}"
    if row["link"] == "median busbw":
        why = f"the link's rate had a wide spread; {why}"
    is_stated = not slowed and not row["fitted"] and row["link"] != "median busbw"
    return Row(name, value, figure_or_step_s(row, found.step_s), unit, source, why, is_stated=is_stated)


def scaled_up(row: dict[str, str], given: dict[str, str]) -> PlanOption:
    """What evener says of a run whose GPUs compute as fast as those of the given one, over the network as stated.

    How fast that is follows from the given step, of which evener says as well what its collectives took.
    """
    step_s = figure_or_step_s(given, float(given["value"]))
    shape = _shape_of(row)
    alone = sequences(given) * shape.block_size / int(given["gpus"]) / step_s * recompute_factor(_job_of(given))
    low, high = alone, 4 * alone
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _priced(given, middle).step_s > step_s else (low, middle)
    return _priced(row, low)


def _predict(job: Job, cluster: Cluster, strategy: str) -> PlanOption:
    """Predict a published run, which summed sharded gradients in bf16."""
    roster = msgspec.structs.replace(job.initial_roster(cluster.slots), sync=SyncSpec(kind=strategy))
    with mock.patch.object(sync_traffic, "SUMMED_BYTES", 2):
        return predict_step(job, cluster, roster)


def _shape_of(row: dict[str, str]) -> GPTShape:
    return like(float(row["params"]), num_layers=int(row["layers"]), width=int(row["width"]),
                block_size=int(row["block_size"]))  # fmt: skip


def _job_of(row: dict[str, str]) -> Job:
    spec = RunSpec(model=ModelSpec(recompute=row["recompute"] == "1"),
                   train=TrainSpec(batch=sequences(row), micro_batch=int(row["micro_batch"])))  # fmt: skip
    return Job(spec=spec, shape=_shape_of(row))


def _priced(row: dict[str, str], rate: float) -> PlanOption:
    """A run whose GPUs train so many tokens a second."""
    job = _job_of(row)
    nodes, per_node = int(row["gpus"]) // int(row["gpus_per_node"]), int(row["gpus_per_node"])
    alpha_s = float(row["fitted"].split()[0]) * 1e-6 if row["fitted"].endswith("us") else ALPHA_S
    wire = LinkModel(latency_s=alpha_s, bandwidth_Bps=float(row["node_GBps"]) * 1e9)
    cluster = uniform_cluster({f"n{i}": rate for i in range(nodes)}, wire, [f"cuda:{i}" for i in range(per_node)], wire)
    return _predict(job, cluster, row["strategy"])


def sequences(row: dict[str, str]) -> int:
    """Of all GPUs, a step."""
    return int(row["gpus"]) * int(row["micro_batch"]) * int(row["passes"])


def gpu_rate(row: dict[str, str]) -> float:
    """Sequences a second of one GPU."""
    return sequences(row) / int(row["gpus"]) / figure_or_step_s(row, float(row["value"]))


def figure_or_step_s(row: dict[str, str], value: float) -> float:
    """Seconds of a step from a figure in the row's unit, or the figure from the seconds: a rate is work over them."""
    if row["unit"] == "s/step":
        return value
    work = sequences(row) * (1 if row["unit"] == "samples/s" else int(row["block_size"]) / int(row["gpus"]))
    return work / value


def with_sources(table: list[dict[str, str]]) -> list[dict[str, str]]:
    """With "same" replaced by what it stands for."""
    source = ""
    for row in table:
        source = row["source"] = source if row["source"] == "same" else row["source"]
    return table


def _two(wire: LinkModel) -> Ring:
    """Two ranks on hosts of their own."""
    return build_ring(uniform_cluster({"a": 1.0, "b": 1.0}, wire), ["a", "b"])


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


def by_nodes() -> list[Row]:
    """Every row of nodes.csv: the time of a collective on two nodes gives the link, evener predicts more nodes."""
    table = with_sources(read("nodes"))
    pairs = {row["id"]: row for row in table if row["nodes"] == "2"}
    return [_on_nodes(row, pairs[row["id"]]) for row in table]


def _on_nodes(row: dict[str, str], pair: dict[str, str]) -> Row:
    name, value = f"{row['id']}, {row['nodes']} nodes", float(row["value"])
    if row is pair or row["nodes"] == "1":
        return Row(name, value, value, row["unit"], row["source"], "given")
    size = float(row["size_bytes"])
    wire = LinkModel(latency_s=ALPHA_S, bandwidth_Bps=size / _ranks(pair) / (_hop_s(pair) - ALPHA_S))
    devices = [f"cuda:{i}" for i in range(int(row["gpus_per_node"]))]
    cluster = uniform_cluster({f"n{i}": 1.0 for i in range(int(row["nodes"]))}, wire, devices, wire)
    took_s = collective_s(row["collective"], size, build_ring(cluster, [slot.host for slot in cluster.slots]), "nccl")
    needed_s = _hop_s(row) - size / _ranks(row) / wire.bandwidth_Bps
    why = f"{wire.bandwidth_Bps / 1e9:.3g} GB/s by two nodes and {ALPHA_S * 1e6:.0f} µs a message; " \
          f"a ring that takes as long has {needed_s * 1e6:.0f} µs"  # fmt: skip
    return Row(name, value, figure_or_s(row, took_s), row["unit"], row["source"], why)


def _hop_s(row: dict[str, str]) -> float:
    """Of one of the steps in which each rank of a ring passes a part on."""
    steps = bus_factor(row["collective"], _ranks(row)) * _ranks(row)
    return figure_or_s(row, float(row["value"])) / steps


def figure_or_s(row: dict[str, str], value: float) -> float:
    """Seconds of a collective from a figure in the row's unit, or the figure from the seconds."""
    if row["unit"] == "s":
        return value
    return bus_factor(row["collective"], _ranks(row)) * float(row["size_bytes"]) / value / 1e9


def _ranks(row: dict[str, str]) -> int:
    return int(row["nodes"]) * int(row["gpus_per_node"])


# --- low communication ------------------------------------------------------------------------------------------------


def low_communication() -> list[Row]:
    """The simulator's hours are repeated with what it must have assumed."""
    found = []
    for row in read("low_communication"):
        name, source = f"{row['model']} {row['method']}", row["source"]
        if row["metric"].startswith("loss penalty"):
            why = "their outer momentum is 0.9, evener's 0.54 for two replicas: the planner claims nothing from it"
            found.append(Row(name, float(row["value"]), None, "% of loss", source, why))
        elif row["metric"].startswith("hours"):
            found.append(_streaming(row, name))
        elif row["metric"].startswith("compute utilization"):
            middle = fmean(map(float, row["value"].split("-")))
            why = f"no bandwidth is stated; {row['setting']}"
            found.append(Row(name, middle, None, "% of the time", source, why))
    return found


def _streaming(row: dict[str, str], name: str) -> Row:
    """1B parameters in bf16 over two replicas at 1 Gbit/s; steps of 2²⁰ tokens, 8 fragments: assumptions."""
    num_steps, compute_s = 25e9 / 2**20, 0.67 * 3600 / (25e9 / 2**20)
    wire = LinkModel(latency_s=0.0, bandwidth_Bps=1e9 / 8)
    two = _two(wire)
    if "streaming" in row["method"]:
        fragment_s = collective_s("all_reduce", 0.5e9 / 8, two, "gloo")
        step_s = compute_s + 8 * max(0.0, fragment_s - compute_s) / 100
        why = "4 bits, 8 fragments in 100 steps, each hidden behind one step (assumed, so that it comes out)"
    else:
        step_s = compute_s + collective_s("all_reduce", 2e9, two, "gloo")
        why = "2 GB of bf16 in every step; steps of 2²⁰ tokens and two replicas are assumed"
    return Row(name, float(row["value"]), num_steps * step_s / 3600, "hours", row["source"], why)


# --- the page ---------------------------------------------------------------------------------------------------------


def read(name: str) -> list[dict[str, str]]:
    """A table of docs/figures/published."""
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def page() -> str:
    """The whole page."""
    lines = [
        "# Published figures beside ours",
        "",
        "Generated by `make docs-generate` from `docs/figures/published`: what others measured (or simulated, or quote",
        "as a rule of thumb), and what evener's cost model predicts from what they stated. **Bold**: the source states",
        "its interconnect, so our prediction must be within 10 % of the published figure; a test checks this. Where a",
        "source states too little, nothing is predicted.",
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
            lines += ["", *describe_rule(nanogpt_scenario())]
        if section == "Scaling":
            lines += [
                "",
                "The smallest run of a kind gives the rate of computing, its source the bandwidth out of a node; a",
                f"message takes {ALPHA_S * 1e6:.0f} µs, which is an assumption. What showed of the collectives is what",
                "the published step has beyond computing, as a fraction of the time that evener predicts for the",
                "collectives. 100 % means that nothing was overlapped. Above 100 % the collectives took longer than",
                "predicted, or ranks waited for one another. In an outlier the GPUs did less than",
                f"{SLOWED:.0%} of what those of a larger run did: no network explains that.",
            ]
        if section == "Collectives by nodes":
            lines += [
                "",
                "What two nodes need gives the bandwidth. A ring passes as many messages as it has ranks, one after",
                "the other; a tree fewer.",
            ]
        sources = list(dict.fromkeys(row.source for row in found))
        lines += ["", "Sources: " + "; ".join(sources) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE} written", file=sys.stderr)
