"""`--sync auto` measures at the start and when a link slows during a run, and keeps its choice on resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.core.cluster.fleet_file import HostLink, ModelRate, Rates
from evener.core.cluster.fleet_update import update_fleet_file
from evener.core.run.rundir import RunDir
from evener.lab.lab_spec import HostSpec
from evener.plan.choice.strategy_trial import MAX_VISITS, MIN_STEPS
from tests.lab.conftest import MakeLab, rank_on, wait_until
from tests.tiers import exhaustive

pytestmark = exhaustive
WITHIN_S = 240.0  # of a machine as busy as it likes
FLAGS = ("--model=tiny", "--batch=8", "--dtype=bf16", "--threads=1", "--shares=equal", "--eval-tokens=256",
         "--eval-every=0", "--checkpoint-every=0", "--verify-every=50", "--sync=auto", "--loss-budget=0")  # fmt: skip


def test_measured_choice_persists_after_membership_change_and_resume(
    make_lab: MakeLab, tmp_path: Path, corpus: Path
) -> None:
    """At 8 Mbit/s ddp's 0.4 MB take 0.4 s, packed ones half of it: however busy the machine is, that is faster."""
    file, run = tmp_path / "mine.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, a=HostSpec(), b=HostSpec())
    link = HostLink(goodput_Bps=1e9, rtt_s=1e-4)
    rates = Rates(sync_Bps=2e9, copy_Bps=1e10, models={"tiny": ModelRate(tokens_per_s=2e4, dtype="bf16")})
    update_fleet_file(
        file, links={"a": {"b": link}, "b": {"a": link}}, rates={"a": {"cpu": rates}, "b": {"cpu": rates}}
    )
    evener = [sys.executable, "-c", "from evener.cli.main import main; main()"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    argv = [*evener, "train", "--fleet", str(file), "--data", str(corpus), *FLAGS, "--steps=100000", "--out=run"]
    with (tmp_path / "told").open("wb") as file_of_told:
        running = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=file_of_told, stderr=file_of_told)

    def steps() -> int:
        assert running.poll() is None, (tmp_path / "told").read_text()
        return len(run.records(0)) if run.steps_path(0).exists() else 0

    def told(what: str) -> list[dict[str, Any]]:
        steps()
        path = run.path / "hosts" / "a" / "events.jsonl"  # as it comes home; all hosts' are merged at the end
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if event["event"] == what]

    def worlds() -> list[list[str]]:
        return [event["hosts"] for event in told("world")]

    def uses_packed() -> bool:
        """Whether the last steps sent half of what those with ddp did; with a strategy on trial it is fewer steps."""
        steps()
        sent = [record.bytes for record in run.records(0)]
        return bool(sent) and max(sent[-2 * MIN_STEPS * MAX_VISITS :]) < 0.7 * max(sent)

    try:
        wait_until(lambda: bool(told("compared")), "strategies were compared", WITHIN_S)
        lab.host("b").set_rate("8Mbit")
        for _ in range(4):  # now and then Gloo lets nobody go from a group that is lost, and who is alone begins again
            wait_until(uses_packed, "packed was chosen", WITHIN_S)
            before = len(worlds())
            os.kill(rank_on(lab.host("b")), signal.SIGKILL)
            wait_until(lambda before=before: len(worlds()) > before and worlds()[-1] == ["a", "b"],
                       "b is lost, and let in again", WITHIN_S)  # fmt: skip
            if worlds()[-2:] == [["a"], ["a", "b"]]:
                break
        else:
            pytest.fail("it is never let go")
        now = steps()
        wait_until(lambda: steps() > now + 5, "the run went on", WITHIN_S)
    finally:
        subprocess.run([*evener, "stop", "run"], cwd=tmp_path, env=env, capture_output=True, timeout=WITHIN_S,
                       check=False)  # fmt: skip
    running.wait(WITHIN_S)
    manifest = run.manifest()
    compared = [event for event in run.events() if event["event"] == "compared"]
    assert {one["sync"] for one in compared[0]["measured"]} == {"ddp", "packed"}
    assert compared[-1]["chosen"] == "packed"
    assert str(manifest.roster.sync) == "packed"
    assert manifest.result.replicas_agree is True

    more = str(manifest.result.steps + 3)
    done = subprocess.run([*evener, "train", "--resume", "run", "--steps", more], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=WITHIN_S, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(run.manifest().roster.sync) == "packed"
    assert run.manifest().spec.train.sync == "auto"  # and it would choose again
    assert run.manifest().result.replicas_agree is True
    lab.down()
