"""Predicted step costs match closed forms, limits and published figures."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.cluster.link import LinkModel
from evener.core.model.shape import PRESETS, preset_shape
from evener.core.run.prediction import EXACT_SOURCE, Cluster
from evener.core.run.roster import SYNC_EXAMPLES, Member, Roster, parse_sync
from evener.core.run.step_cost import PHASES
from evener.plan.choice.cluster import uniform_cluster
from evener.plan.cost.collective_cost import sent_bytes
from evener.plan.cost.cost_model import BACKWARD_FRACTION, PAGE_FAULT_S_PER_BYTE
from evener.plan.cost.memory import faulted_bytes, peak_memory
from evener.plan.cost.penalty import loss_penalty
from evener.plan.cost.sync_traffic import STRATEGY_TRAFFIC, bucket_sizes, gradient_tensors, sync_workload
from evener.plan.shares.load_balancing import RankTimeModel, fastest_shares
from tests.unit.planner import changed, cluster_of, job_of, priced

SHAPE = preset_shape("char", 512)
JOB = job_of(SHAPE, batch=24, micro_batch=12)
WIRE = LinkModel(latency_s=0.0, bandwidth_Bps=100e6)
SYNCS = ("ddp", "bf16", "int8", "int4", "powersgd:4", "fsdp", "zero1", "diloco:30", "diloco:100:int4:streamed")


def cluster(*rates: float, wire: LinkModel = WIRE, **more: object) -> Cluster:
    return cluster_of(*rates, wire=wire, **more)


def test_single_rank_pays_only_compute_update_and_input():
    option = priced(JOB, cluster(1000.0, pass_s=0.1, update_s=0.5, data_s=0.25), "none")
    assert option.step_s == pytest.approx(24 * 256 / 1000 + 2 * 0.1 + 0.5 + 0.25)  # two micro-batches
    cost = option.ranks[0].cost
    assert (cost.exposed_sync_s, cost.wait_s, cost.optimizer_s, cost.data_s) == (0.0, 0.0, 0.5, 0.25)
    assert option.bytes_per_rank == 0


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("rates", [(1e3, 1e3), (1e3, 400.0), (1e3, 900.0, 800.0)])
def test_cost_parts_of_every_rank_sum_to_step_time(sync, rates):
    option = priced(JOB, cluster(*rates, update_s=0.1, sync_Bps=1e9, cpus=1.0, copy_Bps=1e10), sync)
    for rank in option.ranks:
        assert sum(getattr(rank.cost, part) for part in PHASES) == pytest.approx(option.step_s)
        assert all(getattr(rank.cost, part) >= 0 for part in PHASES)
    assert option.tokens_per_s == pytest.approx(24 * 256 / option.step_s)
    assert min(rank.cost.wait_s for rank in option.ranks) == 0


def test_ddp_with_infinite_bandwidth_takes_slowest_rank_time():
    fast = LinkModel(latency_s=0.0, bandwidth_Bps=1e18)
    option = priced(JOB, cluster(1000.0, 250.0, wire=fast), "ddp")
    assert option.step_s == pytest.approx(12 * 256 / 250.0)
    assert [rank.cost.wait_s for rank in option.ranks] == pytest.approx([12 * 256 * (1 / 250 - 1 / 1000), 0.0])
    assert option.straggler.host == "b"


def test_slow_link_ddp_sends_continuously_from_first_bucket():
    """start_0 = ready_0, and from then on the wire never rests."""
    option = priced(JOB, cluster(1e6, 1e6), "ddp")
    compute_s = 12 * 256 / 1e6
    first_s = (
        compute_s * (1 - BACKWARD_FRACTION)
        + compute_s * BACKWARD_FRACTION * bucket_sizes(gradient_tensors(SHAPE))[0][1]
    )
    assert option.step_s == pytest.approx(first_s + 4 * SHAPE.num_params() / 100e6, rel=1e-6)
    assert option.ranks[0].sync_s == pytest.approx(4 * SHAPE.num_params() / 100e6)


def test_communication_is_hidden_behind_backward():
    """By hand: three buckets, each ready when its tensors are; the wire carries 1e8 bytes a second."""
    rate = 2000.0
    option = priced(JOB, cluster(rate, rate), "ddp")
    compute_s = 12 * 256 / rate
    end_s = 0.0
    for size, ready in bucket_sizes(gradient_tensors(SHAPE)):
        end_s = max(end_s, compute_s * (1 - BACKWARD_FRACTION + BACKWARD_FRACTION * ready)) + size / 100e6
    assert option.step_s == pytest.approx(end_s)
    assert 0 < option.ranks[0].cost.exposed_sync_s < option.ranks[0].sync_s


def test_only_the_last_micro_batch_synchronizes():
    one = priced(JOB, cluster(1000.0, 1000.0), "ddp")
    four = priced(changed(JOB, micro_batch=3), cluster(1000.0, 1000.0), "ddp")
    assert four.bytes_per_rank == one.bytes_per_rank
    assert four.ranks[0].cost.exposed_sync_s > one.ranks[0].cost.exposed_sync_s  # a shorter backward hides less


def test_overlapped_communication_reduces_compute_throughput():
    """What is in flight while a rank computes costs it bytes / (sync_Bps · cpus)."""
    free = priced(JOB, cluster(500.0, 500.0), "ddp")
    taken = priced(JOB, cluster(500.0, 500.0, sync_Bps=50e6, cpus=1.0), "ddp")
    grown_s = taken.ranks[0].cost.compute_s - free.ranks[0].cost.compute_s
    hidden_bytes = (taken.ranks[0].sync_s - taken.ranks[0].cost.exposed_sync_s) * 100e6
    assert grown_s == pytest.approx(hidden_bytes / 50e6, rel=0.01)
    twice = priced(JOB, cluster(500.0, 500.0, sync_Bps=50e6, cpus=2.0), "ddp")
    assert twice.ranks[0].cost.compute_s - free.ranks[0].cost.compute_s == pytest.approx(grown_s / 2, rel=0.05)


@pytest.mark.parametrize(("sync", "overlaps"), [("diloco:10", False), ("diloco:10:streamed", True)])
def test_hidden_round_reduces_compute_throughput_of_its_steps(sync, overlaps):
    free = priced(JOB, cluster(500.0, 500.0), sync)
    taken = priced(JOB, cluster(500.0, 500.0, sync_Bps=50e6, cpus=2.0), sync)
    grown_s = taken.ranks[0].cost.compute_s - free.ranks[0].cost.compute_s
    assert grown_s == pytest.approx(overlaps * taken.bytes_per_rank / 50e6 / 2)


def test_sent_bytes_of_each_strategy_match_formulas():
    """P = 4 · parameters, n = 3: 2(n-1)/n · P for ddp, and what the others make of it on Gloo."""
    P, n = 4 * SHAPE.num_params(), 3
    ring = 2 * (n - 1) / n * P
    found = {sync: priced(JOB, cluster(1.0, 1.0, 1.0), sync).bytes_per_rank for sync in SYNCS}
    assert found["ddp"] == pytest.approx(ring)
    # A part to each and back, as a ring sends it; a bf16 scale for every 256 numbers, or every 64.
    coded = [1 / 2, (1 + 2 / 256) / 4, (1 / 2 + 2 / 64) / 4]
    assert [found[sync] / ring for sync in ("bf16", "int8", "int4")] == pytest.approx(coded)
    assert found["diloco:30"] == pytest.approx(ring / 30, abs=1)
    assert found["diloco:100:int4:streamed"] == pytest.approx(ring * coded[2] / 100, abs=1)
    # In pairs: ZeRO gathers weights once and scatters gradients once; FSDP gathers all but the root once more.
    assert found["zero1"] == pytest.approx(ring)
    root = 4 * sum(SHAPE.params_by_group()[name] for name in ("token embeddings", "position embeddings", "head"))
    assert found["fsdp"] == pytest.approx((n - 1) / n * (3 * P - root))
    assert found["powersgd:4"] < 0.02 * ring


def test_sharded_weights_are_gathered_in_half_the_bytes_where_all_ranks_compute_in_bf16():
    """Gradients are summed in fp32."""
    P, n = 4 * SHAPE.num_params(), 3
    mixed = changed(JOB, dtype="bf16")
    assert priced(mixed, cluster(1.0, 1.0, 1.0), "zero1").bytes_per_rank == pytest.approx((n - 1) / n * (P / 2 + P))


@pytest.mark.parametrize("sync", ["fsdp", "zero1"])
def test_sharded_rank_on_a_host_short_of_memory_computes_longer_by_its_page_faults(sync):
    short, plenty, unknown = (
        priced(JOB, cluster(1e3, 1e3, cpus=0.5, memory_bytes=size), sync) for size in (10**9, 10**12, None)
    )
    need = peak_memory(SHAPE, short.roster, 0)
    faults_s = faulted_bytes(SHAPE, short.roster, need) * PAGE_FAULT_S_PER_BYTE / 0.5
    assert short.ranks[0].cost.compute_s == pytest.approx(plenty.ranks[0].cost.compute_s + faults_s)
    assert faults_s > 0
    assert short.ranks[0].memory_bytes == need.total == unknown.ranks[0].memory_bytes < plenty.ranks[0].memory_bytes
    assert unknown.step_s == plenty.step_s


def test_fsdp_gathers_for_every_micro_batch():
    few = priced(JOB, cluster(1.0, 1.0), "fsdp").bytes_per_rank
    many = priced(changed(JOB, micro_batch=3), cluster(1.0, 1.0), "fsdp").bytes_per_rank
    P = 4 * SHAPE.num_params()
    root = 4 * sum(SHAPE.params_by_group()[name] for name in ("token embeddings", "position embeddings", "head"))
    # 4 passes instead of 1, two gathers of P/2 each, but one of the root
    assert many - few == pytest.approx(3 * (P - root / 2))


def test_sparse_embeddings_send_rows_instead_of_tables():
    shape = preset_shape("d8", 32768, 256)
    rosters = [priced(job_of(shape, batch=2), cluster(1.0, 1.0), sync).roster for sync in ("ddp", "ddp+sparse")]
    dense, sparse = (sum(t.size_bytes for t in sync_workload(job_of(shape), roster).transfers) for roster in rosters)
    tables = 5 * 32768 * 512 * 4
    assert dense - sparse == pytest.approx(tables - 5 * 2 * 256 * (512 * 4 + 4))


def test_sparse_gradients_have_only_embedding_rows_of_the_rank_s_batch():
    job = msgspec.structs.replace(job_of(preset_shape("d8", 32768, 256), batch=12, shares="8:4"),
                                  distinct_tokens=[100.0, 160.0, 250.0, 400.0])  # fmt: skip
    dense, sparse = (priced(job, cluster(1.0, 1.0), sync).ranks for sync in ("ddp", "ddp+sparse"))
    for rank, rows in enumerate((400, 250)):
        saved = 5 * (32768 * 512 * 4 - rows * (512 * 4 + 4))
        assert dense[rank].bytes - sparse[rank].bytes == pytest.approx(saved)


@pytest.mark.parametrize(("shape", "copied_s", "measured_s"), [
    (preset_shape("d4", 32768, 256), 11.8e-3, 14.5e-3), (preset_shape("char", 65), 2.6e-3, 3.9e-3),
])  # fmt: skip
def test_bucket_copy_cost_matches_measured_backward_overhead(shape, copied_s, measured_s):
    """Backward with DDP's reducer beside backward without, nothing sent; a plain copy of as much takes so long."""
    job, rate = job_of(shape, batch=2), 2 * 4 * shape.num_params() / copied_s
    ddp, fast = (priced(job, cluster_of(1e9, 1e9, wire=WIRE, copy_Bps=one), "ddp") for one in (rate, 1e18))
    told_s = ddp.ranks[0].cost.compute_s - fast.ranks[0].cost.compute_s
    assert copied_s == pytest.approx(told_s, rel=0.01)
    assert told_s == pytest.approx(measured_s, rel=0.35)


