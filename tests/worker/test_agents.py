"""Agents of several hosts restart, readmit or end a run after any failure, together."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evener.core.run.membership_epoch import (
    AGENT_SPEC_FILE,
    CONSENSUS_STATE_FILE,
    EXIT_DISK_FULL,
    EXIT_HOST_LEFT,
    EXIT_RUN_FAILED,
    HostEntry,
)
from evener.core.run.rundir import RunDir

from ..agents import AgentProcesses, Pulse, SimulatedAgents
from ..ranks import free_port
from ..tiers import exhaustive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="each host has a loopback address of its own: Linux")
Hosts = SimulatedAgents | AgentProcesses
MakeHosts = Callable[..., Hosts]


@pytest.fixture(params=[SimulatedAgents, pytest.param(AgentProcesses, marks=exhaustive)])
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeHosts]:
    made: list[Hosts] = []

    def make(names: str, pulses: dict[str, Pulse] | None = None) -> Hosts:
        made.append(request.param(tmp_path, names, pulses))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_killed_rank_restarts_with_the_others(hosts: MakeHosts) -> None:
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    fleet.kill_rank("b")
    fleet.until_in(1, "abc")
    assert "evener: b failed: membership epoch 1 is a, b, c" in fleet.log("c")
    fleet.end_ranks("")
    assert [fleet.wait(name) for name in "abc"] == [0, 0, 0]


@pytest.mark.parametrize(("gone", "left"), [("a", "bc"), ("b", "ac")])
def test_others_continue_without_lost_host_and_let_it_rejoin(hosts: MakeHosts, gone: str, left: str) -> None:
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    fleet.kill(gone)
    fleet.until_in(1, left)
    fleet.start(gone)
    fleet.until(lambda: "epoch 1" in fleet.log(gone))  # it has heard
    fleet.kill_rank(left[1])
    fleet.until_in(2, left + gone)
    fleet.end_ranks("")
    assert [fleet.wait(name) for name in "abc"] == [0, 0, 0]


def test_restarted_agent_rejoins(hosts: MakeHosts) -> None:
    """Its supervisor starts it again, before anybody has missed it."""
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    fleet.kill("a")
    fleet.start("a")
    fleet.until_in(1, "ab")
    fleet.end_ranks("")
    assert [fleet.wait(name) for name in "ab"] == [0, 0]


def test_power_loss_of_all_hosts_takes_no_promise_back(hosts: MakeHosts) -> None:
    """b has promised epoch 1 with a, and so decides none with c."""
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    fleet.kill("c")
    fleet.until_in(1, "ab")
    fleet.kill("a")
    fleet.kill("b")
    fleet.start("c")
    fleet.start("b")
    fleet.until(lambda: "epoch 1 is a, b" in fleet.log("c"))
    fleet.start("a")
    fleet.until(lambda: "epoch 2 is " in fleet.log("b"))
    is_late = "epoch 2 is a, b\n" in fleet.log("b")  # c, which a had not heard of when it began: it waits
    if is_late:
        fleet.until_in(2, "ab")
        fleet.kill_rank("a")
    fleet.until_in(2 + is_late, "abc")
    fleet.end_ranks("")
    assert [fleet.wait(name) for name in "abc"] == [0, 0, 0]


def test_split_brain_is_reported_and_the_smaller_side_rejoins(hosts: MakeHosts, tmp_path: Path) -> None:
    """The disk of b loses in a power loss that it was in epoch 1 with a; b and c decide another epoch 1, without a."""
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    kept = (tmp_path / "b" / CONSENSUS_STATE_FILE).read_bytes()
    fleet.kill("c")
    fleet.until_in(1, "ab")
    fleet.kill("a")
    fleet.kill("b")
    (tmp_path / "b" / CONSENSUS_STATE_FILE).write_bytes(kept)
    fleet.start("b")
    fleet.start("c")
    fleet.until(lambda: "epoch 1 is b, c" in fleet.log("b") and "epoch 1 is b, c" in fleet.log("c"))
    fleet.until_in(1, "bc")
    saved = RunDir(tmp_path / "a").checkpoint_path(649)
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{}")
    fleet.start("a")
    fleet.until(lambda: "split brain" in fleet.log("a"))
    (event,) = RunDir(tmp_path / "a").events()
    assert (event["event"], event["number"], event["kept"]) == ("run.split-brain", 1, False)
    assert event["sides"] == [["a"], ["b", "c"]]
    assert event["error"].startswith(
        "split brain: membership epoch 1 was decided twice; the side of b, c continues, the side of a rejoins it"
    )
    assert RunDir(tmp_path / "a").checkpoint_steps() == []  # else all could restart from it
    fleet.until(lambda: (tmp_path / "b" / "host" / "waiting").exists())
    fleet.kill_rank("b")
    fleet.until_in(2, "bca")
    fleet.end_ranks("")
    assert [fleet.wait(name) for name in "abc"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("pulses", "what"),
    [
        ({}, "is stopped, by a signal or a debugger"),
        (
            {"a": Pulse("loop.py:3 in train", waits=True), "b": Pulse("token_blocks.py:9 in read", waits=False)},
            "does nothing, in token_blocks.py:9 in read, and the others wait for it",
        ),
    ],
    ids=["stopped", "idle"],
)
def test_hanging_rank_is_named_and_all_ranks_restart(
    hosts: MakeHosts, tmp_path: Path, pulses: dict[str, Pulse], what: str
) -> None:
    fleet = hosts("ab", pulses)
    fleet.until_in(0, "ab")
    if not pulses:
        fleet.stop_rank("b")
    fleet.until(lambda: (tmp_path / "b" / "events.jsonl").exists())
    fleet.until_in(1, "ab")
    event = json.loads((tmp_path / "b" / "events.jsonl").read_text().splitlines()[0])
    assert (event["event"], event["rank"], event["error"]) == ("run.hang", 1, f"rank 1 on b {what}")
    assert not (tmp_path / "a" / "events.jsonl").exists()
    fleet.end_ranks("")
    assert [fleet.wait(name) for name in "ab"] == [0, 0]


def test_added_host_is_propagated_to_agents_that_were_not_notified(hosts: MakeHosts, tmp_path: Path) -> None:
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    fleet.parts |= {"c": HostEntry(address="127.0.0.3", num_ranks=1)}
    fleet.edition += 1
    fleet.tell("a")
    fleet.until(lambda: b'"c"' in (tmp_path / "b" / AGENT_SPEC_FILE).read_bytes())
    fleet.add("c")
    fleet.until(lambda: (tmp_path / "b" / "host" / "waiting").exists())
    fleet.kill_rank("a")
    fleet.until_in(1, "abc")
    fleet.end_ranks("")
    assert [fleet.wait(name) for name in "abc"] == [0, 0, 0]


@exhaustive
def test_agents_whose_port_is_taken_find_each_other(tmp_path: Path) -> None:
    """Neither can tell the other where it is; later one of them restarts, and has its own port again."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        taken = [stack.enter_context(socket.create_server((f"127.0.0.{i}", port))) for i in (1, 2)]
        fleet = AgentProcesses(tmp_path, "", {})
        stack.callback(fleet.close)
        fleet.port = port
        fleet.parts = {name: HostEntry(address=f"127.0.0.{i}", num_ranks=1) for i, name in enumerate("ab", 1)}
        fleet.first = ["a", "b"]
        for name in "ab":
            fleet.add(name)
        fleet.until_in(0, "ab")
        assert all("this agent listens on port" in fleet.log(name) for name in "ab")
        for listener in taken:
            listener.close()
        fleet.kill("a")
        fleet.start("a")
        fleet.until_in(1, "ab")
        assert fleet.log("a").count("this agent listens on port") == 1
        fleet.end_ranks("")
        assert [fleet.wait(name) for name in "ab"] == [0, 0]


