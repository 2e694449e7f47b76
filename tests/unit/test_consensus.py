"""Simulate kills, partitions and lost messages: each epoch has one membership, and all hosts end in the last epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from evener.core.base.file_io import write_atomic
from evener.core.base.json_files import read_json
from evener.core.run.hang_detector import ProcessSample
from evener.core.run.membership_epoch import MembershipEpoch
from evener.launch.commands import ELASTIC_HOST_TIMEOUT_S
from evener.node.agent.consensus import (
    HEARTBEAT_INTERVAL_S,
    MAX_CONSECUTIVE_FAILURES,
    TICK_INTERVAL_S,
    Consensus,
    ConsensusState,
    EpochConflict,
    HostPhase,
    HostStatus,
)
from evener.node.agent.peer_links import ACK_TIMEOUT_S, RECONNECT_S

from ..tiers import exhaustively, seeds
from ..volatile_disk import VolatileDisk

TICK_S = TICK_INTERVAL_S
SILENT_S = 3.0
NAMES = "abcdef"


class Disk(Protocol):
    """Keeps the consensus state of a host."""

    def save(self, state: ConsensusState, now: float) -> None: ...

    def load(self) -> ConsensusState | None: ...

    def lose_power(self, now: float) -> None: ...


class SyncedDisk:
    """A real folder: `write_atomic` decides what of it survives a power loss."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self._path, self._disk = folder / "run" / "host" / "kept.json", VolatileDisk(folder, monkeypatch)
        self.close = self._disk.close

    def save(self, state: ConsensusState, now: float) -> None:
        write_atomic(self._path, msgspec.json.encode(state))

    def load(self) -> ConsensusState | None:
        return read_json(self._path, ConsensusState) if self._path.exists() else None

    def lose_power(self, now: float) -> None:
        self._disk.lose_power()


class LyingDisk:
    """A disk that confirms each write, and loses those of the last `lost_s` seconds."""

    def __init__(self, lost_s: float = 0.0) -> None:
        self._saved: list[tuple[float, ConsensusState]] = []
        self._lost_s = lost_s

    def save(self, state: ConsensusState, now: float) -> None:
        self._saved.append((now, state))

    def load(self) -> ConsensusState | None:
        return self._saved[-1][1] if self._saved else None

    def lose_power(self, now: float) -> None:
        while self._saved and self._saved[-1][0] > now - self._lost_s:
            del self._saved[-1]


class Host:
    """One host: its consensus, what it keeps on its disk, and ranks that are no more than a phase."""

    def __init__(self, name: str, world: MembershipEpoch, lives: bool, disk: Disk) -> None:
        self.name, self.first, self.lives, self.disk = name, ConsensusState(world), lives, disk
        self.saved: ConsensusState | None = None
        self.consensus: Consensus | None = None
        self.has_ranks = False  # where they live on: in a world, or ready for one

    def save(self, now: float) -> None:
        """As its agent does: before it broadcasts it."""
        if self.consensus is not None and self.consensus.state != self.saved:
            self.disk.save(self.consensus.state, now)
            self.saved = self.consensus.state

    def lose_power(self, now: float) -> None:
        """Cut its power."""
        self.consensus = None
        self.disk.lose_power(now)

    def boot(self, now: float) -> Consensus:
        kept, self.saved = self.disk.load() or self.first, None
        is_back = kept.incarnation > 0
        self.has_ranks = False
        self.consensus = Consensus(
            self.name,
            msgspec.structs.replace(kept, incarnation=max(kept.incarnation + 1, int(now * 1000))),
            host_timeout_s=SILENT_S,
            join_deadline=now + (SILENT_S if is_back else 10),
            is_elastic=self.lives,
        )
        if is_back and self.consensus.is_member:
            self.consensus.phase = HostPhase.REGROUPING
        return self.consensus


