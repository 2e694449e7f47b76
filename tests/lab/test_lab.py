"""Emulated hosts behave like real ones and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import evener
from evener.core.base.errors import EvenerError, UsageError
from evener.lab import cgroup, lab_requirements, state
from evener.lab.emulated_lab import EmulatedLab, take_down
from evener.lab.host import LabHost
from evener.lab.lab_spec import HostSpec, LabSpec, default_host_names, parse_bps, read_lab_spec, with_own_cores
from tests.in_process import run_verb
from tests.lab.conftest import MakeLab, wait_until
from tests.tiers import exhaustive, exhaustively

PAYLOAD = 1448 / 1514  # of an Ethernet frame of 1500 bytes, with TCP's timestamps; HTB counts the rest too
ANSWERED, NO_ANSWER = "answered", "no answer"

# It is the link that is measured: where the system allows it, both ends go before whatever else keeps the cores busy.
FIRST = """
import contextlib, os
with contextlib.suppress(PermissionError):
    os.nice(-20)
"""
# Receives until the sender is done, then says how many bits a second came. Counts from the first byte.
RECEIVE = (
    FIRST
    + """
import socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
peer, _ = server.accept()
received = first = len(peer.recv(65536)); began = time.monotonic()
while block := peer.recv(1 << 20):
    received += len(block)
print((received - first) * 8 / (time.monotonic() - began + 1e-9))
"""
)
SEND = (
    FIRST
    + """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
left = int(sys.argv[3])
while left > 0:
    left -= peer.send(bytes(min(left, 1 << 20)))
"""
)
ACCEPT = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
while True: server.accept()
"""
CONNECT = f"""
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.5)
    print("{ANSWERED}")
except TimeoutError:
    print("{NO_ANSWER}")
"""
BUSY = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() < began + 1: pass
print((time.process_time() - used) / (time.monotonic() - began))
"""


def python(host: LabHost, source: str, *args: object) -> str:
    return host.exec([sys.executable, "-c", source, *map(str, args)]).stdout.strip()


def listen(host: LabHost, source: str, port: int) -> subprocess.Popen[str]:
    """A program in the host that listens on a port, and says so in its first line."""
    process = host.popen([sys.executable, "-c", source, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def goodput_bps(sender: LabHost, receiver: LabHost, num_bytes: int, port: int = 5201) -> float:
    """What a TCP connection carries."""
    listening = listen(receiver, RECEIVE, port)
    python(sender, SEND, receiver.address, port, num_bytes)
    out, _ = listening.communicate(timeout=60)
    return float(out)


def resent_segments(host: LabHost) -> int:
    """TCP's own count of them, since the host was made."""
    return int(host.exec(["sh", "-c", "awk '/^Tcp: [0-9]/ {print $13}' /proc/net/snmp"]).stdout)


def assert_rate(sender: LabHost, receiver: LabHost, rate: str) -> None:
    """Within 5 % of what the rate gives. Another test on the same cores may cost a try: a sender that waits for a core
    sends less, and a receiver that does finds much of it there already when it begins to count."""
    expected = parse_bps(rate) * PAYLOAD
    tries: list[float] = []
    while not tries or (abs(tries[-1] / expected - 1) > 0.05 and len(tries) < 5):
        tries.append(goodput_bps(sender, receiver, int(expected / 8 * 0.8)))
    assert 0.95 < tries[-1] / expected < 1.05, [f"{bps / 1e6:.1f} Mbit/s" for bps in tries]


