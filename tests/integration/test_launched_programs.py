"""Launch unchanged programs on this machine: the mistakes that would train nothing, or wait for ever, are named."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from evener.core.run.rundir import RunDir
from tests.tiers import exhaustive, exhaustively

TIMEOUT_S = 170
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
def train(model, steps, after=lambda step: None):
    optimizer = SGD(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(8, 10)), torch.randn(8, 5)).backward()
        optimizer.step()
        after(step)
"""
NO_GROUP = """
if torch.cuda.is_available():
    dist.init_process_group("nccl")
train(nn.Linear(10, 5), 5)
print("done", os.environ["RANK"], os.environ["WHO"])
"""
SPAWN = """
import torch.multiprocessing as mp
def main(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    train(DistributedDataParallel(nn.Linear(10, 5)), 5)
if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
"""
OWN_RENDEZVOUS = """
os.environ["MASTER_ADDR"] = "localhost"
os.environ["MASTER_PORT"] = "12355"
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
"""
# rank 0 alone evaluates: its collective meets the gradients of the other
EVALUATES = """
dist.init_process_group("gloo")
def evaluate(step):
    if step == 2 and dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))
train(DistributedDataParallel(nn.Linear(10, 5)), 30, evaluate)
"""
CROSSED = """
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.broadcast(torch.zeros(4), 1)
else:
    dist.scatter(torch.zeros(4), src=0)
"""
COMPUTES = """
dist.init_process_group("gloo")
def slow():
    end = time.monotonic() + 22
    while time.monotonic() < end:
        pass
if dist.get_rank() == 1:
    slow()
dist.barrier()
print("met", dist.get_rank(), flush=True)
os._exit(0)
"""
NO_COLLECTIVE = """
dist.init_process_group("gloo")
train(nn.Linear(10, 5), 25)
os._exit(0)
"""
FOR_NCCL = """
from torch.distributed import ReduceOp
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
inputs = [torch.arange(6.0) * (1 + other) for other in range(world)]
futures, outputs = [], []
for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
    for reduce in (dist.reduce_scatter_single, dist.reduce_scatter_tensor):
        outputs.append(torch.empty(6 // world))
        futures.append(reduce(outputs[-1], inputs[rank], op, async_op=True).get_future())
    outputs.append(torch.empty(6 // world))
    futures.append(dist.reduce_scatter(outputs[-1], list(inputs[rank].chunk(world)), op, async_op=True).get_future())
torch.futures.wait_all(futures)
stacked = torch.stack(inputs)
expected = [part.chunk(world)[rank] for part in (stacked.sum(0), stacked.mean(0), stacked.amax(0)) for _ in range(3)]
work = dist.reduce_scatter_single(torch.empty(6 // world), inputs[rank], async_op=True)
assert work.wait() and work.is_completed()
assert all(torch.equal(one, other) for one, other in zip(outputs, expected))
assert all(torch.equal(future.value()[0], other) for future, other in zip(futures, expected))
gathered, counts = torch.empty(2 * world), torch.empty(world, dtype=torch.int64)
dist.all_gather_into_tensor(gathered, torch.full((2,), 1.0 + rank), async_op=True).get_future().wait()
dist.all_gather_single(counts, torch.tensor([rank]))
assert gathered.tolist() == [1.0 + i // 2 for i in range(2 * world)] and counts.tolist() == list(range(world))
# What torch allows, and instruments must not break: names of arguments, ranks outside of a group, no learning rate.
part = torch.empty(6 // world)
dist.reduce_scatter(output=part, input_list=list(inputs[rank].chunk(world)))
assert torch.equal(part, stacked.sum(0).chunk(world)[rank])
dist.all_reduce(torch.zeros(1), group=dist.new_group([0]))
class Still(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": None})
    def step(self, closure=None):
        return closure()
still = Still(nn.Linear(2, 2).parameters())
assert [still.step(lambda: 7.0) for _ in range(3)] == [7.0] * 3
train(DistributedDataParallel(nn.Linear(10, 5)), 2)
print("completed", flush=True)
os._exit(0)
"""

