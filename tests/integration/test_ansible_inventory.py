"""Import Ansible inventories with Ansible's own program, without running anything that they name.

The examples are from its documentation [docs.ansible.com, "How to build your inventory", and the plugins ini and yaml].
"""

from __future__ import annotations

import os
import random
import re

import pytest

from evener.core.base.errors import EvenerError, UsageError
from evener.core.cluster.fleet_file import HostConfig, format_fleet, parse_fleet
from evener.sources import ansible_inventory, import_hosts
from evener.sources.ansible_inventory import import_inventory
from evener.sources.import_hosts import merge_host_lists

from ..tiers import exhaustive, exhaustively


def written(tmp_path, text, name="hosts"):
    path = tmp_path / name
    path.write_text(text)
    return path


def hosts_of(listing):
    return {one.name: one.host for one in listing.hosts}


INI = """
jumper ansible_port=5555 ansible_host=192.0.2.50
badwolf.example.com:5309

[targets]
localhost              ansible_connection=local
other2.example.com     ansible_connection=ssh        ansible_user=myotheruser
aws_host          ansible_ssh_private_key_file=/home/example/.ssh/aws.pem

[web]
host1
host2 ansible_port=222 # defined inline, interpreted as an integer
www[01:05:2].example.com

[web:vars]
http_port=8080 # all members of 'web' will inherit these

[web:children] # child groups will automatically add their hosts to parent group
nginx

[nginx]
jenkins1
tomcat3 mysecret="'03#pa33w0rd'" # proper quoting to prevent value changes

[nginx:vars]
ansible_user = nginx

[web:vars]
ansible_user = web
"""


def test_ini_inventory_yields_hosts_with_their_ssh_settings(tmp_path):
    path = written(tmp_path, INI)
    (tmp_path / "group_vars").mkdir()
    written(tmp_path / "group_vars", "ansible_user: everybody\nansible_ssh_common_args: -o ProxyJump=gate\n", "targets")
    path.chmod(0o755)
    gate = ["ProxyJump=gate"]
    assert hosts_of(import_inventory(path)) == {
        "jumper": HostConfig(address="192.0.2.50", port=5555),
        "badwolf.example.com": HostConfig(address="badwolf.example.com", port=5309),
        "localhost": HostConfig(address="local"),
        "other2.example.com": HostConfig(address="other2.example.com", user="myotheruser", ssh_options=gate),
        "aws_host": HostConfig(
            address="aws_host", user="everybody", identity_file="/home/example/.ssh/aws.pem", ssh_options=gate
        ),
        "host1": HostConfig(address="host1", user="web"),
        "host2": HostConfig(address="host2", user="web", port=222),
        "www01.example.com": HostConfig(address="www01.example.com", user="web"),
        "www03.example.com": HostConfig(address="www03.example.com", user="web"),
        "www05.example.com": HostConfig(address="www05.example.com", user="web"),
        "jenkins1": HostConfig(address="jenkins1", user="nginx"),
        "tomcat3": HostConfig(address="tomcat3", user="nginx"),
    }
    assert list(hosts_of(import_inventory(path, "nginx"))) == ["jenkins1", "tomcat3"]


YAML = """
all: # keys must be unique, i.e. only one 'hosts' per group
    hosts:
        test1:
        test2:
            ansible_user: !vault |
              $ANSIBLE_VAULT;1.1;AES256
              6265
    vars:
        ansible_user: everybody
    children:   # key order does not matter, indentation does
        other_group:
            children:
                group_x:
                    hosts:
                        test5   # Note that one machine will work without a colon
                group_y:
                    hosts:
                        test6:  # So always use a colon
            vars:
                ansible_user: other
            hosts:
                test4:
                    ansible_host: 127.0.0.1
        last_group:
            hosts:
                test1 # same host as above, additional group membership
            vars:
                ansible_port: 2222
"""


@pytest.mark.parametrize("name", ["hosts", "hosts.yaml"])
def test_yaml_inventory_yields_hosts_with_their_ssh_settings(tmp_path, name):
    listing = import_inventory(written(tmp_path, YAML, name))
    assert hosts_of(listing) == {
        "test1": HostConfig(address="test1", user="everybody", port=2222),
        "test2": HostConfig(address="test2"),
        "test5": HostConfig(address="test5", user="other"),
        "test6": HostConfig(address="test6", user="other"),
        "test4": HostConfig(address="127.0.0.1", user="other"),
    }
    assert listing.notes == [
        "the login name $ANSIBLE_VAULT;1.1;AES256 is not taken over: it is for Ansible to evaluate"
    ]


