"""Break down lost scaling efficiency: the step time lost against ideal scaling, in seconds, cause by cause.

    scaled step  =  work_ratio · base step  +  Σ causes  +  unexplained

`work_ratio` is a rank's work relative to that of a rank of the base run (the one with fewer ranks): 1/2 if 2 processes
divide the batch of one, 1 if every process brings a batch of its own. The phases of StepCost divide the difference by
subtraction. The difference in compute is divided further by two measurements: the cores on which the ranks really ran,
and the same work timed by each rank alone and by all ranks at once (Contention).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from evener.core.units import count, plural, seconds, size
from evener.report.ranks import (
    CLEAR,
    contention_of,
    cpus_at_work,
    first_done,
    is_overbooked,
    last_done,
    mean,
    on_cpus,
    sequences,
    straggles,
    token_alone_s,
    token_s,
    why_slow,
)
from evener.report.summary import Summary

BUS_IS_FULL = 0.75  # of num_ranks times the bandwidth of one rank alone: below this, memory bandwidth is the limit
BATCH_FACTORS = (2, 4, 8, 16)
WORTH_IT = 1.1  # recommend a larger batch from this speedup on


class Comparison:
    """Two runs with measured steps, on few and on many ranks, and the figures that separate causes."""

    def __init__(self, few: Summary, many: Summary) -> None:
        assert few.step_p50_s, "a run without steps cannot be compared"
        assert many.step_p50_s, "a run without steps cannot be compared"
        self.few, self.many = few, many
        self.few_s, self.many_s = few.step_p50_s, many.step_p50_s
        self.num_few, self.num = few.manifest.world_size, many.manifest.world_size
        self.share = many.tokens_per_step / self.num / (few.tokens_per_step / self.num_few)
        self.ideal_s = self.share * self.few_s
        self.gap_s = self.many_s - self.ideal_s
        self.few_rank, self.many_rank = first_done(few), first_done(many)

    def growth_s(self, part: str) -> float | None:
        """Return by how many seconds a phase exceeds its ideal, `work_ratio` times its duration in the base run."""
        before, now = getattr(self.few_rank.typical, part), getattr(self.many_rank.typical, part)
        return None if before is None or now is None else now - self.share * before

    @functools.cached_property
    def few_cpus(self) -> float | None:
        """The cores on which a rank of the base run computed."""
        if self.num_few == 1 and self.few_rank.cpus is not None:
            return self.few_rank.cpus
        contention = contention_of(self.few)
        return mean(contention.together_cpus) if contention else None

    @functools.cached_property
    def many_cpus(self) -> float:
        """The cores on which a rank of the scaled run computes alone; its threads if that was not measured."""
        contention = contention_of(self.many)
        return mean(contention.alone_cpus) if contention else float(self.many.threads)

    @functools.cached_property
    def token_s(self) -> tuple[float, float] | None:
        """CPU seconds per token in the base and the scaled run, without contention from other ranks.

        Measured on single micro-batches. If those were not timed, on whole steps, but only if it shrank: contention
        can make it grow.
        """
        before, now = token_alone_s(self.few), token_alone_s(self.many)
        if before and now:
            return before, now
        before, now = token_s(self.few), token_s(self.many)
        return (before, now) if before and now and now < before and on_cpus(self.many) else None

    @functools.cached_property
    def neighbours(self) -> float | None:
        """CPU time of the same work while all ranks compute, relative to alone; above 1, they slow each other down."""
        contention = contention_of(self.many)
        if contention is None or is_overbooked(self.many):  # threads without a core make the others spin
            return None
        ratio = mean(contention.together_s) / mean(contention.alone_s)
        running = mean(contention.together_cpus) / mean(contention.alone_cpus) if on_cpus(self.many) else 1.0
        return max(1.0, ratio * min(1.0, running))

    @functools.cached_property
    def takes_turns(self) -> bool:
        """Whether the ranks of the scaled run share cores in time slices."""
        if not on_cpus(self.many):
            return False
        contention = contention_of(self.many)
        if contention:
            lost = mean(contention.alone_cpus) / mean(contention.together_cpus)
        else:
            lost = self.many.threads / (cpus_at_work(self.many, self.many_rank) or self.many.threads)
        return is_overbooked(self.many) or lost > CLEAR

    @functools.cached_property
    def compute_s(self) -> dict[str, float]:
        """The difference in compute seconds by cause; a cause that is missing was not measured.

        share · before · cores · efficiency · neighbours · turns = now: each factor costs what it adds to the product
        of those before it. If ranks share cores in time slices, the remainder is attributed to that ("turns").
        """
        growth_s, now_s = self.growth_s("compute_s"), self.many_rank.typical.compute_s
        if growth_s is None or not now_s or growth_s >= now_s:
            return {}
        cores: dict[str, float] = {}
        if not on_cpus(self.many) or is_overbooked(self.many):  # oversubscribed: time sharing explains it all
            cores["cores"] = 0.0
        elif self.few_cpus:
            cores["cores"] = math.log(self.few_cpus / self.many_cpus)
        efficiency = self.token_s[1] / self.token_s[0] if self.token_s else None
        measured = {
            name: 0.0 if 1 / CLEAR < ratio < CLEAR else math.log(ratio)
            for name, ratio in (("efficiency", efficiency), ("neighbours", self.neighbours))
            if ratio is not None
        }
        measured, rest = settle(measured, math.log(now_s / (now_s - growth_s)) - sum(cores.values()))
        turns = {"turns": max(rest, 0.0) if self.takes_turns else 0.0}
        costs_s, reached_s = {}, now_s - growth_s
        for name, log in (cores | measured | turns).items():
            costs_s[name] = reached_s * math.expm1(log)
            reached_s += costs_s[name]
        return costs_s


def settle(predicted: dict[str, float], total: float) -> tuple[dict[str, float], float]:
    """Clip predicted factors (as logarithms) so that their sum fits `total`; return them and the remainder.

    The predictions were timed over milliseconds, the steps over minutes: if both disagree, the steps are right.

    >>> settle({"efficiency": -1.0, "neighbours": 3.0}, 1.0)
    ({'efficiency': -1.0, 'neighbours': 2.0}, 0.0)
    >>> settle({"neighbours": 1.0}, 1.5)
    ({'neighbours': 1.0}, 0.5)
    """
    rest = total - sum(predicted.values())
    settled = {}
    for name, value in predicted.items():
        cut = math.copysign(min(abs(value), abs(rest)), value) if value * rest < 0 else 0.0
        settled[name] = value - cut
        rest += cut
    return settled, rest


@dataclass(frozen=True)
class Cause:
    """A row of the table: one possible cause, its cost in seconds, and the texts about it."""

    name: str
    part: str  # the phase of the step that it affects
    cost_s: Callable[[Comparison], float | None]  # negative: time gained; None: not measured
    because: Callable[[Comparison, float], str]  # continues "3.2 ms are lost" or "are gained"
    unmeasured: str  # continues "Not measured: "
    advice: Callable[[Comparison], str]  # a sentence on what helps; "" if nothing does


def _shorter(c: Comparison, part: str, name: str) -> str:
    """Explain a phase that shrank by more than the work did."""
    before, now = (getattr(rank.typical, part) for rank in (c.few_rank, c.many_rank))
    return f"in {name}: {seconds(now)} a step, and {seconds(before)} with {plural(c.num_few, 'process')}"


def _few(c: Comparison) -> str:
    return "the one process" if c.num_few == 1 else f"each of the {c.num_few} processes"


# --- cores: no idle ones to add ---------------------------------------------------------------------------------------


def _cores_because(c: Comparison, cost_s: float) -> str:
    before, now = f"{c.few_cpus:.2f}", f"{c.many_cpus:.2f}"
    if cost_s < 0:
        return f"because each of the {c.num} processes runs on {now} cores, where {_few(c)} ran on {before}"
    more = c.num * c.many_cpus / (c.num_few * (c.few_cpus or 1.0))
    ran = f"{_few(c)} ran on {before} of {plural(c.many.cores, 'core')} with {plural(c.few.threads, 'thread')}"
    if more < CLEAR:
        return f"because the cores were taken already: {ran}, and each of the {c.num} has {now}: no core was added"
    return (
        f"because the cores did not grow with the processes: {ran}, and each of the {c.num} on {now}, in all "
        f"{more:.2g} times as many"
    )


# --- time sharing: more threads than cores, or other programs ---------------------------------------------------------


def _turns_s(c: Comparison) -> float | None:
    compute_s, wait_s = c.compute_s.get("turns"), c.growth_s("wait_s")
    if compute_s is None or wait_s is None:
        return None
    return compute_s + (wait_s if c.takes_turns and not straggles(c.many) else 0.0)


def _turns_because(c: Comparison, cost_s: float) -> str:
    if is_overbooked(c.many):
        used = f", of which {_few(c)} used {c.few_cpus:.2f}" if c.few_cpus else ""
        return (
            f"because {c.num * c.many.threads} threads share {plural(c.many.cores, 'core')}{used}: the ranks take "
            "turns, and one waits while another computes"
        )
    contention = contention_of(c.many)
    running = mean(contention.together_cpus) if contention else cpus_at_work(c.many, c.many_rank) or 0.0
    alone = f" and {c.many_cpus:.2f} when it computed alone" if contention else ""
    return (
        f"because other programs took the cores: a rank had {running:.2f} for its "
        f"{plural(c.many.threads, 'thread')} while all computed{alone}"
    )


def _turns_advice(c: Comparison) -> str:
    if not is_overbooked(c.many):
        return "Measure again when nothing else runs on the machine."
    if c.num > c.many.cores:
        return f"No more processes can compute at the same time than there are cores, {c.many.cores}."
    threads = c.many.cores // c.num
    return f"If {plural(c.num, 'process')}, then with {plural(threads, 'thread')} each: --threads {threads}."


# --- efficiency: the CPU time per token without contention ------------------------------------------------------------


def _efficiency_because(c: Comparison, cost_s: float) -> str:
    assert c.token_s is not None
    before, now = (seconds(1000 * token_s) for token_s in c.token_s)
    time = "CPU time" if on_cpus(c.many) else "time"
    figures = f"1,000 tokens take {now} of {time}, and took {before} with {plural(c.num_few, 'process')}"
    if cost_s < 0 and c.many.threads < c.few.threads:
        return (
            f"because a process with {plural(c.many.threads, 'thread')} uses its cores better than one that divides "
            f"every operation among {c.few.threads} threads, which wait for each other: {figures}"
        )
    if cost_s > 0 and sequences(c.many)[0] < sequences(c.few)[0]:
        return f"because micro-batches of {sequences(c.many)[0]} sequences are computed less efficiently: {figures}"
    return f"because the same work takes {'less' if cost_s < 0 else 'more'} time: {figures}"


# --- contention: memory bandwidth, caches, clock ----------------------------------------------------------------------


def _bus_Bps(c: Comparison) -> tuple[float, float]:
    """Return the memory copy bandwidth of one rank alone, and of all ranks in total."""
    contention = contention_of(c.many)
    assert contention is not None
    return mean(contention.copy_alone_Bps), sum(contention.copy_together_Bps)


def _bus_is_full(c: Comparison) -> bool:
    alone, together = _bus_Bps(c)
    return together < BUS_IS_FULL * c.num * alone


def _neighbours_because(c: Comparison, cost_s: float) -> str:
    contention = contention_of(c.many)
    assert contention is not None
    ratio = mean(contention.together_s) / mean(contention.alone_s)
    alone, together = _bus_Bps(c)
    with_cores = f" although it keeps its {mean(contention.together_cpus):.2f} cores" if on_cpus(c.many) else ""
    slower = f"the same work takes a rank {ratio:.2f} times as long next to the others as alone{with_cores}"
    copies = f"a copy runs at {size(alone)}/s alone, and {c.num} at once at {size(together)}/s in all"
    if _bus_is_full(c):
        return f"because the ranks share one memory, and its bandwidth is used up: {slower}, and {copies}"
    return (
        f"because the ranks slow each other down: {slower}; memory is not the reason ({copies}), which leaves shared "
        f"caches, two hardware threads of one core, or a lower clock"
    )


def _neighbours_advice(c: Comparison) -> str:
    if not _bus_is_full(c):
        return ""
    halve = "; --dtype bf16 halves the bytes" if c.many.manifest.roster.dtypes == "fp32" else ""
    return f"More processes here wait for the same memory; another machine brings a memory of its own{halve}."


# --- communication, update, input -------------------------------------------------------------------------------------


def _communication_because(c: Comparison, cost_s: float) -> str:
    if cost_s < 0:
        return _shorter(c, "exposed_sync_s", "communication that backward did not hide")
    rank, in_flight_s = last_done(c.many), c.many.sync_p50_s
    text = f"to communication that backward did not hide, {cost_s / c.many_s:.0%} of the step"
    if rank.bytes and in_flight_s:
        text += f": each rank sends {size(rank.bytes)} of gradients at {size(rank.bytes / in_flight_s)}/s"
    return text


def _optimizer_because(c: Comparison, cost_s: float) -> str:
    if cost_s < 0:
        return _shorter(c, "optimizer_s", "the update")
    before, now = seconds(c.few_rank.typical.optimizer_s), seconds(c.many_rank.typical.optimizer_s)
    return (
        f"because every process repeats the whole update of {count(c.many.manifest.num_params)} parameters: {now}, and "
        f"{before} with {plural(c.num_few, 'process')}"
    )


def _input_because(c: Comparison, cost_s: float) -> str:
    if cost_s < 0:
        return _shorter(c, "data_s", "waiting for input")
    before, now = seconds(c.few_rank.typical.data_s), seconds(c.many_rank.typical.data_s)
    return f"waiting for input: {now} a step, and {before} with {plural(c.num_few, 'process')}"


def _larger_batch(c: Comparison) -> str:
    """Recommend a larger batch if that amortizes costs per step. *Assumption*: the rest grows with the batch."""
    before_s = c.few_rank.typical.optimizer_s or 0.0
    once_s = (c.many_rank.typical.exposed_sync_s or 0.0) + (c.many_rank.typical.optimizer_s or 0.0)
    work, batch = c.num * c.share / c.num_few, c.many.manifest.spec.train.batch
    for factor in BATCH_FACTORS:
        many_s = factor * (c.many_s - once_s) + once_s
        speedup = work * (factor * (c.few_s - before_s) + before_s) / many_s
        if speedup > WORTH_IT and speedup > WORTH_IT * work * c.few_s / c.many_s:
            return (
                f"Communication and update are paid once a step: with --batch {factor * batch} they would fall from "
                f"{once_s / c.many_s:.0%} to {once_s / many_s:.0%} of it, and {plural(c.num, 'process')} train about "
                f"{speedup:.2f} times the tokens/s of {plural(c.num_few, 'process')}."
            )
    return ""


# --- waiting for each other -------------------------------------------------------------------------------------------


def _straggler_because(c: Comparison, cost_s: float) -> str:
    slow = last_done(c.many)
    return f"waiting for {c.many.name_of(slow)}, the slowest: {why_slow(c.many, slow, c.many_rank)}"


def _late_because(c: Comparison, cost_s: float) -> str:
    if cost_s < 0:
        return _shorter(c, "wait_s", "waiting for other ranks")
    waits = sorted(rank.typical.wait_s or 0.0 for rank in c.many.ranks)
    least, most = seconds(waits[0]), seconds(waits[-1])
    return f"because now one rank is late, now another, and the rest wait, {least} to {most} a step"


_CONTENTION = "the time of a rank's work alone and next to the others (--contention measures it)"
_WAIT = "how long the ranks wait for each other"

CAUSES: tuple[Cause, ...] = (
    Cause(
        name="cores",
        part="compute_s",
        cost_s=lambda c: c.compute_s.get("cores"),
        because=_cores_because,
        unmeasured="on how many cores the processes ran",
        advice=lambda c: "The cores have work already: only another machine or a GPU would add to them.",
    ),
    Cause(
        name="turns",
        part="compute_s",
        cost_s=_turns_s,
        because=_turns_because,
        unmeasured=_WAIT,
        advice=_turns_advice,
    ),
    Cause(
        name="efficiency",
        part="compute_s",
        cost_s=lambda c: c.compute_s.get("efficiency"),
        because=_efficiency_because,
        unmeasured=_CONTENTION,
        advice=lambda c: "A larger --batch gives every rank larger micro-batches.",
    ),
    Cause(
        name="neighbours",
        part="compute_s",
        cost_s=lambda c: 0.0 if is_overbooked(c.many) else c.compute_s.get("neighbours"),
        because=_neighbours_because,
        unmeasured=_CONTENTION,
        advice=_neighbours_advice,
    ),
    Cause(
        name="communication",
        part="exposed_sync_s",
        cost_s=lambda c: c.growth_s("exposed_sync_s"),
        because=_communication_because,
        unmeasured="communication that backward did not hide",
        advice=_larger_batch,
    ),
    Cause(
        name="straggler",
        part="wait_s",
        cost_s=lambda c: c.growth_s("wait_s") if straggles(c.many) else 0.0,
        because=_straggler_because,
        unmeasured=_WAIT,
        advice=lambda c: f"What slows {c.many.name_of(last_done(c.many))} slows all: look there first.",
    ),
    Cause(
        name="late",
        part="wait_s",
        cost_s=lambda c: 0.0 if straggles(c.many) or c.takes_turns else c.growth_s("wait_s"),
        because=_late_because,
        unmeasured=_WAIT,
        advice=lambda c: "",
    ),
    Cause(
        name="input",
        part="data_s",
        cost_s=lambda c: c.growth_s("data_s"),
        because=_input_because,
        unmeasured="waiting for input",
        advice=lambda c: "Make the input faster first: a local disk, or a corpus that fits in memory.",
    ),
    Cause(
        name="optimizer",
        part="optimizer_s",
        cost_s=lambda c: c.growth_s("optimizer_s"),
        because=_optimizer_because,
        unmeasured="the update",
        advice=_larger_batch,
    ),
)
