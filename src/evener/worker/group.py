"""How do the processes of a run find each other, and exchange a few bytes outside the training itself?"""

from __future__ import annotations

import contextlib
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
from torch.distributed import HashStore, PrefixStore, TCPStore

from evener.core.decoding import from_json
from evener.core.errors import EvenerError, RunError, UsageError
from evener.core.machine import this_machine
from evener.core.roster import Backend
from evener.core.world import Meeting, World, hosts_come_and_go, ranks_live_on, told_meeting

TIMEOUT = timedelta(minutes=10)
STORE_S = 10.0  # for a store that is there to answer
SETTLE_S = 2.0
T = TypeVar("T")


class Group:
    """This process's place in the world that torchrun describes in the environment; started bare, a world of one.

    Whatever moves the gradients, the ranks talk with each other by Gloo, between their hosts' processors.

    Where ranks live on, their agents tell them the world and the next one: `leave_world`, `enter`. A rank that is
    started while others train is a world of one until these let it in.
    """

    def __init__(self, device: str) -> None:
        self.rank = int(os.environ.get("RANK", 0))  # the place among those who take part
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.is_in_world = hosts_come_and_go()
        self.world: World | None = told_meeting().world if self.is_in_world else None  # the newest that it was in
        self.is_let_in = True  # or shall be, where others train already
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
        self._is_apart = False  # do gradients move apart from the news?
        self._sockets_before: set[str] = set()  # the world was entered
        self._sockets: set[str] | None = None  # of the world; None while it is entered
        if ranks_live_on():
            meeting = told_meeting()
            self.is_let_in = meeting.world.is_fresh and this_machine().host in meeting.world.hosts
            self.rank, self.world_size = 0, 1
            if self.is_let_in:
                self.enter(meeting)
            else:
                self._sockets = set()
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
                self.control = self.gradients = dist.group.WORLD
        elif self.world_size > 1:
            if self.local_world_size == self.world_size:
                loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
            dist.init_process_group("gloo", timeout=TIMEOUT)
            self.backend = "gloo"
            self.control = self.gradients = dist.group.WORLD

    @property
    def keeps(self) -> bool:
        """Does this rank write what outlives the run?"""
        return self.rank == 0 or (self.is_in_world and self.local_rank == 0)

    @property
    def number(self) -> int:
        """This rank's."""
        return self.numbers[self.rank]

    def enter(self, meeting: Meeting) -> None:
        """Be in a world with others; RuntimeError where one of them does not come."""
        self.world, self.rank = meeting.world, meeting.first_rank + self.local_rank
        self.world_size, self.numbers = meeting.world_size, list(range(meeting.world_size))
        self._sockets_before, self._sockets = _sockets(), None
        store = PrefixStore(str(self.world.number), _store(meeting, self.rank))
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT)
        self.backend = "gloo"
        self.control = self.gradients = dist.group.WORLD
        if self._is_apart:
            self.gradients = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._sockets = _sockets() - self._sockets_before

    def shut(self) -> None:
        """From any thread: nobody waits for anything in this world any more. Gloo's own abort waits itself."""
        ours = _sockets() - self._sockets_before if self._sockets is None else self._sockets
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") in ours:
                    with socket.socket(fileno=os.dup(int(name))) as one:
                        if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # Gloo aborts without its own
                            one.shutdown(socket.SHUT_RDWR)

    def leave_world(self) -> None:
        """Be a world of one, once nothing is under way (`shut`)."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.rank, self.world_size, self.backend = 0, 1, "none"
        self.control = self.gradients = None

    def move_gradients_by(self, backend: Backend, *, apart: bool = False) -> None:
        """Gloo does already; NCCL has a group of its own, and so has Gloo where they move `apart` from the news.

        Then another thread moves them: on one group its collectives would meet the wrong ones. All ranks call this
        together.
        """
        if backend == "nccl":
            self.backend = backend
            self.gradients = dist.new_group(backend="nccl", timeout=TIMEOUT, device_id=self.device)
        elif backend == "gloo" and apart:
            self._is_apart, self._sockets = True, None
            self.gradients = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self._sockets = _sockets() - self._sockets_before

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


def _store(meeting: Meeting, rank: int) -> TCPStore:
    """The world's, which its first rank has, on one address alone; RuntimeError where it is not there in time."""
    timeout, listener = timedelta(seconds=STORE_S), None
    if rank == 0:
        listener = socket.socket(socket.AF_INET6 if ":" in meeting.address else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((meeting.address, meeting.port))
        except OSError as error:
            listener.close()
            raise RuntimeError(f"TCPStore failed: {meeting.address}:{meeting.port}: {error.strerror}") from None
        listener.listen(1024)
    else:
        _await_store(meeting)
    fd = None if listener is None else listener.detach()
    return TCPStore(meeting.address, meeting.port, meeting.world_size, rank == 0, timeout, wait_for_workers=False,
                    master_listen_fd=fd)  # fmt: skip


def _await_store(meeting: Meeting) -> None:
    """Until it answers, for torch's own waiting can't be ended; RuntimeError where there is another world before."""
    while True:
        try:
            socket.create_connection((meeting.address, meeting.port), STORE_S).close()
        except OSError:
            if told_meeting().world.number > meeting.world.number:
                raise RuntimeError("TCPStore failed: its world is no more") from None
            time.sleep(0.02)
        else:
            return


def _sockets() -> set[str]:
    """This process's, by what the kernel calls them."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found.add(link)
    return found


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
