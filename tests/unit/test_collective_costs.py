"""Cost formulas of collectives match a simulator that executes each message with real data."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence

import pytest

from evener.core.cluster.link import LinkModel
from evener.core.run.prediction import Cluster, HostRates
from evener.plan.cost import collective_cost
from evener.plan.cost.collective_cost import (
    GLOO_SEGMENT_BYTES,
    Ring,
    best_ring,
    build_ring,
    bus_factor,
    collective_s,
    pipelined_s,
    ring_links,
    ring_phase_s,
    sent_bytes,
)

from ..cost import in_loops

ELEMENT_BYTES = 8
WIRE = LinkModel(latency_s=3e-4, bandwidth_Bps=117e6)
Program = Generator[tuple, object, None]


class Message:
    def __init__(self, payload: Sequence[int]) -> None:
        self.payload = list(payload)
        self.there_s: float | None = None
        self.waiter: int | None = None


class Simulator:
    """Ranks that exchange lists. A rank sends one message at a time and receives one at a time; α is under way only.

    A program yields ("send", to, list), which returns at once with a message, ("sent", message), which waits until it
    has arrived, ("recv", from), which waits for a list, and ("spend", seconds). With `meets` a message leaves once its
    receiver asks for it, as MPI's large ones do.

    >>> def ping(sim, rank):
    ...     if rank == 0:
    ...         yield ("send", 1, [1, 2])
    ...     else:
    ...         sim.data[1] = yield ("recv", 0)
    >>> sim = Simulator(lambda a, b: LinkModel(latency_s=1.0, bandwidth_Bps=8.0), [[], []])
    >>> sim.run(ping), sim.data[1], sim.sent_bytes
    (3.0, [1, 2], [16, 0])
    """

    def __init__(
        self,
        wire: Callable[[int, int], LinkModel],
        data: list[list[int]],
        sum_Bps: float = math.inf,
        meets: bool = False,
    ) -> None:
        self.num_ranks, self.wire, self.data, self.sum_Bps, self.meets = len(data), wire, data, sum_Bps, meets
        self.sent_bytes = [0] * self.num_ranks

    def run(self, program: Callable[[Simulator, int], Program]) -> float:
        """Seconds until the last rank is done."""
        out_free, in_free = [0.0] * self.num_ranks, [0.0] * self.num_ranks
        posted: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        waiting: dict[int, int] = {}  # for whom a rank waits
        programs = [program(self, rank) for rank in range(self.num_ranks)]
        events: list[tuple[float, int, int, object]] = []
        ticket = itertools.count()
        ended_s, num_done = 0.0, 0

        def resume(at_s: float, rank: int, value: object = None) -> None:
            heapq.heappush(events, (at_s, next(ticket), rank, value))

        def leave(now_s: float, rank: int, to: int, message: Message) -> None:
            wire, size = self.wire(rank, to), len(message.payload) * ELEMENT_BYTES
            start_s = max(now_s, out_free[rank], in_free[to] - wire.latency_s)
            out_free[rank] = start_s + size / wire.bandwidth_Bps
            in_free[to] = message.there_s = out_free[rank] + wire.latency_s
            self.sent_bytes[rank] += size
            if message.waiter is not None:
                resume(message.there_s, message.waiter)

        def deliver(now_s: float, source: int, rank: int) -> None:
            message = posted[source, rank].popleft()
            if message.there_s is None:
                leave(now_s, source, rank, message)
            resume(max(now_s, message.there_s), rank, message.payload)

        for rank in range(self.num_ranks):
            resume(0.0, rank)
        while events:
            now_s, _, rank, value = heapq.heappop(events)
            try:
                kind, *what = programs[rank].send(value)
            except StopIteration:
                ended_s, num_done = max(ended_s, now_s), num_done + 1
                continue
            if kind == "send":
                to, message = what[0], Message(what[1])
                posted[rank, to].append(message)
                if not self.meets:
                    leave(now_s, rank, to, message)
                if waiting.get(to) == rank:
                    del waiting[to]
                    deliver(now_s, rank, to)
                resume(now_s, rank, message)
            elif kind == "sent":
                if what[0].there_s is None:
                    what[0].waiter = rank
                else:
                    resume(max(now_s, what[0].there_s), rank)
            elif kind == "spend":
                resume(now_s + what[0], rank)
            elif posted[what[0], rank]:
                deliver(now_s, what[0], rank)
            else:
                waiting[rank] = what[0]
        assert num_done == self.num_ranks, "a rank waits for what nobody sends"
        return ended_s

    def add(self, rank: int, first: int, values: Sequence[int]) -> tuple[str, float]:
        """Adds to a rank's own list from `first` on; what it yields then."""
        for i, value in enumerate(values, first):
            self.data[rank][i] += value
        return ("spend", len(values) * ELEMENT_BYTES / self.sum_Bps)

    def put(self, rank: int, first: int, values: Sequence[int]) -> None:
        """Overwrites."""
        self.data[rank][first : first + len(values)] = values


