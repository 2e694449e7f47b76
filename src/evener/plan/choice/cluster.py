"""Build the planner's model of the machines from the rates that `probe` wrote into the fleet file, or from flags.

A missing measurement is an error with the command that takes it, or an assumption recorded in `Cluster.assumed`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import get_args

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.shell import quote_word
from evener.core.base.units import format_bit_rate, join_names, median, parse_bytes
from evener.core.cluster.fleet_file import Fleet, HostConfig, HostLink, ModelRate, Rates
from evener.core.cluster.hardware import Hardware, parse_hardware
from evener.core.cluster.link import LinkModel, parse_link
from evener.core.model.fine_tuning import FineTuning
from evener.core.model.gradients import ProgramModel
from evener.core.model.shape import PRESETS, GPTShape
from evener.core.run.prediction import Cluster, HostRates, Job, RateBasis
from evener.core.run.roster import (
    Dtype,
    RankSlot,
    Roster,
    choose_dtypes,
    micro_batch_limit,
    rank_devices,
    requested_device,
)
from evener.core.run.run_spec import PRETRAINED_PREFIX
from evener.plan.cost.roofline import ASSUMED_MFU, Bottleneck, roofline

# Between two processes of a host, over Gloo: *assumptions*; 2 cores of an AMD EPYC have 1.5 GB/s.
LOCAL_LATENCY_S, LOCAL_BANDWIDTH_BPS = 20e-6, 1e9
NVLINK_MIN_BPS = 65e9  # between GPUs of a host: no PCIe is that fast
# memory traffic per parameter: AdamW reads 4 values and writes 3, clipping reads and writes 3, fp32
UPDATE_BYTES_PER_PARAM = 40
# FLOPs per second of transformers' Llama over those of the preset g6, the nearest in FLOPs: all weights trained, LoRA.
# *Measured* with 31M parameters, 4 x 512 tokens, rank 16, on one core of an Intel Xeon with AMX, 2026-11-30: in bf16
# many small operations cost more beside faster matrix products. So a probe of the model itself is better.
FINE_TUNING_SPEED = {"fp32": (0.95, 0.76), "bf16": (0.74, 0.52), "fp16": (0.74, 0.52)}
ASSUMED_JITTER = 0.02  # variation of a rank's compute time between steps, where waiting was not measured: *assumption*


class NotMeasuredError(UsageError):
    """Raised when too little was measured to predict anything."""


class AssumptionLog:
    """A log of assumptions; the same assumption about several hosts becomes one sentence."""

    def __init__(self) -> None:
        self._of: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def add(self, text: str, host: str = "") -> None:
        """Add a sentence about one host, or about all hosts if `host` is ""."""
        self._of[text][host] = None

    def sentences(self, num_hosts: int) -> list[str]:
        """Return the sentences in the order in which they were added."""
        return [
            text if "" in names else f"{_format_hosts(list(names), num_hosts)}: {text}"
            for text, names in self._of.items()
        ]


def _format_hosts(names: Sequence[str], num_hosts: int) -> str:
    return "all hosts" if len(names) == num_hosts > 2 else join_names(names)


def build_cluster(
    fleet: Fleet, job: Job, wire: LinkModel | None = None, slots: Sequence[RankSlot] | None = None
) -> Cluster:
    """Build the cluster of the fleet's hosts and links for this job; `wire` overrides all links between hosts.

    `slots` are the rank slots detected on the hosts; by default they are derived from the devices in the fleet file.
    Raise NotMeasuredError that names the host or link without figures and the command that measures them.
    """
    if isinstance(job.shape, ProgramModel):
        raise NotMeasuredError(f"{job.model}: how fast it trains, only a run of it shows")
    if isinstance(job.shape, FineTuning) and job.shape.model.layers is None:
        raise NotMeasuredError(f"{job.model}: evener does not know the layers of a {job.shape.model.architecture}")
    assumed, flag = AssumptionLog(), fleet.cli_flag
    kinds = _host_kinds(fleet)
    first = {kind: name for name, kind in reversed(kinds.items())}
    of_kind = {kind: _known_rates(fleet.hosts[name], fleet.rates.get(name, {})) for kind, name in first.items()}
    rates = {name: of_kind[kind] for name, kind in kinds.items()}
    if slots is None:
        slots = [slot for name, host in fleet.hosts.items() for slot in _rank_slots(name, host, rates[name], job, flag)]
    common_dtypes = dict(zip((slot.host for slot in slots), choose_dtypes(slots, job.spec.model.dtype), strict=True))
    of_host: defaultdict[str, list[RankSlot]] = defaultdict(list)
    for slot in slots:
        of_host[slot.host].append(slot)
    hosts: dict[str, HostRates] = {}
    alike: dict[object, tuple[HostRates, list[str]]] = {}  # identical hosts are computed once and share one object
    for name, host in fleet.hosts.items():
        own_dtype = choose_dtypes(of_host[name], job.spec.model.dtype)[0]
        dtypes = tuple(dict.fromkeys([common_dtypes[name], own_dtype]))
        devices = tuple(slot.device for slot in of_host[name])
        key = (kinds[name], devices, dtypes)
        if key not in alike:
            alike[key] = _host_rates(name, host, devices, rates[name], job, dtypes, flag)
        hosts[name], texts = alike[key]
        for text in texts:
            assumed.add(text, name)
    common, wires = (wire, {}) if wire is not None else link_models(fleet, assumed)
    for name in wires:
        links = [link for other, link in fleet.links.get(name, {}).items() if other in hosts]
        hosts[name] = _with_link_cpu_time(hosts[name], links)
    if job.spec.machine.threads is not None or any(host.threads is not None for host in fleet.hosts.values()):
        assumed.add("every host was probed with as many threads as its ranks will have")
    num_links = sum(map(len, wires.values()))
    are_measured = num_links == len(hosts) * (len(hosts) - 1) and not any(
        link.declared for row in fleet.links.values() for link in row.values())  # fmt: skip
    return Cluster(slots=list(slots), hosts=hosts, wire=common, wires=wires, jitter=ASSUMED_JITTER,
                   are_links_measured=are_measured,
                   assumed=assumed.sentences(len(hosts)))  # fmt: skip


def uniform_cluster(tokens_per_s: Mapping[str, float], link: LinkModel, devices: Sequence[str] = ("cpu",),
            local: LinkModel | None = None) -> Cluster:  # fmt: skip
    """Build a cluster from the tokens/s of one rank on each host (the same in any dtype) and one link for all hosts."""
    rates = {name: dict.fromkeys(get_args(Dtype), rate) for name, rate in tokens_per_s.items()}
    return Cluster(
        slots=[RankSlot(host=name, device=device, has_bf16=device != "cpu") for name in rates for device in devices],
        hosts={name: HostRates(tokens_per_s=rate, local=local) for name, rate in rates.items()},
        wire=link,
        assumed=["the weight update is assumed to be part of the tokens/s",
                 "communication and compression are assumed to take no processor time"],
    )  # fmt: skip


def with_uniform_link(cluster: Cluster, link: LinkModel) -> Cluster:
    """Return the cluster with this link between all hosts."""
    return msgspec.structs.replace(cluster, wire=link, wires={}, are_links_measured=False)


def subcluster(cluster: Cluster, names: Collection[str]) -> Cluster:
    """Return the cluster restricted to these hosts."""
    return msgspec.structs.replace(
        cluster,
        slots=[slot for slot in cluster.slots if slot.host in names],
        hosts={name: host for name, host in cluster.hosts.items() if name in names},
        wires={a: {b: wire for b, wire in row.items() if b in names}
               for a, row in cluster.wires.items() if a in names},
    )  # fmt: skip


def with_added_hosts(cluster: Cluster, roster: Roster) -> Cluster | None:
    """Return the cluster with the hosts of the Roster that it lacks, as they were added to the run and not measured.

    Each is assumed to be as fast as the slowest host that has a rate for its dtype, behind the slowest link. Return
    None if there is no such host.
    """
    added = [member for member in roster.members if member.host not in cluster.hosts]
    hosts = dict(cluster.hosts)
    for member in added:
        known = [host for host in cluster.hosts.values() if member.dtype in host.tokens_per_s]
        if not known:
            return None
        slowest = min(known, key=lambda host: host.tokens_per_s[member.dtype])
        local = slowest.local or LinkModel(latency_s=LOCAL_LATENCY_S, bandwidth_Bps=LOCAL_BANDWIDTH_BPS)
        hosts[member.host] = msgspec.structs.replace(slowest, local=local, memory_bytes=None)
    slowest_link = min(cluster.distinct_links, key=lambda link: (link.bandwidth_Bps, -link.latency_s), default=None)
    return msgspec.structs.replace(cluster, hosts=hosts, wire=cluster.wire or slowest_link) if added else cluster


def with_scaled_links(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with the bandwidth of every link between hosts multiplied by `factor`."""
    return map_links(cluster, lambda wire: msgspec.structs.replace(wire, bandwidth_Bps=factor * wire.bandwidth_Bps))


