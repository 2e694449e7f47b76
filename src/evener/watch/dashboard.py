"""Poll the runs that open tabs show, and render the page fragments that changed.

One thread reads and renders, whatever the number of tabs, and only while a tab is open. Curves are slow to render:
their refresh interval keeps the cost to a small share of one core, so that training is not slowed.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from evener.core.base.escaped_output import print_escaped
from evener.core.run.rundir import RunDir
from evener.watch import page_fragments
from evener.watch.multi_run import comparison_fragments, overview_fragments
from evener.watch.page_fragments import Fragments, TabStatus
from evener.watch.run_reader import RunReader

T = TypeVar("T")

POLL_INTERVAL_S = 1.0
DISCOVERY_INTERVAL_S = 5.0
CLOCK_REFRESH_S = 5.0  # for text that changes with the clock alone: how long a run is silent
RENDER_CPU_SHARE = 0.0012  # of one core, for each fragment group of a view
STATE_REFRESH_S = 0.9  # so that a step is shown within two seconds
MAX_REFRESH_S, MAX_GANTT_REFRESH_S = 15.0, 300.0
CATCH_UP_REFRESH_S = 2.0  # between two renders while existing records are being read
READ_BUDGET_S = 0.15  # of one read, while requests wait


@dataclass(frozen=True)
class PageView:
    """The page that a tab shows."""

    kind: str  # run, compare, overview
    keys: tuple[str, ...] = ()  # of runs
    axis: str = "step"


@dataclass
class _RenderedView:
    """The fragments of a view as last rendered."""

    fragments: Fragments = field(default_factory=dict)
    # by group: (version, when the next render is due)
    rendered: dict[str, tuple[int, float]] = field(default_factory=dict)


class Dashboard:
    """The watched runs, their readers, and the views that tabs subscribe to."""

    def __init__(
        self, find_runs: Callable[[], Sequence[Path]], on_new_run: Callable[[RunReader], None] = lambda reader: None
    ) -> None:
        """`find_runs` returns the current run directories whenever called; `on_new_run` is called once for each."""
        self._find_runs, self._on_new_run = find_runs, on_new_run
        self.readers: dict[str, RunReader] = {}  # by key, in order
        self._keys: dict[Path, str] = {}
        self._rendered: dict[PageView, _RenderedView] = {}
        self._subscribers: dict[PageView, int] = {}  # number of tabs that show each
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evener-watch")
        self._discovered_at = -DISCOVERY_INTERVAL_S
        self._updated = asyncio.Event()
        self._has_subscribers = asyncio.Event()
        self.is_closing = False

    # --- called from the server ---------------------------------------------------------------------------------------

    async def run_in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work` in the one thread that touches readers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def poll_forever(self) -> None:
        """Poll the runs that open tabs show until the server shuts down."""
        printed = ""
        while not self.is_closing:
            if not self._subscribers:
                self._has_subscribers.clear()
                await self._has_subscribers.wait()
                continue
            began = time.monotonic()
            try:
                is_more = await self.run_in_thread(self._poll_all, set(self._subscribers))
            except Exception:  # a bug in one view must not stop the others
                if printed != (text := traceback.format_exc()):  # else every second
                    printed = text
                    print_escaped(text, file=sys.stderr, flush=True)
                is_more = False
            self._notify()
            if not is_more:
                await asyncio.sleep(max(0.05, POLL_INTERVAL_S - (time.monotonic() - began)))

    def close_streams(self) -> None:
        """End all streams, so that the server can shut down."""
        self.is_closing = True
        self._has_subscribers.set()
        self._notify()

    def shutdown(self) -> None:
        """Save the caches of all readers and stop the thread, after the last request."""
        for reader in self.readers.values():
            self._thread.submit(reader.save_cache).result()
        self._thread.shutdown()

    @contextmanager
    def subscribe(self, view: PageView) -> Iterator[None]:
        """Count a tab as showing this view while the context is open."""
        self._subscribers[view] = self._subscribers.get(view, 0) + 1
        self._has_subscribers.set()
        try:
            yield
        finally:
            self._subscribers[view] -= 1
            if not self._subscribers[view]:
                del self._subscribers[view]
                self._rendered.pop(view, None)

    async def wait_for_update(self, timeout_s: float) -> None:
        """Wait for the next update, at most `timeout_s`."""
        event = self._updated
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return

    def has_run_subscriber(self, key: str) -> bool:
        """Return whether a tab shows the page of this run."""
        return any(view.kind == "run" and view.keys == (key,) for view in self._subscribers)

    def _notify(self) -> None:
        event, self._updated = self._updated, asyncio.Event()
        event.set()

    # --- in the one thread --------------------------------------------------------------------------------------------

    def discover_runs(self) -> None:
        """Add readers for new runs, at most every DISCOVERY_INTERVAL_S."""
        if time.monotonic() - self._discovered_at < DISCOVERY_INTERVAL_S:
            return
        self._discovered_at = time.monotonic()
        for path in self._find_runs():
            if path in self._keys:
                continue
            name = path.resolve().name or "run"
            key = next(key for key in (name, *(f"{name}-{i}" for i in range(2, 1000))) if key not in self.readers)
            self._keys[path], self.readers[key] = key, RunReader(RunDir(path))
            self._on_new_run(self.readers[key])

    def read_new(self, view: PageView) -> bool:
        """Read what is new in a view's runs, within the budget. Return whether records remain unread."""
        self.discover_runs()
        return _read_all(self.readers_of(view).values())

    def readers_of(self, view: PageView) -> dict[str, RunReader]:
        """Return the readers of a view by key."""
        if view.kind == "overview":
            return self.readers
        return {key: self.readers[key] for key in view.keys if key in self.readers}

    def status(self, view: PageView) -> TabStatus:
        """Return the status of a view's tab, also visible while the tab is hidden."""
        now, shown = time.time(), self.readers_of(view)
        if view.kind == "run":
            (key,) = view.keys
            return page_fragments.tab_status(shown[key], key, now)
        return page_fragments.combined_status(
            {key: page_fragments.tab_status(reader, key, now) for key, reader in shown.items()}
        )

    def render_fragments(self, view: PageView) -> Fragments:
        """Return all fragments of a view, after rendering those that changed and are due."""
        cached, shown, now = self._rendered.setdefault(view, _RenderedView()), self.readers_of(view), time.monotonic()
        version = sum(reader.version + 1 for reader in shown.values())
        for name, make in self._fragment_groups(view, shown).items():
            known, due = cached.rendered.get(name, (-1, 0.0))
            group_version = version
            if name == "events":  # the list is replaced when an event is added
                group_version = id(next(iter(shown.values())).events)
            elif name == "samples":
                group_version = len(next(iter(shown.values())).samples)
            elif name == "moment":
                group_version = next(iter(shown.values())).spans_version()
            is_clock_due = name == "words" and now > due + CLOCK_REFRESH_S
            if is_clock_due or (group_version != known and now >= due):
                began = time.thread_time()
                cached.fragments = cached.fragments | make()
                cached.rendered[name] = group_version, now + _refresh_delay_s(name, shown, time.thread_time() - began)
        return cached.fragments

    def _fragment_groups(self, view: PageView, shown: dict[str, RunReader]) -> dict[str, Callable[[], Fragments]]:
        """Return the renderers of a view by fragment group; each group has its own refresh interval."""
        if view.kind == "overview":
            return {"words": lambda: overview_fragments(shown, time.time())}
        if view.kind == "compare":
            return {"plots": lambda: comparison_fragments(shown, view.axis, time.time())}
        reader = shown[view.keys[0]]
        return {
            "words": lambda: page_fragments.state_fragments(reader, time.time()),
            "events": lambda: page_fragments.event_fragments(reader),
            "samples": lambda: page_fragments.sample_fragments(reader),
            "moment": lambda: page_fragments.gantt_fragments(reader),
            "ranks": lambda: page_fragments.rank_fragments(reader, time.time()),
            "plots": lambda: page_fragments.plot_fragments(reader, view.axis),
        }

    def _poll_all(self, views: set[PageView]) -> bool:
        self.discover_runs()
        is_more = _read_all(dict.fromkeys(reader for view in views for reader in self.readers_of(view).values()))
        for view in views:
            if view in self._subscribers:
                self.render_fragments(view)
        return is_more


def _read_all(readers: Iterable[RunReader]) -> bool:
    """Read what is new in all runs, within the budget. Return whether records remain unread."""
    until = time.monotonic() + READ_BUDGET_S
    has_unread = [reader.read_new(until - time.monotonic()) for reader in readers]
    return any(has_unread)


def _refresh_delay_s(group: str, shown: dict[str, RunReader], cost_s: float) -> float:
    """Return the seconds until a group that took `cost_s` to render may be rendered again."""
    if group == "words":
        return STATE_REFRESH_S
    if group == "moment":  # slow with many ranks
        return min(MAX_GANTT_REFRESH_S, cost_s / RENDER_CPU_SHARE)
    return (
        CATCH_UP_REFRESH_S
        if any(reader.unread_bytes for reader in shown.values())
        else min(MAX_REFRESH_S, cost_s / RENDER_CPU_SHARE)
    )
