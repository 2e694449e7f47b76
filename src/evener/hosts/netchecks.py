"""What is wrong between the hosts, and which command mends it? Pure, as `checks`.

Who connects to whom in a run of ours: every host to the first host's rendezvous port, and of each two hosts the one
with the greater address to an ephemeral port of the other (Gloo's Device::isInitiator; tried with torch 2.13: ports
of the greater address may be closed, and a run starts; those of the smaller may not). What only the other direction
would need is a warning: NCCL, a probe or other addresses would hang.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterator, Sequence

from evener.core.finding import Finding, Severity
from evener.hosts.facts import Facts
from evener.hosts.namechecks import (
    BY_INTERFACE,
    BY_NAMES,
    families,
    host_names,
    in_place_of,
    is_loopback,
    known_names,
)
from evener.hosts.pairs import Pair
from evener.hosts.seen import Seen, holder_of, is_address, is_mistaken, listed
from evener.hosts.ways import CLASS, NAMED, WORDS, Way

MANY = 3  # peers, from which on they are told together


def check_network(seen: Seen) -> list[Finding]:
    """Every finding about who reaches whom, and where."""
    cut_off = list(_cut_off(seen))
    separate = {(one.host, one.peer) for one in cut_off} | {(one.peer, one.host) for one in cut_off}
    interfaces, twice = list(_interfaces(seen)), list(_duplicates(seen))
    separate |= {(one.host, None) for one in [*interfaces, *twice] if one.severity == "error"}
    found = [*interfaces, *twice, *cut_off, *_firewalls(seen, separate)]
    names = list(host_names(seen))
    found += [*names, *_gloo_alone(seen, {one.host for one in names}), *_rendezvous(seen, {one.host for one in twice})]
    if not names:  # whoever is called like another cannot be told apart by name
        found += known_names(seen)
    return [*found, *families(seen), *_overlays(seen)]


# --- which interface ---------------------------------------------------------------------------------------------


def _interfaces(seen: Seen) -> Iterator[Finding]:
    """The interface that a run will use: is it there, and do the others reach it?"""
    for name, facts in seen.facts.items():
        wanted = seen.fleet.hosts[name].interface
        usable = [one.name for one in sorted(facts.interfaces, key=lambda one: CLASS[one.kind])
                  if one.up and one.addresses and one.kind != "loopback"]  # fmt: skip
        if seen.candidates[name]:
            continue
        if wanted is None:
            yield Finding(
                check="net.wrong-interface", severity="error", host=name,
                evidence="no interface but the loopback is up and has an address",
                fix=f"on {name}: ip address; is its cable in?",
            )  # fmt: skip
            continue
        syntax = any(sign in wanted for sign in "^=,*")
        there = facts.interface(wanted)
        why = "is not there" if there is None else "has no address" if not there.addresses else "is down"
        yield Finding(
            check="env.interface-syntax" if syntax else "net.wrong-interface", severity="error", host=name,
            evidence=f"interface = {wanted}: Gloo takes one exact name" if syntax else f"its interface {wanted} {why}",
            fix=f'[hosts.{name}] interface = "{_closest(wanted, usable)}"' if usable else f"on {name}: ip address",
        )  # fmt: skip
    for name, way in seen.network.ways.items():
        tried = seen.network.reached.get(name, {})
        better = _better(seen, name, way)
        if way.why == NAMED and not tried.get(way.address) and better is not None:
            yield Finding(
                check="net.wrong-interface", severity="error", host=name,
                evidence=f"no other host reaches {way.address} on {way.interface}, which the fleet file names; "
                f"all reach {better.address} on {better.interface}",
                fix=f'[hosts.{name}] interface = "{better.interface}"',
            )  # fmt: skip


def _closest(name: str, known: list[str]) -> str:
    """The near miss, else the likeliest."""
    return (difflib.get_close_matches(name, known, n=1) or known)[0]


def _better(seen: Seen, name: str, way: Way) -> Way | None:
    """A network card of the host that all its peers reach, other than the way taken."""
    num_peers = len(seen.network.ways) - 1
    tried = seen.network.reached.get(name, {})
    for other in seen.candidates.get(name, ()):
        is_card = other.address != way.address and CLASS[other.kind] == 0
        if is_card and num_peers and tried.get(other.address) == num_peers:
            return other
    return None


def _gloo_alone(seen: Seen, misnamed: set[str | None]) -> Iterator[Finding]:
    """What Gloo would take if nobody told it: evener does, torchrun does not."""
    for name, way in seen.network.ways.items():
        facts = seen.facts.get(name)
        if facts is None or name in misnamed or (CLASS[way.kind] and _better(seen, name, way)):
            continue  # another finding says that its name or its way is wrong
        told = facts.environment.get("GLOO_SOCKET_IFNAME", "")
        if len(told) > 1:
            there = facts.interface(told)
            if there is not None and told != way.interface:
                yield Finding(
                    check="net.wrong-interface", severity="warning", host=name,
                    evidence=f"GLOO_SOCKET_IFNAME={told} in its environment; the others reach it on {way.interface}"
                    + BY_INTERFACE,
                    fix=f"on {name}: export GLOO_SOCKET_IFNAME={way.interface}",
                )  # fmt: skip
            continue
        yield from _gloo_by_name(name, facts, way)


def _gloo_by_name(name: str, facts: Facts, way: Way) -> Iterator[Finding]:
    gloo = facts.gloo
    address = ipaddress.ip_address(gloo.address.partition("%")[0])
    there = facts.interface_of(gloo.address)
    if address.is_loopback or address.is_link_local:
        known = [one.address for one in gloo.candidates]
        resolves = f"resolves to {', '.join(known)}" if known else f"does not resolve ({gloo.error})"
        yield Finding(
            check="net.loopback-hostname", severity="warning", host=name,
            evidence=f"its own name {gloo.hostname} {resolves}, so Gloo alone would take {gloo.address}{BY_INTERFACE}",
            fix=in_place_of(name, gloo.hostname, way.address, "" if facts.is_root else "sudo ")
            + f"; or export GLOO_SOCKET_IFNAME={way.interface}",
        )  # fmt: skip
    elif there is not None and there.name != way.interface:
        tunnel = there.kind in ("tunnel", "wireguard")
        yield Finding(
            check="net.overlay" if tunnel else "net.wrong-interface", severity="warning", host=name,
            evidence=f"its own name {gloo.hostname} is {gloo.address} on {there.name} ({WORDS[there.kind]}); the "
            f"others reach it on {way.interface}{BY_INTERFACE}",
            fix=f"on {name}: export GLOO_SOCKET_IFNAME={way.interface}",
        )  # fmt: skip


def _overlays(seen: Seen) -> Iterator[Finding]:
    """Does traffic leave through a tunnel although a network card would do?"""
    tunnels = ("tunnel", "wireguard")
    for name, way in seen.network.ways.items():
        better = _better(seen, name, way)
        if way.kind in tunnels and better is not None:
            yield Finding(
                check="net.overlay", severity="warning", host=name,
                evidence=f"{way.interface} is {WORDS[way.kind]}; {better.interface} answers too, at {better.address}",
                fix=f'[hosts.{name}] interface = "{better.interface}"',
            )  # fmt: skip
        elif way.kind in tunnels:
            yield Finding(
                check="net.overlay", severity="info", host=name,
                evidence=f"the others reach it through {way.interface} ({WORDS[way.kind]}) alone",
                fix="where both ends have the same network, a cable is faster; evener probe wire tells by how much",
            )  # fmt: skip
    for pair in seen.network.pairs:
        facts, to = seen.facts.get(pair.source), seen.network.ways[pair.target]
        if facts is None or pair.sent_from is None or to.kind in tunnels:
            continue
        leaves = facts.interface_of(pair.sent_from)
        if leaves is not None and leaves.kind in tunnels:
            yield Finding(
                check="net.overlay", severity="warning", host=pair.source, peer=pair.target,
                evidence=f"its way to {to.address} leaves through {leaves.name} ({WORDS[leaves.kind]})",
                fix=f"on {pair.source}: {seen.sudo(pair.source)}ip route replace {to.address} dev "
                f"{seen.network.ways[pair.source].interface}",
            )  # fmt: skip


# --- two with one address ----------------------------------------------------------------------------------------


def _duplicates(seen: Seen) -> Iterator[Finding]:
    """Machines of one network with one address: who is reached there is chance, and changes."""
    addresses = {name: way.address for name, way in seen.network.ways.items() if CLASS[way.kind] == 0}
    addresses |= {name: seen.fleet.hosts[name].address for name in seen.errors if is_mistaken(seen, name)}
    known: set[str] = set()
    for name, address in addresses.items():
        other = holder_of(seen, name, address)
        if other is None or address in known:
            continue
        known.add(address)
        there = seen.facts[other].interface_of(address)
        assert there is not None
        prefix = next(one.prefix for one in there.addresses if one.address == address)
        way = seen.network.ways.get(other)
        is_spare = way is not None and way.address != address  # it is reached otherwise, and stays so
        yield Finding(
            check="net.duplicate-address", severity="error", host=name, peer=other,
            evidence=f"{name} and {other} both have the address {address}: who is reached there is chance",
            fix=f"on {other}: {seen.sudo(other)}ip address del {address}/{prefix} dev {there.name}"
            if is_spare else f"{name} or {other} needs an address of its own on {there.name}",
        )  # fmt: skip
    for pair in seen.network.pairs:
        way, target = seen.network.ways[pair.target], seen.facts.get(pair.target)
        own = {one.mac for one in target.interfaces if one.mac} if target is not None else set()
        if not own or way.address in known or pair.answered_by in (None, *own):
            continue
        known.add(way.address)
        yield Finding(
            check="net.duplicate-address", severity="warning", host=pair.target,
            evidence=f"where {pair.source} looks for {way.address}, the card {pair.answered_by} answers, which is none "
            "of its own: another machine has its address, or a repeater stands between them",
            fix=f"on {pair.target}: another address for {way.interface}; on {pair.source}: ip neigh show {way.address} "
            "shows who answers",
        )  # fmt: skip


# --- what is blocked ---------------------------------------------------------------------------------------------


def _cut_off(seen: Seen) -> Iterator[Finding]:
    """Hosts between which nothing passes at all, in neither direction, not even ssh: that is no firewall's doing."""
    pairs = {(pair.source, pair.target): pair for pair in seen.network.pairs}
    dead = []
    for (source, target), pair in pairs.items():
        back = pairs.get((target, source))
        tries = [*pair.tries, *(back.tries if back else [])]
        if source < target and any(one.what == "ssh" for one in tries) and not any(one.result == "ok" for one in tries):
            dead.append((source, target))
    hosts = list(seen.network.ways)
    for name in hosts:
        mine = [pair for pair in dead if name in pair]
        if len(hosts) > 2 and len(mine) == len(hosts) - 1:
            dead = [pair for pair in dead if name not in pair]
            way = seen.network.ways[name]
            evidence = (
                f"nothing passes between it ({way.address} on {way.interface}) and any other, not even to ssh's port"
            )
            yield _nothing_passes(name, None, evidence, way)
    for one, other in dead:
        way, peer = seen.network.ways[one], seen.network.ways[other]
        evidence = (
            f"nothing passes between {way.address} on {way.interface} and {other}'s {peer.address} on "
            f"{peer.interface}, not even to ssh's port"
        )
        yield _nothing_passes(one, other, evidence, way)


