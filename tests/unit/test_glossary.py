"""The glossary is sorted, and defines each name where the code does."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "evener"
ROWS = re.findall(r"^\| ([^|]+) \| [^|]+ \| (`.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
DEFINITION = re.compile(r"\b(?:class|def) (\w+)|^\s*(\w+)\b\s*[:=]", re.MULTILINE)


def test_every_name_of_the_glossary_is_defined_where_it_says():
    missing: list[str] = []
    for term, where in ROWS:
        for path, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", where):
            defined = DEFINITION.findall((SOURCE / path).read_text())
            undefined = {*re.findall(r"`(\w+)`", names)} - {name for pair in defined for name in pair}
            missing += [f"{term}: {path} defines no {name}" for name in undefined]
    assert len(ROWS) > 60
    assert missing == []


def test_glossary_terms_are_unique_and_sorted():
    terms = [term.lower() for term, _ in ROWS]
    assert terms == sorted(set(terms))
