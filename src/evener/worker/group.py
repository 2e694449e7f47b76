"""Join the process group of a run, and exchange small messages outside of gradient synchronization."""

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
STORE_S = 10.0  # timeout of connecting to the store and of its operations
SETTLE_S = 2.0
T = TypeVar("T")


class Group:
    """This process's place in the process group of torchrun's environment; without one, a group of one rank.

    Whatever backend sums gradients, ranks exchange control messages by Gloo, between host CPUs.

    Where ranks survive a regroup, their agents give them the current membership epoch and the next one: `leave_epoch`,
    `join_epoch`. A rank that starts while others train is alone until they admit it.
    """

    def __init__(self, device: str) -> None:
        self.rank = int(os.environ.get("RANK", 0))  # the rank in the process group
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.is_in_world = hosts_come_and_go()
        self.world: World | None = told_meeting().world if self.is_in_world else None  # the newest that it joined
        self.is_let_in = True  # False until the training ranks admit it
        num_gpus = torch.cuda.device_count() if device != "cpu" else 0
        if device == "cuda" and num_gpus == 0:
            raise UsageError(
                f"{self.local_world_size} ranks asked for GPUs, this machine has none",
                hint="--device cpu trains on the CPU",
            )
        use_gpu = device == "cuda" or num_gpus >= self.local_world_size
        self.device = torch.device("cuda", self.local_rank % num_gpus) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(self.device)
        self.numbers = list(range(self.world_size))  # lasting numbers of the ranks, by rank: see Member.rank
        self.backend: Backend = "none"  # of the gradient group
        self.control: Any = None  # control messages and step reports
        self.gradients: Any = None  # gradient sums
        self._is_apart = False  # whether Gloo has a second group for gradients
        self._sockets_before: set[str] = set()  # before the epoch was joined
        self._sockets: set[str] | None = None  # of the epoch; None while it is being joined
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
        """Whether this rank writes checkpoints and the manifest."""
        return self.rank == 0 or (self.is_in_world and self.local_rank == 0)

    @property
    def number(self) -> int:
        """This rank's lasting number: see Member.rank."""
        return self.numbers[self.rank]

    def enter(self, meeting: Meeting) -> None:
        """Join a membership epoch; raise RuntimeError if one of its ranks does not come."""
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
        """Shut down all connections of this epoch, so that no rank waits; callable from any thread. An abort by Gloo
        would wait.
        """
        epoch_sockets = _sockets() - self._sockets_before if self._sockets is None else self._sockets
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") in epoch_sockets:
                    with socket.socket(fileno=os.dup(int(name))) as connection:
                        # Gloo aborts without its listening socket.
                        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            connection.shutdown(socket.SHUT_RDWR)

    def leave_world(self) -> None:
        """Destroy the process group and be alone, once nothing is in flight (`shut_down_connections`)."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.rank, self.world_size, self.backend = 0, 1, "none"
        self.control = self.gradients = None

    def move_gradients_by(self, backend: Backend, *, apart: bool = False) -> None:
        """Set the backend that sums gradients. NCCL gets a group of its own, and so does Gloo if `separate_group`.

        With a separate group another thread sums gradients: on one group its collectives would meet the wrong ones. All
        ranks call this together.
        """
        if backend == "nccl":
            self.backend = backend
            self.gradients = dist.new_group(backend="nccl", timeout=TIMEOUT, device_id=self.device)
        elif backend == "gloo" and apart:
            self._is_apart, self._sockets = True, None
            self.gradients = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self._sockets = _sockets() - self._sockets_before

    def gather(self, mine: bytes) -> list[bytes]:
        """All-gather bytes: return the payloads of all ranks, by rank."""
        if self.world_size == 1:
            return [mine]
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        dist.all_reduce(sizes, group=self.control)
        padded = torch.zeros(1, int(sizes.max()), dtype=torch.uint8)
        padded[0, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else padded[0, :0]
        rows = torch.empty(self.world_size, padded.shape[1], dtype=torch.uint8)
        dist.all_gather_single(rows, padded, group=self.control)
        return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def all_or_none(self, begin: Callable[[], T]) -> T:
        """Return the result of `fn`; raise an error on all ranks if `fn` raises on any.

        A rank that exited alone could take down the store by which the others are still joining.
        """
        result, failure, message = None, None, []
        try:
            result = begin()
        except Exception as error:
            failure, message = error, [str(error), error.hint if isinstance(error, EvenerError) else ""]
        messages = self.gather(msgspec.json.encode(message))
        if failure is not None:
            raise failure
        for rank, message in enumerate(from_json(text, list[str]) for text in messages):
            if message:
                number = self.numbers[rank]
                raise RunError(f"rank {number}: {message[0]}", hint=message[1], of_rank=number)
        return cast("T", result)

    def sum(self, *values: float) -> list[float]:
        """Return sums over ranks, in double precision."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total, group=self.control)
        return [float(value) for value in total]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            dist.barrier(group=self.control)

    def close(self) -> None:
        """Destroy the process group, and wait until its threads are idle.

        On a busy machine one of Gloo's threads may still be about to release a tensor. That needs the interpreter's
        lock, and an interpreter that is finalizing kills a thread that requests it:

            main thread      barrier done, destroy_process_group, Py_Finalize
            Gloo's thread    … preempted …                                    drop tensor → take lock → std::terminate
        """
        if dist.is_initialized():
            dist.destroy_process_group()
            deadline = time.monotonic() + SETTLE_S
            while _other_threads_run() and time.monotonic() < deadline:
                time.sleep(0.005)  # releases the interpreter's lock


def _store(meeting: Meeting, rank: int) -> TCPStore:
    """Connect to the epoch's store, which rank 0 serves on one address only; raise RuntimeError on timeout."""
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
    """Wait until the store accepts connections; torch's own wait cannot be ended.

    Raise RuntimeError if a newer epoch exists.
    """
    while True:
        try:
            socket.create_connection((meeting.address, meeting.port), STORE_S).close()
        except OSError:
            if told_meeting().world.number > meeting.world.number:
                raise RuntimeError("TCPStore failed: a newer membership epoch exists") from None
            time.sleep(0.02)
        else:
            return


def _sockets() -> set[str]:
    """Return this process's sockets, by the kernel's names."""
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                sockets.add(link)
    return sockets


def _other_threads_run() -> bool:
    """Return whether any other thread runs or waits for a CPU; always False where there is no /proc."""
    try:
        tasks = [task for task in os.listdir("/proc/self/task") if int(task) != threading.get_native_id()]
        states = [Path(f"/proc/self/task/{task}/stat").read_text().rpartition(") ")[2][0] for task in tasks]
    except OSError:  # a thread has just ended: retry
        return Path("/proc/self/task").exists()
    return "R" in states


def leave(status: int) -> NoReturn:
    """End a worker without finalizing the interpreter: no thread then needs its lock (see `ProcessGroups.close`)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
