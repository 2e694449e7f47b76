"""Load the request of `plan` from files and flags, and print its prediction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from evener.cli.terminal import make_console, print_table, print_text
from evener.core.base.errors import UsageError
from evener.core.base.units import format_bytes, format_count, format_seconds, pluralize
from evener.core.cluster.fleet_file import fleet_path, load_fleet, local_fleet_path, select_hosts
from evener.core.cluster.fleet_update import update_fleet_file
from evener.core.model.fine_tuning import FineTuning
from evener.core.model.gradients import ProgramModel
from evener.core.run.prediction import PlanOption, Prediction
from evener.core.run.roster import DDP, format_shares
from evener.core.run.run_spec import RunSpec
from evener.plan.choice import plan_request
from evener.plan.choice.advice import collect_advice, format_loss_change, option_above_budget
from evener.plan.choice.break_even import Advice, Fabric, LinkSearch, best_single_host, with_bf16_gradients
from evener.plan.choice.plan_request import PlanRequest, with_assumptions
from evener.plan.choice.program_request import advise_on_launch
from evener.plan.choice.training_cost import TrainingCost, estimate_training_cost, parse_offers, total_tokens

if TYPE_CHECKING:
    from rich.console import Console

    from evener.core.model.corpus import Corpus

LEGEND = (
    "exposed: communication not hidden by computation. ×: speedup over the fastest host alone. sends: bytes of a rank "
    "per step. loss: change of training or validation loss, the larger one, compared with ddp: a 90 % interval; ?: not "
    "measured."
)
MAX_LISTED_HOSTS = 16  # listed one by one


# --- the request ------------------------------------------------------------------------------------------------------


def load_fleet_request(sources: Mapping[str, Any], spec: RunSpec, names_data: bool) -> PlanRequest:
    """Make a request about the hosts of a fleet file and their measured rates."""
    path = fleet_path(sources["fleet"])
    if path is None and sources["fleet"] is None and local_fleet_path().exists():
        path = str(local_fleet_path())
    if path is None:
        raise UsageError(
            "no fleet.toml here, and no --fleet",
            hint="or without machines: --nodes 2 --link 1GbE --compute-tokens-per-s 500",
        )
    corpus = find_corpus(spec)
    fleet = select_hosts(load_fleet(path), sources["hosts"])
    request = plan_request.request_from_fleet(fleet, spec, corpus, sources["link"], path, sources["params"])
    return with_assumed_vocabulary(request) if corpus is None and names_data else request


def make_machines_request(
    machines: Mapping[str, Any], sources: Mapping[str, Any], spec: RunSpec, names_data: bool
) -> PlanRequest:
    """Make a request about hypothetical machines that flags describe."""
    corpus = find_corpus(spec) if names_data else None
    words = plan_request.MachineFlags(**{**machines, "per_node": machines["per_node"] or 1}, link=sources["link"])
    request = plan_request.request_on_hosts(
        plan_request.request_from_flags(words, spec, corpus, sources["params"]), sources["hosts"]
    )
    return with_assumed_vocabulary(request) if corpus is None and names_data else request


def with_assumed_vocabulary(request: PlanRequest) -> PlanRequest:
    """Add to the request the assumption that replaces a missing corpus."""
    spec = request.job.spec
    assumption = f"{spec.data.data} is not here: the vocabulary is {spec.model.model}'s default"
    return msgspec.structs.replace(request, cluster=with_assumptions(request.cluster, [assumption]))


def load_run_request(run: str, texts: dict[str, str], link: str | None, fleet: str | None) -> PlanRequest:
    """Make a request from a run's records and the flags; with `fleet`, write the run's rates to that file."""
    from evener.core.run.run_plan import fleet_of_run, read_prediction
    from evener.core.run.rundir import RunDir

    rundir = RunDir(run)
    manifest = rundir.manifest()
    records = [rundir.records(member.rank) for member in manifest.roster.members]
    known = read_prediction(rundir)
    request = plan_request.request_from_run(run, manifest, records, known, fleet_of_run(rundir, manifest.roster.hosts))
    if fleet is not None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        rates, links = plan_request.calibrated_rates(request, load_fleet(fleet), fleet, measured_at=now)
        update_fleet_file(fleet, rates=rates, links=links)
        change = f"written to [rates] and [links] of {fleet}"
        request = msgspec.structs.replace(request, changes=[*request.changes, change])
    return plan_request.change_request(request, texts, link)


def find_corpus(spec: RunSpec) -> Corpus | None:
    """Load the corpus of a spec; None if it is not on this machine."""
    from evener.core.model.corpus import load_corpus

    path = Path(spec.data.data)
    return load_corpus(path) if path.exists() else None


# --- the prediction ---------------------------------------------------------------------------------------------------


class PlanExtras(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what `plan` prints in addition to the prediction."""

    links: list[Fabric]  # predictions for other links
    advice: list[Advice]
    bills: list[TrainingCost]


