"""Explain a run, or the scaling of a series of runs, in sentences built from measured figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from evener.core.base.units import format_bytes, format_count, format_seconds, format_si, pluralize
from evener.core.run.step_cost import token_multiplier
from evener.core.run.step_statistics import RankSummary
from evener.plan.cost.penalty import max_compression_error, task_of
from evener.report.explain.causes import MIN_NAMED_SHARE, Cause, largest_causes, unexplained_s
from evener.report.explain.prediction_error import explain_prediction
from evener.report.explain.scaling_breakdown import ScalingComparison, scaling_causes
from evener.report.explain.speedup_verdict import MIN_SPEEDUP, speedup_verdict
from evener.report.explain.what_if import predict_alternatives
from evener.report.read import membership_changes
from evener.report.read.flop_rates import mfu_text
from evener.report.read.run_summary import RunSummary
from evener.report.read.stragglers import (
    busy_cpus,
    fastest_rank,
    has_straggler,
    is_on_cpus,
    is_oversubscribed,
    slowest_rank,
    straggler_reason,
    usable_contention,
)
from evener.report.read.strategy_comparisons import explain_strategy_choice

BOTTLENECK_SHARE = 0.15  # of a step: a phase other than compute is the bottleneck from here on
EARLY_STEPS = 50  # rounding differences have not grown yet in these
# relative difference of losses: more than this is not explained by summing in another order
SAME_MODEL_TOLERANCE = 1e-4
MIN_CPU_SHARE = 0.8  # of one core per thread: below this, something else used the cores
PHASE_DESCRIPTIONS = {
    "compute_s": "forward and backward",
    "exposed_sync_s": "communication that backward did not hide",
    "wait_s": "waiting for other ranks",
    "optimizer_s": "the update of the weights",
    "data_s": "waiting for input",
}


# --- one run ----------------------------------------------------------------------------------------------------------


def explain_run(summary: RunSummary) -> list[str]:
    """Return paragraphs about one run: its failure, the speedup verdict, the measurements, and the prediction error."""
    steps = pluralize(summary.num_steps, "step")
    failed = [f"The run failed after {steps}: {summary.failure}."] if summary.failure else []
    predicted = [" ".join(explain_prediction(summary, summary.prediction))] if summary.prediction else []
    verdict = speedup_verdict(summary, predict_alternatives(summary)).text
    return [*failed, verdict, *explain_measurements(summary), *predicted]


def explain_measurements(summary: RunSummary) -> list[str]:
    """Return paragraphs about one run: throughput, step breakdown, stragglers, communication, cores."""
    if not summary.step_p50_s:
        return []
    paragraphs = [_explain_throughput(summary), _explain_breakdown(summary)]
    if len(summary.ranks) > 1:
        paragraphs += [_explain_waiting(summary), _explain_all_reduce(summary)]
    if is_on_cpus(summary):
        paragraphs.append(_explain_cores(summary))
    if any(summary.flop_rates) or summary.manifest.program is not None:
        paragraphs.append(_explain_flops(summary))
    if summary.noise_scale_tokens or summary.fidelity:
        paragraphs.append(_explain_gradients(summary))
    if summary.comparisons:
        last, roster = summary.comparisons[-1], summary.manifest.roster
        step_s = summary.step_p50_s if str(roster.sync) == last.chosen else None
        paragraphs.append(explain_strategy_choice(last, summary.num_steps, step_s))
    if summary.membership_changes:
        paragraphs.append(membership_changes.explain_membership_changes(summary.membership_changes, summary.elapsed_s))
    paragraphs += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in summary.split_brains]
    return paragraphs


def _explain_gradients(summary: RunSummary) -> str:
    """Explain the gradient noise scale, and the error that a lossy sync strategy adds."""
    sentences = []
    if scale := summary.noise_scale_tokens:
        tokens, unit = summary.tokens_per_step, summary.unit
        more = token_multiplier(scale, tokens, 2)
        sentences.append(
            f"The gradients' noise scale is about {format_count(scale)} {unit}, in the second half of the run: at "
            f"this point a batch of {format_count(2 * tokens)} {unit} instead of {format_count(tokens)} would need "
            f"{more / 2:.2f} times as many steps for the same loss, and {more:.2f} times as many {unit}"
        )
    if fidelity := summary.fidelity:
        roster = summary.manifest.roster
        sync, task = roster.sync, task_of(summary.manifest.shape)
        max_error = max_compression_error(sync, roster.world_size, task)
        of_what = "changes" if sync.drifts else "gradients"
        measured = f"; the measured loss penalty holds up to {max_error:.1%}" if math.isfinite(max_error) else ""
        sentences.append(
            f"The sums of the {of_what} after {sync} differ from the exact ones by {fidelity.error:.1%} of their "
            f"length, cosine {fidelity.cosine:.4f} (medians){measured}; the error of one exchange is added to the next"
        )
    return ". ".join(sentences) + "."


def explain_bottleneck(summary: RunSummary) -> str:
    """Return one sentence that names the step's bottleneck."""
    if not summary.step_p50_s:
        return f"No step was recorded{summary.manifest.window_text}."
    rank = fastest_rank(summary) if has_straggler(summary) else slowest_rank(summary)
    cost = rank.typical
    shares = {part: (getattr(cost, part) or 0.0) / summary.step_p50_s for part in PHASE_DESCRIPTIONS}
    if any(getattr(cost, part) is None for part in PHASE_DESCRIPTIONS):
        return "The bottleneck is not known: not all phases of a step were measured."
    computing = f"forward and backward are {shares.pop('compute_s'):.0%} of each step"
    computing += f" on {summary.rank_label(rank)}" if has_straggler(summary) else ""
    largest = max(shares, key=lambda part: shares[part])
    if shares[largest] < BOTTLENECK_SHARE:
        return f"Limited by computing: {computing}."
    if largest == "wait_s" and has_straggler(summary):
        slow, waiting = summary.rank_label(slowest_rank(summary)), summary.rank_label(rank)
        return f"Limited by {slow}, for which {waiting} waits {shares[largest]:.0%} of each step; {computing}."
    return f"Limited by {PHASE_DESCRIPTIONS[largest]}, {shares[largest]:.0%} of each step; {computing}."


