"""How long does a collective take over these wires? Formulas, each with its source; nothing is measured here.

n  ranks    S  bytes of a collective's buffer    α  seconds of a message    β  bytes a second, each direction
γ  bytes a second that one thread adds to a buffer

Patarasuk & Yuan 2009: Bandwidth optimal all-reduce algorithms for clusters of workstations
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from evener.core.collective import Collective
from evener.core.link import Wire
from evener.core.prediction import Cluster
from evener.core.roster import Backend

INFINITE = float("inf")
GLOO_SEGMENT_BYTES = 1 << 20  # of a rank's part of an all-reduce: at most so much is in one message (Gloo's source)
# Gloo's all-gather and all-to-all hardly send while they receive. Time beside the perfect one with 2, 3 and 4 ranks:
# measured with 64 MiB, torch 2.13, 2026-11-21, at 1 Gbit/s, 4 ranks at 400 Mbit/s. Assumption: more are like 4.
# Swaps go by messages from rank to rank, which hinder each other on one cable: measured in training, 3 ranks at
# 100 Mbit/s, buckets of 4 MiB by packed, bf16 and int8, beside a ring, 2026-11-25. Assumption: more are like 3.
GLOO_STALL = {"all_gather": (2.0, 1.4, 1.1), "all_to_all": (2.0, 1.5, 1.65), "swap": (1.0, 1.2, 1.2)}
# What Gloo says beside the data of an all-reduce among n ranks is as if it were so many bytes more, n times: 48 bytes
# before each message and in two words about it, 4(n-1) messages. *Measured*: TCP's counters, 2 to 4 ranks, torch 2.13.
GLOO_WORDS_BYTES = 288
SOCKET_BYTES = 1 << 18  # of a message that a socket's buffers take at once; 2 ranks: 128 KiB has the wire, 512 KiB 0.62
MOST_STATES, FEW_STATES = 250, 30  # of a search for a ring of 10 hosts or more, before it gives up a bandwidth


def ring_all_reduce_bytes(size_bytes: int, num_ranks: int) -> int:
    """Bytes that each rank sends: 2(n-1)/n · S.   [Patarasuk & Yuan 2009]

    >>> ring_all_reduce_bytes(100, 1), ring_all_reduce_bytes(100, 2), ring_all_reduce_bytes(100, 4)
    (0, 100, 150)
    """
    return round(2 * (num_ranks - 1) / num_ranks * size_bytes)


def words_bytes(backend: Backend, num_ranks: int) -> int:
    """Of an all-reduce: its data and these are what travels.

    >>> [ring_all_reduce_bytes(words_bytes("gloo", n), n) for n in (2, 3, 4)], words_bytes("nccl", 2)
    ([576, 1152, 1728], 0)
    """
    return GLOO_WORDS_BYTES * num_ranks if backend == "gloo" else 0


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """busbw = factor · S/t: what a perfect algorithm sends through each rank's link.   [nccl-tests, PERFORMANCE.md]

    >>> [bus_factor(collective, 4) for collective in ("all_reduce", "all_gather", "broadcast")]
    [1.5, 0.75, 1.0]
    """
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(collective, share)


def sent_bytes(collective: Collective, size_bytes: float, num_ranks: int, backend: str = "gloo") -> float:
    """Bytes that the busiest rank really sends.   [Gloo's and PyTorch's sources; measured by the kernel's counters]

    All-reduce, all-gather and all-to-all send what they must. A broadcast of Gloo is a binomial tree: the root sends
    the buffer ⌈log₂ n⌉ times, NCCL's ring sends it once. Reduce-scatter on Gloo is an all-reduce: twice the textbook.

    >>> sent_bytes("reduce_scatter", 100, 2), sent_bytes("reduce_scatter", 100, 2, "nccl")
    (100.0, 50.0)
    >>> sent_bytes("broadcast", 100, 8), sent_bytes("broadcast", 100, 8, "nccl")
    (300.0, 100.0)
    """
    factor = bus_factor(collective, num_ranks)
    if backend == "gloo" and collective == "reduce_scatter":
        factor = bus_factor("all_reduce", num_ranks)
    if backend == "gloo" and collective == "broadcast":
        factor = float(_rounds(num_ranks))
    return factor * size_bytes


def reduced_bytes(collective: Collective, size_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank adds to its own in a ring: (n-1)/n · S where there is a sum, else 0.

    >>> reduced_bytes("all_reduce", 100, 4), reduced_bytes("all_gather", 100, 4)
    (75.0, 0.0)
    """
    return (num_ranks - 1) / num_ranks * size_bytes if collective in ("all_reduce", "reduce_scatter") else 0.0


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one collective goes. The four sum to it."""

    wire_s: float  # sent/β
    latency_s: float  # of the smallest message: rounds, wake-ups, the backend's own work
    reduction_s: float  # reduced/γ
    rest_s: float  # what these three do not explain: negative where the backend overlaps them

    @property
    def total_s(self) -> float:
        return self.wire_s + self.latency_s + self.reduction_s + self.rest_s


def split_collective(
    collective: Collective,
    size_bytes: float,
    num_ranks: int,
    *,
    time_s: float,
    latency_s: float,
    bandwidth_Bps: float,
    sum_Bps: float,
    backend: str = "gloo",
) -> Split:
    """A measured time against its model: t = α-term + sent/β + reduced/γ + rest.

    The α-term, `latency_s`, is what the same collective takes at its smallest size, less that size's other two terms.

    >>> split_collective("all_reduce", 100e6, 2, time_s=1.0, latency_s=0.01, bandwidth_Bps=125e6, sum_Bps=1e9)
    Split(wire_s=0.8, latency_s=0.01, reduction_s=0.05, rest_s=0.13999999999999996)
    """
    wire_s = sent_bytes(collective, size_bytes, num_ranks, backend) / bandwidth_Bps
    reduction_s = reduced_bytes(collective, size_bytes, num_ranks) / sum_Bps
    latency_s = max(0.0, min(latency_s, time_s - wire_s - reduction_s))
    return Split(
        wire_s=wire_s,
        latency_s=latency_s,
        reduction_s=reduction_s,
        rest_s=time_s - wire_s - latency_s - reduction_s,
    )


def _rounds(num_ranks: int) -> int:
    return max(0, num_ranks - 1).bit_length()


def pipelined_s(size_bytes: float, num_hops: int, wire: Wire) -> float:
    """A message that goes over k links one after another, cut into the best number m of segments.   [derived]

    The last segment leaves behind m-1 others and then takes k hops: t = (k+m-1)·(α + S/mβ). Its least value is at
    m = √((k-1)·S/αβ), where t = (k-1)·α + S/β + 2·√((k-1)·α·S/β): what a segment costs and what a pipe that is not yet
    full costs are then equal. One hop is not cut: α + S/β.

    >>> wire = Wire(latency_s=1e-3, bandwidth_Bps=125e6)
    >>> round(pipelined_s(100e6, 1, wire), 3), round(pipelined_s(100e6, 5, wire), 3)
    (0.801, 0.917)
    """
    cut = math.sqrt((num_hops - 1) * size_bytes / (wire.latency_s * wire.bandwidth_Bps)) if wire.latency_s else INFINITE
    if cut == INFINITE:
        return size_bytes / wire.bandwidth_Bps if num_hops else 0.0
    segments = max(1.0, cut)
    return (num_hops + segments - 1) * (wire.latency_s + size_bytes / (segments * wire.bandwidth_Bps))


class Lap(msgspec.Struct, frozen=True, kw_only=True):
    """The links that a part goes over on its way round a ring, alike ones once."""

    num: int
    kinds: tuple[Wire, ...]
    latencies_s: float  # of all of them together

    def at_most(self, sum_Bps: float) -> Lap:
        """The same where what arrives is added as it comes."""
        kinds = tuple(Wire(latency_s=wire.latency_s, bandwidth_Bps=min(wire.bandwidth_Bps, sum_Bps))
                      for wire in self.kinds)  # fmt: skip
        return msgspec.structs.replace(self, kinds=kinds)


def lap_of(wires: Sequence[Wire]) -> Lap:
    """Of these links, in any order."""
    counted = Counter(wires)
    latencies_s = math.fsum(num * wire.latency_s for wire, num in counted.items())
    return Lap(num=len(wires), kinds=tuple(counted), latencies_s=latencies_s)


class Ring(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Who sends to whom. Slowest link and slowest reducer set the pace of every step."""

    hosts: tuple[str, ...]  # of each rank; those of one host stand together
    wires: tuple[Wire, ...]  # from each rank to the next, the last one's to the first
    back: tuple[Wire, ...]  # from each rank to the one before it
    sum_Bps: tuple[float, ...]  # γ of each rank

    @property
    def num_ranks(self) -> int:
        """n."""
        return len(self.hosts)

    @cached_property
    def host_sizes(self) -> list[int]:
        """Ranks of each host, in order."""
        return list(Counter(self.hosts).values())

    @cached_property
    def to_next(self) -> Lap:
        """All links in the direction in which ranks are counted."""
        return lap_of(self.wires)

    @cached_property
    def to_previous(self) -> Lap:
        """All links in the other direction."""
        return lap_of(self.back)

    @cached_property
    def least_sum_Bps(self) -> float:
        """γ of the slowest rank."""
        return min(self.sum_Bps)

    @property
    def inner(self) -> Wire | None:
        """The worst of the links inside hosts, in both directions; None: there is none."""
        return self._slowest[0]

    @property
    def outer(self) -> Wire | None:
        """The worst of the links between hosts."""
        return self._slowest[1]

    @cached_property
    def shared(self) -> tuple[Wire | None, int]:
        """The worst shared medium between hosts, and how many of the ring's links it has to carry."""
        found = [wire for wire in self.wires if wire.is_shared]
        return (_worst(found) if found else None), len(found)

    @cached_property
    def _slowest(self) -> tuple[Wire | None, Wire | None]:
        ends = zip(self.hosts, self.hosts[1:] + self.hosts[:1], self.wires, self.back[1:] + self.back[:1], strict=True)
        kinds = {(here != there, to, back) for here, there, to, back in ends} if self.num_ranks > 1 else set()
        inside, between = ([wire for crosses, *pair in kinds if crosses == crossing for wire in pair]
                           for crossing in (False, True))  # fmt: skip
        return _worst(inside) if inside else None, _worst(between) if between else None


def ring(cluster: Cluster, hosts: Sequence[str]) -> Ring:
    """Ranks in their order, `hosts` being where each is; those of one host stand together.

    Inside a host its `local` wire joins rank to rank; between hosts go the last rank of one and the first of the next.
    So however many ranks share a host's network connection, a ring crosses it once each way.
    """

    def wire(a: str, b: str) -> Wire:
        if a != b:
            return cluster.between(a, b)
        local = cluster.hosts[a].local
        assert local is not None, f"{a} has several ranks, and no wire between them"
        return local

    pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True)) if len(hosts) > 1 else []
    if cluster.wire is not None and not cluster.wires:  # alike both ways
        there = [cluster.wire if a != b else wire(a, b) for a, b in pairs]
        back = there
    else:
        there, back = [wire(a, b) for a, b in pairs], [wire(b, a) for a, b in pairs]  # from the next rank to this one
    return Ring(
        hosts=tuple(hosts),
        wires=tuple(there),
        back=tuple(back[-1:] + back[:-1]),
        sum_Bps=tuple(cluster.hosts[name].sum_Bps or INFINITE for name in hosts),
    )


