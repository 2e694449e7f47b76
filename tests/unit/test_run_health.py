"""The health of a run is the state that was planted in its records, and names its cause."""

from __future__ import annotations

import re
import time

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener.core.cluster.fleet_file import HostConfig
from evener.core.cluster.host_vitals import Vitals
from evener.core.run.prediction import Cluster, HostRates, PlanOption, Prediction, RankCost
from evener.core.run.roster import RankSlot
from evener.core.run.run_plan import HostPlan, Plan, write_plan
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import StepCost
from evener.report.draw import run_charts
from evener.watch import run_view
from evener.watch.multi_run import comparison_fragments, overview_row
from evener.watch.page_fragments import all_fragments, rank_fragments, run_page, state_fragments, tab_status
from evener.watch.prometheus import exposition_text
from evener.watch.run_health import assess_health
from evener.watch.run_reader import RunReader
from evener.watch.terminal_dashboard import status_line
from tests.unit.planner import job_of

from ..sample_runs import MEASURED, STARTED
from ..tiers import num_examples

SHARED_FOLDER = [HealthCheck.function_scoped_fixture]  # which each example leaves as it was

STEP_S = sum(value for value in MEASURED.values() if value)


def read(run: RunWriter) -> RunReader:
    reader = RunReader(RunDir(run.path))
    while reader.read_new(1.0):
        pass
    return reader


def add_steps(run: RunWriter, num: int, **cost: float) -> None:
    """More of them, on all ranks, whose parts are these."""
    for rank in run.recorded_ranks():
        last = run.records(rank)[-1]
        lines = b""
        for i in range(1, num + 1):
            parts = StepCost(**(MEASURED | cost if rank == 1 else MEASURED | {"wait_s": sum(cost.values()) - 0.1}))
            ended = last.ended + i * parts.total_s
            record = msgspec.structs.replace(last, step=last.step + i, cost=parts, wall_s=parts.total_s, ended=ended)
            lines += msgspec.json.encode(record) + b"\n"
        with run.steps_path(rank).open("ab") as file:
            file.write(lines)


def predict(run: RunWriter, step_s: float, **of_host: float) -> None:
    """The planner had said so, and the fleet file that of each host."""
    roster = run.manifest().roster
    slots = [RankSlot(host=member.host, device=member.device) for member in roster.members]
    parts = StepCost(**(MEASURED | {"compute_s": step_s - STEP_S + 0.1}))
    cost = RankCost(cost=parts, sync_s=0.0, bytes=0, memory_bytes=None)
    option = PlanOption(
        name="ddp",
        roster=roster,
        ranks=[cost for _ in slots],
        step_s=step_s,
        tokens_per_s=1024 / step_s,
        speedup_vs_best_host=None,
        bytes_per_rank=0,
        loss_penalty=0.0,
    )
    rates = HostRates(tokens_per_s={"fp32": 1e4}, **of_host)
    cluster = Cluster(slots=slots, hosts={"h": rates, **dict.fromkeys(roster.hosts, rates)})
    prediction = Prediction(job=job_of(model="tiny"), cluster=cluster, verdict="", recommended="ddp", chosen="ddp",
                            options=[option])  # fmt: skip
    host = HostPlan(
        name="h",
        host=HostConfig(address="local"),
        node_rank=0,
        first_rank=0,
        num_ranks=2,
        address="127.0.0.1",
        interface="lo",
        run=None,
        code=None,
        cwd="/",
        argv=["python"],
        env={},
    )
    write_plan(RunDir(run.path), Plan(kind="train", spec=run.manifest().spec, roster=roster, hosts=[host],
                                      prediction=prediction))  # fmt: skip


@pytest.fixture
def run(tmp_path, write_run) -> RunWriter:
    return write_run(tmp_path / "run", [{}, {}], steps=60, verdict="running")


SOON = STARTED + 60 * STEP_S + 1


def test_run_without_problems_is_reported_healthy(run):
    found = assess_health(read(run), SOON)
    assert (found.state, found.message, found.hint) == ("healthy", "step 60 of 60.", "")


def test_slowdown_names_rank_and_part(run):
    add_steps(run, 12, compute_s=0.3)
    found = assess_health(read(run), SOON + 4)
    assert found.state == "slow"
    assert "forward, backward on rank 1 300 ms instead of 100 ms" in found.message
    assert "2.9 times as long as before step 61 (105 ms)" in found.message


