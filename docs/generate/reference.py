"""Write docs/reference from the code: cli.md, settings.md, fleet.md and python.md. `make docs-generate`."""

from __future__ import annotations

import ast
import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
import msgspec
import typer

from evener.cli.help import example_lines, parameter_help
from evener.cli.main import app
from evener.core.cluster import fleet_file
from evener.core.run.run_spec import RunSpec
from evener.lab import lab_spec

FOLDER = Path(__file__).parents[1] / "reference"
SOURCE = Path(__file__).parents[2] / "src" / "evener"
# The public Python API: file, class or None for functions, names.
PYTHON_API: list[tuple[str, str, str | None, str]] = [
    ("evener", "worker/train/run.py", None, "join"),
    ("evener", "worker/script/program_log.py", None, "log"),
    ("evener", "core/run/run_spec.py", None, "parse_args"),
    ("evener", "report/export/dataframes.py", None, "read_run"),
    ("Run", "worker/train/run.py", "Run", "*"),
    ("TrainStep", "worker/train/train_step.py", "TrainStep", "*"),
    ("Dataset", "worker/train/datasets.py", "Dataset", "*"),
    ("RunFrames", "report/export/dataframes.py", "RunFrames", "*"),
    ("EvenerTrainer", "integrations/transformers.py", "EvenerTrainer", "__init__"),
    ("EvenerStrategy", "integrations/lightning.py", "EvenerStrategy", "__init__"),
]


def pages() -> dict[str, str]:
    """Return the text of every generated page, by its file name."""
    return {"cli.md": cli_page(), "settings.md": settings_page(), "fleet.md": fleet_page(), "python.md": python_page()}


def page(title: str, lines: list[str]) -> str:
    """Return a page with a note that it is generated."""
    return "\n".join([f"# {title}", "", "Generated from the code by `make docs-generate`.", "", *lines]).rstrip() + "\n"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return a Markdown table."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in escaped), ""]


def code(text: str) -> str:
    """Return inline code for a cell; Markdown renderers differ in how they read a | in backticks."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


# --- the command line ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Return the page of all verbs."""
    lines = []
    for path, command in commands(typer.main.get_command(app), ["evener"]):
        lines += verb_section(path, command)
    return page("Command line", lines)


def commands(command: click.Command, path: list[str]) -> Iterator[tuple[list[str], click.Command]]:
    """Yield every command that does something, depth first, with its path."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name in sorted(children or ()):
        yield from commands(children[name], [*path, name])


def verb_section(path: list[str], command: click.Command) -> list[str]:
    """Return the section of one verb."""
    text = re.sub(r"\n(?!\n)\s*(?=\S)(?<!\n\n)", " ", inspect.cleandoc(command.help or ""))
    lines = [f"## {' '.join(path)}", "", text, ""]
    if examples := example_lines(command):
        lines += ["```console", *(f"$ {example}" for example in examples), "```", ""]
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        is_argument = parameter.param_type_name == "argument"
        names = [] if is_argument else [" / ".join([*parameter.opts, *parameter.secondary_opts])]
        rows.append((code(" ".join([*names, parameter.metavar or ""]).strip()), parameter_help(parameter)))
    return [*lines, *table(("option", "meaning"), rows)]


# --- the files -------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    """Return the page of a run's settings: TOML tables, which are `evener train`'s flags."""
    lines = [
        "What a run trains and how. Every setting has one name: the flag `--batch 16` is `batch = 16` below `[train]` "
        "in a TOML file. `evener train run.toml --batch 32` reads the file, and the flag overrides it.",
        "",
    ]
    for field in msgspec.structs.fields(RunSpec):
        kind = field.type
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            lines += [f"`{field.name}` stands above all tables: {describe(RunSpec, field)}.", ""]
            continue
        rows = [
            (f"`{leaf.name}`", type_name(leaf.type), default_text(leaf), describe(kind, leaf))
            for leaf in msgspec.structs.fields(kind)
        ]
        lines += [f"## [{field.name}]", "", inspect.cleandoc(kind.__doc__ or ""), ""]
        lines += table(("key", "type", "default", "meaning"), rows)
    return page("Settings of a run", lines)


def fleet_page() -> str:
    """Return the page of fleet.toml and of a lab's file."""
    example = inspect.cleandoc(fleet_file.__doc__ or "").partition("\n\n")[2]
    lines = [
        "The hosts, how ssh reaches them, and what `evener probe` measured on and between them.",
        "",
        "```toml",
        *example.splitlines(),
        "```",
        "",
        "`ssh_options`, `python` and `workdir` can name programs. evener [asks you to approve]"
        "(../guides/follow-a-run.md#a-run-or-a-fleet-file-from-elsewhere) a file with one of them at its first use.",
        "",
    ]
    for heading, kind in (
        ("Top level", fleet_file.Fleet),
        ("[hosts.NAME]", fleet_file.HostConfig),
        ("[links.FROM.TO]", fleet_file.HostLink),
        ("[[links.FROM.TO.gains]]", fleet_file.TuningGain),
        ("[rates.NAME.DEVICE]", fleet_file.Rates),
        ("[rates.NAME.DEVICE.models.MODEL]", fleet_file.ModelRate),
        ("A lab's file: [hosts.NAME] or [defaults]", lab_spec.HostSpec),
    ):
        lines += [f"## {heading}", "", inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0], ""]
        rows = [
            (f"`{field.name}`", type_name(field.type), default_text(field), describe(kind, field))
            for field in msgspec.structs.fields(kind)
            if (kind, field.name) != (fleet_file.Fleet, "file")
        ]
        lines += table(("key", "type", "default", "meaning"), rows)
    return page("fleet.toml", lines)