def lap_s(lap: Lap, part_bytes: float) -> float:
    """n-1 steps of a ring in which each rank passes a part on: the least of two upper bounds.   [derived]

    A step is over when its slowest link is: (n-1)·max(α + part/β). But links wait for each other for data alone. In a
    chain of n-1 messages, each the cause of the next, one either goes a hop further, with a latency, or leaves the same
    rank again, without one. So (n-1)·max(part/β) + Σα - min α is a bound as well. Equal links reach both.

    >>> slow, fast = Wire(latency_s=0.125, bandwidth_Bps=10), Wire(latency_s=0.125, bandwidth_Bps=100)
    >>> lap_s(lap_of([slow, fast, fast]), 10)
    2.25
    """
    if not lap.num:
        return 0.0
    steps = lap.num - 1
    lockstep_s = steps * max(wire.latency_s + part_bytes / wire.bandwidth_Bps for wire in lap.kinds)
    sending_s = part_bytes / min(wire.bandwidth_Bps for wire in lap.kinds)
    least_s = min(wire.latency_s for wire in lap.kinds)
    return min(lockstep_s, steps * sending_s + lap.latencies_s - least_s)


def backend_s(collective: Collective, size_bytes: float, ring: Ring, backend: str) -> float:
    """Seconds of a collective as the backend really does it, over these wires.

    >>> wire = Wire(latency_s=1e-3, bandwidth_Bps=125e6)
    >>> two = Ring(hosts=("a", "b"), wires=(wire, wire), back=(wire, wire), sum_Bps=(1e9, 1e9))
    >>> round(backend_s("all_reduce", 100e6, two, "gloo"), 3), round(backend_s("all_gather", 100e6, two, "gloo"), 3)
    (0.803, 0.799)
    """
    if ring.num_ranks == 1:
        return 0.0
    own_s = (_nccl_s if backend == "nccl" else _gloo_s)(collective, size_bytes, ring)
    medium, num_links = ring.shared
    if medium is None:
        return own_s
    return max(own_s, num_links * _bytes_a_link(collective, size_bytes, ring, backend) / medium.bandwidth_Bps)


