"""Hosts that leave and join do not change the losses, under real agents of three hosts."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from evener.core.run.membership_epoch import EXIT_HOST_LEFT
from evener.core.run.roster import RankSlot, initial_roster
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import StepRecord
from tests.agents import AgentProcesses
from tests.conftest import ENV, TIMEOUT_S

from ..tiers import exhaustive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="each host has a loopback address of its own: Linux")

WORKER = ("-m", "evener.worker")


class Training(AgentProcesses):
    """A run of evener's own worker, or of a program that becomes it; it ends by itself."""

    STEPS = 160

    def __init__(self, folder: Path, corpus: Path, names: str = "abc", worker: Sequence[str] = WORKER) -> None:
        flags = self.flags(corpus)
        spec = parse_args(flags)
        slots = [RankSlot(host=name, device="cpu") for name in names for _ in range(self.RANKS)]
        for name in names:
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "roster.json").write_bytes(
                msgspec.json.encode(initial_roster(spec, slots, spec.model.block_size))
            )
        self._worker = [*worker, *flags]
        super().__init__(folder, names)

    def program(self, home: Path) -> list[str]:
        return [*self._worker, "--out", str(home)]

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        train = f"--model tiny --batch 12 --steps {cls.STEPS} --lr 3e-5 --dtype fp32 --dropout 0 --shares equal"
        return f"--data {corpus} {train} --device cpu --threads 1 --eval-every 0 --checkpoint-every 20".split()

    def losses(self) -> dict[int, float]:
        """By step, as the ranks wrote them down who were in the newest world that took it."""
        found: dict[int, tuple[int, float]] = {}
        for rank in range(len(self.parts) * self.RANKS):
            for record in self.records(rank):
                if record.loss is not None and record.epoch >= found.get(record.step, (-1, 0.0))[0]:
                    found[record.step] = record.epoch, record.loss
        return {step: loss for step, (_, loss) in sorted(found.items())}

    def records(self, rank: int) -> list[StepRecord]:
        """Where its host has them."""
        return RunDir(self.folder / [*self.parts][rank // self.RANKS]).records(rank)

    def saved(self, name: str) -> int:
        return max(RunDir(self.folder / name).checkpoint_steps(), default=0)


@contextlib.contextmanager
def ended(fleet: Training) -> Iterator[None]:
    """All of it, whatever happens."""
    try:
        yield
    finally:
        for name, agent in fleet.agents.items():
            if agent.poll() is None:
                fleet.kill(name)


def alone(training: type[Training], corpus: Path, out: Path) -> list[float]:
    """Its losses on one process that nobody disturbs."""
    argv = [sys.executable, *WORKER, *training.flags(corpus), "--out", str(out)]
    subprocess.run(argv, env=ENV, check=True, capture_output=True, timeout=TIMEOUT_S)
    return [record.loss or 0.0 for record in RunDir(out).records(0)]


class Drifting(Training):
    """Whose replicas agree for the first time long after the test has ended."""

    STEPS = 1_000_000

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        other = {"3e-5": "0.001", "20": "1000000"}  # --lr, --checkpoint-every
        mine = ["--sync", "diloco:500000", "--compile", "off", "--min-lr", "0.001", "--warmup", "0"]
        return [*[other.get(word, word) for word in super().flags(corpus)], *mine]


class Sharded(Training):
    """Whose ranks hold a part of the weights each: what a lost one held is in the checkpoint."""

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        return [*super().flags(corpus), "--sync", "fsdp"]


def last_world(folder: Path) -> int:
    """The step with which it began."""
    return max((event["step"] for event in RunDir(folder).events() if event["event"] == "world"), default=0)


@exhaustive
def test_updates_of_drifting_replicas_survive_leaving_host(tmp_path: Path, corpus: Path) -> None:
    fleet = Drifting(tmp_path, corpus)
    with ended(fleet):
        fleet.until(lambda: len(fleet.records(0)) > 40)
        (tmp_path / "c" / "host" / "kept-out").write_text("wanted elsewhere")
        assert fleet.agents["c"].wait(TIMEOUT_S) == EXIT_HOST_LEFT
        fleet.until(lambda: (left := last_world(tmp_path / "a")) > 0 and fleet.records(0)[-1].step > left + 6)
    left = last_world(tmp_path / "a")
    losses = fleet.losses()
    first, before, after = (sum(losses[step] for step in range(begin, begin + 5)) / 5
                            for begin in (0, left - 5, left))  # fmt: skip
    assert before < first - 0.3
    assert after < (first + before) / 2, (first, before, after)


@exhaustive
@pytest.mark.parametrize("training", [Training, Sharded])
def test_losses_are_unchanged_by_hosts_leaving_and_joining(
    tmp_path: Path, corpus: Path, training: type[Training]
) -> None:
    """A rank is killed, the first host loses its power, is back and let in: every loss is that of one process."""
    undisturbed = alone(training, corpus, tmp_path / "alone")
    fleet = training(tmp_path, corpus)
    with ended(fleet):
        fleet.until(lambda: fleet.saved("a") >= 20)
        next(one for one in fleet.ranks("b")).kill()
        fleet.until(lambda: fleet.saved("c") >= 60)
        fleet.kill("a")
        fleet.until(lambda: "epoch 2 is b, c" in (tmp_path / "c" / "log").read_text())
        fleet.start("a")
        assert [agent.wait(TIMEOUT_S) for agent in fleet.agents.values()] == [0, 0, 0]
    losses = fleet.losses()
    assert list(losses) == list(range(Training.STEPS))
    assert list(losses.values()) == pytest.approx(undisturbed, rel=1e-5)
    worlds = [
        json.loads(line) for name in "abc" for line in (tmp_path / name / "events.jsonl").read_text().splitlines()
    ]
    seen = {event["number"]: event for event in worlds if event["event"] == "world"}
    assert [sorted(event["hosts"]) for _, event in sorted(seen.items())] == [
        ["a", "b", "c"],
        ["a", "b", "c"],
        ["b", "c"],
        ["a", "b", "c"],
    ]
    last = json.loads((tmp_path / "c" / "host" / "kept.json").read_text())["epoch"]
    assert last["step"] >= 60  # what was saved since the rank was killed
    assert last["failures"] == 0
    manifests = [RunDir(tmp_path / name).manifest() for name in "abc"]
    assert {manifest.verdict for manifest in manifests} == {"finished"}
    assert all(manifest.result is not None and manifest.result.replicas_agree for manifest in manifests)
