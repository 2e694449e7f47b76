"""Train a model, on one process or on many. START READING HERE: this is the whole loop.

join → model, optimizer, data → for every step: this rank's share of the batch, forward, backward, update
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.optim import AdamW

from evener.core.base.errors import UsageError
from evener.core.model.pretrained import PretrainedModel
from evener.core.model.shape import GPTShape
from evener.core.run.progress import RunProgress
from evener.core.run.resolve import ResolvedRun, find_weights_file
from evener.core.run.roster import Dtype
from evener.core.run.run_spec import TrainSpec
from evener.worker.finetune.model import FineTunedModel, build_pretrained
from evener.worker.finetune.sample_rows import SampleRows
from evener.worker.state.checkpoint import copy_weights, named_weights, read_safetensors
from evener.worker.train.contention import measure_contention
from evener.worker.train.gpt2 import is_gpt2_file, load_gpt2
from evener.worker.train.model import GPT
from evener.worker.train.optim import adamw, set_hyperparameters
from evener.worker.train.run import Run, join
from evener.worker.train.token_blocks import TokenBlocks
from evener.worker.train.train_step import TrainStep

PROGRESS_EVERY_S = 5.0


def train(resolved: ResolvedRun) -> None:
    """Run the training that `resolved` describes, from its first step or from the checkpoint it resumes."""
    spec = resolved.spec
    with join(spec, resolved) as run:
        train_set, val_set = read_corpus(resolved, "train"), read_corpus(resolved, "val")
        model = run.model(build_model(resolved, run.member.dtype, is_new=run.first_step == 0))
        optimizer = run.optimizer(adamw(model, spec.train))
        progress = RunProgress(spec.train.steps, resolved.step_size, spec.train.max_s)
        printed_at = time.monotonic()
        if spec.machine.contention:
            run.contention = measure_contention(run, model, train_set)

        def evaluate_after(num_steps: int) -> float:
            val_loss = evaluate(run, model, val_set, num_steps)
            run.print_once(f"step {num_steps}: validation loss {val_loss:.4f}")
            return val_loss

        for step in run.steps(train_set, evaluate_after):
            train_one_step(step, model, optimizer, spec.train, run.autocast)
            if step.is_eval_step:
                with step.record_between_steps("evaluation"):
                    step.val_loss = evaluate_after(step.index + 1)
            if run.last_record is not None and run.last_record.step >= progress.steps_done:
                progress.set_interval(run.roster.sync.every)
                progress.add(run.last_record)
                if time.monotonic() - printed_at > PROGRESS_EVERY_S:
                    printed_at = time.monotonic()
                    run.print_once(progress.status_line())


def train_one_step(
    step: TrainStep,
    model: nn.Module,
    optimizer: AdamW,
    train: TrainSpec,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Run one optimizer step: this rank's share of the batch, forward, backward, update."""
    set_hyperparameters(optimizer, step.index, train)
    for batch in step.micro_batches():
        with autocast():
            loss_sum = model(*batch)
        step.backward(loss_sum)
    step.update(optimizer)


def read_corpus(resolved: ResolvedRun, split: str) -> TokenBlocks | SampleRows:
    """Return the data set of a split: rows of samples for a pretrained model, else blocks of one stream of tokens."""
    train, block_size = resolved.spec.train, resolved.shape.block_size
    if resolved.corpus.is_samples:
        return SampleRows(resolved.corpus, split, block_size, train.sampling, packing=train.packing)
    return TokenBlocks(resolved.corpus, split, block_size, train.sampling)


def build_model(resolved: ResolvedRun, dtype: Dtype, *, is_new: bool) -> GPT | FineTunedModel:
    """Return the initial model: a pretrained one, random weights, or those of `--init-from` in a new run.

    `dtype` is that in which the rank computes.
    """
    spec = resolved.spec.model
    if isinstance(resolved.shape, PretrainedModel):
        assert spec.pretrained is not None
        return build_pretrained(spec.pretrained, resolved.shape, dtype, recompute=spec.recompute,
                                packing=resolved.spec.train.packing)  # fmt: skip
    model = GPT(resolved.shape, checkpoint_activations=spec.recompute)
    if spec.init_from is not None and is_new:
        path = find_weights_file(spec.init_from)
        if not is_gpt2_file(path):  # our own
            copy_weights(read_safetensors(path), named_weights(model), path)
            return model
        shape, weights = load_gpt2(path, resolved.shape.num_heads, bias=resolved.shape.bias)
        if shape != msgspec.structs.replace(resolved.shape, dropout=shape.dropout):
            difference = _describe_difference(shape, resolved.shape)
            raise UsageError(
                f"--init-from {spec.init_from}: its shape is not that of --model {spec.model}: {difference}",
                hint="--model gpt2, its block size, layers and width, and a corpus in GPT-2's tokens",
            )
        model.load_state_dict(weights)
    return model


def _describe_difference(theirs: GPTShape, ours: GPTShape) -> str:
    pairs = [
        (name, getattr(theirs, name), getattr(ours, name)) for name in theirs.__struct_fields__ if name != "dropout"
    ]
    return ", ".join(f"{name} {their} and {our}" for name, their, our in pairs if their != our)


@torch.no_grad()
def evaluate(run: Run, model: nn.Module, val_set: TokenBlocks | SampleRows, step: int) -> float:
    """Return the mean loss over evenly spaced samples of the validation split: the same ones for any number of ranks.

    Each rank evaluates its own replica on its part of them. While replicas drift, the result is therefore a mean
    over different replicas; after the last step they are one model.
    """
    began = time.perf_counter()
    samples = val_set.evenly_spaced(run.spec.eval.eval_tokens)
    work, size = run.roster.divide_work(len(samples)), run.member.micro_batch
    own_samples = np.split(samples, np.cumsum(work)[:-1])[run.rank]
    model.eval()
    loss_sum, num_tokens = 0.0, 0
    for i in range(run.roster.num_passes(run.rank, work)):
        micro_batch = own_samples[i * size : (i + 1) * size]
        batch = val_set.load(micro_batch, run.device)
        with run.autocast():
            loss_sum += float(model(*batch))
        num_tokens += val_set.num_tokens(micro_batch)
    model.train()
    mean = run.mean(loss_sum, num_tokens)
    if run.rank == 0:
        run.dir.add_event("evaluation", step=step, val_loss=mean, tokens=val_set.num_tokens(samples),
                          took_s=time.perf_counter() - began)  # fmt: skip
    return mean
