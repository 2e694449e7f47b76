"""Figures of probes match nccl-tests, published values and closed forms; pairs of hosts are measured once."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.cli.probe import _buffer_sizes, _parse_bytes
from evener.cli.probe_output import COLLECTIVES_COLUMNS, format_collectives_header, format_collectives_row
from evener.core.base.errors import UsageError
from evener.core.cluster.collective_results import (
    COLLECTIVES,
    CollectiveBenchGroup,
    CollectiveBenchSpec,
    CollectiveResult,
    SkippedSizes,
)
from evener.core.cluster.fleet_file import HostConfig, HostLink, ModelRate, Rates, load_fleet
from evener.core.cluster.fleet_update import update_fleet_file
from evener.core.cluster.host_probe import MicroBatchTiming, SustainedThroughput, fit_micro_batch_time, model_rate
from evener.core.cluster.link import LinkModel
from evener.core.model.shape import preset_shape
from evener.doctor.link_probe import estimate_duration_s, measure_bytes_per_cpu_s, measure_duplex, schedule_rounds
from evener.launch.commands import PreparedFleet, PreparedHost
from evener.launch.probe_hosts import _choose_backend, _merge_ranks
from evener.plan.cost.collective_cost import (
    Ring,
    bus_factor,
    collective_s,
    reduced_bytes,
    ring_all_reduce_bytes,
    sent_bytes,
    split_collective_time,
)
from evener.plan.cost.roofline import Roofline, roofline
from evener.report.explain.bus_bandwidth import bandwidth_findings, collective_efficiencies, explain_bandwidth

CHAR = ModelRate(tokens_per_s=1e3, pass_s=0.01, update_s=0.02, dtype="bf16", cpus=1.9)
D8 = ModelRate(tokens_per_s=60.0)

# nccl-tests, doc/PERFORMANCE.md, "Summary": busbw = factor · algbw
NCCL_TESTS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "all_to_all": lambda n: (n - 1) / n,
}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bus_factors_match_nccl_tests(collective, num_ranks):
    assert bus_factor(collective, num_ranks) == pytest.approx(NCCL_TESTS[collective](num_ranks))


@pytest.mark.parametrize(("gbit", "seconds"), [(1, 14.3), (10, 1.43), (400, 0.036)])
def test_760m_bf16_all_reduce_matches_published_time(gbit, seconds):
    bandwidth_Bps = gbit * 1e9 / 8 * 0.85  # as in the seed: about 85 % effective
    wires = (LinkModel(latency_s=0.0, bandwidth_Bps=bandwidth_Bps),) * 2
    pair = Ring(hosts=("a", "b"), links=wires, reverse_links=wires, sum_Bps=(math.inf,) * 2)
    for backend in ("gloo", "nccl"):
        assert collective_s("all_reduce", 2 * 760e6, pair, backend) == pytest.approx(seconds, rel=0.01)


@given(st.sampled_from(COLLECTIVES), st.integers(2, 512), st.integers(1, 1 << 30))
def test_sent_bytes_are_at_least_the_lower_bound(collective, num_ranks, size_bytes):
    perfect = bus_factor(collective, num_ranks) * size_bytes
    assert sent_bytes(collective, size_bytes, num_ranks, "nccl") == pytest.approx(perfect)
    assert sent_bytes(collective, size_bytes, num_ranks, "gloo") >= perfect * (1 - 1e-12)
    assert 0 <= reduced_bytes(collective, size_bytes, num_ranks) < size_bytes


def test_all_reduce_equals_reduce_scatter_plus_all_gather():
    for n in (2, 3, 8):
        halves = sent_bytes("reduce_scatter", 1e6, n, "nccl") + sent_bytes("all_gather", 1e6, n, "nccl")
        assert sent_bytes("all_reduce", 1e6, n) == pytest.approx(halves)
        assert sent_bytes("all_reduce", 10**6, n) == pytest.approx(ring_all_reduce_bytes(10**6, n), abs=1)


@pytest.mark.parametrize(("num_ranks", "times"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_gloo_broadcast_is_binomial_tree(num_ranks, times):
    assert sent_bytes("broadcast", 100, num_ranks) == 100 * times


@given(st.floats(1e-4, 100), st.floats(1e-6, 1e-2), st.integers(2, 16))
def test_collective_time_parts_sum_to_its_total(time_s, latency_s, num_ranks):
    split = split_collective_time(
        "all_reduce", 1e6, num_ranks, time_s=time_s, latency_s=latency_s, bandwidth_Bps=1e8, sum_Bps=1e10
    )
    assert 0 <= split.latency_s <= latency_s
    assert split.total_s == pytest.approx(time_s)


@given(st.integers(2, 20))
def test_every_pair_is_measured_once_and_no_host_twice_at_a_time(num_hosts):
    names = [f"h{i}" for i in range(num_hosts)]
    found = schedule_rounds(names)
    assert sorted(tuple(sorted(pair)) for pairs in found for pair in pairs) == sorted(
        (a, b) if a < b else (b, a) for i, a in enumerate(names) for b in names[i + 1 :]
    )
    for pairs in found:
        hosts = [name for pair in pairs for name in pair]
        assert len(hosts) == len(set(hosts))
    assert len(found) <= max(6, num_hosts)
    assert estimate_duration_s(num_hosts) > 0


def world(hosts=("a", "b"), backend="gloo"):
    return CollectiveBenchGroup(
        ranks=2, hosts=list(hosts), backend=backend, device="cpu", interface="eth0", sum_Bps=1e10, torch="2"
    )


def row(collective, size_bytes, time_s, num_wrong=0):
    return CollectiveResult(
        collective=collective, size_bytes=size_bytes, count=size_bytes // 4, dtype="fp32", redop="sum", root=-1,
        in_place=True, time_s=time_s, time_p95_s=time_s, iterations=3, algbw_Bps=size_bytes / time_s,
        busbw_Bps=bus_factor(collective, 2) * size_bytes / time_s, num_wrong=num_wrong, sent_bytes=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tries", "seen", "lasted_s"),
    [
        ([(9, 8)], (9, 8), [2]),
        ([(9, 2), (8, 7)], (8, 7), [2, 6]),
        ([(9, 2), (3, 9), (9, 1)], (3, 9), [2, 6, 6]),
        ([(5, 5)], (5, 5), [2]),  # a medium that both share
        ([(0, 0), (0, 0), (0, 0)], (0, 0), [2, 6, 6]),
    ],
)
def test_duplex_attempt_with_most_equal_directions_is_used(tries, seen, lasted_s):
    lasted = []

    def flow(which):
        rates = iter([rates[which] for rates in tries])
        return SimpleNamespace(measure_goodput=lambda _, seconds: lasted.append(seconds) or poured(next(rates)))

    def poured(rate):
        return SimpleNamespace(goodput_Bps=1e6 * rate)

    ways = [("a", "b"), ("b", "a")]
    found = measure_duplex({way: flow(i) for i, way in enumerate(ways)}, dict.fromkeys(ways, poured(10)), 2)
    assert tuple(found[way].goodput_Bps / 1e6 for way in ways) == seen
    assert lasted[::2] == lasted[1::2] == lasted_s


def test_cpu_time_of_an_exchange_is_what_loops_lose_meanwhile():
    spare = {
        "a": iter([3.9, 3.4, 3.9]),
        "b": iter([1.0, 0.9, 0.7]),
        "c": iter([1.0, None, 1.0]),
    }  # before, during, after

    def flow(source):
        return SimpleNamespace(
            measure_goodput=lambda *_: SimpleNamespace(mean_Bps={"a": 1e8, "b": 2e8, "c": 3e8}[source]),
            spare_cpus=lambda *_: next(spare[source]),
        )

    found = measure_bytes_per_cpu_s({(source, "other"): flow(source) for source in spare}, 2)
    assert found[("a", "other")] == pytest.approx(2e8 / 0.5)
    assert found[("b", "other")] is None  # something else ran after it
    assert found[("c", "other")] is None  # its processes could not start


def test_summary_states_peak_bandwidth_and_latency_bound_size():
    wire_Bps = 117.5e6
    rows = [
        row("all_reduce", 1024, 0.3e-3),
        row("all_reduce", 1 << 14, 0.43e-3),
        row("all_reduce", 1 << 16, 0.86e-3),
        row("all_reduce", 1 << 20, 10e-3),
        row("all_reduce", 1 << 26, (1 << 26) / wire_Bps / 0.98),
        row("reduce_scatter", 1 << 26, 0.6),
    ]
    stopped = [SkippedSizes(collective="all_reduce", size_bytes=1 << 28, needs_s=12.0, left_s=3.0)]
    judged = collective_efficiencies(rows, world(), wire_Bps)
    text = " ".join(explain_bandwidth(judged, stopped, world(), wire_Bps))
    assert "64 MiB all-reduce reaches 0.98 of the wire; up to 16 KiB latency dominates (291 µs)" in text
    assert "Gloo sends 2 times what it must" in text
    assert "The time was up for all-reduce before 256 MiB: about" in text
    assert "The wire is 940 Mbit/s" in text
    assert not bandwidth_findings(judged, world())


def test_slow_network_stack_and_wrong_collective_result_are_reported():
    slow = collective_efficiencies([row("all_reduce", 1 << 26, 2.0, num_wrong=3)], world(), 117.5e6)
    found = {finding.check: finding for finding in bandwidth_findings(slow, world())}
    assert found["net.stack-loss"].severity == "warning"
    assert "0.29 of the wire" in found["net.stack-loss"].evidence
    assert found["run.collective-mismatch"].severity == "error"
    assert "3 elements of all-reduce" in found["run.collective-mismatch"].evidence
    here = world(hosts=("a", "a"))
    assert "net.stack-loss" not in {finding.check for finding in bandwidth_findings(slow, here)}


def test_collectives_table_columns_match_nccl_tests():
    one, wrong = row("all_reduce", 1 << 20, 9.2e-3), row("all_reduce", 1 << 30, 9.2, num_wrong=1 << 28)
    judged, all_wrong = collective_efficiencies([one, wrong], world(), 117.5e6)
    columns = [title for title, _, _ in COLLECTIVES_COLUMNS]
    titles = format_collectives_header(columns)[0].removeprefix("#").split()
    assert titles[:9] == ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    cells = format_collectives_row(judged, columns).split()
    assert cells[:9] == ["1048576", "262144", "float", "sum", "-1", "9200.0", "0.114", "0.114", "0"]
    parts = [float(cell) for cell in cells[10:]]
    assert sum(parts) == pytest.approx(9200.0, abs=0.3)
    assert format_collectives_row(all_wrong, columns).split()[8] == str(1 << 28)
    lines = [
        *format_collectives_header(columns),
        *(format_collectives_row(item, columns) for item in (judged, all_wrong)),
    ]
    assert len({len(line) for line in lines}) == 1


def test_buffer_sizes_are_read_in_binary_units_or_refused():
    assert _buffer_sizes("1KiB", "256MiB", 4)[-1] == 1 << 28
    assert len(_buffer_sizes("1KiB", "256MiB", 4)) == 10
    assert _parse_bytes("--min-size", "1.5GiB") == 3 << 29
    for wrong in ("", "MiB", "-1", "1TiB", "0"):
        with pytest.raises(UsageError, match="--min-size"):
            _parse_bytes("--min-size", wrong)
    with pytest.raises(UsageError, match="greater"):
        _buffer_sizes("2MiB", "1MiB", 2)


def test_measurements_round_trip_through_fleet_file(tmp_path: Path):
    file = tmp_path / "fleet.toml"
    file.write_text('# mine\n[hosts.a]\naddress = "local"  # here\n[hosts.b]\naddress = "b"\n')
    link = HostLink(
        goodput_Bps=117e6, duplex_Bps=116e6, rtt_s=1e-4, rtt_p95_s=2e-4, retransmits=0, measured="2026-11-21"
    )
    update_fleet_file(file, links={"a": {"b": link}}, rates={"a": {"cpu": Rates(models={"char": CHAR}, copy_Bps=1e10)}})
    update_fleet_file(file, rates={"a": {"cpu": Rates(models={"d8": D8}, sync_Bps=2e9), "cuda:0": Rates(name="H200")}})
    fleet = load_fleet(file)
    assert fleet.links["a"]["b"] == link
    assert link.bandwidth_Bps == 116e6
    assert fleet.rates["a"]["cpu"].models == {"char": CHAR, "d8": D8}
    assert fleet.rates["a"]["cpu"].sync_Bps == 2e9
    assert fleet.rates["a"]["cpu"].copy_Bps == 1e10
    assert fleet.rates["a"]["cuda:0"].name == "H200"
    assert "# mine" in file.read_text()
    assert "# here" in file.read_text()


def test_roofline_separates_compute_bound_from_memory_bound():
    d8 = preset_shape("d8", vocab_size=32768)
    one = roofline(d8, 2048, matmul_flops=1e12, copy_Bps=60e9, element_bytes=4)
    assert one.bound_by(1.0) == "arithmetic"  # training at full block on 24 cores: the wall is not the memory
    few = roofline(d8, 8, matmul_flops=1e12, copy_Bps=60e9, element_bytes=4)
    assert few.bound_by(few.memory_s) == "memory"  # a handful of tokens a pass: every weight is read for almost nothing


@pytest.mark.parametrize(("took_s", "bound"), [(0.804, "overhead"), (0.03, "memory"), (0.005, "memory")])
def test_overhead_dominated_pass_is_bound_by_neither(took_s, bound):
    """A pass of 804 ms with 4.44 ms of arithmetic: two threads of a tiny model that shared one core."""
    assert Roofline(arithmetic_s=0.00444, memory_s=0.0123).bound_by(took_s) == bound


@pytest.mark.parametrize(
    ("gpus", "device", "backend", "settled"),
    [
        ((1, 1), "auto", "auto", ("cuda", "nccl")),
        ((1, 0), "auto", "auto", ("cpu", "gloo")),
        ((1, 1), "cpu", "auto", ("cpu", "gloo")),
        ((1, 1), "auto", "gloo", ("cpu", "gloo")),
    ],
)
def test_all_hosts_use_one_backend(gpus, device, backend, settled):
    names = {"address": "", "interface": "", "python": "", "workdir": "", "run_dir": "", "cores": 8}
    places = [
        PreparedHost(
            name=name, host=HostConfig(address=name), gpus=["H200"] * num, gpus_have_bf16=True, has_bf16=True, **names
        )
        for name, num in zip("ab", gpus, strict=True)
    ]
    both = PreparedFleet(id="", hosts=places, port=0, findings=[])
    spec = _choose_backend(CollectiveBenchSpec(device=device, backend=backend), both)
    assert (spec.device, spec.backend) == settled
    two_ranks = msgspec.structs.replace(places[0], host=HostConfig(address="a", ranks=2))
    alone = msgspec.structs.replace(both, hosts=[two_ranks])
    shared = _choose_backend(CollectiveBenchSpec(device=device, backend=backend), alone)
    assert (shared.device, shared.backend) == ("cpu", "gloo")  # two ranks, and one GPU at most
    with pytest.raises(UsageError, match="two ranks or more"):
        _choose_backend(CollectiveBenchSpec(), msgspec.structs.replace(both, hosts=places[:1]))


def test_unwritable_fleet_file_is_a_one_line_error(tmp_path: Path):
    with pytest.raises(UsageError, match="No such file"):
        update_fleet_file(tmp_path / "absent.toml", rates={})


def test_pass_fit_recovers_fixed_cost_and_rate():
    line = {tokens: 0.02 + tokens / 5000 for tokens in (256, 2048, 16384)}
    assert fit_micro_batch_time(line) == pytest.approx((0.02, 5000.0))
    assert fit_micro_batch_time({64: 0.001, 128: 0.002}) == (0.0, 64000.0)


@given(st.floats(1e-4, 1), st.floats(1e-4, 1), st.floats(1e-3, 1))
def test_pass_fit_predicts_large_pass_exactly(one_s, between_s, large_s):
    """Whatever disturbed the others: no rate that is infinite or negative comes of it."""
    pass_s, tokens_per_s = fit_micro_batch_time({256: one_s, 1024: between_s, 4096: large_s})
    assert pass_s >= 0
    assert 0 < tokens_per_s <= 20.001 * 4096 / large_s
    assert pass_s + 4096 / tokens_per_s == pytest.approx(large_s)


def test_fitted_fixed_cost_is_zero_if_time_grows_faster_than_tokens():
    """Activations that outgrow the cache bend the line the other way: the large pass is the one that trains."""
    assert fit_micro_batch_time({256: 0.08, 4096: 1.6}) == pytest.approx((0.0, 2560.0))


def passes(micro_batch, took_s):
    return MicroBatchTiming(
        micro_batch=micro_batch, tokens=256 * micro_batch, passes=3, pass_p50_s=took_s, pass_p95_s=took_s
    )


SUSTAINED = SustainedThroughput(
    dtype="bf16", large=passes(16, 1.62), smaller=[passes(1, 0.12), passes(4, 0.42)],
    tokens_per_s=4096 / 1.62, cpus=1.9, updates=20, update_p50_s=0.01, update_p95_s=0.02,
    first_third_tokens_per_s=2500.0, last_third_tokens_per_s=2500.0, first_third_cpus=1.9, last_third_cpus=1.9,
    first_third_Hz=None, last_third_Hz=None,
)  # fmt: skip


def test_planner_uses_pass_fit_or_reports_none():
    rate = model_rate(SUSTAINED)
    assert (rate.pass_s, rate.tokens_per_s) == pytest.approx((0.02, 2560.0))
    assert (rate.update_s, rate.dtype, rate.cpus) == (0.01, "bf16", 1.9)
    alone = model_rate(msgspec.structs.replace(SUSTAINED, smaller=[]))
    assert (alone.pass_s, alone.tokens_per_s) == (None, 4096 / 1.62)


@pytest.mark.parametrize(
    ("ranks", "threads", "probe_threads"), [(None, None, None), (2, None, None), (2, 3, 6), (None, 3, 3)]
)
def test_probe_uses_threads_of_all_ranks_of_host(ranks, threads, probe_threads):
    """None: all cores, as the launcher divides them among ranks."""
    place = msgspec.defstruct("Place", [("host", HostConfig)])(
        HostConfig(address="local", ranks=ranks, threads=threads)
    )
    assert (_merge_ranks(place).host.ranks, _merge_ranks(place).host.threads) == (1, probe_threads)
