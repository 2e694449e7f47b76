"""Explain the prediction error: attribute measured minus predicted step time to causes.

Everything here subtracts a Prediction from a RunSummary. The step is explained on one rank: the measured straggler if
the step took longer than predicted, the predicted straggler if it took less. On that rank the differences of the
phases sum to the difference of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from evener.core.base.units import format_bytes, format_count, format_seconds, pluralize
from evener.core.run.prediction import HostRates, PlanOption, Prediction, RankCost
from evener.core.run.roster import Member
from evener.core.run.step_cost import PHASE_NAMES, PHASES
from evener.core.run.step_statistics import RankSummary
from evener.report.explain.causes import MAX_NAMED_CAUSES, MIN_NAMED_SHARE, Cause, largest_causes, unexplained_s
from evener.report.read.run_summary import RunSummary
from evener.report.read.stragglers import (
    NOISE_RATIO,
    WORK_PHASES,
    has_straggler,
    is_noise,
    slowest_rank,
    usable_contention,
)

ERROR_TOLERANCE = 0.10  # of the step: a prediction within this counts as right
BYTES_TOLERANCE = 0.03  # relative: predicted and sent bytes may differ by this
MEMORY_FULL_SHARE = 0.9  # of a host's memory
NO_PREDICTION = (
    "Nothing was predicted here. evener probe host measures the machines, evener probe wire the links between them; "
    "every later run is predicted before it starts."
)


def explain_prediction(summary: RunSummary, prediction: Prediction | None) -> list[str]:
    """Return sentences: whether the prediction was right, and the cause of each difference that matters."""
    if prediction is None and summary.manifest.program is not None:
        return ["Nothing was predicted: no earlier run of this program on these hosts was there to predict from."]
    if prediction is None:
        return [NO_PREDICTION]
    option = prediction.option(prediction.chosen)
    if len(option.ranks) != summary.manifest.world_size:
        run_ranks = pluralize(summary.manifest.world_size, "rank")
        return [
            f"The prediction is of {pluralize(len(option.ranks), 'rank')} and the run had {run_ranks}: not compared."
        ]
    result = f"A step was predicted to take {format_seconds(option.step_s)}"
    if not summary.step_p50_s:
        return [f"{result}; none was recorded{summary.manifest.window_text}."]
    run = _PredictedRun(summary, prediction, option, summary.step_p50_s)
    explained, tolerance_s = run.explained_rank, ERROR_TOLERANCE * run.scale_s
    result += f" and took {format_seconds(run.step_s)}"
    is_near = abs(run.error_s) <= ERROR_TOLERANCE * option.step_s
    if is_near and all(abs(error_s) <= tolerance_s for error_s in explained.phase_errors_s.values()):
        masked = [
            f"The step does not show it: {cause.reason}."
            for rank in run.ranks
            if rank is not explained  # the others would have waited anyway
            for cause in _compute_causes(rank)
            if abs(cause.cost_s) > tolerance_s
        ]
        return [f"{result}: as predicted within {ERROR_TOLERANCE:.0%}.", *masked[:MAX_NAMED_CAUSES]]
    if not is_near:
        result += f", {abs(run.error_s) / option.step_s:.0%} {'longer' if run.error_s > 0 else 'less'}"
    named, missing = largest_causes(_error_causes(explained), run.scale_s), _missing_phases(explained)
    sentences = [f"{result}.", *_accurate_phases(explained)]
    sentences += [f"{_signed_text(cause.cost_s)}: {cause.reason}." for cause in named]
    if rest_s := unexplained_s(run.error_s, named, run.scale_s):
        why = "are not explained" if missing else "in all come from smaller differences"
        sentences.append(f"{_signed_text(rest_s)} {why}.")
    return sentences + missing


def _signed_text(difference_s: float) -> str:
    return f"{format_seconds(abs(difference_s))} {'more' if difference_s > 0 else 'less'}"


@dataclass(frozen=True)
class _PredictedRun:
    """A run and its prediction."""

    summary: RunSummary
    prediction: Prediction
    option: PlanOption
    step_s: float  # measured

    @property
    def error_s(self) -> float:
        return self.step_s - self.option.step_s

    @property
    def scale_s(self) -> float:
        """The longer of the measured and the predicted step time, to which differences are relative."""
        return max(self.step_s, self.option.step_s)

    @cached_property
    def ranks(self) -> list[_PredictedRank]:
        return [_PredictedRank(self, rank) for rank in range(len(self.option.ranks))]

    @property
    def predicted_straggler(self) -> _PredictedRank:
        return self.ranks[self.option.straggler.rank]

    @property
    def straggler(self) -> _PredictedRank:
        return self.ranks[slowest_rank(self.summary).rank]

    @property
    def explained_rank(self) -> _PredictedRank:
        """The measured straggler if the step took at least as long as predicted, else the predicted straggler.

        On this rank the differences of the phases sum to the difference of the step.
        """
        return self.straggler if self.error_s >= 0 else self.predicted_straggler


@dataclass(frozen=True)
class _PredictedRank:
    """The prediction and the measurements of one rank."""

    run: _PredictedRun
    rank: int

    @property
    def predicted_member(self) -> Member:
        return self.run.option.roster.members[self.rank]

    @property
    def planned(self) -> RankCost:
        return self.run.option.ranks[self.rank]

    @property
    def took(self) -> RankSummary:
        return self.run.summary.ranks[self.rank]

    @property
    def host(self) -> HostRates:
        return self.run.prediction.cluster.hosts[self.predicted_member.host]

    @property
    def name(self) -> str:
        return self.run.option.roster.rank_label(self.rank)

    @property
    def threads(self) -> int:
        return self.run.summary.threads[self.rank]

    @cached_property
    def phase_errors_s(self) -> dict[str, float]:
        """Measured minus predicted seconds of every phase that is known on both sides."""
        pairs = {phase: (getattr(self.planned.cost, phase), getattr(self.took.typical, phase)) for phase in PHASES}
        return {phase: b - a for phase, (a, b) in pairs.items() if a is not None and b is not None}

    @cached_property
    def compute_cpus(self) -> float | None:
        """The number of processors busy while the rank works, at most its threads; None on a GPU or if not measured.

        CPU time spent on communication is subtracted if the probe measured its rate.
        """
        work_s = sum(getattr(self.took.typical, phase) or 0.0 for phase in WORK_PHASES)
        if self.took.cpu_s is None or self.predicted_member.is_gpu or not work_s:
            return None
        carrying_s = (self.took.bytes or 0) / self.host.sync_Bps if self.host.sync_Bps else 0.0
        return min(max(0.0, self.took.cpu_s - carrying_s) / work_s, float(self.threads)) or None

    @property
    def assumed_rate(self) -> str | None:
        """The assumption that replaces an unmeasured rate of this rank's host, if there is one."""
        marks = ("its rate of", "was measured in", "of the matrix products")
        for line in self.run.prediction.cluster.assumed:
            subject, _, assumption = line.partition(": ")
            names = subject.replace(" and ", ", ").split(", ")
            is_match = self.predicted_member.host in names or subject == "all hosts" or subject.endswith(" more")
            if is_match and any(mark in assumption for mark in marks):
                return line
        return None

    def finding(self, check: str) -> str | None:
        """Return the evidence of this check's finding about the rank's host, if there is one."""
        key = check, self.predicted_member.host
        return next((each.evidence for each in self.run.summary.findings if (each.check, each.host) == key), None)

    def pace_text(self, ratio: float) -> str:
        """Return how much slower or faster than predicted the rank computes; `ratio` is measured / predicted time."""
        factor = max(ratio, 1 / ratio)
        figure = f"{factor:.0f}" if factor >= 99.5 else f"{factor:.2g}"
        source = "predicted" if self.assumed_rate else "probed"
        return f"{figure} times {'slower' if ratio >= 1 else 'faster'} than {source}"

    def computes_text(self, ratio: float) -> str:
        return f"{self.name} computes {self.pace_text(ratio)}, {format_seconds(self.took.typical.compute_s)} a step"


