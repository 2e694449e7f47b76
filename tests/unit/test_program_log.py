"""The loss of a launched program's step: what `evener.log` states counts more than what the program logs elsewhere."""

from __future__ import annotations

import pytest

from evener.worker.script import program_log


def test_stated_loss_is_not_replaced_by_logged_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    monkeypatch.setattr(program_log, "_take_loss", taken.append)
    monkeypatch.setattr(program_log, "_is_stated", False)
    program_log._from_scalar("train/loss", 3.0)
    program_log._from_mapping({"loss": 2.5, "lr": 0.1})
    program_log.log(loss=2.0)
    program_log._from_scalar("train/loss", 2.9)
    program_log._from_mapping({"loss": 2.4})
    assert taken == [3.0, 2.5, 2.0]
