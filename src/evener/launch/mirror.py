"""How do a run's records and logs come home? Every host's files are read as they grow, and after a lost connection from
where the copy ends: no gap, no line twice.

    host's RUN/steps, RUN/logs, RUN/manifest.json   → the same place here: names tell ranks and hosts apart
    host's RUN/events.jsonl, RUN/host/state.json    → RUN/hosts/NAME/…; RUN/events.jsonl is all of them by time
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from evener.core.errors import HostError
from evener.core.plan import HostPlan, Plan
from evener.core.rundir import RunDir, write_atomic
from evener.hosts.session import Session, open_session

RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
SILENCE_S = 30.0  # a host that follows tells several times a second

State = dict[str, Any]


class HostMirror:
    """The copy of one host's part of a run."""

    def __init__(self, rundir: RunDir, plan: HostPlan) -> None:
        self.name = plan.name
        self._rundir, self._plan = rundir, plan
        self._known_path = rundir.path / "hosts" / plan.name / "mirror.json"
        self.state: State | None = None  # as the host told it last
        self.error: HostError | None = None  # while the host cannot be reached
        self.caught_up = False
        self._stop = threading.Event()

    def follow(self, on_change: Callable[[HostMirror], None]) -> None:
        """Copy until the run on this host has ended and everything is here; reconnect as often as it takes."""
        failures = 0
        while not self._stop.is_set():
            try:
                session = open_session(self._plan.name, self._plan.host)
                try:
                    self.copy(session, until_end=True, on_change=on_change)
                    return
                finally:
                    session.close()
            except HostError as error:
                failures = 0 if self.error is None else failures + 1
                self.error = error
                on_change(self)
                self._stop.wait(RETRY_S[min(failures, len(RETRY_S) - 1)])

    def copy(
        self, session: Session, *, until_end: bool, on_change: Callable[[HostMirror], None] = lambda mirror: None
    ) -> None:
        """Copy what the host has that is not here yet; `until_end`: go on until the run has ended there."""
        pending: dict[str, Any] | None = None
        dirty = False
        have = self._have()
        for item in session.stream(
            "runs", "follow", run=self._plan.run, have=have, until_end=until_end, timeout_s=SILENCE_S
        ):
            if isinstance(item, bytes):
                assert pending is not None
                self._add(pending, item)
                pending, dirty = None, True
            elif "path" in item:
                pending = item if item["size"] else None
                if item["size"] == 0:
                    self._add(item, b"")
            else:
                was, self.state, self.caught_up = self.state, item["caught_up"], True
                if self.error is not None or was != self.state or dirty:
                    self.error, dirty = None, False
                    on_change(self)
            if self._stop.is_set():
                return

    def stop(self) -> None:
        """Follow no more."""
        self._stop.set()

    def _have(self) -> dict[str, list[Any]]:
        """What is here: a file counts with the bytes that it really has."""
        try:
            known: dict[str, str] = msgspec.json.decode(self._known_path.read_bytes())
        except OSError:
            return {}
        have: dict[str, list[Any]] = {}
        for path, identity in known.items():
            local = self._local(path)
            if local.exists():
                have[path] = [identity, local.stat().st_size]
        return have

    def _add(self, header: dict[str, Any], content: bytes) -> None:
        path = self._local(header["path"])
        record = re.fullmatch(r"steps/rank-(\d+)\.jsonl", header["path"])
        if record and not 0 <= int(record[1]) - self._plan.first_rank < self._plan.num_ranks:
            return  # of an earlier start, when that rank was here
        if header["path"] in ("manifest.json", "host/state.json") and header["offset"] == 0:
            write_atomic(path, content)  # small: they come in one piece, and nobody sees half of one
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.truncate(header["offset"])
                file.seek(header["offset"])
                file.write(content)
        try:
            known: dict[str, str] = msgspec.json.decode(self._known_path.read_bytes())
        except OSError:
            known = {}
        if known.get(header["path"]) != header["identity"]:
            write_atomic(self._known_path, msgspec.json.encode(known | {header["path"]: header["identity"]}))

    def _local(self, path: str) -> Path:
        if path == "events.jsonl":
            return self._rundir.path / "hosts" / self._plan.name / "events.jsonl"
        if path == "host/state.json":
            return self._rundir.path / "hosts" / self._plan.name / "state.json"
        parts = path.split("/")
        assert all(part not in ("", "..", ".") for part in parts), path  # a host may not write outside the run
        return self._rundir.path.joinpath(*parts)


class Mirror:
    """The copies of all hosts, each followed by a thread of its own."""

    def __init__(self, rundir: RunDir, plan: Plan) -> None:
        self.rundir = rundir
        self.hosts = {host.name: HostMirror(rundir, host) for host in plan.hosts}
        self._changed = threading.Event()
        self._threads = [
            threading.Thread(target=host.follow, args=(self._tell,), daemon=True) for host in self.hosts.values()
        ]

    def __enter__(self) -> Mirror:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.stop()
        for thread in self._threads:
            thread.join(2)
        merge_events(self.rundir)

    @property
    def is_done(self) -> bool:
        """Has the run ended on every host, and is everything here?"""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self, timeout_s: float) -> None:
        """Return when there is news, or after a while."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def _tell(self, host: HostMirror) -> None:
        self._changed.set()


def merge_events(rundir: RunDir) -> None:
    """RUN/events.jsonl: what the hosts and the controller told, by time."""
    lines: list[tuple[float, bytes]] = []
    for path in sorted((rundir.path / "hosts").glob("*/events.jsonl")):
        complete = path.read_bytes().split(b"\n")[:-1]
        lines += [(msgspec.json.decode(line)["time"], line) for line in complete]
    if lines:
        lines.sort(key=lambda pair: pair[0])
        write_atomic(rundir.events_path, b"".join(line + b"\n" for _, line in lines))


def tell(rundir: RunDir, event: str, **facts: Any) -> None:
    """An event that the controller itself saw."""
    folder = rundir.path / "hosts" / ".controller"
    folder.mkdir(parents=True, exist_ok=True)
    line = msgspec.json.encode({"event": event, "time": time.time()} | facts) + b"\n"
    with (folder / "events.jsonl").open("ab") as file:
        file.write(line)
    merge_events(rundir)
