"""The reference pages match the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from evener.core.run import membership_epoch, run_plan

DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "generate" / "reference.py"))["pages"]()


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_up_to_date(name):
    assert (DOCS / "reference" / name).read_text() == PAGES[name], "make docs-generate writes it anew"


def test_reference_has_every_verb_and_flag():
    for verb in ("train", "bench", "report", "verify", "sample", "data verbs", "data python", "data text"):
        assert f"## evener {verb}\n" in PAGES["cli.md"]
    assert "`--micro-batch N`" in PAGES["cli.md"]


def test_every_method_of_the_python_page_has_a_description():
    sections = re.split(r"^### ", PAGES["python.md"], flags=re.MULTILINE)[1:]
    assert len(sections) > 20
    for section in sections:
        text = re.sub(r"```python\n.*?```", "", section.partition("\n")[2], flags=re.DOTALL).partition("\n## ")[0]
        assert len(text.split()) >= 3, section


def test_every_setting_of_the_files_has_a_type():
    for name in ("settings.md", "fleet.md"):
        assert "<class" not in PAGES[name]
        assert "typing." not in PAGES[name]


def test_run_directory_page_has_every_file_that_agents_and_ranks_exchange():
    page = (DOCS / "reference" / "run-directory.md").read_text()
    names = {value for module in (membership_epoch, run_plan) for value in vars(module).values()
             if isinstance(value, str) and value.startswith("host/")}  # fmt: skip
    assert len(names) > 10
    for name in {*names, run_plan.ROSTER_FILE, run_plan.CLUSTER_FILE}:
        assert re.search(rf"`{re.escape(name)}(`|/)", page), name
