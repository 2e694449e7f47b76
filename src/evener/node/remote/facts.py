"""Collect the facts about this machine that matter for training on it: `collect()` returns one JSON object.

Standard library only, Python 3.8 or newer, Linux or macOS; runs on a bare machine in a fraction of a second. Facts are
independent of each other: what cannot be known is None, and nothing here raises. Torch is never imported.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Dict, Sequence  # noqa: UP035  python 3.8

from evener.node.remote.environment import HIDDEN, debug_variables, hide_secrets, is_secret_variable, launcher_variables
from evener.node.remote.file_io import read_link, read_text
from evener.node.remote.process_table import HAS_PROC, Process, list_processes, read_process
from evener.node.remote.programs import count_allowed_cpus, find_program, run_program, run_with_error
from evener.node.remote.prune import folder_bytes, measure_stored
from evener.node.remote.run_control import is_supervised, list_partial_checkpoints, live_run_ports

LINUX = sys.platform.startswith("linux")
RELEVANT_VARIABLES = re.compile(
    r"^(GLOO|NCCL|TP|OMP|MKL|KMP|TORCH|CUDA|MASTER|UCX|FI)_|^(RANK|WORLD_SIZE|LOCAL_RANK|PYTHON[A-Z0-9]+)$"
)
# after python -m
TRAINING_MODULES = (
    "torch.distributed.run", "torch.distributed.launch", "evener.worker", "evener.worker.torchrun", "evener.node.agent",
)  # fmt: skip
RANK_ENVIRONMENT = re.compile(r"(?:^|\0)(?:TORCHELASTIC_RUN_ID|EVENER_RUN)=|(?:^|\0)MASTER_ADDR=.*\0WORLD_SIZE=|"
                     r"(?:^|\0)WORLD_SIZE=.*\0MASTER_ADDR=", re.DOTALL)  # fmt: skip
SUPERVISOR_SCRIPT = re.compile(r"/host/supervisor\.py$")
SESSION_PROGRAM = (
    "exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"  # the end of ssh/transport.py's BOOTSTRAP
)
TERMINAL_MULTIPLEXERS = re.compile(r"^(tmux|screen|dtach|abduco|zellij|mosh-server|slurm)", re.IGNORECASE)
SAMPLE_INTERVAL_S = 0.25  # between two readings of a counter
IMPORT_TIMEOUT_S = 8.0  # timeout of importing torch, perhaps from a cold disk
CPU_BUSY_S = 0.05  # for which one core is kept busy before its frequency is read

# Files in which a shell that sshd starts may set limits.
LIMIT_FILES = (
    "/etc/profile", "/etc/profile.d/*.sh", "/etc/bash.bashrc", "/etc/zsh/zshenv", "~/.zshenv", "~/.bash_profile",
    "~/.bash_login", "~/.profile", "~/.bashrc",
)  # fmt: skip
DECLARATION = r"((export|declare -x|typeset -x) +([^#]* )?)?"  # what may stand before NAME= in a shell's file
Facts = Dict[str, Any]  # noqa: UP006

# Files in which users set a variable for all their sessions; the first that sets it counts.
ENVIRONMENT_FILES = (
    "~/.ssh/environment",
    "~/.pam_environment",
    "~/.bashrc",
    "~/.bash_profile",
    "~/.profile",
    "~/.zshenv",
    "/etc/environment",
)

# Runs in the python that trains: the versions that it would import. No package's code is executed.
VERSIONS_PROGRAM = """
import sys
if sys.version_info < (3, 8):
    print('{"python_version": "%s", "torch": null, "evener": null, "hash": null}' % sys.version.split()[0])
    sys.exit()
import hashlib, importlib.metadata, importlib.util, json, os, platform
def version(name):
    try: return importlib.metadata.version(name)
    except Exception: return None
def code_hash():
    try: spec = importlib.util.find_spec("evener")
    except Exception: return None
    if spec is None or spec.origin is None: return None
    root, digest, files = os.path.dirname(spec.origin), hashlib.blake2b(digest_size=16), []
    for folder, _, names in os.walk(root):
        paths = [os.path.join(folder, name) for name in names if name.endswith(".py")]
        files += [os.path.relpath(path, root).split(os.sep) for path in paths]
    for parts in sorted(files):
        with open(os.path.join(root, *parts), "rb") as file:
            digest.update("/".join(parts).encode() + b"\\0" + file.read() + b"\\0")
    return digest.hexdigest()
has = lambda name: importlib.util.find_spec(name) is not None
print(json.dumps({"python_version": platform.python_version(), "torch": version("torch") if has("torch") else None,
                  "missing": [name for name in sys.argv[1:] if not has(name)],
                  "evener": version("evener") if has("evener") else None, "hash": code_hash(),
                  "executable": sys.executable}))
