"""How fast and how clean are the ways between the hosts, and which command mends them? Pure, as `checks`.

Goodput is that of one TCP stream for a fifth of a second; what looked doubtful was measured again for longer, and the
better figure counts. The thresholds are wide all the same: what they name is broken, not merely slow. Settings that
`probe wire` found to be better are told for as long as their host has the others.
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
ONE_STREAM_BPS = 400e6  # what one stream of ours fills on a slow or busy machine: above, it is no measure of the wire
OF_THE_CARD = 0.4  # goodput below this share of the card's speed
OF_THE_BEST = 0.25  # goodput below this share of the fleet's best
OF_BEFORE = 0.4  # goodput below this share of what `probe` measured
LOPSIDED = 1.6  # one direction faster than the other by this factor
LOSSY = 0.04  # of all segments were sent again
VERY_LOSSY = 0.15  # so many that this is the cause, whatever else is slow or lopsided

Pairs = dict[tuple[str, str], Pair]


def check_links(seen: Seen) -> list[Finding]:
    """Every finding about what passes, but slowly, lossily or in small pieces only."""
    pairs: Pairs = {(pair.source, pair.target): pair for pair in seen.network.pairs}
    found: list[Finding] = []
    for name, way in seen.network.ways.items():
        if name in seen.facts:
            found += [*_slow_ports(seen, name, seen.facts[name], way), *_wireless(seen, name, way)]
    found += _mtus(seen, pairs)
    causes = list(_losses(seen, pairs, VERY_LOSSY))
    rest = {key: pair for key, pair in pairs.items() if not any({one.host, one.peer} == set(key) for one in causes)}
    lopsided = list(_asymmetry(rest))
    slow = list(_slow_links(seen, rest, {(one.host, one.peer) for one in lopsided}))
    told = [{one.host, one.peer} - {None} for one in (*lopsided, *slow)]  # a queue that overflows is what slow means
    losses = [one for one in _losses(seen, rest, LOSSY) if not any(names <= {one.host, one.peer} for names in told)]
    found += [gains.finding(gain, source, target, seen.sudo(gain.host), seen.fleet.links[source][target].measured)
              for source, target, gain in gains.still_there(seen.fleet.links, seen.facts)]  # fmt: skip
    return [*found, *causes, *lopsided, *slow, *losses]


def _slow_ports(seen: Seen, name: str, facts: Facts, way: Way) -> Iterator[Finding]:
    card = facts.interface(way.interface)
    if card is None or card.kind != "wired":
        return
    slow = card.speed_Mbit is not None and card.speed_Mbit <= SLOW_PORT_MBIT
    if slow or card.duplex == "half":
        yield Finding(
            check="net.slow-link", severity="warning", host=name,
            evidence=f"{card.name} runs at {card.speed_Mbit} Mbit/s, {card.duplex or 'unknown'} duplex",
            fix=f"another cable (all eight wires) or port of the switch; on {name}: "
            f"{seen.sudo(name)}ethtool -s {card.name} autoneg on",
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
    for name in seen.network.ways:  # one host whose ways are all too narrow is one finding
        mine = [pair for key, pair in pairs.items() if name in key and pair.large is not None]
        stalled = [pair for pair in mine if pair.large == "stalled"]
        if len({frozenset((pair.source, pair.target)) for pair in stalled}) > 1 and len(stalled) == len(mine):
            fits = min((pair.path_mtu for pair in stalled if pair.path_mtu is not None), default=None)
            yield Finding(
                check="net.mtu", severity="error", host=name,
                evidence="to and from every other host small messages pass, one of 256 KiB stands still"
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
    """One finding at most for two hosts."""
    ways = {name: seen.network.ways[name] for name in (both[0].source, both[0].target)}
    stalled = [pair for pair in both if pair.large == "stalled"]
    known = [pair.path_mtu for pair in both if pair.path_mtu is not None]
    sent = [way.mtu for way in ways.values() if way.mtu is not None]
    fits = min(known, default=None)
    lower = "; ".join(_set_mtu(seen, name, fits) for name in ways if fits is not None)
    worst = (stalled or both)[0]
    if stalled:
        where = "in both directions" if len(stalled) == 2 else f"from {worst.source} to {worst.target}"
        way = ways[worst.source]
        packet = f"; packets of up to {fits} bytes arrive, {way.interface} sends {way.mtu}"
        yield Finding(
            check="net.mtu", severity="error", host=worst.source, peer=worst.target,
            evidence=f"{where} small messages pass, one of 256 KiB stands still{packet if fits else ''}",
            fix=lower or f"{_set_mtu(seen, worst.source, 1280)}, and try again",
        )  # fmt: skip
    elif fits is not None and sent and fits < min(sent):
        yield Finding(
            check="net.mtu", severity="warning", host=worst.source, peer=worst.target,
            evidence=f"only packets of up to {fits} bytes arrive, {ways[worst.source].interface} sends {min(sent)}",
            fix=lower,
        )  # fmt: skip
    elif len(set(sent)) == 2 and len({way.network for way in ways.values()}) == 1:
        low, high = sorted(ways, key=lambda name: ways[name].mtu or 0)
        yield Finding(
            check="net.mtu", severity="warning", host=high, peer=low,
            evidence=f"in one network, {high} sends packets of {ways[high].mtu} bytes and {low} takes {ways[low].mtu}",
            fix=_set_mtu(seen, high, ways[low].mtu or 1500),
        )  # fmt: skip


def _set_mtu(seen: Seen, name: str, mtu: int) -> str:
    return f"on {name}: {seen.sudo(name)}ip link set dev {seen.network.ways[name].interface} mtu {mtu}"


def _asymmetry(pairs: Pairs) -> Iterator[Finding]:
    for (source, target), pair in pairs.items():
        back = pairs.get((target, source))
        if back is None or not pair.goodput_Bps or not back.goodput_Bps:
            continue
        if pair.goodput_Bps * LOPSIDED < min(back.goodput_Bps, ONE_STREAM_BPS):
            yield Finding(
                check="net.asymmetric", severity="warning", host=source, peer=target,
                evidence=f"{source} to {target} {link_rate(pair.goodput_Bps)}, back {link_rate(back.goodput_Bps)}",
                fix="another cable or port of the switch; on both, ethtool shows speed and duplex of an interface; "
                "evener probe wire measures for longer",
            )  # fmt: skip


def _slow_links(seen: Seen, pairs: Pairs, lopsided: set[tuple[str | None, str | None]]) -> Iterator[Finding]:
    """Below what the cards, the fleet's other links or an earlier measurement promise."""
    measured = {key: pair for key, pair in pairs.items() if pair.goodput_Bps}
    best = max((pair.goodput_Bps or 0.0 for pair in measured.values()), default=0.0)
    slow: dict[tuple[str, str], str] = {}
    for key, pair in measured.items():
        reason = None if key in lopsided else _why_slow(seen, pair, best)
        if reason is not None:
            slow[key] = reason
    for name in seen.network.ways:  # one host whose links are all slow is one finding
        mine = [key for key in measured if name in key]
        if len({frozenset(key) for key in mine}) > 1 and all(key in slow for key in mine):
            fastest = max(measured[key].goodput_Bps or 0.0 for key in mine)
            yield _slow(seen, name, None, f"all its links are slow, {link_rate(fastest)} at most: {slow[mine[0]]}")
            slow = {key: reason for key, reason in slow.items() if name not in key}
    told = set()
    for (source, target), reason in slow.items():
        if frozenset((source, target)) not in told:
            told.add(frozenset((source, target)))
            goodput = link_rate(pairs[source, target].goodput_Bps)
            yield _slow(seen, source, target, f"{source} to {target} {goodput}: {reason}")


