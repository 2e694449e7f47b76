"""What would make more than one machine pay: another link, another batch, other hosts among them?

Every answer is priced as it would be asked for, over the best set of hosts and the best shares, so that whoever follows
it gets what was said.
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
BISECTIONS = 7  # between two links that have a name
FAR_S = 1e-3  # one way: no room is that large
INSTANT = Wire(latency_s=0.0, bandwidth_Bps=1e18)


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence for a person, and what to add to the command for what it promises."""

    text: str
    flags: dict[str, str] = {}  # "--batch": "256"; none: there is nothing to follow
    tokens_per_s: float | None = None  # what is trained then
    gain: float | None = None  # so many times what the fastest host alone trains then


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """What a link between all hosts would bring."""

    link: str
    payload_Bps: float
    best: Option  # of two hosts at least


class Teams:
    """Two hosts at least, and with which shares: sets that may be the fastest, over these links or over others."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        by_speed = divided(job, "auto")
        ways = [(cluster.names, by_speed), *((names, by_speed) for names in host_sets(job, cluster))]
        if job.spec.machine.shares != "auto":
            ways.append((cluster.names, job))
        rosters = []
        for names, way in ways:
            team = in_best_ring(way, only(cluster, set(names)))
            rosters.append(first_roster_by_speed(way, cluster, team.seats))
        instant = with_wire(cluster, INSTANT)
        most = [(price(job, instant, roster).tokens_per_s, i, roster) for i, roster in enumerate(rosters)]
        self._rosters = [(bound, roster) for bound, _, roster in sorted(most, key=lambda one: (-one[0], one[1]))]

    def best(self, wire: Wire | None = None) -> Option | None:
        """The fastest that fits, all joined by this wire, or by what they have; None if none fits."""
        cluster = with_wire(self.cluster, wire) if wire is not None else self.cluster
        best: Option | None = None
        for most, roster in self._rosters:
            if best is not None and most <= best.tokens_per_s:  # over no link is it faster
                break
            option = in_best_buckets(self.job, cluster, roster)
            if fits_in(option, cluster) and (best is None or option.tokens_per_s > best.tokens_per_s):
                best = option
        return best


def able(job: Job, cluster: Cluster) -> Job:
    """The job as it was asked for, or by ddp where something speaks against its strategy."""
    return asking_for(job, DDP) if objection(as_trained(job, cluster), job.spec.train.loss_budget / 100) else job


def best_together(job: Job, cluster: Cluster) -> Option | None:
    """The fastest way to train on two hosts at least; None if none fits."""
    return Teams(job, cluster).best()


def best_alone(job: Job, cluster: Cluster) -> Option | None:
    """The fastest host by itself; None if none can hold the model."""
    return max((one for one in alone_on_each(job, cluster).values() if fits_in(one, cluster)), key=speed, default=None)


class OverLinks(Teams):
    """The same, whatever links there are: what others would bring; hosts that are far from each other stay so."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        super().__init__(able(job, cluster), with_wire(cluster, INSTANT))
        self.far = _far(cluster)
        self.named = [found for name in FABRICS if (found := self._over(name + self.far))]

    def over(self, text: str) -> Option | None:
        """The fastest over the link that a person means."""
        return self.best(parse_link(text).wire)

    def _over(self, link: str) -> Fabric | None:
        best = self.over(link)
        if best is None:
            return None
        return Fabric(link=link, payload_Bps=parse_link(link).wire.bandwidth_Bps, best=best)


def in_bf16(job: Job, cluster: Cluster, fabric: Fabric) -> Option:
    """The same with gradients in two bytes."""
    narrow = fabric.best.roster.agreeing_by(SyncSpec(kind="bf16"))
    return price(job, with_wire(cluster, parse_link(fabric.link).wire), narrow)


def what_would_pay(prediction: Prediction, links: OverLinks) -> list[Advice]:
    """The link and the batch from which on several hosts are clearly faster than the best one alone."""
    job, cluster = links.job, prediction.cluster
    alone, now = best_alone(job, cluster), best_together(job, cluster)
    if alone is None or now is None:
        return []
    link = _link(cluster, links, alone, now)
    found = [link] if link is not None else []
    found += [] if _pays(now, alone) else [_batch(job, cluster)]
    told = {"--sync": str(now.roster.sync)} if prediction.is_sync_ours or job is not prediction.job else {}
    return [msgspec.structs.replace(one, flags=one.flags | told) if one.flags else one for one in found]


def _pays(option: Option | None, alone: Option) -> bool:
    """Is it clearly faster than the best host alone, as much as its loss asks for?"""
    return option is not None and option.tokens_per_s > max(WORTH, has_to_gain(option)) * alone.tokens_per_s