def _error_causes(rank: _PredictedRank) -> list[Cause]:
    """Return the causes of one rank's differences; their costs sum to the differences of the known phases."""
    planned, took, errors_s = rank.planned.cost, rank.took.typical, rank.phase_errors_s
    causes = [*_compute_causes(rank), *_communication_causes(rank)]
    reasons = {
        "wait_s": _wait_reason(rank),
        "optimizer_s": f"the update takes {rank.name} {format_seconds(took.optimizer_s)}, predicted were "
        f"{format_seconds(planned.optimizer_s)}",
        "data_s": f"{rank.name} waits {format_seconds(took.data_s)} for input, predicted were "
        f"{format_seconds(planned.data_s)}",
    }
    return causes + [Cause(errors_s[phase], reason) for phase, reason in reasons.items() if phase in errors_s]


# --- forward and backward ---------------------------------------------------------------------------------------------


def _compute_causes(rank: _PredictedRank) -> list[Cause]:
    """Attribute the difference in compute time to the share, the speed of a processor, and the number of processors.

    s₁  predicted time, scaled to the share of the batch that the rank really had
    s₂  measured time, scaled to the number of processors that the rank had when it was probed
    s₃  measured time

    s₁ - predicted time is due to the share, s₂ - s₁ to the speed of a processor, s₃ - s₂ to the number of processors.
    """
    planned_s, took_s, took = rank.planned.cost.compute_s, rank.took.typical.compute_s, rank.took
    if planned_s is None or took_s is None:
        return []
    planned_tokens = rank.run.option.roster.mean_shares[rank.rank] * rank.run.prediction.job.shape.block_size
    share = took.tokens / planned_tokens if took.tokens and planned_tokens else 1.0
    causes, shared_s = [], planned_s
    if abs(share - 1) >= MIN_NAMED_SHARE:
        shared_s = planned_s * share
        unit = rank.run.prediction.job.unit
        work = f"{format_count(took.tokens)} {unit} a step, predicted were {format_count(planned_tokens)}"
        causes.append(Cause(shared_s - planned_s, f"{rank.name} computes {work}"))
    if not shared_s:
        return [*causes, Cause(took_s, f"{rank.name} computes, which was not predicted")] if took_s else causes
    slower_s, ratio = took_s - shared_s, took_s / shared_s
    swapping = rank.finding("mem.swap")
    if swapping is not None and slower_s > 0:
        reason = f"{rank.computes_text(ratio)}: it was swapping when the run began ({swapping})"
        return [*causes, Cause(slower_s, reason)]
    had, probed = rank.compute_cpus, rank.host.cpus
    if had is None or probed is None or is_noise(probed / had):
        counts = None if had is None or probed is None else (had, probed)
        return [*causes, Cause(slower_s, f"{rank.computes_text(ratio)}{_slowdown_reason(rank, ratio, counts)}")]
    all_there_s, taken = took_s * had / probed, _cpu_share_text(rank, had, probed)
    if abs(all_there_s - shared_s) < MIN_NAMED_SHARE * rank.run.scale_s:  # too small for a sentence
        return [*causes, Cause(slower_s, f"{rank.computes_text(ratio)}: {taken}")]
    own_ratio = all_there_s / shared_s
    pace = f"{rank.pace_text(own_ratio)}{_slowdown_reason(rank, own_ratio, None)}"
    return [
        *causes,
        Cause(took_s - all_there_s, f"{rank.computes_text(probed / had)}: {taken}"),
        Cause(all_there_s - shared_s, f"each processor that {rank.name} had works {pace}"),
    ]


