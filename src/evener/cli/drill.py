"""evener lab drill: break one thing, see what it looks like, have it named, mend it."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from evener.core.finding import Finding
    from evener.lab.drill import Drill, Heard, Play, Seen

COLORS = {"error": "red", "warning": "yellow", "info": "cyan"}
LINES = 4  # of what a command printed


def drill(
    name: Annotated[str | None, typer.Argument(metavar="DRILL", help="which one [the list of all]")] = None,
    listed: Annotated[bool, typer.Option("--list", help="every drill, and what no lab can break")] = False,
    every: Annotated[bool, typer.Option("--all", help="all of them, a line each; without the second step")] = False,
    short: Annotated[bool, typer.Option("--short", help="leave out what it looks like without evener")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Break one thing in a fresh lab: see it without evener, with evener, and mended. Exit status 0 if it was named.

    The lab is taken down at the end, also on Ctrl-C.
    """
    from evener.core.errors import UsageError
    from evener.lab import drills

    if (name is not None) + listed + every > 1:
        raise UsageError("a name, --list and --all each say which drills", hint="give one of them")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the lab is taken down then, too
    if every:
        return _run_all(list(drills.DRILLS.values()), as_json)
    if name is None:
        return _list(as_json)
    return _run_one(drills.find(name), short, as_json)


def _list(as_json: bool) -> int:
    from evener.cli.terminal import console, table
    from evener.lab.drills import DRILLS, NOT_HERE

    lacking = {name: reason for name, one in DRILLS.items() if (reason := one.lacks()) is not None}
    if as_json:
        rows = [{"name": one.name, "fault": one.says, "check": one.check, "host": one.host, "peer": one.peer,
                 "hosts": list(one.hosts), "lacks": lacking.get(one.name)} for one in DRILLS.values()]  # fmt: skip
        print(json.dumps({"drills": rows, "not_possible": [{"check": k, "reason": v} for k, v in NOT_HERE.items()]}))
        return 0
    screen = console()
    drills = [(one.name, one.where, one.says + (f" (not here: {lacking[one.name]})" if one.name in lacking else ""))
              for one in DRILLS.values()]  # fmt: skip
    table(screen, ("drill", "named on", "what is broken"), drills, left=["named on"], text=True)
    screen.print()
    table(screen, ("what no lab can break", "why"), list(NOT_HERE.items()), text=True)
    print("\nnext: evener lab drill net.firewall", file=sys.stderr)
    return 0


def _run_all(drills: Sequence[Drill], as_json: bool) -> int:
    """A line each."""
    from evener.core.errors import EvenerError
    from evener.lab.drill import Play

    told, failed = [], 0
    for one in drills:
        reason = one.lacks()
        if reason is not None:
            result: dict[str, Any] = {"drill": one.name, "skipped": reason}
            line = f"not here: {reason}"
        else:
            try:
                with Play(one) as play:
                    play.break_it()
                    seen = play.look()
                    play.mend(seen)
                    left = _left(one, play.look_again())
                result = _as_object(one, seen, {}, [], left)
                line = f"named after {seen.took_s:.1f} s" if result["named"] else "not named"
                line += ", mended" if not left else f", not mended: {', '.join(finding.check for finding in left)}"
            except EvenerError as error:
                result, line = {"drill": one.name, "named": False, "error": str(error)}, f"failed: {error}"
            failed += not (result["named"] and result.get("mended"))
        told.append(result)
        if not as_json:
            print(f"{one.name:28} {one.where:8} {line}", flush=True)
    if as_json:
        print(json.dumps({"drills": told}))
    else:
        print(f"{len(told) - failed} of {len(told)} named and mended")
    return 1 if failed else 0


