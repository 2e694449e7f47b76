"""What did a script of the user's own write on its hosts, and how does it come home?

host's project folder, where the script ran   → RUN/files/HOST/…, by the same paths
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evener.core.decoding import from_tree
from evener.core.errors import HostError
from evener.core.files import digest_of
from evener.core.plan import HostPlan, Plan
from evener.core.rundir import RunDir
from evener.core.units import plural, size
from evener.hosts.session import RemoteError, Session, for_each, open_session
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
        with contextlib.suppress(HostError), _asking(plan.host(name)) as session:
            return _written(session, plan.host(name), states[name])
        return None

    return {name: found for name, found in for_each(_scripts(plan, states), ask).items() if found and found.files}


def bring_written(rundir: RunDir, plan: Plan, states: Mapping[str, State],
                  say: Callable[[str], None]) -> tuple[list[Path], list[HostError]]:  # fmt: skip
    """Fetch what is not here yet of it: the files here that are new, and what kept others from coming."""

    def bring(name: str) -> list[Path] | HostError:
        try:
            with _asking(plan.host(name)) as session:
                found = _written(session, plan.host(name), states[name])
                return _bring(session, rundir.path / "files" / name, found, say) if found.files else []
        except HostError as error:
            return error

    brought = for_each(_scripts(plan, states), bring)
    came = [path for paths in brought.values() if not isinstance(paths, HostError) for path in paths]
    return came, [error for error in brought.values() if isinstance(error, HostError)]


def _scripts(plan: Plan, states: Mapping[str, State]) -> list[str]:
    """Hosts where a script was started in a folder that is not here."""
    return [host.name for host in plan.hosts if host.code is not None and states.get(host.name, {}).get("started")]


@contextlib.contextmanager
def _asking(host: HostPlan) -> Any:
    try:
        with contextlib.closing(open_session(host.name, host.host)) as session:
            yield session
    except RemoteError as error:
        raise host_failed(error) from None


def _written(session: Session, host: HostPlan, state: State) -> Written:
    until = state["ended"] + SETTLED_S if state.get("ended") else None
    files = session.call("project", "written", folder=host.cwd, since=state["started"], until=until, run=host.run,
                         timeout_s=WORK_S)  # fmt: skip
    return Written(host.cwd, from_tree(files, list[File]))


def _bring(session: Session, target: Path, found: Written, say: Callable[[str], None]) -> list[Path]:
    names = [file.path for file in found.files]
    surveyed = list(session.stream("files", "survey", path=found.folder, names=names, timeout_s=WORK_S))
    lacking = [entry for entry in surveyed if not _is_here(target / entry["path"], entry)]
    if not lacking:
        return []
    say(f"bringing home {plural(len(lacking), 'file')} from {session.name}, "
        f"{size(sum(entry['size'] for entry in lacking))}")  # fmt: skip
    target.mkdir(parents=True, exist_ok=True)
    making = target.parent / f".{target.name}.new"
    shutil.rmtree(making, ignore_errors=True)  # of one who was cut off here; what had arrived lies beside it
    fetch(session, found.folder, making, surveyed=lacking)
    came = []
    for entry in lacking:
        place = target / entry["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        (making / entry["path"]).replace(place)
        came.append(place)
    shutil.rmtree(making)
    return came


def _is_here(path: Path, entry: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == entry["size"] and digest_of(path) == entry["digest"]
