"""How does a host of a lab come up again? Its desk starts it as at first, and it is plugged into the switch anew."""

from __future__ import annotations

import os
import signal
from typing import Any

from evener.core.errors import EvenerError, UsageError
from evener.lab import state
from evener.lab.make import first_process, wait_for_sshd, wiring
from evener.lab.state import LabFolder, LabState, Process
from evener.lab.switch import Switch


def boot(lab: LabFolder, name: str) -> None:
    """Start a host that does not run, and wait until it takes logins. One that cannot be plugged in is off again."""
    with Switch() as switch, state.locked():  # whoever lives has his link, also where several are booted at once
        init = _start(lab, name)
        host = lab.change_host(name, init=init, is_off=False)
        try:
            mine, desk = wiring(lab.state.spec.hosts[name], host), lab.state.desk.pid
            everyone = {"hosts": living(lab.state)}
            switch.do(desk, lab.state.rootless, plug_in={"hosts": [mine]}, set_mtus=everyone)
        except BaseException:
            init.kill()
            lab.change_host(name, is_off=True)
            raise
    wait_for_sshd(lab.path, name, init)


def living(lab: LabState) -> list[dict[str, Any]]:
    """What network.py needs to know about the hosts that run."""
    return [wiring(lab.spec.hosts[name], host) for name, host in lab.hosts.items() if host.init.is_alive()]


def _start(lab: LabFolder, name: str) -> Process:
    """Have the desk start a host; its first process."""
    folder, now = lab.of_host(name), state.load(lab.path)
    if now is None or not now.desk.is_alive():
        raise EvenerError(
            f"host {name} cannot be booted: lab {lab.path.name} has no switch any more",
            hint=f"evener lab down {lab.path.name}",
        )
    if now.hosts[name].init.is_alive():
        raise UsageError(
            f"host {name} of lab {lab.path.name} is on already",
            hint=f"evener lab power-off {name} --name {lab.path.name}",
        )
    asked, told = folder / "boot", folder / "pid"
    told.unlink(missing_ok=True)
    asked.touch()
    try:
        os.kill(now.desk.pid, signal.SIGCHLD)
        state.wait_until(told.exists, f"host {name}: its desk does not start it")
        return first_process(lab.path, name, int(told.read_text()))
    finally:
        asked.unlink(missing_ok=True)
