"""Collective cost: formulas for the time and bytes of a collective over given links, each with its source.

n  ranks    S  bytes of a collective's buffer    α  latency of a message, s    β  bandwidth in each direction, bytes/s
γ  bytes/s that one thread adds to a buffer

Patarasuk & Yuan 2009: Bandwidth optimal all-reduce algorithms for clusters of workstations
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from evener.core.cluster.collective_results import Collective
from evener.core.cluster.link import LinkModel
from evener.core.run.prediction import Cluster
from evener.core.run.roster import Backend

INFINITE = float("inf")
GLOO_SEGMENT_BYTES = 1 << 20  # largest message of a rank's part of an all-reduce (Gloo's source)
# Gloo's all-gather and all-to-all hardly send while they receive. Time relative to the ideal with 2, 3 and 4 ranks:
# *measured* with 64 MiB, torch 2.13, 2026-11-21, at 1 Gbit/s, 4 ranks at 400 Mbit/s. *Assumption*: more are like 4.
# Pairwise exchanges ("swap") send point-to-point messages, which slow each other down on one cable: *measured* in
# training, 3 ranks at 100 Mbit/s, buckets of 4 MiB by packed, bf16 and int8, relative to a ring, 2026-11-25.
# *Assumption*: more are like 3.
GLOO_STALL_FACTOR = {"all_gather": (2.0, 1.4, 1.1), "all_to_all": (2.0, 1.5, 1.65), "swap": (1.0, 1.2, 1.2)}
# Gloo's protocol overhead of an all-reduce among n ranks, as extra buffer bytes per rank: 4(n-1) messages, each with
# a header and two control messages of 48 bytes. *Measured*: TCP's counters, 2 to 4 ranks, torch 2.13.
GLOO_OVERHEAD_BYTES = 288
# Bytes of a message that the socket buffers take at once. With 2 ranks 128 KiB get the link's bandwidth, 512 KiB 0.62.
SOCKET_BUFFER_BYTES = 1 << 18
# dead ends after which the search for a ring of 10 hosts or more gives up on a bandwidth
MAX_SEARCH_STATES, MAX_RETRY_STATES = 250, 30


def ring_all_reduce_bytes(size_bytes: int, num_ranks: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce: 2(n-1)/n · S.   [Patarasuk & Yuan 2009]

    >>> ring_all_reduce_bytes(100, 1), ring_all_reduce_bytes(100, 2), ring_all_reduce_bytes(100, 4)
    (0, 100, 150)
    """
    return round(2 * (num_ranks - 1) / num_ranks * size_bytes)


def protocol_overhead_bytes(backend: Backend, num_ranks: int) -> int:
    """Return the protocol overhead of an all-reduce, as bytes to add to its buffer.

    >>> ([ring_all_reduce_bytes(protocol_overhead_bytes("gloo", n), n) for n in (2, 3, 4)],
    ...  protocol_overhead_bytes("nccl", 2))
    ([576, 1152, 1728], 0)
    """
    return GLOO_OVERHEAD_BYTES * num_ranks if backend == "gloo" else 0


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """Return the bytes that an ideal algorithm sends over each rank's link, divided by the bytes of the buffer.

    Bus bandwidth (busbw) is this factor times buffer bytes per second.   [nccl-tests, PERFORMANCE.md]

    >>> [bus_factor(collective, 4) for collective in ("all_reduce", "all_gather", "broadcast")]
    [1.5, 0.75, 1.0]
    """
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(collective, share)


def sent_bytes(collective: Collective, size_bytes: float, num_ranks: int, backend: str = "gloo") -> float:
    """Return the bytes that the busiest rank sends.   [Gloo's and PyTorch's sources; measured by the kernel's counters]

    All-reduce, all-gather and all-to-all send the minimum. A broadcast of Gloo is a binomial tree: the root sends the
    buffer ⌈log₂ n⌉ times, NCCL's ring sends it once. Reduce-scatter on Gloo is an all-reduce: twice the minimum.

    >>> sent_bytes("reduce_scatter", 100, 2), sent_bytes("reduce_scatter", 100, 2, "nccl")
    (100.0, 50.0)
    >>> sent_bytes("broadcast", 100, 8), sent_bytes("broadcast", 100, 8, "nccl")
    (300.0, 100.0)
    """
    factor = bus_factor(collective, num_ranks)
    if backend == "gloo" and collective == "reduce_scatter":
        factor = bus_factor("all_reduce", num_ranks)
    if backend == "gloo" and collective == "broadcast":
        factor = float(_tree_depth(num_ranks))
    return factor * size_bytes


