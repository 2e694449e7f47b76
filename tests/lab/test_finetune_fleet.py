"""A model's folder reaches the other hosts once, and two hosts fine-tune as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab, wait_until, worlds_of
from tests.pretrained import make_chats, make_model
from tests.tiers import exhaustive

WITHIN_S = 300.0  # of a machine as busy as it likes


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


@exhaustive
def test_fine_tuning_admits_a_new_host_and_survives_a_lost_one(make_lab: MakeLab, tmp_path: Path) -> None:
    """The new host gets the model; then another loses its power. Every step has the loss of one process."""
    make_model(tmp_path / "llama")
    make_chats(tmp_path / "chats.jsonl")
    file, run = tmp_path / "hosts.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, a=HostSpec(), b=HostSpec(), c=HostSpec())
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    evener = [sys.executable, "-c", "from evener.cli.main import main; main()"]

    def verb(*words: str, status: int = 0) -> None:
        done = subprocess.run([*evener, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300,
                              check=False)  # fmt: skip
        assert done.returncode == status, done.stderr

    flags = ["chats.jsonl", "--model=hf:llama", "--lora=4", "--batch=12", "--dtype=fp32", "--threads=1",
             "--eval-every=0", "--lr=3e-4", "--min-lr=3e-4", "--warmup=0", "--checkpoint-every=20"]  # fmt: skip
    argv = [*evener, "train", *flags, "--steps=100000", "--shares=equal", "--fleet", str(file), "--hosts=a,b"]
    argv += ["--out=run"]
    with (tmp_path / "told").open("wb") as told:
        running = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=told, stderr=told)

    def worlds() -> list[list[str]]:
        assert running.poll() is None, (tmp_path / "told").read_text()
        return worlds_of(run) if run.path.exists() else []

    try:
        wait_until(lambda: bool(worlds()), "the run began", WITHIN_S)
        verb("add", "run", "--host", "c", "--fleet", str(file))
        wait_until(lambda: worlds()[-1] == ["a", "b", "c"], "c takes part", WITHIN_S)
        lab.host("b").power_off()
        wait_until(lambda: worlds()[-1] == ["a", "c"], "the others go on", WITHIN_S)
    finally:
        verb("stop", "run", status=1)  # b is out of reach
    running.wait(WITHIN_S)
    manifest = run.manifest()
    assert manifest.verdict == "stopped", (tmp_path / "told").read_text()
    assert manifest.result is not None
    assert manifest.result.replicas_agree is True
    steps = run.records(0)  # of a, which has taken all of them
    assert [record.step for record in steps] == list(range(manifest.result.steps))
    assert {record.members for record in steps} == {2, 3}
    verb("train", *flags, f"--steps={len(steps)}", "--out=alone")
    alone = [record.loss for record in RunDir(tmp_path / "alone").records(0)]
    assert [record.loss for record in steps] == pytest.approx(alone, rel=1e-5)
    lab.down()