def _explain_throughput(summary: RunSummary) -> str:
    num, step_s = len(summary.ranks), summary.step_p50_s
    text = (
        f"A step trains on {summary.tokens_per_step:,} {summary.unit} and takes {format_seconds(step_s)} "
        f"(p50; p95 {format_seconds(summary.step_p95_s)}): {format_count(summary.tokens_per_s)} {summary.unit}/s."
    )
    if summary.manifest.window_text:
        text += f" These figures are{summary.manifest.window_text}."
    if num == 1:
        return text
    if summary.manifest.program is not None:  # how it divides its work is its own affair
        sent = max(rank.bytes or 0 for rank in summary.ranks)
        return f"{text} A rank sends {format_bytes(sent)} a step in collectives of torch.distributed."
    sync = summary.manifest.roster.sync
    if sync.drifts:
        return (
            f"{text} Each of the {num} processes, the ranks, has a whole copy of the model, its replica, and trains it "
            f"by itself for {pluralize(sync.every, 'step')} on its own part of each batch. Then the ranks average what "
            "they learned (DiLoCo), and the replicas are one model again."
        )
    if sync.is_sharded:
        others = "those of its host" if sync.kind == "hsdp" else "all others"
        return (
            f"{text} Each of the {num} processes, the ranks, holds a part of the weights and of the optimizer's state. "
            f"To compute gradients on its own part of the batch, it gathers the weights from {others}. Then the ranks "
            "add their gradients up, and each updates its own part of the weights."
        )
    return (
        f"{text} Each of the {num} processes, the ranks, has a whole copy of the model, its replica, and computes "
        "gradients on its own part of the batch. Before the update the ranks add their gradients up, which is called "
        "an all-reduce. So all of them take the same step, and the replicas stay equal."
    )