RAISES = """
class Raises(SGD):
    def step(self, closure=None):
        if self.param_groups[0].pop("raises", False):
            raise ValueError
        return super().step(closure)
model = nn.Linear(10, 5)
optimizer = Raises(model.parameters(), 0.01)
for step in range(6):
    optimizer.param_groups[0]["raises"] = step == 2
    try:
        model(torch.ones(10)).sum().backward()
        optimizer.step()
    except ValueError:
        pass
"""
MEASURED = """
import evener
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(12 * 16, 256), torch.randn(12 * 16, 8))
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 8)))
optimizer, losses = torch.optim.AdamW(model.parameters()), []
for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        time.sleep(0.1)
    loss.backward()
    optimizer.step()
    evener.log(loss=loss)
    losses.append(loss.item())
    with torch.no_grad():  # no FLOPs of a training step
        model.module.eval()(x)
    model.train()
print("losses", dist.get_rank(), *losses, flush=True)
dist.destroy_process_group()
"""
# Averages its gradients itself, one after another.
OWN_COLLECTIVES = """
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 5))
optimizer = SGD(model.parameters(), 0.01)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    works = [dist.all_reduce(one.grad, async_op=IS_ASYNC) for one in model.parameters()]
    [work.wait() for work in works if IS_ASYNC]
    optimizer.step()
dist.destroy_process_group()
"""
# Two optimizers that update once in two passes: a step is over when both have, before the next forward pass.
LOCAL_STEPS = """
import copy
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Linear(6, 3)
torch.save(net.state_dict(), "start.pt") if rank == 0 else None
net.frozen = nn.Parameter(torch.zeros(50, dtype=torch.bfloat16), requires_grad=False)
draw = torch.Generator().manual_seed(rank)
data = torch.randn(48, 4, 6, generator=draw)
torch.save(data, f"data-{rank}.pt")
model = DistributedDataParallel(net)
optimizers = [SGD([net.weight], 0.05, momentum=0.9), SGD([net.bias], 0.05, momentum=0.9)]
for step in range(24):
    if step % 12 == 1:
        copy.deepcopy(model)
    for x in data[2 * step : 2 * step + 2]:
        model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
torch.save(net.state_dict(), f"end-{rank}.pt")
dist.destroy_process_group()
"""
RESUMES = """
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
first, last = map(int, sys.argv[1:])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 12))
weights = net.state_dict()
if first and os.path.exists("w.pt"):
    weights = torch.load("w.pt")
elif first and os.path.exists("w.st"):
    weights = load_file("w.st")
elif first:
    dcp.load(weights, checkpoint_id="w.dcp")
net.load_state_dict(weights)
model = DistributedDataParallel(net)
draw = torch.Generator().manual_seed(rank)
optimizer = SGD(net.parameters(), 0.05)
for step in range(last):
    x = torch.randn(8, 12, generator=draw)
    if step < first:
        continue
    optimizer.zero_grad()
    (model(x) - x.cumsum(1).sin()).square().mean().backward()
    optimizer.step()
    if step == 7:
        weights = net.state_dict()
        SAVE
if rank == 0:
    torch.save(net.state_dict(), "end.pt")
dist.destroy_process_group()
"""


