"""Agents of several hosts on one machine, and what may happen to them: as processes, and simulated."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest

from evener.core.base.json_files import read_json
from evener.core.run.hang_detector import ProcessSample
from evener.core.run.membership_epoch import (
    AGENT_SPEC_FILE,
    EXIT_TERMINATED,
    RUN_KEY_BYTES,
    RUN_KEY_FILE,
    AgentSpec,
    HostEntry,
    RankStatus,
    Rendezvous,
)
from evener.node.agent.__main__ import HostAgent
from evener.node.agent.consensus import TICK_INTERVAL_S, HostStatus

from .conftest import ENV, TIMEOUT_S
from .ranks import free_port
from .volatile_disk import VolatileDisk

# A rank: it says which world it is in, and what its pulse is to say, and lasts until there is a file or no launcher.
RANK = """
import json, os, pathlib, sys, time
host = pathlib.Path(os.environ["EVENER_WORLD"]).parent
pulse = json.loads(sys.argv[2]) if len(sys.argv) > 2 else None
if pulse:
    host.joinpath("pulse").mkdir(exist_ok=True)
    host.joinpath("pulse", "0").write_text(json.dumps({"pid": os.getpid(), **pulse}))
world = json.loads(host.joinpath("world.json").read_text())["epoch"]
print("world", world["number"], "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
go, launcher = pathlib.Path(sys.argv[1]), os.getppid()
while not go.exists() and os.getppid() == launcher:
    time.sleep(0.05)
raise SystemExit(int(go.read_text() or 0) if go.exists() else 9)
"""


class Pulse(NamedTuple):
    """What a rank says of itself: the line in which it is, and whether that is an exchange with other ranks."""

    where: str
    waits: bool


class Agents:
    """A run's hosts, each with a folder of its own. Subclasses start their agents."""

    LIVES = False  # do ranks live on from world to world?
    RANKS = 1  # of each host

    def __init__(self, folder: Path, names: str, pulses: Mapping[str, Pulse] | None = None) -> None:
        self.folder, self.port, self.pulses = folder, free_port(), dict(pulses or {})
        self.parts = {name: HostEntry(address=f"127.0.0.{i + 1}", num_ranks=self.RANKS) for i, name in enumerate(names)}
        self.first, self.edition = [*names], 0
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Start the agent of a host that has just been written into `parts`."""
        (self.folder / name / "host" / "ranks").mkdir(parents=True)
        (self.folder / name / RUN_KEY_FILE).write_text("5e" * RUN_KEY_BYTES)
        self.start(name)

    def start(self, name: str) -> None:
        """Start its agent, for the first time or again."""
        raise NotImplementedError

    def program(self, home: Path) -> list[str]:
        """Return what its ranks run."""
        return ["rank.py", str(home / "go")]

    def tell(self, name: str) -> None:
        """Write down for its agent who may take part."""
        home = self.folder / name
        spec = AgentSpec(
            run="r1",
            host=name,
            hosts=self.parts,
            version=self.edition,
            first=self.first,
            port=self.port,
            program=self.program(home),
            host_timeout_s=8.0,
            is_elastic=self.LIVES,
        )
        (home / AGENT_SPEC_FILE).write_bytes(msgspec.json.encode(spec))

    def told(self, name: str) -> str:
        """Return what its ranks printed, in the order of their worlds."""
        raise NotImplementedError

    def log(self, name: str) -> str:
        """Return what its agent printed."""
        raise NotImplementedError

    def until(self, is_so: Callable[[], bool]) -> float:
        """Return after how many seconds it was so."""
        raise NotImplementedError

    def until_in(self, world: int, names: str) -> None:
        """Return when the ranks of these hosts are in this world."""
        size = len(names)
        self.until(
            lambda: all(f"world {world} rank {i} of {size}\n" in self.told(name) for i, name in enumerate(names))
        )

    def end_ranks(self, status: str, names: str = "") -> None:
        """Have ranks of these hosts, or all, end with this status as soon as they have begun."""
        for name in names or self.parts:
            whole = self.folder / name / "whole"
            whole.write_text(status)
            whole.rename(self.folder / name / "go")


class AgentProcesses(Agents):
    """Agents as processes, with real launchers."""

    def __init__(self, folder: Path, names: str, pulses: Mapping[str, Pulse] | None = None) -> None:
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "rank.py").write_text(RANK)
        super().__init__(folder, names, pulses)

    def program(self, home: Path) -> list[str]:
        pulse = self.pulses.get(home.name)
        return [str(self.folder / "rank.py"), str(home / "go"),
                *([msgspec.json.encode(pulse._asdict()).decode()] if pulse else [])]  # fmt: skip

    def start(self, name: str) -> None:
        home = self.folder / name
        self.tell(name)
        argv = [sys.executable, "-m", "evener.node.agent", str(home)]
        with (home / "log").open("ab") as log:
            env = ENV | {"EVENER_HOST": name, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            env |= {"EVENER_ROSTER": str(home / "roster.json")} if (home / "roster.json").exists() else {}
            self.agents[name] = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)

    def ranks(self, name: str) -> list[psutil.Process]:
        """Return its ranks: not their launcher, which has -P, nor what has ended and waits to be seen."""
        found = []
        for one in psutil.Process(self.agents[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none
                if one.cmdline()[1:2] != ["-P"]:
                    found.append(one)
        return found

    def told(self, name: str) -> str:
        logs = sorted(
            (self.folder / name / "host" / "ranks").glob("*/*/*/stdout.log"), key=lambda log: log.stat().st_mtime
        )
        return "".join(log.read_text() for log in logs)

    def log(self, name: str) -> str:
        return (self.folder / name / "log").read_text()

    def until(self, is_so: Callable[[], bool]) -> float:
        began = time.monotonic()
        while not is_so():
            ends = {name: [self.log(name)[-3000:], self.told(name)] for name in self.agents}
            assert time.monotonic() - began < TIMEOUT_S, ends
            time.sleep(0.05)
        return time.monotonic() - began

    def wait(self, name: str) -> int:
        """Return the exit status of its agent, which ends."""
        return self.agents[name].wait(TIMEOUT_S)

    def kill(self, name: str) -> None:
        """All at once, as when its power goes."""
        agent = psutil.Process(self.agents[name].pid)
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()
        self.agents[name].wait()

    def kill_rank(self, name: str) -> None:
        """Kill its first rank."""
        next(one for one in self.ranks(name)).kill()

    def stop_rank(self, name: str) -> None:
        """Stop its first rank, as a debugger does."""
        next(one for one in self.ranks(name)).send_signal(signal.SIGSTOP)

    def has_ranks(self, name: str) -> bool:
        """Return whether any rank of it is there."""
        return bool(self.ranks(name))

    def freeze(self, name: str) -> None:
        """Keep its agent from doing anything; it will know nothing of that."""
        os.kill(self.agents[name].pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let it go on."""
        os.kill(self.agents[name].pid, signal.SIGCONT)

    def close(self) -> None:
        """End all that is left."""
        for name, agent in self.agents.items():
            if agent.poll() is None:
                self.kill(name)


class SimulatedAgents(Agents):
    """The same agents in this process, by a clock of their own: between two looks at everybody ROUND_S pass.

    Statements take one round, and one in ten is lost. Ranks are no more than their exit status. A host that is killed
    loses what its agent did not flush to disk.
    """

    DEADLINE_S = 600.0

    def __init__(self, folder: Path, names: str, pulses: Mapping[str, Pulse] | None = None) -> None:
        self.now, self.random = 1000.0, random.Random(1)
        self.agents: dict[str, HostAgent] = {}  # of hosts that are on, and whose agent has not ended
        self.statuses: dict[str, int] = {}  # of agents that have ended
        self.ranks: dict[str, SimulatedRanks] = {}
        self._frozen: set[str] = set()
        self._monkeypatch, self._disks = pytest.MonkeyPatch(), dict[str, VolatileDisk]()
        self._under_way: list[tuple[str, bytes]] = []
        self._logs = {name: io.StringIO() for name in names}
        self._told = dict.fromkeys(names, "")
        super().__init__(folder, names, pulses)

    def start(self, name: str) -> None:
        self.tell(name)
        home = self.folder / name
        self._logs.setdefault(name, io.StringIO())
        self._told.setdefault(name, "")
        self.statuses.pop(name, None)
        self._under_way = [message for message in self._under_way if message[0] != name]  # sent while it was off
        if name not in self._disks:
            self._disks[name] = VolatileDisk(home, self._monkeypatch)
        self._disks[name].flush()

        def start_ranks(spec: AgentSpec, folder: Path, meeting: Rendezvous) -> Any:
            self.ranks[name] = SimulatedRanks(self, name, meeting)
            return self.ranks[name]

        self.agents[name] = HostAgent(read_json(home / AGENT_SPEC_FILE, AgentSpec), home, clock=lambda: self.now,
                                  start_ranks=start_ranks)  # fmt: skip

    def told(self, name: str) -> str:
        return self._told[name]

    def log(self, name: str) -> str:
        return self._logs[name].getvalue()

    def say(self, name: str, text: str) -> None:
        """Add to what its ranks printed."""
        self._told[name] += text

    def until(self, is_so: Callable[[], bool]) -> float:
        began = self.now
        while not is_so():
            assert self.now - began < self.DEADLINE_S, {name: (self.log(name), self.told(name)) for name in self._logs}
            self._round()
        return self.now - began

    def _round(self) -> None:
        self.now += TICK_INTERVAL_S
        due, self._under_way = self._under_way, []
        for to, text in due:
            if to in self.agents and to not in self._frozen and self.random.random() > 0.1:
                self.agents[to].on_status(msgspec.json.decode(text, type=HostStatus))
        for name in self.random.sample(sorted(self.agents), len(self.agents)):
            if name in self._frozen:
                continue
            agent = self.agents[name]
            with contextlib.redirect_stdout(self._logs[name]):
                status = agent.tick()
            if status is not None:
                self.statuses[name] = status
                agent.close()
                del self.agents[name]
            elif (statement := agent.make_status()) is not None:
                self._under_way += [(to, msgspec.json.encode(statement)) for to in self.parts if to != name]

    def wait(self, name: str) -> int:
        """Return the exit status of its agent, which ends."""
        self.until(lambda: name in self.statuses)
        return self.statuses[name]

    def kill(self, name: str) -> None:
        """All at once, as when its power goes."""
        del self.agents[name]
        self.ranks.pop(name, None)
        self._disks[name].lose_power()

    def kill_rank(self, name: str) -> None:
        """Kill its first rank."""
        self.ranks[name].killed = True

    def stop_rank(self, name: str) -> None:
        """Stop its first rank, as a debugger does."""
        self.ranks[name].stopped = True

    def has_ranks(self, name: str) -> bool:
        """Return whether any rank of it is there."""
        return name in self.ranks

    def freeze(self, name: str) -> None:
        """Keep its agent from doing anything; it will know nothing of that."""
        self._frozen.add(name)

    def thaw(self, name: str) -> None:
        """Let it go on."""
        self._frozen.remove(name)

    def close(self) -> None:
        """End all that is left."""
        self.agents.clear()
        self._monkeypatch.undo()
        for disk in self._disks.values():
            disk.close()


class SimulatedRanks:
    """The one rank of a host under a launcher, which ends it a second after a rank of another host has failed."""

    HEARS_S = 1.0

    def __init__(self, hosts: SimulatedAgents, name: str, meeting: Rendezvous) -> None:
        self._hosts, self._name, self._meeting, self._began = hosts, name, meeting, hosts.now
        self.killed = self.stopped = False
        self._failed_at: float | None = None
        hosts.say(name, f"world {meeting.epoch.number} rank {meeting.first_rank} of {meeting.world_size}\n")

    def _exit_code(self) -> int | None:
        go = self._hosts.folder / self._name / "go"
        code = -signal.SIGKILL if self.killed else int(go.read_text() or 0) if go.exists() else None
        if code and self._failed_at is None:
            self._failed_at = self._hosts.now
        return code

    def poll(self) -> int | None:
        """Return the launcher's exit status once it has ended."""
        code = self._exit_code()
        if code is not None:
            return 1 if code else 0
        others = (one for one in self._hosts.ranks.values() if one._meeting.epoch == self._meeting.epoch)
        failed = [one._failed_at for one in others if one._failed_at is not None]
        return EXIT_TERMINATED if failed and self._hosts.now - min(failed) > self.HEARS_S else None

    def failures(self) -> list[dict[str, Any]]:
        """Return how it failed, if it did itself."""
        code = self._exit_code()
        return [{"local_rank": 0, "pid": 1, "exitcode": code, "time": self._hosts.now}] if code else []

    def rank_statuses(self) -> dict[int, RankStatus]:
        """Return nothing: under a launcher ranks ask their agent for nothing."""
        return {}

    def sample_processes(self) -> dict[int, ProcessSample]:
        """Return what the kernel and its pulse would say of it."""
        pulse, runs_s = self._hosts.pulses.get(self._name), self._hosts.now - self._began
        if self.stopped:
            return {0: ProcessSample(pid=1, state="T", cpu_s=0.0)}
        if pulse is None:
            return {0: ProcessSample(pid=1, state="S", cpu_s=runs_s)}
        return {0: ProcessSample(pid=1, state="S", cpu_s=0.0, where=pulse.where, is_waiting=pulse.waits)}

    def kill(self) -> None:
        """Kill it."""
        if self._hosts.ranks.get(self._name) is self:
            del self._hosts.ranks[self._name]
