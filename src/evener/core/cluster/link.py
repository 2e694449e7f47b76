"""The alpha-beta link model, and parsing of link names: "1GbE", "8x400Gbit", "1Gbit,5ms", "wifi:200Mbit", "nvlink".

α  one-way latency of a small message, seconds    β  payload bandwidth, bytes per second
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from evener.core.base.errors import UsageError, did_you_mean

Positive = Annotated[float, Meta(gt=0)]
# share of the line rate that a collective gets: *assumption*, the rule of thumb in home labs
ETHERNET_EFFICIENCY = 0.85
# Measured links in Linux reach 0.95, so predictions are rather too slow.
WIRED_LATENCY_S, DATACENTRE_LATENCY_S = 50e-6, 10e-6  # α including the sockets of both ends: *assumptions*
SI_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
TIME_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
MAX_BANDWIDTH_BPS, MAX_RTT_S = 1e15, 60.0  # larger values are typing errors
LINE_RATE = re.compile(r"(?:(\d{1,3})\s*x\s*)?(\d+(?:\.\d+)?)\s*([kmgt])(bits?/s|bits?|bps|be)?", re.IGNORECASE)
BIT_RATE = re.compile(r"(?:(\d{1,3})\s*x\s*)?(\d+(?:\.\d+)?)\s*([kMGT])(b/s)")
PAYLOAD_RATE = re.compile(r"(?:(\d{1,3})\s*x\s*)?(\d+(?:\.\d+)?)\s*([kMGT])(Bps|B/s)")
BITS_OR_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(b|b/s)", re.IGNORECASE)
LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)")


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """Alpha-beta model of one direction between two ranks, or of a whole medium that is shared."""

    latency_s: float  # α: a small message, one way, including the backend's overhead
    bandwidth_Bps: Positive  # β: payload, with equal traffic in the other direction; of a shared medium its total
    is_shared: bool = False  # half duplex and shared with all such links, as Wi-Fi is


class LinkSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A link by its commercial name, and its model for a collective."""

    name: str
    wire: LinkModel
    assumption: str  # the assumption, one sentence


def _named(name: str, bandwidth_Bps: float, latency_s: float, why: str) -> LinkSpec:
    return LinkSpec(name=name, wire=LinkModel(latency_s=latency_s, bandwidth_Bps=bandwidth_Bps), assumption=why)


def _wifi(rate_Bps: float, latency_s: float) -> LinkSpec:
    """Return a half-duplex medium shared by its hosts; traffic between two crosses it twice, via the access point."""
    rate = f"{rate_Bps * 8 / 1e6:g} Mbit/s"
    why = f"Wi-Fi: {rate} to one host at a time, half of that from host to host, shared by all, and {_ms(latency_s)}"
    wire = LinkModel(latency_s=latency_s, bandwidth_Bps=rate_Bps / 2, is_shared=True)
    return LinkSpec(name="wifi", wire=wire, assumption=f"{why} one way are assumed")


def _wan(rate_Bps: float, latency_s: float) -> LinkSpec:
    why = f"WAN: {rate_Bps * 8 / 1e6:g} Mbit/s in each direction and {_ms(latency_s)} one way are assumed"
    return _named("wan", rate_Bps, latency_s, why)


def _ms(latency_s: float) -> str:
    return f"{latency_s * 1e3:g} ms" if latency_s >= 1e-3 else f"{latency_s * 1e6:g} µs"


# Constructor, default rate and default latency: *assumptions*
MEDIA = {"wifi": (_wifi, 300e6 / 8, 2e-3), "wan": (_wan, 100e6 / 8, 20e-3)}
NAMED_LINKS = {
    "wifi": _wifi(*MEDIA["wifi"][1:]),
    "wan": _wan(*MEDIA["wan"][1:]),
    "nvlink": _named("nvlink", 450e9, 3e-6, "NVLink: 450 GB/s in each direction and 3 µs are assumed (H100, H200)"),
    "pcie": _named("pcie", 20e9, 5e-6, "PCIe: 20 GB/s in each direction and 5 µs are assumed (4.0 ×16)"),
}
FABRICS = ("wan", "wifi", "1GbE", "2.5GbE", "10GbE", "25GbE", "100GbE", "400GbE")


