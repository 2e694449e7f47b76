"""Which verbs are there? Each lives in a file of its own and imports its layer when it is called."""

from __future__ import annotations

import sys

import click
import typer

from evener import __version__
from evener.core.errors import EvenerError

app = typer.Typer(
    name="evener",
    help="Train one PyTorch model on the machines you have, measure every step, and understand what happened.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"evener {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it.")) -> None:
    pass


def _add_verbs() -> None:
    from evener.cli import bench, data, report, sample, train, verify

    train.add_to(app)
    app.command("bench")(bench.bench)
    app.command("report")(report.report)
    app.command("verify")(verify.verify)
    app.command("sample")(sample.sample)
    app.add_typer(data.app, name="data")


_add_verbs()


def main() -> None:
    """The `evener` command. Prints one line and a hint for a mistake that its user can mend."""
    try:
        status = app(standalone_mode=False)
    except EvenerError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint:  {error.hint}", file=sys.stderr)
        status = error.exit_status
    except click.UsageError as error:
        where = f" {error.ctx.command_path}" if error.ctx else ""
        print(f"error: {error.format_message()}", file=sys.stderr)
        print(f"hint:  {where.strip() or 'evener'} --help", file=sys.stderr)
        status = 2
    except (KeyboardInterrupt, click.Abort):
        status = 130
    except BrokenPipeError:
        status = 0
    sys.exit(status or 0)