class Net:
    """Hosts, and what lies between them."""

    def __init__(
        self, seed: int, num_hosts: int, lost: float = 0.1, *, lives: bool = False,
        make_disk: Callable[[str], Disk] = lambda name: LyingDisk(), may_split: bool = False,
    ) -> None:  # fmt: skip
        """`may_split`: disks lie, so that one number may have several epochs."""
        self.lives, self.may_split = lives, may_split
        self.random, self.lost, self.now = random.Random(seed), lost, 0.0
        first = MembershipEpoch(number=0, hosts=list(NAMES[:num_hosts]))
        self.hosts = {name: Host(name, first, lives, make_disk(name)) for name in first.hosts}
        self.decided = {0: first}
        self.split_numbers: set[int] = set()  # decided twice
        self.meetings: list[EpochConflict] = []  # as hosts reported them
        self.cut: set[tuple[str, str]] = set()  # nothing goes from the first to the second
        self.stopped: set[str] = set()  # they neither hear nor look, and know nothing of it
        self.under_way: list[tuple[float, str, HostStatus]] = []
        for host in self.hosts.values():
            host.boot(0.0)

    @property
    def alive(self) -> dict[str, Consensus]:
        return {name: host.consensus for name, host in self.hosts.items() if host.consensus is not None}

    def tick(self) -> None:
        self.now += TICK_S
        is_due = [at <= self.now and to not in self.stopped for at, to, _ in self.under_way]
        due = [*itertools.compress(self.under_way, is_due)]
        self.under_way = [one for one, is_now in zip(self.under_way, is_due, strict=True) if not is_now]
        for _, to, statement in due:
            if (receiver := self.hosts[to].consensus) is not None:
                receiver.receive(statement, self.now)
        alive = self.alive
        for name in self.random.sample(sorted(alive), len(alive)):
            if name in self.stopped:
                continue
            consensus = alive[name]
            was_member, previous, num_conflicts = consensus.is_member, consensus.epoch, len(consensus.conflicts)
            if consensus.tick(self.now) and (consensus.epoch.is_cold_start or (was_member and not consensus.is_member)):
                self.hosts[name].has_ranks = False
            self.hosts[name].save(self.now)
            reported = consensus.conflicts[num_conflicts:]
            self.meetings += reported
            has_changed_sides = consensus.epoch.split_number(previous) is not None
            assert [one.is_own_kept for one in reported].count(False) == has_changed_sides, reported  # none silently
            if has_changed_sides:
                self.hosts[name].has_ranks = False
            world = self.decided.setdefault(consensus.epoch.number, consensus.epoch)
            if world != consensus.epoch:
                assert self.may_split, (world, consensus.epoch)
                self.split_numbers.add(world.number)
                self.decided[world.number] = consensus.epoch
            (self.live_on if self.lives else self.go_on)(consensus)
            if not consensus.is_broadcast_due(self.now):
                continue
            statement = consensus.make_status(self.now)
            for to in self.hosts:
                if to != name and (name, to) not in self.cut and self.random.random() >= self.lost:
                    self.under_way.append((self.now + self.random.uniform(0, 0.3), to, statement))
        running = [number for number, world in self.decided.items() if self.runs(world)]
        assert len(running) <= 1 or self.may_split, running

    def runs(self, world: MembershipEpoch) -> bool:
        """Do all its ranks train?"""
        there = [self.hosts[name].consensus for name in world.hosts]
        return all(one is not None and one.epoch == world and one.phase == HostPhase.RUNNING for one in there)

    def go_on(self, consensus: Consensus) -> None:
        """As ranks do: they begin, fail with each other, and leave for a host that waits."""
        if not consensus.is_member:
            return
        peers = [self.hosts[name].consensus for name in consensus.epoch.hosts]
        phases = [peer.phase for peer in peers if peer is not None and peer.epoch == consensus.epoch]
        if consensus.phase == HostPhase.WAITING and not consensus.has_lost_quorum(self.now):
            consensus.phase = HostPhase.RUNNING
        elif consensus.phase == HostPhase.RUNNING:
            consensus.step += 1
            gone = any(peer is None or peer.epoch.number > consensus.epoch.number for peer in peers)
            if ((gone or HostPhase.FAILED in phases) and self.random.random() < 0.3) or consensus.has_lost_quorum(
                self.now
            ):
                consensus.phase = HostPhase.FAILED
            elif HostPhase.REGROUPING in phases or (
                consensus.host == consensus.epoch.hosts[0] and consensus.waiting_hosts(self.now)
            ):
                consensus.phase = HostPhase.REGROUPING

    def live_on(self, consensus: Consensus) -> None:
        """As ranks do that live on: they are made ready, lose others, and ask for whoever is ready."""
        host, peers = self.hosts[consensus.host], [self.hosts[name].consensus for name in consensus.epoch.hosts]
        phases = [peer.phase for peer in peers if peer is not None and peer.epoch == consensus.epoch]
        if consensus.phase in (HostPhase.WAITING, HostPhase.READY) and not consensus.is_member:
            host.has_ranks = host.has_ranks or self.random.random() < 0.1
            consensus.phase = HostPhase.READY if host.has_ranks else HostPhase.WAITING
        elif consensus.phase == HostPhase.WAITING and not consensus.has_lost_quorum(self.now):
            host.has_ranks = host.has_ranks or consensus.epoch.is_cold_start
            consensus.phase = HostPhase.RUNNING if host.has_ranks else HostPhase.FAILED
        elif consensus.phase in (HostPhase.RUNNING, HostPhase.PEER_LOST, HostPhase.REGROUPING):
            gone = any(peer is None or peer.epoch.number > consensus.epoch.number for peer in peers)
            if consensus.has_lost_quorum(self.now):
                host.has_ranks = consensus.has_training_state = False
                consensus.phase = HostPhase.REGROUPING
            elif consensus.phase == HostPhase.RUNNING and (gone or {HostPhase.FAILED, HostPhase.PEER_LOST} & {*phases}):
                consensus.phase = HostPhase.PEER_LOST if consensus.has_training_state else HostPhase.FAILED
            elif consensus.phase == HostPhase.RUNNING and all(phase == HostPhase.RUNNING for phase in phases):
                consensus.has_training_state = len(phases) == len(peers) or consensus.has_training_state
                consensus.step += 1
                if consensus.host == consensus.epoch.hosts[0] and consensus.waiting_hosts(self.now):
                    consensus.phase = HostPhase.REGROUPING
            elif consensus.phase == HostPhase.RUNNING and HostPhase.REGROUPING in phases:
                consensus.phase = HostPhase.REGROUPING

    def until(self, is_so: Callable[[], bool], within_s: float) -> float:
        """Seconds until it is."""
        began = self.now
        while not is_so():
            assert self.now - began < within_s, (
                self.decided,
                {name: one.make_status(0) for name, one in self.alive.items()},
            )
            self.tick()
        return self.now - began

    def last(self) -> MembershipEpoch:
        return self.decided[max(self.decided)]


