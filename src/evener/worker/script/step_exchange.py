"""Write the records and the manifest of a launched program, beside the program and without a collective of its group.

A thread of each rank publishes the blocked times of its newest steps in the launcher's store once a second, reads those
of the others, and writes each step once those of all ranks are known:

    evener/steps/RANK/N      the N-th list of (blocked seconds, loss, tokens) of a rank's steps, in order
    evener/rank/RANK         its process, host and model, which rank 0 writes into the manifest
    evener/facts/RANK        what its first steps trained with, which rank 0 compares
    evener/flops/RANK        the FLOPs of one of its steps, which rank 0 writes into the manifest
    evener/batch_norms/RANK  batch normalization when it first evaluated, which rank 0 compares
    evener/replicas/RANK/N   the N-th sample of its DDP models, which rank 0 compares

If a rank does not publish any more, the others write their last steps without a division of the blocked time.
When the ranks restart because a host was lost, steps go on from the last that any of them has recorded.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.errors import EvenerError
from evener.core.base.file_io import LineFile
from evener.core.base.version import __version__
from evener.core.cluster.host_info import HostInfo, local_host_info, peak_memory_bytes
from evener.core.model.flops import StepFlops
from evener.core.model.gradients import GradientTensor, OwnCollectives
from evener.core.run.membership_epoch import has_dynamic_membership, read_rendezvous
from evener.core.run.roster import NO_SYNC, Backend, Dtype, Member, Roster, parse_sync
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import Manifest, RankProcess, RunResult, code_hash
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepRecord, split_blocked
from evener.core.script.training_facts import (
    ReplicaSample,
    TrainingMistake,
    compare_batch_norms,
    compare_facts,
    compare_replicas,
)
from evener.core.script.variables import PROGRAM_VARIABLE
from evener.node.remote.environment import hide_secrets
from evener.worker.record.host_monitor import start_host_monitor
from evener.worker.script.report import run_rank, warn
from evener.worker.script.training_checks import TrainingChecks

INTERVAL_S = 1.0
RANKS_PER_S = 16  # ranks whose lists a rank looks for in a second
KEPT_LISTS = 300  # of a rank's newest lists in the store
RECORDS_TAIL_BYTES = 1 << 16  # of a rank's newest steps
MAX_PENDING = 10_000  # steps that wait for other ranks
DTYPES: dict[str, Dtype] = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}  # of the weights; others are fp32
STORE_TIMEOUT_S = 30.0
LAST_STEPS_S = 3.0  # to receive the others' last steps when the program ends


class ScriptRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank as the manifest describes it, which rank 0 writes for all."""

    process: RankProcess
    host: HostInfo
    dtype: Dtype
    num_params: int
    num_steps: int  # that it has recorded before this start
    device: str  # as of a Member
    share: int  # its samples in the first step; 1: not known
    can_divide: bool  # whether its batches come from where --shares can divide them


