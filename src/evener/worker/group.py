"""How do the processes of a run find each other, and exchange a few bytes outside the training itself?"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from evener.core.decoding import from_json
from evener.core.errors import EvenerError, RunError, UsageError
from evener.core.roster import Backend
from evener.core.world import told_world

TIMEOUT = timedelta(minutes=10)
SETTLE_S = 2.0
T = TypeVar("T")


class Group:
    """This process's place in the world that torchrun describes in the environment; started bare, a world of one.

    Whatever moves the gradients, the ranks talk with each other by Gloo, between their hosts' processors.
    """

    def __init__(self, device: str) -> None:
        self.rank = int(os.environ.get("RANK", 0))  # the place among those who take part
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.is_in_world = told_world() is not None  # hosts come and go
        self.keeps = self.rank == 0 or (self.is_in_world and self.local_rank == 0)  # it writes what outlives the run
        num_gpus = torch.cuda.device_count() if device != "cpu" else 0
        if device == "cuda" and num_gpus == 0:
            raise UsageError(
                f"{self.local_world_size} ranks asked for GPUs, this machine has none",
                hint="--device cpu trains on the processor",
            )
        use_gpu = device == "cuda" or num_gpus >= self.local_world_size
        self.device = torch.device("cuda", self.local_rank % num_gpus) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(self.device)
        self.numbers = list(range(self.world_size))  # of the ranks, by place: see Member.rank
        self.backend: Backend = "none"  # of what moves gradients
        self.control: Any = None  # moves news
        self.gradients: Any = None  # moves gradients
        if self.world_size > 1:
            if self.local_world_size == self.world_size:
                loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
            dist.init_process_group("gloo", timeout=TIMEOUT)
            self.backend = "gloo"
            self.control = self.gradients = dist.group.WORLD

    @property
    def number(self) -> int:
        """This rank's."""
        return self.numbers[self.rank]

    def move_gradients_by(self, backend: Backend, *, apart: bool = False) -> None:
        """Gloo does already; NCCL has a group of its own, and so has Gloo where they move `apart` from the news.

        Then another thread moves them: on one group its collectives would meet the wrong ones. All ranks call this
        together.
        """
        if backend == "nccl":
            self.backend = backend
            self.gradients = dist.new_group(backend="nccl", timeout=TIMEOUT, device_id=self.device)
        elif backend == "gloo" and apart:
            self.gradients = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def gather(self, mine: bytes) -> list[bytes]:
        """Everyone's bytes by rank, on every rank."""
        if self.world_size == 1:
            return [mine]
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        dist.all_reduce(sizes, group=self.control)
        padded = torch.zeros(1, int(sizes.max()), dtype=torch.uint8)
        padded[0, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else padded[0, :0]
        everyone = torch.empty(self.world_size, padded.shape[1], dtype=torch.uint8)
        dist.all_gather_single(everyone, padded, group=self.control)
        return [bytes(row[:size].tolist()) for row, size in zip(everyone, sizes.tolist(), strict=True)]

    def all_or_none(self, begin: Callable[[], T]) -> T:
        """What `begin` returns here; an error on all ranks where one's raises any.

        A rank that left alone would take from the others what they are still joining by.
        """
        mine, refusal, told = None, None, []
        try:
            mine = begin()
        except Exception as error:
            refusal, told = error, [str(error), error.hint if isinstance(error, EvenerError) else ""]
        everyone = self.gather(msgspec.json.encode(told))
        if refusal is not None:
            raise refusal
        for rank, told in enumerate(from_json(text, list[str]) for text in everyone):
            if told:
                number = self.numbers[rank]
                raise RunError(f"rank {number}: {told[0]}", hint=told[1], of_rank=number)
        return cast("T", mine)

    def sum(self, *values: float) -> list[float]:
        """Sums over ranks, in double precision."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total, group=self.control)
        return [float(value) for value in total]

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.world_size > 1:
            dist.barrier(group=self.control)

    def close(self) -> None:
        """Leave the world, and wait until the threads that served it have nothing left to do.

        On a busy machine one of Gloo's threads may still be about to let go of a tensor. That needs the interpreter's
        lock, and an interpreter that is ending kills a thread that asks for it:

            main thread      barrier done, destroy_process_group, Py_Finalize
            Gloo's thread    … preempted …                                    drop tensor → take lock → std::terminate
        """
        if dist.is_initialized():
            dist.destroy_process_group()
            deadline = time.monotonic() + SETTLE_S
            while _other_threads_run() and time.monotonic() < deadline:
                time.sleep(0.005)  # without the lock


def _other_threads_run() -> bool:
    """Does any thread but this one run or wait for a processor? Linux says; elsewhere nobody knows."""
    try:
        tasks = [task for task in os.listdir("/proc/self/task") if int(task) != threading.get_native_id()]
        states = [Path(f"/proc/self/task/{task}/stat").read_text().rpartition(") ")[2][0] for task in tasks]
    except OSError:  # a thread has just ended: look again
        return Path("/proc/self/task").exists()
    return "R" in states


def leave(status: int) -> NoReturn:
    """End a worker without taking the interpreter apart: no thread then asks for what is gone (see `Group.close`)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
