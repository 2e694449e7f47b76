"""evener lab drill: inject one fault into a fresh lab, diagnose it with and without evener, and fix it."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from evener.core.cluster.finding import Finding
    from evener.lab.drills.drill_runner import Drill, DrillDiagnosis, DrillRun, ManualOutput

MAX_OUTPUT_LINES = 4  # shown of a command's output


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
    from evener.core.base.errors import UsageError
    from evener.lab.drills import drill_catalog

    if (name is not None) + listed + every > 1:
        raise UsageError("a name, --list and --all exclude each other", hint="give one of them")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the lab is taken down then, too
    if every:
        return _run_all(list(drill_catalog.DRILLS.values()), as_json)
    if name is None:
        return _list_drills(as_json)
    return _run_one(drill_catalog.find_drill(name), short, as_json)


def _list_drills(as_json: bool) -> int:
    from evener.cli.terminal import make_console, print_table
    from evener.lab.drills.drill_catalog import DRILLS, UNSUPPORTED_CHECKS

    lacking = {name: reason for name, one in DRILLS.items() if (reason := one.unsupported_reason()) is not None}
    if as_json:
        rows = [{"name": one.name, "fault": one.description, "check": one.check, "host": one.host, "peer": one.peer,
                 "hosts": list(one.hosts), "lacks": lacking.get(one.name)} for one in DRILLS.values()]  # fmt: skip
        print_escaped(
            json.dumps(
                {"drills": rows, "not_possible": [{"check": k, "reason": v} for k, v in UNSUPPORTED_CHECKS.items()]}
            )
        )
        return 0
    screen = make_console()
    drills = [
        (one.name, one.where, one.description + (f" (not here: {lacking[one.name]})" if one.name in lacking else ""))
        for one in DRILLS.values()
    ]
    print_table(screen, ("drill", "named on", "what is broken"), drills, left_aligned=["named on"], wrap_last=True)
    screen.print()
    print_table(screen, ("what no lab can break", "why"), list(UNSUPPORTED_CHECKS.items()), wrap_last=True)
    print_escaped("\nnext: evener lab drill net.firewall", file=sys.stderr)
    return 0


def _run_all(drills: Sequence[Drill], as_json: bool) -> int:
    """Run all drills and print a line for each."""
    from evener.core.base.errors import EvenerError
    from evener.lab.drills.drill_runner import DrillRun

    results, failed = [], 0
    for one in drills:
        reason = one.unsupported_reason()
        if reason is not None:
            result: dict[str, Any] = {"drill": one.name, "skipped": reason}
            line = f"not here: {reason}"
        else:
            try:
                with DrillRun(one) as play:
                    play.inject_fault()
                    diagnosis = play.diagnose()
                    play.apply_fix(diagnosis)
                    remaining = _remaining_findings(one, play.diagnose_until_fixed())
                result = _result_to_dict(one, diagnosis, {}, [], remaining)
                line = f"named after {diagnosis.took_s:.1f} s" if result["named"] else "not named"
                checks = ", ".join(finding.check for finding in remaining)
                line += f", not fixed: {checks}" if remaining else ", fixed"
            except EvenerError as error:
                result, line = {"drill": one.name, "named": False, "error": str(error)}, f"failed: {error}"
            failed += not (result["named"] and result.get("mended"))
        results.append(result)
        if not as_json:
            print_escaped(f"{one.name:28} {one.where:8} {line}", flush=True)
    if as_json:
        print_escaped(json.dumps({"drills": results}))
    else:
        print_escaped(f"{len(results) - failed} of {len(results)} named and fixed")
    return 1 if failed else 0


def _run_one(one: Drill, short: bool, as_json: bool) -> int:
    from evener.core.base.errors import EvenerError
    from evener.lab.drills.drill_runner import DrillRun

    reason = one.unsupported_reason()
    if reason is not None:
        raise EvenerError(f"{one.name}: this drill is not possible here: {reason}")
    screen = DrillPrinter(quiet=as_json)
    screen.print_title(one)
    with screen.show_status("making a lab"), DrillRun(one) as play:
        play.inject_fault()
        screen.print_fault(one, play)
        outputs: dict[str, ManualOutput] = {}
        if one.manual is not None and not short:
            screen.set_status("by hand, without evener")
            outputs = play.reproduce_manually()
        if not short:
            screen.print_without_evener(one, outputs)
        screen.set_status("asking evener")
        diagnosis = play.diagnose()
        screen.print_diagnosis(one, diagnosis)
        fixes = []
        remaining: list[Finding] = one.matching_findings(diagnosis.findings)
        if one.expected_finding(diagnosis.findings) is not None:
            screen.set_status("applying the fix")
            fixes = play.apply_fix(diagnosis)
            remaining = _remaining_findings(one, play.diagnose_until_fixed())
            rerun = {}
            if outputs and one.manual is not None and one.manual.succeeds_after_fix:
                screen.set_status("by hand, once more")
                rerun = play.reproduce_manually()
            screen.print_repair(one, fixes, remaining, rerun)
        screen.set_status("taking the lab down")
    result = _result_to_dict(one, diagnosis, outputs, fixes, remaining)
    if as_json:
        print_escaped(json.dumps(result))
    screen.print_verdict(one, diagnosis, remaining)
    return 0 if result["named"] else 1


def _remaining_findings(one: Drill, diagnosis: DrillDiagnosis) -> list[Finding]:
    """Return the findings that are left after the fix."""
    return [*one.matching_findings(diagnosis.findings), *one.unexpected_findings(diagnosis.findings)]


def _result_to_dict(
    one: Drill,
    diagnosis: DrillDiagnosis,
    outputs: dict[str, ManualOutput],
    fixes: list[str],
    remaining: Sequence[Finding],
) -> dict[str, Any]:
    import msgspec

    named = one.expected_finding(diagnosis.findings)
    return {
        "drill": one.name,
        "fault": one.description,
        "broken_by": [step.text for step in one.fault],
        "without": {host: {"command": output.command, "status": output.status, "took_s": round(output.took_s, 2),
                           "lines": output.lines} for host, output in outputs.items()},
        "expected": {"check": one.check, "host": one.host, "peer": one.peer},
        "command": diagnosis.command,
        "named": named is not None,
        "took_s": round(diagnosis.took_s, 2),
        "findings": msgspec.to_builtins(diagnosis.findings),
        "mended_by": fixes,
        "mended": named is not None and not remaining,
        "left": msgspec.to_builtins(list(remaining)),
    }  # fmt: skip


class DrillPrinter:
    """Print the steps of a drill for a person."""

    def __init__(self, *, quiet: bool) -> None:
        from evener.cli.terminal import make_console

        self._console = make_console(quiet=quiet, markup=True)
        console = make_console(stderr=True, quiet=quiet)
        self._status = console.status("")
        self._shows_status = not quiet and console.is_interactive

    def print_title(self, one: Drill) -> None:
        self._console.print(f"[bold]{one.name}[/]  {one.description}", soft_wrap=False)

    def show_status(self, what: str) -> AbstractContextManager[object]:
        """Return a context in which a status line is shown on stderr."""
        import contextlib

        self.set_status(what)
        return self._status if self._shows_status else contextlib.nullcontext()

    def set_status(self, what: str) -> None:
        self._status.update(f"{what} …")

    def print_fault(self, one: Drill, play: DrillRun) -> None:
        self._print_heading(1, "the fault")
        hosts = ", ".join(f"{host.name} ({host.address})" for host in play.context.lab.hosts)
        self._print_text(f"A lab of {len(one.hosts)} hosts: {hosts}. Then:")
        for step in one.fault:
            self._print_command(step.text)

    def print_without_evener(self, one: Drill, outputs: dict[str, ManualOutput]) -> None:
        self._print_heading(2, "without evener")
        for host, output in outputs.items():
            assert one.manual is not None
            self._print_command(one.manual.prompt.format(host=host, command=output.command))
            lines = summarize_output(output)
            for line in lines or [f"(nothing; {_format_exit(output)})"]:
                self._print_text(line, 4, "dim")
            if lines and output.status and one.manual.prompt.startswith("$ ssh"):
                self._print_text(f"(exit status {output.status})", 4, "dim")
        waiting = [output for output in outputs.values() if output.status is None and not _error_lines(output)]
        if waiting and one.manual is not None and one.manual.hang_description:
            self._print_text(
                f"After {max(output.took_s for output in waiting):.0f} s we stopped waiting; "
                f"{one.manual.hang_description}."
            )
        if one.silence_reason:
            self._print_text(one.silence_reason[0].upper() + one.silence_reason[1:] + ".")

    def print_diagnosis(self, one: Drill, diagnosis: DrillDiagnosis) -> None:
        self._print_heading(3, "with evener")
        self._print_command(f"$ {diagnosis.command}")
        expected = one.expected_finding(diagnosis.findings)
        for finding in sorted(diagnosis.findings, key=lambda finding: finding is not expected):
            self._print_finding(finding)
        if not diagnosis.findings:
            self._print_text("It found nothing.")
        self._print_text(f"{'Named' if expected else 'Not what was expected,'} after {diagnosis.took_s:.1f} s.")

    def print_repair(
        self, one: Drill, fixes: Sequence[str], remaining: Sequence[Finding], rerun: dict[str, ManualOutput]
    ) -> None:
        self._print_heading(4, "fixed")
        self._print_text("The fix, as printed:" if one.fix is None else "The equivalent of the fix in a lab:")
        for text in fixes:
            self._print_command(text)
        for finding in remaining:
            self._print_finding(finding)
        if not remaining:
            self._print_text("evener checks again: nothing left.")
        for output in rerun.values():
            for line in summarize_output(output):
                self._print_text(line, 4, "dim")

    def print_verdict(self, one: Drill, diagnosis: DrillDiagnosis, remaining: Sequence[Finding]) -> None:
        self._print_heading(5, "why")
        self._print_text(one.lesson)
        self._console.print()
        named = one.expected_finding(diagnosis.findings) is not None
        text = f"{one.check} on {one.where}: " + (f"named in {diagnosis.took_s:.1f} s" if named else "not named")
        color = "green" if named and not remaining else "red"
        self._console.print(f"[{color}]{text}{', and fixed' if named and not remaining else ''}[/]")

    def _print_heading(self, number: int, text: str) -> None:
        self._console.print(f"\n[bold]{number}  {text}[/]" if number < 5 else f"\n[bold]{text}[/]")

    def _print_text(self, text: str, indent: int = 2, style: str | None = None) -> None:
        from evener.cli.terminal import wrap_words

        for line in wrap_words(text, self._console.width - indent):
            self._console.print(" " * indent + line, style=style, markup=False, soft_wrap=True)

    def _print_command(self, text: str) -> None:
        from rich.markup import escape

        self._console.print(f"  {escape(text)}", soft_wrap=True)

    def _print_finding(self, finding: Finding) -> None:
        from rich.markup import escape

        from evener.cli.terminal import SEVERITY_COLORS

        where = " ↔ ".join(name for name in (finding.host, finding.peer) if name) or "all hosts"
        color = SEVERITY_COLORS[finding.severity]
        self._console.print(f"  [bold {color}]{finding.severity}[/]: {finding.check}  [bold]{escape(where)}[/]")
        self._print_text(finding.evidence, 4)
        if finding.fix:
            self._console.print(f"    [green]fix:[/] {escape(finding.fix)}", soft_wrap=True)


def summarize_output(output: ManualOutput, limit: int = MAX_OUTPUT_LINES) -> list[str]:
    """Return the most informative lines of a program's output: its last errors, else its last lines.

    If it succeeded, leave out torch's warnings: the store's owner may exit first, which is no error.
    """
    relevant = (
        _error_lines(output)[-2:]
        if output.status != 0
        else [line for line in _relevant_lines(output) if not _is_torch_warning(line)]
    )
    return [line if len(line) <= 300 else line[:299] + "…" for line in relevant or _relevant_lines(output)[-limit:]][
        -limit:
    ]


def _is_torch_warning(line: str) -> bool:
    """Return whether the line is a warning of torch, or a frame of its stack trace."""
    import re

    return bool(re.match(r"\[W\d{4} |Exception raised from |frame #\d+:", line))


def _relevant_lines(output: ManualOutput) -> list[str]:
    """Return the output without torchrun's rank prefixes and its own messages."""
    import re

    noise = re.compile(
        r"hostname of the client socket cannot be retrieved|ChildFailedError:$|^\W*$|"
        r"elastic/(multiprocessing|agent/server)/api\.py:(10|9)"
    )
    return [re.sub(r"^\[rank\d+\]: ?", "", line) for line in output.lines if not noise.search(line)]


def _error_lines(output: ManualOutput) -> list[str]:
    import re

    error = re.compile(
        r"^\S.*(Error|Exception|CHANGED|denied|refused|failed|killed|No such|timed out|No route)|SIGKILL"
    )
    return list(dict.fromkeys(line.strip() for line in _relevant_lines(output) if error.search(line)))


def _format_exit(output: ManualOutput) -> str:
    if output.status is None:
        return f"still running after {output.took_s:.0f} s"
    return f"exit status {output.status}"
