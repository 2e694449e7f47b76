"""How are this host's ranks started in a world, and ended? By `evener.worker.torchrun`, once for each world.

Where ranks live on it is once for all worlds that they are in; it then starts this host's alone, and they find the
others' by themselves.
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
from typing import Any

import msgspec
import psutil

from evener.core.decoding import from_json
from evener.core.files import write_atomic
from evener.core.watch import Look
from evener.core.world import PULSE_FOLDER, SAYINGS_FOLDER, WORLD_FILE, AgentSpec, Meeting, Saying, World

END_S = 5.0  # for the kernel to take what was killed
LETTERS = {psutil.STATUS_STOPPED: "T", psutil.STATUS_TRACING_STOP: "t", psutil.STATUS_DISK_SLEEP: "D"}


class Ranks:
    """The ranks of this host."""

    def __init__(self, spec: AgentSpec, meeting: Meeting) -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._path, self._sayings = Path(spec.folder, WORLD_FILE), Path(spec.folder, SAYINGS_FOLDER)
        self._mark = str(self._path)
        shutil.rmtree(self._sayings, ignore_errors=True)
        self._sayings.mkdir(parents=True)
        self.meet(meeting)
        env = os.environ | {"EVENER_FAILURES": str(write), "EVENER_WORLD": self._mark}
        if spec.lives:
            env["EVENER_SAYINGS"] = str(self._sayings)
        try:
            self._process = subprocess.Popen(argv(spec, meeting), env=env, pass_fds=[write])
        finally:
            os.close(write)
        self._told = os.fdopen(read, "rb", buffering=0)
        self._pulse = Path(spec.folder, PULSE_FOLDER)
        self._local_ranks: dict[int, int] = {}  # by pid; asked once, for a process that hangs may not let it be read

    def meet(self, meeting: Meeting) -> None:
        """Tell them where they meet others from now on."""
        write_atomic(self._path, msgspec.json.encode(meeting))

    def sayings(self) -> dict[int, Saying]:
        """What they say of themselves, by their numbers on this host."""
        found = {}
        for path in self._sayings.glob("[0-9]*"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found[int(path.name)] = from_json(path.read_bytes(), Saying)
        return found

    def status(self) -> int | None:
        """Of torchrun, once it has ended."""
        return self._process.poll()

    def failures(self) -> list[dict[str, Any]]:
        """Which ranks ended, and how; once torchrun has."""
        with contextlib.suppress(ValueError):
            found: list[dict[str, Any]] = json.loads(self._told.read() or b"")
            return found
        return []

    def looks(self) -> dict[int, Look]:
        """What each rank here does, by its number on this host: as the kernel sees it, and by its own pulse."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children():
                with contextlib.suppress(psutil.Error, KeyError):  # it has ended, or is no rank
                    if process.pid not in self._local_ranks:
                        self._local_ranks[process.pid] = int(process.environ()["LOCAL_RANK"])
                    local_rank = self._local_ranks[process.pid]
                    found[local_rank] = _look(process, self._pulse / str(local_rank))
        return found

    def end(self) -> None:
        """Kill them all, also those whose launcher has gone before them: what they did is no part of any world that
        follows.
        """
        deadline = time.monotonic() + END_S
        while (found := self._processes()) and time.monotonic() < deadline:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)
        self._process.wait()
        self._told.close()

    def _processes(self) -> list[psutil.Process]:
        """All that came of the launcher: they have this host's world in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # a zombie, or somebody else's
                if process.environ().get("EVENER_WORLD") == self._mark:
                    found.append(process)
        return found


def _look(process: psutil.Process, pulse: Path) -> Look:
    told = {}
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        told = from_json(pulse.read_bytes(), dict[str, Any])
    told = told if told.get("pid") == process.pid else {}
    cpu_s = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            cpu_s += sum(one.cpu_times()[:4])
    state = LETTERS.get(process.status(), "S")
    return Look(pid=process.pid, state=state, cpu_s=cpu_s, where=told.get("where", ""), waits=told.get("waits", False))


def meeting_of(spec: AgentSpec, world: World, store: int) -> Meeting:
    """Of this host's ranks in a world whose store is on this port of the first host."""
    nums = [spec.hosts[host].num_ranks for host in world.hosts]
    return Meeting(world=world, address=spec.hosts[world.hosts[0]].address, port=store,
                   first_rank=sum(nums[: world.hosts.index(spec.host)]), world_size=sum(nums))  # fmt: skip


def argv(spec: AgentSpec, meeting: Meeting) -> list[str]:
    """The command of this host's launcher. Where ranks live on, it knows of no other host."""
    place, world = spec.hosts[spec.host], meeting.world
    hosts, address, port = world.hosts, meeting.address, meeting.port
    if spec.lives:
        hosts, address, port = [spec.host], place.address, 0
    address = f"[{address}]" if ":" in address else address
    return [
        sys.executable, "-P", "-m", "evener.worker.torchrun",
        f"--nnodes={len(hosts)}",
        f"--nproc-per-node={place.num_ranks}",
        "--rdzv-backend=evener",
        f"--rdzv-endpoint={address}:{port}",
        f"--rdzv-conf=rank={hosts.index(spec.host)}",
        f"--rdzv-id={spec.run}-{world.number}",
        f"--local-addr={place.address}",
        "--max-restarts=0", "--monitor-interval=0.1", "--shutdown-timeout=5", "--redirects=3",
        f"--log-dir={spec.folder}/host/ranks",
        *(["-m", "--", *spec.program[1:]] if spec.program[0] == "-m" else ["--", *spec.program]),
    ]  # fmt: skip


def free_port(address: str) -> int:
    """For the store of a world, on its first host."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port
