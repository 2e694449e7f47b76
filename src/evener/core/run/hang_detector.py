"""Hang detector: find the rank or link that blocks the run, from samples that each host takes of its processes.

A frozen rank cannot report itself, so the verdict rests on what its host observes:

a process is stopped, or waits in the kernel for a disk                that process, whatever the others do
a host does not acknowledge what another one sends                     the path between them
a host is unreachable, and no other rank uses CPU time                 that host, or the path to it
no rank uses CPU time, and some are not waiting for others             one of those
all ranks wait for others, and there is traffic between them           no hang: a slow link
all ranks wait for others, and there is no traffic                     ranks are in different collectives
some rank computes                                                     no hang: a long step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

HANG_AFTER_S = 8.0  # a condition must last this long; sampling, transfer and a reader's second make it 10
UNREACHABLE_AFTER_S = 4.0  # without acknowledgement, after its host has retried for 3 s
DISK_WAIT_AFTER_S = 60.0  # a checkpoint to a slow disk may take this long
IDLE_CPU_SHARE = 0.02  # share of a CPU: a heartbeat uses less
CPU_WINDOW_S = 2.0  # window in which CPU time is counted
STOPPED_STATES, DISK_SLEEP_STATE = ("T", "t"), "D"  # process states as in /proc/PID/stat


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a process, taken by its host."""

    pid: int
    state: str  # as in /proc/PID/stat
    cpu_s: float  # CPU time of the process and its children since they started
    where: str = ""  # the current Python line, if the process has a heartbeat
    # that line is in a collective: if the process uses no CPU time there, it waits for peers
    is_waiting: bool = msgspec.field(default=False, name="waits")
    # bytes that its connections have sent and received; None: not known
    moved_bytes: int | None = msgspec.field(default=None, name="moved")


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A detected hang and the rank or host that causes it."""

    host: str
    rank: int | None  # None: the launcher of the host's ranks
    cause: str  # stopped, disk, idle, crossed, cut-off
    description: str
    fix: str
    peer: str | None = None

    @property
    def identity(self) -> tuple[str, int | None, str]:
        """Key that stays the same while a hang lasts, even if the process moves to another line."""
        return self.host, self.rank, self.cause


@dataclass
class _ProcessHistory:
    """The newest sample of one process and when its activity last changed, by its host's clock."""

    sample: ProcessSample
    sampled_at_s: float
    state_since_s: float  # start of the current state
    last_busy_s: float  # last time it used CPU time
    last_disk_s: float  # last time it waited for a disk, or its first sample
    last_moved_s: float  # last time its connections had traffic, or its first sample
    cpu_window_start: tuple[float, float]  # start of the CPU window: (time, cpu_s)

    def add(self, sample: ProcessSample, at_s: float) -> None:
        if sample.state != self.sample.state:
            self.state_since_s = at_s
        began_s, cpu_s = self.cpu_window_start
        if sample.cpu_s - cpu_s > IDLE_CPU_SHARE * max(CPU_WINDOW_S, at_s - began_s):
            self.last_busy_s = at_s
        if sample.state == DISK_SLEEP_STATE:
            self.last_disk_s = at_s
        if sample.moved_bytes != self.sample.moved_bytes:
            self.last_moved_s = at_s
        if at_s - began_s >= CPU_WINDOW_S:
            self.cpu_window_start = at_s, sample.cpu_s
        self.sample, self.sampled_at_s = sample, at_s

    @property
    def state_age_s(self) -> float:
        return self.sampled_at_s - self.state_since_s

    @property
    def idle_for_s(self) -> float:
        return self.sampled_at_s - self.last_busy_s

    @property
    def inactive_for_s(self) -> float:
        """Seconds with neither CPU time nor disk waits."""
        return self.sampled_at_s - max(self.last_busy_s, self.last_disk_s)

    @property
    def no_traffic_for_s(self) -> float:
        """Seconds without network traffic; 0 if traffic is not known."""
        return 0.0 if self.sample.moved_bytes is None else self.sampled_at_s - self.last_moved_s

    @property
    def location_text(self) -> str:
        return f", in {self.sample.where}" if self.sample.where else ""


