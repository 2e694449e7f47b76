"""The dashboard fits any terminal, and prints one line per run to a pipe."""

from __future__ import annotations

import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from evener.cli.watch import watch
from evener.core.base.errors import UsageError
from evener.core.run.rundir import RunDir
from evener.watch import terminal_dashboard
from evener.watch.run_reader import RunReader

from ..sample_runs import STARTED


def shown(readers, width=80, height=24) -> list[str]:
    where = Console(width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False)
    with where.capture() as caught:
        where.print(terminal_dashboard.render_frame(readers, width, height, STARTED + 10), soft_wrap=True)
    return caught.get().rstrip("\n").split("\n")


def read(*runs) -> dict[str, RunReader]:
    readers = {run.path.name: RunReader(RunDir(run.path)) for run in runs}
    for reader in readers.values():
        while reader.read_new(1.0):
            pass
    return readers


@pytest.mark.parametrize("size", [(80, 24), (60, 20), (200, 50), (40, 12)])
@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_screen_fits_terminal(tmp_path, write_run, size, ranks):
    name = "a-run-with-a-very-long-name-" * 4
    run = write_run(tmp_path / name, [{}] * ranks, verdict="failed", evaluations=dict.fromkeys(range(1, 40), 2.0))
    run.add_event("failure", rank=0, error="no room " * 60, kind="exit", hint="free some " * 30)
    for readers in (read(run), read(run, *(write_run(tmp_path / f"{name}{i}", [{}]) for i in range(30)))):
        lines = shown(readers, *size)
        assert len(lines) <= size[1]
        assert max(map(cell_len, lines)) <= size[0]
        assert "failed" in "\n".join(lines)


def test_screen_shows_state_curve_ranks_and_events(tmp_path, write_run):
    slow = {"compute_s": 0.2, "wait_s": 0.0}
    run = write_run(tmp_path / "mine", [{"wait_s": 0.1}, slow], verdict="running", steps=50, evaluations={10: 2.0})
    lines = shown(read(run))
    text = "\n".join(lines)
    assert lines[0].startswith("mine  char (")
    assert lines[1].startswith("▶ healthy  step 50 of 50")
    assert "loss 0.0600" in text
    assert "validation loss 2.0000" in text
    of_rank_0, of_rank_1 = (next(line for line in lines if line.startswith(f"rank {rank} ")) for rank in (0, 1))
    assert of_rank_1.count("█") == pytest.approx(2 * of_rank_0.count("█"), abs=1), "computes twice as long"
    assert of_rank_0.count("░") == pytest.approx(of_rank_0.count("█"), abs=1), "and the other waits as long"
    assert "evaluation: step 10: validation loss 2.0000" in text


def test_braille_plot_has_peaks_where_values_have_them():
    """Of a sine: its crest is in the middle of the first half, its trough in that of the second."""
    xs = list(range(200))
    lines = terminal_dashboard.braille_plot(xs, [math.sin(2 * math.pi * x / 199) for x in xs], 40, 5)
    filled = [[cell != "⠀" for cell in line] for line in lines]
    assert all(any(line[i] for line in filled) for i in range(40)), "no gap"
    crest = [i for i in range(40) if filled[0][i]]
    trough = [i for i in range(40) if filled[-1][i]]
    assert sum(crest) / len(crest) == pytest.approx(10, abs=1)
    assert sum(trough) / len(trough) == pytest.approx(29, abs=1)


def test_pipe_gets_one_line_per_run(tmp_path, write_run, capsys):
    write_run(tmp_path / "a", [{}])
    write_run(tmp_path / "b", [{}], verdict="stopped")
    status = watch([str(tmp_path / "a"), str(tmp_path / "b")], host="127.0.0.1", terminal=True, port=None)
    a, b = capsys.readouterr().out.splitlines()
    assert status == 0
    assert a == f"a: finished, 20 steps in 1 min 00 s  loss {3 / 20:.4f}"
    assert b == f"b: stopped, after 20 steps  loss {3 / 20:.4f}"


def test_non_run_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a run directory"):
        watch([str(tmp_path)], host="127.0.0.1", terminal=True, port=None)
