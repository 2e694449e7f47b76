"""A host that loses power falls silent to the others and boots again with its files unchanged."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evener.core.base.errors import EvenerError, UsageError
from evener.lab import state
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.host import LabHost
from evener.lab.lab_spec import HostSpec, LabSpec
from tests.lab.conftest import MakeLab, command_lines, wait_until
from tests.lab.test_lab import ANSWERED, CONNECT, evener_cli, ssh, traces
from tests.tiers import exhaustive

FIREWALL = "tcp dport 29500 drop"
PORT = "5201"
# Takes one connection, and answers each byte with the same: says so when the first has come.
ECHO = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
peer, _ = server.accept()
while block := peer.recv(1):
    peer.send(block)
"""
# Connects and is answered once; told to, it sends once more, and says what it hears within two seconds.
LISTEN = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 60)
peer.send(b"a")
print(peer.recv(1).decode(), flush=True)
sys.stdin.readline()
peer.settimeout(2)
try:
    peer.send(b"b")
    print(repr(peer.recv(1)))
except Exception as error:
    print(type(error).__name__)
"""


class Connected:
    """A program on host a that host b has a connection to: what does b hear when something happens to a?"""

    def __init__(self, lab: EmulatedLab) -> None:
        a, b = lab.host("a"), lab.host("b")
        self.server = a.popen([sys.executable, "-c", ECHO, PORT], stdout=subprocess.PIPE, text=True)
        assert self._line(self.server) == "listening"
        self.client = b.popen(
            [sys.executable, "-c", LISTEN, a.address, PORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line(self.client) == "a"
        self.processes = [state.process_by_pid(pid) for pid in a.pids()]  # pid 1, sshd and the server: all of them stay
        assert len(self.processes) == 3

    def heard(self) -> str:
        """What host b hears from now on."""
        out, _ = self.client.communicate("now\n", timeout=60)
        self.server.communicate(timeout=60)
        return str(out).strip()

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


def network(lab: EmulatedLab) -> dict[str, str]:
    """What the kernel says of host a's network: MAC and IP addresses, and how each end of its link is shaped."""
    a, desk = lab.host("a"), lab.state.controller.pid
    inside = ["nsenter", "-t", str(desk), *["--user", "--preserve-credentials"] * lab.rootless, "--net", "--"]

    def said(*command: str) -> str:
        return a.exec(command).stdout

    found = {f"mac of {name}": said("cat", f"/sys/class/net/{name}/address") for name in ("eth0", "wlan0", "docker0")}
    for name in ("eth0", "wlan0"):
        addresses = json.loads(said("ip", "-json", "address", "show", "dev", name))[0]["addr_info"]
        found[f"addresses of {name}"] = str(sorted(one["local"] for one in addresses if one["scope"] == "global"))
    found["mtu"] = said("cat", "/sys/class/net/eth0/mtu")
    found["sends"] = said("tc", "class", "show", "dev", "eth0")
    shown = subprocess.run([*inside, "tc", "class", "show", "dev", "port1"], capture_output=True, text=True, check=True)
    return found | {"receives": shown.stdout}


def reaches(sender: LabHost, address: str) -> None:
    """Its ssh port answers; who had given up looking for the address is told so once more at most."""
    connect = [sys.executable, "-c", CONNECT, address, "22"]
    wait_until(lambda: ANSWERED in sender.exec(connect, check=False).stdout, f"{sender.name} cannot reach {address}")


@exhaustive
def test_powered_off_host_is_silent_and_reboots_unchanged(make_lab: MakeLab) -> None:
    a = HostSpec(rate_up="50Mbit", cpus=1, more_interfaces=("wlan0", "docker0"), firewall=(FIREWALL,))
    lab = make_lab(a=a, b=HostSpec(more_interfaces=("wlan0",)))
    one, other = lab.hosts
    one.set_rate(up="50Mbit", down="400Mbit")  # of now, not of its making
    one.set_mtu(1400)
    before = network(lab)
    assert "rate 50Mbit" in before["sends"]
    assert "rate 400Mbit" in before["receives"]
    assert before["mac of eth0"] == "02:00:0a:4d:00:01\n"
    one.exec(["sh", "-c", "echo text > ~/kept; echo text > /tmp/lost"])

    connected = Connected(lab)
    one.power_off()
    assert not any(process.is_alive() for process in connected.processes)
    assert one.pids() == []
    assert connected.heard() == "TimeoutError"
    assert (one.is_off(), one.is_alive(), lab.is_alive(), EmulatedLab.find(lab.name).is_alive()) == (
        True,
        False,
        True,
        True,
    )
    assert ssh(lab, "a", "true").returncode == 255
    with pytest.raises(EvenerError, match=rf"host a of lab {lab.name} is off") as raised:
        one.exec(["true"])
    assert raised.value.hint == f"evener lab boot a --name {lab.name}"
    with pytest.raises(EvenerError, match="is off"):
        one.power_off()
    with pytest.raises(EvenerError, match=f"lab {lab.name} is up already: a, b"):
        EmulatedLab.up(LabSpec(name=lab.name))

    one.boot()
    assert network(lab) == before
    assert EmulatedLab.find(lab.name).host("a").is_alive()
    for address in (one.address, one.address6, "10.78.0.1"):
        reaches(other, address)
    wait_until(lambda: ssh(lab, "a", "true").returncode == 0, "no ssh although it is on again")
    done = ssh(lab, "a", "hostname; cat ~/kept; test -e /tmp/lost || echo lost; ls -d /sys/class/net/wlan0/wireless")
    assert done.stdout.split() == ["a", "text", "lost", "/sys/class/net/wlan0/wireless"]
    assert not any(ECHO.encode() in line for line in command_lines(one))
    wait_until(lambda: len(one.pids()) == 2, "more than pid 1 and sshd")
    assert FIREWALL in one.exec(["nft", "list", "ruleset"]).stdout
    if not lab.rootless:
        [procs] = json.loads((lab.path / "hosts" / "a" / "cgroups").read_text())
        assert str(one.pid) in Path(procs).read_text().split()
    with pytest.raises(UsageError, match=rf"host a of lab {lab.name} is on already") as raised:
        one.boot()
    assert raised.value.hint == f"evener lab power-off a --name {lab.name}"


