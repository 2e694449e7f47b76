"""Limit the CPU time and memory of a host: a cgroup under `evener-lab`, version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from evener.core.base.errors import EvenerError

ROOT = Path("/sys/fs/cgroup")
SUBTREE = "evener-lab"
PERIOD_US = 20_000  # period of the CPU quota: short, so that a host is slow rather than jerky
_REMOVED_WITHIN_S = 5.0


def make(lab: str, host: str, cpus: float | None, memory_bytes: int | None, root: Path = ROOT) -> list[str]:
    """Create the cgroups of a host; return the `cgroup.procs` files that its first process must write itself into."""
    settings: list[tuple[str, dict[str, str]]] = []  # controller, {file: value}
    is_v1 = (root / "cpu" / "cgroup.procs").exists()
    if cpus is not None:
        quota_us = max(1000, round(cpus * PERIOD_US))
        if is_v1:
            settings.append(("cpu", {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}))
        else:
            settings.append(("cpu", {"cpu.max": f"{quota_us} {PERIOD_US}"}))
    if memory_bytes is not None:
        settings.append(("memory", {"memory.limit_in_bytes" if is_v1 else "memory.max": str(memory_bytes)}))
    procs = []
    try:
        for controller, values in settings:
            group = _make_group(root, controller, lab, host, is_v1)
            for file, value in values.items():
                (group / file).write_text(value)
            procs.append(str(group / "cgroup.procs"))
    except OSError as error:
        raise EvenerError(
            f"host {host}: cannot create its cgroup: {error.filename}: {error.strerror}",
            hint="leave out cpus and memory, or enable the cpu and memory controllers in this machine's cgroups",
        ) from None
    return list(dict.fromkeys(procs))


def remove(lab: str, root: Path = ROOT) -> None:
    """Remove the cgroups of a lab, and `evener-lab` itself with the last lab."""
    for subtree in (*root.glob(f"*/{SUBTREE}"), root / SUBTREE):
        if not subtree.is_dir() or subtree.parent.is_symlink():
            continue
        for group in (*(subtree / lab).glob("*/"), subtree / lab):
            _rmdir(group)
        with contextlib.suppress(OSError):  # another lab's
            subtree.rmdir()


def _make_group(root: Path, controller: str, lab: str, host: str, is_v1: bool) -> Path:
    if is_v1:
        group = root / controller / SUBTREE / lab / host
        group.mkdir(parents=True, exist_ok=True)
        return group
    if controller not in (root / "cgroup.subtree_control").read_text().split():
        raise EvenerError(
            f"host {host}: this machine's cgroups do not enable the {controller} controller",
            hint=f"as root: echo +{controller} > {root}/cgroup.subtree_control",
        )
    group = root
    for name in (SUBTREE, lab, host):
        if group != root:
            (group / "cgroup.subtree_control").write_text(f"+{controller}")
        group /= name
        group.mkdir(exist_ok=True)
    return group


def _rmdir(group: Path) -> None:
    """Remove a cgroup; retry, since the kernel releases it a moment after its last process has ended."""
    deadline = time.monotonic() + _REMOVED_WITHIN_S
    while group.is_dir():
        try:
            os.rmdir(group)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EvenerError(f"{group} cannot be removed: {error.strerror}") from None
            time.sleep(0.005)
