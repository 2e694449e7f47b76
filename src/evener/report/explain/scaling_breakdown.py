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
from statistics import fmean

from evener.core.base.units import format_bytes, format_count, format_seconds, pluralize
from evener.report.explain.causes import Cause
from evener.report.read.run_summary import RunSummary
from evener.report.read.stragglers import (
    NOISE_RATIO,
    busy_cpus,
    cpu_s_per_token,
    fastest_rank,
    first_micro_batch_sizes,
    has_straggler,
    is_noise,
    is_on_cpus,
    is_oversubscribed,
    slowest_rank,
    solo_cpu_s_per_token,
    straggler_reason,
    usable_contention,
)

# of num_ranks times the bandwidth of one rank alone: below this, memory bandwidth is the limit
MEMORY_BUS_FULL_SHARE = 0.75
BATCH_FACTORS = (2, 4, 8, 16)
MIN_BATCH_SPEEDUP = 1.1  # recommend a larger batch from this speedup on


class ScalingComparison:
    """Two runs with measured steps, on few and on many ranks, and the figures that separate causes."""

    def __init__(self, base: RunSummary, scaled: RunSummary) -> None:
        assert base.step_p50_s, "a run without steps cannot be compared"
        assert scaled.step_p50_s, "a run without steps cannot be compared"
        self.base, self.scaled = base, scaled
        self.base_step_s, self.scaled_step_s = base.step_p50_s, scaled.step_p50_s
        self.num_base_ranks, self.num_ranks = base.manifest.world_size, scaled.manifest.world_size
        self.work_ratio = scaled.tokens_per_step / self.num_ranks / (base.tokens_per_step / self.num_base_ranks)
        self.ideal_step_s = self.work_ratio * self.base_step_s
        self.overhead_s = self.scaled_step_s - self.ideal_step_s
        self.base_rank, self.scaled_rank = fastest_rank(base), fastest_rank(scaled)

    def growth_s(self, part: str) -> float | None:
        """Return by how many seconds a phase exceeds its ideal, `work_ratio` times its duration in the base run."""
        before, now = getattr(self.base_rank.typical, part), getattr(self.scaled_rank.typical, part)
        return None if before is None or now is None else now - self.work_ratio * before

    @functools.cached_property
    def base_cpus(self) -> float | None:
        """The mean number of cores that a rank of the base run kept busy; None if not measured."""
        if self.num_base_ranks == 1 and self.base_rank.cpus is not None:
            return self.base_rank.cpus
        contention = usable_contention(self.base)
        return fmean(contention.together_cpus) if contention else None

    @functools.cached_property
    def scaled_cpus(self) -> float:
        """The mean number of cores that a rank of the scaled run keeps busy alone; its threads if not measured."""
        contention = usable_contention(self.scaled)
        return fmean(contention.alone_cpus) if contention else fmean(self.scaled.threads)

    @functools.cached_property
    def cpu_s_per_token(self) -> tuple[float, float] | None:
        """CPU seconds per token in the base and the scaled run, without contention from other ranks.

        Use the timings of single micro-batches or, if there are none, of whole steps. The latter count only if the
        scaled run has fewer CPU seconds per token, because contention may be what makes them more.
        """
        before, now = solo_cpu_s_per_token(self.base), solo_cpu_s_per_token(self.scaled)
        if before and now:
            return before, now
        before, now = cpu_s_per_token(self.base), cpu_s_per_token(self.scaled)
        return (before, now) if before and now and now < before and is_on_cpus(self.scaled) else None

    @functools.cached_property
    def contention_ratio(self) -> float | None:
        """CPU time of the same work while all ranks compute, relative to alone; above 1, they slow each other down."""
        contention = usable_contention(self.scaled)
        if contention is None or is_oversubscribed(self.scaled):  # threads without a core make the others spin
            return None
        ratio = fmean(contention.together_s) / fmean(contention.alone_s)
        running = fmean(contention.together_cpus) / fmean(contention.alone_cpus) if is_on_cpus(self.scaled) else 1.0
        return max(1.0, ratio * min(1.0, running))

    @functools.cached_property
    def is_time_sharing(self) -> bool:
        """Return whether the ranks of the scaled run share cores in time slices."""
        if not is_on_cpus(self.scaled):
            return False
        contention = usable_contention(self.scaled)
        if contention:
            lost = fmean(contention.alone_cpus) / fmean(contention.together_cpus)
        else:
            threads = self.scaled.threads[self.scaled_rank.rank]
            lost = threads / (busy_cpus(self.scaled, self.scaled_rank) or threads)
        return is_oversubscribed(self.scaled) or lost > NOISE_RATIO

    @functools.cached_property
    def compute_causes_s(self) -> dict[str, float]:
        """The difference in compute seconds by cause; a cause that is missing was not measured.

        The compute time of the scaled run is that of the base run times `work_ratio` and a factor for each cause
        (cores, efficiency, neighbours, turns). Each factor costs what it adds to the product of those before it. If
        ranks share cores in time slices, the remainder is attributed to that ("turns").
        """
        growth_s, now_s = self.growth_s("compute_s"), self.scaled_rank.typical.compute_s
        if growth_s is None or not now_s or growth_s >= now_s:
            return {}
        cores: dict[str, float] = {}
        # oversubscribed: time sharing explains it all
        if not is_on_cpus(self.scaled) or is_oversubscribed(self.scaled):
            cores["cores"] = 0.0
        elif self.base_cpus:
            cores["cores"] = math.log(self.base_cpus / self.scaled_cpus)
        efficiency = self.cpu_s_per_token[1] / self.cpu_s_per_token[0] if self.cpu_s_per_token else None
        measured = {
            name: 0.0 if is_noise(ratio) else math.log(ratio)
            for name, ratio in (("efficiency", efficiency), ("neighbours", self.contention_ratio))
            if ratio is not None
        }
        measured, rest = clip_to_total(measured, math.log(now_s / (now_s - growth_s)) - sum(cores.values()))
        turns = {"turns": max(rest, 0.0) if self.is_time_sharing else 0.0}
        costs_s, reached_s = {}, now_s - growth_s
        for name, log in (cores | measured | turns).items():
            costs_s[name] = reached_s * math.expm1(log)
            reached_s += costs_s[name]
        return costs_s