def all_run(net: Net) -> bool:
    """Are all hosts in one epoch, and train in it?"""
    worlds = [consensus.epoch for consensus in net.alive.values()]
    return all(set(world.hosts) == set(net.hosts) and world == worlds[0] for world in worlds) and net.runs(worlds[0])


def forget_a_promise(net: Net) -> None:
    """The hardest moment for a power loss: others have just decided an epoch without a host, and then meet it alone."""
    one, chance = net.random.choice(sorted(net.hosts)), net.random
    others = sorted(set(net.hosts) - {one})
    cut_off(net, {one})
    before = dict(net.decided)
    for _ in range(60):
        if net.decided != before:
            break
        net.tick()
    forgetful = {other for other in others if chance.random() < 0.5}
    for name in forgetful:
        net.hosts[name].lose_power(net.now)
        net.hosts[name].boot(net.now)
    if net.hosts[one].consensus is None:
        net.hosts[one].boot(net.now)
    cut_off(net, {one, *forgetful})
    for _ in range(60):
        net.tick()
    net.cut = set()


def cut_off(net: Net, side: set[str]) -> None:
    """Let nothing pass between these hosts and the others."""
    net.cut = {pair for a in side for b in set(net.hosts) - side for pair in ((a, b), (b, a))}


def live_through_faults(net: Net) -> None:
    """Up to 60 random faults; then all are mended, and all hosts train in one epoch."""
    chance = net.random
    for _ in range(chance.randint(1, 60)):
        one, other = chance.sample(sorted(net.hosts), 2)
        match chance.randint(0, 10):
            case 0:
                net.hosts[one].consensus = None
            case 1:
                net.hosts[one].lose_power(net.now)
            case 10 if chance.random() < 0.3:  # of the whole house
                for host in net.hosts.values():
                    host.lose_power(net.now)
            case 2 | 3 if net.hosts[one].consensus is None:
                net.hosts[one].boot(net.now)
            case 4:
                net.cut |= {(one, other), (other, one)}
            case 5:
                net.cut.add((one, other))
            case 6 | 7:
                net.cut, net.stopped = set(), set()
            case 8 if net.random.random() < 0.5:
                net.stopped.add(one)
            case 8 if one in net.alive:
                net.alive[one].phase = HostPhase.FAILED if net.alive[one].is_member else HostPhase.WAITING
                net.alive[one].step += 1
                net.alive[one].has_training_state = net.hosts[one].has_ranks = False
            case 9 if net.may_split or chance.random() < 0.5:
                forget_a_promise(net)
            case _:
                pass
        for _ in range(chance.choice([1, 3, 10, 40])):
            net.tick()
    net.cut, net.stopped = set(), set()
    for host in net.hosts.values():
        if host.consensus is None:
            host.boot(net.now)
    net.until(lambda: all_run(net), 60)


