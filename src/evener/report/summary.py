"""What came out of a run, in a few figures? Everything that explains, compares or draws a run reads this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from evener.core.finding import Finding
from evener.core.plan import read_prediction
from evener.core.prediction import Option, Prediction
from evener.core.rundir import Manifest, RunDir
from evener.core.step import PARTS, Fidelity, StepCost, StepRecord, aligned, noise_scale
from evener.core.units import median, percentile

WARMUP_STEPS = 3  # steps that are left out of rates, where the run is long enough
THIRD_STEPS = 5  # fewer steps in a third of a run do not tell whether it slowed down


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a run, on one rank: medians over its steps."""

    compute_s: float | None
    cpu_s: float | None  # processor seconds a step


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: medians over its steps after the warm-up."""

    rank: int
    tokens: float | None  # a step
    wall_s: float | None
    cost: StepCost
    typical: StepCost  # the median step divided: these parts do sum to it, medians of parts need not
    bytes: int | None  # a step, sent: the mean, for a strategy need not send the same in every step
    sync_s: float | None
    cpus: float | None  # cores that the process really ran on: CPU seconds a second
    cpu_s: float | None = None  # processor seconds of the typical step
    thirds: tuple[Pace, Pace] | None = None  # the first third of the run and the last; None: too few steps


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run. Rates are medians over steps of the manifest's ranks after the warm-up; None = not measured.

    Where replicas agree every so many steps, a step is the mean of such a round.
    """

    run_dir: str
    manifest: Manifest
    num_steps: int  # taken and recorded by all ranks, over all starts of the run
    tokens_per_step: int
    step_p50_s: float | None
    step_p95_s: float | None
    tokens_per_s: float | None
    sync_p50_s: float | None  # all-reduces of one step in flight, slowest rank
    sync_p95_s: float | None
    ranks: list[RankSummary]
    losses: dict[int, float | None]  # by step
    prediction: Prediction | None = None  # None: nothing was predicted
    findings: list[Finding] = []  # what was found wrong with hosts, as far as the events tell
    noise_tokens: float | None = None  # gradient noise scale in the second half of the run; None: too few samples
    fidelity: Fidelity | None = None  # medians of what a lossy strategy made of gradients

    @property
    def predicted(self) -> Option | None:
        """What was predicted of this run; None where nothing was, or of another number of ranks."""
        if self.prediction is None:
            return None
        chosen = next((each for each in self.prediction.options if each.name == self.prediction.chosen), None)
        return chosen if chosen and len(chosen.ranks) == self.manifest.world_size else None

    @property
    def cores(self) -> int:
        """Processors of the machine that the run might use."""
        return sum(host.cores for host in self.manifest.hosts)

    @property
    def threads(self) -> int:
        """Threads of each rank."""
        return self.manifest.ranks[0].threads

    @property
    def last_loss(self) -> float | None:
        """Of the last step in which it was measured."""
        return next((loss for loss in reversed(self.losses.values()) if loss is not None), None)

    def mean_part(self, part: str) -> float | None:
        """The mean over ranks of one part's median."""
        values = [getattr(rank.cost, part) for rank in self.ranks]
        measured = [value for value in values if value is not None]
        return sum(measured) / len(measured) if measured else None


def records_of(rundir: RunDir) -> dict[int, list[StepRecord]]:
    """What every rank recorded, also those of an earlier start that had more of them."""
    return {rank: rundir.records(rank) for rank in rundir.recorded_ranks()}


