"""HTTP application of the dashboard: pages, one event stream per tab, and actions on runs.

    GET  /                       all runs, or a redirect if there is only one
    GET  /runs/KEY               one run
    GET  /compare?run=KEY&run=…  several runs
    GET  /stream?page=PATH&…     server-sent events: the changed fragments of that page
    GET  /status?page=PATH&…     the state of its runs, in one line
    POST /runs/KEY/stop, /save, /sample   passed to `RunActions`
    GET  /metrics                for Prometheus

A KEY is looked up among the known runs: no part of a request ever becomes a path.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.resources
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from evener.core.base.errors import EvenerError, NoRoomError
from evener.core.base.version import __version__
from evener.report.draw.run_charts import CURVE_AXES
from evener.report.pages.html_template import read_asset
from evener.watch import page_fragments
from evener.watch.dashboard import Dashboard, PageView
from evener.watch.prometheus import CONTENT_TYPE, exposition_text
from evener.watch.run_reader import RunReader

KEEPALIVE_S = 15.0
ACTION_TIMEOUT_S = 2.0  # a longer action continues after the response
SAMPLE_POLL_S = 0.5  # interval between checks for a newer checkpoint
PENDING_MESSAGES = {
    **dict.fromkeys(("stop", "save"), "requested: the run finishes its current step first"),
    "sample": "generating a sample",
}
MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class RunActions:
    """The actions on a run, each with a check whether it is possible; an action returns a message about its result."""

    stop: Callable[[RunReader], str] = lambda reader: ""
    save: Callable[[RunReader], str] = lambda reader: ""
    can_control: Callable[[RunReader], bool] = lambda reader: False  # stop or save
    sample: Callable[[RunReader], str] = lambda reader: ""
    can_sample: Callable[[RunReader], bool] = lambda reader: False


def load_assets() -> dict[str, str]:
    """Return all static files by name."""
    folder = importlib.resources.files("evener.watch") / "templates"
    names = [file.name for file in folder.iterdir() if file.name.rpartition(".")[2] in MEDIA_TYPES]
    files = {name: (folder / name).read_text(encoding="utf-8") for name in names}
    return files | {name: read_asset(name) for name in ("page.css", "page.js")}


class DashboardApp:
    """The request handlers of the dashboard."""

    def __init__(self, hub: Dashboard, actions: RunActions, *, samples_every_s: float = SAMPLE_POLL_S) -> None:
        self._hub, self._actions, self._assets = hub, actions, load_assets()
        self._samples_every_s = samples_every_s
        text = "".join(f"{name}\0{content}\0" for name, content in sorted(self._assets.items()))
        self._version = f"{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self._pending_actions: dict[tuple[str, str], Future[str]] = {}
        self._sampling_runs: set[str] = set()  # keys of the runs that are sampled after every checkpoint

    def build(self) -> Starlette:
        """Return the application, without authentication: see auth.py."""
        app = Starlette(
            routes=[
                Route("/", self.home),
                Route("/runs/{key}", self.run_page),
                Route("/runs/{key}/{what}", self.act, methods=["POST"]),
                Route("/compare", self.compare),
                Route("/stream", self.stream),
                Route("/status", self.status),
                Route("/metrics", self.metrics),
                Route("/static/{name}", self.asset),
            ],
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._hub.run_in_thread(self._hub.discover_runs)
        tasks = asyncio.create_task(self._hub.poll_forever()), asyncio.create_task(self._sample_after_checkpoints())
        yield
        self._hub.close_streams()
        for task in tasks:
            task.cancel()  # either may be asleep for a second, which would delay Ctrl-C
        await asyncio.gather(*tasks, return_exceptions=True)
        self._hub.shutdown()

    # --- pages --------------------------------------------------------------------------------------------------------

    async def home(self, request: Request) -> Response:
        """Serve the overview, or redirect to the run if there is only one."""
        shown = PageView("overview")
        await self._hub.run_in_thread(self._hub.read_new, shown)
        if len(self._hub.readers) == 1:
            return RedirectResponse(f"/runs/{quote(next(iter(self._hub.readers)), safe='')}", 303)
        status, pieces = await self._hub.run_in_thread(
            lambda: (self._hub.status(shown), self._hub.render_fragments(shown))
        )
        return HTMLResponse(page_fragments.overview_page(status, pieces, assets=self._version))

    async def run_page(self, request: Request) -> Response:
        """Serve the page of one run."""
        shown = self._parse_view(request, request.url.path)
        if shown is None:
            return _not_found()
        (key,) = shown.keys

        def draw() -> str:
            self._hub.read_new(shown)
            reader = self._hub.readers[key]
            return page_fragments.run_page(
                reader, key, axis=shown.axis, links={} if len(self._hub.readers) == 1 else {"all runs": "/"},
                can_control=self._actions.can_control(reader),
                can_sample=self._actions.can_sample(reader), assets=self._version,
            )  # fmt: skip

        return HTMLResponse(await self._hub.run_in_thread(draw))

    async def compare(self, request: Request) -> Response:
        """Serve the comparison of several runs."""
        shown = self._parse_view(request, "/compare")
        if shown is None:
            return _not_found()

        def draw() -> str:
            self._hub.read_new(shown)
            return page_fragments.comparison_page(
                self._hub.status(shown),
                shown.keys,
                self._hub.render_fragments(shown),
                axis=shown.axis,
                assets=self._version,
            )

        return HTMLResponse(await self._hub.run_in_thread(draw))

    async def asset(self, request: Request) -> Response:
        """Serve a static file."""
        name = request.path_params["name"]
        content = self._assets.get(name)
        return _not_found() if content is None else Response(content, media_type=MEDIA_TYPES[name.rpartition(".")[2]])

    # --- updates ------------------------------------------------------------------------------------------------------

    async def stream(self, request: Request) -> Response:
        """Stream the changes of a page as server-sent events while its tab is open."""
        shown = self._parse_view(request, request.query_params.get("page", ""))
        if shown is None:
            return _not_found()
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._event_stream(shown), media_type="text/event-stream", headers=headers)

    async def _event_stream(self, shown: PageView) -> AsyncIterator[bytes]:
        sent: page_fragments.Fragments = {}
        previous, silent_s = "", 0.0
        with self._hub.subscribe(shown):
            yield b"retry: 1000\n\n"
            while not self._hub.is_closing:
                status, pieces = await self._hub.run_in_thread(
                    lambda: (self._hub.status(shown), self._hub.render_fragments(shown))
                )
                new = {name: html for name, html in pieces.items() if sent.get(name) != html}
                message = asdict(status) | {"assets": self._version}
                if new or json.dumps(message) != previous:
                    previous, sent, silent_s = json.dumps(message), sent | new, 0.0
                    yield b"data: " + json.dumps(message | {"pieces": new}).encode() + b"\n\n"
                else:
                    silent_s += 1
                    if silent_s >= KEEPALIVE_S:
                        silent_s = 0.0
                        yield b"event: alive\ndata:\n\n"
                await self._hub.wait_for_update(1.0)

    async def status(self, request: Request) -> Response:
        """Serve the state of a page's runs as JSON."""
        shown = self._parse_view(request, request.query_params.get("page", ""))
        if shown is None:
            return _not_found()
        await self._hub.run_in_thread(self._hub.read_new, shown)
        return JSONResponse(asdict(await self._hub.run_in_thread(self._hub.status, shown)))

    async def metrics(self, request: Request) -> Response:
        """Serve the metrics of all runs to Prometheus."""
        await self._hub.run_in_thread(self._hub.read_new, PageView("overview"))
        text = await self._hub.run_in_thread(lambda: exposition_text(self._hub.readers))
        return Response(text, media_type=CONTENT_TYPE)

    # --- actions ------------------------------------------------------------------------------------------------------

    async def act(self, request: Request) -> Response:
        """Stop a run, save a checkpoint or generate a sample; answer 202 if that takes longer than ACTION_TIMEOUT_S."""
        key, what = request.path_params["key"], request.path_params["what"]
        known = {"stop": (self._actions.can_control, self._actions.stop),
                 "save": (self._actions.can_control, self._actions.save),
                 "sample": (self._actions.can_sample, self._actions.sample)}  # fmt: skip
        reader = self._hub.readers.get(key)
        if what not in known or reader is None or not known[what][0](reader):
            return _not_found()
        future = self._start_action(key, what, known[what][1])
        if what == "sample":
            self._sampling_runs.add(key)
        try:
            message = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), ACTION_TIMEOUT_S)
            return JSONResponse({"message": message})
        except TimeoutError:
            return JSONResponse({"message": PENDING_MESSAGES[what]}, 202)
        except EvenerError as error:
            return JSONResponse({"message": f"{error}{'; ' if error.hint else ''}{error.hint}"}, 409)
        except OSError as error:
            if (full := NoRoomError.from_os_error(error)) is None:
                raise
            return JSONResponse({"message": str(full)}, 409)

    def _start_action(self, key: str, what: str, action: Callable[[RunReader], str]) -> Future[str]:
        """Start an action, or return the future of the same one if it is still running."""
        future = self._pending_actions.get((key, what))
        if future is None or future.done():
            future = self._pending_actions[key, what] = _run_in_background(action, self._hub.readers[key])
        return future

    async def _sample_after_checkpoints(self) -> None:
        """After every checkpoint, sample each run that was sampled before, while a tab shows it. After a failure, stop
        until the next request.
        """
        while not self._hub.is_closing:
            for key in tuple(self._sampling_runs):
                previous = self._pending_actions.get((key, "sample"))
                if previous is not None and previous.done() and previous.exception() is not None:
                    self._sampling_runs.discard(key)
                elif (
                    self._hub.has_run_subscriber(key)
                    and await self._hub.run_in_thread(self._hub.readers[key].needs_sample)
                    and self._hub.has_run_subscriber(key)  # the tab may have been closed meanwhile
                ):
                    self._start_action(key, "sample", self._actions.sample)
            await asyncio.sleep(self._samples_every_s)

    def _parse_view(self, request: Request, page: str) -> PageView | None:
        """Return the view of a page; None if there is no such page or run."""
        axis = request.query_params.get("axis", "step")
        axis = axis if axis in CURVE_AXES else "step"
        kind, _, key = page.removeprefix("/").partition("/")
        if kind == "runs":
            key = unquote(key)
            return PageView("run", (key,), axis) if key in self._hub.readers else None
        if page == "/compare":
            keys = tuple(key for key in dict.fromkeys(request.query_params.getlist("run")) if key in self._hub.readers)
            return PageView("compare", keys, axis) if keys else None
        return PageView("overview") if page == "/" else None


def _run_in_background(action: Callable[[RunReader], str], reader: RunReader) -> Future[str]:
    """Run an action in a daemon thread, so that it does not delay shutdown: to stop a run takes as long as its step."""
    future: Future[str] = Future()

    def work() -> None:
        try:
            future.set_result(action(reader))
        except BaseException as error:  # raised again for the caller
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _not_found() -> Response:
    return PlainTextResponse("no such page\n", 404)
