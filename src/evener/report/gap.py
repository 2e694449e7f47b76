"""Explain the prediction error: attribute measured minus predicted step time to causes.

Everything here subtracts a Prediction from a RunSummary. The step is explained on one rank: the measured straggler if
the step took longer than predicted, the predicted straggler if it took less. On that rank the differences of the
phases sum to the difference of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.core.prediction import HostRates, Option, Prediction
from evener.core.roster import Member
from evener.core.step import PARTS
from evener.core.units import count, plural, seconds, size
from evener.report.figures import PART_NAMES
from evener.report.ranks import CLEAR, WORK, contention_of, last_done, straggles
from evener.report.summary import Summary

NEAR = 0.10  # of the step: a prediction within this counts as right
NAMED = 0.05  # of the step: smaller differences get no sentence
MOST_NAMED = 4
SAME_BYTES = 0.03  # relative: predicted and sent bytes may differ by this
FULL = 0.9  # of a host's memory
NO_PREDICTION = (
    "Nothing was predicted here. evener probe host measures the machines, evener probe wire the links between them; "
    "every later run is predicted before it starts."
)


def explain_prediction(summary: Summary, prediction: Prediction | None) -> list[str]:
    """Return sentences: whether the prediction was right, and the cause of each difference that matters."""
    if prediction is None:
        return [NO_PREDICTION]
    option = prediction.option(prediction.chosen)
    if len(option.ranks) != summary.manifest.world_size:
        run_ranks = plural(summary.manifest.world_size, "rank")
        return [f"The prediction is of {plural(len(option.ranks), 'rank')} and the run had {run_ranks}: not compared."]
    if not summary.step_p50_s:
        return [f"A step was predicted to take {seconds(option.step_s)}; none was recorded{summary.manifest.window}."]
    c = _Compared(summary, prediction, option)
    result = f"A step was predicted to take {seconds(option.step_s)} and took {seconds(c.step_s)}"
    near = abs(c.gap_s) <= NEAR * option.step_s
    if near and all(abs(diff_s) <= NEAR * c.scale_s for diff_s in c.diffs_s(c.focus).values()):
        return [f"{result}: as predicted within {NEAR:.0%}.", *_hidden(c)]
    result += "." if near else f", {abs(c.gap_s) / option.step_s:.0%} {'longer' if c.gap_s > 0 else 'less'}."
    causes = [cause for cause in _causes(c, c.focus) if abs(cause.cost_s) >= NAMED * c.scale_s]
    causes.sort(key=lambda cause: -abs(cause.cost_s))
    named = causes[:MOST_NAMED]
    return [result, *_as_predicted(c), *(cause.told for cause in named), *_rest(c, named), *_unknown(c)]


@dataclass(frozen=True)
class _Cause:
    """One cause of the prediction error, and its share of it."""

    cost_s: float  # > 0: it makes the step longer
    because: str

    @property
    def told(self) -> str:
        return f"{seconds(abs(self.cost_s))} {'more' if self.cost_s > 0 else 'less'}: {self.because}."


@dataclass(frozen=True)
class _Compared:
    """A run and its prediction."""

    summary: Summary
    prediction: Prediction
    option: Option

    @property
    def step_s(self) -> float:
        assert self.summary.step_p50_s
        return self.summary.step_p50_s

    @property
    def gap_s(self) -> float:
        return self.step_s - self.option.step_s

    @property
    def scale_s(self) -> float:
        """The step time that differences are compared with."""
        return max(self.step_s, self.option.step_s)

    @property
    def several_hosts(self) -> bool:
        return len(self.option.roster.hosts) > 1

    @property
    def planned_last(self) -> int:
        """The rank that was predicted to wait least."""
        waits = [rank.cost.wait_s or 0.0 for rank in self.option.ranks]
        return waits.index(min(waits))

    @property
    def focus(self) -> int:
        """The rank on which the step is explained; see the module's docstring."""
        return last_done(self.summary).rank if self.gap_s >= 0 else self.planned_last

    def member(self, rank: int) -> Member:
        """Return the rank as it was predicted."""
        return self.option.roster.members[rank]

    def host(self, rank: int) -> HostRates:
        return self.prediction.cluster.hosts[self.member(rank).host]

    def name(self, rank: int) -> str:
        return self.option.roster.name_of(rank)

    def diffs_s(self, rank: int) -> dict[str, float]:
        """Return measured minus predicted seconds of every phase that is known on both sides."""
        planned, took = self.option.ranks[rank].cost, self.summary.ranks[rank].typical
        pairs = {part: (getattr(planned, part), getattr(took, part)) for part in PARTS}
        return {part: b - a for part, (a, b) in pairs.items() if a is not None and b is not None}

    def finding(self, rank: int, check: str) -> str | None:
        """Return the evidence of this check's finding about the rank's host, if there is one."""
        host = self.member(rank).host
        return next((each.evidence for each in self.summary.findings if (each.check, each.host) == (check, host)), None)


