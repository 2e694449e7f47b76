"""Resolve and check a run's spec before it starts, without torch: a mistake costs a second and leaves no files."""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path

import msgspec

from evener.core.base.errors import CheckpointError, NoRoomError, UsageError
from evener.core.base.shell import quote_word
from evener.core.model.corpus import Corpus, check_block_size, load_corpus, mean_distinct_tokens
from evener.core.model.fine_tuning import FineTuning, ModelShape, read_lengths
from evener.core.model.gradients import ProgramModel
from evener.core.model.pretrained import PretrainedModel, TrainedModel, fine_tuning_packages, read_pretrained
from evener.core.model.shape import PRESETS, GPTShape, preset_shape
from evener.core.run.prediction import Job
from evener.core.run.roster import (
    MICRO_BATCH_TOKENS,
    NO_SYNC,
    Roster,
    SyncSpec,
    check_sync_of_program,
    check_sync_supported,
    parse_shares,
    requested_sync,
)
from evener.core.run.run_plan import read_plan_if_present
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import SAMPLERS, Checkpoint, RunDir, read_checkpoint

LR_TIMES_WIDTH, SMALL_BATCH_TOKENS = 0.5, 4096  # of `default_learning_rate`
LORA_LR = 2e-4  # QLoRA's for 7B   [Dettmers et al. 2023: scripts/finetune_guanaco_7b.sh]
FULL_LR = 2e-5  # TRL's (SFTConfig.learning_rate); ten times less than LoRA's   [Schulman et al. 2025]
MAX_MICRO_BATCH_LOGITS = 1 << 27  # of a pretrained model: 0.5 GiB in fp32, and as much again for their gradient
BYTES_PER_PARAM_ON_DISK = 12  # weights and AdamW's two moments in fp32
# Bytes per parameter of per-rank state. Lossy strategies: error-feedback residuals of the gradients and of their sums.
# DiLoCo: local and last synchronized weights, inner and (with H above 4) outer momentum, Adam's second moments, and
# both residuals.
RANK_STATE_BYTES_PER_PARAM = {"bf16": 8, "int8": 8, "int4": 8, "powersgd": 8, "diloco": 28}


class ResolvedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A checked spec with the corpus, model shape and checkpoint that it names."""

    spec: RunSpec
    corpus: Corpus
    shape: TrainedModel
    resume: Checkpoint | None  # the checkpoint to resume from

    @property
    def rundir(self) -> RunDir:
        """The run directory; the spec must have an `out`."""
        assert self.spec.out is not None
        return RunDir(self.spec.out)

    @property
    def gpt_shape(self) -> GPTShape:
        """The shape of a model of evener's own."""
        assert isinstance(self.shape, GPTShape), f"{self.spec.model.name} is a pretrained model"
        return self.shape

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the packages that its ranks import besides evener's own dependencies."""
        return fine_tuning_packages(self.shape.quantization) if isinstance(self.shape, PretrainedModel) else ()

    @property
    def step_size(self) -> tuple[int, str]:
        """Return what a step counts, and its unit: tokens; of a pretrained model sequences, as their lengths differ."""
        batch = self.spec.train.batch
        return (batch * self.shape.block_size, "tokens") if isinstance(self.shape, GPTShape) else (batch, "sequences")

    def with_recompute(self, recompute: bool) -> ResolvedRun:
        """Return this run with or without activation checkpointing."""
        model = msgspec.structs.replace(self.spec.model, recompute=recompute)
        return msgspec.structs.replace(self, spec=msgspec.structs.replace(self.spec, model=model))

    @property
    def job(self) -> Job:
        """The planner's input."""
        return make_job(self.spec, self.shape, self.corpus)


def resolve(
    spec: RunSpec,
    *,
    resume: bool = False,
    has_dynamic_membership: bool = False,
    roster: Roster | None = None,
    num_local_ranks: int | None = None,
) -> ResolvedRun:
    """Resolve what a spec names and check that the run can start. Raise EvenerError if it cannot.

    `has_dynamic_membership`: the hosts will agree on the checkpoint to resume from. `roster`: the launcher's, if there
    is one. `num_local_ranks`: how many ranks run on this machine; None: `--ranks`.
    """
    spec.check()
    corpus = load_corpus(Path(spec.data.data))
    shape = trained_model(spec, corpus)
    spec = with_model_defaults(spec, shape)
    if spec.model.init_from is not None and not resume:
        find_weights_file(spec.model.init_from)
    rundir = RunDir(spec.out or "runs")
    check_sync_supported(spec)
    check_sync_for_shape(requested_sync(spec), shape)
    parse_shares(spec.machine.shares)
    checkpoint = None if has_dynamic_membership else starting_checkpoint(rundir, spec, resume=resume)
    if checkpoint is not None:
        _check_fits(rundir, shape, corpus, spec)
    sync = roster.sync if roster else requested_sync(spec) if spec.machine.ranks > 1 else NO_SYNC
    _check_disk(
        rundir, shape, spec, RANK_STATE_BYTES_PER_PARAM.get(sync.kind, 0) * (num_local_ranks or spec.machine.ranks)
    )
    return ResolvedRun(spec=spec, corpus=corpus, shape=shape, resume=checkpoint)


