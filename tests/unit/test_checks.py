"""Each failure planted in host facts gives its finding and no other; a healthy fleet gives none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from evener.core.base.errors import HostError
from evener.core.cluster.fleet_file import Fleet, HostConfig, HostLink
from evener.core.model.shape import preset_shape
from evener.core.run.prediction import Job
from evener.core.run.run_spec import MachineSpec, parse_args
from evener.core.run.rundir import RunDir
from evener.doctor.checks import run_checks
from evener.doctor.connectivity import ConnectAttempt, ConnectivityReport, PairConnectivity
from evener.doctor.context import CheckContext
from evener.doctor.facts import (
    GlooDefaultAddress,
    HostFacts,
    HostProcess,
    InterfaceAddress,
    Neighbour,
    NetworkInterface,
    ResolvedAddress,
    ResourceLimit,
)
from evener.doctor.interfaces import (
    NAMED_IN_FLEET_FILE,
    SocketInterface,
    candidate_interfaces,
    choose_interface,
    order_candidates,
    single_host_interface,
)
from evener.doctor.machine_checks import hosts_on_same_cores
from evener.launch import prepare_hosts, start_training
from evener.node.remote.facts import TRAINING_MODULES

from ..source_code import module_file

GIGABIT_BPS = 118e6
NAMES = ("attic", "laptop")


def interface(name: str = "eth0", address: str | None = "192.168.1.36", **more: Any) -> NetworkInterface:
    addresses = [InterfaceAddress(address=address, prefix=64 if ":" in address else 24)] if address else []
    return NetworkInterface(**{"name": name, "addresses": addresses, "up": True, "kind": "wired", "mtu": 1500,
                        "is_physical": True, "speed_Mbit": 1000, "duplex": "full"} | more)  # fmt: skip


def loopback() -> NetworkInterface:
    return NetworkInterface(
        name="lo", addresses=[InterfaceAddress(address="127.0.0.1", prefix=8)], up=True, kind="loopback", mtu=65536
    )


def facts(name: str, number: int, **more: Any) -> HostFacts:
    address = f"192.168.1.{number}"
    healthy = {
        "hostname": name,
        "system": "Linux 6.8",
        "architecture": "x86_64",
        "machine_id": f"boot-{name}",
        "user": "ann",
        "workdir": "/home/ann/.evener",
        "python": "/home/ann/.evener/venv/bin/python",
        "python_version": "3.12.3",
        "torch_version": "2.13.0+cpu",
        "evener_version": "0.1.0",
        "evener_hash": "same",
        "cores": 8,
        "bf16_units": ["avx512_bf16"],
        "memory_bytes": 16 * 10**9,
        "memory_free_bytes": 12 * 10**9,
        "swap_Bps": 0.0,
        "disk_free_bytes": 10**11,
        "disk_writable": True,
        "shm_bytes": 8 * 10**9,
        "port": 29500,
        "limits": {"nofile": ResourceLimit(soft=1024, hard=4096), "memlock": ResourceLimit(soft=8 << 20, hard=8 << 20)},
        "interfaces": [loopback(), interface(address=address)],
        "clock_offset_s": 0.01,
        "clock_error_s": 0.001,
        "gloo": GlooDefaultAddress(
            hostname=name, candidates=[ResolvedAddress(address=address, binds=True)], address=address
        ),
    }
    return HostFacts(**healthy | more)


def containers_on(world: World, *cores: list[int], cpu_quota: float | None = None) -> None:
    """Make the hosts of the world containers of one machine that may run on these cores."""
    for name, allowed in zip(NAMES, cores, strict=True):
        number = len(allowed) if cpu_quota is None else int(cpu_quota)
        world.change(name, boot_id="boot", allowed_cpus=allowed, cores=number, cpu_quota=cpu_quota)


def neighbour(address: str, interface: str = "eth0") -> Neighbour:
    return Neighbour(address=address, interface=interface)


def way(number: int, **more: Any) -> SocketInterface:
    return SocketInterface(
        **{
            "interface": "eth0",
            "address": f"192.168.1.{number}",
            "kind": "wired",
            "why": "",
            "mtu": 1500,
            "network": "192.168.1.0/24",
        }
        | more
    )


def pair(source: str, target: str, **more: Any) -> PairConnectivity:
    tries = [
        ConnectAttempt(what="ephemeral", port=40001, result="ok"),
        ConnectAttempt(what="ephemeral", port=40002, result="ok"),
        ConnectAttempt(what="rendezvous", port=29500, result="ok"),
        ConnectAttempt(what="ssh", port=22, result="ok"),
    ]
    return PairConnectivity(**{"source": source, "target": target, "tries": tries, "rtt_s": 2e-4, "rtt_p05_s": 1e-4,
                   "rtt_p95_s": 3e-4, "large": "ok", "path_mtu": 1500, "goodput_Bps": GIGABIT_BPS, "retransmits": 0,
                   "segments": 13000} | more)  # fmt: skip


def tries(rendezvous: str = "ok", ephemeral: str = "ok", ssh: str = "ok") -> list[ConnectAttempt]:
    return [
        ConnectAttempt(what="ephemeral", port=40001, result=ephemeral),
        ConnectAttempt(what="rendezvous", port=29500, result=rendezvous),
        ConnectAttempt(what="ssh", port=22, result=ssh),
    ]


class World:
    """A healthy fleet of two that a test breaks: attic (.36) is the first host, laptop (.28) the smaller address."""

    def __init__(self) -> None:
        self.hosts = {
            name: HostConfig(address=address) for name, address in zip(NAMES, ("192.168.1.36", "lap"), strict=True)
        }
        self.facts = {"attic": facts("attic", 36), "laptop": facts("laptop", 28)}
        self.ways = {"attic": way(36), "laptop": way(28)}
        self.pairs = {("attic", "laptop"): pair("attic", "laptop"), ("laptop", "attic"): pair("laptop", "attic")}
        known = {"attic": ["192.168.1.36"], "laptop": ["192.168.1.28"]}
        self.resolved: dict[str, dict[str, list[str] | None]] = {name: dict(known) for name in NAMES}
        self.reached: dict[str, dict[str, int | None]] = {name: {way.address: 1} for name, way in self.ways.items()}
        self.errors: dict[str, HostError] = {}
        self.links: dict[str, dict[str, HostLink]] = {}
        self.machine = MachineSpec()
        self.file: str | None = None

    def change(self, name: str, **more: Any) -> None:
        self.facts[name] = msgspec.structs.replace(self.facts[name], **more)

    def host(self, name: str, **more: Any) -> None:
        self.hosts[name] = msgspec.structs.replace(self.hosts[name], **more)

    def way(self, name: str, **more: Any) -> None:
        self.ways[name] = msgspec.structs.replace(self.ways[name], **more)

    def pair(self, source: str, target: str, **more: Any) -> None:
        self.pairs[source, target] = msgspec.structs.replace(self.pairs[source, target], **more)

    def gloo(self, name: str, address: str) -> None:
        candidates = [ResolvedAddress(address=address, binds=True)]
        self.change(name, gloo=GlooDefaultAddress(hostname=name, candidates=candidates, address=address))

    def off(self, name: str, check: str, why: str = "no") -> None:
        self.errors[name] = HostError(f"{name}: {why}", check=check, host=name, hint="do this")
        del self.facts[name], self.ways[name]
        self.pairs = {}

    def findings(self) -> list[Any]:
        fleet = Fleet(hosts=self.hosts, file=self.file, links=self.links)
        candidates = {name: candidate_interfaces(one, self.hosts[name]) for name, one in self.facts.items()}
        network = ConnectivityReport(
            interfaces=self.ways, pairs=list(self.pairs.values()), resolved=self.resolved, reached=self.reached
        )
        return run_checks(
            CheckContext(
                fleet=fleet,
                machine=self.machine,
                facts=self.facts,
                candidates=candidates,
                network=network,
                errors=self.errors,
                port=29500,
                local_code_hash="same",
            )
        )


def test_a_healthy_fleet_gives_no_finding():
    assert World().findings() == []


def ports_beside(world: World) -> None:
    world.change(
        "laptop",
        interfaces=[loopback(), interface("eth0", "192.168.1.28"), interface("docker0", "172.17.0.1", kind="docker")],
    )
    world.gloo("laptop", "172.17.0.1")


def overlay_beside_lan(world: World) -> None:
    world.change(
        "laptop",
        interfaces=[
            loopback(),
            interface("eth0", "192.168.1.28"),
            interface("tailscale0", "100.64.0.2", kind="tunnel"),
        ],
    )
    world.host("laptop", interface="tailscale0")
    world.ways["laptop"] = way(0, interface="tailscale0", address="100.64.0.2", kind="tunnel", why=NAMED_IN_FLEET_FILE)
    world.reached["laptop"] = {"100.64.0.2": 1, "192.168.1.28": 1}
    world.gloo("laptop", "100.64.0.2")


def named_but_unreached(world: World) -> None:
    world.change(
        "laptop",
        interfaces=[loopback(), interface("eth0", "192.168.1.28"), interface("docker0", "172.17.0.1", kind="docker")],
    )
    world.host("laptop", interface="docker0")
    world.ways["laptop"] = way(0, interface="docker0", address="172.17.0.1", kind="docker", why=NAMED_IN_FLEET_FILE)
    world.reached["laptop"] = {"172.17.0.1": 0, "192.168.1.28": 1}
    world.pair("attic", "laptop", tries=tries("timeout", "timeout", "timeout"))
    world.gloo("laptop", "172.17.0.1")


def route_through_tunnel(world: World) -> None:
    world.change(
        "laptop",
        interfaces=[loopback(), interface("eth0", "192.168.1.28"), interface("wg0", "10.8.0.2", kind="wireguard")],
    )
    world.pair("laptop", "attic", sent_from="10.8.0.2")


def six_and_four(world: World) -> None:
    world.change("laptop", interfaces=[loopback(), interface("eth0", "fd00::28")])
    world.way("laptop", address="fd00::28", network="fd00::/64")
    world.gloo("laptop", "fd00::28")


def another_answers_ssh(world: World) -> None:
    """attic has laptop's address, and so ssh meets attic's host key there."""
    world.host("laptop", address="192.168.1.28")
    world.change("attic", interfaces=[loopback(), interface(address="192.168.1.36"), interface("eth1", "192.168.1.28")])
    world.off("laptop", "ssh.hostkey", "its host key is another than ssh remembers")


def gpus(world: World, **more: Any) -> None:
    world.change(
        "attic", gpus=["NVIDIA GeForce RTX 4070"], gpu_driver="550.1", gpu_cards=1, torch_version="2.13.0+cu128"
    )
    world.change("attic", **more)


Break = Callable[[World], object]
ROWS: list[tuple[str, str, str | None, str | None, Break]] = [
    # id, severity, host, peer, what is broken
    ("net.loopback-hostname", "warning", "laptop", None, lambda w: w.gloo("laptop", "127.0.1.1")),
    ("net.loopback-hostname", "warning", "laptop", None, lambda w: w.gloo("laptop", "fe80::1")),
    (
        "net.loopback-hostname",
        "warning",
        "laptop",
        None,
        lambda w: (w.change("laptop", hostname="localhost"), w.gloo("laptop", "127.0.0.1")),
    ),
    (
        "host.same-name",
        "warning",
        "laptop",
        "attic",
        lambda w: (w.gloo("laptop", "127.0.0.1"), w.change("laptop", hostname="attic")),
    ),
    (
        "net.duplicate-address",
        "error",
        "laptop",
        "attic",
        lambda w: w.change(
            "attic", interfaces=[loopback(), interface(address="192.168.1.36"), interface("eth1", "192.168.1.28")]
        ),
    ),
    ("net.duplicate-address", "error", "laptop", "attic", another_answers_ssh),
    ("net.wrong-interface", "warning", "laptop", None, ports_beside),
    ("net.wrong-interface", "error", "laptop", None, named_but_unreached),
    (
        "net.wrong-interface",
        "error",
        "laptop",
        None,
        lambda w: (w.host("laptop", interface="eth9"), w.ways.pop("laptop"), w.pairs.clear()),
    ),
    (
        "net.wrong-interface",
        "error",
        "attic",
        "laptop",
        lambda w: [w.pair(*key, tries=tries("timeout", "timeout", "timeout")) for key in list(w.pairs)],
    ),
    ("net.overlay", "warning", "laptop", None, overlay_beside_lan),
    ("net.overlay", "warning", "laptop", "attic", route_through_tunnel),
    ("net.family-mismatch", "error", "laptop", None, six_and_four),
    ("net.family-mismatch", "warning", "laptop", "attic", lambda w: w.resolved["laptop"].update(attic=["fd00::36"])),
    ("net.unresolvable", "warning", "laptop", "attic", lambda w: w.resolved["laptop"].update(attic=None)),
    (
        "net.unresolvable",
        "info",
        "laptop",
        "attic",
        lambda w: (w.resolved["laptop"].update(attic=None), w.resolved["attic"].update(laptop=None)),
    ),
    (
        "net.rendezvous-loopback",
        "warning",
        "laptop",
        "attic",
        lambda w: w.resolved["laptop"].update(attic=["127.0.1.1"]),
    ),
    (
        "net.rendezvous-loopback",
        "warning",
        "attic",
        None,
        lambda w: w.change("attic", environment={"MASTER_ADDR": "localhost"}),
    ),
    # laptop has the smaller address: Gloo lets attic call, so laptop's ephemeral ports must be open
    ("net.firewall", "error", "laptop", "attic", lambda w: w.pair("attic", "laptop", tries=tries(ephemeral="timeout"))),
    (
        "net.firewall",
        "warning",
        "attic",
        "laptop",
        lambda w: w.pair("laptop", "attic", tries=tries(ephemeral="refused")),
    ),
    ("net.firewall", "error", "attic", "laptop", lambda w: w.pair("laptop", "attic", tries=tries("timeout"))),
    ("net.firewall", "warning", "laptop", "attic", lambda w: w.pair("attic", "laptop", tries=tries("timeout"))),
    ("net.mtu", "error", "attic", "laptop", lambda w: w.pair("attic", "laptop", large="stalled", path_mtu=1400)),
    ("net.mtu", "warning", "attic", "laptop", lambda w: w.pair("attic", "laptop", path_mtu=1400)),
    ("net.mtu", "warning", "attic", "laptop", lambda w: w.way("attic", mtu=9000)),
    (
        "net.slow-link",
        "warning",
        "laptop",
        None,
        lambda w: w.change("laptop", interfaces=[loopback(), interface("eth0", "192.168.1.28", speed_Mbit=100)]),
    ),
    (
        "net.slow-link",
        "warning",
        "laptop",
        None,
        lambda w: w.change("laptop", interfaces=[loopback(), interface("eth0", "192.168.1.28", duplex="half")]),
    ),
    ("net.slow-link", "warning", "attic", "laptop", lambda w: [w.pair(*key, goodput_Bps=11.7e6) for key in w.pairs]),
    (
        "net.slow-link",
        "warning",
        "attic",
        "laptop",
        lambda w: (
            w.links.update(attic={"laptop": HostLink(goodput_Bps=117e6, rtt_s=1e-4)}),
            [w.pair(*key, goodput_Bps=45e6) for key in w.pairs],
            [
                w.change(n, interfaces=[loopback(), interface("eth0", w.ways[n].address, speed_Mbit=None)])
                for n in NAMES
            ],
        ),
    ),
    ("net.wireless", "warning", "laptop", None, lambda w: w.way("laptop", kind="wireless")),
    ("net.strangers", "info", "laptop", None, lambda w: w.change("laptop", neighbours=[neighbour("192.168.1.9")])),
    ("net.stack-loss", "warning", "attic", "laptop", lambda w: w.pair("attic", "laptop", retransmits=2000)),
    ("net.asymmetric", "warning", "laptop", "attic", lambda w: w.pair("laptop", "attic", goodput_Bps=60e6)),
    (
        "port.in-use",
        "warning",
        "attic",
        None,
        lambda w: w.change("attic", port_holder=HostProcess(pid=12, owner="bob", age_s=4020, command="torchrun")),
    ),
    (
        "proc.stale",
        "warning",
        "laptop",
        None,
        lambda w: w.change("laptop", stale=[HostProcess(pid=12), HostProcess(pid=13)]),
    ),
    ("tty.attached", "warning", "laptop", None, lambda w: w.change("laptop", attached=[HostProcess(pid=12)])),
    ("version.torch", "error", "laptop", None, lambda w: w.change("laptop", torch_version="2.12.1")),
    ("version.torch", "error", "laptop", None, lambda w: w.change("laptop", torch_version=None, evener_hash=None)),
    (
        "version.torch",
        "error",
        None,
        None,
        lambda w: [w.change(n, torch_version=None, evener_hash=None) for n in NAMES],
    ),
    ("version.packages", "error", "laptop", None, lambda w: w.change("laptop", missing_packages=["peft"])),
    ("version.python", "warning", "laptop", None, lambda w: w.change("laptop", python_version="3.13.1")),
    ("version.python", "error", "laptop", None, lambda w: w.change("laptop", python_version="3.8.10")),
    (
        "version.python",
        "error",
        "laptop",
        None,
        lambda w: w.change("laptop", python_version=None, torch_version=None, evener_hash=None),
    ),
    (
        "version.torch",
        "error",
        "laptop",
        None,
        lambda w: w.change("laptop", torch_error="ImportError: libgomp.so.1: cannot open shared object file"),
    ),
    ("env.shadowed", "warning", "laptop", None, lambda w: w.change("laptop", shadowed={"queue": "/home/ann/queue.py"})),
    ("env.shadowed", "error", "laptop", None, lambda w: w.change("laptop", shadowed={"torch": "/home/ann/torch.py"})),
    (
        "env.shadowed",
        "error",
        "laptop",
        None,
        lambda w: w.change(
            "laptop", shadowed={"queue": "/home/ann/queue.py"}, torch_error="AttributeError: SimpleQueue"
        ),
    ),
    ("env.shadowed", "error", "laptop", None, lambda w: w.change("laptop", python_error="SyntaxError: sitecustomize")),
    (
        "env.shadowed",
        "error",
        "laptop",
        None,
        lambda w: w.change("laptop", breaking_variable="PYTHONHOME", torch_version=None, evener_hash=None),
    ),
    ("version.evener", "error", "laptop", None, lambda w: w.change("laptop", evener_hash="other")),
    ("version.evener", "error", "laptop", None, lambda w: w.change("laptop", evener_hash=None, evener_version=None)),
    ("rank.duplicate", "error", "laptop", "attic", lambda w: w.change("laptop", machine_id="boot-attic")),
    ("ssh.unreachable", "error", "laptop", None, lambda w: w.off("laptop", "ssh.unreachable")),
    ("ssh.auth", "error", "laptop", None, lambda w: w.off("laptop", "ssh.auth")),
    ("ssh.hostkey", "error", "laptop", None, lambda w: w.off("laptop", "ssh.hostkey")),
    ("ssh.shell", "error", "laptop", None, lambda w: w.off("laptop", "ssh.shell")),
    ("ssh.key", "error", "laptop", None, lambda w: w.off("laptop", "ssh.key")),
    ("clock.skew", "warning", "laptop", None, lambda w: w.change("laptop", clock_offset_s=-3.0)),
    (
        "limit.nofile",
        "warning",
        "laptop",
        None,
        lambda w: w.change("laptop", limits={"nofile": ResourceLimit(soft=64, hard=64)}),
    ),
    ("limit.memlock", "warning", "laptop", None, lambda w: w.change("laptop", has_infiniband=True)),
    ("mem.space", "warning", "laptop", None, lambda w: w.change("laptop", memory_free_bytes=700 * 10**6)),
    ("mem.space", "error", "laptop", None, lambda w: w.change("laptop", memory_free_bytes=100 * 10**6)),
    ("mem.swap", "warning", "laptop", None, lambda w: w.change("laptop", swap_Bps=5e6)),
    ("disk.space", "warning", "laptop", None, lambda w: w.change("laptop", disk_free_bytes=10**9)),
    ("disk.space", "error", "laptop", None, lambda w: w.change("laptop", disk_writable=False)),
    ("disk.stored", "info", "laptop", None, lambda w: w.change("laptop", stored_bytes=60 * 10**9)),
    ("disk.stored", "info", "laptop", None, lambda w: w.change("laptop", partial_checkpoints=2)),
    ("shm.size", "warning", "laptop", None, lambda w: w.change("laptop", shm_bytes=64 << 20)),
    ("cpu.oversubscribed", "warning", "laptop", None, lambda w: w.host("laptop", threads=16)),
    ("cpu.oversubscribed", "warning", "laptop", None, lambda w: w.host("laptop", ranks=9)),
    ("cpu.oversubscribed", "warning", None, None, lambda w: containers_on(w, [0, 1, 2, 3], [2, 3, 4, 5])),
    ("cpu.throttled", "warning", "laptop", None, lambda w: w.change("laptop", cpu_throttle_events=3)),
    (
        "cpu.throttled",
        "warning",
        "laptop",
        None,
        lambda w: w.change("laptop", cpu_max_MHz=4000.0, cpu_limit_MHz=4000.0, cpu_busy_MHz=800.0),
    ),
    ("power.sleep", "warning", "laptop", None, lambda w: w.change("laptop", on_battery=True)),
    ("power.sleep", "warning", "laptop", None, lambda w: w.change("laptop", lid_suspends=True)),
    ("dtype.slow", "info", "laptop", None, lambda w: w.change("laptop", bf16_units=[])),
    ("gpu.missing", "error", "laptop", None, lambda w: w.host("laptop", devices="cuda")),
    ("gpu.missing", "error", "attic", None, lambda w: gpus(w, torch_version="2.13.0+cpu")),
    ("gpu.driver", "warning", "attic", None, lambda w: w.change("attic", gpu_cards=1, gpu_error="no nvidia-smi")),
    ("gpu.p2p", "info", "attic", None, lambda w: gpus(w, gpus=["H200"] * 2, gpu_iommu=True)),
    (
        "env.ineffective",
        "warning",
        "laptop",
        None,
        lambda w: w.change("laptop", environment={"GLOO_PORT_RANGE": "5000:5010"}),
    ),
    ("env.ineffective", "info", "laptop", None, lambda w: w.change("laptop", environment={"NCCL_DEBUG": "INFO"})),
    (
        "env.launcher-variables",
        "warning",
        "laptop",
        None,
        lambda w: w.change("laptop", launcher_variables=["MASTER_ADDR", "RANK", "WORLD_SIZE"]),
    ),
    ("env.debug", "warning", "laptop", None, lambda w: w.change("laptop", debug_variables=["TORCH_DISTRIBUTED_DEBUG"])),
    (
        "env.interface-syntax",
        "warning",
        "laptop",
        None,
        lambda w: w.change("laptop", environment={"GLOO_SOCKET_IFNAME": "^lo"}),
    ),
    (
        "env.interface-syntax",
        "error",
        "laptop",
        None,
        lambda w: (w.host("laptop", interface="^lo"), w.ways.pop("laptop"), w.pairs.clear()),
    ),
]


@pytest.mark.parametrize(("check_id", "severity", "host", "peer", "spoil"), ROWS,
                         ids=[f"{number}-{row[0]}" for number, row in enumerate(ROWS)])  # fmt: skip
def test_each_failure_gives_its_finding_and_no_other(check_id, severity, host, peer, spoil):
    world = World()
    spoil(world)
    found = world.findings()
    assert [(one.check, one.severity, one.host, one.peer) for one in found] == [(check_id, severity, host, peer)]
    assert found[0].evidence
    assert found[0].fix


def test_only_machines_outside_the_run_on_its_network_are_strangers():
    world = World()
    world.change("attic", neighbours=[neighbour("192.168.1.28"), neighbour("172.17.0.9", "docker0")])
    assert world.findings() == []
    world.change("attic", neighbours=[neighbour(f"192.168.1.{number}") for number in (28, 100, 9, 10)])
    (found,) = world.findings()
    assert "192.168.1.9 and 2 more" in found.evidence
    world.machine = MachineSpec(private=True)
    assert world.findings() == []
    world.machine = MachineSpec()
    world.way("attic", kind="wireguard")
    assert [one.check for one in world.findings() if one.check == "net.strangers"] == []


def test_host_that_is_not_reached_is_not_called_a_stranger():
    """Its own addresses are unknown."""
    world = World()
    world.change("attic", neighbours=[neighbour("192.168.1.9")])
    world.off("laptop", "ssh.shell", "its shell ended")
    assert [one.check for one in world.findings() if one.check == "net.strangers"] == []


def test_evidence_is_the_line_that_names_the_error():
    """Below which CPython prints the frames of the thread, although there are none yet."""
    world = World()
    error = "Fatal Python error: init_fs_encoding: no codec\nModuleNotFoundError: No module named 'encodings'"
    world.change(
        "laptop", python_error=f"{error}\n\nCurrent thread 0x7f (most recent call first):\n  <no Python frame>"
    )
    assert world.findings()[0].evidence.endswith("ModuleNotFoundError: No module named 'encodings'")


def test_strangers_are_reported_once_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    networks = ["192.168.1.0/24", "192.168.1.0/24", None, "10.0.0.0/8", None, "192.168.1.0/24"]
    assert [prepare_hosts._is_first_run_on(one) for one in networks] == [True, False, True, True, False, False]


def test_fixes_are_runnable_commands():
    """With the fleet file that was named, the file in which a variable is set, and the folder that is there."""
    world = World()
    world.change("laptop", shadowed={"queue": "/q.py"}, set_in={"PYTHONPATH": "~/.profile"})
    gone = "sed -i.old -E 's/^[[:space:]]*((export|declare -x|typeset -x) +([^#]* )?)?({})=/#&/' {}"
    assert world.findings()[0].fix == "on laptop: " + gone.format("PYTHONPATH", "~/.profile")
    world.change("laptop", shadowed={}, environment={"GLOO_A": "1", "GLOO_B": "2"},
                 set_in={"GLOO_A": "/etc/environment", "GLOO_B": "~/.bashrc"})  # fmt: skip
    fix = f"sudo {gone.format('GLOO_A', '/etc/environment')} && {gone.format('GLOO_B', '~/.bashrc')}"
    assert world.findings()[0].fix == f"on laptop: {fix}"
    world.change("laptop", environment={}, disk_free_bytes=0, disk_folder="/home/ann")
    assert world.findings()[0].fix.startswith("on laptop: du -xh /home/ann | sort -h | tail")
    world.change("laptop", disk_free_bytes=10**11, torch_version=None)
    assert world.findings()[0].fix == "evener setup"
    world.file = "my fleets/lab.toml"
    assert world.findings()[0].fix == "evener setup --fleet 'my fleets/lab.toml'"


def test_other_answering_interface_is_reported_with_the_closed_port():
    """It may be another machine, or a repeater; and a card of the host's own in the same network is neither."""
    world = World()
    cards = [interface(address="192.168.1.28", mac="02:28"), interface("wlan0", "192.168.1.29", mac="02:29")]
    world.change("laptop", interfaces=[loopback(), *cards])
    world.pair("attic", "laptop", tries=tries("refused", "refused"), answered_by="02:29")
    assert [one.check for one in world.findings()] == ["net.firewall"]
    world.pair("attic", "laptop", tries=tries("refused", "stranger"), answered_by="02:99")
    assert [one.check for one in world.findings()] == ["net.duplicate-address", "net.firewall"]


