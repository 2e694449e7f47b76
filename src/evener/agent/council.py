"""Who is in the run from now on? The hosts agree on it among themselves: no controller, nobody who must live for it.

Which world follows world n its hosts decide by Paxos [Lamport 1998], one instance for each n. All that a host says is
its whole state, again and again, so nothing is lost for long by a message that is, and each of the algorithm's messages
is something that the others see in a state:

    what is seen                            what follows
    a ballot (round, host) that is higher   whoever decides promises it, and says what it had accepted before
    a quorum of n has promised b            b's host accepts in b what was accepted last, else what it wants
    a world was accepted in b               whoever has promised b, and nothing higher, accepts it in b
    a quorum of n has accepted in b         that is world n + 1
    somebody is in a later world            a quorum has decided so: it is believed

Where ranks live on (`lives`), a world that follows another has those in it whose ranks are left, with what they have
learned; the other hosts keep their vote while they start theirs anew, and are let in when these are ready and all have
asked for it. Only where nobody's ranks are left all begin again with the newest checkpoint, as they always do where
ranks do not live on.

Two quorums of n have a host in common, so there is one world n + 1, however messages are lost, hosts cut off and agents
killed in between; what a host has promised and accepted (`Kept`) it keeps on its disk before it says it. The side of a
cut without a quorum decides nothing, and waits.

Pure: no clock, no network, no file; all of it can be simulated.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator

import msgspec

from evener.core.watch import Look
from evener.core.world import Part, World

Ballot = tuple[int, str]  # its round, and who leads it

NO_BALLOT: Ballot = (0, "")
ROUND_S = 0.2  # between looks, and statements while it is decided on a world; what is new is said at once
SAY_S = 2 * ROUND_S  # between statements where there is nothing new
RETRY_S = 1.0  # for a ballot, until its leader begins another one, or somebody else
SURE_S = 0.5  # what is heard so long after something else was said after it
MAX_FAILURES = 6  # in a row, each before another step was saved: it would fail for ever


class Phase(enum.StrEnum):
    """How a host is doing in its world."""

    WAITING = "waiting"  # no ranks yet, or none in this world
    READY = "ready"  # not in this world, and its ranks could be in the next
    RUNNING = "running"
    FAILED = "failed"  # its ranks ended otherwise than they should
    REGROUP = "regroup"  # its ranks are to be in another world: they ask for it, have left, or went with their agent
    LOST = "lost"  # its ranks are there, and have lost somebody without whom they can't go on in this one
    REFUSED = "refused"  # its ranks say that no other world would help
    DONE = "done"  # its ranks have ended as they should
    LEAVING = "leaving"  # REGROUP, but without this host


# What ends a world, in words; of several what comes first here, for the others follow from it.
ENDED = {
    Phase.REFUSED: "refused", Phase.FAILED: "failed", Phase.LEAVING: "leaves", Phase.REGROUP: "asked for it",
    Phase.LOST: "lost somebody",
}  # fmt: skip


class Vote(msgspec.Struct, frozen=True):
    """Of a host, on what follows its world."""

    promised: Ballot = NO_BALLOT  # takes no part in a lower one any more
    accepted: Ballot = NO_BALLOT
    world: World | None = None  # that it accepted


class Kept(msgspec.Struct, frozen=True):
    """What a host must never forget."""

    world: World  # the newest that it knows to be decided
    vote: Vote = Vote()
    life: int = 0  # how often its agent was started


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says, twice a second or more."""

    host: str
    count: int  # grows, within a life
    kept: Kept
    hears: list[str]  # hosts that it has heard lately
    phase: Phase = Phase.WAITING
    has_learned: bool = False  # its ranks are there, and can go on in another world with what they know
    step: int = -1  # the last that was saved, or that ranks which live on have taken
    store: int = 0  # the port of the world's store, by its first host
    why: str = ""  # it failed
    looks: dict[int, Look] = {}  # at its ranks, by their numbers; see core/watch.py
    looked_at: float = 0.0  # by its own clock
    hosts: dict[str, Part] = {}  # that may take part, as it knows them; see AgentSpec
    edition: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """Later statements have a higher one."""
        return self.kept.life, self.count


def _news_of(statement: Statement) -> Statement:
    """Without what each statement has of its own, and steps: they count once a world is decided."""
    return msgspec.structs.replace(statement, count=0, looks={}, looked_at=0.0, step=-1)


