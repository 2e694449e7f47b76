"""What the trials of other settings say, from figures made by hand."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.fleet import Fleet, Gain, Host, Link, load_fleet
from evener.core.measured import update_fleet
from evener.hosts import gains
from evener.hosts.facts import Facts, GlooChoice
from evener.hosts.tuning import FIRST_ROUNDS, MORE_ROUNDS, in_turn, neighbours
from evener.lab.drill import steps_of

WAY = ("attic", "laptop")
GAIN = Gain(
    check="link.window", host="laptop", setting=gains.RECEIVE, was="4096 8192 8192", better="4096 131072 6291456",
    was_Bps=30e6, better_Bps=110e6, evidence="attic sends laptop 240 Mbit/s, 880 Mbit/s with a buffer of 1 MB",
)  # fmt: skip


def links(*found: Gain) -> dict[str, dict[str, Link]]:
    return {"attic": {"laptop": Link(goodput_Bps=30e6, rtt_s=2e-4, measured="2026-11-21T10:00", gains=list(found))}}


def facts(**sysctls: str) -> Facts:
    choice = GlooChoice(hostname="x", candidates=[], address="10.0.0.1")
    named = {name.replace("__", "."): value for name, value in sysctls.items()}
    return Facts(hostname="x", system="Linux", architecture="x86_64", workdir="/x", python="/x", cores=2, port=29500,
                 gloo=choice, sysctls=named)  # fmt: skip


class TestInTurn:
    def rounds(self, figures: dict[str | None, list[float]]) -> tuple[list[str | None], dict[str | None, list[float]]]:
        asked: list[str | None] = []

        def go(option: str | None) -> dict[tuple[str, str], float]:
            asked.append(option)
            return {WAY: figures[option][asked.count(option) - 1]}

        return asked, in_turn(go, list(figures))[WAY]

    def test_what_is_not_ahead_is_given_up(self) -> None:
        asked, seen = self.rounds({None: [100, 101], "cubic": [104, 103]})
        assert asked == [None, "cubic"] * FIRST_ROUNDS
        assert not gains.ahead(seen[None], seen["cubic"])

    def test_what_is_ahead_must_stay_ahead(self) -> None:
        asked, seen = self.rounds({None: [100, 101, 99, 120, 100], "bbr": [110, 112, 111, 110, 113]})
        assert asked == [None, "bbr"] * (FIRST_ROUNDS + MORE_ROUNDS)
        assert not gains.ahead(seen[None], seen["bbr"])  # one go without it was as fast

    def test_a_clear_gain(self) -> None:
        _, seen = self.rounds({None: [100, 101, 99, 102, 100], "bbr": [110, 112, 111, 110, 113]})
        assert gains.ahead(seen[None], seen["bbr"])


def test_every_host_is_tried_with_few_pairs() -> None:
    assert neighbours([]) == neighbours(["a"]) == []
    assert len(neighbours([str(number) for number in range(64)])) == 64


class TestArithmetic:
    """Closed forms."""

    def test_window_over_round_trip(self) -> None:
        assert gains.window_Bps(gains.SEND, 4 << 20, 0.080) * 8 == pytest.approx(419e6, rel=0.01)  # Linux, 80 ms
        needed = gains.greatest(gains.wider(gains.SEND, "4096 16384 4194304", 117e6, 0.080))
        assert needed is not None
        assert gains.window_Bps(gains.SEND, needed, 0.080) > 117e6

    @pytest.mark.parametrize("setting", [gains.RECEIVE, gains.SEND])
    @pytest.mark.parametrize("rtt_s", [1e-4, 0.02, 0.3])
    def test_what_is_told_to_be_set_suffices(self, setting: str, rtt_s: float) -> None:
        room = gains.greatest(gains.wider(setting, "4096 4096 4096", 1.25e9, rtt_s))
        assert room is not None
        assert gains.window_Bps(setting, room, rtt_s) >= 2 * 1.25e9

    def test_slow_start_doubles(self) -> None:
        """From ten segments to 160 in four round trips; a burst that is shorter needs fewer."""
        on_the_way = 160 * gains.SEGMENT_BYTES
        assert gains.slow_start_s(on_the_way / 0.02, 0.02, 10**9) == pytest.approx(4 * 0.02)
        assert gains.slow_start_s(on_the_way / 0.02, 0.02, 20 * gains.SEGMENT_BYTES) == pytest.approx(0.02)


class TestTold:
    def test_as_long_as_the_host_has_it(self) -> None:
        attic, before = facts(), facts(net__ipv4__tcp_rmem=GAIN.was)
        after = facts(net__ipv4__tcp_rmem=GAIN.better)
        assert [one[:2] for one in gains.still_there(links(GAIN), {"attic": attic, "laptop": before})] == [WAY]
        assert list(gains.still_there(links(GAIN), {"attic": attic, "laptop": after})) == []
        assert list(gains.still_there(links(GAIN), {"attic": attic})) == []  # not reached

    def test_a_setting_is_told_once(self) -> None:
        more = msgspec.structs.replace(GAIN, better_Bps=2 * GAIN.better_Bps)
        hosts = {"attic": facts(), "laptop": facts(net__ipv4__tcp_rmem=GAIN.was)}
        assert [one[2] for one in gains.still_there(links(GAIN, more), hosts)] == [more]

    def test_the_fix_is_a_command(self) -> None:
        found = gains.finding(GAIN, *WAY, "sudo ", "2026-11-21T10:00")
        assert (found.check, found.severity, found.host, found.peer) == ("link.window", "warning", "laptop", "attic")
        assert found.evidence.endswith("(evener probe wire, 2026-11-21)")
        assert [step.text for step in steps_of(found.fix)] == [
            "on laptop: sudo sysctl -w net.ipv4.tcp_rmem='4096 131072 6291456'"
        ]
        little = msgspec.structs.replace(GAIN, better_Bps=1.1 * GAIN.was_Bps)
        assert gains.finding(little, *WAY, "").severity == "info"

    def test_it_is_kept_in_the_fleet_file(self, tmp_path) -> None:
        file = tmp_path / "fleet.toml"
        hosts = {"attic": Host(address="local"), "laptop": Host(address="lap")}
        file.write_text("".join(f'[hosts.{name}]\naddress = "{host.address}"\n' for name, host in hosts.items()))
        update_fleet(file, links=links(GAIN))
        assert load_fleet(file) == Fleet(hosts=hosts, file=str(file), links=links(GAIN))
        update_fleet(file, links=links())
        assert load_fleet(file).links["attic"]["laptop"].gains == []
