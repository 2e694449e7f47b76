"""Find the TCP settings that limit a link by trying others on it; closed forms give the expected rates."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.core.cluster.fleet_file import TuningGain, load_fleet
from evener.doctor import link_probe, tcp_settings, tcp_tuning
from evener.doctor.facts import decode_facts
from evener.doctor.interfaces import SocketInterface
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec
from evener.lab.programs import tunnel
from evener.ssh.session import connect
from tests.tiers import exhaustive

pytestmark = exhaustive

HOLD_S = 0.02  # in each direction
FAR = {"a": "100.64.9.1", "b": "100.64.9.2"}
SMALL = 32768
GOES = 6  # a busy machine may hide a gain, not make one
WINDOW, IDLE = ("link.window", "b"), ("link.idle", "a")


class Far:
    """Two hosts, 40 ms there and back."""

    def __init__(self, lab: EmulatedLab, fleet: Path) -> None:
        self.lab, self.fleet = lab, load_fleet(fleet)

    def set(self, host: str, name: str, value: str) -> None:
        self.lab.host(host).exec(["sysctl", "-w", f"{name}={value}"])

    @contextlib.contextmanager
    def having(self, host: str, name: str, value: str) -> Iterator[None]:
        """A setting, and what it was again, however the test ends."""
        before = self.lab.host(host).exec(["sysctl", "-n", name]).stdout.strip()
        self.set(host, name, value)
        try:
            yield
        finally:
            self.set(host, name, before)

    def measured(self) -> tuple[list[link_probe.LinkProbeResult], list[TuningGain]]:
        """Of the way from a to b."""
        with connect(self.fleet) as (sessions, errors):
            assert not errors
            facts = {name: decode_facts(one.call("facts", "collect")) for name, one in sessions.items()}
            wires = link_probe.measure_links(sessions, FAR, seconds=0.5, iperf3=False).measurements
            ways = {
                name: SocketInterface(
                    interface="far0", address=FAR[name], kind="tunnel", why="", mtu=1280, network=None
                )
                for name in FAR
            }
            found = tcp_tuning.TcpTuner(sessions, ways, facts, [one for one in wires if one.source == "a"]).tune()
        return wires, found.get(("a", "b"), [])

    def found(
        self, *expected: tuple[str, str]
    ) -> tuple[list[link_probe.LinkProbeResult], dict[tuple[str, str], TuningGain]]:
        for _ in range(GOES):
            wires, tried = self.measured()
            known = {(gain.check, gain.host): gain for gain in tried}
            if known.keys() >= set(expected):
                break
        return wires, known


@pytest.fixture(scope="module")
def far(make_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    out = tmp_path_factory.mktemp("far") / "lab.toml"
    lab = make_lab(out, a=HostSpec(rate="100Mbit"), b=HostSpec(rate="100Mbit"))
    programs = []
    for name in FAR:
        peers = {inner: lab.host(other).address for other, inner in FAR.items() if other != name}
        # It is a wire, and goes before what keeps the cores busy, where the system allows it.
        argv = ["nice", "-n", "-20", sys.executable, str(Path(tunnel.__file__)), "far0", FAR[name], json.dumps(peers),
                str(HOLD_S)]  # fmt: skip
        programs.append(lab.host(name).popen(argv, stdin=subprocess.DEVNULL))
    for name, address in FAR.items():
        lab.host(name).exec(["sh", "-c", f"until ip address show dev far0 | grep -q {address}; do sleep 0.05; done"])
    yield Far(lab, out)
    for program in programs:
        program.kill()
        program.wait()
    lab.down()


def test_small_receive_window_on_long_link_is_reported(far: Far) -> None:
    with far.having("b", tcp_settings.TCP_RMEM_SYSCTL, f"4096 16384 {SMALL}"):
        wires, found = far.found(WINDOW)
        there = wires[0]
        assert there.link.rtt_s >= 2 * HOLD_S
        assert there.link.goodput_Bps <= SMALL / (2 * HOLD_S)  # the closed form: window / round trip
        assert there.window_limited is not None  # the kernel's own account
        assert there.window_limited > tcp_tuning.MIN_WINDOW_LIMITED_SHARE
        gain = found[WINDOW]
        assert (gain.setting, gain.was) == (tcp_settings.TCP_RMEM_SYSCTL, f"4096 16384 {SMALL}")
        assert gain.better_Bps > 1.2 * gain.was_Bps
        assert "waits for room" in gain.evidence

        far.set("b", tcp_settings.TCP_RMEM_SYSCTL, gain.better)  # as the fix says
        wires, tried = far.measured()
        assert wires[0].window_limited is not None
        assert wires[0].window_limited < there.window_limited
        assert WINDOW not in {(one.check, one.host) for one in tried}


def test_slow_start_after_idle_on_long_link_is_reported(far: Far) -> None:
    with far.having("a", tcp_settings.CONGESTION_CONTROL_SYSCTL, "reno"):
        _, found = far.found(IDLE)
        with far.having("a", tcp_settings.SLOW_START_AFTER_IDLE_SYSCTL, "0"):
            _, tried = far.measured()
    assert (found[IDLE].setting, found[IDLE].was, found[IDLE].better) == (
        tcp_settings.SLOW_START_AFTER_IDLE_SYSCTL,
        "1",
        "0",
    )
    assert "link.idle" not in {one.check for one in tried}


def test_socket_uses_requested_congestion_control_and_buffer(make_lab: Any, tmp_path: Path) -> None:
    """By the kernel's own word; and nothing of the host has changed."""
    lab = make_lab(tmp_path / "lab.toml", a=HostSpec(rate="100Mbit"), b=HostSpec(rate="100Mbit"))
    addresses = {host.name: host.address for host in lab.hosts}
    with connect(load_fleet(tmp_path / "lab.toml")) as (sessions, _):
        before = {name: one.call("facts", "collect")["sysctls"] for name, one in sessions.items()}
        told = sessions["a"].call("link_probe", "socket_tcp_options")
        flow = link_probe.TcpFlow(sessions, addresses, "a", "b")
        assert "reno" in told["congestion"]  # every Linux has it, and allows it
        for name in told["congestion"]:
            assert flow.measure_goodput(1, 0.2, warm_s=0.1, congestion=name).congestion == name
        assert (
            flow.measure_goodput(1, 0.2, warm_s=0.1).congestion == before["a"][tcp_settings.CONGESTION_CONTROL_SYSCTL]
        )
        narrow = flow.measure_goodput(1, 0.3, warm_s=0.1, receive_bytes=4096)
        assert narrow.window_limited is not None
        assert narrow.window_limited > 0
        assert before == {name: one.call("facts", "collect")["sysctls"] for name, one in sessions.items()}
    lab.down()
