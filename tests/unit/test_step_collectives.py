"""Collectives that a program calls itself: which of them, over another link, take as much longer as they take."""

from __future__ import annotations

import pytest

from evener.core.model.gradients import OwnCollective
from evener.worker.record.step_collectives import StepCollectives

MB = 1e6


def add(step: StepCollectives, name: str, num_bytes: float = MB, took_s: float = 0.1, **more: object) -> None:
    step.add(name, num_bytes, 4, took_s, **({"sent_in_pairs": None, "obstacle": ""} | more))


def test_calls_after_backward_are_kept_in_order_with_their_whole_buffers():
    """A part of 1 MB of each of 4 ranks is a buffer of 4 MB. In pairs a rank sends 3 of its 4 parts."""
    step = StepCollectives()
    add(step, "all_reduce", 1000.0)  # of a loss, before backward
    step.end_backward()
    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather", "broadcast"):
        add(step, name)
    add(step, "all_gather_into_tensor", sent_in_pairs=3_000_000)
    own, took_s = step.end_step()
    kinds = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "swap")
    sizes = (MB, 4 * MB, 4 * MB, MB, 4 * MB)
    assert own.calls == tuple(
        OwnCollective(collective=kind, size_bytes=size) for kind, size in zip(kinds, sizes, strict=True)
    )
    assert (own.obstacle, took_s) == ("", pytest.approx(0.5))
    assert step.end_step()[0].calls == ()  # of the next step


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("all_reduce", {"obstacle": "it calls all_reduce with async_op=True"}, "async_op=True"),
        ("gather", {}, "it calls gather, of whose time there is no formula"),
    ],
)
def test_calls_that_another_link_would_change_otherwise_are_named(name, more, why):
    step = StepCollectives()
    step.end_backward()
    add(step, "all_reduce")
    add(step, name, **more)
    own, took_s = step.end_step()
    assert (own.calls, took_s) == ((), None)
    assert why in own.obstacle


def test_calls_between_two_backward_passes_may_be_hidden():
    step = StepCollectives()
    step.end_backward()
    add(step, "all_reduce")
    step.end_backward()
    assert step.end_step()[0].obstacle.startswith("it calls all_reduce before backward has ended")
