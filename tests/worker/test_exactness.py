"""Any number of ranks trains the same model as one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from ..tiers import exhaustive, exhaustively

STEPS = ("--steps", "50", "--batch", "16", "--eval-every", "25", "--lr", "0.001")  # 16 cannot be divided by 3


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return tmp_path_factory.mktemp("exactness")


@pytest.mark.parametrize("micro_batch", ["2", *exhaustively("16")])
def test_one_two_and_three_ranks_have_the_same_losses(tmp_path, train, micro_batch):
    runs = {n: train(tmp_path / f"{n}", *STEPS, "--micro-batch", micro_batch, ranks=n) for n in (1, 2, 3)}

    one = [record.loss for record in runs[1].records(0)]
    assert len(one) == 50
    assert one[-1] < one[0] * 0.8  # it learns
    for ranks in (2, 3):
        for rank in range(ranks):
            losses = [record.loss for record in runs[ranks].records(rank)]
            assert losses == pytest.approx(one, rel=1e-5)
        assert runs[ranks].manifest().result.val_loss == pytest.approx(runs[1].manifest().result.val_loss, rel=1e-5)
        assert runs[ranks].manifest().result.replicas_agree is True
    tokens = [runs[3].records(rank)[0].tokens for rank in range(3)]
    assert tokens == [6 * 64, 5 * 64, 5 * 64]

    compared = subprocess.run(
        [sys.executable, "-m", "evener.worker.compare_weights", str(tmp_path / "1"), str(tmp_path / "3")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < json.loads(compared.stdout)["largest_difference"] < 1e-3


def test_activation_checkpointing_does_not_change_losses(tmp_path, train):
    plain = train(tmp_path / "plain", "--steps", "5")
    frugal = train(tmp_path / "frugal", "--steps", "5", "--recompute")
    assert [r.loss for r in plain.records(0)] == [r.loss for r in frugal.records(0)]


def test_bf16_loss_is_close_to_fp32(tmp_path, train):
    fp32 = train(tmp_path / "fp32", "--steps", "20")
    bf16 = train(tmp_path / "bf16", "--steps", "20", "--dtype", "bf16", ranks=2)
    assert bf16.manifest().roster.dtypes_text == "bf16"
    assert bf16.records(0)[-1].loss == pytest.approx(fp32.records(0)[-1].loss, rel=0.02)


@exhaustive
def test_run_initializes_from_gpt2_weights(tmp_path, train, start):
    """At a learning rate of 0 what is saved is what was loaded; another shape is refused."""
    import transformers

    from evener.worker.train.gpt2 import load_gpt2

    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    shape = ("--model", "gpt2", "--block-size", "64", "--num-layers", "2", "--num-heads", "1", "--width", "64")
    run = train(tmp_path / "run", *shape, "--init-from", str(file), "--steps", "1", "--lr", "0", ranks=2)
    _, weights = load_gpt2(file)
    saved = load_file(run.checkpoint_path(1) / "weights.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)

    refused = start(tmp_path / "other", *shape[:-2], "--width", "128", "--init-from", str(file), "--steps", "1")
    assert refused.wait() == 2
    assert "its shape is not that of --model gpt2" in refused.text()
    assert "Traceback" not in refused.text()