def _nothing_passes(name: str, peer: str | None, evidence: str, way: Way) -> Finding:
    return Finding(
        check="net.wrong-interface", severity="error", host=name, peer=peer, evidence=evidence,
        fix=f"are both in one network? on {name}: ip -brief address; is the cable in? "
        f'or [hosts.{name}] interface = "…" another than {way.interface}',
    )  # fmt: skip


def _firewalls(seen: Seen, separate: set[tuple[str | None, str | None]]) -> Iterator[Finding]:
    """Ports of the target that do not answer the source, although we listen there."""
    alone = {host for host, peer in separate if peer is None}
    closed: dict[str, list[Pair]] = {}
    for pair in seen.network.pairs:
        apart = (pair.source, pair.target) in separate or pair.source in alone or pair.target in alone
        if not pair.is_open and not apart and pair.source in seen.facts and pair.target in seen.facts:
            closed.setdefault(pair.target, []).append(pair)
    for target, pairs in closed.items():
        together = len(pairs) >= MANY and len({_closed(pair) for pair in pairs}) == 1
        for group in [pairs] if together else [[pair] for pair in pairs]:
            needed = any(_is_needed(seen, pair) for pair in group)
            yield _firewall(seen, target, group, "error" if needed else "warning")


def _firewall(seen: Seen, target: str, pairs: Sequence[Pair], severity: Severity) -> Finding:
    pair = pairs[0]
    way = seen.network.ways[target]
    sources = [one.source for one in pairs]
    words = [f"connected to ssh's port {one.port}" for one in pair.tries if one.what == "ssh" and one.result == "ok"]
    rendezvous = [one for one in pair.tries if one.what == "rendezvous"]
    words += [f"connected to port {one.port}" for one in rendezvous if one.result == "ok"]
    words += [f"{_failed(one.result)} on port {one.port}" for one in pair.blocked("rendezvous")]
    blocked = pair.blocked("ephemeral")
    if blocked:
        tried = sum(one.what == "ephemeral" for one in pair.tries)
        numbers = ", ".join(str(one.port) for one in blocked)
        all_of = "" if len(blocked) == tried else f"{len(blocked)} of {tried} "
        words.append(f"{_failed(blocked[0].result)} on {all_of}ephemeral ports ({numbers})")
    spared = "" if severity == "error" else ". A run over Gloo starts all the same: it connects the other way round"
    return Finding(
        check="net.firewall", severity=severity, host=target, peer=sources[0] if len(sources) == 1 else None,
        evidence=f"{listed(sources)} cannot reach {target} at {way.address}: {', '.join(words)}{spared}",
        fix=_open(seen, target, pairs),
    )  # fmt: skip


