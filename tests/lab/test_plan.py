"""Probe, plan, train and report on emulated hosts with the commands that a user would type."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.cluster.fleet_file import ModelRate, Rates, load_fleet
from evener.core.cluster.fleet_update import update_fleet_file
from evener.core.run.run_plan import read_plan, read_prediction
from evener.core.run.rundir import RunDir
from evener.lab.lab_spec import HostSpec
from evener.report.read.run_summary import summarize_run
from tests.tiers import exhaustive

pytestmark = exhaustive
FLAGS = ("--model=tiny", "--batch=12", "--dtype=fp32", "--threads=1", "--eval-tokens=256", "--eval-every=0",
         "--shares=equal", "--sync=ddp")  # fmt: skip


def evener(folder: Path, *args: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from evener.cli.main import main; main()", *map(str, args)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_fleet_is_probed_planned_trained_and_reported(make_lab, tmp_path, corpus):
    """Figures of a busy machine prove nothing: what must hold is that every number arrives where it belongs."""
    file = tmp_path / "fleet.toml"
    slow = HostSpec(rate="100Mbit")
    lab = make_lab(file, a=HostSpec(rate="1Gbit"), b=slow, c=HostSpec(rate="1Gbit"))
    data = ("--data", corpus)
    unknown = evener(
        tmp_path, "train", "--fleet", file, *data, *FLAGS, "--steps", "3", "--hosts", "a,b", "--out", "first"
    )
    assert "no prediction: a: nobody measured its processor; evener probe host --fleet " + str(file) in unknown.stderr
    assert read_prediction(RunDir(tmp_path / "first")) is None

    evener(tmp_path, "probe", "wire", "--fleet", file, "--seconds", "0.5", "--no-iperf3")
    evener(tmp_path, "probe", "host", "--fleet", file, "--model", "tiny", "--dtype", "fp32", "--seconds", "1")
    rates = load_fleet(file).rates
    assert {name: rates[name]["cpu"].models["tiny"].dtype for name in "abc"} == dict.fromkeys("abc", "fp32")

    asked = json.loads(evener(tmp_path, "plan", "--fleet", file, *data, *FLAGS, "--json").stdout)
    done = evener(tmp_path, "train", "--fleet", file, *data, *FLAGS, "--steps", "12", "--out", "run", "--json")
    assert "predicted: a step of " in done.stderr
    rundir = RunDir(tmp_path / "run")
    prediction = read_prediction(rundir)
    assert prediction is not None
    option = prediction.option("ddp")
    (same,) = [one for one in asked["options"] if one["name"] == "ddp"]
    assert option.step_s == pytest.approx(same["step_s"])  # what plan said is what train executes
    assert [host.name for host in read_plan(rundir).hosts] == prediction.cluster.host_names
    assert option.roster == read_plan(rundir).roster == rundir.manifest().roster
    for member in option.roster.members:
        assert rundir.manifest().ranks[member.rank].host == member.host
        assert {record.bytes for record in rundir.records(member.rank)} == {option.ranks[member.rank].bytes}
        assert {record.tokens for record in rundir.records(member.rank)} == {4 * 64}
    told = json.loads(done.stdout)["predicted"]
    assert told["step_s"] == pytest.approx(option.step_s)
    assert summarize_run(rundir).predicted == option
    assert "predicted to take" in evener(tmp_path, "report", "run").stdout + (tmp_path / "run/report.html").read_text()

    again = json.loads(evener(tmp_path, "plan", "--from", "run", "--json").stdout)
    (ddp,) = [one for one in again["options"] if one["name"] == "ddp"]
    assert list(again["cluster"]["hosts"]) == prediction.cluster.host_names
    assert ddp["step_s"] == pytest.approx(summarize_run(rundir).step_p50_s, rel=0.5)

    few = evener(
        tmp_path, "train", "--fleet", file, *data, *FLAGS, "--steps", "3", "--hosts", "c,a", "--out", "few", "--json"
    )
    assert "predicted: " in few.stderr
    assert [host.name for host in read_plan(RunDir(tmp_path / "few")).hosts] == ["a", "c"]

    slow = Rates(models={"tiny": ModelRate(tokens_per_s=0.5, dtype="fp32")})
    update_fleet_file(file, rates={"c": {"cpu": slow}}, links={})
    auto = evener(
        tmp_path, "train", "--fleet", file, *data, *FLAGS, "--shares=auto", "--steps", "3", "--out", "auto", "--json"
    )
    assert re.search(r"left out: [^:]*\bc\b[^:]*: adding .*makes this run slower; .* tokens/s with", auto.stderr), (
        auto.stderr
    )
    plan, prediction = read_plan(RunDir(tmp_path / "auto")), read_prediction(RunDir(tmp_path / "auto"))
    assert prediction is not None
    assert prediction.left_out["c"].startswith("adding ")
    assert "c" not in [host.name for host in plan.hosts]
    assert plan.roster == prediction.option(prediction.chosen).roster == RunDir(tmp_path / "auto").manifest().roster
    lab.down()
