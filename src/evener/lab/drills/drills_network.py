"""Fault drills between two machines: names, interfaces, firewalls, MTU, links, ports."""

from __future__ import annotations

import os

from evener.doctor.tcp_settings import TCP_RMEM_SYSCTL
from evener.lab.drills.drill_runner import (
    Drill,
    ManualReproduction,
    doctor_diagnosis,
    make_lab_step,
    on_host,
    set_fleet_line,
)
from evener.lab.drills.drill_scripts import ALL_REDUCE
from evener.lab.drills.drill_steps import (
    PRIVATE_DOCTOR,
    override_file,
    probe_wire,
    restrict_ports,
    set_cable,
    set_env,
    set_firewall,
    set_hosts_entry,
    set_link_rate,
    set_sysctl,
    start_program,
)
from evener.lab.lab_spec import HostSpec

TWO_HOSTS = {"a": HostSpec(), "b": HostSpec()}
TORCHRUN_HANG = "torchrun would wait for 10 minutes"
GLOO_HANG = "Gloo would wait for 30 minutes"
QUICK_DOCTOR = doctor_diagnosis("--quick")
DROP_LARGE_PACKETS = "nft add table inet hole" + "".join(
    f"; nft add chain inet hole {hook} '{{ type filter hook {hook} priority 0; }}'"
    f"; nft add rule inet hole {hook} meta length '>' 1300 drop"
    for hook in ("input", "output")
)
IS_ROOT = os.geteuid() == 0  # otherwise doctor cannot read the firewall's rules and can only guess the fix


def torchrun_commands(
    master_addr: str = "a", rank0_host: str = "a", script: str = "allreduce.py", env_prefix: str = ""
) -> dict[str, str]:
    """Return the torchrun command that a user types on each of the two hosts."""
    ranks = {"a": int(rank0_host != "a"), "b": int(rank0_host != "b")}
    rendezvous = f"--master_addr {master_addr} --master_port 29500"
    return {
        host: f"{env_prefix}torchrun --nnodes 2 --node_rank {rank} {rendezvous} {script}"
        for host, rank in ranks.items()
    }


def manual_all_reduce(
    hang_description: str = "", *, master_addr: str = "a", rank0_host: str = "a", env_prefix: str = ""
) -> ManualReproduction:
    """Return the manual reproduction that starts a plain all-reduce on both hosts."""
    return ManualReproduction(
        commands=torchrun_commands(master_addr, rank0_host, env_prefix=env_prefix),
        files={"allreduce.py": ALL_REDUCE}, hang_description=hang_description, succeeds_after_fix=not env_prefix,
    )  # fmt: skip


