"""Derive health events of a run that is followed: hangs, network partitions, failed hosts, lost supervisors."""

from __future__ import annotations

import time
from typing import Any

from evener.core.plan import Plan
from evener.core.rundir import RunDir
from evener.core.watch import Hang, Watch, sentence
from evener.core.world import OVER
from evener.launch.failures import ended_well, first_failure
from evener.launch.mirror import GONE, HostMirror, Mirror

TOLD_S = 3.0  # after a host has failed: by then the others have usually ended, and the run itself reports the failure
ENDS_S = 20.0  # ranks that have not ended by then never will: they had not connected to the failed one

Event = dict[str, Any]


class News:
    """Turns the hosts' states and process samples into events for the followers of a run."""

    def __init__(self, rundir: RunDir, plan: Plan) -> None:
        self._rundir, self._plan = rundir, plan
        self._watch = Watch({host.name: host.num_ranks for host in plan.hosts},
                            {host.address: host.name for host in plan.hosts})  # fmt: skip
        self._since = 0.0
        self._hang: Hang | None = None
        self._failed_at: float | None = None
        self._has_told = False
        self._unwatched = set[str]()

    def of(self, mirror: Mirror) -> list[Event]:
        """Return the new events. In a run that outlives its hosts, its agents report and handle hangs and failures."""
        if self._plan.outlives_hosts:
            if any(has_ended(host) for host in mirror.hosts.values()):
                self._failed_at = self._failed_at or time.monotonic()
            return self._of_supervisors(mirror)
        return [*self._of_hangs(mirror), *self._of_failures(mirror), *self._of_supervisors(mirror)]

    def waits_in_vain(self) -> bool:
        """Return whether the other hosts should have exited by now: a host has failed, or the run has ended everywhere
        but on a host that waits to rejoin and did not receive that.
        """
        return self._failed_at is not None and time.monotonic() - self._failed_at > ENDS_S

    def _of_hangs(self, mirror: Mirror) -> list[Event]:
        """Return an event when the run begins to hang, and when it continues."""
        for name, host in mirror.hosts.items():
            while host.seen:
                self._watch.see(name, *host.seen.pop(0))
            if host.error is not None:
                self._watch.lose(name)
        hang, previous = self._watch.hang(), self._hang
        if hang == previous or (hang and previous and hang.kind == previous.kind):
            return []
        if hang is None and not self._watch.sees_all:
            return []  # it ended, or some host is not observed
        self._hang = hang
        if hang is None:
            return [{"event": "run.goes-on", "after_s": time.monotonic() - self._since}]
        if previous is None:
            self._since = time.monotonic()
        facts = {"host": hang.host, "peer": hang.peer, "rank": hang.rank, "error": sentence(hang), "hint": hang.fix}
        return [{"event": "run.cut-off" if hang.how == "cut-off" else "run.hang", **facts}]

    def _of_failures(self, mirror: Mirror) -> list[Event]:
        """Return an event when a host has failed while others continue, if nothing else reports it."""
        failed = [name for name, host in mirror.hosts.items() if has_failed(host)]
        if all(name in self._unwatched for name in failed):  # none failed, or no supervisor saw how it ended
            return []
        self._failed_at = self._failed_at or time.monotonic()
        if self._has_told or mirror.is_done or time.monotonic() - self._failed_at < TOLD_S:
            return []
        self._has_told = True
        failure = first_failure(
            self._rundir, self._plan, {name: host.state or {} for name, host in mirror.hosts.items()}
        )
        if failure is None:
            return []
        last = failure.output.splitlines()[-1:]
        error = ": ".join([failure.how, *last])
        hint = failure.hint or "the other hosts are stopped"
        return [{"event": "host.failed", "host": failure.host, "rank": failure.rank, "error": error, "hint": hint}]

    def _of_supervisors(self, mirror: Mirror) -> list[Event]:
        """Return an event when a host's supervisor was killed and its processes continue."""
        lost = [name for name, host in mirror.hosts.items()
                if (host.state or GONE).get("unwatched") and name not in self._unwatched]  # fmt: skip
        self._unwatched.update(lost)
        error = "the run's supervisor was killed; its processes continue without it"
        hint = "the output of the ranks on {} is no longer copied here"
        return [{"event": "supervisor.lost", "host": name, "error": f"{name}: {error}", "hint": hint.format(name)}
                for name in lost]  # fmt: skip


def has_ended(host: HostMirror) -> bool:
    """Return whether a run that outlives its hosts has ended everywhere, according to this host."""
    return host.is_done and (host.state or GONE)["status"] in (0, OVER)


def has_failed(host: HostMirror) -> bool:
    """Return whether the run has ended on this host unsuccessfully."""
    return host.is_done and not ended_well(host.plan, host.state or GONE)
