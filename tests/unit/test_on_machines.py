"""`--on local,laptop` stands for the commands that it prints, and repeats none that has been done."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from evener.cli import on_machines
from evener.cli.kept_fleets import kept_fleet_file
from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.shell import quote_word
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import HostLink, ModelRate, Rates, load_fleet
from evener.core.cluster.fleet_update import update_fleet_file
from evener.sources.import_hosts import local_host_name
from tests.in_process import run_verb

MISSING = Finding(check="version.python", severity="error", host="laptop", evidence="no python", fix="evener setup")
BLOCKED = Finding(check="net.blocked", severity="error", host="laptop", evidence="blocked", fix="sudo nft …")


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """What the doctor finds, one list for each time it is asked; what was done is collected."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found, done = [], []

    def measure(verb, **changes):
        def verb_of_probe(*, fleet, **options):
            done.append(verb)
            update_fleet_file(fleet, **changes)

        return verb_of_probe

    rates = Rates(models={"tiny": ModelRate(tokens_per_s=1000.0)})
    names = [local_host_name(), "laptop"]
    links = {a: {b: HostLink(goodput_Bps=1e8, rtt_s=1e-3)} for a, b in (names, names[::-1])}
    monkeypatch.setattr(on_machines, "_blocking_findings", lambda known, packages: found.pop(0) if found else [])
    monkeypatch.setattr(
        on_machines.setup, "setup", lambda **options: done.append(" ".join(["setup", *options["extra"]]))
    )
    monkeypatch.setattr(on_machines.probe, "wire", measure("wire", links=links))
    monkeypatch.setattr(on_machines.probe, "host", measure("host", rates={name: {"cpu": rates} for name in names}))
    return found, done


def make(*models, may_install=False, packages=(), is_dry=False):
    return on_machines.fleet_of_machines(
        "local, laptop", models or ("tiny",), packages=packages, trust=False, may_install=may_install, is_dry=is_dry
    )


def test_finding_of_several_hosts_sets_up_all(machines, monkeypatch):
    found, _ = machines
    of_both = msgspec.structs.replace(MISSING, check="version.packages", host=None)
    found.append([MISSING, of_both])
    shown: list[list[str]] = []
    monkeypatch.setattr(on_machines.setup, "setup", lambda **options: shown.append(options["hosts"]))
    make(may_install=True)
    assert shown == [[]]  # no --host: all of them


def test_machines_are_named_checked_and_measured_once(machines, tmp_path, capfd):
    _, done = machines
    path = make()
    assert path == str(tmp_path / "evener" / "fleets" / "local+laptop.toml")
    hosts = load_fleet(path).hosts
    assert [host.is_local for host in hosts.values()] == [True, False]
    assert list(hosts)[1] == "laptop"
    assert done == ["wire", "host"]
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("$ evener")]
    assert shown == [
        f"$ evener fleet init local laptop --out {path}",
        "$ evener doctor --on local,laptop --quick",
        "$ evener probe wire --on local,laptop --seconds 1 --no-iperf3 --no-trials",
        "$ evener probe host --on local,laptop --model tiny --seconds 3",
    ]
    assert make() == path
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("$ evener")]
    assert shown == ["$ evener doctor --on local,laptop --quick"]
    make("char")  # another model is measured
    assert done == ["wire", "host", "host"]


def test_nothing_is_installed_without_being_asked(machines):
    found, done = machines
    found[:] = [[MISSING]]
    with pytest.raises(EvenerError, match="laptop: evener is not installed there") as caught:
        make()  # without a terminal nobody can be asked
    assert caught.value.hint == "--yes; or evener setup --on local,laptop --host laptop"
    assert done == []
    found[:] = [[MISSING], []]
    make(may_install=True)
    assert done == ["setup", "wire", "host"]


def test_machine_without_transformers_is_named_with_the_command_that_installs_it(machines):
    found, done = machines
    evidence, packages = "/venv/bin/python has no transformers and no peft", ("transformers", "peft")
    lack = Finding(check="version.packages", severity="error", host="laptop", evidence=evidence,
                   fix="evener setup --extra hf")  # fmt: skip
    found[:] = [[lack]]
    with pytest.raises(EvenerError, match="laptop: /venv/bin/python has no transformers and no peft") as caught:
        make(packages=packages)
    assert caught.value.hint == "--yes; or evener setup --on local,laptop --host laptop --extra hf"
    assert done == []
    found[:] = [[lack], []]
    make(packages=packages, may_install=True)
    assert done == ["setup hf", "wire", "host"]


