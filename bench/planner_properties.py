"""Is the planner's physics right? Random jobs on random machines, and what must hold of every one of them.

    python bench/planner_properties.py [--cases N] [--seed S]

Nothing is measured here: properties are, which hold whatever the figures. A case that violates one is printed with its
number, and `--seed S --cases 1` makes it again. Beside each property is how often it was looked at.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from evener.core.cluster.link import LinkModel, parse_link
from evener.core.model.shape import PRESETS
from evener.core.run.prediction import Cluster, HostRates, Job, Prediction
from evener.core.run.roster import DDP, RankSlot, SyncSpec
from evener.core.run.run_spec import parse_args
from evener.plan.choice.advice import collect_advice
from evener.plan.choice.break_even import best_distributed, best_single_host
from evener.plan.choice.cluster import with_scaled_links
from evener.plan.choice.options import (
    fits_in_memory,
    job_with_larger_batch,
    job_with_shares,
    predict_training,
    why_not_as_requested,
    why_option_rejected,
)
from evener.plan.choice.plan_request import PlanRequest, answer_request, change_request, request_on_hosts
from evener.plan.choice.search import predict
from evener.plan.cost.collective_cost import best_ring
from evener.plan.cost.cost_model import predict_step
from evener.plan.scaling.scaling_model import build_scenario, simulate_scaling
from evener.plan.shares.load_balancing import RankTimeModel, fastest_shares, slowest_rank_s

LINKS = ("wan", "wifi", "wifi:80Mbit", "100Mbit", "1GbE", "2.5GbE", "10GbE", "100GbE", "8x400Gbit", "1Gbit,5ms")
MODELS = ("tiny", "char", "gpt2", "gpt2-xl", "d8", "d12")
SYNC_STRATEGIES = (
    "ddp",
    "packed",
    "bf16",
    "int8",
    "powersgd:4",
    "diloco:10",
    "diloco:10:int8:streamed",
    "ddp+sparse",
    "auto",
)
TOLERANCE = 0.02  # what a prediction may differ by before it means anything
PropertyResult = tuple[str, bool]


class PlannerCase(msgspec.Struct, frozen=True):
    """A job, the machines, and what the planner answers."""

    job: Job
    cluster: Cluster
    prediction: Prediction


def random_job(draw: random.Random) -> Job:
    """Any model, batch and strategy that can be asked for."""
    model, sync = draw.choice(MODELS), draw.choice(SYNC_STRATEGIES)
    if sync.endswith("sparse") and not PRESETS[model].has_sparse_embeddings:
        sync = "ddp"
    flags = {"model": model, "batch": draw.choice((8, 16, 24, 64, 256)), "sync": sync, "steps": 2000,
             "shares": draw.choice(("auto", "auto", "equal")), "loss-budget": draw.choice((0, 1, 5))}  # fmt: skip
    if draw.random() < 0.3:
        flags["recompute"] = "true"
    spec = parse_args([f"--{name}={value}" for name, value in flags.items()])
    return Job(spec=spec, shape=PRESETS[model])


def random_cluster(draw: random.Random) -> Cluster:
    """One to eight hosts, alike or not, of processors or GPUs, joined by one link or by many."""
    num, is_gpu = draw.choice((1, 2, 2, 3, 4, 5, 8)), draw.random() < 0.4
    fast = 10 ** draw.uniform(1, 5)
    names = [f"h{i}" for i in range(num)]
    per_host = draw.choice((1, 1, 2, 4)) if is_gpu else draw.choice((1, 1, 2))
    hosts, alike = {}, draw.random() < 0.4
    for name in names:
        rate = fast * (1 if alike else draw.uniform(0.05, 1))
        measured = not is_gpu and draw.random() < 0.5
        hosts[name] = HostRates(
            tokens_per_s=dict.fromkeys(("fp32", "bf16", "fp16"), rate),
            pass_s=draw.choice((0.0, 0.01)), update_s=draw.choice((0.0, 0.02)),
            cpus=draw.choice((1.0, 8.0)) if measured else None,
            sync_Bps=draw.uniform(3e8, 3e9) if measured else None,
            sum_Bps=draw.uniform(2e9, 2e10) if measured else None,
            copy_Bps=draw.uniform(5e9, 5e10) if measured else None,
            local=LinkModel(latency_s=2e-5, bandwidth_Bps=draw.uniform(1e9, 2e10)),
            memory_bytes=draw.choice((None, None, 8 * 10**9, 80 * 10**9)),
        )  # fmt: skip
    wire = parse_link(draw.choice(LINKS)).wire
    wires: dict[str, dict[str, LinkModel]] = {}
    if draw.random() < 0.3:
        for a, b in itertools.permutations(names, 2):
            other = msgspec.structs.replace(wire, bandwidth_Bps=wire.bandwidth_Bps * draw.uniform(0.1, 1))
            wires.setdefault(a, {})[b] = other
    devices = [f"cuda:{i}" for i in range(per_host)] if is_gpu else ["cpu"] * per_host
    slots = [RankSlot(host=name, device=device, has_bf16=is_gpu) for name in names for device in devices]
    return Cluster(slots=slots, hosts=hosts, wire=wire, wires=wires, jitter=draw.choice((0.0, 0.02)))


def check_sums(case: PlannerCase, draw: random.Random) -> Iterator[PropertyResult]:
    """A step is the sum of its parts, on every rank alike; batches are whole."""
    for option in case.prediction.options:
        for rank in option.ranks:
            total = math.fsum(value or 0.0 for value in msgspec.structs.astuple(rank.cost))
            yield "the parts of every rank's step sum to it", math.isclose(total, option.step_s, rel_tol=1e-9)
        yield "all shares together are the batch", option.roster.batch == case.job.spec.train.batch
        tokens = option.roster.batch * case.job.shape.block_size
        yield "tokens/s are those of a step", math.isclose(option.tokens_per_s * option.step_s, tokens, rel_tol=1e-9)
        yield "all figures are finite and none is negative", all(
            math.isfinite(value or 0.0) and (value or 0.0) >= -1e-12
            for rank in option.ranks for value in msgspec.structs.astuple(rank.cost))  # fmt: skip


def check_limits(case: PlannerCase, draw: random.Random) -> Iterator[PropertyResult]:
    """No step beats its ranks' computing; nothing is recommended that cannot be."""
    for option in case.prediction.options:
        speeds = [case.cluster.tokens_per_s(member) for member in option.roster.members]
        yield "no way trains more than its ranks compute", option.tokens_per_s <= sum(speeds) * (1 + 1e-9)
        yield "no more than a ring can send", option.bytes_per_rank >= 0
    if case.prediction.recommended:
        best = case.prediction.option(case.prediction.recommended)
        budget = case.job.spec.train.loss_budget / 100
        chosen = case.prediction.option(case.prediction.chosen)
        asked = not case.prediction.is_sync_ours and best.roster.sync == chosen.roster.sync
        why = (why_not_as_requested(best, case.prediction.cluster) if asked
               else why_option_rejected(best, case.prediction.cluster, budget))  # fmt: skip
        yield "what is recommended can run", not why
        able = [
            one
            for one in case.prediction.options
            if one.is_exact and not why_option_rejected(one, case.prediction.cluster, budget)
        ]
        most = max((one.tokens_per_s for one in able), default=0.0)
        yield (
            "what is recommended is the fastest, but for a small gain",
            best.tokens_per_s >= most / (1 + TOLERANCE) - 1e-9,
        )
    else:
        able = [one for one in case.prediction.options if one.is_built and one.is_exact]
        yield (
            "nothing is recommended only where nothing fits",
            not any(fits_in_memory(one, case.prediction.cluster) for one in able),
        )


