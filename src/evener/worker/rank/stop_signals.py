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
from enum import IntEnum
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# assumption: signals within it are one request, passed on by a terminal or supervisor and by torchrun
DUPLICATE_SIGNAL_S = 0.5


class StopRequest(IntEnum):
    """The request of a rank that all ranks follow between two steps; of several requests the highest wins."""

    NONE = 0
    SAVE = 1  # save a checkpoint now
    REGROUP = 2  # regroup after the next checkpoint
    LEAVE = 3  # regroup without a leaving host
    STOP = 4  # save and end the run


class StopSignals:
    """Handles SIGINT, SIGTERM and the time limit of a run, from construction until `close`.

    Created outside of the main thread it installs nothing: Python allows signal handlers in the main thread only.
    """

    def __init__(self) -> None:
        self.is_requested = False  # may also be set by callers
        self._deadline = math.inf
        self._first_signal_at: float | None = None
        self._restore_callbacks: list[Any] = []
        if threading.current_thread() is not threading.main_thread():
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._restore_callbacks += [lambda: signal.set_wakeup_fd(before), lambda: os.close(write)]
        for signum in SIGNALS:
            handler = signal.signal(signum, self._on_signal)
            self._restore_callbacks.append(
                lambda signum=signum, handler=handler: signal.signal(signum, handler or signal.SIG_DFL)
            )
        os.register_at_fork(after_in_child=self.close)  # a child process must not run these handlers
        threading.Thread(target=self._watch_pipe, args=(read,), name="evener-stopping", daemon=True).start()

    def start_time_limit(self, max_s: float | None) -> None:
        """Start the time limit of the run."""
        self._deadline = math.inf if max_s is None else time.monotonic() + max_s

    @property
    def should_stop(self) -> bool:
        """Return whether a stop was requested, or the time limit is over."""
        return self.is_requested or time.monotonic() > self._deadline

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        while self._restore_callbacks:
            self._restore_callbacks.pop()()

    def _on_signal(self, signum: int, frame: Any) -> None:
        self.is_requested = True

    def _watch_pipe(self, read: int) -> None:
        while signums := os.read(read, 64):  # empty: closed
            for signum in signums:
                if signum in SIGNALS and self._is_second_request(time.monotonic()):
                    os.write(2, b"ended at once, as asked; what was not saved is lost\n")
                    os._exit(128 + signum)
        os.close(read)

    def _is_second_request(self, now: float) -> bool:
        if self._first_signal_at is None:
            self._first_signal_at = now
        return now - self._first_signal_at >= DUPLICATE_SIGNAL_S
