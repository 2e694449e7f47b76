"""Let a host's disk lose in a power loss what was not flushed: all writes since the last writeback without an fsync.

The kernel keeps what programs write in memory for some seconds, and a lab's power loss leaves this machine's kernel
running. So a library in all programs of the host, and a program beside them, record what is durable (see
`programs/writeback.c`); `lose_unsynced` puts it back. Both are compiled for each host, by gcc.

    hosts/a/home/         the home as its programs see it
    hosts/a/disk/KEY      what of it is durable: the content of a file, or the names in a folder
    hosts/a/disk.so       the library
    hosts/a/writeback     the program
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

from evener.core.base.errors import EvenerError
from evener.lab.lab_requirements import find_programs

SOURCE = Path(__file__).parent / "programs" / "writeback.c"


def prepare(host: Path) -> None:
    """Compile library and program for the host with this folder, and record all of its home as durable."""
    (host / "disk").mkdir()
    [gcc] = find_programs("gcc")
    paths = [f'-DHOME="{(host / "home").resolve()}"', f'-DSTORE="{(host / "disk").resolve()}"']
    for target, options in ((_library(host), ["-shared", "-fPIC"]), (_program(host), ["-DPROGRAM"])):
        command = [gcc, "-O1", *options, *paths, str(SOURCE), "-o", str(target), "-ldl"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise EvenerError("gcc cannot compile writeback.c", output=result.stderr, hint="apt install libc6-dev")
    subprocess.run([_program(host)], check=True)


def preload_text(host: Path) -> str:
    """Return the host's /etc/ld.so.preload."""
    return f"{_library(host)}\n"


def service_argv(host: Path, interval_s: float) -> list[str]:
    """Return the service of the host that makes its home durable at an interval."""
    return [str(_program(host)), str(interval_s)]


def lose_unsynced(host: Path) -> None:
    """Put back what is durable of the home of a host that is off."""
    home, disk = host / "home", host / "disk"
    (root,) = (record for record in disk.iterdir() if record.name.startswith(f"d{home.stat().st_ino}-"))
    for child in home.iterdir():
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    _restore_folder(disk, root.name, home, {})
    shutil.rmtree(disk)
    disk.mkdir()
    subprocess.run([_program(host)], check=True)


def _restore_folder(disk: Path, key: str, folder: Path, restored: dict[str, Path]) -> None:
    """Restore what has a name in a folder; `restored` has the first path of each file, to which others are linked.

    What has a durable name alone is an empty file or folder.
    """
    record = disk / key
    fields = record.read_bytes().split(b"\0")[:-1] if record.exists() else []
    for child, name in zip(map(os.fsdecode, fields[::2]), map(os.fsdecode, fields[1::2]), strict=True):
        path = folder / name
        if child.startswith("@"):
            path.symlink_to(child[1:])
        elif child.startswith("d"):
            path.mkdir()
            _restore_folder(disk, child, path, restored)
        elif child in restored:
            path.hardlink_to(restored[child])
        elif (disk / child).exists():
            shutil.copy2(disk / child, path)
            restored[child] = path
        else:
            path.touch()
    if record.exists():
        folder.chmod(stat.S_IMODE(record.stat().st_mode))


def _library(host: Path) -> Path:
    return host / "disk.so"


def _program(host: Path) -> Path:
    return host / "writeback"
