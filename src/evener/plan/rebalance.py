"""When do the shares of a run change while it goes on, to what, and why?

    every step, of every rank: seconds that its share took it ─▶ Balancer.hear ─▶ Change, or None

A rank's time is the median of its last 5, 15 or 45 steps with the same share: few answer a large change soon, many see
a small one through the noise. What one share took tells what another would take (balance.Pace); what a pass costs apart
from its sequences is learned from steps with two numbers of them. Its update takes as long with any share, and the
slower the machine the longer: of a quarter of a core 6 % of a step.

Where replicas drift nobody waits for a single step, and shares are of all batches of a round: 9.1 of 16 sequences in
the mean of its steps, each of which has 9 or 10.

Shares change only where the slowest rank would be done clearly sooner: by LEAST_GAIN at least, by SURE standard errors
of that gain, and by medians of 5 steps four times in a row. Each change of the last RECENT steps but the first doubles
the gain that the next one needs: machines that are merely restless are soon left alone.

No clock and no torch. All ranks decide for themselves from the same numbers and must come to the same bits, on whatever
machine: so there is nothing here but + − × ÷, square roots and `fsum`, which are the same everywhere.
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
FEW = 4  # medians of 5 steps that say nothing yet of it
LEAST_GAIN = 0.04  # of a step
SURE = 4.0  # standard errors
LEAST_SPREAD = 0.01  # of a rank's times, relative
TELLING = 10.0  # standard errors between what passes and what sequences would make of a time, to tell them apart
RECENT = 500  # steps
TRIAL_EVERY = 50  # steps; a trial may also cost no more than one step in so many
CLEARLY = 1.15  # a rank that is slower or faster than before by less is not the reason

NEVER = Pace(sequence_s=1e30)  # whoever began without a share gets none
MAD = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
OF_MEDIAN = 1.2533  # standard error of a median over that of a mean: √(π/2)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Other shares from the next step on."""

    shares: list[int]
    why: str
    is_trial: bool = False  # a rank without a share is tried for a step, or has not stood the test


class Balancer:
    """Decides on every rank alike. `whole`: shares are multiples of so many sequences, each of them a pass.

    Else sequences are those of a round, as `Roster.divided` takes them, and times are of its steps in the mean.
    """

    def __init__(self, roster: Roster, whole: int | None = None) -> None:
        members = roster.members
        several = {member.host for member in members if sum(other.host == member.host for other in members) > 1}
        self._names = [f"rank {m.rank} on {m.host}" if m.host in several else m.host for m in members]
        self._every = every = 1 if whole else roster.sync.every
        self._unit, self._trial = whole or 1, whole or every
        self._micro_batches = [whole or member.micro_batch for member in members]
        self._shares = roster.round_shares or [every * share for share in roster.shares]
        self._in_force = self._shares, roster.from_step  # those of a trial, too, and since when
        # Sequences and seconds of the last steps with the present share.
        self._windows: list[deque[tuple[int, float]]] = [_window() for _ in members]
        self._noise = [_Noise() for _ in members]  # of the shares before
        self._updates: list[deque[float]] = [_window() for _ in members]  # seconds, with any share
        self._pass_sequences = [0.0] * len(members)  # what a pass costs, in sequences
        self._left: dict[int, tuple[int, float]] = {}  # ranks with a new share: the share before, and its seconds
        # Of the times of neighbouring steps of a round, of which one has a sequence more.
        self._ratios: list[deque[float]] = [_window() for _ in members]
        self._idle = {rank: NEVER for rank, share in enumerate(self._shares) if not share}  # as they were last known
        self._tried = dict.fromkeys(self._idle, roster.from_step)  # since when they have no share, or were tried
        self._on_trial: int | None = None
        self._changes: list[int] = []  # steps
        self._confirmed = 0
        self._from_step: int | None = None

    def hear(self, step: int, took_s: Sequence[float], updates_s: Sequence[float], next_step: int) -> Change | None:
        """What input, forward and backward of a step took every rank, and its update. A change that is returned is in
        force from `next_step` on; of steps before it nothing more is asked.
        """
        if self._from_step is None:  # the first step of a start is slower than others
            self._from_step = step + 1
        working = [rank for rank, share in enumerate(self._shares) if share]
        shares, since = self._in_force
        in_step = turn(shares, self._every, step - since)
        if step < self._from_step or not all(in_step[rank] and took_s[rank] > 0 for rank in working):
            return None
        for rank, num in enumerate(in_step):
            if num:  # where replicas drift, nobody updates what has learned nothing
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
        """Shares with which the slowest rank is clearly sooner done."""
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
        """More with every change that was made lately."""
        return LEAST_GAIN * (1 << max(0, sum(step > next_step - RECENT for step in self._changes) - 1))

    def _gain_error(self, working: Sequence[int], paces: Sequence[Pace], size: int) -> float | None:
        """Standard error of a gain: with errors e of the ranks' times and parts w of the batch, e_slowest − Σ w·e.
        None where too little is known of a rank's noise.
        """
        last = max(working, key=lambda rank: (paces[rank].time_s(self._shares[rank]), -rank))
        batch, errors = sum(self._shares), []
        for rank in working:
            error = self._noise[rank].and_of(self._times(rank)).error_of_median(size)
            if error is None:
                return None
            errors.append((float(rank == last) - self._shares[rank] / batch) * error)
        return math.sqrt(math.fsum(error * error for error in errors))

    def _take_up(self, shares: list[int], paces: Sequence[Pace], next_step: int, why: str, size: int = 0) -> Change:
        """Begin new windows where shares change. The last `size` steps, which asked for it, are not taken for noise."""
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
                self._left.pop(rank, None)  # it may come back as another machine
            self._windows[rank], self._ratios[rank] = _window(), _window()
        self._shares, self._from_step, self._confirmed = shares, next_step, 0
        self._changes.append(next_step)
        return Change(shares=shares, why=why)

    # --- ranks without a share --------------------------------------------------------------------------------------

    def _try_again(self, next_step: int) -> Change | None:
        """A sequence or a micro-batch a step, of the largest share, for a rank that has none: is it fast again?"""
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
        """What a trial has shown. All others' windows are as they were before it."""
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

    # --- what is known of a rank ------------------------------------------------------------------------------------

    def _fastest(self, paces: Sequence[Pace]) -> list[int]:
        if self._every == 1:
            return fastest_shares(sum(self._shares), paces, unit=self._unit)
        # With less than a sequence a step a rank would be steps behind when it has one, and the others waited.
        return fastest_or_none(sum(self._shares), paces, least=self._every)

    def _paces(self, size: int) -> list[Pace]:
        """By the medians of the last steps."""
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
        """Seconds of its last steps, each as if it had been like all of the round in the mean."""
        if self._every == 1:
            return [took_s for _, took_s in self._windows[rank]]
        share, micro_batch, pass_sequences = self._shares[rank], self._micro_batches[rank], self._pass_sequences[rank]
        in_round = mean_passes(share, micro_batch, self._every) * pass_sequences + share / self._every
        return [took_s * in_round / (num_passes(num, micro_batch) * pass_sequences + num)
                for num, took_s in self._windows[rank]]  # fmt: skip

    def _compare(self, rank: int) -> None:
        """Times of two numbers of sequences: before and after a change of share, or of a round's neighbouring steps."""
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
        """What a pass costs: p sequences, where p·passes + n of two numbers n of them are in the ratio of their times,
        `grown` with a relative standard error.
        """
        micro_batch = self._micro_batches[rank]
        passes_before, passes = num_passes(before, micro_batch), num_passes(now, micro_batch)
        least, most = now / before, passes / passes_before
        if abs(most - least) < TELLING * error * grown:
            return
        part = (grown - least) / (most - least)  # 0: passes cost nothing; 1: sequences do
        surely = 1 - error * grown / abs(most - least)
        grown = least + max(0.0, min(part, surely)) * (most - least)
        found = (grown * before - now) / (passes - grown * passes_before)
        self._pass_sequences[rank] = min(found, float(micro_batch))  # assumption: no more than its sequences

    def _reason(self, working: Sequence[int], paces: Sequence[Pace], size: int) -> str:
        """Who is slower or faster than before; where nobody is, how different they are."""
        changed = []
        for rank in working:
            before = self._times(rank)[:-size]
            if len(before) >= WINDOWS[0]:
                changed.append((paces[rank].share_s(self._shares[rank]) / _median(before), rank))
        factor, rank = max(changed, key=lambda one: max(one[0], 1 / one[0]), default=(1.0, 0))
        if factor > CLEARLY:
            return f"{self._names[rank]} takes {factor:.1f} times as long as before"
        if 1 / factor > CLEARLY:
            return f"{self._names[rank]} is {1 / factor:.1f} times as fast as before"
        by_pace = sorted(working, key=lambda rank: (paces[rank].sequence_s, rank))
        fast, slow = by_pace[0], by_pace[-1]
        times = paces[slow].sequence_s / paces[fast].sequence_s
        return f"{self._names[slow]} takes {times:.1f} times as long for a sequence as {self._names[fast]}"


