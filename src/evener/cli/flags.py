"""Options of `train` and `plan`, generated from the leaves of RunSpec, and their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING

import typer

from evener.cli.help import METAVARS
from evener.core.base.errors import UsageError

if TYPE_CHECKING:
    from typer.models import ArgumentInfo, OptionInfo

    from evener.core.run.run_spec import Flag

HELP_PANELS = {
    "data": "Data",
    "model": "Model",
    "train": "Training",
    "eval": "Evaluation",
    "checkpoint": "Checkpointing",
    "machine": "Hardware and hosts",
}

# (name, default that typer reads, type)
CommandParameter = tuple[str, "ArgumentInfo | OptionInfo", type | UnionType]


def spec_options() -> list[CommandParameter]:
    """Return one option for every leaf of RunSpec; --for stands for `max_s`."""
    from evener.core.run.run_spec import FLAGS

    options: list[CommandParameter] = []
    for flag in FLAGS.values():
        if flag.field == "max_s":
            continue
        switch = flag.kind == "yes or no"
        option = typer.Option(
            None,
            f"{flag.name}/--no-{flag.name[2:]}" if switch else flag.name,
            metavar=None if switch else _metavar(flag),
            help=flag.help if switch or flag.default is None else f"{flag.help} [{_format_default(flag.default)}]",
            rich_help_panel=HELP_PANELS.get(flag.section, "Options"),
        )
        options.append((flag.field, option, bool | None if switch else str | None))
    return options


def _metavar(flag: Flag) -> str:
    """Return the metavar of a flag's value."""
    return METAVARS.get(flag.field) or {"whole number": "N", "number": "NUMBER"}.get(flag.kind, flag.kind)


def _format_default(default: object) -> object:
    return f"{default:g}" if isinstance(default, float) else default


def command_signature(options: Sequence[CommandParameter]) -> inspect.Signature:
    """Return the signature from which typer builds a command."""
    return inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
         for name, default, annotation in options]
    )  # fmt: skip


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return (specification, texts): a name that ends in .toml is a specification, all others are texts."""
    specs = [argument for argument in arguments if argument.endswith(".toml")]
    if len(specs) > 1:
        raise UsageError(f"{specs[1]}: one specification is enough: {specs[0]}")
    return (Path(specs[0]) if specs else None), [argument for argument in arguments if argument not in specs]


def check_names_data_once(paths: Sequence[str], texts: Mapping[str, str]) -> None:
    """Raise UsageError if both the arguments and --data say what to train on."""
    if paths and "data" in texts:
        raise UsageError(f"--data {texts['data']}: {paths[0]} is what to train on", hint="one of them")


def explicit_values(flags: Mapping[str, str | bool | None]) -> dict[str, str]:
    """Return the flags that the user gave, as text."""
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in flags.items()
        if value is not None
    }
