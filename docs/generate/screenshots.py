"""Write docs/figures/terminal.png and report.png with Chromium: what a plan prints, and a report's page.

The plan is of two hosts over 100 Mbit/s, as fast as emulated ones of 1 and 1/2 core were. The report is that of the
records in tests/unit/records/two-hosts, up to its verdict.
"""

from __future__ import annotations

import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
FLEET = """link = "100Mbit"
[hosts.attic]
address = "local"
[hosts.laptop]
address = "192.168.1.28"
[rates.attic.cpu.models.char]
tokens_per_s = 2150
[rates.laptop.cpu.models.char]
tokens_per_s = 1075
"""
PLAN = ("plan", "--model", "char", "--steps", "2000")
LINES = 13  # of what it prints
STYLE = (
    "body{margin:0;background:#16181d}pre{margin:0;padding:18px 22px;color:#e4e6ea;"
    "font:15px/1.45 'DejaVu Sans Mono',monospace;display:inline-block}b{color:#7fd1ae;font-weight:400}"
)


def main() -> None:
    executable = shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 720}, device_scale_factor=1.5)
        take_terminal(page, Path(folder))
        take_report(page, Path(folder))


def evener(folder: Path, *arguments: str) -> str:
    """Run a verb in a terminal of 80 columns; return what it prints."""
    command = [sys.executable, "-c", "from evener.cli.main import main; main()", *arguments]
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def take_terminal(page: Page, folder: Path) -> None:
    """Take the beginning of what the plan prints."""
    (folder / "fleet.toml").write_text(FLEET)
    lines = evener(folder, *PLAN).splitlines()[:LINES]
    text = html.escape("\n".join([*lines, "⋮"]))
    page.set_content(f"<style>{STYLE}</style><pre><b>$ evener {' '.join(PLAN)}</b>\n{text}</pre>")
    page.locator("pre").screenshot(path=FIGURES / "terminal.png")


def take_report(page: Page, folder: Path) -> None:
    """Take the beginning of a report's page."""
    shutil.copytree(ROOT / "tests" / "unit" / "records" / "two-hosts", folder / "two-hosts")
    evener(folder, "report", "two-hosts", "--out", str(folder / "report.html"))
    page.goto((folder / "report.html").as_uri())
    page.screenshot(path=FIGURES / "report.png", clip={"x": 40, "y": 0, "width": 880, "height": 372})


if __name__ == "__main__":
    main()
