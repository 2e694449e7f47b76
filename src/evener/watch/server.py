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

from evener.core.errors import EvenerError
from evener.core.version import __version__
from evener.report.markup import page_file
from evener.watch import pages, view
from evener.watch.hub import Hub, View
from evener.watch.metrics import CONTENT_TYPE, exposition
from evener.watch.reader import Reader

ALIVE_S = 15.0
ANSWER_S = 2.0  # a longer action continues after the response
SAMPLES_EVERY_S = 0.5  # interval between checks for a newer checkpoint
MEANWHILE = {
    **dict.fromkeys(("stop", "save"), "requested: the run finishes its current step first"),
    "sample": "generating a sample",
}
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class Actions:
    """The actions on a run, each with a check whether it is possible; an action returns a message about its result."""

    stop: Callable[[Reader], str] = lambda reader: ""
    save: Callable[[Reader], str] = lambda reader: ""
    can_ask: Callable[[Reader], bool] = lambda reader: False  # stop or save
    sample: Callable[[Reader], str] = lambda reader: ""
    can_sample: Callable[[Reader], bool] = lambda reader: False


def assets() -> dict[str, str]:
    """Return all static files by name."""
    folder = importlib.resources.files("evener.watch") / "templates"
    names = [file.name for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES]
    files = {name: (folder / name).read_text(encoding="utf-8") for name in names}
    return files | {name: page_file(name) for name in ("page.css", "page.js")}


