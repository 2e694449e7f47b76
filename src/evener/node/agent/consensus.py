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

If a disk confirms a write and loses it in a power loss, a host forgets a promise, and there can be two epochs n + 1:
split brain. Each epoch carries the proposers of those before it, so hosts recognize two histories when they meet. The
side with the majority continues: the one with more hosts, and of equal sides the one whose epoch began at the later
step, then the one with the higher epoch number. Each host of another side abandons its epoch and its ranks' training
state, adopts the epoch of that side, and rejoins like a host that was lost (`EpochConflict`).

Pure: no clock, no network, no file; all of it can be simulated.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from evener.core.run.hang_detector import ProcessSample
from evener.core.run.membership_epoch import HostEntry, MembershipEpoch

Ballot = tuple[int, str]  # (round, host that leads the ballot)

NO_BALLOT: Ballot = (0, "")
# between ticks, and between broadcasts while an epoch is being decided; changes are broadcast at once
TICK_INTERVAL_S = 0.2
HEARTBEAT_INTERVAL_S = 2 * TICK_INTERVAL_S  # between broadcasts of an unchanged status
BALLOT_TIMEOUT_S = 1.0  # for a ballot, until its leader or another host starts the next one
FAILURE_CONFIRM_S = 0.5  # a status received this long after an event was sent after that event
CONFLICT_SETTLE_S = 1.0  # after two histories met, until one is abandoned: the statuses of all hosts have arrived
MAX_CONSECUTIVE_FAILURES = 6  # in a row, with no step saved in between: the run would fail forever


class HostPhase(enum.StrEnum):
    """The lifecycle state of a host in its epoch."""

    WAITING = "waiting"  # no ranks yet, or none in this epoch
    READY = "ready"  # not in this epoch; its standby ranks can join the next one
    RUNNING = "running"
    FAILED = "failed"  # its ranks exited with an error
    REGROUPING = "regroup"  # its ranks need a new epoch: they requested it, have left, or died with their agent
    PEER_LOST = "lost"  # its ranks are alive, but lost a peer and cannot continue in this epoch
    FATAL = "refused"  # its ranks reported an error that no new epoch would fix
    DONE = "done"  # its ranks finished
    LEAVING = "leaving"  # like REGROUPING, but the next epoch is without this host


# Why an epoch ended, in words. If several apply, report the first listed here: the others are its consequences.
EPOCH_END_REASONS = {
    HostPhase.FATAL: "refused",
    HostPhase.FAILED: "failed",
    HostPhase.LEAVING: "leaves",
    HostPhase.REGROUPING: "requested a regroup",
    HostPhase.PEER_LOST: "lost a peer",
}


@dataclass(frozen=True)
class EpochEnd:
    """The reason why the current epoch should end, as one host sees it: `lost` or `ended` is not empty."""

    lost: list[str]  # members out of reach
    ended: dict[str, HostPhase]  # the phases of members whose ranks have left, in the order in which they left

    def reason(self, joining: list[str]) -> str:
        """Return the reason in words; `joining` are the hosts that the next epoch lets in."""
        if self.lost:  # the others' failures are its consequence
            return ", ".join(f"{host} is out of reach" for host in self.lost)
        first = min(self.ended, key=lambda host: [*EPOCH_END_REASONS].index(self.ended[host]))
        if joining and self.ended[first] == HostPhase.REGROUPING:  # that is why it was requested
            return f"{' and '.join(joining)} {'is' if len(joining) == 1 else 'are'} let in"
        return f"{first} {EPOCH_END_REASONS[self.ended[first]]}"


@dataclass(frozen=True)
class EpochConflict:
    """The meeting of two histories that both decided epoch `number`, as one host resolves it."""

    number: int
    own: MembershipEpoch
    other: MembershipEpoch
    own_hosts: list[str]  # the hosts on this host's side when they met
    other_hosts: list[str]
    step: int  # this host's step when they met
    is_own_kept: bool  # else this host adopted the other epoch

    def __str__(self) -> str:
        kept, lost = (self.own_hosts, self.other_hosts) if self.is_own_kept else (self.other_hosts, self.own_hosts)
        return (
            f"split brain: membership epoch {self.number} was decided twice; "
            f"the side of {', '.join(kept)} continues, the side of {', '.join(lost)} rejoins it"
        )


