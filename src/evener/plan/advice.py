"""What does a person need to hear of an answer: what to do, who is slow, and what would make it pay?"""

from __future__ import annotations

import msgspec

from evener.core.prediction import Option, Prediction
from evener.core.roster import NO_SYNC, asked_sync
from evener.core.step import more_tokens
from evener.core.units import count, listed, plural, seconds, size
from evener.plan.options import (
    ALIKE,
    WORTH,
    as_trained,
    fits_in,
    larger,
    objection,
    speed,
    speeds_of,
    what_does_not_fit,
)
from evener.plan.pays import Advice, OverLinks, best_alone, best_together, flags_for, typed, what_would_pay

BATCH_FACTORS = (2, 4, 8, 16)


def verdict_of(prediction: Prediction) -> str:
    """What to do, in a sentence."""
    if not prediction.recommended:
        why = prediction.option(prediction.chosen).rejected_because
        return f"This cannot be trained here: {why}."
    best, chosen = prediction.option(prediction.recommended), prediction.option(prediction.chosen)
    hosts, its_hosts = prediction.cluster.names, best.roster.hosts
    taken = set(its_hosts)
    left_out = [name for name in hosts if name not in taken]
    everyone = "both hosts" if len(hosts) == 2 else f"all {len(hosts)} hosts"
    if len(hosts) == 1:
        ranks = plural(best.roster.world_size, "rank")
        return f"{hosts[0]} with {ranks} trains {rate(best.tokens_per_s)}."
    if not left_out:
        gain = f", {best.speedup_vs_best_host:.2f} times the fastest host alone" if best.speedup_vs_best_host else ""
        return f"Train on {everyone} with {best.name}: {rate(best.tokens_per_s)}{gain}{price_in_loss(best)}."
    if what_does_not_fit(chosen, prediction.cluster):
        return f"Use {listed(its_hosts)} only. With {everyone} it {chosen.rejected_because}."
    with_all, fewer = rate(chosen.tokens_per_s), rate(best.tokens_per_s)
    if (why := objection(chosen, prediction.job.spec.train.loss_budget / 100)) and speed(chosen) > speed(best):
        return f"Use {listed(its_hosts)} only: {chosen.name} on {everyone} trains {with_all} beside {fewer}, but {why}."
    if chosen.tokens_per_s * WORTH > best.tokens_per_s:
        they = "it" if len(its_hosts) == 1 else "they"
        return f"{listed(its_hosts)} will do: {everyone} together train {with_all}, {they} alone {fewer}."
    speeds = speeds_of(prediction.job, prediction.cluster).values()
    if len(its_hosts) == 1 and (len(hosts) > 2 or min(speeds) > ALIKE * max(speeds)):
        return f"Don't distribute this: {its_hosts[0]} alone trains {fewer}, {everyone} {with_all}."
    return f"Leave {listed(left_out)} out: with {'it' if len(left_out) == 1 else 'them'} {with_all}, without {fewer}."


def price_in_loss(option: Option) -> str:
    """What somebody measured; nothing of what is exact."""
    if option.is_exact or option.loss_penalty is None:
        return ""
    told = f"{option.loss_penalty:.1%} higher" if option.loss_penalty > 0 else "no higher"
    return f"; its loss was {told} at equal tokens ({option.loss_source})"


def advice_of(prediction: Prediction, links: OverLinks | None = None) -> list[Advice]:
    """Who is slow, what would pay, what would fit, what would be faster if it could run; `links`: what others bring."""
    chosen, cluster = prediction.option(prediction.chosen), prediction.cluster
    found = []
    if len(chosen.ranks) > 1:
        found.append(Advice(text=_division(chosen)))
    if not prediction.recommended:
        found += what_fits(prediction)
    elif len(cluster.names) > 1:
        found += what_would_pay(prediction, links or OverLinks(prediction.job, cluster))
    if any(host.memory_bytes is None for host in cluster.hosts.values()):
        found.append(_unknown_memory(prediction))
    if prediction.job.noise_tokens is not None and fits_in(chosen, cluster):
        found.append(_larger_batch(prediction, prediction.job.noise_tokens))
    faster = [option for option in prediction.options
              if not option.is_built and option.is_exact and fits_in(option, cluster)]  # fmt: skip
    top = max(faster, key=speed, default=None)
    recommended = prediction.recommended and prediction.option(prediction.recommended)
    if top and recommended and top.tokens_per_s > WORTH * recommended.tokens_per_s:
        gain = top.tokens_per_s / recommended.tokens_per_s
        found.append(Advice(text=f"{top.name} would train {rate(top.tokens_per_s)}, {gain:.2f} times as much, and "
                                 "exactly the same model; train cannot run it yet."))  # fmt: skip
    return [*found, *(Advice(text=note) for note in prediction.notes)]