@pytest.mark.parametrize("preset", ["tiny", "char", "gpt2", "gpt2-xl", "d4", "d20"])
def test_every_gradient_is_listed_once_in_order_of_ready_time(preset):
    shape = PRESETS[preset]
    found = gradient_tensors(shape)
    assert sum(tensor.num_params for tensor in found) == shape.num_params()
    ready = [tensor.ready for tensor in found]
    assert ready == sorted(ready)
    assert ready[-1] == pytest.approx(1.0)
    assert sum(size for size, _ in bucket_sizes(found)) == 4 * shape.num_params()


@pytest.mark.parametrize("name", PRESETS)
def test_only_shapes_with_lookup_gradients_have_sparse_embeddings(name):
    shape = preset_shape(name, 512)
    assert shape.has_sparse_embeddings == any(gradient.is_lookup for gradient in gradient_tensors(shape))
    assert max(min(gradient.rows, gradient.columns) for gradient in gradient_tensors(shape)) == shape.width


def test_sparse_falls_back_to_dense_when_rows_exceed_table():
    """Of d8's five tables 8192 tokens touch as many rows: 252 MB to 15 others, where an all-reduce sends 126 MB."""
    shape = preset_shape("d8", 32768)

    def sent(name: str, num_ranks: int) -> float:
        own = {"host": "a", "device": "cpu", "dtype": "fp32", "share": 8192 // shape.block_size, "micro_batch": 1}
        members = [Member(rank=rank, **own) for rank in range(num_ranks)]
        work = sync_workload(job_of(shape), Roster(members=members, sync=parse_sync(name), backend="gloo"))
        return sum(sent_bytes(one.collective, one.size_bytes, num_ranks) for one in work.transfers)

    table, rows = 4 * 512 * 32768, 8192 * (4 * 512 + 4)
    assert sent("ddp", 2) - sent("ddp+sparse", 2) == pytest.approx(5 * (table - rows))
    assert sent("ddp+sparse", 16) == pytest.approx(sent("ddp", 16))
    assert 15 * rows > 252e6 > 2 * sent_bytes("all_reduce", table, 16) > 251e6


def test_every_strategy_has_price_and_penalty_source():
    assert {parse_sync(example).kind for example in SYNC_EXAMPLES} == set(STRATEGY_TRAFFIC)
    for sync in map(parse_sync, SYNC_EXAMPLES):
        penalty, source, margin = loss_penalty(sync, 10**8, [8, 8])
        assert source
        is_exact = sync.is_exact
        assert (source == EXACT_SOURCE) == is_exact
        assert penalty is None or penalty >= 0.0
        assert not is_exact or penalty == margin == 0.0


# --- the notes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("link_Gbps", "seconds"), [(1, 14.3), (2.5, 5.72), (10, 1.43), (400, 0.0358)])
def test_gpt2_760m_bf16_sync_time_matches_published_fabric_figures(link_Gbps, seconds):
    """A note on training at home: 1.52 GB at 85 % of the line rate, two ranks."""
    job = job_of(PRESETS["gpt2-760m"], batch=16)
    wire = LinkModel(latency_s=0.0, bandwidth_Bps=0.85 * link_Gbps * 1e9 / 8)
    option = priced(job, cluster(500.0, 500.0, wire=wire), "bf16")
    assert option.ranks[0].sync_s == pytest.approx(seconds, rel=0.01)


def test_straggler_dominates_network_in_published_home_lab_case():
    """126M parameters on an i9 and a laptop: 4.3 s of 71.5 s are the network's, the rest is the laptop's."""
    shape = preset_shape("d8", 32768, 512)
    job = job_of(shape, batch=8)
    both = uniform_cluster({"i9": 60.0, "laptop": 30.0}, LinkModel(latency_s=1e-4, bandwidth_Bps=117e6))
    equal = priced(job, both, "ddp")
    assert equal.ranks[0].sync_s == pytest.approx(4.3, rel=0.01)
    assert equal.straggler.host == "laptop"
    assert equal.step_s == pytest.approx(71.5, rel=0.05)  # theirs hid nothing of the 4.3 s: 72.6 s
    assert equal.step_s - equal.ranks[0].cost.exposed_sync_s + equal.ranks[0].sync_s == pytest.approx(71.5, rel=0.02)
    assert equal.ranks[0].cost.wait_s == pytest.approx(34.1, rel=0.01)  # the i9 idles half of every step
    shares = fastest_shares(8, [RankTimeModel(sequence_s=512 / rate) for rate in (60, 30)])
    proportional = priced(changed(job, shares=":".join(map(str, shares))), both)
    assert proportional.roster.shares == shares
    assert proportional.tokens_per_s > 1.3 * equal.tokens_per_s
