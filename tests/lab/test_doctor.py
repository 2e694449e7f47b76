"""`evener doctor` names each fault of emulated hosts and has no finding for what is healthy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.core.cluster.fleet_file import Fleet, load_fleet
from evener.core.run.trust import trust_fleet
from evener.doctor.preflight import PreflightReport, run_preflight
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec
from evener.ssh.session import connect
from evener.ssh.transport import CONNECT_TIMEOUT_S
from tests.conftest import SlowedDown, slowdown
from tests.lab.conftest import MakeLab, wait_until
from tests.tiers import exhaustive, exhaustively

OF_THIS_MACHINE = {"version.evener", "dtype.slow"}  # somebody may edit the code meanwhile; few processors have bf16


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> EmulatedLab:
    """Two hosts with what a real one has beside its network card."""
    decoys = ("docker0", "tailscale0", "wlan0")
    spec = HostSpec(rate="1Gbit", more_interfaces=decoys)
    return make_lab(a=spec, b=spec)


def fleet_of(lab: EmulatedLab) -> Fleet:
    assert lab.state.fleet_file is not None
    return load_fleet(lab.state.fleet_file)


def look(fleet: Fleet, *, quick: bool = True) -> PreflightReport:
    trust_fleet(fleet)
    with connect(fleet) as (sessions, errors):
        return run_preflight(fleet, sessions, errors, quick=quick)


def told(found: PreflightReport) -> list[tuple[str, str, str | None, str | None]]:
    """Return the findings, without what is right of a lab with more hosts than the machine has cores."""
    of_lab = {"cpu.oversubscribed"} if len(found.hosts) > len(os.sched_getaffinity(0)) else set()
    return [(one.check, one.severity, one.host, one.peer) for one in found.findings
            if one.check not in OF_THIS_MACHINE | of_lab]  # fmt: skip


def changed(fleet: Fleet, name: str, **more: Any) -> Fleet:
    return msgspec.structs.replace(
        fleet, hosts=fleet.hosts | {name: msgspec.structs.replace(fleet.hosts[name], **more)}
    )


def test_healthy_fleet_has_no_findings_and_uses_wired_interface(lab):
    found = look(fleet_of(lab), quick=False)
    assert told(found) == []
    assert {name: (way.interface, way.address) for name, way in found.interfaces.items()} == {
        name: ("eth0", lab.host(name).address) for name in "ab"
    }
    for source, target in ("ab", "ba"):
        pair = found.find_pair(source, target)
        assert pair is not None
        assert pair.is_open
        assert pair.path_mtu == 1500
        assert pair.goodput_Bps is not None
        assert 0.5 * 125e6 < pair.goodput_Bps < 1.02 * 125e6  # a link of 1 Gbit/s


def test_quick_doctor_takes_less_than_1_5_s(lab):
    fleet = fleet_of(lab)
    with connect(fleet) as (sessions, errors):
        took = [run_preflight(fleet, sessions, errors, quick=True).took_s / slowdown() for _ in range(5)]
    assert min(took) < 1.5


@pytest.mark.parametrize(("name", "severity"), [("a", "error"), *exhaustively(("b", "warning"))])
def test_closed_ephemeral_port_is_reported_with_pair_and_direction(lab, name, severity):
    """Gloo lets the greater address call: a's ports must be open, b's may be closed; see the test below."""
    host, peer = lab.host(name), "b" if name == "a" else "a"
    host.set_firewall(["tcp dport { 22, 29500 } accept", "meta l4proto { tcp, udp } drop"])
    try:
        found = look(fleet_of(lab))
        assert told(found) == [("net.firewall", severity, name, peer)]
        evidence = found.findings[0].evidence
        assert (
            f"{peer} cannot reach {name} at {host.address}: connected to ssh's port 22, connected to port 29500"
            in evidence
        )
        assert "timed out on ephemeral ports" in evidence
        command = found.findings[0].fix.partition(": ")[2]
        host.exec(["sh", "-c", command])
        assert told(look(fleet_of(lab))) == []  # the fix mends it as it stands
    finally:
        host.set_firewall([])


ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print("sum", ones.item(), flush=True)
os._exit(0)  # Gloo's threads may still let go of a tensor
"""
CALLS = ":[0-9A-F]{4} [0-9A-F]{8}:(?!733C|0016)[0-9A-F]{4} 02"  # of /proc/net/tcp: unanswered, neither 29500 nor ssh


