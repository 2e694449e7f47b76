"""Join the process group of a run, and exchange small messages outside of gradient synchronization."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

from evener.core.base.decoding import from_json
from evener.core.base.errors import EvenerError, RunError, UsageError
from evener.core.cluster.host_info import local_host_info
from evener.core.run.membership_epoch import (
    MembershipEpoch,
    Rendezvous,
    has_dynamic_membership,
    is_elastic,
    read_rendezvous,
)
from evener.core.run.peer_failure import PeersLostError
from evener.core.run.roster import Backend
from evener.node.remote.sockets import listen
from evener.worker.rank.torch_private import restart_group_names

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
STORE_TIMEOUT_S = 10.0  # timeout of connecting to the store and of its operations
SETTLE_TIMEOUT_S = 2.0
T = TypeVar("T")


class ProcessGroups:
    """The process groups of this rank, from torchrun's environment variables; without them, a group of one rank.

    Whatever backend sums gradients, ranks exchange control messages by Gloo, between host CPUs.

    With elastic membership a rank survives a regroup: it leaves its membership epoch (`leave_epoch`) and joins the next
    one that its agent announces (`join_epoch`). A rank that starts while others train is a group of one until they
    admit it.
    """

    def __init__(self, device: str) -> None:
        self.rank = int(os.environ.get("RANK", 0))  # the rank in the process group
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.has_dynamic_membership = has_dynamic_membership()
        # the newest that it joined
        self.membership_epoch: MembershipEpoch | None = read_rendezvous().epoch if self.has_dynamic_membership else None
        self.is_admitted = True  # False until the training ranks admit it
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
        self.member_ranks = list(range(self.world_size))  # Member.rank of each rank, which regroups do not change
        self.backend: Backend = "none"  # of the gradient group
        self.control_group: Any = None  # control messages and step reports
        self.gradient_group: Any = None  # gradient sums
        # with `shard_within_hosts`: this host's ranks, and those of the same number on each host
        self.host_group: Any = None
        self.replica_group: Any = None
        self._has_separate_gradient_group = False  # whether Gloo has a second group for gradients
        self._sockets_before: set[str] = set()  # before the epoch was joined
        self._epoch_sockets: set[str] | None = None  # of the epoch; None while it is being joined
        self._store_port = 0  # of the epoch's store, which rank 0 serves
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            dist.set_debug_level(dist.DebugLevel.INFO)
            if self.rank == 0:
                problem = "torch's wrapped process groups crash in the hooks that exchange gradients"
                print(f"evener: TORCH_DISTRIBUTED_DEBUG=DETAIL is taken as INFO: {problem}", file=sys.stderr)
        if is_elastic():
            meeting = read_rendezvous()
            self.is_admitted = meeting.epoch.is_cold_start and local_host_info().host in meeting.epoch.hosts
            self.rank, self.world_size = 0, 1
            if self.is_admitted:
                self.join_epoch(meeting)
            else:
                self._epoch_sockets = set()
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
                self.control_group = self.gradient_group = dist.group.WORLD
        elif self.world_size > 1:
            if self.local_world_size == self.world_size:
                loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
            dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
            self.backend = "gloo"
            self.control_group = self.gradient_group = dist.group.WORLD

    @property
    def is_writer(self) -> bool:
        """Return whether this rank writes checkpoints and the manifest."""
        return self.rank == 0 or (self.has_dynamic_membership and self.local_rank == 0)

    @property
    def member_rank(self) -> int:
        """This rank's `Member.rank`, its number in the run, which regroups do not change."""
        return self.member_ranks[self.rank]

    def join_epoch(self, rendezvous: Rendezvous) -> None:
        """Join a membership epoch; raise RuntimeError if one of its ranks does not come."""
        self.membership_epoch, self.rank = rendezvous.epoch, rendezvous.first_rank + self.local_rank
        self.world_size, self.member_ranks = rendezvous.world_size, list(range(rendezvous.world_size))
        self._sockets_before, self._epoch_sockets, self._store_port = _open_sockets(), None, rendezvous.port
        store = PrefixStore(self.membership_epoch.identity, _connect_store(rendezvous, self.rank))
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=COLLECTIVE_TIMEOUT
        )
        self.backend = "gloo"
        self.control_group = self.gradient_group = dist.group.WORLD
        if self._has_separate_gradient_group:
            self.gradient_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._epoch_sockets = _open_sockets() - self._sockets_before

    def shut_down_connections(self) -> None:
        """Shut down all connections of this epoch, so that collectives in flight fail on all ranks.

        Callable from any thread. Gloo's own abort would wait for the collectives instead. While a group is formed, Gloo
        also waits for peers to connect, which a lost one never does; see `_connect_in_place_of_peers`.
        """
        epoch_sockets = _open_sockets() - self._sockets_before if self._epoch_sockets is None else self._epoch_sockets
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") in epoch_sockets:
                    with socket.socket(fileno=os.dup(int(name))) as connection:
                        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            connection.shutdown(socket.SHUT_RDWR)
                        elif self._epoch_sockets is None and connection.getsockname()[1] != self._store_port:
                            _connect_in_place_of_peers(connection, self.world_size)

    def leave_epoch(self) -> None:
        """Destroy the process group and become a group of one; call `shut_down_connections` first."""
        if dist.is_initialized():
            dist.destroy_process_group()
        restart_group_names()  # those of ranks that could not join this epoch, and of fresh ones, are equal again
        self.rank, self.world_size, self.backend = 0, 1, "none"
        self.control_group = self.gradient_group = None

    def set_gradient_backend(self, backend: Backend, *, separate_group: bool = False) -> None:
        """Set the backend that sums gradients. NCCL always gets a separate group, Gloo only with `separate_group`.

        Pass `separate_group` if another thread sums gradients: in a common group its collectives could be matched with
        the main thread's. All ranks call this together.
        """
        if backend == "nccl":
            self.backend = backend
            self.gradient_group = dist.new_group(backend="nccl", timeout=COLLECTIVE_TIMEOUT, device_id=self.device)
        elif backend == "gloo" and separate_group:
            self._has_separate_gradient_group, self._epoch_sockets = True, None
            self.gradient_group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            self._epoch_sockets = _open_sockets() - self._sockets_before

    def shard_within_hosts(self, hosts: Sequence[str]) -> None:
        """Form a group of the ranks of each host, and one of the ranks of each number within their hosts.

        `hosts` are those of the ranks, each with the same number of ranks. All ranks call this together.
        """
        of_host = [[rank for rank, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)]
        for ranks in [*of_host, *map(list, zip(*of_host, strict=True))]:
            group = dist.new_group(ranks, backend=self.backend, timeout=COLLECTIVE_TIMEOUT)
            if self.rank in ranks and ranks in of_host:
                self.host_group = group
            elif self.rank in ranks:
                self.replica_group = group

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """All-gather bytes: return the payloads of all ranks, by rank."""
        if self.world_size == 1:
            return [payload]
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(payload)
        dist.all_reduce(sizes, group=self.control_group)
        padded = torch.zeros(1, int(sizes.max()), dtype=torch.uint8)
        padded[0, : len(payload)] = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else padded[0, :0]
        )
        rows = torch.empty(self.world_size, padded.shape[1], dtype=torch.uint8)
        dist.all_gather_single(rows, padded, group=self.control_group)
        return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def all_gather(self, value: Any, kind: type[T]) -> list[T]:
        """All-gather a value that JSON can hold; return the values of all ranks, by rank, decoded as `kind`."""
        return [from_json(text, kind) for text in self.all_gather_bytes(msgspec.json.encode(value))]

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return any(self.all_gather(flag, bool))

    def run_or_raise_on_all(self, fn: Callable[[], T]) -> T:
        """Return the result of `fn`; raise an error on all ranks if `fn` raises on any.

        A rank that exited alone could take down the store by which the others are still joining.
        """
        result, failure, message = None, None, []
        try:
            result = fn()
        except Exception as error:
            failure, message = error, [str(error), error.hint if isinstance(error, EvenerError) else ""]
        messages = self.all_gather(message, list[str])
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message:
                number = self.member_ranks[rank]
                raise RunError(f"rank {number}: {message[0]}", hint=message[1], failed_rank=number)
        return cast("T", result)

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return sums over ranks, in double precision."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total, group=self.control_group)
        return [float(value) for value in total]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            dist.barrier(group=self.control_group)

    def close(self) -> None:
        """Destroy the process group, and wait until its threads are idle.

        On a busy machine one of Gloo's threads may still be about to release a tensor. That needs the interpreter's
        lock, and an interpreter that is finalizing kills a thread that requests it:

            main thread      barrier done, destroy_process_group, Py_Finalize
            Gloo's thread    … preempted …                                    drop tensor → take lock → std::terminate
        """
        if dist.is_initialized():
            dist.destroy_process_group()
            deadline = time.monotonic() + SETTLE_TIMEOUT_S
            while _has_busy_threads() and time.monotonic() < deadline:
                time.sleep(0.005)  # releases the interpreter's lock


