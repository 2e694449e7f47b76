"""How is a run on a fleet started, followed and ended? On every host by a supervisor that needs nobody afterwards.

preflight ─▶ plan ─▶ send code and data ─▶ start on all hosts ─▶ mirror ─▶ the first failure, or the result
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evener.core.errors import HostError, RunError, UsageError
from evener.core.files import follow_lines
from evener.core.finding import Finding
from evener.core.fleet import RENDEZVOUS_PORT, Fleet
from evener.core.plan import HostPlan, Plan, write_plan
from evener.core.resolve import Resolved
from evener.core.rundir import RunDir
from evener.core.step import StepRecord
from evener.core.units import size
from evener.hosts.doctor import Survey, survey
from evener.hosts.session import REMOTE, RemoteError, Session, Sessions, for_each, open_session
from evener.launch.commands import Place, script_plan, train_plan
from evener.launch.failures import Failure, first_failure
from evener.launch.mirror import GONE, HostMirror, Mirror, State, host_failed, merge_events, tell
from evener.launch.ship import WORK_S, send
from evener.launch.tree import Tree, describe, describe_data, pack

POLL_S = 0.2
STOP_S = 600.0
GIVEN_UP_S = 60.0  # without a sign of a host, when others have failed

Observer = Callable[[StepRecord | dict[str, Any]], None]
Progress = Callable[[str], None]


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that were examined and may take part."""

    id: str
    places: list[Place]
    port: int
    findings: list[Finding]  # warnings that do not stand in the way


def prepare(fleet: Fleet, sessions: Sessions, errors: Mapping[str, HostError], name: str, run_id: str | None = None,
            port: int | None = None) -> Prepared:  # fmt: skip
    """Look at the hosts as `doctor` does, quickly; RunError with the findings where they cannot train together."""
    wanted = port or RENDEZVOUS_PORT
    found = _examined(fleet, sessions, errors, wanted)
    first = next(iter(fleet.hosts))
    low, high = found.facts[first].port_range
    free = sessions[first].call(
        "runs", "free_port", address=found.ways[first].address, wanted=wanted, low=low, high=high
    )
    if free != wanted:
        if port is not None or free is None:
            raise RunError(f"{first}: port {wanted} is taken", hint="evener doctor names who holds it")
        found = _examined(fleet, sessions, errors, free)  # is this one open to the others, too?
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
        )
        for host in fleet.hosts
    ]
    warnings = [finding for finding in found.findings if finding.severity == "warning"]
    return Prepared(id=run_id, places=places, port=free, findings=warnings)


def _examined(fleet: Fleet, sessions: Sessions, errors: Mapping[str, HostError], port: int) -> Survey:
    found = survey(fleet, sessions, errors, quick=True, port=port)
    if found.errors:
        raise RunError(
            f"{len(found.errors)} {'obstacle' if len(found.errors) == 1 else 'obstacles'} on the fleet",
            hint="evener doctor looks closer",
            output="\n".join(_told(finding) for finding in found.errors),
        )
    return found


def plan_training(prepared: Prepared, resolved: Resolved, *, resume: bool) -> tuple[Plan, list[Tree]]:
    """evener's own worker on all hosts, and what they must have for it: corpus and weights."""
    spec = resolved.spec
    corpus = describe_data(spec.data.data)
    trees = [corpus]
    init_from: dict[str, str] = {}
    if spec.model.init_from is not None and not resume:
        weights = Path(spec.model.init_from)
        trees.append(pack({weights.name: weights}))
        init_from = {place.name: f"{_place_of(trees[1], place)}/{weights.name}" for place in prepared.places}
    data = {place.name: _place_of(corpus, place) for place in prepared.places}
    block_size = resolved.shape.block_size
    plan = train_plan(
        prepared.id, prepared.places, prepared.port, spec, block_size, data, init_from, resume=resume
    )  # fmt: skip
    return plan, trees


