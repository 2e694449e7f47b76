"""Launch, query and stop a run: each host runs a supervisor that needs no controller afterwards.

preflight ─▶ plan ─▶ send code and data ─▶ start on all hosts ─▶ mirror ─▶ the first failure, or the result

A run on this machine alone is launched the same way (`local_run.py`), but nothing is sent or copied, and it may be
attached to the program that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evener.core.decoding import from_json
from evener.core.errors import HostError, RunError, UsageError
from evener.core.files import read_file
from evener.core.finding import Finding
from evener.core.fleet import RENDEZVOUS_PORT, Fleet
from evener.core.machine import this_machine
from evener.core.plan import CLUSTER_FILE, ROSTER_FILE, HostPlan, Plan, find_plan, write_plan
from evener.core.resolve import Resolved, weights_file
from evener.core.roster import Roster, Seat, first_roster
from evener.core.rundir import RunDir
from evener.core.runwriter import RunWriter
from evener.core.spec import MachineSpec
from evener.core.units import size
from evener.core.world import AGENT_FILE, KEPT_FILE, KEPT_OUT_FILE, KILLED_FILE, NEEDS_FILE, SAVE_FILE, memory_file
from evener.hosts.doctor import Survey, survey
from evener.hosts.seen import AS_THE_FLEET_SAYS
from evener.hosts.session import REMOTE, RemoteError, Session, Sessions, for_each, open_session
from evener.launch.commands import Place, Project, script_plan, train_plan
from evener.launch.failures import Failure, first_failure
from evener.launch.mirror import (
    GONE,
    HostMirror,
    State,
    choose_manifest,
    host_failed,
    merge_events,
    state_of,
    tell,
)
from evener.launch.ship import WORK_S, send
from evener.launch.tree import Tree, describe, describe_data, pack

STOP_S = 600.0

Progress = Callable[[str], None]


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that passed the preflight."""

    id: str
    places: list[Place]
    port: int
    findings: list[Finding]  # warnings, which do not prevent the launch
    fleet_file: str | None = None  # that lists the hosts; None: this machine alone

    @property
    def is_here(self) -> bool:
        """Return whether the run is on this machine alone, with the run directory as its folder."""
        return all(place.is_here for place in self.places)

    def seats(self, machine: MachineSpec) -> list[Seat]:
        """Return the rank slots (device, numeric support), by rank."""
        return [seat for place in self.places for seat in place.seats(machine)]

    def roster(self, resolved: Resolved) -> Roster:
        """Return the initial roster, for hosts of unknown speed. UsageError if they cannot train together."""
        return first_roster(resolved.spec, self.seats(resolved.spec.machine), resolved.shape.block_size)


def prepare(fleet: Fleet, sessions: Sessions, errors: Mapping[str, HostError], name: str, run_id: str | None = None,
            port: int | None = None, machine: MachineSpec = AS_THE_FLEET_SAYS) -> Prepared:  # fmt: skip
    """Run doctor's quick checks on the hosts. RunError with the findings if they cannot train together.

    `machine` holds the run's own settings beside the fleet file.
    """
    wanted_port = port or RENDEZVOUS_PORT
    preflight = _examined(fleet, sessions, errors, wanted_port, machine)
    first = next(iter(fleet.hosts))
    low, high = preflight.facts[first].port_range
    free_port = sessions[first].call(
        "runs", "free_port", address=preflight.ways[first].address, wanted=wanted_port, low=low, high=high
    )
    if free_port != wanted_port:
        if port is not None or free_port is None:
            hint = f"evener doctor{fleet.flag} names who holds it"
            raise RunError(f"{first}: port {wanted_port} is taken", hint=hint)
        preflight = _examined(fleet, sessions, errors, free_port, machine)  # check that the others reach this port, too
    run_id = run_id or secrets.token_hex(6)
    places = [
        Place(
            name=host,
            host=fleet.hosts[host],
            address=preflight.ways[host].address,
            interface=preflight.ways[host].interface,
            python=preflight.facts[host].python,
            workdir=preflight.facts[host].workdir,
            run=f"{preflight.facts[host].workdir}/runs/{name}-{run_id[:6]}",
            cores=preflight.facts[host].cores,
            gpus=preflight.facts[host].gpus,
            gpus_have_bf16=preflight.facts[host].gpus_have_bf16,
            has_bf16=preflight.facts[host].has_bf16,
            is_linux=preflight.facts[host].system.startswith("Linux"),
        )
        for host in fleet.hosts
    ]
    warnings = [finding for finding in preflight.findings if finding.severity == "warning"]
    file = str(Path(fleet.file).absolute()) if fleet.file else None
    return Prepared(id=run_id, places=places, port=free_port, findings=warnings, fleet_file=file)