def _connect_store(rendezvous: Rendezvous, rank: int) -> TCPStore:
    """Connect to the epoch's store, which rank 0 serves on one address only.

    Raise PeersLostError if that address cannot be used, and RuntimeError on timeout.
    """
    address, port, listener = rendezvous.address, rendezvous.port, None
    if rank == 0:
        try:
            listener = listen(address, port)
        except OSError as error:
            raise PeersLostError(f"no store on {address}:{port}: {error.strerror}") from None
    else:
        _wait_for_store(rendezvous)
    return open_store(address, port, rendezvous.world_size, STORE_TIMEOUT_S, listener)


def open_store(address: str, port: int, world_size: int, timeout_s: float, listener: socket.socket | None) -> TCPStore:
    """Connect to the store at this address; first serve it on the listening socket, if one is given."""
    is_server, timeout = listener is not None, timedelta(seconds=timeout_s)
    fd = None if listener is None else listener.detach()
    return TCPStore(address, port, world_size, is_server, timeout, wait_for_workers=False, master_listen_fd=fd)


def _wait_for_store(rendezvous: Rendezvous) -> None:
    """Wait until the store accepts connections; torch's own wait cannot be interrupted.

    Raise PeersLostError if a newer epoch exists.
    """
    while True:
        try:
            socket.create_connection((rendezvous.address, rendezvous.port), STORE_TIMEOUT_S).close()
        except OSError:
            if read_rendezvous().epoch.number > rendezvous.epoch.number:
                raise PeersLostError("a newer membership epoch exists") from None
            time.sleep(0.02)
        else:
            return