def test_host_behind_port_forward_gets_no_duplicate_address_finding():
    """A virtual machine whose ssh is a forwarded port of attic's: nobody is told to drop an address."""
    world = World()
    world.host("laptop", address="192.168.1.36", port=2222)
    world.off("laptop", "ssh.hostkey", "its host key is another than ssh remembers")
    assert [one.check for one in world.findings()] == ["ssh.hostkey"]
    world.host("laptop", port=None)
    world.errors["laptop"] = HostError("laptop: no", check="ssh.unreachable", host="laptop")
    assert [one.check for one in world.findings()] == ["ssh.unreachable"]


def test_mixed_fleet_uses_each_rank_own_dtype():
    world = World()
    world.change("laptop", bf16_units=[])
    (found,) = world.findings()
    assert found.evidence == "its processor has no units for bf16, others have: each rank computes in its own type"
    assert found.fix == "leave --dtype at auto, which takes fp32 there"
    world.change("attic", bf16_units=[])
    (found,) = world.findings()
    assert found.evidence == "attic, laptop: its processor has no units for bf16"


def test_checks_use_options_of_the_run_being_started():
    def found(world: World, **asked: Any) -> list[tuple[str, str]]:
        world.machine = MachineSpec(**asked)
        return [(one.check, one.severity) for one in world.findings()]

    world = World()
    gpus(world, torch_version="2.13.0+cpu")
    assert found(world) == [("gpu.missing", "error")]
    assert found(world, device="cpu") == []

    world = World()
    assert found(world, device="cuda") == [("gpu.missing", "error")] * 2
    assert {one.fix for one in world.findings()} == {"--device cpu"}
    world.host("laptop", devices="cuda")
    assert found(world, device="cpu") == []  # the flag wins

    world = World()
    assert found(world, ranks=9) == [("cpu.oversubscribed", "warning")] * 2
    assert found(world, threads=16) == [("cpu.oversubscribed", "warning")] * 2
    assert found(world, ranks=64, threads=1).count(("limit.nofile", "warning")) == 2
    facts = {name: msgspec.structs.replace(world.facts["laptop"], machine_id=name, boot_id="boot", cores=4,
                                           allowed_cpus=[*range(8)], cpu_quota=4.0) for name in "abc"}  # fmt: skip
    assert hosts_on_same_cores(facts) == {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}  # 12 cores' time of 8
    facts["c"] = msgspec.structs.replace(facts["c"], boot_id="another")
    assert hosts_on_same_cores(facts) == {"a": [], "b": [], "c": []}
    containers_on(world, [0, 1, 2, 3], [4, 5, 6, 7])  # each has its own cores
    assert found(world) == []
    containers_on(world, [*range(8)], [*range(8)], cpu_quota=4.0)  # a half of the cores' time each
    assert found(world) == []

    world = World()
    for name in NAMES:
        world.change(name, gpus=["H200"], torch_version="2.13.0+cu128", environment={"NCCL_DEBUG": "INFO"})
    assert found(world) == []
    for asked in ({"device": "cpu"}, {"backend": "gloo"}):
        assert found(world, **asked) == [("env.ineffective", "info")]
    world.host("laptop", ranks=2)  # on one GPU: NCCL takes no two ranks there
    assert found(world) == [("env.ineffective", "info")]


