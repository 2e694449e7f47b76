"""The smallest program on several machines: every rank says where it is, and all of them add up their numbers.

evener launch -- examples/all_reduce.py
"""

import os
import platform

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
number = torch.tensor([float(rank)], device=device)
dist.all_reduce(number)
print(f"I am rank {rank} of {world_size} on {platform.node()}; the ranks add up to {int(number)}")
dist.destroy_process_group()
