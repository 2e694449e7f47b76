"""Name the failure that ended a run, among all that its ranks and hosts reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evener.core.base.file_io import write_atomic
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.run_plan import HostPlan, Plan
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.launch.root_cause import first_failure

PEER = "RuntimeError: [gloo/pair.cc:537] Connection closed by peer [10.0.0.2]:1"
TRACE = "\n".join(f"frame #{i}: somewhere in libtorch" for i in range(40))


def host(name: str, rank: int) -> HostPlan:
    return HostPlan(
        name=name, host=HostConfig(address=name), node_rank=rank, first_rank=rank, num_ranks=1, address="10.0.0.1",
        interface="eth0", run=f"/{name}", code=None, cwd="/", argv=[], env={},
    )  # fmt: skip


PLAN = Plan(id="1d", kind="train", address="10.0.0.1", port=1, grace_s=1.0, spec=None,
            hosts=[host("a", 0), host("b", 1), host("c", 2)])  # fmt: skip


def state(*, ended: float = 100.0, status: int | None = 0, failures: list[Any] | None = None, **more: Any) -> Any:
    return {"state": "ended", "started": 50.0, "ended": ended, "status": status, "stopped": False,
            "failures": failures or [], **more}  # fmt: skip


def died(rank: int, exitcode: int, time: float, signal: str | None = None) -> list[dict[str, Any]]:
    return [{"rank": rank, "local_rank": 0, "pid": 1, "exitcode": exitcode, "time": time, "signal": signal}]


def log(rundir: RunDir, name: str, text: str, *, second: int = 97) -> None:
    """More of a log, stamped so many seconds after 1970; the run began in the 50th."""
    path = rundir.path / "logs" / f"{name}.log"
    lines = "".join(f"1970-01-01T00:{second // 60:02}:{second % 60:02}.123Z E {line}\n" for line in text.splitlines())
    write_atomic(path, (path.read_bytes() if path.exists() else b"") + lines.encode())


def say(rundir: RunDir, rank: int, kind: str, error: str, time: float, *, of: int | None = None) -> None:
    rundir.path.mkdir(exist_ok=True)
    of = rank if of is None else of
    RunWriter(rundir.path).add_event("failure", rank=rank, of=of, kind=kind, error=error, hint="", **{"time": time})


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def named(rundir: RunDir, **states: Any) -> str | None:
    found = first_failure(rundir, PLAN, states)
    return None if found is None else found.message


def test_healthy_run_has_no_failure(rundir: RunDir) -> None:
    assert named(rundir, a=state(), b=state(), c=state()) is None


def test_stopped_run_is_not_a_failure(rundir: RunDir) -> None:
    assert named(rundir, a=state(status=143, stopped=True), b=state(status=143), c=state()) is None


def test_killed_rank_is_named_over_earlier_peer_error(rundir: RunDir) -> None:
    log(rundir, "a.0", f"Traceback\n{PEER}\n{TRACE}")  # deep above the end
    log(rundir, "b.1", "step 7")
    states = {"a": state(status=1, failures=died(0, 1, 99.0)), "c": state(status=143),
              "b": state(status=1, failures=died(1, -9, 100.0, "SIGKILL"))}  # fmt: skip
    assert named(rundir, **states) == "rank 1 on b was killed by SIGKILL"
    found = first_failure(rundir, PLAN, states)
    assert found is not None
    assert found.to_error(rundir, PLAN).output == "step 7"


@pytest.mark.parametrize(
    ("b", "expected"),
    [
        (state(status=None, lost="the supervisor was killed"), "b: the supervisor was killed"),
        (state(status=-9, signal="SIGKILL"), "the launcher on b was killed by SIGKILL"),
        (state(status=2), "the launcher on b exited with status 2"),
    ],
)
def test_silent_host_is_named_before_hosts_that_lost_it(rundir: RunDir, b: Any, expected: str) -> None:
    log(rundir, "a.0", PEER)
    states = {"a": state(status=1, failures=died(0, 1, 99.0)), "b": b, "c": state(status=143, ended=98.0)}
    assert named(rundir, **states) == expected


def test_rank_with_peer_error_is_named_when_no_other_cause_is_known(rundir: RunDir) -> None:
    log(rundir, "a.0", PEER)
    assert named(rundir, a=state(status=1, failures=died(0, 1, 99.0)), b=state(), c=state(status=143)) == (
        "rank 0 on a exited with status 1"
    )


FAILED = {
    "a": state(status=1, failures=died(0, 1, 99.0)),
    "b": state(status=1, failures=died(1, 1, 98.0)),
    "c": state(),
}


def test_error_reported_by_a_rank_precedes_exit_statuses(rundir: RunDir) -> None:
    say(rundir, 0, "RunError", "step 3: the loss of rank 0 is not finite", 97.0)
    assert named(rundir, **FAILED) == "rank 0 on a: step 3: the loss of rank 0 is not finite"


def test_rank_error_of_earlier_start_is_ignored(rundir: RunDir) -> None:
    say(rundir, 0, "RunError", "of long ago", 49.0)
    assert named(rundir, **FAILED) == "rank 1 on b exited with status 1"


def test_log_lines_from_earlier_start_are_ignored(rundir: RunDir) -> None:
    """Neither as what it printed last, nor as the sign that another was gone."""
    log(rundir, "a.0", PEER, second=49)
    log(rundir, "b.1", "error: of long ago", second=49)
    killed = died(0, -9, 97.0, "SIGKILL")
    states = {"a": state(status=1, failures=killed), "b": state(status=1, failures=died(1, 1, 98.0)), "c": state()}
    found = first_failure(rundir, PLAN, states)
    assert found is not None
    assert (found.message, found.output) == ("rank 0 on a was killed by SIGKILL", "")
    log(rundir, "a.0", "step 7")
    assert found.output == "step 7"


def test_unknown_exception_is_reported_by_exit_status(rundir: RunDir) -> None:
    say(rundir, 1, "KeyError", "'x'", 97.0)
    log(rundir, "b.1", "KeyError: 'x'")
    assert named(rundir, **FAILED) == "rank 1 on b exited with status 1"


def test_error_of_rank_outside_current_roster_is_ignored(rundir: RunDir) -> None:
    say(rundir, 7, "RunError", "of a larger fleet", 97.0)
    say(rundir, -1, "exit", "the controller's", 97.0)
    assert named(rundir, **FAILED) == "rank 1 on b exited with status 1"


def test_full_disk_is_named_as_cause(rundir: RunDir) -> None:
    """Whatever the traceback says that was the first to fail for it; one that had failed before did not."""
    log(rundir, "b", "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device")
    full = state(status=1, full_at=99.5)
    failure = first_failure(rundir, PLAN, {"a": state(), "b": full, "c": state(status=143)})
    assert failure is not None
    assert failure.message == "disk.space: the launcher on b exited with status 1: the disk of b is full"
    assert failure.hint == "on b: du -xh /b | sort -h | tail shows the largest folders"
    assert failure.output == ""
    full = state(status=1, failures=died(1, 1, 90.0), full_at=99.5)
    assert named(rundir, a=state(), b=full, c=state()) == "rank 1 on b exited with status 1"
    full = state(status=1, failures=died(1, 1, 97.0), full_at=99.5)
    expected = "disk.space: rank 1 on b exited with status 1: the disk of b is full"
    assert named(rundir, a=state(), b=full, c=state()) == expected


def test_full_disk_reported_by_another_rank_is_attributed(rundir: RunDir) -> None:
    """All ranks raise what one of them could not write, and that one cannot write it down."""
    say(rundir, 1, "RunError", "rank 0: /a/checkpoints/step-5: No space left on device (os error 28)", 99.0, of=0)
    failure = first_failure(rundir, PLAN, {"a": state(status=1), "b": state(status=1), "c": state()})
    assert failure is not None
    assert failure.message.startswith("disk.space: the disk of a is full: /a/checkpoints/step-5: No space left")
    assert failure.hint.startswith("on a: du -xh /a ")


def test_old_full_disk_is_not_the_cause(rundir: RunDir) -> None:
    log(rundir, "b.1", PEER)
    late = state(status=1, failures=died(1, 1, 97.0), full_at=60.0)
    expected = "rank 2 on c exited with status 1"
    assert named(rundir, a=state(), b=late, c=state(status=1, failures=died(2, 1, 98.0))) == expected


def test_stop_after_failure_still_reports_the_failure(rundir: RunDir) -> None:
    """Whoever asks, and whenever: the hosts' own states tell."""
    ended = state(ended=121.0, status=143, stopped=True)
    assert named(rundir, a=ended, b=state(status=1), c=ended) == "the launcher on b exited with status 1"
    stopping = {**ended, "ended": None}
    assert named(rundir, a=stopping, b=stopping, c=stopping) is None
    stopped = state(ended=101.0, status=143, stopped=True)
    assert named(rundir, a=stopped, b=state(status=1), c=stopped) is None


