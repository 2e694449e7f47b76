"""Fit compute and link rates to a finished run's records: known rates are recovered."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.host_info import HostInfo
from evener.core.cluster.link import LinkModel
from evener.core.model.shape import preset_shape
from evener.core.run.prediction import Cluster, Job, PlanOption
from evener.core.run.run_plan import Plan, read_plan, read_prediction, write_plan
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import Manifest, RankProcess, RunDir
from evener.core.run.step_cost import StepRecord
from evener.plan.choice.calibration import calibrate_cluster, measured_option
from evener.plan.choice.search import predict
from tests.unit.planner import changed, cluster_of, job_of, priced

SHAPE = preset_shape("char", 512)
JOB = job_of(SHAPE, batch=24, micro_batch=4)


def cluster(*rates: float, bandwidth_Bps: float = 4e7, **more: object) -> Cluster:
    wire = LinkModel(latency_s=1e-4, bandwidth_Bps=bandwidth_Bps)
    return cluster_of(*rates, wire=wire, **({"pass_s": 0.02, "update_s": 0.05, "data_s": 0.001, "cpus": 2.0} | more))


def records(option: PlanOption) -> list[list[StepRecord]]:
    """What the ranks would write if all went as predicted; the first steps are slow."""
    return [
        [
            StepRecord(
                step=step, tokens=member.share * SHAPE.block_size, loss=1.0, wall_s=option.step_s,
                cost=rank.cost if step > 2 else msgspec.structs.replace(rank.cost, compute_s=99.0),
                sync_s=rank.sync_s + (rank.cost.wait_s or 0.0), cpu_s=option.step_s, bytes=rank.bytes, epoch=0,
                members=len(option.ranks), lr=1e-3, grad_norm=1.0, ended=0.0,
            )
            for step in range(10)
        ]
        for member, rank in zip(option.roster.members, option.ranks, strict=True)
    ]  # fmt: skip


def manifest(job: Job, option: PlanOption) -> Manifest:
    """Of a run that was the option."""
    hosts = [HostInfo(host=name, system="", cpu="", cores=2, memory_bytes=8 << 30, python="3.11")
             for name in option.roster.hosts]  # fmt: skip
    ranks = [RankProcess(rank=member.rank, host=member.host, device="cpu", threads=2, pid=0)
             for member in option.roster.members]  # fmt: skip
    return Manifest(
        verdict="finished", started=0.0, argv=[], versions={}, spec=job.spec, shape=SHAPE, corpus=None, code_hash="",
        params_by_group={}, num_params=SHAPE.num_params(), compiled=False, sampler="epochs-1",
        roster=option.roster, hosts=hosts,
        ranks=ranks,
    )  # fmt: skip


def test_refitted_rates_predict_the_run_they_were_fitted_to():
    """Probed twice too fast, over a link that is half as fast as measured: the refitted cluster predicts the run."""
    truth = priced(JOB, cluster(500.0, 250.0))
    wrong = cluster(1000.0, 500.0, bandwidth_Bps=8e7)
    found = calibrate_cluster(JOB, manifest(JOB, truth), records(truth), wrong)
    again = priced(JOB, found)
    assert again.step_s == pytest.approx(truth.step_s, rel=0.02)
    for one, other in zip(again.ranks, truth.ranks, strict=True):
        assert one.cost.compute_s == pytest.approx(other.cost.compute_s, rel=1e-6)
        assert one.cost.optimizer_s == pytest.approx(other.cost.optimizer_s)
    assert found.link_between("a", "b").bandwidth_Bps == pytest.approx(4e7, rel=0.02)


def test_ranks_with_unequal_shares_of_one_host_have_one_rate():
    """The rank with three times the sequences takes three times as long, and is no slower for it."""
    job = changed(JOB, shares="3:1")
    wire = LinkModel(latency_s=1e-4, bandwidth_Bps=1e9)
    truth = cluster_of(500.0, wire=wire, devices=("cpu", "cpu"), local=wire)
    option = priced(job, truth)
    found = calibrate_cluster(job, manifest(job, option), records(option), None)
    assert found.hosts["a"].tokens_per_s["fp32"] == pytest.approx(500.0)


def test_refit_keeps_rates_that_predicted_the_run_correctly():
    truth = cluster(500.0, 250.0)
    option = priced(JOB, truth)
    found = calibrate_cluster(JOB, manifest(JOB, option), records(option), truth)
    for one, other in zip(found.hosts.values(), truth.hosts.values(), strict=True):
        assert one.tokens_per_s == pytest.approx(other.tokens_per_s)
        assert one.pass_s == pytest.approx(other.pass_s)
    assert found.link_between("a", "b").bandwidth_Bps == pytest.approx(4e7, rel=0.01)


def test_rates_are_fitted_without_a_prediction():
    truth = priced(JOB, cluster(500.0, 250.0))
    found = calibrate_cluster(JOB, manifest(JOB, truth), records(truth), None)
    assert priced(JOB, found).step_s == pytest.approx(truth.step_s, rel=0.02)
    assert found.hosts["a"].memory_bytes == 8 << 30


def test_host_without_share_and_without_rate_is_refused():
    job = changed(JOB, shares="1:0")
    option = priced(job, cluster(500.0, 250.0))
    with pytest.raises(UsageError, match="b had no share in this run, and nothing else is known of its speed"):
        calibrate_cluster(job, manifest(job, option), records(option), None)
    known = calibrate_cluster(job, manifest(job, option), records(option), cluster(400.0, 250.0))
    assert known.hosts["b"].tokens_per_s["fp32"] == 250.0


def test_single_rank_fit_has_no_links():
    one = priced(JOB, cluster(500.0))
    found = calibrate_cluster(JOB, manifest(JOB, one), records(one), None)
    assert priced(JOB, found).step_s == pytest.approx(one.step_s, rel=1e-6)


def test_prediction_is_read_back_from_plan(tmp_path):
    prediction = predict(JOB, cluster(500.0, 250.0))
    write_plan(RunDir(tmp_path), Plan(kind="train", spec=RunSpec(), prediction=prediction))
    assert read_prediction(RunDir(tmp_path)) == prediction
    with pytest.raises(UsageError, match="no such run"):
        read_plan(RunDir(tmp_path / "none"))
    assert read_prediction(RunDir(tmp_path / "none")) is None


def test_rebalanced_run_is_fitted_with_its_actual_shares():
    """It began with equal shares; all steps that count had 3:1."""
    took = priced(changed(JOB, shares="3:1"), cluster(500.0, 250.0))
    began = manifest(JOB, priced(JOB, cluster(500.0, 250.0)))
    own = measured_option(JOB, began, records(took), cluster(500.0, 250.0))
    assert own is not None
    assert own.name == "ddp, shares 18 : 6"
    assert own.step_s == pytest.approx(took.step_s)
    assert own.tokens_per_s == pytest.approx(took.tokens_per_s)
