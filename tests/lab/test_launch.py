"""Launch runs over real ssh: exact results, complete logs, the first failure named, and no process left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evener.core.cluster.fleet_file import HostLink, load_fleet
from evener.core.cluster.fleet_update import update_fleet_file
from evener.core.run.run_plan import read_plan
from evener.core.run.rundir import RunDir
from evener.core.run.trust import trust_fleet
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.lab_spec import HostSpec
from evener.node.agent.store_tunnel import LOOPBACK
from evener.node.remote import bundle
from evener.ssh.session import open_session
from tests.lab.conftest import MakeLab, wait_until
from tests.tiers import exhaustive, num_examples

TIMEOUT_S = 300  # of a machine as busy as it likes
ENV = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "120"}

SCRIPT = """
import os, sys, time, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.tensor([float(rank)]); dist.all_reduce(total)
print("sum", int(total), "of", world, "host", os.uname().nodename, flush=True)
print(f"rank {rank} to stderr", file=sys.stderr, flush=True)
what = sys.argv[1] if len(sys.argv) > 1 else ""
if what == "die" and rank == 1:
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if what == "raise" and rank == 1:
    raise ValueError("no such thing")
if what in ("die", "raise"):
    dist.barrier()
if what == "count":  # until this file is in the home
    i = 0
    while not os.path.exists(os.path.expanduser("~/" + sys.argv[2])):
        print("line", i, flush=True)
        i += 1
        time.sleep(0.05)
    print("last", flush=True)
dist.destroy_process_group()
os._exit(0)  # Gloo's threads may still let go of a tensor
"""

DDP = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(100, 100, bias=False))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(30):
    model(torch.randn(8, 100)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


class Command:
    """One that goes on while a test does something."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self._told = folder / f"told-{uuid.uuid4().hex}"
        with self._told.open("wb") as told:
            self._process = subprocess.Popen(
                argv, cwd=folder, env=ENV, stdout=told, stderr=told, start_new_session=True
            )
        self.pid = self._process.pid

    def told(self) -> str:
        """What it has printed."""
        return self._told.read_text()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self, signum: signal.Signals) -> None:
        os.killpg(self.pid, signum)

    def wait(self) -> int:
        """Its exit status."""
        return self._process.wait(TIMEOUT_S)


class Fleet:
    """A lab's hosts, and a folder to give commands in."""

    def __init__(self, lab: EmulatedLab, fleet: Path, folder: Path) -> None:
        self.lab, self.fleet, self.folder = lab, fleet, folder
        self.gate = f"finish-{uuid.uuid4().hex}"
        (folder / "hello.py").write_text(SCRIPT)

    def finish(self) -> None:
        """Tell the scripts that count that it is enough."""
        for host in self.lab.hosts:
            (host.home / self.gate).touch()

    def argv(self, verb: str, *args: str) -> list[str]:
        takes_fleet = verb in ("train", "launch", "doctor")
        return [
            str(Path(sys.executable).with_name("evener")),
            verb,
            *(["--fleet", str(self.fleet)] if takes_fleet else []),
            *args,
        ]

    def run(self, verb: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(verb, *args), cwd=self.folder, env=ENV, capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False)  # fmt: skip

    def ok(self, verb: str, *args: str) -> subprocess.CompletedProcess[str]:
        done = self.run(verb, *args)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, verb: str, *args: str) -> Command:
        return Command(self.argv(verb, *args), self.folder)

    def there(self, name: str, host: str) -> Path:
        """The run's folder on a host."""
        return Path(next(one.run for one in read_plan(self.rundir(name)).hosts if one.name == host))

    def rundir(self, name: str) -> RunDir:
        return RunDir(self.folder / name)

    def processes(self, name: str) -> dict[str, list[str]]:
        """Per host, the commands of processes that belong to a run."""
        mark = f"EVENER_RUN={read_plan(self.rundir(name)).id}".encode()
        found: dict[str, list[str]] = {}
        for host in self.lab.hosts:
            for pid in host.pids():
                try:
                    if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        found.setdefault(host.name, []).append(Path(f"/proc/{pid}/cmdline").read_text())
                except OSError:
                    continue
        return found

    def printed(self, name: str, host: str, rank: int | None = None) -> str:
        """What a rank wrote to stdout."""
        stem = host if rank is None else f"{host}.{rank}"
        path = self.folder / name / "logs" / f"{stem}.log"
        lines = path.read_bytes().decode().split("\n")[:-1] if path.exists() else []  # a progress bar has its own
        return "\n".join(line.split(" ", 2)[2] for line in lines if line.split(" ", 2)[1] == "O")


