"""--epochs: how long a fine-tuning is, by the samples that it reads."""

from __future__ import annotations

import math
from collections.abc import Collection

from evener.cli.run_output import print_status
from evener.core.base.errors import UsageError
from evener.core.run.resolve import ResolvedRun
from evener.core.run.run_spec import RunSpec
from evener.corpus.samples import read_samples, rows_of
from evener.plan.choice.training_budget import Budget, with_train

DEFAULT_EPOCHS = 1  # torchtune's recipes for LoRA (llama3_2/1B_lora_single_device.yaml); transformers' default is 3


def check_epochs(spec: RunSpec, epochs: float | None, *, is_resumed: bool) -> None:
    """Raise UsageError for --epochs of a run that they do not determine."""
    if epochs is not None and (is_resumed or spec.model.pretrained is None):
        why = "a run that is resumed has its steps" if is_resumed else "only for --model hf:FOLDER"
        raise UsageError(f"--epochs {epochs:g}: {why}", hint="--steps N")


def spec_for_epochs(
    resolved: ResolvedRun, given: Collection[str], budget: Budget | None, epochs: float | None
) -> RunSpec:
    """Return the spec of a fine-tuning with the steps of so many epochs, one by default; --steps stays as it is.

    Raise UsageError for --for and --tokens.
    """
    spec = resolved.spec
    if budget is not None:
        raise UsageError(
            f"{budget.text}: how fast {spec.model.name} is, only a run of it shows", hint="--epochs N, or --steps N"
        )
    if "steps" in given:
        if epochs is not None:
            raise UsageError(f"--epochs {epochs:g}: --steps says how long the run is, too", hint="one of them")
        return spec
    block_size = resolved.shape.block_size
    table = read_samples(resolved.corpus, "train", block_size)
    num_rows = len(rows_of(table, block_size, packing=spec.train.packing))
    steps = max(1, math.ceil(num_rows * (DEFAULT_EPOCHS if epochs is None else epochs) / spec.train.batch))
    print_status(f"{steps:,} steps of {spec.train.batch} sequences (--epochs, --batch)")
    return with_train(spec, steps=steps)
