"""Break-even: the slowest link and the smallest batch with which several hosts are clearly faster than the best one.

Every answer is predicted for the flags that it recommends, over the best subset of hosts and the best shares, so that
a run with these flags gets the promised throughput.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from evener.core.base.units import format_bit_rate, format_seconds, join_names
from evener.core.cluster.link import ETHERNET_EFFICIENCY, FABRICS, NAMED_LINKS, LinkModel, parse_link
from evener.core.run.prediction import Cluster, Job, PlanOption, Prediction
from evener.core.run.roster import DDP, SyncSpec
from evener.core.run.step_cost import token_multiplier
from evener.plan.choice.cluster import subcluster, with_uniform_link
from evener.plan.choice.options import (
    MIN_GAIN,
    candidate_host_sets,
    fits_in_memory,
    job_with_larger_batch,
    job_with_shares,
    job_with_sync,
    option_throughput,
    predict_training,
    required_gain,
    single_host_options,
    why_strategy_rejected,
    with_best_bucket_size,
    with_best_ring_order,
)
from evener.plan.cost.cost_model import predict_step
from evener.plan.shares.initial_shares import initial_roster_by_speed

LARGER_BATCH_FACTORS = (2, 4, 8, 16, 32, 64)  # the smallest that makes several hosts faster is reported
SLOW_LINKS_MBIT = (1.0, 10.0, 100.0)  # slower than any Ethernet that is sold today
BISECTIONS = 7  # between two named links
WAN_LATENCY_S = 1e-3  # one way: too long for hosts in one room
IDEAL_LINK = LinkModel(latency_s=0.0, bandwidth_Bps=1e18)


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence of advice, and the command-line flags with which to follow it."""

    text: str
    flags: dict[str, str] = {}  # "--batch": "256"; empty: there is nothing to follow
    tokens_per_s: float | None = None  # predicted with these flags
    gain: float | None = None  # tokens_per_s over those of the fastest host alone, with these flags


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """A link between all hosts, and the fastest option over it."""

    link: str
    payload_Bps: float
    best: PlanOption  # on two hosts at least


class HostSetSearch:
    """Find the fastest of the candidate Rosters, each on a subset of at least two hosts, over any link."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        by_speed = job_with_shares(job, "auto")
        candidates = [
            (cluster.host_names, by_speed),
            *((names, by_speed) for names in candidate_host_sets(job, cluster)),
        ]
        if job.spec.machine.shares != "auto":
            candidates.append((cluster.host_names, job))
        rosters = []
        for names, candidate_job in candidates:
            ordered = with_best_ring_order(candidate_job, subcluster(cluster, set(names)))
            rosters.append(initial_roster_by_speed(candidate_job, cluster, ordered.slots))
        ideal = with_uniform_link(cluster, IDEAL_LINK)
        bounds = [(predict_step(job, ideal, roster).tokens_per_s, i, roster) for i, roster in enumerate(rosters)]
        self._rosters = [(bound, roster) for bound, _, roster in sorted(bounds, key=lambda b: (-b[0], b[1]))]

    def best(self, link: LinkModel | None = None) -> PlanOption | None:
        """Return the fastest option that fits into memory, with `link` between all hosts; None if none fits.

        Without `link`, predict over the cluster's links.
        """
        cluster = with_uniform_link(self.cluster, link) if link is not None else self.cluster
        best: PlanOption | None = None
        for bound, roster in self._rosters:
            if best is not None and bound <= best.tokens_per_s:  # not faster over any link
                break
            option = with_best_bucket_size(self.job, cluster, roster)
            if fits_in_memory(option, cluster) and (best is None or option.tokens_per_s > best.tokens_per_s):
                best = option
        return best


def job_with_runnable_sync(job: Job, cluster: Cluster) -> Job:
    """Return the job, with ddp in place of its strategy if that is rejected."""
    return (
        job_with_sync(job, DDP)
        if why_strategy_rejected(predict_training(job, cluster), job.spec.train.loss_budget / 100)
        else job
    )


def best_distributed(job: Job, cluster: Cluster) -> PlanOption | None:
    """Return the fastest option on at least two hosts that fits into memory; None if none fits."""
    return HostSetSearch(job, cluster).best()


def best_single_host(job: Job, cluster: Cluster) -> PlanOption | None:
    """Return the option of the fastest single host that can hold the model; None if none can."""
    options = single_host_options(job, cluster).values()
    return max((option for option in options if fits_in_memory(option, cluster)), key=option_throughput, default=None)


class LinkSearch(HostSetSearch):
    """Find the fastest Roster over other bandwidths; every link gets the longest round trip between distant hosts."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        super().__init__(job_with_runnable_sync(job, cluster), with_uniform_link(cluster, IDEAL_LINK))
        self.rtt_suffix = _rtt_suffix(cluster)
        self.fabrics = [fabric for name in FABRICS if (fabric := self._fabric(name + self.rtt_suffix))]

    def best_over_link(self, text: str) -> PlanOption | None:
        """Return the fastest option over a link in `--link` syntax; None if none fits into memory."""
        return self.best(parse_link(text).wire)

    def _fabric(self, link: str) -> Fabric | None:
        best = self.best_over_link(link)
        if best is None:
            return None
        return Fabric(link=link, payload_Bps=parse_link(link).wire.bandwidth_Bps, best=best)


