"""The local copy of a run's files is complete, without duplicates, and stays inside the run directory."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.core.base.errors import HostError, RunError
from evener.core.base.file_io import follow_lines, write_atomic
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.run_plan import HostPlan, Plan, write_plan
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.ssh.fake import FakeSession
from evener.ssh.session import RemoteError
from evener.transfer.mirror import MAX_RESTARTS, HostMirror, RunMirror, StaleOffsetError, record_controller_event

DEADLINE_S = 120.0


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A run's folder on the host."""
    run = tmp_path / "there"
    for folder in ("host", "logs", "steps", "spans"):
        (run / folder).mkdir(parents=True)
    (run / "host" / "state.json").write_text('{"state": "ended", "status": 0, "failures": [], "stopped": false}')
    return run


@pytest.fixture
def make(tmp_path: Path, there: Path) -> Callable[..., HostMirror]:
    def make(node_rank: int = 0) -> HostMirror:
        plan = Plan(kind="train", spec=None, hosts=[part(there, node_rank)], fleet_file="lab.toml")
        write_plan(RunDir(tmp_path / "here"), plan)
        return HostMirror(RunDir(tmp_path / "here"), plan, "b")

    return make


def part(there: Path, node_rank: int = 0) -> HostPlan:
    return HostPlan(
        name="b", host=HostConfig(address="local"), node_rank=node_rank, first_rank=2 * node_rank, num_ranks=2,
        address="", interface="", run=str(there), code=None, cwd="", argv=[], env={},
    )  # fmt: skip


