"""Read a run into dataframes of pandas or polars, whichever is installed, for notebooks.

    run = evener.read_run("runs/mine")
    run.steps.groupby("rank").wait_s.mean()        # one row per step and rank
    run.evaluations.plot("step", "val_loss")
    run.events; run.result; run.spec["train"]["lr"]

A frame is read on first access and cached; read the run again to see newer steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec

from evener.core.base.errors import UsageError, did_you_mean
from evener.core.base.shell import quote_word
from evener.core.run.rundir import Manifest, RunDir
from evener.core.run.step_cost import PHASES, StepRecord, align_steps, first_rank_record
from evener.report.read.recorded_run import val_losses
from evener.report.read.run_summary import RunSummary, read_records, summarize_run, summary_json

Engine = Literal["pandas", "polars"]
ENGINES: tuple[Engine, ...] = ("pandas", "polars")
# of a column; "time" is Unix time and becomes a datetime in UTC
ColumnType = Literal["whole", "number", "text", "time"]

STEP_COLUMNS: dict[str, ColumnType] = {
    "step": "whole", "rank": "whole", "host": "text", "epoch": "whole", "tokens": "number", "loss": "number",
    "wall_s": "number", **dict.fromkeys(PHASES, "number"), "sync_s": "number", "cpu_s": "number", "bytes": "whole",
    "members": "whole", "lr": "number", "grad_norm": "number", "noise_norm_sq": "number", "noise_trace": "number",
    "error": "number", "cosine": "number", "ended": "time",
}  # fmt: skip
EVALUATION_COLUMNS: dict[str, ColumnType] = {"step": "whole", "tokens": "number", "val_loss": "number"}
EVENT_COLUMNS: dict[str, ColumnType] = {"time": "time", "event": "text", "step": "number", "facts": "text"}


class RunFrames:
    """A run as dataframes. Every step appears once, as taken by the ranks that the final model comes from."""

    def __init__(self, rundir: RunDir, engine: Engine) -> None:
        self.path, self.engine = rundir.path, engine
        self._rundir = rundir

    def __repr__(self) -> str:
        return f"<run {self.path}: {self.manifest.verdict}, frames of {self.engine}>"

    @cached_property
    def manifest(self) -> Manifest:
        """Versions, hosts, ranks, corpus, start and end."""
        return self._rundir.manifest()

    @property
    def spec(self) -> dict[str, Any]:
        """The run's settings, with all defaults: {"train": {"steps": 200, …}, …}."""
        tree: dict[str, Any] = msgspec.to_builtins(self.manifest.spec)
        return tree

    @property
    def result(self) -> dict[str, Any]:
        """The output of `evener report --json`: rates, losses, median step phases by rank, the prediction."""
        return summary_json(self._summary)

    @cached_property
    def steps(self) -> Any:
        """One row per step and rank, with units in the names. `step` counts from 0; None = not measured."""
        hosts = {rank.rank: rank.host for rank in self.manifest.ranks}
        rows = [
            _step_row(rank, hosts.get(rank), record) for of_step in self._aligned for rank, record in of_step.items()
        ]
        return self._frame(STEP_COLUMNS, rows)

    @cached_property
    def evaluations(self) -> Any:
        """One row per evaluation: steps taken, tokens read, validation loss."""
        of_steps = [sum(record.tokens for record in by_rank.values()) for by_rank in self._aligned]
        ends = [first_rank_record(by_rank).step + 1 for by_rank in self._aligned]
        tokens = dict(zip(ends, accumulate(of_steps), strict=True))
        losses = val_losses(self.manifest, self._rundir.events())
        return self._frame(EVALUATION_COLUMNS, [(step, tokens.get(step), loss) for step, loss in losses])

    @cached_property
    def events(self) -> Any:
        """One row per event, in order; its other fields stand in `facts`, as JSON."""
        rows = []
        for event in self._rundir.events():
            step = event.get("step")
            facts = {name: value for name, value in event.items() if name not in ("time", "event", "step")}
            known = step if isinstance(step, int) and not isinstance(step, bool) else None
            rows.append((event["time"], event["event"], known, json.dumps(facts)))
        return self._frame(EVENT_COLUMNS, rows)

    @cached_property
    def _summary(self) -> RunSummary:
        return summarize_run(self._rundir)

    @cached_property
    def _aligned(self) -> list[dict[int, StepRecord]]:
        return align_steps(read_records(self._rundir))

    def _frame(self, kinds: dict[str, ColumnType], rows: Iterable[tuple[Any, ...]]) -> Any:
        columns = list(map(list, zip(*rows, strict=True))) or [[] for _ in kinds]
        named = dict(zip(kinds, columns, strict=True))
        return (_pandas_frame if self.engine == "pandas" else _polars_frame)(kinds, named)


def read_run(path: str | Path, engine: Engine | None = None) -> RunFrames:
    """Read the run in this directory; `engine` is the dataframe package (default: pandas, else polars).

    Raise UsageError if neither is installed or there is no run, CheckpointError if the run is damaged.
    """
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"engine {engine!r}: expected pandas or polars", hint=did_you_mean(engine, ENGINES))
    installed = next((name for name in ([engine] if engine else ENGINES) if find_spec(name) is not None), None)
    if installed is None:
        missing = engine or "pandas or polars"
        raise UsageError(
            f"read_run needs {missing}, which is not installed", hint=f"pip install {quote_word(engine or 'pandas')}"
        )
    rundir = RunDir(path)
    rundir.manifest()  # fail here on a mistyped path
    return RunFrames(rundir, installed)


def _step_row(rank: int, host: str | None, record: StepRecord) -> tuple[Any, ...]:
    """Return a row of STEP_COLUMNS."""
    noise, fidelity = record.noise, record.fidelity
    return (record.step, rank, host, record.epoch, record.tokens, record.loss, record.wall_s,
            *(getattr(record.cost, part) for part in PHASES), record.sync_s, record.cpu_s, record.bytes, record.members,
            record.lr, record.grad_norm, noise and noise.norm_sq, noise and noise.trace,
            fidelity and fidelity.error, fidelity and fidelity.cosine, record.ended)  # fmt: skip


def _pandas_frame(kinds: dict[str, ColumnType], columns: dict[str, list[Any]]) -> Any:
    import pandas as pd

    def series(kind: ColumnType, values: list[Any]) -> Any:
        if kind == "time":
            return pd.to_datetime(pd.Series(_to_microseconds(values), dtype="int64"), unit="us", utc=True)
        dtypes = {"whole": "int64", "number": "float64", "text": "string"}
        return pd.Series(values, dtype=dtypes[kind])

    return pd.DataFrame({name: series(kind, columns[name]) for name, kind in kinds.items()})


def _polars_frame(kinds: dict[str, ColumnType], columns: dict[str, list[Any]]) -> Any:
    import polars as pl

    dtypes = {"whole": pl.Int64, "number": pl.Float64, "text": pl.String, "time": pl.Int64}
    given = {name: _to_microseconds(values) if kinds[name] == "time" else values for name, values in columns.items()}
    frame = pl.DataFrame(given, schema={name: dtypes[kind] for name, kind in kinds.items()})
    moments = [pl.col(name).cast(pl.Datetime("us", "UTC")) for name, kind in kinds.items() if kind == "time"]
    return frame.with_columns(moments)


def _to_microseconds(values: list[float]) -> list[int]:
    """Convert Unix seconds to the integer microseconds that both packages use."""
    return [round(1e6 * value) for value in values]
