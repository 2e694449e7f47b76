"""The live page of a fleet run shows its steps as they are made, and its buttons save and stop the run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from evener.lab.lab_spec import HostSpec
from tests.browser.conftest import Watched, context, page, watch  # noqa: F401
from tests.lab.conftest import MakeLab, rank_on, wait_until
from tests.lab.test_launch import Fleet
from tests.tiers import exhaustive

pytestmark = exhaustive
WITHIN_MS = 300_000  # of a machine as busy as it likes
FLAGS = ("--model=tiny", "--batch=12", "--steps=100000", "--dtype=fp32", "--threads=1", "--eval-tokens=256",
         "--eval-every=0", "--dropout=0", "--checkpoint-every=0", "--shares=equal")  # fmt: skip


def steps_shown(page: Page) -> int:  # noqa: F811
    found = re.search(r"step ([\d,]+) of", page.locator("[data-piece=state]").inner_text())
    return int(found[1].replace(",", "")) if found else 0


def test_fleet_run_is_watched_saved_and_stopped_from_page(
    make_lab: MakeLab, tmp_path: Path, corpus: Path, page: Page, watch: Callable[..., Watched]  # noqa: F811
) -> None:  # fmt: skip
    """A rank is killed meanwhile, and the page tells who is let in again."""
    lab = make_lab(tmp_path / "fleet.toml", a=HostSpec(rate="20Mbit"), b=HostSpec(rate="20Mbit"))
    fleet = Fleet(lab, tmp_path / "fleet.toml", tmp_path)
    fleet.ok("train", "--data", str(corpus), *FLAGS, "--out", "run", "--detach")
    run = fleet.rundir("run")
    try:
        page.goto(watch(str(tmp_path / "run")).url)
        wait_until(lambda: steps_shown(page) > 20, page.locator("main").inner_text, WITHIN_MS / 1000)
        expect(page.locator(".strip")).to_have_count(2)
        page.get_by_role("button", name="save now").click()
        events = page.locator("[data-piece=events]")
        expect(events).to_contain_text(re.compile(r"step \d+ saved"), timeout=WITHIN_MS)
        os.kill(rank_on(lab.host("b")), signal.SIGKILL)
        expect(events).to_contain_text("a, b: b is let in", timeout=WITHIN_MS)
        shown = steps_shown(page)
        wait_until(lambda: steps_shown(page) > shown, "it goes on", WITHIN_MS / 1000)
        page.get_by_role("button", name="stop").click()
        page.get_by_role("button", name="stop it").click()
        expect(page).to_have_title(re.compile("■ stopped"), timeout=WITHIN_MS)
    finally:
        fleet.run("stop", "run", "--now")
    manifest = run.manifest()
    assert manifest.verdict == "stopped"
    assert manifest.result is not None
    assert manifest.result.replicas_agree is True
    assert run.newest_checkpoint_step() == manifest.result.steps
    lab.down()
