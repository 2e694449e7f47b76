"""The network of a lab: a bridge at the controller, a veth pair per host, HTB at both ends of each.

Run as a program (`python -m evener.lab.network`), so that entering other network namespaces never changes the caller's.
It reads one JSON object from stdin: the controller's pid, whether the lab is rootless, and a list of calls
[[name, arguments], …].
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.tcmsg import plugins

from evener.lab.lab_spec import CONTROLLER_NUMBER, LAN

EXTRA_SUBNET, EXTRA_LINK_BPS = 78, 100_000_000  # a second link, such as Wi-Fi: 10.78.0.x; a third: 10.79.0.x
QUEUE_S = 0.02  # longest wait of a packet before the queue drops it: the buffer of a switch
QUEUE_MIN_BYTES = 256 * 1024
BURST_S = 0.001
BURST_MIN_BYTES = 16 * 1024
POLICER_BURST_BYTES = 32 * 1024  # at 1 Gbit/s BBR gets 0.7 of it; 4 MB exchanges 0.57, with 230 ms pauses
IFA_F_NODAD = 0x02

plugins["bfifo"] = plugins["pfifo"]  # the same single option, in bytes


class LabNetwork:
    """The network operations of one lab, each in the network namespace that it concerns."""

    def __init__(self, pid: int, rootless: bool) -> None:
        if rootless:
            _enter_namespace(pid, "user")
        self.pid = pid

    def wire(self, hosts: list[dict[str, Any]]) -> None:
        """Create the bridges and a link for each host."""
        with _network_namespace(self.pid) as net:
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # a packet without a route is rejected at once
            _bring_up(net, "lo")
            _add_bridge(net, "lan", f"{LAN}.{CONTROLLER_NUMBER}")
            for number in range(max(len(host["links"]) for host in hosts)):
                _add_bridge(net, f"air{number}", f"10.{EXTRA_SUBNET + number}.0.{CONTROLLER_NUMBER}")
        self.plug_in(hosts)
        self.set_mtus(hosts)

    def plug_in(self, hosts: list[dict[str, Any]]) -> None:
        """Create the links of hosts that have just booted, and remove what is left of their former links."""
        with _network_namespace(self.pid) as net:
            for host in hosts:
                _add_link(net, "lan", host["port"], host["pid"], host["interface"])
                _shape_traffic(net, host["port"], host["down_bps"], host["policed"])
                for number, name in enumerate(host["links"]):
                    _add_link(net, f"air{number}", _extra_port(host, number), host["pid"], name)
                    _shape_traffic(net, _extra_port(host, number), EXTRA_LINK_BPS, False)
        for host in hosts:
            with _network_namespace(host["pid"]) as net:
                _bring_up(net, "lo")
                _configure_interface(net, host["interface"], host["address"], host["address6"])
                net.route("add", dst="default", gateway=f"{LAN}.{CONTROLLER_NUMBER}")
                _shape_traffic(net, host["interface"], None if host["policed"] else host["up_bps"], False)
                for number, name in enumerate(host["links"]):
                    _configure_interface(net, name, f"10.{EXTRA_SUBNET + number}.0.{host['number']}", None)
                    _shape_traffic(net, name, EXTRA_LINK_BPS, False)
                for number, name in enumerate(host["bridges"]):
                    _add_bridge(net, name, f"172.{17 + number}.0.1", prefix=16)

    def unplug(self, host: dict[str, Any]) -> None:
        """Pull every cable of a host."""
        for port in (host["port"], *(_extra_port(host, number) for number in range(len(host["links"])))):
            self.set_link(port, False)

    def set_rate(
        self, pid: int, interface: str, port: str, up_bps: int | None, down_bps: int | None, policed: bool
    ) -> None:
        """Change both directions of a host's link."""
        with _network_namespace(self.pid) as net:
            _shape_traffic(net, port, down_bps, policed)
        with _network_namespace(pid) as net:
            _shape_traffic(net, interface, None if policed else up_bps, False)

    def set_link(self, port: str, up: bool) -> None:
        """Plug in a host's cable, or pull it."""
        with _network_namespace(self.pid) as net:
            net.link("set", index=_link_index(net, port), state="up" if up else "down")

    def set_mtus(self, hosts: list[dict[str, Any]]) -> None:
        """Change the MTU of each interface, and that of its path.

        Large segments (GSO) pass a path whose MTU is too small for them: if there is such a path, segment every packet.
        """
        max_segments = 1 if any(host["path_mtu"] < host["mtu"] for host in hosts) else 65535
        with _network_namespace(self.pid) as net:
            for host in hosts:
                _set_mtu(net, host["port"], host["path_mtu"], max_segments)
        for host in hosts:
            with _network_namespace(host["pid"]) as net:
                _set_mtu(net, host["interface"], host["mtu"], max_segments)


