"""Which hosts are in a run from now on? Worlds follow each other; what follows a world only its own hosts can say."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from evener.core.files import write_atomic
from evener.core.stored import read_stored

AGENT_FILE = "host/agent.json"  # an AgentSpec
SILENT_S = 12.0  # where who is lost costs all a start
KEPT_FILE = "host/kept.json"  # what the agent must not forget
WORLD_FILE = "host/world.json"  # a Meeting, in a run's folder on each host: EVENER_WORLD tells the ranks
SAYINGS_FOLDER = "host/sayings"  # what each rank there says of itself, a Saying, by its number on the host
PULSE_FOLDER = "host/pulse"  # what each rank there is doing; see worker/pulse.py
WAITING_FILE = "host/waiting"  # there while hosts wait to be let in
KILLED_FILE = "host/killed.json"  # which ranks there were killed last, and when
KEPT_OUT_FILE = "host/kept-out"  # there where this host takes part no more, until it is removed: why
NEEDS_FILE = "host/needs"  # bytes that must be free for ranks that had too little room
SAVE_FILE = "host/save"  # there where somebody has asked for a checkpoint now, until one is written
# Exit statuses of ranks, as their agent understands them; any other is a failure that may have been chance.
REGROUP = 75  # they leave together, and want another world (sysexits.h: EX_TEMPFAIL)
FOLLOWS = 74  # another one is gone, and it could not go on (sysexits.h: EX_IOERR)
REFUSED = 2  # what is wrong is this host's, and would be in any world
NO_ROOM = 73  # its disk is too full (sysexits.h: EX_CANTCREAT)
OVER = 77  # the run has failed, and would in any world; of an agent too: on all hosts
LEFT = 76  # of an agent: its host has left the run, which goes on without it; another failure is its host's alone
LOST = "lost"  # what a rank asks its agent with that can't go on in its world


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts whose ranks train together until the next world begins."""

    number: int  # 0, 1, 2 …: no number is given twice
    hosts: list[str]  # by rank; the first one has the store
    others: list[str] = []  # that say what follows with them, and have no ranks in it
    is_fresh: bool = True  # its ranks begin with the newest checkpoint; else they go on with what they have learned
    why: str = ""  # it follows the one before
    step: int = -1  # the last that had been saved when it was decided; where ranks live on, the last that was taken
    failures: int = 0  # that began a world, one after the other, and no other step was saved in between
    is_over: bool = False  # nothing follows: it has failed too often

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("a world without hosts")

    @property
    def voters(self) -> list[str]:
        """Who says what follows; the first is the first that trains."""
        return [*self.hosts, *self.others]

    def is_quorum(self, hosts: Iterable[str]) -> bool:
        """May these decide what follows? No two sides of a cut can: more than half of the world's voters, or half of
        them with the first.

        >>> World(number=0, hosts=["a", "b"]).is_quorum(["a"]), World(number=0, hosts=["a", "b"]).is_quorum(["b", "c"])
        (True, False)
        """
        there = set(self.voters).intersection(hosts)
        return 2 * len(there) > len(self.voters) or (2 * len(there) == len(self.voters) and self.hosts[0] in there)


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of a world find each other, as the agent of a host tells its ranks."""

    world: World
    address: str = ""  # of the world's store
    port: int = 0
    first_rank: int = 0  # the place in the world of this host's first one
    world_size: int = 0


class Saying(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank that lives from world to world tells its agent."""

    pid: int
    world: int = -1  # in which it has learned; -1: none yet, but it is ready to be let in
    step: int = -1  # the last that it has taken
    asks: str = ""  # for another world, and why: to let hosts in or out; or LOST, as it can't go on in this one


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a host brings to a world."""

    address: str  # that the others reach, and that alone is listened on
    num_ranks: int


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent of one host must know of a run."""

    run: str  # the run's id
    host: str  # this one
    hosts: dict[str, Part]  # that may take part, in the order of their ranks
    edition: int = 0  # of `hosts`: the highest one holds
    first: list[str]  # of them the first world's; the others were added while the run went on
    port: int  # on which agents hear each other
    key: str  # which the run's agents alone know
    program: list[str]  # ["-m", "evener.worker", …] or ["train.py", …]
    silent_s: float = SILENT_S  # after which a host that says nothing is gone
    join_s: float = 180.0  # that hosts wait for each other at the start: Python may come from a cold, slow disk
    lives: bool = False  # ranks go on from world to world: whoever is lost, the others lose nothing

    def __post_init__(self) -> None:
        if not self.first or not self.hosts.keys() >= {self.host, *self.first}:
            raise ValueError("hosts that are not among the run's")


def hosts_come_and_go() -> bool:
    """In the run of this process?"""
    return "EVENER_WORLD" in os.environ


def ranks_live_on() -> bool:
    """Does this process go on from world to world?"""
    return "EVENER_SAYINGS" in os.environ


def agent_pid() -> int:
    """Of the process that tells this one, which goes on from world to world, where others are."""
    return int(os.environ["EVENER_AGENT"])


def memory_file(local_rank: int) -> str:
    """Where a rank writes down what its memory holds: a file for each, for they may all be killed at once."""
    return f"host/memory-{local_rank}.json"


def told_meeting() -> Meeting:
    """The newest of this host, where hosts come and go; CheckpointError where it is damaged."""
    return read_stored(Path(os.environ["EVENER_WORLD"]), Meeting)


def somebody_waits() -> bool:
    """Is there a host that could be let in?"""
    return beside_world(WAITING_FILE).exists()


def is_kept_out() -> bool:
    """Is this process's host to leave?"""
    return beside_world(KEPT_OUT_FILE).exists()


def keep_out(why: str) -> None:
    """The world of this process is the last with its host."""
    write_atomic(beside_world(KEPT_OUT_FILE), why.encode())


def beside_world(file: str) -> Path:
    """Where a file of the run's folder on this host is."""
    return Path(os.environ["EVENER_WORLD"]).with_name(os.path.basename(file))