class StepExchange:
    """Writes `steps/rank-R.jsonl`, and on rank 0 the manifest."""

    def __init__(self, rundir: RunWriter, rank: int, world_size: int, sync: str, checks: TrainingChecks) -> None:
        """`sync`: how gradients of DDP models are summed."""
        self._started = time.time()  # of the program
        self._checks = checks
        # What each rank states once, and what rank 0, which is yet to have it of all, does with it.
        self._statements: dict[str, tuple[Callable[[], Any], Callable[[Sequence[Any]], list[TrainingMistake]]]] = {
            "facts": (lambda: checks.facts, compare_facts),
            "batch_norms": (lambda: checks.batch_norms, compare_batch_norms),
            "flops": (lambda: self._flops, self._keep_flops),
        }
        self._collectives = OwnCollectives()
        self._flops: StepFlops | None = None  # of this rank; None: not yet counted
        self._flops_by_rank: list[StepFlops] = []  # on rank 0
        self._num_samples = self._num_compared = 0  # of replicas
        self._replicas_agree: bool | None = None  # None: not compared
        self.sync = parse_sync(sync)
        self._dir, self._rank, self._world_size = rundir, rank, world_size
        self._added: deque[StepRecord] = deque()  # by the program, not yet published
        self._pending: deque[StepRecord] = deque()  # published, and not yet known of all ranks
        self._received: list[deque[tuple[float, float | None, float]]] = [deque() for _ in range(world_size)]
        self._num_read = [0] * world_size  # lists of each rank that were read
        self._num_published = 0
        self._about: ScriptRank | None = None
        self._manifest: Manifest | None = None
        self._last: StepRecord | None = None
        self._peaks: list[int] = []
        self._unit: Literal["samples", "batches"] = "samples"
        self._ending, self._has_ended = threading.Event(), False
        self._file: LineFile | None = None
        self._gradients: list[GradientTensor] = []
        self._epoch = read_rendezvous().epoch if has_dynamic_membership() else None
        self._first_step: int | None = None  # None: not all ranks are known yet
        self._thread = threading.Thread(target=self._run, name="evener-steps", daemon=True)

    def describe_model(self, optimizer: Any, num_samples: int, *, can_divide: bool) -> None:
        """Describe this rank by the first optimizer of the program, before its first update; begin to write.

        `num_samples`: of its first step; 0 if they were not seen: then each rank's part of a step counts as one batch.
        """
        self._unit = "samples" if num_samples else "batches"
        import torch

        params = [param for group in optimizer.param_groups for param in group["params"]]
        device = params[0].device if params else torch.device("cpu")
        self._about = ScriptRank(
            process=RankProcess(
                rank=run_rank(),
                host=local_host_info().host,
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                threads=torch.get_num_threads(),
                pid=os.getpid(),
            ),
            host=local_host_info(),
            dtype=DTYPES.get(str(params[0].dtype) if params else "", "fp32"),
            num_params=sum(param.numel() for param in params),
            device=f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device.type == "cuda" else "cpu",
            share=max(1, num_samples),
            can_divide=can_divide,
            num_steps=1 + max([-1, *(record.step for record in self._recorded())]),
        )
        if os.environ.get("LOCAL_RANK", "0") == "0":
            start_host_monitor(self._dir.vitals_path(self._about.host.host), has_gpu=device.type == "cuda")
        self._thread.start()

    def set_gradients(self, gradients: list[GradientTensor]) -> None:
        """Take the gradients of a step, in the order in which backward completed them, for the manifest."""
        self._gradients = gradients

    def set_collectives(self, collectives: OwnCollectives) -> None:
        """Take the collectives that the program itself called in a step, for the manifest."""
        self._collectives = collectives

    def set_flops(self, flops: StepFlops) -> None:
        """Take the FLOPs of a step of this rank."""
        self._flops = flops

    def _keep_flops(self, ranks: Sequence[StepFlops]) -> list[TrainingMistake]:
        self._flops_by_rank = list(ranks)
        return []

    def step_number(self, step: int) -> int:
        """Return the number in the run of a step that this start of the program has counted."""
        if self._first_step is None and self._about is not None:  # not all ranks are known yet
            return self._about.num_steps + step
        return (self._first_step or 0) + step

    def _recorded(self) -> list[StepRecord]:
        """Return the newest steps that this rank recorded before it was restarted."""
        if self._epoch is not None and self._dir.steps_path(run_rank()).exists():
            with contextlib.suppress(EvenerError):  # a damaged file
                return self._dir.records(run_rank(), RECORDS_TAIL_BYTES)
        return []

    def add(self, record: StepRecord) -> None:
        """Add a step of this rank."""
        if not self._has_ended:
            self._added.append(record)

    def close(self, *, is_finished: bool) -> None:
        """Write the last steps and, on rank 0, the end of the run."""
        if self._about is None:
            return
        self._ending.set()
        self._thread.join(LAST_STEPS_S + INTERVAL_S)
        if self._manifest is not None and is_finished:
            last = self._last
            result = RunResult(
                steps=last.step + 1 if last else 0,
                loss=last.loss if last else None,
                val_loss=None,
                replicas_agree=self._replicas_agree,
                peak_memory_bytes=self._peaks,
            )
            self._dir.write_manifest(
                msgspec.structs.replace(self._manifest, verdict="finished", ended=time.time(), result=result)
            )
            self._dir.add_event("finished", step=result.steps)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        interval_s = max(INTERVAL_S, self._world_size / RANKS_PER_S)
        try:
            store = self._connect()
            self._file = LineFile(self._dir.steps_path(run_rank()))
            self._publish_rank(store)
            while not self._ending.wait(interval_s):
                self._learn_ranks(store)
                self._exchange(store)
                self._exchange_statements(store)
                self._compare_replicas(store)
                self._update_manifest()
            deadline = time.monotonic() + LAST_STEPS_S
            self._learn_ranks(store)
            self._exchange(store)
            self._checks.close()
            self._exchange_statements(store)
            self._compare_replicas(store)
            while (self._pending or self._misses_statements()) and time.monotonic() < deadline:
                time.sleep(INTERVAL_S / 20)
                self._exchange(store)
                self._exchange_statements(store)
                self._compare_replicas(store)
            self._update_manifest()
            while self._pending:
                self._write(self._pending.popleft())
            self._file.close()
            self._peaks = self._exchange_peaks(store, deadline)
        except (OSError, RuntimeError, msgspec.MsgspecError):  # a full disk; the store, and so the run, is gone; or
            pass  # the program has written into it
        finally:
            self._has_ended = True
            self._added.clear()
            self._pending.clear()

    def _update_manifest(self) -> None:
        """Add the gradients, collectives and FLOPs to the manifest, once they are known."""
        if self._manifest is None:
            return
        manifest = msgspec.structs.replace(
            self._manifest, gradients=self._gradients, collectives=self._collectives, flops=self._flops_by_rank
        )
        if manifest != self._manifest:
            self._manifest = manifest
            self._dir.write_manifest(manifest)

    def _exchange_peaks(self, store: Any, deadline: float) -> list[int]:
        """Return the peak memory of each rank, or [] if not all have ended in time."""
        own = peak_memory_bytes()
        if store is None:
            return [own]
        store.set(f"peak/{self._rank}", str(own))
        keys = [f"peak/{rank}" for rank in range(self._world_size)]
        while not store.check(keys):
            if self._rank > 0 or time.monotonic() > deadline:
                return []
            time.sleep(INTERVAL_S / 20)
        return [int(store.get(key)) for key in keys]

    def _exchange_statements(self, store: Any) -> None:
        """Publish what this rank has stated; on rank 0 use it with what the others have."""
        for name, (state, use) in list(self._statements.items()):
            stated = state()
            others = [f"{name}/{rank}" for rank in range(1, self._world_size)]
            if stated is None or (self._rank == 0 and others and not store.check(others)):
                continue
            del self._statements[name]
            if self._rank > 0:
                store.set(f"{name}/{self._rank}", msgspec.json.encode(stated).decode())
                continue
            for mistake in use([stated, *(from_json(store.get(key), type(stated)) for key in others)]):
                warn(mistake.error, mistake.hint)

    def _compare_replicas(self, store: Any) -> None:
        """Publish samples of this rank's DDP models; on rank 0 compare those of all ranks, as they arrive."""
        while store is not None and self._checks.replicas:
            sample = self._checks.replicas.popleft()
            store.set(f"replicas/{self._rank}/{self._num_samples}", msgspec.json.encode(sample).decode())
            self._num_samples += 1
        while self._rank == 0 and self._num_compared < self._num_samples:
            keys = [f"replicas/{rank}/{self._num_compared}" for rank in range(self._world_size)]
            if not store.check(keys):
                return
            samples = [from_json(store.get(key), ReplicaSample) for key in keys]
            mistake = compare_replicas(samples)
            if mistake is not None and self._replicas_agree is not False:
                warn(mistake.error, mistake.hint)
            self._replicas_agree = mistake is None and self._replicas_agree is not False
            self._num_compared += 1
            for key in keys:
                store.delete_key(key)

    def _misses_statements(self) -> bool:
        """Return whether rank 0 has yet to compare what the ranks trained with, or another has yet to publish it."""
        is_sampled = self._rank == 0 and self._num_compared < self._num_samples
        return is_sampled or any(state() is not None for state, _ in self._statements.values())

    def _connect(self) -> Any:
        """Return a connection of this thread to the launcher's store; None for a single rank."""
        if self._world_size == 1:
            return None
        from torch.distributed import PrefixStore, TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, None, False, timedelta(seconds=STORE_TIMEOUT_S), wait_for_workers=False)
        return PrefixStore("evener", store)

    def _publish_rank(self, store: Any) -> None:
        assert self._about is not None
        if store is not None:
            store.set(f"rank/{self._rank}", msgspec.json.encode(self._about).decode())

    def _learn_ranks(self, store: Any) -> None:
        """Once all ranks have updated a model, know from which step they go on; on rank 0 write the manifest."""
        assert self._about is not None
        keys = [f"rank/{rank}" for rank in range(self._world_size)]
        if self._first_step is not None or (store is not None and not store.check(keys)):
            return
        ranks = [self._about] if store is None else [from_json(store.get(key), ScriptRank) for key in keys]
        self._first_step = max(one.num_steps for one in ranks)
        if self._rank == 0:
            self._write_manifest(ranks, self._first_step)

    def _write_manifest(self, ranks: list[ScriptRank], first_step: int) -> None:
        import torch

        members = [
            Member(
                rank=one.process.rank,
                host=one.process.host,
                device=one.device,
                dtype=one.dtype,
                share=one.share,
                micro_batch=one.share,
            )
            for one in ranks
        ]
        backend: Backend = "none" if len(ranks) == 1 else "nccl" if torch.cuda.is_available() else "gloo"
        roster = Roster(
            members=members,
            sync=self.sync if len(ranks) > 1 else NO_SYNC,
            backend=backend,
            epoch=self._epoch.number if self._epoch else 0,
            from_step=first_step,
        )
        versions = {"evener": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
        num_params = ranks[0].num_params
        words = _program_words()
        self._manifest = Manifest(
            verdict="running",
            started=self._started,
            argv=words,
            program=words[1] if words[0] == "-m" and len(words) > 1 else os.path.basename(words[0]),
            unit=self._unit,
            versions=versions,
            spec=RunSpec(out=str(self._dir)),
            shape=None,
            corpus=None,
            sampler="own",
            code_hash=code_hash(),
            params_by_group={"all": num_params},
            num_params=num_params,
            roster=roster,
            compiled=False,
            hosts=list({one.host.host: one.host for one in ranks}.values()),
            ranks=[one.process for one in ranks],
            can_divide=all(one.can_divide for one in ranks),
            gradients=self._gradients,
            collectives=self._collectives,
            flops=self._flops_by_rank,
        )
        self._dir.write_manifest(self._manifest)
        if first_step == 0:
            self._dir.add_event("start", step=0, ranks=len(ranks), sync=str(roster.sync))
        if self._epoch is not None:
            epoch = self._epoch
            self._dir.add_event("world", step=first_step, number=epoch.number, hosts=epoch.hosts, why=epoch.why)

    def _exchange(self, store: Any) -> None:
        """Publish the newest steps, read those of the others, and write what all ranks have."""
        new = [self._added.popleft() for _ in range(len(self._added))]
        self._pending += new
        if store is None:
            while self._pending:
                self._write(self._pending.popleft())
            return
        if new:
            figures = [(record.cost.exposed_sync_s, record.loss, record.tokens) for record in new]
            store.set(f"steps/{self._rank}/{self._num_published}", msgspec.json.encode(figures).decode())
            self._num_published += 1
            if self._num_published > KEPT_LISTS:  # all others have read it, or never will
                store.delete_key(f"steps/{self._rank}/{self._num_published - KEPT_LISTS - 1}")
        for rank in range(self._world_size):
            while store.check([key := f"steps/{rank}/{self._num_read[rank]}"]):
                self._received[rank] += from_json(store.get(key), list[tuple[float, float | None, float]])
                self._num_read[rank] += 1
        while self._pending and self._first_step is not None and all(self._received):
            figures = [received.popleft() for received in self._received]
            exposed_s, wait_s = split_blocked([blocked_s or 0.0 for blocked_s, _, _ in figures])[self._rank]
            losses = [(loss, tokens or 1.0) for _, loss, tokens in figures if loss is not None]
            record = self._pending.popleft()
            cost = msgspec.structs.replace(record.cost, exposed_sync_s=exposed_s, wait_s=wait_s)
            loss = statistics.fmean(*zip(*losses, strict=True)) if losses else None  # weighted by their tokens
            self._write(msgspec.structs.replace(record, cost=cost, loss=loss))
        while len(self._pending) > MAX_PENDING:  # another rank does not step any more
            self._write(self._pending.popleft())

    def _write(self, record: StepRecord) -> None:
        assert self._file is not None
        number = self._epoch.number if self._epoch else 0
        self._last = msgspec.structs.replace(record, step=self.step_number(record.step), epoch=number)
        self._file.write(msgspec.json.encode(self._last) + b"\n")


def _program_words() -> list[str]:
    """Return the words of the program as the launcher was given them, with values that may be secrets hidden."""
    try:
        words = from_json(os.environ.get(PROGRAM_VARIABLE, ""), list[str])
    except msgspec.MsgspecError:
        words = sys.argv
    shown = (words[1:] if words[:1] == ["--no-python"] else words) or ["program"]
    hidden = hide_secrets("\n".join(shown)).split("\n")
    return hidden if len(hidden) == len(shown) else shown[:1]