class AcceptorState(msgspec.Struct, frozen=True):
    """The promise and the accepted value of a host, as a Paxos acceptor, for the epoch after its current one."""

    promised: Ballot = NO_BALLOT  # it ignores lower ballots
    accepted: Ballot = NO_BALLOT
    value: MembershipEpoch | None = None  # that it accepted


class ConsensusState(msgspec.Struct, frozen=True):
    """The durable state of a host, written to its disk before it is broadcast."""

    epoch: MembershipEpoch  # the newest epoch it knows to be decided
    vote: AcceptorState = AcceptorState()
    incarnation: int = 0  # of its agent: higher at each start, also of a host that has forgotten its last one


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status that a host broadcasts at least twice a second: the heartbeat of the host, not of its ranks."""

    host: str
    sequence: int  # increases, within an incarnation of the agent
    consensus_state: ConsensusState
    live_peers: list[str]  # hosts it received a status from within the host timeout
    phase: HostPhase = HostPhase.WAITING
    has_training_state: bool = False  # its ranks are alive, and can continue in a new epoch with their training state
    step: int = -1  # the last step saved, or, in an elastic run, taken
    store_port: int = 0  # the port of the epoch's store, set by its first host
    reason: str = ""  # of its failure
    process_samples: dict[int, ProcessSample] = {}  # of its ranks, by rank; see core/run/hang_detector.py
    sampled_at: float = 0.0  # by its own clock
    hosts: dict[str, HostEntry] = {}  # that may take part, as it knows them; see AgentSpec
    version: int = 0  # of `hosts`: the highest one holds
    port: int = 0  # on which its agent listens: the run's, or another one if that was taken; 0: not known

    @property
    def order_key(self) -> tuple[int, int]:
        """The order of a host's statuses: a later one compares greater."""
        return self.consensus_state.incarnation, self.sequence


def _without_volatile_fields(status: HostStatus) -> HostStatus:
    """Return the status without the fields that change with every broadcast or, as the step, with every step."""
    return msgspec.structs.replace(status, sequence=0, process_samples={}, sampled_at=0.0, step=-1)


