"""What is told of hosts by what they last said of their part of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.core.plan import Plan
from evener.core.rundir import RunDir
from evener.launch.mirror import GONE, Mirror
from evener.launch.news import ENDS_S, News, time

RUNNING: dict[str, Any] = {"state": "running", "status": None, "failures": []}
LOST: dict[str, Any] = {"state": "ended", "status": None, "failures": [], "lost": "the host went down"}


@pytest.fixture
def news(tmp_path: Path) -> News:
    plan = Plan(id="0", kind="script", grace_s=1.0, spec=None)
    return News(RunDir(tmp_path), plan)


def seen(**states: dict[str, Any]) -> Mirror:
    """Hosts, of which those that have ended are done."""
    hosts = {
        name: SimpleNamespace(
            plan=SimpleNamespace(agent=None), state=state, error=None, seen=[], is_done=state["state"] == "ended"
        )
        for name, state in states.items()
    }
    is_done = all(host.is_done for host in hosts.values())
    return SimpleNamespace(hosts=hosts, is_done=is_done)  # type: ignore[return-value]


def test_a_supervisor_that_was_killed_is_told_once(news: News) -> None:
    unwatched = RUNNING | {"unwatched": True}
    told = news.of(seen(a=RUNNING, b=unwatched))
    assert [(event["event"], event["host"]) for event in told] == [("supervisor.lost", "b")]
    assert news.of(seen(a=RUNNING, b=unwatched)) == []


@pytest.mark.parametrize("state", [GONE, LOST])
def test_a_run_that_is_gone_has_not_gone_on(news: News, state: dict[str, Any]) -> None:
    mirror = seen(a=RUNNING, b=state)
    mirror.hosts["b"].is_done = False  # as long as its last files come
    assert news.of(mirror) == []


@pytest.mark.parametrize("was_watched", [True, False])
def test_only_an_end_that_somebody_saw_ends_the_others(
    news: News, was_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks may have ended well."""
    news.of(seen(a=RUNNING, b=RUNNING if was_watched else RUNNING | {"unwatched": True}))
    news.of(seen(a=RUNNING, b=LOST))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + ENDS_S + 1)
    assert news.waits_in_vain() == was_watched
