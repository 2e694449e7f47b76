"""Poll the runs that open tabs show, and render the page fragments that changed.

One thread reads and renders, whatever the number of tabs, and only while a tab is open. Curves are slow to render:
their refresh interval keeps the cost to a small share of one core, so that training is not slowed.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from evener.core.rundir import RunDir
from evener.watch import pages
from evener.watch.compare import compare_pieces, overview_pieces
from evener.watch.pages import Pieces, Status
from evener.watch.reader import Reader

T = TypeVar("T")

LOOK_EVERY_S = 1.0
FIND_EVERY_S = 5.0
SAYS_EVERY_S = 5.0  # for text that changes with the clock alone: how long a run is silent
COST = 0.0012  # of one core, for each fragment group of a view
WORDS_EVERY_S = 0.9  # so that a step is shown within two seconds
MOST_S, MOST_MOMENT_S = 15.0, 300.0
MEANWHILE_S = 2.0  # between two renders while existing records are being read
BUDGET_S = 0.15  # of one read, while requests wait


@dataclass(frozen=True)
class View:
    """The page that a tab shows."""

    kind: str  # run, compare, overview
    keys: tuple[str, ...] = ()  # of runs
    axis: str = "step"


@dataclass
class _Drawn:
    """The fragments of a view as last rendered."""

    pieces: Pieces = field(default_factory=dict)
    made: dict[str, tuple[int, float]] = field(default_factory=dict)  # by group: (version, when the next render is due)


class Hub:
    """The watched runs, their readers, and the views that tabs subscribe to."""

    def __init__(
        self, find: Callable[[], Sequence[Path]], on_new: Callable[[Reader], None] = lambda reader: None
    ) -> None:
        """`find_runs` returns the current run directories whenever called; `on_new_run` is called once for each."""
        self._find, self._on_new = find, on_new
        self.readers: dict[str, Reader] = {}  # by key, in order
        self._keys: dict[Path, str] = {}
        self._drawn: dict[View, _Drawn] = {}
        self._views: dict[View, int] = {}  # number of tabs that show each
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evener-watch")
        self._found_at = -FIND_EVERY_S
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()
        self.is_closing = False

    # --- called from the server ---------------------------------------------------------------------------------------

    async def do(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work` in the one thread that touches readers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def run(self) -> None:
        """Poll the runs that open tabs show until the server shuts down."""
        while not self.is_closing:
            if not self._views:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            began = time.monotonic()
            try:
                is_more = await self.do(self._look_all, set(self._views))
            except Exception:  # a bug in one view must not stop the others
                traceback.print_exc()
                is_more = False
            self._tell()
            if not is_more:
                await asyncio.sleep(max(0.05, LOOK_EVERY_S - (time.monotonic() - began)))

    def close(self) -> None:
        """End all streams, so that the server can shut down."""
        self.is_closing = True
        self._wanted.set()
        self._tell()

    def end(self) -> None:
        """Save the caches of all readers and stop the thread, after the last request."""
        for reader in self.readers.values():
            self._thread.submit(reader.keep).result()
        self._thread.shutdown()

    @contextmanager
    def watched(self, view: View) -> Iterator[None]:
        """Count a tab as showing this view while the context is open."""
        self._views[view] = self._views.get(view, 0) + 1
        self._wanted.set()
        try:
            yield
        finally:
            self._views[view] -= 1
            if not self._views[view]:
                del self._views[view]
                self._drawn.pop(view, None)

    async def news(self, timeout_s: float) -> None:
        """Wait for the next update, at most `timeout_s`."""
        event = self._news
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return

    def is_seen(self, key: str) -> bool:
        """Return whether a tab shows the page of this run."""
        return any(view.kind == "run" and view.keys == (key,) for view in self._views)

    def is_drawn(self, view: View) -> bool:
        """Return whether the view has been rendered for a tab that shows it now."""
        return view in self._views and view in self._drawn

    def _tell(self) -> None:
        event, self._news = self._news, asyncio.Event()
        event.set()

    # --- in the one thread --------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Add readers for new runs, at most every DISCOVERY_INTERVAL_S."""
        if time.monotonic() - self._found_at < FIND_EVERY_S:
            return
        self._found_at = time.monotonic()
        for path in self._find():
            if path in self._keys:
                continue
            name = path.resolve().name or "run"
            key = next(key for key in (name, *(f"{name}-{i}" for i in range(2, 1000))) if key not in self.readers)
            self._keys[path], self.readers[key] = key, Reader(RunDir(path))
            self._on_new(self.readers[key])

    def look(self, view: View) -> bool:
        """Read what is new in a view's runs, within the budget. Return whether records remain unread."""
        self.find()
        return _read(self.shown(view).values())

    def shown(self, view: View) -> dict[str, Reader]:
        """Return the readers of a view by key."""
        if view.kind == "overview":
            return self.readers
        return {key: self.readers[key] for key in view.keys if key in self.readers}

    def status(self, view: View) -> Status:
        """Return the status of a view's tab, also visible while the tab is hidden."""
        now, shown = time.time(), self.shown(view)
        if view.kind == "run":
            (key,) = view.keys
            return pages.status(shown[key], key, now)
        return pages.status_of_all({key: pages.status(reader, key, now) for key, reader in shown.items()})

    def pieces(self, view: View) -> Pieces:
        """Return all fragments of a view, after rendering those that changed and are due."""
        cached, shown, now = self._drawn.setdefault(view, _Drawn()), self.shown(view), time.monotonic()
        version = sum(reader.version + 1 for reader in shown.values())
        for name, make in self._groups(view, shown).items():
            known, due = cached.made.get(name, (-1, 0.0))
            group_version = version
            if name == "events":  # the list is replaced when an event is added
                group_version = id(next(iter(shown.values())).events)
            elif name == "samples":
                group_version = len(next(iter(shown.values())).samples)
            elif name == "moment":
                group_version = next(iter(shown.values())).spans_version()
            is_clock_due = name == "words" and now > due + SAYS_EVERY_S
            if is_clock_due or (group_version != known and now >= due):
                began = time.thread_time()
                cached.pieces = cached.pieces | make()
                cached.made[name] = group_version, now + _rest_s(name, shown, time.thread_time() - began)
        return cached.pieces

    def _groups(self, view: View, shown: dict[str, Reader]) -> dict[str, Callable[[], Pieces]]:
        """Return the renderers of a view by fragment group; each group has its own refresh interval."""
        if view.kind == "overview":
            return {"words": lambda: overview_pieces(shown, time.time())}
        if view.kind == "compare":
            return {"plots": lambda: compare_pieces(shown, view.axis, time.time())}
        reader = shown[view.keys[0]]
        return {
            "words": lambda: pages.word_pieces(reader, time.time()),
            "events": lambda: pages.event_pieces(reader),
            "samples": lambda: pages.sample_pieces(reader),
            "moment": lambda: pages.moment_pieces(reader),
            "ranks": lambda: pages.rank_pieces(reader, time.time()),
            "plots": lambda: pages.plot_pieces(reader, view.axis),
        }

    def _look_all(self, views: set[View]) -> bool:
        self.find()
        is_more = _read(dict.fromkeys(reader for view in views for reader in self.shown(view).values()))
        for view in views:
            if view in self._views:
                self.pieces(view)
        return is_more


def _read(readers: Iterable[Reader]) -> bool:
    """Read what is new in all runs, within the budget. Return whether records remain unread."""
    until = time.monotonic() + BUDGET_S
    has_unread = [reader.look(until - time.monotonic()) for reader in readers]
    return any(has_unread)


def _rest_s(group: str, shown: dict[str, Reader], cost_s: float) -> float:
    """Return the seconds until a group that took `cost_s` to render may be rendered again."""
    if group == "words":
        return WORDS_EVERY_S
    if group == "moment":  # slow with many ranks
        return min(MOST_MOMENT_S, cost_s / COST)
    return MEANWHILE_S if any(reader.unread_bytes for reader in shown.values()) else min(MOST_S, cost_s / COST)
