"""How many sequences at once does a rank's memory hold, by what has happened to it in this run?

A rank whose memory does not suffice is ended: on a processor by the kernel, without a word. Its agent writes down who
was killed, its supervisor when the kernel last took somebody for want of memory. Started anew, the rank sees that it
was the one, and takes half as many sequences at a time as it did from then on, whatever its share; all ranks hear of
it when they enter a world.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, TypeVar

import msgspec
import torch

from evener.core.errors import CheckpointError
from evener.core.files import write_atomic
from evener.core.machine import this_machine
from evener.core.roster import Member, Roster
from evener.core.runwriter import RunWriter
from evener.core.stored import read_stored
from evener.core.world import KILLED_FILE, beside_world, hosts_come_and_go, memory_file
from evener.worker.group import Group

STATE_FILE = "state.json"  # the supervisor's
TOGETHER_S = 5.0  # between a rank's end and the word of what the kernel did: the supervisor looks every second
T = TypeVar("T", bound=msgspec.Struct)


class Killed(msgspec.Struct, frozen=True):
    """What the agent wrote down."""

    at: dict[int, float] = {}  # Unix time, by a rank's number on its host


class State(msgspec.Struct, frozen=True):
    """Of what the supervisor tells."""

    oom_at: float | None = None


class Memory(msgspec.Struct, frozen=True):
    """What a rank writes down of its own, in sequences at a time."""

    takes: Annotated[int, msgspec.Meta(ge=0)] = 0  # in the newest world
    holds: Annotated[int, msgspec.Meta(ge=0)] = 0  # at most; 0: whatever is asked
    killed: float | None = None  # for want of it, last: Unix time


def limited(roster: Roster, group: Group) -> Roster:
    """The Roster of a world, where no rank takes more at a time than its memory held. All ranks call it together."""
    known = _known(group.local_rank)
    limits = [int(text) for text in group.gather(str(known.holds).encode())]
    members = [
        msgspec.structs.replace(member, micro_batch=min(member.micro_batch, limit or member.micro_batch))
        for member, limit in zip(roster.members, limits, strict=True)
    ]
    roster = msgspec.structs.replace(roster, members=members)
    if (takes := own_member(roster, group).largest_pass) and takes != known.takes:
        _write(group.local_rank, msgspec.structs.replace(known, takes=takes))
    return roster


def note_end(error: BaseException, local_rank: int) -> None:
    """This rank ends because of an error. Was it its memory? A GPU's says so; the kernel takes it without a word."""
    if hosts_come_and_go() and isinstance(error, torch.OutOfMemoryError):
        _halve(local_rank, None)


def note_end_before(rundir: RunWriter, roster: Roster, group: Group) -> None:
    """A rank begins. Was it for want of memory that the one before it was killed?"""
    killed = read_beside_world(KILLED_FILE, Killed).at.get(group.local_rank)
    oom_at = read_beside_world(STATE_FILE, State).oom_at
    if killed is None or oom_at is None or abs(killed - oom_at) > TOGETHER_S:
        return
    if killed != _known(group.local_rank).killed:
        _halve(group.local_rank, killed)
        error = "its memory did not suffice: it takes half as many sequences at a time from here on"
        rundir.add_event("run.oom", rank=own_member(roster, group).rank, error=error)


def own_member(roster: Roster, group: Group) -> Member:
    """This rank's part, whatever its place among those who take part."""
    host = this_machine().host
    return [member for member in roster.members if member.host == host][group.local_rank]


def _halve(local_rank: int, killed: float | None) -> None:
    known = _known(local_rank)
    _write(local_rank, Memory(known.takes, max(1, known.takes // 2), known.killed if killed is None else killed))


def _known(local_rank: int) -> Memory:
    return read_beside_world(memory_file(local_rank), Memory)


def _write(local_rank: int, memory: Memory) -> None:
    with contextlib.suppress(OSError):  # a full disk must not hide what happened
        write_atomic(beside_world(memory_file(local_rank)), msgspec.json.encode(memory))


def read_beside_world(name: str, kind: type[T]) -> T:
    """What was written there; nothing where there is nothing, or it is damaged."""
    try:
        return read_stored(beside_world(name), kind)
    except CheckpointError:
        return kind()
