"""Shares follow the speed of ranks within a few steps, do not follow noise, and are equal on every rank."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from evener.core.run.roster import RankSlot, Roster, initial_roster
from evener.core.run.run_spec import parse_args
from evener.plan.shares.load_balancing import RankTimeModel, fastest_shares, slowest_rank_s
from evener.plan.shares.rebalance import RECENT_STEPS, TRIAL_INTERVAL_STEPS, LoadBalancer, ShareChange

from ..tiers import exhaustively, num_examples, pairwise, seeds

Speed = Callable[[int, int], float]  # of a rank at a step, in sequences a second


def roster(hosts: str, batch: int, micro_batch: int = 1000, every: int = 1) -> Roster:
    sync = "ddp" if every == 1 else f"diloco:{every}"
    spec = parse_args([f"--batch={batch}", f"--micro-batch={micro_batch}", f"--sync={sync}"])
    return initial_roster(spec, [RankSlot(host=host, device="cpu") for host in hosts], 64)


@functools.cache
def ideal_round_s(paces: tuple[RankTimeModel, ...], batch: int, every: int, unit: int) -> float:
    """Return the time of a round with the best shares."""
    of_round = [pace.for_round(every) for pace in paces]
    return every * slowest_rank_s(fastest_shares(every * batch, of_round, unit=unit), of_round)


@dataclass
class Simulated:
    """A run of machines that take what `speed` and `noise` say, a pass as long as `pass_sequences` of its sequences."""

    hosts: str
    batch: int
    speed: Speed = lambda rank, step: 1.0
    noise: Speed = lambda rank, step: 1.0
    micro_batch: int = 1000
    pass_sequences: float = 0.0
    whole: int | None = None
    every: int = 1  # steps of a round of replicas that drift
    lag: int = 0  # steps by which news is late, as where a GPU takes part
    changes: dict[int, ShareChange] = field(default_factory=dict)  # by the step from which they are in force
    took: list[float] = field(default_factory=list)  # the slowest rank, by round
    ideal: list[float] = field(default_factory=list)  # with the best shares

    def go(self, steps: int) -> Simulated:
        now = roster(self.hosts, self.batch, self.micro_batch, self.every)
        balancer = LoadBalancer(now, self.whole)
        told: list[list[float]] = []
        ends: list[list[float]] = []  # of each step on each rank; where replicas drift nobody is two steps ahead
        for step in range(steps):
            shares = now.at_step(step).shares
            paces = [RankTimeModel(sequence_s=1 / speed, micro_batch_overhead_s=self.pass_sequences / speed,
                          micro_batch=self.whole or self.micro_batch)
                     for speed in (self.speed(rank, step) for rank in range(len(shares)))]  # fmt: skip
            took = [pace.time_s(share) * self.noise(rank, step)
                    for rank, (pace, share) in enumerate(zip(paces, shares, strict=True))]  # fmt: skip
            told.append(took)
            all_ended = max(ends[-2]) if step > 1 else 0.0
            before = ends[-1] if ends else [0.0] * len(took)
            ends.append([max(ended, all_ended) + own for ended, own in zip(before, took, strict=True)])
            if (step + 1) % self.every == 0:
                begun_s = max(ends[-1 - self.every]) if step >= self.every else 0.0
                self.took.append(max(took) if self.every == 1 else max(ends[-1]) - begun_s)
                self.ideal.append(ideal_round_s(tuple(paces), self.batch, self.every, self.whole or 1))
            if len(told) > self.lag:
                change = balancer.observe_step(step - self.lag, told[step - self.lag], [0.0] * len(took), step + 1)
                if change is not None:
                    self.changes[step + 1], now = change, now.with_shares(change.shares, step + 1)
                    assert sum(now.at_step(step + 1).shares) == self.batch
        return self

    @property
    def lasting(self) -> dict[int, ShareChange]:
        """Without trials."""
        return {step: change for step, change in self.changes.items() if not change.is_trial}

    def efficiency(self, first: int) -> float:
        """Of the ideal throughput, from a step on."""
        first = -(-first // self.every)
        return math.fsum(self.ideal[first:]) / math.fsum(self.took[first:])


def cut(rank: int, at: int, factor: float, until: int = 1 << 31) -> Speed:
    return lambda one, step: factor if one == rank and at <= step < until else 1.0


# --- noise ------------------------------------------------------------------------------------------------------------


def independent(rng: random.Random, spread: float) -> Speed:
    return lambda rank, step: rng.lognormvariate(0, spread)


def spikes(rng: random.Random, part: float) -> Speed:
    """Now and then a step takes five times as long."""
    return lambda rank, step: rng.lognormvariate(0, 0.03) * (5 if rng.random() < part else 1)


def drifting(rng: random.Random, spread: float) -> Speed:
    """Slow steps come together: each deviation is nine tenths of the one before."""
    state: dict[int, float] = {}

    def noise(rank: int, step: int) -> float:
        state[rank] = 0.9 * state.get(rank, 0.0) + rng.gauss(0, spread * math.sqrt(1 - 0.9**2))
        return math.exp(state[rank])

    return noise


def bursts(rng: random.Random, factor: float) -> Speed:
    """Somebody uses the machine, up to twelve steps at a time."""
    until: dict[int, int] = {}

    def noise(rank: int, step: int) -> float:
        if until.get(rank, 0) < step and rng.random() < 0.02:
            until[rank] = step + rng.randint(1, 12)
        return rng.lognormvariate(0, 0.03) * (factor if until.get(rank, -1) >= step else 1)

    return noise


@pairwise(
    fleet=[("ab", 24), ("abcd", 64)],
    noise=[(independent, 0.02), (independent, 0.1), (independent, 0.3), (spikes, 0.03)],
    seed=range(num_examples(2, 4)),
)
def test_noise_does_not_change_shares(fleet, noise, seed):
    (hosts, batch), (kind, size) = fleet, noise
    run = Simulated(hosts, batch, noise=kind(random.Random(seed), size)).go(num_examples(800, 2000))
    assert len(run.changes) <= num_examples(1, 3)  # nearly always none
    if size <= 0.1 and kind is independent:
        assert not run.changes


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize(("kind", "size"), [(drifting, 0.05), (drifting, 0.2), (bursts, 1.7), (spikes, 0.15)])
def test_noisy_machine_rebalances_rarely(seed, kind, size):
    """What lasts for a while may be answered; never more often than RECENT allows: gains of 4 %, 4, 8, 16, 32, 64."""
    run = Simulated("ab", 24, noise=kind(random.Random(seed), size)).go(2000)
    steps = list(run.lasting)
    assert all(sum(first <= step < first + RECENT_STEPS for step in steps) <= 7 for first in steps)


# --- changes of speed -------------------------------------------------------------------------------------------------


@pairwise(
    fleet=[("ab", 24), ("abc", 48), ("abcdefgh", 64)],
    spread=[0.0, 0.02, 0.05],
    seed=range(num_examples(1, 3)),
    lag=[0, 1],
)
def test_host_cut_to_half_speed_is_rebalanced_within_ten_steps(fleet, spread, seed, lag):
    hosts, batch = fleet
    at, noise = 60, independent(random.Random(seed), spread)
    run = Simulated(hosts, batch, cut(1, at, 0.5), noise, lag=lag).go(200)
    assert at < min(run.lasting) <= at + 10
    answer = run.lasting[min(run.lasting)]
    assert answer.shares[1] < answer.shares[0]
    assert answer.reason.startswith("b takes 2.0 times as long as before: a step's slowest part takes ") or spread
    noiseless = Simulated(hosts, batch, cut(1, at, 0.5), lag=lag).go(200)
    assert noiseless.efficiency(at + 10) >= 0.97
    assert run.efficiency(at + 10) >= 0.9 * Simulated(hosts, batch, noise=noise).go(200).efficiency(at + 10)
    assert len(run.lasting) <= 3


def test_recovered_host_regains_its_share():
    run = Simulated("ab", 24, cut(1, 60, 0.5, until=120)).go(300)
    assert [change.shares for change in run.changes.values()] == [[16, 8], [12, 12]]
    assert [step - at for step, at in zip(run.changes, (60, 120), strict=True)] == [6, 6]
    assert run.changes[126].reason.startswith("b is 2.0 times as fast as before")


def test_unequal_hosts_converge_to_proportional_shares():
    run = Simulated("abc", 60, lambda rank, step: (3.0, 2.0, 1.0)[rank]).go(40)
    assert [change.shares for change in run.changes.values()] == [[30, 20, 10]]
    assert min(run.changes) <= 12
    assert run.changes[min(run.changes)].reason == (
        "c takes 3.0 times as long for a sequence as a: a step's slowest part takes 10.00 s instead of 20.00 s"
    )


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("spread", [0.0, 0.02])
@pytest.mark.parametrize("every", [1, 10])
def test_host_of_a_third_has_its_share_within_fifteen_steps(every, spread, seed):
    """Within 3 % of the best of all divisions, from equal shares; it computes as a third of a core does."""
    speeds, batch = (1.0, 1 / 3), 16
    run = Simulated("ab", batch, lambda rank, step: speeds[rank], independent(random.Random(seed), spread),
                    every=every).go(15)  # fmt: skip
    share = list(run.lasting.values())[-1].shares[1]
    num = every * batch
    times = [max((num - other) / speeds[0], other / speeds[1]) for other in range(num + 1)]
    assert times[share] <= 1.03 * min(times)


def test_equal_hosts_with_unequal_shares_are_said_to_be_equal():
    balancer = LoadBalancer(roster("ab", 24).replace_shares([16, 8]))
    changes = [balancer.observe_step(step, [16.0, 8.0], [0.0, 0.0], step + 1) for step in range(30)]
    change = next(filter(None, changes))
    assert change.shares == [12, 12]
    assert change.reason.startswith("b takes as long for a sequence as a: a step's slowest part takes 12.00 s instead")


def test_few_percent_imbalance_is_not_rebalanced():
    assert not Simulated("ab", 240, lambda rank, step: (1.0, 0.95)[rank]).go(300).changes


@pytest.mark.parametrize("pass_sequences", [5.0, *exhaustively(2.0, 12.0)])
def test_pass_cost_is_learned_and_shares_settle(pass_sequences):
    """Seen from 16 of 24, as if sequences cost alike, 17 would be better, and from 17 again 16."""
    for slow in (0.31, 0.4, 0.45, 0.6, 0.8):
        run = Simulated("ab", 24, lambda rank, step, slow=slow: (1.0, slow)[rank], micro_batch=16,
                        pass_sequences=pass_sequences).go(400)  # fmt: skip
        assert max(run.changes) < 100
        assert run.efficiency(100) > 0.9


def test_shares_move_in_whole_micro_batches():
    run = Simulated("ab", 64, cut(1, 60, 0.3), whole=8).go(150)
    assert [change.shares for change in run.changes.values()] == [[48, 16]]
    one_each = Simulated("ab", 16, cut(1, 60, 0.6), whole=8).go(150)
    assert not one_each.changes  # both on one rank would be slower


def test_stale_duplicate_and_unmeasured_steps_are_ignored():
    """As told twice, late, or not measured."""
    balancer = LoadBalancer(roster("ab", 24))
    for step in range(9):
        balancer.observe_step(step, [12.0, 24.0], [0.0, 0.0], step + 1)
    assert balancer.observe_step(9, [0.0, 24.0], [0.0, 0.0], 10) is None  # a clock too coarse
    change = next(
        filter(None, (balancer.observe_step(step, [12.0, 24.0], [0.0, 0.0], step + 1) for step in range(9, 30)))
    )
    assert change.shares == [16, 8]
    assert balancer.observe_step(3, [1.0, 100.0], [0.0, 0.0], 40) is None


MEASURED_MS = [  # of a sequence, by step, on hosts of 1, 1/2 and 1/4 core
    [int(word) for word in words.split()]
    for words in (
        """143 147 120 123 122 121 122 123 124 121 123 122 122 123 128 128 142 142 131 122 149 141 120 120 121
        121 124 121 122 120 120 121 121 125 126 125 125 126 123 121 123""",
        """268 375 255 262 250 250 255 254 254 253 250 252 254 249 260 264 307 369 275 272 333 276 258 254 254
        253 256 258 255 259 258 260 265 279 266 278 267 264 269 254 264""",
        """610 898 610 607 611 592 631 640 620 578 670 570 561 590 610 761 790 799 590 661 884 639 560 580 581
        580 580 622 579 571 642 600 582 601 641 602 609 610 668 580 591""",
    )
]


def test_short_disturbance_does_not_change_estimated_pass_cost():
    """Something took all longer from step 15 to 21, while the third came to have 1.8 sequences for 2: they took as
    long as 2 had. Were that what a pass costs, it would get 2.1 of them, and all would wait for it.
    """
    now, changes = roster("abc", 16, every=10).replace_shares([10, 4, 2]), []
    balancer = LoadBalancer(now)
    for step, sequences_ms in enumerate(zip(*MEASURED_MS, strict=True)):
        took_s = [share * ms / 1000 for share, ms in zip(now.at_step(step).shares, sequences_ms, strict=True)]
        change = balancer.observe_step(step, took_s, [0.014, 0.03, 0.075], step + 2)
        if change:
            now = now.with_shares(change.shares, step + 2)
            changes.append(now.mean_shares)
    assert changes == [[9.6, 4.6, 1.8]]


@pytest.mark.parametrize("told", [True, False])
def test_update_time_is_separated_from_sequence_time(told):
    """As measured on 1, 1/2 and 1/4 core. All are done at t where Σ (t - update) / sequence is the batch."""
    sequences_s, updates_s = (0.126, 0.273, 0.611), (0.016, 0.032, 0.075)
    now = roster("abc", 16, every=10)
    balancer, known = LoadBalancer(now), updates_s if told else (0.0, 0.0, 0.0)
    for step in range(60):
        took_s = [share * one for share, one in zip(now.at_step(step).shares, sequences_s, strict=True)]
        change = balancer.observe_step(step, took_s, known, step + 1)
        now = now.with_shares(change.shares, step + 1) if change else now
    done_s = (16 + sum(u / s for u, s in zip(known, sequences_s, strict=True))) / sum(1 / s for s in sequences_s)
    expected = [(done_s - update_s) / one for update_s, one in zip(known, sequences_s, strict=True)]
    assert now.mean_shares == pytest.approx(expected, abs=0.1)  # whole ones of a round
    step_s = max(update_s + share * one
                 for update_s, share, one in zip(updates_s, now.mean_shares, sequences_s, strict=True))  # fmt: skip
    assert (step_s < 1.25) == told  # 1.239 is the least


# --- ranks without a share --------------------------------------------------------------------------------------------


def test_very_slow_host_gets_no_share_and_is_retried_until_fast():
    """b takes as long for one sequence as a for forty."""
    run = Simulated("ab", 24, cut(1, 60, 1 / 40, until=500)).go(800)
    steps = list(run.changes)
    assert run.changes[steps[0]].shares == [24, 0]
    trials = [step for step in steps if run.changes[step].shares == [23, 1] and run.changes[step].is_trial]
    assert trials[0] - steps[0] == TRIAL_INTERVAL_STEPS
    assert all(step + 1 in run.changes for step in trials)  # one step each
    assert [run.changes[step + 1].shares for step in trials if step < 499] == [[24, 0]] * (len(trials) - 1)
    assert 500 <= trials[-1] <= 500 + TRIAL_INTERVAL_STEPS
    assert run.changes[trials[-1] + 1].shares == [12, 12]
    assert run.changes[trials[-1] + 1].reason.startswith("b is fast enough again")
    assert run.efficiency(70) > 0.95


def test_expensive_retries_are_rare():
    """Of a host that takes 400 times as long: a trial costs 15 steps, and no more than one in fifty goes for it."""
    run = Simulated("ab", 24, cut(1, 60, 1 / 400)).go(3000)
    trials = [step for step, change in run.changes.items() if change.shares == [23, 1]]
    assert 2 <= len(trials) <= 4
    assert run.efficiency(70) > 0.95


def test_recovered_host_regains_share_with_delayed_reports():
    run = Simulated("abc", 24, cut(2, 60, 1 / 40, until=150), lag=1).go(300)
    assert run.changes[max(run.changes)].shares == [8, 8, 8]
    assert run.efficiency(250) == 1.0


def test_host_is_not_retried_when_no_share_can_be_given():
    run = Simulated("ab", 8, cut(1, 60, 1 / 40), whole=4).go(300)
    assert run.changes[min(run.changes)].shares == [8, 0]
    lone = Simulated("ab", 8, cut(1, 60, 1 / 40), whole=4)
    assert all(sum(change.shares) == 8 for change in lone.go(300).changes.values())


@pytest.mark.parametrize("every", [1, 10])
def test_idle_host_is_retried_after_a_change_of_strategy(every):
    """b takes as long for a sequence as a for forty, until the strategy changes."""
    now = roster("ab", 24)
    balancer = LoadBalancer(now)
    for step in range(20):
        took = [share * one for share, one in zip(now.shares, (1.0, 40.0), strict=True)]
        change = balancer.observe_step(step, took, [0.0, 0.0], step + 1)
        now = now.with_shares(change.shares, step + 1) if change else now
    assert now.shares == [24, 0]
    now = roster("ab", 24, every=every).replace_shares([24 * every, 0])
    balancer, changes = LoadBalancer(now, previous=balancer), []
    for step in range(20, 100):
        change = balancer.observe_step(step, list(now.at_step(step).shares), [0.0, 0.0], step + 1)
        now = now.with_shares(change.shares, step + 1) if change else now
        changes += [change.shares] if change else []
    assert changes == [[23 * every, every], [12 * every, 12 * every]]


# --- replicas that drift ----------------------------------------------------------------------------------------------


def test_local_update_shares_are_finer_than_one_sequence_per_step():
    """Of 16 sequences hosts of 1 : 1/2 : 1/4 have 9 1/7, 4 4/7 and 2 2/7 at best. In whole ones the best are 9 : 5 : 2,
    and the second takes 5 / (4 4/7) times as long: 0.914 of what they can.
    """
    speeds = (1.0, 0.5, 0.25)
    whole = Simulated("abc", 16, lambda rank, step: speeds[rank]).go(400)
    fine = Simulated("abc", 16, lambda rank, step: speeds[rank], every=10).go(400)
    ideal_s = 16 / sum(speeds)
    assert ideal_s / whole.took[-1] == pytest.approx(32 / 35)
    assert 10 * ideal_s / fine.took[-1] == pytest.approx(0.994, abs=0.002)  # 92 of 160 where 91.4 would be right
    assert [change.shares for change in fine.changes.values()] == [[92, 46, 22]]


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize(
    ("batch", "slow", "pass_sequences", "micro_batch"),
    [(8, 1 / 3, 1.0, 1000), (8, 1 / 3, 0.5, 1000), (16, 0.8, 2.0, 8), (16, 0.5, 2.0, 4), (16, 0.7, 4.0, 8)],
)
def test_local_update_shares_settle_although_step_sizes_differ(seed, batch, slow, pass_sequences, micro_batch):
    """A host with 1.5 sequences a step has one or two; were their times taken for in proportion, it would come and go.
    Just above a micro-batch some of a round's steps have one more pass, not all of them.
    """
    run = Simulated("ab", batch, lambda rank, step: (1.0, slow)[rank], independent(random.Random(seed), 0.02), every=10,
                    pass_sequences=pass_sequences, micro_batch=micro_batch).go(300)  # fmt: skip
    assert len(run.lasting) <= 3
    assert run.efficiency(50) > 0.95


@pairwise(
    fleet=[("ab", 24), ("abc", 18), ("abcdefgh", 64)],
    of_round=[(10, 0.0), (10, 0.02), (10, 0.05), (30, 0.02)],
    seed=range(num_examples(1, 3)),
)
def test_local_update_host_cut_to_half_is_rebalanced_within_ten_steps(fleet, of_round, seed):
    (hosts, batch), (every, spread) = fleet, of_round
    at, noise = 60, independent(random.Random(seed), spread)
    run = Simulated(hosts, batch, cut(1, at, 0.5), noise, every=every).go(300)
    assert at < min(run.lasting) <= at + 10
    noiseless = Simulated(hosts, batch, cut(1, at, 0.5), every=every).go(300)
    assert noiseless.efficiency(at + 10 + every) >= 0.97
    assert run.efficiency(at + 10 + every) >= 0.95
    assert len(run.lasting) <= 3


@pytest.mark.parametrize("spread", [0.02, 0.1])
@pytest.mark.parametrize("hosts", ["ab", *exhaustively("abcd")])
def test_noise_does_not_change_local_update_shares(hosts, spread):
    run = Simulated(hosts, 16, noise=independent(random.Random(1), spread), every=10).go(num_examples(800, 2000))
    assert not run.changes


@pytest.mark.parametrize("every", [2, 10, 100])
def test_slow_local_update_host_is_retried_with_one_sequence_per_step(every):
    run = Simulated("ab", 24, cut(1, 60, 1 / 40, until=500), every=every).go(800)
    assert [change.shares for change in run.lasting.values()] == [[24 * every, 0], [12 * every, 12 * every]]
    trial = (23 * every, every)
    assert {tuple(change.shares) for change in run.changes.values() if change.is_trial} == {trial, (24 * every, 0)}
    assert 500 <= max(run.lasting) <= 500 + TRIAL_INTERVAL_STEPS + 1


def test_two_very_slow_hosts_both_recover():
    """Both have none, and neither keeps the other's recovery from being heard."""
    speeds = cut(1, 0, 1 / 50, until=300), cut(2, 0, 1 / 80, until=300)
    run = Simulated("abc", 16, lambda rank, step: speeds[rank - 1](rank, step) if rank else 1.0, every=10).go(1500)
    first, last = run.lasting[min(run.lasting)], run.lasting[max(run.lasting)]
    assert first.shares == [160, 0, 0]
    assert last.shares in ([54, 53, 53], [53, 54, 53], [53, 53, 54])
    trials = [step for step, change in run.changes.items() if change.is_trial and change.shares[0] < 160]
    assert all(step + 1 in run.changes for step in trials)  # a step each
    assert run.efficiency(1000) > 0.97
