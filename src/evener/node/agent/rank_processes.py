"""Start, monitor and kill this host's ranks.

By default `evener.worker.torchrun` starts the ranks, once per epoch. In an elastic run they are plain processes,
which start once and rendezvous anew in each epoch: torchrun would delay their start, as it imports torch first. The
store of an epoch is then in its first rank, and this process keeps the tunnel to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec

from evener.core.base.decoding import from_builtins, from_json
from evener.core.base.file_io import create_file, read_file, write_atomic
from evener.core.run.hang_detector import ProcessSample
from evener.core.run.membership_epoch import (
    EXIT_HOST_NOT_RETRYABLE,
    EXIT_REGROUP,
    EXIT_RUN_FAILED,
    HEARTBEAT_FOLDER,
    RANK_STATUS_FOLDER,
    RENDEZVOUS_FILE,
    RUN_KEY_FILE,
    AgentSpec,
    MembershipEpoch,
    RankStatus,
    Rendezvous,
    read_run_key,
    torchrun_program,
)
from evener.node.agent.store_tunnel import LOOPBACK, StoreGate, StoreProxy
from evener.node.remote import process_table
from evener.node.remote.sockets import free_port, listen

REAP_TIMEOUT_S = 5.0  # for the kernel to remove a killed process
GROUP_EXIT_S = 5.0  # from the first exit of ranks that leave together until all of them must have exited


class LaunchedRanks(Protocol):
    """Ranks that were started together."""

    def poll(self) -> int | None:
        """Return the exit status of the group, or None while it runs."""

    def failures(self) -> list[dict[str, Any]]:
        """Return the ranks that failed, by "local_rank", and how; call it once the group has exited."""

    def pids(self) -> dict[int, int]:
        """Return {local rank: pid} of the ranks that are alive."""

    def reap(self) -> None:
        """Reap the processes after they were killed."""


class RankProcesses:
    """The ranks of this host."""

    def __init__(self, spec: AgentSpec, folder: Path, rendezvous: Rendezvous) -> None:
        """Start the ranks; `folder` is the run's folder on this host."""
        self._rendezvous_path, self._status_folder = folder / RENDEZVOUS_FILE, folder / RANK_STATUS_FOLDER
        self._env_marker, self._heartbeat_folder = str(self._rendezvous_path), folder / HEARTBEAT_FOLDER
        self._spec, key_path = spec, folder / RUN_KEY_FILE
        self._key = read_run_key(key_path) if spec.is_elastic else b""  # a launcher reads it itself
        self._tunnel: StoreGate | StoreProxy | None = None  # of the epoch's store, in an elastic run
        shutil.rmtree(self._status_folder, ignore_errors=True)
        self._status_folder.mkdir(parents=True)
        env = os.environ | {"EVENER_WORLD": self._env_marker, "EVENER_KEY_FILE": str(key_path)}
        self._launched: LaunchedRanks
        try:
            self.set_rendezvous(rendezvous)
            if spec.is_elastic:
                env |= {"EVENER_SAYINGS": str(self._status_folder), "EVENER_AGENT": str(os.getpid())}
                self._launched = SubprocessRanks(spec, folder, rendezvous, env)
            else:
                self._launched = TorchrunRanks(torchrun_argv(spec, folder, rendezvous), env)
        except OSError:  # some may already run
            self._kill_processes()
            self._close_tunnel()
            raise
        self.poll, self.failures = self._launched.poll, self._launched.failures

    def set_rendezvous(self, rendezvous: Rendezvous) -> None:
        """Write the rendezvous that the ranks use from now on. In an elastic run it is at their end of the tunnel."""
        if self._spec.is_elastic:
            self._close_tunnel()
            rendezvous = msgspec.structs.replace(rendezvous, address=LOOPBACK, port=self._open_tunnel(rendezvous))
        write_atomic(self._rendezvous_path, msgspec.json.encode(rendezvous))

    def _open_tunnel(self, rendezvous: Rendezvous) -> int:
        """Open the tunnel to the store at this rendezvous; return the port of 127.0.0.1 that the ranks use."""
        hosts, run_id = rendezvous.epoch.hosts, f"{self._spec.run}-{rendezvous.epoch.identity}"
        if not rendezvous.port:  # standby ranks: no store yet
            return 0
        if hosts[0] != self._spec.host:
            self._tunnel = StoreProxy((rendezvous.address, rendezvous.port), self._key, run_id)
            return self._tunnel.port
        store_port = free_port(LOOPBACK)
        if len(hosts) > 1:
            listener = listen(rendezvous.address, rendezvous.port)
            self._tunnel = StoreGate(listener, self._key, run_id, store_port)
        return store_port

    def _close_tunnel(self) -> None:
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None

    def rank_statuses(self) -> dict[int, RankStatus]:
        """Return the status that each rank reports, by local rank."""
        statuses = {}
        for path in self._status_folder.glob("[0-9]*"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                statuses[int(path.name)] = from_json(read_file(path), RankStatus)
        return statuses

    def sample_processes(self) -> dict[int, ProcessSample]:
        """Return a sample of each rank's process, by local rank: the kernel's figures and its heartbeat file."""
        samples = {}
        for local_rank, pid in self._launched.pids().items():
            with contextlib.suppress(OSError, LookupError, msgspec.MsgspecError):  # it has exited
                sample = process_table.sample_rank(pid, str(self._heartbeat_folder / str(local_rank)))
                samples[local_rank] = from_builtins(sample, ProcessSample)
        return samples

    def kill(self) -> None:
        """Kill all ranks, also those that outlived their launcher: none may act in a later epoch."""
        self._kill_processes()
        self._launched.reap()
        self._close_tunnel()

    def _kill_processes(self) -> None:
        """Kill all descendants of what was started, recognized by EVENER_WORLD in their environment."""
        process_table.kill_processes_with(f"EVENER_WORLD={self._env_marker}")


class TorchrunRanks:
    """Ranks started by torchrun, which ends them all when one fails."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        try:
            self._process = subprocess.Popen(argv, env=env | {"EVENER_FAILURES": str(write)}, pass_fds=[write])
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self._failures_pipe = os.fdopen(read, "rb", buffering=0)

    def poll(self) -> int | None:
        return self._process.poll()

    def failures(self) -> list[dict[str, Any]]:
        with contextlib.suppress(ValueError):
            failures: list[dict[str, Any]] = json.loads(self._failures_pipe.read() or b"")
            return failures
        return []

    def pids(self) -> dict[int, int]:
        pids = {}
        for pid in process_table.children(self._process.pid):
            with contextlib.suppress(OSError, LookupError):  # it has exited, or is no rank
                pids[process_table.local_rank(pid)] = pid
        return pids

    def reap(self) -> None:
        self._process.wait()
        self._failures_pipe.close()


class SubprocessRanks:
    """Ranks started one by one, each as a plain process.

    The group counts as exited as soon as one rank fails, and `RankProcesses.kill` ends the rest. After an exit code on
    which all ranks leave (`EXIT_REGROUP`, for example), the others have `GROUP_EXIT_S` to exit, too.
    """

    def __init__(self, spec: AgentSpec, folder: Path, rendezvous: Rendezvous, env: dict[str, str]) -> None:
        num = spec.hosts[spec.host].num_ranks
        ranks_folder = folder / "host" / "ranks"
        # the folders that torchrun would make
        logs = ranks_folder / f"{rendezvous.epoch.number}-{len([*ranks_folder.glob('*-*')])}" / "0"
        self._processes = list[subprocess.Popen[bytes]]()
        self._ended_at: dict[int, float] = {}  # when, by local rank
        for local_rank in range(num):
            rank_env = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num}
            rank_folder = logs / str(local_rank)
            rank_folder.mkdir(parents=True)
            with create_file(rank_folder / "stdout.log") as out, create_file(rank_folder / "stderr.log") as err:
                self._processes.append(
                    subprocess.Popen([sys.executable, *spec.program], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                     env=env | {name: str(value) for name, value in rank_env.items()})
                )  # fmt: skip

    def poll(self) -> int | None:
        now, codes = time.time(), [rank.poll() for rank in self._processes]
        for local_rank, code in enumerate(codes):
            if code is not None:
                self._ended_at.setdefault(local_rank, now)
        failed = {code for code in codes if code}
        if None not in codes:
            return 1 if failed else 0
        if failed and (
            failed - {EXIT_REGROUP, EXIT_HOST_NOT_RETRYABLE, EXIT_RUN_FAILED}
            or now - min(self._ended_at.values()) > GROUP_EXIT_S
        ):
            return 1
        return None

    def failures(self) -> list[dict[str, Any]]:
        ended = [(at, local_rank, self._processes[local_rank]) for local_rank, at in self._ended_at.items()]
        return [{"local_rank": local_rank, "pid": rank.pid, "exitcode": rank.returncode, "time": at}
                for at, local_rank, rank in sorted(ended, key=lambda one: one[:2]) if rank.returncode]  # fmt: skip

    def pids(self) -> dict[int, int]:
        return {local_rank: rank.pid for local_rank, rank in enumerate(self._processes) if rank.poll() is None}

    def reap(self) -> None:
        for rank in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk, and no signal reaches it
                rank.wait(REAP_TIMEOUT_S)


def first_rank_of(spec: AgentSpec) -> int:
    """Return the number that this host's first rank has in the run; its global rank can differ in each epoch."""
    hosts = [*spec.hosts]
    return sum(spec.hosts[host].num_ranks for host in hosts[: hosts.index(spec.host)])


def make_rendezvous(spec: AgentSpec, epoch: MembershipEpoch, store_port: int) -> Rendezvous:
    """Return the rendezvous of this host's ranks in an epoch whose store is on this port of the first host."""
    nums = [spec.hosts[host].num_ranks for host in epoch.hosts]
    return Rendezvous(epoch=epoch, address=spec.hosts[epoch.hosts[0]].address, port=store_port,
                   first_rank=sum(nums[: epoch.hosts.index(spec.host)]), world_size=sum(nums))  # fmt: skip


def torchrun_argv(spec: AgentSpec, folder: Path, rendezvous: Rendezvous) -> list[str]:
    """Return the command that starts this host's ranks with torchrun."""
    member, epoch = spec.hosts[spec.host], rendezvous.epoch
    address = f"[{rendezvous.address}]" if ":" in rendezvous.address else rendezvous.address
    return [
        sys.executable, "-P", "-m", "evener.worker.torchrun",
        f"--nnodes={len(epoch.hosts)}",
        f"--nproc-per-node={member.num_ranks}",
        "--rdzv-backend=evener",
        f"--rdzv-endpoint={address}:{rendezvous.port}",
        f"--rdzv-conf=rank={epoch.hosts.index(spec.host)}",
        f"--rdzv-id={spec.run}-{epoch.identity}",
        f"--local-addr={member.address}",
        "--max-restarts=0", "--monitor-interval=0.1", "--shutdown-timeout=5", "--redirects=3",
        f"--log-dir={folder}/host/ranks",
        *torchrun_program(spec.program_in(epoch)),
    ]  # fmt: skip
