"""Describe the local host (CPU, usable cores, memory), and change process settings through the C library.

Standard library only, except for the struct.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

PR_SET_PDEATHSIG = 1  # of sys/prctl.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of malloc.h
MAPPED_BLOCK_BYTES = 1 << 20
MALLOC_SETTINGS_PATTERN = r"MALLOC_(MMAP|TRIM|TOP_PAD)_|GLIBC_TUNABLES=.*glibc\.malloc\.(mmap|trim|top_pad)"


class HostInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Name, system, CPU and memory of a host in a run."""

    host: str
    system: str
    cpu: str
    cores: int  # usable by this process: limited by affinity and cgroup quota
    memory_bytes: int | None
    python: str


def local_host_info() -> HostInfo:
    """Return the information about the local host."""
    return HostInfo(
        host=os.environ.get("EVENER_HOST") or socket.gethostname(),  # the fleet file's name takes precedence
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu_model(),
        cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        python=platform.python_version(),
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


def disable_malloc_trim() -> None:
    """Make malloc keep freed memory in this process, for its next tensors.

    glibc returns large blocks to the kernel, which must zero every page again for the next pass. *Measured* on one core
    (2026-11-23), a pass of d8 over 2048 tokens: 430,000 page faults and 5.4 s; none and 4.5 s with this. `char` frees
    small blocks: no difference. No effect without glibc, or if the environment has settings of its own: MALLOC_MMAP_…,
    MALLOC_TRIM_…, MALLOC_TOP_PAD_ or GLIBC_TUNABLES of malloc.
    """
    # allocate large blocks in the main thread's heap too; never trim the free end of the heap  [mallopt(3)]
    _set_malloc({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})


def unmap_freed_blocks() -> None:
    """Make malloc return freed blocks of MAPPED_BLOCK_BYTES and more to the kernel: for little memory, not for speed.

    Weights that are gathered and freed block by block fit badly into the holes that they leave in a heap. *Measured*
    (--sync fsdp on two ranks, glibc 2.36, 2026-11-30): with 27M parameters and 512 tokens each a rank's peak is 0.70
    instead of 0.97 GB, and a step takes 1.5 times the CPU time; with 85M and 64 tokens 1.23 GB instead of 1.9 to 2.2;
    with `char` and 3072 tokens it takes twice the CPU time. Large pages (GLIBC_TUNABLES=glibc.malloc.hugetlb=1) save an
    eighth of it. No effect where `disable_malloc_trim` has none.
    """
    _set_malloc({M_MMAP_THRESHOLD: MAPPED_BLOCK_BYTES})


def _set_malloc(values: Mapping[int, int]) -> None:
    """Set parameters of glibc's malloc, unless the environment sets any."""
    if any(re.match(MALLOC_SETTINGS_PATTERN, f"{name}={value}") for name, value in os.environ.items()):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in values.items():
            mallopt(parameter, value)


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