def clip_to_total(predicted: dict[str, float], total: float) -> tuple[dict[str, float], float]:
    """Clip predicted factors (as logarithms) so that their sum fits `total`; return them and the remainder.

    The predictions were timed over milliseconds, the steps over minutes: if both disagree, the steps are right.

    >>> clip_to_total({"efficiency": -1.0, "neighbours": 3.0}, 1.0)
    ({'efficiency': -1.0, 'neighbours': 2.0}, 0.0)
    >>> clip_to_total({"neighbours": 1.0}, 1.5)
    ({'neighbours': 1.0}, 0.5)
    """
    rest = total - sum(predicted.values())
    settled = {}
    for name, value in predicted.items():
        cut = math.copysign(min(abs(value), abs(rest)), value) if value * rest < 0 else 0.0
        settled[name] = value - cut
        rest += cut
    return settled, rest


def scaling_causes(c: ScalingComparison) -> tuple[list[Cause], list[str]]:
    """Return the causes of the overhead, and descriptions of possible causes that were not measured."""
    compute_s, wait_s = c.compute_causes_s, c.growth_s("wait_s")
    straggler_s, jitter_s = (wait_s, 0.0) if has_straggler(c.scaled) else (0.0, wait_s)
    sharing_s, jitter_s = (jitter_s, 0.0) if c.is_time_sharing else (0.0, jitter_s)
    turns_s = None if wait_s is None or "turns" not in compute_s else compute_s["turns"] + (sharing_s or 0.0)
    on_wait = "how long the ranks wait for each other"
    on_contention = "the time of a rank's work alone and next to the others (--contention measures it)"
    rows: list[tuple[float | None, Callable[[ScalingComparison, float], Cause], str]] = [
        (compute_s.get("cores"), _cores_cause, "on how many cores the processes ran"),
        (turns_s, _time_sharing_cause, on_wait),
        (compute_s.get("efficiency"), _efficiency_cause, on_contention),
        (0.0 if is_oversubscribed(c.scaled) else compute_s.get("neighbours"), _contention_cause, on_contention),
    ]
    if c.growth_s("compute_s") is None:
        rows = [(None, _cores_cause, "forward and backward")]
    rows += [
        (c.growth_s("exposed_sync_s"), _communication_cause, "communication that backward did not hide"),
        (straggler_s, _straggler_cause, on_wait),
        (jitter_s, _jitter_cause, on_wait),
        (c.growth_s("data_s"), _input_cause, "waiting for input"),
        (c.growth_s("optimizer_s"), _optimizer_cause, "the update"),
    ]
    causes = [make_cause(c, cost_s) for cost_s, make_cause, _ in rows if cost_s]
    return causes, list(dict.fromkeys(what for cost_s, _, what in rows if cost_s is None))


# --- cores, efficiency, contention ------------------------------------------------------------------------------------


def _base_processes(c: ScalingComparison) -> str:
    return "the one process" if c.num_base_ranks == 1 else f"each of the {c.num_base_ranks} processes"


