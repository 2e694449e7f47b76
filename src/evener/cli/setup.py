"""evener setup: install the same evener and torch on every host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from evener.cli.trust import TRUST
from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from evener.transfer.host_setup import SetupProgress


EXAMPLES = "evener setup --fleet fleet.toml --with requirements.txt"


def setup(
    fleet: str | None = typer.Option(None, help="hosts to set up [fleet.toml]"),
    hosts: list[str] | None = typer.Option(None, "--host", metavar="HOST", help="only this; may be given again [all]"),
    extra: list[str] | None = typer.Option(
        None, "--extra", metavar="hf", help="an extra of evener as well; hf: what fine-tuning needs"
    ),
    more: list[str] | None = typer.Option(
        None, "--with", metavar="PACKAGE | FILE.txt", help="packages that your own scripts need; may be given again"
    ),
    carry: bool = typer.Option(False, "--carry", help="send wheels from here even to hosts that reach a registry"),
    trust: bool = TRUST,
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Install this evener, and the version of torch on this machine, on every host of the fleet.

    Each host gets a virtual environment in its working directory, with packages from the registry of its own pip, or
    from this machine if it reaches none. Installed packages stay; a second run changes nothing. Exit status 1 if a host
    could not be set up.
    """
    import json
    import sys

    import msgspec

    from evener.cli.trust import approve_fleet
    from evener.core.base.errors import EvenerError, UsageError, did_you_mean
    from evener.core.cluster.fleet_file import DEFAULT_FLEET, load_fleet
    from evener.core.model.pretrained import FINE_TUNING_EXTRA
    from evener.ssh.session import connect
    from evener.transfer.host_setup import HostSetupResult, set_up_hosts
    from evener.transfer.wheels import parse_requirements

    packages = parse_requirements(more or [])
    for name in extra or []:
        if name != FINE_TUNING_EXTRA:
            raise UsageError(f"--extra {name}: ranks need no such extra", hint=f"--extra {FINE_TUNING_EXTRA}")
    fleet = fleet or DEFAULT_FLEET
    whole = load_fleet(fleet)
    for name in hosts or []:
        if name not in whole.hosts:
            raise UsageError(f"{fleet}: no host {name}", hint=did_you_mean(name, whole.hosts))
    chosen = {name: host for name, host in whole.hosts.items() if not hosts or name in hosts}
    selected = approve_fleet(msgspec.structs.replace(whole, hosts=chosen), trust)
    with connect(selected) as (sessions, unreachable), _progress(list(sessions), quiet=as_json) as tell:
        results: dict[str, HostSetupResult | EvenerError] = {
            **unreachable,
            **set_up_hosts(selected, sessions, tell, packages, extras=extra or (), sends_wheels=carry),
        }
    done = [one for name in chosen if not isinstance(one := results[name], EvenerError)]
    errors = {name: error for name in chosen if isinstance(error := results[name], EvenerError)}
    if as_json:
        findings = [
            {"check": getattr(error, "check", "setup.failed"), "severity": "error", "host": name, "peer": None,
             "evidence": str(error), "fix": error.hint}
            for name, error in errors.items()
        ]  # fmt: skip
        print_escaped(
            json.dumps({"hosts": [msgspec.to_builtins(one) for one in done], "findings": findings}, ensure_ascii=False)
        )
        return 1 if errors else 0
    for one in done:
        print_escaped(one.summary)
    for name, error in errors.items():
        text = str(error) if str(error).startswith(f"{name}:") else f"{name}: {error}"
        print_escaped(f"error: {text}", file=sys.stderr)
        for line in error.output.splitlines()[-15:]:
            print_escaped(f"  | {line}", file=sys.stderr)
        if error.hint:
            print_escaped(f"hint:  {error.hint}", file=sys.stderr)
    return 1 if errors else 0


@contextmanager
def _progress(names: list[str], *, quiet: bool) -> Iterator[SetupProgress]:
    """Yield a progress callback: on a terminal a live line per host, else a line for each step; on stderr."""
    from evener.cli.terminal import make_console

    where = make_console(stderr=True, quiet=quiet)
    if not where.is_interactive or quiet:

        def line(name: str, text: str, is_step: bool) -> None:
            if is_step:
                where.print(f"{name}: {text}", soft_wrap=True)

        yield line
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[host]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[detail]}", markup=False, style="dim", table_column=Column(no_wrap=True, ratio=1)),
    )
    with Progress(*columns, console=where, transient=True, expand=True) as bars:
        tasks = {name: bars.add_task("", host=name, detail="") for name in names}

        def show(name: str, text: str, is_step: bool) -> None:
            if is_step:
                bars.update(tasks[name], description=text, detail="")
            else:
                bars.update(tasks[name], detail=text)

        yield show
