"""A folder's name says what it may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "evener"
MAY_IMPORT = {
    "core": set(),
    "plan": {"core"},
    "corpus": {"core"},
    "worker": {"core", "plan", "corpus"},
    "hosts": {"core"},
    "launch": {"core", "hosts"},
    "report": {"core", "plan"},
    "lab": {"core", "hosts"},
    "bench": {"core", "plan", "corpus", "launch", "report"},
    "cli": {"core", "plan", "corpus", "launch", "report", "bench", "hosts", "lab"},
}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE)


def imports(path: Path, *, lazy: bool = True) -> set[str]:
    """Modules that a file imports; without those inside functions where `lazy` is False."""
    tree = ast.parse(path.read_text())
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= {id(child) for child in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if not lazy and id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: import from the root"
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_table(path):
    layer = path.relative_to(SOURCE).parts[0]
    allowed = MAY_IMPORT[layer] | {layer}
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "evener" and len(parts) > 1 and (SOURCE / parts[1]).is_dir():
            assert parts[1] in allowed, f"{layer} may not import {name}"
        if parts[0] in ("torch", "safetensors"):
            assert layer == "worker", f"{layer} may not import {name}: torch belongs to the worker"
        if layer == "core":
            assert parts[0] in {*sys.stdlib_module_names, "msgspec", "tomlkit", "evener"}, f"core may not import {name}"


PIPED = sorted(path for path in (SOURCE / "hosts" / "remote").glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", PIPED, ids=lambda path: path.name)
def test_what_is_piped_to_a_bare_machine_needs_nothing_there(path):
    """Its python may be 3.8, and has nothing but the standard library."""
    ast.parse(path.read_text(), feature_version=(3, 8))
    assert {name.split(".")[0] for name in imports(path)} <= {*sys.stdlib_module_names}


VERBS = sorted(path for path in (SOURCE / "cli").glob("*.py") if path.name != "benchmarks.py")  # which `bench` calls


@pytest.mark.parametrize("path", VERBS, ids=lambda path: path.name)
def test_verbs_import_their_layer_when_called(path):
    heavy = {"numpy", "matplotlib", "plotly", "rich", "psutil", "tokenizers"}
    assert not {name.split(".")[0] for name in imports(path, lazy=False)} & heavy


@pytest.mark.parametrize(
    "verb",
    [
        [],
        ["train"],
        ["plan"],
        ["bench"],
        ["report"],
        ["verify"],
        ["sample"],
        ["data"],
        ["data", "text"],
        ["doctor"],
        ["lab", "up"],
        ["probe", "host"],
    ],
)
def test_help_loads_no_torch(verb):
    code = (
        "import sys; from evener.cli.main import main; sys.argv = ['evener', *sys.argv[1:], '--help']\n"
        "try: main()\n"
        "finally: assert not {'torch', 'numpy', 'matplotlib'} & sys.modules.keys(), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *verb], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
