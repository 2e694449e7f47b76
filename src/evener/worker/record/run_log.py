"""Run log: a run's manifest, and the events of its start, regroups, roster changes, warnings, end and failure."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from evener.core.base.errors import EvenerError
from evener.core.base.file_io import read_file, write_atomic
from evener.core.base.units import format_count, pluralize
from evener.core.base.version import __version__
from evener.core.cluster.host_info import HostInfo, peak_memory_bytes
from evener.core.model.corpus import TOKENIZER_FILES
from evener.core.model.shape import GPTShape
from evener.core.run.membership_epoch import EXIT_RUN_FAILED
from evener.core.run.peer_failure import is_peer_failure
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import Roster, format_shares
from evener.core.run.run_plan import report_run_to_launcher
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import SAMPLERS, Contention, Manifest, RankProcess, RunResult, code_hash
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepRecord
from evener.plan.choice.strategy_trial import StrategyComparison
from evener.plan.cost.penalty import CompressionErrorMonitor, task_of, why_no_longer_chosen
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.rank.user_errors import rank_exit_status


class RunLog:
    """One rank's side of the run log: rank 0 writes the events, and every `is_writer` rank the manifest.

    All ranks call every method but `log_failure` together.
    """

    def __init__(self, rundir: RunWriter, group: ProcessGroups, machine: HostInfo) -> None:
        self._dir, self._group, self._machine = rundir, group, machine
        self._manifest: Manifest | None = None

    def log_start(self, spec: RunSpec, resolved: ResolvedRun | None, roster: Roster, num_params: int, *,
              is_compiled: bool, first_step: int, is_resumed: bool, warning: str) -> None:  # fmt: skip
        """Write the manifest and log the start of a run whose next step is `first_step`; log `warning` as well."""
        group = self._group
        params_by_group = resolved.shape.params_by_group() if resolved else {"all": num_params}
        ranks, hosts = self._gather_ranks_and_hosts()
        versions = {
            "evener": __version__, "torch": str(torch.__version__), "python": platform.python_version()
        }  # fmt: skip
        before = self._dir.manifest() if self._dir.is_run() else None
        self._manifest = Manifest(
            verdict="running",
            started=before.started if before else time.time(),
            argv=sys.argv,
            versions=versions,
            spec=msgspec.structs.replace(spec, out=str(self._dir)),
            shape=resolved.shape if resolved else None,
            corpus=resolved.corpus if resolved else None,
            sampler=SAMPLERS[spec.train.sampling] if resolved else "own",
            code_hash=code_hash(),
            params_by_group=params_by_group,
            num_params=num_params,
            roster=roster,
            compiled=is_compiled,
            hosts=hosts,
            ranks=ranks,
        )
        if before is not None:
            since = (
                min(before.since, first_step)
                if before.performance_settings == self._manifest.performance_settings
                else first_step
            )
            self._manifest = msgspec.structs.replace(self._manifest, since=since)
        self._error_monitor = self._new_error_monitor(roster)
        if group.local_rank == 0:
            report_run_to_launcher(self._dir)
        if not group.is_admitted:
            return
        if group.is_writer:
            self._dir.write_manifest(self._manifest)
        if group.rank != 0:
            return
        if resolved is not None:  # a copy, so that the run can write text when its corpus is gone
            for file in (Path(resolved.corpus.path) / name for name in TOKENIZER_FILES):
                if file.exists():
                    write_atomic(self._dir.inside(file.name), read_file(file))
        self._dir.add_event("start", step=first_step, ranks=roster.world_size, sync=str(roster.sync))
        if group.membership_epoch is not None:
            self._log_epoch(first_step, epoch=roster.epoch)
        groups = ", ".join(f"{name} {format_count(num)}" for name, num in params_by_group.items() if num)
        print(f"{format_count(sum(params_by_group.values()))} parameters: {groups}")
        backend = "" if roster.backend == "none" else f"{roster.backend}, "
        resumed = f"; going on with step {first_step + 1}" if is_resumed else ""
        print(
            f"{_describe_ranks(ranks)}, {backend}{roster.dtypes_text}"
            f"{', compiled' if is_compiled else ''}; run directory {self._dir}{resumed}",
            flush=True,
        )
        if warning:
            self._log_warning(warning)
        self._warn_if_penalty_too_high(roster)

    def log_regroup(self, roster: Roster, step: int, lost_s: float) -> None:
        """Log the epoch that the surviving ranks have joined, before or in `step`; the regroup took `lost_s`."""
        assert self._manifest is not None
        was, (ranks, hosts) = self._manifest.roster, self._gather_ranks_and_hosts()
        mine = self._manifest.started, self._manifest.since
        started, since = self._group.all_gather(mine, tuple[float, int])[0]  # a new rank does not know them
        since = step if roster.sync != was.sync and self._group.rank == 0 else since
        self._manifest = msgspec.structs.replace(self._manifest, roster=roster, ranks=ranks, hosts=hosts,
                                                 started=started, since=since)  # fmt: skip
        self._error_monitor = self._new_error_monitor(roster)
        if self._group.is_writer:
            self._dir.write_manifest(self._manifest)
        if self._group.rank == 0:
            self._log_epoch(step, epoch=roster.epoch, lost_s=lost_s)
            if roster.world_size != was.world_size:
                self._warn_if_penalty_too_high(roster)
            if roster.sync != was.sync:  # decided in the epoch before
                self._log_sync_change(roster, step, was, "it was chosen before the hosts changed")

    def _gather_ranks_and_hosts(self) -> tuple[list[RankProcess], list[HostInfo]]:
        """Return the hosts, devices and processes of all ranks."""
        group = self._group
        on_gpu = group.device.type == "cuda"
        facts = RankProcess(
            rank=group.member_rank,
            host=self._machine.host,
            device=torch.cuda.get_device_name(group.device) if on_gpu else "cpu",
            threads=torch.get_num_threads(),
            pid=os.getpid(),
        )
        ranks, hosts = group.all_gather(facts, RankProcess), group.all_gather(self._machine, HostInfo)
        return ranks, list({host.host: host for host in hosts}.values())

    def _new_error_monitor(self, roster: Roster) -> CompressionErrorMonitor:
        assert self._manifest is not None
        return CompressionErrorMonitor(roster.sync, roster.world_size, task_of(self._manifest.shape))

    def _log_epoch(self, step: int, **facts: float) -> None:
        world = self._group.membership_epoch
        assert world is not None
        self._dir.add_event("world", step=step, number=world.number, hosts=world.hosts, why=world.why, **facts)

    def _log_warning(self, warning: str) -> None:
        self._dir.add_event("remark", what=warning)
        print(warning, flush=True)

    def _warn_if_penalty_too_high(self, roster: Roster) -> None:
        """Warn if --sync auto would no longer choose DiLoCo for this many ranks."""
        assert self._manifest is not None
        spec, shape, sync = self._manifest.spec, self._manifest.shape, roster.sync
        if spec.train.sync != "auto" or not isinstance(shape, GPTShape) or not sync.drifts:
            return
        if why := why_no_longer_chosen(roster, spec, shape):
            num_ranks = pluralize(roster.world_size, "rank")
            self._log_warning(f"--sync auto would not choose {sync} with {num_ranks}: {why}")

    def check_fidelity(self, records: Sequence[StepRecord]) -> None:
        """Log an event if a lossy strategy's error in these steps exceeds those its loss penalty was measured with."""
        for record in records if self._group.rank == 0 else ():
            error = None if record.fidelity is None else self._error_monitor.add_sample(record.fidelity.error)
            if error is None:
                continue
            sync, limit = self._error_monitor.sync, self._error_monitor.max_error
            what = "parameter differences" if sync.drifts else "gradients"
            why = (
                f"--sync {sync}: the sums of {what} are {error:.1%} off the exact sums; its loss penalty was measured "
                f"for up to {limit:.1%}: compare the loss with ddp's"
            )
            self._dir.add_event("sync.fidelity", step=record.step, error=error, why=why)
            print(f"step {record.step + 1}: {why}", flush=True)

    def log_roster_change(self, roster: Roster, previous: Roster) -> None:
        """Log a new roster: other shares, or another sync strategy. The latter goes into the manifest for a resume."""
        if roster.sync != previous.sync and self._group.is_writer:
            assert self._manifest is not None
            self._manifest = msgspec.structs.replace(self._manifest, roster=roster, since=roster.from_step)
            self._dir.write_manifest(self._manifest)
        if self._group.rank != 0:
            return
        if roster.sync != previous.sync:
            self._error_monitor = self._new_error_monitor(roster)
            self._log_sync_change(roster, roster.from_step, previous, roster.why)
        else:
            self._dir.add_event("rebalanced", step=roster.from_step, epoch=roster.epoch, shares=roster.mean_shares,
                                why=roster.why, is_trial=roster.is_trial)  # fmt: skip
            if not roster.is_trial:
                shares = format_shares(roster.mean_shares)
                print(f"step {roster.from_step + 1}: shares {shares}: {roster.why}", flush=True)

    def log_comparison(self, comparison: StrategyComparison, step: int) -> None:
        """Log how the strategies of a trial compare."""
        if self._group.rank == 0:
            self._dir.add_event("compared", step=step, why=str(comparison), **msgspec.to_builtins(comparison))
            print(f"step {step + 1}: --sync auto goes on with {comparison.chosen}; {comparison}", flush=True)

    def _log_sync_change(self, roster: Roster, step: int, previous: Roster, why: str) -> None:
        self._dir.add_event("rechosen", step=step, epoch=roster.epoch, sync=str(roster.sync), was=str(previous.sync),
                            why=why, is_trial=roster.is_trial)  # fmt: skip
        verb = "trying" if roster.is_trial else "changing to"
        print(f"step {step + 1}: {verb} {roster.sync} (before: {previous.sync}): {why}", flush=True)

    def log_finish(
        self,
        verdict: str,
        step: int,
        last_record: StepRecord | None,
        val_loss: float | None,
        replicas_agree: bool | None,
        contention: Contention | None,
    ) -> None:
        """Log the regular end of the run, and its result in the manifest."""
        on_gpu = self._group.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._group.device) if on_gpu else peak_memory_bytes()
        peaks = self._group.all_gather(peak, int)
        if self._group.is_writer:
            assert self._manifest is not None
            result = RunResult(
                steps=step,
                loss=last_record.loss if last_record else None,
                val_loss=val_loss,
                replicas_agree=replicas_agree,
                peak_memory_bytes=peaks,
            )
            self._dir.write_manifest(
                msgspec.structs.replace(
                    self._manifest, verdict=verdict, ended=time.time(), contention=contention, result=result
                )
            )
        if self._group.rank == 0:
            self._dir.add_event(verdict, step=step)
        self._group.barrier()

    def log_failure(self, error: BaseException) -> None:
        """Log that this rank failed: as a cause ("failure") or because a peer had gone ("run.peer-exit")."""
        event = "run.peer-exit" if is_peer_failure(error) else "failure"
        hint = error.hint if isinstance(error, EvenerError) else ""
        number, of_rank = self._group.member_rank, getattr(error, "failed_rank", None)
        with contextlib.suppress(OSError):  # the run directory may not exist yet, or the disk be full
            self._dir.add_event(event, rank=number, of=number if of_rank is None else of_rank, hint=hint,
                                error=str(error) or type(error).__name__, kind=type(error).__name__)  # fmt: skip
            ends = not self._group.has_dynamic_membership or (
                isinstance(error, EvenerError) and rank_exit_status(error) == EXIT_RUN_FAILED
            )
            if self._group.is_writer and self._manifest is not None and ends:
                self._dir.write_manifest(msgspec.structs.replace(self._manifest, verdict="failed", ended=time.time()))


def _describe_ranks(ranks: Sequence[RankProcess]) -> str:
    """Return a text such as `1 × NVIDIA H200, 8 threads a rank, 2 × cpu, 4 threads a rank`."""
    kinds = Counter((rank.device, rank.threads) for rank in ranks)
    return ", ".join(f"{num} × {device}, {threads} threads a rank" for (device, threads), num in kinds.items())