def reduced_bytes(collective: Collective, size_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank adds to its own in a ring: (n-1)/n · S for a reduction, else 0.

    >>> reduced_bytes("all_reduce", 100, 4), reduced_bytes("all_gather", 100, 4)
    (75.0, 0.0)
    """
    return (num_ranks - 1) / num_ranks * size_bytes if collective in ("all_reduce", "reduce_scatter") else 0.0


class CollectiveTimeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one collective, split into four parts that sum to it."""

    wire_s: float  # bytes sent / bandwidth of the link
    latency_s: float  # of the smallest message: rounds, wake-ups, the backend's own work
    reduction_s: float  # bytes reduced / rate at which a thread adds them
    rest_s: float  # not explained by the other three: negative where the backend overlaps them

    @property
    def total_s(self) -> float:
        return self.wire_s + self.latency_s + self.reduction_s + self.rest_s


def split_collective_time(
    collective: Collective,
    size_bytes: float,
    num_ranks: int,
    *,
    time_s: float,
    latency_s: float,
    bandwidth_Bps: float,
    sum_Bps: float,
    backend: str = "gloo",
) -> CollectiveTimeSplit:
    """Split a measured `time_s` into bytes sent / `bandwidth_Bps` + bytes reduced / `sum_Bps` + latency + rest.

    Pass as `latency_s` the time of the same collective at its smallest size, less the first two terms at that size. It
    is lowered where the sum would exceed `time_s`.

    >>> split_collective_time("all_reduce", 100e6, 2, time_s=1.0, latency_s=0.01, bandwidth_Bps=125e6, sum_Bps=1e9)
    CollectiveTimeSplit(wire_s=0.8, latency_s=0.01, reduction_s=0.05, rest_s=0.13999999999999996)
    """
    wire_s = sent_bytes(collective, size_bytes, num_ranks, backend) / bandwidth_Bps
    reduction_s = reduced_bytes(collective, size_bytes, num_ranks) / sum_Bps
    latency_s = max(0.0, min(latency_s, time_s - wire_s - reduction_s))
    return CollectiveTimeSplit(
        wire_s=wire_s,
        latency_s=latency_s,
        reduction_s=reduction_s,
        rest_s=time_s - wire_s - latency_s - reduction_s,
    )


def _tree_depth(num_ranks: int) -> int:
    return max(0, num_ranks - 1).bit_length()


def pipelined_s(size_bytes: float, num_hops: int, link: LinkModel) -> float:
    """Return the seconds of a message over k = `num_hops` links in series, split into the best number m of segments.

    The last segment leaves after m-1 others and then takes k hops: t = (k+m-1)·(α + S/mβ). The minimum is at
    m = √((k-1)·S/αβ), where t = (k-1)·α + S/β + 2·√((k-1)·α·S/β): the cost per segment then equals the cost of filling
    the pipeline. One hop is not split: α + S/β.   [derived]

    >>> wire = LinkModel(latency_s=1e-3, bandwidth_Bps=125e6)
    >>> round(pipelined_s(100e6, 1, wire), 3), round(pipelined_s(100e6, 5, wire), 3)
    (0.801, 0.917)
    """
    cut = math.sqrt((num_hops - 1) * size_bytes / (link.latency_s * link.bandwidth_Bps)) if link.latency_s else INFINITE
    if cut == INFINITE:
        return size_bytes / link.bandwidth_Bps if num_hops else 0.0
    segments = max(1.0, cut)
    return (num_hops + segments - 1) * (link.latency_s + size_bytes / (segments * link.bandwidth_Bps))


class RingLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The links of a ring in one direction; `distinct` lists equal links once."""

    num: int
    distinct: tuple[LinkModel, ...]
    total_latency_s: float  # sum over all `num` links

    def capped_at(self, sum_Bps: float) -> RingLinks:
        """Return these links with bandwidth capped at `sum_Bps`, for data that is added to a buffer as it arrives."""
        kinds = tuple(LinkModel(latency_s=wire.latency_s, bandwidth_Bps=min(wire.bandwidth_Bps, sum_Bps))
                      for wire in self.distinct)  # fmt: skip
        return msgspec.structs.replace(self, distinct=kinds)


def ring_links(wires: Sequence[LinkModel]) -> RingLinks:
    """Collect the links of a ring, in any order."""
    counted = Counter(wires)
    latencies_s = math.fsum(num * wire.latency_s for wire, num in counted.items())
    return RingLinks(num=len(wires), distinct=tuple(counted), total_latency_s=latencies_s)


class Ring(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The ranks and links of a ring. The slowest link and the slowest reducer set the pace of every step."""

    hosts: tuple[str, ...]  # of each rank; the ranks of a host are adjacent
    links: tuple[LinkModel, ...]  # from each rank to the next, from the last to the first
    reverse_links: tuple[LinkModel, ...]  # from each rank to the previous one
    sum_Bps: tuple[float, ...]  # γ of each rank

    @property
    def num_ranks(self) -> int:
        return len(self.hosts)

    @cached_property
    def host_sizes(self) -> list[int]:
        """The number of ranks on each host, in order."""
        return list(Counter(self.hosts).values())

    @cached_property
    def to_next(self) -> RingLinks:
        """All links in the direction of increasing ranks."""
        return ring_links(self.links)

    @cached_property
    def to_previous(self) -> RingLinks:
        """All links in the other direction."""
        return ring_links(self.reverse_links)

    @cached_property
    def min_sum_Bps(self) -> float:
        """The bytes/s that the slowest rank adds to a buffer."""
        return min(self.sum_Bps)

    @property
    def inner(self) -> LinkModel | None:
        """The worst case of the links inside hosts, in both directions; None: there is none."""
        return self._worst_inner_outer[0]

    @property
    def outer(self) -> LinkModel | None:
        """The worst case of the links between hosts; None: there is none."""
        return self._worst_inner_outer[1]

    @cached_property
    def shared_medium(self) -> tuple[LinkModel | None, int]:
        """The worst case of the shared media between hosts, and how many of the ring's links they carry."""
        media = [wire for wire in self.links if wire.is_shared]
        return (_worst_case_link(media) if media else None), len(media)

    @cached_property
    def _worst_inner_outer(self) -> tuple[LinkModel | None, LinkModel | None]:
        ends = zip(
            self.hosts,
            self.hosts[1:] + self.hosts[:1],
            self.links,
            self.reverse_links[1:] + self.reverse_links[:1],
            strict=True,
        )
        kinds = {(a != b, to, back) for a, b, to, back in ends} if self.num_ranks > 1 else set()
        inside, between = ([wire for crosses, *pair in kinds if crosses == crossing for wire in pair]
                           for crossing in (False, True))  # fmt: skip
        return _worst_case_link(inside) if inside else None, _worst_case_link(between) if between else None


def build_ring(cluster: Cluster, hosts: Sequence[str]) -> Ring:
    """Build the ring of ranks in order; `hosts` is the host of each rank, and the ranks of a host are adjacent.

    Ranks of a host are joined by its `local` link; between hosts the last rank of one sends to the first of the next.
    So a ring crosses the network link of a host once each way, however many ranks share it.
    """

    def wire(a: str, b: str) -> LinkModel:
        if a != b:
            return cluster.link_between(a, b)
        local = cluster.hosts[a].local
        assert local is not None, f"{a} has several ranks, and no wire between them"
        return local

    pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True)) if len(hosts) > 1 else []
    if cluster.wire is not None and not cluster.wires:  # alike both ways
        links = [cluster.wire if a != b else wire(a, b) for a, b in pairs]
        back = links
    else:
        links, back = [wire(a, b) for a, b in pairs], [wire(b, a) for a, b in pairs]  # from the next rank to this one
    return Ring(
        hosts=tuple(hosts),
        links=tuple(links),
        reverse_links=tuple(back[-1:] + back[:-1]),
        sum_Bps=tuple(cluster.hosts[name].sum_Bps or INFINITE for name in hosts),
    )


