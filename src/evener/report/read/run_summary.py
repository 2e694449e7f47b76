"""Summarize a run in a few figures, which every explanation, comparison and chart of a run reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from evener.core.base.units import median
from evener.core.cluster.finding import Finding
from evener.core.run.prediction import PlanOption, Prediction
from evener.core.run.run_plan import fleet_of_run, read_prediction
from evener.core.run.rundir import Manifest, RunDir
from evener.core.run.step_cost import Fidelity, StepRecord, align_steps, first_rank_record, noise_scale
from evener.core.run.step_statistics import RankSummary, summarize_steps
from evener.plan.choice.strategy_trial import StrategyComparison
from evener.report.read.event_log import describe_event, evaluations, first_failure
from evener.report.read.flop_rates import FlopRate, flop_rates
from evener.report.read.membership_changes import MembershipChange, membership_changes, split_brains
from evener.report.read.strategy_comparisons import strategy_comparisons


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run; None = not measured. Rates are medians over the steps since `manifest.since`, after warmup.

    With a sync strategy that exchanges every N steps, a step is the mean of such a round.
    """

    run_dir: str
    manifest: Manifest
    num_steps: int  # taken and recorded by all ranks, over all starts of the run
    tokens_read: float  # in these steps
    tokens_per_step: int
    step_p50_s: float | None
    step_p95_s: float | None
    tokens_per_s: float | None
    sync_p50_s: float | None  # collectives of one step in flight, without waiting for the last rank
    sync_p95_s: float | None
    ranks: list[RankSummary]
    flop_rates: list[FlopRate | None] = []  # by rank
    losses: dict[int, float | None]  # by step
    val_loss: float | None = None  # at the end, else of the last evaluation
    prediction: Prediction | None = None  # None: nothing was predicted
    findings: list[Finding] = []  # problems detected on hosts, from the events
    noise_scale_tokens: float | None = None  # gradient noise scale in the second half of the run; None: too few samples
    fidelity: Fidelity | None = None  # medians of the error that a lossy sync strategy adds
    membership_changes: list[MembershipChange] = []
    split_brains: list[str] = []  # a sentence for each membership epoch that was decided twice
    comparisons: list[StrategyComparison] = []  # of sync strategies, by --sync auto
    failure: str = ""  # why the run failed; "": it did not
    diverged_at: int | None = None  # of a failed run: the step whose loss or gradient was not finite
    elapsed_s: float | None = (
        None  # from the first to the last step's end on the rank with the most steps, pauses included
    )

    @property
    def predicted(self) -> PlanOption | None:
        """The prediction for the final roster; None if nothing was predicted for it."""
        return None if self.prediction is None else self.prediction.option_for(self.manifest.roster)

    @property
    def unit(self) -> str:
        """Return what a step counts: tokens, samples or batches."""
        return self.manifest.counted_unit

    @property
    def cores(self) -> int:
        """Processors that the run could use, on all hosts."""
        return sum(host.cores for host in self.manifest.hosts)

    @property
    def threads(self) -> list[int]:
        """Threads of each rank."""
        return [rank.threads for rank in self.manifest.ranks]

    @property
    def thread_range(self) -> str:
        """The fewest and the most threads of a rank as text: "2", or "1 to 3"."""
        return " to ".join(map(str, sorted({min(self.threads), max(self.threads)})))

    @property
    def threads_text(self) -> str:
        """The threads of a rank as text: "1 thread", "2 threads", or "1 to 3 threads"."""
        return f"{self.thread_range} {'thread' if max(self.threads) == 1 else 'threads'}"

    def rank_label(self, rank: RankSummary) -> str:
        """Return the rank's label for display."""
        return self.manifest.roster.rank_label(self.manifest.roster.members[rank.rank].rank)

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step in which it was measured; None if the run diverged."""
        if self.diverged_at is not None:
            return None
        return next((loss for loss in reversed(self.losses.values()) if loss is not None), None)


def read_records(rundir: RunDir) -> dict[int, list[StepRecord]]:
    """Read the records of every rank, including ranks that only an earlier start of the run had."""
    return {rank: rundir.records(rank) for rank in rundir.recorded_ranks()}


def summarize_run(rundir: RunDir) -> RunSummary:
    """Summarize the run in a run directory."""
    records = read_records(rundir)
    return summarize_records(rundir, align_steps(records), records, rundir.events())


def summarize_records(
    rundir: RunDir,
    steps: Sequence[dict[int, StepRecord]],
    records: Mapping[int, list[StepRecord]],
    events: list[dict[str, Any]],
) -> RunSummary:
    """Summarize a run from its events and the records of every rank; `steps` are the records, aligned."""
    manifest = rundir.manifest()
    medians = summarize_steps(steps, manifest)
    return RunSummary(
        run_dir=str(rundir),
        manifest=manifest,
        num_steps=first_rank_record(steps[-1]).step + 1 if steps else 0,
        tokens_read=sum(record.tokens for by_rank in steps for record in by_rank.values()),
        tokens_per_step=medians.tokens_per_step,
        step_p50_s=medians.step_p50_s,
        step_p95_s=medians.step_p95_s,
        tokens_per_s=medians.tokens_per_step / medians.step_p50_s
        if medians.tokens_per_step and medians.step_p50_s
        else None,
        sync_p50_s=medians.sync_p50_s,
        sync_p95_s=medians.sync_p95_s,
        ranks=medians.ranks,
        flop_rates=flop_rates(manifest, medians.ranks, medians.step_p50_s, fleet_of_run(rundir, manifest.roster.hosts)),
        losses={record.step: record.loss for record in map(first_rank_record, steps)},
        val_loss=_val_loss(manifest, events),
        prediction=read_prediction(rundir),
        noise_scale_tokens=noise_scale([first_rank_record(of_step) for of_step in steps]),
        fidelity=_fidelity([record for record in map(first_rank_record, steps) if record.step >= manifest.since]),
        findings=_findings(events),
        membership_changes=membership_changes(events, records),
        split_brains=split_brains(events),
        comparisons=strategy_comparisons(events),
        **_failure(manifest, events),
        elapsed_s=_elapsed_s(steps),
    )


def _failure(manifest: Manifest, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return why a run failed and the step at which it diverged, as fields of its summary."""
    event = first_failure(events) if manifest.verdict == "failed" else None
    if event is None:
        return {}
    told = describe_event(event, manifest)
    steps = [one.get("step") for one in events if one.get("event") == "run.nonfinite" and not one.get("goes_back")]
    return {
        "failure": told.description + (f"; {told.hint}" if told.hint else ""),
        "diverged_at": steps[-1] if steps and isinstance(steps[-1], int) else None,
    }


