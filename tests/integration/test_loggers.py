"""Experiment loggers get every step once: live, after the run, and after the logger or the run was killed."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
import zlib

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from evener.cli import logger_processes as cli_loggers
from evener.cli.main import app
from evener.core.base.errors import RunError, UsageError
from evener.core.base.file_io import write_atomic
from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import Fidelity, GradientNoise, noise_scale
from evener.report.export import experiment_loggers
from evener.report.export.experiment_loggers import parse_loggers
from evener.report.export.logger_feed import (
    MAX_LATE_STEPS,
    feed_logger,
    read_cursor,
    register_loggers,
    registered_loggers,
)

from ..sample_runs import STARTED, write_run
from ..tiers import exhaustive

DEADLINE_S = 60.0


class Heard:
    """A logger that keeps what it was told."""

    def __init__(self):
        self.rows, self.verdict, self.about = [], None, None

    def begin(self, run):
        self.about = run
        return run.id or "mine"

    def log(self, step, unix_s, values):
        self.rows.append((step, values))

    def flush(self):
        pass

    def close(self, verdict):
        self.verdict = verdict

    @property
    def steps(self):
        return [step for step, values in self.rows if "train/loss" in values]


def heard(rundir, **how):
    logger = Heard()
    feed_logger(rundir, "tensorboard", logger, **how)
    return logger


@pytest.fixture
def run(tmp_path):
    """Two ranks; 40 steps of 16 × 64 tokens, evaluated after 10 and after the last."""
    return write_run(tmp_path / "run", [{"wait_s": 0.02}, {"wait_s": 0.0, "compute_s": 0.12}], steps=40,
                     evaluations={10: 1.5, 40: 1.25})  # fmt: skip


def lines_of(rundir, rank):
    return rundir.steps_path(rank).read_bytes().splitlines(keepends=True)


def scalars(folder):
    """As TensorBoard reads them: (step, value) by tag."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


# --- what is told -----------------------------------------------------------------------------------------------------


def test_every_step_is_logged_with_shared_metrics(run):
    logger = heard(run)
    assert logger.steps == list(range(1, 41))
    first = dict(logger.rows)[1]
    assert first["train/loss"] == 3.0
    assert first["train/tokens"] == 1024
    assert first["speed/tokens_per_s"] == pytest.approx(1024 / 0.125)
    assert first["speed/wait_s"] == pytest.approx(0.01)  # the mean of both
    assert first["speed/compute_s"] == pytest.approx(0.11)
    assert dict(logger.rows)[10]["val/loss"] == 1.5
    assert dict(logger.rows)[40] | {"val/loss": 1.25, "train/tokens": 40 * 1024.0} == dict(logger.rows)[40]
    assert logger.verdict == "finished"
    assert logger.about.hyperparameters["batch"] == 16
    assert logger.about.hyperparameters["ran-sync"] == "ddp"
    assert "out" not in logger.about.hyperparameters


def test_noise_scale_and_compression_error_are_logged(run):
    def more(line):
        record = json.loads(line)
        record["noise"] = {"norm_sq": 0.5, "trace": 50.0 + record["step"]}
        record["fidelity"] = {"error": 0.01, "cosine": 1.0}
        return json.dumps(record).encode() + b"\n"

    for rank in (0, 1):
        write_atomic(run.steps_path(rank), b"".join(map(more, lines_of(run, rank))))
    rows = dict(heard(run).rows)
    records = run.records(0)
    assert records[0].noise == GradientNoise(norm_sq=0.5, trace=50.0)
    assert records[0].fidelity == Fidelity(error=0.01, cosine=1.0)
    assert rows[40]["train/noise_scale_tokens"] == noise_scale(records) == pytest.approx((50 + 29.5) / 0.5)
    assert rows[40]["train/sync_error"] == 0.01
    assert "train/noise_scale_tokens" not in rows[4]  # too few say nothing


def test_resumed_logger_does_not_repeat_steps(run):
    """The process is ended after 15 steps; the run ends, is resumed from step 30, and goes on to 40."""
    whole = {rank: lines_of(run, rank) for rank in (0, 1)}
    for rank in (0, 1):
        write_atomic(run.steps_path(rank), b"".join(whole[rank][:15]))
    first = heard(run)
    assert first.steps == list(range(1, 16))
    assert read_cursor(run, "tensorboard").id == "mine"
    for rank in (0, 1):
        write_atomic(run.steps_path(rank), b"".join(whole[rank][:35]))
    second = heard(run)
    assert second.about.first_step == 16
    assert second.steps == list(range(16, 36))
    for rank in (0, 1):
        write_atomic(run.steps_path(rank), b"".join(whole[rank][:30]))  # another file, as a resume leaves it
    assert heard(run).steps == []
    for rank in (0, 1):
        write_atomic(run.steps_path(rank), b"".join(whole[rank]))
    third = heard(run)
    assert third.steps == list(range(36, 41))
    assert third.rows[-1][1]["train/tokens"] == 40 * 1024