def compute_extras(prediction: Prediction, request: PlanRequest, tokens: str | None, price_per_kwh: float | None,
           rent: str | None) -> PlanExtras:  # fmt: skip
    """Compute predictions for other links, advice, and the cost of training the given number of tokens."""
    if isinstance(prediction.job.shape, ProgramModel):  # only it knows how long it trains
        advice = [*collect_advice(prediction), *advise_on_launch(prediction)]
        return PlanExtras(links=[], advice=advice, bills=[])
    links = LinkSearch(prediction.job, prediction.cluster) if len(prediction.cluster.host_names) > 1 else None
    bills = _compute_bills(prediction, request, tokens, price_per_kwh, rent)
    return PlanExtras(links=links.fabrics if links else [], advice=collect_advice(prediction, links), bills=bills)


def plan_to_dict(prediction: Prediction, request: PlanRequest, extras: PlanExtras) -> dict[str, Any]:
    """Return the JSON object of --json."""
    options = [
        msgspec.to_builtins(option)
        | {
            "sync": str(option.roster.sync),
            "hosts": option.roster.hosts,
            "cost": msgspec.to_builtins(option.straggler_cost.cost),
        }
        for option in prediction.options
    ]
    result = {
        "verdict": prediction.verdict,
        "recommended": prediction.recommended,
        "chosen": prediction.chosen,
        "options": options,
        "bills": msgspec.to_builtins(extras.bills),
        "advice": msgspec.to_builtins(extras.advice),
        "assumed": prediction.cluster.assumptions,
        "source": request.source,
        "job": msgspec.to_builtins(prediction.job),
        "cluster": msgspec.to_builtins(prediction.cluster),
    }
    if request.wants_fabrics:
        result["fabrics"] = [
            {"link": one.link, "payload_Bps": one.payload_Bps, "hosts": one.best.roster.hosts,
             "all_reduce_s": one.best.ranks[0].sync_s, "step_s": one.best.step_s, "tokens_per_s": one.best.tokens_per_s,
             "bf16_all_reduce_s": with_bf16_gradients(prediction.job, prediction.cluster, one).ranks[0].sync_s}
            for one in extras.links
        ]  # fmt: skip
    return result