def _cores_cause(c: ScalingComparison, cost_s: float) -> Cause:
    """Explain cores: the added processes found none that were idle."""
    before, now = f"{c.base_cpus:.2f}", f"{c.scaled_cpus:.2f}"
    advice = "All cores are busy already: only another machine or a GPU would make training faster."
    if cost_s < 0:
        each = f"each of the {c.num_ranks} processes runs on {now} cores"
        return Cause(cost_s, f"because {each}, where {_base_processes(c)} ran on {before}", advice)
    more = c.num_ranks * c.scaled_cpus / (c.num_base_ranks * (c.base_cpus or 1.0))
    ran = (
        f"{_base_processes(c)} ran on {before} of {pluralize(c.scaled.cores, 'core')} with "
        f"{c.base.threads_text}, and each of the {c.num_ranks}"
    )
    if more < NOISE_RATIO:
        return Cause(cost_s, f"because the cores were taken already: {ran} has {now}: no core was added", advice)
    return Cause(
        cost_s,
        f"because the cores did not grow with the processes: {ran} on {now}, in all {more:.2g} times as many",
        advice,
    )


def _time_sharing_cause(c: ScalingComparison, cost_s: float) -> Cause:
    """Explain time sharing: more threads than cores, or other programs."""
    num, cores = c.num_ranks, pluralize(c.scaled.cores, "core")
    if is_oversubscribed(c.scaled):
        used = f", of which {_base_processes(c)} used {c.base_cpus:.2f}" if c.base_cpus else ""
        threads = pluralize(c.scaled.cores // num, "thread")
        advice = f"If {pluralize(num, 'process')}, then with {threads} each: --threads {c.scaled.cores // num}."
        if num > c.scaled.cores:
            advice = f"No more processes can compute at the same time than there are cores, {c.scaled.cores}."
        return Cause(
            cost_s,
            f"because {sum(c.scaled.threads)} threads share {cores}{used}: the ranks take turns, and one "
            "waits while another computes",
            advice,
        )
    contention = usable_contention(c.scaled)
    running = fmean(contention.together_cpus) if contention else busy_cpus(c.scaled, c.scaled_rank) or 0.0
    alone = f" and {c.scaled_cpus:.2f} when it computed alone" if contention else ""
    return Cause(
        cost_s,
        f"because other programs took the cores: a rank had {running:.2f} for its "
        f"{c.scaled.threads_text} while all computed{alone}",
        "Measure again when nothing else runs on the machine.",
    )


def _efficiency_cause(c: ScalingComparison, cost_s: float) -> Cause:
    """Explain efficiency: the CPU time per token without contention."""
    assert c.cpu_s_per_token is not None
    before, now = (format_seconds(1000 * token_s) for token_s in c.cpu_s_per_token)
    time = "CPU time" if is_on_cpus(c.scaled) else "time"
    sequences = first_micro_batch_sizes(c.scaled)[0]
    why = f"because the same work takes {'less' if cost_s < 0 else 'more'} time"
    if cost_s < 0 and fmean(c.scaled.threads) < fmean(c.base.threads):
        why = (
            f"because a process with {c.scaled.threads_text} uses its cores better than one that divides every "
            f"operation among {c.base.threads_text}, which wait for each other"
        )
    elif cost_s > 0 and sequences < first_micro_batch_sizes(c.base)[0]:
        why = f"because micro-batches of {sequences} sequences are computed less efficiently"
    return Cause(
        cost_s,
        f"{why}: 1,000 tokens take {now} of {time}, and took {before} with {pluralize(c.num_base_ranks, 'process')}",
        "A larger --batch gives every rank larger micro-batches.",
    )


def _contention_cause(c: ScalingComparison, cost_s: float) -> Cause:
    """Explain contention: memory bandwidth, caches, clock."""
    contention = usable_contention(c.scaled)
    assert contention is not None
    ratio = fmean(contention.together_s) / fmean(contention.alone_s)
    alone_Bps, together_Bps = fmean(contention.copy_alone_Bps), sum(contention.copy_together_Bps)
    with_cores = f" although it keeps its {fmean(contention.together_cpus):.2f} cores" if is_on_cpus(c.scaled) else ""
    slower = f"the same work takes a rank {ratio:.2f} times as long next to the others as alone{with_cores}"
    copies = (
        f"a copy runs at {format_bytes(alone_Bps)}/s alone, and {c.num_ranks} at once at "
        f"{format_bytes(together_Bps)}/s in all"
    )
    if together_Bps < MEMORY_BUS_FULL_SHARE * c.num_ranks * alone_Bps:
        halve = "; --dtype bf16 halves the bytes" if c.scaled.manifest.roster.dtypes_text == "fp32" else ""
        return Cause(
            cost_s,
            f"because the ranks share one memory, and its bandwidth is used up: {slower}, and {copies}",
            f"More processes here wait for the same memory; another machine brings a memory of its own{halve}.",
        )
    return Cause(
        cost_s,
        f"because the ranks slow each other down: {slower}; memory is not the reason ({copies}), which leaves shared "
        f"caches, two hardware threads of one core, or a lower clock",
    )


# --- communication, update, input -------------------------------------------------------------------------------------


def _shorter_phase_cause(c: ScalingComparison, cost_s: float, phase: str, name: str) -> Cause:
    """Explain a phase that shrank by more than the work did."""
    return Cause(cost_s, f"in {name}: {_phase_times_text(c, phase, ' a step')}")


def _phase_times_text(c: ScalingComparison, phase: str, per: str = "") -> str:
    before, now = (format_seconds(getattr(rank.typical, phase)) for rank in (c.base_rank, c.scaled_rank))
    return f"{now}{per}, and {before} with {pluralize(c.num_base_ranks, 'process')}"


def _communication_cause(c: ScalingComparison, cost_s: float) -> Cause:
    if cost_s < 0:
        return _shorter_phase_cause(c, cost_s, "exposed_sync_s", "communication that backward did not hide")
    rank, in_flight_s = slowest_rank(c.scaled), c.scaled.sync_p50_s
    text = f"to communication that backward did not hide, {cost_s / c.scaled_step_s:.0%} of the step"
    if rank.bytes and in_flight_s:
        text += (
            f": each rank sends {format_bytes(rank.bytes)} of gradients at {format_bytes(rank.bytes / in_flight_s)}/s"
        )
    return Cause(cost_s, text, _larger_batch_advice(c))


def _optimizer_cause(c: ScalingComparison, cost_s: float) -> Cause:
    if cost_s < 0:
        return _shorter_phase_cause(c, cost_s, "optimizer_s", "the update")
    update = f"the whole update of {format_count(c.scaled.manifest.num_params)} parameters"
    text = f"because every process repeats {update}: {_phase_times_text(c, 'optimizer_s')}"
    return Cause(cost_s, text, _larger_batch_advice(c))


def _input_cause(c: ScalingComparison, cost_s: float) -> Cause:
    if cost_s < 0:
        return _shorter_phase_cause(c, cost_s, "data_s", "waiting for input")
    advice = "Make the input faster first: a local disk, or a corpus that fits in memory."
    return Cause(cost_s, f"waiting for input: {_phase_times_text(c, 'data_s', ' a step')}", advice)


def _larger_batch_advice(c: ScalingComparison) -> str:
    """Recommend a larger batch if that amortizes costs per step. *Assumption*: the rest grows with the batch."""
    before_s = c.base_rank.typical.optimizer_s or 0.0
    once_s = (c.scaled_rank.typical.exposed_sync_s or 0.0) + (c.scaled_rank.typical.optimizer_s or 0.0)
    work, batch = c.num_ranks * c.work_ratio / c.num_base_ranks, c.scaled.manifest.spec.train.batch
    for factor in BATCH_FACTORS:
        many_s = factor * (c.scaled_step_s - once_s) + once_s
        speedup = work * (factor * (c.base_step_s - before_s) + before_s) / many_s
        if speedup > MIN_BATCH_SPEEDUP and speedup > MIN_BATCH_SPEEDUP * work * c.base_step_s / c.scaled_step_s:
            return (
                f"Communication and update are paid once a step: with --batch {factor * batch} they would fall from "
                f"{once_s / c.scaled_step_s:.0%} to {once_s / many_s:.0%} of it, and "
                f"{pluralize(c.num_ranks, 'process')} train about "
                f"{speedup:.2f} times the tokens/s of {pluralize(c.num_base_ranks, 'process')}."
            )
    return ""


# --- waiting for each other -------------------------------------------------------------------------------------------


def _straggler_cause(c: ScalingComparison, cost_s: float) -> Cause:
    slow = slowest_rank(c.scaled)
    name, why = c.scaled.rank_label(slow), straggler_reason(c.scaled, slow, c.scaled_rank)
    advice = f"What slows {name} slows all: look there first."
    return Cause(cost_s, f"waiting for {name}, the slowest: {why}", advice)


def _jitter_cause(c: ScalingComparison, cost_s: float) -> Cause:
    if cost_s < 0:
        return _shorter_phase_cause(c, cost_s, "wait_s", "waiting for other ranks")
    waits = [rank.typical.wait_s or 0.0 for rank in c.scaled.ranks]
    least, most = format_seconds(min(waits)), format_seconds(max(waits))
    return Cause(cost_s, f"because now one rank is late, now another, and the rest wait, {least} to {most} a step")
