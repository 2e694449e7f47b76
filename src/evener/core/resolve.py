"""Can this run start? The checks that need no torch, so that a mistake costs a second and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import msgspec

from evener.core.corpus import Corpus, check_block, distinct_tokens, load_corpus
from evener.core.errors import CheckpointError, NoRoomError, UsageError
from evener.core.prediction import Job
from evener.core.roster import NO_SYNC, Roster, SyncSpec, asked_sync, check_built, parse_shares
from evener.core.rundir import SAMPLERS, Checkpoint, RunDir, read_checkpoint
from evener.core.shape import PRESETS, GPTShape, preset_shape
from evener.core.spec import RunSpec

BYTES_PER_PARAM_ON_DISK = 12  # weights and AdamW's two moments in fp32
# Of a rank's own state: what it has not sent of its gradients and of sums; drifting replicas' weights, those agreed
# on, both momenta and Adam's second moments, and what of them is not sent.
OWN_BYTES_PER_PARAM = {"bf16": 8, "int8": 8, "int4": 8, "powersgd": 8, "diloco": 28}


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A spec and what it names."""

    spec: RunSpec
    corpus: Corpus
    shape: GPTShape
    resume: Checkpoint | None  # the checkpoint to go on from

    @property
    def job(self) -> Job:
        """What the planner is asked about."""
        return job_of(self.spec, self.shape, self.corpus)


def resolve(
    spec: RunSpec,
    *,
    resume: bool = False,
    in_world: bool = False,
    roster: Roster | None = None,
    ranks_here: int | None = None,
) -> Resolved:
    """Look up what a spec names and check that it can run; EvenerError where it cannot.

    `in_world`: where it goes on the hosts will find out together. `roster` is what the launcher made of the spec, where
    it has; `ranks_here` of its ranks are on this machine [all].
    """
    spec.check()
    corpus = load_corpus(Path(spec.data.data))
    model = spec.model
    shape = shape_of(spec, corpus.vocab_size)
    check_block(corpus, shape.block_size)
    if model.init_from is not None and not resume:
        weights_file(model.init_from)
    rundir = RunDir(spec.out or "runs")
    check_built(spec)
    check_suits(asked_sync(spec), shape)
    parse_shares(spec.machine.shares)
    checkpoint = None if in_world else starting_point(rundir, spec, resume=resume)
    if checkpoint is not None:
        _check_fits(rundir, shape, corpus, spec)
    sync = roster.sync if roster else asked_sync(spec) if spec.machine.ranks > 1 else NO_SYNC
    _check_disk(rundir, shape, spec, OWN_BYTES_PER_PARAM.get(sync.kind, 0) * (ranks_here or spec.machine.ranks))
    return Resolved(spec=spec, corpus=corpus, shape=shape, resume=checkpoint)


def job_of(spec: RunSpec, shape: GPTShape, corpus: Corpus | None) -> Job:
    """With what the corpus says of a model's tables, where it has some."""
    distinct = distinct_tokens(corpus, shape.block_size) if corpus is not None and shape.has_tables else []
    return Job(spec=spec, shape=shape, distinct_tokens=distinct)


def weights_file(init_from: str) -> Path:
    """The file of `--init-from`: itself, that of a checkpoint or of transformers' folder, or a run's newest one."""
    path = Path(init_from)
    if RunDir(path).is_run():
        return RunDir(path).whole_checkpoint() / "weights.safetensors"
    if path.is_dir():
        found = [path / name for name in ("weights.safetensors", "model.safetensors") if (path / name).is_file()]
        if not found:
            raise UsageError(f"--init-from {path}: neither a run, nor a checkpoint, nor a folder of transformers")
        return found[0]
    if not path.is_file():
        raise UsageError(f"--init-from {path}: no such file")
    return path


def shape_of(spec: RunSpec, vocab_size: int | None = None) -> GPTShape:
    """The model's shape for a vocabulary, the preset's own if None; UsageError where no model can have it."""
    model = spec.model
    fields = ("num_layers", "num_heads", "width", "dropout")
    overrides = {field: getattr(model, field) for field in fields if getattr(model, field) is not None}
    if vocab_size is None and model.model in PRESETS:
        vocab_size = PRESETS[model.model].vocab_size
    return preset_shape(model.model, vocab_size or 1, model.block_size, **overrides)


def check_suits(sync: SyncSpec, shape: GPTShape) -> None:
    """UsageError where a strategy has nothing to do in a model of this shape."""
    check_useful(sync, has_tables=shape.has_tables, is_thinner=shape.width > 2 * sync.rank)


