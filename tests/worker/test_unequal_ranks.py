"""Ranks that differ in processor, dtype and memory train one model."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.cluster.host_info import local_host_info
from evener.core.run.roster import RankSlot, initial_roster
from evener.core.run.run_spec import parse_args
from evener.core.run.rundir import RunDir

from ..tiers import exhaustive

UNLIKE = """
import os, runpy, sys
if os.environ["RANK"] == "1":
    os.environ["ATEN_CPU_CAPABILITY"] = "default"  # as a processor without AVX2 computes
if spoil := sys.argv.pop(1):
    import torch
    from evener.worker.train.train_step import TrainStep
    update = TrainStep.update
    def spoiled(self, optimizer):
        update(self, optimizer)
        if self.index == 3 and os.environ["RANK"] == "1":
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(float(spoil))
    TrainStep.update = spoiled
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""


@exhaustive
def test_replicas_on_different_cpus_stay_equal(tmp_path, corpus, torchrun):
    """They round differently: after some steps all take rank 0's weights. What is more than rounding is an error."""
    flags = ["--data", str(corpus), "--model", "tiny", "--eval-tokens", "2048", "--threads", "1", "--dtype", "fp32",
             "--shares", "equal", "--steps", "30", "--verify-every", "10"]  # fmt: skip
    done = torchrun(UNLIKE, "", *flags, "--out", str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    assert run.manifest().result.replicas_agree is True
    apart = [event["relative"] for event in run.events() if event["event"] == "replicas.reconciled"]
    if not apart:
        pytest.skip("this processor rounds as one without AVX2")
    assert len(apart) == 3
    assert 0 < max(apart) < 1e-4

    spoiled = torchrun(UNLIKE, "1.2", *flags, "--out", str(tmp_path / "spoiled"), ranks=2)
    assert spoiled.returncode != 0
    assert "after step 10: the replicas differ by more than rounding: rank 1 by" in spoiled.stderr


# Rank 0 plays the GPU: it says that it is one, so all records lag; what it exchanges goes through another memory.
PARTS = """
import os, runpy, sys
if os.environ["RANK"] == "0":
    from evener.core.run.roster import RankSlot
    from evener.worker.train import rank_consistency
    from evener.worker.sync import pairwise
    rank_consistency.local_rank_slot = lambda group, machine: RankSlot(
        host=machine.host, device="cuda:0", name="GPU", has_bf16=True)
    pairwise.is_staged_through_host = lambda group: True
else:
    os.environ["ATEN_CPU_CAPABILITY"] = "default"  # the other's sums are rounded otherwise
sys.argv[0] = "evener.worker"
runpy.run_module("evener.worker", run_name="__main__")
"""
STEPS = ["--steps", "30", "--batch", "16", "--lr", "0.001", "--verify-every", "10", "--eval-every", "0"]


@exhaustive
@pytest.mark.parametrize(
    ("sync", "dtype", "within"),
    [
        ("ddp", "fp32", 1e-5),
        ("packed", "fp32", 1e-5),
        ("ddp", "auto", 0.01),
        ("int8", "auto", 0.01),
        ("diloco:5:int8", "auto", 0.15),  # it learns faster here at first: five steps each for one
    ],
)
def test_ranks_of_different_dtype_and_micro_batch_match_one_process(
    tmp_path, corpus, train, torchrun, monkeypatch, sync, dtype, within
):
    """Each by its own arithmetic and micro-batch, with shares of three to one: what one process learns."""
    alone = train(tmp_path / "alone", *STEPS)
    flags = ["--data", str(corpus), "--model", "tiny", "--eval-tokens", "2048", "--threads", "1", "--sync", sync,
             "--dtype", dtype, "--shares", "3:1", *STEPS, "--out", str(tmp_path / "run")]  # fmt: skip
    host = local_host_info().host
    slots = [RankSlot(host=host, device="cuda:0", has_bf16=True), RankSlot(host=host, device="cpu")]
    roster = initial_roster(parse_args(flags), slots, 64)
    members = [msgspec.structs.replace(member, micro_batch=size)
               for member, size in zip(roster.members, (5, 2), strict=True)]  # fmt: skip
    (tmp_path / "roster.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(roster, members=members)))
    monkeypatch.setitem(torchrun.__globals__["ENV"], "EVENER_ROSTER", str(tmp_path / "roster.json"))
    done = torchrun(PARTS, *flags, ranks=2)
    assert done.returncode == 0, done.stderr

    run = RunDir(tmp_path / "run")
    manifest = run.manifest()
    assert (manifest.roster.backend, manifest.roster.shares) == ("gloo", [12, 4])
    assert manifest.roster.dtypes_text == ("fp32" if dtype == "fp32" else "bf16 and fp32")
    assert manifest.result.replicas_agree is True
    losses, expected = ([record.loss for record in one.records(0)] for one in (run, alone))
    assert len(losses) == 30
    assert losses == pytest.approx(expected, rel=within)
