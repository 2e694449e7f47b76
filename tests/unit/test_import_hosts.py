"""Read host arguments and hostfiles as the manuals of mpirun and DeepSpeed say, and what ssh and Ansible print.

Tests of ssh and Ansible themselves are in tests/integration.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import HostConfig, format_fleet, parse_fleet
from evener.sources import import_hosts
from evener.sources.ansible_inventory import hosts_of_inventory, import_inventory, parse_inventory_list
from evener.sources.hostfile import import_hostfile, parse_host_arguments
from evener.sources.import_hosts import (
    HostList,
    ImportedHost,
    SkippedHost,
    merge_host_lists,
    parse_ssh_target,
    sanitize_host_name,
)
from evener.sources.ssh_config import import_ssh_config, list_aliases


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home whose ~/.ssh can be filled."""
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def written(tmp_path, text, name="list"):
    path = tmp_path / name
    path.write_text(text)
    return path


def hosts_of(listing):
    return {one.name: one.host for one in listing.hosts}


# Words


@pytest.mark.parametrize(
    ("word", "host"),
    [
        ("attic", HostConfig(address="attic")),
        ("192.168.1.36", HostConfig(address="192.168.1.36")),
        ("ben@attic", HostConfig(address="attic", user="ben")),
        ("attic:2222", HostConfig(address="attic", port=2222)),
        ("ssh://ben@attic.lan:2222/", HostConfig(address="attic.lan", user="ben", port=2222)),
        ("fe80::1%eth0", HostConfig(address="fe80::1%eth0")),
        ("ben@[2001:db8::7]:22", HostConfig(address="2001:db8::7", user="ben", port=22)),
        ("local", HostConfig(address="local")),
        ("localhost", HostConfig(address="local")),
        ("127.0.0.1:22", HostConfig(address="local")),
        ("localhost:2222", HostConfig(address="localhost", port=2222)),  # a container or a virtual machine
        ("root@localhost", HostConfig(address="localhost", user="root")),
        ("büro.lan", HostConfig(address="büro.lan")),
        ("CORP\\ben@attic", HostConfig(address="attic", user="CORP\\ben")),
    ],
)
def test_host_argument_yields_address_user_and_port(word, host):
    assert parse_ssh_target(word) == host


@pytest.mark.parametrize(
    "word",
    ["", "-oProxyCommand=sh", "a b", "a,b", "gpu[1-4]", "attic:0", "attic:65536", "attic:", "@attic", "ben@", "a/b",
     "$(id)", "a;b", ":::", "[fe80::1", "1:2:3:4:5:6:7:8:9:10", "a" * 400, "\udcff", "x\n", "ben@@attic"],
)  # fmt: skip
def test_invalid_host_argument_is_refused(word):
    assert parse_ssh_target(word) is None
    with pytest.raises(UsageError, match="names no machine"):
        parse_host_arguments([f"attic={word}"])


def test_generated_names_are_valid_and_unique():
    words = ["büro", "buro", "Attic", "attic", "中央", "中国", "-x-", "a" * 90, "a" * 91, "my box", "fe80::1"]
    hosts, told = merge_host_lists(
        [HostList(hosts=[ImportedHost(word, HostConfig(address=f"h{i}")) for i, word in enumerate(words)])]
    )
    names = ["buro", "buro-2", "Attic", "attic-2", "host", "host-2", "x", "a" * 63, "a" * 58 + "-2", "my-box", "fe80-1"]
    assert list(hosts) == names
    assert [host.address for host in hosts.values()] == [f"h{i}" for i in range(len(words))]
    assert "büro is called buro: a name has letters, digits and ._- only" in told.notes
    assert "attic is called attic-2: two hosts have one name" in told.notes
    assert not any(note.startswith("Attic ") for note in told.notes)
    assert list(parse_fleet(format_fleet(hosts), "fleet.toml").hosts) == names
    assert all(sanitize_host_name(name) == name for name in names)


def test_host_in_two_lists_is_imported_once():
    lists = [
        parse_host_arguments(["local", "attic=192.168.1.36", "b=attic.lan"], "desk"),
        HostList(
            hosts=[
                ImportedHost("box", HostConfig(address="192.168.1.36", user="ben")),
                ImportedHost("here", HostConfig(address="local")),
            ]
        ),
        HostList(
            hosts=[
                ImportedHost("B", HostConfig(address="Attic.LAN.")),
                ImportedHost("vm", HostConfig(address="192.168.1.36", port=2222)),
            ]
        ),
    ]
    hosts, told = merge_host_lists(lists)
    assert list(hosts) == ["desk", "attic", "b", "vm"]
    assert told.skipped == [
        SkippedHost("box", "the same machine as attic"),
        SkippedHost("here", "this machine, like desk"),
        SkippedHost("B", "the same machine as b"),
    ]


# Hostfiles

