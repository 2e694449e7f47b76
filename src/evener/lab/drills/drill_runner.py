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

from evener.core.base.decoding import from_builtins
from evener.core.base.errors import EvenerError
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import load_fleet
from evener.core.run.trust import trust_fleet
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.host import LabHost
from evener.lab.lab_spec import HostSpec, LabSpec

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

DIAGNOSIS_TIMEOUT_S = 60.0  # timeout of evener doctor
GRACE_AFTER_FAILURE_S = 1.5  # time left to the other commands after one has failed
POLL_S = 0.02
FLEET_FILE = "fleet.toml"
EVENER_ARGV = [sys.executable, "-c", "import sys; from evener.cli.main import main; sys.argv[0] = 'evener'; main()"]
LOCAL_COMMAND = r"(?:evener|chmod) "  # commands of a fix that run on this machine
_numbers = itertools.count()


@dataclass(frozen=True)
class DrillStep:
    """An action on the lab, with the text that a user would type or read for it."""

    text: str
    apply: Callable[[DrillContext], None]


@dataclass(frozen=True, kw_only=True)
class ManualReproduction:
    """Commands that reproduce a fault by hand, without evener."""

    commands: Mapping[str, str]  # by host; run over ssh, all at the same time
    files: Mapping[str, str] = field(default_factory=dict)  # name → text, written to the home of every host
    prompt: str = "{host}$ {command}"  # how the screen shows a command
    idle_timeout_s: float = 6.0  # stop when no command has printed anything for so long
    timeout_s: float = 20.0
    succeeds_after_fix: bool = False  # the same commands succeed once the fault is fixed
    hang_description: str = ""  # if the commands hang: for how long, and why nothing is reported


@dataclass(frozen=True, kw_only=True)
class ManualOutput:
    """The output and exit status of one command run by hand."""

    command: str
    lines: list[str]
    status: int | None  # None: still running when we stopped it
    took_s: float


