"""--for and --tokens: what a run may take, and the model, batch and steps that make the best of it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from evener.cli.on_machines import measure_this_machine
from evener.cli.run_output import print_status
from evener.core.base.errors import UsageError
from evener.core.base.shell import quote_command, quote_word
from evener.core.base.units import format_count, format_seconds, parse_duration
from evener.core.cluster.fleet_file import Fleet, HostConfig, local_fleet_path
from evener.core.model.corpus import Corpus, load_corpus
from evener.core.model.shape import GPTShape
from evener.core.run.prediction import Prediction
from evener.core.run.resolve import make_job, model_shape
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import RunDir
from evener.plan.choice.cluster import NotMeasuredError
from evener.plan.choice.options import option_throughput
from evener.plan.choice.plan_request import PlanRequest, answer_request, predict_launch
from evener.plan.choice.training_budget import (
    DEFAULT_SECONDS,
    PROBED_SIZES,
    TIME_SHARE,
    Budget,
    BudgetChoice,
    choose_for_budget,
    with_train,
)
from evener.plan.choice.training_cost import parse_tokens
from evener.report.read.run_summary import summarize_run

DEFAULT_BUDGET = Budget(text="3 min", seconds=DEFAULT_SECONDS)


def parse_budget(for_time: str | None, tokens: str | None, given_fields: Collection[str]) -> Budget | None:
    """Return the budget that the flags give, None without one. Raise UsageError if it is none, or --steps is given."""
    given = [f"{flag} {value}" for flag, value in (("--for", for_time), ("--tokens", tokens)) if value is not None]
    if not given:
        return None
    if len(given) > 1 or "steps" in given_fields:
        other = given[1] if len(given) > 1 else "--steps"
        raise UsageError(f"{given[0]}: {other} says how long the run is, too", hint="one of them")
    if tokens is not None:
        return Budget(text=f"{tokens} tokens", tokens=parse_tokens(tokens))
    assert for_time is not None
    seconds = parse_duration(for_time)
    if seconds is None:
        raise UsageError(f"--for {for_time}: expected a time", hint="30min, 8h or 2d")
    return Budget(text=for_time, seconds=seconds)


def limit_resumed(spec: RunSpec, given: Collection[str], budget: Budget | None, rundir: RunDir) -> RunSpec:
    """Return the spec of a resumed run with the time limit of --for; --steps ends the limit of an earlier start.

    A run that has taken all its steps goes on for as many as it took in such a time before. Raise UsageError for
    --tokens: model and schedule are those of the run.
    """
    if budget is None and "steps" not in given:
        return spec
    if budget is None:
        return with_train(spec, max_s=None)
    if budget.seconds is None:
        raise UsageError(f"--tokens {budget.text.split()[0]}: a run that is resumed has its steps", hint="--steps N")
    done, step_s = rundir.newest_checkpoint_step(), summarize_run(rundir).step_p50_s
    more = int(TIME_SHARE * budget.seconds / step_s) if step_s else 0
    steps = max(done + more, spec.train.steps) if done >= spec.train.steps else spec.train.steps
    return with_train(spec, max_s=budget.seconds, steps=steps)


def models_to_measure(spec: RunSpec, given: Collection[str]) -> tuple[str, ...]:
    """Return the presets whose rates must be known: of the model that is given, or of a few sizes to choose from; none
    for a pretrained model.
    """
    if spec.model.pretrained is not None:
        return ()
    return (spec.model.model,) if {"model", "steps"} & set(given) else PROBED_SIZES


def spec_for_budget(
    spec: RunSpec, given: Collection[str], budget: Budget | None, fleet: Fleet | None, *, is_dry: bool
) -> RunSpec:
    """Return the spec with the model, batch and steps that fit the budget best, and print them.

    Without a budget a spec that says how long the run is stays as it is, and another one gets DEFAULT_BUDGET; that is
    of no use on hosts that nobody measured: then the spec stays as it is, too. `fleet` are the hosts that will train;
    None: this machine, which is measured where it was not before. A dry run measures nothing.
    """
    is_default = budget is None
    if is_default and set(given) & {"steps", "max_s"}:
        return spec
    budget = budget or DEFAULT_BUDGET
    corpus = load_corpus(spec.data.data)
    try:
        if fleet is None and budget.seconds is not None:
            fleet = this_machine(spec, given, is_dry=is_dry)
        throughput = None if fleet is None else Throughputs(fleet, corpus)
        choice = choose_for_budget(spec, given, corpus, budget, throughput)
    except NotMeasuredError as error:
        if not is_default and "probe host" not in error.hint:  # it is a link that was not measured
            raise
        if not is_default:
            flag, models = "" if fleet is None else fleet.cli_flag, ",".join(models_to_measure(spec, given))
            hint = f"evener probe host{flag} --model {quote_word(models)}"
            raise NotMeasuredError(str(error), hint=hint) from None
        print_status(
            f"{spec.train.steps} steps of {spec.model.model}, as {error}; {error.hint}, and then --for decides"
        )
        return spec
    print_status(describe_choice(choice, budget, is_default=is_default))
    if {"model", "batch"} - set(given):
        print_status(f"by hand: {quote_command(choice_flags(choice, given))}; each flag that is given stays as it is")
    return choice.spec


def request_for_budget(
    make_request: Callable[[RunSpec], PlanRequest], spec: RunSpec, given: Collection[str], corpus: Corpus | None,
    budget: Budget,
) -> PlanRequest:  # fmt: skip
    """Return `plan`'s request with the model, batch and steps that fit a budget best, and a sentence on them."""

    def throughput(candidate: RunSpec) -> float:
        prediction = _prediction(lambda: answer_request(make_request(candidate)))
        return 0.0 if prediction is None else option_throughput(prediction.option(prediction.recommended))

    def shape(candidate: RunSpec) -> GPTShape:
        return make_request(candidate).job.gpt_shape

    choice = choose_for_budget(spec, given, corpus, budget, throughput, shape)
    request = make_request(choice.spec)
    planned = msgspec.structs.replace(request.job.spec, train=choice.spec.train)
    request = msgspec.structs.replace(request, job=msgspec.structs.replace(request.job, spec=planned))
    if budget.seconds is None:
        return request
    return msgspec.structs.replace(request, budget=describe_choice(choice, budget, is_default=False))