def _cpu_share_text(rank: _PredictedRank, had: float, probed: float) -> str:
    """Say how many processors a rank had, and what may have taken the others."""
    if had > probed:
        return f"while it had work it ran on {had:.1f} processors, and on {probed:.1f} when it was probed"
    if rank.threads < 0.95 * probed:
        threads = pluralize(rank.threads, "thread")
        return f"it was given {threads}, and ran on {probed:.1f} processors when it was probed"
    text = f"while it had work it ran on {had:.1f} of {probed:.1f} processors, the rest taken by others or by a limit"
    thirds = rank.took.thirds
    if thirds and thirds[0].compute_s and (thirds[1].compute_s or 0.0) > NOISE_RATIO * thirds[0].compute_s:
        first, last = (format_seconds(third.compute_s) for third in thirds)
        text += (
            f", more of them as time went on (its forward and backward took {first} in the first third of the run, "
            f"{last} in the last)"
        )
    result, memory = rank.run.summary.manifest.result, rank.host.memory_bytes
    if result and memory:
        ours = [peak for peak, member in zip(result.peak_memory_bytes, rank.run.option.roster.members, strict=False)
                if member.host == rank.predicted_member.host]  # fmt: skip
        if sum(ours) > MEMORY_FULL_SHARE * memory:
            text += (
                f"; its ranks filled {format_bytes(sum(ours))} of its {format_bytes(memory)} of memory, so "
                f"it may have been swapping"
            )
    return text


