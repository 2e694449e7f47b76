"""The report says first whether the run was faster than its fastest host alone."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.base.file_io import write_atomic
from evener.core.base.units import format_count
from evener.core.cluster.fleet_file import HostConfig
from evener.core.cluster.link import LinkModel
from evener.core.model.shape import preset_shape
from evener.core.run.run_plan import HostPlan, Plan, write_plan
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.report.explain.speedup_verdict import speedup_verdict
from evener.report.explain.what_if import predict_alternatives
from evener.report.pages.html_report import run_page
from evener.report.read.run_summary import summarize_run
from tests.unit.planner import changed, cluster_of, job_of, priced
from tests.unit.test_calibration import manifest, records
from tests.unit.test_help import check

SHAPE = preset_shape("char", 512)
JOB = job_of(SHAPE, batch=24, micro_batch=4)
TOKENS = 24 * SHAPE.block_size


@pytest.fixture
def told(tmp_path):
    """What is said of a run on hosts with these tokens/s, that took just as long as the planner prices it."""

    def make(*rates, bandwidth_Bps=1e9, job=JOB, **other):
        wire = LinkModel(latency_s=0.0, bandwidth_Bps=bandwidth_Bps)
        option = priced(job, cluster_of(*rates, wire=wire, update_s=0.05, **other))
        run = RunWriter(tmp_path / "run")
        run.write_manifest(manifest(job, option))
        for rank, of_rank in enumerate(records(option)):
            write_atomic(run.steps_path(rank), b"".join(msgspec.json.encode(record) + b"\n" for record in of_rank))
        summary = summarize_run(run)
        assert summary.step_p50_s == pytest.approx(option.step_s)
        return speedup_verdict(summary, predict_alternatives(summary)), run

    return make


def alone(rate):
    """Tokens/s of a host by itself: all of the batch at its rate, and the update."""
    return format_count(TOKENS / (TOKENS / rate + 0.05))


def test_two_equal_hosts_on_fast_link_are_worth_it(told):
    found, run = told(500.0, 500.0)
    assert found.message.startswith("It was worth it: a and b trained ")
    assert f"; a alone would have trained {alone(500.0)} tokens/s: together they are " in found.message
    assert 1.8 < float(found.message.split("together they are ")[1].split(" times")[0]) <= 2.0
    text = run_page(run, now=0.0)
    assert text.index("It was worth it") < text.index("tokens/s</dt>")


def test_too_slow_link_is_not_worth_it(told):
    found, _ = told(500.0, 500.0, bandwidth_Bps=1e6)
    assert found.message.startswith("It was not worth it: ")
    assert " over 8 Mbit/s; a alone would have trained " in found.message
    assert found.message.endswith("times as fast.")
    assert found.command.startswith("evener train --resume ")
    assert "--steps 20 " in found.command


def test_slow_host_with_equal_share_is_not_worth_it(told):
    """Half of the batch each: all wait for the host of a tenth of the speed."""
    found, _ = told(1000.0, 100.0, job=changed(JOB, shares="equal"))
    assert f"; a alone would have trained {alone(1000.0)} tokens/s: a alone is " in found.message
    times = float(found.message.split("a alone is ")[1].split(" times")[0])
    assert times == pytest.approx(5.0, rel=0.1)  # the whole batch in the time of a tenth, beside a half of it


def test_equal_throughput_is_reported_as_no_difference(told):
    found, _ = told(1000.0, 1000.0, bandwidth_Bps=3.75 * SHAPE.num_params() / (TOKENS / 2000.0))
    assert found.message.startswith("It made no difference: a and b trained ")


def test_processes_of_one_host_get_measurement_hint(told):
    wire = LinkModel(latency_s=0.0, bandwidth_Bps=1e9)
    found, _ = told(500.0, devices=("cpu", "cpu"), local=wire)
    assert found.message.startswith("2 processes on a trained ")
    assert "Whether one process is as fast was not measured" in found.message
    assert found.command.endswith("--model char --batch 24 --ranks 1 --ranks 2")


@pytest.mark.parametrize(
    ("changes", "command"),
    [
        ({}, "evener bench --data {data} --model char --batch 24 --fleet {file} --hosts a"),
        (
            {"shape": None, "program": "x.py", "argv": ["x.py"]},
            "evener launch --fleet {file} --ranks 1 --out {run}-1-rank -- x.py",
        ),
    ],
)
def test_processes_of_a_remote_host_are_measured_there(told, changes, command):
    _, run = told(500.0, devices=("cpu", "cpu"), local=LinkModel(latency_s=0.0, bandwidth_Bps=1e9))
    run.write_manifest(msgspec.structs.replace(run.manifest(), **changes))
    file = run.path.parent / "lab.toml"
    host = HostPlan(name="a", host=HostConfig(address="10.0.0.2"), node_rank=0, first_rank=0, num_ranks=2, run="/r",
                    address="10.0.0.2", interface="eth0", code="/c", cwd="/c", argv=["python"], env={})  # fmt: skip
    roster, spec = run.manifest().roster, run.manifest().spec
    write_plan(RunDir(run.path), Plan(kind="train", spec=spec, roster=roster, hosts=[host], fleet_file=str(file)))
    found = speedup_verdict(summarize_run(run), None)
    assert (found.hint, found.command) == (
        "To measure it", command.format(data=spec.data.data, file=file, run=run.path)
    )  # fmt: skip
    check(found.command, "")


def test_single_process_names_no_other_host(told):
    found, _ = told(500.0)
    assert found.text == f"a alone trained {alone(500.0)} tokens/s; no other machine took part."


def test_custom_model_is_judged_by_its_own_work(told):
    """Of two hosts that compute alike for all but 1 % of a step, each alone would have trained half."""
    _, run = told(500.0, 500.0)
    run.write_manifest(msgspec.structs.replace(run.manifest(), shape=None))
    summary = summarize_run(run)
    found = speedup_verdict(summary, predict_alternatives(summary))
    assert found.text == (
        "It was worth it: a and b trained 990 samples/s; a alone, without exchanging and waiting, would have trained "
        "496 samples/s: together they are 2.00 times as fast."
    )


def of_program(run, **changes):
    """The verdict on the same records, as those of a program of one's own."""
    own = {"shape": None, "program": "x.py", "argv": ["x.py", "--lr", "1"], "unit": "samples"}
    run.write_manifest(msgspec.structs.replace(run.manifest(), **(own | changes)))
    summary = summarize_run(run)
    return speedup_verdict(summary, predict_alternatives(summary))


def test_program_on_unequal_hosts_is_told_shares(told):
    _, run = told(1000.0, 250.0, job=changed(JOB, shares="equal"))
    found = of_program(run)
    assert found.hint.startswith("It may be faster with batches divided by speed, for a DistributedSampler")
    assert found.command == "evener launch --shares 4:1 -- x.py --lr 1"


def test_program_that_mostly_exchanges_is_told_a_strategy(told):
    _, run = told(500.0, 500.0, bandwidth_Bps=1e6)
    found = of_program(run)
    assert (found.hint, found.command) == (
        "It may be faster with a quarter of the bytes, for DistributedDataParallel and in reduce-scatters",
        "evener launch --sync int8 -- x.py --lr 1",
    )  # fmt: skip


def test_program_that_mostly_computes_is_told_nothing(told):
    _, run = told(500.0, 500.0)
    assert of_program(run).command == ""
