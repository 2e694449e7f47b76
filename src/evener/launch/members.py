"""How does a host leave a run that goes on, and how does it come back?"""

from __future__ import annotations

import contextlib
from typing import Any

from evener.core.errors import RunError
from evener.core.plan import Plan
from evener.core.rundir import RunDir
from evener.hosts.session import RemoteError, open_session
from evener.launch.mirror import GONE, State, host_failed
from evener.launch.ship import WORK_S

LEAVE_S = 660.0  # to finish a step, which may take minutes, and save


def leave(rundir: RunDir, plan: Plan, name: str) -> State:
    """Take a host out of a run that goes on without it; its last state. HostError where it cannot be reached."""
    host, state = plan.host(name), dict[str, Any]()
    try:
        with contextlib.closing(open_session(name, host.host)) as session:
            why = "somebody asked for it"
            for item in session.stream("runs", "leave", run=host.folder(rundir), why=why, timeout_s=LEAVE_S):
                state = item or GONE
    except RemoteError as error:
        raise host_failed(error, plan.fleet) from None
    return state


def rejoin(rundir: RunDir, plan: Plan, name: str) -> None:
    """Let a host take part again that left the run, or went down; RunError where it does take part."""
    host = plan.host(name)
    try:
        with contextlib.closing(open_session(name, host.host)) as session:
            session.call("runs", "start_again", run=host.folder(rundir), timeout_s=WORK_S)
    except RemoteError as error:
        raise RunError(f"{name}: {error.message}", hint=f"evener runs; evener logs -f {rundir}") from None