def what_fits(prediction: Prediction) -> list[Advice]:
    """What to ask for where memory is too small for what was asked: smaller micro-batches, or activations anew."""
    job, cluster = prediction.job, prediction.cluster
    spec, found = job.spec, []
    largest = max(member.micro_batch for member in prediction.option(prediction.chosen).roster.members)
    smaller = [largest >> i for i in range(1, largest.bit_length())]
    for recompute in (False, True)[spec.model.recompute :]:
        for micro_batch in [largest, *smaller] if recompute else smaller:
            model = msgspec.structs.replace(spec.model, recompute=recompute)
            train = msgspec.structs.replace(spec.train, micro_batch=micro_batch)
            other = msgspec.structs.replace(job, spec=msgspec.structs.replace(spec, model=model, train=train))
            able = [option for option in (best_together(other, cluster), best_alone(other, cluster)) if option]
            if not able:
                continue
            best = max(able, key=speed)
            flags = {"--micro-batch": f"{micro_batch}"}
            flags |= {"--recompute": ""} if recompute and not spec.model.recompute else {}
            flags |= flags_for(best, other, cluster)
            if best.roster.sync not in (NO_SYNC, asked_sync(other.spec)):
                flags["--sync"] = str(best.roster.sync)
            told = f"{typed(flags)} fits, and trains {rate(best.tokens_per_s)} on {listed(best.roster.hosts)}."
            found.append(Advice(text=told, flags=flags, tokens_per_s=best.tokens_per_s))
            break
    if found:
        return [max(found, key=lambda one: one.tokens_per_s or 0.0)]
    held = 16 * job.shape.num_params()  # weights, gradients, AdamW's two moments, in fp32
    told = f"No micro-batch fits: weights, gradients and AdamW's moments alone are {size(held)} on every rank."
    sharded = [option for option in prediction.options if option.is_exact and fits_in(option, cluster)]
    if sharded:
        best = max(sharded, key=speed)
        need = max(rank.memory_bytes or 0 for rank in best.ranks)
        told += (
            f" {best.name} would fit, with {size(need)}, and train {rate(best.tokens_per_s)}; train cannot run it yet."
        )
    return [Advice(text=told)]


def _unknown_memory(prediction: Prediction) -> Advice:
    """Nobody said how much there is."""
    option = prediction.option(prediction.recommended or prediction.chosen)
    unknown = [name for name, host in prediction.cluster.hosts.items() if host.memory_bytes is None]
    need = max(rank.memory_bytes or 0 for rank in option.ranks)
    return Advice(text=f"Does it fit? How much memory {listed(unknown)} {'has' if len(unknown) == 1 else 'have'} is "
                       f"not known, and a rank needs {size(need)}: --memory 24GB says it, or memory in the fleet's "
                       "file; evener probe host measures it.")  # fmt: skip


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


def _larger_batch(prediction: Prediction, noise_tokens: float) -> Advice:
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
    batch = f"{best * job.spec.train.batch}"
    told = (
        f"By the noise scale that was measured, {count(noise_tokens)} tokens, --batch {batch} "
        f"needs {more:.2f} times as many tokens for the same loss and trains {faster:.2f} times as many a second: "
        f"{verdict}."
    )
    return Advice(text=told, flags={"--batch": batch}, tokens_per_s=faster * chosen.tokens_per_s)


def rate(tokens_per_s: float) -> str:
    """Tokens a second for a sentence.

    >>> rate(57.04), rate(3812.0)
    ('57 tokens/s', '3.8k tokens/s')
    """
    return f"{count(tokens_per_s) if tokens_per_s >= 999.5 else f'{tokens_per_s:.3g}'} tokens/s"
