"""What does the planner know of the machines? From what `probe` wrote into the fleet file, or from a few words.

What is unknown is asked for; what stands in for it is written down in `Cluster.assumed`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

import msgspec

from evener.core.errors import UsageError
from evener.core.fleet import Fleet, Host, Link, ModelRate, Rates
from evener.core.link import parse_link
from evener.core.prediction import Cluster, HostRates, Job, Wire
from evener.core.roster import Dtype, Seat, devices_of, dtypes_of, largest_micro_batch, wished_device
from evener.core.shape import PRESETS, GPTShape
from evener.core.units import link_rate
from evener.plan.compute import MATMUL_SHARE, Bound, roofline

# Between two processes of a host, over Gloo: *assumptions*; 2 cores of an AMD EPYC have 1.5 GB/s.
LOCAL_S, LOCAL_BPS = 20e-6, 1e9
UPDATE_BYTES = 40  # of memory traffic a parameter: AdamW reads 4 values and writes 3, clipping reads and writes 3, fp32


class NotMeasuredError(UsageError):
    """Too little was measured to predict anything."""


def cluster_of(fleet: Fleet, job: Job, wire: Wire | None = None, seats: Sequence[Seat] | None = None) -> Cluster:
    """The fleet's hosts and links for this job; with `wire`, all hosts are joined by it, whatever was measured.

    `seats` are those that were found on the hosts; where nobody looked they follow from what was measured there.
    NotMeasuredError says which host or link has no figures, and the command that measures them.
    """
    assumed: list[str] = []
    rates = {name: fleet.rates.get(name, {}) for name in fleet.hosts}
    if seats is None:
        seats = [seat for name, host in fleet.hosts.items() for seat in _seats(name, host, rates[name], job)]
    together = dict(zip((seat.host for seat in seats), dtypes_of(seats, job.spec.model.dtype), strict=True))
    hosts = {}
    for name in fleet.hosts:
        of_host = [seat for seat in seats if seat.host == name]
        alone = dtypes_of(of_host, job.spec.model.dtype)[0]
        hosts[name] = _host(name, of_host, rates[name], job, list(dict.fromkeys([together[name], alone])), assumed)
    names = list(fleet.hosts)
    wires = {a: {b: wire or _wire(fleet, a, b, assumed) for b in names if b != a} for a in names}
    if job.spec.machine.threads is not None or any(host.threads is not None for host in fleet.hosts.values()):
        assumed.append("every host was probed with the threads that its ranks will have")
    return Cluster(seats=list(seats), hosts=hosts, wires=wires, assumed=list(dict.fromkeys(assumed)))


def uniform(tokens_per_s: Mapping[str, float], wire: Wire, devices: Sequence[str] = ("cpu",),
            local: Wire | None = None) -> Cluster:  # fmt: skip
    """Hosts of which only the rate of each rank is known, by name, in whatever arithmetic, joined by equal wires."""
    rates = {name: dict.fromkeys(get_args(Dtype), rate) for name, rate in tokens_per_s.items()}
    return Cluster(
        seats=[Seat(host=name, device=device, has_bf16=device != "cpu") for name in rates for device in devices],
        hosts={name: HostRates(tokens_per_s=rate, local=local) for name, rate in rates.items()},
        wires={a: {b: wire for b in rates if b != a} for a in rates},
        assumed=["the update of the weights is taken to be part of the tokens/s",
                 "communication takes no processor time, nor do gradients in fewer bytes"],
    )  # fmt: skip


def with_wire(cluster: Cluster, wire: Wire) -> Cluster:
    """The same hosts, all joined by this wire."""
    wires = {a: dict.fromkeys(row, wire) for a, row in cluster.wires.items()}
    return msgspec.structs.replace(cluster, wires=wires)


def only(cluster: Cluster, names: Collection[str]) -> Cluster:
    """These of its hosts."""
    return msgspec.structs.replace(
        cluster,
        seats=[seat for seat in cluster.seats if seat.host in names],
        hosts={name: host for name, host in cluster.hosts.items() if name in names},
        wires={a: {b: wire for b, wire in row.items() if b in names}
               for a, row in cluster.wires.items() if a in names},
    )  # fmt: skip


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The same hosts, every link between them so many times as fast."""
    wires = {
        a: {b: msgspec.structs.replace(wire, bandwidth_Bps=factor * wire.bandwidth_Bps) for b, wire in row.items()}
        for a, row in cluster.wires.items()
    }
    return msgspec.structs.replace(cluster, wires=wires)


def _gpus(rates: Mapping[str, Rates]) -> list[Rates]:
    return [rate for device, rate in rates.items() if device.startswith("cuda")]


def _seats(name: str, host: Host, rates: Mapping[str, Rates], job: Job) -> list[Seat]:
    """On the devices that were measured, each of which has bf16 if it was measured in it.

    A GPU of which nobody said what it was measured in is taken to have it.
    """
    gpus = _gpus(rates)
    if wished_device(host, job.spec.machine) == "cuda" and not gpus:
        raise _not_measured(name, "GPUs", job)
    found = []
    for device in devices_of(name, host, len(gpus), job.spec.machine):
        rate = _rates_on(name, device, rates, job)
        known = rate.models.get(job.model) or next(iter(rate.models.values()), None)
        dtype = (known.dtype if known else "") or ("fp32" if device == "cpu" else "bf16")
        found.append(Seat(host=name, device=device, name=rate.name, has_bf16=dtype == "bf16"))
    return found


