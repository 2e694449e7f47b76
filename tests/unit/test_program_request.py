"""A run of a user's program says how fast the program would be otherwise: with shares, a strategy, another link."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec
import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import Fleet, HostConfig, HostLink, ModelRate, Rates
from evener.core.cluster.host_info import HostInfo
from evener.core.model.flops import StepFlops
from evener.core.model.gradients import GradientTensor, OwnCollective, OwnCollectives, ProgramModel
from evener.core.run.roster import Member, RankSlot, Roster, parse_sync
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import Manifest, RankProcess, RunResult
from evener.core.run.step_cost import StepCost, StepRecord
from evener.plan.choice.plan_request import answer_request, calibrated_rates, change_request, request_from_run
from evener.plan.choice.program_request import advise_on_launch, move_program, with_links_probed_since
from evener.plan.choice.search import predict

SIZE = 4_000_000  # parameters, in two matrices
GRADIENTS = [
    GradientTensor(name=name, rows=1000, columns=2000, ready=ready) for name, ready in (("b", 0.5), ("a", 1.0))
]
SAMPLE_S = {"a": 0.02, "b": 0.04}
SENDING_S = 0.4  # of all gradients, over 40 MB/s
BACKWARD = 2 / 3


def manifest(samples: int = 16, unit: str = "samples", **more: object) -> Manifest:
    members = [Member(rank=rank, host=host, device="cpu", dtype="fp32", share=1, micro_batch=1)
               for rank, host in enumerate(SAMPLE_S)]  # fmt: skip
    hosts = [HostInfo(host=name, system="", cpu="", cores=1, memory_bytes=8 << 30, python="3.11") for name in SAMPLE_S]
    ranks = [RankProcess(rank=rank, host=host, device="cpu", threads=1, pid=0) for rank, host in enumerate(SAMPLE_S)]
    made = Manifest(
        verdict="finished", started=0.0, argv=["train.py"], program="train.py", unit=unit, versions={},
        spec=RunSpec(out="run"), shape=None, corpus=None, code_hash="", params_by_group={"all": SIZE}, num_params=SIZE,
        compiled=False, sampler="own", roster=Roster(members=members, sync=parse_sync("ddp"), backend="gloo"),
        hosts=hosts, ranks=ranks, gradients=GRADIENTS, can_divide=True,
        result=RunResult(steps=10, loss=1.0, val_loss=None, replicas_agree=True, peak_memory_bytes=[3 << 28, 1 << 30]),
    )  # fmt: skip
    return msgspec.structs.replace(made, **more)


def records(tokens: float = 16.0, samples: int = 16) -> list[list[StepRecord]]:
    """Of equal shares over 40 MB/s: the second half of the gradients is sent after the slower rank's backward."""
    compute_s = {host: samples * each_s for host, each_s in SAMPLE_S.items()}
    slowest_s = max(compute_s.values())
    first_sent_s = slowest_s * (1 - BACKWARD / 2) + SENDING_S / 2
    exposed_s = max(first_sent_s, slowest_s) + SENDING_S / 2 - slowest_s
    return [
        [
            StepRecord(
                step=step, epoch=0, tokens=tokens, loss=None, wall_s=slowest_s + exposed_s,
                cost=StepCost(data_s=0.0, compute_s=own_s, exposed_sync_s=exposed_s, wait_s=slowest_s - own_s,
                              optimizer_s=0.0),
                sync_s=SENDING_S + slowest_s - own_s, cpu_s=own_s, bytes=4 * SIZE, members=2, lr=0.1, grad_norm=None,
                ended=float(step),
            )
            for step in range(10)
        ]
        for own_s in compute_s.values()
    ]  # fmt: skip


def test_the_run_itself_is_predicted_as_it_was():
    asked = request_from_run("run", manifest(), records(), None)
    assert asked.job.unit == "samples"
    hosts = asked.cluster.hosts
    assert [hosts[name].tokens_per_s["fp32"] * SAMPLE_S[name] for name in SAMPLE_S] == [pytest.approx(1.0)] * 2
    assert asked.cluster.link_between("a", "b").bandwidth_Bps == pytest.approx(4e7)
    predicted = predict(asked.job, asked.cluster)
    assert predicted.option("ddp").step_s == pytest.approx(records()[0][0].wall_s, rel=0.01)
    assert answer_request(asked).option("ddp").step_s == pytest.approx(records()[0][0].wall_s)


