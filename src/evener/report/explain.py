"""Explain a run, or the scaling of a series of runs, in sentences built from measured figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evener.core.step import more_tokens
from evener.core.typical import RankSummary
from evener.core.units import count, plural, seconds, size
from evener.plan.penalty import most_error
from evener.report import members
from evener.report.causes import CAUSES, Cause, Comparison
from evener.report.gap import explain_prediction
from evener.report.ranks import (
    contention_of,
    cpus_at_work,
    first_done,
    is_overbooked,
    last_done,
    mean,
    on_cpus,
    straggles,
    why_slow,
)
from evener.report.summary import Summary
from evener.report.whatif import asked_again
from evener.report.worth import FASTER, worth

NAMED = 0.05  # of a step: smaller costs get no sentence
MOST_NAMED = 4  # causes in a paragraph
LIMITS = 0.15  # of a step: a phase other than compute is the bottleneck from here on
EARLY_STEPS = 50  # rounding differences have not grown yet in these
SAME_MODEL = 1e-4  # relative difference of losses: more than this is not explained by summing in another order
DISTURBED = 0.8  # of one core per thread: below this, something else used the cores
PARTS = {
    "compute_s": "forward and backward",
    "exposed_sync_s": "communication that backward did not hide",
    "wait_s": "waiting for other ranks",
    "optimizer_s": "the update of the weights",
    "data_s": "waiting for input",
}


# --- one run ----------------------------------------------------------------------------------------------------------


def explain_run(summary: Summary) -> list[str]:
    """Return paragraphs about one run: the speedup verdict, the measurements, and the prediction error if predicted."""
    predicted = [" ".join(explain_prediction(summary, summary.prediction))] if summary.prediction else []
    return [worth(summary, asked_again(summary)).text, *explain_measured(summary), *predicted]


def explain_measured(summary: Summary) -> list[str]:
    """Return paragraphs about one run: throughput, step breakdown, stragglers, communication, cores."""
    if not summary.step_p50_s:
        return []
    paragraphs = [_pace(summary), _division(summary)]
    if len(summary.ranks) > 1:
        paragraphs += [_waiting(summary), _all_reduce(summary)]
    if on_cpus(summary):
        paragraphs.append(_cores(summary))
    if summary.noise_tokens or summary.fidelity:
        paragraphs.append(_gradients(summary))
    if summary.changes:
        paragraphs.append(members.told(summary.changes, summary.took_s))
    return paragraphs


def _gradients(summary: Summary) -> str:
    """Explain the gradient noise scale, and the error that a lossy sync strategy adds."""
    sentences = []
    if scale := summary.noise_tokens:
        tokens = summary.tokens_per_step
        more = more_tokens(scale, tokens, 2)
        sentences.append(
            f"The gradients' noise scale is about {count(scale)} tokens, in the second half of the run: at this point "
            f"a batch of {count(2 * tokens)} tokens instead of {count(tokens)} would need {more / 2:.2f} times as many "
            f"steps for the same loss, and {more:.2f} times as many tokens"
        )
    if fidelity := summary.fidelity:
        roster = summary.manifest.roster
        sync, max_error = roster.sync, most_error(roster.sync, roster.world_size)
        of_what = "changes" if sync.kind == "diloco" else "gradients"
        measured = f"; the measured loss penalty holds up to {max_error:.1%}" if math.isfinite(max_error) else ""
        sentences.append(
            f"The sums of the {of_what} after {sync} differ from the exact ones by {fidelity.error:.1%} of their "
            f"length, cosine {fidelity.cosine:.4f} (medians){measured}; the error of one exchange is added to the next"
        )
    return ". ".join(sentences) + "."


def limit(summary: Summary) -> str:
    """Return one sentence that names the step's bottleneck."""
    if not summary.step_p50_s:
        return f"No step was recorded{summary.manifest.window}."
    rank = first_done(summary) if straggles(summary) else last_done(summary)
    cost = rank.typical
    shares = {part: (getattr(cost, part) or 0.0) / summary.step_p50_s for part in PARTS}
    if any(getattr(cost, part) is None for part in PARTS):
        return "The bottleneck is not known: not all phases of a step were measured."
    computing = f"forward and backward are {shares.pop('compute_s'):.0%} of each step"
    computing += f" on {summary.name_of(rank)}" if straggles(summary) else ""
    largest = max(shares, key=lambda part: shares[part])
    if shares[largest] < LIMITS:
        return f"Limited by computing: {computing}."
    if largest == "wait_s" and straggles(summary):
        slow, waiting = summary.name_of(last_done(summary)), summary.name_of(rank)
        return f"Limited by {slow}, for which {waiting} waits {shares[largest]:.0%} of each step; {computing}."
    return f"Limited by {PARTS[largest]}, {shares[largest]:.0%} of each step; {computing}."


