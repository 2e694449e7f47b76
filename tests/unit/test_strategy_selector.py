"""--sync auto measures strategies at the start, and again when links or hosts have changed; never because of noise."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec
import pytest

from evener.core.cluster.link import LinkModel
from evener.core.model.shape import preset_shape
from evener.core.run.prediction import Cluster, Job
from evener.core.run.roster import Roster, parse_sync
from evener.plan.choice.cluster import with_added_hosts, with_scaled_links
from evener.plan.choice.options import predict_training
from evener.plan.choice.strategy_selector import WINDOW, StepTimes, StrategySelector
from evener.plan.cost import cost_model
from evener.plan.cost.cost_model import predict_step
from tests.unit.planner import changed, cluster_of, costing, job_of

JOB = job_of(preset_shape("char", 65), batch=16, sync="ddp", dtype="bf16", loss_budget=0.0, steps=4000)
LINK = LinkModel(latency_s=1e-4, bandwidth_Bps=1e9)
FAST = cluster_of(3400.0, 3400.0, wire=LINK, coding_Bps={"packed": 1e10})
SLOW_CODING = cluster_of(3400.0, 3400.0, wire=LINK, coding_Bps={"packed": 3e8})  # over this link ddp is faster
DILOCO = "diloco:10:int8:streamed"


class Simulation:
    """A run: steps take what is predicted over a link that is `factors[step]` times as fast as the plan's."""

    def __init__(self, job: Job = JOB, cluster: Cluster = FAST, sync: str | None = None) -> None:
        """`sync`: it is resumed with this strategy; None: it is new."""
        self.job, self.cluster = job, cluster
        self.roster = predict_training(job, cluster).roster
        if sync is not None:
            self.roster = self.roster.replace_sync(parse_sync(sync))
        self.selector = StrategySelector(job, cluster)
        if sync is None:
            self.roster = self.selector.begin(self.roster)
        self.step, self.used = 0, [str(self.roster.sync)]
        self.num_trial_steps = 0
        self.switches: list[tuple[int, str]] = []  # (first step, strategy), without those on trial
        self.comparisons: list[str] = []  # what each chose
        self._known: dict[object, tuple[float, float, float]] = {}

    def go(self, factors: Sequence[float], noise: float = 0.0, off: float = 1.0, hosts: float = 1.0,
           favoured: str = "") -> Simulation:  # fmt: skip
        """Take steps. They take `off` times what is predicted, but for those of the favoured strategy."""
        draw = random.Random(self.step)
        for factor in factors:
            self.num_trial_steps += self.selector.is_trying
            wall_s, work_s, in_flight_s = self._times_s(factor, hosts)
            jitter = 1 + draw.gauss(0, noise)
            bias = 1.0 if str(self.roster.sync) == favoured else off
            times = StepTimes([bias * wall_s * jitter] * 2, [work_s * jitter] * 2,
                              [in_flight_s * jitter, 1.2 * in_flight_s * jitter])  # fmt: skip
            switch = self.selector.observe_step(self.step, times, self.roster, self.step + 1)
            self.step += 1
            if self.selector.comparison is not None:
                self.comparisons.append(self.selector.comparison.chosen)
                self.selector.comparison = None
            if switch is not None:
                self.roster = self.roster.with_sync(switch.sync, switch.bucket_bytes, self.step, why=switch.reason,
                                                    is_trial=switch.is_trial)  # fmt: skip
                if not switch.is_trial:
                    self.switches.append((self.step, str(switch.sync)))
            self.used.append(str(self.roster.sync))
        return self

    def _times_s(self, factor: float, hosts: float) -> tuple[float, float, float]:
        key = factor, hosts, self.roster.sync, self.roster.bucket_bytes
        if key not in self._known:
            coding_Bps = self.cluster.hosts[self.roster.hosts[0]].coding_Bps
            slower = cluster_of(3400.0 * hosts, 3400.0 * hosts, wire=self.cluster.wire, coding_Bps=coding_Bps)
            option = predict_step(self.job, with_scaled_links(slower, factor), self.roster)
            cost = option.ranks[0]
            self._known[key] = option.step_s, cost.cost.compute_s or 0.0, cost.sync_s
        return self._known[key]


def best(job: Job, cluster: Cluster, syncs: Sequence[str]) -> str:
    roster: Roster = predict_training(job, cluster).roster
    return min(syncs, key=lambda sync: predict_step(job, cluster, roster.replace_sync(parse_sync(sync))).step_s)


def test_new_run_tries_plausible_strategies_and_takes_the_fastest():
    """Whichever it is: here all but one are half as slow again as predicted."""
    slow = with_scaled_links(FAST, 0.12)
    for favoured in ("ddp", "packed"):
        run = Simulation(cluster=slow).go([1.0] * 100, noise=0.02, off=1.5, favoured=favoured)
        assert run.comparisons == [favoured]
        assert set(run.used) >= {"ddp", "packed"}
        assert run.used[-1] == favoured