HOSTFILES = {  # text: what it means, as (name, user, port)
    # DeepSpeed, "Resource Configuration (multi-node)"
    "worker-1 slots=4\nworker-2 slots=4\n": [("worker-1", None, None), ("worker-2", None, None)],
    # Open MPI, FAQ "How do I specify the hosts on which my MPI job runs?"
    "foo.example.com\nbar.example.com slots=2\nyow.example.com slots=4 max-slots=4\n": [
        ("foo.example.com", None, None), ("bar.example.com", None, None), ("yow.example.com", None, None)],
    # MPICH, "Using the Hydra Process Manager"
    "donner\nfoo:4\nshakey:2 binding=user:0,1\n": [
        ("donner", None, None), ("foo", None, None), ("shakey", None, None)],
    # ports and names of ssh, comments, a scheduler's one line a process, Windows' ends of lines
    "# hosts\r\nben@a:2222 slots = 8 # fast\r\n\r\nb\r\nb\r\n"
    "[fe80::1]:4\r\n[fe80::2]:2222\r\nfe80::3\r\nc username=eva\r\n": [
        ("a", "ben", 2222), ("b", None, None), ("fe80::1", None, None), ("fe80::2", None, 2222),
        ("fe80::3", None, None), ("c", "eva", None)],
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTFILES)
def test_hostfile_formats_yield_name_user_and_port_but_no_ranks(tmp_path, text):
    (tmp_path / "hostfile").write_bytes(text.encode())
    listing = import_hostfile(tmp_path / "hostfile")
    assert [(one.name, one.host.user, one.host.port) for one in listing.hosts] == HOSTFILES[text]
    assert all(one.host.ranks is None for one in listing.hosts)
    assert any("slots are not written" in note for note in listing.notes)


def test_host_without_slots_is_skipped(tmp_path):
    listing = import_hostfile(written(tmp_path, "localhost\na slots=0\nb slots=1\n"))
    assert hosts_of(listing) == {"localhost": HostConfig(address="local"), "b": HostConfig(address="b")}
    assert listing.skipped == [SkippedHost("a", "it has no slots")]
    assert not listing.notes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it names no host"),
        ("# nothing\n", "it names no host"),
        ("a\nb slots=many\n", "line 2: 'slots=many': expected a whole number"),
        ("a and b\n", "line 1: 'and': expected KEY=VALUE"),
        ("gpu[01-04]\n", "line 1: 'gpu[01-04]' names no machine"),
        ("\n\na:99999\n", "line 3: 'a:99999' names no machine"),
        ("a:8x\n", "line 1: 'a:8x' names no machine"),
    ],
)
def test_invalid_hostfile_is_refused(tmp_path, text, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        import_hostfile(written(tmp_path, text))


# Ansible: what becomes of the JSON of `ansible-inventory --list`


def listed(hosts, group=None):
    """What is imported of hosts with these variables, in a group."""
    groups = {"all": {"children": ["ungrouped", "gpu"]}, "gpu": {"hosts": list(hosts)}}
    text = json.dumps({"_meta": {"hostvars": hosts}, **groups})
    return hosts_of_inventory(parse_inventory_list(text), Path("hosts.yml"), group)


def test_unsupported_ansible_features_are_reported():
    arguments = "-o ProxyJump=gate -oStrictHostKeyChecking=no -J hop -C -oControlPath=x"
    listing = listed(
        {
            "a": {"ansible_connection": "docker"},
            "b": {"ansible_host": "{{ lookup('x') }}"},
            "c": {"ansible_ssh_common_args": arguments, "ansible_ssh_pass": "!", "ansible_port": 2222},
            "d": {
                "ansible_host": "{{inventory_hostname}}.lan",
                "ansible_connection": "ansible.builtin.ssh",
                "ansible_user": "{{ me }}",
            },
            "e": {"ansible_user": None, "ansible_host": 7},
        }
    )
    options = ["ProxyJump=gate", "StrictHostKeyChecking=no", "ProxyJump=hop"]
    assert hosts_of(listing) == {
        "c": HostConfig(address="c", port=2222, ssh_options=options),
        "d": HostConfig(address="d.lan"),
        "e": HostConfig(address="7"),
    }
    assert [(one.name, one.why) for one in listing.skipped] == [
        ("a", "reached by docker, not by ssh"), ("b", "{{ lookup('x') }} is for Ansible to evaluate")]  # fmt: skip
    assert listing.notes == [
        "these ssh arguments are not taken over: -C -o ControlPath=x",
        "passwords are not taken over: evener logs in by key; ssh-copy-id installs one on a host",
        "the login name {{ me }} is not taken over: it is for Ansible to evaluate",
    ]
    assert "!" not in str(listing)


def test_vault_values_are_not_read():
    secret = {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256\n6265\n"}
    listing = listed({"a": {"ansible_user": secret}, "b": {"ansible_host": secret}})
    assert hosts_of(listing) == {"a": HostConfig(address="a")}
    assert listing.skipped == [SkippedHost("b", "$ANSIBLE_VAULT;1.1;AES256 is for Ansible to evaluate")]
    told = "the login name $ANSIBLE_VAULT;1.1;AES256 is not taken over: it is for Ansible to evaluate"
    assert listing.notes == [told]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"ansible_port": "x"}, "ansible_port 'x'"),
        ({"ansible_port": 70000}, "ansible_port '70000'"),
        ({"ansible_user": "-l x"}, "ansible_user '-l x'"),
        ({"ansible_host": "-oX"}, "'-oX' is neither a name"),
        ({"ansible_ssh_common_args": "-o 'x"}, "ssh arguments: no closing quotation"),
    ],
)
def test_invalid_ansible_variable_is_refused(variables, told):
    with pytest.raises(UsageError, match=re.escape(f"hosts.yml: host a: {told}")):
        listed({"a": variables})


