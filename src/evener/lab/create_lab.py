"""Create a lab: start its controller and hosts, wire their network, and wait until each accepts ssh logins."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from evener.core.base.errors import EvenerError
from evener.lab import cgroup, disk, host_files, state, writeback
from evener.lab.lab_requirements import find_programs
from evener.lab.lab_spec import LAN, LAN6, OVERLAY, HostSpec, LabSpec
from evener.lab.network_process import NetworkProcess
from evener.lab.state import HostState, LabProcess, LabState

LISTENING_ON_22 = ":0016 00000000:0000 0A"  # a line of /proc/PID/net/tcp
NO_NAMESPACES_HINT = (
    "run it as root; or, as root, allow user namespaces: "
    "sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0"
)
TUNNEL_PROGRAM = Path(__file__).parent / "programs" / "tunnel.py"


def create(path: Path, spec: LabSpec, fleet_file: Path | None) -> LabState:
    """Create a checked lab in its state directory, and wait until every host accepts logins."""
    rootless = os.geteuid() != 0
    addresses = {name: f"{LAN}.{number}" for number, name in enumerate(spec.hosts, 1)}
    with NetworkProcess() as switch:  # its imports overlap with the start of the hosts
        for name in spec.hosts:
            (path / "hosts" / name / "home").mkdir(parents=True, mode=0o700)
            if (size := spec.hosts[name].disk_bytes) is not None and not rootless:
                disk.mount(path / "hosts" / name / "home", size)
            if spec.hosts[name].writeback_s is not None:
                writeback.prepare(path / "hosts" / name)
        host_files.make_keys([path / "id_ed25519", *(path / "hosts" / name / "host_key" for name in spec.hosts)])
        (path / "known_hosts").write_text(host_files.known_hosts(path, addresses))
        config = {
            "rootless": rootless, "uid": os.getuid(), "gid": os.getgid(), "visible": _visible_paths(),
            "hosts": {name: _host_init_config(path, spec, name, addresses, rootless) for name in spec.hosts},
        }  # fmt: skip
        (path / "desk.json").write_text(json.dumps(config))
        pids = _start_controller(path)
        controller = state.process_by_pid(pids["desk"])
        (path / "desk").write_text(f"{controller.pid} {controller.start_ticks} {int(rootless)}")
        hosts = {
            name: HostState(
                init=host_init_process(path, name, pids["hosts"][name]),
                address=addresses[name],
                address6=f"{LAN6}:{number:x}",
                port=f"port{number}",
            )
            for number, name in enumerate(spec.hosts, 1)
        }
        wirings = [wiring_config(spec.hosts[name], host) for name, host in hosts.items()]
        switch.call(controller.pid, rootless, wire={"hosts": wirings})
    for name, host in hosts.items():
        wait_for_sshd(path, name, host.init)
    return LabState(
        spec=spec,
        rootless=rootless,
        controller=controller,
        hosts=hosts,
        fleet_file=str(fleet_file.resolve()) if fleet_file is not None else None,
        fleet_text=host_files.fleet_text(spec.name, path, addresses),
    )


def _host_init_config(
    path: Path, spec: LabSpec, name: str, addresses: dict[str, str], rootless: bool
) -> dict[str, Any]:
    """Return what init.py needs to start a host."""
    folder, host = path / "hosts" / name, spec.hosts[name]
    with state.lock_labs():  # removing the last lab removes the shared cgroup subtree
        cgroups = [] if rootless else cgroup.make(spec.name, name, host.cpus, host.memory_bytes)
    (folder / "cgroups").write_text(json.dumps(cgroups))
    (folder / "sshd_config").write_text(host_files.sshd_config(folder))
    [sshd] = find_programs("sshd")
    etc = host_files.etc_files(name, host, addresses, folder / "home", rootless)
    services = []
    if host.writeback_s is not None:
        etc["ld.so.preload"] = writeback.preload_text(folder)
        services.append(writeback.service_argv(folder, host.writeback_s))
    for interface in host.interfaces_of_kind("overlay"):
        peers = {_overlay_address(address): address for other, address in addresses.items()
                 if other != name and spec.hosts[other].interfaces_of_kind("overlay")}  # fmt: skip
        services.append(
            [
                sys.executable,
                "-I",
                "-S",
                str(TUNNEL_PROGRAM),
                interface,
                _overlay_address(addresses[name]),
                json.dumps(peers),
            ]
        )
    return {
        "cgroups": cgroups,
        "cores": list(host.cores or ()),
        "etc": etc,
        "services": services,
        "sshd": [sshd, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")],
    }


def wiring_config(spec: HostSpec, host: HostState) -> dict[str, Any]:
    """Return what network.py needs to wire a host."""
    return {
        "number": _host_number(host.address), "pid": host.init.pid, "port": host.port, "interface": spec.interface,
        "address": host.address, "address6": host.address6,
        "mtu": spec.mtu, "path_mtu": spec.path_mtu or spec.mtu,
        "up_bps": spec.up_bps, "down_bps": spec.down_bps, "policed": spec.policed,
        "links": spec.interfaces_of_kind("link"), "bridges": spec.interfaces_of_kind("bridge"),
    }  # fmt: skip


def _overlay_address(address: str) -> str:
    return f"{OVERLAY}.{_host_number(address)}"


def _host_number(address: str) -> int:
    return int(address.rpartition(".")[2])


def _visible_paths() -> list[str]:
    """Return the paths of evener and its Python that lie in folders which a host mounts anew (/tmp, /run, /dev/shm)."""
    needed = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix, Path(__file__).parents[2])}
    return sorted(str(p) for p in needed if p.parts[1] in ("tmp", "run") or p.parts[1:3] == ("dev", "shm"))


def _start_controller(path: Path) -> dict[str, Any]:
    """Start the controller (init.py), which keeps running; return the pids that it prints."""
    with (path / "desk.log").open("wb") as log:
        result = subprocess.run(
            [sys.executable, "-I", "-S", str(state.INIT_PROGRAM), str(path)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, cwd="/", start_new_session=True, check=False,
        )  # fmt: skip
    if not result.stdout:
        lines = (path / "desk.log").read_text().splitlines() or ["no reason given"]
        raise EvenerError(
            f"this machine does not let user {os.getuid()} create a lab: {lines[-1]}",
            hint="in a container: run it with --privileged" if os.geteuid() == 0 else NO_NAMESPACES_HINT,
        )
    pids: dict[str, Any] = json.loads(result.stdout)
    return pids


def host_init_process(path: Path, name: str, pid: int) -> LabProcess:
    """Return a host's first process from the pid that the controller reported; 0 means that the host did not start."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            return state.process_by_pid(pid)
    raise EvenerError(f"host {name} did not start", output=_tail(path / "hosts" / name))


def wait_for_sshd(path: Path, name: str, init: LabProcess) -> None:
    """Wait until a host accepts logins; raise EvenerError on a timeout or if the host died."""
    listening = Path(f"/proc/{init.pid}/net/tcp")

    def is_ready() -> bool:
        try:
            return LISTENING_ON_22 in listening.read_text()
        except OSError:  # the host is dead
            return True

    try:
        state.wait_until(is_ready, f"host {name}: sshd does not listen")
    except EvenerError as error:
        raise EvenerError(str(error), output=_tail(path / "hosts" / name)) from None
    if not init.is_alive():
        raise EvenerError(f"host {name} did not start", output=_tail(path / "hosts" / name))


def _tail(folder: Path) -> str:
    """Return the last ten lines of a host's logs."""
    logs = [
        (folder / name).read_text(errors="replace") for name in ("init.log", "sshd.log") if (folder / name).exists()
    ]
    return "\n".join("".join(logs).splitlines()[-10:])
