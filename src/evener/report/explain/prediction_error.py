"""Explain the prediction error: attribute measured minus predicted step time to causes.

Everything here subtracts a Prediction from a RunSummary. The step is explained on one rank: the measured straggler if
the step took longer than predicted, the predicted straggler if it took less. On that rank the differences of the
phases sum to the difference of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.core.base.units import format_bytes, format_count, format_seconds, pluralize
from evener.core.run.prediction import HostRates, PlanOption, Prediction
from evener.core.run.roster import Member
from evener.core.run.step_cost import PHASES
from evener.report.draw.run_charts import PHASE_NAMES
from evener.report.read.run_summary import RunSummary
from evener.report.read.stragglers import NOISE_RATIO, WORK_PHASES, has_straggler, slowest_rank, usable_contention

ERROR_TOLERANCE = 0.10  # of the step: a prediction within this counts as right
MIN_NAMED_SHARE = 0.05  # of the step: smaller differences get no sentence
MAX_NAMED_CAUSES = 4
BYTES_TOLERANCE = 0.03  # relative: predicted and sent bytes may differ by this
MEMORY_FULL_SHARE = 0.9  # of a host's memory
NO_PREDICTION = (
    "Nothing was predicted here. evener probe host measures the machines, evener probe wire the links between them; "
    "every later run is predicted before it starts."
)


def explain_prediction(summary: RunSummary, prediction: Prediction | None) -> list[str]:
    """Return sentences: whether the prediction was right, and the cause of each difference that matters."""
    if prediction is None:
        return [NO_PREDICTION]
    option = prediction.option(prediction.chosen)
    if len(option.ranks) != summary.manifest.world_size:
        run_ranks = pluralize(summary.manifest.world_size, "rank")
        return [
            f"The prediction is of {pluralize(len(option.ranks), 'rank')} and the run had {run_ranks}: not compared."
        ]
    if not summary.step_p50_s:
        return [
            f"A step was predicted to take {format_seconds(option.step_s)}; none was "
            f"recorded{summary.manifest.window_text}."
        ]
    c = _PredictedRun(summary, prediction, option)
    result = f"A step was predicted to take {format_seconds(option.step_s)} and took {format_seconds(c.step_s)}"
    near = abs(c.error_s) <= ERROR_TOLERANCE * option.step_s
    if near and all(
        abs(diff_s) <= ERROR_TOLERANCE * c.scale_s for diff_s in c.phase_errors_s(c.explained_rank).values()
    ):
        return [f"{result}: as predicted within {ERROR_TOLERANCE:.0%}.", *_masked_errors(c)]
    result += "." if near else f", {abs(c.error_s) / option.step_s:.0%} {'longer' if c.error_s > 0 else 'less'}."
    causes = [cause for cause in _error_causes(c, c.explained_rank) if abs(cause.cost_s) >= MIN_NAMED_SHARE * c.scale_s]
    causes.sort(key=lambda cause: -abs(cause.cost_s))
    named = causes[:MAX_NAMED_CAUSES]
    return [
        result,
        *_accurate_phases(c),
        *(cause.sentence for cause in named),
        *_unexplained_error(c, named),
        *_missing_phases(c),
    ]


@dataclass(frozen=True)
class _ErrorCause:
    """One cause of the prediction error, and its share of it."""

    cost_s: float  # > 0: it makes the step longer
    reason: str

    @property
    def sentence(self) -> str:
        return f"{format_seconds(abs(self.cost_s))} {'more' if self.cost_s > 0 else 'less'}: {self.reason}."


@dataclass(frozen=True)
class _PredictedRun:
    """A run and its prediction."""

    summary: RunSummary
    prediction: Prediction
    option: PlanOption

    @property
    def step_s(self) -> float:
        assert self.summary.step_p50_s
        return self.summary.step_p50_s

    @property
    def error_s(self) -> float:
        return self.step_s - self.option.step_s

    @property
    def scale_s(self) -> float:
        """The step time that differences are compared with."""
        return max(self.step_s, self.option.step_s)

    @property
    def is_multi_host(self) -> bool:
        return len(self.option.roster.hosts) > 1

    @property
    def predicted_straggler(self) -> int:
        """The rank that was predicted to wait least."""
        waits = [rank.cost.wait_s or 0.0 for rank in self.option.ranks]
        return waits.index(min(waits))

    @property
    def explained_rank(self) -> int:
        """The rank on which the step is explained; see the module's docstring."""
        return slowest_rank(self.summary).rank if self.error_s >= 0 else self.predicted_straggler

    def member(self, rank: int) -> Member:
        """Return the rank as it was predicted."""
        return self.option.roster.members[rank]

    def host(self, rank: int) -> HostRates:
        return self.prediction.cluster.hosts[self.member(rank).host]

    def name(self, rank: int) -> str:
        return self.option.roster.rank_label(rank)

    def phase_errors_s(self, rank: int) -> dict[str, float]:
        """Return measured minus predicted seconds of every phase that is known on both sides."""
        planned, took = self.option.ranks[rank].cost, self.summary.ranks[rank].typical
        pairs = {part: (getattr(planned, part), getattr(took, part)) for part in PHASES}
        return {part: b - a for part, (a, b) in pairs.items() if a is not None and b is not None}

    def finding(self, rank: int, check: str) -> str | None:
        """Return the evidence of this check's finding about the rank's host, if there is one."""
        host = self.member(rank).host
        return next((each.evidence for each in self.summary.findings if (each.check, each.host) == (check, host)), None)