def _is_needed(seen: Seen, pair: Pair) -> bool:
    """Would a run over Gloo need what is blocked?"""
    if pair.blocked("rendezvous") and pair.target == seen.head:
        return True
    mine, other = (ipaddress.ip_address(seen.network.ways[name].address) for name in (pair.source, pair.target))
    return bool(pair.blocked("ephemeral")) and (mine.version != other.version or mine.packed > other.packed)


def _open(seen: Seen, target: str, pairs: Sequence[Pair]) -> str:
    """The command of the firewall that the target really has."""
    facts, way = seen.facts[target], seen.network.ways[target]
    many = len(pairs) > 1
    source = (way.network or way.address) if many else pairs[0].sent_from or seen.network.ways[pairs[0].source].address
    family = "ip6" if ":" in source else "ip"
    root = seen.sudo(target)
    if facts.firewall == "ufw":
        command = f"{root}ufw allow from {source}"
    elif facts.firewall == "firewalld":
        command = f"{root}firewall-cmd --permanent --zone=trusted --add-source={source} && {root}firewall-cmd --reload"
    elif facts.firewall == "nftables":
        command = f"{root}nft insert rule {facts.firewall_chain} {family} saddr {source} accept"
    elif facts.firewall == "macos":
        command = f"{root}/usr/libexec/ApplicationFirewall/socketfilterfw --add {facts.python}"
    else:
        tables = "ip6tables" if family == "ip6" else "iptables"
        command = f"{root}{tables} -I INPUT -s {source} -j ACCEPT"
    unknown = "" if facts.firewall else f" (its firewall is not known; with ufw: {root}ufw allow from {source})"
    return f"on {target}: {command}{unknown}"


