"""Ranks stay alive through membership changes, under real agents of three hosts on one machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir
from tests.conftest import TIMEOUT_S
from tests.worker.test_membership_epochs import Training, alone, ended, pytestmark  # noqa: F401

from ..tiers import exhaustive

# evener's own worker, which takes its steps slowly: while a test waits for hosts, others need the processor.
PACED = """
import time
from evener.worker.__main__ import main
from evener.worker.train import loop
train_one_step = loop.train_one_step
def paced(*args):
    time.sleep(0.03)
    train_one_step(*args)
loop.train_one_step = paced
raise SystemExit(main())
"""


class Living(Training):
    """The same, of ranks that live on, for as long as it takes."""

    LIVES = True
    STEPS = 100_000

    def __init__(self, folder: Path, corpus: Path, names: str = "abc", source: str = PACED) -> None:
        (folder / "worker.py").write_text(source)
        super().__init__(folder, corpus, names, [str(folder / "worker.py")])

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        return [*super().flags(corpus), "--min-lr", "3e-5", "--warmup", "0"]


class Drifting(Living):
    """Replicas that drift, and agree in 8 bits beside their steps."""

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        return [*super().flags(corpus), "--sync", "diloco:6:int8:streamed"]


# A rank of b can't be freed from the first world that is lost: it waits for ever where it should have been let go.
STUCK = """
import os, pathlib, sys, time
from evener.worker.__main__ import main
from evener.worker.sync.gradient_sync import GradientSync
mark, abandon = pathlib.Path(sys.argv[-1], "was-stuck"), GradientSync.abort
def stuck(sync):
    if os.environ["EVENER_HOST"] == "b" and not mark.exists():
        mark.touch()
        time.sleep(1000)
    abandon(sync)
GradientSync.abort = stuck
raise SystemExit(main())
"""


def stop_at(fleet: Training, host: str) -> None:
    """Once it has saved once more, a rank of it ends its step, and all save."""
    saved = fleet.saved(host)
    fleet.until(lambda: fleet.saved(host) > saved)
    stop(fleet, host)


def stop(fleet: Training, host: str) -> None:
    next(one for one in fleet.ranks(host)).terminate()
    assert {agent.wait(TIMEOUT_S) for agent in fleet.agents.values()} == {0}
    manifests = [RunDir(fleet.folder / name).manifest() for name in fleet.parts]
    assert {manifest.verdict for manifest in manifests} == {"stopped"}
    assert all(manifest.result is not None and manifest.result.replicas_agree for manifest in manifests)


def through_the_night(fleet: Training) -> None:
    """A rank is killed, and let in when there is another one in its place; then the first host loses its power, and
    comes back. Nobody else begins anew.
    """
    with ended(fleet):
        fleet.until(lambda: fleet.saved("a") >= 20)
        lasting = {one.pid for name in "ac" for one in fleet.ranks(name)}
        next(one for one in fleet.ranks("b")).kill()
        fleet.until(lambda: len(worlds(fleet)) > 1 and worlds(fleet)[-1] == {"a", "b", "c"})
        if not any("hung in a collective" in told_by(fleet, name) for name in "ac"):  # which is as if they were killed
            assert worlds(fleet) == [{"a", "c"}, {"a", "b", "c"}]
            assert {one.pid for name in "ac" for one in fleet.ranks(name)} == lasting
        before = fleet.saved("b")
        fleet.until(lambda: fleet.saved("b") > before)
        fleet.kill("a")
        fleet.until(lambda: worlds(fleet)[-1] == {"b", "c"})
        fleet.start("a")
        fleet.until(lambda: worlds(fleet)[-1] == {"a", "b", "c"})
        stop_at(fleet, "a")


def worlds(fleet: Training, name: str = "c") -> list[set[str]]:
    """Who has been in them, as this host tells, but for the first."""
    lines = (fleet.folder / name / "log").read_text().splitlines()
    return [set(line.rpartition(" is ")[2].split(", ")) for line in lines
            if line.startswith("evener: ") and ": membership epoch " in line]  # fmt: skip


@exhaustive
def test_drifting_replicas_continue_and_accept_joining_host(tmp_path: Path, corpus: Path) -> None:
    """No step is missing, and it learns as one process does."""
    fleet = Drifting(tmp_path, corpus)
    through_the_night(fleet)
    losses = list(fleet.losses().values())
    assert list(fleet.losses()) == list(range(len(losses)))
    undisturbed = alone(type("Alone", (Drifting,), {"STEPS": len(losses)}), corpus, tmp_path / "alone")
    assert sum(losses[-20:]) < 1.05 * sum(undisturbed[-20:])


# evener's own worker with another strategy every 10 steps: replicas drift, and are equal again.
SWITCHING = (
    """
