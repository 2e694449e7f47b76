"""Collectives of real ranks give correct results, and wrong results are counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest

from evener.core.base.errors import UsageError
from evener.core.cluster.collective_results import (
    COLLECTIVES,
    CollectiveBenchGroup,
    CollectiveBenchMessage,
    CollectiveBenchSpec,
    CollectiveResult,
    SkippedSizes,
)
from evener.launch.distributed_program import PROGRAM_RUN, fleet_program_lines
from evener.launch.prepare_hosts import connect_hosts, prepare_hosts
from evener.plan.cost.collective_cost import bus_factor

from ..conftest import TIMEOUT_S, wait_until
from ..in_process import run_verb
from ..integration.pseudo import ESCAPE, in_terminal
from ..tiers import exhaustive, exhaustively

SIZES = (1000, 65536, 1 << 20)  # the first is no multiple of anything


def measure(ranks: int, **fields: object) -> tuple[CollectiveBenchGroup, list[CollectiveResult], list[SkippedSizes]]:
    """Measure with `ranks` processes on this machine. Return their group, the results and what was skipped."""
    spec = CollectiveBenchSpec(**({"sizes": SIZES, "seconds": 10.0} | fields))  # type: ignore[arg-type]
    arg = msgspec.json.encode(spec).decode()
    with connect_hosts(None) as hosts:
        prepared = prepare_hosts(hosts.with_ranks(ranks, threads=1), PROGRAM_RUN)
        args = {place.name: arg for place in prepared.hosts}
        module = "evener.worker.probe.collective_bench"
        told = [
            msgspec.json.decode(line, type=CollectiveBenchMessage)
            for _, line in fleet_program_lines(prepared, hosts.sessions, module, args)
        ]
    assert isinstance(told[0], CollectiveBenchGroup)
    return (
        told[0],
        [one for one in told if isinstance(one, CollectiveResult)],
        [one for one in told if isinstance(one, SkippedSizes)],
    )


@exhaustive
@pytest.mark.parametrize(("ranks", "dtype", "in_place"), [(2, "fp32", False), *exhaustively((3, "bf16", True))])
def test_every_collective_is_correct_at_every_size(ranks, dtype, in_place):
    world, rows, stopped = measure(ranks, dtype=dtype, in_place=in_place, seconds=600.0)  # on a machine however busy
    assert (world.ranks, world.backend, stopped) == (ranks, "gloo", [])
    assert world.sum_Bps > 1e8
    assert [(row.collective, row.num_wrong) for row in rows] == [(name, 0) for name in COLLECTIVES for _ in SIZES]
    item = 4 if dtype == "fp32" else 2
    for row in rows:
        parts = 1 if row.collective in ("all_reduce", "broadcast") else ranks
        assert row.size_bytes == row.count * parts * item
        assert row.algbw_Bps == pytest.approx(row.size_bytes / row.time_s)
        assert row.busbw_Bps == pytest.approx(bus_factor(row.collective, ranks) * row.algbw_Bps)
        assert row.redop == ("sum" if "reduce" in row.collective else "none")
        assert row.root == (0 if row.collective == "broadcast" else -1)
        assert row.time_p95_s >= row.time_s > 0
        assert row.iterations >= 3
        assert row.sent_bytes is None  # the ranks share one interface
    assert [row.in_place for row in rows if row.collective == "all_gather"] == [in_place] * len(SIZES)


@exhaustive
def test_wrong_collective_results_are_counted():
    _, rows, _ = measure(2, sizes=(65536,), corrupt_results=7)
    assert [row.num_wrong for row in rows] == [7] * len(COLLECTIVES)


@exhaustive
def test_sizes_beyond_time_limit_are_skipped_and_reported():
    _, rows, stopped = measure(2, collectives=("all_reduce",), sizes=(1024, 65536, 1 << 20, 1 << 40), seconds=4.0)
    assert [row.size_bytes for row in rows] == [1024, 65536, 1 << 20]
    assert [one.size_bytes for one in stopped] == [1 << 40]
    assert stopped[0].needs_s > stopped[0].left_s


def test_single_rank_is_refused():
    with pytest.raises(UsageError, match="two ranks"):
        measure(1)


def evener(*args: str) -> subprocess.CompletedProcess[str]:
    code = "from evener.cli.main import main; main()"
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # pytest's own, in a pipe
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=180, check=False,
                          env=env)  # fmt: skip


@exhaustive
def test_probe_collectives_prints_one_json_object(tmp_path):
    done = evener("probe", "collectives", "--fleet", "local", "--op", "all-reduce", "--op", "all_gather",
                  "--max-size", "64KiB", "--seconds", "10", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["rows"]) == 8
    assert found["wire_Bps"] > 1e8
    for row in found["rows"]:
        assert sum(row["split"].values()) == pytest.approx(row["time_s"])
    assert found["findings"] == []
    assert "reaches" in found["explanation"][0]


@exhaustive
def test_probe_collectives_prints_nccl_tests_table():
    done = evener(
        "probe", "collectives", "--fleet", "local", "--op", "broadcast", "--max-size", "4KiB", "--seconds", "5"
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows[:2]] == ["1024", "4096"]
    assert rows[0][2:5] == ["float", "none", "0"]
    assert "# Out of bounds values : 0 OK" in done.stdout


@exhaustive
def test_the_table_fits_a_narrow_terminal():
    told = in_terminal("probe", "collectives", "--fleet", "local", "--op", "broadcast", "--max-size", "4KiB",
                       "--seconds", "5", columns=60)  # fmt: skip
    lines = ESCAPE.sub("", told).splitlines()
    assert max(map(len, lines)) <= 60
    assert [line.split()[0] for line in lines if line.startswith(" ")][:2] == ["1024", "4096"]
    assert any(line.startswith("not shown in 60 columns: count, root") for line in lines)


@exhaustive
def test_probe_host_measures_and_identifies_device(tmp_path):
    done = evener("probe", "host", "--fleet", "local", "--model", "tiny", "--seconds", "1", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    (device,) = json.loads(done.stdout)["devices"]
    rates = device["rates"]
    assert device["device"] == "cpu"
    assert {"fp32", "bf16"} <= rates["matmul_flops"].keys()
    assert min(rates["matmul_flops"].values()) > 1e6  # however busy the machine is
    assert rates["copy_Bps"] > 1e8
    assert rates["triad_Bps"] > 1e8
    assert rates["memory_bytes"] > 1e8
    assert rates["loopback_Bps"] > 1e7
    assert rates["sync_Bps"] > 1e7
    tiny, sustained = rates["models"]["tiny"], device["sustained"]
    assert tiny["tokens_per_s"] > 1  # however busy the machine is
    assert tiny["dtype"] == sustained["dtype"]
    assert sustained["large"]["passes"] >= 3
    assert device["bound_by"] in ("arithmetic", "memory", "overhead")


@exhaustive
def test_ctrl_c_leaves_no_process():
    code = "from evener.cli.main import main; main()"
    args = ["probe", "collectives", "--fleet", "local", "--op", "all_reduce", "--seconds", "60"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.readline()  # the ranks are at work
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 3  # torchrun and two of its own
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130
    wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
    process.stdout.close()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["collectives", "--op", "all_reduse"], 'did you mean "all_reduce"'),
        (["collectives", "--max-size", "lots"], "--max-size lots"),
        (["collectives", "--dtype", "fp8"], "--dtype 'fp8': expected fp32, bf16 or fp16"),
        (["collectives", "--ranks", "1"], "--ranks 1"),
        (["host", "--model", "chr"], 'did you mean "char"'),
        (["host", "--device", "tpu"], "--device 'tpu'"),
        (["wire"], "two machines"),
        (["wire", "--fleet", "absent.toml"], "absent.toml: no such file"),
    ],
)
def test_invalid_arguments_are_one_line_errors(args, word, tmp_path, monkeypatch):
    if "--fleet" not in args:
        args = [*args, "--fleet", "local"]
    done = run_verb("probe", *args)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert word in done.stderr
