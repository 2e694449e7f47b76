"""How is a run started, followed and ended? On every host by a supervisor that needs nobody afterwards.

preflight ─▶ plan ─▶ send code and data ─▶ start on all hosts ─▶ mirror ─▶ the first failure, or the result

A run on this machine alone goes the same way (`here.py`); there is nothing to send, nothing to copy, and it may be
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
    """Hosts that were examined and may take part."""

    id: str
    places: list[Place]
    port: int
    findings: list[Finding]  # warnings that do not stand in the way
    fleet_file: str | None = None  # that names them; None: this machine alone

    @property
    def is_here(self) -> bool:
        """Is it this machine alone, the run's folder being the run directory?"""
        return all(place.is_here for place in self.places)

    def seats(self, machine: MachineSpec) -> list[Seat]:
        """What its ranks take, by rank."""
        return [seat for place in self.places for seat in place.seats(machine)]

    def roster(self, resolved: Resolved) -> Roster:
        """With which a training on them begins where nobody knows how fast they are; UsageError where none can."""
        return first_roster(resolved.spec, self.seats(resolved.spec.machine), resolved.shape.block_size)


def prepare(fleet: Fleet, sessions: Sessions, errors: Mapping[str, HostError], name: str, run_id: str | None = None,
            port: int | None = None, machine: MachineSpec = AS_THE_FLEET_SAYS) -> Prepared:  # fmt: skip
    """Look at the hosts as `doctor` does, quickly; RunError with the findings where they cannot train together.

    `machine` is what the run asks of them beside its fleet file.
    """
    wanted = port or RENDEZVOUS_PORT
    found = _examined(fleet, sessions, errors, wanted, machine)
    first = next(iter(fleet.hosts))
    low, high = found.facts[first].port_range
    free = sessions[first].call(
        "runs", "free_port", address=found.ways[first].address, wanted=wanted, low=low, high=high
    )
    if free != wanted:
        if port is not None or free is None:
            raise RunError(f"{first}: port {wanted} is taken", hint=f"evener doctor{fleet.flag} names who holds it")
        found = _examined(fleet, sessions, errors, free, machine)  # is this one open to the others, too?
    run_id = run_id or secrets.token_hex(6)
    places = [
        Place(
            name=host,
            host=fleet.hosts[host],
            address=found.ways[host].address,
            interface=found.ways[host].interface,
            python=found.facts[host].python,
            workdir=found.facts[host].workdir,
            run=f"{found.facts[host].workdir}/runs/{name}-{run_id[:6]}",
            cores=found.facts[host].cores,
            gpus=found.facts[host].gpus,
            gpus_have_bf16=found.facts[host].gpus_have_bf16,
            has_bf16=found.facts[host].has_bf16,
            is_linux=found.facts[host].system.startswith("Linux"),
        )
        for host in fleet.hosts
    ]
    warnings = [finding for finding in found.findings if finding.severity == "warning"]
    file = str(Path(fleet.file).absolute()) if fleet.file else None
    return Prepared(id=run_id, places=places, port=free, findings=warnings, fleet_file=file)


def _examined(
    fleet: Fleet, sessions: Sessions, errors: Mapping[str, HostError], port: int, machine: MachineSpec
) -> Survey:
    found = survey(fleet, sessions, errors, quick=True, port=port, machine=machine)
    if found.errors:
        raise RunError(
            f"{len(found.errors)} {'obstacle' if len(found.errors) == 1 else 'obstacles'} on the fleet",
            hint=f"evener doctor{fleet.flag}{' --private' * machine.private} looks closer",
            output="\n".join(_told(finding) for finding in found.errors),
        )
    return found


