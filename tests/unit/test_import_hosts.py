"""Are other lists of machines read as those read them for whom they were written?

Inventories beside what Ansible's documentation says of its examples [docs.ansible.com, "How to build your inventory"],
hostfiles beside the manuals of mpirun and deepspeed. `test_ssh_config.py` has ssh's own.
"""

from __future__ import annotations

import random
import re

import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.fleet_file import HostConfig, format_fleet, parse_fleet
from evener.sources import import_hosts
from evener.sources.ansible_inventory import import_inventory, read_inventory
from evener.sources.hostfile import import_hostfile, parse_host_arguments
from evener.sources.import_hosts import (
    HostList,
    ImportedHost,
    SkippedHost,
    merge_host_lists,
    parse_ssh_target,
    sanitize_host_name,
)
from evener.sources.safe_yaml import YamlError, read_yaml
from evener.sources.ssh_config import import_ssh_config


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
def test_host_argument_is_parsed(word, host):
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
def test_hostfiles_are_parsed(tmp_path, text):
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


# Ansible

BASIC_INI = """
mail.example.com

[webservers]
foo.example.com
bar.example.com

[dbservers]
one.example.com
two.example.com
three.example.com
"""
BASIC_YAML = """
  ungrouped:
    hosts:
      mail.example.com:
  webservers:
    hosts:
      foo.example.com:
      bar.example.com:
  dbservers:
    hosts:
      one.example.com:
      two.example.com:
      three.example.com:
"""
NESTED = (
    BASIC_YAML
    + """
  east:
    hosts:
      foo.example.com:
      one.example.com:
      two.example.com:
  west:
    hosts:
      bar.example.com:
      three.example.com:
  prod:
    children:
      east:
  test:
    children:
      west:
"""
)


def names_of(path, group=None):
    return [one.name.removesuffix(".example.com") for one in import_inventory(path, group).hosts]


@pytest.mark.parametrize("text", [BASIC_INI, BASIC_YAML], ids=["ini", "yaml"])
def test_basic_ansible_inventory_is_parsed(tmp_path, text):
    path = written(tmp_path, text, "hosts")  # told apart by its first line
    assert names_of(path) == ["mail", "foo", "bar", "one", "two", "three"]
    assert names_of(path, "webservers") == ["foo", "bar"]
    assert names_of(path, "ungrouped") == ["mail"]
    assert names_of(path, "all") == names_of(path)
    with pytest.raises(UsageError, match="no group webserver") as refused:
        import_inventory(path, "webserver")
    assert refused.value.hint == 'did you mean "webservers"?'


def test_nested_groups_are_resolved(tmp_path):
    path = written(tmp_path, NESTED, "hosts.yml")
    assert names_of(path, "prod") == ["foo", "one", "two"]
    assert names_of(path, "test") == ["bar", "three"]


@pytest.mark.parametrize(
    ("pattern", "first", "last", "number"),
    [
        ("www[01:50].example.com", "www01.example.com", "www50.example.com", 50),
        ("www[01:50:2].example.com", "www01.example.com", "www49.example.com", 25),
        ("db-[a:f].example.com", "db-a.example.com", "db-f.example.com", 6),
        ("node[9:11]", "node9", "node11", 3),
        ("r[1:2]n[01:03]", "r1n01", "r2n03", 6),
        ("[a:c]", "a", "c", 3),
        ("n[:3]", "n0", "n3", 4),
    ],
)
def test_host_ranges_are_expanded(tmp_path, pattern, first, last, number):
    ini = [] if pattern[0] == "[" else [written(tmp_path, f"[g]\n{pattern}\n", "a.ini")]
    for path in [*ini, written(tmp_path, f'g:\n  hosts:\n    "{pattern}":\n', "a.yml")]:
        hosts = list(read_inventory(path).hosts)
        assert (hosts[0], hosts[-1], len(hosts)) == (first, last, number)


CONNECTIONS = """
badwolf.example.com:5309
jumper ansible_port=5555 ansible_host=192.0.2.50
[targets]

localhost              ansible_connection=local
other1.example.com     ansible_connection=ssh        ansible_user=myuser
other2.example.com     ansible_connection=ssh        ansible_user=myotheruser
some_host         ansible_port=2222     ansible_user=manager
aws_host          ansible_ssh_private_key_file=/home/example/.ssh/aws.pem
freebsd_host      ansible_python_interpreter=/usr/local/bin/python
"""


