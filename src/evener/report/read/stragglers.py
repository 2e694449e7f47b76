"""Find the straggler and the reason for it, oversubscription, and the cores that ranks ran on."""

from __future__ import annotations

from statistics import fmean

import msgspec

from evener.core.base.units import format_count, format_seconds, pluralize
from evener.core.run.rundir import Contention
from evener.core.run.step_statistics import RankSummary
from evener.report.read.run_summary import RunSummary

NOISE_RATIO = 1.1  # a ratio of two timings closer to 1 counts as noise
STRAGGLER_WAIT_SHARE = 0.05  # of the step: the waits of two ranks must differ by more
WORK_PHASES = ("data_s", "compute_s", "optimizer_s")


def is_noise(ratio: float) -> bool:
    """Return whether a ratio of two timings is so close to 1 that it may be noise."""
    return 1 / NOISE_RATIO < ratio < NOISE_RATIO


def slowest_rank(summary: RunSummary) -> RankSummary:
    """Return the rank that waits least: the one that the others wait for."""
    return min(summary.ranks, key=lambda rank: rank.typical.wait_s or 0.0)


def fastest_rank(summary: RunSummary) -> RankSummary:
    """Return the rank that waits most: its step separates the cost of waiting from everything else."""
    return max(summary.ranks, key=lambda rank: rank.typical.wait_s or 0.0)


def has_straggler(summary: RunSummary) -> bool:
    """Return whether one rank holds the others up, rather than different ranks being late in different steps."""
    if len(summary.ranks) < 2 or not summary.step_p50_s:
        return False
    least, most = slowest_rank(summary).typical.wait_s, fastest_rank(summary).typical.wait_s
    if least is None or most is None:
        return False
    return least < most / 2 and most - least > STRAGGLER_WAIT_SHARE * summary.step_p50_s


def is_on_cpus(summary: RunSummary) -> bool:
    """Return whether all ranks compute on CPU cores."""
    return all(rank.device == "cpu" for rank in summary.manifest.ranks)


def is_oversubscribed(summary: RunSummary) -> bool:
    """Return whether CPU ranks have more threads than there are cores."""
    return is_on_cpus(summary) and sum(summary.threads) > summary.cores


def busy_cpus(summary: RunSummary, rank: RankSummary) -> float | None:
    """Return the cores on which a rank ran while it was not waiting, at most its threads."""
    work_s = sum(getattr(rank.typical, part) or 0.0 for part in WORK_PHASES)
    if rank.cpus is None or not work_s or not summary.step_p50_s:
        return None
    return min(rank.cpus * summary.step_p50_s / work_s, float(summary.threads[rank.rank]))


def usable_contention(summary: RunSummary) -> Contention | None:
    """Return the contention measurement if it is complete and all its timings are above 0."""
    contention = summary.manifest.contention
    if contention is None:
        return None
    lists: list[list[float]] = list(msgspec.structs.asdict(contention).values())
    complete = all(len(figures) == len(summary.ranks) and min(figures) > 0 for figures in lists)
    return contention if complete else None


def first_micro_batch_sizes(summary: RunSummary) -> list[int]:
    """Return the sequences in each rank's first micro-batch, which the contention measurement times."""
    return [member.largest_micro_batch for member in summary.manifest.roster.members]


def solo_cpu_s_per_token(summary: RunSummary) -> float | None:
    """Return the CPU seconds (on a GPU, seconds) of forward and backward per token, for a rank alone on the machine."""
    contention, shape = usable_contention(summary), summary.manifest.shape
    if contention is None or shape is None:
        return None
    cpus = contention.alone_cpus if is_on_cpus(summary) else [1.0] * len(summary.ranks)
    of_sequence = [
        t * p / n for t, p, n in zip(contention.alone_s, cpus, first_micro_batch_sizes(summary), strict=True) if n
    ]
    return fmean(of_sequence) / shape.block_size


def cpu_s_per_token(summary: RunSummary) -> float | None:
    """Return the CPU seconds of all ranks per token, over whole steps."""
    cpus = [rank.cpus for rank in summary.ranks if rank.cpus is not None]
    if len(cpus) < len(summary.ranks) or not summary.tokens_per_s:
        return None
    return sum(cpus) / summary.tokens_per_s


def straggler_reason(summary: RunSummary, slow: RankSummary, fast: RankSummary) -> str:
    """Say why one rank takes longer than another, with the figures as evidence."""
    fast_name = summary.rank_label(fast)
    if slow.tokens and fast.tokens and slow.tokens > 1.05 * fast.tokens:
        return (
            f"its share of the batch is larger, {format_count(slow.tokens)} {summary.unit} against "
            f"{format_count(fast.tokens)}"
        )
    behind_s = (fast.typical.wait_s or 0.0) - (slow.typical.wait_s or 0.0)
    input_s = (slow.typical.data_s or 0.0) - (fast.typical.data_s or 0.0)
    if input_s > behind_s / 2:
        return (
            f"it spends {format_seconds(slow.typical.data_s)} of a step waiting for input, {fast_name} "
            f"{format_seconds(fast.typical.data_s)}"
        )
    compute = (
        f"forward and backward of the same number of tokens take it {format_seconds(slow.typical.compute_s)}, "
        f"{fast_name} {format_seconds(fast.typical.compute_s)}"
    )
    running, theirs = busy_cpus(summary, slow), busy_cpus(summary, fast)
    if not is_on_cpus(summary):
        return compute
    if running is None or theirs is None:
        return f"{compute}; whether it was really running was not measured"
    slow_threads, fast_threads = summary.threads[slow.rank], summary.threads[fast.rank]
    if theirs / fast_threads > NOISE_RATIO * running / slow_threads:
        had = f"{theirs:.2f}" if slow_threads == fast_threads else f"{theirs:.2f} for {fast_threads}"
        why = "something else used its core"
        if summary.manifest.program is not None:
            why = f"it slept, waited for something else than a collective, or {why}"
        return (
            f"it was not always running: while it had work it had {running:.2f} cores for its "
            f"{pluralize(slow_threads, 'thread')}, {fast_name} had {had}, so {why}"
        )
    if slow_threads != fast_threads:
        return f"{compute}, on {running:.2f} cores; {fast_name} has {theirs:.2f}"
    return f"{compute}, although it was running all the time (on {running:.2f} cores): its core or its memory is slower"
