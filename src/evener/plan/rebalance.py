"""Dynamic rebalancing: change the shares of a run when measured step times show that the slowest rank would be faster.

    every step, for every rank: seconds of its share ─▶ LoadBalancer.observe_step ─▶ ShareChange, or None

A rank's time is the median of its last 5, 15 or 45 steps with the same share: a short window reacts to a large change
soon, a long one detects a small change in the noise. The time of one share predicts that of another
(load_balancing.RankTimeModel); the overhead of a micro-batch is learned from steps with two different numbers of
sequences. The update takes the same time with any share, and longer on slower machines: 6 % of a step on a quarter of
a core.

With DiLoCo no rank waits for a single step, and shares are of all batches of a round: 9.1 of 16 sequences on average,
9 or 10 in each step.

Shares change only where the slowest rank would clearly be done sooner: by at least MIN_STEP_GAIN, by
GAIN_STANDARD_ERRORS standard errors of that gain, and, for medians of 5 steps, four times in a row. Each change in the
last RECENT_STEPS steps but the first doubles the gain that the next one needs, so machines that merely fluctuate are
soon left alone.

No clock and no torch. All ranks decide independently from the same numbers and must reach bit-identical results on any
machine, so this uses only + − × ÷, square roots and `fsum`, which are the same everywhere.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from evener.core.roster import Roster, num_passes, turn
from evener.core.units import median, seconds
from evener.plan.balance import Pace, fastest_or_none, fastest_shares, mean_passes, slowest_s

WINDOWS = (5, 15, 45)  # steps
CONFIRMED = 4  # decisions in a row, of the shortest window: three slow steps are not enough
ENOUGH = 8  # steps from which a rank's noise is known
FEW = 4  # fewer medians of 5 steps than this are ignored in the noise
LEAST_GAIN = 0.04  # of a step
SURE = 4.0  # standard errors
LEAST_SPREAD = 0.01  # of a rank's times, relative
TELLING = 10.0  # standard errors that must separate the two explanations of a time: micro-batches or sequences
RECENT = 500  # steps
TRIAL_EVERY = 50  # steps; a trial may also cost at most one step in so many
CLEARLY = 1.15  # a rank that became slower or faster by a smaller factor is not named as the reason

NEVER = Pace(sequence_s=1e30)  # a rank that starts without a share never gets one
MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean: √(π/2)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """New shares, in force from the next step."""

    shares: list[int]
    why: str
    is_trial: bool = False  # a rank without a share gets one for a step, or failed this trial


class Balancer:
    """Decides on new shares, identically on every rank.

    With `share_unit`, shares are multiples of so many sequences, each of which is a micro-batch. Otherwise shares count
    the sequences of a round, as in `Roster.divided`, and times are averages over its steps.
    """

    def __init__(self, roster: Roster, whole: int | None = None) -> None:
        members = roster.members
        shared_hosts = {member.host for member in members if sum(other.host == member.host for other in members) > 1}
        self._names = [f"rank {m.rank} on {m.host}" if m.host in shared_hosts else m.host for m in members]
        self._every = every = 1 if whole else roster.sync.every
        self._unit, self._trial = whole or 1, whole or every
        self._micro_batches = [whole or member.micro_batch for member in members]
        self._shares = roster.round_shares or [every * share for share in roster.shares]
        self._in_force = self._shares, roster.from_step  # shares, including those of a trial, and their first step
        # Sequences and seconds of the last steps with the current share.
        self._windows: list[deque[tuple[int, float]]] = [_window() for _ in members]
        self._noise = [_Noise() for _ in members]  # with earlier shares
        self._updates: list[deque[float]] = [_window() for _ in members]  # seconds, with any share
        self._pass_sequences = [0.0] * len(members)  # overhead of a micro-batch, in sequences
        self._left: dict[int, tuple[int, float]] = {}  # ranks with a new share: the previous share and its seconds
        # Ratios of the times of neighbouring steps of a round, one of which has one sequence more.
        self._ratios: list[deque[float]] = [_window() for _ in members]
        self._idle = {rank: NEVER for rank, share in enumerate(self._shares) if not share}  # their last known models
        self._tried = dict.fromkeys(self._idle, roster.from_step)  # step of their last share or trial
        self._on_trial: int | None = None
        self._changes: list[int] = []  # steps
        self._confirmed = 0
        self._from_step: int | None = None

    def hear(self, step: int, took_s: Sequence[float], updates_s: Sequence[float], next_step: int) -> Change | None:
        """Observe a step: the seconds of input, forward and backward of every rank, and of its update.

        A returned change is in force from `next_step`; steps before that are ignored.
        """
        if self._from_step is None:  # the first step after a start is slower than others
            self._from_step = step + 1
        working = [rank for rank, share in enumerate(self._shares) if share]
        shares, since = self._in_force
        in_step = turn(shares, self._every, step - since)
        if step < self._from_step or not all(in_step[rank] and took_s[rank] > 0 for rank in working):
            return None
        for rank, num in enumerate(in_step):
            if num:  # with DiLoCo a rank without sequences in this step does not update
                self._updates[rank].append(updates_s[rank])
        change = self._decide(working, in_step, took_s, next_step)
        if change is not None:
            self._in_force = change.shares, next_step
        return change

    def _decide(self, working: Sequence[int], in_step: Sequence[int], took_s: Sequence[float],
                next_step: int) -> Change | None:  # fmt: skip
        if self._on_trial is not None:
            return self._judge(self._on_trial, took_s[self._on_trial], next_step)
        for rank in working:
            self._windows[rank].append((in_step[rank], took_s[rank]))
            self._compare(rank)
        if any(len(self._windows[rank]) < WINDOWS[0] for rank in working):
            return None
        return self._better(working, next_step) or self._try_again(next_step)

    def _better(self, working: Sequence[int], next_step: int) -> Change | None:
        """Return new shares with which the slowest rank would clearly be done sooner; None if there are none."""
        least_gain = self._least_gain(next_step)
        for size in WINDOWS:
            if any(len(self._windows[rank]) < size for rank in working):
                break
            paces = self._paces(size)
            now_s, is_clear = slowest_s(self._shares, paces), False
            if 1 - _least_s(sum(self._shares), paces) / now_s > least_gain:
                shares = self._fastest(paces)
                then_s = slowest_s(shares, paces)
                error = self._gain_error(working, paces, size)
                is_clear = error is not None and 1 - then_s / now_s > max(least_gain, SURE * error)
            if size == WINDOWS[0]:
                self._confirmed = self._confirmed + 1 if is_clear else 0
                is_clear = self._confirmed >= CONFIRMED
            if is_clear:
                why = f"{self._reason(working, paces, size)}: a step's slowest part {_instead(then_s, now_s)}"
                return self._take_up(shares, paces, next_step, why, size)
        return None

    def _least_gain(self, next_step: int) -> float:
        """Return the required relative gain, which doubles with every recent change."""
        return LEAST_GAIN * (1 << max(0, sum(step > next_step - RECENT for step in self._changes) - 1))

    def _gain_error(self, working: Sequence[int], paces: Sequence[Pace], size: int) -> float | None:
        """Return the standard error of a gain: e_slowest − Σ w·e, with errors e of the ranks' times and fractions w of
        the batch. None if too little is known about a rank's noise.
        """
        slowest = max(working, key=lambda rank: (paces[rank].time_s(self._shares[rank]), -rank))
        batch, errors = sum(self._shares), []
        for rank in working:
            error = self._noise[rank].and_of(self._times(rank)).error_of_median(size)
            if error is None:
                return None
            errors.append((float(rank == slowest) - self._shares[rank] / batch) * error)
        return math.sqrt(math.fsum(error * error for error in errors))

    def _take_up(self, shares: list[int], paces: Sequence[Pace], next_step: int, why: str, size: int = 0) -> Change:
        """Apply shares, with new windows where they change. The last `size` steps, which caused it, are not noise."""
        for rank, (before, now) in enumerate(zip(self._shares, shares, strict=True)):
            if now == before:
                continue
            if before:
                self._left[rank] = before, paces[rank].share_s(before)
                window = self._times(rank)
                self._noise[rank] = self._noise[rank].and_of(window[: len(window) - size] or window)
            if now:
                self._idle.pop(rank, None)
            else:
                self._idle[rank], self._tried[rank] = paces[rank], next_step
                self._left.pop(rank, None)  # its speed may have changed when it gets a share again
            self._windows[rank], self._ratios[rank] = _window(), _window()
        self._shares, self._from_step, self._confirmed = shares, next_step, 0
        self._changes.append(next_step)
        return Change(shares=shares, why=why)

    # --- ranks without a share --------------------------------------------------------------------------------------

    def _try_again(self, next_step: int) -> Change | None:
        """Start a trial: give a rank without a share a sequence (or a micro-batch) a step of the largest share."""
        paces = self._paces(WINDOWS[0])
        now_s = slowest_s(self._shares, paces)
        giver = max(range(len(paces)), key=lambda rank: (self._shares[rank], -rank))
        for rank, pace in sorted(self._idle.items()):
            cost = pace.time_s(self._trial) / now_s - 1  # in steps
            if next_step - self._tried[rank] < TRIAL_EVERY * max(1.0, cost) or self._shares[giver] < 2 * self._trial:
                continue
            self._on_trial, self._from_step, self._tried[rank] = rank, next_step, next_step
            shares = list(self._shares)
            shares[giver] -= self._trial
            shares[rank] += self._trial
            return Change(shares=shares, why=f"{self._names[rank]} is tried again", is_trial=True)
        return None

    def _judge(self, rank: int, took_s: float, next_step: int) -> Change | None:
        """Evaluate a trial. The windows of all other ranks are as they were before it."""
        if not took_s > 0:
            return None
        self._on_trial, self._from_step = None, next_step
        self._idle[rank] = self._pace(rank, self._trial, took_s)
        paces = self._paces(WINDOWS[0])
        shares = self._fastest(paces)
        now_s, then_s = slowest_s(self._shares, paces), slowest_s(shares, paces)
        if shares[rank] and 1 - then_s / now_s > self._least_gain(next_step):
            why = f"{self._names[rank]} is fast enough again: a step's slowest part {_instead(then_s, now_s)}"
            return self._take_up(shares, paces, next_step, why)
        return Change(shares=self._shares, why=f"{self._names[rank]} would still hold the others up", is_trial=True)

    # --- time models of the ranks -----------------------------------------------------------------------------------

    def _fastest(self, paces: Sequence[Pace]) -> list[int]:
        if self._every == 1:
            return fastest_shares(sum(self._shares), paces, unit=self._unit)
        # With less than one sequence a step a rank would be steps behind when it gets one, and the others would wait.
        return fastest_or_none(sum(self._shares), paces, least=self._every)

    def _paces(self, size: int) -> list[Pace]:
        """Return the time model of every rank from the median of its last `size` steps."""
        return [self._pace(rank, share, _median(self._times(rank)[-size:])) if share else self._idle[rank]
                for rank, share in enumerate(self._shares)]  # fmt: skip

    def _pace(self, rank: int, share: int, took_s: float) -> Pace:
        micro_batch, pass_sequences = self._micro_batches[rank], self._pass_sequences[rank]
        passes = mean_passes(share, micro_batch, self._every)
        sequence_s = took_s / (passes * pass_sequences + share / self._every)
        update_s = _median(self._updates[rank]) if self._updates[rank] else 0.0
        return Pace(sequence_s=sequence_s, pass_s=pass_sequences * sequence_s, fixed_s=update_s,
                    micro_batch=micro_batch, num_steps=self._every)  # fmt: skip

    def _times(self, rank: int) -> list[float]:
        """Return the seconds of a rank's last steps, each scaled to the mean step of a round."""
        if self._every == 1:
            return [took_s for _, took_s in self._windows[rank]]
        share, micro_batch, pass_sequences = self._shares[rank], self._micro_batches[rank], self._pass_sequences[rank]
        in_round = mean_passes(share, micro_batch, self._every) * pass_sequences + share / self._every
        return [took_s * in_round / (num_passes(num, micro_batch) * pass_sequences + num)
                for num, took_s in self._windows[rank]]  # fmt: skip

    def _compare(self, rank: int) -> None:
        """Compare the times of two numbers of sequences: before and after a change of share, or of neighbouring steps
        of a round.
        """
        window, ratios = self._windows[rank], self._ratios[rank]
        if self._every > 1:
            (few, few_s), (many, many_s) = sorted([window[-1], window[-2 if len(window) > 1 else -1]])
            if few == many:
                return
            ratios.append(many_s / few_s)
            if len(ratios) >= WINDOWS[0]:
                self._learn(rank, few, many, _median(ratios), _error(_deviations(ratios), len(ratios)))
        elif rank in self._left and len(window) >= WINDOWS[0]:
            error = self._noise[rank].and_of(self._times(rank)).error_of_median(WINDOWS[0])
            if error is not None:
                before, before_s = self._left.pop(rank)
                grown = _median(self._times(rank)) / before_s
                self._learn(rank, before, self._shares[rank], grown, math.sqrt(2) * error)

    def _learn(self, rank: int, before: int, now: int, grown: float, error: float) -> None:
        """Learn the overhead of a micro-batch, p sequences: for two numbers n of sequences, p·micro_batches + n is in
        the ratio of their times, `grown` with a relative standard error.
        """
        micro_batch = self._micro_batches[rank]
        passes_before, passes = num_passes(before, micro_batch), num_passes(now, micro_batch)
        low, high = now / before, passes / passes_before
        if abs(high - low) < TELLING * error * grown:
            return
        fraction = (grown - low) / (high - low)  # 0: micro-batches have no overhead; 1: sequences cost nothing
        max_fraction = 1 - error * grown / abs(high - low)
        grown = low + max(0.0, min(fraction, max_fraction)) * (high - low)
        overhead = (grown * before - now) / (passes - grown * passes_before)
        self._pass_sequences[rank] = min(overhead, float(micro_batch))  # assumption: no more than its sequences

    def _reason(self, working: Sequence[int], paces: Sequence[Pace], size: int) -> str:
        """Explain a change: the rank that became slower or faster or, if none did, how much the ranks differ."""
        changed = []
        for rank in working:
            before = self._times(rank)[:-size]
            if len(before) >= WINDOWS[0]:
                changed.append((paces[rank].share_s(self._shares[rank]) / _median(before), rank))
        factor, rank = max(changed, key=lambda c: max(c[0], 1 / c[0]), default=(1.0, 0))
        if factor > CLEARLY:
            return f"{self._names[rank]} takes {factor:.1f} times as long as before"
        if 1 / factor > CLEARLY:
            return f"{self._names[rank]} is {1 / factor:.1f} times as fast as before"
        by_speed = sorted(working, key=lambda rank: (paces[rank].sequence_s, rank))
        fast, slow = by_speed[0], by_speed[-1]
        times = paces[slow].sequence_s / paces[fast].sequence_s
        return f"{self._names[slow]} takes {times:.1f} times as long for a sequence as {self._names[fast]}"