def ssh(lab: EmulatedLab, host: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    argv = lab.ssh_argv(host, command)
    return subprocess.run([argv[0], *options, *argv[1:]], capture_output=True, text=True, timeout=60, check=False)


def evener_cli(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from evener.cli.main import main; sys.argv[0] = 'evener'; main()"
    argv = [sys.executable, "-c", code, *args]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


class TestAHost:
    def test_host_has_own_name_processes_and_files(self, pair: EmulatedLab) -> None:
        for host in pair.hosts:
            assert host.exec(["hostname"]).stdout == f"{host.name}\n"
            assert host.exec(["cat", "/etc/hostname"]).stdout == f"{host.name}\n"
            assert "init.py" in host.exec(["cat", "/proc/1/cmdline"]).stdout
            for folder in ("/tmp", "/dev/shm"):
                with tempfile.NamedTemporaryFile(dir=folder) as ours:
                    assert Path(ours.name).name not in host.exec(["ls", "-a", folder]).stdout.split()
            assert set(host.exec(["ls", "/sys/class/net"]).stdout.split()) == {"lo", "eth0"}
        inside = {int(pid) for pid in pair.host("a").exec(["sh", "-c", "cd /proc; echo [0-9]*"]).stdout.split()}
        assert len(inside) < 20  # its own alone, whatever their numbers
        assert os.getpid() not in inside

    def test_hosts_resolve_each_other_by_name(self, pair: EmulatedLab) -> None:
        for host in pair.hosts:
            named = python(host, "import socket; print(*[socket.gethostbyname(n) for n in ('a', 'b')])")
            assert named == "10.77.0.1 10.77.0.2"

    def test_change_of_etc_hosts_stays_on_its_host(self, pair: EmulatedLab) -> None:
        before = Path("/etc/hosts").read_bytes()
        a, b = pair.hosts
        a.exec(["sed", "-i", "$a 10.9.9.9 elsewhere", "/etc/hosts"])  # replaces the file, which a bind mount forbids
        assert python(a, "import socket; print(socket.gethostbyname('elsewhere'))") == "10.9.9.9"
        assert "elsewhere" not in b.exec(["cat", "/etc/hosts"]).stdout
        assert Path("/etc/hosts").read_bytes() == before

    def test_host_is_reachable_by_ipv4_and_ipv6(self, pair: EmulatedLab) -> None:
        a, b = pair.hosts
        assert python(a, CONNECT, b.address, 22) == ANSWERED
        assert python(a, CONNECT, b.address6, 22) == ANSWERED

    def test_exec_passes_input_and_status(self, pair: EmulatedLab) -> None:
        a = pair.host("a")
        assert a.exec(["cat"], stdin="through").stdout == "through"
        assert a.exec(["sh", "-c", "exit 7"], check=False).returncode == 7
        with pytest.raises(EvenerError, match=r"host a: .*exit status 7"):
            a.exec(["sh", "-c", "exit 7"])
        with pytest.raises(EvenerError, match="timed out after 1 s"):
            a.exec(["sleep", "60"], timeout_s=1)
        wait_until(lambda: len(a.pids()) == 2, "sleep is still there")

    def test_file_content_can_be_overlaid_on_one_host(self, pair: EmulatedLab) -> None:
        a, b = pair.hosts
        speed = "/sys/class/net/eth0/speed"
        real = a.exec(["cat", speed]).stdout
        a.override_file(speed, "100\n")
        assert a.exec(["cat", speed]).stdout == "100\n"
        assert ssh(pair, "a", f"cat {speed}").stdout == "100\n"
        assert b.exec(["cat", speed]).stdout == real
        a.override_file(speed, None)
        assert a.exec(["cat", speed]).stdout == real

    def test_killing_init_ends_host(self, make_lab: MakeLab) -> None:
        lab = make_lab(a=HostSpec(), b=HostSpec())
        a, b = lab.hosts
        a.popen(["sleep", "600"])
        wait_until(lambda: len(a.pids()) == 3, "sleep did not start")
        pids = a.pids()
        a.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids), "a process of a dead host runs on")
        assert b.is_alive()
        assert not lab.is_alive()
        with pytest.raises(EvenerError, match=r"host a of lab .* is dead"):
            a.exec(["true"])


