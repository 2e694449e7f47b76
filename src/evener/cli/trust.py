"""Approve a run or a fleet file that came from elsewhere: with --trust, or by a question on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from evener.cli.terminal import is_interactive
from evener.core.base.escaped_output import print_escaped
from evener.core.base.shell import quote_word

if TYPE_CHECKING:
    from evener.core.cluster.fleet_file import Fleet
    from evener.core.run.rundir import RunDir
    from evener.core.run.trust import TrustRequest

TRUST_HELP = "list and approve the hosts and programs that a run or fleet file from elsewhere names"
TRUST = typer.Option(False, "--trust", help=TRUST_HELP)


def approve_run(rundir: RunDir, trust: bool) -> None:
    """Return if the hosts of a run may be contacted, after a question if need be. UntrustedError if they may not."""
    from evener.core.run.trust import run_trust_request

    _approve(run_trust_request(rundir), trust)


def approve_fleet(fleet: Fleet, trust: bool) -> Fleet:
    """Return the fleet if its hosts may be contacted, after a question if need be. UntrustedError if they may not."""
    from evener.core.run.trust import fleet_trust_request

    _approve(fleet_trust_request(fleet), trust)
    return fleet


def not_contacted_text(rundir: RunDir) -> str:
    """Return the line of a verb that only looks: why it contacts no host of a run from elsewhere."""
    what = "there is no record that you started or approved this run here, so its hosts are not contacted"
    return f"{rundir}: {what}; evener fetch {quote_word(rundir)} shows what it names, and asks"


def _approve(request: TrustRequest | None, trust: bool) -> None:
    """Approve a request, or raise UntrustedError; None: there is nothing to approve."""
    if request is None:
        return
    if not trust and not is_interactive():
        raise request.to_error()
    print_escaped(f"{request.what}. It names:", file=sys.stderr)
    for line in request.details:
        print_escaped(f"  | {line}", file=sys.stderr)
    if not trust and not confirm("Contact these hosts, and start these programs, from now on? [y/N] "):
        raise request.to_error()
    request.approve()


def confirm(question: str) -> bool:
    print_escaped(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
