"""The explanation of a run's scaling names the planted cause first, and no other."""

from __future__ import annotations

import msgspec
import pytest

from evener.core.run.roster import parse_sync
from evener.report.explain.explain_run import explain_bottleneck, explain_run, explain_scaling
from evener.report.pages.html_report import run_page
from evener.report.read.run_summary import summarize_run
from evener.report.read.strategy_comparisons import strategy_comparisons

MARKS = {  # words by which a paragraph names a cause
    "cores": "because the cores were taken already",
    "overbooked": "threads share",
    "other programs": "because other programs took the cores",
    "memory": "because the ranks share one memory",
    "neighbours": "because the ranks slow each other down",
    "small pieces": "are computed less efficiently",
    "threads gain": "than one that divides every operation among",
    "communication": "to communication that backward did not hide",
    "straggler": "the slowest:",
    "late": "now one rank is late",
    "input": "waiting for input:",
    "optimizer": "repeats the whole update",
    "unexplained": "unexplained",
    "unmeasured": "Not measured:",
}


def named(text: str) -> list[str]:
    """Causes in the order in which the paragraph names them."""
    return sorted((cause for cause, mark in MARKS.items() if mark in text), key=lambda cause: text.index(MARKS[cause]))


@pytest.fixture
def one(tmp_path, write_run, contention):
    """One process with one thread on a machine with two cores: a second process finds a free core."""
    found = contention(1, alone_s=0.1)
    return lambda **other: summarize_run(
        write_run(tmp_path / "1", [{}], **({"cpus": [0.99], "contention": found} | other))
    )


@pytest.fixture
def two(tmp_path, write_run, contention):
    """Two processes that find their cores free and halve the work, but for what `costs` and `other` say."""
    half = {"data_s": 0.0005, "compute_s": 0.05, "optimizer_s": 0.002}

    def make(costs=({}, {}), **other):
        given = {"cpus": [0.99, 0.99], "contention": contention(2), "sync_s": 0.02} | other
        return summarize_run(write_run(tmp_path / "2", [half | cost for cost in costs], **given))

    return make


def test_perfect_scaling_reports_no_loss(one, two):
    text = explain_scaling([one(), two()])
    assert named(text) == []
    assert "2.00 times as many" in text
    assert "There was room for more: 0.99 cores were at work before, and now 1.98 are." in text
    assert text.endswith("2 processes are worth it here.")
    assert "next to nothing was lost" in text


def test_memory_bandwidth_contention_is_explained(one, two, contention):
    found = contention(2, together_s=0.09, copy_together_Bps=6.2e9)
    text = explain_scaling([one(), two([{"compute_s": 0.09}] * 2, contention=found)])
    assert named(text) == ["memory"]
    assert "40 ms are lost because the ranks share one memory" in text
    assert "1.80 times as long next to the others as alone although it keeps its 0.99 cores" in text
    assert "12.0 GB/s alone, and 2 at once at 12.4 GB/s in all" in text
    assert "another machine brings a memory of its own" in text


def test_slow_neighbours_with_spare_bandwidth_are_explained_by_shared_cores(one, two, contention):
    text = explain_scaling([one(), two([{"compute_s": 0.09}] * 2, contention=contention(2, together_s=0.09))])
    assert named(text) == ["neighbours"]
    assert "two hardware threads of one core" in text


def test_shared_cores_are_explained(tmp_path, write_run, one, two, contention):
    before = one(cpus=[1.98], threads=2, contention=contention(1, alone_s=0.1, alone_cpus=1.98))
    text = explain_scaling([before, two([{"compute_s": 0.1}] * 2, contention=contention(2, alone_s=0.1))])
    assert named(text) == ["cores"]
    assert "50 ms are lost because the cores were taken already: the one process ran on 1.98 of 2 cores" in text
    assert "Use 1 process here. All cores are busy already: only another machine or a GPU would make training" in text