def describe(kind: type, field: Any) -> str:
    """Return what a field means: its Meta description, else the comment behind it in the source."""
    hint = get_type_hints(kind, include_extras=True)[field.name]
    for meta in getattr(hint, "__metadata__", ()):
        if getattr(meta, "description", None):
            return str(meta.description)
    source = inspect.getsource(kind)
    match = re.search(rf"^    {field.name}:(?:.|\n    (?=    |\)|\]))*?  # (.+)$", source, re.MULTILINE)
    return match[1] if match and "\n    " + field.name + ":" in "\n" + source else ""


def type_name(kind: Any) -> str:
    """Return a type as a reader of TOML knows it."""
    if getattr(kind, "__metadata__", None):
        return type_name(kind.__origin__)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) in (list, tuple):
        return f"list of {type_name(parts[0])}"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return "table"
    if parts:
        return " or ".join(type_name(part) for part in parts)
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(kind, str(kind))


def default_text(field: Any) -> str:
    """Return a field's default as TOML writes it; "" if it has none that says something."""
    value = field.default
    if value is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return "required"
    if value in (msgspec.NODEFAULT, None, "", ()):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# --- Python ----------------------------------------------------------------------------------------------------------


def python_page() -> str:
    """Return the page of the public Python API, read from the source without importing torch."""
    lines = [
        "`import evener` has `evener.join`, `evener.parse_args` and `evener.read_run`; what they return stands below. "
        "[Your own training loop](../guides/own-loop.md) shows them at work. `evener.integrations` has classes for "
        "[transformers and Lightning](../guides/trainers.md).",
        "",
    ]
    heading = ""
    for title, file, class_name, names in PYTHON_API:
        tree: Any = ast.parse((SOURCE / file).read_text())
        if class_name:
            tree = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
        if title != heading:
            heading = title
            lines += [f"## {title}", ""]
            if class_name:
                lines += [without_doctest(tree), ""]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (is_listed(title, node.name, names)):
                lines += function_section(title, node)
            elif isinstance(node, ast.Assign) and class_name and isinstance(node.value, ast.Call):
                doc = next((word.value.value for word in node.value.keywords if word.arg == "doc"), None)
                if doc:
                    lines += [f"### {title}.{node.targets[0].id}", "", doc, ""]
    return page("Python", lines)


def is_listed(owner: str, name: str, wanted: str) -> bool:
    """Return whether a function is `wanted`, or a method that a program may call; `Run.steps` ends each step itself."""
    return name == wanted or (wanted == "*" and name[0] != "_" and (owner, name) != ("TrainStep", "end"))


def function_section(owner: str, node: ast.FunctionDef) -> list[str]:
    """Return one function, method or property."""
    is_property = any(isinstance(one, ast.Name) and one.id in ("property", "cached_property")
                      for one in node.decorator_list)  # fmt: skip
    lines = [f"### {owner}.{node.name}", ""]
    if not is_property:
        arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        lines += ["```python", f"{node.name}({arguments}){result}", "```", ""]
    return [*lines, without_doctest(node), ""]


def without_doctest(node: Any) -> str:
    """Return a docstring up to its doctest."""
    return (ast.get_docstring(node) or "").partition("\n>>>")[0].strip()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)