def parts(sim: Simulator, num: int) -> list[slice]:
    size = len(sim.data[0]) // num
    return [slice(i * size, (i + 1) * size) for i in range(num)]


def ring_program(sim, rank):
    """Reduce-scatter and all-gather in a ring, each to the next."""
    num, spans = sim.num_ranks, parts(sim, sim.num_ranks)
    after, before = (rank + 1) % num, rank - 1 if rank else num - 1
    for step in range(num - 1):
        yield ("send", after, sim.data[rank][spans[(rank - step) % num]])
        got = yield ("recv", before)
        yield sim.add(rank, spans[(rank - step - 1) % num].start, got)
    for step in range(num - 1):
        yield ("send", after, sim.data[rank][spans[(rank + 1 - step) % num]])
        got = yield ("recv", before)
        sim.put(rank, spans[(rank - step) % num].start, got)


def gloo_program(sim, rank):
    """Segments, two under way, each rank sends to the one before it."""
    num = sim.num_ranks
    spans = parts(sim, num)
    size = spans[0].stop
    count = max(2, math.ceil(size * ELEMENT_BYTES / GLOO_SEGMENT_BYTES))
    assert size % count == 0
    pieces = [(step, i) for step in range(num - 1) for i in range(count)]
    for adding in (True, False):

        def span(part, i):
            first = spans[part % num].start + i * size // count
            return slice(first, first + size // count)

        flying = deque()

        def finish(flying=flying, adding=adding, span=span):
            (step, i), handle = flying.popleft()
            got = yield ("recv", (rank + 1) % num)
            where = span(rank + step + (2 if adding else 1), i)
            if adding:
                yield sim.add(rank, where.start, got)
            else:
                sim.put(rank, where.start, got)
            yield ("sent", handle)

        for step, i in pieces:
            if len(flying) == 2:
                yield from finish()
            handle = yield ("send", (rank - 1) % num, sim.data[rank][span(rank + step + (1 if adding else 0), i)])
            flying.append(((step, i), handle))
        while flying:
            yield from finish()


def broadcast_program(sim, rank):
    has = rank == 0
    for step in (1 << i for i in reversed(range((sim.num_ranks - 1).bit_length()))):
        if has and rank + step < sim.num_ranks and not rank % (2 * step):
            handle = yield ("send", rank + step, sim.data[rank])
            yield ("sent", handle)
        elif not has and rank % (2 * step) == step:
            got = yield ("recv", rank - step)
            sim.put(rank, 0, got)
            has = True


def alltoall_program(sim, rank):
    num, spans, mine = sim.num_ranks, parts(sim, sim.num_ranks), list(sim.data[rank])
    others = [(rank + i) % num for i in range(1, num)]
    for other in others:
        yield ("send", other, mine[spans[other]])
    for other in reversed(others):
        sim.put(rank, spans[other].start, (yield ("recv", other)))


def chain_program(num_segments):
    def program(sim, rank):
        for span in parts(sim, num_segments):
            if rank:
                sim.put(rank, span.start, (yield ("recv", rank - 1)))
            if rank + 1 < sim.num_ranks:
                yield ("sent", (yield ("send", rank + 1, sim.data[rank][span])))

    return program


def equal(num_ranks, num_elements, wire=WIRE, sum_Bps=math.inf, meets=False):
    """Equal links, random data, and the sum that must come out."""
    rng = random.Random(num_ranks * 1000 + num_elements)
    data = [[rng.randrange(1000) for _ in range(num_elements)] for _ in range(num_ranks)]
    total = [sum(column) for column in zip(*data, strict=True)]
    return Simulator(lambda a, b: wire, data, sum_Bps, meets), total


def even(num_ranks, wire=WIRE, sum_Bps=math.inf, hosts=None):
    """A ring of equal links."""
    wires = (wire,) * num_ranks
    names = tuple(hosts or (f"h{i}" for i in range(num_ranks)))
    return Ring(hosts=names, links=wires, reverse_links=wires, sum_Bps=(sum_Bps,) * num_ranks)


RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 11, 16]


