"""Non-finite or diverged training rolls back on all hosts, or ends where that would not help."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from evener.core.base.errors import HopelessError, NonFiniteError
from evener.core.run.membership_epoch import (
    EXIT_DISK_FULL,
    EXIT_HOST_LEFT,
    EXIT_HOST_NOT_RETRYABLE,
    EXIT_PEER_FAILED,
    EXIT_REGROUP,
    EXIT_RUN_FAILED,
    MembershipEpoch,
    Rendezvous,
)
from evener.core.run.roster import RankSlot, initial_roster
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import RunDir, read_checkpoint
from evener.core.run.runwriter import RunWriter
from evener.worker.membership.rollback import RegroupExit, rollback_on_failure
from evener.worker.rank.clock import HostClock
from evener.worker.record.span_recorder import SpanRecorder
from evener.worker.record.step_recorder import HostCopy, StepRecorder
from evener.worker.state.checkpoint import load
from tests.conftest import TIMEOUT_S
from tests.worker.test_membership_epochs import Training, alone, pytestmark  # noqa: F401

from ..tiers import exhaustive

# evener's own worker with a fault: before each update, `spoil` may change what a host holds.
SPOILED = """
import os, pathlib, runpy, sys, torch
from evener.worker.train.train_step import TrainStep

update, home, host = TrainStep.update, pathlib.Path(sys.argv[-1]), os.environ["EVENER_HOST"]

def times(most):
    "Is it one of the first times that this host is asked?"
    with (home / "spoiled").open("a+") as file:
        file.write("x")
        return file.tell() <= most

def spoiled(self, optimizer):
    with torch.no_grad():
        spoil(self.index, optimizer.param_groups[0]["params"][0], self)
    update(self, optimizer)

TrainStep.update = spoiled
exec(sys.argv.pop(1))
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""


class Spoiled(Training):
    """Checkpoints are those of steps 20, 40 and 60."""

    STEPS = 60

    @classmethod
    def by(cls, spoil: str, folder: Path, corpus: Path, names: str = "abc") -> Spoiled:
        """With a fault."""
        (folder / "spoiled.py").write_text(SPOILED)
        return cls(folder, corpus, names, [str(folder / "spoiled.py"), f"def spoil(step, weight, self):\n {spoil}"])

    def wait(self) -> list[int]:
        """Exit statuses of the agents."""
        try:
            return [agent.wait(TIMEOUT_S) for agent in self.agents.values()]
        finally:
            for name, agent in self.agents.items():
                if agent.poll() is None:
                    self.kill(name)

    def events(self, kind: str) -> list[list[dict[str, Any]]]:
        """Of each host."""
        found = [RunDir(self.folder / name).events() for name in self.parts]
        return [[event for event in events if event["event"] == kind] for events in found]

    def log(self, name: str) -> str:
        return (self.folder / name / "log").read_text()

    def is_finite(self) -> bool:
        """Is all that is saved?"""
        folders = [RunDir(self.folder / name).checkpoint_path(step)
                   for name in self.parts for step in RunDir(self.folder / name).checkpoint_steps()]  # fmt: skip
        return all(bool(tensor.isfinite().all()) for folder in folders for tensor in load(folder).weights.values())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[float]:
    return alone(Spoiled, corpus, tmp_path_factory.mktemp("alone") / "run")


# The last step before a checkpoint: what it did to the weights would be saved next.
ONCE = {
    "loss": "if step == 39 and host == 'b' and times(1): self._loss_sum *= float('nan')",
    "gradient norm": "if step == 39 and host == 'b' and times(1): weight.grad[0] = float('inf')",
}


@exhaustive
@pytest.mark.parametrize("what", ["gradient norm", "loss"])
def test_non_finite_step_rolls_back_and_is_retried(tmp_path: Path, corpus: Path, undisturbed: list[float],
                                                what: str) -> None:  # fmt: skip
    fleet = Spoiled.by(ONCE[what], tmp_path, corpus)
    assert fleet.wait() == [0, 0, 0], fleet.log("a")
    assert list(fleet.losses().values()) == pytest.approx(undisturbed, rel=1e-5)
    events = fleet.events("run.nonfinite")
    assert events[0] == events[1] == events[2]
    ((event,), *_) = events
    assert event | {"step": 39, "ranks": [1], "world": 0, "goes_back": True} == event
    assert fleet.is_finite()


class Drifting(Spoiled):
    """Replicas learn alone for ten steps, and are told of steps one later."""

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        return [*super().flags(corpus), "--sync", "diloco:10"]


