"""A launched program that resumes by itself trains as if it had not stopped: the state of its sync strategy is kept.

The programs here are changed as `evener launch` changes them, and save and resume as they like.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.core.run.rundir import RunDir

from ..tiers import exhaustive, exhaustively

# Two models of one matrix each, as DDP orders several in one bucket anew after the first pass, which int8 rounds by.
PROGRAM = """
import contextlib, importlib, json, os, sys
import torch, torch.distributed as dist, torch.nn.parallel.distributed as parallel
from torch import nn
folder, run, sync, first, last, save_at, keeps, per_step = sys.argv[1:]
first, last, saves = int(first), int(last), [int(step) for step in save_at.split(",")]
os.environ["EVENER_JOINED"] = f"{folder}/runs/{run}/host/joined"
os.makedirs(f"{folder}/runs/{run}", exist_ok=True)
from evener.core.run.roster import parse_sync
from evener.worker.script.collective_calls import ProgramSync
program_sync = ProgramSync(parse_sync(sync), None)
for name, change in program_sync.changes().items():
    change(importlib.import_module(name))
program_sync.change_ddp(parallel)

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
nets = [nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)]
if first:
    for net, weights in zip(nets, torch.load(f"{folder}/saved-{first}.pt", weights_only=True)):
        net.load_state_dict(weights)
models = [parallel.DistributedDataParallel(net) for net in nets]
optimizer = torch.optim.SGD([parameter for net in nets for parameter in net.parameters()], 0.5)
draw = torch.Generator().manual_seed(1)
for step in range(last):
    batches = torch.randn(3, 4, 8, 24, generator=draw)[:, rank]
    if step < first:
        continue
    losses = []
    for model, x, is_first in ((models[0], batches[0], True), (models[0], batches[1], False),
                               (models[1], batches[2], False)):
        # The local weights in the middle of a round are restored before the first pass that would send gradients.
        with model.no_sync() if is_first and "diloco" not in sync else contextlib.nullcontext():
            loss = (torch.tanh(model(x)) - x.sin().repeat(1, 2)[:, :40]).square().mean()
            loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 in saves and rank == 0:
        torch.serialization.save([net.state_dict() for net in nets], f"{folder}/saved-{step + 1}.pt")
    if per_step == "logs" and rank == 0:
        torch.serialization.save({"loss": loss.detach(), "step": step}, f"{folder}/log.pt")
    total = torch.tensor(losses)
    dist.all_reduce(total)
    if rank == 0 and step >= last - 8:
        print(json.dumps([value.hex() for value in total.tolist()]), flush=True)
program_sync.close(is_finished=keeps == "keeps")
dist.barrier()
os._exit(0)
"""
Losses = list[list[str]]  # exact: of each of the last 8 steps, the two micro-batches of one model and that of the other
Run = Callable[..., Losses]


@pytest.fixture
def train(run_script: Any, tmp_path: Path) -> Run:
    def train(run: str, sync: str, first: int, last: int, *, save_at: str = "0", keeps: bool = True, ranks: int = 2,
              per_step: str = "") -> Losses:  # fmt: skip
        words = map(str, (tmp_path, run, sync, first, last, save_at, "keeps" if keeps else "fails", per_step))
        done = run_script(PROGRAM, *words, ranks=ranks)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return train


def texts(tmp_path: Path, run: str) -> list[str]:
    """Return what the ranks of a run reported."""
    return [str(event.get("text", event.get("error"))) for event in RunDir(tmp_path / "runs" / run).events()]


def kept(tmp_path: Path, run: str, rank: int, model: int = 0) -> list[Path]:
    """Return the states of a model that a rank of a run has kept."""
    return list((tmp_path / "runs" / run / "own" / f"rank-{rank}").glob(f"sync-{model}-*.safetensors"))


SAVED_ON_THE_WAY = [
    ("int8", 12),
    *exhaustively(("powersgd:4", 12), ("diloco:5", 10), ("int4", 12), ("bf16", 12)),
]


@pytest.mark.parametrize(("sync", "step"), SAVED_ON_THE_WAY)
def test_program_resumed_from_its_checkpoint_trains_as_without_a_break(
    train: Run, tmp_path: Path, sync: str, step: int
) -> None:
    """Killed after its checkpoint: nothing is kept at the end."""
    uninterrupted = train("whole", sync, 0, step + 8, save_at=str(step), keeps=False)
    assert train("resumed", sync, step, step + 8, keeps=False) == uninterrupted
    [text, other_model] = texts(tmp_path, "resumed")
    assert text == other_model == f"--sync {sync} continues with the state that an earlier run kept with these weights"
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert train("dropped", sync, step, step + 8, keeps=False) != uninterrupted
    assert not (tmp_path / "runs" / "dropped" / "events.jsonl").exists()


@pytest.mark.parametrize(
    ("sync", "step", "ranks"),
    [
        ("int8", 12, 2),
        ("diloco:5", 12, 2),
        *exhaustively(("powersgd:4", 12, 2), ("diloco:5:int8", 13, 3), ("int8", 9, 3)),
    ],
)
def test_state_of_a_save_at_the_end_is_kept_by_all_ranks(
    train: Run, tmp_path: Path, sync: str, step: int, ranks: int
) -> None:
    """Also in the middle of a round of local steps, where each rank has weights of its own."""
    uninterrupted = train("whole", sync, 0, step + 8, keeps=False, ranks=ranks)
    train("first", sync, 0, step, save_at=str(step), ranks=ranks)
    assert train("resumed", sync, step, step + 8, keeps=False, ranks=ranks) == uninterrupted


@exhaustive
def test_ranks_without_local_weights_take_over_rank_0s_outer_state(train: Run, tmp_path: Path) -> None:
    """Rank 0 alone saves in the middle of a round, and the program is killed: the others' local steps are lost."""
    uninterrupted = train("whole", "diloco:5", 0, 20, save_at="12", keeps=False)
    resumed = train("resumed", "diloco:5", 12, 20, keeps=False)
    assert "continues with rank 0's part of the state" in texts(tmp_path, "resumed")[0]
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    dropped = train("dropped", "diloco:5", 12, 20, keeps=False)

    def distance(losses: Losses) -> float:
        return abs(float.fromhex(losses[-1][2]) - float.fromhex(uninterrupted[-1][2]))

    assert 0 < distance(resumed) < 0.8 * distance(dropped)


