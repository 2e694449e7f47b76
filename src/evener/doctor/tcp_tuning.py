"""Tune TCP: try settings on the links themselves, interleaved with the current ones, and report those that are faster.

    link.congestion   another congestion control, while the other direction sends as much
    link.window       larger buffers at one end, in one direction; if a socket may not have them, several streams
    link.idle         a burst after an idle pause against a burst after a short one

No setting of a host is changed: a socket may choose its congestion control and its buffers for itself, and a short
pause has the effect of the setting. Settings that cannot help, by arithmetic, are not tried: on most home networks only
the congestion control is, and not even that on a NIC that already reaches its nominal speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.units import format_bit_rate, format_bytes, format_seconds, median
from evener.core.cluster.fleet_file import TuningGain
from evener.doctor import tcp_settings
from evener.doctor.facts import HostFacts
from evener.doctor.interfaces import SocketInterface
from evener.doctor.link_probe import NUM_STREAMS, OVERHEAD_S, LinkProbeResult, TcpFlow, UnreachableError
from evener.ssh.session import Session

# reno only where cubic is not available: on short round trips they are alike
CONGESTION_CONTROLS = ("bbr", "cubic", "reno")
TRIAL_S, TRIAL_WARMUP_S = 0.5, 0.3
INITIAL_ROUNDS, CONFIRMATION_ROUNDS = 2, 3  # more only if an option is faster in the first
MAX_WINDOW_HEADROOM = 4.0  # a window that allows so many times the measured goodput is not the limit
MIN_BUFFER_GROWTH = 1.5  # times the buffer: a smaller increase would not show
MIN_WINDOW_LIMITED_SHARE = 0.25  # of the time, the kernel must have waited for the receiver's window
MIN_STREAMS_SPEEDUP = 1.2  # speedup by several streams, if a larger buffer cannot be tried
BURST_S, MIN_BURST_BYTES, MAX_BURST_BYTES = 0.1, 1_000_000, 10_000_000
SHORT_PAUSE_S, IDLE_PAUSE_S, NUM_BURSTS = 0.05, 1.0, 5  # while idle, Linux halves the window about every 0.2 s
MAX_IDLE_WINDOW_SHARE = 0.5  # share of its window with which TCP restarts after idling

HostPair = tuple[str, str]
GainsByPair = dict[HostPair, list[TuningGain]]


class SocketTcpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The TCP options that a socket of a host may set for itself."""

    congestion: list[str]
    receive_bytes: int
    send_bytes: int


def estimate_duration_s(num_hosts: int) -> float:
    """Return the approximate duration of `tune` if no setting is better.

    >>> round(estimate_duration_s(2))
    4
    """
    return (
        len(ring_pairs([str(i) for i in range(num_hosts)]))
        * INITIAL_ROUNDS
        * 2
        * (TRIAL_WARMUP_S + TRIAL_S + OVERHEAD_S)
    )


def ring_pairs(names: Sequence[str]) -> list[HostPair]:
    """Return the neighbours in a ring of all hosts: a setting belongs to a host and needs no trial with every peer.

    >>> ring_pairs("ab"), ring_pairs("abcd")
    ([('a', 'b')], [('a', 'b'), ('b', 'c'), ('c', 'd'), ('d', 'a')])
    """
    ring = list(zip(names, [*names[1:], *names[:1]], strict=True))
    return ring if len(names) > 2 else ring[: len(names) - 1]