def test_cores_not_growing_with_processes_is_explained(one, two, contention):
    before = one(cpus=[2.9], threads=3, cores=4, contention=contention(1, alone_s=0.1, alone_cpus=2.9))
    after = two([{"compute_s": 0.0725}] * 2, threads=2, cores=4, cpus=[2.0] * 2,
                contention=contention(2, alone_s=0.0725, alone_cpus=2.0))  # fmt: skip
    assert "because the cores did not grow with the processes" in explain_scaling([before, after])
    assert "in all 1.4 times as many" in explain_scaling([before, after])


def test_thread_oversubscription_is_explained(one, two, contention):
    found = contention(2, alone_s=0.05, together_s=0.11, alone_cpus=1.9, together_cpus=1.0)
    before = one(cpus=[1.9], threads=2, contention=contention(1, alone_s=0.1, alone_cpus=1.9))
    cost = {"compute_s": 0.09, "wait_s": 0.04}
    text = explain_scaling([before, two([cost, cost | {"wait_s": 0.038}], threads=2, cpus=[0.9] * 2, contention=found)])
    assert named(text) == ["overbooked"]
    assert "80 ms are lost because 4 threads share 2 cores, of which the one process used 1.90: the ranks take" in text
    assert text.endswith("Use 1 process here. If 2 processes, then with 1 thread each: --threads 1.")


def test_more_processes_than_cores_is_explained(one, two, contention):
    costs = [{"compute_s": 0.05, "wait_s": 0.06}, {"compute_s": 0.05, "wait_s": 0.055}]
    text = explain_scaling([one(cores=1), two(costs, cores=1)])
    assert named(text) == ["overbooked"]
    assert text.endswith("Use 1 process here. No more processes can compute at the same time than there are cores, 1.")


def test_other_programs_are_explained(one, two, contention):
    found = contention(2, together_s=0.08, together_cpus=0.6)
    text = explain_scaling([one(), two([{"compute_s": 0.08}] * 2, cpus=[0.62] * 2, contention=found)])
    assert named(text) == ["other programs"]
    assert "a rank had 0.60 for its 1 thread while all computed and 0.99 when it computed alone" in text
    assert text.endswith("Measure again when nothing else runs on the machine.")


def test_exposed_communication_is_explained(one, two):
    text = explain_scaling([one(), two([{"exposed_sync_s": 0.06}] * 2, sync_s=0.08)])
    assert named(text) == ["communication"]
    assert "60 ms are lost to communication that backward did not hide, 53% of the step" in text
    assert "480.0 kB of gradients at 6.0 MB/s" in text
    assert "with --batch 32 they would fall from 55% to 38% of it" in text


@pytest.mark.parametrize(
    ("costs", "other", "why"),
    [
        ([{"wait_s": 0.05}, {"compute_s": 0.1}], {"cpus": [0.51, 0.5]}, "it was not always running"),
        ([{"wait_s": 0.05}, {"compute_s": 0.1}], {"cpus": [0.51, 0.99]}, "its core or its memory is slower"),
        ([{"wait_s": 0.05}, {"compute_s": 0.1}], {"cpus": None}, "whether it was really running was not measured"),
        ([{"wait_s": 0.05}, {"data_s": 0.0505}], {}, "waiting for input, rank 0"),
        ([{"wait_s": 0.05}, {"compute_s": 0.1}], {"tokens": [400, 624]}, "its share of the batch is larger, 624"),
    ],
)
def test_straggler_is_explained_with_reason(one, two, costs, other, why):
    run = two(costs, **other)
    text = explain_scaling([one(), run])
    assert named(text) == ["straggler"]
    assert "50 ms are lost waiting for rank 1, the slowest: " in text
    assert why in text
    assert text.endswith("What slows rank 1 slows all: look there first.")
    story = " ".join(explain_run(run))
    assert "The straggler is rank 1: it waits least, 0 µs a step, and rank 0 waits 50 ms for it" in story
    assert why in story
    assert explain_bottleneck(run).startswith("Limited by rank 1, for which rank 0 waits 49% of each step; ")


