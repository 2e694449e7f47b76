"""Watch the collectives of a launched program on all hosts, and end it when its ranks wait for each other for ever.

The agent of each host reads the files of its own ranks and, once nothing has been called for a while, publishes them in
the store. The first host's agent compares them:

    a mismatch (another operation, another size, a rank that has ended)    an error: no rank will go on
    a rank that has called fewer than the others                           they wait for it; said, as it may compute
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
from torch.distributed import Store

from evener.core.base.decoding import from_json
from evener.core.base.file_io import read_file
from evener.core.run.membership_epoch import HEARTBEAT_FOLDER
from evener.core.run.runwriter import RunWriter
from evener.core.script.call_ring import CALLS_FOLDER, RankCalls, read_calls
from evener.core.script.mismatch import SAME_CALL_HINT, CollectiveMismatch, find_laggard, find_mismatch

STALLED_AFTER_S = 6.0  # without a new call on any rank of a host
MISMATCH_AFTER_S = 10.0  # without one on the first host, before a mismatch ends the run
LAGGARD_AFTER_S = 15.0
PUBLISHED_CALLS = 16


class StalledCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The newest calls of a host's ranks and the line each is in, by rank; empty while they call collectives."""

    ranks: dict[int, RankCalls] = {}
    lines: dict[int, str] = {}


class CollectiveWatch:
    """Watches the ranks of this host, and on the first host those of all."""

    def __init__(self, folder: Path, first_rank: int, num_ranks: int, node_rank: int, num_nodes: int) -> None:
        """`folder`: the run's folder on this host."""
        self._folder, self._first_rank, self._num_ranks = folder, first_rank, num_ranks
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._num_calls, self._changed_at = -1, time.monotonic()
        self._published = StalledCalls()
        self._laggard: int | None = None  # that was reported

    def own_calls(self) -> dict[int, RankCalls]:
        """Return the newest calls of this host's ranks, by rank."""
        calls = {
            self._first_rank + local: read_calls(self._folder / CALLS_FOLDER / str(local))
            for local in range(self._num_ranks)
        }
        return {
            rank: msgspec.structs.replace(known, calls=known.calls[-PUBLISHED_CALLS:])
            for rank, known in calls.items()
            if known is not None
        }

    def observe(self, store: Store) -> CollectiveMismatch | None:
        """Publish this host's calls if they have stalled; on the first host return the mismatch that stops all ranks.

        Call it once or twice a second.
        """
        now, calls = time.monotonic(), self.own_calls()
        num_calls = sum(known.num_calls + known.has_ended for known in calls.values())
        if num_calls != self._num_calls:
            self._num_calls, self._changed_at, self._laggard = num_calls, now, None
        stalled_s = now - self._changed_at
        stalled = StalledCalls()
        if stalled_s > STALLED_AFTER_S:
            stalled = StalledCalls(ranks=calls, lines={rank: self._line(rank) for rank in calls})
        if stalled != self._published:
            store.set(f"calls/{self._node_rank}", msgspec.json.encode(stalled).decode())
            self._published = stalled
        if self._node_rank > 0 or stalled_s < MISMATCH_AFTER_S or (everywhere := self._all_stalled(store)) is None:
            return None
        mismatch = find_mismatch(everywhere.ranks)
        if mismatch is None and stalled_s >= LAGGARD_AFTER_S:
            self._report_laggard(everywhere)
        return mismatch

    def record_mismatch(self, mismatch: CollectiveMismatch) -> None:
        """Record a mismatch as the failure of the run."""
        RunWriter(self._folder).add_event(
            "failure", rank=mismatch.rank, kind="RunError", error=mismatch.describe(), hint=SAME_CALL_HINT
        )

    def record_calls(self) -> None:
        """Record the newest calls of this host's ranks when a run has failed: they may show why."""
        RunWriter(self._folder).add_event("collectives", ranks=self.own_calls())

    def _all_stalled(self, store: Store) -> StalledCalls | None:
        """Return what all hosts have published; None while the ranks of one call collectives."""
        found = self._published
        keys = [f"calls/{node}" for node in range(1, self._num_nodes)]
        if not found.ranks or (keys and not store.check(keys)):
            return None
        for key in keys:
            try:
                theirs = from_json(store.get(key), StalledCalls)
            except msgspec.MsgspecError:  # the program's ranks can write into the store, too
                return None
            if not theirs.ranks:
                return None
            found = StalledCalls(ranks=found.ranks | theirs.ranks, lines=found.lines | theirs.lines)
        return found

    def _report_laggard(self, everywhere: StalledCalls) -> None:
        """Report once for which rank the others wait."""
        laggard = find_laggard(everywhere.ranks)
        if laggard is not None and laggard != self._laggard:
            line = everywhere.lines.get(laggard, "")
            RunWriter(self._folder).add_event("program.waiting", rank=laggard, where=line)
        self._laggard = laggard

    def _line(self, rank: int) -> str:
        """Return the line of the program in which a rank of this host was a second ago."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            heartbeat = read_file(self._folder / HEARTBEAT_FOLDER / str(rank - self._first_rank))
            return str(from_json(heartbeat, dict[str, object]).get("where", ""))
        return ""
