"""Give programs that were written for NCCL what Gloo lacks, with the same result as one process would have.

    init_process_group("nccl"), new_group(backend="nccl") without a GPU    Gloo, and a line that says so
    reduce_scatter(…, async_op=True).get_future()                          a future, as Gloo's other collectives have

Sums and means of tensors over all ranks are exchanged in pairs, and so are all-gathers (worker/sync/pairwise.py): Gloo
itself would reduce with an all-reduce, which sends twice as much, and hardly sends while it receives. What is reduced
and scattered is sent in bf16 where that is exact, and encoded with a lossy strategy. Other reductions, and groups of
some ranks, use Gloo's all-reduce. What else torch 2.13's Gloo has, such as AVG, all-to-all and batched sends, stays as
it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

from evener.worker.script.group_checks import OWN_GROUP

if TYPE_CHECKING:
    from evener.worker.sync.pairwise import PairwiseCollectives

REDUCE_SCATTERS = ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor")
ALL_GATHERS = ("all_gather_into_tensor", "all_gather_single")


class PairwiseExchanges:
    """The exchanges in pairs of a program's collectives that all ranks take part in."""

    def __init__(self, sync: str) -> None:
        """`sync`: the strategy by which what is reduced and scattered is encoded, if it is a lossy one."""
        self._sync = sync
        self._of: list[tuple[Any, PairwiseCollectives]] = []  # process groups, and their exchanges
        self._sent_bytes: int | None = None
        self.timed: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call  # counts as communication

    def begin_update(self, optimizer: Any, *_: Any) -> None:
        """Note that a step of an optimizer begins: its calls are the same in each of its steps."""
        for _group, collectives in self._of:
            collectives.begin_update(optimizer)

    def end_update(self, optimizer: Any, *_: Any) -> None:
        """Note that a step of an optimizer has ended."""
        for _group, collectives in self._of:
            collectives.end_update(optimizer)

    def take_sent(self) -> int | None:
        """Return, once, the bytes that the newest collective sends from this rank; None if it was none in pairs."""
        sent, self._sent_bytes = self._sent_bytes, None
        return sent

    def reduce_scatter(
        self, c10d: ModuleType, group: Any, parts: list[Any], output: Any, op: Any, *, is_async: bool
    ) -> Any:
        """Return the work of a reduce-scatter; None if it is none that is exchanged in pairs."""
        is_mean, num, size = op == c10d.ReduceOp.AVG, output.numel(), group.size()
        if not (op == c10d.ReduceOp.SUM or (is_mean and output.is_floating_point())):
            return None
        if len(parts) == 1 and parts[0].numel() == num * size:
            parts = list(parts[0].reshape(size, -1))
        if len(parts) != size or any(part.numel() != num or part.dtype != output.dtype for part in parts):
            return None
        if (collectives := self._collectives(c10d, group)) is None:
            return None
        done, self._sent_bytes = collectives.reduce_scatter(parts, output, is_mean=is_mean)
        return self._to_work(c10d, done, output, is_async=is_async)

    def all_gather(self, c10d: ModuleType, group: Any, part: Any, output: Any, *, is_async: bool) -> Any:
        """Return the work of an all-gather into one tensor; None if it is none that is exchanged in pairs."""
        if not output.is_contiguous() or (collectives := self._collectives(c10d, group)) is None:
            return None
        outputs = list(output.detach().view(group.size(), *part.shape))
        done, self._sent_bytes = collectives.all_gather(part, outputs)
        return self._to_work(c10d, done, output, is_async=is_async)

    def _collectives(self, c10d: ModuleType, group: Any) -> PairwiseCollectives | None:
        """Return the exchanges among the ranks of this group; None if some ranks are not in it, or it is ours."""
        if group.size() == 1 or group.size() != c10d.get_world_size() or group.group_desc == OWN_GROUP:
            return None
        for known, collectives in self._of:
            if known is group:
                return collectives
        import torch

        from evener.core.run.roster import parse_sync
        from evener.worker.script.program_sync import ProgramGroup
        from evener.worker.sync.pairwise import PairwiseCollectives
        from evener.worker.sync.sync_factory import make_codec

        cpu = torch.device("cpu")
        timeout = group._get_backend(cpu).options._timeout
        own = c10d.new_group(
            backend="gloo", timeout=timeout, group_desc=OWN_GROUP
        )  # all ranks come here, at the same call
        ranks = ProgramGroup(group.rank(), group.size(), cpu, "gloo", own)
        self._of.append((group, PairwiseCollectives(ranks, make_codec(parse_sync(self._sync)), packs=True)))
        return self._of[-1][1]

    def _to_work(self, c10d: ModuleType, done: Future[None], output: Any, *, is_async: bool) -> Any:
        """Return the Work of an asynchronous call; wait for one that is not."""
        if is_async:
            return work_class(c10d)(done, output, self.timed)
        self.timed(done.result)()
        return True


@functools.cache
def work_class(c10d: ModuleType) -> Any:
    """Return the class of an exchange's Work: waiting for it, or for its future, raises what the exchange raised."""
    import torch

    class PairwiseWork(c10d.Work):  # type: ignore[name-defined, misc]
        def __init__(self, done: Future[None], output: Any, timed: Callable[[Callable[..., Any]], Callable[..., Any]]):
            super().__init__()
            self._done, self._output, self._timed = done, output, timed
            self._future: Any = None

        def wait(self, timeout: timedelta | None = None) -> bool:
            seconds = timeout.total_seconds() if timeout else 0.0
            self._timed(self._done.result)(seconds if seconds > 0 else None)
            return True

        def is_completed(self) -> bool:
            return self._done.done()

        def is_success(self) -> bool:
            return self._done.done() and self._done.exception() is None

        def exception(self) -> Any:
            return self._done.exception() if self._done.done() else None

        def result(self) -> list[Any]:
            return [self._output]

        def get_future(self) -> Any:
            if self._future is None:
                began: Any = torch.futures.Future()
                done, output = self._done, self._output

                def finish(_: Any) -> list[Any]:
                    done.result()  # raises
                    return [output]

                def begin(_: Any) -> None:
                    # What the program does then may wait for other exchanges: not on their thread.
                    threading.Thread(target=began.set_result, args=(None,), daemon=True).start()

                self._future = began.then(finish)
                done.add_done_callback(begin)
            return self._future

    return PairwiseWork