"""


def collect(
    workdir: str = "~/.evener", python: str | None = None, port: int = 29500, packages: Sequence[str] = ()
) -> Facts:
    """Return all facts.

    `python` is the interpreter that trains; None: WORKDIR/venv's, else the one that runs this. `packages` are what the
    run imports besides evener's own dependencies.
    """
    home = os.path.abspath(os.path.expanduser(workdir))
    python = _find_training_python(home, python)
    facts = {"workdir": home, "python": python}
    slow = [
        threading.Thread(target=lambda: facts.update(_collect_versions(python, packages))),
        threading.Thread(target=lambda: facts.update(_collect_gpus())),
        threading.Thread(target=lambda: facts.update(_sample_activity())),
    ]
    for thread in slow:
        thread.start()
    quick = [
        _collect_identity,
        _collect_cpu,
        _collect_memory,
        _read_load,
        lambda: _collect_disk(home),
        lambda: _collect_stored(home),
        _collect_limits,
        _collect_network,
        lambda: _check_port(port),
        lambda: {"run_ports": live_run_ports(home)},
        _resolve_gloo_default,
        collect_environment,
        _find_training_processes,
        _detect_firewall,
        _collect_power,
    ]
    for collect_part in quick:
        facts.update(collect_part())
    for thread in slow:
        thread.join(15)
    return dict(facts, time=time.time())


def collect_devices() -> Facts:
    """Return the CPU and the GPUs, the fast part of `collect()`."""
    return dict(_collect_cpu(), **_collect_gpus())


# --- identity and the interpreter that trains --------------------------------------------------------------------


def _collect_identity() -> Facts:
    uname = os.uname()
    boot = read_text("/proc/sys/kernel/random/boot_id") or run_program(["sysctl", "-n", "kern.bootsessionuuid"])
    # A container, and a host of a lab, has the machine's boot id but its own network namespace.
    network = read_link("/proc/self/ns/net") or ""
    return {
        "hostname": socket.gethostname(),
        "system": f"{uname.sysname} {uname.release}",
        "architecture": uname.machine,
        "machine_id": f"{boot.strip()} {network}" if boot else None,
        "boot_id": boot.strip() if boot else None,
        "user": os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid()),
        "is_root": os.getuid() == 0,
        "in_container": os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"),
    }


def _find_training_python(home: str, python: str | None) -> str:
    """Return the interpreter that trains: WORKDIR/venv's if none is named, or if it was made of the named one."""
    venv = os.path.join(home, "venv", "bin", "python")
    if not python:
        return venv if os.path.exists(venv) else sys.executable
    path = os.path.expanduser(python)
    path = shutil.which(path) or os.path.abspath(path)
    return venv if os.path.exists(venv) and read_text(os.path.join(home, "venv", "evener-made-of")) == path else path


def _collect_versions(python: str, packages: Sequence[str]) -> Facts:
    """Return the versions of a python; if it starts only in isolated mode (-I), also its error without that."""
    for isolation in ([], ["-I"]):
        output, error = run_with_error([python, *isolation, "-c", VERSIONS_PROGRAM, *packages], timeout_s=12)
        try:
            versions = json.loads(output.strip().splitlines()[-1])
        except (ValueError, IndexError):
            if not isolation:
                start_error = error
            continue
        return {
            "python_version": versions["python_version"],
            "torch_version": versions["torch"],
            "evener_version": versions["evener"],
            "evener_hash": versions["hash"],
            "missing_packages": versions.get("missing", []),
            "python_error": start_error if isolation else None,
            "breaking_variable": _find_breaking_variable(python) if isolation or not versions["torch"] else None,
            "shadowed": _find_shadowed_modules(),
        }
    return {"python_version": None, "python_error": start_error}


def _find_breaking_variable(python: str) -> str | None:
    """Return the PYTHON… variable without which a python starts and has torch; None if there is none."""
    for name in sorted(name for name in os.environ if name.startswith("PYTHON")):
        without = {other: value for other, value in os.environ.items() if other != name}
        output, _ = run_with_error([python, "-c", VERSIONS_PROGRAM], timeout_s=12, env=without)
        try:
            if json.loads(output.strip().splitlines()[-1])["torch"]:
                return name
        except (ValueError, IndexError):
            continue
    return None


def _find_shadowed_modules() -> dict[str, str]:
    """Return {module: file} of the standard modules, and of torch, that PYTHONPATH shadows by others."""
    guarded = set(getattr(sys, "stdlib_module_names", sys.builtin_module_names)) | {"torch"}
    shadowed: dict[str, str] = {}
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        for path in sorted(glob.glob(glob.escape(folder) + "/*")):
            name, extension = os.path.splitext(os.path.basename(path))
            is_package = os.path.exists(path + "/__init__.py")
            is_torch = name == "torch" and os.path.exists(path + "/version.py")  # a torch built from source
            if name in guarded and (extension == ".py" or is_package) and not is_torch:
                shadowed.setdefault(name, path)
    return shadowed


def import_torch(python: str) -> str | None:
    """Return the error of the python that trains when it imports torch; None if it succeeds or takes too long."""
    output, error = run_with_error(
        [python, "-c", "import torch.distributed.run; print('imported')"], timeout_s=IMPORT_TIMEOUT_S
    )
    return None if "imported" in output else error


# --- processor ---------------------------------------------------------------------------------------------------