def test_shares_by_speed_and_fewer_bytes_are_advised():
    """Of 32 samples a takes 22 and b 10: 0.44 s. A byte and a 128th for each parameter over 40 MB/s: 0.1 s."""
    asked = request_from_run("run", manifest(), records(), None)
    prediction = answer_request(asked)
    [advice] = advise_on_launch(prediction)
    assert "with --sync int8 --shares 22:10" in advice.text
    both = predict(change_request(asked, {"sync": "int8", "shares": "22:10"}, None).job, asked.cluster)
    step_s = both.option(both.chosen).step_s
    assert 0.44 < step_s < 0.44 + 0.1 + 0.05  # which copies, too
    [rate] = re.findall(r"it would train ([\d.]+) samples/s", advice.text)
    assert float(rate) == pytest.approx(32 / step_s, rel=0.01)


def test_a_host_that_does_not_help_is_left_out():
    """Over 1 Mbit the gradients of a step take far longer than all samples on a."""
    asked = change_request(request_from_run("run", manifest(), records(), None), {}, "1Mbit")
    [advice] = advise_on_launch(answer_request(asked))
    assert advice.text.startswith("Launched on a alone, it would train 50 samples/s")


def test_a_faster_link_hides_the_exchange():
    asked = change_request(request_from_run("run", manifest(), records(), None), {}, "10GbE")
    option = answer_request(asked).option("ddp")
    assert option.step_s == pytest.approx(16 * SAMPLE_S["b"], rel=0.03)
    assert {rank.memory_bytes for rank in option.ranks} == {1 << 30}  # as the largest rank was measured


FLEET = Fleet(
    hosts={name: HostConfig(address=name) for name in "abc"},
    links={"a": {"c": HostLink(goodput_Bps=8e7, rtt_s=0.0)}},
    rates={name: {"cpu": Rates(models={"char": ModelRate(tokens_per_s=rate)})} for name, rate in
           (("a", 3000.0), ("b", 1500.0), ("c", 2400.0))},
)  # fmt: skip


def test_a_host_that_never_ran_the_program_is_as_fast_as_probing_found_it():
    """c has 0.8 of a's speed: 16 samples in 0.4 s. Over 80 MB/s half of the gradients follow in 0.1 s."""
    asked = request_from_run("run", manifest(), records(), None)
    job, cluster = move_program(asked.job, asked.cluster, FLEET, [("a", 1), ("c", 1)])
    option = predict(job, msgspec.structs.replace(cluster, jitter=0.0)).option("ddp")
    assert option.step_s == pytest.approx(16 * SAMPLE_S["a"] / 0.8 + 0.1, rel=0.01)
    assert job.spec.train.batch == 32
    assert any("0.80 times as fast as a" in text for text in cluster.assumed)


def test_a_host_s_speed_is_that_in_the_dtypes_of_the_program():
    """Probed in bf16, c has 0.8 of a's speed. In fp32 its products are 0.75 of that, and a's are a half: 1.2."""
    rates = {
        name: {"cpu": Rates(models={"char": ModelRate(tokens_per_s=rate, dtype="bf16")},
                            matmul_flops={"fp32": fp32, "bf16": 1e12})}
        for name, rate, fp32 in (("a", 3000.0, 0.5e12), ("c", 2400.0, 0.75e12))
    }  # fmt: skip
    fleet = msgspec.structs.replace(FLEET, rates=FLEET.rates | rates)
    speeds = []
    for by_dtype in ({"fp32": 8}, {"bf16": 8}, {"fp32": 4, "bf16": 4}, {}):
        counted = [StepFlops(by_dtype=by_dtype)] * 2 if by_dtype else []
        asked = request_from_run("run", manifest(flops=counted), records(), None)
        _, cluster = move_program(asked.job, asked.cluster, fleet, [("a", 1), ("c", 1)])
        speeds.append(cluster.hosts["c"].tokens_per_s["fp32"] / cluster.hosts["a"].tokens_per_s["fp32"])
    mixed = 0.8 * (1 + 1 / 0.5) / (1 + 1 / 0.75)
    assert speeds == [pytest.approx(1.2), pytest.approx(0.8), pytest.approx(mixed), pytest.approx(0.8)]