class TestSsh:
    def test_fleet_file_suffices_for_ssh(self, pair: EmulatedLab) -> None:
        fleet = tomllib.loads(Path(pair.state.fleet_file or "").read_text())["hosts"]
        assert set(fleet) == {"a", "b"}
        assert set(fleet["a"]) == {"address", "user", "identity_file", "ssh_options", "python"}
        done = ssh(pair, "b", "hostname; echo $HOME; echo $PATH; exit 3")
        name, home, path = done.stdout.splitlines()
        assert (done.returncode, name, home) == (3, "b", str(pair.host("b").home))
        assert path.split(":")[0] == "/usr/local/sbin"
        assert path.split(":")[-1] == "/bin"

    def test_ssh_allocates_a_terminal(self, pair: EmulatedLab) -> None:
        assert ssh(pair, "a", "tty", "-tt").stdout.strip() == "/dev/pts/0"

    def test_a_changed_host_key_is_refused(self, pair: EmulatedLab, tmp_path: Path) -> None:
        forged = tmp_path / "known_hosts"
        key_b = (pair.path / "hosts" / "b" / "host_key.pub").read_text()
        forged.write_text(f"{pair.host('a').address} {key_b}")
        done = ssh(pair, "a", "true", "-o", f"UserKnownHostsFile={forged}")
        assert done.returncode == 255
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr

    def test_ssh_traffic_crosses_the_link(self, pair: EmulatedLab) -> None:
        a = pair.host("a")
        before = a.interface_counters()
        assert len(ssh(pair, "a", "head -c 3000000 /dev/zero").stdout) == 3_000_000
        sent = a.interface_counters().tx_bytes - before.tx_bytes
        assert 3_000_000 < sent < 3_300_000

    @exhaustive
    def test_link_down_cuts_connection(self, pair: EmulatedLab) -> None:
        a = pair.host("a")
        a.set_link_up(False)
        done = ssh(pair, "a", "true")
        assert done.returncode == 255
        assert "ssh: connect to host 10.77.0.1 port 22: " in done.stderr
        assert a.exec(["cat", "/sys/class/net/eth0/carrier"]).stdout == "0\n"
        a.set_link_up(True)
        wait_until(lambda: ssh(pair, "a", "true").returncode == 0, "no ssh although the link is up again")


class TestTheLink:
    @pytest.mark.parametrize("rate", ["100Mbit", *exhaustively("1Gbit")])
    def test_sender_throughput_equals_rate_of_its_link(self, pair: EmulatedLab, rate: str) -> None:
        for host in pair.hosts:
            host.set_rate(rate)
        assert_rate(pair.host("a"), pair.host("b"), rate)

    def test_each_direction_has_its_own_rate(self, pair: EmulatedLab) -> None:
        a, b = pair.hosts
        b.set_rate(None)
        a.set_rate(up="50Mbit", down="400Mbit")
        assert_rate(a, b, "50Mbit")
        assert_rate(b, a, "400Mbit")
        a.set_rate(None)

    def test_interface_counters_count_sent_bytes(self, pair: EmulatedLab) -> None:
        a, b = pair.hosts
        before_a, before_b, resent_before = a.interface_counters(), b.interface_counters(), resent_segments(a)
        goodput_bps(a, b, 20_000_000)
        after_a, resent = a.interface_counters(), resent_segments(a) - resent_before
        sent, payload = after_a.tx_bytes - before_a.tx_bytes, after_a.payload_bytes - before_a.payload_bytes
        received = b.interface_counters().rx_bytes - before_b.rx_bytes
        expected = 20_000_000 + 1448 * resent  # a busy machine answers late, and TCP sends the last segments again
        most = expected * 1514 / 1448  # a header for every packet; of large segments, one for each of those
        assert 20_000_000 < sent < 1.002 * most
        assert abs(payload - expected) < 0.002 * expected
        assert abs(received / sent - 1) < 0.01

    @exhaustive
    def test_policer_drops_packets_that_a_queue_would_hold(self, pair: EmulatedLab) -> None:
        a, b = pair.hosts

        def resent() -> int:
            before = resent_segments(a)
            goodput_bps(a, b, 10_000_000)
            return resent_segments(a) - before

        b.set_rate("200Mbit")
        by_queue = min(resent() for _ in range(3))  # a sender that waited for a core sends at once, and may fill it
        b.set_rate("200Mbit", policed=True)
        by_policer = resent()
        b.set_rate(None)
        assert by_policer > 1000  # of 6,900
        assert by_policer > 5 * by_queue

    def test_set_mtu_changes_mtu_of_interface(self, pair: EmulatedLab) -> None:
        a = pair.host("a")
        a.set_mtu(1400)
        assert a.exec(["cat", "/sys/class/net/eth0/mtu"]).stdout == "1400\n"
        a.set_mtu(1500)

    @exhaustive
    def test_large_packets_are_dropped_on_narrow_path(self, pair: EmulatedLab) -> None:
        a, b = pair.hosts
        a.set_mtu(1500, path_mtu=1400)
        assert ssh(pair, "a", "head -c 100000 /dev/zero | wc -c").stdout == "100000\n"  # the desk knows the narrow way
        for sender, receiver in ((a, b), (b, a)):
            listening = listen(receiver, RECEIVE, 5202)
            python(sender, SEND, receiver.address, 5202, 1000)  # a small message passes
            assert listening.wait(60) == 0
            listening = listen(receiver, RECEIVE, 5202)
            before = receiver.interface_counters().rx_bytes
            sending = sender.popen([sys.executable, "-c", SEND, receiver.address, "5202", "10000000"])
            with pytest.raises(subprocess.TimeoutExpired):
                sending.wait(1.5)
            assert receiver.interface_counters().rx_bytes - before < 10_000
            for process in (sending, listening):
                process.kill()
                process.wait()
        a.set_mtu(1500)
        assert goodput_bps(a, b, 10_000_000) > 0

    def test_a_firewall_blocks_one_direction(self, pair: EmulatedLab) -> None:
        a, b = pair.hosts
        b.set_firewall([f"ip saddr {a.address} tcp dport != 22 drop"])
        servers = [listen(host, ACCEPT, 29500) for host in (a, b)]
        assert python(a, CONNECT, b.address, 29500) == NO_ANSWER
        assert python(a, CONNECT, b.address, 22) == ANSWERED
        assert python(b, CONNECT, a.address, 29500) == ANSWERED
        b.set_firewall([])
        assert python(a, CONNECT, b.address, 29500) == ANSWERED
        for server in servers:
            server.kill()
            server.wait()
        wait_until(lambda: len(a.pids()) == len(b.pids()) == 2, "a killed program runs on in its host")

    def test_invalid_firewall_rule_is_a_one_line_error(self, pair: EmulatedLab) -> None:
        with pytest.raises(EvenerError, match=r"host a: .*nft -f -: exit status 1") as raised:
            pair.host("a").set_firewall(["tpc dport 22 drop"])
        assert "tpc" in raised.value.output