HISTORIES, LYING_HISTORIES = 20, 50  # in a test


@pytest.mark.parametrize("lives", [False, True])
@pytest.mark.parametrize("block", seeds(2_000 // 2 // HISTORIES))
def test_epoch_number_has_only_one_membership_where_disks_keep_what_they_confirm(
    block: int, lives: bool, tmp_path: Path
) -> None:
    """Kills, power losses of one host and of all, partitions, lost messages and suspended hosts."""
    for seed in range(block * HISTORIES, (block + 1) * HISTORIES):
        (tmp_path / f"{seed}").mkdir()
        with pytest.MonkeyPatch.context() as monkeypatch:
            disks = {name: SyncedDisk(tmp_path / f"{seed}" / name, monkeypatch) for name in NAMES[: 2 + seed % 4]}
            net = Net(seed, 2 + seed % 4, lives=lives, make_disk=disks.__getitem__)
            live_through_faults(net)
            assert net.meetings == []
            for disk in disks.values():
                disk.close()


@pytest.mark.parametrize("lives", [False, *exhaustively(True)])
@pytest.mark.parametrize("block", seeds(200 // 2 // LYING_HISTORIES))
def test_split_brain_is_reported_and_ends_in_one_history_where_disks_lie(block: int, lives: bool) -> None:
    """A host that changes sides without a report fails in `Net.tick`; hosts that stay apart fail in `all_run`."""
    num_split, num_met = 0, 0
    for seed in range(block * LYING_HISTORIES, (block + 1) * LYING_HISTORIES):
        net = Net(seed, 2 + seed % 4, lives=lives, make_disk=lambda name: LyingDisk(lost_s=5.0), may_split=True)
        live_through_faults(net)
        num_split += bool(net.split_numbers)
        num_met += bool(net.meetings)
        assert net.split_numbers >= {meeting.number for meeting in net.meetings}
    assert num_split >= num_met > 0


class ForgetfulDisk(LyingDisk):
    """Loses all that it has confirmed."""

    def lose_power(self, now: float) -> None:
        self._saved.clear()


@pytest.mark.parametrize("lives", [False, True])
def test_side_with_the_majority_continues_and_the_other_rejoins_it(lives: bool) -> None:
    """b, which trained on with a, forgets that and trains on with c: a, alone by then, is ahead, and goes back."""
    net = Net(1, 3, lost=0.0, lives=lives, make_disk=lambda name: ForgetfulDisk(), may_split=True)
    net.until(lambda: all_run(net), 10)
    cut_off(net, {"c"})
    net.until(lambda: net.last().hosts == ["a", "b"] and net.runs(net.last()), 30)
    net.alive["a"].step += 338
    cut_off(net, {"a"})
    net.under_way.clear()
    net.hosts["b"].lose_power(net.now)
    net.hosts["b"].boot(net.now)
    net.until(lambda: net.alive["b"].epoch.number > 0 and net.runs(net.alive["b"].epoch), 60)
    a, theirs, reached = net.alive["a"], net.alive["b"].epoch, net.alive["a"].step
    assert a.epoch.split_number(theirs) == 1
    net.cut = set()
    net.until(lambda: all_run(net), 60)
    assert a.epoch.split_number(theirs) is None
    (lost,) = [meeting for meeting in net.meetings if not meeting.is_own_kept]
    assert (lost.number, lost.own_hosts, lost.other_hosts) == (1, ["a"], ["b", "c"])
    assert lost.step >= reached > lost.other.step
    assert str(lost) == (
        "split brain: membership epoch 1 was decided twice; the side of b, c continues, the side of a rejoins it"
    )


def split(proposer: str, hosts: str, step: int, number: int = 1) -> MembershipEpoch:
    """Return an epoch that follows the first one of a and b."""
    return MembershipEpoch(number=number, hosts=[*hosts], step=step, proposer=proposer, ancestors=[""] * number)


@pytest.mark.parametrize(
    ("of_a", "of_b", "kept"),
    [
        (split("a:1", "a", 649), split("b:1", "b", 311), "a"),  # the later step
        (split("a:1", "a", 311), split("b:1", "b", 649, number=2), "b"),
        (split("a:1", "a", 311), split("b:1", "b", 311, number=2), "b"),  # then the higher number
        (split("a:1", "a", 311), split("b:1", "b", 311), "b"),  # then any, but the same on both hosts
        (split("a:1", "ab", 311), split("b:1", "b", 649), "b"),  # b is not on the side of a, although that names it
    ],
)
def test_equal_sides_agree_on_the_one_that_continues(of_a: MembershipEpoch, of_b: MembershipEpoch, kept: str) -> None:
    worlds = {"a": of_a, "b": msgspec.structs.replace(of_b, ancestors=["", "b:0"][: of_b.number])}
    hosts = {name: Consensus(name, ConsensusState(world, incarnation=1), host_timeout_s=SILENT_S)
             for name, world in worlds.items()}  # fmt: skip
    for tick in range(20):
        for name, consensus in hosts.items():
            consensus.tick(tick * TICK_S)
            hosts["b" if name == "a" else "a"].receive(consensus.make_status(tick * TICK_S), tick * TICK_S)
    assert all(consensus.epoch.split_number(worlds[kept]) is None for consensus in hosts.values())
    lost = hosts["b" if kept == "a" else "a"]
    assert [one.is_own_kept for one in lost.conflicts] == [False]


def test_host_that_missed_the_end_of_a_split_brain_does_not_revive_its_side() -> None:
    """It comes back with an epoch of three hosts, whose others have long joined the side that has shrunk to two."""
    kept = MembershipEpoch(number=4, hosts=["a", "b"], step=900, proposer="a:1", ancestors=["", "a:1", "a:1", "a:1"])
    lost = MembershipEpoch(number=1, hosts=["b", "c", "d"], step=950, proposer="c:1", ancestors=[""])
    hosts = {name: Consensus(name, ConsensusState(world, incarnation=1), host_timeout_s=SILENT_S)
             for name, world in (("a", kept), ("b", kept), ("c", lost))}  # fmt: skip
    for tick in range(20):
        for name, consensus in hosts.items():
            consensus.tick(tick * TICK_S)
            for other in hosts.keys() - {name}:
                hosts[other].receive(consensus.make_status(tick * TICK_S), tick * TICK_S)
    assert {consensus.epoch.split_number(kept) for consensus in hosts.values()} == {None}


def test_member_that_forgot_that_its_ranks_had_failed_ends_no_proposal() -> None:
    """Its phase is an earlier one then: this raised ValueError on all other hosts."""
    world = MembershipEpoch(number=0, hosts=["a", "b"])
    a, b = (Consensus(name, ConsensusState(world, incarnation=1), host_timeout_s=SILENT_S) for name in "ab")
    a.phase, b.phase = HostPhase.RUNNING, HostPhase.FAILED
    for tick in range(20):
        now = tick * TICK_S
        if tick == 3:
            b = Consensus(
                "b", ConsensusState(world, incarnation=2), host_timeout_s=SILENT_S, join_deadline=now + SILENT_S
            )
            b.receive(a.make_status(now), now)
        b.tick(now)
        a.receive(b.make_status(now), now)
        a.tick(now)
        b.receive(a.make_status(now), now)
    assert b.phase == HostPhase.WAITING
    assert a.epoch.number == 0


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4, 5, 6])
def test_two_quorums_have_a_host_in_common(num_hosts: int) -> None:
    world = MembershipEpoch(number=0, hosts=list(NAMES[:num_hosts]))
    sides = [set(side) for num in range(num_hosts + 1) for side in itertools.combinations(world.hosts, num)]
    quorums = [side for side in sides if world.is_quorum(side)]
    assert all(one & other for one in quorums for other in quorums)
    assert len(quorums) == len(sides) / 2  # and of two sides one always is a quorum
    assert not world.is_quorum("xyz")


def well(num_hosts: int, *, lives: bool = False) -> Net:
    net = Net(1, num_hosts, lost=0.0, lives=lives)
    net.until(lambda: all_run(net), 5)
    for _ in range(50):
        net.tick()
    assert set(net.decided) == {0}  # nothing happens while all is well
    return net


@pytest.mark.parametrize("gone", "abc")
def test_remaining_hosts_continue_after_any_host_loss_and_readmit_it(gone: str) -> None:
    net = well(3)
    net.hosts[gone].consensus = None
    left = [name for name in "abc" if name != gone]
    took_s = net.until(lambda: net.last().hosts == left and net.runs(net.last()), 30)
    assert took_s < SILENT_S + 3
    assert (net.last().number, net.last().why, net.last().ancestors) == (1, f"{gone} is out of reach", [""])
    assert net.last().proposer.partition(":")[0] in left
    net.hosts[gone].boot(net.now)
    net.until(lambda: all_run(net), 10)
    assert net.last().hosts == [*left, gone]


@pytest.mark.parametrize(
    ("num_hosts", "cut_off", "goes_on"),
    [(3, "c", "ab"), (4, "a", "bcd"), (4, "bd", "ac"), (4, "ad", "ad"), (5, "ab", "cde")],
)
def test_only_one_side_of_a_partition_continues(num_hosts: int, cut_off: str, goes_on: str) -> None:
    """The one with more hosts; of two halves the one with the first host."""
    net = well(num_hosts)
    others = set(net.hosts) - set(cut_off)
    net.cut = {pair for one in cut_off for other in others for pair in ((one, other), (other, one))}
    net.until(lambda: net.runs(net.last()) and net.last().hosts == list(goes_on), 30)
    waiting = net.alive[next(name for name in net.hosts if name not in goes_on)]
    for _ in range(100):
        net.tick()
    assert (waiting.epoch.number, waiting.has_lost_quorum(net.now)) == (0, True)
    assert net.last().number == 1
    net.cut = set()
    net.until(lambda: all_run(net), 30)


@pytest.mark.parametrize("stopped", "ab")
def test_resumed_host_does_not_declare_others_dead(stopped: str) -> None:
    net = well(2)
    net.stopped = {stopped}
    for _ in range(150):
        net.tick()
    net.stopped = set()
    net.until(lambda: all_run(net), 30)
    assert [world.hosts for world in net.decided.values()] == ([["a", "b"]] * 2 if stopped == "a" else
                                                               [["a", "b"], ["a"], ["a", "b"]])  # fmt: skip


def test_one_directional_cut_is_treated_as_partition() -> None:
    net = well(3)
    net.cut = {("b", "c")}
    net.until(lambda: net.runs(net.last()) and net.last().hosts == ["a", "b"], 30)
    for _ in range(200):
        net.tick()
    assert net.last().number == 1  # c, whom a hears well, does not make them begin again and again


def test_killed_rank_starts_next_epoch_before_timeout() -> None:
    net = well(3)
    net.alive["b"].phase = HostPhase.FAILED
    assert net.until(lambda: net.last().number == 1 and net.runs(net.last()), 5) < SILENT_S
    assert (net.last().hosts, net.last().failures) == (["a", "b", "c"], 1)
    assert net.last().why in ("a failed", "b failed", "c failed")  # whose word came first: the others fail with it


@pytest.mark.parametrize("killed", "abc")
def test_surviving_ranks_keep_state_and_failed_host_is_readmitted(killed: str) -> None:
    """Whoever lost its ranks keeps its vote, and is let in when it has others."""
    net = well(3, lives=True)
    net.alive[killed].phase, net.hosts[killed].has_ranks, net.alive[killed].has_training_state = (
        HostPhase.FAILED,
        False,
        False,
    )
    left = [name for name in "abc" if name != killed]
    assert net.until(lambda: net.last().hosts == left and net.runs(net.last()), 5) < SILENT_S
    assert (net.last().standby_hosts, net.last().is_cold_start, net.last().why) == ([killed], False, f"{killed} failed")
    net.until(lambda: all_run(net), 20)
    assert (net.last().hosts, net.last().is_cold_start, net.last().number) == ([*left, killed], False, 2)
    assert net.last().why == f"{killed} is let in"


def test_host_restarting_its_ranks_votes_when_another_is_lost() -> None:
    net = well(3, lives=True)
    net.random.random = lambda: 1.0  # type: ignore[method-assign]  # nobody's ranks are made ready
    net.alive["b"].phase, net.hosts["b"].has_ranks, net.alive["b"].has_training_state = HostPhase.FAILED, False, False
    net.until(lambda: net.last().hosts == ["a", "c"] and net.runs(net.last()), 5)
    net.hosts["a"].consensus = None
    net.until(lambda: net.last().hosts == ["c"] and net.runs(net.last()), 10)
    assert (net.last().standby_hosts, net.last().is_cold_start) == (["b"], False)


def test_all_ranks_restart_fresh_when_none_survive() -> None:
    net = well(2, lives=True)
    for name in "ab":
        net.alive[name].phase, net.hosts[name].has_ranks, net.alive[name].has_training_state = (
            HostPhase.FAILED,
            False,
            False,
        )
    net.until(lambda: all_run(net), 10)
    assert (net.last().number, net.last().is_cold_start) == (1, True)


def test_repeated_failure_without_progress_ends_run() -> None:
    net = well(2)
    net.go_on = lambda consensus: None  # type: ignore[method-assign]
    for number in range(1, MAX_CONSECUTIVE_FAILURES + 2):
        net.alive["b"].phase = HostPhase.FAILED
        net.until(lambda: {one.epoch.number for one in net.alive.values()} == {number}, 10)  # noqa: B023
    assert net.last().is_over
    net.alive["b"].phase = HostPhase.FAILED
    for _ in range(50):
        net.tick()
    assert net.last().number == MAX_CONSECUTIVE_FAILURES + 1


def test_finished_host_prevents_new_epoch() -> None:
    net = well(2)
    net.go_on = lambda consensus: None  # type: ignore[method-assign]
    net.alive["a"].phase = HostPhase.DONE
    net.alive["b"].phase = HostPhase.FAILED
    for _ in range(50):
        net.tick()
    assert net.last().number == 0


def test_leaving_host_votes_but_is_not_in_next_epoch() -> None:
    net = well(2)
    for consensus in net.alive.values():
        consensus.phase = HostPhase.REGROUPING
    net.alive["a"].phase = HostPhase.LEAVING
    net.until(lambda: net.runs(net.last()) and net.last().hosts == ["b"], 5)


def test_outdated_message_is_ignored() -> None:
    world = MembershipEpoch(number=0, hosts=["a", "b"])
    a, b = (Consensus(name, ConsensusState(world, incarnation=1), host_timeout_s=SILENT_S) for name in "ab")
    first, second = b.make_status(0.0), b.make_status(0.0)
    a.receive(second, 1.0)
    a.receive(first, 9.0)
    assert a.make_status(2.0).live_peers == ["b"]
    assert a.make_status(9.0).live_peers == []
    a.receive(Consensus("b", ConsensusState(world, incarnation=2), host_timeout_s=SILENT_S).make_status(0.0), 9.0)
    assert a.make_status(9.0).live_peers == ["b"]


def test_unchanged_heartbeat_is_not_a_change() -> None:
    world = MembershipEpoch(number=0, hosts=["a", "b"])
    a, b = (Consensus(name, ConsensusState(world, incarnation=1), host_timeout_s=SILENT_S) for name in "ab")
    assert a.receive(b.make_status(0.0), 0.0)
    b.process_samples, b.sampled_at = {1: ProcessSample(pid=7, state="R", cpu_s=1.0)}, 0.2
    said = b.make_status(0.2)
    assert not a.receive(said, 0.2)
    assert a.peer_status("b") == said  # and it was heard
    b.phase = HostPhase.RUNNING
    assert a.receive(b.make_status(0.4), 0.4)
    assert not a.receive(said, 0.6)


def test_dead_connection_is_replaced_within_failure_timeout() -> None:
    """The last word went just before it died: the next, its answer waited for, another try, and a round to spare."""
    assert HEARTBEAT_INTERVAL_S + ACK_TIMEOUT_S + RECONNECT_S + TICK_INTERVAL_S < ELASTIC_HOST_TIMEOUT_S


def test_heartbeats_are_more_frequent_while_epoch_is_being_decided() -> None:
    """Also who is in none: its word is waited for."""
    world = MembershipEpoch(number=0, hosts=["a", "b"])
    a, b, c = (Consensus(name, ConsensusState(world, incarnation=1), host_timeout_s=SILENT_S) for name in "abc")
    a.phase = b.phase = HostPhase.RUNNING
    for one in (b, c):
        one.receive(a.make_status(0.0), 0.0)
        one.make_status(0.0)
        assert not one.is_broadcast_due(TICK_INTERVAL_S)
        assert one.is_broadcast_due(HEARTBEAT_INTERVAL_S)
    a.phase = HostPhase.REGROUPING
    for one in (b, c):
        one.receive(a.make_status(1.0), 1.0)
    for one in (b, c):
        one.make_status(1.0)
        assert one.is_broadcast_due(1.01 + TICK_INTERVAL_S)
