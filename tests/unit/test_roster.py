"""Divide a batch into shares, and choose devices, dtypes and backend of all ranks."""

from __future__ import annotations

import itertools
import math
import random
import re
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.roster import (
    DDP,
    SYNC_EXAMPLES,
    Member,
    RankSlot,
    Roster,
    choose_backend,
    choose_dtypes,
    initial_roster,
    parse_shares,
    parse_sync,
    rank_devices,
    step_shares,
    weighted_shares,
    why_not_hsdp,
)
from evener.core.run.run_spec import MachineSpec, RunSpec, TrainSpec, parse_args

CPU, OLD = RankSlot(host="a", device="cpu", has_bf16=True), RankSlot(host="b", device="cpu")
GPU, T4 = RankSlot(host="c", device="cuda:0", has_bf16=True), RankSlot(host="d", device="cuda:0")
GPU_1, T4_1 = (msgspec.structs.replace(slot, device="cuda:1") for slot in (GPU, T4))


@given(st.integers(1, 400), st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda w: sum(w) > 1e-3))
def test_weighted_shares_sum_to_batch_and_stay_within_one_of_quota(batch, weights):
    """Hamilton's method: whole numbers that sum to the batch, none a whole sequence away from its quota."""
    shares = weighted_shares(batch, weights)
    assert sum(shares) == batch
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - batch * weight / sum(weights)) < 1
        assert share == 0 or weight > 0


def test_weighted_shares_minimize_squared_distance_to_quota():
    """Against all divisions of small batches: none is nearer to the quotas, in the sum of squares."""
    for batch, weights in itertools.product((1, 5, 7), ([3, 1], [1, 1, 1], [2, 0, 1.5])):
        quotas = [batch * weight / sum(weights) for weight in weights]

        def distance(shares, quotas=quotas):
            return sum((share - quota) ** 2 for share, quota in zip(shares, quotas, strict=True))

        every = [s for s in itertools.product(range(batch + 1), repeat=len(weights)) if sum(s) == batch]
        assert distance(weighted_shares(batch, weights)) == pytest.approx(min(map(distance, every)))


@pytest.mark.parametrize("text", [*SYNC_EXAMPLES, "diloco:100:int4:streamed", "diloco:2:int8", "powersgd:16"])
def test_strategy_name_round_trips(text):
    assert str(parse_sync(text)) == text


@pytest.mark.parametrize("text", ["", "DDP", "powersgd", "powersgd:0", "diloco", "diloco:0", "ddp:2", "diloco:5:int2"])
def test_unknown_strategy_is_refused(text):
    with pytest.raises(UsageError, match="no such strategy") as caught:
        parse_sync(text)
    hints = {"diloco": "diloco:H, synchronizing every H steps", "powersgd": "powersgd:R of rank R"}
    expected = hints.get(
        text.partition(":")[0], 'did you mean "ddp"?' if text == "ddp:2" else "known: auto, bf16, ddp, "
    )
    assert caught.value.hint.startswith(expected)
    assert "none" not in re.findall(r"\w+", caught.value.hint)  # for several ranks


@pytest.mark.parametrize(
    ("hosts", "can"), [("aabb", True), ("abab", True), ("aaabbb", True), ("aa", False), ("ab", False), ("aabbb", False)]
)
def test_weights_are_sharded_within_several_hosts_of_as_many_ranks(hosts, can):
    members = [Member(rank=rank, host=host, device="cpu", dtype="fp32", share=1, micro_batch=1)
               for rank, host in enumerate(hosts)]  # fmt: skip
    roster = Roster(members=members, sync=parse_sync("hsdp"), backend="gloo")
    assert (why_not_hsdp(roster) == "") is can
    assert why_not_hsdp(roster.replace_sync(parse_sync("fsdp"))) == ""
    left = roster.for_hosts(["a"], epoch=1, why="b was lost")
    assert str(left.sync) == ("fsdp" if hosts.count("a") > 1 else "none")


@pytest.mark.parametrize("text", ["", "3", "a:b", "-1:2", "0:0", "nan:1", "inf:1", "3;1"])
def test_invalid_shares_are_refused(text):
    spec = RunSpec(machine=MachineSpec(shares=text or " "))
    with pytest.raises(UsageError, match="--shares"):
        initial_roster(spec, [CPU, CPU], None)


