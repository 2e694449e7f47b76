"""The page opens offline, stands on its own, and lets nothing in the data speak as markup."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from jinja2 import UndefinedError

from evener.cli.report import report
from evener.core.errors import CheckpointError, UsageError
from evener.core.files import write_atomic
from evener.core.rundir import RunDir
from evener.report.markup import document
from evener.report.page import run_page, write_page
from evener.report.picture import scaling_png
from evener.report.summary import summarize

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = "<script>alert(1)</script>\"'&"
HOSTILE_NAME = "<script>alert(1)<img src=x onerror=alert(2)>\"'& {{ 7 * 7 }}"  # of a folder: no slash
HALF = {"data_s": 0.0005, "compute_s": 0.05, "optimizer_s": 0.002, "exposed_sync_s": 0.004}


class Page(HTMLParser):
    """Text by place, and every complaint that a browser would keep to itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.scripts, self.links, self.ids, self.open = "", [], [], [], []
        self.feed(text)
        self.close()
        self.text = " ".join(self.text.split())
        assert self.open == [], "unclosed"

    def handle_starttag(self, tag, attrs):
        assert all(not name.startswith("on") for name, _ in attrs), "an event handler"
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        self.ids += [value for name, value in attrs if name == "id"]
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

    @property
    def figures(self):
        return json.loads(self.scripts[0])


def page_of(rundir: RunDir) -> Page:
    path = write_page(rundir)
    assert path == rundir.path / "report.html"
    page = Page(path.read_text())
    assert set(page.figures) <= set(page.ids), "a figure without a place stops the script"
    return page


@pytest.fixture
def run(tmp_path, write_run):
    def make(costs=(HALF, HALF), name="run", **other):
        given = {"cpus": [0.99] * len(costs), "sync_s": 0.02, "evaluations": {10: 2.0, 20: 1.25}} | other
        return write_run(tmp_path / name, list(costs), **given)

    return make


def test_the_page_needs_nothing_but_itself(run):
    path = write_page(run())
    page = Page(path.read_text())
    assert page.links == []
    head = path.read_text().partition("</head>")[0]
    assert "default-src 'none'" in head
    assert "url(" not in head
    assert "@import" not in head
    assert len(page.scripts) == 3
    assert page.scripts[1].lstrip().startswith("/**\n* plotly.js")


def test_every_figure_has_its_place(run):
    page = page_of(run())
    assert set(page.figures) == {"loss", "parts", "areas", "sync"}
    validation = page.figures["loss"]["data"][1]
    assert (validation["x"], validation["y"]) == ([10, 20], [2.0, 1.25])
    parts = {trace["name"]: trace["x"] for trace in page.figures["parts"]["data"]}
    assert parts["forward, backward"] == [50.0, 50.0]
    assert {trace["meta"] for trace in page.figures["areas"]["data"]} == {"mean of all ranks", "rank 0", "rank 1"}


def test_the_verdict_comes_first(run):
    text = page_of(run()).text
    order = ["finished", "20 steps in 1 min 00 s", "tokens/s", "agree", "Loss", "Where each step’s time goes",
             "All-reduce", "What happened, and why", "Events", "Manifest"]  # fmt: skip
    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)


@pytest.mark.parametrize("verdict", ["failed", "stopped", "finished", "running", HOSTILE])
def test_hostile_names_are_text(run, verdict):
    rundir = run(corpus=HOSTILE, device=HOSTILE, name=HOSTILE_NAME, verdict=verdict)
    rundir.add_event("failure", rank=1, error=HOSTILE, kind="exit", hint=HOSTILE)
    rundir.add_event(HOSTILE, what=HOSTILE)
    page = page_of(rundir)
    assert len(page.scripts) == 3
    assert page.links == []
    assert page.text.startswith(f"{HOSTILE_NAME}: evener training run {HOSTILE_NAME}")
    assert page.text.count(f"rank 1: {HOSTILE}") == {"failed": 3, "finished": 1}.get(verdict, 2)


def test_a_hostile_name_in_a_figure_stays_in_it(tmp_path, run):
    run(name=HOSTILE_NAME)
    write_atomic(tmp_path / "bench.json", json.dumps({"format": 1, "series": {HOSTILE: [HOSTILE_NAME]}}).encode())
    page = page_of(RunDir(tmp_path))
    assert page.figures["scaling"]["data"][0]["name"] == HOSTILE
    assert HOSTILE in page.text
    assert len(page.scripts) == 3
    assert [unquote(link) for link in page.links] == [f"{HOSTILE_NAME}/report.html"]


def test_a_name_that_a_template_lacks_is_an_error_and_no_empty_place():
    with pytest.raises(UndefinedError, match="is undefined"):
        document("run.html", title="x", figures={})


def test_one_rank(run):
    page = page_of(run([{}]))
    assert set(page.figures) == {"loss", "parts", "areas"}
    assert {trace["meta"] for trace in page.figures["areas"]["data"]} == {"rank 0"}
    assert "nothing to compare" in page.text


def test_no_steps(run):
    page = page_of(run(steps=0, verdict="failed", evaluations={}))
    assert page.figures == {}
    assert "after 0 steps, and no rank could say why" in page.text
    assert "No step was recorded" in page.text
    assert page.text.count("not measured") >= 5