def _causes(c: _Compared, rank: int) -> list[_Cause]:
    """Return the causes of one rank's differences; their costs sum to the differences of the known phases."""
    diffs_s = c.diffs_s(rank)
    planned, took = c.option.ranks[rank], c.summary.ranks[rank]
    causes = _computing(c, rank) if "compute_s" in diffs_s else []
    if "exposed_sync_s" in diffs_s:
        causes += _communication(c, rank, diffs_s["exposed_sync_s"])
    if "wait_s" in diffs_s:
        causes.append(_Cause(diffs_s["wait_s"], _waiting(c, rank, diffs_s["wait_s"])))
    if "optimizer_s" in diffs_s:
        update = (
            f"the update takes {c.name(rank)} {seconds(took.typical.optimizer_s)}, predicted were "
            f"{seconds(planned.cost.optimizer_s)}"
        )
        causes.append(_Cause(diffs_s["optimizer_s"], update))
    if "data_s" in diffs_s:
        data = (
            f"{c.name(rank)} waits {seconds(took.typical.data_s)} for input, predicted were "
            f"{seconds(planned.cost.data_s)}"
        )
        causes.append(_Cause(diffs_s["data_s"], data))
    return causes


# --- forward and backward ---------------------------------------------------------------------------------------------


def _computing(c: _Compared, rank: int) -> list[_Cause]:
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
    if abs(share - 1) < NAMED:
        share = 1.0
    shared_s = planned_s * share
    causes = []
    if share != 1.0:
        work = f"{c.name(rank)} computes {count(took.tokens)} tokens a step, predicted were {count(planned_tokens)}"
        causes.append(_Cause(shared_s - planned_s, work))
    if not shared_s:
        return [*causes, _Cause(took_s, f"{c.name(rank)} computes, which was not predicted")] if took_s else causes
    swapping = c.finding(rank, "mem.swap")
    if swapping is not None and took_s > shared_s:
        return [
            *causes,
            _Cause(
                took_s - shared_s,
                f"{_pace(c, rank, took_s / shared_s)}: it was swapping when the run began ({swapping})",
            ),
        ]
    had, whole = _cpus_computing(c, rank), took_s / shared_s
    if had is None or host.cpus is None or 1 / CLEAR < host.cpus / had < CLEAR:
        return [*causes, _Cause(took_s - shared_s, f"{_pace(c, rank, whole)}{_own_speed(c, rank, had, whole)}")]
    all_there_s, taken = took_s * had / host.cpus, _taken(c, rank, had, host.cpus)
    ratio = all_there_s / shared_s
    if abs(all_there_s - shared_s) < NAMED * c.scale_s:  # too small for a sentence
        return [*causes, _Cause(took_s - shared_s, f"{_pace(c, rank, whole)}: {taken}")]
    pace = f"{_times(ratio)} than {_known(c, rank)}{_own_speed(c, rank, None, ratio)}"
    each = f"each processor that {c.name(rank)} had works {pace}"
    return [
        *causes,
        _Cause(took_s - all_there_s, f"{_pace(c, rank, host.cpus / had)}: {taken}"),
        _Cause(all_there_s - shared_s, each),
    ]