def _explain_breakdown(summary: RunSummary) -> str:
    slow, fast = slowest_rank(summary), fastest_rank(summary)
    if slow is fast:
        return f"Where its time goes: {_breakdown_text(summary, slow)}."
    if not has_straggler(summary):
        return (
            f"Where its time goes, much the same on every rank; on {summary.rank_label(slow)}: "
            f"{_breakdown_text(summary, slow)}."
        )
    return (
        f"Where its time goes on {summary.rank_label(slow)}, the slowest: {_breakdown_text(summary, slow)}. "
        f"On {summary.rank_label(fast)}, the fastest: {_breakdown_text(summary, fast)}."
    )


def _breakdown_text(summary: RunSummary, rank: RankSummary) -> str:
    step_s = summary.step_p50_s or 1.0
    costs = {name: getattr(rank.typical, part) for part, name in PHASE_DESCRIPTIONS.items()}
    measured = {name: cost for name, cost in costs.items() if cost is not None and cost >= 0.005 * step_s}
    texts = [
        f"{format_seconds(measured[name])} {name} ({measured[name] / step_s:.0%})"
        for name in sorted(measured, key=lambda name: -measured[name])
    ]
    return ", ".join(texts + [f"{name} was not measured" for name, cost in costs.items() if cost is None])


def _explain_waiting(summary: RunSummary) -> str:
    slow, fast = slowest_rank(summary), fastest_rank(summary)
    if any(rank.typical.wait_s is None for rank in summary.ranks):
        return "How long the ranks wait for each other was not measured."
    least_s, most_s = slow.typical.wait_s or 0.0, fast.typical.wait_s or 0.0
    if has_straggler(summary):
        return (
            f"The straggler is {summary.rank_label(slow)}: it waits least, {format_seconds(least_s)} a step, and "
            f"{summary.rank_label(fast)} waits {format_seconds(most_s)} for it. Why: "
            f"{straggler_reason(summary, slow, fast)}."
        )
    if most_s < MIN_NAMED_SHARE * (summary.step_p50_s or 1.0):
        return f"No rank holds the others up: none waits longer than {format_seconds(most_s)} a step."
    text = (
        f"No single rank is slow, yet all of them wait, {format_seconds(least_s)} to {format_seconds(most_s)} a "
        "step: now one is late, now another"
    )
    if not is_oversubscribed(summary):
        return text + "."
    return f"{text}, because {sum(summary.threads)} threads share {pluralize(summary.cores, 'core')}."


def _explain_all_reduce(summary: RunSummary) -> str:
    rank, step_s, in_flight_s = slowest_rank(summary), summary.step_p50_s or 1.0, summary.sync_p50_s
    exposed_s = rank.typical.exposed_sync_s
    if not in_flight_s:
        return "How long the all-reduces take was not measured."
    sync = summary.manifest.roster.sync
    what = "Weights and gradients" if sync.is_sharded else "All-reduces"
    text = f"{what} are under way for {format_seconds(in_flight_s)} of a step"
    if rank.bytes:
        text += f"; each rank sends {format_bytes(rank.bytes)} in them, {format_bytes(rank.bytes / in_flight_s)}/s"
    if exposed_s is None:
        return text + ". How much of that backward hid was not measured."
    if sync.drifts:
        of = f"the mean over {pluralize(sync.every, 'step')}, of which one exchanges"
        return (
            f"{text}: {of}. Of it the rank was blocked for {format_seconds(exposed_s)}, "
            f"{exposed_s / step_s:.0%} of a step."
        )
    hidden = max(0.0, 1 - exposed_s / in_flight_s)
    blocked = f"the rank was blocked for {format_seconds(exposed_s)}, {exposed_s / step_s:.0%} of the step"
    if sync.is_sharded:
        return f"{text}. Computing other layers hides {hidden:.0%} of their time; in the rest {blocked}."
    if hidden < MIN_NAMED_SHARE:
        return f"{text}. Backward hid none of it: {blocked}."
    return (
        f"{text}. They begin while backward still computes the gradients of earlier layers, which hides {hidden:.0%} "
        f"of their time; in the rest {blocked}."
    )


