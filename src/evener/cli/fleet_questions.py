"""Ask on the terminal which hosts to put into a new fleet file; prompts go to stderr."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

import msgspec

from evener.cli.terminal import console, say
from evener.core.errors import EvenerError, UsageError
from evener.core.fleet import Host
from evener.hosts.found import USER, Found, LeftOut, Listing
from evener.hosts.hostfile import of_word
from evener.hosts.sshconfig import of_ssh_config

HOW = "One a line: a name or address as for ssh (also user@host:port); NAME=ADDRESS calls it NAME."
END = " An empty line ends the list."


def ask(out: Path, here: str) -> Listing:
    """Ask for hosts and return them; raise EOFError if input ends before any is given."""
    screen = console(stderr=True)
    say(screen, f"Which machines train together? {out} will name them; none is contacted now.")
    known, left_out = _known()
    if known:
        screen.print("\n~/.ssh/config has these:")
        for number, entry in enumerate(known, 1):
            screen.print(f"  {number}  {entry.name}", soft_wrap=True)
        for other in left_out:
            say(screen, f"not offered: {other.name}: {other.why}", indent=2)
    screen.print()
    say(screen, HOW + (" A number selects one from above, all selects all." if known else "") + END)
    entries = _with_user(_machines(known, here), known)
    is_here = any(entry.host.is_local for entry in entries) or _yes(f"Does this machine, {here}, train too?")
    return Listing(found=entries if not is_here else [Found(here, Host(address="local")), *entries])


def _known() -> tuple[list[Found], list[LeftOut]]:
    """Return the hosts of ~/.ssh/config, and those left out."""
    try:
        listing = of_ssh_config()
    except EvenerError as error:
        if (Path.home() / ".ssh" / "config").exists():
            print(f"no hosts offered from ~/.ssh/config: {error}", file=sys.stderr)
        return [], []
    return listing.found, listing.left_out


def _machines(known: list[Found], here: str) -> list[Found]:
    """Read hosts line by line until an empty line or the end of input."""
    entries: list[Found] = []
    while True:
        try:
            line = _answer("> ")
        except EOFError:
            if not entries:
                raise
            print(file=sys.stderr)
            return entries
        if not line:
            return entries
        for word in line.replace(",", " ").split():
            try:
                entries += _of_word(word, known, here)
            except UsageError as error:
                say(console(stderr=True), f"{error}: {error.hint}")


def _of_word(word: str, known: list[Found], here: str) -> list[Found]:
    """Return the hosts that one typed word selects: all, a number, a known name, or a new address."""
    if word == "all" and known:
        return known
    if word.isdecimal() and known:
        if not 1 <= int(word[:9]) <= len(known):
            raise UsageError(f"no host has number {word}", hint=f"1 to {len(known)}")
        return [known[int(word) - 1]]
    return [one for one in known if one.name == word] or [of_word(word, here)]


def _with_user(found: list[Found], known: list[Found]) -> list[Found]:
    """Ask for the login name on hosts that have none, and add it to them."""
    missing = [one for one in found if one not in known and not one.host.is_local and one.host.user is None]
    if not missing:
        return found
    default = getpass.getuser()
    while (
        user := _answer(f"Login name on {', '.join(one.name for one in missing)} [{default}]: ") or default
    ) != default:
        if USER.fullmatch(user):
            return [
                Found(one.name, msgspec.structs.replace(one.host, user=user)) if one in missing else one
                for one in found
            ]
        print(f"{user!r} is no login name", file=sys.stderr)
    return found


def _yes(question: str) -> bool:
    while (answer := _answer(f"{question} [Y/n] ").lower()) not in ("", "y", "yes", "n", "no"):
        print("y or n", file=sys.stderr)
    return answer in ("", "y", "yes")


def _answer(prompt: str) -> str:
    """Prompt for a line and return it stripped; raise EOFError at the end of input."""
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()
