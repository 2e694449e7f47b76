"""Page, terminal, JSON and tables show the same figures for the same run.

The records are real: tiny on tiny Shakespeare, two emulated hosts of a core each over 100 Mbit/s, shares 3:1 (2026-11).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evener.cli.plan import COST_OPTIONS, MACHINE_OPTIONS, SIMULATION_OPTIONS, SOURCE_OPTIONS, plan
from evener.cli.report import report
from evener.core.base.file_io import write_atomic
from evener.core.base.units import format_bytes, format_count, format_seconds
from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import PHASE_NAMES, PHASES
from evener.report.explain.explain_run import PHASE_DESCRIPTIONS as IN_WORDS
from evener.report.explain.run_tables import bench_rows
from evener.report.pages import bench_report, compare_setups
from evener.report.pages.compare_setups import SetupComparison
from evener.report.pages.html_report import write_report
from evener.report.read.run_summary import summarize_run

RECORDS = Path(__file__).parent / "records" / "two-hosts"


class Text(HTMLParser):
    """What a page says, and the rows of its tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.said, self.rows, self._skips, self._in_cell = "", [], False, False
        self.feed(html)
        self.said = " ".join(self.said.split())

    def handle_starttag(self, tag, attrs):
        self._skips = tag in ("style", "script")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data):
        if not self._skips:
            self.said += data + " "
            if self._in_cell:
                self.rows[-1][-1] = (self.rows[-1][-1] + data).strip()

    def row(self, *begins: str) -> list[str]:
        """The cells of the only table's row that begins so."""
        found = {tuple(row) for row in self.rows if tuple(row[: len(begins)]) == begins}
        assert len(found) == 1, f"{begins}: {found}"
        return list(found.pop())


