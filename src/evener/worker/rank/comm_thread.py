"""Run communication of several collectives beside computation, job by job on a thread of its own.

Collectives that start from callbacks would start in an order that differs from rank to rank, so that messages of
different collectives would be matched. Jobs run in the order in which they are submitted, which must be the same on all
ranks, and each is a straight line: encode, send, receive, decode. On a GPU the thread has its own stream.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import torch
from torch import Tensor


class CommThread:
    """A communication thread and its queue of jobs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        # A daemon: a program that fails while another rank's message is in flight does not wait for it.
        threading.Thread(target=self._run_jobs, name="evener-jobs", daemon=True).start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` after all earlier jobs, and after the work that the calling thread has queued on the device."""
        ready = torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None

        def run_when_ready() -> None:
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
            job()

        done: Future[None] = Future()
        self._jobs.put((run_when_ready, done))
        return done

    def wait(self, futures: Iterable[Future[None]]) -> None:
        """Wait until these futures are done; raise what a job raised."""
        for job in futures:
            job.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        """End the thread once it has run all jobs."""
        self._jobs.put(None)

    def _run_jobs(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
        with torch.no_grad():
            while (submitted := self._jobs.get()) is not None:
                job, done = submitted
                try:
                    job()
                except BaseException as error:  # raised again in `wait`
                    done.set_exception(error)
                else:
                    done.set_result(None)
                del submitted, job, done  # they hold buffers


def record_current_stream(tensor: Tensor) -> None:
    """Keep the memory of a tensor that another stream allocated until the current stream's queued work is done.

    Otherwise the allocator may reuse the memory as soon as the last reference to the tensor is gone.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