def _error_causes(c: _PredictedRun, rank: int) -> list[_ErrorCause]:
    """Return the causes of one rank's differences; their costs sum to the differences of the known phases."""
    diffs_s = c.phase_errors_s(rank)
    planned, took = c.option.ranks[rank], c.summary.ranks[rank]
    causes = _compute_causes(c, rank) if "compute_s" in diffs_s else []
    if "exposed_sync_s" in diffs_s:
        causes += _communication_causes(c, rank, diffs_s["exposed_sync_s"])
    if "wait_s" in diffs_s:
        causes.append(_ErrorCause(diffs_s["wait_s"], _wait_reason(c, rank, diffs_s["wait_s"])))
    if "optimizer_s" in diffs_s:
        update = (
            f"the update takes {c.name(rank)} {format_seconds(took.typical.optimizer_s)}, predicted were "
            f"{format_seconds(planned.cost.optimizer_s)}"
        )
        causes.append(_ErrorCause(diffs_s["optimizer_s"], update))
    if "data_s" in diffs_s:
        data = (
            f"{c.name(rank)} waits {format_seconds(took.typical.data_s)} for input, predicted were "
            f"{format_seconds(planned.cost.data_s)}"
        )
        causes.append(_ErrorCause(diffs_s["data_s"], data))
    return causes


# --- forward and backward ---------------------------------------------------------------------------------------------


def _compute_causes(c: _PredictedRun, rank: int) -> list[_ErrorCause]:
    """Attribute the difference in compute to the share, the speed of a processor, and the number of processors.

    planned · share      predicted time of the work that the rank really had   s₁
    took · had / probed  measured time, scaled to as many processors as probed s₂
    took                 measured time                                         s₃

    s₁ - planned is due to the share, s₂ - s₁ to the processors' own speed, s₃ - s₂ to processors that were taken.
    """
    planned, took, host = c.option.ranks[rank], c.summary.ranks[rank], c.host(rank)
    planned_s, took_s = planned.cost.compute_s, took.typical.compute_s
    assert planned_s is not None
    assert took_s is not None
    planned_tokens = c.option.roster.mean_shares[rank] * c.prediction.job.shape.block_size
    share = took.tokens / planned_tokens if took.tokens and planned_tokens else 1.0
    if abs(share - 1) < MIN_NAMED_SHARE:
        share = 1.0
    shared_s = planned_s * share
    causes = []
    if share != 1.0:
        work = (
            f"{c.name(rank)} computes {format_count(took.tokens)} tokens a step, predicted were "
            f"{format_count(planned_tokens)}"
        )
        causes.append(_ErrorCause(shared_s - planned_s, work))
    if not shared_s:
        return [*causes, _ErrorCause(took_s, f"{c.name(rank)} computes, which was not predicted")] if took_s else causes
    swapping = c.finding(rank, "mem.swap")
    if swapping is not None and took_s > shared_s:
        return [
            *causes,
            _ErrorCause(
                took_s - shared_s,
                f"{_compute_ratio_text(c, rank, took_s / shared_s)}: it was swapping when the run began ({swapping})",
            ),
        ]
    had, whole = _compute_cpus(c, rank), took_s / shared_s
    if had is None or host.cpus is None or 1 / NOISE_RATIO < host.cpus / had < NOISE_RATIO:
        return [
            *causes,
            _ErrorCause(
                took_s - shared_s, f"{_compute_ratio_text(c, rank, whole)}{_slowdown_reason(c, rank, had, whole)}"
            ),
        ]
    all_there_s, taken = took_s * had / host.cpus, _cpu_share_text(c, rank, had, host.cpus)
    ratio = all_there_s / shared_s
    if abs(all_there_s - shared_s) < MIN_NAMED_SHARE * c.scale_s:  # too small for a sentence
        return [*causes, _ErrorCause(took_s - shared_s, f"{_compute_ratio_text(c, rank, whole)}: {taken}")]
    pace = f"{_ratio_text(ratio)} than {_rate_source(c, rank)}{_slowdown_reason(c, rank, None, ratio)}"
    each = f"each processor that {c.name(rank)} had works {pace}"
    return [
        *causes,
        _ErrorCause(took_s - all_there_s, f"{_compute_ratio_text(c, rank, host.cpus / had)}: {taken}"),
        _ErrorCause(all_there_s - shared_s, each),
    ]


