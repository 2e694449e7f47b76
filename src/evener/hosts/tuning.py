"""Which setting of a host would make its wire faster? Tried on the wire itself, in turn with what the host has.

    link.congestion   another congestion control, while as much goes the other way
    link.window       larger buffers on one end or the other, one way; where a socket may not have them: several streams
    link.idle         a burst after silence beside a burst after a short pause

Nothing of a host is changed: a socket may choose its congestion control and its buffers for itself, and a short pause
does what the setting would. What cannot bring anything, by arithmetic, is not tried: on most home networks that is
everything but the congestion control, and of a card whose speed is known and reached, that too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from evener.core.decoding import from_tree
from evener.core.fleet import Gain
from evener.core.units import link_rate, median, seconds, size
from evener.hosts import gains
from evener.hosts.facts import Facts
from evener.hosts.session import Session
from evener.hosts.ways import Way
from evener.hosts.wire import OVERHEAD_S, STREAMS, Flow, UnreachableError, Wire

TRIED = ("bbr", "cubic", "reno")  # reno only where cubic may not be had: on short ways they are alike
TRY_S, TRY_WARM_S = 0.5, 0.3
FIRST_ROUNDS, MORE_ROUNDS = 2, 3  # more only where something is ahead in the first
NEAR = 4.0  # a window that allows so many times what is reached is not what limits
LARGER = 1.5  # times the buffer: less would not show
LIMITED = 0.25  # of the time the kernel must have waited for the receiver's window
STREAMS_WORTH = 1.2  # times as much by several streams, where a larger buffer cannot be tried
BURST_S, BURST_MIN, BURST_MAX = 0.1, 1_000_000, 10_000_000
SHORT_S, SILENT_S, BURSTS = 0.05, 1.0, 5  # in silence Linux halves the window every 0.2 s or so
FELL = 0.5  # the share of its window with which TCP begins after silence

Pair = tuple[str, str]
Gains = dict[Pair, list[Gain]]


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What a socket of a host may choose for itself."""

    congestion: list[str]
    receive_bytes: int
    send_bytes: int


def estimate_s(num_hosts: int) -> float:
    """About how long `tune` takes where nothing turns out to be better.

    >>> round(estimate_s(2))
    4
    """
    return len(neighbours([str(i) for i in range(num_hosts)])) * FIRST_ROUNDS * 2 * (TRY_WARM_S + TRY_S + OVERHEAD_S)


def neighbours(names: Sequence[str]) -> list[Pair]:
    """Pairs in which every host is met: a setting belongs to a host, and need not be tried with all others.

    >>> neighbours("ab"), neighbours("abcd")
    ([('a', 'b')], [('a', 'b'), ('b', 'c'), ('c', 'd'), ('d', 'a')])
    """
    ring = list(zip(names, [*names[1:], *names[:1]], strict=True))
    return ring if len(names) > 2 else ring[: len(names) - 1]


