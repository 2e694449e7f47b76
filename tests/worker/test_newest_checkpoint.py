"""Three hosts with different checkpoints all start from the newest complete one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SPREADS = """
import os, pathlib, sys, torch
from evener.core.run.runwriter import RunWriter
from evener.worker.state.checkpoint import load, save
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.membership.regroup import replicate_newest_checkpoint

os.environ["LOCAL_RANK"] = "0"  # a host of its own
group = ProcessGroups("cpu")
run = RunWriter(pathlib.Path(sys.argv[1]) / "abc"[group.rank])
for word in sys.argv[2 + group.rank].split():  # such as 10=1.5: the checkpoint of step 10 holds 1.5
    step, value = word.split("=")
    weights = {"w": torch.full((5_000_000,), float(value))}
    save(run, weights, {}, step=int(step), val_loss=None, rng_states=[], replica_hashes=[[]])
    run.manifest_path.write_text("{}")
exec(sys.argv[5])
try:
    found = replicate_newest_checkpoint(run, group)
    held = None if found is None else float(load(run.checkpoint_path(found.step)).weights["w"].unique())
    told = f"{None if found is None else found.step} {held} {run.is_run()}"
except Exception as error:
    told = f"{type(error).__name__}: {error}"
(pathlib.Path(sys.argv[1]) / f"told-{group.rank}").write_text(told)
group.close()
"""
DAMAGED = """
if group.rank == 1:
    with open(run.checkpoint_path(20) / "weights.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
"""
REFUSES = """
if group.rank == 2:  # a file where the folder would be
    run.path.mkdir()
    run.checkpoints_path.write_text("")
"""


@pytest.mark.parametrize(
    ("has", "change", "expected"),
    [
        (("", "", ""), "", "None None False"),
        (("10=1 20=2", "10=1 20=2", "10=1 20=2"), "", "20 2.0 True"),
        (("10=1", "10=1 20=2", ""), "", "20 2.0 True"),  # one was away, and one has a new disk
        (("10=1 20=2", "20=3", "20=2"), "", "20 2.0 True"),  # one took the step in another world
        (("10=1", "10=1 20=2", "10=1"), DAMAGED, "10 1.0 True"),
    ],
)
def test_all_ranks_get_newest_complete_checkpoint(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, has: tuple[str, ...], change: str,
    expected: str,
) -> None:  # fmt: skip
    done = run_script(SPREADS, str(tmp_path), *has, change, ranks=3)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path) == [expected] * 3
    half = [path for path in tmp_path.glob("*/checkpoints/.*") if not path.name.endswith(".removed")]
    assert half == []


def test_rank_that_cannot_store_checkpoint_fails_all_without_hanging(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = run_script(SPREADS, str(tmp_path), "10=1", "", "", REFUSES, ranks=3)
    assert done.returncode == 0, done.stderr
    assert all(text.startswith("RunError: rank 2: /") for text in told(tmp_path)[:2]), told(tmp_path)
    assert all("checkpoints/step-000010: " in text for text in told(tmp_path)), told(tmp_path)


def told(folder: Path) -> list[str]:
    return [(folder / f"told-{rank}").read_text() for rank in range(3)]
