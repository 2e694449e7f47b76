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
    """Return the file of a module, None if there is none. Unlike find_spec it does not import the packages above."""
    package, *names = name.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*names)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)
