"""Fault drills between two machines: names, interfaces, firewalls, MTU, links, ports."""

from __future__ import annotations

import os

from evener.hosts.gains import RECEIVE
from evener.lab.drill import Drill, Raw, doctor, fleet_line, lab_step, on
from evener.lab.faults import (
    PRIVATELY,
    cable,
    face,
    firewall,
    guarded,
    name_is,
    probed,
    rate,
    set_env,
    start,
    sysctl,
)
from evener.lab.scripts import ALL_REDUCE
from evener.lab.spec import HostSpec

PLAIN = {"a": HostSpec(), "b": HostSpec()}
TEN_MINUTES = "torchrun would wait for 10 minutes"
HALF_AN_HOUR = "Gloo would wait for 30 minutes"
QUICK = doctor("--quick")
HOLE = "nft add table inet hole" + "".join(
    f"; nft add chain inet hole {hook} '{{ type filter hook {hook} priority 0; }}'"
    f"; nft add rule inet hole {hook} meta length '>' 1300 drop"
    for hook in ("input", "output")
)
IS_ROOT = os.geteuid() == 0  # otherwise doctor cannot read the firewall's rules and can only guess the fix


def torchrun(master: str = "a", first: str = "a", script: str = "allreduce.py", before: str = "") -> dict[str, str]:
    """Return the torchrun command that a user types on each of the two hosts."""
    ranks = {"a": int(first != "a"), "b": int(first != "b")}
    rendezvous = f"--master_addr {master} --master_port 29500"
    return {
        host: f"{before}torchrun --nnodes 2 --node_rank {rank} {rendezvous} {script}" for host, rank in ranks.items()
    }


def all_reduce(waits: str = "", *, master: str = "a", first: str = "a", before: str = "") -> Raw:
    """Return the manual reproduction that starts a plain all-reduce on both hosts."""
    return Raw(
        commands=torchrun(master, first, before=before),
        files={"allreduce.py": ALL_REDUCE}, waits=waits, works_when_mended=not before,
    )  # fmt: skip


