"""A login shell whose startup file keeps commands from answering is named with its line, and the fix works as typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.base.errors import HostError
from evener.core.cluster.fleet_file import HostConfig
from evener.ssh.session import open_session
from tests.tiers import exhaustively

# Runs the last argument in a shell that reads ~/.bashrc first, as sshd does.
SSH = """#!/bin/bash
for word in "$@"; do [ "$word" = -v ] && echo "Authenticated to b" >&2; done
HOME="$LOGIN_HOME" BASH_ENV="$LOGIN_HOME/.bashrc" bash -c "${@: -1}"
exit $?
"""
REDIRECTED, LOST = "sends what commands print to stderr", "runs commands, and what they print is lost"
ENDED = "before it ran a command"

ROWS: list[tuple[str, str, bool]] = [  # a line of .bashrc, what is said, whether the line is named
    ("exec 1>&2", REDIRECTED, True),
    ("exec >&2", REDIRECTED, True),
    ("exec >>~/log", LOST, True),
    ("exec > ~/log", LOST, True),
    ("exec >>~/log 2>&1", LOST, False),  # nothing that is printed arrives
    ("exec sh", ENDED, True),
    ("exit 0", ENDED, False),
    ("exec no-tmux-here new-session", ENDED, False),
    ("if true; then exec tmux -L none attach; fi", ENDED, False),
    ("read answer", "read what was meant for the program", True),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder on a host that this machine's `ssh` reaches."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    home = tmp_path / "a home"
    home.mkdir()
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("LOGIN_HOME", str(home))
    return home


@pytest.mark.parametrize(
    ("line", "told", "is_named"), [*ROWS[:1], *exhaustively(*ROWS[1:])], ids=[row[0] for row in ROWS]
)
def test_line_that_breaks_a_login_is_named_and_its_fix_works(home: Path, line: str, told: str, is_named: bool) -> None:
    bashrc = home / ".bashrc"
    bashrc.write_text(f"# exec zsh\nexport MINE=1\n{line}\nexport LATER=1\n")
    with pytest.raises(HostError) as raised:
        open_session("b", HostConfig(address="b", python=sys.executable), connect_timeout_s=4.0)
    error = raised.value
    assert error.check == "ssh.shell"
    assert told in str(error)
    assert (f"line 3 of ~/.bashrc: {line}" in str(error)) == is_named, error
    if not is_named:
        assert "[[ $- == *i* ]] || return" in error.hint
        return
    command = re.sub(r"^on b: ", "", error.hint)
    subprocess.run(["bash", "-c", command], env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, check=True)
    open_session("b", HostConfig(address="b", python=sys.executable), connect_timeout_s=30.0).close()
    assert "MINE" in bashrc.read_text()
