"""Ends what a test process leaves behind, however it ended: this program, beside each, waits for it to be gone.

    python tests/guard.py MARK <&pipe-from-the-test-process

All that tests start has MARK in its environment, also what detaches itself from them. What runs in a lab goes with it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

VARIABLE = "EVENER_TEST_PROCESS"
MEMORY_DISK = Path("/dev/shm")
ROOM_BYTES, AVAILABLE_BYTES = 4 << 30, 8 << 30  # what temporary files may need of it, and of the memory
MARK = f"test-{os.getpid()}"  # of the test process that imports this
WITHIN_S = 30.0


def start() -> subprocess.Popen[bytes]:
    """Watch over this process. Call it before anything is started."""
    os.environ[VARIABLE] = MARK
    argv = [sys.executable, __file__, MARK]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)


def use_memory_disk() -> None:
    """Put temporary files into memory where there is room, unless TMPDIR is set.

    evener flushes what must survive a power loss, and tests remove what they wrote: on a disk, both can take
    milliseconds a file. torch's cache of compiled code stays where it always is, without the compiled headers, which
    torch keeps in the temporary folder (149 MB). Call it before any temporary folder is chosen.
    """
    if "TMPDIR" not in os.environ and MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > ROOM_BYTES \
            and psutil.virtual_memory().available > AVAILABLE_BYTES:  # fmt: skip
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
        os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
        os.environ["TMPDIR"], tempfile.tempdir = str(MEMORY_DISK), None


def log_dir(mark: str = MARK) -> Path:
    """Return the folder for logs of the ranks that a test process starts; without one, each torchrun leaves its own."""
    return Path(tempfile.gettempdir()) / f"evener-{mark}"


def marked(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment, but for this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{VARIABLE}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def clean(mark: str) -> None:
    """End the labs and the processes of a test process that is gone, and remove its folder."""
    from evener.lab import emulated_lab, state

    deadline = time.monotonic() + WITHIN_S
    pids = {*marked(mark)}
    of_lab = {name: {one.pid for one in state.find_processes(state.labs_root() / name)} for name in state.lab_names()}
    labs = [name for name, of_this in of_lab.items() if name.startswith(f"{mark}-") or pids & of_this]
    while pids and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        pids = {*marked(mark)}
    for name in labs:
        emulated_lab.take_down(name)
    shutil.rmtree(log_dir(mark), ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    clean(sys.argv[1])
