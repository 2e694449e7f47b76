"""What is this rank doing right now? A thread of its own writes it every second: a rank that hangs cannot say it.

    RUN/host/pulse/RANK   {"pid", "where": "data.py:33 in read", "in_torch": true}

Standard library only, so that it begins before torch is imported, which may hang itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

EVERY_S = 1.0
_began = threading.Lock()


def begin_pulse() -> None:
    """Write the pulse of this process from now on, where a launcher wants to have it; once."""
    folder = os.environ.get("EVENER_PULSE")
    if folder is not None and _began.acquire(blocking=False):
        path = Path(folder) / os.environ.get("RANK", "0")
        threading.Thread(target=_beat, args=(path,), daemon=True, name="pulse").start()


def _beat(path: Path) -> None:
    main = threading.main_thread().ident
    told = ""
    with contextlib.suppress(OSError):  # a full disk: what it does then is told by the supervisor
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            frame = sys._current_frames().get(main or 0)
            now = json.dumps({"pid": os.getpid(), "where": where(frame), "in_torch": _in_torch(frame)})
            if now != told:
                temporary = path.with_name(f".{path.name}")
                temporary.write_text(now)
                temporary.replace(path)
                told = now
            del frame
            time.sleep(EVERY_S)


def where(frame: FrameType | None) -> str:
    """The innermost line of Python that is not torch's own.

    >>> where(sys._getframe()).endswith("in <module>")
    True
    """
    while frame is not None and _in_torch(frame) and frame.f_back is not None:
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _in_torch(frame: FrameType | None) -> bool:
    return frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"
