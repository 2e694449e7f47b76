"""A bench chooses which setups of a fleet to run, and compares their speed and loss."""

from __future__ import annotations

import json
import re

import pytest

from evener.bench.setups import multi_host_setups, single_host_setups, strategy_setups
from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.file_io import write_atomic
from evener.core.model.shape import preset_shape
from evener.core.run.prediction import Job
from evener.core.run.run_spec import RunSpec, parse_args
from evener.core.run.rundir import RunDir, RunResult
from evener.report.pages import compare_setups
from evener.report.pages.compare_setups import SetupComparison
from evener.report.pages.html_report import write_report
from evener.report.pages.png_charts import throughput_png, tradeoff_png
from evener.report.read.run_summary import summarize_run

CHAR = Job(spec=RunSpec(), shape=preset_shape("char", vocab_size=65))
D8 = Job(spec=RunSpec(), shape=preset_shape("d8", vocab_size=32768))


def test_single_host_is_measured_with_one_process_all_cores_and_gpus():
    def shown(cores, gpus, batch=16):
        spec = parse_args(["--batch", str(batch)])
        return [(one.label, one.ranks, one.spec.machine.device) for one in single_host_setups(spec, "a", cores, gpus)]

    assert shown(1, 0) == [("a, 1 process", 1, "cpu")]
    assert shown(4, 1) == [("a, 1 process", 1, "cpu"), ("a, 4 processes", 4, "cpu"), ("a, GPU", None, "cuda")]
    assert shown(64, 0, batch=4)[-1] == ("a, 4 processes", 4, "cpu")  # each has a sequence
    assert shown(64, 8)[1:] == [("a, 8 processes", 8, "cpu"), ("a, 8 GPUs", None, "cuda")]


def test_hosts_are_added_one_at_a_time():
    def shown(hosts, with_gpus=()):
        return [(one.hosts, one.spec.machine.device) for one in multi_host_setups(RunSpec(), hosts, with_gpus)]

    assert shown(["a"]) == []
    assert shown(["b", "a", "c"]) == [(["b", "a"], "auto"), (["b", "a", "c"], "auto")]
    assert shown(["b", "a"], ["a"]) == [(["b", "a"], "auto"), (["b", "a"], "cpu")]


def test_every_strategy_runs_on_all_hosts_against_fastest_single_host():
    first, *others = strategy_setups(CHAR, "b", ["a", "b"], None)
    assert (first.hosts, first.label, first.spec.train.sync) == (["b"], "b alone", CHAR.spec.train.sync)
    assert all(one.hosts == ["a", "b"] and one.spec.train.sync == one.label for one in others)
    assert {"ddp", "packed", "int8", "diloco:30"} <= {one.label for one in others}
    assert not any("sparse" in one.label for one in others)  # char has no table that is only looked up
    assert "int8+sparse" in {one.label for one in strategy_setups(D8, "b", ["a", "b"], None)}
    asked = strategy_setups(CHAR, "b", ["a", "b"], ["int8", "ddp", "int8"])
    assert [one.label for one in asked] == ["b alone", "int8", "ddp"]
    assert len({one.name for one in others}) == len(others)
    for unknown_or_useless in ("int9", "powersgd:9999", "ddp+sparse"):
        with pytest.raises(UsageError, match=re.escape(unknown_or_useless)):
            strategy_setups(CHAR, "b", ["a", "b"], ["ddp", unknown_or_useless])


def result(val_loss):
    return RunResult(steps=20, loss=2.0, val_loss=val_loss, replicas_agree=True, peak_memory_bytes=[1])


@pytest.fixture
def runs(tmp_path, write_run):
    """One process at 100 ms and loss 2; two ranks twice as fast; and a way that is faster still and learns less."""
    ends = {"b alone": (1, 0.1, 2.0), "packed": (2, 0.05, 2.0), "int4": (2, 0.04, 2.1)}
    for label, (num, compute_s, val_loss) in ends.items():
        costs = [{"compute_s": compute_s, "data_s": 0.0, "optimizer_s": 0.0}] * num
        write_run(tmp_path / label.split()[0], costs, result=result(val_loss))
    return {label: summarize_run(RunDir(tmp_path / label.split()[0])) for label in ends}


def test_table_reports_speedup_and_loss_penalty(runs):
    table = {label: cells for label, *cells in compare_setups.setup_rows("strategies", runs, runs["b alone"])}
    assert [len(cells) for cells in table.values()] == [len(compare_setups.COLUMNS["strategies"])] * 3
    speed, penalty = (
        compare_setups.COLUMNS["strategies"].index("×"),
        compare_setups.COLUMNS["strategies"].index("penalty"),
    )
    assert [cells[speed] for cells in table.values()] == ["1.00", "2.00", "2.50"]
    assert [cells[penalty] for cells in table.values()] == ["–", "same", "+5.0%"]
    told = " ".join(compare_setups.explain_setups("strategies", runs, "b alone"))
    assert "The fastest strategy: int4, 2.50 times b alone, validation loss +5.0%." in told
    assert "The fastest whose loss is at most 1% above: packed, 2.00 times b alone, the same validation loss." in told


def test_failed_baseline_yields_no_explanation(runs):
    assert compare_setups.explain_setups("fleet", runs, None) == []
    assert [row[0] for row in compare_setups.setup_rows("fleet", runs, None)] == list(runs)


@pytest.mark.parametrize("kind", ["fleet", "strategies"])
def test_comparison_page_and_plot_are_written(tmp_path, runs, kind):
    names = {label: label.split()[0] for label in runs}
    compare_setups.write_setups(
        tmp_path, SetupComparison(kind=kind, base="b alone", runs=names, failed={"<fsdp>": "b & a"})
    )
    text = write_report(RunDir(tmp_path)).read_text()
    assert all((tmp_path / name / "report.html").exists() for name in names.values())
    assert "&lt;fsdp&gt;: b &amp; a" in text
    assert all(f'href="{name}/report.html"' in text for name in names.values())
    draw = throughput_png if kind == "fleet" else tradeoff_png
    for of_runs in (runs, {}):
        draw(of_runs, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 9, "kind": "fleet", "base": null, "runs": {}}', b"\xff"])
def test_damaged_comparison_file_is_named_in_error(tmp_path, content):
    write_atomic(tmp_path / "compare.json", content)
    with pytest.raises(CheckpointError, match=r"compare\.json"):
        write_report(RunDir(tmp_path))


def test_empty_comparison_still_renders_a_page(tmp_path):
    compare_setups.write_setups(tmp_path, SetupComparison(kind="fleet", base=None, runs={}))
    assert "bench" in write_report(RunDir(tmp_path)).read_text()
    assert json.loads((tmp_path / "compare.json").read_text())["base"] is None
