"""The commands that verbs print do what they say, and can be typed, whatever a run's folder is called."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from evener.core.cluster.fleet_file import load_fleet

from ..in_process import run_verb
from ..sample_runs import MEASURED, write_run

NAME = 'my lab\'s $(touch pwned); `touch pwned` "&" touch pwned'
STUB = '#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word" >>"$TYPED"; done\nprintf "\\n" >>"$TYPED"\n'


def test_printed_commands_of_verbs_run_as_typed(tmp_path, corpus, monkeypatch):
    """Each command is typed into a shell in which `evener` writes down its arguments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A current folder with a text, a program, a package, a fleet of this machine and a run."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "work"
    write_run(folder / "runs" / "a", [MEASURED] * 2)
    (folder / "docs").mkdir()
    for text in (folder / "my.txt", folder / "docs" / "a.txt"):
        text.write_text("a text of one's own. " * 400)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "train.py").write_text("print(1)\n")
    (folder / "run.sh").write_text("torchrun --nproc-per-node 2 train.py --lr 1\n")
    (folder / "fleet.toml").write_text('[hosts.here]\naddress = "local"\n')
    return folder


@pytest.mark.parametrize(
    ("given", "hinted", "made"),
    [
        ("runs --yes", "evener runs --prune", ""),
        ("runs --max-size 20GB", "evener runs --prune --fleet fleet.toml", ""),
        ("runs --fleet local", "evener runs --prune --fleet local", ""),
        ("runs --fleet fleet.toml", "evener runs --prune --fleet fleet.toml", ""),
        ("stop", "evener runs", ""),
        ("stop runs/none", "evener runs", ""),
        ("watch runs/none", "evener runs", ""),
        ("plan --data my.txt", "evener data text my.txt", "data/my/meta.json"),
        ("plan --data docs", "evener data text docs", "data/docs/meta.json"),
        ("fleet init --out x.toml", "evener fleet init local laptop=192.168.1.28 --out x.toml", "x.toml"),
        ("launch --dry-run -- pkg.train", "evener launch -- pkg/train.py ARGS", ""),
        ("launch --dry-run -- train.sh", "evener launch -- train.py ARGS", ""),
        ("launch --dry-run -- run.sh", "evener launch -- torchrun --nproc-per-node 2 train.py --lr 1", ""),
        ("launch --dry-run -- python train.py", "evener launch -- train.py", ""),
        ("launch --dry-run -- torchrun --nproc-per-node 2 train.py", "evener launch --ranks 2 -- train.py", ""),
    ],
)
def test_printed_command_does_what_it_says(workplace, given, hinted, made):
    """Run it in the folder where it was printed, launches with --dry-run. It makes the file that was missing."""
    first = run_verb(*shlex.split(given), cwd=workplace)
    assert re.search(rf"(?<!\S){re.escape(hinted)}(?![\w/])", first.stderr), first.stderr
    words = shlex.split(hinted)[1:]
    if words[0] == "launch":
        words.insert(1, "--dry-run")
    before = {*workplace.rglob("*")}
    done = run_verb(*words, cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert (workplace / made in {*workplace.rglob("*")} - before) == bool(made)
    if first.returncode == 0:  # the program was translated: both start the same
        assert _without_run_id(done.stdout) == _without_run_id(first.stdout)


def _without_run_id(text: str) -> str:
    return re.sub(r"\d{8}-\d{6}|\b[0-9a-f]{6}(?:[0-9a-f]{6})?\b", "ID", text)


def test_hint_for_a_missing_fleet_file_writes_that_file(workplace):
    hint = run_verb("doctor", "--fleet", "other.toml", cwd=workplace).stderr.splitlines()[-1]
    command = re.fullmatch(r"hint:  evener (fleet init --out other.toml) writes one", hint)
    assert command, hint
    assert run_verb(*command[1].split(), "local", cwd=workplace).returncode == 0
    assert len(load_fleet(workplace / "other.toml").hosts) == 1