def _compute_bills(prediction: Prediction, request: PlanRequest, tokens: str | None, price_per_kwh: float | None,
              rent: str | None) -> list[TrainingCost]:  # fmt: skip
    """Return time and cost of the recommended option, of the fastest host alone, and of rented machines."""
    spec, offers = prediction.job.spec, parse_offers(rent) if rent is not None else []
    until = total_tokens(spec, prediction.job, tokens)
    price = request.price_per_kwh if price_per_kwh is None else price_per_kwh
    bills = []
    if prediction.recommended:
        best = prediction.option(prediction.recommended)
        bills.append(estimate_training_cost(best, prediction.cluster, until, price))
        alone = best_single_host(prediction.job, prediction.cluster)
        if alone is not None and len(best.roster.hosts) > 1:
            bills.append(estimate_training_cost(alone, prediction.cluster, until, price))
    for offer in offers:
        where = f"rented: {offer}"
        try:
            answered = plan_request.answer_request(plan_request.request_for_rental(request, offer))
            why_not = "" if answered.recommended else answered.option(answered.chosen).rejected_because
        except UsageError as error:
            why_not = f"{error}"
        if why_not:
            bills.append(
                TrainingCost(
                    where=where,
                    tokens=until,
                    tokens_per_s=0.0,
                    hours=None,
                    spread=0.0,
                    kwh=None,
                    money=None,
                    why_not=why_not,
                )
            )
        else:
            option = answered.option(answered.recommended)
            bills.append(estimate_training_cost(option, answered.cluster, until, None, where=where))
    return bills


def print_plan(prediction: Prediction, request: PlanRequest, extras: PlanExtras, *, is_long: bool) -> None:
    """Print the verdict, the options that it is about, the time that training takes, and advice.

    `is_long`: also all other options, where a step's time goes on each host, other links, and what was assumed.
    """
    screen = make_console()
    job, roster = prediction.job, prediction.option(prediction.chosen).roster
    print_text(screen, prediction.verdict, style="bold")
    if request.budget:
        print_text(screen, request.budget)
    parameters = f"{format_count(job.shape.num_params())} parameters"
    batch = f"{pluralize(roster.batch, 'sequence')} of {job.shape.block_size} tokens"
    if isinstance(job.shape, ProgramModel):
        batch = f"{roster.batch:,} {job.unit}"
    elif isinstance(job.shape, FineTuning):
        batch = (
            f"{pluralize(roster.batch, 'sequence')} of about {job.shape.lengths.of_micro_batch(1).tokens:.0f} tokens"
        )
        batch += f", of which {job.shape.block_size:.0f} carry loss and count,"
        if frozen := job.shape.model.num_frozen:
            parameters += f" trained, {format_count(frozen)} frozen"
    what = f"{job.model}: {parameters}, {batch} a step, {roster.dtypes_text}; figures from {request.source}"
    print_text(screen, what, style="dim")
    screen.print()
    if is_long:
        _print_details(screen, prediction, extras.links if request.wants_fabrics else [])
    else:
        _print_options(screen, compared_options(prediction), job.unit)
    screen.print()
    _print_bills(screen, extras.bills)
    for advice in extras.advice:
        print_text(screen, advice.text)
    for line in request.changes:
        print_text(screen, f"refitted: {line}")
    assumed = prediction.cluster.assumptions
    if not is_long:
        also = f", and {pluralize(len(assumed), 'assumption')}" if assumed else ""
        print_text(screen, f"--all shows all strategies, each host, other links{also}.", style="dim")
    elif assumed:
        screen.print()
        print_text(screen, "assumed, not measured:", style="dim")
        for line in assumed:
            print_text(screen, line, indent=2, style="dim")


def _print_details(screen: Console, prediction: Prediction, links: Sequence[Fabric]) -> None:
    """Print all options side by side, where a step's time goes on each host, and the same over other links."""
    _print_step_times(screen, prediction)
    screen.print()
    _print_trade_offs(screen, prediction)
    print_text(screen, LEGEND, style="dim")
    if 1 < len(prediction.option(prediction.chosen).roster.hosts) <= MAX_LISTED_HOSTS:
        screen.print()
        _print_hosts(screen, prediction)
    if links:
        screen.print()
        _print_fabrics(screen, prediction, links)


