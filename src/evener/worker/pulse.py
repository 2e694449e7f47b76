"""What is this rank doing right now? A thread of its own writes it every second: a rank that hangs cannot say it.

    RUN/host/pulse/LOCAL_RANK   {"pid", "where": "data.py:33 in read", "waits": false, "moved": 43000000}

Standard library only, so that it begins before torch is imported, which may hang itself.
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

EVERY_S = 1.0
EXCHANGES = ("torch.", "evener.worker.sync.", "evener.worker.record", "evener.worker.group")
TCP_INFO = 11  # of <linux/tcp.h>
ACKED_AND_RECEIVED = struct.Struct("=120xQQ")  # bytes, in its answer
_began = threading.Lock()


def begin_pulse() -> None:
    """Write the pulse of this process from now on, where a launcher wants to have it; once."""
    folder = os.environ.get("EVENER_PULSE")
    if folder is not None and _began.acquire(blocking=False):
        path = Path(folder) / os.environ.get("LOCAL_RANK", "0")
        threading.Thread(target=_beat, args=(path,), daemon=True, name="pulse").start()


def _beat(path: Path) -> None:
    main = threading.main_thread().ident
    told = ""
    with contextlib.suppress(OSError):  # a full disk: what it does then is told by the supervisor
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            frame = sys._current_frames().get(main or 0)
            now = json.dumps({"pid": os.getpid(), "where": where(frame), "waits": waits(frame),
                              "moved": moved()})  # fmt: skip
            if now != told:
                temporary = path.with_name(f".{path.name}")
                temporary.write_text(now)
                temporary.replace(path)
                told = now
            del frame
            time.sleep(EVERY_S)


def where(frame: FrameType | None) -> str:
    """The innermost line of Python that is neither torch's nor the standard library's.

    >>> where(sys._getframe()).endswith("in <module>")
    True
    """
    while frame is not None and _top(frame) in ("torch", *sys.stdlib_module_names) and frame.f_back is not None:
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def waits(frame: FrameType | None) -> bool:
    """Is it in what exchanges with other ranks: torch itself, but for what loads data, or our own exchanges?"""
    while frame is not None and _top(frame) in sys.stdlib_module_names and frame.f_back is not None:
        frame = frame.f_back
    name = _module(frame)
    return name.startswith(EXCHANGES) and not name.startswith("torch.utils.data")


def moved() -> int | None:
    """Bytes that others have acknowledged to this process's connections, or sent it. None where the kernel says
    nothing, where there are no connections, and where a GPU works for it: what that moves and does is not seen here.

    The figure falls when one is closed: that is a movement too.
    """
    cuda = sys.modules.get("torch.cuda")  # which may be half imported
    if sys.platform != "linux" or getattr(cuda, "is_initialized", bool)():
        return None
    total = None
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):  # no socket, or closed a moment ago; a kernel before 4.2
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        told = one.getsockopt(socket.IPPROTO_TCP, TCP_INFO, ACKED_AND_RECEIVED.size)
                        total = (total or 0) + sum(ACKED_AND_RECEIVED.unpack(told))
    return total


def _top(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).replace("__main__", "main")
