"""Run the verbs from a shell in an empty folder, as a user does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from evener.core.cluster.fleet_file import load_fleet
from evener.core.run.run_plan import read_plan
from evener.core.run.rundir import RunDir
from evener.core.run.trust import trust_fleet

from ..conftest import ENV, TIMEOUT_S, wait_until
from ..integration.pseudo import ESCAPE, in_terminal
from ..tiers import exhaustive, exhaustively

EVENER = [sys.executable, "-c", "from evener.cli.main import main; main()"]
TINY = ("--model", "tiny", "--eval-tokens", "1024", "--threads", "1")


def evener(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EVENER, *args], cwd=cwd, env=ENV, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


STALE = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "1", "GROUP_RANK": "1",
         "TORCHELASTIC_USE_AGENT_STORE": "True", "SLURM_PROCID": "3", "EVENER_WORLD": "/old"}  # fmt: skip


@exhaustive
def test_left_out_variables_and_hostile_run_folder_do_not_break_a_run(tmp_path, corpus, monkeypatch):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL ranks ended by SIGSEGV. The printed command for the report can be typed."""
    for name, value in (STALE | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}).items():
        monkeypatch.setitem(ENV, name, value)
    name = "my lab's $(touch pwned)"
    flags = ["--ranks", "2", "--steps", "2", "--eval-every", "0", "--out", name, "--compile", "off"]
    done = evener(tmp_path, "train", "--data", str(corpus), *TINY, *flags)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("env.launcher-variables") == done.stderr.count("env.debug") == 1
    printed = " ".join(done.stderr.split())  # however lines are wrapped
    assert "its environment has EVENER_WORLD, GROUP_RANK, MASTER_ADDR, MASTER_PORT and 4 more" in printed
    assert "hint:  unset TORCH_DISTRIBUTED_DEBUG" in done.stderr
    assert RunDir(tmp_path / name).manifest().world_size == 2
    (report,) = [line.removeprefix("report:  ") for line in done.stderr.splitlines() if line.startswith("report:")]
    env = ENV | {"PATH": f"{Path(sys.executable).parent}:{ENV['PATH']}"}
    typed = subprocess.run(["bash", "-c", report], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert typed.returncode == 0, typed.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]


JOINED = """
import sys, torch, evener
from torch.utils.data import TensorDataset
with evener.join(evener.parse_args(sys.argv[1:])) as run:
    model = run.model(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    for step in run.steps(TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))):
        for (x,) in step.micro_batches():
            step.backward(model(x).square().sum())
        step.update(optimizer)
"""


