"""How are this host's ranks started in a world, and ended?

By `evener.worker.torchrun`, once for each world. Where ranks live on it is once for all worlds that they are in, and
they find the other hosts' by themselves: they are started as they are, for torchrun would import torch before they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from evener.core.decoding import from_json
from evener.core.files import read_file, write_atomic
from evener.core.watch import Look
from evener.core.world import (
    OVER,
    PULSE_FOLDER,
    REFUSED,
    REGROUP,
    SAYINGS_FOLDER,
    WORLD_FILE,
    AgentSpec,
    Meeting,
    Saying,
    World,
)

END_S = 5.0  # for the kernel to take what was killed
TOGETHER_S = 5.0  # in which ranks that leave together have ended
# Whose children a process is the kernel lists, where it was built so; psutil reads every process of the machine.
KERNEL_LISTS = any(Path("/proc/self/task").glob("*/children"))
LETTERS = {psutil.STATUS_STOPPED: "T", psutil.STATUS_TRACING_STOP: "t", psutil.STATUS_DISK_SLEEP: "D"}


class Launched(Protocol):
    """Ranks that were started together."""

    def status(self) -> int | None:
        """Once they have ended."""

    def failures(self) -> list[dict[str, Any]]:
        """Which of them ended otherwise than well, and how, by "local_rank"; once they have."""

    def pids(self) -> dict[int, int]:
        """Of those that are there, by their numbers on this host."""

    def close(self) -> None:
        """After they were killed."""


class Ranks:
    """The ranks of this host."""

    def __init__(self, spec: AgentSpec, folder: Path, meeting: Meeting) -> None:
        """`folder`: the run's, on this host."""
        self._path, self._sayings = folder / WORLD_FILE, folder / SAYINGS_FOLDER
        self._mark, self._pulse = str(self._path), folder / PULSE_FOLDER
        shutil.rmtree(self._sayings, ignore_errors=True)
        self._sayings.mkdir(parents=True)
        self.meet(meeting)
        env = os.environ | {"EVENER_WORLD": self._mark}
        self._launched: Launched
        try:
            if spec.lives:
                env |= {"EVENER_SAYINGS": str(self._sayings), "EVENER_AGENT": str(os.getpid())}
                self._launched = Here(spec, folder, meeting, env)
            else:
                self._launched = ByTorchrun(argv(spec, folder, meeting), env)
        except OSError:  # some may have been started
            self._kill()
            raise
        self.status, self.failures = self._launched.status, self._launched.failures

    def meet(self, meeting: Meeting) -> None:
        """Tell them where they meet others from now on."""
        write_atomic(self._path, msgspec.json.encode(meeting))

    def sayings(self) -> dict[int, Saying]:
        """What they say of themselves, by their numbers on this host."""
        found = {}
        for path in self._sayings.glob("[0-9]*"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found[int(path.name)] = from_json(read_file(path), Saying)
        return found

    def looks(self) -> dict[int, Look]:
        """What each rank here does, by its number on this host: as the kernel sees it, and by its own pulse."""
        found = {}
        for local_rank, pid in self._launched.pids().items():
            with contextlib.suppress(psutil.Error):  # it has ended
                found[local_rank] = _look(psutil.Process(pid), self._pulse / str(local_rank))
        return found

    def end(self) -> None:
        """Kill them all, also those whose launcher has gone before them: what they did is no part of any world that
        follows.
        """
        self._kill()
        self._launched.close()

    def _kill(self) -> None:
        deadline = time.monotonic() + END_S
        while (found := self._processes()) and time.monotonic() < deadline:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)

    def _processes(self) -> list[psutil.Process]:
        """All that came of what was started: they have this host's world in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # a zombie, or somebody else's
                if process.environ().get("EVENER_WORLD") == self._mark:
                    found.append(process)
        return found


class ByTorchrun:
    """Started by a launcher, which ends them all when one of them fails."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        try:
            self._process = subprocess.Popen(argv, env=env | {"EVENER_FAILURES": str(write)}, pass_fds=[write])
        finally:
            os.close(write)
        self._told = os.fdopen(read, "rb", buffering=0)
        self._local_ranks: dict[int, int] = {}  # by pid; asked once, for a process that hangs may not let it be read

    def status(self) -> int | None:
        return self._process.poll()

    def failures(self) -> list[dict[str, Any]]:
        with contextlib.suppress(ValueError):
            found: list[dict[str, Any]] = json.loads(self._told.read() or b"")
            return found
        return []

    def pids(self) -> dict[int, int]:
        found = {}
        for pid in _children(self._process.pid):
            with contextlib.suppress(psutil.Error, KeyError):  # it has ended, or is no rank
                if pid not in self._local_ranks:
                    self._local_ranks[pid] = int(psutil.Process(pid).environ()["LOCAL_RANK"])
                found[self._local_ranks[pid]] = pid
        return found

    def close(self) -> None:
        self._process.wait()
        self._told.close()