@dataclass(frozen=True, kw_only=True)
class DrillDiagnosis:
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
    description: str  # the fault in one line
    lesson: str  # the lesson
    fault: Sequence[DrillStep]
    fix: Sequence[DrillStep] | None = None  # None: the finding's own fix, unchanged
    manual: ManualReproduction | None = None
    silence_reason: str = ""  # without `manual`: why nothing can be seen without evener
    diagnose: Callable[[DrillContext], DrillDiagnosis]
    hosts: Mapping[str, HostSpec]
    is_symmetric: bool = False  # the finding may name host and peer in either order
    manual_clears_fault: bool = False  # the manual reproduction clears the fault: inject it again before the diagnosis
    also_expected: Sequence[str] = ()  # other ids that the same fault correctly causes
    unsupported_reason: Callable[[], str | None] = lambda: None  # why this machine cannot produce the fault
    recovery_s: float = 0.0  # how long the fault may outlive its fix: ARP caches keep an address

    def expected_finding(self, findings: Iterable[Finding]) -> Finding | None:
        """Return the expected finding, if there is one."""
        for finding in findings:
            is_same_place = (
                {finding.host, finding.peer} == {self.host, self.peer}
                if self.is_symmetric
                else finding.host == self.host
            )
            if finding.check == self.check and is_same_place and (self.is_symmetric or finding.peer == self.peer):
                return finding
        return None

    def matching_findings(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the errors and warnings with the expected id, on any host."""
        return [finding for finding in findings if finding.check == self.check and finding.severity != "info"]

    def unexpected_findings(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the errors and warnings with an unexpected id."""
        expected = {self.check, *self.also_expected}
        return [finding for finding in findings if finding.check not in expected and finding.severity != "info"
                and not self.is_of_lab(finding)]  # fmt: skip

    def is_of_lab(self, finding: Finding) -> bool:
        """Return whether a finding is right without any fault: that more hosts than cores share these."""
        return finding.check == "cpu.oversubscribed" and finding.host is None and len(self.hosts) > CORES

    @property
    def where(self) -> str:
        """The place of the finding as text: `b`, or `a ↔ b`."""
        return " ↔ ".join(name for name in (self.host, self.peer) if name) or "all hosts"


class DrillContext:
    """The lab of a drill, its fleet file and the working directory of its commands."""

    def __init__(self, lab: EmulatedLab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        # started by a fault outside the hosts; killed with the drill
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def fleet_file(self) -> Path:
        return self.folder / FLEET_FILE

    def host(self, name: str) -> LabHost:
        return self.lab.host(name)

    def set_fleet_value(self, host: str, key: str, value: object) -> None:
        """Set a key of [hosts.HOST] in the fleet file; None removes it."""
        document = tomlkit.parse(self.fleet_file.read_text())
        table: Any = document["hosts"]
        if value is None:
            table[host].pop(key, None)
        else:
            table[host][key] = value
        self.fleet_file.write_text(tomlkit.dumps(document))
        trust_fleet(load_fleet(self.fleet_file))

    def start_evener(self, *args: str) -> subprocess.Popen[bytes]:
        """Start `run_evener` in the working directory, without waiting for it."""
        null = subprocess.DEVNULL
        self.processes.append(
            subprocess.Popen([*EVENER_ARGV, *args], cwd=self.folder, stdin=null, stdout=null, stderr=null)
        )
        return self.processes[-1]

    def run_evener(self, *args: str, timeout_s: float = DIAGNOSIS_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run `run_evener` in the working directory; raise EvenerError on a timeout."""
        try:
            return subprocess.run(
                [*EVENER_ARGV, *args], cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise EvenerError(f"evener {shlex.join(args)}: timed out after {timeout_s:.0f} s") from error

    def run_manually(self, manual: ManualReproduction) -> dict[str, ManualOutput]:
        """Run commands over ssh on several hosts at once, then kill every process that they left running."""
        before = {host.name: set(host.pids()) for host in self.lab.hosts}
        for host in self.lab.hosts:
            for name, text in manual.files.items():
                (host.home / name).write_text(text)
        logs = {name: self.folder / f"by-hand.{name}" for name in manual.commands}
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name, command in manual.commands.items():
                with logs[name].open("wb") as log:
                    running[name] = subprocess.Popen(
                        self.lab.ssh_argv(name, f"PATH={Path(sys.executable).parent}:$PATH; {command}"),
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    )  # fmt: skip
            took = _wait_for_output(running, logs, manual)
            statuses = {name: process.poll() for name, process in running.items()}
        finally:
            for process in running.values():
                process.kill()
                process.wait()
            for host in self.lab.hosts:
                kill_all_except(host, before[host.name])
        return {
            name: ManualOutput(command=command, lines=_lines(logs[name]), status=statuses[name], took_s=took[name])
            for name, command in manual.commands.items()
        }


class DrillRun:
    """A running drill, as a context manager. Its lab is removed on exit."""

    def __init__(self, *drills: Drill) -> None:
        self.drills = drills
        self.drill = drills[0]

    def __enter__(self) -> DrillRun:
        hosts: dict[str, HostSpec] = {}
        for drill in self.drills:
            hosts |= {name: spec for name, spec in drill.hosts.items() if hosts.get(name, HostSpec()) == HostSpec()}
        self._folder = Path(tempfile.mkdtemp(prefix="evener-drill-"))
        self._lab: EmulatedLab | None = None
        try:
            spec = LabSpec(name=f"drill-{os.getpid()}-{next(_numbers)}", hosts=dict(sorted(hosts.items())))
            self._lab = EmulatedLab.up(spec, out=self._folder / FLEET_FILE)
            self.context = DrillContext(self._lab, self._folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.context.processes if self._lab is not None else ():
            process.kill()
            process.wait()
        if self._lab is not None:
            self._lab.down()
        shutil.rmtree(self._folder, ignore_errors=True)

    def inject_fault(self) -> None:
        """Inject the fault."""
        for drill in self.drills:
            for step in drill.fault:
                step.apply(self.context)

    def reproduce_manually(self) -> dict[str, ManualOutput]:
        """Reproduce the fault without evener; return what each command printed, by host."""
        outputs = self.context.run_manually(self.drill.manual) if self.drill.manual else {}
        if outputs and self.drill.manual_clears_fault:
            self.inject_fault()
        return outputs

    def diagnose(self) -> DrillDiagnosis:
        """Return evener's diagnosis."""
        return self.drill.diagnose(self.context)

    def diagnose_until_fixed(self) -> DrillDiagnosis:
        """Diagnose until no finding is left, or the drill's `recovery_s` is over; return the last diagnosis."""
        deadline = time.monotonic() + max(drill.recovery_s for drill in self.drills)
        while True:
            diagnosis = self.diagnose()
            remaining = [
                finding
                for drill in self.drills
                for finding in (
                    *drill.matching_findings(diagnosis.findings),
                    *drill.unexpected_findings(diagnosis.findings),
                )
            ]
            if not remaining or time.monotonic() >= deadline:
                return diagnosis

    def apply_fix(self, diagnosis: DrillDiagnosis) -> list[str]:
        """Apply the fix; return its steps as text."""
        applied = []
        for drill in self.drills:
            steps = drill.fix
            if steps is None:
                ids = {drill.check, *drill.also_expected}
                steps = [step for finding in diagnosis.findings if finding.check in ids and finding.fix
                         for step in parse_fix(finding.fix)]  # fmt: skip
            for step in steps:
                step.apply(self.context)
                applied.append(step.text)
        return applied


# --- steps -------------------------------------------------------------------------------------------------------


def on_host(host: str, command: str) -> DrillStep:
    """Return the step that runs a shell command on a host."""

    def do(stage: DrillContext) -> None:
        stage.host(host).exec(["sh", "-ec", command])

    return DrillStep(f"on {host}: {command}", do)


def run_locally(command: str) -> DrillStep:
    """Return the step that runs a shell command on this machine, in the drill's working directory."""

    def do(stage: DrillContext) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        subprocess.run(["sh", "-ec", command], cwd=stage.folder, env={**os.environ, "PATH": path}, check=True,
                       stdin=subprocess.DEVNULL, capture_output=True, timeout=DIAGNOSIS_TIMEOUT_S)  # fmt: skip

    return DrillStep(f"$ {command}", do)


def set_fleet_line(host: str, key: str, value: object) -> DrillStep:
    """Return the step that sets a key of [hosts.HOST] in the fleet file; None removes it."""
    line = f"{key} = {json.dumps(value)}" if value is not None else f"without {key}"
    return DrillStep(f"[hosts.{host}] {line}", lambda stage: stage.set_fleet_value(host, key, value))


def make_lab_step(text: str, do: Callable[[DrillContext], object]) -> DrillStep:
    """Return a step that the lab itself performs: on a cable, a link rate, or a file that the kernel shows."""

    def run(stage: DrillContext) -> None:
        do(stage)

    return DrillStep(text, run)


def parse_fix(fix: str) -> list[DrillStep]:
    """Parse the commands and fleet-file lines of a finding's fix. Of alternatives ("; or …"), take the first.

    >>> [step.text for step in parse_fix("[hosts.b] ranks = 1; [hosts.b] threads = 1")]
    ['[hosts.b] ranks = 1', '[hosts.b] threads = 1']
    >>> [step.text for step in parse_fix("on a: ip link set dev eth0 mtu 1400; on b: true; or buy a cable")]
    ['on a: ip link set dev eth0 mtu 1400', 'on b: true']
    """
    steps = []
    for part in re.split(rf"; (?=on [a-z0-9-]+: |\[hosts\.|{LOCAL_COMMAND})", fix.partition("; or ")[0]):
        line = re.fullmatch(r"\[hosts\.([\w-]+)\] (\w+) = (.+)", part)
        command = re.fullmatch(r"on ([a-z0-9-]+): (.+)", part)
        if line:
            steps.append(set_fleet_line(line[1], line[2], json.loads(line[3])))
        elif command:
            step = on_host(command[1], command[2].replace("sudo ", ""))  # entering the host's namespaces makes us root
            steps.append(DrillStep(part, step.apply))
        elif re.match(LOCAL_COMMAND, part):
            steps.append(run_locally(part))
        else:
            raise EvenerError(f"this fix is not a command: {part}")
    return steps


# --- diagnosis -----------------------------------------------------------------------------------------------------


def doctor_diagnosis(*flags: str) -> Callable[[DrillContext], DrillDiagnosis]:
    """Return a function that runs `evener doctor` with these flags and returns its findings."""

    def look(stage: DrillContext) -> DrillDiagnosis:
        began = time.monotonic()
        result = stage.run_evener("doctor", "--fleet", FLEET_FILE, *flags, "--json")
        took_s = time.monotonic() - began
        try:
            findings = from_builtins(json.loads(result.stdout)["findings"], list[Finding])
        except ValueError:
            raise EvenerError("evener doctor printed no findings", output=result.stderr) from None
        return DrillDiagnosis(
            command=shlex.join(["evener", "doctor", "--fleet", FLEET_FILE, *flags]), findings=findings, took_s=took_s
        )

    return look


# --- processes ------------------------------------------------------------------------------------------------


def kill_all_except(host: LabHost, kept_pids: set[int]) -> None:
    """Kill every process of a host except these."""
    while remaining := [pid for pid in host.pids() if pid not in kept_pids]:
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(POLL_S)


def _wait_for_output(
    running: Mapping[str, subprocess.Popen[bytes]], logs: Mapping[str, Path], manual: ManualReproduction
) -> dict[str, float]:
    """Wait until all commands have ended, one has failed, none prints any more, or time is up.

    Return the seconds that each took.
    """
    began = output_at = time.monotonic()
    took: dict[str, float] = {}
    output_bytes = 0
    until = began + manual.timeout_s
    while len(took) < len(running) and time.monotonic() < min(until, output_at + manual.idle_timeout_s):
        for name, process in running.items():
            if name not in took and process.poll() is not None:
                took[name] = time.monotonic() - began
                if process.returncode:
                    until = min(until, time.monotonic() + GRACE_AFTER_FAILURE_S)
        if (size := sum(log.stat().st_size for log in logs.values())) != output_bytes:
            output_bytes, output_at = size, time.monotonic()
        time.sleep(POLL_S)
    return {name: took.get(name, time.monotonic() - began) for name in running}


def _lines(log: Path) -> list[str]:
    return [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
