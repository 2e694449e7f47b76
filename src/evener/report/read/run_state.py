"""Name the states of a run, worst first, and the mark (colour and symbol) with which every page shows each."""

from __future__ import annotations

from typing import Literal

RunState = Literal["failed", "hung", "unresponsive", "slow", "healthy", "starting", "stopped", "finished"]
STATE_MARKS: dict[RunState, str] = {
    "failed": "bad", "hung": "bad", "unresponsive": "warn", "slow": "warn", "healthy": "good", "starting": "idle",
    "stopped": "idle", "finished": "done",
}  # fmt: skip
ENDED_STATES: tuple[RunState, ...] = ("failed", "stopped", "finished")  # such a run does not go on by itself
MARK_SYMBOLS = {"good": "▶", "warn": "⚠", "bad": "✗", "idle": "■", "done": "✓"}

# A run that should train has lost its processes or its host if it writes nothing for so many seconds and steps.
STALE_TIMEOUT_S, STALE_TIMEOUT_STEPS = 60.0, 20


def is_unresponsive(silence_s: float, step_s: float | None) -> bool:
    """Return whether a run that has written nothing for `silence_s` hangs, has died, or cannot be reached."""
    return silence_s > max(STALE_TIMEOUT_S, STALE_TIMEOUT_STEPS * (step_s or 0.0))
