"""Tests of the worker share the cores: torch in a test's own process computes on one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