def check_monotonicity(case: PlannerCase, draw: random.Random) -> Iterator[PropertyResult]:
    """Faster links and hosts never make it slower.

    But where communication takes processor time: then a host that is ready sooner has it beside others' computing.
    """
    job, cluster = case.job, case.prediction.cluster
    if len(cluster.slots) == 1:
        return
    roster = case.prediction.option(case.prediction.chosen).roster
    now = predict_step(job, cluster, roster).step_s
    factor = draw.uniform(1.1, 50)
    yield (
        "a faster link makes no step longer",
        predict_step(job, with_scaled_links(cluster, factor), roster).step_s <= now * (1 + 1e-6),
    )
    name = draw.choice(cluster.host_names)
    faster = {dtype: factor * rate for dtype, rate in cluster.hosts[name].tokens_per_s.items()}
    hosts = cluster.hosts | {name: msgspec.structs.replace(cluster.hosts[name], tokens_per_s=faster)}
    quick = predict_step(job, msgspec.structs.replace(cluster, hosts=hosts), roster).step_s
    if all(host.sync_Bps is None for host in cluster.hosts.values()):
        yield "a faster host makes no step longer", quick <= now * (1 + (5e-3 if cluster.jitter else 1e-6))


def check_shares(case: PlannerCase, draw: random.Random) -> Iterator[PropertyResult]:
    """Against every way to divide a small batch, and every ring through a few hosts."""
    paces = [
        RankTimeModel(
            sequence_s=draw.uniform(0.1, 2),
            micro_batch_overhead_s=draw.choice((0.0, draw.uniform(0, 1))),
            fixed_s=draw.choice((0.0, draw.uniform(0, 1))),
            micro_batch=draw.randint(1, 8),
        )
        for _ in range(draw.choice((2, 3)))
    ]
    num = draw.randint(len(paces), 14)
    divisions = (one for one in itertools.product(range(num + 1), repeat=len(paces)) if sum(one) == num)
    least = min(slowest_rank_s(one, paces) for one in divisions)
    found = slowest_rank_s(fastest_shares(num, paces), paces)
    yield "no way to divide a batch is faster", found <= least * (1 + 1e-9)
    names = "abcde"[: draw.choice((3, 4, 5))]
    links = {a: {b: LinkModel(latency_s=0.0, bandwidth_Bps=draw.choice((1.0, 2.0, 5.0, 9.0))) for b in names if b != a}
             for a in names}  # fmt: skip

    def slowest(order: tuple[str, ...]) -> float:
        return min(links[a][b].bandwidth_Bps for a, b in zip(order, [*order[1:], order[0]], strict=True))

    best = max(slowest((names[0], *rest)) for rest in itertools.permutations(names[1:]))
    yield "no ring has a faster slowest link", slowest(tuple(best_ring(list(names), links))) == best


