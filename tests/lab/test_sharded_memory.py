"""Two hosts that cannot hold a model's training state each train it together; what they send each other."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir
from evener.lab.lab_spec import HostSpec
from tests.conftest import ENV, flags_of
from tests.lab.conftest import MakeLab
from tests.tiers import exhaustive

# 42.6M parameters: 680 MB of weights, gradients and AdamW's moments beside what a rank and its launcher need anyway
MODEL = ("--model", "gpt2", "--width", "768", "--num-heads", "12", "--num-layers", "6", "--block-size", "64", "--steps",
         "4", "--batch", "2", "--warmup", "1", "--eval-tokens", "256", "--dtype", "fp32")  # fmt: skip
LIMIT = "1000MB"


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = ENV | {"XDG_CONFIG_HOME": str(folder / "config"), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)


@exhaustive
@pytest.mark.alone  # the kernel counts processes that it ended for want of memory for all hosts of all labs together
@pytest.mark.skipif(os.geteuid() != 0, reason="cgroups are root's")
def test_state_that_exceeds_a_host_is_trained_by_two(make_lab: MakeLab, tmp_path: Path, corpus: Path) -> None:
    """By fsdp and by zero1, with the losses of one process without a limit; by ddp the kernel ends a rank."""
    fleet = tmp_path / "fleet.toml"
    lab = make_lab(fleet, a=HostSpec(memory=LIMIT), b=HostSpec(memory=LIMIT))
    alone = run([sys.executable, "-m", "evener.worker", *flags_of(corpus, tmp_path / "alone"), *MODEL], tmp_path)
    assert alone.returncode == 0, alone.stderr
    expected = [record.loss for record in RunDir(tmp_path / "alone").records(0)]
    evener = [str(Path(sys.executable).with_name("evener")), "train", "--fleet", str(fleet), "--data", str(corpus)]
    for sync in ("fsdp", "zero1", "ddp"):
        out = tmp_path / sync
        ended = run([*evener, *MODEL, "--threads", "1", "--shares", "equal", "--membership", "fixed", "--sync", sync,
                     "--out", str(out)], tmp_path)  # fmt: skip
        if sync == "ddp":
            assert ended.returncode != 0
            assert "had no memory left" in ended.stdout + ended.stderr
            break
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert [record.loss for record in RunDir(out).records(0)] == pytest.approx(expected, rel=1e-5)
    lab.down()


@exhaustive
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are root's")
def test_hosts_exchange_only_sums_if_weights_are_sharded_within_each(
    make_lab: MakeLab, tmp_path: Path, corpus: Path
) -> None:
    """Of P bytes each of two ranks sends P/2 to the other host in a step, within 3 % of the kernel's counters."""
    fleet = tmp_path / "fleet.toml"
    lab = make_lab(fleet, a=HostSpec(), b=HostSpec())
    evener = [str(Path(sys.executable).with_name("evener")), "train", "--fleet", str(fleet), "--data", str(corpus)]
    model = ["--model", "gpt2", "--width", "256", "--num-heads", "4", "--num-layers", "4", "--block-size", "64"]
    flags = ["--ranks", "2", "--batch", "4", "--warmup", "1", "--eval-tokens", "256", "--dtype", "fp32",
             "--threads", "1", "--shares", "equal", "--membership", "fixed", "--sync", "hsdp"]  # fmt: skip
    counted = [lab.host("a").interface_counters().payload_bytes]
    for steps in (4, 34):
        out = tmp_path / f"{steps}"
        ended = run([*evener, *model, *flags, "--steps", str(steps), "--out", str(out)], tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        counted.append(lab.host("a").interface_counters().payload_bytes)
    lab.down()
    stated = 4 * RunDir(tmp_path / "34").manifest().shape.num_params()
    first, second = (after - before for before, after in itertools.pairwise(counted))
    assert (second - first) / 30 == pytest.approx(stated, rel=0.03)
