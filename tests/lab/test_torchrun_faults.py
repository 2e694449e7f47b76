"""A torchrun job survives half a minute without its link, and ends when a host loses power."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.core.run.membership_epoch import EXIT_TERMINATED
from evener.lab.lab_spec import HostSpec
from evener.worker import torchrun
from tests.lab.conftest import TIMEOUT_S, MakeLab, wait_until
from tests.lab.test_launch import Fleet
from tests.tiers import exhaustive

OUTAGE_S = 30.0
TALK = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for i in range(100000):
    dist.all_reduce(torch.zeros(10))
    print("line", i, flush=True)
    time.sleep(0.05)
"""
QUIET = """
import os, sys, time
print("line", flush=True)
while not os.path.exists(os.path.expanduser("~/" + sys.argv[1])):
    time.sleep(0.1)
print("done", flush=True)
"""


def started(fleet: Fleet, script: str, hosts: str) -> None:
    (fleet.folder / "script.py").write_text(script)
    fleet.ok("launch", "--out", "runs/one", "--detach", "--", "script.py", fleet.gate)
    for rank, host in enumerate(hosts):
        log = fleet.there("runs/one", host) / f"logs/{host}.{rank}.log"
        wait_until(lambda log=log: log.exists() and "line" in log.read_text(), f"{host} is at work")


@exhaustive
def test_run_survives_half_a_minute_without_link(make_lab: MakeLab, tmp_path: Path) -> None:
    """With traffic and without, at once, on two pairs of hosts."""
    fleets = []
    for name, script in (("talk", TALK), ("quiet", QUIET)):
        (tmp_path / name).mkdir()
        lab = make_lab(a=HostSpec(), b=HostSpec())
        fleets.append(Fleet(lab, Path(lab.state.fleet_file or ""), tmp_path / name))
        started(fleets[-1], script, "ab")
    talk, quiet = fleets
    for one in fleets:
        one.lab.host("b").set_link_up(False)
    time.sleep(OUTAGE_S)
    for one in fleets:
        one.lab.host("b").set_link_up(True)
    log = talk.there("runs/one", "a") / "logs/a.0.log"
    had = log.stat().st_size
    wait_until(lambda: log.stat().st_size > had, "it goes on")  # TCP tries again after as long as it was away, at worst
    assert len(talk.processes("runs/one")) == 2
    talk.ok("stop", "--now", "runs/one")
    quiet.finish()
    done = quiet.run("logs", "-f", "runs/one")
    assert done.returncode == 0, done.stdout + done.stderr
    for host, rank in (("a", 0), ("b", 1)):
        assert quiet.printed("runs/one", host, rank).endswith("done")


@pytest.fixture
def dark(make_lab: MakeLab, tmp_path: Path) -> Iterator[dict[str, Fleet]]:
    """By the host that loses its power: runs of three hosts, still at work."""
    fleets = {}
    for victim in "ab":
        (tmp_path / victim).mkdir()
        lab = make_lab(a=HostSpec(), b=HostSpec(), c=HostSpec())
        fleets[victim] = Fleet(lab, Path(lab.state.fleet_file or ""), tmp_path / victim)
        started(fleets[victim], QUIET, "abc")
    yield fleets
    for fleet in fleets.values():
        fleet.lab.down()


@exhaustive
def test_power_loss_of_a_host_ends_the_run(dark: dict[str, Fleet]) -> None:
    """The first host or another: whoever is left ends its ranks, says why, and leaves no process."""
    for victim, fleet in dark.items():
        fleet.lab.host(victim).kill()
    deadline = time.monotonic() + torchrun.HEARTBEAT_TIMEOUT_S + TIMEOUT_S
    for victim, fleet in dark.items():
        for host in "abc".replace(victim, ""):
            run = fleet.there("runs/one", host)
            while (state := json.loads((run / "host/state.json").read_text()))["state"] != "ended":
                assert time.monotonic() < deadline, f"without {victim}, {host} goes on"
                time.sleep(0.1)
            assert state["status"] == EXIT_TERMINATED
            said = (run / f"logs/{host}.log").read_text()
            why = "b failed: nothing was heard of it" if victim == "b" else "nothing was heard of the store on"
            assert f"evener: ending the ranks on {host}: {why}" in said
        survivors = [host for host in fleet.lab.hosts if host.name != victim]
        assert all(host.is_alive() for host in survivors)
