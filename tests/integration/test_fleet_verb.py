"""`evener fleet init` writes a valid fleet file from arguments, host lists or answers, and none after an error."""

from __future__ import annotations

import getpass
import json
import random
import socket
import tomllib
from pathlib import Path
from unittest import mock

import pytest

from evener.cli import fleet, fleet_prompts
from evener.core.cluster.fleet_file import HostConfig, load_fleet
from evener.sources.import_hosts import local_host_name

from ..in_process import run_verb
from ..tiers import seeds
from .pseudo import in_terminal


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where one works, with a home of its own and a machine that is called desk."""
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(socket, "gethostname", lambda: "Desk.lan")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def init(*args):
    """(exit status, stdout, stderr)"""
    done = run_verb("fleet", "init", *args)
    return done.returncode, done.stdout, done.stderr


HOSTS = "Host attic a\n HostName 192.168.1.36\nHost github.com\n User git\nHost gpu-1\nHost gpu-2\n"


def ssh_config(folder, text=HOSTS):
    (folder.parent / "home" / ".ssh" / "config").write_text(text)


def test_hosts_given_as_arguments_are_written_to_fleet_file(folder):
    status, out, err = init("local", "attic=192.168.1.36", "ben@laptop:2222")
    assert status == 0
    assert load_fleet("fleet.toml").hosts == {
        "Desk": HostConfig(address="local"),
        "attic": HostConfig(address="192.168.1.36"),
        "laptop": HostConfig(address="laptop", user="ben", port=2222),
    }
    assert out == Path("fleet.toml").read_text()
    assert err == "fleet.toml: 3 hosts\n\n\nnext: evener doctor\n"


def test_init_prints_fleet_file_and_warns_if_local_host_is_missing(folder):
    _, _, err = init("attic", "--out", "my fleets/two.toml")
    assert 'this machine is not in the file; if it trains too, add [hosts.Desk] with address = "local"\n' in err
    assert err.endswith("next: evener doctor --fleet 'my fleets/two.toml'\n")
    assert list(load_fleet("my fleets/two.toml").hosts) == ["attic"]
    _, _, err = init("attic", "desk.lan")
    assert 'desk.lan has the name of this machine: if it is this machine, give it address = "local"\n' in err


def test_several_host_lists_are_merged(folder):
    ssh_config(folder)
    Path("hostfile").write_text("gpu-2 slots=8\ngpu-3 slots=8\n")
    Path("hosts.yml").write_text("gpu:\n  hosts:\n    gpu-[3:4]: {ansible_user: ben}\ncpu: {hosts: {old: }}\n")
    status, out, _ = init("local", "--from-ssh-config", "--hostfile", "hostfile", "--inventory", "hosts.yml",
                          "--group", "gpu", "--json")  # fmt: skip
    told = json.loads(out)
    assert status == 0
    assert list(told["hosts"]) == ["Desk", "attic", "gpu-1", "gpu-2", "gpu-3", "gpu-4"]
    assert told["hosts"] == tomllib.loads(Path("fleet.toml").read_text())["hosts"]
    assert told["left_out"] == [
        {"name": "a", "why": "the same machine as attic"}, {"name": "github.com", "why": "a git forge"}]  # fmt: skip
    assert [note.split(":")[0] for note in told["notes"]] == ["slots are not written"]
    assert (told["file"], told["next"]) == ("fleet.toml", "evener doctor")


def test_many_hosts_are_summarized_in_file_message(folder):
    status, out, err = init(*(f"gpu-{number}" for number in range(20)))
    assert status == 0
    assert out.splitlines() == list(load_fleet("fleet.toml").hosts)
    assert err.startswith("fleet.toml: 20 hosts\n")


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        ((), "no machine is named, and there is no terminal to ask in", "--from-ssh-config, --hostfile FILE or"),
        (("a b",), "'a b' names no machine", "expected a name or an IP address"),
        (("x=",), "'x=' names no machine", "expected a name or an IP address"),
        (("list",), "list is a file", "evener fleet init reads a file; for a host of this name: list=list"),
        (("--from-ssh-config",), "no such file: ssh knows no hosts by name", "evener fleet init local laptop="),
        (("--hostfile", "lits"), "lits: no such file", "did you mean list?"),
        (("--hostfile", "no/x"), "no/x: no such file", "there is no folder no either"),
        (("--inventory", "."), ".: a folder", "ansible-inventory -i . --list --yaml"),
        (("a", "--group", "x"), "--group needs an inventory", "--inventory FILE"),
        (("--inventory", "list", "--group", "x"), "list: no group x", "it has no groups"),
        (("a", "--out", "list"), "list exists already", "--out other.toml"),
        (("a", "--out", "."), ". exists already", "--out other.toml"),
        (("a", "--out", "list/x"), "list/x: not written: ", "--out FILE in another folder"),
        (("--hostfile", "idle"), "no machine is left to train on: idle: it has no slots", "laptop="),
    ],
)
def test_invalid_arguments_are_one_line_errors(folder, args, error, hint):
    Path("list").write_text("a\n")
    Path("idle").write_text("idle slots=0\n")
    before = sorted(folder.rglob("*"))
    status, out, err = init(*args)
    assert (status, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert second.startswith("hint:  ")
    assert hint in second
    assert sorted(folder.rglob("*")) == before


def test_existing_file_is_not_overwritten(folder):
    Path("fleet.toml").symlink_to("nowhere")
    assert init("a")[0] == 2
    Path("fleet.toml").unlink()
    Path("fleet.toml").write_text("mine")
    assert init("a")[2].startswith("error: fleet.toml exists already\n")
    assert Path("fleet.toml").read_text() == "mine"


@pytest.mark.parametrize("seed", seeds(20, fast=4))
def test_invalid_host_list_leaves_no_fleet_file(folder, seed):
    rng = random.Random(seed)
    for flag in ("--hostfile", "--inventory", "--ssh-config"):
        Path("junk").write_bytes(b"\xff" + rng.randbytes(rng.randrange(200)))
        status, out, err = init(flag, "junk")
        assert (status, out) == (2, "")
        assert err.startswith("error: junk")
        assert [path.name for path in folder.iterdir()] == ["junk"]


def test_local_host_gets_valid_name(monkeypatch):
    for name, called in [("Desk.lan", "Desk"), ("localhost", "here"), ("", "here"), ("büro", "buro")]:
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert local_host_name() == called


def ask(folder, *lines, status=0, end="\n"):
    typed = "".join(f"{line}\n" for line in lines[:-1]) + lines[-1] + end
    return in_terminal("fleet", "init", typed=typed, cwd=folder, status=status, HOME=str(folder.parent / "home"))


def test_ctrl_c_writes_no_fleet_file(folder, monkeypatch):
    monkeypatch.setattr(fleet_prompts, "prompt_hosts", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(fleet, "is_interactive", lambda: True)
    assert init() == (130, "", "\nnothing was written\n")


def test_interactive_answers_are_written_to_fleet_file(folder):
    ssh_config(folder)
    text = ask(folder, "2, 1", "laptop=192.168.1.28", "b[r eva@nas:22", "9", "", "b b", "ben", "maybe", "y")
    own, *others = load_fleet("fleet.toml").hosts.items()
    assert own[1] == HostConfig(address="local")
    assert dict(others) == {
        "gpu-1": HostConfig(address="gpu-1"),
        "attic": HostConfig(address="attic"),
        "laptop": HostConfig(address="192.168.1.28", user="ben"),
        "nas": HostConfig(address="nas", user="eva", port=22),
    }
    for line in (
        "~/.ssh/config has these:\n  1  attic\n  2  gpu-1\n  3  gpu-2\n",
        "  not offered: a: the same machine as attic\n  not offered: github.com: a git forge\n",
        "'b[r' names no machine: expected a name or an IP address, user@host:port,\nNAME=ADDRESS or local\n",
        "no host has number 9: 1 to 3\n",
        f"Login name on laptop [{getpass.getuser()}]: 'b b' is no login name\n",
        f"Does this machine, {own[0]}, train too? [Y/n] y or n\n",
        "fleet.toml: 5 hosts\n",
        Path("fleet.toml").read_text(),
    ):
        assert line in text
    assert text.endswith("\nnext: evener doctor\n")
    assert max(map(len, text.splitlines())) <= 80


def test_interactive_init_needs_no_ssh_config(folder):
    text = ask(folder, "attic", "", "", "n")
    assert "~/.ssh" not in text
    assert load_fleet("fleet.toml").hosts == {"attic": HostConfig(address="attic")}
    assert "this machine is not in the file" not in text  # it was asked
    Path("fleet.toml").unlink()
    text = ask(folder, "", "")
    assert [host.address for host in load_fleet("fleet.toml").hosts.values()] == ["local"]
    assert "fleet.toml exists already" in ask(folder, "x", status=2)


def test_answer_all_selects_every_ssh_host(folder):
    ssh_config(folder)
    ask(folder, "all", "", "n")
    assert list(load_fleet("fleet.toml").hosts) == ["attic", "gpu-1", "gpu-2"]


def test_invalid_ssh_config_is_reported_and_not_offered(folder):
    ssh_config(folder, "Host 'a\n")
    text = ask(folder, "a", "", "", "n")
    assert "no hosts offered from ~/.ssh/config: " in text
    assert "line 1: no closing quotation" in " ".join(text.split())


@pytest.mark.parametrize("lines", [("\x04",), ("a", "\x04", "\x04")])
def test_aborted_questions_write_nothing(folder, lines):
    text = ask(folder, *lines, status=130, end="")
    assert text.endswith("\nnothing was written\n")
    assert list(folder.iterdir()) == []
    text = ask(folder, "", "n", status=2)
    assert "error: no machine was named\n" in text
