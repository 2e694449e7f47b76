"""Break-even: the link, the batch and the hosts from which several machines are clearly faster than the best one alone.

Every answer is predicted for the flags that it recommends, over the best subset of hosts and the best shares, so that
a run with these flags gets the promised throughput.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

from evener.core.link import ETHERNET_SHARE, FABRICS, NAMED, Wire, parse_link
from evener.core.prediction import Cluster, Job, Option, Prediction
from evener.core.roster import DDP, SyncSpec
from evener.core.step import more_tokens
from evener.core.units import link_rate, listed, seconds
from evener.plan.cluster import only, with_wire
from evener.plan.cost import price
from evener.plan.divide import first_roster_by_speed
from evener.plan.options import (
    WORTH,
    alone_on_each,
    as_trained,
    asking_for,
    divided,
    fits_in,
    has_to_gain,
    host_sets,
    in_best_buckets,
    in_best_ring,
    larger,
    objection,
    speed,
)

BATCH_FACTORS = (2, 4, 8, 16, 32, 64)
SLOW_MBIT = (1.0, 10.0, 100.0)  # slower than any Ethernet that is sold today
BISECTIONS = 7  # between two named links
FAR_S = 1e-3  # one way: too long for hosts in one room
INSTANT = Wire(latency_s=0.0, bandwidth_Bps=1e18)


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence of advice, and the flags that follow it."""

    text: str
    flags: dict[str, str] = {}  # "--batch": "256"; empty: there is nothing to follow
    tokens_per_s: float | None = None  # predicted with these flags
    gain: float | None = None  # tokens_per_s over those of the fastest host alone, with these flags


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The best option over a given link between all hosts."""

    link: str
    payload_Bps: float
    best: Option  # on two hosts at least


class Teams:
    """Candidate Rosters on subsets of at least two hosts, to be predicted over any link."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        by_speed = divided(job, "auto")
        candidates = [(cluster.names, by_speed), *((names, by_speed) for names in host_sets(job, cluster))]
        if job.spec.machine.shares != "auto":
            candidates.append((cluster.names, job))
        rosters = []
        for names, candidate_job in candidates:
            ordered = in_best_ring(candidate_job, only(cluster, set(names)))
            rosters.append(first_roster_by_speed(candidate_job, cluster, ordered.seats))
        ideal = with_wire(cluster, INSTANT)
        bounds = [(price(job, ideal, roster).tokens_per_s, i, roster) for i, roster in enumerate(rosters)]
        self._rosters = [(bound, roster) for bound, _, roster in sorted(bounds, key=lambda b: (-b[0], b[1]))]

    def best(self, wire: Wire | None = None) -> Option | None:
        """Return the fastest option that fits, over this link or over the cluster's own; None if none fits."""
        cluster = with_wire(self.cluster, wire) if wire is not None else self.cluster
        best: Option | None = None
        for bound, roster in self._rosters:
            if best is not None and bound <= best.tokens_per_s:  # not faster over any link
                break
            option = in_best_buckets(self.job, cluster, roster)
            if fits_in(option, cluster) and (best is None or option.tokens_per_s > best.tokens_per_s):
                best = option
        return best


def able(job: Job, cluster: Cluster) -> Job:
    """Return the job itself, or the job with ddp where its strategy is rejected."""
    return asking_for(job, DDP) if objection(as_trained(job, cluster), job.spec.train.loss_budget / 100) else job


def best_together(job: Job, cluster: Cluster) -> Option | None:
    """Return the fastest option on at least two hosts; None if none fits."""
    return Teams(job, cluster).best()


def best_alone(job: Job, cluster: Cluster) -> Option | None:
    """Return the fastest single host; None if none can hold the model."""
    options = alone_on_each(job, cluster).values()
    return max((option for option in options if fits_in(option, cluster)), key=speed, default=None)