class TcpTuner:
    """Tries settings that may speed up the links between hosts, which are already measured."""

    def __init__(
        self,
        sessions: Mapping[str, Session],
        interfaces: Mapping[str, SocketInterface],
        facts: Mapping[str, HostFacts],
        measurements: Sequence[LinkProbeResult],
    ) -> None:
        self._facts, self._interfaces = facts, interfaces
        self._measurements = {(wire.source, wire.target): wire for wire in measurements}
        addresses = {name: interface.address for name, interface in interfaces.items()}
        self._flows = {pair: TcpFlow(sessions, addresses, *pair) for pair in self._measurements}
        self._options = {name: from_builtins(sessions[name].call("link_probe", "socket_tcp_options"), SocketTcpOptions)
                         for name in dict.fromkeys(name for pair in self._measurements for name in pair)}  # fmt: skip

    def tune(self, notify: Callable[[str], None] = lambda text: None) -> GainsByPair:
        """Return the gains of faster settings, by ordered pair."""
        gains_by_pair: GainsByPair = {}
        for a, b in ring_pairs(list(self._options)):
            both = [pair for pair in ((a, b), (b, a)) if pair in self._measurements]
            try:
                results = [
                    *self._try_congestion_controls(both),
                    *(gain for direction in both for gain in self._tune_direction(direction)),
                ]
            except UnreachableError as error:
                notify(f"{a} and {b}: {error.finding.evidence}")
                continue
            for direction, gain in results:
                gains_by_pair.setdefault(direction, []).append(gain)
                notify(gain.evidence)
        return gains_by_pair

    def _tune_direction(self, direction: HostPair) -> list[tuple[HostPair, TuningGain]]:
        wire = self._measurements[direction]
        if not wire.link.goodput_Bps:
            return []  # a link that stalls half of the time: fix that before any setting
        results = [
            self._try_larger_window(wire, tcp_settings.TCP_RMEM_SYSCTL),
            self._try_larger_window(wire, tcp_settings.TCP_WMEM_SYSCTL),
            self._try_idle_restart(wire),
        ]
        return [(direction, gain) for gain in results if gain is not None]

    # --- link.congestion

    def _try_congestion_controls(self, directions: Sequence[HostPair]) -> list[tuple[HostPair, TuningGain]]:
        """Try congestion controls in both directions at once, as a ring all-reduce uses a link."""
        directions = [
            pair for pair in directions if tcp_settings.CONGESTION_CONTROL_SYSCTL in self._facts[pair[0]].sysctls
        ]
        current = {pair: self._facts[pair[0]].sysctls[tcp_settings.CONGESTION_CONTROL_SYSCTL] for pair in directions}
        improvable = [
            pair
            for pair in directions
            if tcp_settings.has_headroom(self._measurements[pair].link.bandwidth_Bps, self._nic_speed_Bps(pair))
        ]
        allowed = {
            pair: [control for control in self._candidate_controls(pair[0]) if control != current[pair]]
            for pair in improvable
        }
        options = [control for control in CONGESTION_CONTROLS if any(control in names for names in allowed.values())]
        if not options:
            return []

        def go(option: str | None) -> dict[HostPair, float]:
            with ThreadPoolExecutor(max_workers=len(directions)) as pool:
                return dict(
                    zip(
                        directions,
                        pool.map(lambda pair: self._measure_with(pair, allowed, option), directions),
                        strict=True,
                    )
                )

        figures = interleave_trials(go, [None, *options])
        results = []
        for pair in allowed:
            was_Bps = figures[pair][None]
            faster = [
                control for control in allowed[pair] if tcp_settings.is_clearly_faster(was_Bps, figures[pair][control])
            ]
            if faster:
                best = max(faster, key=lambda control: median(figures[pair][control]) or 0.0)
                template = (
                    f"in both directions at once, {pair[0]} sends {pair[1]} {{was}} with {current[pair]}, "
                    f"{{better}} with {best}"
                )
                results.append(
                    (
                        pair,
                        _make_gain(
                            "link.congestion",
                            pair[0],
                            tcp_settings.CONGESTION_CONTROL_SYSCTL,
                            current[pair],
                            best,
                            was_Bps,
                            figures[pair][best],
                            template,
                        ),
                    )
                )
        return results

    def _candidate_controls(self, host: str) -> list[str]:
        available = [control for control in CONGESTION_CONTROLS if control in self._options[host].congestion]
        return [control for control in available if control != "reno" or "cubic" not in available]

    def _measure_with(
        self, direction: HostPair, allowed: Mapping[HostPair, Sequence[str]], option: str | None
    ) -> float:
        chosen = option if option in allowed.get(direction, ()) else None
        return self._flows[direction].measure_goodput(1, TRIAL_S, warm_s=TRIAL_WARMUP_S, congestion=chosen).mean_Bps

    def _nic_speed_Bps(self, direction: HostPair) -> float | None:
        """Return the speed of the slower of the two NICs; None if one does not report it."""
        speeds = []
        for name in direction:
            nic = self._facts[name].find_interface(self._interfaces[name].interface)
            if nic is None or not nic.is_physical or not nic.speed_Mbit:
                return None
            speeds.append(nic.speed_Mbit * 125e3)
        return min(speeds)

    # --- link.window

    def _try_larger_window(self, wire: LinkProbeResult, setting: str) -> TuningGain | None:
        """Return the gain of larger buffers; None unless the window limits one stream and larger buffers are faster."""
        receives = setting == tcp_settings.TCP_RMEM_SYSCTL
        host = wire.target if receives else wire.source
        triple = self._facts[host].sysctls.get(setting, "")
        buffer_bytes = tcp_settings.parse_max_buffer_bytes(triple)
        if buffer_bytes is None:
            return None
        goodput_Bps, rtt_s = wire.link.goodput_Bps, wire.link.rtt_s
        allowed_Bps = tcp_settings.window_limit_Bps(setting, buffer_bytes, rtt_s)
        limited = wire.window_limited if receives else None
        if allowed_Bps > MAX_WINDOW_HEADROOM * goodput_Bps if limited is None else limited < MIN_WINDOW_LIMITED_SHARE:
            return None
        waiting = "" if limited is None else f", and for {limited:.0%} of the time {wire.source} waits for room there"
        limit = (
            f"{host}'s {setting.rpartition('.')[2]} ends at {format_bytes(buffer_bytes)}, at most "
            f"{format_bit_rate(allowed_Bps)} in "
            f"round trips of {format_seconds(rtt_s)}{waiting}: {wire.source} sends {wire.target} {{was}}"
        )
        largest = self._options[host].receive_bytes if receives else self._options[host].send_bytes
        if largest >= MIN_BUFFER_GROWTH * buffer_bytes:
            was, better = self._measure_larger_buffer((wire.source, wire.target), largest, receives)
            template = f"{limit}, {{better}} with a buffer of {format_bytes(largest)}"
            is_worth = tcp_settings.is_clearly_faster(was, better)
        else:  # no socket may have a larger one, but several streams have several windows
            was, better = [goodput_Bps], [wire.link.parallel_Bps or 0.0]
            template = f"{limit} by one stream, {{better}} by {NUM_STREAMS}"
            is_worth = better[0] >= MIN_STREAMS_SPEEDUP * was[0] and allowed_Bps < MAX_WINDOW_HEADROOM * was[0]
        if not is_worth:
            return None
        wider_buffers = tcp_settings.widen_buffers(setting, triple, median(better) or goodput_Bps, rtt_s)
        return _make_gain("link.window", host, setting, triple, wider_buffers, was, better, template)

    def _measure_larger_buffer(
        self, direction: HostPair, buffer_bytes: int, receives: bool
    ) -> tuple[list[float], list[float]]:
        """Measure one direction with the buffers that the kernel chooses, and with a larger one at one end."""

        def go(option: str | None) -> dict[HostPair, float]:
            requested_bytes = buffer_bytes // 2 if option else None  # the kernel doubles the size requested
            measurement = self._flows[direction].measure_goodput(
                1, TRIAL_S, warm_s=TRIAL_WARMUP_S,
                receive_bytes=requested_bytes if receives else None, send_bytes=None if receives else requested_bytes,
            )  # fmt: skip
            return {direction: measurement.mean_Bps}

        figures = interleave_trials(go, [None, "larger"])[direction]
        return figures[None], figures["larger"]

    # --- link.idle

    def _try_idle_restart(self, wire: LinkProbeResult) -> TuningGain | None:
        """Return the gain of keeping the window while idle; None unless bursts after a pause are slower."""
        burst = int(min(MAX_BURST_BYTES, max(MIN_BURST_BYTES, BURST_S * wire.link.goodput_Bps)))
        lost_s = tcp_settings.slow_start_s(wire.link.goodput_Bps, wire.link.rtt_s, burst)
        is_worth_trying = lost_s > (tcp_settings.MIN_SPEEDUP - 1) * burst / wire.link.goodput_Bps
        if (
            not is_worth_trying
            or wire.congestion == "bbr"
            or self._facts[wire.source].sysctls.get(tcp_settings.SLOW_START_AFTER_IDLE_SYSCTL) != "1"
        ):
            return None  # BBR keeps its pace
        pauses_s = (max(IDLE_PAUSE_S, 4 * wire.link.rtt_s), SHORT_PAUSE_S)
        after_idle, after_short = self._flows[wire.source, wire.target].measure_bursts(burst, pauses_s, NUM_BURSTS)
        idle_window, short_window = (
            median([one.window for one in bursts if one.window is not None]) for bursts in (after_idle, after_short)
        )
        was, better = ([burst / one.took_s for one in bursts] for bursts in (after_idle, after_short))
        if (
            idle_window is None
            or short_window is None
            or idle_window > MAX_IDLE_WINDOW_SHARE * short_window
            or not tcp_settings.is_clearly_faster(was, better)
        ):
            return None
        template = (
            f"{format_bytes(burst)} that {wire.source} sends {wire.target} after {format_seconds(pauses_s[0])} "
            f"idle start with a "
            f"window of {idle_window:.0f} segments and reach {{was}}; after {format_seconds(SHORT_PAUSE_S)}, "
            f"with one of "
            f"{short_window:.0f}, {{better}}"
        )
        return _make_gain(
            "link.idle", wire.source, tcp_settings.SLOW_START_AFTER_IDLE_SYSCTL, "1", "0", was, better, template
        )


