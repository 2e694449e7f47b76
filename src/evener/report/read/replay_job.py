"""Find steps of a run that one machine can replay, or raise an error that says why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.shell import quote_word
from evener.core.base.units import join_names, pluralize
from evener.core.model.corpus import Corpus, load_corpus
from evener.core.model.pretrained import PretrainedModel, TrainedModel
from evener.core.run.resolve import trained_model
from evener.core.run.roster import Dtype, Roster, parse_sync
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import SAMPLERS, Manifest, RunDir
from evener.core.run.step_cost import StepRecord

USER_PROGRAM_REASON = "it ran a program of one's own: evener has neither its model nor its data"


class ReplayJob(msgspec.Struct, frozen=True, kw_only=True):
    """The steps to replay, and what the fleet recorded of them."""

    first: int  # steps taken before the replay: the checkpoint's step, or 0 for the start of the run
    num_steps: int
    spec: RunSpec
    corpus: Corpus
    shape: TrainedModel
    dtype: Dtype  # of the rank with the largest share
    dtypes: list[Dtype]  # of all ranks
    micro_batch: int
    syncs: list[str]  # sync strategies in these steps
    records: dict[int, list[StepRecord]]  # by rank, of these steps
    later_start_step: int | None  # the step of a later start, which may have had other flags


def find_replay_job(rundir: RunDir, num_steps: int, from_step: int | None = None) -> ReplayJob:
    """Return the steps to replay: after the newest checkpoint with `num_steps` recorded after it, or after `from_step`.

    Raise an EvenerError that says why there are none.
    """
    manifest = rundir.manifest()
    corpus, shape = _load_corpus_and_shape(rundir, manifest)
    recorded = records_by_step(rundir)
    first = _first_step(rundir, recorded, num_steps, from_step, may_begin=manifest.spec.model.init_from is None)
    steps = range(first, first + num_steps)
    records = {rank: [of_rank[step] for step in steps] for rank, of_rank in recorded.items()
               if all(step in of_rank for step in steps)}  # fmt: skip
    syncs, resumed = _sync_history(rundir, manifest.roster, first, num_steps)
    member = max(manifest.roster.members, key=lambda each: each.share)
    if any(parse_sync(sync).drifts for sync in syncs):
        _refuse(
            rundir, "between exchanges its replicas drift apart (--sync diloco), so one process cannot take their steps"
        )
    if any(each.dtype == "fp16" for each in manifest.roster.members):
        _refuse(rundir, "its losses were scaled (--dtype fp16), and its records do not say which steps it skipped")
    _check_tokens(rundir, manifest, records)
    if shape.dropout:
        _check_dropout(rundir, manifest, records)
    on_cpu = not any(each.is_gpu for each in manifest.roster.members)
    machine = msgspec.structs.replace(manifest.spec.machine, device="cpu" if on_cpu else "auto")
    return ReplayJob(
        first=first,
        num_steps=num_steps,
        spec=msgspec.structs.replace(manifest.spec, machine=machine),
        corpus=corpus,
        shape=shape,
        dtype=member.dtype,
        dtypes=[each.dtype for each in manifest.roster.members],
        micro_batch=member.micro_batch,
        syncs=syncs,
        records=records,
        later_start_step=resumed,
    )


def records_by_step(rundir: RunDir) -> dict[int, dict[int, StepRecord]]:
    """Return records by rank and step, without the last steps of a killed run, which lack the global loss."""
    failed = {event.get("step") for event in rundir.events() if event["event"] == "run.nonfinite"}
    result = {}
    for rank in rundir.recorded_ranks():
        records = rundir.records(rank)
        while records and records[-1].loss is None and records[-1].step not in failed:
            records.pop()
        result[rank] = {record.step: record for record in records}
    return result


def _refuse(rundir: RunDir, why: str, hint: str = "") -> None:
    raise UsageError(f"{rundir} cannot be replayed: {why}", hint=hint)


def _load_corpus_and_shape(rundir: RunDir, manifest: Manifest) -> tuple[Corpus, TrainedModel]:
    """Load the run's corpus and its model's shape; raise UsageError if either differs from the run's."""
    if manifest.corpus is None or manifest.shape is None or manifest.sampler == "own":
        raise UsageError(
            f"{rundir} cannot be replayed: {USER_PROGRAM_REASON}",
            hint=f"evener verify {quote_word(rundir)} compares weights",
        )
    places = [manifest.corpus.path, manifest.spec.data.data]
    corpus = load_corpus(next((place for place in places if Path(place).is_dir()), places[0]))
    shape = trained_model(manifest.spec, corpus)
    if corpus.tokenizer_hash != manifest.corpus.tokenizer_hash or corpus.dtype != manifest.corpus.dtype:
        _refuse(rundir, f"the tokenizer of {corpus.path} is not the one that it was trained with")
    if corpus.train_tokens != manifest.corpus.train_tokens:
        _refuse(rundir, f"{corpus.path} has {corpus.train_tokens} tokens, and had {manifest.corpus.train_tokens}")
    if shape != manifest.shape:
        _refuse(rundir, f"its model's shape differs from that of {manifest.spec.model.model} with its flags here")
    if manifest.sampler != SAMPLERS[manifest.spec.train.sampling]:
        _refuse(rundir, f"its batches came from the sampler {manifest.sampler}, which this evener does not have")
    return corpus, shape


