"""Sessions: RPC to a host, many calls at a time over one connection.

    with connect(fleet) as (sessions, errors):
        facts = sessions["attic"].call("facts", "collect", workdir="~/.evener")

A module of `node/remote` is sent the first time it is used, after those that it imports. Only JSON values and raw bytes
are transferred: nothing is unpickled. A lost connection raises HostError (a transport failure); an exception in the
called function raises RemoteError, so the two are never confused.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from evener.core.base.errors import HostError
from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.core.run.run_plan import HostPlan, Plan
from evener.core.run.rundir import RunDir
from evener.core.run.trust import require_trusted_fleet, require_trusted_run
from evener.node.remote import read_source, siblings
from evener.ssh.transport import Transport, make_transport

MAGIC = b"\nevener-session-1\n"
HANDSHAKE_TIMEOUT_S = 12.0
HANDSHAKE_MARGIN_S = 3.0  # from the TCP connection to the reply
CALL_TIMEOUT_S = 30.0

T = TypeVar("T")
R = TypeVar("R")


class RemoteError(Exception):
    """An exception that a function raised on a host: its message, its class name and its traceback there."""

    def __init__(self, host: str, message: str, kind: str, traceback: str) -> None:
        super().__init__(f"{host}: {message}")
        self.host, self.message, self.kind, self.traceback = host, message, kind, traceback


class Session:
    """An open connection to one host. Safe to use from several threads."""

    def __init__(self, name: str, shell: Transport, connect_timeout_s: float) -> None:
        self.name, self._transport = name, shell
        self._process = shell.start()
        self._ids = itertools.count(1)
        self._replies: dict[Any, queue.SimpleQueue[tuple[dict[str, Any], bytes]]] = {}
        self._loaded_modules: set[str] = set()
        self._lock, self._write_lock, self._load_lock = threading.Lock(), threading.Lock(), threading.RLock()
        self._connection_error: HostError | None = None
        self._closing = False
        self._stderr: list[bytes] = []
        self._login_output = b""  # printed before the remote program answered
        self._stderr_thread = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader_thread = threading.Thread(target=self._read_replies, daemon=True)
        program = read_source("rpc_server").encode()
        try:
            with self._expect_replies("hello"):
                self._stderr_thread.start()
                self._reader_thread.start()
                self._write(f"{len(program)}\n".encode() + program)
                hello, _ = self._next_reply("hello", connect_timeout_s)
        except BaseException:
            self.close()
            raise
        self.python: str = hello["hello"]

    def call(
        self, module: str, function: str, *, body: bytes = b"", timeout_s: float | None = CALL_TIMEOUT_S, **args: Any
    ) -> Any:
        """Call a function and return its result: the last item of one that yields, None if it yields nothing."""
        value = None
        for item in self.stream(module, function, body=body, timeout_s=timeout_s, **args):
            value = item
        return value

    def stream(
        self, module: str, function: str, *, body: bytes = b"", timeout_s: float | None = CALL_TIMEOUT_S, **args: Any
    ) -> Iterator[Any]:
        """Yield the items of a function as they arrive, at most `timeout_s` apart. Leaving early cancels the call."""
        self._load_module(module)
        yield from self._request({"module": module, "function": function, "args": args}, body, timeout_s)

    def clock_offset_s(self, repeats: int = 5) -> tuple[float, float]:
        """Return (their clock minus ours, the error of that), from the shortest of several round trips."""
        best = (0.0, float("inf"))
        for _ in range(repeats):
            ping = f"ping-{next(self._ids)}"
            with self._expect_replies(ping):
                began = time.time()
                self._write(json.dumps({"ping": ping}).encode() + b"\n")
                header, _ = self._next_reply(ping, CALL_TIMEOUT_S)
                took = time.time() - began
            if took / 2 < best[1]:
                best = (header["time"] - (began + took / 2), took / 2)
        return best

    def close(self) -> None:
        """Close the connection, which ends whatever the host runs for it."""
        self._closing = True
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader_thread.join(1)
        self._stderr_thread.join(1)

    def _load_module(self, module: str) -> None:
        with self._load_lock:
            if module in self._loaded_modules:
                return
            source = read_source(module)
            for sibling in siblings(source):
                self._load_module(sibling)
            for _ in self._request({"module": module, "source": source}, b"", CALL_TIMEOUT_S):
                pass
            self._loaded_modules.add(module)

    def _request(self, request: dict[str, Any], body: bytes, timeout_s: float | None) -> Iterator[Any]:
        """Send a request and yield its results; cancel it where it has not ended by then."""
        request_id = next(self._ids)
        header = request | {"id": request_id} | ({"size": len(body)} if body else {})
        has_ended = False
        with self._expect_replies(request_id):
            self._write(json.dumps(header).encode() + b"\n" + body)
            try:
                while True:
                    header, content = self._next_reply(request_id, timeout_s)
                    has_ended = "done" in header or "error" in header
                    if "error" in header:
                        raise RemoteError(self.name, header["error"], header["kind"], header["traceback"])
                    if has_ended:
                        return
                    yield content if "size" in header else header["value"]
            finally:
                if not has_ended and self._connection_error is None:
                    with contextlib.suppress(HostError, OSError, ValueError):  # the connection is closed meanwhile
                        self._write(json.dumps({"cancel": request_id}).encode() + b"\n")

    @contextlib.contextmanager
    def _expect_replies(self, key: Any) -> Iterator[None]:
        """Queue the replies under this key; HostError if the connection was lost before."""
        with self._lock:
            if self._connection_error is not None:
                raise self._connection_error
            self._replies[key] = queue.SimpleQueue()
        try:
            yield
        finally:
            with self._lock:
                del self._replies[key]

    def _next_reply(self, key: Any, timeout_s: float | None) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            replies = self._replies[key]
        try:
            header, content = replies.get(timeout=timeout_s)
        except queue.Empty:
            if key == "hello":
                raise self._startup_error(None) from None
            raise HostError(
                f"{self.name}: no answer within {timeout_s:g} s",
                check="ssh.unreachable",
                host=self.name,
                hint="the machine or its network has stopped responding",
            ) from None
        if "lost" in header:
            assert self._connection_error is not None
            replies.put((header, content))
            raise self._connection_error
        return header, content

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with self._write_lock:
            try:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            except (OSError, ValueError):
                self._reader_thread.join(HANDSHAKE_TIMEOUT_S)
                if self._connection_error is not None:
                    raise self._connection_error from None
                raise

    def _read_replies(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        answered = False
        try:
            login_output = b"\n"
            while not login_output.endswith(MAGIC):  # a login script may print before
                line = stdout.readline()
                if not line:
                    return
                login_output = (login_output + line)[-4096:]
                self._login_output = login_output
            answered = True
            while True:
                line = stdout.readline()
                if not line:
                    return
                header = json.loads(line)
                size = header.get("size", 0)
                content = stdout.read(size) if size else b""
                if len(content) < size:
                    return
                key = "hello" if "hello" in header else header.get("id", header.get("ping"))
                with self._lock:
                    replies = self._replies.get(key)
                if replies is not None:
                    replies.put((header, content))
        finally:
            self._fail_pending(answered)

    def _fail_pending(self, answered: bool) -> None:
        """Fail every pending request with the reason why the connection ended."""
        if self._closing:
            status = None
        else:
            try:
                status = self._process.wait(2)
            except subprocess.TimeoutExpired:
                status = None
            self._stderr_thread.join(1)
        self._connection_error = (
            self._connection_lost_error(status) if answered or self._closing else self._startup_error(status)
        )
        with self._lock:  # a request that comes later sees _lost
            for replies in self._replies.values():
                replies.put(({"lost": True}, b""))

    def _startup_error(self, status: int | None) -> HostError:
        outputs = (b"".join(self._stderr), self._login_output)
        return self._transport.explain_failure(status, *(text.decode(errors="replace") for text in outputs))

    def _connection_lost_error(self, status: int | None) -> HostError:
        last_line = b"".join(self._stderr).decode(errors="replace").strip().splitlines()[-1:]
        return HostError(
            f"{self.name}: the connection was lost" + (f": {last_line[0]}" if last_line else ""),
            check="ssh.unreachable",
            host=self.name,
            hint="is the machine still on, and its network up? Then try again: nothing was changed there",
        )

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._stderr.append(line)
            del self._stderr[:-200]


Sessions = dict[str, Session]


Connected = tuple[Sessions, dict[str, HostError]]


def open_run_session(rundir: RunDir, host: HostPlan) -> Session:
    """Open a connection to a host of a run. UntrustedError if the run came from elsewhere, else as `open_session`."""
    require_trusted_run(rundir)
    return open_session(host.name, host.host)


def connect(fleet: Fleet, connect_timeout_s: float = HANDSHAKE_TIMEOUT_S) -> AbstractContextManager[Connected]:
    """Connect to all hosts at once. Yield the sessions, in the fleet's order, and the errors of hosts that cannot be
    reached or do not answer in time. UntrustedError if the fleet file names programs that the user has not approved.
    """
    require_trusted_fleet(fleet)
    return _connect(fleet.hosts, connect_timeout_s)


def connect_run(rundir: RunDir, plan: Plan) -> AbstractContextManager[Connected]:
    """Connect to all hosts of a run at once, as `connect`. UntrustedError if the run came from elsewhere."""
    require_trusted_run(rundir)
    return _connect({host.name: host.host for host in plan.hosts}, HANDSHAKE_TIMEOUT_S)


def open_session(name: str, host: HostConfig, connect_timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Session:
    """Open a connection to one host; wait longer if its ssh options have a larger ConnectTimeout.

    The settings are not checked: only the functions above call it, and tests. HostError says why it failed:
    ssh.unreachable, ssh.auth, ssh.key, ssh.hostkey, ssh.shell, net.mtu, version.python.
    """
    timeouts = [re.match(r"(?i)connecttimeout[ =]+(\d+)$", option) for option in host.ssh_options]
    return Session(
        name,
        make_transport(name, host),
        max([connect_timeout_s, *(int(match[1]) + HANDSHAKE_MARGIN_S for match in timeouts if match)]),
    )


@contextlib.contextmanager
def _connect(hosts: Mapping[str, HostConfig], connect_timeout_s: float) -> Iterator[Connected]:
    opened = parallel_map(hosts, lambda name: _open_or_error(name, hosts[name], connect_timeout_s))
    sessions = {name: result for name, result in opened.items() if isinstance(result, Session)}
    errors = {name: result for name, result in opened.items() if isinstance(result, HostError)}
    try:
        yield sessions, errors
    finally:
        parallel_map(sessions, lambda name: sessions[name].close())


def parallel_map(names: Mapping[str, T] | list[str], work: Callable[[str], R]) -> dict[str, R]:
    """Return {name: work(name)}, computed in parallel; raise the first exception after all have ended."""
    if not names:
        return {}
    pool = ThreadPoolExecutor(max_workers=len(names))
    futures = {name: pool.submit(work, name) for name in names}
    try:
        wait(futures.values())
    except BaseException:  # Ctrl-C: the caller closes its connections, and that ends the work
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return {name: future.result() for name, future in futures.items()}


def _open_or_error(name: str, host: HostConfig, connect_timeout_s: float) -> Session | HostError:
    try:
        return open_session(name, host, connect_timeout_s)
    except HostError as error:
        return error
