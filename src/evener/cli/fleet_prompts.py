"""Ask on the terminal which hosts to put into a new fleet file; prompts go to stderr."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

import msgspec

from evener.cli.terminal import make_console, print_text
from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.escaped_output import print_escaped
from evener.core.cluster.fleet_file import HostConfig
from evener.sources.hostfile import parse_host_argument
from evener.sources.import_hosts import USERNAME_PATTERN, HostList, ImportedHost, SkippedHost
from evener.sources.ssh_config import import_ssh_config

INSTRUCTIONS = "One a line: a name or address as for ssh (also user@host:port); NAME=ADDRESS calls it NAME."
END_HINT = " An empty line ends the list."


def prompt_hosts(out: Path, local_name: str) -> HostList:
    """Ask for hosts and return them; raise EOFError if input ends before any is given."""
    screen = make_console(stderr=True)
    print_text(screen, f"Which machines train together? {out} will name them; none is contacted now.")
    known, left_out = _ssh_config_hosts()
    if known:
        screen.print("\n~/.ssh/config has these:")
        for number, entry in enumerate(known, 1):
            screen.print(f"  {number}  {entry.name}", soft_wrap=True)
        for other in left_out:
            print_text(screen, f"not offered: {other.name}: {other.why}", indent=2)
    screen.print()
    print_text(
        screen, INSTRUCTIONS + (" A number selects one from above, all selects all." if known else "") + END_HINT
    )
    entries = _with_login_names(_read_hosts(known, local_name), known)
    is_here = any(entry.host.is_local for entry in entries) or _confirm(f"Does this machine, {local_name}, train too?")
    return HostList(hosts=entries if not is_here else [ImportedHost(local_name, HostConfig(address="local")), *entries])


def _ssh_config_hosts() -> tuple[list[ImportedHost], list[SkippedHost]]:
    """Return the hosts of ~/.ssh/config, and those left out."""
    try:
        listing = import_ssh_config()
    except EvenerError as error:
        if (Path.home() / ".ssh" / "config").exists():
            print_escaped(f"no hosts offered from ~/.ssh/config: {error}", file=sys.stderr)
        return [], []
    return listing.hosts, listing.skipped


def _read_hosts(known: list[ImportedHost], local_name: str) -> list[ImportedHost]:
    """Read hosts line by line until an empty line or the end of input."""
    entries: list[ImportedHost] = []
    while True:
        try:
            line = _read_answer("> ")
        except EOFError:
            if not entries:
                raise
            print_escaped(file=sys.stderr)
            return entries
        if not line:
            return entries
        for word in line.replace(",", " ").split():
            try:
                entries += _parse_entry(word, known, local_name)
            except UsageError as error:
                print_text(make_console(stderr=True), f"{error}: {error.hint}")


def _parse_entry(text: str, known: list[ImportedHost], local_name: str) -> list[ImportedHost]:
    """Return the hosts that one typed word selects: all, a number, a known name, or a new address."""
    if text == "all" and known:
        return known
    if text.isdecimal() and known:
        if not 1 <= int(text[:9]) <= len(known):
            raise UsageError(f"no host has number {text}", hint=f"1 to {len(known)}")
        return [known[int(text) - 1]]
    return [one for one in known if one.name == text] or [parse_host_argument(text, local_name)]


def _with_login_names(entries: list[ImportedHost], known: list[ImportedHost]) -> list[ImportedHost]:
    """Ask for the login name on hosts that have none, and add it to them."""
    missing = [one for one in entries if one not in known and not one.host.is_local and one.host.user is None]
    if not missing:
        return entries
    default = getpass.getuser()
    while (
        user := _read_answer(f"Login name on {', '.join(one.name for one in missing)} [{default}]: ") or default
    ) != default:
        if USERNAME_PATTERN.fullmatch(user):
            return [
                ImportedHost(one.name, msgspec.structs.replace(one.host, user=user)) if one in missing else one
                for one in entries
            ]
        print_escaped(f"{user!r} is no login name", file=sys.stderr)
    return entries


def _confirm(question: str) -> bool:
    while (answer := _read_answer(f"{question} [Y/n] ").lower()) not in ("", "y", "yes", "n", "no"):
        print_escaped("y or n", file=sys.stderr)
    return answer in ("", "y", "yes")


def _read_answer(prompt: str) -> str:
    """Prompt for a line and return it stripped; raise EOFError at the end of input."""
    print_escaped(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()
