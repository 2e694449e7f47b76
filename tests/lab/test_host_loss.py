"""A run continues without lost hosts and readmits them, with unchanged losses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import align_steps, first_rank_record
from evener.lab.host import LabHost
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab, come_home, command_lines, rank_on, wait_until, worlds_of
from tests.tiers import exhaustive

pytestmark = exhaustive
WITHIN_S = 300.0  # of a machine as busy as it likes
FLAGS = ("--model=tiny", "--batch=12", "--steps=100000", "--dtype=fp32", "--threads=1", "--eval-tokens=256",
         "--eval-every=0", "--dropout=0", "--checkpoint-every=5", "--shares=equal", "--lr=3e-5",
         "--min-lr=3e-5", "--warmup=0")  # fmt: skip


def pids_of(host: LabHost, program: str) -> list[int]:
    """Of the processes there that Python runs this program in, the first one before what came of it."""
    found = []
    for pid in sorted(host.pids()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += [pid] * any(program.encode() in word for word in words[:5])
    return found


def test_losses_are_unchanged_by_hosts_leaving_and_joining(
    make_lab: MakeLab, tmp_path: Path, corpus: Path, train: Callable[..., RunDir]
) -> None:
    """A rank is killed; the first host loses its power, and is back; an agent and a supervisor are killed; one leaves
    and is let in again. Then it is stopped, and every step that it took has the loss of one process.
    """
    file, run = tmp_path / "fleet.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, a=HostSpec(rate="20Mbit"), b=HostSpec(rate="20Mbit"), c=HostSpec(rate="20Mbit"))
    evener = [sys.executable, "-c", "from evener.cli.main import main; main()"]
    argv = [*evener, "train", "--fleet", str(file), "--data", str(corpus), *FLAGS, "--membership=restart", "--out=run"]
    with (tmp_path / "told").open("wb") as told:
        running = subprocess.Popen(argv, cwd=tmp_path, stdout=told, stderr=told)

    def verb(*words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*evener, *words], cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    def events() -> list[dict[str, Any]]:
        """Of all hosts, as they come home."""
        assert running.poll() is None, (tmp_path / "told").read_text()
        return come_home(run)

    def worlds() -> list[list[str]]:
        events()
        return worlds_of(run)

    def until_saved(more: int) -> None:
        """So many checkpoints later."""
        last = max((event["step"] for event in events() if event["event"] == "checkpoint"), default=0)
        wait_until(lambda: any(event["event"] == "checkpoint" and event["step"] >= last + 5 * more
                               for event in events()), "the run goes on", WITHIN_S)  # fmt: skip

    try:
        wait_until(lambda: run.path.exists() and bool(worlds()), "the run began", WITHIN_S)
        until_saved(1)
        os.kill(rank_on(lab.host("b")), signal.SIGKILL)
        wait_until(lambda: len(worlds()) == 2, "all begin again", WITHIN_S)
        assert worlds()[1] == ["a", "b", "c"]
        until_saved(1)
        lab.host("a").power_off()
        wait_until(lambda: worlds()[-1] == ["b", "c"], "b and c go on", WITHIN_S)
        until_saved(1)
        lab.host("a").boot()
        wait_until(lambda: worlds()[-1] == ["b", "c", "a"], "a is back", WITHIN_S)
        until_saved(1)
        for what in ("evener.node.agent", "supervisor.py"):
            num = len(worlds())
            os.kill(min(pids_of(lab.host("c"), what)), signal.SIGKILL)
            wait_until(lambda num=num: len(worlds()) > num and len(worlds()[-1]) == 3, f"c after {what}", WITHIN_S)
            until_saved(1)
        left = verb("leave", "run", "--host", "b")
        assert "b has left; " in left.stderr
        wait_until(lambda: "b" not in worlds()[-1], "the others go on", WITHIN_S)
        until_saved(1)
        verb("add", "run", "--host", "b")
        wait_until(lambda: "b" in worlds()[-1], "b is back", WITHIN_S)
    finally:
        verb("stop", "run")
    running.wait(WITHIN_S)
    for word in ("leave", "add"):
        done = subprocess.run([*evener, word, "run", "--host", "b"], cwd=tmp_path, capture_output=True, text=True,
                              timeout=WITHIN_S, check=False)  # fmt: skip
        assert (done.returncode, "run has ended (stopped)" in done.stderr) == (2, True), done.stderr
    manifest = run.manifest()
    assert (manifest.verdict, sorted(manifest.roster.hosts)) == ("stopped", ["a", "b", "c"])
    assert manifest.result is not None
    assert manifest.result.replicas_agree is True
    steps = [first_rank_record(of_step) for of_step in align_steps({rank: run.records(rank) for rank in range(3)})]
    assert [record.step for record in steps] == list(range(manifest.result.steps))
    alone = train(tmp_path / "alone", *FLAGS[:2], f"--steps={len(steps)}", *FLAGS[3:])
    assert [record.loss for record in steps] == pytest.approx([record.loss for record in alone.records(0)], rel=1e-5)
    left = [line for name in "abc" for line in command_lines(lab.host(name))]
    assert not [
        line for line in left if b"evener.node.agent" in line or b"evener.worker" in line or b"supervisor" in line
    ]
    told = (tmp_path / "told").read_text()
    assert "going on with b, c: a is out of reach" in told
    assert "Traceback" not in told
    lab.down()