@pytest.fixture(scope="module")
def limited(make_lab: MakeLab) -> EmulatedLab:
    if os.geteuid() != 0:
        pytest.skip("cgroups are root's")
    core = min(os.sched_getaffinity(0))
    return make_lab(half=HostSpec(cpus=0.5, memory="200MB"), pinned=HostSpec(cores=(core,)), free=HostSpec())


class TestLimits:
    @pytest.mark.parametrize("way", ["ssh", *exhaustively("exec")])
    def test_busy_loop_gets_its_cpu_share(self, limited: EmulatedLab, way: str) -> None:
        half, free = limited.host("half"), limited.host("free")
        argv = half.argv([sys.executable, "-c", BUSY]) if way == "exec" else limited.ssh_argv(
            "half", f"{sys.executable} -c '{BUSY}'")  # fmt: skip
        tries: list[tuple[float, float]] = []
        while not tries or (tries[-1][0] < 0.9 * min(0.5, tries[-1][1]) and len(tries) < 5):
            beside = free.popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
            got = float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
            tries.append((got, float(beside.communicate(timeout=60)[0])))
        share, others = tries[-1]  # where this machine is busy nobody gets half a core, but each gets the same
        assert 0.9 * min(0.5, others) < share < 0.55, tries

    def test_usable_cores_follow_cpu_limit_and_pinning(self, limited: EmulatedLab) -> None:
        cores = "from evener.core.cluster.host_info import usable_cores; print(usable_cores())"
        everything = len(os.sched_getaffinity(0))
        found = {host.name: int(python(host, cores)) for host in limited.hosts}
        assert found == {"half": 1, "pinned": 1, "free": everything}
        assert ssh(limited, "pinned", "nproc").stdout == "1\n"

    def test_memory_of_a_host_follows_its_limit(self, limited: EmulatedLab) -> None:
        size = "from evener.core.cluster.host_info import local_host_info; print(local_host_info().memory_bytes)"
        found = {host.name: int(python(host, size)) for host in limited.hosts}
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert found == {"half": pytest.approx(200e6, rel=1e-4), "pinned": machine, "free": machine}

    def test_memory_limit_is_enforced(self, limited: EmulatedLab) -> None:
        done = limited.host("half").exec([sys.executable, "-c", "bytearray(b'x') * 300_000_000"], check=False)
        assert done.returncode != 0
        assert limited.host("free").exec([sys.executable, "-c", "bytearray(b'x') * 300_000_000"]).returncode == 0


@pytest.fixture(scope="module")
def decoys(make_lab: MakeLab) -> EmulatedLab:
    a = HostSpec(more_interfaces=("docker0", "tun0", "wlan0"), loopback_hostname=True)
    return make_lab(a=a, b=HostSpec(interface="enp3s0", more_interfaces=("tailscale0", "wlan0")))