def test_steps_before_a_change_of_shares_do_not_count_in_a_trial():
    """They took ten times as long, with shares that did not fit the machines."""
    slow = with_scaled_links(FAST, 0.12)
    run, comparisons = Simulation(cluster=slow), []
    undisturbed = Simulation(cluster=slow).go([1.0] * 60)
    run.go([1.0] * 14, off=10.0)
    run.selector.adopt_shares(run.step)
    while not comparisons:
        run.go([1.0])
        comparisons = run.comparisons
    assert comparisons == undisturbed.comparisons
    assert run.selector._expected_s == pytest.approx(undisturbed.selector._expected_s)
    assert run.num_trial_steps == undisturbed.num_trial_steps + 14


def test_run_with_one_plausible_strategy_tries_nothing():
    run = Simulation(cluster=with_scaled_links(FAST, 100.0), job=changed(JOB, steps=150)).go([1.0] * 150)
    assert (set(run.used), run.comparisons) == ({"ddp"}, [])


def test_strategy_changes_after_link_slows():
    """43 MB at 1 GB/s hide behind backward; at 50 MB/s they do not, and half of them is faster."""
    run = Simulation(sync="ddp").go([1.0] * 300)
    assert set(run.used) == {"ddp"}
    run.go([0.05] * 300)
    assert run.used[-1] == best(JOB, with_scaled_links(FAST, 0.05), ("ddp", "packed"))
    first_trial = next(i for i, used in enumerate(run.used) if used != "ddp")
    assert 300 + WINDOW // 2 <= first_trial <= 300 + 2 * WINDOW


def test_step_slower_than_predicted_in_a_trial_does_not_hide_a_slower_link():
    """All strategies were slow in the trial: those that are expected now are relative to the current one's."""
    run = Simulation(cluster=SLOW_CODING).go([1.0] * 100, off=2.4)
    assert (run.used[-1], run.comparisons) == ("ddp", ["ddp"])
    run.go([0.05] * 300)
    assert run.used[-1] == "packed"


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_noise_and_short_disturbance_do_not_change_strategy(noise):
    run = Simulation(sync="ddp").go([1.0] * 1000, noise=noise)
    run.go(([1.0] * 100 + [0.1] * 20) * 5, noise=noise)  # a backup, a download
    assert set(run.used) == {"ddp"}


def test_slower_hosts_alone_start_no_trial():
    """Computing takes longer, and hides more."""
    run = Simulation(sync="ddp").go([1.0] * 200).go([1.0] * 300, hosts=0.7)
    assert set(run.used) == {"ddp"}


def test_trials_take_a_small_part_of_the_steps():
    """A link that changes for good every hundred steps."""
    run = Simulation().go(([1.0] * 100 + [0.03] * 100) * 10, noise=0.02)
    assert run.comparisons
    assert 0 < run.num_trial_steps < 0.2 * len(run.used)


def test_lossy_strategy_is_left_for_drifting_replicas_by_way_of_exact_sums(monkeypatch):
    monkeypatch.setattr(cost_model, "loss_penalty", costing({"int8": 0.002, "diloco": 0.003, "bf16": 1.0, "int4": 1.0,
                                                             "powersgd": 1.0}))  # fmt: skip
    job = changed(JOB, loss_budget=1.0)
    run = Simulation(job=job, sync="int8").go([0.02] * 400)
    path = [run.used[0], *(now for before, now in itertools.pairwise(run.used) if now != before)]
    assert any(sync.startswith("diloco") for sync in path)
    for before, now in itertools.pairwise(path):
        assert not (before == "int8" and now.startswith("diloco"))


def test_strategy_beyond_loss_budget_is_not_tried(monkeypatch):
    monkeypatch.setattr(cost_model, "loss_penalty", costing({"int8": 0.02}))
    run = Simulation().go([1.0] * 100).go([0.01] * 300)
    assert "int8" not in run.used


def test_strategy_is_unchanged_without_measurements():
    roster = predict_training(JOB, FAST).roster
    selector = StrategySelector(JOB, FAST)
    nothing = StepTimes([1.0, 1.0], [0.0, 0.0], [float("nan"), float("nan")])
    assert all(selector.observe_step(step, nothing, roster, step + 1) is None for step in range(3 * WINDOW))


def test_link_slower_than_planned_from_the_start_is_no_bias_of_strategies():
    """The plan knew 62 MB/s, over which packed would be faster. The trial over 1 GB/s says nothing of a slow link."""
    planned = with_scaled_links(SLOW_CODING, 1 / 16)
    run = Simulation(cluster=planned).go([16.0] * 300)
    assert (run.used[-1], run.comparisons) == ("ddp", ["ddp"])
    run.go([1.0] * 300)
    assert run.used[-1] == best(JOB, planned, ("ddp", "packed"))


def test_interrupted_trial_is_repeated():
    """Hosts have come or gone meanwhile: the strategy that was being tried is no choice."""
    slow = with_scaled_links(FAST, 0.05)
    run = Simulation(cluster=slow, sync="ddp")
    run.selector = StrategySelector(JOB, slow, was_trying=True)
    run.go([1.0] * 200)
    assert (run.used[-1], run.comparisons) == ("packed", ["packed"])


