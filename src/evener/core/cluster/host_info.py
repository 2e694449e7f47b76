"""Describe the local host (CPU, usable cores, memory), and have the kernel end a process with its parent.

Standard library only, except for the struct.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec

from evener.core.cluster.allocator import has_jemalloc

PR_SET_PDEATHSIG = 1  # of sys/prctl.h


class HostInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Name, system, CPU and memory of a host in a run."""

    host: str
    system: str
    cpu: str
    cores: int  # usable by this process: limited by affinity and cgroup quota
    memory_bytes: int | None
    python: str
    has_jemalloc: bool = False  # as the allocator of its rank


def local_host_info() -> HostInfo:
    """Return the information about the local host."""
    return HostInfo(
        host=os.environ.get("EVENER_HOST") or socket.gethostname(),  # the fleet file's name takes precedence
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu_model(),
        cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        python=platform.python_version(),
        has_jemalloc=has_jemalloc(),
    )


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process.

    getrusage is only the fallback: its figure includes the process's memory before it executed this program.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, immediately if it has ended already. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGKILL)


def usable_cores() -> int:
    """Return the cores usable by this process: the affinity mask, limited by a cgroup quota (v2 or v1); at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota))) if quota else cores


def _cgroup_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text()
            period = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    return float(quota) / float(period) if quota.strip() not in ("max", "-1") else None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    """Return the memory of the host, limited by a cgroup (v2 or v1)."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):
        return None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(limits)
