"""A command that a message prints can be pasted into a shell, whatever the names of files, folders and hosts are."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import evener
from evener.core.base.shell import quote_command, quote_word

from ..source_code import syntax_nodes
from .test_help import ROOT, CliGroup

SOURCE = Path(evener.__file__).parent
VERBS = "|".join(path.stem.replace("_", "-") for path in (SOURCE / "cli").glob("*.py"))
PROGRAMS = (
    f"evener (?:add|leave|{VERBS})|ssh|ssh-copy-id|ssh-keygen|ssh-add|chmod|chown|du|sed|pip install|uv pip|unset"
    "|usermod|cd|nft|ufw allow from|iptables|firewall-cmd|ip (?:link|neigh|route|address)|echo"
)
COMMAND = re.compile(rf"(?:^|[\s`(;&|])(?:{PROGRAMS})\S*(?: [^;,:`\n]*)?[ =@/]$")
QUOTED = re.compile(
    r"quote_(word|command)\(|fleet_flag\("
    r"|' '\.join\(\[\*env, quote_command\(|json\.dumps\(|recommended_flags\(|_nearest_pre"
)
# Numbers, constants, and what was quoted, or is prose that follows a command.
PLAIN = re.compile(
    r"(\w+\.)*cli_flag|flags|steps|batch|rank|port|run|me|login|folder|alternative|identity|command|home|what|entry|limits"
    r"|sudo|as_root|context\.sudo_prefix\(host\)|local_steps\[-1\]|manifest\.world_size|attempt\.port|port\.strip\(\)"
    r"|' ' if port else ''|' --private' \* machine\.private|path|problem|where|root|[A-Z_]+"
)
NOT_PRINTED = (
    "lab/drills/",
    "lab/host.py",
    "lab/programs/",
    "node/remote/",
    "cli/chaos.py",
)  # own programs, labs' names
HOSTILE = ["my lab's $(touch pwned)", "a;touch pwned", "`touch pwned`", 'say "hi" & touch pwned', "-rf", "--help", "~",
           "two\nlines", "bell\x07\x1b[31m", "caf\udce9", "*", "!!", "#x", "\\", "'", "\u202eevil", "", "$HOME",
           "caf\udce91"]  # fmt: skip


def unquoted_values() -> list[str]:
    """The values that stand unquoted in a command of an f-string."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        place = str(path.relative_to(SOURCE))
        if place.startswith(NOT_PRINTED):
            continue
        for node in syntax_nodes(path):
            text = ""
            for part in node.values if isinstance(node, ast.JoinedStr) else ():
                if isinstance(part, ast.Constant):
                    text += part.value
                elif isinstance(part, ast.FormattedValue):
                    value = ast.unparse(part.value)
                    if COMMAND.search(text) and not QUOTED.match(value) and not PLAIN.fullmatch(value):
                        found.append(f"{place}:{part.lineno}: {text[-40:]}{{{value}}}")
                    text += "X"
    return found


def test_every_value_in_a_printed_command_is_quoted():
    assert unquoted_values() == []


# What is printed in the place of a value; an option's value that is a word of the command line; other words are prose.
FILLED_IN = "7"
OPERAND = re.compile(r"[A-Z][A-Z_]*|.*[0-9/=].*|.*\w\.\w.*")
VALUES = {
    "all_reduce",
    "attic",
    "auto",
    "bpe",
    "char",
    "compute",
    "friend",
    "gpu",
    "hf",
    "laptop",
    "mine",
    "local",
    "peft",
    "png",
    "strategies",
    "transformers",
}