@exhaustive
@pytest.mark.parametrize("debug", ["DETAIL", "INFO"])
def test_torchrun_with_distributed_debug_trains(tmp_path, torchrun, monkeypatch, debug):
    monkeypatch.setitem(ENV, "TORCH_DISTRIBUTED_DEBUG", debug)
    done = torchrun(JOINED, "--steps", "2", "--batch", "8", "--threads", "1", "--out", str(tmp_path / "run"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("TORCH_DISTRIBUTED_DEBUG=DETAIL is taken as INFO") == (debug == "DETAIL")


class Started:
    """A run on this machine that somebody has started."""

    def __init__(self, cwd: Path, *args: str, out: str = "run") -> None:
        self.told_path = cwd / "told"
        with self.told_path.open("w") as told:
            self.process = subprocess.Popen([*EVENER, *args], cwd=cwd, env=ENV, stdout=told, stderr=told)
        self.run = RunDir(cwd / out)

    def told(self) -> str:
        """What it said to whoever started it."""
        return self.told_path.read_text()

    def wait_for_steps(self, rank: int, num: int) -> None:
        """Until the rank has taken so many steps."""
        wait_until(lambda: self.run.steps_path(rank).exists() and len(self.run.records(rank)) >= num, self.told)

    def processes(self) -> list[psutil.Process]:
        """Every live process of the run: supervisor, guard, agent and ranks."""
        mark, found = read_plan(self.run).id, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_marked = process.environ().get("EVENER_RUN") == mark
                is_ours = str(self.run.path / "host" / "supervisor.py") in process.cmdline()
                if (is_marked or is_ours) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_gone(self) -> None:
        """Until nothing of the run is alive."""
        wait_until(lambda: not self.processes(), lambda: f"{self.processes()} {self.told()}")


def long_run(corpus: Path, ranks: int, out: str = "run", compiled: str = "off") -> list[str]:
    """What starts a run that would take hours."""
    flags = ["--ranks", str(ranks), "--steps", "1000000", "--eval-every", "0", "--out", out, "--compile", compiled]
    return ["train", "--data", str(corpus), *TINY, *flags]


@pytest.fixture
def begin(tmp_path, corpus):
    """Starts a run of some ranks that would take hours, and returns it some steps after its start."""
    begun = []

    def begin(ranks: int, compiled: str = "off") -> Started:
        begun.append(Started(tmp_path, *long_run(corpus, ranks, compiled=compiled)))
        begun[-1].wait_for_steps(ranks - 1, 4)
        return begun[-1]

    yield begin
    for one in begun:
        one.process.kill()
        one.process.wait()
        for process in one.processes():
            process.kill()


@pytest.fixture
def started(begin):
    return begin(2)


@exhaustive
def test_train_verify_sample_and_report_succeed_on_one_run(tmp_path, corpus):
    flags = ("--data", str(corpus), *TINY, "--ranks", "2", "--steps", "6", "--out", "a run")
    trained = evener(tmp_path, "train", *flags, "--json")
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout)
    assert result["verdict"] == "finished"
    assert result["replicas_agree"] is True
    assert result["tokens_per_s"] > 0
    assert len(result["ranks"]) == 2
    assert set(result["ranks"][0]["cost"]) == {"data_s", "compute_s", "exposed_sync_s", "wait_s", "optimizer_s"}
    run = RunDir(tmp_path / "a run")
    assert run.manifest().params_by_group["MLP"] == 65536

    again = evener(tmp_path, "train", *flags)
    assert again.returncode == 2
    assert again.stderr.startswith("error: --out a run: already contains a run")

    verified = evener(tmp_path, "verify", "a run", "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["largest_difference"] == 0

    first, second = (evener(tmp_path, "sample", "a run", "--prompt", "She ", "--num-tokens", "20") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("She ")
    assert len(first.stdout) > 10
    assert first.stdout == second.stdout

    reported = evener(tmp_path, "report", "a run")
    assert reported.returncode == 0, reported.stderr
    assert Path(tmp_path, reported.stdout.strip()).read_text().startswith("<!")


@exhaustive
def test_commands_that_a_run_and_hints_print_do_what_they_say(tmp_path, corpus):
    """Each is pasted as it was printed: a run's end, a fleet that nobody measured, a mistyped name."""

    def paste(line: str) -> subprocess.CompletedProcess[str]:
        verb, *words = shlex.split(line)
        assert verb == "evener"
        done = evener(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        return done

    trained = evener(tmp_path, "train", "--data", str(corpus), *TINY, "--steps", "4", "--out", "a run")
    printed = dict(re.findall(r"^(go on|report|talk): +(evener .*)$", trained.stderr, re.M))
    assert printed.keys() == {"go on", "report", "talk"}
    paste(printed["go on"])
    manifest = RunDir(tmp_path / "a run").manifest()
    assert (manifest.verdict, manifest.result.steps) == ("finished", 8)
    assert Path(tmp_path, paste(printed["report"]).stdout.strip()).exists()

    (tmp_path / "one.toml").write_text('[hosts.here]\naddress = "local"\n')
    plan = ("plan", "--fleet", "one.toml", "--model", "tiny")
    refused = evener(tmp_path, *plan)
    hint = re.search(r"^hint:  (evener probe host .*) measures it$", refused.stderr, re.M)
    paste(f"{hint[1]} --seconds 1")
    assert evener(tmp_path, *plan).stdout.startswith("here with 1 rank trains")

    (tmp_path / "notes.txt").write_text("a text of one's own. " * 200)
    mistyped = evener(tmp_path, "train", "note.txt", *TINY, "--steps", "1", "--out", "typed")
    name = re.search(r"^hint:  did you mean (.*)\?$", mistyped.stderr, re.M)[1]
    paste(f"evener train {name} --model tiny --steps 1 --out typed")


@exhaustive
def test_each_line_typed_on_a_terminal_is_continued(tmp_path, corpus):
    train = evener(tmp_path, "train", "--data", str(corpus), *TINY, "--steps", "2", "--out", "run")
    assert train.returncode == 0, train.stderr
    assert "talk:    evener sample run" in train.stderr
    alone = evener(tmp_path, "sample", "run", "--num-tokens", "9", "--prompt", "He is").stdout
    typed = "She\nHe is\n\n"
    shown = ESCAPE.sub("", in_terminal("sample", "run", "--num-tokens", "9", cwd=tmp_path, typed=typed, status=0))
    assert "an empty line ends this\n> She" in shown
    assert shown.endswith(f"> {alone}> ")


def test_dry_run_prints_the_command_and_starts_nothing(tmp_path, corpus):
    flags = ["--data", str(corpus), *TINY, "--ranks", "2", "--steps", "3", "--out", "run"]
    shown = evener(tmp_path, "train", *flags, "--dry-run", "--json")
    (host,) = json.loads(shown.stdout)["hosts"]
    assert host["argv"][1:4] == ["-P", "-m", "evener.worker.torchrun"]
    assert "--nproc-per-node=2" in host["argv"]
    assert host["env"]["OMP_NUM_THREADS"] == "1"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [2, *exhaustively(1)])
def test_ctrl_c_saves_and_resume_continues(tmp_path, begin, ranks):
    started = begin(ranks, "auto" if ranks == 1 else "off")  # a compiled model, where there is a compiler
    run = started.run
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(TIMEOUT_S) == 130
    started.wait_gone()
    manifest = run.manifest()
    assert manifest.verdict == "stopped"
    assert run.checkpoint_steps()[-1] == manifest.result.steps > 3
    assert f"evener train --resume {run.path.name}" in started.told()

    steps = manifest.result.steps + 5
    resumed = evener(tmp_path, "train", "--resume", "run", "--steps", str(steps), "--lr", "0.0001", "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert [record.step for record in run.records(ranks - 1)] == list(range(steps))


@exhaustive
@pytest.mark.parametrize("ranks", [2, 1])
def test_second_ctrl_c_ends_run_at_once(begin, ranks):
    """Also ranks that do not come to the end of their step."""
    started = begin(ranks)
    for rank in started.run.manifest().ranks:
        os.kill(rank.pid, signal.SIGSTOP)
    started.process.send_signal(signal.SIGINT)
    wait_until(lambda: "a second Ctrl-C stops at once" in started.told(), started.told)
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(TIMEOUT_S) == 130
    started.wait_gone()
    assert started.run.manifest().verdict == "stopped"


@exhaustive
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP])
def test_run_ends_and_saves_when_its_launcher_dies(begin, signum):
    """A killed launcher, a closed terminal: it saves, and no process stays."""
    started = begin(2)
    started.process.send_signal(signum)
    started.process.wait()
    started.wait_gone()
    assert started.run.manifest().verdict == "stopped"
    assert started.run.checkpoint_steps() == [started.run.manifest().result.steps]


def test_ctrl_c_before_start_leaves_nothing(tmp_path, corpus):
    started = Started(tmp_path, *long_run(corpus, 2))
    wait_until((tmp_path / "run/host/state.json").exists, started.told)
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(TIMEOUT_S) == 130
    assert "Traceback" not in started.told()
    # On a busy machine the ranks may have begun before the signal came.
    assert started.run.is_run() or not (tmp_path / "run").exists()


@exhaustive
def test_detached_run_can_be_logged_listed_and_stopped(tmp_path, corpus):
    done = evener(tmp_path, *long_run(corpus, 2, "runs/alone"), "--detach")
    assert done.returncode == 0, done.stderr
    assert "stop:    evener stop runs/alone" in done.stderr
    run = RunDir(tmp_path / "runs/alone")
    watcher = Started(tmp_path, "logs", "-f", "runs/alone", out="runs/alone")
    try:
        watcher.wait_for_steps(1, 4)
        wait_until(lambda: "run directory runs/alone" in watcher.told(), watcher.told)
        (listed,) = json.loads(evener(tmp_path, "runs", "--json").stdout)["runs"]
        assert (listed["run"], listed["state"]) == ("runs/alone", "running")
        refused = evener(tmp_path, "train", "--resume", "runs/alone")
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: runs/alone: still running on ")
    finally:
        stopped = evener(tmp_path, "stop", "runs/alone")
    assert stopped.returncode == 0, stopped.stderr
    assert watcher.process.wait(TIMEOUT_S) == 0, watcher.told()
    watcher.wait_gone()
    assert run.manifest().verdict == "stopped"
    assert run.checkpoint_steps()[-1] == run.manifest().result.steps
    (listed,) = json.loads(evener(tmp_path, "runs", "--json").stdout)["runs"]
    assert (listed["state"], listed["steps"]) == ("stopped", run.manifest().result.steps)
    lines = evener(tmp_path, "logs", "runs/alone", "--rank", "0", "--json").stdout.splitlines()
    assert {json.loads(line)["rank"] for line in lines} == {0}


@exhaustive
def test_resume_uses_original_fleet_unless_overridden(tmp_path, corpus):
    """On a fleet, there again although no file here names it, then on this machine, and on the fleet again."""
    fleet = tmp_path / "elsewhere" / "machines.toml"
    fleet.parent.mkdir()
    fleet.write_text(f'[hosts.box]\naddress = "local"\nworkdir = "{tmp_path}/box"\n')
    trust_fleet(load_fleet(fleet))
    run, there = RunDir(tmp_path / "run"), ("--fleet", str(fleet))

    def goes_on(steps, where, *flags):
        done = evener(tmp_path, "train", "--resume", "run", "--steps", str(steps), *flags)
        assert done.returncode == 0, done.stderr
        assert f"resuming from step {steps - 3} on {where}\n" in done.stderr
        assert [record.step for record in run.records(0)] == list(range(steps))
        listed = json.loads(evener(tmp_path, "runs", ".", "--json").stdout)["runs"]
        assert [(one["state"], one["steps"]) for one in listed] == [("finished", steps)]

    flags = ("--data", str(corpus), *TINY, "--batch", "4", "--warmup", "0", "--lr", "3e-4", "--min-lr", "3e-4")
    first = evener(tmp_path, "train", *there, *flags, "--steps", "3", "--out", "run")
    assert first.returncode == 0, first.stderr
    goes_on(6, "box")
    goes_on(9, "this machine", "--fleet", "local")
    goes_on(12, "box", *there)
    whole = evener(tmp_path, "train", *flags, "--steps", "12", "--out", "whole")
    assert whole.returncode == 0, whole.stderr
    assert [r.loss for r in run.records(0)] == [r.loss for r in RunDir(tmp_path / "whole").records(0)]


@exhaustive
def test_killed_resumed_run_is_not_blamed_on_earlier_start(tmp_path, started):
    started.process.send_signal(signal.SIGINT)
    started.process.wait(TIMEOUT_S)
    run = started.run
    had = len(run.records(1))
    for log in (run.path / "logs").glob("*.log"):
        log.write_text("2026-01-01T00:00:00.000Z E error: of long ago\n")
    resumed = Started(tmp_path, "train", "--resume", "run")
    resumed.wait_for_steps(1, had + 4)
    os.kill(run.manifest().ranks[1].pid, signal.SIGKILL)
    assert resumed.process.wait(TIMEOUT_S) == 1
    assert "error: rank 1 on " in resumed.told()
    assert "was killed by SIGKILL" in resumed.told()
    assert "long ago" not in resumed.told()


@exhaustive
@pytest.mark.parametrize("ranks", [2, 1])
def test_killed_rank_is_named(begin, ranks):
    started = begin(ranks)
    os.kill(started.run.manifest().ranks[-1].pid, signal.SIGKILL)
    assert started.process.wait(TIMEOUT_S) == 1
    started.wait_gone()
    host = read_plan(started.run).hosts[0].name
    assert f"error: rank {ranks - 1} on {host} was killed by SIGKILL" in started.told()
    assert "Traceback" not in started.told()
    assert started.run.manifest().verdict == "failed"


def test_custom_script_runs_on_local_machine(tmp_path):
    script = "import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], os.getcwd())"
    (tmp_path / "hello.py").write_text(script)
    done = evener(tmp_path, "launch", "--ranks", "2", "--out", "run", "--", "hello.py")
    assert done.returncode == 0, done.stderr
    (host,) = read_plan(RunDir(tmp_path / "run")).hosts
    for rank in (0, 1):
        assert f"{rank} {host.name} │ {rank} of 2 {tmp_path}\n" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dtype", "fp16", "--device", "cpu"), "error: --dtype fp16: loss scaling needs a GPU"),
        *exhaustively((("--init-from", "junk"), "error: junk: cannot be read as safetensors")),
    ],
)
def test_worker_side_errors_are_one_line_and_leave_no_files(tmp_path, corpus, flags, message):
    (tmp_path / "junk").write_text("junk")
    done = evener(tmp_path, "train", "--data", str(corpus), *TINY, "--steps", "3", *flags, "--out", "run")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@exhaustive
