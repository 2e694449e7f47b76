"""Sustained benchmark: train a model on this device without pause and measure throughput and its decline.

Most of the time it runs large micro-batches, because long training runs hot. Smaller ones in between, in the same
minutes, show the part of a pass's time that does not depend on its number of tokens. An optimizer update follows each
pass, as in training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.core.base.units import format_seconds as duration
from evener.core.base.units import median, percentile
from evener.core.cluster.host_probe import HostProbeSpec, MicroBatchTiming, SustainedThroughput
from evener.core.model.shape import PRESETS, preset_shape
from evener.core.run.roster import MICRO_BATCH_TOKENS, RankSlot, choose_dtypes
from evener.core.run.run_spec import TrainSpec
from evener.worker.finetune.model import build_from_config
from evener.worker.rank.precision import TORCH_DTYPES, has_bf16
from evener.worker.train.model import GPT
from evener.worker.train.optim import adamw

LARGE_SHARE = 1 / 8  # fraction of the benchmark's time: a micro-batch that takes longer is too large
PROBE_SHARE = 1 / 40  # fraction of the benchmark's time: a pass that takes this long predicts larger ones
NUM_PROBES = 3
MIN_PASSES = 3
SMALLER_SHARE = 0.2  # largest fraction of the benchmark's time for smaller micro-batches
NUM_SINGLE_PASSES, NUM_MIDDLE_PASSES = 3, 2  # passes per round of smaller micro-batches


class SustainedTrainer:
    """A model with its optimizer, in the dtype that a run would choose: a preset, or a pretrained one whose weights are
    random.
    """

    def __init__(self, spec: HostProbeSpec, model: str, device: torch.device) -> None:
        torch.manual_seed(0)
        slot = RankSlot(host=spec.host, device=str(device), has_bf16=has_bf16(device))
        (self.dtype,) = choose_dtypes([slot], spec.dtype)
        self.device = device
        self._spec = TrainSpec(lr=1e-3)
        if spec.pretrained is None:
            changes: dict[str, Any] = {} if spec.dropout is None else {"dropout": spec.dropout}
            shape = preset_shape(model, PRESETS[model].vocab_size, **changes)
            self.block_size, vocab_size = shape.block_size, shape.vocab_size
            module: nn.Module = GPT(shape)
        else:
            self.block_size, vocab_size = spec.pretrained.block_size, spec.pretrained.vocab_size
            module = build_from_config(
                spec.pretrained.config, spec.pretrained.lora_rank, self.dtype, has_dora=spec.pretrained.has_dora
            )
        self._module = module.to(device)
        self._optimizer = adamw(self._module, self._spec)
        self.max_sequences = max(1, MICRO_BATCH_TOKENS // self.block_size)  # in sequences, as in a run
        tokens = torch.randint(vocab_size, (self.max_sequences, self.block_size + 1)).to(device)
        positions = torch.arange(self.block_size, device=device).repeat(self.max_sequences, 1)
        self._inputs = (tokens[:, :-1], *([] if spec.pretrained is None else [positions]), tokens[:, 1:])

    def train_step(self, micro_batch: int) -> tuple[float, float, float]:
        """Train one step. Return (seconds of forward and backward, CPU seconds of these, seconds of the update)."""
        began, cpu = time.perf_counter(), time.process_time()
        with torch.autocast(self.device.type, TORCH_DTYPES[self.dtype], enabled=self.dtype != "fp32"):
            loss = self._module(*(part[:micro_batch] for part in self._inputs))
        (loss / (micro_batch * self.block_size)).backward()
        synchronize_device(self.device)
        between, cpu_s = time.perf_counter(), time.process_time() - cpu
        nn.utils.clip_grad_norm_(self._module.parameters(), self._spec.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        synchronize_device(self.device)
        return between - began, cpu_s, time.perf_counter() - between


def train_sustained(
    spec: HostProbeSpec, model: str, device: torch.device, notify: Callable[[str], None]
) -> SustainedThroughput:
    """Train a model for about `spec.seconds`, but for at least MIN_PASSES passes with the large micro-batch.

    `notify` is called if these passes take longer than `spec.seconds`.
    """
    trainer, seconds = SustainedTrainer(spec, model, device), spec.seconds
    large = _choose_micro_batch(trainer, seconds, notify)
    between = 1 << (large.bit_length() - 1) // 2
    round_of = [between] * NUM_MIDDLE_PASSES * (1 < between < large) + [1] * NUM_SINGLE_PASSES * (large > 1)
    for micro_batch in dict.fromkeys(round_of):
        trainer.train_step(micro_batch)

    passes: list[tuple[float, float, float]] = []  # large ones: end, duration, CPU seconds
    smaller: dict[int, list[float]] = {micro_batch: [] for micro_batch in sorted(set(round_of))}
    updates: list[float] = []
    clocks: list[tuple[float, float]] = []
    began, smaller_s = time.perf_counter(), 0.0
    while time.perf_counter() < began + seconds or len(passes) < MIN_PASSES:
        took_s, cpu_s, update_s = trainer.train_step(large)
        updates.append(update_s)
        now = time.perf_counter()
        passes.append((now - began, took_s, cpu_s))
        if (clock := _clock_Hz()) is not None:
            clocks.append((now - began, clock))
        if smaller_s < SMALLER_SHARE * (now - began):
            for micro_batch in round_of:
                took_s, _, update_s = trainer.train_step(micro_batch)
                smaller[micro_batch].append(took_s)
                updates.append(update_s)
            smaller_s += time.perf_counter() - now

    def timed(micro_batch: int, took: list[float]) -> MicroBatchTiming:
        return MicroBatchTiming(
            micro_batch=micro_batch,
            tokens=micro_batch * trainer.block_size,
            passes=len(took),
            pass_p50_s=percentile(took, 0.5),
            pass_p95_s=percentile(took, 0.95),
        )

    whole_s = passes[-1][0]
    thirds = [[run for run in passes if lo <= run[0] / whole_s <= hi] or passes for lo, hi in ((0, 1 / 3), (2 / 3, 1))]
    first_Hz, last_Hz = (
        median([clock for at, clock in clocks if lo <= at / whole_s <= hi]) for lo, hi in ((0, 1 / 3), (2 / 3, 1))
    )
    larges = timed(large, [took for _, took, _ in passes])
    return SustainedThroughput(
        dtype=trainer.dtype,
        large=larges,
        smaller=[timed(micro_batch, took) for micro_batch, took in smaller.items()],
        tokens_per_s=larges.tokens / larges.pass_p50_s,
        cpus=_mean_cpus(passes),
        updates=len(updates),
        update_p50_s=percentile(updates, 0.5),
        update_p95_s=percentile(updates, 0.95),
        first_third_tokens_per_s=larges.tokens / (median([took for _, took, _ in thirds[0]]) or math.inf),
        last_third_tokens_per_s=larges.tokens / (median([took for _, took, _ in thirds[1]]) or math.inf),
        first_third_cpus=_mean_cpus(thirds[0]),
        last_third_cpus=_mean_cpus(thirds[1]),
        first_third_Hz=first_Hz,
        last_third_Hz=last_Hz,
    )


def _choose_micro_batch(trainer: SustainedTrainer, seconds: float, notify: Callable[[str], None]) -> int:
    """Return the number of sequences of a large micro-batch, after a warm-up pass with it.

    At most as many as in a run, and at most as many as one pass takes LARGE_SHARE of `seconds` for.
    """
    first_s, _, _ = trainer.train_step(1)  # always slow: memory is mapped, AdamW allocates its moments
    if seconds / MIN_PASSES < first_s < seconds:
        first_s = trainer.train_step(1)[0]
    if first_s > seconds / MIN_PASSES:
        notify(f"one pass takes {duration(first_s)}, so about {duration(MIN_PASSES * first_s)}")
        return 1
    micro_batch, took_s = 1, _min_pass_s(trainer, 1)
    sequence_s = took_s
    while took_s < PROBE_SHARE * seconds and micro_batch < trainer.max_sequences:
        micro_batch = min(2 * micro_batch, trainer.max_sequences)
        took_s = _min_pass_s(trainer, micro_batch)
        sequence_s = min(sequence_s, took_s / micro_batch)
    while 2 * micro_batch * sequence_s <= LARGE_SHARE * seconds and 2 * micro_batch <= trainer.max_sequences:
        micro_batch *= 2
    trainer.train_step(micro_batch)
    return micro_batch


def _min_pass_s(trainer: SustainedTrainer, micro_batch: int) -> float:
    """Return the minimum seconds of a few passes after a warm-up pass."""
    trainer.train_step(micro_batch)
    return min(trainer.train_step(micro_batch)[0] for _ in range(NUM_PROBES))


def time_repeated_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median seconds of `work`, called for about `seconds` and at least once, after one warm-up call."""
    work()
    synchronize_device(device)
    took: list[float] = []
    until = time.perf_counter() + seconds
    while len(took) < 1 or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        synchronize_device(device)
        took.append(time.perf_counter() - began)
    return median(took) or math.inf


def synchronize_device(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mean_cpus(passes: list[tuple[float, float, float]]) -> float:
    return sum(cpu_s for _, _, cpu_s in passes) / sum(took_s for _, took_s, _ in passes)


def _clock_Hz() -> float | None:
    """Return the current mean clock of the cores; None if the system does not report it."""
    paths = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    try:
        clocks = [1e3 * int(path.read_text()) for path in paths]
    except (OSError, ValueError):
        return None
    return sum(clocks) / len(clocks) if clocks else None