def _pace(summary: Summary) -> str:
    num = len(summary.ranks)
    text = (
        f"A step trains on {summary.tokens_per_step:,} tokens and takes {seconds(summary.step_p50_s)} (p50; p95 "
        f"{seconds(summary.step_p95_s)}): {count(summary.tokens_per_s)} tokens/s."
    )
    if summary.manifest.window:
        text += f" These figures are{summary.manifest.window}."
    if num == 1:
        return text
    sync = summary.manifest.roster.sync
    if sync.kind == "diloco":
        return (
            f"{text} Each of the {num} processes, the ranks, has a whole copy of the model, its replica, and trains it "
            f"by itself for {plural(sync.every, 'step')} on its own part of each batch. Then the ranks average what "
            "they learned (DiLoCo), and the replicas are one model again."
        )
    return (
        f"{text} Each of the {num} processes, the ranks, has a whole copy of the model, its replica, and computes "
        "gradients on its own part of the batch. Before the update the ranks add their gradients up, which is called "
        "an all-reduce. So all of them take the same step, and the replicas stay equal."
    )


def _division(summary: Summary) -> str:
    slow, fast = last_done(summary), first_done(summary)
    if slow is fast:
        return f"Where its time goes: {_parts(summary, slow)}."
    if not straggles(summary):
        return f"Where its time goes, much the same on every rank; on {summary.name_of(slow)}: {_parts(summary, slow)}."
    return (
        f"Where its time goes on {summary.name_of(slow)}, the slowest: {_parts(summary, slow)}. "
        f"On {summary.name_of(fast)}, the fastest: {_parts(summary, fast)}."
    )


def _parts(summary: Summary, rank: RankSummary) -> str:
    step_s = summary.step_p50_s or 1.0
    costs = {name: getattr(rank.typical, part) for part, name in PARTS.items()}
    measured = {name: cost for name, cost in costs.items() if cost is not None and cost >= 0.005 * step_s}
    texts = [
        f"{seconds(measured[name])} {name} ({measured[name] / step_s:.0%})"
        for name in sorted(measured, key=lambda name: -measured[name])
    ]
    return ", ".join(texts + [f"{name} was not measured" for name, cost in costs.items() if cost is None])


def _waiting(summary: Summary) -> str:
    slow, fast = last_done(summary), first_done(summary)
    if any(rank.typical.wait_s is None for rank in summary.ranks):
        return "How long the ranks wait for each other was not measured."
    least_s, most_s = slow.typical.wait_s or 0.0, fast.typical.wait_s or 0.0
    if straggles(summary):
        return (
            f"The straggler is {summary.name_of(slow)}: it waits least, {seconds(least_s)} a step, and "
            f"{summary.name_of(fast)} waits {seconds(most_s)} for it. Why: {why_slow(summary, slow, fast)}."
        )
    if most_s < NAMED * (summary.step_p50_s or 1.0):
        return f"No rank holds the others up: none waits longer than {seconds(most_s)} a step."
    text = (
        f"No single rank is slow, yet all of them wait, {seconds(least_s)} to {seconds(most_s)} a step: now one is "
        "late, now another"
    )
    if not is_overbooked(summary):
        return text + "."
    return f"{text}, because {_all_threads(summary)} threads share {plural(summary.cores, 'core')}."


