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
from typer.testing import CliRunner

from evener.core.decoding import from_json, from_tree
from evener.core.errors import HostError
from evener.core.finding import Finding, by_severity
from evener.hosts import doctor
from evener.hosts.checks import check
from evener.hosts.seen import Seen
from evener.lab.drill import LOOK_S, Play

FOLDER = Path(__file__).parent / "unit" / "records" / "drills"


def path_of(drill: str) -> Path:
    """Return where a drill's record is."""
    return FOLDER / f"{drill}.json"


@contextlib.contextmanager
def captured(play: Play) -> Iterator[list[Seen]]:
    """Run doctor in this process while a drill goes on, and keep all that is known when it makes its findings."""
    from evener.cli.main import app

    seen: list[Seen] = []

    def checked(what: Seen) -> list[Finding]:
        seen.append(what)
        return check(what)

    def evener(*args: str, timeout_s: float = LOOK_S) -> subprocess.CompletedProcess[str]:
        with contextlib.chdir(play.stage.folder):
            done = CliRunner().invoke(app, [*args])
        return subprocess.CompletedProcess(args, done.exit_code, done.stdout, done.stderr)

    with mock.patch.object(doctor, "check", checked), mock.patch.object(play.stage, "evener", evener):
        yield seen


def write(drill: str, seen: Seen) -> None:
    """Write a drill's record, without what only this machine has."""
    errors = {name: {"message": str(error), "check": error.check, "host": error.host, "hint": error.hint}
              for name, error in seen.errors.items()}  # fmt: skip
    tree = {name: msgspec.to_builtins(getattr(seen, name)) for name in Seen.__struct_fields__ if name != "errors"}
    text = msgspec.json.encode(tree | {"errors": errors}).decode()
    for ours in (sys.prefix, str(Path(sys.executable).resolve().parent), str(Path.cwd()), str(Path.home())):
        text = text.replace(ours, "/opt/evener")
    FOLDER.mkdir(parents=True, exist_ok=True)
    path_of(drill).write_bytes(msgspec.json.format(text.encode(), indent=1) + b"\n")


def read(drill: str) -> Seen:
    """Return what doctor saw."""
    tree = from_json(path_of(drill).read_bytes(), dict[str, Any])
    errors = tree.pop("errors")
    seen = from_tree(tree | {"errors": {}}, Seen)
    raised = {name: HostError(one["message"], check=one["check"], host=one["host"], hint=one["hint"])
              for name, one in errors.items()}  # fmt: skip
    return msgspec.structs.replace(seen, errors=raised)


def findings(seen: Seen) -> list[Finding]:
    """Return what the pure checks find."""
    return by_severity(check(seen))


def keys(found: list[Finding]) -> set[tuple[str, str, str | None, str | None]]:
    """Return what must not change from one recording to the next."""
    return {(one.check, one.severity, one.host, one.peer) for one in found if one.severity != "info"}
