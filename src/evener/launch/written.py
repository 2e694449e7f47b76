"""Find the files that a user's script wrote on its hosts, and fetch them.

host's project folder, where the script ran   → RUN/files/HOST/…, with the same paths
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

SETTLED_S = 2.0  # a file system may date the last writes this much after the run's end


class File(msgspec.Struct, frozen=True):
    """A file that a script wrote."""

    path: str  # relative to the project
    size: int


class Written(msgspec.Struct, frozen=True):
    """The files that a script wrote on one host."""

    folder: str  # of the project on the host
    files: list[File]

    def told(self, host: str) -> str:
        """Return a one-line summary for the user."""
        names = [file.path for file in self.files[:3]] + (["…"] if len(self.files) > 3 else [])
        total = size(sum(file.size for file in self.files))
        return f"{host}: {plural(len(self.files), 'file')} written in {self.folder}, {total}: {', '.join(names)}"


def written(plan: Plan, states: Mapping[str, State]) -> dict[str, Written]:
    """Return the files written by the script, by host, for reachable hosts that have any; `states` are the last."""

    def ask(name: str) -> Written | None:
        with contextlib.suppress(HostError), _asking(plan, name) as session:
            return _written(session, plan.host(name), states[name])
        return None

    return {name: found for name, found in for_each(_scripts(plan, states), ask).items() if found and found.files}


def bring_written(rundir: RunDir, plan: Plan, states: Mapping[str, State],
                  say: Callable[[str], None]) -> tuple[list[Path], list[EvenerError]]:  # fmt: skip
    """Fetch the files that are not here yet; return the new files here, and the errors of those that failed."""

    def fetch_from(name: str) -> tuple[list[Path], list[EvenerError]]:
        try:
            with _asking(plan, name) as session:
                outputs = _written(session, plan.host(name), states[name])
                return _bring(session, rundir.path / "files" / name, outputs, say) if outputs.files else ([], [])
        except EvenerError as error:
            return [], [error]

    names = _scripts(plan, states)
    if not names:
        return [], []
    with alone(rundir, say):
        results = for_each(names, fetch_from)
    new = [path for paths, _ in results.values() for path in paths]
    return new, [error for _, errors in results.values() for error in errors]


def _scripts(plan: Plan, states: Mapping[str, State]) -> list[str]:
    """Return the hosts where the script was started in a folder that is not on this machine."""
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


def _bring(session: Session, target: Path, outputs: Written,
           notify: Callable[[str], None]) -> tuple[list[Path], list[EvenerError]]:  # fmt: skip
    """Fetch file by file, so that one that a script is writing or has removed does not affect the others."""
    names = [file.path for file in outputs.files]
    surveyed = list(session.stream("files", "survey", path=outputs.folder, names=names, timeout_s=WORK_S))
    missing = [entry for entry in surveyed if "digest" in entry and not _is_here(_place(target, entry), entry)]
    if missing:
        total = size(sum(entry["size"] for entry in missing))
        notify(f"fetching {plural(len(missing), 'file')} from {session.name}, {total}")
    fetched, failed = list[Path](), list[EvenerError]()
    for entry in missing:
        path = _place(target, entry)
        new = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            fetch(session, f"{outputs.folder}/{entry['path']}", new, surveyed=[entry | {"path": ""}])
            new.replace(path)
            fetched.append(path)
        except HostError as error:
            if error.check not in ("files.changed", "files.gone"):
                raise
            failed.append(error)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", hint="make room, or see what is in its place") from None
    return fetched, failed


def _place(target: Path, entry: Mapping[str, Any]) -> Path:
    """Return where a file of a host is written here. HostError if that is outside the host's folder."""
    path: Path = target / entry["path"]
    if ".." in path.parts or not path.parent.resolve().is_relative_to(target.resolve()):
        raise HostError(f"{path}: leads out of {target}", check="files.odd", host=target.name, hint="look at it there")
    return path


def _is_here(path: Path, entry: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == entry["size"] and digest_of(path) == entry["digest"]