def _compute_cpus(c: _PredictedRun, rank: int) -> float | None:
    """Return the processors busy while a rank computes, at most its threads; None on a GPU.

    CPU time spent on communication is subtracted if the probe measured its rate.
    """
    took, sync_Bps = c.summary.ranks[rank], c.host(rank).sync_Bps
    work_s = sum(getattr(took.typical, part) or 0.0 for part in WORK_PHASES)
    if took.cpu_s is None or c.member(rank).is_gpu or not work_s:
        return None
    carrying_s = (took.bytes or 0) / sync_Bps if sync_Bps else 0.0
    computing_s = max(0.0, took.cpu_s - carrying_s)
    return min(computing_s / work_s, float(c.summary.manifest.ranks[rank].threads)) or None


def _compute_ratio_text(c: _PredictedRun, rank: int, ratio: float) -> str:
    took_s = c.summary.ranks[rank].typical.compute_s
    return f"{c.name(rank)} computes {_ratio_text(ratio)} than {_rate_source(c, rank)}, {format_seconds(took_s)} a step"


def _assumption_for(c: _PredictedRun, rank: int) -> str | None:
    """Return the assumption that replaces an unmeasured rate of this rank's host, if there is one."""
    marks = ("its rate of", "was measured in", "of the matrix products")
    for line in c.prediction.cluster.assumed:
        subject, _, assumption = line.partition(": ")
        names = subject.replace(" and ", ", ").split(", ")
        is_match = c.member(rank).host in names or subject == "all hosts" or subject.endswith(" more")
        if is_match and any(mark in assumption for mark in marks):
            return line
    return None


def _rate_source(c: _PredictedRun, rank: int) -> str:
    return "predicted" if _assumption_for(c, rank) else "probed"


def _ratio_text(ratio: float) -> str:
    factor = max(ratio, 1 / ratio)
    figure = f"{factor:.0f}" if factor >= 99.5 else f"{factor:.2g}"
    return f"{figure} times {'slower' if ratio >= 1 else 'faster'}"


def _cpu_share_text(c: _PredictedRun, rank: int, had: float, probed: float) -> str:
    """Say how many processors a rank had, and what may have taken the others."""
    if had > probed:
        return f"while it had work it ran on {had:.1f} processors, and on {probed:.1f} when it was probed"
    threads = c.summary.manifest.ranks[rank].threads
    if threads < 0.95 * probed:
        return f"it was given {pluralize(threads, 'thread')}, and ran on {probed:.1f} processors when it was probed"
    text = f"while it had work it ran on {had:.1f} of {probed:.1f} processors, the rest taken by others or by a limit"
    thirds = c.summary.ranks[rank].thirds
    if thirds and thirds[0].compute_s and (thirds[1].compute_s or 0.0) > NOISE_RATIO * thirds[0].compute_s:
        text += (
            f", more of them as time went on (its forward and backward took "
            f"{format_seconds(thirds[0].compute_s)} in the "
            f"first third of the run, {format_seconds(thirds[1].compute_s)} in the last)"
        )
    result, memory = c.summary.manifest.result, c.host(rank).memory_bytes
    if result and memory:
        ours = [peak for peak, member in zip(result.peak_memory_bytes, c.option.roster.members, strict=False)
                if member.host == c.member(rank).host]  # fmt: skip
        if sum(ours) > MEMORY_FULL_SHARE * memory:
            text += (
                f"; its ranks filled {format_bytes(sum(ours))} of its {format_bytes(memory)} of memory, so "
                f"it may have been swapping"
            )
    return text


