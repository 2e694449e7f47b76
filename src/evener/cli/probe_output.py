"""Print the results of `evener probe`, in the columns of nccl-tests and iperf3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.cli.terminal import fit_columns, line_width, print_table, print_text
from evener.core.base.units import format_bit_rate, format_bytes, format_count, format_seconds, pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from evener.core.cluster.fleet_file import HostLink, ModelRate, Rates
    from evener.core.cluster.host_probe import DeviceProbeResult
    from evener.doctor.link_probe import LinkProbeResult
    from evener.plan.cost.roofline import Roofline
    from evener.report.explain.bus_bandwidth import CollectiveEfficiency

MIN_CPU_FRACTION = 0.6  # CPUs used per thread; below this, other programs were using them
# nccl-tests' columns, then ours: title, unit, width in characters. The last four sum to the time.
COLLECTIVES_COLUMNS = [
    ("size", "(B)", 11), ("count", "(elements)", 14), ("type", "", 10), ("redop", "", 8), ("root", "", 8),
    ("time", "(us)", 11), ("algbw", "(GB/s)", 8), ("busbw", "(GB/s)", 8), ("#wrong", "", 10), ("of wire", "", 8),
    ("wire", "(us)", 11), ("latency", "(us)", 11), ("reduce", "(us)", 11), ("rest", "(us)", 11),
]  # fmt: skip
DROPPABLE_COLUMNS = ("count", "root", "redop", "type", "reduce", "latency", "rest", "wire")


def print_wires(console: Console, measured: Sequence[LinkProbeResult]) -> None:
    """Print a row for each direction of each link."""
    with_iperf3 = any(wire.iperf3_Bps is not None for wire in measured)
    titles = ["from → to", "one stream", "p5", "4 streams", "both ways", "CPU", "rtt p50", "p95", "retransmits"]
    titles += ["iperf3"] if with_iperf3 else []
    rows = []
    for wire in measured:
        link = wire.link
        row = [
            f"{wire.source} → {wire.target}",
            format_bit_rate(link.goodput_Bps),
            format_bit_rate(wire.goodput_p05_Bps),
            format_bit_rate(link.parallel_Bps),
            format_bit_rate(link.duplex_Bps),
            format_cpu_share(link),
            format_seconds(link.rtt_s),
            format_seconds(link.rtt_p95_s),
            "not measured" if link.retransmits is None else str(link.retransmits),
        ]
        rows.append([*row, *([format_bit_rate(wire.iperf3_Bps)] if with_iperf3 else [])])
    spare = [title for title in ("p5", "p95", "iperf3", "CPU", "retransmits", "4 streams") if title in titles]
    print_table(console, titles, rows, droppable=spare)


def format_cpu_share(link: HostLink) -> str:
    """Return the CPU time that the source spends while it sends and receives, as a share of one CPU.

    >>> from evener.core.cluster.fleet_file import HostLink
    >>> format_cpu_share(HostLink(goodput_Bps=117e6, rtt_s=2e-4, duplex_Bps=1e8, duplex_bytes_per_cpu_s=8e8))
    '12%'
    """
    if link.duplex_Bps is None or link.duplex_bytes_per_cpu_s is None:
        return "–"
    return f"{link.duplex_Bps / link.duplex_bytes_per_cpu_s:.0%}"


def visible_collectives_columns(console: Console) -> list[str]:
    """Return the titles of the columns that fit into the console."""
    titles = [title for title, _, _ in COLLECTIVES_COLUMNS]
    return [
        titles[i]
        for i in fit_columns(
            titles, [wide for _, _, wide in COLLECTIVES_COLUMNS], DROPPABLE_COLUMNS, line_width(console)
        )
    ]


def format_collectives_header(columns: Sequence[str]) -> list[str]:
    """Return the two header lines of nccl-tests."""
    shown = [column for column in COLLECTIVES_COLUMNS if column[0] in columns]
    lines = ("".join(f"{column[i]:>{column[2]}}" for column in shown) for i in (0, 1))
    return [f"#{line[1:]}".rstrip() for line in lines]


def format_collectives_row(judged: CollectiveEfficiency, columns: Sequence[str]) -> str:
    """Return one line of the table."""
    from evener.core.cluster.collective_results import NCCL_DTYPE_NAMES

    row, split = judged.row, judged.split
    terms = (row.time_s, split.wire_s, split.latency_s, split.reduction_s, split.rest_s)
    time, *parts = (f"{value * 1e6:.1f}" for value in terms)
    rates = (f"{value / 1e9:.3f}" for value in (row.algbw_Bps, row.busbw_Bps))
    cells = [row.size_bytes, row.count, NCCL_DTYPE_NAMES[row.dtype], row.redop, row.root, time, *rates, row.num_wrong,
             f"{judged.share_of_wire:.3f}", *parts]  # fmt: skip
    columns_and_cells = zip(COLLECTIVES_COLUMNS, cells, strict=True)
    return "".join(f"{cell:>{wide}}" for (title, _, wide), cell in columns_and_cells if title in columns)


def print_device(console: Console, result: DeviceProbeResult, num_trained: int, roof: Roofline | None) -> None:
    """Print the measured rates of one device, and its bottleneck with a preset."""
    rates, sustained = result.rates, result.sustained
    large, model = sustained.large, rates.models[result.model]
    memory = f"{format_bytes(rates.memory_bytes)}, " if rates.memory_bytes else ""
    copy, triad = ((value or 0.0) / 1e9 for value in (rates.copy_Bps, rates.triad_Bps))
    sequence = large.tokens // large.micro_batch
    threads = f", {pluralize(result.threads, 'thread')}" if result.device == "cpu" else ""
    rows = [
        (
            "matrix products",
            ", ".join(f"{dtype} {flops / 1e9:.1f} GFLOP/s" for dtype, flops in rates.matmul_flops.items()),
        ),
        ("memory", f"{memory}copy {copy:.1f} GB/s, triad {triad:.1f} GB/s{', jemalloc' * rates.has_jemalloc}"),
        ("sum, one thread", ", ".join(f"{dtype} {value / 1e9:.1f} GB/s" for dtype, value in rates.sum_Bps.items())),
        ("all-reduce", describe_all_reduce(rates)),
        ("gradients coded", ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.coding_Bps.items())),
        (
            result.model,
            f"{format_count(sustained.tokens_per_s)} tokens/s forward and backward in {sustained.dtype}, "
            f"{large.micro_batch} × {sequence} tokens a pass, {large.passes} passes, "
            f"p50 {format_seconds(large.pass_p50_s)}, p95 {format_seconds(large.pass_p95_s)}",
        ),
        (
            "",
            f"first third {format_count(sustained.first_third_tokens_per_s)} tokens/s on "
            f"{sustained.first_third_cpus:.1f} processors, last third "
            f"{format_count(sustained.last_third_tokens_per_s)} on {sustained.last_third_cpus:.1f}",
        ),
        *(
            (
                "",
                f"{one.micro_batch} × {sequence} tokens a pass, {one.passes} passes: p50 "
                f"{format_seconds(one.pass_p50_s)}, "
                f"p95 {format_seconds(one.pass_p95_s)}",
            )
            for one in sustained.smaller
        ),
        ("a pass takes", describe_micro_batch_time(model)),
        (
            "an update takes",
            f"{format_seconds(sustained.update_p50_s)}, p95 {format_seconds(sustained.update_p95_s)}: clipping and "
            f"AdamW, {format_count(num_trained)} parameters, {sustained.updates} updates",
        ),
    ]
    print_table(console, (f"{result.host} {result.device}", f"{rates.name}{threads}"), rows, wrap_last=True)
    if roof is not None:
        print_text(console, describe_bottleneck(result, roof))
    if result.device == "cpu" and sustained.last_third_cpus < MIN_CPU_FRACTION * result.threads:
        print_text(
            console, "Other programs used much of the processor during the measurement: without them it is faster."
        )


def describe_all_reduce(rates: Rates) -> str:
    """Return the rates of an all-reduce on one host: of a processor that does nothing else, and between two ranks.

    >>> from evener.core.cluster.fleet_file import Rates
    >>> describe_all_reduce(Rates(sync_Bps=2.1e9, loopback_Bps=1.05e9))
    'a processor busy with nothing else sends 2.10 GB/s; two ranks here send 1.05 GB/s each'
    """
    if rates.sync_Bps is None or rates.loopback_Bps is None:
        return "not measured"
    return (
        f"a processor busy with nothing else sends {rates.sync_Bps / 1e9:.2f} GB/s; two ranks here send "
        f"{rates.loopback_Bps / 1e9:.2f} GB/s each"
    )


def describe_micro_batch_time(model: ModelRate) -> str:
    """Return the fitted time of a micro-batch: a constant, and a term proportional to its tokens.

    >>> from evener.core.cluster.fleet_file import ModelRate
    >>> (describe_micro_batch_time(ModelRate(tokens_per_s=3200.0, pass_s=0.012)),
    ...  describe_micro_batch_time(ModelRate(tokens_per_s=57.0)))
    ('12 ms, and a second for each 3.2k tokens', 'a second for each 57 tokens; fixed time: not measured')
    """
    tokens = f"a second for each {format_count(model.tokens_per_s)} tokens"
    if model.pass_s is None:
        return f"{tokens}; fixed time: not measured"
    return f"{format_seconds(model.pass_s)}, and {tokens}"


def describe_bottleneck(result: DeviceProbeResult, roof: Roofline) -> str:
    """Return a sentence on the bottleneck of a device: arithmetic, memory or neither."""
    took_s = result.sustained.large.pass_p50_s
    by = roof.bound_by(took_s)
    estimate = (
        f"Of {format_seconds(took_s)} for one pass of {result.model}, arithmetic at the measured rate would take "
        f"{format_seconds(roof.arithmetic_s)}, moving its data {format_seconds(roof.memory_s)} at most: "
    )
    if by != "overhead":
        return f"{estimate}this device is bound by {by}."
    why = "calls of many small operations"
    if result.device == "cpu" and result.threads > 1:
        why += f", threads that wait for each other ({result.threads} here), or other programs"
    return f"{estimate}neither bounds it. What remains is overhead: {why}."
