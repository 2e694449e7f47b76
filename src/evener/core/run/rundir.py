"""The layout of a run directory, and its readers (runwriter.py has the writers).

The directory alone is enough to watch, report, verify, compare and resume a run, on any machine, without torch.

    RUN/manifest.json          versions, hosts, devices, spec, hashes, start, end, verdict
    RUN/steps/rank-R.jsonl     one StepRecord a line
    RUN/vitals/HOST.jsonl      Vitals of a host every few seconds
    RUN/spans/rank-R.jsonl     one StepSpans a line: timelines of the last steps and of every hundredth
    RUN/profile/rank-R.json    trace of torch's profiler, with --profile
    RUN/events.jsonl           evaluations, checkpoints, findings, failures: in the order in which they happened
    RUN/plan.json              hosts, ranks, commands and prediction; see `core/run/run_plan.py`
    RUN/logs/HOST.R.log        output of rank R, each line with its time; HOST.log: output of the ranks' launcher
    RUN/host/                  the supervisor's files, of a run on this machine alone
    RUN/hosts/NAME/            files copied from the host NAME
    RUN/checkpoints/step-N/    written atomically; see `read_checkpoint`
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from evener.core.base.decoding import from_json
from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.file_io import file_digest, path_inside, read_file, read_lines
from evener.core.base.json_files import decode_versioned_json, read_json_lines
from evener.core.base.shell import quote_word
from evener.core.cluster.host_info import HostInfo
from evener.core.cluster.host_vitals import Vitals
from evener.core.model.corpus import Corpus
from evener.core.model.flops import StepFlops
from evener.core.model.gradients import GradientTensor, OwnCollectives
from evener.core.model.pretrained import TrainedModel
from evener.core.run.roster import NO_SYNC, Roster, SyncSpec
from evener.core.run.run_spec import RunSpec
from evener.core.run.step_cost import StepRecord
from evener.core.run.step_spans import StepSpans

RESUME_LOCK_FILE = "resume.lock"  # locked by the program that resumes the run
RUN_FORMAT = 3  # of manifest.json and plan.json
OLD_FORMAT_HINTS = {
    1: "its batches came from the sampler uniform-1, which this evener no longer has: it drew the same samples "
    "step after step; start the run again with another --out",
    2: "an earlier evener wrote it; start the run again with another --out",
}
CHECKPOINT_FORMAT = 4
# --sampling: the sampler, with a version that grows when the same seed and step give other samples. A run is resumed
# with the sampler with which it began.
SAMPLERS = {"epochs": "epochs-1", "uniform": "uniform-2"}


class RankProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run."""

    rank: int
    host: str
    device: str  # "cpu" or the GPU's name
    threads: int
    pid: int


