"""How do replicas agree? A Sync wraps the model so that after backward every rank holds the same gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from evener.worker.clock import Clock


class Sync(Protocol):
    """One strategy. Gradients are summed over ranks, not averaged: losses are already divided by the global count."""

    name: str
    bytes_per_step: int  # payload that this rank sends in one step, by the strategy's formula
    waits: bool  # does the backward that is due end with waiting for the other ranks?

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose backward synchronizes."""

    def arm(self, last: bool) -> None:
        """Say before each forward whether its backward is the step's last, the one that synchronizes."""

    def take_sync_s(self) -> float | None:
        """Seconds of the step in which an all-reduce was in flight, hidden or not; forgets them."""


class Alone:
    """A world of one: nothing to agree on."""

    name = "none"
    bytes_per_step = 0
    waits = False

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def arm(self, last: bool) -> None:
        pass

    def take_sync_s(self) -> None:
        return None


def make_sync(world_size: int, device: torch.device, clock: Clock, lap: Callable[[str], None]) -> Sync:
    """The strategy of a run."""
    if world_size == 1:
        return Alone()
    from evener.worker.sync.ddp import DDP

    return DDP(world_size, device, clock, lap)