def test_train_surveys_hosts_with_its_own_machine_options(monkeypatch):
    class Looked(Exception):
        """At the hosts, for this run."""

    def survey(*_: Any, machine: MachineSpec, **__: Any) -> Any:
        raise Looked(machine)

    monkeypatch.setattr(prepare_hosts, "run_preflight", survey)
    spec = parse_args(["--device=cpu", "--ranks=2", "--out=runs/x"])
    job = Job(spec=spec, shape=preset_shape("tiny", 256))
    resolved: Any = SimpleNamespace(spec=spec, job=job, resume=None, rundir=RunDir("runs/x"), packages=())
    hosts = prepare_hosts.ConnectedHosts(fleet=Fleet(hosts=World().hosts), sessions={}, errors={})
    with pytest.raises(Looked) as looked:
        start_training.plan_on_hosts(hosts, resolved, print)
    assert looked.value.args == (spec.machine,)


def test_every_failure_detectable_before_launch_has_a_test_row():
    later = {"code.mismatch", "spec.mismatch", "data.mismatch", "tokenizer.mismatch"}  # the ranks compare them
    stated = {
        "net.loopback-hostname", "net.wrong-interface", "net.overlay", "net.family-mismatch", "net.unresolvable",
        "net.rendezvous-loopback", "net.firewall", "net.mtu", "net.slow-link", "net.wireless", "net.stack-loss",
        "net.asymmetric", "port.in-use", "proc.stale", "version.torch", "version.python", "version.evener",
        "version.packages",
        "rank.duplicate", "ssh.unreachable", "ssh.auth", "ssh.hostkey", "clock.skew", "limit.nofile", "limit.memlock",
        "mem.space", "disk.space", "disk.stored", "shm.size", "mem.swap", "cpu.oversubscribed", "cpu.throttled",
        "power.sleep", "dtype.slow", "gpu.missing", "gpu.driver", "gpu.p2p", "env.ineffective", "env.interface-syntax",
        "tty.attached", "env.shadowed", "env.launcher-variables", "env.debug", "host.same-name",
        "net.duplicate-address", "ssh.shell", "ssh.key", "net.strangers",
    }  # fmt: skip
    assert {row[0] for row in ROWS} == stated - later


