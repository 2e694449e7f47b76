"""A host with a full disk leaves and rejoins once there is space; the other hosts do not even restart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener.core.run.rundir import RunDir
from evener.lab import disk
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab, come_home, rank_on, wait_until, worlds_of
from tests.tiers import exhaustive

pytestmark = exhaustive
WITHIN_S = 300.0  # of a machine as busy as it likes
FLAGS = ("--model=tiny", "--batch=12", "--steps=100000", "--dtype=fp32", "--threads=1", "--eval-tokens=256",
         "--eval-every=0", "--dropout=0", "--checkpoint-every=5", "--shares=equal")  # fmt: skip


@pytest.mark.parametrize(("full", "words_fit"), [("a", False), ("c", False), ("a", True)])
def test_host_with_full_disk_leaves_and_rejoins_when_space_is_free(
    make_lab: MakeLab, tmp_path: Path, corpus: Path, full: str, words_fit: bool
) -> None:
    """Also where its agent can still write down what it says, and only checkpoints do not fit."""
    file, run = tmp_path / "fleet.toml", RunDir(tmp_path / "run")
    lab = make_lab(file, **{name: HostSpec(rate="20Mbit", disk="1GB") for name in "abc"})
    evener = [sys.executable, "-c", "from evener.cli.main import main; main()"]
    argv = [*evener, "train", "--fleet", str(file), "--data", str(corpus), *FLAGS, "--out=run"]
    with (tmp_path / "told").open("wb") as told:
        running = subprocess.Popen(argv, cwd=tmp_path, stdout=told, stderr=told)

    def events() -> list[dict[str, Any]]:
        assert running.poll() is None, (tmp_path / "told").read_text()
        return come_home(run)

    def worlds() -> list[set[str]]:
        events()
        return [set(hosts) for hosts in worlds_of(run)]

    def saved() -> int:
        return max(event["step"] for event in events() if event["event"] == "checkpoint")

    others = set("abc") - {full}
    try:
        wait_until(lambda: any(event["event"] == "checkpoint" for event in events()), "it saves", WITHIN_S)
        ranks = {name: rank_on(lab.host(name)) for name in others}
        lab.host(full).fill_disk(True)
        wait_until(lambda: others in worlds(), "the others go on", WITHIN_S)
        before = saved()
        wait_until(lambda: saved() > before, "they save", WITHIN_S)
        if words_fit:
            home = lab.host(full).home
            disk.resize(home, shutil.disk_usage(home).used + (4 << 20))
            wait_until(lambda: any(event["event"] == "run.no-room" for event in events()), "it says so", WITHIN_S)
        lab.host(full).fill_disk(False)
        wait_until(lambda: worlds()[-1] == set("abc"), "it is let in again", WITHIN_S)
        assert ranks == {name: rank_on(lab.host(name)) for name in others}, "the same ranks"
    finally:
        done = subprocess.run([*evener, "stop", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S,
                              check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    running.wait(WITHIN_S)
    manifest = run.manifest()
    assert (manifest.verdict, manifest.result and manifest.result.replicas_agree) == ("stopped", True)
    # A record that was cut short is none, and what follows it is whole.
    losses = {record.step for rank in range(3) for record in run.records(rank) if record.loss is not None}
    assert losses == set(range(manifest.result.steps if manifest.result else 0))
    assert "Traceback" not in (tmp_path / "told").read_text()
    lab.down()