def map_links(cluster: Cluster, change: Callable[[LinkModel], LinkModel]) -> Cluster:
    """Return the cluster with `change` applied to every link between hosts."""
    wires = {a: {b: change(wire) for b, wire in row.items()} for a, row in cluster.wires.items()}
    return msgspec.structs.replace(cluster, wire=cluster.wire and change(cluster.wire), wires=wires)


def _host_kinds(fleet: Fleet) -> dict[str, object]:
    """Return a key for each host; hosts that are identical to the planner have equal keys."""
    written: dict[int, bytes] = {}  # shared objects are encoded once

    def kind(host: HostConfig, measured: Mapping[str, Rates]) -> object:
        for rate in measured.values():
            if id(rate) not in written:
                written[id(rate)] = msgspec.json.encode(rate)
        declared = (host.gpu, host.gpus, host.memory, host.node_link, host.watts, host.price_per_h)
        return declared, tuple((device, written[id(rate)]) for device, rate in measured.items())

    return {name: kind(host, fleet.rates.get(name, {})) for name, host in fleet.hosts.items()}


def _known_rates(host: HostConfig, measured: Mapping[str, Rates]) -> dict[str, Rates]:
    """Return the measured rates of a host's devices, with gaps filled from the hardware table.

    A memory size declared for the host replaces that of its GPUs, or of its processor if it has none.
    """
    hardware = parse_hardware(host.gpu) if host.gpu is not None else None
    known = dict(measured)
    if hardware is not None:
        names = ["cpu"] if hardware.kind == "cpu" else [f"{hardware.kind}:{i}" for i in range(host.gpus or 1)]
        for name in names:
            known[name] = _with_hardware_table(known.get(name, Rates()), hardware)
    if host.memory is not None:
        memory_bytes = parse_bytes(host.memory)
        devices = [name for name in known if name != "cpu"] or list(known)
        for name in devices:
            known[name] = msgspec.structs.replace(known[name], memory_bytes=memory_bytes)
    return known


