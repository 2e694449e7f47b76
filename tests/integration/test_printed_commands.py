"""The commands that verbs print for a run can be typed, whatever its folder is called."""

from __future__ import annotations

import re
import subprocess

from ..in_process import run_verb
from ..sample_runs import MEASURED, write_run

NAME = 'my lab\'s $(touch pwned); `touch pwned` "&" touch pwned'
STUB = '#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word" >>"$TYPED"; done\nprintf "\\n" >>"$TYPED"\n'


def test_printed_commands_of_verbs_run_as_typed(tmp_path, corpus):
    """Each command is typed into a shell in which `evener` writes down its arguments."""
    write_run(tmp_path / NAME, [MEASURED] * 2)
    (tmp_path / f"{NAME}.txt").write_text("a text")
    calls = [
        ("train", "--data", corpus, "--out", NAME),
        ("plan", "--nodes", "2", "--link", "1GbE", "--compute-tokens-per-s", "5", "--data", f"{NAME}.txt"),
        ("verify", NAME, "--from-step", "3"),
        ("plan", NAME),
        ("report", NAME),
    ]
    printed = [run_verb(*args, cwd=tmp_path) for args in calls]
    text = "\n".join(done.stdout + done.stderr for done in printed)
    commands = sorted({match for match in re.findall(r"(?<!`)\b(evener [a-z]+ .*)", text) if "touch" in match})
    assert len(commands) >= 3, text
    stub = tmp_path / "bin" / "evener"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    before = {*tmp_path.iterdir()} | {tmp_path / "typed"}
    for command in commands:
        typed = tmp_path / "typed"
        typed.unlink(missing_ok=True)
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False, capture_output=True,
                       env={"PATH": f"{stub.parent}:/usr/bin:/bin", "TYPED": str(typed)})  # fmt: skip
        words = typed.read_text().split("\n")[0].split("\0")
        assert any(word.rstrip(",") in (NAME, f"{NAME}.txt") for word in words), command
        assert {*tmp_path.iterdir()} <= before, command
