"""With `--private` and a firewall a stranger can connect only to ssh; without the firewall, to all ports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomlkit

from evener.core.cluster.fleet_file import load_fleet
from evener.core.run.run_plan import read_plan_if_present
from evener.core.run.trust import trust_fleet
from evener.doctor.firewall import NFT_TABLE
from evener.lab.host import LabHost
from evener.lab.lab_spec import HostSpec
from evener.node.agent.store_tunnel import LOOPBACK
from tests.lab.conftest import MakeLab, wait_until
from tests.lab.test_launch import ENV, Fleet
from tests.lab.test_listening import FLAGS, listening
from tests.tiers import exhaustive

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.5)"


@pytest.fixture(scope="module")
def fleet(make_lab: MakeLab, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Hosts a and b, and one in their network that is not of the fleet."""
    folder = tmp_path_factory.mktemp("here")
    lab = make_lab(a=HostSpec(), b=HostSpec(), stranger=HostSpec())
    assert lab.state.fleet_file is not None
    document = tomlkit.parse(Path(lab.state.fleet_file).read_text())
    for name in ("a", "b"):
        document["hosts"][name].update({"python": sys.executable, "threads": 1})  # type: ignore[index]
    del document["hosts"]["stranger"]  # type: ignore[union-attr]
    file = folder / "fleet.toml"
    file.write_text(tomlkit.dumps(document))
    trust_fleet(load_fleet(file))
    return Fleet(lab, file, folder)


@pytest.fixture
def commands(fleet: Fleet) -> Iterator[dict[str, str]]:
    """By host, the command that doctor gives; taken away again."""
    done = subprocess.run(fleet.argv("doctor", "--private", "--quick", "--json"), cwd=fleet.folder, env=ENV,
                          capture_output=True, text=True, check=False)  # fmt: skip
    found = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "net.private"]
    assert {(one["host"], one["severity"]) for one in found} == {("a", "error"), ("b", "error")}, done.stdout
    assert done.returncode == 1
    yield {one["host"]: one["fix"].partition(": ")[2] for one in found}
    for name in "ab":
        fleet.lab.host(name).exec(["sh", "-c", f"nft delete table inet {NFT_TABLE} || true"])


def connects(source: LabHost, target: LabHost, port: int) -> bool:
    done = source.popen([sys.executable, "-c", CONNECT, target.address, str(port)], stderr=subprocess.DEVNULL)
    return done.wait(60) == 0


def reached(fleet: Fleet, source: str) -> dict[str, set[bool]]:
    """Who connects to what hosts a and b listen on for others: ssh's port, that of the plan, all others."""
    found: dict[str, set[bool]] = {}
    plan = read_plan_if_present(fleet.rundir("runs/one")) or read_plan_if_present(fleet.rundir("runs/two"))
    assert plan is not None
    for name in "ab":
        host = fleet.lab.host(name)
        for one in listening(host):
            if one.address == LOOPBACK:
                continue
            kind = "ssh" if one.port == 22 else "plan's port" if one.port == plan.port else "others"
            found.setdefault(kind, set()).add(connects(fleet.lab.host(source), host, one.port))
    return found


def begin(fleet: Fleet, corpus: Path, out: str, *flags: str) -> None:
    """Start a run, and wait until both hosts take steps."""
    fleet.ok("train", "--data", str(corpus), *FLAGS, "--out", out, "--detach", *flags)
    folders = [fleet.there(out, name) / "steps" for name in "ab"]
    wait_until(lambda: all(any(path.stat().st_size for path in folder.glob("*")) for folder in folders), "steps")


@exhaustive
def test_stranger_connects_to_all_ports_without_firewall(fleet: Fleet, corpus: Path) -> None:
    begin(fleet, corpus, "runs/one")
    try:
        assert reached(fleet, "stranger") == {"ssh": {True}, "plan's port": {True}, "others": {True}}
    finally:
        fleet.run("stop", "--now", "runs/one")


@exhaustive
def test_stranger_connects_only_to_ssh_with_firewall(fleet: Fleet, corpus: Path, commands: dict[str, str]) -> None:
    refused = fleet.run("train", "--data", str(corpus), *FLAGS, "--out", "runs/two", "--private")
    assert refused.returncode == 1
    for name, command in commands.items():
        assert f"net.private  {name}: anybody who reaches" in refused.stderr
        assert command in refused.stderr
        fleet.lab.host(name).exec(["sh", "-c", command])
    told = json.loads(fleet.ok("doctor", "--private", "--quick", "--json").stdout)["findings"]
    stand = [one for one in told if one["check"] == "net.private"]
    assert {(one["host"], one["severity"]) for one in stand} == {("a", "info"), ("b", "info")}
    assert all(f"nft delete table inet {NFT_TABLE}" in one["evidence"] for one in stand)
    begin(fleet, corpus, "runs/two", "--private")
    try:
        assert reached(fleet, "stranger") == {"ssh": {True}, "plan's port": {False}, "others": {False}}
        assert reached(fleet, "b")["plan's port"] == {True}
    finally:
        fleet.run("stop", "--now", "runs/two")
