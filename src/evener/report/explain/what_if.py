"""Predict other set-ups from a run's records, as `evener plan --from` does."""

from __future__ import annotations

from dataclasses import dataclass

from evener.core.base.errors import UsageError
from evener.core.base.units import format_count, format_seconds
from evener.core.run.prediction import PlanOption, Prediction
from evener.core.run.run_plan import fleet_of_run
from evener.core.run.rundir import RunDir
from evener.plan.choice.advice import format_loss_change
from evener.plan.choice.plan_request import answer_request, request_from_run
from evener.plan.choice.search import what_if_options
from evener.report.read.run_summary import RunSummary


@dataclass(frozen=True)
class RunAlternatives:
    """A run, and the planner's predictions for other set-ups."""

    as_measured: PlanOption  # the set-up of the run, as measured
    prediction: Prediction

    @property
    def best_single_host(self) -> PlanOption | None:
        """The fastest single host that can hold the model; None if the run has only one host."""
        if len(self.as_measured.roster.hosts) == 1:
            return None
        return next((option for option in self.prediction.options if len(option.roster.hosts) == 1), None)


def predict_alternatives(summary: RunSummary) -> RunAlternatives | None:
    """Predict other set-ups for a run; None if its records do not suffice: no step, unknown layers, an idle host."""
    rundir, manifest = RunDir(summary.run_dir), summary.manifest
    records = [rundir.records(member.rank) for member in manifest.roster.members]
    try:
        fleet = fleet_of_run(rundir, manifest.roster.hosts)
        question = request_from_run(summary.run_dir, manifest, records, summary.prediction, fleet)
    except UsageError:
        return None
    return None if question.measured is None else RunAlternatives(question.measured, answer_request(question))


def what_if_columns(alternatives: RunAlternatives) -> list[str]:
    """Return the titles of `what_if_rows`."""
    return ["what if", "step", f"{alternatives.prediction.job.unit}/s", "times this run", "loss"]


def what_if_rows(alternatives: RunAlternatives) -> list[list[str]]:
    """Return this run's row, then one per other set-up, with tokens/s relative to this run."""
    as_measured, prediction = alternatives.as_measured, alternatives.prediction
    others = what_if_options(prediction)
    named = {option.name: option for option in (prediction.option(prediction.chosen), *others)}
    named.pop(as_measured.name, None)
    return [_what_if_row(option, as_measured) for option in (as_measured, *named.values())] if others else []


def _what_if_row(option: PlanOption, as_measured: PlanOption) -> list[str]:
    name = f"this run: {option.name}" if option is as_measured else option.name
    return [
        name,
        format_seconds(option.step_s),
        format_count(option.tokens_per_s),
        f"{option.tokens_per_s / as_measured.tokens_per_s:.2f}",
        _loss_cell(option, as_measured),
    ]


def _loss_cell(option: PlanOption, as_measured: PlanOption) -> str:
    if option.roster.batch != as_measured.roster.batch:
        return "another training run"
    if option.loss_penalty is None:
        return "not measured"
    return "the same" if option.is_exact else format_loss_change(option)
