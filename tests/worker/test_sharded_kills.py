"""A rank of a sharded run that is killed at any moment costs no more than the steps since the newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir

from ..tiers import exhaustively
from .test_membership_epochs import Sharded, alone, ended, pytestmark  # noqa: F401

EVERY = 4  # steps between checkpoints
# evener's own worker, of which one rank kills itself: where and when is drawn from the seed, once for each start.
KILLED = """
import json, os, pathlib, random, runpy, signal, sys
from evener.worker.state import checkpoint
from evener.worker.sync import pairwise
from evener.worker.train.train_step import TrainStep

seed, num_kills, file = int(sys.argv.pop(1)), int(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1))
# a gathering or scattering, an update, a tensor of a checkpoint; calls in about six steps
CALLS = [(pairwise, "pairwise_all_to_all", 50), (TrainStep, "update", 6), (checkpoint, "full_tensor", 90)]
draw = random.Random(seed)
moments = [(draw.choice("ab"), *CALLS[(seed + i) % 3], draw.random(), draw.choice([True, False]))
           for i in range(num_kills)]
killed = len(file.read_text().splitlines()) if file.exists() else 0
done, calls = 0, 0

end = TrainStep.end
def counted(self, *args, **kwargs):
    global done
    end(self, *args, **kwargs)
    done = self.index + 1
TrainStep.end = counted

def kill(name):
    with file.open("a") as lines:
        print(json.dumps({"name": name, "done": done, "call": calls}), file=lines)
    os.kill(os.getpid(), signal.SIGKILL)

if killed < num_kills and moments[killed][0] == os.environ["EVENER_HOST"]:
    _, owner, name, num, where, is_before = moments[killed]
    original = getattr(owner, name)
    def dying(*args, **kwargs):
        global calls
        calls += 1
        is_now = calls == 1 + int(where * num)
        if is_now and is_before:
            kill(name)
        result = original(*args, **kwargs)
        if is_now:
            kill(name)
        return result
    setattr(owner, name, dying)
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""


class Short(Sharded):
    STEPS = 40

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        return [*super().flags(corpus), "--checkpoint-every", str(EVERY)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[float]:
    return alone(Short, corpus, tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize(("seed", "num_kills"), [(0, 1), *exhaustively(*((seed, 3) for seed in range(10)))])
def test_killed_rank_costs_no_more_than_the_steps_since_the_checkpoint(
    tmp_path: Path, corpus: Path, undisturbed: list[float], seed: int, num_kills: int
) -> None:
    """Thirty moments: in an exchange, an update and a checkpoint, of either rank. Losses are undisturbed ones."""
    (tmp_path / "killed.py").write_text(KILLED)
    kills = tmp_path / "kills"
    fleet = Short(tmp_path, corpus, "ab", [str(tmp_path / "killed.py"), str(seed), str(num_kills), str(kills)])
    with ended(fleet):
        fleet.until(lambda: all(agent.poll() is not None for agent in fleet.agents.values()))
    assert [agent.returncode for agent in fleet.agents.values()] == [0, 0], fleet.log("a")
    moments = [json.loads(line) for line in kills.read_text().splitlines()]
    assert len({moment["name"] for moment in moments}) == len(moments) == num_kills
    begins = {event["number"]: event["step"] for event in RunDir(tmp_path / "a").events() if event["event"] == "world"}
    assert len(begins) == num_kills + 1
    for moment, (_, step) in zip(moments, sorted(begins.items())[1:], strict=True):
        assert 0 <= moment["done"] - step <= EVERY, (moments, begins)
    losses = fleet.losses()
    assert list(losses) == list(range(Short.STEPS))
    assert list(losses.values()) == pytest.approx(undisturbed, rel=1e-5)
    assert RunDir(tmp_path / "a").manifest().result.replicas_agree is True
