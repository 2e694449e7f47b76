"""EvenerTrainer and EvenerStrategy learn on two unequal ranks what transformers and Lightning learn in one process."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evener.core.base.errors import UsageError
from evener.core.run.roster import DDP
from evener.core.run.rundir import RunDir
from evener.core.script.variables import OPTIONS_VARIABLE
from evener.worker.script import instrument
from evener.worker.script.batch_shares import BatchShares
from evener.worker.script.collective_calls import ProgramSync
from evener.worker.script.instrument import choose
from evener.worker.script.module_changer import ModuleChanger
from tests.integration.test_launched_programs import TIMEOUT_S, Launch, launch
from tests.tiers import exhaustive

__all__ = ["launch"]

# One process has transformers' own Trainer and a batch of 12, two ranks have EvenerTrainer. Gradients are clipped, so
# that a loss of another scale would change what is learned.
TRAINER = """
import json
from transformers import (
    BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments,
)
from evener.integrations.transformers import EvenerTrainer
world, chosen = int(os.environ.get("WORLD_SIZE", "1")), json.loads(sys.argv[2])
torch.manual_seed(0)
texts = torch.randint(0, 64, (96, 16))
sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
if sys.argv[1] == "classifier":
    data = [{"input_ids": text, "labels": int(text[0]) % 2} for text in texts]
    model = BertForSequenceClassification(
        BertConfig(**sizes, intermediate_size=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    )
    if not chosen:  # else the Trainer would add up the means of micro-batches
        model.accepts_loss_kwargs = False
else:
    # Of the first micro-batch rank 1 has no text with labels.
    data = [{"input_ids": text, "labels": text if i % 3 == 0 else 0 * text - 100} for i, text in enumerate(texts)]
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=16, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))
args = TrainingArguments(
    "out", max_steps=6, per_device_train_batch_size=12 // world, use_cpu=True, report_to=[], save_strategy="no",
    gradient_accumulation_steps=2, learning_rate=1e-3, max_grad_norm=0.1, logging_steps=1, disable_tqdm=True,
)
made = EvenerTrainer(model, args, train_dataset=data, **chosen) if chosen else Trainer(model, args, train_dataset=data)
made.train()
if args.process_index == 0:
    losses = [line["loss"] for line in made.state.log_history if "loss" in line]
    torch.save((model.state_dict(), losses), f"learned-{world}.pt")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
