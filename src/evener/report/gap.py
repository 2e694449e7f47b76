"""What explains the difference between the step that was predicted and the step that was measured?

Everything here subtracts a Prediction from a Summary. The step is explained on one rank: on the one that the others
waited for where the step took longer than predicted, on the one that they were predicted to wait for where it took
less. There the differences of the parts sum to the difference of the step.
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

NEAR = 0.10  # of the step: a prediction that is not farther off is right
NAMED = 0.05  # of the step: smaller differences are not worth a sentence
MOST_NAMED = 4
SAME_BYTES = 0.03  # relative: what predicted and sent bytes may differ by
FULL = 0.9  # of a host's memory
NO_PREDICTION = (
    "Nothing was predicted here. evener probe host measures how fast machines are, evener probe wire how fast the "
    "links between them; what is started then is predicted first."
)


def explain_prediction(summary: Summary, prediction: Prediction | None) -> list[str]:
    """Sentences: was the prediction right, and if not, what is the cause of each difference that matters?"""
    if prediction is None:
        return [NO_PREDICTION]
    option = prediction.option(prediction.chosen)
    if len(option.ranks) != summary.manifest.world_size:
        there = plural(summary.manifest.world_size, "rank")
        return [f"The prediction is of {plural(len(option.ranks), 'rank')} and the run had {there}: not compared."]
    if not summary.step_p50_s:
        return [f"A step was predicted to take {seconds(option.step_s)}; none was recorded{summary.manifest.window}."]
    c = _Compared(summary, prediction, option)
    told = f"A step was predicted to take {seconds(option.step_s)} and took {seconds(c.step_s)}"
    near = abs(c.gap_s) <= NEAR * option.step_s
    if near and all(abs(diff_s) <= NEAR * c.scale_s for diff_s in c.diffs_s(c.focus).values()):
        return [f"{told}: as predicted within {NEAR:.0%}.", *_hidden(c)]
    told += "." if near else f", {abs(c.gap_s) / option.step_s:.0%} {'longer' if c.gap_s > 0 else 'less'}."
    causes = [cause for cause in _causes(c, c.focus) if abs(cause.cost_s) >= NAMED * c.scale_s]
    causes.sort(key=lambda cause: -abs(cause.cost_s))
    named = causes[:MOST_NAMED]
    return [told, *_as_predicted(c), *(cause.told for cause in named), *_rest(c, named), *_unknown(c)]


@dataclass(frozen=True)
class _Cause:
    """One reason why a step differs, and by how much."""

    cost_s: float  # > 0: the step is longer for it
    because: str

    @property
    def told(self) -> str:
        return f"{seconds(abs(self.cost_s))} {'more' if self.cost_s > 0 else 'less'}: {self.because}."


@dataclass(frozen=True)
class _Compared:
    """A run beside what was predicted of it."""

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
        """What differences are compared with."""
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
        """The rank on which the step is explained: see the module's docstring."""
        return last_done(self.summary).rank if self.gap_s >= 0 else self.planned_last

    def member(self, rank: int) -> Member:
        """As it was predicted."""
        return self.option.roster.members[rank]

    def host(self, rank: int) -> HostRates:
        return self.prediction.cluster.hosts[self.member(rank).host]

    def name(self, rank: int) -> str:
        return self.option.roster.name_of(rank)

    def diffs_s(self, rank: int) -> dict[str, float]:
        """Measured less predicted of every part that is known on both sides."""
        planned, took = self.option.ranks[rank].cost, self.summary.ranks[rank].typical
        pairs = {part: (getattr(planned, part), getattr(took, part)) for part in PARTS}
        return {part: b - a for part, (a, b) in pairs.items() if a is not None and b is not None}

    def finding(self, rank: int, check: str) -> str | None:
        """The evidence of a finding about a rank's host."""
        host = self.member(rank).host
        return next((each.evidence for each in self.summary.findings if (each.check, each.host) == (check, host)), None)