class Contention(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of sharing a machine: the same work timed by each rank alone and by all at once, without communication.

    Each list has one entry per rank.
    """

    alone_s: list[float]  # forward and backward of one micro-batch while the other ranks sleep
    together_s: list[float]  # the same while the other ranks do it too
    alone_cpus: list[float]  # mean number of CPUs that the rank was running on meanwhile
    together_cpus: list[float]
    copy_alone_Bps: list[float]  # memory bandwidth of a large copy, bytes read and written
    copy_together_Bps: list[float]


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run that has ended."""

    steps: int  # optimizer steps that the weights have taken, over all starts of the run
    loss: float | None  # of the last step
    val_loss: float | None
    replicas_agree: bool | None  # whether replicas were bit-identical at the end; None with one rank
    peak_memory_bytes: list[int]  # per rank


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The settings, hosts, software versions and outcome of a run: manifest.json."""

    format: int = RUN_FORMAT
    verdict: str  # running, finished, stopped, failed
    started: float  # Unix time
    ended: float | None = None
    argv: list[str]
    program: str | None = None  # the name of a program that `evener launch` started and measured
    unit: Literal["tokens", "samples", "batches"] | None = None  # that records count, where it is not the usual one
    versions: dict[str, str]  # evener, torch, python
    spec: RunSpec
    shape: TrainedModel | None  # None for a user's own model
    corpus: Corpus | None
    code_hash: str
    params_by_group: dict[str, int]
    num_params: int
    roster: Roster  # of the newest start, or of the newest change of strategy; all changes are in the events
    since: int = 0  # the first step with these ranks and settings: earlier steps do not count for its speed
    compiled: bool
    sampler: str  # one of SAMPLERS; "own" for a program with its own data
    hosts: list[HostInfo]
    ranks: list[RankProcess]
    contention: Contention | None = None
    result: RunResult | None = None
    can_divide: bool = False  # of a user's program: whether its batches come from where --shares can divide them
    gradients: list[GradientTensor] = []  # of a user's program, in the order in which backward completes them
    collectives: OwnCollectives = OwnCollectives()  # of a user's program, besides those of DDP
    flops: list[StepFlops] = []  # of a user's program: of one step of each rank

    @property
    def world_size(self) -> int:
        return self.roster.world_size

    @property
    def planned_steps(self) -> int | None:
        """Optimizer steps that the run is to take; None if only its program knows."""
        return self.spec.train.steps if self.program is None else None

    @property
    def counted_unit(self) -> str:
        """Return what the records count: tokens; in a user's own program samples, or else each rank's batch as one."""
        return self.unit or "samples" if self.shape is None else "tokens"

    @property
    def was_time_up(self) -> bool:
        """Return whether the run's time limit was over when it ended."""
        max_s = self.spec.train.max_s
        return max_s is not None and self.ended is not None and self.ended - self.started >= max_s

    @property
    def window_text(self) -> str:
        """The steps that the figures cover, as the end of a sentence; "" for all steps."""
        return f" since step {self.since + 1}, where its ranks or settings changed" if self.since else ""

    @property
    def performance_settings(self) -> tuple[object, ...]:
        """All settings that affect the step time and that a resume may change; links are not known here."""
        roster, spec, train = self.roster, self.spec, self.spec.train
        ranks = [(member.host, member.device, member.dtype) for member in roster.members]
        return (ranks, [rank.threads for rank in self.ranks], roster.sync, roster.backend, roster.bucket_bytes,
                self.compiled, spec.model.recompute, spec.machine.shares, train.batch, train.micro_batch,
                train.clip > 0, self.versions, self.code_hash,
                [(host.host, host.cores) for host in self.hosts])  # fmt: skip


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that every event has; readers check the types of all other keys."""

    event: str
    time: float


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line of events.jsonl, or None if the line is damaged, as a full disk leaves it."""
    try:
        from_json(line, RunEvent)
        return from_json(line, dict[str, Any])
    except msgspec.MsgspecError:
        return None


class RunDir:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def inside(self, *names: str) -> Path:
        """Return the path of a file or folder of this run.

        Raise CheckpointError if a symbolic link leads out of the run directory: nothing is read or written there.
        """
        try:
            return path_inside(self.path, *names)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename}: {error.strerror}",
                hint="a whole run directory may be a symbolic link; nothing in it may lead out of it",
            ) from None

    def glob(self, pattern: str) -> list[Path]:
        """Return the paths in this run that match a pattern, sorted. Raise CheckpointError as `inside` does."""
        return [self.inside(str(path.relative_to(self.path))) for path in sorted(self.path.glob(pattern))]

    @property
    def manifest_path(self) -> Path:
        return self.inside("manifest.json")

    @property
    def events_path(self) -> Path:
        return self.inside("events.jsonl")

    @property
    def checkpoints_path(self) -> Path:
        return self.inside("checkpoints")

    def steps_path(self, rank: int) -> Path:
        return self.inside("steps", f"rank-{rank}.jsonl")

    def vitals_path(self, host: str) -> Path:
        return self.inside("vitals", f"{host}.jsonl")

    def spans_path(self, rank: int) -> Path:
        return self.inside("spans", f"rank-{rank}.jsonl")

    def profile_path(self, rank: int) -> Path:
        return self.inside("profile", f"rank-{rank}.json")

    def log_path(self, host: str, rank: int | None) -> Path:
        """Return the log of a rank, or for None that of the launcher of the host's ranks."""
        return self.inside("logs", f"{host}.log" if rank is None else f"{host}.{rank}.log")

    def is_run(self) -> bool:
        """Return whether this directory holds a run."""
        return self.manifest_path.is_file()

    def manifest(self) -> Manifest:
        """Read the manifest. Raise UsageError if this is no run directory, CheckpointError if it cannot be read."""
        try:
            text = read_file(self.manifest_path)
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"{self.path}: not a run directory: it has no manifest.json", hint="ls runs/ shows the runs made here"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{self.manifest_path}: {error.strerror}") from None
        manifest = decode_versioned_json(text, Manifest, RUN_FORMAT, self.manifest_path, OLD_FORMAT_HINTS)
        for name in (*(host.host for host in manifest.hosts), *manifest.roster.hosts):
            if "/" in name or "\0" in name:  # hosts' names are those of files here
                raise CheckpointError(f"{self.manifest_path}: damaged: it names the host {name!r}")
        return manifest

    def records(self, rank: int, tail_bytes: int | None = None) -> list[StepRecord]:
        """Read a rank's records in order: all, or those in the last `tail_bytes`; ignore a half-written last line."""
        return read_json_lines(self.steps_path(rank), StepRecord, tail_bytes)

    def vitals(self, host: str) -> list[Vitals]:
        """Read the vitals of a host, in order."""
        return read_json_lines(self.vitals_path(host), Vitals)

    def spans(self, rank: int, tail_bytes: int | None = None) -> list[StepSpans]:
        """Read a rank's spans in order: all, or those in the last `tail_bytes`; ignore a half-written last line."""
        return read_json_lines(self.spans_path(rank), StepSpans, tail_bytes)

    def recorded_ranks(self) -> list[int]:
        """Return the ranks that have written records, ascending."""
        names = (re.fullmatch(r"rank-(\d+)\.jsonl", path.name) for path in self.steps_path(0).parent.glob("*.jsonl"))
        return sorted(int(name[1]) for name in names if name)

    def events(self) -> list[dict[str, Any]]:
        """Read all events in order. Raise CheckpointError if the file cannot be read."""
        try:
            return [event for line in read_lines(self.events_path) if (event := parse_event(line)) is not None]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.events_path}: {error.strerror}") from None

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        if not self.checkpoints_path.is_dir():
            return []
        names = (re.fullmatch(r"step-(\d+)", entry.name) for entry in self.checkpoints_path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def checkpoint_path(self, step: int) -> Path:
        return self.inside("checkpoints", f"step-{step:06d}")

    def newest_checkpoint_step(self) -> int:
        """Return the step of the newest complete checkpoint. Raise CheckpointError if there is none here."""
        if steps := self.checkpoint_steps():
            return steps[-1]
        saved = self.last_saved_step() if self.inside("hosts").is_dir() else None  # else it ran here
        raise CheckpointError(
            f"{self}: holds no complete checkpoint" + ("" if saved is None else f"; its host saved step {saved}"),
            hint="the first one is saved after --checkpoint-every steps, or at the end of the run"
            if saved is None
            else f"evener fetch {quote_word(self)}",
        )

    def verified_checkpoint(self, step: int | None = None) -> Path:
        """Verify the files of a step's checkpoint (default: the newest). Return it, or raise EvenerError if damaged."""
        newest, steps = self.newest_checkpoint_step(), self.checkpoint_steps()
        if step is not None and step not in steps:
            raise UsageError(f"--step {step}: {self} holds steps {', '.join(map(str, steps))}")
        folder = self.checkpoint_path(newest if step is None else step)
        read_checkpoint(folder)
        return folder

    def last_saved_step(self) -> int | None:
        """Return the newest step that the run reported as saved, on any host, or None."""
        steps = [event.get("step") for event in self.events() if event["event"] == "checkpoint"]
        return next((step for step in reversed(steps) if isinstance(step, int)), None)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json` of a checkpoint: everything but the tensors, and the digests of the files that hold them."""

    format: int = CHECKPOINT_FORMAT
    step: int  # optimizer steps taken: training continues with this one
    world_size: int
    val_loss: float | None
    tensor_names: list[str]  # of weights.safetensors, in the order of the hashes
    states: dict[str, Any]  # optimizers, schedulers, … by name: trees whose tensors are in state.safetensors
    replica_hashes: list[list[str]]  # [rank][tensor]: hash of every rank's replica
    num_own: int = 0  # ranks that save per-rank state on their own hosts, next to this checkpoint
    sync: SyncSpec = NO_SYNC  # whose states these are; of a rank that is alone for a while, the strategy of before
    bucket_bytes: int = 0  # of its Roster
    is_strategy_on_trial: bool = False  # --sync auto has not chosen yet
    files: dict[str, str]  # name: blake2b


def read_checkpoint_unverified(folder: Path) -> Checkpoint:
    """Read state.json without verifying the files. Raise CheckpointError if it is missing or damaged."""
    path = folder / "state.json"
    try:
        text = read_file(path)
    except OSError as error:
        raise CheckpointError(f"{folder}: not a checkpoint: {error.strerror}: state.json") from None
    return decode_versioned_json(text, Checkpoint, CHECKPOINT_FORMAT, path)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read state.json and verify all files of a checkpoint. Raise CheckpointError if one is missing or changed."""
    checkpoint = read_checkpoint_unverified(folder)
    for name, digest in checkpoint.files.items():
        try:
            actual = file_digest(path_inside(folder, name))
        except OSError as error:
            raise CheckpointError(f"{folder / name}: {error.strerror}") from None
        if actual != digest:
            raise CheckpointError(
                f"{folder / name}: damaged: its digest is not the one that was written",
                hint=f"remove {folder}; an earlier checkpoint will be used",
            )
    return checkpoint


def code_hash() -> str:
    """Return the blake2b digest of evener's own source, to compare the code of two hosts."""
    root = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
