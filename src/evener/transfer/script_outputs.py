"""Find the files that a user's script wrote on its hosts, and fetch them.

host's project folder, where the script ran   → RUN/files/HOST/…, with the same paths
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import EvenerError, HostError, UsageError
from evener.core.base.units import format_bytes, pluralize
from evener.core.run.run_plan import HostPlan, Plan
from evener.core.run.rundir import RunDir
from evener.ssh.session import RemoteError, Session, open_run_session, parallel_map
from evener.transfer.checkpoint_transfer import exclusive_lock
from evener.transfer.file_transfer import REMOTE_WORK_TIMEOUT_S, FileFetcher, RemoteFile
from evener.transfer.mirror import SupervisorState, to_host_error

MTIME_SETTLE_S = 2.0  # a file system may date the last writes this much after the run's end


class OutputFile(msgspec.Struct, frozen=True):
    """A file that a script wrote."""

    path: str  # relative to the project
    size: int


class ScriptOutputs(msgspec.Struct, frozen=True):
    """The files that a script wrote on one host."""

    folder: str  # of the project on the host
    files: list[OutputFile]

    def summary(self, host: str) -> str:
        """Return a one-line summary for the user."""
        names = [file.path for file in self.files[:3]] + (["…"] if len(self.files) > 3 else [])
        total = format_bytes(sum(file.size for file in self.files))
        return f"{host}: {pluralize(len(self.files), 'file')} written in {self.folder}, {total}: {', '.join(names)}"


def find_outputs(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState]) -> dict[str, ScriptOutputs]:
    """Return {host: files that the script wrote} of reachable hosts with any; `states`: the hosts' last states."""

    def ask(name: str) -> ScriptOutputs | None:
        with contextlib.suppress(HostError), _host_session(rundir, plan, name) as session:
            return _find_host_outputs(session, plan.host(name), states[name])
        return None

    return {
        name: found for name, found in parallel_map(_script_hosts(plan, states), ask).items() if found and found.files
    }


def unfetched_outputs(session: Session, rundir: RunDir, host: HostPlan, state: SupervisorState) -> list[str]:
    """Return the files that the script wrote on a host and that are not here with the same content."""
    if host.code is None or not state.get("started"):
        return []
    outputs = _find_host_outputs(session, host, state)
    target, partials = _local_folders(rundir, host.name)
    return [file.path for file in _missing_files(session, target, partials, outputs)[1]]


def fetch_outputs(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState],
                  notify: Callable[[str], None]) -> tuple[list[Path], list[EvenerError]]:  # fmt: skip
    """Fetch the files that are not here yet; return the new files here, and the errors of those that failed."""

    def fetch_from(name: str) -> tuple[list[Path], list[EvenerError]]:
        try:
            with _host_session(rundir, plan, name) as session:
                outputs = _find_host_outputs(session, plan.host(name), states[name])
                return _fetch_outputs(session, *_local_folders(rundir, name), outputs, notify)
        except EvenerError as error:
            return [], [error]

    names = _script_hosts(plan, states)
    if not names:
        return [], []
    with exclusive_lock(rundir, notify):
        results = parallel_map(names, fetch_from)
    new = [path for paths, _ in results.values() for path in paths]
    return new, [error for _, errors in results.values() for error in errors]


def _script_hosts(plan: Plan, states: Mapping[str, SupervisorState]) -> list[str]:
    """Return the hosts where the script was started in a folder that is not on this machine."""
    return [host.name for host in plan.hosts if host.code is not None and states.get(host.name, {}).get("started")]


@contextlib.contextmanager
def _host_session(rundir: RunDir, plan: Plan, name: str) -> Any:
    try:
        with contextlib.closing(open_run_session(rundir, plan.host(name))) as session:
            yield session
    except RemoteError as error:
        raise to_host_error(error, plan.fleet) from None


def _find_host_outputs(session: Session, host: HostPlan, state: SupervisorState) -> ScriptOutputs:
    until = state["ended"] + MTIME_SETTLE_S if state.get("ended") else None
    files = session.call(
        "project_sync",
        "list_script_outputs",
        folder=host.cwd,
        since=state["started"],
        until=until,
        run=host.run,
        timeout_s=REMOTE_WORK_TIMEOUT_S,
    )
    return ScriptOutputs(host.cwd, from_builtins(files, list[OutputFile]))


def _fetch_outputs(session: Session, target: Path, partials: Path, outputs: ScriptOutputs,
           notify: Callable[[str], None]) -> tuple[list[Path], list[EvenerError]]:  # fmt: skip
    """Fetch file by file, so that one that a script is writing or has removed does not affect the others."""
    fetcher, missing = _missing_files(session, target, partials, outputs)
    if missing:
        total = format_bytes(sum(file.size for file in missing))
        notify(f"fetching {pluralize(len(missing), 'file')} from {session.name}, {total}")
    fetched, failed = list[Path](), list[EvenerError]()
    for file in missing:
        try:
            fetched.append(fetcher.fetch(file))
        except HostError as error:
            if error.check not in ("files.changed", "files.gone"):
                raise
            failed.append(error)
        except OSError as error:
            raise UsageError(
                f"{target / file.path}: {error.strerror}", hint="make room, or see what is in its place"
            ) from None
    shutil.rmtree(partials, ignore_errors=True)
    return fetched, failed


def _missing_files(
    session: Session, target: Path, partials: Path, outputs: ScriptOutputs
) -> tuple[FileFetcher, list[RemoteFile]]:
    """Return the fetcher of a script's files, and those that are not in the folder `target` with the same content."""
    names = [file.path for file in outputs.files]
    entries = list(
        session.stream("content_store", "hash_files", path=outputs.folder, names=names, timeout_s=REMOTE_WORK_TIMEOUT_S)
    )
    fetcher = FileFetcher(session, outputs.folder, target, partials)
    return fetcher, fetcher.missing(entries)


def _local_folders(rundir: RunDir, host: str) -> tuple[Path, Path]:
    """Return the folder of a host's files here, and the one in which they arrive."""
    return rundir.inside("files", host), rundir.inside("files", f".{host}.arriving")