def compared_options(prediction: Prediction) -> list[PlanOption]:
    """Return the options that a verdict is about: the recommended one, the requested one, plain ddp on all hosts, the
    fastest host alone, and the fastest one that loses too much.
    """
    alone = best_single_host(prediction.job, prediction.cluster)
    chosen = prediction.option(prediction.chosen)
    plain = "" if chosen.roster.sync == DDP else str(DDP)
    names = [prediction.recommended, chosen.name, plain, alone.name if alone else ""]
    if faster := option_above_budget(prediction):
        names.append(faster.name)
    by_name = {option.name: option for option in prediction.options}
    return [by_name[name] for name in dict.fromkeys(names) if name in by_name]


def _print_options(screen: Console, options: Sequence[PlanOption], unit: str) -> None:
    """Print a row an option, the recommended one first."""
    rows = [
        [
            option.name,
            _format_seconds(option.step_s),
            _format_rate(option.tokens_per_s),
            f"{option.speedup_vs_best_host:.2f}" if option.speedup_vs_best_host else "–",
            format_loss_change(option),
        ]
        for option in options
    ]
    titles = ("strategy", "step", f"{unit}/s", "×", "loss")
    print_table(screen, titles, rows, droppable=("step",), bold_row=0 if not options[0].rejected_because else None)


def _print_bills(screen: Console, bills: Sequence[TrainingCost]) -> None:
    """Print how long the training takes and what it costs."""
    if not bills:
        return
    if len(bills) == 1 and bills[0].money is None and bills[0].kwh is None:
        one = bills[0]
        print_text(
            screen,
            f"{format_count(one.tokens)} tokens take {format_seconds(3600 * (one.hours or 0.0))} ± {one.spread:.0%}.",
        )
        return
    rows = [
        [
            one.where,
            "–" if one.hours is None else _format_rate(one.tokens_per_s),
            "cannot" if one.hours is None else format_seconds(3600 * one.hours),
            "–" if one.hours is None else f"± {one.spread:.0%}",
            "?" if one.kwh is None else f"{one.kwh:.3g}",
            "?" if one.money is None else f"{one.money:,.2f}",
        ]
        for one in bills
    ]
    until = format_count(bills[0].tokens)
    print_text(screen, f"to train {until} tokens; ?: watts or price not given", style="dim")
    print_table(screen, ("where", "tokens/s", "time", "", "kWh", "money"), rows, droppable=("tokens/s",))
    for one in bills:
        if one.why_not:
            print_text(screen, f"{one.where}: {one.why_not}")
    screen.print()


def _format_seconds(value: float | None) -> str:
    """Format seconds for a narrow column.

    >>> (_format_seconds(0.0), _format_seconds(0.0125), _format_seconds(18.79), _format_seconds(86.4),
    ...  _format_seconds(None))
    ('–', '12.5 ms', '18.8 s', '86.4 s', '?')
    >>> _format_seconds(18.0), _format_seconds(252.4)
    ('18.0 s', '252 s')
    """
    if value is None:
        return "?"
    if value < 5e-7:
        return "–"
    return format_seconds(value) if value < 0.9995 or value >= 600 else f"{value:#.3g} s".replace(". ", " ")


def _format_rate(tokens_per_s: float) -> str:
    """Format tokens/s with three digits, so that similar rates can be distinguished.

    >>> _format_rate(57.04), _format_rate(466.2), _format_rate(1617.0), _format_rate(566_900_000.0)
    ('57.0', '466', '1.62k', '567M')
    """
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens_per_s >= 0.9995 * factor:
            return f"{tokens_per_s / factor:#.3g}".rstrip(".") + prefix
    return f"{tokens_per_s:#.3g}".rstrip(".")


def _sorted_options(prediction: Prediction) -> list[PlanOption]:
    """Sort options: the recommended one, then the others, fastest first."""
    return sorted(prediction.options, key=lambda option: (option.name != prediction.recommended, -option.tokens_per_s))


