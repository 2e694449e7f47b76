"""Doctor names every injected fault and its host within seconds, and no longer once it is fixed."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from evener.cli.drill import _run_one, summarize_output
from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import load_fleet
from evener.doctor.context import CheckContext
from evener.doctor.preflight import run_preflight
from evener.lab import state
from evener.lab.drills.drill_catalog import DRILLS, MANUAL_FIX_REASONS, UNSUPPORTED_CHECKS, find_drill
from evener.lab.drills.drill_runner import Drill, DrillDiagnosis, DrillRun, ManualOutput, doctor_diagnosis, parse_fix
from evener.lab.drills.drills_runs import RUN_DRILLS as OF_RUNS
from evener.lab.drills.drills_runs import diagnose_hang
from evener.lab.lab_spec import HostSpec
from evener.ssh.session import connect
from tests import drill_records
from tests.conftest import SlowedDown, slowdown
from tests.lab.conftest import TIMEOUT_S, MakeLab, wait_until
from tests.tiers import exhaustive, exhaustively

NAMED_WITHIN_S = 10.0  # of the start of doctor
RUN_NAMED_WITHIN_S = 40.0  # a run loads torch on both hosts first
HANG_NAMED_WITHIN_S = 15.0  # of the fault
MENDED_RUN = "data.mismatch"  # the other runs that are mended are the same healthy run again

# One of each family in the fast tiers; tests/unit/test_drill_records.py has what doctor saw in the others.
LIVE = ("net.firewall-one-way", "ssh.shell-exits", "env.ineffective-nccl")

RETURN = "([[ $- == *i* ]] || return)"
# Of findings of one id that must tell several causes apart: of what was seen, and of the fix.
WORDS = {
    "ssh.key": ("others may read its key id_mine (mode 0644)", "chmod 600 id_mine"),
    "ssh.key-passphrase": ("its key id_mine has a passphrase, and no agent that has it", "ssh-add id_mine"),
    "ssh.key-missing": ("/.ssh/id_of_the_old_laptop is not there", "[hosts.b] identity_file"),
    "ssh.key-server": ("its server takes no keys, only: password", "on b: PubkeyAuthentication yes"),
    "ssh.shell-exits": ("ended (exit status 3) before it ran a command: it printed nothing", RETURN),
    "ssh.shell-reads": (
        "the login shell there read what was meant for the program",
        "case $- in *i*) ;; *) return ;; esac",
    ),
    "ssh.shell-sleeps": ("the login shell there has not run a command yet", RETURN),
    "ssh.shell-nologin": ("account is currently not available", "on b: sudo usermod --shell /bin/bash"),
    "ssh.shell-forced": ("ended (exit status 0) before it ran a command: the menu", "must not set ForceCommand"),
    "ssh.shell-remote": ("has a RemoteCommand for it", '"RemoteCommand=none"]'),
    "disk.space-run": ("rank 1 on b exited with status 1: the disk of b is full", "on b: du -xh "),
}

# Every id that stands in the list of what goes wrong.
LISTED = """
net.loopback-hostname net.wrong-interface net.overlay net.family-mismatch net.unresolvable net.rendezvous-loopback
net.firewall net.mtu net.slow-link net.wireless net.stack-loss net.asymmetric net.private net.strangers
port.in-use proc.stale version.torch link.congestion link.window link.idle version.packages
version.python version.evener code.mismatch spec.mismatch data.mismatch tokenizer.mismatch rank.duplicate
ssh.unreachable ssh.auth ssh.hostkey clock.skew limit.nofile limit.memlock mem.space disk.space disk.stored shm.size
mem.swap cpu.oversubscribed cpu.throttled power.sleep dtype.slow gpu.missing gpu.driver gpu.p2p env.ineffective
env.interface-syntax tty.attached run.hang run.collective-mismatch run.peer-exit run.nonfinite run.diverged
run.straggler run.split-brain
ssh.shell ssh.key net.duplicate-address host.same-name env.shadowed run.oom run.cut-off
supervisor.lost checkpoint.damaged
"""


@pytest.fixture(autouse=True)
def _a_lab_is_possible(make_lab: MakeLab) -> None:
    """Skips where it is not."""


def possible(*names: str) -> list[Drill]:
    drills = [DRILLS[name] for name in names]
    for drill in drills:
        if (reason := drill.unsupported_reason()) is not None:
            pytest.skip(f"{drill.name}: {reason}")
    return drills


def left(drill: Drill, seen: DrillDiagnosis) -> list[str]:
    return [
        f"{one.check} {one.host}: {one.evidence}"
        for one in [*drill.matching_findings(seen.findings), *drill.unexpected_findings(seen.findings)]
    ]


# The kernel counts processes that it ended for want of memory for all hosts of a lab, and of any other lab, together.
OOM = pytest.param("run.oom", marks=[exhaustive, pytest.mark.alone])


@pytest.mark.parametrize(
    "name", [*LIVE, *exhaustively(*(name for name in DRILLS if name not in (*LIVE, "run.oom"))), OOM]
)
def test_drill_fault_is_named_and_fixed(name: str, request: pytest.FixtureRequest) -> None:
    [drill] = possible(name)
    is_run = drill in OF_RUNS
    with DrillRun(drill) as play:
        play.inject_fault()
        capture = nullcontext([]) if is_run else drill_records.captured(play)
        with SlowedDown() as other, capture as contexts:
            seen = play.diagnose()
        named = drill.expected_finding(seen.findings)
        assert named, (seen.findings, seen.lines)
        for text, expected in zip((named.evidence, named.fix), WORDS.get(name, ("", "")), strict=True):
            assert expected in text
        assert drill.unexpected_findings(seen.findings) == []
        if is_run:  # and nobody else is blamed
            assert len(seen.findings) == 1
        limit_s = (
            HANG_NAMED_WITHIN_S if drill.diagnose is diagnose_hang else RUN_NAMED_WITHIN_S if is_run else NAMED_WITHIN_S
        )
        assert seen.took_s < limit_s * other.factor
        if not is_run:
            compare_with_record(drill, contexts[-1], writes=request.config.getoption("record_drills"))
        if not is_run or name == MENDED_RUN:
            play.apply_fix(seen)
            assert left(drill, play.diagnose_until_fixed()) == []


def compare_with_record(drill: Drill, context: CheckContext, *, writes: bool) -> None:
    """What is known now leads to the same findings as what was recorded."""
    if writes:
        drill_records.write(drill.name, context)
    recorded = drill_records.findings(drill_records.read(drill.name))
    now = [one for one in drill_records.findings(context) if not drill.is_of_lab(one)]
    assert drill_records.keys(now, drill.check) == drill_records.keys(recorded, drill.check)


@pytest.mark.skipif(os.geteuid() != 0, reason="which firewall there is only root may ask")
def test_every_drill_fix_is_run_or_listed_as_untyped() -> None:
    assert MANUAL_FIX_REASONS.keys() == {
        drill.name for drill in DRILLS.values() if drill.fix is not None and drill not in OF_RUNS
    }


def test_every_check_has_a_drill_or_a_reason() -> None:
    covered = {drill.check for drill in DRILLS.values()}
    assert covered | UNSUPPORTED_CHECKS.keys() == set(LISTED.split())
    assert not covered & UNSUPPORTED_CHECKS.keys()


def patient(name: str) -> Drill:
    """A drill in which we look away later on a busy machine: to load torch takes as many times as long there."""
    drill, longer = DRILLS[name], 2 * slowdown() - 1
    assert drill.manual is not None
    raw = dataclasses.replace(
        drill.manual, idle_timeout_s=longer * drill.manual.idle_timeout_s, timeout_s=longer * drill.manual.timeout_s
    )
    return dataclasses.replace(drill, manual=raw)


@exhaustive
class TestWithoutEvener:
    """That the symptom is real: torchrun by hand, on the broken lab and on the mended one."""

    def test_firewall_fault_hangs_without_doctor(self) -> None:
        with DrillRun(patient("net.firewall")) as play:
            play.inject_fault()
            said = [line for told in play.reproduce_manually().values() for line in summarize_output(told)]
            # Gloo gives up after half a minute, as late as a busy machine lets the drill listen.
            assert [line for line in said if "timed out connecting" not in line] == []
            play.apply_fix(play.diagnose())
            raw = play.drill.manual
            assert raw is not None
            to_its_end = dataclasses.replace(raw, idle_timeout_s=TIMEOUT_S, timeout_s=TIMEOUT_S)
            assert "rank 1: 1 + 2 = 3" in summarize_output(play.context.run_manually(to_its_end)["b"])

    def test_small_mtu_fault_lets_only_small_messages_pass(self) -> None:
        with DrillRun(patient("net.mtu")) as play:
            play.inject_fault()
            said = play.reproduce_manually()["a"].lines  # after a while an error, too
            assert [line for line in said if line.startswith("rank 0: ")] == ["rank 0: 1 + 2 = 3"]

    def test_loopback_name_error_is_cryptic_without_doctor(self) -> None:
        with DrillRun(patient("net.loopback-hostname")) as play:
            play.inject_fault()
            said = "\n".join(line for told in play.reproduce_manually().values() for line in summarize_output(told))
            assert "connectFullMesh failed" in said
            assert "remote=[127.0.1.1]" in said


@pytest.mark.parametrize(
    "names",
    [
        *exhaustively(
            (("power.sleep", "cpu.throttled", "limit.nofile", "disk.space"),),
            (("net.firewall", "net.loopback-hostname"),),
            (("net.firewall", "proc.stale"),),
            (("net.mtu", "version.torch"),),
            (("net.asymmetric", "mem.space"),),
            (("net.unresolvable", "env.interface-syntax"),),
            (("port.in-use", "tty.attached"),),
            (("shm.size", "gpu.driver"),),
            (("ssh.hostkey", "port.in-use"),),
        ),
    ],
    ids=" + ".join,
)
def test_simultaneous_faults_are_all_named(names: tuple[str, ...]) -> None:
    drills = possible(*names)
    with DrillRun(*drills) as play:
        play.inject_fault()
        with SlowedDown() as other:
            seen = doctor_diagnosis()(play.context)
        for drill in drills:
            assert drill.expected_finding(seen.findings), (drill.name, seen.findings)
        checks = {drill.check for drill in drills}
        assert {one.check for one in seen.findings if one.severity != "info"} <= checks
        assert seen.took_s < NAMED_WITHIN_S * other.factor


def once(call: Callable[..., Any], function: str) -> Callable[..., Any]:
    """A session's `call` that asks this, which takes a second of a processor, once and knows it then."""
    known = functools.cache(functools.partial(call, "facts", function))
    return lambda module, asked, **args: known(**args) if asked == function else call(module, asked, **args)