def test_growing_files_are_copied(make: Callable[..., HostMirror], there: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    log = there / "logs" / "b.1.log"
    log.write_bytes(b"x" * 700_000 + b"\n")
    make().copy_once()
    with log.open("ab") as file:
        file.write(b"more\n")
    (there / "events.jsonl").write_text('{"event":"start","time":1.0}\n')
    make().copy_once()
    assert (here / "logs/b.1.log").read_bytes() == log.read_bytes()
    assert (here / "hosts/b/events.jsonl").read_bytes() == (there / "events.jsonl").read_bytes()
    assert (here / "logs/b.1.log").stat().st_mode & 0o077 == 0


def test_replaced_file_is_copied_anew(make: Callable[..., HostMirror], there: Path, tmp_path: Path) -> None:
    """A resumed run makes some records again; who follows the copy sees whole lines."""
    records = there / "steps" / "rank-0.jsonl"
    write_atomic(records, b"".join(b'{"step":%d}\n' % i for i in range(9)))
    make().copy_once()
    follower = follow_lines(tmp_path / "here/steps/rank-0.jsonl")
    assert len(next(follower)) == 9
    write_atomic(records, b"".join(b'{"step":%d,"again":1}\n' % i for i in range(8)))
    make().copy_once()
    assert (tmp_path / "here/steps/rank-0.jsonl").read_bytes() == records.read_bytes()
    assert next(follower) == records.read_bytes().split(b"\n")[:-1]


@pytest.mark.parametrize(
    ("path", "node_rank", "is_taken"),
    [
        ("steps/rank-1.jsonl", 0, True),
        ("steps/rank-2.jsonl", 0, False),
        ("steps/rank-2.jsonl", 1, True),
        ("spans/rank-1.jsonl", 0, True),
        ("spans/rank-2.jsonl", 0, False),
        ("profile/rank-1.json", 0, True),
        ("profile/rank-2.json", 0, False),
        ("logs/b.log", 1, True),
        ("logs/b.3.log", 1, True),
        ("logs/a.log", 0, False),
        ("logs/a.0.log", 0, False),
        ("manifest.json", 0, True),
        ("manifest.json", 1, False),
        ("plan.json", 0, False),
        ("report.html", 0, False),
        ("hosts/a/state.json", 0, False),
        ("../../x", 0, False),
        ("logs/b.1.log/../../../x", 0, False),
        ("/etc/passwd", 0, False),
    ],
)
def test_mirror_writes_only_files_that_belong_to_its_host(
    make: Callable[..., HostMirror], tmp_path: Path, path: str, node_rank: int, is_taken: bool
) -> None:
    mirror = make(node_rank)
    before = set(tmp_path.rglob("*"))
    mirror._append({"path": path, "offset": 0, "identity": "1 0", "size": 1}, b"x")
    made = {file for file in set(tmp_path.rglob("*")) - before if file.is_file() and "mirror." not in file.name}
    assert made == ({tmp_path / "here" / path} if is_taken else set())


@pytest.mark.parametrize("name", ["manifest.json", "steps/rank-0.jsonl", "spans/rank-1.jsonl", "logs/b.1.log"])
def test_locally_rewritten_file_is_not_appended_to(
    make: Callable[..., HostMirror], there: Path, tmp_path: Path, name: str
) -> None:
    """As by a run that went on here: shorter or longer than the host's, its content is not the beginning of it."""
    (there / name).write_bytes(b"there 1\n")
    make().copy_once()
    write_atomic(tmp_path / "here" / name, b"here\n")
    with (there / name).open("ab") as file:
        file.write(b"there 2\n")
    make().copy_once()
    assert (tmp_path / "here" / name).read_bytes() == b"there 1\nthere 2\n"


def test_controller_manifest_stays_until_host_rewrites_it(
    make: Callable[..., HostMirror], there: Path, tmp_path: Path
) -> None:
    """A rank 0 that was killed could not say that the run failed."""
    write_atomic(there / "manifest.json", b"running, and a long story")
    make().copy_once()
    write_atomic(tmp_path / "here/manifest.json", b"failed")
    make().copy_once()
    assert (tmp_path / "here/manifest.json").read_bytes() == b"failed"
    write_atomic(there / "manifest.json", b"running again")
    make().copy_once()
    assert (tmp_path / "here/manifest.json").read_bytes() == b"running again"


def test_host_removed_from_run_no_longer_changes_copies(
    make: Callable[..., HostMirror], there: Path, tmp_path: Path
) -> None:
    """Somebody still follows it there, as where the host was out of sight, while the run goes on elsewhere."""
    mirror = make()
    mirror.copy_once()
    write_plan(RunDir(tmp_path / "here"),
               Plan(kind="train", spec=None, hosts=[part(tmp_path / "elsewhere")]))  # fmt: skip
    before = {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()}
    (there / "manifest.json").write_bytes(b"late news")
    with pytest.raises(RunError, match="the run was restarted; its earlier part on b is no longer copied"):
        mirror.copy_once()
    mirror.follow(lambda: None)
    assert isinstance(mirror.local_error, RunError)
    assert {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()} == before


def test_host_error_names_the_given_fleet_file(
    make: Callable[..., HostMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise RemoteError("b", "No space left on device", "OSError", "")

    monkeypatch.setattr(HostMirror, "_copy", fail)
    with pytest.raises(HostError, match="b: No space left on device") as told:
        make().copy_once()
    assert told.value.hint == "evener doctor --fleet lab.toml looks closer"


def test_returning_host_is_restarted_when_run_continues_elsewhere(
    make: Callable[..., HostMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever begins to look hears of it first, and knows only then that the run goes on elsewhere."""
    running = {"state": "running", "status": None, "stopped": False, "failures": [], "supervisor": 1}
    states = iter(
        [running | {"state": "ended", "lost": "the host went down"}, running | {"state": "ended", "status": 0}]
    )
    known, there = iter([None, None, True]), FakeSession("there", {"run_control.restart_run": lambda **sent: running})
    monkeypatch.setattr("evener.ssh.session.open_session", lambda *args: there)
    monkeypatch.setattr(HostMirror, "_copy", lambda self, *args, **more: setattr(self, "state", next(states)))
    mirror = make()
    mirror._is_restart_wanted = lambda: next(known)
    mirror.follow(lambda: None)
    assert there.calls == ["run_control.restart_run"]
    assert (mirror.state or {})["status"] == 0


@pytest.mark.parametrize(("trains", "num_restarts"), [(True, MAX_RESTARTS + 5), (False, MAX_RESTARTS)])
def test_host_that_trains_between_its_losses_is_always_restarted(
    make: Callable[..., HostMirror], monkeypatch: pytest.MonkeyPatch, trains: bool, num_restarts: int
) -> None:
    """One that goes down each time before it has taken a step is not, in the end."""
    running = {"state": "running", "status": None, "stopped": False, "failures": [], "supervisor": 1}
    numbers = itertools.count()

    def follow(**sent: Any) -> Iterator[Any]:
        number = next(numbers)
        if trains:
            yield {"path": "steps/rank-0.jsonl", "offset": 0, "identity": f"{number} 0", "size": 3}
            yield b"{}\n"
        end = {"status": 0} if number == MAX_RESTARTS + 5 else {"lost": "the host went down"}
        yield {"caught_up": running | {"state": "ended"} | end}

    there = FakeSession("there", {"run_control.restart_run": lambda **sent: running, "run_control.follow": follow})
    monkeypatch.setattr("evener.ssh.session.open_session", lambda *args: there)
    mirror = make()
    mirror._is_restart_wanted = lambda: True
    mirror.follow(lambda: None)
    assert there.calls.count("run_control.restart_run") == num_restarts


def test_run_on_local_host_alone_copies_no_file(there: Path) -> None:
    """Its folder is the run directory."""
    host = msgspec.structs.replace(part(there), run=None)
    rundir, plan = RunDir(there), Plan(kind="train", spec=None, hosts=[host])
    write_plan(rundir, plan)
    before = {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}
    with RunMirror(rundir, plan) as mirror:
        deadline = time.monotonic() + DEADLINE_S
        while not mirror.is_done:
            assert time.monotonic() < deadline
            mirror.wait(0.1)
    assert (mirror.hosts["b"].state or {})["status"] == 0
    assert {path: path.read_bytes() for path in there.rglob("*") if path.is_file()} == before
    record_controller_event(rundir, plan, "launched", hosts=["b"])
    assert [event["event"] for event in rundir.events()] == ["launched"]


def test_events_are_kept_when_local_run_continues_on_a_host(
    make: Callable[..., HostMirror], there: Path, tmp_path: Path
) -> None:
    """It began on this machine alone and goes on elsewhere."""
    rundir = RunWriter(tmp_path / "here")
    rundir.path.mkdir()
    rundir.add_event("start", rank=0)
    (there / "events.jsonl").write_text('{"event":"first","time":1.0}\n')
    make().copy_once()
    plan = Plan(kind="train", spec=None, hosts=[part(there)])
    for _ in range(2):
        record_controller_event(rundir, plan, "launched")
    assert [event["event"] for event in rundir.events()] == ["first", "start", "launched", "launched"]


def test_interleaved_chunks_of_two_terminals_leave_no_gap(make: Callable[..., HostMirror], tmp_path: Path) -> None:
    """Their chunks overlap and interleave: the copy has every byte once."""
    content = bytes(range(100))
    header: Callable[[int], dict[str, Any]] = lambda offset: {"path": "logs/b.log", "offset": offset, "identity": "1 0"}  # noqa: E731
    one, two = make(), make()
    one._append(header(0), content[:60])
    two._append(header(0), content[:60])
    two._append(header(60), content[60:90])
    one._append(header(60), content[60:80])
    with pytest.raises(StaleOffsetError):
        one._append(header(95), content[95:])
    one._append(header(80), content[80:])
    assert (tmp_path / "here/logs/b.log").read_bytes() == content


def test_two_terminals_can_copy_at_once(make: Callable[..., HostMirror], there: Path, tmp_path: Path) -> None:
    log = there / "logs" / "b.0.log"
    stop = threading.Event()

    def copy() -> None:
        while not stop.is_set():
            make().copy_once()

    threads = [threading.Thread(target=copy) for _ in range(2)]
    for thread in threads:
        thread.start()
    with log.open("ab", buffering=0) as file:
        for i in range(2000):
            file.write(b"line %d\n" % i)
    stop.set()
    for thread in threads:
        thread.join()
    make().copy_once()
    assert (tmp_path / "here/logs/b.0.log").read_bytes() == log.read_bytes()


def test_unwritable_copy_is_reported(make: Callable[..., HostMirror], tmp_path: Path) -> None:
    mirror = make()
    (tmp_path / "here/hosts").write_text("a file is in the way")
    mirror.follow(lambda: None)
    assert mirror.is_done
    assert isinstance(mirror.local_error, OSError)


def test_following_ends_with_the_run(make: Callable[..., HostMirror], there: Path) -> None:
    began = time.monotonic()
    mirror = make()
    mirror.follow(lambda: None)
    assert mirror.state is not None
    assert (mirror.state["status"], mirror.is_done, mirror.local_error) == (0, True, None)
    assert time.monotonic() - began < DEADLINE_S
