"""The summary of a run compares its ranks step by step, even if records are missing."""

from __future__ import annotations

import random

import msgspec
import pytest

from evener.core.base.file_io import write_atomic
from evener.core.base.units import median
from evener.core.run.roster import parse_sync
from evener.core.run.step_cost import PHASE_NAMES, Fidelity, GradientNoise, StepCost, align_steps
from evener.plan.choice.plan_request import change_request, request_from_run
from evener.report.draw import run_charts
from evener.report.explain.explain_run import explain_bottleneck, explain_run, max_loss_difference, scaling_explanation
from evener.report.pages.html_report import run_page
from evener.report.read.recorded_run import read_recorded_run
from evener.report.read.run_summary import read_records, summarize_run, summary_json

STEPS = 40


def step_of(step: int) -> list[dict[str, float]]:
    """Two ranks, of which a different one is late in every step, by another time: no step is like another."""
    draw = random.Random(step)
    costs = [{"data_s": draw.uniform(0, 0.001), "compute_s": draw.uniform(0.05, 0.2),
              "exposed_sync_s": 0.004 + 0.001 * draw.random(), "optimizer_s": 0.002} for _ in range(2)]  # fmt: skip
    totals_s = [sum(cost.values()) for cost in costs]
    return [cost | {"wait_s": max(totals_s) - total_s} for cost, total_s in zip(costs, totals_s, strict=True)]


@pytest.fixture
def run(tmp_path, write_run):
    """Two ranks; `keep(rank)`: the steps of which a rank's file has records, in the order of the file."""

    def make(keep, name="run"):
        rundir = write_run(tmp_path / name, [{}, {}], steps=STEPS, sync_s=0.02, cpus=[0.99, 0.99])
        for rank in range(2):
            first = rundir.records(rank)[0]
            lines = []
            for step in keep(rank):
                cost = StepCost(**step_of(step)[rank])
                record = msgspec.structs.replace(
                    first, step=step, loss=3.0 / (step + 1), cost=cost, wall_s=cost.total_s, sync_s=0.01 + 0.001 * step,
                    cpu_s=0.9 * cost.total_s, ended=first.ended + step,
                )  # fmt: skip
                lines.append(msgspec.json.encode(record) + b"\n")
            write_atomic(rundir.steps_path(rank), b"".join(lines))
        return rundir

    return make


def without(*missing):
    return [step for step in range(STEPS) if step not in missing]


HOLES = {
    "a hole": (range(STEPS), without(7, 8, 21)),
    "begins late": (range(STEPS), range(11, STEPS)),
    "the first begins late": (range(5, STEPS), range(STEPS)),
    "ends early": (range(STEPS), range(STEPS - 6)),
    "holes in both": (without(3, 30), without(4, 30, 31)),
    "two processes wrote": (range(STEPS), [*range(20, STEPS), *range(20)]),
}


@pytest.mark.parametrize("kept", HOLES.values(), ids=HOLES)
def test_summary_uses_only_steps_common_to_all_ranks(run, kept):
    common = sorted(set(kept[0]) & set(kept[1]))
    found = summarize_run(run(lambda rank: kept[rank]))
    expected = summarize_run(run(lambda rank: common, name="expected"))
    assert msgspec.structs.replace(found, run_dir="", manifest=None) == msgspec.structs.replace(
        expected, run_dir="", manifest=None
    )
    assert found.losses == {step: 3.0 / (step + 1) for step in common}
    assert found.num_steps == common[-1] + 1
    warm = common[3:]
    for rank in found.ranks:
        assert rank.typical.total_s == pytest.approx(found.step_p50_s)
        assert rank.typical.exposed_sync_s == found.ranks[0].typical.exposed_sync_s
    assert found.sync_p50_s == pytest.approx(median([0.01 + 0.001 * step for step in warm]))


