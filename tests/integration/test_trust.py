"""A run directory or a fleet file from elsewhere is looked at: nothing that it names is contacted or started."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from evener.bench.fleet_bench import FleetBench
from evener.bench.setups import BenchSetup
from evener.cli import bench_fleet, terminal, watch_actions
from evener.cli import trust as trust_cli
from evener.core.base import trusted
from evener.core.base.errors import EvenerError, UntrustedError
from evener.core.cluster.fleet_file import Fleet, HostConfig, load_fleet
from evener.core.run.run_plan import HostPlan, Plan, read_plan, write_plan
from evener.core.run.run_spec import DataSpec, ModelSpec, RunSpec
from evener.core.run.rundir import RunDir
from evener.core.run.trust import is_foreign_run, trust_fleet
from evener.launch import torch_subprocess
from evener.ssh import session
from evener.ssh.fake import FakeSession
from evener.watch.run_reader import RunReader
from tests.in_process import run_verb
from tests.sample_runs import write_run
from tests.tiers import thinned

SRC = Path(session.__file__).parents[1]
REMOTE, LOCAL = {"address": "192.0.2.7"}, {"address": "local"}  # TEST-NET-1: nobody answers there
TOUCH = "touch executed"

# What a hostile plan.json says of its host "h": settings of [hosts.h], and keys of the host's part of the plan.
Trick = tuple[dict[str, Any], dict[str, Any]]
OPTIONS = ("ProxyCommand", "KnownHostsCommand", "LocalCommand", "PKCS11Provider", "SecurityKeyProvider", "ProxyJump",
           "XAuthLocation", "IdentityAgent", "proxycommand ")  # fmt: skip
SETTINGS: dict[str, Trick] = {
    "plain": (REMOTE, {}),
    **{option: (REMOTE | {"ssh_options": [f"{option}={TOUCH}", "PermitLocalCommand=yes"]}, {}) for option in OPTIONS},
    "python": (LOCAL | {"python": "venv/bin/python"}, {}),
    "workdir": (LOCAL | {"workdir": "."}, {}),
    "argv of a local run": (LOCAL, {"argv": ["touch", "executed"], "run": None}),
    "argv of a remote run": (REMOTE, {"argv": ["touch", "executed"]}),
    "environment": (LOCAL, {"env": {"LD_PRELOAD": "./evil.so"}, "run": None}),
    "agent": (LOCAL, {"argv": ["venv/bin/python", "-m", "evener.node.agent"], "run": "RUN"}),
}
FORMS: dict[str, Trick] = {
    "relative name": (LOCAL, {"name": "../../../outside"}),
    "absolute name": (LOCAL, {"name": "/tmp/outside"}),
    "name of the parent": (LOCAL, {"name": ".."}),
    "name with an escape sequence": (LOCAL, {"name": "h\x1b]0;owned\x07"}),
    "name with a newline": (LOCAL, {"name": "h\n"}),
    "name with a NUL": (LOCAL, {"name": "h\0"}),
    "option as address": ({"address": f"-oProxyCommand={TOUCH}"}, {}),
    "command as address": ({"address": "$(touch${IFS}executed)"}, {}),
    "address with a NUL": ({"address": "192.0.2.7\0"}, {}),
    "option as user": (REMOTE | {"user": f"-oProxyCommand={TOUCH}"}, {}),
    "command as user": (REMOTE | {"user": f"`{TOUCH}`"}, {}),
    "option with a newline": (REMOTE | {"ssh_options": [f"ConnectTimeout=1\nProxyCommand={TOUCH}"]}, {}),
    "option with a NUL": (REMOTE | {"ssh_options": ["ProxyCommand=a\0b"]}, {}),
    "python with a NUL": (LOCAL | {"python": "a\0b"}, {}),
    "ssh options for this machine": (LOCAL | {"ssh_options": [f"ProxyCommand={TOUCH}"]}, {}),
    "folder outside": (LOCAL, {"run": "/var/../etc"}),
    "relative folder": (LOCAL, {"run": "etc"}),
    "project outside": (LOCAL, {"code": "/home/../etc"}),
    "run directory of another machine": (REMOTE, {"run": None}),
    "argv with a NUL": (LOCAL, {"argv": ["a\0b"]}),
    "a billion ranks": (LOCAL, {"num_ranks": 10**9}),
    "interface as option": (LOCAL, {"interface": "-x"}),
}
QUICK_LOOKING = (("runs",), ("runs", "--json"), ("runs", "--prune"), ("logs", "RUN"), ("logs", "RUN", "--json"))
LOOKING = (("report", "RUN"), ("report", "RUN", "--json"), ("watch", "--terminal", "RUN"), ("trace", "RUN"),
           ("plan", "--from", "RUN"), ("export", "RUN"), ("verify", "RUN"), ("verify", "RUN", "--replay", "2"),
           ("sample", "RUN"))  # fmt: skip
CONTACTING = (("logs", "-f", "RUN"), ("fetch", "RUN"), ("fetch", "RUN", "--json"), ("stop", "RUN"),
              ("stop", "--now", "RUN"), ("stop", "cafe"), ("leave", "RUN", "--host", "h"),
              ("add", "RUN", "--host", "h"), ("train", "--resume", "RUN"), ("train", "--resume", "RUN", "--dry-run"),
              ("train", "--resume", "RUN", "--fleet", "local"))  # fmt: skip
FLEET_VERBS = (("doctor",), ("doctor", "--fleet", "fleet.toml", "--quick"), ("setup",), ("probe", "wire"),
               ("probe", "collectives"), ("probe", "host", "--model", "tiny"), ("stop", "--stale"),
               ("launch", "--", "script.py"), ("launch", "--dry-run", "--", "script.py"), ("train", "--data", "CORPUS"),
               ("train", "--data", "CORPUS", "--dry-run"), ("bench", "--preset", "fleet", "--data", "CORPUS"),
               ("bench", "--preset", "strategies", "--data", "CORPUS"))  # fmt: skip


class Contacted(BaseException):
    """Something was started or ended. No handler of errors may take it for one of its own."""


class NoTorch(EvenerError):
    """evener's own program with torch would begin; it is not the subject here."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which verbs are given, of a user who has not trusted anything yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trusted, "_unsaved", set())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def nothing_starts() -> Iterator[None]:
    """No process may be started or ended by what a test does."""
    start = mock.patch.object(subprocess, "Popen", side_effect=Contacted("a process was started"))
    end = mock.patch.object(os, "kill", side_effect=Contacted("a signal was sent"))
    with start, end, mock.patch.object(torch_subprocess, "program_lines", side_effect=NoTorch("torch")):
        yield


