"""Which runs and fleet files may be followed: those that this user wrote on this machine, or has approved.

A run directory or a fleet file that came from elsewhere is data: it is read and shown, but its hosts are not contacted
and nothing that it names is started. Two things are trusted by their digest (`core/base/trusted.py`):

    plan.json       by its exact text, wherever it lies: `write_plan` registers what evener writes
    a fleet's host  by its folder and settings, if these name programs; a host of which only the address, rates and
                    links are given may be contacted, as with ssh

Trust in a plan does not extend to the other files of its directory. `ssh/session.py` calls `require_trusted_run` and
`require_trusted_fleet` before it opens a session, so that no verb can forget it.
"""

from __future__ import annotations

import os
import shlex

import msgspec

from evener.core.base import trusted
from evener.core.base.errors import UntrustedError, UsageError
from evener.core.cluster.fleet_file import DEFAULT_WORKDIR, Fleet, HostConfig
from evener.core.run.run_plan import Plan, parse_plan, plan_digest, read_plan_text
from evener.core.run.rundir import RunDir


class TrustRequest(msgspec.Struct, frozen=True):
    """A request to trust a run or fleet file, with what that trust would allow."""

    what: str  # one sentence
    details: list[str]  # the hosts, and what would be started for them; printable
    digests: list[str]

    def to_error(self) -> UntrustedError:
        """Return the error of a command that would need this trust."""
        return UntrustedError(self.what, hint="with --trust, the same command trusts the above from now on",
                              output="\n".join(self.details))  # fmt: skip

    def approve(self) -> None:
        """Trust it from now on: exactly the content from which this request was made."""
        trusted.trust(self.digests)


def is_foreign_run(rundir: RunDir) -> bool:
    """Return whether a run has a plan that this user neither wrote on this machine nor approved."""
    text = read_plan_text(rundir)
    return text is not None and not trusted.is_trusted(plan_digest(text))


def run_trust_request(rundir: RunDir) -> TrustRequest | None:
    """Return what is not trusted of a run's plan, None if it may be followed. UsageError if it has no plan."""
    text = read_plan_text(rundir)
    if text is None:
        raise UsageError(f"{rundir}: it has no plan.json", hint="evener runs shows the runs made here")
    if trusted.is_trusted(digest := plan_digest(text)):
        return None
    plan = parse_plan(text, rundir.inside("plan.json"))
    digests = [digest, *_host_digests(plan.fleet, plan.fleet.hosts)]
    return TrustRequest(
        f"{rundir}: there is no record that you started this run on this machine, or approved it",
        _plan_details(plan),
        digests,
    )


def require_trusted_run(rundir: RunDir) -> None:
    """Raise UntrustedError if the run's plan came from elsewhere, so that its hosts must not be contacted."""
    if (request := run_trust_request(rundir)) is not None:
        raise request.to_error()


def fleet_trust_request(fleet: Fleet) -> TrustRequest | None:
    """Return what is not trusted of a fleet's hosts; None if all may be contacted.

    A fleet without a file was not read from one: evener composed it.
    """
    if fleet.file is None:
        return None
    hosts = {name: host for name, host in fleet.hosts.items()
             if host.names_programs and not trusted.is_trusted(_host_digest(fleet.file, host))}  # fmt: skip
    if not hosts:
        return None
    details = [line for name, host in hosts.items() for line in _host_details(name, host)]
    where = f"{fleet.file}: this fleet file names" if fleet.file else "the hosts of this run name"
    what = f"{where} programs to start, which you have not approved"
    return TrustRequest(what, details, _host_digests(fleet, hosts))


def require_trusted_fleet(fleet: Fleet) -> None:
    """Raise UntrustedError if settings of the fleet's hosts name programs that this user has not approved."""
    if (request := fleet_trust_request(fleet)) is not None:
        raise request.to_error()


def trust_fleet(fleet: Fleet) -> None:
    """Trust the settings of a fleet file that evener has just written for this user."""
    trusted.trust(_host_digests(fleet, fleet.hosts))


def trust_plan_hosts(plan: Plan) -> None:
    """Trust the settings of the hosts of a plan that evener has just written: one may be from another fleet file."""
    trusted.trust(_host_digests(plan.fleet, plan.fleet.hosts))


def _host_digests(fleet: Fleet, hosts: dict[str, HostConfig]) -> list[str]:
    return [_host_digest(fleet.file or "", host) for host in hosts.values() if host.names_programs]


def _host_digest(file: str, host: HostConfig) -> str:
    """Return the digest by which a host's settings are trusted.

    The folder of the file belongs to it: a relative path, as in `python = ".venv/bin/python"`, is another program in
    another folder. Rates, links and numbers of ranks do not, so that editing them needs no new approval.
    """
    folder = os.path.realpath(os.path.dirname(os.path.abspath(file))) if file else ""
    settings = [folder, host.address, host.user, host.port, host.identity_file, host.ssh_options, host.python,
                host.workdir]  # fmt: skip
    return trusted.digest("host", msgspec.json.encode(settings))


def _plan_details(plan: Plan) -> list[str]:
    """Return the lines that show what the hosts of a plan are, and what is started on them."""
    lines = []
    for host in plan.hosts:
        lines += _host_details(host.name, host.host)
        folders = dict.fromkeys(folder for folder in (host.run, host.code, host.cwd) if folder)
        environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in host.env.items())
        ranks = "" if host.agent is None else shlex.join(host.agent.program)
        lines += _printable({"folders": ", ".join(folders), "command": shlex.join(host.argv), "its ranks": ranks,
                             "with": environment, "variables of yours": " ".join(host.passed_env)})  # fmt: skip
    return lines


def _host_details(name: str, host: HostConfig) -> list[str]:
    """Return the lines that show how a host is contacted, and which programs that starts."""
    login = f"{host.user}@{host.address}" if host.user else host.address
    where = "this machine" if host.is_local else login + (f" port {host.port}" if host.port else "")
    options = [line for option in host.ssh_options for line in _printable({"ssh -o": option})]
    workdir = "" if host.workdir == DEFAULT_WORKDIR else host.workdir
    others = {"identity_file": host.identity_file or "", "python": host.python or "", "workdir": workdir}
    return [*_printable({name: where}, indent=""), *options, *_printable(others)]


def _printable(fields: dict[str, str], indent: str = "    ") -> list[str]:
    """Return a line for each field that is not empty, with control characters escaped."""
    lines = (f"{indent}{name}: {value}" for name, value in fields.items() if value)
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]