def test_connection_variables_are_applied(tmp_path):
    assert hosts_of(import_inventory(written(tmp_path, CONNECTIONS))) == {
        "badwolf.example.com": HostConfig(address="badwolf.example.com", port=5309),
        "jumper": HostConfig(address="192.0.2.50", port=5555),
        "localhost": HostConfig(address="local"),
        "other1.example.com": HostConfig(address="other1.example.com", user="myuser"),
        "other2.example.com": HostConfig(address="other2.example.com", user="myotheruser"),
        "some_host": HostConfig(address="some_host", port=2222, user="manager"),
        "aws_host": HostConfig(address="aws_host", identity_file="/home/example/.ssh/aws.pem"),
        "freebsd_host": HostConfig(address="freebsd_host"),
    }


PLUGIN_INI = """# the example of the plugin that reads INI
[web]
host1
host2 ansible_port=222 # defined inline, interpreted as an integer

[web:vars]
http_port=8080 # all members of 'web' will inherit these

[web:children] # child groups will automatically add their hosts to parent group
apache
nginx

[apache]
tomcat1
tomcat2 ansible_user=eva # host specific vars override group vars
tomcat3 mysecret="'03#pa33w0rd'" # proper quoting to prevent value changes

[nginx]
jenkins1

[nginx:vars]
ansible_user = nginx # vars in child groups override same in parent

[all:vars]
ansible_user = everybody # 'all' is 'top' parent
"""
PLUGIN_YAML = """
all: # keys must be unique, i.e. only one 'hosts' per group
    hosts:
        test1:
        test2:
            host_var: value
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


def test_group_variables_are_applied(tmp_path):
    users = {name: host.user for name, host in hosts_of(import_inventory(written(tmp_path, PLUGIN_INI), "web")).items()}
    assert users == {"host1": "everybody", "host2": "everybody", "tomcat1": "everybody", "tomcat2": "eva",
                     "tomcat3": "everybody", "jenkins1": "nginx"}  # fmt: skip
    listing = hosts_of(import_inventory(written(tmp_path, PLUGIN_YAML, "x.yaml")))
    assert listing == {
        "test1": HostConfig(address="test1", user="everybody", port=2222),
        "test2": HostConfig(address="test2", user="everybody"),
        "test5": HostConfig(address="test5", user="other"),
        "test6": HostConfig(address="test6", user="other"),
        "test4": HostConfig(address="127.0.0.1", user="other"),
    }


def test_same_level_groups_merge_by_name_unless_prioritized(tmp_path):
    text = "[a_group]\nx\n[b_group]\nx\n[a_group:vars]\nansible_user=a\n[b_group:vars]\nansible_user=b\n"
    assert hosts_of(import_inventory(written(tmp_path, text)))["x"].user == "b"
    text += "[a_group:vars]\nansible_group_priority=10\n"
    assert hosts_of(import_inventory(written(tmp_path, text)))["x"].user == "a"
    text += "[a_group:children]\nb_group\n"  # a child's come later, whatever the priority
    assert hosts_of(import_inventory(written(tmp_path, text)))["x"].user == "b"


def test_child_group_variables_override_parents(tmp_path):
    text = "".join(f"[{parent}:children]\n{child}\n" for parent, child in ["cb", "ba", "zc"]) + "[a]\nx\n"
    text += "".join(f"[{group}:vars]\nansible_user={group}\n" for group in "zcba")
    assert hosts_of(import_inventory(written(tmp_path, text)))["x"].user == "a"


def test_unsupported_ansible_features_are_reported(tmp_path):
    text = """
