"""Tune TCP: try settings on the links themselves, interleaved with the current ones, and report those that are faster.

    link.congestion   another congestion control, while the other direction sends as much
    link.window       larger buffers at one end, in one direction; if a socket may not have them, several streams
    link.idle         a burst after an idle pause against a burst after a short one

No setting of a host is changed: a socket may choose its congestion control and its buffers for itself, and a short
pause has the effect of the setting. What cannot help, by arithmetic, is not tried: on most home networks that is
everything but the congestion control, and on a NIC that already reaches its known speed, that too.
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

TRIED = ("bbr", "cubic", "reno")  # reno only where cubic is not available: on short round trips they are alike
TRY_S, TRY_WARM_S = 0.5, 0.3
FIRST_ROUNDS, MORE_ROUNDS = 2, 3  # more only if an option is faster in the first
NEAR = 4.0  # a window that allows so many times the measured goodput is not the limit
LARGER = 1.5  # times the buffer: a smaller increase would not show
LIMITED = 0.25  # of the time, the kernel must have waited for the receiver's window
STREAMS_WORTH = 1.2  # speedup by several streams, if a larger buffer cannot be tried
BURST_S, BURST_MIN, BURST_MAX = 0.1, 1_000_000, 10_000_000
SHORT_S, SILENT_S, BURSTS = 0.05, 1.0, 5  # while idle, Linux halves the window about every 0.2 s
FELL = 0.5  # share of its window with which TCP restarts after idling

Pair = tuple[str, str]
Gains = dict[Pair, list[Gain]]


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The TCP options that a socket of a host may set for itself."""

    congestion: list[str]
    receive_bytes: int
    send_bytes: int


def estimate_s(num_hosts: int) -> float:
    """Return the approximate duration of `tune` if no setting is better.

    >>> round(estimate_s(2))
    4
    """
    return len(neighbours([str(i) for i in range(num_hosts)])) * FIRST_ROUNDS * 2 * (TRY_WARM_S + TRY_S + OVERHEAD_S)


def neighbours(names: Sequence[str]) -> list[Pair]:
    """Return pairs that contain every host: a setting belongs to a host, and need not be tried with all others.

    >>> neighbours("ab"), neighbours("abcd")
    ([('a', 'b')], [('a', 'b'), ('b', 'c'), ('c', 'd'), ('d', 'a')])
    """
    ring = list(zip(names, [*names[1:], *names[:1]], strict=True))
    return ring if len(names) > 2 else ring[: len(names) - 1]


