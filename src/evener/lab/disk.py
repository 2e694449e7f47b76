"""What disk does a host of a lab have, where it is not this machine's? A file system in memory, mounted at its home.

It is mounted outside of the host's own mounts: it outlives the host's power, as a disk does.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from evener.core.errors import EvenerError
from evener.lab.needs import find_programs

PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes
TRIES = 20  # somebody may be writing there


def mount(home: Path, size: int) -> None:
    """Of so many bytes."""
    [program] = find_programs("mount")
    subprocess.run([program, "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", home], check=True)


def resize(home: Path, size: int | None) -> None:
    """To so many bytes; None: to those that are taken, so that none is free."""
    [program] = find_programs("mount")
    for _ in range(TRIES):
        found = os.statvfs(home)
        taken = (found.f_blocks - found.f_bfree) * found.f_frsize
        options = f"remount,size={max(PAGE, taken) if size is None else size}"
        done = subprocess.run([program, "-o", options, home], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise EvenerError(f"the disk at {home} could not be resized", output=done.stderr)


def unmount_all(lab: Path) -> None:
    """Every disk of a lab's hosts."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in mounted:
        if Path(place).is_relative_to(lab):
            [program] = find_programs("umount")
            subprocess.run([program, "--lazy", place], check=True)
