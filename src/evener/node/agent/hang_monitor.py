"""Detect hangs of this host's ranks, report them, and decide when such ranks must be killed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evener.core.run.hang_detector import Hang, HangDetector, describe_hang
from evener.core.run.membership_epoch import AgentSpec, HostEntry
from evener.core.run.runwriter import RunWriter
from evener.node.agent.consensus import Consensus

SAMPLE_INTERVAL_S = 1.0  # between samples of the ranks
# from the report of a hang until the ranks are killed: a person may have stopped them, as with a debugger
HANG_GRACE_S = 10.0
KILLABLE_CAUSES = ("stopped", "idle", "crossed")  # not "disk": a process that waits for its disk cannot be killed


class HangMonitor:
    """Detects hangs from the samples of all hosts, but reports only those of this host's ranks."""

    def __init__(self, spec: AgentSpec, folder: Path, members: list[str]) -> None:
        self._host, self._folder = spec.host, folder
        self._action = (
            "its ranks are killed and restarted" if spec.is_elastic else "all hosts restart from the newest checkpoint"
        )
        self._hang: Hang | None = None  # of this host's ranks
        self._hang_since = self._next_sample_at = 0.0
        self.set_hosts(spec.hosts, members)

    def set_hosts(self, hosts: Mapping[str, HostEntry], members: list[str]) -> None:
        """Monitor these hosts of the run from now on; `members` are those of the epoch."""
        self._detector = HangDetector({name: entry.num_ranks for name, entry in hosts.items()})
        self.set_members(members)

    def set_members(self, members: list[str]) -> None:
        """Monitor the ranks of a new epoch."""
        self._detector.set_members(members)

    def forget_hang(self) -> None:
        """Forget the hang of ranks that are killed."""
        self._hang = None

    def is_sample_due(self, now: float) -> bool:
        """Return whether to sample the ranks now: true once an interval."""
        if now < self._next_sample_at:
            return False
        self._next_sample_at = now + SAMPLE_INTERVAL_S
        return True

    def observe(self, now: float, consensus: Consensus) -> Hang | None:
        """Process all hosts' newest samples and report a change; return a hang for which ranks must be killed now."""
        self._detector.observe(self._host, now, consensus.process_samples)
        for host in consensus.epoch.hosts:
            if host != self._host:
                status = consensus.peer_status(host)
                self._detector.observe(
                    host, status.sampled_at if status else now, status.process_samples if status else {}
                )
        hang, previous = self._detector.detect_hang(), self._hang
        hang = self._hang = hang if hang is not None and hang.host == self._host else None
        is_same = hang is not None and previous is not None and hang.identity == previous.identity
        if previous is not None and not is_same:
            RunWriter(self._folder).add_event("run.goes-on", after_s=now - self._hang_since)
        if hang is None:
            return None
        is_killable = hang.cause in KILLABLE_CAUSES
        if not is_same:
            self._hang_since = now
            hint = hang.fix + (f"; in {HANG_GRACE_S:.0f} s {self._action}" if is_killable else "")
            RunWriter(self._folder).add_event(
                "run.hang", host=self._host, peer=None, rank=hang.rank, error=describe_hang(hang), hint=hint
            )
        return hang if is_killable and now - self._hang_since >= HANG_GRACE_S else None
