"""Key figures, curves and tables of one run while it trains, recomputed from its `RunReader`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evener.core.base.units import format_bytes, format_count, format_seconds, format_si, median, pluralize
from evener.core.cluster.host_info import HostInfo
from evener.core.model.shape import GPTShape
from evener.core.run.progress import WINDOW_STEPS, seconds_left, window_steps
from evener.core.run.rundir import Manifest
from evener.core.run.step_cost import StepCost, align_steps
from evener.core.run.step_statistics import RankSummary, median_step_s, min_sync_s
from evener.report.explain.predicted_vs_measured import format_relative_difference
from evener.report.pages.host_vitals_table import host_table
from evener.report.pages.html_template import KeyFigure
from evener.report.read.event_log import EventText, describe_event
from evener.report.read.flop_rates import flop_rates, mfu_text
from evener.report.read.recorded_run import RecordedRun, val_losses
from evener.report.read.run_summary import RunSummary
from evener.watch.run_health import RunHealth, current_prediction
from evener.watch.run_reader import RunReader

MAX_EVENTS = 100
MAX_STRIPS = 16


@dataclass(frozen=True)
class StepStrip:
    """One rank's newest steps, phase by phase."""

    name: str
    mean_cost: StepCost  # their mean
    steps: list[tuple[int, StepCost]]


# --- figures ----------------------------------------------------------------------------------------------------------


def tokens_per_step(reader: RunReader) -> float | None:
    """Return the tokens of one global batch: from the manifest, else from the newest records; None if unknown."""
    manifest = reader.manifest
    if manifest is not None and isinstance(manifest.shape, GPTShape):
        return float(manifest.spec.train.batch * manifest.shape.block_size)
    last = reader.curves.last_record
    if last is None:
        return None
    newest = [records[-1] for records in reader.curves.newest.values() if records]
    return sum(record.tokens for record in newest if record.step >= last.step - 1) or None


def typical_step_s(reader: RunReader) -> float | None:
    """Return the median step time, as in the report: of the newest steps, or of all of them if the run is over."""
    manifest = reader.manifest
    if reader.is_over and (median_s := reader.median_step_s()) is not None:
        return median_s
    every, since = (manifest.roster.sync.every, manifest.since) if manifest else (1, 0)
    newest = [record for record in reader.curves.leader_records if record.step >= since][-window_steps(every) :]
    return median_step_s(newest, every, newest[0].step - since if newest else 0)


def tokens_per_s(reader: RunReader) -> float | None:
    """Return the tokens per second of a typical step."""
    tokens, took_s = tokens_per_step(reader), typical_step_s(reader)
    return tokens / took_s if tokens and took_s else None


def rank_cost(reader: RunReader, rank: int) -> StepCost:
    """Return a rank's mean step cost over its newest steps, or over all steps of a run that is over."""
    if rank not in reader.curves.newest:
        return StepCost()
    return reader.curves.mean_cost(rank) if reader.is_over else reader.curves.recent_cost(rank, WINDOW_STEPS)


def communication_share(reader: RunReader) -> float | None:
    """Return the share of step time, averaged over ranks, spent communicating or waiting; None for a single rank."""
    costs = [rank_cost(reader, rank) for rank in reader.curves.newest]
    total_s = sum(cost.total_s for cost in costs)
    if len(reader.curves.newest) < 2 or not total_s:
        return None
    return sum((cost.exposed_sync_s or 0.0) + (cost.wait_s or 0.0) for cost in costs) / total_s


def time_left_s(reader: RunReader) -> float | None:
    """Return the estimated seconds until the run ends; None if unknown or over."""
    manifest, last, each_s = reader.manifest, reader.curves.last_record, typical_step_s(reader)
    if manifest is None or last is None or each_s is None or reader.is_over or manifest.planned_steps is None:
        return None
    began = [float(event["time"]) for event in reader.events if event.get("event") == "start"]
    spent_s = last.ended - (began[-1] if began else manifest.started)
    train = manifest.spec.train
    return seconds_left(each_s, max(0, manifest.planned_steps - reader.curves.steps_done), train.max_s, spent_s)