def test_what_setup_cannot_mend_is_named(machines, capfd):
    found, done = machines
    found[:] = [[BLOCKED]]
    with pytest.raises(EvenerError, match="these machines cannot train together yet"):
        make(may_install=True)
    assert "net.blocked" in capfd.readouterr().err
    found[:] = [[MISSING, BLOCKED], [BLOCKED]]
    with pytest.raises(EvenerError, match="these machines cannot train together yet"):
        make(may_install=True)
    assert done == ["setup"]


def test_dry_run_installs_and_measures_nothing(machines, capfd):
    found, done = machines
    make(may_install=True, is_dry=True)
    assert "$ evener probe host" in capfd.readouterr().err
    found[:] = [[MISSING]]
    with pytest.raises(EvenerError, match="these machines cannot train together yet"):
        make(may_install=True, is_dry=True)
    assert done == []


def test_no_machine_is_an_error(machines):
    with pytest.raises(UsageError, match="--on ,: which machines"):
        on_machines.fleet_of_machines(",", "tiny", packages=(), trust=False, may_install=False)


@pytest.mark.parametrize("verb", ["doctor", "plan", "probe wire", "launch x.py", "bench", "runs", "setup"])
def test_verbs_of_a_fleet_take_the_machines_by_name(verb, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    name, *more = verb.split()
    done = run_verb(
        name, *more[: name == "probe"], "--on", "local,laptop", "--fleet", "lab.toml", *more[name == "probe" :]
    )
    assert done.stderr.startswith("error: --on local,laptop: --fleet lab.toml says which machines")
    assert not list(tmp_path.iterdir())


def test_machines_of_on_are_no_file_and_many_have_a_short_file_name(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "hosts.txt").write_text("a")
    assert run_verb("plan", "--on", "hosts.txt", cwd=tmp_path).stderr.startswith("error: hosts.txt is a file")
    path = kept_fleet_file(",".join(f"a-host-with-a-long-name-{number}" for number in range(30)))
    assert path.name.startswith("30-hosts,")
    known = load_fleet(path)
    assert len(known.hosts) == 30
    assert known.cli_flag == f" --fleet {quote_word(path)}"  # its name does not tell them


@pytest.mark.parametrize("names", ["local,laptop", "local, ben@attic:2222", "[fe80::1]", "a_b", "x=192.168.1.28"])
def test_printed_flag_of_named_machines_selects_their_file(names, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = kept_fleet_file(names)
    flag, value = shlex.split(load_fleet(path).cli_flag)
    assert (flag, kept_fleet_file(value)) == ("--on", path)
    assert len([*path.parent.iterdir()]) == 1


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ("launch --on laptop none.py", "none.py: no such script"),
        ("runs --on laptop", "--on laptop needs --prune"),
        ("plan --on laptop --nodes 2", "--nodes describes machines; so does --on laptop"),
        ("plan --on laptop --for soon", "--for soon: expected a time"),
        ("bench --on laptop --preset fast", "--preset fast: no such preset"),
        ("setup --on laptop --host lptop", "no host lptop"),
        ("train --on laptop --steps -1 --data x", "--steps"),
    ],
)
def test_verb_that_refuses_another_flag_leaves_no_fleet_file(args, error, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = run_verb(*args.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert error in done.stderr
    assert not [*tmp_path.rglob("*.toml")]
    kept_fleet_file("laptop")
    run_verb(*args.split(), cwd=tmp_path)
    assert [*tmp_path.rglob("*.toml")] == [
        tmp_path / "evener" / "fleets" / "laptop.toml"
    ]  # one of an earlier use stays


def test_plan_on_machines_asks_for_what_is_missing_by_their_names(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = run_verb("plan", "--on", "local,laptop", "--model", "tiny", "--link", "1GbE")
    path = tmp_path / "evener" / "fleets" / "local+laptop.toml"
    assert "hint:  evener probe host --on local,laptop --model tiny measures it" in done.stderr
    assert list(load_fleet(path).hosts) == [local_host_name(), "laptop"]
