"""Fetch checkpoints from hosts, and resume all hosts from the same one whatever an earlier start left there."""

from __future__ import annotations

import errno
import fcntl
import threading
import time
from pathlib import Path

import msgspec
import pytest

from evener.core.base.errors import HostError, UsageError
from evener.core.base.file_io import file_digest, write_atomic
from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.core.run.run_plan import HostPlan, Plan, write_plan
from evener.core.run.run_spec import CheckpointSpec, RunSpec
from evener.core.run.rundir import Checkpoint, RunDir, read_checkpoint
from evener.ssh.session import connect
from evener.transfer import checkpoint_transfer
from evener.transfer.file_transfer import CHUNK_BYTES


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save(run: RunDir, step: int, moments: bytes, val_loss: float | None = None) -> Path:
    """A checkpoint whose optimizer remembers these."""
    folder = run.checkpoint_path(step)
    write_atomic(folder / "weights.safetensors", b"weights")
    write_atomic(folder / "state.safetensors", moments)
    files = {path.name: file_digest(path) for path in folder.iterdir()}
    saved = Checkpoint(
        step=step, world_size=1, val_loss=val_loss, tensor_names=[], states={}, replica_hashes=[[]], files=files
    )
    write_atomic(folder / "state.json", msgspec.json.encode(saved))
    return folder


def keep(run: RunDir, rank: int, *steps: int) -> None:
    """What a rank remembers for itself after these steps."""
    for step in steps:
        write_atomic(run.path / "own" / f"rank-{rank}" / f"step-{step:06d}.safetensors", b"own")


def kept(run: RunDir) -> list[tuple[str, str]]:
    return sorted((path.parent.name, path.name[5:11]) for path in (run.path / "own").glob("*/*"))


def plan_of(home: RunDir, there: RunDir) -> Plan:
    """Of a run on a host whose folder is `there`."""
    host = HostConfig(address="local", workdir=str(home.path.parent / "work"))
    part = HostPlan(
        name="a", host=host, node_rank=0, first_rank=0, num_ranks=1, address="", interface="", run=str(there.path),
        code=None, cwd="", argv=[], env={},
    )  # fmt: skip
    plan = Plan(kind="train", spec=RunSpec(checkpoint=CheckpointSpec(keep=1)), hosts=[part])
    write_plan(home, plan)
    return plan


def restored(home: RunDir, there: RunDir, step: int) -> None:
    """The run is to go on from this step there."""
    plan = plan_of(home, there)
    with connect(Fleet(hosts={"a": plan.hosts[0].host})) as (sessions, errors):
        assert not errors
        checkpoint_transfer.restore_to_hosts(home, plan, sessions, step, print)


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


def test_returning_host_drops_checkpoints_it_reached_alone(home, there):
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