def plan_training(prepared: Prepared, resolved: Resolved, roster: Roster, *, resume: bool) -> tuple[Plan, list[Tree]]:
    """evener's own worker on all hosts, and what they must have for it: corpus and weights."""
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
    """A program of the user's own on all hosts, and its project, which on this machine alone stays where it is.

    Of the folder `include` travels too, though git ignores it.
    """
    trees = [] if prepared.is_here else [describe(folder, include)]
    project = Project(str(folder), trees[0].digest, project_name(folder)) if trees else None
    plan = script_plan(prepared.id, prepared.places, prepared.port, program, environment, project)
    return msgspec.structs.replace(plan, fleet_file=prepared.fleet_file), trees


def project_name(folder: Path) -> str:
    """Of its place on every host: the folder's own, and of which machine and where it is."""
    where = f"{this_machine().host}:{folder}".encode("utf-8", "surrogateescape")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.") or "project"
    return f"{readable}-{hashlib.blake2b(where, digest_size=4).hexdigest()}"


def deliver(trees: list[Tree], plan: Plan, sessions: Sessions, say: Progress) -> None:
    """Send what the hosts lack, and bring a project's folder there up to date."""
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
            say(f"warning: {name}: another run of this project is going on there (pid {pids[0]}): what changed of its "
                "files changed under it too")  # fmt: skip


def start(
    rundir: RunDir, plan: Plan, sessions: Sessions, *, attached: bool = False
) -> contextlib.AbstractContextManager[object]:
    """Start the run on all hosts; where one cannot, the others are ended again and RunError says which.

    A run that is attached (on this machine alone) lasts as long as what is returned: when that is closed, at the latest
    with this program, however it ends, the ranks save and leave.
    """
    is_new, before = not rundir.path.exists(), find_plan(rundir)
    hold: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    try:
        rundir.path.mkdir(parents=True, exist_ok=True)
        if attached:
            hold = _hold(rundir)
        write_plan(rundir, plan)
    except BlockingIOError:
        raise RunError(f"{rundir}: this run is running here already", hint=f"evener logs -f {rundir}") from None
    except OSError as refused:
        raise UsageError(f"{rundir}: {refused.strerror}", hint="another --out") from None

    def begin(name: str) -> str | None:
        return start_host(rundir, plan, name, sessions[name], attached=attached)

    def undo(names: list[str]) -> None:
        """End what was started, and leave the run directory as it was."""
        ended = stop(rundir, msgspec.structs.replace(plan, hosts=[plan.host(name) for name in names]), now=True)
        if is_new and not any(isinstance(one, HostError) for one in ended.values()):
            shutil.rmtree(rundir.path)
        elif before is not None:
            write_plan(rundir, before)

    names = [host.name for host in plan.hosts]
    try:
        told = for_each(names, begin)
    except KeyboardInterrupt:
        undo(names)
        raise
    failed = {name: error for name, error in told.items() if error is not None}
    if failed:
        undo([name for name in names if name not in failed])
        name, error = next(iter(failed.items()))
        raise RunError(f"the run did not start on {name}: {error}", hint=f"evener doctor{plan.fleet.flag} looks closer")
    tell(rundir, plan, "launched", hosts=names, world_size=plan.world_size)
    return hold


def start_host(rundir: RunDir, plan: Plan, name: str, session: Session, *, attached: bool = False) -> str | None:
    """Start a host's part of the run; why it does not start, None where it does."""
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
    of_ranks = [memory_file(local_rank) for local_rank in range(host.num_ranks)]
    of_before = (CLUSTER_FILE, KEPT_FILE, NEEDS_FILE, KEPT_OUT_FILE, KILLED_FILE, SAVE_FILE, *of_ranks)
    files = dict.fromkeys(of_before, None) | files_of_members(plan, host)
    if plan.prediction is not None and plan.spec is not None and plan.spec.train.sync == "auto":
        files[CLUSTER_FILE] = msgspec.json.encode(plan.prediction.cluster).decode()
    supervisor = (REMOTE / "supervisor.py").read_text()
    try:
        session.call("runs", "start", run=host.folder(rundir), spec=spec, supervisor=supervisor, files=files,
                     timeout_s=WORK_S)  # fmt: skip
    except RemoteError as error:
        return error.message
    except HostError as error:
        session.close()  # and with it what it may still be doing there
        return str(error)
    return None