def trained_model(spec: RunSpec, corpus: Corpus) -> TrainedModel:
    """Return the model that a spec names. Raise UsageError or DataError if it cannot be trained on this corpus."""
    folder = spec.model.pretrained
    if folder is None:
        if corpus.is_samples:
            raise UsageError(f"{corpus.path}: prepared as samples for a pretrained model", hint="--model hf:FOLDER")
        shape = model_shape(spec, corpus.vocab_size)
        check_block_size(corpus, shape.block_size)
        return shape
    for field in ("num_layers", "num_heads", "width", "dropout", "init_from"):
        if getattr(spec.model, field) is not None:
            flag = "--" + field.replace("_", "-")
            raise UsageError(f"{flag}: --model {spec.model.model} has its own config.json", hint=f"without {flag}")
    if spec.model.compile == "on":
        raise UsageError("--compile on: each length of a pretrained model's sequences would be compiled anew")
    model = read_pretrained(
        folder, spec.model.block_size, spec.model.lora, has_dora=spec.model.dora, quantization=spec.model.quantize
    )
    if not corpus.is_samples or corpus.tokenizer_hash != model.tokenizer_hash:
        why = (
            f"encoded with another tokenizer than {folder} has" if corpus.is_samples else "has no samples, but one text"
        )
        hint = f"name the texts themselves: evener train FILE --model {quote_word(spec.model.model)}"
        raise UsageError(f"{corpus.path}: {why}", hint=hint)
    if corpus.vocab_size > model.vocab_size:
        raise UsageError(
            f"--model {spec.model.model}: its tokenizer has {corpus.vocab_size} tokens, and its model "
            f"{model.vocab_size}: tokenizer.json is another model's",
            hint="the tokenizer.json with which the model was published",
        )
    return model