@pytest.fixture
def fleet(pair: EmulatedLab, tmp_path: Path) -> Fleet:
    return Fleet(pair, Path(pair.state.fleet_file or ""), tmp_path)


def test_a_script_runs_on_every_host(fleet: Fleet) -> None:
    done = fleet.ok("launch", "--out", "runs/one", "--json", "--", "hello.py")
    assert json.loads(done.stdout)["stopped"] is False
    for rank, host in enumerate("ab"):
        assert fleet.printed("runs/one", host, rank) == f"sum 1 of 2 host {host}"
        assert f"E rank {rank} to stderr" in (fleet.folder / f"runs/one/logs/{host}.{rank}.log").read_text()
    assert fleet.processes("runs/one") == {}


@exhaustive
def test_arguments_cross_ssh_unchanged(fleet: Fleet) -> None:
    """Spaces, quotes, $, newlines, non-ASCII, a leading dash, an empty one; and a project folder full of them."""
    folder = fleet.folder / 'it\'s a "$HOME" ü'
    folder.mkdir()
    (folder / "sub folder").mkdir()
    (folder / "sub folder" / "print'em.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    arguments = [
        "a b",
        "'",
        '"',
        "$HOME",
        "`id`",
        "new\nline",
        "ü€🐎",
        "--lr",
        "-x",
        "",
        "\\",
        "*",
        "~",
        "; true",
        "\t",
    ]
    odd = Fleet(fleet.lab, fleet.fleet, folder)
    odd.ok("launch", "--out", "runs/a b", "--json", "--", "sub folder/print'em.py", *arguments)
    for rank, host in enumerate("ab"):
        assert json.loads(odd.printed("runs/a b", host, rank)) == arguments


@settings(max_examples=num_examples(4, 15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arguments=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4),
    folder=st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=20),
)
def test_any_text_crosses_ssh_unchanged(pair: EmulatedLab, arguments: list[str], folder: str) -> None:
    """Arguments, environment and paths, through real ssh to a host."""
    host = load_fleet(pair.state.fleet_file or "").hosts["b"]
    run = f"{pair.host('b').home}/{uuid.uuid4().hex} {folder}"
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['GIVEN'], os.getcwd()]))"
    argv = ["/usr/bin/env", "python3", "-c", code, *arguments]
    spec = {"id": uuid.uuid4().hex, "host": "b", "first_rank": 0, "argv": argv, "cwd": run,
            "env": {"GIVEN": "".join(arguments)}, "grace_s": 0}  # fmt: skip
    with contextlib.closing(open_session("b", host)) as session:
        session.call("run_control", "start", run=run, spec=spec, supervisor=bundle("supervisor"))
        wait_until(lambda: session.call("run_control", "status", run=run)["state"] == "ended", "it ends")
    log = Path(run, "logs", "b.log").read_text()
    assert json.loads(log.split(" O ", 1)[1]) == [arguments, "".join(arguments), run]


@exhaustive
def test_exit_status_255_of_program_is_not_ssh_failure(fleet: Fleet) -> None:
    """ssh's own exit status for a lost connection, here from a rank."""
    (fleet.folder / "odd.py").write_text("import os; os._exit(255 if os.environ['RANK'] == '1' else 0)")
    done = fleet.run("launch", "--out", "runs/odd", "--", "odd.py")
    assert done.returncode == 1
    assert "error: rank 1 on b exited with status 255" in done.stderr
    fleet.lab.host("b").set_link_up(False)
    try:
        away = fleet.run("launch", "--out", "runs/away", "--", "odd.py")
    finally:
        fleet.lab.host("b").set_link_up(True)
    assert away.returncode == 1
    assert "ssh.unreachable  b" in away.stderr
    assert not (fleet.folder / "runs/away").exists()


