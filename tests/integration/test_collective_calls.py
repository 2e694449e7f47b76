"""Record collectives in a file that survives the process, and compare what ranks called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.script.call_ring import NUM_CALLS, CallRing, RankCalls, RecordedCall, read_calls
from evener.core.script.mismatch import find_laggard, find_mismatch


def calls(*operations: str, first: int = 1, has_ended: bool = False, group: str = "0") -> RankCalls:
    """Calls as "all_reduce 4", of so many elements."""
    made = []
    for number, operation in enumerate(operations, start=first):
        name, _, size = operation.rpartition(" ")
        made.append(
            RecordedCall(group=group, number=number, operation=name, num_elements=int(size), dtype="float32",
                           where=f"x.py:{number}", began=1.0)
        )  # fmt: skip
    return RankCalls(calls=made, num_calls=first - 1 + len(made), has_ended=has_ended)


def test_killed_process_leaves_its_newest_calls(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from evener.core.script.call_ring import CallRing\n"
        "ring = CallRing(Path(sys.argv[1]))\n"
        f"for i in range({NUM_CALLS} + 10): ring.end(ring.begin('0', 'all_reduce', i, 'float32', 'x.py:1'))\n"
        "ring.begin('1', 'broadcast', 7, 'bfloat16', 'x.py:2 in ' + 'f' * 200)\n"
        "os.abort()\n"
    )
    path = tmp_path / "host" / "0"
    done = subprocess.run([sys.executable, "-c", program, path], check=False, cwd=tmp_path)
    assert done.returncode == -signal.SIGABRT
    known = read_calls(path)
    assert known is not None
    assert (known.num_calls, len(known.calls), known.has_ended) == (NUM_CALLS + 11, NUM_CALLS, False)
    newest, before = known.calls[-1], known.calls[-2]
    assert (newest.group, newest.number, newest.is_pending) == ("1", 1, True)
    assert (before.number, before.num_elements, before.is_pending) == (NUM_CALLS + 10, NUM_CALLS + 9, False)
    assert newest.describe().startswith("broadcast of 7 bfloat16 at x.py:2 in ffff")


def test_ended_program_is_marked(tmp_path: Path) -> None:
    ring = CallRing(tmp_path / "0")
    ring.close()
    assert read_calls(tmp_path / "0") == RankCalls(has_ended=True)


def test_other_files_are_no_calls(tmp_path: Path) -> None:
    assert read_calls(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"evencol1")
    assert read_calls(tmp_path / "short") is None
    CallRing(tmp_path / "other")
    with (tmp_path / "other").open("r+b") as file:
        file.write(os.urandom(8))
    assert read_calls(tmp_path / "other") is None


def test_extra_collective_of_one_rank_is_named() -> None:
    """rank 0 alone evaluates: its call meets the gradients of rank 1."""
    found = find_mismatch({
        0: calls("DDP's all_reduce 55", "all_reduce 1"),
        1: calls("DDP's all_reduce 55", "DDP's all_reduce 55"),
    })  # fmt: skip
    assert found is not None
    assert (found.rank, found.other) == (0, 1)
    assert found.describe() == (
        "called all_reduce of 1 float32 at x.py:2, while rank 1 called DDP's all_reduce of 55 float32 at x.py:2"
    )


def test_rank_that_left_is_named() -> None:
    found = find_mismatch({0: calls("all_reduce 4", "all_reduce 4"), 1: calls("all_reduce 4", has_ended=True)})
    assert found is not None
    assert found.describe() == (
        "called all_reduce of 4 float32 at x.py:2, which needs all ranks, and rank 1 has ended its program"
    )


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        {0: calls("all_reduce 4")},
        {0: calls("all_reduce 4", "barrier 0"), 1: calls("all_reduce 4")},  # rank 1 computes
        {0: calls("all_gather 4"), 1: calls("all_gather 7")},  # sizes may differ
        {0: calls("all_reduce 4", first=9), 1: calls("all_reduce 7", first=1)},  # nothing to compare
        {0: calls("all_reduce 4", has_ended=True), 1: calls("all_reduce 4", has_ended=True)},
        {0: calls("all_reduce 4", group="a"), 1: calls("all_reduce 7", group="b")},
        {0: calls("DDP's all_reduce 4"), 1: calls("all_reduce 4")},
    ],
)
def test_calls_that_fit_are_no_mismatch(ranks: dict[int, RankCalls]) -> None:
    assert find_mismatch(ranks) is None


def test_laggard_is_who_called_fewest() -> None:
    ranks = {0: calls("all_reduce 4", "barrier 0"), 1: calls("all_reduce 4"), 2: RankCalls()}
    assert find_laggard(ranks) == 2
    assert find_laggard({rank: ranks[rank] for rank in (0, 1)}) == 1
    assert find_laggard({0: calls("barrier 0"), 1: calls("barrier 0")}) is None
    assert find_laggard({0: calls("barrier 0", group="a"), 1: calls("barrier 0", group="b")}) is None
