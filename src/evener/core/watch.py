"""Which rank holds all the others up, and how? By what its host sees of it: a rank that is frozen cannot tell.

a process that is stopped, or that waits in the kernel for a disk      that is it, whatever the others do
a machine that does not acknowledge what another sends                 it is what lies between them
a machine out of reach, and no rank elsewhere uses its processor       it, or the way to it
no rank uses its processor, and some do not wait for others            one of these is it
all wait for the others, and something travels between them            a slow link, and nothing is wrong
all wait for the others, and nothing does                              they are at different exchanges
some rank computes                                                     a long step: nothing is wrong
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

STILL_S = 8.0  # seen like that for so long; a look, its way home and a reader's second make 10
CUT_S = 4.0  # after its host has tried for 3 s
DISK_S = 60.0  # a checkpoint on a slow disk takes its time
IDLE = 0.02  # of a processor: a pulse takes less
SPAN_S = 2.0  # over which that is counted
STOPPED, DISK = ("T", "t"), "D"  # the kernel's letters


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """A process as its host saw it."""

    pid: int
    state: str  # the kernel's letter
    cpu_s: float  # that it and its children have used since they began
    where: str = ""  # its line of Python, where it has a pulse
    waits: bool = False  # that line exchanges with others: where it uses no processor there, it waits for them
    moved: int | None = None  # bytes that its connections have moved; None: not known


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the run up."""

    host: str
    rank: int | None  # None: what started the ranks there
    how: str  # stopped, disk, idle, crossed, cut-off
    what: str
    fix: str
    peer: str | None = None

    @property
    def kind(self) -> tuple[str, int | None, str]:
        """The same while it lasts, whatever line is seen."""
        return self.host, self.rank, self.how


@dataclass
class _Seen:
    """What was seen of one process, by its host's clock."""

    look: Look
    at_s: float
    since_s: float  # it is in its state
    busy_s: float  # when it last used its processor
    disk_s: float  # when it last waited for a disk, or began
    moved_s: float  # when its connections last moved anything, or began
    counted: tuple[float, float]  # (when, cpu_s) from which on that is counted

    def add(self, look: Look, at_s: float) -> None:
        if look.state != self.look.state:
            self.since_s = at_s
        began_s, cpu_s = self.counted
        if look.cpu_s - cpu_s > IDLE * max(SPAN_S, at_s - began_s):
            self.busy_s = at_s
        if look.state == DISK:
            self.disk_s = at_s
        if look.moved != self.look.moved:
            self.moved_s = at_s
        if at_s - began_s >= SPAN_S:
            self.counted = at_s, look.cpu_s
        self.look, self.at_s = look, at_s

    @property
    def same_for_s(self) -> float:
        return self.at_s - self.since_s

    @property
    def idle_for_s(self) -> float:
        return self.at_s - self.busy_s

    @property
    def does_nothing_for_s(self) -> float:
        """Neither computes, nor reads or writes."""
        return self.at_s - max(self.busy_s, self.disk_s)

    @property
    def moves_nothing_for_s(self) -> float:
        """0 where that is not known."""
        return 0.0 if self.look.moved is None else self.at_s - self.moved_s

    @property
    def at(self) -> str:
        return f", in {self.look.where}" if self.look.where else ""