def foreign_run(trick: Trick = (REMOTE, {}), path: str = "runs/foreign", **more: Any) -> RunDir:
    """Write a run directory as it comes from elsewhere, whose plan says that its host still runs."""
    run, (host, part) = write_run(Path(path), [{}]), trick
    if "python" in host:  # a relative one is damaged
        host = host | {"python": str(Path(host["python"]).absolute())}
    plan = {
        "format": 3, "id": "cafe", "kind": "train", "spec": json.loads(run.manifest_path.read_bytes())["spec"],
        "hosts": [{"name": "h", "host": host, "node_rank": 0, "first_rank": 0, "num_ranks": 1, "address": "10.0.0.1",
                   "interface": "eth0", "run": "/nowhere", "code": None, "cwd": "/nowhere", "argv": ["python"],
                   "env": {}} | part],
    } | more  # fmt: skip
    (run.path / "plan.json").write_text(json.dumps(plan).replace('"RUN"', json.dumps(str(run.path.absolute()))))
    for name in ("host", "hosts/h"):
        (run.path / name).mkdir(parents=True)
        (run.path / name / "state.json").write_text('{"state": "running", "pid": 1, "supervisor": 1}')
    executes = f"open({str(Path('executed').absolute())!r}, 'w')"
    spec = {
        "id": "0",
        "host": "../../x",
        "first_rank": 0,
        "argv": [sys.executable, "-c", executes],
        "cwd": "/",
        "env": {},
    }
    (run.path / "host/spec.json").write_text(json.dumps(spec | {"grace_s": 0, "has_agent": True}))
    (run.path / "host/supervisor.py").write_text(executes)
    (run.path / "host/lock").write_text("1")
    (run.path / "logs").mkdir()
    (run.path / "logs/h.0.log").write_text("2026-11-23T19:31:10.123Z O the text that a rank printed\n")
    write_program(Path("venv/bin/python"), executes)
    return RunDir(path)


def write_program(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)


