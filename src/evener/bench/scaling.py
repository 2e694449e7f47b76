"""Is a second process worth it? The same global batches trained by 1, 2, … processes, side by side.

Every set-up gets the same seconds. Its losses must be those of one process: how the batch is divided changes the speed
and never what is learned.

    BENCH/bench.json     which runs belong together
    BENCH/CORPUS-N/      the run directory of N processes
    BENCH/scaling.png
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evener.core.errors import UsageError
from evener.core.files import write_atomic
from evener.core.prediction import Prediction
from evener.core.resolve import resolve
from evener.core.rundir import RunDir
from evener.core.spec import RunSpec
from evener.core.step import StepRecord
from evener.launch.fleet import plan_training
from evener.launch.here import prepare_here, stay_with, this_machine_connected
from evener.report.summary import Summary, summarize

FORMAT = 1
Predict = Callable[[RunSpec], Prediction | None]
Observer = Callable[[RunSpec], Callable[[StepRecord | dict[str, Any]], None]]


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """`bench.json`: run directories relative to the folder, in the order of their processes, by corpus."""

    format: int = FORMAT
    series: dict[str, list[str]]


def process_counts(cores: int) -> list[int]:
    """1, 2, 4, … up to the cores, the cores themselves included.

    >>> process_counts(2), process_counts(6), process_counts(1)
    ([1, 2], [1, 2, 4, 6], [1])
    """
    counts = [1]
    while counts[-1] * 2 <= cores:
        counts.append(counts[-1] * 2)
    return sorted({*counts, cores})


def specs(base: RunSpec, out: Path, corpora: Sequence[str], counts: Sequence[int]) -> dict[str, list[RunSpec]]:
    """The runs of a bench: only corpus, number of processes and place differ from `base`."""
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


def run(out: Path, series: dict[str, list[RunSpec]], observer: Observer, predict: Predict) -> dict[str, list[Summary]]:
    """Train them all, one after the other, and leave bench.json; `observer(spec)` is told of each as it begins.

    `predict(spec)` is what the planner says of a run before it starts.
    """
    if (out / "bench.json").exists():
        raise UsageError(f"{out}: holds a bench already", hint="another --out, or --force")
    found: dict[str, list[Summary]] = {}
    with this_machine_connected() as sessions:
        for corpus, runs in series.items():
            for spec in runs:
                assert spec.out is not None
                rundir = RunDir(spec.out)
                prepared = prepare_here(sessions, rundir, ranks=spec.machine.ranks)
                resolved, prediction = resolve(spec), predict(spec)
                plan, _ = plan_training(prepared, resolved, prepared.roster(resolved), resume=False)
                plan = msgspec.structs.replace(plan, prediction=prediction)
                ended = stay_with(rundir, plan, sessions, observer(spec))
                if any(state["stopped"] for state in ended.values()):
                    raise KeyboardInterrupt
                found.setdefault(corpus, []).append(summarize(rundir))
    names = {corpus: [Path(summary.run_dir).name for summary in runs] for corpus, runs in found.items()}
    write_atomic(out / "bench.json", msgspec.json.format(msgspec.json.encode(Bench(series=names)), indent=2))
    return found