def files_of_members(plan: Plan, host: HostPlan) -> dict[str, str | None]:
    """What a host's part of the run holds of who takes part, by file; None: no such file."""
    return {
        ROSTER_FILE: msgspec.json.encode(plan.roster).decode() if plan.roster else None,
        AGENT_FILE: msgspec.json.encode(host.agent).decode() if host.agent else None,
    }


def _hold(rundir: RunDir) -> contextlib.AbstractContextManager[object]:
    """A lock that this program alone has, and that no way to end it leaves behind."""
    path = _hold_path(rundir)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _hold_path(rundir: RunDir) -> Path:
    return rundir.path.absolute() / "host" / "attached"


def note_findings(rundir: RunDir, plan: Plan, prepared: Prepared) -> None:
    """The preflight's warnings as events: whoever explains the run later must know that a host was swapping."""
    for finding in prepared.findings:
        facts = {"host": finding.host, "peer": finding.peer, "evidence": finding.evidence, "fix": finding.fix}
        tell(rundir, plan, finding.check, **facts)


def conclude(rundir: RunDir, plan: Plan, ended: Mapping[str, State]) -> Failure | None:
    """Record how a run ended of which these are the hosts' last states; its first failure."""
    failure = first_failure(rundir, plan, ended)
    if failure is None:
        close_manifest(rundir, "stopped")
    else:
        _record_failure(rundir, plan, failure)
    return failure


def close_manifest(rundir: RunDir, verdict: str) -> None:
    """How the run ended, of whose end rank 0 could not tell any more."""
    if rundir.is_run() and rundir.manifest().verdict == "running":
        ended = msgspec.structs.replace(rundir.manifest(), verdict=verdict, ended=time.time())
        RunWriter(rundir.path).write_manifest(ended)


def stop(rundir: RunDir, plan: Plan, *, now: bool = False) -> dict[str, State | HostError]:
    """End the run on every host; returns when no process of it is left on those that can be reached."""

    def end(session: Session, host: HostPlan) -> State:
        state: State = {}
        for item in session.stream("runs", "stop", run=host.folder(rundir), now=now, timeout_s=STOP_S):
            state = item or GONE
        return state_of(state)

    return _ask(plan, end)


def save(rundir: RunDir, plan: Plan) -> None:
    """Ask the ranks for a checkpoint after their next steps, on the first host that takes part and can be reached; the
    error of the last where none can.
    """
    train = set(rundir.manifest().roster.hosts)
    for host in [host for host in plan.hosts if host.name in train] or plan.hosts:
        try:
            with contextlib.closing(open_session(host.name, host.host)) as session:
                session.call("runs", "put", run=host.folder(rundir), files={SAVE_FILE: ""})
            return
        except RemoteError as error:
            failed = host_failed(error, plan.fleet)
        except HostError as error:
            failed = error
    raise failed


def states(rundir: RunDir, plan: Plan) -> dict[str, State | HostError]:
    """How the run is doing on every host."""
    return _ask(plan, lambda session, host: state_of(session.call("runs", "status", run=host.folder(rundir)) or GONE))


def known_states(rundir: RunDir, plan: Plan) -> dict[str, State]:
    """The last state of every host that came home; nobody is asked."""
    known = {}
    for host in plan.hosts:
        try:
            known[host.name] = state_of(from_json(read_file(host.state_path(rundir)), dict[str, Any]))
        except (OSError, msgspec.MsgspecError):  # none, or damaged: its host is asked again
            known[host.name] = {}
    return known


def catch_up(rundir: RunDir, plan: Plan) -> dict[str, HostError]:
    """Bring home once what the hosts have; the hosts that could not be reached."""

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
    """In the events, once for each start; and in the manifest, if rank 0 could not do it any more."""
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