def interleave_trials(
    go: Callable[[str | None], Mapping[HostPair, float]], options: Sequence[str | None]
) -> dict[HostPair, dict[str | None, list[float]]]:
    """Interleave trials, A B A B …, and return the figures of each option for each direction.

    The first option is the current setting. If no other is faster after the first rounds, no more follow.
    """
    figures: dict[HostPair, dict[str | None, list[float]]] = {}

    def rounds(number: int) -> None:
        for _ in range(number):
            for option in options:
                for direction, figure in go(option).items():
                    figures.setdefault(direction, {}).setdefault(option, []).append(figure)

    rounds(INITIAL_ROUNDS)
    if any(
        tcp_settings.is_clearly_faster(by_option[options[0]], by_option[other])
        for by_option in figures.values()
        for other in options[1:]
    ):
        rounds(CONFIRMATION_ROUNDS)
    return figures


def _make_gain(check: str, host: str, setting: str, was: str, better: str, was_Bps: Sequence[float],
          better_Bps: Sequence[float], template: str) -> TuningGain:  # fmt: skip
    first, second = median(was_Bps) or 0.0, median(better_Bps) or 0.0
    spread = f" (medians of {len(was_Bps)}, in turn)" if len(was_Bps) > 1 else ""
    evidence = template.format(was=format_bit_rate(first), better=format_bit_rate(second)) + spread
    return TuningGain(check=check, host=host, setting=setting, was=was, better=better, was_Bps=first, better_Bps=second,
                evidence=evidence)  # fmt: skip