def _explain_flops(summary: RunSummary) -> str:
    """Explain how fast the ranks compute, and as what share of their hosts' matrix products."""
    counted = summary.manifest.flops
    missing = dict.fromkeys(one.missing for one in counted if one.missing)
    if not (known := [rate for rate in summary.flop_rates if rate is not None]):
        return f"FLOPs: not counted, {', '.join(missing)}." if missing else "FLOPs: not measured."
    rates = sorted(rate.flops_per_s for rate in known)
    each = " to ".join(dict.fromkeys(f"{format_si(rate)}FLOP/s" for rate in (rates[0], rates[-1])))
    text = f"Forward and backward compute {each}{' on each rank' if len(rates) > 1 else ''}, over the whole step. "
    if (mfu := mfu_text(summary.flop_rates)) == "not measured":
        text += "Their share of what the hosts can do was not measured: evener probe host does."
    else:
        text += f"That is {mfu} of the matrix products that probing the hosts found, the MFU."
    return text + "".join(f" FLOPs: {one}." for one in missing)


def _explain_uneven_cores(summary: RunSummary) -> str:
    """Explain the cores of each rank when ranks have different numbers of threads."""
    texts = []
    for rank in summary.ranks:
        cpus, threads = busy_cpus(summary, rank), summary.threads[rank.rank]
        had = "was not measured" if cpus is None else f"ran on {cpus:.2f}"
        disturbed = cpus is not None and cpus < MIN_CPU_SHARE * threads
        because = ", so other programs or a limit took the rest" if disturbed else ""
        texts.append(f"{summary.rank_label(rank)} with {pluralize(threads, 'thread')} {had}{because}")
    return f"Cores at work, while a rank had work: {'; '.join(texts)}."


def _explain_cores(summary: RunSummary) -> str:
    if len(set(summary.threads)) > 1:
        return _explain_uneven_cores(summary)
    threads, num = summary.threads_text, len(summary.ranks)
    each = (
        f"{pluralize(num, 'process')} with {threads}{' each' if num > 1 else ''} on {pluralize(summary.cores, 'core')}"
    )
    running = [cpus for rank in summary.ranks if (cpus := busy_cpus(summary, rank)) is not None]
    if not running:
        return f"{each}: on how many cores they really ran was not measured."
    text = f"{each}: while it had work, a rank ran on {fmean(running):.2f} cores"
    if min(running) >= MIN_CPU_SHARE * summary.threads[0]:
        text += f", so it was really running on its {threads}."
    elif is_oversubscribed(summary):
        text += f"; {sum(summary.threads)} threads do not fit on {pluralize(summary.cores, 'core')}."
    else:
        text += f". It was not really running on its {threads}: {_explain_cpu_contention(summary.threads[0])}."
    contention = usable_contention(summary)
    if contention is None or num == 1:
        return text
    ratio = fmean(contention.together_s) / fmean(contention.alone_s)
    text += (
        f" Forward and backward of one micro-batch took a rank {format_seconds(fmean(contention.alone_s))} alone and "
        f"{format_seconds(fmean(contention.together_s))} while all computed"
    )
    return text + (f": {ratio:.2f} times as long." if ratio >= MIN_SPEEDUP else ": sharing the machine costs nothing.")


def _explain_cpu_contention(threads: int) -> str:
    others = "other programs used the cores"
    if threads == 1:
        return others
    # Measured, tiny on 2 threads of 2 cores: 3.2 times as fast next to other programs, 0.57 times alone (docs/log).
    return (
        f"{others}, or there was too little work for {threads} threads; next to other programs, "
        "OMP_WAIT_POLICY=PASSIVE before the command lets a thread that waits give up its core"
    )


# --- a series of runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScalingExplanation:
    """The explanation of a series of runs, in sentences."""

    result: list[str]  # throughputs, and the ideal step time
    causes: list[str]  # of the difference, the largest first
    conclusion: list[str]  # what was not measured, and whether the runs learned the same model
    advice: list[str]  # what to do


def explain_scaling(summaries: Sequence[RunSummary]) -> str:
    """Return one paragraph about runs of the same work on 1, 2, … processes: the speedup, its causes, and advice."""
    story = scaling_explanation(summaries)
    return " ".join(story.result + story.causes + story.conclusion + story.advice)