def test_wrong_number_of_shares_is_refused():
    assert parse_shares("3:1") == [3, 1]
    with pytest.raises(UsageError, match="3 shares for 2 ranks"):
        initial_roster(RunSpec(machine=MachineSpec(shares="3:1:1")), [CPU, CPU], None)


def test_share_below_one_sequence_is_refused():
    with pytest.raises(UsageError, match="--shares 1000:1: rank 1's share of 16 sequences is less than one"):
        initial_roster(RunSpec(machine=MachineSpec(shares="1000:1")), [CPU, CPU], None)
    with pytest.raises(UsageError, match="more than the 2 sequences"):
        initial_roster(RunSpec(train=TrainSpec(batch=2)), [CPU] * 3, None)


@pytest.mark.parametrize(
    ("slots", "dtypes", "backend"),
    [
        ([CPU], ["bf16"], "none"),
        ([CPU, CPU], ["bf16", "bf16"], "gloo"),
        ([CPU, OLD], ["bf16", "fp32"], "gloo"),
        ([GPU, GPU_1], ["bf16", "bf16"], "nccl"),
        ([GPU, GPU], ["bf16", "bf16"], "gloo"),  # NCCL refuses two ranks on one device
        ([GPU, GPU_1, T4, GPU], ["bf16", "bf16", "fp32", "bf16"], "gloo"),
        ([GPU, T4], ["bf16", "fp32"], "nccl"),
        ([T4, T4_1], ["fp16", "fp16"], "nccl"),
        ([GPU, OLD], ["bf16", "fp32"], "gloo"),
        ([T4, CPU], ["fp32", "bf16"], "gloo"),
        ([T4, T4, OLD], ["fp32"] * 3, "gloo"),
    ],
)
def test_dtype_is_per_rank_and_backend_is_common(slots, dtypes, backend):
    roster = initial_roster(RunSpec(), slots, 64)
    assert [member.dtype for member in roster.members] == dtypes
    assert roster.dtypes_text == " and ".join(dict.fromkeys(dtypes))
    assert roster.backend == backend
    assert roster.sync.kind == ("none" if len(slots) == 1 else "ddp")
    assert set(choose_dtypes(slots, "fp32")) == {"fp32"}
    assert choose_backend(slots * 2, "gloo") == "gloo"


@pytest.mark.parametrize(
    ("slots", "where"),
    [
        ([GPU, T4, GPU], "rank 2 on c trains on cuda:0, as does another rank"),
        ([GPU, OLD], "rank 1 on b trains on the processor"),
    ],
)
def test_nccl_without_a_gpu_for_every_rank_is_refused(slots, where):
    with pytest.raises(UsageError, match=f"--backend nccl: {where}") as refused:
        initial_roster(RunSpec(machine=MachineSpec(backend="nccl")), slots, 64)
    assert refused.value.hint is not None
    assert "--backend gloo" in refused.value.hint
    assert choose_backend([GPU, GPU_1, T4], "nccl") == "nccl"


def test_rank_devices_follow_flag_then_fleet_file_then_detected_gpus():
    gpus = HostConfig(address="x", devices="auto")
    assert rank_devices("x", gpus, 2, MachineSpec(device="cpu", ranks=3)) == ["cpu"] * 3  # the flag wins
    assert rank_devices("x", HostConfig(address="x", devices="cpu"), 2, MachineSpec()) == ["cpu"]
    assert rank_devices("x", HostConfig(address="x", ranks=3), 2, MachineSpec()) == ["cuda:0", "cuda:1", "cuda:0"]
    with pytest.raises(UsageError, match="x: ranks asked for GPUs"):
        rank_devices("x", gpus, 0, MachineSpec(device="cuda"))


