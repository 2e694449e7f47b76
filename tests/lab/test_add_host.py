"""Add a new host to a running run: it joins, and the losses stay the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evener.core.run.run_plan import read_plan
from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import align_steps, first_rank_record
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab, command_lines, wait_until, worlds_of
from tests.tiers import exhaustive

pytestmark = exhaustive
WITHIN_S = 300.0  # of a machine as busy as it likes
EVENER = (sys.executable, "-c", "from evener.cli.main import main; main()")
FLAGS = ("--model=tiny", "--batch=12", "--steps=100000", "--dtype=fp32", "--threads=1", "--eval-tokens=256",
         "--eval-every=0", "--dropout=0", "--checkpoint-every=0", "--shares=equal", "--lr=3e-5",
         "--min-lr=3e-5", "--warmup=0")  # fmt: skip


def test_host_joins_a_running_run(
    make_lab: MakeLab, tmp_path: Path, corpus: Path, train: Callable[..., RunDir]
) -> None:
    file, run = tmp_path / "fleet.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, **{name: HostSpec(rate="20Mbit") for name in "abc"})
    argv = [*EVENER, "train", "--fleet", str(file), "--hosts=a,b", "--data", str(corpus), *FLAGS, "--out=run"]
    with (tmp_path / "told").open("wb") as told:
        running = subprocess.Popen(argv, cwd=tmp_path, stdout=told, stderr=told)

    def verb(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*EVENER, *words], cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S,
                              check=False)  # fmt: skip

    def num_steps(rank: int) -> int:
        assert running.poll() is None, (tmp_path / "told").read_text()
        return len(run.records(rank)) if run.steps_path(rank).exists() else 0

    def worlds() -> list[list[str]]:
        assert running.poll() is None, (tmp_path / "told").read_text()
        return worlds_of(run)

    try:
        wait_until(lambda: num_steps(0) > 5, "the run began", WITHIN_S)
        unknown = verb("add", "run", "--host", "d")
        assert (unknown.returncode, f"{file.name} names no host d, but a, b, c" in unknown.stderr) == (2, True)
        added = verb("add", "run", "--host", "c")
        assert added.returncode == 0, added.stderr
        assert "c joins between two steps" in added.stderr
        again = verb("add", "run", "--host", "c")
        assert (again.returncode, "c: this run is running here already" in again.stderr) == (1, True), again.stderr
        wait_until(lambda: worlds()[-1] == ["a", "b", "c"], "c is let in", WITHIN_S)
        # Whoever has followed the run from its beginning sees the newcomer too.
        wait_until(lambda: num_steps(2) > 5, "its records come home", WITHIN_S)
        assert verb("leave", "run", "--host", "c").returncode == 0
        had = num_steps(2)
        assert verb("add", "run", "--host", "c").returncode == 0
        wait_until(lambda: num_steps(2) > had + 5, "they come home again", WITHIN_S)
    finally:
        stopped = verb("stop", "run")
    assert stopped.returncode == 0, stopped.stderr
    running.wait(WITHIN_S)
    manifest = run.manifest()
    assert (manifest.verdict, manifest.roster.hosts, manifest.roster.shares) == ("stopped", ["a", "b", "c"], [4, 4, 4])
    assert manifest.result is not None
    assert manifest.result.replicas_agree is True
    assert [host.name for host in read_plan(run).hosts] == ["a", "b", "c"]
    steps = [first_rank_record(of_step) for of_step in align_steps({rank: run.records(rank) for rank in range(3)})]
    assert [record.step for record in steps] == list(range(manifest.result.steps))
    assert {record.members for record in steps} == {2, 3}
    alone = train(tmp_path / "alone", *FLAGS[:2], f"--steps={len(steps)}", *FLAGS[3:])
    assert [record.loss for record in steps] == pytest.approx([record.loss for record in alone.records(0)], rel=1e-5)
    left = [line for name in "abc" for line in command_lines(lab.host(name))]
    assert not [
        line for line in left if b"evener.node.agent" in line or b"evener.worker" in line or b"supervisor" in line
    ]
    assert "Traceback" not in (tmp_path / "told").read_text()
    lab.down()


def test_host_that_was_offline_learns_of_added_host(make_lab: MakeLab, tmp_path: Path, corpus: Path) -> None:
    """Who is off hears of it when it is back, and is in a world with a host of which nobody had told it."""
    file, run = tmp_path / "fleet.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, **{name: HostSpec(rate="20Mbit") for name in "abc"})
    argv = [*EVENER, "train", "--fleet", str(file), "--hosts=a,b", "--data", str(corpus), *FLAGS, "--out=run"]
    with (tmp_path / "told").open("wb") as told:
        running = subprocess.Popen(argv, cwd=tmp_path, stdout=told, stderr=told)

    def worlds() -> list[list[str]]:
        assert running.poll() is None, (tmp_path / "told").read_text()
        return worlds_of(run)

    def verb(*words: str) -> str:
        done = subprocess.run([*EVENER, *words], cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stderr

    try:
        wait_until(lambda: worlds() == [["a", "b"]], "the run began", WITHIN_S)
        lab.host("b").power_off()
        wait_until(lambda: worlds()[-1] == ["a"], "a goes on", WITHIN_S)
        assert "b is unreachable: it will learn of c from the others" in verb("add", "run", "--host", "c")
        wait_until(lambda: worlds()[-1] == ["a", "c"], "c is let in", WITHIN_S)
        lab.host("b").boot()
        wait_until(lambda: sorted(worlds()[-1]) == ["a", "b", "c"], "b is back", WITHIN_S)
    finally:
        verb("stop", "run")
    running.wait(WITHIN_S)
    manifest = run.manifest()
    assert (manifest.verdict, sorted(manifest.roster.hosts)) == ("stopped", ["a", "b", "c"])
    assert manifest.result is not None
    assert manifest.result.replicas_agree is True
    assert "Traceback" not in (tmp_path / "told").read_text()
    lab.down()
