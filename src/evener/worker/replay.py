"""Replay some steps of a run in one process on this host: `python -m evener.worker.replay REQUEST`.

It prints a line about the start, then one for each step: {"step", "loss", "grad_norm", "lr"}. The steps are the run's
own: its Step, model, optimizer and batches. It writes only to a temporary folder.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file

from evener.core.corpus import Corpus
from evener.core.decoding import from_json
from evener.core.errors import EvenerError
from evener.core.machine import this_machine
from evener.core.resolve import Resolved
from evener.core.roster import Dtype, first_roster
from evener.core.rundir import RunDir, read_checkpoint
from evener.core.runwriter import RunWriter
from evener.core.shape import GPTShape
from evener.core.spec import RunSpec
from evener.core.step import StepRecord
from evener.corpus.check import check_token_ids
from evener.worker import rng
from evener.worker.agree import seat_of
from evener.worker.arithmetic import autocast
from evener.worker.clock import CudaClock, HostClock
from evener.worker.data import TokenBlocks
from evener.worker.group import Group
from evener.worker.loop import build, learn
from evener.worker.membership.fixed import Fixed
from evener.worker.optim import adamw
from evener.worker.record import Recorder
from evener.worker.spans import Spans
from evener.worker.step import Engine, Step
from evener.worker.sync.choose import make_sync
from evener.worker.trained import Trained
from evener.worker.verify import differences, hash_tensors


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps to replay, of which run."""

    run_dir: str
    first: int  # step; 0: from the initial weights, by the seed
    num_steps: int
    dtype: Dtype
    micro_batch: int
    spec: RunSpec
    corpus: Corpus
    shape: GPTShape


class Replay:
    """A run restored to the state before a step, in one process."""

    def __init__(self, request: Request, scratch: Path) -> None:
        torch.set_num_threads(request.spec.machine.threads or this_machine().cores)
        torch.manual_seed(request.spec.train.seed)
        check_token_ids(request.corpus)
        self.request, self.spec, group = request, _of_one(request), Group(request.spec.machine.device)
        folder = RunDir(request.run_dir).checkpoint_path(request.first) if request.first else None
        checkpoint = read_checkpoint(folder) if folder else None
        resolved = Resolved(spec=self.spec, corpus=request.corpus, shape=request.shape, resume=checkpoint)
        self.device = group.device
        self.roster = first_roster(self.spec, [seat_of(group, this_machine())], request.shape.block_size)
        self.trained = Trained(torch.amp.GradScaler("cuda", enabled=False))
        self.model = build(resolved, is_new=checkpoint is None).to(self.device)
        self.trained.models.append(self.model)
        self.optimizer = adamw(self.model, self.spec.train)
        self.trained.add_optimizer(self.optimizer)
        clock = CudaClock() if self.device.type == "cuda" else HostClock()
        rundir = RunWriter(scratch)
        recorder = Recorder(rundir, 0, self.roster, clock, group.control, Spans(rundir, 0, clock))
        sync = make_sync(self.roster, group, clock, recorder.lap, self.model)
        self.trained.add_state("sync", sync)
        self.unlike: str | None = None  # a tensor of the checkpoint that differs from the ranks' hashes
        rng.begin(self.spec.train.seed, request.first, 0)
        if folder and checkpoint:
            self.trained.load(folder)
            weights = load_file(folder / "weights.safetensors")
            stored = hash_tensors((name, weights[name]) for name in checkpoint.tensor_names)
            mismatches = differences(checkpoint.tensor_names, [*checkpoint.replica_hashes, list(stored.values())])
            self.unlike = mismatches[0].tensor if mismatches else None
            if checkpoint.world_size == 1:
                rng.restore(rng.of_rank(folder / "rng.safetensors", 0), self.device)
        sync.wrap(self.model, uses_all=True)
        blocks = TokenBlocks(request.corpus, "train", request.shape.block_size, self.spec.train.sampling)
        self.engine = Engine(self.spec, group, blocks, self.trained, sync, recorder, Fixed(self.roster), is_own=False,
                             is_compiled=False)  # fmt: skip

    def records(self) -> Iterator[StepRecord]:
        """Yield the record of each step as it completes; stop after a non-finite one."""
        recorder, first = self.engine.recorder, self.request.first
        for index in range(first, first + self.request.num_steps):
            recorder.begin()
            step = Step(self.engine, self.roster.at(index), index, is_first=False)
            learn(step, self.model, self.optimizer, self.spec.train,
                  functools.partial(autocast, self.device, self.request.dtype))  # fmt: skip
            step.end(wish=0.0, weight=math.nan)
            try:
                recorder.flush()
            except EvenerError:  # non-finite loss or gradient
                assert recorder.last is not None
                yield recorder.last
                return
            assert recorder.last is not None
            yield recorder.last


def _of_one(request: Request) -> RunSpec:
    """Return the run's spec for one process: the whole batch on one rank, in the run's dtype."""
    spec, replace = request.spec, msgspec.structs.replace
    machine = replace(spec.machine, ranks=1, shares="auto", backend="auto")
    model = replace(spec.model, dtype=request.dtype)
    return replace(spec, machine=machine, model=model, train=replace(spec.train, micro_batch=request.micro_batch))


def main() -> int:
    try:
        request = from_json(sys.argv[1], Request)
        with tempfile.TemporaryDirectory(prefix="evener-replay-") as scratch:
            replay = Replay(request, Path(scratch))
            print(json.dumps({"device": str(replay.device), "unlike": replay.unlike}), flush=True)
            for record in replay.records():
                facts = {"step": record.step, "loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr}
                print(msgspec.json.encode(facts).decode(), flush=True)
            replay.engine.recorder.close()
    except EvenerError as error:
        print(error.as_line(), flush=True)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