class Growing:
    """A run whose files grow between two looks."""

    def __init__(self, *changes):
        self.changes = list(changes)

    def __call__(self):
        if self.changes:
            self.changes.pop(0)()
            return True
        return False


def test_step_is_logged_once_all_its_ranks_recorded_it(run):
    whole, told = {rank: lines_of(run, rank) for rank in (0, 1)}, []
    logger = Heard()

    def has(of_0, of_1):
        def change():
            told.append(logger.steps[-1] if logger.steps else 0)
            write_atomic(run.steps_path(0), b"".join(whole[0][:of_0]))
            write_atomic(run.steps_path(1), b"".join(whole[1][:of_1]))

        return change

    feed_logger(run, "wandb", logger, Growing(has(9, 5), has(9, 9), has(20, 12)))
    assert told == [0, 5, 9]
    assert logger.steps == list(range(1, 13))  # 13 to 20 may never be whole: they are told when they are
    write_atomic(run.steps_path(1), b"".join(whole[1]))
    write_atomic(run.steps_path(0), b"".join(whole[0]))
    assert heard(run).steps[-1] == 40


def test_logger_does_not_wait_for_removed_rank(tmp_path):
    """Rank 0 recorded its last step alone; then rank 1 went on, as the only one, in the next epoch."""
    run = write_run(tmp_path / "run", [{}, {}], steps=6)
    records = {rank: run.records(rank) for rank in (0, 1)}
    of_0 = records[0][:4]
    alone = [
        msgspec.structs.replace(records[1][0], step=step, epoch=1, members=1) for step in range(3, MAX_LATE_STEPS + 9)
    ]
    of_1 = records[1][:3] + [msgspec.structs.replace(one, tokens=1024.0) for one in alone]
    for rank, found in ((0, of_0), (1, of_1)):
        write_atomic(run.steps_path(rank), b"".join(msgspec.json.encode(one) + b"\n" for one in found))
    logger = heard(run)
    assert logger.steps == list(range(1, MAX_LATE_STEPS + 10))
    tokens = [values["train/tokens"] for _, values in logger.rows]
    assert tokens == [1024.0 * (i + 1) for i in range(len(tokens))]


def test_missing_record_delays_logging_only_briefly(run):
    """Rank 1's record of step 3 was lost with its host's disk."""
    lines = lines_of(run, 1)
    write_atomic(run.steps_path(1), b"".join(lines[:2] + lines[3:]))
    waited = []
    logger = Heard()
    feed_logger(run, "tensorboard", logger, Growing(lambda: None, lambda: waited.append(logger.steps[-1])))
    assert waited == [2]
    assert logger.steps == [1, 2, *range(4, 41)]


def test_damaged_lines_are_skipped(run):
    lines = lines_of(run, 0)
    write_atomic(run.steps_path(0), b"".join([*lines[:5], b"\x00\x00\n", *lines[5:]]))
    with run.events_path.open("ab") as file:
        file.write(b'{"event":"evaluation","time":1.0,"step":"x"}\n\x00\n')
    assert heard(run).steps == list(range(1, 41))


def test_only_one_logger_process_runs_at_a_time(run):
    def second():
        assert feed_logger(run, "tensorboard", Heard()) is None

    assert heard(run, is_running=Growing(second)).steps[-1] == 40


def test_logging_a_run_that_never_started_gives_zero_steps(tmp_path):
    assert feed_logger(RunDir(tmp_path / "run"), "tensorboard", Heard()) == 0


# --- by their own readers ---------------------------------------------------------------------------------------------


def test_tensorboard_holds_recorded_values(run):
    feed_logger(run, "tensorboard")
    read = scalars(run.path / "tensorboard")
    losses = [(record.step + 1, record.loss) for record in run.records(0)]
    assert [step for step, _ in read["train/loss"]] == [step for step, _ in losses]
    assert [value for _, value in read["train/loss"]] == pytest.approx([loss for _, loss in losses], rel=1e-6)
    assert read["val/loss"] == [(10, 1.5), (40, 1.25)]
    times = EventAccumulator(str(run.path / "tensorboard"))
    times.Reload()
    assert times.Scalars("train/lr")[1].wall_time == pytest.approx(STARTED + 0.125)


