"""Judge TCP settings by hand-written trials: only a lasting gain is reported, with its fix."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.cluster.fleet_file import Fleet, HostConfig, HostLink, TuningGain, load_fleet
from evener.core.cluster.fleet_update import update_fleet_file
from evener.doctor import tcp_settings
from evener.doctor.facts import GlooDefaultAddress, HostFacts
from evener.doctor.tcp_tuning import CONFIRMATION_ROUNDS, INITIAL_ROUNDS, interleave_trials, ring_pairs
from evener.lab.drills.drill_runner import parse_fix

WAY = ("attic", "laptop")
GAIN = TuningGain(
    check="link.window",
    host="laptop",
    setting=tcp_settings.TCP_RMEM_SYSCTL,
    was="4096 8192 8192",
    better="4096 131072 6291456",
    was_Bps=30e6,
    better_Bps=110e6,
    evidence="attic sends laptop 240 Mbit/s, 880 Mbit/s with a buffer of 1 MB",
)


def links(*found: TuningGain) -> dict[str, dict[str, HostLink]]:
    return {"attic": {"laptop": HostLink(goodput_Bps=30e6, rtt_s=2e-4, measured="2026-11-21T10:00", gains=list(found))}}


def facts(**sysctls: str) -> HostFacts:
    choice = GlooDefaultAddress(hostname="x", candidates=[], address="10.0.0.1")
    named = {name.replace("__", "."): value for name, value in sysctls.items()}
    return HostFacts(
        hostname="x",
        system="Linux",
        architecture="x86_64",
        workdir="/x",
        python="/x",
        cores=2,
        port=29500,
        gloo=choice,
        sysctls=named,
    )


class TestInTurn:
    def rounds(self, figures: dict[str | None, list[float]]) -> tuple[list[str | None], dict[str | None, list[float]]]:
        asked: list[str | None] = []

        def go(option: str | None) -> dict[tuple[str, str], float]:
            asked.append(option)
            return {WAY: figures[option][asked.count(option) - 1]}

        return asked, interleave_trials(go, list(figures))[WAY]

    def test_setting_that_is_not_better_is_dropped_early(self) -> None:
        asked, seen = self.rounds({None: [100, 101], "cubic": [104, 103]})
        assert asked == [None, "cubic"] * INITIAL_ROUNDS
        assert not tcp_settings.is_clearly_faster(seen[None], seen["cubic"])

    def test_setting_must_stay_better_in_all_rounds(self) -> None:
        asked, seen = self.rounds({None: [100, 101, 99, 120, 100], "bbr": [110, 112, 111, 110, 113]})
        assert asked == [None, "bbr"] * (INITIAL_ROUNDS + CONFIRMATION_ROUNDS)
        assert not tcp_settings.is_clearly_faster(seen[None], seen["bbr"])  # one go without it was as fast

    def test_clear_gain_is_accepted(self) -> None:
        _, seen = self.rounds({None: [100, 101, 99, 102, 100], "bbr": [110, 112, 111, 110, 113]})
        assert tcp_settings.is_clearly_faster(seen[None], seen["bbr"])


def test_number_of_probed_pairs_equals_number_of_hosts() -> None:
    assert ring_pairs([]) == ring_pairs(["a"]) == []
    assert len(ring_pairs([str(number) for number in range(64)])) == 64


class TestArithmetic:
    """Closed forms."""

    def test_window_bandwidth_is_buffer_over_round_trip_time(self) -> None:
        # Linux, 80 ms
        assert tcp_settings.window_limit_Bps(tcp_settings.TCP_WMEM_SYSCTL, 4 << 20, 0.080) * 8 == pytest.approx(
            419e6, rel=0.01
        )
        needed = tcp_settings.parse_max_buffer_bytes(
            tcp_settings.widen_buffers(tcp_settings.TCP_WMEM_SYSCTL, "4096 16384 4194304", 117e6, 0.080)
        )
        assert needed is not None
        assert tcp_settings.window_limit_Bps(tcp_settings.TCP_WMEM_SYSCTL, needed, 0.080) > 117e6

    @pytest.mark.parametrize("setting", [tcp_settings.TCP_RMEM_SYSCTL, tcp_settings.TCP_WMEM_SYSCTL])
    @pytest.mark.parametrize("rtt_s", [1e-4, 0.02, 0.3])
    def test_suggested_buffer_size_covers_the_link(self, setting: str, rtt_s: float) -> None:
        room = tcp_settings.parse_max_buffer_bytes(tcp_settings.widen_buffers(setting, "4096 4096 4096", 1.25e9, rtt_s))
        assert room is not None
        assert tcp_settings.window_limit_Bps(setting, room, rtt_s) >= 2 * 1.25e9

    def test_slow_start_doubles_each_round_trip(self) -> None:
        """From ten segments to 160 in four round trips; a burst that is shorter needs fewer."""
        on_the_way = 160 * tcp_settings.MSS_BYTES
        assert tcp_settings.slow_start_s(on_the_way / 0.02, 0.02, 10**9) == pytest.approx(4 * 0.02)
        assert tcp_settings.slow_start_s(on_the_way / 0.02, 0.02, 20 * tcp_settings.MSS_BYTES) == pytest.approx(0.02)


class TestTold:
    def test_tcp_finding_lasts_until_host_changes_the_setting(self) -> None:
        attic, before = facts(), facts(net__ipv4__tcp_rmem=GAIN.was)
        after = facts(net__ipv4__tcp_rmem=GAIN.better)
        assert [one[:2] for one in tcp_settings.applicable_gains(links(GAIN), {"attic": attic, "laptop": before})] == [
            WAY
        ]
        assert list(tcp_settings.applicable_gains(links(GAIN), {"attic": attic, "laptop": after})) == []
        assert list(tcp_settings.applicable_gains(links(GAIN), {"attic": attic})) == []  # not reached

    def test_tcp_setting_is_reported_once_with_its_largest_gain(self) -> None:
        more = msgspec.structs.replace(GAIN, better_Bps=2 * GAIN.better_Bps)
        hosts = {"attic": facts(), "laptop": facts(net__ipv4__tcp_rmem=GAIN.was)}
        assert [one[2] for one in tcp_settings.applicable_gains(links(GAIN, more), hosts)] == [more]

    def test_fix_is_a_runnable_command(self) -> None:
        found = tcp_settings.finding_for_gain(GAIN, *WAY, "sudo ", "2026-11-21T10:00")
        assert (found.check, found.severity, found.host, found.peer) == ("link.window", "warning", "laptop", "attic")
        assert found.evidence.endswith("(evener probe wire, 2026-11-21)")
        assert [step.text for step in parse_fix(found.fix)] == [
            "on laptop: sudo sysctl -w net.ipv4.tcp_rmem='4096 131072 6291456'"
        ]
        little = msgspec.structs.replace(GAIN, better_Bps=1.1 * GAIN.was_Bps)
        assert tcp_settings.finding_for_gain(little, *WAY, "").severity == "info"

    def test_finding_is_saved_in_fleet_file(self, tmp_path) -> None:
        file = tmp_path / "fleet.toml"
        hosts = {"attic": HostConfig(address="local"), "laptop": HostConfig(address="lap")}
        file.write_text("".join(f'[hosts.{name}]\naddress = "{host.address}"\n' for name, host in hosts.items()))
        update_fleet_file(file, links=links(GAIN))
        assert load_fleet(file) == Fleet(hosts=hosts, file=str(file), links=links(GAIN))
        update_fleet_file(file, links=links())
        assert load_fleet(file).links["attic"]["laptop"].gains == []
