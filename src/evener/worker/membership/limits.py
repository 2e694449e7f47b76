"""How many sequences at once does a rank's memory hold, by what has happened to it in this run?

A rank whose memory does not suffice is ended: on a processor by the kernel, without a word. Its agent writes down who
was killed, its supervisor when the kernel last took somebody for want of memory. Started anew, the rank sees that it
was the one, and takes half as many sequences at a time from then on; all ranks hear of it when they enter a world.
"""

from __future__ import annotations

import contextlib
from typing import TypeVar

import msgspec
import torch

from evener.core.errors import CheckpointError
from evener.core.files import write_atomic
from evener.core.machine import this_machine
from evener.core.roster import Member, Roster
from evener.core.runwriter import RunWriter
from evener.core.stored import read_stored
from evener.core.world import HALVED_FILE, KILLED_FILE, beside_world, hosts_come_and_go
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


class Halved(msgspec.Struct, frozen=True):
    """How often ranks of this host had to take half, by their numbers there; and when they were killed last."""

    times: dict[int, int] = {}
    at: dict[int, float] = {}


def limited(roster: Roster, group: Group) -> Roster:
    """The Roster of a world, where no rank takes more at a time than its memory held. All ranks call it together."""
    times = read_beside_world(HALVED_FILE, Halved).times.get(group.local_rank, 0)
    pass_now = own_member(roster, group).largest_pass
    mine = max(1, pass_now >> times) if times and pass_now else 0
    limits = [int(text) for text in group.gather(str(mine).encode())]
    members = [
        msgspec.structs.replace(member, micro_batch=min(member.micro_batch, limit or member.micro_batch))
        for member, limit in zip(roster.members, limits, strict=True)
    ]
    return msgspec.structs.replace(roster, members=members)


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
    if killed != read_beside_world(HALVED_FILE, Halved).at.get(group.local_rank):  # else that is known
        _halve(group.local_rank, killed)
        error = "its memory did not suffice: it takes half as many sequences at a time from here on"
        rundir.add_event("run.oom", rank=own_member(roster, group).rank, error=error)


def own_member(roster: Roster, group: Group) -> Member:
    """This rank's part, whatever its place among those who take part."""
    host = this_machine().host
    return [member for member in roster.members if member.host == host][group.local_rank]


def _halve(local_rank: int, killed: float | None) -> None:
    known = read_beside_world(HALVED_FILE, Halved)
    times = known.times | {local_rank: known.times.get(local_rank, 0) + 1}
    at = known.at if killed is None else known.at | {local_rank: killed}
    with contextlib.suppress(OSError):  # a full disk must not hide what happened
        write_atomic(beside_world(HALVED_FILE), msgspec.json.encode(Halved(times, at)))


def read_beside_world(name: str, kind: type[T]) -> T:
    """What was written there; nothing where there is nothing, or it is damaged."""
    try:
        return read_stored(beside_world(name), kind)
    except CheckpointError:
        return kind()
