"""Rank consistency check: before the first step, compare code, spec, data, model, roster and first step of all ranks.

Ranks that differ would not fail: they would hang in a collective that the others never enter, or train a meaningless
model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from evener.core.decoding import from_json
from evener.core.errors import RunError
from evener.core.machine import Machine
from evener.core.plan import CLUSTER_FILE, told_roster
from evener.core.prediction import Cluster
from evener.core.resolve import Resolved
from evener.core.roster import Roster, Seat, check_built, first_roster
from evener.core.rundir import code_hash
from evener.core.runwriter import RunWriter
from evener.core.spec import RunSpec
from evener.core.stored import read_stored
from evener.worker.arithmetic import has_bf16
from evener.worker.group import Group
from evener.worker.membership.limits import limited, note_end_before, own_member
from evener.worker.membership.worlds import largest
from evener.worker.trained import Trained

NOT_COMPARED = ("out", "machine", "data")  # paths and processes may differ; the data is compared by its content
PLACES = ("model.init_from",)  # a path on the host; whatever it holds, DDP broadcasts rank 0's weights


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on all ranks; None where this rank does not know it."""

    rank: int
    host: str
    code: str
    torch: str
    spec: dict[str, object]
    data: str | None
    tokenizer: str | None
    shapes: str
    roster: Roster
    first: int  # the step that it would take first


def seated(group: Group, rundir: RunWriter, machine: Machine, spec: RunSpec, resolved: Resolved | None) -> Roster:
    """Return the roster of this start: the launcher's, restricted to this epoch's hosts, else one built from the ranks.

    Raise RunError on all ranks if the launcher's roster does not match the ranks.
    """
    seats = [from_json(text, Seat) for text in group.gather(msgspec.json.encode(seat_of(group, machine)))]
    check_built(spec)
    roster = told_roster()
    if roster is None:
        if resolved is None and spec.model.dtype == "auto":  # a user's own program computes in torch's default dtype
            spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, dtype="fp32"))
        return first_roster(spec, seats, resolved.shape.block_size if resolved else None)
    if not group.is_let_in:  # the others will send it; until then this rank is alone
        note_end_before(rundir, roster, group)
        return roster.of_one(own_member(roster, group))
    if (world := group.world) is not None:
        note_end_before(rundir, roster, group)
        roster = largest([from_json(text, Roster) for text in group.gather(msgspec.json.encode(roster))])
        epochs = [record.epoch for rank in rundir.recorded_ranks() for record in rundir.records(rank)[-1:]]
        epoch = max(int(text) for text in group.gather(str(max(epochs, default=-1) + 1).encode()))
        roster = limited(roster.among(world.hosts, epoch, world.why), group)
        group.numbers = [member.rank for member in roster.members]
    planned, actual = ([(slot.host, slot.device) for slot in slots] for slots in (roster.members, seats))
    if planned != actual:
        rank = next((i for i, pair in enumerate(zip(planned, actual, strict=False)) if pair[0] != pair[1]), len(actual))
        texts = [f"{' on '.join(slots[rank][::-1])}" if rank < len(slots) else "nobody" for slots in (planned, actual)]
        raise RunError(f"roster.mismatch: rank {rank} was to be {texts[0]}, and is {texts[1]}", hint="start it again")
    return roster


def planned_cluster() -> Cluster | None:
    """Load the planner's description of the machines, so that ranks can plan again; None if it gave them none."""
    path = os.environ.get("EVENER_ROSTER")
    if path is None or not (file := Path(path).with_name(CLUSTER_FILE)).exists():
        return None
    return read_stored(file, Cluster)


def seat_of(group: Group, machine: Machine) -> Seat:
    """Return this rank's host and device."""
    device = group.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.cpu
    return Seat(host=machine.host, device=str(device), name=name, has_bf16=has_bf16(device))


def agree(group: Group, rundir: RunWriter, spec: RunSpec, resolved: Resolved | None, roster: Roster, first: int,
          trained: Trained) -> None:  # fmt: skip
    """Raise RunError on all ranks if their fingerprints differ; it names the rank that is in the minority, if any."""
    mine = identity(roster, group.rank, spec, resolved, trained.weights().items(), first)
    ranks = [from_json(text, Identity) for text in group.gather(msgspec.json.encode(mine))]
    result = mismatch(ranks)
    if result is not None:
        check, what, where, outlier = result
        if group.rank == 0:
            with contextlib.suppress(OSError):  # started by hand, a run has no directory yet
                rundir.add_event(check, what=what, where=where)
        of_rank = None if outlier in (None, group.rank) else group.numbers[outlier]
        raise RunError(f"{check}: {what}: {where} differ", hint="evener train sends every host the same",
                       of_rank=of_rank)  # fmt: skip


def identity(
    roster: Roster,
    rank: int,
    spec: RunSpec,
    resolved: Resolved | None,
    weights: Iterable[tuple[str, Tensor]],
    first: int,
) -> Identity:
    """Return this rank's fingerprint."""
    tree = msgspec.to_builtins(spec)
    flat = {f"{section}.{field}": value for section, fields in tree.items() if section not in NOT_COMPARED
            for field, value in fields.items() if f"{section}.{field}" not in PLACES}  # fmt: skip
    shapes = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in weights)
    return Identity(
        rank=rank,
        host=roster.members[rank].host,
        code=code_hash(),
        torch=str(torch.__version__).partition("+")[0],
        spec=flat,
        data=resolved.corpus.content_hash if resolved else None,
        tokenizer=resolved.corpus.tokenizer_hash if resolved else None,
        shapes=hashlib.blake2b(shapes.encode(), digest_size=16).hexdigest(),
        roster=roster,
        first=first,
    )


def mismatch(ranks: Sequence[Identity]) -> tuple[str, str, str, int | None] | None:
    """Return (check, what differs, the two ranks that differ, outlier rank) of the first mismatch with rank 0, or None.

    The outlier is the one of the two that is not in the majority, if there is a majority.
    """
    first = ranks[0]
    checks: list[tuple[str, str, Callable[[Identity], object]]] = [
        ("version.torch", "torch", lambda rank: rank.torch),
        ("code.mismatch", "evener's code", lambda rank: rank.code),
        ("data.mismatch", "the corpus", lambda rank: rank.data),
        ("tokenizer.mismatch", "the tokenizer", lambda rank: rank.tokenizer),
        ("spec.mismatch", "the spec", lambda rank: rank.spec),
        ("spec.mismatch", "the parameters' shapes", lambda rank: rank.shapes),
        ("roster.mismatch", "who does what", lambda rank: rank.roster),
        ("checkpoint.mismatch", "the step to go on from", lambda rank: rank.first),
    ]
    for check, what, value_of in checks:
        for other in ranks[1:]:
            if value_of(other) != value_of(first):
                if what == "the spec":
                    what = ", ".join(_differences(first.spec, other.spec))
                elif what == "the step to go on from":
                    what = f"{what} ({first.first} and {other.first})"
                where = f"rank {other.rank} on {other.host} and rank {first.rank} on {first.host}"
                values = [value_of(rank) for rank in ranks]
                outlier = next((one.rank for one, than in ((other, first), (first, other))
                                if 2 * values.count(value_of(than)) > len(ranks)), None)  # fmt: skip
                return check, what, where, outlier
    return None


def _differences(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    return [f"{name} ({ours.get(name)} and {theirs.get(name)})" for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)]  # fmt: skip
