"""Follow a run until it has ended on all hosts: mirror its files, report its events, fetch its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from evener.core.base.decoding import json_decoder
from evener.core.base.errors import EvenerError
from evener.core.base.file_io import follow_lines
from evener.core.run.run_plan import Plan, read_plan
from evener.core.run.rundir import RunDir, parse_event
from evener.core.run.step_cost import StepRecord
from evener.launch.health_events import HealthMonitor, has_host_failed, has_run_ended
from evener.launch.launcher import Notify, record_outcome, stop
from evener.transfer import checkpoint_transfer
from evener.transfer.checkpoint_transfer import CheckpointFetcher
from evener.transfer.mirror import GONE_STATE, HostMirror, RunMirror, SupervisorState, record_controller_event

POLL_S = 0.2
LOST_HOST_TIMEOUT_S = 60.0  # a host is given up after being unreachable this long, if others have failed

Observer = Callable[[StepRecord | dict[str, Any]], None]


def follow_run(
    rundir: RunDir,
    plan: Plan,
    observe: Observer,
    on_change: Callable[[RunMirror], None] = lambda mirror: None,
    *,
    notify: Notify = lambda text: None,
    fetches_checkpoints: bool = True,
) -> dict[str, SupervisorState]:
    """Mirror the run until it has ended everywhere; return the hosts' last states.

    Raises the EvenerError of the first failure. With `fetches_checkpoints`, checkpoints are fetched meanwhile, and the
    missing ones at the end; else all of them at the end, without a report. `observe` receives one record of each step
    (rank 0's or, with dynamic membership, the first to arrive) and new events; `notify` receives lost connections.
    KeyboardInterrupt does not stop the run.
    """
    next_step = -1

    def observe_new(record: StepRecord | dict[str, Any]) -> None:
        """Pass on each step once: the record that arrives first, from any rank."""
        nonlocal next_step
        if isinstance(record, dict) or record.step > next_step:
            next_step = next_step if isinstance(record, dict) else record.step
            observe(record)

    events: dict[str, Iterator[list[bytes]]] = {}
    for host in plan.hosts:
        events[host.name] = follow_lines(host.events_path(rundir))
        next(events[host.name])  # skip the events of earlier starts
    while (
        ended := _follow_plan(
            rundir, plan, events, observe_new, on_change, notify, fetches_checkpoints=fetches_checkpoints
        )
    ) is None:
        plan = read_plan(rundir)
        events |= {host.name: follow_lines(host.events_path(rundir)) for host in plan.hosts if host.name not in events}
    failure = record_outcome(rundir, plan, ended)
    report_fetch: Notify = notify if fetches_checkpoints else lambda text: None
    try:
        checkpoint_transfer.fetch_checkpoints(rundir, plan, report_fetch)
    except EvenerError as error:
        report_fetch(f"{error}: its checkpoints are not fetched")
    finally:  # raised even if the fetch is interrupted
        if failure is not None:
            raise failure.to_error(rundir, plan)
    return ended


def _follow_plan(rundir: RunDir, plan: Plan, events: Mapping[str, Iterator[list[bytes]]], observe: Observer,
            on_change: Callable[[RunMirror], None], notify: Notify, *,
            fetches_checkpoints: bool) -> dict[str, SupervisorState] | None:  # fmt: skip
    """Mirror the hosts of a plan until the run has ended on them. Return None if the plan must be read again, because
    a host that was added, or had left, takes part.
    """
    decoder = json_decoder(StepRecord)
    # ranks whose records are observed: rank 0 may leave
    ranks = range(plan.world_size if plan.has_dynamic_membership else 1)
    steps = [follow_lines(rundir.steps_path(rank)) for rank in ranks]
    lost: set[str] = set()
    stopped_hosts: list[str] = []
    monitor = HealthMonitor(rundir, plan)
    with RunMirror(rundir, plan) as mirror, CheckpointFetcher(rundir, plan) as carrier:
        if fetches_checkpoints:
            carrier.notify_checkpoint_saved()
        done = is_stale = False
        while not done:
            done = mirror.is_done or _are_only_unreachable_left(mirror)
            for record in sorted((decoder.decode(line) for rank_lines in steps for line in next(rank_lines)),
                                 key=lambda record: record.step):  # fmt: skip
                observe(record)
            for follower in events.values():
                for line in next(follower):
                    if (event := parse_event(line)) is None:
                        continue
                    if event["event"] == "checkpoint" and fetches_checkpoints:
                        carrier.notify_checkpoint_saved()
                    observe(event)
                    is_stale = is_stale or _is_plan_stale(event, rundir, mirror)
            if is_stale:
                return None
            for name, host in mirror.hosts.items():
                if host.local_error is not None:
                    raise host.unwritable_error(host.local_error)
                if (host.error is not None) != (name in lost):
                    lost ^= {name}
                    if not plan.is_local_run:
                        notify(f"{host.error}; retrying, the run goes on without the connection" if host.error else
                               f"{name}: connected again; no records were lost")  # fmt: skip
            for event in monitor.poll(mirror):
                record_controller_event(rundir, plan, **event)
                if not plan.is_local_run:  # else it is read from the run's own events
                    observe(event)
            if not stopped_hosts and not done and monitor.is_exit_overdue():
                stopped_hosts = [name for name, host in mirror.hosts.items() if not host.is_done]
                stop(rundir, msgspec.structs.replace(plan, hosts=[plan.host(name) for name in stopped_hosts]), now=True)
            on_change(mirror)
            if not done:
                mirror.wait(POLL_S)
        return {name: _last_state(host) for name, host in mirror.hosts.items()}


def _is_plan_stale(event: Mapping[str, Any], rundir: RunDir, mirror: RunMirror) -> bool:
    """Return whether a host that had left, or was added after the plan was read, takes part now."""
    members = event.get("hosts") if event["event"] == "world" else None
    hosts = {str(name) for name in members} if isinstance(members, list) else set()
    is_back = any(mirror.hosts[name].is_done for name in hosts & mirror.hosts.keys())
    return is_back or bool(hosts.intersection(host.name for host in read_plan(rundir).hosts) - mirror.hosts.keys())


def _are_only_unreachable_left(mirror: RunMirror) -> bool:
    """Return whether the run has ended on some hosts and all others have been unreachable for too long."""
    active = [host for host in mirror.hosts.values() if not host.is_done]
    is_over = has_run_ended if mirror.plan.has_dynamic_membership else has_host_failed
    ended = [host for host in mirror.hosts.values() if is_over(host)]
    now = time.monotonic()
    return bool(ended) and all(
        host.unreachable_since is not None and now - host.unreachable_since > LOST_HOST_TIMEOUT_S for host in active
    )


def _last_state(host: HostMirror) -> SupervisorState:
    if host.is_done:
        return host.state or GONE_STATE
    return (host.state or {}) | {"lost": f"cannot be reached: {host.error}"}
