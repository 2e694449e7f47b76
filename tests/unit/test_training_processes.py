"""Doctor takes for a training what is one, and never its own processes or another user's doctor."""

from __future__ import annotations

from typing import Any

import pytest

from evener.node.remote import facts
from evener.node.remote.process_table import Process
from evener.ssh.transport import BOOTSTRAP

STALE = {"MASTER_ADDR": "10.9.9.9", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "old"}  # in ~/.bashrc
SESSION = ["python3", "-E", "-s", "-u", "-c", BOOTSTRAP]
SSHD, SHELL = ["sshd: ann@notty"], ["bash", "-c", "…"]

# The processes from the session downwards, and the environment of the last ones; whether the last is reported.
ROWS: list[tuple[str, list[list[str]], dict[str, str], bool]] = [
    ("its own session", [SSHD, SHELL, SESSION], STALE, False),
    ("another user's session", [SSHD, SHELL, SESSION], {"MASTER_ADDR": "10.1.1.1", "WORLD_SIZE": "9"}, False),
    ("what that starts", [SSHD, SESSION, ["python3", "-c", "import torch"]], {"TORCHELASTIC_RUN_ID": "his"}, False),
    ("the command that was typed", [SSHD, ["python3", "/venv/bin/evener", "doctor"]], {"EVENER_RUN": "1"}, False),
    ("the same, by its module", [SSHD, ["python3", "-m", "evener", "doctor"]], {"EVENER_RUN": "1"}, False),
    ("a notebook in the same login environment", [SSHD, ["python3", "-m", "jupyter", "lab"]], STALE, False),
    ("torchrun", [SSHD, SHELL, ["python3", "/venv/bin/torchrun", "train.py"]], STALE, True),
    ("torchrun by its module", [SSHD, ["python3", "-m", "torch.distributed.run", "train.py"]], {}, True),
    ("a rank by hand", [SSHD, ["python3", "train.py"]], {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "2"}, True),
    ("a file called evener.py", [SSHD, ["python3", "evener.py"]], {"TORCHELASTIC_RUN_ID": "new"}, True),
]


@pytest.mark.parametrize(
    ("argvs", "environment", "is_reported"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_only_training_is_reported(
    monkeypatch: pytest.MonkeyPatch, argvs: Any, environment: Any, is_reported: bool
) -> None:
    table = {100 + i: Process(99 + i if i else 1, "S", False, 0.0, str(i)) for i in range(len(argvs))}
    texts = {f"/proc/{100 + i}/cmdline": "\0".join([*argv, ""]) for i, argv in enumerate(argvs)}
    texts[f"/proc/{99 + len(argvs)}/environ"] = "\0".join(f"{name}={value}" for name, value in environment.items())
    for name, value in STALE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(facts, "list_processes", lambda: table)
    monkeypatch.setattr(facts, "read_text", texts.get)
    monkeypatch.setattr(facts, "read_link", lambda path: None)
    monkeypatch.setattr(facts, "_describe_process", lambda pid, argv: {"pid": pid})
    found = facts._find_training_processes()
    assert found == {"stale": [], "attached": [{"pid": 99 + len(argvs)}] if is_reported else []}
