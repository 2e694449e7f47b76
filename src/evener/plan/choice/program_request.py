"""What a run of a user's program showed of it, in the planner's terms: a job, and the manifest with its shares.

A rank's samples in a typical step are its share of the batch. Where the program's samples were not seen, each rank's
part of a step counts as one batch. A step is one forward and backward: how a rank divides its samples is the program's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import permutations

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.shell import quote_word
from evener.core.base.units import format_bytes, join_names
from evener.core.cluster.fleet_file import Fleet, HostLink, Rates, select_hosts
from evener.core.cluster.link import LinkModel
from evener.core.model.flops import roof_s
from evener.core.model.gradients import ProgramModel
from evener.core.run.prediction import Cluster, HostRates, Job, PlanOption, Prediction
from evener.core.run.resolve import check_sync_for_shape
from evener.core.run.roster import DDP, NO_SYNC, Member, Roster
from evener.core.run.rundir import Manifest
from evener.core.run.step_cost import StepRecord, align_steps
from evener.core.run.step_statistics import summarize_steps
from evener.plan.choice.advice import format_loss_penalty, format_throughput
from evener.plan.choice.break_even import Advice
from evener.plan.choice.calibration import rates_besides_compute
from evener.plan.choice.cluster import (
    ASSUMED_JITTER,
    LOCAL_BANDWIDTH_BPS,
    LOCAL_LATENCY_S,
    AssumptionLog,
    link_models,
    to_link_model,
)
from evener.plan.choice.options import MIN_GAIN, predict_training
from evener.plan.choice.search import predict
from evener.plan.cost.collective_cost import sent_bytes
from evener.plan.cost.sync_traffic import GRADIENT_BYTES

MAX_EXCHANGES = 1.5  # bytes of a step over those of its gradients: beside them are sums of the loss and the like
PROGRAM_FLAGS = ("sync", "shares", "loss_budget")  # of train that have a meaning for a user's program


def program_job(run: str, manifest: Manifest, records: Sequence[Sequence[StepRecord]]) -> tuple[Job, Manifest]:
    """Return the job of a run of a user's program, and its manifest with the shares that ranks had.

    Raise UsageError if the run does not show what the program exchanges, or how it divides its batch.
    """
    roster, report = manifest.roster, f"evener report {quote_word(run)}"
    if any(member.is_gpu for member in roster.members):
        raise UsageError(f"{run}: what a step waits for on a GPU is not measured of a user's program", hint=report)
    own = manifest.collectives
    if not manifest.gradients and (own.obstacle or not own.calls):
        why = own.obstacle or "it shows no exchange of gradients, as a run of more than 3 steps does"
        raise UsageError(f"{run}: {manifest.program} cannot be predicted otherwise: {why}", hint=report)
    steps = align_steps(dict(zip((member.rank for member in roster.members), records, strict=True)))
    ranks = summarize_steps(steps, manifest).ranks
    samples = [round(rank.tokens or 0.0) for rank in ranks]
    if not all(samples):
        raise UsageError(f"{run}: not every rank has trained on samples of its own", hint=report)
    once = sent_bytes("all_reduce", GRADIENT_BYTES * sum(tensor.num_params for tensor in manifest.gradients),
                      roster.world_size, roster.backend)  # fmt: skip
    sent = max(rank.bytes or 0 for rank in ranks)
    if manifest.gradients and roster.sync == DDP and sent > MAX_EXCHANGES * once:
        raise UsageError(
            f"{run}: a rank sends {format_bytes(sent)} a step, and its gradients once are {format_bytes(once)}",
            hint="only one exchange of DDP's gradients in a step can be predicted: accumulate under no_sync()",
        )
    members = [msgspec.structs.replace(member, share=num, micro_batch=num)
               for member, num in zip(roster.members, samples, strict=True)]  # fmt: skip
    peaks = manifest.result.peak_memory_bytes if manifest.result else []
    shape = ProgramModel(
        name=manifest.program or "program",
        unit="batches" if manifest.unit == "batches" else "samples",
        gradients=tuple(manifest.gradients),
        collectives=() if manifest.gradients else own.calls,
        num_updated=manifest.num_params,
        can_divide=manifest.can_divide and bool(manifest.gradients),
        peak_memory_bytes=max(peaks, default=None),
        flops=tuple(manifest.flops[0].per_sample.items()) if manifest.flops else (),
    )
    spec = manifest.spec
    sync = DDP if roster.sync == NO_SYNC else roster.sync
    check_sync_for_shape(sync, shape)
    train = msgspec.structs.replace(spec.train, batch=sum(samples), micro_batch=sum(samples), sync=str(sync))
    shares = "equal" if len(set(samples)) == 1 else ":".join(map(str, samples))
    dtypes = {member.dtype for member in members}
    spec = msgspec.structs.replace(
        spec,
        train=train,
        machine=msgspec.structs.replace(spec.machine, shares=shares),
        model=msgspec.structs.replace(spec.model, dtype=dtypes.pop()) if len(dtypes) == 1 else spec.model,
    )
    job = Job(spec=spec, shape=shape)
    return job, msgspec.structs.replace(manifest, roster=msgspec.structs.replace(roster, members=members))


def move_program(job: Job, cluster: Cluster, fleet: Fleet, hosts: Sequence[tuple[str, int]]) -> tuple[Job, Cluster]:
    """Return a program's job and the cluster of other hosts than those of the run that `cluster` is calibrated to.

    `hosts`: names and numbers of ranks. A host that the run did not have is as much faster or slower than one that it
    had as probing both has found: training one of evener's models, in the dtypes of the program's FLOPs. That ratio
    holds memory traffic and overhead, too, which FLOPs over a rate of matrix products would leave out. A rank takes as
    many samples of a step as the mean rank of the run. Raise UsageError that names what nobody measured.
    """
    flag, assumed = fleet.cli_flag, AssumptionLog()
    known = [name for name in cluster.host_names if "cpu" in fleet.rates.get(name, {})]
    new = [name for name, _ in hosts if name not in cluster.hosts]
    if new and not known:
        raise UsageError(
            f"nobody has compared {join_names(new)} with {join_names(cluster.host_names)}, where it ran",
            hint=f"evener probe host{flag}, with all of them in the fleet file",
        )
    if gpus := [name for name, _ in hosts if any(device != "cpu" for device in fleet.rates.get(name, {}))]:
        raise UsageError(f"{join_names(gpus)}: on GPUs no program of your own is predicted")
    ranks_before = Counter(slot.host for slot in cluster.slots)
    slots, rates = [], {}
    for name, num_ranks in hosts:
        like = name if name in cluster.hosts else known[0]
        flops = dict(job.shape.flops) if isinstance(job.shape, ProgramModel) else {}
        speed = _relative_speed(fleet, name, like, flops, assumed) if name != like else 1.0
        of_rank = speed * ranks_before[like] / num_ranks
        slot = next(slot for slot in cluster.slots if slot.host == like)
        slots += [msgspec.structs.replace(slot, host=name)] * num_ranks
        rates[name] = _scaled_rates(cluster.hosts[like], of_rank)
        if name != like:
            member = Member(rank=0, host=name, device="cpu", dtype=next(iter(rates[name].tokens_per_s)), share=1,
                            micro_batch=1)  # fmt: skip
            local = rates[name].local or LinkModel(latency_s=LOCAL_LATENCY_S, bandwidth_Bps=LOCAL_BANDWIDTH_BPS)
            memory_bytes = fleet.rates[name]["cpu"].memory_bytes
            besides = rates_besides_compute(member, memory_bytes, fleet, local, assumed)
            rates[name] = msgspec.structs.replace(
                besides,
                tokens_per_s=rates[name].tokens_per_s,
                pass_s=rates[name].pass_s,
                update_s=rates[name].update_s,
                data_s=rates[name].data_s,
            )
    names = [name for name, _ in hosts]
    wire, wires = None, dict[str, dict[str, LinkModel]]()
    if len(names) > 1:
        wire, wires = link_models(select_hosts(fleet, ",".join(names)), assumed)
    moved = Cluster(
        slots=slots, hosts=rates, wire=wire, wires=wires, jitter=ASSUMED_JITTER, assumed=assumed.sentences(len(names))
    )
    batch = max(1, round(job.spec.train.batch / len(cluster.slots))) * len(slots)
    train = msgspec.structs.replace(job.spec.train, batch=batch, micro_batch=batch, sync=str(DDP))
    machine = msgspec.structs.replace(job.spec.machine, shares="equal")
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, train=train, machine=machine)), moved


def with_links_probed_since(cluster: Cluster, fleet: Fleet, since: float) -> Cluster:
    """Return the cluster with those links of a fleet file that were probed after this Unix time.

    Links inside a host were fitted together with the old ones, so what they are is assumed then.
    """
    wires, names = {source: dict(row) for source, row in cluster.wires.items()}, cluster.host_names
    for a, b in permutations(names, 2):
        link = fleet.links.get(a, {}).get(b) or fleet.links.get(b, {}).get(a)
        if link is not None and _probed_at(link) > since:
            wires.setdefault(a, {})[b] = to_link_model(link)
    if wires == cluster.wires:
        return cluster
    local = LinkModel(latency_s=LOCAL_LATENCY_S, bandwidth_Bps=LOCAL_BANDWIDTH_BPS)
    hosts = {name: msgspec.structs.replace(host, local=local) for name, host in cluster.hosts.items()}
    return msgspec.structs.replace(cluster, wires=wires, hosts=hosts)


def _probed_at(link: HostLink) -> float:
    """Return the Unix time at which a link was probed; -inf if it was not, or the file does not say it."""
    try:
        return datetime.fromisoformat(link.measured).timestamp()
    except ValueError:
        return -math.inf


def _relative_speed(
    fleet: Fleet, name: str, reference: str, flops: Mapping[str, float], assumed: AssumptionLog
) -> float:
    """Return how many times as fast as the reference a host trains, by the same probe of both.

    Where a model was probed in other dtypes than those of the program's FLOPs, its rate is scaled by that of matrix
    products: a processor may have bf16 in hardware, and another not.
    """
    host, other = (fleet.rates.get(one, {}).get("cpu") for one in (name, reference))
    for what in other.models if host and other else ():
        if host and other and what in host.models:
            speed = host.models[what].tokens_per_s / other.models[what].tokens_per_s
            factors = [_dtype_factor(one, what, flops) for one in (host, other)]
            how = f"as it does with {what}"
            if None not in factors and factors[0] != factors[1]:
                speed *= (factors[0] or 1.0) / (factors[1] or 1.0)
                how += f" and, by matrix products, in {' and '.join(sorted(flops))}"
            assumed.add(f"it is taken to train {speed:.2f} times as fast as {reference}, {how}", name)
            return speed
    raise UsageError(
        f"nobody has compared {name} with {reference}, where it ran",
        hint=f"evener probe host{fleet.cli_flag} measures both, with one model",
    )


def _dtype_factor(rates: Rates, model: str, flops: Mapping[str, float]) -> float | None:
    """Return how many times as fast matrix products are in the dtypes of these FLOPs as in that of a probed model; None
    if that was not measured.
    """
    probed, own_s = rates.matmul_flops.get(rates.models[model].dtype), roof_s(flops, rates.matmul_flops)
    return sum(flops.values()) / own_s / probed if own_s and probed else None


def _scaled_rates(rates: HostRates, factor: float) -> HostRates:
    """Return the rates of a rank that does everything so many times as fast."""
    return msgspec.structs.replace(
        rates,
        tokens_per_s={dtype: factor * rate for dtype, rate in rates.tokens_per_s.items()},
        pass_s=rates.pass_s / factor,
        update_s=rates.update_s / factor,
        data_s=rates.data_s / factor,
    )


class FasterLaunch(msgspec.Struct, frozen=True):
    """How a program would train faster than with the chosen option."""

    option: PlanOption
    gain: float  # by prediction: what both leave out cancels
    tokens_per_s: float  # of the chosen option, times the gain


def faster_launch(prediction: Prediction) -> FasterLaunch | None:
    """Return the hosts, strategy and shares with which the program would train fastest; None if the chosen option is
    as fast.
    """
    job, cluster, chosen = prediction.job, prediction.cluster, prediction.option(prediction.chosen)
    spec = msgspec.structs.replace(
        job.spec,
        train=msgspec.structs.replace(job.spec.train, sync="auto"),
        machine=msgspec.structs.replace(job.spec.machine, shares="auto") if _can_divide(job) else job.spec.machine,
    )
    answer = predict(msgspec.structs.replace(job, spec=spec), cluster, keep_order=True)
    if not answer.recommended:
        return None
    best = answer.option(answer.recommended)
    gain = best.tokens_per_s / predict_training(job, cluster).tokens_per_s
    return FasterLaunch(best, gain, gain * chosen.tokens_per_s) if gain > MIN_GAIN else None


def _can_divide(job: Job) -> bool:
    return isinstance(job.shape, ProgramModel) and job.shape.can_divide


def advise_on_launch(prediction: Prediction) -> list[Advice]:
    """Advise on the option with which the program would train fastest, if it is not the chosen one."""
    faster, chosen = faster_launch(prediction), prediction.option(prediction.chosen)
    if faster is None:
        return []
    flags, before = launch_flags(faster.option), launch_flags(chosen)
    hosts = faster.option.roster.hosts
    how = f"with {flags}" if flags else f"without {before}" if before else ""
    where = f"on {join_names(hosts)} alone" if len(hosts) < len(chosen.roster.hosts) else ""
    rate = format_throughput(faster.tokens_per_s, prediction.job.unit)
    gain = f"{faster.gain:.2f} times as much{format_loss_penalty(faster.option)}"
    return [Advice(text=f"Launched {' '.join(filter(None, (where, how)))}, it would train {rate}, {gain}.")]


def launch_flags(option: PlanOption) -> str:
    """Return the flags of `evener launch` that select an option's strategy and shares."""
    roster = option.roster
    flags = [f"--sync {roster.sync}"] if roster.world_size > 1 and roster.sync != DDP else []
    if (shares := launch_shares(roster)) != "equal":
        flags.append(f"--shares {shares}")
    return " ".join(flags)


def launch_shares(roster: Roster) -> str:
    """Return the shares of a Roster in the form of --shares; those of large batches in three digits.

    >>> from evener.core.run.roster import Member
    >>> own = {"device": "cpu", "dtype": "fp32", "micro_batch": 1}
    >>> for shares in ((8, 8), (11, 5), (4068, 1932)):
    ...     members = [Member(rank=i, host="ab"[i], share=share, **own) for i, share in enumerate(shares)]
    ...     print(launch_shares(Roster(members=members, sync=DDP, backend="gloo")))
    equal
    11:5
    2.11:1
    """
    if roster.has_equal_shares:
        return "equal"
    if max(roster.shares) < 100 or not min(roster.shares):
        return ":".join(map(str, roster.shares))
    return ":".join(f"{share / min(roster.shares):.3g}" for share in roster.shares)