@exhaustive
def test_local_machine_can_take_part(fleet: Fleet) -> None:
    """The controller is a host itself: one host is "local", the other behind ssh."""
    home = fleet.lab.host("a").home
    (home / "hello.py").write_text(SCRIPT)
    b = msgspec.to_builtins(load_fleet(fleet.fleet).hosts["b"])
    b["ssh_options"] = [one for one in b["ssh_options"] if not one.startswith("Proxy")]
    hosts = {"here": {"address": "local", "workdir": str(home / ".evener")}, "b": b}
    (home / "fleet.toml").write_text(tomlkit.dumps({"hosts": hosts}))
    argv = fleet.argv("launch", "--out", "runs/mixed", "--trust", "--", "hello.py")
    argv[argv.index("--fleet") : argv.index("--fleet") + 2] = []
    quoted = shlex.join(argv)
    fleet.lab.host("a").exec(["sh", "-c", f"cd {shlex.quote(str(home))} && {quoted}"], timeout_s=TIMEOUT_S)
    for rank, name in enumerate(("here", "b")):
        assert (
            f"O sum 1 of 2 host {'a' if name == 'here' else name}"
            in (home / f"runs/mixed/logs/{name}.{rank}.log").read_text()
        )


def test_first_failure_is_reported_first(fleet: Fleet) -> None:
    """Rank 1 dies by a signal; rank 0, the loud one, fails because of it."""
    done = fleet.run("launch", "--out", "runs/die", "--", "hello.py", "die")
    assert done.returncode == 1
    assert "error: rank 1 on b was killed by SIGKILL" in done.stderr
    assert "  | about to die" in done.stderr
    (event,) = [event for event in fleet.rundir("runs/die").events() if event["event"] == "failure"]
    assert (event["host"], event["rank"], event["error"]) == ("b", 1, "rank 1 on b was killed by SIGKILL")
    assert fleet.processes("runs/die") == {}


@exhaustive
def test_exception_is_shown_with_its_traceback(fleet: Fleet) -> None:
    done = fleet.run("launch", "--out", "runs/raise", "--", "hello.py", "raise")
    assert done.returncode == 1
    # One of Gloo's threads may ask an interpreter that is ending for its lock, and abort it: see docs/log/2026-11.md.
    assert re.search(r"error: rank 1 on b (exited with status 1|was killed by SIGABRT)", done.stderr), done.stderr
    assert "ValueError: no such thing" in done.stderr
    assert fleet.processes("runs/raise") == {}


@pytest.fixture
def counting(fleet: Fleet) -> Iterator[Fleet]:
    """A run that prints a line every 50 ms on both hosts until it is told to finish, and is not being watched."""
    fleet.ok("launch", "--out", "runs/count", "--detach", "--", "hello.py", "count", fleet.gate)
    yield fleet
    fleet.run("stop", "--now", "runs/count")
    assert fleet.processes("runs/count") == {}


def counted(fleet: Fleet, host: str, rank: int) -> list[str]:
    """The lines that have come home."""
    return fleet.printed("runs/count", host, rank).splitlines()[1:]  # without the sum


def is_complete(fleet: Fleet) -> bool:
    """Every line, once, and the last."""
    told = [counted(fleet, host, rank) for rank, host in enumerate("ab")]
    return all(lines == [*(f"line {i}" for i in range(len(lines) - 1)), "last"] for lines in told)


def test_stop_leaves_no_process(counting: Fleet) -> None:
    wait_until(lambda: len(counting.processes("runs/count")) == 2, "the run began")
    done = counting.ok("stop", "runs/count", "--json")
    states = json.loads(done.stdout)["hosts"]
    assert all(state["state"] == "ended" and state["stopped"] for state in states.values())
    assert counting.processes("runs/count") == {}
    listed = json.loads(counting.ok("runs", "--json").stdout)["runs"]
    assert [(run["run"], run["state"]) for run in listed] == [("runs/count", "stopped")]


def test_killed_supervisor_leaves_no_process(counting: Fleet) -> None:
    wait_until(lambda: len(counting.processes("runs/count")) == 2, "the run began")
    state = json.loads((counting.there("runs/count", "b") / "host/state.json").read_text())
    counting.lab.host("b").exec(["kill", "-9", str(state["supervisor"])])
    wait_until(lambda: "b" not in counting.processes("runs/count"), "b's processes are gone")