def test_the_first_failure_is_told_first(run):
    rundir = run(verdict="failed", evaluations={})
    rundir.add_event("failure", rank=0, error="of an earlier start", kind="RuntimeError", hint="")
    rundir.add_event("start", step=10, ranks=2)
    rundir.add_event("run.peer-exit", rank=0, error="Connection closed by peer", kind="RuntimeError", hint="")
    rundir.add_event("failure", rank=1, error="killed by SIGKILL", kind="exit", hint="evener train --resume x")
    rundir.add_event("failure", rank=0, error="something that followed", kind="RuntimeError", hint="")
    text = page_of(rundir).text
    assert "after 20 steps: rank 1: killed by SIGKILL." in text
    assert "The first failure: rank 1: killed by SIGKILL evener train --resume x" in text


def test_a_run_that_says_nothing_is_not_called_running(run):
    rundir = run(verdict="running", evaluations={})
    last = rundir.records(0)[-1].ended
    speaking, silent = Page(run_page(rundir, now=last + 5)), Page(run_page(rundir, now=last + 3600))
    assert "running 20 steps of 20 done" in speaking.text
    assert "no word for 1 h 00 min, 20 steps done. Its processes hang or are gone" in silent.text


def test_a_stopped_run_says_how_to_go_on(run):
    assert "evener train --resume" in page_of(run(verdict="stopped")).text


def test_replicas_that_differ(run):
    rundir = run(verdict="failed")
    rundir.add_event("run.diverged", step=20, differences=[{"rank": 1, "tensor": "head.weight"}])
    text = page_of(rundir).text
    assert "differ" in text
    assert "head.weight" in text


def test_what_was_not_measured_is_said(run):
    unknown = dict.fromkeys(("data_s", "exposed_sync_s", "wait_s", "optimizer_s"))
    page = page_of(run([unknown] * 2, cpus=None, sync_s=None, losses=lambda step: None, evaluations={}))
    assert "Not measured: exposed communication, waiting for others, update, input." in page.text
    assert [trace["name"] for trace in page.figures["parts"]["data"]] == ["forward, backward"]
    assert "Loss It was not measured." in page.text


def test_a_long_run_is_thinned(run):
    page = page_of(run(steps=3000))
    assert max(len(trace["x"]) for trace in page.figures["areas"]["data"]) == 750
    assert "Each point of a line is the mean of 4 steps." in page.text


def test_damaged_events_and_unknown_ones(run):
    rundir = run(evaluations={})
    for facts in ({"step": "x", "val_loss": "y"}, {"step": 3, "val_loss": None}, {}):
        rundir.add_event("evaluation", **facts)
    rundir.add_event("start", ranks="many")
    rundir.add_event("run.nonfinite", ranks=None)
    rundir.add_event("rebalanced", step=20, shares=[3, 1], why="b takes 2.0 times as long as before")
    assert "step 20: shares 3 : 1: b takes 2.0 times as long as before" in page_of(rundir).text


def test_a_bench(tmp_path, run, write_run):
    run([{}], name="verbs-1")
    run(name="verbs-2")
    write_run(tmp_path / "verbs-4", [{}] * 4, steps=0, verdict="failed")
    series = {"format": 1, "series": {"verbs": ["verbs-1", "verbs-2", "verbs-4"]}}
    write_atomic(tmp_path / "bench.json", json.dumps(series).encode())
    page = page_of(RunDir(tmp_path))
    assert page.links == ["verbs-1/report.html", "verbs-2/report.html", "verbs-4/report.html"]
    assert all((tmp_path / link).is_file() for link in page.links)
    assert set(page.figures) == {"scaling", "parts-0"}
    measured, ideal = page.figures["scaling"]["data"]
    assert measured["x"] == [1, 2]
    assert ideal["y"][1] == pytest.approx(2 * measured["y"][0], rel=1e-4)
    assert "best on verbs 2 processes 18.1k tokens/s, 1 process 0.54 times" in page.text
    assert "The run with 4 processes recorded no step (failed)" in page.text


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"format": 2, "series": {}}', b'{"format": 1, "series": [1]}', b"\xff"]
)
def test_a_damaged_bench_is_refused_by_name(tmp_path, content):
    write_atomic(tmp_path / "bench.json", content)
    with pytest.raises(CheckpointError, match=r"bench\.json"):
        write_page(RunDir(tmp_path))
    assert not (tmp_path / "report.html").exists()


def test_the_picture(tmp_path, run):
    runs = [summarize(run([{}], name="1")), summarize(run(name="2"))]
    for name, series in (("two.png", {"verbs": runs, "python": runs[:1]}), ("empty.png", {"verbs": []})):
        scaling_png(series, tmp_path / name)
        width, height = (int.from_bytes((tmp_path / name).read_bytes()[at : at + 4]) for at in (16, 20))
        assert (width, height) == (1200, 750)


def test_the_verb_writes_the_page_and_tells_its_path(run, capsys):
    rundir = run()
    assert report(str(rundir), as_json=False) == 0
    told = capsys.readouterr()
    assert told.out == f"{rundir}/report.html\n"
    assert told.err.startswith("A step trains on 1,024 tokens")
    assert max(map(len, told.err.splitlines())) <= 100


def test_the_verb_as_json(tmp_path, run, capsys):
    rundir = run(name="verbs-2")
    report(str(rundir), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == f"{rundir}/report.html"
    assert found["replicas_agree"] is True
    assert len(found["explanation"]) == 5
    write_atomic(tmp_path / "bench.json", json.dumps({"format": 1, "series": {"verbs": ["verbs-2"]}}).encode())
    report(str(tmp_path), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["series"]["verbs"][0]["run_dir"] == str(rundir)
    assert found["explanation"][0].startswith("verbs: ")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a run directory"):
        report(str(tmp_path), as_json=False)
    assert list(tmp_path.iterdir()) == []
