"""Load the request of `plan` from files and flags, and print its prediction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from evener.cli.terminal import console, say, table
from evener.core.errors import UsageError
from evener.core.fleet import load_fleet, only
from evener.core.measured import update_fleet
from evener.core.prediction import Option, Prediction
from evener.core.roster import shares_text
from evener.core.spec import RunSpec
from evener.core.units import count, plural, seconds, size
from evener.plan import question
from evener.plan.advice import advice_of
from evener.plan.bill import Bill, bill, parse_offers, tokens_of
from evener.plan.pays import Advice, Fabric, OverLinks, best_alone, in_bf16
from evener.plan.question import Question, assuming

if TYPE_CHECKING:
    from rich.console import Console

    from evener.core.corpus import Corpus

LEGEND = (
    "exposed: communication not hidden by computation. ×: speedup over the fastest host alone. sends: bytes of a rank "
    "per step. loss: change compared with ddp; ?: not measured."
)
MOST_HOSTS = 16  # listed one by one


# --- the request ------------------------------------------------------------------------------------------------------


def of_fleet(of_what: Mapping[str, Any], spec: RunSpec, names_data: bool) -> Question:
    """Make a request about the hosts of a fleet file and their measured rates."""
    from evener.cli.fleets import fleet_path

    path = fleet_path(of_what["fleet"])
    if path is None:
        raise UsageError(
            "no fleet.toml here, and no --fleet",
            hint="or without machines: --nodes 2 --link 1GbE --compute-tokens-per-s 500",
        )
    corpus = corpus_of(spec)
    fleet = only(load_fleet(path), of_what["hosts"])
    request = question.of_fleet(fleet, spec, corpus, of_what["link"], path, of_what["params"])
    return without_data(request) if corpus is None and names_data else request


def of_words(machines: Mapping[str, Any], of_what: Mapping[str, Any], spec: RunSpec, names_data: bool) -> Question:
    """Make a request about hypothetical machines that flags describe."""
    corpus = corpus_of(spec) if names_data else None
    words = question.Words(**{**machines, "per_node": machines["per_node"] or 1}, link=of_what["link"])
    request = question.chosen_hosts(question.of_words(words, spec, corpus, of_what["params"]), of_what["hosts"])
    return without_data(request) if corpus is None and names_data else request


def without_data(asked: Question) -> Question:
    """Add to the request the assumption that replaces a missing corpus."""
    spec = asked.job.spec
    assumption = f"{spec.data.data} is not here: the vocabulary is {spec.model.model}'s default"
    return msgspec.structs.replace(asked, cluster=assuming(asked.cluster, [assumption]))


def of_run(run: str, texts: dict[str, str], link: str | None, fleet: str | None) -> Question:
    """Make a request from a run's records, with the flags applied; write its rates to the fleet file if given."""
    from evener.core.plan import read_prediction
    from evener.core.rundir import RunDir

    rundir = RunDir(run)
    manifest = rundir.manifest()
    records = [rundir.records(member.rank) for member in manifest.roster.members]
    request = question.of_run(run, manifest, records, read_prediction(rundir))
    if fleet is not None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        rates, links = question.figures(request, load_fleet(fleet), fleet, measured=now)
        update_fleet(fleet, rates=rates, links=links)
        change = f"written to [rates] and [links] of {fleet}"
        request = msgspec.structs.replace(request, changes=[*request.changes, change])
    return question.changed(request, texts, link)


def corpus_of(spec: RunSpec) -> Corpus | None:
    """Load the corpus of a spec; None if it is not on this machine."""
    from evener.core.corpus import load_corpus

    path = Path(spec.data.data)
    return load_corpus(path) if path.exists() else None