@exhaustive
def test_run_continues_and_logs_are_complete_after_watcher_ends(counting: Fleet) -> None:
    """Ctrl-C, then kill -9 of another watcher, then the link away for a moment: the logs are complete."""
    watcher = counting.start("logs", "-f", "runs/count")
    wait_until(lambda: len(counted(counting, "a", 0)) > 5, "lines come home")
    watcher.kill(signal.SIGINT)
    assert watcher.wait() == 130
    assert "the run goes on without this terminal" in watcher.told()
    had = len(counted(counting, "a", 0))
    second = counting.start("logs", "-f", "runs/count")
    wait_until(lambda: len(counted(counting, "a", 0)) > had, "lines come home again")
    second.kill(signal.SIGKILL)
    second.wait()
    had = len(counted(counting, "b", 1))
    last = counting.start("logs", "-f", "runs/count")
    wait_until(lambda: len(counted(counting, "b", 1)) > had, "and again")
    counting.lab.host("b").set_link_up(False)
    time.sleep(1.0)  # a moment, which ssh sits out
    counting.lab.host("b").set_link_up(True)
    counting.finish()
    assert last.wait() == 0, last.told()
    assert is_complete(counting)
    for rank, host in enumerate("ab"):
        log = f"logs/{host}.{rank}.log"
        assert (counting.there("runs/count", host) / log).read_bytes() == (
            counting.folder / "runs/count" / log
        ).read_bytes()


@exhaustive
def test_watcher_reconnects_after_link_outage_without_losing_lines(counting: Fleet) -> None:
    """The watcher says so within seconds and connects again, and no line is missing or there twice."""
    watcher = counting.start("logs", "-f", "runs/count")
    wait_until(lambda: len(counted(counting, "b", 1)) > 5, "lines come home")
    counting.lab.host("b").set_link_up(False)
    wait_until(lambda: "retrying, the run goes on without the connection" in watcher.told(), "a word of it")
    counting.lab.host("b").set_link_up(True)
    wait_until(lambda: "b: connected again; no records were lost" in watcher.told(), "it is seen again")
    counting.finish()
    assert watcher.wait() == 0, watcher.told()
    assert is_complete(counting)


@exhaustive
def test_resumed_run_can_be_followed_to_its_end(fleet: Fleet, corpus: Path) -> None:
    """Killed hard on one host, resumed while somebody watches: whole records, and rank 0's own manifest."""
    flags = ["--checkpoint-every", "5", "--eval-every", "0", "--membership", "fixed"]
    fleet.ok("train", "--data", str(corpus), *FLAGS, "100000", *flags, "--out", "runs/killed", "--detach")
    records = fleet.there("runs/killed", "a") / "steps/rank-0.jsonl"
    wait_until(lambda: records.exists() and records.read_bytes().count(b"\n") > 12, "it trains")
    supervisor = json.loads((fleet.there("runs/killed", "b") / "host/state.json").read_text())["supervisor"]
    fleet.lab.host("b").exec(["kill", "-9", str(supervisor)])
    failed = fleet.run("logs", "-f", "runs/killed")
    assert failed.returncode == 1
    assert "error: b: the supervisor was killed" in failed.stderr
    wait_until(lambda: fleet.processes("runs/killed") == {}, "no process stays")  # b's end by themselves
    assert fleet.rundir("runs/killed").manifest().verdict == "failed"
    last = fleet.rundir("runs/killed").records(0)[-1].step
    fleet.ok("train", "--resume", "runs/killed", "--steps", str(last + 8), "--detach")
    fleet.ok("logs", "-f", "runs/killed")
    fleet.ok("logs", "runs/killed")
    rundir = fleet.rundir("runs/killed")
    assert [record.step for record in rundir.records(1)] == list(range(last + 8))
    assert rundir.manifest().verdict == "finished"


@exhaustive
def test_stop_at_checkpoint_step_saves(fleet: Fleet, corpus: Path) -> None:
    """Only the first host has the checkpoints; every rank must know that this step has been saved."""
    fleet.ok(
        "train", "--data", str(corpus), *FLAGS, "100000", "--checkpoint-every", "1", "--out", "runs/each", "--detach"
    )
    records = fleet.there("runs/each", "a") / "steps/rank-0.jsonl"
    wait_until(lambda: records.exists() and records.read_bytes().count(b"\n") > 3, "it trains")
    fleet.ok("stop", "runs/each")
    assert fleet.rundir("runs/each").manifest().verdict == "stopped"


