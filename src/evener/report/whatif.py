"""What would another set-up have brought: as it is predicted, and corrected by what this run has shown?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.core.prediction import Option
from evener.core.units import count, median, seconds
from evener.report.ranks import last_done
from evener.report.summary import Summary


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """By what a run shows a prediction to be wrong. Factors are measured over predicted; 1 where either is unknown."""

    compute: dict[str, float]  # by host, as the median of its ranks
    update: dict[str, float]  # by host
    data_s: dict[str, float]  # by host, seconds to add
    sync: float  # communication in flight


def correction(summary: Summary, option: Option) -> Correction:
    """What one run says about the rates with which it was predicted."""
    by_host: dict[str, list[int]] = {}
    for member in option.roster.members:
        by_host.setdefault(member.host, []).append(member.rank)

    def factor(ranks: list[int], part: str) -> float:
        pairs = [(getattr(option.ranks[i].cost, part), getattr(summary.ranks[i].typical, part)) for i in ranks]
        return median([took / planned for planned, took in pairs if planned and took]) or 1.0

    def extra_s(ranks: list[int]) -> float:
        pairs = [(option.ranks[i].cost.data_s, summary.ranks[i].typical.data_s) for i in ranks]
        return median([took - (planned or 0.0) for planned, took in pairs if took is not None]) or 0.0

    last = last_done(summary)
    in_flight_s = option.ranks[last.rank].sync_s
    return Correction(
        compute={host: factor(ranks, "compute_s") for host, ranks in by_host.items()},
        update={host: factor(ranks, "optimizer_s") for host, ranks in by_host.items()},
        data_s={host: extra_s(ranks) for host, ranks in by_host.items()},
        sync=last.sync_s / in_flight_s if last.sync_s and in_flight_s else 1.0,
    )


def corrected_step_s(option: Option, by: Correction) -> float:
    """The slowest rank's own work, and communication that is not hidden, each by what a run said about it.

    What backward hid grows with the lesser of computing and communication: no more can be hidden than there is, and no
    more than there is to hide behind. A host that took no part in that run keeps its prediction.
    """
    hosts = [member.host for member in option.roster.members]
    work = [
        max(0.0, (rank.cost.data_s or 0.0) + by.data_s.get(host, 0.0))
        + (rank.cost.compute_s or 0.0) * by.compute.get(host, 1.0)
        + (rank.cost.optimizer_s or 0.0) * by.update.get(host, 1.0)
        for host, rank in zip(hosts, option.ranks, strict=True)
    ]
    slowest = work.index(max(work))
    last = option.ranks[slowest]  # what it does not hide, all wait for
    hidden_s = last.sync_s - (last.cost.exposed_sync_s or 0.0)
    exposed_s = by.sync * last.sync_s - hidden_s * min(by.sync, by.compute.get(hosts[slowest], 1.0))
    return max(work) + max(0.0, exposed_s)


def what_if_table(
    options: Sequence[Option], current: Option, by: Correction | None = None
) -> tuple[list[str], list[list[str]]]:
    """Head and rows: this run's own prediction first, then every other option with its ratio to it in tokens/s.

    With a correction two columns more: the step and the ratio as they are with what this run has shown.
    """
    head = ["what if", "step", "tokens/s", "times this run", "loss beside ddp"]
    if by is not None:
        head[4:4] = ["step, corrected", "corrected, times this run"]
    rows = []
    for option in [current, *(each for each in options if each.name != current.name)]:
        row = [
            f"this run: {option.name}"
            if option is current
            else option.name + ("" if option.is_built else ", not built yet"),
            seconds(option.step_s),
            count(option.tokens_per_s),
            f"{option.tokens_per_s / current.tokens_per_s:.2f}",
            _penalty(option),
        ]
        if by is not None:
            step_s, own_s = corrected_step_s(option, by), corrected_step_s(current, by)
            tokens, own_tokens = (each.tokens_per_s * each.step_s for each in (option, current))
            row[4:4] = [seconds(step_s), f"{tokens / step_s / (own_tokens / own_s):.2f}" if step_s and own_s else "–"]
        rows.append(row)
    return head, rows


def _penalty(option: Option) -> str:
    if option.loss_penalty is None:
        return "not measured"
    return "the same" if option.is_exact else f"{100 * option.loss_penalty:+.1f}%".replace("-", "−")