class TestDecoys:
    def test_decoy_interfaces_have_kind_and_address_of_real_ones(self, decoys: EmulatedLab) -> None:
        a, b = decoys.hosts
        found = {one["ifname"]: one for one in json.loads(a.exec(["ip", "-json", "-details", "address"]).stdout)}
        assert set(found) == {"lo", "eth0", "docker0", "tun0", "wlan0"}
        assert found["docker0"]["linkinfo"]["info_kind"] == "bridge"
        assert found["tun0"]["linkinfo"]["info_kind"] == "tun"
        addresses = {name: one["addr_info"][0]["local"] for name, one in found.items()}
        assert addresses["docker0"] == "172.17.0.1"
        assert addresses["tun0"] == "100.64.0.1"
        assert addresses["wlan0"] == "10.78.0.1"
        assert "enp3s0" in b.exec(["ls", "/sys/class/net"]).stdout
        assert python(a, "import os; print(os.path.isdir('/sys/class/net/wlan0/wireless'))") == "True"
        assert a.exec(["cat", "/sys/class/net/wlan0/operstate"]).stdout == "up\n"

    def test_overlay_traffic_crosses_the_link(self, decoys: EmulatedLab) -> None:
        a, b = decoys.hosts
        before = a.interface_counters().tx_bytes
        listening = listen(b, RECEIVE, 5201)
        python(a, SEND, "100.64.0.2", 5201, 2_000_000)
        listening.communicate(timeout=60)
        assert a.interface_counters().tx_bytes - before > 2_000_000
        assert a.interface_counters("tun0").tx_bytes > 2_000_000

    def test_traffic_to_address_of_second_link_uses_that_link(self, decoys: EmulatedLab) -> None:
        a, b = decoys.hosts
        before = a.interface_counters().tx_bytes
        listening = listen(b, RECEIVE, 5201)
        python(a, SEND, "10.78.0.2", 5201, 2_000_000)
        listening.communicate(timeout=60)
        assert a.interface_counters().tx_bytes - before < 100_000
        assert a.interface_counters("wlan0").tx_bytes > 2_000_000

    def test_loopback_hostname_resolves_like_debian(self, decoys: EmulatedLab) -> None:
        assert python(decoys.host("a"), "import socket; print(socket.gethostbyname('a'))") == "127.0.1.1"
        assert python(decoys.host("b"), "import socket; print(socket.gethostbyname('a'))") == "10.77.0.1"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def links() -> set[str]:
    """The network interfaces of this machine, without other tests' (there are none: labs have their own)."""
    return set(os.listdir("/sys/class/net"))


def traces(lab: EmulatedLab) -> list[str]:
    """What is left of a lab."""
    found = [str(path) for path in cgroup.ROOT.glob(f"**/{cgroup.SUBTREE}/{lab.name}")]
    found += [str(process) for process in state.find_processes(lab.path)]
    return found + [str(path) for path in (lab.path, Path(lab.state.fleet_file or "")) if path.exists()]