from evener.core.run.roster import parse_sync
from evener.worker.membership.fixed import FixedMembership
def update_roster(self, reports, next_step):
    wanted = parse_sync("diloco:4:int8:streamed" if next_step // 10 % 2 else "ddp")
    if self.roster.world_size == 1 or self.roster.sync == wanted:
        return None
    self.roster = self.roster.with_sync(wanted, 0, next_step, why="it was asked for")
    return self.roster
FixedMembership.update_roster = update_roster
"""
    + PACED
)


class Switching(Living):
    """Replicas that drift for a while, and are equal for a while."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        super().__init__(folder, corpus, source=SWITCHING)

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        return [*super().flags(corpus), "--sync", "auto"]


@exhaustive
def test_hosts_are_lost_and_join_while_the_strategy_changes(tmp_path: Path, corpus: Path) -> None:
    """In the steps of a change too; a host that joins was planned with another strategy."""
    fleet, draw = Switching(tmp_path, corpus), random.Random(1)
    with ended(fleet):
        for _ in range(8):
            before = fleet.saved("a")
            fleet.until(lambda before=before: fleet.saved("a") > before)  # type: ignore[misc]
            time.sleep(draw.uniform(0, 1.0))
            next(one for one in fleet.ranks("b")).kill()
            num = len(worlds(fleet))
            fleet.until(lambda num=num: len(worlds(fleet)) > num and len(worlds(fleet)[-1]) == 3)  # type: ignore[misc]
        stop_at(fleet, "a")
    losses = list(fleet.losses().values())
    assert list(fleet.losses()) == list(range(len(losses)))
    # Rank 0 tells of them, which is another host's once a has been late, as on a busy machine.
    changes = [event for name in "abc" for event in RunDir(tmp_path / name).events() if event["event"] == "rechosen"]
    assert len({event["epoch"] for event in changes}) > 8
    undisturbed = alone(type("Alone", (Drifting,), {"STEPS": len(losses)}), corpus, tmp_path / "alone")
    assert sum(losses[-20:]) < 1.05 * sum(undisturbed[-20:])


@exhaustive
def test_stuck_rank_ends_and_rejoins(tmp_path: Path, corpus: Path) -> None:
    fleet = Living(tmp_path, corpus, source=STUCK)
    with ended(fleet):
        fleet.until(lambda: fleet.saved("a") >= 20)
        fleet.kill("c")
        fleet.until(lambda: "hung in a collective of a lost membership epoch" in told_by(fleet, "b"))
        fleet.start("c")
        fleet.until(lambda: worlds(fleet, "a")[-1] == {"a", "b", "c"})
        stop_at(fleet, "b")
    losses = fleet.losses()
    assert list(losses) == list(range(len(losses)))


def told_by(fleet: Training, name: str) -> str:
    """What its ranks wrote to stderr."""
    return "".join(log.read_text() for log in (fleet.folder / name / "host" / "ranks").glob("*/*/*/stderr.log"))


@exhaustive
def test_live_membership_repeats_no_step(tmp_path: Path, corpus: Path) -> None:
    fleet = Living(tmp_path, corpus)
    through_the_night(fleet)
    records = [record for rank, name in enumerate("abc") for record in RunDir(tmp_path / name).records(rank)]
    losses = fleet.losses()
    assert list(losses) == list(range(len(losses)))
    assert len({(record.step, record.epoch) for record in records}) == len(losses)  # each in one world
    undisturbed = alone(type("Alone", (Living,), {"STEPS": len(losses)}), corpus, tmp_path / "alone")
    assert list(losses.values()) == pytest.approx(undisturbed, rel=1e-5)


class Asked(Living):
    """It saves where somebody asks for it, and at no other time."""

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        return [*super().flags(corpus), "--checkpoint-every", "0"]


class AskedDrifting(Asked):
    """The same of replicas that drift."""

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        return [*super().flags(corpus), "--sync", "diloco:6:int8:streamed"]


@exhaustive
@pytest.mark.parametrize("training", [Asked, AskedDrifting])
def test_requested_checkpoint_is_saved_despite_rank_loss(
    tmp_path: Path, corpus: Path, training: type[Training]
) -> None:
    """A rank dies as it is asked for, a little earlier or later; those who are left all save the same step."""
    fleet, chance = training(tmp_path, corpus), random.Random(5)
    with ended(fleet):
        fleet.until(lambda: RunDir(tmp_path / "a").is_run() and len(fleet.records(0)) > 5)
        for _ in range(3):
            ask(fleet, "a", lambda: [time.sleep(chance.uniform(0.0, 0.1)), *(one.kill() for one in fleet.ranks("b"))])
            fleet.until(lambda: worlds(fleet)[-1:] == [{"a", "b", "c"}])
        ask(fleet, "b", lambda: [])
        stop(fleet, "b")
    losses = fleet.losses()
    assert list(losses) == list(range(len(losses)))
    told = [event for name in "abc" for event in RunDir(tmp_path / name).events()]  # by whoever is the first there
    assert len({event["step"] for event in told if event["event"] == "checkpoint"}) == 5


@exhaustive
def test_others_continue_without_host_that_cannot_checkpoint(tmp_path: Path, corpus: Path) -> None:
    """From where they are, with the checkpoint; when its disk does not refuse any more it has the next one, too."""
    fleet = Asked(tmp_path, corpus)
    with ended(fleet):
        fleet.until(lambda: RunDir(tmp_path / "a").is_run() and len(fleet.records(0)) > 5)
        lasting = {one.pid for name in "ab" for one in fleet.ranks(name)}
        (tmp_path / "c" / "checkpoints").touch()
        (tmp_path / "a" / "host" / "save").touch()
        fleet.until(lambda: {"a", "b"} in worlds(fleet, "a"))  # c's rank may have been there for one more world
        fleet.until(lambda: fleet.saved("b") == fleet.saved("a") > 0)
        (tmp_path / "c" / "checkpoints").unlink()
        fleet.until(lambda: worlds(fleet, "a")[-1] == {"a", "b", "c"})
        assert {one.pid for name in "ab" for one in fleet.ranks(name)} == lasting
        ask(fleet, "b", lambda: [])
        stop(fleet, "b")
    losses = fleet.losses()
    assert list(losses) == list(range(len(losses)))
    told = [event for event in RunDir(tmp_path / "a").events() if event["event"] == "failure"]
    assert [(event["rank"], event["of"]) for event in told] == [(0, 2)]
    assert "checkpoints" in told[0]["error"]


def ask(fleet: Training, host: str, meanwhile: Callable[[], object]) -> None:
    """For a checkpoint, which all then have who were there: on a busy machine c may hang in Gloo and rejoin later."""
    saved, before = fleet.saved("a"), len(worlds(fleet))
    (fleet.folder / host / "host" / "save").touch()
    meanwhile()
    fleet.until(
        lambda: (
            fleet.saved("a") > saved
            and (fleet.saved("c") == fleet.saved("a") or any("c" not in hosts for hosts in worlds(fleet)[before:]))
        )
    )


class Pairs(Living):
    """Two ranks on each host."""

    RANKS = 2


@exhaustive
def test_each_rank_of_a_host_rejoins_with_its_own_state(tmp_path: Path, corpus: Path) -> None:
    """Of two one is killed: the other ends too, and both are let in again, each with its number, share and records."""
    fleet = Pairs(tmp_path, corpus, "ab")
    with ended(fleet):
        fleet.until(lambda: fleet.saved("a") >= 20)
        next(one for one in fleet.ranks("b")).kill()
        fleet.until(lambda: len(worlds(fleet, "a")) > 1 and worlds(fleet, "a")[-1] == {"a", "b"})
        before = fleet.saved("b")
        fleet.until(lambda: fleet.saved("b") > before)
        stop_at(fleet, "a")
    losses = fleet.losses()
    assert list(losses) == list(range(len(losses)))
    of_ranks = [fleet.records(rank) for rank in range(4)]
    last = of_ranks[0][-1]
    assert [(one[-1].step, one[-1].epoch, one[-1].members, one[-1].tokens) for one in of_ranks] == [
        (last.step, last.epoch, 4, 3 * 64)
    ] * 4
    assert all(len({record.step for record in one}) == len(one) for one in of_ranks)
    undisturbed = alone(type("Alone", (Pairs,), {"STEPS": len(losses)}), corpus, tmp_path / "alone")
    assert list(losses.values()) == pytest.approx(undisturbed, rel=1e-5)
