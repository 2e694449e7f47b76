"""What the agent sees of its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from evener.node.agent import rank_processes

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
        monkeypatch.setattr(rank_processes, "HAS_PROC_CHILDREN", False)
    elif not rank_processes.HAS_PROC_CHILDREN:
        pytest.skip("built without CONFIG_PROC_CHILDREN")
    else:
        monkeypatch.setattr(psutil.Process, "children", None)  # nobody asks
    assert sorted(rank_processes._process_tree(rank)) == sorted([rank, *theirs])
    assert len(rank_processes._children(rank)) == 1


def test_finished_rank_has_no_children() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert rank_processes._children(process.pid) == []
    assert rank_processes._cpu_s(process.pid) == 0.0