def test_only_the_hosts_of_a_group_are_imported():
    assert list(hosts_of(listed({"a": {}, "b": {}}, "gpu"))) == ["a", "b"]
    with pytest.raises(UsageError, match="no group cpu"):
        listed({"a": {}}, "cpu")
    with pytest.raises(UsageError, match="group gpu has no host"):
        listed({}, "gpu")
    with pytest.raises(UsageError, match="it names no host"):
        listed({})


def test_ansible_group_that_contains_itself_is_read_once():
    groups = {"all": {"children": ["a"]}, "a": {"children": ["b"], "hosts": ["x"]}, "b": {"children": ["a"]}}
    assert list(hosts_of(hosts_of_inventory(parse_inventory_list(json.dumps(groups)), Path("hosts.yml")))) == ["x"]


# ssh's configuration: its names


ALIASES = """
Include {folder}/1.conf {folder}/none
Host attic a            # two names of one machine
    HostName 192.168.1.36
Host "gpu-1" gpu-2
  Port = 2222
host=gpu-3
HOST *.lan !x.lan h?
  User lan
Match host attic exec "false"
  Include {folder}/never
Match all
  Include {folder}/more
Host two attic
  Include {folder}/never
Hostname not-one
"""


def test_ssh_aliases_are_listed_across_included_files(tmp_path):
    written(tmp_path, "Host first\nInclude " + str(tmp_path / "config"), "1.conf")
    written(tmp_path, "Host more", "more")
    written(tmp_path, "Host never", "never")
    path = written(tmp_path, ALIASES.format(folder=tmp_path), "config")
    names, files = list_aliases(path)
    assert names == ["first", "attic", "a", "gpu-1", "gpu-2", "gpu-3", "more", "two"]
    assert files == {tmp_path / name for name in ("config", "1.conf", "more")}


def test_too_many_included_files_are_refused(tmp_path):
    for number in range(300):
        written(tmp_path, f"Include {tmp_path}/{number + 1}", str(number))
    with pytest.raises(UsageError, match="more than 256 files include each other"):
        list_aliases(tmp_path / "0")


# Files of any kind

READERS = {"hostfile": import_hostfile, "ssh": import_ssh_config, "inventory.ini": import_inventory}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a\0b\n", "not a text: byte 1 is 0"),
        ("Host a\n".encode("utf-16"), "not a text: byte"),
        (b"worker-1\n\xfc\n", "line 2: not UTF-8: byte 0xfc"),
        (b"worker-1\n" * 1_000_000, "larger than 1 MB"),
    ],
)
def test_non_text_file_is_refused(home, tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(told)):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", READERS)
def test_missing_file_is_refused(home, tmp_path, name):
    with pytest.raises(UsageError, match="no such file") as refused:
        READERS[name](tmp_path / name)
    assert refused.value.hint == f"no file in {tmp_path} has a similar name"
    with pytest.raises(UsageError, match=r"Is a directory$|a folder$"):
        READERS[name](tmp_path)


def test_byte_order_mark_and_crlf_are_accepted(tmp_path):
    (tmp_path / "hostfile").write_bytes(b"\xef\xbb\xbfa\r\n")
    assert hosts_of(import_hostfile(tmp_path / "hostfile")) == {"a": HostConfig(address="a")}
    (tmp_path / "ssh").write_bytes(b"\xef\xbb\xbfHost a\r\n")
    assert list_aliases(tmp_path / "ssh")[0] == ["a"]


PIECES = ["[", "]", ":", "=", "a", "b", "1:9", "::1", "\n", "\n", " ", "\t", "\r", "slots=", "8", "'", '"', "#", "é",
          "中", "🤖", "\\", "!", "~", "..", "/", "@", "-", "%", "user="]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_hostfile_is_parsed_or_refused_with_file_name(tmp_path, seed):
    """Whatever stands there: a fleet that loads, or one error that names the file."""
    rng = random.Random(seed)
    path = tmp_path / "hostfile"
    for _ in range(10):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 60)))
        path.write_bytes(rng.randbytes(rng.randrange(1, 40)) if rng.random() < 0.2 else text.encode())
        try:
            hosts, _ = merge_host_lists([import_hostfile(path)])
        except UsageError as error:
            assert str(path) in str(error), text  # noqa: PT017
            continue
        if hosts:
            assert parse_fleet(format_fleet(hosts), "fleet.toml").hosts == hosts


def test_host_count_limit_is_enforced(tmp_path, monkeypatch):
    monkeypatch.setattr(import_hosts, "MAX_HOSTS", 3)
    with pytest.raises(UsageError, match="more than 3 machines"):
        merge_host_lists([import_hostfile(written(tmp_path, "a\nb\nc\nd\n"))])