def test_time_limit_stops_and_saves(tmp_path, corpus):
    (tmp_path / "run.toml").write_text("[train]\nsteps = 100000\nmax_s = 1\n")
    done = evener(tmp_path, "train", "run.toml", "--data", str(corpus), *TINY, "--out", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "stopped"


@exhaustive
def test_bench_writes_runs_and_comparison(tmp_path, corpus):
    argv = ["bench", "--data", str(corpus), "--model", "tiny", "--seconds", "2", "--ranks", "1", "--ranks", "2"]
    folder = tmp_path / "runs" / "bench"
    first = evener(tmp_path, *argv[:-2])  # one process: all that it prints
    assert first.returncode == 0, first.stderr
    assert Path(tmp_path, first.stdout.strip()).samefile(folder / "report.html")
    assert "speed-up" in first.stderr
    refused = evener(tmp_path, *argv)
    assert refused.returncode == 2
    assert "exists and is not empty" in refused.stderr

    done = evener(tmp_path, *argv, "--force", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "bench.json").read_text())["series"] == {"verbs": ["verbs-1", "verbs-2"]}
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")
    one, two = (RunDir(folder / f"verbs-{n}").records(0) for n in (1, 2))
    common = min(len(one), len(two), 20)  # then rounding has grown, at the learning rate of so small a model
    assert common > 3
    assert [r.loss for r in two[:common]] == pytest.approx([r.loss for r in one[:common]], rel=1e-4)

    told = json.loads(done.stdout)
    assert Path(tmp_path, told["report"]).samefile(folder / "report.html")
    series = told["series"]["verbs"]
    assert [run["run_dir"] for run in series["runs"]] == ["runs/bench/verbs-1", "runs/bench/verbs-2"]
    assert series["largest_loss_gap"] < 0.1
    assert len(series["explanation"]) > 100