def _causes(c: _Compared, rank: int) -> list[_Cause]:
    """What explains one rank's differences. The costs of what is known sum to them."""
    diffs_s = c.diffs_s(rank)
    planned, took = c.option.ranks[rank], c.summary.ranks[rank]
    found = _computing(c, rank) if "compute_s" in diffs_s else []
    if "exposed_sync_s" in diffs_s:
        found += _communication(c, rank, diffs_s["exposed_sync_s"])
    if "wait_s" in diffs_s:
        found.append(_Cause(diffs_s["wait_s"], _waiting(c, rank, diffs_s["wait_s"])))
    if "optimizer_s" in diffs_s:
        update = (
            f"the update takes {c.name(rank)} {seconds(took.typical.optimizer_s)}, predicted were "
            f"{seconds(planned.cost.optimizer_s)}"
        )
        found.append(_Cause(diffs_s["optimizer_s"], update))
    if "data_s" in diffs_s:
        data = (
            f"{c.name(rank)} waits {seconds(took.typical.data_s)} for input, predicted were "
            f"{seconds(planned.cost.data_s)}"
        )
        found.append(_Cause(diffs_s["data_s"], data))
    return found


# --- forward and backward ---------------------------------------------------------------------------------------------


def _computing(c: _Compared, rank: int) -> list[_Cause]:
    """Another share, other processors, and another time of a processor for the same work.

    planned · share      what the work it really had would take     s₁
    took · had / probed  the same with as many processors as probed s₂
    took                                                            s₃

    s₁ - planned is the share's, s₂ - s₁ is the processors' own speed, s₃ - s₂ is that they were taken.
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
    found = []
    if share != 1.0:
        work = f"{c.name(rank)} computes {count(took.tokens)} tokens a step, predicted were {count(planned_tokens)}"
        found.append(_Cause(shared_s - planned_s, work))
    if not shared_s:
        return [*found, _Cause(took_s, f"{c.name(rank)} computes, which was not predicted")] if took_s else found
    swapping = c.finding(rank, "mem.swap")
    if swapping is not None and took_s > shared_s:
        return [
            *found,
            _Cause(
                took_s - shared_s,
                f"{_pace(c, rank, took_s / shared_s)}: it was swapping when the run began ({swapping})",
            ),
        ]
    had, whole = _cpus_computing(c, rank), took_s / shared_s
    if had is None or host.cpus is None or 1 / CLEAR < host.cpus / had < CLEAR:
        return [*found, _Cause(took_s - shared_s, f"{_pace(c, rank, whole)}{_own_speed(c, rank, had, whole)}")]
    all_there_s, taken = took_s * had / host.cpus, _taken(c, rank, had, host.cpus)
    ratio = all_there_s / shared_s
    if abs(all_there_s - shared_s) < NAMED * c.scale_s:  # too little for a sentence of its own
        return [*found, _Cause(took_s - shared_s, f"{_pace(c, rank, whole)}: {taken}")]
    own = f"{_times(ratio)} than {_known(c, rank)}{_own_speed(c, rank, None, ratio)}"
    each = f"each processor that {c.name(rank)} had works {own}"
    return [
        *found,
        _Cause(took_s - all_there_s, f"{_pace(c, rank, host.cpus / had)}: {taken}"),
        _Cause(all_there_s - shared_s, each),
    ]


def _cpus_computing(c: _Compared, rank: int) -> float | None:
    """Processors at work while a rank computes, at most its threads; None on a GPU.

    Without the time in which they carry its communication, where the probe measured what that takes.
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
    """The assumption that stands for a rate which nobody measured."""
    marks = ("its rate of", "was measured in", "of the matrix products")
    for line in c.prediction.cluster.assumed:
        who, _, what = line.partition(": ")
        names = who.replace(" and ", ", ").split(", ")
        is_told = c.member(rank).host in names or who == "all hosts" or who.endswith(" more")
        if is_told and any(mark in what for mark in marks):
            return line
    return None


def _known(c: _Compared, rank: int) -> str:
    return "predicted" if _derived(c, rank) else "probed"


def _times(ratio: float) -> str:
    factor = max(ratio, 1 / ratio)
    figure = f"{factor:.0f}" if factor >= 99.5 else f"{factor:.2g}"
    return f"{figure} times {'slower' if ratio >= 1 else 'faster'}"


