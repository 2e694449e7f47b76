"""Judge whether the other machines helped: measured throughput against the best single host's prediction."""

from __future__ import annotations

from dataclasses import dataclass

from evener.core.units import link_rate, listed, plural, seconds
from evener.plan.advice import rate
from evener.plan.options import WORTH
from evener.plan.search import flags_of_recommended
from evener.report.ranks import last_done
from evener.report.summary import Summary
from evener.report.whatif import Again

FASTER = 1.05  # a smaller ratio does not count as a speedup
MOST_NAMED = 3  # hosts listed by name; of more, give the number


@dataclass(frozen=True)
class Worth:
    """The verdict, and a command that does better or measures it."""

    told: str
    hint: str = ""  # what the command is for
    command: str = ""

    @property
    def text(self) -> str:
        """The verdict and the command as one paragraph."""
        return f"{self.told} {self.hint}: {self.command}" if self.command else self.told


def worth(summary: Summary, again: Again | None) -> Worth:
    """Return the verdict that a report begins with; `alternatives` are predicted from the run's records."""
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
    rates = f"{trained} over {link_rate(again.prediction.cluster.slowest_Bps)}; {name} alone would have trained "
    rates += rate(alone.tokens_per_s)
    if ratio >= FASTER:
        verdict = f"It was worth it: {rates}: together they are {ratio:.2f} times as fast."
    elif ratio > 1 / FASTER:
        verdict = f"It made no difference: {rates}."
    else:
        verdict = f"It was not worth it: {rates}: {name} alone is {1 / ratio:.2f} times as fast."
    return _with_better(summary, again, verdict)


def _with_better(summary: Summary, again: Again, told: str) -> Worth:
    """Add the set-up that the planner recommends instead, if it differs from the run's own and is faster."""
    prediction, measured = again.prediction, again.own
    if not prediction.recommended or prediction.recommended == prediction.chosen:
        return Worth(told)
    best = prediction.option(prediction.recommended)
    if best.tokens_per_s < WORTH * measured.tokens_per_s:
        return Worth(told)
    steps = f" --steps {2 * summary.num_steps}" if summary.manifest.verdict == "finished" else ""
    hint = f"{best.name} would train {rate(best.tokens_per_s)}"
    if not best.is_exact and (best.loss_penalty or 0) > 0:
        hint += f" at {best.loss_penalty:.1%} more loss"
    command = f"evener train --resume {summary.run_dir}{steps} {flags_of_recommended(prediction)}"
    return Worth(told, hint, command)


def _of_processes(summary: Summary, trained: str) -> Worth:
    """Return what several processes lose to communication; no record shows what one process would train."""
    manifest, cost = summary.manifest, last_done(summary).typical
    both_s = (cost.exposed_sync_s or 0.0) + (cost.wait_s or 0.0)
    lost = f"; {seconds(both_s)} of each step went to exchanging and waiting" if both_s else ""
    verdict = f"{trained}{lost}. Whether one process is as fast was not measured."
    data, model, batch = manifest.spec.data.data, manifest.spec.model.model, manifest.roster.batch
    command = f"evener bench --data {data} --model {model} --batch {batch} --ranks 1 --ranks {manifest.world_size}"
    return Worth(verdict, "To measure it", command)