def check_host_subsets(case: PlannerCase, draw: random.Random) -> Iterator[PropertyResult]:
    """Against every set of two hosts and more."""
    job, cluster = job_with_shares(case.job, "auto"), case.prediction.cluster
    job = _with_sync(job, DDP) if job.spec.train.sync == "auto" else job
    if not 3 <= len(cluster.host_names) <= 5 or len(cluster.slots) > job.spec.train.batch:
        return
    sets = [
        names
        for num in range(2, len(cluster.host_names) + 1)
        for names in itertools.combinations(cluster.host_names, num)
    ]
    priced = [option for names in sets if fits_in_memory(option := predict_training(job, cluster, names), cluster)]
    found = best_distributed(job, cluster)
    most = max((option.tokens_per_s for option in priced), default=0.0)
    if cluster.hosts[cluster.host_names[0]].memory_bytes is None and most:
        yield "no set of hosts is faster", found is not None and found.tokens_per_s >= most / (1 + TOLERANCE)


def check_advice(case: PlannerCase, draw: random.Random) -> Iterator[PropertyResult]:
    """Whoever follows advice gets what it says."""
    for advice in collect_advice(case.prediction):
        flags = dict(advice.flags)
        if not flags or advice.tokens_per_s is None:
            continue
        asked = PlanRequest(job=case.prediction.job, cluster=case.prediction.cluster, source="")
        asked = request_on_hosts(asked, flags.pop("--hosts", None))
        link = flags.pop("--link", None)
        texts = {name.removeprefix("--").replace("-", "_"): value or "true" for name, value in flags.items()}
        again = answer_request(change_request(asked, texts, link))
        now = again.option(again.chosen).tokens_per_s
        yield "advice that is followed gives what it says", math.isclose(now, advice.tokens_per_s, rel_tol=TOLERANCE)
        if advice.gain is not None and case.prediction.job.noise_tokens is None:
            alone = best_single_host(again.job, case.prediction.cluster)
            yield "and is as much better", alone is not None and math.isclose(
                now / alone.tokens_per_s, advice.gain, rel_tol=TOLERANCE)  # fmt: skip


