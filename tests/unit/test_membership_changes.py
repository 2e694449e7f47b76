"""Compute the time that each loss and return of a host cost a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.cli.verify import verify
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepCost, StepRecord
from evener.report.read.membership_changes import explain_membership_changes, membership_changes, split_brains


def record(step: int, epoch: int, ended: float, wall_s: float = 1.0) -> StepRecord:
    return StepRecord(step=step, epoch=epoch, tokens=8.0, loss=1.0, wall_s=wall_s, cost=StepCost(), sync_s=None,
                      cpu_s=None, bytes=0, members=2, lr=0.1, grad_norm=None, ended=ended)  # fmt: skip


def world(number: int, hosts: str, step: int, epoch: int, why: str = "") -> dict[str, object]:
    return {"event": "world", "number": number, "hosts": [*hosts], "step": step, "epoch": epoch, "why": why,
            "time": 100.0 + step}  # fmt: skip


EVENTS = [
    world(0, "abc", 0, 0),
    world(1, "ab", 3, 1, "c is out of reach"),
    world(2, "abc", 5, 3, "c is let in"),
    {"event": "checkpoint", "step": 6},
    world(3, "abc", 6, 4, "b failed"),
]
# a's clock and c's differ by a thousand seconds. Steps take a second; a loses 4 s when c is lost, 0.5 s when it comes
# back; its step 4 was another Roster's, and no other world's; in the last world all begin again from step 6.
A = [record(0, 0, 1), record(1, 0, 2), record(2, 0, 3), record(3, 1, 8, 5.0), record(4, 2, 9), record(5, 3, 10.5, 1.5),
     record(6, 4, 20.5)]  # fmt: skip
C = [record(0, 0, 1001), record(1, 0, 1002), record(2, 0, 1003), record(5, 3, 1010.5, 1.5), record(6, 4, 1021)]


def test_regroup_cost_is_the_shortest_time_that_a_rank_measured() -> None:
    lost, back, again = membership_changes(EVENTS, {0: A, 2: C})
    assert (lost.gone, lost.came, lost.hosts, lost.step) == (["c"], [], ["a", "b"], 3)
    assert (back.gone, back.came) == ([], ["c"])
    assert (again.gone, again.came) == ([], [])
    assert [lost.cost_s, back.cost_s, again.cost_s] == pytest.approx([4.0, 0.5, 9.0])


def test_membership_summary_states_total_cost_and_cost_of_each_change() -> None:
    text = explain_membership_changes(membership_changes(EVENTS, {0: A, 2: C}), elapsed_s=135.0)
    assert text == (
        "The membership changed 3 times: once a host was lost or left, once one joined, once all ranks restarted. "
        "That cost 13.50 s in all, 10.0% of its time: 9.00 s before step 7 (b failed); 4.00 s "
        "before step 4 (c is out of reach); 500 ms before step 6 (c is let in)."
    )
    assert explain_membership_changes([], 1.0) == ""


def test_initial_start_and_damaged_events_are_not_changes() -> None:
    assert membership_changes([world(0, "ab", 0, 0), world(0, "a", 9, 5)], {0: A}) == []
    assert (
        membership_changes([{"event": "world"}, world(0, "ab", 0, 0), {"event": "world", "hosts": 7, "number": 1}], {})
        == []
    )
    (unknown,) = membership_changes([world(0, "ab", 0, 0), world(1, "a", 3, "x")], {0: A})  # type: ignore[arg-type]
    assert unknown.cost_s is None
    assert "What that cost was not measured" in explain_membership_changes([unknown], 10.0)


def test_split_brain_is_reported_once_by_the_host_that_lost_steps() -> None:
    kept, lost = ({"event": "run.split-brain", "number": 3, "host": host, "kept": host != "a", "hint": "a UPS",
                   "error": f"split brain, says {host}"} for host in "ba")  # fmt: skip
    assert split_brains([*EVENTS, kept, lost, kept]) == ["split brain, says a. A UPS"]
    assert split_brains([kept]) == ["split brain, says b. A UPS"]
    assert split_brains([{"event": "run.split-brain", "number": "x"}, *EVENTS]) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_verify_mentions_split_brain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    RunWriter(tmp_path).add_event("run.split-brain", number=1, kept=False, error="split brain: b, c", hint="a UPS")
    compared = json.dumps({"agree": True, "largest_difference": 0.0, "checks": []})
    monkeypatch.setattr("evener.launch.torch_subprocess.program_lines", lambda *args: iter([compared]))
    assert verify(str(tmp_path), None, 0.0, None, None, as_json) == 0
    out, err = capsys.readouterr()
    if as_json:
        assert json.loads(out)["split_brains"] == ["split brain: b, c. A UPS"]
    else:
        assert err == "warning: split brain: b, c. A UPS\n"