def newest_loss(reader: RunReader) -> float | None:
    """Return the loss of the last step whose loss was a number."""
    last, means = reader.curves.last_record, reader.curves.shared_series["loss"].points().means
    return last.loss if last is not None and last.loss is not None else means[-1] if means else None


def recorded_run(reader: RunReader, state: str) -> RecordedRun | None:
    """Return the figures and curves as a report shows them, except that rates are those of the newest steps while the
    run trains; None without a manifest.
    """
    manifest, curves, step_s = reader.manifest, reader.curves, typical_step_s(reader)
    if manifest is None:
        return None
    losses = val_losses(manifest, reader.events)
    ranks = [_rank_summary(reader, index, member.rank) for index, member in enumerate(manifest.roster.members)]
    tokens, syncs_s = tokens_per_step(reader) or 0.0, [min_sync_s(by_rank) for by_rank in align_steps(curves.newest)]
    summary = RunSummary(
        run_dir=str(reader.rundir),
        manifest=manifest,
        num_steps=curves.steps_done,
        tokens_read=curves.steps_done * tokens,
        tokens_per_step=round(tokens),
        step_p50_s=step_s,
        step_p95_s=None,
        tokens_per_s=tokens / step_s if tokens and step_s else None,
        sync_p50_s=median([sync_s for sync_s in syncs_s if sync_s is not None]),
        sync_p95_s=None,
        ranks=ranks,
        flop_rates=flop_rates(manifest, ranks, step_s, reader.fleet),
        losses={curves.steps_done - 1: newest_loss(reader)},
        val_loss=losses[-1][1] if losses else None,
        prediction=reader.plan.prediction if reader.plan else None,
    )
    return RecordedRun(summary, curves, losses, state)


def _rank_summary(reader: RunReader, index: int, rank: int) -> RankSummary:
    newest = reader.curves.newest.get(rank, ())
    sent_bytes = [record.bytes for record in newest]
    return RankSummary(
        rank=index,
        tokens=median([record.tokens for record in newest]),
        typical=rank_cost(reader, rank),
        bytes=round(sum(sent_bytes) / len(sent_bytes)) if sent_bytes else None,
        sync_s=None,
        cpus=None,
    )


def progress_share(reader: RunReader) -> float | None:
    """Return the share of the run that is done, by steps or by its time limit, whichever is greater.

    None while a program of the user's own goes on: only it knows when it ends.
    """
    manifest, last = reader.manifest, reader.curves.last_record
    if manifest is not None and manifest.planned_steps is None and not reader.is_over:
        return None
    if manifest is None or last is None or manifest.planned_steps is None:
        return 1.0 if reader.is_over and last is not None else 0.0
    remaining_s = time_left_s(reader)
    spent_s = reader.curves.train_time_s
    by_steps = reader.curves.steps_done / manifest.planned_steps
    if manifest.spec.train.max_s is None or remaining_s is None:
        return min(1.0, by_steps)
    return min(1.0, max(by_steps, spent_s / (spent_s + remaining_s) if spent_s else 0.0))


