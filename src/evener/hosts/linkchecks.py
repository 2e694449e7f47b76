"""Check the links between the hosts: speed, asymmetry, MTU, loss. Pure: facts in, findings out.

Goodput is that of one TCP stream for a fifth of a second; a doubtful figure was measured again for longer, and the
better one counts. The thresholds are wide all the same: they detect what is broken, not merely slow. Settings that
`probe wire` measured to be faster are reported for as long as their host has the slower ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from evener.core.finding import Finding
from evener.core.units import link_rate, seconds, size
from evener.hosts import gains
from evener.hosts.facts import Facts, Interface
from evener.hosts.pairs import Pair
from evener.hosts.seen import Seen
from evener.hosts.ways import Way

SLOW_PORT_MBIT = 100
SLOW_BPS = 15e6  # no wired link of this century but a 100 Mbit/s port is slower
ONE_STREAM_BPS = 400e6  # one stream reaches this on a slow or busy machine: above, it does not measure the link
OF_THE_CARD = 0.4  # goodput below this share of the card's speed
OF_THE_BEST = 0.25  # goodput below this share of the fleet's best
OF_BEFORE = 0.4  # goodput below this share of what `probe` measured
LOPSIDED = 1.6  # one direction faster than the other by this factor
LOSSY = 0.04  # share of segments retransmitted
VERY_LOSSY = 0.15  # share from which on loss is the cause, whatever else is slow or asymmetric

Pairs = dict[tuple[str, str], Pair]


def check_links(seen: Seen) -> list[Finding]:
    """Return every finding about links that work, but are slow, lossy or limited to small packets."""
    pairs: Pairs = {(pair.source, pair.target): pair for pair in seen.network.pairs}
    findings: list[Finding] = []
    for name, interface in seen.network.ways.items():
        if name in seen.facts:
            findings += [*_slow_ports(seen, name, seen.facts[name], interface), *_wireless(seen, name, interface)]
    findings += _mtus(seen, pairs)
    heavy_losses = list(_losses(seen, pairs, VERY_LOSSY))
    others = {
        key: pair
        for key, pair in pairs.items()
        if not any({finding.host, finding.peer} == set(key) for finding in heavy_losses)
    }
    asymmetric = list(_asymmetry(others))
    slow = list(_slow_links(seen, others, {(finding.host, finding.peer) for finding in asymmetric}))
    # A slow link overflows its queue: its losses are not another finding.
    reported = [{finding.host, finding.peer} - {None} for finding in (*asymmetric, *slow)]
    losses = [
        finding
        for finding in _losses(seen, others, LOSSY)
        if not any(names <= {finding.host, finding.peer} for names in reported)
    ]
    findings += [gains.finding(gain, source, target, seen.sudo(gain.host), seen.fleet.links[source][target].measured)
              for source, target, gain in gains.still_there(seen.fleet.links, seen.facts)]  # fmt: skip
    return [*findings, *heavy_losses, *asymmetric, *slow, *losses]


def _slow_ports(seen: Seen, name: str, facts: Facts, way: Way) -> Iterator[Finding]:
    nic = facts.interface(way.interface)
    if nic is None or nic.kind != "wired":
        return
    slow = nic.speed_Mbit is not None and nic.speed_Mbit <= SLOW_PORT_MBIT
    if slow or nic.duplex == "half":
        yield Finding(
            check="net.slow-link", severity="warning", host=name,
            evidence=f"{nic.name} runs at {nic.speed_Mbit} Mbit/s, {nic.duplex or 'unknown'} duplex",
            fix=f"another cable (all eight wires) or port of the switch; on {name}: "
            f"{seen.sudo(name)}ethtool -s {nic.name} autoneg on",
        )  # fmt: skip


def _wireless(seen: Seen, name: str, way: Way) -> Iterator[Finding]:
    if way.kind != "wireless":
        return
    trips = [pair for pair in seen.network.pairs if name in (pair.source, pair.target) and pair.rtt_s is not None]
    spread = ""
    if trips:
        worst = max(trips, key=lambda pair: pair.rtt_p95_s or 0.0)
        spread = f"; round trips of {seconds(worst.rtt_p05_s)} to {seconds(worst.rtt_p95_s)}"
    yield Finding(
        check="net.wireless", severity="warning", host=name,
        evidence=f"the others reach it by Wi-Fi, {way.interface}{spread}",
        fix=f"plug a cable into {name}: evener takes it by itself",
    )  # fmt: skip


def _mtus(seen: Seen, pairs: Pairs) -> Iterator[Finding]:
    for name in seen.network.ways:  # if all links of a host have too small an MTU, that is one finding
        own_pairs = [pair for key, pair in pairs.items() if name in key and pair.large is not None]
        stalled = [pair for pair in own_pairs if pair.large == "stalled"]
        if len({frozenset((pair.source, pair.target)) for pair in stalled}) > 1 and len(stalled) == len(own_pairs):
            fits = min((pair.path_mtu for pair in stalled if pair.path_mtu is not None), default=None)
            yield Finding(
                check="net.mtu", severity="error", host=name,
                evidence="to and from every other host small messages pass, one of 256 KiB stalls"
                + (f"; packets of up to {fits} bytes arrive, it sends {seen.network.ways[name].mtu}" if fits else ""),
                fix=_set_mtu(seen, name, fits or 1280),
            )  # fmt: skip
            pairs = {key: pair for key, pair in pairs.items() if name not in key}
    for source, target in pairs:
        if source > target and (target, source) in pairs:
            continue
        both = [pair for key in ((source, target), (target, source)) if (pair := pairs.get(key)) is not None]
        yield from _mtu(seen, both)


def _mtu(seen: Seen, both: list[Pair]) -> Iterator[Finding]:
    """Yield at most one finding for two hosts."""
    chosen = {name: seen.network.ways[name] for name in (both[0].source, both[0].target)}
    stalled = [pair for pair in both if pair.large == "stalled"]
    path_mtus = [pair.path_mtu for pair in both if pair.path_mtu is not None]
    mtus = [interface.mtu for interface in chosen.values() if interface.mtu is not None]
    fits = min(path_mtus, default=None)
    lower = "; ".join(_set_mtu(seen, name, fits) for name in chosen if fits is not None)
    worst = (stalled or both)[0]
    if stalled:
        where = "in both directions" if len(stalled) == 2 else f"from {worst.source} to {worst.target}"
        interface = chosen[worst.source]
        packet = f"; packets of up to {fits} bytes arrive, {interface.interface} sends {interface.mtu}"
        yield Finding(
            check="net.mtu", severity="error", host=worst.source, peer=worst.target,
            evidence=f"{where} small messages pass, one of 256 KiB stalls{packet if fits else ''}",
            fix=lower or f"{_set_mtu(seen, worst.source, 1280)}, and try again",
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
            fix=_set_mtu(seen, high, chosen[low].mtu or 1500),
        )  # fmt: skip


def _set_mtu(seen: Seen, name: str, mtu: int) -> str:
    return f"on {name}: {seen.sudo(name)}ip link set dev {seen.network.ways[name].interface} mtu {mtu}"


def _asymmetry(pairs: Pairs) -> Iterator[Finding]:
    for (source, target), pair in pairs.items():
        reverse = pairs.get((target, source))
        if reverse is None or not pair.goodput_Bps or not reverse.goodput_Bps:
            continue
        if pair.goodput_Bps * LOPSIDED < min(reverse.goodput_Bps, ONE_STREAM_BPS):
            yield Finding(
                check="net.asymmetric", severity="warning", host=source, peer=target,
                evidence=f"{source} to {target} {link_rate(pair.goodput_Bps)}, back {link_rate(reverse.goodput_Bps)}",
                fix="another cable or port of the switch; on both, ethtool shows speed and duplex of an interface; "
                "evener probe wire measures for longer",
            )  # fmt: skip


def _slow_links(seen: Seen, pairs: Pairs, lopsided: set[tuple[str | None, str | None]]) -> Iterator[Finding]:
    """Check for links below what the NICs, the fleet's other links or an earlier measurement promise."""
    measured = {key: pair for key, pair in pairs.items() if pair.goodput_Bps}
    best = max((pair.goodput_Bps or 0.0 for pair in measured.values()), default=0.0)
    slow: dict[tuple[str, str], str] = {}
    for key, pair in measured.items():
        reason = None if key in lopsided else _why_slow(seen, pair, best)
        if reason is not None:
            slow[key] = reason
    for name in seen.network.ways:  # if all links of a host are slow, that is one finding
        own_keys = [key for key in measured if name in key]
        if len({frozenset(key) for key in own_keys}) > 1 and all(key in slow for key in own_keys):
            fastest = max(measured[key].goodput_Bps or 0.0 for key in own_keys)
            yield _slow(seen, name, None, f"all its links are slow, {link_rate(fastest)} at most: {slow[own_keys[0]]}")
            slow = {key: reason for key, reason in slow.items() if name not in key}
    reported = set()
    for (source, target), reason in slow.items():
        if frozenset((source, target)) not in reported:
            reported.add(frozenset((source, target)))
            goodput = link_rate(pairs[source, target].goodput_Bps)
            yield _slow(seen, source, target, f"{source} to {target} {goodput}: {reason}")


