"""Correct distributed programs of the kinds that people write, each as the text that follows `TRAIN`.

Each rank prints how many updates it has made: so many steps evener has to have measured.
"""

from __future__ import annotations

# 128 samples for each of two ranks: 16 batches an epoch
DATA = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
rank, world = dist.get_rank(), dist.get_world_size()
mse = nn.functional.mse_loss
data = TensorDataset(torch.randn(256, 10), torch.randn(256, 5))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
def batches(epochs):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield from loader
def net():
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 5))
"""

RIGHT_PROGRAMS = {
    # all ranks evaluate, rank 0 saves, all load what it saved
    "evaluates_saves_and_resumes": DATA
    + """
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
held_out = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))
for epoch in range(2):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        mse(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in held_out:
            total += torch.tensor([mse(model(x), y, reduction="sum"), len(x)])
    dist.all_reduce(total)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    dist.barrier()
    saved = torch.load("checkpoint.pt", map_location="cpu")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # gradient accumulation under no_sync; the last micro-batch of an epoch is smaller, and counts less
    "accumulates_under_no_sync": DATA
    + """
import contextlib
data = TensorDataset(torch.randn(250, 10), torch.randn(250, 5))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for i, (x, y) in enumerate(batches(7)):
    is_last = i % 4 == 3
    with contextlib.nullcontext() if is_last else model.no_sync():
        (mse(model(x), y, reduction="sum") / (32 * 5)).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
print("updates", 7 * len(loader) // 4)
""",
    # accumulation without no_sync, bf16 autocast, tied weights, an IterableDataset that ranks share out
    "language_model_of_a_stream": DATA
    + """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        draw = torch.Generator().manual_seed(7)
        for i in range(512):
            tokens = torch.randint(0, 32, (17,), generator=draw)
            if i % world == rank:
                yield tokens[:-1], tokens[1:]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.layer = nn.Embedding(32, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layer(self.tokens(x), src_mask=mask, is_causal=True))
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for i, (x, y) in enumerate(DataLoader(Stream(), batch_size=4)):
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
    loss.backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
print("updates", 512 // 2 // 4 // 2)
dist.destroy_process_group()
""",
    # GradScaler, whose first steps overflow and are left out; the last batch of an epoch is smaller
    "scales_fp16_gradients": DATA
    + """
data = TensorDataset(torch.randn(250, 10), torch.randn(250, 5))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for x, y in batches(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
updates = int(optimizer.state[model.module[0].bias]["step"])
assert 25 <= updates < 3 * len(loader), updates
print("updates", updates)
dist.destroy_process_group()
""",
    # fine-tuning: a frozen body, a new head and an unused one; BatchNorm; averaged weights
    "fine_tunes_with_averaged_weights": DATA
    + """
import copy
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 100)
        self.auxiliary = nn.Linear(16, 5)
    def forward(self, x):
        x = self.norm(self.body(x).relu())
        return self.head(x), self.auxiliary(x)
net = Model()
net.body.requires_grad_(False)
net.head = nn.Linear(16, 5)
teacher = Model()
teacher.head = nn.Linear(16, 5)
model = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 0.01)
average = torch.optim.swa_utils.AveragedModel(model, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9))
best = None
for i, (x, y) in enumerate(batches(2)):
    optimizer.zero_grad()
    outputs = model(x)
    mse(outputs[i % 2], y).backward()
    optimizer.step()
    average.update_parameters(model)
    if i % 8 == 7:
        best = copy.deepcopy(model)
        teacher.load_state_dict(net.state_dict())
        for one in (model, average, teacher):
            one.eval()
            with torch.no_grad():
                one(x)
        model.train()
torch.save(average.state_dict(), f"average-{rank}.pt")
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # BatchNorm statistics of each rank's samples, averaged before each evaluation, as timm does
    "averages_batch_norm_statistics": DATA
    + """
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)), broadcast_buffers=False
)
optimizer = SGD(model.parameters(), 0.05, nesterov=True, momentum=0.9)
for epoch in range(2):
    for x, y in batches(1):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    for name, buffer in model.module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            dist.all_reduce(buffer)
            buffer /= world
    model.eval()
    with torch.no_grad():
        mse(model(x), y)
    model.train()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # Muon for matrices and AdamW for the rest
    "two_optimizers": DATA
    + """
model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
matrices = [one for one in model.parameters() if one.ndim == 2]
optimizers = [
    torch.optim.Muon(matrices, lr=0.02),
    torch.optim.AdamW([one for one in model.parameters() if one.ndim < 2], lr=0.01),
]
schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 8)) for one in optimizers]
for x, y in batches(2):
    mse(model(x), y).backward()
    for one in (*optimizers, *schedules):
        one.step()
    model.zero_grad()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # a GAN: the critic is updated twice for each update of the generator, from twice as many made samples as real ones
    "adversarial_networks": DATA
    + """
generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 10)))
critic = DistributedDataParallel(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)), broadcast_buffers=False)
to_critic, to_generator = (torch.optim.Adam(one.parameters(), 1e-3) for one in (critic, generator))
torch.manual_seed(1 + rank)
loss = nn.functional.binary_cross_entropy_with_logits
for i, (x, _) in enumerate(batches(4)):
    made = generator(torch.randn(16, 4))
    to_critic.zero_grad()
    loss(critic(x), torch.ones(8, 1)).backward()
    loss(critic(made.detach()), torch.zeros(16, 1)).backward()
    to_critic.step()
    if i % 2:
        to_generator.zero_grad()
        loss(critic(made), torch.ones(16, 1)).backward()
        to_generator.step()
print("updates", 4 * len(loader))
dist.destroy_process_group()
""",
    # LBFGS, which evaluates a closure several times in each update: ranks need the same loss
    "second_order_with_closure": DATA
    + """
model = DistributedDataParallel(net())
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
x, y = data[rank::world]
def closure():
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean
for step in range(25):
    optimizer.step(closure)
print("updates", 25)
dist.destroy_process_group()
""",
    # activation checkpointing of both kinds, and a graph that never changes
    "checkpoints_activations": DATA
    + """
from torch.utils.checkpoint import checkpoint
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(10, 16), net(), net()
        self.first, self.second = nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.1))
    def forward(self, x):
        x = checkpoint(self.second, self.first(x), use_reentrant=True)
        return checkpoint(self.third, x, use_reentrant=False)
model = DistributedDataParallel(Model(), static_graph=True)
optimizer = SGD(model.parameters(), 0.01)
for x, y in batches(2):
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    "compiled": DATA
    + """
model = torch.compile(DistributedDataParallel(net()))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for x, y in batches(2):
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # FSDP2 with a distributed checkpoint; the optimizer is made of the sharded parameters
    "fully_sharded": DATA
    + """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
mesh = init_device_mesh("cpu", (world,))
model = net()
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for x, y in batches(2):
    mse(model(x).float(), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id="checkpoint")
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # ZeRO's optimizer, gathered on rank 0 to be saved
    "optimizer_state_sharded": DATA
    + """
from torch.distributed.optim import ZeroRedundancyOptimizer
model = DistributedDataParallel(net())
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
for x, y in batches(2):
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
optimizer.consolidate_state_dict(to=0)
if rank == 0:
    torch.save(optimizer.state_dict(), "optimizer.pt")
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # no DDP: weights are broadcast, gradients all-reduced as one tensor; ranks agree on when to stop
    "averages_gradients_itself": DATA
    + """
torch.manual_seed(rank)
model = net()
for one in (*model.parameters(), *model.buffers()):
    dist.broadcast(one.detach(), src=0)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
updates, stop = 0, torch.zeros(1)
for x, y in batches(10):
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    gradients = [one.grad for one in model.parameters()]
    flat = torch.cat([one.flatten() for one in gradients])
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, (flat / world).split([one.numel() for one in gradients])):
        gradient.copy_(mean.view_as(gradient))
    optimizer.step()
    updates += 1
    if rank == 0:
        stop.fill_(updates >= 30)
    dist.broadcast(stop, 0)
    if stop:
        break