def check_useful(sync: SyncSpec, *, has_tables: bool, is_thinner: bool) -> None:
    """UsageError where a strategy has nothing to do in this model.

    `has_tables`: it has some that are only looked up; `is_thinner`: factors of PowerSGD's rank are, than some matrix.
    """
    if sync.kind == "powersgd" and not is_thinner:
        raise UsageError(
            f"--sync {sync}: no matrix of this model has both sides above {2 * sync.rank}: nothing is smaller",
            hint="a smaller rank, such as powersgd:4",
        )
    if sync.sparse and not has_tables:
        raise UsageError(
            f"--sync {sync}: this model has no table that is only looked up: a head that is tied reads it too",
            hint=f"--sync {str(sync).removesuffix('+sparse')}",
        )


def new_run_path(spec: RunSpec) -> str:
    """A run directory for a run that was given none."""
    return str(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{spec.model.model}-{Path(spec.data.data).name}")


def starting_point(rundir: RunDir, spec: RunSpec, *, resume: bool) -> Checkpoint | None:
    """The checkpoint with which a run begins, None where it is a new one; EvenerError where it can do neither there."""
    if resume:
        return _newest_checkpoint(rundir, spec)
    _check_free(spec)
    return None


def _check_free(spec: RunSpec) -> None:
    """UsageError where a new run cannot have the place that it was given."""
    rundir = RunDir(spec.out or "runs")
    if spec.out is not None and rundir.is_run():
        raise UsageError(
            f"--out {rundir}: holds a run already", hint=f"evener train --resume {rundir}, or another --out"
        )
    if rundir.path.exists() and not rundir.path.is_dir():
        raise UsageError(f"--out {rundir}: a file is in the way")


def _newest_checkpoint(rundir: RunDir, spec: RunSpec) -> Checkpoint:
    """What a run is to go on from; CheckpointError where there is nothing, it is damaged or holds nothing of the
    strategy that was asked for, UsageError where it has taken all its steps.
    """
    had, steps = rundir.manifest().roster.sync, spec.train.steps
    if had != NO_SYNC and spec.train.sync != "auto" and asked_sync(spec) != had:
        raise CheckpointError(
            f"{rundir}: its replicas agree by {had}, and its checkpoints hold nothing of {spec.train.sync}",
            hint=f"--sync {had}, or a new run from its weights",
        )
    saved = rundir.newest_checkpoint()
    if saved >= steps:
        raise UsageError(f"{rundir}: it has taken all its {saved} steps", hint=f"--steps {2 * saved} goes on")
    return read_checkpoint(rundir.checkpoint_path(saved))


def _check_fits(rundir: RunDir, shape: GPTShape, corpus: Corpus, spec: RunSpec) -> None:
    manifest = rundir.manifest()
    if manifest.shape != shape:
        raise CheckpointError(f"{rundir}: its model has another shape than {spec.model.model} with these flags")
    if manifest.corpus is not None and manifest.corpus.tokenizer_hash != corpus.tokenizer_hash:
        raise CheckpointError(
            f"{rundir}: it was trained on {manifest.corpus.path}; the tokenizer of {corpus.path} is another",
            hint=f"--data {manifest.corpus.path}",
        )
    if manifest.sampler != SAMPLERS[spec.train.sampling]:
        flag = next(name for name, sampler in SAMPLERS.items() if sampler == manifest.sampler)
        raise CheckpointError(
            f"{rundir}: its batches came from the sampler {manifest.sampler}, and "
            f"{SAMPLERS[spec.train.sampling]} would go on with others",
            hint=f"--sampling {flag}",
        )


def _check_disk(rundir: RunDir, shape: GPTShape, spec: RunSpec, own_bytes_per_param: int) -> None:
    """NoRoomError where there is no room for the checkpoints, and for what the ranks here keep for themselves."""
    place = rundir.path.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"--out {rundir}: {place} is a file", hint="another --out")
    if not os.access(place, os.W_OK):
        raise UsageError(f"{place}: may not be written", hint="another --out")
    num_kept = spec.checkpoint.keep + 2  # the best, and one in the making
    needed = shape.num_params() * BYTES_PER_PARAM_ON_DISK * num_kept
    needed += shape.num_params() * own_bytes_per_param * 3  # the newest two, and one in the making
    free = shutil.disk_usage(place).free
    if free < needed:
        error = NoRoomError(
            f"{place}: {free / 1e9:.2f} GB free, the checkpoints need {needed / 1e9:.2f} GB",
            hint="another --out, or a smaller --keep",
        )
        error.needed = needed
        raise error