@pytest.mark.parametrize("kept", HOLES.values(), ids=HOLES)
def test_charts_show_only_common_steps_each_at_its_number(run, kept):
    common = sorted(set(kept[0]) & set(kept[1]))
    taken = [step + 1 for step in common]  # behind each
    rundir = run(lambda rank: kept[rank])
    steps = align_steps(read_records(rundir))
    recorded = read_recorded_run(rundir)
    ranks_of = {rundir.manifest().roster.rank_label(rank): [rank] for rank in range(2)} | {run_charts.ALL_RANKS: [0, 1]}
    charts = run_charts.breakdown_areas(recorded).charts
    assert charts.keys() == ranks_of.keys()
    for layer, chart in charts.items():
        assert (chart.y_title.split()[0], len(chart.lines)) == ("ms", 5)
        for line in chart.lines:
            part = next(part for part, name in PHASE_NAMES.items() if name == line.name)
            ranks = ranks_of[layer]
            expected_ms = [1e3 * sum(step_of(step)[rank][part] for rank in ranks) / len(ranks) for step in common]
            assert line.x == taken
            assert line.y == pytest.approx(expected_ms)
    in_flight, exposed = run_charts.all_reduce_chart(steps, summarize_run(rundir)).lines
    assert in_flight.x == exposed.x == taken
    assert exposed.y == pytest.approx([1e3 * min(cost["exposed_sync_s"] for cost in step_of(step)) for step in common])
    losses = run_charts.loss_chart(recorded)
    assert losses is not None
    assert next(line for line in losses.lines if line.name == "training, smoothed").x == taken


def test_losses_of_runs_are_compared_step_by_step(run):
    whole = summarize_run(run(lambda rank: range(STEPS), name="whole"))
    late = summarize_run(run(lambda rank: range(11, STEPS), name="late"))
    assert max_loss_difference([whole, late]) == 0.0
    assert max_loss_difference([late, whole], num_steps=12) == 0.0
    assert max_loss_difference([whole, late], num_steps=5) is None
    assert "all 29 common steps are equal to the last digit" in " ".join(scaling_explanation([whole, late]).conclusion)


