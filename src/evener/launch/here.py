"""How does a run on this machine alone go? As on a fleet of one host, with the same supervisor, logs and sentences.

    with this_machine_connected() as sessions:
        prepared = prepare_here(sessions, rundir, ranks=2)
        plan, _ = plan_training(prepared, resolved, prepared.roster(resolved), resume=False)
        stay_with(rundir, plan, sessions, observe)

What differs is the reach: no ssh, no look at the network, nothing to send or to copy, for the run's folder is the run
directory. And as people expect of a local program the run ends with the one that started it: Ctrl-C and SIGTERM let
the ranks finish their step and save, a second one ends them at once, and when this program is killed, or its terminal
closed, the supervisor sees its lock go and does as after one Ctrl-C. With --detach the run is left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from evener.core.decoding import from_tree
from evener.core.errors import EvenerError, UsageError
from evener.core.fleet import DEFAULT_WORKDIR, Fleet, Host
from evener.core.machine import this_machine
from evener.core.plan import Plan
from evener.core.rundir import RunDir
from evener.hosts.facts import Devices
from evener.hosts.session import Sessions, connect
from evener.launch.commands import Place
from evener.launch.fleet import Prepared, start, stop
from evener.launch.follow import Observer, follow
from evener.launch.mirror import Mirror, State

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def this_machine_connected() -> Iterator[Sessions]:
    """A session with this machine, under the name that runs call it by."""
    with connect(Fleet(hosts={this_machine().host: Host(address="local")})) as (sessions, errors):
        for error in errors.values():
            raise error
        yield sessions


def prepare_here(sessions: Sessions, rundir: RunDir, *, ranks: int | None, threads: int | None = None,
                 run_id: str | None = None, cwd: Path | None = None) -> Prepared:  # fmt: skip
    """This machine as the only host of a run, its programs to be started in `cwd` [the current folder].

    Of several `ranks` each has a GPU of its own, or all are on the processor; None: one a GPU, else one.
    """
    name = this_machine().host
    devices = from_tree(sessions[name].call("facts", "devices"), Devices)
    gpus = _visible(devices.gpus) if _torch_has_cuda() else []
    on_processor = ranks is not None and ranks > len(gpus)
    place = Place(
        name=name,
        host=Host(address="local", ranks=ranks, threads=threads, devices="cpu" if on_processor else "auto"),
        address=LOOPBACK,
        interface=next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
        python=sys.executable,
        workdir=str(Path(DEFAULT_WORKDIR).expanduser()),
        run=str(rundir.path.absolute()),
        cwd=str(cwd or Path.cwd()),
        is_here=True,
        cores=devices.cores,
        gpus=gpus,
        gpus_have_bf16=devices.gpus_have_bf16,
        has_bf16=devices.has_bf16,
    )
    return Prepared(id=run_id or secrets.token_hex(6), places=[place], port=0, findings=[])


def stay_with(rundir: RunDir, plan: Plan, sessions: Sessions, observe: Observer,
              on_change: Callable[[Mirror], None] = lambda mirror: None) -> dict[str, State]:  # fmt: skip
    """Start a run that ends with this program, and follow it to its end: its last states, by host.

    A training that never began, because of what was asked for or because it was stopped, leaves no directory.
    """
    is_new = not rundir.path.exists()

    def forget() -> None:
        if is_new and plan.kind == "train" and not rundir.is_run():
            shutil.rmtree(rundir.path, ignore_errors=True)

    with start(rundir, plan, sessions, attached=True), _ending_it_on_signals(rundir, plan):
        try:
            ended = follow(rundir, plan, observe, lambda host: None, on_change)
        except EvenerError as error:
            if error.exit_status == UsageError.exit_status:
                forget()
            raise
    if any(state.get("stopped") for state in ended.values()):
        forget()
    return ended


@contextlib.contextmanager
def _ending_it_on_signals(rundir: RunDir, plan: Plan) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the ranks to save and leave; a second one ends them at once."""
    asked = 0

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked == 1 and plan.grace_s:
            print("stopping: the step is finished and saved first; once more ends it at once", file=sys.stderr)
        now = asked > 1
        threading.Thread(target=stop, args=(rundir, plan), kwargs={"now": now}, daemon=True).start()

    previous: dict[int, Any] = {signum: signal.signal(signum, ask) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _visible(gpus: list[str]) -> list[str]:
    """Those that CUDA shows to programs started from here.   [CUDA_VISIBLE_DEVICES]"""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return gpus
    return gpus[: len([word for word in told.split(",") if word.strip() and not word.strip().startswith("-")])]


def _torch_has_cuda() -> bool:
    """Was the torch that is installed here built for CUDA? Nothing of it is imported."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    with contextlib.suppress(OSError):
        text = Path(found.origin).with_name("version.py").read_text()
        return re.search(r"^cuda\b.*=\s*'", text, re.MULTILINE) is not None
    return False
