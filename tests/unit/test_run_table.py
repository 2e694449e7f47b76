"""`evener runs` lists, sorts and filters runs, and prunes only those it lists as removable."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time

import pytest
from typer.testing import CliRunner

from evener.cli.main import app
from evener.core.base.errors import UsageError
from evener.core.base.file_io import write_atomic
from evener.core.run.rundir import RunDir
from evener.launch import prune_runs
from evener.report.read import run_table
from evener.report.read.run_table import RunRow

from ..sample_runs import STARTED, write_run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two finished, one stopped with weights and one without, one failed, one may go on; and one of a bench."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/fast", [{"compute_s": 0.05}, {}], evaluations={10: 1.1}, losses=lambda step: 2.0)
    write_run(tmp_path / "runs/slow", [{"compute_s": 0.5}], corpus="python", losses=lambda step: 1.0)
    saved = write_run(tmp_path / "runs/kept", [{}], steps=8, verdict="stopped")
    write_atomic(saved.checkpoint_path(8) / "state.json", b"{}")
    write_run(tmp_path / "runs/left", [{}], steps=8, verdict="stopped")
    write_run(tmp_path / "runs/broke", [{}], steps=3, verdict="failed")
    write_run(tmp_path / "runs/goes", [{}], steps=3, verdict="running")
    write_run(tmp_path / "runs/bench/a", [{}], steps=3, verdict="failed")
    write_atomic(tmp_path / "runs/bench/compare.json", b"{}")
    return tmp_path


def runs(*args):
    done = CliRunner().invoke(app, ["runs", *args, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def names(*args):
    return [row["run"].removeprefix("runs/") for row in runs(*args)["runs"]]


def test_listing_row_has_run_outcome(place):
    fast = next(row for row in runs()["runs"] if row["run"] == "runs/fast")
    assert (fast["model"], fast["data"], fast["state"], fast["ranks"]) == ("char", "verbs", "finished", 2)
    assert (fast["steps"], fast["loss"], fast["val_loss"], fast["best_val_loss"]) == (20, 2.0, 1.25, 1.1)
    assert fast["begun"] == STARTED


def test_listing_sorts_by_column(place):
    assert names("finished", "--sort", "tokens/s") == ["fast", "slow"]
    assert names("finished", "--sort", "-tokens/s") == ["slow", "fast"]
    assert names("finished", "--sort", "loss") == ["slow", "fast"]
    assert names("--sort", "steps")[:2] == ["fast", "slow"]
    with pytest.raises(UsageError, match="--sort lose") as told:
        CliRunner().invoke(app, ["runs", "--sort", "lose"], catch_exceptions=False)
    assert told.value.hint == 'did you mean "loss"?'


def test_listing_filters_by_name_model_data_and_state(place):
    assert names("PYTHON") == ["slow"]
    assert names("stopped") == ["kept", "left"]
    assert names("stopped", "kep") == ["kept"]
    assert names("stopped", "runs") == ["kept", "left"]  # a folder, in which to look
    assert names("nothing such") == []


def test_disk_usage_matches_du(place):
    folder = place / "runs/fast"
    (folder / "large").write_bytes(b"x" * 300_000)
    os.link(folder / "large", folder / "again")  # once on the disk
    (folder / "link").symlink_to("large")
    os.sync()
    said = subprocess.run(["du", "-s", "--block-size=1", folder], capture_output=True, text=True, check=True).stdout
    assert run_table.disk_bytes(folder) == int(said.split()[0]) >= 300_000


def test_prune_without_yes_removes_nothing(place):
    before = sorted(place.rglob("*"))
    told = runs("--prune")
    assert [(one["run"], one["why"]) for one in told["pruned"]] == [
        ("runs/broke", "failed, left no weights"), ("runs/left", "stopped, left no weights")
    ]  # fmt: skip
    assert all(one["bytes"] == run_table.disk_bytes(place / one["run"]) > 0 for one in told["pruned"])
    assert not told["removed"]
    assert sorted(place.rglob("*")) == before
    shown = CliRunner().invoke(app, ["runs", "--prune"], env={"COLUMNS": "80"}).stdout
    assert "nothing is removed without --yes" in shown
    assert "runs/broke" in shown


def test_prune_removes_exactly_listed_runs(place):
    named = [one["run"] for one in runs("--prune")["pruned"]]
    assert [one["run"] for one in runs("--prune", "--yes")["pruned"]] == named
    assert sorted(path.name for path in (place / "runs").iterdir()) == ["bench", "fast", "goes", "kept", "slow"]
    assert (place / "runs/bench/a").is_dir()  # its bench's page needs it


def test_prune_removes_short_or_old_runs_but_never_resumable_ones(place):
    assert [one["run"] for one in runs("kept", "--prune", "--fewer-than", "8")["pruned"]] == []
    assert runs("kept", "--prune", "--fewer-than", "9")["pruned"][0]["why"] == "stopped after 8 steps"
    days = (time.time() - STARTED) / run_table.DAY_S
    assert runs("kept", "--prune", "--older-than", str(days + 1))["pruned"] == []
    assert [one["run"] for one in runs("kept", "--prune", "--older-than", str(days - 1))["pruned"]] == ["runs/kept"]
    for state in ("running", "unreachable", "lost", "started", "finished"):
        row = RunRow(run="a", state=state, begun=0.0, steps=0)
        assert run_table.prune_reason(row, 1e12, fewer_than=9, older_than_days=0.0) is None


@pytest.mark.parametrize("name", ["host/attached", "hosts/carry.lock", "loggers/wandb.lock"])
def test_locked_run_is_not_pruned(place, name):
    lock = place / "runs/left" / name
    write_atomic(lock, b"")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [one["run"] for one in runs("--prune", "--yes")["pruned"]] == ["runs/broke"]
        with pytest.raises(UsageError, match="runs/left: cannot be removed"):
            prune_runs.delete_run(RunDir("runs/left"))
    assert [one["run"] for one in runs("--prune", "--yes")["pruned"]] == ["runs/left"]


def test_symlinked_run_is_not_pruned(place):
    (place / "runs/link").symlink_to(place / "runs/left")
    assert "runs/link" not in [one["run"] for one in runs("--prune", "--yes")["pruned"]]


def test_yes_without_prune_is_refused(place):
    with pytest.raises(UsageError, match="need --prune"):
        CliRunner().invoke(app, ["runs", "--yes"], catch_exceptions=False)