def ring_phase_s(links: RingLinks, part_bytes: float) -> float:
    """Return the seconds of n-1 ring steps in which each rank forwards a part: the lower of two upper bounds. [derived]

    A step ends when its slowest link is done: (n-1)·max(α + part/β). But links wait for each other only for data. In a
    chain of n-1 messages, each the cause of the next, a message either goes one hop further, with a latency, or leaves
    the same rank again, without one. So (n-1)·max(part/β) + Σα - min α is a bound as well. Equal links reach both.

    >>> slow, fast = LinkModel(latency_s=0.125, bandwidth_Bps=10), LinkModel(latency_s=0.125, bandwidth_Bps=100)
    >>> ring_phase_s(ring_links([slow, fast, fast]), 10)
    2.25
    """
    if not links.num:
        return 0.0
    steps = links.num - 1
    lockstep_s = steps * max(wire.latency_s + part_bytes / wire.bandwidth_Bps for wire in links.distinct)
    sending_s = part_bytes / min(wire.bandwidth_Bps for wire in links.distinct)
    least_s = min(wire.latency_s for wire in links.distinct)
    return min(lockstep_s, steps * sending_s + links.total_latency_s - least_s)


def collective_s(collective: Collective, size_bytes: float, ring: Ring, backend: str) -> float:
    """Return the seconds of a collective with the backend's own algorithm, over the links of this ring.

    >>> wire = LinkModel(latency_s=1e-3, bandwidth_Bps=125e6)
    >>> two = Ring(hosts=("a", "b"), links=(wire, wire), reverse_links=(wire, wire), sum_Bps=(1e9, 1e9))
    >>> (round(collective_s("all_reduce", 100e6, two, "gloo"), 3),
    ...  round(collective_s("all_gather", 100e6, two, "gloo"), 3))
    (0.803, 0.799)
    """
    if ring.num_ranks == 1:
        return 0.0
    backend_time_s = (_nccl_s if backend == "nccl" else _gloo_s)(collective, size_bytes, ring)
    medium, num_links = ring.shared_medium
    if medium is None:
        return backend_time_s
    return max(
        backend_time_s, num_links * _bytes_per_link(collective, size_bytes, ring, backend) / medium.bandwidth_Bps
    )


