"""Limit the micro-batch of a rank after it ran out of memory in this run.

A rank that runs out of host memory is killed by the kernel without a message. Its agent records who was killed, its
supervisor when the kernel last killed a process for lack of memory. After its restart the rank detects that it was the
one, and halves the number of sequences it takes at a time, whatever its share; all ranks learn the limit when they join
an epoch.
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
TOGETHER_S = 5.0  # between a rank's end and the recorded kernel kill: the supervisor polls every second
T = TypeVar("T", bound=msgspec.Struct)


class Killed(msgspec.Struct, frozen=True):
    """The file of killed ranks that the agent writes."""

    at: dict[int, float] = {}  # Unix time, by local rank


class State(msgspec.Struct, frozen=True):
    """The part of the supervisor's state file that is read here."""

    oom_at: float | None = None


class Memory(msgspec.Struct, frozen=True):
    """The file of a rank's memory limit, in sequences at a time."""

    takes: Annotated[int, msgspec.Meta(ge=0)] = 0  # in the newest epoch
    holds: Annotated[int, msgspec.Meta(ge=0)] = 0  # upper limit; 0: none
    killed: float | None = None  # Unix time of the last kill for lack of memory


def limited(roster: Roster, group: Group) -> Roster:
    """Return the Roster with every rank's micro-batch within its memory limit. All ranks call it together."""
    memory = _known(group.local_rank)
    limits = [int(text) for text in group.gather(str(memory.holds).encode())]
    members = [
        msgspec.structs.replace(member, micro_batch=min(member.micro_batch, limit or member.micro_batch))
        for member, limit in zip(roster.members, limits, strict=True)
    ]
    roster = msgspec.structs.replace(roster, members=members)
    if (num_sequences := own_member(roster, group).largest_pass) and num_sequences != memory.takes:
        _write(group.local_rank, msgspec.structs.replace(memory, takes=num_sequences))
    return roster


def note_end(error: BaseException, local_rank: int) -> None:
    """Halve the limit if this rank ends because its GPU ran out of memory; kernel kills are detected at restart."""
    if hosts_come_and_go() and isinstance(error, torch.OutOfMemoryError):
        _halve(local_rank, None)


def note_end_before(rundir: RunWriter, roster: Roster, group: Group) -> None:
    """Detect at start that the previous process of this rank was killed for lack of memory, and halve its limit."""
    killed = read_beside_world(KILLED_FILE, Killed).at.get(group.local_rank)
    oom_at = read_beside_world(STATE_FILE, State).oom_at
    if killed is None or oom_at is None or abs(killed - oom_at) > TOGETHER_S:
        return
    if killed != _known(group.local_rank).killed:
        _halve(group.local_rank, killed)
        error = "it ran out of memory: from here on it takes half as many sequences at a time"
        rundir.add_event("run.oom", rank=own_member(roster, group).rank, error=error)


def own_member(roster: Roster, group: Group) -> Member:
    """Return this rank's Member, whatever its rank in the process group."""
    host = this_machine().host
    return [member for member in roster.members if member.host == host][group.local_rank]


def _halve(local_rank: int, killed: float | None) -> None:
    memory = _known(local_rank)
    _write(local_rank, Memory(memory.takes, max(1, memory.takes // 2), memory.killed if killed is None else killed))


def _known(local_rank: int) -> Memory:
    return read_beside_world(memory_file(local_rank), Memory)


def _write(local_rank: int, memory: Memory) -> None:
    with contextlib.suppress(OSError):  # a full disk must not hide what happened
        write_atomic(beside_world(memory_file(local_rank)), msgspec.json.encode(memory))


def read_beside_world(name: str, kind: type[T]) -> T:
    """Return the host's file of this name; the default where it is missing or damaged."""
    try:
        return read_stored(beside_world(name), kind)
    except CheckpointError:
        return kind()
