"""Name the rank that hangs or was killed unseen; a run that can recover loses nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.lab.emulated_lab import EmulatedLab
from evener.lab.fault_injection import AGENT_PROGRAM, find_pids
from evener.lab.host import LabHost
from tests.lab.conftest import rank_on, wait_until
from tests.lab.test_launch import FLAGS, Command, Fleet
from tests.tiers import exhaustive

WITHIN_S = 60  # on a machine as busy as it likes; 15 s where it is not
MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def fleet(pair: EmulatedLab, tmp_path: Path) -> Fleet:
    return Fleet(pair, Path(pair.state.fleet_file or ""), tmp_path)


@contextlib.contextmanager
def running(fleet: Fleet, corpus: Path, name: str, steps: str = "100000", *flags: str) -> Iterator[Command]:
    """A training, and somebody who follows it."""
    flags = ("--membership", "fixed", *flags)  # else the others go on, or its own agent ends it
    fleet.ok("train", "--data", str(corpus), *FLAGS, steps, *flags, "--out", name, "--detach")
    watcher = fleet.start("logs", "-f", name)
    wait_until(lambda: len(fleet.rundir(name).records(0)) > 2, "it trains")
    try:
        yield watcher
    finally:
        fleet.run("stop", "--now", name)
        watcher.wait()


def keepers_on(host: LabHost) -> list[int]:
    """The supervisor and its guard."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(OSError):
            if b"supervisor.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@exhaustive
def test_stopped_rank_is_named_and_resumes_without_loss(fleet: Fleet, corpus: Path) -> None:
    with running(fleet, corpus, "runs/frozen") as watcher:
        pid = rank_on(fleet.lab.host("b"))
        os.kill(pid, signal.SIGSTOP)
        expected = "run.hang: rank 1 on b is stopped, by a signal or a debugger"
        wait_until(lambda: expected in watcher.told(), watcher.told, WITHIN_S)
        assert f"hint:  on b: kill -CONT {fleet_pid(pid)}" in watcher.told()
        had = len(fleet.rundir("runs/frozen").records(0))
        fleet.lab.host("b").exec(["kill", "-CONT", str(fleet_pid(pid))])
        wait_until(lambda: "recovered " in watcher.told(), watcher.told, WITHIN_S)
        wait_until(lambda: len(fleet.rundir("runs/frozen").records(0)) > had + 2, "it trains again")
    events = [event["event"] for event in fleet.rundir("runs/frozen").events()]
    assert [events.count("run.hang"), events.count("run.goes-on")] == [1, 1]
    steps = [record.step for record in fleet.rundir("runs/frozen").records(0)]
    assert steps == list(range(len(steps)))


def fleet_pid(pid: int) -> int:
    """As its own host calls it."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])


@exhaustive
def test_rank_blocked_in_own_code_is_named_with_line(fleet: Fleet, corpus: Path) -> None:
    """A loop of somebody's own that reads what nobody writes, on one of two hosts."""
    (fleet.folder / "wait.py").write_text(
        "import os, sys, torch, evener; torch.manual_seed(0)\n"
        "from torch import nn\n"
        "from torch.utils.data import TensorDataset\n"
        "data = TensorDataset(torch.randn(64, 2), torch.randn(64, 1))\n"
        "def load():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os.mkfifo('fifo')\n"
        "        open('fifo').read()\n"
        "with evener.join(evener.parse_args(sys.argv[1:])) as run:\n"
        "    model = run.model(nn.Linear(2, 1))\n"
        "    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.1))\n"
        "    for step in run.steps(data):\n"
        "        if step.index == 3:\n"
        "            load()\n"
        "        for x, y in step.micro_batches():\n"
        "            step.backward((model(x) - y).square().sum())\n"
        "        step.update(optimizer)\n"
    )
    watcher = fleet.start("launch", "--out", "runs/waits", "--", "wait.py", "--batch", "8", "--steps", "9")
    expected = "run.hang: rank 1 on b does nothing, in wait.py:8 in load, and the others wait for it"
    wait_until(lambda: expected in watcher.told(), "it is named", WITHIN_S)
    fleet.ok("stop", "--now", "runs/waits")
    watcher.wait()


@exhaustive
def test_deadlocked_ranks_are_named_with_lines(fleet: Fleet) -> None:
    """A loop of somebody's own whose ranks exchange different things."""
    (fleet.folder / "cross.py").write_text(
        "import sys, torch, torch.distributed as dist, evener; torch.manual_seed(0)\n"
        "from torch import nn\n"
        "from torch.utils.data import TensorDataset\n"
        "data = TensorDataset(torch.randn(64, 2), torch.randn(64, 1))\n"
        "with evener.join(evener.parse_args(sys.argv[1:])) as run:\n"
        "    model = run.model(nn.Linear(2, 1))\n"
        "    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.1))\n"
        "    other = dist.new_group()\n"
        "    for step in run.steps(data):\n"
        "        for x, y in step.micro_batches():\n"
        "            step.backward((model(x) - y).square().sum())\n"
        "            if step.index == 3 and run.rank == 0:\n"
        "                dist.barrier(group=other)\n"
        "        step.update(optimizer)\n"
    )
    watcher = fleet.start("launch", "--out", "runs/crossed", "--", "cross.py", "--batch", "8", "--steps", "9")
    expected = "run.hang: rank 1 on b waits in train_step.py:"
    wait_until(lambda: expected in watcher.told(), watcher.told, WITHIN_S)
    line = next(line for line in watcher.told().splitlines() if expected in line)
    assert line.endswith(", others in cross.py:13 in <module>, and nothing travels between them"), line
    fleet.ok("stop", "--now", "runs/crossed")
    watcher.wait()


