"""Format `--help` as plain lines of at most 80 columns: usage, description, options by topic, examples.

Not typer's boxes: their five columns leave too little for words, and rich's Markdown costs more time than all the rest.
"""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from evener.cli.terminal import wrap_words
from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_WIDTH = 80
NAME_COLUMN_WIDTH = 26  # columns of option names; help of a longer name starts on the next line

# Metavar of a value, by the parameter's name, the same in every verb. Other counts are N.
METAVARS = {
    "block_size": "TOKENS", "command": "COMMAND", "cpus": "CORES", "data": "FOLDER", "dropout": "SHARE",
    "eval_tokens": "TOKENS", "fleet": "FILE", "folder": "FOLDER", "host": "HOST", "include": "PATH",
    "init_from": "PATH", "interface": "NAME", "jitter": "PERCENT", "loss_budget": "PERCENT", "max_s": "SECONDS",
    "max_size": "SIZE", "memory": "SIZE", "min_size": "SIZE", "model": "PRESET", "mtbf_days": "DAYS", "mtu": "BYTES",
    "name": "LAB", "num_tokens": "TOKENS", "older_than": "DAYS", "op": "NAME", "other": "OTHER",
    "out": "FOLDER", "paths": "PATH", "port": "PORT", "prompt": "TEXT", "rate": "RATE", "rate_down": "RATE",
    "rate_up": "RATE", "run": "RUN", "seconds": "SECONDS", "shares": "SHARES", "sort": "COLUMN", "sync": "STRATEGY",
    "val_fraction": "SHARE", "words": "WORD",
}  # fmt: skip
ON_HELP = "machines as ssh knows them, instead of --fleet; local: this one"
BUILTIN_OPTION_HELP = {  # help of the options that typer adds
    "help": "print this and exit",
    "install_completion": "have this shell complete what you type, and exit",
    "show_completion": "print what --install-completion would install, and exit",
}


def parameter_help(parameter: Any) -> str:
    """Return a parameter's help with its default in brackets, unless the help has brackets already."""
    text, default = BUILTIN_OPTION_HELP.get(parameter.name) or parameter.help or "", parameter.default
    if default is None or default is False or default is ... or "[" in text:
        return text
    return f"{text} [{default:g}]" if isinstance(default, float) else f"{text} [{default}]"


def example_lines(command: Any) -> list[str]:
    """Return the example commands of a verb, which are the lines of its epilog."""
    return inspect.cleandoc(command.epilog or "").splitlines()


def format_help_page(command: Any, context: Any) -> str:
    """Return the whole help page of a command or group."""
    width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
    shown = [parameter for parameter in command.get_params(context) if not parameter.hidden]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    verbs = (
        [command.commands[name] for name in command.list_commands(context)] if isinstance(command, TyperGroup) else []
    )
    usage = ["[OPTIONS]", *map(_usage_argument, arguments), *(["VERB …"] if verbs else [])]
    lines = [f"Usage: {context.command_path} {' '.join(usage)}", ""]
    for paragraph in _help_paragraphs(command):
        lines += [*wrap_words(paragraph, width), ""]
    lines += _format_section(
        "Arguments", [(argument.metavar, parameter_help(argument)) for argument in arguments], width
    )
    lines += _format_section("Verbs", [(verb.name or "", _help_paragraphs(verb)[0]) for verb in verbs], width)
    topics: dict[str, list[tuple[str, str]]] = {}
    for parameter in shown:
        if parameter.param_type_name == "option":
            rows = topics.setdefault(parameter.rich_help_panel or "Options", [])
            rows.append((_option_names(parameter), parameter_help(parameter)))
    longest = max(len(name) for rows in topics.values() for name, _ in rows)
    for topic, rows in topics.items():
        lines += _format_section(topic, rows, width, longest)
    commands = [f"  {line}" for line in example_lines(command)]
    return "\n".join(
        [*lines, "Examples:" if len(commands) > 1 else "Example:", *commands] if commands else lines
    ).rstrip()


