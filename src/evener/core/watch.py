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

STILL_S = 8.0  # a condition must last this long; sampling, transfer and a reader's second make it 10
CUT_S = 4.0  # without acknowledgement, after its host has retried for 3 s
DISK_S = 60.0  # a checkpoint to a slow disk may take this long
IDLE = 0.02  # share of a CPU: a heartbeat uses less
SPAN_S = 2.0  # window in which CPU time is counted
STOPPED, DISK = ("T", "t"), "D"  # process states as in /proc/PID/stat


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a process, taken by its host."""

    pid: int
    state: str  # as in /proc/PID/stat
    cpu_s: float  # CPU time of the process and its children since they started
    where: str = ""  # the current Python line, if the process has a heartbeat
    waits: bool = False  # that line is in a collective: if the process uses no CPU time there, it waits for peers
    moved: int | None = None  # bytes that its connections have sent and received; None: not known


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A detected hang and the rank or host that causes it."""

    host: str
    rank: int | None  # None: the launcher of the host's ranks
    how: str  # stopped, disk, idle, crossed, cut-off
    what: str
    fix: str
    peer: str | None = None

    @property
    def kind(self) -> tuple[str, int | None, str]:
        """Key that stays the same while a hang lasts, even if the process moves to another line."""
        return self.host, self.rank, self.how


@dataclass
class _Seen:
    """The newest sample of one process and when its activity last changed, by its host's clock."""

    look: Look
    at_s: float
    since_s: float  # start of the current state
    busy_s: float  # last time it used CPU time
    disk_s: float  # last time it waited for a disk, or its first sample
    moved_s: float  # last time its connections had traffic, or its first sample
    counted: tuple[float, float]  # start of the CPU window: (time, cpu_s)

    def add(self, sample: Look, at_s: float) -> None:
        if sample.state != self.look.state:
            self.since_s = at_s
        began_s, cpu_s = self.counted
        if sample.cpu_s - cpu_s > IDLE * max(SPAN_S, at_s - began_s):
            self.busy_s = at_s
        if sample.state == DISK:
            self.disk_s = at_s
        if sample.moved != self.look.moved:
            self.moved_s = at_s
        if at_s - began_s >= SPAN_S:
            self.counted = at_s, sample.cpu_s
        self.look, self.at_s = sample, at_s

    @property
    def same_for_s(self) -> float:
        return self.at_s - self.since_s

    @property
    def idle_for_s(self) -> float:
        return self.at_s - self.busy_s

    @property
    def does_nothing_for_s(self) -> float:
        """Seconds with neither CPU time nor disk waits."""
        return self.at_s - max(self.busy_s, self.disk_s)

    @property
    def moves_nothing_for_s(self) -> float:
        """Seconds without network traffic; 0 if traffic is not known."""
        return 0.0 if self.look.moved is None else self.at_s - self.moved_s

    @property
    def at(self) -> str:
        return f", in {self.look.where}" if self.look.where else ""


