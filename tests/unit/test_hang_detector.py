"""Name the rank that holds a run up, and never one that works or waits."""

from __future__ import annotations

import random

import pytest

from evener.core.run.hang_detector import (
    DISK_WAIT_AFTER_S,
    HANG_AFTER_S,
    UNREACHABLE_AFTER_S,
    HangDetector,
    ProcessSample,
    describe_hang,
)

COMPUTES = {"state": "R", "rate": 0.9, "where": "model.py:30 in forward"}
WAITS = {"state": "S", "rate": 0.003, "where": "loop.py:57 in train", "is_waiting": True}
WAITS_IN_EXCHANGE = {"state": "S", "rate": 0.01, "where": "comm_thread.py:43 in wait", "is_waiting": True}
STOPPED = {"state": "T", "rate": 0.0, "where": "model.py:30 in forward"}
DISK = {"state": "D", "rate": 0.001, "where": "checkpointer.py:120 in save"}
SLEEPS = {"state": "S", "rate": 0.001, "where": "token_blocks.py:9 in read"}
TWO = {"a": 1, "b": 1}
AGENT = {"state": "S", "rate": 0.01}


def watched(**ranks: dict) -> HangDetector:
    """A minute in which nothing changes: every second a look at each host, of which each has a clock of its own."""
    watch = HangDetector(TWO)
    for second in range(90):
        for number, (host, what) in enumerate(ranks.items()):
            watch.observe(host, 1000.0 * number + second, {number: look(what, second), None: look(AGENT, second)})
    return watch


def look(what: dict, second: float, pid: int = 7) -> ProcessSample:
    facts = {name: value for name, value in what.items() if name != "rate"}
    return ProcessSample(pid=pid, cpu_s=100 + what["rate"] * second, **facts)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (COMPUTES, COMPUTES, None),
        (COMPUTES, WAITS, None),  # a long step, a long evaluation
        (WAITS, STOPPED, "rank 1 on b is stopped, by a signal or a debugger"),
        (STOPPED, COMPUTES, "rank 0 on a is stopped, by a signal or a debugger"),
        (WAITS, DISK, "rank 1 on b waits for its disk, in checkpointer.py:120 in save"),
        (SLEEPS, WAITS, "rank 0 on a does nothing, in token_blocks.py:9 in read, and the others wait for it"),
        (SLEEPS, SLEEPS, None),  # they begin, or wait for what both wait for
        (SLEEPS, COMPUTES, None),
        (WAITS, WAITS, None),  # a slow link
        (
            SLEEPS,
            WAITS_IN_EXCHANGE,
            "rank 0 on a does nothing, in token_blocks.py:9 in read, and the others wait for it",
        ),
        (
            WAITS | {"moved_bytes": 7},
            WAITS | {"moved_bytes": 8},
            "rank 1 on b waits in loop.py:57 in train, as all others do, and nothing travels between them",
        ),
        (
            WAITS | {"moved_bytes": 7},
            WAITS_IN_EXCHANGE | {"moved_bytes": 8},
            "rank 1 on b waits in comm_thread.py:43 in wait, others in loop.py:57 in train, and nothing travels "
            "between them",
        ),
        (WAITS | {"moved_bytes": 7}, WAITS, None),
        (WAITS | {"moved_bytes": 7}, COMPUTES | {"moved_bytes": 8}, None),
        (AGENT, AGENT, None),  # a script without a pulse, of which nothing is known
    ],
)
def test_hang_names_blocking_rank(a, b, expected):
    hang = watched(a=a, b=b).detect_hang()
    assert (hang and describe_hang(hang)) == expected


def test_stopped_launcher_is_named():
    watch = HangDetector(TWO)
    for second in range(20):
        watch.observe("a", second, {0: look(WAITS, second), None: look(STOPPED, second, pid=42)})
    hang = watch.detect_hang()
    assert hang is not None
    assert describe_hang(hang) == "the launcher on a is stopped, by a signal or a debugger"
    assert hang.fix == "on a: kill -CONT 42"


@pytest.mark.parametrize(
    ("what", "after_s"), [(STOPPED, HANG_AFTER_S), (DISK, DISK_WAIT_AFTER_S), (SLEEPS, HANG_AFTER_S)]
)
def test_hang_is_reported_after_its_timeout(what, after_s):
    """Both wait for the same thing before, each for its own time: only the last stretch counts."""
    watch, first = HangDetector(TWO), None
    for tenth in range(1200):
        second = tenth / 10
        b = (
            look(COMPUTES, second)
            if second < 30
            else ProcessSample(pid=7, cpu_s=127, **{k: v for k, v in what.items() if k != "rate"})
        )
        watch.observe("a", second, {0: look(WAITS, second)})
        watch.observe("b", second, {1: b})
        if first is None and watch.detect_hang() is not None:
            first = second
    assert first == pytest.approx(30 + after_s, abs=0.3)


def test_hang_is_cleared_when_rank_progresses():
    watch = watched(a=WAITS, b=STOPPED)
    assert watch.detect_hang() is not None
    watch.observe("b", 1061.0, {1: look(COMPUTES, 61)})
    assert watch.detect_hang() is None