def parse_link(text: str) -> LinkSpec:
    """Parse a link's name or rate. Raise UsageError if it is neither.

    A rate in bits is a line rate, of which 85 % are taken for payload; a rate in bytes is measured payload. `8x400Gbit`
    are eight adapters of a host. After a comma comes the round-trip time, as ping reports it. Wi-Fi's rate is that of a
    download by one host.

    >>> parse_link("1GbE").wire.bandwidth_Bps, parse_link("2.5 Gbit/s").wire.bandwidth_Bps
    (106250000.0, 265625000.0)
    >>> parse_link("400G").wire.latency_s, parse_link("3.19 GB/s").wire.bandwidth_Bps
    (1e-05, 3190000000.0)
    >>> parse_link("1Gbit,5ms").wire.latency_s, parse_link("wifi:200Mbit").wire
    (0.0025, LinkModel(latency_s=0.002, bandwidth_Bps=12500000.0, is_shared=True))
    """
    name, comma, rtt = (part.strip() for part in text.partition(","))
    medium, colon, rate = (part.strip() for part in name.partition(":"))
    latency_s = _latency_s(text, rtt) if comma else None
    key = medium.lower().replace("-", "")
    if key in MEDIA:
        make, default_Bps, default_s = MEDIA[key]
        return make(_rate(text, rate)[0] if colon else default_Bps, default_s if latency_s is None else latency_s)
    if colon:
        raise _unknown_link_error(text, medium)
    if key in NAMED_LINKS:
        link = NAMED_LINKS[key]
    else:
        rate_Bps, is_payload = _rate(text, name)
        rate_Bps *= 1 if is_payload else ETHERNET_EFFICIENCY
        default_s = DATACENTRE_LATENCY_S if rate_Bps >= 10e9 else WIRED_LATENCY_S
        share = "its rate" if is_payload else f"{ETHERNET_EFFICIENCY:.0%} of the line rate"
        alpha_s = default_s if latency_s is None else latency_s
        link = _named(name, rate_Bps, alpha_s, f"{name}: {share} and {_ms(alpha_s)} one way are assumed")
    if latency_s is None:
        return link
    return msgspec.structs.replace(link, wire=msgspec.structs.replace(link.wire, latency_s=latency_s))


def _latency_s(text: str, rtt: str) -> float:
    """Parse a round-trip time and return the one-way latency."""
    matched = LATENCY.fullmatch(rtt)
    rtt_s = float(matched[1]) * TIME_UNITS_S[matched[2]] if matched else -1.0
    if not 0 <= rtt_s <= MAX_RTT_S:
        raise UsageError(f"link {text}: expected a round-trip time after the comma", hint="for example 1Gbit,5ms")
    return rtt_s / 2


def _rate(text: str, rate: str) -> tuple[float, bool]:
    """Parse a rate and return (bytes per second, whether it is payload rather than a line rate)."""
    payload = PAYLOAD_RATE.fullmatch(rate)
    matched = payload or BIT_RATE.fullmatch(rate) or LINE_RATE.fullmatch(rate)
    if matched is None:
        if unclear := BITS_OR_BYTES.fullmatch(rate):
            number, prefix = unclear[1], unclear[2].upper()
            raise UsageError(f"link {text}: bits or bytes?", hint=f"{number}{prefix}bit or {number}{prefix}B/s")
        raise _unknown_link_error(text, rate)
    rate_Bps = int(matched[1] or 1) * float(matched[2]) * SI_PREFIXES[matched[3].lower()] / (1 if payload else 8)
    if rate_Bps < 1:
        raise UsageError(f"link {text}: it has no bandwidth", hint="for example 1GbE")
    if rate_Bps > MAX_BANDWIDTH_BPS:
        raise UsageError(f"link {text}: no link is that fast", hint="for example 400GbE")
    return rate_Bps, payload is not None


def _unknown_link_error(text: str, name: str) -> UsageError:
    known = sorted({"100Mbit", "3.19GB/s", "8x400Gbit", "1Gbit,5ms", "wifi:200Mbit", *FABRICS, *NAMED_LINKS})
    close = "" if name[:1] in "-0123456789" else did_you_mean(name, known)
    hint = close or f"for example {', '.join(known)}"
    return UsageError(f"link {text}: expected a rate with its unit, or a name", hint=hint)
