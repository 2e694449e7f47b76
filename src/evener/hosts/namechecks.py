"""Do names mean the same everywhere: a host's own, the first host's, and in which family? Pure, as `checks`.

evener goes by addresses and tells Gloo the interface; what is found here hits whoever starts torchrun by hand.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from evener.core.finding import Finding
from evener.hosts.seen import Seen, is_address

BY_NAMES = "; evener goes by addresses, torchrun by names"
BY_INTERFACE = "; evener tells Gloo the interface, torchrun by hand does not"


def host_names(seen: Seen) -> Iterator[Finding]:
    """Does every host have a name of its own?"""
    first: dict[str, str] = {}
    for name, facts in seen.facts.items():
        way, root = seen.network.ways.get(name), seen.sudo(name)
        rename = f"on {name}: {root}hostname {name} && echo {name} | {root}tee /etc/hostname"
        rename += f" && echo '{way.address} {name}' | {root}tee -a /etc/hosts" if way is not None else ""
        other = first.setdefault(facts.hostname, name)
        if facts.hostname.partition(".")[0] == "localhost":
            yield Finding(
                check="net.loopback-hostname", severity="warning", host=name,
                evidence=f"it is called {facts.hostname}, as every machine calls itself: Gloo alone would take "
                f"{facts.gloo.address}{BY_INTERFACE}",
                fix=rename,
            )  # fmt: skip
        elif other != name and facts.machine_id != seen.facts[other].machine_id:
            yield Finding(
                check="host.same-name", severity="warning", host=name, peer=other,
                evidence=f"{other} and {name} both call themselves {facts.hostname}{BY_NAMES}",
                fix=rename,
            )  # fmt: skip


def known_names(seen: Seen) -> Iterator[Finding]:
    """Is the name of the first host, by which torchrun would be met, known on every other?"""
    head = seen.head
    if head is None or head not in seen.network.ways:
        return
    told = {facts.environment["MASTER_ADDR"] for facts in seen.facts.values() if "MASTER_ADDR" in facts.environment}
    address = seen.fleet.hosts[head].address.rpartition("@")[2]
    names = [seen.facts[head].hostname, *({address} if not is_address(address) and address != "local" else ()), *told]
    for name in dict.fromkeys(one for one in names if not is_address(one)):
        looked = {host: known for host, known in seen.network.resolved.items() if host != head and name in known}
        answers = {host: known[name] for host, known in looked.items()}
        lost = [host for host, one in answers.items() if not one]
        if not lost or (name == address and name != seen.facts[head].hostname and len(lost) == len(answers)):
            continue  # known to nobody: a name of ssh's own
        if not (name in told or len(lost) < len(answers) or _knows_any(seen)):  # names are in nobody's use here
            one = lost[0] if len(lost) == 1 else None
            yield Finding(
                check="net.unresolvable", severity="info", host=one, peer=head,
                evidence=f"{one or 'no other host'} does not know the name {name}{BY_NAMES}",
                fix=hosts_line(seen, lost[0], head),
            )  # fmt: skip
            continue
        for host in lost:
            yield Finding(
                check="net.unresolvable", severity="warning", host=host, peer=head,
                evidence=f"{host} does not know the name {name}{BY_NAMES}", fix=hosts_line(seen, host, head),
            )  # fmt: skip


def _knows_any(seen: Seen) -> bool:
    """Do hosts know each other by name here, as a rule?"""
    own = {facts.hostname: name for name, facts in seen.facts.items()}
    return any(
        answers and not is_loopback(answers[0])
        for host, known in seen.network.resolved.items()
        for name, answers in known.items()
        if name in own and own[name] != host
    )


def families(seen: Seen) -> Iterator[Finding]:
    """Do all hosts meet by addresses of one family, IPv4 or IPv6, and do names stand for one of them?"""
    ways = {name: ":" in way.address for name, way in seen.network.ways.items()}
    if len(set(ways.values())) > 1:
        six = [name for name, is_six in ways.items() if is_six]
        four = [name for name, is_six in ways.items() if not is_six]
        for name in six if len(six) <= len(four) else four:
            way = seen.network.ways[name]
            yield Finding(
                check="net.family-mismatch", severity="error", host=name,
                evidence=f"it can only be reached by IPv{6 if ways[name] else 4} ({way.address} on {way.interface}), "
                f"{(four if ways[name] else six)[0]} by IPv{4 if ways[name] else 6}: Gloo needs one of them everywhere",
                fix=f"on {name}: sudo ip address add … dev {way.interface}, of the other family",
            )  # fmt: skip
        return
    told = set()
    for name in checked_names(seen):
        answers = {host: one for host, known in seen.network.resolved.items() if (one := known.get(name))}
        first = {host: ":" in one[0] for host, one in answers.items() if not is_loopback(one[0])}
        if len(set(first.values())) > 1:
            six = [host for host, is_six in first.items() if is_six]
            four_host = next(host for host, is_six in first.items() if not is_six)
            told.add(name)
            number, other = answers[six[0]][0], answers[four_host][0]
            yield Finding(
                check="net.family-mismatch", severity="warning", host=six[0], peer=four_host,
                evidence=f"{name} is {number} on {six[0]} and {other} on {four_host}{BY_NAMES}",
                fix=in_place_of(six[0], name, other, seen.sudo(six[0])),
            )  # fmt: skip
    alone = {name: facts.gloo.address for name, facts in seen.facts.items()
             if not is_loopback(facts.gloo.address) and facts.gloo.hostname not in told}  # fmt: skip
    sixes = [name for name, address in alone.items() if ":" in address]
    if sixes and len(sixes) < len(alone):
        mine, other = sixes[0], next(name for name in alone if name not in sixes)
        yield Finding(
            check="net.family-mismatch", severity="warning", host=mine, peer=other,
            evidence=f"Gloo alone would take {alone[mine]} on {mine} and {alone[other]} on {other}{BY_INTERFACE}",
            fix=f"on {mine}: export GLOO_SOCKET_IFNAME={seen.network.ways[mine].interface}"
            if mine in seen.network.ways else hosts_line(seen, mine, mine),
        )  # fmt: skip


def checked_names(seen: Seen) -> list[str]:
    """Every name that was looked up somewhere."""
    return list(dict.fromkeys(name for known in seen.network.resolved.values() for name in known))


def hosts_line(seen: Seen, host: str, target: str) -> str:
    """What lets a host know another's name."""
    way = seen.network.ways.get(target)
    hostname = seen.facts[target].hostname
    return f"on {host}: echo '{way.address if way else '…'} {hostname}' | {seen.sudo(host)}tee -a /etc/hosts"


def in_place_of(host: str, name: str, address: str, as_root: str) -> str:
    """A line of /etc/hosts in place of what is told there: where both stand, the resolver would still find the other.

    The name goes from its line, which may have others.
    """
    gone = f"{as_root}sed -i.old -E 's/[[:space:]]+{name}([[:space:]]|$)/\\1/' /etc/hosts"
    return f"on {host}: {gone}; echo '{address} {name}' | {as_root}tee -a /etc/hosts"


def is_loopback(address: str) -> bool:
    """Does it lead no further than the host itself, or its link?"""
    number = ipaddress.ip_address(address.partition("%")[0])
    return number.is_loopback or number.is_link_local