def _run_one(one: Drill, short: bool, as_json: bool) -> int:
    from evener.core.errors import EvenerError
    from evener.lab.drill import Play

    reason = one.lacks()
    if reason is not None:
        raise EvenerError(f"{one.name}: this drill is not possible here: {reason}")
    screen = Screen(quiet=as_json)
    screen.title(one)
    with screen.waiting("making a lab"), Play(one) as play:
        play.break_it()
        screen.fault(one, play)
        heard: dict[str, Heard] = {}
        if one.raw is not None and not short:
            screen.wait_for("by hand, without evener")
            heard = play.without()
        if not short:
            screen.without(one, heard)
        screen.wait_for("asking evener")
        seen = play.look()
        screen.named(one, seen)
        done = []
        left: list[Finding] = one.found_in(seen.findings)
        if one.named_in(seen.findings) is not None:
            screen.wait_for("mending")
            done = play.mend(seen)
            left = _left(one, play.look_again())
            again = {}
            if heard and one.raw is not None and one.raw.works_when_mended:
                screen.wait_for("by hand, once more")
                again = play.without()
            screen.mended(one, done, left, again)
        screen.wait_for("taking the lab down")
    result = _as_object(one, seen, heard, done, left)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    screen.verdict(one, seen, left)
    return 0 if result["named"] else 1


def _left(one: Drill, seen: Seen) -> list[Finding]:
    """What is still wrong after mending."""
    return [*one.found_in(seen.findings), *one.others_in(seen.findings)]


def _as_object(
    one: Drill, seen: Seen, heard: dict[str, Heard], done: list[str], left: Sequence[Finding]
) -> dict[str, Any]:
    import msgspec

    named = one.named_in(seen.findings)
    return {
        "drill": one.name,
        "fault": one.says,
        "broken_by": [step.text for step in one.fault],
        "without": {host: {"command": told.command, "status": told.status, "took_s": round(told.took_s, 2),
                           "lines": told.lines} for host, told in heard.items()},
        "expected": {"check": one.check, "host": one.host, "peer": one.peer},
        "command": seen.command,
        "named": named is not None,
        "took_s": round(seen.took_s, 2),
        "findings": msgspec.to_builtins(seen.findings),
        "mended_by": done,
        "mended": named is not None and not left,
        "left": msgspec.to_builtins(list(left)),
    }  # fmt: skip


