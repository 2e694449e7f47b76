"""`plan.json` of a run: each host's ranks and command, and the prediction. Pure data.

This file is all that is needed later to follow, stop or resume the run, even after this machine has restarted.

    Prediction (of plan/) + commands for every host (of launch/commands.py) ─▶ Plan
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from evener.core.base import trusted
from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.file_io import read_file, write_atomic
from evener.core.base.json_files import decode_versioned_json, read_json
from evener.core.base.shell import quote_command, quote_word
from evener.core.cluster.fleet_file import Fleet, HostConfig, HostName, check_host, load_fleet, select_hosts
from evener.core.run.membership_epoch import AGENT_SPEC_FILE, RUN_KEY_FILE, AgentSpec
from evener.core.run.prediction import Prediction
from evener.core.run.roster import Roster
from evener.core.run.run_spec import RunSpec
from evener.core.run.rundir import OLD_FORMAT_HINTS, RUN_FORMAT, RunDir

ROSTER_FILE = "roster.json"  # in the run's folder on each host; EVENER_ROSTER is its path
CLUSTER_FILE = "cluster.json"  # in the same folder, if the ranks may choose another sync strategy
MAX_RANKS = 1 << 16
JOINED_RUN_FILE = "host/joined"  # where a script's `join` writes its run directory; EVENER_JOINED is its path


RankCount = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z")]


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One host's ranks, folders and command. Its ranks are first_rank, first_rank + 1, …

    A host has its own folder for the run, whose files are copied to the run directory. If the run is on this machine
    alone, that folder is the run directory itself and nothing is copied.
    """

    name: HostName
    host: HostConfig  # how to reach it
    node_rank: int
    first_rank: RankCount
    num_ranks: RankCount
    address: str  # the only address on which its ranks listen
    interface: str
    run: str | None  # the run's folder on the host, absolute; None: the run directory
    code: str | None  # the project as sent to the host; its new files are copied to the project's folder, `cwd`
    cwd: str
    argv: list[str]
    is_rank: bool = False  # the program is the only rank itself, not a launcher of ranks
    env: dict[str, str]  # in addition to the environment of a session on the host
    passed_env: list[str] = []  # variables of --env: their values are in the environment of the processes alone
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
    id: RunId = ""  # marks every process of the run
    kind: str  # train, launch
    address: str = ""  # of the rendezvous, on the first host
    port: int = 0
    key: str = ""  # by which its hosts authenticate each other, see `make_run_key`; empty for a single host
    roster: Roster | None = None  # the initial one, and hosts that were added; None for a user's own script
    grace_s: float = 0.0  # how long the ranks may take to save after a request to stop
    spec: RunSpec | None  # as requested; None for a user's own script
    project: str | None = None  # the local folder of a script
    program_digest: str = ""  # of a script's words, and of the files that they name
    hosts: list[HostPlan] = []
    fleet_file: str | None = None  # the fleet file of the hosts, an absolute path; None: this machine alone
    prediction: Prediction | None = None  # None: too little is known

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
        """The fleet of the hosts that take part, as read from a file, which this plan is."""
        file = self.fleet_file or ""
        if file and Path(file).is_relative_to(Path.cwd()):
            file = str(Path(file).relative_to(Path.cwd()))
        return Fleet(hosts={host.name: host.host for host in self.hosts}, file=file)

    @property
    def world_size(self) -> int:
        return sum(host.num_ranks for host in self.hosts)

    def host(self, name: str) -> HostPlan:
        """Return the HostPlan of this name. CheckpointError if there is none, as another file may name the host."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise CheckpointError(f"the run has no host {name}, according to its plan.json")

    def supervisor_spec(self, name: str, *, attached: Path | None = None) -> dict[str, Any]:
        """Return the spec by which a host's supervisor starts the program; `attached` is the lock of its parent."""
        host = self.host(name)
        return {
            "id": self.id,
            "host": host.name,
            "first_rank": host.first_rank,
            "argv": host.argv,
            "is_rank": host.is_rank,
            "has_agent": host.agent is not None,
            # between it and ranks
            "has_launcher": not host.is_rank and not (host.agent is not None and host.agent.is_elastic),
            "cwd": host.cwd,
            "env": dict(host.env),
            "grace_s": self.grace_s,
            "attached": None if attached is None else str(attached),
        }

    def membership_files(self, name: str) -> dict[str, str | None]:
        """Return the roster, agent and key of a host's part of the run (path: content); None: there must be no file."""
        host = self.host(name)
        return {
            ROSTER_FILE: msgspec.json.encode(self.roster).decode() if self.roster else None,
            AGENT_SPEC_FILE: msgspec.json.encode(host.agent).decode() if host.agent else None,
            RUN_KEY_FILE: self.key or None,
        }

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