def _all_reduce(summary: Summary) -> str:
    rank, step_s, in_flight_s = last_done(summary), summary.step_p50_s or 1.0, summary.sync_p50_s
    exposed_s = rank.typical.exposed_sync_s
    if not in_flight_s:
        return "How long the all-reduces take was not measured."
    text = f"All-reduces are under way for {seconds(in_flight_s)} of a step"
    if rank.bytes:
        text += f"; each rank sends {size(rank.bytes)} in them, {size(rank.bytes / in_flight_s)}/s"
    if exposed_s is None:
        return text + ". How much of that backward hid was not measured."
    if (sync := summary.manifest.roster.sync).kind == "diloco":
        of = f"the mean over {plural(sync.every, 'step')}, of which one exchanges"
        return f"{text}: {of}. Of it the rank was blocked for {seconds(exposed_s)}, {exposed_s / step_s:.0%} of a step."
    hidden = max(0.0, 1 - exposed_s / in_flight_s)
    blocked = f"the rank was blocked for {seconds(exposed_s)}, {exposed_s / step_s:.0%} of the step"
    if hidden < NAMED:
        return f"{text}. Backward hid none of it: {blocked}."
    return (
        f"{text}. They begin while backward still computes the gradients of earlier layers, which hides {hidden:.0%} "
        f"of their time; in the rest {blocked}."
    )


def _unlike_cores(summary: Summary) -> str:
    """Explain the cores of each rank when ranks have different numbers of threads."""
    texts = []
    for rank in summary.ranks:
        cpus, setup = cpus_at_work(summary, rank), summary.manifest.ranks[rank.rank]
        had = "was not measured" if cpus is None else f"ran on {cpus:.2f}"
        disturbed = cpus is not None and cpus < DISTURBED * setup.threads
        because = ", so other programs or a limit took the rest" if disturbed else ""
        texts.append(f"{summary.name_of(rank)} with {plural(setup.threads, 'thread')} {had}{because}")
    return f"Cores at work, while a rank had work: {'; '.join(texts)}."


def _cores(summary: Summary) -> str:
    if len({rank.threads for rank in summary.manifest.ranks}) > 1:
        return _unlike_cores(summary)
    threads, num = plural(summary.threads, "thread"), len(summary.ranks)
    each = f"{plural(num, 'process')} with {threads}{' each' if num > 1 else ''} on {plural(summary.cores, 'core')}"
    running = [cpus for rank in summary.ranks if (cpus := cpus_at_work(summary, rank)) is not None]
    if not running:
        return f"{each}: on how many cores they really ran was not measured."
    text = f"{each}: while it had work, a rank ran on {mean(running):.2f} cores"
    if min(running) >= DISTURBED * summary.threads:
        text += f", so it was really running on its {threads}."
    elif is_overbooked(summary):
        text += f"; {_all_threads(summary)} threads do not fit on {plural(summary.cores, 'core')}."
    else:
        text += f". It was not really running on its {threads}: {_disturbance(summary.threads)}."
    contention = contention_of(summary)
    if contention is None or num == 1:
        return text
    ratio = mean(contention.together_s) / mean(contention.alone_s)
    text += (
        f" Forward and backward of one micro-batch took a rank {seconds(mean(contention.alone_s))} alone and "
        f"{seconds(mean(contention.together_s))} while all computed"
    )
    return text + (f": {ratio:.2f} times as long." if ratio >= FASTER else ": sharing the machine costs nothing.")


def _all_threads(summary: Summary) -> int:
    return sum(rank.threads for rank in summary.manifest.ranks)


def _disturbance(threads: int) -> str:
    others = "other programs used the cores"
    if threads == 1:
        return others
    # Measured, tiny on 2 threads of 2 cores: 3.2 times as fast next to other programs, 0.57 times alone (see LOG.md).
    return (
        f"{others}, or there was too little work for {threads} threads; next to other programs, "
        "OMP_WAIT_POLICY=PASSIVE before the command lets a thread that waits give up its core"
    )


# --- a series of runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """The explanation of a series of runs, in sentences."""

    result: list[str]  # throughputs, and the ideal step time
    causes: list[str]  # of the difference, the largest first
    conclusion: list[str]  # what was not measured, and whether the runs learned the same model
    advice: list[str]  # what to do


def explain_scaling(summaries: Sequence[Summary]) -> str:
    """Return one paragraph about runs of the same work on 1, 2, … processes: the speedup, its causes, and advice."""
    story = scaling_story(summaries)
    return " ".join(story.result + story.causes + story.conclusion + story.advice)