class Screen:
    """The four steps, as a person reads them."""

    def __init__(self, *, quiet: bool) -> None:
        from evener.cli.terminal import console

        self._console = console(quiet=quiet, markup=True)
        told = console(stderr=True, quiet=quiet)
        self._status = told.status("")
        self._shows_status = not quiet and told.is_interactive

    def title(self, one: Drill) -> None:
        self._console.print(f"[bold]{one.name}[/]  {one.says}", soft_wrap=False)

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """While this lasts, a line on stderr says what is being done."""
        import contextlib

        self.wait_for(what)
        return self._status if self._shows_status else contextlib.nullcontext()

    def wait_for(self, what: str) -> None:
        self._status.update(f"{what} …")

    def fault(self, one: Drill, play: Play) -> None:
        self._head(1, "the fault")
        hosts = ", ".join(f"{host.name} ({host.address})" for host in play.stage.lab.hosts)
        self._text(f"A lab of {len(one.hosts)} hosts: {hosts}. Then:")
        for step in one.fault:
            self._command(step.text)

    def without(self, one: Drill, heard: dict[str, Heard]) -> None:
        self._head(2, "without evener")
        for host, told in heard.items():
            assert one.raw is not None
            self._command(one.raw.typed.format(host=host, command=told.command))
            lines = gist(told)
            for line in lines or [f"(nothing; {_ending(told)})"]:
                self._text(line, 4, "dim")
            if lines and told.status and one.raw.typed.startswith("$ ssh"):
                self._text(f"(exit status {told.status})", 4, "dim")
        waiting = [told for told in heard.values() if told.status is None and not _errors(told)]
        if waiting and one.raw is not None and one.raw.waits:
            self._text(f"After {max(told.took_s for told in waiting):.0f} s we looked away; {one.raw.waits}.")
        if one.silence:
            self._text(one.silence[0].upper() + one.silence[1:] + ".")

    def named(self, one: Drill, seen: Seen) -> None:
        self._head(3, "with evener")
        self._command(f"$ {seen.command}")
        expected = one.named_in(seen.findings)
        for finding in sorted(seen.findings, key=lambda finding: finding is not expected):
            self._finding(finding)
        if not seen.findings:
            self._text("It named nothing.")
        self._text(f"{'Named' if expected else 'Not what was expected,'} after {seen.took_s:.1f} s.")

    def mended(self, one: Drill, done: Sequence[str], left: Sequence[Finding], again: dict[str, Heard]) -> None:
        self._head(4, "mended")
        self._text("The fix as it stands:" if one.mend is None else "What stands for the fix in a lab:")
        for text in done:
            self._command(text)
        for finding in left:
            self._finding(finding)
        if not left:
            self._text("evener looks again: nothing left.")
        for told in again.values():
            for line in gist(told):
                self._text(line, 4, "dim")

    def verdict(self, one: Drill, seen: Seen, left: Sequence[Finding]) -> None:
        self._head(5, "why")
        self._text(one.why)
        self._console.print()
        named = one.named_in(seen.findings) is not None
        text = f"{one.check} on {one.where}: " + (f"named in {seen.took_s:.1f} s" if named else "not named")
        color = "green" if named and not left else "red"
        self._console.print(f"[{color}]{text}{', and mended' if named and not left else ''}[/]")

    def _head(self, number: int, text: str) -> None:
        self._console.print(f"\n[bold]{number}  {text}[/]" if number < 5 else f"\n[bold]{text}[/]")

    def _text(self, text: str, indent: int = 2, style: str | None = None) -> None:
        from evener.cli.terminal import wrapped

        for line in wrapped(text, self._console.width - indent):
            self._console.print(" " * indent + line, style=style, markup=False, soft_wrap=True)

    def _command(self, text: str) -> None:
        from rich.markup import escape

        self._console.print(f"  {escape(text)}", soft_wrap=True)

    def _finding(self, finding: Finding) -> None:
        from rich.markup import escape

        where = " ↔ ".join(name for name in (finding.host, finding.peer) if name) or "all hosts"
        color = COLORS[finding.severity]
        self._console.print(f"  [bold {color}]{finding.severity}[/]: {finding.check}  [bold]{escape(where)}[/]")
        self._text(finding.evidence, 4)
        if finding.fix:
            self._console.print(f"    [green]fix:[/] {escape(finding.fix)}", soft_wrap=True)


def gist(told: Heard, limit: int = LINES) -> list[str]:
    """The lines of a program's output that say most: its last errors, else its last lines.

    Of one that ended well the last lines but torch's warnings: the store's owner may leave first, which is no error.
    """
    said = _errors(told)[-2:] if told.status != 0 else [line for line in _lines(told) if not _is_warning(line)]
    return [line if len(line) <= 300 else line[:299] + "…" for line in said or _lines(told)[-limit:]][-limit:]


def _is_warning(line: str) -> bool:
    """One of torch's, or of the stack below it."""
    import re

    return bool(re.match(r"\[W\d{4} |Exception raised from |frame #\d+:", line))


def _lines(told: Heard) -> list[str]:
    """Without torchrun's marks and what it says of itself."""
    import re

    noise = re.compile(
        r"hostname of the client socket cannot be retrieved|ChildFailedError:$|^\W*$|"
        r"elastic/(multiprocessing|agent/server)/api\.py:(10|9)"
    )
    return [re.sub(r"^\[rank\d+\]: ?", "", line) for line in told.lines if not noise.search(line)]


def _errors(told: Heard) -> list[str]:
    import re

    error = re.compile(
        r"^\S.*(Error|Exception|CHANGED|denied|refused|failed|killed|No such|timed out|No route)|SIGKILL"
    )
    return list(dict.fromkeys(line.strip() for line in _lines(told) if error.search(line)))


def _ending(told: Heard) -> str:
    if told.status is None:
        return f"still there after {told.took_s:.0f} s"
    return f"exit status {told.status}"
