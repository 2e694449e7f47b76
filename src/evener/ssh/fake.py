"""A session with a host that is this process, for tests and simulations."""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from evener.ssh.session import CALL_TIMEOUT_S, RemoteError, Session


class FakeSession(Session):
    """A host whose functions run in this process, or give the replies that are set for them.

    >>> session = FakeSession("attic", {"facts.read_nft_table": lambda table: {"has_nft": table == "evener"}})
    >>> session.call("facts", "read_nft_table", table="evener"), session.calls
    ({'has_nft': True}, ['facts.read_nft_table'])
    """

    def __init__(self, name: str, replies: Mapping[str, Callable[..., Any]] | None = None) -> None:
        """Answer a call of "module.function" by the function of that name in `replies`, else by the module's own."""
        self.name, self.python, self.calls = name, "3.8", list[str]()
        self._functions = replies or {}

    def stream(
        self, module: str, function: str, *, body: bytes = b"", timeout_s: float | None = CALL_TIMEOUT_S, **args: Any
    ) -> Iterator[Any]:
        self.calls.append(f"{module}.{function}")
        do = self._functions.get(self.calls[-1])
        do = do or getattr(importlib.import_module(f"evener.node.remote.{module}"), function)
        try:
            value = do(**json.loads(json.dumps(args)), **({"body": body} if body else {}))
            for item in value if isinstance(value, Iterator) else [value]:
                yield item if isinstance(item, bytes) else json.loads(json.dumps(item))
        except Exception as error:
            raise RemoteError(self.name, str(error), type(error).__name__, traceback.format_exc()) from None

    def clock_offset_s(self, repeats: int = 5) -> tuple[float, float]:
        return 0.0, 0.0

    def close(self) -> None:
        """Do nothing: there is no connection."""
