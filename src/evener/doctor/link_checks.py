"""Check the links between the hosts: speed, asymmetry, MTU, loss. Pure: facts in, findings out.

Goodput is that of one TCP stream for a fifth of a second; a doubtful figure was measured again for longer, and the
better one counts. The thresholds are wide all the same: they detect what is broken, not merely slow. Settings that
`probe wire` measured to be faster are reported for as long as their host has the slower ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from evener.core.base.units import format_bit_rate, format_bytes, format_seconds
from evener.core.cluster.finding import Finding
from evener.doctor import tcp_settings
from evener.doctor.connectivity import PairConnectivity
from evener.doctor.context import CheckContext
from evener.doctor.facts import HostFacts, NetworkInterface
from evener.doctor.interfaces import SocketInterface

SLOW_PORT_MBIT = 100
SLOW_WIRED_BPS = 15e6  # no wired link of this century but a 100 Mbit/s port is slower
MAX_JUDGED_BPS = 400e6  # one stream reaches this on a slow or busy machine: above, it does not measure the link
MIN_SHARE_OF_NIC_SPEED = 0.4  # goodput below this share of the card's speed
MIN_SHARE_OF_BEST_LINK = 0.25  # goodput below this share of the fleet's best
MIN_SHARE_OF_PROBED = 0.4  # goodput below this share of what `probe` measured
ASYMMETRY_FACTOR = 1.6  # one direction faster than the other by this factor
RETRANSMIT_SHARE = 0.04  # share of segments retransmitted
HIGH_RETRANSMIT_SHARE = 0.15  # share from which on loss is the cause, whatever else is slow or asymmetric

PairTable = dict[tuple[str, str], PairConnectivity]


def check_links(context: CheckContext) -> list[Finding]:
    """Return every finding about links that work, but are slow, lossy or limited to small packets."""
    pairs: PairTable = {(pair.source, pair.target): pair for pair in context.network.pairs}
    findings: list[Finding] = []
    for name, interface in context.network.interfaces.items():
        if name in context.facts:
            findings += [
                *_check_nic_speed(context, name, context.facts[name], interface),
                *_check_wireless(context, name, interface),
            ]
    findings += _check_mtus(context, pairs)
    heavy_losses = list(_check_retransmits(context, pairs, HIGH_RETRANSMIT_SHARE))
    others = {
        key: pair
        for key, pair in pairs.items()
        if not any({finding.host, finding.peer} == set(key) for finding in heavy_losses)
    }
    asymmetric = list(_check_asymmetry(context, others))
    slow = list(_check_slow_links(context, others, {(finding.host, finding.peer) for finding in asymmetric}))
    # A slow link overflows its queue: its losses are not another finding.
    reported = [{finding.host, finding.peer} - {None} for finding in (*asymmetric, *slow)]
    losses = [
        finding
        for finding in _check_retransmits(context, others, RETRANSMIT_SHARE)
        if not any(names <= {finding.host, finding.peer} for names in reported)
    ]
    findings += [
        tcp_settings.finding_for_gain(
            gain, source, target, context.sudo_prefix(gain.host), context.fleet.links[source][target].measured
        )
        for source, target, gain in tcp_settings.applicable_gains(context.fleet.links, context.facts)
    ]
    return [*findings, *heavy_losses, *asymmetric, *slow, *losses]


def _check_nic_speed(
    context: CheckContext, name: str, facts: HostFacts, interface: SocketInterface
) -> Iterator[Finding]:
    nic = facts.find_interface(interface.interface)
    if nic is None or nic.kind != "wired":
        return
    slow = nic.speed_Mbit is not None and nic.speed_Mbit <= SLOW_PORT_MBIT
    if slow or nic.duplex == "half":
        yield Finding(
            check="net.slow-link", severity="warning", host=name,
            evidence=f"{nic.name} runs at {nic.speed_Mbit} Mbit/s, {nic.duplex or 'unknown'} duplex",
            fix=f"another cable (all eight wires) or port of the switch; on {name}: "
            f"{context.sudo_prefix(name)}ethtool -s {nic.name} autoneg on",
        )  # fmt: skip


def _check_wireless(context: CheckContext, name: str, interface: SocketInterface) -> Iterator[Finding]:
    if interface.kind != "wireless":
        return
    trips = [pair for pair in context.network.pairs if name in (pair.source, pair.target) and pair.rtt_s is not None]
    spread = ""
    if trips:
        worst = max(trips, key=lambda pair: pair.rtt_p95_s or 0.0)
        spread = f"; round trips of {format_seconds(worst.rtt_p05_s)} to {format_seconds(worst.rtt_p95_s)}"
    yield Finding(
        check="net.wireless", severity="warning", host=name,
        evidence=f"the others reach it by Wi-Fi, {interface.interface}{spread}",
        fix=f"plug a cable into {name}: evener takes it by itself",
    )  # fmt: skip


def _check_mtus(context: CheckContext, pairs: PairTable) -> Iterator[Finding]:
    for name in context.network.interfaces:  # if all links of a host have too small an MTU, that is one finding
        own_pairs = [pair for key, pair in pairs.items() if name in key and pair.large is not None]
        stalled = [pair for pair in own_pairs if pair.large == "stalled"]
        if len({frozenset((pair.source, pair.target)) for pair in stalled}) > 1 and len(stalled) == len(own_pairs):
            fits = min((pair.path_mtu for pair in stalled if pair.path_mtu is not None), default=None)
            yield Finding(
                check="net.mtu",
                severity="error",
                host=name,
                evidence="to and from every other host small messages pass, one of 256 KiB stalls"
                + (
                    f"; packets of up to {fits} bytes arrive, it sends {context.network.interfaces[name].mtu}"
                    if fits
                    else ""
                ),
                fix=_set_mtu_command(context, name, fits or 1280),
            )
            pairs = {key: pair for key, pair in pairs.items() if name not in key}
    for source, target in pairs:
        if source > target and (target, source) in pairs:
            continue
        both = [pair for key in ((source, target), (target, source)) if (pair := pairs.get(key)) is not None]
        yield from _check_pair_mtu(context, both)


def _check_pair_mtu(context: CheckContext, both: list[PairConnectivity]) -> Iterator[Finding]:
    """Yield at most one finding on the MTU between two hosts."""
    chosen = {name: context.network.interfaces[name] for name in (both[0].source, both[0].target)}
    stalled = [pair for pair in both if pair.large == "stalled"]
    path_mtus = [pair.path_mtu for pair in both if pair.path_mtu is not None]
    mtus = [interface.mtu for interface in chosen.values() if interface.mtu is not None]
    fits = min(path_mtus, default=None)
    lower = "; ".join(_set_mtu_command(context, name, fits) for name in chosen if fits is not None)
    worst = (stalled or both)[0]
    if stalled:
        where = "in both directions" if len(stalled) == 2 else f"from {worst.source} to {worst.target}"
        interface = chosen[worst.source]
        packet = f"; packets of up to {fits} bytes arrive, {interface.interface} sends {interface.mtu}"
        yield Finding(
            check="net.mtu", severity="error", host=worst.source, peer=worst.target,
            evidence=f"{where} small messages pass, one of 256 KiB stalls{packet if fits else ''}",
            fix=lower or f"{_set_mtu_command(context, worst.source, 1280)}, and try again",
        )  # fmt: skip
    elif fits is not None and mtus and fits < min(mtus):
        yield Finding(
            check="net.mtu", severity="warning", host=worst.source, peer=worst.target,
            evidence=f"only packets of up to {fits} bytes arrive, {chosen[worst.source].interface} sends {min(mtus)}",
            fix=lower,
        )  # fmt: skip
    elif len(set(mtus)) == 2 and len({interface.network for interface in chosen.values()}) == 1:
        low, high = sorted(chosen, key=lambda name: chosen[name].mtu or 0)
        yield Finding(
            check="net.mtu", severity="warning", host=high, peer=low,
            evidence=f"in one network, {high} sends packets of {chosen[high].mtu} bytes, {low} takes {chosen[low].mtu}",
            fix=_set_mtu_command(context, high, chosen[low].mtu or 1500),
        )  # fmt: skip


def _set_mtu_command(context: CheckContext, name: str, mtu: int) -> str:
    return (
        f"on {name}: {context.sudo_prefix(name)}ip link set dev {context.network.interfaces[name].interface} mtu {mtu}"
    )


def _check_asymmetry(context: CheckContext, pairs: PairTable) -> Iterator[Finding]:
    for (source, target), pair in pairs.items():
        reverse = pairs.get((target, source))
        if reverse is None or not pair.goodput_Bps or not reverse.goodput_Bps:
            continue
        if pair.goodput_Bps * ASYMMETRY_FACTOR < min(reverse.goodput_Bps, MAX_JUDGED_BPS):
            yield Finding(
                check="net.asymmetric",
                severity="warning",
                host=source,
                peer=target,
                evidence=f"{source} to {target} {format_bit_rate(pair.goodput_Bps)}, back "
                f"{format_bit_rate(reverse.goodput_Bps)}",
                fix="another cable or port of the switch; on both, ethtool shows speed and duplex of an interface; "
                f"evener probe wire{context.fleet.cli_flag} measures for longer",
            )


def _check_slow_links(
    context: CheckContext, pairs: PairTable, asymmetric: set[tuple[str | None, str | None]]
) -> Iterator[Finding]:
    """Check for links below what the NICs, the fleet's other links or an earlier measurement promise."""
    measured = {key: pair for key, pair in pairs.items() if pair.goodput_Bps}
    best = max((pair.goodput_Bps or 0.0 for pair in measured.values()), default=0.0)
    slow: dict[tuple[str, str], str] = {}
    for key, pair in measured.items():
        reason = None if key in asymmetric else _slow_reason(context, pair, best)
        if reason is not None:
            slow[key] = reason
    for name in context.network.interfaces:  # if all links of a host are slow, that is one finding
        own_keys = [key for key in measured if name in key]
        if len({frozenset(key) for key in own_keys}) > 1 and all(key in slow for key in own_keys):
            fastest = max(measured[key].goodput_Bps or 0.0 for key in own_keys)
            yield _slow_link_finding(
                context, name, None, f"all its links are slow, {format_bit_rate(fastest)} at most: {slow[own_keys[0]]}"
            )
            slow = {key: reason for key, reason in slow.items() if name not in key}
    reported = set()
    for (source, target), reason in slow.items():
        if frozenset((source, target)) not in reported:
            reported.add(frozenset((source, target)))
            goodput = format_bit_rate(pairs[source, target].goodput_Bps)
            yield _slow_link_finding(context, source, target, f"{source} to {target} {goodput}: {reason}")