def test_host_that_ended_its_ranks_on_timeout_is_reported(rundir: RunDir) -> None:
    why = "nothing was heard of it for 90 s"
    log(rundir, "a", f"evener: ending the ranks on a: {why}")
    cut = state(status=143)
    assert named(rundir, a=cut, b=cut, c=cut) == f"run.cut-off: a ended its ranks: {why}"


IMPORT_ERROR = "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'mine'"


@pytest.mark.parametrize(
    ("logs", "failures", "told"),
    [  # the logs of a start that failed again and again, with the second of each part
        ([("b.1", 60, IMPORT_ERROR), ("a.0", 62, PEER), ("b.1", 90, PEER)], {}, "b.1.log: ModuleNotFoundError: No mod"),
        ([("b", 60, "error: rank.duplicate: b and x were both started as node 1")], {}, "b.log: error: rank.duplicate"),
        ([("c.2", 55, "Fatal Python error: init_fs_encoding"), ("b.1", 70, IMPORT_ERROR)], {}, "c.2.log: Fatal Python"),
        ([("b.1", 60, IMPORT_ERROR), ("b.1", 96, PEER)], {"b": died(1, 1, 96.0)}, "b.1.log: ModuleNotFoundError"),
        ([("b.1", 40, IMPORT_ERROR)], {}, None),  # of an earlier start
        ([("b.1", 60, "step 1: loss 3.2, ValueError never happened")], {}, None),
    ],
)
def test_first_error_of_repeated_starts_is_in_the_message(rundir, logs, failures, told):
    for name, second, text in logs:
        log(rundir, name, text, second=second)
    message = named(rundir, **{name: state(status=77, failures=failures.get(name)) for name in "abc"})
    assert message is not None
    assert (f"; the first error, in {told}" in message) if told else ("first error" not in message)