def test_tensorboard_has_hyperparameters(run):
    from tensorboard.plugins.hparams import metadata

    feed_logger(run, "tensorboard")
    read = EventAccumulator(str(run.path / "tensorboard"))
    read.Reload()
    content = read.summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
    found = metadata.parse_session_start_info_plugin_data(content)
    assert found.hparams["batch"].number_value == 16
    assert found.hparams["model"].string_value == "char"
    assert found.group_name


class Child:
    """The process that `evener train --log` starts."""

    def __init__(self, run, name):
        argv = [sys.executable, "-m", "evener.report.export.logger_feed", str(run.path), name]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE)
        self.run, self.name = run, name

    def wait_for(self, steps):
        deadline = time.monotonic() + DEADLINE_S
        while read_cursor(self.run, self.name).steps < steps:
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.05)


@exhaustive
def test_killed_logger_and_successor_log_each_step_once(run):
    whole = {rank: lines_of(run, rank) for rank in (0, 1)}

    def has(steps):
        for rank in (0, 1):
            with run.steps_path(rank).open("ab") as file:
                there = len(lines_of(run, rank))
                file.write(b"".join(whole[rank][there:steps]))

    for rank in (0, 1):
        run.steps_path(rank).write_bytes(b"")
    first = Child(run, "tensorboard")
    has(10)
    first.wait_for(10)
    has(20)
    first.wait_for(20)
    first.process.kill()
    first.process.wait()
    has(30)
    second = Child(run, "tensorboard")
    second.wait_for(30)
    has(40)
    second.process.stdin.close()  # whoever followed the run is gone, in whatever way
    assert second.process.wait(DEADLINE_S) == 0
    read = scalars(run.path / "tensorboard")
    assert [step for step, _ in read["train/loss"]] == list(range(1, 41))
    assert len(list((run.path / "tensorboard").iterdir())) == 2


def test_tensorboard_rewrites_steps_not_yet_acknowledged(run):
    """As after a crash between the two."""
    feed_logger(run, "tensorboard")
    path = run.path / "loggers" / "tensorboard.json"
    write_atomic(
        path,
        msgspec.json.encode(
            msgspec.structs.replace(read_cursor(run, "tensorboard"), steps=30, evaluated=30, tokens=30 * 1024.0)
        ),
    )
    feed_logger(run, "tensorboard")
    read = scalars(run.path / "tensorboard")
    assert [step for step, _ in read["train/loss"]] == list(range(1, 41))
    assert [step for step, _ in read["val/loss"]] == [10, 40]


def records_of_wandb(path):
    """A .wandb file is a log of LevelDB behind a header of seven bytes; its records are wandb's own protocol buffers.

    [github.com/google/leveldb, doc/log_format.md: blocks of 32 KiB; checksum, length, type; 1 whole, 2 first, 4 last]
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part = data[at + 7 : at + 7 + length]
        assert checksum == zlib.crc32(bytes([kind]) + part)
        at, parts = at + 7 + length, parts + part
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def rows_of_wandb(folder):
    """(configuration, history rows, ids) of all sessions."""
    config, rows, ids = {}, [], set()
    for file in sorted(folder.glob("offline-run-*/*.wandb"), key=os.path.getmtime):
        for record in records_of_wandb(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            elif kind == "history":
                rows.append({"/".join(one.nested_key) or one.key: json.loads(one.value_json)
                             for one in record.history.item})  # fmt: skip
    return config, rows, ids


@exhaustive
def test_wandb_offline_logs_each_step_once(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    whole = {rank: lines_of(run, rank) for rank in (0, 1)}
    for rank in (0, 1):
        write_atomic(run.steps_path(rank), b"".join(whole[rank][:25]))
    for steps in (25, 40):
        for rank in (0, 1):
            write_atomic(run.steps_path(rank), b"".join(whole[rank][:steps]))
        child = Child(run, "wandb")
        child.wait_for(steps)
        child.process.stdin.close()
        assert child.process.wait(DEADLINE_S) == 0
    config, rows, ids = rows_of_wandb(run.path / "wandb")
    assert len(ids) == 1  # one run, that goes on
    assert config["batch"] == 16
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 41))
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses == pytest.approx([record.loss for record in run.records(0)])
    assert [(row["step"], row["val/loss"]) for row in rows if "val/loss" in row] == [(10, 1.5), (40, 1.25)]


@exhaustive
def test_mlflow_logs_each_step_once(run, tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="mlflow is not whole: it keeps runs in a database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    whole = {rank: lines_of(run, rank) for rank in (0, 1)}
    for steps in (25, 40):
        for rank in (0, 1):
            write_atomic(run.steps_path(rank), b"".join(whole[rank][:steps]))
        feed_logger(run, "mlflow")
    client = tracking.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("evener").experiment_id])
    assert found.info.run_name == "run"
    assert found.info.status == "FINISHED"
    assert found.data.params["batch"] == "16"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [one.step for one in history] == list(range(1, 41))
    assert [one.value for one in history] == pytest.approx([record.loss for record in run.records(0)])
    assert [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, "val/loss")] == [
        (10, 1.5), (40, 1.25)
    ]  # fmt: skip
    assert history[1].timestamp == pytest.approx(1000 * (STARTED + 0.125), abs=1)


@exhaustive
def test_trackio_logs_each_step_once(run, tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    whole = {rank: lines_of(run, rank) for rank in (0, 1)}
    for steps in (25, 40):
        for rank in (0, 1):
            write_atomic(run.steps_path(rank), b"".join(whole[rank][:steps]))
        child = Child(run, "trackio")
        child.wait_for(steps)
        child.process.stdin.close()
        assert child.process.wait(DEADLINE_S) == 0
    code = """if True:
        import json, trackio
        from trackio.sqlite_storage import SQLiteStorage
        (run,) = trackio.Api().runs("evener")
        print(json.dumps([run.name, run.config, SQLiteStorage.get_logs("evener", run.name)], default=str))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, config, rows = json.loads(done.stdout.splitlines()[-1])
    assert name.startswith("run-")
    assert config["batch"] == 16
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 41))
    assert sorted((row["step"], row["val/loss"]) for row in rows if "val/loss" in row) == [(10, 1.5), (40, 1.25)]


