"""A process reuses the memory that it frees, by the kernel's own count of pages."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.cluster import allocator
from evener.core.cluster.allocator import MALLOC_SETTINGS_PATTERN

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
KEEP = "from evener.core.cluster.allocator import disable_malloc_trim; disable_malloc_trim()"
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


START_ANEW = """
import json, os, sys
from evener.core.cluster.allocator import has_jemalloc, use_jemalloc
use_jemalloc()
print(json.dumps([has_jemalloc(), sorted({"LD_PRELOAD", "MALLOC_CONF"} & os.environ.keys()), sys.argv[1:]]))
"""


def start_anew(**variables: str) -> list[object]:
    """Return whether a process that has asked for jemalloc has it, the variables that it keeps, and its arguments."""
    env = {"PATH": os.environ["PATH"], **variables}
    argv = [sys.executable, "-c", START_ANEW, "two words", "--flag"]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, env=env).stdout)


@pytest.mark.skipif(allocator.find_jemalloc() is None, reason="this host has no jemalloc")
def test_process_starts_anew_with_jemalloc_where_the_host_has_it() -> None:
    assert start_anew() == [True, [], ["two words", "--flag"]]


@pytest.mark.parametrize("name", ["LD_PRELOAD", "MALLOC_CONF", "MALLOC_TRIM_THRESHOLD_"])
def test_allocator_that_the_environment_chooses_is_left_alone(name: str) -> None:
    kept = [] if name == "MALLOC_TRIM_THRESHOLD_" else [name]
    assert start_anew(**{name: ""}) == [False, kept, ["two words", "--flag"]]