def fleet_of_run(rundir: RunDir, hosts: Sequence[str]) -> Fleet | None:
    """Return these hosts of a run with what is known of them now, by the fleet file with which it was started.

    None if the run was on this machine alone, or the file has changed or is not here any more.
    """
    plan = read_plan_if_present(rundir)
    if plan is None or plan.fleet_file is None:
        return None
    try:
        return select_hosts(load_fleet(plan.fleet_file), ",".join(hosts))
    except UsageError:
        return None


def read_plan_text(rundir: RunDir) -> bytes | None:
    """Read plan.json as it is; None if there is none. UsageError if it cannot be read."""
    try:
        return read_file(_path(rundir))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{_path(rundir)}: {error.strerror}") from None


def read_plan_if_present(rundir: RunDir) -> Plan | None:
    """Read the plan of a run, or return None if there is none, as for a worker that was started by hand.

    The plan may come from elsewhere: it is checked, but `core/run/trust.py` says whether it may be followed. Raise
    CheckpointError if the plan is damaged.
    """
    text = read_plan_text(rundir)
    return None if text is None else parse_plan(text, _path(rundir))


def parse_plan(text: bytes, path: Path) -> Plan:
    """Parse a plan; `path` names it in errors. CheckpointError if it is damaged, or names what no fleet file may."""
    plan = decode_versioned_json(text, Plan, RUN_FORMAT, path, OLD_FORMAT_HINTS)
    try:
        for host in plan.hosts:
            _check_host_plan(f"hosts.{host.name}", host)
    except UsageError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
    if len({host.name for host in plan.hosts}) < len(plan.hosts):
        raise CheckpointError(f"{path}: damaged: two hosts have one name")
    return plan


def _check_host_plan(where: str, host: HostPlan) -> None:
    """Raise UsageError if a host's settings, addresses or folders are not of the form that evener writes."""
    check_host(where, host.host)
    for key, text in (("address", host.address), ("interface", host.interface)):
        if text.startswith("-") or not text.isprintable():
            raise UsageError(f"{where}: {key} {text!r}: expected a name")
    if host.run is None and not host.host.is_local:
        raise UsageError(f"{where}: run: only this machine can have the run directory as its folder")
    for key, folder in (("run", host.run), ("code", host.code), ("cwd", host.cwd)):
        if folder and (not folder.startswith("/") or ".." in folder.split("/") or "\0" in folder):
            raise UsageError(f"{where}: {key} {folder!r}: expected an absolute path")
    python = host.host.python or ""
    if host.host.is_local and "/" in python and not python.startswith(("/", "~")):
        raise UsageError(f"{where}: python {python!r}: expected an absolute path")
    if any("\0" in word for word in (*host.argv, *host.env, *host.env.values())):
        raise UsageError(f"{where}: its command contains a NUL")


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
    """Replace plan.json atomically; only its owner may read it. UsageError for a path that is not UTF-8.

    Call it with a plan that may be followed: it is trusted from then on.
    """
    try:
        encoded = msgspec.json.encode(plan)
    except UnicodeEncodeError as error:
        raise UsageError(f"{error.object}: not UTF-8, as the paths of a run must be", hint="rename it") from None
    text = msgspec.json.format(encoded, indent=2)
    trusted.trust([plan_digest(text)])
    restore_plan(rundir, text)


def restore_plan(rundir: RunDir, text: bytes) -> None:
    """Replace plan.json by an earlier text, which is trusted if it was before."""
    write_atomic(_path(rundir), text, mode=0o600)


def plan_digest(text: bytes) -> str:
    """Return the digest by which the text of a plan is trusted, in whichever directory it lies."""
    return trusted.digest("plan", text)


def _path(rundir: RunDir) -> Path:
    return rundir.inside("plan.json")
