"""Checkpoints and per-rank states survive a power loss once they are saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from evener.core.run.runwriter import RunWriter
from evener.worker.state import checkpoint
from evener.worker.state.rank_state import load_rank_state, save_rank_state

from ..volatile_disk import VolatileDisk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors have names in /proc: Linux")


@pytest.fixture
def run(tmp_path: Path) -> RunWriter:
    """A run directory that is not there yet."""
    (tmp_path / "disk").mkdir()
    return RunWriter(tmp_path / "disk" / "runs" / "mine")


def test_saved_states_survive_power_loss(run: RunWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = VolatileDisk(tmp_path / "disk", monkeypatch)
    weights = {"w": torch.arange(4.0)}
    for step in (20, 40):
        save_rank_state(run, 1, step, {"sync": {"residuals": weights["w"] + step}})
        checkpoint.save(run, weights, {}, step=step, val_loss=None, rng_states=[{}], replica_hashes=[["h"]])
    disk.lose_power()
    assert run.checkpoint_steps() == [20, 40]
    assert torch.equal(checkpoint.load(run.checkpoint_path(40)).weights["w"], weights["w"])
    saved = load_rank_state(run, 1, 40)
    assert saved is not None
    assert torch.equal(saved["sync"]["residuals"], weights["w"] + 40)