class OverLinks(Teams):
    """Candidate Rosters predicted over other links; the round trip between distant hosts stays as it is."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        super().__init__(able(job, cluster), with_wire(cluster, INSTANT))
        self.far = _far(cluster)
        self.named = [fabric for name in FABRICS if (fabric := self._over(name + self.far))]

    def over(self, text: str) -> Option | None:
        """Return the fastest option over a link in `--link` syntax; None if none fits."""
        return self.best(parse_link(text).wire)

    def _over(self, link: str) -> Fabric | None:
        best = self.over(link)
        if best is None:
            return None
        return Fabric(link=link, payload_Bps=parse_link(link).wire.bandwidth_Bps, best=best)


def in_bf16(job: Job, cluster: Cluster, fabric: Fabric) -> Option:
    """Predict the best option over this link with gradients in bf16."""
    bf16_roster = fabric.best.roster.agreeing_by(SyncSpec(kind="bf16"))
    return price(job, with_wire(cluster, parse_link(fabric.link).wire), bf16_roster)


def what_would_pay(prediction: Prediction, links: OverLinks) -> list[Advice]:
    """Return advice on the link and the batch from which several hosts are clearly faster than the best one alone."""
    job, cluster = links.job, prediction.cluster
    single, distributed = best_alone(job, cluster), best_together(job, cluster)
    if single is None or distributed is None:
        return []
    link = _link(cluster, links, single, distributed)
    advice = [link] if link is not None else []
    advice += [] if _pays(distributed, single) else [_batch(job, cluster)]
    flags = {"--sync": str(distributed.roster.sync)} if prediction.is_sync_ours or job is not prediction.job else {}
    return [msgspec.structs.replace(a, flags=a.flags | flags) if a.flags else a for a in advice]


def _pays(option: Option | None, alone: Option) -> bool:
    """Return whether the option is clearly faster than the best single host, by the gain that its loss requires."""
    return option is not None and option.tokens_per_s > max(WORTH, has_to_gain(option)) * alone.tokens_per_s


def _link(cluster: Cluster, links: OverLinks, alone: Option, now: Option) -> Advice | None:
    job, is_worthwhile = links.job, _pays(now, alone)
    named = [f for f in links.named if f.link.removesuffix(links.far) not in NAMED]
    break_even = _least_link(alone, named, links)
    rate, sync = link_rate(cluster.slowest_Bps), now.roster.sync
    if break_even is None:
        return None if is_worthwhile else Advice(text=_why_no_link(links, cluster, alone, now))
    text, option = break_even
    if not is_worthwhile:
        faster = [(f.link, f.best) for f in named if f.best.tokens_per_s >= WORTH * option.tokens_per_s]
        link, option = faster[0] if faster else break_even
    else:
        link = text
    flags = {"--link": link, **flags_for(option, job, cluster)}
    gain = option.tokens_per_s / alone.tokens_per_s
    sentence = f"{sync} breaks even at {text} between the hosts; their links carry {rate} of payload."
    if not is_worthwhile:
        sentence = f"With {sync} several hosts break even at {text} between them; their links carry {rate} of payload. "
        sentence += f"With {typed(flags)} {_trained(option, cluster)} {gain:.2f} times as much as {_one(alone)}."
    return Advice(text=sentence, flags=flags, tokens_per_s=option.tokens_per_s, gain=gain)


def _least_link(alone: Option, wired: Sequence[Fabric], links: OverLinks) -> tuple[str, Option] | None:
    """Return the slowest link (in `--link` syntax) over which several hosts are clearly faster, and their option.

    Bisects between the last named link that is too slow and the next one. None if the fastest link is too slow, or the
    slowest is fast enough.
    """
    low, result = 0.0, None
    slower = ((mbit, _sold(mbit) + links.far, links.over(_sold(mbit) + links.far)) for mbit in SLOW_MBIT)
    ladder = itertools.chain(slower, ((one.payload_Bps * 8e-6 / ETHERNET_SHARE, one.link, one.best) for one in wired))
    for mbit, text, option in ladder:
        if option is not None and _pays(option, alone):
            result = text, option
            break
        low = mbit
    if result is None or not low:
        return None
    high = mbit
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        text = _sold(middle) + links.far
        option = links.over(text)
        if option is not None and _pays(option, alone):
            high, result = middle, (text, option)
        else:
            low = middle
    return result


def _far(cluster: Cluster) -> str:
    """Return the round trip of distant hosts as a suffix for `--link`; "" for hosts in one room."""
    latency_s = max((wire.latency_s for wire in cluster.kinds_of_wires if not wire.is_shared), default=0.0)
    return f",{2e3 * latency_s:.4g}ms" if latency_s >= FAR_S else ""


def _sold(mbit: float) -> str:
    """Format a line rate in two digits, rounded up, as `--link` reads it.

    >>> _sold(2512.3), _sold(94.9), _sold(1000.0)
    ('2.6Gbit', '95Mbit', '1Gbit')
    """
    digits = 10 ** (math.floor(math.log10(mbit)) - 1)
    rounded = math.ceil(mbit / digits - 1e-9) * digits
    return f"{rounded / 1e3:g}Gbit" if rounded >= 1000 else f"{rounded:g}Mbit"


def _why_no_link(links: OverLinks, cluster: Cluster, alone: Option, now: Option) -> str:
    """Explain why even the fastest link would not make several hosts faster."""
    ideal = links.best(INSTANT) or now
    if _pays(ideal, alone):
        latency_s = parse_link(FABRICS[-1] + links.far).wire.latency_s
        return f"More bandwidth would not make several hosts faster: every message takes {seconds(latency_s)} one way."
    gain = ideal.tokens_per_s / alone.tokens_per_s
    return (f"No network would make several hosts faster: over an ideal one {_trained(ideal, cluster)} "
            f"{gain:.2f} times as much as {_one(alone)}.")  # fmt: skip


def _batch(job: Job, cluster: Cluster) -> Advice:
    """Advise on the smallest multiple of the batch with which several hosts are clearly faster.

    Where the noise scale was measured, compare the time to the same loss.
    """
    noise = job.noise_tokens
    for factor in BATCH_FACTORS:
        larger_job = larger(job, factor)
        single, distributed = best_alone(larger_job, cluster), best_together(larger_job, cluster)
        if single is None or distributed is None:
            continue
        gain = distributed.tokens_per_s / single.tokens_per_s
        if noise is not None:
            current = best_alone(job, cluster)
            assert current is not None
            gain = distributed.tokens_per_s / more_tokens(noise, job.tokens, factor) / current.tokens_per_s
        if gain > max(WORTH, has_to_gain(distributed)):
            flags = {"--batch": f"{larger_job.spec.train.batch}", **flags_for(distributed, larger_job, cluster)}
            text = f"Or with {typed(flags)}, {factor} times as many sequences a step: {_trained(distributed, cluster)} "
            text += f"{gain:.2f} times as much as {_one(single)}"
            text += ": another training run." if noise is None else ", measured to the same loss."
            return Advice(text=text, flags=flags, tokens_per_s=distributed.tokens_per_s, gain=gain)
    return Advice(text=f"A batch up to {BATCH_FACTORS[-1]} times as large would not make several hosts faster.")


def flags_for(option: Option, job: Job, cluster: Cluster) -> dict[str, str]:
    """Return the flags that select the option's hosts and shares."""
    hosts = option.roster.hosts
    flags = {} if len(hosts) == len(cluster.names) else {"--hosts": ",".join(hosts)}
    differs = job.spec.machine.shares != "auto" and (flags or not _is_as_asked(option, job, cluster))
    return flags | ({"--shares": "auto"} if differs else {})


def _is_as_asked(option: Option, job: Job, cluster: Cluster) -> bool:
    return option.roster.mean_shares == as_trained(job, cluster).roster.mean_shares


def typed(flags: dict[str, str]) -> str:
    """Format flags as they are added to a command.

    >>> typed({"--batch": "64", "--recompute": ""})
    '--batch 64 --recompute'
    """
    return " ".join(f"{flag} {value}".rstrip() for flag, value in flags.items())


def _trained(option: Option, cluster: Cluster) -> str:
    hosts = option.roster.hosts
    if len(hosts) < len(cluster.names):
        return f"{listed(hosts)} would train"
    return f"{'both' if len(hosts) == 2 else f'all {len(hosts)}'} would train"


def _one(alone: Option) -> str:
    return f"{alone.roster.hosts[0]} alone"