def _with_hardware_table(rates: Rates, hardware: Hardware) -> Rates:
    return msgspec.structs.replace(
        rates,
        name=rates.name or hardware.name,
        matmul_flops=rates.matmul_flops or hardware.matmul_flops,
        copy_Bps=rates.copy_Bps or hardware.copy_Bps,
        memory_bytes=rates.memory_bytes or hardware.memory_bytes,
    )


def lookup_hardware(host: HostConfig, rates: Rates) -> Hardware | None:
    """Return the row of the hardware table for a host's device, by its declared or probed name; None if unknown."""
    try:
        return parse_hardware(host.gpu or rates.name) if host.gpu or rates.name else None
    except UsageError:  # a processor's name, or a GPU that is not in the table
        return None


def _gpu_rates(rates: Mapping[str, Rates]) -> list[Rates]:
    return [rate for device, rate in rates.items() if device != "cpu"]


def _rank_slots(name: str, host: HostConfig, rates: Mapping[str, Rates], job: Job, flag: str) -> list[RankSlot]:
    """Return the rank slots on the devices of a host.

    A device on which training was measured has bf16 if it trained in bf16. Any other GPU has bf16 unless it has matmul
    rates (measured, or from the hardware table) in other dtypes only. Any other processor does not.
    """
    gpus = _gpu_rates(rates)
    if requested_device(host, job.spec.machine) == "cuda" and not gpus:
        raise _not_measured_error(name, "GPUs", job, flag)
    kind = next((device.partition(":")[0] for device in rates if device != "cpu"), "cuda")
    slots = []
    for device in rank_devices(name, host, len(gpus), job.spec.machine):
        rate = _rates_of_device(name, device, rates, job, flag)
        model_rate = rate.models.get(job.rate_name) or next(iter(rate.models.values()), None)
        dtype = model_rate.dtype if model_rate else ""
        has_bf16 = dtype == "bf16" if dtype else device != "cpu" and "bf16" in (rate.matmul_flops or ("bf16",))
        name_on_host = device.replace("cuda", kind)  # "mps", "xpu": see core.cluster.hardware
        slots.append(RankSlot(host=name, device=name_on_host, name=rate.name, has_bf16=has_bf16))
    return slots