class HangDetector:
    """Detects hangs from the samples of all processes of a run."""

    def __init__(self, num_ranks: Mapping[str, int], hosts: Mapping[str, str] | None = None) -> None:
        """`num_ranks`: ranks by host; `hosts`: host names by address."""
        self._num_ranks, self._hosts = dict(num_ranks), dict(hosts or {})
        self._members = set(num_ranks)
        self._seen: dict[tuple[str, int | None], _ProcessHistory] = {}
        self._cut: dict[tuple[str, str], tuple[float, float]] = {}  # unacknowledged (sender, receiver): (first, last)
        self._lost: set[str] = set()  # unreachable hosts

    def set_members(self, members: Iterable[str]) -> None:
        """Set the hosts that train from now on, and forget all others."""
        self._members = set(members)
        self._lost &= self._members
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] in self._members}
        self._cut = {pair: since for pair, since in self._cut.items() if self._members.issuperset(pair)}

    def observe(self, host: str, at_s: float, samples: Mapping[int, ProcessSample] | Mapping[int | None, ProcessSample],
            unacknowledged: Iterable[str] = ()) -> None:  # fmt: skip
        """Add the samples of a host's ranks and of their launcher (key None), taken at `at_s` by the host's clock.

        `unacknowledged`: addresses that do not acknowledge what the host sends.
        """
        if host not in self._members:
            return
        self._lost.discard(host)
        cut = {(host, self._hosts[address]) for address in unacknowledged if self._hosts.get(address) in self._members}
        for pair in [pair for pair in self._cut if pair[0] == host and pair not in cut]:
            del self._cut[pair]
        self._cut |= {pair: (self._cut.get(pair, (at_s, at_s))[0], at_s) for pair in cut}
        for key in [key for key in self._seen if key[0] == host and key[1] not in samples]:
            del self._seen[key]
        for rank, sample in samples.items():
            history = self._seen.get((host, rank))
            if history is None or history.sample.pid != sample.pid:
                self._seen[host, rank] = _ProcessHistory(sample, at_s, at_s, at_s, at_s, at_s, (at_s, sample.cpu_s))
            else:
                history.add(sample, at_s)

    def mark_unreachable(self, host: str) -> None:
        """Mark a host as unreachable and drop its samples."""
        self.observe(host, 0.0, {})
        self._lost |= self._members & {host}

    @property
    def has_sampled_all_ranks(self) -> bool:
        """Return whether every rank has a sample."""
        expected = sum(self._num_ranks[host] for host in self._members)
        return sum(rank is not None for _, rank in self._seen) == expected

    def detect_hang(self) -> Hang | None:
        """Return the hang that the newest samples show, or None."""
        for (host, rank), seen in self._seen.items():
            if seen.sample.state in STOPPED_STATES and seen.state_age_s >= HANG_AFTER_S:
                what = "is stopped, by a signal or a debugger"
                return Hang(
                    host=host,
                    rank=rank,
                    cause="stopped",
                    description=what,
                    fix=f"on {host}: kill -CONT {seen.sample.pid}",
                )
            if seen.sample.state == DISK_SLEEP_STATE and min(seen.state_age_s, seen.idle_for_s) >= DISK_WAIT_AFTER_S:
                what = f"waits for its disk{seen.location_text}"
                return Hang(
                    host=host,
                    rank=rank,
                    cause="disk",
                    description=what,
                    fix=f"on {host}: a slow or full disk? df; dmesg",
                )
        for (host, peer), (since_s, until_s) in self._cut.items():
            if until_s - since_s >= UNREACHABLE_AFTER_S:
                what = f"gets no acknowledgements from {peer}: a link is down, or all packets between them are dropped"
                return Hang(
                    host=host, rank=None, cause="cut-off", description=what, peer=peer,
                    fix="evener doctor checks the path between them; once it works again, the run continues",
                )  # fmt: skip
        ranks = {key: seen for key, seen in self._seen.items() if key[1] is not None}
        if self._lost and ranks and min(seen.inactive_for_s for seen in ranks.values()) >= HANG_AFTER_S:
            (host, _), peer = min(ranks), min(self._lost)
            what = f"waits, and {peer} cannot be reached: it is off, or a link is down"
            fix = f"is {peer} on, and its cable plugged in? If it is back within 90 s, the run continues"
            return Hang(host=host, rank=None, cause="cut-off", description=what, peer=peer, fix=fix)
        if not self.has_sampled_all_ranks:
            return None
        waiting = [key for key, seen in ranks.items() if seen.sample.is_waiting]
        not_waiting = [key for key, seen in ranks.items() if seen.sample.where and not seen.sample.is_waiting]
        if waiting and not_waiting and min(seen.inactive_for_s for seen in ranks.values()) >= HANG_AFTER_S:
            (host, rank), seen = not_waiting[0], ranks[not_waiting[0]]
            what = f"does nothing{seen.location_text}, and the others wait for it"
            fix = f"evener logs --rank {rank} RUN shows what it printed"
            return Hang(host=host, rank=rank, cause="idle", description=what, fix=fix)
        still_s = [min(seen.inactive_for_s, seen.no_traffic_for_s) for seen in ranks.values()]
        if len(waiting) == len(ranks) > 1 and min(still_s) >= HANG_AFTER_S:
            return _collective_mismatch(ranks)
        return None


def _collective_mismatch(ranks: Mapping[tuple[str, int | None], _ProcessHistory]) -> Hang:
    """Return the hang of ranks that all wait for each other; blame a rank in the line of code with the fewest ranks."""
    counts = Counter(seen.sample.where for seen in ranks.values())
    host, rank = min(sorted(ranks, reverse=True), key=lambda key: counts[ranks[key].sample.where])
    line = ranks[host, rank].sample.where
    other_lines = sorted(counts.keys() - {line})
    rest = f"others in {' and in '.join(other_lines)}" if other_lines else "as all others do"
    what = f"waits in {line}, {rest}, and nothing travels between them"
    fix = "do all ranks call the same collectives, in the same order? evener logs RUN shows what they printed"
    return Hang(host=host, rank=rank, cause="crossed", description=what, fix=fix)


def describe_hang(hang: Hang) -> str:
    """Return one sentence that describes the hang."""
    if hang.peer is not None:
        return f"{hang.host} {hang.description}"
    return f"{'the launcher' if hang.rank is None else f'rank {hang.rank}'} on {hang.host} {hang.description}"
