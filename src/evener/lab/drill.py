"""Run a fault drill: inject one fault into a fresh lab, reproduce it by hand, diagnose it with evener, fix it.

with DrillRun(drill) as run:
    run.inject_fault()
    run.reproduce_manually()    # torchrun or ssh by hand: what a user would see
    diagnosis = run.diagnose()  # evener doctor, or a run: what it reports
    assert drill.expected_finding(diagnosis.findings)
    run.apply_fix(diagnosis)    # the finding's own fix, unchanged, if a lab can apply it

A drill is a row of a table (see drill_catalog.py). Everything runs as a user would run it: over ssh, and `evener` as
a program.
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

LOOK_S = 60.0  # timeout of evener doctor
AFTER_THE_FIRST_S = 1.5  # time left to the other commands after one has failed
POLL_S = 0.02
FLEET = "fleet.toml"
EVENER = [sys.executable, "-c", "import sys; from evener.cli.main import main; sys.argv[0] = 'evener'; main()"]
HERE = r"(?:evener|chmod) "  # commands of a fix that run on this machine
_numbers = itertools.count()


@dataclass(frozen=True)
class Step:
    """An action on the lab, with the text that a user would type or read for it."""

    text: str
    do: Callable[[Stage], None]


@dataclass(frozen=True, kw_only=True)
class Raw:
    """Commands that reproduce a fault by hand, without evener."""

    commands: Mapping[str, str]  # by host; run over ssh, all at the same time
    files: Mapping[str, str] = field(default_factory=dict)  # name → text, written to the home of every host
    typed: str = "{host}$ {command}"  # how the screen shows a command
    quiet_s: float = 6.0  # stop when no command has printed anything for so long
    within_s: float = 20.0
    works_when_mended: bool = False  # the same commands succeed once the fault is fixed
    waits: str = ""  # if the commands hang: for how long, and why nothing is reported


@dataclass(frozen=True, kw_only=True)
class Heard:
    """The output and exit status of one command run by hand."""

    command: str
    lines: list[str]
    status: int | None  # None: still running when we stopped it
    took_s: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The findings that evener reported."""

    command: str
    findings: list[Finding]
    took_s: float
    lines: list[str] = field(default_factory=list)  # output of a run


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One fault drill: a fault, its fix, and the finding that evener must report."""

    name: str
    check: str  # id of the expected finding
    host: str | None  # host of the expected finding
    peer: str | None = None
    says: str  # the fault in one line
    why: str  # the lesson
    fault: Sequence[Step]
    mend: Sequence[Step] | None = None  # None: the finding's own fix, unchanged
    raw: Raw | None = None
    silence: str = ""  # without `manual`: why nothing can be seen without evener
    look: Callable[[Stage], Seen]
    hosts: Mapping[str, HostSpec]
    is_pair: bool = False  # the finding may name host and peer in either order
    used_up: bool = False  # the manual reproduction clears the fault: inject it again before the diagnosis
    may_also: Sequence[str] = ()  # other ids that the same fault correctly causes
    lacks: Callable[[], str | None] = lambda: None  # why this machine cannot produce the fault
    lasts_s: float = 0.0  # how long the fault may outlive its fix: ARP caches keep an address

    def named_in(self, findings: Iterable[Finding]) -> Finding | None:
        """Return the expected finding, if there is one."""
        for finding in findings:
            is_same_place = (
                {finding.host, finding.peer} == {self.host, self.peer} if self.is_pair else finding.host == self.host
            )
            if finding.check == self.check and is_same_place and (self.is_pair or finding.peer == self.peer):
                return finding
        return None

    def found_in(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the errors and warnings with the expected id, on any host."""
        return [finding for finding in findings if finding.check == self.check and finding.severity != "info"]

    def others_in(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the errors and warnings with an unexpected id."""
        expected = {self.check, *self.may_also}
        return [finding for finding in findings if finding.check not in expected and finding.severity != "info"]

    @property
    def where(self) -> str:
        """The place of the finding as text: `b`, or `a ↔ b`."""
        return " ↔ ".join(name for name in (self.host, self.peer) if name) or "all hosts"


class Stage:
    """The lab of a drill, its fleet file and the working directory of its commands."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.started: list[subprocess.Popen[bytes]] = []  # started by a fault outside the hosts; killed with the drill

    @property
    def fleet(self) -> Path:
        return self.folder / FLEET

    def host(self, name: str) -> Host:
        return self.lab.host(name)

    def set_in_fleet(self, host: str, key: str, value: object) -> None:
        """Set a key of [hosts.HOST] in the fleet file; None removes it."""
        document = tomlkit.parse(self.fleet.read_text())
        table: Any = document["hosts"]
        if value is None:
            table[host].pop(key, None)
        else:
            table[host][key] = value
        self.fleet.write_text(tomlkit.dumps(document))

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        """Start `evener` in the working directory, without waiting for it."""
        null = subprocess.DEVNULL
        self.started.append(subprocess.Popen([*EVENER, *args], cwd=self.folder, stdin=null, stdout=null, stderr=null))
        return self.started[-1]

    def evener(self, *args: str, timeout_s: float = LOOK_S) -> subprocess.CompletedProcess[str]:
        """Run `evener` in the working directory; raise EvenerError on a timeout."""
        try:
            return subprocess.run(
                [*EVENER, *args], cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise EvenerError(f"evener {shlex.join(args)}: timed out after {timeout_s:.0f} s") from error

    def by_hand(self, raw: Raw) -> dict[str, Heard]:
        """Run commands over ssh on several hosts at once, then kill every process that they left running."""
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
    """A running drill, as a context manager. Its lab is removed on exit."""

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
        """Inject the fault."""
        for drill in self.drills:
            for step in drill.fault:
                step.do(self.stage)

    def without(self) -> dict[str, Heard]:
        """Reproduce the fault without evener; return what each command printed, by host."""
        outputs = self.stage.by_hand(self.drill.raw) if self.drill.raw else {}
        if outputs and self.drill.used_up:
            self.break_it()
        return outputs

    def look(self) -> Seen:
        """Return evener's diagnosis."""
        return self.drill.look(self.stage)

    def look_again(self) -> Seen:
        """Diagnose until no finding is left, or the drill's `recovery_s` is over; return the last diagnosis."""
        deadline = time.monotonic() + max(drill.lasts_s for drill in self.drills)
        while True:
            diagnosis = self.look()
            remaining = [
                finding
                for drill in self.drills
                for finding in (*drill.found_in(diagnosis.findings), *drill.others_in(diagnosis.findings))
            ]
            if not remaining or time.monotonic() >= deadline:
                return diagnosis

    def mend(self, seen: Seen) -> list[str]:
        """Apply the fix; return its steps as text."""
        applied = []
        for drill in self.drills:
            steps = drill.mend
            if steps is None:
                ids = {drill.check, *drill.may_also}
                steps = [step for finding in seen.findings if finding.check in ids and finding.fix
                         for step in steps_of(finding.fix)]  # fmt: skip
            for step in steps:
                step.do(self.stage)
                applied.append(step.text)
        return applied


# --- steps -------------------------------------------------------------------------------------------------------


def on(host: str, command: str) -> Step:
    """Return the step that runs a shell command on a host."""

    def do(stage: Stage) -> None:
        stage.host(host).exec(["sh", "-ec", command])

    return Step(f"on {host}: {command}", do)


def here(command: str) -> Step:
    """Return the step that runs a shell command on this machine, in the drill's working directory."""

    def do(stage: Stage) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        subprocess.run(["sh", "-ec", command], cwd=stage.folder, env={**os.environ, "PATH": path}, check=True,
                       stdin=subprocess.DEVNULL, capture_output=True, timeout=LOOK_S)  # fmt: skip

    return Step(f"$ {command}", do)


def fleet_line(host: str, key: str, value: object) -> Step:
    """Return the step that sets a key of [hosts.HOST] in the fleet file; None removes it."""
    line = f"{key} = {json.dumps(value)}" if value is not None else f"without {key}"
    return Step(f"[hosts.{host}] {line}", lambda stage: stage.set_in_fleet(host, key, value))


def lab_step(text: str, do: Callable[[Stage], object]) -> Step:
    """Return a step that the lab itself performs: on a cable, a link rate, or a file that the kernel shows."""

    def run(stage: Stage) -> None:
        do(stage)

    return Step(text, run)


def steps_of(fix: str) -> list[Step]:
    """Parse the commands and fleet-file lines of a finding's fix. Of alternatives ("; or …"), take the first.

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
            step = on(command[1], command[2].replace("sudo ", ""))  # entering the host's namespaces makes us root
            steps.append(Step(part, step.do))
        elif re.match(HERE, part):
            steps.append(here(part))
        else:
            raise EvenerError(f"this fix is not a command: {part}")
    return steps


# --- diagnosis -----------------------------------------------------------------------------------------------------


def doctor(*flags: str) -> Callable[[Stage], Seen]:
    """Return a function that runs `evener doctor` with these flags and returns its findings."""

    def look(stage: Stage) -> Seen:
        began = time.monotonic()
        result = stage.evener("doctor", "--fleet", FLEET, *flags, "--json")
        took_s = time.monotonic() - began
        try:
            findings = from_tree(json.loads(result.stdout)["findings"], list[Finding])
        except ValueError:
            raise EvenerError("evener doctor printed no findings", output=result.stderr) from None
        return Seen(
            command=shlex.join(["evener", "doctor", "--fleet", FLEET, *flags]), findings=findings, took_s=took_s
        )

    return look


# --- processes ------------------------------------------------------------------------------------------------


def end_all(host: Host, but: set[int]) -> None:
    """Kill every process of a host except these."""
    while remaining := [pid for pid in host.pids() if pid not in but]:
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(POLL_S)


def _wait(running: Mapping[str, subprocess.Popen[bytes]], logs: Mapping[str, Path], raw: Raw) -> dict[str, float]:
    """Wait until all commands have ended, one has failed, none prints any more, or time is up.

    Return the seconds that each took.
    """
    began = output_at = time.monotonic()
    took: dict[str, float] = {}
    output_bytes = 0
    until = began + raw.within_s
    while len(took) < len(running) and time.monotonic() < min(until, output_at + raw.quiet_s):
        for name, process in running.items():
            if name not in took and process.poll() is not None:
                took[name] = time.monotonic() - began
                if process.returncode:
                    until = min(until, time.monotonic() + AFTER_THE_FIRST_S)
        if (size := sum(log.stat().st_size for log in logs.values())) != output_bytes:
            output_bytes, output_at = size, time.monotonic()
        time.sleep(POLL_S)
    return {name: took.get(name, time.monotonic() - began) for name in running}


def _lines(log: Path) -> list[str]:
    return [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