FIREWALLS = [
    ("ufw", None, False, "on laptop: sudo ufw allow from 192.168.1.36"),
    ("nftables", "inet own in", True, "on laptop: nft insert rule inet own in ip saddr 192.168.1.36 accept"),
    ("iptables", "ip filter INPUT", False, "on laptop: sudo iptables -I INPUT -s 192.168.1.36 -j ACCEPT"),
    ("firewalld", None, True,
     "on laptop: firewall-cmd --permanent --zone=trusted --add-source=192.168.1.36 && firewall-cmd --reload"),
    ("wsl-nat", None, False, "it is WSL2 behind Windows' address translation. In Windows 11: the lines [wsl2] and "
     "networkingMode=mirrored in %UserProfile%\\.wslconfig, then wsl --shutdown"),
    ("hyper-v", None, False, "in Windows, as administrator: New-NetFirewallHyperVRule -Name evener -DisplayName evener "
     "-Direction Inbound -VMCreatorId '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}' -RemoteAddresses 192.168.1.36 -Action "
     "Allow"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "chain", "is_root", "fix"), FIREWALLS, ids=[row[0] for row in FIREWALLS])
def test_closed_port_fix_uses_the_installed_firewall_command(kind, chain, is_root, fix):
    world = World()
    world.change("laptop", firewall=kind, firewall_chain=chain, is_root=is_root)
    world.pair("attic", "laptop", tries=tries("ok", "timeout"))
    (found,) = world.findings()
    assert found.fix == fix
    assert found.evidence == (
        "attic cannot reach laptop at 192.168.1.28: connected to ssh's port 22, connected to port 29500, timed out on "
        "ephemeral ports (40001)"
    )


