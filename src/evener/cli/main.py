"""The `evener` command: registers all verbs and prints errors. Verbs import their layers only when called."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys

import typer

from evener.cli import (
    add_leave,
    bench,
    data,
    demo,
    doctor,
    export,
    fetch,
    fleet,
    lab,
    launch,
    logs,
    plan,
    probe,
    report,
    runs,
    sample,
    setup,
    stop,
    trace,
    train,
    verify,
    watch,
)
from evener.cli.help import CliApp
from evener.core.base import trusted
from evener.core.base.errors import EvenerError, UsageError, file_error
from evener.core.base.escaped_output import print_escaped
from evener.core.base.shell import quote_word
from evener.core.base.version import __version__

EXAMPLES = """
evener train my.txt --for 8h
evener train my.txt --on local,laptop
evener plan --model gpt2 --nodes 2 --link 1GbE --compute-tokens-per-s 500
evener report runs/first
"""
WELCOME = """\
evener train my.txt    train a model on a text; --on local,laptop: on two
evener plan --for 2d   what two days would give, and which machines help
evener demo            two machines on a slow link, emulated here
evener --help          all verbs"""

MESSAGE_REWRITES = {
    r"^Invalid value for '(.+?)': Input should be": r"\1: expected",
    "a valid integer, .*": "a whole number",
    "a valid number, .*": "a number",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    r"^(No such|Missing) command": r"\1 verb",
    r" \(Possible options: (.*)\)$": r"; there are \1",
    r"\.$": "",
}.items()

app = CliApp(
    name="evener",
    help="Train one PyTorch model on the machines you have, measure every step, and understand what happened.",
    pretty_exceptions_enable=False,
    epilog=EXAMPLES,
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="print the version and exit")
) -> None:
    if version:
        print_escaped(f"evener {__version__}")
    elif context.invoked_subcommand is None:
        print_escaped(WELCOME)


train.register(app)
plan.register(app)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("setup", epilog=setup.EXAMPLES)(setup.setup)
app.command("launch", epilog=launch.EXAMPLES)(launch.launch)
app.command("runs", epilog=runs.EXAMPLES)(runs.runs)
app.command("logs", epilog=logs.EXAMPLES)(logs.logs)
app.command("watch", epilog=watch.EXAMPLES)(watch.watch)
app.command("fetch", epilog=fetch.EXAMPLES)(fetch.fetch)
app.command("stop", epilog=stop.EXAMPLES)(stop.stop)
app.command("leave", epilog=add_leave.LEAVE_EXAMPLES)(add_leave.leave)
app.command("add", epilog=add_leave.ADD_EXAMPLES)(add_leave.add)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("demo", epilog=demo.EXAMPLES)(demo.demo)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("trace", epilog=trace.EXAMPLES)(trace.trace)
app.command("verify", epilog=verify.EXAMPLES)(verify.verify)
app.command("sample", epilog=sample.EXAMPLES)(sample.sample)
app.command("export", epilog=export.EXAMPLES)(export.export)
app.add_typer(data.app, name="data")
app.add_typer(fleet.app, name="fleet")
app.add_typer(probe.app, name="probe")
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Run the `evener` command; print an error that the user can fix as one line and a hint, never as a traceback."""
    try:
        _require_utf8_names(sys.argv[1:])
        status = app(standalone_mode=False, prog_name="evener")
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk can still be reported
    except EvenerError as error:
        _print_error(str(error), error.hint, error.output)
        status = error.exit_status
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        if error.format_message():  # a verb without its argument has printed its help
            _print_error(
                _rewrite_message(error.format_message()), f"{context.command_path if context else 'evener'} --help"
            )
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:  # `evener … | head`
        sys.stdout = None
        status = 0
    except OSError as error:
        if (problem := file_error(error)) is None:
            raise
        status = problem.exit_status
        is_of_output = _discard_unwritten_output() and error.filename is None
        _print_error(f"standard output: {problem}" if is_of_output else str(problem), problem.hint)
    if reason := trusted.pop_write_error():
        text = f"warning: the approval could not be saved: {reason}; later commands need --trust"
        print_escaped(text, file=sys.stderr)
    sys.exit(status or 0)


def _discard_unwritten_output() -> bool:
    """Discard text that cannot be written to standard output; return whether its disk is full."""
    try:
        descriptor = sys.stdout.fileno()
        is_full = stat.S_ISREG(os.fstat(descriptor).st_mode) and os.fstatvfs(descriptor).f_bavail == 0
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):  # ValueError, AttributeError: closed, or no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return True
    return is_full


def _require_utf8_names(words: list[str]) -> None:
    """Raise UsageError for an argument, or a current folder, whose name is not UTF-8, before a verb writes anything."""
    names = list(words)
    if words and not {"-h", "--help", "--version"} & {*words}:
        with contextlib.suppress(FileNotFoundError):  # it was removed
            names.append(os.getcwd())
    for name in names:
        if any("\udc80" <= character <= "\udcff" for character in name):  # how Python decodes other bytes
            raise UsageError(
                f"{name}: the name is not valid UTF-8, and evener must record it in a file",
                hint=f"rename it: mv {quote_word(name)} NEW_NAME",
            )


def _rewrite_message(message: str) -> str:
    """Shorten typer's message about a flag.

    >>> _rewrite_message("Invalid value for '--port': Input should be less than or equal to 65535")
    '--port: expected at most 65535'
    """
    for theirs, ours in MESSAGE_REWRITES:
        message = re.sub(theirs, ours, message)
    return message


def _print_error(message: str, hint: str, output: str = "") -> None:
    try:
        print_escaped(f"error: {message}", file=sys.stderr)
        for line in output.splitlines():
            print_escaped(f"  | {line}", file=sys.stderr)
        if hint:
            print_escaped(f"hint:  {hint}", file=sys.stderr)
    except OSError:  # standard error is a file on a full disk; what is left of the text must not fail at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
