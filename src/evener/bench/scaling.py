"""Scaling benchmark on one machine: the same global batches trained by 1, 2, … processes.

Every set-up trains for the same number of seconds. Its losses must equal those of one process: how the batch is divided
changes the throughput and never the result.

    BENCH/bench.json     the runs of each corpus
    BENCH/CORPUS-N/      the run directory of N processes
    BENCH/scaling.png
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.file_io import write_atomic
from evener.core.run.prediction import Prediction
from evener.core.run.resolve import resolve
from evener.core.run.run_spec import RunSpec
from evener.core.run.step_cost import StepRecord
from evener.launch.follow_run import follow_run
from evener.launch.prepare_hosts import connect_hosts, prepare_hosts
from evener.launch.start_run import plan_training, started
from evener.report.read.run_summary import RunSummary, summarize_run

FORMAT = 1
Predictor = Callable[[RunSpec], Prediction | None]
ObserverFactory = Callable[[RunSpec], Callable[[StepRecord | dict[str, Any]], None]]


class ScalingBenchIndex(msgspec.Struct, frozen=True, kw_only=True):
    """`bench.json`: run directories relative to the folder, in the order of their processes, by corpus."""

    format: int = FORMAT
    series: dict[str, list[str]]


def process_counts(cores: int) -> list[int]:
    """Return 1, 2, 4, … up to the number of cores, and that number itself.

    >>> process_counts(2), process_counts(6), process_counts(1)
    ([1, 2], [1, 2, 4, 6], [1])
    """
    counts = [1]
    while counts[-1] * 2 <= cores:
        counts.append(counts[-1] * 2)
    return sorted({*counts, cores})


def bench_specs(base: RunSpec, out: Path, corpora: Sequence[str], counts: Sequence[int]) -> dict[str, list[RunSpec]]:
    """Return the runs of a bench: only corpus, number of processes and output folder differ from `base`."""
    return {
        Path(corpus).name: [
            msgspec.structs.replace(
                base,
                out=str(out / f"{Path(corpus).name}-{ranks}"),
                data=msgspec.structs.replace(base.data, data=corpus),
                machine=msgspec.structs.replace(base.machine, ranks=ranks),
            )
            for ranks in counts
        ]
        for corpus in corpora
    }


def train_series(
    out: Path, series: dict[str, list[RunSpec]], make_observer: ObserverFactory, predict: Predictor
) -> dict[str, list[RunSummary]]:
    """Train all runs one after the other, write bench.json and return the summaries by corpus.

    `make_observer(spec)` is called before each run and returns its observer. `predict(spec)` returns the planner's
    prediction for a run.
    """
    if (out / "bench.json").exists():
        raise UsageError(f"{out}: holds a bench already", hint="use another --out, or --force")
    summaries: dict[str, list[RunSummary]] = {}
    with connect_hosts(None) as hosts:
        for corpus, runs in series.items():
            for spec in runs:
                resolved = resolve(spec)
                prepared = prepare_hosts(hosts.with_ranks(spec.machine.ranks), resolved.rundir)
                run = plan_training(prepared, resolved, prepared.initial_roster(resolved), predict(spec))
                with started(run, hosts.sessions, lambda text: None):
                    ended = follow_run(run.rundir, run.plan, make_observer(spec))
                if any(state["stopped"] for state in ended.values()):
                    raise KeyboardInterrupt
                summaries.setdefault(corpus, []).append(summarize_run(run.rundir))
    names = {corpus: [Path(summary.run_dir).name for summary in runs] for corpus, runs in summaries.items()}
    write_atomic(
        out / "bench.json", msgspec.json.format(msgspec.json.encode(ScalingBenchIndex(series=names)), indent=2)
    )
    return summaries
