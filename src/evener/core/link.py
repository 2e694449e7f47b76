"""How fast is a link that is known by its name? "1GbE", "2.5 Gbit", "400G", "wifi", "nvlink"."""

from __future__ import annotations

import re

import msgspec

from evener.core.errors import UsageError, did_you_mean
from evener.core.prediction import Wire

ETHERNET_SHARE = (
    0.85  # of the line rate reaches a collective: *assumption*, the rule that home labs use; measured links
)
# in Linux reach 0.95, so what it predicts is rather too slow
WIRED_S, DATACENTRE_S = 50e-6, 10e-6  # one way, with the sockets of both ends: *assumptions*
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
LINE_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(bits?/s|bits?|bps|be|b?)", re.IGNORECASE)
PAYLOAD_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT])B(ps|/s)?")


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link as it is sold, and what a collective gets of it."""

    name: str
    wire: Wire
    assumed: str  # a sentence


def _named(name: str, bandwidth_Bps: float, latency_s: float, why: str) -> Link:
    return Link(name=name, wire=Wire(latency_s=latency_s, bandwidth_Bps=bandwidth_Bps), assumed=why)


NAMED = {
    "wifi": _named("wifi", 300e6 / 8, 2e-3, "Wi-Fi: 300 Mbit/s in each direction and 2 ms are assumed"),
    "wan": _named("wan", 100e6 / 8, 20e-3, "WAN: 100 Mbit/s in each direction and 20 ms one way are assumed"),
    "nvlink": _named("nvlink", 450e9, 3e-6, "NVLink: 450 GB/s in each direction and 3 µs are assumed (H100, H200)"),
    "pcie": _named("pcie", 20e9, 5e-6, "PCIe: 20 GB/s in each direction and 5 µs are assumed (4.0 ×16)"),
}
FABRICS = ("wan", "wifi", "1GbE", "2.5GbE", "10GbE", "25GbE", "100GbE", "400GbE")


def parse_link(text: str) -> Link:
    """The link that a person means; UsageError where nobody could know.

    In bits it is a line's rate, of which 85 % are taken for payload; in bytes it is what was measured.

    >>> parse_link("1GbE").wire.bandwidth_Bps, parse_link("2.5 Gbit/s").wire.bandwidth_Bps
    (106250000.0, 265625000.0)
    >>> parse_link("400G").wire.latency_s, parse_link("3.19 GB/s").wire.bandwidth_Bps
    (1e-05, 3190000000.0)
    """
    name = text.strip()
    if name.lower().replace("-", "") in NAMED:
        return NAMED[name.lower().replace("-", "")]
    payload, line = PAYLOAD_RATE.fullmatch(name), LINE_RATE.fullmatch(name)
    matched = payload or line
    if not matched:
        known = sorted({"100Mbit", "3.19GB/s", *FABRICS, *NAMED})
        close = "" if name[:1] in "-0123456789" else did_you_mean(name, known)
        raise UsageError(
            f"link {text}: expected a rate with its unit, or a name", hint=close or f"for example {', '.join(known)}"
        )
    rate = float(matched[1]) * UNITS[matched[2].lower()]
    if rate <= 0:
        raise UsageError(f"link {text}: it has no bandwidth", hint="for example 1GbE")
    rate_Bps = rate if payload else ETHERNET_SHARE * rate / 8
    latency_s = DATACENTRE_S if rate_Bps >= 10e9 else WIRED_S
    share = "" if payload else f"{ETHERNET_SHARE:.0%} of the line rate and "
    why = f"{name}: {share}{latency_s * 1e6:.0f} µs one way are assumed"
    return _named(name, rate_Bps, latency_s, why)