def with_bf16_gradients(job: Job, cluster: Cluster, fabric: Fabric) -> PlanOption:
    """Predict the Roster of the fabric's best option over the fabric's link, with gradients sent in bf16."""
    bf16_roster = fabric.best.roster.replace_sync(SyncSpec(kind="bf16"))
    return predict_step(job, with_uniform_link(cluster, parse_link(fabric.link).wire), bf16_roster)


def break_even_advice(prediction: Prediction, links: LinkSearch) -> list[Advice]:
    """Return advice on the link and the batch from which several hosts are clearly faster than the best one alone."""
    job, cluster = links.job, prediction.cluster
    single, distributed = best_single_host(job, cluster), best_distributed(job, cluster)
    if single is None or distributed is None:
        return []
    link = _link_advice(cluster, links, single, distributed)
    advice = [link] if link is not None else []
    advice += [] if _is_worthwhile(distributed, single) else [_batch_advice(job, cluster)]
    flags = {"--sync": str(distributed.roster.sync)} if prediction.is_sync_ours or job is not prediction.job else {}
    return [msgspec.structs.replace(a, flags=a.flags | flags) if a.flags else a for a in advice]


def _is_worthwhile(option: PlanOption | None, single: PlanOption) -> bool:
    """Return whether the option exceeds the best single host by MIN_GAIN and by what its loss penalty requires."""
    return option is not None and option.tokens_per_s > max(MIN_GAIN, required_gain(option)) * single.tokens_per_s


def _link_advice(cluster: Cluster, links: LinkSearch, single: PlanOption, distributed: PlanOption) -> Advice | None:
    job, is_worthwhile = links.job, _is_worthwhile(distributed, single)
    named = [f for f in links.fabrics if f.link.removesuffix(links.rtt_suffix) not in NAMED_LINKS]
    break_even = _break_even_link(single, named, links)
    rate, sync = format_bit_rate(cluster.slowest_link_Bps), distributed.roster.sync
    if break_even is None:
        return None if is_worthwhile else Advice(text=_explain_no_link(links, cluster, single, distributed))
    text, option = break_even
    if not is_worthwhile:
        faster = [(f.link, f.best) for f in named if f.best.tokens_per_s >= MIN_GAIN * option.tokens_per_s]
        link, option = faster[0] if faster else break_even
    else:
        link = text
    flags = {"--link": link, **flags_for(option, job, cluster)}
    gain = option.tokens_per_s / single.tokens_per_s
    sentence = f"{sync} breaks even at {text} between the hosts; their links carry {rate} of payload."
    if not is_worthwhile:
        sentence = f"With {sync} several hosts break even at {text} between them; their links carry {rate} of payload. "
        sentence += (
            f"With {format_flags(flags)} {_format_would_train(option, cluster)} {gain:.2f} times as "
            f"much as {_format_single_host(single)}."
        )
    return Advice(text=sentence, flags=flags, tokens_per_s=option.tokens_per_s, gain=gain)


def _break_even_link(single: PlanOption, wired: Sequence[Fabric], links: LinkSearch) -> tuple[str, PlanOption] | None:
    """Return the slowest link (in `--link` syntax) over which several hosts are clearly faster than `single`, and the
    option over it.

    Bisect between the fastest listed link that is too slow and the next one. Return None if all listed links are too
    slow, or if even the slowest is fast enough.
    """
    low, result = 0.0, None
    slower = (
        (
            mbit,
            _format_line_rate(mbit) + links.rtt_suffix,
            links.best_over_link(_format_line_rate(mbit) + links.rtt_suffix),
        )
        for mbit in SLOW_LINKS_MBIT
    )
    ladder = itertools.chain(
        slower, ((one.payload_Bps * 8e-6 / ETHERNET_EFFICIENCY, one.link, one.best) for one in wired)
    )
    for mbit, text, option in ladder:
        if option is not None and _is_worthwhile(option, single):
            result = text, option
            break
        low = mbit
    if result is None or not low:
        return None
    high = mbit
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        text = _format_line_rate(middle) + links.rtt_suffix
        option = links.best_over_link(text)
        if option is not None and _is_worthwhile(option, single):
            high, result = middle, (text, option)
        else:
            low = middle
    return result


