"""A command that is given in a folder from elsewhere imports nothing from it, and writes nothing through its links."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.base.file_io import write_folder_atomic
from evener.core.cluster.fleet_file import HostConfig, load_fleet
from evener.core.run.runwriter import RunWriter
from evener.corpus.prepare_corpus import prepare
from evener.report.pages.png_charts import save_png
from evener.ssh.session import open_session
from tests.tiers import exhaustive

from ..source_code import syntax_nodes
from ..unit.test_corpus import splits

SOURCE = Path(__file__).parents[2] / "src" / "evener"
TRAPS = ("json", "queue", "selectors", "torch", "pip", "evener", "sitecustomize", "safetensors")


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: modules in it would make the file `executed`."""
    folder = tmp_path / "trapped"
    folder.mkdir()
    for name in TRAPS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(folder)
    return tmp_path / "executed"


def test_python_of_this_machine_imports_nothing_from_the_current_folder(trapped: Path) -> None:
    session = open_session("here", HostConfig(address="local"))
    session.clock_offset_s(repeats=1)
    session.close()
    assert not trapped.exists()


def test_program_of_evener_imports_nothing_from_the_current_folder(trapped: Path) -> None:
    argv = [sys.executable, "-c", "from evener.launch.torch_subprocess import program_lines\n"
            "print(list(program_lines('evener.worker.compare_weights', 'nowhere')))"]  # fmt: skip
    done = subprocess.run([argv[0], "-P", *argv[1:]], capture_output=True, text=True, check=False, env={**os.environ})
    assert "nowhere" in done.stderr
    assert not trapped.exists()


def test_every_python_that_evener_starts_is_kept_from_the_current_folder() -> None:
    """`-P` or `-I` follows the interpreter, or a program's own path; ranks have PYTHONSAFEPATH in their environment."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in syntax_nodes(path):
            words = [ast.unparse(word) for word in node.elts] if isinstance(node, ast.List | ast.Tuple) else []
            if "sys.executable" in words[:1] and len(words) > 1 and words[1] not in ("'-P'", "'-I'", "*spec.program"):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {words[1]}")
    assert [place for place in found if not place.startswith("lab/")] == []


def test_folder_is_not_written_through_a_link_in_the_place_of_its_temporary(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.export.tmp").symlink_to("../outside")
    write_folder_atomic(tmp_path / "run/export", lambda folder: (folder / "config.json").write_text("new") and None)
    assert (outside / "config.json").read_text() == "mine"
    assert (tmp_path / "run/export/config.json").read_text() == "new"
    assert not (tmp_path / "run/export").is_symlink()


def test_link_in_the_place_of_a_half_written_checkpoint_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/weights").write_text("mine")
    run = RunWriter(tmp_path / "run")
    run.checkpoints_path.mkdir(parents=True)
    (run.checkpoints_path / ".step-000002.tmp").symlink_to(tmp_path / "outside")
    run.remove_partial_checkpoints()
    assert [*run.checkpoints_path.iterdir()] == []
    assert (tmp_path / "outside/weights").read_text() == "mine"


def test_link_in_the_place_of_a_corpus_in_preparation_is_removed_and_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/thesis").write_text("mine")
    (tmp_path / ".corpus.partial").symlink_to("outside")
    prepare(tmp_path / "corpus", splits(), tokenizer="char")
    assert (tmp_path / "outside/thesis").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "outside"]


def test_picture_replaces_a_link(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    (tmp_path / "mine").write_text("mine")
    (tmp_path / "picture.png").symlink_to("mine")
    save_png(Figure(), tmp_path / "picture.png")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@exhaustive
def test_pictures_obey_no_matplotlibrc_of_the_current_folder(tmp_path: Path) -> None:
    """With text.usetex it would have LaTeX run on text that it chooses."""
    program = "from evener.report.pages.png_charts import scaling_png; scaling_png({}, 'picture.png')"
    for name, settings in (("plain", ""), ("foreign", "text.usetex: True\nfont.size: 30\naxes.facecolor: red\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "matplotlibrc").write_text(settings)
        subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path / name, check=True)
    assert (tmp_path / "foreign/picture.png").read_bytes() == (tmp_path / "plain/picture.png").read_bytes()


def test_relative_interpreter_of_this_machine_is_that_beside_the_fleet_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that of the folder in which a command is given later."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project/fleet.toml").write_text('[hosts.a]\naddress = "local"\npython = ".venv/bin/python"\n')
    monkeypatch.chdir(tmp_path / "project")
    assert load_fleet("fleet.toml").hosts["a"].python == str(tmp_path / "project/.venv/bin/python")
