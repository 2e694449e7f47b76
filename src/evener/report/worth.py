"""Did the other machines help? What all trained, beside what one of them alone would have."""

from __future__ import annotations

from dataclasses import dataclass

from evener.core.units import link_rate, listed, plural, seconds
from evener.plan.advice import rate
from evener.plan.options import WORTH
from evener.plan.search import flags_of_recommended
from evener.report.ranks import last_done
from evener.report.summary import Summary
from evener.report.whatif import Again

FASTER = 1.05  # a speed-up that is one
MOST_NAMED = 3  # hosts; of more, their number


@dataclass(frozen=True)
class Worth:
    """The answer, and the command that does better or finds out."""

    told: str
    hint: str = ""  # what the command brings
    command: str = ""

    @property
    def text(self) -> str:
        """All of it in one paragraph."""
        return f"{self.told} {self.hint}: {self.command}" if self.command else self.told


def worth(summary: Summary, again: Again | None) -> Worth:
    """The first that a report says. `again` is what the planner says to the run's records; None: nothing."""
    if not summary.tokens_per_s:
        return Worth(f"No step was recorded{summary.manifest.window}, so there is nothing to explain.")
    if len(summary.manifest.roster.hosts) > 1:
        return _of_hosts(summary, summary.tokens_per_s, again)
    trained, num = rate(summary.tokens_per_s), summary.manifest.world_size
    (host,) = summary.manifest.roster.hosts
    if num == 1:
        return Worth(f"{host} alone trained {trained}; no other machine took part.")
    return _of_processes(summary, f"{plural(num, 'process')} on {host} trained {trained}")


def _of_hosts(summary: Summary, tokens_per_s: float, again: Again | None) -> Worth:
    hosts = summary.manifest.roster.hosts
    who = listed(hosts) if len(hosts) <= MOST_NAMED else f"{len(hosts)} hosts"
    trained = f"{who} trained {rate(tokens_per_s)}"
    if again is None or again.alone is None:
        return Worth(f"{trained} together; what one of them alone would have trained is not known.")
    alone = again.alone
    ratio, name = tokens_per_s / alone.tokens_per_s, alone.roster.hosts[0]
    beside = f"{trained} over {link_rate(again.prediction.cluster.slowest_Bps)}; {name} alone would have trained "
    beside += rate(alone.tokens_per_s)
    if ratio >= FASTER:
        told = f"It was worth it: {beside}: together they are {ratio:.2f} times as fast."
    elif ratio > 1 / FASTER:
        told = f"It made no difference: {beside}."
    else:
        told = f"It was not worth it: {beside}: {name} alone is {1 / ratio:.2f} times as fast."
    return _with_better(summary, again, told)


def _with_better(summary: Summary, again: Again, told: str) -> Worth:
    """What the planner recommends instead, if it is anything else than what the run's flags would bring again."""
    prediction, own = again.prediction, again.own
    if not prediction.recommended or prediction.recommended == prediction.chosen:
        return Worth(told)
    best = prediction.option(prediction.recommended)
    if best.tokens_per_s < WORTH * own.tokens_per_s:
        return Worth(told)
    steps = f" --steps {2 * summary.num_steps}" if summary.manifest.verdict == "finished" else ""
    hint = f"{best.name} would train {rate(best.tokens_per_s)}"
    if not best.is_exact and (best.loss_penalty or 0) > 0:
        hint += f" at {best.loss_penalty:.1%} more loss"
    command = f"evener train --resume {summary.run_dir}{steps} {flags_of_recommended(prediction)}"
    return Worth(told, hint, command)


def _of_processes(summary: Summary, trained: str) -> Worth:
    """What one process would have trained with all threads no record tells; what several lose to each other it does."""
    manifest, cost = summary.manifest, last_done(summary).typical
    both_s = (cost.exposed_sync_s or 0.0) + (cost.wait_s or 0.0)
    lost = f"; {seconds(both_s)} of each step went to exchanging and waiting" if both_s else ""
    told = f"{trained}{lost}. Whether one process is as fast was not measured."
    data, model, batch = manifest.spec.data.data, manifest.spec.model.model, manifest.roster.batch
    command = f"evener bench --data {data} --model {model} --batch {batch} --ranks 1 --ranks {manifest.world_size}"
    return Worth(told, "To see it", command)