def test_host_with_checkpoint_receives_nothing_and_keeps_its_state(home, there):
    theirs = save(there, 300, b"second") / "state.safetensors"
    before = theirs.stat()
    keep(there, 0, 300, 301)
    restored(home, there, 300)
    assert (theirs.stat().st_ino, theirs.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert kept(there) == [("rank-0", "000300")]


def test_host_without_checkpoints_keeps_earlier_per_rank_state(home, there):
    keep(there, 1, 200, 300, 400)
    restored(home, there, 300)
    assert there.checkpoint_steps() == [300]
    assert kept(there) == [("rank-1", "000200"), ("rank-1", "000300")]


def test_checkpoints_of_a_running_run_are_not_replaced(home, there):
    save(there, 400, b"first")
    write_atomic(there.path / "host" / "state.json", b'{"state": "running"}')
    with (there.path / "host" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HostError, match="running here already"):
            restored(home, there, 300)
    assert there.checkpoint_steps() == [400]


def test_damaged_checkpoint_on_host_is_replaced(home, there, capsys):
    """Its state.json is the same, and so is what the rank kept beside it."""
    save(there, 300, b"second")
    keep(there, 0, 200, 300, 301)
    (there.checkpoint_path(300) / "state.safetensors").write_bytes(b"secand")
    restored(home, there, 300)
    assert read_checkpoint(there.checkpoint_path(300)) == read_checkpoint(home.checkpoint_path(300))
    assert kept(there) == [("rank-0", "000200"), ("rank-0", "000300")]
    told = capsys.readouterr().out.strip()
    assert told.endswith("its checkpoint of step 300 was damaged; the local copy replaces it")
    assert [(event["event"], event["error"]) for event in home.events()] == [("checkpoint.damaged", told)]
    restored(home, there, 300)
    assert capsys.readouterr().out == ""


@pytest.fixture
def empty(tmp_path) -> RunDir:
    """Home, when nobody followed the run."""
    return RunDir(tmp_path / "run")


def test_newest_and_best_checkpoints_are_fetched_and_replace_older(empty, there):
    save(empty, 100, b"older", 3.0)
    for step, val_loss in ((200, 2.0), (300, 1.0), (400, 2.5), (500, None)):
        save(there, step, b"%d" % step, val_loss)
    assert sorted(checkpoint_transfer.fetch_checkpoints(empty, plan_of(empty, there))) == [300, 500]
    assert empty.checkpoint_steps() == [300, 500]
    for step in (300, 500):
        assert read_checkpoint(empty.checkpoint_path(step)) == read_checkpoint(there.checkpoint_path(step))
    assert checkpoint_transfer.fetch_checkpoints(empty, plan_of(empty, there)) == []


def test_previous_checkpoint_is_fetched_when_newest_is_damaged(empty, there):
    save(there, 200, b"second")
    (save(there, 300, b"third") / "weights.safetensors").write_bytes(b"weighed")
    (save(there, 400, b"fourth") / "state.json").write_bytes(b"{")
    told: list[str] = []
    assert checkpoint_transfer.fetch_checkpoints(empty, plan_of(empty, there), told.append) == [200]
    assert any("step-000300 is damaged" in text for text in told)
    assert {path.name for path in empty.checkpoints_path.iterdir()} == {"step-000200"}


def test_checkpoint_damaged_locally_is_fetched_again(empty, there):
    save(there, 300, b"third")
    (save(empty, 300, b"third") / "weights.safetensors").write_bytes(b"weighed")
    assert checkpoint_transfer.fetch_checkpoints(empty, plan_of(empty, there)) == [300]
    assert read_checkpoint(empty.checkpoint_path(300)).step == 300


def test_fetch_is_throttled_while_run_is_followed_and_finishes_at_end(empty, there, monkeypatch):
    """Of some pieces each is followed by a pause nine times as long as it took; the end cuts the next one short."""
    save(there, 300, bytes(3 * CHUNK_BYTES))
    pauses, second = [], threading.Event()

    def pause(carrier: checkpoint_transfer.CheckpointFetcher, took_s: float) -> None:
        pauses.append(took_s)
        if len(pauses) == 2:
            second.set()
            carrier._run_ended.wait()
        carry_on(carrier, took_s)

    carry_on = checkpoint_transfer.CheckpointFetcher._throttle
    monkeypatch.setattr(checkpoint_transfer.CheckpointFetcher, "_throttle", pause)
    with checkpoint_transfer.CheckpointFetcher(empty, plan_of(empty, there)) as carrier:
        carrier.notify_checkpoint_saved()
        assert second.wait(60)
    assert empty.checkpoint_steps() == []
    assert len(pauses) == 2
    assert (empty.checkpoints_path / ".step-000300.arriving").is_dir()
    assert checkpoint_transfer.fetch_checkpoints(empty, plan_of(empty, there)) == [300]
    assert {path.name for path in empty.checkpoints_path.iterdir()} == {"step-000300"}


def test_checkpoint_saved_while_following_is_fetched(empty, there):
    with checkpoint_transfer.CheckpointFetcher(empty, plan_of(empty, there)) as carrier:
        save(there, 300, b"third")
        carrier.notify_checkpoint_saved()
        deadline = time.monotonic() + 60
        while empty.checkpoint_steps() != [300]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_unreachable_host_is_reported(empty, there):
    plan = plan_of(empty, there)
    gone = msgspec.structs.replace(plan.hosts[0], host=HostConfig(address="127.0.0.1", port=1))
    with pytest.raises(HostError, match="a"):
        checkpoint_transfer.fetch_checkpoints(empty, msgspec.structs.replace(plan, hosts=[gone]))


def test_failed_local_save_is_an_error(empty, there, monkeypatch):
    """A quota, say: whoever resumes must not go on from an older one, and have the newer removed there."""
    save(there, 300, b"third")

    def refuse(*args, **kwargs):
        raise OSError(errno.EDQUOT, "no room here")

    monkeypatch.setattr(checkpoint_transfer.FileFetcher, "fetch", refuse)
    with pytest.raises(UsageError, match="step-000300: no room here"):
        checkpoint_transfer.fetch_checkpoints(empty, plan_of(empty, there))


def test_checkpoint_of_old_format_is_not_fetched(empty, there):
    for run in (empty, there):
        state = save(run, 300, b"third") / "state.json"
        old = {**msgspec.json.decode(state.read_bytes()), "format": 3, "files": {"state.safetensors": "0" * 128}}
        state.write_bytes(msgspec.json.encode(old))
    assert checkpoint_transfer.fetch_checkpoints(empty, plan_of(empty, there)) == []
    assert empty.checkpoint_steps() == [300]


def test_host_with_newer_checkpoint_is_not_set_back(home, there):
    """It saved step 400 since, and nobody has brought that home."""
    save(there, 300, b"second")
    save(there, 400, b"third")
    with pytest.raises(HostError, match="it has saved step 400 since"):
        restored(home, there, 300)
    (there.checkpoint_path(400) / "weights.safetensors").write_bytes(b"damaged")
    restored(home, there, 300)
    assert there.checkpoint_steps() == [300]
