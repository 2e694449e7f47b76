"""What does the live page cost, how soon is it there, and how soon does it show a step?

python bench/watch_overhead.py RUN               whose records are repeated until there are 100,000 steps of 8 ranks
python bench/watch_overhead.py --beside [MODEL]  a run on all cores, whose tab is open in every other piece of its time
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import psutil
from common import ensure_verb_corpus

from evener.core.base.units import percentile
from evener.core.run.rundir import RunDir
from evener.core.run.runwriter import RunWriter
from evener.watch.run_reader import CACHE_FILE

STEPS, RANKS = 100_000, 8
UPDATES = 20
CPU_WINDOW_S = 30.0
STEPS_PER_S = 4.0
PAIRS, INTERVAL_S, SETTLE_S = 40, 5.0, 1.0  # at its beginning a piece is left out


def main() -> None:
    if sys.argv[1] == "--beside":
        measure_training_slowdown(sys.argv[2] if len(sys.argv) > 2 else "tiny")
    else:
        measure_long_run()


def measure_long_run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = extend_run(RunDir(sys.argv[1]), Path(folder))
        files = [run.steps_path(rank) for rank in range(RANKS)]
        print(f"{STEPS:,} steps of {RANKS} ranks, {sum(file.stat().st_size for file in files) / 1e6:.0f} MB")
        for what in ("read for the first time", "begun from its summary"):
            server = WatchProcess(run, Path(folder))
            began, cpu_s = time.perf_counter(), server.cpu_s
            size = len(server.get(server.page))
            told_s = time.perf_counter() - began
            stream = server.stream()
            while '"read": ""' not in next_message(stream):
                pass
            print(f"{what}: page of {size / 1e3:.0f} kB after {told_s:.2f} s, all read after "
                  f"{time.perf_counter() - began:.1f} s and {server.cpu_s - cpu_s:.1f} s of a processor, "
                  f"{server.rss_bytes / 1e6:.0f} MB")  # fmt: skip
            server.stop()
        server = WatchProcess(run, Path(folder))
        server.get(server.page)
        measure_latency(server, run)
        measure_cpu_cost(server, run)
        server.stop()
        assert (run.path / CACHE_FILE).exists()


def extend_run(one: RunDir, folder: Path) -> RunWriter:
    """The run with its records again and again; nobody follows it, for it was not started."""
    run = RunWriter(folder / "long")
    shutil.copytree(
        one.path, run.path, ignore=shutil.ignore_patterns("checkpoints", "steps", "host", "plan.json", CACHE_FILE)
    )
    manifest = one.manifest()
    train = msgspec.structs.replace(manifest.spec.train, steps=2 * STEPS)
    spec = msgspec.structs.replace(manifest.spec, train=train)
    run.write_manifest(msgspec.structs.replace(manifest, spec=spec, verdict="running", ended=None))
    (run.path / "steps").mkdir()
    for rank in range(RANKS):
        records = one.records(rank % manifest.world_size)
        with run.steps_path(rank).open("wb") as file:
            for step in range(STEPS):
                again = msgspec.structs.replace(records[step % len(records)], step=step, members=RANKS)
                file.write(msgspec.json.encode(again) + b"\n")
    return run


class WatchProcess:
    """`evener watch`, and one who asks it."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        env = os.environ | {"XDG_STATE_HOME": str(folder)}
        argv = [sys.executable, "-m", "evener", "watch", str(run.path), "--port", "7449"]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
        assert self.process.stdout is not None
        token = self.process.stdout.readline().strip().partition("token=")[2]
        self._cookie = {"Cookie": f"evener_watch_7449={token}"}
        self.page = f"/runs/{run.path.name}"

    def _request(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", 7449)
        connection.request("GET", path, headers=self._cookie)
        return connection.getresponse()

    def get(self, path: str) -> bytes:
        return self._request(path).read()

    def stream(self) -> http.client.HTTPResponse:
        return self._request(f"/stream?page={self.page}")

    @property
    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def stop(self) -> None:
        self.process.terminate()
        began = time.perf_counter()
        self.process.wait()
        print(f"  ended after {time.perf_counter() - began:.2f} s, with a stream that was open")


def next_message(stream: http.client.HTTPResponse) -> str:
    while not (line := stream.readline().decode()).startswith("data: "):
        assert line, "the server has ended"
    return line


def append_step(run: RunWriter, step: int) -> None:
    for rank in range(RANKS):
        with run.steps_path(rank).open("rb") as file:
            file.seek(-2000, os.SEEK_END)
            last = file.read().splitlines()[-1]
        record = json.loads(last) | {"step": step, "ended": time.time()}
        with run.steps_path(rank).open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")


def measure_latency(server: WatchProcess, run: RunWriter) -> None:
    """From a step's record to the message that tells of it."""
    stream, took_s = server.stream(), []
    next_message(stream)
    for i in range(UPDATES):
        began = time.perf_counter()
        append_step(run, STEPS + i)
        while f"step {STEPS + i + 1:,} of" not in next_message(stream):
            pass
        took_s.append(time.perf_counter() - began)
    print(f"a step is shown after {percentile(took_s, 0.5):.2f} s, at most {max(took_s):.2f} s ({UPDATES} steps)")


def measure_cpu_cost(server: WatchProcess, run: RunWriter) -> None:
    """Processor time while a run takes steps and a tab is open, and while none is."""
    for what in ("a tab open", "no tab"):
        stream = server.stream() if what == "a tab open" else None
        if stream is not None:
            next_message(stream)
        step = RunDir(run.path).records(0)[-1].step
        time.sleep(2.0)
        began, cpu_s = time.perf_counter(), server.cpu_s
        while (spent_s := time.perf_counter() - began) < CPU_WINDOW_S:
            step += 1
            append_step(run, step)
            time.sleep(1 / STEPS_PER_S)
        used, cores = server.cpu_s - cpu_s, psutil.cpu_count() or 1
        print(f"{what}, {STEPS_PER_S:g} steps/s: {used / spent_s:.2%} of a processor, {used / spent_s / cores:.2%} of "
              f"{cores}; {server.rss_bytes / 1e6:.0f} MB")  # fmt: skip
        if stream is not None:
            stream.close()


def measure_training_slowdown(model: str) -> None:
    """The steps of a run while its page is served to a tab, and while the server is stopped, in turn."""
    cores = psutil.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder, "run"))
        argv = [
            *(sys.executable, "-m", "evener", "train", "--data", str(ensure_verb_corpus()), "--model", model, "--out"),
            *(str(run.path), "--steps", "1000000", "--ranks", str(cores), "--threads", "1", "--dropout", "0"),
            *("--shares", "equal", "--eval-every", "0", "--checkpoint-every", "0"),
        ]
        training = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not run.is_run() or len(run.records(0)) < 10:
            time.sleep(0.1)
        server = WatchProcess(run, Path(folder))
        server.get(server.page)
        stream = server.stream()
        threading.Thread(target=lambda: [*iter(stream.readline, b"")], daemon=True).start()
        pieces, cpu_s = [], server.cpu_s
        for i in range(2 * PAIRS):
            server.process.send_signal(signal.SIGCONT if i % 2 else signal.SIGSTOP)
            began = time.time()
            time.sleep(INTERVAL_S)
            pieces.append((began + SETTLE_S, time.time()))
        used = (server.cpu_s - cpu_s) / (PAIRS * INTERVAL_S)
        server.stop()
        training.send_signal(signal.SIGINT)
        training.wait()
        records = run.records(0)
    took_s = [statistics.fmean(record.wall_s for record in records if begins < record.ended < ends)
              for begins, ends in pieces]  # fmt: skip
    ratios = [took_s[i + 1] / took_s[i] for i in range(0, 2 * PAIRS, 2)]
    apart = statistics.stdev(ratios) / PAIRS**0.5
    print(f"{model}, {cores} ranks, {1 / statistics.median(took_s):.1f} steps/s: with a tab its step takes "
          f"{statistics.median(ratios):.4f} of the time without, mean {statistics.fmean(ratios):.4f} ± {apart:.4f}; "
          f"the server {used / cores:.2%} of {cores} processors")  # fmt: skip


if __name__ == "__main__":
    main()
