"""A full disk of this machine is one sentence, whichever file could not be written, and never a traceback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from evener.core.base.errors import NoRoomError
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.run_plan import read_plan, write_plan
from evener.core.run.rundir import RunDir

from ..unit.test_prune_hosts import Host, save_checkpoint, write
from .pseudo import argv, environment

RECORDS = Path(__file__).parents[1] / "unit/records/two-hosts"
TIMEOUT_S = 300
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting a small disk takes root and unshare"
)


def on_small_disk(folder: Path, size: str, *args: object, cwd: Path) -> list[str]:
    """Return the command that runs evener where `folder` is a copy of itself on a disk of this size."""
    script = (
        'cp -a "$0" "$0.content" && mount -t tmpfs -o "size=$1" tmpfs "$0" && cp -a "$0.content/." "$0/" && cd "$2" '
        '&& shift 2 && if [ "$1" = --fill ]; then shift; dd if=/dev/zero of="$0/fill" bs=1k 2>/dev/null; fi; exec "$@"'
    )
    return ["unshare", "-m", "sh", "-c", script, str(folder), size, str(cwd), *map(str, args)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )


def is_sentence(done: subprocess.CompletedProcess[str]) -> bool:
    return "No space left on device" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", [["runs", "--json", "runs"], ["doctor", "--fleet", "local", "--json"], ["--help"]])
def test_full_disk_of_standard_output_is_named(tmp_path: Path, verb: list[str]) -> None:
    (tmp_path / "runs").mkdir()
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(argv(*verb), stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("error: ")
    assert is_sentence(done), done.stderr
    assert "Exception ignored" not in done.stderr


@needs_mounts
def test_doctor_into_file_names_the_full_disk(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    into_file = ["sh", "-c", 'exec "$@" > small/doctor.json', "sh", *argv("doctor", "--fleet", "local", "--json")]
    done = run(on_small_disk(tmp_path / "small", "64k", "--fill", *into_file, cwd=tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: standard output: No space left on device",
        "hint:  make room there, then run it again; a run that was started goes on, and evener runs lists it",
    ]


def test_full_disk_of_standard_error_keeps_the_exit_status(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(argv("report", "nothing"), stdout=subprocess.PIPE, stderr=full, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


@needs_mounts
@pytest.mark.parametrize("flags", [[], ["--format", "md"], ["--out", "run/other.html"]])
def test_report_names_the_full_disk(tmp_path: Path, flags: list[str]) -> None:
    shutil.copytree(RECORDS, tmp_path / "run")
    done = run(on_small_disk(tmp_path / "run", "2m", "--fill", *argv("report", "run", *flags), cwd=tmp_path))
    if flags == ["--format", "md"]:
        assert done.returncode == 0, done.stderr  # it writes no file
    else:
        assert done.returncode == 2
        assert is_sentence(done), done.stderr
        assert "run/report.html: " in done.stderr or "run/other.html: " in done.stderr


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run directory that lacks what its host, which is this machine, has: 3 MB of log and of checkpoint."""
    host = Host(tmp_path)
    there, rundir = host.add_run("run"), RunDir(host.runs / "run")
    plan = read_plan(rundir)
    local = HostConfig(address="local", workdir=str(host.workdir))
    write_plan(rundir, msgspec.structs.replace(plan, hosts=[msgspec.structs.replace(plan.hosts[0], host=local)]))
    write(there / "logs/a.log", b"2026-01-01T00:00:00.000Z O " + b"x" * 3_000_000 + b"\n")
    save_checkpoint(there / "checkpoints/step-000020", 1.2, b"x" * 3_000_000)
    (rundir.path / "hosts/a/state.json").unlink()
    for root in (there, rundir.path):
        shutil.copy(RECORDS / "steps/rank-0.jsonl", root / "steps/rank-0.jsonl")
    return host.runs


@needs_mounts
@pytest.mark.parametrize("fill", [[], ["--fill"]])
@pytest.mark.parametrize("verb", ["fetch", "logs -f", "runs", "stop"])
def test_records_and_checkpoints_that_do_not_fit_name_the_full_disk(home: Path, verb: str, fill: list[str]) -> None:
    words = [*verb.split(), "runs" if verb == "runs" else "runs/run"]
    done = run(on_small_disk(home, "1m", *fill, *argv(*words), cwd=home.parent))
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert is_sentence(done), done.stderr
    assert "runs/run/" in done.stderr  # the file that could not be written
    assert "standard output" not in done.stderr


@needs_mounts
def test_page_of_run_whose_records_do_not_fit_goes_on(home: Path) -> None:
    command = on_small_disk(home, "1m", *argv("watch", "runs/run"), cwd=home.parent)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
                          start_new_session=True) as page:  # fmt: skip
        assert page.stdout is not None
        assert page.stdout.readline().startswith("http")
        assert page.stderr is not None
        lines = [page.stderr.readline()]
        while "No space left" not in lines[-1]:
            assert lines[-1], lines
            lines.append(page.stderr.readline())
        os.killpg(page.pid, signal.SIGINT)
        _, rest = page.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in "".join(lines) + rest


def test_other_errors_of_the_system_are_not_called_a_full_disk() -> None:
    assert NoRoomError.from_os_error(PermissionError(13, "Permission denied", "x")) is None
    full = NoRoomError.from_os_error(OSError(28, "No space left on device", "x"))
    assert str(full) == "x: No space left on device"
