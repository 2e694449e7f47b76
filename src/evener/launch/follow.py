"""Follow a run until it has ended on all hosts: mirror its files, report its events, fetch its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from evener.core.decoding import json_decoder
from evener.core.errors import EvenerError, RunError
from evener.core.files import follow_lines
from evener.core.plan import Plan, read_plan
from evener.core.rundir import RunDir, event_of
from evener.core.step import StepRecord
from evener.launch import carry
from evener.launch.carry import Carrier
from evener.launch.fleet import Progress, conclude, stop
from evener.launch.mirror import GONE, HostMirror, Mirror, State, tell
from evener.launch.news import News, has_ended, has_failed

POLL_S = 0.2
GIVEN_UP_S = 60.0  # a host is given up after being unreachable this long, if others have failed

Observer = Callable[[StepRecord | dict[str, Any]], None]


def follow(rundir: RunDir, plan: Plan, observe: Observer, on_lost: Callable[[HostMirror], None],
           on_change: Callable[[Mirror], None] = lambda mirror: None, *,
           say: Progress = lambda text: None, carries: bool = True) -> dict[str, State]:  # fmt: skip
    """Mirror the run until it has ended everywhere; return the hosts' last states.

    Raises the EvenerError of the first failure. With `fetches_checkpoints`, checkpoints are fetched meanwhile, and the
    missing ones at the end. `observe` receives rank 0's step records and new events. KeyboardInterrupt does not stop
    the run.
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
    while (ended := _follow(rundir, plan, events, observe_new, on_lost, on_change, carries=carries)) is None:
        plan = read_plan(rundir)
        events |= {host.name: follow_lines(host.events_path(rundir)) for host in plan.hosts if host.name not in events}
    failure = conclude(rundir, plan, ended)
    try:
        carry.bring(rundir, plan, say)
    except EvenerError as error:
        say(f"{error}: its checkpoints are not fetched")
    finally:  # raised even if the fetch is interrupted
        if failure is not None:
            raise failure.error(rundir, plan)
    return ended


def _follow(rundir: RunDir, plan: Plan, events: Mapping[str, Iterator[list[bytes]]], observe: Observer,
            on_lost: Callable[[HostMirror], None], on_change: Callable[[Mirror], None], *,
            carries: bool) -> dict[str, State] | None:  # fmt: skip
    """Mirror the hosts of a plan until the run has ended on them. Return None if the plan must be read again, because
    a host that was added, or had left, takes part.
    """
    decoder = json_decoder(StepRecord)
    ranks = range(plan.world_size if plan.outlives_hosts else 1)  # ranks whose records are observed: rank 0 may leave
    steps = [follow_lines(rundir.steps_path(rank)) for rank in ranks]
    lost: set[str] = set()
    stopped_hosts: list[str] = []
    monitor = News(rundir, plan)
    with Mirror(rundir, plan) as mirror, Carrier(rundir, plan) as carrier:
        if carries:
            carrier.look()
        done = is_stale = False
        while not done:
            done = mirror.is_done or _only_lost_are_left(mirror)
            for record in sorted((decoder.decode(line) for rank_lines in steps for line in next(rank_lines)),
                                 key=lambda record: record.step):  # fmt: skip
                observe(record)
            for follower in events.values():
                for line in next(follower):
                    if (event := event_of(line)) is None:
                        continue
                    if event["event"] == "checkpoint" and carries:
                        carrier.look()
                    observe(event)
                    is_stale = is_stale or _is_out_of_date(event, rundir, mirror)
            if is_stale:
                return None
            for name, host in mirror.hosts.items():
                if host.broken is not None:
                    raise RunError(
                        f"the records of {name} cannot be written here: {host.broken}",
                        hint=f"the run goes on; evener logs -f {rundir} follows it again",
                    )
                if (host.error is not None) != (name in lost):
                    lost ^= {name}
                    on_lost(host)
            for event in monitor.of(mirror):
                tell(rundir, plan, **event)
                if not plan.is_here:  # else it is read from the run's own events
                    observe(event)
            if not stopped_hosts and not done and monitor.waits_in_vain():
                stopped_hosts = [name for name, host in mirror.hosts.items() if not host.is_done]
                stop(rundir, msgspec.structs.replace(plan, hosts=[plan.host(name) for name in stopped_hosts]), now=True)
            on_change(mirror)
            if not done:
                mirror.wait(POLL_S)
        return {name: _last_state(host) for name, host in mirror.hosts.items()}


def _is_out_of_date(event: Mapping[str, Any], rundir: RunDir, mirror: Mirror) -> bool:
    """Return whether a host takes part that had left, or was added after the plan was read."""
    members = event.get("hosts") if event["event"] == "world" else None
    hosts = {str(name) for name in members} if isinstance(members, list) else set()
    is_back = any(mirror.hosts[name].is_done for name in hosts & mirror.hosts.keys())
    return is_back or bool(hosts.intersection(host.name for host in read_plan(rundir).hosts) - mirror.hosts.keys())


def _only_lost_are_left(mirror: Mirror) -> bool:
    """Return whether the run has ended on some hosts and all others have been unreachable for too long."""
    active = [host for host in mirror.hosts.values() if not host.is_done]
    is_over = has_ended if mirror.plan.outlives_hosts else has_failed
    ended = [host for host in mirror.hosts.values() if is_over(host)]
    now = time.monotonic()
    return bool(ended) and all(host.lost_since is not None and now - host.lost_since > GIVEN_UP_S for host in active)


def _last_state(host: HostMirror) -> State:
    if host.is_done:
        return host.state or GONE
    return (host.state or {}) | {"lost": f"cannot be reached: {host.error}"}