def _bytes_a_link(collective: Collective, size_bytes: float, ring: Ring, backend: str) -> float:
    """Bytes between hosts, in the mean of the ring's links between them: a shared medium carries one after another."""
    num_ranks, sizes = ring.num_ranks, ring.host_sizes
    if collective in ("all_to_all", "swap"):
        leaving = num_ranks**2 - sum(size**2 for size in sizes)
        return leaving * size_bytes / num_ranks / len(sizes)
    if collective == "broadcast":
        return (len(sizes) - 1) * size_bytes / len(sizes)
    return sent_bytes(collective, size_bytes, num_ranks, backend)


def _gloo_s(collective: Collective, size_bytes: float, ring: Ring) -> float:
    """[Gloo's source; PyTorch's ProcessGroupGloo]

    All-reduce: a ring in which each rank sends to the one *before* it (*measured* on its sockets). A part is cut into
    m ≥ 2 segments of at most 1 MiB, two of them under way, and one is added while the next arrives. So wire and sum are
    a maximum, not a sum; of one segment both show. (*Measured*: 0.98 to 0.99 of the wire, 64 MiB, 1 Gbit/s, 2 and 3
    ranks.) Two under way are no faster than m/2 · (α + s/β + s/γ) a step: the bound where latency exceeds a segment's
    time. Reduce-scatter: an all-reduce, *measured* 1.1 to 1.2 times as long for copies that this leaves out. Broadcast:
    a binomial tree by rank. *Measured* with 4 ranks and 16 MiB: 2.2 S/β instead of 2, for a rank's two sends share its
    link instead of taking turns. All-gather: a ring, to the next. All-to-all: every pair at the same time. Swap:
    the same, by messages that stall less (*measured*: 0.952 of 1 Gbit/s, 2 ranks, 40 MB).
    """
    num_ranks = ring.num_ranks
    part = size_bytes / num_ranks
    if collective in ("all_reduce", "reduce_scatter"):
        gamma, back = ring.least_sum_Bps, ring.to_previous
        segments = max(2, math.ceil(part / GLOO_SEGMENT_BYTES))
        segment = part / segments
        window_s = (num_ranks - 1) * segments / 2 * max(w.latency_s + segment / w.bandwidth_Bps for w in back.kinds)
        adding = max(lap_s(back.at_most(gamma), part), window_s + (num_ranks - 1) * part / gamma / 2)
        return adding + segment / max(gamma, _worst(back.kinds).bandwidth_Bps) + max(lap_s(back, part), window_s)
    if collective == "broadcast":
        return _binomial_s(size_bytes, ring)
    stall = GLOO_STALL[collective][min(num_ranks, 4) - 2]
    part += (stall - 1) * (part if collective == "swap" else max(0.0, part - SOCKET_BYTES))
    return lap_s(ring.to_next, part) if collective == "all_gather" else _all_to_all_s(part, ring)