def test_rank_without_records_leaves_no_common_steps(run):
    rundir = run(lambda rank: range(STEPS if rank == 0 else 0))
    summary = summarize_run(rundir)
    assert (summary.num_steps, summary.step_p50_s, summary.losses) == (0, None, {})
    assert "not measured" in run_page(rundir, now=0.0)


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (1, 4), (4, 2)])
def test_rates_use_current_rank_count(tmp_path, write_run, before, now):
    """A run that went on with another number of processes after half of its steps."""
    rundir = write_run(tmp_path / "now", [{"compute_s": 0.02}] * now, steps=STEPS)
    earlier = write_run(tmp_path / "before", [{"compute_s": 0.3}] * before, steps=STEPS // 2)
    for rank in range(max(before, now)):
        records = [*earlier.records(rank), *rundir.records(rank)[STEPS // 2 :]]
        write_atomic(rundir.steps_path(rank), b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    summary = summarize_run(rundir)
    assert [rank.typical.compute_s for rank in summary.ranks] == [0.02] * now
    assert summary.tokens_per_step == 1024
    assert (summary.num_steps, list(summary.losses)) == (STEPS, list(range(STEPS)))
    assert f"after {STEPS} steps" in run_page(rundir, now=0.0)


@pytest.mark.parametrize("since", [0, 25])
def test_summary_covers_only_steps_since_settings_changed(tmp_path, write_run, since):
    rundir = write_run(tmp_path / "run", [{}, {}], steps=STEPS, sync_s=0.01)
    for rank in range(2):
        lossy = Fidelity(error=0.1, cosine=0.9)
        records = [
            record if record.step >= 25 else msgspec.structs.replace(
                record, tokens=64, wall_s=9.0, sync_s=5.0, bytes=10**9, fidelity=lossy, cost=StepCost(compute_s=9.0)
            )
            for record in rundir.records(rank)
        ]  # fmt: skip
        write_atomic(rundir.steps_path(rank), b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    rundir.write_manifest(msgspec.structs.replace(rundir.manifest(), since=since))
    summary = summarize_run(rundir)
    step_s = 0.105 if since else 9.0
    assert (summary.step_p50_s, summary.num_steps, len(summary.losses)) == (pytest.approx(step_s), STEPS, STEPS)
    assert (summary.fidelity is None) == bool(since)
    assert summary.tokens_per_s == pytest.approx((1024 if since else 128) / step_s)
    assert summary.sync_p50_s == (0.01 if since else 5.0)
    assert (summary.ranks[0].bytes == 480_000) == bool(since)
    assert summary_json(summary)["since_step"] == since
    text = " ".join([*explain_run(summary), run_page(rundir, now=0.0)])
    assert text.count("These figures are since step 26, where its ranks or settings changed.") == 2 * bool(since)
    assert text.count("; since step 26") == bool(since)


def test_no_steps_after_settings_change_is_reported(tmp_path, write_run):
    rundir = write_run(tmp_path / "run", [{}, {}], steps=STEPS)
    rundir.write_manifest(msgspec.structs.replace(rundir.manifest(), since=STEPS))
    summary, window = summarize_run(rundir), f"since step {STEPS + 1}, where its ranks or settings changed"
    assert (summary.step_p50_s, summary.num_steps) == (None, STEPS)
    assert explain_bottleneck(summary) == f"No step was recorded {window}."
    assert f"No step was recorded {window}, so there is nothing to explain." in run_page(rundir, now=0.0)


def test_later_record_of_repeated_step_wins(run):
    rundir = run(lambda rank: range(2))
    (first, _), (other, _) = (rundir.records(rank) for rank in range(2))
    again = msgspec.structs.replace(first, loss=99.0)
    assert align_steps({0: [first, again], 1: [other]}) == [{0: again, 1: other}]


def test_noise_scale_is_mean_trace_over_mean_squared_norm(run):
    """At a scale of as many tokens as a batch has, twice the batch needs 3/4 of the steps and 3/2 of the tokens."""
    rundir = run(lambda rank: range(STEPS))
    records = rundir.records(0)
    scale = summarize_run(rundir).tokens_per_step
    sampled = [
        msgspec.structs.replace(
            record,
            noise=GradientNoise(norm_sq=2.0 + 4.0 * (record.step % 4 - 1.5), trace=2.0 * scale),
            fidelity=Fidelity(error=0.007, cosine=0.9998) if record.step == 20 else None,
        )
        for record in records
    ]
    write_atomic(rundir.steps_path(0), b"".join(msgspec.json.encode(record) + b"\n" for record in sampled))
    summary = summarize_run(rundir)
    assert summary.noise_scale_tokens == pytest.approx(scale)
    (told,) = [text for text in explain_run(summary) if "noise scale" in text]
    assert "would need 0.75 times as many steps for the same loss, and 1.50 times as many tokens" in told
    assert "0.7% of their length, cosine 0.9998 (medians)" in told

    # the planner weighs batches by it
    asked = request_from_run("run", summary.manifest, list(read_records(rundir).values()), None)
    assert asked.job.noise_tokens == pytest.approx(scale)
    assert change_request(asked, {"batch": "64"}, None).job.noise_tokens == pytest.approx(scale)
    assert change_request(asked, {"model": "gpt2"}, None).job.noise_tokens is None


def test_diloco_step_figures_are_means_over_a_round(tmp_path, write_run):
    """Every fourth step sends, for 0.3 s: a median step would have none of it."""
    rundir = write_run(tmp_path / "run", [{}, {}], steps=22, sync_s=0.0, cpus=[0.99, 0.99])
    manifest = rundir.manifest()
    sync = parse_sync("diloco:4")
    rundir.write_manifest(msgspec.structs.replace(manifest, roster=msgspec.structs.replace(manifest.roster, sync=sync)))
    for rank in range(2):
        lines = []
        for record in rundir.records(rank):
            sends_s = 0.3 if record.step % 4 == 3 else 0.0
            cost = StepCost(data_s=0.0, compute_s=0.1, exposed_sync_s=sends_s, wait_s=0.0, optimizer_s=0.0)
            new = {"cost": cost, "wall_s": cost.total_s, "sync_s": sends_s, "bytes": 1000 if sends_s else 0}
            lines.append(msgspec.json.encode(msgspec.structs.replace(record, **new)) + b"\n")
        write_atomic(rundir.steps_path(rank), b"".join(lines))
    summary = summarize_run(rundir)
    assert summary.step_p50_s == pytest.approx(0.175)
    assert summary.tokens_per_s == pytest.approx(summary.tokens_per_step / 0.175)
    assert summary.ranks[1].typical.exposed_sync_s == pytest.approx(0.075)
    assert (summary.ranks[0].bytes, summary.ranks[0].sync_s) == (250, pytest.approx(0.075))