class TestNothingStays:
    def test_down_removes_every_trace(self, make_lab: MakeLab) -> None:
        before, mounts = links(), Path("/proc/mounts").read_text()
        lab = make_lab(a=HostSpec(cpus=1, more_interfaces=("docker0", "tun0")), b=HostSpec(rate="1Gbit"))
        pids = [pid for host in lab.hosts for pid in host.pids()] + [lab.state.controller.pid]
        assert len(traces(lab)) >= 5
        assert links() == before
        lab.down()
        assert traces(lab) == []
        wait_until(lambda: not any(alive(pid) for pid in pids), "a process runs on")
        assert links() == before
        assert Path("/proc/mounts").read_text() == mounts
        lab.down()  # twice does no harm
        assert take_down(lab.name) is False

    @exhaustive
    def test_killed_lab_is_cleaned_by_next_of_same_name(self, make_lab: MakeLab, tmp_path: Path) -> None:
        lab = make_lab(a=HostSpec(cpus=1), b=HostSpec())
        with pytest.raises(EvenerError, match=f"lab {lab.name} is up already: a, b"):
            EmulatedLab.up(LabSpec(name=lab.name))
        lab.host("a").kill()
        again = EmulatedLab.up(LabSpec(name=lab.name, hosts={"x": HostSpec()}), out=tmp_path / "again.toml")
        assert list(again.state.hosts) == ["x"]
        assert not lab.host("b").is_alive()
        again.down()
        assert traces(again) == []

    def test_lab_of_killed_creator_is_cleaned(self, make_lab: MakeLab, tmp_path: Path) -> None:
        name = f"test-{os.getpid()}-half"
        code = f"from evener.lab.emulated_lab import *\nEmulatedLab.up(LabSpec(name={name!r}))"
        maker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        path = state.labs_root() / name
        wait_until(lambda: bool(state.find_processes(path)), "the lab was not begun")
        os.killpg(maker.pid, signal.SIGKILL)
        maker.wait()
        with EmulatedLab.up(LabSpec(name=name)) as lab:
            assert lab.host("a").exec(["hostname"]).stdout == "a\n"
        assert not path.exists()
        assert state.find_processes(path) == []

    @exhaustive
    def test_lab_of_other_evener_version_is_ended(self, make_lab: MakeLab, tmp_path: Path) -> None:
        """From another checkout, or another version's folder: its processes run another file."""
        shutil.copytree(Path(evener.__file__).parent, tmp_path / "evener", ignore=shutil.ignore_patterns("__pycache__"))
        name = f"test-{os.getpid()}-other"
        code = f"from evener.lab.emulated_lab import *\nEmulatedLab.up(LabSpec(name={name!r}))"
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True)
        lab = EmulatedLab.find(name)
        pids = [pid for host in lab.hosts for pid in host.pids()] + [lab.state.controller.pid]
        assert str(tmp_path).encode() in Path(f"/proc/{lab.state.controller.pid}/cmdline").read_bytes()
        lab.down()
        wait_until(lambda: not any(alive(pid) for pid in pids), "a process runs on")

    def test_failed_lab_start_leaves_nothing(self, make_lab: MakeLab) -> None:
        name = f"test-{os.getpid()}-fails"
        with pytest.raises(EvenerError, match="nft"):
            EmulatedLab.up(LabSpec(name=name, hosts={"a": HostSpec(cpus=1, firewall=("nonsense",))}))
        assert not (state.labs_root() / name).exists()
        assert state.find_processes(state.labs_root() / name) == []


