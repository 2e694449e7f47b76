"""Tabs of a real Chromium, and the live page's server as a person starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from ..conftest import TIMEOUT_S, wait_until
from ..ranks import free_port

AWAY = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED")  # what a browser says itself of a server that is not there


@pytest.fixture
def context(browser: Browser, watch: object) -> Iterator[BrowserContext]:
    """A person's, with cookies of their own; what its pages complain of in the console fails the test. They are closed
    before the server is (`watch`), which would reset what they are asking.
    """
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(1000 * TIMEOUT_S)
    said: list[str] = []
    context.on("console", lambda one: said.append(one.text) if one.type in ("error", "warning") else None)
    context.on("weberror", lambda one: said.append(str(one.error)))
    yield context
    context.close()
    assert [text for text in said if not any(word in text for word in AWAY)] == []


@pytest.fixture
def page(context: BrowserContext) -> Page:
    """A tab."""
    return context.new_page()


class Watched:
    """`evener watch`, which can be ended and started again."""

    def __init__(self, folder: Path, args: list[str], port: int) -> None:
        self._folder, self._args, self.port = folder, args, port
        self.url = ""
        self.start()

    def start(self) -> None:
        """Return when it answers."""
        out = self._folder / "watch.out"
        out.write_bytes(b"")
        with out.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "evener", "watch", *self._args, "--port", str(self.port)],
                stdout=file, stderr=subprocess.STDOUT, cwd=self._folder,
            )  # fmt: skip
        wait_until(lambda: b"\n" in out.read_bytes() or self.process.poll() is not None, out.read_text)
        self.url = out.read_text().split("\n")[0]
        assert self.url.startswith("http://127.0.0.1:"), out.read_text()

    def stop(self, signum: int = signal.SIGINT) -> int:
        """As Ctrl-C does; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(TIMEOUT_S)

    def at(self, path: str) -> str:
        """The address of another page."""
        return f"http://127.0.0.1:{self.port}{path}"


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Start `evener watch` on these runs."""
    started: list[Watched] = []

    def watch(*args: str) -> Watched:
        started.append(Watched(tmp_path, list(args), free_port()))
        return started[-1]

    yield watch
    for one in started:
        one.stop(signal.SIGKILL)
