"""Step parts sum to the step time, bytes match the kernel's counters, and waiting is recorded by who waits."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.core.run.rundir import RunDir
from evener.core.run.step_cost import PHASES
from evener.report.read.run_summary import summarize_run

from ..conftest import ENV, wait_until
from ..ranks import Server
from ..tiers import exhaustively


def test_parts_sum_to_the_step(tmp_path, train):
    run = train(tmp_path / "run", "--steps", "12", "--micro-batch", "2", "--width", "256", ranks=2)
    for rank in range(2):
        records = run.records(rank)
        assert [record.cost.total_s for record in records] == pytest.approx([record.wall_s for record in records])
        # Another clock, read after each step: there were at least the steps between two readings.
        assert sum(record.wall_s for record in records[1:]) < 1.001 * (records[-1].ended - records[0].ended)
        for record in records:
            assert all(getattr(record.cost, part) is not None for part in PHASES)
            assert record.sync_s > 0
            assert record.epoch == 0


def test_transfer_is_the_same_on_all_ranks_and_never_negative(tmp_path, train):
    run = train(tmp_path / "run", "--steps", "20", ranks=2)
    for ours, theirs in zip(run.records(0), run.records(1), strict=True):
        assert ours.cost.exposed_sync_s == theirs.cost.exposed_sync_s >= 0
        assert ours.loss == theirs.loss


SLOW_RANK = """
import sys, time, torch, evener
from torch import nn
from evener.core.run.run_spec import parse_args

class Numbers:
    def global_batch(self, seed, step, num): import numpy; return numpy.arange(num) + step
    def num_tokens(self, samples): return len(samples)
    def load(self, samples, device): return torch.from_numpy(samples).float()[:, None]

with evener.join(parse_args(["--out", sys.argv[1], "--steps", "9", "--batch", "4", "--threads", "1"])) as run:
    model = run.model(nn.Linear(1, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.0))
    for step in run.steps(Numbers()):
        for batch in step.micro_batches():
            if run.rank == 1:
                time.sleep(0.5)  # its forward is slow
            step.backward(model(batch).sum())
        step.update(optimizer)
"""


def test_waiting_is_charged_to_the_rank_that_waits(tmp_path, run_script):
    done = run_script(SLOW_RANK, str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "run")
    middle = {
        (rank, part): statistics.median(getattr(record.cost, part) for record in run.records(rank))
        for rank in range(2)
        for part in PHASES
    }
    late_s = middle[1, "compute_s"] - middle[0, "compute_s"]
    assert middle[1, "compute_s"] >= 0.5
    assert middle[0, "wait_s"] == pytest.approx(late_s, rel=0.2)
    assert middle[1, "wait_s"] < 0.1 * late_s
    assert middle[0, "exposed_sync_s"] < 0.1 * late_s


LARGEST_SEGMENT = 1 << 16  # bytes, on a loopback
WIDE = "--model tiny --width 256 --block-size 16 --batch 6"  # few tokens: what is exchanged does not depend on them
TABLES = "--model d4 --width 256 --num-heads 4 --num-layers 2 --block-size 64"  # a head of its own, value embeddings


@pytest.fixture(scope="module")
def alone() -> Iterator[Server]:
    """Ranks that have a loopback which nobody else uses."""
    own = ("unshare", "--map-root-user", "--net")
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux)")
    tried = subprocess.run([*own, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no network namespace of one's own here: {tried.stderr.strip()}")
    server = Server(ENV, (*own, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"))
    wait_until(lambda: network_of(server.pid) not in ("", network_of("self")))
    yield server
    server.close()


def network_of(pid: int | str) -> str:
    """Which it is in; "" where nobody may know, as while a program is about to become another."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def sent(server: Server) -> tuple[int, int]:
    """Bytes out of the server's loopback so far, and segments that were sent again."""
    [loopback] = [line for line in Path(f"/proc/{server.pid}/net/dev").read_text().splitlines() if "lo:" in line]
    [_, tcp] = [line for line in Path(f"/proc/{server.pid}/net/snmp").read_text().splitlines() if "Tcp:" in line]
    return int(loopback.split()[9]), int(tcp.split()[12])


@pytest.mark.parametrize(
    ("sync", "ranks", "flags"),
    [
        ("int8", 3, WIDE),
        *exhaustively(
            ("diloco:10:streamed", 2, WIDE),
            ("ddp", 3, WIDE),
            ("packed", 2, f"{WIDE} --dtype bf16"),
            ("packed", 3, f"{WIDE} --dtype bf16"),
            ("int4", 2, WIDE),
            ("powersgd:4", 3, WIDE),
            ("bf16+sparse", 2, TABLES),
            ("diloco:5:int8", 3, WIDE),
            ("fsdp", 2, WIDE),
            ("fsdp", 3, f"{WIDE} --dtype bf16"),
            ("zero1", 3, WIDE),
        ),
    ],
)
def test_sent_bytes_match_kernel_counters(tmp_path, corpus, alone, sync, ranks, flags):
    """What the strategy states for every rank and step, against the counter of a loopback that nobody else uses.

    Where a receiver has to wait for its processor its queue overflows, and TCP sends again what it lost.
    """
    flags = f"--data {corpus} {flags} --sync {sync} --shares equal --eval-tokens 64 --threads 1"
    env = {"GLOO_SOCKET_IFNAME": "docker0"}  # a run on one machine takes the loopback whatever is set or resolved
    seen = [sent(alone)]
    for name, steps in (("short", 5), ("long", 35)):
        argv = [*flags.split(), "--out", str(tmp_path / name), "--steps", str(steps)]
        ended = alone.run(tmp_path / f"said-{name}", argv, ranks, env, module="evener.worker")
        assert not any(ended.statuses), ended.said("err")
        seen.append(sent(alone))
    (a, _), (b, at_first), (c, at_last) = seen
    counted = (c - b) - (b - a)  # of 30 steps; what starting and ending costs is in both
    long_bytes, short_bytes = (
        sum(record.bytes for rank in range(ranks) for record in RunDir(tmp_path / name).records(rank))
        for name in ("long", "short")
    )
    stated = long_bytes - short_bytes
    assert 0.97 * stated < counted < 1.03 * stated + (at_last - at_first) * LARGEST_SEGMENT


def test_summary_matches_records(tmp_path, train):
    run = train(tmp_path / "run", "--steps", "20", "--contention", ranks=2)
    summary = summarize_run(run)
    assert summary.num_steps == 20
    assert summary.tokens_per_step == 16 * 64
    assert summary.tokens_per_s == pytest.approx(summary.tokens_per_step / summary.step_p50_s)
    contention = summary.manifest.contention
    assert len(contention.alone_s) == len(contention.together_s) == 2
    assert all(rate > 1e8 for rate in contention.copy_alone_Bps)
    assert all(peak > 1e8 for peak in summary.manifest.result.peak_memory_bytes)
