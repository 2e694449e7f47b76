"""Third-party programs run unchanged by `launch` on two hosts, and what they wrote is fetched.

Those that are no packages come as an option: --nanogpt DIR, a checkout of karpathy/nanoGPT.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from evener.lab.emulated_lab import EmulatedLab
from tests.lab.test_launch import Fleet
from tests.tiers import exhaustive

TRAINER = """
import os, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
data = [{"input_ids": (x := torch.randint(0, 64, (32,))), "labels": x} for _ in range(64)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2))
args = TrainingArguments("out", max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_steps=4)
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
print("world", trainer.accelerator.num_processes, flush=True)
os._exit(0)  # Gloo's threads may still let go of a tensor
"""

LIGHTNING = """
import os, torch, lightning
class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), 8)
trainer = lightning.Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_steps=4, logger=False)
trainer.fit(Line(), data)
print("world", trainer.world_size, flush=True)
os._exit(0)
"""

# accelerate's own checks: of when ranks agree; and of what they tell each other, which ask for no CPU themselves.
SYNC = """
import os
from accelerate.test_utils.scripts.test_sync import main
main()
os._exit(0)  # Gloo's threads may still let go of a tensor
"""
OPERATIONS = """
import os
from accelerate import PartialState
PartialState(cpu=True)
from accelerate.test_utils.scripts.test_ops import main
main()
os._exit(0)
"""

# What its README tells people without a GPU to change, for several processes.
NANOGPT = [("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"), ("torch.cuda.set_device(device)", "pass"),
           ("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)")]  # fmt: skip


@pytest.fixture
def fleet(pair: EmulatedLab, tmp_path: Path) -> Fleet:
    return Fleet(pair, Path(pair.state.fleet_file or ""), tmp_path)


@exhaustive
@pytest.mark.parametrize(
    ("program", "is_one"), [(SYNC, "Test Distributed `no_sync`"), (OPERATIONS, "Num processes: 2")]
)
def test_accelerate_tests_pass_on_two_hosts(fleet: Fleet, program: str, is_one: str) -> None:
    """As one world: with no word about CPUs each of its ranks is a world of its own, and passes too."""
    pytest.importorskip("accelerate")
    (fleet.folder / "checks.py").write_text(program)
    fleet.ok("launch", "--out", "runs/own", "--", "checks.py")
    assert is_one in fleet.printed("runs/own", "a", 0)


@exhaustive
@pytest.mark.parametrize(("package", "program"), [("transformers", TRAINER), ("lightning", LIGHTNING)])
def test_trainer_outputs_are_fetched(fleet: Fleet, package: str, program: str) -> None:
    pytest.importorskip(package)
    (fleet.folder / "program.py").write_text(program)
    done = fleet.ok("launch", "--out", "runs/trainer", "--json", "--", "program.py")
    assert "world 2" in fleet.printed("runs/trainer", "a", 0)
    there = {file["path"] for file in json.loads(done.stdout)["written"]["a"]["files"]}
    fleet.ok("fetch", "runs/trainer")
    home = fleet.folder / "runs/trainer/files/a"
    assert {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()} == there
    assert any(path.endswith((".safetensors", ".ckpt")) for path in there)


def test_nanogpt_trains_with_own_options(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    """Its prepared data are what git ignores; its options are like torchrun's own (--log_interval)."""
    checkout = request.config.getoption("--nanogpt")
    if checkout is None:
        pytest.skip("--nanogpt DIR names a checkout of karpathy/nanoGPT")
    project = fleet.folder / "nanoGPT"
    shutil.copytree(checkout, project)
    text = (project / "train.py").read_text()
    for theirs, ours in NANOGPT:
        assert text.count(theirs) == 1
        text = text.replace(theirs, ours)
    (project / "train.py").write_text(text)
    for split in ("train", "val"):
        np.arange(5000, dtype=np.uint16).__mod__(60).tofile(project / f"data/shakespeare_char/{split}.bin")
    (project / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    at = Fleet(fleet.lab, fleet.fleet, project)
    flags = ["device=cpu", "backend=gloo", "compile=False", "dtype=float32", "gradient_accumulation_steps=2",
             "batch_size=2", "block_size=16", "n_layer=1", "n_head=1", "n_embd=16", "max_iters=4", "eval_interval=2",
             "eval_iters=1", "log_interval=1", "always_save_checkpoint=True"]  # fmt: skip
    argv = ["train.py", "config/train_shakespeare_char.py", *(f"--{flag}" for flag in flags)]
    lacks = at.run("launch", "--out", "runs/lacks", "--", *argv)
    assert "evener launch --include data/shakespeare_char -- …" in lacks.stderr
    has = at.run("launch", "--out", "runs/has", "--include", "data/shakespeare_char", "--", *argv)
    assert has.returncode == 0 or "was killed by SIGABRT" in has.stderr, has.stderr
    assert "iter 4: loss" in at.printed("runs/has", "a", 0)
    at.ok("fetch", "runs/has")
    assert (project / "runs/has/files/a/out-shakespeare-char/ckpt.pt").is_file()