def key_figures(reader: RunReader, health: RunHealth) -> list[KeyFigure]:
    """Return the key figures at the top of the page."""
    run = recorded_run(reader, health.state)
    if run is None:
        return []
    manifest, option, share = run.summary.manifest, current_prediction(reader), communication_share(reader)
    rate, each_s, loss = run.summary.tokens_per_s, run.summary.step_p50_s, run.summary.last_loss
    val_loss, at = None, ""
    no_plan = "not predicted: run evener probe first" if manifest.program is None else "not predicted"
    if run.val_losses and run.best_val_loss is not None:
        step, val_loss = run.val_losses[-1]
        is_best = val_loss <= run.best_val_loss
        at = f"after step {step:,}" + (", the best" if is_best else f"; best {run.best_val_loss:.4f}")
    of_what = "of all steps" if reader.is_over else "of the newest steps"
    shown = [
        KeyFigure("loss", None if loss is None else f"{loss:.4f}", f"after {pluralize(run.summary.num_steps, 'step')}"),
        KeyFigure("validation loss", None if val_loss is None else f"{val_loss:.4f}", at),
        KeyFigure(
            f"{run.summary.unit}/s",
            None if rate is None else format_count(rate),
            _predicted_note(rate, option.tokens_per_s, format_count) if option else no_plan,
        ),
        KeyFigure(
            "step",
            None if each_s is None else format_seconds(each_s),
            _predicted_note(each_s, option.step_s, format_seconds) if option else f"median {of_what}",
        ),
        KeyFigure(
            "communication",
            None if share is None else f"{share:.0%}",
            f"{of_what}, waiting included" + _bytes_sent(reader),
        ),
    ]
    if known := [rate.flops_per_s for rate in run.summary.flop_rates if rate is not None]:
        mfu = f"MFU {mfu_text(run.summary.flop_rates)}" + (", of all ranks together" if len(known) > 1 else "")
        shown.append(KeyFigure("FLOP/s", format_si(sum(known)), mfu))
    if health.is_over:
        took = None if manifest.ended is None else format_seconds(manifest.ended - manifest.started)
        shown.append(KeyFigure("took", took))
    elif manifest.planned_steps is not None:
        remaining_s = time_left_s(reader)
        shown.append(KeyFigure("left", None if remaining_s is None else format_seconds(remaining_s)))
    return shown if manifest.world_size > 1 else [fact for fact in shown if fact.name != "communication"]


def _predicted_note(measured: float | None, expected: float, format_value: Callable[[float], str]) -> str:
    return f"predicted {format_value(expected)}" + (
        "" if measured is None else f", {format_relative_difference(measured / expected - 1)}"
    )


def _bytes_sent(reader: RunReader) -> str:
    last = reader.curves.last_record
    return f"; a rank sends {format_bytes(last.bytes)}" if last is not None and last.bytes else ""


# --- ranks and hosts --------------------------------------------------------------------------------------------------


def rank_strips(reader: RunReader) -> list[StepStrip]:
    """Return the newest steps of each rank, up to MAX_STRIPS ranks."""
    manifest = reader.manifest
    return [
        StepStrip(
            manifest.roster.rank_label(rank) if manifest else f"rank {rank}",
            reader.curves.recent_cost(rank, WINDOW_STEPS),
            [(record.step, record.cost) for record in records],
        )
        for rank, records in sorted(reader.curves.newest.items())[:MAX_STRIPS]
        if records
    ]


FRESH_VITALS_S = 60.0  # generous, because host clocks differ
HOST_COLUMNS = ["host", "ranks", "share", "arithmetic", "compute", "machine", "now"]


def host_rows(reader: RunReader) -> list[list[str]]:
    """Return a row per host: its ranks, share of the global batch, dtype, compute time, hardware and membership."""
    manifest = reader.manifest
    if manifest is None:
        return []
    shares, present = _current_shares(reader, manifest), _current_hosts(reader, manifest)
    machines = {machine.host: machine for machine in manifest.hosts}
    rows = []
    for host in dict.fromkeys([*manifest.roster.hosts, *present]):
        members = [(i, member) for i, member in enumerate(manifest.roster.members) if member.host == host]
        share = sum(shares[i] for i, _ in members if i < len(shares))
        compute_times_s = [mean.compute_s for _, member in members if member.rank in reader.curves.newest
                    and (mean := rank_cost(reader, member.rank)).compute_s is not None]  # fmt: skip
        machine = machines.get(host)
        rows.append([
            host,
            ", ".join(str(member.rank) for _, member in members),
            f"{share:g} of {manifest.roster.batch}" if members and manifest.program is None else "",
            ", ".join(dict.fromkeys(member.dtype for _, member in members)),
            format_seconds(max(compute_times_s)) if compute_times_s else "not measured",
            f"{machine.cpu}, {pluralize(machine.cores, 'core')}, {_memory_text(machine)}" if machine else "",
            "took part" if reader.is_over else "takes part" if host in present else "is away",
        ])  # fmt: skip
    return rows