def test_interrupted_trial_is_known_until_it_is_repeated():
    slow = with_scaled_links(FAST, 0.12)
    run = Simulation(cluster=slow)
    assert run.go([1.0] * 3).selector.is_undecided
    run.selector = StrategySelector(JOB, slow, was_trying=run.selector.is_undecided)
    assert run.go([1.0] * 3).selector.is_undecided
    assert not run.go([1.0] * 200).selector.is_undecided


def test_what_a_trial_measured_is_known_after_machines_have_changed():
    """packed is predicted to be a quarter faster, and was a half slower: that hosts compute for longer is no reason to
    try it again at once.
    """
    slow = with_scaled_links(FAST, 0.12)
    run = Simulation(cluster=slow).go([1.0] * 40, off=2.0, favoured="ddp")
    assert (run.used[-1], run.comparisons) == ("ddp", ["ddp"])
    run.go([1.0] * 300, off=2.0, favoured="ddp", hosts=0.8)
    assert run.comparisons == ["ddp"]


def test_speed_of_hosts_with_many_ranks_is_measured_once():
    """All four ranks of a host take 1.25 times what the plan knew: so does its rate, and not 1.25 to the fourth."""
    cluster = cluster_of(3400.0, 3400.0, wire=LINK, devices=("cpu",) * 4, local=LINK)
    roster = predict_training(JOB, cluster).roster
    took_s = [1.25 * rank.cost.compute_s for rank in predict_step(JOB, cluster, roster).ranks]
    measured = StrategySelector(JOB, cluster)._as_measured([StepTimes(took_s, took_s, [0.0] * 8)] * 9, roster)
    assert [host.tokens_per_s["bf16"] for host in measured.hosts.values()] == pytest.approx([3400.0 / 1.25] * 2)


def test_hosts_that_were_added_take_part_in_trials():
    """The plan does not know them; measured steps say how fast they are."""
    slow, three = with_scaled_links(FAST, 0.05), cluster_of(3400.0, 3400.0, 3400.0, wire=FAST.wire)
    roster = predict_training(JOB, three).roster
    known = with_added_hosts(slow, roster)
    assert known.hosts["c"].tokens_per_s == slow.hosts["a"].tokens_per_s
    assert known.hosts["c"].memory_bytes is None  # nobody knows it
    two = msgspec.structs.replace(roster, members=[*roster.members, msgspec.structs.replace(roster.members[2], rank=3)])
    assert predict_step(JOB, with_added_hosts(slow, two), two).step_s > 0
    assert known.link_between("a", "c") == known.link_between("c", "b") == slow.wire
    assert predict_step(JOB, known, roster).step_s > 0
    other = {name: msgspec.structs.replace(host, tokens_per_s={"fp16": 1.0}) for name, host in slow.hosts.items()}
    assert with_added_hosts(msgspec.structs.replace(slow, hosts=other), roster) is None


def test_drifting_replicas_are_merged_without_a_step_between():
    """What has not been sent yet is in the merge."""
    selector = StrategySelector(JOB, FAST)
    streamed = predict_step(JOB, FAST, predict_training(JOB, FAST).roster.replace_sync(parse_sync(DILOCO)))
    for now, awaits in (("diloco:30", False), ("int8", True), ("packed", False)):
        roster = streamed.roster.replace_sync(parse_sync(now))
        switch = selector._switch(streamed, roster, 7, "it was asked for")
        assert (str(switch.sync), selector.is_undecided) == (("ddp", True) if awaits else (DILOCO, False))
        if awaits:
            assert str(selector.observe_step(7, StepTimes([], [], []), roster, 8).sync) == DILOCO


def test_interrupted_trial_that_does_not_fit_any_more_ends_with_the_best_by_prediction():
    slow = with_scaled_links(FAST, 0.05)
    run = Simulation(job=changed(JOB, steps=150), cluster=slow, sync="ddp")
    run.selector = StrategySelector(run.job, slow, was_trying=True)
    run.go([1.0] * 100)
    assert (run.used[-1], run.comparisons, run.selector.is_undecided) == ("packed", [], False)


def test_trial_that_is_not_due_yet_is_made_later():
    """The last one ended at step 0, and a trial of two takes 20 steps: not before step 200."""
    slow = with_scaled_links(FAST, 0.2)
    run = Simulation(cluster=slow, sync="ddp").go([1.0] * 600)
    assert run.comparisons
    assert 200 <= run.used.index("packed") <= 200 + 2 * WINDOW


def test_strategy_that_more_replicas_forbid_is_left_without_a_trial(monkeypatch):
    monkeypatch.setattr(cost_model, "loss_penalty", costing({"diloco": 0.03, "int8": 1.0, "bf16": 1.0, "int4": 1.0,
                                                             "powersgd": 1.0}))  # fmt: skip
    run = Simulation(job=changed(JOB, loss_budget=1.0), sync=DILOCO).go([1.0] * 100)
    assert [sync for _, sync in run.switches] == ["packed"]
    assert (run.used.index("packed"), run.comparisons) == (60, [])  # six rounds, as many as a window needs