def plan_script(
    prepared: Prepared, project: Path, program: list[str], environment: Mapping[str, str]
) -> tuple[Plan, list[Tree]]:
    """A program of the user's own on all hosts, and its project."""
    tree = describe(project)
    plan = script_plan(prepared.id, prepared.places, prepared.port, program, environment, tree.digest)
    return plan, [tree]


def deliver(trees: list[Tree], plan: Plan, sessions: Sessions, say: Progress) -> None:
    """Send what the hosts lack."""
    fleet = Fleet(hosts={host.name: host.host for host in plan.hosts})
    for tree in trees:
        for name, arrived in send(sessions, fleet, tree).items():
            if arrived.sent_bytes:
                say(f"{size(arrived.sent_bytes)} sent to {name}")


def start(rundir: RunDir, plan: Plan, sessions: Sessions) -> None:
    """Start the run on all hosts; where one cannot, the others are ended again and RunError says which."""
    is_new = not rundir.path.exists()
    try:
        rundir.path.mkdir(parents=True, exist_ok=True)
        write_plan(rundir, plan)
    except OSError as refused:
        raise UsageError(f"{rundir}: {refused.strerror}", hint="another --out") from None
    supervisor = (REMOTE / "supervisor.py").read_text()
    roster = msgspec.json.encode(plan.roster).decode() if plan.roster else None

    def begin(name: str) -> str | None:
        host = plan.host(name)
        spec = {
            "id": plan.id,
            "host": host.name,
            "first_rank": host.first_rank,
            "argv": host.argv,
            "cwd": host.cwd,
            "env": host.env,
            "grace_s": plan.grace_s,
        }
        try:
            sessions[name].call(
                "runs",
                "start",
                run=host.run,
                spec=spec,
                supervisor=supervisor,
                code=host.code,
                roster=roster,
                timeout_s=WORK_S,
            )
        except RemoteError as error:
            return error.message
        except HostError as error:
            sessions[name].close()  # and with it what it may still be doing there
            return str(error)
        return None

    try:
        told = for_each([host.name for host in plan.hosts], begin)
    except KeyboardInterrupt:
        stop(plan, now=True)
        raise
    failed = {name: error for name, error in told.items() if error is not None}
    if failed:
        started = [host for host in plan.hosts if host.name not in failed]
        ended = stop(msgspec.structs.replace(plan, hosts=started), now=True)
        if is_new and not any(isinstance(one, HostError) for one in ended.values()):
            shutil.rmtree(rundir.path)
        name, error = next(iter(failed.items()))
        raise RunError(f"the run did not start on {name}: {error}", hint="evener doctor looks closer")
    tell(rundir, "launched", hosts=[host.name for host in plan.hosts], world_size=plan.world_size)


def note_findings(rundir: RunDir, prepared: Prepared) -> None:
    """The preflight's warnings as events: whoever explains the run later must know that a host was swapping."""
    for finding in prepared.findings:
        tell(rundir, finding.check, host=finding.host, peer=finding.peer, evidence=finding.evidence, fix=finding.fix)


def follow(rundir: RunDir, plan: Plan, observe: Observer, on_lost: Callable[[HostMirror], None],
           on_change: Callable[[Mirror], None] = lambda mirror: None) -> dict[str, State]:  # fmt: skip
    """Mirror the run until it has ended everywhere; the hosts' last states. RunError names the first failure.

    KeyboardInterrupt leaves the run alone.
    """
    decoder = msgspec.json.Decoder(StepRecord)
    steps = follow_lines(rundir.steps_path(0))
    events = {host.name: follow_lines(rundir.path / "hosts" / host.name / "events.jsonl") for host in plan.hosts}
    lost: set[str] = set()
    next_step = -1
    with Mirror(rundir, plan) as mirror:
        done = False
        while not done:
            done = mirror.is_done or _only_lost_are_left(mirror)
            for line in next(steps):
                record = decoder.decode(line)
                if record.step > next_step:
                    next_step = record.step
                    observe(record)
            for follower in events.values():
                for line in next(follower):
                    observe(msgspec.json.decode(line))
            for name, host in mirror.hosts.items():
                if host.broken is not None:
                    raise RunError(
                        f"what {name} tells cannot be written here: {host.broken}",
                        hint=f"the run goes on; evener logs -f {rundir} looks at it again",
                    )
                if (host.error is not None) != (name in lost):
                    lost ^= {name}
                    on_lost(host)
            on_change(mirror)
            if not done:
                mirror.wait(POLL_S)
        ended = {name: _last_state(host) for name, host in mirror.hosts.items()}
    failure = first_failure(rundir, plan, ended)
    if failure is not None:
        _record_failure(rundir, failure)
        raise failure.error(rundir, plan)
    return ended