def _why_slow(seen: Seen, pair: Pair, best: float) -> str | None:
    goodput = pair.goodput_Bps or 0.0
    interfaces = [seen.network.ways[name] for name in (pair.source, pair.target)]
    if any(interface.kind == "wireless" for interface in interfaces):
        return None  # net.wireless reports it
    nics: list[Interface] = []
    for name, interface in zip((pair.source, pair.target), interfaces, strict=True):
        nic = seen.facts[name].interface(interface.interface) if name in seen.facts else None
        nics += [nic] if nic is not None and nic.is_physical and nic.speed_Mbit else []
    speed_Bps = min((nic.speed_Mbit or 0 for nic in nics), default=0) * 125e3
    probed = seen.fleet.links.get(pair.source, {}).get(pair.target)
    if goodput < OF_THE_CARD * min(speed_Bps, ONE_STREAM_BPS):
        return f"the cards run at {link_rate(speed_Bps)}"
    if probed is not None and goodput < OF_BEFORE * min(probed.goodput_Bps, ONE_STREAM_BPS):
        when = f" ({probed.measured[:10]})" if probed.measured else ""
        return f"it was {link_rate(probed.goodput_Bps)} when it was probed{when}"
    if goodput < SLOW_BPS and all(interface.kind == "wired" for interface in interfaces):
        return "as slow as a port of 100 Mbit/s"
    if goodput < OF_THE_BEST * min(best, 125e6):
        return f"the best link of the fleet has {link_rate(best)}"
    return None


