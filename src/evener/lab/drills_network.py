"""Drills: what goes wrong between two machines."""

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
    f"; nft add chain inet hole {way} '{{ type filter hook {way} priority 0; }}'"
    f"; nft add rule inet hole {way} meta length '>' 1300 drop"
    for way in ("input", "output")
)
IS_ROOT = os.geteuid() == 0  # else doctor may not ask which firewall there is, and can only guess its command


def torchrun(master: str = "a", first: str = "a", script: str = "allreduce.py", before: str = "") -> dict[str, str]:
    """What a person types on the two hosts."""
    ranks = {"a": int(first != "a"), "b": int(first != "b")}
    where = f"--master_addr {master} --master_port 29500"
    return {host: f"{before}torchrun --nnodes 2 --node_rank {rank} {where} {script}" for host, rank in ranks.items()}


def all_reduce(waits: str = "", *, master: str = "a", first: str = "a", before: str = "") -> Raw:
    """A plain all-reduce, started by hand on both."""
    return Raw(
        commands=torchrun(master, first, before=before),
        files={"allreduce.py": ALL_REDUCE}, waits=waits, works_when_mended=not before,
    )  # fmt: skip


DRILLS = [
    Drill(
        name="net.loopback-hostname", check="net.loopback-hostname", host="a",
        says="the name of each host stands for 127.0.1.1 in its own /etc/hosts, as Debian's installer writes it",
        why="Gloo looks up its own host's name and tells the others what it finds. Told 127.0.1.1, each calls itself.",
        fault=[name_is("a", "a", "127.0.1.1"), name_is("b", "b", "127.0.1.1")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.loopback-hostname-localhost", check="net.loopback-hostname", host="b",
        says="b is called localhost",
        why="Nobody gave it a name. Every machine has a localhost, and it is never another one.",
        fault=[on("b", "hostname localhost")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="host.same-name", check="host.same-name", host="b", peer="a",
        says="b was cloned from a, and is still called a",
        why="Whoever goes by names meets itself. And in logs, dashboards and prompts two machines are one.",
        fault=[on("b", "hostname a")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.duplicate-address", check="net.duplicate-address", host="b", peer="c",
        says="c has taken b's address 10.77.0.2, beside its own",
        why="Who is reached there is whoever answered last: ssh warns of an attack, a connection meets a stranger.",
        fault=[on("c", "ip address add 10.77.0.2/24 dev eth0")],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}"), look=QUICK,
        hosts=dict.fromkeys("abc", HostSpec()), lasts_s=60,
    ),
    Drill(
        name="net.wrong-interface", check="net.wrong-interface", host="a",
        says="the name of each host stands for 172.17.0.1, the address of docker0",
        why="Every machine with Docker has 172.17.0.1: each tells the other to call an address that is also its own.",
        fault=[name_is("a", "a", "172.17.0.1"), name_is("b", "b", "172.17.0.1")],
        mend=[set_env("a", "GLOO_SOCKET_IFNAME", "eth0"), set_env("b", "GLOO_SOCKET_IFNAME", "eth0")],
        raw=all_reduce(HALF_AN_HOUR, master="10.77.0.1"), look=QUICK,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("docker0",))),
    ),
    Drill(
        name="net.wrong-interface-named", check="net.wrong-interface", host="b",
        says="the fleet file names docker0 as b's interface",
        why="No other machine is behind docker0. A named interface is obeyed, so it is tried before a run.",
        fault=[fleet_line("b", "interface", "docker0")],
        raw=all_reduce(HALF_AN_HOUR, before="GLOO_SOCKET_IFNAME=docker0 "), look=QUICK,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("docker0",))),
    ),
    Drill(
        name="net.overlay", check="net.overlay", host="a",
        says="the name of each host stands for its Tailscale address, although both share a LAN",
        why="It works, so nobody looks: every gradient is encrypted, wrapped in small packets and sent by a program.",
        fault=[name_is("a", "a", "100.64.0.1"), name_is("b", "b", "100.64.0.2")],
        mend=[set_env("a", "GLOO_SOCKET_IFNAME", "eth0"), set_env("b", "GLOO_SOCKET_IFNAME", "eth0")],
        raw=all_reduce(master="10.77.0.1"), look=QUICK,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("tailscale0",))),
    ),
    Drill(
        name="net.overlay-named", check="net.overlay", host="b",
        says="the fleet file names tailscale0 as b's interface, and eth0 is in the same LAN as a's",
        why="The tunnel was needed from the café. At home the cable is ten times faster.",
        fault=[fleet_line("b", "interface", "tailscale0")],
        raw=all_reduce(master="10.77.0.1", before="GLOO_SOCKET_IFNAME=tailscale0 "), look=QUICK,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("tailscale0",))),
    ),
    Drill(
        name="net.family-mismatch", check="net.family-mismatch", host="b", peer="a",
        says="b takes its own name for an IPv6 address, a goes by IPv4",
        why="Gloo connects sockets of one family, and which one a host takes is whatever its resolver finds first.",
        fault=[on("b", "sed -i '1i fd77::2 b' /etc/hosts")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.unresolvable", check="net.unresolvable", host="b", peer="a",
        says="b does not know the name a",
        why="torchrun asks the resolver again and again before it says so. An address would have done.",
        fault=[name_is("b", "a", "")],
        raw=all_reduce(TEN_MINUTES), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.rendezvous-loopback", check="net.rendezvous-loopback", host="b",
        says="b's environment says MASTER_ADDR=localhost",
        why="Copied from a tutorial for one machine: here every host waits for the others at its own door.",
        fault=[set_env("b", "MASTER_ADDR", "localhost")],
        raw=all_reduce(TEN_MINUTES, master='"${MASTER_ADDR:-a}"'), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.rendezvous-loopback-name", check="net.rendezvous-loopback", host="b", peer="a",
        says="b takes the name a for 127.0.0.1",
        why="A line of /etc/hosts that was copied from a to b. b looks for the rendezvous on itself.",
        fault=[name_is("b", "a", "127.0.0.1")],
        raw=all_reduce(TEN_MINUTES), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.firewall", check="net.firewall", host="a", peer="b",
        says="a lets b in on port 29500 and on ssh's, and drops what comes to other ports",
        why="The rendezvous needs one port, each connection of Gloo's a fresh one. The launch looks well, and stops.",
        fault=[firewall("a", "tcp dport { 22, 29500 } accept", "meta l4proto { tcp, udp } drop")],
        mend=None if IS_ROOT else [firewall("a")],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.firewall-one-way", check="net.firewall", host="b", peer="a",
        says="b drops what a begins; what b begins passes",
        why="With a as the first host Gloo happens to connect from b to a, and all is well. With b first it is not.",
        fault=[firewall("b", "tcp dport 22 accept", "ip saddr 10.77.0.1 drop")],
        mend=None if IS_ROOT else [firewall("b")],
        raw=all_reduce(TEN_MINUTES, master="b", first="b"), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.firewall-refused", check="net.firewall", host="a", peer="b",
        says="a refuses port 29500 to everyone",
        why="torchrun tries again and again without a word: it cannot tell a firewall from a host that is not up yet.",
        fault=[firewall("a", "tcp dport 29500 reject with tcp reset")],
        mend=None if IS_ROOT else [firewall("a")],
        raw=all_reduce(TEN_MINUTES), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.mtu", check="net.mtu", host="a", peer="b",
        says="packets of more than 1400 bytes vanish on the way, and nobody is told",
        why="One number passes, sixteen megabytes never do: the classic of VPNs, PPPoE and badly set switches.",
        fault=[lab_step("on the way between them: whatever is larger than 1400 bytes is dropped",
                        lambda stage: stage.host("a").set_mtu(1500, path_mtu=1400))],
        raw=all_reduce(HALF_AN_HOUR), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.mtu-jumbo", check="net.mtu", host="b", peer="a",
        says="b sends packets of 9000 bytes into a network of 1500",
        why="Jumbo frames are an agreement of all cards and switches. TCP finds out by itself; the rest vanishes.",
        fault=[on("b", "ip link set dev eth0 mtu 9000")],
        raw=all_reduce(), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.mtu-ssh", check="net.mtu", host="b",
        says="packets of more than 1300 bytes to and from b vanish, ssh's among them",
        why="ssh connects and says no more: its list of ciphers is longer than what gets through.",
        fault=[on("b", HOLE)],
        mend=[on("b", "nft delete table inet hole")],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}", waits="ssh would wait for 2 minutes"),
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.slow-link", check="net.slow-link", host="a", peer="b",
        says="b's link carries 100 Mbit/s",
        why="Everything works, ten times slower. Only a measurement shows it: a broken wire of eight is enough.",
        fault=[rate("b", "100Mbit")], mend=[rate("b", "10Gbit")],
        raw=all_reduce(), look=doctor(), hosts=PLAIN,
    ),
    Drill(
        name="net.slow-link-duplex", check="net.slow-link", host="b",
        says="b's card has agreed on 10 Mbit/s, half duplex",
        why="One end was set by hand, the other negotiates: the result is half duplex, and late collisions.",
        fault=[face("b", "/sys/class/net/eth0/speed", "10"), face("b", "/sys/class/net/eth0/duplex", "half")],
        mend=[face("b", "/sys/class/net/eth0/speed", "1000"), face("b", "/sys/class/net/eth0/duplex", "full")],
        silence="nothing: torch never asks the card (and the lab only shows the figures, it does not slow down)",
        look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="net.wireless", check="net.wireless", host="b",
        says="b's cable eth1 is out, its Wi-Fi stays: 30 Mbit/s",
        why="A laptop goes on by Wi-Fi without a word, and every step of every machine waits for it.",
        fault=[on("b", "ip link set dev eth1 down")],
        mend=[on("b", "ip link set dev eth1 up"), *(set_env(host, "GLOO_SOCKET_IFNAME", "eth1") for host in "ab")],
        raw=all_reduce(), look=QUICK,
        hosts={"a": HostSpec(more_interfaces=("eth1",)),
               "b": HostSpec(interface="wlan0", rate="30Mbit", more_interfaces=("eth1",))},
    ),
    Drill(
        name="net.stack-loss", check="net.stack-loss", host="a", peer="b",
        says="a switch between them drops what comes faster than 200 Mbit/s, where others would queue it",
        why="A policer without a buffer: TCP sends again what was lost, and a collective waits for the last segment.",
        fault=[rate("b", "10Gbit", "200Mbit", policed=True)], mend=[rate("b", "10Gbit")],
        raw=all_reduce(), look=doctor(), hosts=PLAIN, may_also=("net.asymmetric", "net.slow-link"),
    ),
    Drill(
        name="net.asymmetric", check="net.asymmetric", host="b", peer="a",
        says="b sends with 200 Mbit/s and receives with 1 Gbit/s",
        why="A ring needs both directions at once: it is as fast as the slower one.",
        fault=[rate("b", "200Mbit", "1Gbit")], mend=[rate("b", "10Gbit")],
        raw=all_reduce(), look=doctor(), hosts=PLAIN,
    ),
    Drill(
        name="link.window", check="link.window", host="b", peer="a",
        says="b's tcp_rmem ends at 8 KB",
        why="A line from an old guide. A stream carries at most a window in each round trip, whatever the wire could.",
        fault=[sysctl("b", RECEIVE, "4096 8192 8192"), probed("link.window")],
        raw=all_reduce(), look=QUICK, hosts=dict.fromkeys("ab", HostSpec(rate="1Gbit")), may_also=("link.congestion",),
    ),
    Drill(
        name="net.private", check="net.private", host="b",
        says="only the run's hosts may connect to a; the same rules on b went with its last reboot",
        why="Neither torch's store nor Gloo asks for a password. Whoever reaches the port can end a run, or join it.",
        fault=[guarded("a")], silence="nothing: a run works as well without rules, and who connects leaves no trace",
        look=PRIVATELY, hosts=PLAIN, lacks=lambda: None if IS_ROOT else "which rules there are only root may ask",
    ),
    Drill(
        name="port.in-use", check="port.in-use", host="a",
        says="another program on a listens on port 29500",
        why="A notebook, a second job, or the one of yesterday. evener takes another port, and says who has this one.",
        fault=[start("a", "python3 -m http.server 29500", ready="ss -Hltn 'sport = :29500' | grep -q 29500")],
        raw=all_reduce(), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.unreachable", check="ssh.unreachable", host="b",
        says="b's cable is out",
        why="ssh ends with status 255, and so does much else. What it said before it ended tells them apart.",
        fault=[cable("b", False)], mend=[cable("b", True)],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}"), look=QUICK, hosts=PLAIN,
    ),
    Drill(
        name="ssh.unreachable-frozen", check="ssh.unreachable", host="b",
        says="b answers the call and says nothing more, as a machine that is out of memory",
        why="A connection is not an answer: without a time-out of its own, ssh waits for two minutes and more.",
        fault=[on("b", "kill -STOP $(pgrep -o sshd)")], mend=[on("b", "kill -CONT $(pgrep -o sshd)")],
        raw=Raw(commands={"b": "hostname"}, typed="$ ssh {host} {command}", waits="ssh would wait for 2 minutes"),
        look=QUICK, hosts=PLAIN,
    ),
]  # fmt: skip