def _link(cluster: Cluster, links: OverLinks, alone: Option, now: Option) -> Advice | None:
    job, pays = links.job, _pays(now, alone)
    wired = [one for one in links.named if one.link.removesuffix(links.far) not in NAMED]
    least = _least_link(alone, wired, links)
    has, sync = link_rate(cluster.slowest_Bps), now.roster.sync
    if least is None:
        return None if pays else Advice(text=_why_no_link(links, cluster, alone, now))
    text, option = least
    if not pays:
        better = [(one.link, one.best) for one in wired if one.best.tokens_per_s >= WORTH * option.tokens_per_s]
        link, option = better[0] if better else least
    else:
        link = text
    flags = {"--link": link, **flags_for(option, job, cluster)}
    gain = option.tokens_per_s / alone.tokens_per_s
    told = f"{sync} pays from {text} between the hosts upwards; what they have carries {has} of payload."
    if not pays:
        told = f"With {sync} several hosts would pay from {text} between them upwards; what they have carries {has} of "
        told += f"payload. With {typed(flags)} {_trained(option, cluster)} {gain:.2f} times as much as {_one(alone)}."
    return Advice(text=told, flags=flags, tokens_per_s=option.tokens_per_s, gain=gain)


def _least_link(alone: Option, wired: Sequence[Fabric], links: OverLinks) -> tuple[str, Option] | None:
    """The slowest link, as it is sold, over which several hosts are clearly faster, and what they do over it.

    Between the last of those that have a name that is too slow for it and the next. None where the fastest of all is
    too slow, or the slowest of all is fast enough.
    """
    low, found = 0.0, None
    slower = ((mbit, _sold(mbit) + links.far, links.over(_sold(mbit) + links.far)) for mbit in SLOW_MBIT)
    ladder = itertools.chain(slower, ((one.payload_Bps * 8e-6 / ETHERNET_SHARE, one.link, one.best) for one in wired))
    for mbit, text, option in ladder:
        if option is not None and _pays(option, alone):
            found = text, option
            break
        low = mbit
    if found is None or not low:
        return None
    high = mbit
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        text = _sold(middle) + links.far
        option = links.over(text)
        if option is not None and _pays(option, alone):
            high, found = middle, (text, option)
        else:
            low = middle
    return found


def _far(cluster: Cluster) -> str:
    """The round trip that no faster link makes shorter, as `--link` reads it; nothing of hosts in one room."""
    latency_s = max((wire.latency_s for wire in cluster.kinds_of_wires if not wire.is_shared), default=0.0)
    return f",{2e3 * latency_s:.4g}ms" if latency_s >= FAR_S else ""


def _sold(mbit: float) -> str:
    """A line's rate in two digits, as `--link` reads it.

    >>> _sold(2512.3), _sold(94.9), _sold(1000.0)
    ('2.6Gbit', '95Mbit', '1Gbit')
    """
    digits = 10 ** (math.floor(math.log10(mbit)) - 1)
    rounded = math.ceil(mbit / digits - 1e-9) * digits
    return f"{rounded / 1e3:g}Gbit" if rounded >= 1000 else f"{rounded:g}Mbit"


def _why_no_link(links: OverLinks, cluster: Cluster, alone: Option, now: Option) -> str:
    """Where even the fastest link is of no use: whose fault is it?"""
    instant = links.best(INSTANT) or now
    if _pays(instant, alone):
        latency_s = parse_link(FABRICS[-1] + links.far).wire.latency_s
        return f"Bandwidth alone would not make several hosts pay: every message takes {seconds(latency_s)} one way."
    most = instant.tokens_per_s / alone.tokens_per_s
    return (f"No network would make several hosts pay: over one that takes no time {_trained(instant, cluster)} "
            f"{most:.2f} times as much as {_one(alone)}.")  # fmt: skip


def _batch(job: Job, cluster: Cluster) -> Advice:
    """The least multiple of the batch with which several hosts pay, to the same loss where the noise was measured."""
    noise = job.noise_tokens
    for factor in BATCH_FACTORS:
        more = larger(job, factor)
        alone, together = best_alone(more, cluster), best_together(more, cluster)
        if alone is None or together is None:
            continue
        gain = together.tokens_per_s / alone.tokens_per_s
        if noise is not None:
            small = best_alone(job, cluster)
            assert small is not None
            gain = together.tokens_per_s / more_tokens(noise, job.tokens, factor) / small.tokens_per_s
        if gain > max(WORTH, has_to_gain(together)):
            flags = {"--batch": f"{more.spec.train.batch}", **flags_for(together, more, cluster)}
            told = f"Or with {typed(flags)}, {factor} times as many sequences a step: {_trained(together, cluster)} "
            told += f"{gain:.2f} times as much as {_one(alone)}"
            told += ": another training run." if noise is None else ", counted until the same loss."
            return Advice(text=told, flags=flags, tokens_per_s=together.tokens_per_s, gain=gain)
    return Advice(text=f"A batch up to {BATCH_FACTORS[-1]} times as large would not make it pay.")


def flags_for(option: Option, job: Job, cluster: Cluster) -> dict[str, str]:
    """What to add to the command for these hosts and shares."""
    hosts = option.roster.hosts
    flags = {} if len(hosts) == len(cluster.names) else {"--hosts": ",".join(hosts)}
    differs = job.spec.machine.shares != "auto" and (flags or not _is_as_asked(option, job, cluster))
    return flags | ({"--shares": "auto"} if differs else {})


def _is_as_asked(option: Option, job: Job, cluster: Cluster) -> bool:
    return option.roster.mean_shares == as_trained(job, cluster).roster.mean_shares


def typed(flags: dict[str, str]) -> str:
    """As they are added to a command.

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