def complete_gloo(c10d: ModuleType, exchanges: PairwiseExchanges, *, replaces_nccl: bool) -> None:
    """Replace functions of torch.distributed.distributed_c10d by ones that also work with Gloo.

    `replaces_nccl`: no host of the run has a GPU. If one had, its ranks would wait with NCCL for others with Gloo.
    """
    for name in ("init_process_group", "new_group") if replaces_nccl else ():
        setattr(c10d, name, _without_nccl(getattr(c10d, name)))
    for name in REDUCE_SCATTERS:
        if hasattr(c10d, name):
            setattr(c10d, name, _completed_reduce_scatter(getattr(c10d, name), c10d, exchanges))
    for name in ALL_GATHERS:
        if hasattr(c10d, name):
            setattr(c10d, name, _paired_all_gather(getattr(c10d, name), c10d, exchanges))


def _without_nccl(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a group of Gloo where NCCL is asked for, and there is no GPU."""
    position = 0 if make_group.__name__ == "init_process_group" else 2

    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        backend = args[position] if position < len(args) else kwargs.get("backend")
        if isinstance(backend, str) and backend.lower() in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"):
            import torch

            if not torch.cuda.is_available():
                print(
                    f"evener: {make_group.__name__}({backend!r}): torch finds no CUDA device here, so Gloo is used",
                    file=sys.stderr,
                )
                if position < len(args):
                    args = (*args[:position], "gloo", *args[position + 1 :])
                else:
                    kwargs["backend"] = "gloo"
        return make_group(*args, **kwargs)

    return make


def _completed_reduce_scatter(
    reduce_scatter: Callable[..., Any], c10d: ModuleType, exchanges: PairwiseExchanges
) -> Callable[..., Any]:
    """Return a reduce-scatter that is exchanged in pairs, or at least has a future, on Gloo."""

    signature = inspect.signature(reduce_scatter)

    @functools.wraps(reduce_scatter)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        output, group = given.get("output"), given.get("group")
        if output is None or group == c10d.GroupMember.NON_GROUP_MEMBER:
            return reduce_scatter(*args, **kwargs)
        of_group, is_async = group or c10d._get_default_group(), bool(given.get("async_op"))
        if not _is_gloo(c10d, of_group, output) or of_group in c10d._world.pg_coalesce_state:
            return reduce_scatter(*args, **kwargs)
        parts, op = given.get("input_list", given.get("input")), given.get("op", c10d.ReduceOp.SUM)
        parts = parts if isinstance(parts, list) else [parts]
        work = exchanges.reduce_scatter(c10d, of_group, parts, output, op, is_async=is_async)
        if work is not None:
            return work if is_async else None
        if not is_async:
            return reduce_scatter(*args, **kwargs)
        import torch

        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        rank = c10d.get_rank(of_group)
        start = sum(part.numel() for part in parts[:rank]) if len(parts) > 1 else rank * output.numel()

        done: Future[None] = Future()

        def keep_part(reduced: Any) -> None:
            try:
                reduced.value()  # raises what the all-reduce raised
                with torch.inference_mode(output.is_inference()), torch.no_grad():  # this is a thread of Gloo's
                    output.copy_(whole[start : start + output.numel()].view_as(output))
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        work = c10d.all_reduce.__wrapped__(whole, op=op, group=group, async_op=True)
        work.get_future().add_done_callback(keep_part)
        return work_class(c10d)(done, output, exchanges.timed)

    return reduce


def _paired_all_gather(
    all_gather: Callable[..., Any], c10d: ModuleType, exchanges: PairwiseExchanges
) -> Callable[..., Any]:
    """Return an all-gather into one tensor that is exchanged in pairs on Gloo."""

    signature = inspect.signature(all_gather)

    @functools.wraps(all_gather)
    def gather(*args: Any, **kwargs: Any) -> Any:
        given = list(signature.bind_partial(*args, **kwargs).arguments.items())
        values = dict(given)
        group, is_async = values.get("group"), bool(values.get("async_op"))
        if len(given) < 2 or group == c10d.GroupMember.NON_GROUP_MEMBER:
            return all_gather(*args, **kwargs)
        (_, output), (_, part) = given[:2]
        of_group = group or c10d._get_default_group()
        if (
            not (_is_gloo(c10d, of_group, output) and output.dtype == part.dtype)
            or output.numel() != part.numel() * of_group.size()
            or of_group in c10d._world.pg_coalesce_state
        ):
            return all_gather(*args, **kwargs)
        work = exchanges.all_gather(c10d, of_group, part, output, is_async=is_async)
        if work is None:
            return all_gather(*args, **kwargs)
        return work if is_async else None

    return gather


def _is_gloo(c10d: ModuleType, group: Any, tensor: Any) -> bool:
    """Return whether Gloo would carry this tensor: a group can have a backend for each kind of device."""
    return tensor.device.type == "cpu" and "gloo" in c10d.get_backend(group)
