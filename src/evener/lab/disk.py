"""Give a host a disk of its own: a tmpfs, mounted at its home.

It is mounted outside of the host's mount namespace, so that it survives a power cut, as a disk does.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from evener.core.base.errors import EvenerError
from evener.lab.lab_requirements import find_programs

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")  # bytes
MAX_RESIZE_ATTEMPTS = 20  # another process may write to it meanwhile


def mount(home: Path, size: int) -> None:
    """Mount a disk of this many bytes at a host's home."""
    [program] = find_programs("mount")
    subprocess.run([program, "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", home], check=True)


def resize(home: Path, size: int | None) -> None:
    """Change the size of a disk to this many bytes; None: to the used bytes, so that none is free."""
    [program] = find_programs("mount")
    for _ in range(MAX_RESIZE_ATTEMPTS):
        stat = os.statvfs(home)
        used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        options = f"remount,size={max(PAGE_BYTES, used) if size is None else size}"
        result = subprocess.run([program, "-o", options, home], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return
    raise EvenerError(f"the disk at {home} could not be resized", output=result.stderr)


def unmount_all(lab: Path) -> None:
    """Unmount the disks of all hosts of a lab."""
    mount_points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount_point in mount_points:
        if Path(mount_point).is_relative_to(lab):
            [program] = find_programs("umount")
            subprocess.run([program, "--lazy", mount_point], check=True)