def words(verb: tuple[str, ...], **replaced: str) -> list[str]:
    return [replaced.get(word, word) for word in verb]


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("trick", SETTINGS)
def test_verbs_contact_and_start_nothing_of_a_foreign_run(trick: str, here: Path) -> None:
    run = foreign_run(SETTINGS[trick])
    plan = (run.path / "plan.json").read_bytes()
    for verb in QUICK_LOOKING:
        done = run_verb(*words(verb, RUN=str(run)))
        assert done.returncode == 0, done
    for verb in CONTACTING:
        done = run_verb(*words(verb, RUN=str(run)))
        assert done.returncode == 2, done
        assert "there is no record that you started this run on this machine" in done.stderr, done
    assert (run.path / "plan.json").read_bytes() == plan
    assert is_foreign_run(run)
    assert not (here / "executed").exists()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("trick", thinned([*SETTINGS], 4))
def test_verbs_that_read_records_start_nothing_of_a_foreign_run(trick: str, here: Path) -> None:
    """They read no plan, or only to show it. Some need records or weights that this run does not have."""
    run = foreign_run(SETTINGS[trick])
    for verb in LOOKING:
        assert run_verb(*words(verb, RUN=str(run))).returncode in (0, 2)
    assert not (here / "executed").exists()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("trick", FORMS)
def test_names_and_addresses_of_a_plan_are_checked(trick: str, here: Path) -> None:
    """Even an approved plan could not use them: it is damaged."""
    run = foreign_run(FORMS[trick])
    before = tree(here.parent)
    every = (*QUICK_LOOKING, *LOOKING[:1], *CONTACTING)
    some = (("runs",), ("logs", "RUN"), ("fetch", "RUN"), ("train", "--resume", "RUN"))
    for verb in every if trick == "relative name" else some:
        done = run_verb(*words(verb, RUN=str(run)))
        assert done.returncode == (0 if verb[0] == "runs" else 2), done  # a damaged run is one row of a list
        printed = done.stdout if verb[0] == "runs" else done.stderr
        assert "damaged: " in printed or verb == ("runs", "--prune"), done
        assert all(c.isprintable() for c in done.stderr.replace("\n", "")), done
    assert tree(here.parent) == before


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("key", ["id", "two hosts of one name"])
def test_ids_of_a_plan_are_checked(key: str) -> None:
    run = foreign_run(**({"id": "../../outside"} if key == "id" else {}))
    plan = json.loads((run.path / "plan.json").read_text())
    (run.path / "plan.json").write_text(json.dumps(plan | {"hosts": plan["hosts"] * (1 + (key != "id"))}))
    assert run_verb("stop", run).returncode == 2
    assert "damaged" in run_verb("stop", run).stderr


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", ["../../outside", "a/b", "h\0"])
def test_names_of_a_manifest_are_checked(name: str) -> None:
    """A report reads a file for each host."""
    run = foreign_run()
    manifest = json.loads(run.manifest_path.read_text())
    manifest["hosts"][0]["host"] = name
    run.manifest_path.write_text(json.dumps(manifest))
    assert "damaged: it names the host" in run_verb("report", run).stderr


def settings_text(host: dict[str, Any]) -> str:
    """Return [hosts.h] of a fleet file. JSON's strings and lists are TOML's."""
    return "[hosts.h]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in host.items())


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("trick", [name for name, (host, _) in SETTINGS.items() if len(host) > 1])
def test_verbs_start_nothing_of_a_foreign_fleet_file(trick: str, here: Path, corpus: Path) -> None:
    """As of a folder that was just cloned: fleet.toml is used if it is here."""
    foreign_run()
    (here / "fleet.toml").write_text(settings_text(SETTINGS[trick][0]) + '[hosts.other]\naddress = "192.0.2.8"\n')
    (here / "script.py").touch()
    for verb in FLEET_VERBS:
        done = run_verb(*words(verb, CORPUS=str(corpus)))
        assert done.returncode == 2, done
        assert "names programs to start" in done.stderr or "control characters" in done.stderr, done
    assert not (here / "executed").exists()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("verb", FLEET_VERBS)
def test_fleet_file_without_programs_needs_no_approval(verb: tuple[str, ...], here: Path, corpus: Path) -> None:
    (here / "fleet.toml").write_text(settings_text(REMOTE) + '[hosts.other]\naddress = "192.0.2.8"\n')
    (here / "script.py").touch()
    with pytest.raises(Contacted):
        run_verb(*words(verb, CORPUS=str(corpus)))


