"""If ranks are lost during a checkpoint, all remaining ranks repeat the whole checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener.core.run.peer_failure import PeersLostError
from evener.core.run.run_spec import parse_args
from evener.core.run.runwriter import RunWriter
from evener.worker.rank.clock import HostClock
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.record.span_recorder import SpanRecorder
from evener.worker.state import checkpointer
from evener.worker.state.checkpointer import Checkpointer
from evener.worker.state.training_state import TrainingState
from evener.worker.sync.no_sync import NoSync

EXCHANGES = 6  # of a checkpoint


class Lossy(ProcessGroups):
    """Two ranks that say the same; the world is lost in the exchange of this number."""

    def __init__(self) -> None:
        self.rank = self.local_rank = 0
        self.world_size, self.member_ranks, self.has_dynamic_membership = 2, [0, 1], True
        self.device, self.control_group = torch.device("cpu"), None
        self.said: list[int] = []
        self.lost_at: int | None = None

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        if len(self.said) == self.lost_at:
            raise PeersLostError("in an exchange")
        self.said.append(len(payload))
        return [payload, payload]

    def enter_next(self) -> None:
        self.said, self.lost_at = [], None


class Rank:
    def __init__(self, folder: Path) -> None:
        (folder / "checkpoints").mkdir(parents=True)
        module = nn.Linear(3, 2)
        trained = TrainingState(torch.amp.GradScaler("cuda", enabled=False))
        trained.models.append(module)
        trained.add_optimizer(torch.optim.SGD(module.parameters(), 0.1))
        self.group = Lossy()
        rundir = RunWriter(folder)
        spans = SpanRecorder(rundir, 0, HostClock())
        trained.sync = NoSync()
        self.keeper = Checkpointer(rundir, parse_args([]), self.group, trained, spans)

    def attempt(self, lost_at: int | None, step: int = 20) -> bool:
        """Save; can it?"""
        self.group.lost_at = lost_at
        try:
            self.keeper.save(step, None)
        except PeersLostError:
            return False
        return True


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, Rank]:
    def gather_hashes(hashes: dict[str, str], world_size: int, group: Any) -> list[list[str]]:
        mine = [*hashes.values()]
        ranks[group].group.all_gather_bytes(bytes(len(mine)))
        return [mine, mine]

    monkeypatch.setattr(checkpointer, "gather_hashes", gather_hashes)
    ranks = [Rank(tmp_path / name) for name in "ab"]
    for number, rank in enumerate(ranks):
        rank.group.control_group = number
    return ranks[0], ranks[1]


def exchanges(rank: Rank) -> int:
    assert rank.attempt(None)
    return len(rank.group.said)


@pytest.mark.parametrize("lost_at", range(EXCHANGES))
def test_rank_further_in_a_checkpoint_repeats_it_after_regroup(pair: tuple[Rank, Rank], lost_at: int) -> None:
    """One of them has had the answer of all to what the other has not, as it is when a third one dies."""
    one, other = pair
    is_saved = one.attempt(lost_at + 1)
    assert is_saved == (lost_at == EXCHANGES - 1)
    assert not other.attempt(lost_at)
    for rank in pair:
        rank.group.enter_next()
        rank.keeper.reset_after_regroup((one if is_saved else other).keeper.history)
    for step in (20, 20, 40):  # once more the same: a run that ends there saves it again
        assert one.attempt(None, step)
        assert other.attempt(None, step)
        assert one.group.said == other.group.said
    assert len(one.group.said) == EXCHANGES * (1 if is_saved else 2)
