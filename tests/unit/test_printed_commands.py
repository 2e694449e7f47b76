"""A command that a message prints can be pasted into a shell, whatever the names of files, folders and hosts are."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import evener
from evener.core.base.shell import quote_command, quote_word

from ..source_code import syntax_nodes

SOURCE = Path(evener.__file__).parent
VERBS = "|".join(path.stem.replace("_", "-") for path in (SOURCE / "cli").glob("*.py"))
PROGRAMS = (
    f"evener (?:add|leave|{VERBS})|ssh|ssh-copy-id|ssh-keygen|ssh-add|chmod|chown|du|sed|pip install|uv pip|unset"
    "|usermod|cd|nft|ufw allow from|iptables|firewall-cmd|ip (?:link|neigh|route|address)|echo"
)
COMMAND = re.compile(rf"(?:^|[\s`(;&|])(?:{PROGRAMS})\S*(?: [^;,:`\n]*)?[ =@/]$")
QUOTED = re.compile(
    r"quote_(word|command)\(|' '\.join\(\[\*env, quote_command\(|json\.dumps\(|recommended_flags\(|_nearest_pre"
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
