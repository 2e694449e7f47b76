"""How does the answer of `plan` look on a terminal, and which files are its question about?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from evener.cli.terminal import console, say, table
from evener.core.fleet import load_fleet, only
from evener.core.measured import update_fleet
from evener.core.prediction import Option, Prediction
from evener.core.roster import shares_text
from evener.core.spec import RunSpec
from evener.core.units import count, plural, seconds, size
from evener.plan import question
from evener.plan.question import Fabric, Question, assuming

if TYPE_CHECKING:
    from rich.console import Console

LEGEND = (
    "exposed: communication that computing does not hide. ×: tokens/s beside the fastest host alone. sends: by one "
    "rank, of a step. loss: beside ddp; ?: nobody measured it."
)
MOST_HOSTS = 16  # that are listed one by one


# --- the files that a question is about -------------------------------------------------------------------------------


def of_fleet(path: str, hosts: str | None, spec: RunSpec, names_data: bool, link: str | None) -> Question:
    """What was measured, in the fleet's file."""
    vocab_size = vocab_size_of(spec)
    asked = question.of_fleet(only(load_fleet(path), hosts), spec, vocab_size, link, source=path)
    if vocab_size is None and names_data:
        told = f"{spec.data.data} is not here: the vocabulary is {spec.model.model}'s own"
        return msgspec.structs.replace(asked, cluster=assuming(asked.cluster, [told]))
    return asked


def of_run(run: str, texts: dict[str, str], link: str | None, fleet: str | None) -> Question:
    """A run's own records; the flags change what it trained. They go into the fleet's file if one is given."""
    from evener.core.plan import read_prediction
    from evener.core.rundir import RunDir

    rundir = RunDir(run)
    manifest = rundir.manifest()
    records = [rundir.records(rank) for rank in range(manifest.world_size)]
    asked = question.of_run(run, manifest, records, read_prediction(rundir))
    if fleet is not None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        rates, links = question.figures(asked, load_fleet(fleet), fleet, measured=now)
        update_fleet(fleet, rates=rates, links=links)
        told = f"written to [rates] and [links] of {fleet}"
        asked = msgspec.structs.replace(asked, changes=[*asked.changes, told])
    return question.changed(asked, texts, link)


def vocab_size_of(spec: RunSpec) -> int | None:
    """Of the corpus, where it is here."""
    from evener.core.corpus import load_corpus

    path = Path(spec.data.data)
    return load_corpus(path).vocab_size if path.exists() else None


# --- the answer -------------------------------------------------------------------------------------------------------


def as_json(found: Prediction, asked: Question) -> dict[str, Any]:
    """What --json prints."""
    options = [
        msgspec.to_builtins(option)
        | {
            "sync": str(option.roster.sync),
            "hosts": option.roster.hosts,
            "cost": msgspec.to_builtins(option.slowest.cost),
        }
        for option in found.options
    ]
    told = {
        "verdict": found.verdict,
        "recommended": found.recommended,
        "chosen": found.chosen,
        "options": options,
        "advice": found.advice,
        "assumed": found.cluster.assumed,
        "source": asked.source,
        "job": msgspec.to_builtins(found.job),
        "cluster": msgspec.to_builtins(found.cluster),
    }
    if asked.asks_fabrics:
        told["fabrics"] = [
            {"link": one.link, "payload_Bps": one.payload_Bps, "all_reduce_s": one.ddp.ranks[0].sync_s,
             "bf16_all_reduce_s": one.bf16.ranks[0].sync_s, "step_s": one.ddp.step_s,
             "tokens_per_s": one.ddp.tokens_per_s}
            for one in _fabrics(found, asked)
        ]  # fmt: skip
    return told


def _fabrics(found: Prediction, asked: Question) -> list[Fabric]:
    return question.fabrics(asked, found.option(found.chosen))


def tell(found: Prediction, asked: Question) -> None:
    """The verdict, the ways side by side, where a step goes, and what is not known."""
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
    if asked.asks_fabrics:
        screen.print()
        _fabric_table(screen, asked, found)
    screen.print()
    for line in found.advice:
        say(screen, line)
    for line in asked.changes:
        say(screen, f"refitted: {line}")
    if found.cluster.assumed:
        screen.print()
        say(screen, "assumed, not measured:", style="dim")
        for line in found.cluster.assumed:
            say(screen, line, indent=2, style="dim")


def _short(value: float | None) -> str:
    """Seconds in a narrow column.

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
    """With three digits, so that near ones can be told apart.

    >>> _rate(57.04), _rate(466.2), _rate(1617.0), _rate(566_900_000.0)
    ('57.0', '466', '1.62k', '567M')
    """
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens_per_s >= 0.9995 * factor:
            return f"{tokens_per_s / factor:#.3g}".rstrip(".") + prefix
    return f"{tokens_per_s:#.3g}".rstrip(".")


def _in_order(found: Prediction) -> list[Option]:
    """The recommended one, what train can run, the rest; the fastest first."""
    return sorted(
        found.options, key=lambda option: (option.name != found.recommended, not option.is_built, -option.tokens_per_s)
    )


def _speeds(screen: Console, found: Prediction) -> None:
    """The step of each way, as its slowest rank sees it: that one waits for nobody."""
    rows = []
    for option in _in_order(found):
        cost = option.slowest.cost
        rows.append([
            option.name,
            *map(_short, (option.step_s, cost.compute_s, cost.exposed_sync_s, cost.optimizer_s)),
            _rate(option.tokens_per_s),
            f"{option.speedup_vs_best_host:.2f}" if option.speedup_vs_best_host else "–",
        ])  # fmt: skip
    titles = ("way", "step", "compute", "exposed", "update", "tokens/s", "×")
    table(screen, titles, rows, spare=("update", "compute", "exposed"), bold=0 if found.recommended else None)


def _hosts(screen: Console, found: Prediction) -> None:
    """The chosen option host by host: the last rank of each, which are equal."""
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
    """What each way costs in bytes, memory and loss, and why it is not recommended."""
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
    titles = ("way", "sends", "memory", "loss", "why not")
    table(screen, titles, rows, text=True, spare=("memory", "sends"), bold=0 if found.recommended else None)


def _fabric_table(screen: Console, asked: Question, found: Prediction) -> None:
    """What the network takes beside what computing takes, over faster and slower links."""
    rows = []
    alone = next((option.tokens_per_s for option in found.options if len(option.roster.hosts) == 1), None)
    for one in _fabrics(found, asked):
        ddp = one.ddp
        sync_s, compute_s = ddp.ranks[0].sync_s, ddp.slowest.cost.compute_s or 0.0
        rows.append([
            one.link,
            _short(sync_s),
            _short(one.bf16.ranks[0].sync_s),
            f"{sync_s / compute_s:.2g}" if compute_s else "–",
            _short(ddp.step_s),
            _rate(ddp.tokens_per_s),
            f"{ddp.tokens_per_s / alone:.2f}" if alone else "–",
        ])  # fmt: skip
    titles = ("link", "all-reduce", "16 bit", "÷ computing", "step", "tokens/s", "×")
    say(screen, "ddp over other links; 16 bit: with --sync bf16", style="dim")
    table(screen, titles, rows, spare=("16 bit", "all-reduce"))
