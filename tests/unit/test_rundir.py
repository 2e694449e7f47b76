"""A crash leaves no partial file, and a partial last line of a record file is skipped."""

from __future__ import annotations

import errno
import os

import msgspec
import pytest

from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.file_io import follow_lines, write_atomic, write_folder_atomic
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepCost, StepRecord


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, tokens=1, loss=1.0, wall_s=1.0, cost=StepCost(compute_s=1.0), sync_s=None, cpu_s=None, bytes=0,
        epoch=0, members=1, lr=0.1, grad_norm=None, ended=0.0,
    )  # fmt: skip


def test_partial_last_line_is_skipped(tmp_path):
    run = RunDir(tmp_path)
    lines = b"".join(msgspec.json.encode(record(step)) + b"\n" for step in range(3))
    write_atomic(run.steps_path(0), lines[:-10])
    assert [r.step for r in run.records(0)] == [0, 1]


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    run = RunDir(tmp_path)
    write_atomic(run.steps_path(0), b"{\n" + msgspec.json.encode(record(0)) + b"\n")
    with pytest.raises(CheckpointError, match=r"rank-0\.jsonl: damaged"):
        run.records(0)


def test_records_of_repeated_steps_are_dropped(tmp_path):
    run = RunWriter(tmp_path)
    write_atomic(run.steps_path(0), b"".join(msgspec.json.encode(record(step)) + b"\n" for step in range(5)))
    run.truncate_records(0, 3)
    assert [r.step for r in run.records(0)] == [0, 1, 2]
    assert run.recorded_ranks() == [0]


def test_unmeasured_step_part_is_read_as_none(tmp_path):
    run = RunDir(tmp_path)
    write_atomic(run.steps_path(0), msgspec.json.encode(record(0)) + b"\n")
    (read,) = run.records(0)
    assert read.cost.wait_s is None
    assert read.cost.compute_s == 1.0


def test_folder_is_written_atomically(tmp_path):
    def fail(folder):
        (folder / "a").write_text("x")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_folder_atomic(tmp_path / "folder", fail)
    assert list(tmp_path.iterdir()) == []
    write_folder_atomic(tmp_path / "folder", lambda folder: (folder / "a").write_text("x"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_follow_yields_each_complete_line_once(tmp_path):
    path = tmp_path / "log"
    lines = follow_lines(path)
    assert next(lines) == []
    path.write_bytes(b"one\ntw")
    assert next(lines) == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert next(lines) == [b"two", b"three"]
    assert next(lines) == []


def test_non_run_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a run directory"):
        RunDir(tmp_path).manifest()
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        RunDir(tmp_path).manifest()


def test_unreadable_manifest_is_not_called_missing(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("evener.core.run.rundir.read_file", refuse)
    with pytest.raises(CheckpointError, match=r"/manifest\.json: Permission denied"):
        RunDir(tmp_path).manifest()
