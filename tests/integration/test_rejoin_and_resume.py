"""A host with a new disk receives what it lacks; one terminal at a time resumes a run, and says what it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from evener.cli import run_output
from evener.core.base.errors import CheckpointError, UsageError
from evener.core.cluster.fleet_file import HostConfig
from evener.core.cluster.host_info import local_host_info
from evener.core.run.run_plan import Plan, write_plan
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import RunDir
from evener.launch import add_remove_hosts, launcher
from evener.launch.commands import train_plan
from evener.launch.resume import lock_resume
from evener.ssh.session import Session, open_session
from evener.transfer.file_tree import describe_data

from ..in_process import run_verb
from ..unit.test_commands import place, prepared, roster_of
from ..unit.test_prune_hosts import write

LOCAL = HostConfig(address="local")


@pytest.fixture
def session() -> Iterator[Session]:
    with contextlib.closing(open_session("b", LOCAL)) as opened:
        yield opened


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/x").mkdir(parents=True)
    return RunDir("runs/x")


@pytest.fixture
def plan(rundir: RunDir, corpus: Path, tmp_path: Path) -> Plan:
    """The plan of a run on two hosts; b is this machine, and its program is no agent but one that ends."""
    places = [place("a"), place("b")]
    spec = parse_args([f"--data={corpus}"])
    data = {name: f"{tmp_path}/host/trees/{describe_data(corpus).digest}" for name in "ab"}
    found = train_plan(prepared(places), spec, roster_of(places, spec), data, {}, resume=False, key="k")
    b = msgspec.structs.replace(
        found.host("b"), host=HostConfig(address="local", workdir=f"{tmp_path}/host"), run=f"{tmp_path}/host/runs/x",
        cwd=str(tmp_path), argv=[sys.executable, "-c", "print('agent')"],
    )  # fmt: skip
    found = msgspec.structs.replace(found, hosts=[found.host("a"), b])
    write_plan(rundir, found)
    return found


def test_host_with_new_disk_receives_corpus_records_and_run(
    plan: Plan, rundir: RunDir, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[str]()
    monkeypatch.setattr(add_remove_hosts, "_check_rejoining_host", lambda rundir, plan, name: checked.append(name))
    write(rundir.steps_path(1), b'{"step": 1}\n')
    write(rundir.path / "hosts/b/events.jsonl", b'{"event": "world", "time": 1}\n')
    told = list[str]()
    add_remove_hosts.rejoin_host(rundir, plan, "b", told.append)
    there = Path(str(plan.host("b").run))
    assert checked == ["b"]
    assert [line.endswith("sent to b") for line in told] == [True]
    [tree] = [path for path in (tmp_path / "host/trees").iterdir() if (path / "train.bin").exists()]
    assert (tree / "train.bin").read_bytes() == (corpus / "train.bin").read_bytes()
    assert (there / "steps/rank-1.jsonl").read_bytes() == b'{"step": 1}\n'
    assert (there / "events.jsonl").read_bytes().startswith(b'{"event": "world"')
    assert (there / "host/agent.json").exists()
    assert (there / "roster.json").exists()
    launcher.stop(rundir, msgspec.structs.replace(plan, hosts=[plan.host("b")]), now=True)


def test_host_that_kept_its_run_gets_only_the_data_that_it_lost(
    plan: Plan, rundir: RunDir, tmp_path: Path, session: Session
) -> None:
    assert launcher.start_on_host(rundir, plan, "b", session) is None
    part = msgspec.structs.replace(plan, hosts=[plan.host("b")])
    (ended,) = launcher.stop(rundir, part, now=True).values()
    assert isinstance(ended, dict)
    (tmp_path / "host/runs/x/host/stopped").unlink()
    told = list[str]()
    add_remove_hosts.rejoin_host(rundir, plan, "b", told.append)
    launcher.stop(rundir, part, now=True)
    assert len(told) == 1  # the corpus
    (tmp_path / "host/runs/x/host/stopped").unlink()
    add_remove_hosts.rejoin_host(rundir, plan, "b", told.append)
    launcher.stop(rundir, part, now=True)
    assert len(told) == 1  # it has all


def test_corpus_that_changed_since_is_not_sent(plan: Plan, rundir: RunDir, tmp_path: Path, corpus: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    write(other / "more.txt", b"x")
    assert plan.spec is not None
    data = msgspec.structs.replace(plan.spec.data, data=str(other))
    changed = msgspec.structs.replace(plan, spec=msgspec.structs.replace(plan.spec, data=data))
    write(tmp_path / "host/runs/x/host/state.json", b'{"state": "ended", "failures": []}')
    with pytest.raises(UsageError, match=r"b lacks the corpus .* changed since"):
        add_remove_hosts.rejoin_host(rundir, changed, "b", print)


def test_detached_resumed_run_is_not_said_to_have_ended(
    plan: Plan, rundir: RunDir, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its host's state of the earlier start, mirrored then, says nothing of this one."""
    part = msgspec.structs.replace(plan, hosts=[plan.host("b")])
    write(rundir.path / "hosts/b/state.json", b'{"state": "ended", "status": 0, "failures": []}')
    with launcher.start(rundir, part, {"b": session}):
        run_output.print_detached(rundir)
    told = capsys.readouterr().err
    launcher.stop(rundir, part, now=True)
    assert f"its id is {plan.id}\n" in told
    for line in (
        "follow:  evener logs -f runs/x\n",
        "stop:    evener stop runs/x\n",
        "at its end:  evener fetch runs/x\n",
    ):
        assert line in told


def test_second_resume_names_host_and_process_of_the_first(plan: Plan, rundir: RunDir) -> None:
    with lock_resume(rundir):
        done = run_verb("train", "--resume", rundir)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: runs/x: {local_host_info().host} (pid {os.getpid()}) is resuming it\n"
        "hint:  evener logs -f runs/x follows it\n"
    )
    with lock_resume(rundir):  # the first has ended
        pass


def test_resume_lock_is_not_written_through_a_link(rundir: RunDir, tmp_path: Path) -> None:
    (rundir.path / "resume.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError, match=r"resume\.lock: leads out of"), lock_resume(rundir):
        pass
    assert not (tmp_path / "victim").exists()
