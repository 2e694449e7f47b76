"""Is a configuration of ssh read as ssh reads it? Beside `ssh -G`, the client itself."""

from __future__ import annotations

import random
import re
import shutil
import subprocess

import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import HostConfig
from evener.sources.ssh_config import import_ssh_config, parse_ssh_config, resolve_hostname

from .test_import_hosts import hosts_of, written


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home whose ~/.ssh can be filled."""
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


CONFIG = """
Include conf.d/*.conf
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
"""


def test_ssh_config_hosts_are_read(home, tmp_path):
    ssh = home / ".ssh"
    (ssh / "conf.d").mkdir()
    (ssh / "conf.d" / "2.conf").write_text("Host two one\n HostName later.lan\n")
    (ssh / "conf.d" / "1.conf").write_text("Host one\n HostName first.lan\n Include more\n")
    (ssh / "more").write_text("Port 99\nHost inner\n HostName x\nHost o*\n User inner\n")
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
    }
    assert listing.notes == []
    config = parse_ssh_config(ssh / "config")
    assert resolve_hostname("one", config.settings_for("one")) == "first.lan"
    assert config.settings_for("one")["port"] == ["99"]
    assert config.settings_for("one")["user"][0] == "inner"
    assert config.settings_for("attic")["user"] == ["ben", "anybody"]
    assert "never" not in config.aliases
    assert "inner" not in config.aliases  # its Host line stands where only `one` comes to


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
  ProxyCommand ssh gate "nc %h %p" # not a comment
"""
    path = written(tmp_path, vagrant)
    host = HostConfig(
        address="127.0.0.1", user="vagrant", port=2222, identity_file="/home/ben/.vagrant/private_key",
        ssh_options=['ProxyCommand=ssh gate "nc %h %p" # not a comment', "UserKnownHostsFile=/dev/null",
                     "StrictHostKeyChecking=no", "IdentitiesOnly=yes", "IdentityFile=/home/ben/my keys/second"],
    )  # fmt: skip
    listing = import_ssh_config(path)
    assert hosts_of(listing) == {"default": host}
    assert f"with `Include {path}` in ~/.ssh/config" in listing.notes[0]
    (home / ".ssh" / "config").write_text(f"Include {path}\n")
    assert hosts_of(import_ssh_config(path)) == {"default": HostConfig(address="default")}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no Host line of it names a machine"),
        ("Host *\n User ben\n", "no Host line of it names a machine"),
        ("Host a\n User 'ben\n", "line 2: a quotation mark that is not closed"),
        ("Include {0}\n", "files include each other without end"),
        ("Include {0}\nInclude {0}\n", "files include each other without end"),
        ("Host a\n Port x\n", "Host a: Port 'x': expected a whole number"),
        ("Host a\n HostName 'b c'\n", "Host a: HostName 'b c' is neither a name"),
    ],
)
def test_config_refused_by_ssh_is_refused(home, tmp_path, text, told):
    path = tmp_path / "list"
    path.write_text(text.format(path))
    with pytest.raises(UsageError, match=re.escape(told)):
        import_ssh_config(path)


def random_config(rng, folder):
    """A few files with what the format has, and the aliases to ask for."""
    aliases = [f"h{i}" for i in range(4)]

    def line():
        host = rng.choice(["%h.lan", f"10.0.0.{rng.randrange(9)}", '"Q.example"', "a%%b", "%%h", "x # comment"])
        equal = rng.choice([" ", "=", " = ", "\t"])
        return "  " * rng.randrange(3) + rng.choice(
            [f"HostName{equal}{host}", f"hostname{equal}{host}", f"Port{equal}{rng.randrange(1, 9999)}",
             f"USER{equal}{rng.choice(['ben', 'eva'])}", f'User{equal}"two words"', "Compression yes", "# Host h1", ""]
        )  # fmt: skip

    def block():
        patterns = [*aliases, "*", "h*", "h?", "!h1", "!h2", '"h3"', "'h0'", "H0"]
        words = [rng.choice(patterns) for _ in range(rng.randrange(1, 4))]
        heads = [f"Host {' '.join(words)}", f"host={words[0]}", "Match all", "Match host nobody.example"]
        return [rng.choice(heads), *(line() for _ in range(rng.randrange(4)))]

    def text(includes):
        lines = [line() for _ in range(rng.randrange(2))]
        for _ in range(rng.randrange(1, 5)):
            lines += block()
            if includes and rng.random() < 0.5:
                lines += [f"Include {rng.choice(includes)}", line()]
        return rng.choice(["\n", "\r\n"]).join(lines) + "\n"

    inner = [folder / "inner-1", folder / "inner-2"]
    for path in inner:
        path.write_text(text([]))
    (folder / "middle").write_text(text([inner[0], f"{folder}/none"]))
    (folder / "config").write_text(text([folder / "middle", f"{folder}/inner-*"]))
    return aliases


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
@pytest.mark.parametrize("seed", range(60))
def test_settings_match_ssh(home, tmp_path, seed):
    aliases = random_config(random.Random(seed), tmp_path)
    config = parse_ssh_config(tmp_path / "config")
    for alias in aliases[seed % 2 :: 2]:
        settings = config.settings_for(alias)
        argv = ["ssh", "-G", "-F", str(tmp_path / "config"), alias]
        told = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        assert told.returncode == 0, told.stderr
        says = dict(line.partition(" ")[::2] for line in told.stdout.splitlines())
        assert says["hostname"] == resolve_hostname(alias, settings)
        assert says["port"] == settings.get("port", ["22"])[0]
        if "user" in settings:
            assert says["user"] == settings["user"][0]
