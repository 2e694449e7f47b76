"""Prepare a host for training: its venv, the packages installed there, and pip.

Nothing is decided here: the controller inspects, compares and decides (`transfer/host_setup.py`). While packages
change, the file VENV/evener-unfinished exists, so that the next setup detects an interruption. Standard library
only, Python 3.8 or newer, Linux or macOS.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from typing import Any, Dict, Iterable, Iterator, Sequence, TextIO  # noqa: UP035  python 3.8

from evener.node.remote.content_store import make_private_workdir
from evener.node.remote.file_io import absolute_path, open_own_file, read_text, write_atomic
from evener.node.remote.programs import end_with_parent, find_program

MIN_PYTHON_VERSION = (3, 11)
BASE_PYTHON_FILE = "evener-made-of"  # in a venv: the path of the interpreter that it replaces
UNFINISHED_FILE = "evener-unfinished"
PROGRESS_INTERVAL_S = 5  # interval of the sign of life while pip prints nothing
PROGRAM_FOLDERS = ("~/.local/bin", "/usr/local/bin", "/opt/homebrew/bin", "/usr/bin")

# Runs in the interpreter in question: the versions that it would import. No package's code is executed.
INSTALLED_PROGRAM = r"""
import hashlib, importlib.metadata, importlib.util, json, os, platform, re, sys
packages, half, editable = {}, [], None
for dist in importlib.metadata.distributions():
    path = getattr(dist, "_path", None)
    whole = path is None or not str(path).endswith(".dist-info") or os.path.exists(os.path.join(path, "INSTALLER"))
    name = dist.metadata["Name"] if whole else None
    if not name:
        half.append(str(path))
        continue
    name = re.sub(r"[-_.]+", "-", name).lower()
    packages.setdefault(name, dist.version)
    if name == "evener":
        direct = json.loads(dist.read_text("direct_url.json") or "{}")
        editable = direct.get("url") if direct.get("dir_info", {}).get("editable") else None
def folder_of(name):
    spec = importlib.util.find_spec(name)
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else None
def content_hash(root):
    digest, files = hashlib.blake2b(digest_size=16), []
    for folder, folders, names in os.walk(root):
        folders[:] = [one for one in folders if one != "__pycache__"]
        files += [os.path.relpath(os.path.join(folder, one), root).replace(os.sep, "/") for one in names]
    for name in sorted(files):
        with open(os.path.join(root, name), "rb") as file:
            digest.update(name.encode() + b"\0" + hashlib.blake2b(file.read()).digest())
    return digest.hexdigest()
torch, cuda, evener = folder_of("torch"), None, folder_of("evener")
if torch and os.path.exists(os.path.join(torch, "version.py")):
    with open(os.path.join(torch, "version.py")) as file:
        cuda = (re.findall(r"^cuda\b.*=\s*['\"]([^'\"]+)['\"]", file.read(), re.MULTILINE) or [None])[0]