def _collect_cpu() -> Facts:
    flags = set()
    model = None
    for line in (read_text("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
        elif name.strip() in ("model name", "Model") and model is None:
            model = value.strip()
        if flags and model:
            break
    are_flags_known = bool(flags)
    if not LINUX:
        model = (run_program(["sysctl", "-n", "machdep.cpu.brand_string"]) or "").strip() or None
        output = (run_program(["sysctl", "-n", "hw.optional.arm.FEAT_BF16"]) or "").strip()
        are_flags_known, flags = output != "", {"bf16"} if output == "1" else set()
    quota = _read_cpu_quota()
    units = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    return {
        "cpu": model,
        "cores": max(1, min(count_allowed_cpus(), int(quota))) if quota else count_allowed_cpus(),
        "allowed_cpus": sorted(os.sched_getaffinity(0)) if LINUX else None,
        "cpu_quota": quota,
        "cores_installed": os.cpu_count(),
        "bf16_units": units if are_flags_known else None,
        "cpu_max_MHz": _parse_kilo(read_text("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")),
        "cpu_limit_MHz": _parse_kilo(read_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq")),
    }


def _read_cpu_quota() -> float | None:
    """Return the tightest CPU quota of our cgroups, in cores; None: no limit."""
    quotas = []
    for folder in _cgroup_folders("cpu"):
        fields = (read_text(folder + "/cpu.max") or "").split()
        if len(fields) != 2:
            fields = [
                read_text(folder + "/cpu.cfs_quota_us") or "max",
                read_text(folder + "/cpu.cfs_period_us") or "1",
            ]
        quota, period = _parse_number(fields[0]), _parse_number(fields[1])
        if quota and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _cgroup_folders(controller: str) -> list[str]:
    """Return the folders of our cgroup and of all its ancestors, in version 2 and in version 1."""
    folders = []
    for line in (read_text("/proc/self/cgroup") or "").splitlines():
        number, names, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            roots = ["/sys/fs/cgroup/" + names, "/sys/fs/cgroup/" + controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for root in roots:
            folders += ["/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in folders if os.path.isdir(folder)]


def _sample_activity() -> Facts:
    """Sample counters twice: the swap rate, CPU throttling events, and the clock of a busy core."""
    before, began = _read_counters(), time.monotonic()
    time.sleep(SAMPLE_INTERVAL_S)
    busy_until = time.monotonic() + CPU_BUSY_S
    while time.monotonic() < busy_until:
        sum(range(1000))
    busy = [
        _parse_kilo(read_text(path)) for path in glob.glob("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
    ]
    after, elapsed_s = _read_counters(), time.monotonic() - began
    page = resource.getpagesize()
    swapped = None
    if before["swapped"] is not None and after["swapped"] is not None:
        swapped = (after["swapped"] - before["swapped"]) * page / elapsed_s
    throttled = None
    if before["throttled"] is not None and after["throttled"] is not None:
        throttled = after["throttled"] - before["throttled"]
    fastest = max(filter(None, busy), default=None)
    return {"swap_Bps": swapped, "cpu_throttle_events": throttled, "cpu_busy_MHz": fastest}


def _read_counters() -> dict[str, int | None]:
    swapped = None
    for line in (read_text("/proc/vmstat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("pswpin", "pswpout"):
            swapped = (swapped or 0) + int(value)
    paths = glob.glob("/sys/devices/system/cpu/cpu*/thermal_throttle/*_throttle_count")
    counts = [_parse_number(read_text(path)) for path in paths]
    return {"swapped": swapped, "throttled": sum(filter(None, counts)) if counts else None}


def _read_load() -> Facts:
    try:
        return {"load": os.getloadavg()[0]}
    except OSError:
        return {"load": None}


# --- memory, disk, limits ----------------------------------------------------------------------------------------


def _collect_memory() -> Facts:
    total = free = swap = None
    for line in (read_text("/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable", "SwapTotal"):
            size = int(value.split()[0]) * 1024
            total, free, swap = (
                size if name == "MemTotal" else total,
                size if name == "MemAvailable" else free,
                size if name == "SwapTotal" else swap,
            )
    if total is None:
        total = _parse_number(run_program(["sysctl", "-n", "hw.memsize"]))
        pages = dict(re.findall(r"Pages (\w+):\s+(\d+)", run_program(["vm_stat"]) or ""))
        if pages:
            kinds = ("free", "inactive", "speculative", "purgeable")
            free = sum(int(pages.get(kind, 0)) for kind in kinds) * resource.getpagesize()
    for folder in _cgroup_folders("memory"):
        limit = _parse_number(read_text(folder + "/memory.max") or read_text(folder + "/memory.limit_in_bytes"))
        used = _parse_number(read_text(folder + "/memory.current") or read_text(folder + "/memory.usage_in_bytes"))
        if limit and total and limit < total:
            cache = re.search(
                r"^(?:total_)?inactive_file (\d+)$", read_text(folder + "/memory.stat") or "", re.MULTILINE
            )
            available = limit - (used or 0) + (int(cache.group(1)) if cache else 0)
            total, free = limit, available if free is None else min(free, available)
    return {"memory_bytes": total, "memory_free_bytes": free, "swap_bytes": swap}


def _collect_disk(folder: str) -> Facts:
    while not os.path.isdir(folder) and folder != "/":
        folder = os.path.dirname(folder)
    shm = _disk_space("/dev/shm") if LINUX and os.path.isdir("/dev/shm") else None  # noqa: S108
    space = _disk_space(folder)
    return {
        "disk_free_bytes": space[1] if space else None,
        "disk_folder": folder,  # the deepest existing folder of the working directory's path
        "disk_writable": os.access(folder, os.W_OK),
        "shm_bytes": shm[0] if shm else None,
    }


def _collect_stored(workdir: str) -> Facts:
    """Return what earlier runs left: in the working directory, and in runs/ of the current folder of this machine."""
    patterns = (os.path.join(glob.escape(workdir), "runs", "*"), "runs/*", "runs/*/*")
    runs = [run for pattern in patterns for run in glob.glob(pattern)]
    ended = [run for run in runs if not is_supervised(f"{run}/host")]
    partial = [path for run in ended for path in list_partial_checkpoints(run)]
    return {
        "stored_bytes": measure_stored(workdir),
        "partial_checkpoints": len(partial),
        "partial_checkpoint_bytes": sum(map(folder_bytes, partial)),
    }


def _disk_space(folder: str) -> tuple[int, int] | None:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def _collect_limits() -> Facts:
    limits_by_name: Facts = {}
    for name in ("nofile", "memlock"):
        try:
            limits = resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper()))
            soft, hard = [None if limit == resource.RLIM_INFINITY else limit for limit in limits]
            limits_by_name[name] = {"soft": soft, "hard": hard}
        except (AttributeError, ValueError, OSError):
            limits_by_name[name] = None
    return {"limits": limits_by_name, "limits_set_in": _find_limit_lines(limits_by_name)}


def _find_limit_lines(limits_by_name: Facts) -> Facts:
    """Return {limit: {"file", "line"}} of the lines of startup files that set the soft limits in force."""
    found: Facts = {}
    paths = [path for pattern in LIMIT_FILES for path in sorted(glob.glob(os.path.expanduser(pattern)))]
    for path in paths:
        for number, line in enumerate((read_text(path) or "").splitlines(), start=1):
            for name, option in (("nofile", "n"), ("memlock", "l")):
                command = rf"(?:^|[\s;&|])ulimit\s[^#;&|]*-[SH]*{option}\s+(\d+)"
                match = re.search(command, line.partition("#")[0])
                limit = limits_by_name.get(name)
                unit = 1024 if name == "memlock" else 1
                if match and limit is not None and int(match.group(1)) * unit == limit["soft"]:
                    home = os.path.expanduser("~")
                    shown = "~" + path[len(home) :] if path.startswith(home + "/") else path
                    found[name] = {"file": shown, "line": number}
    return found


# --- network -----------------------------------------------------------------------------------------------------


class _Sockaddr(ctypes.Structure):
    _fields_ = (
        [("family", ctypes.c_uint16), ("data", ctypes.c_uint8 * 26)]
        if LINUX
        else [("length", ctypes.c_uint8), ("family", ctypes.c_uint8), ("data", ctypes.c_uint8 * 26)]
    )


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Sockaddr)),
    ("netmask", ctypes.POINTER(_Sockaddr)),
    ("other", ctypes.POINTER(_Sockaddr)),
    ("data", ctypes.c_void_p),
]
SYSCTLS = (
    "net.core.rmem_max", "net.core.wmem_max", "net.core.default_qdisc", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_congestion_control", "net.ipv4.tcp_slow_start_after_idle", "net.ipv4.tcp_notsent_lowat",
    "net.ipv4.tcp_mtu_probing",
)  # fmt: skip
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40  # the same on Linux and macOS
ATF_COM = 0x2  # of an entry of the ARP table: the machine has answered


def _collect_network() -> Facts:
    low, high = 32768, 60999  # Linux's default
    fields = (read_text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if len(fields) == 2:
        low, high = int(fields[0]), int(fields[1])
    elif not LINUX:
        low = int(_parse_number(run_program(["sysctl", "-n", "net.inet.ip.portrange.first"])) or 49152)
        high = int(_parse_number(run_program(["sysctl", "-n", "net.inet.ip.portrange.last"])) or 65535)
    control = read_text("/proc/sys/net/ipv4/tcp_congestion_control") or run_program(
        ["sysctl", "-n", "net.inet.tcp.cc.algorithm"]
    )
    return {
        "interfaces": interfaces(),
        "port_range": [low, high],
        "congestion_control": control.strip() if control else None,
        "queue_discipline": (read_text("/proc/sys/net/core/default_qdisc") or "").strip() or None,
        "sysctls": _read_sysctls(),
        "has_infiniband": bool(glob.glob("/sys/class/infiniband/*")),
        "neighbours": _read_neighbours(),
    }


def _read_neighbours() -> list[Facts]:
    """Return the IPv4 addresses that have answered on this host's networks lately. Linux only.

    Routers and the machine that has logged in here are left out.
    """
    known = set(os.environ.get("SSH_CONNECTION", "").split()[:1])
    for line in (read_text("/proc/net/route") or "").splitlines()[1:]:
        known.add(socket.inet_ntoa(int(line.split()[2], 16).to_bytes(4, sys.byteorder)))
    neighbours = []
    for line in (read_text("/proc/net/arp") or "").splitlines()[1:]:
        address, _, flags, _, _, interface = line.split()
        if int(flags, 16) & ATF_COM and address not in known:
            neighbours.append({"address": address, "interface": interface})
    return neighbours


def _read_sysctls() -> dict[str, str]:
    """Return the sysctls that TCP throughput may depend on, as `sysctl` prints them; empty where it is not Linux."""
    values = {name: read_text("/proc/sys/" + name.replace(".", "/")) for name in SYSCTLS}
    return {name: " ".join(text.split()) for name, text in values.items() if text is not None}


def interfaces() -> list[Facts]:
    """Return every interface with its addresses, in the order of getifaddrs, in which Gloo searches them."""
    libc = ctypes.CDLL(None if LINUX else ctypes.util.find_library("c"), use_errno=True)
    head = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        return []
    by_name: dict[str, Facts] = {}
    wireless = _macos_wireless_interfaces()
    node = head
    while node:
        entry = node.contents
        name = entry.name.decode(errors="replace")
        interface = by_name.setdefault(name, {"name": name, "flags": entry.flags, "addresses": [], "mtu": None})
        if entry.address:
            family = entry.address.contents.family
            if family in (socket.AF_INET, socket.AF_INET6):
                interface["addresses"].append(_decode_address(family, entry.address, entry.netmask))
            elif not LINUX and family == 18 and entry.data:  # AF_LINK: struct if_data
                interface["mtu"] = ctypes.cast(entry.data + 8, ctypes.POINTER(ctypes.c_uint32)).contents.value
        node = entry.next
    libc.freeifaddrs(head)
    for interface in by_name.values():
        flags = interface.pop("flags")
        interface["up"] = bool(flags & IFF_UP) and bool(flags & IFF_RUNNING)
        interface.update(_classify_interface(interface["name"], bool(flags & IFF_LOOPBACK), wireless))
        if LINUX:
            interface["mtu"] = _parse_number(read_text(f"/sys/class/net/{interface['name']}/mtu"))
    return list(by_name.values())


def _decode_address(family: int, pointer: Any, netmask: Any) -> Facts:
    offset, size = (2, 4) if family == socket.AF_INET else (6, 16)
    text = socket.inet_ntop(family, bytes(pointer.contents.data[offset : offset + size]))
    prefix = None
    if netmask:
        prefix = sum(bin(byte).count("1") for byte in netmask.contents.data[offset : offset + size])
    return {"address": text, "prefix": prefix}


def _classify_interface(name: str, is_loopback: bool, wireless: set[str]) -> Facts:
    """Return an interface's kind, speed and duplex: as the kernel reports them, else judged by the name."""
    folder = f"/sys/class/net/{name}/"
    kind_of_device = re.search(r"^DEVTYPE=(\w+)", read_text(folder + "uevent") or "", re.MULTILINE)
    devtype = kind_of_device.group(1) if kind_of_device else ""
    physical = os.path.exists(folder + "device")
    ports = glob.glob(folder + "brif/*") if devtype == "bridge" else []
    if is_loopback:
        kind = "loopback"
    elif (
        devtype == "wlan" or name in wireless or os.path.exists(folder + "phy80211") or re.match(r"wl|ath\d|ra\d", name)
    ):
        kind = "wireless"
    elif physical:
        kind = "wired"
    elif devtype == "wireguard" or re.match(r"wg|nordlynx", name):
        kind = "wireguard"
    elif re.match(r"docker|br-[0-9a-f]{6,}|cni|podman|lxcbr|virbr|vmnet|bridge\d", name):
        kind = "docker" if name.startswith(("docker", "br-")) else "bridge"
    elif devtype == "bridge":  # a bridge with a physical card in it carries the machine's own traffic
        cards = [port for port in ports if os.path.exists(f"/sys/class/net/{os.path.basename(port)}/device")]
        kind = "wired" if cards else "bridge"
    elif os.path.exists(folder + "tun_flags") or re.match(r"tun|tap|tailscale|utun|zt|ppp|ipsec|gpd|nebula", name):
        kind = "tunnel"
    elif re.match(r"veth|dummy|ifb|awdl|llw|anpi|ap\d|gif|stf|cali|flannel|vxlan|kube", name):
        kind = "virtual"
    else:
        kind = "wired"
    speed = _parse_number(read_text(folder + "speed"))
    duplex = (read_text(folder + "duplex") or "").strip()
    return {
        "kind": kind,
        "is_physical": physical or not LINUX,
        "mac": (read_text(folder + "address") or "").strip() or None,
        "speed_Mbit": int(speed) if speed and speed > 0 else None,
        "duplex": duplex if duplex in ("full", "half") else None,
    }


def _macos_wireless_interfaces() -> set[str]:
    if LINUX:
        return set()
    ports = run_program(["networksetup", "-listallhardwareports"]) or ""
    return set(re.findall(r"Hardware Port: Wi-Fi\s+Device: (\w+)", ports))


def _resolve_gloo_default() -> Facts:
    """Return the address that Gloo chooses by default, following its makeDeviceForHostname step by step.

    gethostname, getaddrinfo(AF_UNSPEC, SOCK_STREAM), the first address that can be bound; if there is none, 127.0.0.1.
    """
    name = socket.gethostname()
    candidates_tried, winner = [], None
    try:
        candidates = socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return {"gloo": {"hostname": name, "candidates": [], "address": "127.0.0.1", "error": str(error)}}
    for family, kind, protocol, _, address in candidates:
        candidate = {"address": address[0], "binds": False}
        try:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
            candidate["binds"] = True
        except OSError as error:
            candidate["error"] = error.strerror or str(error)
        candidates_tried.append(candidate)
        if candidate["binds"] and winner is None:
            winner = candidate["address"]
    return {"gloo": {"hostname": name, "candidates": candidates_tried, "address": winner or "127.0.0.1", "error": None}}


def collect_environment() -> Facts:
    """Return the relevant variables of a session without a terminal, as a run gets them; secrets are hidden."""
    launcher, debug = launcher_variables(os.environ), debug_variables(os.environ)
    relevant = {name: value for name, value in os.environ.items() if RELEVANT_VARIABLES.match(name)}
    shown = {name: HIDDEN if is_secret_variable(name, value) else value for name, value in relevant.items()}
    return {
        "environment": shown,
        "launcher_variables": launcher,
        "debug_variables": debug,
        "set_in": {name: path for name in [*relevant, *launcher] for path in [_find_defining_file(name)] if path},
    }


def _find_defining_file(name: str) -> str | None:
    """Return the file that sets a variable for every session: the one with the current value, else the first."""
    path_by_is_current: dict[bool, str] = {}
    for path in ENVIRONMENT_FILES:
        for line in (read_text(os.path.expanduser(path)) or "").splitlines():
            if re.match(rf"\s*{DECLARATION}{name}=", line):
                path_by_is_current.setdefault(os.environ[name] in line, path)
    return path_by_is_current.get(True, path_by_is_current.get(False))


def _check_port(port: int) -> Facts:
    """Return who holds the rendezvous port; None if it can be bound."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((address, port))  # without listen: nothing shall connect
        except OSError as error:
            if error.errno in (98, 48):  # EADDRINUSE on Linux, on macOS
                return {"port": port, "port_holder": _find_port_holder(port)}
    return {"port": port, "port_holder": None}


def _find_port_holder(port: int) -> Facts:
    pid = None
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read_text(table) or "").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for path in glob.iglob("/proc/[0-9]*/fd/*") if inodes else ():
        if read_link(path) in inodes:
            pid = int(path.split("/")[2])
            break
    if not LINUX:
        pid = _parse_number((run_program(["lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-t"]) or "").split("\n")[0])
    if pid is None:
        return {"pid": None, "owner": None, "age_s": None, "command": None, "run": None}
    return _describe_process(int(pid), _read_argv(int(pid), list_processes()))


# --- processes ---------------------------------------------------------------------------------------------------


def _find_training_processes() -> Facts:
    """Find orphaned training processes, and those attached to a terminal or ssh session."""
    own_namespace = read_link("/proc/self/ns/pid")  # processes of other containers do not count
    table = {pid: process for pid, process in list_processes().items()
             if own_namespace is None or read_link(f"/proc/{pid}/ns/pid") in (None, own_namespace)}  # fmt: skip
    argvs = {pid: _read_argv(pid, table) for pid in table}
    training = {pid for pid in table if pid != os.getpid() and _is_training(pid, argvs[pid])}
    stale, attached = [], []
    for pid in sorted(training):
        ancestors = _ancestors(table, table[pid].parent)
        if training.intersection(ancestors):
            continue  # judged with the training process that started it
        if any(_is_evener(argvs[ancestor]) for ancestor in ancestors):
            continue  # what an inspection of this host starts, ours or another user's
        commands = [os.path.basename(argvs[ancestor][0]) if argvs[ancestor] else "" for ancestor in ancestors]
        supervised = any(SUPERVISOR_SCRIPT.search(word) for ancestor in ancestors for word in argvs[ancestor])
        if supervised or any(TERMINAL_MULTIPLEXERS.match(command) for command in commands):
            continue
        if any(command.startswith("sshd") for command in commands) or table[pid].has_terminal:
            attached.append(_describe_process(pid, argvs[pid]))
        elif all(command in ("systemd", "init", "launchd") for command in commands):  # or empty: its parent is pid 1
            stale.append(_describe_process(pid, argvs[pid]))
    return {"stale": stale, "attached": attached}


def kill_stale_processes() -> list[Facts]:
    """Kill orphaned processes of evener's runs, and no others; repeat, as this orphans their children."""
    killed: list[Facts] = []
    for _ in range(50):
        stale = [process for process in _find_training_processes()["stale"] if process["run"]]
        if not stale:
            break
        for process in stale:
            try:
                os.kill(process["pid"], signal.SIGKILL)
                killed.append(process)
            except OSError:  # it has exited, or is another user's
                continue
        time.sleep(0.1)
    return killed


def _is_training(pid: int, argv: list[str]) -> bool:
    """Return whether a process is torchrun, an evener worker, or a rank started by one of them.

    A variable that this session has too is from the login environment, and tells nothing.
    """
    program = os.path.basename(argv[0]) if argv else ""
    if program == "torchrun":
        return True
    if not re.match(r"python|pypy", program, re.IGNORECASE) or any(SUPERVISOR_SCRIPT.search(word) for word in argv):
        return False
    if _is_evener(argv):
        return False
    words = iter(argv[1:])
    for word in words:
        if word == "-m":
            if next(words, "") in TRAINING_MODULES:
                return True
            break
        if not word.startswith("-"):
            if os.path.basename(word) == "torchrun":
                return True
            break
        if word == "-c":
            break
    login_environment = {f"{name}={value}" for name, value in os.environ.items()}
    entries = (read_text(f"/proc/{pid}/environ") or "").split("\0")
    own = "\0".join(entry for entry in entries if entry not in login_environment)
    return RANK_ENVIRONMENT.search(own) is not None


def _is_evener(argv: list[str]) -> bool:
    """Return whether a process is the `evener` command, or what a session of it runs on this host."""
    is_command = [os.path.basename(word) for word in argv[1:2]] == ["evener"] or argv[1:3] == ["-m", "evener"]
    return is_command or any(SESSION_PROGRAM in word for word in argv)


def _read_argv(pid: int, table: dict[int, Process]) -> list[str]:
    """Return the arguments of a process; none if it has ended."""
    if not HAS_PROC:
        return table[pid].command.split() if pid in table else []
    return (read_text(f"/proc/{pid}/cmdline") or "").split("\0")[:-1]


def _ancestors(table: dict[int, Process], pid: int) -> list[int]:
    """Return the ancestors from `pid` upwards, without pid 1."""
    ancestors = []
    while pid > 1 and pid in table and pid not in ancestors:
        ancestors.append(pid)
        pid = table[pid].parent
    return ancestors


def _describe_process(pid: int, argv: list[str]) -> Facts:
    run = owner = age = None
    if LINUX:
        run_ids = re.findall(r"(?:^|\0)EVENER_RUN=([^\0]*)", read_text(f"/proc/{pid}/environ") or "")
        run = run_ids[0] if run_ids else None
        try:
            import pwd

            number = os.stat(f"/proc/{pid}").st_uid
            owner = str(number)
            owner = pwd.getpwuid(number).pw_name
        except (KeyError, OSError):
            pass
        try:
            start_s = int(read_process(pid).start_time) / os.sysconf("SC_CLK_TCK")
            age = max(0.0, float((read_text("/proc/uptime") or "").split()[0]) - start_s)
        except (OSError, LookupError, ValueError):
            pass
    else:
        owner = (run_program(["ps", "-o", "user=", "-p", str(pid)]) or "").strip() or None
        elapsed = (run_program(["ps", "-o", "etime=", "-p", str(pid)]) or "").strip()
        parts = re.match(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", elapsed)
        if parts:
            day, hour, minute, second = [int(part or 0) for part in parts.groups()]
            age = float(((day * 24 + hour) * 60 + minute) * 60 + second)
    command = hide_secrets(" ".join(argv))[:200] or None
    return {"pid": pid, "owner": owner, "age_s": age, "command": command, "run": run}


# --- firewall, GPUs, power ---------------------------------------------------------------------------------------


def _detect_firewall() -> Facts:
    """Detect the firewall, so that a hint can name its command, and the nftables chain that a rule goes into."""
    kind, chain = None, None
    running = set()
    for path in glob.glob("/proc/[0-9]*/comm"):
        running.add((read_text(path) or "").strip())
    if "microsoft" in os.uname().release.lower():  # WSL2: Windows decides what reaches it
        mode = (run_program(["wslinfo", "--networking-mode"]) or "nat").strip().lower()
        kind = "hyper-v" if mode in ("mirrored", "bridged") else "wsl-nat"
    elif re.search(r"^ENABLED=yes", read_text("/etc/ufw/ufw.conf") or "", re.MULTILINE):
        kind = "ufw"
    elif "firewalld" in running or os.path.isdir("/run/firewalld"):
        kind = "firewalld"
    elif not LINUX:
        kind = "macos"
    elif os.getuid() == 0:
        rules = run_program([find_program("nft") or "nft", "-j", "list", "chains"], timeout_s=3)
        try:
            chains = [item["chain"] for item in json.loads(rules or "{}").get("nftables", []) if "chain" in item]
        except ValueError:
            chains = []
        hooked = [
            entry for entry in chains if entry.get("hook") == "input" and entry.get("family") in ("inet", "ip", "ip6")
        ]
        if hooked:
            kind, chain = "nftables", " ".join(hooked[0][word] for word in ("family", "table", "name"))
            if hooked[0]["table"] == "filter" and hooked[0]["name"] == "INPUT":
                kind = "iptables"
    return {"firewall": kind, "firewall_chain": chain}


def read_nft_table(table: str) -> dict[str, Any]:
    """Return {"has_nft", "is_readable", "rules": nft's own JSON, empty without such a table, "ssh_port"}.

    Reading takes root, or sudo without a password; else "is_readable" is false.
    """
    ssh_connection = os.environ.get("SSH_CONNECTION", "").split()
    answer: dict[str, Any] = {"has_nft": False, "is_readable": False, "rules": [],
                             "ssh_port": int(ssh_connection[3]) if len(ssh_connection) == 4 else None}  # fmt: skip
    nft = find_program("nft")
    if not sys.platform.startswith("linux") or nft is None:
        return answer
    answer["has_nft"] = True
    privilege = [] if os.geteuid() == 0 else ["sudo", "-n"]
    try:
        done = subprocess.run([*privilege, nft, "-j", "list", "table", "inet", table], stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=5, check=False)  # fmt: skip
        if done.returncode == 0:
            answer.update(is_readable=True, rules=json.loads(done.stdout.decode())["nftables"])
        else:
            answer["is_readable"] = (
                b"No such file or directory" in done.stderr
            )  # nft's message if there is no such table
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        pass
    return answer


def _collect_gpus() -> Facts:
    """Return the GPUs that the driver reports; an NVIDIA card on the bus without a working driver is an error."""
    cards = 0
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        device_class = read_text(os.path.dirname(path) + "/class") or ""
        if (read_text(path) or "").strip() == "0x10de" and device_class.startswith("0x03"):
            cards += 1
    result: Facts = {"gpus": [], "gpu_capabilities": [], "gpu_driver": None, "gpu_error": None, "gpu_cards": cards,
                    "gpu_iommu": None}  # fmt: skip
    tool = find_program("nvidia-smi")
    if tool is None:
        if cards:
            result["gpu_error"] = "nvidia-smi is not installed"
        return result
    query = [tool, "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(query, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=10, check=False)  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        result["gpu_error"] = f"nvidia-smi: {error}"
        return result
    output = process.stdout.decode(errors="replace").strip()
    if process.returncode:
        if cards or "No devices" not in output:
            result["gpu_error"] = (output.splitlines() or ["nvidia-smi failed"])[0]
        return result
    rows = [[word.strip() for word in line.split(",")] for line in output.splitlines() if line.count(",") >= 2]
    result["gpus"] = [row[0] for row in rows]
    result["gpu_capabilities"] = [float(row[2]) for row in rows if re.fullmatch(r"\d+\.\d+", row[2])]
    result["gpu_driver"] = rows[0][1] if rows else None
    if len(rows) > 1:  # a translating IOMMU between cards is what freezes NCCL's peer-to-peer copies
        groups = [read_text(path + "/iommu_group/type") for path in glob.glob("/sys/bus/pci/drivers/nvidia/0*")]
        result["gpu_iommu"] = any((group or "").startswith("DMA") for group in groups)
    return result


def _collect_power() -> Facts:
    """Return whether the machine runs on battery, and whether a closed lid or idling suspends it."""
    result: Facts = {"has_battery": None, "on_battery": None, "lid_suspends": None, "idle_sleeps": None}
    if not LINUX:
        output = run_program(["pmset", "-g", "batt"]) or ""
        if output:
            result.update(has_battery="InternalBattery" in output, on_battery="Battery Power" in output)
        idle = re.search(r"^\s*sleep\s+(\d+)", run_program(["pmset", "-g"]) or "", re.MULTILINE)
        result.update(idle_sleeps=bool(idle and int(idle.group(1))), lid_suspends=result["has_battery"])
        return result
    supplies = glob.glob("/sys/class/power_supply/*")
    kinds = {path: (read_text(path + "/type") or "").strip() for path in supplies}
    batteries = [
        path for path in supplies
        if kinds[path] == "Battery" and (read_text(path + "/scope") or "").strip() != "Device"  # a mouse has one too
    ]  # fmt: skip
    mains = [read_text(path + "/online") for path in supplies if kinds[path] in ("Mains", "USB")]
    result["has_battery"] = bool(batteries)
    if not batteries:
        return result
    discharging = any((read_text(path + "/status") or "").strip() == "Discharging" for path in batteries)
    result["on_battery"] = discharging and not any((online or "").strip() == "1" for online in mains)
    settings: dict[str, str] = {}
    drop_ins = [path for root in ("/usr/lib", "/run", "/etc")
                for path in sorted(glob.glob(root + "/systemd/logind.conf.d/*"))]  # fmt: skip
    for path in ["/usr/lib/systemd/logind.conf", "/etc/systemd/logind.conf", *drop_ins]:
        settings.update(re.findall(r"^(HandleLidSwitch\w*|IdleAction)=(\S+)", read_text(path) or "", re.MULTILINE))
    masked = all(
        any(read_link(f"{root}/systemd/system/{name}.target") == "/dev/null" for root in ("/etc", "/run"))
        for name in ("sleep", "suspend")
    )
    lid = settings.get("HandleLidSwitch", "suspend")
    on_mains = settings.get("HandleLidSwitchExternalPower", lid)
    sleeps = ("suspend", "hibernate", "poweroff", "hybrid-sleep", "suspend-then-hibernate")
    result["lid_suspends"] = not masked and (lid if result["on_battery"] else on_mains) in sleeps
    result["idle_sleeps"] = not masked and settings.get("IdleAction", "ignore") in sleeps
    return result


# --- helpers -----------------------------------------------------------------------------------------------------


def _parse_number(text: str | None) -> Any:
    try:
        return float(text or "") if "." in (text or "") else int(text or "")
    except ValueError:
        return None


def _parse_kilo(text: str | None) -> float | None:
    number = _parse_number(text)
    return None if number is None else number / 1000
