"""Dynamic rebalancing: change the shares of a run when measured step times show that the slowest rank would be faster.

    every step, for every rank: seconds of its share ─▶ LoadBalancer.observe_step ─▶ ShareChange, or None

A rank's time is the median of its last 5, 15 or 45 steps with the same share: a short window reacts to a large change
soon, a long one detects a small change in the noise. The time of one share predicts that of another
(load_balancing.RankTimeModel); the overhead of a micro-batch is learned from steps with two different numbers of
sequences. The update takes the same time with any share, and longer on slower machines: 6 % of a step on a quarter of
a core.

With DiLoCo ranks wait for each other once in a round of steps, not in every step. Shares then count the sequences of a
whole round: a rank with 9.1 of 16 sequences on average computes 9 or 10 in each step.

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

from evener.core.base.units import format_seconds, sample_median
from evener.core.run.roster import Roster, num_micro_batches, step_shares
from evener.plan.shares.load_balancing import (
    RankTimeModel,
    fastest_shares,
    fastest_shares_or_zero,
    mean_num_micro_batches,
    slowest_rank_s,
)

WINDOWS = (5, 15, 45)  # steps
CONFIRMATIONS = 4  # decisions in a row, of the shortest window: three slow steps are not enough
MIN_NOISE_STEPS = 8  # steps from which a rank's noise is known
MIN_NOISE_MEDIANS = 4  # fewer medians of 5 steps than this are ignored in the noise
MIN_STEP_GAIN = 0.04  # of a step
GAIN_STANDARD_ERRORS = 4.0  # standard errors
MIN_RELATIVE_NOISE = 0.01  # of a rank's times, relative
# standard errors that must separate the two explanations of a time: micro-batches or sequences
OVERHEAD_STANDARD_ERRORS = 10.0
RECENT_STEPS = 500  # steps
TRIAL_INTERVAL_STEPS = 50  # steps; a trial may also cost at most one step in so many
NOTABLE_FACTOR = 1.15  # a rank that became slower or faster by a smaller factor is not named as the reason

UNUSABLE = RankTimeModel(sequence_s=1e30)  # a rank that starts without a share never gets one
MAD_TO_SIGMA = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
MEDIAN_ERROR_FACTOR = 1.2533  # standard error of a median over that of a mean: √(π/2)


class ShareChange(msgspec.Struct, frozen=True, kw_only=True):
    """New shares, in force from the next step."""

    shares: list[int]
    reason: str
    is_trial: bool = False  # a rank without a share gets one for a step, or failed this trial


class LoadBalancer:
    """Decides on new shares, identically on every rank.

    With `share_unit`, each micro-batch has that many sequences, and shares are multiples of it. Otherwise shares count
    the sequences of a round, as in `Roster.replace_shares`, and times are averages over its steps.
    """

    def __init__(self, roster: Roster, share_unit: int | None = None, previous: LoadBalancer | None = None) -> None:
        """`previous`: of the same ranks with another sync strategy; what it knows of idle ranks stays."""
        members = roster.members
        shared_hosts = {member.host for member in members if sum(other.host == member.host for other in members) > 1}
        self._names = [f"rank {m.rank} on {m.host}" if m.host in shared_hosts else m.host for m in members]
        self.every = every = 1 if share_unit else roster.sync.every  # steps whose sequences a share counts
        self._unit, self._trial = share_unit or 1, share_unit or every
        self._micro_batches = [share_unit or member.micro_batch for member in members]
        self._shares = roster.round_shares or [every * share for share in roster.shares]
        self._in_force = self._shares, roster.from_step  # shares, including those of a trial, and their first step
        # Sequences and seconds of the last steps with the current share.
        self._windows: list[deque[tuple[int, float]]] = [_window() for _ in members]
        self._noise = [_TimingNoise() for _ in members]  # with earlier shares
        self._updates: list[deque[float]] = [_window() for _ in members]  # seconds, with any share
        self._pass_sequences = [0.0] * len(members)  # overhead of a micro-batch, in sequences
        self._left: dict[int, tuple[int, float]] = {}  # ranks with a new share: the previous share and its seconds
        # Ratios of the times of neighbouring steps of a round, one of which has one sequence more.
        self._ratios: list[deque[float]] = [_window() for _ in members]
        self._idle = {rank: UNUSABLE for rank, share in enumerate(self._shares) if not share}  # their last known models
        self._tried = dict.fromkeys(self._idle, roster.from_step)  # step of their last share or trial
        self._on_trial: int | None = None
        self._changes: list[int] = []  # steps
        self._confirmed = 0
        self._from_step: int | None = None
        if previous is not None:
            self._changes, self._pass_sequences = previous._changes, previous._pass_sequences
            for rank in self._idle.keys() & previous._idle.keys():
                self._idle[rank] = msgspec.structs.replace(previous._idle[rank], num_steps=every)
                self._tried[rank] = previous._tried[rank]

    @property
    def is_trying(self) -> bool:
        """Return whether a rank without a share computes a step on trial."""
        return self._on_trial is not None

    def observe_step(
        self,
        step: int,
        work_s: Sequence[float],
        update_s: Sequence[float],
        next_step: int,
        is_comparing: bool = False,
    ) -> ShareChange | None:
        """Add one step: every rank's seconds of input, forward and backward (`work_s`) and of the update (`update_s`).

        Return new shares if they would clearly be faster. They are in force from `next_step`; steps before that are
        ignored. No idle rank is tried while `is_comparing`: while sync strategies are compared.
        """
        if self._from_step is None:  # the first step after a start is slower than others
            self._from_step = step + 1
        working = [rank for rank, share in enumerate(self._shares) if share]
        shares, since = self._in_force
        in_step = step_shares(shares, self.every, step - since)
        if step < self._from_step or not all(in_step[rank] and work_s[rank] > 0 for rank in working):
            return None
        for rank, num in enumerate(in_step):
            if num:  # with DiLoCo a rank without sequences in this step does not update
                self._updates[rank].append(update_s[rank])
        change = self._decide(working, in_step, work_s, next_step, is_comparing)
        if change is not None:
            self._in_force = change.shares, next_step
        return change

    def _decide(self, working: Sequence[int], in_step: Sequence[int], took_s: Sequence[float],
                next_step: int, is_comparing: bool) -> ShareChange | None:  # fmt: skip
        if self._on_trial is not None:
            return self._judge_trial(self._on_trial, took_s[self._on_trial], next_step)
        for rank in working:
            self._windows[rank].append((in_step[rank], took_s[rank]))
            self._compare_times(rank)
        if any(len(self._windows[rank]) < WINDOWS[0] for rank in working):
            return None
        change = self._find_better_shares(working, next_step)
        return change if change is not None or is_comparing else self._start_trial(next_step)

    def _find_better_shares(self, working: Sequence[int], next_step: int) -> ShareChange | None:
        """Return new shares with which the slowest rank would clearly be done sooner; None if there are none."""
        least_gain = self._required_gain(next_step)
        for size in WINDOWS:
            if any(len(self._windows[rank]) < size for rank in working):
                break
            time_models = self._time_models(size)
            now_s, is_clear = slowest_rank_s(self._shares, time_models), False
            if 1 - _lower_bound_s(sum(self._shares), time_models) / now_s > least_gain:
                shares = self._fastest_shares(time_models)
                then_s = slowest_rank_s(shares, time_models)
                error = self._gain_error(working, time_models, size)
                is_clear = error is not None and 1 - then_s / now_s > max(least_gain, GAIN_STANDARD_ERRORS * error)
            if size == WINDOWS[0]:
                self._confirmed = self._confirmed + 1 if is_clear else 0
                is_clear = self._confirmed >= CONFIRMATIONS
            if is_clear:
                why = (
                    f"{self._explain_change(working, time_models, size)}: a step's slowest part "
                    f"{_format_speedup(then_s, now_s)}"
                )
                return self._apply_shares(shares, time_models, next_step, why, size)
        return None

    def _required_gain(self, next_step: int) -> float:
        """Return the required relative gain, which doubles with every recent change."""
        return MIN_STEP_GAIN * (1 << max(0, sum(step > next_step - RECENT_STEPS for step in self._changes) - 1))

    def _gain_error(self, working: Sequence[int], time_models: Sequence[RankTimeModel], size: int) -> float | None:
        """Return the standard error of a gain: e_slowest − Σ w·e, with errors e of the ranks' times and fractions w of
        the batch. None if too little is known about a rank's noise.
        """
        slowest = max(working, key=lambda rank: (time_models[rank].time_s(self._shares[rank]), -rank))
        batch, errors = sum(self._shares), []
        for rank in working:
            error = self._noise[rank].extended_by(self._times(rank)).median_error(size)
            if error is None:
                return None
            errors.append((float(rank == slowest) - self._shares[rank] / batch) * error)
        return math.sqrt(math.fsum(error * error for error in errors))

    def _apply_shares(
        self, shares: list[int], time_models: Sequence[RankTimeModel], next_step: int, reason: str, size: int = 0
    ) -> ShareChange:
        """Adopt these shares and return the change. A rank whose share changes starts a new window.

        The last `size` steps caused the change, so they do not count as noise.
        """
        for rank, (before, now) in enumerate(zip(self._shares, shares, strict=True)):
            if now == before:
                continue
            if before:
                self._left[rank] = before, time_models[rank].variable_time_s(before)
                window = self._times(rank)
                self._noise[rank] = self._noise[rank].extended_by(window[: len(window) - size] or window)
            if now:
                self._idle.pop(rank, None)
            else:
                self._idle[rank], self._tried[rank] = time_models[rank], next_step
                self._left.pop(rank, None)  # its speed may have changed when it gets a share again
            self._windows[rank], self._ratios[rank] = _window(), _window()
        self._shares, self._from_step, self._confirmed = shares, next_step, 0
        self._changes.append(next_step)
        return ShareChange(shares=shares, reason=reason)

    # --- ranks without a share --------------------------------------------------------------------------------------

    def _start_trial(self, next_step: int) -> ShareChange | None:
        """Start a trial if one is due: move a sequence (or micro-batch) a step from the largest share to an idle rank.

        Return None if none is due.
        """
        time_models = self._time_models(WINDOWS[0])
        now_s = slowest_rank_s(self._shares, time_models)
        giver = max(range(len(time_models)), key=lambda rank: (self._shares[rank], -rank))
        for rank, time_model in sorted(self._idle.items()):
            cost = time_model.time_s(self._trial) / now_s - 1  # in steps
            if (
                next_step - self._tried[rank] < TRIAL_INTERVAL_STEPS * max(1.0, cost)
                or self._shares[giver] < 2 * self._trial
            ):
                continue
            self._on_trial, self._from_step, self._tried[rank] = rank, next_step, next_step
            shares = list(self._shares)
            shares[giver] -= self._trial
            shares[rank] += self._trial
            return ShareChange(shares=shares, reason=f"{self._names[rank]} is tried again", is_trial=True)
        return None

    def _judge_trial(self, rank: int, took_s: float, next_step: int) -> ShareChange | None:
        """End a trial: return new shares if the rank is fast enough again, else the shares from before the trial.

        Return None, and go on with the trial, if the rank's time was not measured.
        """
        if not took_s > 0:
            return None
        self._on_trial, self._from_step = None, next_step
        self._idle[rank] = self._time_model(rank, self._trial, took_s)
        time_models = self._time_models(WINDOWS[0])
        shares = self._fastest_shares(time_models)
        now_s, then_s = slowest_rank_s(self._shares, time_models), slowest_rank_s(shares, time_models)
        if shares[rank] and 1 - then_s / now_s > self._required_gain(next_step):
            why = f"{self._names[rank]} is fast enough again: a step's slowest part {_format_speedup(then_s, now_s)}"
            return self._apply_shares(shares, time_models, next_step, why)
        return ShareChange(
            shares=self._shares, reason=f"{self._names[rank]} would still hold the others up", is_trial=True
        )

    # --- time models of the ranks -----------------------------------------------------------------------------------

    def _fastest_shares(self, time_models: Sequence[RankTimeModel]) -> list[int]:
        if self.every == 1:
            return fastest_shares(sum(self._shares), time_models, unit=self._unit)
        # With less than one sequence a step a rank would be steps behind when it gets one, and the others would wait.
        return fastest_shares_or_zero(sum(self._shares), time_models, min_share=self.every)

    def _time_models(self, size: int) -> list[RankTimeModel]:
        """Return the time model of every rank from the median of its last `size` steps."""
        return [self._time_model(rank, share, sample_median(self._times(rank)[-size:])) if share else self._idle[rank]
                for rank, share in enumerate(self._shares)]  # fmt: skip

    def _time_model(self, rank: int, share: int, took_s: float) -> RankTimeModel:
        micro_batch, pass_sequences = self._micro_batches[rank], self._pass_sequences[rank]
        passes = mean_num_micro_batches(share, micro_batch, self.every)
        sequence_s = took_s / (passes * pass_sequences + share / self.every)
        update_s = sample_median(self._updates[rank]) if self._updates[rank] else 0.0
        return RankTimeModel(
            sequence_s=sequence_s,
            micro_batch_overhead_s=pass_sequences * sequence_s,
            fixed_s=update_s,
            micro_batch=micro_batch,
            num_steps=self.every,
        )

    def _times(self, rank: int) -> list[float]:
        """Return the seconds of a rank's last steps, each scaled to the mean step of a round."""
        if self.every == 1:
            return [took_s for _, took_s in self._windows[rank]]
        share, micro_batch, pass_sequences = self._shares[rank], self._micro_batches[rank], self._pass_sequences[rank]
        in_round = mean_num_micro_batches(share, micro_batch, self.every) * pass_sequences + share / self.every
        return [took_s * in_round / (num_micro_batches(num, micro_batch) * pass_sequences + num)
                for num, took_s in self._windows[rank]]  # fmt: skip

    def _compare_times(self, rank: int) -> None:
        """Learn a rank's micro-batch overhead from its times with two numbers of sequences: before and after a change
        of its share or, with DiLoCo, in two successive steps.
        """
        window, ratios = self._windows[rank], self._ratios[rank]
        if self.every > 1:
            (few, few_s), (many, many_s) = sorted([window[-1], window[-2 if len(window) > 1 else -1]])
            if few == many:
                return
            ratios.append(many_s / few_s)
            if len(ratios) >= WINDOWS[0]:
                self._learn_overhead(
                    rank, few, many, sample_median(ratios), _median_standard_error(_deviations(ratios), len(ratios))
                )
        elif rank in self._left and len(window) >= WINDOWS[0]:
            error = self._noise[rank].extended_by(self._times(rank)).median_error(WINDOWS[0])
            if error is not None:
                before, before_s = self._left.pop(rank)
                grown = sample_median(self._times(rank)) / before_s
                self._learn_overhead(rank, before, self._shares[rank], grown, math.sqrt(2) * error)

    def _learn_overhead(self, rank: int, before: int, now: int, grown: float, error: float) -> None:
        """Learn the overhead p of a micro-batch, in sequences. A time is proportional to p·micro_batches + sequences.

        `grown` is the time with `now` sequences divided by that with `before`; `error` is its relative standard error.
        """
        micro_batch = self._micro_batches[rank]
        passes_before, passes = num_micro_batches(before, micro_batch), num_micro_batches(now, micro_batch)
        low, high = now / before, passes / passes_before
        if abs(high - low) < OVERHEAD_STANDARD_ERRORS * error * grown:
            return
        fraction = (grown - low) / (high - low)  # 0: micro-batches have no overhead; 1: sequences cost nothing
        max_fraction = 1 - error * grown / abs(high - low)
        grown = low + max(0.0, min(fraction, max_fraction)) * (high - low)
        overhead = (grown * before - now) / (passes - grown * passes_before)
        self._pass_sequences[rank] = min(overhead, float(micro_batch))  # assumption: no more than its sequences

    def _explain_change(self, working: Sequence[int], time_models: Sequence[RankTimeModel], size: int) -> str:
        """Explain a change: the rank that became slower or faster or, if none did, how much the ranks differ."""
        changed = []
        for rank in working:
            before = self._times(rank)[:-size]
            if len(before) >= WINDOWS[0]:
                changed.append((time_models[rank].variable_time_s(self._shares[rank]) / sample_median(before), rank))
        factor, rank = max(changed, key=lambda c: max(c[0], 1 / c[0]), default=(1.0, 0))
        if factor > NOTABLE_FACTOR:
            return f"{self._names[rank]} takes {factor:.1f} times as long as before"
        if 1 / factor > NOTABLE_FACTOR:
            return f"{self._names[rank]} is {1 / factor:.1f} times as fast as before"
        by_speed = sorted(working, key=lambda rank: (time_models[rank].sequence_s, rank))
        fast, slow = by_speed[0], by_speed[-1]
        times = time_models[slow].sequence_s / time_models[fast].sequence_s
        multiple = f"{times:.1f} times " if times >= 1.05 else ""
        return f"{self._names[slow]} takes {multiple}as long for a sequence as {self._names[fast]}"


