"""`evener launch --shares 2:1`: a program's batches are divided, and it learns what one process learns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from evener.worker.script.batch_shares import BatchShares
from tests.integration.test_launched_programs import Launch, launch
from tests.tiers import exhaustive

__all__ = ["launch"]

# What a program does on any number of ranks, with a batch of 12 in all. Rank 0 saves what it learned.
DDP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
x, y = torch.randn(96, 10), torch.randint(0, 5, (96,))
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 5)))
sampler = DistributedSampler(TensorDataset(x, y))
loader = DataLoader(sampler.dataset, batch_size=12 // dist.get_world_size(), sampler=sampler, num_workers=WORKERS)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
seen = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (inputs, targets) in enumerate(loader):
        seen.append(len(inputs))
        (nn.functional.cross_entropy(model(inputs), targets) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    evaluated = sum(len(inputs) for inputs, _ in loader)
    model.train()
print("sizes", dist.get_rank(), {*seen}, len(seen), evaluated, flush=True)
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), f"learned-{dist.get_world_size()}.pt")
dist.barrier()
dist.destroy_process_group()
"""
TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
data = [{"input_ids": (x := torch.randint(0, 64, (16,))), "labels": x} for _ in range(96)]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
)
world = int(os.environ.get("WORLD_SIZE", "1"))
args = TrainingArguments(
    "out", max_steps=6, per_device_train_batch_size=12 // world, use_cpu=True, report_to=[], save_strategy="no",
    gradient_accumulation_steps=2, learning_rate=1e-3, max_grad_norm=0.0, AVERAGE
)
Trainer(model, args, train_dataset=data).train()
if int(os.environ.get("RANK", "0")) == 0:
    torch.save(model.state_dict(), f"learned-{world}.pt")
os._exit(0)  # Gloo's threads may still let go of a tensor
"""
TWO_LOADERS = DDP.replace(
    "for epoch in range(3):",
    "for epoch in range(3):\n    if epoch:\n        next(iter(DataLoader(sampler.dataset, 4)))",
)
SUM = DDP.replace("cross_entropy(model(inputs), targets)", "cross_entropy(model(inputs), targets, reduction='sum')")


def difference(launch: Launch, program: str, shares: str, ranks: int) -> float:
    """Return the largest difference between what ranks with shares and a single process learn."""
    for flags in (("--ranks", "1"), ("--ranks", str(ranks), "--shares", shares)):
        status, text = launch.run(program=program, flags=flags)
        assert status == 0, text
        (launch.folder / f"printed-{flags[1]}").write_text(text)
    one, several = (torch.load(launch.folder / f"learned-{number}.pt") for number in (1, ranks))
    return max(float((one[name] - several[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("shares", "ranks", "workers"),
    [("2:1", 2, 0), ("5:1", 2, 2), ("3:2:1", 3, 0)],
)
@exhaustive
def test_distributed_sampler_is_divided_as_one_process_learns(
    launch: Launch, shares: str, ranks: int, workers: int
) -> None:
    assert difference(launch, DDP.replace("WORKERS", str(workers)), shares, ranks) < 1e-5
    printed = (launch.folder / f"printed-{ranks}").read_text()
    weights = [int(weight) for weight in shares.split(":")]
    for rank, weight in enumerate(weights):
        size = 12 * weight // sum(weights)
        assert f"sizes {rank} {{{size}}} 24 {96 // ranks}" in printed


@exhaustive
def test_sampler_whose_epoch_is_never_set_is_named(launch: Launch) -> None:
    program = DDP.replace("    sampler.set_epoch(epoch)\n", "").replace("WORKERS", "0")
    status, text = launch.run(program=program, flags=("--ranks", "2", "--shares", "2:1"))
    assert status == 0, text
    assert "the DistributedSampler shuffles each pass over the data alike, at x.py:" in " ".join(text.split())


@exhaustive
@pytest.mark.parametrize("average", ["average_tokens_across_devices=True", "average_tokens_across_devices=False"])
def test_trainer_is_divided_as_one_process_learns(launch: Launch, average: str) -> None:
    assert difference(launch, TRAINER.replace("AVERAGE", average), "2:1", 2) < 1e-5


@exhaustive
def test_loss_that_is_a_sum_is_refused(launch: Launch) -> None:
    status, text = launch.run(program=SUM.replace("WORKERS", "0"), flags=("--ranks", "2", "--shares", "2:1"))
    assert status != 0
    assert "--shares 2:1: the loss is a sum and no mean over the rank's samples" in " ".join(text.split())


@exhaustive
def test_undivided_batches_beside_divided_ones_are_refused(launch: Launch) -> None:
    status, text = launch.run(program=TWO_LOADERS.replace("WORKERS", "0"), flags=("--ranks", "2", "--shares", "2:1"))
    assert status != 0
    assert "it also trains with batches that evener does not divide" in " ".join(text.split())


@exhaustive
def test_program_without_a_loader_is_refused(launch: Launch) -> None:
    program = "dist.init_process_group('gloo')\ntrain(DistributedDataParallel(nn.Linear(10, 5)), 5)\n"
    status, text = launch.run(program=program, flags=("--ranks", "2", "--shares", "2:1"))
    assert status != 0
    assert "--shares 2:1: its batches come from no DataLoader with a DistributedSampler" in " ".join(text.split())


def test_as_many_shares_as_ranks(launch: Launch) -> None:
    status, text = launch.run(program="", flags=("--ranks", "2", "--shares", "2:1:1"))
    assert (status, "--shares 2:1:1: 3 shares, and 2 ranks" in text) == (2, True)


def test_batch_without_labels_is_no_error_of_the_shares() -> None:
    """transformers' Trainer counts no tokens in it, and its loss is not a number."""

    class Trainer:
        compute_loss_func, model_accepts_loss_kwargs = None, True
        args = SimpleNamespace(average_tokens_across_devices=True)

        def compute_loss(self) -> None: ...

        def training_step(self, model: None, inputs: None, num_items_in_batch: torch.Tensor) -> torch.Tensor:
            return 0 / num_items_in_batch

    noted = BatchShares([2.0, 1.0], 0, 2).note_trainer(Trainer.training_step, Trainer.compute_loss)
    assert noted(Trainer(), None, None, torch.tensor(0)).isnan()