def test_state_of_other_strategy_weights_or_ranks_is_not_restored(train: Run, tmp_path: Path) -> None:
    train("whole", "int8", 0, 20, save_at="8,12", keeps=False)
    train("other-sync", "int4", 12, 20, keeps=False)
    assert "is of --sync int8 on 2 ranks" in texts(tmp_path, "other-sync")[0]
    train("other-ranks", "int8", 12, 20, keeps=False, ranks=3)
    assert "is of --sync int8 on 2 ranks" in texts(tmp_path, "other-ranks")[0]
    train("other-weights", "int8", 0, 8, keeps=False)
    assert (
        texts(tmp_path, "other-weights")
        == ["--sync int8 begins with an empty state: no run here has kept one of these weights"] * 2
    )


@exhaustive
def test_damaged_state_is_a_warning_and_no_rank_restores(train: Run, tmp_path: Path) -> None:
    train("whole", "int8", 0, 20, save_at="12", keeps=False)
    [path] = kept(tmp_path, "whole", 1)
    content = bytearray(path.read_bytes())
    content[-5] ^= 64
    path.write_bytes(content)
    resumed = train("damaged", "int8", 12, 20, keeps=False)
    (tmp_path / "runs" / "whole").rename(tmp_path / "gone")
    empty = train("empty", "int8", 12, 20, keeps=False)
    assert [row[:2] for row in resumed] == [row[:2] for row in empty]  # of the one model
    assert [row[2] for row in resumed] != [row[2] for row in empty]  # the other's state is intact
    said = texts(tmp_path, "damaged")
    assert any("damaged: its tensors are not those that were written" in text for text in said)
    assert "--sync int8 begins with an empty state: not every rank has kept one" in said


@exhaustive
def test_newest_two_states_are_kept_and_only_of_saved_models(train: Run, tmp_path: Path) -> None:
    train("often", "int8", 0, 20, save_at="3,5,7,9,11", keeps=True)
    assert [len(kept(tmp_path, "often", rank, model)) for rank in (0, 1) for model in (0, 1)] == [2] * 4
    train("logs", "int8", 0, 10, per_step="logs", keeps=False)
    assert not (tmp_path / "runs" / "logs" / "own").exists()
    train("exact", "packed", 0, 10, save_at="4", keeps=True)
    assert not (tmp_path / "runs" / "exact" / "own").exists()


@exhaustive
def test_disk_that_refuses_ends_the_keeping_with_a_warning(train: Run, tmp_path: Path) -> None:
    (tmp_path / "runs" / "full" / "own").mkdir(parents=True)
    (tmp_path / "runs" / "full" / "own" / "rank-0").touch()  # a file where the folder should be
    uninterrupted = train("whole", "int8", 0, 20, save_at="8,12", keeps=False)
    assert train("full", "int8", 0, 20, save_at="8,12", keeps=False) == uninterrupted
    warnings = [text for text in texts(tmp_path, "full") if "keeps no state for a resume any more" in text]
    assert len(warnings) == 2  # one for each model
    assert kept(tmp_path, "full", 1)
