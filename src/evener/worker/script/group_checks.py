"""Check how a program of several ranks forms its process group, and whether it uses it.

Each mistake here trains a separate model on every rank, or waits half an hour for a rendezvous that nobody serves:

    a group of the program's own ranks    mp.spawn or Process inside of a rank, with numbers that the launcher gave out
    a rendezvous of the program's own     MASTER_ADDR or MASTER_PORT set in the program, or init_method=tcp://…
    no process group                      optimizer steps are taken, and the ranks never met
    no collective                         they met, and exchange nothing (a warning: it may be meant)
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from evener.worker.record.heartbeat import current_line
from evener.worker.script.report import end_program, warn

STEPS_WITHOUT_GROUP = 3  # optimizer steps after which a rank without a process group is an error
STEPS_WITHOUT_COLLECTIVE = 20
CONNECT_TIMEOUT_S = 2.0
RENDEZVOUS_TIMEOUT_S = 11.0  # a rendezvous of the program's own is an error when it has taken this long
RANK_PID_VARIABLE = "EVENER_RANK_PID"  # the process that is the rank; those that it starts inherit it
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
OWN_GROUP = "evener"  # describes a process group that evener makes among the program's
INDEPENDENT = "evener launch --independent -- … runs programs whose ranks have nothing to do with each other"
OWN_RANKS_HINT = (
    'remove mp.spawn, and use rank = int(os.environ["RANK"]), world_size = int(os.environ["WORLD_SIZE"]): evener has '
    "started one process per rank"
)


class GroupChecks:
    """The checks of one rank."""

    def __init__(self) -> None:
        self._launched = {name: os.environ.get(name) for name in ADDRESS_VARIABLES}
        self._set_at: dict[str, str] = {}  # where the program set a variable of the rendezvous
        self._world_size, self._local_world_size = (
            int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        self._c10d: ModuleType | None = None
        self.num_recorded: Callable[[], int] | None = None  # returns how many collectives the program has called
        self._num_steps = 0
        self._lock = threading.Lock()
        _trace_assignments(self._set_at)

    def check_groups(self, c10d: ModuleType) -> None:
        """Check each call of init_process_group in torch.distributed.distributed_c10d."""
        self._c10d = c10d
        init: Callable[..., None] = c10d.init_process_group

        @functools.wraps(init)
        def checked_init(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(init).bind_partial(*args, **kwargs).arguments
            address = None if given.get("store") is not None else self._own_address(given.get("init_method"))
            line, is_child = current_line(sys._getframe(1)), os.environ.get(RANK_PID_VARIABLE) != str(os.getpid())
            children = f"the program starts processes of its own and makes a process group of them, at {line}"
            if is_child and address is None and given.get("store") is None and given.get("rank", -1) >= 0:
                end_program(children, hint=f"{OWN_RANKS_HINT}; {INDEPENDENT}")  # a rank of this number exists already
            if address is None:
                return init(*args, **kwargs)
            error, hint = (children, OWN_RANKS_HINT) if is_child else self._describe_own_rendezvous(given, line)
            with _Deadline(RENDEZVOUS_TIMEOUT_S, address, f"{error}: nobody serves {address}", hint):
                return init(*args, **kwargs)

        setattr(c10d, "init_process_group", checked_init)  # noqa: B010  the type checker knows no names of it

    def after_optimizer_step(self, *_: Any) -> None:
        """Count an optimizer step of any optimizer, and check the group after some."""
        if self._num_steps >= STEPS_WITHOUT_COLLECTIVE or self._world_size == 1:
            return
        with self._lock:
            self._num_steps += 1
            num_steps = self._num_steps
        has_group = self._c10d is not None and self._c10d.is_initialized()
        if num_steps == STEPS_WITHOUT_GROUP and not has_group:
            end_program(
                f"{num_steps} optimizer steps were taken, and the {self._world_size} ranks have no process group: each "
                "trains a model of its own",
                hint='call torch.distributed.init_process_group("gloo") before the model is made, also where there is '
                f"no CUDA, and average gradients over the ranks; {INDEPENDENT}",
            )
        is_first = os.environ.get("RANK") == "0"
        if num_steps == STEPS_WITHOUT_COLLECTIVE and has_group and is_first and self._num_collectives() == 0:
            warn(
                f"{num_steps} optimizer steps were taken, and the ranks have exchanged no tensor: each trains a model "
                "of its own",
                hint="wrap the model: torch.nn.parallel.DistributedDataParallel(model)",
            )

    def _num_collectives(self) -> int | None:
        """Return the collectives that this rank has called or that its groups have counted; None: not known."""
        assert self._c10d is not None
        try:
            counted = sum(group._get_sequence_number_for_group() for group in self._c10d._world.pg_map)
        except RuntimeError:  # a backend that does not count
            return None
        return counted + (self.num_recorded() if self.num_recorded is not None else 0)

    def _own_address(self, method: Any) -> str | None:
        """Return HOST:PORT of a rendezvous that is not the launcher's; None: it is, or it needs no server."""
        if isinstance(method, str) and method not in ("", "env://"):
            parts = urlsplit(method)
            return f"{parts.hostname}:{parts.port}" if parts.scheme == "tcp" and parts.port else None
        if all(os.environ.get(name) == self._launched[name] for name in ADDRESS_VARIABLES):
            return None
        return ":".join(os.environ.get(name, "") for name in ADDRESS_VARIABLES)

    def _describe_own_rendezvous(self, given: Mapping[str, Any], line: str) -> tuple[str, str]:
        """Return what is wrong with a rendezvous of the program's own, and the remedy."""
        method = given.get("init_method")
        if isinstance(method, str) and method not in ("", "env://"):
            return (
                f"the program chooses its own rendezvous, at {line}",
                'leave init_method out, or "env://": evener has set MASTER_ADDR and MASTER_PORT',
            )
        changed = [name for name in ADDRESS_VARIABLES if os.environ.get(name) != self._launched[name]]
        lines = {self._set_at[name] for name in changed if name in self._set_at}
        at = f", at {' and '.join(sorted(lines))}" if lines else ""
        hint = "remove that line: evener has set MASTER_ADDR and MASTER_PORT on every rank"
        return f"the program sets {' and '.join(changed)} itself{at}", hint


class _Deadline:
    """End the program with an error if a block takes longer than this and nobody listens on an address."""

    def __init__(self, timeout_s: float, address: str, error: str, hint: str) -> None:
        self._address, self._error, self._hint = address, error, hint
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError):
            end_program(self._error, self._hint)


def _trace_assignments(set_at: dict[str, str]) -> None:
    """Note in which line the program sets a variable of the rendezvous."""
    environ: Any = type(os.environ)
    set_item: Callable[..., None] = environ.__setitem__

    def traced_set_item(self: Any, key: Any, value: Any) -> None:
        if key in ADDRESS_VARIABLES:
            set_at[key] = current_line(sys._getframe(1))
        set_item(self, key, value)

    environ.__setitem__ = traced_set_item