def _rates_on(name: str, device: str, rates: Mapping[str, Rates], job: Job) -> Rates:
    """What was measured on a device, or on the last of its kind."""
    known = [rates["cpu"]] if device == "cpu" and "cpu" in rates else _gpus(rates) if device != "cpu" else []
    if not known:
        raise _not_measured(name, "processor" if device == "cpu" else "GPUs", job)
    return known[0] if device == "cpu" else known[min(int(device.removeprefix("cuda:")), len(known) - 1)]


def _not_measured(name: str, what: str, job: Job) -> NotMeasuredError:
    return NotMeasuredError(
        f"{name}: nobody measured its {what}", hint=f"evener probe host --model {job.model} measures it"
    )


def _host(name: str, seats: Sequence[Seat], rates: Mapping[str, Rates], job: Job, dtypes: Sequence[Dtype],
          assumed: list[str]) -> HostRates:  # fmt: skip
    """`dtypes`: in which its ranks may have to compute, that beside all other hosts first."""
    devices = [seat.device for seat in seats]
    found = [_rates_on(name, device, rates, job) for device in dict.fromkeys(devices)]
    divided = -(-len(devices) // len(found))  # ranks of one device divide it
    if divided > 1:
        assumed.append(f"{name}: {divided} ranks divide a device: each takes {divided} times as long for everything")
    speeds = {}
    for dtype in dtypes:
        told = assumed if dtype == dtypes[0] else []  # what a host alone may compute in is what it was measured in
        speeds[dtype] = min((_rate(name, rate, job, dtype, told) for rate in found), key=lambda one: one.tokens_per_s)
    slowest, rate, is_gpu = speeds[dtypes[0]], found[0], devices[0] != "cpu"
    update_s = slowest.update_s
    if update_s is None and rate.copy_Bps:
        update_s = UPDATE_BYTES * job.shape.num_params() / rate.copy_Bps
        assumed.append(f"{name}: the update's time follows from its memory bandwidth, {UPDATE_BYTES} bytes a parameter")
    elif update_s is None:
        assumed.append(f"{name}: the update of the weights is taken to be part of its tokens/s")
    local = None
    if len(devices) > 1 and rate.loopback_Bps:
        local = Wire(latency_s=LOCAL_S, bandwidth_Bps=rate.loopback_Bps)
    elif len(devices) > 1:
        local = parse_link("pcie").wire if is_gpu else Wire(latency_s=LOCAL_S, bandwidth_Bps=LOCAL_BPS)
        assumed.append(f"{name}: {link_rate(local.bandwidth_Bps)} between its ranks are assumed")
    memories = [one.memory_bytes for one in found if one.memory_bytes is not None]
    return HostRates(
        tokens_per_s={dtype: one.tokens_per_s / divided for dtype, one in speeds.items()},
        pass_s=(slowest.pass_s or 0.0) * divided,
        update_s=(update_s or 0.0) * divided,
        cpus=slowest.cpus / divided if slowest.cpus else None,
        sync_Bps=rate.sync_Bps,
        sum_Bps=rate.sum_Bps.get("fp32"),
        copy_Bps=rate.copy_Bps,
        coding_Bps=dict(rate.coding_Bps),
        local=local,
        memory_bytes=min(memories, default=None),
        bound_by=_bound_by(rate, job, dtypes[0], slowest),
    )


def _bound_by(rate: Rates, job: Job, dtype: Dtype, speed: ModelRate) -> Bound | None:
    matmul_flops = rate.matmul_flops.get(dtype)
    if matmul_flops is None or rate.copy_Bps is None:
        return None
    tokens = largest_micro_batch(job.spec, job.shape.block_size) * job.shape.block_size
    element_bytes = 4 if dtype == "fp32" else 2
    roof = roofline(job.shape, tokens, matmul_flops=matmul_flops, copy_Bps=rate.copy_Bps, element_bytes=element_bytes)
    return roof.bound_by((speed.pass_s or 0.0) + tokens / speed.tokens_per_s)


def _rate(name: str, rates: Rates, job: Job, dtype: Dtype, assumed: list[str]) -> ModelRate:
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
        if rate.dtype not in ("", dtype):
            other, own = rates.matmul_flops.get(rate.dtype), rates.matmul_flops.get(dtype)
            slower = own / other if own and other else 0.5 if dtype == "fp32" else 1.0
            assumed.append(f"{name}: was measured in {rate.dtype}; {dtype} is taken to run at {slower:.0%} of that")
            ratio *= slower
        params = job.shape.num_params() / shape.num_params()
        return msgspec.structs.replace(
            rate,
            tokens_per_s=rate.tokens_per_s * ratio,
            pass_s=None if rate.pass_s is None else rate.pass_s * params,
            update_s=None if rate.update_s is None else rate.update_s * params,
        )
    matmul_flops = rates.matmul_flops.get(dtype)
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
