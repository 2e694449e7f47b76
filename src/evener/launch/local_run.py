"""Run on this machine alone: as on a fleet of one host, with the same supervisor, logs and messages.

    with open_local_session() as sessions:
        prepared = prepare_local(sessions, rundir, ranks=2)
        plan, _ = plan_training(prepared, resolved, prepared.initial_roster(resolved), resume=False)
        run_attached(rundir, plan, sessions, observe)

Differences: no ssh, no network checks, and nothing to send or copy, since the run's folder is the run directory. As
users expect of a local program, the run ends with the program that started it: Ctrl-C and SIGTERM let the ranks finish
their step and save, and a second one kills them. When this program is killed or its terminal closed, the supervisor
detects that its lock is released and acts as after one Ctrl-C. With --detach the run continues.
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

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import EvenerError, UsageError
from evener.core.cluster.fleet_file import DEFAULT_WORKDIR, Fleet, HostConfig
from evener.core.cluster.host_info import local_host_info
from evener.core.run.run_plan import Plan
from evener.core.run.rundir import RunDir
from evener.doctor.facts import ComputeDevices
from evener.launch.commands import PreparedHost
from evener.launch.follow_run import Observer, follow_run
from evener.launch.launcher import PreparedFleet, start, stop
from evener.ssh.session import Sessions, connect
from evener.transfer.mirror import RunMirror, SupervisorState

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def open_local_session() -> Iterator[Sessions]:
    """Open a session with this machine, under its name in runs."""
    with connect(Fleet(hosts={local_host_info().host: HostConfig(address="local")})) as (sessions, errors):
        for error in errors.values():
            raise error
        yield sessions


def prepare_local(sessions: Sessions, rundir: RunDir, *, ranks: int | None, threads: int | None = None,
                 run_id: str | None = None, cwd: Path | None = None) -> PreparedFleet:  # fmt: skip
    """Prepare this machine as the only host of a run, with programs started in `cwd` [the current folder].

    Each of several `ranks` has its own GPU, or all are on the CPU; None: one rank a GPU, or one on the CPU.
    """
    name = local_host_info().host
    devices = from_builtins(sessions[name].call("facts", "collect_devices"), ComputeDevices)
    gpus = _visible_gpus(devices.gpus) if _torch_has_cuda() else []
    on_processor = ranks is not None and ranks > len(gpus)
    place = PreparedHost(
        name=name,
        host=HostConfig(address="local", ranks=ranks, threads=threads, devices="cpu" if on_processor else "auto"),
        address=LOOPBACK,
        interface=next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
        python=sys.executable,
        workdir=str(Path(DEFAULT_WORKDIR).expanduser()),
        run_dir=str(rundir.path.absolute()),
        cwd=str(cwd or Path.cwd()),
        is_local_run=True,
        cores=devices.cores,
        gpus=gpus,
        gpus_have_bf16=devices.gpus_have_bf16,
        has_bf16=devices.has_bf16,
    )
    return PreparedFleet(id=run_id or secrets.token_hex(6), hosts=[place], port=0, findings=[])


def run_attached(rundir: RunDir, plan: Plan, sessions: Sessions, observe: Observer,
              on_change: Callable[[RunMirror], None] = lambda mirror: None) -> dict[str, SupervisorState]:  # fmt: skip
    """Start a run that ends with this program, and follow it to its end; return its last states, by host.

    A training that never began, because the request was wrong or it was stopped, leaves no directory.
    """
    is_new = not rundir.path.exists()

    def remove_empty_run() -> None:
        if is_new and plan.kind == "train" and not rundir.is_run():
            shutil.rmtree(rundir.path, ignore_errors=True)

    with start(rundir, plan, sessions, attached=True), _stop_on_signals(rundir, plan):
        try:
            ended = follow_run(rundir, plan, observe, lambda host: None, on_change)
        except EvenerError as error:
            if error.exit_status == UsageError.exit_status:
                remove_empty_run()
            raise
    if any(state.get("stopped") for state in ended.values()):
        remove_empty_run()
    return ended


@contextlib.contextmanager
def _stop_on_signals(rundir: RunDir, plan: Plan) -> Iterator[None]:
    """Stop the run on Ctrl-C and SIGTERM: the first lets the ranks save, the second kills them."""
    num_signals = 0

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1 and plan.grace_s:
            print("stopping after this step and a checkpoint; a second Ctrl-C stops at once", file=sys.stderr)
        now = num_signals > 1
        threading.Thread(target=stop, args=(rundir, plan), kwargs={"now": now}, daemon=True).start()

    previous: dict[int, Any] = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _visible_gpus(gpus: list[str]) -> list[str]:
    """Return the GPUs that CUDA shows to programs started by this one.   [CUDA_VISIBLE_DEVICES]"""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return gpus[: len([entry for entry in visible.split(",") if entry.strip() and not entry.strip().startswith("-")])]


def _torch_has_cuda() -> bool:
    """Return whether the torch installed here was built for CUDA, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        return re.search(r"^cuda\b.*=\s*'", text, re.MULTILINE) is not None
    return False
