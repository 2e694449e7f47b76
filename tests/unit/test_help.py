"""The help of every verb fits 80 columns, names value types and defaults, and has valid examples."""

from __future__ import annotations

import contextlib
import functools
import io
import shlex

import pytest
import typer
from typer.testing import CliRunner

from evener.cli.help import CliGroup, example_lines
from evener.cli.main import app

ROOT = typer.main.get_command(app)


def all_of(command, words=()):
    """(words, command) of a group, its verbs, and theirs."""
    yield " ".join(words), command
    for name in getattr(command, "commands", {}):
        yield from all_of(command.commands[name], (*words, name))


VERBS = dict(all_of(ROOT))


@functools.cache
def page(words, columns=80):
    """Return the help of a verb in a terminal of so many columns."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(columns))
        assert ROOT.main([*words.split(), "--help"], prog_name="evener", standalone_mode=False) == 0
    return out.getvalue()


@pytest.mark.parametrize("words", VERBS)
def test_help_fits_80_columns_and_names_value_types(words):
    text, command = page(words), VERBS[words]
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(f"Usage: evener {words}".rstrip() + " [OPTIONS]")
    assert not {"<str>", "<int>", "<bool>", "INTEGER", "FLOAT", "TEXT ", "│"} & {
        *text.replace("--prompt TEXT ", "").split()
    }
    for one in command.params:
        if not getattr(one, "is_flag", False):
            assert one.metavar, one.name
            shown = one.metavar if one.param_type_name == "argument" else f"{one.opts[0]} {one.metavar}"
            assert f"  {shown}" in text
    for line in page(words, columns=60).splitlines():
        assert len(line) <= 60 or line.startswith("  evener")  # an example stays in one line


def test_without_a_verb_a_few_commands_are_shown_and_are_valid():
    shown = page_without_verb()
    commands = [line.split("    ")[0].split("   ")[0].strip() for line in shown.splitlines()]
    assert len(commands) == 4
    assert max(map(len, shown.splitlines())) <= 80
    for command in commands:
        assert command.startswith("evener ")
    for command in commands[:3]:
        check(command, "")


def page_without_verb() -> str:
    return CliRunner().invoke(app, []).output


def test_help_shows_defaults_in_brackets():
    text = " ".join(page("bench").split())
    assert "training time of each set-up [45] " in text
    assert "model to train [char] " in text
    assert "largest absolute difference allowed [0] " in " ".join(page("verify").split())
    assert "--[no-]recompute" in page("train")
    assert "peak learning rate [0.5 / width; less with a small batch]" in " ".join(page("train").split())
    assert "None" not in text


@pytest.mark.parametrize("words", [words for words, one in VERBS.items() if words and not isinstance(one, CliGroup)])
def test_every_verb_has_a_valid_example(words):
    assert example_lines(VERBS[words])
    for line in example_lines(VERBS[words]):
        assert page(words).rstrip().find(f"\n  {line}") > 0
        check(line, words)


def test_top_level_examples_are_valid():
    for line in example_lines(ROOT):
        check(line, "")


def check(line, words):
    """A command's parser takes it; nothing is started."""
    program, *args = shlex.split(line)
    assert program == "evener"
    assert line.startswith(f"evener {words}".rstrip())
    command, context = ROOT, None
    while isinstance(command, CliGroup):
        name, *args = args
        command = command.commands[name]
    context = command.make_context(name, args)
    for value in context.params.values():
        assert value != "…"


def test_group_without_verb_prints_usage():
    done = CliRunner().invoke(app, ["lab"])
    assert done.exit_code == 2
    assert "Usage: " in done.stdout