def test_many_peers_behind_one_firewall_are_one_finding():
    world = World()
    for number, name in enumerate("abc", 40):
        world.hosts[name], world.facts[name], world.ways[name] = (
            HostConfig(address=name),
            facts(name, number),
            way(number),
        )
    world.pairs = {(s, t): pair(s, t) for s in world.hosts for t in world.hosts if s != t}
    world.resolved = {}
    for name in world.hosts:
        if name != "laptop":
            world.pair(name, "laptop", tries=tries("timeout", "timeout"))
    (found,) = world.findings()
    assert (found.check, found.host, found.peer) == ("net.firewall", "laptop", None)
    assert "attic, a, b, c cannot reach laptop" in found.evidence
    assert "192.168.1.0/24" in found.fix


def test_torch_missing_everywhere_is_one_finding_that_names_setup():
    world = World()
    for name in NAMES:
        world.change(name, torch_version=None, evener_version=None, evener_hash=None)
    (found,) = world.findings()
    assert (found.check, found.fix) == ("version.torch", "evener setup")


def test_link_faster_than_test_sender_is_not_reported_as_slow():
    world = World()
    world.pair("attic", "laptop", goodput_Bps=2.1e9)
    world.pair("laptop", "attic", goodput_Bps=0.7e9)
    assert world.findings() == []


