"""Tables and lines fit any terminal, nothing that decides is cut, and colour is where it is wanted."""

from __future__ import annotations

import io
import json
import re
import subprocess
from types import SimpleNamespace

import pytest
from rich.console import Console

from evener.cli import doctor, fleet_benches, lab, probe_figures
from evener.cli.fleets import tell_findings
from evener.cli.terminal import say, table
from evener.core.device_rates import DeviceRates
from evener.core.finding import Finding
from evener.core.fleet import Link, Rates
from evener.core.rundir import RunDir
from evener.hosts.doctor import Survey
from evener.hosts.wire import Wire
from evener.lab.lab import Lab
from evener.plan.compute import Roofline
from evener.report.collectives import judge_all
from evener.report.summary import summarize

from . import test_checks as checks
from . import test_probe_figures as probed
from .conftest import write_run
from .pseudo import COLOUR, ESCAPE, argv, environment, in_pipe, in_terminal
from .test_plan_verb import FLEET, ONE, WORDS


def shown(width, titles, rows, **how):
    """The lines of a table in a terminal of this width, without colours."""
    written = io.StringIO()
    table(Console(file=written, width=width, force_terminal=True, color_system=None), titles, rows, **how)
    return written.getvalue().splitlines()


TITLES = ("way", "step", "more", "why not")
ROWS = [("ddp", "1 s", "9", "too slow by far"), ("int8", "20 ms", "10", "")]


def test_a_table_that_fits():
    assert shown(40, TITLES, ROWS, text=True) == [
        "way    step  more  why not",
        "──────────────────────────────────",
        "ddp     1 s     9  too slow by far",
        "int8  20 ms    10",
    ]


def test_a_text_goes_below_its_row_and_keeps_its_words():
    assert shown(18, TITLES, ROWS[:1], text=True) == [
        "way  step  more",
        "    why not",
        "───────────────",
        "ddp   1 s     9",
        "    too slow by",
        "    far",
    ]


def test_what_matters_least_goes_first_and_is_named():
    assert shown(11, TITLES[:3], [row[:3] for row in ROWS], spare=("more",)) == [
        "way    step", "───────────", "ddp     1 s", "int8  20 ms",
        "not shown", "in 11", "columns:", "more",
    ]  # fmt: skip


def test_what_may_not_go_begins_on_a_line_of_its_own():
    assert shown(13, TITLES[:3], [row[:3] for row in ROWS]) == [
        "way", "     step  more", "─────────────", "ddp", "      1 s     9", "int8", "    20 ms    10",
    ]  # fmt: skip


