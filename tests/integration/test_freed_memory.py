"""A process reuses the memory that it frees, by the kernel's own count of pages."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.cluster.host_info import MALLOC_SETTINGS_PATTERN

BLOCK = 80 << 20  # more than glibc ever keeps
FREED = f"""
import ctypes, resource, sys
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = malloc({BLOCK})
    ctypes.memset(block, 1, {BLOCK})
    free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), faults())
KEEP
print(faults(), faults())
"""
KEEP = "from evener.core.cluster.host_info import disable_malloc_trim; disable_malloc_trim()"
JOIN = "import evener; evener.join(evener.parse_args(['--device', 'cpu', '--out', sys.argv[1]]))"


@pytest.mark.parametrize(
    ("variable", "is_chosen"),
    [("MALLOC_TRIM_THRESHOLD_=131072", True), ("MALLOC_MMAP_MAX_=65536", True), ("MALLOC_ARENA_MAX=2", False),
     ("GLIBC_TUNABLES=glibc.malloc.check=1:glibc.malloc.mmap_max=65536", True),
     ("GLIBC_TUNABLES=glibc.malloc.check=1", False)],
)  # fmt: skip
def test_malloc_settings_chosen_by_user_are_recognized(variable: str, is_chosen: bool) -> None:
    assert bool(re.match(MALLOC_SETTINGS_PATTERN, variable)) == is_chosen


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc gives large blocks back")
@pytest.mark.parametrize("keep", [KEEP, JOIN])
def test_freed_memory_is_reused(keep: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FREED.replace("KEEP", keep), str(tmp_path / "run")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    before, first, _, after = map(int, done.stdout.split())
    assert min(before, first) > 100  # pages of 4 KiB, or large ones
    assert after < min(before, first) / 10
