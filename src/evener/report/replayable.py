"""Can some steps of a run be replayed on one machine, and from where? If not, why, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from evener.core.corpus import Corpus, load_corpus
from evener.core.errors import CheckpointError, UsageError
from evener.core.resolve import shape_of
from evener.core.roster import Dtype, Roster, parse_sync
from evener.core.rundir import SAMPLERS, Manifest, RunDir
from evener.core.shape import GPTShape
from evener.core.spec import RunSpec
from evener.core.step import StepRecord
from evener.core.units import listed, plural

OWN_DATA = "a program of one's own: evener has neither its model nor its data"


class Replayable(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be replayed, and what the fleet recorded of it."""

    first: int  # steps taken before: the checkpoint's, or 0 for the run's beginning
    num_steps: int
    spec: RunSpec
    corpus: Corpus
    shape: GPTShape
    dtype: Dtype  # of the largest share
    dtypes: list[Dtype]  # of all ranks
    micro_batch: int
    syncs: list[str]  # how replicas agreed in these steps
    records: dict[int, list[StepRecord]]  # by rank, of these steps
    resumed: int | None  # a later start, which may have had other flags


def replayable(rundir: RunDir, num_steps: int, from_step: int | None = None) -> Replayable:
    """The steps to replay: after the newest checkpoint that so many recorded steps follow, or after `from_step`.

    An EvenerError says why there are none.
    """
    manifest = rundir.manifest()
    corpus, shape = _named(rundir, manifest)
    recorded = recorded_steps(rundir)
    first = _first(rundir, recorded, num_steps, from_step, may_begin=manifest.spec.model.init_from is None)
    wanted = range(first, first + num_steps)
    records = {rank: [of_rank[step] for step in wanted] for rank, of_rank in recorded.items()
               if all(step in of_rank for step in wanted)}  # fmt: skip
    syncs, resumed = _ways(rundir, manifest.roster, first, num_steps)
    member = max(manifest.roster.members, key=lambda one: one.share)
    if any(parse_sync(sync).kind == "diloco" for sync in syncs):
        _refuse(
            rundir, "between exchanges its replicas drift apart, by --sync diloco: no one process takes their steps"
        )
    if any(one.dtype == "fp16" for one in manifest.roster.members):
        _refuse(rundir, "its losses were scaled, by --dtype fp16: which steps it passed over is not in its records")
    _check_tokens(rundir, manifest, records)
    if shape.dropout:
        _check_dropout(rundir, manifest, records)
    on_cpu = not any(one.is_gpu for one in manifest.roster.members)
    machine = msgspec.structs.replace(manifest.spec.machine, device="cpu" if on_cpu else "auto")
    return Replayable(
        first=first,
        num_steps=num_steps,
        spec=msgspec.structs.replace(manifest.spec, machine=machine),
        corpus=corpus,
        shape=shape,
        dtype=member.dtype,
        dtypes=[one.dtype for one in manifest.roster.members],
        micro_batch=member.micro_batch,
        syncs=syncs,
        records=records,
        resumed=resumed,
    )


def recorded_steps(rundir: RunDir) -> dict[int, dict[int, StepRecord]]:
    """By rank and step; without the last ones of a run that was killed, of which a rank knew its own part alone."""
    failed = {event.get("step") for event in rundir.events() if event["event"] == "run.nonfinite"}
    found = {}
    for rank in rundir.recorded_ranks():
        records = rundir.records(rank)
        while records and records[-1].loss is None and records[-1].step not in failed:
            records.pop()
        found[rank] = {record.step: record for record in records}
    return found


def _refuse(rundir: RunDir, why: str, hint: str = "") -> None:
    raise UsageError(f"{rundir} cannot be replayed: {why}", hint=hint)