class Tuner:
    """Tries settings that may speed up the links between hosts, which are already measured."""

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
        """Return the gains of faster settings, by ordered pair."""
        gains_by_pair: Gains = {}
        for a, b in neighbours(list(self._choices)):
            both = [pair for pair in ((a, b), (b, a)) if pair in self._wires]
            try:
                results = [*self._congestion(both), *(gain for direction in both for gain in self._one_way(direction))]
            except UnreachableError as error:
                told(f"{a} and {b}: {error.finding.evidence}")
                continue
            for direction, gain in results:
                gains_by_pair.setdefault(direction, []).append(gain)
                told(gain.evidence)
        return gains_by_pair

    def _one_way(self, way: Pair) -> list[tuple[Pair, Gain]]:
        wire = self._wires[way]
        if not wire.link.goodput_Bps:
            return []  # a link that stalls half of the time: fix that before any setting
        results = [self._window(wire, gains.RECEIVE), self._window(wire, gains.SEND), self._idle(wire)]
        return [(way, gain) for gain in results if gain is not None]

    # --- link.congestion

    def _congestion(self, ways: Sequence[Pair]) -> list[tuple[Pair, Gain]]:
        """Try congestion controls in both directions at once, as a ring all-reduce uses a link."""
        ways = [pair for pair in ways if gains.CONGESTION in self._facts[pair[0]].sysctls]
        current = {pair: self._facts[pair[0]].sysctls[gains.CONGESTION] for pair in ways}
        improvable = [
            pair for pair in ways if gains.has_room(self._wires[pair].link.bandwidth_Bps, self._speed_Bps(pair))
        ]
        allowed = {
            pair: [control for control in self._controls(pair[0]) if control != current[pair]] for pair in improvable
        }
        options = [control for control in TRIED if any(control in names for names in allowed.values())]
        if not options:
            return []

        def go(option: str | None) -> dict[Pair, float]:
            with ThreadPoolExecutor(max_workers=len(ways)) as pool:
                return dict(zip(ways, pool.map(lambda pair: self._try(pair, allowed, option), ways), strict=True))

        figures = in_turn(go, [None, *options])
        results = []
        for pair in allowed:
            was_Bps = figures[pair][None]
            faster = [control for control in allowed[pair] if gains.ahead(was_Bps, figures[pair][control])]
            if faster:
                best = max(faster, key=lambda control: median(figures[pair][control]) or 0.0)
                template = (
                    f"in both directions at once, {pair[0]} sends {pair[1]} {{was}} with {current[pair]}, "
                    f"{{better}} with {best}"
                )
                results.append((pair, _gain("link.congestion", pair[0], gains.CONGESTION, current[pair], best,
                                         was_Bps, figures[pair][best], template)))  # fmt: skip
        return results

    def _controls(self, host: str) -> list[str]:
        available = [control for control in TRIED if control in self._choices[host].congestion]
        return [control for control in available if control != "reno" or "cubic" not in available]

    def _try(self, way: Pair, allowed: Mapping[Pair, Sequence[str]], option: str | None) -> float:
        chosen = option if option in allowed.get(way, ()) else None
        return self._flows[way].pour(1, TRY_S, warm_s=TRY_WARM_S, congestion=chosen).mean_Bps

    def _speed_Bps(self, way: Pair) -> float | None:
        """Return the speed of the slower of the two NICs; None if one does not report it."""
        speeds = []
        for name in way:
            nic = self._facts[name].interface(self._ways[name].interface)
            if nic is None or not nic.is_physical or not nic.speed_Mbit:
                return None
            speeds.append(nic.speed_Mbit * 125e3)
        return min(speeds)

    # --- link.window

    def _window(self, wire: Wire, setting: str) -> Gain | None:
        """Return the gain of larger buffers; None unless the window limits one stream and larger buffers are faster."""
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
        waiting = "" if limited is None else f", and for {limited:.0%} of the time {wire.source} waits for room there"
        limit = (
            f"{host}'s {setting.rpartition('.')[2]} ends at {size(buffer_bytes)}, at most {link_rate(allowed_Bps)} in "
            f"round trips of {seconds(rtt_s)}{waiting}: {wire.source} sends {wire.target} {{was}}"
        )
        largest = self._choices[host].receive_bytes if receives else self._choices[host].send_bytes
        if largest >= LARGER * buffer_bytes:
            was, better = self._larger((wire.source, wire.target), largest, receives)
            template = f"{limit}, {{better}} with a buffer of {size(largest)}"
            is_worth = gains.ahead(was, better)
        else:  # no socket may have a larger one, but several streams have several windows
            was, better = [goodput_Bps], [wire.link.parallel_Bps or 0.0]
            template = f"{limit} by one stream, {{better}} by {STREAMS}"
            is_worth = better[0] >= STREAMS_WORTH * was[0] and allowed_Bps < NEAR * was[0]
        if not is_worth:
            return None
        wider_buffers = gains.wider(setting, triple, median(better) or goodput_Bps, rtt_s)
        return _gain("link.window", host, setting, triple, wider_buffers, was, better, template)

    def _larger(self, way: Pair, buffer_bytes: int, receives: bool) -> tuple[list[float], list[float]]:
        """Measure one direction with the buffers that the kernel chooses, and with a larger one at one end."""

        def go(option: str | None) -> dict[Pair, float]:
            requested_bytes = buffer_bytes // 2 if option else None  # the kernel doubles the size requested
            measurement = self._flows[way].pour(
                1, TRY_S, warm_s=TRY_WARM_S,
                receive_bytes=requested_bytes if receives else None, send_bytes=None if receives else requested_bytes,
            )  # fmt: skip
            return {way: measurement.mean_Bps}

        figures = in_turn(go, [None, "larger"])[way]
        return figures[None], figures["larger"]

    # --- link.idle

    def _idle(self, wire: Wire) -> Gain | None:
        """Return the gain of keeping the window while idle; None unless bursts after idling are slower without."""
        burst = int(min(BURST_MAX, max(BURST_MIN, BURST_S * wire.link.goodput_Bps)))
        lost_s = gains.slow_start_s(wire.link.goodput_Bps, wire.link.rtt_s, burst)
        is_worth_trying = lost_s > (gains.WORTH - 1) * burst / wire.link.goodput_Bps
        if not is_worth_trying or wire.congestion == "bbr" or self._facts[wire.source].sysctls.get(gains.IDLE) != "1":
            return None  # BBR keeps its pace
        pauses_s = (max(SILENT_S, 4 * wire.link.rtt_s), SHORT_S)
        after_idle, after_short = self._flows[wire.source, wire.target].bursts(burst, pauses_s, BURSTS)
        idle_window, short_window = (
            median([one.window for one in bursts if one.window is not None]) for bursts in (after_idle, after_short)
        )
        was, better = ([burst / one.took_s for one in bursts] for bursts in (after_idle, after_short))
        if (
            idle_window is None
            or short_window is None
            or idle_window > FELL * short_window
            or not gains.ahead(was, better)
        ):
            return None
        template = (
            f"{size(burst)} that {wire.source} sends {wire.target} after {seconds(pauses_s[0])} idle start with a "
            f"window of {idle_window:.0f} segments and reach {{was}}; after {seconds(SHORT_S)}, with one of "
            f"{short_window:.0f}, {{better}}"
        )
        return _gain("link.idle", wire.source, gains.IDLE, "1", "0", was, better, template)


def in_turn(
    go: Callable[[str | None], Mapping[Pair, float]], options: Sequence[str | None]
) -> dict[Pair, dict[str | None, list[float]]]:
    """Interleave trials, A B A B …, and return the figures of each option for each direction.

    The first option is the current setting. If no other is faster after the first rounds, no more follow.
    """
    figures: dict[Pair, dict[str | None, list[float]]] = {}

    def rounds(number: int) -> None:
        for _ in range(number):
            for option in options:
                for direction, figure in go(option).items():
                    figures.setdefault(direction, {}).setdefault(option, []).append(figure)

    rounds(FIRST_ROUNDS)
    if any(
        gains.ahead(by_option[options[0]], by_option[other]) for by_option in figures.values() for other in options[1:]
    ):
        rounds(MORE_ROUNDS)
    return figures


def _gain(check: str, host: str, setting: str, was: str, better: str, was_Bps: Sequence[float],
          better_Bps: Sequence[float], words: str) -> Gain:  # fmt: skip
    first, second = median(was_Bps) or 0.0, median(better_Bps) or 0.0
    spread = f" (medians of {len(was_Bps)}, in turn)" if len(was_Bps) > 1 else ""
    evidence = words.format(was=link_rate(first), better=link_rate(second)) + spread
    return Gain(check=check, host=host, setting=setting, was=was, better=better, was_Bps=first, better_Bps=second,
                evidence=evidence)  # fmt: skip