class Consensus:
    """One host's part in the consensus.

    Call `receive` with the others' statuses, then `tick`; write `state` to disk if it changed, then `make_status`.
    """

    def __init__(
        self,
        host: str,
        state: ConsensusState,
        *,
        host_timeout_s: float,
        join_deadline: float = 0.0,
        is_elastic: bool = False,
    ) -> None:
        """Treat a host as failed after `host_timeout_s` of silence, from `join_deadline` on or once all have joined.

        `is_elastic`: ranks survive from epoch to epoch.
        """
        self.host, self.state, self._is_elastic = host, state, is_elastic
        self.phase, self.step, self.store_port, self.reason = HostPhase.WAITING, state.epoch.step, 0, ""
        self.has_training_state = False
        self.process_samples, self.sampled_at = dict[int, ProcessSample](), 0.0
        self._host_timeout_s, self._join_deadline = host_timeout_s, join_deadline
        self._received: dict[str, tuple[HostStatus, float]] = {}
        self._ticked_at, self._grace_until = math.nan, -math.inf  # the last tick; no host is failed before this
        self._sequence = 0
        self._last_broadcast: tuple[object, ...] = ()  # the content of the last broadcast
        self._last_broadcast_at = -math.inf
        self._ballot, self._ballot_started_at = NO_BALLOT, -math.inf  # the ballot it leads; start of the highest one
        self._ended_at: dict[str, float] = {}  # host: when its ranks left
        self.conflicts: list[EpochConflict] = []  # resolved here, the newest last
        self._conflict_since: float | None = None  # when another history was first received

    @property
    def epoch(self) -> MembershipEpoch:
        """The newest decided epoch that this host knows."""
        return self.state.epoch

    @property
    def is_voter(self) -> bool:
        """Return whether this host votes on the next epoch."""
        return self.host in self.epoch.voters

    @property
    def is_member(self) -> bool:
        """Return whether this host's ranks are in the epoch."""
        return self.host in self.epoch.hosts

    def delay_join(self, seconds: float) -> None:
        """Wait longer for the others to join: they could not call this host for so many seconds."""
        self._join_deadline += seconds

    def receive(self, status: HostStatus, now: float) -> bool:
        """Store another host's status, unless a later one is stored. Return whether its content has changed."""
        previous = self._received.get(status.host)
        if status.host == self.host or (previous is not None and status.order_key <= previous[0].order_key):
            return False
        self._received[status.host] = status, now
        return previous is None or _without_volatile_fields(status) != _without_volatile_fields(previous[0])

    def is_broadcast_due(self, now: float) -> bool:
        """Return whether to broadcast the status now: its content changed, or the broadcast interval is over."""
        pause_s = TICK_INTERVAL_S if self._is_epoch_ending else HEARTBEAT_INTERVAL_S
        return self._broadcast_content(now) != self._last_broadcast or now - self._last_broadcast_at >= pause_s

    @property
    def _is_epoch_ending(self) -> bool:
        """Return whether the phase of a member ends this epoch; the next one is then not decided yet."""
        return any(phase in EPOCH_END_REASONS for phase in self._member_phases().values())

    def _broadcast_content(self, now: float) -> tuple[object, ...]:
        return self.state, self.phase, self.has_training_state, self.store_port, self._live_peers(now)

    def make_status(self, now: float) -> HostStatus:
        """Return this host's status, to broadcast now."""
        self._sequence += 1
        self._last_broadcast, self._last_broadcast_at = self._broadcast_content(now), now
        return HostStatus(
            host=self.host,
            sequence=self._sequence,
            consensus_state=self.state,
            live_peers=sorted(self._live_peers(now)),
            phase=self.phase,
            has_training_state=self.has_training_state,
            step=self.step,
            store_port=self.store_port,
            reason=self.reason,
            process_samples=self.process_samples,
            sampled_at=self.sampled_at,
        )

    def peer_status(self, host: str) -> HostStatus | None:
        """Return the newest status of another host, or None if it is of another epoch than this host's."""
        received = self._received.get(host)
        return received[0] if received and received[0].consensus_state.epoch == self.epoch else None

    def waiting_hosts(self, now: float) -> list[str]:
        """Return the hosts that could be members of the next epoch and are not of this one."""
        candidates = [host for host in self._fully_connected_hosts(now) if host not in self.epoch.hosts]
        return [host for host in candidates if not self._is_elastic or self._is_ready(host)]

    def has_running_peer(self, now: float) -> bool:
        """Return whether ranks of another host that can be reached still train in this epoch."""
        live = self._live_peers(now)
        return any(phase == HostPhase.RUNNING for host, phase in self._member_phases().items() if host in live)

    def has_lost_quorum(self, now: float) -> bool:
        """Return whether this host can reach no quorum, and must wait."""
        return self.is_voter and now >= self._grace_until and not self.epoch.is_quorum(self._connected_hosts(now))

    @property
    def is_run_finished(self) -> bool:
        """Return whether any member has reported the run as finished."""
        return HostPhase.DONE in self._member_phases().values()

    # --- deciding ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> bool:
        """Take part in the consensus; return whether a new epoch began."""
        previous = self.epoch
        self._detect_suspension(now)
        self._adopt_newer_epoch()
        self._resolve_conflict(now)
        if not set(self.epoch.voters).difference(self._fully_connected_hosts(now)):
            self._join_deadline = self._grace_until = -math.inf  # all have joined
        if self.is_voter and not self.epoch.is_over:
            for host, phase in self._member_phases().items():
                if phase in EPOCH_END_REASONS:
                    self._ended_at.setdefault(host, now)
            self._promise_and_accept(now)
            self._propose(now)
            self._adopt_chosen_epoch()
        return self.epoch != previous

    def _detect_suspension(self, now: float) -> None:
        """Detect by a long pause between ticks that this host was suspended; then give the others a full timeout."""
        pause_s, self._ticked_at = now - self._ticked_at, now
        if pause_s > self._host_timeout_s / 2:
            self._grace_until = now + self._host_timeout_s

    def _adopt_newer_epoch(self) -> None:
        """Adopt the newest epoch that another host reports, if it continues this host's history: a quorum chose it."""
        newer = [status.consensus_state.epoch for status, _ in self._received.values()
                 if status.consensus_state.epoch.number > self.epoch.number]  # fmt: skip
        newer = [epoch for epoch in newer if epoch.split_number(self.epoch) is None]
        if newer:
            self._enter_epoch(max(newer, key=lambda epoch: epoch.number))

    def _resolve_conflict(self, now: float) -> None:
        """If connected hosts are in another history, keep this one or adopt that one; see the module's docstring."""
        epochs = {host: self._received[host][0].consensus_state.epoch for host in self._connected_hosts(now)
                  if host != self.host}  # fmt: skip
        if all(epoch == self.epoch or self.epoch.split_number(epoch) is None for epoch in epochs.values()):
            self._conflict_since = None
            return
        self._conflict_since = now if self._conflict_since is None else self._conflict_since
        settled_at = self._conflict_since + CONFLICT_SETTLE_S
        if now < max(settled_at, self._join_deadline, self._grace_until):
            return
        epochs[self.host] = self.epoch
        newest: list[MembershipEpoch] = []  # of each history
        for epoch in sorted(epochs.values(), key=lambda epoch: (-epoch.number, epoch.lineage)):
            if all(epoch.split_number(other) is not None for other in newest):
                newest.append(epoch)
        sides = [self._side_hosts(epoch, epochs, now) for epoch in newest]
        ranked = sorted(zip(newest, sides, strict=True), reverse=True,
                        key=lambda side: (len(side[1]), side[0].step, side[0].number, side[0].lineage))  # fmt: skip
        kept = ranked[0][0]
        is_own_kept = kept.split_number(self.epoch) is None
        own_hosts = next(hosts for epoch, hosts in ranked if epoch.split_number(self.epoch) is None)
        others = [side for side in ranked if side[0].split_number(self.epoch) is not None]
        if not others:  # a side whose split is older than the ancestors that an epoch carries
            return
        other, other_hosts = others[0]
        number = self.epoch.split_number(other)
        assert number is not None
        conflict = EpochConflict(number, self.epoch, other, own_hosts, other_hosts, self.step, is_own_kept)
        if not is_own_kept:
            self.conflicts.append(conflict)
            self.has_training_state, self.step, self._conflict_since = False, kept.step, None
            self._enter_epoch(kept)
        elif not any(one.is_own_kept and one.number == number and one.other.split_number(other) is None
                     for one in self.conflicts):  # fmt: skip
            self.conflicts.append(conflict)  # once, although the other side takes a while to adopt this one

    def _side_hosts(self, newest: MembershipEpoch, epochs: dict[str, MembershipEpoch], now: float) -> list[str]:
        """Return the hosts in the history of `newest`: of `epochs`, and voters of theirs whom they receive."""
        hosts = {host for host, epoch in epochs.items() if epoch.split_number(newest) is None}
        for host in list(hosts):
            peers = self._live_peers(now) if host == self.host else self._received[host][0].live_peers
            hosts |= set(epochs[host].voters).intersection(peers) - epochs.keys()
        return sorted(hosts)

    def _enter_epoch(self, epoch: MembershipEpoch) -> None:
        self.state = ConsensusState(epoch, AcceptorState(), self.state.incarnation)
        self.phase, self.store_port, self.reason, self.process_samples = HostPhase.WAITING, 0, "", {}
        self.has_training_state &= not epoch.is_cold_start and self.host in epoch.hosts
        self._ballot, self._ballot_started_at, self._ended_at = NO_BALLOT, -math.inf, {}

    def _acceptor_states(self) -> Iterator[tuple[str, AcceptorState]]:
        """Yield (host, acceptor state) of each voter of this epoch, without those whose status has not arrived."""
        for host in self.epoch.voters:
            if host == self.host:
                yield host, self.state.vote
            elif (status := self.peer_status(host)) is not None:
                yield host, status.consensus_state.vote

    def _set_acceptor_state(self, vote: AcceptorState) -> None:
        self.state = ConsensusState(self.epoch, vote, self.state.incarnation)

    def _promise_and_accept(self, now: float) -> None:
        """As an acceptor: promise the highest ballot, and accept the value that another host accepted in it."""
        votes = [vote for _, vote in self._acceptor_states()]
        highest = max(vote.promised for vote in votes)
        mine = self.state.vote
        if highest > mine.promised:
            mine, self._ballot_started_at = AcceptorState(highest, mine.accepted, mine.value), now
        for vote in votes:
            if vote.accepted == mine.promised != mine.accepted:
                mine = AcceptorState(mine.promised, vote.accepted, vote.value)
        self._set_acceptor_state(mine)

    def _propose(self, now: float) -> None:
        """As a proposer: start a ballot when it is this host's turn, and accept in it once a quorum has promised."""
        mine = self.state.vote
        is_waiting = now - self._ballot_started_at < BALLOT_TIMEOUT_S
        if is_waiting and mine.promised == self._ballot:
            promises = {host: vote for host, vote in self._acceptor_states() if vote.promised == self._ballot}
            if mine.accepted != self._ballot and self.epoch.is_quorum(promises):
                last = max(promises.values(), key=lambda vote: vote.accepted)
                epoch = last.value if last.accepted != NO_BALLOT else self._proposal(now)
                if epoch is not None:
                    self._set_acceptor_state(AcceptorState(self._ballot, self._ballot, epoch))
        elif not is_waiting and self._connected_hosts(now)[0] == self.host and self._proposal(now) is not None:
            self._ballot, self._ballot_started_at = (mine.promised[0] + 1, self.host), now
            self._set_acceptor_state(AcceptorState(self._ballot, mine.accepted, mine.value))

    def _adopt_chosen_epoch(self) -> None:
        """Enter the epoch that a quorum has accepted in one ballot, if any."""
        accepted: dict[Ballot, set[str]] = {}
        epochs: dict[Ballot, MembershipEpoch] = {}
        for host, vote in self._acceptor_states():
            if vote.value is not None:
                accepted.setdefault(vote.accepted, set()).add(host)
                epochs[vote.accepted] = vote.value
        for ballot, hosts in accepted.items():
            if self.epoch.is_quorum(hosts):
                self._enter_epoch(epochs[ballot])
                return

    # --- what this host would propose -------------------------------------------------------------------------------

    def _live_peers(self, now: float) -> set[str]:
        return {host for host, (_, at) in self._received.items() if now - at <= self._host_timeout_s}

    def _connected_hosts(self, now: float) -> list[str]:
        """Return this host and those with which it exchanges statuses both ways: voters first, then others by name."""
        connected = {host for host in self._live_peers(now) if self.host in self._received[host][0].live_peers} | {
            self.host
        }
        return [host for host in self.epoch.voters if host in connected] + sorted(connected - set(self.epoch.voters))

    def _fully_connected_hosts(self, now: float) -> list[str]:
        """Return the `_connected_hosts` that are not leaving and are all connected to each other; earlier ones win."""
        hosts: list[str] = []
        for host in self._connected_hosts(now):
            if not self._is_leaving(host) and all(self._are_connected(host, other) for other in hosts):
                hosts.append(host)
        return hosts

    def _are_connected(self, a: str, b: str) -> bool:
        """Return whether two `_connected_hosts` receive each other's statuses: always true if one is this host."""
        return self.host in (a, b) or (a in self._received[b][0].live_peers and b in self._received[a][0].live_peers)

    def _phase_of(self, host: str) -> HostPhase:
        return self.phase if host == self.host else self._received[host][0].phase

    def _is_leaving(self, host: str) -> bool:
        return self._phase_of(host) in (HostPhase.LEAVING, HostPhase.DONE)

    def _leave_reason(self, host: str) -> str:
        """Return the reason that the host gives for its failure."""
        return self.reason if host == self.host else self._received[host][0].reason

    def _member_phases(self) -> dict[str, HostPhase]:
        """Return {host: phase} of the members of this epoch, without those whose status has not arrived."""
        statuses = {host: self if host == self.host else self.peer_status(host) for host in self.epoch.hosts}
        return {host: status.phase for host, status in statuses.items() if status is not None}

    def _proposal(self, now: float) -> MembershipEpoch | None:
        """Return the epoch that should follow, or None while this one should continue."""
        if now < max(self._join_deadline, self._grace_until) or not self.epoch.is_quorum(self._connected_hosts(now)):
            return None
        epoch, able = self.epoch, self._fully_connected_hosts(now)
        end = self._epoch_end(now, able)
        if end is None:
            return None
        surviving = [host for host in epoch.hosts if host in able and self._host_has_training_state(host)]
        hosts = self._elastic_hosts(now, end, surviving) if surviving else able
        if hosts is None:
            return None
        step = max(epoch.step, self.step, *(self._received[host][0].step for host in hosts if host != self.host))
        has_failed = HostPhase.FAILED in end.ended.values() and not end.lost  # not as a consequence of a lost host
        failures = (0 if step > epoch.step else epoch.failures) + has_failed
        is_over = failures > MAX_CONSECUTIVE_FAILURES or HostPhase.FATAL in end.ended.values() or not hosts
        reason = end.reason([host for host in hosts if host not in epoch.hosts])
        hosts = epoch.hosts if is_over else hosts
        return MembershipEpoch(
            number=epoch.number + 1,
            hosts=hosts,
            standby_hosts=[host for host in able if host not in hosts],
            is_cold_start=not surviving,
            why=reason,
            step=step,
            failures=failures,
            is_over=is_over,
            proposer=f"{self.host}:{self.state.incarnation}",
            ancestors=epoch.lineage,
        )

    def _epoch_end(self, now: float, able: list[str]) -> EpochEnd | None:
        """Return why this epoch should end; None while that is not certain. `able`: the hosts that could continue."""
        connected = self._connected_hosts(now)
        phases = {host: phase for host, phase in self._member_phases().items() if host in connected}
        lost = [
            host for host in self.epoch.hosts if host not in able and not (host in connected and self._is_leaving(host))
        ]
        ended = {host: phases[host] for host in self._ended_at if phases.get(host) in EPOCH_END_REASONS}
        gave_up = not lost and all(self._is_leaving(host) and self._leave_reason(host) for host in phases)
        if HostPhase.DONE in phases.values() or not (lost or ended) or not (able or gave_up):
            return None
        sure_at = min(self._ended_at.values(), default=now) + FAILURE_CONFIRM_S
        if not lost and any(self._received[host][1] < sure_at for host in able if host != self.host):
            return None  # no status since: the others may have failed because that host is gone
        return EpochEnd(lost, ended)

    def _elastic_hosts(self, now: float, end: EpochEnd, surviving: list[str]) -> list[str] | None:
        """Return the hosts of the next epoch of an elastic run: the `surviving` ones, and perhaps the waiting ones.

        Waiting hosts are admitted only if all members have requested the epoch and none was lost or failed. Return None
        while some of these requests are still missing.
        """
        requested = {host for host, phase in end.ended.items() if (phase == HostPhase.REGROUPING and host in surviving)
                     or (self._is_leaving(host) and self._host_has_training_state(host))}  # fmt: skip
        if end.lost or requested != end.ended.keys():
            return surviving
        if len(requested) < len(self.epoch.hosts):
            return None  # the others will request it as soon as they learn of it
        return surviving + self.waiting_hosts(now)

    def _is_ready(self, host: str) -> bool:
        status = self if host == self.host else self.peer_status(host)
        return status is not None and status.phase == HostPhase.READY

    def _host_has_training_state(self, host: str) -> bool:
        """Return whether the host's ranks are alive with the training state of this epoch."""
        status = self if host == self.host else self.peer_status(host)
        return status is not None and status.has_training_state
