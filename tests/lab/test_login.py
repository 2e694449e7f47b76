"""Doctor tells a rejected login from a login shell that breaks commands, and gives the fix."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomlkit

from evener.core.cluster.fleet_file import load_fleet
from evener.core.run.trust import trust_fleet
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.host import LabHost
from evener.lab.lab_spec import HostSpec
from tests.conftest import SlowedDown
from tests.lab.conftest import MakeLab
from tests.tiers import exhaustively


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> EmulatedLab:
    """Two hosts that no other test logs into."""
    return make_lab(a=HostSpec(), b=HostSpec())


@pytest.fixture
def b(lab: EmulatedLab) -> Iterator[LabHost]:
    """A host whose account is set right again."""
    host = lab.host("b")
    yield host
    (host.home / ".bashrc").unlink(missing_ok=True)


@pytest.fixture
def doctor(lab: EmulatedLab, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Its finding about b, which comes within seconds; `changes` are of b's entry in the fleet file."""

    def look(**changes: Any) -> dict[str, Any]:
        hosts = msgspec.to_builtins(load_fleet(lab.state.fleet_file or "").hosts)
        hosts["b"] = {key: value for key, value in (hosts["b"] | changes).items() if value is not None}
        hosts["a"] = {key: value for key, value in hosts["a"].items() if value is not None}
        path = tmp_path / "fleet.toml"
        path.write_text(tomlkit.dumps({"hosts": hosts}))
        trust_fleet(load_fleet(path))
        argv = [Path(sys.executable).with_name("evener"), "doctor", "--fleet", path, "--quick", "--json"]
        with SlowedDown() as other:
            began = time.monotonic()
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
            took_s = time.monotonic() - began
        assert took_s < 10 * other.factor + 2
        (found,) = [one for one in json.loads(done.stdout)["findings"] if one["host"] == "b"]
        return dict(found)

    return look


@pytest.mark.parametrize(
    ("bashrc", "told"),
    [
        ("echo hello; exit 0", "the login shell there ended (exit status 0) before it ran a command: hello"),
        ("exec sh", "line 1 of ~/.bashrc: exec sh"),
        *exhaustively(
            ("exec 1>&2", "sends what commands print to stderr; line 1 of ~/.bashrc: exec 1>&2"),
            ("exec >>~/log", "runs commands, and what they print is lost; line 1 of ~/.bashrc: exec >>~/log"),
        ),
    ],
)
def test_login_shell_that_breaks_commands_is_reported(b: LabHost, doctor: Any, bashrc: str, told: str) -> None:
    (b.home / ".bashrc").write_text(f"{bashrc}\n")
    found = doctor()
    assert (found["check"], found["severity"]) == ("ssh.shell", "error"), found
    assert told in found["evidence"]
    assert ("[[ $- == *i* ]] || return" if "exit" in bashrc else "1i case $- in *i*) ;; *) return ;; esac") in found[
        "fix"
    ]
    (b.home / ".bashrc").write_text(f"[[ $- == *i* ]] || return\n{bashrc}\n")  # as it says
    with pytest.raises(ValueError, match="not enough values"):
        doctor()


def test_login_shell_whose_bashrc_prints_is_accepted(b: LabHost, doctor: Any) -> None:
    (b.home / ".bashrc").write_text("echo welcome; echo and hello >&2\n")
    with pytest.raises(ValueError, match="not enough values"):
        doctor()


def test_rejected_key_is_reported_with_fix(lab: EmulatedLab, b: LabHost, doctor: Any, tmp_path: Path) -> None:
    """Each with the command that mends it, and none with one that cannot."""
    unknown, fleet_file = tmp_path / "unknown", lab.state.fleet_file or ""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(unknown)], check=True)
    found = doctor(identity_file=str(unknown))
    assert found["check"] == "ssh.auth"
    assert f"it does not accept {unknown}" in found["evidence"]
    assert found["fix"] == f"ssh-copy-id -i {unknown} {load_fleet(fleet_file).hosts['b'].user}@{b.address}"

    (tmp_path / "text").write_text("no key\n")
    (tmp_path / "text").chmod(0o600)
    assert "is no private key" in doctor(identity_file=str(tmp_path / "text"))["evidence"]
