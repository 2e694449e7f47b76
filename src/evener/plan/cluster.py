"""What does the planner know of the machines? From what `probe` wrote into the fleet file, or from a few words.

What is unknown is asked for; what stands in for it is written down in `Cluster.assumed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from evener.core.errors import UsageError
from evener.core.fleet import Fleet, Host, Link, ModelRate, Rates
from evener.core.link import parse_link
from evener.core.prediction import Cluster, HostRates, Job, Wire
from evener.core.shape import PRESETS, GPTShape
from evener.core.spec import MachineSpec
from evener.core.units import link_rate
from evener.plan.compute import MATMUL_SHARE, roofline
from evener.plan.job import DTYPES

# Between two processes of a host, over Gloo: *assumptions*; 2 cores of an AMD EPYC have 1.5 GB/s.
LOCAL_S, LOCAL_BPS = 20e-6, 1e9
UPDATE_BYTES = 40  # of memory traffic a parameter: AdamW reads 4 values and writes 3, clipping reads and writes 3, fp32


class NotMeasuredError(UsageError):
    """Too little was measured to predict anything."""


def cluster_of(
    fleet: Fleet, job: Job, wire: Wire | None = None, machine: MachineSpec | None = None, *, any_dtype: bool = False
) -> Cluster:
    """The fleet's hosts and links for this job; with `wire`, all hosts are joined by it, whatever was measured.

    `machine` is what a spec asks of every host: device, backend, ranks of one that has no GPUs and says nothing else.
    With `any_dtype` a host that is alone may compute in another type than the job's, which is what all hosts have.
    NotMeasuredError says which host or link has no figures, and the command that measures them.
    """
    machine = machine or MachineSpec()
    assumed: list[str] = []
    hosts = [
        _host(name, host, fleet.rates.get(name, {}), job, machine, any_dtype, assumed)
        for name, host in fleet.hosts.items()
    ]
    names = list(fleet.hosts)
    wires = {a: {b: wire or _wire(fleet, a, b, assumed) for b in names if b != a} for a in names}
    backend = machine.backend
    if backend == "auto":
        backend = "nccl" if all(host.device == "cuda" for host in hosts) else "gloo"
    if machine.threads is not None or any(host.threads is not None for host in fleet.hosts.values()):
        assumed.append("every host was probed with the threads that its ranks will have")
    return Cluster(hosts=hosts, wires=wires, backend=backend, assumed=assumed)


def dtype_of(fleet: Fleet, model: str, device: str = "auto") -> str:
    """The arithmetic that all replicas compute in, by the launcher's rule, from what the hosts were measured in.

    That of the GPUs where all are the same, bf16 where all hosts are processors with units for it, else fp32.
    """
    kinds, names, dtypes = set(), set(), set()
    for name, host in fleet.hosts.items():
        kind, rates = _devices(host, fleet.rates.get(name, {}), device)
        kinds.add(kind)
        names |= {rate.name for rate in rates}
        for rate in rates:
            known = rate.models.get(model) or next(iter(rate.models.values()), None)
            dtypes.add(known.dtype if known else "")
    alike = len(dtypes) == 1 and (kinds == {"cpu"} or (kinds == {"cuda"} and len(names) == 1))
    return dtypes.pop() if alike and dtypes <= {"bf16", "fp16"} else "fp32"


def uniform(names: Sequence[str], tokens_per_s: Sequence[float], wire: Wire, num_ranks: int = 1,
            local: Wire | None = None, backend: str = "gloo") -> Cluster:  # fmt: skip
    """Hosts of which only their rates are known, a rank's each, joined by equal wires."""
    hosts = [
        HostRates(
            name=name,
            device="cuda" if backend == "nccl" else "cpu",
            num_ranks=num_ranks,
            tokens_per_s=rate,
            local=local,
        )
        for name, rate in zip(names, tokens_per_s, strict=True)
    ]
    wires = {a: {b: wire for b in names if b != a} for a in names}
    assumed = ["the update of the weights is taken to be part of the tokens/s", "communication takes no processor time"]
    return Cluster(hosts=hosts, wires=wires, backend=backend, assumed=assumed)


