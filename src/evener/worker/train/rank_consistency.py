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

from evener.core.base.errors import RunError
from evener.core.base.json_files import read_json
from evener.core.cluster.host_info import HostInfo
from evener.core.model.pretrained import PretrainedModel
from evener.core.run.membership_epoch import is_elastic
from evener.core.run.prediction import Cluster
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import NO_SYNC, RankSlot, Roster, check_sync_supported, initial_roster
from evener.core.run.run_plan import CLUSTER_FILE, read_launcher_roster
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import Checkpoint, code_hash
from evener.core.run.runwriter import RunWriter
from evener.worker.membership.memory_limits import detect_previous_oom, limit_micro_batches, local_member
from evener.worker.membership.regroup import largest_roster
from evener.worker.rank.precision import has_bf16
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.state.training_state import TrainingState

UNCOMPARED_SECTIONS = ("out", "machine", "data")  # paths and processes may differ; the data is compared by its content
HOST_LOCAL_FIELDS = ("model.init_from",)  # a path on the host; whatever it holds, DDP broadcasts rank 0's weights


class RankFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that must be equal on all ranks; None where this rank does not know one."""

    rank: int
    host: str
    code_hash: str
    torch: str
    spec: dict[str, object]
    corpus_hash: str | None
    tokenizer_hash: str | None
    shapes_hash: str
    roster: Roster
    first_step: int  # the step that it would take first


def starting_roster(
    group: ProcessGroups,
    rundir: RunWriter,
    machine: HostInfo,
    spec: RunSpec,
    resolved: ResolvedRun | None,
    start: Checkpoint | None,
) -> Roster:
    """Return the roster of this start: the launcher's, restricted to this epoch's hosts, else one built from the ranks.

    With --sync auto it has the strategy of `start`, the checkpoint that all ranks start from, if any.
    Raise RunError on all ranks if the launcher's roster does not match the ranks.
    """
    slots = group.all_gather(local_rank_slot(group, machine), RankSlot)
    check_sync_supported(spec)
    roster = read_launcher_roster()
    if roster is None:
        if resolved is None and spec.model.dtype == "auto":  # a user's own program computes in torch's default dtype
            spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, dtype="fp32"))
        return initial_roster(spec, slots, resolved.shape.block_size if resolved else None)
    if not group.is_admitted:  # the others will send it; until then this rank is alone
        detect_previous_oom(rundir, roster, group)
        return roster.for_single_rank(local_member(roster, group))
    if (world := group.membership_epoch) is not None:
        detect_previous_oom(rundir, roster, group)
        roster = largest_roster(group.all_gather(roster, Roster))
        epochs = [record.epoch for rank in rundir.recorded_ranks() for record in rundir.records(rank)[-1:]]
        epoch = max(group.all_gather(max(epochs, default=-1) + 1, int))
        if spec.train.sync == "auto" and start is not None and start.sync != NO_SYNC:
            roster = roster.replace_sync(start.sync, start.bucket_bytes)
        sync, backend = roster.sync, roster.backend
        roster = limit_micro_batches(roster.for_hosts(world.hosts, epoch, world.why), group)
        if is_elastic():  # a rank that is alone for a while keeps the run's strategy
            roster = msgspec.structs.replace(roster, sync=sync, backend=backend)
        group.member_ranks = [member.rank for member in roster.members]
    planned = [(member.host, member.device) for member in roster.members]
    actual = [(slot.host, slot.device) for slot in slots]
    if planned != actual:
        rank = next((i for i, pair in enumerate(zip(planned, actual, strict=False)) if pair[0] != pair[1]), len(actual))
        texts = [f"{' on '.join(one[rank][::-1])}" if rank < len(one) else "nobody" for one in (planned, actual)]
        raise RunError(f"roster.mismatch: rank {rank} was to be {texts[0]}, and is {texts[1]}", hint="start it again")
    return roster


def load_planned_cluster() -> Cluster | None:
    """Load the planner's description of the machines, so that ranks can plan again; None if it gave them none."""
    path = os.environ.get("EVENER_ROSTER")
    if path is None or not (file := Path(path).with_name(CLUSTER_FILE)).exists():
        return None
    return read_json(file, Cluster)