@exhaustive
def test_diloco_replicas_roll_back_after_non_finite_step(tmp_path: Path, corpus: Path) -> None:
    fleet = Drifting.by(ONCE["gradient norm"], tmp_path, corpus)
    assert fleet.wait() == [0, 0, 0], fleet.log("a")
    assert [[(event["step"], event["ranks"]) for event in events] for events in fleet.events("run.nonfinite")] == [
        [(39, [1])]
    ] * 3
    assert list(fleet.losses()) == list(range(60))
    assert fleet.is_finite()
    assert fleet.saved("c") == 60


@exhaustive
def test_repeated_non_finite_step_ends_the_run(tmp_path: Path, corpus: Path) -> None:
    fleet = Spoiled.by("if step == 27: self._loss_sum *= float('nan')", tmp_path, corpus)
    assert fleet.wait() == [EXIT_RUN_FAILED] * 3
    for events in fleet.events("run.nonfinite"):
        assert [(event["world"], event["step"], event["goes_back"]) for event in events] == [
            (0, 27, True),
            (1, 27, False),
        ]
    told = [event["error"] for events in fleet.events("failure") for event in events]
    assert told == ["step 27: the loss of rank 0, rank 1, rank 2 is not finite, nor was it before the rollback"] * 3
    assert "epoch 2" in fleet.log("a")
    assert "epoch 3" not in fleet.log("a")
    assert [RunDir(tmp_path / name).checkpoint_steps() for name in "abc"] == [[20]] * 3
    assert {RunDir(tmp_path / name).manifest().verdict for name in "abc"} == {"failed"}
    assert fleet.is_finite()


class Seat0:
    """The group of one rank, on a host of its own, of which the other host has told this."""

    rank = local_rank = 0
    has_dynamic_membership = is_writer = True
    membership_epoch = MembershipEpoch(number=3, hosts=["a", "b"])

    def __init__(self, other: list[dict[str, Any]]) -> None:
        self._other = other

    def all_gather(self, value: Any, kind: Any) -> list[Any]:
        return [value, self._other if isinstance(value, list) else value]


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ([], [], RegroupExit),
        ([5], [], HopelessError),
        ([], [5], HopelessError),  # this host was away
        ([4], [6], RegroupExit),
    ],
)
def test_all_hosts_count_first_rollback_that_only_one_host_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: list[int], there: list[int], expected: type[BaseException]
) -> None:
    monkeypatch.setenv("EVENER_RUN", "r2")
    run = RunWriter(tmp_path)
    run.add_event("run.nonfinite", step=5, world=1, run="r1")  # before it was started anew
    for step in here:
        run.add_event("run.nonfinite", step=step, world=1, run="r2")
    group: Any = Seat0([{"event": "run.nonfinite", "step": step, "world": 2, "run": "r2"} for step in there])
    with pytest.raises(expected) as raised, rollback_on_failure(run, group):
        raise NonFiniteError("step 5: the loss of rank 1 is not finite", step=5, ranks=[1])
    assert raised.value.code == 75 if expected is RegroupExit else raised.value.exit_status == 2
    assert run.events()[-1]["goes_back"] == (expected is RegroupExit)


def test_flush_before_checkpoint_detects_non_finite_lagging_step(tmp_path: Path) -> None:
    """As of a GPU, whose steps are read while the next one runs."""
    roster = initial_roster(parse_args(["--batch", "4"]), [RankSlot(host="a", device="cuda:0")], None)
    rundir, clock = RunWriter(tmp_path / "run"), HostClock()
    recorder = StepRecorder(rundir, 0, roster, clock, None, SpanRecorder(rundir, 0, clock))
    for step, loss in enumerate((1.0, math.nan)):
        recorder.begin_step()
        assert recorder.receive_due_reports() is False
        recorder.stop_timers()
        recorder.end_step(
            sync_s=lambda: 0.0,
            step=step,
            epoch=0,
            tokens=2,
            global_tokens=4,
            bytes=0,
            lr=0.0,
            loss_sum=HostCopy(torch.tensor(loss)),
            grad_norm=None,
        )
    with pytest.raises(NonFiniteError, match="step 1: the loss of rank 0 is not finite"):
        recorder.flush()


# What a flipped bit of memory does, before step 27: all gradients after it are wrong, too.
FLIP = "if step == 27 and host == '{}' and times({}): weight.view(-1).view(torch.int32)[3] ^= 1 << 20"


