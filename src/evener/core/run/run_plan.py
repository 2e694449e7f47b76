"""`plan.json` of a run: each host's ranks and command, and the prediction. Pure data.

This file is all that is needed later to follow, stop or resume the run, even after this machine has restarted.

    Prediction (of plan/) + commands for every host (of launch/commands.py) ─▶ Plan
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.file_io import read_file, write_atomic
from evener.core.base.json_files import decode_versioned_json, read_json
from evener.core.base.shell import quote_command, quote_word
from evener.core.cluster.fleet_file import Fleet, HostConfig
from evener.core.run.membership_epoch import AgentSpec
from evener.core.run.prediction import Prediction
from evener.core.run.roster import Roster
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import OLD_FORMAT_HINTS, RUN_FORMAT, RunDir

ROSTER_FILE = "roster.json"  # in the run's folder on each host; EVENER_ROSTER is its path
CLUSTER_FILE = "cluster.json"  # in the same folder, if the ranks may choose another sync strategy
JOINED_RUN_FILE = "host/joined"  # where a script's `join` writes its run directory; EVENER_JOINED is its path


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One host's ranks, folders and command. Its ranks are first_rank, first_rank + 1, …

    A host has its own folder for the run, whose files are copied to the run directory. If the run is on this machine
    alone, that folder is the run directory itself and nothing is copied.
    """

    name: str
    host: HostConfig  # how to reach it
    node_rank: int
    first_rank: int
    num_ranks: int
    address: str  # the only address on which its ranks listen
    interface: str
    run: str | None  # the run's folder on the host, absolute; None: the run directory
    code: str | None  # the project as sent to the host; its new files are copied to the project's folder, `cwd`
    cwd: str
    argv: list[str]
    is_rank: bool = False  # the program is the only rank itself, not a launcher of ranks
    env: dict[str, str]  # in addition to the environment of a session on the host
    passed_env: list[str] = []  # variables of --env: their values are sent to the host, and not stored here
    agent: AgentSpec | None = None  # of a run with dynamic membership: the program is the host's agent

    @property
    def is_local_run(self) -> bool:
        """Return whether the host's folder is the run directory."""
        return self.run is None

    def run_folder(self, rundir: RunDir) -> str:
        """Return the run's folder on the host."""
        return str(rundir.path.absolute()) if self.run is None else self.run

    def log_path(self, rundir: RunDir) -> Path:
        """Return the local log of the host's program."""
        return rundir.log_path(self.name, self.first_rank if self.is_rank else None)

    def events_path(self, rundir: RunDir) -> Path:
        """Return the local file of the events that the host's ranks recorded."""
        return rundir.events_path if self.is_local_run else rundir.inside("hosts", self.name, "events.jsonl")

    def supervisor_state_path(self, rundir: RunDir) -> Path:
        """Return the local copy of the host's supervisor state."""
        return (
            rundir.inside("host", "state.json")
            if self.is_local_run
            else rundir.inside("hosts", self.name, "state.json")
        )

    def shell_command(self) -> str:
        """Return the shell command that runs the program by hand on the host."""
        env = [f"{name}={quote_command([value])}" for name, value in self.env.items()]
        env += [f'{name}="${name}"' for name in self.passed_env]
        return f"cd {quote_word(self.cwd)} && {' '.join([*env, quote_command(self.argv)])}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a run: `plan.json`."""

    format: int = RUN_FORMAT
    id: str = ""  # marks every process of the run
    kind: str  # train, launch
    address: str = ""  # of the rendezvous, on the first host
    port: int = 0
    key: str = ""  # by which its hosts authenticate each other, see `make_run_key`; empty for a single host
    roster: Roster | None = None  # the initial one, and hosts that were added; None for a user's own script
    grace_s: float = 0.0  # how long the ranks may take to save after a request to stop
    spec: RunSpec | None  # as requested; None for a user's own script
    project: str | None = None  # the local folder of a script
    hosts: list[HostPlan] = []
    fleet_file: str | None = None  # the fleet file of the hosts, an absolute path; None: this machine alone
    prediction: Prediction | None = None  # None: a user's own script, or too little is known

    @property
    def is_local_run(self) -> bool:
        """Return whether the run is on this machine alone, in the run directory itself."""
        return len(self.hosts) == 1 and self.hosts[0].is_local_run

    @property
    def has_dynamic_membership(self) -> bool:
        """Return whether hosts may leave and join during the run."""
        return any(host.agent is not None for host in self.hosts)

    @property
    def fleet(self) -> Fleet:
        """The fleet of the hosts that take part."""
        file = self.fleet_file
        if file is not None and Path(file).is_relative_to(Path.cwd()):
            file = str(Path(file).relative_to(Path.cwd()))
        return Fleet(hosts={host.name: host.host for host in self.hosts}, file=file)

    @property
    def world_size(self) -> int:
        return sum(host.num_ranks for host in self.hosts)

    def host(self, name: str) -> HostPlan:
        """Return the HostPlan of this name."""
        return next(host for host in self.hosts if host.name == name)

    def host_of_rank(self, rank: int) -> HostPlan:
        """Return the HostPlan of the host on which a rank runs."""
        return next(host for host in self.hosts if host.first_rank <= rank < host.first_rank + host.num_ranks)