def _closed(pair: Pair) -> tuple[bool, bool]:
    return bool(pair.blocked("rendezvous")), bool(pair.blocked("ephemeral"))


def _failed(result: str) -> str:
    words = {
        "timeout": "timed out",
        "refused": "was refused",
        "stranger": "met somebody else",
        "unreachable": "has no way",
    }
    return words.get(result, result)


# --- the rendezvous ----------------------------------------------------------------------------------------------


def _rendezvous(seen: Seen, told: set[str | None]) -> Iterator[Finding]:
    """The endpoint must be local on exactly one host."""
    head = seen.head
    way = seen.network.ways.get(head) if head is not None else None
    if head is not None and way is not None:
        if ipaddress.ip_address(way.address).is_loopback:
            yield Finding(
                check="net.rendezvous-loopback", severity="error", host=head,
                evidence=f"the rendezvous would be at {way.address}, where every host finds only itself",
                fix=f"[hosts.{head}] interface = … one that the others reach",
            )  # fmt: skip
        else:
            twins = [name for name, facts in seen.facts.items() if name != head and facts.interface_of(way.address)
                     and facts.machine_id != seen.facts[head].machine_id]  # fmt: skip
            for name in [] if head in told or told & set(twins) else twins:
                yield Finding(
                    check="net.rendezvous-loopback", severity="error", host=name, peer=head,
                    evidence=f"{name} and {head} both have the address {way.address}: each would meet only itself",
                    fix=f"[hosts.{head}] interface = … with an address of its own",
                )  # fmt: skip
    for name, facts in seen.facts.items():
        address = facts.environment.get("MASTER_ADDR")
        if address is not None and (address == "localhost" or (is_address(address) and is_loopback(address))):
            yield Finding(
                check="net.rendezvous-loopback", severity="warning", host=name,
                evidence=f"MASTER_ADDR={address} in its environment: torchrun by hand would form a world of its own",
                fix=f"{seen.unset(name, 'MASTER_ADDR')}  # evener sets it for its runs",
            )  # fmt: skip
        if head is None or name == head or seen.facts[head].hostname == facts.hostname:
            continue
        answers = seen.network.resolved.get(name, {}).get(seen.facts[head].hostname)
        if answers and is_loopback(answers[0]):
            yield Finding(
                check="net.rendezvous-loopback", severity="warning", host=name, peer=head,
                evidence=f"{name} takes {seen.facts[head].hostname} for {answers[0]}, itself{BY_NAMES}",
                fix=in_place_of(name, seen.facts[head].hostname, way.address, seen.sudo(name))
                if way is not None else f"on {name}: look for {seen.facts[head].hostname} in /etc/hosts",
            )  # fmt: skip
