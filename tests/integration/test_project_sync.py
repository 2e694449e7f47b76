"""Syncing a project to a host updates its files and preserves what programs wrote there."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.node.remote import project_sync as remote
from evener.transfer.file_tree import describe_project

from ..tiers import num_examples

NAMES = ["a", "d/b", "d/e/c"]
CHANGES = st.tuples(st.sampled_from(["here", "away", "there", "sent"]), st.sampled_from(NAMES))


def send(home: Path, tree: Path, folder: Path) -> None:
    """As `ship` lays a tree, and the launcher has it taken over."""
    described = describe_project(home)
    tree.mkdir(parents=True)
    for name, file in described.files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(file.source.read_bytes())
    for name, to in described.links.items():
        (tree / name).symlink_to(to)
    tree.with_name(f"{tree.name}.json").write_bytes(described.canonical_json)
    remote.sync(str(tree), str(folder))


@settings(max_examples=num_examples(40, 150), deadline=None)
@given(changes=st.lists(CHANGES, max_size=14))
def test_resend_updates_project_files_and_preserves_program_outputs(tmp_path_factory, changes) -> None:
    top = tmp_path_factory.mktemp("project")
    home, folder = top / "home", top / "there"
    home.mkdir()
    mine: dict[str, str] = {}  # at home
    sent: dict[str, str] = {}  # as it was sent last
    theirs: dict[str, str] = {}  # what a program made of it since it came
    for number, (what, name) in enumerate([*changes, ("sent", "a")]):
        text = f"{what} {number} " + "." * 10 * number  # of another size than all others: a clock's tick is long
        if what == "here":
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
            mine[name] = text
        elif what == "away" and name in mine:
            (home / name).unlink()
            del mine[name]
        elif what == "there" and folder.exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            theirs[name] = text
        elif what == "sent":
            send(home, top / f"tree-{number}", folder)
            replaced = {name for name in theirs if name in mine and mine[name] != sent.get(name)}
            expected = {name: theirs[name] for name in theirs if name not in replaced} | {
                name: text for name, text in mine.items() if name not in theirs or name in replaced
            }
            assert {name: (folder / name).read_text() for name in NAMES if (folder / name).is_file()} == expected
            contents = {path.read_text() for path in folder.rglob("*") if path.is_file()}
            assert set(theirs.values()) <= contents
            theirs = {name: text for name, text in theirs.items() if name not in replaced}
            sent = dict(mine)


def test_links_modes_and_non_utf8_names_are_transferred(tmp_path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "run.sh").write_text("true")
    (home / "run.sh").chmod(0o755)
    (home / "link").symlink_to("run.sh")
    Path(os.fsdecode(os.fsencode(home) + b"/\xff")).write_text("odd")
    for number in range(2):
        send(home, tmp_path / f"tree-{number}", tmp_path / "there")
        there = tmp_path / "there"
        assert os.access(there / "run.sh", os.X_OK)
        assert os.readlink(there / "link") == "run.sh"
        assert Path(os.fsdecode(os.fsencode(there) + b"/\xff")).read_text() == "odd"


def test_files_written_by_program_in_time_window_are_listed(tmp_path) -> None:
    home, there = tmp_path / "home", tmp_path / "there"
    home.mkdir()
    (home / "train.py").write_text("")
    (home / "log.csv").write_text("sent")
    send(home, tmp_path / "tree", there)
    (there / "before").write_text("earlier")
    time.sleep(0.05)
    since = time.time()
    time.sleep(0.05)
    (there / "out").mkdir()
    (there / "out" / "model").write_text("12345")
    (there / "log.csv").write_text("sent, and more")
    (there / "__pycache__").mkdir()
    (there / "__pycache__" / "train.pyc").touch()
    (there / "joined").mkdir()
    (there / "joined" / "manifest.json").touch()
    (tmp_path / "run" / "host").mkdir(parents=True)
    (tmp_path / "run" / "host" / "joined").write_text(str(there / "joined"))
    found = remote.list_script_outputs(str(there), since, run=str(tmp_path / "run"))
    assert found == [{"path": "log.csv", "size": 14}, {"path": "out/model", "size": 5}]
    assert json.dumps(found)
    assert remote.list_script_outputs(str(there), time.time() + 60) == []
    assert remote.list_script_outputs(str(there), since - 60, since)[0]["path"] == "before"
