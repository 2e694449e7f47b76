"""Spans recorded by ranks sum to their step records, and viewers can open their trace."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.core.run.step_spans import RECORD_EVERY_STEPS, RECORD_LAST_STEPS
from evener.report.export.chrome_trace import write_trace
from evener.report.read.clock_offsets import RankClocks
from evener.report.read.timeline import read_timeline
from evener.report.read.torch_profile import read_profile, read_profiles
from evener.worker.rank.clock import HostClock
from evener.worker.record.span_recorder import MAX_LAYER_GROUPS, LayerTracer, layer_groups

from .. import traces
from ..tiers import exhaustively


def records_of(run, rank):
    """Read by json alone."""
    return {record["step"]: record for record in map(json.loads, run.steps_path(rank).read_text().splitlines())}


def check_sums(run, trace, ranks):
    """Part by part, within 1 % and what clocks resolve."""
    for rank in range(ranks):
        records, found = records_of(run, rank), traces.step_parts_s(trace, f"rank {rank}")
        assert found
        for step, parts in found.items():
            for part, took_s in parts.items():
                assert took_s == pytest.approx(records[step]["cost"][part], rel=0.01, abs=2e-6), (rank, step, part)


SYNCS = [
    ("diloco:5:int8", 2, ()),
    *exhaustively(
        ("ddp", 2, ()),
        ("packed", 3, ("--dtype", "bf16")),
        ("int8", 2, ()),
        ("powersgd:4", 2, ()),
        ("diloco:10:streamed", 2, ()),
    ),
]


@pytest.mark.parametrize(("sync", "ranks", "flags"), SYNCS)
def test_spans_sum_to_records_and_trace_is_complete(tmp_path, train, sync, ranks, flags):
    run = train(tmp_path / "run", "--steps", "105", "--batch", "6", "--micro-batch", "1", "--sync", sync,
                "--eval-every", "50", "--checkpoint-every", "40", *flags, ranks=ranks)  # fmt: skip
    timeline = read_timeline(run)
    assert timeline.recorded_ranges == [(0, 0), (20, 39), (60, 79), (85, 104)]
    write_trace(run, timeline, tmp_path / "trace.json")
    trace = traces.read(tmp_path / "trace.json")
    check_sums(run, trace, ranks)
    for rank in range(ranks):
        records = records_of(run, rank)
        buckets = [one for (process, track), found in trace.slices.items() for one in found
                   if process == f"rank {rank}" and track.startswith("bucket")]  # fmt: skip
        # Of a round of replicas that drift, all steps are in the stretches; else exchanges are those of the step.
        steps = [one.spans for stretch in timeline.segments for of_step in stretch.steps.values()
                 for one in [of_step[rank]]]  # fmt: skip
        assert sum(one.args["bytes sent"] for one in buckets) == sum(records[one.step]["bytes"] for one in steps)
        beside = {one.name for one in trace.of(f"rank {rank}", "beside")}
        assert beside >= {"evaluation", "checkpoint", "comparison"}
        passes = trace.of(f"rank {rank}", "layers")
        assert {one.name for one in passes} >= {"blocks.0 forward", "blocks.0 backward", "token_embedding forward"}
        of_groups = [step for step in steps if step.passes]
        assert [step.step for step in of_groups] == [0, RECORD_EVERY_STEPS]
        for step in of_groups:  # as many as there are micro-batches
            forwards = [one for one in step.passes if one.group == "blocks.1" and not one.is_backward]
            assert len(forwards) == len([lap for lap in step.laps if lap.phase == "data_s"]) > 1
    assert trace.other["steps not recorded"] == "1-19, 40-59, 80-84"
    arrows = [(one, other) for (one, _), (other, _) in trace.arrows]
    assert arrows
    assert all(one != other for one, other in arrows)


SLOW_RANK = """
import sys, time, torch, evener
from torch import nn
from evener.core.run.run_spec import parse_args

class Numbers:
    def global_batch(self, seed, step, num): import numpy; return numpy.arange(num) + step
    def num_tokens(self, samples): return len(samples)
    def load(self, samples, device): return torch.from_numpy(samples).float()[:, None]

with evener.join(parse_args(["--out", sys.argv[1], "--steps", "6", "--batch", "4", "--threads", "1"])) as run:
    model = run.model(nn.Linear(1, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.0))
    for step in run.steps(Numbers()):
        for batch in step.micro_batches():
            if run.rank == 1:
                time.sleep(0.2)  # its forward is slow
            step.backward(model(batch).sum())
        step.update(optimizer)
        if run.rank == 0 and step.index == 4 and len(sys.argv) > 2:
            raise SystemExit("it broke")
