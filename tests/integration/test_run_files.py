"""A run directory with links, pipes or huge files cannot make evener write, truncate or end anything outside of it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.core.base.errors import EvenerError
from evener.core.base.file_io import LineFile, create_file, lock_file, open_for_append, write_atomic
from evener.core.run.run_plan import read_plan
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.launch import launcher, prune_runs
from evener.node.remote import bundle, project_sync, run_control, supervisor, venv_setup
from evener.report.export.logger_feed import feed_logger
from evener.ssh.fake import FakeSession
from evener.transfer import checkpoint_transfer, mirror

from ..in_process import time_limit
from ..unit.test_damaged_files import EVENER, make_world, nothing_begins, outcome

KEPT = b"precious\nwithout a newline at its end"
TIMEOUT_S = 60.0
TERABYTE = 1 << 40


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    make_world(folder)
    return folder


@pytest.fixture
def world(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with runs; `outside` beside it must stay as it is."""
    folder = tmp_path / "world"
    shutil.copytree(pristine, folder)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(KEPT)
    monkeypatch.chdir(folder)
    with time_limit(TIMEOUT_S):
        yield folder
    assert {path.name: path.read_bytes() for path in (tmp_path / "outside").iterdir()} == {"file": KEPT}


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else in the place of a file or folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)


def link_to(target: Path) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def hard_link_to(target: Path) -> Callable[[Path], object]:
    return lambda path: path.hardlink_to(target)


def refused(do: Callable[[], object]) -> None:
    with pytest.raises((EvenerError, OSError)):
        do()


# --- locks ------------------------------------------------------------------------------------------------------------

LOCKS: dict[str, Callable[[], object]] = {
    "runs/away/hosts/carry.lock": lambda: outcome(["fetch", "runs/away"]),
    "runs/away/hosts/laptop/mirror.lock": lambda: outcome(["logs", "runs/away"]),
    "runs/here/loggers/tensorboard.lock": lambda: feed_logger(RunDir("runs/here"), "tensorboard", Discarding()),
    "runs/here/host/attached": lambda: start_attached(),
}


class Discarding:
    """A logger that keeps nothing."""

    def begin(self, run: Any) -> str:
        return "1"

    def log(self, *_: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, verdict: str) -> None:
        pass


def start_attached() -> None:
    """Start the run as `evener train --resume` does, up to the request to its host."""
    run = RunDir("runs/here")
    session = FakeSession("here", {"run_control.start": lambda **_: {"state": "running"}})
    launcher.start(run, read_plan(run), {"here": session}, attached=True).__exit__(None, None, None)


@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize("trick", ["link", "hard link", "pipe", "device"])
def test_lock_that_is_not_our_regular_file_is_neither_emptied_nor_waited_for(
    world: Path, name: str, trick: str
) -> None:
    tricks = {"link": link_to(world.parent / "outside/file"), "hard link": hard_link_to(world.parent / "outside/file"),
              "pipe": os.mkfifo, "device": link_to(Path("/dev/zero"))}  # fmt: skip
    replace(world / name, tricks[trick])
    with nothing_begins(), contextlib.suppress(OSError, EvenerError):
        LOCKS[name]()


def test_lock_is_not_truncated(world: Path) -> None:
    path = world / "lock"
    path.write_bytes(KEPT)
    with lock_file(path, is_blocking=False), pytest.raises(BlockingIOError):
        lock_file(path, is_blocking=False)
    assert path.read_bytes() == KEPT


def test_run_with_an_odd_lock_is_not_pruned(world: Path) -> None:
    replace(world / "runs/here/host/attached", os.mkfifo)
    assert prune_runs.is_protected(RunDir("runs/here"), Path("runs"))


def test_run_behind_a_linked_folder_is_not_pruned(world: Path) -> None:
    (world / "linked").symlink_to(world / "runs")
    (world / "others").mkdir()
    (world / "others/bench").symlink_to(world / "runs")
    assert not prune_runs.is_protected(RunDir("runs/here"), Path("runs"))
    assert not prune_runs.is_protected(RunDir("linked/here"), Path("linked"))
    assert prune_runs.is_protected(RunDir("others/bench/here"), Path("others"))


