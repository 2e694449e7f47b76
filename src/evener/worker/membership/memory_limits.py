"""Limit the micro-batch of a rank after it ran out of memory in this run.

A rank that runs out of host memory is killed by the kernel without a message. The host's agent records which ranks
were killed, and when; its supervisor records when the kernel last killed a process for lack of memory. After a restart,
a rank for which the two times match halves its micro-batch, whatever its share. All ranks learn the limit when they
join an epoch.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, TypeVar

import msgspec
import torch

from evener.core.base.errors import CheckpointError
from evener.core.base.file_io import write_atomic
from evener.core.base.json_files import read_json
from evener.core.cluster.host_info import local_host_info
from evener.core.run.membership_epoch import (
    KILLED_RANKS_FILE,
    has_dynamic_membership,
    host_file_path,
    memory_limit_file,
)
from evener.core.run.roster import Member, Roster
from evener.core.run.runwriter import RunWriter
from evener.worker.rank.process_groups import ProcessGroups

SUPERVISOR_STATE_FILE = "state.json"  # the supervisor's
OOM_MATCH_WINDOW_S = 5.0  # between a rank's end and the recorded kernel kill: the supervisor polls every second
T = TypeVar("T", bound=msgspec.Struct)


class KilledRanks(msgspec.Struct, frozen=True):
    """The file of killed ranks that the agent writes."""

    at: dict[int, float] = {}  # Unix time, by local rank


class SupervisorOomState(msgspec.Struct, frozen=True):
    """The part of the supervisor's state file that is read here."""

    oom_at: float | None = None


class RankMemoryLimit(msgspec.Struct, frozen=True):
    """The file of a rank's memory limit, in sequences per micro-batch."""

    takes: Annotated[int, msgspec.Meta(ge=0)] = 0  # largest micro-batch in the newest epoch
    holds: Annotated[int, msgspec.Meta(ge=0)] = 0  # upper limit; 0: none
    killed: float | None = None  # Unix time of the last kill for lack of memory


def limit_micro_batches(roster: Roster, group: ProcessGroups) -> Roster:
    """Return the Roster with every rank's micro-batch within its memory limit. All ranks call it together."""
    memory = _read_limit(group.local_rank)
    limits = group.all_gather(memory.holds, int)
    members = [
        msgspec.structs.replace(member, micro_batch=min(member.micro_batch, limit or member.micro_batch))
        for member, limit in zip(roster.members, limits, strict=True)
    ]
    roster = msgspec.structs.replace(roster, members=members)
    if (num_sequences := local_member(roster, group).largest_micro_batch) and num_sequences != memory.takes:
        _write_limit(group.local_rank, msgspec.structs.replace(memory, takes=num_sequences))
    return roster


def record_oom(error: BaseException, local_rank: int) -> None:
    """Halve the limit if this rank ends because its GPU ran out of memory; kernel kills are detected at restart."""
    if has_dynamic_membership() and isinstance(error, torch.OutOfMemoryError):
        _halve_limit(local_rank, None)


def detect_previous_oom(rundir: RunWriter, roster: Roster, group: ProcessGroups) -> None:
    """At start, halve this rank's limit if its previous process was killed for lack of memory."""
    killed = read_host_file(KILLED_RANKS_FILE, KilledRanks).at.get(group.local_rank)
    oom_at = read_host_file(SUPERVISOR_STATE_FILE, SupervisorOomState).oom_at
    if killed is None or oom_at is None or abs(killed - oom_at) > OOM_MATCH_WINDOW_S:
        return
    if killed != _read_limit(group.local_rank).killed:
        _halve_limit(group.local_rank, killed)
        error = "it ran out of memory: from here on it takes half as many sequences at a time"
        rundir.add_event("run.oom", rank=local_member(roster, group).rank, error=error)


def local_member(roster: Roster, group: ProcessGroups) -> Member:
    """Return this rank's Member, whatever its rank in the process group."""
    host = local_host_info().host
    return [member for member in roster.members if member.host == host][group.local_rank]


def _halve_limit(local_rank: int, killed: float | None) -> None:
    memory = _read_limit(local_rank)
    _write_limit(
        local_rank,
        RankMemoryLimit(memory.takes, max(1, memory.takes // 2), memory.killed if killed is None else killed),
    )


def _read_limit(local_rank: int) -> RankMemoryLimit:
    return read_host_file(memory_limit_file(local_rank), RankMemoryLimit)


def _write_limit(local_rank: int, memory: RankMemoryLimit) -> None:
    with contextlib.suppress(OSError):  # a full disk must not hide what happened
        write_atomic(host_file_path(memory_limit_file(local_rank)), msgspec.json.encode(memory))


def read_host_file(name: str, kind: type[T]) -> T:
    """Return the host's file of this name; the default where it is missing or damaged."""
    try:
        return read_json(host_file_path(name), kind)
    except CheckpointError:
        return kind()