def _slowdown_reason(rank: _PredictedRank, ratio: float, cpus: tuple[float, float] | None) -> str:
    """Say why the same work takes a processor or GPU `ratio` times as long as probed.

    `cpus`: on how many processors the rank ran, and on how many when probed, if that is evidence too.
    """
    manifest, planned = rank.run.summary.manifest, rank.predicted_member
    member = manifest.roster.members[rank.rank]
    if member.dtype != planned.dtype:
        return f", in {member.dtype}; predicted was {planned.dtype}"
    if (derived := rank.assumed_rate) is not None:
        return f"; that rate was not measured: {derived}"
    if ratio < 1 and manifest.compiled:
        return ": torch.compile, which the probe did not use"
    if ratio < 1:
        return ": something slowed the host down when it was probed; evener probe host measures again"
    working = "" if cpus is None else f", although it ran on {cpus[0]:.1f} processors ({cpus[1]:.1f} when probed)"
    throttled = rank.finding("cpu.throttled")
    if (slowed := _throttled_compute_s(rank)) is not None:
        first, last = map(format_seconds, slowed)
        why = throttled or "heat or its power supply: evener probe host --seconds 60 tells"
        return (
            f"{working}. It slowed down during the run, from {first} in its first third to {last} in its last: "
            f"throttled ({why})"
        )
    if throttled is not None:
        return f"{working}: throttled ({throttled})"
    contention = usable_contention(rank.run.summary)
    if contention is not None:
        slowdown = contention.together_s[rank.rank] / contention.alone_s[rank.rank]
        if slowdown > NOISE_RATIO:
            same_work = f"the same work takes it {slowdown:.2g} times as long as alone"
            return f"{working}: while the other ranks of its host compute, {same_work}"
    if member.micro_batch != planned.micro_batch:
        sequences = pluralize(member.micro_batch, "sequence")
        return f"{working}: in micro-batches of {sequences}, predicted were {planned.micro_batch}"
    if planned.is_gpu:
        return ": a lower clock (heat, power limit), or other programs on it"
    if rank.host.cpus is None or rank.compute_cpus is None:
        return "; whether its processors were taken or slow is not known: on how many it ran was not measured"
    return f"{working}: a lower clock (heat, battery), or memory and caches that other programs use too"


def _throttled_compute_s(rank: _PredictedRank) -> tuple[float, float] | None:
    """Return compute seconds in the run's first and last third if the processor itself slowed down, else None."""
    if rank.took.thirds is None:
        return None
    first, last = rank.took.thirds
    if first.compute_s is None or last.compute_s is None or last.compute_s < NOISE_RATIO * first.compute_s:
        return None
    if not rank.predicted_member.is_gpu and first.cpu_s and last.cpu_s and last.cpu_s < NOISE_RATIO * first.cpu_s:
        return None  # the same CPU time in more wall time: the processors were taken, not slow
    return first.compute_s, last.compute_s


# --- communication and waiting ----------------------------------------------------------------------------------------