def test_slow_run_stays_slow_until_it_is_clearly_faster(run):
    """Steps between 1.15 and 1.3 times the expected time would flip the state from one step to the next."""
    predict(run, step_s=0.083)  # its steps take 0.105: 1.27 times
    assert assess_health(read(run), SOON).state == "healthy"
    add_steps(run, 12, compute_s=0.12)
    assert assess_health(read(run), SOON + 3).state == "slow"
    add_steps(run, 12, compute_s=0.1)
    assert assess_health(read(run), SOON + 5).state == "slow"
    add_steps(run, 12, compute_s=0.07)
    assert assess_health(read(run), SOON + 6).state == "healthy"


@pytest.mark.parametrize("predicted", [False, True])
def test_long_slowdown_is_slow_all_the_time_and_for_a_page_opened_late(run, predicted):
    """After a slowdown to 3 times its steps take 1.2 times as long: less than makes it slow, more than ends it."""
    if predicted:
        predict(run, step_s=STEP_S)
    opened_early, states = read(run), []
    for num, compute_s in [(12, 0.3), *[(25, 0.12)] * 40]:
        add_steps(run, num, compute_s=compute_s)
        while opened_early.read_new(1.0):
            pass
        now = opened_early.curves.last_record.ended + 1
        states.append(assess_health(opened_early, now).state)
        assert assess_health(read(run), now) == assess_health(opened_early, now)
    assert set(states) == {"slow"}
    add_steps(run, 12, compute_s=0.1)
    assert assess_health(read(run), now + 3).state == "healthy"


def test_slowdown_of_most_of_the_run_does_not_become_its_measure(run):
    add_steps(run, 68, compute_s=0.1)
    add_steps(run, 3000, compute_s=0.3)
    found = assess_health(read(run), read(run).curves.last_record.ended + 1)
    assert found.state == "slow"
    assert "2.9 times as long as before step 129 (105 ms): forward, backward on rank 1 300 ms instead of 100 ms" in (
        found.message
    )


def test_single_long_steps_do_not_make_a_run_slow(run):
    for _ in range(8):
        add_steps(run, 99, compute_s=0.11)
        add_steps(run, 1, compute_s=5.0)
    last = read(run).curves.last_record.ended
    assert assess_health(read(run), last + 1).state == "healthy"


def test_steps_with_other_ranks_or_settings_are_not_compared(run):
    add_steps(run, 100, compute_s=0.3)
    assert assess_health(read(run), SOON + 31).state == "slow"
    run.write_manifest(msgspec.structs.replace(run.manifest(), since=60))
    assert assess_health(read(run), SOON + 31).state == "healthy"


def test_run_slower_than_predicted_is_slow(run):
    predict(run, step_s=0.05)
    found = assess_health(read(run), SOON)
    assert found.state == "slow"
    assert "2.1 times as long as predicted (50 ms): forward, backward on rank" in found.message
    assert "100 ms instead of 45 ms" in found.message


def test_run_as_fast_as_predicted_is_healthy(run):
    predict(run, step_s=0.09)
    reader = read(run)
    assert assess_health(reader, SOON).state == "healthy"
    facts = {fact.name: fact for fact in run_view.key_figures(reader, assess_health(reader, SOON))}
    assert facts["step"].note == "predicted 90 ms, +17%"
    assert facts["tokens/s"].note == "predicted 11.4k, −14%"


def test_hang_names_rank_until_it_recovers(run):
    hang = {"host": "laptop", "rank": 1, "error": "rank 1 on laptop is stopped, by a signal or a debugger",
            "hint": "on laptop: kill -CONT 17"}  # fmt: skip
    run.add_event("run.hang", **hang)
    found = assess_health(read(run), SOON)
    assert (found.state, found.message, found.hint) == ("hung", hang["error"] + ".", hang["hint"])
    run.add_event("run.goes-on", after_s=12.0)
    assert assess_health(read(run), SOON).state != "hung"


def test_step_after_hang_clears_it(tmp_path, write_run):
    """Whoever told that it hung may have gone away."""
    run = write_run(tmp_path / "run", [{}], verdict="running")
    line = msgspec.json.encode({"event": "run.cut-off", "time": STARTED + 0.5, "error": "x", "hint": "y"})
    run.events_path.write_bytes(line + b"\n")
    assert assess_health(read(run), STARTED + 5).state == "healthy"


