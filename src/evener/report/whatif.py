"""What would another set-up have brought? The planner says it to a run's records, as `evener plan --from` does."""

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
    """A run among the ways in which it might have been done."""

    own: Option  # as it was measured
    prediction: Prediction

    @property
    def alone(self) -> Option | None:
        """The fastest host by itself that can hold the model; None where there is but one host."""
        if len(self.own.roster.hosts) == 1:
            return None
        return next((option for option in self.prediction.options if len(option.roster.hosts) == 1), None)


def asked_again(summary: Summary) -> Again | None:
    """None where the records say too little: no step, a model of the user's own, a host that had no share."""
    rundir, manifest = RunDir(summary.run_dir), summary.manifest
    records = [rundir.records(member.rank) for member in manifest.roster.members]
    try:
        asked = of_run(summary.run_dir, manifest, records, summary.prediction)
    except UsageError:
        return None
    return None if asked.measured is None else Again(asked.measured, answer(asked))


def what_if_rows(again: Again) -> list[list[str]]:
    """This run first, then each other set-up with its ratio to it in tokens/s."""
    own, prediction = again.own, again.prediction
    others = what_if(prediction)
    named = {option.name: option for option in (prediction.option(prediction.chosen), *others)}
    named.pop(own.name, None)
    return [_row(option, own) for option in (own, *named.values())] if others else []


def _row(option: Option, own: Option) -> list[str]:
    name = f"this run: {option.name}" if option is own else option.name
    return [
        name + ("" if option.is_built else ", not built yet"),
        seconds(option.step_s),
        count(option.tokens_per_s),
        f"{option.tokens_per_s / own.tokens_per_s:.2f}",
        _loss(option, own),
    ]


def _loss(option: Option, own: Option) -> str:
    if option.roster.batch != own.roster.batch:
        return "another training run"
    if option.loss_penalty is None:
        return "not measured"
    return "the same" if option.is_exact else f"{100 * option.loss_penalty:+.1f}%".replace("-", "−")
