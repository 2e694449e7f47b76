"""Filter, sort and prune the rows of `evener runs`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.errors import UsageError, did_you_mean

DAY_S = 86_400.0
PRUNABLE_STATES = ("failed", "stopped")  # in any other state a run has finished, or may still continue


class RunRow(msgspec.Struct, kw_only=True):
    """One run; None = not known."""

    run: str
    begun: float | None = None  # Unix time
    model: str | None = None
    data: str | None = None
    state: str = "started"
    hosts: dict[str, str] = {}  # state by name
    ranks: int | None = None
    steps: int | None = None
    asked_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None  # of the newest evaluation
    best_val_loss: float | None = None
    tokens_per_s: float | None = None
    bytes: int = 0  # on this machine's disk
    checkpoint: str | None = None  # the newest on this machine
    newer_checkpoint: dict[str, Any] | None = None  # a newer one on another host only
    error: str | None = None  # why its files cannot be read, in the state "damaged"


# (sort key, whether the largest value comes first) by column.
SORT_COLUMNS: dict[str, tuple[Callable[[RunRow], Any], bool]] = {
    "run": (lambda row: row.run, False),
    "age": (lambda row: row.begun, True),  # the newest first
    "model": (lambda row: row.model, False),
    "data": (lambda row: row.data, False),
    "state": (lambda row: row.state, False),
    "hosts": (lambda row: len(row.hosts) or None, True),
    "ranks": (lambda row: row.ranks, True),
    "steps": (lambda row: row.steps, True),
    "loss": (lambda row: row.loss, False),
    "val": (lambda row: row.val_loss, False),
    "best": (lambda row: row.best_val_loss, False),
    "tokens/s": (lambda row: row.tokens_per_s, True),
    "size": (lambda row: row.bytes, True),
}


def filter_rows(rows: Sequence[RunRow], terms: Sequence[str]) -> list[RunRow]:
    """Return the rows in which each of these words occurs: in the run's path, state, model, corpus or host names.

    >>> rows = [RunRow(run="runs/a", model="gpt2", hosts={"attic": "failed"}), RunRow(run="runs/gpt", model="tiny")]
    >>> [row.run for row in filter_rows(rows, ["GPT"])], [row.run for row in filter_rows(rows, ["gpt", "attic"])]
    (['runs/a', 'runs/gpt'], ['runs/a'])
    """

    def text(row: RunRow) -> str:
        named = [row.run, row.model or "", row.data or "", row.state]
        return "\n".join([*named, *row.hosts, *row.hosts.values()]).lower()

    return [row for row in rows if all(term.lower() in text(row) for term in terms)]


def sort_rows(rows: Sequence[RunRow], column: str) -> list[RunRow]:
    """Sort rows by a column, best first: the fastest, the newest, the lowest loss; "-loss" reverses the order. Unknown
    values come last either way.

    >>> rows = [RunRow(run="a", loss=2.0, steps=5), RunRow(run="b"), RunRow(run="c", loss=1.5, steps=9)]
    >>> [[row.run for row in sort_rows(rows, column)] for column in ("loss", "-loss", "steps")]
    [['c', 'a', 'b'], ['a', 'c', 'b'], ['c', 'a', 'b']]
    """
    name = column.removeprefix("-")
    if name not in SORT_COLUMNS:
        raise UsageError(f"--sort {column}: no such column", hint=did_you_mean(name, SORT_COLUMNS))
    value, largest_first = SORT_COLUMNS[name]
    known = [row for row in rows if value(row) is not None]
    known.sort(key=value, reverse=largest_first != column.startswith("-"))
    return known + [row for row in rows if value(row) is None]


def prune_reason(row: RunRow, now: float, *, fewer_than: int | None, older_than_days: float | None) -> str | None:
    """Return why a run that failed or was stopped may be pruned; None if the run must stay.

    Any of three reasons suffices: the run left no weights, it has fewer than `fewer_than` steps, or it is older than
    `older_than_days`. A limit of None does not apply.

    >>> stopped = RunRow(run="a", state="stopped", steps=40, begun=0.0, checkpoint="a/checkpoints/step-000040")
    >>> prune_reason(stopped, DAY_S, fewer_than=None, older_than_days=None)
    >>> prune_reason(stopped, DAY_S, fewer_than=50, older_than_days=None)
    'stopped after 40 steps'
    >>> prune_reason(stopped, 8 * DAY_S, fewer_than=None, older_than_days=7)
    'stopped, 8 days old'
    """
    if row.state not in PRUNABLE_STATES:
        return None
    if row.checkpoint is None and row.newer_checkpoint is None:
        return f"{row.state}, left no weights"
    if fewer_than is not None and (row.steps or 0) < fewer_than:
        return f"{row.state} after {row.steps or 0} steps"
    if older_than_days is not None and row.begun is not None and now - row.begun > older_than_days * DAY_S:
        return f"{row.state}, {format_age(now - row.begun)} old"
    return None


def format_age(value_s: float) -> str:
    """Format an age in its largest unit.

    >>> [format_age(value_s) for value_s in (8.0, 150.0, 7200.0, 90_000.0, 2 * DAY_S, 70 * DAY_S)]
    ['8 s', '2 min', '2 h', '25 h', '2 days', '70 days']
    """
    if value_s < 60:
        return f"{max(0.0, value_s):.0f} s"
    if value_s < 3600:
        return f"{value_s // 60:.0f} min"
    return f"{value_s // 3600:.0f} h" if value_s < 2 * DAY_S else f"{value_s // DAY_S:.0f} days"


def disk_bytes(folder: Path) -> int:
    """Return the disk usage of a folder as `du` counts it: blocks, each file once whatever the number of hard links."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for parent, _, names in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            try:
                facts = os.lstat(path)
            except OSError:  # deleted meanwhile
                continue
            if (facts.st_dev, facts.st_ino) not in seen:
                seen.add((facts.st_dev, facts.st_ino))
                total += facts.st_blocks * 512
    return total