def check_scale(case: PlannerCase, draw: random.Random) -> Iterator[PropertyResult]:
    """`--scale` is `plan` with more ranks."""
    per_node, is_gpu = draw.choice((1, 2, 8)), draw.random() < 0.6
    nodes = draw.choice((2, 3, 8, 16))
    job = _with_sync(job_with_shares(case.job, "auto"), DDP)
    names = [f"n{i}" for i in range(nodes)]
    local = LinkModel(latency_s=3e-6, bandwidth_Bps=1e11) if is_gpu else LinkModel(latency_s=2e-5, bandwidth_Bps=1e9)
    host = HostRates(tokens_per_s=dict.fromkeys(("fp32", "bf16", "fp16"), 10 ** draw.uniform(2, 5)), local=local)
    devices = [f"cuda:{i}" for i in range(per_node)] if is_gpu else ["cpu"] * per_node
    cluster = Cluster(
        slots=[RankSlot(host=name, device=device, has_bf16=is_gpu) for name in names for device in devices],
        hosts=dict.fromkeys(names, host),
        wire=parse_link(draw.choice(LINKS)).wire,
        jitter=0.02,
    )
    strong = nodes * per_node <= job.spec.train.batch and draw.random() < 0.3
    scenario = build_scenario(job, cluster, strong=strong, jitter=None, mtbf_days=None)
    (point,) = simulate_scaling(scenario, [nodes * per_node])
    planned = predict_training(job if strong else job_with_larger_batch(job, nodes * per_node), cluster)
    yield "--scale equals plan", math.isclose(point.tokens_per_s, planned.tokens_per_s, rel_tol=TOLERANCE)


def _with_sync(job: Job, sync: SyncSpec) -> Job:
    train = msgspec.structs.replace(job.spec.train, sync=str(sync))
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, train=train))


PROPERTIES: tuple[Callable[[PlannerCase, random.Random], Iterator[PropertyResult]], ...] = (
    check_sums, check_limits, check_monotonicity, check_shares, check_host_subsets, check_advice, check_scale,
)  # fmt: skip


def check_case(number: int) -> Iterator[PropertyResult]:
    """All properties of the case of this number."""
    draw = random.Random(number)
    job, cluster = random_job(draw), random_cluster(draw)
    if len(cluster.slots) > job.spec.train.batch:
        return
    case = PlannerCase(job, cluster, predict(job, cluster))
    for holds in PROPERTIES:
        yield from holds(case, draw)


def run_cases(first: int, cases: int, notify: Callable[[str], None] = print) -> tuple[Counter[str], Counter[str]]:
    """(how often each property was looked at, how often it was violated)."""
    looked, violated = Counter[str](), Counter[str]()
    for number in range(first, first + cases):
        for name, is_held in check_case(number):
            looked[name] += 1
            if not is_held:
                violated[name] += 1
                notify(f"case {number}: not so: {name}")
    return looked, violated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    args = parser.parse_args()
    began = time.monotonic()
    looked, violated = run_cases(args.seed, args.cases)
    for name, times in looked.items():
        print(f"{times:9,} × {name}: {violated[name] or 'no'} violation{'' if violated[name] == 1 else 's'}")
    print(f"{args.cases:,} cases in {time.monotonic() - began:.0f} s, {violated.total()} violations")


if __name__ == "__main__":
    main()