@exhaustive
def test_watcher_reconnects_after_ssh_is_killed(counting: Fleet) -> None:
    """The watcher's ssh processes are killed: it connects again, and no line is missing or there twice."""
    watcher = counting.start("logs", "-f", "runs/count")
    wait_until(lambda: len(counted(counting, "a", 0)) > 5, "lines come home")
    ours = subprocess.run(["ps", "-eo", "pid,ppid,comm"], capture_output=True, text=True, check=True).stdout
    for pid, parent, name in (line.split() for line in ours.splitlines()[1:] if len(line.split()) == 3):
        if name == "ssh" and int(parent) == watcher.pid:
            os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: "retrying, the run goes on without the connection" in watcher.told(), "it is told")
    counting.finish()
    assert watcher.wait() == 0, watcher.told()
    assert is_complete(counting)


@exhaustive
def test_ranks_listen_only_on_chosen_interface(counting: Fleet) -> None:
    wait_until(lambda: "line" in counting.ok("logs", "runs/count", "--rank", "0").stdout, "the ranks are connected")
    mine = {"a": 0, "b": 0}
    for host in counting.lab.hosts:
        text = host.exec(["ss", "-Hltnp"]).stdout
        for line in text.splitlines():
            address, port = line.split()[3].rsplit(":", 1)
            if port != "22" and address != LOOPBACK:
                assert address == host.address, line
                mine[host.name] += 1
    assert mine["a"] >= 2, "the store's gate and Gloo's listener"
    assert mine["b"] >= 1


