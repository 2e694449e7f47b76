"""Mistakes that torch allows, and that change or waste what a program learns: named by `evener launch`."""

from __future__ import annotations

from evener.core.run.rundir import RunDir
from tests.integration.test_launched_programs import Launch, launch, line_of
from tests.tiers import exhaustive

__all__ = ["launch"]

DATA = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.unused = nn.Linear(8, 8)
    def forward(self, x):
        return self.head(self.norm(self.body(x)))
"""
# all ranks draw the same samples; the head is newer than the optimizer; the last micro-batch of an epoch is smaller
SAME_DATA = (
    DATA
    + """
net = Net()
del net.unused
optimizer = SGD(net.parameters(), 0.01)
net.head = nn.Linear(8, 5)
model = DistributedDataParallel(net)
data = DataLoader(TensorDataset(torch.randn(44, 10), torch.randn(44, 5)), batch_size=8, shuffle=True)
for epoch in range(8):
    for i, (x, y) in enumerate(data):
        (nn.functional.mse_loss(model(x), y) / 2).backward()
        if i % 2:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            model.zero_grad()
torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
"""
)
NO_EPOCH = (
    DATA
    + """
model = DistributedDataParallel(Net(), broadcast_buffers=False, find_unused_parameters=True)
if rank == 1:
    nn.init.constant_(model.module.head.weight, 1.0)
optimizer = SGD(model.parameters(), 0.01)
data = TensorDataset(torch.randn(48, 10), torch.randn(48, 5))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
for epoch in range(8):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        flat = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]) / 2
        dist.all_reduce(flat)
        optimizer.step()
model.eval()
dist.destroy_process_group()
"""
)
NO_GRADIENT = """
model = nn.Linear(10, 5)
optimizer = SGD(model.parameters(), 0.01)
model = nn.Linear(10, 5)
for step in range(5):
    model(torch.ones(10)).sum().backward()
    optimizer.step()
"""
# what only looks like a mistake: a hook that averages, sparse gradients, local steps, evaluation in two passes
LOOKS_WRONG = (
    DATA
    + """
class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(64, 8, sparse=True), nn.BatchNorm1d(8), nn.Linear(8, 5)
    def forward(self, x):
        return self.head(self.norm(self.table(x)))
sparse = DistributedDataParallel(Sparse())
hooked = DistributedDataParallel(nn.Linear(10, 12), gradient_as_bucket_view=True)
def average(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
hooked.register_comm_hook(None, average)
local, sharded = DistributedDataParallel(nn.Linear(10, 5)), DistributedDataParallel(nn.Linear(10, 64))
optimizers = [SGD(model.parameters(), 0.01) for model in (sparse, hooked, local)]
from torch.distributed.optim import ZeroRedundancyOptimizer
optimizers.append(ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.AdamW, lr=0.1))
data = TensorDataset(torch.randint(0, 64, (48,)), torch.randn(48, 10))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
for x, y in loader:
    for optimizer in optimizers:
        optimizer.zero_grad()
    for _ in range(4):
        loss = sparse(x).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach())
        hooked(y).square().mean().backward()
        sharded(y).square().mean().backward()
        with local.no_sync():
            local(y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step(lambda: loss)
for _ in range(2):
    for x, y in loader:
        with torch.no_grad():
            sparse(x)
dist.destroy_process_group()
"""
)
# the same, right: what is seen are only things that look like mistakes
RIGHT = (
    DATA
    + """
net = Net()
net.unused.requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
data = TensorDataset(torch.randn(88, 10), torch.randn(88, 5))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(8):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y) * (len(x) / 8)
        loss.backward()
        if i % 2:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            dist.all_reduce(norm)
            dist.all_reduce(loss.detach())
            optimizer.step()
            model.zero_grad()
    for x, y in loader:  # the loss over what was trained with, in the same order
        with torch.no_grad():
            model(x)
    torch.save(optimizer.state_dict(), f"optimizer-{rank}.pt")
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
"""
)


def test_same_data_new_head_and_gradients_averaged_twice(launch: Launch) -> None:
    status, text = launch.run(program=SAME_DATA)
    assert status == 0, text
    assert text.count("warning: ") == 5, text
    assert "ranks 0 and 1 train on the same samples: the first 16 batches of their DDP models are equal" in text
    made = line_of(SAME_DATA, "SGD(net")
    assert f"the optimizer made at x.py:{made} in <module> holds 2 tensors, of 6, that no rank gave a gradient" in text
    assert "the model trains head.bias and head.weight, which no optimizer updates" in " ".join(text.split())
    line = line_of(SAME_DATA, "dist.all_reduce(parameter.grad)")
    assert f"averaged twice: by DistributedDataParallel, and by the all_reduce at x.py:{line}" in " ".join(text.split())
    assert "micro-batches of 4 and of 8 rows count the same in one step's gradient" in text
    assert f"both write model.pt, at x.py:{line_of(SAME_DATA, 'torch.save')}" in " ".join(text.split())


@exhaustive
def test_epoch_never_set_parameter_without_gradient_and_own_statistics(launch: Launch) -> None:
    status, text = launch.run(program=NO_EPOCH)
    assert status == 0, text
    assert text.count("warning: ") == 5, text
    loop = line_of(NO_EPOCH, "for x, y in loader")
    assert f"the DistributedSampler shuffles each pass over the data alike, at x.py:{loop}" in text
    assert "no rank gave unused.weight and unused.bias a gradient in 20 steps" in text
    assert "the models of ranks 0 and 1 differ after 20 updates, first in " in text
    line = line_of(NO_EPOCH, "dist.all_reduce(flat)")
    assert f"averaged twice: by DistributedDataParallel, and by the all_reduce at x.py:{line}" in " ".join(text.split())
    assert "the running statistics of their BatchNorm layers are those of each rank's own samples" in text


@exhaustive
def test_optimizer_of_another_model_is_named_with_one_rank(launch: Launch) -> None:
    status, text = launch.run(program=NO_GRADIENT, flags=("--ranks", "1"))
    assert status == 0, text
    assert "holds 2 tensors, of 2, that no rank gave a gradient in 5 steps" in text


@exhaustive
def test_what_looks_like_a_mistake_gives_no_finding(launch: Launch) -> None:
    status, text = launch.run(program=LOOKS_WRONG)
    assert status == 0, text
    assert "warning" not in text


@exhaustive
def test_right_program_gives_no_finding(launch: Launch) -> None:
    status, text = launch.run(program=RIGHT)
    assert status == 0, text
    assert "warning" not in text
    result = RunDir(next(launch.folder.glob("runs/*"))).manifest().result
    assert result is not None
    assert result.replicas_agree is True
