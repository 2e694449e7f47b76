"""Hosts are pruned of ended runs whose results are here, and of code and data that no run reads; of nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from evener.core.base.file_io import file_digest
from evener.core.run.run_plan import write_plan
from evener.core.run.rundir import Checkpoint, RunDir
from evener.node.remote import content_store, facts, prune, venv_setup
from evener.node.remote.file_io import content_digest
from evener.ssh.fake import FakeSession
from evener.transfer import prune_hosts
from evener.transfer.prune_hosts import DAY_S, HostPruning

from .test_commands import place, train

TREES = {"used": "0" * 32, "own": "1" * 32, "idle": "2" * 32}


class Host:
    """A host's working directory, and run directories of this machine that know its runs."""

    def __init__(self, folder: Path) -> None:
        self.workdir, self.runs = folder / ".evener", folder / "runs"
        self.session = FakeSession("a")
        for name, tree in TREES.items():
            self.add_tree(tree, name.encode())

    def add_tree(self, tree: str, content: bytes) -> None:
        """Send a tree of data with one file, 9 days ago."""
        digest = content_digest(content)
        content_store.find_missing_blobs(str(self.workdir), {digest: len(content)}, tree)
        content_store.put_small_blobs(str(self.workdir), [(digest, len(content))], content)
        body = json.dumps({"files": [["train.bin", digest, len(content), False]], "links": []}).encode()
        content_store.build_tree(str(self.workdir), tree, True, body)
        age(self.workdir / "trees" / f"{tree}.json", 9)

    def add_run(self, name: str, *, days: float = 8, trees: tuple[str, ...] = (), verdict: str = "finished") -> Path:
        """Add a run that ended `days` ago, with its results here; return its folder on the host."""
        there, rundir = self.workdir / "runs" / name, RunDir(self.runs / name)
        plan = train([place("a")])
        plan = msgspec.structs.replace(plan, id=name, hosts=[msgspec.structs.replace(plan.hosts[0], run=str(there))])
        write_plan(rundir, plan)
        ended = time.time() - days * DAY_S
        argv = [f"--data={self.workdir}/trees/{TREES[tree]}" for tree in trees]
        state = {"state": "ended", "status": 0, "stopped": verdict == "stopped", "failures": [], "ended": ended}
        for root in (there, rundir.path):
            write(root / "steps/rank-0.jsonl", b'{"step": 1}\n')
            save_checkpoint(root / "checkpoints/step-000010", 1.5)
        write(there / "host/spec.json", json.dumps({"id": name, "host": "a", "argv": argv}).encode())
        write(there / "host/state.json", json.dumps(state).encode())
        write(rundir.path / "hosts/a/state.json", json.dumps(state).encode())
        return there

    def plan(self, older_than_days: float | None = None, max_bytes: int | None = None) -> HostPruning:
        known = prune_hosts.known_runs(sorted(self.runs.glob("*")))
        return prune_hosts.plan_pruning(
            self.session, str(self.workdir), known, older_than_days=older_than_days, max_bytes=max_bytes
        )

    def prunable(self, older_than_days: float | None = None, max_bytes: int | None = None) -> list[str]:
        return [entry.name for entry in self.plan(older_than_days, max_bytes).prunable]

    def kept(self) -> dict[str, str]:
        return {entry.name: entry.why for entry in self.plan().kept}


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def save_checkpoint(folder: Path, val_loss: float, content: bytes = b"weights") -> None:
    write(folder / "weights.safetensors", content)
    files = {"weights.safetensors": file_digest(folder / "weights.safetensors")}
    state = Checkpoint(step=int(folder.name[5:]), world_size=1, val_loss=val_loss, tensor_names=[], states={},
                       replica_hashes=[], files=files)  # fmt: skip
    write(folder / "state.json", msgspec.json.encode(state))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_old_run_whose_results_are_here_is_removed_with_its_data(host: Host) -> None:
    host.add_run("old", trees=("used", "own"))
    host.add_run("new", days=2, trees=("used",))
    found = host.plan()
    assert [(entry.kind, entry.name) for entry in found.prunable] == [
        ("run", "old"), ("tree", TREES["own"]), ("tree", TREES["idle"]),
    ]  # fmt: skip
    assert found.prunable[0].why == "ended 8 days ago, its results are here"
    assert host.kept() == {"new": "it ended recently"}
    assert (host.workdir / "runs/old/host/spec.json").exists()  # listing removes nothing
    freed, kept = prune_hosts.prune(host.session, str(host.workdir), found.prunable)
    assert kept == {}
    assert freed > sum(len(name) for name in ("own", "idle"))
    assert sorted(path.name for path in (host.workdir / "runs").iterdir()) == ["new"]
    assert sorted(path.name for path in (host.workdir / "trees").iterdir()) == [TREES["used"], TREES["used"] + ".json"]
    assert [path.read_bytes() for path in (host.workdir / "blobs").iterdir()] == [b"used"]
    assert RunDir(host.runs / "old").checkpoint_steps() == [10]  # here nothing is removed