def test_permanent_failure_ends_all_agents(hosts: MakeHosts) -> None:
    """What the ranks say would fail in any world, at once."""
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    fleet.end_ranks(str(EXIT_RUN_FAILED))
    assert [fleet.wait(name) for name in "ab"] == [EXIT_RUN_FAILED, EXIT_RUN_FAILED]


@pytest.mark.parametrize(("status", "times"), [("2", 1), ("1", 4)])
def test_host_that_always_fails_leaves_and_others_continue(
    hosts: MakeHosts, tmp_path: Path, status: str, times: int
) -> None:
    """At once where its ranks refuse after all have trained; else after the fourth time in a row."""
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    fleet.kill_rank("b")
    fleet.until_in(1, "abc")
    fleet.end_ranks(status, "c")
    assert fleet.wait("c") == EXIT_HOST_LEFT
    fleet.until_in(1 + times, "ab")
    (event,) = RunDir(tmp_path / "c").events()
    assert (event["event"], event["host"]) == ("run.leaves", "c")
    told = f"c leaves the run: rank 2 ended with exit code {status}"
    assert event["error"] == told + " 4 times, and nothing was saved in between" * (times > 1)
    fleet.end_ranks("0", "ab")
    assert [fleet.wait(name) for name in "ab"] == [0, 0]


