"""Boot a host of a lab again: its controller starts it as at first, and its links are created anew."""

from __future__ import annotations

import os
import signal
from typing import Any

from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.shell import quote_word
from evener.lab import state
from evener.lab.create_lab import host_init_process, wait_for_sshd, wiring_config
from evener.lab.network_process import NetworkProcess
from evener.lab.state import LabFolder, LabProcess, LabState


def boot(lab: LabFolder, name: str) -> None:
    """Start a host that is off, and wait until it accepts logins. If its links cannot be created, it is off again."""
    with NetworkProcess() as switch, state.lock_labs():  # so that concurrent boots see each other's links
        init = _start_host(lab, name)
        host = lab.update_host(name, init=init, is_off=False)
        try:
            own_wiring, desk_pid = wiring_config(lab.state.spec.hosts[name], host), lab.state.controller.pid
            running = {"hosts": running_hosts(lab.state)}
            switch.call(desk_pid, lab.state.rootless, plug_in={"hosts": [own_wiring]}, set_mtus=running)
        except BaseException:
            init.kill()
            lab.update_host(name, is_off=True)
            raise
    wait_for_sshd(lab.path, name, init)


def running_hosts(lab: LabState) -> list[dict[str, Any]]:
    """Return what network.py needs to wire the hosts that run."""
    return [wiring_config(lab.spec.hosts[name], host) for name, host in lab.hosts.items() if host.init.is_alive()]


def _start_host(lab: LabFolder, name: str) -> LabProcess:
    """Make the controller start a host; return its first process."""
    folder, current = lab.host_folder(name), state.load(lab.path)
    if current is None or not current.controller.is_alive():
        raise EvenerError(
            f"cannot boot host {name}: the controller of lab {lab.path.name} has ended",
            hint=f"evener lab down {quote_word(lab.path.name)}",
        )
    if current.hosts[name].init.is_alive():
        raise UsageError(
            f"host {name} of lab {lab.path.name} is on already",
            hint=f"evener lab power-off {quote_word(name)} --name {quote_word(lab.path.name)}",
        )
    request, reply = folder / "boot", folder / "pid"
    reply.unlink(missing_ok=True)
    request.touch()
    try:
        os.kill(current.controller.pid, signal.SIGCHLD)
        state.wait_until(reply.exists, f"host {name}: the lab's controller did not start it")
        return host_init_process(lab.path, name, int(reply.read_text()))
    finally:
        request.unlink(missing_ok=True)