@pytest.mark.parametrize("closed", ["a", *exhaustively("b")])
def test_gloo_connects_from_greater_address_to_smaller(lab, closed):
    """What the severity of net.firewall rests on: with b's ephemeral ports closed a run starts, with a's it hangs."""
    lab.host(closed).set_firewall(["tcp dport { 22, 29500 } accept", "meta l4proto tcp drop"])
    env = [
        "env",
        "WORLD_SIZE=2",
        f"MASTER_ADDR={lab.host('a').address}",
        "MASTER_PORT=29500",
        "GLOO_SOCKET_IFNAME=eth0",
    ]
    ranks = [
        lab.host(name).popen([*env, f"RANK={rank}", sys.executable, "-c", ALL_REDUCE], stdout=subprocess.PIPE)
        for rank, name in enumerate("ab")
    ]
    try:
        if closed == "b":
            assert [rank.communicate(timeout=60)[0] for rank in ranks] == [b"sum 2.0\n"] * 2
        else:
            table = ["cat", "/proc/net/tcp"]
            wait_until(lambda: bool(re.search(CALLS, lab.host("b").exec(table).stdout)), "b does not call a")
            assert re.search(CALLS, lab.host("a").exec(table).stdout) is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        lab.host("a").exec(["pkill", "-9", "-f", "init_process_group"], check=False)
        lab.host("b").exec(["pkill", "-9", "-f", "init_process_group"], check=False)
        lab.host(closed).set_firewall([])


def test_a_closed_rendezvous_port_is_named(lab):
    lab.host("a").set_firewall(["tcp dport 29500 reject with tcp reset"])
    try:
        found = look(fleet_of(lab))
        assert told(found) == [("net.firewall", "error", "a", "b")]
        assert "was refused on port 29500" in found.findings[0].evidence
    finally:
        lab.host("a").set_firewall([])


def test_mutually_unreachable_hosts_are_not_reported_as_firewall(lab):
    a, b = lab.host("a"), lab.host("b")
    try:
        a.set_firewall([f"ip saddr {b.address} drop"])
        b.set_firewall([f"ip saddr {a.address} drop"])
        found = look(fleet_of(lab))
        assert ("net.wrong-interface", "error", "a", "b") in told(found) or found.interfaces["a"].interface != "eth0"
    finally:
        a.set_firewall([])
        b.set_firewall([])


def test_small_path_mtu_is_reported_with_its_size(lab):
    b = lab.host("b")
    b.set_mtu(1500, path_mtu=1400)
    try:
        found = look(fleet_of(lab))
        assert told(found) == [("net.mtu", "error", "a", "b")]
        assert "packets of up to 1400 bytes arrive" in found.findings[0].evidence
    finally:
        b.set_mtu(1500)


RATES = [
    ({"rate": "100Mbit"}, "net.slow-link"),
    ({"up": "100Mbit", "down": "1Gbit"}, "net.asymmetric"),
    ({"rate": "1Gbit", "policed": True}, "net.stack-loss"),
]


@exhaustive
@pytest.mark.parametrize(("rates", "check"), RATES)
def test_slow_asymmetric_or_lossy_link_is_reported(lab, rates, check):
    b = lab.host("b")
    b.set_rate(**rates)
    try:
        assert {one[0] for one in told(look(fleet_of(lab), quick=False))} == {check}
    finally:
        b.set_rate("1Gbit")


def test_interface_linked_at_100_mbit_is_reported(lab):
    path = "/sys/class/net/eth0/speed"
    lab.host("b").override_file(path, "100\n")
    try:
        assert told(look(fleet_of(lab))) == [("net.slow-link", "warning", "b", None)]
    finally:
        lab.host("b").override_file(path, None)


def test_process_holding_rendezvous_port_is_named(lab):
    code = "import socket, sys; s = socket.create_server(('', 29500)); print(1, flush=True); sys.stdin.read()"
    holder = lab.host("a").popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        found = look(fleet_of(lab))
        assert told(found) == [("port.in-use", "warning", "a", None)]
        assert "of root" in found.findings[0].evidence
    finally:
        holder.stdin.close()
        holder.wait()