def _cpus_computing(c: _Compared, rank: int) -> float | None:
    """Return the processors busy while a rank computes, at most its threads; None on a GPU.

    CPU time spent on communication is subtracted if the probe measured its rate.
    """
    took, sync_Bps = c.summary.ranks[rank], c.host(rank).sync_Bps
    work_s = sum(getattr(took.typical, part) or 0.0 for part in WORK)
    if took.cpu_s is None or c.member(rank).is_gpu or not work_s:
        return None
    carrying_s = (took.bytes or 0) / sync_Bps if sync_Bps else 0.0
    computing_s = max(0.0, took.cpu_s - carrying_s)
    return min(computing_s / work_s, float(c.summary.manifest.ranks[rank].threads)) or None


def _pace(c: _Compared, rank: int, ratio: float) -> str:
    took_s = c.summary.ranks[rank].typical.compute_s
    return f"{c.name(rank)} computes {_times(ratio)} than {_known(c, rank)}, {seconds(took_s)} a step"


def _derived(c: _Compared, rank: int) -> str | None:
    """Return the assumption that replaces an unmeasured rate of this rank's host, if there is one."""
    marks = ("its rate of", "was measured in", "of the matrix products")
    for line in c.prediction.cluster.assumed:
        subject, _, assumption = line.partition(": ")
        names = subject.replace(" and ", ", ").split(", ")
        is_match = c.member(rank).host in names or subject == "all hosts" or subject.endswith(" more")
        if is_match and any(mark in assumption for mark in marks):
            return line
    return None


def _known(c: _Compared, rank: int) -> str:
    return "predicted" if _derived(c, rank) else "probed"


def _times(ratio: float) -> str:
    factor = max(ratio, 1 / ratio)
    figure = f"{factor:.0f}" if factor >= 99.5 else f"{factor:.2g}"
    return f"{figure} times {'slower' if ratio >= 1 else 'faster'}"


def _taken(c: _Compared, rank: int, had: float, probed: float) -> str:
    """Say how many processors a rank had, and what may have taken the others."""
    if had > probed:
        return f"while it had work it ran on {had:.1f} processors, and on {probed:.1f} when it was probed"
    threads = c.summary.manifest.ranks[rank].threads
    if threads < 0.95 * probed:
        return f"it was given {plural(threads, 'thread')}, and ran on {probed:.1f} processors when it was probed"
    text = f"while it had work it ran on {had:.1f} of {probed:.1f} processors, the rest taken by others or by a limit"
    thirds = c.summary.ranks[rank].thirds
    if thirds and thirds[0].compute_s and (thirds[1].compute_s or 0.0) > CLEAR * thirds[0].compute_s:
        text += (
            f", more of them as time went on (its forward and backward took {seconds(thirds[0].compute_s)} in the "
            f"first third of the run, {seconds(thirds[1].compute_s)} in the last)"
        )
    result, memory = c.summary.manifest.result, c.host(rank).memory_bytes
    if result and memory:
        ours = [peak for peak, member in zip(result.peak_memory_bytes, c.option.roster.members, strict=False)
                if member.host == c.member(rank).host]  # fmt: skip
        if sum(ours) > FULL * memory:
            text += (
                f"; its ranks filled {size(sum(ours))} of its {size(memory)} of memory, so it may have been swapping"
            )
    return text