def local_rank_slot(group: ProcessGroups, machine: HostInfo) -> RankSlot:
    """Return this rank's host and device."""
    device = group.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine.cpu
    return RankSlot(host=machine.host, device=str(device), name=name, has_bf16=has_bf16(device))


def check_rank_consistency(
    group: ProcessGroups,
    rundir: RunWriter,
    spec: RunSpec,
    resolved: ResolvedRun | None,
    roster: Roster,
    first_step: int,
    training_state: TrainingState,
) -> None:
    """Raise RunError on all ranks if their fingerprints differ; it names the rank that is in the minority, if any."""
    mine = rank_fingerprint(roster, group.rank, spec, resolved, training_state.named_weights().items(), first_step)
    ranks = group.all_gather(mine, RankFingerprint)
    result = find_mismatch(ranks)
    if result is not None:
        check, what, where, outlier = result
        if group.rank == 0:
            with contextlib.suppress(OSError):  # started by hand, a run has no directory yet
                rundir.add_event(check, what=what, where=where)
        of_rank = None if outlier in (None, group.rank) else group.member_ranks[outlier]
        raise RunError(f"{check}: {what}: {where} differ", hint="evener train sends every host the same",
                       failed_rank=of_rank)  # fmt: skip


def rank_fingerprint(
    roster: Roster,
    rank: int,
    spec: RunSpec,
    resolved: ResolvedRun | None,
    weights: Iterable[tuple[str, Tensor]],
    first_step: int,
) -> RankFingerprint:
    """Return this rank's fingerprint."""
    tree = msgspec.to_builtins(spec)
    flat = {f"{section}.{field}": value for section, fields in tree.items() if section not in UNCOMPARED_SECTIONS
            for field, value in fields.items() if f"{section}.{field}" not in HOST_LOCAL_FIELDS}  # fmt: skip
    if resolved is not None and isinstance(resolved.shape, PretrainedModel):  # its folder is elsewhere on each host
        flat["model.model"] = resolved.shape.weights_hash
    shapes = "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in weights)
    return RankFingerprint(
        rank=rank,
        host=roster.members[rank].host,
        code_hash=code_hash(),
        torch=str(torch.__version__).partition("+")[0],
        spec=flat,
        corpus_hash=resolved.corpus.content_hash if resolved else None,
        tokenizer_hash=resolved.corpus.tokenizer_hash if resolved else None,
        shapes_hash=hashlib.blake2b(shapes.encode(), digest_size=16).hexdigest(),
        roster=roster,
        first_step=first_step,
    )


def find_mismatch(fingerprints: Sequence[RankFingerprint]) -> tuple[str, str, str, int | None] | None:
    """Return (check, what differs, the two ranks that differ, outlier rank) of the first mismatch with rank 0, or None.

    The outlier is the one of the two that is not in the majority, if there is a majority.
    """
    first = fingerprints[0]
    checks: list[tuple[str, str, Callable[[RankFingerprint], object]]] = [
        ("version.torch", "torch", lambda rank: rank.torch),
        ("code.mismatch", "evener's code", lambda rank: rank.code_hash),
        ("data.mismatch", "the corpus", lambda rank: rank.corpus_hash),
        ("tokenizer.mismatch", "the tokenizer", lambda rank: rank.tokenizer_hash),
        ("spec.mismatch", "the spec", lambda rank: rank.spec),
        ("spec.mismatch", "the parameters' shapes", lambda rank: rank.shapes_hash),
        ("roster.mismatch", "who does what", lambda rank: rank.roster),
        ("checkpoint.mismatch", "the step to go on from", lambda rank: rank.first_step),
    ]
    for check, what, value_of in checks:
        for other in fingerprints[1:]:
            if value_of(other) != value_of(first):
                if what == "the spec":
                    what = ", ".join(_spec_differences(first.spec, other.spec))
                elif what == "the step to go on from":
                    what = f"{what} ({first.first_step} and {other.first_step})"
                where = f"rank {other.rank} on {other.host} and rank {first.rank} on {first.host}"
                values = [value_of(rank) for rank in fingerprints]
                outlier = next((one.rank for one, than in ((other, first), (first, other))
                                if 2 * values.count(value_of(than)) > len(fingerprints)), None)  # fmt: skip
                return check, what, where, outlier
    return None


def _spec_differences(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    return [f"{name} ({ours.get(name)} and {theirs.get(name)})" for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)]  # fmt: skip