def _slow(seen: Seen, host: str, peer: str | None, evidence: str) -> Finding:
    interface = seen.network.ways[host].interface
    return Finding(
        check="net.slow-link", severity="warning", host=host, peer=peer, evidence=evidence,
        fix=f"another cable or port of the switch; on {host}: ethtool {interface} shows speed and duplex",
    )  # fmt: skip


def _losses(seen: Seen, pairs: Pairs, limit: float) -> Iterator[Finding]:
    for (source, target), pair in pairs.items():
        share = (pair.retransmits or 0) / max(1, pair.segments or 1)
        if pair.goodput_Bps and share > limit:
            facts = seen.facts.get(source)
            control = facts.congestion_control if facts is not None else None
            interface = seen.network.ways[source]
            yield Finding(
                check="net.stack-loss", severity="warning", host=source, peer=target,
                evidence=f"{share:.0%} of what {source} sends to {target} is lost and retransmitted "
                f"({size(pair.goodput_Bps)} a second arrive{f', congestion control {control}' if control else ''})",
                fix=f"on {source}: {seen.sudo(source)}sysctl -w net.ipv4.tcp_congestion_control=cubic; "
                f"{seen.sudo(source)}tc qdisc replace dev {interface.interface} root fq; then evener probe wire",
            )  # fmt: skip