def _own_speed(c: _Compared, rank: int, had: float | None, ratio: float) -> str:
    """Say why the same work takes a processor or GPU `ratio` times as long as probed."""
    host, manifest, planned = c.host(rank), c.summary.manifest, c.member(rank)
    member = manifest.roster.members[rank]
    if member.dtype != planned.dtype:
        return f", in {member.dtype}; predicted was {planned.dtype}"
    if (derived := _derived(c, rank)) is not None:
        return f"; that rate was not measured: {derived}"
    if ratio < 1 and manifest.compiled:
        return ": torch.compile, which the probe did not use"
    if ratio < 1:
        return ": something slowed the host down when it was probed; evener probe host measures again"
    working = ""
    if had is not None and host.cpus is not None:
        working = f", although it ran on {had:.1f} processors ({host.cpus:.1f} when probed)"
    slowed = _slowed(c, rank)
    if slowed is not None:
        first_s, last_s = slowed
        why = c.finding(rank, "cpu.throttled") or "heat or its power supply: evener probe host --seconds 60 tells"
        return (
            f"{working}. It slowed down during the run, from {seconds(first_s)} in its first third to "
            f"{seconds(last_s)} in its last: throttled ({why})"
        )
    if (throttled := c.finding(rank, "cpu.throttled")) is not None:
        return f"{working}: throttled ({throttled})"
    contention = contention_of(c.summary)
    if contention is not None and contention.together_s[rank] > CLEAR * contention.alone_s[rank]:
        slowdown = contention.together_s[rank] / contention.alone_s[rank]
        return (
            f"{working}: while the other ranks of its host compute, the same work takes it {slowdown:.2g} times as "
            "long as alone"
        )
    if (cut := member.micro_batch) != planned.micro_batch:
        return f"{working}: in micro-batches of {plural(cut, 'sequence')}, predicted were {planned.micro_batch}"
    if planned.is_gpu:
        return ": a lower clock (heat, power limit), or other programs on it"
    if not _knows_cpus(c, rank):
        return "; whether its processors were taken or slow is not known: on how many it ran was not measured"
    return f"{working}: a lower clock (heat, battery), or memory and caches that other programs use too"


def _knows_cpus(c: _Compared, rank: int) -> bool:
    return c.host(rank).cpus is not None and _cpus_computing(c, rank) is not None


def _slowed(c: _Compared, rank: int) -> tuple[float, float] | None:
    """Return compute seconds in the run's first and last third if the processor itself slowed down, else None."""
    thirds = c.summary.ranks[rank].thirds
    if thirds is None:
        return None
    first, last = thirds
    if first.compute_s is None or last.compute_s is None or last.compute_s < CLEAR * first.compute_s:
        return None
    if not c.member(rank).is_gpu and first.cpu_s and last.cpu_s and last.cpu_s < CLEAR * first.cpu_s:
        return None  # the same CPU time in more wall time: the processors were taken, not slow
    return first.compute_s, last.compute_s


# --- communication and waiting ----------------------------------------------------------------------------------------


def _communication(c: _Compared, rank: int, diff_s: float) -> list[_Cause]:
    """Attribute the difference in exposed time (bytes / rate - hidden) to bytes, rate and overlap."""
    planned, took = c.option.ranks[rank], c.summary.ranks[rank]
    planned_s, took_s = planned.cost.exposed_sync_s, took.typical.exposed_sync_s
    assert planned_s is not None
    assert took_s is not None
    if not took.sync_s or not planned.sync_s or not took.bytes or not planned.bytes:
        reason = (
            f"communication that backward did not hide takes {seconds(took_s)}, predicted were {seconds(planned_s)}"
        )
        return [_Cause(diff_s, reason)]
    more_bytes_s = planned.sync_s * (took.bytes / planned.bytes - 1)
    if abs(took.bytes / planned.bytes - 1) < SAME_BYTES:
        more_bytes_s = 0.0
    rate_s = took.sync_s - planned.sync_s - more_bytes_s
    hidden_less_s = diff_s - more_bytes_s - rate_s
    if diff_s * rate_s > 0 and diff_s * hidden_less_s < 0:  # more time in flight leaves more that backward can hide
        rate_s, hidden_less_s = rate_s + hidden_less_s, 0.0
    elif diff_s * hidden_less_s > 0 and diff_s * rate_s < 0:
        rate_s, hidden_less_s = 0.0, rate_s + hidden_less_s
    slower = "slower" if rate_s > 0 else "faster"
    medium, before = "communication between the ranks of this machine", "predicted"
    if c.several_hosts:
        medium, before = "the network", "measured"
    rate = (
        f"{medium} is {slower} than {before}: {size(took.bytes)} were {seconds(took.sync_s)} in flight, "
        f"{size(took.bytes / took.sync_s)}/s; predicted were {seconds(planned.sync_s)}, "
        f"{size(planned.bytes / planned.sync_s)}/s{_carried(c) if rate_s > 0 else ''}"
    )
    hidden = (
        f"backward hid {'less' if hidden_less_s > 0 else 'more'} of the communication than predicted, "
        f"{_share(took.sync_s - took_s, took.sync_s)} of {seconds(took.sync_s)} in flight instead of "
        f"{_share(planned.sync_s - planned_s, planned.sync_s)}"
    )
    sent = f"a rank sends {size(took.bytes)} a step, predicted were {size(planned.bytes)}"
    return [_Cause(more_bytes_s, sent), _Cause(rate_s, rate), _Cause(hidden_less_s, hidden)]