def test_cuda_and_cpu_builds_of_same_torch_are_compatible():
    world = World()
    gpus(world)
    assert world.findings() == []


def test_different_evener_version_on_all_hosts_is_one_finding():
    world = World()
    for name in NAMES:
        world.change(name, evener_hash="older")
    (found,) = world.findings()
    assert found.check == "version.evener"


def test_stale_processes_are_killed_by_exact_pid():
    world = World()
    world.change("laptop", stale=[HostProcess(pid=12), HostProcess(pid=13), HostProcess(pid=14, run="demo")])
    assert [one.fix for one in world.findings()] == ["on laptop: kill 12 13", "evener stop --stale"]


# --- which way -------------------------------------------------------------------------------------------------------

DECOYS = [
    loopback(),
    interface("docker0", "172.17.0.1", kind="docker", is_physical=False, speed_Mbit=None),
    interface("tailscale0", "100.64.0.2", kind="tunnel", is_physical=False, speed_Mbit=None),
    interface("wlan0", "192.168.1.128", kind="wireless", speed_Mbit=None),
    interface("eth1", None),
    interface("eth2", "10.0.0.2", up=False),
    interface("eth0", "192.168.1.28"),
]


def chosen(
    reached: dict[str, int], *, host: HostConfig | None = None, interfaces: list[NetworkInterface] | None = None
) -> SocketInterface:
    known = {"laptop": facts("laptop", 28, interfaces=interfaces or DECOYS), "attic": facts("attic", 36)}
    ways = {
        name: candidate_interfaces(one, host if host and name == "laptop" else HostConfig(address=name))
        for name, one in known.items()
    }
    return choose_interface(order_candidates(ways, known)["laptop"], dict(reached), 1, known["laptop"])


