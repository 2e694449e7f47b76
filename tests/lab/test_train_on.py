"""`evener train my.txt --on a,b`: from a text and two machines to a trained model, by one command."""

from __future__ import annotations

import os
import subprocess
import sys

from evener.core.cluster.fleet_file import load_fleet
from evener.core.run.rundir import RunDir
from evener.lab.lab_spec import HostSpec
from tests.tiers import exhaustive


@exhaustive
def test_text_and_two_machines_become_a_trained_model(make_lab, tmp_path):
    fleets = tmp_path / "config" / "evener" / "fleets"
    fleets.mkdir(parents=True)
    make_lab(fleets / "a+b.toml", a=HostSpec(), b=HostSpec())  # as `fleet init` would name them, had they names in DNS
    (tmp_path / "my.txt").write_text("one text of one's own, and two machines. " * 400)
    argv = [sys.executable, "-c", "from evener.cli.main import main; main()", "train", "my.txt", "--on", "a,b",
            "--model=tiny", "--steps=4", "--batch=8", "--shares=equal", "--threads=1", "--out=run"]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    env |= {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=env)
    assert first.returncode == 0, first.stdout + first.stderr
    shown = [line.split()[2:4] for line in first.stderr.splitlines() if line.startswith("$ evener")]
    assert [words[0] for words in shown] == ["doctor", "probe", "probe"]
    known = load_fleet(fleets / "a+b.toml")
    assert known.links["a"]["b"].goodput_Bps > 0
    assert all("tiny" in rates.models for by_device in known.rates.values() for rates in by_device.values())
    manifest = RunDir(str(tmp_path / "run")).manifest()
    assert (manifest.verdict, manifest.roster.hosts) == ("finished", ["a", "b"])
    assert manifest.spec.train.sync == "auto"
    argv[-1:] = ["--out=other", "--dry-run"]
    again = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=env)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "$ evener probe" not in again.stderr
    assert "found prepared in" in again.stderr
