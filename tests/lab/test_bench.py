"""`evener bench` measures emulated hosts, and a stopped bench resumes where it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.cluster.fleet_file import HostLink, ModelRate, Rates
from evener.core.cluster.fleet_update import update_fleet_file
from evener.core.run.rundir import RunDir
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab
from tests.tiers import exhaustive

pytestmark = exhaustive


def bench(folder: Path, *args: object) -> dict:
    argv = [sys.executable, "-c", "from evener.cli.main import main; main()", "bench", *map(str, args), "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_fleet_bench_runs_single_hosts_combinations_and_strategies(
    make_lab: MakeLab, tmp_path: Path, corpus: Path
) -> None:
    file = tmp_path / "fleet.toml"
    lab = make_lab(file, a=HostSpec(), b=HostSpec())
    # What a probe would find, so that none is needed: b is the faster one.
    link = HostLink(goodput_Bps=1e8, rtt_s=1e-3)
    rates = {name: {"cpu": Rates(sync_Bps=2e9, loopback_Bps=1e9, matmul_flops={"fp32": 1e11, "bf16": 1e11},
                                 copy_Bps=1e10, models={"tiny": ModelRate(tokens_per_s=speed, dtype="")})}
             for name, speed in (("a", 1e4), ("b", 2e4))}  # fmt: skip
    update_fleet_file(file, links={"a": {"b": link}, "b": {"a": link}}, rates=rates)
    common = ("--fleet", file, "--data", corpus, "--model", "tiny", "--batch", "4")

    found = bench(tmp_path, *common, "--seconds", "2")
    cores = max(1, len(os.sched_getaffinity(0)) // 2)  # of a host: the lab divides the machine's
    several = [f"{name}, {min(4, cores)} processes" for name in "ab"] if cores > 1 else []
    alone = {"a, 1 process", "b, 1 process", *several}
    (together,) = found["runs"].keys() - alone
    assert set(together.split(" + ")) == {"a", "b"}
    assert found["runs"].keys() > alone
    assert found["base"] in alone
    assert not found["failed"]
    for label, run in found["runs"].items():
        assert run["tokens_per_s"] > 0
        manifest = RunDir(tmp_path / run["run_dir"]).manifest()
        assert set(manifest.roster.hosts) == ({"a", "b"} if label == together else {label[0]})
        assert manifest.world_size == (int(label.split(", ")[1].split()[0]) if label in alone else 2)
    assert found["runs"][together]["predicted"]["step_s"] > 0

    ways = (*common, "--preset", "strategies", "--steps", "4", "--out", "ways", "--syncs")
    found = bench(tmp_path, *ways, "ddp")
    assert list(found["runs"]) == ["b alone", "ddp"]
    began = RunDir(tmp_path / "ways/ddp").manifest().started
    found = bench(tmp_path, *ways, "ddp,int8")
    assert list(found["runs"]) == ["b alone", "ddp", "int8"]
    assert RunDir(tmp_path / "ways/ddp").manifest().started == began  # what is finished is not run again
    assert RunDir(tmp_path / "ways/int8").manifest().roster.sync.kind == "int8"
    losses = [run["val_loss"] for run in found["runs"].values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=0.01)
    assert (tmp_path / "ways/strategies.png").is_file()
    assert (tmp_path / "ways/report.html").is_file()
    lab.down()


def test_pipeline_prototype_learns_what_one_process_learns(corpus: Path) -> None:
    """Two stages on two hosts, in fp32: losses within 1e-5."""
    argv = [sys.executable, str(Path(__file__).parents[2] / "bench" / "pipeline.py"), "--data", str(corpus), "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
