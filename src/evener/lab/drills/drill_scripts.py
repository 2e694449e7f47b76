"""The programs that drills run by hand: plain torch, without evener.

They end with os._exit: during a normal interpreter exit a Gloo thread that still holds a tensor aborts the process,
about one time in twenty on a busy machine, and a drill would show that instead of its fault.
"""

ALL_REDUCE = """\
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
one = torch.tensor([rank + 1.0])
dist.all_reduce(one)
print(f"rank {rank}: 1 + 2 = {one.item():.0f}", flush=True)
many = torch.ones(4_000_000)
began = time.perf_counter()
dist.all_reduce(many)
print(f"rank {rank}: 16 MB added up in {time.perf_counter() - began:.2f} s", flush=True)
dist.destroy_process_group()
os._exit(0)
"""

# Two linear models in DDP; each host reads its own settings, and those of b differ.
TRAIN_DDP = """\
import json, os, pathlib, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, home = dist.get_rank(), pathlib.Path.home()
settings = json.loads((home / "settings.json").read_text())
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, settings["width"]))
for step in range(3):
    x = torch.randn(4, 8) + settings["shift"]
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= settings["lr"] * parameter.grad
            parameter.grad = None
    print(f"rank {rank}: step {step}, loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
os._exit(0)
"""

ALLOCATE_MODEL = """\
import os, torch
import torch.distributed as dist

dist.init_process_group("gloo")
parameters = torch.ones(126_000_000)  # a model of 126M parameters, in fp32
gradients = parameters[:1000].clone()
dist.all_reduce(gradients)
print(f"rank {dist.get_rank()}: a model of {parameters.numel() * 4 // 1_000_000} MB, step 0 done", flush=True)
dist.destroy_process_group()
os._exit(0)
"""

KILL_RANK = """\
import os, signal, torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
os._exit(0)
"""

# Rank 1 breaks itself or its host at step 20 and records the time; all ranks run all-reduces.
FAULT_TEMPLATE = """\
import os, pathlib, signal, time, torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(100_000):
    if dist.get_rank() == 1 and step == 20:
        (pathlib.Path.home() / "fault").write_text(str(time.time()))
        {what}
    dist.all_reduce(torch.ones(1_000_000))
    time.sleep(0.05)
"""
STOP_RANK = FAULT_TEMPLATE.format(what="os.kill(os.getpid(), signal.SIGSTOP)")
STOP_RANK_AND_LAUNCHER = FAULT_TEMPLATE.format(
    what="[os.kill(pid, signal.SIGSTOP) for pid in (os.getppid(), os.getpid())]"
)
ALLOCATE_4_GB = FAULT_TEMPLATE.format(what="many = [torch.ones(50_000_000) for _ in range(20)]  # 4 GB")
FILL_DISK = FAULT_TEMPLATE.format(what="open('numbers', 'wb').write(bytes(600_000_000))")
KILL_SUPERVISOR = FAULT_TEMPLATE.format(
    what="os.system('pkill -STOP -f supervisor[.]py; pkill -KILL -f supervisor[.]py')"
)
LINK_DOWN = FAULT_TEMPLATE.format(what="os.system('ip link set dev eth0 down')")
DROP_FROM_PEER = FAULT_TEMPLATE.format(
    what="os.system(\"nft add table inet cut; nft add chain inet cut input '{ type filter hook input priority 0; }'; "
    'nft add rule inet cut input ip saddr 10.77.0.1 drop")'
)

WAIT_FOREVER = """\
import pathlib, time

pathlib.Path("/tmp/waiting").touch()
time.sleep(600)
"""

# Eight processes, so that none of them is the OOM killer's largest when memory runs out.
MEMORY_HOG = """\
import os, time

for _ in range(7):
    if os.fork() == 0:
        break
full = bytes([1]) * 140_000_000
time.sleep(600)
"""

DATA_LOADER = """\
import torch
from torch.utils.data import DataLoader

loader = DataLoader([torch.ones(25_000_000)] * 4, num_workers=1, batch_size=1)
for batch in loader:
    print("a batch of", batch.numel() * 4 // 1_000_000, "MB", flush=True)
"""

SAVE_CHECKPOINT = """\
import os, torch

torch.save(torch.ones(126_000_000), os.path.expanduser("~/.evener/checkpoint.pt"))  # 126M parameters
"""

BF16_MATMUL = """\
import time, torch

torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    a = torch.ones(768, 768, dtype=dtype)
    a @ a
    began = time.perf_counter()
    for _ in range(3):
        a @ a
    print(f"{dtype}: {(time.perf_counter() - began) / 3 * 1e3:.0f} ms for a product of 768 x 768", flush=True)
"""

BUSY_THREADS = """\
import os, time, torch
import torch.distributed as dist

dist.init_process_group("gloo")
a = torch.randn(192, 192)
dist.barrier()
began, products = time.perf_counter(), 0
while time.perf_counter() - began < 1.0:
    a = torch.tanh(a @ a)
    products += 1
total = torch.tensor([float(products)])
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"2 ranks x {torch.get_num_threads()} threads: {total.item():.0f} products a second", flush=True)
dist.destroy_process_group()
os._exit(0)
"""