def _nccl_s(collective: Collective, size_bytes: float, ring: Ring) -> float:
    """[NCCL's documentation]

    All-reduce: the ring or the tree, whichever is shorter. Both go through all ranks of a host before they leave it,
    and sums hide behind the wire. Broadcast is a chain in segments, all-to-all direct.
    """
    num_ranks, sizes = ring.num_ranks, ring.host_sizes
    part = size_bytes / num_ranks
    if collective in ("all_to_all", "swap"):
        return _all_to_all_s(part, ring)
    inner, outer = ring.inner, ring.outer
    beta = min(wire.bandwidth_Bps for wire in (inner, outer) if wire)
    if collective == "broadcast":
        hops = num_ranks - 1
        alpha_s = (ring.to_next.latencies_s - ring.wires[-1].latency_s) / hops
        return pipelined_s(size_bytes, hops, Wire(latency_s=alpha_s, bandwidth_Bps=beta))
    adding = ring.to_next.at_most(ring.least_sum_Bps)
    if collective == "all_gather":
        return lap_s(ring.to_next, part)
    if collective == "reduce_scatter":
        return lap_s(adding, part)
    ring_s = lap_s(adding, part) + lap_s(ring.to_next, part)
    return nccl_all_reduce_s(size_bytes, ring_s, max(sizes), len(sizes), inner, outer, ring.least_sum_Bps)[0]


