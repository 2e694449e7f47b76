"""Import ssh configurations as ssh itself reads them, without running the programs that they name."""

from __future__ import annotations

import random
import re
import shutil

import pytest

from evener.core.base.errors import EvenerError, UsageError
from evener.core.cluster.fleet_file import HostConfig, format_fleet, parse_fleet
from evener.sources.import_hosts import merge_host_lists
from evener.sources.ssh_config import import_ssh_config, read_settings

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home whose ~/.ssh can be filled; ssh itself expands a relative Include in the real one."""
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def hosts_of(listing):
    return {one.name: one.host for one in listing.hosts}


CONFIG = """
Include {folder}/conf.d/*.conf
Host attic a            # two names of one machine
    HostName 192.168.1.36
    User ben
Host "gpu-1" gpu-2
  hostname=%h.lab
  Port = 2222
Host *.lan !x.lan
  User lan
Host github.com
  User git
Host work
  HostName gitlab.corp.example
Host code
  HostName ssh.github.com
  Port 443
Match host attic exec "false"
  User never
  Include {folder}/never
Match all
  User anybody
Host tunnel-1
  HostName localhost
  Port 2201
Host tunnel-2
  HostName localhost
  Port 2202
Host local
  HostName 10.9.9.9
Host -p
"""


def test_ssh_config_hosts_are_imported_without_forges_and_duplicates(home, tmp_path):
    ssh = home / ".ssh"
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "2.conf").write_text("Host two one\n HostName later.lan\n")
    more = f"Host one\n HostName first.lan\n Include {tmp_path}/more\n"
    (tmp_path / "conf.d" / "1.conf").write_text(more)
    (tmp_path / "more").write_text("Port 99\nHost inner\n HostName x\nHost o*\n User inner\n")
    (tmp_path / "never").write_text("Host never\n")
    (ssh / "config").write_text(CONFIG.format(folder=tmp_path))
    listing = import_ssh_config()
    names = ["one", "two", "attic", "gpu-1", "gpu-2", "tunnel-1", "tunnel-2"]
    assert hosts_of(listing) == {name: HostConfig(address=name) for name in names}  # what else ssh knows, it knows
    assert {one.name: one.why for one in listing.skipped} == {
        "a": "the same machine as attic",
        "github.com": "a git forge",
        "work": "a git forge",
        "code": "a git forge",
        "local": "that name means this machine in a fleet file: ssh needs another alias for it",
        "-p": "not a name that every ssh accepts",
    }
    assert listing.notes == []
    settings = read_settings(ssh / "config", "one")
    assert [settings[keyword] for keyword in ("hostname", "port", "user")] == [["first.lan"], ["99"], ["inner"]]
    assert read_settings(ssh / "config", "attic")["user"] == ["ben"]


def test_settings_of_a_file_ssh_does_not_read_are_copied(home, tmp_path):
    vagrant = """Host default
  HostName 127.0.0.1
  User vagrant
  Port 2222
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  PasswordAuthentication no
  IdentityFile /home/ben/.vagrant/private_key
  IdentityFile "/home/ben/my keys/second"
  IdentitiesOnly yes
  LogLevel FATAL
  UseKeychain yes
  ProxyCommand ssh gate "nc %h %p" # not a comment
Match host 127.0.0.1
  ConnectTimeout 7
Host jump plain
  ProxyJump ben@gate:22
"""
    path = tmp_path / "list"
    path.write_text(vagrant)
    host = HostConfig(
        address="127.0.0.1", user="vagrant", port=2222, identity_file="/home/ben/.vagrant/private_key",
        ssh_options=['ProxyCommand=ssh gate "nc %h %p" # not a comment', "UserKnownHostsFile=/dev/null",
                     "StrictHostKeyChecking=false", "IdentitiesOnly=yes", "ConnectTimeout=7",
                     "IdentityFile=/home/ben/my keys/second"],
    )  # fmt: skip
    listing = import_ssh_config(path)
    jump = ["ProxyJump=ben@gate:22"]
    assert hosts_of(listing) == {
        "default": host,
        "jump": HostConfig(address="jump", ssh_options=jump),
        "plain": HostConfig(address="plain", ssh_options=jump),
    }
    assert f"with `Include {path}` in ~/.ssh/config" in listing.notes[0]
    (home / ".ssh" / "config").write_text(f"Include {path}\n")
    assert hosts_of(import_ssh_config(path)) == {
        name: HostConfig(address=name) for name in ("default", "jump", "plain")
    }


@pytest.mark.parametrize("condition", ["exec", 'host a exec"', "all\nMatch exec", "\rexec"])
def test_programs_of_a_configuration_are_not_run(home, tmp_path, monkeypatch, condition):
    monkeypatch.setenv("SHELL", "/bin/sh")
    command = f'{condition} "touch {tmp_path}/ran"'
    path = tmp_path / "list"
    proxy = f"ProxyCommand touch {tmp_path}/ran\nKnownHostsCommand /usr/bin/touch {tmp_path}/ran"
    path.write_text(
        f"Host a\n{proxy}\nPermitLocalCommand yes\nLocalCommand touch {tmp_path}/ran\nMatch {command}\nUser b\n"
    )
    try:
        (host,) = hosts_of(import_ssh_config(path)).values()
        assert host.user is None
    except UsageError as error:
        assert str(path) in str(error)  # noqa: PT017
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no Host line of it names a machine"),
        ("Host *\n User ben\n", "no Host line of it names a machine"),
        ("Host 'a\n", "line 1: no closing quotation"),
        ("Host a\n User 'ben\n", "list: not read by ssh: line 2: "),
        ("Host a\nInclude {0}\n", "list: not read by ssh: "),
        ("Host a\n Port x\n", "list: not read by ssh: line 2: "),
        ("Host a\n HostName 'b c'\n", "Host a: HostName 'b c' is neither a name"),
    ],
)
def test_config_refused_by_ssh_is_refused(home, tmp_path, text, told):
    path = tmp_path / "list"
    path.write_text(text.format(path))
    with pytest.raises(UsageError, match=re.escape(told)):
        import_ssh_config(path)


def test_missing_ssh_is_an_error_with_the_next_step(home, tmp_path, monkeypatch):
    (tmp_path / "list").write_text("Host a\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EvenerError, match="ssh, which is not installed") as refused:
        import_ssh_config(tmp_path / "list")
    assert "openssh-client" in refused.value.hint


PIECES = [
    "Host ", "Include ", "Match all", "Match host ", "HostName ", "Port ", "User ", "%h", ":", "=", "a", "b", "::1",
    "8", "\n", "\n  ", " ", "\t", "\r", "'", '"', "#", "é", "中", "\\", "!", "*", "~", "..", "/", "@", "-", "[", "]",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_random_configuration_is_imported_or_refused_with_file_name(home, tmp_path, seed):
    """Whatever stands there: a fleet that loads, or one error that names the file."""
    rng = random.Random(seed)
    path = tmp_path / "list"
    for _ in range(4):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 60)))
        path.write_bytes(rng.randbytes(rng.randrange(1, 40)) if rng.random() < 0.2 else f"Host a\n{text}".encode())
        try:
            hosts, _ = merge_host_lists([import_ssh_config(path)])
        except UsageError as error:
            assert str(path) in str(error), text  # noqa: PT017
            continue
        if hosts:
            assert parse_fleet(format_fleet(hosts), "fleet.toml").hosts == hosts