libc = platform.libc_ver()
print(json.dumps({
    "executable": sys.executable, "prefix": sys.prefix, "is_venv": sys.prefix != sys.base_prefix,
    "packages": packages, "half": half, "evener_hash": content_hash(evener) if evener else None,
    "editable": editable, "torch_cuda": cuda,
    "libc": list(libc), "mac": platform.mac_ver()[0],
    "markers": {
        "implementation_name": sys.implementation.name, "implementation_version": platform.python_version(),
        "os_name": os.name, "platform_machine": platform.machine(), "platform_release": platform.release(),
        "platform_system": platform.system(), "platform_version": platform.version(),
        "python_full_version": platform.python_version(), "sys_platform": sys.platform,
        "platform_python_implementation": platform.python_implementation(),
        "python_version": "%d.%d" % sys.version_info[:2]},
}))
"""

Item = Dict[str, Any]  # noqa: UP006  what a function yields

_held_locks: dict[str, TextIO] = {}


def inspect_setup(
    workdir: str, python: str | None = None, default_python: str | None = None, preferred: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the interpreter that a setup will use on this host, what is installed for it, and the free disk space.

    `python`: the interpreter that the fleet file names, or that WORKDIR/venv was made of; `default_python`: the one to
    use if there is no venv.
    """
    home = absolute_path(workdir)
    venv_python = os.path.join(home, "venv", "bin", "python")
    target = (
        _resolve_program(python)
        if python
        else venv_python
        if default_python is None or os.path.exists(venv_python)
        else default_python
    )
    if os.path.exists(venv_python) and read_text(os.path.join(home, "venv", BASE_PYTHON_FILE)) == target:
        target = venv_python
    result: dict[str, Any] = {
        "home": home,
        "python": target,
        "is_own": target == venv_python,
        "now": inspect_interpreter(target) if target and os.path.exists(target) else None,
        "has_gpu": _has_gpu(),
        "free_bytes": _free_bytes(home),
    }
    if result["is_own"] and (result["now"] is None or "pip" not in result["now"]["packages"]):
        names = [*preferred, "python3", "python3.14", "python3.13", "python3.12", "python3.11"]
        # there is no venv, or half of one
        result.update(now=None, base=_find_base_python([_resolve_program(python)] if python else names))
    elif result["now"] is not None and not result["now"]["is_venv"]:
        result["base"] = _find_base_python([target])  # it is left unchanged
    result["unfinished"] = None
    if result["now"] is not None:
        with contextlib.suppress(OSError), open(os.path.join(result["now"]["prefix"], UNFINISHED_FILE)) as file:
            result["unfinished"] = file.read() or "packages"
    return result


def lock_setup(workdir: str) -> str | None:
    """Lock the host for this setup, until `finish_setup` or the end of the connection; return None, or who holds it."""
    home = make_private_workdir(workdir)
    file = os.fdopen(open_own_file(os.path.join(home, "setup.lock"), os.O_RDWR | os.O_CREAT), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        return holder
    file.truncate(0)
    file.write(f"process {os.getpid()}, which began at {time.strftime('%H:%M:%S')}")
    file.flush()
    _held_locks["lock"] = file
    return None


def mark_unfinished(prefix: str, what: str) -> None:
    """Mark an environment as unfinished; `what` is about to change: "packages", or "evener" alone."""
    write_atomic(os.path.join(prefix, UNFINISHED_FILE), what.encode())


def finish_setup(prefix: str | None = None) -> None:
    """Unlock the host; with `prefix` mark its environment as finished."""
    if prefix is not None:
        os.unlink(os.path.join(prefix, UNFINISHED_FILE))
    file = _held_locks.pop("lock", None)
    if file is not None:
        file.truncate(0)
        file.close()


def make_venv(workdir: str, base: str, named: str | None = None) -> Iterator[Item]:
    """Create WORKDIR/venv from an interpreter, after removing an earlier venv. Yields as `_run_streaming` does.

    `named`: the interpreter that the fleet file names, and that the venv replaces from now on.
    """
    folder = os.path.join(absolute_path(workdir), "venv")
    shutil.rmtree(folder, ignore_errors=True)
    is_made = False
    try:
        for item in _run_streaming([base, "-I", "-m", "venv", folder]):
            if item.get("status") == 0:
                mark_unfinished(folder, "packages")
                if named is not None:
                    write_atomic(os.path.join(folder, BASE_PYTHON_FILE), _resolve_program(named).encode())
                is_made = True
            yield item
    finally:
        if not is_made:
            shutil.rmtree(folder, ignore_errors=True)


def run_pip(python: str, arguments: Sequence[str], forget: Iterable[str] = ()) -> Iterator[Item]:
    """Run pip; yields as `_run_streaming` does. `forget`: .dist-info folders of half-installed packages, to remove."""
    for path in forget:
        if path.endswith(".dist-info") and os.path.isdir(path):
            shutil.rmtree(path)
    base = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-color"]
    yield from _run_streaming([*base, *arguments])


def try_worker_import(python: str) -> Iterator[Item]:
    """Import what a worker imports. Yields as `_run_streaming` does, and last {"works": versions} on success."""
    code = (
        "import json, torch, evener.worker.train.run; "
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.cuda.is_available()}))"
    )
    lines: list[str] = []
    status = None
    for item in _run_streaming([python, "-c", code]):
        lines += [item["line"]] if "line" in item else []
        status = item.get("status", status)
        yield item
    if status == 0:
        yield {"works": json.loads(lines[-1])}