print("updates", updates)
sys.exit(0)
""",
    # local SGD: gradients are averaged for ten steps, and the models in every fourth step after them
    "local_steps": DATA
    + """
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
model = DistributedDataParallel(net())
alone = [dist.new_group([one]) for one in range(world)][rank]
model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=10), post_localSGD_hook)
optimizer = PostLocalSGDOptimizer(
    SGD(model.parameters(), 0.05), PeriodicModelAverager(period=4, warmup_steps=10)
)
for x, y in batches(2):
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # torch's PowerSGD, after ten exact steps
    "compresses_gradients": DATA
    + """
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 5)))
model.register_comm_hook(PowerSGDState(None, 1, start_powerSGD_iter=10, min_compression_rate=1), powerSGD_hook)
optimizer = SGD(model.parameters(), 0.01)
for x, y in batches(2):
    optimizer.zero_grad()
    mse(model(x), y).backward()
    optimizer.step()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # rank 1 has fewer batches
    "uneven_inputs": DATA
    + """
from torch.distributed.algorithms.join import Join
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), 0.01)
torch.manual_seed(1 + rank)
updates = 0
with Join([model]):
    for _ in range(30 - 4 * rank):
        optimizer.zero_grad()
        mse(model(torch.randn(8, 10)), torch.randn(8, 5)).backward()
        optimizer.step()
        updates += 1
print("updates", updates)
dist.barrier()
dist.destroy_process_group()
""",
    # worker processes; a weighted sampler that each rank seeds for itself; each rank saves a file of its own
    "samples_by_weight_in_worker_processes": DATA
    + """
weights = torch.rand(256)
draw = torch.Generator().manual_seed(100 + rank)
chosen = torch.utils.data.WeightedRandomSampler(weights, 112, generator=draw)
loader = DataLoader(data, batch_size=8, sampler=chosen, num_workers=2, persistent_workers=True, prefetch_factor=2)
model = DistributedDataParallel(net())
optimizer = SGD(model.parameters(), 0.01)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    os.makedirs(f"rank{rank}", exist_ok=True)
    torch.save(draw.get_state(), f"rank{rank}/sampler.pt")
    dist.barrier()
states = [None] * world
dist.all_gather_object(states, {"rank": rank, "epoch": 2})
assert [one["rank"] for one in states] == [0, 1]
print("updates", 2 * 14)
dist.destroy_process_group()
""",
    # an embedding with sparse gradients has an optimizer of its own; each epoch another seed
    "sparse_gradients": DATA
    + """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(500, 8, sparse=True), nn.Linear(8, 5)
    def forward(self, x):
        return self.head(self.table(x))
data = TensorDataset(torch.randint(0, 500, (256, 6)), torch.randint(0, 5, (256,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(Model())
dense = torch.optim.AdamW(model.module.head.parameters(), 0.01)
sparse = torch.optim.SparseAdam(model.module.table.parameters(), 0.01)
for epoch in range(2):
    sampler.seed = epoch
    for x, y in loader:
        for one in (dense, sparse):
            one.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for one in (dense, sparse):
            one.step()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # contrastive learning: embeddings of all ranks are negatives of each
    "gathers_embeddings": DATA
    + """
from torch.distributed.nn.functional import all_gather
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        return torch.cat(parts)
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(world)[rank]
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for x, _ in batches(2):
    optimizer.zero_grad()
    one, other = model(torch.cat([x, x + 0.1 * torch.randn_like(x)])).chunk(2)
    scores = one @ Gather.apply(other.contiguous()).T + one @ torch.cat(all_gather(other.contiguous())).T
    nn.functional.cross_entropy(scores, rank * len(x) + torch.arange(len(x))).backward()
    optimizer.step()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # each tensor has an optimizer, which updates it as soon as its gradient is there: torch's tutorial
    "updates_within_backward": DATA
    + """
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(10, 10), nn.ReLU())], nn.Linear(10, 5))
optimizers = {one: torch.optim.Adam([one], 0.01, foreach=False) for one in model.parameters()}
def update(parameter):
    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
for one in model.parameters():
    one.register_post_accumulate_grad_hook(update)
for x, y in batches(2):
    mse(model(x), y).backward()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # two stages of a model, which send activations and their gradients to each other
    "pipeline_of_two_stages": DATA
    + """
stage = nn.Linear(10, 16) if rank == 0 else nn.Linear(16, 5)
optimizer = SGD(stage.parameters(), 0.01)
for x, y in DataLoader(data, batch_size=8):
    optimizer.zero_grad()
    if rank == 0:
        hidden = stage(x)
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(len(x), 16)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        mse(stage(hidden.relu()), y).backward()
        dist.send(hidden.grad, 0)
    optimizer.step()
print("updates", 32)
dist.barrier()
dist.destroy_process_group()
""",
    # it checks in each step whether the ranks hold equal weights, and averages what it logs
    "compares_its_own_replicas": DATA
    + """
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for x, y in batches(2):
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    optimizer.step()
    largest = nn.utils.parameters_to_vector(model.parameters()).detach()
    smallest = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    assert torch.equal(largest, smallest)
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # sharpness-aware minimization: an optimizer around another, two gradients an update
    "optimizer_of_an_optimizer": DATA
    + """