def test_wired_interface_is_preferred_to_wireless_tunnel_and_bridge():
    known = {"laptop": facts("laptop", 28, interfaces=DECOYS), "attic": facts("attic", 36)}
    ways = {name: candidate_interfaces(one, HostConfig(address=name)) for name, one in known.items()}
    assert [one.interface for one in order_candidates(ways, known)["laptop"]] == [
        "eth0",
        "wlan0",
        "tailscale0",
        "docker0",
    ]
    every = {one.address: 1 for one in ways["laptop"]}
    assert chosen(every).interface == "eth0"
    assert chosen(every).why == "wired; the other host reaches it; rather than wlan0, tailscale0, docker0"


def test_reachable_interface_is_preferred():
    assert chosen({"192.168.1.28": 0, "192.168.1.128": 1, "100.64.0.2": 1}).interface == "wlan0"
    assert chosen({"192.168.1.28": 0, "192.168.1.128": 0, "100.64.0.2": 1}).interface == "tailscale0"
    assert chosen({}).interface == "eth0"  # nobody reached anything: what is likely best


def test_interface_named_in_fleet_file_is_used():
    named = chosen({"192.168.1.28": 1, "100.64.0.2": 1}, host=HostConfig(address="x", interface="tailscale0"))
    assert (named.interface, named.why) == ("tailscale0", NAMED_IN_FLEET_FILE)
    assert candidate_interfaces(facts("laptop", 28, interfaces=DECOYS), HostConfig(address="x", interface="eth9")) == []


def test_gloo_first_address_of_interface_is_tested():
    two = interface("eth0", "10.9.9.9")
    two = msgspec.structs.replace(two, addresses=[*two.addresses, InterfaceAddress(address="192.168.1.28", prefix=24)])
    assert chosen({}, interfaces=[loopback(), two]).address == "10.9.9.9"


def test_single_host_uses_loopback():
    assert single_host_interface(facts("here", 5), HostConfig(address="local")).address == "127.0.0.1"


def test_modules_detected_as_training_exist():
    """A process that runs another module is not detected as training."""
    for name in TRAINING_MODULES:
        path = module_file(name)
        assert path is not None, name
        assert path.name != "__init__.py" or path.with_name("__main__.py").is_file(), name