@exhaustive
@pytest.mark.alone
@pytest.mark.usefixtures("quiet_machine")  # two ways of timing one exchange are compared
def test_ddp_baseline_example_matches_its_specification(tmp_path, corpus):
    program = Path(__file__).parents[2] / "examples" / "ddp_baseline.py"
    folder = tmp_path / "experiments" / "35-ddp-cpu"
    argv = [sys.executable, program, "--data", corpus, "--out", folder]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    files = {path.name for path in folder.iterdir()}
    assert files == {"timings.jsonl", "manifest.json", "state-rank-0.pt", "state-rank-1.pt"}
    assert json.loads(done.stdout) == json.loads((folder / "manifest.json").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    block_g = ("seed", "lab", "backend", "world_size", "model_params", "steps", "allreduce_p50_ms", "allreduce_p95_ms",
               "tokens_per_sec_1proc", "tokens_per_sec_2proc", "byte_equivalent", "lesson_notes")  # fmt: skip
    assert [key for key in manifest if key in block_g] == list(block_g)
    assert (manifest["seed"], manifest["lab"], manifest["backend"]) == (35000, "01-ddp-on-cpu", "gloo")
    assert (manifest["world_size"], manifest["steps"]) == (2, 100)
    assert manifest["byte_equivalent"] is True
    assert manifest["largest_difference"] == 0.0
    assert 0 < manifest["allreduce_p50_ms"] <= manifest["allreduce_p95_ms"]
    assert len(manifest["lesson_notes"]) > 100

    total = len((corpus / "train.jsonl").read_text().splitlines())
    assert sum(manifest["sentences"]) == manifest["sentences_total"] == total
    assert manifest["first_sentence"][0] != manifest["first_sentence"][1]

    timings = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    assert [timing["step"] for timing in timings] == list(range(100))
    assert timings[-1]["loss"] < timings[0]["loss"]
    # Variant A (barrier brackets) and variant B (hook) time the same thing: what communication adds to backward.
    bracket, exposed = manifest["variant_a_mean_p50_p95_ms"][1], manifest["exposed_mean_p50_p95_ms"][1]
    assert bracket == pytest.approx(exposed, abs=max(2.0, exposed))

    verified = evener(tmp_path, "verify", str(folder))
    assert verified.returncode == 0, verified.stderr
    assert "agree to the bit" in verified.stdout
    again = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "exists and is not empty" in again.stderr