class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)
    @torch.no_grad()
    def step(self, closure):
        tensors = [one for group in self.param_groups for one in group["params"]]
        norm = nn.utils.get_total_norm([one.grad for one in tensors])
        moves = [one.grad * (group["rho"] / norm) for group in self.param_groups for one in group["params"]]
        torch._foreach_add_(tensors, moves)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(tensors, moves)
        self.base.step()
        self.zero_grad()
model = DistributedDataParallel(net())
optimizer = SAM(model.parameters(), SGD, lr=0.05, momentum=0.9)
for x, y in batches(2):
    mse(model(x), y).backward()
    optimizer.step(lambda: mse(model(x), y).backward())
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # DDP within each node, here of a single rank, and an all-reduce among the nodes
    "averages_between_nodes": DATA
    + """
node = [dist.new_group([one]) for one in range(world)][rank]
model = DistributedDataParallel(net(), process_group=node)
optimizer = SGD(model.parameters(), 0.01)
for x, y in batches(2):
    optimizer.zero_grad()
    mse(model(x), y).backward()
    for one in model.parameters():
        dist.all_reduce(one.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
print("updates", 2 * len(loader))
dist.destroy_process_group()
""",
    # federated averaging: models meet after each epoch alone
    "averages_models_after_epochs": DATA
    + """
model = net()
optimizer = SGD(model.parameters(), 0.05)
for epoch in range(2):
    for x, y in batches(2):
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    for one in model.parameters():
        dist.all_reduce(one.detach(), op=dist.ReduceOp.AVG)
print("updates", 4 * len(loader))
dist.destroy_process_group()
""",
    "accelerate": """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 10), torch.randn(512, 5))
model, loader = nn.Linear(10, 5), DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
print("updates", 2 * 16)
accelerator.end_training()
""",
    "transformers_trainer": """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (224, 12))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=1, logging_steps=7, save_steps=14, report_to="none",
    eval_strategy="steps", eval_steps=14, disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:16])
trainer.train()
print("updates", trainer.state.global_step)
""",
    "lightning_trainer": """
import lightning
from torch.utils.data import DataLoader, TensorDataset
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    def training_step(self, batch, i):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, sync_dist=True)
        return loss
    def validation_step(self, batch, i):
        self.log("val/loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)
lightning.seed_everything(0)
data = TensorDataset(torch.randn(256, 10), torch.randn(256, 5))
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False
)
trainer.fit(Module(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16))
print("updates", trainer.global_step)
""",
}

# Programs in which a rank updates no model: evener measures no steps.
UNMEASURED_PROGRAMS = {
    # rank 1 plays with the newest weights, rank 0 learns from what it sends: rank 1 has no optimizer
    "actor_and_learner": DATA
    + """
policy = net()
optimizer = torch.optim.AdamW(policy.parameters(), 0.01) if rank == 0 else None
for _ in range(32):
    for one in policy.parameters():
        dist.broadcast(one.detach(), src=0)
    x, y = torch.empty(8, 10), torch.empty(8, 5)
    if rank == 1:
        x.normal_()
        y = policy(x).detach() + 1
        dist.send(x, 0)
        dist.send(y, 0)
    else:
        dist.recv(x, 1)
        dist.recv(y, 1)
        optimizer.zero_grad()
        mse(policy(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
""",
    # no training: each rank predicts for a part of the data, and rank 0 writes all
    "inference": DATA
    + """
model = net().eval()
with torch.inference_mode():
    outputs = [model(x) for x, _ in DataLoader(data, batch_size=32, sampler=DistributedSampler(data, shuffle=False))]
parts = [None] * world if rank == 0 else None
dist.gather_object(torch.cat(outputs).tolist(), parts)
if rank == 0:
    torch.save(parts, "predictions.pt")
dist.monitored_barrier()
sys.exit()
""",
}