class Throughputs:
    """The tokens/s that a spec is predicted to train with on these hosts."""

    def __init__(self, fleet: Fleet, corpus: Corpus | None) -> None:
        self._fleet, self._corpus = fleet, corpus

    def __call__(self, spec: RunSpec) -> float:
        """Predict a run of this spec, with what `train` would do on these hosts; 0 if it cannot run there."""
        shape = model_shape(spec, self._corpus.vocab_size if self._corpus else None)
        prediction = _prediction(lambda: predict_launch(self._fleet, make_job(spec, shape, self._corpus)))
        return 0.0 if prediction is None else option_throughput(prediction.option(prediction.chosen))


def _prediction(predict: Callable[[], Prediction]) -> Prediction | None:
    """Return a prediction; None if nothing fits into memory, or the batch is too small for the ranks."""
    try:
        prediction = predict()
    except NotMeasuredError:
        raise
    except UsageError:
        return None
    return prediction if prediction.recommended else None


def describe_choice(choice: BudgetChoice, budget: Budget, *, is_default: bool) -> str:
    """Return a sentence on what becomes of the budget."""
    spec, block = choice.spec, choice.shape.block_size
    which = f"{budget.text} (--for 1h: another time)" if is_default else budget.text
    words = [
        f"{which}: {spec.model.model}, {format_count(choice.shape.num_params())} parameters",
        f"{spec.train.steps:,} steps of {spec.train.batch} × {block} tokens",
    ]
    if choice.epochs is not None:
        words.append(f"{choice.epochs:.2g} times the text")
    if choice.tokens_per_s is not None:
        took_s = choice.tokens / choice.tokens_per_s
        words.append(f"about {format_seconds(took_s)} at {format_count(choice.tokens_per_s)} tokens/s")
    text = ", ".join(words)
    if choice.ends_early:
        text += "; to read the text more often would teach it nothing more"
    return text


def choice_flags(choice: BudgetChoice, given: Collection[str]) -> list[str]:
    """Return the flags that choose the same by hand."""
    spec = choice.spec
    flags = {"model": spec.model.model, "batch": spec.train.batch, "steps": spec.train.steps}
    if spec.model.dropout is not None and "dropout" not in given:
        flags["dropout"] = spec.model.dropout
    return [f"--{name}={value}" for name, value in flags.items() if name not in given]


def this_machine(spec: RunSpec, given: Collection[str], *, is_dry: bool) -> Fleet:
    """Return this machine with as many ranks as the spec has, and its measured rates."""
    if is_dry and not local_fleet_path().exists():
        raise NotMeasuredError("this machine is not measured yet", hint="without --dry-run it is measured")
    pretrained = spec.model if spec.model.pretrained is not None else None
    known = measure_this_machine(models_to_measure(spec, given), pretrained=pretrained, is_dry=is_dry)
    ((name, _),) = known.hosts.items()
    host = HostConfig(address="local", ranks=spec.machine.ranks, threads=spec.machine.threads)
    return msgspec.structs.replace(known, hosts={name: host})