def test_share_of_program_counts_samples(two):
    run = two([{"wait_s": 0.05}, {"compute_s": 0.1}], tokens=[400, 624])
    run = msgspec.structs.replace(run, manifest=msgspec.structs.replace(run.manifest, shape=None, unit="samples"))
    assert "its share of the batch is larger, 624 samples against 400" in " ".join(explain_run(run))


def test_ranks_late_in_turns_are_explained(one, two):
    text = explain_scaling([one(), two([{"wait_s": 0.03}, {"wait_s": 0.028, "compute_s": 0.052}])])
    assert named(text) == ["late"]
    assert "28 ms to 30 ms a step" in text


def test_input_wait_is_explained(one, two):
    text = explain_scaling([one(), two([{"data_s": 0.04}] * 2)])
    assert named(text) == ["input"]
    assert "40 ms a step, and 1 ms with 1 process" in text


def test_optimizer_time_is_explained(tmp_path, write_run, two, contention):
    slow = {"optimizer_s": 0.08}
    before = summarize_run(write_run(tmp_path / "1", [slow], cpus=[0.99], contention=contention(1, alone_s=0.1)))
    text = explain_scaling([before, two([slow, slow])])
    assert named(text) == ["optimizer"]
    assert "40 ms are lost because every process repeats the whole update of 119.1k parameters: 80 ms, and 80" in text
    assert "Communication and update are paid once a step" in text


def test_better_core_use_of_single_thread_is_explained(one, two, contention):
    before = one(cpus=[1.98], threads=2, contention=contention(1, alone_s=0.1, alone_cpus=1.98))
    text = explain_scaling([before, two([{"compute_s": 0.07}] * 2, contention=contention(2, alone_s=0.07))])
    assert named(text) == ["threads gain", "cores"]
    assert "30 ms are gained because a process with 1 thread uses its cores better" in text
    assert "1,000 tokens take 135 ms of CPU time, and took 193 ms with 1 process" in text
    assert "2 processes are worth it here" in text


def test_cpu_time_shows_thread_gain_without_contention_probe(one, two):
    before = one(cpus=[1.98], threads=2, contention=None)
    text = explain_scaling([before, two([{"compute_s": 0.07}] * 2, contention=None)])
    assert named(text) == ["threads gain", "cores", "unmeasured"]
    assert "1,000 tokens take 140 ms of CPU time, and took 203 ms with 1 process" in text


def test_small_micro_batches_are_explained(one, two, contention):
    text = explain_scaling([one(), two([{"compute_s": 0.08}] * 2, contention=contention(2, alone_s=0.08))])
    assert named(text) == ["small pieces"]
    assert "micro-batches of 8 sequences" in text


def test_unexplained_loss_is_reported(one, two):
    text = explain_scaling([one(), two([{"compute_s": 0.08}] * 2)])
    assert named(text) == ["unexplained"]
    assert "30 ms remain unexplained" in text


def test_step_part_that_shrinks_is_reported_as_gain(tmp_path, write_run, two, contention):
    long = {"data_s": 0.05, "exposed_sync_s": 0.06, "optimizer_s": 0.08}  # a busy machine, or DDP of one rank
    before = summarize_run(write_run(tmp_path / "1", [long], cpus=[0.99], contention=contention(1, alone_s=0.1)))
    text = explain_scaling([before, two()])
    for part in ("the update: 2 ms a step, and 80 ms", "communication that backward did not hide", "waiting for input"):
        assert f"are gained in {part}" in text
    assert "are lost" not in text


def test_unmeasured_values_are_reported_and_never_zero(one, two):
    text = explain_scaling([one(cpus=None, contention=None), two([{"data_s": None}] * 2, cpus=None, contention=None)])
    assert named(text) == ["unmeasured"]
    assert "on how many cores the processes ran" in text
    assert "next to the others (--contention measures it)" in text
    assert "waiting for input" in text


