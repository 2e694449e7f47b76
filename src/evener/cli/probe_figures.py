"""Print the results of `evener probe`, in the columns of nccl-tests and iperf3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evener.cli.terminal import fitting, say, table, width_of
from evener.core.units import count, link_rate, plural, seconds, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from evener.core.device_rates import DeviceRates
    from evener.core.fleet import ModelRate, Rates
    from evener.hosts.wire import Wire
    from evener.plan.compute import Roofline
    from evener.report.collectives import Judged

DISTURBED = 0.6  # CPUs used per thread; below this, other programs were using them
# nccl-tests' columns, then ours: title, unit, width in characters. The last four sum to the time.
COLUMNS = [
    ("size", "(B)", 11), ("count", "(elements)", 14), ("type", "", 10), ("redop", "", 8), ("root", "", 8),
    ("time", "(us)", 11), ("algbw", "(GB/s)", 8), ("busbw", "(GB/s)", 8), ("#wrong", "", 10), ("of wire", "", 8),
    ("wire", "(us)", 11), ("latency", "(us)", 11), ("reduce", "(us)", 11), ("rest", "(us)", 11),
]  # fmt: skip
SPARE = ("count", "root", "redop", "type", "reduce", "latency", "rest", "wire")


def wires(screen: Console, measured: Sequence[Wire]) -> None:
    """Print a row for each direction of each link."""
    with_iperf3 = any(wire.iperf3_Bps is not None for wire in measured)
    titles = ["from → to", "one stream", "p5", "4 streams", "both ways", "rtt p50", "p95", "retransmits"]
    titles += ["iperf3"] if with_iperf3 else []
    rows = []
    for wire in measured:
        link = wire.link
        row = [
            f"{wire.source} → {wire.target}",
            link_rate(link.goodput_Bps),
            link_rate(wire.goodput_p05_Bps),
            link_rate(link.parallel_Bps),
            link_rate(link.duplex_Bps),
            seconds(link.rtt_s),
            seconds(link.rtt_p95_s),
            "not measured" if link.retransmits is None else str(link.retransmits),
        ]
        rows.append([*row, *([link_rate(wire.iperf3_Bps)] if with_iperf3 else [])])
    spare = [title for title in ("p5", "p95", "iperf3", "retransmits", "4 streams") if title in titles]
    table(screen, titles, rows, spare=spare)


def collectives_columns(screen: Console) -> list[str]:
    """Return the titles of the columns that fit into the console."""
    titles = [title for title, _, _ in COLUMNS]
    return [titles[i] for i in fitting(titles, [wide for _, _, wide in COLUMNS], SPARE, width_of(screen))]


def collectives_title(columns: Sequence[str]) -> list[str]:
    """Return the two header lines of nccl-tests."""
    shown = [column for column in COLUMNS if column[0] in columns]
    lines = ("".join(f"{column[i]:>{column[2]}}" for column in shown) for i in (0, 1))
    return [f"#{line[1:]}".rstrip() for line in lines]


def collectives_row(judged: Judged, columns: Sequence[str]) -> str:
    """Return one line of the table."""
    from evener.core.collective import NCCL_NAMES

    row, split = judged.row, judged.split
    terms = (row.time_s, split.wire_s, split.latency_s, split.reduction_s, split.rest_s)
    time, *parts = (f"{value * 1e6:.1f}" for value in terms)
    rates = (f"{value / 1e9:.3f}" for value in (row.algbw_Bps, row.busbw_Bps))
    cells = [row.size_bytes, row.count, NCCL_NAMES[row.dtype], row.redop, row.root, time, *rates, row.num_wrong,
             f"{judged.share_of_wire:.3f}", *parts]  # fmt: skip
    columns_and_cells = zip(COLUMNS, cells, strict=True)
    return "".join(f"{cell:>{wide}}" for (title, _, wide), cell in columns_and_cells if title in columns)


def device(screen: Console, found: DeviceRates, roof: Roofline) -> None:
    """Print the measured rates of one device, and its bottleneck."""
    rates, sustained = found.rates, found.sustained
    large, model = sustained.large, rates.models[found.model]
    memory = f"{size(rates.memory_bytes)}, " if rates.memory_bytes else ""
    copy, triad = ((value or 0.0) / 1e9 for value in (rates.copy_Bps, rates.triad_Bps))
    sequence = large.tokens // large.micro_batch
    threads = f", {plural(found.threads, 'thread')}" if found.device == "cpu" else ""
    rows = [
        ("matrix products", ", ".join(f"{dtype} {flops / 1e9:.1f} GFLOP/s"
                                      for dtype, flops in rates.matmul_flops.items())),
        ("memory", f"{memory}copy {copy:.1f} GB/s, triad {triad:.1f} GB/s"),
        ("sum, one thread", ", ".join(f"{dtype} {value / 1e9:.1f} GB/s" for dtype, value in rates.sum_Bps.items())),
        ("all-reduce", all_reduce(rates)),
        ("gradients coded", ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.coding_Bps.items())),
        (found.model, f"{count(sustained.tokens_per_s)} tokens/s forward and backward in {sustained.dtype}, "
                      f"{large.micro_batch} × {sequence} tokens a pass, {large.passes} passes, "
                      f"p50 {seconds(large.pass_p50_s)}, p95 {seconds(large.pass_p95_s)}"),
        ("", f"first third {count(sustained.first_third_tokens_per_s)} tokens/s on "
             f"{sustained.first_third_cpus:.1f} processors, last third "
             f"{count(sustained.last_third_tokens_per_s)} on {sustained.last_third_cpus:.1f}"),
        *(("", f"{one.micro_batch} × {sequence} tokens a pass, {one.passes} passes: p50 {seconds(one.pass_p50_s)}, "
               f"p95 {seconds(one.pass_p95_s)}") for one in sustained.smaller),
        ("a pass takes", pass_time(model)),
        ("an update takes", f"{seconds(sustained.update_p50_s)}, p95 {seconds(sustained.update_p95_s)}: clipping and "
                            f"AdamW, {count(found.num_params)} parameters, {sustained.updates} updates"),
    ]  # fmt: skip
    table(screen, (f"{found.host} {found.device}", f"{rates.name}{threads}"), rows, text=True)
    say(screen, bound(found, roof))
    if found.device == "cpu" and sustained.last_third_cpus < DISTURBED * found.threads:
        say(screen, "Other programs used much of the processor during the measurement: without them it is faster.")


def all_reduce(rates: Rates) -> str:
    """Return the rates of an all-reduce on one host: of a processor that does nothing else, and between two ranks.

    >>> from evener.core.fleet import Rates
    >>> all_reduce(Rates(sync_Bps=2.1e9, loopback_Bps=1.05e9))
    'a processor busy with nothing else sends 2.10 GB/s; two ranks here send 1.05 GB/s each'
    """
    if rates.sync_Bps is None or rates.loopback_Bps is None:
        return "not measured"
    return (
        f"a processor busy with nothing else sends {rates.sync_Bps / 1e9:.2f} GB/s; two ranks here send "
        f"{rates.loopback_Bps / 1e9:.2f} GB/s each"
    )


def pass_time(model: ModelRate) -> str:
    """Return the fitted time of a micro-batch: a constant, and a term proportional to its tokens.

    >>> from evener.core.fleet import ModelRate
    >>> pass_time(ModelRate(tokens_per_s=3200.0, pass_s=0.012)), pass_time(ModelRate(tokens_per_s=57.0))
    ('12 ms, and a second for each 3.2k tokens', 'a second for each 57 tokens; fixed time: not measured')
    """
    tokens = f"a second for each {count(model.tokens_per_s)} tokens"
    if model.pass_s is None:
        return f"{tokens}; fixed time: not measured"
    return f"{seconds(model.pass_s)}, and {tokens}"


def bound(found: DeviceRates, roof: Roofline) -> str:
    """Return a sentence on the bottleneck of a device: arithmetic, memory or neither."""
    took_s = found.sustained.large.pass_p50_s
    by = roof.bound_by(took_s)
    estimate = (
        f"Of {seconds(took_s)} for one pass of {found.model}, arithmetic at the measured rate would take "
        f"{seconds(roof.arithmetic_s)}, moving its data {seconds(roof.memory_s)} at most: "
    )
    if by != "overhead":
        return f"{estimate}this device is bound by {by}."
    why = "calls of many small operations"
    if found.device == "cpu" and found.threads > 1:
        why += f", threads that wait for each other ({found.threads} here), or other programs"
    return f"{estimate}neither bounds it. What remains is overhead: {why}."