class Watch:
    """Detects hangs from the samples of all processes of a run."""

    def __init__(self, num_ranks: Mapping[str, int], hosts: Mapping[str, str] | None = None) -> None:
        """`num_ranks`: ranks by host; `hosts`: host names by address."""
        self._num_ranks, self._hosts = dict(num_ranks), dict(hosts or {})
        self._members = set(num_ranks)
        self._seen: dict[tuple[str, int | None], _Seen] = {}
        self._cut: dict[tuple[str, str], tuple[float, float]] = {}  # unacknowledged (sender, receiver): (first, last)
        self._lost: set[str] = set()  # unreachable hosts

    def only(self, members: Iterable[str]) -> None:
        """Set the hosts that train from now on, and forget all others."""
        self._members = set(members)
        self._lost &= self._members
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] in self._members}
        self._cut = {pair: since for pair, since in self._cut.items() if self._members.issuperset(pair)}

    def see(self, host: str, at_s: float, looks: Mapping[int, Look] | Mapping[int | None, Look],
            stuck: Iterable[str] = ()) -> None:  # fmt: skip
        """Add the samples of a host's ranks and of their launcher (key None), taken at `at_s` of the host's own clock.

        `stuck`: addresses that do not acknowledge what the host sends.
        """
        if host not in self._members:
            return
        self._lost.discard(host)
        cut = {(host, self._hosts[address]) for address in stuck if self._hosts.get(address) in self._members}
        for pair in [pair for pair in self._cut if pair[0] == host and pair not in cut]:
            del self._cut[pair]
        self._cut |= {pair: (self._cut.get(pair, (at_s, at_s))[0], at_s) for pair in cut}
        for key in [key for key in self._seen if key[0] == host and key[1] not in looks]:
            del self._seen[key]
        for rank, sample in looks.items():
            history = self._seen.get((host, rank))
            if history is None or history.look.pid != sample.pid:
                self._seen[host, rank] = _Seen(sample, at_s, at_s, at_s, at_s, at_s, (at_s, sample.cpu_s))
            else:
                history.add(sample, at_s)

    def lose(self, host: str) -> None:
        """Mark a host as unreachable and drop its samples."""
        self.see(host, 0.0, {})
        self._lost |= self._members & {host}

    @property
    def sees_all(self) -> bool:
        """Whether every rank has a sample."""
        expected = sum(self._num_ranks[host] for host in self._members)
        return sum(rank is not None for _, rank in self._seen) == expected

    def hang(self) -> Hang | None:
        """Return the hang that the newest samples show, or None."""
        for (host, rank), seen in self._seen.items():
            if seen.look.state in STOPPED and seen.same_for_s >= STILL_S:
                what = "is stopped, by a signal or a debugger"
                return Hang(
                    host=host, rank=rank, how="stopped", what=what, fix=f"on {host}: kill -CONT {seen.look.pid}"
                )
            if seen.look.state == DISK and min(seen.same_for_s, seen.idle_for_s) >= DISK_S:
                what = f"waits for its disk{seen.at}"
                return Hang(
                    host=host, rank=rank, how="disk", what=what, fix=f"on {host}: a slow or full disk? df; dmesg"
                )
        for (host, peer), (since_s, until_s) in self._cut.items():
            if until_s - since_s >= CUT_S:
                what = f"gets no acknowledgements from {peer}: a link is down, or all packets between them are dropped"
                return Hang(
                    host=host, rank=None, how="cut-off", what=what, peer=peer,
                    fix="evener doctor checks the path between them; once it works again, the run continues",
                )  # fmt: skip
        ranks = {key: seen for key, seen in self._seen.items() if key[1] is not None}
        if self._lost and ranks and min(seen.does_nothing_for_s for seen in ranks.values()) >= STILL_S:
            (host, _), peer = min(ranks), min(self._lost)
            what = f"waits, and {peer} cannot be reached: it is off, or a link is down"
            fix = f"is {peer} on, and its cable plugged in? If it is back within 90 s, the run continues"
            return Hang(host=host, rank=None, how="cut-off", what=what, peer=peer, fix=fix)
        if not self.sees_all:
            return None
        waiting = [key for key, seen in ranks.items() if seen.look.waits]
        not_waiting = [key for key, seen in ranks.items() if seen.look.where and not seen.look.waits]
        if waiting and not_waiting and min(seen.does_nothing_for_s for seen in ranks.values()) >= STILL_S:
            (host, rank), seen = not_waiting[0], ranks[not_waiting[0]]
            what = f"does nothing{seen.at}, and the others wait for it"
            fix = f"evener logs --rank {rank} RUN shows what it printed"
            return Hang(host=host, rank=rank, how="idle", what=what, fix=fix)
        still_s = [min(seen.does_nothing_for_s, seen.moves_nothing_for_s) for seen in ranks.values()]
        if len(waiting) == len(ranks) > 1 and min(still_s) >= STILL_S:
            return _crossed(ranks)
        return None


def _crossed(ranks: Mapping[tuple[str, int | None], _Seen]) -> Hang:
    """Return the hang of ranks that all wait for each other; blame the rarest line, and of several ranks the last."""
    counts = Counter(seen.look.where for seen in ranks.values())
    host, rank = min(sorted(ranks, reverse=True), key=lambda key: counts[ranks[key].look.where])
    line = ranks[host, rank].look.where
    other_lines = sorted(counts.keys() - {line})
    rest = f"others in {' and in '.join(other_lines)}" if other_lines else "as all others do"
    what = f"waits in {line}, {rest}, and nothing travels between them"
    fix = "do all ranks call the same collectives, in the same order? evener logs RUN shows what they printed"
    return Hang(host=host, rank=rank, how="crossed", what=what, fix=fix)


def sentence(hang: Hang) -> str:
    """Return one sentence that describes the hang."""
    if hang.peer is not None:
        return f"{hang.host} {hang.what}"
    return f"{'the launcher' if hang.rank is None else f'rank {hang.rank}'} on {hang.host} {hang.what}"