def test_too_coarse_contention_clock_counts_as_unmeasured(one, two, contention):
    text = explain_scaling([one(), two([{"compute_s": 0.08}] * 2, contention=contention(2, together_cpus=0.0))])
    assert named(text) == ["unexplained", "unmeasured"]


def test_unmeasured_compute_is_reported(one, two):
    text = explain_scaling([one(), two([{"compute_s": None}] * 2)])
    assert "Not measured: forward and backward" in text
    assert "cores the processes ran" not in text


def test_busy_machine_is_reported_before_causes(one, two, contention):
    before = one(cpus=[0.5], contention=None)
    text = explain_scaling([before, two(contention=contention(2, alone_cpus=0.6), cpus=[0.6] * 2)])
    assert "0.50 cores for 1 thread of a process when there was 1, 0.60 cores for 1 thread of a process when" in text
    assert text.endswith("Measure again when nothing else runs on the machine, and decide then.")


def test_the_largest_cause_comes_first(one, two):
    far, slow = {"data_s": 0.02, "exposed_sync_s": 0.05}, {"data_s": 0.05, "exposed_sync_s": 0.02}
    assert named(explain_scaling([one(), two([far, far])])) == ["communication", "input"]
    assert named(explain_scaling([one(), two([slow, slow])])) == ["input", "communication"]


def test_weak_scaling_run_is_explained(one, two):
    cost = {"data_s": 0.001, "compute_s": 0.1, "optimizer_s": 0.004, "exposed_sync_s": 0.03}
    text = explain_scaling([one(), two([cost] * 2, tokens=[1024, 1024])])
    assert named(text) == ["communication"]
    assert (
        "Every process had a batch of its own: with nothing lost, a step would still take 105 ms; it took 135" in text
    )
    assert "losses cannot be compared" in text


def test_a_run_without_steps_is_left_out(tmp_path, write_run, one, two):
    failed = summarize_run(write_run(tmp_path / "4", [{}] * 4, steps=0, verdict="failed"))
    text = explain_scaling([one(), two(), failed])
    assert text.startswith("The run with 4 processes recorded no step (failed): it is left out.")
    assert "2.00 times as many" in text
    assert "Nothing to compare" in explain_scaling([one()])
    assert "Nothing to compare" in explain_scaling([])


def test_explanation_says_how_closely_losses_of_two_runs_agree(one, two):
    assert "equal to the last digit, so the same model was learned" in explain_scaling([one(), two()])
    close = two(losses=lambda step: 3.0000001 / (step + 1))
    assert "agree to 7 digits, so the same model" in explain_scaling([one(), close])
    drifting = two(steps=60, losses=lambda step: (3.003 if step >= 50 else 3.0000001) / (step + 1))
    told = explain_scaling([one(steps=60), drifting])
    assert "first 50 steps agree to 7 digits, so it is the same training; later they differ by up to 0.001" in told
    far = two(losses=lambda step: 3.3 / (step + 1))
    assert "differ by up to 0.1 times their size over 20 common steps: more than" in explain_scaling([one(), far])
    assert "as they may with dropout" in explain_scaling([one(dropout=0.2), far])
    assert "losses were not measured" in explain_scaling([one(), two(losses=lambda step: None)])


def test_different_machines_get_different_explanations(one, two, contention):
    """The same run directories but for the contention: only what was measured beside the steps differs."""
    slow = [{"compute_s": 0.09}] * 2
    without_cores = contention(2, together_s=0.09, together_cpus=0.55)
    without_bandwidth = contention(2, together_s=0.09, copy_together_Bps=6e9)
    crowded = explain_scaling([one(), two(slow, contention=without_cores)])
    full_bus = explain_scaling([one(), two(slow, contention=without_bandwidth)])
    assert named(crowded) == ["other programs"]
    assert named(full_bus) == ["memory"]