# --- the verbs --------------------------------------------------------------------------------------------------------


def test_report_logs_a_finished_run(run):
    told = [CliRunner().invoke(app, ["report", str(run), "--log", "tensorboard"], catch_exceptions=False)
            for _ in range(2)]  # fmt: skip
    assert f"tensorboard: sent 40 steps of {run}, 40 in all" in told[0].stderr
    assert f"tensorboard: sent 0 steps of {run}, 40 in all" in told[1].stderr
    assert len(scalars(run.path / "tensorboard")["train/loss"]) == 40
    assert not (run.path / "report.html").exists()


def test_missing_logger_package_is_reported_before_start(monkeypatch):
    assert parse_loggers(["tensorboard", "wandb,tensorboard"]) == ["tensorboard", "wandb"]
    monkeypatch.setattr(experiment_loggers, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--log mlflow: the package mlflow is not installed here") as told:
        CliRunner().invoke(app, ["train", "--data", "nowhere", "--log", "mlflow"], catch_exceptions=False)
    assert told.value.hint.startswith("pip install 'evener[mlflow]'")
    with pytest.raises(UsageError, match="--log wandbb: expected tensorboard, wandb, trackio, mlflow"):
        parse_loggers(["wandbb"])


def test_folder_named_like_a_logger_does_not_count_as_installed(tmp_path, monkeypatch):
    (tmp_path / "mlflow").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    if experiment_loggers.find_spec("mlflow").origin is None:  # else the real one is here, too, and is meant
        with pytest.raises(UsageError, match="not installed"):
            parse_loggers(["mlflow"])


def test_resumed_run_keeps_its_loggers(run):
    assert cli_loggers.select_loggers(None, run) == []
    register_loggers(run, ["tensorboard"])
    assert registered_loggers(run) == cli_loggers.select_loggers(None, run) == ["tensorboard"]
    assert cli_loggers.select_loggers(["wandb"], run) == ["wandb"]
    assert read_cursor(run, "tensorboard").id is None


def test_failing_logger_does_not_stop_the_run(run, monkeypatch, capsys):
    """Where its settings name a server that is not there; the other is told all the same."""
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    seen = []
    with cli_loggers.feed_loggers(run, ["tensorboard", "wandb"]) as feeding:
        observe = feeding(seen.append)
        observe({"event": "start", "time": 0.0})
    assert seen == [{"event": "start", "time": 0.0}]
    told = capsys.readouterr().err
    assert told.count("warning: wandb: ") == 1
    assert "the run goes on without it" in told
    assert f"evener report {run} --log wandb sends it the rest" in told
    assert len(scalars(run.path / "tensorboard")["train/loss"]) == 40
    with pytest.raises(RunError, match=r"^wandb: "):
        cli_loggers.backfill_loggers(run, ["wandb"])


def test_non_finite_values_are_not_logged(run):
    """JSON has none of them: the recorder writes null, which is told as nothing."""
    rows = dict(heard(run).rows)
    assert all(math.isfinite(value) for values in rows.values() for value in values.values())
