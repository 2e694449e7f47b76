"""Check what a lab requires of this machine: Linux, pyroute2, programs, cores, a tun device."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

from evener.core.base.errors import EvenerError, UsageError
from evener.lab.lab_spec import LabSpec
from evener.lab.programs.init import PATH

TUN_DEVICE = "/dev/net/tun"
PACKAGES = {
    "sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client",
    "nsenter": "util-linux", "setpriv": "util-linux", "taskset": "util-linux",
    "mount": "mount", "umount": "mount", "nft": "nftables", "gcc": "gcc libc6-dev",
}  # fmt: skip


def check_machine(spec: LabSpec) -> None:
    """Raise EvenerError if this machine lacks something that the lab requires."""
    if sys.platform != "linux":
        raise EvenerError(f"a lab needs Linux namespaces; this is {sys.platform}", hint="run it on a Linux machine")
    if importlib.util.find_spec("pyroute2") is None:
        raise EvenerError("a lab needs pyroute2, which is not installed", hint="pip install 'evener[lab]'")
    firewalled = any(host.firewall for host in spec.hosts.values())
    loses_writes = any(host.writeback_s is not None for host in spec.hosts.values())
    programs = [*["nft"] * firewalled, *["gcc"] * loses_writes]
    find_programs("sshd", "ssh", "ssh-keygen", "nsenter", "setpriv", "taskset", *programs)
    usable = allowed_cores()
    for name, host in spec.hosts.items():
        if missing := sorted(set(host.cores or ()) - {*usable}):
            raise UsageError(f"host {name}: no core {missing[0]} here; cores: {', '.join(map(str, usable))}")
        if (tunnels := host.interfaces_of_kind("overlay")) and not os.access(TUN_DEVICE, os.R_OK | os.W_OK):
            raise EvenerError(
                f"host {name}: {tunnels[0]} is a tunnel, and {TUN_DEVICE} is not there or not for this user",
                hint=f"as root: modprobe tun; chmod 0666 {TUN_DEVICE}",
            )


def allowed_cores() -> list[int]:
    """Return the numbers of the cores on which this process may run; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def find_programs(*names: str) -> list[str]:
    """Return the paths of these programs; raise EvenerError with the missing ones and how to install them."""
    paths = {name: shutil.which(name, path=f"{os.environ.get('PATH', '')}:{PATH}") for name in names}
    if missing := [name for name, path in paths.items() if path is None]:
        install = " ".join(sorted({PACKAGES[name] for name in missing}))
        raise EvenerError(f"a lab needs {', '.join(missing)}, not found here", hint=f"apt install {install}")
    return [path for path in paths.values() if path is not None]