@exhaustive
def test_host_with_repeated_memory_errors_leaves_the_run(
    tmp_path: Path, corpus: Path, undisturbed: list[float]
) -> None:
    """The first time all go back, the second time the others go on alone; nothing of it is left in what was learned."""
    fleet = Spoiled.by(FLIP.format("c", 2), tmp_path, corpus)
    assert fleet.wait() == [0, 0, EXIT_HOST_LEFT], fleet.log("a")
    assert list(fleet.losses().values()) == pytest.approx(undisturbed, rel=1e-5)
    events = fleet.events("run.diverged")
    assert events[0] == events[1] == events[2]
    assert [(event["step"], event["odd"], event["leaves"], event["goes_back"]) for event in events[0]] == [
        (40, ["c"], [], True),
        (40, ["c"], ["c"], True),
    ]
    assert {one["rank"] for event in events[0] for one in event["differences"]} == {2}
    assert "memtester" in events[0][1]["hint"]
    assert "this host has left the run: after step 40: the replicas differ: rank 2 in " in fleet.log("c")
    last = RunDir(tmp_path / "a").manifest()
    assert (last.verdict, [member.host for member in last.roster.members]) == ("finished", ["a", "b"])
    assert last.result is not None
    assert last.result.replicas_agree


@exhaustive
def test_two_diverged_hosts_end_the_run_on_second_divergence(tmp_path: Path, corpus: Path) -> None:
    fleet = Spoiled.by(FLIP.format("b", 9), tmp_path, corpus, "ab")
    assert fleet.wait() == [EXIT_RUN_FAILED] * 2, fleet.log("a")
    for events in fleet.events("run.diverged"):
        assert [(event["step"], event["odd"], event["goes_back"]) for event in events] == [
            (40, [], True),
            (40, [], False),
        ]
        assert all("evener verify RUN --replay" in event["hint"] for event in events)
    assert [RunDir(tmp_path / name).checkpoint_steps() for name in "ab"] == [[20]] * 2


UNLIKE = """
import os, runpy, sys
if os.environ["EVENER_HOST"] == "b":
    os.environ["ATEN_CPU_CAPABILITY"] = "default"  # as a processor without AVX2 computes
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""


@exhaustive
def test_hosts_that_round_differently_save_one_model(tmp_path: Path, corpus: Path, undisturbed: list[float]) -> None:
    """No difference between them is taken for a fault."""
    (tmp_path / "unlike.py").write_text(UNLIKE)
    fleet = Spoiled(tmp_path, corpus, "ab", worker=[str(tmp_path / "unlike.py")])
    assert fleet.wait() == [0, 0], fleet.log("a")
    assert list(fleet.losses().values()) == pytest.approx(undisturbed, rel=1e-5)
    apart = [event["step"] for event in fleet.events("replicas.reconciled")[0]]
    assert set(apart) <= {20, 40, 60}  # none where this processor rounds as one without AVX2
    for step in (40, 60):
        saved = [read_checkpoint(RunDir(tmp_path / name).checkpoint_path(step)) for name in "ab"]
        assert saved[0].replica_hashes[0] == saved[0].replica_hashes[1]
        assert saved[0].files["weights.safetensors"] == saved[1].files["weights.safetensors"]


@pytest.mark.parametrize(
    ("error", "world", "status"),
    [
        ("UsageError('no')", 0, EXIT_RUN_FAILED),
        ("UsageError('no')", 1, EXIT_HOST_NOT_RETRYABLE),
        ("HopelessError('no')", 1, EXIT_RUN_FAILED),
        ("RunError('no')", 1, 1),
        ("RunError('no', failed_rank=2)", 1, EXIT_REGROUP),
        ("NoRoomError('no')", 1, EXIT_DISK_FULL),
        ("NoRoomError('no')", 0, EXIT_RUN_FAILED),
        ("torch_says", 1, EXIT_PEER_FAILED),
    ],
)
def test_custom_program_exit_status_says_whether_restart_would_help(
    tmp_path: Path, error: str, world: int, status: int
) -> None:
    meeting = Rendezvous(epoch=MembershipEpoch(number=world, hosts=["a"]))
    (tmp_path / "world.json").write_bytes(msgspec.json.encode(meeting))
    imports = "from evener.core.base import errors; from evener.worker.rank.user_errors import install_excepthook"
    lost = "errors.torch_says = RuntimeError('Connection closed by peer [10.0.0.2]:41')"
    program = f"{imports}; install_excepthook(); {lost}; raise errors.{error}"
    argv, env = [sys.executable, "-c", program], {"EVENER_WORLD": str(tmp_path / "world.json")}
    done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=TIMEOUT_S)
    first = "Traceback (most recent call last):" if status == EXIT_PEER_FAILED else "error: no"  # torch's own words
    assert (done.returncode, done.stderr.splitlines()[0]) == (status, first)
    assert subprocess.run(argv, capture_output=True, timeout=TIMEOUT_S).returncode == 1  # as Python's own