def test_port_of_a_live_run_is_left_to_it(lab):
    """The run's agent restarts, so nobody listens; the survey must not listen there either."""
    code = """
import fcntl, json, pathlib, sys
host = pathlib.Path.home() / ".evener/runs/live/host"
host.mkdir(parents=True)
(host / "spec.json").write_text(json.dumps({"has_agent": True, "argv": []}))
(host / "agent.json").write_text(json.dumps({"port": 29500, "key": "secret"}))
lock = (host / "lock").open("w")
fcntl.flock(lock, fcntl.LOCK_EX)
print(1, flush=True)
sys.stdin.read()
"""
    run = lab.host("b").popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        run.stdout.readline()
        found = look(fleet_of(lab))
        tried = {target: {one.what for one in found.find_pair(source, target).tries} for source, target in ("ab", "ba")}
        assert tried["a"] - tried["b"] == {"rendezvous"}
        assert told(found) == []
    finally:
        run.stdin.close()
        run.wait()


def test_orphaned_rank_is_stale_and_its_fix_kills_it(lab):
    b = lab.host("b")
    b.exec(["sh", "-c", "echo 'import time; time.sleep(600)' > train.py"])
    start = f"RANK=0 WORLD_SIZE=2 MASTER_ADDR=a setsid {sys.executable} train.py"
    b.exec(["sh", "-c", f"({start} </dev/null >/dev/null 2>&1 &)"])
    found: list[PreflightReport] = []
    wait_until(lambda: not found.append(look(fleet_of(lab))) and bool(told(found[-1])), "nothing was found")
    assert told(found[-1]) == [("proc.stale", "warning", "b", None)]
    b.exec(["sh", "-c", found[-1].findings[0].fix.partition(": ")[2]])
    wait_until(lambda: told(look(fleet_of(lab))) == [], "the fix did not end it")


def test_torchrun_started_over_ssh_is_reported_as_attached(lab):
    b = lab.host("b")
    b.exec(["sh", "-c", "echo 'import sys; sys.stdin.read()' > torchrun"])
    by_hand = subprocess.Popen(lab.ssh_argv("b", sys.executable, "torchrun", "--nnodes=2"), stdin=subprocess.PIPE)
    try:
        found: list[PreflightReport] = []
        wait_until(lambda: not found.append(look(fleet_of(lab))) and bool(told(found[-1])), "nothing was found")
        assert told(found[-1]) == [("tty.attached", "warning", "b", None)]
    finally:
        assert by_hand.stdin is not None
        by_hand.stdin.close()
        by_hand.wait()


HOSTS_FILES = [
    ("b", "a", None, [("net.unresolvable", "warning", "b", "a")]),
    ("b", "a", "fd77::1", [("net.family-mismatch", "warning", "b", "a")]),
    ("b", "a", "127.0.1.1", [("net.rendezvous-loopback", "warning", "b", "a")]),
    ("a", "a", "127.0.1.1", [("net.loopback-hostname", "warning", "a", None)]),
    ("a", "a", "172.17.0.1", [("net.wrong-interface", "warning", "a", None)]),
    ("a", "a", "100.64.0.1", [("net.overlay", "warning", "a", None)]),
]  # fmt: skip


@pytest.mark.parametrize(("on", "name", "address", "expected"), HOSTS_FILES, ids=[row[3][0][0] for row in HOSTS_FILES])
def test_misleading_addresses_in_etc_hosts_are_reported(lab, on, name, address, expected):
    host = lab.host(on)
    before = host.exec(["cat", "/etc/hosts"]).stdout
    lines = [line for line in before.splitlines() if line.split()[-1] != name]
    lines += [f"{address} {name}"] if address else []
    try:
        host.exec(["tee", "/etc/hosts"], stdin="".join(f"{line}\n" for line in lines))
        assert told(look(fleet_of(lab))) == expected
    finally:
        host.exec(["tee", "/etc/hosts"], stdin=before)


FLEETS = [
    ({"interface": "eth7"}, [("net.wrong-interface", "error", "b", None)]),
    ({"interface": "^lo"}, [("env.interface-syntax", "error", "b", None)]),
    ({"interface": "tailscale0"}, [("net.overlay", "warning", "b", None), ("net.overlay", "warning", "b", None)]),
    ({"threads": 4096}, [("cpu.oversubscribed", "warning", "b", None)]),
    ({"devices": "cuda"}, [("gpu.missing", "error", "b", None)]),
    ({"python": "/nowhere/python"}, [("version.python", "error", "b", None)]),
    ({"workdir": "/proc/evener"}, [("disk.space", "error", "b", None)]),
]  # fmt: skip


