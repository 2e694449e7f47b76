"""pandas and polars dataframes of a run hold the same figures as its files."""

from __future__ import annotations

import pandas as pd
import polars as pl
import pytest

import evener
from evener.core.base.errors import UsageError
from evener.report.export import dataframes

from ..sample_runs import STARTED, write_run


@pytest.fixture
def run(tmp_path):
    losses = lambda step: None if step == 3 else 3.0 / (step + 1)  # noqa: E731
    writer = write_run(tmp_path / "run", [{"wait_s": 0.01}, {"wait_s": None}], cpus=[1.0, None], sync_s=0.02,
                       evaluations={10: 1.5}, losses=losses)  # fmt: skip
    writer.add_event("world", step=4, number=1, hosts=["h"], why="ü was lost")
    return writer.path


def test_pandas_frame_equals_raw_records(run):
    ours = evener.read_run(run, "pandas").steps
    read = [
        pd.read_json(run / f"steps/rank-{rank}.jsonl", lines=True, dtype=False).assign(rank=rank) for rank in (0, 1)
    ]
    theirs = pd.concat(read).sort_values(["step", "rank"], ignore_index=True)
    assert len(ours) == 40
    for name in ("step", "rank", "epoch", "tokens", "loss", "wall_s", "sync_s", "cpu_s", "bytes", "members", "lr"):
        pd.testing.assert_series_equal(ours[name], theirs[name], check_dtype=False)
    cost = pd.json_normalize(theirs["cost"].tolist())
    for part in ("compute_s", "wait_s", "optimizer_s"):
        pd.testing.assert_series_equal(ours[part], cost[part], check_dtype=False)
    assert ours["wait_s"].isna().sum() == 20  # what nobody measured is no number
    assert ours["ended"].iloc[0] == pd.Timestamp(STARTED, unit="s", tz="UTC")


def test_polars_frame_equals_pandas_frame(run):
    in_pandas, in_polars = evener.read_run(run, "pandas"), evener.read_run(run, "polars")
    for name in ("steps", "evaluations", "events"):
        one, other = getattr(in_pandas, name), getattr(in_polars, name)
        assert isinstance(other, pl.DataFrame)
        assert list(one.columns) == other.columns
        assert len(one) == len(other) > 0
        for column in other.columns:
            values = [None if pd.isna(value) else value for value in one[column]]
            assert values == other[column].to_list(), column
    assert in_polars.steps["ended"].dtype == pl.Datetime("us", "UTC")


def test_events_and_evaluations_are_in_frames(run):
    found = evener.read_run(run)
    assert found.engine == "pandas"
    assert found.evaluations.to_dict("records") == [
        {"step": 10, "tokens": 10 * 1024.0, "val_loss": 1.5}, {"step": 20, "tokens": 20 * 1024.0, "val_loss": 1.25}
    ]  # fmt: skip
    world = found.events[found.events.event == "world"].iloc[0]
    assert world.step == 4
    assert '"number": 1' in world.facts
    assert found.spec["train"]["batch"] == 16
    assert found.result["val_loss"] == 1.25
    assert found.steps is found.steps
    assert repr(found) == f"<run {run}: finished, frames of pandas>"


def test_a_run_without_steps_has_empty_frames(tmp_path):
    write_run(tmp_path / "run", [{}], steps=0, verdict="failed")
    for engine in ("pandas", "polars"):
        found = evener.read_run(tmp_path / "run", engine)
        assert len(found.steps) == len(found.events) == len(found.evaluations) == 0
        assert list(found.steps.columns) == list(dataframes.STEP_COLUMNS)


def test_missing_dataframe_package_is_named(run, monkeypatch):
    monkeypatch.setattr(dataframes, "find_spec", lambda name: None)
    for engine, package in ((None, "pandas"), ("polars", "polars")):
        with pytest.raises(UsageError, match="which is not installed") as told:
            evener.read_run(run, engine)
        assert told.value.hint == f"pip install {package}"
    monkeypatch.setattr(dataframes, "find_spec", lambda name: object() if name == "polars" else None)
    assert evener.read_run(run).engine == "polars"


def test_non_run_folder_and_unknown_engine_are_refused(tmp_path):
    with pytest.raises(UsageError, match="not a run directory"):
        evener.read_run(tmp_path)
    with pytest.raises(UsageError, match="engine 'panda'") as told:
        evener.read_run(tmp_path, "panda")
    assert told.value.hint == 'did you mean "pandas"?'
