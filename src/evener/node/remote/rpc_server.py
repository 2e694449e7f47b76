"""The RPC server on the remote end of a session: piped to the host's python, it needs nothing else there.

Frames in both directions: a line of JSON, then as many raw bytes as its "size" says.

    request   {"id": 1, "module": "facts", "source": …}                 a module, after its siblings
              {"id": 2, "module": "facts", "function": "collect", "args": {…}, "size": 0}
              {"cancel": 2}
    reply     {"id": 2, "value": …} | {"id": 2, "size": 4096} + bytes   any number of them
              {"id": 2, "done": true} | {"id": 2, "error": "…", "kind": "OSError", "traceback": "…"}

Requests run concurrently, each in a thread. When the connection closes, this process ends, and with it all it opened.
Python 3.8 or newer, Linux or macOS.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import types
from typing import Any

MAGIC = b"\nevener-session-1\n"
PACKAGE = "evener.node.remote"  # the modules sent stand in sys.modules under their names in it, for their siblings

_reply_pipe = os.fdopen(os.dup(1), "wb")
_request_pipe = sys.stdin.buffer
_write_lock = threading.Lock()
_cancel_events: dict[Any, threading.Event] = {}


def _send_frame(header: dict[str, Any], body: bytes = b"") -> None:
    if body:
        header["size"] = len(body)
    with _write_lock:
        _reply_pipe.write(json.dumps(header).encode() + b"\n" + body)
        _reply_pipe.flush()


def _send_value(request_id: Any, value: Any) -> None:
    if isinstance(value, (bytes, bytearray, memoryview)):
        _send_frame({"id": request_id, "size": len(value)}, bytes(value))
    else:
        _send_frame({"id": request_id, "value": value})


def _handle_request(request: dict[str, Any], body: bytes) -> None:
    request_id, name = request["id"], f"{PACKAGE}.{request['module']}"
    try:
        if "source" in request:
            sys.modules[name] = types.ModuleType(name)
            exec(compile(request["source"], f"<{name}>", "exec"), sys.modules[name].__dict__)  # noqa: S102
        else:
            function = getattr(sys.modules[name], request["function"])
            if body:
                request["args"]["body"] = body
            value = function(**request["args"])
            if isinstance(value, types.GeneratorType):
                for item in value:
                    if _cancel_events[request_id].is_set():
                        value.close()
                        break
                    _send_value(request_id, item)
            else:
                _send_value(request_id, value)
        _send_frame({"id": request_id, "done": True})
    except BaseException as error:
        _send_frame(
            {"id": request_id, "error": str(error), "kind": type(error).__name__, "traceback": traceback.format_exc()}
        )
    finally:
        _cancel_events.pop(request_id, None)


def _serve_requests() -> None:
    os.dup2(2, 1)  # so that nothing printed corrupts the frames
    with _write_lock:
        _reply_pipe.write(MAGIC)
        _reply_pipe.flush()
    _send_frame({"hello": sys.version.split()[0], "pid": os.getpid(), "time": time.time()})
    while True:
        line = _request_pipe.readline()
        if not line:
            os._exit(0)  # the controller is gone
        request = json.loads(line)
        body = _request_pipe.read(request.get("size", 0))
        if "cancel" in request:
            cancelled = _cancel_events.get(request["cancel"])  # None: the request has ended meanwhile
            if cancelled is not None:
                cancelled.set()
        elif "ping" in request:
            _send_frame({"ping": request["ping"], "time": time.time()})
        elif "source" in request:
            _handle_request(request, body)  # in this thread, before any request that needs the module
        else:
            _cancel_events[request["id"]] = threading.Event()
            threading.Thread(target=_handle_request, args=(request, body), daemon=True).start()


if __name__ == "__main__":
    _serve_requests()