def test_a_pipe_gets_every_row_in_one_line(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    written = io.StringIO()
    where = Console(file=written)
    table(where, TITLES, [("a" * 70, "1s", "9", "one two " * 20)], text=True, spare=("more",))
    say(where, "one two " * 20)
    lines = written.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[2].split()[2] == "9"
    assert lines[3] == "one two " * 20


# --- the verbs --------------------------------------------------------------------------------------------------------

PLANS = {
    "nodes": WORDS,
    "one way": (*WORDS, "--sync", "ddp"),
    "fleet": ("--fleet", "fleet.toml", "--model", "d8", "--block-size", "512", "--batch", "8"),
    "from": ("--from", "runs/one"),
}
SCALE = ("--model", "gpt2", "--scale", "1,2,4,8", "--per-node", "8", *ONE)


@pytest.fixture(scope="module", name="place")
def _place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    (place / "fleet.toml").write_text(FLEET)
    write_run(place / "runs" / "one", [{}])
    write_run(place / "runs" / "20261122-174207-gpt2-medium-verbs", [{}, {}])
    return place


def told(*args, cwd):
    done = subprocess.run(argv(*args), capture_output=True, text=True, check=False, cwd=cwd, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def fits(text, whole, columns):
    """No line is longer; every word is one that the pipe got, or of the line that names what is left out."""
    assert max(map(len, text.splitlines())) <= columns
    words = {word for word in text.split() if not set(word) <= {"─"}}
    missing = re.findall(r"not shown in \d+ columns: (?:.*,\n)*.*", text)
    assert words <= {*whole.split(), *" ".join(missing).split()}


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("form", PLANS)
def test_a_plan_decides_in_any_terminal(place, form, columns):
    text = ESCAPE.sub("", in_terminal("plan", *PLANS[form], columns=columns, cwd=place))
    fits(text, in_pipe("plan", *PLANS[form], cwd=place), columns)
    words = " ".join(text.split())
    found = json.loads(told("plan", *PLANS[form], "--json", cwd=place))
    head = next(line.split() for line in text.splitlines() if line.startswith("way"))
    assert {"step", "tokens/s", "×"} <= set(head)
    for option in found["options"]:
        assert re.search(rf"^{re.escape(option['name'])}\s+[\d.]+ m?s .*  [\d.]+k? +(\d\.\d\d|–)$", text, re.M)
        assert (option["rejected_because"] or "← recommended") in words
    assert found["verdict"] in words


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_simulation_decides_in_any_terminal(place, columns):
    text = ESCAPE.sub("", in_terminal("plan", *SCALE, columns=columns, cwd=place))
    fits(text, in_pipe("plan", *SCALE, cwd=place), columns)
    head = next(line.split() for line in text.splitlines() if line.startswith("ranks"))
    assert {"tokens/s", "effic.", "step", "with"} <= set(head)
    for point in json.loads(told("plan", *SCALE, "--json", cwd=place))["points"]:
        assert re.search(rf"^{point['ranks']} .*  {point['efficiency']:.1%}  .*  {point['goodput']:.1%}$", text, re.M)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_runs_have_a_line_each(place, columns):
    text = ESCAPE.sub("", in_terminal("runs", columns=columns, cwd=place))
    whole = in_pipe("runs", cwd=place)
    fits(text, whole, columns)
    for run in ("runs/one", "runs/20261122-174207-gpt2-medium-verbs"):
        assert re.search(rf"^{run}\s.*finished .* 20 .* 0.1500 .* 9.8k", text, re.M)
        row = "finished char verbs h [12] 20 0.1500 1.2500 1.2500 9.8k [0-9]+ [a-z]+ [0-9.]+ kB".replace(" ", " +")
        assert re.search(rf"^{run} +{row}$", whole, re.M)


def test_columns_says_how_wide_the_reader_of_a_pipe_is(place):
    assert in_pipe("runs", cwd=place, COLUMNS="60") == in_terminal("runs", columns=60, cwd=place, TERM="dumb")


def written(columns, show):
    """What a function prints to a console of this width."""
    where = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    show(where)
    return where.file.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("hosts", [["attic", "laptop"], ["attic", "laptop", "tower"], [f"node{i}" for i in range(12)]])
def test_the_doctor_cuts_no_name(hosts, columns):
    """The first host lets nobody in; the second was not reached."""
    facts = {name: checks.facts(name, number) for number, name in enumerate(hosts) if name != "laptop"}
    ways = {name: checks.way(number) for number, name in enumerate(hosts) if name in facts}
    pairs = [
        checks.pair(source, target, tries=checks.tries("timeout", "timeout") if target == hosts[0] else checks.tries())
        for source in facts for target in facts if source != target
    ]  # fmt: skip
    found = Survey(hosts=hosts, facts=facts, ways=ways, pairs=pairs, findings=[], took_s=1.0)
    text = written(columns, lambda where: doctor.show(where, found))
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    for name in hosts:
        assert re.search(rf"^{name}  ", text, re.M)
    if "laptop" in hosts:
        assert re.search("^laptop +not reached", text, re.M)
    assert re.search("✗|blocked", text) or len(facts) < 2


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("kind", ["fleet", "strategies"])
def test_a_bench_tells_speed_and_loss_in_any_terminal(tmp_path, kind, columns):
    label = "attic + laptop, GPU" if kind == "fleet" else "diloco:10:int8:streamed"
    runs = {name: summarize(RunDir(write_run(tmp_path / f"{i}", [{}] * (i + 1)).path))
            for i, name in enumerate(["attic, 1 process", label])}  # fmt: skip
    text = written(columns, lambda where: fleet_benches.show(where, kind, runs, runs["attic, 1 process"]))
    assert max(map(len, text.splitlines())) <= columns
    assert re.search(rf"^{re.escape(label)}\s+9.8k  1.00  105 ms", text, re.M)
    assert kind == "fleet" or re.search(r"  1.2500     same$", text, re.M)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_probe_tells_how_fast_a_wire_is_in_any_terminal(columns):
    link = Link(goodput_Bps=117e6, duplex_Bps=112.5e6, parallel_Bps=1.175e8, rtt_s=2e-4, rtt_p95_s=4e-4)
    wires = [
        Wire(source=source, target=target, link=link, goodput_p05_Bps=1e8, mean_Bps=1.1e8, num_pings=30,
             congestion="cubic", iperf3_Bps=1.16e8)
        for source, target in (("attic", "laptop"), ("laptop", "attic"))
    ]  # fmt: skip
    text = written(columns, lambda where: probe_figures.wires(where, wires))
    assert max(map(len, text.splitlines())) <= columns
    assert re.search(r"^attic → laptop  936 Mbit/s .* 900 Mbit/s   200 µs", text, re.M)
    assert ("not shown" in text) == (columns < 120)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_probe_tells_how_fast_a_collective_is_in_any_terminal(columns):
    world = probed.world()
    judged = judge_all([probed.row("all_reduce", 1 << 28, 2.3)], world, 117.5e6)[0]

    def show(where):
        titles = probe_figures.collectives_columns(where)
        where.print(*probe_figures.collectives_title(titles), sep="\n", soft_wrap=True)
        where.print(probe_figures.collectives_row(judged, titles), soft_wrap=True)

    head, units, row = written(columns, show).splitlines()
    assert max(map(len, (head, units, row))) == len(row) <= columns
    assert re.match(r" +268435456 .* 2300000.0 +0.117 +0.117 +0 +0.993( |$)", row)
    told = dict(zip(head[1:].replace("of wire", "of-wire").split(), row.split(), strict=True))
    assert {"size", "time", "busbw", "#wrong", "of-wire"} <= told.keys()
    assert ("rest" in told, "latency" in told) == (columns >= 80, columns >= 120)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_probe_tells_what_a_device_can_do_in_any_terminal(columns):
    rates = Rates(name="AMD EPYC 9654 96-Core Processor", matmul_flops={"fp32": 2.8e10, "bf16": 1.4e11}, copy_Bps=1e10,
                  triad_Bps=1e10, sum_Bps={"fp32": 4e10}, sync_Bps=2e9, loopback_Bps=1e9, memory_bytes=10**11,
                  coding_Bps=dict.fromkeys(("bf16", "int8", "int4", "packed", "powersgd:4", "powersgd:32"), 1e9),
                  models={"char": probed.CHAR})  # fmt: skip
    found = DeviceRates(host="attic", device="cpu", threads=4, model="char", num_params=10**7, rates=rates,
                        sustained=probed.SUSTAINED, findings=[])  # fmt: skip
    roof = Roofline(arithmetic_s=0.1, memory_s=0.01)
    text = written(columns, lambda where: probe_figures.device(where, found, roof))
    assert max(map(len, text.splitlines())) <= columns
    assert re.search("^attic cpu        AMD EPYC 9654 96-Core", text, re.M)
    assert "two ranks here send 1.00 GB/s each" in " ".join(text.split())
    assert "What remains is overhead" in " ".join(text.split())


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_next_step_of_a_finding_can_be_pasted(columns):
    fix = "on attic: sudo sysctl -w net.ipv4.tcp_congestion_control=bbr; or for good: " + "echo it " * 9
    one = Finding(check="link.idle", severity="warning", host="attic", peer="laptop", evidence="slow, " * 20, fix=fix)
    *lines, hint = written(columns, lambda where: tell_findings(where, [one])).splitlines()
    assert lines[0].startswith("warning: link.idle  attic → laptop: slow, slow")
    assert max(map(len, lines)) <= columns
    assert hint == f"hint:  {fix}"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_lab_tells_who_is_dead(monkeypatch, capsys, columns):
    host = {"name": "a", "address": "10.77.0.1", "up_bps": 10**9, "down_bps": None, "policed": True, "mtu": 1500,
            "cpus": 0.5, "cores": [0, 1], "processes": 0, "pid": 12370, "state": "dead"}  # fmt: skip
    up = SimpleNamespace(is_alive=lambda: True, rootless=False, state=SimpleNamespace(fleet_file="/home/me/lab.toml"))
    monkeypatch.setattr(Lab, "find", lambda name: up)
    monkeypatch.setattr(lab, "_describe", lambda lab: {"hosts": {"a": host}})
    monkeypatch.setenv("COLUMNS", str(columns))
    lab.status("lab")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert re.search(r"^a     10.77.0.1  1.0Gbit  unlimited policed .* dead", text, re.M)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_drills_are_listed_whole(columns):
    text = ESCAPE.sub("", in_terminal("lab", "drill", "--list", columns=columns))
    fits(text, in_pipe("lab", "drill", "--list"), columns)
    assert re.search(r"^net.rendezvous-loopback-name +b ↔ a", text, re.M)


# --- colour -----------------------------------------------------------------------------------------------------------

PREPARE = ("data", "verbs", "--sentences", "3000", "--force", "--out")  # draws bars while it works


def test_a_terminal_gets_colour_unless_it_is_not_wanted(tmp_path):
    assert COLOUR.search(in_terminal(*PREPARE, tmp_path))
    for refused in ({"NO_COLOR": "1"}, {"NO_COLOR": "0"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        text = in_terminal(*PREPARE, tmp_path, **refused)
        assert "written" in text
        assert not COLOUR.search(text)
    assert COLOUR.search(in_terminal(*PREPARE, tmp_path, NO_COLOR=""))  # as no-color.org has it


def test_a_dumb_terminal_gets_plain_lines(tmp_path, place):
    for args in ((*PREPARE, tmp_path), ("plan", *WORDS), ("runs",), ("plan", "--help"), ("doctor", "--fleet", "local")):
        text = in_terminal(*args, columns=60, cwd=place, TERM="dumb")
        assert text.strip()
        assert "\x1b" not in text


def test_a_pipe_gets_no_escape_codes(tmp_path, place):
    for args in ((*PREPARE, tmp_path), ("plan", *WORDS), ("plan", *SCALE), ("runs",), ("lab", "drill", "--list"),
                 ("--help",), ("train", "--help"), ("plan", "--nodes", "x")):  # fmt: skip
        text = in_pipe(*args, cwd=place)
        assert text.strip()
        assert "\x1b" not in text


def test_colour_can_be_forced_on_a_pipe():
    assert ESCAPE.search(in_pipe("plan", *WORDS, FORCE_COLOR="1"))
