"""A user's own training loop with `evener.join` is right, or refused with a reason.

The loops stand in loops/own.py. Right: on one, two or three ranks it learns what plain torch learns from the same
samples (loops/plain.py), and stopped half way it goes on with the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.core.run.rundir import RunDir, read_checkpoint_unverified

from ..ranks import Server
from ..tiers import exhaustively, thinned

LOOPS = Path(__file__).parent / "loops"
ROOT = Path(__file__).parents[2]
FLAGS = ("--batch", "24", "--steps", "30", "--dtype", "fp32", "--eval-every", "0", "--threads", "1",
         "--shares", "equal")  # fmt: skip


@dataclass
class Done:
    """A program that has ended, on some ranks."""

    statuses: list[int]
    folder: Path
    dir: RunDir

    @property
    def logs(self) -> list[str]:
        """What each rank printed."""
        return ["".join((self.folder / f"rank-{rank}.{kind}").read_text() for kind in ("out", "err"))
                for rank in range(len(self.statuses))]  # fmt: skip

    def result(self, rank: int = 0) -> dict[str, Any]:
        assert set(self.statuses) == {0}, "\n".join(self.logs)
        return torch.load(self.folder / f"result-{rank}.pt")

    @property
    def losses(self) -> list[float]:
        return self.result()["losses"] or [record.loss for record in self.dir.records(0)]


Own = Callable[..., Done]


@pytest.fixture(scope="module")
def own(tmp_path_factory, server: Server) -> Own:
    """`own(name, "plain" | "join" | "resume", ranks, *flags, out=…)` runs a loop; asked again, it answers at once."""
    place = tmp_path_factory.mktemp("own")
    known: dict[Any, Done] = {}

    def own(name: str, mode: str, ranks: int, *flags: str, out: str | None = None) -> Done:
        key = (name, mode, ranks, flags, out)
        if key not in known:
            folder = place / f"{len(known)}-{name}-{mode}-{ranks}"
            run = RunDir(place / (out or f"{folder.name}-run"))
            args = [name, mode, *FLAGS, "--out", str(run), *flags]
            env = {"RESULT": str(folder / "result-RANK.pt")}
            ended = server.run(folder, args, ranks, env, program=str(LOOPS / "own.py"))
            known[key] = Done(ended.statuses, folder, run)
        return known[key]

    return own


RIGHT: list[tuple[Any, ...]] = [  # the loop, on how many ranks beside one, flags
    ("Cnn", 2), ("Cnn", 3, "--micro-batch", "5"), ("Sgd", 2), ("Weights", 3), ("Unused", 2), ("Sometimes", 3),
    ("Frozen", 2), ("OneRank", 3), ("Tied", 2), ("Autograd", 2), ("Losses", 2), ("TwoBackwards", 3),
    ("ThreeBackwards", 2), ("Mean", 3), ("Scheduler", 2), ("TwoOptimizers", 2, "--clip", "0.1"),
    ("OneAfterTheOther", 2, "--clip", "0.1"), ("Muon", 2), ("MuonInFp32", 2), ("NoTensorState", 2), ("Groups", 2),
    ("UserState", 2), ("Spectral", 3), ("SharedBuffers", 2), ("Scaled", 2, "--clip", "0"),
    ("Clipped", 2, "--clip", "0.05"), ("TorchDataset", 2),
    ("Loader", 3), ("Gan", 2), ("Gan", 3, "--micro-batch", "5"), ("GanInOnePass", 2),
    ("GanInOnePass", 3, "--micro-batch", "5"), ("GanFrozen", 2), ("TwoModels", 2),
    ("BatchNorm", 3, "--micro-batch", "4"), ("BatchNorm", 2, "--micro-batch", "3"), ("Unfreeze", 3), ("Freeze", 2),
    ("Replaced", 2), ("Together", 2),
]  # fmt: skip


def name_of(case: tuple[Any, ...]) -> str:
    return "-".join(str(word).removeprefix("--") for word in case)


@pytest.mark.parametrize("case", thinned(RIGHT, every=7), ids=name_of)
def test_joined_training_equals_plain_torch_on_any_rank_count(own, case):
    name, most, *flags = case
    truth = own(name, "plain", 1, *flags)
    assert truth.losses[-1] != truth.losses[0]
    one = own(name, "join", 1, *flags)
    several = own(name, "join", most, *flags)
    rounding = 1e-2 if name == "Muon" else 1e-5
    for ours in (one, several):
        assert ours.losses == pytest.approx(truth.losses, rel=rounding if ours is several else 1e-5)
    # In plain torch running statistics follow the micro-batches one after the other.
    assert_close(one, truth, 1e-5, but=RUNNING if "--micro-batch" in flags else ())
    assert_close(several, one, rounding)


RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def assert_close(ours: Done, theirs: Done, rounding: float, but: tuple[str, ...] = ()) -> None:
    truth = theirs.result()["tensors"]
    for rank in range(len(ours.statuses)):
        tensors = ours.result(rank)["tensors"]
        assert tensors.keys() == truth.keys()
        for name in (name for name in tensors if not name.endswith(but or "no such name")):
            assert tensors[name].dtype == truth[name].dtype
            difference = (tensors[name].double() - truth[name].double()).abs().max()
            assert difference <= rounding * (truth[name].double().abs().max() + 0.1), name


STATELESS = (
    "Weights",
    "Autograd",
    "Losses",
    "TwoBackwards",
    "ThreeBackwards",
    "Mean",
    "Clipped",
    "TorchDataset",
)
RESUMED = [case for case in RIGHT if case[0] not in STATELESS and "--micro-batch" not in case]


@pytest.mark.parametrize(
    "case",
    [
        *thinned(RESUMED, every=9),
        ("Dropout", 2),
        ("Normalizer", 2),
        *exhaustively((("Normalizer", 1),), (("BatchNorm", 2, "--micro-batch", "4"),)),
    ],
    ids=name_of,
)
def test_stopped_loop_resumes_bit_for_bit(own, case):
    name, ranks, *flags = case
    whole = own(name, "join", ranks, *flags)
    half = own(name, "join", ranks, *flags, "--steps", "16", out=f"{name_of(case)}-parts")
    assert set(half.statuses) == {0}, half.logs
    parts = own(name, "resume", ranks, *flags, out=f"{name_of(case)}-parts")
    assert parts.losses == whole.losses
    assert [record.step for record in parts.dir.records(0)] == list(range(30))
    ours, theirs = (run.dir.checkpoint_path(30) for run in (parts, whole))
    for file in ("weights.safetensors", "state.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    assert read_checkpoint_unverified(ours).states == read_checkpoint_unverified(theirs).states
    for rank in range(ranks):
        tensors = whole.result(rank)["tensors"]
        assert all(torch.equal(value, tensors[key]) for key, value in parts.result(rank)["tensors"].items())
    assert parts.dir.manifest().result.replicas_agree is (True if ranks > 1 else None)


def test_batch_norm_losses_are_unchanged_by_a_rank_without_share(own):
    alone = own("BatchNorm", "join", 1, "--micro-batch", "8")
    idle = own("BatchNorm", "join", 2, "--micro-batch", "8", "--shares", "1:0")
    assert idle.losses == pytest.approx(alone.losses, rel=1e-5)


def refused(done: Done, message: str, hint: str) -> None:
    """All ranks end by themselves, each with the whole story and the line of the program."""
    assert done.statuses == [1] * len(done.statuses), done.logs
    for rank, log in enumerate(done.logs):
        lines = [line.removeprefix(f"[rank{rank}]: ") for line in log.splitlines()]
        told, *advice, place = lines[next(i for i, line in enumerate(lines) if line.startswith("error: ")) :]
        own = re.sub(r"^error: rank \d+: ", "error: ", told)  # else it tells another's
        assert own.startswith(f"error: {message}"), log
        assert "".join(advice).startswith(f"hint:  {hint}" if hint else ""), log
        assert re.match(r"at:    \S*/own\.py:\d+: ", place), log
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("case", "message", "hint"),
    [
        (("Lbfgs", 2), "LBFGS runs forward and backward itself", "an optimizer whose step() needs no closure"),
        (("BatchNorm", 2), "norm is a BatchNorm: it normalizes over a micro-batch; with 2 ranks", "--micro-batch N"),
        (("BatchNorm", 1, "--micro-batch", "5"), "norm is a BatchNorm", "--micro-batch N"),
        (("Stream", 2), "run.steps: Numbers cannot be read by index", "a data set with __getitem__"),
        (("ObjectInState", 2), "state of 'scheduler' holds an object at lr_lambdas[0].table[1]", "checkpoints hold"),
        (("SparseGradients", 2), "run.steps: 1.table has sparse gradients, which are neither", "sparse=False"),
        (
            ("LossWithParameters", 2),
            "run.steps: AdamW has a parameter of shape () that no model has",
            "run.model(module)",
        ),
        (("ForgottenScheduler", 2), "run.steps: AdamW has a learning-rate scheduler that", "scheduler = run.state("),
        (("ForgottenBesideAnother", 1), "run.steps: AdamW has a learning-rate scheduler", "scheduler = run.state("),
    ],
    ids=lambda value: name_of(value) if isinstance(value, tuple) else "",
)
def test_invalid_setup_is_refused_before_training(own, case, message, hint):
    name, ranks, *flags = case
    done = own(name, "join", ranks, *flags)
    refused(done, message, hint)
    assert not done.dir.path.exists()


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("MeanForSum", "step.backward got a mean: on rank 0 some samples give", "reduction='sum', or"),
        ("MeanOfSquares --micro-batch=3", "step.backward got a mean: on rank", "reduction='sum', or"),
        ("SumForMean", "step.backward got a sum multiplied by a count: on rank", "step.backward(sum) without a count"),
        ("SumAndMean", "step.backward got a mean: on rank 0 some samples give", "reduction='sum', or"),
        (
            "PenaltyOnWeights",
            "step.backward got a mix of a sum and a mean: on rank 0",
            "multiply what is not a sum over the samples",
        ),
        ("OtherData", "rank 1 has other data than rank 0: the first step's samples differ", "the same file on every"),
        ("ForgottenOptimizer", "step.update: this AdamW was not given to run.optimizer", "optimizer = run.optimizer"),
        ("ForgottenBackward", "no step.backward in the loop over step.micro_batches()", "step.backward(loss_sum), not"),
        ("ForgottenUpdate", "step 0: there was no step.update: nothing was learned from its batch", "gradients of"),
        ("TwoPasses", "step.micro_batches() called again before step.update", "go through the micro-batches once"),
        ("UpdateInside", "step.update inside the loop over step.micro_batches()", "call it once, after the loop"),
        ("BackwardOutside", "step.backward outside of the loop over step.micro_batches()", "call it inside"),
    ],
)
def test_invalid_loop_is_refused_in_first_step(own, name, message, hint):
    name, *flags = name.split()
    done = own(name, "join", 2, *flags)
    refused(done, message, hint)
    assert done.dir.manifest().verdict == "failed"
    assert done.dir.checkpoint_steps() == []
    assert done.dir.records(0) == []


def test_a_used_folder_and_a_finished_run_are_refused(own):
    first = own("Sgd", "join", 2, "--steps", "15", out="used")
    assert set(first.statuses) == {0}, first.logs
    before = contents(first.dir)
    out = str(first.dir)
    taken = own("Sgd", "join", 2, out="used")
    refused(taken, f"--out {out}: already contains a run", "evener train --resume")
    finished = own("Sgd", "resume", 2, "--steps", "15", out="used")
    refused(finished, f"{out}: it has taken all its 15 steps", "--steps 30 goes on")
    assert contents(first.dir) == before
    of_another = own("Scheduler", "resume", 2, out="used")
    folder = first.dir.checkpoint_path(15)
    refused(of_another, f"{folder}: this program has a state 'user/scheduler', and it has none", "")
    assert set(contents(first.dir)) == set(before)


def test_refusal_by_one_rank_stops_all_ranks(own):
    """One that left alone, while another still joins, would leave that one with a connection that broke."""
    taken = own("Sgd", "join", 1, "--steps", "2", out="apart-1")
    assert set(taken.statuses) == {0}, taken.logs
    apart = own("Sgd", "join", 2, out="apart-RANK")
    assert apart.statuses == [1, 1]
    for log, who in zip(apart.logs, ("rank 1: ", ""), strict=True):
        assert f"error: {who}--out {taken.dir}: already contains a run\n" in log


def test_loop_left_early_is_saved(own):
    left = own("EarlyStop", "join", 2)
    whole = own("Sgd", "join", 2)
    assert set(left.statuses) == set(whole.statuses) == {0}, left.logs
    assert left.losses == whole.losses[:20]
    assert left.dir.checkpoint_steps() == [20]
    manifest = left.dir.manifest()
    assert (manifest.verdict, manifest.result.steps, manifest.result.replicas_agree) == ("stopped", 20, True)


def test_resume_never_starts_from_non_finite_weights(own):
    done = own("Explodes", "join", 2, "--checkpoint-every", "10")
    refused(
        done, "after step 30: second.weight is not finite: 1 of 256 values; it is not saved", "--resume goes on from"
    )
    assert done.dir.checkpoint_steps()[-1] == 20
    assert done.dir.manifest().verdict == "failed"


def test_documented_loop_learns_alike_on_one_and_two_ranks(tmp_path, run_script):
    page = (ROOT / "docs" / "guides" / "own-loop.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block == (ROOT / "examples" / "own_loop.py").read_text()
    runs = []
    for ranks in (1, 2):
        flags = ("--batch", "64", "--steps", "100", "--threads", "1", "--dtype", "fp32", "--out", f"{tmp_path}/{ranks}")
        done = run_script(block, *flags, ranks=ranks)
        assert done.returncode == 0, done.stderr
        runs.append([record.loss for record in RunDir(tmp_path / str(ranks)).records(0)])
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert runs[0][0] > 0.6  # about ln 2: it knows nothing
    assert runs[0][-1] < 0.3


def contents(run: RunDir) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


DRIFTING = [("Gan", 2), ("TwoOptimizers", 3), ("Scheduler", 2), ("Unfreeze", 2), ("SharedBuffers", 2)]


@pytest.mark.parametrize("case", thinned(DRIFTING, every=2), ids=name_of)
def test_drifting_replicas_end_equal_and_resume_bit_for_bit(own, case):
    """30 steps are four outer ones and a last one. Stopped after its first, a run goes on where each replica was."""
    name, ranks = case
    flags = ("--sync", "diloco:7", "--shares", ":".join("321"[:ranks]), "--verify-every", "5")
    whole = own(name, "join", ranks, *flags)
    tensors = [whole.result(rank)["tensors"] for rank in range(ranks)]
    assert all(torch.equal(value, tensors[0][key]) for other in tensors for key, value in other.items())
    assert whole.dir.manifest().result.replicas_agree is True
    assert whole.losses[-1] < whole.losses[0] or name == "Gan"
    half = own(name, "join", ranks, *flags, "--max-s", "0", out=f"{name}-drifting")
    assert half.dir.manifest().verdict == "stopped", half.logs
    parts = own(name, "resume", ranks, *flags, out=f"{name}-drifting")
    assert parts.losses == whole.losses
    ours, theirs = (run.dir.checkpoint_path(30) for run in (parts, whole))
    for file in ("weights.safetensors", "state.safetensors"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
