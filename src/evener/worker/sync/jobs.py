"""Where does communication of several steps each run beside computing? One job after the other, on a thread of its own.

Collectives that start from callbacks start in an order that differs from rank to rank, and then a message meets the
wrong one. Jobs run in the order in which they are submitted, which is to be the same on all ranks, and each is a
straight line: encode, send, receive, decode. On a GPU they have a stream of their own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import torch
from torch import Tensor


class Jobs:
    """A thread and what it has to do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        # A daemon: a program that fails while another rank's message is on its way does not wait for that to end.
        threading.Thread(target=self._work, name="evener-jobs", daemon=True).start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run it when all before it are done and what this thread has queued on the device is there."""
        ready = torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None

        def after_what_is_queued() -> None:
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
            job()

        done: Future[None] = Future()
        self._jobs.put((after_what_is_queued, done))
        return done

    def wait(self, going: Iterable[Future[None]]) -> None:
        """Return when these are done; what one raised is raised here."""
        for job in going:
            job.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _work(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        with torch.no_grad():
            while True:
                job, done = self._jobs.get()
                try:
                    job()
                except BaseException as error:  # raised again where somebody waits for it
                    done.set_exception(error)
                else:
                    done.set_result(None)


def keep_for_this_stream(tensor: Tensor) -> None:
    """Let nobody have its memory before what this thread has queued is done: another thread's stream made it, and on a
    GPU takes it back as soon as nobody holds it.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
