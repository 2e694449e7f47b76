"""Runs of the real worker, as torchrun starts it, on a small corpus; and a browser."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

from evener.core.run.rundir import Contention, RunDir
from evener.core.run.runwriter import RunWriter

from . import guard, sample_runs, tiers
from .ranks import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
collect_ignore_glob = ["worker/loops/*"]  # programs that tests start
TIMEOUT_S = 300  # of a machine as busy as it likes
GUARD = pytest.StashKey[subprocess.Popen[bytes]]()
guard.use_memory_disk()
# What is trusted is remembered for this test process alone, never in the home folder.
os.environ["XDG_STATE_HOME"] = str(guard.log_dir() / "state")
os.environ["XDG_CONFIG_HOME"] = str(guard.log_dir() / "config")  # fleet files that --on makes
# Tests share the cores: a thread that waits must not keep one busy.
ENV = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1",
                    guard.VARIABLE: guard.MARK}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Other people's programs that are no packages."""
    parser.addoption("--nanogpt", metavar="DIR", help="a checkout of karpathy/nanoGPT, to be launched on two hosts")
    parser.addoption("--record-drills", action="store_true", help="write what doctor sees in each fault drill anew")
    parser.addoption("--exhaustive", action="store_true", help="run every test: the tier of `make test-all`")
    parser.addoption("--times", type=int, default=1, metavar="N", help="N times as many seeds and random examples")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tier, and take back SIGINT and SIGHUP, which a shell has a background job (or nohup) ignore."""
    tiers.RUNS_EXHAUSTIVE, tiers.TIMES = config.getoption("exhaustive"), config.getoption("times")
    # The fast tiers try the same examples every time; new ones are looked for by `make test-all`.
    hypothesis.settings.register_profile("tier", derandomize=not tiers.RUNS_EXHAUSTIVE)
    hypothesis.settings.load_profile("tier")
    config.stash[GUARD] = guard.start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Return when what this test process left behind has been ended and removed."""
    config.stash[GUARD].communicate()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave exhaustive tests to `make test-all`."""
    if not tiers.RUNS_EXHAUSTIVE:
        left = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def slowdown() -> float:
    """How many times as long as alone a program takes now, for others use the cores: at least 1.

    Seconds are promised of a machine that has nothing else to do; this is what they are multiplied with elsewhere.
    """
    began, used = time.perf_counter(), time.process_time()
    while (cpu_s := time.process_time() - used) < 0.1:
        pass
    return max(1.0, (time.perf_counter() - began) / cpu_s)


class SlowedDown:
    """The same of all the time of a block: `with SlowedDown() as other: ...`, then `other.factor`.

    A process of its own asks for a tenth of a core meanwhile and sees how long it has to wait for it.
    """

    ASKS = """
import select, sys, time
wall = cpu = 0.0
is_over = False
while not is_over:
    began, used = time.perf_counter(), time.process_time()
    while time.process_time() - used < 0.05:
        pass
    wall, cpu = wall + time.perf_counter() - began, cpu + time.process_time() - used
    is_over = select.select([sys.stdin], [], [], 0.45)[0]
