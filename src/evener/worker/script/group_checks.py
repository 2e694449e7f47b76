"""Check how a program of several ranks forms its process group, and whether it uses it.

Each mistake here trains a separate model on every rank, or waits half an hour for a rendezvous that nobody serves:

    a group of the program's own ranks    mp.spawn or Process inside of a rank
    a rendezvous of the program's own     MASTER_ADDR or MASTER_PORT set in the program, or init_method=tcp://…
    no process group                      optimizer steps are taken, and the ranks never met
    no collective                         they met, and exchange nothing (a warning: it may be meant)
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from evener.worker.record.heartbeat import current_line
from evener.worker.script.report import end_program, warn

STEPS_WITHOUT_GROUP = 3  # optimizer steps after which a rank without a process group is an error
STEPS_WITHOUT_COLLECTIVE = 20
RENDEZVOUS_TIMEOUT_S = 12.0  # a rendezvous of the program's own is an error when it has taken this long
RANK_PID_VARIABLE = "EVENER_RANK_PID"  # the process that is the rank; those that it starts inherit it
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
INDEPENDENT = "evener launch --independent runs programs whose ranks have nothing to do with each other"
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
        self._num_steps = 0
        self._lock = threading.Lock()
        _trace_assignments(self._set_at)

    def check_groups(self, c10d: ModuleType) -> None:
        """Check each call of init_process_group in torch.distributed.distributed_c10d."""
        self._c10d = c10d
        init: Callable[..., None] = c10d.init_process_group

        @functools.wraps(init)
        def checked_init(*args: Any, **kwargs: Any) -> Any:
            method = args[1] if len(args) > 1 else kwargs.get("init_method")
            own = self._own_rendezvous(method) if kwargs.get("store") is None else None
            if os.environ.get(RANK_PID_VARIABLE) != str(os.getpid()):
                end_program(
                    f"the program starts processes of its own and makes a process group of them, "
                    f"at {current_line(sys._getframe(1))}",
                    hint=f"{OWN_RANKS_HINT}; {INDEPENDENT}",
                )
            if own is None:
                return init(*args, **kwargs)
            with _ended_after(RENDEZVOUS_TIMEOUT_S, own, self._rendezvous_hint(method)):
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

    def _num_collectives(self) -> int:
        """Return the collectives that all process groups of this rank have run, by torch's own count."""
        assert self._c10d is not None
        return sum(group._get_sequence_number_for_group() for group in self._c10d._world.pg_map)

    def _own_rendezvous(self, method: Any) -> str | None:
        """Return what is wrong with the rendezvous if it is not the launcher's."""
        if isinstance(method, str) and method not in ("", "env://"):
            return f"the program chooses its own rendezvous, {method}"
        changed = [name for name in ADDRESS_VARIABLES if os.environ.get(name) != self._launched[name]]
        if not changed:
            return None
        names = " and ".join(changed)
        lines = {self._set_at[name] for name in changed if name in self._set_at}
        at = f", at {' and '.join(sorted(lines))}" if lines else ""
        values = ":".join(os.environ.get(name, "") for name in ADDRESS_VARIABLES)
        return f"the program sets {names} itself{at}, and nobody serves {values}"

    @staticmethod
    def _rendezvous_hint(method: Any) -> str:
        if isinstance(method, str) and method not in ("", "env://"):
            return 'leave init_method out, or "env://": evener has set MASTER_ADDR and MASTER_PORT'
        return "remove that line: evener has set MASTER_ADDR and MASTER_PORT on every rank"


class _ended_after:  # noqa: N801  used as a function
    """End the program with an error if a block takes longer than this."""

    def __init__(self, timeout_s: float, error: str, hint: str) -> None:
        self._timer = threading.Timer(timeout_s, end_program, (error,), {"hint": hint})
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _trace_assignments(set_at: dict[str, str]) -> None:
    """Note in which line the program sets a variable of the rendezvous."""
    environ: Any = type(os.environ)
    set_item: Callable[..., None] = environ.__setitem__

    def traced_set_item(self: Any, key: Any, value: Any) -> None:
        if key in ADDRESS_VARIABLES:
            set_at[key] = current_line(sys._getframe(1))
        set_item(self, key, value)

    environ.__setitem__ = traced_set_item
