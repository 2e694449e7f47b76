"""Write docs/log/MONTH-figures.md from docs/log/MONTH.csv, a table for each topic. `make docs-generate`."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "log"


def pages() -> dict[str, str]:
    """Return the text of the page of every month, by its file name."""
    return {f"{file.stem}-figures.md": page(file) for file in sorted(FOLDER.glob("*.csv"))}


def page(file: Path) -> str:
    """Return the page of one month; rows of a topic stand together in the file."""
    with file.open(newline="", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    lines = [
        f"# Figures of {file.stem}",
        "",
        f"Generated from `docs/log/{file.name}` by `make docs-generate`. Machine unless said otherwise: 2 cores of an "
        "AMD EPYC (Zen 4, AVX-512), 24 GiB, no GPU; PyTorch 2.13.0, Python 3.11. "
        "A ratio comes from one run, side by side.",
    ]
    for topic, group in itertools.groupby(rows, key=lambda row: row["topic"]):
        lines += ["", f"## {topic}", "", "| date | what | figure |", "|---|---|---|"]
        lines += [f"| {row['date']} | {cell(row['what'])} | {cell(row['figure'])} |" for row in group]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Escape a cell of a Markdown table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)
