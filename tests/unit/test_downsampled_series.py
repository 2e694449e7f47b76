"""A downsampled curve has bounded size and keeps every peak."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import GradientNoise, StepCost, StepRecord
from evener.report.draw.run_charts import noise_scale_chart
from evener.report.read.downsampled_series import MAX_BUCKETS, DownsampledSeries
from evener.report.read.recorded_run import RecordedRun, val_losses
from evener.report.read.run_curves import RunCurves
from evener.report.read.run_summary import summarize_run
from evener.watch.run_reader import CACHE_FILE, RunReader

from ..tiers import num_examples

COST = {"data_s": 0.001, "compute_s": 0.1, "exposed_sync_s": 0.02, "wait_s": 0.003, "optimizer_s": 0.004}


def record(step: int, **other) -> StepRecord:
    cost = StepCost(**COST)
    given = {"step": step, "epoch": 0, "tokens": 512, "loss": 3.0 / (step + 1), "wall_s": cost.total_s, "cost": cost,
             "sync_s": 0.03, "cpu_s": 0.1, "bytes": 1000, "members": 2, "lr": 1e-3, "grad_norm": 1.0,
             "ended": 1e9 + 0.128 * step} | other  # fmt: skip
    return StepRecord(**given)


def test_single_step_peak_is_visible_after_a_million_steps():
    series, rng = DownsampledSeries(), np.random.default_rng(1)
    values = rng.normal(2.0, 0.1, 1_000_000)
    values[123_456], values[777_777] = 40.0, -40.0
    for first in range(0, len(values), 100_000):
        series.add(np.arange(first, first + 100_000), values[first : first + 100_000])
    points = series.points()
    assert len(points) <= MAX_BUCKETS
    assert max(points.highs) == 40.0
    assert min(points.lows) == -40.0
    at = points.highs.index(40.0)
    assert points.steps[at - 1] < 123_456 <= points.steps[at]
    assert series.mean() == pytest.approx(values.mean(), rel=1e-12)  # numpy's


@settings(deadline=None, max_examples=num_examples(30, 60))
@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=90), st.integers(1, 30))
def test_series_buckets_match_numpy(values, piece):
    """However they come, and with what was not measured left out."""
    series = DownsampledSeries(max_buckets=8)
    for first in range(0, len(values), piece):
        part = np.array(values[first : first + piece])
        series.add(np.arange(first, first + len(part)), part)
    points, width = series.points(), series.bucket_steps
    expected = [np.array([value for value in values[at : at + width] if value == value])
                for at in range(0, len(values), width)]  # fmt: skip
    expected = [bucket for bucket in expected if len(bucket)]
    assert points.means == pytest.approx([bucket.mean() for bucket in expected], rel=1e-9, abs=1e-6)
    assert points.lows == [bucket.min() for bucket in expected]
    assert points.highs == [bucket.max() for bucket in expected]
    assert all(step % width == width - 1 for step in points.steps[:-1])


@pytest.mark.parametrize("without_largest", [True, False])
@pytest.mark.parametrize(("num", "first"), [(10, 0), (300, 777), (700, 50_001), (1, 0), (10, 99_990), (10, 200_000)])
def test_windows_have_the_means_of_their_values(num, first, without_largest):
    """Every 37th of 100,000 values was not measured; the truth is numpy's of the values themselves."""
    series, values = DownsampledSeries(), np.random.default_rng(0).normal(1, 0.05, 100_000)
    values[::37] = np.nan
    series.add(np.arange(len(values)), values)
    windows = series.windows(num, first, without_largest=without_largest)
    width = -(-num // series.bucket_steps) * series.bucket_steps
    begin = -(-first // series.bucket_steps) * series.bucket_steps
    expected = []
    for start in range(begin, len(values), width):
        measured = np.sort(values[start : start + width][~np.isnan(values[start : start + width])])
        if len(measured) >= num:
            expected.append((start, len(measured), measured[:-1].mean() if without_largest else measured.mean()))
    assert [window[:2] for window in windows] == [window[:2] for window in expected]
    assert [window.mean for window in windows] == pytest.approx([mean for *_, mean in expected])


def test_non_finite_values_are_not_drawn():
    series = DownsampledSeries(max_buckets=2)
    series.add(np.arange(8), np.array([1.7e308, 1.7e308, -1.7e308, np.inf, 1.0, 3.0, -np.inf, np.nan]))
    assert series.points().means == [2.0]
    assert series.mean() == 2.0


def test_repeated_steps_count_once():
    series = DownsampledSeries(max_buckets=8)
    series.add(np.arange(8), np.full(8, 9.0))
    series.truncate_from(3)
    series.add(np.arange(3, 6), np.full(3, 1.0))
    assert series.points().means == [9.0, 9.0, 9.0, 1.0, 1.0, 1.0]
    assert series.points().steps == [0, 1, 2, 3, 4, 5]


def test_metrics_shared_by_all_ranks_count_each_step_once():
    """Rank 1 goes on where rank 0 is gone, and each step counts once."""
    curves = RunCurves()
    curves.add(0, [record(step, loss=1.0) for step in range(10)])
    curves.add(1, [record(step, loss=2.0) for step in range(15)])
    assert curves.steps_done == 15
    assert curves.shared_series["loss"].points().means == [1.0] * 10 + [2.0] * 5
    assert [len(curves.newest[rank]) for rank in (0, 1)] == [10, 15]


def test_rollback_to_checkpoint_replaces_later_steps():
    curves = RunCurves()
    again = [record(step, loss=1.0) for step in range(10)] + [record(step, loss=5.0) for step in range(4, 8)]
    curves.add(0, again)
    assert curves.steps_done == 8
    assert curves.shared_series["loss"].points().means == [1.0] * 4 + [5.0] * 4
    assert [one.step for one in curves.newest[0]] == list(range(8))


def test_noise_scale_is_recovered_from_samples(tmp_path, write_run):
    """Of |G|² = 0.5 and trΣ = 500 the scale is 1000 tokens, whatever the noise of each."""
    rng, curves = random.Random(5), RunCurves()
    curves.add(0, [record(step, noise=GradientNoise(norm_sq=rng.gauss(0.5, 0.2), trace=rng.gauss(500.0, 200.0)))
                   for step in range(400)])  # fmt: skip
    summary = summarize_run(write_run(tmp_path / "run", [{}]))
    chart = noise_scale_chart(RecordedRun(summary, curves, [], "finished"))
    assert chart.lines[0].y[-1] == pytest.approx(1000.0, rel=0.15)


# --- files ------------------------------------------------------------------------------------------------------------


def lines(first: int, last: int, **other) -> bytes:
    return b"".join(msgspec.json.encode(record(step, **other)) + b"\n" for step in range(first, last))


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def read_all(reader: RunReader) -> RunReader:
    while reader.read_new(0.1):
        pass
    return reader


def test_growing_run_is_read_incrementally(tmp_path, write_run):
    run = write_run(tmp_path / "run", [{}, {}], verdict="running", evaluations={10: 2.0})
    reader = read_all(RunReader(RunDir(run.path)))
    assert reader.curves.steps_done == 20
    version = reader.version
    assert not reader.read_new(0.1)
    assert reader.version == version, "nothing is new"
    half = lines(20, 22)
    append(run.steps_path(0), half[:-30])
    read_all(reader)
    assert reader.curves.steps_done == 21, "a half line waits"
    append(run.steps_path(0), half[-30:])
    run.add_event("evaluation", step=20, val_loss=1.5)
    read_all(reader)
    assert reader.curves.steps_done == 22
    assert val_losses(reader.manifest, reader.events) == [(10, 2.0), (20, 1.5)]
    assert reader.version > version


def test_resumed_run_replaces_repeated_steps(tmp_path, write_run):
    run = write_run(tmp_path / "run", [{}], verdict="running", losses=lambda step: 1.0)
    reader = read_all(RunReader(RunDir(run.path)))
    run.truncate_records(0, 12)
    append(run.steps_path(0), lines(12, 15, loss=7.0))
    read_all(reader)
    assert reader.curves.shared_series["loss"].points().means == [1.0] * 12 + [7.0] * 3


def test_damaged_lines_are_skipped(tmp_path, write_run):
    run = write_run(tmp_path / "run", [{}])
    append(run.steps_path(0), b'{"step": 20, "epo\n\xff\xfe\n' + b"[" * 3_000_000 + b"\n" + lines(20, 21))
    append(run.events_path, b"{damaged\n")
    assert read_all(RunReader(RunDir(run.path))).curves.steps_done == 21


@pytest.fixture
def kept(tmp_path, write_run, monkeypatch):
    """A run whose summary lies beside it."""
    monkeypatch.setattr("evener.watch.run_reader.MIN_CACHED_BYTES", 1)
    run = write_run(tmp_path / "run", [{}, {}], steps=700, verdict="running")
    first = read_all(RunReader(RunDir(run.path)))
    first.save_cache()
    assert (run.path / CACHE_FILE).exists()
    return run, first


def same(a: RunReader, b: RunReader) -> bool:
    return msgspec.msgpack.encode(a.curves.to_stored()) == msgspec.msgpack.encode(b.curves.to_stored())


def test_cached_records_are_not_read_again(kept, monkeypatch):
    run, first = kept
    read = []
    add = RunCurves.add
    monkeypatch.setattr(RunCurves, "add", lambda self, rank, records: (read.extend(records), add(self, rank, records)))
    append(run.steps_path(1), lines(700, 703))
    again = read_all(RunReader(RunDir(run.path)))
    assert [one.step for one in read] == [700, 701, 702]
    assert again.curves.steps_done == 703
    read_all(first)
    assert same(first, again)


@pytest.mark.parametrize("damage", ["bytes", "version", "replaced", "cut", "other"])
def test_invalid_cached_summary_is_rebuilt(kept, damage):
    run, first = kept
    path = run.path / CACHE_FILE
    packed = path.read_bytes()
    if damage == "bytes":
        path.write_bytes(packed[: len(packed) // 2])
    if damage == "version":
        path.write_bytes(msgspec.msgpack.encode(msgspec.msgpack.decode(packed) | {"format": 99}))
    if damage == "other":
        tree = msgspec.msgpack.decode(packed)
        tree["curves"]["shared"]["loss"]["counts"] = [1, 2, 3]
        path.write_bytes(msgspec.msgpack.encode(tree))
    if damage == "replaced":
        run.truncate_records(0, 700)
    if damage == "cut":
        text = run.steps_path(0).read_bytes()
        with run.steps_path(0).open("r+b") as file:
            file.truncate(len(text) - 40)
            file.seek(0, 2)
            file.write(text[-40:])
        path.write_bytes(packed[:10])
    assert same(read_all(RunReader(RunDir(run.path))), first)


@settings(deadline=None, max_examples=num_examples(20, 40))
@given(st.data())
def test_any_cached_summary_bytes_are_tolerated(tmp_path_factory, data):
    """Whatever stands there."""
    folder = tmp_path_factory.mktemp("run")
    (folder / CACHE_FILE).write_bytes(data.draw(st.binary(max_size=200)))
    assert RunReader(RunDir(folder)).curves.steps_done == 0


def test_cached_summary_size_is_bounded():
    """Ten times as many steps, as many bytes."""
    sizes, curves = [], RunCurves()
    for first in range(0, 50_000, 5000):
        for rank in range(2):
            curves.add(rank, [record(step) for step in range(first, first + 5000)])
        sizes.append(len(msgspec.msgpack.encode(curves.to_stored())))
    assert max(sizes) < 1.1 * sizes[0]
