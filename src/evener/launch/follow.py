"""How is a run followed, from wherever, until it has ended on all hosts? What they tell comes home meanwhile."""

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
GIVEN_UP_S = 60.0  # without a sign of a host, when others have failed

Observer = Callable[[StepRecord | dict[str, Any]], None]


def follow(rundir: RunDir, plan: Plan, observe: Observer, on_lost: Callable[[HostMirror], None],
           on_change: Callable[[Mirror], None] = lambda mirror: None, *,
           say: Progress = lambda text: None, carries: bool = True) -> dict[str, State]:  # fmt: skip
    """Mirror the run until it has ended everywhere; the hosts' last states. EvenerError names the first failure.

    What it saves comes home meanwhile, if this `carries`, and what is lacking at its end after it. `observe` hears of
    rank 0's records and of what happens from now on. KeyboardInterrupt leaves the run alone.
    """
    next_step = -1

    def observe_new(record: StepRecord | dict[str, Any]) -> None:
        """Each step once, whichever rank's record comes first, and of however many hosts."""
        nonlocal next_step
        if isinstance(record, dict) or record.step > next_step:
            next_step = next_step if isinstance(record, dict) else record.step
            observe(record)

    events: dict[str, Iterator[list[bytes]]] = {}
    for host in plan.hosts:
        events[host.name] = follow_lines(host.events_path(rundir))
        next(events[host.name])  # what happened in earlier starts of the run
    while (ended := _follow(rundir, plan, events, observe_new, on_lost, on_change, carries=carries)) is None:
        plan = read_plan(rundir)
        events |= {host.name: follow_lines(host.events_path(rundir)) for host in plan.hosts if host.name not in events}
    failure = conclude(rundir, plan, ended)
    try:
        carry.bring(rundir, plan, say)
    except EvenerError as error:
        say(f"{error}: what it saved stays there")
    finally:  # whoever does not wait for it hears of the failure all the same
        if failure is not None:
            raise failure.error(rundir, plan)
    return ended


def _follow(rundir: RunDir, plan: Plan, events: Mapping[str, Iterator[list[bytes]]], observe: Observer,
            on_lost: Callable[[HostMirror], None], on_change: Callable[[Mirror], None], *,
            carries: bool) -> dict[str, State] | None:  # fmt: skip
    """Mirror the hosts of a plan until the run has ended on them; None where a host takes part that is not mirrored: it
    was added to the plan, or had left the run.
    """
    decoder = json_decoder(StepRecord)
    ranks = range(plan.world_size if plan.outlives_hosts else 1)  # whose records are observed: rank 0 may go
    steps = [follow_lines(rundir.steps_path(rank)) for rank in ranks]
    lost: set[str] = set()
    told_to_end: list[str] = []
    news = News(rundir, plan)
    with Mirror(rundir, plan) as mirror, Carrier(rundir, plan) as carrier:
        if carries:
            carrier.look()
        done = is_out_of_date = False
        while not done:
            done = mirror.is_done or _only_lost_are_left(mirror)
            for record in sorted((decoder.decode(line) for of_rank in steps for line in next(of_rank)),
                                 key=lambda record: record.step):  # fmt: skip
                observe(record)
            for follower in events.values():
                for line in next(follower):
                    if (event := event_of(line)) is None:
                        continue
                    if event["event"] == "checkpoint" and carries:
                        carrier.look()
                    observe(event)
                    is_out_of_date = is_out_of_date or _is_out_of_date(event, rundir, mirror)
            if is_out_of_date:
                return None
            for name, host in mirror.hosts.items():
                if host.broken is not None:
                    raise RunError(
                        f"what {name} tells cannot be written here: {host.broken}",
                        hint=f"the run goes on; evener logs -f {rundir} looks at it again",
                    )
                if (host.error is not None) != (name in lost):
                    lost ^= {name}
                    on_lost(host)
            for event in news.of(mirror):
                tell(rundir, plan, **event)
                if not plan.is_here:  # else it is among the run's own
                    observe(event)
            if not told_to_end and not done and news.waits_in_vain():
                told_to_end = [name for name, host in mirror.hosts.items() if not host.is_done]
                stop(rundir, msgspec.structs.replace(plan, hosts=[plan.host(name) for name in told_to_end]), now=True)
            on_change(mirror)
            if not done:
                mirror.wait(POLL_S)
        return {name: _last_state(host) for name, host in mirror.hosts.items()}


def _is_out_of_date(event: Mapping[str, Any], rundir: RunDir, mirror: Mirror) -> bool:
    """Does a host train that had left the run, or was added since its plan was read?"""
    told = event.get("hosts") if event["event"] == "world" else None
    hosts = {str(name) for name in told} if isinstance(told, list) else set()
    is_back = any(mirror.hosts[name].is_done for name in hosts & mirror.hosts.keys())
    return is_back or bool(hosts.intersection(host.name for host in read_plan(rundir).hosts) - mirror.hosts.keys())


def _only_lost_are_left(mirror: Mirror) -> bool:
    """Has the run ended on some hosts, while the rest have been out of sight for long?"""
    left = [host for host in mirror.hosts.values() if not host.is_done]
    over = has_ended if mirror.plan.outlives_hosts else has_failed
    ended = [host for host in mirror.hosts.values() if over(host)]
    now = time.monotonic()
    return bool(ended) and all(host.lost_since is not None and now - host.lost_since > GIVEN_UP_S for host in left)


def _last_state(host: HostMirror) -> State:
    if host.is_done:
        return host.state or GONE
    return (host.state or {}) | {"lost": f"cannot be reached: {host.error}"}
