"""The HTML report needs no network, draws the recorded values, and escapes all names and texts."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import msgspec
import pytest
from jinja2 import UndefinedError

from evener.cli.report import report
from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.file_io import write_atomic
from evener.core.cluster.host_vitals import Vitals
from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import PHASES, StepCost
from evener.report.draw import run_charts
from evener.report.draw.svg_charts import ChartLine, LineChart, render_svg, y_bounds
from evener.report.pages import bench_report
from evener.report.pages.html_report import run_page, write_report
from evener.report.pages.html_template import render_document
from evener.report.pages.png_charts import scaling_png
from evener.report.read.event_log import describe_event, first_failure
from evener.report.read.recorded_run import read_recorded_run
from evener.report.read.run_summary import summarize_run

from ..tiers import exhaustively, num_examples

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = "<script>alert(1)</script>\"'&"
HOSTILE_NAME = "<script>alert(1)<img src=x onerror=alert(2)>\"'& {{ 7 * 7 }}"  # of a folder: no slash
HALF = {"data_s": 0.0005, "compute_s": 0.05, "optimizer_s": 0.002, "exposed_sync_s": 0.004}


class Page(HTMLParser):
    """Text by place, and every complaint that a browser would keep to itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.scripts, self.links, self.lines, self.open = "", [], [], [], []
        self.feed(text)
        self.close()
        self.text = " ".join(self.text.split())
        assert self.open == [], "unclosed"

    def handle_starttag(self, tag, attrs):
        assert all(not name.startswith("on") for name, _ in attrs), "an event handler"
        links = [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        self.links += [link for link in links if not re.fullmatch(r"#section-\d+", link or "")]
        self.lines += [value for name, value in attrs if name == "data-name"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.text += data + " "


def page_of(rundir: RunDir) -> Page:
    path = write_report(rundir)
    assert path == rundir.path / "report.html"
    return Page(path.read_text())


@pytest.fixture
def run(tmp_path, write_run):
    def make(costs=(HALF, HALF), name="run", **other):
        given = {"cpus": [0.99] * len(costs), "sync_s": 0.02, "evaluations": {10: 2.0, 20: 1.25}} | other
        return write_run(tmp_path / name, list(costs), **given)

    return make


def test_page_is_self_contained(run):
    path = write_report(run())
    page = Page(path.read_text())
    assert page.links == []
    head = path.read_text().partition("</head>")[0]
    assert "default-src 'none'" in head
    assert "url(" not in head
    assert "@import" not in head
    assert len(page.scripts) == 1


def test_every_chart_is_drawn(run):
    lines = page_of(run()).lines
    of_step = ["input", "update", "waiting for others", "exposed communication", "forward, backward"]  # the top first
    assert lines == ["each step", "training, smoothed", "validation", "each step", "smoothed",
                     "gradient norm, before clipping", "learning rate", *3 * of_step,
                     "in flight", "exposed"]  # fmt: skip


def loss_chart(x, y):
    """A line and a dot at step 6."""
    return LineChart([ChartLine("training", "blue", x, y), ChartLine("validation", "red", [6], [3.0])], "step", "loss")


def test_chart_points_match_axis_coordinates():
    """Losses 4 and 2 after steps 1 and 11, and a validation loss of 3 in the middle of both."""
    text = str(render_svg(loss_chart([1, 11], [4.0, 2.0])))
    low, high = (float(bound) for bound in re.search(r'data-range="1 11 ([\d.]+) ([\d.]+)"', text).groups())
    assert low < 2.0 < 4.0 < high
    paths = re.findall(r'class="line" stroke="[^"]+" d="M([\d L]+)"', text)
    (first, last), (middle,) = ([tuple(map(int, point.split())) for point in path.split("L")] for path in paths)
    assert (first[0], last[0]) == (0, 10_000)
    assert middle == (5000, 5000)
    assert first[1] == pytest.approx(10_000 * (high - 4.0) / (high - low), abs=2)


def test_huge_values_are_clamped_to_chart_edge():
    """Twice the largest of float64 is none any more, and a difference of two of them is needed for each place."""
    text = str(render_svg(loss_chart([1, 6, 11], [1.7e308, 4.0, -1.7e308])))
    assert 'd="M0 0L5000 5000L10000 10000"' in text


def test_values_beside_a_line_are_those_recorded_not_those_drawn():
    """Of a spike the path ends at the edge, and of a stack it is the sum."""
    text = str(render_svg(loss_chart([1, 1_234_567], [4.0, 1e9])))
    assert 'data-name="training" data-xs="1 1234567" data-ys="4 1e+09"' in text
    lines = [ChartLine("a", "red", [1, 2], [3.0, 4.0]), ChartLine("b", "blue", [2, 3], [10.0, 20.0])]
    text = str(render_svg(LineChart(lines, "step", "ms", stacked=True)))
    values = re.findall(r'data-name="(.)" data-xs="([\d ]+)" data-ys="([\d ]+)"', text)
    assert values == [("b", "1 2 3", "0 10 20"), ("a", "1 2 3", "3 4 0")]


def test_spike_of_two_steps_goes_beyond_the_edge():
    losses = [4.0, 3.5, 3.2, 3.0, 90.0, 70.0, 2.8, 2.7, 2.6, 2.5]
    assert y_bounds(loss_chart(range(1, 11), losses))[1] < 5
    assert y_bounds(loss_chart(range(1, 11), [4.0, 3.0, *[90.0] * 8]))[1] > 90  # it diverged


def test_stacked_parts_sum_to_step_time(run):
    rundir = run()
    chart = run_charts.breakdown_areas(read_recorded_run(rundir)).charts["rank 0"]
    assert sum(line.y[0] for line in chart.lines) == pytest.approx(1e3 * summarize_run(rundir).step_p50_s)


def test_the_verdict_comes_first(run):
    text = page_of(run()).text
    assert text.index("2 processes on h trained 18.1k tokens/s") < text.index("finished")
    order = ["finished", "20 steps in 1 min 00 s", "to the bit", "Loss", "Where each step’s time goes",
             "All-reduce", "What happened, and why", "Events", "Manifest"]  # fmt: skip
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)


@pytest.mark.parametrize("verdict", ["failed", "stopped", "finished", "running", HOSTILE])
def test_hostile_names_are_escaped(run, verdict):
    rundir = run(corpus=HOSTILE, device=HOSTILE, name=HOSTILE_NAME, verdict=verdict)
    rundir.add_event("failure", rank=1, error=HOSTILE, kind="exit", hint=HOSTILE)
    rundir.add_event(HOSTILE, what=HOSTILE)
    page = page_of(rundir)
    assert len(page.scripts) == 1
    assert page.links == []
    assert page.text.startswith(f"{HOSTILE_NAME}: evener training run {HOSTILE_NAME}")
    assert page.text.count(f"rank 1: {HOSTILE}") == {"failed": 3, "finished": 1}.get(verdict, 2)


def test_hostile_name_in_chart_is_escaped(tmp_path, run):
    run(name=HOSTILE_NAME)
    write_atomic(tmp_path / "bench.json", json.dumps({"format": 1, "series": {HOSTILE: [HOSTILE_NAME]}}).encode())
    page = page_of(RunDir(tmp_path))
    assert page.lines[0] == HOSTILE
    assert HOSTILE in page.text
    assert len(page.scripts) == 1
    assert [unquote(link) for link in page.links] == [f"{HOSTILE_NAME}/report.html"]


def test_undefined_template_name_raises_error():
    with pytest.raises(UndefinedError, match="is undefined"):
        render_document("run.html", title="x", figures={})


def test_single_rank_page_omits_communication(run):
    page = page_of(run([{}]))
    assert "in flight" not in page.lines
    assert page.lines.count("forward, backward") == 1
    assert "nothing to compare" in page.text


def test_page_without_steps_renders(run):
    page = page_of(run(steps=0, verdict="failed", evaluations={}))
    assert page.lines == []
    assert "after 0 steps, and no rank reported why" in page.text
    assert "No step was recorded" in page.text
    assert page.text.count("not measured") >= 5


def test_first_failure_is_shown_first(run):
    rundir = run(verdict="failed", evaluations={})
    rundir.add_event("failure", rank=0, error="of an earlier start", kind="RuntimeError", hint="")
    rundir.add_event("start", step=10, ranks=2)
    rundir.add_event("run.peer-exit", rank=0, error="Connection closed by peer", kind="RuntimeError", hint="")
    rundir.add_event("failure", rank=1, error="killed by SIGKILL", kind="exit", hint="evener train --resume x")
    rundir.add_event("failure", rank=0, error="something that followed", kind="RuntimeError", hint="")
    text = page_of(rundir).text
    assert "after 20 steps: rank 1: killed by SIGKILL." in text
    assert "The first failure: rank 1: killed by SIGKILL evener train --resume x" in text


def test_run_without_new_records_is_shown_as_unresponsive(run):
    rundir = run(verdict="running", evaluations={})
    last = rundir.records(0)[-1].ended
    speaking, silent = Page(run_page(rundir, now=last + 5)), Page(run_page(rundir, now=last + 3600))
    assert "running 20 steps of 20 done" in speaking.text
    assert "unresponsive for 1 h 00 min, 20 steps done. Its processes hang or are gone" in silent.text


def test_stopped_run_shows_resume_command(run):
    assert "evener train --resume" in page_of(run(verdict="stopped")).text


def test_diverged_replicas_are_reported(run):
    rundir = run(verdict="failed")
    rundir.add_event("run.diverged", step=20, differences=[{"rank": 1, "tensor": "head.weight"}])
    text = page_of(rundir).text
    assert "differ" in text
    assert "head.weight" in text


def test_recovered_divergence_is_not_a_failure(run):
    rundir = run()
    before = page_of(rundir).text.count("differ")
    rundir.add_event("run.diverged", step=20, differences=[{"rank": 1, "tensor": "head.weight"}] * 3, odd=["b"],
                     leaves=["b"], goes_back=True, hint="test its memory")  # fmt: skip
    rundir.add_event("run.nonfinite", step=7, ranks=[1], goes_back=True)
    assert first_failure(rundir.events()) is None
    told = [describe_event(event, rundir.manifest()) for event in rundir.events()[-2:]]
    assert told[0].description.endswith(
        " in head.weight and 2 more tensors; b is the odd one; all roll back to the newest "
        "checkpoint, and b leaves the run"
    )
    assert told[1].description.endswith("; all roll back to the newest checkpoint")
    assert not any(one.is_bad for one in told)
    assert page_of(rundir).text.count("differ") == before + 1  # the event, and no verdict


def test_recovered_out_of_memory_is_not_a_failure(run):
    rundir = run()
    rundir.add_event("start", step=10, ranks=2)
    rundir.add_event("run.oom", rank=1, error="it ran out of memory: from here on it takes half as many")
    assert first_failure(rundir.events()) is None
    assert not describe_event(rundir.events()[-1], rundir.manifest()).is_bad
    rundir.add_event("failure", rank=0, error="killed by SIGKILL", kind="exit", hint="")
    assert first_failure(rundir.events()) == rundir.events()[-1]


def test_unmeasured_values_are_reported(run):
    unknown = dict.fromkeys(("data_s", "exposed_sync_s", "wait_s", "optimizer_s"))
    nothing = {"cpus": None, "sync_s": None, "losses": lambda step: None, "evaluations": {}}
    page = page_of(run([unknown] * 2, verdict="failed", **nothing))
    assert "Not measured: exposed communication, waiting for others, update, input." in page.text
    of_step = {"each step", "smoothed", "gradient norm, before clipping", "learning rate", "forward, backward"}
    assert set(page.lines) == of_step
    assert "Loss and speed It was not measured." in page.text


def test_host_vitals_show_mean_and_maximum(run):
    """In the mean and at most; the page lacks it where what a host told is damaged."""
    rundir = run()
    path = rundir.vitals_path(rundir.manifest().roster.hosts[0])
    told = [Vitals(time=float(i), busy=busy, memory_bytes=10**9 * i, memory_total_bytes=10**10, temperature_C=heat)
            for i, (busy, heat) in enumerate(((0.2, 71.0), (0.4, 83.4)), 1)]  # fmt: skip
    path.parent.mkdir()
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in told))
    text = page_of(rundir).text
    assert "Vitals of the hosts" in text
    assert all(word in text for word in ("30%", "2.0 GB of 10.0 GB", "83 °C"))
    path.write_bytes(bytes(100) + b"\n")
    assert "Vitals of the hosts" not in page_of(rundir).text


