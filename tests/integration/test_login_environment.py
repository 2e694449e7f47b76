"""What a login environment breaks is named with the variable or line that does it, and the fix works as typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.doctor.checks import run_checks
from evener.doctor.connectivity import ConnectivityReport
from evener.doctor.context import CheckContext
from evener.doctor.facts import decode_facts
from evener.node.remote import facts
from evener.ssh.session import open_session


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a ~/.bashrc to be filled."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def findings(check: str, collected: dict[str, Any]) -> list[Finding]:
    decoded = decode_facts(collected)
    context = CheckContext(fleet=Fleet(hosts={"b": HostConfig(address="b")}), facts={"b": decoded}, candidates={},
                           network=ConnectivityReport(interfaces={}), errors={}, port=29500,
                           local_code_hash=decoded.evener_hash or "")  # fmt: skip
    return [one for one in run_checks(context) if one.check == check]


def collect() -> dict[str, Any]:
    """The facts of this machine, as a new login collects them."""
    session = open_session("b", HostConfig(address="local"))
    try:
        return dict(session.call("facts", "collect", python=sys.executable))
    finally:
        session.close()


def in_login(home: Path, command: str) -> str:
    """What a command prints in a shell that has read ~/.bashrc."""
    argv = ["bash", "-c", f'. "$HOME/.bashrc"; {command}']
    done = subprocess.run(
        argv, env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PYTHONHOME", "/opt/python3.8"),
        ("PYTHONPLATLIBDIR", "lib64x"),
        ("PYTHONHASHSEED", "none"),
        ("PYTHONUTF8", "yes"),
        ("PYTHONMALLOC", "fast"),
    ],
)
def test_variable_that_breaks_python_is_named_and_its_fix_works(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    (home / ".bashrc").write_text(f"export KEPT=1\nexport {variable}={value}\n")
    monkeypatch.setenv(variable, value)
    (found,) = findings("env.shadowed", collect())
    assert found.severity == "error"
    assert f"{variable}={value} in its environment: with it {sys.executable} " in found.evidence
    subprocess.run(["bash", "-c", found.fix.removeprefix("on b: ")], check=True)
    assert in_login(home, f"echo $KEPT ${{{variable}-unset}}") == "1 unset"
    monkeypatch.delenv(variable)
    collected = collect()
    assert collected["breaking_variable"] is None
    assert findings("env.shadowed", collected) == []


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("ulimit -n 64", 2),
        ("ulimit -Sn 64", 2),
        ("if true; then\n  ulimit -S -n 64\nfi", 3),
        ("ulimit -c 0 -n 64; export LATER=1", 2),
    ],
)
def test_ulimit_in_a_startup_file_is_named_and_its_fix_works(home: Path, lines: str, line: int) -> None:
    """limits.d would have no effect: the shell reads its files after PAM has set what stands there."""
    (home / ".bashrc").write_text(f"# ulimit -n 64\n{lines}\n")
    limits = {"nofile": {"soft": 64, "hard": 64}}
    collected = collect() | {"limits": limits, "limits_set_in": facts._find_limit_lines(limits)}
    (found,) = findings("limit.nofile", collected)
    assert found.fix.startswith(f"on b: sed -i.old '{line}s/")
    assert in_login(home, "ulimit -n") == "64"
    subprocess.run(["bash", "-c", found.fix.removeprefix("on b: ")], check=True)
    assert in_login(home, "ulimit -n") != "64"
    assert in_login(home, "echo $LATER") == ("1" if "LATER" in lines else "")


def test_limit_that_no_file_sets_gets_limits_d(home: Path) -> None:
    (home / ".bashrc").write_text("ulimit -n 4096\n")
    limits = {"nofile": {"soft": 64, "hard": 64}}
    (found,) = findings(
        "limit.nofile", collect() | {"limits": limits, "limits_set_in": facts._find_limit_lines(limits)}
    )
    assert found.fix.endswith("| sudo tee /etc/security/limits.d/evener.conf")