def _slowdown_reason(c: _PredictedRun, rank: int, had: float | None, ratio: float) -> str:
    """Say why the same work takes a processor or GPU `ratio` times as long as probed."""
    host, manifest, planned = c.host(rank), c.summary.manifest, c.member(rank)
    member = manifest.roster.members[rank]
    if member.dtype != planned.dtype:
        return f", in {member.dtype}; predicted was {planned.dtype}"
    if (derived := _assumption_for(c, rank)) is not None:
        return f"; that rate was not measured: {derived}"
    if ratio < 1 and manifest.compiled:
        return ": torch.compile, which the probe did not use"
    if ratio < 1:
        return ": something slowed the host down when it was probed; evener probe host measures again"
    working = ""
    if had is not None and host.cpus is not None:
        working = f", although it ran on {had:.1f} processors ({host.cpus:.1f} when probed)"
    slowed = _throttled_compute_s(c, rank)
    if slowed is not None:
        first_s, last_s = slowed
        why = c.finding(rank, "cpu.throttled") or "heat or its power supply: evener probe host --seconds 60 tells"
        return (
            f"{working}. It slowed down during the run, from {format_seconds(first_s)} in its first third to "
            f"{format_seconds(last_s)} in its last: throttled ({why})"
        )
    if (throttled := c.finding(rank, "cpu.throttled")) is not None:
        return f"{working}: throttled ({throttled})"
    contention = usable_contention(c.summary)
    if contention is not None and contention.together_s[rank] > NOISE_RATIO * contention.alone_s[rank]:
        slowdown = contention.together_s[rank] / contention.alone_s[rank]
        return (
            f"{working}: while the other ranks of its host compute, the same work takes it {slowdown:.2g} times as "
            "long as alone"
        )
    if (cut := member.micro_batch) != planned.micro_batch:
        return f"{working}: in micro-batches of {pluralize(cut, 'sequence')}, predicted were {planned.micro_batch}"
    if planned.is_gpu:
        return ": a lower clock (heat, power limit), or other programs on it"
    if not _has_cpu_counts(c, rank):
        return "; whether its processors were taken or slow is not known: on how many it ran was not measured"
    return f"{working}: a lower clock (heat, battery), or memory and caches that other programs use too"


def _has_cpu_counts(c: _PredictedRun, rank: int) -> bool:
    return c.host(rank).cpus is not None and _compute_cpus(c, rank) is not None


def _throttled_compute_s(c: _PredictedRun, rank: int) -> tuple[float, float] | None:
    """Return compute seconds in the run's first and last third if the processor itself slowed down, else None."""
    thirds = c.summary.ranks[rank].thirds
    if thirds is None:
        return None
    first, last = thirds
    if first.compute_s is None or last.compute_s is None or last.compute_s < NOISE_RATIO * first.compute_s:
        return None
    if not c.member(rank).is_gpu and first.cpu_s and last.cpu_s and last.cpu_s < NOISE_RATIO * first.cpu_s:
        return None  # the same CPU time in more wall time: the processors were taken, not slow
    return first.compute_s, last.compute_s


# --- communication and waiting ----------------------------------------------------------------------------------------


def _communication_causes(c: _PredictedRun, rank: int, diff_s: float) -> list[_ErrorCause]:
    """Attribute the difference in exposed time (bytes / rate - hidden) to bytes, rate and overlap."""
    planned, took = c.option.ranks[rank], c.summary.ranks[rank]
    planned_s, took_s = planned.cost.exposed_sync_s, took.typical.exposed_sync_s
    assert planned_s is not None
    assert took_s is not None
    if not took.sync_s or not planned.sync_s or not took.bytes or not planned.bytes:
        reason = (
            f"communication that backward did not hide takes {format_seconds(took_s)}, predicted were "
            f"{format_seconds(planned_s)}"
        )
        return [_ErrorCause(diff_s, reason)]
    more_bytes_s = planned.sync_s * (took.bytes / planned.bytes - 1)
    if abs(took.bytes / planned.bytes - 1) < BYTES_TOLERANCE:
        more_bytes_s = 0.0
    rate_s = took.sync_s - planned.sync_s - more_bytes_s
    hidden_less_s = diff_s - more_bytes_s - rate_s
    if diff_s * rate_s > 0 and diff_s * hidden_less_s < 0:  # more time in flight leaves more that backward can hide
        rate_s, hidden_less_s = rate_s + hidden_less_s, 0.0
    elif diff_s * hidden_less_s > 0 and diff_s * rate_s < 0:
        rate_s, hidden_less_s = 0.0, rate_s + hidden_less_s
    slower = "slower" if rate_s > 0 else "faster"
    medium, before = "communication between the ranks of this machine", "predicted"
    if c.is_multi_host:
        medium, before = "the network", "measured"
    rate = (
        f"{medium} is {slower} than {before}: {format_bytes(took.bytes)} were {format_seconds(took.sync_s)} in flight, "
        f"{format_bytes(took.bytes / took.sync_s)}/s; predicted were {format_seconds(planned.sync_s)}, "
        f"{format_bytes(planned.bytes / planned.sync_s)}/s{_comm_cpu_text(c) if rate_s > 0 else ''}"
    )
    hidden = (
        f"backward hid {'less' if hidden_less_s > 0 else 'more'} of the communication than predicted, "
        f"{_percent_text(took.sync_s - took_s, took.sync_s)} of {format_seconds(took.sync_s)} in flight instead of "
        f"{_percent_text(planned.sync_s - planned_s, planned.sync_s)}"
    )
    sent = f"a rank sends {format_bytes(took.bytes)} a step, predicted were {format_bytes(planned.bytes)}"
    return [_ErrorCause(more_bytes_s, sent), _ErrorCause(rate_s, rate), _ErrorCause(hidden_less_s, hidden)]


