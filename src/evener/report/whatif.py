"""Predict other set-ups from a run's records, as `evener plan --from` does."""

from __future__ import annotations

from dataclasses import dataclass

from evener.core.errors import UsageError
from evener.core.prediction import Option, Prediction
from evener.core.rundir import RunDir
from evener.core.units import count, seconds
from evener.plan.question import answer, of_run
from evener.plan.search import what_if
from evener.report.summary import Summary

HEAD = ("what if", "step", "tokens/s", "times this run", "loss")


@dataclass(frozen=True)
class Again:
    """A run, and the planner's predictions for other set-ups."""

    own: Option  # the set-up of the run, as measured
    prediction: Prediction

    @property
    def alone(self) -> Option | None:
        """The fastest single host that can hold the model; None if the run has only one host."""
        if len(self.own.roster.hosts) == 1:
            return None
        return next((option for option in self.prediction.options if len(option.roster.hosts) == 1), None)


def asked_again(summary: Summary) -> Again | None:
    """Predict other set-ups for a run; None if its records do not suffice (no step, a user's model, an idle host)."""
    rundir, manifest = RunDir(summary.run_dir), summary.manifest
    records = [rundir.records(member.rank) for member in manifest.roster.members]
    try:
        question = of_run(summary.run_dir, manifest, records, summary.prediction)
    except UsageError:
        return None
    return None if question.measured is None else Again(question.measured, answer(question))


def what_if_rows(again: Again) -> list[list[str]]:
    """Return this run's row, then one per other set-up, with tokens/s relative to this run."""
    as_measured, prediction = again.own, again.prediction
    others = what_if(prediction)
    named = {option.name: option for option in (prediction.option(prediction.chosen), *others)}
    named.pop(as_measured.name, None)
    return [_row(option, as_measured) for option in (as_measured, *named.values())] if others else []


def _row(option: Option, as_measured: Option) -> list[str]:
    name = f"this run: {option.name}" if option is as_measured else option.name
    return [
        name + ("" if option.is_built else ", not built yet"),
        seconds(option.step_s),
        count(option.tokens_per_s),
        f"{option.tokens_per_s / as_measured.tokens_per_s:.2f}",
        _loss(option, as_measured),
    ]


def _loss(option: Option, as_measured: Option) -> str:
    if option.roster.batch != as_measured.roster.batch:
        return "another training run"
    if option.loss_penalty is None:
        return "not measured"
    return "the same" if option.is_exact else f"{100 * option.loss_penalty:+.1f}%".replace("-", "−")