class Tuner:
    """Tries what may bring more between hosts whose wires are measured."""

    def __init__(
        self,
        sessions: Mapping[str, Session],
        ways: Mapping[str, Way],
        facts: Mapping[str, Facts],
        wires: Sequence[Wire],
    ) -> None:
        self._facts, self._ways = facts, ways
        self._wires = {(wire.source, wire.target): wire for wire in wires}
        addresses = {name: way.address for name, way in ways.items()}
        self._flows = {pair: Flow(sessions, addresses, *pair) for pair in self._wires}
        self._choices = {name: from_tree(sessions[name].call("wire", "choices"), Choices)
                         for name in dict.fromkeys(name for pair in self._wires for name in pair)}  # fmt: skip

    def tune(self, told: Callable[[str], None] = lambda text: None) -> Gains:
        """What brings more, by ordered pair."""
        found: Gains = {}
        for a, b in neighbours(list(self._choices)):
            both = [pair for pair in ((a, b), (b, a)) if pair in self._wires]
            try:
                tried = [*self._congestion(both), *(gain for way in both for gain in self._one_way(way))]
            except UnreachableError as error:
                told(f"{a} and {b}: {error.finding.evidence}")
                continue
            for way, gain in tried:
                found.setdefault(way, []).append(gain)
                told(gain.evidence)
        return found

    def _one_way(self, way: Pair) -> list[tuple[Pair, Gain]]:
        wire = self._wires[way]
        if not wire.link.goodput_Bps:
            return []  # a wire that stands still half of the time: no setting is to blame before that is mended
        tried = [self._window(wire, gains.RECEIVE), self._window(wire, gains.SEND), self._idle(wire)]
        return [(way, gain) for gain in tried if gain is not None]

    # --- link.congestion

    def _congestion(self, ways: Sequence[Pair]) -> list[tuple[Pair, Gain]]:
        """Both ways at once, as a ring all-reduce uses a wire."""
        ways = [way for way in ways if gains.CONGESTION in self._facts[way[0]].sysctls]
        has = {way: self._facts[way[0]].sysctls[gains.CONGESTION] for way in ways}
        slow = [way for way in ways if gains.has_room(self._wires[way].link.bandwidth_Bps, self._speed_Bps(way))]
        may = {way: [one for one in self._controls(way[0]) if one != has[way]] for way in slow}
        options = [one for one in TRIED if any(one in names for names in may.values())]
        if not options:
            return []

        def go(option: str | None) -> dict[Pair, float]:
            with ThreadPoolExecutor(max_workers=len(ways)) as pool:
                return dict(zip(ways, pool.map(lambda way: self._try(way, may, option), ways), strict=True))

        figures = in_turn(go, [None, *options])
        found = []
        for way in may:
            was = figures[way][None]
            better = [one for one in may[way] if gains.ahead(was, figures[way][one])]
            if better:
                best = max(better, key=lambda one: median(figures[way][one]) or 0.0)
                words = f"both ways at once {way[0]} sends {way[1]} {{was}} with {has[way]}, {{better}} with {best}"
                found.append((way, _gain("link.congestion", way[0], gains.CONGESTION, has[way], best,
                                         was, figures[way][best], words)))  # fmt: skip
        return found

    def _controls(self, host: str) -> list[str]:
        known = [one for one in TRIED if one in self._choices[host].congestion]
        return [one for one in known if one != "reno" or "cubic" not in known]

    def _try(self, way: Pair, may: Mapping[Pair, Sequence[str]], option: str | None) -> float:
        chosen = option if option in may.get(way, ()) else None
        return self._flows[way].pour(1, TRY_S, warm_s=TRY_WARM_S, congestion=chosen).mean_Bps

    def _speed_Bps(self, way: Pair) -> float | None:
        """What the slower of the two cards could carry; None where one does not say."""
        speeds = []
        for name in way:
            card = self._facts[name].interface(self._ways[name].interface)
            if card is None or not card.is_physical or not card.speed_Mbit:
                return None
            speeds.append(card.speed_Mbit * 125e3)
        return min(speeds)

    # --- link.window

    def _window(self, wire: Wire, setting: str) -> Gain | None:
        """Is the window what limits one stream?"""
        receives = setting == gains.RECEIVE
        host = wire.target if receives else wire.source
        triple = self._facts[host].sysctls.get(setting, "")
        buffer_bytes = gains.greatest(triple)
        if buffer_bytes is None:
            return None
        goodput_Bps, rtt_s = wire.link.goodput_Bps, wire.link.rtt_s
        allowed_Bps = gains.window_Bps(setting, buffer_bytes, rtt_s)
        limited = wire.window_limited if receives else None
        if allowed_Bps > NEAR * goodput_Bps if limited is None else limited < LIMITED:
            return None
        seen = "" if limited is None else f", and for {limited:.0%} of the time {wire.source} waits for room there"
        allows = (
            f"{host}'s {setting.rpartition('.')[2]} ends at {size(buffer_bytes)}, at most {link_rate(allowed_Bps)} in "
            f"round trips of {seconds(rtt_s)}{seen}: {wire.source} sends {wire.target} {{was}}"
        )
        largest = self._choices[host].receive_bytes if receives else self._choices[host].send_bytes
        if largest >= LARGER * buffer_bytes:
            was, better = self._larger((wire.source, wire.target), largest, receives)
            words = f"{allows}, {{better}} with a buffer of {size(largest)}"
            is_worth = gains.ahead(was, better)
        else:  # no socket may have more; several together have several windows
            was, better = [goodput_Bps], [wire.link.parallel_Bps or 0.0]
            words = f"{allows} by one stream, {{better}} by {STREAMS}"
            is_worth = better[0] >= STREAMS_WORTH * was[0] and allowed_Bps < NEAR * was[0]
        if not is_worth:
            return None
        wider = gains.wider(setting, triple, median(better) or goodput_Bps, rtt_s)
        return _gain("link.window", host, setting, triple, wider, was, better, words)

    def _larger(self, way: Pair, buffer_bytes: int, receives: bool) -> tuple[list[float], list[float]]:
        """One way, with the buffers that the kernel chooses and with a larger one at one end."""

        def go(option: str | None) -> dict[Pair, float]:
            asked = buffer_bytes // 2 if option else None  # the kernel doubles what is asked
            poured = self._flows[way].pour(
                1, TRY_S, warm_s=TRY_WARM_S,
                receive_bytes=asked if receives else None, send_bytes=None if receives else asked,
            )  # fmt: skip
            return {way: poured.mean_Bps}

        figures = in_turn(go, [None, "larger"])[way]
        return figures[None], figures["larger"]

    # --- link.idle

    def _idle(self, wire: Wire) -> Gain | None:
        """Does a burst after silence take longer because TCP begins with a small window again?"""
        burst = int(min(BURST_MAX, max(BURST_MIN, BURST_S * wire.link.goodput_Bps)))
        lost_s = gains.slow_start_s(wire.link.goodput_Bps, wire.link.rtt_s, burst)
        worth = lost_s > (gains.WORTH - 1) * burst / wire.link.goodput_Bps
        if not worth or wire.congestion == "bbr" or self._facts[wire.source].sysctls.get(gains.IDLE) != "1":
            return None  # BBR goes on at its pace
        pauses_s = (max(SILENT_S, 4 * wire.link.rtt_s), SHORT_S)
        silent, short = self._flows[wire.source, wire.target].bursts(burst, pauses_s, BURSTS)
        fallen, kept = (median([one.window for one in bursts if one.window is not None]) for bursts in (silent, short))
        was, better = ([burst / one.took_s for one in bursts] for bursts in (silent, short))
        if fallen is None or kept is None or fallen > FELL * kept or not gains.ahead(was, better):
            return None
        words = (
            f"{size(burst)} that {wire.source} sends {wire.target} after {seconds(pauses_s[0])} of silence begin in a "
            f"window of {fallen:.0f} segments and reach {{was}}; after {seconds(SHORT_S)}, in one of "
            f"{kept:.0f}, {{better}}"
        )
        return _gain("link.idle", wire.source, gains.IDLE, "1", "0", was, better, words)


