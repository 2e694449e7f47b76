"""`evener probe`: measure hosts, links, and collectives relative to the raw link."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from evener.cli.help import CliApp
from evener.cli.terminal import make_console, print_findings, print_omitted_columns, print_text
from evener.cli.trust import TRUST_HELP, approve_fleet
from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from evener.core.cluster.collective_results import CollectiveBenchSpec, CollectiveResult
    from evener.core.cluster.finding import Finding
    from evener.core.cluster.fleet_file import Fleet
    from evener.core.cluster.host_probe import DeviceProbeResult

Spec = TypeVar("Spec")

app = CliApp(help="Measure links, collectives and hosts, and write what predictions need into the fleet file.")

FleetFile = Annotated[
    str | None,
    typer.Option("--fleet", help="hosts; local: this machine alone [fleet.toml if here]"),
]
Trust = Annotated[bool, typer.Option("--trust", help=TRUST_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def print_status(text: str) -> None:
    """Print a status line on stderr."""
    print_text(make_console(stderr=True), text)


@app.command(epilog="evener probe wire --fleet fleet.toml")
def wire(
    fleet: FleetFile = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=60, help="of each measurement, after slow start")] = 2.0,
    no_iperf3: Annotated[bool, typer.Option("--no-iperf3", help="do not use iperf3 of the hosts")] = False,
    no_trials: Annotated[bool, typer.Option("--no-trials", help="do not try other TCP settings")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Measure goodput and round trip between all hosts: one TCP stream, four, and both directions at once.

    Uses evener's own sender over plain TCP, and iperf3 if both ends have it. Other congestion controls and buffer sizes
    are tried alternately with the current ones, for one socket only. A setting that gains at least 5 % is reported with
    the command that sets it. Written to [links] of the fleet file, from which `doctor` repeats it.
    """
    import msgspec

    from evener.cli import probe_output
    from evener.core.base.errors import UsageError
    from evener.core.base.units import format_seconds as duration
    from evener.core.cluster.fleet_file import fleet_path, load_fleet
    from evener.core.cluster.fleet_update import update_fleet_file
    from evener.doctor import link_probe as wires
    from evener.doctor import tcp_settings, tcp_tuning
    from evener.doctor.preflight import run_preflight
    from evener.ssh.session import connect

    path = fleet_path(fleet)
    if path is None:
        raise UsageError("probe wire needs two machines", hint="evener lab up makes two, and their fleet file lab.toml")
    known = approve_fleet(load_fleet(path), trust)
    with connect(known) as (sessions, errors):
        if len(known.hosts) < 2:
            raise UsageError(f"{path}: one host has no wire", hint="a second [hosts.NAME]")
        if len(sessions) < 2:
            raise next(iter(errors.values()))
        seen = run_preflight(known, sessions, errors, quick=True)
        addresses = {name: interface.address for name, interface in seen.interfaces.items()}  # as a run would use
        pairs = len(addresses) * (len(addresses) - 1) // 2
        estimate_s = wires.estimate_duration_s(len(addresses), seconds=seconds, iperf3=not no_iperf3)
        estimate_s += 0.0 if no_trials else tcp_tuning.estimate_duration_s(len(addresses))
        print_status(f"{pairs} {'pair' if pairs == 1 else 'pairs'} of hosts, about {duration(estimate_s)}")
        found = wires.measure_links(sessions, addresses, seconds=seconds, iperf3=not no_iperf3, notify=print_status)
        better: tcp_tuning.GainsByPair = {}
        if not no_trials and found.measurements:
            print_status("trying other settings")
            better = tcp_tuning.TcpTuner(sessions, seen.interfaces, seen.facts, found.measurements).tune()
    links = found.fleet_links(better)
    if links:
        update_fleet_file(path, links=links)
    reported = {(finding.check, finding.host, finding.peer) for finding in found.findings}
    elsewhere = [finding for finding in seen.blocking_findings if finding.check.startswith(("net.", "ssh."))]
    findings = [finding for finding in elsewhere if (finding.check, finding.host, finding.peer) not in reported]
    findings += found.findings
    for source, target, gain in tcp_settings.applicable_gains(links, seen.facts):
        findings.append(
            tcp_settings.finding_for_gain(gain, source, target, "" if seen.facts[gain.host].is_root else "sudo ")
        )
    if as_json:
        print_escaped(json.dumps({"fleet": path, "wires": msgspec.to_builtins(found.measurements),
                          "findings": msgspec.to_builtins(findings)}))  # fmt: skip
    else:
        if found.measurements:
            probe_output.print_wires(make_console(), found.measurements)
            print_status(f"written to [links] of {path}")
        print_findings(make_console(), findings)
    return int(any(finding.severity == "error" for finding in findings))