def ring_s(size_bytes, num_ranks, wire=WIRE):
    """2(n-1)·(α + S/nβ), in closed form.   [Patarasuk & Yuan 2009]"""
    return 2 * (num_ranks - 1) * (wire.latency_s + size_bytes / num_ranks / wire.bandwidth_Bps)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_simulated_ring_all_reduce_time_matches_formula_and_sums_correctly(num_ranks):
    num_elements = 16 * num_ranks * 3
    sim, total = equal(num_ranks, num_elements)
    took_s = sim.run(ring_program)
    assert all(data == total for data in sim.data)
    size = num_elements * ELEMENT_BYTES
    assert took_s == pytest.approx(ring_s(size, num_ranks), rel=1e-9)
    if num_ranks > 1:
        assert took_s == pytest.approx(2 * ring_phase_s(ring_links(even(num_ranks).links), size / num_ranks), rel=1e-9)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_simulated_bytes_match_formulas(num_ranks):
    num_elements = 16 * num_ranks * 3
    size = num_elements * ELEMENT_BYTES
    for program, collective in ((ring_program, "all_reduce"), (alltoall_program, "all_to_all")):
        sim, _ = equal(num_ranks, num_elements)
        sim.run(program)
        assert sim.sent_bytes == pytest.approx([sent_bytes(collective, size, num_ranks)] * num_ranks, rel=1e-12)
    sim, _ = equal(num_ranks, num_elements, meets=True)
    sim.run(broadcast_program)
    assert max(sim.sent_bytes) == sent_bytes("broadcast", size, num_ranks)
    assert all(data == sim.data[0] for data in sim.data)


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 9])
def test_segment_count_formula_matches_simulated_optimum(num_ranks):
    num_elements, hops = 5040, num_ranks - 1
    size = num_elements * ELEMENT_BYTES
    wire = LinkModel(latency_s=1e-5, bandwidth_Bps=1e8)
    took_s = {}
    for segments in (1, 2, 3, 4, 6, 8, 10, 12, 15, 20, 24, 30, 40, 60):
        sim, _ = equal(num_ranks, num_elements, wire)
        took_s[segments] = sim.run(chain_program(segments))
        assert all(data == sim.data[0] for data in sim.data)
        exact_s = (hops + segments - 1) * (wire.latency_s + size / segments / wire.bandwidth_Bps)
        assert took_s[segments] == pytest.approx(exact_s, rel=1e-9)
    assert pipelined_s(size, hops, wire) <= min(took_s.values()) * (1 + 1e-12)
    assert pipelined_s(size, hops, wire) == pytest.approx(min(took_s.values()), rel=0.01)
    if hops > 1:
        more_s = 2 * math.sqrt((hops - 1) * wire.latency_s * size / wire.bandwidth_Bps)
        expected_s = (hops - 1) * wire.latency_s + size / wire.bandwidth_Bps + more_s
        assert pipelined_s(size, hops, wire) == pytest.approx(expected_s)


def uneven(rng, num_ranks):
    """Random links; wires of every pair, and the ring over them."""
    wire = {
        (a, b): LinkModel(
            latency_s=rng.choice([1e-5, 1e-4, 1e-3]) * rng.random(), bandwidth_Bps=10 ** rng.uniform(6, 9)
        )
        for a in range(num_ranks)
        for b in range(num_ranks)
        if a != b
    }
    around = Ring(
        hosts=tuple(f"h{i}" for i in range(num_ranks)),
        links=tuple(wire[i, (i + 1) % num_ranks] for i in range(num_ranks)),
        reverse_links=tuple(wire[i, (i - 1) % num_ranks] for i in range(num_ranks)),
        sum_Bps=(math.inf,) * num_ranks,
    )
    return wire, around


