"""Probing a device measures its fixed and variable time per pass, its update and its loopback all-reduce."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.core.cluster.host_probe import HostProbeSpec, model_rate
from evener.core.model.pretrained import read_pretrained
from evener.core.model.shape import PRESETS
from evener.core.run.roster import MICRO_BATCH_TOKENS
from evener.launch.probe_hosts import describe_probed_model
from evener.worker.finetune.model import build_from_config
from evener.worker.probe import sustained_bench
from evener.worker.probe.loopback_bench import INTERFACE_ENV, SIZE_BYTES, loopback_rates_Bps

from ..pretrained import make_model

CPU = torch.device("cpu")
UPDATE_S = 0.002


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def device_of(monkeypatch: Any, *, pass_s: float, sequence_s: float, first_s: float = 0.0) -> list[str]:
    """A device whose passes take exactly so long, by a clock of its own. Returns the sentences that it is told."""
    clock = [0.0]
    num_steps = itertools.count()

    class Trainer:
        block_size, dtype = PRESETS["char"].block_size, "fp32"
        max_sequences = MICRO_BATCH_TOKENS // block_size

        def __init__(self, *_: object) -> None: ...

        def train_step(self, micro_batch: int) -> tuple[float, float, float]:
            took_s = pass_s + micro_batch * sequence_s + (first_s if next(num_steps) == 0 else 0.0)
            clock[0] += took_s + UPDATE_S
            return took_s, 1.5 * took_s, UPDATE_S

    monkeypatch.setattr(sustained_bench, "SustainedTrainer", Trainer)
    monkeypatch.setattr(sustained_bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    return []


@pytest.mark.parametrize(
    ("sequence_s", "pass_s", "large"),
    [
        (0.08, 0.02, 16),  # two cores: 16 take 1.3 s, 32 would take more than an eighth of the time
        (1e-4, 0.005, 64),  # a GPU: what a run takes at once
        (0.6, 0.1, 2),
    ],
)
def test_probe_recovers_pass_cost_and_rate(monkeypatch, sequence_s, pass_s, large):
    said = device_of(monkeypatch, pass_s=pass_s, sequence_s=sequence_s, first_s=3.0)
    found = sustained_bench.train_sustained(HostProbeSpec(host="h"), "char", CPU, said.append)
    rate = model_rate(found)
    assert found.large.micro_batch == large
    assert (rate.pass_s, rate.tokens_per_s) == pytest.approx((pass_s, 256 / sequence_s), rel=1e-6)
    assert (rate.update_s, rate.cpus, rate.dtype) == (UPDATE_S, pytest.approx(1.5), "fp32")
    assert found.tokens_per_s == pytest.approx(256 * large / (pass_s + large * sequence_s))
    assert not said


def test_smaller_passes_repeat_often_within_their_time_budget(monkeypatch):
    device_of(monkeypatch, pass_s=0.005, sequence_s=1e-4)
    found = sustained_bench.train_sustained(HostProbeSpec(host="h"), "char", CPU, print)
    smaller_s = sum(one.passes * one.pass_p50_s for one in found.smaller)
    assert smaller_s < 1.1 * sustained_bench.SMALLER_SHARE * 12.0
    assert min(one.passes for one in found.smaller) > 20


@pytest.mark.parametrize(("sequence_s", "whole_s"), [(5.0, 5 * 5), (20.0, 20 * 4)])
def test_slow_host_is_probed_with_three_passes(monkeypatch, sequence_s, whole_s):
    said = device_of(monkeypatch, pass_s=0.0, sequence_s=sequence_s)
    found = sustained_bench.train_sustained(HostProbeSpec(host="h"), "char", CPU, said.append)
    assert (found.large.passes, found.smaller) == (3, [])
    assert model_rate(found).pass_s is None
    assert len(said) == 1
    assert sustained_bench.time.perf_counter() == pytest.approx(whole_s, rel=0.01)


def test_probing_a_preset_measures_rate_update_and_cpus():
    found = sustained_bench.train_sustained(HostProbeSpec(host="h", seconds=2.0), "tiny", CPU, print)
    assert found.large.passes >= 3
    assert found.updates == found.large.passes + sum(one.passes for one in found.smaller)
    rate = model_rate(found)
    assert rate.tokens_per_s > 100
    assert 0 < (rate.update_s or 0) < 1
    assert 0 < (rate.cpus or 0) < 1.5


@pytest.mark.parametrize(("lora", "has_dora"), [(None, False), (4, False), (4, True)])
def test_pretrained_model_is_probed_from_its_config_alone(tmp_path, lora, has_dora):
    """Without its weights; the rate counts positions, and says how many FLOPs each has."""
    make_model(tmp_path / "llama")
    model = read_pretrained(tmp_path / "llama", 64, lora, has_dora=has_dora)
    described = describe_probed_model(tmp_path / "llama", 64, lora, has_dora=has_dora)
    assert described.num_trained == model.num_params()
    spec = HostProbeSpec(host="h", seconds=1.0, pretrained=described, dtype="fp32")
    built = build_from_config(described.config, lora, "fp32", has_dora=has_dora)
    assert sum(parameter.numel() for parameter in built.parameters()) == described.num_trained
    found = sustained_bench.train_sustained(spec, described.name, CPU, print)
    rate = model_rate(found, described.flops_per_token)
    assert found.large.tokens == found.large.micro_batch * 64
    assert rate.tokens_per_s > 100
    assert rate.flops_per_token == described.flops_per_token


def test_loopback_rates_are_plausible_and_interface_setting_is_kept(monkeypatch):
    monkeypatch.setenv(INTERFACE_ENV, "eth-of-the-run")
    sync_Bps, loopback_Bps = loopback_rates_Bps()
    assert os.environ[INTERFACE_ENV] == "eth-of-the-run"
    # Both ranks together keep at most as many processors busy as there are: S/sync_Bps is one rank's part of that.
    assert 2 * SIZE_BYTES / sync_Bps <= 1.05 * (os.cpu_count() or 1) * SIZE_BYTES / loopback_Bps
    assert loopback_Bps > 1e7
