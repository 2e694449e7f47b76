"""A lost supervisor is reported once, and only the loss of a watched host ends the other hosts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.core.run.run_plan import Plan
from evener.core.run.rundir import RunDir
from evener.launch.health_events import EXIT_TIMEOUT_S, HealthMonitor, time
from evener.transfer.mirror import GONE_STATE, RunMirror

RUNNING: dict[str, Any] = {"state": "running", "status": None, "failures": []}
LOST: dict[str, Any] = {"state": "ended", "status": None, "failures": [], "lost": "the host went down"}


@pytest.fixture
def news(tmp_path: Path) -> HealthMonitor:
    plan = Plan(id="0", kind="script", grace_s=1.0, spec=None)
    return HealthMonitor(RunDir(tmp_path), plan)


def seen(**states: dict[str, Any]) -> RunMirror:
    """Hosts, of which those that have ended are done."""
    hosts = {
        name: SimpleNamespace(
            plan=SimpleNamespace(agent=None),
            state=state,
            error=None,
            process_samples=[],
            is_done=state["state"] == "ended",
        )
        for name, state in states.items()
    }
    is_done = all(host.is_done for host in hosts.values())
    return SimpleNamespace(hosts=hosts, is_done=is_done)  # type: ignore[return-value]


def test_killed_supervisor_is_reported_once(news: HealthMonitor) -> None:
    unwatched = RUNNING | {"unwatched": True}
    told = news.poll(seen(a=RUNNING, b=unwatched))
    assert [(event["event"], event["host"]) for event in told] == [("supervisor.lost", "b")]
    assert news.poll(seen(a=RUNNING, b=unwatched)) == []


@pytest.mark.parametrize("state", [GONE_STATE, LOST])
def test_lost_supervisor_of_ended_run_is_not_reported(news: HealthMonitor, state: dict[str, Any]) -> None:
    mirror = seen(a=RUNNING, b=state)
    mirror.hosts["b"].is_done = False  # as long as its last files come
    assert news.poll(mirror) == []


@pytest.mark.parametrize("was_watched", [True, False])
def test_only_loss_of_a_watched_host_ends_others(
    news: HealthMonitor, was_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks may have ended well."""
    news.poll(seen(a=RUNNING, b=RUNNING if was_watched else RUNNING | {"unwatched": True}))
    news.poll(seen(a=RUNNING, b=LOST))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + EXIT_TIMEOUT_S + 1)
    assert news.is_exit_overdue() == was_watched
