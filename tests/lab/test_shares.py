"""A host that is throttled during a run gets a smaller share, and losses match those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir
from evener.lab import cgroup
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab, wait_until
from tests.tiers import exhaustive

pytestmark = exhaustive
WITHIN_S = 240.0  # of a machine as busy as it likes
FLAGS = ("--model=tiny", "--batch=16", "--dtype=fp32", "--threads=1", "--eval-tokens=256", "--eval-every=0",
         "--dropout=0", "--checkpoint-every=0", "--verify-every=0", "--warmup=0", "--lr=3e-5",
         "--min-lr=3e-5")  # fmt: skip


def test_throttled_host_gets_smaller_share(
    make_lab: MakeLab, tmp_path: Path, corpus: Path, train: Callable[..., RunDir]
) -> None:
    """Two hosts with a core each; in the middle of the run one is left a tenth of it. Nothing here depends on how fast
    either really is: only on that the other one is several times as fast.
    """
    if os.geteuid() != 0:
        pytest.skip("cgroups are root's")
    file, run = tmp_path / "fleet.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, a=HostSpec(cpus=1), b=HostSpec(cpus=1))
    evener = [sys.executable, "-c", "from evener.cli.main import main; main()"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    argv = [*evener, "train", "--fleet", str(file), "--data", str(corpus), *FLAGS, "--steps=100000", "--out=run"]
    with (tmp_path / "told").open("wb") as told:
        running = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=told, stderr=told)

    def steps() -> int:
        assert running.poll() is None, (tmp_path / "told").read_text()
        return len(run.records(0)) if run.steps_path(0).exists() else 0

    def rebalanced() -> list[dict[str, object]]:
        told = run.path / "hosts" / "a" / "events.jsonl"  # as it comes home; all hosts' are merged at the end
        lines = told.read_bytes().splitlines(keepends=True) if told.exists() else []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [event for event in events if event["event"] == "rebalanced"]

    try:
        wait_until(lambda: steps() > 15, "the run began", WITHIN_S)
        cut_at = steps()
        cgroup.make(lab.name, "b", 0.1, None)
        wait_until(lambda: any(of_b(event) < 8 for event in rebalanced() if event["step"] >= cut_at - 5),
                   "b's share became smaller", WITHIN_S)  # fmt: skip
        (change, *_) = [event for event in rebalanced() if event["step"] >= cut_at - 5 and of_b(event) < 8]
        wait_until(lambda: steps() > change["step"] + 5, "the run went on", WITHIN_S)
    finally:
        subprocess.run([*evener, "stop", "run"], cwd=tmp_path, env=env, capture_output=True, timeout=WITHIN_S,
                       check=False)  # fmt: skip
    running.wait(WITHIN_S)
    records = [run.records(rank) for rank in range(2)]
    both = list(zip(*records, strict=False))
    assert all(sum(record.tokens for record in pair) == 16 * 64 for pair in both)
    assert "takes" in str(change["why"])
    last = max(event["step"] for event in rebalanced())
    lasting = [record.tokens / 64 for record in records[1] if record.step >= last]
    assert set(lasting) <= {of_b(rebalanced()[-1])}
    alone = train(tmp_path / "alone", *FLAGS, "--steps", str(len(records[0])))
    assert [record.loss for record in records[0]] == pytest.approx(
        [record.loss for record in alone.records(0)], rel=1e-5
    )
    assert run.manifest().result.replicas_agree is True
    lab.down()


def of_b(event: dict[str, object]) -> int:
    shares = event["shares"]
    assert isinstance(shares, list)
    return int(shares[1])