def test_run_without_new_records_is_reported_silent(run):
    found = assess_health(read(run), SOON + 3600)
    assert found.state == "unresponsive"
    assert "for 1 h 00 min, after 60 steps" in found.message
    assert found.command == ""  # from what?
    run.add_event("checkpoint", step=50, val_loss=None)
    assert assess_health(read(run), time.time() + 3600).command == f"evener train --resume {run.path}"


def test_root_cause_is_shown_over_peer_loss(run):
    """It is the first to tell; the host of the other one says why a moment later."""
    run.write_manifest(msgspec.structs.replace(run.manifest(), verdict="failed"))
    torchs = "[/src/pair.cc:553] Connection closed by peer [127.0.0.1]:19. This is typically caused by a crash. GLHF!"
    run.add_event("run.peer-exit", rank=0, error=torchs, kind="RuntimeError", hint="")
    found = assess_health(read(run), time.time())
    assert found.state == "unresponsive"
    assert found.message == ("rank 0 lost the connection to its peer: Connection closed by peer "
                          "[127.0.0.1]:19; waiting for its host to report why.")  # fmt: skip
    assert assess_health(read(run), time.time() + 60).state == "failed"
    run.add_event("failure", rank=1, error="killed by SIGKILL", kind="exit", hint="")
    found = assess_health(read(run), time.time())
    assert (found.state, "killed by SIGKILL" in found.message, "rank 0" in found.message) == ("failed", True, False)


@pytest.mark.parametrize(("verdict", "mark"), [("finished", "done"), ("stopped", "idle"), ("failed", "bad")])
def test_finished_run_shows_verdict(tmp_path, write_run, verdict, mark):
    run = write_run(tmp_path / "run", [{}], verdict=verdict)
    reader = read(run)
    found = assess_health(reader, SOON)
    assert (found.state, found.mark, found.is_over) == (verdict, mark, True)
    assert tab_status(reader, "run", SOON).title.split() == [view_sign(mark), verdict, "·", "run", "·", "evener"]


def view_sign(mark: str) -> str:
    return {"done": "✓", "idle": "■", "bad": "✗"}[mark]


def test_run_without_records_is_starting(tmp_path):
    reader = RunReader(RunDir(tmp_path))
    assert assess_health(reader, SOON).state == "starting"
    assert "it has not reported anything yet" in state_fragments(reader, SOON)["state"]


def test_remaining_time_is_estimated(run, tmp_path, write_run):
    """40 of 100 steps of 0.105 s."""
    other = write_run(tmp_path / "other", [{}, {}], steps=60, verdict="running")
    manifest = other.manifest()
    train = msgspec.structs.replace(manifest.spec.train, steps=100)
    spec = msgspec.structs.replace(manifest.spec, train=train)
    other.write_manifest(msgspec.structs.replace(manifest, spec=spec))
    assert run_view.time_left_s(read(other)) == pytest.approx(40 * 0.105)
    assert run_view.progress_share(read(other)) == pytest.approx(0.6)
    assert run_view.time_left_s(read(run)) == 0.0


def test_loss_curve_uses_tokens_or_time_axis(run):
    """Each of 60 steps takes 1024 tokens and 0.105 s."""
    shown = run_view.recorded_run(read(run), "healthy")
    assert run_charts.loss_chart(shown, "tokens").lines[-1].x[-1] == 60 * 1024
    by_time = run_charts.loss_chart(shown, "time")
    assert by_time.x_title == "training time, s"
    assert by_time.lines[-1].x[-1] == pytest.approx(60 * 0.105)
    assert run_charts.throughput_chart(shown).lines[-1].y[-1] == pytest.approx(1024 / 0.105)


def test_host_list_follows_membership(run):
    run.add_event("start", step=0, ranks=2, sync="ddp")
    assert run_view.host_rows(read(run))[0][:3] == ["h", "0, 1", "16 of 16"]
    run.add_event("rebalanced", step=30, shares=[11, 5], why="laptop is slow")
    run.add_event("world", step=40, number=1, hosts=["other"], why="h was lost")
    rows = run_view.host_rows(read(run))
    assert [(row[0], row[-1]) for row in rows] == [("h", "is away"), ("other", "takes part")]


def test_only_recent_vitals_are_shown(run):
    """A line that is being written is no news, nor is what a machine told a while ago."""
    one = Vitals(time=SOON - 4, busy=0.25, memory_bytes=3 * 10**9, memory_total_bytes=8 * 10**9, sent_Bps=11.5e6)
    lines = [msgspec.structs.replace(one, time=SOON - 9, busy=0.9), one]
    run.vitals_path("h").parent.mkdir()
    told = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    run.vitals_path("h").write_bytes(told + told[:40])
    head, rows = run_view.host_vitals_table(read(run), SOON)
    assert head == ["host", "processors busy", "memory", "sent"]
    assert rows == [["h", "25%", "3.0 GB of 8.0 GB", "11.5 MB/s"]]
    assert "11.5 MB/s" in rank_fragments(read(run), SOON)["hosts"]
    assert run_view.host_vitals_table(read(run), SOON + 100)[1] == []