def read_launcher_roster() -> Roster | None:
    """Read the launcher's Roster for this process; None if it was started by hand. Raise CheckpointError if damaged."""
    path = os.environ.get("EVENER_ROSTER")
    return None if path is None else read_json(Path(path), Roster)


def launcher_run_folder() -> str | None:
    """Return the folder that `evener launch` made for this process's run.

    None if the process was started otherwise, or has already reported a run.
    """
    path = os.environ.get("EVENER_JOINED")
    return None if path is None or Path(path).exists() else str(Path(path).parents[1])


def report_run_to_launcher(rundir: RunDir) -> None:
    """Report the directory of this program's first run to its launcher."""
    path = os.environ.get("EVENER_JOINED")
    if path is not None and not Path(path).exists():
        write_atomic(Path(path), str(rundir.path.absolute()).encode())


def read_plan_if_present(rundir: RunDir) -> Plan | None:
    """Read the plan of a run, or return None if there is none, as for a worker that was started by hand.

    Raise CheckpointError if the plan is damaged.
    """
    try:
        text = read_file(_path(rundir))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{_path(rundir)}: {error.strerror}") from None
    return decode_versioned_json(text, Plan, RUN_FORMAT, _path(rundir), OLD_FORMAT_HINTS)


def read_plan(rundir: RunDir) -> Plan:
    """Read the plan of a run. Raise UsageError if there is none."""
    plan = read_plan_if_present(rundir)
    if plan is None and not rundir.path.exists():
        raise UsageError(
            f"{rundir}: no such run; a run in preparation has no directory yet",
            hint="evener runs shows the runs made here; Ctrl-C ends one that is being prepared",
        )
    if plan is None:
        raise UsageError(
            f"{rundir}: not started by evener: it has no plan.json", hint="evener runs shows the runs made here"
        )
    if not plan.hosts:
        raise CheckpointError(f"{_path(rundir)}: damaged: it names no host")
    return plan


def read_prediction(rundir: RunDir) -> Prediction | None:
    """Read the prediction of a run, or return None if there is none."""
    plan = read_plan_if_present(rundir)
    return None if plan is None else plan.prediction


def write_plan(rundir: RunDir, plan: Plan) -> None:
    """Replace plan.json atomically; only its owner may read it. UsageError for a path that is not UTF-8."""
    try:
        text = msgspec.json.encode(plan)
    except UnicodeEncodeError as error:
        raise UsageError(f"{error.object}: not UTF-8, as the paths of a run must be", hint="rename it") from None
    write_atomic(_path(rundir), msgspec.json.format(text, indent=2), mode=0o600)


def _path(rundir: RunDir) -> Path:
    return rundir.inside("plan.json")