class Launch:
    """`evener launch` on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: str, program: str = "", flags: tuple[str, ...] = ("--ranks", "2")) -> tuple[int, str]:
        """Return the exit status of a launch, and what it printed to stderr."""
        (self.folder / "x.py").write_text(TRAIN + program)
        argv = [str(Path(sys.executable).with_name("evener")), "launch", "--fleet", "local", *flags, "--"]
        printed = self.folder / "printed"  # no pipe: ranks could hold it open after a timeout
        with printed.open("w") as file:
            done = subprocess.run(
                [*argv, *(words or ("x.py",))], cwd=self.folder, stdout=file, stderr=file, timeout=TIMEOUT_S,
                check=False, env=os.environ | {"COLUMNS": "120"},
            )  # fmt: skip
        return done.returncode, printed.read_text()

    def error(self, program: str) -> str:
        """Return the error with which the launch of a program ends."""
        status, text = self.run(program=program)
        assert status != 0, text
        return text[text.rindex("\nerror: ") :]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def line_of(program: str, code: str) -> int:
    return 1 + next(i for i, line in enumerate((TRAIN + program).splitlines()) if code in line)


def test_ranks_without_process_group_are_an_error(launch: Launch) -> None:
    error = launch.error(NO_GROUP)
    assert "error: 3 optimizer steps were taken, and the 2 ranks have no process group" in error
    assert "evener launch --independent" in error


@exhaustive
def test_independent_ranks_run_by_shell_script_with_variables(launch: Launch) -> None:
    (launch.folder / "run.sh").write_text('test "$WORLD_SIZE" = 2\nWHO="$WHO $1" exec python x.py\n')
    status, text = launch.run(
        "bash", "run.sh", "typed", program=NO_GROUP,
        flags=("--ranks", "2", "--independent", "--env", "WHO=was", "--env", "API_TOKEN=hidden"),
    )  # fmt: skip
    assert status == 0, text
    assert {*re.findall(r"done \d was typed", text)} == {"done 0 was typed", "done 1 was typed"}
    assert "hidden" not in next(launch.folder.glob("runs/*/plan.json")).read_text()


@exhaustive
def test_ranks_of_its_own_are_an_error(launch: Launch) -> None:
    error = launch.error(SPAWN)
    line = line_of(SPAWN, "dist.init_process_group")
    assert f"starts processes of its own and makes a process group of them, at x.py:{line} in main" in error
    assert "remove mp.spawn" in error


@exhaustive
def test_extra_collective_of_one_rank_is_named(launch: Launch) -> None:
    error = launch.error(EVALUATES)
    line, backward = line_of(EVALUATES, "dist.all_reduce"), line_of(EVALUATES, "backward()")
    assert f"called all_reduce of 1 float32 at x.py:{line} in evaluate" in error
    assert f"DDP's all_reduce of 55 float32 at x.py:{backward} in train" in error


@exhaustive
def test_update_that_raises_does_not_end_measurement(launch: Launch) -> None:
    status, text = launch.run(program=RAISES, flags=("--ranks", "1"))
    assert status == 0, text
    assert len(RunDir(next(launch.folder.glob("runs/*"))).records(0)) == 5


def test_what_gloo_lacks_is_completed(launch: Launch) -> None:
    status, text = launch.run(program=FOR_NCCL)
    assert status == 0, text
    assert text.count("completed") == 2
    assert "init_process_group('nccl'): torch finds no CUDA device here, so Gloo is used" in text


def test_steps_of_unchanged_program_are_measured(launch: Launch) -> None:
    """Against what the program itself knows: its losses, its samples, its sleep and the size of its gradients."""
    status, text = launch.run(program=MEASURED)
    assert status == 0, text
    rundir = RunDir(next(launch.folder.glob("runs/*")))
    printed = {int(rank): losses.split() for rank, losses in re.findall(r"losses (\d) (.*)", text)}
    means = [(float(a) + float(b)) / 2 for a, b in zip(printed[0], printed[1], strict=True)]
    first, second = rundir.records(0), rundir.records(1)
    assert [record.loss for record in first] == pytest.approx(means, rel=1e-6)
    assert [record.tokens for record in second] == [8.0] * 12
    num_params = 256 * 2048 + 2048 + 2048 * 8 + 8
    assert {record.bytes for record in first} == {4 * num_params}  # two ranks: 2(n-1)/n of the gradients
    assert all(record.cost.total_s == pytest.approx(record.wall_s) for record in first + second)
    waits = [record.cost.wait_s for record in first]
    assert statistics.median(waits) > 0.07, waits  # of the 0.1 s that the other sleeps
    assert statistics.median([record.cost.wait_s for record in second]) < 0.05
    manifest = rundir.manifest()
    assert (manifest.verdict, manifest.program, manifest.num_params) == ("finished", "x.py", num_params)
    assert manifest.result is not None
    assert (manifest.result.steps, len(manifest.result.peak_memory_bytes)) == (12, 2)
    assert "12 steps measured: " in text
    assert manifest.started < first[0].ended - first[0].wall_s + 1.0  # with the program, before its first step
    reported = subprocess.run(
        [str(Path(sys.executable).with_name("evener")), "report", str(rundir.path)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert reported.returncode == 0, reported.stderr
    check_timeline(rundir, num_params)
    # of one step of 8 samples: the gradient of the first layer's input is not computed
    assert [one.by_dtype for one in manifest.flops] == 2 * [{"fp32": 8 * (4 * 256 * 2048 + 6 * 2048 * 8)}]
    assert [(one.num_samples, one.missing) for one in manifest.flops] == 2 * [(8.0, "")]
    again, text = launch.run(program=MEASURED, flags=("--ranks", "2", "--sync", "int8", "--dry-run"))
    assert again == 0, text
    assert f"predicted from runs/{rundir.path.name}: a step of " in text
    assert " samples/s: compute " in text
    again, text = launch.run(program=MEASURED, flags=("--ranks", "2", "--shares", "auto", "--dry-run"))
    assert again == 0, text
    [shares] = re.findall(r"predicted from \S+(?: with --shares (\d+:\d+))?: ", text)
    assert (f"shares={shares}" in text) if shares else "shares=" not in text  # an option of the ranks
    again, text = launch.run(
        "x.py", "--other", flags=("--ranks", "2", "--shares", "auto", "--dry-run"), program=MEASURED
    )
    assert again == 0, text
    assert "starts with ddp and equal shares: there is no earlier run of it with these words on these hosts" in text


@pytest.mark.parametrize("is_async", [False, *exhaustively(True)])
def test_collectives_of_a_program_s_own_are_kept_where_none_is_hidden(launch: Launch, is_async: bool) -> None:
    """The bias of 5 is less than 1 % of a step's bytes."""
    status, text = launch.run(program=OWN_COLLECTIVES.replace("IS_ASYNC", str(is_async)))
    assert status == 0, text
    rundir = RunDir(next(launch.folder.glob("runs/*")))
    own = rundir.manifest().collectives
    if is_async:
        assert own.obstacle == "it calls all_reduce with async_op=True, and what it computes until it waits is unknown"
        return
    assert [(one.collective, one.size_bytes) for one in own.calls] == [("all_reduce", 4 * 128 * n) for n in (64, 1, 5)]
    blocked_s = [(one.cost.exposed_sync_s or 0.0) + (one.cost.wait_s or 0.0) for one in rundir.records(0)[2:]]
    took_s = [one.sync_s or 0.0 for one in rundir.records(0)[2:]]
    assert all(0.0 < in_calls_s <= 1.01 * every_s for in_calls_s, every_s in zip(took_s, blocked_s, strict=True))


