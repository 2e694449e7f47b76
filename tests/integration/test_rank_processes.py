"""List all processes of a rank, from /proc or from ps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from evener.node.remote import process_table

# A rank whose thread has begun a program that has begun another one.
TREE = """
import subprocess, threading
threading.Thread(target=lambda: subprocess.run(["sh", "-c", "sleep 100 & echo up; wait"])).start()
"""


@pytest.fixture
def rank() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process.pid
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kernel_tells", [True, False])
def test_all_descendants_of_rank_are_counted(rank: int, kernel_tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {child.pid for child in psutil.Process(rank).children(recursive=True)}
    assert len(theirs) == 2
    if not kernel_tells:
        monkeypatch.setattr(process_table, "HAS_CHILD_LISTS", False)
    elif not process_table.HAS_CHILD_LISTS:
        pytest.skip("built without CONFIG_PROC_CHILDREN")
    else:
        monkeypatch.setattr(process_table, "list_processes", None)  # nobody asks
    assert sorted(process_table.process_tree(rank)) == sorted([rank, *theirs])
    assert len(process_table.children(rank)) == 1


def test_finished_rank_has_no_children() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert process_table.children(process.pid) == []
    assert process_table.tree_cpu_s(process.pid) == 0.0


@pytest.mark.skipif(not process_table.HAS_PROC, reason="compares ps with /proc")
def test_ps_and_proc_list_the_same_processes(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no /proc the same questions go to ps."""
    expected = process_table.read_process(rank)
    tree = process_table.process_tree(rank)
    monkeypatch.setattr(process_table, "HAS_PROC", False)
    monkeypatch.setattr(process_table, "HAS_CHILD_LISTS", False)
    process = process_table.read_process(rank)
    assert (process.parent, process.has_terminal) == (expected.parent, expected.has_terminal)
    assert process.command.startswith(sys.executable)
    assert sorted(process_table.process_tree(rank)) == sorted(tree)


def test_rank_is_recognized_that_was_sampled_before_it_called_exec() -> None:
    """Between fork and exec it has the environment of its launcher. The environment is then read once only."""
    becomes_rank = (
        "import os, sys; input()\n"
        "os.execve(sys.executable, [sys.executable, '-c', 'print(flush=True); input()'], {'LOCAL_RANK': '3'})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", becomes_rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        started = process_table.read_process(process.pid).start_time
        with pytest.raises(LookupError):
            process_table.local_rank(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"\n"
        assert process_table.local_rank(process.pid) == 3
        assert process_table.read_process(process.pid).start_time == started
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_table, "read_environment", lambda pid: [])
            assert process_table.local_rank(process.pid) == 3
        process.kill()
