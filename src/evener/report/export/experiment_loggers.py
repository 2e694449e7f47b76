"""Log a run to TensorBoard, Weights & Biases, Trackio or MLflow.

    class ExperimentLogger: begin(run) → the logger's id of the run · log(step, unix_s, values) · close(verdict)

Each is a third-party package, imported only when it is used, in its own process (logger_feed.py) that reads the run's
files. The package's own settings apply: WANDB_MODE=offline, WANDB_PROJECT, TRACKIO_DIR, MLFLOW_TRACKING_URI, …
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec

from evener.core.base.errors import UsageError, did_you_mean
from evener.core.base.shell import quote_word
from evener.core.run.run_spec import FLAGS
from evener.core.run.rundir import Manifest, RunDir

PROJECT = "evener"  # default project or experiment name, unless the logger's own setting names another
HyperparameterValue = str | int | float | bool


class LoggedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a run that a logger gets before the first step."""

    name: str
    run_dir: Path
    hyperparameters: dict[str, HyperparameterValue]  # hyperparameters: those requested, and those in effect
    started: float
    first_step: int  # logging (re)starts here: discard earlier values from this step on
    id: str | None  # what `begin` returned when this run was first logged; None: not logged yet


class ExperimentLogger(Protocol):
    """Receives a run's steps in order, each once. `values` have names such as train/loss."""

    def begin(self, run: LoggedRun) -> str: ...
    def log(self, step: int, unix_s: float, values: Mapping[str, float]) -> None: ...
    def flush(self) -> None:
        """Write all logged values, so that none is lost if this process is killed afterwards."""

    def close(self, verdict: str) -> None: ...


def hyperparameters_of(manifest: Manifest) -> dict[str, HyperparameterValue]:
    """Return the spec's values by flag name, except --out, and the values that "auto" resolved to."""
    requested = {flag.name[2:]: flag.value(manifest.spec) for flag in FLAGS.values() if flag.field != "out"}
    effective = {"num-params": manifest.num_params, "world-size": manifest.world_size,
             "ran-sync": str(manifest.roster.sync), "ran-dtype": manifest.roster.dtypes_text,
             "ran-backend": manifest.roster.backend, "hosts": ", ".join(manifest.roster.hosts),
             **{f"version-{name}": version for name, version in manifest.versions.items()}}  # fmt: skip
    return {name: value for name, value in (requested | effective).items() if value is not None}


# --- the loggers ------------------------------------------------------------------------------------------------------


class TensorBoardLogger:
    """Event files in RUN/tensorboard: `tensorboard --logdir runs` shows all runs."""

    def begin(self, run: LoggedRun) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(RunDir(run.run_dir).inside("tensorboard")), flush_secs=1)
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=run.started, step=run.first_step, session_log=start))
        if run.id is None:
            summary = hparams_pb(run.hyperparameters, trial_id=run.name, start_time_secs=run.started)
            self._writer.add_event(Event(wall_time=run.started, summary=_to_writer_summary(summary)))
        return run.name

    def log(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=unix_s, step=step, summary=Summary(value=shown)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, verdict: str) -> None:
        self._writer.close()


def _to_writer_summary(summary: Any) -> Any:
    """Convert a Summary to the class that the event writer expects: TensorBoard has two of that name."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.FromString(summary.SerializeToString())


class WandbLogger:
    """A run in the project that WANDB_PROJECT names (default: evener). Rows carry a `step`: order does not matter."""

    def begin(self, run: LoggedRun) -> str:
        import wandb

        RunDir(run.run_dir).inside("wandb")  # it writes there
        settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_machine_info=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=run.name, id=run.id, resume="allow",
            config=dict(run.hyperparameters), dir=os.environ.get("WANDB_DIR", str(run.run_dir)), settings=settings,
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, "time": unix_s, **values})

    def flush(self) -> None:  # wandb hands each row to its own process, which outlives this one
        pass

    def close(self, verdict: str) -> None:
        self._run.finish(exit_code=1 if verdict == "failed" else 0)


class TrackioLogger:
    """A run in the project that TRACKIO_PROJECT names (default: evener). Trackio identifies runs by name only."""

    def begin(self, run: LoggedRun) -> str:
        import trackio

        name = run.id or f"{run.name}-{time.strftime('%y%m%d-%H%M%S', time.gmtime(run.started))}"
        self._run = trackio.init(project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=name,
                                 config=dict(run.hyperparameters), resume="allow" if run.id else "never", embed=False,
                                 auto_log_gpu=False, auto_log_cpu=False)  # fmt: skip
        return str(self._run.name)

    def log(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None:  # trackio writes at once in a thread, and has no call that waits for it
        pass

    def close(self, verdict: str) -> None:
        self._run.finish()


METRICS_PER_CALL = 500  # per MLflow call; its servers refuse more than 1000
PARAMS_PER_CALL = 100  # per MLflow call: its limit
MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # MLflow's run status


class MLflowLogger:
    """A run in the experiment MLFLOW_EXPERIMENT_NAME (default: evener) on the server MLFLOW_TRACKING_URI."""

    def begin(self, run: LoggedRun) -> str:
        from mlflow.entities import Param, RunStatus
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        self._pending_metrics: list[Any] = []
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if run.id is not None:
            self._id = run.id
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
            return self._id
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        self._id = str(self._client.create_run(experiment, int(1000 * run.started), run_name=run.name).info.run_id)
        params = [Param(key, str(value)) for key, value in run.hyperparameters.items()]
        for first in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self._id, params=params[first : first + PARAMS_PER_CALL])
        return self._id

    def log(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self._pending_metrics += [Metric(name, value, int(1000 * unix_s), step) for name, value in values.items()]
        if len(self._pending_metrics) >= METRICS_PER_CALL:
            self.flush()

    def flush(self) -> None:
        for first in range(0, len(self._pending_metrics), METRICS_PER_CALL):
            self._client.log_batch(self._id, metrics=self._pending_metrics[first : first + METRICS_PER_CALL])
        self._pending_metrics = []

    def close(self, verdict: str) -> None:
        self.flush()
        if verdict in MLFLOW_STATUS:  # else it is still running, and no longer followed
            self._client.set_terminated(self._id, MLFLOW_STATUS[verdict])


LOGGERS: dict[str, type[ExperimentLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
    "mlflow": MLflowLogger,
}


def parse_loggers(given: Sequence[str]) -> list[str]:
    """Parse logger names; raise UsageError if one is unknown or not installed here.

    >>> parse_loggers(["tensorboard,tensorboard"])
    ['tensorboard']
    """
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in LOGGERS:
            raise UsageError(f"--log {name}: expected {', '.join(LOGGERS)}", hint=did_you_mean(name, LOGGERS))
        package = find_spec(name)
        if package is None or package.origin is None:  # a folder of that name is not a package
            raise UsageError(
                f"--log {name}: the package {name} is not installed here, where the run is followed",
                hint=f"pip install 'evener[{name}]', or pip install {quote_word(name)}; the run's hosts do not need it",
            )
    return list(dict.fromkeys(names))