def host_vitals_table(reader: RunReader, now: float) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of the hosts' newest vitals; traffic is shown next to the measured link bandwidth, if any."""
    prediction = reader.plan.prediction if reader.plan else None
    fresh = {host: [vitals] for host, vitals in reader.vitals.items()
             if now - vitals.time < FRESH_VITALS_S and not reader.is_over}  # fmt: skip
    head, rows = host_table(fresh)
    if prediction is not None and "sent" in head:
        bandwidths_Bps = {host: max(wire.bandwidth_Bps for wire in wires.values())
                 for host, wires in prediction.cluster.wires.items() if wires}  # fmt: skip
        column = head.index("sent")
        for row in rows:
            if row[0] in bandwidths_Bps and row[column] != "–":
                row[column] += f" of {format_bytes(bandwidths_Bps[row[0]])}/s"
    return ["host", *head[1:]], rows


def _memory_text(machine: HostInfo) -> str:
    return "memory not measured" if machine.memory_bytes is None else format_bytes(machine.memory_bytes)


def _current_shares(reader: RunReader, manifest: Manifest) -> list[float]:
    """Return each member's sequences per step, from the newest rebalance since the membership last changed."""
    for event in reversed(reader.events):
        shares = event.get("shares")
        if event.get("event") == "rebalanced" and isinstance(shares, list) and len(shares) == manifest.world_size:
            return [float(share) for share in shares if isinstance(share, int | float)]
        if event.get("event") in ("start", "world", "rechosen"):
            break
    return manifest.roster.mean_shares


def _current_hosts(reader: RunReader, manifest: Manifest) -> list[str]:
    """Return the hosts of the newest membership epoch, or all hosts of the roster if there was no change."""
    for event in reversed(reader.events):
        if event.get("event") == "world" and isinstance(event.get("hosts"), list):
            return [str(host) for host in event["hosts"]]
        if event.get("event") == "start":
            break
    return manifest.roster.hosts


def event_texts(reader: RunReader) -> list[EventText]:
    """Return the newest events as text, newest first."""
    manifest = reader.manifest
    if manifest is None:
        return [EventText(None, str(event["event"]), str(event.get("error") or event.get("what") or ""),
                     str(event.get("hint") or ""), is_bad=event["event"] == "failure")
                for event in reversed(reader.events[-MAX_EVENTS:])]  # fmt: skip
    return [describe_event(event, manifest) for event in reversed(reader.events[-MAX_EVENTS:])]


def run_descriptions(reader: RunReader) -> list[str]:
    """Return the model, the corpus, the hosts, the sync strategy and the dtypes, each as a phrase."""
    manifest = reader.manifest
    if manifest is None:
        return []
    roster = manifest.roster
    size = f"({format_count(manifest.num_params)} parameters)"
    if manifest.program is not None:
        hosts = f"{pluralize(manifest.world_size, 'process')} on {', '.join(roster.hosts)}"
        return [f"{manifest.program} {size}", hosts, roster.dtypes_text]
    return [
        f"{manifest.spec.model.name if manifest.shape else 'custom model'} {size}",
        manifest.corpus.name if manifest.corpus else manifest.spec.data.data,
        f"{pluralize(manifest.world_size, 'process')} on {', '.join(roster.hosts)}",
        *([f"--sync {roster.sync}"] if manifest.world_size > 1 else []),
        roster.dtypes_text,
    ]
