"""Compare runs: only differing settings, curves over the same tokens, and exports that other tools read."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
from markdown_it import MarkdownIt
from PIL import Image
from typer.testing import CliRunner

from evener.cli.main import app
from evener.core.base.errors import UsageError
from evener.core.model.shape import preset_shape
from evener.core.run.prediction import Cluster, HostRates, Job, Prediction
from evener.core.run.roster import RankSlot
from evener.core.run.run_plan import Plan, write_plan
from evener.core.run.run_spec import RunSpec, TrainSpec
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.report.draw.run_charts import comparison_charts
from evener.report.pages import compare_runs
from evener.report.read.recorded_run import read_recorded_run

from ..sample_runs import BATCH, BLOCK_SIZE, write_run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """One rank; two of twice its speed with another learning rate, which evaluated on the way."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/one", [{}], losses=lambda step: 3.0)
    two = write_run(tmp_path / "runs/two", [{"compute_s": 0.048, "wait_s": 0.001}] * 2, sync_s=0.01,
                    losses=lambda step: 2.0 - step / 100, evaluations={10: 1.5})  # fmt: skip
    manifest = two.manifest()
    spec = msgspec.structs.replace(manifest.spec, train=TrainSpec(steps=20, batch=BATCH, lr=0.01))
    two.write_manifest(msgspec.structs.replace(manifest, spec=spec))
    return tmp_path


def both():
    return compare_runs.compare_runs(["runs/one", "runs/two"])