def test_importing_an_inventory_executes_nothing_in_it(tmp_path, monkeypatch):
    """Neither a script, nor a template, nor a plugin or a setting that lies beside the file or in this folder."""
    monkeypatch.chdir(tmp_path)
    ran = f"touch {tmp_path}/ran"
    plugin = f"import os\nos.system({ran!r})\n"
    for folder in ("inventory_plugins", "vars_plugins", "lookup_plugins", "callback_plugins", "plugins"):
        (tmp_path / folder).mkdir()
        for name in ("ini.py", "yaml.py", "host_group_vars.py", "pipe.py", "default.py"):
            written(tmp_path / folder, plugin, name)
    settings = "".join(f"{kind}_plugins = {tmp_path}/plugins\n" for kind in ("inventory", "vars", "lookup", "callback"))
    written(tmp_path, f"[defaults]\n{settings}[inventory]\nenable_plugins = script, ini\n", "ansible.cfg")
    script = written(tmp_path, f"#!/bin/sh\n{ran}\n", "script")
    script.chmod(0o755)
    with pytest.raises(UsageError, match="script: not read by ansible-inventory: ") as refused:
        import_inventory(script)
    assert f"ansible-inventory -i {script} --list --yaml" in refused.value.hint
    listing = import_inventory(written(tmp_path, f"a ansible_host=\"{{{{ lookup('pipe', '{ran}') }}}}\"\nb\n", "hosts"))
    assert hosts_of(listing) == {"b": HostConfig(address="b")}
    assert [one.name for one in listing.skipped] == ["a"]
    assert not (tmp_path / "ran").exists()
    assert not any(path.name == "__pycache__" for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x", "[gpu]\n", "it names no host"),
        ("x", "a\nb c\n", "as ini: Failed to parse inventory: Expected key=value host variable assignment, got: c"),
        ("x.yml", "a: {\n", "as yaml: YAML parsing failed"),
        ("x.yml", "plugin: aws_ec2\n", "as yaml: Plugin configuration YAML file, not YAML inventory"),
        *exhaustively(
            ("x", "[a:children]\nb\n[b:children]\na\n[b]\nx\n", "recursive dependency loop"),
            ("x.yml", "[" * 100_000, "x.yml: not read "),
        ),
    ],
)
def test_invalid_inventory_is_refused(tmp_path, name, text, told):
    with pytest.raises(UsageError, match=re.escape(told)) as refused:
        import_inventory(written(tmp_path, text, name))
    assert str(tmp_path / name) in str(refused.value)


LAUGHS = "all:\n hosts:\n  h:\n   a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"   a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)


@exhaustive
@pytest.mark.parametrize("text", [LAUGHS, "n[1:999999999]\n"], ids=["yaml", "range"])
def test_inventory_that_expands_without_end_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setattr(import_hosts, "READER_TIMEOUT_S", 4.0)
    with pytest.raises(UsageError, match=r"bomb: not read "):
        import_inventory(written(tmp_path, text, "bomb"))


PIECES = [
    "[", "]", ":", "=", "a", "b", "1:9", "::1", "[gpu]", "[gpu:vars]", "[gpu:children]", "\n", "\n", "\n  ", " ", "\t",
    "ansible_host=", "{{", "ansible_port: ", "8", "hosts:", "children:", "all:", "&x ", "*x", "<<: ", "{", "}", "- ",
    "'", '"', "#", "é", "中", "🤖", "\\", "!", "~", "..", "/", "@", "-",
]  # fmt: skip


def test_random_inventory_is_imported_or_refused_with_file_name(tmp_path):
    """Whatever stands there: a fleet that loads, or one error that names the file."""
    rng = random.Random(3)
    for name in ("hosts", "hosts.ini", "hosts.yml"):
        path = written(tmp_path, "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 60))), name)
        try:
            hosts, _ = merge_host_lists([import_inventory(path)])
        except UsageError as error:
            assert str(path) in str(error)  # noqa: PT017
            continue
        if hosts:
            assert parse_fleet(format_fleet(hosts), "fleet.toml").hosts == hosts


def test_missing_ansible_is_an_error_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ansible_inventory, "ansible_inventory_program", lambda: os.fspath(tmp_path / "none"))
    with pytest.raises(EvenerError, match="which is not installed") as refused:
        import_inventory(written(tmp_path, "a\n"))
    assert refused.value.hint == "pip install ansible-core"
