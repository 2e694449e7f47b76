"""A model's folder reaches the other hosts once, and two hosts fine-tune as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from tests.pretrained import make_chats, make_model
from tests.tiers import exhaustive


@exhaustive
def test_two_hosts_fine_tune_as_one_process(pair: EmulatedLab, tmp_path: Path) -> None:
    make_model(tmp_path / "llama")
    make_chats(tmp_path / "chats.jsonl")
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*more: object) -> str:
        argv = [sys.executable, "-c", "from evener.cli.main import main; main()", *map(str, more)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    flags = ["train", "chats.jsonl", "--model", "hf:llama", "--lora", "4", "--steps", "6", "--batch", "8", "--dtype",
             "fp32", "--threads", "1", "--eval-every", "0", "--lr", "0.01"]  # fmt: skip
    alone = run(*flags, "--out", "alone")
    assert "sent to" not in alone
    fleet = ["--fleet", pair.state.fleet_file, "--shares", "3:1"]
    first = run(*flags, *fleet, "--out", "both")
    size = (tmp_path / "llama" / "model.safetensors").stat().st_size
    sent = [line for line in first.splitlines() if line.endswith((" sent to a", " sent to b"))]
    assert len(sent) >= 2
    assert "a step exchanges the gradients of" in first
    again = run(*flags, *fleet, "--out", "again")
    assert "sent to" not in again  # the hosts have the model and the samples
    losses = {
        name: [record.loss for record in RunDir(tmp_path / name).records(0)] for name in ("alone", "both", "again")
    }
    assert losses["both"] == pytest.approx(losses["alone"], rel=1e-5)
    assert losses["again"] == losses["both"]
    manifest = RunDir(tmp_path / "both").manifest()
    assert manifest.roster.hosts == ["a", "b"]
    assert max(record.bytes for record in RunDir(tmp_path / "both").records(0)) < size / 2  # adapters alone
    run("export", "both", "--out", "adapters")
    run("verify", "both")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