class TestWithoutRoot:
    @pytest.fixture
    def user(self, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
        """Run Python as nobody: one that he can reach."""
        if os.geteuid() != 0:
            pytest.skip("every other test of this file runs without root here")
        uid = 65534
        packages = [str(Path(evener.__file__).parents[1]), *(p for p in sys.path if p.endswith("site-packages"))]
        folder = tmp_path_factory.mktemp("nobody")
        folder.chmod(0o777)
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env", "-i", "-C", "/"]
        become += [f"PYTHONPATH={':'.join(packages)}", f"PATH={os.environ['PATH']}"]
        for candidate in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
            argv = [*become, candidate, "-c"]
            tried = subprocess.run(
                [*argv, "import evener.lab.emulated_lab, pyroute2, typer"], capture_output=True, check=False
            )
            if tried.returncode == 0:
                return SimpleNamespace(argv=argv)
        pytest.skip(f"user {uid} can reach no Python of this version with evener's packages")

    def test_lab_works_without_root(self, user: SimpleNamespace) -> None:
        tunnels = ["tun0"] if Path("/dev/net/tun").stat().st_mode & 0o006 == 0o006 else []  # may anybody make one here?
        code = """
import json, os, subprocess, sys
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec, LabSpec
core = min(os.sched_getaffinity(0))
a = HostSpec(rate="100Mbit", cpus=0.5, cores=(core,), more_interfaces=tuple(sys.argv[1:]))
b = HostSpec(firewall=("tcp dport 29500 drop",))
with EmulatedLab.up(LabSpec(name=f"test-{os.getpid()}", hosts={"a": a, "b": b})) as lab:
    host = lab.host("a")
    run = lambda *argv: subprocess.run(argv, capture_output=True, text=True).stdout.split()
    found = {
        "ssh": run(*lab.ssh_argv("a", "hostname; id -u; nproc; ls /sys/class/net")),
        "tty": run("ssh", "-tt", *lab.ssh_argv("b", "tty")[1:]),
        "exec": host.exec(["hostname"]).stdout.split(),
        "processes": len(host.pids()),
        "rules": "29500" in lab.host("b").exec(["nft", "list", "ruleset"]).stdout,
        "cpus": host.spec.cpus,
    }
    host.set_rate("10Mbit")
    host.set_link_up(False)
    found["carrier"] = host.exec(["cat", "/sys/class/net/eth0/carrier"]).stdout.split()
print(json.dumps(found | {"left": lab.path.exists()}))
"""
        argv = [*user.argv, code, "docker0", *tunnels, "wlan0"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "ssh": ["a", "65534", "1", "docker0", "eth0", "lo", *tunnels, "wlan0"],
            "tty": ["/dev/pts/0"],
            "exec": ["a"],
            "processes": 2 + len(tunnels),
            "rules": True,
            "cpus": None,
            "carrier": ["0"],
            "left": False,
        }
        if not tunnels:
            refused = subprocess.run(
                [*user.argv, code, "tun0"], capture_output=True, text=True, timeout=60, check=False
            )
            assert "host a: tun0 is a tunnel, and /dev/net/tun is not there or not for this user" in refused.stderr


class TestCgroupV2:
    """No machine of ours has it alone: a folder stands for it."""

    def test_cpu_and_memory_limits_are_written_to_cgroup_of_host(self, tmp_path: Path) -> None:
        (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")
        procs = cgroup.make("lab", "a", 0.5, 10**9, root=tmp_path)
        group = tmp_path / "evener-lab" / "lab" / "a"
        assert procs == [str(group / "cgroup.procs")]
        assert (group / "cpu.max").read_text() == "10000 20000"
        assert (group / "memory.max").read_text() == "1000000000"
        assert (tmp_path / "evener-lab" / "cgroup.subtree_control").read_text() == "+memory"
        assert (tmp_path / "cgroup.subtree_control").read_text() == "cpu memory pids"  # not ours to change

    def test_missing_cpu_controller_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "cgroup.subtree_control").write_text("memory")
        with pytest.raises(EvenerError, match="host a: this machine's cgroups do not enable the cpu controller"):
            cgroup.make("lab", "a", 0.5, None, root=tmp_path)


class TestAMachineThatLacksSomething:
    def test_missing_programs_are_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setattr(lab_requirements, "PATH", "/nowhere")
        with pytest.raises(EvenerError, match="a lab needs sshd, nft, not found here") as raised:
            lab_requirements.find_programs("sshd", "nft")
        assert raised.value.hint == "apt install nftables openssh-server"

    def test_missing_pyroute2_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lab_requirements.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(EvenerError, match="a lab needs pyroute2") as raised:
            lab_requirements.check_machine(LabSpec())
        assert raised.value.hint == "pip install 'evener[lab]'"

    def test_non_linux_machine_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lab_requirements.sys, "platform", "darwin")
        with pytest.raises(EvenerError, match="a lab needs Linux namespaces; this is darwin"):
            lab_requirements.check_machine(LabSpec())


class TestTheCommandLine:
    def test_lab_up_status_exec_and_down_succeed(self, make_lab: MakeLab, tmp_path: Path) -> None:
        name = f"test-{os.getpid()}-cli"
        made = evener_cli("lab", "up", "--name", name, "--names", "x,y", "--rate", "1Gbit", cwd=tmp_path)
        assert made.returncode == 0, made.stderr
        assert "x, y" in made.stdout
        assert set(tomllib.loads((tmp_path / "lab.toml").read_text())["hosts"]) == {"x", "y"}
        told = json.loads(evener_cli("lab", "status", name, "--json", cwd=tmp_path).stdout)
        assert (told["state"], told["hosts"]["y"]["up_bps"]) == ("up", 10**9)
        assert "10.77.0.2" in evener_cli("lab", "status", cwd=tmp_path).stdout
        done = evener_cli("lab", "exec", "--name", name, "y", "--", "sh", "-c", "hostname; exit 5", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (5, "y\n")
        assert evener_cli("lab", "down", name, cwd=tmp_path).stdout == f"down: {name}\n"
        assert evener_cli("lab", "down", name, cwd=tmp_path).returncode == 0
        assert not (tmp_path / "lab.toml").exists()

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (["up", "--rate", "1Gbyte"], "rate '1Gbyte': expected 8kbit to 100Gbit"),
            (["up", "--hosts", "0"], "a lab of 0 hosts: expected 1 to 200"),
            (["up", "--names", "a,a"], "--names a,a: a name occurs twice"),
            (["up", "--names", "a,B"], "host name 'B': expected at most 32 small letters"),
            (["up", "--hosts", "2", "--names", "a"], "each define the hosts"),
            (["up", "--name", "../x"], "lab name '../x': expected"),
            (["up", "--mtu", "100"], "mtu: expected int >= 1280"),
            (["up", "--cpus", "0"], "cpus: expected float >= 0.05"),
            (["up", "--cores", "x"], "--cores x: expected comma-separated whole numbers"),
            (["up", "--cores", "999"], "host a: no core 999 here"),
            (["up", "--interface", "a/b"], "interface 'a/b': expected"),
            (["up", "--out", "nowhere/lab.toml"], "nowhere/lab.toml: no such folder"),
            (["up", "missing.toml"], "missing.toml: No such file or directory"),
            (["status", "nosuch"], "no lab is called nosuch"),
        ],
    )
    def test_invalid_lab_input_is_a_one_line_error(self, args: list[str], says: str, tmp_path: Path) -> None:
        done = run_verb("lab", *args, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert says in done.stderr.splitlines()[0]
        assert done.stdout == ""
        assert list(tmp_path.iterdir()) == []

    def test_user_file_is_not_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "lab.toml").write_text("[hosts.mine]\n")
        done = evener_cli("lab", "up", cwd=tmp_path)
        assert done.returncode == 2
        assert "lab.toml is not a lab's fleet file" in done.stderr
        assert (tmp_path / "lab.toml").read_text() == "[hosts.mine]\n"


