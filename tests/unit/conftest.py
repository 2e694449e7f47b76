"""Tests of this folder are pure: no other Python is started and no connection opened, so that `make check` is quick."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_test = ""  # the one that runs; audit hooks cannot be removed


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    is_python = event == "subprocess.Popen" and Path(str(arguments[1][0])).name.startswith(("python", "evener"))
    is_connection = event in ("socket.bind", "socket.connect") and isinstance(arguments[1], tuple)
    if _test and (is_python or is_connection or event == "os.fork"):
        raise AssertionError(f"{_test}: {event} {arguments}: this test belongs in tests/integration")


sys.addaudithook(_refuse)


@pytest.fixture(autouse=True)
def _is_pure(request: pytest.FixtureRequest) -> Iterator[None]:
    global _test
    _test = request.node.name
    yield
    _test = ""
