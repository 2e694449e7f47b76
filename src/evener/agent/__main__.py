"""What keeps a run alive while hosts come and go? This program, on each: it agrees with the others on a world, starts
its host's ranks in it, sees how they end, and begins again.

    python -m evener.agent FOLDER     of the run on this host; its host/agent.json holds an AgentSpec

Where ranks live on (`AgentSpec.lives`), they stay from world to world, and this program tells them where the next one
meets; a host that is in none starts its ranks all the same, so that they are ready to be let in.

It needs no controller and no torch. Exit status 0: the run has ended as it should; OVER: it failed too often;
LEFT: it goes on without this host.
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

LOOK_S = 1.0  # between looks at the ranks
ACT_S = 10.0  # that a rank may hold the others up after it was told: somebody may be at it
PATIENCE_S = 600.0  # with a disk that refuses
# A disk that was too full for checkpoints: until they are tried again, longer each time; and by how much more room,
# where not even a rank could write down how much it takes.
ROOM_AGAIN_S, MOST_ROOM_AGAIN_S, ROOM_BYTES = 2.0, 300.0, 32 << 20
LINGER_S = 10.0  # that a host stays for others that may not know yet that the run has ended
# Until ranks that have ended are started again to be let in: longer each time, if they have not trained for so long.
AGAIN_S, MOST_AGAIN_S, LASTING_S = 1.0, 60.0, 2.0
IN_VAIN = 3  # worlds in a row that may fail by one host's ranks; with one more it leaves
TOLD_TO_END = 143  # of a launcher whose ranks were well until another host's failed


class Agent:
    """One host's, of one run."""

    def __init__(
        self, spec: AgentSpec, folder: Path, *, clock: Callable[[], float] = time.monotonic,
        start_ranks: Callable[[AgentSpec, Path, Meeting], Ranks] = Ranks,
    ) -> None:  # fmt: skip
        """Take part in the run of `folder`; `clock` and `start_ranks` are what a simulation replaces.

        CheckpointError where what this host promised the others is damaged: it could promise something else.
        """
        self._spec, self._folder, self._path = spec, folder, folder / KEPT_FILE
        self._clock, self._start_ranks = clock, start_ranks
        self._spec_path, self._spec_is_of = folder / AGENT_FILE, 0  # when it was written
        self._is_spec_news = False  # by what others say, and not written down yet
        self._kept_out, self._leaves = folder / KEPT_OUT_FILE, ""  # why this host leaves, by its agent
        self._takes: int | None = None  # bytes that must be free, where its ranks had no room for checkpoints
        self._room_at, self._no_rooms = 0.0, 0  # not looked for before; how often there was none
        kept = read_stored(self._path, Kept) if self._path.exists() else Kept(World(number=0, hosts=spec.first))
        if strange := sorted({*kept.world.voters} - spec.hosts.keys()):
            told = f"{self._path} names {', '.join(strange)}, whom {self._spec_path} does not have"
            raise CheckpointError(f"{told}: one of both is damaged")
        is_back = kept.life > 0
        kept = Kept(kept.world, kept.vote, kept.life + 1)
        join_by = self._clock() + (spec.silent_s if is_back else spec.join_s)
        self._council = Council(spec.host, kept, silent_s=spec.silent_s, join_by=join_by, lives=spec.lives)
        if is_back and self._council.is_member:
            self._council.phase, self._council.why = self._regroup(), "its agent was started again"
        self._said_edition = -1
        self._news = asyncio.Event()  # somebody said something new
        self._refusal, self._refused_at = "", 0.0  # as long as nothing can be written down, this host says nothing
        self._kept: Kept | None = None  # as it is on the disk
        self._ranks: Ranks | None = None
        self._failures: list[dict[str, Any]] = []  # of the last world that failed here
        self._in_a_row, self._after_step = 0, -1  # worlds that failed here, and nothing was saved after this step
        self._killed: dict[int, float] = {}  # when, by ranks' numbers on this host
        self._ended_at: float | None = None
        self._are_in = False  # this host's ranks, or they were, in some world
        self._again_at, self._in_vain = 0.0, 0  # when ranks may be started to be let in, and starts that led to nothing
        self._in_since = math.inf  # this host's ranks train
        self._watch = self._watch_of(kept.world)
        self._hang: Hang | None = None  # of this host's ranks
        self._hangs_since = self._look_at = 0.0

    async def main(self) -> int:
        """Take part until the run has ended, or goes on without this host; the exit status."""
        gossip = Gossip(self._spec.key.encode(), self.hear)
        place = self._spec.hosts[self._spec.host]
        await gossip.listen((place.address, self._spec.port))
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
        """End what is left of this host's ranks."""
        if self._ranks is not None:
            self._ranks.end()

    def hear(self, statement: Statement) -> None:
        """Receive another host's statement."""
        # A host was added while this one was out of reach: before anything that is said of it.
        self._is_spec_news |= self._go_by(statement.hosts, statement.edition)
        if statement.host in self._spec.hosts and self._council.hear(statement, self._clock()):
            self._news.set()

    def statement(self) -> Statement | None:
        """Return what the other hosts are to receive now, if anything."""
        now, spec = self._clock(), self._spec
        if self._refusal or not (self._council.is_to_say(now) or self._said_edition != spec.edition):
            return None
        self._said_edition = spec.edition
        return msgspec.structs.replace(self._council.say(now), hosts=spec.hosts, edition=spec.edition)

    def look(self) -> int | None:
        """Do what is to be done now; the exit status, where that is all. What can't be written down can't be promised:
        where the disk refuses, the others go on without this host, until it does not any more.
        """
        try:
            status, refusal = self._look(), ""
        except OSError as error:
            status, refusal, council = None, f"{self._folder}: {error.strerror}", self._council
            self._end_ranks()
            if council.phase not in (Phase.DONE, Phase.REFUSED):
                council.phase = self._regroup() if council.is_member else Phase.WAITING
            self._refused_at = self._refused_at if self._refusal else self._clock()
            if self._clock() - self._refused_at > PATIENCE_S:
                raise
        if refusal != self._refusal:
            print(f"evener: {refusal or 'this host can take part again'}", flush=True)
        self._refusal = refusal
        return status

    def _look(self) -> int | None:
        """`look`, or OSError."""
        now, council = self._clock(), self._council
        self._look_for_room(now)
        self._read_spec()
        if self._is_spec_news:  # before any world that has them is kept
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
            write_atomic(self._path, msgspec.json.encode(council.kept))  # before anybody hears of it
            self._kept = council.kept
        if council.world.is_over:
            if not self._linger(now):
                return None
            if "EVENER_FAILURES" in os.environ:
                os.write(int(os.environ["EVENER_FAILURES"]), json.dumps(self._failures).encode())
            return OVER
        if council.has_ended and council.phase not in (Phase.RUNNING, Phase.REFUSED, Phase.DONE):
            council.phase = Phase.DONE  # all who took part had taken the last step by then
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
        """For what its ranks would save: others go on without this host until it has."""
        told, free = self._folder / NEEDS_FILE, shutil.disk_usage(self._folder).free
        self._takes = free + ROOM_BYTES
        with contextlib.suppress(OSError, ValueError):
            self._takes = int(told.read_text())
            told.unlink()
        self._room_at = self._clock() + min(ROOM_AGAIN_S * 2 ** min(self._no_rooms, 10), MOST_ROOM_AGAIN_S)
        self._no_rooms += 1
        self._council.phase, self._council.why = Phase.LEAVING, ""  # it has not given up
        error = f"{self._spec.host} has {free / 1e9:.2f} GB free, its checkpoints need {self._takes / 1e9:.2f} GB"
        print(f"evener: {error}", flush=True)
        with contextlib.suppress(OSError):
            RunWriter(self._folder).add_event("run.no-room", host=self._spec.host, error=error,
                                              hint="it takes part again when there is room")  # fmt: skip

    def _look_for_room(self, now: float) -> None:
        if self._takes is None or now < self._room_at or shutil.disk_usage(self._folder).free < self._takes:
            return
        self._takes, council = None, self._council
        print("evener: this host has room again", flush=True)
        if council.phase == Phase.LEAVING:
            council.phase = self._regroup() if council.is_member else Phase.WAITING

    def _read_spec(self) -> None:
        """Whoever adds a host to the run writes it down on all others."""
        with contextlib.suppress(OSError, CheckpointError):  # what was read before holds
            written = self._spec_path.stat().st_mtime_ns
            if written != self._spec_is_of:
                self._spec_is_of, spec = written, read_stored(self._spec_path, AgentSpec)
                self._go_by(spec.hosts, spec.edition)

    def _go_by(self, hosts: dict[str, Part], edition: int) -> bool:
        """From now on these may take part, if that is news and can be; whether it is."""
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
        """Start this host's ranks, once it is known where the store is."""
        council, spec = self._council, self._spec
        first = council.world.hosts[0]
        if first == spec.host:
            store = council.store = free_port(spec.hosts[first].address)
        else:
            told = council.of(first)
            store = told.store if told else 0
        if not store:
            return
        meeting = meeting_of(spec, council.world, store)
        if self._ranks is not None:
            self._ranks.meet(meeting)
        elif council.world.is_fresh:
            self._ranks, self._failures = self._start_ranks(spec, self._folder, meeting), []
        else:  # they ended while it was decided
            council.phase, council.why = Phase.FAILED, "its ranks have ended"
            return
        council.phase, self._are_in = Phase.RUNNING, True
        self._in_since = min(self._in_since, self._clock())

    def _be_ready(self, now: float) -> None:
        """Have ranks that could be let in."""
        council = self._council
        if self._ranks is None:
            if now >= self._again_at:
                self._again_at = now + min(AGAIN_S * 2 ** min(self._in_vain, 10), MOST_AGAIN_S)
                self._in_vain += 1
                meeting = Meeting(world=council.world)
                self._ranks, self._failures = self._start_ranks(self._spec, self._folder, meeting), []
        elif self._ranks.status() is not None:
            failures = self._ranks.failures()
            refused = [one for one in failures if one["exitcode"] == REFUSED]
            self._end_ranks()
            council.phase = Phase.WAITING
            if NO_ROOM in {one["exitcode"] for one in failures}:
                self._has_no_room()
            elif refused:
                rank = first_rank_of(self._spec) + refused[0]["local_rank"]
                self._leave(f"rank {rank} ended with exit code {REFUSED}")
        elif len(self._ranks.sayings()) == self._spec.hosts[self._spec.host].num_ranks:
            council.phase = Phase.READY

    def _see(self, now: float) -> None:
        """How are the ranks?"""
        assert self._ranks is not None
        council, status = self._council, self._ranks.status()
        if status is None:
            if council.is_cut_off(now):
                print("evener: too few of the hosts are in reach: the ranks are ended until more are", flush=True)
                self._end_ranks()
                council.phase = self._regroup()
            elif self._spec.lives:
                self._hear_ranks()
            return
        failures, first = self._ranks.failures(), first_rank_of(self._spec)
        for one in failures:
            one["rank"] = first + one["local_rank"]  # its number, whatever its place in this world
        self._end_ranks()
        council.step = max(council.step, *RunDir(self._folder).checkpoint_steps()[-1:], -1)
        killed = {one["local_rank"]: one["time"] for one in failures if one["exitcode"] == -signal.SIGKILL}
        if killed:
            self._killed |= killed
            with contextlib.suppress(OSError):  # a full disk
                write_atomic(self._folder / KILLED_FILE, msgspec.json.encode({"at": self._killed}))
        codes = {one["exitcode"] for one in failures}
        if NO_ROOM in codes:
            self._has_no_room()
        elif status == 0:
            council.phase = Phase.DONE
        elif codes == {REGROUP} or status == TOLD_TO_END:
            council.phase = self._regroup()
        else:
            self._fail(failures, codes)

    def _fail(self, failures: list[dict[str, Any]], codes: set[int]) -> None:
        """This host's ranks have ended otherwise than they should. Where that would only be the same again, and others
        can go on, it leaves.
        """
        council, me = self._council, self._spec.host
        its_own = codes - {FOLLOWS, REGROUP, -signal.SIGKILL}  # whom the kernel killed for its memory takes less of it
        if council.world.is_fresh and its_own:  # else the others lost nothing by it
            self._in_a_row = self._in_a_row + 1 if council.step == self._after_step else 1
            self._after_step = council.step
        self._failures = failures
        if failures:
            council.why = f"rank {failures[0]['rank']} ended with exit code {failures[0]['exitcode']}"
        is_alone = council.world.hosts == [me]
        is_in_vain = REFUSED in codes or (bool(its_own) and self._in_a_row > IN_VAIN)
        if OVER in codes or (REFUSED in codes and is_alone):
            council.phase = Phase.REFUSED
        elif is_in_vain and not is_alone:
            times = "" if REFUSED in codes else f" {self._in_a_row} times, and nothing was saved in between"
            self._leave(f"{council.why}{times}")
        else:
            council.phase = Phase.FAILED

    def _leave(self, why: str) -> None:
        """The run goes on without this host, until somebody adds it again."""
        council, me = self._council, self._spec.host
        council.phase, council.why, self._leaves = Phase.LEAVING, why, why
        hint = f"evener logs RUN tells why; once it is mended, evener add RUN --host {me} takes {me} in again"
        with contextlib.suppress(OSError):  # a full disk
            write_atomic(self._kept_out, why.encode())
            RunWriter(self._folder).add_event("run.leaves", host=me, error=f"{me} leaves the run: {why}", hint=hint)

    def _hear_ranks(self) -> None:
        """How far are they, and do they ask for another world?"""
        assert self._ranks is not None
        council, number = self._council, self._council.world.number
        sayings = self._ranks.sayings().values()
        there = [saying for saying in sayings if saying.world >= 0]
        council.has_learned = len(there) == self._spec.hosts[self._spec.host].num_ranks
        council.step = max([council.step, *(saying.step for saying in there)])
        asks = {saying.asks for saying in there if saying.world == number} - {""}
        if LOST in asks:
            council.phase = Phase.LOST
        elif asks:
            council.phase = self._regroup()

    def _look_at_ranks(self, now: float) -> None:
        """Does one of this host's hold all the others up? It is told; if that lasts, all begin again."""
        assert self._ranks is not None
        council, me = self._council, self._spec.host
        first = first_rank_of(self._spec)
        council.looks = {first + local: look for local, look in self._ranks.looks().items()}
        council.looked_at = now
        self._watch.see(me, now, council.looks)
        for host in council.world.hosts:
            if host != me:
                told = council.of(host)
                self._watch.see(host, told.looked_at if told else now, told.looks if told else {})
        hang, was = self._watch.hang(), self._hang
        hang = self._hang = hang if hang is not None and hang.host == me else None
        acts = hang is not None and hang.how in ("stopped", "idle", "crossed")  # who waits for its disk can't be killed
        rundir = RunWriter(self._folder)
        if was is not None and (hang is None or hang.kind != was.kind):
            rundir.add_event("run.goes-on", after_s=now - self._hangs_since)
        if hang is not None and (was is None or hang.kind != was.kind):
            self._hangs_since = now
            act = (
                "its ranks are ended, and come back"
                if self._spec.lives
                else "all begin again from the newest checkpoint"
            )
            hint = hang.fix + (f"; in {ACT_S:.0f} s {act}" if acts else "")
            rundir.add_event("run.hang", host=me, peer=None, rank=hang.rank, error=sentence(hang), hint=hint)
        if hang is not None and acts and now - self._hangs_since >= ACT_S:
            self._end_ranks()
            council.phase, council.why = Phase.FAILED, sentence(hang)

    def _regroup(self) -> Phase:
        """The next world is one with this host, unless it is kept out."""
        is_away = self._leaves or self._takes is not None or self._kept_out.exists()
        return Phase.LEAVING if is_away else Phase.REGROUP

    def _end_ranks(self) -> None:
        if self._clock() - self._in_since > LASTING_S:
            self._in_vain = 0
        self._in_since = math.inf
        if self._ranks is not None:
            self._ranks.end()
            self._ranks = self._hang = None
        self._are_in = self._council.has_learned = False

    def _linger(self, now: float) -> bool:
        """Do the others know that the run has ended, or must they have heard it by now?"""
        self._ended_at = self._ended_at or now
        council = self._council
        told = [council.of(host) for host in council.world.hosts if host != council.host]
        is_done = council.world.is_over or not council.is_member
        all_know = all(one is not None and (is_done or one.phase == Phase.DONE) for one in told)
        all_know = all_know and (is_done or not council.waiting(now))
        return all_know or now - self._ended_at > LINGER_S


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        return asyncio.run(Agent(read_stored(folder / AGENT_FILE, AgentSpec), folder).main())
    except CheckpointError as error:
        why = str(error)
    except OSError as error:  # what it can't write down it can't promise the others
        why = f"{error.filename or folder}: {error.strerror}"
    hint = "the others go on without this host; the run's next start, evener train --resume RUN, takes it in again"
    print(f"error: {why}\nhint:  {hint}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