def _carried(c: _Compared) -> str:
    """On CPUs, where the processors that compute also send, receive and reduce, name a rank that lacked some."""
    for rank in range(len(c.summary.ranks)):
        host, had = c.host(rank), _cpus_computing(c, rank)
        if had is not None and host.cpus is not None and host.cpus > CLEAR * had:
            return f"; or it lacks the processors that were taken from {c.name(rank)}, which also send and add"
    return ""


def _share(part_s: float, whole_s: float) -> str:
    return f"{max(0.0, part_s / whole_s):.0%}"


def _waiting(c: _Compared, rank: int, diff_s: float) -> str:
    last = last_done(c.summary).rank
    if diff_s < 0:
        if rank == c.planned_last:
            return f"{c.name(rank)} waits less for the others than predicted"
        then = "it is the one that the others wait for" if straggles(c.summary) else "all are done at the same time"
        return f"{c.name(rank)} was predicted to wait that long for {c.name(c.planned_last)}; now {then}"
    if rank != last and straggles(c.summary):
        return f"{c.name(rank)} was predicted to be done last; now it waits for {c.name(last)}"
    waits = [took.typical.wait_s or 0.0 for took in c.summary.ranks]
    return f"now one rank is late, now another, and each of them waits {seconds(min(waits))} or more"


# --- around the causes ------------------------------------------------------------------------------------------------


def _as_predicted(c: _Compared) -> list[str]:
    """List the large phases that were predicted right and so need no cause."""
    planned, took = c.option.ranks[c.focus].cost, c.summary.ranks[c.focus].typical
    right = [
        f"{PART_NAMES[part]} {seconds(getattr(took, part))}"
        for part, diff_s in c.diffs_s(c.focus).items()
        if getattr(took, part) >= NAMED * c.scale_s and abs(diff_s) <= NEAR * getattr(planned, part)
    ]
    return [f"As predicted: {', '.join(right)}."] if right else []


def _hidden(c: _Compared) -> list[str]:
    """Return compute errors of other ranks that the step does not show because they would have waited anyway."""
    causes = [
        cause
        for rank in range(len(c.summary.ranks))
        if rank != c.focus
        for cause in (_computing(c, rank) if "compute_s" in c.diffs_s(rank) else [])
        if abs(cause.cost_s) > NEAR * c.scale_s
    ]
    return [f"The step does not show it: {cause.because}." for cause in causes[:MOST_NAMED]]


def _rest(c: _Compared, named: Sequence[_Cause]) -> list[str]:
    rest_s = c.gap_s - sum(cause.cost_s for cause in named)
    if abs(rest_s) < NAMED * c.scale_s:
        return []
    why = "are not explained" if _unknown(c) else "in all come from smaller differences"
    return [f"{seconds(abs(rest_s))} {'more' if rest_s > 0 else 'less'} {why}."]


def _unknown(c: _Compared) -> list[str]:
    planned, took = c.option.ranks[c.focus].cost, c.summary.ranks[c.focus].typical
    sentences = []
    for verb, cost in (("predicted", planned), ("measured", took)):
        names = [PART_NAMES[part] for part in PARTS if getattr(cost, part) is None]
        if names:
            sentences.append(f"Not {verb}, so not compared: {', '.join(names)}.")
    return sentences
