"""What evener promises or saves survives a power loss: files, their names, and the folders that hold them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evener.core.base.file_io import make_folder, rename_durably, write_atomic, write_folder_atomic
from evener.node.remote import content_store, run_control
from evener.node.remote import file_io as remote_file_io

from ..volatile_disk import VolatileDisk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors have names in /proc: Linux")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VolatileDisk:
    (tmp_path / "disk").mkdir()
    return VolatileDisk(tmp_path / "disk", monkeypatch)


def write_remotely(path: Path, content: bytes) -> None:
    remote_file_io.make_folder(str(path.parent))
    remote_file_io.write_atomic(str(path), content)


@pytest.mark.parametrize("write", [write_atomic, write_remotely])
def test_written_file_survives_power_loss(
    tmp_path: Path, disk: VolatileDisk, write: Callable[[Path, bytes], None]
) -> None:
    path = tmp_path / "disk" / "run" / "host" / "kept.json"
    write(path, b"first")
    disk.lose_power()
    assert path.read_bytes() == b"first"  # with the folders that were made for it
    for content in (b"second", b"third", b"fourth"):
        write(path, content)
    disk.lose_power()
    assert path.read_bytes() == b"fourth"
    assert [file.name for file in path.parent.iterdir()] == ["kept.json"]


def test_unsynced_changes_are_lost_in_the_simulation(tmp_path: Path, disk: VolatileDisk) -> None:
    """Otherwise the tests of this file could not fail."""
    path, other = tmp_path / "disk" / "old", tmp_path / "disk" / "new"
    write_atomic(path, b"kept")
    other.write_bytes(b"lost")
    other.replace(path)
    (tmp_path / "disk" / "folder").mkdir()
    remote_file_io.write_atomic(str(other), b"lost", is_durable=False)
    disk.lose_power()
    assert [(file.name, file.read_bytes()) for file in (tmp_path / "disk").iterdir()] == [("old", b"kept")]


def test_written_folder_survives_power_loss(tmp_path: Path, disk: VolatileDisk) -> None:
    folder = tmp_path / "disk" / "run" / "checkpoints" / "step-000020"
    write_folder_atomic(folder, lambda to: (to / "weights").write_bytes(b"weights") and None)
    disk.lose_power()
    assert (folder / "weights").read_bytes() == b"weights"


def test_rename_into_new_folder_survives_power_loss(tmp_path: Path, disk: VolatileDisk) -> None:
    source, target = tmp_path / "disk" / "partial", tmp_path / "disk" / "a" / "b" / "whole"
    write_atomic(source, b"content")
    make_folder(target.parent)
    rename_durably(source, target)
    disk.lose_power()
    assert target.read_bytes() == b"content"


def test_checkpoint_installed_for_resume_survives_power_loss(tmp_path: Path, disk: VolatileDisk) -> None:
    tree, run = tmp_path / "tree" / "checkpoints" / "step-000020", tmp_path / "disk" / "run"
    tree.mkdir(parents=True)
    (tree / "state.json").write_text("{}")
    run_control.install_tree(str(run), str(tmp_path / "tree"))
    disk.lose_power()
    assert (run / "checkpoints" / "step-000020" / "state.json").read_text() == "{}"


def test_first_files_of_a_run_survive_power_loss(
    tmp_path: Path, disk: VolatileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_control, "_start_supervisor", lambda run, folder, spec, supervisor, passed_env: {})
    monkeypatch.setattr(run_control, "kill_leftover_processes", lambda run: None)
    run = tmp_path / "disk" / "evener" / "run"
    content_store.find_missing_blobs(str(run.parent), {}, "tree")  # what it is sent first makes the folder
    run_control.start(str(run), {"id": "r"}, "", {"host/agent.json": "{}", "roster.json": "[]"})
    disk.lose_power()
    assert json.loads((run / "host" / "agent.json").read_text()) == {}
    assert json.loads((run / "roster.json").read_text()) == []