a ansible_connection=docker
b ansible_host="{{ lookup('x') }}"
c ansible_ssh_common_args='-o ProxyJump=gate -oStrictHostKeyChecking=no -J hop -C -oControlPath=x' ansible_ssh_pass=!
d ansible_host={{inventory_hostname}}.lan ansible_connection=ansible.builtin.ssh ansible_user="{{ me }}"
"""
    (tmp_path / "group_vars").mkdir()
    listing = import_inventory(written(tmp_path, text, "hosts.ini"))
    options = ["ProxyJump=gate", "StrictHostKeyChecking=no", "ProxyJump=hop"]
    assert hosts_of(listing) == {"c": HostConfig(address="c", ssh_options=options), "d": HostConfig(address="d.lan")}
    assert [(one.name, one.why) for one in listing.skipped] == [
        ("a", "reached by docker, not by ssh"), ("b", "{{ lookup('x') }} is for Ansible to evaluate")]  # fmt: skip
    assert listing.notes == [
        "these ssh arguments are not taken over: -C -o ControlPath=x",
        "passwords are not taken over: evener logs in by key; ssh-copy-id installs one on a host",
        "the login name {{ me }} is not taken over: it is for Ansible to evaluate",
        f"group_vars next to {tmp_path}/hosts.ini are not read; ansible-inventory -i {tmp_path}/hosts.ini --list "
        "--yaml > hosts.yml writes what Ansible makes of it: --inventory hosts.yml",
    ]
    assert "!" not in str(listing)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x", "", "it names no host"),
        ("x", "[gpu]\n", "it names no host"),
        ("x", "a\nb c\n", "line 2: 'c': expected KEY=VALUE"),
        ("x", "a b='c\n", "line 1: no closing quotation"),
        ("x", "a b='" + "c" * 20_000, "line 1: longer than 10000 characters"),
        ("x", "[a b]\nc\n", "line 1: [a b]: expected [GROUP]"),
        ("x", "[a:kids]\nc\n", "line 1: [a:kids]"),
        ("x", "n[1:x]\n", "line 1: n[1:x]: [1:x]: expected a range"),
        ("x", "n[3:1]\n", "line 1: n[3:1]: [3:1]: expected a range"),
        ("x", "n[1:9:0]\n", "expected a range"),
        ("x", "n[a:Z]\n n[c:a]\n", "line 2: n[c:a]"),
        ("x", "n[1:999999999]\n", "is more than 4096 hosts"),
        ("x", "n[1:999][1:999][1:999]\n", "is more than 4096 hosts"),
        ("x", "n[1:4000]\nm[1:4000]\n", "more than 4096 hosts"),
        ("x", "a ansible_port=x\n", "host a: ansible_port 'x'"),
        ("x", "a ansible_user='-l x'\n", "host a: ansible_user '-l x'"),
        ("x", "a ansible_host=-oX\n", "host a: '-oX' is neither a name"),
        ("x", "[a:children]\nb\n[b:children]\na\n[b]\nx\n", "a group is its own child: a → b → a"),
        ("x", "[a:children]\na\n[a]\nx\n", "a group is its own child: a → a"),
        ("x", "#!/usr/bin/python3\n", "a program that makes an inventory"),
        ("x.yml", "plugin: aws_ec2\n", "settings of a plugin"),
        ("x.yml", "", "it names no host"),
        ("x.yml", "services:\n  web:\n    image: x\n", "it names no host"),
        ("x.yml", "- a\n- b\n", "expected a table of groups"),
        ("x.yml", "all:\n  hosts: [a, b]\n", "all.hosts: expected a table of hosts"),
        ("x.yml", "all:\n  hosts:\n    a: [b]\n", "all.hosts.a: expected a table of variables"),
        ("x.yml", "all:\n  children:\n    all:\n      hosts: {a: }\n", "a group is its own child: all → all"),
        ("x.yml", "a: {\n", "line 2: not the YAML"),
        ("x.yml", "a: 1\n--- \nb: 2\n", "line 2: not the YAML of an inventory: a second document begins"),
        ("x.yml", "a: &a {b: *a}\n", "line 1: not the YAML of an inventory: *a is not defined"),
        ("x.yml", "{[a]: b}\n", "a key that is not text"),
        ("x.yml", "[" * 100_000, "nested deeper than 64 times"),
        ("x.yml", "a: \a\n", "unacceptable character"),
    ],
)
def test_invalid_inventory_is_refused(tmp_path, name, text, told):
    with pytest.raises(UsageError, match=re.escape(told)) as refused:
        import_inventory(written(tmp_path, text, name))
    assert str(tmp_path / name) in str(refused.value)


def test_vault_values_are_not_read(tmp_path):
    secret = "!vault |\n     $ANSIBLE_VAULT;1.1;AES256\n     6265"
    text = f"g:\n hosts:\n  a:\n   ansible_user: {secret}\n  b:\n   ansible_host: {secret}\n"
    listing = import_inventory(written(tmp_path, text, "hosts.yml"))
    assert hosts_of(listing) == {"a": HostConfig(address="a")}
    assert listing.skipped == [SkippedHost("b", "$ANSIBLE_VAULT;1.1;AES256 is for Ansible to evaluate")]
    told = "the login name $ANSIBLE_VAULT;1.1;AES256 is not taken over: it is for Ansible to evaluate"
    assert listing.notes == [told]


# YAML


def test_yaml_scalars_are_read_as_text():
    text = "n: 010\non: yes\nempty:\nnone: ~\nquoted: ''\nlist: [1, x]\nhidden: !vault |\n  a\n  b\n"
    tree = {"n": "010", "on": "yes", "empty": None, "none": None, "quoted": "", "list": ["1", "x"], "hidden": "a\nb\n"}
    assert read_yaml(text) == tree
    base = "base: &b {user: ben, port: 22}\nx: {<<: *b, port: 23}\ny: {<<: [{user: eva}, *b]}\nz: *b\n"
    ben = {"user": "ben", "port": "22"}
    assert read_yaml(base) == {"base": ben, "x": ben | {"port": "23"}, "y": ben | {"user": "eva"}, "z": ben}
    assert read_yaml("null: 1\n~: 2\n") == {"null": "1", "~": "2"}
    assert read_yaml("") is None


def test_yaml_expansion_bomb_is_refused():
    laughs = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    laughs += "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    with pytest.raises(YamlError, match="more than 200000 values"):
        read_yaml(laughs)
    merges = "a0: &a0 {k0: x}\n"
    merges += "".join(f"a{i}: &a{i} {{k{i}: x, <<: [{','.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 30))
    with pytest.raises(YamlError, match="more than 200000 values"):
        read_yaml(merges)


# Files of any kind

READERS = {
    "hostfile": import_hostfile,
    "ssh": import_ssh_config,
    "inventory.ini": import_inventory,
    "inventory.yml": import_inventory,
    "inventory": import_inventory,
}


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


def test_byte_order_mark_and_crlf_are_accepted(home, tmp_path):
    texts = {"hostfile": "a\r\n", "ssh": "Host a\r\n", "inventory": "a\r\n", "inventory.yml": "g:\r\n hosts: a"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        listing = READERS[name](tmp_path / name)
        assert hosts_of(listing) == {"a": HostConfig(address="a")}


PIECES = [
    "Host ", "Include ", "Match all", "HostName ", "Port ", "User ", "%h", "[", "]", ":", "=", "a", "b", "1:9", "::1",
    "[gpu]", "[gpu:vars]", "[gpu:children]", "\n", "\n", "\n  ", " ", "\t", "\r", "slots=", "8", "ansible_host=", "{{",
    "ansible_port: ", "hosts:", "children:", "all:", "&x ", "*x", "<<: ", "{", "}", "- ", "'", '"', "#",
    "é", "中", "🤖", "\\", "!", "~", "..", "/", "@", "-",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_input_is_parsed_or_refused_with_file_name(home, tmp_path, seed):
    """Whatever stands there: a fleet that loads, or one error that names the file."""
    rng = random.Random(seed)
    for _ in range(10):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 60)))
        content = rng.randbytes(rng.randrange(1, 40)) if rng.random() < 0.2 else text.encode()
        for name, reader in READERS.items():
            path = tmp_path / name
            path.write_bytes(content)
            try:
                hosts, _ = merge_host_lists([reader(path)])
            except UsageError as error:
                assert str(path) in str(error), text  # noqa: PT017
                continue
            if hosts:
                assert parse_fleet(format_fleet(hosts), "fleet.toml").hosts == hosts


def test_host_count_limit_is_enforced(tmp_path, monkeypatch):
    monkeypatch.setattr(import_hosts, "MAX_HOSTS", 3)
    with pytest.raises(UsageError, match="more than 3 machines"):
        merge_host_lists([import_hostfile(written(tmp_path, "a\nb\nc\nd\n"))])