# --- the prediction ---------------------------------------------------------------------------------------------------


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What is printed in addition to the prediction."""

    links: list[Fabric]  # predictions for other links
    advice: list[Advice]
    bills: list[Bill]


def beside(found: Prediction, asked: Question, tokens: str | None, price_per_kwh: float | None,
           rent: str | None) -> Told:  # fmt: skip
    """Compute predictions for other links, advice, and the cost of training the given number of tokens."""
    links = OverLinks(found.job, found.cluster) if len(found.cluster.names) > 1 else None
    bills = _bills_of(found, asked, tokens, price_per_kwh, rent)
    return Told(links=links.named if links else [], advice=advice_of(found, links), bills=bills)


def as_json(found: Prediction, asked: Question, beside: Told) -> dict[str, Any]:
    """Return the JSON object of --json."""
    options = [
        msgspec.to_builtins(option)
        | {
            "sync": str(option.roster.sync),
            "hosts": option.roster.hosts,
            "cost": msgspec.to_builtins(option.slowest.cost),
        }
        for option in found.options
    ]
    result = {
        "verdict": found.verdict,
        "recommended": found.recommended,
        "chosen": found.chosen,
        "options": options,
        "bills": msgspec.to_builtins(beside.bills),
        "advice": msgspec.to_builtins(beside.advice),
        "assumed": found.cluster.assumptions,
        "source": asked.source,
        "job": msgspec.to_builtins(found.job),
        "cluster": msgspec.to_builtins(found.cluster),
    }
    if asked.asks_fabrics:
        result["fabrics"] = [
            {"link": one.link, "payload_Bps": one.payload_Bps, "hosts": one.best.roster.hosts,
             "all_reduce_s": one.best.ranks[0].sync_s, "step_s": one.best.step_s, "tokens_per_s": one.best.tokens_per_s,
             "bf16_all_reduce_s": in_bf16(found.job, found.cluster, one).ranks[0].sync_s}
            for one in beside.links
        ]  # fmt: skip
    return result


def _bills_of(found: Prediction, asked: Question, tokens: str | None, price_per_kwh: float | None,
              rent: str | None) -> list[Bill]:  # fmt: skip
    """Return time and cost of the recommended option, of the fastest host alone, and of rented machines."""
    spec, offers = found.job.spec, parse_offers(rent) if rent is not None else []
    until = tokens_of(spec, found.job, tokens)
    price = asked.price_per_kwh if price_per_kwh is None else price_per_kwh
    bills = []
    if found.recommended:
        best = found.option(found.recommended)
        bills.append(bill(best, found.cluster, until, price))
        alone = best_alone(found.job, found.cluster)
        if alone is not None and len(best.roster.hosts) > 1:
            bills.append(bill(alone, found.cluster, until, price))
    for offer in offers:
        where = f"rented: {offer}"
        try:
            answered = question.answer(question.rented(asked, offer))
            why_not = "" if answered.recommended else answered.option(answered.chosen).rejected_because
        except UsageError as error:
            why_not = f"{error}"
        if why_not:
            bills.append(Bill(where=where, tokens=until, tokens_per_s=0.0, hours=None, spread=0.0, kwh=None, money=None,
                             why_not=why_not))  # fmt: skip
        else:
            option = answered.option(answered.recommended)
            bills.append(bill(option, answered.cluster, until, None, where=where))
    return bills


def tell(found: Prediction, asked: Question, beside: Told) -> None:
    """Print the verdict, the options side by side, where a step's time goes, and what was assumed."""
    screen = console()
    shape, roster = found.job.shape, found.option(found.chosen).roster
    say(screen, found.verdict, style="bold")
    what = (
        f"{found.job.model}: {count(shape.num_params())} parameters, {plural(roster.batch, 'sequence')} of "
        f"{shape.block_size} tokens a step, {roster.dtypes}; figures from {asked.source}"
    )
    say(screen, what, style="dim")
    screen.print()
    _speeds(screen, found)
    screen.print()
    _prices(screen, found)
    say(screen, LEGEND, style="dim")
    if 1 < len(roster.hosts) <= MOST_HOSTS:
        screen.print()
        _hosts(screen, found)
    if asked.asks_fabrics and beside.links:
        screen.print()
        _fabric_table(screen, found, beside.links)
    screen.print()
    _bills(screen, beside.bills)
    for advice in beside.advice:
        say(screen, advice.text)
    for line in asked.changes:
        say(screen, f"refitted: {line}")
    if assumed := found.cluster.assumptions:
        screen.print()
        say(screen, "assumed, not measured:", style="dim")
        for line in assumed:
            say(screen, line, indent=2, style="dim")


def _bills(screen: Console, bills: Sequence[Bill]) -> None:
    """Print how long the training takes and what it costs."""
    if not bills:
        return
    if len(bills) == 1 and bills[0].money is None and bills[0].kwh is None:
        one = bills[0]
        say(screen, f"{count(one.tokens)} tokens take {seconds(3600 * (one.hours or 0.0))} ± {one.spread:.0%}.")
        return
    rows = [
        [
            one.where,
            "–" if one.hours is None else _rate(one.tokens_per_s),
            "cannot" if one.hours is None else seconds(3600 * one.hours),
            "–" if one.hours is None else f"± {one.spread:.0%}",
            "?" if one.kwh is None else f"{one.kwh:.3g}",
            "?" if one.money is None else f"{one.money:,.2f}",
        ]
        for one in bills
    ]
    until = count(bills[0].tokens)
    say(screen, f"to train {until} tokens; ?: watts or price not given", style="dim")
    table(screen, ("where", "tokens/s", "time", "", "kWh", "money"), rows, spare=("tokens/s",))
    for one in bills:
        if one.why_not:
            say(screen, f"{one.where}: {one.why_not}")
    screen.print()