class Server:
    """The request handlers of the dashboard."""

    def __init__(self, hub: Hub, actions: Actions, *, samples_every_s: float = SAMPLES_EVERY_S) -> None:
        self._hub, self._actions, self._assets = hub, actions, assets()
        self._samples_every_s = samples_every_s
        text = "".join(f"{name}\0{content}\0" for name, content in sorted(self._assets.items()))
        self._version = f"{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self._acting: dict[tuple[str, str], Future[str]] = {}
        self._writing: set[str] = set()  # keys of the runs that are sampled after every checkpoint

    def app(self) -> Starlette:
        """Return the application, without authentication: see auth.py."""
        app = Starlette(
            routes=[
                Route("/", self.home),
                Route("/runs/{key}", self.one),
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
        await self._hub.do(self._hub.find)
        tasks = asyncio.create_task(self._hub.run()), asyncio.create_task(self._write_on())
        yield
        self._hub.close()
        for task in tasks:
            task.cancel()  # either may be asleep for a second, which would delay Ctrl-C
        await asyncio.gather(*tasks, return_exceptions=True)
        self._hub.end()

    # --- pages --------------------------------------------------------------------------------------------------------

    async def home(self, request: Request) -> Response:
        """Serve the overview, or redirect to the run if there is only one."""
        shown = View("overview")
        await self._hub.do(self._hub.look, shown)
        if len(self._hub.readers) == 1:
            return RedirectResponse(f"/runs/{quote(next(iter(self._hub.readers)), safe='')}", 303)
        status, pieces = await self._hub.do(lambda: (self._hub.status(shown), self._hub.pieces(shown)))
        return HTMLResponse(pages.list_page(status, pieces, assets=self._version))

    async def one(self, request: Request) -> Response:
        """Serve the page of one run."""
        shown = self._view(request, request.url.path)
        if shown is None:
            return _none()
        (key,) = shown.keys

        def draw() -> str:
            self._hub.look(shown)
            reader = self._hub.readers[key]
            return pages.run_page(
                reader, key, axis=shown.axis, links={} if len(self._hub.readers) == 1 else {"all runs": "/"},
                can_ask=self._actions.can_ask(reader),
                can_sample=self._actions.can_sample(reader), assets=self._version,
            )  # fmt: skip

        return HTMLResponse(await self._hub.do(draw))

    async def compare(self, request: Request) -> Response:
        """Serve the comparison of several runs."""
        shown = self._view(request, "/compare")
        if shown is None:
            return _none()

        def draw() -> str:
            self._hub.look(shown)
            return pages.compare_page(self._hub.status(shown), shown.keys, self._hub.pieces(shown), axis=shown.axis,
                                      assets=self._version)  # fmt: skip

        return HTMLResponse(await self._hub.do(draw))

    async def asset(self, request: Request) -> Response:
        """Serve a static file."""
        name = request.path_params["name"]
        content = self._assets.get(name)
        return _none() if content is None else Response(content, media_type=TYPES[name.rpartition(".")[2]])

    # --- updates ------------------------------------------------------------------------------------------------------

    async def stream(self, request: Request) -> Response:
        """Stream the changes of a page as server-sent events while its tab is open."""
        shown = self._view(request, request.query_params.get("page", ""))
        if shown is None:
            return _none()
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._events(shown), media_type="text/event-stream", headers=headers)

    async def _events(self, shown: View) -> AsyncIterator[bytes]:
        sent: pages.Pieces = {}
        previous, silent_s = "", 0.0
        with self._hub.watched(shown):
            yield b"retry: 1000\n\n"
            while not self._hub.is_closing:
                status, pieces = await self._hub.do(lambda: (self._hub.status(shown), self._hub.pieces(shown)))
                new = {name: html for name, html in pieces.items() if sent.get(name) != html}
                message = asdict(status) | {"assets": self._version}
                if new or json.dumps(message) != previous:
                    previous, sent, silent_s = json.dumps(message), sent | new, 0.0
                    yield b"data: " + json.dumps(message | {"pieces": new}).encode() + b"\n\n"
                else:
                    silent_s += 1
                    if silent_s >= ALIVE_S:
                        silent_s = 0.0
                        yield b"event: alive\ndata:\n\n"
                await self._hub.news(1.0)

    async def status(self, request: Request) -> Response:
        """Serve the state of a page's runs as JSON."""
        shown = self._view(request, request.query_params.get("page", ""))
        if shown is None:
            return _none()
        await self._hub.do(self._hub.look, shown)
        return JSONResponse(asdict(await self._hub.do(self._hub.status, shown)))

    async def metrics(self, request: Request) -> Response:
        """Serve the metrics of all runs to Prometheus."""
        await self._hub.do(self._hub.look, View("overview"))
        text = await self._hub.do(lambda: exposition(self._hub.readers))
        return Response(text, media_type=CONTENT_TYPE)

    # --- actions ------------------------------------------------------------------------------------------------------

    async def act(self, request: Request) -> Response:
        """Stop a run, save a checkpoint or generate a sample; future 202 if that takes longer than ACTION_TIMEOUT_S."""
        key, what = request.path_params["key"], request.path_params["what"]
        known = {"stop": (self._actions.can_ask, self._actions.stop),
                 "save": (self._actions.can_ask, self._actions.save),
                 "sample": (self._actions.can_sample, self._actions.sample)}  # fmt: skip
        reader = self._hub.readers.get(key)
        if what not in known or reader is None or not known[what][0](reader):
            return _none()
        future = self._act(key, what, known[what][1])
        if what == "sample":
            self._writing.add(key)
        try:
            message = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), ANSWER_S)
            return JSONResponse({"told": message})
        except TimeoutError:
            return JSONResponse({"told": MEANWHILE[what]}, 202)
        except EvenerError as error:
            return JSONResponse({"told": f"{error}{'; ' if error.hint else ''}{error.hint}"}, 409)

    def _act(self, key: str, what: str, do: Callable[[Reader], str]) -> Future[str]:
        """Start an action, or return the future of the same one if it is still running."""
        future = self._acting.get((key, what))
        if future is None or future.done():
            future = self._acting[key, what] = _in_background(do, self._hub.readers[key])
        return future

    async def _write_on(self) -> None:
        """Sample each run that was sampled once again after every checkpoint, while a tab shows it. After a failure,
        stop until the next request.
        """
        while not self._hub.is_closing:
            for key in tuple(self._writing):
                previous = self._acting.get((key, "sample"))
                if previous is not None and previous.done() and previous.exception() is not None:
                    self._writing.discard(key)
                elif self._hub.is_seen(key) and await self._hub.do(self._hub.readers[key].has_not_written):
                    self._act(key, "sample", self._actions.sample)
            await asyncio.sleep(self._samples_every_s)

    def _view(self, request: Request, page: str) -> View | None:
        """Return the view of a page; None if there is no such page or run."""
        axis = request.query_params.get("axis", "step")
        axis = axis if axis in view.AXES else "step"
        kind, _, key = page.removeprefix("/").partition("/")
        if kind == "runs":
            key = unquote(key)
            return View("run", (key,), axis) if key in self._hub.readers else None
        if page == "/compare":
            keys = tuple(key for key in dict.fromkeys(request.query_params.getlist("run")) if key in self._hub.readers)
            return View("compare", keys, axis) if keys else None
        return View("overview") if page == "/" else None


def _in_background(do: Callable[[Reader], str], reader: Reader) -> Future[str]:
    """Run an action in a daemon thread, so that it does not delay shutdown: to stop a run takes as long as its step."""
    future: Future[str] = Future()

    def work() -> None:
        try:
            future.set_result(do(reader))
        except BaseException as error:  # raised again for the caller
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _none() -> Response:
    return PlainTextResponse("no such page\n", 404)
