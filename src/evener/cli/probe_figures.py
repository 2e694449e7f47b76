"""How do the figures of `evener probe` look? Plain text, in the columns that users of nccl-tests and iperf3 know."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from evener.core.units import count, link_rate, plural, seconds, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evener.core.collective import World
    from evener.core.device_rates import DeviceRates
    from evener.core.finding import Finding
    from evener.core.fleet import ModelRate, Rates
    from evener.hosts.wire import Wire
    from evener.plan.compute import Roofline
    from evener.report.collectives import Judged

WIDTH = 100
DISTURBED = 0.6  # of its threads' processors: less, and somebody else had them


def paragraph(sentences: Sequence[str]) -> str:
    """Sentences as one paragraph."""
    return "\n".join(textwrap.fill(one, WIDTH, break_on_hyphens=False, subsequent_indent="  ") for one in sentences)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns; the first is aligned left, the others right.

    >>> print(table([["host", "rate"], ["attic", "1.2"]]))
    host   rate
    attic   1.2
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                  for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    )  # fmt: skip


def findings(found: Sequence[Finding]) -> str:
    """One paragraph each: what, where, the evidence, and the next step."""
    lines = []
    for finding in found:
        where = " → ".join(name for name in (finding.host, finding.peer) if name)
        lines.append(f"{finding.severity}: {finding.check}{'  ' + where if where else ''}: {finding.evidence}")
        lines.append(f"hint:  {finding.fix}")
    return "\n".join(lines)


def wires(measured: Sequence[Wire]) -> str:
    """A row for each direction."""
    with_iperf3 = any(wire.iperf3_Bps is not None for wire in measured)
    title = ["from → to", "one stream", "p5", "4 streams", "both ways", "rtt p50", "p95", "sent again"]
    rows = [[*title, *(["iperf3"] if with_iperf3 else [])]]
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
    return table(rows)


def collectives_title(collective: str, world: World, in_place: bool) -> str:
    """nccl-tests' head, with our columns at its right."""
    place = "in-place" if in_place else "out-of-place"
    return (
        f"# {collective}, {place}: {world.ranks} ranks, {world.backend}, {world.device}\n"
        "#       size         count      type   redop    root       time   algbw   busbw #wrong  of wire"
        "       wire    latency     reduce       rest\n"
        "#        (B)    (elements)                             (us)  (GB/s)  (GB/s)                "
        "     (us)       (us)       (us)       (us)"
    )


def collectives_row(judged: Judged) -> str:
    """One line; the last four columns sum to the time."""
    from evener.core.collective import NCCL_NAMES

    row, split = judged.row, judged.split
    terms = (split.wire_s, split.latency_s, split.reduction_s, split.rest_s)
    parts = "".join(f" {value * 1e6:10.1f}" for value in terms)
    return (
        f"{row.size_bytes:12d}  {row.count:12d}  {NCCL_NAMES[row.dtype]:>8}  {row.redop:>6}  {row.root:6d} "
        f"{row.time_s * 1e6:10.1f} {row.algbw_Bps / 1e9:7.3f} {row.busbw_Bps / 1e9:7.3f} {row.num_wrong:6d}"
        f"  {judged.share_of_wire:7.3f}{parts}"
    )


def device(found: DeviceRates, roof: Roofline) -> str:
    """The figures of one device, and what bounds it."""
    rates, sustained = found.rates, found.sustained
    large, model = sustained.large, rates.models[found.model]
    matmul = ", ".join(f"{dtype} {flops / 1e9:.1f} GFLOP/s" for dtype, flops in rates.matmul_flops.items())
    sums = ", ".join(f"{dtype} {value / 1e9:.1f} GB/s" for dtype, value in rates.sum_Bps.items())
    memory = f"{size(rates.memory_bytes)}, " if rates.memory_bytes else ""
    copy, triad = ((value or 0.0) / 1e9 for value in (rates.copy_Bps, rates.triad_Bps))
    sequence = large.tokens // large.micro_batch
    threads = f", {plural(found.threads, 'thread')}" if found.device == "cpu" else ""
    lines = [
        f"{found.host} {found.device}: {rates.name}{threads}",
        f"  matrix products  {matmul}",
        f"  memory           {memory}copy {copy:.1f} GB/s, triad {triad:.1f} GB/s",
        f"  sum, one thread  {sums}",
        f"  all-reduce       {all_reduce(rates)}",
        f"  gradients coded  {', '.join(f'{name} {rate / 1e9:.1f} GB/s' for name, rate in rates.coding_Bps.items())}",
        f"  {found.model:15}  {count(sustained.tokens_per_s)} tokens/s forward and backward in {sustained.dtype}, "
        f"{large.micro_batch} × {sequence} tokens a pass, {large.passes} passes, "
        f"p50 {seconds(large.pass_p50_s)}, p95 {seconds(large.pass_p95_s)}",
        f"  {'':15}  first third {count(sustained.first_third_tokens_per_s)} tokens/s on "
        f"{sustained.first_third_cpus:.1f} processors, last third {count(sustained.last_third_tokens_per_s)} on "
        f"{sustained.last_third_cpus:.1f}",
        *(
            f"  {'':15}  {one.micro_batch} × {sequence} tokens a pass, {one.passes} passes: "
            f"p50 {seconds(one.pass_p50_s)}, p95 {seconds(one.pass_p95_s)}"
            for one in sustained.smaller
        ),
        f"  {'a pass takes':15}  {pass_time(model)}",
        f"  {'an update takes':15}  {seconds(sustained.update_p50_s)}, p95 {seconds(sustained.update_p95_s)}: clipping "
        f"and AdamW, {count(found.num_params)} parameters, {sustained.updates} updates",
        textwrap.fill(bound(found, roof), WIDTH, initial_indent="  ", subsequent_indent="  "),
    ]
    if found.device == "cpu" and sustained.last_third_cpus < DISTURBED * found.threads:
        lines.append("  Other programs had much of the processor meanwhile: by itself it is faster.")
    return "\n".join(lines)


def all_reduce(rates: Rates) -> str:
    """What an all-reduce takes of a processor, and what two ranks of one host reach between them.

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
    """The line through the passes of all sizes.

    >>> from evener.core.fleet import ModelRate
    >>> pass_time(ModelRate(tokens_per_s=3200.0, pass_s=0.012)), pass_time(ModelRate(tokens_per_s=57.0))
    ('12 ms, and a second for each 3.2k tokens', 'a second for each 57 tokens; what it takes besides: not measured')
    """
    tokens = f"a second for each {count(model.tokens_per_s)} tokens"
    if model.pass_s is None:
        return f"{tokens}; what it takes besides: not measured"
    return f"{seconds(model.pass_s)}, and {tokens}"


def bound(found: DeviceRates, roof: Roofline) -> str:
    """Arithmetic, memory or neither, in one sentence."""
    took_s = found.sustained.large.pass_p50_s
    by = roof.bound_by(took_s)
    told = (
        f"Of {seconds(took_s)} for one pass of {found.model}, arithmetic at the measured rate would take "
        f"{seconds(roof.arithmetic_s)}, moving its data {seconds(roof.memory_s)} at most: "
    )
    if by != "overhead":
        return f"{told}this device is bound by {by}."
    why = "calls of many small operations"
    if found.device == "cpu" and found.threads > 1:
        why += f", threads that wait for each other ({found.threads} here), or programs beside it"
    return f"{told}neither bounds it. What remains is overhead: {why}."
