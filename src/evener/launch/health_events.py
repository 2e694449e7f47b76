"""Derive health events of a run that is followed: hangs, network partitions, failed hosts, lost supervisors."""

from __future__ import annotations

import time
from typing import Any

from evener.core.run.hang_detector import Hang, HangDetector, describe_hang
from evener.core.run.membership_epoch import EXIT_RUN_FAILED
from evener.core.run.run_plan import Plan
from evener.core.run.rundir import RunDir
from evener.launch.root_cause import first_failure, has_exited_cleanly
from evener.transfer.mirror import GONE_STATE, HostMirror, RunMirror

# after a host has failed: by then the others have usually ended, and the run itself reports the failure
FAILURE_REPORT_DELAY_S = 3.0
EXIT_TIMEOUT_S = 20.0  # ranks that have not ended by then never will: they had not connected to the failed one

HealthEvent = dict[str, Any]


class HealthMonitor:
    """Turns the hosts' states and process samples into events for the followers of a run."""

    def __init__(self, rundir: RunDir, plan: Plan) -> None:
        self._rundir, self._plan = rundir, plan
        self._hang_detector = HangDetector({host.name: host.num_ranks for host in plan.hosts},
                            {host.address: host.name for host in plan.hosts})  # fmt: skip
        self._hang_since = 0.0
        self._hang: Hang | None = None
        self._failed_at: float | None = None
        self._has_reported_failure = False
        self._unsupervised = set[str]()

    def poll(self, mirror: RunMirror) -> list[HealthEvent]:
        """Return the new events. With dynamic membership, the hosts' agents report and handle hangs and failures."""
        if self._plan.has_dynamic_membership:
            if any(has_run_ended(host) for host in mirror.hosts.values()):
                self._failed_at = self._failed_at or time.monotonic()
            return self._supervisor_events(mirror)
        return [*self._hang_events(mirror), *self._failure_events(mirror), *self._supervisor_events(mirror)]

    def is_exit_overdue(self) -> bool:
        """Return whether the other hosts should have exited by now: a host has failed, or the run has ended everywhere
        except on a host that waits to rejoin and has not learned of the end.
        """
        return self._failed_at is not None and time.monotonic() - self._failed_at > EXIT_TIMEOUT_S

    def _hang_events(self, mirror: RunMirror) -> list[HealthEvent]:
        """Return an event when the run begins to hang, and when it continues."""
        for name, host in mirror.hosts.items():
            while host.process_samples:
                self._hang_detector.observe(name, *host.process_samples.pop(0))
            if host.error is not None:
                self._hang_detector.mark_unreachable(name)
        hang, previous = self._hang_detector.detect_hang(), self._hang
        if hang == previous or (hang and previous and hang.identity == previous.identity):
            return []
        if hang is None and not self._hang_detector.has_sampled_all_ranks:
            return []  # it ended, or some host is not observed
        self._hang = hang
        if hang is None:
            return [{"event": "run.goes-on", "after_s": time.monotonic() - self._hang_since}]
        if previous is None:
            self._hang_since = time.monotonic()
        facts = {
            "host": hang.host,
            "peer": hang.peer,
            "rank": hang.rank,
            "error": describe_hang(hang),
            "hint": hang.fix,
        }
        return [{"event": "run.cut-off" if hang.cause == "cut-off" else "run.hang", **facts}]

    def _failure_events(self, mirror: RunMirror) -> list[HealthEvent]:
        """Return an event when a host has failed while others continue, if nothing else reports it."""
        failed = [name for name, host in mirror.hosts.items() if has_host_failed(host)]
        if all(name in self._unsupervised for name in failed):  # none failed, or no supervisor saw how it ended
            return []
        self._failed_at = self._failed_at or time.monotonic()
        if self._has_reported_failure or mirror.is_done or time.monotonic() - self._failed_at < FAILURE_REPORT_DELAY_S:
            return []
        self._has_reported_failure = True
        failure = first_failure(
            self._rundir, self._plan, {name: host.state or {} for name, host in mirror.hosts.items()}
        )
        if failure is None:
            return []
        last = failure.output.splitlines()[-1:]
        error = ": ".join([failure.message, *last])
        hint = failure.hint or "the other hosts are stopped"
        return [{"event": "host.failed", "host": failure.host, "rank": failure.rank, "error": error, "hint": hint}]

    def _supervisor_events(self, mirror: RunMirror) -> list[HealthEvent]:
        """Return an event when a host's supervisor was killed and its processes continue."""
        lost = [name for name, host in mirror.hosts.items()
                if (host.state or GONE_STATE).get("unwatched") and name not in self._unsupervised]  # fmt: skip
        self._unsupervised.update(lost)
        error = "the run's supervisor was killed; its processes continue without it"
        hint = "the output of the ranks on {} is no longer copied here"
        return [{"event": "supervisor.lost", "host": name, "error": f"{name}: {error}", "hint": hint.format(name)}
                for name in lost]  # fmt: skip


def has_run_ended(host: HostMirror) -> bool:
    """Return whether a run with dynamic membership has ended everywhere, according to this host's exit status."""
    return host.is_done and (host.state or GONE_STATE)["status"] in (0, EXIT_RUN_FAILED)


def has_host_failed(host: HostMirror) -> bool:
    """Return whether the run has ended on this host unsuccessfully."""
    return host.is_done and not has_exited_cleanly(host.plan, host.state or GONE_STATE)