def _rates_of_device(name: str, device: str, rates: Mapping[str, Rates], job: Job, flag: str) -> Rates:
    """Return the rates of a device; a GPU with a higher index than any GPU with rates gets those of the last one.

    Raise NotMeasuredError if the host has no rates of a processor or of GPUs, whichever `device` is.
    """
    known = [rates["cpu"]] if device == "cpu" and "cpu" in rates else _gpu_rates(rates) if device != "cpu" else []
    if not known:
        raise _not_measured_error(name, "processor" if device == "cpu" else "GPUs", job, flag)
    return known[0] if device == "cpu" else known[min(int(device.partition(":")[2]), len(known) - 1)]


def _not_measured_error(name: str, what: str, job: Job, flag: str) -> NotMeasuredError:
    return NotMeasuredError(f"{name}: nobody measured its {what}", hint=_how_to_measure(job, flag))


def _how_to_measure(job: Job, flag: str) -> str:
    """Return the command that measures the job's model; `flag` selects the fleet, see `Fleet.cli_flag`."""
    if isinstance(job.shape, FineTuning):
        model = job.spec.model
        lora = ("" if model.lora is None else f" --lora {model.lora}") + (" --dora" if model.dora else "")
        return f"evener probe host{flag} --model {quote_word(model.model)}{lora} measures it"
    return f"evener probe host{flag} --model {_nearest_preset(job)} measures it"


def _nearest_preset(job: Job) -> str:
    """Return the preset to probe: the job's model or, if that is no preset, the one with the nearest FLOPs a token."""
    if job.model in PRESETS:
        return job.model
    return min(
        PRESETS, key=lambda preset: abs(math.log(_flops_per_token(PRESETS[preset]) / _flops_per_token(job.gpt_shape)))
    )