def check_timeline(rundir: RunDir, num_params: int) -> None:
    """The spans of a step are its record's phases, its buckets all gradients, which end within backward."""
    for rank in (0, 1):
        recorded = {record.step: record for record in rundir.records(rank)}
        spans = rundir.spans(rank)
        assert [one.step for one in spans] == [*range(12)]
        for one in spans[1:]:
            cost, times_s = recorded[one.step].cost, one.phase_times_s()
            assert times_s["compute_s"] == pytest.approx(cost.compute_s, abs=1e-5)
            assert times_s["blocked"] == pytest.approx((cost.exposed_sync_s or 0.0) + (cost.wait_s or 0.0), abs=1e-5)
            assert sum(bucket.size_bytes for bucket in one.exchanges) == 4 * num_params
            assert all(0.0 <= bucket.begin_s < bucket.end_s <= one.laps[-1].end_s for bucket in one.exchanges)
    gradients = rundir.manifest().gradients
    assert sum(tensor.num_params for tensor in gradients) == num_params
    assert [tensor.ready for tensor in gradients] == sorted(tensor.ready for tensor in gradients)
    assert {tensor.name for tensor in gradients[:2]} == {"2.weight", "2.bias"}  # of the last layer


def test_gradients_of_unchanged_program_are_compressed(launch: Launch) -> None:
    """A number is sent as a byte, and each block of 256 has a scale of two."""
    status, text = launch.run(program=MEASURED, flags=("--ranks", "2", "--sync", "int8"))
    assert status == 0, text
    rundir = RunDir(next(launch.folder.glob("runs/*")))
    num_params = 256 * 2048 + 2048 + 2048 * 8 + 8
    records = rundir.records(0)
    sent = statistics.median([record.bytes for record in records])
    assert sent == pytest.approx(num_params * (1 + 2 / 256), rel=0.01)
    fidelity = [record.fidelity for record in records if record.fidelity is not None]
    assert fidelity
    assert all(one.error < 0.25 and one.cosine > 0.97 for one in fidelity)
    assert str(rundir.manifest().roster.sync) == "int8"
    exchanges = rundir.spans(0)[-1].exchanges
    assert sum(bucket.sent_bytes for bucket in exchanges) == records[-1].bytes
    # the program may have saved its model at its end
    assert [path.parent.name for path in rundir.glob("own/*/sync-0-*.safetensors")] == ["rank-0", "rank-1"]


@exhaustive
@pytest.mark.parametrize(
    "save",
    [
        "torch.save(weights, 'w.pt') if rank == 0 else None",
        "save_file(weights, 'w.st') if rank == 0 else None",
        "dcp.save(weights, checkpoint_id='w.dcp')",
    ],
)
def test_state_of_strategy_survives_the_resume_of_unchanged_program(launch: Launch, save: str) -> None:
    """PowerSGD's residuals and factors, whichever way the program saves: its losses are those without a break."""
    ended = []
    for words in (("0", "20"), ("8", "20")):
        flags = ("--ranks", "2", "--sync", "powersgd:4", "--out", f"runs/{words[0]}")
        status, text = launch.run("x.py", *words, program=RESUMES.replace("SAVE", save), flags=flags)
        assert status == 0, text
        assert ("continues with the state that an earlier run kept" in text) == (words[0] == "8")
        ended.append(torch.load(launch.folder / "end.pt"))
    assert all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())


