"""Jobs, machines and their prices in few words, for whatever tests the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from evener.core.cluster.link import LinkModel
from evener.core.model.shape import PRESETS, GPTShape
from evener.core.run.prediction import EXACT_SOURCE, Cluster, Job, PlanOption
from evener.core.run.roster import SyncSpec, parse_sync
from evener.core.run.run_spec import parse_args
from evener.plan.choice.cluster import uniform_cluster
from evener.plan.cost.cost_model import predict_step
from evener.plan.cost.penalty import LossMeasurement, LossPenalty


def job_of(shape: GPTShape | None = None, **flags: Any) -> Job:
    """What `--batch 24 --model char …` asks for; the shape is the preset's if none is given."""
    spec = parse_args([f"--{name.replace('_', '-')}={value}" for name, value in flags.items()])
    return Job(spec=spec, shape=shape or PRESETS[spec.model.model])


def changed(job: Job, **flags: Any) -> Job:
    """The job with other flags."""
    spec = msgspec.to_builtins(job.spec)
    for section in ("model", "train", "machine"):
        spec[section] |= {name: value for name, value in flags.items() if name in spec[section]}
    return msgspec.structs.replace(job, spec=msgspec.convert(spec, type(job.spec)))


def cluster_of(*rates: float, wire: LinkModel, names: str = "abcdefgh", devices: tuple[str, ...] = ("cpu",),
               local: LinkModel | None = None, **more: Any) -> Cluster:  # fmt: skip
    """Hosts with these rates of each rank, alike in all else."""
    found = uniform_cluster(dict(zip(names, rates, strict=False)), wire, devices, local)
    return msgspec.structs.replace(
        found, hosts={name: msgspec.structs.replace(host, **more) for name, host in found.hosts.items()}
    )


def costing(costs: dict[str, float], others: float = 0.0) -> Callable[..., LossPenalty]:
    """In place of `loss_penalty`: what ways cost by their kind; what costs nothing is exact."""

    def penalty(sync: SyncSpec, *_: object) -> LossPenalty:
        cost = costs.get(sync.kind, others)
        return LossPenalty(cost, "me" if cost else EXACT_SOURCE)

    return penalty


SMALL, CHAR = 1_025_536, 10_745_088  # parameters of bench/loss.py's shapes, with the characters of tinyshakespeare


def loss_measured(sync: str, loss: float, *, margin: float = 0.0, num_params: int = SMALL, shares: str = "1:1",
                  batch: int = 16, steps: int = 2000, max_error: float | None = None) -> LossMeasurement:  # fmt: skip
    """Return a measurement as bench/loss.py writes it."""
    drifts = parse_sync(sync).drifts
    return LossMeasurement(
        sync=sync, shares=tuple(map(int, shares.split(":"))), num_params=num_params, penalty=loss, margin=margin,
        min_steps=steps if drifts else 0, min_tokens=batch * 256 if drifts else 0, max_error=max_error,
        source=f"{num_params / 1e6:.1f}M parameters, {shares}",
    )  # fmt: skip


def priced(job: Job, cluster: Cluster, sync: str | None = None) -> PlanOption:
    """On all rank slots, with this strategy instead of its own."""
    roster = job.initial_roster(cluster.slots)
    return predict_step(
        job, cluster, roster if sync is None else msgspec.structs.replace(roster, sync=parse_sync(sync))
    )
