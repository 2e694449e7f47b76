"""Heartbeat: a thread looks every second at what this rank is doing, and writes a file if that has changed.

    RUN/host/pulse/LOCAL_RANK   {"pid", "where": "token_blocks.py:33 in read", "waits": false, "moved": 43000000}

So the hang detector can say where a rank hangs. It uses the standard library only, so that it can start before torch
is imported, which may itself hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from evener.core.base.file_io import write_atomic

INTERVAL_S = 1.0
LIBRARIES = sys.stdlib_module_names | {"torch"}
COLLECTIVE_MODULES = (
    "torch.",
    "evener.worker.sync.",
    "evener.worker.record.step_recorder",
    "evener.worker.rank.process_groups",
    "evener.worker.script.",
)
TCP_INFO = 11  # of <linux/tcp.h>
ACKED_AND_RECEIVED = struct.Struct("=120xQQ")  # tcpi_bytes_acked and tcpi_bytes_received, in the result
_started = threading.Lock()


def start_heartbeat() -> None:
    """Start the heartbeat of this process if EVENER_PULSE names a folder for it; further calls do nothing."""
    folder = os.environ.get("EVENER_PULSE")
    if folder is not None and _started.acquire(blocking=False):
        path = Path(folder) / os.environ.get("LOCAL_RANK", "0")
        threading.Thread(target=_write_heartbeats, args=(path,), daemon=True, name="pulse").start()


def _write_heartbeats(path: Path) -> None:
    main = threading.main_thread().ident
    written = ""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with contextlib.suppress(OSError):  # a full disk, which the supervisor reports: the next second may have room
            frame = sys._current_frames().get(main or 0)
            text = json.dumps({"pid": os.getpid(), "where": current_line(frame), "waits": is_in_collective(frame),
                               "moved": transferred_bytes()})  # fmt: skip
            del frame
            if text != written:
                write_atomic(path, text.encode(), is_durable=False)
                written = text
        time.sleep(INTERVAL_S)


def current_line(frame: FrameType | None) -> str:
    """Return the innermost line of Python that is not in torch, in the standard library or in a wrapper of ours.

    >>> current_line(sys._getframe()).endswith("in <module>")
    True
    """
    while (
        frame is not None
        and frame.f_back is not None
        and (
            _top_package(frame) in LIBRARIES
            or _module_name(frame).startswith("evener.worker.script.")  # wraps the program's calls of torch
        )
    ):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def is_in_collective(frame: FrameType | None) -> bool:
    """Return whether the innermost frame outside of the standard library is in torch or in our own collectives."""
    while frame is not None and _top_package(frame) in sys.stdlib_module_names and frame.f_back is not None:
        frame = frame.f_back
    name = _module_name(frame)
    return name.startswith(COLLECTIVE_MODULES) and not name.startswith("torch.utils.data")


def transferred_bytes() -> int | None:
    """Return the bytes that peers have acknowledged or sent on this process's TCP connections.

    None if the kernel does not report them, if there are no connections, or if the process uses a GPU, whose transfers
    and work are not visible here. The figure falls when a connection is closed: that is a change too.
    """
    cuda = sys.modules.get("torch.cuda")  # it may be half imported
    if sys.platform != "linux" or getattr(cuda, "is_initialized", bool)():
        return None
    if socket.getdefaulttimeout() is not None:  # a duplicate would be made non-blocking, and with it the socket itself
        return None
    total = None
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):  # not a socket, or just closed; Linux before 4.2
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                        info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, ACKED_AND_RECEIVED.size)
                        total = (total or 0) + sum(ACKED_AND_RECEIVED.unpack(info))
    return total


def _top_package(frame: FrameType) -> str:
    return _module_name(frame).partition(".")[0]


def _module_name(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).replace("__main__", "main")