def scaling_explanation(summaries: Sequence[RunSummary]) -> ScalingExplanation:
    """Compare the run with the most processes with the one with the fewest, in sentences."""
    runs = sorted((run for run in summaries if run.tokens_per_s), key=lambda run: run.manifest.world_size)
    result = [
        f"The run with {_processes(run)} recorded no step ({run.manifest.verdict}): it is left out."
        for run in summaries
        if not run.tokens_per_s
    ]
    if len(runs) < 2:
        return ScalingExplanation([*result, "Nothing to compare: that takes two runs with recorded steps."], [], [], [])
    c = ScalingComparison(runs[0], runs[-1])
    causes, unmeasured = scaling_causes(c)
    named = largest_causes(causes, c.scaled_step_s)
    return ScalingExplanation(
        result=[*result, _throughputs_text(runs), _overhead_text(c), *_cpu_contention_warnings(c)],
        causes=[*_cause_sentences(c, named), *_unexplained(unexplained_s(c.overhead_s, causes, c.scaled_step_s))],
        conclusion=[*([f"Not measured: {'; '.join(unmeasured)}."] if unmeasured else []), _same_model(runs)],
        advice=_advice(runs, c, named),
    )


def max_loss_difference(summaries: Sequence[RunSummary], num_steps: int | None = None) -> float | None:
    """Return the largest relative loss difference between the first run and any other in the first `num_steps` steps.

    If `num_steps` is None, compare all steps. Return None if no step of two runs has a loss.
    """
    base, *others = (summary.losses for summary in summaries)
    gaps = [
        abs(ours - theirs) / abs(theirs)
        for losses in others
        for step, ours in losses.items()
        if ours is not None and (theirs := base.get(step)) and (num_steps is None or step < num_steps)
    ]
    return max(gaps, default=None)


def speedup(run: RunSummary, base: RunSummary) -> float:
    """Return the throughput of `run` relative to `base`; both must have recorded steps."""
    assert run.tokens_per_s
    assert base.tokens_per_s
    return run.tokens_per_s / base.tokens_per_s


def recommended_run(runs: Sequence[RunSummary]) -> RunSummary:
    """Return the fastest run, or the one with the fewest processes if that is about as fast.

    All runs must have recorded steps.
    """
    base = min(runs, key=lambda run: run.manifest.world_size)
    best = max(runs, key=lambda run: run.tokens_per_s or 0.0)
    return best if speedup(best, base) >= MIN_SPEEDUP else base


def _processes(run: RunSummary) -> str:
    return pluralize(run.manifest.world_size, "process")


def _throughputs_text(runs: list[RunSummary]) -> str:
    base = runs[0]
    texts = [f"{_processes(base)} trained {format_count(base.tokens_per_s)} tokens/s"]
    texts += [
        f"{_processes(run)} {format_count(run.tokens_per_s)}, {speedup(run, base):.2f} times as many"
        for run in runs[1:]
    ]
    return "; ".join(texts) + "."


def _overhead_text(c: ScalingComparison) -> str:
    few_s, ideal_s = format_seconds(c.base_step_s), format_seconds(c.ideal_step_s)
    if math.isclose(c.work_ratio, c.num_base_ranks / c.num_ranks, rel_tol=0.05):
        ideal = (
            f"Divided by {c.num_ranks / c.num_base_ranks:.2g} with nothing lost, a step of {few_s} would take {ideal_s}"
        )
    elif math.isclose(c.work_ratio, 1.0, rel_tol=0.05):
        ideal = f"Every process had a batch of its own: with nothing lost, a step would still take {ideal_s}"
    else:
        ideal = f"With {c.work_ratio:.2g} times the work and nothing lost, a step of {few_s} would take {ideal_s}"
    if abs(c.overhead_s) < MIN_NAMED_SHARE * c.scaled_step_s:
        return f"{ideal}; it took {format_seconds(c.scaled_step_s)}: next to nothing was lost."
    return (
        f"{ideal}; it took {format_seconds(c.scaled_step_s)}, {format_seconds(abs(c.overhead_s))} "
        f"{'more' if c.overhead_s > 0 else 'less'}."
    )


