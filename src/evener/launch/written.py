"""What did a script of the user's own write on its hosts, and how does it come home?

host's project folder, where the script ran   → RUN/files/HOST/…, by the same paths
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evener.core.decoding import from_tree
from evener.core.errors import EvenerError, HostError, UsageError
from evener.core.files import digest_of
from evener.core.plan import HostPlan, Plan
from evener.core.rundir import RunDir
from evener.core.units import plural, size
from evener.hosts.session import RemoteError, Session, for_each, open_session
from evener.launch.carry import alone
from evener.launch.mirror import State, host_failed
from evener.launch.ship import WORK_S, fetch

SETTLED_S = 2.0  # after the end a file system may still note times of the run's last writes


class File(msgspec.Struct, frozen=True):
    """A file that was written."""

    path: str  # in the project
    size: int


class Written(msgspec.Struct, frozen=True):
    """What a script wrote on one host."""

    folder: str  # of the project there
    files: list[File]

    def told(self, host: str) -> str:
        """A line for a person."""
        names = [file.path for file in self.files[:3]] + (["…"] if len(self.files) > 3 else [])
        total = size(sum(file.size for file in self.files))
        return f"{host}: {plural(len(self.files), 'file')} written in {self.folder}, {total}: {', '.join(names)}"


def written(plan: Plan, states: Mapping[str, State]) -> dict[str, Written]:
    """By host, of those that can be reached and have some; `states` are their last."""

    def ask(name: str) -> Written | None:
        with contextlib.suppress(HostError), _asking(plan, name) as session:
            return _written(session, plan.host(name), states[name])
        return None

    return {name: found for name, found in for_each(_scripts(plan, states), ask).items() if found and found.files}


def bring_written(rundir: RunDir, plan: Plan, states: Mapping[str, State],
                  say: Callable[[str], None]) -> tuple[list[Path], list[EvenerError]]:  # fmt: skip
    """Fetch what is not here yet of it: the files here that are new, and what kept others from coming."""

    def bring(name: str) -> tuple[list[Path], list[EvenerError]]:
        try:
            with _asking(plan, name) as session:
                found = _written(session, plan.host(name), states[name])
                return _bring(session, rundir.path / "files" / name, found, say) if found.files else ([], [])
        except EvenerError as error:
            return [], [error]

    names = _scripts(plan, states)
    if not names:
        return [], []
    with alone(rundir, say):
        brought = for_each(names, bring)
    return [path for paths, _ in brought.values() for path in paths], [one for _, of in brought.values() for one in of]


def _scripts(plan: Plan, states: Mapping[str, State]) -> list[str]:
    """Hosts where a script was started in a folder that is not here."""
    return [host.name for host in plan.hosts if host.code is not None and states.get(host.name, {}).get("started")]


@contextlib.contextmanager
def _asking(plan: Plan, name: str) -> Any:
    try:
        with contextlib.closing(open_session(name, plan.host(name).host)) as session:
            yield session
    except RemoteError as error:
        raise host_failed(error, plan.fleet) from None


def _written(session: Session, host: HostPlan, state: State) -> Written:
    until = state["ended"] + SETTLED_S if state.get("ended") else None
    files = session.call("project", "written", folder=host.cwd, since=state["started"], until=until, run=host.run,
                         timeout_s=WORK_S)  # fmt: skip
    return Written(host.cwd, from_tree(files, list[File]))


def _bring(session: Session, target: Path, found: Written,
           say: Callable[[str], None]) -> tuple[list[Path], list[EvenerError]]:  # fmt: skip
    """File by file: one that a script is writing, or has removed, keeps no other from coming."""
    names = [file.path for file in found.files]
    surveyed = list(session.stream("files", "survey", path=found.folder, names=names, timeout_s=WORK_S))
    lacking = [entry for entry in surveyed if "digest" in entry and not _is_here(_place(target, entry), entry)]
    if lacking:
        told = size(sum(entry["size"] for entry in lacking))
        say(f"bringing home {plural(len(lacking), 'file')} from {session.name}, {told}")
    came, failed = list[Path](), list[EvenerError]()
    for entry in lacking:
        place = _place(target, entry)
        new = place.with_name(f".{place.name}.new")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            fetch(session, f"{found.folder}/{entry['path']}", new, surveyed=[entry | {"path": ""}])
            new.replace(place)
            came.append(place)
        except HostError as error:
            if error.check not in ("files.changed", "files.gone"):
                raise
            failed.append(error)
        except OSError as error:
            raise UsageError(f"{place}: {error.strerror}", hint="make room, or see what is in its way") from None
    return came, failed


def _place(target: Path, entry: Mapping[str, Any]) -> Path:
    """Where a file of a host comes to lie; HostError where that would not be in its folder here."""
    place: Path = target / entry["path"]
    if ".." in place.parts or not place.parent.resolve().is_relative_to(target.resolve()):
        raise HostError(f"{place}: leads out of {target}", check="files.odd", host=target.name, hint="look at it there")
    return place


def _is_here(path: Path, entry: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == entry["size"] and digest_of(path) == entry["digest"]