def _examined(
    fleet: Fleet, sessions: Sessions, errors: Mapping[str, HostError], port: int, machine: MachineSpec
) -> Survey:
    preflight = survey(fleet, sessions, errors, quick=True, port=port, machine=machine)
    if preflight.errors:
        raise RunError(
            f"{len(preflight.errors)} {'obstacle' if len(preflight.errors) == 1 else 'obstacles'} on the fleet",
            hint=f"evener doctor{fleet.flag}{' --private' * machine.private} looks closer",
            output="\n".join(_told(finding) for finding in preflight.errors),
        )
    return preflight


def plan_training(prepared: Prepared, resolved: Resolved, roster: Roster, *, resume: bool) -> tuple[Plan, list[Tree]]:
    """Plan a training with evener's own worker on all hosts; also return the trees to send: corpus and weights."""
    spec = resolved.spec
    weights = None if spec.model.init_from is None or resume else weights_file(spec.model.init_from)
    trees: list[Tree] = []
    init_from: dict[str, str] = {}
    if prepared.is_here:
        data = {place.name: spec.data.data for place in prepared.places}
        if weights is not None:
            init_from = {place.name: str(weights) for place in prepared.places}
    else:
        trees.append(describe_data(spec.data.data))
        data = {place.name: _place_of(trees[0], place) for place in prepared.places}
        if weights is not None:
            trees.append(pack({weights.name: weights}))
            init_from = {place.name: f"{_place_of(trees[1], place)}/{weights.name}" for place in prepared.places}
    port, key = prepared.port, secrets.token_hex(16)
    plan = train_plan(prepared.id, prepared.places, port, spec, roster, data, init_from, resume=resume, key=key)
    return msgspec.structs.replace(plan, fleet_file=prepared.fleet_file), trees


def plan_script(
    prepared: Prepared, folder: Path, program: list[str], environment: Mapping[str, str], include: Sequence[str] = ()
) -> tuple[Plan, list[Tree]]:
    """Plan a user's program on all hosts; also return its project's tree, unless the run is on this machine alone.

    Files of the folder that `include` names are sent even if git ignores them.
    """
    trees = [] if prepared.is_here else [describe(folder, include)]
    project = Project(str(folder), trees[0].digest, project_name(folder)) if trees else None
    plan = script_plan(prepared.id, prepared.places, prepared.port, program, environment, project)
    return msgspec.structs.replace(plan, fleet_file=prepared.fleet_file), trees


def project_name(folder: Path) -> str:
    """Return the name of a project's folder on the hosts: the folder's name and a hash of this machine and its path."""
    where = f"{this_machine().host}:{folder}".encode("utf-8", "surrogateescape")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.") or "project"
    return f"{readable}-{hashlib.blake2b(where, digest_size=4).hexdigest()}"


def deliver(trees: list[Tree], plan: Plan, sessions: Sessions, say: Progress) -> None:
    """Send the blobs that the hosts lack, and update the project's folder on each."""
    for tree in trees:
        for name, arrived in send(sessions, plan.fleet, tree).items():
            if arrived.sent_bytes:
                say(f"{size(arrived.sent_bytes)} sent to {name}")

    def sync(name: str) -> list[int]:
        host = plan.host(name)
        try:
            if host.code is not None:
                return list(sessions[name].call("project", "sync", tree=host.code, folder=host.cwd, timeout_s=WORK_S))
        except RemoteError as error:
            raise host_failed(error, plan.fleet) from None
        return []

    for name, pids in for_each([host.name for host in plan.hosts], sync).items():
        if pids:
            say(f"warning: {name}: another run of this project is active there (pid {pids[0]}): its changed files "
                "were replaced under that run too")  # fmt: skip