class Council:
    """One host's seat. `hear` what others say, then `look`; keep `kept` where that changed, and `say`."""

    def __init__(self, host: str, kept: Kept, *, silent_s: float, join_by: float = 0.0, lives: bool = False) -> None:
        """Who was not heard for `silent_s` is gone; but until `join_by` nobody is before all have been there once.

        `lives`: ranks go on from world to world.
        """
        self.host, self.kept, self._lives = host, kept, lives
        self.phase, self.step, self.store, self.why = Phase.WAITING, kept.world.step, 0, ""
        self.has_learned = False
        self.looks, self.looked_at = dict[int, Look](), 0.0
        self._silent_s, self._join_by = silent_s, join_by
        self._heard: dict[str, tuple[Statement, float]] = {}
        self._looked_at, self._awake_by = math.nan, -math.inf  # last; until then nobody is gone
        self._count = 0
        self._said: tuple[object, ...] = ()  # without what changes in each step
        self._said_at = -math.inf
        self._ballot, self._raised_at = NO_BALLOT, -math.inf  # that it leads; when anybody began the highest one
        self._ended: dict[str, float] = {}  # whose ranks are known to have ended, and since when

    @property
    def world(self) -> World:
        """The newest that is decided."""
        return self.kept.world

    @property
    def has_vote(self) -> bool:
        """Does this host say with others what follows it?"""
        return self.host in self.world.voters

    @property
    def is_member(self) -> bool:
        """Are its ranks in it?"""
        return self.host in self.world.hosts

    def hear(self, statement: Statement, now: float) -> bool:
        """What another host said; an older one than the last is none. Is it news, more than that it is still there?"""
        last = self._heard.get(statement.host)
        if statement.host == self.host or (last is not None and statement.age <= last[0].age):
            return False
        self._heard[statement.host] = statement, now
        return last is None or _news_of(statement) != _news_of(last[0])

    def is_to_say(self, now: float) -> bool:
        """Is there something new, or do the others wait for a word?"""
        pause_s = ROUND_S if self._is_deciding else SAY_S
        return self._state(now) != self._said or now - self._said_at >= pause_s

    @property
    def _is_deciding(self) -> bool:
        """Has a member's part in this world ended, and it is not known yet what follows?"""
        return any(phase in ENDED for phase in self._phases().values())

    def _state(self, now: float) -> tuple[object, ...]:
        return self.kept, self.phase, self.has_learned, self.store, self._hears(now)

    def say(self, now: float) -> Statement:
        """This host's state."""
        self._count += 1
        self._said, self._said_at = self._state(now), now
        return Statement(host=self.host, count=self._count, kept=self.kept, hears=sorted(self._hears(now)),
                         phase=self.phase, has_learned=self.has_learned, step=self.step, store=self.store,
                         why=self.why, looks=self.looks, looked_at=self.looked_at)  # fmt: skip

    def of(self, host: str) -> Statement | None:
        """The newest word of another host, where it is of the world that this one is in."""
        heard = self._heard.get(host)
        return heard[0] if heard and heard[0].kept.world.number == self.world.number else None

    def waiting(self, now: float) -> list[str]:
        """Hosts that could be members, and are not."""
        others = [host for host in self._able(now) if host not in self.world.hosts]
        return [host for host in others if not self._lives or self._is_ready(host)]

    def is_cut_off(self, now: float) -> bool:
        """Is this one on the side that must wait?"""
        return self.has_vote and now >= self._awake_by and not self.world.is_quorum(self._there(now))

    @property
    def has_ended(self) -> bool:
        """Is the run done, by the word of any member?"""
        return Phase.DONE in self._phases().values()

    # --- deciding ---------------------------------------------------------------------------------------------------

    def look(self, now: float) -> bool:
        """Take part in deciding; has a new world begun?"""
        was = self.world.number
        self._wake(now)
        self._learn()
        if not set(self.world.voters).difference(self._able(now)):
            self._join_by = self._awake_by = -math.inf  # all are there
        if self.has_vote and not self.world.is_over:
            for host, phase in self._phases().items():
                if phase in ENDED:
                    self._ended.setdefault(host, now)
            self._vote(now)
            self._lead(now)
            self._count_votes()
        return self.world.number > was

    def _wake(self, now: float) -> None:
        """Whoever has not looked for long was stopped: that it heard nobody, and nobody it, says nothing of them."""
        slept, self._looked_at = now - self._looked_at, now
        if slept > self._silent_s / 2:
            self._awake_by = now + self._silent_s

    def _learn(self) -> None:
        """Whoever is further has it from a quorum."""
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
        """Of those who decide what follows this world, as far as they are known."""
        for host in self.world.voters:
            if host == self.host:
                yield host, self.kept.vote
            elif (statement := self.of(host)) is not None:
                yield host, statement.kept.vote

    def _set(self, vote: Vote) -> None:
        self.kept = Kept(self.world, vote, self.kept.life)

    def _vote(self, now: float) -> None:
        """Promise and accept as others do whose ballot is higher."""
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
        """Begin a ballot where this host is to, and see it through."""
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
        """Has a quorum accepted in one ballot?"""
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

    # --- what this host would have ----------------------------------------------------------------------------------

    def _hears(self, now: float) -> set[str]:
        return {host for host, (_, at) in self._heard.items() if now - at <= self._silent_s}

    def _there(self, now: float) -> list[str]:
        """This host, and those that it hears and that hear it; who has a vote first, of these members, by rank."""
        both = {host for host in self._hears(now) if self.host in self._heard[host][0].hears} | {self.host}
        return [host for host in self.world.voters if host in both] + sorted(both - set(self.world.voters))

    def _able(self, now: float) -> list[str]:
        """Of them those that would take part and all hear each other; whoever comes first stays."""
        found: list[str] = []
        for host in self._there(now):
            if not self._leaves(host) and all(self._hear_each_other(host, other) for other in found):
                found.append(host)
        return found

    def _hear_each_other(self, one: str, other: str) -> bool:
        """What this host hears, and who hears it, is known already."""
        return self.host in (one, other) or (one in self._heard[other][0].hears and other in self._heard[one][0].hears)

    def _phase_of(self, host: str) -> Phase:
        return self.phase if host == self.host else self._heard[host][0].phase

    def _leaves(self, host: str) -> bool:
        return self._phase_of(host) in (Phase.LEAVING, Phase.DONE)

    def _why(self, host: str) -> str:
        """What it says of its failure."""
        return self.why if host == self.host else self._heard[host][0].why

    def _phases(self) -> dict[str, Phase]:
        """Of the members, as far as they are known."""
        told = {host: self if host == self.host else self.of(host) for host in self.world.hosts}
        return {host: one.phase for host, one in told.items() if one is not None}

    def _wanted(self, now: float) -> World | None:
        """The world that should follow, if this host had to say; None: none."""
        world, there = self.world, self._there(now)
        if now < max(self._join_by, self._awake_by) or not world.is_quorum(there):
            return None
        phases = {host: phase for host, phase in self._phases().items() if host in there}
        able = hosts = self._able(now)
        lost = [host for host in world.hosts if host not in hosts and not (host in there and self._leaves(host))]
        ended = {host: phases[host] for host in self._ended if host in phases}  # the first to end comes first
        gave_up = not lost and all(self._leaves(host) and self._why(host) for host in phases)
        if Phase.DONE in phases.values() or not (lost or ended) or not (hosts or gave_up):
            return None
        sure_at = min(self._ended.values(), default=now) + SURE_S
        if not lost and any(self._heard[host][1] < sure_at for host in hosts if host != self.host):
            return None  # not heard since: whoever failed may have failed because that one is gone
        left = [host for host in world.hosts if host in able and self._has_learned(host)]
        if left:
            asked = {host for host in ended if (phases[host] == Phase.REGROUP and host in left)
                     or (self._leaves(host) and self._has_learned(host))}  # fmt: skip
            only_asked = not lost and asked == ended.keys()
            if only_asked and len(asked) < len(world.hosts):
                return None  # the others ask as soon as they have heard of it
            hosts = left + (self.waiting(now) if only_asked else [])
        step = max(world.step, self.step, *(self._heard[host][0].step for host in hosts if host != self.host))
        has_failed = Phase.FAILED in ended.values() and not lost  # by themselves
        failures = 0 if step > world.step else world.failures
        failures += has_failed
        away = [f"{host} is out of reach" for host in lost]  # the others fail with it
        first = min(ended, key=lambda host: [*ENDED].index(phases[host]), default="")
        comes = [host for host in hosts if host not in world.hosts]
        why = ", ".join(away) or f"{first} {ENDED[phases[first]]}"
        if comes and not away and phases[first] == Phase.REGROUP:  # that is what it asked for
            why = f"{' and '.join(comes)} {'is' if len(comes) == 1 else 'are'} let in"
        is_over = failures > MAX_FAILURES or Phase.REFUSED in ended.values() or not hosts
        hosts = world.hosts if is_over else hosts
        return World(number=world.number + 1, hosts=hosts, others=[host for host in able if host not in hosts],
                     is_fresh=not left, why=why, step=step, failures=failures, is_over=is_over)  # fmt: skip

    def _is_ready(self, host: str) -> bool:
        told = self if host == self.host else self.of(host)
        return told is not None and told.phase == Phase.READY

    def _has_learned(self, host: str) -> bool:
        """Are its ranks there, with all that was learned in this world?"""
        told = self if host == self.host else self.of(host)
        return told is not None and told.has_learned
