"""The median step time that is computed from one rank's records equals the summary's."""

import msgspec
import pytest

from evener.core.base.json_files import read_json_lines
from evener.core.run.roster import parse_sync
from evener.core.run.step_statistics import StepWallTime, median_step_s
from evener.report.read.run_summary import summarize_run

WAYS = [(3, "ddp", 0), (61, "ddp", 20), (61, "diloco:10", 0), (7, "diloco:10", 0)]


@pytest.mark.parametrize(("steps", "sync", "since"), WAYS)
def test_streaming_p50_equals_summary_p50(tmp_path, write_run, steps, sync, since):
    run = write_run(tmp_path / "run", [{}, {"compute_s": 0.15}], steps=steps)
    lines = [msgspec.structs.replace(record, wall_s=record.wall_s * (1 + 0.01 * (7 * record.step % 13)))
             for record in run.records(0)]  # fmt: skip
    run.steps_path(0).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    manifest = run.manifest()
    roster = msgspec.structs.replace(manifest.roster, sync=parse_sync(sync))
    run.write_manifest(msgspec.structs.replace(manifest, roster=roster, since=since))
    found = summarize_run(run)
    assert found.step_p50_s is not None
    assert median_step_s(read_json_lines(run.steps_path(0), StepWallTime), run.manifest()) == pytest.approx(
        found.step_p50_s
    )
