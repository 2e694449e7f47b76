"""Which verbs are there? Each lives in a file of its own and imports its layer when it is called."""

from __future__ import annotations

import sys

import typer

from evener.cli import (
    bench,
    data,
    doctor,
    export,
    fetch,
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
    train,
    verify,
)
from evener.core.errors import EvenerError
from evener.core.version import __version__

app = typer.Typer(
    name="evener",
    help="Train one PyTorch model on the machines you have, measure every step, and understand what happened.",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    if version:
        print(f"evener {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


train.add_to(app)
plan.add_to(app)
app.command("doctor")(doctor.doctor)
app.command("setup")(setup.setup)
app.command("launch")(launch.launch)
app.command("runs")(runs.runs)
app.command("logs")(logs.logs)
app.command("fetch")(fetch.fetch)
app.command("stop")(stop.stop)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("verify")(verify.verify)
app.command("sample")(sample.sample)
app.command("export")(export.export)
app.add_typer(data.app, name="data")
app.add_typer(probe.app, name="probe")
app.add_typer(lab.app, name="lab")


def main() -> None:
    """The `evener` command. A mistake that its user can mend costs one line and a hint, never a traceback."""
    try:
        status = app(standalone_mode=False)
    except EvenerError as error:
        _tell(str(error), error.hint, error.output)
        status = error.exit_status
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        if error.format_message():  # a verb without its argument has printed its help
            _tell(error.format_message(), f"{context.command_path if context else 'evener'} --help")
        status = 2
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:  # `evener … | head`
        sys.stdout = None
        status = 0
    sys.exit(status or 0)


def _tell(message: str, hint: str, output: str = "") -> None:
    print(f"error: {message}", file=sys.stderr)
    for line in output.splitlines():
        print(f"  | {line}", file=sys.stderr)
    if hint:
        print(f"hint:  {hint}", file=sys.stderr)