@pytest.mark.parametrize(("more", "expected"), FLEETS, ids=[next(iter(row[0].items()))[1] for row in FLEETS])
def test_wrong_fleet_file_entries_are_reported(lab, more, expected):
    if more == {"interface": "tailscale0"}:
        found = look(changed(fleet_of(lab), "b", **more))
        assert ("net.overlay", "warning", "b", None) in told(found)
        assert found.interfaces["b"].interface == "tailscale0"
        return
    found = told(look(changed(fleet_of(lab), "b", **more)))
    assert [row for row in found if row[1] != "info"] == expected


def test_one_host_under_two_names_is_reported(lab):
    fleet = fleet_of(lab)
    twice = msgspec.structs.replace(fleet, hosts=fleet.hosts | {"c": fleet.hosts["b"]})
    assert ("rank.duplicate", "error", "c", "b") in told(look(twice))


def test_wireless_low_memory_and_loopback_hostname_are_reported(make_lab):
    lab = make_lab(a=HostSpec(loopback_hostname=True), b=HostSpec(interface="wlan0", memory="700MB"))
    try:
        assert set(told(look(fleet_of(lab)))) == {
            ("net.loopback-hostname", "warning", "a", None),
            ("net.wireless", "warning", "b", None),
            ("mem.space", "warning", "b", None),
        }
    finally:
        lab.down()


def test_offline_hosts_cost_one_timeout_in_total(make_lab):
    lab, off = make_lab(**{name: HostSpec() for name in "abcdefgh"}), "cdefgh"
    try:
        for name in off:
            lab.host(name).kill()
        began = time.monotonic()
        found = look(fleet_of(lab))
        assert time.monotonic() - began < len(off) * CONNECT_TIMEOUT_S / 2  # one after the other they cost twice that
        unreachable = [("ssh.unreachable", "error", name, None) for name in off]
        assert [
            one for one in told(found) if one[0] != "cpu.oversubscribed"
        ] == unreachable  # eight hosts may share cores
        assert set(found.interfaces) == {"a", "b"}
        assert len(found.pairs) == 2
    finally:
        lab.down()


@exhaustive
def test_a_link_slower_than_all_others_is_one_finding(make_lab):
    lab = make_lab(**{name: HostSpec(rate="1Gbit") for name in "abcde"})
    try:
        lab.host("c").set_rate("100Mbit")
        assert told(look(fleet_of(lab), quick=False)) == [("net.slow-link", "warning", "c", None)]
    finally:
        lab.down()


@exhaustive
def test_doctor_checks_sixteen_hosts_within_half_a_minute(make_lab):
    lab = make_lab(**{name: HostSpec(rate="1Gbit") for name in "abcdefghijklmnop"})
    try:
        with SlowedDown() as other:
            found = look(fleet_of(lab), quick=False)
        assert told(found) == []
        assert len(found.pairs) == 16 * 15
        assert found.took_s < 30 * other.factor
    finally:
        lab.down()


# --- the verb ------------------------------------------------------------------------------------------------------


def evener(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "evener.cli.main", *words], cwd=cwd, capture_output=True, text=True,
                          check=False)  # fmt: skip


def test_doctor_prints_table_and_fix_and_sets_exit_status(lab, tmp_path):
    command = [str(Path(sys.executable).parent / "evener"), "doctor", "--quick", "--fleet", str(lab.state.fleet_file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "these machines can train together" in done.stdout
    assert all(len(line.rstrip()) <= 80 for line in done.stdout.splitlines())
    lab.host("a").set_firewall(["tcp dport 22 accept", "drop"])
    try:
        done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        found = json.loads(done.stdout)
        assert [(one["check"], one["severity"], one["host"], one["peer"]) for one in found["findings"]
                if one["check"] not in OF_THIS_MACHINE] == [("net.firewall", "error", "a", "b")]  # fmt: skip
        assert set(found["findings"][0]) == {"check", "severity", "host", "peer", "evidence", "fix"}
        assert set(found["hosts"]) == {"a", "b"}
        assert len(found["pairs"]) == 2
    finally:
        lab.host("a").set_firewall([])