print(max(1, wall / cpu))
"""

    factor = 1.0

    def __enter__(self) -> SlowedDown:
        self._asks = subprocess.Popen([sys.executable, "-c", self.ASKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *_: object) -> None:
        self.factor = float(self._asks.communicate(b"end", timeout=TIMEOUT_S)[0])


def module_argv(num_ranks: int, module: str, args: list[str]) -> list[str]:
    """The module as a person starts it: itself for one process, under torchrun for more."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={num_ranks}", "--rdzv-backend=c10d",
                "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--monitor-interval=0.1",
                "--shutdown-timeout=3600", f"--log-dir={guard.log_dir()}"]  # fmt: skip
    return [sys.executable, *(torchrun if num_ranks > 1 else []), "-m", module, *args]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2000 sentences about verbs, in bytes."""
    from evener.corpus.prepare_corpus import prepare
    from evener.corpus.verbs import make_verb_corpus

    out = tmp_path_factory.mktemp("data") / "verbs"
    splits, files = make_verb_corpus(0, 2000, 0.1)
    prepare(out, splits, tokenizer="byte", extra=files)
    return out


class Started:
    """A run that may still be going on."""

    def __init__(self, out: Path, ranks: int, args: list[str], module: str = "evener.worker") -> None:
        self.dir = RunDir(out)
        self.log = out.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                module_argv(ranks, module, args),
                env=ENV,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> int:
        """Its exit status."""
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"still running after {TIMEOUT_S} s:\n{self.text()}") from None

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text()

    def wait_for_step(self, step: int) -> None:
        """Return when rank 0 has recorded a step."""
        wait_until(lambda: self.dir.steps_path(0).exists() and len(self.dir.records(0)) > step, self.text)


def wait_until(condition: Callable[[], bool], explain: Callable[[], str] = lambda: "") -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)


@pytest.fixture
def write_run() -> Callable[..., RunWriter]:
    """Write a run directory without a run."""
    return sample_runs.write_run


@pytest.fixture
def contention() -> Callable[..., Contention]:
    """Return a measurement of how ranks disturb each other."""
    return sample_runs.contention


@pytest.fixture
def start(corpus: Path) -> Callable[..., Started]:
    """Start `evener.worker` with these flags; `out` is its run directory."""

    def start(out: Path, *args: str, ranks: int = 1) -> Started:
        return Started(out, ranks, [*flags_of(corpus, out), *args])

    return start


def flags_of(corpus: Path, out: Path) -> list[str]:
    """Of a small run."""
    flags = ["--data", str(corpus), "--model", "tiny", "--eval-tokens", "2048", "--out", str(out)]
    # Shares that follow speed add up in another order: not to the same bits.
    return [*flags, "--threads", "1", "--dtype", "fp32", "--shares", "equal"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium, Debian's. While it is there its event loop runs in this thread, so that no other one can."""
    if CHROMIUM is None and "CI" in os.environ:
        pytest.fail("there is no chromium: apt install chromium")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts ranks that run to their end."""
    one = Server(ENV)
    yield one
    one.close()


@pytest.fixture
def train(corpus: Path, server: Server, tmp_path: Path) -> Callable[..., RunDir]:
    """Run the worker with these flags to the end, successfully."""

    def train(out: Path, *args: str, ranks: int = 1) -> RunDir:
        folder = tmp_path / f"said-{uuid.uuid4().hex}"
        ended = server.run(folder, [*flags_of(corpus, out), *args], ranks, module="evener.worker")
        assert not any(ended.statuses), f"{ended.statuses}\n{ended.said('out')}{ended.said('err')}"
        return RunDir(out)

    return train


@pytest.fixture
def shared_train(
    corpus: Path, server: Server, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RunDir]:
    """Return the run of these flags, made by whichever test of all workers asks for it first. It is only read."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-runs"
    folder.mkdir(exist_ok=True)

    def train(*args: str, ranks: int = 1) -> RunDir:
        out = folder / hashlib.sha256(repr((args, ranks)).encode()).hexdigest()[:16]
        with out.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                made = tmp_path / "run-to-share"
                ended = server.run(
                    tmp_path / "printed", [*flags_of(corpus, made), *args], ranks, module="evener.worker"
                )
                assert not any(ended.statuses), f"{ended.statuses}\n{ended.said('out')}{ended.said('err')}"
                made.rename(out)
        return RunDir(out)

    return train


@pytest.fixture
def quiet_machine() -> None:
    """Skip a test that measures the machine itself where other programs use it for half a minute."""
    for _ in range(30):  # the tests' own server may still import torch
        used = psutil.cpu_percent(interval=1.0) / 100 * (os.cpu_count() or 1)
        if used <= 0.25:
            return
    pytest.skip(f"not judged: other programs use {used:.1f} of the machine's cores")


@pytest.fixture
def run_script(server: Server, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A program of the user's own on several ranks; it failed where one of them did."""

    def run_script(source: str, *args: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        script, folder = tmp_path / "script.py", tmp_path / f"said-{uuid.uuid4().hex}"
        script.write_text(source)
        ended = server.run(folder, [*args], ranks, program=str(script))
        status = ended.statuses[0] if ranks == 1 else int(any(ended.statuses))
        return subprocess.CompletedProcess([str(script), *args], status, ended.said("out"), ended.said("err"))

    return run_script


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The same, started as a person would: where what torch sees when it is imported counts, or its own store."""

    def torchrun(source: str, *args: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(source)
        argv = [*module_argv(ranks, "", [])[:-2], str(script), *args]
        return subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    return torchrun
