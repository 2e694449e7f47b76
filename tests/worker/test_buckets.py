"""The planner's DDP buckets and their ready times match torch's."""

from __future__ import annotations

import importlib
import json
import re

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from evener.core.model.shape import preset_shape
from evener.plan.cost.cost_model import BACKWARD_FRACTION
from evener.plan.cost.sync_traffic import COMPRESSED_BUCKET_BYTES, bucket_sizes, gradient_tensors
from evener.worker.rank import torch_private

from ..tiers import exhaustively

SCRIPT = """
import json, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from evener.core.model.shape import preset_shape
from evener.worker.train.model import GPT

name, vocab_size, num_layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
most_MiB = int(sys.argv[4]) or None
torch.set_num_threads(1)
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
shape = preset_shape(name, vocab_size, block_size=64, num_layers=num_layers)
model = DistributedDataParallel(GPT(shape), gradient_as_bucket_view=True, forward_sync_buffers=False,
                                bucket_cap_mb=most_MiB)
seen = []

def hook(_, bucket):
    seen.append((bucket.buffer().numel() * 4, time.process_time()))
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

model.register_comm_hook(None, hook)
shares = []
for step in range(6):
    seen.clear()
    tokens = torch.randint(shape.vocab_size, (4, 64))
    began = time.process_time()
    model(tokens, tokens).backward()
    took_s = time.process_time() - began
    shares.append([(at - began) / took_s for _, at in seen])
print(json.dumps({"sizes": [size for size, _ in seen], "ready": [sorted(of)[2] for of in zip(*shares[2:])]}))
"""


@pytest.mark.parametrize("most_bytes", [None, COMPRESSED_BUCKET_BYTES])
@pytest.mark.parametrize(
    ("name", "vocab_size", "num_layers"), [("d4", 4096, 4), *exhaustively(("char", 512, 6), ("gpt2", 4000, 3))]
)
def test_buckets_and_ready_times_match_ddp(run_script, name, vocab_size, num_layers, most_bytes):
    done = run_script(SCRIPT, name, str(vocab_size), str(num_layers), str((most_bytes or 0) >> 20))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = bucket_sizes(gradient_tensors(preset_shape(name, vocab_size, 64, num_layers=num_layers)), most_bytes)
    assert found["sizes"] == [size for size, _ in expected]
    # Of the time of forward and backward, by FLOPs: on a CPU the head's backward is a part of forward.
    in_pass = [1 - (1 - ready) * BACKWARD_FRACTION for _, ready in expected]
    assert found["ready"] == pytest.approx(in_pass, abs=0.1)


OF_A_PROGRAM = """
import json, types
import torch, torch.distributed as dist
from torch import nn
from evener.core.run.roster import DDP, Roster
from evener.worker.sync.gradient_sync import GradientSync
from evener.worker.sync.allreduce_hook import AllReduceHook

class Backwards(nn.Module):
    '''Its forward begins with the layer that was registered last.'''
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(12))  # 4 MB each
    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = types.SimpleNamespace(world_size=1, gradient_group=dist.group.WORLD, control_group=dist.group.WORLD,
                              device=torch.device("cpu"))
clock = types.SimpleNamespace(mark=lambda: None)
roster = Roster(members=[], sync=DDP, backend="gloo")
sync = GradientSync(group, clock, lambda part: None, roster, lambda spec: AllReduceHook(group, clock))
model = Backwards()
sync.wrap(model, all_params_used=False)
sizes = []
exchange = dist.all_reduce
dist.all_reduce = lambda tensor, **kw: (len(tensor) > 100 and sizes.append(len(tensor)), exchange(tensor, **kw))[1]
sync.backward(model(torch.ones(1, 1000)).sum())
assert all(layer.weight.grad.abs().sum() > 0 for layer in model.layers)
print(json.dumps(sizes))
"""


def test_custom_program_gradients_are_bucketed_in_parameter_order(run_script):
    """1 MiB or one gradient in the first, then about 25 MiB: not all in one, which would hide nothing."""
    done = run_script(OF_A_PROGRAM)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1_000_000, 7_000_000, 4_000_000]


def test_torch_without_a_private_interface_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(DistributedDataParallel, "_remove_autograd_hooks")
    with pytest.raises(
        ImportError, match=rf"torch {re.escape(torch.__version__)} has no _remove_autograd_hooks: .* 2\.13"
    ):
        importlib.reload(torch_private)
