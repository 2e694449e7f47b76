"""`evener train --log` sends every step of a run to its logger, also after a resume."""

from __future__ import annotations

import re
import signal

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evener.core.cluster.fleet_file import load_fleet
from evener.core.run.rundir import RunDir
from evener.core.run.trust import trust_fleet

from ..conftest import TIMEOUT_S, wait_until
from ..integration.pseudo import ESCAPE, in_terminal
from ..tiers import exhaustive
from .test_cli import TINY, Started, evener, long_run


def scalars(run, tag):
    read = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return [(one.step, one.value) for one in read.Scalars(tag)] if tag in read.Tags()["scalars"] else []


@exhaustive
def test_logger_receives_all_steps_across_resume(tmp_path, corpus):
    run = RunDir(tmp_path / "run")
    flags = ("--data", str(corpus), *TINY, "--batch", "4", "--warmup", "0", "--lr", "3e-4", "--min-lr", "3e-4",
             "--ranks", "2", "--shares", "equal", "--eval-every", "3")  # fmt: skip
    first = evener(tmp_path, "train", *flags, "--steps", "6", "--log", "tensorboard", "--out", "run")
    assert first.returncode == 0, first.stderr
    again = evener(tmp_path, "train", "--resume", "run", "--steps", "12")
    assert again.returncode == 0, again.stderr
    told = scalars(run, "train/loss")
    assert [step for step, _ in told] == list(range(1, 13))
    assert all(abs(value - record.loss) < 1e-6 for (_, value), record in zip(told, run.records(0), strict=True))
    assert [step for step, _ in scalars(run, "val/loss")] == [3, 6, 9, 12]


@exhaustive
def test_ctrl_c_ends_run_and_logger_receives_all_steps(tmp_path, corpus):
    started = Started(tmp_path, *long_run(corpus, 2), "--log", "tensorboard")
    try:
        started.wait_for_steps(1, 4)
        folder = started.run.path / "tensorboard"
        wait_until(lambda: folder.exists() and scalars(started.run, "train/loss"), started.told)  # while it goes on
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(TIMEOUT_S) == 130
        started.wait_gone()
    finally:
        started.process.kill()
        for process in started.processes():
            process.kill()
    steps = started.run.manifest().result.steps
    assert [step for step, _ in scalars(started.run, "train/loss")] == list(range(1, steps + 1))


@exhaustive
def test_terminal_shows_progress_bar_and_same_messages_as_pipe(tmp_path, corpus):
    flags = ("--data", corpus, *TINY, "--batch", "4", "--ranks", "2", "--steps", "6", "--eval-every", "3")
    text = ESCAPE.sub("", in_terminal("train", *flags, "--out", "run", cwd=tmp_path, status=0))
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines()]
    assert any(line.startswith(("━", "╸", "╺")) and "step " in line for line in lines)
    assert any(re.match(r"loss \d\.\d{4}  .*tokens/s  communication \d+%$", line) for line in lines)
    piped = evener(tmp_path, "train", *map(str, flags), "--out", "piped").stderr.replace("piped", "run").splitlines()
    sentences = [line for line in piped if not re.search(r"tokens/s|loss|memory", line)]
    assert len(sentences) > 4
    assert set(sentences) <= set(lines)
    assert sum("validation loss" in line for line in lines) == sum("validation loss" in line for line in piped) == 3


@exhaustive
def test_fleet_run_is_logged_by_follower(tmp_path, corpus):
    """Its host has a folder of its own, from which the records come home: at once, and when somebody looks again."""
    fleet = tmp_path / "machines.toml"
    fleet.write_text(f'[hosts.box]\naddress = "local"\nworkdir = "{tmp_path}/box"\n')
    trust_fleet(load_fleet(fleet))
    flags = ("--fleet", str(fleet), "--data", str(corpus), *TINY, "--batch", "4", "--log", "tensorboard")
    done = evener(tmp_path, "train", *flags, "--steps", "6", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in scalars(RunDir(tmp_path / "run"), "train/loss")] == list(range(1, 7))

    left = evener(tmp_path, "train", *flags, "--steps", "9", "--out", "left", "--detach")
    assert left.returncode == 0, left.stderr
    assert "tensorboard: fed while the run is followed, or at its end: " in left.stderr
    run = RunDir(tmp_path / "left")
    assert not (run.path / "tensorboard").exists()
    followed = evener(tmp_path, "logs", "-f", "left")
    assert followed.returncode == 0, followed.stderr
    assert [step for step, _ in scalars(run, "train/loss")] == list(range(1, 10))
    assert "sent 0 steps of left, 9 in all" in evener(tmp_path, "report", "left", "--log", "tensorboard").stderr
