"""Membership by consensus (single-decree Paxos): the hosts decide among themselves which epoch follows the current one.

There is no controller and no leader that must survive. The voters of epoch n decide epoch n + 1 by one Paxos instance
[Lamport 1998]. A host only ever broadcasts its whole state, at an interval, so a lost message is made up for by the
next one. Each message of the algorithm is a condition on the states received:

    condition                               action
    a ballot (round, host) is higher        every voter promises it, and reports what it had accepted before
    a quorum of n has promised b            b's host accepts in b the value accepted last, else its own proposal
    a value was accepted in b               every voter that promised b, and nothing higher, accepts it in b
    a quorum of n has accepted in b         that value is epoch n + 1
    a host is in a later epoch              a quorum chose it: adopt it

In an elastic run (`is_elastic`) the next epoch has the hosts whose ranks survive with their training state. The other
hosts stay voters while they restart their ranks; they are admitted once these are ready and all members have requested
it. Only if no ranks survive do all restart from the newest checkpoint, as they always do in a run that is not elastic.

Two quorums of n have a host in common, so there is one epoch n + 1 whatever messages are lost, hosts partitioned and
agents killed. A host writes what it promised and accepted (`ConsensusState`) to its disk before it broadcasts it. The
side of a partition without a quorum decides nothing, and waits.

Pure: no clock, no network, no file; all of it can be simulated.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator

import msgspec

from evener.core.watch import Look
from evener.core.world import Part, World

Ballot = tuple[int, str]  # its round, and the host that leads it

NO_BALLOT: Ballot = (0, "")
ROUND_S = 0.2  # between ticks, and between broadcasts while an epoch is being decided; changes are broadcast at once
SAY_S = 2 * ROUND_S  # between broadcasts when nothing changed
RETRY_S = 1.0  # for a ballot, until its leader or another host starts the next one
SURE_S = 0.5  # a status received this long after an event was sent after that event
MAX_FAILURES = 6  # in a row, with no step saved in between: the run would fail forever


class Phase(enum.StrEnum):
    """The lifecycle state of a host in its epoch."""

    WAITING = "waiting"  # no ranks yet, or none in this epoch
    READY = "ready"  # not in this epoch; its standby ranks can join the next one
    RUNNING = "running"
    FAILED = "failed"  # its ranks exited with an error
    REGROUP = "regroup"  # its ranks need a new epoch: they requested it, have left, or died with their agent
    LOST = "lost"  # its ranks are alive, but lost a peer and cannot continue in this epoch
    REFUSED = "refused"  # its ranks reported an error that no new epoch would fix
    DONE = "done"  # its ranks finished
    LEAVING = "leaving"  # like REGROUP, but the next epoch is without this host


# Why an epoch ended, in words. If several apply, report the first listed here: the others are its consequences.
ENDED = {
    Phase.REFUSED: "refused", Phase.FAILED: "failed", Phase.LEAVING: "leaves", Phase.REGROUP: "requested a regroup",
    Phase.LOST: "lost a peer",
}  # fmt: skip


class Vote(msgspec.Struct, frozen=True):
    """What a host promised and accepted as a Paxos acceptor, for the epoch after its own."""

    promised: Ballot = NO_BALLOT  # it ignores lower ballots
    accepted: Ballot = NO_BALLOT
    world: World | None = None  # the value it accepted


class Kept(msgspec.Struct, frozen=True):
    """The durable state of a host: on its disk before it is broadcast."""

    world: World  # the newest epoch it knows to be decided
    vote: Vote = Vote()
    life: int = 0  # how often its agent was started


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """The status that a host broadcasts, twice a second or more."""

    host: str
    count: int  # increases, within an incarnation of the agent
    kept: Kept
    hears: list[str]  # hosts it received a status from within the host timeout
    phase: Phase = Phase.WAITING
    has_learned: bool = False  # its ranks are alive, and can continue in a new epoch with their training state
    step: int = -1  # the last step saved, or, in an elastic run, taken
    store: int = 0  # the port of the epoch's store, set by its first host
    why: str = ""  # of its failure
    looks: dict[int, Look] = {}  # of its ranks, by rank; see core/watch.py
    looked_at: float = 0.0  # by its own clock
    hosts: dict[str, Part] = {}  # that may take part, as it knows them; see AgentSpec
    edition: int = 0  # of `hosts`: the highest one holds

    @property
    def age(self) -> tuple[int, int]:
        """The order of a host's statuses: a later one compares greater."""
        return self.kept.life, self.count