def _short(value: float | None) -> str:
    """Format seconds for a narrow column.

    >>> _short(0.0), _short(0.0125), _short(18.79), _short(86.4), _short(None)
    ('–', '12.5 ms', '18.8 s', '86.4 s', '?')
    >>> _short(18.0), _short(252.4)
    ('18.0 s', '252 s')
    """
    if value is None:
        return "?"
    if value < 5e-7:
        return "–"
    return seconds(value) if value < 0.9995 or value >= 600 else f"{value:#.3g} s".replace(". ", " ")


def _rate(tokens_per_s: float) -> str:
    """Format tokens/s with three digits, so that similar rates can be distinguished.

    >>> _rate(57.04), _rate(466.2), _rate(1617.0), _rate(566_900_000.0)
    ('57.0', '466', '1.62k', '567M')
    """
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens_per_s >= 0.9995 * factor:
            return f"{tokens_per_s / factor:#.3g}".rstrip(".") + prefix
    return f"{tokens_per_s:#.3g}".rstrip(".")


def _in_order(found: Prediction) -> list[Option]:
    """Sort options: the recommended one, those that train can run, the rest; each group fastest first."""
    return sorted(
        found.options, key=lambda option: (option.name != found.recommended, not option.is_built, -option.tokens_per_s)
    )


def _speeds(screen: Console, found: Prediction) -> None:
    """Print the step time of each option and its parts on the slowest rank, which never waits."""
    rows = []
    for option in _in_order(found):
        cost = option.slowest.cost
        rows.append([
            option.name,
            *map(_short, (option.step_s, cost.compute_s, cost.exposed_sync_s, cost.optimizer_s)),
            _rate(option.tokens_per_s),
            f"{option.speedup_vs_best_host:.2f}" if option.speedup_vs_best_host else "–",
        ])  # fmt: skip
    titles = ("strategy", "step", "compute", "exposed", "update", "tokens/s", "×")
    table(screen, titles, rows, spare=("update", "compute", "exposed"), bold=0 if found.recommended else None)


def _hosts(screen: Console, found: Prediction) -> None:
    """Print the chosen option per host, by the last rank of each host: ranks of a host are equal."""
    option = found.option(found.chosen)
    known = {name: host.bound_by for name, host in found.cluster.hosts.items() if host.bound_by}
    rows = []
    for member in {member.host: member for member in option.roster.members}.values():
        rank = option.ranks[member.rank]
        cost = rank.cost
        parts = (cost.compute_s, cost.exposed_sync_s, cost.wait_s, cost.optimizer_s)
        bound = [known.get(member.host, "?")] if known else []
        rows.append([
            member.host,
            shares_text([option.roster.mean_shares[member.rank]]),
            *map(_short, parts),
            size(rank.memory_bytes or 0),
            *bound,
        ])  # fmt: skip
    titles = ["host", "sequences", "compute", "exposed", "wait", "update", "memory", *(["bound by"] if known else [])]
    say(screen, f"each host, with {option.name}:", style="dim")
    table(screen, titles, rows, spare=("bound by", "update", "memory") if known else ("update", "memory"))


def _prices(screen: Console, found: Prediction) -> None:
    """Print bytes, memory and loss of each option, and why it is not recommended."""
    rows = []
    for option in _in_order(found):
        penalty = option.loss_penalty
        rows.append([
            option.name,
            size(option.bytes_per_rank) if option.bytes_per_rank else "–",
            size(max(rank.memory_bytes or 0 for rank in option.ranks)),
            "same" if option.is_exact else "?" if penalty is None else f"{penalty:+.1%}".replace("-", "−"),
            option.rejected_because or "← recommended",
        ])  # fmt: skip
    titles = ("strategy", "sends", "memory", "loss", "why not")
    table(screen, titles, rows, text=True, spare=("memory", "sends"), bold=0 if found.recommended else None)


def _fabric_table(screen: Console, found: Prediction, links: Sequence[Fabric]) -> None:
    """Print the best multi-host option over faster and slower links, and its speedup over the best host alone."""
    alone = best_alone(found.job, found.cluster)
    rows = []
    for one in links:
        best = one.best
        sync_s, compute_s = best.ranks[0].sync_s, best.slowest.cost.compute_s or 0.0
        rows.append([
            one.link,
            f"{len(best.roster.hosts)}",
            _short(sync_s),
            _short(in_bf16(found.job, found.cluster, one).ranks[0].sync_s),
            f"{sync_s / compute_s:.2g}" if compute_s else "–",
            _short(best.step_s),
            _rate(best.tokens_per_s),
            f"{best.tokens_per_s / alone.tokens_per_s:.2f}" if alone else "–",
        ])  # fmt: skip
    titles = ("link", "hosts", "exchange", "16 bit", "÷ computing", "step", "tokens/s", "×")
    sync = found.option(found.chosen).roster.sync
    say(screen, f"{sync} over other links, on the best set of hosts; 16 bit: with --sync bf16", style="dim")
    table(screen, titles, rows, spare=("16 bit", "hosts", "exchange"))