def _extra_port(host: dict[str, Any], number: int) -> str:
    return f"air{number}-{host['number']}"


def _add_link(net: Any, switch: str, port: str, pid: int, interface: str) -> None:
    for stale in net.link_lookup(ifname=port):  # of a dead host: the kernel removes its network namespace with a delay
        with suppress(NetlinkError):
            net.link("del", index=stale)
    net.link("add", ifname=port, kind="veth", peer={"ifname": interface, "net_ns_pid": pid})
    net.link("set", index=_link_index(net, port), master=_link_index(net, switch), state="up")


def _add_bridge(net: Any, name: str, address: str, prefix: int = 24) -> None:
    net.link("add", ifname=name, kind="bridge")
    _configure_interface(net, name, address, None, prefix)


def _configure_interface(net: Any, name: str, address: str, address6: str | None, prefix: int = 24) -> None:
    index = _link_index(net, name)
    net.link("set", index=index, address=_mac(address))
    net.addr("add", index=index, address=address, prefixlen=prefix, broadcast=True)
    _bring_up(net, name)
    if address6 is not None:
        net.addr("add", index=index, address=address6, prefixlen=64, flags=IFA_F_NODAD)


def _mac(address: str) -> str:
    """Return a locally administered MAC address, the same at every boot, since ARP caches of peers keep it.

    >>> _mac("10.77.0.254")
    '02:00:0a:4d:00:fe'
    """
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def _bring_up(net: Any, name: str) -> None:
    net.link("set", index=_link_index(net, name), state="up")


def _set_mtu(net: Any, name: str, mtu: int, max_segments: int) -> None:
    net.link("set", index=_link_index(net, name), mtu=mtu, gso_max_segs=max_segments)


def _shape_traffic(net: Any, name: str, bps: int | None, policed: bool) -> None:
    """Limit the egress rate of an interface, by queueing (HTB) or by dropping (a token bucket)."""
    index = _link_index(net, name)
    try:
        net.tc("del", index=index, root=True)
    except NetlinkError as error:
        if error.code not in (2, 22):  # ENOENT, EINVAL: there was none
            raise
    if bps is None:
        return
    rate = bps // 8  # bytes a second
    if policed:
        net.tc("add", "tbf", index, 0x10000, rate=rate, burst=POLICER_BURST_BYTES, limit=POLICER_BURST_BYTES)
        return
    burst = max(BURST_MIN_BYTES, int(rate * BURST_S))
    net.tc("add", "htb", index, 0x10000, default=0x1)
    net.tc("add-class", "htb", index, 0x10001, parent=0x10000, rate=rate, burst=burst, cburst=burst, quantum=60_000)
    limit = max(QUEUE_MIN_BYTES, int(rate * QUEUE_S))
    net.tc("add", "bfifo", index, 0x100000, parent=0x10001, limit=limit)


def _link_index(net: Any, name: str) -> int:
    return int(net.link_lookup(ifname=name)[0])


@contextmanager
def _network_namespace(pid: int) -> Iterator[Any]:
    """Open a netlink socket in the network namespace of a process. This process stays in it until the next call."""
    _enter_namespace(pid, "net")
    with IPRoute() as net:
        yield net


def _enter_namespace(pid: int, kind: str) -> None:
    fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns {kind} of {pid}: {os.strerror(ctypes.get_errno())}")
    os.close(fd)


def main() -> None:
    """Run the calls that stdin names."""
    request = json.load(sys.stdin)
    network = LabNetwork(request["desk"], request["rootless"])
    for name, arguments in request["calls"]:
        getattr(network, name)(**arguments)


if __name__ == "__main__":
    main()