def scaling_story(summaries: Sequence[Summary]) -> Story:
    """Return the same as sentences: compare the run with the most processes with the one with the fewest."""
    runs = sorted((run for run in summaries if run.tokens_per_s), key=lambda run: run.manifest.world_size)
    result = [
        f"The run with {_processes(run)} recorded no step ({run.manifest.verdict}): it is left out."
        for run in summaries
        if not run.tokens_per_s
    ]
    if len(runs) < 2:
        return Story([*result, "Nothing to compare: that takes two runs with recorded steps."], [], [], [])
    c = Comparison(runs[0], runs[-1])
    costs = {cause: cause.cost_s(c) for cause in CAUSES}
    named = [(cause, cost) for cause, cost in costs.items() if cost and abs(cost) >= NAMED * c.many_s]
    named = sorted(named, key=lambda pair: -abs(pair[1]))[:MOST_NAMED]
    helpful = [cause for cause, cost in named if cost > 0]
    return Story(
        result=[*result, _speeds(runs), _difference(c), *_disturbed(c)],
        causes=[*_because(c, named), *_unexplained(c, costs)],
        conclusion=[*_unmeasured(c, costs), _same_model(runs)],
        advice=_advice(runs, c, helpful),
    )


def largest_loss_gap(summaries: Sequence[Summary], num_steps: int | None = None) -> float | None:
    """Return the largest relative loss difference between the first run and any other, in all or the first steps."""
    base, *others = (summary.losses for summary in summaries)
    gaps = [
        abs(ours - theirs) / abs(theirs)
        for losses in others
        for step, ours in losses.items()
        if ours is not None and (theirs := base.get(step)) and (num_steps is None or step < num_steps)
    ]
    return max(gaps, default=None)


def speedup(run: Summary, base: Summary) -> float:
    """Return the throughput of `run` relative to `base`; both must have recorded steps."""
    assert run.tokens_per_s
    assert base.tokens_per_s
    return run.tokens_per_s / base.tokens_per_s


def worth_it(runs: Sequence[Summary]) -> Summary:
    """Return the fastest run, or the one with the fewest processes if that is about as fast; all recorded steps."""
    base = min(runs, key=lambda run: run.manifest.world_size)
    best = max(runs, key=lambda run: run.tokens_per_s or 0.0)
    return best if speedup(best, base) >= FASTER else base


def _processes(run: Summary) -> str:
    return plural(run.manifest.world_size, "process")


def _speeds(runs: list[Summary]) -> str:
    base = runs[0]
    texts = [f"{_processes(base)} trained {count(base.tokens_per_s)} tokens/s"]
    texts += [
        f"{_processes(run)} {count(run.tokens_per_s)}, {speedup(run, base):.2f} times as many" for run in runs[1:]
    ]
    return "; ".join(texts) + "."


def _difference(c: Comparison) -> str:
    few_s, ideal_s = seconds(c.few_s), seconds(c.ideal_s)
    if math.isclose(c.share, c.num_few / c.num, rel_tol=0.05):
        ideal = f"Divided by {c.num / c.num_few:.2g} with nothing lost, a step of {few_s} would take {ideal_s}"
    elif math.isclose(c.share, 1.0, rel_tol=0.05):
        ideal = f"Every process had a batch of its own: with nothing lost, a step would still take {ideal_s}"
    else:
        ideal = f"With {c.share:.2g} times the work and nothing lost, a step of {few_s} would take {ideal_s}"
    if abs(c.gap_s) < NAMED * c.many_s:
        return f"{ideal}; it took {seconds(c.many_s)}: next to nothing was lost."
    return f"{ideal}; it took {seconds(c.many_s)}, {seconds(abs(c.gap_s))} {'more' if c.gap_s > 0 else 'less'}."