def test_secret_variables_are_not_sent(fleet: Fleet) -> None:
    (fleet.folder / "env.py").write_text(
        "import os; print(sorted(name for name in os.environ if name.startswith(('NCCL', 'HF_'))))"
    )
    env = ENV | {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_secret", "NCCL_SECRET_KEY": "s3cret", "HF_HUB_OFFLINE": "1"}
    argv = fleet.argv("launch", "--out", "runs/env", "--json", "--", "env.py")
    subprocess.run(argv, cwd=fleet.folder, env=env, capture_output=True, timeout=TIMEOUT_S, check=True)
    assert fleet.printed("runs/env", "b", 1) == "['HF_HUB_OFFLINE', 'NCCL_DEBUG', 'NCCL_SOCKET_IFNAME']"
    for place in (fleet.folder, *(host.home for host in fleet.lab.hosts)):
        text = subprocess.run(
            ["grep", "-rlE", "hf_secret|s3cret", str(place)], capture_output=True, text=True, check=False
        )
        assert text.stdout == ""
    assert (fleet.folder / "runs/env/plan.json").stat().st_mode & 0o077 == 0
    assert (fleet.there("runs/env", "a") / "host/spec.json").stat().st_mode & 0o077 == 0


@exhaustive
def test_unchanged_code_is_not_sent_twice(fleet: Fleet) -> None:
    (fleet.folder / "new.txt").write_text(uuid.uuid4().hex)
    first = fleet.ok("launch", "--out", "runs/first", "--json", "--", "hello.py")
    second = fleet.ok("launch", "--out", "runs/second", "--json", "--", "hello.py")
    assert "sent to a" in first.stderr
    assert "sent to" not in second.stderr


def test_dry_run_prints_commands(fleet: Fleet) -> None:
    plan = json.loads(fleet.ok("launch", "--out", "runs/dry", "--dry-run", "--json", "--", "hello.py", "a b").stdout)
    assert not (fleet.folder / "runs/dry").exists()
    assert [host["argv"][-2:] for host in plan["hosts"]] == [["hello.py", "a b"]] * 2
    assert [host["env"]["GLOO_SOCKET_IFNAME"] for host in plan["hosts"]] == ["eth0", "eth0"]
    text = fleet.ok("launch", "--out", "runs/dry", "--dry-run", "--", "hello.py", "a b").stdout
    assert re.search(r"# on b\ncd .* && .*--rdzv-conf=rank=1 .* hello.py 'a b'", text)


@exhaustive
def test_launch_is_predicted_with_link_that_was_probed_since_the_run(fleet: Fleet) -> None:
    """40 kB of gradients over 10 kB/s take 4 s; the run itself took milliseconds."""
    (fleet.folder / "ddp.py").write_text(DDP)
    path = fleet.folder / "of-ddp.toml"  # its links are this test's
    path.write_bytes(fleet.fleet.read_bytes())
    trust_fleet(load_fleet(path))
    mine = Fleet(fleet.lab, path, fleet.folder)
    mine.ok("launch", "--out", "runs/ddp", "--", "ddp.py")
    text = mine.ok("launch", "--out", "runs/next", "--dry-run", "--", "ddp.py").stderr
    assert re.search(r"predicted from runs/ddp: a step of [\d.]+ ms", text), text
    slow = HostLink(goodput_Bps=1e4, rtt_s=1e-3, measured=datetime.now(UTC).isoformat(timespec="seconds"))
    update_fleet_file(path, links={"a": {"b": slow}, "b": {"a": slow}})
    text = mine.ok("launch", "--out", "runs/next", "--dry-run", "--", "ddp.py").stderr
    [step_s] = re.findall(r"predicted from runs/ddp: a step of ([\d.]+) s,", text)
    assert 3.9 < float(step_s) < 5.0


def test_failed_start_on_one_host_ends_the_run_on_others(fleet: Fleet) -> None:
    """A host on whose disk the run has no place: the other is ended again, and no run directory is left."""
    runs = fleet.lab.host("b").home / ".evener" / "runs"
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    subprocess.run(["chattr", "+i", runs], check=True)  # nothing can be made in it
    try:
        done = fleet.run("launch", "--out", "runs/bad", "--", "hello.py")
    finally:
        subprocess.run(["chattr", "-i", runs], check=True)
    assert done.returncode == 1
    assert "the run did not start on b" in done.stderr
    assert f"hint:  evener doctor --fleet {fleet.fleet} looks closer" in done.stderr
    assert not (fleet.folder / "runs/bad").exists()


def losses(rundir: RunDir, rank: int = 0) -> list[float | None]:
    return [record.loss for record in rundir.records(rank)]


FLAGS = ["--model", "tiny", "--batch", "6", "--dtype", "fp32", "--threads", "1", "--eval-tokens", "2048",
         "--shares", "equal", "--steps"]  # fmt: skip


def test_training_across_hosts_matches_single_process(fleet: Fleet, corpus: Path, train: Callable[..., RunDir]) -> None:
    """The same losses as one process on this machine; stopped and resumed, the same bits as never stopped."""
    rate = ["--warmup", "0", "--lr", "3e-4", "--min-lr", "3e-4"]  # the same at each step, however many there are to be
    args = ["--data", str(corpus), *rate, *FLAGS]
    fleet.ok("train", *args, "12", "--out", "runs/whole", "--json")
    whole = fleet.rundir("runs/whole")
    alone = train(fleet.folder / "alone", *rate, *FLAGS, "12")
    assert losses(whole) == pytest.approx(losses(alone), abs=1e-5)
    assert losses(whole, 1) == losses(whole, 0)
    manifest = whole.manifest()
    assert [(rank.rank, rank.host) for rank in manifest.ranks] == [(0, "a"), (1, "b")]
    assert manifest.result is not None
    assert manifest.result.replicas_agree
    fleet.ok("train", *args, "7", "--out", "runs/half", "--json")
    fleet.ok("train", "--resume", "runs/half", "--steps", "12", "--json")
    assert losses(fleet.rundir("runs/half")) == losses(whole)


STALE_LOGIN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "1",
               "GROUP_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "SLURM_PROCID": "1",
               "OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}  # fmt: skip


@exhaustive
@pytest.mark.parametrize(
    ("file", "membership"), [(".bashrc", "live"), (".ssh/environment", "restart"), (".bashrc", "fixed")]
)
def test_variables_of_another_launcher_in_a_login_do_not_reach_its_ranks(
    fleet: Fleet, corpus: Path, file: str, membership: str
) -> None:
    """They hung ranks, or made their start fail again and again without a cause."""
    path = fleet.lab.host("b").home / file
    before = path.read_bytes() if path.exists() else None
    export = "export " if file == ".bashrc" else ""
    text = "".join(f"{export}{name}={value}\n" for name, value in STALE_LOGIN.items())
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes((before or b"") + text.encode())
    try:
        done = fleet.ok("train", "--data", str(corpus), *FLAGS, "3", "--out", "run", "--membership", membership)
    finally:
        path.unlink() if before is None else path.write_bytes(before)
    assert done.stderr.count("env.launcher-variables  b: ") == done.stderr.count("env.debug  b: ") == 1
    assert f"~/{file}" in done.stderr
    assert fleet.rundir("run").manifest().world_size == 2


def stopped_run(fleet: Fleet, corpus: Path, name: str) -> RunDir:
    """Start a run, stop it while it trains, and return it."""
    fleet.ok("train", "--data", str(corpus), *FLAGS, "100000", "--out", name, "--detach")
    records = fleet.there(name, "a") / "steps/rank-0.jsonl"
    wait_until(lambda: records.exists() and records.stat().st_size > 2000, "it trains")
    fleet.ok("stop", name)
    return fleet.rundir(name)


@exhaustive
def test_stop_saves_a_checkpoint(fleet: Fleet, corpus: Path) -> None:
    rundir = stopped_run(fleet, corpus, "runs/long")
    assert rundir.manifest().verdict == "stopped"
    assert fleet.processes("runs/long") == {}
    assert rundir.checkpoint_steps()[-1] == len(rundir.records(0))


@exhaustive
def test_stopped_run_resumes_on_its_hosts(fleet: Fleet, corpus: Path) -> None:
    rundir = stopped_run(fleet, corpus, "runs/stopped")
    steps = len(rundir.records(0))
    fleet.ok("train", "--resume", "runs/stopped", "--steps", str(steps + 2), "--json")
    assert [record.step for record in rundir.records(1)] == list(range(steps + 2))


@exhaustive
def test_script_runs_on_eight_hosts(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(**{name: HostSpec() for name in "abcdefgh"})
    fleet = Fleet(lab, Path(lab.state.fleet_file or ""), tmp_path)
    fleet.ok("launch", "--out", "runs/count", "--detach", "--", "hello.py", "count", fleet.gate)
    logs = [fleet.there("runs/count", host) / f"logs/{host}.{rank}.log" for rank, host in enumerate("abcdefgh")]
    wait_until(lambda: all(log.exists() and "line" in log.read_text() for log in logs), "all count")
    assert len(fleet.processes("runs/count")) == 8
    fleet.ok("stop", "runs/count")
    assert fleet.processes("runs/count") == {}
    assert fleet.printed("runs/count", "h", 7).startswith("sum 28 of 8 host h\n")
    lab.down()


EVALUATES_ALONE = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
layer = torch.nn.Linear(10, 5)
model = torch.nn.parallel.DistributedDataParallel(layer)
for step in range(30):
    model(torch.randn(20, 10)).sum().backward()
    if step == 10 and dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))