def start(
    rundir: RunDir, plan: Plan, sessions: Sessions, *, attached: bool = False
) -> contextlib.AbstractContextManager[object]:
    """Start the run on all hosts. If one cannot start, stop the others and raise a RunError that names it.

    An attached run (on this machine alone) lasts as long as the returned lock: when it is closed, at the latest when
    this program ends for any reason, the ranks save and exit.
    """
    is_new, previous_plan = not rundir.path.exists(), find_plan(rundir)
    attach_lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    try:
        rundir.path.mkdir(parents=True, exist_ok=True)
        if attached:
            attach_lock = _hold(rundir)
        write_plan(rundir, plan)
    except BlockingIOError:
        raise RunError(f"{rundir}: this run is running here already", hint=f"evener logs -f {rundir}") from None
    except OSError as os_error:
        raise UsageError(f"{rundir}: {os_error.strerror}", hint="another --out") from None

    def start_one(name: str) -> str | None:
        return start_host(rundir, plan, name, sessions[name], attached=attached)

    def undo(names: list[str]) -> None:
        """Stop the hosts that were started, and restore the run directory."""
        stopped = stop(rundir, msgspec.structs.replace(plan, hosts=[plan.host(name) for name in names]), now=True)
        if is_new and not any(isinstance(result, HostError) for result in stopped.values()):
            shutil.rmtree(rundir.path)
        elif previous_plan is not None:
            write_plan(rundir, previous_plan)

    names = [host.name for host in plan.hosts]
    try:
        results = for_each(names, start_one)
    except KeyboardInterrupt:
        undo(names)
        raise
    failed = {name: error for name, error in results.items() if error is not None}
    if failed:
        undo([name for name in names if name not in failed])
        name, error = next(iter(failed.items()))
        raise RunError(f"the run did not start on {name}: {error}", hint=f"evener doctor{plan.fleet.flag} looks closer")
    tell(rundir, plan, "launched", hosts=names, world_size=plan.world_size)
    return attach_lock


def start_host(rundir: RunDir, plan: Plan, name: str, session: Session, *, attached: bool = False) -> str | None:
    """Start a host's part of the run. Return None, or the reason if it does not start."""
    host = plan.host(name)
    spec = {
        "id": plan.id,
        "host": host.name,
        "first_rank": host.first_rank,
        "argv": host.argv,
        "is_rank": host.is_rank,
        "has_agent": host.agent is not None,
        "has_launcher": not host.is_rank and not (host.agent is not None and host.agent.lives),  # between it and ranks
        "cwd": host.cwd,
        "env": host.env,
        "grace_s": plan.grace_s,
        "attached": str(_hold_path(rundir)) if attached else None,
    }
    rank_files = [memory_file(local_rank) for local_rank in range(host.num_ranks)]
    stale_files = (CLUSTER_FILE, KEPT_FILE, NEEDS_FILE, KEPT_OUT_FILE, KILLED_FILE, SAVE_FILE, *rank_files)
    files = dict.fromkeys(stale_files, None) | files_of_members(plan, host)
    if plan.prediction is not None and plan.spec is not None and plan.spec.train.sync == "auto":
        files[CLUSTER_FILE] = msgspec.json.encode(plan.prediction.cluster).decode()
    supervisor = (REMOTE / "supervisor.py").read_text()
    try:
        session.call("runs", "start", run=host.folder(rundir), spec=spec, supervisor=supervisor, files=files,
                     timeout_s=WORK_S)  # fmt: skip
    except RemoteError as error:
        return error.message
    except HostError as error:
        session.close()  # and with it the call that may still be running there
        return str(error)
    return None


def files_of_members(plan: Plan, host: HostPlan) -> dict[str, str | None]:
    """Return the membership files of a host's part of the run (path: content); None: the file must not exist."""
    return {
        ROSTER_FILE: msgspec.json.encode(plan.roster).decode() if plan.roster else None,
        AGENT_FILE: msgspec.json.encode(host.agent).decode() if host.agent else None,
    }


def _hold(rundir: RunDir) -> contextlib.AbstractContextManager[object]:
    """Take the lock that ties the run to this program; the kernel releases it however the program ends."""
    path = _hold_path(rundir)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _hold_path(rundir: RunDir) -> Path:
    return rundir.path.absolute() / "host" / "attached"


def note_findings(rundir: RunDir, plan: Plan, prepared: Prepared) -> None:
    """Record the preflight's warnings as events, so that a later report knows that a host was swapping."""
    for finding in prepared.findings:
        facts = {"host": finding.host, "peer": finding.peer, "evidence": finding.evidence, "fix": finding.fix}
        tell(rundir, plan, finding.check, **facts)