def _slow_reason(context: CheckContext, pair: PairConnectivity, best: float) -> str | None:
    goodput = pair.goodput_Bps or 0.0
    interfaces = [context.network.interfaces[name] for name in (pair.source, pair.target)]
    if any(interface.kind == "wireless" for interface in interfaces):
        return None  # net.wireless reports it
    nics: list[NetworkInterface] = []
    for name, interface in zip((pair.source, pair.target), interfaces, strict=True):
        nic = context.facts[name].find_interface(interface.interface) if name in context.facts else None
        nics += [nic] if nic is not None and nic.is_physical and nic.speed_Mbit else []
    speed_Bps = min((nic.speed_Mbit or 0 for nic in nics), default=0) * 125e3
    probed = context.fleet.links.get(pair.source, {}).get(pair.target)
    if goodput < MIN_SHARE_OF_NIC_SPEED * min(speed_Bps, MAX_JUDGED_BPS):
        return f"the cards run at {format_bit_rate(speed_Bps)}"
    if probed is not None and goodput < MIN_SHARE_OF_PROBED * min(probed.goodput_Bps, MAX_JUDGED_BPS):
        when = f" ({probed.measured[:10]})" if probed.measured else ""
        return f"it was {format_bit_rate(probed.goodput_Bps)} when it was probed{when}"
    if goodput < SLOW_WIRED_BPS and all(interface.kind == "wired" for interface in interfaces):
        return "as slow as a port of 100 Mbit/s"
    if goodput < MIN_SHARE_OF_BEST_LINK * min(best, 125e6):
        return f"the best link of the fleet has {format_bit_rate(best)}"
    return None