def in_turn(
    go: Callable[[str | None], Mapping[Pair, float]], options: Sequence[str | None]
) -> dict[Pair, dict[str | None, list[float]]]:
    """A B A B …: the figures of each option on each way. The first option is what there is; where no other is ahead of
    it after the first rounds, that is all."""
    figures: dict[Pair, dict[str | None, list[float]]] = {}

    def rounds(number: int) -> None:
        for _ in range(number):
            for option in options:
                for way, figure in go(option).items():
                    figures.setdefault(way, {}).setdefault(option, []).append(figure)

    rounds(FIRST_ROUNDS)
    if any(gains.ahead(of[options[0]], of[other]) for of in figures.values() for other in options[1:]):
        rounds(MORE_ROUNDS)
    return figures


def _gain(check: str, host: str, setting: str, was: str, better: str, was_Bps: Sequence[float],
          better_Bps: Sequence[float], words: str) -> Gain:  # fmt: skip
    first, second = median(was_Bps) or 0.0, median(better_Bps) or 0.0
    spread = f" (medians of {len(was_Bps)}, in turn)" if len(was_Bps) > 1 else ""
    evidence = words.format(was=link_rate(first), better=link_rate(second)) + spread
    return Gain(check=check, host=host, setting=setting, was=was, better=better, was_Bps=first, better_Bps=second,
                evidence=evidence)  # fmt: skip
