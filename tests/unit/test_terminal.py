"""Tables and lines fit any terminal, and the most important columns are never cut."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from evener.cli import bench_fleet, doctor, lab, probe_output
from evener.cli.terminal import print_findings, print_table, print_text
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import HostLink, Rates
from evener.core.cluster.host_probe import DeviceProbeResult
from evener.core.run.rundir import RunDir
from evener.doctor.link_probe import LinkProbeResult
from evener.doctor.preflight import PreflightReport
from evener.lab.emulated_lab import EmulatedLab
from evener.plan.cost.roofline import Roofline
from evener.report.explain.bus_bandwidth import collective_efficiencies
from evener.report.read.run_summary import summarize_run

from ..sample_runs import write_run
from . import test_checks as checks
from . import test_probe_figures as probed


def shown(width, titles, rows, **how):
    """The lines of a table in a terminal of this width, without colours."""
    written = io.StringIO()
    print_table(Console(file=written, width=width, force_terminal=True, color_system=None), titles, rows, **how)
    return written.getvalue().splitlines()


TITLES = ("way", "step", "more", "why not")

ROWS = [("ddp", "1 s", "9", "too slow by far"), ("int8", "20 ms", "10", "")]


def test_table_that_fits_is_printed_with_all_columns():
    assert shown(40, TITLES, ROWS, wrap_last=True) == [
        "way    step  more  why not",
        "──────────────────────────────────",
        "ddp     1 s     9  too slow by far",
        "int8  20 ms    10",
    ]


def test_text_column_wraps_below_its_row():
    assert shown(18, TITLES, ROWS[:1], wrap_last=True) == [
        "way  step  more",
        "    why not",
        "───────────────",
        "ddp   1 s     9",
        "    too slow by",
        "    far",
    ]


def test_least_important_column_is_dropped_and_named():
    assert shown(11, TITLES[:3], [row[:3] for row in ROWS], droppable=("more",)) == [
        "way    step", "───────────", "ddp     1 s", "int8  20 ms",
        "not shown", "in 11", "columns:", "more",
    ]  # fmt: skip


def test_required_columns_that_do_not_fit_wrap_to_next_line():
    assert shown(13, TITLES[:3], [row[:3] for row in ROWS]) == [
        "way", "     step  more", "─────────────", "ddp", "      1 s     9", "int8", "    20 ms    10",
    ]  # fmt: skip


def test_pipe_gets_each_row_on_one_line(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    written = io.StringIO()
    where = Console(file=written)
    print_table(where, TITLES, [("a" * 70, "1s", "9", "one two " * 20)], wrap_last=True, droppable=("more",))
    print_text(where, "one two " * 20)
    lines = written.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[2].split()[2] == "9"
    assert lines[3] == "one two " * 20


def written(columns, show):
    """What a function prints to a console of this width."""
    where = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    show(where)
    return where.file.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("hosts", [["attic", "laptop"], ["attic", "laptop", "tower"], [f"node{i}" for i in range(12)]])
def test_doctor_never_truncates_host_names(hosts, columns):
    """The first host lets nobody in; the second was not reached."""
    facts = {name: checks.facts(name, number) for number, name in enumerate(hosts) if name != "laptop"}
    ways = {name: checks.way(number) for number, name in enumerate(hosts) if name in facts}
    pairs = [
        checks.pair(source, target, tries=checks.tries("timeout", "timeout") if target == hosts[0] else checks.tries())
        for source in facts for target in facts if source != target
    ]  # fmt: skip
    found = PreflightReport(hosts=hosts, facts=facts, interfaces=ways, pairs=pairs, findings=[], took_s=1.0)
    text = written(columns, lambda where: doctor.print_preflight(where, found))
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    for name in hosts:
        assert re.search(rf"^{name}  ", text, re.M)
    if "laptop" in hosts:
        assert re.search("^laptop +not reached", text, re.M)
    assert re.search("✗|blocked", text) or len(facts) < 2


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("kind", ["fleet", "strategies"])
def test_bench_shows_speed_and_loss_at_any_width(tmp_path, kind, columns):
    label = "attic + laptop, GPU" if kind == "fleet" else "diloco:10:int8:streamed"
    runs = {name: summarize_run(RunDir(write_run(tmp_path / f"{i}", [{}] * (i + 1)).path))
            for i, name in enumerate(["attic, 1 process", label])}  # fmt: skip
    text = written(columns, lambda where: bench_fleet.print_comparison(where, kind, runs, runs["attic, 1 process"]))
    assert max(map(len, text.splitlines())) <= columns
    assert re.search(rf"^{re.escape(label)}\s+9.8k  1.00  105 ms", text, re.M)
    assert kind == "fleet" or re.search(r"  1.2500     same$", text, re.M)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_wire_probe_shows_bandwidth_at_any_width(columns):
    link = HostLink(goodput_Bps=117e6, duplex_Bps=112.5e6, duplex_bytes_per_cpu_s=1.125e9, parallel_Bps=1.175e8,
                    rtt_s=2e-4, rtt_p95_s=4e-4)  # fmt: skip
    wires = [
        LinkProbeResult(source=source, target=target, link=link, goodput_p05_Bps=1e8, mean_Bps=1.1e8, num_pings=30,
             congestion="cubic", iperf3_Bps=1.16e8)
        for source, target in (("attic", "laptop"), ("laptop", "attic"))
    ]  # fmt: skip
    text = written(columns, lambda where: probe_output.print_wires(where, wires))
    assert max(map(len, text.splitlines())) <= columns
    assert re.search(r"^attic → laptop  936 Mbit/s .* 900 Mbit/s(  10%)?   200 µs", text, re.M)
    assert ("CPU" in text.splitlines()[0]) == (columns > 60)
    assert ("not shown" in text) == (columns < 120)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_collective_probe_shows_bandwidth_at_any_width(columns):
    world = probed.world()
    judged = collective_efficiencies([probed.row("all_reduce", 1 << 28, 2.3)], world, 117.5e6)[0]

    def show(where):
        titles = probe_output.visible_collectives_columns(where)
        where.print(*probe_output.format_collectives_header(titles), sep="\n", soft_wrap=True)
        where.print(probe_output.format_collectives_row(judged, titles), soft_wrap=True)

    head, units, row = written(columns, show).splitlines()
    assert max(map(len, (head, units, row))) == len(row) <= columns
    assert re.match(r" +268435456 .* 2300000.0 +0.117 +0.117 +0 +0.993( |$)", row)
    told = dict(zip(head[1:].replace("of wire", "of-wire").split(), row.split(), strict=True))
    assert {"size", "time", "busbw", "#wrong", "of-wire"} <= told.keys()
    assert ("rest" in told, "latency" in told) == (columns >= 80, columns >= 120)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_device_probe_shows_rates_at_any_width(columns):
    rates = Rates(name="AMD EPYC 9654 96-Core Processor", matmul_flops={"fp32": 2.8e10, "bf16": 1.4e11}, copy_Bps=1e10,
                  triad_Bps=1e10, sum_Bps={"fp32": 4e10}, sync_Bps=2e9, loopback_Bps=1e9, memory_bytes=10**11,
                  coding_Bps=dict.fromkeys(("bf16", "int8", "int4", "packed", "powersgd:4", "powersgd:32"), 1e9),
                  models={"char": probed.CHAR})  # fmt: skip
    found = DeviceProbeResult(host="attic", device="cpu", threads=4, model="char", rates=rates,
                        sustained=probed.SUSTAINED, findings=[])  # fmt: skip
    roof = Roofline(arithmetic_s=0.1, memory_s=0.01)
    text = written(columns, lambda where: probe_output.print_device(where, found, 10_745_088, roof))
    assert max(map(len, text.splitlines())) <= columns
    assert re.search("^attic cpu        AMD EPYC 9654 96-Core", text, re.M)
    assert "two ranks here send 1.00 GB/s each" in " ".join(text.split())
    assert "What remains is overhead" in " ".join(text.split())


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_finding_fix_can_be_pasted(columns):
    fix = "on attic: sudo sysctl -w net.ipv4.tcp_congestion_control=bbr; or for good: " + "echo it " * 9
    one = Finding(check="link.idle", severity="warning", host="attic", peer="laptop", evidence="slow, " * 20, fix=fix)
    *lines, hint = written(columns, lambda where: print_findings(where, [one])).splitlines()
    assert lines[0].startswith("warning: link.idle  attic → laptop: slow, slow")
    assert max(map(len, lines)) <= columns
    assert hint == f"hint:  {fix}"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lab_status_shows_dead_host(monkeypatch, capsys, columns):
    host = {"name": "a", "address": "10.77.0.1", "up_bps": 10**9, "down_bps": None, "policed": True, "mtu": 1500,
            "cpus": 0.5, "cores": [0, 1], "processes": 0, "pid": 12370, "state": "dead"}  # fmt: skip
    up = SimpleNamespace(is_alive=lambda: True, rootless=False, state=SimpleNamespace(fleet_file="/home/me/lab.toml"))
    monkeypatch.setattr(EmulatedLab, "find", lambda name: up)
    monkeypatch.setattr(lab, "_lab_to_dict", lambda lab: {"hosts": {"a": host}})
    monkeypatch.setenv("COLUMNS", str(columns))
    lab.status("lab")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert re.search(r"^a     10.77.0.1  1.0Gbit  unlimited policed .* dead", text, re.M)