def _slow_link_finding(context: CheckContext, host: str, peer: str | None, evidence: str) -> Finding:
    interface = context.network.interfaces[host].interface
    return Finding(
        check="net.slow-link", severity="warning", host=host, peer=peer, evidence=evidence,
        fix=f"another cable or port of the switch; on {host}: ethtool {interface} shows speed and duplex",
    )  # fmt: skip


def _check_retransmits(context: CheckContext, pairs: PairTable, limit: float) -> Iterator[Finding]:
    for (source, target), pair in pairs.items():
        share = (pair.retransmits or 0) / max(1, pair.segments or 1)
        if pair.goodput_Bps and share > limit:
            facts = context.facts.get(source)
            control = facts.congestion_control if facts is not None else None
            interface = context.network.interfaces[source]
            yield Finding(
                check="net.stack-loss",
                severity="warning",
                host=source,
                peer=target,
                evidence=f"{share:.0%} of what {source} sends to {target} is lost and retransmitted "
                f"({format_bytes(pair.goodput_Bps)} a second "
                f"arrive{f', congestion control {control}' if control else ''})",
                fix=f"on {source}: {context.sudo_prefix(source)}sysctl -w net.ipv4.tcp_congestion_control=cubic; "
                f"{context.sudo_prefix(source)}tc qdisc replace dev {interface.interface} root fq; then "
                f"evener probe wire{context.fleet.cli_flag}",
            )