def nccl_all_reduce_s(size_bytes: float, ring_s: float, ranks_per_host: int, num_hosts: int, inner: Wire | None,
                      outer: Wire | None, sum_Bps: float) -> tuple[float, str]:  # fmt: skip
    """NCCL's choice: (seconds, "ring" or "tree"), whichever is shorter; `ring_s` is what the ring takes.

    The tree is a chain inside hosts, over `inner`, and binary across them, over `outer`. Two trees carry half the
    buffer each, so every rank sends 2S at most, up and down at the same time, cut into segments that follow one
    another. The slowest link sets the pace.   [Sanders, Speck & Träff 2009; NCCL, src/graph/tuning.cc]
    """
    within, across = 2 * (ranks_per_host - 1), 2 * _rounds(num_hosts)
    alphas_s = within * (inner.latency_s if inner else 0.0) + across * (outer.latency_s if outer else 0.0)
    beta = min(sum_Bps, *(wire.bandwidth_Bps for wire in (inner, outer) if wire))
    hop = Wire(latency_s=alphas_s / (within + across), bandwidth_Bps=beta)
    tree_s = pipelined_s(2 * size_bytes, within + across, hop)
    return (tree_s, "tree") if tree_s < ring_s else (ring_s, "ring")


def _all_to_all_s(part_bytes: float, ring: Ring) -> float:
    """All parts leave at the same time: of a host with R ranks R(n-R) over its connection, R-1 a rank inside.

    The slowest wires of the ring stand for those that it does not have.
    """
    inner, outer, most = ring.inner, ring.outer, max(ring.host_sizes)
    leaving = max(size * (ring.num_ranks - size) for size in ring.host_sizes)
    return max(
        inner.latency_s + (most - 1) * part_bytes / inner.bandwidth_Bps if inner else 0.0,
        outer.latency_s + leaving * part_bytes / outer.bandwidth_Bps if outer else 0.0,
    )


