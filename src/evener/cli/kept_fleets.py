"""`--on laptop,attic`: the fleet file of machines that are given by name, written at the first use and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from evener.cli.run_output import print_status
from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.file_io import write_atomic
from evener.core.base.shell import quote_command
from evener.core.cluster.fleet_file import format_fleet, named_fleet_path
from evener.sources.hostfile import parse_host_arguments
from evener.sources.import_hosts import local_host_name, merge_host_lists


def kept_fleet_file(names: str) -> Path:
    """Return the fleet file of these machines, separated by commas; write it at the first use.

    Raise UsageError if no machine is named, and EvenerError if the file cannot be written.
    """
    words = _split_names(names)
    path = named_fleet_path(words)
    if not path.exists():
        hosts, _ = merge_host_lists([parse_host_arguments(words, local_host_name())])
        print_status(f"$ {quote_command(['evener', 'fleet', 'init', *words, '--out', str(path)])}")
        write_fleet_file(path, format_fleet(hosts, f"The machines of --on {names}. Edit it as you like."))
    return path


@contextlib.contextmanager
def fleet_of_names(names: str) -> Iterator[str]:
    """Yield the fleet file of these machines; a new one is removed if the block refuses another flag of the user's."""
    is_new = not named_fleet_path(_split_names(names)).exists()
    path = kept_fleet_file(names)
    try:
        yield str(path)
    except UsageError as error:
        if is_new and type(error) is UsageError:  # others are about what was, or was not, measured on the machines
            path.unlink(missing_ok=True)
        raise


def _split_names(names: str) -> list[str]:
    words = [name.strip() for name in names.split(",") if name.strip()]
    if not words:
        raise UsageError(f"--on {names}: which machines?", hint="--on local,laptop: this one, and one that ssh reaches")
    return words


def write_fleet_file(path: Path, text: str) -> None:
    """Write a fleet file, and its folder if that is not there. Raise EvenerError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except OSError as error:
        hint = "XDG_CONFIG_HOME=FOLDER before the command puts it elsewhere"
        raise EvenerError(f"cannot write {path}: {error.strerror}", hint=hint) from None