class Watch:
    """What was seen of the processes of a run."""

    def __init__(self, num_ranks: Mapping[str, int], hosts: Mapping[str, str] | None = None) -> None:
        """`num_ranks`: by host; `hosts`: by their addresses."""
        self._num_ranks, self._hosts = dict(num_ranks), dict(hosts or {})
        self._members = set(num_ranks)
        self._seen: dict[tuple[str, int | None], _Seen] = {}
        self._cut: dict[tuple[str, str], tuple[float, float]] = {}  # (who, from whom): since when, until when
        self._lost: set[str] = set()  # hosts that cannot be reached

    def only(self, members: Iterable[str]) -> None:
        """Of all hosts these train from now on: nobody waits for the others."""
        self._members = set(members)
        self._lost &= self._members
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] in self._members}
        self._cut = {pair: since for pair, since in self._cut.items() if self._members.issuperset(pair)}

    def see(self, host: str, at_s: float, looks: Mapping[int, Look] | Mapping[int | None, Look],
            stuck: Iterable[str] = ()) -> None:  # fmt: skip
        """A look at a host, at a time of its own clock: its ranks and (None) what started them; and the addresses that
        do not acknowledge what it sends.
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
        for rank, look in looks.items():
            known = self._seen.get((host, rank))
            if known is None or known.look.pid != look.pid:
                self._seen[host, rank] = _Seen(look, at_s, at_s, at_s, at_s, at_s, (at_s, look.cpu_s))
            else:
                known.add(look, at_s)

    def lose(self, host: str) -> None:
        """It cannot be reached: nothing is known of what its ranks do."""
        self.see(host, 0.0, {})
        self._lost |= self._members & {host}

    @property
    def sees_all(self) -> bool:
        """Is there a look at every rank?"""
        expected = sum(self._num_ranks[host] for host in self._members)
        return sum(rank is not None for _, rank in self._seen) == expected

    def hang(self) -> Hang | None:
        """Who holds the others up, as it was seen last."""
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
                what = f"has no answer from {peer} any more: a link is down, or something between them drops it all"
                return Hang(
                    host=host, rank=None, how="cut-off", what=what, peer=peer,
                    fix="evener doctor looks at the way between them; when it is back, the run goes on",
                )  # fmt: skip
        ranks = {key: seen for key, seen in self._seen.items() if key[1] is not None}
        if self._lost and ranks and min(seen.does_nothing_for_s for seen in ranks.values()) >= STILL_S:
            (host, _), peer = min(ranks), min(self._lost)
            what = f"waits, and {peer} cannot be reached: it is off, or a link is down"
            fix = f"is {peer} on, and its cable in? When it is back within a minute and a half, the run goes on"
            return Hang(host=host, rank=None, how="cut-off", what=what, peer=peer, fix=fix)
        if not self.sees_all:
            return None
        waiting = [key for key, seen in ranks.items() if seen.look.waits]
        alone = [key for key, seen in ranks.items() if seen.look.where and not seen.look.waits]
        if waiting and alone and min(seen.does_nothing_for_s for seen in ranks.values()) >= STILL_S:
            (host, rank), seen = alone[0], ranks[alone[0]]
            what = f"does nothing{seen.at}, and the others wait for it"
            fix = f"evener logs --rank {rank} RUN shows what it printed"
            return Hang(host=host, rank=rank, how="idle", what=what, fix=fix)
        still_s = [min(seen.does_nothing_for_s, seen.moves_nothing_for_s) for seen in ranks.values()]
        if len(waiting) == len(ranks) > 1 and min(still_s) >= STILL_S:
            return _crossed(ranks)
        return None


def _crossed(ranks: Mapping[tuple[str, int | None], _Seen]) -> Hang:
    """All wait for each other: the one that is where the fewest are, of several the last."""
    nums = Counter(seen.look.where for seen in ranks.values())
    host, rank = min(sorted(ranks, reverse=True), key=lambda key: nums[ranks[key].look.where])
    mine = ranks[host, rank].look.where
    others = sorted(nums.keys() - {mine})
    rest = f"others in {' and in '.join(others)}" if others else "as all others do"
    what = f"waits in {mine}, {rest}, and nothing travels between them"
    fix = "do all ranks exchange the same things, in the same order? evener logs RUN shows what they printed"
    return Hang(host=host, rank=rank, how="crossed", what=what, fix=fix)


def sentence(hang: Hang) -> str:
    """In words."""
    if hang.peer is not None:
        return f"{hang.host} {hang.what}"
    return f"{'the launcher' if hang.rank is None else f'rank {hang.rank}'} on {hang.host} {hang.what}"