NETWORK_DRILLS = [
    Drill(
        name="net.loopback-hostname",
        check="net.loopback-hostname",
        host="a",
        description="each host's /etc/hosts maps its own name to 127.0.1.1, as Debian's installer writes it",
        lesson="Gloo resolves its own hostname and sends the result to the others. With 127.0.1.1 each calls itself.",
        fault=[set_hosts_entry("a", "a", "127.0.1.1"), set_hosts_entry("b", "b", "127.0.1.1")],
        manual=manual_all_reduce(GLOO_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.loopback-hostname-localhost",
        check="net.loopback-hostname",
        host="b",
        description="b is called localhost",
        lesson="It never got a name. On every machine localhost is the machine itself.",
        fault=[on_host("b", "hostname localhost")],
        manual=manual_all_reduce(GLOO_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="host.same-name",
        check="host.same-name",
        host="b",
        peer="a",
        description="b was cloned from a, and is still called a",
        lesson="A host that resolves the other's name gets itself. In logs, dashboards and prompts the two look "
        "like one.",
        fault=[on_host("b", "hostname a")],
        manual=manual_all_reduce(GLOO_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.duplicate-address",
        check="net.duplicate-address",
        host="b",
        peer="c",
        description="c uses b's address 10.77.0.2 in addition to its own",
        lesson="The last to answer ARP gets the packets: ssh warns of an attack, connections reach the wrong host.",
        fault=[on_host("c", "ip address add 10.77.0.2/24 dev eth0")],
        manual=ManualReproduction(commands={"b": "hostname"}, prompt="$ ssh {host} {command}"),
        diagnose=QUICK_DOCTOR,
        hosts=dict.fromkeys("abc", HostSpec()),
        recovery_s=60,
    ),
    Drill(
        name="net.wrong-interface",
        check="net.wrong-interface",
        host="a",
        description="each host's name resolves to 172.17.0.1, the address of docker0",
        lesson="Every machine with Docker has 172.17.0.1: each advertises an address that the other has too.",
        fault=[set_hosts_entry("a", "a", "172.17.0.1"), set_hosts_entry("b", "b", "172.17.0.1")],
        fix=[set_env("a", "GLOO_SOCKET_IFNAME", "eth0"), set_env("b", "GLOO_SOCKET_IFNAME", "eth0")],
        manual=manual_all_reduce(GLOO_HANG, master_addr="10.77.0.1"),
        diagnose=QUICK_DOCTOR,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("docker0",))),
    ),
    Drill(
        name="net.wrong-interface-named",
        check="net.wrong-interface",
        host="b",
        description="the fleet file names docker0 as b's interface",
        lesson="No other machine is behind docker0. evener uses the interface you name, so it tests it before a run.",
        fault=[set_fleet_line("b", "interface", "docker0")],
        manual=manual_all_reduce(GLOO_HANG, env_prefix="GLOO_SOCKET_IFNAME=docker0 "),
        diagnose=QUICK_DOCTOR,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("docker0",))),
    ),
    Drill(
        name="net.overlay",
        check="net.overlay",
        host="a",
        description="each host's name resolves to its Tailscale address, although both share a LAN",
        lesson="It works, so nobody notices: a user-space program encrypts every gradient and sends it in small "
        "packets.",
        fault=[set_hosts_entry("a", "a", "100.64.0.1"), set_hosts_entry("b", "b", "100.64.0.2")],
        fix=[set_env("a", "GLOO_SOCKET_IFNAME", "eth0"), set_env("b", "GLOO_SOCKET_IFNAME", "eth0")],
        manual=manual_all_reduce(master_addr="10.77.0.1"),
        diagnose=QUICK_DOCTOR,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("tailscale0",))),
    ),
    Drill(
        name="net.overlay-named",
        check="net.overlay",
        host="b",
        description="the fleet file names tailscale0 as b's interface, and eth0 is in the same LAN as a's",
        lesson="The tunnel is needed away from home. At home the cable is ten times faster.",
        fault=[set_fleet_line("b", "interface", "tailscale0")],
        manual=manual_all_reduce(master_addr="10.77.0.1", env_prefix="GLOO_SOCKET_IFNAME=tailscale0 "),
        diagnose=QUICK_DOCTOR,
        hosts=dict.fromkeys("ab", HostSpec(more_interfaces=("tailscale0",))),
    ),
    Drill(
        name="net.family-mismatch",
        check="net.family-mismatch",
        host="b",
        peer="a",
        description="b resolves its own name to an IPv6 address, a uses IPv4",
        lesson="Gloo connects sockets of one address family, and each host takes the first one that its "
        "resolver returns.",
        fault=[on_host("b", "sed -i '1i fd77::2 b' /etc/hosts")],
        manual=manual_all_reduce(GLOO_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.unresolvable",
        check="net.unresolvable",
        host="b",
        peer="a",
        description="b cannot resolve the name a",
        lesson="torchrun retries for a long time before it reports this. An address would have worked.",
        fault=[set_hosts_entry("b", "a", "")],
        manual=manual_all_reduce(TORCHRUN_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.rendezvous-loopback",
        check="net.rendezvous-loopback",
        host="b",
        description="b's environment has MASTER_ADDR=localhost",
        lesson="Copied from a tutorial for one machine: with several, every host waits for the others on itself.",
        fault=[set_env("b", "MASTER_ADDR", "localhost")],
        manual=manual_all_reduce(TORCHRUN_HANG, master_addr='"${MASTER_ADDR:-a}"'),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.rendezvous-loopback-name",
        check="net.rendezvous-loopback",
        host="b",
        peer="a",
        description="b resolves the name a to 127.0.0.1",
        lesson="A line of /etc/hosts was copied from a to b. b looks for the rendezvous on itself.",
        fault=[set_hosts_entry("b", "a", "127.0.0.1")],
        manual=manual_all_reduce(TORCHRUN_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.firewall",
        check="net.firewall",
        host="a",
        peer="b",
        description="a accepts port 29500 and ssh, and drops packets to other ports",
        lesson="The rendezvous needs one port, each Gloo connection a new one. The launch looks good, and then hangs.",
        fault=[set_firewall("a", "tcp dport { 22, 29500 } accept", "meta l4proto { tcp, udp } drop")],
        fix=None if IS_ROOT else [set_firewall("a")],
        manual=manual_all_reduce(GLOO_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.firewall-one-way",
        check="net.firewall",
        host="b",
        peer="a",
        description="b drops connections from a; connections from b to a pass",
        lesson="With a as the first host Gloo happens to connect from b to a, and it works. With b first it does not.",
        fault=[set_firewall("b", "tcp dport 22 accept", "ip saddr 10.77.0.1 drop")],
        fix=None if IS_ROOT else [set_firewall("b")],
        manual=manual_all_reduce(TORCHRUN_HANG, master_addr="b", rank0_host="b"),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.firewall-refused",
        check="net.firewall",
        host="a",
        peer="b",
        description="a refuses port 29500 to everyone",
        lesson="torchrun retries without a message: it cannot tell a firewall from a host that is not up yet.",
        fault=[set_firewall("a", "tcp dport 29500 reject with tcp reset")],
        fix=None if IS_ROOT else [set_firewall("a")],
        manual=manual_all_reduce(TORCHRUN_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.mtu",
        check="net.mtu",
        host="a",
        peer="b",
        description="packets of more than 1400 bytes vanish on the path, without an ICMP message",
        lesson="One number passes, 16 MB never do: typical of VPNs, PPPoE and misconfigured switches.",
        fault=[
            make_lab_step(
                "between them: drop every packet larger than 1400 bytes",
                lambda stage: stage.host("a").set_mtu(1500, path_mtu=1400),
            )
        ],
        manual=manual_all_reduce(GLOO_HANG),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.mtu-jumbo",
        check="net.mtu",
        host="b",
        peer="a",
        description="b sends packets of 9000 bytes into a network of 1500",
        lesson="Jumbo frames need support by all cards and switches. TCP adapts by itself; other packets vanish.",
        fault=[on_host("b", "ip link set dev eth0 mtu 9000")],
        manual=manual_all_reduce(),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.mtu-ssh",
        check="net.mtu",
        host="b",
        description="packets of more than 1300 bytes to and from b vanish, those of ssh included",
        lesson="ssh connects and then hangs: the packet with its list of ciphers is too large to get through.",
        fault=[on_host("b", DROP_LARGE_PACKETS)],
        fix=[on_host("b", "nft delete table inet hole")],
        manual=ManualReproduction(
            commands={"b": "hostname"}, prompt="$ ssh {host} {command}", hang_description="ssh would wait for 2 minutes"
        ),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.slow-link",
        check="net.slow-link",
        host="a",
        peer="b",
        description="b's link carries 100 Mbit/s",
        lesson="Everything works, ten times slower. Only a measurement shows it: one broken wire of eight is enough.",
        fault=[set_link_rate("b", "100Mbit")],
        fix=[set_link_rate("b", "10Gbit")],
        manual=manual_all_reduce(),
        diagnose=doctor_diagnosis(),
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.slow-link-duplex",
        check="net.slow-link",
        host="b",
        description="b's card has negotiated 10 Mbit/s, half duplex",
        lesson="One end was set by hand, the other negotiates: the result is half duplex, and late collisions.",
        fault=[
            override_file("b", "/sys/class/net/eth0/speed", "10"),
            override_file("b", "/sys/class/net/eth0/duplex", "half"),
        ],
        fix=[
            override_file("b", "/sys/class/net/eth0/speed", "1000"),
            override_file("b", "/sys/class/net/eth0/duplex", "full"),
        ],
        silence_reason="nothing: torch never reads the card's speed (and the lab only shows it, it does not slow down)",
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="net.wireless",
        check="net.wireless",
        host="b",
        description="b's cable eth1 is unplugged, its Wi-Fi stays: 30 Mbit/s",
        lesson="A laptop switches to Wi-Fi without a message, and every step of every machine waits for it.",
        fault=[on_host("b", "ip link set dev eth1 down")],
        fix=[on_host("b", "ip link set dev eth1 up"), *(set_env(host, "GLOO_SOCKET_IFNAME", "eth1") for host in "ab")],
        manual=manual_all_reduce(),
        diagnose=QUICK_DOCTOR,
        hosts={
            "a": HostSpec(more_interfaces=("eth1",)),
            "b": HostSpec(interface="wlan0", rate="30Mbit", more_interfaces=("eth1",)),
        },
    ),
    Drill(
        name="net.stack-loss",
        check="net.stack-loss",
        host="a",
        peer="b",
        description="a switch between them drops packets above 200 Mbit/s instead of queueing them",
        lesson="A policer without a buffer: TCP retransmits what was lost, and a collective waits for the last "
        "segment.",
        fault=[set_link_rate("b", "10Gbit", "200Mbit", policed=True)],
        fix=[set_link_rate("b", "10Gbit")],
        manual=manual_all_reduce(),
        diagnose=doctor_diagnosis(),
        hosts=TWO_HOSTS,
        also_expected=("net.asymmetric", "net.slow-link"),
    ),
    Drill(
        name="net.asymmetric",
        check="net.asymmetric",
        host="b",
        peer="a",
        description="b sends at 200 Mbit/s and receives at 1 Gbit/s",
        lesson="A ring needs both directions at once: it is as fast as the slower one.",
        fault=[set_link_rate("b", "200Mbit", "1Gbit")],
        fix=[set_link_rate("b", "10Gbit")],
        manual=manual_all_reduce(),
        diagnose=doctor_diagnosis(),
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="link.window",
        check="link.window",
        host="b",
        peer="a",
        description="b's tcp_rmem ends at 8 KB",
        lesson="A line from an old guide. A stream carries at most one window per round trip, however fast the "
        "wire is.",
        fault=[set_sysctl("b", TCP_RMEM_SYSCTL, "4096 8192 8192"), probe_wire("link.window")],
        manual=manual_all_reduce(),
        diagnose=QUICK_DOCTOR,
        hosts=dict.fromkeys("ab", HostSpec(rate="1Gbit")),
        also_expected=("link.congestion",),
    ),
    Drill(
        name="net.private",
        check="net.private",
        host="b",
        description="only the run's hosts may connect to a; b lost the same rules at its last reboot",
        lesson="Neither torch's store nor Gloo asks for a password. Anyone who reaches the port can end or join a run.",
        fault=[restrict_ports("a")],
        silence_reason="nothing: a run also works without rules, and a connection leaves no trace",
        diagnose=PRIVATE_DOCTOR,
        hosts=TWO_HOSTS,
        unsupported_reason=lambda: None if IS_ROOT else "only root may read the firewall's rules",
    ),
    Drill(
        name="port.in-use",
        check="port.in-use",
        host="a",
        description="another program on a listens on port 29500",
        lesson="A notebook, a second job, or yesterday's. evener takes another port, and reports who has this one.",
        fault=[start_program("a", "python3 -m http.server 29500", ready="ss -Hltn 'sport = :29500' | grep -q 29500")],
        manual=manual_all_reduce(),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.unreachable",
        check="ssh.unreachable",
        host="b",
        description="b's cable is unplugged",
        lesson="ssh exits with status 255 for many reasons. Its last message tells them apart.",
        fault=[set_cable("b", False)],
        fix=[set_cable("b", True)],
        manual=ManualReproduction(commands={"b": "hostname"}, prompt="$ ssh {host} {command}"),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
    Drill(
        name="ssh.unreachable-frozen",
        check="ssh.unreachable",
        host="b",
        description="b accepts the connection and then sends nothing, like a machine that is out of memory",
        lesson="A connection is not a reply: without a timeout of its own, ssh waits for two minutes and more.",
        fault=[on_host("b", "kill -STOP $(pgrep -o sshd)")],
        fix=[on_host("b", "kill -CONT $(pgrep -o sshd)")],
        manual=ManualReproduction(
            commands={"b": "hostname"}, prompt="$ ssh {host} {command}", hang_description="ssh would wait for 2 minutes"
        ),
        diagnose=QUICK_DOCTOR,
        hosts=TWO_HOSTS,
    ),
]