@app.command(epilog="evener probe collectives --ranks 2 --op all_reduce --max-size 16MiB")
def collectives(
    fleet: FleetFile = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=1024, help="processes per host [this machine 2; a fleet its ranks]")
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all [all]")
    ] = None,
    min_size: Annotated[str, typer.Option(help="smallest buffer")] = "1KiB",
    max_size: Annotated[str, typer.Option(help="largest buffer")] = "256MiB",
    factor: Annotated[int, typer.Option(min=2, max=1024, help="ratio of each size to the one before")] = 4,
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16|fp16", help="type of the elements")] = "fp32",
    in_place: Annotated[bool, typer.Option("--in-place", help="all_gather and reduce_scatter in one buffer")] = False,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="for all collectives; sizes that do not fit are left out")
    ] = 120.0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="device of the buffers")] = "auto",
    backend: Annotated[str, typer.Option(metavar="auto|gloo|nccl", help="auto: nccl if each rank has a GPU")] = "auto",
    trust: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Measure and check collectives with nccl-tests' columns and formulas, next to the raw link at the same time.

    Additional columns on the right: the fraction of the link's rate that a row reaches (busbw / wire), and the parts of
    its time: the link's time for the bytes that the backend sends, the latency of the smallest message, the reduction,
    and the rest, which is negative if these overlap.
    """
    import msgspec

    from evener.cli import probe_output
    from evener.core.base.units import format_bit_rate
    from evener.core.base.units import format_seconds as duration
    from evener.core.cluster.collective_results import CollectiveBenchGroup, SkippedSizes
    from evener.core.cluster.fleet_file import fleet_path
    from evener.launch.probe_hosts import run_collectives
    from evener.report.explain import bus_bandwidth as report

    spec = _collective_spec(op, _buffer_sizes(min_size, max_size, factor), dtype, seconds, in_place, device, backend)
    path = fleet_path(fleet)
    rows: list[CollectiveResult] = []
    stopped: list[SkippedSizes] = []
    world: CollectiveBenchGroup | None = None
    screen = make_console()
    columns = probe_output.visible_collectives_columns(screen)
    print_status(f"measuring the link, then collectives for at most {duration(spec.seconds)}")
    with run_collectives(_load_fleet(path, trust), spec, ranks, _print_warnings) as (wire_Bps, messages):
        for item in messages:
            if isinstance(item, CollectiveBenchGroup):
                world = item
                where = ", ".join(dict.fromkeys(world.hosts))
                print_status(
                    f"{world.ranks} ranks on {where}; link {format_bit_rate(wire_Bps)} each way, both "
                    f"directions at once"
                )
            elif isinstance(item, SkippedSizes):
                stopped.append(item)
            else:
                assert world is not None
                if not as_json and all(row.collective != item.collective for row in rows):
                    place = "in-place" if item.in_place else "out-of-place"
                    head = f"# {item.collective}, {place}: {world.ranks} ranks, {world.backend}, {world.device}"
                    screen.print(head, *probe_output.format_collectives_header(columns), sep="\n", soft_wrap=True)
                rows.append(item)
                if as_json:
                    print_status(
                        f"{item.collective} {report.format_buffer_size(item.size_bytes)}: {duration(item.time_s)}"
                    )
                else:
                    judged_row = report.collective_efficiency(
                        item, world, wire_Bps, report.latency_row(rows, item.collective)
                    )
                    screen.print(probe_output.format_collectives_row(judged_row, columns), soft_wrap=True)
    assert world is not None
    judged = report.collective_efficiencies(rows, world, wire_Bps)
    findings = report.bandwidth_findings(judged, world)
    explanation = report.explain_bandwidth(judged, stopped, world, wire_Bps)
    if as_json:
        print_escaped(json.dumps({
            "world": msgspec.to_builtins(world),
            "wire_Bps": wire_Bps,
            "rows": [msgspec.to_builtins(one.row) | {"share_of_wire": one.share_of_wire,
                                                     "split": msgspec.to_builtins(one.split)} for one in judged],
            "stopped": msgspec.to_builtins(stopped),
            "explanation": explanation,
            "findings": msgspec.to_builtins(findings),
        }))  # fmt: skip
    else:
        wrong = sum(row.num_wrong for row in rows)
        print_omitted_columns(screen, [title for title in probe_output.DROPPABLE_COLUMNS if title not in columns])
        screen.print(f"# Out of bounds values : {wrong} {'OK' if wrong == 0 else 'FAILED'}")
        screen.print(f"# Avg bus bandwidth    : {sum(row.busbw_Bps for row in rows) / len(rows) / 1e9:g}\n")
        for sentence in explanation:
            print_text(screen, sentence)
        print_findings(screen, findings)
    return int(any(finding.severity == "error" for finding in findings))


@app.command(
    epilog="evener probe host --model char\nevener probe host --fleet fleet.toml --model gpt2\n"
    "evener probe host --model hf:./some-model --lora 16"
)
def host(
    fleet: FleetFile = None,
    model: Annotated[
        str, typer.Option(metavar="NAME,…|hf:FOLDER", help="models to train, one after the other; or a pretrained one")
    ] = "char",
    lora: Annotated[int | None, typer.Option(min=1, help="with hf:FOLDER: rank of LoRA adapters, as for train")] = None,
    dora: Annotated[bool, typer.Option("--dora", help="with --lora, as for train")] = False,
    block_size: Annotated[
        int | None, typer.Option(min=2, help="with hf:FOLDER: tokens of a sequence, as for train")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=600, help="of sustained training of each model; 10 show throttling")
    ] = 12.0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="auto: processor and GPUs")] = "auto",
    dtype: Annotated[str, typer.Option(metavar="auto|fp32|bf16|fp16", help="auto: as for training")] = "auto",
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="one host at a time, for emulated hosts that share cores")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> int:
    """Measure each device: arithmetic, memory and reduction rates, the cost of an all-reduce, and training throughput.

    For each model: sustained tokens/s, the fixed time of a micro-batch, the optimizer update, and the bottleneck. A
    processor is measured in one process, with the threads of all ranks that the host would have.

    Measures all hosts of a fleet at the same time; use --one-by-one if they share a machine. Written to [rates] of the
    fleet file.
    """
    import msgspec

    from evener.cli import probe_output
    from evener.cli.hub_models import model_folder
    from evener.core.base.errors import UsageError, did_you_mean
    from evener.core.cluster.fleet_file import Rates, fleet_path
    from evener.core.cluster.fleet_update import update_fleet_file
    from evener.core.cluster.host_probe import HostProbeSpec, ProbeProgress
    from evener.core.model.shape import PRESETS
    from evener.core.run.run_spec import PRETRAINED_PREFIX
    from evener.launch.probe_hosts import describe_probed_model, probe_devices
    from evener.plan.cost.roofline import roofline

    pretrained = None
    models = list(dict.fromkeys(name.strip() for name in model.split(",")))
    if dora and lora is None:
        raise UsageError("--dora: it needs the rank of its adapters", hint="--lora 16 --dora")
    if model.startswith(PRETRAINED_PREFIX):
        pretrained = describe_probed_model(model_folder(Path(model.removeprefix(PRETRAINED_PREFIX))), block_size, lora,
                                           has_dora=dora)  # fmt: skip
        models = [pretrained.name]
    elif lora is not None or block_size is not None:
        raise UsageError(f"--{'lora' if lora is not None else 'block-size'}: only with --model hf:FOLDER")
    for name in models if pretrained is None else ():
        if name not in PRESETS:
            raise UsageError(f"--model {model}: no such preset", hint=did_you_mean(name, PRESETS))
    given = {"host": "here", "models": models, "seconds": seconds, "device": device, "dtype": dtype,
             "pretrained": pretrained}  # fmt: skip
    spec = _parse_spec(given, HostProbeSpec)
    path = fleet_path(fleet)
    print_status(
        f"about {len(models) * seconds + 15:.0f} s for each device of a host"
        + (", one host after another" if one_by_one else "")
    )
    found: list[DeviceProbeResult] = []
    rates: dict[str, dict[str, Rates]] = {}
    results = []
    hosts = _load_fleet(path, trust)
    with contextlib.closing(probe_devices(hosts, spec, _print_warnings, one_by_one=one_by_one)) as messages:
        for name, item in messages:
            if isinstance(item, ProbeProgress):
                print_status(f"{name}: {item.text}")
                continue
            found.append(item)
            of_host = rates.setdefault(item.host, {})
            of_models = of_host[item.device].models if item.device in of_host else {}
            of_host[item.device] = msgspec.structs.replace(item.rates, models=of_models | item.rates.models)
            dtype = item.sustained.dtype
            roof, bound, num_trained = None, dict[str, object](), 0
            if pretrained is None:
                roof = roofline(
                    PRESETS[item.model],
                    item.sustained.large.tokens,
                    matmul_flops=item.rates.matmul_flops[dtype],
                    copy_Bps=item.rates.copy_Bps or 0.0,
                    element_bytes=4 if dtype == "fp32" else 2,
                )
                by = roof.bound_by(item.sustained.large.pass_p50_s)
                bound = {"roofline": msgspec.to_builtins(roof), "bound_by": by}
            results.append(msgspec.to_builtins(item) | bound)
            if not as_json:
                num_trained = PRESETS[item.model].num_params() if pretrained is None else pretrained.num_trained
                probe_output.print_device(make_console(), item, num_trained, roof)
    findings = [finding for item in found for finding in item.findings]
    if path is not None:
        update_fleet_file(path, rates=rates)
        print_status(f"written to [rates] of {path}")
    if as_json:
        print_escaped(json.dumps({"fleet": path, "devices": results, "findings": msgspec.to_builtins(findings)}))
    else:
        print_findings(make_console(), findings)
    return int(any(finding.severity == "error" for finding in findings))


def _load_fleet(path: str | None, trust: bool) -> Fleet | None:
    """Load the hosts to measure; None: this machine alone."""
    from evener.core.cluster.fleet_file import load_fleet

    return None if path is None else approve_fleet(load_fleet(path), trust)


def _print_warnings(findings: Sequence[Finding]) -> None:

    print_findings(make_console(stderr=True), findings)


def _collective_spec(op: list[str] | None, sizes: tuple[int, ...], dtype: str, seconds: float, in_place: bool,
                     device: str, backend: str) -> CollectiveBenchSpec:  # fmt: skip
    from evener.core.base.errors import UsageError, did_you_mean
    from evener.core.cluster.collective_results import COLLECTIVES, CollectiveBenchSpec

    names = [name.replace("-", "_") for name in op or COLLECTIVES]
    for name in names:
        if name not in COLLECTIVES:
            raise UsageError(f"--op {name}: no such collective", hint=did_you_mean(name, COLLECTIVES))
    values = {"collectives": list(dict.fromkeys(names)), "sizes": list(sizes), "dtype": dtype, "seconds": seconds,
              "in_place": in_place, "device": device, "backend": backend}  # fmt: skip
    return _parse_spec(values, CollectiveBenchSpec)


def _parse_spec(values: Mapping[str, object], kind: type[Spec]) -> Spec:
    """Convert flags to a struct; raise UsageError with the name of the wrong flag."""
    import msgspec

    from evener.core.base.decoding import from_builtins
    from evener.core.base.errors import UsageError

    try:
        return from_builtins(values, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        flag = where.strip("`").removeprefix("$.")
        known = {"dtype": "fp32, bf16 or fp16", "device": "auto, cpu or cuda", "backend": "auto, gloo or nccl"}
        raise UsageError(f"--{flag.replace('_', '-')} {values.get(flag)!r}: expected {known.get(flag, what)}") from None


def _buffer_sizes(smallest: str, largest: str, factor: int) -> tuple[int, ...]:
    """Return the buffer sizes from the smallest to the largest, each `factor` times the one before.

    >>> _buffer_sizes("1KiB", "64KiB", 4)
    (1024, 4096, 16384, 65536)
    """
    from evener.core.base.errors import UsageError

    low, high = _parse_bytes("--min-size", smallest), _parse_bytes("--max-size", largest)
    if low > high:
        raise UsageError(f"--min-size {smallest}: greater than --max-size {largest}")
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def _parse_bytes(flag: str, text: str) -> int:
    """Parse a size in bytes: 64MiB, 1KiB, 4096, 1MB.

    >>> _parse_bytes("--min-size", "64MiB"), _parse_bytes("--min-size", "1MB"), _parse_bytes("--min-size", "512")
    (67108864, 1000000, 512)
    """
    import re

    from evener.core.base.errors import UsageError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMG])(i?))?B?", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise UsageError(f"{flag} {text}: expected a size, such as 64MiB or 1KiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** (" kmg".index(match[2].lower()) if match[2] else 0))