@exhaustive
@pytest.mark.alone  # the kernel counts processes that it ended for want of memory for all hosts of all labs together
@pytest.mark.skipif(
    not (MEMORY / "memory.limit_in_bytes").exists() or os.geteuid() != 0, reason="needs cgroup v1, root"
)
def test_rank_killed_for_memory_is_named(fleet: Fleet, corpus: Path) -> None:
    with memory_of(2_000_000) as group, running(fleet, corpus, "runs/oom") as watcher:
        (group / "cgroup.procs").write_text(str(rank_on(fleet.lab.host("b"))))
        assert watcher.wait() == 1
        assert "run.oom: rank 1 on b was killed by SIGKILL: b had no memory left" in watcher.told()


@contextlib.contextmanager
def memory_of(num_bytes: int) -> Iterator[Path]:
    """A control group whose processes have no more."""
    group = MEMORY / f"evener-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield group
    finally:
        deadline = time.monotonic() + 20
        while group.exists():
            with contextlib.suppress(OSError):
                group.rmdir()
            assert time.monotonic() < deadline


@exhaustive
@pytest.mark.alone  # the kernel counts processes that it ended for want of memory for all hosts of all labs together
@pytest.mark.skipif(
    not (MEMORY / "memory.limit_in_bytes").exists() or os.geteuid() != 0, reason="needs cgroup v1, root"
)
def test_rank_killed_for_memory_rejoins_with_half_micro_batch(fleet: Fleet, corpus: Path) -> None:
    run = fleet.rundir("runs/half")
    with memory_of(2_000_000) as group, running(fleet, corpus, "runs/half", "100000", "--membership", "live"):
        (group / "cgroup.procs").write_text(str(rank_on(fleet.lab.host("b"))))
        wait_until(lambda: run.manifest().roster.hosts == ["a"], "a goes on alone")
        wait_until(lambda: run.manifest().roster.hosts == ["a", "b"], "b is back")
        wait_until(lambda: run.records(1)[-1].epoch == run.manifest().roster.epoch, "it trains")
    assert [(member.share, member.micro_batch_sizes) for member in run.manifest().roster.members] == [
        (3, [3]),
        (3, [1, 1, 1]),
    ]
    (event,) = [event for event in run.events() if event["event"] == "run.oom"]
    assert (event["rank"], "half as many sequences at a time" in event["error"]) == (1, True)


@exhaustive
def test_full_disk_is_reported_in_one_sentence(fleet: Fleet, corpus: Path) -> None:
    a = fleet.lab.host("a")
    a.exec(["sh", "-ec", "mkdir -p ~/.evener; mount -t tmpfs -o size=400M tmpfs ~/.evener"])
    try:
        with running(fleet, corpus, "runs/full", "100000", "--checkpoint-every", "5") as watcher:
            a.exec(["sh", "-c", "dd if=/dev/zero of=$HOME/.evener/fill bs=1M"], check=False)
            assert watcher.wait() == 1
            told = watcher.told()
        ended = told[told.rindex("\nerror: ") + 1 :]
        assert ended.startswith("error: disk.space: "), told
        assert "the disk of a is full" in ended
        assert "on a: du -xh" in ended
        assert "Traceback" not in ended
    finally:
        a.exec(["sh", "-ec", "umount -l ~/.evener"])


@exhaustive
def test_run_with_killed_supervisors_finishes(fleet: Fleet, corpus: Path) -> None:
    with running(fleet, corpus, "runs/kept", "60", "--checkpoint-every", "0") as watcher:
        for host in fleet.lab.hosts:
            keepers = keepers_on(host)
            for signum in (signal.SIGSTOP, signal.SIGKILL):  # first stopped: neither sees the other go
                for pid in keepers:
                    os.kill(pid, signum)
        assert watcher.wait() == 0, watcher.told()
    run = fleet.rundir("runs/kept")
    assert {event["host"] for event in run.events() if event["event"] == "supervisor.lost"} == {"a", "b"}
    assert run.manifest().verdict == "finished"
    assert run.checkpoint_steps() == [60]


@exhaustive
def test_host_with_killed_supervisor_and_agent_rejoins(fleet: Fleet, corpus: Path) -> None:
    """Its rank would wait for a word that never comes: it ends with its agent."""
    run = fleet.rundir("runs/both")
    with running(fleet, corpus, "runs/both", "100000", "--membership", "live") as watcher:
        b = fleet.lab.host("b")
        rank, doomed = rank_on(b), [*keepers_on(b), *find_pids(b, AGENT_PROGRAM)]
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in doomed:
                os.kill(pid, signum)
        wait_until(lambda: rank not in b.pids(), "its rank ends", WITHIN_S)
        wait_until(lambda: run.manifest().roster.hosts == ["a"], watcher.told, WITHIN_S)
        wait_until(lambda: run.manifest().roster.hosts == ["a", "b"], watcher.told, WITHIN_S)
        assert rank_on(b) != rank
    assert run.manifest().verdict == "stopped"