@pytest.mark.usefixtures("nothing_starts")
def test_looking_at_a_foreign_run_shows_what_is_here_and_says_why_no_more() -> None:
    run = foreign_run()
    logs, runs = run_verb("logs", run), run_verb("runs")
    assert "the text that a rank printed" in logs.stdout
    line = f"{run}: there is no record that you started or approved this run here, so its hosts are not contacted"
    assert line in logs.stderr
    assert " ".join(line.split()) in " ".join(runs.stdout.split())
    [row] = json.loads(run_verb("runs", "--json").stdout)["runs"]
    assert (row["state"], row["hosts"]) == ("not contacted", {"h": "not contacted"})
    assert json.loads(run_verb("runs", "--prune", "--json").stdout)["pruned"] == []


@pytest.mark.usefixtures("nothing_starts")
def test_ended_foreign_run_keeps_its_state_in_the_list() -> None:
    run = foreign_run()
    (run.path / "hosts/h/state.json").write_text('{"state": "ended", "status": 0}')
    [row] = json.loads(run_verb("runs", "--json").stdout)["runs"]
    assert (row["state"], row["hosts"]) == ("finished", {"h": "finished"})


@pytest.mark.usefixtures("nothing_starts")
def test_page_neither_follows_nor_controls_a_foreign_run() -> None:
    run = foreign_run()
    manifest = json.loads(run.manifest_path.read_text()) | {"verdict": "running", "result": None, "ended": None}
    run.manifest_path.write_text(json.dumps(manifest))
    reader = RunReader(run)
    reader.read_new()
    assert not watch_actions._needs_follower(run)
    assert not watch_actions.can_control(reader)
    for act in (watch_actions.stop_run, watch_actions.save_checkpoint):
        with pytest.raises(UntrustedError):
            act(reader)
    from evener.watch.run_health import assess_health

    assert "its hosts are not contacted" in assess_health(reader, 0.0).hint


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("verb", [("logs", "RUN"), *CONTACTING[1:]])
def test_every_verb_that_contacts_takes_trust(verb: tuple[str, ...]) -> None:
    """It shows what it trusts, then contacts the hosts; the next command needs no flag."""
    run = foreign_run(SETTINGS["ProxyCommand"])
    for flags in (["--trust"], []):
        with pytest.raises(Contacted):
            run_verb(*words(verb, RUN=str(run)), *flags)
    assert not is_foreign_run(run)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("verb", FLEET_VERBS)
def test_every_verb_with_a_fleet_takes_trust(verb: tuple[str, ...], here: Path, corpus: Path) -> None:
    other = '[hosts.other]\naddress = "192.0.2.8"\n'
    (here / "fleet.toml").write_text(settings_text(SETTINGS["ProxyCommand"][0]) + other)
    (here / "script.py").touch()
    [name, *others] = words(verb, CORPUS=str(corpus))
    flags = [*others[:1], "--trust", *others[1:]] if name == "probe" else ["--trust", *others]
    with pytest.raises(Contacted):
        run_verb(name, *flags)
    with pytest.raises(Contacted):
        run_verb(name, *others)


def test_refusal_shows_hosts_and_programs_with_control_characters_escaped() -> None:
    host = {"address": "192.0.2.7", "user": "ann", "port": 2222, "ssh_options": [f"ProxyCommand={TOUCH}"],
            "python": "/opt/python", "identity_file": "~/.ssh/key", "workdir": "/scratch"}  # fmt: skip
    part = {
        "argv": ["python", "\x1b[2J\u202egnp"],
        "env": {"LD_PRELOAD": "./evil\x07"},
        "run": "/runs/x",
        "cwd": "/cwd",
    }
    done = run_verb("stop", foreign_run((host, part)))
    assert done.returncode == 2
    for text in (
        "h: ann@192.0.2.7 port 2222",
        f"ssh -o: ProxyCommand={TOUCH}",
        "python: /opt/python",
        "/runs/x, /cwd",
        "identity_file: ~/.ssh/key",
        "workdir: /scratch",
        r"\x1b[2J\u202egnp",
        r"LD_PRELOAD='./evil\x07'",
    ):
        assert text in done.stderr, done.stderr
    assert "--trust" in done.stderr
    assert all(c.isprintable() for c in done.stderr.replace("\n", ""))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("answer", ["y\n", "yes\n", "n\n", "\n", ""])
