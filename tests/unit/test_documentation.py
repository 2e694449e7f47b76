"""Commands in README and docs are valid, and CI runs those in `sh` blocks."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from .test_help import check

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "log" not in path.parts)]
RUN_IN_CI = re.compile(r"README\.md|docs/(start|guides)/[\w-]+\.md|docs/reference/json\.md")


def blocks(path: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[str]:
    """Return the commands of a page: all lines of `sh` blocks, and lines behind a $ of `console` blocks."""
    lines = [line for block in blocks(path, "sh") for line in block.replace("\\\n", " ").splitlines()]
    lines += [line[2:] for block in blocks(path, "console") for line in block.splitlines() if line.startswith("$ ")]
    return [line.partition(" #")[0].partition(" |")[0].strip() for line in lines]


EVENER_COMMANDS = [(str(path.relative_to(ROOT)), line) for path in PAGES for line in commands(path)
                   if line.startswith("evener ")]  # fmt: skip


@pytest.mark.parametrize(("page", "line"), EVENER_COMMANDS)
def test_command_of_a_page_is_accepted_by_its_verb(page, line):
    check(" ".join(shlex.quote(word) for word in shlex.split(line)), "")


def test_evener_commands_are_found_in_readme_and_docs():
    assert len(EVENER_COMMANDS) > 100
    assert {page for page, _ in EVENER_COMMANDS} > {"README.md", "docs/start/two-machines.md", "docs/guides/lab.md"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_console_blocks_have_a_prompt_and_sh_blocks_run_in_ci(path):
    for block in blocks(path, "console"):
        assert block.startswith("$ "), block
    if blocks(path, "sh"):
        assert RUN_IN_CI.fullmatch(str(path.relative_to(ROOT))), "CI does not run this page: use a console block"


def test_ci_prints_the_commands_of_all_pages_in_order(monkeypatch, capsys):
    script = ROOT / ".ci" / "commands.py"
    given = [str(path) for path in PAGES if RUN_IN_CI.fullmatch(str(path.relative_to(ROOT)))]
    monkeypatch.setattr(sys, "argv", [str(script), *given])
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert printed.index("make demo") < printed.index("make test") < printed.index("evener lab up")
    assert "\n$ " not in printed


def test_every_page_is_in_the_table_of_contents():
    nav = (ROOT / "zensical.toml").read_text()
    tomllib.loads(nav)
    for path in (ROOT / "docs").rglob("*.md"):
        assert f'"{path.relative_to(ROOT / "docs")}"' in nav, path


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(path):
    text = path.read_text()
    for name in re.findall(r"(?<![\w/.-])(?!torch/|host/)(?:[a-z_]+/)+[a-z_0-9]+\.py\b", text):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "src" / "evener")), name


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1000


def test_links_of_readme_and_contributing_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name}: {target}"
