"""Phrase a prediction as a verdict and advice: what to do, who is the straggler, and what would break even."""

from __future__ import annotations

import itertools
import math

import msgspec

from evener.core.base.units import (
    format_bit_rate,
    format_bytes,
    format_count,
    format_seconds,
    join_names,
    pluralize,
)
from evener.core.model.fine_tuning import FineTuning
from evener.core.model.gradients import ProgramModel
from evener.core.model.pretrained import PretrainedModel
from evener.core.run.prediction import Cluster, PlanOption, Prediction
from evener.core.run.roster import NO_SYNC, requested_sync
from evener.core.run.step_cost import token_multiplier
from evener.plan.choice.break_even import (
    Advice,
    LinkSearch,
    best_distributed,
    best_single_host,
    break_even_advice,
    flags_for,
    format_flags,
)
from evener.plan.choice.options import (
    MIN_GAIN,
    MIN_LOSSY_GAIN,
    SIMILAR_SPEED,
    explain_memory_shortage,
    fits_in_memory,
    job_with_larger_batch,
    option_throughput,
    penalty_of,
    pick_fastest,
    predict_training,
    required_gain,
    sharded_strategies,
    throughput_by_host,
    why_option_rejected,
    why_strategy_rejected,
)
from evener.plan.cost.penalty import format_loss

SMALL_EXPOSED = 0.05  # of a step: a faster link would gain no more than that
COMPARED_BATCH_FACTORS = (2, 4, 8, 16)  # the one that gains most is reported


def format_verdict(prediction: Prediction) -> str:
    """Return the verdict, one sentence that says what to do."""
    if not prediction.recommended:
        why = prediction.option(prediction.chosen).rejected_because
        return f"This cannot be trained here: {why}."
    best, chosen = prediction.option(prediction.recommended), prediction.option(prediction.chosen)
    hosts, its_hosts, unit = prediction.cluster.host_names, best.roster.hosts, prediction.job.unit
    taken = set(its_hosts)
    left_out = [name for name in hosts if name not in taken]
    everyone = "both hosts" if len(hosts) == 2 else f"all {len(hosts)} hosts"
    if len(hosts) == 1:
        ranks = pluralize(best.roster.world_size, "rank")
        return f"{hosts[0]} with {ranks} trains {format_throughput(best.tokens_per_s, unit)}."
    if not left_out:
        gain = f", {best.speedup_vs_best_host:.2f} times the fastest host alone" if best.speedup_vs_best_host else ""
        return (
            f"Train on {everyone} with {best.name}: "
            f"{format_throughput(best.tokens_per_s, unit)}{gain}{format_loss_penalty(best)}."
        )
    if explain_memory_shortage(chosen, prediction.cluster):
        return f"Use {join_names(its_hosts)} only. With {everyone} it {chosen.rejected_because}."
    with_all, fewer = format_throughput(chosen.tokens_per_s, unit), format_throughput(best.tokens_per_s, unit)
    if (why := why_strategy_rejected(chosen, prediction.job.spec.train.loss_budget / 100)) and option_throughput(
        chosen
    ) > option_throughput(best):
        return (
            f"Use {join_names(its_hosts)} only: {chosen.name} on {everyone} trains {with_all} versus "
            f"{fewer}, but {why}."
        )
    if chosen.tokens_per_s * MIN_GAIN > best.tokens_per_s:
        are, they = ("is", "it") if len(its_hosts) == 1 else ("are", "they")
        return f"{join_names(its_hosts)} {are} enough: {everyone} together train {with_all}, {they} alone {fewer}."
    speeds = throughput_by_host(prediction.job, prediction.cluster).values()
    if len(its_hosts) == 1 and (len(hosts) > 2 or min(speeds) > SIMILAR_SPEED * max(speeds)):
        return f"Don't distribute this: {its_hosts[0]} alone trains {fewer}, {everyone} {with_all}."
    return (
        f"Leave {join_names(left_out)} out: with {'it' if len(left_out) == 1 else 'them'} {with_all}, without {fewer}."
    )


def format_loss_penalty(option: PlanOption) -> str:
    """Return a clause with the measured loss penalty; "" for an exact strategy."""
    if option.is_exact or option.loss_penalty is None:
        return ""
    return f"; loss {format_loss_change(option)} at equal tokens ({option.loss_source})"


def format_loss_change(option: PlanOption) -> str:
    """Return the change of the loss, "+2.6% ± 0.6%"; "same" if exact, "?" if not measured."""
    if option.is_exact:
        return "same"
    return "?" if option.loss_penalty is None else format_loss(option.loss_penalty, option.loss_margin)