def _bytes_per_link(collective: Collective, size_bytes: float, ring: Ring, backend: str) -> float:
    """Return the bytes that a collective sends between hosts, divided by the number of the ring's links between hosts.

    A shared medium carries the bytes of one link at a time.
    """
    num_ranks, sizes = ring.num_ranks, ring.host_sizes
    if collective in ("all_to_all", "swap"):
        leaving = num_ranks**2 - sum(size**2 for size in sizes)
        return leaving * size_bytes / num_ranks / len(sizes)
    if collective == "broadcast":
        return (len(sizes) - 1) * size_bytes / len(sizes)
    return sent_bytes(collective, size_bytes, num_ranks, backend)


def _gloo_s(collective: Collective, size_bytes: float, ring: Ring) -> float:
    """Return the seconds of a collective on Gloo.   [Gloo's source; PyTorch's ProcessGroupGloo]

    All-reduce: a ring in which each rank sends to the *previous* one (*measured* on its sockets). A part is split into
    m ≥ 2 segments of at most 1 MiB, two of them in flight, and one is added while the next arrives. So transfer and
    reduction are a maximum, not a sum; both show for one segment. (*Measured*: 0.98 to 0.99 of the link's bandwidth,
    64 MiB, 1 Gbit/s, 2 and 3 ranks.) Two in flight are no faster than m/2 · (α + s/β + s/γ) a step: the bound where
    latency exceeds a segment's time. Reduce-scatter: an all-reduce, *measured* 1.1 to 1.2 times as long for copies that
    this omits. Broadcast: a binomial tree by rank. *Measured* with 4 ranks and 16 MiB: 2.2 S/β instead of 2, because a
    rank's two sends share its link instead of taking turns. All-gather: a ring, to the next rank. All-to-all: every
    pair at the same time. Swap: the same, by messages that stall less (*measured*: 0.952 of 1 Gbit/s, 2 ranks, 40 MB).
    """
    num_ranks = ring.num_ranks
    part = size_bytes / num_ranks
    if collective in ("all_reduce", "reduce_scatter"):
        gamma, back = ring.min_sum_Bps, ring.to_previous
        segments = max(2, math.ceil(part / GLOO_SEGMENT_BYTES))
        segment = part / segments
        window_s = (num_ranks - 1) * segments / 2 * max(w.latency_s + segment / w.bandwidth_Bps for w in back.distinct)
        adding = max(ring_phase_s(back.capped_at(gamma), part), window_s + (num_ranks - 1) * part / gamma / 2)
        return (
            adding
            + segment / max(gamma, _worst_case_link(back.distinct).bandwidth_Bps)
            + max(ring_phase_s(back, part), window_s)
        )
    if collective == "broadcast":
        return _binomial_s(size_bytes, ring)
    stall = GLOO_STALL_FACTOR[collective][min(num_ranks, 4) - 2]
    part += (stall - 1) * (part if collective == "swap" else max(0.0, part - SOCKET_BUFFER_BYTES))
    return ring_phase_s(ring.to_next, part) if collective == "all_gather" else _all_to_all_s(part, ring)


