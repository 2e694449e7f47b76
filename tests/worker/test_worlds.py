"""Agents of three hosts on one machine, with real launchers, whose ranks do next to nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from evener.core.roster import Seat, first_roster
from evener.core.rundir import RunDir
from evener.core.spec import parse_args
from evener.core.step import StepRecord
from evener.core.world import LEFT, NO_ROOM, OVER, AgentSpec, Part
from tests.conftest import ENV, TIMEOUT_S, free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="each host has a loopback address of its own: Linux")

# It lasts until there is a file, and tells what world it is in; its launcher's end is its own.
RANK = """
import json, os, pathlib, sys, time
world = json.loads(pathlib.Path(os.environ["EVENER_WORLD"]).read_text())["world"]
print("world", world["number"], "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
go, launcher = pathlib.Path(sys.argv[1]), os.getppid()
while not go.exists() and os.getppid() == launcher:
    time.sleep(0.05)
raise SystemExit(int(go.read_text() or 0) if go.exists() else 9)
"""


def own_go(home: Path) -> list[str]:
    """The same, where each host's ranks wait for a file of their own."""
    return [str(home.parent / "rank.py"), str(home / "go")]


class Hosts:
    """A run's agents."""

    LIVES = False
    RANKS = 1  # of each host

    def __init__(self, folder: Path, names: str, program: Callable[[Path], list[str]] | None = None) -> None:
        self.folder, self.port = folder, free_port()
        self._program = program or (lambda home: [str(folder / "rank.py"), str(folder / "go")])
        self.parts = {name: Part(address=f"127.0.0.{i + 1}", num_ranks=self.RANKS) for i, name in enumerate(names)}
        self.first, self.edition = [*names], 0
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "rank.py").write_text(RANK)
        for name in names:
            (folder / name / "host" / "ranks").mkdir(parents=True)
            self.start(name)

    def tell(self, name: str) -> None:
        """Its agent hears who may take part."""
        home = self.folder / name
        spec = AgentSpec(run="r1", host=name, hosts=self.parts, edition=self.edition, first=self.first, port=self.port,
                         key="secret", program=self._program(home), silent_s=8.0, lives=self.LIVES)  # fmt: skip
        (home / "host" / "agent.json").write_bytes(msgspec.json.encode(spec))

    def start(self, name: str) -> None:
        home = self.folder / name
        self.tell(name)
        argv = [sys.executable, "-m", "evener.agent", str(home)]
        with (home / "log").open("ab") as log:
            env = ENV | {"EVENER_HOST": name, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            env |= {"EVENER_ROSTER": str(home / "roster.json")} if (home / "roster.json").exists() else {}
            self.agents[name] = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)

    def ranks(self, name: str) -> list[psutil.Process]:
        """And not their launcher, which has -P; nor what has ended and waits to be seen."""
        found = []
        for one in psutil.Process(self.agents[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none
                if one.cmdline()[1:2] != ["-P"]:
                    found.append(one)
        return found

    def told(self, name: str) -> str:
        """What its ranks said, in the order of their worlds."""
        logs = sorted(
            (self.folder / name / "host" / "ranks").glob("*/*/*/stdout.log"), key=lambda log: log.stat().st_mtime
        )
        return "".join(log.read_text() for log in logs)

    def until(self, is_so: Callable[[], bool]) -> float:
        began = time.monotonic()
        while not is_so():
            assert time.monotonic() - began < TIMEOUT_S, self.logs()
            time.sleep(0.05)
        return time.monotonic() - began

    def logs(self) -> dict[str, list[str]]:
        """The ends of what agents and ranks said."""
        return {name: [(self.folder / name / "log").read_text()[-3000:], self.told(name)] for name in self.agents}

    def until_in(self, world: int, names: str) -> None:
        size = len(names)
        self.until(
            lambda: all(f"world {world} rank {i} of {size}\n" in self.told(name) for i, name in enumerate(names))
        )

    def kill(self, name: str) -> None:
        """All at once, as when its power goes."""
        agent = psutil.Process(self.agents[name].pid)
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()
        self.agents[name].wait()

    def end(self, status: str = "") -> list[int]:
        whole = self.folder / "whole"
        whole.write_text(status)
        whole.rename(self.folder / "go")
        return [agent.wait(TIMEOUT_S) for agent in self.agents.values()]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[str], Hosts]]:
    made: list[Hosts] = []

    def make(names: str, program: Callable[[Path], list[str]] | None = None) -> Hosts:
        made.append(Hosts(tmp_path, names, program))
        return made[-1]

    yield make
    for one in made:
        for name, agent in one.agents.items():
            if agent.poll() is None:
                one.kill(name)