def _binomial_s(size_bytes: float, ring: Ring) -> float:
    """Round i: rank r < 2^i sends to r + 2^i. What leaves or enters a host in one round shares its connection."""
    inner, outer, total_s = ring.inner, ring.outer, 0.0
    for step in (1 << i for i in range(_rounds(ring.num_ranks))):
        pairs = [(ring.hosts[r], ring.hosts[r + step]) for r in range(min(step, ring.num_ranks - step))]
        crossing = [pair for pair in pairs if pair[0] != pair[1]]
        most = max((max(Counter(ends).values()) for ends in zip(*crossing, strict=True)), default=0)
        inner_s = inner.latency_s + size_bytes / inner.bandwidth_Bps if inner and len(crossing) < len(pairs) else 0.0
        outer_s = outer.latency_s + most * size_bytes / outer.bandwidth_Bps if outer and most else 0.0
        total_s += max(inner_s, outer_s)
    return total_s


def _worst(wires: Iterable[Wire]) -> Wire:
    wires = list(wires)
    return Wire(
        latency_s=max(wire.latency_s for wire in wires), bandwidth_Bps=min(wire.bandwidth_Bps for wire in wires)
    )


def best_ring(names: Sequence[str], wires: Mapping[str, Mapping[str, Wire]]) -> list[str]:
    """The order of hosts whose slowest link, each to the next and the last to the first, has most bandwidth.

    The bottleneck travelling salesman in a directed graph: halve the list of bandwidths; is there a ring over links of
    at least this one? Exact up to 9 hosts; with more, a search that takes too long counts as no. The first host stays
    first, and only a better order replaces the fleet's own. Gloo's all-reduce sends to the rank before: for it give
    `wires` turned round, [b][a] for [a][b].

    >>> fast, slow = Wire(latency_s=0, bandwidth_Bps=10), Wire(latency_s=0, bandwidth_Bps=1)
    >>> links = {"a": {"b": slow, "c": fast}, "b": {"a": fast, "c": slow}, "c": {"a": slow, "b": fast}}
    >>> best_ring(["a", "b", "c"], links)
    ['a', 'c', 'b']
    """
    num = len(names)
    speeds = [[wires[a][b].bandwidth_Bps if a != b else 0.0 for b in names] for a in names]

    def slowest(order: Sequence[int]) -> float:
        return min(speeds[a][b] for a, b in zip(order, [*order[1:], order[0]], strict=True))

    best = list(range(num))
    if num > 2:
        most = min(
            max(speeds) for speeds in [*speeds, *zip(*speeds, strict=True)]
        )  # every host has to send and receive
        now = slowest(best)
        steps = sorted({speed for row in speeds for speed in row if now < speed <= most})
        low, high = 0, len(steps)
        while low < high:
            middle = (low + high) // 2
            found = _cycle(speeds, steps[middle])
            if found:
                best, low = found, bisect_right(steps, slowest(found))
            else:
                high = middle
        above = steps[low:][-40:] if num > 9 else []  # what was given up may hide an easy one further up
        best = next((found for least in reversed(above) if (found := _cycle(speeds, least, FEW_STATES))), best)
    return [names[i] for i in best]


def _cycle(speeds: Sequence[Sequence[float]], least: float, most_states: int = MOST_STATES) -> list[int] | None:
    """A ring from 0 through all over links of at least so much; bits of an integer are a set of hosts."""
    num = len(speeds)
    out = [sum(1 << b for b in range(num) if b != a and speeds[a][b] >= least) for a in range(num)]
    into = [sum(1 << a for a in range(num) if a != b and speeds[a][b] >= least) for b in range(num)]
    dead: set[tuple[int, int]] = set()
    allowed = most_states if num > 9 else 1 << num + 4

    def go(order: list[int], left: int) -> list[int] | None:
        last = order[-1]
        if not left:
            return order if out[last] & 1 else None
        if (left, last) in dead or len(dead) >= allowed:
            return None
        ahead = [b for b in range(num) if out[last] & left & 1 << b]
        if all(into[b] & (left | 1 << last) and out[b] & (left | 1) for b in range(num) if left & 1 << b):
            for b in sorted(ahead, key=lambda b: (into[b] & left).bit_count()):  # first the one that fewest can reach
                if found := go([*order, b], left & ~(1 << b)):
                    return found
        dead.add((left, last))
        return None

    return go([0], (1 << num) - 2)