def _nccl_s(collective: Collective, size_bytes: float, ring: Ring) -> float:
    """Return the seconds of a collective on NCCL.   [NCCL's documentation]

    All-reduce: the ring or the tree, whichever is faster. Both pass through all ranks of a host before they leave it,
    and the transfer hides the reduction. Broadcast is a pipelined chain, all-to-all direct.
    """
    num_ranks, sizes = ring.num_ranks, ring.host_sizes
    part = size_bytes / num_ranks
    if collective in ("all_to_all", "swap"):
        return _all_to_all_s(part, ring)
    inner, outer = ring.inner, ring.outer
    beta = min(wire.bandwidth_Bps for wire in (inner, outer) if wire)
    if collective == "broadcast":
        hops = num_ranks - 1
        alpha_s = (ring.to_next.total_latency_s - ring.links[-1].latency_s) / hops
        return pipelined_s(size_bytes, hops, LinkModel(latency_s=alpha_s, bandwidth_Bps=beta))
    adding = ring.to_next.capped_at(ring.min_sum_Bps)
    if collective == "all_gather":
        return ring_phase_s(ring.to_next, part)
    if collective == "reduce_scatter":
        return ring_phase_s(adding, part)
    ring_s = ring_phase_s(adding, part) + ring_phase_s(ring.to_next, part)
    return nccl_all_reduce_s(size_bytes, ring_s, max(sizes), len(sizes), inner, outer, ring.min_sum_Bps)[0]


def nccl_all_reduce_s(size_bytes: float, ring_s: float, ranks_per_host: int, num_hosts: int, inner: LinkModel | None,
                      outer: LinkModel | None, sum_Bps: float) -> tuple[float, str]:  # fmt: skip
    """Return (seconds, "ring" or "tree") of NCCL's faster all-reduce; `ring_s` is the time of the ring.

    The tree is a chain inside hosts, over `inner`, and binary across them, over `outer`. Two trees carry half the
    buffer each, so every rank sends 2S at most, up and down at the same time, in pipelined segments. The slowest link
    sets the pace.   [Sanders, Speck & Träff 2009; NCCL, src/graph/tuning.cc]
    """
    within, across = 2 * (ranks_per_host - 1), 2 * _tree_depth(num_hosts)
    alphas_s = within * (inner.latency_s if inner else 0.0) + across * (outer.latency_s if outer else 0.0)
    beta = min(sum_Bps, *(wire.bandwidth_Bps for wire in (inner, outer) if wire))
    hop = LinkModel(latency_s=alphas_s / (within + across), bandwidth_Bps=beta)
    tree_s = pipelined_s(2 * size_bytes, within + across, hop)
    return (tree_s, "tree") if tree_s < ring_s else (ring_s, "ring")


def _all_to_all_s(part_bytes: float, ring: Ring) -> float:
    """Return the seconds in which all parts are sent at once: from a host with R ranks, R(n-R) parts over its network
    link and R-1 per rank inside.

    The worst links of the ring stand in for pairs that are not neighbours in it.
    """
    inner, outer, most = ring.inner, ring.outer, max(ring.host_sizes)
    leaving = max(size * (ring.num_ranks - size) for size in ring.host_sizes)
    return max(
        inner.latency_s + (most - 1) * part_bytes / inner.bandwidth_Bps if inner else 0.0,
        outer.latency_s + leaving * part_bytes / outer.bandwidth_Bps if outer else 0.0,
    )


