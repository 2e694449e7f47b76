"""The results of a run are fetched from its hosts, followed or detached, and usable without these hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from evener.core.run.run_plan import read_plan
from evener.core.run.rundir import RunDir, read_checkpoint
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab, rank_on, wait_until
from tests.lab.test_launch import FLAGS, Fleet, losses
from tests.tiers import exhaustive

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def fleet(pair: EmulatedLab, tmp_path: Path) -> Fleet:
    return Fleet(pair, Path(pair.state.fleet_file or ""), tmp_path)


def state(fleet: Fleet, name: str, host: str) -> str:
    """As the host itself says it: nothing comes home by asking."""
    path = fleet.there(name, host) / "host" / "state.json"
    return str(json.loads(path.read_text())["state"]) if path.exists() else ""


def ended(fleet: Fleet, name: str) -> None:
    wait_until(lambda: all(state(fleet, name, host) == "ended" for host in "ab"), f"{name} ends")


@exhaustive
def test_detached_run_is_fully_fetched_and_usable_without_hosts(
    make_lab: MakeLab, tmp_path: Path, corpus: Path, train: Callable[..., RunDir]
) -> None:
    """Fetched in pieces, by programs that are killed; then written with, verified and gone on with, without a host."""
    lab = make_lab(out=tmp_path / "lab.toml", a=HostSpec(), b=HostSpec())
    fleet = Fleet(lab, tmp_path / "lab.toml", tmp_path)
    rate = ["--warmup", "0", "--lr", "3e-4", "--min-lr", "3e-4"]
    every = ["--checkpoint-every", "2", "--eval-every", "2"]
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    fleet.ok("train", "--data", str(copy), *rate, *every, *FLAGS, "6", "--out", "runs/away", "--detach")
    ended(fleet, "runs/away")
    away = fleet.rundir("runs/away")
    assert away.checkpoint_steps() == []
    for delay in (0.3, 0.6, 0.9, 1.2):
        fetching = fleet.start("fetch", "runs/away")
        time.sleep(delay)
        fetching.kill(signal.SIGKILL)
        fetching.wait()
        for step in away.checkpoint_steps():
            read_checkpoint(away.checkpoint_path(step))
    told = json.loads(fleet.ok("fetch", "runs/away", "--json").stdout)
    assert told["checkpoint"].endswith("step-000006")
    assert (told["newer_checkpoint"], told["errors"]) == (None, [])
    assert not list(away.checkpoints_path.glob(".*.arriving"))
    lab.down()
    shutil.rmtree(copy)
    assert len(fleet.ok("sample", "runs/away", "--num-tokens", "5").stdout) > 0
    fleet.ok("verify", "runs/away")
    shutil.copytree(corpus, copy)
    fleet.ok("train", "--resume", "runs/away", "--fleet", "local", "--steps", "8", "--json")
    alone = train(tmp_path / "alone", *rate, *every, *FLAGS, "8")
    assert losses(away) == pytest.approx(losses(alone), abs=1e-5)
    assert [event["step"] for event in away.events() if event["event"] == "checkpoint"] == [2, 4, 6, 8]


@exhaustive
def test_checkpoints_are_fetched_while_run_is_followed(fleet: Fleet, corpus: Path) -> None:
    every = ["--checkpoint-every", "5", "--keep", "1"]
    fleet.ok("train", "--data", str(corpus), *FLAGS, "100000", *every, "--out", "runs/seen", "--detach")
    watcher, seen = fleet.start("logs", "-f", "runs/seen"), fleet.rundir("runs/seen")
    wait_until(lambda: len(seen.checkpoint_steps()) > 0, "the first comes")
    first = seen.checkpoint_steps()[0]
    wait_until(lambda: max(seen.checkpoint_steps(), default=0) > first, "a newer one comes")
    wait_until(lambda: all(seen.vitals(host) for host in "ab"), "how its hosts are comes home")
    assert all(one.sent_Bps is not None for host in "ab" for one in seen.vitals(host))
    watcher.kill(signal.SIGINT)
    assert watcher.wait() == 130
    assert "evener fetch runs/seen" in watcher.told()
    done = fleet.ok("stop", "runs/seen")
    assert f"weights: runs/seen/checkpoints/step-{seen.last_saved_step():06d}" in done.stderr


@exhaustive
def test_failed_run_says_where_to_resume_and_resumes_locally_and_on_fleet(fleet: Fleet, corpus: Path) -> None:
    every = ["--checkpoint-every", "2", "--keep", "1", "--membership", "fixed"]
    fleet.ok("train", "--data", str(corpus), *FLAGS, "100000", *every, "--out", "runs/dead", "--detach")
    told = fleet.there("runs/dead", "a") / "events.jsonl"
    wait_until(lambda: told.exists() and b'"event":"checkpoint"' in told.read_bytes(), "it saves")
    os.kill(rank_on(fleet.lab.host("b")), signal.SIGKILL)
    ended(fleet, "runs/dead")
    listed = json.loads(fleet.ok("runs", "--json").stdout)["runs"]
    assert [(run["checkpoint"], run["newer_checkpoint"]["host"]) for run in listed] == [(None, "a")]
    assert "on a" in fleet.ok("runs").stdout
    done = fleet.run("logs", "-f", "runs/dead")
    assert done.returncode == 1
    saved = fleet.rundir("runs/dead").checkpoint_steps()[-1]
    assert f"evener train --resume runs/dead goes on from step {saved}" in done.stderr
    fleet.ok("train", "--resume", "runs/dead", "--fleet", "local", "--steps", str(saved + 3), "--json")
    before = fleet.rundir("runs/dead").events()
    fleet.ok("train", "--resume", "runs/dead", "--fleet", str(fleet.fleet), "--steps", str(saved + 5), "--json")
    run = fleet.rundir("runs/dead")
    assert [record.step for record in run.records(0)] == list(range(saved + 5))
    # Of the steps that were taken without it, b may have one of its own from before it was killed.
    theirs = [record.step for record in run.records(1) if not saved <= record.step < saved + 3]
    assert theirs == [*range(saved), saved + 3, saved + 4]
    assert [event for event in before if event not in run.events()] == []
    assert [event["event"] for event in run.events()].count("start") == 3


SCRIPT = """
import os, sys
if os.environ["RANK"] == "0":
    os.makedirs("out", exist_ok=True)
    print("found", sorted(os.listdir("out")), sorted(os.listdir("."))[:3], sys.argv[1:])
    with open("out/weights" + sys.argv[2], "wb") as file:
        file.write(bytes(3_000_000))
    with open("tracked.txt", "a") as file:
        file.write("more\\n")
