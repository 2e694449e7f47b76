"""The cost model reproduces published measurements, and the page that lists them is up to date."""

from __future__ import annotations

import csv
import math
import random
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MODULE = runpy.run_path(str(DOCS / "generate" / "published.py"))
rows = MODULE["rows"]  # by section; computed once


def stated() -> list[Any]:
    """The rows whose source states the interconnect."""
    return [row for found in rows().values() for row in found if row.is_stated]


@pytest.mark.parametrize("name", ["published", "fast", "gpu"])
def test_generated_page_is_up_to_date(name):
    module = MODULE if name == "published" else runpy.run_path(str(DOCS / "generate" / f"{name}.py"))
    assert (DOCS / "figures" / f"{name}.md").read_text() == module["page"](), "make docs-generate writes it anew"


def test_page_of_every_month_of_the_log_is_up_to_date():
    pages = runpy.run_path(str(DOCS / "generate" / "log.py"))["pages"]()
    assert pages
    for name, page in pages.items():
        assert (DOCS / "log" / name).read_text() == page, "make docs-generate writes it anew"


def test_every_entry_of_the_log_stands_alone():
    for file in (DOCS / "log").glob("*.csv"):
        with file.open(newline="") as opened:
            for row in csv.DictReader(opened):
                assert not re.match(r"the same\b|as above\b", row["what"]), row["what"]
                assert all(row.values()), row


def test_every_published_figure_is_on_the_page():
    for name, section in (("training", "Training"), ("scaling", "Scaling"), ("collectives", "Collectives"),
                          ("nodes", "Collectives by nodes")):  # fmt: skip
        assert len(rows()[section]) >= len(MODULE["read"](name))


def test_prediction_is_within_10_percent_when_interconnect_is_known():
    assert {row.name: row.error for row in stated() if not abs(row.error) <= 0.10} == {}


def test_ten_percent_check_covers_42_rows():
    """An empty list would pass every test above."""
    assert len(stated()) == 42


def test_step_with_throttled_gpu_matches_published_time():
    (row,) = [row for row in rows()["Training"] if row.name == "straggler7b"]
    assert row.error == pytest.approx(0.0, abs=0.03)


def test_nccl_curve_matches_published_figures():
    """But for 32 KiB on 4 nodes: one digit, and slower than a message 32 times as large."""
    errors = {row.name: row.error for row in rows()["Collectives"]}
    assert errors.pop("4 nodes of 8xB200, 32,768 B") > 10
    assert errors
    assert {name: error for name, error in errors.items() if not abs(error) <= 0.06} == {}


@pytest.mark.parametrize("terms", [(1e-5, 1e-8, 1e-11), (0.0, 1e-8, 1e-11), (1e-5, 0.0, 1e-11), (0.0, 0.0, 1e-11)])
def test_nccl_fit_recovers_fixed_root_and_bandwidth_terms(terms):
    a, b, c = terms
    points = [(1 << i, a + b * math.sqrt(1 << i) + c * (1 << i)) for i in range(10, 34, 2)]
    curve = MODULE["fit_nccl"](points, 4)
    assert curve.fixed_s == pytest.approx(a, rel=1e-6, abs=1e-12)
    assert curve.root_s == pytest.approx(b, rel=1e-6, abs=1e-15)
    assert curve.bandwidth_Bps == pytest.approx(1 / c, rel=1e-6)


def test_nccl_fit_of_noise_has_no_negative_term():
    rng = random.Random(3)
    for num in (1, 2, 3, 5, 9):
        points = [(1 << rng.randrange(10, 30), rng.random()) for _ in range(num)]
        curve = MODULE["fit_nccl"](points, 4)
        assert min(curve.fixed_s, curve.root_s, curve.bandwidth_Bps) >= 0
        assert all(curve.seconds(size) >= 0 for size, _ in points)
