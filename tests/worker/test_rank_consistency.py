"""A rank that differs from the others is named before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from evener.core.cluster.host_info import local_host_info
from evener.core.run.membership_epoch import MembershipEpoch
from evener.core.run.roster import RankSlot, initial_roster, parse_sync
from evener.core.run.run_spec import RunSpec, parse_args
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.worker.membership import elastic
from evener.worker.rank.process_groups import ProcessGroups
from evener.worker.train import rank_consistency
from evener.worker.train.rank_consistency import (
    RankFingerprint,
    find_mismatch,
    rank_fingerprint,
    starting_roster,
)

SEATS = [RankSlot(host=host, device="cpu") for host in "aab"]
ROSTER = initial_roster(RunSpec(), SEATS, None)
SAME = RankFingerprint(
    rank=0,
    host="a",
    code_hash="c",
    torch="2.13.0",
    spec={"train.lr": 1e-3},
    corpus_hash="d",
    tokenizer_hash="t",
    shapes_hash="s",
    roster=ROSTER,
    first_step=0,
)


@pytest.mark.parametrize(
    ("change", "check", "what"),
    [
        ({"code_hash": "x"}, "code.mismatch", "evener's code"),
        ({"torch": "2.12.0"}, "version.torch", "torch"),
        ({"corpus_hash": "x"}, "data.mismatch", "the corpus"),
        ({"tokenizer_hash": "x"}, "tokenizer.mismatch", "the tokenizer"),
        ({"spec": {"train.lr": 2e-3}}, "spec.mismatch", "train.lr (0.001 and 0.002)"),
        ({"shapes_hash": "x"}, "spec.mismatch", "the parameters' shapes"),
        ({"roster": ROSTER.with_weights([2, 1, 1], 0)}, "roster.mismatch", "who does what"),
        ({"first_step": 20}, "checkpoint.mismatch", "the step to go on from (0 and 20)"),
    ],
)
def test_mismatching_rank_is_named(change: dict[str, Any], check: str, what: str) -> None:
    ranks = [SAME, *(msgspec.structs.replace(SAME, rank=rank, host=host) for rank, host in ((1, "a"), (2, "b")))]
    assert find_mismatch(ranks) is None
    ranks[2] = msgspec.structs.replace(ranks[2], **change)
    assert find_mismatch(ranks) == (check, what, "rank 2 on b and rank 0 on a", 2)


def test_mismatch_is_attributed_to_the_minority() -> None:
    one, other = SAME, msgspec.structs.replace(SAME, code_hash="x")
    for ranks, odd in (([one, other, one], 1), ([one, other, other], 0), ([one, other], None)):
        found = find_mismatch([msgspec.structs.replace(each, rank=rank) for rank, each in enumerate(ranks)])
        assert found is not None
        assert found[3] == odd


def test_host_specific_paths_are_not_compared() -> None:
    """Each host has its corpus, its weights and its run somewhere else."""
    specs = [parse_args(["--model=gpt2", f"--init-from=/{host}/w", f"--data=/{host}/d", f"--out=/{host}/r"])
             for host in "ab"]  # fmt: skip
    assert (
        find_mismatch([rank_fingerprint(ROSTER, rank + 1, spec, None, [], 0) for rank, spec in enumerate(specs)])
        is None
    )


@pytest.mark.parametrize(
    ("sync", "hosts", "expected"),
    [("auto", ["a", "b"], "diloco:10"), ("auto", ["a"], "diloco:10"), ("ddp", ["a", "b"], "ddp")],
)
def test_restarted_ranks_continue_with_the_strategy_of_their_checkpoint(monkeypatch, tmp_path, sync, hosts, expected):
    """Where the user named none. A host that is alone keeps it, for those that come back."""
    seats = [RankSlot(host=host, device="cpu") for host in "ab"]
    planned, spec = initial_roster(RunSpec(), seats, None), parse_args([f"--sync={sync}"])
    epoch = MembershipEpoch(number=3, hosts=hosts)
    group: Any = SimpleNamespace(
        all_gather=lambda mine, kind: [mine for _ in hosts] if kind is not RankSlot else seats[: len(hosts)],
        is_admitted=True, membership_epoch=epoch, member_ranks=[], local_rank=0, rank=0)  # fmt: skip
    start: Any = SimpleNamespace(sync=parse_sync("diloco:10"), bucket_bytes=0)
    for module in (rank_consistency, elastic):
        monkeypatch.setattr(module, "read_launcher_roster", lambda: planned)
    monkeypatch.setattr(rank_consistency, "is_elastic", lambda: True)
    for name in ("detect_previous_oom", "local_rank_slot"):
        monkeypatch.setattr(rank_consistency, name, lambda *args: None)
    monkeypatch.setattr(rank_consistency, "local_rank_slot", lambda *args: seats[0])
    monkeypatch.setattr(rank_consistency, "limit_micro_batches", lambda roster, group: roster)
    monkeypatch.setenv("EVENER_SAYINGS", str(tmp_path))
    roster = starting_roster(group, RunWriter(tmp_path), local_host_info(), spec, None, start)
    assert (str(roster.sync), roster.hosts) == (expected, hosts)
    assert str(elastic.ElasticMembership(roster, group).roster.sync) == expected


def test_ranks_with_different_specs_do_not_start(run_script: Any, tmp_path: Any) -> None:
    """Two ranks of a real run, one with another learning rate."""
    done = run_script(
        f"""
import os, sys, evener, torch
from evener.core.run.run_spec import parse_args
lr = 1e-3 if os.environ["RANK"] == "0" else 2e-3
spec = parse_args(["--model=tiny", "--batch=2", f"--lr={{lr}}", "--out={tmp_path}/run"])
class Data:
    def global_batch(self, seed, step, n): raise AssertionError("a step was begun")
    num_tokens = load = global_batch
with evener.join(spec) as run:
    model = run.model(torch.nn.Linear(2, 2))
    run.optimizer(torch.optim.SGD(model.parameters()))
    for step in run.steps(Data()):
        next(step.micro_batches())
""",
        ranks=2,
    )
    assert done.returncode != 0
    assert "spec.mismatch: train.lr (0.001 and 0.002): rank 1 on" in done.stderr
    assert "a step was begun" not in done.stderr


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "fp32"), ("bf16", "bf16")])
def test_custom_program_dtype_is_fp32_unless_given(dtype: str, expected: str) -> None:
    """evener does not run its forward: without a word its arithmetic is torch's own."""
    spec = parse_args(["--dtype", dtype, "--device", "cpu"])
    assert (
        starting_roster(ProcessGroups("cpu"), RunDir("absent"), local_host_info(), spec, None, None).members[0].dtype
        == expected
    )