def test_terminal_is_asked_once(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = foreign_run(), list[str]()
    monkeypatch.setattr(trust_cli, "is_interactive", lambda: True)
    monkeypatch.setattr(sys, "stdin", mock.Mock(readline=lambda: asked.append("asked") or answer))
    if answer.startswith("y"):
        for _ in range(2):
            with pytest.raises(Contacted):
                run_verb("fetch", run)
    else:
        done = run_verb("fetch", run)
        assert (done.returncode, "192.0.2.7" in done.stderr) == (2, True)
    assert asked == ["asked"]


def test_approved_settings_are_used(here: Path) -> None:
    """The tricks are real: ssh runs the ProxyCommand, and a local host its python, once they are approved."""
    run = foreign_run((REMOTE | {"ssh_options": [f"ProxyCommand={TOUCH}"]}, {}))
    assert run_verb("fetch", run).returncode == 2
    assert not (here / "executed").exists()
    assert run_verb("fetch", run, "--trust").returncode == 1
    assert (here / "executed").exists()
    (here / "executed").unlink()
    (here / "fleet.toml").write_text(settings_text(SETTINGS["python"][0]))
    assert run_verb("doctor", "--quick").returncode == 2
    assert not (here / "executed").exists()
    assert run_verb("doctor", "--quick", "--trust").returncode == 1
    assert (here / "executed").exists()


# --- what is trusted --------------------------------------------------------------------------------------------------


def own_run(path: str = "runs/own", host: HostConfig | None = None) -> RunDir:
    part = HostPlan(name="h", host=host or HostConfig(address="local"), node_rank=0, first_rank=0, num_ranks=1,
                    address="", interface="", run="/nowhere", code=None, cwd="/", argv=[], env={})  # fmt: skip
    write_plan(RunDir(path), Plan(id="beef", kind="launch", spec=None, hosts=[part]))
    return RunDir(path)


def test_own_plan_is_trusted_wherever_it_lies_and_another_text_is_not() -> None:
    run = own_run()
    assert not is_foreign_run(run)
    run.path.rename("runs/moved")
    assert not is_foreign_run(RunDir("runs/moved"))
    text = Path("runs/moved/plan.json").read_text()
    Path("runs/moved/plan.json").write_text(text.replace("beef", "bee5"))
    assert is_foreign_run(RunDir("runs/moved"))


def test_moved_run_is_used_after_trust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = own_run()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another machine"))
    assert run_verb("fetch", run).returncode == 2
    assert run_verb("fetch", run, "--trust").returncode == 0
    assert run_verb("fetch", run).returncode == 0


def test_plan_that_replaces_a_foreign_one_does_not_vouch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails puts the earlier plan back."""
    from evener.launch import launcher

    run = foreign_run((LOCAL, {"run": None}))
    text = (run.path / "plan.json").read_bytes()
    plan = read_plan(own_run("runs/other"))
    refused = FakeSession("h", {"run_control.start": mock.Mock(side_effect=RuntimeError("no"))})
    monkeypatch.setattr(session, "open_session", lambda *_: FakeSession("h", {"run_control.stop": lambda **_: None}))
    with pytest.raises(EvenerError, match="did not start"):
        launcher.start(run, plan, {"h": refused})
    assert (run.path / "plan.json").read_bytes() == text
    assert is_foreign_run(run)


def test_fleet_settings_are_trusted_with_their_folder_and_not_their_figures(here: Path) -> None:
    """A relative path is another program in another folder; measured rates start nothing."""
    host = settings_text(SETTINGS["python"][0])
    (here / "fleet.toml").write_text(host)
    trust_fleet(load_fleet("fleet.toml"))
    (here / "fleet.toml").write_text('link = "1GbE"\n' + host + "ranks = 2\n")
    with mock.patch.object(session, "open_session", lambda name, *_: FakeSession(name)):
        assert list(connected(load_fleet("fleet.toml"))) == ["h"]
        assert list(connected(load_fleet(str(here / "fleet.toml")))) == ["h"]
        (here / "cloned").mkdir()
        (here / "cloned/fleet.toml").write_text(host)
        with pytest.raises(UntrustedError):
            connected(load_fleet("cloned/fleet.toml"))
        (here / "fleet.toml").write_text(host.replace("venv/bin/python", "venv/bin/python3"))
        with pytest.raises(UntrustedError):
            connected(load_fleet("fleet.toml"))


def connected(fleet: Fleet) -> dict[str, Any]:
    with session.connect(fleet) as (sessions, _):
        return dict(sessions)


def test_imported_programs_are_approved_with_the_import_or_later(here: Path) -> None:
    """A list of hosts may come from elsewhere as well."""
    (here / "config").write_text(f"Host h\nHostName 192.0.2.7\nProxyCommand {TOUCH}\n")
    assert run_verb("fleet", "init", "--ssh-config", "config").returncode == 0
    assert run_verb("doctor", "--quick").returncode == 2
    (here / "fleet.toml").unlink()
    assert run_verb("fleet", "init", "--ssh-config", "config", "--trust").returncode == 0
    assert not (here / "executed").exists()
    assert run_verb("doctor", "--quick").returncode == 1
    assert (here / "executed").exists()


def test_bench_with_a_foreign_setup_can_go_on_with_trust(here: Path, corpus: Path) -> None:
    """It would stop the earlier run of a set-up, which may still be running."""
    spec = RunSpec(data=DataSpec(data=str(corpus)), model=ModelSpec(model="tiny"))
    setup = BenchSetup(label="h", hosts=["h"], spec=spec)
    run = foreign_run(SETTINGS["ProxyCommand"], "bench/h")
    for trust in (False, True):
        display = bench_fleet.TerminalDisplay(trust=trust, as_json=True)
        bench = FleetBench("fleet", here / "new", Fleet(hosts={"h": HostConfig(**REMOTE)}), spec, display)
        bench.out = here / "bench"
        stopped = mock.patch.object(session, "open_session", side_effect=Contacted)
        with stopped, pytest.raises(Contacted if trust else UntrustedError):
            bench._run_setup(setup)
        assert is_foreign_run(run) is not trust


# --- the register -----------------------------------------------------------------------------------------------------


def register() -> Path:
    return trusted.state_folder() / "trusted"


def test_register_is_private(tmp_path: Path) -> None:
    own_run()
    assert register().stat().st_mode & 0o777 == 0o600
    assert register().parent.stat().st_mode & 0o777 == 0o700
    assert tmp_path in register().parents


@pytest.mark.parametrize("how", ["writable by others", "link", "folder", "FIFO"])
def test_register_that_others_could_have_written_does_not_count(how: str, tmp_path: Path) -> None:
    run = own_run()
    text = register().read_bytes()
    register().unlink()
    makers: dict[str, Callable[[], object]] = {
        "writable by others": lambda: (register().write_bytes(text), register().chmod(0o666)),
        "link": lambda: register().symlink_to("/dev/null"),
        "folder": lambda: register().mkdir(),
        "FIFO": lambda: os.mkfifo(register()),
    }
    makers[how]()
    assert is_foreign_run(run)
    other = own_run("runs/two")  # trusted by this process, with a warning
    assert not is_foreign_run(other)
    assert "warning: the approval could not be saved" in run_verb("fetch", other).stderr


def test_unwritable_register_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a read-only home, or on a full disk: this process goes on with what it wrote itself."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = foreign_run((LOCAL, {}))
    done = run_verb("fetch", run, "--trust")
    assert done.stderr.count("warning: the approval could not be saved: Not a directory") == 1
    assert "or approved it. It names:" in done.stderr
    assert done.returncode == 0


def test_relative_state_home_is_not_used(monkeypatch: pytest.MonkeyPatch, here: Path, tmp_path: Path) -> None:
    """The folder in which a verb is given may come from elsewhere."""
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    own_run()
    assert not (here / "state").exists()
    assert (tmp_path / "home/.local/state/evener/trusted").exists()


def test_truncated_entry_does_not_spoil_the_next(here: Path) -> None:
    own_run()
    whole = register().read_bytes()
    register().write_bytes(whole + whole[:20])
    assert not is_foreign_run(own_run("runs/two", HostConfig(address="local", python="/two")))
    assert whole[:20].decode() in register().read_text().split("\n")


def _trust_many(number: int) -> None:
    for entry in range(40):
        trusted.trust([trusted.digest("plan", f"{number} {entry}".encode())])


def test_concurrent_processes_lose_no_entry() -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.map(_trust_many, range(4))
    wanted = {trusted.digest("plan", f"{number} {entry}".encode()) for number in range(4) for entry in range(40)}
    assert sorted(register().read_text().split()) == sorted(wanted)


def test_sessions_are_opened_by_the_functions_that_check_trust_alone() -> None:
    """No verb can forget the check: nothing else in evener names the function that opens a session, or a transport."""
    names = ("open_session", "make_transport", "SSHTransport", "LocalTransport", " Session(")
    found = [str(path.relative_to(SRC)) for path in sorted(SRC.rglob("*.py"))
             if any(name in path.read_text() for name in names)]  # fmt: skip
    assert found == ["ssh/session.py", "ssh/transport.py"]


def test_question_needs_stdin_and_stderr_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", mock.Mock(isatty=lambda: True))
    monkeypatch.setattr(sys, "stderr", mock.Mock(isatty=lambda: False))
    assert not terminal.is_interactive()
