"""The explanation of a wrong prediction names the planted cause with host and size, and no other."""

from __future__ import annotations

import re

import msgspec
import pytest

from evener.core.base.file_io import write_atomic
from evener.core.cluster.link import LinkModel
from evener.core.model.shape import preset_shape
from evener.core.run.prediction import EXACT_SOURCE, Cluster, HostRates, PlanOption, Prediction, RankCost
from evener.core.run.roster import Member, RankSlot, Roster, parse_sync
from evener.core.run.run_plan import Plan, write_plan
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_cost import PHASES, StepCost, StepRecord
from evener.report.explain.explain_run import explain_run
from evener.report.explain.predicted_vs_measured import prediction_cells, rank_rows, step_prediction_cells, step_rows
from evener.report.explain.prediction_error import explain_prediction
from evener.report.explain.run_tables import bench_rows
from evener.report.pages.html_report import run_page
from evener.report.read.run_summary import summarize_run, summary_json
from tests.unit.planner import job_of

MARKS = {  # words by which a sentence names a cause
    "taken": "the rest taken by others",
    "full memory": "may have been swapping",
    "own speed": "a lower clock (heat, battery), or memory and caches",
    "gpu": "a lower clock (heat, power limit), or other programs on it",
    "slowed": "It slowed down during the run",
    "throttled": "throttled (cpu: 2.1 GHz)",
    "swap": "it was swapping",
    "neighbours": "while the other ranks of its host compute",
    "micro-batch": "in micro-batches of",
    "dtype": "; predicted was",
    "not known": "is not known",
    "probe": "when it was probed",
    "share": "tokens a step, predicted were",
    "wire": "the network is",
    "bytes": "a rank sends",
    "overlap": "backward hid",
    "last": "was predicted to wait that long for",
    "not last": "was predicted to be done last",
    "turns": "now one rank is late",
    "input": "for input",
    "update": "the update takes",
    "right": "as predicted within",
    "hidden": "The step does not show it",
}
BYTES = 503_316_480
SYNC_S = 6.0  # in flight, of which 4.3 s are not hidden: 36.1 s a step
ATTIC = {"data_s": 0.0, "compute_s": 20.0, "exposed_sync_s": 4.3, "wait_s": 10.0, "optimizer_s": 1.8}
LAPTOP = ATTIC | {"compute_s": 30.0, "wait_s": 0.0}
LINK = LinkModel(latency_s=1e-4, bandwidth_Bps=117e6)


def named(text: list[str]) -> set[str]:
    return {cause for cause, mark in MARKS.items() if mark in " ".join(text)}