def _host_rates(name: str, host: HostConfig, devices: Sequence[str], rates: Mapping[str, Rates], job: Job,
          dtypes: Sequence[Dtype], flag: str) -> tuple[HostRates, list[str]]:  # fmt: skip
    """Return a host's rates and the assumptions behind them.

    `dtypes` are the dtype of its ranks in a run on all hosts and, if it differs, in a run on this host alone.
    """
    assumed: list[str] = []
    probed = [_rates_of_device(name, device, rates, job, flag) for device in dict.fromkeys(devices)]
    num_sharing = -(-len(devices) // len(probed))  # ranks that share a device
    if num_sharing > 1:
        assumed.append(f"{num_sharing} ranks share a device, so each is assumed to be {num_sharing} times as slow")
    speeds = {}
    for dtype in dtypes:
        log = assumed if dtype == dtypes[0] else []  # a host alone may compute in the dtype that it was measured in
        speeds[dtype] = min(
            (_model_rate(name, rate, job, dtype, flag, log) for rate in probed), key=lambda r: r.tokens_per_s
        )
    slowest, rate = speeds[dtypes[0]], probed[0]
    update_s = slowest.update_s
    if update_s is None and rate.copy_Bps and (rate.measured or not _rates_of_own_models(rate)):
        update_s = UPDATE_BYTES_PER_PARAM * job.shape.num_params() / rate.copy_Bps
        assumed.append(
            f"the update's time follows from the memory bandwidth, {UPDATE_BYTES_PER_PARAM} bytes a parameter"
        )
    elif update_s is None:
        assumed.append("the weight update is assumed to be part of the tokens/s")
    if devices[0].startswith(("mps", "xpu")):
        assumed.append("evener trains on its processor for now; the prediction is for its GPU")
    if rate.sync_Bps is None and devices[0] == "cpu":
        assumed.append("communication and compression are assumed to take no processor time")
    hardware = lookup_hardware(host, rate)
    memories = [r.memory_bytes for r in probed if r.memory_bytes is not None]
    return HostRates(
        tokens_per_s={dtype: r.tokens_per_s / num_sharing for dtype, r in speeds.items()},
        pass_s=(slowest.pass_s or 0.0) * num_sharing,
        update_s=(update_s or 0.0) * num_sharing,
        cpus=slowest.cpus / num_sharing if slowest.cpus else None,
        sync_Bps=rate.sync_Bps,
        sum_Bps=rate.sum_Bps.get("fp32"),
        copy_Bps=rate.copy_Bps if rate.measured else None,
        coding_Bps=dict(rate.coding_Bps),
        local=_intra_node_link(host, rate, hardware, devices, assumed) if len(devices) > 1 else None,
        memory_bytes=min(memories, default=None),
        has_jemalloc=rate.has_jemalloc,
        bound_by=_bound_by(rate, job, dtypes[0], slowest),
        watts=_watts(host, hardware, len(set(devices)), assumed),
        price_per_h=host.price_per_h,
        shares_cores_with=rate.shares_cores_with,
        basis=_basis(rate, job),
    ), assumed  # fmt: skip


def _with_link_cpu_time(host: HostRates, links: Sequence[HostLink]) -> HostRates:
    """Return the host with the `sync_Bps` measured over its links, if that is less than between two of its ranks."""
    over_links = median([rate for link in links if (rate := link.duplex_bytes_per_cpu_s) is not None])
    if host.sync_Bps is None or over_links is None or over_links >= host.sync_Bps:
        return host
    return msgspec.structs.replace(host, sync_Bps=over_links)


def _intra_node_link(
    host: HostConfig, rate: Rates, hardware: Hardware | None, devices: Sequence[str], assumed: list[str]
) -> LinkModel:
    """Return the link between two ranks of a host."""
    if host.node_link is not None:
        return parse_link(host.node_link).wire
    if rate.loopback_Bps:
        return LinkModel(latency_s=LOCAL_LATENCY_S, bandwidth_Bps=rate.loopback_Bps)
    if devices[0] == "cpu":
        local = LinkModel(latency_s=LOCAL_LATENCY_S, bandwidth_Bps=LOCAL_BANDWIDTH_BPS)
    elif hardware and hardware.intra_node_Bps and hardware.intra_node_Bps > NVLINK_MIN_BPS:
        local = msgspec.structs.replace(parse_link("nvlink").wire, bandwidth_Bps=hardware.intra_node_Bps)
    else:
        local = parse_link("pcie").wire
    assumed.append(f"{format_bit_rate(local.bandwidth_Bps)} between its ranks are assumed")
    return local


def _watts(host: HostConfig, hardware: Hardware | None, num_devices: int, assumed: list[str]) -> float | None:
    if host.watts is not None or hardware is None or hardware.watts is None:
        return host.watts
    if hardware.kind != "cpu":
        assumed.append(f"{num_devices} × {hardware.watts:g} W, the rest of the machine not counted")
    return num_devices * hardware.watts


def _basis(rate: Rates, job: Job) -> RateBasis:
    """Return the basis of a device's tokens/s: measured, declared, derived or assumed."""
    if not (rate.models if isinstance(job.shape, FineTuning) else _rates_of_own_models(rate)):
        return "assumed"
    if job.rate_name not in rate.models:
        return "derived"
    return "measured" if rate.measured else "declared"


def _bound_by(rate: Rates, job: Job, dtype: Dtype, speed: ModelRate) -> Bottleneck | None:
    matmul_flops = rate.matmul_flops.get(dtype)
    if matmul_flops is None or rate.copy_Bps is None or isinstance(job.shape, FineTuning):
        return None
    shape = job.gpt_shape
    tokens = micro_batch_limit(job.spec, shape.block_size) * shape.block_size
    element_bytes = 4 if dtype == "fp32" else 2
    roof = roofline(
        job.gpt_shape, tokens, matmul_flops=matmul_flops, copy_Bps=rate.copy_Bps, element_bytes=element_bytes
    )
    return roof.bound_by((speed.pass_s or 0.0) + tokens / speed.tokens_per_s)


def _model_rate(name: str, rates: Rates, job: Job, dtype: Dtype, flag: str, assumed: list[str]) -> ModelRate:
    """Return the device's rates for this job, by FLOPs from the measured model that is this one or nearest to it.

    If no model was measured, derive them from the matmul rate. Raise NotMeasuredError if that is missing, too.
    """
    if isinstance(job.shape, FineTuning):
        return _fine_tuning_rate(name, rates, job, job.shape, dtype, flag, assumed)
    known, own_models = job.model in rates.models, _rates_of_own_models(rates)
    if own_models:
        nearest = min(
            own_models,
            key=lambda m: abs(math.log(_flops_per_token(_probed_shape(m, job)) / _flops_per_token(job.gpt_shape))),
        )
        model = job.model if known else nearest
        rate, shape = rates.models[model], _probed_shape(model, job)
        work = job.gpt_shape.flops_per_token() / shape.flops_per_token()
        ratio = work ** -(1.0 if known else _flops_exponent(rates, job, model))
        if not known:
            assumed.append(f"its rate of {job.model} follows from that of {model}, by FLOPs; "
                           f"{_how_to_measure(job, flag)}")  # fmt: skip
        elif not _is_same_but_vocab(shape, job.gpt_shape):
            assumed.append(f"its rate of this {model} follows from that of the preset, by FLOPs")
        ratio *= _dtype_speed(rates, rate, dtype, assumed)
        params = job.gpt_shape.num_params() / shape.num_params()
        return msgspec.structs.replace(
            rate,
            tokens_per_s=rate.tokens_per_s * ratio,
            pass_s=None if rate.pass_s is None else rate.pass_s * params,
            update_s=None if rate.update_s is None else rate.update_s * params,
        )
    matmul_flops = rates.matmul_flops.get(dtype)
    if matmul_flops is None:
        raise NotMeasuredError(
            f"{name}: nobody measured how fast it trains",
            hint=_how_to_measure(job, flag),
        )
    assumed.append(f"{ASSUMED_MFU:.0%} of the matrix products' speed is assumed for the whole model")
    return ModelRate(tokens_per_s=ASSUMED_MFU * matmul_flops / job.gpt_shape.flops_per_token())


def _fine_tuning_rate(
    name: str, rates: Rates, job: Job, shape: FineTuning, dtype: Dtype, flag: str, assumed: list[str]
) -> ModelRate:
    """Return the device's rates for a fine-tuning, in tokens that carry loss: by FLOPs from the model as it was probed,
    or else from the measured preset with the nearest number of them.
    """
    if shape.model.quantization != "off":
        assumed.append(f"decoding the {shape.model.quantization} weights is assumed to take no time")
    flops, rate = shape.flops_per_token(), rates.models.get(shape.rate_name)
    if rate is None and (others := _rates_of_other_ranks(rates, shape)):
        other, rate = next(iter(others.items()))
        assumed.append(f"its rate of {shape.rate_name} follows from that of {other}, by FLOPs; "
                       f"{_how_to_measure(job, flag)}")  # fmt: skip
    if rate is not None:
        speed = _dtype_speed(rates, rate, dtype, assumed)
        work = flops / rate.flops_per_token if rate.flops_per_token else 1.0
        if not rate.flops_per_token:  # declared: with the padding of this data
            speed *= job.padding_factor(min(job.spec.train.batch, micro_batch_limit(job.spec, None)))
        return msgspec.structs.replace(rate, tokens_per_s=rate.tokens_per_s * speed / work)
    own = shape.flops_per_sequence(1) / shape.lengths.of_micro_batch(1).tokens
    presets = {model: rate for model, rate in _rates_of_own_models(rates).items() if model in PRESETS}
    if presets:
        nearest = min(presets, key=lambda preset: abs(math.log(_flops_per_token(PRESETS[preset]) / own)))
        relative = FINE_TUNING_SPEED[dtype][shape.model.lora_rank is not None]
        assumed.append(f"its rate of {job.model} follows from that of {nearest}, by FLOPs, of which transformers' "
                       f"modules do {relative:.0%} as many a second; {_how_to_measure(job, flag)}")  # fmt: skip
        rate, preset = presets[nearest], PRESETS[nearest]
        speed = relative * _dtype_speed(rates, rate, dtype, assumed)
        all_params, trained = shape.num_params() + shape.model.num_frozen, shape.num_params()
        return msgspec.structs.replace(
            rate,
            tokens_per_s=rate.tokens_per_s * speed * _flops_per_token(preset) / flops,
            pass_s=None if rate.pass_s is None else rate.pass_s * all_params / preset.num_params(),
            update_s=None if rate.update_s is None else rate.update_s * trained / preset.num_params(),
        )
    if (matmul_flops := rates.matmul_flops.get(dtype)) is None:
        raise NotMeasuredError(f"{name}: nobody measured how fast it trains", hint=_how_to_measure(job, flag))
    assumed.append(f"{ASSUMED_MFU:.0%} of the matrix products' speed is assumed for the whole model")
    return ModelRate(tokens_per_s=ASSUMED_MFU * matmul_flops / flops)


def _dtype_speed(rates: Rates, rate: ModelRate, dtype: Dtype, assumed: list[str]) -> float:
    """Return the factor from the dtype in which a rate was measured to this one."""
    if rate.dtype in ("", dtype):
        return 1.0
    other_flops, own_flops = rates.matmul_flops.get(rate.dtype), rates.matmul_flops.get(dtype)
    speed = own_flops / other_flops if own_flops and other_flops else 0.5 if dtype == "fp32" else 1.0
    assumed.append(f"was measured in {rate.dtype}; {dtype} is taken to run at {speed:.0%} of that")
    return speed


def _rates_of_other_ranks(rates: Rates, shape: FineTuning) -> dict[str, ModelRate]:
    """Return what was probed of the same model with LoRA adapters of other ranks."""
    if shape.model.lora_rank is None:
        return {}
    prefix = shape.rate_name.removesuffix(str(shape.model.lora_rank))
    return {name: rate for name, rate in rates.models.items() if name.startswith(prefix) and rate.flops_per_token}


def _rates_of_own_models(rates: Rates) -> dict[str, ModelRate]:
    """Return the rates without those of pretrained models, which transformers' modules compute."""
    return {model: rate for model, rate in rates.models.items() if not model.startswith(PRETRAINED_PREFIX)}


def _flops_exponent(rates: Rates, job: Job, nearest: str) -> float:
    """Return the power of FLOPs with which the time of a token grows between the two measured models next to the job's.

    It is below 1 where small models keep a device less busy. 1 if the job's model is not between two measured ones.
    """
    flops = {model: _flops_per_token(_probed_shape(model, job)) for model in _rates_of_own_models(rates)}
    own, near = _flops_per_token(job.gpt_shape), flops[nearest]
    beyond = [model for model in flops if (flops[model] - own) * (near - own) < 0]
    if not beyond:
        return 1.0
    other = min(beyond, key=lambda model: abs(math.log(flops[model] / own)))
    slower = rates.models[nearest].tokens_per_s / rates.models[other].tokens_per_s
    return math.log(slower) / math.log(flops[other] / near)


def _is_same_but_vocab(probed: GPTShape, wanted: GPTShape) -> bool:
    """Return whether the shapes differ at most in the vocabulary, which FLOPs account for."""
    return msgspec.structs.replace(probed, vocab_size=wanted.vocab_size) == wanted


def _flops_per_token(shape: GPTShape) -> float:
    return float(shape.flops_per_token())


def _probed_shape(model: str, job: Job) -> GPTShape:
    """Return the shape of the preset that was probed; the job's shape if `model` names no preset."""
    return PRESETS.get(model, job.gpt_shape)


def link_models(fleet: Fleet, assumed: AssumptionLog) -> tuple[LinkModel | None, dict[str, dict[str, LinkModel]]]:
    """Return the fleet's common link (None if it has none), and the links of single pairs as [source][target]."""
    common = parse_link(fleet.link) if fleet.link is not None else None
    names = list(fleet.hosts)
    pairs = {(a, b) for a in names for b in fleet.links.get(a, {}) if b in fleet.hosts}
    pairs |= {(b, a) for a, b in pairs}
    if common is None and len(pairs) < len(names) * (len(names) - 1):
        source, target = next((a, b) for a in names for b in names if a != b and (a, b) not in pairs)
        raise NotMeasuredError(
            f"{source} → {target}: nobody measured this link",
            hint=f"evener probe wire{fleet.cli_flag} measures it; --link 1GbE assumes one",
        )
    if common is not None and len(pairs) < len(names) * (len(names) - 1):
        assumed.add(common.assumption)
    wires: dict[str, dict[str, LinkModel]] = {}
    for a, b in sorted(pairs, key=lambda pair: (names.index(pair[0]), names.index(pair[1]))):
        link = fleet.links.get(a, {}).get(b)
        if link is None:
            link = fleet.links[b][a]
            if not link.declared:
                assumed.add(f"{a} → {b} is assumed to be as fast as {b} → {a}")
        wires.setdefault(a, {})[b] = to_link_model(link)
        if link.declared:
            assumed.add(parse_link(link.declared).assumption)
    return (common.wire if common is not None else None), wires


def to_link_model(link: HostLink) -> LinkModel:
    """Convert a link of the fleet file; `latency_s` is half its round trip."""
    return LinkModel(latency_s=link.rtt_s / 2, bandwidth_Bps=link.bandwidth_Bps, is_shared=link.is_shared)