def printed_text(node: ast.AST, docstrings: set[int]) -> str:
    """Return the text that a string or f-string prints, with FILLED_IN for each value; "" of another node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return ""
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        elif isinstance(part, ast.FormattedValue):
            is_flag = re.search(r"flag(\(.*\))?$", ast.unparse(part.value))
            text += f" --fleet {FILLED_IN}" if is_flag else FILLED_IN
    return text


def parse_error(command: str) -> str | None:
    """Return why the command line refuses the command that the text begins with; None if it takes it.

    The command ends where a word is neither an option, nor its value, nor an operand. A verb that is only mentioned,
    with neither option nor operand, may lack its operands.
    """
    command = re.sub(r'"[^"]*"', FILLED_IN, command)
    words = re.sub(r"[`'\"(),;]|[.:](?=\s|$)", lambda match: f" {match[0]} ", command).split()[1:]
    verb, args = ROOT, []
    while isinstance(verb, CliGroup) and words and words[0] in verb.commands:
        verb = verb.commands[words.pop(0)]
    if isinstance(verb, CliGroup):
        return None
    options = {name: option for option in verb.params for name in (*option.opts, *option.secondary_opts)}
    while words:
        word = words.pop(0)
        if word == "--":
            args += [word, "train.py"]
            break
        if word.startswith("-"):
            name, has_value, _ = word.partition("=")
            if name not in options:
                return f"no option {name}"
            args.append(word)
            if not has_value and not options[name].is_flag:
                value = words.pop(0) if words else ""
                if not OPERAND.fullmatch(value) and value not in VALUES:
                    return f"{name} {value}"
                args.append(FILLED_IN if value.isupper() else value)
        elif OPERAND.fullmatch(word):
            args.append(FILLED_IN if word.isupper() else word)
        else:
            break
    if not args:
        return None
    try:
        verb.make_context(verb.name, args)
    except typer.TyperException as error:
        return error.format_message()
    return None


def printed_commands() -> list[tuple[str, str]]:
    """Return (place, text from there on) of every `evener VERB` in the source that is not in a docstring."""
    found, verbs = [], "|".join(ROOT.commands)
    for path in sorted(SOURCE.rglob("*.py")):
        if str(path.relative_to(SOURCE)).startswith("lab/drills/"):
            continue
        nodes = syntax_nodes(path)
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        docstrings |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            commands = re.findall(rf"\b(?=(evener (?:{verbs})\b[^\n]*))", printed_text(node, docstrings))
            found += [(f"{path.relative_to(SOURCE)}:{node.lineno}", command) for command in commands]  # type: ignore[attr-defined]
    return found


def test_every_printed_command_is_accepted_by_its_verb():
    commands = printed_commands()
    assert len(commands) > 200
    refused = [(place, text, error) for place, text in commands if (error := parse_error(text))]
    assert refused == []


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("evener setup --fleet 7 --hosts 7", "no option --hosts"),
        ("evener plan --fleet uses that", "--fleet uses"),
        ("evener logs --rank 7 shows what it printed", "Missing argument"),
        ("evener logs --rank last RUN", "--rank last"),
        ("evener verify RUN --replay 20 on each host, which", None),
        ("evener fetch copies it", None),
    ],
)
def test_printed_command_with_a_mistake_is_detected(command, error):
    found = parse_error(command)
    assert (found or "").startswith(error or "")
    assert bool(found) == bool(error)


@pytest.mark.parametrize("shell", ["bash"])
@pytest.mark.parametrize("name", HOSTILE)
def test_quoted_word_is_one_operand_of_a_shell(tmp_path, monkeypatch, shell, name):
    word = quote_word(name)
    assert word.isprintable()
    shown = subprocess.run([shell, "-c", f"printf '%s\\0' {word}"], capture_output=True, cwd=tmp_path, check=True)
    expected = os.fsencode(name)
    assert shown.stdout == (b"./" if expected.startswith(b"-") else b"") + expected + b"\0"
    assert list(tmp_path.iterdir()) == []


def test_shell_splits_quoted_command_into_its_words(tmp_path):
    shown = subprocess.run(
        ["bash", "-c", quote_command(["printf", "%s\\0", *HOSTILE])], capture_output=True, check=True
    )
    assert shown.stdout.split(b"\0")[:-1] == [os.fsencode(name) for name in HOSTILE]


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_quoted_word_is_printable(text):
    assert quote_word(text).isprintable()