def _val_loss(manifest: Manifest, events: list[dict[str, Any]]) -> float | None:
    if manifest.result and manifest.result.val_loss is not None:
        return manifest.result.val_loss
    return next((loss for _, loss in reversed(evaluations(events))), None)


def _fidelity(records: list[StepRecord]) -> Fidelity | None:
    fidelities = [record.fidelity for record in records if record.fidelity is not None]
    error, cosine = (median([getattr(fidelity, name) for fidelity in fidelities]) for name in ("error", "cosine"))
    return None if error is None or cosine is None else Fidelity(error=error, cosine=cosine)


def _elapsed_s(steps: Sequence[Mapping[int, StepRecord]]) -> float | None:
    """Return the seconds from the first to the last step's end, by the clock of the rank with the most steps."""
    counted = Counter(rank for of_step in steps for rank in of_step)
    if not counted:
        return None
    [(most, _)] = counted.most_common(1)
    ended = [of_step[most].ended for of_step in steps if most in of_step]
    return ended[-1] - ended[0]


def _findings(events: list[dict[str, Any]]) -> list[Finding]:
    """Return the events that are findings about a host: named by their check, with host and evidence."""
    return [
        Finding(
            check=str(event["event"]),
            severity="warning",
            host=event["host"],
            evidence=event["evidence"],
            fix=str(event.get("fix", "")),
        )
        for event in events
        if isinstance(event.get("host"), str) and isinstance(event.get("evidence"), str)
    ]


def summary_json(summary: RunSummary) -> dict[str, Any]:
    """Return the JSON object that `train --json` and `bench --json` print for a run."""
    result = summary.manifest.result
    return {
        "run_dir": summary.run_dir,
        "verdict": summary.manifest.verdict,
        "steps": summary.num_steps,
        "since_step": summary.manifest.since,
        "tokens_per_s": summary.tokens_per_s,
        "step_p50_s": summary.step_p50_s,
        "step_p95_s": summary.step_p95_s,
        "loss": result.loss if result else summary.last_loss,
        "val_loss": summary.val_loss,
        "replicas_agree": result.replicas_agree if result else None,
        "num_params": summary.manifest.num_params,
        "peak_memory_bytes": result.peak_memory_bytes if result else None,
        "noise_scale_tokens": summary.noise_scale_tokens,
        "all_reduce_p50_s": summary.sync_p50_s,
        "all_reduce_p95_s": summary.sync_p95_s,
        "ranks": [
            {
                "rank": summary.manifest.roster.members[rank.rank].rank,
                "cost": msgspec.to_builtins(rank.typical),
                "bytes": rank.bytes,
                "flops_per_s": None if rate is None else rate.flops_per_s,
                "mfu": None if rate is None else rate.mfu,
            }
            for rank, rate in zip(summary.ranks, summary.flop_rates, strict=True)
        ],
        "predicted": _prediction_json(summary),
        "changes": msgspec.to_builtins(summary.membership_changes),
        "split_brains": summary.split_brains,
        "comparisons": msgspec.to_builtins(summary.comparisons),
    }


def _prediction_json(summary: RunSummary) -> dict[str, Any] | None:
    option = summary.predicted
    if option is None:
        return None
    return {
        "option": option.name,
        "step_s": option.step_s,
        "tokens_per_s": option.tokens_per_s,
        "step_difference": summary.step_p50_s / option.step_s - 1 if summary.step_p50_s else None,
        "ranks": [
            {"rank": member.rank, "host": member.host, "cost": msgspec.to_builtins(cost.cost), "sync_s": cost.sync_s,
             "bytes": cost.bytes, "memory_bytes": cost.memory_bytes}
            for member, cost in zip(option.roster.members, option.ranks, strict=True)
        ],
    }  # fmt: skip