def _connect_in_place_of_peers(listener: socket.socket, world_size: int) -> None:
    """Connect to a listening socket of Gloo's in place of each peer for which it may wait, and end the connection.

    Gloo aborts without its listening socket. A connection begins with the number of the pair for which it is, an int64;
    a process numbers its pairs from 0 (gloo/transport/tcp/listener.cc).
    """
    for number in range(world_size):
        with contextlib.suppress(OSError), socket.socket(listener.family) as peer:
            peer.settimeout(1.0)
            peer.connect(listener.getsockname())
            peer.sendall(number.to_bytes(8, sys.byteorder))


def _open_sockets() -> set[str]:
    """Return this process's sockets, by the kernel's names."""
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                sockets.add(link)
    return sockets


def _has_busy_threads() -> bool:
    """Return whether any other thread runs or waits for a CPU; always False where there is no /proc."""
    try:
        tasks = [task for task in os.listdir("/proc/self/task") if int(task) != threading.get_native_id()]
        states = [Path(f"/proc/self/task/{task}/stat").read_text().rpartition(") ")[2][0] for task in tasks]
    except OSError:  # a thread has just ended: retry
        return Path("/proc/self/task").exists()
    return "R" in states


def exit_immediately(status: int) -> NoReturn:
    """End a worker without finalizing the interpreter: no thread then needs its lock (see `ProcessGroups.close`)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