"""


def test_arrows_lead_from_the_slow_rank(tmp_path, run_script):
    done = run_script(SLOW_RANK, str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    write_trace(run, read_timeline(run), tmp_path / "trace.json")
    trace = traces.read(tmp_path / "trace.json")
    check_sums(run, trace, 2)
    assert len(trace.arrows) == 6
    spans = {rank: run.spans(rank) for rank in range(2)}
    clocks, first = RankClocks(spans, {0: "a", 1: "b"}), spans[0][2]  # as if nobody knew that they are on one host
    offset = clocks.offset(0, 1, first.begun_s, first.begun_s + 0.2)
    assert abs(offset.add_s) <= offset.error_s < 0.1  # though rank 1 comes 0.2 s late to every bucket
    for (process, last), (waiting, first) in trace.arrows:
        assert (process, waiting) == ("rank 1", "rank 0")
        assert last.begin - first.begin > 0.15e9
        assert last.args["last to begin"] == first.args["last to begin"] == "rank 1"
        assert last.args["without waiting (ms)"] < 100


def test_failed_rank_has_written_its_last_spans(tmp_path, run_script):
    done = run_script(SLOW_RANK, str(tmp_path / "run"), "fails", ranks=2)
    assert done.returncode != 0
    run = RunDir(tmp_path / "run")
    for rank in range(2):
        assert [one.step for one in run.spans(rank)][:4] == [0, 1, 2, 3]
    write_trace(run, read_timeline(run), tmp_path / "trace.json")
    traces.read(tmp_path / "trace.json")


def test_profiled_optimizer_step_lies_within_recorded_update_span(tmp_path, train):
    """Its clock is its own: that an optimizer's step lies within our update shows that the two were joined rightly."""
    run = train(tmp_path / "run", "--steps", "30", "--profile", "2", "--profile-ranks", "1", ranks=2)
    assert read_profile(run, 0) is None
    profiles = read_profiles(run)
    assert profiles[1].clock_sync.steps == [3, 4]
    timeline = read_timeline(run, max_steps=5, extra_steps=[3, 4])
    assert timeline.shown_ranges == [(3, 4), (25, 29)]
    write_trace(run, timeline, tmp_path / "trace.json", profiles)
    trace = traces.read(tmp_path / "trace.json")
    check_sums(run, trace, 2)
    found = [one for (process, track), slices in trace.slices.items() if track.startswith("torch: ")
             for one in slices if process == "rank 1"]  # fmt: skip
    assert not [track for process, track in trace.slices if process == "rank 0" and track.startswith("torch")]
    steps = [one for one in trace.of("rank 1", "step") if one.name in ("step 3", "step 4")]
    for step in steps:
        inside = [one for one in trace.of("rank 1", "step") if step.begin <= one.begin and one.end <= step.end]
        (update,) = [one for one in inside if one.name == "update"]
        (forward,) = [one for one in inside if one.name == "forward"]
        (optimizer,) = [one for one in found if one.name.startswith("Optimizer.step") and step.begin <= one.begin
                        and one.end <= step.end]  # fmt: skip
        assert update.begin <= optimizer.begin < optimizer.end <= update.end
        embeddings = [
            one for one in found if one.name == "aten::embedding" and forward.begin <= one.begin < forward.end
        ]
        assert embeddings
        assert all(one.end <= forward.end for one in embeddings)
        assert [one for one in found if one.name == "gloo:all_reduce" and step.begin <= one.begin < step.end]


def test_clock_offset_of_two_local_ranks_is_near_zero(tmp_path, train):
    """Asked as if they were hosts that nobody knows anything of: the kernel's monotonic clock is one for all."""
    run = train(tmp_path / "run", "--steps", "60", ranks=2)
    spans = {rank: run.spans(rank) for rank in range(2)}
    clocks = RankClocks(spans, {0: "a", 1: "b"})
    first, other = spans[0][-1], spans[1][-1]
    offset = clocks.offset(clocks.clock_of(0, first), clocks.clock_of(1, other), first.begun_s, first.begun_s + 0.1)
    assert offset.error_s is not None
    assert abs(offset.add_s) <= offset.error_s
    assert offset.error_s < 0.1  # in fact a millisecond; processors may be busy


def test_resume_drops_spans_of_repeated_steps(tmp_path, train):
    out = tmp_path / "run"
    train(out, "--steps", "30", "--checkpoint-every", "20")
    assert [one.step for one in RunWriter(out).spans(0)] == list(range(30))
    RunWriter(out).truncate_records(0, 20)
    assert [one.step for one in RunWriter(out).spans(0)] == list(range(20))
    assert RECORD_LAST_STEPS == 20


def test_layer_marks_do_not_change_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), *(nn.Linear(8, 8) for _ in range(10)), nn.LayerNorm(8))
    tokens = torch.arange(7)
    model(tokens).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    clock = HostClock()
    with LayerTracer(layer_groups(model), clock) as passes:
        for _ in range(2):
            model(tokens).square().sum().backward()
            passes.end_lap(clock.mark())
            if not all(parameter.grad is None for parameter in model.parameters()):
                found = [parameter.grad.clone() for parameter in model.parameters()]
                model.zero_grad()
                assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    names = [name for name, *_ in layer_groups(model)]
    assert names == ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11"]
    assert len(names) <= MAX_LAYER_GROUPS
    once = [(name, False) for name in names] + [(name, True) for name in reversed(names)]
    assert [(name, is_backward) for name, is_backward, *_ in passes.spans] == once * 2
    times = [time for *_, begin, end in passes.spans for time in (begin, end)]
    assert times == sorted(times)
    assert hooks == sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()) == 0


def test_compiled_module_gets_no_layer_marks():
    block = nn.Linear(2, 2)
    block.compile()
    assert layer_groups(nn.Sequential(nn.Linear(2, 2), block)) == []