def _binomial_s(size_bytes: float, ring: Ring) -> float:
    """Return the seconds of a binomial broadcast: in round i, rank r < 2^i sends to r + 2^i.

    Messages that leave or enter a host in the same round share its network link.
    """
    inner, outer, total_s = ring.inner, ring.outer, 0.0
    for step in (1 << i for i in range(_tree_depth(ring.num_ranks))):
        pairs = [(ring.hosts[r], ring.hosts[r + step]) for r in range(min(step, ring.num_ranks - step))]
        crossing = [pair for pair in pairs if pair[0] != pair[1]]
        most = max((max(Counter(ends).values()) for ends in zip(*crossing, strict=True)), default=0)
        inner_s = inner.latency_s + size_bytes / inner.bandwidth_Bps if inner and len(crossing) < len(pairs) else 0.0
        outer_s = outer.latency_s + most * size_bytes / outer.bandwidth_Bps if outer and most else 0.0
        total_s += max(inner_s, outer_s)
    return total_s


def _worst_case_link(links: Iterable[LinkModel]) -> LinkModel:
    links = list(links)
    return LinkModel(
        latency_s=max(wire.latency_s for wire in links), bandwidth_Bps=min(wire.bandwidth_Bps for wire in links)
    )


def best_ring(names: Sequence[str], wires: Mapping[str, Mapping[str, LinkModel]]) -> list[str]:
    """Return the ring order of hosts that maximizes the bandwidth of its slowest link.

    The bottleneck travelling salesman problem in a directed graph: bisect the sorted bandwidths, and ask for each
    whether a ring exists over links of at least that bandwidth. Exact up to 9 hosts; with more, a search that takes too
    long counts as no. The first host stays first, and only a better order replaces the given one. Gloo's all-reduce
    sends to the previous rank: pass `wires` transposed for it, [b][a] for [a][b].

    >>> fast, slow = LinkModel(latency_s=0, bandwidth_Bps=10), LinkModel(latency_s=0, bandwidth_Bps=1)
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
        limit = min(
            max(speeds) for speeds in [*speeds, *zip(*speeds, strict=True)]
        )  # every host has to send and receive
        current = slowest(best)
        steps = sorted({speed for row in speeds for speed in row if current < speed <= limit})
        low, high = 0, len(steps)
        while low < high:
            middle = (low + high) // 2
            candidate = _hamiltonian_cycle(speeds, steps[middle])
            if candidate:
                best, low = candidate, bisect_right(steps, slowest(candidate))
            else:
                high = middle
        above = steps[low:][-40:] if num > 9 else []  # beyond a search that gave up there may be an easy one
        best = next(
            (
                candidate
                for least in reversed(above)
                if (candidate := _hamiltonian_cycle(speeds, least, MAX_RETRY_STATES))
            ),
            best,
        )
    return [names[i] for i in best]


def _hamiltonian_cycle(
    speeds: Sequence[Sequence[float]], min_Bps: float, max_states: int = MAX_SEARCH_STATES
) -> list[int] | None:
    """Return a Hamiltonian cycle from 0 over links of at least this bandwidth; a set of hosts is a bit mask."""
    num = len(speeds)
    out = [sum(1 << b for b in range(num) if b != a and speeds[a][b] >= min_Bps) for a in range(num)]
    into = [sum(1 << a for a in range(num) if a != b and speeds[a][b] >= min_Bps) for b in range(num)]
    dead: set[tuple[int, int]] = set()
    limit = max_states if num > 9 else 1 << num + 4

    def extend(order: list[int], rest: int) -> list[int] | None:
        last = order[-1]
        if not rest:
            return order if out[last] & 1 else None
        if (rest, last) in dead or len(dead) >= limit:
            return None
        ahead = [b for b in range(num) if out[last] & rest & 1 << b]
        if all(into[b] & (rest | 1 << last) and out[b] & (rest | 1) for b in range(num) if rest & 1 << b):
            for b in sorted(ahead, key=lambda b: (into[b] & rest).bit_count()):  # the least reachable host first
                if found := extend([*order, b], rest & ~(1 << b)):
                    return found
        dead.add((rest, last))
        return None

    return extend([0], (1 << num) - 2)