def collect_advice(prediction: Prediction, links: LinkSearch | None = None) -> list[Advice]:
    """Collect advice on the straggler, the break-even link and batch, memory, and other strategies.

    `links` holds the job's predictions over other links; they are computed if it is None.
    """
    chosen, cluster = prediction.option(prediction.chosen), prediction.cluster
    advice = []
    if len(chosen.ranks) > 1:
        advice.append(Advice(text=_describe_step(chosen)))
    if isinstance(prediction.job.shape, ProgramModel):
        return advice  # all else is for models that evener trains; see program_request.py
    if isinstance(prediction.job.shape, FineTuning) and len(chosen.roster.hosts) > 1:
        advice += _describe_traffic(chosen, prediction.job.shape.model, cluster)
    if not prediction.recommended:
        advice += advise_on_memory(prediction)
    elif len(cluster.host_names) > 1:
        advice += break_even_advice(prediction, links or LinkSearch(prediction.job, cluster))
    advice += _advise_on_shared_cores(prediction)
    advice += advise_on_sync(prediction)
    advice += advise_on_loss_budget(prediction)
    if any(host.memory_bytes is None for host in cluster.hosts.values()):
        advice.append(_advise_on_unknown_memory(prediction))
    if prediction.job.noise_tokens is not None and fits_in_memory(chosen, cluster):
        advice.append(_advise_on_larger_batch(prediction, prediction.job.noise_tokens))
    return [*advice, *(Advice(text=note) for note in prediction.notes)]


def advise_on_memory(prediction: Prediction) -> list[Advice]:
    """Advise on the fastest flags with which a job too large for memory fits: smaller micro-batches, or recomputation.

    If there are none, name the fastest sharded strategy that would fit.
    """
    job, cluster, unit = prediction.job, prediction.cluster, prediction.job.unit
    spec, advice = job.spec, []
    largest = max(member.micro_batch for member in prediction.option(prediction.chosen).roster.members)
    smaller = [largest >> i for i in range(1, largest.bit_length())]
    for recompute in (False, True)[spec.model.recompute :]:
        for micro_batch in [largest, *smaller] if recompute else smaller:
            model = msgspec.structs.replace(spec.model, recompute=recompute)
            train = msgspec.structs.replace(spec.train, micro_batch=micro_batch)
            variant = msgspec.structs.replace(job, spec=msgspec.structs.replace(spec, model=model, train=train))
            fitting = [
                option for option in (best_distributed(variant, cluster), best_single_host(variant, cluster)) if option
            ]
            if not fitting:
                continue
            best = max(fitting, key=option_throughput)
            flags = {"--micro-batch": f"{micro_batch}"}
            flags |= {"--recompute": ""} if recompute and not spec.model.recompute else {}
            flags |= flags_for(best, variant, cluster)
            if best.roster.sync not in (NO_SYNC, requested_sync(variant.spec)):
                flags["--sync"] = str(best.roster.sync)
            text = (
                f"{format_flags(flags)} fits, and trains {format_throughput(best.tokens_per_s, unit)} on "
                f"{join_names(best.roster.hosts)}."
            )
            advice.append(Advice(text=text, flags=flags, tokens_per_s=best.tokens_per_s))
            break
    if advice:
        return [max(advice, key=lambda a: a.tokens_per_s or 0.0)]
    held = 16 * job.shape.num_params()  # weights, gradients, AdamW's two moments, in fp32
    text = f"No micro-batch fits: weights, gradients and AdamW's moments alone are {format_bytes(held)} on every rank"
    if isinstance(job.shape, FineTuning):
        frozen = f", beside {format_count(job.shape.model.num_frozen)} frozen parameters"
        return [Advice(text=f"{text}{frozen if job.shape.model.num_frozen else '; --lora 16 needs less'}.")]
    return [_advise_on_sharding(prediction, f"{text}.")]