def _cpu_contention_warnings(c: ScalingComparison) -> list[str]:
    """Warn, before any cause is named, if the runs had fewer cores than their threads could use."""
    shortfalls, threads = [], 1
    for run, rank in ((c.base, c.base_rank), (c.scaled, c.scaled_rank)):
        contention, num = usable_contention(run), run.manifest.world_size
        if not is_on_cpus(run) or (num > 1 and is_oversubscribed(run)):
            continue
        had, wanted = busy_cpus(run, rank), float(run.threads[rank.rank])
        if contention and num > 1:
            had, wanted = fmean(contention.alone_cpus), fmean(run.threads)
        if had is not None and had < MIN_CPU_SHARE * min(wanted, run.cores):
            shortfalls.append(f"{had:.2f} cores for {run.threads_text} of a process when there {_were(num)}")
            threads = max(threads, *run.threads)
    if not shortfalls:
        return []
    return [
        f"The threads were not always running ({', '.join(shortfalls)}): {_explain_cpu_contention(threads)}. Take "
        "causes as hints."
    ]


def _were(num: int) -> str:
    return "was 1" if num == 1 else f"were {num}"


def _cause_sentences(c: ScalingComparison, named: list[Cause]) -> list[str]:
    """Return one sentence per cause, the largest first; if the scaled run is faster, gains come before losses."""
    gains = [f"{format_seconds(-cause.cost_s)} are gained {cause.reason}." for cause in named if cause.cost_s < 0]
    losses = [f"{format_seconds(cause.cost_s)} are lost {cause.reason}." for cause in named if cause.cost_s > 0]
    if speedup(c.scaled, c.base) < MIN_SPEEDUP:
        return losses + gains
    contention = usable_contention(c.scaled)
    now = c.num_ranks * fmean(contention.together_cpus) if contention else None
    before = c.num_base_ranks * c.base_cpus if c.base_cpus else None
    if is_on_cpus(c.scaled) and now and before and now > MIN_SPEEDUP * before:
        gains.insert(0, f"There was room for more: {before:.2f} cores were at work before, and now {now:.2f} are.")
    return gains + losses


def _unexplained(rest_s: float) -> list[str]:
    if rest_s > 0:
        return [f"{format_seconds(rest_s)} remain unexplained."]
    if rest_s < 0:
        return [f"The step is {format_seconds(-rest_s)} shorter than all this makes it, which remains unexplained."]
    return []


def _same_model(runs: list[RunSummary]) -> str:
    base, steps = runs[0], len(set.intersection(*(set(run.losses) for run in runs)))
    if any(run.tokens_per_step != base.tokens_per_step for run in runs):
        return "The runs did not train on the same batches, so their losses cannot be compared."
    gap, early = max_loss_difference(runs), max_loss_difference(runs, EARLY_STEPS)
    if gap is None or early is None:
        return "Whether they learned the same model is not known: losses were not measured."
    if gap <= SAME_MODEL_TOLERANCE:
        return f"The losses of all {steps} common steps {_agreement_text(gap)}, so the same model was learned."
    if early <= SAME_MODEL_TOLERANCE:
        return (
            f"The losses of the first {EARLY_STEPS} steps {_agreement_text(early)}, so it is the same training; later "
            f"they differ by up to {gap:.2g} times their size, since every step builds on the rounding of the last."
        )
    text = f"The losses differ by up to {gap:.2g} times their size over {steps} common steps"
    if base.manifest.shape and base.manifest.shape.dropout > 0:
        return f"{text}, as they may with dropout, which draws other random numbers on another number of processes."
    return f"{text}: more than the rounding of sums explains, so these are not quite the same models."


def _agreement_text(gap: float) -> str:
    return f"agree to {math.floor(-math.log10(gap))} digits" if gap else "are equal to the last digit"


def _advice(runs: list[RunSummary], c: ScalingComparison, named: list[Cause]) -> list[str]:
    if _cpu_contention_warnings(c):
        return ["Measure again when nothing else runs on the machine, and decide then."]
    helps = [cause.advice for cause in named if cause.cost_s > 0 and cause.advice][:1]
    best = recommended_run(runs)
    if best is runs[0]:
        return [f"Use {_processes(best)} here.", *helps]
    more = "" if best is runs[-1] else f", more than {best.manifest.world_size} are not"
    return [f"{_processes(best)} are worth it here{more}.", *helps]
