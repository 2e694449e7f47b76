"""Parse descriptions of links, and derive the bandwidth that a collective gets on them."""

from __future__ import annotations

import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.link import ETHERNET_EFFICIENCY, NAMED_LINKS, parse_link
from evener.plan.cost.collective_cost import build_ring, collective_s
from tests.unit.planner import cluster_of


@pytest.mark.parametrize(
    ("text", "Bps", "latency_s"),
    [
        ("8x400Gbit", 8 * ETHERNET_EFFICIENCY * 50e9, 10e-6),
        ("2 x 25 GbE", 2 * ETHERNET_EFFICIENCY * 3.125e9, 50e-6),
        ("1Gbit,5ms", ETHERNET_EFFICIENCY * 125e6, 2.5e-3),
        ("117MB/s, 400us", 117e6, 200e-6),
        ("1Gb/s", ETHERNET_EFFICIENCY * 125e6, 50e-6),
        ("wan:50Mbit", 6.25e6, 20e-3),
        ("wan,80ms", 12.5e6, 40e-3),
        ("wifi", 300e6 / 8 / 2, 2e-3),
        ("Wi-Fi:200Mbit,6ms", 200e6 / 8 / 2, 3e-3),
    ],
)
def test_link_text_yields_bandwidth_latency_and_sharing(text, Bps, latency_s):
    wire = parse_link(text).wire
    assert wire.bandwidth_Bps == pytest.approx(Bps)
    assert wire.latency_s == pytest.approx(latency_s)
    assert wire.is_shared == text.lower().startswith("wi")


@pytest.mark.parametrize("text", ["1 GB", "1gb", "1gb/s", "10 Gb"])
def test_rate_ambiguous_between_bits_and_bytes_is_refused(text):
    """A factor of 8 lies between them: "1 GB" and "1gb" were taken for two links."""
    with pytest.raises(UsageError, match="bits or bytes") as told:
        parse_link(text)
    assert told.value.hint.split(" or ")[0].endswith("Gbit")


@pytest.mark.parametrize(
    "text",
    ["1GbE,", "1GbE,5", "1GbE,ms", "1GbE,-1ms", "1GbE,1e9s", "1GbE,99999s", "wifi:", "wifi:fast", "nvlink:1GbE",
     "0xGbE", "x400Gbit", "9999x1Gbit", "99999999999Gbit", "1GbE:2GbE", ",5ms", ":1GbE"],
)  # fmt: skip
def test_invalid_link_is_a_one_line_error(text):
    with pytest.raises(UsageError) as told:
        parse_link(text)
    assert "\n" not in str(told.value)


def test_wifi_serializes_traffic_of_all_hosts():
    """n hosts in a ring send 2(n-1)/n · S each, all of it over the air twice: to the access point, and from there."""
    size, air_Bps = 100e6, 200e6 / 8
    for num in (2, 3, 4, 8):
        machines = cluster_of(*[100.0] * num, wire=parse_link("wifi:200Mbit").wire)
        took_s = collective_s("all_reduce", size, build_ring(machines, machines.host_names), "gloo")
        over_the_air = num * 2 * (num - 1) / num * size * 2
        assert took_s == pytest.approx(over_the_air / air_Bps, rel=0.02)


def test_switched_link_time_does_not_depend_on_host_count():
    wire = parse_link("117MB/s").wire
    times = []
    for num in (2, 8):
        machines = cluster_of(*[100.0] * num, wire=wire)
        times.append(collective_s("all_reduce", 100e6, build_ring(machines, machines.host_names), "gloo"))
    assert times[1] / times[0] == pytest.approx((2 * 7 / 8) / (2 * 1 / 2), rel=0.02)


def test_named_links_state_their_assumptions():
    for name in NAMED_LINKS:
        assert "assumed" in parse_link(name).assumption
    assert "2.5 ms one way" in parse_link("1Gbit,5ms").assumption
