"""evener lab drill: inject one fault into a fresh lab, diagnose it with and without evener, and fix it."""

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
LINES = 4  # shown of a command's output


def drill(
    name: Annotated[str | None, typer.Argument(metavar="DRILL", help="the drill to run [list all]")] = None,
    listed: Annotated[bool, typer.Option("--list", help="list every drill, and what no lab can break")] = False,
    every: Annotated[bool, typer.Option("--all", help="run all, a line each, without the second step")] = False,
    short: Annotated[bool, typer.Option("--short", help="leave out the symptom without evener")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> int:
    """Inject one fault into a fresh lab; show its symptom, evener's diagnosis, and the fix. Exit status 0 if diagnosed.

    The lab is taken down at the end, also on Ctrl-C.
    """
    from evener.core.errors import UsageError
    from evener.lab import drills

    if (name is not None) + listed + every > 1:
        raise UsageError("a name, --list and --all exclude each other", hint="give one of them")
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
    """Run all drills and print a line for each."""
    from evener.core.errors import EvenerError
    from evener.lab.drill import Play

    results, failed = [], 0
    for one in drills:
        reason = one.lacks()
        if reason is not None:
            result: dict[str, Any] = {"drill": one.name, "skipped": reason}
            line = f"not here: {reason}"
        else:
            try:
                with Play(one) as play:
                    play.break_it()
                    diagnosis = play.look()
                    play.mend(diagnosis)
                    remaining = _left(one, play.look_again())
                result = _as_object(one, diagnosis, {}, [], remaining)
                line = f"named after {diagnosis.took_s:.1f} s" if result["named"] else "not named"
                checks = ", ".join(finding.check for finding in remaining)
                line += f", not fixed: {checks}" if remaining else ", fixed"
            except EvenerError as error:
                result, line = {"drill": one.name, "named": False, "error": str(error)}, f"failed: {error}"
            failed += not (result["named"] and result.get("mended"))
        results.append(result)
        if not as_json:
            print(f"{one.name:28} {one.where:8} {line}", flush=True)
    if as_json:
        print(json.dumps({"drills": results}))
    else:
        print(f"{len(results) - failed} of {len(results)} named and fixed")
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
        outputs: dict[str, Heard] = {}
        if one.raw is not None and not short:
            screen.wait_for("by hand, without evener")
            outputs = play.without()
        if not short:
            screen.without(one, outputs)
        screen.wait_for("asking evener")
        diagnosis = play.look()
        screen.named(one, diagnosis)
        fixes = []
        remaining: list[Finding] = one.found_in(diagnosis.findings)
        if one.named_in(diagnosis.findings) is not None:
            screen.wait_for("applying the fix")
            fixes = play.mend(diagnosis)
            remaining = _left(one, play.look_again())
            rerun = {}
            if outputs and one.raw is not None and one.raw.works_when_mended:
                screen.wait_for("by hand, once more")
                rerun = play.without()
            screen.mended(one, fixes, remaining, rerun)
        screen.wait_for("taking the lab down")
    result = _as_object(one, diagnosis, outputs, fixes, remaining)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    screen.verdict(one, diagnosis, remaining)
    return 0 if result["named"] else 1


def _left(one: Drill, seen: Seen) -> list[Finding]:
    """Return the findings that are left after the fix."""
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
    """Print the steps of a drill for a person."""

    def __init__(self, *, quiet: bool) -> None:
        from evener.cli.terminal import console

        self._console = console(quiet=quiet, markup=True)
        told = console(stderr=True, quiet=quiet)
        self._status = told.status("")
        self._shows_status = not quiet and told.is_interactive

    def title(self, one: Drill) -> None:
        self._console.print(f"[bold]{one.name}[/]  {one.says}", soft_wrap=False)

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Return a context in which a status line is shown on stderr."""
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
        for host, output in heard.items():
            assert one.raw is not None
            self._command(one.raw.typed.format(host=host, command=output.command))
            lines = gist(output)
            for line in lines or [f"(nothing; {_ending(output)})"]:
                self._text(line, 4, "dim")
            if lines and output.status and one.raw.typed.startswith("$ ssh"):
                self._text(f"(exit status {output.status})", 4, "dim")
        waiting = [output for output in heard.values() if output.status is None and not _errors(output)]
        if waiting and one.raw is not None and one.raw.waits:
            self._text(f"After {max(output.took_s for output in waiting):.0f} s we stopped waiting; {one.raw.waits}.")
        if one.silence:
            self._text(one.silence[0].upper() + one.silence[1:] + ".")

    def named(self, one: Drill, seen: Seen) -> None:
        self._head(3, "with evener")
        self._command(f"$ {seen.command}")
        expected = one.named_in(seen.findings)
        for finding in sorted(seen.findings, key=lambda finding: finding is not expected):
            self._finding(finding)
        if not seen.findings:
            self._text("It found nothing.")
        self._text(f"{'Named' if expected else 'Not what was expected,'} after {seen.took_s:.1f} s.")

    def mended(self, one: Drill, done: Sequence[str], left: Sequence[Finding], again: dict[str, Heard]) -> None:
        self._head(4, "fixed")
        self._text("The fix, as printed:" if one.mend is None else "The equivalent of the fix in a lab:")
        for text in done:
            self._command(text)
        for finding in left:
            self._finding(finding)
        if not left:
            self._text("evener checks again: nothing left.")
        for output in again.values():
            for line in gist(output):
                self._text(line, 4, "dim")

    def verdict(self, one: Drill, seen: Seen, left: Sequence[Finding]) -> None:
        self._head(5, "why")
        self._text(one.why)
        self._console.print()
        named = one.named_in(seen.findings) is not None
        text = f"{one.check} on {one.where}: " + (f"named in {seen.took_s:.1f} s" if named else "not named")
        color = "green" if named and not left else "red"
        self._console.print(f"[{color}]{text}{', and fixed' if named and not left else ''}[/]")

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
    """Return the most informative lines of a program's output: its last errors, else its last lines.

    If it succeeded, leave out torch's warnings: the store's owner may exit first, which is no error.
    """
    relevant = _errors(told)[-2:] if told.status != 0 else [line for line in _lines(told) if not _is_warning(line)]
    return [line if len(line) <= 300 else line[:299] + "…" for line in relevant or _lines(told)[-limit:]][-limit:]


def _is_warning(line: str) -> bool:
    """Return whether the line is a warning of torch, or a frame of its stack trace."""
    import re

    return bool(re.match(r"\[W\d{4} |Exception raised from |frame #\d+:", line))


def _lines(told: Heard) -> list[str]:
    """Return the output without torchrun's rank prefixes and its own messages."""
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
        return f"still running after {told.took_s:.0f} s"
    return f"exit status {told.status}"