class _Noise:
    """Deviations of a rank's times from the median of their window, relative: of steps, and of medians of 5 in a row.

    The latter are larger than the former foretell where slow steps come together.
    """

    def __init__(self, steps: Sequence[float] = (), medians: Sequence[float] = ()) -> None:
        self._steps, self._medians = steps, medians

    def and_of(self, values: Sequence[float]) -> _Noise:
        """With those of a window, of the last 45 steps together."""
        size, most = WINDOWS[0], WINDOWS[-1]
        middle = _median(values) if values else 1.0
        steps = _deviations(values)
        ends = range(len(values), size - 1, -size)
        medians = [abs(_median(values[end - size : end]) / middle - 1) for end in ends][::-1]
        return _Noise([*self._steps, *steps][-most:], [*self._medians, *medians][-(most // size) :])

    def error_of_median(self, size: int) -> float | None:
        """Standard error of the median of so many steps; None where too few are known."""
        if len(self._steps) < ENOUGH:
            return None
        of_steps = _error(self._steps, size)
        if len(self._medians) < FEW:
            return of_steps
        return max(of_steps, MAD * _median(self._medians) * math.sqrt(WINDOWS[0] / size))


def _error(deviations: Sequence[float], size: int) -> float:
    """Standard error of the median of so many values that deviate from their median so, relative."""
    return OF_MEDIAN * max(LEAST_SPREAD, MAD * _median(deviations)) / math.sqrt(size)


def _deviations(values: Sequence[float]) -> list[float]:
    """From their median, relative."""
    middle = _median(values) if values else 1.0
    return [abs(value / middle - 1) for value in values]


def _window() -> deque[Any]:
    return deque(maxlen=WINDOWS[-1])


def _median(values: Sequence[float]) -> float:
    found = median(values)
    assert found is not None
    return found


def _least_s(num_sequences: int, paces: Sequence[Pace]) -> float:
    """What no division falls below: all done at once, in passes and updates that cost nothing."""
    return num_sequences / math.fsum(pace.rate for pace in paces)


def _instead(then_s: float, now_s: float) -> str:
    return f"takes {seconds(then_s)} instead of {seconds(now_s)}"
