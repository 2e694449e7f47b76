"""The syntax of source files, for tests that look at the code itself."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path


@functools.cache
def syntax_nodes(path: Path) -> list[ast.AST]:
    """Return all syntax nodes of a Python file."""
    return list(ast.walk(ast.parse(path.read_text())))


def module_file(name: str) -> Path | None:
    """Return the file of a module of a package, None if there is none; imports nothing, unlike find_spec."""
    package, *names = name.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    assert spec.origin is not None, package
    path = Path(spec.origin).with_name(names[0]).joinpath(*names[1:])
    files = [path.with_name(f"{path.name}.py"), path / "__init__.py"]
    return next((file for file in files if file.is_file()), None)