@pytest.mark.parametrize(
    ("measured", "is_newer"),
    [("2026-12-01T03:45:39+0000", True), ("2026-12-01T01:45:39+0000", False), ("", False), ("yesterday", False)],
)
def test_link_that_was_probed_since_the_run_counts(measured: str, is_newer: bool):
    """Over 80 instead of 40 MB/s. What the run showed of other links stays."""
    before = request_from_run("run", manifest(), records(), None).cluster
    slots = [*before.slots, RankSlot(host="c", device="cpu", has_bf16=False)]
    before = msgspec.structs.replace(before, hosts=before.hosts | {"c": before.hosts["a"]}, slots=slots)
    old = HostLink(goodput_Bps=1e9, rtt_s=0.0, measured="2026-11-01T00:00:00+0000")
    links = {"a": {"b": HostLink(goodput_Bps=8e7, rtt_s=0.0, measured=measured), "c": old}}
    ended = datetime(2026, 12, 1, 3, tzinfo=UTC).timestamp()
    cluster = with_links_probed_since(before, msgspec.structs.replace(FLEET, links=links), ended)
    assert cluster.link_between("b", "a").bandwidth_Bps == pytest.approx(8e7 if is_newer else 4e7)
    assert cluster.link_between("a", "c").bandwidth_Bps == pytest.approx(4e7)
    assert (cluster.hosts["a"].local != before.hosts["a"].local) == is_newer


def test_more_ranks_divide_a_host():
    asked = request_from_run("run", manifest(), records(), None)
    job, cluster = move_program(asked.job, asked.cluster, FLEET, [("a", 2)])
    assert job.spec.train.batch == 32
    assert cluster.hosts["a"].tokens_per_s["fp32"] == pytest.approx(asked.cluster.hosts["a"].tokens_per_s["fp32"] / 2)


@pytest.mark.parametrize(
    ("hosts", "why"),
    [([("a", 1), ("d", 1)], "nobody has compared d with a"), ([("b", 1), ("c", 1)], "nobody measured this link")],
)
def test_what_nobody_measured_is_named(hosts: list[tuple[str, int]], why: str):
    asked = request_from_run("run", manifest(), records(), None)
    with pytest.raises(UsageError, match=why):
        move_program(asked.job, asked.cluster, FLEET, hosts)


def test_where_samples_are_not_known_a_rank_s_part_of_a_step_counts():
    asked = request_from_run("run", manifest(unit="batches"), records(tokens=1.0), None)
    assert (asked.job.unit, asked.job.spec.train.batch) == ("batches", 2)
    assert answer_request(asked).option("ddp").step_s == pytest.approx(records()[0][0].wall_s)


def test_only_what_a_program_can_be_launched_with_is_predicted():
    options = answer_request(request_from_run("run", manifest(), records(), None)).options
    kinds = {option.roster.sync.kind for option in options}
    assert kinds == {"ddp", "packed", "bf16", "int8", "int4", "powersgd", "none"}  # none: a host alone


@pytest.mark.parametrize(
    ("flags", "why"),
    [({"model": "char"}, "--model: train.py decides that itself"), ({"sync": "fsdp"}, "not for a program")],
)
def test_what_the_program_decides_is_refused(flags, why):
    asked = request_from_run("run", manifest(), records(), None)
    with pytest.raises(UsageError, match=why):
        change_request(asked, flags, None)


OWN = OwnCollectives(calls=tuple(OwnCollective(collective="all_reduce", size_bytes=2.0 * SIZE) for _ in range(2)))
OWN_RECORDS = [
    [
        msgspec.structs.replace(
            record,
            wall_s=16 * SAMPLE_S["b"] + SENDING_S,
            cost=msgspec.structs.replace(record.cost, exposed_sync_s=SENDING_S),
            sync_s=SENDING_S + (record.cost.wait_s or 0.0),
        )
        for record in of_rank
    ]
    for of_rank in records()
]


