"""Measure devices and collectives with evener's own torch programs, on a fleet or on this machine alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import msgspec

from evener.core.base.decoding import json_decoder
from evener.core.base.errors import UsageError
from evener.core.base.file_io import read_file
from evener.core.cluster.collective_results import CollectiveBenchMessage, CollectiveBenchSpec
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.core.cluster.host_probe import DeviceProbeResult, HostProbeSpec, PretrainedProbe, ProbeMessage
from evener.core.model.fine_tuning import FineTuning, SequenceLengths
from evener.core.model.pretrained import read_pretrained, require_libraries
from evener.core.run.roster import choose_backend
from evener.core.run.run_spec import MachineSpec
from evener.doctor.link_probe import measure_ring_Bps
from evener.launch.commands import PreparedFleet, PreparedHost
from evener.launch.distributed_program import PROGRAM_RUN, fleet_program_lines
from evener.launch.prepare_hosts import LOOPBACK, ConnectedHosts, connect_hosts, prepare_hosts
from evener.ssh.session import connect

Warn = Callable[[Sequence[Finding]], None]


@contextlib.contextmanager
def run_collectives(
    fleet: Fleet | None, spec: CollectiveBenchSpec, ranks: int | None, warn: Warn
) -> Iterator[tuple[float, Iterator[CollectiveBenchMessage]]]:
    """Run the collectives on a fleet or this machine; yield (B/s of the slowest link, ranks' messages)."""
    if fleet is None and ranks == 1:
        raise UsageError("--ranks 1: collectives need two ranks or more", hint="--ranks 2")
    decode = json_decoder(CollectiveBenchMessage).decode
    with connect_hosts(fleet) as hosts:
        ranks = 2 if fleet is None and ranks is None else ranks
        prepared = _prepare(hosts.with_ranks(ranks, device=spec.device), warn)
        addresses = {place.name: place.address for place in prepared.hosts}
        arg = msgspec.json.encode(_choose_backend(spec, prepared)).decode()
        if len(addresses) > 1:
            wire_Bps = measure_ring_Bps(hosts.sessions, addresses, list(addresses))
        else:
            wire_Bps = _measure_loopback_Bps()
        module, args = "evener.worker.probe.collective_bench", dict.fromkeys(addresses, arg)
        with contextlib.closing(fleet_program_lines(prepared, hosts.sessions, module, args)) as lines:
            yield wire_Bps, (decode(line) for _, line in lines)


def probe_devices(
    fleet: Fleet | None, spec: HostProbeSpec, warn: Warn, *, one_by_one: bool = False
) -> Generator[tuple[str, ProbeMessage]]:
    """Probe the devices of a fleet, or of this machine, which is then called as `spec` says; yield (host, message)."""
    module, decode = "evener.worker.probe.device_probe", json_decoder(ProbeMessage).decode
    with connect_hosts(fleet) as hosts:
        prepared = _prepare(hosts.with_ranks(1 if fleet is None else None, device=spec.device), warn)
        places = [_merge_ranks(place) for place in prepared.hosts]
        names = {place.name: spec.host if fleet is None else place.name for place in places}
        sharing = {place.name: place.shares_cores_with for place in places}
        args = {name: msgspec.json.encode(msgspec.structs.replace(spec, host=shown)).decode()
                for name, shown in names.items()}  # fmt: skip
        for turn in [[place] for place in places] if one_by_one else [places]:
            taking_part = msgspec.structs.replace(prepared, hosts=turn)
            with contextlib.closing(fleet_program_lines(taking_part, hosts.sessions, module, args)) as lines:
                for name, line in lines:
                    message = decode(line)
                    if isinstance(message, DeviceProbeResult) and message.device == "cpu":
                        rates = msgspec.structs.replace(message.rates, shares_cores_with=sharing[name])
                        message = msgspec.structs.replace(message, rates=rates)
                    yield names[name], message


def describe_probed_model(
    folder: Path, block_size: int | None, lora_rank: int | None, *, has_dora: bool
) -> PretrainedProbe:
    """Return what hosts need to build the model of a folder, as a run with these flags would train it.

    Raise UsageError if the folder holds no model, or one whose layers are not known.
    """
    require_libraries()
    model = read_pretrained(folder, block_size, lora_rank, has_dora=has_dora)
    if model.layers is None:
        raise UsageError(f"{folder}: evener does not know the layers of a {model.architecture}")
    full = FineTuning(model=model, lengths=SequenceLengths.full(model.block_size))
    return PretrainedProbe(
        name=full.rate_name,
        config=read_file(folder / "config.json").decode(),
        vocab_size=model.vocab_size,
        block_size=model.block_size,
        lora_rank=lora_rank,
        has_dora=has_dora,
        num_trained=model.num_params(),
        flops_per_token=full.flops_per_token(),
    )


def _prepare(hosts: ConnectedHosts, warn: Warn) -> PreparedFleet:
    """Prepare the hosts for a probe; raise HostError or RunError if one cannot take part."""
    for error in hosts.errors.values():
        raise error
    prepared = prepare_hosts(hosts, PROGRAM_RUN)
    warn(prepared.findings)
    return prepared


def _choose_backend(spec: CollectiveBenchSpec, prepared: PreparedFleet) -> CollectiveBenchSpec:
    """Choose one backend for all hosts, and the memory of its buffers: the GPU's for NCCL, the CPU's for Gloo.

    Gloo would copy buffers of a GPU into CPU memory first.
    """
    backend = choose_backend(prepared.rank_slots(MachineSpec(device=spec.device)), spec.backend)
    if backend == "none":
        raise UsageError("collectives need two ranks or more", hint="--ranks 2")
    device = spec.device if spec.device != "auto" else "cuda" if backend == "nccl" else "cpu"
    return msgspec.structs.replace(spec, backend=backend, device=device)


def _merge_ranks(place: PreparedHost) -> PreparedHost:
    """Give the host one rank with the threads of all its ranks: the planner divides the rate."""
    threads = place.host.threads and place.host.threads * (place.host.ranks or 1)
    return msgspec.structs.replace(place, host=msgspec.structs.replace(place.host, ranks=1, threads=threads))


def _measure_loopback_Bps() -> float:
    """Measure the bandwidth of this machine's loopback, in bytes per second, in both directions at once."""
    local = HostConfig(address="local")
    with connect(Fleet(hosts={"one": local, "two": local})) as (sessions, errors):
        for error in errors.values():
            raise error
        return measure_ring_Bps(sessions, dict.fromkeys(sessions, LOOPBACK), list(sessions), seconds=1.0)
