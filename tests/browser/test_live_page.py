"""The live page in Chromium follows a run, passes accessibility rules, and survives a stop of its server."""

from __future__ import annotations

import re

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from evener.core.run.runwriter import RunWriter
from evener.report.pages import compare_runs
from evener.report.pages.html_report import run_page
from tests.tiers import exhaustive, exhaustively

from ..conftest import Started, flags_of, wait_until

SOON_MS = 60_000  # generous: two cores may have other work; how soon it is, bench/watch_overhead.py measures


def take_steps(run: RunWriter, num: int = 1) -> int:
    """The ranks take more steps; how many they have then."""
    for rank in run.recorded_ranks():
        last = run.records(rank)[-1]
        with run.steps_path(rank).open("ab") as file:
            for i in range(1, num + 1):
                file.write(msgspec.json.encode(msgspec.structs.replace(last, step=last.step + i)) + b"\n")
    return run.records(0)[-1].step + 1


def shows_step(page: Page, step: int) -> None:
    expect(page.locator("[data-piece=state]")).to_contain_text(f"step {step} of", timeout=SOON_MS)


@pytest.fixture
def run(tmp_path, write_run) -> RunWriter:
    return write_run(tmp_path / "mine", [{}, {"compute_s": 0.15}], verdict="running", steps=30, sync_s=0.02,
                     evaluations={10: 2.0, 20: 1.5})  # fmt: skip


def end(run: RunWriter, verdict: str) -> None:
    run.write_manifest(msgspec.structs.replace(run.manifest(), verdict=verdict))


def test_page_follows_run_in_two_tabs_and_shows_its_end(context, page, run, watch):
    watched = watch(str(run.path))
    page.goto(watched.url)
    assert "token" not in page.url
    other = context.new_page()
    other.goto(watched.at("/"))  # the cookie is the browser's
    for tab in (page, other):
        shows_step(tab, 30)
        for piece in ("loss", "speed", "gradients", "schedule", "parts"):
            box = tab.locator(f"[data-piece={piece}] svg").bounding_box()
            assert box is not None
            assert box["width"] > 300
        expect(tab.locator(".strip")).to_have_count(2)
    details = page.locator("[data-piece=loss] details")
    details.locator("summary").click()
    step = take_steps(run, 3)
    shows_step(page, step)
    shows_step(other, step)
    expect(details).to_have_attribute("open", "")  # what somebody has opened stays so
    expect(page).to_have_title(re.compile(r"^[▶⚠].*mine · evener$"))
    page.locator("[data-piece=loss] .field").hover()
    expect(page.locator(".tip")).to_contain_text("training, smoothed")
    page.locator("#axis").select_option("tokens")
    expect(page.locator("[data-piece=loss] .x-title")).to_have_text("tokens", timeout=SOON_MS)
    end(run, "finished")
    expect(page).to_have_title("✓ finished · mine · evener", timeout=SOON_MS)
    expect(page.locator("#icon")).to_have_attribute("href", "/static/done.svg")
    expect(page.locator("#aloud")).to_contain_text("mine finished")


def test_pointer_shows_recorded_value_of_a_spike_beyond_the_edge(page, tmp_path, write_run):
    """The loss of step 15 is drawn at the edge of the picture, where it would be about 3.1."""
    run = write_run(tmp_path / "mine", [{}], steps=30, losses=lambda step: 5e6 if step == 14 else 3.0 - 0.01 * step)
    (tmp_path / "report.html").write_text(run_page(run, now=0.0), encoding="utf-8")
    page.goto((tmp_path / "report.html").as_uri())
    field = page.locator(".field").first
    box = field.bounding_box()
    assert box is not None
    field.hover(position={"x": box["width"] * 14 / 29, "y": box["height"] / 2})
    expect(page.locator(".tip")).to_contain_text("step 15")
    expect(page.locator(".tip")).to_contain_text("each step  5000000")


def test_page_survives_server_stop(page, run, watch):
    watched = watch(str(run.path))
    page.goto(watched.url)
    expect(page.locator("main[data-seen]")).to_be_attached()  # a stream is open
    assert watched.stop() == 0
    expect(page.locator("#gone")).to_be_visible(timeout=SOON_MS)
    step = take_steps(run, 2)
    watched.start()
    shows_step(page, step)
    expect(page.locator("#gone")).to_be_hidden(timeout=SOON_MS)


def test_hidden_tab_closes_its_event_stream_until_shown_again(page, run, watch):
    """And a new one when it is seen again."""
    page.add_init_script("""
        const Real = EventSource;
        window.streams = [];
        window.EventSource = class extends Real { constructor(at) { super(at); window.streams.push(this); } };
        window.EventSource.CLOSED = Real.CLOSED;
    """)
    page.goto(watch(str(run.path)).url)
    expect(page.locator("main[data-seen]")).to_be_attached()
    hide = """(is) => {
        Object.defineProperty(document, "hidden", { value: is, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
        return window.streams.map((one) => one.readyState === 2);
    }"""
    assert page.evaluate(hide, True) == [True]
    step = take_steps(run)
    assert page.evaluate(hide, False) == [True, False]
    shows_step(page, step)


