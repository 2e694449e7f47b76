"""What happens in a drill? One thing breaks in a fresh lab; it is looked at without evener, then with it, then mended.

with Play(drill) as play:
    play.break_it()
    play.without()            # torchrun or ssh by hand: what a person would see
    seen = play.look()        # evener doctor, or a run: what it names
    assert drill.named_in(seen.findings)
    play.mend(seen)           # the finding's own fix, as it stands, where a lab can do it

A drill is a row in drills.py. Everything runs as a person would run it: over ssh, and `evener` as a program.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit

from evener.core.decoding import from_tree
from evener.core.errors import EvenerError
from evener.core.finding import Finding
from evener.lab.host import Host
from evener.lab.lab import Lab
from evener.lab.spec import HostSpec, LabSpec

LOOK_S = 60.0  # a doctor that takes longer has failed
AFTER_THE_FIRST_S = 1.5  # how long the others may go on when one command has ended with an error
POLL_S = 0.02
FLEET = "fleet.toml"
EVENER = [sys.executable, "-c", "import sys; from evener.cli.main import main; sys.argv[0] = 'evener'; main()"]
HERE = r"(?:evener|chmod) "  # what a fix may tell to type on this machine
_numbers = itertools.count()


@dataclass(frozen=True)
class Step:
    """Something that is done to the lab, and how a person would say or type it."""

    text: str
    do: Callable[[Stage], None]


@dataclass(frozen=True, kw_only=True)
class Raw:
    """What a person runs by hand, and what it would go on to wait for."""

    commands: Mapping[str, str]  # by host; typed into an ssh session there, all at the same time
    files: Mapping[str, str] = field(default_factory=dict)  # in the home of every host
    typed: str = "{host}$ {command}"  # where and how, for the screen
    quiet_s: float = 6.0  # we look away when nobody has said anything for so long
    within_s: float = 20.0
    works_when_mended: bool = False  # the same commands then do their work
    waits: str = ""  # where nothing comes: for how long, and why nobody would know


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What one command printed."""

    command: str
    lines: list[str]
    status: int | None  # None: still at it when we looked away
    took_s: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What evener named."""

    command: str
    findings: list[Finding]
    took_s: float
    lines: list[str] = field(default_factory=list)  # what a run printed


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One row: a fault, and what must be named."""

    name: str
    check: str  # the id that must be named
    host: str | None  # and where
    peer: str | None = None
    says: str  # the fault, in one line
    why: str  # what there is to learn
    fault: Sequence[Step]
    mend: Sequence[Step] | None = None  # None: the finding's own fix, as it stands
    raw: Raw | None = None
    silence: str = ""  # where nothing is to be seen without evener: why
    look: Callable[[Stage], Seen]
    hosts: Mapping[str, HostSpec]
    is_pair: bool = False  # host and peer may be named in either order
    used_up: bool = False  # by what is done by hand: it breaks once more before evener looks
    may_also: Sequence[str] = ()  # other ids that the same fault rightly brings with it
    lacks: Callable[[], str | None] = lambda: None  # why this machine cannot produce it
    lasts_s: float = 0.0  # that the fault may be felt when it is mended: others remember an address

    def named_in(self, findings: Iterable[Finding]) -> Finding | None:
        """The finding that was expected."""
        for one in findings:
            same = {one.host, one.peer} == {self.host, self.peer} if self.is_pair else one.host == self.host
            if one.check == self.check and same and (self.is_pair or one.peer == self.peer):
                return one
        return None

    def found_in(self, findings: Iterable[Finding]) -> list[Finding]:
        """All of the expected id that are no mere information, wherever."""
        return [one for one in findings if one.check == self.check and one.severity != "info"]

    def others_in(self, findings: Iterable[Finding]) -> list[Finding]:
        """Errors and warnings that nobody expected."""
        expected = {self.check, *self.may_also}
        return [one for one in findings if one.check not in expected and one.severity != "info"]

    @property
    def where(self) -> str:
        """For a person: `b`, or `a ↔ b`."""
        return " ↔ ".join(name for name in (self.host, self.peer) if name) or "all hosts"