def test_unequal_links_are_bounded_by_the_slowest():
    rng, shares = random.Random(7), []
    for _ in range(150):
        num_ranks = rng.randrange(2, 9)
        wire, around = uneven(rng, num_ranks)
        sim, total = equal(num_ranks, num_ranks * rng.choice([10, 100, 1000]))
        sim.wire = lambda a, b, wire=wire: wire[a, b]
        took_s = sim.run(ring_program)
        assert all(data == total for data in sim.data)
        part = len(total) * ELEMENT_BYTES / num_ranks
        steps = 2 * (num_ranks - 1)
        least_s = steps * part / min(w.bandwidth_Bps for w in around.links)
        formula_s = 2 * ring_phase_s(around.to_next, part)
        assert least_s <= took_s <= formula_s * (1 + 1e-9)
        assert formula_s <= steps * max(w.latency_s + part / w.bandwidth_Bps for w in around.links) * (1 + 1e-9)
        shares.append(took_s / formula_s)
    assert sorted(shares)[len(shares) // 2] > 0.85


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("sum_Bps", [math.inf, 1e9, 3e8, 1e7])
def test_gloo_adds_one_segment_while_the_next_arrives(num_ranks, sum_Bps):
    """What `collective_s` says against Gloo's own order of segments."""
    num_elements = num_ranks * 2520
    sim, total = equal(num_ranks, num_elements, sum_Bps=sum_Bps)
    took_s = sim.run(gloo_program)
    assert all(data == total for data in sim.data)
    assert max(sim.sent_bytes) == sent_bytes("all_reduce", num_elements * ELEMENT_BYTES, num_ranks)
    said_s = collective_s("all_reduce", num_elements * ELEMENT_BYTES, even(num_ranks, sum_Bps=sum_Bps), "gloo")
    assert took_s <= said_s * (1 + 1e-9)
    assert said_s - took_s <= 2 * (num_ranks - 1) * WIRE.latency_s * (1 + 1e-9)  # the simulator's α hides, too


@pytest.mark.parametrize("latency_s", [1e-6, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("sum_Bps", [math.inf, 4e6])
def test_two_gloo_segments_in_flight_bound_high_latency_link(monkeypatch, latency_s, sum_Bps):
    monkeypatch.setattr(collective_cost, "GLOO_SEGMENT_BYTES", 1 << 10)
    monkeypatch.setitem(globals(), "GLOO_SEGMENT_BYTES", 1 << 10)
    wire = LinkModel(latency_s=latency_s, bandwidth_Bps=1e7)
    num_ranks, num_elements = 4, 4 * 128 * 20  # 20 segments a part
    sim, total = equal(num_ranks, num_elements, wire, sum_Bps)
    took_s = sim.run(gloo_program)
    assert all(data == total for data in sim.data)
    said_s = collective_s("all_reduce", num_elements * ELEMENT_BYTES, even(num_ranks, wire, sum_Bps), "gloo")
    assert said_s == pytest.approx(took_s, rel=0.03, abs=2 * (num_ranks - 1) * latency_s)
    assert said_s >= took_s * (1 - 0.01)


@pytest.mark.parametrize("num_ranks", RANKS[1:])
def test_gloo_and_nccl_costs_over_equal_links_match_formulas(num_ranks):
    around, fast = even(num_ranks), LinkModel(latency_s=WIRE.latency_s, bandwidth_Bps=1e30)
    for size in (1e3, 1e5, 1e7):
        whole_s = ring_s(size, num_ranks)
        assert collective_s("all_reduce", size, around, "gloo") == pytest.approx(whole_s)
        assert collective_s("reduce_scatter", size, around, "gloo") == pytest.approx(whole_s)
        assert collective_s("reduce_scatter", size, around, "nccl") == pytest.approx(whole_s / 2)
        assert collective_s("all_gather", size, around, "nccl") == pytest.approx(whole_s / 2)
        assert collective_s("all_reduce", size, around, "nccl") <= whole_s * (1 + 1e-9)
        tree_s = math.ceil(math.log2(num_ranks)) * (WIRE.latency_s + size / WIRE.bandwidth_Bps)  # Thakur et al. 2005
        assert collective_s("broadcast", size, around, "gloo") == pytest.approx(tree_s)
        sim, _ = equal(num_ranks, num_ranks * 10)
        direct_s = collective_s("all_to_all", num_ranks * 10 * ELEMENT_BYTES, around, "nccl")
        assert sim.run(alltoall_program) == pytest.approx(direct_s, rel=1e-9)
    if num_ranks > 8:  # small messages: fewer hops; large ones: the ring
        assert collective_s("all_reduce", 8, even(num_ranks, fast), "nccl") < ring_s(8, num_ranks, fast) / 2
        assert collective_s("all_reduce", 1e12, around, "nccl") == pytest.approx(ring_s(1e12, num_ranks))


# docs/log/2026-11.csv: share of the wire (busbw / β) at 64 MiB between hosts at 1 Gbit/s with 2 and 3 ranks
MEASURED = {
    ("all_reduce", 2): 0.99,
    ("all_reduce", 3): 0.99,
    ("broadcast", 2): 1.00,
    ("broadcast", 3): 0.50,
    ("all_gather", 2): 0.50,
    ("all_gather", 3): 0.71,
    ("all_to_all", 2): 0.49,
    ("all_to_all", 3): 0.66,
}


@pytest.mark.parametrize(("collective", "num_ranks"), MEASURED)
def test_gloo_cost_matches_measured_bus_bandwidth(collective, num_ranks):
    wire, size = LinkModel(latency_s=2e-4, bandwidth_Bps=119.5e6), 1 << 26
    took_s = collective_s(collective, size, even(num_ranks, wire, 5e9), "gloo")
    share = bus_factor(collective, num_ranks) * size / took_s / wire.bandwidth_Bps
    assert share == pytest.approx(MEASURED[collective, num_ranks], rel=0.03)


def test_gloo_all_to_all_slows_when_socket_buffers_are_full():
    wire = LinkModel(latency_s=2e-4, bandwidth_Bps=119.5e6)
    for size, share, near in ((1 << 18, 1.0, 0.2), (1 << 20, 0.62, 0.05)):  # docs/log/2026-11.md
        took_s = collective_s("all_to_all", size, even(2, wire), "gloo")
        assert size / 2 / took_s / wire.bandwidth_Bps == pytest.approx(share, rel=near)


def ring_of(sizes, wire, sum_Bps=None):
    """Of so many ranks on each host, between which `wire` tells the links."""
    rates = HostRates(tokens_per_s={}, sum_Bps=sum_Bps, local=LinkModel(latency_s=1e-6, bandwidth_Bps=1e10))
    wires = {a: {b: wire(a, b) for b in sizes if b != a} for a in sizes}
    hosts = [name for name, num in sizes.items() for _ in range(num)]
    return build_ring(Cluster(slots=[], hosts=dict.fromkeys(sizes, rates), wires=wires), hosts)


def test_ring_crosses_each_host_link_once_per_direction():
    speed = {("a", "b"): 1.0, ("b", "c"): 2.0, ("c", "a"): 3.0, ("b", "a"): 4.0, ("c", "b"): 5.0, ("a", "c"): 6.0}

    def wire(a, b):
        return LinkModel(latency_s=0.0, bandwidth_Bps=speed[a, b])

    around = ring_of({"a": 2, "b": 1, "c": 3}, wire)
    assert around.hosts == ("a", "a", "b", "c", "c", "c")
    assert [w.bandwidth_Bps for w in around.links] == [1e10, 1.0, 2.0, 1e10, 1e10, 3.0]
    assert [w.bandwidth_Bps for w in around.reverse_links] == [6.0, 1e10, 4.0, 5.0, 1e10, 1e10]
    assert (around.host_sizes, around.sum_Bps) == ([2, 1, 3], (math.inf,) * 6)
    assert around.outer.bandwidth_Bps == 1.0
    assert around.inner.bandwidth_Bps == 1e10
    turned = ring_of({"a": 2, "c": 3, "b": 1}, wire)
    assert turned.hosts == ("a", "a", "c", "c", "c", "b")
    assert [w.bandwidth_Bps for w in turned.links] == [1e10, 6.0, 1e10, 1e10, 5.0, 4.0]
    # Gloo's all-reduce sends to the rank before, NCCL's to the next
    assert collective_s("all_reduce", 600, around, "gloo") == pytest.approx(10 * 100 / 4, rel=1e-3)
    assert collective_s("all_gather", 600, around, "gloo") == pytest.approx(5 * 100 / 1, rel=1e-3)
    assert collective_s("all_reduce", 6e9, around, "nccl") == pytest.approx(10 * 1e9 / 1, rel=1e-3)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_collective_time_grows_with_size_and_is_zero_for_one_rank(collective, backend):
    wire = LinkModel(latency_s=1e-4, bandwidth_Bps=1e8)
    assert collective_s(collective, 1e6, ring_of({"a": 1}, lambda a, b: wire), backend) == 0.0
    for sizes in ({"a": 1, "b": 1}, {"a": 2, "b": 2}, {"a": 4}, {"a": 1, "b": 3, "c": 2}, dict.fromkeys("abcdefg", 3)):
        around = ring_of(sizes, lambda a, b: wire, sum_Bps=5e9)
        times = [collective_s(collective, size, around, backend) for size in (0, 1, 1e3, 1e5, 1e6, 1e7, 1e9)]
        assert times == sorted(times)
        assert times[0] > 0
        if len(sizes) > 1 and collective != "broadcast":  # what must leave the host with most ranks
            n, most = around.num_ranks, max(around.host_sizes)
            leaving = {"all_reduce": 2 * (n - 1) / n, "all_to_all": most * (n - most) / n}.get(collective, (n - 1) / n)
            assert times[-1] >= leaving * 1e9 / 1e8


def test_ranks_of_one_host_share_its_link():
    wire = LinkModel(latency_s=0.0, bandwidth_Bps=1e8)
    two_by_four = ring_of({"a": 4, "b": 4}, lambda a, b: wire)
    # to-all: 4 ranks × 4 parts of 1/8 leave a host; a tree by rank: in its last round 4 buffers cross at once
    assert collective_s("all_to_all", 8e6, two_by_four, "nccl") == pytest.approx(4 * 4 * 1e6 / 1e8, rel=1e-3)
    assert collective_s("broadcast", 8e6, two_by_four, "gloo") == pytest.approx(
        4 * 8e6 / 1e8 + 2 * 8e6 / 1e10, rel=1e-3
    )


@pytest.mark.parametrize("sizes", [{"a": 8}, dict.fromkeys("abcd", 8), dict.fromkeys("abcd", 1)])
def test_nccl_reduces_inside_host_before_crossing_hosts(sizes):
    around = ring_of(sizes, lambda a, b: LinkModel(latency_s=2e-5, bandwidth_Bps=4e10))
    num_nodes, per_node = len(sizes), max(sizes.values())
    small_s = collective_s("all_reduce", 1, around, "nccl")
    hops_s = 2 * (per_node - 1) * 1e-6 + 2 * (num_nodes - 1).bit_length() * 2e-5
    assert small_s == pytest.approx(hops_s, rel=1e-3)


def brute_force(names, wires):
    def slowest(order):
        return min(wires[a][b].bandwidth_Bps for a, b in zip(order, [*order[1:], order[0]], strict=True))

    orders = [[names[0], *rest] for rest in itertools.permutations(names[1:])]
    return slowest, max(slowest(order) for order in orders)


def matrix(rng, num, values=None):
    names = [f"h{i}" for i in range(num)]
    return names, {
        a: {
            b: LinkModel(latency_s=0, bandwidth_Bps=rng.choice(values) if values else rng.random())
            for b in names
            if a != b
        }
        for a in names
    }


@pytest.mark.parametrize("values", [None, [1, 10], [1, 1, 1, 10], [1, 2, 5, 9]])
@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 6, 7, 8])
def test_best_ring_matches_brute_force(num, values):
    rng = random.Random(num)
    for _ in range(4 if num > 6 else 20):
        names, wires = matrix(rng, num, values)
        found = best_ring(names, wires)
        assert found[0] == names[0]
        assert sorted(found) == sorted(names)
        assert found == best_ring(names, wires)
        if num > 1:
            slowest, best = brute_force(names, wires)
            assert slowest(found) == best
            assert slowest(names) < best or found == names


def test_best_ring_of_sixteen_hosts_is_fast_to_compute():
    """A ring of fast links is hidden in random slower ones."""
    for seed in range(10):
        rng = random.Random(seed)
        names, wires = matrix(rng, 16)
        hidden = ["h0", *rng.sample(names[1:], 15)]
        for a, b in zip(hidden, [*hidden[1:], hidden[0]], strict=True):
            wires[a][b] = LinkModel(latency_s=0, bandwidth_Bps=2.0 + rng.random())
        assert best_ring(names, wires) == hidden
        for one in ((names, wires), matrix(rng, 16), matrix(rng, 16, [1, 1, 1, 10])):
            assert in_loops(functools.partial(best_ring, *one)) < 25  # 0.05 s
