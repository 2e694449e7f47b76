"""FLOP/s and MFU of a run's ranks: of a program by what was counted in one step, of evener's GPT by its formula."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.model.flops import StepFlops
from evener.core.run.run_plan import Plan, write_plan
from evener.core.run.rundir import RunDir
from evener.report.explain.explain_run import explain_run
from evener.report.read.run_summary import summarize_run, summary_json
from evener.watch import run_view
from evener.watch.run_health import assess_health
from evener.watch.run_reader import RunReader

HALF = {"compute_s": 0.05, "optimizer_s": 0.002}


@pytest.fixture
def run(tmp_path, write_run):
    """Two ranks of evener's GPT, on a host whose matrix products were probed."""
    made = write_run(tmp_path / "run", [HALF, HALF | {"compute_s": 0.1}])
    [host] = made.manifest().roster.hosts
    (tmp_path / "fleet.toml").write_text(
        f'[hosts.{host}]\naddress = "local"\n[rates.{host}.cpu.matmul_flops]\nfp32 = 1e9\nbf16 = 4e9\n'
    )
    write_plan(made, Plan(kind="train", spec=None, fleet_file=str(tmp_path / "fleet.toml")))
    return made


def as_program(run, *flops: StepFlops) -> None:
    manifest = msgspec.structs.replace(run.manifest(), program="train.py", unit="samples", shape=None, corpus=None)
    run.write_manifest(msgspec.structs.replace(manifest, flops=list(flops)))


def paragraph(run) -> str:
    [text] = [one for one in explain_run(summarize_run(run)) if "FLOP" in one]
    return text


def test_gpt_s_rate_is_its_flops_a_token_over_the_step(run):
    summary = summarize_run(run)
    flops_per_token, rank = summary.manifest.shape.flops_per_token(), summary.ranks[0]
    expected = flops_per_token * rank.tokens / summary.step_p50_s
    assert summary.flop_rates[0].flops_per_s == pytest.approx(expected)
    assert summary.flop_rates[0].mfu == pytest.approx(expected / 1e9)
    [one, _] = summary_json(summary)["ranks"]
    assert (one["flops_per_s"], one["mfu"]) == (pytest.approx(expected), pytest.approx(expected / 1e9))
    assert "the matrix products that probing the hosts found, the MFU." in paragraph(run)


def test_program_s_rate_is_that_of_its_samples_by_dtype(run):
    """A rank's records say how many samples it has; the roof of each dtype is another."""
    as_program(run, *2 * [StepFlops(by_dtype={"fp32": 2_000, "bf16": 6_000}, num_samples=2.0)])
    summary = summarize_run(run)
    samples_per_s = summary.ranks[0].tokens / summary.step_p50_s
    assert summary.flop_rates[0].flops_per_s == pytest.approx(4_000 * samples_per_s)
    assert summary.flop_rates[0].mfu == pytest.approx((1_000 / 1e9 + 3_000 / 4e9) * samples_per_s)
    reader = RunReader(RunDir(run.path))
    while reader.read_new():
        pass
    figures = {one.name: one for one in run_view.key_figures(reader, assess_health(reader, 0.0))}
    assert figures["FLOP/s"].note.startswith("MFU ")
    assert "not measured" not in figures["FLOP/s"].note


def test_what_was_not_counted_or_probed_is_said(run):
    as_program(run)
    assert paragraph(run) == "FLOPs: not measured."
    as_program(run, *2 * [StepFlops(missing="the program is compiled")])
    assert paragraph(run) == "FLOPs: not counted, the program is compiled."
    as_program(run, *2 * [StepFlops(by_dtype={"fp32": 8}, num_samples=0.0)])
    assert paragraph(run).startswith("FLOPs: not ")
    assert [rank["flops_per_s"] for rank in summary_json(summarize_run(run))["ranks"]] == [None, None]
    as_program(run, *2 * [StepFlops(by_dtype={"float64": 8}, missing="those of own.product are missing")])
    assert "evener probe host" in paragraph(run)
    assert paragraph(run).endswith(" FLOPs: those of own.product are missing.")