def test_unequal_thread_counts_of_ranks_are_summed(tmp_path, write_run, one):
    rundir = write_run(tmp_path / "uneven", [{"compute_s": 0.05, "wait_s": 0.03}] * 2, cpus=[0.6, 1.2])
    manifest = rundir.manifest()
    ranks = [msgspec.structs.replace(rank, threads=num) for rank, num in zip(manifest.ranks, (1, 3), strict=True)]
    rundir.write_manifest(msgspec.structs.replace(manifest, ranks=ranks))
    run = summarize_run(rundir)
    assert (run.threads, run.thread_range, run.threads_text) == ([1, 3], "1 to 3", "1 to 3 threads")
    assert "because 4 threads share 2 cores" in explain_scaling([one(), run])


def test_single_rank_run_is_explained(one):
    story = explain_run(one())
    assert len(story) == 5
    assert story[0] == "h alone trained 9.8k tokens/s; no other machine took part."
    assert "105 ms (p50; p95 105 ms): 9.8k tokens/s" in story[1]
    assert "100 ms forward and backward (95%), 4 ms the update of the weights (4%)" in story[2]
    assert "1 process with 1 thread on 2 cores: while it had work, a rank ran on 0.99 cores" in story[3]
    assert story[4].startswith("Forward and backward compute 7.7GFLOP/s, over the whole step.")
    assert explain_bottleneck(one()) == "Limited by computing: forward and backward are 95% of each step."


def test_balanced_two_rank_run_is_explained(two):
    story = " ".join(explain_run(two([{"exposed_sync_s": 0.005}] * 2)))
    assert "No rank holds the others up" in story
    assert "480.0 kB in them, 24.0 MB/s" in story
    assert "which hides 75% of their time" in story
    assert "sharing the machine costs nothing" in story


def test_missing_measurements_of_a_run_are_reported(two):
    story = " ".join(explain_run(two([{"wait_s": None, "exposed_sync_s": None}] * 2, cpus=None, sync_s=None)))
    assert "waiting for other ranks was not measured" in story
    assert "How long the ranks wait for each other was not measured." in story
    assert "How long the all-reduces take was not measured." in story
    assert "on how many cores they really ran was not measured" in story
    assert "not all phases of a step were measured" in explain_bottleneck(two([{"wait_s": None}] * 2))


def test_run_without_steps_has_nothing_to_explain(tmp_path, write_run):
    assert explain_run(summarize_run(write_run(tmp_path / "r", [{}], steps=0))) == [
        "No step was recorded, so there is nothing to explain."
    ]


def test_gpus_are_not_explained_by_cores(one, two):
    text = explain_scaling([one(device="H200", cpus=[1.0]), two(device="H200", cpus=[1.0] * 2)])
    assert named(text) == []
    assert "cores" not in text


def test_spinning_threads_on_busy_cores_get_wait_policy_hint(tmp_path, write_run):
    """Two threads that had half a core between them: what a person can do stands beside what happened."""
    run = write_run(tmp_path / "run", [{}], threads=2, cpus=[0.5])
    text = " ".join(explain_run(summarize_run(run)))
    assert "It was not really running on its 2 threads" in text
    assert "OMP_WAIT_POLICY=PASSIVE before the command" in text
    alone = write_run(tmp_path / "one", [{}], threads=1, cpus=[0.5])
    assert "OMP_WAIT_POLICY" not in " ".join(explain_run(summarize_run(alone)))


def test_drifting_replicas_get_no_gradient_accumulation_advice(tmp_path, write_run):
    rundir = write_run(tmp_path / "run", [{}, {}], sync_s=0.02)
    manifest = rundir.manifest()
    roster = msgspec.structs.replace(manifest.roster, sync=parse_sync("diloco:10:int8"))
    rundir.write_manifest(msgspec.structs.replace(manifest, roster=roster))
    told = " ".join(explain_run(summarize_run(rundir)))
    assert "trains it by itself for 10 steps on its own part of each batch" in told
    assert "the mean over 10 steps, of which one exchanges" in told
    assert "backward" not in told.split("average what they learned")[1].split("All-reduces")[1].split(".")[0]
    assert "add their gradients up" not in told