"""
OWN_RENDEZVOUS = """
import os
import torch.distributed as dist
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
"""
ALONE = """
import torch
layer = torch.nn.Linear(10, 1)
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(9):
    layer(torch.randn(4, 10)).sum().backward()
    optimizer.step()
"""


@exhaustive
@pytest.mark.parametrize(
    ("program", "error"),
    [
        (EVALUATES_ALONE, r"rank 0 on a called all_reduce of 1 float32 at own.py:10 .*, while rank 1 called DDP's "
                          r"all_reduce of 55 float32 at own.py:8"),
        (OWN_RENDEZVOUS, r"the program sets MASTER_ADDR and MASTER_PORT itself, at own.py:4 in <module>"),
        (ALONE, r"3 optimizer steps were taken, and the 2 ranks have no process group"),
    ],
    ids=["collective", "rendezvous", "no-group"],
)  # fmt: skip
def test_mistake_of_a_program_is_named_on_two_hosts(fleet: Fleet, program: str, error: str) -> None:
    (fleet.folder / "own.py").write_text(program)
    began = time.monotonic()
    done = fleet.run("launch", "--out", "runs/own", "--", "python", "own.py")
    assert done.returncode != 0
    assert re.search(f"error: .*{error}", done.stderr), done.stderr
    assert time.monotonic() - began < TIMEOUT_S / 2