def lock(host: Host, there: Path, here: Path) -> None:
    write(there / "host/lock", b"1")
    host.locks = [(there / "host/lock").open("rb")]  # type: ignore[attr-defined]
    fcntl.flock(host.locks[0], fcntl.LOCK_EX)  # type: ignore[attr-defined]


def fetch_lock(host: Host, there: Path, here: Path) -> None:
    write(here / "hosts/carry.lock", b"")
    host.locks = [(here / "hosts/carry.lock").open("rb")]  # type: ignore[attr-defined]
    fcntl.flock(host.locks[0], fcntl.LOCK_EX)  # type: ignore[attr-defined]


Change = Callable[[Host, Path, Path], object]
NOT_HOME: dict[str, tuple[Change, str]] = {
    "active": (lock, "it is active"),
    "being fetched": (fetch_lock, "another terminal is fetching"),
    "newer checkpoint": (lambda host, there, here: save_checkpoint(there / "checkpoints/step-000020", 2.0), "newest"),
    "better checkpoint": (lambda host, there, here: save_checkpoint(there / "checkpoints/step-000005", 1.0), "best"),
    "other checkpoint": (lambda host, there, here: save_checkpoint(there / "checkpoints/step-000010", 1.5, b"x"),
                         "newest"),
    "damaged checkpoint": (lambda host, there, here: write(here / "checkpoints/step-000010/weights.safetensors", b"x"),
                           "checkpoint is not here"),
    "longer record": (lambda host, there, here: write(there / "steps/rank-0.jsonl", b"{}\n" * 9), "steps/rank-0.jsonl"),
    "missing log": (lambda host, there, here: write(there / "logs/a.0.log", b"x\n"), "logs/a.0.log is not here"),
    "per-rank state": (lambda host, there, here: write(there / "own/rank-0/step-000010.safetensors", b"x"), "per-rank"),
    "run of others": (lambda host, there, here: (here / "plan.json").unlink(), "started from elsewhere"),
    "damaged plan": (lambda host, there, here: write(here / "plan.json", b"{"), "started from elsewhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_HOME)
def test_run_that_is_active_or_not_all_here_stays(host: Host, name: str) -> None:
    there = host.add_run("run", trees=("own",))
    assert "run" in host.prunable()
    change, why = NOT_HOME[name]
    change(host, there, host.runs / "run")
    assert host.prunable() == [TREES["used"], TREES["idle"]]
    assert why in host.kept()["run"]


def test_sync_state_of_launched_program_is_removed_with_its_run(host: Host) -> None:
    there = host.add_run("run")
    write(there / "own/rank-0/sync-0-00ff.safetensors", b"x" * 1000)
    assert "run" in host.prunable()
    freed, _ = prune_hosts.prune(host.session, str(host.workdir), host.plan().prunable)
    assert freed > 1000
    assert not there.exists()


def test_newer_checkpoint_here_replaces_the_one_there(host: Host) -> None:
    host.add_run("run")
    save_checkpoint(host.runs / "run/checkpoints/step-000020", 1.2)
    (host.runs / "run/checkpoints/step-000010/weights.safetensors").write_bytes(b"x")
    assert "run" in host.prunable()


def test_run_that_was_started_again_meanwhile_stays(host: Host) -> None:
    there = host.add_run("run", trees=("own",))
    chosen = host.plan().prunable
    lock(host, there, host.runs / "run")
    _, kept = prune_hosts.prune(host.session, str(host.workdir), chosen)
    assert kept == {"run": "it has been started again", TREES["own"]: "a run has been started with it"}
    assert (there / "checkpoints/step-000010/weights.safetensors").exists()
    assert (host.workdir / "trees" / TREES["own"] / "train.bin").read_bytes() == b"own"


def test_size_limit_removes_the_oldest_only(host: Host) -> None:
    for days in (10, 20, 30):
        write(host.add_run(f"run-{days}", days=days) / "checkpoints/.step-000020.tmp/weights", b"x" * 10_000)
    total = sum(run["bytes"] for run in prune.list_stored(str(host.workdir))["runs"])
    assert host.prunable(max_bytes=total + 1000) == []
    assert host.prunable(max_bytes=total - 1) == ["run-30"]
    assert host.prunable(max_bytes=total - 12_000) == ["run-30", "run-20"]
    assert host.prunable(older_than_days=25, max_bytes=1)[:1] == ["run-30"]


def test_tree_that_was_asked_for_lately_stays(host: Host) -> None:
    content_store.find_missing_blobs(str(host.workdir), {}, TREES["idle"])  # a launch that has not started yet
    assert host.prunable(older_than_days=0) == [TREES["used"], TREES["own"]]


def test_interrupted_upload_is_removed_after_a_day(host: Host) -> None:
    part = host.workdir / "blobs" / f"{'a' * 64}.x.part"
    write(part, b"x" * 100)
    assert "" not in host.prunable()
    age(part, 2)
    found = host.plan()
    assert [(entry.kind, entry.bytes) for entry in found.prunable if entry.kind == "rest"] == [("rest", 100)]
    prune_hosts.prune(host.session, str(host.workdir), found.prunable)
    assert not part.exists()


# --- who may read the working directory, and what doctor tells of it --------------------------------------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("function", [
    lambda workdir: content_store.find_missing_blobs(workdir, {}, "0" * 32),
    lambda workdir: (venv_setup.lock_setup(workdir), venv_setup.finish_setup()),
])  # fmt: skip
@pytest.mark.parametrize("exists", [False, True])
def test_working_directory_is_for_its_owner_alone(
    tmp_path: Path, function: Callable[[str], object], exists: bool
) -> None:
    workdir = tmp_path / ".evener"
    if exists:
        (workdir / "blobs").mkdir(parents=True)
        write(workdir / "notes.txt", b"x")
        workdir.chmod(0o755)
    function(str(workdir))
    assert {path.name: mode(path) for path in (workdir, *workdir.iterdir()) if path.is_dir()} == dict.fromkeys(
        (".evener", "blobs", "trees", "projects", "runs"), 0o700
    )


def test_folder_that_holds_other_things_keeps_its_mode(tmp_path: Path) -> None:
    write(tmp_path / "disk/photos/1.jpg", b"x")
    (tmp_path / "disk").chmod(0o755)
    content_store.find_missing_blobs(str(tmp_path / "disk"), {}, "0" * 32)
    assert (mode(tmp_path / "disk"), mode(tmp_path / "disk/runs")) == (0o755, 0o700)


def test_stored_bytes_and_partial_checkpoints_are_counted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(host.runs.parent)
    there = host.add_run("run")
    before = facts._collect_stored(str(host.workdir))
    assert before["stored_bytes"] > 100
    assert before["partial_checkpoints"] == 0
    write(there / "checkpoints/.step-000020.tmp/weights.safetensors", b"x" * 1000)
    write(host.runs / "run/checkpoints/.step-000020.tmp/weights.safetensors", b"x" * 10)
    after = facts._collect_stored(str(host.workdir))
    assert after["stored_bytes"] == before["stored_bytes"] + 1000
    assert (after["partial_checkpoints"], after["partial_checkpoint_bytes"]) == (2, 1010)
    lock(host, there, there)  # it is being written
    assert facts._collect_stored(str(host.workdir))["partial_checkpoints"] == 1
