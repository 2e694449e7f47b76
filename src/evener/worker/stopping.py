"""Handle SIGINT, SIGTERM and the time limit: stop after the current step, or at once.

The first SIGINT or SIGTERM requests a stop: the step is finished and saved. A second one ends the process at once, even
where its main thread never returns to the interpreter: in a collective that no other rank answers, Python runs no
handlers.

    C's handler    signal 1 → pipe                signal 2 → pipe
    watcher                      records the time               os._exit
    main thread    in all_reduce, without the interpreter's lock, for ever
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 0.5  # assumption: signals within it are one request, passed on by a terminal or supervisor and by torchrun


class Stopping:
    """Installs the signal handling above until `close`.

    Created outside of the main thread it installs nothing: Python allows signal handlers in the main thread only.
    """

    def __init__(self) -> None:
        self.wanted = False  # may also be set by callers
        self._ends = math.inf
        self._first: float | None = None
        self._undo: list[Any] = []
        if threading.current_thread() is not threading.main_thread():
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._undo += [lambda: signal.set_wakeup_fd(before), lambda: os.close(write)]
        for signum in SIGNALS:
            handler = signal.signal(signum, self._want)
            self._undo.append(lambda signum=signum, handler=handler: signal.signal(signum, handler or signal.SIG_DFL))
        os.register_at_fork(after_in_child=self.close)  # a child process must not run these handlers
        threading.Thread(target=self._watch, args=(read,), name="evener-stopping", daemon=True).start()

    def begin(self, max_s: float | None) -> None:
        """Start the time limit of the run."""
        self._ends = math.inf if max_s is None else time.monotonic() + max_s

    @property
    def is_due(self) -> bool:
        """Whether a stop was requested, or the time limit is over."""
        return self.wanted or time.monotonic() > self._ends

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        while self._undo:
            self._undo.pop()()

    def _want(self, signum: int, frame: Any) -> None:
        self.wanted = True

    def _watch(self, read: int) -> None:
        while signums := os.read(read, 64):  # empty: closed
            for signum in signums:
                if signum in SIGNALS and self._is_second(time.monotonic()):
                    os.write(2, b"ended at once, as asked; what was not saved is lost\n")
                    os._exit(128 + signum)
        os.close(read)

    def _is_second(self, now: float) -> bool:
        if self._first is None:
            self._first = now
        return now - self._first >= ECHO_S
