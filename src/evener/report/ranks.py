"""Find the straggler and the reason for it, oversubscription, and the cores that ranks ran on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.core.rundir import Contention
from evener.core.typical import RankSummary
from evener.core.units import count, plural, seconds
from evener.report.summary import Summary

CLEAR = 1.1  # a ratio of two timings closer to 1 counts as noise
STRAGGLES = 0.05  # of the step: the waits of two ranks must differ by more
WORK = ("data_s", "compute_s", "optimizer_s")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def last_done(summary: Summary) -> RankSummary:
    """Return the rank that waits least: the one that the others wait for."""
    return min(summary.ranks, key=lambda rank: rank.typical.wait_s or 0.0)


def first_done(summary: Summary) -> RankSummary:
    """Return the rank that waits most: its step separates the cost of waiting from everything else."""
    return max(summary.ranks, key=lambda rank: rank.typical.wait_s or 0.0)


def straggles(summary: Summary) -> bool:
    """Return whether one rank holds the others up, rather than different ranks being late in different steps."""
    if len(summary.ranks) < 2 or not summary.step_p50_s:
        return False
    least, most = last_done(summary).typical.wait_s, first_done(summary).typical.wait_s
    if least is None or most is None:
        return False
    return least < most / 2 and most - least > STRAGGLES * summary.step_p50_s


def on_cpus(summary: Summary) -> bool:
    """Return whether all ranks compute on CPU cores."""
    return all(rank.device == "cpu" for rank in summary.manifest.ranks)


def is_overbooked(summary: Summary) -> bool:
    """Return whether CPU ranks have more threads than there are cores."""
    return on_cpus(summary) and sum(rank.threads for rank in summary.manifest.ranks) > summary.cores


def cpus_at_work(summary: Summary, rank: RankSummary) -> float | None:
    """Return the cores on which a rank ran while it was not waiting, at most its threads."""
    work_s = sum(getattr(rank.typical, part) or 0.0 for part in WORK)
    if rank.cpus is None or not work_s or not summary.step_p50_s:
        return None
    return min(rank.cpus * summary.step_p50_s / work_s, float(summary.manifest.ranks[rank.rank].threads))


def contention_of(summary: Summary) -> Contention | None:
    """Return the contention measurement if it is complete and all its timings are above 0."""
    contention = summary.manifest.contention
    if contention is None:
        return None
    lists: list[list[float]] = list(msgspec.structs.asdict(contention).values())
    complete = all(len(figures) == len(summary.ranks) and min(figures) > 0 for figures in lists)
    return contention if complete else None


def sequences(summary: Summary) -> list[int]:
    """Return the sequences in each rank's first micro-batch, which the contention measurement times."""
    return [member.largest_pass for member in summary.manifest.roster.members]


def token_alone_s(summary: Summary) -> float | None:
    """Return the CPU seconds (on a GPU, seconds) of forward and backward per token, for a rank alone on the machine."""
    contention, shape = contention_of(summary), summary.manifest.shape
    if contention is None or shape is None:
        return None
    cpus = contention.alone_cpus if on_cpus(summary) else [1.0] * len(summary.ranks)
    of_sequence = [t * p / n for t, p, n in zip(contention.alone_s, cpus, sequences(summary), strict=True) if n]
    return mean(of_sequence) / shape.block_size


def token_s(summary: Summary) -> float | None:
    """Return the CPU seconds of all ranks per token, over whole steps."""
    cpus = [rank.cpus for rank in summary.ranks if rank.cpus is not None]
    if len(cpus) < len(summary.ranks) or not summary.tokens_per_s:
        return None
    return sum(cpus) / summary.tokens_per_s


def why_slow(summary: Summary, slow: RankSummary, fast: RankSummary) -> str:
    """Say why one rank takes longer than another, with the figures as evidence."""
    fast_name = summary.name_of(fast)
    if slow.tokens and fast.tokens and slow.tokens > 1.05 * fast.tokens:
        return f"its share of the batch is larger, {count(slow.tokens)} tokens against {count(fast.tokens)}"
    behind_s = (fast.typical.wait_s or 0.0) - (slow.typical.wait_s or 0.0)
    input_s = (slow.typical.data_s or 0.0) - (fast.typical.data_s or 0.0)
    if input_s > behind_s / 2:
        return (
            f"it spends {seconds(slow.typical.data_s)} of a step waiting for input, {fast_name} "
            f"{seconds(fast.typical.data_s)}"
        )
    compute = (
        f"forward and backward of the same number of tokens take it {seconds(slow.typical.compute_s)}, "
        f"{fast_name} {seconds(fast.typical.compute_s)}"
    )
    running, theirs = cpus_at_work(summary, slow), cpus_at_work(summary, fast)
    if not on_cpus(summary):
        return compute
    if running is None or theirs is None:
        return f"{compute}; whether it was really running was not measured"
    slow_threads, fast_threads = (summary.manifest.ranks[rank.rank].threads for rank in (slow, fast))
    if theirs / fast_threads > CLEAR * running / slow_threads:
        had = f"{theirs:.2f}" if slow_threads == fast_threads else f"{theirs:.2f} for {fast_threads}"
        return (
            f"it was not always running: while it had work it had {running:.2f} cores for its "
            f"{plural(slow_threads, 'thread')}, {fast_name} had {had}, so something else used its core"
        )
    if slow_threads != fast_threads:
        return f"{compute}, on {running:.2f} cores; {fast_name} has {theirs:.2f}"
    return f"{compute}, although it was running all the time (on {running:.2f} cores): its core or its memory is slower"