def _first_step(
    rundir: RunDir,
    recorded: Mapping[int, Mapping[int, StepRecord]],
    num_steps: int,
    from_step: int | None,
    *,
    may_begin: bool,
) -> int:
    """Return the step to start from; raise an error with the possible ones if there is none."""
    steps = recorded.get(0, {})
    starts = sorted({*([0] if may_begin else []), *rundir.checkpoint_steps()})
    following = {start: next(num for num in range(len(steps) + 1) if start + num not in steps) for start in starts}
    if from_step is not None and from_step not in following:
        raise UsageError(
            f"--from-step {from_step}: {rundir} has no checkpoint of it",
            hint=f"one of {join_names([str(start) for start in starts], 9)}" if starts else "",
        )
    good = [start for start, num in following.items() if num >= num_steps and from_step in (None, start)]
    if good:
        return good[-1]
    followers = [f"{num} after step {start}" for start, num in following.items() if from_step in (None, start)]
    most = max((num for start, num in following.items() if from_step in (None, start)), default=0)
    raise CheckpointError(
        f"{rundir} cannot be replayed: no checkpoint is followed by {pluralize(num_steps, 'recorded step')}: "
        f"{join_names(followers, 9) if followers else 'it has none'}",
        hint=f"--replay {most}" if most else "--checkpoint-every N writes more of them",
    )


def _sync_history(rundir: RunDir, roster: Roster, first: int, num_steps: int) -> tuple[list[str], int | None]:
    """Return (sync strategies, step of a later start or None).

    The strategies are those of the `num_steps` steps from `first` on and of the step before them. A later start is one
    that continued the run after step `first`.
    """
    history: list[tuple[int, str]] = []
    starts = []
    for event in rundir.events():
        if not isinstance(event.get("step"), int) or not isinstance(event.get("sync"), str):
            continue
        if event["event"] in ("start", "rechosen"):
            history = [entry for entry in history if entry[0] < event["step"]] + [(event["step"], event["sync"])]
        if event["event"] == "start":
            starts.append(event["step"])
    history = history or [(0, str(roster.sync))]
    ends = [step for step, _ in history[1:]] + [first + num_steps]
    syncs = [sync for (begin, sync), end in zip(history, ends, strict=True)
             if begin < first + num_steps and end > max(0, first - 1)]  # fmt: skip
    return list(dict.fromkeys(syncs)), next((step for step in starts[1:] if step > first), None)


def _check_tokens(rundir: RunDir, manifest: Manifest, records: Mapping[int, list[StepRecord]]) -> None:
    """Refuse if the recorded batches differ in size from the manifest's, as they may before a resume."""
    assert manifest.shape is not None
    if isinstance(manifest.shape, PretrainedModel):  # its sequences differ in length
        return
    for of_step in zip(*records.values(), strict=True):
        tokens, expected = sum(each.tokens for each in of_step), manifest.spec.train.batch * manifest.shape.block_size
        if len(of_step) == of_step[0].members and tokens != expected:
            _refuse(rundir, f"step {of_step[0].step + 1} had {tokens:g} tokens, but --batch now gives {expected}")


def _check_dropout(rundir: RunDir, manifest: Manifest, records: Mapping[int, list[StepRecord]]) -> None:
    """Refuse dropout that cannot be reproduced: each rank draws its masks from its own generator, in the order of its
    passes, so this process draws the same only for one rank on a CPU, uncompiled.
    """
    if any(record.members > 1 for of_rank in records.values() for record in of_rank):
        _refuse(rundir, "it trained with dropout, which each of its ranks drew for itself", "--dropout 0 can be")
    if manifest.roster.members[0].is_gpu or manifest.compiled:
        _refuse(
            rundir, "it trained with dropout, which a GPU or a compiled model draws otherwise", "--dropout 0 can be"
        )
