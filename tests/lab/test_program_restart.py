"""A program of one's own goes on without a lost host, from what it saved itself: `launch --membership restart`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab, come_home, wait_until, worlds_of
from tests.tiers import exhaustive

pytestmark = exhaustive
WITHIN_S = 300.0  # of a machine as busy as it likes
NUM_STEPS = 60
PROGRAM = f"""
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model, first = DistributedDataParallel(nn.Linear(10, 5)), 0
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if sys.argv[1:] == ["--resume", "the newest"]:
    saved = torch.load("state.pt")
    model.load_state_dict(saved["model"])
    first = saved["step"] + 1
print("starts at step", first, "as one of", dist.get_world_size(), flush=True)
for step in range(first, {NUM_STEPS}):
    nn.functional.mse_loss(model(torch.randn(8, 10)), torch.zeros(8, 5)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if "fails" in sys.argv:
        raise ValueError("always")
    torch.save({{"step": step, "model": model.state_dict()}}, "new.pt")
    os.replace("new.pt", "state.pt")
    time.sleep(0.25)
dist.barrier()
dist.destroy_process_group()
"""
TRAINER = f"""
import time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed
from evener.integrations.transformers import EvenerTrainer
class Slow(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        print("starts at step", state.global_step, "as one of", args.world_size, flush=True)
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.25)
set_seed(0)
data = [{{"input_ids": row, "labels": row}} for row in torch.randint(0, 50, (480, 12))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps={NUM_STEPS}, save_steps=5, report_to=[], disable_tqdm=True
)
EvenerTrainer(model, arguments, train_dataset=data, callbacks=[Slow()]).train()
"""
EVENER = [sys.executable, "-c", "from evener.cli.main import main; main()"]


def launch(folder: Path, file: Path, *words: str, program: str = PROGRAM) -> subprocess.Popen[bytes]:
    project = folder / "project"  # all of it is sent
    project.mkdir()
    (project / "x.py").write_text(program)
    argv = [*EVENER, "launch", "--fleet", str(file), "--membership=restart", "--out=../run", *words]
    with (folder / "told").open("wb") as told:
        return subprocess.Popen(argv, cwd=project, stdout=told, stderr=told)


def test_program_goes_on_without_lost_host(make_lab: MakeLab, tmp_path: Path) -> None:
    file, run = tmp_path / "fleet.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, a=HostSpec(), b=HostSpec(), c=HostSpec())
    running = launch(tmp_path, file, "--resume-args=--resume 'the newest'", "--", "x.py")
    try:
        wait_until(lambda: (tmp_path / "run").exists() and bool(run.recorded_ranks()), "steps are taken", WITHIN_S)
        wait_until(lambda: len(run.records(0)) > 5, "some more", WITHIN_S)
        lab.host("a").power_off()
        wait_until(lambda: bool(come_home(run)) and worlds_of(run)[-1] == ["b", "c"], "b and c go on", WITHIN_S)
        running.wait(WITHIN_S)
    finally:
        subprocess.run([*EVENER, "stop", "run"], cwd=tmp_path, capture_output=True, check=False)
        running.wait(WITHIN_S)
    told = (tmp_path / "told").read_text()
    assert running.returncode == 0, told
    assert "going on with b, c: a is out of reach" in told
    assert "finished on b, c; logs in" in told
    for rank in (1, 2):
        steps = [record.step for record in run.records(rank)]
        assert steps == sorted(set(steps))
        assert NUM_STEPS - 20 <= len(steps) <= NUM_STEPS + 5  # those of the last seconds are lost, or taken twice
        assert {record.members for record in run.records(rank)} == {2, 3}
    manifest = run.manifest()
    assert (manifest.verdict, manifest.roster.hosts) == ("finished", ["b", "c"])
    assert [member.rank for member in manifest.roster.members] == [1, 2]
    lab.down()


def test_trainer_continues_from_checkpoint_that_remaining_hosts_have(make_lab: MakeLab, tmp_path: Path) -> None:
    """No word of resuming is in the program or in the command."""
    pytest.importorskip("transformers")
    file, run = tmp_path / "fleet.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, a=HostSpec(), b=HostSpec(), c=HostSpec())
    running = launch(tmp_path, file, "--", "x.py", program=TRAINER)
    try:
        wait_until(lambda: (tmp_path / "run").exists() and bool(run.recorded_ranks()), "steps are taken", WITHIN_S)
        wait_until(lambda: len(run.records(0)) > 12, "two checkpoints", WITHIN_S)
        lab.host("a").power_off()
        running.wait(WITHIN_S)
    finally:
        subprocess.run([*EVENER, "stop", "run"], cwd=tmp_path, capture_output=True, check=False)
        running.wait(WITHIN_S)
    told = (tmp_path / "told").read_text()
    assert running.returncode == 0, told
    begins = [int(step) for step in re.findall(r"starts at step (\d+) as one of 2", told)]
    assert begins
    assert all(step >= 10 and step % 5 == 0 for step in begins), told
    assert NUM_STEPS - 20 <= len(run.records(1)) <= NUM_STEPS + 5
    lab.down()


def test_program_that_always_fails_is_not_restarted_for_ever(make_lab: MakeLab, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    lab = make_lab(file, a=HostSpec(), b=HostSpec())
    running = launch(tmp_path, file, "--", "x.py", "fails")
    assert running.wait(WITHIN_S) == 1
    told = (tmp_path / "told").read_text()
    assert "ValueError: always" in told
    lab.down()


@pytest.mark.parametrize("verb", ["add", "leave"])
def test_hosts_of_programs_do_not_come_and_go_by_command(verb: str, make_lab: MakeLab, tmp_path: Path) -> None:
    file, run = tmp_path / "fleet.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, a=HostSpec(), b=HostSpec())
    running = launch(tmp_path, file, "--", "x.py")
    try:
        wait_until(lambda: (tmp_path / "run").exists() and bool(run.recorded_ranks()), "steps are taken", WITHIN_S)
        done = subprocess.run([*EVENER, verb, "run", "--host", "b"], cwd=tmp_path, capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert (done.returncode, "runs a program of your own" in done.stderr) == (2, True), done.stderr
    finally:
        subprocess.run([*EVENER, "stop", "run", "--now"], cwd=tmp_path, capture_output=True, check=False)
        running.wait(WITHIN_S)
    lab.down()