def test_split_brain_is_reported(one):
    twice = "split brain: membership epoch 3 was decided twice"
    assert f"S{twice[1:]}." in explain_run(msgspec.structs.replace(one(), split_brains=[twice]))


def test_report_says_what_the_next_best_strategy_would_have_taken(tmp_path, write_run):
    """By measurement, and whether the choice was wrong: a step takes 20 ms in the run, 16 ms in the trial."""
    event = {"event": "compared", "step": 16, "chosen": "ddp", "why": "measured", "measured": [
        {"sync": "ddp", "predicted_s": 0.015, "measured_s": 0.016, "error_s": 0.0, "num_steps": 8},
        {"sync": "int8", "predicted_s": 0.014, "measured_s": 0.018, "error_s": 0.0, "num_steps": 8}]}  # fmt: skip
    damaged = [event | {"measured": [{"sync": "ddp"}]}, event | {"chosen": 3}, event | {"measured": []}]
    comparisons = strategy_comparisons([*damaged, event])
    assert [one.chosen for one in comparisons] == ["ddp"]
    summary = summarize_run(write_run(tmp_path / "run", [{}, {}]))
    summary = msgspec.structs.replace(summary, comparisons=comparisons, step_p50_s=0.020, num_steps=1000)
    text = "\n".join(explain_run(summary))
    assert "--sync auto chose ddp; measured time of a step: ddp 16 ms in 8 steps (predicted: 15 ms), int8 18 ms" in text
    assert (
        "step time 1000 steps take 20.00 s; at the time that int8 had in the comparison, they would take 18.00 s."
        in text
    )
    assert "longer than with int8 in the comparison" in text
    assert "longer than with" not in "\n".join(explain_run(msgspec.structs.replace(summary, step_p50_s=0.017)))
    slower = msgspec.structs.replace(comparisons[0], measured=comparisons[0].measured[::-1])
    assert str(slower).endswith("; ddp is 12.5% faster: too little")


def test_failed_run_says_so_first_and_has_no_loss(write_run, tmp_path):
    """As a run that diverges writes it: the event of the step, then the failure with its hint."""
    run = write_run(tmp_path / "run", [{}], verdict="failed", steps=4)
    run.add_event("run.nonfinite", step=3, ranks=[0])
    run.add_event("failure", rank=0, error="step 3: the gradient norm is not finite", hint="a smaller --lr")
    summary = summarize_run(run)
    first, *others = explain_run(summary)
    assert first == "The run failed after 4 steps: rank 0: step 3: the gradient norm is not finite; a smaller --lr."
    assert "no other machine took part" in others[0]
    assert (summary.diverged_at, summary.last_loss) == (3, None)
    page = run_page(run, now=0.0)
    assert "diverged" in page
    assert "at step 3" in page
    stopped = write_run(tmp_path / "other", [{}], verdict="failed", steps=4)
    stopped.add_event("failure", rank=0, error="no memory")
    told = summarize_run(stopped)
    assert (told.failure, told.diverged_at, told.last_loss) == ("rank 0: no memory", None, 3.0 / 4)


def test_report_of_own_program_speaks_of_samples_and_names_a_command_that_runs_it(write_run, tmp_path):
    run = write_run(tmp_path / "run", [{}, {}])
    manifest = run.manifest()
    argv = ["my train.py", "--batch", "64", "--out", "old", "--steps=3"]
    summary = msgspec.structs.replace(
        summarize_run(run),
        manifest=msgspec.structs.replace(manifest, corpus=None, shape=None, argv=argv),
        run_dir="runs/own",
    )
    text = "\n".join(explain_run(summary))
    assert "samples/s" in text
    assert "token" not in text
    assert "torchrun --nproc-per-node 1 'my train.py' --batch 64 --steps=3 --out runs/own-1-rank" in text
