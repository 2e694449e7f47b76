"""--epochs, --for and --tokens of a fine-tuning: how many steps it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import msgspec

from evener.cli.budget import this_machine
from evener.core.base.errors import UsageError
from evener.core.base.units import format_seconds, pluralize
from evener.core.cluster.fleet_file import Fleet
from evener.core.model.corpus import Corpus
from evener.core.model.fine_tuning import FineTuning
from evener.core.run.prediction import Job
from evener.core.run.resolve import ResolvedRun
from evener.core.run.run_spec import RunSpec
from evener.plan.choice.plan_request import PlanRequest, answer_request, predict_launch
from evener.plan.choice.training_budget import TIME_SHARE, Budget, with_train

DEFAULT_EPOCHS = 1.0  # torchtune's recipes for LoRA (llama3_2/1B_lora_single_device.yaml); transformers' default is 3


def check_epochs(spec: RunSpec, epochs: float | None, *, is_resumed: bool) -> None:
    """Raise UsageError for --epochs of a run that they do not determine."""
    if epochs is not None and (is_resumed or spec.model.pretrained is None):
        why = "a run that is resumed has its steps" if is_resumed else "only for --model hf:FOLDER"
        raise UsageError(f"--epochs {epochs:g}: {why}", hint="--steps N")


def spec_for_epochs(
    resolved: ResolvedRun, given: Collection[str], budget: Budget | None, epochs: float | None, fleet: Fleet | None,
    *, is_dry: bool,
) -> tuple[RunSpec, str]:  # fmt: skip
    """Return the spec of a fine-tuning as `train` runs it, with its number of steps, and a sentence on that.

    `fleet` are the hosts that will train; None: this machine, which a budget of time has measured first.
    """
    job = resolved.job

    def step_s() -> float:
        hosts = this_machine(resolved.spec, given, is_dry=is_dry) if fleet is None else fleet
        prediction = predict_launch(hosts, job)
        return prediction.option(prediction.chosen).step_s

    return _with_steps(job, resolved.corpus, given, budget, epochs, step_s)


def request_for_epochs(
    request: PlanRequest, corpus: Corpus, given: Collection[str], budget: Budget | None, epochs: float | None
) -> PlanRequest:
    """Return `plan`'s request with the number of steps that `train` would take, and a sentence on that."""

    def step_s() -> float:
        prediction = answer_request(request)
        return prediction.option(prediction.chosen).step_s

    spec, text = _with_steps(request.job, corpus, given, budget, epochs, step_s)
    return msgspec.structs.replace(request, job=msgspec.structs.replace(request.job, spec=spec), budget=text)


def _with_steps(
    job: Job, corpus: Corpus, given: Collection[str], budget: Budget | None, epochs: float | None,
    step_s: Callable[[], float],
) -> tuple[RunSpec, str]:  # fmt: skip
    """Return the spec with the steps of so many epochs, one by default, or as many as the budget allows; --steps stays.

    A budget of time takes at most the epochs, and ends the run. Raise UsageError for two lengths, or if no step fits.
    """
    from evener.corpus.samples import read_samples, rows_of  # numpy, which other plans do not need

    spec = job.spec
    assert isinstance(job.shape, FineTuning)
    if "steps" in given or (budget is not None and budget.tokens is not None):
        what = f"--tokens {budget.text.split()[0]}" if budget is not None else "--steps"
        if epochs is not None:
            raise UsageError(f"--epochs {epochs:g}: {what} says how long the run is, too", hint="one of them")
        if budget is None or budget.tokens is None:
            return spec, ""
        steps = math.ceil(budget.tokens / job.tokens)
        return with_train(spec, steps=steps), f"{steps:,} steps of about {job.tokens:,} tokens that carry loss"
    table = read_samples(corpus, "train", job.shape.model.block_size)
    num_rows = len(rows_of(table, job.shape.model.block_size, packing=spec.train.packing))
    wanted = DEFAULT_EPOCHS if epochs is None else epochs
    steps = max(1, math.ceil(num_rows * wanted / spec.train.batch))
    batch = pluralize(spec.train.batch, "sequence")
    if budget is None:
        return with_train(spec, steps=steps), f"{steps:,} steps of {batch} (--epochs, --batch)"
    assert budget.seconds is not None
    one_step_s = step_s()
    possible = int(TIME_SHARE * budget.seconds / one_step_s)
    if not possible:
        raise UsageError(f"{budget.text}: too little: one step of {batch} takes {format_seconds(one_step_s)}",
                         hint="a longer time, or a smaller --batch")  # fmt: skip
    whole = "one epoch" if wanted == 1 else f"{wanted:g} epochs"
    took = format_seconds(one_step_s * steps)
    if steps <= possible:
        need = "needs" if wanted == 1 else "need"
        text = f"{whole} {need} about {took} of the {budget.text}: {steps:,} steps of {batch}"
    else:
        part, steps = possible * spec.train.batch / num_rows, possible
        take = "takes" if wanted == 1 else "take"
        text = f"{whole} {take} about {took}; {budget.text} end after {part:.2g} epochs: {steps:,} steps of {batch}"
    return with_train(spec, steps=steps, max_s=budget.seconds), text