def test_unchanged_program_takes_local_steps_between_exchanges(launch: Launch) -> None:
    """Against DiLoCo as its formulas say, with both replicas in one process."""
    status, text = launch.run(program=LOCAL_STEPS, flags=("--ranks", "2", "--sync", "diloco:5"))
    assert status == 0, text
    assert "the program has ended between two exchanges of diloco:5" in text
    everywhere, momentum = torch.load(launch.folder / "start.pt"), {"weight": 0.0, "bias": 0.0}
    replicas = [nn.Linear(6, 3) for _ in range(2)]
    optimizers = [SGD(replica.parameters(), 0.05, momentum=0.9) for replica in replicas]
    data = [torch.load(launch.folder / f"data-{rank}.pt") for rank in (0, 1)]
    for step in range(24):
        for replica, optimizer, batches in zip(replicas, optimizers, data, strict=True):
            if step % 5 == 0:
                replica.load_state_dict(everywhere)
            optimizer.zero_grad()
            for x in batches[2 * step : 2 * step + 2]:
                replica(x).square().mean().backward()
            optimizer.step()
        if step % 5 == 4:
            mu = min((1 - 2**-0.5) ** 0.5, (step // 5) / (step // 5 + 5))
            for name, value in everywhere.items():
                delta = value - sum(replica.state_dict()[name] for replica in replicas) / 2
                momentum[name] = mu * momentum[name] + delta
                everywhere[name] = value - (delta + mu * momentum[name]) / (1 + mu)
    for rank, replica in enumerate(replicas):
        ended = torch.load(launch.folder / f"end-{rank}.pt")
        assert all(torch.allclose(ended[name], value, atol=1e-6) for name, value in replica.state_dict().items())
    rundir = RunDir(next(launch.folder.glob("runs/*")))
    assert [record.bytes for record in rundir.records(1)] == [0, 0, 0, 0, 0, *([4 * 21, 0, 0, 0, 0] * 4)][:24]
    assert str(rundir.manifest().roster.sync) == "diloco:5"


@exhaustive
def test_local_steps_are_refused_beside_an_optimizer_that_shards(launch: Launch) -> None:
    two = "[SGD([net.weight], 0.05, momentum=0.9), SGD([net.bias], 0.05, momentum=0.9)]"
    one = "[dist.optim.ZeroRedundancyOptimizer([net.weight, net.bias], SGD, lr=0.05)]"
    program = LOCAL_STEPS.replace(two, one)
    program = program.replace("import copy", "import copy, torch.distributed.optim")
    status, text = launch.run(program=program, flags=("--ranks", "2", "--sync", "diloco:5"))
    assert status == 0, text
    assert "--sync diloco:5 has no effect on a DDP model: the program's ZeroRedundancyOptimizer" in " ".join(
        text.split()
    )
    ended = [torch.load(launch.folder / f"end-{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())


@exhaustive
def test_packed_gradients_of_unchanged_program_are_exact(launch: Launch) -> None:
    losses = {}
    for sync in ("ddp", "packed"):
        status, text = launch.run(program=MEASURED, flags=("--ranks", "2", "--sync", sync))
        assert status == 0, text
        losses[sync] = sorted(re.findall(r"losses .*", text))
    assert losses["packed"] == losses["ddp"]


@exhaustive
def test_without_completion_gloo_is_as_it_is(launch: Launch) -> None:
    status, text = launch.run(program=FOR_NCCL.replace('"nccl"', '"gloo"'), flags=("--ranks", "2", "--no-compat"))
    assert status != 0
    assert "getFuture" in text


@exhaustive
def test_rendezvous_of_its_own_is_an_error(launch: Launch) -> None:
    error = launch.error(OWN_RENDEZVOUS)
    assert "the program sets MASTER_ADDR and MASTER_PORT itself" in error
    assert f"x.py:{line_of(OWN_RENDEZVOUS, 'MASTER_ADDR')} in <module>" in error
    assert "nobody serves localhost:12355" in error


@exhaustive
def test_different_collectives_end_the_run(launch: Launch) -> None:
    error = launch.error(CROSSED)
    assert re.search(r"called (broadcast|scatter) of 4 float32 at x.py:\d+ in <module>, while rank \d called", error)


@exhaustive
def test_rank_that_computes_is_waited_for(launch: Launch) -> None:
    status, text = launch.run(program=COMPUTES)
    assert status == 0, text
    assert re.search(r"waiting for rank 1, which is in x.py:\d+ in slow", text)


@exhaustive
def test_ranks_that_exchange_nothing_are_a_warning(launch: Launch) -> None:
    status, text = launch.run(program=NO_COLLECTIVE)
    assert status == 0, text
    assert "the ranks have exchanged no tensor" in text