@exhaustive
def test_page_memory_does_not_grow_with_number_of_messages(page, run, watch):
    """Messages as the server sends them, many times as many as of an evening: as many nodes, as much memory."""
    page.add_init_script("""
        const Real = EventSource;
        window.EventSource = class extends Real { constructor(at) { super(at); window.stream = this; } };
        window.EventSource.CLOSED = Real.CLOSED;
    """)
    page.goto(watch(str(run.path)).url)
    expect(page.locator("main[data-seen]")).to_be_attached()
    page.locator("[data-piece=loss] summary").click()
    client = page.context.new_cdp_session(page)

    def grown(num: int) -> tuple[int, int]:
        page.evaluate(
            """(num) => {
            const pieces = {}, assets = document.querySelector("main").dataset.assets;
            for (const one of document.querySelectorAll("[data-piece]")) pieces[one.dataset.piece] = one.innerHTML;
            for (let i = 0; i < num; i++) {
                const status = { title: `step ${i}`, mark: "good", word: "healthy", told: "", assets };
                window.stream.onmessage({ data: JSON.stringify({ ...status, pieces }) });
            }
        }""",
            num,
        )
        client.send("HeapProfiler.collectGarbage")
        counted = client.send("Memory.getDOMCounters")
        return counted["nodes"], client.send("Runtime.getHeapUsage")["usedSize"]

    nodes, used = grown(50)
    more_nodes, more_used = grown(1000)
    assert more_nodes <= nodes + 50
    assert more_used < used + 1_000_000


@exhaustive
def test_live_pages_pass_accessibility_rules(context, page, run, watch, tmp_path, write_run):
    """axe-core's rules, on every page, wide and narrow, light and dark; and the keyboard reaches the button."""
    other = write_run(tmp_path / "other", [{}], verdict="failed")
    other.add_event("failure", rank=0, error="killed by SIGKILL", kind="exit", hint="was there enough memory?")
    watched = watch(str(run.path), str(other.path))
    both = "/compare?run=mine&run=other"
    for width, scheme, path in ((1400, "light", "/runs/mine"), (390, "dark", "/runs/mine"), (390, "light", "/"),
                                (1400, "dark", "/runs/other"), (1400, "light", both), (390, "dark", both)):  # fmt: skip
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(watched.url if page.url == "about:blank" else watched.at(path))
        page.goto(watched.at(path))
        expect(page.locator("main[data-seen]")).to_be_attached()
        keeps_to_the_rules(page)


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), *exhaustively((1400, "light"))])
def test_report_pages_pass_accessibility_rules(page, run, tmp_path, write_run, width, scheme):
    """Pages that open offline: of a run, and of two beside each other. Each picture has its figures as text."""
    other = write_run(tmp_path / "other", [{}], evaluations={10: 2.0, 20: 1.0})
    for one in (run, other):
        one.add_event("start", step=0, ranks=1, sync="ddp")
    both = tmp_path / "both.html"
    both.write_text(
        compare_runs.comparison_page(compare_runs.compare_runs([run.path, other.path]), "both"), encoding="utf-8"
    )
    alone = tmp_path / "one.html"
    alone.write_text(run_page(run, now=0.0), encoding="utf-8")
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    for path in (alone, both):
        page.goto(path.as_uri())
        keeps_to_the_rules(page)
        assert page.locator(".chart:not(:has(.lanes))").count() == page.locator("table.figures caption").count() > 0


def keeps_to_the_rules(page: Page) -> None:
    """axe-core's, with all that can be opened; and it is as wide as the window."""
    for summary in page.locator("summary").all():
        if summary.is_visible():
            summary.click()
    found = Axe().run(page)
    assert found.violations_count == 0, f"{page.url} {page.viewport_size}: {found.generate_report()}"
    assert page.viewport_size is not None
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"], page.url


@exhaustive
def test_page_buttons_save_and_stop_run(page, corpus, tmp_path, watch):
    """A real one, of a worker that trains; nobody but the page follows it."""
    from evener.cli.main import app

    out = tmp_path / "trained"
    flags = [*flags_of(corpus, out), "--steps", "100000", "--batch", "4", "--detach"]
    app(["train", *flags], standalone_mode=False)
    try:
        one = Started.__new__(Started)
        one.dir = RunWriter(out)
        wait_until(lambda: one.dir.steps_path(0).exists() and len(one.dir.records(0)) > 3)
        page.goto(watch(str(out)).url)
        page.get_by_role("button", name="save now").click()
        wait_until(lambda: one.dir.last_saved_step() is not None)
        page.get_by_role("button", name="stop").click()
        page.get_by_role("button", name="let it run").click()
        page.get_by_role("button", name="stop").click()
        page.get_by_role("button", name="stop it").click()
        expect(page).to_have_title(re.compile("■ stopped"), timeout=3 * SOON_MS)
        expect(page.locator("#answer")).to_have_text(re.compile("run has ended|its step is finished"), timeout=SOON_MS)
    finally:
        app(["stop", str(out), "--now"], standalone_mode=False)
    manifest = one.dir.manifest()
    assert manifest.verdict == "stopped"
    assert one.dir.newest_checkpoint_step() == manifest.result.steps
    expect(page.locator("#actions")).to_be_hidden()