def _communication_causes(rank: _PredictedRank) -> list[Cause]:
    """Attribute the difference in exposed communication (bytes / rate - time hidden by backward) to these three."""
    planned, took = rank.planned, rank.took
    planned_s, took_s = planned.cost.exposed_sync_s, took.typical.exposed_sync_s
    if planned_s is None or took_s is None:
        return []
    error_s = took_s - planned_s
    if not took.sync_s or not planned.sync_s or not took.bytes or not planned.bytes:
        reason = (
            f"communication that backward did not hide takes {format_seconds(took_s)}, predicted were "
            f"{format_seconds(planned_s)}"
        )
        return [Cause(error_s, reason)]
    more_bytes = took.bytes / planned.bytes - 1
    more_bytes_s = planned.sync_s * more_bytes if abs(more_bytes) >= BYTES_TOLERANCE else 0.0
    rate_s = took.sync_s - planned.sync_s - more_bytes_s
    hidden_less_s = error_s - more_bytes_s - rate_s
    if error_s * rate_s > 0 and error_s * hidden_less_s < 0:  # more time in flight leaves more that backward can hide
        rate_s, hidden_less_s = rate_s + hidden_less_s, 0.0
    elif error_s * hidden_less_s > 0 and error_s * rate_s < 0:
        rate_s, hidden_less_s = 0.0, rate_s + hidden_less_s
    medium, before = "communication between the ranks of this machine", "predicted"
    if len(rank.run.option.roster.hosts) > 1:
        medium, before = "the network", "measured"
    rate = (
        f"{medium} is {'slower' if rate_s > 0 else 'faster'} than {before}: {format_bytes(took.bytes)} were "
        f"{format_seconds(took.sync_s)} in flight, {format_bytes(took.bytes / took.sync_s)}/s; predicted were "
        f"{format_seconds(planned.sync_s)}, {format_bytes(planned.bytes / planned.sync_s)}/s"
        f"{_comm_cpu_text(rank.run) if rate_s > 0 else ''}"
    )
    hidden, expected = (
        f"{max(0.0, (sync_s - exposed_s) / sync_s):.0%}"
        for exposed_s, sync_s in ((took_s, took.sync_s), (planned_s, planned.sync_s))
    )
    more_or_less = "less" if hidden_less_s > 0 else "more"
    overlap = f"backward hid {more_or_less} of the communication than predicted, "
    if hidden == expected:
        overlap += f"{format_seconds(abs(hidden_less_s))} of {format_seconds(took.sync_s)} in flight"
    else:
        overlap += f"{hidden} of {format_seconds(took.sync_s)} in flight instead of {expected}"
    sent = f"a rank sends {format_bytes(took.bytes)} a step, predicted were {format_bytes(planned.bytes)}"
    return [Cause(more_bytes_s, sent), Cause(rate_s, rate), Cause(hidden_less_s, overlap)]


def _comm_cpu_text(run: _PredictedRun) -> str:
    """Return a clause that names a CPU rank that lacked processors, which also send and add; "" if none did."""
    for rank in run.ranks:
        if rank.compute_cpus and rank.host.cpus and rank.host.cpus > NOISE_RATIO * rank.compute_cpus:
            return f"; or it lacks the processors that were taken from {rank.name}, which also send and add"
    return ""


def _wait_reason(rank: _PredictedRank) -> str:
    run = rank.run
    if rank.phase_errors_s.get("wait_s", 0.0) < 0:
        if rank is run.predicted_straggler:
            return f"{rank.name} waits less for the others than predicted"
        now = (
            "it is the one that the others wait for" if has_straggler(run.summary) else "all are done at the same time"
        )
        return f"{rank.name} was predicted to wait that long for {run.predicted_straggler.name}; now {now}"
    if rank is not run.straggler and has_straggler(run.summary):
        return f"{rank.name} was predicted to be done last; now it waits for {run.straggler.name}"
    least_s = run.straggler.took.typical.wait_s or 0.0
    return f"now one rank is late, now another, and each of them waits {format_seconds(least_s)} or more"


# --- around the causes ------------------------------------------------------------------------------------------------


def _accurate_phases(rank: _PredictedRank) -> list[str]:
    """List the large phases that were predicted right and so need no cause."""
    planned, took = rank.planned.cost, rank.took.typical
    right = [
        f"{PHASE_NAMES[phase]} {format_seconds(getattr(took, phase))}"
        for phase, error_s in rank.phase_errors_s.items()
        if getattr(took, phase) >= MIN_NAMED_SHARE * rank.run.scale_s
        and abs(error_s) <= ERROR_TOLERANCE * getattr(planned, phase)
    ]
    return [f"As predicted: {', '.join(right)}."] if right else []


def _missing_phases(rank: _PredictedRank) -> list[str]:
    sentences = []
    for verb, cost in (("predicted", rank.planned.cost), ("measured", rank.took.typical)):
        names = [PHASE_NAMES[phase] for phase in PHASES if getattr(cost, phase) is None]
        if names:
            sentences.append(f"Not {verb}, so not compared: {', '.join(names)}.")
    return sentences