class _Noise:
    """Relative deviations of a rank's times from the median of their window: of steps, and of medians of 5 in a row.

    The latter exceed what the former predict where slow steps come in clusters.
    """

    def __init__(self, steps: Sequence[float] = (), medians: Sequence[float] = ()) -> None:
        self._steps, self._medians = steps, medians

    def and_of(self, values: Sequence[float]) -> _Noise:
        """Return this noise extended by the values of a window, limited to the last 45 steps."""
        size, limit = WINDOWS[0], WINDOWS[-1]
        middle = _median(values) if values else 1.0
        steps = _deviations(values)
        ends = range(len(values), size - 1, -size)
        medians = [abs(_median(values[end - size : end]) / middle - 1) for end in ends][::-1]
        return _Noise([*self._steps, *steps][-limit:], [*self._medians, *medians][-(limit // size) :])

    def error_of_median(self, size: int) -> float | None:
        """Return the standard error of the median of `size` steps; None if too few are known."""
        if len(self._steps) < ENOUGH:
            return None
        of_steps = _error(self._steps, size)
        if len(self._medians) < FEW:
            return of_steps
        return max(of_steps, MAD * _median(self._medians) * math.sqrt(WINDOWS[0] / size))


def _error(deviations: Sequence[float], size: int) -> float:
    """Return the relative standard error of a median of `size` values with these deviations."""
    return OF_MEDIAN * max(LEAST_SPREAD, MAD * _median(deviations)) / math.sqrt(size)


def _deviations(values: Sequence[float]) -> list[float]:
    """Return the relative deviations of values from their median."""
    middle = _median(values) if values else 1.0
    return [abs(value / middle - 1) for value in values]


def _window() -> deque[Any]:
    return deque(maxlen=WINDOWS[-1])


def _median(values: Sequence[float]) -> float:
    result = median(values)
    assert result is not None
    return result


def _least_s(num_sequences: int, paces: Sequence[Pace]) -> float:
    """Return a lower bound of the step time for any shares: all ranks busy, without micro-batch or update overhead."""
    return num_sequences / math.fsum(pace.rate for pace in paces)


def _instead(then_s: float, now_s: float) -> str:
    return f"takes {seconds(then_s)} instead of {seconds(now_s)}"