DRILLS = [
    Drill(
        name="net.loopback-hostname", check="net.loopback-hostname", host="a",
        says="each host's /etc/hosts maps its own name to 127.0.1.1, as Debian's installer writes it",
        why="Gloo resolves its own hostname and sends the result to the others. With 127.0.1.1 each calls itself.",
        fault=[name_is("a", "a", "127.0.1.1"), name_is("b", "b", "127.0.1.1")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.loopback-hostname-localhost", check="net.loopback-hostname", host="b",
        says="b is called localhost",
        why="It never got a name. On every machine localhost is the machine itself.",
        fault=[on("b", "hostname localhost")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="host.same-name", check="host.same-name", host="b", peer="a",
        says="b was cloned from a, and is still called a",
        why="A host that resolves the other's name gets itself. In logs, dashboards and prompts the two look like one.",
        fault=[on("b", "hostname a")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.duplicate-address", check="net.duplicate-address", host="b", peer="c",
        says="c uses b's address 10.77.0.2 in addition to its own",
        why="The last to answer ARP gets the packets: ssh warns of an attack, connections reach the wrong host.",
        fault=[on("c", "ip address add 10.77.0.2/24 dev eth0")],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}"), look=QUICK,
        hosts=dict.fromkeys("abc", HostSpec()), lasts_s=60,
    ),
    Drill(
        name="net.wrong-interface", check="net.wrong-interface", host="a",
        says="each host's name resolves to 172.17.0.1, the address of docker0",
        why="Every machine with Docker has 172.17.0.1: each advertises an address that the other has too.",
        fault=[name_is("a", "a", "172.17.0.1"), name_is("b", "b", "172.17.0.1")],
        mend=[set_env("a", "GLOO_SOCKET_IFNAME", "eth0"), set_env("b", "GLOO_SOCKET_IFNAME", "eth0")],
        raw=all_reduce(HALF_AN_HOUR, master="10.77.0.1"), look=QUICK,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("docker0",))),
    ),
    Drill(
        name="net.wrong-interface-named", check="net.wrong-interface", host="b",
        says="the fleet file names docker0 as b's interface",
        why="No other machine is behind docker0. evener uses the interface you name, so it tests it before a run.",
        fault=[fleet_line("b", "interface", "docker0")],
        raw=all_reduce(HALF_AN_HOUR, before="GLOO_SOCKET_IFNAME=docker0 "), look=QUICK,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("docker0",))),
    ),
    Drill(
        name="net.overlay", check="net.overlay", host="a",
        says="each host's name resolves to its Tailscale address, although both share a LAN",
        why="It works, so nobody notices: a user-space program encrypts every gradient and sends it in small packets.",
        fault=[name_is("a", "a", "100.64.0.1"), name_is("b", "b", "100.64.0.2")],
        mend=[set_env("a", "GLOO_SOCKET_IFNAME", "eth0"), set_env("b", "GLOO_SOCKET_IFNAME", "eth0")],
        raw=all_reduce(master="10.77.0.1"), look=QUICK,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("tailscale0",))),
    ),
    Drill(
        name="net.overlay-named", check="net.overlay", host="b",
        says="the fleet file names tailscale0 as b's interface, and eth0 is in the same LAN as a's",
        why="The tunnel is needed away from home. At home the cable is ten times faster.",
        fault=[fleet_line("b", "interface", "tailscale0")],
        raw=all_reduce(master="10.77.0.1", before="GLOO_SOCKET_IFNAME=tailscale0 "), look=QUICK,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("tailscale0",))),
    ),
    Drill(
        name="net.family-mismatch", check="net.family-mismatch", host="b", peer="a",
        says="b resolves its own name to an IPv6 address, a uses IPv4",
        why="Gloo connects sockets of one address family, and each host takes the first one that its resolver returns.",
        fault=[on("b", "sed -i '1i fd77::2 b' /etc/hosts")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.unresolvable", check="net.unresolvable", host="b", peer="a",
        says="b cannot resolve the name a",
        why="torchrun retries for a long time before it reports this. An address would have worked.",
        fault=[name_is("b", "a", "")],
        raw=all_reduce(TEN_MINUTES), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.rendezvous-loopback", check="net.rendezvous-loopback", host="b",
        says="b's environment has MASTER_ADDR=localhost",
        why="Copied from a tutorial for one machine: with several, every host waits for the others on itself.",
        fault=[set_env("b", "MASTER_ADDR", "localhost")],
        raw=all_reduce(TEN_MINUTES, master='"${MASTER_ADDR:-a}"'), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.rendezvous-loopback-name", check="net.rendezvous-loopback", host="b", peer="a",
        says="b resolves the name a to 127.0.0.1",
        why="A line of /etc/hosts was copied from a to b. b looks for the rendezvous on itself.",
        fault=[name_is("b", "a", "127.0.0.1")],
        raw=all_reduce(TEN_MINUTES), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.firewall", check="net.firewall", host="a", peer="b",
        says="a accepts port 29500 and ssh, and drops packets to other ports",
        why="The rendezvous needs one port, each Gloo connection a new one. The launch looks good, and then hangs.",
        fault=[firewall("a", "tcp dport { 22, 29500 } accept", "meta l4proto { tcp, udp } drop")],
        mend=None if IS_ROOT else [firewall("a")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.firewall-one-way", check="net.firewall", host="b", peer="a",
        says="b drops connections from a; connections from b to a pass",
        why="With a as the first host Gloo happens to connect from b to a, and it works. With b first it does not.",
        fault=[firewall("b", "tcp dport 22 accept", "ip saddr 10.77.0.1 drop")],
        mend=None if IS_ROOT else [firewall("b")],
        raw=all_reduce(TEN_MINUTES, master="b", first="b"), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.firewall-refused", check="net.firewall", host="a", peer="b",
        says="a refuses port 29500 to everyone",
        why="torchrun retries without a message: it cannot tell a firewall from a host that is not up yet.",
        fault=[firewall("a", "tcp dport 29500 reject with tcp reset")],
        mend=None if IS_ROOT else [firewall("a")],
        raw=all_reduce(TEN_MINUTES), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.mtu", check="net.mtu", host="a", peer="b",
        says="packets of more than 1400 bytes vanish on the path, without an ICMP message",
        why="One number passes, 16 MB never do: typical of VPNs, PPPoE and misconfigured switches.",
        fault=[lab_step("between them: drop every packet larger than 1400 bytes",
                        lambda stage: stage.host("a").set_mtu(1500, path_mtu=1400))],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.mtu-jumbo", check="net.mtu", host="b", peer="a",
        says="b sends packets of 9000 bytes into a network of 1500",
        why="Jumbo frames need support by all cards and switches. TCP adapts by itself; other packets vanish.",
        fault=[on("b", "ip link set dev eth0 mtu 9000")],
        raw=all_reduce(), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.mtu-ssh", check="net.mtu", host="b",
        says="packets of more than 1300 bytes to and from b vanish, those of ssh included",
        why="ssh connects and then hangs: the packet with its list of ciphers is too large to get through.",
        fault=[on("b", HOLE)],
        mend=[on("b", "nft delete table inet hole")],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}", waits="ssh would wait for 2 minutes"),
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.slow-link", check="net.slow-link", host="a", peer="b",
        says="b's link carries 100 Mbit/s",
        why="Everything works, ten times slower. Only a measurement shows it: one broken wire of eight is enough.",
        fault=[rate("b", "100Mbit")], mend=[rate("b", "10Gbit")],
        raw=all_reduce(), look=doctor(), hosts=PLAIN,
    ),
    Drill(
        name="net.slow-link-duplex", check="net.slow-link", host="b",
        says="b's card has negotiated 10 Mbit/s, half duplex",
        why="One end was set by hand, the other negotiates: the result is half duplex, and late collisions.",
        fault=[face("b", "/sys/class/net/eth0/speed", "10"), face("b", "/sys/class/net/eth0/duplex", "half")],
        mend=[face("b", "/sys/class/net/eth0/speed", "1000"), face("b", "/sys/class/net/eth0/duplex", "full")],
        silence="nothing: torch never reads the card's speed (and the lab only shows it, it does not slow down)",
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.wireless", check="net.wireless", host="b",
        says="b's cable eth1 is unplugged, its Wi-Fi stays: 30 Mbit/s",
        why="A laptop switches to Wi-Fi without a message, and every step of every machine waits for it.",
        fault=[on("b", "ip link set dev eth1 down")],
        mend=[on("b", "ip link set dev eth1 up"), *(set_env(host, "GLOO_SOCKET_IFNAME", "eth1") for host in "ab")],
        raw=all_reduce(), look=QUICK,
        hosts={"a": HostSpec(more_interfaces=("eth1",)),
               "b": HostSpec(interface="wlan0", rate="30Mbit", more_interfaces=("eth1",))},
    ),
    Drill(
        name="net.stack-loss", check="net.stack-loss", host="a", peer="b",
        says="a switch between them drops packets above 200 Mbit/s instead of queueing them",
        why="A policer without a buffer: TCP retransmits what was lost, and a collective waits for the last segment.",
        fault=[rate("b", "10Gbit", "200Mbit", policed=True)], mend=[rate("b", "10Gbit")],
        raw=all_reduce(), look=doctor(), hosts=PLAIN, may_also=("net.asymmetric", "net.slow-link"),
    ),
    Drill(
        name="net.asymmetric", check="net.asymmetric", host="b", peer="a",
        says="b sends at 200 Mbit/s and receives at 1 Gbit/s",
        why="A ring needs both directions at once: it is as fast as the slower one.",
        fault=[rate("b", "200Mbit", "1Gbit")], mend=[rate("b", "10Gbit")],
        raw=all_reduce(), look=doctor(), hosts=PLAIN,
    ),
    Drill(
        name="link.window", check="link.window", host="b", peer="a",
        says="b's tcp_rmem ends at 8 KB",
        why="A line from an old guide. A stream carries at most one window per round trip, however fast the wire is.",
        fault=[sysctl("b", RECEIVE, "4096 8192 8192"), probed("link.window")],
        raw=all_reduce(), look=QUICK, hosts=dict.fromkeys("ab", HostSpec(rate="1Gbit")), may_also=("link.congestion",),
    ),
    Drill(
        name="net.private", check="net.private", host="b",
        says="only the run's hosts may connect to a; b lost the same rules at its last reboot",
        why="Neither torch's store nor Gloo asks for a password. Anyone who reaches the port can end or join a run.",
        fault=[guarded("a")], silence="nothing: a run also works without rules, and a connection leaves no trace",
        look=PRIVATELY, hosts=PLAIN, lacks=lambda: None if IS_ROOT else "only root may read the firewall's rules",
    ),
    Drill(
        name="port.in-use", check="port.in-use", host="a",
        says="another program on a listens on port 29500",
        why="A notebook, a second job, or yesterday's. evener takes another port, and reports who has this one.",
        fault=[start("a", "python3 -m http.server 29500", ready="ss -Hltn 'sport = :29500' | grep -q 29500")],
        raw=all_reduce(), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.unreachable", check="ssh.unreachable", host="b",
        says="b's cable is unplugged",
        why="ssh exits with status 255 for many reasons. Its last message tells them apart.",
        fault=[cable("b", False)], mend=[cable("b", True)],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}"), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.unreachable-frozen", check="ssh.unreachable", host="b",
        says="b accepts the connection and then sends nothing, like a machine that is out of memory",
        why="A connection is not a reply: without a timeout of its own, ssh waits for two minutes and more.",
        fault=[on("b", "kill -STOP $(pgrep -o sshd)")], mend=[on("b", "kill -CONT $(pgrep -o sshd)")],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}", waits="ssh would wait for 2 minutes"),
        look=QUICK, hosts=PLAIN,
    ),
]  # fmt: skip
