"""Training cost: estimate the hours, electricity and money of training on so many tokens, and the uncertainty.

hours = tokens / (tokens/s) / 3600    kWh = hours · Σ watts / 1000    money = hours · Σ price of a host, or of its power
"""

from __future__ import annotations

import re

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.units import parse_count
from evener.core.cluster.hardware import parse_hardware
from evener.core.run.prediction import Cluster, HostRates, Job, PlanOption, RateBasis
from evener.core.run.run_spec import RunSpec

# Relative uncertainty of a step, by the basis of its compute rate. *Measured*: of the 80 runs that count in
# bench/prediction.jsonl 77 were within 10 % where hosts and links were probed. The others are *assumptions*: rates that
# people quote for their machines vary by a seventh with heat and load; rates derived from another model by FLOPs alone
# are off by up to a quarter; and published models reach an MFU of 0.3 to 0.6 where 0.5 is assumed.
UNCERTAINTY: dict[RateBasis, float] = {"measured": 0.10, "declared": 0.15, "derived": 0.25, "assumed": 0.40}
UNMEASURED_LINK_UNCERTAINTY = 0.20  # of communication over links that were not measured: *assumption*
OFFER_PATTERN = re.compile(r"(\d{1,4})\s*x\s*([^@]+?)\s*(?:@\s*(\d+(?:\.\d+)?))?")


class TrainingCost(msgspec.Struct, frozen=True, kw_only=True):
    """The time, energy and money of training so many tokens with one option."""

    where: str  # name of an option, or an offer
    tokens: float
    tokens_per_s: float
    hours: float | None  # None: it does not fit
    spread: float  # relative uncertainty of the following figures: 0.1 is ± 10 %
    kwh: float | None  # None: a host's power is not known
    money: float | None  # None: a host's price is not known
    why_not: str = ""  # why it cannot be trained there


class RentalOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A machine for rent."""

    num_gpus: int
    gpu: str
    price_per_h: float | None  # of the whole machine

    def __str__(self) -> str:
        price = f" at {self.price_per_h:g} an hour" if self.price_per_h is not None else ""
        return f"{self.num_gpus} × {self.gpu}{price}"


def estimate_training_cost(
    option: PlanOption, cluster: Cluster, tokens: float, price_per_kwh: float | None, where: str = ""
) -> TrainingCost:
    """Estimate the training cost of an option, on the hosts that take part in it."""
    hosts = [cluster.hosts[name] for name in option.roster.hosts]
    hours = tokens / option.tokens_per_s / 3600
    watts = [host.watts for host in hosts if host.watts is not None]
    kwh = hours * sum(watts) / 1000 if len(watts) == len(hosts) else None
    costs = [_price_per_h(host, price_per_kwh) for host in hosts]
    known = [cost for cost in costs if cost is not None]
    return TrainingCost(where=where or option.name, tokens=tokens, tokens_per_s=option.tokens_per_s, hours=hours,
                spread=uncertainty(option, cluster), kwh=kwh,
                money=hours * sum(known) if len(known) == len(costs) else None)  # fmt: skip


def _price_per_h(host: HostRates, price_per_kwh: float | None) -> float | None:
    """Return the price of a host per hour: its rent, which includes electricity, or else its electricity."""
    if host.price_per_h is not None:
        return host.price_per_h
    return None if host.watts is None or price_per_kwh is None else host.watts / 1000 * price_per_kwh


def uncertainty(option: PlanOption, cluster: Cluster) -> float:
    """Return the relative uncertainty of the option's step time: the mean of those of compute and exposed
    communication, weighted by their fractions of the step.
    """
    exposed = (option.straggler_cost.cost.exposed_sync_s or 0.0) / option.step_s
    computing = max(UNCERTAINTY[cluster.hosts[name].basis] for name in option.roster.hosts)
    link = UNCERTAINTY["measured"] if cluster.are_links_measured else UNMEASURED_LINK_UNCERTAINTY
    return (1 - exposed) * computing + exposed * link


def parse_tokens(text: str) -> float:
    """Parse a number of tokens.

    >>> parse_tokens("2.5B"), parse_tokens("300k"), parse_tokens("1e9")
    (2500000000.0, 300000.0, 1000000000.0)
    """
    tokens = parse_count(text) or 0.0
    if not 1 <= tokens <= 1e18:
        raise UsageError(f"--tokens {text}: expected a number of tokens", hint="2.5B, 300M")
    return tokens


def total_tokens(spec: RunSpec, job: Job, tokens: str | None) -> float:
    """Return the tokens to train on: --tokens, or else those of the run's steps."""
    return parse_tokens(tokens) if tokens is not None else float(spec.train.steps * job.tokens)


def parse_offers(text: str) -> list[RentalOffer]:
    """Parse machines for rent as GPUs and price per hour: "1xh100@2.5,8xh100@20".

    >>> parse_offers("8xh100@20, 1x4090")
    [RentalOffer(num_gpus=8, gpu='h100', price_per_h=20.0), RentalOffer(num_gpus=1, gpu='4090', price_per_h=None)]
    """
    offers = []
    for word in text.split(","):
        matched = OFFER_PATTERN.fullmatch(word.strip())
        if matched is None or not 1 <= int(matched[1]) <= 64:
            raise UsageError(f"--rent {text}: expected GPUs and their price an hour", hint="1xh100@2.5,8xh100@20")
        price = float(matched[3]) if matched[3] else None
        try:
            parse_hardware(matched[2])
        except UsageError as error:
            raise UsageError(f"--rent {text}: {str(error).removeprefix('--gpu ')}", hint=error.hint) from None
        offers.append(RentalOffer(num_gpus=int(matched[1]), gpu=matched[2], price_per_h=price))
    return offers