def test_a_rank_that_is_killed_is_started_again_with_the_others(hosts: Callable[[str], Hosts]) -> None:
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    (rank,) = fleet.ranks("b")
    rank.send_signal(signal.SIGKILL)
    fleet.until_in(1, "abc")
    assert "evener: b failed: world 1 is a, b, c" in (fleet.folder / "c" / "log").read_text()
    assert fleet.end() == [0, 0, 0]


@pytest.mark.parametrize(("gone", "left"), [("a", "bc"), ("b", "ac")])
def test_whoever_loses_its_power_the_others_go_on_and_take_it_back(
    hosts: Callable[[str], Hosts], gone: str, left: str
) -> None:
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    fleet.kill(gone)
    fleet.until_in(1, left)
    fleet.start(gone)
    (rank,) = fleet.ranks(left[1])
    fleet.until(lambda: "world 1" in (fleet.folder / gone / "log").read_text())  # it has heard
    rank.kill()
    fleet.until_in(2, left + gone)
    assert fleet.end() == [0, 0, 0]


def test_an_agent_that_is_killed_comes_back(hosts: Callable[[str], Hosts]) -> None:
    """Its supervisor starts it again, before anybody has missed it."""
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    fleet.kill("a")
    fleet.start("a")
    fleet.until_in(1, "ab")
    assert fleet.end() == [0, 0]


