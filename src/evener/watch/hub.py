"""Who looks at which runs, and what must be read and drawn for them?

One thread reads and draws, whatever the number of tabs, and only while any is looked at. Curves take a while to draw:
they are drawn again as often as that costs next to nothing of a processor, so that the run does not notice.
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
SAYS_EVERY_S = 5.0  # what a clock changes, and no file: how long it is silent
COST = 0.0012  # of a processor, for each part of what is drawn of one view
WORDS_EVERY_S = 0.9  # a step is told within two seconds
MOST_S, MOST_MOMENT_S = 15.0, 300.0
MEANWHILE_S = 2.0  # between two drawings, while what is there is being read
BUDGET_S = 0.15  # of reading at a time, while others wait for an answer


@dataclass(frozen=True)
class View:
    """What a tab shows."""

    kind: str  # run, compare, overview
    keys: tuple[str, ...] = ()  # of runs
    axis: str = "step"


@dataclass
class _Drawn:
    """The pieces of a view as they were made last."""

    pieces: Pieces = field(default_factory=dict)
    made: dict[str, tuple[int, float]] = field(default_factory=dict)  # by group: of which version, when it is due


class Hub:
    """The runs that are watched."""

    def __init__(
        self, find: Callable[[], Sequence[Path]], on_new: Callable[[Reader], None] = lambda reader: None
    ) -> None:
        """`find` says which runs there are, now and later; `on_new` is called once for each."""
        self._find, self._on_new = find, on_new
        self.readers: dict[str, Reader] = {}  # by key, in order
        self._keys: dict[Path, str] = {}
        self._drawn: dict[View, _Drawn] = {}
        self._views: dict[View, int] = {}  # how many tabs look at each
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evener-watch")
        self._found_at = -FIND_EVERY_S
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()
        self.is_closing = False

    # --- called from the server ---------------------------------------------------------------------------------------

    async def do(self, work: Callable[..., T], *arguments: object) -> T:
        """In the one thread that touches readers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def run(self) -> None:
        """Read while anybody looks, until the server ends."""
        while not self.is_closing:
            if not self._views:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            began = time.monotonic()
            try:
                is_more = await self.do(self._look_all, set(self._views))
            except Exception:  # a bug, of one view: the others go on
                traceback.print_exc()
                is_more = False
            self._tell()
            if not is_more:
                await asyncio.sleep(max(0.05, LOOK_EVERY_S - (time.monotonic() - began)))

    def close(self) -> None:
        """Streams end, and with them the server."""
        self.is_closing = True
        self._wanted.set()
        self._tell()

    def end(self) -> None:
        """Keep what was read; nobody asks any more."""
        for reader in self.readers.values():
            self._thread.submit(reader.keep).result()
        self._thread.shutdown()

    @contextmanager
    def watched(self, view: View) -> Iterator[None]:
        """A tab looks at this."""
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
        """Return when something may be new."""
        event = self._news
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return

    def is_seen(self, key: str) -> bool:
        """Does any tab show this run alone?"""
        return any(view.kind == "run" and view.keys == (key,) for view in self._views)

    def is_drawn(self, view: View) -> bool:
        """Was anything of it made for a tab that looks at it now?"""
        return view in self._views and view in self._drawn

    def _tell(self) -> None:
        event, self._news = self._news, asyncio.Event()
        event.set()

    # --- in the one thread --------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Take up runs that are new."""
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
        """Read what a view shows, for a moment; is there more?"""
        self.find()
        return _read(self.shown(view).values())

    def shown(self, view: View) -> dict[str, Reader]:
        """Its readers by key."""
        if view.kind == "overview":
            return self.readers
        return {key: self.readers[key] for key in view.keys if key in self.readers}

    def status(self, view: View) -> Status:
        """What a tab that nobody sees tells."""
        now, shown = time.time(), self.shown(view)
        if view.kind == "run":
            (key,) = view.keys
            return pages.status(shown[key], key, now)
        return pages.status_of_all({key: pages.status(reader, key, now) for key, reader in shown.items()})

    def pieces(self, view: View) -> Pieces:
        """All of a view, as far as it is due made anew."""
        drawn, shown, now = self._drawn.setdefault(view, _Drawn()), self.shown(view), time.monotonic()
        version = sum(reader.version + 1 for reader in shown.values())
        for name, make in self._groups(view, shown).items():
            known, due = drawn.made.get(name, (-1, 0.0))
            of_group = version
            if name == "events":  # a list is another one when there is another event
                of_group = id(next(iter(shown.values())).events)
            elif name == "samples":
                of_group = len(next(iter(shown.values())).samples)
            elif name == "moment":
                of_group = next(iter(shown.values())).spans_version()
            says = name == "words" and now > due + SAYS_EVERY_S
            if says or (of_group != known and now >= due):
                began = time.thread_time()
                drawn.pieces = drawn.pieces | make()
                drawn.made[name] = of_group, now + _rest_s(name, shown, time.thread_time() - began)
        return drawn.pieces

    def _groups(self, view: View, shown: dict[str, Reader]) -> dict[str, Callable[[], Pieces]]:
        """What is drawn of a view, each part as often as it costs little."""
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
    """What is new of all, of many records as much as there is time for; is there more?"""
    until = time.monotonic() + BUDGET_S
    left = [reader.look(until - time.monotonic()) for reader in readers]
    return any(left)


def _rest_s(group: str, shown: dict[str, Reader], cost_s: float) -> float:
    """Until a part of a view that took so long to draw may be drawn again."""
    if group == "words":
        return WORDS_EVERY_S
    if group == "moment":  # of many ranks it takes a while
        return min(MOST_MOMENT_S, cost_s / COST)
    return MEANWHILE_S if any(reader.unread_bytes for reader in shown.values()) else min(MOST_S, cost_s / COST)
