"""Imports follow the folder table and have no cycles, no verb imports torch, and no class name is used twice."""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import re
import sys
from pathlib import Path

import pytest

from evener.node import remote

from ..source_code import syntax_nodes

SOURCE = Path(__file__).parents[2] / "src" / "evener"
TABLE = re.findall(
    r"^\| (\w+) \| [^|]+ \| ([\w, ]*)\| ([\w, ]+) \|$",
    (SOURCE.parents[1] / "docs" / "architecture.md").read_text(),
    re.MULTILINE,
)
LAYERS = {layer: {*re.findall(r"\w+", others)} for layer, others, _ in TABLE if layer != "layer"}
PACKAGES = {layer: {*re.findall(r"\w+", names)} for layer, _, names in TABLE}  # "any": all but torch
TORCH = {"torch", "safetensors", "accelerate", "lightning", "transformers"}  # what loads torch


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
IN_LAYERS = {module: path for module, path in MODULES.items() if path.parent != SOURCE}


def folder_of(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


@functools.cache
def imports(path: Path, *, lazy: bool = True) -> set[str]:
    """Modules that a file imports, and names that may be modules; where not `lazy`, none in functions or for types.

    Where `lazy`, those for the type checker alone count, too: who needs another's types stands on it.
    """
    skipped = set() if lazy else {
        id(child)
        for node in syntax_nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING")
        for child in ast.walk(node)
    }  # fmt: skip
    found = set()
    for node in syntax_nodes(path):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: import from the root"
    return found


def packages(path: Path) -> set[str]:
    """Packages of others that a file imports, wherever in it."""
    return {name.partition(".")[0] for name in imports(path)} - {*sys.stdlib_module_names, "evener"}


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {module: imports(path) & MODULES.keys() - {module} for module, path in MODULES.items()}


def test_imports_follow_the_table():
    violations = {}
    for module, path in IN_LAYERS.items():
        layer = module.split(".")[1]
        others = {other.split(".")[1] for other in import_graph()[module] if other in IN_LAYERS} - {layer}
        outside = packages(path)
        forbidden = others - LAYERS[layer]
        if "any" not in PACKAGES[layer]:
            forbidden |= outside - PACKAGES[layer]
        if "torch" not in PACKAGES[layer]:
            forbidden |= outside & TORCH
        if forbidden:
            violations[module] = forbidden
    assert violations == {}


def test_imports_have_no_cycles():
    """Nor do three in a circle; inside functions and for types neither."""
    try:
        graphlib.TopologicalSorter(import_graph()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_folders_have_no_cycles():
    """A folder that imports another is above it: what a batch, a spec or a failure passes on its way goes one way."""
    folders: dict[str, set[str]] = collections.defaultdict(set)
    for module, others in import_graph().items():
        for other in others:
            importing, imported = folder_of(module), folder_of(other)
            if importing != imported and "evener" not in (importing, imported):
                folders[importing].add(imported)
    try:
        graphlib.TopologicalSorter(folders).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_folders_hold_at_most_15_modules():
    """But cli, one file a verb; its name says which."""
    sizes = collections.Counter(folder_of(module) for module, path in MODULES.items() if path.name != "__init__.py")
    assert {folder: size for folder, size in sizes.items() if size > 15} == {"evener.cli": sizes["evener.cli"]}


def test_import_cycle_is_detected():
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(import_graph() | {"evener.core.base.errors": {"evener.cli.main"}}).prepare()


PIPED = sorted(path for path in (SOURCE / "node" / "remote").glob("*.py") if path.name != "__init__.py")


def test_piped_modules_need_only_python_3_8_standard_library_and_siblings():
    """Its python may be 3.8, and has nothing but the standard library; siblings are sent first."""
    for path in PIPED:
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        assert packages(path) == set(), path
        of_evener = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
                     and "evener" in ast.unparse(node)]  # fmt: skip
        for node in of_evener:
            assert isinstance(node, ast.ImportFrom), path
            assert node in tree.body, path
            assert remote.REMOTE_DIR / f"{(node.module or '').removeprefix('evener.node.remote.')}.py" in PIPED, path
        assert len(remote.siblings(path.read_text())) == len(of_evener), path


OF_BENCH = ("bench_local.py", "bench_fleet.py")  # which `bench` calls
VERBS = sorted(path for path in (SOURCE / "cli").glob("*.py") if path.name not in OF_BENCH)


def test_verbs_import_heavy_packages_lazily():
    heavy = {"numpy", "matplotlib", "rich", "psutil", "starlette", "tokenizers", "uvicorn"}
    for path in VERBS:
        assert not {name.split(".")[0] for name in imports(path, lazy=False)} & heavy, path


def test_no_verb_imports_torch():
    """Whatever a verb does, no file that it can come to imports torch."""
    reached, waiting = set(), [module for module in MODULES if module.startswith("evener.cli")]
    while waiting:
        module = waiting.pop()
        assert "evener.join" not in imports(MODULES[module]), f"{module}: join, which loads torch, is for users"
        if module not in reached and module != "evener":  # which loads it for `join` alone
            reached.add(module)
            waiting += import_graph()[module]
    loaders = {module for module in MODULES if packages(MODULES[module]) & TORCH}
    assert {module.split(".")[1] for module in loaders} == {"worker", "integrations"}
    assert not reached & loaders


def test_no_class_name_is_used_twice():
    """Nested and private ones included."""
    places = collections.defaultdict(list)
    for path in MODULES.values():
        for node in syntax_nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