def _advise_on_sharding(prediction: Prediction, text: str) -> Advice:
    """Return `text` and the fastest flags with which a strategy fits that shards the weights, if there are any."""
    job, cluster = prediction.job, prediction.cluster
    largest = max(prediction.option(prediction.chosen).roster.shares)
    sizes = [largest >> i for i in range(largest.bit_length())]
    for recompute in (False, True)[job.spec.model.recompute :]:
        fitting: list[tuple[PlanOption, int]] = []
        for sync, micro_batch in itertools.product(sharded_strategies(cluster), sizes):
            model = msgspec.structs.replace(job.spec.model, recompute=recompute)
            train = msgspec.structs.replace(job.spec.train, sync=str(sync), micro_batch=micro_batch)
            variant = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, model=model, train=train))
            option = predict_training(variant, cluster)
            if fits_in_memory(option, cluster) and option.is_built:
                fitting.append((option, micro_batch))
        if fitting:
            best, micro_batch = max(fitting, key=lambda pair: option_throughput(pair[0]))
            flags = {"--sync": str(best.roster.sync), "--micro-batch": f"{micro_batch}"}
            flags |= {"--recompute": ""} if recompute and not job.spec.model.recompute else {}
            need = max(rank.memory_bytes or 0 for rank in best.ranks)
            speed = format_throughput(best.tokens_per_s, prediction.job.unit)
            text += f" {format_flags(flags)} fits, with {format_bytes(need)} on a rank, and trains {speed}."
            return Advice(text=text, flags=flags, tokens_per_s=best.tokens_per_s)
    return Advice(text=text)


def option_above_budget(prediction: Prediction) -> PlanOption | None:
    """Return the fastest option that a larger loss budget would allow; None if it would not be much faster.

    A budget of 0 is a decision: then there is none.
    """
    cluster, budget = prediction.cluster, prediction.job.spec.train.loss_budget / 100
    too_lossy = [option for option in prediction.options
                 if why_option_rejected(option, cluster, budget) and not why_option_rejected(option, cluster, math.inf)
                 and option.loss_penalty is not None]  # fmt: skip
    if not budget or not prediction.recommended or not too_lossy:
        return None
    recommended, most = prediction.option(prediction.recommended), max(map(option_throughput, too_lossy))
    if most < MIN_LOSSY_GAIN * recommended.tokens_per_s:
        return None
    near = [option for option in too_lossy if most < MIN_GAIN * option_throughput(option)]
    return min(near, key=lambda option: penalty_of(option).upper_end)


def faster_strategy(prediction: Prediction) -> PlanOption | None:
    """Return the fastest option with another strategy than the one asked for; None if it would not be faster."""
    cluster, loss_budget = prediction.cluster, prediction.job.spec.train.loss_budget / 100
    asked = prediction.option(prediction.chosen).roster.sync
    others = [option for option in prediction.options if option.roster.sync not in (asked, NO_SYNC)
              and not why_option_rejected(option, cluster, loss_budget)]  # fmt: skip
    best, recommended = pick_fastest(others), prediction.option(prediction.recommended or prediction.chosen)
    gain = 0.0 if best is None else best.tokens_per_s / required_gain(best) / recommended.tokens_per_s
    return best if gain > MIN_GAIN else None


def advise_on_sync(prediction: Prediction) -> list[Advice]:
    """Advise on a faster strategy than the one that the user asked for, if there is one."""
    best = None if prediction.is_sync_ours or not prediction.recommended else faster_strategy(prediction)
    return [] if best is None else [_advise_strategy(prediction, best)]


def advise_on_loss_budget(prediction: Prediction) -> list[Advice]:
    """Advise on the fastest strategy that a larger loss budget would allow, if there is one."""
    best = option_above_budget(prediction)
    if best is None:
        return []
    percent = math.ceil(1000 * penalty_of(best).upper_end - 1e-9) / 10
    return [_advise_strategy(prediction, best, f" --sync auto takes it with --loss-budget {percent:g}.")]


def _advise_strategy(prediction: Prediction, best: PlanOption, more: str = "") -> Advice:
    """Advise to take this option's strategy in place of the recommended one."""
    recommended, unit = prediction.option(prediction.recommended), prediction.job.unit
    flags = {"--sync": str(best.roster.sync)} | flags_for(best, prediction.job, prediction.cluster)
    text = (
        f"With {format_flags(flags)}, {join_names(best.roster.hosts)} would train "
        f"{format_throughput(best.tokens_per_s, unit)}, {best.tokens_per_s / recommended.tokens_per_s:.2f} times as "
        f"much{format_loss_penalty(best)}.{more}"
    )
    return Advice(text=text, flags=flags, tokens_per_s=best.tokens_per_s)


def _advise_on_shared_cores(prediction: Prediction) -> list[Advice]:
    hosts = prediction.cluster.hosts
    sharing = [name for name in prediction.cluster.host_names if {*hosts[name].shares_cores_with} & hosts.keys()]
    if not sharing:
        return []
    return [Advice(text=f"{join_names(sharing)} compute on the same cores of one machine: how fast one is depends on "
                   "what the others do meanwhile, and this prediction may not hold.")]  # fmt: skip


