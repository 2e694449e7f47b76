"""Write the records and the manifest of a launched program, beside the program and without a collective of its group.

A thread of each rank publishes the blocked times of its newest steps in the launcher's store once a second, reads those
of the others, and writes each step once those of all ranks are known:

    evener/steps/RANK/N    the N-th list of (blocked seconds, loss) of a rank's steps, in order
    evener/rank/RANK       its process, host and model, which rank 0 writes into the manifest

If a rank does not publish any more, the others write their last steps without a division of the blocked time.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any, Literal

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.file_io import LineFile
from evener.core.base.version import __version__
from evener.core.cluster.host_info import HostInfo, local_host_info, peak_memory_bytes
from evener.core.run.roster import NO_SYNC, Backend, Dtype, Member, Roster, parse_sync
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import Manifest, RankProcess, RunResult, code_hash
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepRecord, split_blocked
from evener.core.script.variables import PROGRAM_VARIABLE
from evener.node.remote.environment import hide_secrets

INTERVAL_S = 1.0
RANKS_PER_S = 16  # ranks whose lists a rank looks for in a second
KEPT_LISTS = 300  # of a rank's newest lists in the store
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


class StepExchange:
    """Writes `steps/rank-R.jsonl`, and on rank 0 the manifest."""

    def __init__(self, rundir: RunWriter, rank: int, world_size: int, sync: str) -> None:
        """`sync`: how gradients of DDP models are summed."""
        self._sync = parse_sync(sync)
        self._dir, self._rank, self._world_size = rundir, rank, world_size
        self._added: deque[StepRecord] = deque()  # by the program, not yet published
        self._pending: deque[StepRecord] = deque()  # published, and not yet known of all ranks
        self._received: list[deque[tuple[float, float | None]]] = [deque() for _ in range(world_size)]
        self._num_read = [0] * world_size  # lists of each rank that were read
        self._num_published = 0
        self._about: ScriptRank | None = None
        self._manifest: Manifest | None = None
        self._last: StepRecord | None = None
        self._peaks: list[int] = []
        self._unit: Literal["samples", "steps"] = "samples"
        self._ending, self._has_ended = threading.Event(), False
        self._file: LineFile | None = None
        self._thread = threading.Thread(target=self._run, name="evener-steps", daemon=True)

    def describe_model(self, optimizer: Any, unit: Literal["samples", "steps"]) -> None:
        """Describe this rank by the first optimizer of the program, before its first update; begin to write.

        `unit`: what the records count.
        """
        self._unit = unit
        import torch

        params = [param for group in optimizer.param_groups for param in group["params"]]
        device = params[0].device if params else torch.device("cpu")
        self._about = ScriptRank(
            process=RankProcess(
                rank=self._rank,
                host=local_host_info().host,
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                threads=torch.get_num_threads(),
                pid=os.getpid(),
            ),
            host=local_host_info(),
            dtype=DTYPES.get(str(params[0].dtype) if params else "", "fp32"),
            num_params=sum(param.numel() for param in params),
        )
        self._thread.start()

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
                replicas_agree=None,
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
            self._file = LineFile(self._dir.steps_path(self._rank))
            self._publish_rank(store)
            while not self._ending.wait(interval_s):
                self._write_manifest(store)
                self._exchange(store)
            deadline = time.monotonic() + LAST_STEPS_S
            self._write_manifest(store)
            self._exchange(store)
            while self._pending and time.monotonic() < deadline:
                time.sleep(INTERVAL_S / 20)
                self._exchange(store)
            while self._pending:
                self._write(self._pending.popleft())
            self._file.close()
            self._peaks = self._exchange_peaks(store, deadline)
        except (OSError, RuntimeError):  # a full disk; the store, and so the run, is gone
            pass
        finally:
            self._has_ended = True
            self._added.clear()
            self._pending.clear()

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

    def _write_manifest(self, store: Any) -> None:
        """On rank 0 write the manifest once all ranks have updated a model."""
        assert self._about is not None
        keys = [f"rank/{rank}" for rank in range(self._world_size)]
        if self._rank > 0 or self._manifest is not None or (store is not None and not store.check(keys)):
            return
        ranks = [self._about] if store is None else [from_json(store.get(key), ScriptRank) for key in keys]
        import torch

        members = [
            Member(rank=rank, host=one.process.host, device="cpu" if one.process.device == "cpu" else f"cuda:{rank}",
                   dtype=one.dtype, share=1, micro_batch=1)
            for rank, one in enumerate(ranks)
        ]  # fmt: skip
        backend: Backend = "none" if len(ranks) == 1 else "nccl" if torch.cuda.is_available() else "gloo"
        roster = Roster(members=members, sync=self._sync if len(ranks) > 1 else NO_SYNC, backend=backend)
        versions = {"evener": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
        num_params = ranks[0].num_params
        words = _program_words()
        self._manifest = Manifest(
            verdict="running",
            started=time.time(),
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
        )
        self._dir.write_manifest(self._manifest)
        self._dir.add_event("start", step=0, ranks=len(ranks), sync=str(roster.sync))

    def _exchange(self, store: Any) -> None:
        """Publish the newest steps, read those of the others, and write what all ranks have."""
        new = [self._added.popleft() for _ in range(len(self._added))]
        self._pending += new
        if store is None:
            while self._pending:
                self._write(self._pending.popleft())
            return
        if new:
            figures = [(record.cost.exposed_sync_s, record.loss) for record in new]
            store.set(f"steps/{self._rank}/{self._num_published}", msgspec.json.encode(figures).decode())
            self._num_published += 1
            if self._num_published > KEPT_LISTS:  # all others have read it, or never will
                store.delete_key(f"steps/{self._rank}/{self._num_published - KEPT_LISTS - 1}")
        for rank in range(self._world_size):
            while store.check([key := f"steps/{rank}/{self._num_read[rank]}"]):
                self._received[rank] += from_json(store.get(key), list[tuple[float, float | None]])
                self._num_read[rank] += 1
        while self._pending and all(self._received):
            figures = [received.popleft() for received in self._received]
            exposed_s, wait_s = split_blocked([blocked_s or 0.0 for blocked_s, _ in figures])[self._rank]
            losses = [loss for _, loss in figures if loss is not None]
            record = self._pending.popleft()
            cost = msgspec.structs.replace(record.cost, exposed_sync_s=exposed_s, wait_s=wait_s)
            loss = statistics.fmean(losses) if losses else None
            self._write(msgspec.structs.replace(record, cost=cost, loss=loss))
        while len(self._pending) > MAX_PENDING:  # another rank does not step any more
            self._write(self._pending.popleft())

    def _write(self, record: StepRecord) -> None:
        assert self._file is not None
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._last = record


def _program_words() -> list[str]:
    """Return the words of the program as the launcher was given them, with values that may be secrets hidden."""
    try:
        words = from_json(os.environ.get(PROGRAM_VARIABLE, ""), list[str])
    except msgspec.MsgspecError:
        words = sys.argv
    shown = (words[1:] if words[:1] == ["--no-python"] else words) or ["program"]
    hidden = hide_secrets("\n".join(shown)).split("\n")
    return hidden if len(hidden) == len(shown) else shown[:1]