def _named(rundir: RunDir, manifest: Manifest) -> tuple[Corpus, GPTShape]:
    """The run's corpus, where it is here, and its model's shape."""
    if manifest.corpus is None or manifest.shape is None or manifest.sampler == "own":
        raise UsageError(f"{rundir} cannot be replayed: {OWN_DATA}", hint=f"evener verify {rundir} compares weights")
    places = [manifest.corpus.path, manifest.spec.data.data]
    corpus = load_corpus(next((place for place in places if Path(place).is_dir()), places[0]))
    shape = shape_of(manifest.spec, corpus.vocab_size)
    if corpus.tokenizer_hash != manifest.corpus.tokenizer_hash or corpus.dtype != manifest.corpus.dtype:
        _refuse(rundir, f"the tokenizer of {corpus.path} is not the one that it was trained with")
    if corpus.train_tokens != manifest.corpus.train_tokens:
        _refuse(rundir, f"{corpus.path} has {corpus.train_tokens} tokens, and had {manifest.corpus.train_tokens}")
    if shape != manifest.shape:
        _refuse(rundir, f"its model has another shape than {manifest.spec.model.model} with its flags has here")
    if manifest.sampler != SAMPLERS[manifest.spec.train.sampling]:
        _refuse(rundir, f"its batches came from the sampler {manifest.sampler}, which this evener has not")
    return corpus, shape


def _first(
    rundir: RunDir,
    recorded: Mapping[int, Mapping[int, StepRecord]],
    num_steps: int,
    from_step: int | None,
    *,
    may_begin: bool,
) -> int:
    """The step to begin with."""
    steps = recorded.get(0, {})
    starts = sorted({*([0] if may_begin else []), *rundir.checkpoint_steps()})
    following = {start: next(num for num in range(len(steps) + 1) if start + num not in steps) for start in starts}
    if from_step is not None and from_step not in following:
        raise UsageError(
            f"--from-step {from_step}: {rundir} has no checkpoint of it",
            hint=f"one of {listed([str(start) for start in starts], 9)}" if starts else "",
        )
    good = [start for start, num in following.items() if num >= num_steps and from_step in (None, start)]
    if good:
        return good[-1]
    held = [f"{num} after step {start}" for start, num in following.items() if from_step in (None, start)]
    most = max((num for start, num in following.items() if from_step in (None, start)), default=0)
    raise CheckpointError(
        f"{rundir} cannot be replayed: no checkpoint is followed by {plural(num_steps, 'recorded step')}: "
        f"{listed(held, 9) if held else 'it has none'}",
        hint=f"--replay {most}" if most else "--checkpoint-every N makes more of them",
    )


def _ways(rundir: RunDir, roster: Roster, first: int, num_steps: int) -> tuple[list[str], int | None]:
    """(how replicas agreed in these steps and the one before, a later start of the run)."""
    ways: list[tuple[int, str]] = []
    starts = []
    for event in rundir.events():
        if not isinstance(event.get("step"), int) or not isinstance(event.get("sync"), str):
            continue
        if event["event"] in ("start", "rechosen"):
            ways = [way for way in ways if way[0] < event["step"]] + [(event["step"], event["sync"])]
        if event["event"] == "start":
            starts.append(event["step"])
    ways = ways or [(0, str(roster.sync))]
    ends = [step for step, _ in ways[1:]] + [first + num_steps]
    found = [sync for (begin, sync), end in zip(ways, ends, strict=True)
             if begin < first + num_steps and end > max(0, first - 1)]  # fmt: skip
    return list(dict.fromkeys(found)), next((step for step in starts[1:] if step > first), None)


def _check_tokens(rundir: RunDir, manifest: Manifest, records: Mapping[int, list[StepRecord]]) -> None:
    """The records say how large the batches were: a resumed run may have had others before."""
    assert manifest.shape is not None
    for of_step in zip(*records.values(), strict=True):
        tokens, expected = sum(one.tokens for one in of_step), manifest.spec.train.batch * manifest.shape.block_size
        if len(of_step) == of_step[0].members and tokens != expected:
            _refuse(rundir, f"step {of_step[0].step + 1} had {tokens:g} tokens, and --batch is now for {expected}")


def _check_dropout(rundir: RunDir, manifest: Manifest, records: Mapping[int, list[StepRecord]]) -> None:
    """Each rank draws what it drops from a generator of its own, in the order of its passes; of one rank on a
    processor, uncompiled, this process draws the same.
    """
    if any(record.members > 1 for of_rank in records.values() for record in of_rank):
        _refuse(rundir, "it trained with dropout, which each of its ranks drew for itself", "--dropout 0 can be")
    if manifest.roster.members[0].is_gpu or manifest.compiled:
        _refuse(
            rundir, "it trained with dropout, which a GPU or a compiled model draws otherwise", "--dropout 0 can be"
        )
