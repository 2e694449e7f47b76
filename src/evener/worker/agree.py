"""Do all ranks run the same program, on the same data, for the same model, from the same step, by the same Roster?

Asked before the first step. Ranks that differ do not fail: they hang in a collective that the others never enter, or
train a model of nonsense.
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

NOT_COMPARED = ("out", "machine", "data")  # places and processes may differ; the data is compared by its content
PLACES = ("model.init_from",)  # the host's own path; whatever it holds, DDP hands out rank 0's weights


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on all ranks; None where this rank cannot tell."""

    rank: int
    host: str
    code: str
    torch: str
    spec: dict[str, object]
    data: str | None
    tokenizer: str | None
    shapes: str
    roster: Roster
    first: int  # the step with which it would begin


def seated(group: Group, rundir: RunWriter, machine: Machine, spec: RunSpec, resolved: Resolved | None) -> Roster:
    """The Roster with which this start begins: what the launcher made, of it the hosts of this world; else made here
    from where the ranks are.

    RunError on all ranks where the launcher's is not of these ranks.
    """
    seats = [from_json(text, Seat) for text in group.gather(msgspec.json.encode(seat_of(group, machine)))]
    check_built(spec)
    roster = told_roster()
    if roster is None:
        if resolved is None and spec.model.dtype == "auto":  # a program of the user's own computes as torch does
            spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, dtype="fp32"))
        return first_roster(spec, seats, resolved.shape.block_size if resolved else None)
    if not group.is_let_in:  # the others will say which; until then this rank is alone
        note_end_before(rundir, roster, group)
        return roster.of_one(own_member(roster, group))
    if (world := group.world) is not None:
        note_end_before(rundir, roster, group)
        roster = largest([from_json(text, Roster) for text in group.gather(msgspec.json.encode(roster))])
        epochs = [record.epoch for rank in rundir.recorded_ranks() for record in rundir.records(rank)[-1:]]
        epoch = max(int(text) for text in group.gather(str(max(epochs, default=-1) + 1).encode()))
        roster = limited(roster.among(world.hosts, epoch, world.why), group)
        group.numbers = [member.rank for member in roster.members]
    planned, there = ([(one.host, one.device) for one in places] for places in (roster.members, seats))
    if planned != there:
        rank = next((i for i, pair in enumerate(zip(planned, there, strict=False)) if pair[0] != pair[1]), len(there))
        told = [f"{' on '.join(places[rank][::-1])}" if rank < len(places) else "nobody" for places in (planned, there)]
        raise RunError(f"roster.mismatch: rank {rank} was to be {told[0]}, and is {told[1]}", hint="start it again")
    return roster


def planned_cluster() -> Cluster | None:
    """The machines as the planner knows them, where it told the ranks, so that they can choose again."""
    path = os.environ.get("EVENER_ROSTER")
    if path is None or not (told := Path(path).with_name(CLUSTER_FILE)).exists():
        return None
    return read_stored(told, Cluster)


def seat_of(group: Group, machine: Machine) -> Seat:
    """Where this rank is."""
    device = group.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.cpu
    return Seat(host=machine.host, device=str(device), name=name, has_bf16=has_bf16(device))


def agree(group: Group, rundir: RunWriter, spec: RunSpec, resolved: Resolved | None, roster: Roster, first: int,
          trained: Trained) -> None:  # fmt: skip
    """RunError, on all ranks, where they are not of one mind: of the one that is not as most are, if there is one."""
    mine = identity(roster, group.rank, spec, resolved, trained.weights().items(), first)
    ranks = [from_json(text, Identity) for text in group.gather(msgspec.json.encode(mine))]
    found = mismatch(ranks)
    if found is not None:
        check, what, where, odd = found
        if group.rank == 0:
            with contextlib.suppress(OSError):  # started by hand, a run has no directory yet
                rundir.add_event(check, what=what, where=where)
        of_rank = None if odd in (None, group.rank) else group.numbers[odd]
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
    """This rank's."""
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
    """(check, what differs, where it differs from, whose it is) of the first mismatch with rank 0, or None. Whose it is
    the others tell, if most of them are of one mind.
    """
    first = ranks[0]
    questions: list[tuple[str, str, Callable[[Identity], object]]] = [
        ("version.torch", "torch", lambda one: one.torch),
        ("code.mismatch", "evener's code", lambda one: one.code),
        ("data.mismatch", "the corpus", lambda one: one.data),
        ("tokenizer.mismatch", "the tokenizer", lambda one: one.tokenizer),
        ("spec.mismatch", "the spec", lambda one: one.spec),
        ("spec.mismatch", "the parameters' shapes", lambda one: one.shapes),
        ("roster.mismatch", "who does what", lambda one: one.roster),
        ("checkpoint.mismatch", "the step to go on from", lambda one: one.first),
    ]
    for check, what, question in questions:
        for other in ranks[1:]:
            if question(other) != question(first):
                if what == "the spec":
                    what = ", ".join(_differences(first.spec, other.spec))
                elif what == "the step to go on from":
                    what = f"{what} ({first.first} and {other.first})"
                where = f"rank {other.rank} on {other.host} and rank {first.rank} on {first.host}"
                answers = [question(one) for one in ranks]
                odd = next((one.rank for one, than in ((other, first), (first, other))
                            if 2 * answers.count(question(than)) > len(ranks)), None)  # fmt: skip
                return check, what, where, odd
    return None


def _differences(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    return [f"{name} ({ours.get(name)} and {theirs.get(name)})" for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)]  # fmt: skip