LIGHTNING = """
import json
import lightning
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from evener.integrations.lightning import EvenerStrategy
world = int(os.environ.get("WORLD_SIZE", "1"))
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.losses = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 5)), []
    def training_step(self, batch, i):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 10), torch.randn(96, 5))
# Lightning's own would shuffle on two ranks, and not in one process.
sampler = DistributedSampler(data, num_replicas=world, rank=int(os.environ.get("RANK", "0")), shuffle=False)
loader = DataLoader(data, batch_size=12 // world, sampler=sampler)
chosen = json.loads(sys.argv[1])
made = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=world, strategy=EvenerStrategy(**chosen) if chosen else "auto",
    use_distributed_sampler=False, accumulate_grad_batches=2, gradient_clip_val=0.1, logger=False,
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
)
module = Module()
made.fit(module, loader)
if made.is_global_zero:
    pairs = zip(module.losses[::2], module.losses[1::2])
    torch.save((module.net.state_dict(), [(one + other) / 2 for one, other in pairs]), f"learned-{world}.pt")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
PROGRAMS = {
    "classifier": (TRAINER, ["classifier"]),
    "language model": (TRAINER, ["language model"]),
    "lightning": (LIGHTNING, []),
}
UNEQUAL = json.dumps({"shares": "2:1"})


def differences(launch: Launch) -> tuple[float, list[float]]:
    """Return the largest difference of weights between one process and two, and the losses of one process."""
    (one, losses), (two, _) = (torch.load(launch.folder / f"learned-{number}.pt") for number in (1, 2))
    return max(float((one[name] - two[name]).abs().max()) for name in one), losses


@exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_unequal_shares_learn_what_one_process_learns(launch: Launch, name: str) -> None:
    """Launched by evener, whose records have the loss of each step, and by torchrun; the code names the shares."""
    pytest.importorskip("lightning" if name == "lightning" else "transformers")
    program, words = PROGRAMS[name]
    status, text = launch.run("x.py", *words, "{}", program=program, flags=("--ranks", "1", "--no-measure"))
    assert status == 0, text
    status, text = launch.run("x.py", *words, UNEQUAL, program=program, flags=("--ranks", "2", "--out", "run"))
    assert status == 0, text
    assert "warning: " not in text, text
    difference, losses = differences(launch)
    assert difference < 1e-5
    records = RunDir(launch.folder / "run").records(1)
    assert [record.loss for record in records] == pytest.approx(losses, abs=1e-5)
    if name != "lightning":  # what the Trainer itself logs is the loss of the global batch, too
        assert torch.load(launch.folder / "learned-2.pt")[1] == pytest.approx(losses, abs=1e-5)
    (launch.folder / "learned-2.pt").unlink()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, "x.py", *words, UNEQUAL], cwd=launch.folder, capture_output=True, text=True,
                          timeout=TIMEOUT_S, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert differences(launch)[0] < 1e-5


@exhaustive
@pytest.mark.parametrize("name", ["classifier", "lightning"])
def test_strategy_of_code_sends_a_byte_a_gradient(launch: Launch, name: str) -> None:
    """And a scale of two bytes for each block of 256, as under `evener launch --sync int8`."""
    pytest.importorskip("lightning" if name == "lightning" else "transformers")
    program, words = PROGRAMS[name]
    chosen = json.dumps({"sync": "int8"})
    status, text = launch.run("x.py", *words, chosen, program=program, flags=("--ranks", "2", "--out", "run"))
    assert status == 0, text
    run = RunDir(launch.folder / "run")
    manifest = run.manifest()
    sent = statistics.median([record.bytes for record in run.records(0)])
    assert sent == pytest.approx(math.ceil(manifest.num_params / 256) * (256 + 2), rel=0.03)
    assert str(manifest.roster.sync) == "int8"


@exhaustive
def test_flags_of_launch_take_precedence_over_code(launch: Launch) -> None:
    status, text = launch.run(
        "x.py",
        json.dumps({"sync": "int8"}),
        program=LIGHTNING,
        flags=("--ranks", "2", "--sync", "bf16", "--out", "run"),
    )
    assert status == 0, text
    assert str(RunDir(launch.folder / "run").manifest().roster.sync) == "bf16"


@pytest.mark.parametrize(
    ("for_one", "for_two", "expected"),
    [
        (6.0, 3.0, True),
        (6.0, 3.001, True),  # rounded
        (2.5, 2.5, False),
        (0.0, 0.0, None),  # a sum over no labels
        (math.nan, math.nan, None),  # a mean over none
        (math.inf, math.inf, None),
    ],
)
def test_loss_divided_by_items_is_told_by_its_values_for_1_and_2(
    for_one: float, for_two: float, expected: bool | None
) -> None:
    pytest.importorskip("transformers")
    from evener.integrations.transformers import is_divided

    assert is_divided(for_one, for_two) is expected


def test_loss_of_several_optimizers_is_that_of_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the other one updates before it, of the same loss."""
    pytest.importorskip("lightning")
    from evener.integrations import lightning

    for method in ("backward", "optimizer_step"):
        monkeypatch.setattr(lightning.DDPStrategy, method, lambda *_, **__: None)
    logged: list[float] = []
    monkeypatch.setattr(lightning, "log", lambda loss: logged.append(float(loss)))
    strategy, (first, second) = lightning.EvenerStrategy(), [torch.optim.SGD([torch.ones(1)]) for _ in range(2)]
    strategy.optimizers = [first, second]
    for losses, optimizers in [([1.0, 2.0], [first]), ([30.0], [second]), ([4.0], [first]), ([5.0], [second, first])]:
        for loss in losses:
            strategy.backward(torch.tensor(loss), None)
        for optimizer in optimizers:
            strategy.optimizer_step(optimizer, None)
    assert logged == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("sync", "shares", "error"),
    [
        ("int9", "equal", "--sync int9: no such strategy"),
        ("fsdp", "equal", "--sync fsdp: not for a program of your own"),
        ("ddp", "2:1:1", "3 shares, and 2 ranks"),
        ("diloco:10", "2:1", "weights gradients"),
    ],
)
def test_choice_that_ranks_cannot_have_is_an_error(sync: str, shares: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        choose(sync, shares, 0, 2)


def test_shares_of_launch_replace_those_of_code_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = BatchShares([2.0, 1.0], 0, 2)
    used = instrument.Instruments(ModuleChanger(), ProgramSync(DDP, None), shares="2:1", batch_shares=launched)
    monkeypatch.setattr(instrument, "_instruments", used)
    assert choose("int8", "3:1:1", 0, 2) is launched
    assert (str(used.program_sync.sync), used.shares) == ("int8", "2:1")


def test_rank_without_room_for_its_calls_is_divided_and_synchronized_all_the_same(tmp_path: Path) -> None:
    code = """
from evener.worker.script import instrument
from evener.worker.script.batch_shares import BatchShares
def fail(path):
    raise OSError(28, "No space left on device")
instrument.CallRing = fail
instrument.install()
shares = instrument.choose("ddp", "equal", 0, 2)
import torch.nn.parallel.distributed as distributed
forward = distributed.DistributedDataParallel.forward
print(isinstance(shares, BatchShares), instrument._instruments.program_sync.sync, forward.__wrapped__.__name__)
"""
    of_rank = {"RANK": "0", "WORLD_SIZE": "2", "EVENER_JOINED": str(tmp_path / "run/host/joined")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        env=os.environ | of_rank | {OPTIONS_VARIABLE: "sync=int8,shares=2:1"},
    )  # fmt: skip
    assert done.stdout == "True int8 forward\n", done.stderr
