"""`evener watch` goes on copying a run's records after an error here, and says what the error is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evener.cli import watch_actions
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.run_plan import HostPlan, Plan, write_plan
from evener.core.run.rundir import RunDir
from evener.watch.run_health import assess_health
from evener.watch.run_reader import RunReader

from ..conftest import wait_until

ENDED = '{"state": "ended", "status": 0, "failures": [], "stopped": false}'


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A run's folder on its host, of which nothing is copied yet."""
    run = tmp_path / "there"
    for folder in ("host", "logs", "steps"):
        (run / folder).mkdir(parents=True)
    (run / "host" / "state.json").write_text(ENDED)
    return run


@pytest.fixture
def reader(tmp_path: Path, there: Path) -> RunReader:
    rundir = RunDir(tmp_path / "here")
    host = HostPlan(
        name="b", host=HostConfig(address="local"), node_rank=0, first_rank=0, num_ranks=1, address="", interface="",
        run=str(there), code=None, cwd="", argv=[], env={},
    )  # fmt: skip
    write_plan(rundir, Plan(kind="train", spec=None, hosts=[host], fleet_file="lab.toml"))
    return RunReader(rundir)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_actions, "RETRY_S", (0.05,))


def test_records_arrive_after_local_error_is_removed(
    reader: RunReader, there: Path, quick_retries: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is in the way of a folder: as with a full disk, nothing can be written here until it is removed."""
    (there / "logs" / "b.0.log").write_text("a line\n")
    obstacle = reader.rundir.path / "logs"
    obstacle.write_text("in the way")
    printed = ""
    with watch_actions.background_followers() as follow:
        follow(reader)
        wait_until(lambda: reader.follow_error != "")
        health = assess_health(reader, time.time())
        assert "Its records do not arrive: the records of b cannot be written here" in health.message
        obstacle.unlink()
        wait_until(lambda: (obstacle / "b.0.log").is_file())
        wait_until(lambda: reader.follow_error == "")
        printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert "cannot be written here" in printed
    assert "trying again" in printed


def test_follower_starts_again_after_any_error(
    reader: RunReader, quick_retries: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where an error is no EvenerError, the thread would have printed a traceback and ended."""
    errors = [OSError(24, "Too many open files"), OSError(24, "Too many open files"), KeyError("bug")]
    real: Callable[..., object] = watch_actions.follow_run

    def fail_first(*arguments: object, **options: object) -> object:
        if errors:
            raise errors.pop(0)
        return real(*arguments, **options)

    monkeypatch.setattr(watch_actions, "follow_run", fail_first)
    with watch_actions.background_followers() as follow:
        follow(reader)
        wait_until(lambda: (reader.rundir.path / "hosts" / "b" / "state.json").exists())
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition("arrive: ")[2] for line in printed] == [
        "OSError: [Errno 24] Too many open files; trying again",
        "KeyError: 'bug'; trying again",
    ]


def test_follower_of_failed_run_ends(
    reader: RunReader, there: Path, quick_retries: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's own failure is an event, and no reason to start again."""
    (there / "host" / "state.json").write_text(ENDED.replace('"status": 0', '"status": 1'))
    with watch_actions.background_followers() as follow:
        follow(reader)
        wait_until(lambda: any(event["event"] == "failure" for event in reader.rundir.events()))
    assert reader.follow_error == ""
    assert capsys.readouterr().err == ""