def _comm_cpu_text(c: _PredictedRun) -> str:
    """On CPUs, where the processors that compute also send, receive and reduce, name a rank that lacked some."""
    for rank in range(len(c.summary.ranks)):
        host, had = c.host(rank), _compute_cpus(c, rank)
        if had is not None and host.cpus is not None and host.cpus > NOISE_RATIO * had:
            return f"; or it lacks the processors that were taken from {c.name(rank)}, which also send and add"
    return ""


def _percent_text(part_s: float, whole_s: float) -> str:
    return f"{max(0.0, part_s / whole_s):.0%}"


def _wait_reason(c: _PredictedRun, rank: int, diff_s: float) -> str:
    last = slowest_rank(c.summary).rank
    if diff_s < 0:
        if rank == c.predicted_straggler:
            return f"{c.name(rank)} waits less for the others than predicted"
        then = "it is the one that the others wait for" if has_straggler(c.summary) else "all are done at the same time"
        return f"{c.name(rank)} was predicted to wait that long for {c.name(c.predicted_straggler)}; now {then}"
    if rank != last and has_straggler(c.summary):
        return f"{c.name(rank)} was predicted to be done last; now it waits for {c.name(last)}"
    waits = [took.typical.wait_s or 0.0 for took in c.summary.ranks]
    return f"now one rank is late, now another, and each of them waits {format_seconds(min(waits))} or more"


# --- around the causes ------------------------------------------------------------------------------------------------


def _accurate_phases(c: _PredictedRun) -> list[str]:
    """List the large phases that were predicted right and so need no cause."""
    planned, took = c.option.ranks[c.explained_rank].cost, c.summary.ranks[c.explained_rank].typical
    right = [
        f"{PHASE_NAMES[part]} {format_seconds(getattr(took, part))}"
        for part, diff_s in c.phase_errors_s(c.explained_rank).items()
        if getattr(took, part) >= MIN_NAMED_SHARE * c.scale_s
        and abs(diff_s) <= ERROR_TOLERANCE * getattr(planned, part)
    ]
    return [f"As predicted: {', '.join(right)}."] if right else []


def _masked_errors(c: _PredictedRun) -> list[str]:
    """Return compute errors of other ranks that the step does not show because they would have waited anyway."""
    causes = [
        cause
        for rank in range(len(c.summary.ranks))
        if rank != c.explained_rank
        for cause in (_compute_causes(c, rank) if "compute_s" in c.phase_errors_s(rank) else [])
        if abs(cause.cost_s) > ERROR_TOLERANCE * c.scale_s
    ]
    return [f"The step does not show it: {cause.reason}." for cause in causes[:MAX_NAMED_CAUSES]]


def _unexplained_error(c: _PredictedRun, named: Sequence[_ErrorCause]) -> list[str]:
    rest_s = c.error_s - sum(cause.cost_s for cause in named)
    if abs(rest_s) < MIN_NAMED_SHARE * c.scale_s:
        return []
    why = "are not explained" if _missing_phases(c) else "in all come from smaller differences"
    return [f"{format_seconds(abs(rest_s))} {'more' if rest_s > 0 else 'less'} {why}."]


def _missing_phases(c: _PredictedRun) -> list[str]:
    planned, took = c.option.ranks[c.explained_rank].cost, c.summary.ranks[c.explained_rank].typical
    sentences = []
    for verb, cost in (("predicted", planned), ("measured", took)):
        names = [PHASE_NAMES[part] for part in PHASES if getattr(cost, part) is None]
        if names:
            sentences.append(f"Not {verb}, so not compared: {', '.join(names)}.")
    return sentences