def _disturbed(c: Comparison) -> list[str]:
    """Warn, before any cause is named, if the runs had fewer cores than their threads could use."""
    shortfalls, threads = [], 1
    for run, rank in ((c.few, c.few_rank), (c.many, c.many_rank)):
        contention, num = contention_of(run), run.manifest.world_size
        if not on_cpus(run) or (num > 1 and is_overbooked(run)):
            continue
        had = mean(contention.alone_cpus) if contention and num > 1 else cpus_at_work(run, rank)
        if had is not None and had < DISTURBED * min(run.threads, run.cores):
            shortfalls.append(
                f"{had:.2f} cores for {plural(run.threads, 'thread')} of a process when there {_were(num)}"
            )
            threads = max(threads, run.threads)
    if not shortfalls:
        return []
    return [
        f"The threads were not always running ({', '.join(shortfalls)}): {_disturbance(threads)}. Take causes as hints."
    ]


def _were(num: int) -> str:
    return "was 1" if num == 1 else f"were {num}"


def _because(c: Comparison, named: list[tuple[Cause, float]]) -> list[str]:
    """Return one sentence per cause, the largest first; if the scaled run is faster, gains come before losses."""
    gains = [f"{seconds(-cost)} are gained {cause.because(c, cost)}." for cause, cost in named if cost < 0]
    losses = [f"{seconds(cost)} are lost {cause.because(c, cost)}." for cause, cost in named if cost > 0]
    if speedup(c.many, c.few) < FASTER:
        return losses + gains
    contention = contention_of(c.many)
    now = c.num * mean(contention.together_cpus) if contention else None
    before = c.num_few * c.few_cpus if c.few_cpus else None
    if on_cpus(c.many) and now and before and now > FASTER * before:
        gains.insert(0, f"There was room for more: {before:.2f} cores were at work before, and now {now:.2f} are.")
    return gains + losses


def _unexplained(c: Comparison, costs: dict[Cause, float | None]) -> list[str]:
    rest_s = c.gap_s - sum(cost for cost in costs.values() if cost)
    if abs(rest_s) < NAMED * c.many_s:
        return []
    if rest_s > 0:
        return [f"{seconds(rest_s)} remain unexplained."]
    return [f"The step is {seconds(-rest_s)} shorter than all this makes it, which remains unexplained."]


def _unmeasured(c: Comparison, costs: dict[Cause, float | None]) -> list[str]:
    missing = [cause for cause, cost in costs.items() if cost is None]
    names = [cause.unmeasured for cause in missing]
    if c.growth_s("compute_s") is None:
        names = ["forward and backward"] + [cause.unmeasured for cause in missing if cause.part != "compute_s"]
    return [f"Not measured: {'; '.join(dict.fromkeys(names))}."] if names else []


def _same_model(runs: list[Summary]) -> str:
    base, steps = runs[0], len(set.intersection(*(set(run.losses) for run in runs)))
    if any(run.tokens_per_step != base.tokens_per_step for run in runs):
        return "The runs did not train on the same batches, so their losses cannot be compared."
    gap, early = largest_loss_gap(runs), largest_loss_gap(runs, EARLY_STEPS)
    if gap is None or early is None:
        return "Whether they learned the same model is not known: losses were not measured."
    if gap <= SAME_MODEL:
        return f"The losses of all {steps} common steps {_agree(gap)}, so the same model was learned."
    if early <= SAME_MODEL:
        return (
            f"The losses of the first {EARLY_STEPS} steps {_agree(early)}, so it is the same training; later they "
            f"differ by up to {gap:.2g} times their size, since every step builds on the rounding of the last."
        )
    text = f"The losses differ by up to {gap:.2g} times their size over {steps} common steps"
    if base.manifest.shape and base.manifest.shape.dropout > 0:
        return f"{text}, as they may with dropout, which draws other random numbers on another number of processes."
    return f"{text}: more than the rounding of sums explains, so these are not quite the same models."


def _agree(gap: float) -> str:
    return f"agree to {math.floor(-math.log10(gap))} digits" if gap else "are equal to the last digit"


def _advice(runs: list[Summary], c: Comparison, losses: list[Cause]) -> list[str]:
    if _disturbed(c):
        return ["Measure again when nothing else runs on the machine, and decide then."]
    helps = [text for cause in losses if (text := cause.advice(c))][:1]
    best = worth_it(runs)
    if best is runs[0]:
        return [f"Use {_processes(best)} here.", *helps]
    more = "" if best is runs[-1] else f", more than {best.manifest.world_size} are not"
    return [f"{_processes(best)} are worth it here{more}.", *helps]