def conclude(rundir: RunDir, plan: Plan, ended: Mapping[str, State]) -> Failure | None:
    """Record how the run ended, from the hosts' last states, and return its first failure."""
    failure = first_failure(rundir, plan, ended)
    if failure is None:
        close_manifest(rundir, "stopped")
    else:
        _record_failure(rundir, plan, failure)
    return failure


def close_manifest(rundir: RunDir, verdict: str) -> None:
    """Write the verdict into the manifest if rank 0 could no longer do so."""
    if rundir.is_run() and rundir.manifest().verdict == "running":
        ended = msgspec.structs.replace(rundir.manifest(), verdict=verdict, ended=time.time())
        RunWriter(rundir.path).write_manifest(ended)


def stop(rundir: RunDir, plan: Plan, *, now: bool = False) -> dict[str, State | HostError]:
    """Stop the run on every host; return when no process of it is left on the reachable ones."""

    def end(session: Session, host: HostPlan) -> State:
        state: State = {}
        for item in session.stream("runs", "stop", run=host.folder(rundir), now=now, timeout_s=STOP_S):
            state = item or GONE
        return state_of(state)

    return _ask(plan, end)


def save(rundir: RunDir, plan: Plan) -> None:
    """Request a checkpoint after the next steps, through the first reachable host that takes part.

    Raises the last host's error if none can be reached.
    """
    training_hosts = set(rundir.manifest().roster.hosts)
    for host in [host for host in plan.hosts if host.name in training_hosts] or plan.hosts:
        try:
            with contextlib.closing(open_session(host.name, host.host)) as session:
                session.call("runs", "put", run=host.folder(rundir), files={SAVE_FILE: ""})
            return
        except RemoteError as error:
            last_error = host_failed(error, plan.fleet)
        except HostError as error:
            last_error = error
    raise last_error


def states(rundir: RunDir, plan: Plan) -> dict[str, State | HostError]:
    """Query every host for the state of the run."""
    return _ask(plan, lambda session, host: state_of(session.call("runs", "status", run=host.folder(rundir)) or GONE))


def known_states(rundir: RunDir, plan: Plan) -> dict[str, State]:
    """Return the last mirrored state of every host, without a query."""
    cached = {}
    for host in plan.hosts:
        try:
            cached[host.name] = state_of(from_json(read_file(host.state_path(rundir)), dict[str, Any]))
        except (OSError, msgspec.MsgspecError):  # missing or damaged: its host is queried again
            cached[host.name] = {}
    return cached


def catch_up(rundir: RunDir, plan: Plan) -> dict[str, HostError]:
    """Mirror all hosts once; return the errors of those that could not be reached."""

    def copy(name: str) -> HostError | None:
        try:
            HostMirror(rundir, plan, name).catch_up()
        except HostError as error:
            return error
        return None

    copied = for_each([host.name for host in plan.hosts], copy)
    merge_events(rundir, plan)
    choose_manifest(rundir, plan)
    return {name: error for name, error in copied.items() if error is not None}


def _ask(plan: Plan, question: Callable[[Session, HostPlan], State]) -> dict[str, State | HostError]:
    def ask(name: str) -> State | HostError:
        host = plan.host(name)
        try:
            with contextlib.closing(open_session(name, host.host)) as session:
                return question(session, host)
        except RemoteError as error:
            return host_failed(error, plan.fleet)
        except HostError as error:
            return error

    return for_each([host.name for host in plan.hosts], ask)


def _record_failure(rundir: RunDir, plan: Plan, failure: Failure) -> None:
    """Record the failure in the events, once for each start, and in the manifest if rank 0 could no longer do so."""
    since_start: list[str] = []
    for event in rundir.events():
        since_start = [] if event["event"] in ("launched", "world") else [*since_start, event["event"]]
    if "failure" not in since_start:
        tell(
            rundir, plan, "failure", host=failure.host, rank=failure.rank, kind="exit", error=failure.how,
            hint=failure.hint, output=failure.output,
        )  # fmt: skip
    close_manifest(rundir, "failed")


def _place_of(tree: Tree, place: Place) -> str:
    return f"{place.workdir}/trees/{tree.digest}"


def _told(finding: Finding) -> str:
    where = f"{finding.host} → {finding.peer}" if finding.host and finding.peer else finding.host or ""
    return f"{finding.check}  {where}: {finding.evidence}\n    {finding.fix}"