"""


@exhaustive
def test_script_outputs_persist_on_host_and_are_fetched(fleet: Fleet) -> None:
    project = fleet.folder / "project"
    (project / "sub").mkdir(parents=True)
    for name, text in (("write.py", SCRIPT), ("tracked.txt", "mine\n"), ("sub/gone.py", ""), ("z.py", "")):
        (project / name).write_text(text)
    at = Fleet(fleet.lab, fleet.fleet, project)
    first = at.ok("launch", "--out", "runs/one", "--", "write.py", "--log", "1")
    assert "a: 2 files written in" in first.stderr
    assert "fetch it: evener fetch runs/one" in first.stderr
    assert "found [] ['hello.py', 'out', 'sub'] ['--log', '1']" in at.printed("runs/one", "a", 0)
    (project / "sub" / "gone.py").unlink()
    (project / "z.py").write_text("changed")
    second = at.ok("launch", "--out", "runs/two", "--json", "--", "write.py", "--log", "2")
    assert "found ['weights1'] ['hello.py', 'out', 'tracked.txt'] ['--log', '2']" in at.printed("runs/two", "a", 0)
    written = json.loads(second.stdout)["written"]
    assert {file["path"] for file in written["a"]["files"]} == {"out/weights2", "tracked.txt"}
    assert (Path(written["a"]["folder"]) / "z.py").read_text() == "changed"
    told = json.loads(at.ok("fetch", "runs/two", "--json").stdout)
    home = project / "runs/two/files/a"
    assert {Path(path).name for path in told["files"]} == {"weights2", "tracked.txt"}
    assert (home / "out/weights2").stat().st_size == 3_000_000
    assert (home / "tracked.txt").read_text() == "mine\nmore\nmore\n"
    assert json.loads(at.ok("fetch", "runs/two", "--json").stdout)["files"] == []
    (project / "tracked.txt").write_text("mine anew\n")
    at.ok("launch", "--out", "runs/three", "--json", "--", "write.py", "--log", "3")
    there = Path(read_plan(at.rundir("runs/three")).hosts[0].cwd)
    assert (there / "tracked.txt").read_text() == "mine anew\nmore\n"
    assert (there / "tracked.txt~").read_text() == "mine\nmore\nmore\n"


@exhaustive
def test_file_missing_because_it_was_not_sent_is_named(fleet: Fleet) -> None:
    project = fleet.folder / "project"
    (project / "data").mkdir(parents=True)
    (project / "data" / "train.bin").write_bytes(b"12345")
    (project / ".gitignore").write_text("data/\n")
    (project / "read.py").write_text("print(len(open('data/train.bin').read()))")
    (project / "need.py").write_text("import no_such_package_at_all")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    at = Fleet(fleet.lab, fleet.fleet, project)
    done = at.run("launch", "--out", "runs/lacks", "--", "read.py")
    assert done.returncode == 1
    assert "not sent, because git ignores it: data/ 5 B" in done.stderr
    assert "evener launch --include data -- …" in done.stderr
    at.ok("launch", "--out", "runs/has", "--include", "data", "--", "read.py")
    assert at.printed("runs/has", "b", 1) == "5"
    done = at.run("launch", "--out", "runs/module", "--", "need.py")
    command = f"evener setup --fleet {fleet.fleet} --with PACKAGE"
    assert f"{command} installs it on the hosts, the package that has no_such_package_at_all" in done.stderr


@exhaustive
def test_joined_script_records_go_to_launch_run_directory(fleet: Fleet) -> None:
    shutil.copy(EXAMPLES / "own_loop.py", fleet.folder)
    flags = ["--batch", "64", "--steps", "6", "--threads", "1"]
    for name, more in (("runs/own", []), ("runs/named", ["--out", "runs/of-its-own"])):
        fleet.ok("launch", "--out", name, "--", "own_loop.py", *flags, *more)
        run = fleet.rundir(name)
        assert run.manifest().verdict == "finished"
        assert [len(run.records(rank)) for rank in (0, 1)] == [6, 6]
        assert run.checkpoint_steps() == [6]
        fleet.ok("verify", name)
        fleet.ok("report", name)
