"""FLOP/s of the ranks of a run, and their MFU: the share of what probing their hosts found for matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from evener.core.cluster.fleet_file import Fleet, Rates
from evener.core.model.flops import roof_s
from evener.core.model.shape import GPTShape
from evener.core.run.rundir import Manifest
from evener.core.run.step_statistics import RankSummary


class FlopRate(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one rank computes in a typical step, of which waiting and the exchange are a part."""

    flops_per_s: float
    mfu: float | None  # None: its host was not probed in these dtypes


def flop_rates(
    manifest: Manifest, ranks: Sequence[RankSummary], step_s: float | None, fleet: Fleet | None
) -> list[FlopRate | None]:
    """Return the rate of each rank; None where its FLOPs were not counted. `fleet`: what probing its hosts found."""
    rates: list[FlopRate | None] = []
    for rank in ranks:
        member, flops = manifest.roster.members[rank.rank], _flops(manifest, rank.rank)
        if not flops or not rank.tokens or not step_s:
            rates.append(None)
            continue
        probed = (fleet.rates.get(member.host, {}) if fleet else {}).get(member.device, Rates())
        least_s = roof_s(flops, probed.matmul_flops)
        rates.append(
            FlopRate(
                flops_per_s=sum(flops.values()) * rank.tokens / step_s,
                mfu=None if least_s is None else least_s * rank.tokens / step_s,
            )
        )
    return rates


def _flops(manifest: Manifest, rank: int) -> Mapping[str, float]:
    """Return the FLOPs of what the records count on a rank, by dtype; {} if they are not known."""
    if isinstance(manifest.shape, GPTShape):
        return {manifest.roster.members[rank].dtype: manifest.shape.flops_per_token()}
    return manifest.flops[rank].per_sample if rank < len(manifest.flops) else {}


def mfu_text(rates: Sequence[FlopRate | None]) -> str:
    """Return the MFU of ranks as text: "41%", "38% to 41%", or "not measured".

    >>> mfu_text([FlopRate(flops_per_s=1e9, mfu=0.41), FlopRate(flops_per_s=1e9, mfu=0.38)])
    '38% to 41%'
    """
    shares = sorted(rate.mfu for rate in rates if rate is not None and rate.mfu is not None)
    if not shares or len(shares) < len(rates):
        return "not measured"
    return " to ".join(dict.fromkeys(f"{share:.0%}" for share in (shares[0], shares[-1])))