class Stage:
    """A lab, its fleet file and a folder to give commands in."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.started: list[subprocess.Popen[bytes]] = []  # by a fault, outside the hosts; ended with the drill

    @property
    def fleet(self) -> Path:
        """The fleet file."""
        return self.folder / FLEET

    def host(self, name: str) -> Host:
        """A host of the lab."""
        return self.lab.host(name)

    def set_in_fleet(self, host: str, key: str, value: object) -> None:
        """A line of [hosts.HOST], new or in place of the old one; None takes it away."""
        document = tomlkit.parse(self.fleet.read_text())
        table: Any = document["hosts"]
        if value is None:
            table[host].pop(key, None)
        else:
            table[host][key] = value
        self.fleet.write_text(tomlkit.dumps(document))

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        """The command line, in our folder, while something else is done."""
        null = subprocess.DEVNULL
        self.started.append(subprocess.Popen([*EVENER, *args], cwd=self.folder, stdin=null, stdout=null, stderr=null))
        return self.started[-1]

    def evener(self, *args: str, timeout_s: float = LOOK_S) -> subprocess.CompletedProcess[str]:
        """The command line, in our folder."""
        try:
            return subprocess.run(
                [*EVENER, *args], cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise EvenerError(f"evener {shlex.join(args)}: not done after {timeout_s:.0f} s") from error

    def by_hand(self, raw: Raw) -> dict[str, Heard]:
        """Run commands over ssh on several hosts at once; whatever they leave running is ended."""
        before = {host.name: set(host.pids()) for host in self.lab.hosts}
        for host in self.lab.hosts:
            for name, text in raw.files.items():
                (host.home / name).write_text(text)
        logs = {name: self.folder / f"by-hand.{name}" for name in raw.commands}
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, command in raw.commands.items():
                with logs[name].open("wb") as log:
                    running[name] = subprocess.Popen(
                        self.lab.ssh_argv(name, f"PATH={Path(sys.executable).parent}:$PATH; {command}"),
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    )  # fmt: skip
            took = _wait(running, logs, raw)
            statuses = {name: process.poll() for name, process in running.items()}
        finally:
            for process in running.values():
                process.kill()
                process.wait()
            for host in self.lab.hosts:
                end_all(host, before[host.name])
        return {
            name: Heard(command=command, lines=_lines(logs[name]), status=statuses[name], took_s=took[name])
            for name, command in raw.commands.items()
        }


class Play:
    """A drill that is going on. On the way out its lab is taken down."""

    def __init__(self, *drills: Drill) -> None:
        self.drills = drills
        self.drill = drills[0]

    def __enter__(self) -> Play:
        hosts: dict[str, HostSpec] = {}
        for drill in self.drills:
            hosts |= {name: spec for name, spec in drill.hosts.items() if hosts.get(name, HostSpec()) == HostSpec()}
        self._folder = Path(tempfile.mkdtemp(prefix="evener-drill-"))
        self._lab: Lab | None = None
        try:
            spec = LabSpec(name=f"drill-{os.getpid()}-{next(_numbers)}", hosts=dict(sorted(hosts.items())))
            self._lab = Lab.up(spec, out=self._folder / FLEET)
            self.stage = Stage(self._lab, self._folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.stage.started if self._lab is not None else ():
            process.kill()
            process.wait()
        if self._lab is not None:
            self._lab.down()
        shutil.rmtree(self._folder, ignore_errors=True)

    def break_it(self) -> None:
        """The fault."""
        for drill in self.drills:
            for step in drill.fault:
                step.do(self.stage)

    def without(self) -> dict[str, Heard]:
        """What a person would see."""
        heard = self.stage.by_hand(self.drill.raw) if self.drill.raw else {}
        if heard and self.drill.used_up:
            self.break_it()
        return heard

    def look(self) -> Seen:
        """What evener says."""
        return self.drill.look(self.stage)

    def look_again(self) -> Seen:
        """What evener says when it is mended."""
        deadline = time.monotonic() + max(drill.lasts_s for drill in self.drills)
        while True:
            seen = self.look()
            left = [
                one
                for drill in self.drills
                for one in (*drill.found_in(seen.findings), *drill.others_in(seen.findings))
            ]
            if not left or time.monotonic() >= deadline:
                return seen

    def mend(self, seen: Seen) -> list[str]:
        """Mend it; what was done, as a person would say or type it."""
        done = []
        for drill in self.drills:
            steps = drill.mend
            if steps is None:
                mine = {drill.check, *drill.may_also}
                steps = [step for one in seen.findings if one.check in mine and one.fix
                         for step in steps_of(one.fix)]  # fmt: skip
            for step in steps:
                step.do(self.stage)
                done.append(step.text)
        return done


# --- steps -------------------------------------------------------------------------------------------------------


def on(host: str, command: str) -> Step:
    """A command that is typed on a host."""

    def do(stage: Stage) -> None:
        stage.host(host).exec(["sh", "-ec", command])

    return Step(f"on {host}: {command}", do)


def here(command: str) -> Step:
    """A command that is typed where `evener` is."""

    def do(stage: Stage) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        subprocess.run(["sh", "-ec", command], cwd=stage.folder, env={**os.environ, "PATH": path}, check=True,
                       stdin=subprocess.DEVNULL, capture_output=True, timeout=LOOK_S)  # fmt: skip

    return Step(f"$ {command}", do)


def fleet_line(host: str, key: str, value: object) -> Step:
    """A line of the fleet file."""
    line = f"{key} = {json.dumps(value)}" if value is not None else f"without {key}"
    return Step(f"[hosts.{host}] {line}", lambda stage: stage.set_in_fleet(host, key, value))


def lab_step(text: str, do: Callable[[Stage], object]) -> Step:
    """Something that the lab itself does: a cable, a rate, a file that the kernel would show."""

    def run(stage: Stage) -> None:
        do(stage)

    return Step(text, run)


def steps_of(fix: str) -> list[Step]:
    """The commands and lines of a finding's fix; of alternatives ("; or …") the first.

    >>> [step.text for step in steps_of("on a: ip link set dev eth0 mtu 1400; on b: true; or buy a cable")]
    ['on a: ip link set dev eth0 mtu 1400', 'on b: true']
    """
    steps = []
    for part in re.split(rf"; (?=on [a-z0-9-]+: |{HERE})", fix.partition("; or ")[0]):
        line = re.fullmatch(r"\[hosts\.([\w-]+)\] (\w+) = (.+)", part)
        command = re.fullmatch(r"on ([a-z0-9-]+): (.+)", part)
        if line:
            steps.append(fleet_line(line[1], line[2], json.loads(line[3])))
        elif command:
            step = on(command[1], command[2].replace("sudo ", ""))  # who enters a host directly is its root
            steps.append(Step(part, step.do))
        elif re.match(HERE, part):
            steps.append(here(part))
        else:
            raise EvenerError(f"this fix is not a command: {part}")
    return steps


# --- looking -----------------------------------------------------------------------------------------------------


def doctor(*flags: str) -> Callable[[Stage], Seen]:
    """`evener doctor`."""

    def look(stage: Stage) -> Seen:
        began = time.monotonic()
        done = stage.evener("doctor", "--fleet", FLEET, *flags, "--json")
        took_s = time.monotonic() - began
        try:
            findings = from_tree(json.loads(done.stdout)["findings"], list[Finding])
        except ValueError:
            raise EvenerError("evener doctor gave no answer", output=done.stderr) from None
        return Seen(
            command=shlex.join(["evener", "doctor", "--fleet", FLEET, *flags]), findings=findings, took_s=took_s
        )

    return look


# --- small things ------------------------------------------------------------------------------------------------


def end_all(host: Host, but: set[int]) -> None:
    """End every process of a host but these."""
    while left := [pid for pid in host.pids() if pid not in but]:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(POLL_S)


def _wait(running: Mapping[str, subprocess.Popen[bytes]], logs: Mapping[str, Path], raw: Raw) -> dict[str, float]:
    """Until all have ended, or one has failed, or all are silent, or time is up; the seconds that each took."""
    began = heard_at = time.monotonic()
    took: dict[str, float] = {}
    heard = 0
    until = began + raw.within_s
    while len(took) < len(running) and time.monotonic() < min(until, heard_at + raw.quiet_s):
        for name, process in running.items():
            if name not in took and process.poll() is not None:
                took[name] = time.monotonic() - began
                if process.returncode:
                    until = min(until, time.monotonic() + AFTER_THE_FIRST_S)
        if (size := sum(log.stat().st_size for log in logs.values())) != heard:
            heard, heard_at = size, time.monotonic()
        time.sleep(POLL_S)
    return {name: took.get(name, time.monotonic() - began) for name in running}


def _lines(log: Path) -> list[str]:
    return [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