def test_healthy_busy_runs_report_no_hang():
    """Steps of 0.1 to 30 s, looks that come late, ranks that wait for the slowest: twenty runs of ten minutes."""
    for seed in range(20):
        draw = random.Random(seed)
        step_s = 10 ** draw.uniform(-1, 1.5)
        watch, cpu = HangDetector(TWO), [0.0, 0.0]
        second = 0.0
        while second < 600:
            took = draw.choice([0.1, 1.0, 3.0])
            second += took
            for rank, (host, load) in enumerate((("a", 0.3), ("b", 0.9))):
                is_waiting = second % step_s > step_s * load
                cpu[rank] += 0.001 if is_waiting else took * draw.uniform(0.05, 1)
                state = "S" if is_waiting else draw.choice("RRRD")
                seen = ProcessSample(
                    pid=1, state=state, cpu_s=cpu[rank], where="loop.py:1 in train", is_waiting=is_waiting
                )
                watch.observe(host, second, {rank: seen})
            assert watch.detect_hang() is None


def test_ranks_hang_only_when_no_bytes_move():
    """A slow link for a minute, then nothing; the one that is where only it waits is named."""
    watch = HangDetector({"a": 2, "b": 1})
    for second in range(100):
        told = {
            "state": "S",
            "is_waiting": True,
            "pid": 7,
            "cpu_s": 0.01 * second,
            "moved_bytes": 10**6 + 40 * min(second, 60),
        }
        watch.observe("a", second, {rank: ProcessSample(where="step.py:3 in sum", **told) for rank in (0, 1)})
        watch.observe("b", 500.0 + second, {2: ProcessSample(where="save.py:4 in gather", **told)})
        hang = watch.detect_hang()
        assert (hang is not None) == (second - 60 >= HANG_AFTER_S), second
    assert (hang.host, hang.rank, hang.cause) == ("b", 2, "crossed")


def test_rank_that_resumes_computing_is_busy_at_once():
    """Half an hour at a barrier, for the other's evaluation; then it computes, and the other waits."""
    watch = HangDetector(TWO)
    for second in range(1800):
        watch.observe("a", second, {0: look(COMPUTES, second)})
        watch.observe("b", second, {1: look(WAITS, second)})
        assert watch.detect_hang() is None
    for second in range(1800, 1900):
        watch.observe(
            "a", second, {0: ProcessSample(pid=7, cpu_s=1720, state="S", where="loop.py:57 in train", is_waiting=True)}
        )
        watch.observe(
            "b",
            second,
            {1: ProcessSample(pid=7, cpu_s=105.4 + 0.9 * (second - 1800), state="R", where="model.py:3 in up")},
        )
        assert watch.detect_hang() is None


def test_unobservable_ranks_are_not_reported_as_hung():
    """A host without /proc, one that is not reached: it may well compute."""
    watch = HangDetector({"a": 2, "b": 1})
    for second in range(60):
        watch.observe("a", second, {0: look(WAITS, second), 1: look(SLEEPS, second)})
    assert watch.detect_hang() is None
    assert not watch.has_sampled_all_ranks


def test_unreachable_host_is_reported_only_when_others_wait():
    """Nothing that they sent need be lost. A rank that computes waits for nobody."""
    for other, expected in (
        (WAITS, "a waits, and b cannot be reached: it is off, or a link is down"),
        (COMPUTES, None),
    ):
        watch = HangDetector(TWO)
        for second in range(30):
            watch.observe("a", second, {0: look(other, second)})
            watch.observe("b", second, {1: look(WAITS, second)})
        watch.mark_unreachable("b")
        hang = watch.detect_hang()
        assert (hang and describe_hang(hang)) == expected
        watch.observe("b", 31, {1: look(WAITS, 31)})
        assert watch.detect_hang() is None


def test_host_that_acknowledges_nothing_is_reported():
    """Whatever the ranks look like; not for a moment's loss, and not of machines that have no part in the run."""
    watch = HangDetector(TWO, {"10.0.0.1": "a", "10.0.0.2": "b"})
    for second in range(60):
        stuck = ["10.0.0.2", "192.168.7.7"] if second in (3, 4) or second >= 30 else ["192.168.7.7"]
        watch.observe("a", second, {0: look(WAITS, second)}, stuck)
        watch.observe("b", 7000 + second, {1: look(COMPUTES, second)})
        hang = watch.detect_hang()
        assert (hang is not None) == (second >= 30 + UNREACHABLE_AFTER_S)
    assert hang is not None
    assert (hang.host, hang.peer, hang.cause) == ("a", "b", "cut-off")
    assert describe_hang(hang).startswith("a gets no acknowledgements from b")
    watch.observe("a", 60, {0: look(WAITS, 60)})
    assert watch.detect_hang() is None


def test_removed_host_does_not_cause_hang():
    """The others go on without b: neither that it is off, nor that it answers nothing, holds anybody up."""
    watch = HangDetector({"a": 1, "b": 1, "c": 1}, {"10.0.0.2": "b"})
    watch.mark_unreachable("b")
    watch.set_members(["a", "c"])
    watch.mark_unreachable("b")
    for second in range(60):
        watch.observe("a", second, {0: look(WAITS, second)}, ["10.0.0.2"])
        watch.observe("c", second, {2: look(WAITS, second)})
    assert watch.detect_hang() is None
    assert watch.has_sampled_all_ranks
    for second in range(60, 120):
        watch.observe("a", second, {0: look(WAITS, second)}, ["10.0.0.2"])
        watch.observe("c", second, {2: look(SLEEPS, second)})
    hang = watch.detect_hang()
    assert hang is not None
    assert describe_hang(hang) == "rank 2 on c does nothing, in token_blocks.py:9 in read, and the others wait for it"