def option(*costs: dict[str, float | None], name: str = "ddp", hosts: tuple[str, ...] = ("attic", "laptop"),
           sync: str = "ddp", **other: object) -> PlanOption:  # fmt: skip
    members = [Member(rank=rank, host=host, device="cpu", dtype="fp32", share=16 // len(costs), micro_batch=256)
               for rank, host in enumerate(hosts)]  # fmt: skip
    ranks = [RankCost(cost=StepCost(**cost), sync_s=SYNC_S if len(costs) > 1 else 0.0, bytes=BYTES,
                      memory_bytes=390_000_000) for cost in costs]  # fmt: skip
    step_s = max(rank.cost.total_s for rank in ranks)
    given = {"roster": Roster(members=members, sync=parse_sync(sync), backend="gloo"), "ranks": ranks, "step_s": step_s,
             "tokens_per_s": 1024 / step_s, "speedup_vs_best_host": 1.2, "bytes_per_rank": BYTES,
             "loss_penalty": 0.0, "loss_source": EXACT_SOURCE}  # fmt: skip
    return PlanOption(name=name, **(given | other))


def predict(chosen: PlanOption | None = None, *options: PlanOption, laptop_is: dict[str, object] | None = None,
            **laptop: object) -> Prediction:  # fmt: skip
    """`laptop_is`: how its rank was planned; the rest is what it can do."""
    chosen = chosen or option(ATTIC, LAPTOP)
    attic_rank, *others = chosen.roster.members
    members = [attic_rank, *(msgspec.structs.replace(member, **(laptop_is or {})) for member in others)]
    roster = msgspec.structs.replace(chosen.roster, members=members)
    chosen = msgspec.structs.replace(chosen, roster=roster)
    rates = {"tokens_per_s": {"fp32": 20.0}, "cpus": 4.0, "sync_Bps": 500e6, "memory_bytes": 16 << 30}
    return Prediction(
        job=job_of(preset_shape("tiny", 256, 64), model="tiny", batch=16),
        cluster=Cluster(
            slots=[RankSlot(host=member.host, device=member.device) for member in members],
            hosts={"attic": HostRates(**rates), "laptop": HostRates(**(rates | laptop))},
            wires={"attic": {"laptop": LINK}, "laptop": {"attic": LINK}},
            assumed=["a GPU's power limit <b>stays</b>"],
        ),
        verdict="Use both.",
        recommended=chosen.name,
        chosen=chosen.name,
        options=[chosen, *options],
    )


def of_a_minute(text: str) -> str:
    """Return the text with a minute as 60 s: a sum of parts is one within rounding, which differs between Pythons."""
    return text.replace("1 min 00 s", "60.00 s")


@pytest.fixture
def run(tmp_path, write_run):
    """A run that goes as predicted, but for what it is told. Whoever is done first waits for the other."""

    def make(attic=None, laptop=None, *, had=(4.0, 4.0), sync_s=SYNC_S, sent=BYTES, prediction=None, slowdown=1.0,
             work=None, tokens=(512, 512), predicted=True, late_s=0.0, **other):  # fmt: skip
        """`slowdown`: of the laptop, last step beside first. `work`: processor seconds of its step, whatever it takes.
        `late_s`: by how much either rank is late in turns."""
        costs = [ATTIC | (attic or {}), LAPTOP | (laptop or {})]
        rundir = write_run(tmp_path / "run", costs, threads=4, cores=4, steps=24, sync_s=sync_s, **other)
        lines: list[list[StepRecord]] = [[], []]
        for step in range(24):
            now = [dict(cost, wait_s=0.0) for cost in costs]
            if costs[1]["compute_s"] is not None:
                now[1]["compute_s"] = costs[1]["compute_s"] * (1 + (slowdown - 1) * step / 23)
            now[step % 2]["compute_s"] = (now[step % 2]["compute_s"] or 0.0) + late_s * (1 + step // 2 * 0.001)
            total_s = [StepCost(**cost).total_s for cost in now]
            for rank, cost in enumerate(now):
                cost["wait_s"] = max(total_s) - total_s[rank]
                work_s = sum(cost[part] or 0.0 for part in ("data_s", "compute_s", "optimizer_s"))
                cpu_s = None if had[rank] is None else had[rank] * work_s + sent / 500e6
                record = rundir.records(rank)[0]
                lines[rank].append(
                    msgspec.structs.replace(
                        record,
                        step=step,
                        cost=StepCost(**cost),
                        wall_s=StepCost(**cost).total_s,
                        bytes=sent,
                        tokens=tokens[rank],
                        cpu_s=work if work and rank == 1 else cpu_s,
                    )
                )
        for rank, records in enumerate(lines):
            write_atomic(rundir.steps_path(rank), b"".join(msgspec.json.encode(each) + b"\n" for each in records))
        if predicted:
            write_plan(rundir, Plan(kind="train", spec=None, prediction=prediction or predict()))
        return summarize_run(rundir)

    return make


def told(summary) -> list[str]:
    return explain_prediction(summary, summary.prediction)


# --- causes -----------------------------------------------------------------------------------------------------------


def test_accurate_prediction_is_reported_as_such(run):
    text = told(run())
    assert text == ["A step was predicted to take 36.10 s and took 36.10 s: as predicted within 10%."]


def test_lost_processors_are_named_as_cause(run):
    text = told(run(laptop={"compute_s": 64.0}, had=(4.0, 1.875)))
    assert named(text) == {"taken"}
    assert text[0] == "A step was predicted to take 36.10 s and took 1 min 10 s, 94% longer."
    assert text[1].startswith("As predicted: ")
    assert "exposed communication 4.30 s" in text[1]
    assert text[2].startswith("34.00 s more: laptop computes 2.1 times slower than probed, 1 min 04 s a step: ")
    assert "it ran on 1.9 of 4.0 processors" in text[2]
    assert len(text) == 3


def test_lost_processors_and_own_slowdown_are_separated(run):
    text = told(run(laptop={"compute_s": 90.0}, had=(4.0, 2.0)))
    assert named(text) == {"taken", "own speed"}
    assert "45.00 s more: laptop computes 2 times slower than probed" in text[1]
    assert "15.00 s more: each processor that laptop had works 1.5 times slower than probed: " in text[2]


def test_processors_lost_during_run_are_reported(run):
    text = told(run(laptop={"compute_s": 30.0}, slowdown=3.0, work=130.0))
    assert named(text) == {"taken"}
    assert "more of them as time went on" in text[2]


def test_lost_processors_and_full_memory_are_reported(run):
    text = told(run(laptop={"compute_s": 60.0}, had=(4.0, 2.0), prediction=predict(memory_bytes=410_000_000)))
    assert named(text) == {"taken", "full memory"}
    assert "filled 400.0 MB of its 410.0 MB of memory" in " ".join(text)


def test_slowdown_with_full_processors_is_reported(run):
    text = told(run(laptop={"compute_s": 57.0}))
    assert named(text) == {"own speed"}
    assert text[2].startswith("27.00 s more: laptop computes 1.9 times slower than probed, 57.00 s a step, ")
    assert "although it ran on 4.0 processors" in text[2]


def test_throttling_over_time_is_reported(run):
    text = told(run(laptop={"compute_s": 30.0}, slowdown=3.0))
    assert named(text) == {"slowed"}
    assert re.search(r"from 4\d\.\d\d s in its first third to 1 min 2\d s in its last: throttled", text[2])


def test_throttling_finding_is_attributed_to_its_host(tmp_path, run):
    run(laptop={"compute_s": 60.0})
    rundir = RunWriter(tmp_path / "run")
    rundir.add_event("cpu.throttled", host="attic", evidence="another host")
    assert named(told(summarize_run(rundir))) == {"own speed"}
    rundir.add_event("cpu.throttled", host="laptop", evidence="cpu: 2.1 GHz", fix="cool it")
    assert named(told(summarize_run(rundir))) == {"throttled"}


def test_swapping_is_reported(tmp_path, run):
    run(laptop={"compute_s": 60.0}, had=(4.0, 1.0))
    RunWriter(tmp_path / "run").add_event(
        "mem.swap", host="laptop", evidence="12.0 MB a second; 40 MB of memory are free"
    )
    text = told(summarize_run(RunDir(tmp_path / "run")))
    assert named(text) == {"swap"}
    assert (
        "2 times slower than probed, 60.00 s a step: it was swapping when the run began (12.0 MB a second"
        in of_a_minute(text[2])
    )


def test_derived_rate_is_named_as_cause(run):
    known = predict()
    told_so = "laptop: its rate of tiny follows from that of char, by FLOPs; evener probe host --model tiny measures it"
    cluster = msgspec.structs.replace(known.cluster, assumed=[told_so])
    text = told(run(laptop={"compute_s": 60.0}, prediction=msgspec.structs.replace(known, cluster=cluster)))
    assert (
        "2 times slower than predicted, 60.00 s a step; that rate was not measured: laptop: its rate of tiny"
        in of_a_minute(text[2])
    )
    assert named(text) == set()


def test_fewer_threads_than_probed_are_reported(run):
    text = told(run(laptop={"compute_s": 60.0}, had=(4.0, 4.0), prediction=predict(cpus=8.0)))
    assert "it was given 4 threads, and ran on 8.0 processors when it was probed" in text[2]
    assert "taken" not in named(text)


def test_shared_memory_contention_is_reported(run, contention):
    text = told(run(laptop={"compute_s": 54.0}, contention=contention(2, together_s=0.09)))
    assert named(text) == {"neighbours"}
    assert "takes it 1.8 times as long as alone" in text[2]


def test_different_micro_batch_is_reported(run):
    text = told(run(laptop={"compute_s": 54.0}, prediction=predict(laptop_is={"micro_batch": 8})))
    assert named(text) == {"micro-batch"}
    assert "in micro-batches of 256 sequences, predicted were 8" in text[2]


def test_different_dtype_is_reported(run):
    text = told(run(laptop={"compute_s": 54.0}, prediction=predict(laptop_is={"dtype": "bf16"})))
    assert named(text) == {"dtype"}
    assert "in fp32; predicted was bf16" in text[2]


def test_unmeasured_processors_give_unknown_cause(run):
    assert named(told(run(laptop={"compute_s": 54.0}, had=(4.0, None)))) == {"not known"}
    assert named(told(run(laptop={"compute_s": 54.0}, prediction=predict(cpus=None)))) == {"not known"}


def test_slow_gpu_is_reported(run):
    text = told(
        run(laptop={"compute_s": 54.0}, had=(None, None), prediction=predict(laptop_is={"device": "cuda:0"}, cpus=None))
    )
    assert named(text) == {"gpu"}


def test_different_share_is_reported(run):
    text = told(run(laptop={"compute_s": 45.0}, tokens=(256, 768)))
    assert named(text) == {"share"}
    assert "15.00 s more: laptop computes 768 tokens a step, predicted were 512" in text[2]


def test_slow_network_is_reported(run):
    text = told(run({"exposed_sync_s": 14.3}, {"exposed_sync_s": 14.3}, sync_s=16.0))
    assert named(text) == {"wire"}
    assert text[2].startswith("10.00 s more: the network is slower than measured: ")
    assert "503.3 MB were 16.00 s in flight, 31.5 MB/s; predicted were 6.00 s, 83.9 MB/s" in text[2]
    assert "lacks the processors" not in text[2]


def test_slow_communication_names_lost_processors(run):
    slow = {"exposed_sync_s": 14.3}
    text = told(run(slow, slow | {"compute_s": 60.0}, sync_s=16.0, had=(4.0, 2.0)))
    assert named(text) == {"wire", "taken"}
    assert "or it lacks the processors that were taken from laptop" in " ".join(text)


def test_more_bytes_than_predicted_are_reported(run):
    text = told(run({"exposed_sync_s": 10.3}, {"exposed_sync_s": 10.3}, sync_s=12.0, sent=2 * BYTES))
    assert named(text) == {"bytes"}
    assert "6.00 s more: a rank sends 1.0 GB a step, predicted were 503.3 MB" in text[2]


def test_less_overlap_than_predicted_is_reported(run):
    prediction = predict(option(ATTIC | {"exposed_sync_s": 1.0}, LAPTOP | {"exposed_sync_s": 1.0}))
    text = told(run({"exposed_sync_s": 6.0}, {"exposed_sync_s": 6.0}, prediction=prediction))
    assert named(text) == {"overlap"}
    assert (
        "5.00 s more: backward hid less of the communication than predicted, 0% of 6.00 s in flight instead of 83%"
        in (text[2])
    )


def test_different_straggler_is_reported(run):
    text = told(run({"compute_s": 50.0}))
    assert named(text) == {"own speed", "last"}
    assert "30.00 s more: attic computes 2.5 times slower" in text[2]
    assert "10.00 s less: attic was predicted to wait that long for laptop" in text[3]


def test_faster_straggler_is_reported(run):
    text = told(run(laptop={"compute_s": 10.0}))
    assert named(text) == {"probe", "not last"}
    assert text[0].endswith("took 26.10 s, 28% less.")
    assert "20.00 s less: laptop computes 3 times faster than probed" in text[2]
    assert "10.00 s more: laptop was predicted to be done last; now it waits for attic" in text[3]


def test_more_processors_than_probed_are_reported(run):
    text = told(run(laptop={"compute_s": 20.0}, prediction=predict(cpus=2.6)))
    assert named(text) == {"probe"}
    assert "it ran on 4.0 processors, and on 2.6 when it was probed" in " ".join(text)


def test_alternating_lateness_is_reported(run):
    same = option(LAPTOP, LAPTOP)
    text = told(run({"compute_s": 24.0}, {"compute_s": 24.0}, late_s=12.0, prediction=predict(same)))
    assert named(text) == {"turns"}
    assert re.search(r"(\d\.\d\d) s more: .* each of them waits \1 s or more", text[2])


def test_input_wait_is_reported(run):
    text = told(run(laptop={"data_s": 9.0}))
    assert named(text) == {"input"}
    assert "9.00 s more: laptop waits 9.00 s for input, predicted were 0 µs" in text[2]


def test_slower_update_is_reported(run):
    text = told(run(laptop={"optimizer_s": 11.8}))
    assert named(text) == {"update"}
    assert "10.00 s more: the update takes laptop 11.80 s, predicted were 1.80 s" in text[2]


def test_slowdown_that_does_not_change_step_time_is_reported(run):
    text = told(run({"compute_s": 29.0}))
    assert named(text) == {"right", "own speed", "hidden"}
    assert "The step does not show it: attic computes 1.4 times slower" in text[1]


def test_differences_too_small_to_name_are_summed(run):
    text = told(
        run({"exposed_sync_s": 5.8}, {"compute_s": 31.6, "exposed_sync_s": 5.8, "optimizer_s": 3.4}, sync_s=7.5)
    )
    assert named(text) == set()
    assert text[-1] == "4.70 s more in all come from smaller differences."


# --- what is not known ------------------------------------------------------------------------------------------------


def test_missing_prediction_gives_probe_hint(run):
    summary = run(predicted=False)
    text = told(summary)
    assert len(text) == 1
    assert "evener probe host" in text[0]
    assert "evener probe wire" in text[0]
    assert summary_json(summary)["predicted"] is None
    assert step_prediction_cells(summary) == ("not predicted", "–")
    assert not any("predicted" in paragraph for paragraph in explain_run(summary))


def test_different_rank_count_is_not_compared(run):
    summary = run(prediction=predict(option(LAPTOP, name="laptop alone", hosts=("laptop",))))
    assert told(summary) == ["The prediction is of 1 rank and the run had 2 ranks: not compared."]
    assert summary.predicted is None
    assert "not compared" in run_page(RunDir(summary.run_dir), now=0.0)


def test_run_without_steps_is_not_compared(tmp_path, write_run):
    rundir = write_run(tmp_path / "run", [{}, {}], steps=0, verdict="failed")
    write_plan(rundir, Plan(kind="train", spec=None, prediction=predict()))
    assert told(summarize_run(rundir)) == ["A step was predicted to take 36.10 s; none was recorded."]
    assert "Predicted and measured" in run_page(rundir, now=0.0)


def test_unpredicted_and_unmeasured_parts_are_not_compared(run):
    prediction = predict(option(ATTIC | {"optimizer_s": None}, LAPTOP | {"optimizer_s": None}))
    text = told(run({"data_s": None}, {"data_s": None, "optimizer_s": 12.0}, prediction=prediction))
    assert named(text) == set()
    assert "12.00 s more are not explained." in text
    assert "Not predicted, so not compared: update." in text
    assert "Not measured, so not compared: input." in text


# --- figures ----------------------------------------------------------------------------------------------------------


def test_prediction_table_has_predicted_measured_and_difference(run):
    summary = run(laptop={"compute_s": 60.0})
    chosen = summary.predicted
    assert [prediction_cells(row) for row in step_rows(summary, chosen)] == [
        ["step", "36.10 s", "1 min 06 s", "+30.00 s", "+83%"],
        ["tokens/s", "28.4", "15.5", "−12.9", "−45%"],
        ["bytes that a rank sends", "503.3 MB", "503.3 MB", "0", "0%"],
        ["peak memory of a rank", "390.0 MB", "400.0 MB", "+10.0 MB", "+3%"],
    ]
    found = {row.name: row for row in rank_rows(summary, chosen, 0)}
    assert found["waiting for others"].difference == pytest.approx(30.0)
    assert found["sum"].measured == pytest.approx(66.1)
    assert sum(row.difference for row in list(found.values())[: len(PHASES)]) == pytest.approx(found["sum"].difference)
    assert prediction_cells(found["input"]) == ["input", "0 µs", "0 µs", "0", "–"]
    assert found["communication in flight"].predicted == SYNC_S


def test_unpredicted_and_unmeasured_values_are_marked(run):
    prediction = predict(option(ATTIC | {"data_s": None}, LAPTOP))
    summary = run({"optimizer_s": None}, verdict="stopped", prediction=prediction)
    found = {row.name: prediction_cells(row) for row in rank_rows(summary, summary.predicted, 0)}
    assert found["input"][1:] == ["not predicted", "0 µs", "–", "–"]
    assert found["update"][1:] == ["1.80 s", "not measured", "–", "–"]
    assert found["peak memory"][1:] == ["390.0 MB", "not measured", "–", "–"]


def test_json_and_bench_table_contain_the_prediction(run):
    summary = run(laptop={"compute_s": 60.0})
    predicted = summary_json(summary)["predicted"]
    assert predicted["option"] == "ddp"
    assert predicted["step_s"] == pytest.approx(36.1)
    assert predicted["step_difference"] == pytest.approx(30 / 36.1)
    assert predicted["ranks"][1] == {"rank": 1, "host": "laptop", "cost": LAPTOP, "sync_s": SYNC_S, "bytes": BYTES,
                                     "memory_bytes": 390_000_000}  # fmt: skip
    table = {name.strip(): value for name, value in bench_rows([summary])}
    assert (table["predicted step"], table["difference"]) == ("36.10 s", "+83%")
    assert "laptop computes 2 times slower than probed" in explain_run(summary)[-1]


# --- the page ---------------------------------------------------------------------------------------------------------


def test_page_includes_prediction_comparison(run):
    summary = run(laptop={"compute_s": 60.0})
    text = run_page(RunDir(summary.run_dir), now=0.0).partition("<script")[0]
    order = ["predicted 36.10 s, +83%", "What happened, and why", "Predicted and measured",
             "computes 2 times slower than probed", "The step", "Its phases on laptop, for which the others",
             "the other ranks", "attic</h3>", "Assumptions instead of measurements", "&lt;b&gt;stays", "What if",
             "this run: ddp", "batch and accumulation × 4", "another training run", "Manifest"]  # fmt: skip
    places = [text.index(words) for words in order[:3]]
    for words in order[3:]:
        places.append(text.index(words, places[-1]))
    assert places == sorted(places)


def test_page_without_prediction_shows_probe_command(run):
    text = run_page(RunDir(run(predicted=False).run_dir), now=0.0).partition("<script")[0]
    assert "Nothing was predicted here. evener probe host" in text