@exhaustive
@pytest.mark.parametrize("hosts", [{"a": HostSpec(), "b": HostSpec()}, dict.fromkeys("abc", HostSpec(rate="1Gbit"))],
                         ids=["two", "three at 1 Gbit"])  # fmt: skip
def test_healthy_fleet_has_no_findings_in_repeated_runs(hosts: dict[str, HostSpec]) -> None:
    """Ten looks at each of two fleets, goodput and all, while another test works on the same cores."""
    healthy = dataclasses.replace(DRILLS["net.slow-link"], fault=[], hosts=hosts)
    with DrillRun(healthy) as play:
        fleet = load_fleet(play.context.fleet_file)
        with connect(fleet) as (sessions, errors):
            for session in sessions.values():
                session.call = once(session.call, "import_torch")
            for _ in range(10):
                findings = run_preflight(fleet, sessions, errors).findings
                assert [one for one in findings if one.severity != "info" and not healthy.is_of_lab(one)] == []


def evener_argv(*args: str) -> list[str]:
    return [str(Path(sys.executable).with_name("evener")), "lab", "drill", *args]


class TestTheCommandLine:
    def test_drill_prints_four_steps(self) -> None:
        done = subprocess.run(evener_argv("net.unresolvable", "--short"), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for text in ("1  the fault", "on b: sed -i", "3  with evener", "warning: net.unresolvable  b ↔ a",
                     "4  fixed", "nothing left", "net.unresolvable on b ↔ a: named in"):  # fmt: skip
            assert text in done.stdout

    @exhaustive
    def test_drill_prints_json(self) -> None:
        done = subprocess.run(
            evener_argv("env.ineffective-nccl", "--short", "--json"), capture_output=True, text=True, check=False
        )
        told = json.loads(done.stdout)
        assert (told["named"], told["mended"], told["left"]) == (True, True, [])
        assert told["expected"] == {"check": "env.ineffective", "host": "b", "peer": None}

    def test_drill_list_names_checks_that_no_drill_can_test(self) -> None:
        done = subprocess.run(evener_argv("--list", "--json"), capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        assert len(told["drills"]) == len(DRILLS) >= 18
        assert {one["check"] for one in told["not_possible"]} == UNSUPPORTED_CHECKS.keys()

    def test_drill_exits_with_status_1_if_doctor_names_no_fault(self, capsys: pytest.CaptureFixture[str]) -> None:
        nothing_broken = dataclasses.replace(DRILLS["net.unresolvable"], fault=[])
        assert _run_one(nothing_broken, short=True, as_json=False) == 1
        assert "not named" in capsys.readouterr().out

    def test_unknown_drill_name_is_refused(self) -> None:
        with pytest.raises(UsageError) as raised:
            find_drill("net.firewal")
        assert raised.value.hint.startswith('did you mean "net.firewall')
        with pytest.raises(UsageError, match=r"clock\.skew: a lab cannot break this"):
            find_drill("clock.skew")

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
    def test_an_interrupted_drill_leaves_no_lab(self, signum: int) -> None:
        process = subprocess.Popen(
            evener_argv("net.unresolvable"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        mine = f"drill-{process.pid}-"

        def labs() -> list[str]:
            return [name for name in state.lab_names() if name.startswith(mine)]

        wait_until(lambda: any((state.labs_root() / name / "lab.json").exists() for name in labs()), "no lab was made")
        os.killpg(process.pid, signum)
        _, said = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130
        assert "Traceback" not in said
        assert labs() == []


def test_fix_that_is_not_a_command_is_not_run() -> None:
    with pytest.raises(Exception, match="is not a command"):
        parse_fix("plug a cable into b")


def test_traceback_summary_is_its_error_line() -> None:
    lines = ["[rank1]: Traceback (most recent call last):", '[rank1]:   File "x.py", line 1',
             "[rank1]: RuntimeError: Connection closed by peer", "torch.ChildFailedError:", "====="]  # fmt: skip
    assert summarize_output(ManualOutput(command="x", lines=lines, status=1, took_s=1.0)) == [
        "RuntimeError: Connection closed by peer"
    ]
    # At the end of torchrun the store's owner may leave first: the others' warning is no error.
    lines = [
        "rank 1: 1 + 2 = 3",
        "[W1122 06:42:11.0 TCPStore.cpp:125] recvValue failed on SocketImpl(fd=4): 0 bytes.",
        "Exception raised from recvBytes at Utils.hpp:697 (most recent call first):",
        "frame #1: c10::DistError::DistError(c10::SourceLocation, std::string) + 0x72 (0x7f in libc10.so)",
    ]
    assert summarize_output(ManualOutput(command="x", lines=lines, status=0, took_s=1.0)) == ["rank 1: 1 + 2 = 3"]