def _taken(c: _Compared, rank: int, had: float, probed: float) -> str:
    """How many processors a rank had, and who may have had the others."""
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
    """Why the same work takes a processor, or a GPU, another time than probed: `ratio` times as long."""
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
        beside = contention.together_s[rank] / contention.alone_s[rank]
        return (
            f"{working}: beside the other ranks of its host the same work takes it {beside:.2g} times as long as alone"
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
    """Forward and backward in the first and the last third, if the same work took the processor itself longer."""
    thirds = c.summary.ranks[rank].thirds
    if thirds is None:
        return None
    first, last = thirds
    if first.compute_s is None or last.compute_s is None or last.compute_s < CLEAR * first.compute_s:
        return None
    if not c.member(rank).is_gpu and first.cpu_s and last.cpu_s and last.cpu_s < CLEAR * first.cpu_s:
        return None  # as much work of the processors, in more time: they were not there
    return first.compute_s, last.compute_s


# --- communication and waiting ----------------------------------------------------------------------------------------


def _communication(c: _Compared, rank: int, diff_s: float) -> list[_Cause]:
    """Exposed = in flight - hidden, in flight = bytes / rate: other bytes, another rate, another overlap."""
    planned, took = c.option.ranks[rank], c.summary.ranks[rank]
    planned_s, took_s = planned.cost.exposed_sync_s, took.typical.exposed_sync_s
    assert planned_s is not None
    assert took_s is not None
    if not took.sync_s or not planned.sync_s or not took.bytes or not planned.bytes:
        told = f"communication that backward did not hide takes {seconds(took_s)}, predicted were {seconds(planned_s)}"
        return [_Cause(diff_s, told)]
    more_bytes_s = planned.sync_s * (took.bytes / planned.bytes - 1)
    if abs(took.bytes / planned.bytes - 1) < SAME_BYTES:
        more_bytes_s = 0.0
    rate_s = took.sync_s - planned.sync_s - more_bytes_s
    hidden_less_s = diff_s - more_bytes_s - rate_s
    if diff_s * rate_s > 0 and diff_s * hidden_less_s < 0:  # what is longer in flight can be hidden longer
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
    """On a CPU the processors that compute also send, receive and add."""
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
    """Large parts that came out right: they need no cause, and the reader looks no further there."""
    planned, took = c.option.ranks[c.focus].cost, c.summary.ranks[c.focus].typical
    right = [
        f"{PART_NAMES[part]} {seconds(getattr(took, part))}"
        for part, diff_s in c.diffs_s(c.focus).items()
        if getattr(took, part) >= NAMED * c.scale_s and abs(diff_s) <= NEAR * getattr(planned, part)
    ]
    return [f"As predicted: {', '.join(right)}."] if right else []


def _hidden(c: _Compared) -> list[str]:
    """Where the step is right, what other ranks did otherwise while they would have waited."""
    found = [
        cause
        for rank in range(len(c.summary.ranks))
        if rank != c.focus
        for cause in (_computing(c, rank) if "compute_s" in c.diffs_s(rank) else [])
        if abs(cause.cost_s) > NEAR * c.scale_s
    ]
    return [f"The step does not show it: {cause.because}." for cause in found[:MOST_NAMED]]


def _rest(c: _Compared, named: Sequence[_Cause]) -> list[str]:
    rest_s = c.gap_s - sum(cause.cost_s for cause in named)
    if abs(rest_s) < NAMED * c.scale_s:
        return []
    why = "are not explained" if _unknown(c) else "in all come from smaller differences"
    return [f"{seconds(abs(rest_s))} {'more' if rest_s > 0 else 'less'} {why}."]


def _unknown(c: _Compared) -> list[str]:
    planned, took = c.option.ranks[c.focus].cost, c.summary.ranks[c.focus].typical
    found = []
    for verb, cost in (("predicted", planned), ("measured", took)):
        names = [PART_NAMES[part] for part in PARTS if getattr(cost, part) is None]
        if names:
            found.append(f"Not {verb}, so not compared: {', '.join(names)}.")
    return found
