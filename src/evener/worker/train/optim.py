"""Optimizer: AdamW and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from evener.core.run.run_spec import TrainSpec

MIN_WARMUP = 100  # steps: a short run whose learning rate rises faster ends higher, by a tenth (docs/log)


def learning_rate(step: int, spec: TrainSpec) -> float:
    """Return the learning rate of a step: linear warmup, then a cosine that reaches `min_lr` at the last step.

    [Loshchilov & Hutter 2017, as in nanoGPT]

    >>> spec = TrainSpec(steps=11, lr=1.0, min_lr=0.0, warmup=0)
    >>> learning_rate(0, spec), round(learning_rate(5, spec), 6), learning_rate(10, spec)
    (1.0, 0.5, 0.0)
    """
    warmup = min(max(spec.steps // 20, MIN_WARMUP), spec.steps // 4) if spec.warmup is None else spec.warmup
    peak = spec.peak_lr
    min_lr = peak / 10 if spec.min_lr is None else spec.min_lr
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, spec.steps - 1 - warmup)
    return min_lr + (peak - min_lr) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for an optimizer: matrices decay; vectors (biases and norms) do not (nanoGPT's rule)."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, spec: TrainSpec) -> torch.optim.AdamW:
    """Return a fused AdamW that decays matrices but not vectors."""
    groups = param_groups(model, spec.weight_decay)
    return torch.optim.AdamW(groups, lr=spec.peak_lr, betas=(spec.beta1, spec.beta2), fused=True)


def set_hyperparameters(optimizer: torch.optim.AdamW, step: int, spec: TrainSpec) -> None:
    """Set this step's hyperparameters from the spec, which overrides a resumed run's checkpoint."""
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = learning_rate(step, spec), (spec.beta1, spec.beta2)
        group["weight_decay"] = spec.weight_decay if group["params"][0].dim() >= 2 else 0.0
