"""Check that host names are unique, known everywhere, and of one address family. Pure: facts in, findings out.

evener connects by address and sets the interface for Gloo: these findings concern torchrun started by hand.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from evener.core.base.shell import quote_word
from evener.core.cluster.finding import Finding
from evener.doctor.context import CheckContext, is_ip_address

TORCHRUN_USES_NAMES = "; evener connects by address, torchrun by name"
TORCHRUN_LACKS_INTERFACE = "; evener sets the interface for Gloo, torchrun by hand does not"


def check_hostnames(context: CheckContext) -> Iterator[Finding]:
    """Check that every host has a name of its own."""
    first: dict[str, str] = {}
    for name, facts in context.facts.items():
        chosen, sudo = context.network.interfaces.get(name), context.sudo_prefix(name)
        rename = f"on {name}: {sudo}hostname {quote_word(name)} && echo {quote_word(name)} | {sudo}tee /etc/hostname"
        rename += (
            f" && echo {quote_word(f'{chosen.address} {name}')} | {sudo}tee -a /etc/hosts" if chosen is not None else ""
        )
        other = first.setdefault(facts.hostname, name)
        if facts.hostname.partition(".")[0] == "localhost":
            yield Finding(
                check="net.loopback-hostname", severity="warning", host=name,
                evidence=f"its host name is {facts.hostname}, which every machine has: Gloo by itself would bind "
                f"{facts.gloo.address}{TORCHRUN_LACKS_INTERFACE}",
                fix=rename,
            )  # fmt: skip
        elif other != name and facts.machine_id != context.facts[other].machine_id:
            yield Finding(
                check="host.same-name", severity="warning", host=name, peer=other,
                evidence=f"{other} and {name} both call themselves {facts.hostname}{TORCHRUN_USES_NAMES}",
                fix=rename,
            )  # fmt: skip


def check_name_resolution(context: CheckContext) -> Iterator[Finding]:
    """Check that every other host resolves the name of the first host, to which torchrun would connect."""
    head = context.rendezvous_host
    if head is None or head not in context.network.interfaces:
        return
    master_addresses = {
        facts.environment["MASTER_ADDR"] for facts in context.facts.values() if "MASTER_ADDR" in facts.environment
    }
    address = context.fleet.hosts[head].address.rpartition("@")[2]
    names = [
        context.facts[head].hostname,
        *({address} if not is_ip_address(address) and address != "local" else ()),
        *master_addresses,
    ]
    for name in dict.fromkeys(candidate for candidate in names if not is_ip_address(candidate)):
        lookups = {host: known for host, known in context.network.resolved.items() if host != head and name in known}
        answers = {host: known[name] for host, known in lookups.items()}
        missing = [host for host, resolved in answers.items() if not resolved]
        if not missing or (name == address and name != context.facts[head].hostname and len(missing) == len(answers)):
            continue  # known to none: an alias of ssh's
        # no host uses names here
        if not (name in master_addresses or len(missing) < len(answers) or _hosts_resolve_each_other(context)):
            only = missing[0] if len(missing) == 1 else None
            yield Finding(
                check="net.unresolvable", severity="info", host=only, peer=head,
                evidence=f"{only or 'no other host'} does not know the name {name}{TORCHRUN_USES_NAMES}",
                fix=add_hosts_entry_command(context, missing[0], head),
            )  # fmt: skip
            continue
        for host in missing:
            yield Finding(
                check="net.unresolvable",
                severity="warning",
                host=host,
                peer=head,
                evidence=f"{host} does not know the name {name}{TORCHRUN_USES_NAMES}",
                fix=add_hosts_entry_command(context, host, head),
            )


def _hosts_resolve_each_other(context: CheckContext) -> bool:
    """Return whether any host here resolves the name of another."""
    owners = {facts.hostname: name for name, facts in context.facts.items()}
    return any(
        answers and not is_loopback(answers[0])
        for host, known in context.network.resolved.items()
        for name, answers in known.items()
        if name in owners and owners[name] != host
    )


def check_address_families(context: CheckContext) -> Iterator[Finding]:
    """Check that all hosts connect by one address family, IPv4 or IPv6, and that each name resolves to one family."""
    is_ipv6 = {name: ":" in chosen.address for name, chosen in context.network.interfaces.items()}
    if len(set(is_ipv6.values())) > 1:
        v6_hosts = [name for name, uses_ipv6 in is_ipv6.items() if uses_ipv6]
        v4_hosts = [name for name, uses_ipv6 in is_ipv6.items() if not uses_ipv6]
        for name in v6_hosts if len(v6_hosts) <= len(v4_hosts) else v4_hosts:
            chosen = context.network.interfaces[name]
            yield Finding(
                check="net.family-mismatch", severity="error", host=name,
                evidence=f"it can only be reached by IPv{6 if is_ipv6[name] else 4} ({chosen.address} on "
                f"{chosen.interface}), {(v4_hosts if is_ipv6[name] else v6_hosts)[0]} by "
                f"IPv{4 if is_ipv6[name] else 6}: Gloo needs one of them everywhere",
                fix=f"on {name}: sudo ip address add … dev {quote_word(chosen.interface)}, of the other family",
            )  # fmt: skip
        return
    reported = set()
    for name in resolved_names(context):
        answers = {host: resolved for host, known in context.network.resolved.items() if (resolved := known.get(name))}
        first = {host: ":" in resolved[0] for host, resolved in answers.items() if not is_loopback(resolved[0])}
        if len(set(first.values())) > 1:
            v6_hosts = [host for host, uses_ipv6 in first.items() if uses_ipv6]
            v4_host = next(host for host, uses_ipv6 in first.items() if not uses_ipv6)
            reported.add(name)
            v6_address, other = answers[v6_hosts[0]][0], answers[v4_host][0]
            yield Finding(
                check="net.family-mismatch", severity="warning", host=v6_hosts[0], peer=v4_host,
                evidence=f"{name} is {v6_address} on {v6_hosts[0]} and {other} on {v4_host}{TORCHRUN_USES_NAMES}",
                fix=replace_hosts_entry_command(v6_hosts[0], name, other, context.sudo_prefix(v6_hosts[0])),
            )  # fmt: skip
    default = {name: facts.gloo.address for name, facts in context.facts.items()
             if not is_loopback(facts.gloo.address) and facts.gloo.hostname not in reported}  # fmt: skip
    sixes = [name for name, address in default.items() if ":" in address]
    if sixes and len(sixes) < len(default):
        v6_host, other = sixes[0], next(name for name in default if name not in sixes)
        yield Finding(
            check="net.family-mismatch", severity="warning", host=v6_host, peer=other,
            evidence=f"Gloo by itself would bind {default[v6_host]} on {v6_host} and {default[other]} on {other}"
            + TORCHRUN_LACKS_INTERFACE,
            fix=f"on {v6_host}: export GLOO_SOCKET_IFNAME={quote_word(context.network.interfaces[v6_host].interface)}"
            if v6_host in context.network.interfaces else add_hosts_entry_command(context, v6_host, v6_host),
        )  # fmt: skip


def resolved_names(context: CheckContext) -> list[str]:
    """Return every name that was looked up on any host."""
    return list(dict.fromkeys(name for known in context.network.resolved.values() for name in known))


def add_hosts_entry_command(context: CheckContext, host: str, target: str) -> str:
    """Return the command that adds another host's name to a host's /etc/hosts."""
    chosen = context.network.interfaces.get(target)
    hostname = context.facts[target].hostname
    entry = quote_word(f"{chosen.address if chosen else '…'} {hostname}")
    return f"on {host}: echo {entry} | {context.sudo_prefix(host)}tee -a /etc/hosts"


def replace_hosts_entry_command(host: str, name: str, address: str, as_root: str) -> str:
    """Return the command that replaces a name's entry in /etc/hosts: with both, the resolver would find the old one.

    Only the name is removed from the old line, which may have others.
    """
    escaped = re.sub(r"[^\w-]", r"\\\g<0>", name)
    program = f"s/[[:space:]]+{escaped}([[:space:]]|$)/\\1/"
    removal = f"{as_root}sed -i.old -E {quote_word(program)} /etc/hosts"
    return f"on {host}: {removal}; echo {quote_word(f'{address} {name}')} | {as_root}tee -a /etc/hosts"


def is_loopback(address: str) -> bool:
    """Return whether the address is a loopback or link-local one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return ip.is_loopback or ip.is_link_local