def without(cluster: Cluster, *names: str) -> Cluster:
    """The same cluster, those hosts left out."""
    kept = [host for host in cluster.hosts if host.name not in names]
    wires = {
        a: {b: wire for b, wire in row.items() if b not in names} for a, row in cluster.wires.items() if a not in names
    }
    return msgspec.structs.replace(cluster, hosts=kept, wires=wires)


def with_wire(cluster: Cluster, wire: Wire) -> Cluster:
    """The same hosts, all joined by this wire."""
    wires = {a: dict.fromkeys(row, wire) for a, row in cluster.wires.items()}
    return msgspec.structs.replace(cluster, wires=wires)


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The same hosts, every link between them so many times as fast."""
    wires = {
        a: {b: msgspec.structs.replace(wire, bandwidth_Bps=factor * wire.bandwidth_Bps) for b, wire in row.items()}
        for a, row in cluster.wires.items()
    }
    return msgspec.structs.replace(cluster, wires=wires)


def _devices(host: Host, rates: dict[str, Rates], device: str) -> tuple[str, list[Rates]]:
    """The kind of device that ranks use there, and the figures of each device of that kind."""
    wish = device if device != "auto" else host.devices
    gpus = [rate for name, rate in rates.items() if name.startswith("cuda")]
    if wish != "cpu" and (gpus or wish == "cuda"):
        return "cuda", gpus
    return "cpu", [rates["cpu"]] if "cpu" in rates else []


def _host(name: str, host: Host, rates: dict[str, Rates], job: Job, machine: MachineSpec, any_dtype: bool,
          assumed: list[str]) -> HostRates:  # fmt: skip
    device, found = _devices(host, rates, machine.device)
    if not found:
        raise NotMeasuredError(
            f"{name}: nobody measured its {'GPUs' if device == 'cuda' else 'processor'}",
            hint=f"evener probe host --model {job.model} measures it",
        )
    num_ranks = host.ranks or (len(found) if device == "cuda" else machine.ranks)
    slowest = min((_rate(name, rate, job, assumed) for rate in found), key=lambda rate: rate.tokens_per_s)
    rate = found[0]
    divided = -(-num_ranks // len(found))  # ranks of one device divide it
    if divided > 1:
        assumed.append(f"{name}: {divided} ranks divide a device: each takes {divided} times as long for everything")
    update_s = slowest.update_s
    if update_s is None and rate.copy_Bps:
        update_s = UPDATE_BYTES * job.shape.num_params() / rate.copy_Bps
        assumed.append(f"{name}: the update's time follows from its memory bandwidth, {UPDATE_BYTES} bytes a parameter")
    elif update_s is None:
        assumed.append(f"{name}: the update of the weights is taken to be part of its tokens/s")
    local = None
    if num_ranks > 1 and rate.loopback_Bps:
        local = Wire(latency_s=LOCAL_S, bandwidth_Bps=rate.loopback_Bps)
    elif num_ranks > 1:
        local = parse_link("pcie").wire if device == "cuda" else Wire(latency_s=LOCAL_S, bandwidth_Bps=LOCAL_BPS)
        assumed.append(f"{name}: {link_rate(local.bandwidth_Bps)} between its ranks are assumed")
    memories = [one.memory_bytes for one in found if one.memory_bytes is not None]
    return HostRates(
        name=name,
        device=device,
        num_ranks=num_ranks,
        tokens_per_s=slowest.tokens_per_s / divided,
        own_tokens_per_s=_own(name, found, job) / divided if any_dtype else None,
        pass_s=(slowest.pass_s or 0.0) * divided,
        update_s=(update_s or 0.0) * divided,
        cpus=slowest.cpus / divided if slowest.cpus else None,
        sync_Bps=rate.sync_Bps,
        sum_Bps=rate.sum_Bps.get("fp32"),
        copy_Bps=rate.copy_Bps,
        local=local,
        memory_bytes=min(memories, default=None),
        bound_by=_bound_by(rate, job),
    )


def _own(name: str, found: Sequence[Rates], job: Job) -> float:
    """Tokens/s of the slowest of its devices, each in the type in which it was measured."""
    rates = []
    for device in found:
        known = device.models.get(job.model) or next(iter(device.models.values()), None)
        dtype = DTYPES.get(known.dtype, job.dtype) if known else job.dtype
        rates.append(_rate(name, device, msgspec.structs.replace(job, dtype=dtype), []).tokens_per_s)
    return min(rates)


def _bound_by(rate: Rates, job: Job) -> str | None:
    matmul_flops = rate.matmul_flops.get(job.dtype)
    if matmul_flops is None or rate.copy_Bps is None:
        return None
    tokens = job.micro_batch * job.shape.block_size
    element_bytes = 4 if job.dtype == "fp32" else 2
    return roofline(
        job.shape, tokens, matmul_flops=matmul_flops, copy_Bps=rate.copy_Bps, element_bytes=element_bytes
    ).bound_by


def _rate(name: str, rates: Rates, job: Job, assumed: list[str]) -> ModelRate:
    """What the device does with this job: measured, or derived by FLOPs from what was."""
    known = job.model in rates.models
    if rates.models:
        nearest = min(rates.models, key=lambda one: abs(math.log(_work(_shape(one, job)) / _work(job.shape))))
        model = job.model if known else nearest
        rate, shape = rates.models[model], _shape(model, job)
        ratio = shape.flops_per_token() / job.shape.flops_per_token()
        if not known:
            assumed.append(f"{name}: its rate of {job.model} follows from that of {model}, by FLOPs; "
                           f"evener probe host --model {job.model} measures it")  # fmt: skip
        elif not _is_same(shape, job.shape):
            assumed.append(f"{name}: its rate of this {model} follows from that of the preset, by FLOPs")
        if rate.dtype not in ("", job.dtype):
            other, own = rates.matmul_flops.get(rate.dtype), rates.matmul_flops.get(job.dtype)
            slower = own / other if own and other else 0.5 if job.dtype == "fp32" else 1.0
            assumed.append(f"{name}: was measured in {rate.dtype}; {job.dtype} is taken to run at {slower:.0%} of that")
            ratio *= slower
        params = job.shape.num_params() / shape.num_params()
        return msgspec.structs.replace(
            rate,
            tokens_per_s=rate.tokens_per_s * ratio,
            pass_s=None if rate.pass_s is None else rate.pass_s * params,
            update_s=None if rate.update_s is None else rate.update_s * params,
        )
    matmul_flops = rates.matmul_flops.get(job.dtype)
    if matmul_flops is None:
        raise NotMeasuredError(
            f"{name}: nobody measured how fast it trains", hint=f"evener probe host --model {job.model} measures it"
        )
    assumed.append(f"{name}: {MATMUL_SHARE:.0%} of its matrix products' speed is assumed for the whole model")
    return ModelRate(tokens_per_s=MATMUL_SHARE * matmul_flops / job.shape.flops_per_token())


def _is_same(probed: GPTShape, wanted: GPTShape) -> bool:
    """Do they differ in the vocabulary alone, which FLOPs account for?"""
    return msgspec.structs.replace(probed, vocab_size=wanted.vocab_size) == wanted


def _work(shape: GPTShape) -> float:
    return float(shape.flops_per_token())


def _shape(model: str, job: Job) -> GPTShape:
    """The shape that the probe ran; a preset that is no more, or a name of the user's own, is the job's."""
    return PRESETS.get(model, job.shape)


def _wire(fleet: Fleet, source: str, target: str, assumed: list[str]) -> Wire:
    link = fleet.links.get(source, {}).get(target)
    if link is None:
        link = fleet.links.get(target, {}).get(source)
        if link is None:
            raise NotMeasuredError(
                f"{source} → {target}: nobody measured this link",
                hint="evener probe wire measures it; --link 1GbE assumes one",
            )
        assumed.append(f"{source} → {target} is taken to be as fast as the way back")
    return wire_of(link)


def wire_of(link: Link) -> Wire:
    """A measured link: α is half a round trip."""
    return Wire(latency_s=link.rtt_s / 2, bandwidth_Bps=link.bandwidth_Bps)