@pytest.mark.parametrize("shares", [[92, 45, 23], [91, 46, 23], [155, 5, 0], [54, 53, 53], [0, 160, 0]])
def test_round_steps_sum_to_round_shares_near_quota(shares):
    spec = parse_args(["--batch", "16", "--sync", "diloco:10:int8"])
    roster = initial_roster(spec, [CPU] * 3, 64).with_shares(shares, from_step=7)
    assert (roster.epoch, roster.batch, sum(roster.shares)) == (1, 16, 16)
    assert roster.mean_shares == [share / 10 for share in shares]
    assert msgspec.json.decode(msgspec.json.encode(roster), type=Roster) == roster
    steps = [roster.at_step(step) for step in range(7, 37)]
    assert steps[:10] == steps[10:20] == steps[20:]
    assert all(sum(one.shares) == 16 and one.at_step(7) == one for one in steps)
    assert [one.first_sequence(2) for one in steps] == [16 - one.shares[2] for one in steps]
    for rank, share in enumerate(shares):
        done = [sum(one.shares[rank] for one in steps[: num + 1]) for num in range(10)]
        assert done[-1] == share
        assert all(abs(have - (num + 1) * share / 10) < 2 for num, have in enumerate(done))
        assert {one.shares[rank] for one in steps} <= {share // 10, -(-share // 10)}


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 12, 100, 500])
def test_every_round_step_sums_to_batch_near_quota(num_steps):
    rng = random.Random(num_steps)
    for num_ranks in (1, 2, 3, 8, 64):
        weights = [rng.random() + 0.01 for _ in range(num_ranks)]
        shares = weighted_shares(num_steps * (num_ranks + rng.randrange(40)), weights)
        steps = [step_shares(shares, num_steps, step) for step in range(-num_steps, num_steps)]
        assert {sum(step) for step in steps} == {sum(shares) // num_steps}
        assert steps[:num_steps] == steps[num_steps:]
        for rank, share in enumerate(shares):
            done = list(itertools.accumulate(step[rank] for step in steps[:num_steps]))
            assert done[-1] == share
            assert {step[rank] for step in steps} <= {share // num_steps, -(-share // num_steps)}
            assert all(abs(have - (num + 1) * share / num_steps) < 3 for num, have in enumerate(done))


@pytest.mark.parametrize(
    ("sync", "sizes"),
    [("ddp", [[3, 2, 2], [], [2]]), ("fsdp", [[2, 2, 3], [0, 0, 0], [0, 1, 1]])],
)
def test_sharded_ranks_have_equally_many_micro_batches(sync, sizes):
    """The last is never empty where a rank has a share: in its backward gradients are exchanged."""
    spec = parse_args(["--batch", "9", "--shares", "7:0:2", "--micro-batch", "3", "--sync", sync])
    roster = initial_roster(spec, [CPU] * 3, 64)
    assert [roster.micro_batch_sizes(rank) for rank in range(3)] == sizes
    assert [roster.num_passes(rank, [6, 1, 0]) for rank in range(3)] == ([2, 1, 0] if sync == "ddp" else [2, 2, 2])


def test_roster_round_trips_through_file():
    roster = initial_roster(parse_args(["--batch", "11", "--shares", "3:0:1", "--micro-batch", "4"]), [CPU] * 3, 64)
    assert roster.shares == [8, 0, 3]
    assert [member.micro_batch_sizes for member in roster.members] == [[4, 4], [], [3]]
    assert [roster.first_sequence(rank) for rank in range(3)] == [0, 8, 8]
    assert roster.divide_work(22) == [16, 0, 6]
    assert msgspec.json.decode(msgspec.json.encode(roster), type=Roster) == roster

    later = roster.with_weights([1, 1, 1], from_step=20)
    assert (later.epoch, later.from_step, later.shares, later.batch) == (1, 20, [4, 4, 3], 11)
    assert later.members[1].micro_batch == 4


def test_rank_name_includes_host_when_several_hosts():
    def names(*hosts):
        members = [Member(rank=i, host=host, device="cpu", dtype="fp32", share=1, micro_batch=1)
                   for i, host in enumerate(hosts)]  # fmt: skip
        roster = Roster(members=members, sync=DDP, backend="gloo")
        return [roster.rank_label(rank) for rank in range(len(hosts))]

    assert names("attic", "laptop") == ["attic", "laptop"]
    assert names("attic", "attic", "laptop") == ["attic:0", "attic:1", "laptop"]
    assert names("attic", "attic") == ["rank 0", "rank 1"]


def test_weight_sums_do_not_depend_on_python_version():
    """What sum() makes of these floats depends on the Python that adds them."""
    weights, batch = [24.0, 1.2, 24.0, 11.6], 24
    exact = [batch * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    left_over = batch - sum(map(math.floor, exact))
    by_remainder = sorted(range(4), key=lambda rank: (math.floor(exact[rank]) - exact[rank], rank))
    expected = [math.floor(quota) + (rank in by_remainder[:left_over]) for rank, quota in enumerate(exact)]
    assert weighted_shares(batch, weights) == expected