def test_host_without_disk_space_rejoins_when_space_is_free(hosts: MakeHosts, tmp_path: Path) -> None:
    """What its agent writes down fits there all the time."""
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    with (tmp_path / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 29)
    fleet.end_ranks(str(EXIT_DISK_FULL), "c")
    fleet.until_in(1, "ab")
    (event,) = RunDir(tmp_path / "c").events()
    assert (event["event"], event["host"]) == ("run.no-room", "c")
    (tmp_path / "c" / "go").unlink()
    (tmp_path / "ballast").unlink()
    fleet.until(lambda: "this host has enough disk space again" in fleet.log("c"))
    fleet.until(lambda: (tmp_path / "a" / "host" / "waiting").exists())
    fleet.kill_rank("a")
    fleet.until_in(2, "abc")
    fleet.end_ranks("0")
    assert [fleet.wait(name) for name in "abc"] == [0, 0, 0]


def test_second_host_continues_when_first_has_no_disk_space(hosts: MakeHosts, tmp_path: Path) -> None:
    """It is no cut: the first says so."""
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    (tmp_path / "a" / "host" / "needs").write_text(str(1 << 60))
    fleet.end_ranks(str(EXIT_DISK_FULL), "a")
    fleet.until_in(1, "b")
    assert f"its checkpoints need {(1 << 60) / 1e9:.2f} GB" in fleet.log("a")
    fleet.end_ranks("0", "b")
    assert [fleet.wait(name) for name in "ab"] == [0, 0]


def test_run_fails_when_all_hosts_leave(hosts: MakeHosts) -> None:
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    fleet.kill_rank("a")
    fleet.until_in(1, "ab")
    fleet.end_ranks("2")
    assert EXIT_RUN_FAILED in [fleet.wait(name) for name in "ab"]  # of whoever was the last


def test_excluded_host_leaves_and_stays_out(hosts: MakeHosts, tmp_path: Path) -> None:
    """Also where it was in the next world already, and where its supervisor starts its agent again."""
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    (tmp_path / "c" / "host" / "kept-out").write_text("its memory fails")
    fleet.kill_rank("a")
    assert fleet.wait("c") == EXIT_HOST_LEFT
    fleet.until(lambda: "is a, b\n" in fleet.log("b"))
    fleet.start("c")
    assert fleet.wait("c") == EXIT_HOST_LEFT
    assert fleet.log("c").count("has left the run: its memory fails\n") == 2
    fleet.end_ranks("")
    assert [fleet.wait(name) for name in "ab"] == [0, 0]


def test_one_of_two_hosts_waits_without_quorum(hosts: MakeHosts) -> None:
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    fleet.freeze("a")
    fleet.until(lambda: "no quorum of the hosts is reachable" in fleet.log("b"))
    fleet.until(lambda: not fleet.has_ranks("b"))
    fleet.thaw("a")
    # It was stopped: that it heard nobody meanwhile says nothing of them.
    fleet.until(lambda: "epoch 1 is a, b" in fleet.log("a"))
    fleet.until(lambda: any(f"world {number} rank 1 of 2\n" in fleet.told("b") for number in range(1, 7)))
    fleet.end_ranks("")
    assert [fleet.wait(name) for name in "ab"] == [0, 0]
