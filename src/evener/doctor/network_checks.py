"""Check the network between the hosts: interfaces, addresses, firewalls, rendezvous. Pure: facts in, findings out.

In a run, every host connects to the first host's rendezvous port, and of each two hosts the one with the greater
address connects to an ephemeral port of the other (Gloo's Device::isInitiator; tried with torch 2.13: ports of the
greater address may be closed, and a run starts; those of the smaller may not). What only the other direction needs is
a warning: NCCL, a probe or other addresses would hang.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterator, Sequence

from evener.core.base.shell import quote_command, quote_word
from evener.core.cluster.finding import Finding, Severity
from evener.doctor.connectivity import PairConnectivity
from evener.doctor.context import CheckContext, find_address_holder, has_foreign_host_key, is_ip_address, join_names
from evener.doctor.facts import HostFacts
from evener.doctor.hostname_checks import (
    TORCHRUN_LACKS_INTERFACE,
    TORCHRUN_USES_NAMES,
    check_address_families,
    check_hostnames,
    check_name_resolution,
    is_loopback,
    replace_hosts_entry_command,
)
from evener.doctor.interfaces import KIND_LABELS, KIND_PREFERENCE, NAMED_IN_FLEET_FILE, SocketInterface

STRANGERS_CHECK = "net.strangers"
WSL_CREATOR_ID = "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"  # of all WSL machines  [learn.microsoft.com, WSL networking]
GROUP_FINDINGS_FROM = 3  # peers: from so many on, they share one finding


def check_network(context: CheckContext) -> list[Finding]:
    """Return every finding about which hosts reach each other, and at which addresses."""
    cut_off = list(_check_disconnected(context))
    explained = {(finding.host, finding.peer) for finding in cut_off} | {
        (finding.peer, finding.host) for finding in cut_off
    }
    interfaces, duplicates = list(_check_interfaces(context)), list(_check_duplicate_addresses(context))
    explained |= {(finding.host, None) for finding in [*interfaces, *duplicates] if finding.severity == "error"}
    findings = [*interfaces, *duplicates, *cut_off, *_check_firewalls(context, explained)]
    name_findings = list(check_hostnames(context))
    findings += [
        *name_findings,
        *_check_gloo_default(context, {finding.host for finding in name_findings}),
        *_check_rendezvous(context, {finding.host for finding in duplicates}),
    ]
    if not name_findings:  # hosts that share a name cannot be distinguished by it
        findings += check_name_resolution(context)
    return [*findings, *check_address_families(context), *_check_overlays(context), *_check_strangers(context)]


# --- which interface ---------------------------------------------------------------------------------------------


def _check_interfaces(context: CheckContext) -> Iterator[Finding]:
    """Check that the interface that a run will use exists, and that the other hosts reach it."""
    for name, facts in context.facts.items():
        wanted = context.fleet.hosts[name].interface
        usable = [
            candidate.name
            for candidate in sorted(facts.interfaces, key=lambda candidate: KIND_PREFERENCE[candidate.kind])
            if candidate.up and candidate.addresses and candidate.kind != "loopback"
        ]
        if context.candidates[name]:
            continue
        if wanted is None:
            yield Finding(
                check="net.wrong-interface", severity="error", host=name,
                evidence="no interface but the loopback is up and has an address",
                fix=f"on {name}: ip address; is its cable in?",
            )  # fmt: skip
            continue
        has_syntax = any(sign in wanted for sign in "^=,*")
        nic = facts.find_interface(wanted)
        problem = "does not exist" if nic is None else "has no address" if not nic.addresses else "is down"
        yield Finding(
            check="env.interface-syntax" if has_syntax else "net.wrong-interface", severity="error", host=name,
            evidence=f"interface = {wanted}: Gloo takes one exact name" if has_syntax
            else f"its interface {wanted} {problem}",
            fix=f'[hosts.{name}] interface = "{_closest_name(wanted, usable)}"' if usable else f"on {name}: ip address",
        )  # fmt: skip
    for name, chosen in context.network.interfaces.items():
        reached = context.network.reached.get(name, {})
        better = _better_interface(context, name, chosen)
        if chosen.why == NAMED_IN_FLEET_FILE and not reached.get(chosen.address) and better is not None:
            yield Finding(
                check="net.wrong-interface", severity="error", host=name,
                evidence=f"no other host reaches {chosen.address} on {chosen.interface}, which the fleet file names; "
                f"all reach {better.address} on {better.interface}",
                fix=f'[hosts.{name}] interface = "{better.interface}"',
            )  # fmt: skip


def _closest_name(name: str, known: list[str]) -> str:
    """Return the name in `known` that is closest to `name`, else the first of them."""
    return (difflib.get_close_matches(name, known, n=1) or known)[0]


def _better_interface(context: CheckContext, name: str, current: SocketInterface) -> SocketInterface | None:
    """Return a network card that all peers reach, other than the interface in use; None if there is none."""
    num_peers = len(context.network.interfaces) - 1
    reached = context.network.reached.get(name, {})
    for candidate in context.candidates.get(name, ()):
        is_card = candidate.address != current.address and KIND_PREFERENCE[candidate.kind] == 0
        if is_card and num_peers and reached.get(candidate.address) == num_peers:
            return candidate
    return None


def _check_gloo_default(context: CheckContext, misnamed: set[str | None]) -> Iterator[Finding]:
    """Check which interface Gloo would choose without GLOO_SOCKET_IFNAME: evener sets it, torchrun does not."""
    for name, chosen in context.network.interfaces.items():
        facts = context.facts.get(name)
        if (
            facts is None
            or name in misnamed
            or (KIND_PREFERENCE[chosen.kind] and _better_interface(context, name, chosen))
        ):
            continue  # another finding reports its name or its interface
        configured = facts.environment.get("GLOO_SOCKET_IFNAME", "")
        if len(configured) > 1:
            nic = facts.find_interface(configured)
            if nic is not None and configured != chosen.interface:
                yield Finding(
                    check="net.wrong-interface", severity="warning", host=name,
                    evidence=f"GLOO_SOCKET_IFNAME={configured} in its environment; the others reach it on "
                    f"{chosen.interface}{TORCHRUN_LACKS_INTERFACE}",
                    fix=f"on {name}: export GLOO_SOCKET_IFNAME={quote_word(chosen.interface)}",
                )  # fmt: skip
            continue
        yield from _check_gloo_hostname(name, facts, chosen)


def _check_gloo_hostname(name: str, facts: HostFacts, interface: SocketInterface) -> Iterator[Finding]:
    gloo = facts.gloo
    address = ipaddress.ip_address(gloo.address.partition("%")[0])
    nic = facts.find_interface_by_address(gloo.address)
    if address.is_loopback or address.is_link_local:
        resolved = [candidate.address for candidate in gloo.candidates]
        answer = f"resolves to {', '.join(resolved)}" if resolved else f"does not resolve ({gloo.error})"
        yield Finding(
            check="net.loopback-hostname", severity="warning", host=name,
            evidence=f"its own name {gloo.hostname} {answer}, so Gloo by itself would bind "
            f"{gloo.address}{TORCHRUN_LACKS_INTERFACE}",
            fix=replace_hosts_entry_command(name, gloo.hostname, interface.address, "" if facts.is_root else "sudo ")
            + f"; or export GLOO_SOCKET_IFNAME={quote_word(interface.interface)}",
        )  # fmt: skip
    elif nic is not None and nic.name != interface.interface:
        tunnel = nic.kind in ("tunnel", "wireguard")
        yield Finding(
            check="net.overlay" if tunnel else "net.wrong-interface", severity="warning", host=name,
            evidence=f"its own name {gloo.hostname} is {gloo.address} on {nic.name} ({KIND_LABELS[nic.kind]}); the "
            f"others reach it on {interface.interface}{TORCHRUN_LACKS_INTERFACE}",
            fix=f"on {name}: export GLOO_SOCKET_IFNAME={quote_word(interface.interface)}",
        )  # fmt: skip


def _check_overlays(context: CheckContext) -> Iterator[Finding]:
    """Check whether traffic leaves through a tunnel although a network card would do."""
    tunnels = ("tunnel", "wireguard")
    for name, chosen in context.network.interfaces.items():
        better = _better_interface(context, name, chosen)
        if chosen.kind in tunnels and better is not None:
            yield Finding(
                check="net.overlay", severity="warning", host=name,
                evidence=f"{chosen.interface} is {KIND_LABELS[chosen.kind]}; {better.interface} answers too, at "
                f"{better.address}",
                fix=f'[hosts.{name}] interface = "{better.interface}"',
            )  # fmt: skip
        elif chosen.kind in tunnels:
            yield Finding(
                check="net.overlay", severity="info", host=name,
                evidence=f"the others reach it only through {chosen.interface} ({KIND_LABELS[chosen.kind]})",
                fix="where both ends have the same network, a cable is faster; "
                f"evener probe wire{context.fleet.cli_flag} shows by how much",
            )  # fmt: skip
    for pair in context.network.pairs:
        facts, destination = context.facts.get(pair.source), context.network.interfaces[pair.target]
        if facts is None or pair.sent_from is None or destination.kind in tunnels:
            continue
        nic = facts.find_interface_by_address(pair.sent_from)
        if nic is not None and nic.kind in tunnels:
            yield Finding(
                check="net.overlay", severity="warning", host=pair.source, peer=pair.target,
                evidence=f"its route to {destination.address} leaves through {nic.name} ({KIND_LABELS[nic.kind]})",
                fix=f"on {pair.source}: {context.sudo_prefix(pair.source)}ip route replace {destination.address} dev "
                f"{context.network.interfaces[pair.source].interface}",
            )  # fmt: skip


# --- who else is there -------------------------------------------------------------------------------------------


def _check_strangers(context: CheckContext) -> Iterator[Finding]:
    """Check for other machines on the network of a run, on the first of its hosts that sees any.

    They can reach Gloo and NCCL, which send gradients and weights unencrypted; --private and WireGuard prevent that.
    While a host is not reached, its own addresses are unknown, so nobody counts as a stranger.
    """
    if context.machine.private or len(context.fleet.hosts) == 1 or context.errors:
        return
    own = {entry.address for facts in context.facts.values() for nic in facts.interfaces for entry in nic.addresses}
    for name, chosen in context.network.interfaces.items():
        if chosen.kind in ("tunnel", "wireguard") or name not in context.facts:
            continue
        there = {entry.address for entry in context.facts[name].neighbours if entry.interface == chosen.interface}
        if strangers := sorted(there - own, key=ipaddress.IPv4Address):
            others = f" and {len(strangers) - 1} more" * (len(strangers) > 1)
            yield Finding(
                check=STRANGERS_CHECK, severity="info", host=name,
                evidence=f"machines that are not of this run answer on its network: {strangers[0]}{others}. Gradients "
                "and weights are sent unencrypted: anybody on the path can read and change them",
                fix=f"evener doctor{context.fleet.cli_flag} --private prints firewall commands, and --private starts a "
                'run only where they are in force; or use WireGuard or Tailscale, for example interface = "wg0" under '
                f"[hosts.{name}] in the fleet file",
            )  # fmt: skip
            return


# --- duplicate addresses -----------------------------------------------------------------------------------------


def _check_duplicate_addresses(context: CheckContext) -> Iterator[Finding]:
    """Check for machines of one network with the same address: which of them answers is chance, and changes."""
    addresses = {
        name: chosen.address for name, chosen in context.network.interfaces.items() if KIND_PREFERENCE[chosen.kind] == 0
    }
    addresses |= {
        name: context.fleet.hosts[name].address for name in context.errors if has_foreign_host_key(context, name)
    }
    known: set[str] = set()
    for name, address in addresses.items():
        other = find_address_holder(context, name, address)
        if other is None or address in known:
            continue
        known.add(address)
        nic = context.facts[other].find_interface_by_address(address)
        assert nic is not None
        prefix = next(entry.prefix for entry in nic.addresses if entry.address == address)
        chosen = context.network.interfaces.get(other)
        is_spare = chosen is not None and chosen.address != address  # it keeps the address by which it is reached
        yield Finding(
            check="net.duplicate-address", severity="error", host=name, peer=other,
            evidence=f"{name} and {other} both have the address {address}: which of them answers is chance",
            fix=f"on {other}: {context.sudo_prefix(other)}ip address del {address}/{prefix} dev {nic.name}"
            if is_spare else f"{name} or {other} needs an address of its own on {nic.name}",
        )  # fmt: skip
    for pair in context.network.pairs:
        chosen, target = context.network.interfaces[pair.target], context.facts.get(pair.target)
        own_macs = {entry.mac for entry in target.interfaces if entry.mac} if target is not None else set()
        if not own_macs or chosen.address in known or pair.answered_by in (None, *own_macs):
            continue
        known.add(chosen.address)
        yield Finding(
            check="net.duplicate-address", severity="warning", host=pair.target,
            evidence=f"when {pair.source} looks up {chosen.address}, the MAC {pair.answered_by} answers, none of "
            f"{pair.target}'s: another machine has its address, or a repeater is between them",
            fix=f"on {pair.target}: another address for {chosen.interface}; on {pair.source}: ip neigh show "
            f"{quote_word(chosen.address)} shows who answers",
        )  # fmt: skip


# --- firewalls ---------------------------------------------------------------------------------------------------


def _check_disconnected(context: CheckContext) -> Iterator[Finding]:
    """Check for hosts between which nothing passes in either direction, not even ssh: no firewall does that."""
    pairs = {(pair.source, pair.target): pair for pair in context.network.pairs}
    dead = []
    for (source, target), pair in pairs.items():
        reverse = pairs.get((target, source))
        tries = [*pair.tries, *(reverse.tries if reverse else [])]
        if (
            source < target
            and any(attempt.what == "ssh" for attempt in tries)
            and not any(attempt.result == "ok" for attempt in tries)
        ):
            dead.append((source, target))
    hosts = list(context.network.interfaces)
    for name in hosts:
        own_pairs = [pair for pair in dead if name in pair]
        if len(hosts) > 2 and len(own_pairs) == len(hosts) - 1:
            dead = [pair for pair in dead if name not in pair]
            chosen = context.network.interfaces[name]
            evidence = (
                f"nothing passes between it ({chosen.address} on {chosen.interface}) and any other, not even to "
                "ssh's port"
            )
            yield _disconnected_finding(name, None, evidence, chosen)
    for first, second in dead:
        chosen, peer = context.network.interfaces[first], context.network.interfaces[second]
        evidence = (
            f"nothing passes between {chosen.address} on {chosen.interface} and {second}'s {peer.address} on "
            f"{peer.interface}, not even to ssh's port"
        )
        yield _disconnected_finding(first, second, evidence, chosen)


def _disconnected_finding(name: str, peer: str | None, evidence: str, interface: SocketInterface) -> Finding:
    return Finding(
        check="net.wrong-interface", severity="error", host=name, peer=peer, evidence=evidence,
        fix=f"are both in one network? on {name}: ip -brief address; is the cable in? "
        f'or [hosts.{name}] interface = "…" another than {interface.interface}',
    )  # fmt: skip


def _check_firewalls(context: CheckContext, explained: set[tuple[str | None, str | None]]) -> Iterator[Finding]:
    """Check for ports of the target that do not answer the source, although a listener is there."""
    isolated = {host for host, peer in explained if peer is None}
    blocked: dict[str, list[PairConnectivity]] = {}
    for pair in context.network.pairs:
        is_explained = (pair.source, pair.target) in explained or pair.source in isolated or pair.target in isolated
        if not pair.is_open and not is_explained and pair.source in context.facts and pair.target in context.facts:
            blocked.setdefault(pair.target, []).append(pair)
    for target, pairs in blocked.items():
        is_shared = len(pairs) >= GROUP_FINDINGS_FROM and len({_blocked_kinds(pair) for pair in pairs}) == 1
        for group in [pairs] if is_shared else [[pair] for pair in pairs]:
            needed = any(_is_needed_by_gloo(context, pair) for pair in group)
            yield _firewall_finding(context, target, group, "error" if needed else "warning")


def _firewall_finding(
    context: CheckContext, target: str, pairs: Sequence[PairConnectivity], severity: Severity
) -> Finding:
    pair = pairs[0]
    chosen = context.network.interfaces[target]
    sources = [blocked_pair.source for blocked_pair in pairs]
    outcomes = [
        f"connected to ssh's port {attempt.port}"
        for attempt in pair.tries
        if attempt.what == "ssh" and attempt.result == "ok"
    ]
    rendezvous = [attempt for attempt in pair.tries if attempt.what == "rendezvous"]
    outcomes += [f"connected to port {attempt.port}" for attempt in rendezvous if attempt.result == "ok"]
    outcomes += [
        f"{_describe_failure(attempt.result)} on port {attempt.port}" for attempt in pair.failed_attempts("rendezvous")
    ]
    blocked = pair.failed_attempts("ephemeral")
    if blocked:
        num_tried = sum(attempt.what == "ephemeral" for attempt in pair.tries)
        numbers = ", ".join(str(attempt.port) for attempt in blocked)
        share = "" if len(blocked) == num_tried else f"{len(blocked)} of {num_tried} "
        outcomes.append(f"{_describe_failure(blocked[0].result)} on {share}ephemeral ports ({numbers})")
    note = "" if severity == "error" else ". A run over Gloo starts all the same: it connects in the other direction"
    return Finding(
        check="net.firewall", severity=severity, host=target, peer=sources[0] if len(sources) == 1 else None,
        evidence=f"{join_names(sources)} cannot reach {target} at {chosen.address}: {', '.join(outcomes)}{note}",
        fix=_allow_command(context, target, pairs),
    )  # fmt: skip


def _is_needed_by_gloo(context: CheckContext, pair: PairConnectivity) -> bool:
    """Return whether a run over Gloo needs a port that is blocked."""
    if pair.failed_attempts("rendezvous") and pair.target == context.rendezvous_host:
        return True
    source, target = (
        ipaddress.ip_address(context.network.interfaces[name].address) for name in (pair.source, pair.target)
    )
    return bool(pair.failed_attempts("ephemeral")) and (
        source.version != target.version or source.packed > target.packed
    )


def _allow_command(context: CheckContext, target: str, pairs: Sequence[PairConnectivity]) -> str:
    """Return the command that opens the ports, for the firewall that the target has."""
    facts, chosen = context.facts[target], context.network.interfaces[target]
    is_group = len(pairs) > 1
    source = (
        (chosen.network or chosen.address)
        if is_group
        else pairs[0].sent_from or context.network.interfaces[pairs[0].source].address
    )
    family = "ip6" if ":" in source else "ip"
    source = quote_word(source)
    sudo = context.sudo_prefix(target)
    if facts.firewall == "wsl-nat":
        return (
            "it is WSL2 behind Windows' address translation. In Windows 11: the lines [wsl2] and "
            "networkingMode=mirrored in %UserProfile%\\.wslconfig, then wsl --shutdown"
        )
    if facts.firewall == "hyper-v":
        return (
            "in Windows, as administrator: New-NetFirewallHyperVRule -Name evener -DisplayName evener -Direction "
            f"Inbound -VMCreatorId '{WSL_CREATOR_ID}' -RemoteAddresses {source} -Action Allow"
        )
    if facts.firewall == "ufw":
        command = f"{sudo}ufw allow from {source}"
    elif facts.firewall == "firewalld":
        command = f"{sudo}firewall-cmd --permanent --zone=trusted --add-source={source} && {sudo}firewall-cmd --reload"
    elif facts.firewall == "nftables":
        chain = quote_command((facts.firewall_chain or "").split())
        command = f"{sudo}nft insert rule {chain} {family} saddr {source} accept"
    elif facts.firewall == "macos":
        command = f"{sudo}/usr/libexec/ApplicationFirewall/socketfilterfw --add {quote_word(facts.python)}"
    else:
        tables = "ip6tables" if family == "ip6" else "iptables"
        command = f"{sudo}{tables} -I INPUT -s {source} -j ACCEPT"
    unknown = "" if facts.firewall else f" (its firewall is not known; with ufw: {sudo}ufw allow from {source})"
    return f"on {target}: {command}{unknown}"


def _blocked_kinds(pair: PairConnectivity) -> tuple[bool, bool]:
    return bool(pair.failed_attempts("rendezvous")), bool(pair.failed_attempts("ephemeral"))


def _describe_failure(result: str) -> str:
    descriptions = {
        "timeout": "timed out",
        "refused": "was refused",
        "stranger": "reached another program",
        "unreachable": "found no route",
    }
    return descriptions.get(result, result)


# --- rendezvous --------------------------------------------------------------------------------------------------


def _check_rendezvous(context: CheckContext, reported: set[str | None]) -> Iterator[Finding]:
    """Check that the rendezvous address is local to exactly one host."""
    head = context.rendezvous_host
    chosen = context.network.interfaces.get(head) if head is not None else None
    if head is not None and chosen is not None:
        if ipaddress.ip_address(chosen.address).is_loopback:
            yield Finding(
                check="net.rendezvous-loopback", severity="error", host=head,
                evidence=f"the rendezvous would be at {chosen.address}, where every host reaches only itself",
                fix=f"[hosts.{head}] interface = … one that the others reach",
            )  # fmt: skip
        else:
            twins = [
                name
                for name, facts in context.facts.items()
                if name != head
                and facts.find_interface_by_address(chosen.address)
                and facts.machine_id != context.facts[head].machine_id
            ]
            for name in [] if head in reported or reported & set(twins) else twins:
                yield Finding(
                    check="net.rendezvous-loopback", severity="error", host=name, peer=head,
                    evidence=f"{name} and {head} both have the address {chosen.address}: each would reach only itself",
                    fix=f"[hosts.{head}] interface = … with an address of its own",
                )  # fmt: skip
    for name, facts in context.facts.items():
        address = facts.environment.get("MASTER_ADDR")
        if address is not None and (address == "localhost" or (is_ip_address(address) and is_loopback(address))):
            yield Finding(
                check="net.rendezvous-loopback", severity="warning", host=name,
                evidence=f"MASTER_ADDR={address} in its environment: torchrun by hand would start a group of its own",
                fix=f"{context.unset_command(name, 'MASTER_ADDR')}  # evener sets it for its runs",
            )  # fmt: skip
        if head is None or name == head or context.facts[head].hostname == facts.hostname:
            continue
        answers = context.network.resolved.get(name, {}).get(context.facts[head].hostname)
        if answers and is_loopback(answers[0]):
            yield Finding(
                check="net.rendezvous-loopback",
                severity="warning",
                host=name,
                peer=head,
                evidence=f"{name} resolves {context.facts[head].hostname} to {answers[0]}, which is "
                f"itself{TORCHRUN_USES_NAMES}",
                fix=replace_hosts_entry_command(
                    name, context.facts[head].hostname, chosen.address, context.sudo_prefix(name)
                )
                if chosen is not None
                else f"on {name}: look for {context.facts[head].hostname} in /etc/hosts",
            )