NAMES = ["start", "world", "rebalanced", "evaluation", "checkpoint", "failure", "run.hang", "run.goes-on", "launched",
         "rechosen", "compared", "run.diverged", "run.nonfinite", "replicas.reconciled", "anything"]  # fmt: skip
KEYS = ["step", "hosts", "shares", "val_loss", "error", "hint", "rank", "ranks", "why", "after_s", "differences", "odd"]
PLAIN = st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats(allow_nan=False) | st.text(max_size=6)
VALUES = (
    PLAIN | st.lists(PLAIN, max_size=3) | st.lists(st.dictionaries(st.text(max_size=3), PLAIN, max_size=2), max_size=2)
)
FACTS = dict.fromkeys(KEYS, VALUES)
EVENT = st.fixed_dictionaries({"event": st.sampled_from(NAMES), "time": st.floats(0, 2e9)}, optional=FACTS)


@settings(deadline=None, max_examples=num_examples(40, 150), suppress_health_check=SHARED_FOLDER)
@given(st.lists(EVENT, max_size=6), st.sampled_from(["running", "failed"]))
def test_malformed_events_do_not_break_page(tmp_path, write_run, events, verdict):
    """Whatever types its facts have: a disk that was full, another version, somebody's own program."""
    run = write_run(tmp_path / "run", [{}, {}], verdict=verdict)
    run.events_path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    reader = read(run)
    assert all_fragments(reader, "time", SOON)["events"]
    assert overview_row("run", reader, SOON)["key"] == "run"
    assert "evener_steps" in exposition_text({"run": reader})


def test_comparison_shows_energy_cost_only_when_known(run):
    """60 steps on one host of 400 W that costs 36 an hour; of none of them, no such column."""
    assert "kWh" not in comparison_fragments({"one": read(run)}, "step", SOON)["figures"]
    predict(run, 0.1, watts=400.0, price_per_h=36.0)
    told = comparison_fragments({"one": read(run)}, "step", SOON)["figures"]
    assert f"{400 * 60 * STEP_S / 3.6e6:.3g} kWh" in told
    assert f">{36 * 60 * STEP_S / 3600:.2f}<" in told


def test_records_that_do_not_arrive_are_no_reason_to_suspect_the_run(tmp_path, write_run):
    """Its silence is then of this machine: the page says what is wrong here, until the run is over."""
    reader = read(write_run(tmp_path / "one", [{}, {}], verdict="running", sync_s=0.02))
    reader.follow_error = "the disk is full"
    silent, healthy = assess_health(reader, STARTED + 1e6), assess_health(reader, STARTED + 1)
    assert silent.message == "Its records do not arrive: the disk is full; trying again."
    assert (silent.state, silent.hint) == ("unresponsive", "")
    assert healthy.state != "unresponsive"
    assert healthy.message.endswith(f" {silent.message}")
    ended = read(write_run(tmp_path / "two", [{}, {}], verdict="finished", sync_s=0.02))
    ended.follow_error = "the disk is full"
    assert "do not arrive" not in assess_health(ended, STARTED + 1e6).message


def test_page_of_a_launched_program_offers_and_states_only_what_evener_can(tmp_path, write_run):
    """It cannot save the program, and does not know when it ends."""
    rundir = write_run(tmp_path / "own", [{}, {}], verdict="running")
    manifest = rundir.manifest()
    rundir.write_manifest(msgspec.structs.replace(manifest, program="train.py", shape=None, unit="samples"))
    reader = read(rundir)
    page = run_page(reader, "own", axis="step", links={}, can_control=True, can_sample=False, assets="")
    assert re.findall(r'data-action="\w+">([^<]*)<', page) == ["stop"]
    assert 'role="progressbar"' not in page
    assert tab_status(reader, "own", SOON).title.endswith("healthy · own · evener")
    assert "left" not in [figure.name for figure in run_view.key_figures(reader, assess_health(reader, SOON))]
    assert "samples/s" in status_line("own", reader, SOON)
    assert run_view.progress_share(reader) is None
