"""Who does what, where, with which command, and what will it cost? `plan.json` of a run: pure data. It is all that is
needed later to follow, stop or resume the run, from this machine or after a restart of it.

    Prediction (of plan/) + commands for every host (of launch/commands.py) ─▶ Plan
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec

from evener.core.errors import CheckpointError, UsageError
from evener.core.files import read_file, write_atomic
from evener.core.fleet import Fleet, Host
from evener.core.prediction import Prediction
from evener.core.roster import Roster
from evener.core.rundir import BEFORE, FORMAT, RunDir
from evener.core.spec import RunSpec
from evener.core.stored import from_stored, read_stored
from evener.core.world import AgentSpec

ROSTER_FILE = "roster.json"  # in a run's folder on each host, as EVENER_ROSTER tells the ranks
CLUSTER_FILE = "cluster.json"  # beside it, where the ranks may choose another way to agree
JOINED_FILE = "host/joined"  # where a script's `join` says which run directory it has, as EVENER_JOINED tells the ranks


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One host's part of a run. Its ranks are first_rank, first_rank + 1, …

    A host has a folder of its own for the run, whose files are copied to the run directory. The only host of a run on
    this machine alone has the run directory itself: nothing is copied.
    """

    name: str
    host: Host  # how it is reached
    node_rank: int
    first_rank: int
    num_ranks: int
    address: str  # what its ranks listen on, and nothing else
    interface: str
    run: str | None  # the run's folder there, absolute; None: the run directory
    code: str | None  # the project as it was sent; what is new of it goes to its folder there, which is `cwd`
    cwd: str
    argv: list[str]
    is_rank: bool = False  # the program is the one rank itself, and not what starts and watches the ranks
    env: dict[str, str]  # on top of what a session there has
    agent: AgentSpec | None = None  # of a run that hosts may leave and come back to: the program is its agent

    @property
    def is_here(self) -> bool:
        """Is its folder the run directory?"""
        return self.run is None

    def folder(self, rundir: RunDir) -> str:
        """The run's folder on that host."""
        return str(rundir.path.absolute()) if self.run is None else self.run

    def log_path(self, rundir: RunDir) -> Path:
        """What its program printed, here."""
        return rundir.log_path(self.name, self.first_rank if self.is_rank else None)

    def events_path(self, rundir: RunDir) -> Path:
        """The events that its ranks told, here."""
        return rundir.events_path if self.is_here else rundir.path / "hosts" / self.name / "events.jsonl"

    def state_path(self, rundir: RunDir) -> Path:
        """How its supervisor said that it is doing, here."""
        return rundir.path / "host" / "state.json" if self.is_here else rundir.path / "hosts" / self.name / "state.json"

    def shell_line(self) -> str:
        """What to type on that host to do the same by hand."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return f"cd {shlex.quote(self.cwd)} && {' '.join([*env, shlex.join(self.argv)])}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    format: int = FORMAT
    id: str = ""  # marks every process of the run
    kind: str  # train, launch
    address: str = ""  # of the rendezvous, on the first host
    port: int = 0
    roster: Roster | None = None  # with which it begins, and hosts that were added; None of a script of the user's own
    grace_s: float = 0.0  # how long the ranks may take to save when they are told to stop
    spec: RunSpec | None  # as it was asked for; None of a script of the user's own
    project: str | None = None  # the folder here that a script came from
    hosts: list[HostPlan] = []
    fleet_file: str | None = None  # that names them, an absolute path; None: it runs on this machine alone
    prediction: Prediction | None = None  # None: of a script of the user's own, or too little is known

    @property
    def is_here(self) -> bool:
        """Does it run on this machine alone, in the run directory itself?"""
        return len(self.hosts) == 1 and self.hosts[0].is_here

    @property
    def outlives_hosts(self) -> bool:
        """Does it go on without a host that is gone?"""
        return any(host.agent is not None for host in self.hosts)

    @property
    def fleet(self) -> Fleet:
        """The hosts that take part."""
        file = self.fleet_file
        if file is not None and Path(file).is_relative_to(Path.cwd()):
            file = str(Path(file).relative_to(Path.cwd()))
        return Fleet(hosts={host.name: host.host for host in self.hosts}, file=file)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(host.num_ranks for host in self.hosts)

    def host(self, name: str) -> HostPlan:
        """The part of a host."""
        return next(host for host in self.hosts if host.name == name)

    def host_of(self, rank: int) -> HostPlan:
        """Where a rank runs."""
        return next(host for host in self.hosts if host.first_rank <= rank < host.first_rank + host.num_ranks)


def told_roster() -> Roster | None:
    """The Roster that the launcher made for this process; None of one that was started by hand. CheckpointError where
    it is damaged.
    """
    path = os.environ.get("EVENER_ROSTER")
    return None if path is None else read_stored(Path(path), Roster)


def launched_into() -> str | None:
    """The folder that `evener launch` made for the run of this process; None of one that was started otherwise, or has
    told of a run already.
    """
    path = os.environ.get("EVENER_JOINED")
    return None if path is None or Path(path).exists() else str(Path(path).parents[1])


def tell_launcher(rundir: RunDir) -> None:
    """Whoever launched this program finds the records of its (first) run there."""
    path = os.environ.get("EVENER_JOINED")
    if path is not None and not Path(path).exists():
        write_atomic(Path(path), str(rundir.path.absolute()).encode())


def find_plan(rundir: RunDir) -> Plan | None:
    """The plan of a run; None where there is none, as of a worker that was started by hand. CheckpointError where it
    is damaged.
    """
    try:
        text = read_file(_path(rundir))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{_path(rundir)}: {error.strerror}") from None
    return from_stored(text, Plan, FORMAT, _path(rundir), BEFORE)


def read_plan(rundir: RunDir) -> Plan:
    """The plan of a run; UsageError where there is none."""
    plan = find_plan(rundir)
    if plan is None and not rundir.path.exists():
        raise UsageError(
            f"{rundir}: no such run; one that is still being prepared has no directory yet",
            hint="evener runs shows the runs made here; Ctrl-C ends one that is being prepared",
        )
    if plan is None:
        raise UsageError(
            f"{rundir}: nothing that evener started: it has no plan.json", hint="evener runs shows the runs made here"
        )
    if not plan.hosts:
        raise CheckpointError(f"{_path(rundir)}: damaged: it names no host")
    return plan


def read_prediction(rundir: RunDir) -> Prediction | None:
    """What was predicted of a run, wherever it ran; None where nothing was."""
    plan = find_plan(rundir)
    return None if plan is None else plan.prediction


def write_plan(rundir: RunDir, plan: Plan) -> None:
    """Replace plan.json in one step; only its owner may read it."""
    write_atomic(_path(rundir), msgspec.json.format(msgspec.json.encode(plan), indent=2), mode=0o600)


def _path(rundir: RunDir) -> Path:
    return rundir.path / "plan.json"
