"""What does a person need to hear of an answer: what to do, who is slow, and what would make it pay?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evener.core.prediction import Option, Prediction, Wire
from evener.core.step import more_tokens
from evener.core.units import count, link_rate, plural, seconds
from evener.plan.cluster import scaled, with_wire
from evener.plan.cost import price
from evener.plan.divide import first_roster_by_speed
from evener.plan.options import (
    ALIKE,
    WORTH,
    as_trained,
    divided,
    fits_in,
    larger,
    on_one,
    speed,
    speeds_of,
    what_does_not_fit,
)

MOST_FACTOR = 64  # of batch or bandwidth that is looked at
BATCH_FACTORS = (2, 4, 8, 16)
BISECTIONS = 14  # of a range of 2¹²: to 0.05 %


def verdict_of(prediction: Prediction) -> str:
    """What to do, in a sentence."""
    if not prediction.recommended:
        why = prediction.option(prediction.chosen).rejected_because
        return f"This cannot be trained here: {why}; a smaller --micro-batch or --recompute needs less."
    best, chosen = prediction.option(prediction.recommended), prediction.option(prediction.chosen)
    hosts, its_hosts = prediction.cluster.names, best.roster.hosts
    left_out = [name for name in hosts if name not in its_hosts]
    everyone = "both hosts" if len(hosts) == 2 else f"all {len(hosts)} hosts"
    if len(hosts) == 1:
        ranks = plural(best.roster.world_size, "rank")
        return f"{hosts[0]} with {ranks} trains {rate(best.tokens_per_s)}."
    if not left_out:
        gain = f", {best.speedup_vs_best_host:.2f} times the fastest host alone" if best.speedup_vs_best_host else ""
        return f"Train on {everyone} with {best.name}: {rate(best.tokens_per_s)}{gain}{price_in_loss(best)}."
    if what_does_not_fit(chosen, prediction.cluster):
        why = f"{chosen.rejected_because}; a smaller --micro-batch or --recompute needs less"
        return f"Use {listed(its_hosts)} only. With {everyone} it {why}."
    with_all, fewer = rate(chosen.tokens_per_s), rate(best.tokens_per_s)
    if chosen.tokens_per_s * WORTH > best.tokens_per_s:
        return f"{listed(its_hosts)} will do: {everyone} together train {with_all}, it alone {fewer}."
    speeds = speeds_of(prediction.job, prediction.cluster).values()
    if len(its_hosts) == 1 and (len(hosts) > 2 or min(speeds) > ALIKE * max(speeds)):
        return f"Don't distribute this: {its_hosts[0]} alone trains {fewer}, {everyone} {with_all}."
    return f"Leave {listed(left_out)} out: with {'it' if len(left_out) == 1 else 'them'} {with_all}, without {fewer}."


def price_in_loss(option: Option) -> str:
    """What somebody measured; nothing of what is exact."""
    if option.is_exact or option.loss_penalty is None:
        return ""
    told = f"{abs(option.loss_penalty):.1%} {'higher' if option.loss_penalty > 0 else 'lower'}"
    return f"; its loss was {told if option.loss_penalty else 'no higher'} at equal tokens ({option.loss_source})"


def advice_of(prediction: Prediction) -> list[str]:
    """Who is slow, what would pay, what would be faster if it could run."""
    chosen, cluster = prediction.option(prediction.chosen), prediction.cluster
    found = []
    if len(chosen.ranks) > 1:
        found.append(_division(chosen))
    alone = [option for option in prediction.options if len(option.roster.hosts) == 1 and fits_in(option, cluster)]
    if len(chosen.roster.hosts) > 1 and alone and fits_in(chosen, cluster):
        found += _break_even(prediction, chosen, alone[0])
    if prediction.job.noise_tokens is not None and fits_in(chosen, cluster):
        found.append(_larger_batch(prediction, prediction.job.noise_tokens))
    faster = [option for option in prediction.options
              if not option.is_built and option.is_exact and fits_in(option, cluster)]  # fmt: skip
    top = max(faster, key=speed, default=None)
    recommended = prediction.recommended and prediction.option(prediction.recommended)
    if top and recommended and top.tokens_per_s > WORTH * recommended.tokens_per_s:
        found.append(
            f"{top.name} would train {rate(top.tokens_per_s)}, {top.tokens_per_s / recommended.tokens_per_s:.2f} times "
            "as much, and exactly the same model; train cannot run it yet."
        )
    return found


def _division(option: Option) -> str:
    """The slowest rank, and what its step is made of."""
    slow, shares = option.last, option.roster.shares
    communication_s = option.slowest.cost.exposed_sync_s or 0.0
    most_wait_s = max(rank.cost.wait_s or 0.0 for rank in option.ranks)
    hosts = "all hosts" if len(option.roster.hosts) > 1 else f"all ranks of {slow.host}"
    told = f"A step on {hosts} takes {seconds(option.step_s)}"
    share = communication_s / option.step_s
    if share > 0.005:
        told += f", of which {seconds(communication_s)} ({share:.0%}) is communication that computing does not hide"
    if most_wait_s > 0.01 * option.step_s and slow.share == min(shares) + 1:
        divided = f"{sum(shares)} sequences are not divided equally by {len(shares)}"
        return f"{told}. {divided}: others wait for {slow.host}."
    if most_wait_s > 0.05 * option.step_s:
        return f"{told}. {slow.host} is the straggler: others wait up to {seconds(most_wait_s)} for it in every step."
    return f"{told}."


def _break_even(prediction: Prediction, chosen: Option, alone: Option) -> list[str]:
    """The bandwidth and the batch from which on all hosts together are clearly faster than the best one alone."""
    job, cluster = prediction.job, prediction.cluster
    slowest_Bps = cluster.slowest_Bps

    def gain_with(factor: float) -> float:
        return price(job, scaled(cluster, factor), chosen.roster).tokens_per_s / alone.tokens_per_s

    def gain_at(factor: int) -> float:
        more = larger(job, factor)
        together = as_trained(more, cluster).tokens_per_s
        if job.noise_tokens is None:
            return together / on_one(more, cluster, alone.roster.hosts[0]).tokens_per_s
        return together / more_tokens(job.noise_tokens, job.tokens, factor) / alone.tokens_per_s  # to the same loss

    pays = chosen.tokens_per_s > WORTH * alone.tokens_per_s
    by_speed = first_roster_by_speed(divided(job, "auto"), cluster, cluster.seats)
    is_equal = job.spec.machine.shares == "equal" and by_speed.mean_shares != chosen.roster.mean_shares
    equally = "with equal shares " if is_equal else ""
    factor = _crossing(gain_with, pays)
    if factor is None and pays:
        return []
    has = link_rate(slowest_Bps)
    if factor is not None and pays:
        return [f"It pays from {link_rate(factor * slowest_Bps)} between the hosts upwards; they have {has}."]
    instant = with_wire(cluster, Wire(latency_s=0.0, bandwidth_Bps=1e18))
    if factor is not None:
        needs = link_rate(factor * slowest_Bps)
        told = f"{equally}it would pay from {needs} between the hosts upwards; they have {has}."
    elif price(job, instant, chosen.roster).tokens_per_s > WORTH * alone.tokens_per_s:
        latency_s = max(wire.latency_s for row in cluster.wires.values() for wire in row.values())
        told = f"{equally}bandwidth alone would not make it pay: every message takes {seconds(latency_s)} one way."
    else:
        told = f"{equally}no network would make all hosts together pay: their computing alone takes longer."
    batch = next((k for k in range(2, MOST_FACTOR + 1) if gain_at(k) > WORTH), None)
    if batch:
        sequences = batch * job.spec.train.batch
        more = f"Or with --batch {sequences}, {batch} times as many sequences a step"
        more += ": another training run." if job.noise_tokens is None else ", counted until the same loss."
    else:
        more = f"A batch up to {MOST_FACTOR} times as large would not make it pay."
    return [_sentence(told), more]


def _larger_batch(prediction: Prediction, noise_tokens: float) -> str:
    """Is the same loss reached sooner with larger batches? They cost less communication, and more tokens."""
    job, cluster = prediction.job, prediction.cluster
    chosen = prediction.option(prediction.chosen)

    def rates(factor: int) -> tuple[float, float]:
        faster = as_trained(larger(job, factor), cluster).tokens_per_s / chosen.tokens_per_s
        return faster, more_tokens(noise_tokens, job.tokens, factor)

    found = {factor: rates(factor) for factor in BATCH_FACTORS}
    gains = {factor: faster / more for factor, (faster, more) in found.items()}
    best = max(gains, key=lambda factor: gains[factor])
    if gains[best] <= WORTH:  # then of the next larger one
        best = BATCH_FACTORS[0]
    verdict = "that gains nothing"
    if not 1 / WORTH <= gains[best] <= WORTH:
        verdict = f"it is there {'sooner' if gains[best] > 1 else 'later'}"
    faster, more = found[best]
    return (
        f"By the noise scale that was measured, {count(noise_tokens)} tokens, --batch {best * job.spec.train.batch} "
        f"needs {more:.2f} times as many tokens for the same loss and trains {faster:.2f} times as many a second: "
        f"{verdict}."
    )


def _crossing(gain: Callable[[float], float], pays: bool) -> float | None:
    """The factor at which a gain that grows with it is worth something; None if none within 1/MOST² … MOST² does it."""
    low, high = (1.0 / MOST_FACTOR**2, 1.0) if pays else (1.0, float(MOST_FACTOR**2))
    if (gain(low) > WORTH) == (gain(high) > WORTH):
        return None
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if gain(middle) > WORTH:
            high = middle
        else:
            low = middle
    return high


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def listed(names: Sequence[str]) -> str:
    """
    >>> listed("abc")
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def rate(tokens_per_s: float) -> str:
    """Tokens a second for a sentence.

    >>> rate(57.04), rate(3812.0)
    ('57 tokens/s', '3.8k tokens/s')
    """
    return f"{count(tokens_per_s) if tokens_per_s >= 999.5 else f'{tokens_per_s:.3g}'} tokens/s"
