"""What doctor saw in each fault drill, as `make test-all` recorded it: the pure checks are tried on it without a lab.

`pytest tests/lab/test_drills.py --exhaustive --record-drills` writes them anew.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from evener.core.base.decoding import from_builtins, from_json
from evener.core.base.errors import HostError
from evener.core.cluster.finding import Finding, sort_by_severity
from evener.doctor import preflight
from evener.doctor.checks import run_checks
from evener.doctor.context import CheckContext
from evener.lab.drills.drill_runner import DIAGNOSIS_TIMEOUT_S, DrillRun

from .in_process import run_verb

FOLDER = Path(__file__).parent / "unit" / "records" / "drills"


def path_of(drill: str) -> Path:
    """Return where a drill's record is."""
    return FOLDER / f"{drill}.json"


@contextlib.contextmanager
def captured(play: DrillRun) -> Iterator[list[CheckContext]]:
    """Run doctor in this process while a drill goes on, and keep all that is known when it makes its findings."""
    seen: list[CheckContext] = []

    def checked(what: CheckContext) -> list[Finding]:
        seen.append(what)
        return run_checks(what)

    def evener(*args: str, timeout_s: float = DIAGNOSIS_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        return run_verb(*args, cwd=play.context.folder, timeout_s=timeout_s)

    with mock.patch.object(preflight, "run_checks", checked), mock.patch.object(play.context, "run_evener", evener):
        yield seen


def write(drill: str, seen: CheckContext) -> None:
    """Write a drill's record, without what only this machine has."""
    errors = {name: {"message": str(error), "check": error.check, "host": error.host, "hint": error.hint}
              for name, error in seen.errors.items()}  # fmt: skip
    tree = {
        name: msgspec.to_builtins(getattr(seen, name)) for name in CheckContext.__struct_fields__ if name != "errors"
    }
    text = msgspec.json.encode(tree | {"errors": errors}).decode()
    for ours in (sys.prefix, str(Path(sys.executable).resolve().parent), str(Path.cwd()), str(Path.home())):
        text = text.replace(ours, "/opt/evener")
    FOLDER.mkdir(parents=True, exist_ok=True)
    path_of(drill).write_bytes(msgspec.json.format(text.encode(), indent=1) + b"\n")


def read(drill: str) -> CheckContext:
    """Return what doctor saw."""
    tree = from_json(path_of(drill).read_bytes(), dict[str, Any])
    errors = tree.pop("errors")
    seen = from_builtins(tree | {"errors": {}}, CheckContext)
    raised = {name: HostError(one["message"], check=one["check"], host=one["host"], hint=one["hint"])
              for name, one in errors.items()}  # fmt: skip
    return msgspec.structs.replace(seen, errors=raised)


def findings(seen: CheckContext) -> list[Finding]:
    """Return what the pure checks find."""
    return sort_by_severity(run_checks(seen))


def keys(found: list[Finding], check: str) -> set[tuple[str, str | None, str | None]]:
    """Return what must not change from one recording to the next; how severe it is may follow from a measured speed."""
    return {(one.check, one.host, one.peer) for one in found if one.check == check or one.severity != "info"}