def test_program_without_ddp_takes_its_collectives_longer_than_backward():
    """Two all-reduces of 8 MB after backward take 0.4 s over 40 MB/s, and longer over the 17 MB/s of 160 Mbit."""
    asked = request_from_run("run", manifest(gradients=[], collectives=OWN), OWN_RECORDS, None)
    compute_s = 16 * SAMPLE_S["b"]
    options = predict(asked.job, asked.cluster)
    own = options.option("its own collectives")
    assert asked.job.shape.num_params() == SIZE
    assert {one.name for one in options.options} == {own.name, "a alone"}
    assert own.step_s == pytest.approx(compute_s + SENDING_S, rel=0.01)
    slower = change_request(asked, {}, "160Mbit")
    assert answer_request(slower).option(own.name).step_s == pytest.approx(compute_s + 4 * SIZE / 17e6, rel=0.001)
    with pytest.raises(UsageError, match=r"--sync int8: train\.py sums gradients itself"):
        change_request(asked, {"sync": "int8"}, None)
    roster = msgspec.structs.replace(manifest().roster, sync=parse_sync("int8"))
    with pytest.raises(UsageError, match=r"--sync int8: train\.py sums gradients itself"):
        request_from_run("run", manifest(gradients=[], collectives=OWN, roster=roster), OWN_RECORDS, None)


def test_runs_that_show_too_little_are_refused():
    with pytest.raises(UsageError, match="it shows no exchange of gradients"):
        request_from_run("run", manifest(gradients=[]), records(), None)
    own = OwnCollectives(obstacle="it calls all_reduce with async_op=True")
    with pytest.raises(UsageError, match=r"train\.py cannot be predicted otherwise: it calls all_reduce with async_op"):
        request_from_run("run", manifest(gradients=[], collectives=own), records(), None)
    with pytest.raises(UsageError, match="not every rank has trained on samples"):
        request_from_run("run", manifest(), records(tokens=0.0), None)


def test_runs_that_exchange_more_or_compute_elsewhere_are_refused():
    """Gradients accumulated without no_sync go out several times a step; a GPU's waiting is not seen."""
    twice = [[msgspec.structs.replace(record, bytes=8 * SIZE) for record in of_rank] for of_rank in records()]
    with pytest.raises(UsageError, match=r"a rank sends 32\.0 MB a step, and its gradients once are 16\.0 MB"):
        request_from_run("run", manifest(), twice, None)
    run = manifest()
    members = [msgspec.structs.replace(member, device="cuda:0") for member in run.roster.members]
    on_gpus = msgspec.structs.replace(run, roster=msgspec.structs.replace(run.roster, members=members))
    with pytest.raises(UsageError, match="on a GPU is not measured"):
        request_from_run("run", on_gpus, records(), None)


def test_links_that_nobody_measured_are_not_taken_for_fast_ones():
    """Nothing of DDP's exchange was seen, as with a hook of the program's own."""
    unseen = [[msgspec.structs.replace(record, sync_s=None) for record in of_rank] for of_rank in records()]
    with pytest.raises(UsageError, match="does not show how fast the links are"):
        request_from_run("run", manifest(), unseen, None)


def test_shares_are_advised_only_where_batches_can_be_divided():
    [advice] = advise_on_launch(answer_request(request_from_run("run", manifest(can_divide=False), records(), None)))
    assert "--shares" not in advice.text


def test_fleet_file_has_no_place_for_a_program(tmp_path):
    from evener.core.cluster.fleet_file import Fleet

    with pytest.raises(UsageError, match="its runs keep that"):
        calibrated_rates(request_from_run("run", manifest(), records(), None), Fleet(hosts={}), "f.toml", "")


def test_model_of_a_program_is_stored_beside_that_of_a_gpt():
    asked = request_from_run("run", manifest(), records(), None)
    stored = msgspec.json.decode(msgspec.json.encode(asked.job), type=type(asked.job))
    assert isinstance(stored.shape, ProgramModel)
    assert stored == asked.job