def report(*args):
    done = CliRunner().invoke(app, ["report", *map(str, args)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_comparison_lists_only_differing_settings(place):
    assert dict(compare_runs.differences(both())) == {
        "--lr": ["0.0003", "0.01"], "sync strategy": ["none", "ddp"], "processes": ["1", "2"],
    }  # fmt: skip


def test_programs_of_ones_own_differ_in_words_and_ranks(place):
    runs = [RunDir(place / "runs" / name).manifest() for name in ("one", "two")]
    for i, run in enumerate(runs):
        runs[i] = msgspec.structs.replace(run, program="train.py", argv=["train.py", str(i)])
    rows = dict(compare_runs.setting_differences(runs))
    assert rows["program"] == ["train.py 0", "train.py 1"]
    assert "--sync" not in rows


def test_batches_of_other_numbers_of_ranks_are_not_compared(place):
    """A rank's part of a step counts as one batch: two ranks may halve it."""
    for name in ("one", "two"):
        manifest = RunDir(place / "runs" / name).manifest()
        manifest = msgspec.structs.replace(manifest, program="train.py", argv=["train.py"], unit="batches",
                                          shape=None)  # fmt: skip
        RunWriter(place / "runs" / name).write_manifest(manifest)
    assert not any("fastest" in sentence for sentence in compare_runs.explain_comparison(both()))
    rows = dict(compare_runs.outcome_rows(both()))
    assert "batches/s" in rows
    assert "  × the first" not in rows


def test_setting_that_changes_no_speed_crowns_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/one", [{"compute_s": 0.1}], steps=20)
    write_run(tmp_path / "runs/two", [{"compute_s": 0.08}], steps=30)
    assert [name for name, _ in compare_runs.differences(both())] == ["--steps"]
    told = compare_runs.explain_comparison(both())[0]
    assert told.startswith("They differ only in --steps: no run is faster beyond noise; ")


def test_run_compared_with_itself_has_no_differences(place):
    same = compare_runs.compare_runs(["runs/one", "runs/one"])
    assert list(same) == ["one", "one (2)"]
    assert compare_runs.differences(same) == []
    assert "Nothing: all have the same settings" in compare_runs.comparison_page(same, "twice")


def test_comparison_curves_end_at_tokens_steps_and_time_trained(place):
    """20 steps of 16 × 64 tokens; 105 ms a step on one rank, 54 on two."""
    one, two = both().values()
    assert (one.summary.tokens_read, two.summary.tokens_read) == (20 * BATCH * BLOCK_SIZE,) * 2
    assert one.curves.train_time_s == pytest.approx(20 * 0.105)
    assert two.curves.train_time_s == pytest.approx(20 * 0.054)
    assert two.val_losses == [(10, 1.5), (20, 1.25)]
    ends = {"tokens": 20 * BATCH * BLOCK_SIZE, "step": 20, "time": pytest.approx(20 * 0.054)}
    for axis, end in ends.items():
        charts = comparison_charts(both(), axis)
        assert [charts[name].lines[-1].x[-1] for name in ("loss", "validation", "speed")] == [end] * 3
    assert comparison_charts(both(), "tokens")["loss"].lines[1].x[0] == BATCH * BLOCK_SIZE


def test_smoothed_loss_curve_starts_at_first_losses(tmp_path):
    """However long it is: runs that began alike are drawn so."""
    for num in (200, 2000):
        run = write_run(tmp_path / str(num), [{}], steps=num, losses=lambda step: 1.5 + 2.7 * 0.97**step)
        chart = comparison_charts({"run": read_recorded_run(run)}, "step")["loss"]
        assert chart.lines[0].y[0] == pytest.approx(4.2, rel=0.05)
    run = write_run(tmp_path / "constant", [{}], steps=9, losses=lambda step: 2.5)
    chart = comparison_charts({"run": read_recorded_run(run)}, "step")["loss"]
    assert chart.lines[0].y == pytest.approx([2.5] * 9)


def test_comparison_table_figures_match_runs(place):
    facts = {name.strip(): values for name, values in compare_runs.outcome_rows(both())}
    assert facts["× the first"] == ["1.00", f"{0.105 / 0.054:.2f}"]
    assert facts["validation loss"] == ["1.2500", "1.2500"]
    assert facts["forward, backward"] == ["100 ms", "48 ms"]
    assert facts["waiting for others"][0] == "–"
    assert "electricity" not in facts  # nobody said what the host takes


def test_energy_and_cost_follow_hours_watts_and_price(place):
    """400 W and 36 an hour, for 20 steps of 0.105 s: 2.1 s."""
    host = HostRates(tokens_per_s={"fp32": 1e4}, watts=400.0, price_per_h=36.0)
    cluster = Cluster(slots=[RankSlot(host="h", device="cpu")], hosts={"h": host})
    job = Job(spec=RunSpec(), shape=preset_shape("tiny", vocab_size=65))
    prediction = Prediction(job=job, cluster=cluster, verdict="", recommended="", chosen="", options=[])
    write_plan(RunDir("runs/one"), Plan(kind="train", spec=RunSpec(), prediction=prediction))
    facts = dict(compare_runs.outcome_rows(both()))
    assert facts["electricity"] == [f"{400 * 2.1 / 3.6e6:.3g} kWh", "not known"]
    assert facts["price"] == [f"{36 * 2.1 / 3600:.2f}", "not known"]


def test_comparison_page_is_self_contained_and_well_formed(place):
    """It names nothing that would have to be fetched, and every tag that it opens it closes."""
    assert report("runs/one", "runs/two").strip() == "comparison.html"
    text = (place / "comparison.html").read_text()
    assert len(text) < 1_000_000
    assert not re.search(r'src=|href=(?!"#section-)|url\(|@import|https?:', text)
    opened, void = [], {"meta", "path", "link", "br"}

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            opened.append(tag) if tag not in void else None

        def handle_endtag(self, tag):
            if tag not in void:
                assert opened.pop() == tag

    Reader().feed(text)
    assert opened == []
    assert "two trains fastest" in text


def test_text_report_is_a_valid_markdown_table(place):
    rendered = MarkdownIt("gfm-like", {"linkify": False}).render(report("runs/one", "runs/two", "--format", "md"))
    head, *rows = re.findall(r"<tr>\n(.*?)</tr>", rendered, re.S)
    cells = [re.findall(r"<td.*?>(.*?)</td>", row) for row in rows]
    assert re.findall(r"<th.*?>(.*?)</th>", head) == ["", "one", "two"]
    assert ["--lr", "0.0003", "0.01"] in cells
    assert ["validation loss", "1.2500", "1.2500"] in cells
    assert {len(row) for row in cells} == {3}


def test_many_runs_are_shown_as_rows(place):
    for i in range(8):
        write_run(place / f"runs/sweep-{i}", [{}], steps=4)
    rows = report(*(f"runs/sweep-{i}" for i in range(8)), "--format", "md").strip().splitlines()
    assert len([row for row in rows if row.startswith("| sweep-")]) == 8


def test_single_run_is_reported_as_markdown_and_png(place):
    text = report("runs/two", "--format", "md")
    assert "| loss | 1.8100 |" in text
    for args, path in ((["runs/two"], "runs/two/report.png"), (["runs/one", "runs/two"], "comparison.png")):
        assert report(*args, "--format", "png").strip() == path
        with Image.open(place / path) as picture:
            picture.load()
            assert picture.width == 1350
            assert len(picture.getcolors(1 << 20)) > 50  # there is something on it


def test_comparison_as_json_has_typed_settings(place):
    told = json.loads(report("runs/one", "runs/two", "--json"))
    assert list(told["runs"]) == ["one", "two"]
    assert {"name": "--lr", "values": {"one": 0.0003, "two": 0.01}} not in told["differences"]  # as it is typed
    assert {"name": "--lr", "values": {"one": "0.0003", "two": "0.01"}} in told["differences"]
    assert report("runs/one", "--json") == report("runs/one", "--format", "json")


def test_run_without_steps_can_be_compared(place):
    write_run(place / "runs/none", [{}], steps=0, verdict="failed")
    assert "| state | finished | failed |" in report("runs/one", "runs/none", "--format", "md")
    for kind in ("html", "png"):
        report("runs/one", "runs/none", "--format", kind)
        report("runs/none", "--format", kind)


def test_unknown_report_format_is_refused(place):
    with pytest.raises(UsageError, match="--format pdf: expected html, md, json, png"):
        CliRunner().invoke(app, ["report", "runs/one", "--format", "pdf"], catch_exceptions=False)