def test_long_run_is_downsampled(run):
    page = page_of(run(steps=3000))
    assert "Each point stands for 8 steps" in page.text
    assert all(
        len(run_charts.downsample([(step, 1.0) for step in range(num)])[0]) <= 500 for num in (499, 501, 3000, 99_999)
    )


@pytest.mark.parametrize("ranks", [*exhaustively(4), 16])
def test_page_size_is_bounded(run, write_run, tmp_path, ranks):
    """10,000 steps on 4 ranks or 2,500 on 16, fewer in the fast tiers; no value is like another."""
    draw = random.Random(0)
    steps = num_examples(16_000, 40_000) // ranks
    rundir = write_run(tmp_path / "long", [HALF] * ranks, steps=steps, sync_s=0.02,
                       losses=lambda step: draw.uniform(1, 4))  # fmt: skip
    for rank in range(ranks):
        records = [
            msgspec.structs.replace(record, lr=draw.random(), grad_norm=draw.random(), wall_s=draw.random(),
                                    cost=StepCost(**{part: draw.random() for part in PHASES}))
            for record in rundir.records(rank)
        ]  # fmt: skip
        write_atomic(rundir.steps_path(rank), b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    assert write_report(rundir).stat().st_size < 500_000


def test_damaged_and_unknown_events_are_tolerated(run):
    rundir = run(evaluations={})
    for facts in ({"step": "x", "val_loss": "y"}, {"step": 3, "val_loss": None}, {}):
        rundir.add_event("evaluation", **facts)
    rundir.add_event("start", ranks="many")
    rundir.add_event("run.nonfinite", ranks=None)
    rundir.add_event("rebalanced", step=20, shares=[3, 1], why="b takes 2.0 times as long as before")
    assert "step 21: shares 3 : 1: b takes 2.0 times as long as before" in page_of(rundir).text


def test_bench_page_renders(tmp_path, run, write_run):
    run([{}], name="verbs-1")
    run(name="verbs-2")
    write_run(tmp_path / "verbs-4", [{}] * 4, steps=0, verdict="failed")
    series = {"format": 1, "series": {"verbs": ["verbs-1", "verbs-2", "verbs-4"]}}
    write_atomic(tmp_path / "bench.json", json.dumps(series).encode())
    page = page_of(RunDir(tmp_path))
    assert page.links == ["verbs-1/report.html", "verbs-2/report.html", "verbs-4/report.html"]
    assert all((tmp_path / link).is_file() for link in page.links)
    assert page.lines == ["verbs", "verbs, nothing lost"]
    measured, ideal = run_charts.scaling_chart(bench_report.summarize_bench(tmp_path)).lines
    assert measured.x == [1, 2]
    assert ideal.y[1] == pytest.approx(2 * measured.y[0])
    assert (tmp_path / "report.html").stat().st_size < 100_000
    assert "best on verbs 2 processes 18.1k tokens/s, 1 process 0.54 times" in page.text
    assert "The run with 4 processes recorded no step (failed)" in page.text


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"format": 2, "series": {}}', b'{"format": 1, "series": [1]}', b"\xff"]
)
def test_damaged_bench_file_is_named_in_error(tmp_path, content):
    write_atomic(tmp_path / "bench.json", content)
    with pytest.raises(CheckpointError, match=r"bench\.json"):
        write_report(RunDir(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_scaling_plot_is_written(tmp_path, run):
    runs = [summarize_run(run([{}], name="1")), summarize_run(run(name="2"))]
    for name, series in (("two.png", {"verbs": runs, "python": runs[:1]}), ("empty.png", {"verbs": []})):
        scaling_png(series, tmp_path / name)
        width, height = (int.from_bytes((tmp_path / name).read_bytes()[at : at + 4]) for at in (16, 20))
        assert (width, height) == (1200, 750)


def test_report_writes_page_and_prints_path(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    rundir = run()
    assert report([str(rundir)], kind="html", out=None, log=None, as_json=False) == 0
    told = capsys.readouterr()
    assert told.out == f"{rundir}/report.html\n"
    assert told.err.startswith("2 processes on h trained 18.1k tokens/s")
    assert max(map(len, told.err.splitlines())) <= 100


def test_report_json_has_path_and_figures(tmp_path, run, capsys):
    rundir = run(name="verbs-2")
    report([str(rundir)], kind="html", out=None, log=None, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == f"{rundir}/report.html"
    assert found["replicas_agree"] is True
    assert len(found["explanation"]) == 7
    write_atomic(tmp_path / "bench.json", json.dumps({"format": 1, "series": {"verbs": ["verbs-2"]}}).encode())
    report([str(tmp_path)], kind="html", out=None, log=None, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["series"]["verbs"][0]["run_dir"] == str(rundir)
    assert found["explanation"][0].startswith("verbs: ")


def test_non_run_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a run directory"):
        report([str(tmp_path)], kind="html", out=None, log=None, as_json=False)
    assert list(tmp_path.iterdir()) == []
