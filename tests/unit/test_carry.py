"""A run that is resumed goes on from the same checkpoint on every host, whatever an earlier start left there."""

from __future__ import annotations

import fcntl
from pathlib import Path

import msgspec
import pytest

from evener.core.errors import HostError
from evener.core.files import digest_of, write_atomic
from evener.core.fleet import Fleet, Host
from evener.core.plan import HostPlan, Plan
from evener.core.rundir import Checkpoint, RunDir, read_checkpoint
from evener.hosts.session import connect
from evener.launch import carry


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save(run: RunDir, step: int, moments: bytes) -> Path:
    """A checkpoint whose optimizer remembers these."""
    folder = run.checkpoint_path(step)
    write_atomic(folder / "weights.safetensors", b"weights")
    write_atomic(folder / "state.safetensors", moments)
    files = {path.name: digest_of(path) for path in folder.iterdir()}
    saved = Checkpoint(
        step=step, world_size=1, val_loss=None, tensor_names=[], states={}, replica_hashes=[[]], files=files
    )
    write_atomic(folder / "state.json", msgspec.json.encode(saved))
    return folder


def keep(run: RunDir, rank: int, *steps: int) -> None:
    """What a rank remembers for itself after these steps."""
    for step in steps:
        write_atomic(run.path / "own" / f"rank-{rank}" / f"step-{step:06d}.safetensors", b"own")


def kept(run: RunDir) -> list[tuple[str, str]]:
    return sorted((path.parent.name, path.name[5:11]) for path in (run.path / "own").glob("*/*"))


def restored(home: RunDir, there: RunDir, step: int) -> None:
    """The run is to go on from this step on a host whose folder is `there`."""
    host = Host(address="local", workdir=str(home.path.parent / "work"))
    part = HostPlan(
        name="a", host=host, node_rank=0, first_rank=0, num_ranks=1, address="", interface="", run=str(there.path),
        code=None, cwd="", argv=[], env={},
    )  # fmt: skip
    with connect(Fleet(hosts={"a": host})) as (sessions, errors):
        assert not errors
        carry.restore(home, Plan(kind="train", spec=None, hosts=[part]), sessions, step)


@pytest.fixture
def home(tmp_path) -> RunDir:
    """It came to step 300 anew, on another host."""
    run = RunDir(tmp_path / "home")
    save(run, 200, b"first")
    save(run, 300, b"second")
    return run


@pytest.fixture
def there(tmp_path) -> RunDir:
    return RunDir(tmp_path / "there")


def test_a_host_that_was_away_forgets_what_it_reached_alone(home, there):
    """It has another 300 than the run went on to, and a 400, from which its ranks would have begun."""
    for step in (200, 300, 400):
        save(there, step, b"first")
    keep(there, 0, 200, 300, 400)
    keep(there, 1, 1000000)
    restored(home, there, 300)
    assert there.checkpoint_steps() == [200, 300]
    assert read_checkpoint(there.checkpoint_path(300)) == read_checkpoint(home.checkpoint_path(300))
    assert (there.checkpoint_path(300) / "state.safetensors").read_bytes() == b"second"
    assert kept(there) == [("rank-0", "000200")]
    assert sorted(path.name for path in there.checkpoints_path.iterdir()) == ["step-000200", "step-000300"]


def test_a_host_that_has_the_checkpoint_is_sent_nothing_and_keeps_its_own(home, there):
    theirs = save(there, 300, b"second") / "state.safetensors"
    before = theirs.stat()
    keep(there, 0, 300, 301)
    restored(home, there, 300)
    assert (theirs.stat().st_ino, theirs.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert kept(there) == [("rank-0", "000300")]


def test_a_host_that_writes_no_checkpoints_keeps_what_its_ranks_remember(home, there):
    keep(there, 1, 200, 300, 400)
    restored(home, there, 300)
    assert there.checkpoint_steps() == [300]
    assert kept(there) == [("rank-1", "000200"), ("rank-1", "000300")]


def test_nothing_is_taken_from_a_run_that_is_running(home, there):
    save(there, 400, b"first")
    write_atomic(there.path / "host" / "state.json", b'{"state": "running"}')
    with (there.path / "host" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HostError, match="running here already"):
            restored(home, there, 300)
    assert there.checkpoint_steps() == [400]