# Each sleeps, as its pulse says: the second in a line of its own, the others in an exchange.
SLEEPER = """
import json, os, pathlib, time
host = pathlib.Path(os.environ["EVENER_WORLD"]).parent
host.joinpath("pulse").mkdir(exist_ok=True)
waits = host.parent.name != "b"
pulse = {"pid": os.getpid(), "where": "loop.py:3 in train" if waits else "data.py:9 in read", "waits": waits}
host.joinpath("pulse", "0").write_text(json.dumps(pulse))
"""


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("stopped", "is stopped, by a signal or a debugger"),
        ("idle", "does nothing, in data.py:9 in read, and the others wait for it"),
    ],
)
def test_a_rank_that_holds_the_others_up_is_named_and_all_begin_again(
    hosts: Callable[[str], Hosts], how: str, what: str
) -> None:
    fleet = hosts("ab")
    if how == "idle":
        (fleet.folder / "rank.py").write_text(SLEEPER + RANK)
    fleet.until_in(0, "ab")
    (rank,) = fleet.ranks("b")
    if how == "stopped":
        rank.send_signal(signal.SIGSTOP)
    fleet.until(lambda: (fleet.folder / "b" / "events.jsonl").exists())
    (fleet.folder / "rank.py").write_text(RANK)
    fleet.until_in(1, "ab")
    (event,) = [json.loads(line) for line in (fleet.folder / "b" / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["rank"], event["error"]) == ("run.hang", 1, f"rank 1 on b {what}")
    assert not (fleet.folder / "a" / "events.jsonl").exists()
    assert fleet.end() == [0, 0]


def test_of_a_host_that_is_added_whoever_was_not_told_hears_from_the_others(hosts: Callable[[str], Hosts]) -> None:
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    fleet.parts |= {"c": Part(address="127.0.0.3", num_ranks=1)}
    fleet.edition += 1
    fleet.tell("a")
    fleet.until(lambda: b'"c"' in (fleet.folder / "b" / "host" / "agent.json").read_bytes())
    (fleet.folder / "c" / "host" / "ranks").mkdir(parents=True)
    fleet.start("c")
    fleet.until(lambda: (fleet.folder / "b" / "host" / "waiting").exists())
    next(one for one in fleet.ranks("a")).kill()
    fleet.until_in(1, "abc")
    assert fleet.end() == [0, 0, 0]


def test_what_fails_always_ends(hosts: Callable[[str], Hosts]) -> None:
    """What the ranks say would fail in any world, at once."""
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    assert fleet.end("77") == [OVER, OVER]


@pytest.mark.parametrize(("status", "times"), [("2", 1), ("1", 4)])
def test_what_fails_always_on_one_host_the_others_do_without(
    hosts: Callable[..., Hosts], tmp_path: Path, status: str, times: int
) -> None:
    """At once where its ranks refuse after all have trained; else after the fourth time in a row."""
    fleet = hosts("abc", own_go)
    fleet.until_in(0, "abc")
    next(one for one in fleet.ranks("b")).kill()
    fleet.until_in(1, "abc")
    (tmp_path / "c" / "go").write_text(status)
    assert fleet.agents["c"].wait(TIMEOUT_S) == LEFT
    fleet.until_in(1 + times, "ab")
    (event,) = RunDir(tmp_path / "c").events()
    assert (event["event"], event["host"]) == ("run.leaves", "c")
    told = f"c leaves the run: rank 2 ended with exit code {status}"
    assert event["error"] == told + " 4 times, and nothing was saved in between" * (times > 1)
    for name in "ab":
        (tmp_path / name / "go").write_text("0")
    assert [fleet.agents[name].wait(TIMEOUT_S) for name in "ab"] == [0, 0]


def test_whose_disk_has_no_room_for_checkpoints_is_back_when_it_has(
    hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    """What its agent writes down fits there all the time."""
    fleet = hosts("abc", own_go)
    fleet.until_in(0, "abc")
    with (tmp_path / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 29)
    (tmp_path / "c" / "go").write_text(str(NO_ROOM))
    fleet.until_in(1, "ab")
    (event,) = RunDir(tmp_path / "c").events()
    assert (event["event"], event["host"]) == ("run.no-room", "c")
    (tmp_path / "c" / "go").unlink()
    (tmp_path / "ballast").unlink()
    fleet.until(lambda: "this host has room again" in (tmp_path / "c" / "log").read_text())
    fleet.until(lambda: (tmp_path / "a" / "host" / "waiting").exists())
    next(one for one in fleet.ranks("a")).kill()
    fleet.until_in(2, "abc")
    for name in "abc":
        (tmp_path / name / "go").write_text("0")
    assert [agent.wait(TIMEOUT_S) for agent in fleet.agents.values()] == [0, 0, 0]


def test_without_room_on_the_first_of_two_the_other_goes_on(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """It is no cut: the first says so."""
    fleet = hosts("ab", own_go)
    fleet.until_in(0, "ab")
    (tmp_path / "a" / "host" / "needs").write_text(str(1 << 60))
    (tmp_path / "a" / "go").write_text(str(NO_ROOM))
    fleet.until_in(1, "b")
    assert f"its checkpoints need {(1 << 60) / 1e9:.2f} GB" in (tmp_path / "a" / "log").read_text()
    (tmp_path / "b" / "go").write_text("0")
    assert [agent.wait(TIMEOUT_S) for agent in fleet.agents.values()] == [0, 0]


def test_where_all_leave_the_run_has_failed(hosts: Callable[[str], Hosts]) -> None:
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    next(one for one in fleet.ranks("a")).kill()
    fleet.until_in(1, "ab")
    assert OVER in fleet.end("2")  # of whoever was the last


def test_a_host_that_is_kept_out_leaves_and_stays_away(hosts: Callable[[str], Hosts]) -> None:
    """Also where it was in the next world already, and where its supervisor starts its agent again."""
    fleet = hosts("abc")
    fleet.until_in(0, "abc")
    (fleet.folder / "c" / "host" / "kept-out").write_text("its memory fails")
    (rank,) = fleet.ranks("a")
    rank.kill()
    assert fleet.agents["c"].wait(TIMEOUT_S) == LEFT
    fleet.until(lambda: "is a, b\n" in (fleet.folder / "b" / "log").read_text())
    fleet.start("c")
    assert fleet.agents["c"].wait(TIMEOUT_S) == LEFT
    assert (fleet.folder / "c" / "log").read_text().count("has left the run: its memory fails\n") == 2
    assert fleet.end() == [0, 0, LEFT]


def test_one_host_of_two_waits_without_the_first(hosts: Callable[[str], Hosts]) -> None:
    fleet = hosts("ab")
    fleet.until_in(0, "ab")
    os.kill(fleet.agents["a"].pid, signal.SIGSTOP)
    fleet.until(lambda: "too few of the hosts are in reach" in (fleet.folder / "b" / "log").read_text())
    fleet.until(lambda: not fleet.ranks("b"))
    os.kill(fleet.agents["a"].pid, signal.SIGCONT)
    # It was stopped: that it heard nobody meanwhile says nothing of them.
    fleet.until(lambda: "world 1 is a, b" in (fleet.folder / "a" / "log").read_text())
    fleet.until(lambda: any(f"world {number} rank 1 of 2\n" in fleet.told("b") for number in range(1, 7)))
    assert fleet.end() == [0, 0]


WORKER = ("-m", "evener.worker")


class Training(Hosts):
    """A run of evener's own worker, or of a program that becomes it; it ends by itself."""

    STEPS = 160

    def __init__(self, folder: Path, corpus: Path, names: str = "abc", worker: Sequence[str] = WORKER) -> None:
        flags = self.flags(corpus)
        spec = parse_args(flags)
        seats = [Seat(host=name, device="cpu") for name in names for _ in range(self.RANKS)]
        for name in names:
            (folder / name).mkdir()
            (folder / name / "roster.json").write_bytes(
                msgspec.json.encode(first_roster(spec, seats, spec.model.block_size))
            )
        super().__init__(folder, names, lambda home: [*worker, *flags, "--out", str(home)])

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        train = f"--model tiny --batch 12 --steps {cls.STEPS} --lr 3e-5 --dtype fp32 --dropout 0 --shares equal"
        return f"--data {corpus} {train} --device cpu --threads 1 --eval-every 0 --checkpoint-every 20".split()

    def losses(self) -> dict[int, float]:
        """By step, as the ranks wrote them down who were in the newest world that took it."""
        found: dict[int, tuple[int, float]] = {}
        for rank in range(len(self.parts) * self.RANKS):
            for record in self.records(rank):
                if record.loss is not None and record.epoch >= found.get(record.step, (-1, 0.0))[0]:
                    found[record.step] = record.epoch, record.loss
        return {step: loss for step, (_, loss) in sorted(found.items())}

    def records(self, rank: int) -> list[StepRecord]:
        """Where its host has them."""
        return RunDir(self.folder / [*self.parts][rank // self.RANKS]).records(rank)

    def saved(self, name: str) -> int:
        return max(RunDir(self.folder / name).checkpoint_steps(), default=0)


@contextlib.contextmanager
def ended(fleet: Training) -> Iterator[None]:
    """All of it, whatever happens."""
    try:
        yield
    finally:
        for name, agent in fleet.agents.items():
            if agent.poll() is None:
                fleet.kill(name)


def alone(training: type[Training], corpus: Path, out: Path) -> list[float]:
    """Its losses on one process that nobody disturbs."""
    argv = [sys.executable, *WORKER, *training.flags(corpus), "--out", str(out)]
    subprocess.run(argv, env=ENV, check=True, capture_output=True, timeout=TIMEOUT_S)
    return [record.loss or 0.0 for record in RunDir(out).records(0)]


class Drifting(Training):
    """Whose replicas agree for the first time long after the test has ended."""

    STEPS = 1_000_000

    @classmethod
    def flags(cls, corpus: Path) -> list[str]:
        other = {"3e-5": "0.001", "20": "1000000"}  # --lr, --checkpoint-every
        mine = ["--sync", "diloco:500000", "--compile", "off", "--min-lr", "0.001", "--warmup", "0"]
        return [*[other.get(word, word) for word in super().flags(corpus)], *mine]


def last_world(folder: Path) -> int:
    """The step with which it began."""
    return max((event["step"] for event in RunDir(folder).events() if event["event"] == "world"), default=0)


def test_what_drifting_replicas_have_learned_is_not_lost_where_a_host_leaves(tmp_path: Path, corpus: Path) -> None:
    fleet = Drifting(tmp_path, corpus)
    with ended(fleet):
        fleet.until(lambda: len(fleet.records(0)) > 40)
        (tmp_path / "c" / "host" / "kept-out").write_text("wanted elsewhere")
        assert fleet.agents["c"].wait(TIMEOUT_S) == LEFT
        fleet.until(lambda: (left := last_world(tmp_path / "a")) > 0 and fleet.records(0)[-1].step > left + 6)
    left = last_world(tmp_path / "a")
    losses = fleet.losses()
    first, before, after = (sum(losses[step] for step in range(begin, begin + 5)) / 5
                            for begin in (0, left - 5, left))  # fmt: skip
    assert before < first - 0.3
    assert after < (first + before) / 2, (first, before, after)


def test_whatever_goes_and_comes_the_same_is_learned(tmp_path: Path, corpus: Path) -> None:
    """A rank is killed, the first host loses its power, is back and let in: every loss is that of one process."""
    undisturbed = alone(Training, corpus, tmp_path / "alone")
    fleet = Training(tmp_path, corpus)
    with ended(fleet):
        fleet.until(lambda: fleet.saved("a") >= 20)
        next(one for one in fleet.ranks("b")).kill()
        fleet.until(lambda: fleet.saved("c") >= 60)
        fleet.kill("a")
        fleet.until(lambda: "world 2 is b, c" in (tmp_path / "c" / "log").read_text())
        fleet.start("a")
        assert [agent.wait(TIMEOUT_S) for agent in fleet.agents.values()] == [0, 0, 0]
    losses = fleet.losses()
    assert list(losses) == list(range(Training.STEPS))
    assert list(losses.values()) == pytest.approx(undisturbed, rel=1e-5)
    worlds = [
        json.loads(line) for name in "abc" for line in (tmp_path / name / "events.jsonl").read_text().splitlines()
    ]
    seen = {event["number"]: event for event in worlds if event["event"] == "world"}
    assert [sorted(event["hosts"]) for _, event in sorted(seen.items())] == [
        ["a", "b", "c"],
        ["a", "b", "c"],
        ["b", "c"],
        ["a", "b", "c"],
    ]
    last = json.loads((tmp_path / "c" / "host" / "kept.json").read_text())["world"]
    assert last["step"] >= 60  # what was saved since the rank was killed
    assert last["failures"] == 0
    manifests = [RunDir(tmp_path / name).manifest() for name in "abc"]
    assert {manifest.verdict for manifest in manifests} == {"finished"}
    assert all(manifest.result is not None and manifest.result.replicas_agree for manifest in manifests)