@pytest.fixture
def told(tmp_path, capsys, monkeypatch):
    """Of one run: its page, what the terminal says, its JSON, and the planner's answer to its records."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RECORDS, "run")
    report(["run"], kind="html", out=None, log=None, as_json=False)
    terminal = " ".join(capsys.readouterr().err.split())
    report(["run"], kind="html", out=None, log=None, as_json=True)
    found = json.loads(capsys.readouterr().out)
    asked = dict.fromkeys((*SOURCE_OPTIONS, *MACHINE_OPTIONS, *COST_OPTIONS, *SIMULATION_OPTIONS))
    plan(None, True, False, None, asked | {"source_run": "run", "strong": False})
    answer = json.loads(capsys.readouterr().out)
    page = Text(Path("run/report.html").read_text())
    return page, terminal, found, {option["name"]: option for option in answer["options"]}, answer


def only(pattern: str, *texts: str) -> set[str]:
    """Whatever stands where the pattern has its group, in all the texts together."""
    found = {figure for text in texts for figure in re.findall(pattern, text)}
    assert found, f"nobody says {pattern}"
    return found


def test_throughput_is_equal_in_page_terminal_and_json(told):
    page, terminal, found, options, answer = told
    own = options["ddp, shares 12 : 4"]
    assert answer["chosen"] == own["name"]
    assert own["tokens_per_s"] == found["tokens_per_s"]
    assert own["step_s"] == found["step_p50_s"]
    rate, step = format_count(found["tokens_per_s"]), format_seconds(found["step_p50_s"])
    assert only(r"a and b trained (\S+) tokens/s", page.said, terminal) == {rate}
    assert only(r"takes (\S+ m?s) \(p50", page.said, terminal) == {step}
    assert only(r"p95 (\S+ m?s)\)", page.said, terminal) == {format_seconds(found["step_p95_s"])}
    assert page.row("this run: ddp, shares 12 : 4")[1:3] == [step, rate]
    assert page.row("step")[2] == step
    assert page.row("tokens/s")[2] == rate


def test_step_parts_are_equal_in_page_terminal_and_json(told):
    page, terminal, found, options, _ = told
    for rank, name in enumerate("ab"):
        cost = found["ranks"][rank]["cost"]
        assert cost == options["ddp, shares 12 : 4"]["ranks"][rank]["cost"]
        assert sum(cost.values()) == pytest.approx(found["step_p50_s"])
        cells = [format_seconds(cost[part]) for part in PHASE_NAMES]
        assert page.row(name, cells[0])[1:] == [*cells, format_seconds(found["step_p50_s"])]
        of_rank = rf"[Oo]n {name}, the (?:slowest|fastest): ([^:]*?)\."
        for said in only(of_rank + r" ", page.said + " ", terminal + " "):
            shown = dict(re.findall(r"(\S+ m?s) (\D+?) \(\d+%\)", said))
            assert shown
            for figure, words in shown.items():
                part = next(part for part in PHASES if IN_WORDS[part] == words)
                assert figure == format_seconds(cost[part])
                share = only(rf"{re.escape(figure)} {words} \((\d+)%\)", said)
                assert share == {f"{100 * cost[part] / found['step_p50_s']:.0f}"}
    assert only(r"b waits (\d+)% of each step", page.said) == {
        f"{100 * found['ranks'][1]['cost']['wait_s'] / found['step_p50_s']:.0f}"
    }
    waits = [format_seconds(rank["cost"]["wait_s"]) for rank in found["ranks"]]
    assert only(r"waits least, (\S+ m?s)", page.said, terminal) == {waits[0]}
    assert only(r"b waits (\S+ m?s) for it", page.said, terminal) == {waits[1]}
    stood = format_seconds(found["ranks"][0]["cost"]["exposed_sync_s"])
    assert only(r"was blocked for (\S+ m?s)", page.said, terminal) == {stood}
    assert {row[2] for row in page.rows if row[:1] == ["exposed communication"]} == {stood}


def test_communication_figures_are_equal_in_page_terminal_and_json(told):
    page, terminal, found, options, _ = told
    in_flight, sent = format_seconds(found["all_reduce_p50_s"]), format_bytes(found["ranks"][0]["bytes"])
    assert only(r"under way for (\S+ m?s)", page.said, terminal) == {in_flight}
    assert only(r"in flight p50 (\S+ m?s)", page.said) == {in_flight}
    assert {row[2] for row in page.rows if row[:1] == ["communication in flight"]} == {in_flight}
    assert only(r"sends (\S+ kB) in them", page.said, terminal) == {sent}
    assert {row[2] for row in page.rows if row[0] in ("bytes sent", "bytes that a rank sends")} == {sent}
    assert options["ddp, shares 12 : 4"]["bytes_per_rank"] == found["ranks"][0]["bytes"]


def test_loss_is_equal_in_page_and_json(told):
    page, _, found, _, _ = told
    assert only(r" loss (\d\.\d{4}) after 60 steps validation", page.said) == {f"{found['loss']:.4f}"}
    assert only(r"validation loss (\d\.\d{4}) after 60", page.said) == {f"{found['val_loss']:.4f}"}
    assert only(r"step 60: validation loss (\d\.\d{4})", page.said) == {f"{found['val_loss']:.4f}"}


def test_single_host_figures_match_planner(told):
    page, terminal, found, options, answer = told
    alone = options["a alone"]
    rate = format_count(alone["tokens_per_s"])
    assert only(r"a alone would have trained (\S+) tokens/s", page.said, terminal) == {rate}
    assert page.row("a alone")[1:3] == [format_seconds(alone["step_s"]), rate]
    times = alone["tokens_per_s"] / found["tokens_per_s"]
    assert only(r"a alone is (\S+) times as fast", page.said, terminal) == {f"{times:.2f}"} == {page.row("a alone")[3]}
    assert page.said.index("It was not worth it") < page.said.index("finished")
    assert terminal.startswith("It was not worth it: a and b trained")
    best = options[answer["recommended"]]
    assert only(rf"{re.escape(best['name'])} would train (\S+) tokens/s", page.said, terminal) == {
        format_count(best["tokens_per_s"])
    }


def test_alternative_strategy_figures_match_planner(told):
    page, _, _, options, _ = told
    shown = [row for row in page.rows if row and row[0] in options]
    assert len(shown) > 5
    for row in shown:
        option = options[row[0]]
        assert row[1:3] == [format_seconds(option["step_s"]), format_count(option["tokens_per_s"])]
    assert page.row("batch and accumulation × 4")[-1] == "another training run"  # as `plan` says of a larger batch


def test_bench_figures_are_equal_in_page_and_table(tmp_path, write_run):
    shutil.copytree(RECORDS, tmp_path / "two")
    write_run(tmp_path / "one", [{}])
    write_atomic(tmp_path / "bench.json", b'{"format": 1, "series": {"verbs": ["one", "two"]}}')
    page = Text(write_report(RunDir(tmp_path)).read_text())
    (runs,) = bench_report.summarize_bench(tmp_path).values()
    for name, *cells in bench_rows(runs)[1:]:
        assert page.row(name.strip())[1:] == cells
    for run in runs:
        assert format_seconds(run.step_p50_s) in page.said.split("waits most.")[1]  # the sum of its bar


def test_fleet_bench_figures_are_equal_in_bench_page_table_and_run_page(tmp_path, write_run):
    shutil.copytree(RECORDS, tmp_path / "two")
    write_run(tmp_path / "one", [{}])
    compare_setups.write_setups(tmp_path, SetupComparison(kind="fleet", base="a", runs={"a": "one", "a + b": "two"}))
    page, of_run = (Text(write_report(RunDir(path)).read_text()) for path in (tmp_path, tmp_path / "two"))
    runs = {label: summarize_run(RunDir(tmp_path / name)) for label, name in (("a", "one"), ("a + b", "two"))}
    for row in compare_setups.setup_rows("fleet", runs, runs["a"]):
        assert page.row(row[0]) == list(row)
    shown = dict(zip(compare_setups.COLUMNS["fleet"], page.row("a + b")[1:], strict=True))
    assert of_run.row("b", "56.1 ms")[2:4] == [shown["exposed"], shown["wait"]]
    assert of_run.row("step")[2] == shown["step"]


def test_step_time_matches_gaps_between_step_end_times(tmp_path: Path) -> None:
    """Were it wrong, it would be so everywhere: the moments at which steps ended, which it does not read, say it."""
    shutil.copytree(RECORDS, tmp_path / "run")
    summary = summarize_run(RunDir(tmp_path / "run"))
    for rank in range(2):
        ended = [record.ended for record in RunDir(tmp_path / "run").records(rank)]
        gap_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(ended[3:]))
        assert summary.step_p50_s == pytest.approx(gap_s, rel=0.06)  # what lies between steps is saving and evaluating