def _news_of(statement: Statement) -> Statement:
    """Return the status without what differs in every one, and without the step, which matters only to a new epoch."""
    return msgspec.structs.replace(statement, count=0, looks={}, looked_at=0.0, step=-1)


class Council:
    """One host's part in the consensus.

    Call `receive` with the others' statuses, then `tick`; write `state` to disk if it changed, then `make_status`.
    """

    def __init__(self, host: str, kept: Kept, *, silent_s: float, join_by: float = 0.0, lives: bool = False) -> None:
        """Treat a host as failed after `host_timeout_s` of silence, but not before `join_deadline` or until all joined.

        `is_elastic`: ranks survive from epoch to epoch.
        """
        self.host, self.kept, self._lives = host, kept, lives
        self.phase, self.step, self.store, self.why = Phase.WAITING, kept.world.step, 0, ""
        self.has_learned = False
        self.looks, self.looked_at = dict[int, Look](), 0.0
        self._silent_s, self._join_by = silent_s, join_by
        self._heard: dict[str, tuple[Statement, float]] = {}
        self._looked_at, self._awake_by = math.nan, -math.inf  # the last tick; no host is failed before this
        self._count = 0
        self._said: tuple[object, ...] = ()  # the content of the last broadcast
        self._said_at = -math.inf
        self._ballot, self._raised_at = NO_BALLOT, -math.inf  # the one it leads; when the highest one began
        self._ended: dict[str, float] = {}  # hosts whose ranks have left, and since when

    @property
    def world(self) -> World:
        """The newest epoch decided."""
        return self.kept.world

    @property
    def has_vote(self) -> bool:
        """Whether this host votes on the next epoch."""
        return self.host in self.world.voters

    @property
    def is_member(self) -> bool:
        """Whether this host's ranks are in the epoch."""
        return self.host in self.world.hosts

    def hear(self, statement: Statement, now: float) -> bool:
        """Take in another host's status, unless an older one. Return whether it is more than a heartbeat."""
        previous = self._heard.get(statement.host)
        if statement.host == self.host or (previous is not None and statement.age <= previous[0].age):
            return False
        self._heard[statement.host] = statement, now
        return previous is None or _news_of(statement) != _news_of(previous[0])

    def is_to_say(self, now: float) -> bool:
        """Return whether the state changed since the last broadcast, or a heartbeat is due."""
        pause_s = ROUND_S if self._is_deciding else SAY_S
        return self._state(now) != self._said or now - self._said_at >= pause_s

    @property
    def _is_deciding(self) -> bool:
        """Whether a member has left this epoch and the next one is not decided yet."""
        return any(phase in ENDED for phase in self._phases().values())

    def _state(self, now: float) -> tuple[object, ...]:
        return self.kept, self.phase, self.has_learned, self.store, self._hears(now)

    def say(self, now: float) -> Statement:
        """Return this host's status, to broadcast now."""
        self._count += 1
        self._said, self._said_at = self._state(now), now
        return Statement(host=self.host, count=self._count, kept=self.kept, hears=sorted(self._hears(now)),
                         phase=self.phase, has_learned=self.has_learned, step=self.step, store=self.store,
                         why=self.why, looks=self.looks, looked_at=self.looked_at)  # fmt: skip

    def of(self, host: str) -> Statement | None:
        """Return the newest status of another host, or None if it is of another epoch than this host's."""
        received = self._heard.get(host)
        return received[0] if received and received[0].kept.world.number == self.world.number else None

    def waiting(self, now: float) -> list[str]:
        """Return the hosts that could be members of the next epoch and are not of this one."""
        candidates = [host for host in self._able(now) if host not in self.world.hosts]
        return [host for host in candidates if not self._lives or self._is_ready(host)]

    def is_cut_off(self, now: float) -> bool:
        """Return whether this host can reach no quorum, and must wait."""
        return self.has_vote and now >= self._awake_by and not self.world.is_quorum(self._there(now))

    @property
    def has_ended(self) -> bool:
        """Whether any member has reported the run as finished."""
        return Phase.DONE in self._phases().values()

    # --- deciding ---------------------------------------------------------------------------------------------------

    def look(self, now: float) -> bool:
        """Take part in the consensus; return whether a new epoch began."""
        previous_number = self.world.number
        self._wake(now)
        self._learn()
        if not set(self.world.voters).difference(self._able(now)):
            self._join_by = self._awake_by = -math.inf  # all have joined
        if self.has_vote and not self.world.is_over:
            for host, phase in self._phases().items():
                if phase in ENDED:
                    self._ended.setdefault(host, now)
            self._vote(now)
            self._lead(now)
            self._count_votes()
        return self.world.number > previous_number

    def _wake(self, now: float) -> None:
        """After a long pause between ticks this host was suspended: give the others a full timeout before they fail."""
        pause_s, self._looked_at = now - self._looked_at, now
        if pause_s > self._silent_s / 2:
            self._awake_by = now + self._silent_s

    def _learn(self) -> None:
        """A host in a later epoch learned it from a quorum, so adopt it."""
        newest = max((statement.kept.world for statement, _ in self._heard.values()), default=self.world,
                     key=lambda world: world.number)  # fmt: skip
        if newest.number > self.world.number:
            self._begin(newest)

    def _begin(self, world: World) -> None:
        self.kept = Kept(world, Vote(), self.kept.life)
        self.phase, self.store, self.why, self.looks = Phase.WAITING, 0, "", {}
        self.has_learned &= not world.is_fresh and self.host in world.hosts
        self._ballot, self._raised_at, self._ended = NO_BALLOT, -math.inf, {}

    def _votes(self) -> Iterator[tuple[str, Vote]]:
        """Yield the acceptor state of each voter of this epoch, as far as known."""
        for host in self.world.voters:
            if host == self.host:
                yield host, self.kept.vote
            elif (statement := self.of(host)) is not None:
                yield host, statement.kept.vote

    def _set(self, vote: Vote) -> None:
        self.kept = Kept(self.world, vote, self.kept.life)

    def _vote(self, now: float) -> None:
        """As an acceptor: promise the highest ballot, and accept what was accepted in it."""
        votes = [vote for _, vote in self._votes()]
        highest = max(vote.promised for vote in votes)
        mine = self.kept.vote
        if highest > mine.promised:
            mine, self._raised_at = Vote(highest, mine.accepted, mine.world), now
        for vote in votes:
            if vote.accepted == mine.promised != mine.accepted:
                mine = Vote(mine.promised, vote.accepted, vote.world)
        self._set(mine)

    def _lead(self, now: float) -> None:
        """As a proposer: start a ballot when it is this host's turn, and accept in it once a quorum has promised."""
        mine = self.kept.vote
        is_waiting = now - self._raised_at < RETRY_S
        if is_waiting and mine.promised == self._ballot:
            promises = {host: vote for host, vote in self._votes() if vote.promised == self._ballot}
            if mine.accepted != self._ballot and self.world.is_quorum(promises):
                last = max(promises.values(), key=lambda vote: vote.accepted)
                world = last.world if last.accepted != NO_BALLOT else self._wanted(now)
                if world is not None:
                    self._set(Vote(self._ballot, self._ballot, world))
        elif not is_waiting and self._there(now)[0] == self.host and self._wanted(now) is not None:
            self._ballot, self._raised_at = (mine.promised[0] + 1, self.host), now
            self._set(Vote(self._ballot, mine.accepted, mine.world))

    def _count_votes(self) -> None:
        """Enter the epoch that a quorum has accepted in one ballot, if any."""
        accepted: dict[Ballot, set[str]] = {}
        worlds: dict[Ballot, World] = {}
        for host, vote in self._votes():
            if vote.world is not None:
                accepted.setdefault(vote.accepted, set()).add(host)
                worlds[vote.accepted] = vote.world
        for ballot, hosts in accepted.items():
            if self.world.is_quorum(hosts):
                self._begin(worlds[ballot])
                return

    # --- what this host would propose -------------------------------------------------------------------------------

    def _hears(self, now: float) -> set[str]:
        return {host for host, (_, at) in self._heard.items() if now - at <= self._silent_s}

    def _there(self, now: float) -> list[str]:
        """Return this host and those connected to it both ways: voters first, members by rank before standby hosts."""
        connected = {host for host in self._hears(now) if self.host in self._heard[host][0].hears} | {self.host}
        return [host for host in self.world.voters if host in connected] + sorted(connected - set(self.world.voters))

    def _able(self, now: float) -> list[str]:
        """Return those of them that would take part and are all connected to each other; earlier ones have priority."""
        hosts: list[str] = []
        for host in self._there(now):
            if not self._leaves(host) and all(self._hear_each_other(host, other) for other in hosts):
                hosts.append(host)
        return hosts

    def _hear_each_other(self, a: str, b: str) -> bool:
        """Return whether two hosts hear each other; for this host, `_connected_hosts` has checked it already."""
        return self.host in (a, b) or (a in self._heard[b][0].hears and b in self._heard[a][0].hears)

    def _phase_of(self, host: str) -> Phase:
        return self.phase if host == self.host else self._heard[host][0].phase

    def _leaves(self, host: str) -> bool:
        return self._phase_of(host) in (Phase.LEAVING, Phase.DONE)

    def _why(self, host: str) -> str:
        """Return the reason that the host gives for its failure."""
        return self.why if host == self.host else self._heard[host][0].why

    def _phases(self) -> dict[str, Phase]:
        """Return the phase of each member, as far as known."""
        statuses = {host: self if host == self.host else self.of(host) for host in self.world.hosts}
        return {host: status.phase for host, status in statuses.items() if status is not None}

    def _wanted(self, now: float) -> World | None:
        """Return the epoch that should follow, or None while this one should continue."""
        world, connected = self.world, self._there(now)
        if now < max(self._join_by, self._awake_by) or not world.is_quorum(connected):
            return None
        phases = {host: phase for host, phase in self._phases().items() if host in connected}
        able = hosts = self._able(now)
        lost = [host for host in world.hosts if host not in hosts and not (host in connected and self._leaves(host))]
        ended = {host: phases[host] for host in self._ended if host in phases}  # in the order in which they ended
        gave_up = not lost and all(self._leaves(host) and self._why(host) for host in phases)
        if Phase.DONE in phases.values() or not (lost or ended) or not (hosts or gave_up):
            return None
        sure_at = min(self._ended.values(), default=now) + SURE_S
        if not lost and any(self._heard[host][1] < sure_at for host in hosts if host != self.host):
            return None  # no status since: the others may have failed because that host is gone
        surviving = [host for host in world.hosts if host in able and self._has_learned(host)]
        if surviving:
            requested = {host for host in ended if (phases[host] == Phase.REGROUP and host in surviving)
                     or (self._leaves(host) and self._has_learned(host))}  # fmt: skip
            only_requested = not lost and requested == ended.keys()
            if only_requested and len(requested) < len(world.hosts):
                return None  # the others will request it as soon as they learn of it
            hosts = surviving + (self.waiting(now) if only_requested else [])
        step = max(world.step, self.step, *(self._heard[host][0].step for host in hosts if host != self.host))
        has_failed = Phase.FAILED in ended.values() and not lost  # not as a consequence of a lost host
        failures = 0 if step > world.step else world.failures
        failures += has_failed
        unreachable = [f"{host} is out of reach" for host in lost]  # the others' failures are its consequence
        first = min(ended, key=lambda host: [*ENDED].index(phases[host]), default="")
        joining = [host for host in hosts if host not in world.hosts]
        reason = ", ".join(unreachable) or f"{first} {ENDED[phases[first]]}"
        if joining and not unreachable and phases[first] == Phase.REGROUP:  # that is why it was requested
            reason = f"{' and '.join(joining)} {'is' if len(joining) == 1 else 'are'} let in"
        is_over = failures > MAX_FAILURES or Phase.REFUSED in ended.values() or not hosts
        hosts = world.hosts if is_over else hosts
        return World(number=world.number + 1, hosts=hosts, others=[host for host in able if host not in hosts],
                     is_fresh=not surviving, why=reason, step=step, failures=failures, is_over=is_over)  # fmt: skip

    def _is_ready(self, host: str) -> bool:
        status = self if host == self.host else self.of(host)
        return status is not None and status.phase == Phase.READY

    def _has_learned(self, host: str) -> bool:
        """Return whether the host's ranks are alive with the training state of this epoch."""
        status = self if host == self.host else self.of(host)
        return status is not None and status.has_learned
