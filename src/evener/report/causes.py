"""Why are N processes not N times as fast as one? The difference, cause by cause, in seconds of a step.

    step of many  =  share · step of few  +  Σ causes  +  unexplained

`share` is what a rank has of the work that a rank of the smaller run had: 1/2 where 2 processes divide the batch of one,
1 where every process brings a batch of its own. The parts of StepCost divide the difference by subtraction. That of
compute is divided further, by what was measured beside it: the processors on which the ranks really ran, and the same
work timed by each rank alone and by all at once (Contention).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import msgspec

from evener.core.resolve import MICRO_BATCH_TOKENS
from evener.core.rundir import Manifest
from evener.core.units import count, seconds, size
from evener.plan.balance import equal_shares, micro_batch_sizes
from evener.report.summary import RankSummary, Summary

CLEAR = 1.1  # a ratio of two timings nearer to 1 is taken for noise
BUS_IS_FULL = 0.75  # of the bandwidth that the ranks would have together if each kept what it has alone
STRAGGLES = 0.05  # of the step: how much longer the others wait


class Comparison:
    """Two runs with measured steps, on few ranks and on many, and the figures that tell causes apart."""

    def __init__(self, few: Summary, many: Summary) -> None:
        assert few.step_p50_s and many.step_p50_s, "a run without steps cannot be compared"
        self.few, self.many = few, many
        self.few_s, self.many_s = few.step_p50_s, many.step_p50_s
        self.num_few, self.num = few.manifest.world_size, many.manifest.world_size
        self.share = many.tokens_per_step / self.num / (few.tokens_per_step / self.num_few)
        self.ideal_s = self.share * self.few_s
        self.gap_s = self.many_s - self.ideal_s
        self.few_rank, self.many_rank = first_done(few), first_done(many)

    def growth_s(self, part: str) -> float | None:
        """By how much a part of the step is longer than this rank's share of it was."""
        before, now = getattr(self.few_rank.typical, part), getattr(self.many_rank.typical, part)
        return None if before is None or now is None else now - self.share * before

    @functools.cached_property
    def few_cpus(self) -> float | None:
        """Processors on which a rank of the smaller run computed."""
        contention = self.few.manifest.contention
        if self.num_few == 1 and self.few_rank.cpus is not None:
            return self.few_rank.cpus
        return mean(contention.together_cpus) if contention else None

    @functools.cached_property
    def many_cpus(self) -> float:
        """Processors on which a rank of the larger run computes when the others let it; its threads if not measured."""
        contention = self.many.manifest.contention
        return mean(contention.alone_cpus) if contention else float(self.many.threads)

    @functools.cached_property
    def efficiency(self) -> float | None:
        """Processor time for a sequence, alone: of a rank of the larger run over that of the smaller. Below 1: a gain."""
        before, now = sequence_s(self.few), sequence_s(self.many)
        return None if before is None or now is None else now / before

    @functools.cached_property
    def neighbours(self) -> float | None:
        """Processor time for the same work: while all ranks compute over alone. Above 1: they slow each other down."""
        contention = self.many.manifest.contention
        if contention is None or is_overbooked(self.many):  # overbooked: threads that wait for each other burn processors
            return None
        ratio = mean(contention.together_s) / mean(contention.alone_s)
        return ratio * mean(contention.together_cpus) / mean(contention.alone_cpus) if on_cpus(self.many) else ratio

    @functools.cached_property
    def take_turns(self) -> bool:
        """Are there fewer processors than the ranks of the larger run have work for?"""
        if not on_cpus(self.many):
            return False
        contention = self.many.manifest.contention
        if contention:
            lost = mean(contention.alone_cpus) / mean(contention.together_cpus)
        else:
            at_work = cpus_at_work(self.many, self.many_rank)
            lost = self.many.threads / at_work if at_work else 1.0
        return is_overbooked(self.many) or lost > CLEAR

    @functools.cached_property
    def compute_s(self) -> dict[str, float | None]:
        """The difference in compute by name: cores, efficiency, neighbours, turns.

        Factors multiply, so their logarithms add: each takes ln f / Σ ln f of the difference. A probe's factor is cut to
        what the steps themselves show; what no factor explains is the cost of taking turns where the ranks do.
        """
        growth_s = self.growth_s("compute_s")
        found: dict[str, float | None] = dict.fromkeys(("cores", "efficiency", "neighbours", "turns"))
        if not growth_s:
            return found
        now_s = self.many_rank.typical.compute_s or 0.0
        total = math.log(now_s / (now_s - growth_s))
        logs = {"cores": 0.0}
        if on_cpus(self.many):
            logs["cores"] = math.log(self.few_cpus / self.many_cpus) if self.few_cpus else math.nan
        for name, ratio in (("efficiency", self.efficiency), ("neighbours", self.neighbours)):
            if ratio is not None:
                logs[name] = math.log(ratio) if not 1 / CLEAR < ratio < CLEAR else 0.0
        rest = total - sum(log for log in logs.values() if not math.isnan(log))
        for name in logs.keys() - {"cores"}:
            too_much = min(abs(logs[name]), abs(rest)) if logs[name] * rest < 0 else 0.0
            logs[name] -= math.copysign(too_much, logs[name])
            rest += math.copysign(too_much, logs[name])
        logs["turns"] = max(rest, 0.0) if self.take_turns else 0.0
        ...