def _advise_on_unknown_memory(prediction: Prediction) -> Advice:
    """Advise on how to declare or measure memory sizes that are not known."""
    option = prediction.option(prediction.recommended or prediction.chosen)
    unknown = [name for name, host in prediction.cluster.hosts.items() if host.memory_bytes is None]
    need = max(rank.memory_bytes or 0 for rank in option.ranks)
    return Advice(
        text=f"Does it fit? A rank needs {format_bytes(need)}, but the memory of {join_names(unknown)} is not known. "
        "Declare it with --memory 24GB or in the fleet file, or measure it with evener probe "
        "host."
    )


def _describe_step(option: PlanOption) -> str:
    """Return a sentence on the step's time, its exposed communication, and the straggler that other ranks wait for."""
    slow, shares = option.straggler, option.roster.shares
    communication_s = option.straggler_cost.cost.exposed_sync_s or 0.0
    most_wait_s = max(rank.cost.wait_s or 0.0 for rank in option.ranks)
    hosts = "all hosts" if len(option.roster.hosts) > 1 else f"all ranks of {slow.host}"
    text = f"A step on {hosts} takes {format_seconds(option.step_s)}"
    share = communication_s / option.step_s
    if share > 0.005:
        text += (
            f", of which {format_seconds(communication_s)} ({share:.0%}) is communication that computing does not hide"
        )
    if most_wait_s > 0.01 * option.step_s and slow.share == min(shares) + 1:
        divided = f"{sum(shares)} sequences are not divided equally by {len(shares)}"
        return f"{text}. {divided}: others wait for {slow.host}."
    if most_wait_s > 0.05 * option.step_s:
        return (
            f"{text}. {slow.host} is the straggler: others wait up to {format_seconds(most_wait_s)} for it "
            f"in every step."
        )
    return f"{text}."


def _describe_traffic(option: PlanOption, model: PretrainedModel, cluster: Cluster) -> list[Advice]:
    """Describe what the hosts send each other where most weights are frozen: little, whatever the size of the model."""
    if not model.num_frozen or not option.bytes_per_rank:
        return []
    text = (
        f"Only the adapters travel: a rank sends {format_bytes(option.bytes_per_rank)} a step, and none of the "
        f"{format_count(model.num_frozen)} frozen parameters"
    )
    exposed_s = option.straggler_cost.cost.exposed_sync_s or 0.0
    if exposed_s < SMALL_EXPOSED * option.step_s:
        text += f", for which {format_bit_rate(cluster.slowest_link_Bps)} of payload are enough"
    return [Advice(text=f"{text}.")]


def _advise_on_larger_batch(prediction: Prediction, noise_tokens: float) -> Advice:
    """Advise on whether larger batches reach the same loss sooner: they need less communication, but more tokens."""
    job, cluster = prediction.job, prediction.cluster
    chosen = prediction.option(prediction.chosen)

    def rates(factor: int) -> tuple[float, float]:
        faster = predict_training(job_with_larger_batch(job, factor), cluster).tokens_per_s / chosen.tokens_per_s
        return faster, token_multiplier(noise_tokens, job.tokens, factor)

    found = {factor: rates(factor) for factor in COMPARED_BATCH_FACTORS}
    gains = {factor: faster / more for factor, (faster, more) in found.items()}
    best = max(gains, key=lambda factor: gains[factor])
    if gains[best] <= MIN_GAIN:  # then report the next larger batch
        best = COMPARED_BATCH_FACTORS[0]
    verdict = "that gains nothing"
    if not 1 / MIN_GAIN <= gains[best] <= MIN_GAIN:
        verdict = f"it gets there {'sooner' if gains[best] > 1 else 'later'}"
    faster, more = found[best]
    batch = f"{best * job.spec.train.batch}"
    text = (
        f"By the measured noise scale, {format_count(noise_tokens)} tokens, --batch {batch} "
        f"needs {more:.2f} times as many tokens for the same loss and trains {faster:.2f} times as many a second: "
        f"{verdict}."
    )
    return Advice(text=text, flags={"--batch": batch}, tokens_per_s=faster * chosen.tokens_per_s)


def format_throughput(tokens_per_s: float, unit: str = "tokens") -> str:
    """Format a throughput for a sentence.

    >>> format_throughput(57.04), format_throughput(3812.0)
    ('57 tokens/s', '3.8k tokens/s')
    """
    return f"{format_count(tokens_per_s) if tokens_per_s >= 999.5 else f'{tokens_per_s:.3g}'} {unit}/s"
