"""Random fault injection: each fault has the effect that its table row states, and leaves no trace."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path

import pytest

from evener.core.base.errors import UsageError
from evener.lab import cgroup
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.fault_injection import (
    AGENT_PROGRAM,
    FAULT_TABLE,
    FAULTS_BY_NAME,
    RANK_PROGRAM,
    SUPERVISOR_PROGRAM,
    find_faults,
    find_pids,
    inject_faults,
    schedule_faults,
    split_supported,
)
from evener.lab.host import LabHost
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab, wait_until
from tests.tiers import exhaustive

CALM_S = (0.0, 0.2)
KEEPER = "import sys, time; time.sleep(1000)"  # a process, called as it is told


@pytest.mark.parametrize("seed", range(20))
def test_schedule_has_non_overlapping_faults_within_time(seed: int) -> None:
    events = schedule_faults(seed, 60, ["a", "b", "c"], FAULT_TABLE)
    assert events == schedule_faults(seed, 60, ["a", "b", "c"], FAULT_TABLE)
    assert len(events) > 20
    for one, other in itertools.pairwise(events):
        assert other.at_s >= one.at_s + one.duration_s + 20
    assert events[-1].at_s + events[-1].duration_s + 20 <= 3600
    assert all(event.duration_s in (event.fault.durations_s or (0.0,)) for event in events)


def test_schedules_cover_every_fault_and_host() -> None:
    events = [event for seed in range(20) for event in schedule_faults(seed, 60, ["a", "b", "c"], FAULT_TABLE)]
    assert {event.fault.name for event in events} == set(FAULTS_BY_NAME)
    assert {event.host for event in events} == {"a", "b", "c"}
    counts = [sum(event.fault is row for event in events) for row in FAULT_TABLE]
    mean = len(events) / len(FAULT_TABLE)
    assert all(abs(count - mean) < 5 * mean**0.5 for count in counts)  # five standard deviations


def test_unknown_fault_is_refused() -> None:
    with pytest.raises(UsageError, match="no fault is called powre: kill-rank, "):
        find_faults(["power", "powre"])


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> EmulatedLab:
    return make_lab(**dict.fromkeys("ab", HostSpec(rate="100Mbit", cpus=0.5, disk="64MB")))


def state_of(pid: int) -> str:
    """As the kernel calls it; "" of one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return ""


def hears(lab: EmulatedLab, name: str, other: str) -> bool:
    """Does a host get an answer of another's sshd?"""
    done = lab.host(name).exec(["ssh-keyscan", "-T1", lab.host(other).address], check=False)
    return bool(done.stdout)


def free_bytes(host: LabHost) -> int:
    return int(host.exec(["sh", "-c", "df --output=avail -B1 ~ | tail -1"]).stdout)


def quota(lab: EmulatedLab, host: LabHost) -> int:
    return int((cgroup.ROOT / "cpu" / cgroup.SUBTREE / lab.name / host.name / "cpu.cfs_quota_us").read_text())


def is_broken(name: str, lab: EmulatedLab, host: LabHost, keepers: dict[str, int]) -> bool:
    """Is the host as the fault says?"""
    states = {program: state_of(pid) for program, pid in keepers.items()}
    match name:
        case "kill-rank" | "kill-agent" | "kill-supervisor":
            program = {"kill-rank": RANK_PROGRAM, "kill-agent": AGENT_PROGRAM, "kill-supervisor": SUPERVISOR_PROGRAM}[
                name
            ]
            return {one for one, state in states.items() if state in ("", "Z")} == {program}
        case "stop-rank":
            return (states[RANK_PROGRAM], states[AGENT_PROGRAM]) == ("T", "S")
        case "lid":
            return set(states.values()) == {"T"}
        case "power":
            return host.is_off()
        case "cable":
            return not hears(lab, "a", "b") and not hears(lab, "b", "a")
        case "one-way":
            return not hears(lab, "a", "b")
        case "packets":
            return "numgen random mod 50" in host.exec(["nft", "list", "ruleset"]).stdout
        case "rate":
            return host.spec.up_bps == 10_000_000
        case "half-speed":
            return quota(lab, host) == cgroup.PERIOD_US // 4
        case "disk-full":
            return free_bytes(host) == 0
    raise AssertionError(name)


@exhaustive
@pytest.mark.parametrize("name", FAULTS_BY_NAME)
def test_fault_has_stated_effect_and_leaves_no_trace(lab: EmulatedLab, name: str) -> None:
    if name == "half-speed" and not (cgroup.ROOT / "cpu").exists():
        pytest.skip("its quota lies elsewhere where cgroups are of version 2")
    host = lab.host("b")
    (host.home / "file").write_text("so that there is something on its disk")
    started = {
        program: host.popen([sys.executable, "-c", KEEPER, program])
        for program in (RANK_PROGRAM, AGENT_PROGRAM, SUPERVISOR_PROGRAM)
    }
    try:
        wait_until(lambda: all(find_pids(host, program) for program in started), "they run")
        keepers = {program: find_pids(host, program)[-1] for program in started}
        [event, *_] = schedule_faults(1, 60, ["b"], find_faults([name]), CALM_S)
        for _, begins in inject_faults(lab, [event.__class__(at_s=0.0, fault=event.fault, host="b", duration_s=0.0)]):
            if begins:
                wait_until(lambda: is_broken(name, lab, host, keepers), f"{name} begins")
        if not name.startswith("kill"):
            wait_until(lambda: not is_broken(name, lab, host, keepers), f"{name} is over")
        wait_until(lambda: hears(lab, "a", "b") and hears(lab, "b", "a"), "as before")
    finally:
        for one in started.values():
            one.kill()
            one.wait()


def test_faults_needing_a_limit_or_disk_are_left_out_without_one(make_lab: MakeLab) -> None:
    """Least of all is this machine's disk filled."""
    able, left_out = split_supported(FAULT_TABLE, make_lab(a=HostSpec()))
    assert [row.name for row in left_out] == ["rate", "half-speed", "disk-full"]
    assert len(able) == len(FAULT_TABLE) - 3


@exhaustive
def test_lab_disk_survives_power_off_but_not_lab_down(make_lab: MakeLab) -> None:
    lab = make_lab(a=HostSpec(disk="64MB"))
    host = lab.host("a")
    host.exec(["sh", "-c", "echo kept >~/file"])
    host.power_off()
    host.boot()
    assert host.exec(["cat", "file"]).stdout == "kept\n"
    host.fill_disk(True)
    assert host.exec(["sh", "-c", "head -c 8192 /dev/zero >more"], check=False).returncode != 0
    host.fill_disk(False)
    host.exec(["sh", "-c", "head -c 8192 /dev/zero >more"])
    assert str(lab.path) in Path("/proc/self/mounts").read_text()
    lab.down()
    assert str(lab.path) not in Path("/proc/self/mounts").read_text()
