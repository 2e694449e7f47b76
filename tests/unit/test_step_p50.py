"""The step time of the terminal, the live page and the report is one median, where they are of the same steps."""

import msgspec
import pytest

from evener.core.base.json_files import read_json_lines
from evener.core.base.units import format_count
from evener.core.run.progress import RunProgress
from evener.core.run.roster import parse_sync
from evener.core.run.step_statistics import StepWallTime, median_step_s
from evener.report.read.run_summary import summarize_run
from evener.watch import run_view
from evener.watch.run_reader import RunReader

WAYS = [(3, "ddp", 0), (61, "ddp", 20), (61, "diloco:10", 0), (7, "diloco:10", 0)]


def write_uneven_run(path, write_run, steps, sync, since=0, **settings):
    """A run whose step times differ, the first and the last of each round by much."""
    every = parse_sync(sync).every if parse_sync(sync).every > 1 else 10
    run = write_run(path, [{}, {"compute_s": 0.15}], steps=steps, **settings)
    for rank in range(2):
        factors = [(1 + 0.01 * (7 * step % 13)) * (9 if step % every in (0, every - 1) else 1) for step in range(steps)]
        lines = [msgspec.structs.replace(record, wall_s=record.wall_s * factor)
                 for record, factor in zip(run.records(rank), factors, strict=True)]  # fmt: skip
        run.steps_path(rank).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    manifest = run.manifest()
    roster = msgspec.structs.replace(manifest.roster, sync=parse_sync(sync))
    run.write_manifest(msgspec.structs.replace(manifest, roster=roster, since=since))
    return run


@pytest.mark.parametrize(("steps", "sync", "since"), WAYS)
def test_streaming_p50_equals_summary_p50(tmp_path, write_run, steps, sync, since):
    run = write_uneven_run(tmp_path / "run", write_run, steps, sync, since)
    found, walls = summarize_run(run), read_json_lines(run.steps_path(0), StepWallTime)
    assert found.step_p50_s is not None
    current = [wall for wall in walls if wall.step >= since]
    assert median_step_s(current, run.manifest().roster.sync.every) == pytest.approx(found.step_p50_s)


@pytest.mark.parametrize(("steps", "sync"), [(3, "ddp"), (6, "ddp"), (20, "ddp"), (19, "diloco:10"), (7, "diloco:10")])
def test_rate_of_a_short_run_is_equal_in_terminal_live_page_and_report(tmp_path, write_run, steps, sync):
    """All its steps are among the newest ones, which a run that trains shows."""
    run = write_uneven_run(tmp_path / "run", write_run, steps, sync, verdict="running")
    found = summarize_run(run)
    progress = RunProgress(steps, (found.tokens_per_step, "tokens"))
    progress.set_interval(run.manifest().roster.sync.every)
    for record in run.records(0):
        progress.add(record)
    reader = RunReader(run)
    while reader.read_new(1.0):
        pass
    assert run_view.typical_step_s(reader) == pytest.approx(found.step_p50_s)
    assert progress.throughput_text == f"{format_count(found.tokens_per_s)} tokens/s"


def test_rate_of_a_run_that_trains_is_of_whole_rounds(tmp_path, write_run):
    """44 steps in rounds of 15: the newest whole round are steps 15 to 29, of which the first and the last are long."""
    run = write_uneven_run(tmp_path / "run", write_run, 44, "diloco:15", verdict="running")
    progress = RunProgress(44, (1024, "tokens"))
    progress.set_interval(15)
    for record in run.records(0):
        progress.add(record)
    mean_s = sum(record.wall_s for record in run.records(0)[15:30]) / 15
    assert progress.throughput_text == f"{format_count(1024 / mean_s)} tokens/s"
