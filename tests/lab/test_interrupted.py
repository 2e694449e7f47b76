"""A test run that is interrupted leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evener.lab import state
from tests import guard
from tests.lab.conftest import TIMEOUT_S, MakeLab, wait_until

ROOT = Path(__file__).parents[2]
BUSY = """
import subprocess, time
from evener.lab.lab_spec import HostSpec
from tests import guard

def test_busy(make_lab):
    guard.log_dir().mkdir(exist_ok=True)
    lab = make_lab(a=HostSpec())
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open({up!r}, "w").close()
    time.sleep(1000)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_test_run_leaves_nothing_behind(make_lab: MakeLab, tmp_path: Path, signum: int) -> None:
    up, test = tmp_path / "up", ROOT / "tests" / "lab" / f"test_busy_{tmp_path.parent.name}_{signum}.py"
    test.write_text(BUSY.format(up=str(up)))
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/base", str(test)]
    try:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        mark = f"test-{process.pid}"
        wait_until(lambda: up.exists() or process.poll() is not None, "no lab was made")
        assert any(name.startswith(f"{mark}-") for name in state.lab_names())
        assert guard.marked(mark)
        process.send_signal(signum)
        process.communicate(timeout=TIMEOUT_S)
        wait_until(lambda: not [name for name in state.lab_names() if name.startswith(f"{mark}-")], "a lab is left")
        wait_until(lambda: not guard.marked(mark), lambda: f"left: {guard.marked(mark)}")
        wait_until(lambda: not guard.log_dir(mark).exists(), "a folder is left")
    finally:
        test.unlink()