def can_open_url(url: str, timeout_s: float = 5.0) -> bool:
    """Return whether this machine can open a URL."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s):  # noqa: S310
            return True
    except (OSError, ValueError):
        return False


def inspect_interpreter(python: str) -> dict[str, Any] | None:
    """Return what an interpreter would import, or None if it does not start."""
    argv = [python, "-c", INSTALLED_PROGRAM]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, cwd="/", check=False)
        installed: dict[str, Any] = json.loads(done.stdout.decode().strip().splitlines()[-1])
        return installed
    except (OSError, ValueError, IndexError):
        return None


def _find_base_python(names: Iterable[str]) -> dict[str, Any]:
    """Return the first of these interpreters that is new enough and can make a venv, or why none is."""
    path = os.pathsep.join([os.environ.get("PATH", "")] + [os.path.expanduser(place) for place in PROGRAM_FOLDERS])
    code = (
        "import sys, json; from importlib.util import find_spec as find; "
        "has_venv = find('venv') is not None and find('ensurepip') is not None; "
        "print(json.dumps([sys.version_info[:3], has_venv, sys.executable]))"
    )
    rejected: list[str] = []
    without: dict[str, Any] | None = None
    for name in dict.fromkeys(names):
        program = shutil.which(name, path=path)
        if program is None:
            continue
        try:
            output = subprocess.run([program, "-I", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL, timeout=30, check=True).stdout  # fmt: skip
            version, has_venv, executable = json.loads(output.decode())
        except (OSError, ValueError, subprocess.SubprocessError):
            continue  # a shim of a version that is not installed
        text = ".".join(map(str, version))
        rejected.append(f"{name} is {text}")
        if tuple(version[:2]) >= MIN_PYTHON_VERSION:
            if has_venv:
                return {"python": executable, "version": text}
            without = without or {"python": None, "version": text, "lacks_venv": executable}
    return without or {"python": None, "seen": rejected}


def _run_streaming(argv: list[str]) -> Iterator[Item]:
    """Run a program that dies with this process; yields {"line": …} or {"alive": seconds}, last {"status": …}."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PYTHONUNBUFFERED"] = "1"
    parent = os.getpid()
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd="/",
        start_new_session=True, preexec_fn=lambda: end_with_parent(parent),
    )  # fmt: skip
    assert process.stdout is not None
    output = process.stdout
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in output:
            lines.put(line.decode(errors="replace").rstrip())
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    began = time.monotonic()
    try:
        while True:
            try:
                line = lines.get(timeout=PROGRESS_INTERVAL_S)
            except queue.Empty:
                yield {"alive": round(time.monotonic() - began)}
                continue
            if line is None:
                break
            yield {"line": line}
        yield {"status": process.wait()}
    finally:
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(1)
        output.close()


def _has_gpu() -> bool:
    """Return whether NVIDIA's driver reports a GPU."""
    tool = find_program("nvidia-smi")
    if tool is None:
        return False
    try:
        done = subprocess.run([tool, "-L"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              timeout=15, check=False)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and b"GPU " in done.stdout


def _free_bytes(folder: str) -> int:
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def _resolve_program(python: str) -> str:
    path = os.path.expanduser(python)
    return shutil.which(path) or os.path.abspath(path)