def test_host_locks_are_neither_emptied_nor_followed(world: Path) -> None:
    home, outside = world / "evener", world.parent / "outside/file"
    (home / "projects").mkdir(parents=True)
    for name in ("setup.lock", "projects/mine.lock"):
        (home / name).symlink_to(outside)
    (home / "tree.json").write_text('{"files": [], "links": []}')
    refused(lambda: venv_setup.lock_setup(str(home)))
    refused(lambda: project_sync.sync(str(home / "tree"), str(home / "projects/mine")))


@pytest.mark.parametrize(("verb", "name"), [("report", "report.html"), ("trace", "trace.json")])
def test_folder_in_the_place_of_an_output_is_one_error_message(world: Path, verb: str, name: str) -> None:
    path = world / "runs/here" / name
    path.unlink(missing_ok=True)
    path.mkdir()
    argv = [sys.executable, "-P", "-m", "evener", verb, "runs/here"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (2, f"error: runs/here/{name}: Is a directory\n")


# --- pids -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def victim(world: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A program that holds its own pid file locked, as many daemons do."""
    pid_file = world / "victim.pid"
    code = ("import fcntl, os, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
            "print(os.getpid(), file=file, flush=True); print(flush=True); sys.stdin.read()")  # fmt: skip
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(pid_file)], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process, pid_file
        process.kill()


@pytest.mark.parametrize("make", [link_to, hard_link_to])
def test_stop_ends_no_program_whose_pid_file_stands_in_for_the_lock(
    victim: tuple[subprocess.Popen[bytes], Path], make: Callable[[Path], Callable[[Path], object]]
) -> None:
    process, pid_file = victim
    replace(Path("runs/here/host/lock"), make(pid_file))
    for _ in zip(range(3), run_control.stop("runs/here", now=True), strict=False):
        pass
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)


def test_stop_sends_no_signal_to_a_pid_that_is_not_the_supervisors(
    victim: tuple[subprocess.Popen[bytes], Path],
) -> None:
    """The lock is the run's own, and held, but the pid in it belongs to another program by now."""
    process, _ = victim
    lock = Path("runs/here/host/lock")
    lock.write_text(f"{process.pid}\n")
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for _ in zip(range(3), run_control.stop("runs/here", now=True), strict=False):
            pass
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)


