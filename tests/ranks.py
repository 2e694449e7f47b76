"""Starts ranks of programs in a fraction of the seconds that importing torch takes: it has done so, and forks.

Each line that it reads is a job: {"program" or "module", "args", "ranks", "logs", "env"}. The ranks find the
environment that torchrun gives. When one fails and the others do not end by themselves within the grace, they are
killed. It answers {"statuses": [of each rank, -9 of one that was killed]}; rank N's words are in logs/rank-N.out and
.err.

Tests of how ranks are started, signalled and ended start them with torchrun, as people do.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from evener.node.remote.sockets import find_free_port

GRACE_S, DEADLINE_S, POLL_S = 30.0, 170.0, 0.01


@dataclass(frozen=True)
class Ended:
    """Ranks that have ended."""

    statuses: list[int]
    folder: Path  # of what they said

    def said(self, kind: str) -> str:
        """All ranks' "out" or "err", one after the other."""
        return "".join((self.folder / f"rank-{rank}.{kind}").read_text() for rank in range(len(self.statuses)))


class Server:
    """This program, for whoever gives it jobs; `within` is a command that starts another one."""

    def __init__(self, env: dict[str, str], within: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen([*within, sys.executable, __file__], env=env, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)  # fmt: skip
        self.pid = self._process.pid

    def run(self, folder: Path, args: list[str], ranks: int = 1, env: dict[str, str] | None = None,
            **what: str) -> Ended:  # fmt: skip
        """`program=` a file, or `module=` a name; returns when all ranks have ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        job = {"args": args, "ranks": ranks, "logs": str(folder), "env": env or {}, **what}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return Ended(json.loads(self._process.stdout.readline())["statuses"], folder)

    def close(self) -> None:
        """No more jobs."""
        self._process.communicate()


def free_port() -> int:
    """A port of the loopback for who must know it beforehand: one that the kernel gives to nobody who takes any."""
    range_of_kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")
    low = int(range_of_kernel.read_text().split()[0]) if range_of_kernel.exists() else 32768
    port = find_free_port("127.0.0.1", random.randrange(low // 2, low), low // 2, low)
    assert port is not None
    return port


def preload() -> None:
    import torch._dynamo  # noqa: F401  (by the first optimizer of a process)

    import evener.worker.sync.sync_factory
    import evener.worker.train.loop
    import evener.worker.train.run  # noqa: F401

    gc.freeze()  # or each child would look through, and so copy, all of torch


def run(job: dict) -> list[int]:
    port, pids = free_port(), []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            os._exit(be_rank(job, rank, port))
        pids.append(pid)
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(statuses) < len(pids):
        for pid in set(pids) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid] != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return [statuses[pid] for pid in pids]


def be_rank(job: dict, rank: int, port: int) -> int:
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = Path(job["logs"]) / f"rank-{rank}.{kind}"
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    random.seed()
    if job["ranks"] > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
        os.environ.update({name: str(value) for name, value in world.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    os.environ.update({name: value.replace("RANK", str(rank)) for name, value in job["env"].items()})
    sys.argv = [job.get("program", ""), *(word.replace("RANK", str(rank)) for word in job["args"])]
    status = 0
    try:
        if "module" in job:
            runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(job["program"]).parent))
            runpy.run_path(job["program"], run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    preload()
    for line in sys.stdin:
        print(json.dumps({"statuses": run(json.loads(line))}), flush=True)
