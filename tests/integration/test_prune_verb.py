"""`evener runs --prune --fleet` over a session: it lists, and with --yes removes, what the hosts need no longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.core.cluster.fleet_file import load_fleet
from evener.core.run.trust import trust_fleet

from ..in_process import run_verb
from ..unit.test_prune_hosts import Host

HERE = ("--hosts", "here")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("COLUMNS", "160")  # so that no cell of a table is wrapped
    host = Host(tmp_path)
    host.add_run("old", trees=("own",))
    host.add_run("new", days=1, trees=("used",))
    (tmp_path / "fleet.toml").write_text(
        f'[hosts.here]\naddress = "local"\nworkdir = "{host.workdir}"\n[hosts.other]\naddress = "127.0.0.1"\nport = 1\n'
    )
    trust_fleet(load_fleet(str(tmp_path / "fleet.toml")))
    return host


def prune(host: Host, *flags: str) -> tuple[int, str, str]:
    done = run_verb("runs", "--prune", "--fleet", "fleet.toml", *flags, cwd=host.runs.parent)
    return done.returncode, done.stdout, done.stderr


def test_hosts_are_listed_with_sizes_and_pruned_with_yes(host: Host) -> None:
    status, told, _ = prune(host, *HERE)
    assert status == 0
    assert "kept on here: new, " in told
    assert "ended 8 days ago, its results are here" in told
    assert told.rstrip().endswith("; nothing is removed without --yes")
    assert (host.workdir / "runs/old/host/state.json").exists()
    removed = json.loads(prune(host, *HERE, "--yes", "--json")[1])
    assert [(entry["host"], entry["kind"]) for entry in removed["pruned"]] == [
        ("here", "run"), ("here", "tree"), ("here", "tree"),
    ]  # fmt: skip
    assert removed["removed"] is True
    assert removed["freed_bytes"] > 0
    assert [path.name for path in (host.workdir / "runs").iterdir()] == ["new"]
    assert sorted(path.name for path in host.runs.iterdir()) == ["new", "old"]
    assert "nothing to prune" in prune(host, *HERE)[1]


def test_limit_of_size_keeps_what_is_below_it(host: Host) -> None:
    assert json.loads(prune(host, *HERE, "--max-size", "1GB", "--json")[1])["pruned"] == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--hosts", "x"], "the fleet has no host x"),
        (["--max-size", "9"], "--max-size 9: expected a size"),
        (["--fewer-than", "9"], "needs --prune, without --fewer-than"),
    ],
)
def test_fleet_prune_refuses_contradicting_flags(host: Host, flags: list[str], told: str) -> None:
    status, _, error = prune(host, *flags)
    assert (status, told in error) == (2, True), error


def test_unreachable_host_is_an_error_after_the_others_are_listed(host: Host) -> None:
    status, told, error = prune(host)
    assert status == 1
    assert "ended 8 days ago" in told
    assert "error: other" in error
