"""No file of a run directory or of ~/.evener is opened for writing, or locked, but through the two file_io modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ..source_code import syntax_nodes

SOURCE = Path(__file__).parents[2] / "src" / "evener"
# These write no files of a run: labs and their drills, corpora, wheels in a temporary folder.
OTHER_FILES = ("lab/", "corpus/", "sources/", "transfer/wheels.py")
ALLOWED = {
    "cli/main.py: open",  # /dev/null
    "core/base/file_io.py",
    "node/remote/file_io.py",
    "node/remote/content_store.py: open",  # mode x: a new file in a folder that is being made
    "node/remote/content_store.py: copyfile",  # the same
    "worker/export_hf.py: write_text",  # in the temporary folder of `write_folder_atomic`
}
WRITING_METHODS = {"write_text", "write_bytes", "touch", "copyfile"}
IN_FILE_IO = "use a function of core/base/file_io.py, or of node/remote/file_io.py"


def writing_calls(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each call that may create, write, truncate or append to a file by its name."""
    for node in syntax_nodes(path):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if name == "open":
            flags = ast.unparse(node)
            modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            is_writing = any(re.fullmatch(r"[rwaxbt+]*[wax+][rwaxbt+]*", mode) for mode in modes)
            if is_writing or (owner == "os" and re.search("O_WRONLY|O_RDWR|O_CREAT|flags", flags)):
                yield name, node.lineno
        elif name in WRITING_METHODS or (owner == "shutil" and name in ("copy", "copy2", "copytree", "move")):
            yield name, node.lineno


def test_files_are_written_through_file_io_alone() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name not in ALLOWED and not name.startswith(OTHER_FILES):
            calls = writing_calls(path)
            found += [f"{name}:{line}: {call}" for call, line in calls if f"{name}: {call}" not in ALLOWED]
    assert not found, IN_FILE_IO


def test_paths_in_a_run_are_made_by_its_checked_functions() -> None:
    """`rundir.path / …` and a join with the run's folder would follow a link out of the run directory."""
    unchecked = re.compile(r"(?:rundir|_dir|folder|RunDir\([\w.]+\))\.path\b[)]* */|os\.path\.join\((?:self\.)?run\b,")
    allowed = "inside(|path_inside(|parent / name"
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if not name.startswith(OTHER_FILES):
            lines = enumerate(path.read_text().splitlines(), 1)
            found += [f"{name}:{number}: {line.strip()}" for number, line in lines if unchecked.search(line)]
    assert not [line for line in found if not any(part in line for part in allowed.split("|"))]
