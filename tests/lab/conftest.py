"""Labs for tests: real hosts, with names that no other test process uses."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.core.base.errors import EvenerError
from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.host import LabHost
from evener.lab.lab_requirements import check_machine
from evener.lab.lab_spec import HostSpec, LabSpec

TIMEOUT_S = 120  # of a machine as busy as it likes
MakeLab = Callable[..., EmulatedLab]


@pytest.fixture(scope="session")
def make_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeLab]:
    """make_lab(a=HostSpec(…), b=…): a lab that lasts until the session ends, or until its `down`."""
    skip_unless_possible(LabSpec())
    made: list[EmulatedLab] = []

    def make(out: Path | None = None, **hosts: HostSpec) -> EmulatedLab:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        spec = LabSpec(name=f"test-{os.getpid()}-{worker}-{len(made)}", hosts=hosts)
        skip_unless_possible(spec)
        made.append(EmulatedLab.up(spec, out=out or tmp_path_factory.mktemp("lab") / "lab.toml"))
        return made[-1]

    yield make
    for lab in made:
        lab.down()


def skip_unless_possible(spec: LabSpec) -> None:
    """Skip the test, with the reason, if this machine cannot create such a lab; fail where CI runs it."""
    try:
        check_machine(spec)
    except EvenerError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"{error}; {error.hint}")


@pytest.fixture(scope="session")
def pair(make_lab: MakeLab) -> EmulatedLab:
    """Two plain hosts, a and b. A test leaves them as it found them."""
    return make_lab(a=HostSpec(), b=HostSpec())


def wait_until(condition: Callable[[], bool], what: str | Callable[[], str], within_s: float = TIMEOUT_S,
               every_s: float = 0.1) -> None:  # fmt: skip
    """Poll with a deadline. `what` was waited for, or what there is to be seen when it did not come."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(every_s)


def come_home(run: RunDir) -> list[dict[str, Any]]:
    """The events of all hosts, as they come home while it goes on; some have the same."""
    lines = {line for path in run.path.glob("hosts/*/events.jsonl")
             for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")}  # fmt: skip
    return [json.loads(line) for line in lines]


def worlds_of(run: RunDir) -> list[list[str]]:
    """Who was in each."""
    found = {event["number"]: event["hosts"] for event in come_home(run) if event["event"] == "world"}
    return [hosts for _, hosts in sorted(found.items())]


def command_lines(host: LabHost) -> list[bytes]:
    """Of a host's processes; each may have ended before it is looked at."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def rank_on(host: LabHost) -> int:
    """The pid, as this machine has it, of the only rank there; where it was started by torchrun, which names it too."""
    found = {}
    for pid in host.pids():
        with contextlib.suppress(OSError):
            if b"evener.worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    (rank,) = found.keys() - set(found.values())
    return rank