class _TimingNoise:
    """Relative deviations of a rank's step times, and of medians of 5 steps in a row, from the median of their window.

    Where slow steps come in clusters, the medians deviate more than the single steps predict.
    """

    def __init__(self, steps: Sequence[float] = (), medians: Sequence[float] = ()) -> None:
        self._steps, self._medians = steps, medians

    def extended_by(self, values: Sequence[float]) -> _TimingNoise:
        """Return this noise extended by the values of a window, limited to the last 45 steps."""
        size, limit = WINDOWS[0], WINDOWS[-1]
        typical = sample_median(values) if values else 1.0
        steps = _deviations(values)
        ends = range(len(values), size - 1, -size)
        medians = [abs(sample_median(values[end - size : end]) / typical - 1) for end in ends][::-1]
        return _TimingNoise([*self._steps, *steps][-limit:], [*self._medians, *medians][-(limit // size) :])

    def median_error(self, size: int) -> float | None:
        """Return the standard error of the median of `size` steps; None if too few are known."""
        if len(self._steps) < MIN_NOISE_STEPS:
            return None
        of_steps = _median_standard_error(self._steps, size)
        if len(self._medians) < MIN_NOISE_MEDIANS:
            return of_steps
        return max(of_steps, MAD_TO_SIGMA * sample_median(self._medians) * math.sqrt(WINDOWS[0] / size))


def _median_standard_error(deviations: Sequence[float], size: int) -> float:
    """Return the relative standard error of a median of `size` values with these deviations."""
    return MEDIAN_ERROR_FACTOR * max(MIN_RELATIVE_NOISE, MAD_TO_SIGMA * sample_median(deviations)) / math.sqrt(size)


def _deviations(values: Sequence[float]) -> list[float]:
    """Return the relative deviations of values from their median."""
    typical = sample_median(values) if values else 1.0
    return [abs(value / typical - 1) for value in values]


def _window() -> deque[Any]:
    return deque(maxlen=WINDOWS[-1])


def _lower_bound_s(num_sequences: int, time_models: Sequence[RankTimeModel]) -> float:
    """Return a lower bound of the step time for any shares: all ranks busy, without micro-batch or update overhead."""
    return num_sequences / math.fsum(time_model.sequences_per_s for time_model in time_models)


def _format_speedup(then_s: float, now_s: float) -> str:
    return f"takes {format_seconds(then_s)} instead of {format_seconds(now_s)}"
