"""What a run of a user's program showed of it, in the planner's terms: a job, and the manifest with its shares.

A rank's samples in a typical step are its share of the batch. Where the program's samples were not seen, each rank's
part of a step counts as one batch. A step is one forward and backward: how a rank divides its samples is the program's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.core.base.errors import UsageError
from evener.core.base.shell import quote_word
from evener.core.base.units import format_bytes, join_names
from evener.core.model.gradients import ProgramModel
from evener.core.run.prediction import Job, PlanOption, Prediction
from evener.core.run.roster import DDP, NO_SYNC, Roster
from evener.core.run.rundir import Manifest
from evener.core.run.step_cost import StepRecord, align_steps
from evener.core.run.step_statistics import summarize_steps
from evener.plan.choice.advice import format_loss_penalty, format_throughput
from evener.plan.choice.break_even import Advice
from evener.plan.choice.options import MIN_GAIN, predict_training
from evener.plan.choice.search import predict
from evener.plan.cost.collective_cost import sent_bytes
from evener.plan.cost.sync_traffic import GRADIENT_BYTES

MAX_EXCHANGES = 1.5  # bytes of a step over those of its gradients: beside them are sums of the loss and the like
PROGRAM_FLAGS = ("sync", "shares", "loss_budget")  # of train that have a meaning for a user's program


def program_job(run: str, manifest: Manifest, records: Sequence[Sequence[StepRecord]]) -> tuple[Job, Manifest]:
    """Return the job of a run of a user's program, and its manifest with the shares that ranks had.

    Raise UsageError if the run does not show what the program exchanges, or how it divides its batch.
    """
    roster, report = manifest.roster, f"evener report {quote_word(run)}"
    if any(member.is_gpu for member in roster.members):
        raise UsageError(f"{run}: what a step waits for on a GPU is not measured of a user's program", hint=report)
    if not manifest.gradients:
        raise UsageError(f"{run}: it does not show which gradients {manifest.program} exchanges, and in which order",
                         hint=f"a run of more than 3 steps with DistributedDataParallel does; {report}")  # fmt: skip
    steps = align_steps(dict(zip((member.rank for member in roster.members), records, strict=True)))
    ranks = summarize_steps(steps, manifest).ranks
    samples = [round(rank.tokens or 0.0) for rank in ranks]
    if not all(samples):
        raise UsageError(f"{run}: not every rank has trained on samples of its own", hint=report)
    once = sent_bytes("all_reduce", GRADIENT_BYTES * sum(tensor.num_params for tensor in manifest.gradients),
                      roster.world_size, roster.backend)  # fmt: skip
    sent = max(rank.bytes or 0 for rank in ranks)
    if roster.sync == DDP and sent > MAX_EXCHANGES * once:
        raise UsageError(
            f"{run}: a rank sends {format_bytes(sent)} a step, and its gradients once are {format_bytes(once)}",
            hint="only one exchange of DDP's gradients in a step can be predicted: accumulate under no_sync()",
        )
    members = [msgspec.structs.replace(member, share=num, micro_batch=num)
               for member, num in zip(roster.members, samples, strict=True)]  # fmt: skip
    peaks = manifest.result.peak_memory_bytes if manifest.result else []
    shape = ProgramModel(
        name=manifest.program or "program",
        unit="batches" if manifest.unit == "batches" else "samples",
        gradients=tuple(manifest.gradients),
        can_divide=manifest.can_divide,
        peak_memory_bytes=max(peaks, default=None),
    )
    spec = manifest.spec
    sync = DDP if roster.sync == NO_SYNC else roster.sync
    train = msgspec.structs.replace(spec.train, batch=sum(samples), micro_batch=sum(samples), sync=str(sync))
    shares = "equal" if len(set(samples)) == 1 else ":".join(map(str, samples))
    dtypes = {member.dtype for member in members}
    spec = msgspec.structs.replace(
        spec,
        train=train,
        machine=msgspec.structs.replace(spec.machine, shares=shares),
        model=msgspec.structs.replace(spec.model, dtype=dtypes.pop()) if len(dtypes) == 1 else spec.model,
    )
    job = Job(spec=spec, shape=shape)
    return job, msgspec.structs.replace(manifest, roster=msgspec.structs.replace(roster, members=members))


class FasterLaunch(msgspec.Struct, frozen=True):
    """How a program would train faster than with the chosen option."""

    option: PlanOption
    gain: float  # by prediction: what both leave out cancels
    tokens_per_s: float  # of the chosen option, times the gain


def faster_launch(prediction: Prediction) -> FasterLaunch | None:
    """Return the hosts, strategy and shares with which the program would train fastest; None if the chosen option is
    as fast.
    """
    job, cluster, chosen = prediction.job, prediction.cluster, prediction.option(prediction.chosen)
    spec = msgspec.structs.replace(
        job.spec,
        train=msgspec.structs.replace(job.spec.train, sync="auto"),
        machine=msgspec.structs.replace(job.spec.machine, shares="auto") if _can_divide(job) else job.spec.machine,
    )
    answer = predict(msgspec.structs.replace(job, spec=spec), cluster, keep_order=True)
    if not answer.recommended:
        return None
    best = answer.option(answer.recommended)
    gain = best.tokens_per_s / predict_training(job, cluster).tokens_per_s
    return FasterLaunch(best, gain, gain * chosen.tokens_per_s) if gain > MIN_GAIN else None


def _can_divide(job: Job) -> bool:
    return isinstance(job.shape, ProgramModel) and job.shape.can_divide


def advise_on_launch(prediction: Prediction) -> list[Advice]:
    """Advise on the option with which the program would train fastest, if it is not the chosen one."""
    faster, chosen = faster_launch(prediction), prediction.option(prediction.chosen)
    if faster is None:
        return []
    flags, before = launch_flags(faster.option), launch_flags(chosen)
    hosts = faster.option.roster.hosts
    how = f"with {flags}" if flags else f"without {before}" if before else ""
    where = f"on {join_names(hosts)} alone" if len(hosts) < len(chosen.roster.hosts) else ""
    rate = format_throughput(faster.tokens_per_s, prediction.job.unit)
    gain = f"{faster.gain:.2f} times as much{format_loss_penalty(faster.option)}"
    return [Advice(text=f"Launched {' '.join(filter(None, (where, how)))}, it would train {rate}, {gain}.")]


def launch_flags(option: PlanOption) -> str:
    """Return the flags of `evener launch` that select an option's strategy and shares."""
    roster = option.roster
    flags = [f"--sync {roster.sync}"] if roster.world_size > 1 and roster.sync != DDP else []
    if (shares := launch_shares(roster)) != "equal":
        flags.append(f"--shares {shares}")
    return " ".join(flags)


def launch_shares(roster: Roster) -> str:
    """Return the shares of a Roster in the form of --shares; those of large batches in three digits.

    >>> from evener.core.run.roster import Member
    >>> own = {"device": "cpu", "dtype": "fp32", "micro_batch": 1}
    >>> for shares in ((8, 8), (11, 5), (4068, 1932)):
    ...     members = [Member(rank=i, host="ab"[i], share=share, **own) for i, share in enumerate(shares)]
    ...     print(launch_shares(Roster(members=members, sync=DDP, backend="gloo")))
    equal
    11:5
    2.11:1
    """
    if roster.has_equal_shares:
        return "equal"
    if max(roster.shares) < 100 or not min(roster.shares):
        return ":".join(map(str, roster.shares))
    return ":".join(f"{share / min(roster.shares):.3g}" for share in roster.shares)