def test_killed_host_closes_its_connections(make_lab: MakeLab) -> None:
    """The difference, and why what is heard above is silence. A crashed host can be booted, too."""
    lab = make_lab(a=HostSpec(), b=HostSpec())
    one, other = lab.hosts
    connected = Connected(lab)
    one.kill()
    assert connected.heard() in ("b''", "ConnectionResetError", "BrokenPipeError")
    assert (one.is_off(), lab.is_alive()) == (False, False)
    one.boot()
    assert lab.is_alive()
    reaches(other, one.address)


# Writes in each of the ways in which a file survives a power loss, or does not.
WRITE = """
import os

def write(path, text, sync):
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())

def sync(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

os.mkdir("run")
sync(".")
write("run/whole", "kept", True)
write("run/empty", "lost", False)
write("run/promise", "first", True)
sync("run")
for text in ("second", "third"):
    write("run/draft", text, True)
    os.replace("run/draft", "run/promise")
write("run/nameless", "lost", True)
os.mkdir("run/new")
write("run/new/file", "lost", True)
sync("run/new")
"""
LIST = "import pathlib; print({path.name: path.read_text() for path in pathlib.Path('run').rglob('*')})"


@exhaustive
def test_power_off_loses_what_was_not_flushed(make_lab: MakeLab) -> None:
    """A flushed file whose name was not flushed is lost, too, and a rename that was not flushed is taken back."""
    host = make_lab(a=HostSpec(writeback_s=3600.0, disk="64MB")).host("a")
    host.exec([sys.executable, "-c", WRITE])
    assert host.exec(["cat", "run/promise"]).stdout == "third"
    host.power_off()
    host.boot()
    kept = {"whole": "kept", "empty": "", "promise": "first"}
    assert ast.literal_eval(host.exec([sys.executable, "-c", LIST]).stdout) == kept
    host.exec(["sh", "-c", "echo more >run/more; sync"])
    host.power_off()
    host.boot()
    assert ast.literal_eval(host.exec([sys.executable, "-c", LIST]).stdout) == kept | {"more": "more\n"}


def test_write_older_than_the_writeback_interval_survives_power_off(make_lab: MakeLab) -> None:
    lab = make_lab(a=HostSpec(writeback_s=0.1))
    host, disk = lab.host("a"), lab.path / "hosts" / "a" / "disk"
    host.exec(["sh", "-c", "echo kept >file"])

    def is_written_back() -> bool:
        """Of content and name."""
        records = [record.read_bytes() for record in disk.glob("[df]*")]
        return b"kept\n" in records and any(b"\0file\0" in record for record in records)

    wait_until(is_written_back, "no writeback")
    host.power_off()
    host.boot()
    assert host.exec(["cat", "file"]).stdout == "kept\n"


@exhaustive
def test_powered_off_hosts_boot_and_are_removed_by_down(make_lab: MakeLab) -> None:
    lab = make_lab(a=HostSpec(cpus=1), b=HostSpec(), c=HostSpec())
    for host in lab.hosts:
        host.power_off()
    with ThreadPoolExecutor() as together:  # each as a program of its own would: power is back for all
        list(together.map(lambda host: EmulatedLab.find(lab.name).host(host.name).boot(), lab.hosts))
    lab = EmulatedLab.find(lab.name)
    assert lab.is_alive()
    reaches(lab.host("a"), lab.host("b").address)
    lab.host("b").power_off()
    processes = [state.process_by_pid(lab.host("a").pid), lab.state.controller]
    lab.down()
    assert traces(lab) == []
    assert not any(process.is_alive() for process in processes)
    assert lab.name not in Path("/proc/mounts").read_text()


@exhaustive
def test_lab_power_off_and_boot_commands_succeed(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(a=HostSpec(), b=HostSpec())

    def evener(verb: str, *args: str) -> subprocess.CompletedProcess[str]:
        return evener_cli("lab", verb, *args, cwd=tmp_path)

    name = ("--name", lab.name)
    assert evener("power-off", "b", *name).stdout == "b is off\n"
    told = json.loads(evener("status", lab.name, "--json").stdout)
    assert (told["state"], told["hosts"]["a"]["state"], told["hosts"]["b"]["state"]) == ("up", "up", "off")
    [row] = [line.split() for line in evener("status", lab.name).stdout.splitlines() if line.startswith("b ")]
    assert "off" in row
    done = evener("exec", *name, "b", "--", "true")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: host b of lab {lab.name} is off")
    assert done.stderr.splitlines()[1] == f"hint:  evener lab boot b --name {lab.name}"
    assert json.loads(evener("boot", "b", *name, "--json").stdout) == {"booted": "b"}
    assert ssh(lab, "b", "hostname").stdout == "b\n"
    for verb, host, says in (("boot", "b", f"b of lab {lab.name} is on already"), ("boot", "x", "has no host x"),
                             ("power-off", "x", "has no host x")):  # fmt: skip
        done = evener(verb, host, *name)
        assert done.returncode == 2
        error, hint = done.stderr.splitlines()
        assert says in error
        assert hint.startswith("hint:  evener lab ")
