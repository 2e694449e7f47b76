"""A finished run's records give back the rates that made them."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.machine import Machine
from evener.core.plan import Plan, is_on_fleet, read_plan, read_prediction, write_plan
from evener.core.prediction import Cluster, HostRates, Job, Option, Wire
from evener.core.roster import Seat, first_roster
from evener.core.rundir import Manifest, Rank, RunDir
from evener.core.shape import preset_shape
from evener.core.spec import RunSpec
from evener.core.step import StepRecord
from evener.plan.cost import price
from evener.plan.fit import fit
from evener.plan.search import predict

SHAPE = preset_shape("char", 512)
JOB = Job(model="char", shape=SHAPE, batch=24, micro_batch=4, dtype="fp32")


def cluster(a: float, b: float, bandwidth_Bps: float, **more: object) -> Cluster:
    wire = Wire(latency_s=1e-4, bandwidth_Bps=bandwidth_Bps)
    fixed = {"pass_s": 0.02, "update_s": 0.05, "data_s": 0.001, "cpus": 2.0} | more
    hosts = [HostRates(name=name, device="cpu", tokens_per_s=rate, **fixed) for name, rate in (("a", a), ("b", b))]
    return Cluster(hosts=hosts, wires={"a": {"b": wire}, "b": {"a": wire}}, backend="gloo")


def records(option: Option) -> list[list[StepRecord]]:
    """What the ranks would write if all went as predicted; the first steps are slow."""
    return [
        [
            StepRecord(
                step=step, tokens=rank.share * SHAPE.block_size, loss=1.0, wall_s=option.step_s,
                cost=rank.cost if step > 2 else msgspec.structs.replace(rank.cost, compute_s=99.0),
                sync_s=rank.sync_s + (rank.cost.wait_s or 0.0), cpu_s=option.step_s, bytes=rank.bytes,
                epoch=0, members=2, lr=1e-3, grad_norm=1.0, ended=0.0,
            )
            for step in range(10)
        ]
        for rank in option.ranks
    ]  # fmt: skip


def manifest(names: list[str]) -> Manifest:
    hosts = [Machine(host=name, system="", cpu="", cores=2, memory_bytes=8 << 30, python="3.11") for name in names]
    return Manifest(
        verdict="finished", started=0.0, argv=[], versions={}, spec=RunSpec(), shape=SHAPE, corpus=None, code_hash="",
        params_by_group={}, num_params=SHAPE.num_params(), compiled=False,
        roster=first_roster(RunSpec(), [Seat(host=name, device="cpu") for name in names], SHAPE.block_size),
        hosts=hosts, ranks=[Rank(rank=i, host=name, device="cpu", threads=2, pid=i) for i, name in enumerate(names)],
    )  # fmt: skip


def test_a_wrong_prediction_is_put_right():
    """Probed twice too fast, over a link that is half as fast as measured: the refitted cluster predicts the run."""
    truth = price(JOB, cluster(500.0, 250.0, 4e7), "ddp")
    wrong = cluster(1000.0, 500.0, 8e7)
    found = fit(JOB, manifest(["a", "b"]), records(truth), wrong)
    again = price(JOB, found, "ddp")
    assert again.step_s == pytest.approx(truth.step_s, rel=0.02)
    for one, other in zip(again.ranks, truth.ranks, strict=True):
        assert one.cost.compute_s == pytest.approx(other.cost.compute_s, rel=1e-6)
        assert one.cost.optimizer_s == pytest.approx(other.cost.optimizer_s)
    assert found.wires["a"]["b"].bandwidth_Bps == pytest.approx(4e7, rel=0.02)


def test_a_right_prediction_stays_as_it_is():
    truth = cluster(500.0, 250.0, 4e7)
    found = fit(JOB, manifest(["a", "b"]), records(price(JOB, truth, "ddp")), truth)
    for one, other in zip(found.hosts, truth.hosts, strict=True):
        assert (one.tokens_per_s, one.pass_s) == pytest.approx((other.tokens_per_s, other.pass_s))
    assert found.wires["a"]["b"].bandwidth_Bps == pytest.approx(4e7, rel=0.01)


def test_without_a_prediction_the_records_alone_are_enough():
    truth = price(JOB, cluster(500.0, 250.0, 4e7), "ddp")
    found = fit(JOB, manifest(["a", "b"]), records(truth), None)
    assert price(JOB, found, "ddp").step_s == pytest.approx(truth.step_s, rel=0.02)
    assert found.hosts[0].memory_bytes == 8 << 30


def test_a_run_on_one_rank_has_no_wires():
    alone = msgspec.structs.replace(cluster(500.0, 1.0, 1e7), hosts=cluster(500.0, 1.0, 1e7).hosts[:1], wires={"a": {}})
    one = price(JOB, alone, "none")
    single = manifest(["a"])
    found = fit(JOB, single, records(one), None)
    assert price(JOB, found, "none").step_s == pytest.approx(one.step_s, rel=1e-6)


def test_a_plan_brings_its_prediction_home(tmp_path):
    prediction = predict(JOB, cluster(500.0, 250.0, 4e7))
    write_plan(RunDir(tmp_path), Plan(kind="train", spec=RunSpec(), prediction=prediction))
    assert read_prediction(RunDir(tmp_path)) == prediction
    assert not is_on_fleet(RunDir(tmp_path))
    with pytest.raises(Exception, match="not a run on a fleet"):
        read_plan(RunDir(tmp_path))
    assert read_prediction(RunDir(tmp_path / "none")) is None