def _why_slow(seen: Seen, pair: Pair, best: float) -> str | None:
    goodput = pair.goodput_Bps or 0.0
    ways = [seen.network.ways[name] for name in (pair.source, pair.target)]
    if any(way.kind == "wireless" for way in ways):
        return None  # net.wireless says it
    cards: list[Interface] = []
    for name, way in zip((pair.source, pair.target), ways, strict=True):
        card = seen.facts[name].interface(way.interface) if name in seen.facts else None
        cards += [card] if card is not None and card.is_physical and card.speed_Mbit else []
    speed_Bps = min((card.speed_Mbit or 0 for card in cards), default=0) * 125e3
    before = seen.fleet.links.get(pair.source, {}).get(pair.target)
    if goodput < OF_THE_CARD * min(speed_Bps, ONE_STREAM_BPS):
        return f"the cards run at {link_rate(speed_Bps)}"
    if before is not None and goodput < OF_BEFORE * min(before.goodput_Bps, ONE_STREAM_BPS):
        when = f" ({before.measured[:10]})" if before.measured else ""
        return f"it was {link_rate(before.goodput_Bps)} when it was probed{when}"
    if goodput < SLOW_BPS and all(way.kind == "wired" for way in ways):
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
            way = seen.network.ways[source]
            yield Finding(
                check="net.stack-loss", severity="warning", host=source, peer=target,
                evidence=f"{share:.0%} of what {source} sends to {target} is lost and sent again "
                f"({size(pair.goodput_Bps)} a second arrive{f', congestion control {control}' if control else ''})",
                fix=f"on {source}: {seen.sudo(source)}sysctl -w net.ipv4.tcp_congestion_control=cubic; "
                f"{seen.sudo(source)}tc qdisc replace dev {way.interface} root fq; then evener probe wire",
            )  # fmt: skip