def with_model_defaults(spec: RunSpec, shape: TrainedModel) -> RunSpec:
    """Return the spec with the settings that depend on the model, where the user has set none."""
    train = spec.train
    if train.lr is None and isinstance(shape, PretrainedModel):
        train = msgspec.structs.replace(train, lr=LORA_LR if shape.lora_rank else FULL_LR)
    elif train.lr is None and isinstance(shape, GPTShape):
        train = msgspec.structs.replace(train, lr=default_learning_rate(shape.width, train.batch * shape.block_size))
    if train.micro_batch is None and isinstance(shape, PretrainedModel):
        num_tokens = min(MICRO_BATCH_TOKENS, MAX_MICRO_BATCH_LOGITS // shape.vocab_size)
        train = msgspec.structs.replace(train, micro_batch=max(1, num_tokens // shape.block_size))
    spec = msgspec.structs.replace(spec, train=train)
    spec.check()  # --min-lr
    return spec


def default_learning_rate(width: int, batch_tokens: int) -> float:
    """Return a peak learning rate for AdamW, to two digits: 0.5 / width, and less with a batch below 4096 tokens.

    It falls as 1 / width [Yang et al. 2022, muP] and, with small batches, with the root of the batch. So
    a width of 384 gets 1.3e-3 (nanoGPT's character model: 1e-3) and one of 768 gets 6.5e-4 (GPT-3: 6e-4).
    bench/learning_rate.py compares it with other rates.

    >>> default_learning_rate(384, 4096), default_learning_rate(768, 491520), default_learning_rate(128, 1024)
    (0.0013, 0.00065, 0.002)
    """
    return float(f"{LR_TIMES_WIDTH / width * min(1.0, math.sqrt(batch_tokens / SMALL_BATCH_TOKENS)):.2g}")


def pretrained_of_run(rundir: RunDir) -> tuple[Path, PretrainedModel] | None:
    """Return the folder of the model that a run fine-tuned, and what the run knows of it; None if it was evener's own.

    Raise UsageError if the model is not on this machine any more, or has changed.
    """
    manifest, plan = rundir.manifest(), read_plan_if_present(rundir)
    if not isinstance(manifest.shape, PretrainedModel):
        return None
    spec = manifest.spec if plan is None or plan.spec is None else plan.spec  # the paths of this machine
    folder = spec.model.pretrained
    if folder is None:
        raise CheckpointError(f"{rundir}: damaged: its model is pretrained, and its spec names no folder of one")
    shape = manifest.shape
    now = read_pretrained(
        folder, shape.block_size, shape.lora_rank, has_dora=shape.has_dora, quantization=shape.quantization
    )
    if not _is_same_model(now, shape):
        raise UsageError(f"{folder}: not the model any more that {rundir} fine-tuned", hint="the model as it was then")
    return folder, shape


def make_job(spec: RunSpec, shape: TrainedModel, corpus: Corpus | None) -> Job:
    """Return the planner's Job, with what it needs to know of the corpus: the lengths of sequences to fine-tune on, or
    if the model has lookup-only embeddings, the numbers of distinct tokens.
    """
    if isinstance(shape, PretrainedModel):
        assert corpus is not None, "how long sequences are is read from the corpus"
        lengths = read_lengths(corpus, shape.block_size, packing=spec.train.packing)
        return Job(spec=spec, shape=FineTuning(model=shape, lengths=lengths))
    distinct = (
        mean_distinct_tokens(corpus, shape.block_size) if corpus is not None and shape.has_sparse_embeddings else []
    )
    return Job(spec=spec, shape=shape, distinct_tokens=distinct)


def find_weights_file(init_from: str) -> Path:
    """Return the weights file of `--init-from`: a file, a checkpoint, a transformers folder, or a run (its newest)."""
    path = Path(init_from)
    if RunDir(path).is_run():
        return RunDir(path).verified_checkpoint() / "weights.safetensors"
    if path.is_dir():
        files = [path / name for name in ("weights.safetensors", "model.safetensors") if (path / name).is_file()]
        if not files:
            raise UsageError(f"--init-from {path}: neither a run, nor a checkpoint, nor a transformers folder")
        return files[0]
    if not path.is_file():
        raise UsageError(f"--init-from {path}: no such file")
    return path


def model_shape(spec: RunSpec, vocab_size: int | None = None) -> GPTShape:
    """Return the model's shape; `vocab_size` defaults to the preset's. Raise UsageError if the shape is invalid."""
    model = spec.model
    fields = ("num_layers", "num_heads", "width", "dropout")
    overrides = {field: getattr(model, field) for field in fields if getattr(model, field) is not None}
    if vocab_size is None and model.model in PRESETS:
        vocab_size = PRESETS[model.model].vocab_size
    return preset_shape(model.model, vocab_size or 1, model.block_size, **overrides)


def check_sync_for_shape(sync: SyncSpec, shape: ModelShape | TrainedModel) -> None:
    """Raise UsageError if a sync strategy would save nothing in a model of this shape, or is none for a program."""
    if isinstance(shape, ProgramModel):
        check_sync_of_program(sync)
        if shape.collectives and sync.kind not in ("none", "ddp"):
            raise UsageError(f"--sync {sync}: {shape.name} sums gradients itself, and so it is not predicted with it",
                             hint="--link, or other hosts")  # fmt: skip
    if isinstance(shape, (PretrainedModel, FineTuning)) and sync.is_sharded:
        raise UsageError(
            f"--sync {sync}: a model that is fine-tuned is whole on every rank", hint="--sync ddp, or auto"
        )
    if not isinstance(shape, GPTShape):
        shortest = max((min(tensor.rows, tensor.columns) for tensor in shape.gradients), default=0)
        check_sync_is_useful(sync, has_sparse_embeddings=False, is_low_rank_smaller=shortest > 2 * sync.rank)
        return
    check_sync_is_useful(
        sync, has_sparse_embeddings=shape.has_sparse_embeddings, is_low_rank_smaller=shape.width > 2 * sync.rank
    )


def check_sync_is_useful(sync: SyncSpec, *, has_sparse_embeddings: bool, is_low_rank_smaller: bool) -> None:
    """Raise UsageError if a sync strategy would save nothing in this model.

    `has_sparse_embeddings`: the model has lookup-only embedding tables. `is_low_rank_smaller`: the factors of
    PowerSGD's rank are smaller than some matrix.
    """
    if sync.kind == "powersgd" and not is_low_rank_smaller:
        raise UsageError(
            f"--sync {sync}: no matrix of this model has both sides above {2 * sync.rank}: none would shrink",
            hint="a smaller rank, such as powersgd:4",
        )
    if sync.sparse and not has_sparse_embeddings:
        raise UsageError(
            f"--sync {sync}: this model has no lookup-only embedding table: its tied head reads the table too",
            hint=f"--sync {str(sync).removesuffix('+sparse')}",
        )


def default_run_path(spec: RunSpec) -> str:
    """Return the default run directory, for a run without --out."""
    return str(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{spec.model.name}-{Path(spec.data.data).name}")


def starting_checkpoint(rundir: RunDir, spec: RunSpec, *, resume: bool) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None for a new run. Raise EvenerError if --out allows neither."""
    if resume:
        return _newest_checkpoint(rundir, spec)
    _check_free(spec)
    return None


def _check_free(spec: RunSpec) -> None:
    """Raise UsageError if a new run cannot use its --out."""
    rundir = RunDir(spec.out or "runs")
    if spec.out is not None and rundir.is_run():
        raise UsageError(
            f"--out {rundir}: already contains a run",
            hint=f"evener train --resume {quote_word(rundir)}, or another --out",
        )
    if rundir.path.exists() and not rundir.path.is_dir():
        raise UsageError(f"--out {rundir}: a file is in the way")


def _newest_checkpoint(rundir: RunDir, spec: RunSpec) -> Checkpoint:
    """Return the checkpoint that a run resumes from.

    Raise CheckpointError if there is none, it is damaged or it has no state for the requested strategy, and UsageError
    if the run has taken all its steps.
    """
    saved, steps = rundir.newest_checkpoint_step(), spec.train.steps
    if saved >= steps:
        raise UsageError(f"{rundir}: it has taken all its {saved} steps", hint=f"--steps {2 * saved} goes on")
    checkpoint, last = read_checkpoint(rundir.checkpoint_path(saved)), rundir.manifest().roster.sync
    requested = requested_sync(spec)
    has_state = not (last.is_exact and requested.is_exact)  # of a strategy, besides weights and optimizer
    if last != NO_SYNC and spec.train.sync != "auto" and has_state and requested not in (last, checkpoint.sync):
        raise CheckpointError(
            f"{rundir}: its sync strategy is {last}, and its checkpoints hold no state for {spec.train.sync}",
            hint=f"--sync {last if checkpoint.sync == NO_SYNC else checkpoint.sync}, or a new run from its weights",
        )
    return checkpoint


def _is_same_model(shape: TrainedModel | None, other: TrainedModel | None) -> bool:
    """Return whether two models are the same; the folder of a pretrained one may have another name."""
    if isinstance(shape, PretrainedModel) and isinstance(other, PretrainedModel):
        shape = msgspec.structs.replace(shape, name=other.name)
    return shape == other


def _check_fits(rundir: RunDir, shape: TrainedModel, corpus: Corpus, spec: RunSpec) -> None:
    manifest = rundir.manifest()
    if not _is_same_model(shape, manifest.shape):
        raise CheckpointError(f"{rundir}: its model has another shape than {spec.model.model} with these flags")
    if manifest.corpus is not None and manifest.corpus.tokenizer_hash != corpus.tokenizer_hash:
        raise CheckpointError(
            f"{rundir}: it was trained on {manifest.corpus.path}; {corpus.path} has another tokenizer",
            hint=f"--data {manifest.corpus.path}",
        )
    if manifest.sampler != SAMPLERS[spec.train.sampling]:
        flags = [name for name, sampler in SAMPLERS.items() if sampler == manifest.sampler]
        raise CheckpointError(
            f"{rundir}: its batches came from the sampler {manifest.sampler}, and "
            f"{SAMPLERS[spec.train.sampling]} would draw others",
            hint=f"--sampling {flags[0]}" if flags else "its manifest.json names no sampler of this version of evener",
        )


def _check_disk(rundir: RunDir, shape: TrainedModel, spec: RunSpec, rank_state_bytes_per_param: int) -> None:
    """Raise NoRoomError if the disk is too full for the checkpoints and the per-rank state of the local ranks."""
    folder = rundir.path.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"--out {rundir}: {folder} is a file", hint="another --out")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder}: not writable", hint="another --out")
    num_checkpoints = spec.checkpoint.keep + 2  # the best one, and one being written
    needed = shape.num_params() * BYTES_PER_PARAM_ON_DISK * num_checkpoints
    needed += shape.num_params() * rank_state_bytes_per_param * 3  # the newest two, and one being written
    free = shutil.disk_usage(folder).free
    if free < needed:
        error = NoRoomError(
            f"{folder}: {free / 1e9:.2f} GB free, the checkpoints need {needed / 1e9:.2f} GB",
            hint="another --out, or a smaller --keep",
        )
        error.needed_bytes = needed
        raise error
