"""Which machines has a person who has no list of them? Questions on a terminal, on stderr."""

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

HOW = "One a line: a name or an address as ssh takes it (user@host:port, too); NAME=ADDRESS calls it NAME."
END = " An empty line ends the list."


def ask(out: Path, here: str) -> Listing:
    """The machines that are named. EOFError where somebody leaves."""
    screen = console(stderr=True)
    say(screen, f"Which machines train together? {out} will name them; none is contacted now.")
    known, left_out = _known()
    if known:
        screen.print("\n~/.ssh/config has these:")
        for number, one in enumerate(known, 1):
            screen.print(f"  {number}  {one.name}", soft_wrap=True)
        for other in left_out:
            say(screen, f"not offered: {other.name}: {other.why}", indent=2)
    screen.print()
    say(screen, HOW + (" A number takes one of those above, all takes all." if known else "") + END)
    found = _with_user(_machines(known, here), known)
    is_here = any(one.host.is_local for one in found) or _yes(f"Does this machine, {here}, train too?")
    return Listing(found=found if not is_here else [Found(here, Host(address="local")), *found])


def _known() -> tuple[list[Found], list[LeftOut]]:
    """What ssh's own configuration offers."""
    try:
        listing = of_ssh_config()
    except EvenerError as error:
        if (Path.home() / ".ssh" / "config").exists():
            print(f"nothing is offered from it: {error}", file=sys.stderr)
        return [], []
    return listing.found, listing.left_out


def _machines(known: list[Found], here: str) -> list[Found]:
    """As they are typed, line by line."""
    found: list[Found] = []
    while True:
        try:
            line = _answer("> ")
        except EOFError:
            if not found:
                raise
            print(file=sys.stderr)
            return found
        if not line:
            return found
        for word in line.replace(",", " ").split():
            try:
                found += _of_word(word, known, here)
            except UsageError as error:
                say(console(stderr=True), f"{error}: {error.hint}")


def _of_word(word: str, known: list[Found], here: str) -> list[Found]:
    """What one word takes."""
    if word == "all" and known:
        return known
    if word.isdecimal() and known:
        if not 1 <= int(word[:9]) <= len(known):
            raise UsageError(f"no number {word} stands above", hint=f"1 to {len(known)}")
        return [known[int(word) - 1]]
    return [one for one in known if one.name == word] or [of_word(word, here)]


def _with_user(found: list[Found], known: list[Found]) -> list[Found]:
    """With the login name on those of which neither ssh's configuration nor what was typed says it."""
    unsaid = [one for one in found if one not in known and not one.host.is_local and one.host.user is None]
    if not unsaid:
        return found
    own = getpass.getuser()
    while (user := _answer(f"Login name on {', '.join(one.name for one in unsaid)} [{own}]: ") or own) != own:
        if USER.fullmatch(user):
            return [
                Found(one.name, msgspec.structs.replace(one.host, user=user)) if one in unsaid else one for one in found
            ]
        print(f"{user!r} is no login name", file=sys.stderr)
    return found


def _yes(question: str) -> bool:
    while (answer := _answer(f"{question} [Y/n] ").lower()) not in ("", "y", "yes", "n", "no"):
        print("y or n", file=sys.stderr)
    return answer in ("", "y", "yes")


def _answer(prompt: str) -> str:
    """A line without what surrounds it; EOFError where no more will come."""
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()