def _rtt_suffix(cluster: Cluster) -> str:
    """Return the longest round trip between hosts as a suffix for `--link`; "" if it is that of hosts in one room."""
    latency_s = max((wire.latency_s for wire in cluster.distinct_links if not wire.is_shared), default=0.0)
    return f",{2e3 * latency_s:.4g}ms" if latency_s >= WAN_LATENCY_S else ""


def _format_line_rate(mbit: float) -> str:
    """Format a line rate in two digits, rounded up, as `--link` reads it.

    >>> _format_line_rate(2512.3), _format_line_rate(94.9), _format_line_rate(1000.0)
    ('2.6Gbit', '95Mbit', '1Gbit')
    """
    digits = 10 ** (math.floor(math.log10(mbit)) - 1)
    rounded = math.ceil(mbit / digits - 1e-9) * digits
    return f"{rounded / 1e3:g}Gbit" if rounded >= 1000 else f"{rounded:g}Mbit"


def _explain_no_link(links: LinkSearch, cluster: Cluster, single: PlanOption, distributed: PlanOption) -> str:
    """Explain why even the fastest link would not make several hosts faster."""
    ideal = links.best(IDEAL_LINK) or distributed
    if _is_worthwhile(ideal, single):
        latency_s = parse_link(FABRICS[-1] + links.rtt_suffix).wire.latency_s
        return (
            f"More bandwidth would not make several hosts faster: every message takes "
            f"{format_seconds(latency_s)} one way."
        )
    gain = ideal.tokens_per_s / single.tokens_per_s
    return (f"No network would make several hosts faster: over an ideal one {_format_would_train(ideal, cluster)} "
            f"{gain:.2f} times as much as {_format_single_host(single)}.")  # fmt: skip


def _batch_advice(job: Job, cluster: Cluster) -> Advice:
    """Advise on the smallest multiple of the batch with which several hosts are clearly faster.

    Where the noise scale was measured, compare the time to the same loss.
    """
    noise = job.noise_tokens
    for factor in LARGER_BATCH_FACTORS:
        larger_job = job_with_larger_batch(job, factor)
        single, distributed = best_single_host(larger_job, cluster), best_distributed(larger_job, cluster)
        if single is None or distributed is None:
            continue
        gain = distributed.tokens_per_s / single.tokens_per_s
        if noise is not None:
            current = best_single_host(job, cluster)
            assert current is not None
            gain = distributed.tokens_per_s / token_multiplier(noise, job.tokens, factor) / current.tokens_per_s
        if gain > max(MIN_GAIN, required_gain(distributed)):
            flags = {"--batch": f"{larger_job.spec.train.batch}", **flags_for(distributed, larger_job, cluster)}
            text = (
                f"Or with {format_flags(flags)}, {factor} times as many sequences a step: "
                f"{_format_would_train(distributed, cluster)} "
            )
            text += f"{gain:.2f} times as much as {_format_single_host(single)}"
            text += ": another training run." if noise is None else ", measured to the same loss."
            return Advice(text=text, flags=flags, tokens_per_s=distributed.tokens_per_s, gain=gain)
    return Advice(text=f"A batch up to {LARGER_BATCH_FACTORS[-1]} times as large would not make several hosts faster.")


def flags_for(option: PlanOption, job: Job, cluster: Cluster) -> dict[str, str]:
    """Return the flags that select the option's hosts and shares."""
    hosts = option.roster.hosts
    flags = {} if len(hosts) == len(cluster.host_names) else {"--hosts": ",".join(hosts)}
    differs = job.spec.machine.shares != "auto" and (flags or not _has_default_shares(option, job, cluster))
    return flags | ({"--shares": "auto"} if differs else {})


def _has_default_shares(option: PlanOption, job: Job, cluster: Cluster) -> bool:
    return option.roster.mean_shares == predict_training(job, cluster).roster.mean_shares


def format_flags(flags: dict[str, str]) -> str:
    """Format flags for appending to a command.

    >>> format_flags({"--batch": "64", "--recompute": ""})
    '--batch 64 --recompute'
    """
    return " ".join(f"{flag} {value}".rstrip() for flag, value in flags.items())


def _format_would_train(option: PlanOption, cluster: Cluster) -> str:
    hosts = option.roster.hosts
    if len(hosts) < len(cluster.host_names):
        return f"{join_names(hosts)} would train"
    return f"{'both' if len(hosts) == 2 else f'all {len(hosts)}'} would train"


def _format_single_host(single: PlanOption) -> str:
    return f"{single.roster.hosts[0]} alone"
