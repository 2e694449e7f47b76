"""The reference page says what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_page_is_up_to_date():
    page = runpy.run_path(str(DOCS / "reference.py"))["page"]()
    assert (DOCS / "reference.md").read_text() == page, "make docs writes it anew"
    for verb in ("train", "bench", "report", "verify", "sample", "data verbs", "data python", "data text"):
        assert f"## evener {verb}\n" in page
    assert "`--micro-batch N`" in page