class TestTheSpec:
    def test_spec_defaults_apply_unless_host_overrides_them(self, tmp_path: Path) -> None:
        file = tmp_path / "spec.toml"
        file.write_text(
            'name = "x"\n[defaults]\nrate = "1Gbit"\n[hosts.a]\n[hosts.b]\nrate_up = "100Mbit"\ncpus = 0.5\n'
        )
        spec = read_lab_spec(file)
        assert spec.name == "x"
        assert spec.hosts["a"].up_bps == spec.hosts["b"].down_bps == 10**9
        assert (spec.hosts["b"].up_bps, spec.hosts["b"].cpus) == (10**8, 0.5)

    @pytest.mark.parametrize(
        ("text", "says", "hint"),
        [
            ("hots = 2", "no key hots", 'did you mean "hosts"?'),
            ("[hosts.a]\nrat = '1Gbit'", "no key rat in [hosts.a]", 'did you mean "rate"?'),
            ("[defaults]\nmut = 1", "no key mut in [defaults]", 'did you mean "mtu"?'),
            ("[hosts.a]\nmtu = 'big'", "hosts[...].mtu: expected int, got str", ""),
            ("hosts = 2", "hosts: expected a table for each host", "[hosts.a]"),
            ("[hosts.a", "not TOML", ""),
        ],
    )
    def test_invalid_spec_file_is_located(self, tmp_path: Path, text: str, says: str, hint: str) -> None:
        file = tmp_path / "spec.toml"
        file.write_text(text)
        with pytest.raises(UsageError) as raised:
            read_lab_spec(file)
        assert says in str(raised.value)
        assert raised.value.hint == hint

    @pytest.mark.parametrize(
        ("host", "says"),
        [
            (HostSpec(policed=True), "policed without a rate"),
            (HostSpec(mtu=1400, path_mtu=1500), "path_mtu 1500: greater than mtu 1400"),
            (HostSpec(more_interfaces=("eth0",)), "two interfaces have one name: eth0, eth0"),
            (HostSpec(memory="12"), "memory '12': expected 64MB or more"),
        ],
    )
    def test_incompatible_host_settings_are_refused(self, host: HostSpec, says: str) -> None:
        with pytest.raises(UsageError) as raised:
            LabSpec(hosts={"a": host}).check()
        assert says in str(raised.value)

    def test_each_host_gets_its_own_cores_unless_the_lab_says_otherwise(self) -> None:
        halves = LabSpec(hosts={"a": HostSpec(), "b": HostSpec(cpus=0.5)})
        assert [host.cores for host in with_own_cores(halves, range(4)).hosts.values()] == [(0, 1), (2, 3)]
        for host in (HostSpec(cores=(0, 1)), HostSpec(cpus=3)):
            shared = LabSpec(hosts={"a": HostSpec(), "b": host})
            assert with_own_cores(shared, range(4)) == shared
        assert with_own_cores(halves, [0]) == halves  # more hosts than cores

    def test_default_host_names_are_unique_and_valid(self) -> None:
        assert len(set(default_host_names(200))) == 200
        LabSpec(hosts=dict.fromkeys(default_host_names(200), HostSpec())).check()
