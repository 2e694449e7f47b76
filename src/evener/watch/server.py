"""How do a browser's questions reach the hub? Pages, one stream a tab, and what can be asked of a run.

    GET  /                       all runs, or the one that there is
    GET  /runs/KEY               one
    GET  /compare?run=KEY&run=…  some
    GET  /stream?page=PATH&…     server-sent events: what changed of such a page
    GET  /status?page=PATH&…     how its runs are, in a line
    POST /runs/KEY/stop, /save, /sample   passed to whoever can
    GET  /metrics                for Prometheus

A KEY is looked up among the runs: nothing of a request ever becomes a path.
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
ANSWER_S = 2.0  # what takes longer goes on behind the answer
SAMPLES_EVERY_S = 0.5  # looks for a newer checkpoint
MEANWHILE = {**dict.fromkeys(("stop", "save"), "asked: its step is finished first"), "sample": "it begins to write"}
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class Actions:
    """What can be done to a run, each with what says whether it can; what is done says what came of it."""

    stop: Callable[[Reader], str] = lambda reader: ""
    save: Callable[[Reader], str] = lambda reader: ""
    can_ask: Callable[[Reader], bool] = lambda reader: False  # for either
    sample: Callable[[Reader], str] = lambda reader: ""
    can_sample: Callable[[Reader], bool] = lambda reader: False


def assets() -> dict[str, str]:
    """All files that are served, by name."""
    folder = importlib.resources.files("evener.watch") / "templates"
    names = [one.name for one in folder.iterdir() if one.name.rpartition(".")[2] in TYPES]
    own = {name: (folder / name).read_text(encoding="utf-8") for name in names}
    return own | {name: page_file(name) for name in ("page.css", "page.js")}


class Server:
    """What answers."""

    def __init__(self, hub: Hub, actions: Actions, *, samples_every_s: float = SAMPLES_EVERY_S) -> None:
        self._hub, self._actions, self._assets = hub, actions, assets()
        self._samples_every_s = samples_every_s
        text = "".join(f"{name}\0{content}\0" for name, content in sorted(self._assets.items()))
        self._version = f"{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self._acting: dict[tuple[str, str], Future[str]] = {}
        self._writing: set[str] = set()  # runs whose model writes after every checkpoint

    def app(self) -> Starlette:
        """Without what keeps others out: see guard.py."""
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
            task.cancel()  # either may sleep for a second, which whoever presses Ctrl-C would wait for
        await asyncio.gather(*tasks, return_exceptions=True)
        self._hub.end()

    # --- pages --------------------------------------------------------------------------------------------------------

    async def home(self, request: Request) -> Response:
        """All runs; the only one, where there is only one."""
        shown = View("overview")
        await self._hub.do(self._hub.look, shown)
        if len(self._hub.readers) == 1:
            return RedirectResponse(f"/runs/{quote(next(iter(self._hub.readers)), safe='')}", 303)
        found, pieces = await self._hub.do(lambda: (self._hub.status(shown), self._hub.pieces(shown)))
        return HTMLResponse(pages.list_page(found, pieces, assets=self._version))

    async def one(self, request: Request) -> Response:
        """A run."""
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
        """Some runs."""
        shown = self._view(request, "/compare")
        if shown is None:
            return _none()

        def draw() -> str:
            self._hub.look(shown)
            return pages.compare_page(self._hub.status(shown), shown.keys, self._hub.pieces(shown), axis=shown.axis,
                                      assets=self._version)  # fmt: skip

        return HTMLResponse(await self._hub.do(draw))

    async def asset(self, request: Request) -> Response:
        """A file of ours."""
        name = request.path_params["name"]
        content = self._assets.get(name)
        return _none() if content is None else Response(content, media_type=TYPES[name.rpartition(".")[2]])

    # --- what goes on -------------------------------------------------------------------------------------------------

    async def stream(self, request: Request) -> Response:
        """What changes of a page, as long as it is seen."""
        shown = self._view(request, request.query_params.get("page", ""))
        if shown is None:
            return _none()
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._events(shown), media_type="text/event-stream", headers=headers)

    async def _events(self, shown: View) -> AsyncIterator[bytes]:
        sent: pages.Pieces = {}
        before, silent_s = "", 0.0
        with self._hub.watched(shown):
            yield b"retry: 1000\n\n"
            while not self._hub.is_closing:
                found, pieces = await self._hub.do(lambda: (self._hub.status(shown), self._hub.pieces(shown)))
                new = {name: html for name, html in pieces.items() if sent.get(name) != html}
                told = asdict(found) | {"assets": self._version}
                if new or json.dumps(told) != before:
                    before, sent, silent_s = json.dumps(told), sent | new, 0.0
                    yield b"data: " + json.dumps(told | {"pieces": new}).encode() + b"\n\n"
                else:
                    silent_s += 1
                    if silent_s >= ALIVE_S:
                        silent_s = 0.0
                        yield b"event: alive\ndata:\n\n"
                await self._hub.news(1.0)

    async def status(self, request: Request) -> Response:
        """How the runs of a page are."""
        shown = self._view(request, request.query_params.get("page", ""))
        if shown is None:
            return _none()
        await self._hub.do(self._hub.look, shown)
        return JSONResponse(asdict(await self._hub.do(self._hub.status, shown)))

    async def metrics(self, request: Request) -> Response:
        """Of all runs."""
        await self._hub.do(self._hub.look, View("overview"))
        text = await self._hub.do(lambda: exposition(self._hub.readers))
        return Response(text, media_type=CONTENT_TYPE)

    # --- what is asked of a run ---------------------------------------------------------------------------------------

    async def act(self, request: Request) -> Response:
        """Stop it, save it, or let it write."""
        key, what = request.path_params["key"], request.path_params["what"]
        known = {"stop": (self._actions.can_ask, self._actions.stop),
                 "save": (self._actions.can_ask, self._actions.save),
                 "sample": (self._actions.can_sample, self._actions.sample)}  # fmt: skip
        reader = self._hub.readers.get(key)
        if what not in known or reader is None or not known[what][0](reader):
            return _none()
        answer = self._act(key, what, known[what][1])
        if what == "sample":
            self._writing.add(key)
        try:
            told = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(answer)), ANSWER_S)
            return JSONResponse({"told": told})
        except TimeoutError:
            return JSONResponse({"told": MEANWHILE[what]}, 202)
        except EvenerError as error:
            return JSONResponse({"told": f"{error}{'; ' if error.hint else ''}{error.hint}"}, 409)

    def _act(self, key: str, what: str, do: Callable[[Reader], str]) -> Future[str]:
        """Begin it, or wait with whoever asked for the same before."""
        answer = self._acting.get((key, what))
        if answer is None or answer.done():
            answer = self._acting[key, what] = _in_background(do, self._hub.readers[key])
        return answer

    async def _write_on(self) -> None:
        """Whoever was asked to write once does so again after each checkpoint, as long as somebody looks; not where it
        failed, until it is asked again.
        """
        while not self._hub.is_closing:
            for key in tuple(self._writing):
                before = self._acting.get((key, "sample"))
                if before is not None and before.done() and before.exception() is not None:
                    self._writing.discard(key)
                elif self._hub.is_seen(key) and await self._hub.do(self._hub.readers[key].has_not_written):
                    self._act(key, "sample", self._actions.sample)
            await asyncio.sleep(self._samples_every_s)

    def _view(self, request: Request, page: str) -> View | None:
        """What a page shows; None where there is no such page or run."""
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
    """In a thread that does not keep the server from ending: to stop a run takes as long as its step."""
    answer: Future[str] = Future()

    def work() -> None:
        try:
            answer.set_result(do(reader))
        except BaseException as error:  # whoever asked is told
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def _none() -> Response:
    return PlainTextResponse("no such page\n", 404)
