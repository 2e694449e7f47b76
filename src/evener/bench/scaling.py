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
from evener.core.cluster.fleet_file import Fleet, HostConfig, Rates
from evener.core.cluster.host_info import local_host_info
from evener.core.cluster.host_probe import DeviceProbeResult, HostProbeSpec
from evener.core.run.prediction import Prediction
from evener.core.run.resolve import ResolvedRun, resolve
from evener.core.run.run_spec import RunSpec
from evener.core.run.step_cost import StepRecord
from evener.launch.follow_run import follow_run
from evener.launch.prepare_hosts import connect_hosts, prepare_hosts
from evener.launch.probe_hosts import probe_devices
from evener.launch.start_run import plan_training, started
from evener.plan.choice.cluster import build_cluster
from evener.plan.choice.search import predict
from evener.report.read.run_summary import RunSummary, summarize_run

FORMAT = 1
PROBE_S = 8.0  # training time of the probe before the runs
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


def probe_local_rates(spec: RunSpec) -> dict[str, Rates]:
    """Measure this machine's rates with the model, from which the runs are predicted, by device."""
    model = spec.model
    request = HostProbeSpec(
        host="here",
        models=(model.model,),
        seconds=PROBE_S,
        dtype=model.dtype,
        dropout=model.dropout,
        device=spec.machine.device,
    )
    messages = probe_devices(None, request, lambda findings: None)
    return {item.device: item.rates for _, item in messages if isinstance(item, DeviceProbeResult)}


def _predict(resolved: ResolvedRun, rates: dict[str, Rates]) -> Prediction:
    name, ranks = local_host_info().host, resolved.spec.machine.ranks
    fleet = Fleet(hosts={name: HostConfig(address="local", ranks=ranks)}, rates={name: rates})
    return predict(resolved.job, build_cluster(fleet, resolved.job))


def train_series(
    out: Path, series: dict[str, list[RunSpec]], make_observer: ObserverFactory, rates: dict[str, Rates]
) -> dict[str, list[RunSummary]]:
    """Train all runs one after the other, write bench.json and return the summaries by corpus.

    `make_observer(spec)` is called before each run and returns its observer. Runs are predicted from this machine's
    `rates`, by device.
    """
    if (out / "bench.json").exists():
        raise UsageError(f"{out}: holds a bench already", hint="use another --out, or --force")
    summaries: dict[str, list[RunSummary]] = {}
    with connect_hosts(None) as hosts:
        for corpus, runs in series.items():
            for spec in runs:
                resolved = resolve(spec)
                prepared = prepare_hosts(hosts.with_ranks(spec.machine.ranks), resolved.rundir)
                run = plan_training(prepared, resolved, prepared.initial_roster(resolved), _predict(resolved, rates))
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
