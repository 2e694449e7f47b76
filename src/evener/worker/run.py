"""What does a training program need from evener? `join()`: its share of every batch, synchronization, measurement,
checkpoints and proof that the replicas agree. Our own loop (`loop.py`) is written with nothing else.

    with evener.join(spec) as run:
        model = run.model(MyModel())                  # wrapped by the run's way to synchronize
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), 3e-4))
        for step in run.steps(dataset):               # records, checkpoints, verifies
            for batch in step.micro_batches():        # this rank's share of the global batch
                step.backward(loss_sum(model, batch)) # a sum over tokens, not a mean
            step.update(optimizer)
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from evener.core.corpus import TOKENIZER_FILES
from evener.core.errors import EvenerError, RunError, UsageError
from evener.core.failure import is_consequence
from evener.core.machine import Machine, peak_memory_bytes, this_machine
from evener.core.resolve import Resolved, new_run_path, newest_checkpoint
from evener.core.rundir import SAMPLERS, Contention, Manifest, Rank, Result, RunDir, code_hash, read_checkpoint
from evener.core.spec import RunSpec
from evener.core.step import StepRecord
from evener.core.units import count
from evener.core.version import __version__
from evener.plan.balance import equal_shares, micro_batch_sizes
from evener.plan.compute import compile_pays
from evener.worker import checkpoint as checkpoints
from evener.worker.agree import Identity, identity, mismatch
from evener.worker.clock import CudaClock, HostClock
from evener.worker.group import Group
from evener.worker.record import BLOCKED, Recorder
from evener.worker.sync import make_sync
from evener.worker.verify import differences, gather_hashes, hash_tensors


class Dataset(Protocol):
    """What `Run.steps` reads."""

    def global_batch(self, seed: int, step: int, num_sequences: int) -> np.ndarray:
        """Samples of the global batch of a step: a pure function."""

    def num_tokens(self, samples: np.ndarray) -> int:
        """Tokens whose losses these samples sum up."""

    def load(self, samples: np.ndarray, device: torch.device) -> Any:
        """The samples as the training program wants them."""


def join(spec: RunSpec | None = None, resolved: Resolved | None = None, *, resume: bool = False) -> Run:
    """Take part in the run that torchrun started, or be a world of one; with `resume` go on with the run in `spec.out`.

    `resolved` is there when the model and the corpus are evener's own.
    """
    return Run(spec or RunSpec(), resolved, resume)


class Run:
    """One rank of a run."""

    def __init__(self, spec: RunSpec, resolved: Resolved | None, resume: bool) -> None:
        self.spec, self._resolved = spec, resolved
        self._recorder: Recorder | None = None
        self.group = Group(spec.machine.device, spec.machine.backend)
        self.rank, self.world_size, self.device = self.group.rank, self.group.world_size, self.group.device
        self._machine = this_machine()
        torch.set_num_threads(spec.machine.threads or max(1, self._machine.cores // self.group.local_world_size))
        self.dir = RunDir(spec.out or self._agree_on(new_run_path(spec)))  # hosts have places of their own
        self._redirect_output()
        if resolved is not None:
            self._resume = resolved.resume
        else:
            self._resume = newest_checkpoint(self.dir) if resume else None
        self._clock = CudaClock() if self.device.type == "cuda" else HostClock()
        self.dtype = choose_dtype(spec.model.dtype, self.device)
        self._scaler = torch.amp.GradScaler("cuda", enabled=self.dtype == torch.float16)
        self.compiled = self._compiles()
        self.contention: Contention | None = None
        self._stop_wanted = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._want_stop)
        torch.manual_seed(spec.train.seed)  # the same weights on every rank

    # --- what a training program calls ---------------------------------------------------------------------------

    def model(self, module: nn.Module) -> nn.Module:
        """The module on this rank's device, compiled where that pays, wrapped so that backward synchronizes."""
        self.module = module.to(self.device)
        self._check_identities()  # before DDP compares shapes, in words of its own
        if self.compiled:
            # Whole is fastest. Under DDP a whole backward would hand over all gradients at its end, and hide nothing.
            whole = functools.partial(module.compile, dynamic=False)
            (getattr(module, "compile_blocks", whole) if self.world_size > 1 else whole)()
        self._sync = make_sync(self.world_size, self.device, self._clock, self._lap)
        return self._sync.wrap(self.module)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, whose state the checkpoints will hold."""
        self._optimizer = optimizer
        return optimizer

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which forward runs in the run's arithmetic."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def steps(self, dataset: Dataset) -> Iterator[Step]:
        """The optimizer steps that are left to take, after one rehearsal.

        The rehearsal runs forward and backward and learns nothing: DDP settles its buckets (so that a resumed run sums
        in the same order), compilers compile, caches warm. It is not recorded.
        """
        train = self.spec.train
        first = self._start()
        self._recorder = Recorder(self.dir, self.rank, self.world_size, self._clock, self.group.control)
        yield Step(self, dataset, first, rehearsal=True)
        self._restore_rng(first)
        self._begun = time.perf_counter()
        for index in range(first, train.steps):
            step = Step(self, dataset, index)
            yield step
            if step.stopped:
                return self._finish("stopped", index, None)
            done = index + 1
            every = self.spec.checkpoint
            if every.verify_every and done % every.verify_every == 0 and done < train.steps:
                self._verify_replicas(done)
            if every.checkpoint_every and done % every.checkpoint_every == 0 and done < train.steps:
                self._recorder.flush()
                self._save(done, step.val_loss)
        self._recorder.flush()
        return self._finish("finished", train.steps, step.val_loss)

    @property
    def micro_batch(self) -> int:
        """Largest number of sequences in one backward."""
        return self._resolved.micro_batch if self._resolved else self.spec.train.micro_batch or self.spec.train.batch

    def micro_batch_sizes(self) -> list[int]:
        """Sequences of this rank's micro-batches of one step."""
        share = equal_shares(self.spec.train.batch, self.world_size)[self.rank]
        return micro_batch_sizes(share, self.micro_batch)

    @property
    def last_record(self) -> StepRecord | None:
        """The newest step that is complete; it lags one step behind."""
        return self._recorder.last if self._recorder else None

    def mean(self, total: float, num: float) -> float:
        """Σ total / Σ num over ranks."""
        totals = self.group.sum(total, num)
        return totals[0] / totals[1]

    def tell(self, text: str) -> None:
        """Print a line, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self._report_failure(error)
        if self._recorder is not None:
            self._recorder.close()
        if error is None:
            self.group.close()

    # --- the life of a run ---------------------------------------------------------------------------------------

    def _start(self) -> int:
        """Load what there is to resume, write the manifest, and return the first step."""
        resume = self._resume
        first = resume.step if resume else 0
        self._saved_step = resume.step if resume else None  # on every rank the same
        if resume:
            folder = self.dir.checkpoint_path(first)
            saved = checkpoints.load(folder)
            checkpoints.put_weights(saved.weights, checkpoints.weights_of(self.module), folder)
            self._optimizer.load_state_dict(saved.states["optimizer"])
            self._scaler.load_state_dict(saved.states["scaler"])
            if self.group.local_rank == 0:
                for rank in self.dir.recorded_ranks():
                    self.dir.keep_records_before(rank, first)
        saved = [(step, read_checkpoint(self.dir.checkpoint_path(step)).val_loss)
                 for step in self.dir.checkpoint_steps()]  # fmt: skip
        self._best = min(((loss, step) for step, loss in saved if loss is not None), default=None)
        facts = Rank(
            rank=self.rank,
            host=self._machine.host,
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            threads=torch.get_num_threads(),
            pid=os.getpid(),
        )
        ranks = [msgspec.json.decode(text, type=Rank) for text in self.group.gather(msgspec.json.encode(facts))]
        hosts = [msgspec.json.decode(text, type=Machine)
                 for text in self.group.gather(msgspec.json.encode(self._machine))]  # fmt: skip
        params_by_group = self._params_by_group()
        self._manifest = Manifest(
            verdict="running",
            started=self.dir.manifest().started if resume else time.time(),
            argv=sys.argv,
            versions={
                "evener": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            spec=msgspec.structs.replace(self.spec, out=str(self.dir)),
            shape=self._resolved.shape if self._resolved else None,
            corpus=self._resolved.corpus if self._resolved else None,
            code_hash=code_hash(),
            params_by_group=params_by_group,
            num_params=sum(params_by_group.values()),
            backend=self.group.backend,
            sync=self._sync.name,
            dtype=str(self.dtype).removeprefix("torch."),
            compiled=self.compiled,
            sampler=SAMPLERS[self.spec.train.sampling] if self._resolved else "own",
            hosts=list({host.host: host for host in hosts}.values()),
            ranks=ranks,
        )
        if self.rank == 0:
            self.dir.write_manifest(self._manifest)
            self._keep_tokenizer()
            self.dir.add_event("start", step=first, ranks=self.world_size)
        self.tell(
            f"{count(self._manifest.num_params)} parameters: "
            + ", ".join(f"{group} {count(num)}" for group, num in params_by_group.items() if num)
        )
        self.tell(
            f"{self.world_size} × {facts.device}, {facts.threads} threads a rank, {self.group.backend}, "
            f"{self._manifest.dtype}{', compiled' if self.compiled else ''}; run directory {self.dir}"
        )
        return first

    def _keep_tokenizer(self) -> None:
        """A copy, so that the run can write text when its corpus is gone."""
        if self._manifest.corpus is not None:
            for name in TOKENIZER_FILES:
                if (file := Path(self._manifest.corpus.path) / name).exists():
                    shutil.copy(file, self.dir.path / name)

    def _restore_rng(self, first: int) -> None:
        resume = self._resume
        if resume and resume.world_size == self.world_size:
            states = checkpoints.load_rng(self.dir.checkpoint_path(first), self.rank)
            checkpoints.restore_rng(states, self.device)
        else:
            draw = np.random.SeedSequence((self.spec.train.seed, first, self.rank)).generate_state(2, np.uint32)
            torch.manual_seed(int(draw[0]) << 32 | int(draw[1]))

    def _save(self, step: int, val_loss: float | None) -> None:
        if step == self._saved_step:  # not what this host's disk says: checkpoints are written by the first host alone
            return
        weights = checkpoints.weights_of(self.module)
        replica_hashes = gather_hashes(hash_tensors(weights.items()), self.world_size, self.group.control)
        rng = self.group.gather(safetensors.torch.save(checkpoints.rng_states(self.device)))
        failed = b""
        if self.rank == 0:
            try:
                checkpoints.save(
                    self.dir,
                    weights,
                    {"optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()},
                    step=step,
                    val_loss=val_loss,
                    rng_states=[safetensors.torch.load(state) for state in rng],
                    replica_hashes=replica_hashes,
                )
            except EvenerError as error:
                failed = msgspec.json.encode([str(error), error.hint])
            else:
                if val_loss is not None and (self._best is None or val_loss < self._best[0]):
                    self._best = (val_loss, step)
                checkpoints.prune(self.dir, self.spec.checkpoint.keep, self._best[1] if self._best else None)
                self.dir.add_event("checkpoint", step=step, val_loss=val_loss)
        failed = self.group.gather(failed)[0]  # also keeps the others from starting the next step's clock
        if failed:
            message, hint = msgspec.json.decode(failed)
            raise RunError(message, hint=hint)
        self._saved_step = step

    def _verify_replicas(self, step: int) -> bool | None:
        """Raise RunError if the replicas differ; each then leaves its weights in RUN/replicas for `evener verify`."""
        if self.world_size == 1:
            return None
        hashes = hash_tensors(self.module.named_parameters())
        found = differences(list(hashes), gather_hashes(hashes, self.world_size, self.group.control))
        if found:
            folder = self.dir.path / "replicas"
            folder.mkdir(exist_ok=True)
            checkpoints.write_tensors(folder / f"rank-{self.rank}.safetensors", checkpoints.weights_of(self.module))
            if self.rank == 0:
                self.dir.add_event("run.diverged", step=step, differences=msgspec.to_builtins(found))
            self.group.barrier()
            raise RunError(
                f"after step {step}: the replicas differ: rank {found[0].rank} in {found[0].tensor}"
                + (f" and {len(found) - 1} more tensors" if len(found) > 1 else ""),
                hint=f"evener verify {self.dir} shows by how much; --resume goes back to the last checkpoint",
            )
        if self.rank == 0:
            self.dir.add_event("replicas.agree", step=step, tensors=len(hashes))
        return True

    def _finish(self, verdict: str, step: int, val_loss: float | None) -> None:
        agree = self._verify_replicas(step)
        self._save(step, val_loss)
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else peak_memory_bytes()
        peaks = [int(text) for text in self.group.gather(str(peak).encode())]
        if self.rank == 0:
            last = self._recorder.last if self._recorder else None
            result = Result(
                steps=step,
                loss=last.loss if last else None,
                val_loss=val_loss,
                replicas_agree=agree,
                peak_memory_bytes=peaks,
            )
            self._manifest = msgspec.structs.replace(
                self._manifest, verdict=verdict, ended=time.time(), contention=self.contention, result=result
            )
            self.dir.write_manifest(self._manifest)
            self.dir.add_event(verdict, step=step)
        self.group.barrier()

    def _report_failure(self, error: BaseException) -> None:
        event = "run.peer-exit" if is_consequence(error) else "failure"
        hint = error.hint if isinstance(error, EvenerError) else ""
        with contextlib.suppress(OSError):
            self.dir.add_event(
                event, rank=self.rank, error=str(error) or type(error).__name__, kind=type(error).__name__, hint=hint
            )
            if self.rank == 0 and hasattr(self, "_manifest"):
                self.dir.write_manifest(msgspec.structs.replace(self._manifest, verdict="failed", ended=time.time()))

    def _check_identities(self) -> None:
        """Raise RunError before the first step where the ranks are not of one mind."""
        mine = identity(self.rank, self._machine.host, self.spec, self._resolved, self.module.named_parameters())
        ranks = [msgspec.json.decode(text, type=Identity) for text in self.group.gather(msgspec.json.encode(mine))]
        found = mismatch(ranks)
        if found is not None:
            check, what, where = found
            if self.rank == 0:
                with contextlib.suppress(OSError):  # started by hand, a run has no directory yet
                    self.dir.add_event(check, what=what, where=where)
            raise RunError(f"{check}: {what}: {where} differ", hint="evener train sends every host the same")

    # --- small things --------------------------------------------------------------------------------------------

    def _lap(self, part: str) -> None:
        if self._recorder is not None:
            self._recorder.lap(part)

    def _agree_on(self, text: str) -> str:
        return self.group.gather(text.encode())[0].decode()

    def _want_stop(self, signum: int, frame: Any) -> None:
        self._stop_wanted = True

    def _redirect_output(self) -> None:
        """Under `evener train` each rank writes to a log of its own."""
        if os.environ.get("EVENER_LOGS") == "1":
            path = self.dir.log_path(self._machine.host, self.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)

    def _compiles(self) -> bool:
        wish = self.spec.model.compile
        if self.device.type == "cuda":
            has_compiler = importlib.util.find_spec("triton") is not None
        else:
            has_compiler = shutil.which(os.environ.get("CXX", "g++")) is not None
        if wish == "on" and not has_compiler:
            raise UsageError("--compile on: this machine has no compiler", hint="apt install g++, or --compile off")
        if self._resume:
            return self.dir.manifest().compiled  # the same arithmetic as before
        if wish != "auto" or self._resolved is None:
            return wish == "on"
        shape, train = self._resolved.shape, self.spec.train
        flops = shape.flops_per_token() * shape.block_size * train.batch * train.steps / self.world_size
        return has_compiler and compile_pays(flops, self.device.type)

    def _params_by_group(self) -> dict[str, int]:
        if self._resolved:
            return self._resolved.shape.params_by_group()
        return {"all": sum(parameter.numel() for parameter in self.module.parameters())}


class Step:
    """One optimizer step of one rank."""

    def __init__(self, run: Run, dataset: Dataset, index: int, *, rehearsal: bool = False) -> None:
        train = run.spec.train
        self.index = index
        self.rehearsal = rehearsal
        self.stopped = False
        self.val_loss: float | None = None
        self._run, self._dataset = run, dataset
        last = index + 1 == train.steps
        every = run.spec.eval.eval_every
        self.evaluates = not rehearsal and (last or (bool(every) and (index + 1) % every == 0))
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
        self._num_tokens = 0

    def micro_batches(self) -> Iterator[Any]:
        """This rank's share of the global batch; none when all ranks stop here."""
        run, dataset, train = self._run, self._dataset, self._run.spec.train
        recorder = run._recorder
        assert recorder is not None
        recorder.begin()
        if not self.rehearsal and recorder.hear():
            self.stopped = True
            return
        samples = dataset.global_batch(train.seed, self.index, train.batch)
        self._global_tokens = dataset.num_tokens(samples)
        shares = equal_shares(train.batch, run.world_size)
        start = sum(shares[: run.rank])
        sizes = run.micro_batch_sizes()
        if self.rehearsal:
            sizes = sorted(set(sizes))
        for i, size in enumerate(sizes):
            mine = samples[start : start + size]
            start += size
            batch = dataset.load(mine, run.device)
            self._num_tokens += dataset.num_tokens(mine)
            run._sync.arm(last=i + 1 == len(sizes))
            recorder.lap("data_s")
            yield batch

    def backward(self, loss_sum: Tensor) -> None:
        """Backward of a *sum* of token losses, divided by the tokens of the global batch."""
        run = self._run
        run._scaler.scale(loss_sum / self._global_tokens).backward()
        run._lap(BLOCKED if run._sync.waits else "compute_s")
        self._loss_sum += loss_sum.detach()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, step, and record."""
        run, recorder, clip = self._run, self._run._recorder, self._run.spec.train.clip
        assert recorder is not None
        if self.stopped:
            return
        if self.rehearsal:
            run._sync.take_sync_s()
            optimizer.zero_grad()
            return
        run._scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(run.module.parameters(), clip) if clip else None
        run._scaler.step(optimizer)
        run._scaler.update()
        optimizer.zero_grad()
        recorder.lap("optimizer_s")
        recorder.end(
            want_stop=run._stop_wanted
            or (run.spec.train.max_s is not None and time.perf_counter() - run._begun > run.spec.train.max_s),
            sync_s=run._sync.take_sync_s(),
            step=self.index,
            tokens=self._num_tokens,
            global_tokens=self._global_tokens,
            bytes=run._sync.bytes_per_step,
            lr=optimizer.param_groups[0]["lr"],
            loss_sum=self._loss_sum,
            grad_norm=grad_norm,
        )


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """fp32, bf16 or fp16; auto is bf16 where the device has units for it."""
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        units = torch.cpu.get_capabilities()  # without them bf16 is emulated, and slower than fp32
        return torch.bfloat16 if units.get("avx512_bf16") or units.get("amx_bf16") else torch.float32
    if name == "fp16" and device.type == "cpu":
        raise UsageError("--dtype fp16: loss scaling needs a GPU", hint="--dtype bf16 or fp32")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