# --- files that are written -------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[], object]] = {
    "runs/here/events.jsonl": lambda: RunWriter("runs/here").add_event("start"),
    "runs/away/hosts/.controller/events.jsonl": lambda: mirror.record_controller_event(
        RunDir("runs/away"), read_plan(RunDir("runs/away")), "start"),
    "runs/here/steps/rank-0.jsonl": lambda: LineFile(RunDir("runs/here").steps_path(0)).write(b"{}\n"),
    "runs/here/loggers/tensorboard.log": lambda: open_for_append(RunDir("runs/here").inside("loggers/tensorboard.log")),
    "runs/here/logs/here.log": lambda: supervisor.TimestampedLog("runs/here/logs/here.log").add("O", b"text\n"),
    "runs/here/host/lock": lambda: supervisor.acquire_lock("runs/here/host/lock"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("make", [link_to, hard_link_to])
def test_nothing_is_appended_through_a_link(world: Path, name: str, make: Callable[..., Any]) -> None:
    replace(world / name, make(world.parent / "outside/file"))
    refused(WRITES[name])


@pytest.mark.parametrize("name", WRITES)
def test_nothing_waits_for_the_reader_of_a_pipe(world: Path, name: str) -> None:
    replace(world / name, os.mkfifo)
    with time_limit(10):
        refused(WRITES[name])


@pytest.mark.parametrize("target", ["outside/file", "world/runs/here/events.jsonl"])
def test_picture_is_not_written_through_a_link(world: Path, target: str) -> None:
    before = (world / "runs/here/events.jsonl").read_bytes()
    (world / "runs/here/report.png").symlink_to(world.parent / target)
    with nothing_begins():
        ended = outcome(["report", "runs/here", "--format", "png"])[0]
    assert ended == ("refused" if target == "outside/file" else "status 0")
    assert (world / "runs/here/events.jsonl").read_bytes() == before


def test_new_and_replaced_files_do_not_follow_links(world: Path) -> None:
    for name, write in (("a", lambda path: create_file(path).close()), ("b", lambda path: write_atomic(path, b"x"))):
        (world / name).symlink_to(world.parent / "outside/file")
        write(world / name)
        assert not (world / name).is_symlink()


def test_install_tree_does_not_write_through_a_link(world: Path) -> None:
    (world / "tree").mkdir()
    (world / "tree" / "manifest.json").write_bytes(b"new")
    (world / "runs/here/manifest.json.tmp").symlink_to(world.parent / "outside/file")
    run_control.install_tree("runs/here", "tree")
    assert (world / "runs/here/manifest.json").read_bytes() == b"new"


def test_output_left_by_a_killed_supervisor_is_copied_to_its_own_logs_alone(world: Path) -> None:
    """`begun.json` names the log whose incomplete last line is cut off, and the host in the names of the others."""
    ranks = world / "runs/here/host/ranks"
    (ranks / "0-0/0/0").mkdir(parents=True)
    (ranks / "0-0/0/0/stdout.log").write_bytes(b"text\n")
    for log, host in (("../../../../outside/file", "here"), ("here.log", "../../../../outside/x")):
        begun = {"log": log, "sizes": {}, "host": host, "first_rank": 0}
        (ranks).mkdir(exist_ok=True)
        (ranks / "begun.json").write_text(json.dumps(begun))
        supervisor.recover_rank_logs("runs/here")


# --- folders ----------------------------------------------------------------------------------------------------------

FOLDER_VERBS = [
    ["report", "RUN"], ["runs", "--json"], ["logs", "RUN"], ["stop", "RUN"], ["fetch", "RUN"], ["trace", "RUN"],
    ["export", "RUN"], ["train", "--resume", "RUN"],
]  # fmt: skip
FOLDERS = ["runs/here/steps", "runs/here/logs", "runs/here/host", "runs/here/checkpoints", "runs/here/loggers",
           "runs/here/checkpoints/step-000003", "runs/away/hosts", "runs/away/hosts/laptop", "runs/away/steps",
           "runs/away/hosts/.controller", "runs/here/export", "runs/away/files"]  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_that_leads_out_of_the_run_is_not_entered(world: Path, name: str) -> None:
    replace(world / name, link_to(world.parent / "outside"))
    with nothing_begins():
        for verb in FOLDER_VERBS:
            ended, said = outcome(["/".join(name.split("/")[:2]) if word == "RUN" else word for word in verb])
            assert "Traceback" not in said, (verb, said)
            assert ended in ("refused", "taken", "status 0", "status 1"), (verb, ended)


@pytest.mark.parametrize("name", ["host", "logs", "host/ranks"])
def test_supervisor_does_not_start_in_a_folder_that_leads_out(world: Path, name: str) -> None:
    run = world / "runs/new"
    replace(run / name, link_to(world.parent / "outside"))
    spec = {"id": "run-files", "host": "here", "first_rank": 0, "argv": ["true"], "cwd": "/", "env": {}, "grace_s": 0}
    with pytest.raises((OSError, RuntimeError), match="leads out of"):
        run_control.start(str(run), spec, bundle("supervisor"))
    deadline = time.monotonic() + TIMEOUT_S
    while run_control.is_supervised(str(run / "host")) and time.monotonic() < deadline:  # its guard is about to exit
        time.sleep(0.01)
    assert not run_control.is_supervised(str(run / "host"))


@pytest.mark.parametrize("do", [
    lambda: RunWriter("runs/here").truncate_records(0, 1),
    lambda: checkpoint_transfer.fetch_checkpoints(RunDir("runs/away"), read_plan(RunDir("runs/away"))),
])  # fmt: skip
def test_writers_refuse_a_folder_that_leads_out(world: Path, do: Callable[[], object]) -> None:
    for name in ("runs/here/steps", "runs/away/hosts"):
        replace(world / name, link_to(world.parent / "outside"))
    with nothing_begins():
        refused(do)


def test_rollback_removes_nothing_outside(world: Path) -> None:
    """Of a run whose `own` and `checkpoints` lead out."""
    outside = world / "outside-of-the-run"
    kept = [outside / "step-000005.safetensors", outside / "step-000006" / "state.json"]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    for name in ("own", "checkpoints"):
        replace(world / "runs/here" / name, link_to(outside))
        refused(lambda: run_control.rollback_to_checkpoint("runs/here", "step-000003", "0" * 64))
        (world / "runs/here" / name).unlink()
    assert all(path.exists() for path in kept)


def test_bench_writes_no_report_outside_of_its_folder(world: Path) -> None:
    for folder in ("runs/bench", "runs/lab01"):
        index = next((world / folder).glob("*.json"))
        index.write_text(index.read_text().replace('"here"', '"../here"').replace('"away"', '"../away"'))
        with nothing_begins():
            assert outcome(["report", folder])[0] == "refused"
    assert not (world / "runs/here/report.html").exists()


def test_run_directory_and_runs_may_be_links(world: Path) -> None:
    """To a larger disk, for example."""
    (world / "disk").mkdir()
    (world / "runs/here").rename(world / "disk/here")
    (world / "runs/here").symlink_to(world / "disk/here")
    (world / "runs").rename(world / "disk/runs")
    (world / "runs").symlink_to("disk/runs")
    with nothing_begins():
        for verb in (["report"], ["trace"], ["stop"], ["logs"]):
            assert outcome([*verb, "runs/here"])[0] == "status 0", verb
    assert (world / "disk/here/report.html").is_file()


def test_links_that_stay_inside_are_followed_by_readers(world: Path) -> None:
    run = world / "runs/here"
    (run / "steps").rename(run / "records")
    (run / "steps").symlink_to("records")
    assert RunDir(run).records(0)


# --- sizes ------------------------------------------------------------------------------------------------------------

HUGE = {"runs/here/plan.json": ["report", "stop", "logs"], "runs/here/manifest.json": ["report", "trace"],
        "runs/here/events.jsonl": ["report"], "runs/here/steps/rank-0.jsonl": ["report", "trace"],
        "runs/here/checkpoints/step-000003/state.json": ["export"], "runs/away/plan.json": ["fetch"],
        "runs/bench/compare.json": ["report"], "runs/lab01/bench.json": ["report"]}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_terabyte_file_ends_with_an_error_message(world: Path, name: str) -> None:
    (world / name).unlink()
    create_file(world / name).close()
    os.truncate(world / name, TERABYTE)
    with nothing_begins():
        for verb in HUGE[name]:
            ended, said = outcome([verb, "/".join(name.split("/")[:2])])
            assert (ended, len(said.split("\n")[0]) < 200, "MiB" in said) == ("refused", True, True), said
        assert outcome(["runs", "--json"])[0] == "status 0"


@pytest.mark.parametrize(
    "name",
    ["away/hosts/attic/state.json", "away/hosts/laptop/mirror.json", "here/host/state.json", "here/host/spec.json",
     "here/logs/here.0.log", "here/watch.summary"],
)  # fmt: skip
def test_terabyte_in_a_file_of_a_host_is_skipped_or_refused(world: Path, name: str) -> None:
    (world / "runs" / name).parent.mkdir(exist_ok=True)
    create_file(world / "runs" / name).close()
    os.truncate(world / "runs" / name, TERABYTE)
    with nothing_begins():
        for verb in ("logs", "stop", "fetch"):
            assert "Traceback" not in outcome([verb, f"runs/{name.split('/')[0]}"])[1]


# --- one damaged run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"format":3,"started":1e999}', b"\xff\xfe", b"{}", b"NaN", b"9" * 9_999]
)
def test_damaged_run_is_one_row_and_others_are_listed(world: Path, content: bytes) -> None:
    (world / "runs/here/manifest.json").write_bytes(content)
    with nothing_begins():
        shown = json.loads(_printed(["runs", "--json"]))["runs"]
    states = {row["run"]: (row["state"], bool(row["error"])) for row in shown}
    assert states["runs/here"] == ("damaged", True)
    assert states["runs/away"][0] != "damaged"


def test_exception_in_one_run_does_not_end_the_list(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rundir: RunDir) -> None:
        if rundir.path.name == "here":
            raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("evener.report.read.run_summary.summarize_run", fail)
    with nothing_begins():
        assert "damaged" in _printed(["runs", "here"])


def _printed(args: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        EVENER(args, standalone_mode=False, prog_name="evener")
    return out.getvalue()
