"""How fast is a link that a person describes? "1GbE", "8x400Gbit", "1Gbit,5ms", "wifi:200Mbit", "nvlink".

α  seconds of a small message, one way    β  bytes of payload a second
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from evener.core.errors import UsageError, did_you_mean

Positive = Annotated[float, Meta(gt=0)]
ETHERNET_SHARE = (
    0.85  # of the line rate reaches a collective: *assumption*, the rule that home labs use; measured links
)
# in Linux reach 0.95, so what it predicts is rather too slow
WIRED_S, DATACENTRE_S = 50e-6, 10e-6  # α with the sockets of both ends: *assumptions*
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
MOST_BPS, LONGEST_S = 1e15, 60.0  # more is a slip of the pen
LINE_RATE = re.compile(r"(?:(\d{1,3})\s*x\s*)?(\d+(?:\.\d+)?)\s*([kmgt])(bits?/s|bits?|bps|be)?", re.IGNORECASE)
BIT_RATE = re.compile(r"(?:(\d{1,3})\s*x\s*)?(\d+(?:\.\d+)?)\s*([kMGT])(b/s)")
PAYLOAD_RATE = re.compile(r"(?:(\d{1,3})\s*x\s*)?(\d+(?:\.\d+)?)\s*([kMGT])(Bps|B/s)")
BITS_OR_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(b|b/s)", re.IGNORECASE)
LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)")


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two ranks; all of a medium where its ends share it."""

    latency_s: float  # α: a small message, one way, with what the backend does for it
    bandwidth_Bps: Positive  # β: payload, while as much comes back; of a shared medium what it carries in all
    is_shared: bool = False  # with all other such wires, both ways: Wi-Fi's air


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link as it is sold, and what a collective gets of it."""

    name: str
    wire: Wire
    assumed: str  # a sentence


def _named(name: str, bandwidth_Bps: float, latency_s: float, why: str) -> Link:
    return Link(name=name, wire=Wire(latency_s=latency_s, bandwidth_Bps=bandwidth_Bps), assumed=why)


def _wifi(rate_Bps: float, latency_s: float) -> Link:
    """One half-duplex air for all hosts on it. From host to host everything crosses it twice: to the access point, and
    from there.
    """
    rate = f"{rate_Bps * 8 / 1e6:g} Mbit/s"
    why = f"Wi-Fi: {rate} to one host at a time, half of that from host to host, shared by all, and {_ms(latency_s)}"
    wire = Wire(latency_s=latency_s, bandwidth_Bps=rate_Bps / 2, is_shared=True)
    return Link(name="wifi", wire=wire, assumed=f"{why} one way are assumed")


def _wan(rate_Bps: float, latency_s: float) -> Link:
    why = f"WAN: {rate_Bps * 8 / 1e6:g} Mbit/s in each direction and {_ms(latency_s)} one way are assumed"
    return _named("wan", rate_Bps, latency_s, why)


def _ms(latency_s: float) -> str:
    return f"{latency_s * 1e3:g} ms" if latency_s >= 1e-3 else f"{latency_s * 1e6:g} µs"


# What makes a link of a rate and a latency, and both where nobody says them: *assumptions*
MEDIA = {"wifi": (_wifi, 300e6 / 8, 2e-3), "wan": (_wan, 100e6 / 8, 20e-3)}
NAMED = {
    "wifi": _wifi(*MEDIA["wifi"][1:]),
    "wan": _wan(*MEDIA["wan"][1:]),
    "nvlink": _named("nvlink", 450e9, 3e-6, "NVLink: 450 GB/s in each direction and 3 µs are assumed (H100, H200)"),
    "pcie": _named("pcie", 20e9, 5e-6, "PCIe: 20 GB/s in each direction and 5 µs are assumed (4.0 ×16)"),
}
FABRICS = ("wan", "wifi", "1GbE", "2.5GbE", "10GbE", "25GbE", "100GbE", "400GbE")


def parse_link(text: str) -> Link:
    """The link that a person means; UsageError where nobody could know.

    In bits it is a line's rate, of which 85 % are taken for payload; in bytes it is what was measured. `8x400Gbit` are
    eight adapters of a host. What follows a comma is a round trip, as ping tells it. Of Wi-Fi the rate is what one host
    gets of it, as a download shows it.

    >>> parse_link("1GbE").wire.bandwidth_Bps, parse_link("2.5 Gbit/s").wire.bandwidth_Bps
    (106250000.0, 265625000.0)
    >>> parse_link("400G").wire.latency_s, parse_link("3.19 GB/s").wire.bandwidth_Bps
    (1e-05, 3190000000.0)
    >>> parse_link("1Gbit,5ms").wire.latency_s, parse_link("wifi:200Mbit").wire
    (0.0025, Wire(latency_s=0.002, bandwidth_Bps=12500000.0, is_shared=True))
    """
    name, comma, rtt = (part.strip() for part in text.partition(","))
    medium, colon, rate = (part.strip() for part in name.partition(":"))
    latency_s = _latency_s(text, rtt) if comma else None
    known = medium.lower().replace("-", "")
    if known in MEDIA:
        make, usual_Bps, usual_s = MEDIA[known]
        return make(_rate(text, rate)[0] if colon else usual_Bps, usual_s if latency_s is None else latency_s)
    if colon:
        raise _unknown(text, medium)
    if known in NAMED:
        found = NAMED[known]
    else:
        rate_Bps, is_payload = _rate(text, name)
        rate_Bps *= 1 if is_payload else ETHERNET_SHARE
        usual_s = DATACENTRE_S if rate_Bps >= 10e9 else WIRED_S
        share = "its rate" if is_payload else f"{ETHERNET_SHARE:.0%} of the line rate"
        alpha_s = usual_s if latency_s is None else latency_s
        found = _named(name, rate_Bps, alpha_s, f"{name}: {share} and {_ms(alpha_s)} one way are assumed")
    if latency_s is None:
        return found
    return msgspec.structs.replace(found, wire=msgspec.structs.replace(found.wire, latency_s=latency_s))


def _latency_s(text: str, rtt: str) -> float:
    """One way, of a round trip."""
    matched = LATENCY.fullmatch(rtt)
    rtt_s = float(matched[1]) * TIMES[matched[2]] if matched else -1.0
    if not 0 <= rtt_s <= LONGEST_S:
        raise UsageError(f"link {text}: after the comma stands a round trip", hint="as ping tells it: 1Gbit,5ms")
    return rtt_s / 2


def _rate(text: str, rate: str) -> tuple[float, bool]:
    """(bytes a second, is it payload and not a line's rate?)"""
    payload = PAYLOAD_RATE.fullmatch(rate)
    matched = payload or BIT_RATE.fullmatch(rate) or LINE_RATE.fullmatch(rate)
    if matched is None:
        if unclear := BITS_OR_BYTES.fullmatch(rate):
            number, prefix = unclear[1], unclear[2].upper()
            raise UsageError(f"link {text}: bits or bytes?", hint=f"{number}{prefix}bit or {number}{prefix}B/s")
        raise _unknown(text, rate)
    rate_Bps = int(matched[1] or 1) * float(matched[2]) * UNITS[matched[3].lower()] / (1 if payload else 8)
    if rate_Bps < 1:
        raise UsageError(f"link {text}: it has no bandwidth", hint="for example 1GbE")
    if rate_Bps > MOST_BPS:
        raise UsageError(f"link {text}: no link is that fast", hint="for example 400GbE")
    return rate_Bps, payload is not None


def _unknown(text: str, name: str) -> UsageError:
    known = sorted({"100Mbit", "3.19GB/s", "8x400Gbit", "1Gbit,5ms", "wifi:200Mbit", *FABRICS, *NAMED})
    close = "" if name[:1] in "-0123456789" else did_you_mean(name, known)
    hint = close or f"for example {', '.join(known)}"
    return UsageError(f"link {text}: expected a rate with its unit, or a name", hint=hint)
