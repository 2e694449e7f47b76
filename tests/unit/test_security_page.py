"""docs/security.md names the tests that hold its statements."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_statement_about_others_names_tests_that_exist() -> None:
    tests = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    rows = [row for row in (ROOT / "docs/security.md").read_text().splitlines() if re.match(r"\|(?!--)", row)]
    cells = [row.strip("|").split("|")[-1].strip() for row in rows]
    assert len(rows) > 20
    for row, cell in zip(rows, cells, strict=True):
        named = re.findall(r"`(test_\w+)`", cell)
        assert named or cell == "tests" or cell.startswith("none"), row
        assert {*named} <= tests, {*named} - tests
