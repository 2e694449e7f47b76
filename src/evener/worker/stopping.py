"""Who asked this rank to stop, and how urgently? Or is its time over?

The first SIGINT or SIGTERM asks: the step is finished and saved. A second one ends the process at once, even where its
main thread never returns to the interpreter: in a collective that no other rank answers, Python runs no handlers.

    C's handler    signal 1 → pipe                signal 2 → pipe
    watcher                      notes the time                 os._exit
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
ECHO_S = 0.5  # assumption: within this it is one request, passed on by a terminal or a process manager and by torchrun


class Stopping:
    """From its making to `close`, SIGINT and SIGTERM mean what is said above.

    Made outside of the main thread it leaves signals alone: Python allows no more there.
    """

    def __init__(self) -> None:
        self.wanted = False  # may be set by anybody
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
        os.register_at_fork(after_in_child=self.close)  # a child's signals are not ours, nor ours to hear
        threading.Thread(target=self._watch, args=(read,), name="evener-stopping", daemon=True).start()

    def begin(self, max_s: float | None) -> None:
        """The time that a run has begins now."""
        self._ends = math.inf if max_s is None else time.monotonic() + max_s

    @property
    def is_due(self) -> bool:
        """Was this rank asked, or is its time over?"""
        return self.wanted or time.monotonic() > self._ends

    def close(self) -> None:
        """Give signals back to whom they belonged."""
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
