"""The first signal requests an orderly stop, and a second one ends even a hanging process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from evener.worker.rank.stop_signals import DUPLICATE_SIGNAL_S, StopSignals

from ..conftest import ENV, TIMEOUT_S, wait_until
from ..ranks import free_port
from ..tiers import exhaustively

HANGS = """
import torch, torch.distributed as dist
from evener.worker.rank.stop_signals import StopSignals

dist.init_process_group("gloo")
stopping = StopSignals()
dist.barrier()
print("here", flush=True)
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(3))  # which nobody answers
else:
    while True:
        try:
            input()  # until the test closes it
        except EOFError:
            break
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, *exhaustively(signal.SIGINT)])
def test_a_second_signal_ends_a_rank_that_hangs_in_a_collective(signum):
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HANGS],
            env=ENV | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["here\n"] * 2
        hung = ranks[0]
        wait_until(lambda: waits(hung.pid))
        hung.send_signal(signum)

        def again() -> bool:
            hung.send_signal(signum)
            return hung.poll() is not None

        wait_until(again)
        assert hung.returncode == 128 + signum
        assert hung.stderr.read().endswith("ended at once, as asked; what was not saved is lost\n")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=TIMEOUT_S)


def waits(pid: int) -> bool:
    """Is its main thread asleep? /proc says on Linux."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(") ")[2][0] == "S"
    except FileNotFoundError:
        return True


def test_duplicate_forwarded_signal_counts_once():
    stopping = StopSignals()
    try:
        assert [
            stopping._is_second_request(at)
            for at in (100.0, 100.0 + DUPLICATE_SIGNAL_S / 2, 100.0 + DUPLICATE_SIGNAL_S)
        ] == [False, False, True]
    finally:
        stopping.close()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_requests_stop_and_close_restores_handlers(signum):
    heard = []
    before = signal.signal(signum, lambda *_: heard.append("the program's own"))
    try:
        stopping = StopSignals()
        os.kill(os.getpid(), signum)
        wait_until(lambda: stopping.is_requested)
        assert heard == []
        stopping.close()
        stopping.close()  # does nothing
        os.kill(os.getpid(), signum)
        wait_until(lambda: heard == ["the program's own"])
        assert signal.set_wakeup_fd(-1) == -1
        wait_until(lambda: not any(thread.name == "evener-stopping" for thread in threading.enumerate()))
    finally:
        signal.signal(signum, before)


def test_signal_handlers_are_unchanged_outside_main_thread():
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    made = []
    thread = threading.Thread(target=lambda: made.append(StopSignals()))
    thread.start()
    thread.join()
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == handlers
    made[0].close()
    assert made[0].is_requested is False


def test_signal_ends_forked_child_and_does_not_stop_parent():
    """A worker that loads data: the program terminates it, and has not been asked to stop itself."""
    stopping = StopSignals()
    try:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"here")
            while True:
                time.sleep(60)
        assert os.read(read, 4) == b"here"
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert stopping._first_signal_at is None
        assert not stopping.is_requested
    finally:
        stopping.close()
