"""Replay some steps of a run in one process on this host: `python -m evener.worker.replay REQUEST`.

It prints a line about the start, then one for each step: {"step", "loss", "grad_norm", "lr"}. It runs the same
`TrainStep`, model, optimizer and batches as the run. It writes only to a temporary folder.
"""

from __future__ import annotations

import functools
import json
import math
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from evener.core.base.decoding import from_json
from evener.core.base.errors import EvenerError, exit_status_of
from evener.core.cluster.host_info import local_host_info
from evener.core.model.corpus import Corpus
from evener.core.model.pretrained import TrainedModel
from evener.core.run.resolve import ResolvedRun
from evener.core.run.roster import Dtype, initial_roster
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import RunDir, read_checkpoint
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepRecord
from evener.corpus.token_check import check_token_ids
from evener.worker.membership.fixed import FixedMembership
from evener.worker.rank.clock import CudaClock, HostClock
from evener.worker.rank.precision import autocast
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.rank.stop_signals import StopRequest
from evener.worker.record.span_recorder import SpanRecorder
from evener.worker.record.step_recorder import StepRecorder
from evener.worker.state import rng
from evener.worker.state.checkpoint import read_safetensors
from evener.worker.state.replica_hashes import hash_tensors, replica_mismatches
from evener.worker.state.training_state import TrainingState
from evener.worker.sync.sync_factory import make_sync
from evener.worker.train.loop import build_model, read_corpus, train_one_step
from evener.worker.train.optim import adamw
from evener.worker.train.rank_consistency import local_rank_slot
from evener.worker.train.train_step import TrainContext, TrainStep


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to replay some steps of a run."""

    run_dir: str
    first: int  # first step; 0: start from the initial weights, drawn from the seed
    num_steps: int
    dtype: Dtype
    micro_batch: int
    spec: RunSpec
    corpus: Corpus
    shape: TrainedModel


class Replay:
    """A run restored to the state before a step, in one process."""

    def __init__(self, request: ReplayRequest, scratch: Path) -> None:
        torch.set_num_threads(request.spec.machine.threads or local_host_info().cores)
        torch.manual_seed(request.spec.train.seed)
        check_token_ids(request.corpus)
        self.request = request
        self.spec = _single_process_spec(request)
        group = ProcessGroups(request.spec.machine.device)
        folder = RunDir(request.run_dir).checkpoint_path(request.first) if request.first else None
        checkpoint = read_checkpoint(folder) if folder else None
        resolved = ResolvedRun(spec=self.spec, corpus=request.corpus, shape=request.shape, resume=checkpoint)
        self.device = group.device
        self.roster = initial_roster(self.spec, [local_rank_slot(group, local_host_info())], request.shape.block_size)
        self.training_state = TrainingState(torch.amp.GradScaler("cuda", enabled=False))
        self.model = build_model(resolved, request.dtype, is_new=checkpoint is None).to(self.device)
        self.training_state.models.append(self.model)
        self.optimizer = adamw(self.model, self.spec.train)
        self.training_state.add_optimizer(self.optimizer)
        clock = CudaClock() if self.device.type == "cuda" else HostClock()
        rundir = RunWriter(scratch)
        recorder = StepRecorder(rundir, 0, self.roster, clock, group.control_group, SpanRecorder(rundir, 0, clock))
        sync = make_sync(self.roster, group, clock, recorder.lap, self.model)
        self.training_state.sync = sync
        self.mismatched_tensor: str | None = None  # a tensor of the checkpoint that differs from the ranks' hashes
        rng.seed_generators(self.spec.train.seed, request.first, 0)
        if folder and checkpoint:
            self.training_state.load_checkpoint(folder)
            weights = read_safetensors(folder / "weights.safetensors")
            stored = hash_tensors((name, weights[name]) for name in checkpoint.tensor_names)
            mismatches = replica_mismatches(
                checkpoint.tensor_names, [*checkpoint.replica_hashes, list(stored.values())]
            )
            self.mismatched_tensor = mismatches[0].tensor if mismatches else None
            if checkpoint.world_size == 1:
                rng.set_states(rng.load_rank_states(folder / "rng.safetensors", 0), self.device)
        sync.wrap(self.model, all_params_used=True)
        self.engine = TrainContext(
            self.spec,
            group,
            read_corpus(resolved, "train"),
            self.training_state,
            recorder,
            FixedMembership(self.roster),
            is_user_program=False,
            is_compiled=False,
        )

    def records(self) -> Iterator[StepRecord]:
        """Yield the record of each step as it completes; stop after a non-finite one."""
        recorder, first = self.engine.recorder, self.request.first
        for index in range(first, first + self.request.num_steps):
            recorder.begin_step()
            step = TrainStep(self.engine, self.roster.at_step(index), index, is_first=False)
            train_one_step(step, self.model, self.optimizer, self.spec.train,
                  functools.partial(autocast, self.device, self.request.dtype))  # fmt: skip
            step.end(stop_request=StopRequest.NONE, share_weight=math.nan)
            try:
                recorder.flush()
            except EvenerError:  # non-finite loss or gradient
                assert recorder.last_record is not None
                yield recorder.last_record
                return
            assert recorder.last_record is not None
            yield recorder.last_record


def _single_process_spec(request: ReplayRequest) -> RunSpec:
    """Return the run's spec for one process: the whole batch on one rank, in the run's dtype."""
    spec, replace = request.spec, msgspec.structs.replace
    machine = replace(spec.machine, ranks=1, shares="auto", backend="auto")
    model = replace(spec.model, dtype=request.dtype)
    return replace(spec, machine=machine, model=model, train=replace(spec.train, micro_batch=request.micro_batch))


def print_replay() -> None:
    """Replay the steps that the program's argument requests; print lines of JSON."""
    request = from_json(sys.argv[1], ReplayRequest)
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # the folder is removed then, too
    with tempfile.TemporaryDirectory(prefix="evener-replay-") as scratch:
        replay = Replay(request, Path(scratch))
        print(json.dumps({"device": str(replay.device), "unlike": replay.mismatched_tensor}), flush=True)
        for record in replay.records():
            facts = {"step": record.step, "loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr}
            print(msgspec.json.encode(facts).decode(), flush=True)
        replay.engine.recorder.close()


if __name__ == "__main__":
    sys.exit(exit_status_of(print_replay))
