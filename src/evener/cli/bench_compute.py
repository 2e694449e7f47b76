"""Show the compute bench: a table of a training step by operation."""

from __future__ import annotations

import json

import msgspec

from evener.bench.compute import ComputeTable, compute_table, explain_table
from evener.cli.terminal import make_console, print_table, print_text
from evener.core.base.escaped_output import print_escaped
from evener.core.base.units import format_bytes, format_seconds, format_si, pluralize
from evener.core.model.compute_profile import ComputeBenchSpec

MIN_CPU_FRACTION = 0.9  # CPUs used per thread; below this, other programs were using them, or threads waited


def run_compute_bench(spec: ComputeBenchSpec, as_json: bool) -> int:
    """Profile a training step on this machine, and print its operations."""
    screen = make_console(stderr=True, quiet=as_json)
    print_text(screen, f"about {spec.seconds + 10:.0f} s: matrix products and memory, then training steps")
    table = compute_table(spec)
    if as_json:
        print_escaped(json.dumps(table_json(table)))
    else:
        print_compute_table(table)
    return 0


def table_json(table: ComputeTable) -> dict[str, object]:
    """Return the JSON object of the bench."""
    profile: dict[str, object] = msgspec.to_builtins(table.profile)
    del profile["operations"]
    return profile | {
        "flops": table.flops,
        "mfu": table.mfu,
        "unattributed_s": table.unattributed_s,
        "operations": msgspec.to_builtins(table.rows),
        "explanation": explain_table(table),
    }


def print_compute_table(table: ComputeTable) -> None:
    """Print a row for each operation, the sums, and what the columns cannot say."""
    console, profile, step_s = make_console(), table.profile, table.profile.profiled_step_s
    titles = ["operation", "pass", "time", "of step", "FLOPs", "bytes", "FLOP/s", "roof", "of roof"]
    rows = []
    for row in table.rows:
        rate = format_si(row.flops / row.time_s) if row.flops and row.time_s else "–"
        of_roof = f"{row.roof_s / row.time_s:.0%}" if row.time_s and row.roof_s else "–"
        rows.append(
            [
                row.name,
                "–" if row.phase == "update" else row.phase,
                format_seconds(row.time_s),
                f"{row.time_s / step_s:.1%}",
                format_si(row.flops) if row.flops else "–",
                format_bytes(row.bytes) if row.bytes else "–",
                rate,
                format_seconds(row.roof_s) if row.roof_s else "–",
                of_roof,
            ]
        )
    blank = "–"
    unattributed = [format_seconds(table.unattributed_s), f"{table.unattributed_s / step_s:.1%}"]
    rows.append(["not attributed", blank, *unattributed, blank, blank, blank, blank, blank])
    step_rate = format_si(table.flops / step_s)
    roof_s = sum(row.roof_s for row in table.rows)
    rows.append(
        ["whole step", blank, format_seconds(step_s), "100.0%", format_si(table.flops), blank, step_rate,
         format_seconds(roof_s), f"{roof_s / step_s:.0%}"]
    )  # fmt: skip
    print_table(console, titles, rows, left_aligned=("pass",), droppable=("FLOPs", "bytes", "FLOP/s", "roof"))
    console.print()
    threads = pluralize(profile.threads, "thread")
    device = profile.device_name + (f", {threads}" if profile.device == "cpu" else "")
    m, k, n = profile.matmul_shape
    lines = [
        f"{device}, {profile.dtype}, {profile.tokens} tokens a step, {profile.num_steps} steps with and without the "
        "profiler in turns.",
        f"Peak: {format_si(profile.matmul_flops)}FLOP/s by torch.mm of {m} × {k} and {k} × {n}, and "
        f"{format_bytes(profile.memory_Bps)}/s of memory or cache.",
        f"Without the profiler a step takes {format_seconds(profile.step_s)}: {profile.tokens / profile.step_s:.0f} "
        f"tokens/s, an MFU of {table.mfu:.2f}.",
        explain_table(table),
    ]
    if profile.device == "cpu" and profile.cpus < MIN_CPU_FRACTION * profile.threads:
        lines.append(
            f"The process ran on {profile.cpus:.2f} cores with {threads}: other programs took the "
            "rest, so times are too long."
        )
    for line in lines:
        print_text(console, line)