def stop(plan: Plan, *, now: bool = False) -> dict[str, State | HostError]:
    """End the run on every host; returns when no process of it is left on those that can be reached."""

    def end(session: Session, host: HostPlan) -> State:
        state: State = {}
        for item in session.stream("runs", "stop", run=host.run, now=now, timeout_s=STOP_S):
            state = item or GONE
        return state

    return _ask(plan, end)


def states(plan: Plan) -> dict[str, State | HostError]:
    """How the run is doing on every host."""
    return _ask(plan, lambda session, host: session.call("runs", "status", run=host.run) or GONE)


def known_states(rundir: RunDir, plan: Plan) -> dict[str, State]:
    """The last state of every host that came home; nobody is asked."""
    known = {}
    for host in plan.hosts:
        path = rundir.path / "hosts" / host.name / "state.json"
        known[host.name] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    return known


def catch_up(rundir: RunDir, plan: Plan) -> dict[str, HostError]:
    """Bring home once what the hosts have; the hosts that could not be reached."""

    def copy(name: str) -> HostError | None:
        try:
            HostMirror(rundir, plan.host(name)).catch_up()
        except HostError as error:
            return error
        return None

    copied = for_each([host.name for host in plan.hosts], copy)
    merge_events(rundir)
    return {name: error for name, error in copied.items() if error is not None}


def _ask(plan: Plan, question: Callable[[Session, HostPlan], State]) -> dict[str, State | HostError]:
    def ask(name: str) -> State | HostError:
        host = plan.host(name)
        try:
            with contextlib.closing(open_session(name, host.host)) as session:
                return question(session, host)
        except RemoteError as error:
            return host_failed(error)
        except HostError as error:
            return error

    return for_each([host.name for host in plan.hosts], ask)


def _only_lost_are_left(mirror: Mirror) -> bool:
    """Has the run failed on some hosts, while the rest have been out of sight for long?"""
    left = [host for host in mirror.hosts.values() if not host.is_done]
    failed = [host for host in mirror.hosts.values() if host.is_done and (host.state or GONE)["status"] != 0]
    now = time.monotonic()
    return bool(failed) and all(host.lost_since is not None and now - host.lost_since > GIVEN_UP_S for host in left)


def _last_state(host: HostMirror) -> State:
    if host.is_done:
        return host.state or GONE
    return (host.state or {}) | {"lost": f"cannot be reached: {host.error}"}


def _record_failure(rundir: RunDir, failure: Failure) -> None:
    """In the events, once for each start; and in the manifest, if rank 0 could not do it any more."""
    since_start: list[str] = []
    for event in rundir.events():
        since_start = [] if event["event"] == "launched" else [*since_start, event["event"]]
    if "failure" not in since_start:
        tell(
            rundir, "failure", host=failure.host, rank=failure.rank, kind="exit", error=failure.how, hint=failure.hint,
            output=failure.output,
        )  # fmt: skip
    if rundir.is_run() and rundir.manifest().verdict == "running":
        rundir.write_manifest(msgspec.structs.replace(rundir.manifest(), verdict="failed", ended=time.time()))


def _place_of(tree: Tree, place: Place) -> str:
    return f"{place.workdir}/trees/{tree.digest}"


def _told(finding: Finding) -> str:
    where = f"{finding.host} → {finding.peer}" if finding.host and finding.peer else finding.host or ""
    return f"{finding.check}  {where}: {finding.evidence}\n    {finding.fix}"
