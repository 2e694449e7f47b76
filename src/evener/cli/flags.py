"""How do the leaves of RunSpec become options of a verb? `train` and `plan` have the same ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING

import typer

from evener.cli.help import EXPECTED

if TYPE_CHECKING:
    from typer.models import ArgumentInfo, OptionInfo

    from evener.core.spec import Flag

PANELS = {
    "data": "What is read",
    "model": "What is trained",
    "train": "How it is trained",
    "eval": "How it is judged",
    "checkpoint": "What is kept",
    "machine": "On what it runs",
}

# name, what typer is told of it, type
Parameter = tuple[str, "ArgumentInfo | OptionInfo", type | UnionType]


def spec_options() -> list[Parameter]:
    """One for every leaf of RunSpec."""
    from evener.core.spec import FLAGS

    options: list[Parameter] = []
    for flag in FLAGS.values():
        switch = flag.kind == "yes or no"
        option = typer.Option(
            None,
            f"{flag.name}/--no-{flag.name[2:]}" if switch else flag.name,
            metavar=None if switch else _expected(flag),
            help=flag.help if switch or flag.default is None else f"{flag.help} [{_shown(flag.default)}]",
            rich_help_panel=PANELS.get(flag.section, "Options"),
        )
        options.append((flag.field, option, bool | None if switch else str | None))
    return options


def _expected(flag: Flag) -> str:
    """The word for its value."""
    return EXPECTED.get(flag.field) or {"whole number": "N", "number": "NUMBER"}.get(flag.kind, flag.kind)


def _shown(default: object) -> object:
    return f"{default:g}" if isinstance(default, float) else default


def signature(options: Sequence[Parameter]) -> inspect.Signature:
    """What typer reads to build a command."""
    return inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
         for name, default, annotation in options]
    )  # fmt: skip


def given(flags: Mapping[str, str | bool | None]) -> dict[str, str]:
    """The leaves that the user named, as text."""
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in flags.items()
        if value is not None
    }