def summarize(rundir: RunDir) -> Summary:
    """Read a run directory."""
    manifest = rundir.manifest()
    steps = aligned(records_of(rundir))
    ranks = list(range(manifest.world_size))
    ours = [of_step for of_step in steps if list(of_step) == ranks]  # earlier starts may have had other ranks
    warm = in_rounds(ours[min(WARMUP_STEPS, len(ours) // 4) :], manifest.roster.sync.every)
    walls = [of_step[0].wall_s for of_step in warm]
    of_steps = ([record.sync_s for record in step.values() if record.sync_s is not None] for step in warm)
    syncs = [max(of_step) for of_step in of_steps if of_step]
    tokens = round(median([sum(record.tokens for record in of_step.values()) for of_step in warm]) or 0)
    step_p50_s = median(walls)
    by_wall = sorted(warm, key=lambda of_step: of_step[0].wall_s)
    middle = by_wall[len(walls) // 4 : len(walls) - len(walls) // 4]
    return Summary(
        run_dir=str(rundir),
        manifest=manifest,
        num_steps=steps[-1][0].step + 1 if steps else 0,
        tokens_per_step=tokens,
        step_p50_s=step_p50_s,
        step_p95_s=percentile(walls, 0.95) if walls else None,
        tokens_per_s=tokens / step_p50_s if step_p50_s else None,
        sync_p50_s=median(syncs),
        sync_p95_s=percentile(syncs, 0.95) if syncs else None,
        ranks=[
            _rank_summary(rank, [step[rank] for step in warm], [step[rank] for step in middle], step_p50_s)
            for rank in ranks
        ],
        losses={of_step[0].step: of_step[0].loss for of_step in steps},
        prediction=read_prediction(rundir),
        noise_tokens=noise_scale([of_step[0] for of_step in steps]),
        fidelity=_fidelity([of_step[0] for of_step in steps]),
        findings=_findings(rundir.events()),
    )


def _fidelity(records: list[StepRecord]) -> Fidelity | None:
    found = [record.fidelity for record in records if record.fidelity is not None]
    error, cosine = (median([getattr(one, name) for one in found]) for name in ("error", "cosine"))
    return None if error is None or cosine is None else Fidelity(error=error, cosine=cosine)


def in_rounds(steps: Sequence[dict[int, StepRecord]], every: int) -> list[dict[int, StepRecord]]:
    """Steps as they repeat: the mean of every complete round, one of whose steps costs what the others do not.

    Where no round is complete, the mean of what there is.
    """
    if every == 1 or not steps:
        return list(steps)
    rounds: dict[int, list[dict[int, StepRecord]]] = {}
    for of_step in steps:
        rounds.setdefault(of_step[0].step // every, []).append(of_step)
    complete = [one for one in rounds.values() if len(one) == every] or [list(steps)]
    return [{rank: _mean_record([of_step[rank] for of_step in one]) for rank in one[0]} for one in complete]


def _mean_record(records: Sequence[StepRecord]) -> StepRecord:
    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return msgspec.structs.replace(
        records[-1],
        tokens=sum(record.tokens for record in records) / len(records),
        wall_s=sum(record.wall_s for record in records) / len(records),
        cost=StepCost(**{part: mean([getattr(record.cost, part) for record in records]) for part in PARTS}),
        sync_s=mean([record.sync_s for record in records]),
        cpu_s=mean([record.cpu_s for record in records]),
        bytes=round(sum(record.bytes for record in records) / len(records)),
    )


def _findings(events: list[dict[str, Any]]) -> list[Finding]:
    """Events that are findings about a host: named by their check, with its host and the evidence."""
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


def _typical(records: list[StepRecord], step_s: float | None) -> StepCost:
    """Means over the middle half of the steps, which no outlier enters, scaled to the median step.

    Waiting comes and goes: where two ranks are late in turns, each one's median wait is small and its mean is not.
    """
    parts = {part: [getattr(record.cost, part) for record in records] for part in PARTS}
    return StepCost(**{part: _scaled(values, records, step_s) for part, values in parts.items()})


def _scaled(values: list[float | None], records: list[StepRecord], step_s: float | None) -> float | None:
    measured = [value for value in values if value is not None]
    if not measured or not step_s:
        return None
    mean_wall_s = sum(record.wall_s for record in records) / len(records)
    return sum(measured) / len(measured) * step_s / mean_wall_s


def _rank_summary(
    rank: int, records: list[StepRecord], middle_half: list[StepRecord], step_s: float | None
) -> RankSummary:
    def middle(values: list[float | None]) -> float | None:
        return median([value for value in values if value is not None])

    def pace(of: list[StepRecord]) -> Pace:
        return Pace(
            compute_s=middle([record.cost.compute_s for record in of]), cpu_s=middle([record.cpu_s for record in of])
        )

    third = len(records) // 3
    return RankSummary(
        rank=rank,
        tokens=median([record.tokens for record in records]),
        wall_s=median([record.wall_s for record in records]),
        cost=StepCost(**{part: middle([getattr(record.cost, part) for record in records]) for part in PARTS}),
        typical=_typical(middle_half, step_s),
        bytes=round(sum(record.bytes for record in records) / len(records)) if records else None,
        sync_s=middle([record.sync_s for record in records]),
        cpus=middle([record.cpu_s / record.wall_s if record.cpu_s is not None else None for record in records]),
        cpu_s=_scaled([record.cpu_s for record in middle_half], middle_half, step_s),
        thirds=(pace(records[:third]), pace(records[-third:])) if third >= THIRD_STEPS else None,
    )


def as_result(summary: Summary) -> dict[str, Any]:
    """What `train --json` and `bench --json` print of a run."""
    result = summary.manifest.result
    return {
        "run_dir": summary.run_dir,
        "verdict": summary.manifest.verdict,
        "steps": summary.num_steps,
        "tokens_per_s": summary.tokens_per_s,
        "loss": result.loss if result else summary.last_loss,
        "val_loss": result.val_loss if result else None,
        "replicas_agree": result.replicas_agree if result else None,
        "num_params": summary.manifest.num_params,
        "peak_memory_bytes": result.peak_memory_bytes if result else None,
        "noise_scale_tokens": summary.noise_tokens,
        "all_reduce_p50_s": summary.sync_p50_s,
        "all_reduce_p95_s": summary.sync_p95_s,
        "ranks": [
            {"rank": rank.rank, "wall_s": rank.wall_s, "cost": msgspec.to_builtins(rank.cost)} for rank in summary.ranks
        ],
        "predicted": _predicted(summary),
    }


def _predicted(summary: Summary) -> dict[str, Any] | None:
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