def _help_paragraphs(command: Any) -> list[str]:
    return [paragraph.replace("\n", " ") for paragraph in inspect.cleandoc(command.help or "").split("\n\n")]


def _usage_argument(argument: Any) -> str:
    name = argument.metavar + ("" if argument.nargs == 1 or argument.metavar.endswith("…") else " …")
    return name if argument.required else f"[{name}]"


def _option_names(option: Any) -> str:
    """Return an option's names and metavar: `-f, --follow`, `--[no-]recompute`, `--out FOLDER`."""
    names = [name.replace("--", "--[no-]") if option.secondary_opts else name for name in sorted(option.opts, key=len)]
    return f"{', '.join(names)} {option.metavar or ''}".rstrip()


def _format_section(title: str, rows: Sequence[tuple[str, str]], width: int, longest: int | None = None) -> list[str]:
    """Return the lines of a section, names left and help right; no lines if there are no rows."""
    if not rows:
        return []
    names = min(NAME_COLUMN_WIDTH, longest or max(len(name) for name, _ in rows))
    lines = [f"{title}:"]
    for name, text in rows:
        first, *others = wrap_words(text, width - names - 4) or [""]
        lines += (
            [f"  {name:{names}}  {first}".rstrip()] if len(name) <= names else [f"  {name}", f"{'':{names + 4}}{first}"]
        )
        lines += [f"{'':{names + 4}}{other}" for other in others]
    return [*lines, ""]


class CliCommand(TyperCommand):
    """A command whose help is formatted by `format_help_page`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        parameter: Any
        for parameter in self.params:
            if not getattr(parameter, "is_flag", False):
                usual = "N" if "int" in parameter.bare_type() else "NUMBER"
                parameter.metavar = parameter.metavar or METAVARS.get(parameter.name) or usual

    def get_help(self, ctx: Any) -> str:
        """Return the text of --help; called by click."""
        return format_help_page(self, ctx)


class CliGroup(TyperGroup):
    """A group of commands whose help is formatted by `format_help_page`."""

    def get_help(self, ctx: Any) -> str:
        """Return the text of --help; called by click."""
        return format_help_page(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does; without a verb print the help and exit with status 2."""
        if not args and not self.invoke_without_command:
            print_escaped(format_help_page(self, ctx))
            ctx.exit(2)
        return super().parse_args(ctx, args)


class CliApp(typer.Typer):
    """A Typer app that uses `CliCommand` and `CliGroup`. Its verbs with --fleet have --on too."""

    def __init__(self, **settings: Any) -> None:
        names = {"help_option_names": ["-h", "--help"]}
        super().__init__(cls=CliGroup, rich_markup_mode=None, context_settings=names, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Register a command as typer does, with `CliCommand` as its class."""
        register = super().command(name, cls=CliCommand, **settings)

        def register_verb(verb: Callable[..., Any]) -> Callable[..., Any]:
            register(_with_on(verb))
            return verb

        return register_verb


def _with_on(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return a verb that takes --fleet with the option --on, which names the machines instead; others as they are."""
    parameters = inspect.signature(verb, eval_str=True).parameters
    if "fleet" not in parameters or "on" in parameters:
        return verb

    @functools.wraps(verb)
    def verb_on(on: str | None, fleet: str | None, **values: Any) -> Any:
        if on is None:
            return verb(fleet=fleet, **values)
        from evener.cli.kept_fleets import fleet_of_names
        from evener.core.base.errors import UsageError

        if fleet is not None:
            raise UsageError(f"--on {on}: --fleet {fleet} says which machines", hint="one of them")
        with fleet_of_names(on) as path:
            return verb(fleet=path, **values)

    option = typer.Option(None, "--on", metavar="NAME,…", help=ON_HELP)
    named = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    on = inspect.Parameter("on", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=str | None)
    named.insert([*parameters].index("fleet") + 1, on)
    del verb_on.__wrapped__
    verb_on.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    verb_on.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    return verb_on
