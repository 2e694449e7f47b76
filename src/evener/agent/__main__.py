"""The host agent: keep a run alive while hosts come and go. One process a host joins epochs and manages the ranks.

    python -m evener.agent FOLDER     the run's folder on this host; its host/agent.json holds an AgentSpec

The agent decides each epoch with the other agents, starts its host's ranks in it, monitors them and, when they end,
starts again. In an elastic run (`AgentSpec.is_elastic`) ranks survive from epoch to epoch, and the agent gives them the
rendezvous of the next one; a host outside the epoch keeps standby ranks, so that it can be admitted at once.

It needs no controller and no torch. Exit status 0: the run has finished; OVER: it failed too often; LEFT: it continues
without this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from evener.agent.council import ROUND_S, Council, Kept, Phase, Statement
from evener.agent.gossip import Gossip
from evener.agent.ranks import Ranks, first_rank_of, free_port, meeting_of
from evener.core.errors import CheckpointError
from evener.core.files import write_atomic
from evener.core.rundir import RunDir
from evener.core.runwriter import RunWriter
from evener.core.stored import read_stored
from evener.core.watch import Hang, Watch, sentence
from evener.core.world import (
    AGENT_FILE,
    FOLLOWS,
    KEPT_FILE,
    KEPT_OUT_FILE,
    KILLED_FILE,
    LEFT,
    LOST,
    NEEDS_FILE,
    NO_ROOM,
    OVER,
    REFUSED,
    REGROUP,
    WAITING_FILE,
    AgentSpec,
    Meeting,
    Part,
    World,
)

LOOK_S = 1.0  # between samples of the ranks
ACT_S = 10.0  # from the report of a hang until the ranks are killed: it may be a person's doing, as with a debugger
PATIENCE_S = 600.0  # that writes may fail before the agent gives up
# After the disk was too full for checkpoints: delay before the next try, doubling up to a limit; and the free space to
# wait for beyond today's, when a rank could not even write down how much it needs.
ROOM_AGAIN_S, MOST_ROOM_AGAIN_S, ROOM_BYTES = 2.0, 300.0, 32 << 20
LINGER_S = 10.0  # that an agent stays for others that may not know yet that the run has ended
# Delay before standby ranks that exited are restarted, doubling up to a limit; reset after they trained for this long.
AGAIN_S, MOST_AGAIN_S, LASTING_S = 1.0, 60.0, 2.0
IN_VAIN = 3  # epochs in a row that the ranks of one host may break; after one more it leaves
TOLD_TO_END = 143  # 128 + SIGTERM: a launcher whose ranks were healthy until another host's failed


class Agent:
    """The agent of one host in one run."""

    def __init__(
        self, spec: AgentSpec, folder: Path, *, clock: Callable[[], float] = time.monotonic,
        start_ranks: Callable[[AgentSpec, Path, Meeting], Ranks] = Ranks,
    ) -> None:  # fmt: skip
        """Take part in the run of `folder`; `clock` and `start_ranks` are what a simulation replaces.

        CheckpointError if the saved consensus state is damaged: this host could break a promise it made.
        """
        self._spec, self._folder, self._path = spec, folder, folder / KEPT_FILE
        self._clock, self._start_ranks = clock, start_ranks
        self._spec_path, self._spec_is_of = folder / AGENT_FILE, 0  # the file's modification time
        self._is_spec_news = False  # another host sent a newer one, and it is not written to disk yet
        self._kept_out, self._leaves = folder / KEPT_OUT_FILE, ""  # why the agent decided to leave
        self._takes: int | None = None  # free bytes to wait for, after its ranks had no room for checkpoints
        self._room_at, self._no_rooms = 0.0, 0  # not checked before; how often there was too little
        saved = read_stored(self._path, Kept) if self._path.exists() else Kept(World(number=0, hosts=spec.first))
        if unknown := sorted({*saved.world.voters} - spec.hosts.keys()):
            mismatch = f"{self._path} names {', '.join(unknown)}, but {self._spec_path} does not"
            raise CheckpointError(f"{mismatch}: one of the two files is damaged")
        is_restart = saved.life > 0
        saved = Kept(saved.world, saved.vote, saved.life + 1)
        join_by = self._clock() + (spec.silent_s if is_restart else spec.join_s)
        self._council = Council(spec.host, saved, silent_s=spec.silent_s, join_by=join_by, lives=spec.lives)
        if is_restart and self._council.is_member:
            self._council.phase, self._council.why = self._regroup(), "its agent was restarted"
        self._said_edition = -1
        self._news = asyncio.Event()  # a status with news arrived
        self._refusal, self._refused_at = "", 0.0  # while state cannot be written, nothing is broadcast
        self._kept: Kept | None = None  # as on the disk
        self._ranks: Ranks | None = None
        self._failures: list[dict[str, Any]] = []  # of the last epoch that failed here
        self._in_a_row, self._after_step = 0, -1  # epochs that failed here without a save after this step
        self._killed: dict[int, float] = {}  # when, by local rank
        self._ended_at: float | None = None
        self._are_in = False  # this host's ranks have been in an epoch
        self._again_at, self._in_vain = 0.0, 0  # when standby ranks may be started; starts that failed
        self._in_since = math.inf  # since when this host's ranks have been training
        self._watch = self._watch_of(saved.world)
        self._hang: Hang | None = None  # of this host's ranks
        self._hangs_since = self._look_at = 0.0

    async def main(self) -> int:
        """Take part until the run ends or continues without this host; return the exit status."""
        gossip = Gossip(self._spec.key.encode(), self.hear)
        member = self._spec.hosts[self._spec.host]
        await gossip.listen((member.address, self._spec.port))
        try:
            while (status := self.look()) is None:
                statement = self.statement()
                if statement is not None:
                    others = {name: (other.address, self._spec.port) for name, other in self._spec.hosts.items()
                              if name != self._spec.host}  # fmt: skip
                    gossip.say(statement, others)
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ROUND_S):
                        await self._news.wait()
            return status
        finally:
            await gossip.close()
            self.close()

    def close(self) -> None:
        """Kill this host's remaining ranks."""
        if self._ranks is not None:
            self._ranks.end()

    def hear(self, statement: Statement) -> None:
        """Receive another host's status."""
        # First the list of hosts: one may have been added while this host was unreachable, and the status may name it.
        self._is_spec_news |= self._go_by(statement.hosts, statement.edition)
        if statement.host in self._spec.hosts and self._council.hear(statement, self._clock()):
            self._news.set()

    def statement(self) -> Statement | None:
        """Return the status to broadcast now, or None."""
        now, spec = self._clock(), self._spec
        if self._refusal or not (self._council.is_to_say(now) or self._said_edition != spec.edition):
            return None
        self._said_edition = spec.edition
        return msgspec.structs.replace(self._council.say(now), hosts=spec.hosts, edition=spec.edition)

    def look(self) -> int | None:
        """Run one iteration; return the exit status once the agent is finished.

        A host cannot promise what it cannot write down: while its disk fails, the others continue without it.
        """
        try:
            status, write_error = self._look(), ""
        except OSError as error:
            status, write_error, council = None, f"{self._folder}: {error.strerror}", self._council
            self._end_ranks()
            if council.phase not in (Phase.DONE, Phase.REFUSED):
                council.phase = self._regroup() if council.is_member else Phase.WAITING
            self._refused_at = self._refused_at if self._refusal else self._clock()
            if self._clock() - self._refused_at > PATIENCE_S:
                raise
        if write_error != self._refusal:
            print(f"evener: {write_error or 'this host can take part again'}", flush=True)
        self._refusal = write_error
        return status

    def _look(self) -> int | None:
        """Run one iteration; OSError if the disk fails."""
        now, council = self._clock(), self._council
        self._look_for_room(now)
        self._read_spec()
        if self._is_spec_news:  # before any epoch that names these hosts is saved
            write_atomic(self._spec_path, msgspec.json.encode(self._spec))
            self._is_spec_news = False
        if council.look(now):
            print(
                f"evener: {council.world.why}: world {council.world.number} is {', '.join(council.world.hosts)}",
                flush=True,
            )
            if council.world.is_fresh or (self._are_in and not council.is_member):
                self._end_ranks()
            self._watch.only(council.world.hosts)
        if council.kept != self._kept:
            write_atomic(self._path, msgspec.json.encode(council.kept))  # before it is broadcast
            self._kept = council.kept
        if council.world.is_over:
            if not self._linger(now):
                return None
            if "EVENER_FAILURES" in os.environ:
                os.write(int(os.environ["EVENER_FAILURES"]), json.dumps(self._failures).encode())
            return OVER
        if council.has_ended and council.phase not in (Phase.RUNNING, Phase.REFUSED, Phase.DONE):
            council.phase = Phase.DONE  # by then all members had taken the last step
            self._end_ranks()
        match council.phase:
            case Phase.WAITING | Phase.READY if self._regroup() == Phase.LEAVING:
                council.phase = Phase.LEAVING
            case Phase.LEAVING if not council.is_member and self._takes is None and self._linger(now):
                print(f"evener: this host has left the run: {self._leaves or self._kept_out.read_text()}", flush=True)
                return LEFT
            case Phase.WAITING if council.is_member and not council.is_cut_off(now):
                self._begin()
            case Phase.WAITING | Phase.READY if self._spec.lives and not council.is_member:
                self._be_ready(now)
            case Phase.REGROUP | Phase.LOST | Phase.LEAVING if self._ranks is not None:
                self._see(now)
            case Phase.RUNNING:
                waiting = self._folder / WAITING_FILE
                waiting.touch() if council.waiting(now) else waiting.unlink(missing_ok=True)
                self._see(now)
                if now >= self._look_at and council.phase == Phase.RUNNING:
                    self._look_at = now + LOOK_S
                    self._look_at_ranks(now)
            case Phase.DONE:
                return 0 if self._linger(now) else None
        return None

    def _has_no_room(self) -> None:
        """Leave until the disk has room for what the ranks save; the others continue without this host meanwhile."""
        needs_path, free = self._folder / NEEDS_FILE, shutil.disk_usage(self._folder).free
        self._takes = free + ROOM_BYTES
        with contextlib.suppress(OSError, ValueError):
            self._takes = int(needs_path.read_text())
            needs_path.unlink()
        self._room_at = self._clock() + min(ROOM_AGAIN_S * 2 ** min(self._no_rooms, 10), MOST_ROOM_AGAIN_S)
        self._no_rooms += 1
        self._council.phase, self._council.why = Phase.LEAVING, ""  # no reason: it will return
        error = f"{self._spec.host} has {free / 1e9:.2f} GB free, its checkpoints need {self._takes / 1e9:.2f} GB"
        print(f"evener: {error}", flush=True)
        with contextlib.suppress(OSError):
            RunWriter(self._folder).add_event("run.no-room", host=self._spec.host, error=error,
                                              hint="it rejoins when it has enough free space")  # fmt: skip

    def _look_for_room(self, now: float) -> None:
        if self._takes is None or now < self._room_at or shutil.disk_usage(self._folder).free < self._takes:
            return
        self._takes, council = None, self._council
        print("evener: this host has enough disk space again", flush=True)
        if council.phase == Phase.LEAVING:
            council.phase = self._regroup() if council.is_member else Phase.WAITING

    def _read_spec(self) -> None:
        """Read the spec again if its file changed: `evener add` writes the new host into it on all hosts."""
        with contextlib.suppress(OSError, CheckpointError):  # keep the one read before
            modified_ns = self._spec_path.stat().st_mtime_ns
            if modified_ns != self._spec_is_of:
                self._spec_is_of, spec = modified_ns, read_stored(self._spec_path, AgentSpec)
                self._go_by(spec.hosts, spec.edition)

    def _go_by(self, hosts: dict[str, Part], edition: int) -> bool:
        """Adopt a newer list of the hosts that may take part, unless it lacks one that is needed; return whether."""
        needed = {self._spec.host, *self._spec.first, *self._council.world.voters}
        if edition <= self._spec.edition or not hosts.keys() >= needed:
            return False
        self._spec = msgspec.structs.replace(self._spec, hosts=hosts, edition=edition)
        self._watch = self._watch_of(self._council.world)
        return True

    def _watch_of(self, world: World) -> Watch:
        watch = Watch({name: part.num_ranks for name, part in self._spec.hosts.items()})
        watch.only(world.hosts)
        return watch

    def _begin(self) -> None:
        """Start this host's ranks in the epoch, or move them into it, once the port of its store is known."""
        council, spec = self._council, self._spec
        first = council.world.hosts[0]
        if first == spec.host:
            port = council.store = free_port(spec.hosts[first].address)
        else:
            status = council.of(first)
            port = status.store if status else 0
        if not port:
            return
        meeting = meeting_of(spec, council.world, port)
        if self._ranks is not None:
            self._ranks.meet(meeting)
        elif council.world.is_fresh:
            self._ranks, self._failures = self._start_ranks(spec, self._folder, meeting), []
        else:  # they ended while the epoch was decided
            council.phase, council.why = Phase.FAILED, "its ranks have ended"
            return
        council.phase, self._are_in = Phase.RUNNING, True
        self._in_since = min(self._in_since, self._clock())

    def _be_ready(self, now: float) -> None:
        """Keep standby ranks that the next epoch can admit."""
        council = self._council
        if self._ranks is None:
            if now >= self._again_at:
                self._again_at = now + min(AGAIN_S * 2 ** min(self._in_vain, 10), MOST_AGAIN_S)
                self._in_vain += 1
                meeting = Meeting(world=council.world)
                self._ranks, self._failures = self._start_ranks(self._spec, self._folder, meeting), []
        elif self._ranks.status() is not None:
            failures = self._ranks.failures()
            fatal = [failure for failure in failures if failure["exitcode"] == REFUSED]
            self._end_ranks()
            council.phase = Phase.WAITING
            if NO_ROOM in {failure["exitcode"] for failure in failures}:
                self._has_no_room()
            elif fatal:
                rank = first_rank_of(self._spec) + fatal[0]["local_rank"]
                self._leave(f"rank {rank} ended with exit code {REFUSED}")
        elif len(self._ranks.sayings()) == self._spec.hosts[self._spec.host].num_ranks:
            council.phase = Phase.READY

    def _see(self, now: float) -> None:
        """Check how the ranks are, and set this host's phase accordingly."""
        assert self._ranks is not None
        council, status = self._council, self._ranks.status()
        if status is None:
            if council.is_cut_off(now):
                print("evener: no quorum of the hosts is reachable: the ranks are killed until one is", flush=True)
                self._end_ranks()
                council.phase = self._regroup()
            elif self._spec.lives:
                self._hear_ranks()
            return
        failures, first = self._ranks.failures(), first_rank_of(self._spec)
        for failure in failures:
            failure["rank"] = first + failure["local_rank"]  # its number in the run, not its global rank in this epoch
        self._end_ranks()
        council.step = max(council.step, *RunDir(self._folder).checkpoint_steps()[-1:], -1)
        killed = {one["local_rank"]: one["time"] for one in failures if one["exitcode"] == -signal.SIGKILL}
        if killed:
            self._killed |= killed
            with contextlib.suppress(OSError):  # a full disk
                write_atomic(self._folder / KILLED_FILE, msgspec.json.encode({"at": self._killed}))
        codes = {failure["exitcode"] for failure in failures}
        if NO_ROOM in codes:
            self._has_no_room()
        elif status == 0:
            council.phase = Phase.DONE
        elif codes == {REGROUP} or status == TOLD_TO_END:
            council.phase = self._regroup()
        else:
            self._fail(failures, codes)

    def _fail(self, failures: list[dict[str, Any]], codes: set[int]) -> None:
        """Handle ranks that exited with an error: leave if a retry would fail again and others can continue."""
        council, me = self._council, self._spec.host
        own_codes = codes - {FOLLOWS, REGROUP, -signal.SIGKILL}  # a rank killed for lack of memory will use less of it
        if council.world.is_fresh and own_codes:  # else the others lost nothing by it
            self._in_a_row = self._in_a_row + 1 if council.step == self._after_step else 1
            self._after_step = council.step
        self._failures = failures
        if failures:
            council.why = f"rank {failures[0]['rank']} ended with exit code {failures[0]['exitcode']}"
        is_alone = council.world.hosts == [me]
        is_hopeless = REFUSED in codes or (bool(own_codes) and self._in_a_row > IN_VAIN)
        if OVER in codes or (REFUSED in codes and is_alone):
            council.phase = Phase.REFUSED
        elif is_hopeless and not is_alone:
            count = "" if REFUSED in codes else f" {self._in_a_row} times, and nothing was saved in between"
            self._leave(f"{council.why}{count}")
        else:
            council.phase = Phase.FAILED

    def _leave(self, reason: str) -> None:
        """Leave the run, until the user adds this host again."""
        council, me = self._council, self._spec.host
        council.phase, council.why, self._leaves = Phase.LEAVING, reason, reason
        hint = f"evener logs RUN shows why; once it is fixed, evener add RUN --host {me} adds {me} again"
        with contextlib.suppress(OSError):  # a full disk
            write_atomic(self._kept_out, reason.encode())
            RunWriter(self._folder).add_event("run.leaves", host=me, error=f"{me} leaves the run: {reason}", hint=hint)

    def _hear_ranks(self) -> None:
        """Read the ranks' statuses: the step they reached, and whether they request a new epoch."""
        assert self._ranks is not None
        council, number = self._council, self._council.world.number
        statuses = self._ranks.sayings().values()
        in_epoch = [status for status in statuses if status.world >= 0]
        council.has_learned = len(in_epoch) == self._spec.hosts[self._spec.host].num_ranks
        council.step = max([council.step, *(status.step for status in in_epoch)])
        requests = {status.asks for status in in_epoch if status.world == number} - {""}
        if LOST in requests:
            council.phase = Phase.LOST
        elif requests:
            council.phase = self._regroup()

    def _look_at_ranks(self, now: float) -> None:
        """Detect a rank of this host that hangs and blocks the others: report it, and kill the ranks if it lasts."""
        assert self._ranks is not None
        council, me = self._council, self._spec.host
        first = first_rank_of(self._spec)
        council.looks = {first + local: sample for local, sample in self._ranks.looks().items()}
        council.looked_at = now
        self._watch.see(me, now, council.looks)
        for host in council.world.hosts:
            if host != me:
                status = council.of(host)
                self._watch.see(host, status.looked_at if status else now, status.looks if status else {})
        hang, previous = self._watch.hang(), self._hang
        hang = self._hang = hang if hang is not None and hang.host == me else None
        # Not "disk": a process that waits for its disk cannot be killed.
        is_killable = hang is not None and hang.how in ("stopped", "idle", "crossed")
        rundir = RunWriter(self._folder)
        if previous is not None and (hang is None or hang.kind != previous.kind):
            rundir.add_event("run.goes-on", after_s=now - self._hangs_since)
        if hang is not None and (previous is None or hang.kind != previous.kind):
            self._hangs_since = now
            action = (
                "its ranks are killed and restarted"
                if self._spec.lives
                else "all hosts restart from the newest checkpoint"
            )
            hint = hang.fix + (f"; in {ACT_S:.0f} s {action}" if is_killable else "")
            rundir.add_event("run.hang", host=me, peer=None, rank=hang.rank, error=sentence(hang), hint=hint)
        if hang is not None and is_killable and now - self._hangs_since >= ACT_S:
            self._end_ranks()
            council.phase, council.why = Phase.FAILED, sentence(hang)

    def _regroup(self) -> Phase:
        """Return the phase that requests a new epoch: with this host, or without it if it is to leave."""
        is_leaving = self._leaves or self._takes is not None or self._kept_out.exists()
        return Phase.LEAVING if is_leaving else Phase.REGROUP

    def _end_ranks(self) -> None:
        if self._clock() - self._in_since > LASTING_S:
            self._in_vain = 0
        self._in_since = math.inf
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = self._hang = None
        self._are_in = self._council.has_learned = False

    def _linger(self, now: float) -> bool:
        """Return whether the others know that the run has ended, or had enough time to learn it."""
        self._ended_at = self._ended_at or now
        council = self._council
        statuses = [council.of(host) for host in council.world.hosts if host != council.host]
        is_done = council.world.is_over or not council.is_member
        all_know = all(status is not None and (is_done or status.phase == Phase.DONE) for status in statuses)
        all_know = all_know and (is_done or not council.waiting(now))
        return all_know or now - self._ended_at > LINGER_S


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        return asyncio.run(Agent(read_stored(folder / AGENT_FILE, AgentSpec), folder).main())
    except CheckpointError as error:
        reason = str(error)
    except OSError as error:  # a host cannot promise what it cannot write down
        reason = f"{error.filename or folder}: {error.strerror}"
    hint = "the others continue without this host; the run's next start, evener train --resume RUN, includes it again"
    print(f"error: {reason}\nhint:  {hint}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