class Here:
    """Started one by one. When one of them fails, all have ended: whoever is left is killed with `Ranks.end`, but ranks
    that leave together have their time for it.
    """

    def __init__(self, spec: AgentSpec, folder: Path, meeting: Meeting, env: dict[str, str]) -> None:
        num = spec.hosts[spec.host].num_ranks
        begun = folder / "host" / "ranks"
        logs = begun / f"{meeting.world.number}-{len([*begun.glob('*-*')])}" / "0"  # as torchrun has them
        self._ranks = list[subprocess.Popen[bytes]]()
        self._ended: dict[int, float] = {}  # when, by their numbers here
        for local_rank in range(num):
            world = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num}
            mine = logs / str(local_rank)
            mine.mkdir(parents=True)
            with (mine / "stdout.log").open("wb") as out, (mine / "stderr.log").open("wb") as err:
                self._ranks.append(
                    subprocess.Popen([sys.executable, *spec.program], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                     env=env | {name: str(value) for name, value in world.items()})
                )  # fmt: skip

    def status(self) -> int | None:
        now, codes = time.time(), [rank.poll() for rank in self._ranks]
        for local_rank, code in enumerate(codes):
            if code is not None:
                self._ended.setdefault(local_rank, now)
        failed = {code for code in codes if code}
        if None not in codes:
            return 1 if failed else 0
        if failed and (failed - {REGROUP, REFUSED, OVER} or now - min(self._ended.values()) > TOGETHER_S):
            return 1
        return None

    def failures(self) -> list[dict[str, Any]]:
        ended = [(at, local_rank, self._ranks[local_rank]) for local_rank, at in self._ended.items()]
        return [{"local_rank": local_rank, "pid": rank.pid, "exitcode": rank.returncode, "time": at}
                for at, local_rank, rank in sorted(ended, key=lambda one: one[:2]) if rank.returncode]  # fmt: skip

    def pids(self) -> dict[int, int]:
        return {local_rank: rank.pid for local_rank, rank in enumerate(self._ranks) if rank.poll() is None}

    def close(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk, and hears no signal
                rank.wait(END_S)


def first_rank_of(spec: AgentSpec) -> int:
    """The number of this host's first rank, whatever its place in a world."""
    hosts = [*spec.hosts]
    return sum(spec.hosts[host].num_ranks for host in hosts[: hosts.index(spec.host)])


def _look(process: psutil.Process, pulse: Path) -> Look:
    told = {}
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        told = from_json(read_file(pulse), dict[str, Any])
    told = told if told.get("pid") == process.pid else {}
    cpu_s = sum(_cpu_s(one) for one in _family(process.pid))
    state = LETTERS.get(process.status(), "S")
    return Look(pid=process.pid, state=state, cpu_s=cpu_s, where=told.get("where", ""), waits=told.get("waits", False),
                moved=told.get("moved"))  # fmt: skip


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(psutil.Error):  # it has ended
        user, system, childrens_user, childrens_system, *_ = psutil.Process(pid).cpu_times()
        return float(user + system + childrens_user + childrens_system)
    return 0.0


def _family(pid: int) -> list[int]:
    """It, and all that came of it."""
    if KERNEL_LISTS:
        return [pid, *(one for child in _children(pid) for one in _family(child))]
    with contextlib.suppress(psutil.Error):
        return [pid, *(one.pid for one in psutil.Process(pid).children(recursive=True))]
    return [pid]


def _children(pid: int) -> list[int]:
    if not KERNEL_LISTS:
        with contextlib.suppress(psutil.Error):
            return [one.pid for one in psutil.Process(pid).children()]
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found += map(int, path.read_text().split())
    return found


def meeting_of(spec: AgentSpec, world: World, store: int) -> Meeting:
    """Of this host's ranks in a world whose store is on this port of the first host."""
    nums = [spec.hosts[host].num_ranks for host in world.hosts]
    return Meeting(world=world, address=spec.hosts[world.hosts[0]].address, port=store,
                   first_rank=sum(nums[: world.hosts.index(spec.host)]), world_size=sum(nums))  # fmt: skip


def argv(spec: AgentSpec, folder: Path, meeting: Meeting) -> list[str]:
    """The command of this host's launcher."""
    place, world = spec.hosts[spec.host], meeting.world
    address = f"[{meeting.address}]" if ":" in meeting.address else meeting.address
    return [
        sys.executable, "-P", "-m", "evener.worker.torchrun",
        f"--nnodes={len(world.hosts)}",
        f"--nproc-per-node={place.num_ranks}",
        "--rdzv-backend=evener",
        f"--rdzv-endpoint={address}:{meeting.port}",
        f"--rdzv-conf=rank={world.hosts.index(spec.host)}",
        f"--rdzv-id={spec.run}-{world.number}",
        f"--local-addr={place.address}",
        "--max-restarts=0", "--monitor-interval=0.1", "--shutdown-timeout=5", "--redirects=3",
        f"--log-dir={folder}/host/ranks",
        *(["-m", "--", *spec.program[1:]] if spec.program[0] == "-m" else ["--", *spec.program]),
    ]  # fmt: skip


def free_port(address: str) -> int:
    """For the store of a world, on its first host."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port