def _print_step_times(screen: Console, prediction: Prediction) -> None:
    """Print the step time of each option and its parts on the slowest rank, which never waits."""
    rows = []
    for option in _sorted_options(prediction):
        cost = option.straggler_cost.cost
        rows.append([
            option.name,
            *map(_format_seconds, (option.step_s, cost.compute_s, cost.exposed_sync_s, cost.optimizer_s)),
            _format_rate(option.tokens_per_s),
            f"{option.speedup_vs_best_host:.2f}" if option.speedup_vs_best_host else "–",
        ])  # fmt: skip
    titles = ("strategy", "step", "compute", "exposed", "update", f"{prediction.job.unit}/s", "×")
    print_table(
        screen, titles, rows, droppable=("update", "compute", "exposed"), bold_row=0 if prediction.recommended else None
    )


def _print_hosts(screen: Console, prediction: Prediction) -> None:
    """Print the chosen option per host, by the last rank of each host: ranks of a host are equal."""
    option = prediction.option(prediction.chosen)
    known = {name: host.bound_by for name, host in prediction.cluster.hosts.items() if host.bound_by}
    rows = []
    for member in {member.host: member for member in option.roster.members}.values():
        rank = option.ranks[member.rank]
        cost = rank.cost
        parts = (cost.compute_s, cost.exposed_sync_s, cost.wait_s, cost.optimizer_s)
        bound = [known.get(member.host, "?")] if known else []
        rows.append([
            member.host,
            format_shares([option.roster.mean_shares[member.rank]]),
            *map(_format_seconds, parts),
            format_bytes(rank.memory_bytes or 0),
            *bound,
        ])  # fmt: skip
    counted = prediction.job.unit if isinstance(prediction.job.shape, ProgramModel) else "sequences"
    titles = ["host", counted, "compute", "exposed", "wait", "update", "memory", *(["bound by"] if known else [])]
    print_text(screen, f"each host, with {option.name}:", style="dim")
    print_table(screen, titles, rows, droppable=("bound by", "update", "memory") if known else ("update", "memory"))


def _print_trade_offs(screen: Console, prediction: Prediction) -> None:
    """Print bytes, memory and loss of each option, and why it is not recommended."""
    rows = [
        [
            option.name,
            format_bytes(option.bytes_per_rank) if option.bytes_per_rank else "–",
            format_bytes(max(rank.memory_bytes or 0 for rank in option.ranks)),
            format_loss_change(option),
            option.rejected_because or "← recommended",
        ]
        for option in _sorted_options(prediction)
    ]
    titles = ("strategy", "sends", "memory", "loss", "why not")
    print_table(
        screen,
        titles,
        rows,
        wrap_last=True,
        droppable=("memory", "sends"),
        bold_row=0 if prediction.recommended else None,
    )


def _print_fabrics(screen: Console, prediction: Prediction, links: Sequence[Fabric]) -> None:
    """Print the best multi-host option over faster and slower links, and its speedup over the best host alone."""
    alone = best_single_host(prediction.job, prediction.cluster)
    rows = []
    for one in links:
        best = one.best
        sync_s, compute_s = best.ranks[0].sync_s, best.straggler_cost.cost.compute_s or 0.0
        rows.append([
            one.link,
            f"{len(best.roster.hosts)}",
            _format_seconds(sync_s),
            _format_seconds(with_bf16_gradients(prediction.job, prediction.cluster, one).ranks[0].sync_s),
            f"{sync_s / compute_s:.2g}" if compute_s else "–",
            _format_seconds(best.step_s),
            _format_rate(best.tokens_per_s),
            f"{best.tokens_per_s / alone.tokens_per_s:.2f}" if alone else "–",
        ])  # fmt: skip
    titles = ("link", "hosts", "exchange", "16 bit", "÷ computing", "step", "tokens/s", "×")
    sync = prediction.option(prediction.chosen).roster.sync
    print_text(screen, f"{sync} over other links, on the best set of hosts; 16 bit: with --sync bf16", style="dim")
    print_table(screen, titles, rows, droppable=("16 bit", "hosts", "exchange"))
