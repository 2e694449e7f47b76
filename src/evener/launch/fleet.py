"""How is a run on a fleet started, followed and ended? On every host by a supervisor that needs nobody afterwards.

preflight ─▶ plan ─▶ send code and data ─▶ start on all hosts ─▶ mirror ─▶ the first failure, or the result
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from evener.core.errors import EvenerError, HostError, RunError
from evener.core.finding import Finding
from evener.core.fleet import RENDEZVOUS_PORT, Fleet
from evener.core.plan import Plan, write_plan
from evener.core.resolve import Resolved
from evener.core.rundir import RunDir, follow_lines
from evener.core.step import StepRecord
from evener.core.units import size
from evener.hosts.doctor import Survey, survey
from evener.hosts.session import REMOTE, RemoteError, Sessions, for_each, open_session
from evener.launch.mirror import HostMirror, Mirror, State, merge_events, tell
from evener.launch.plan import Place, script_plan, train_plan
from evener.launch.ship import fetch, send, send_to
from evener.launch.tree import Tree, describe, describe_data, pack

BF16_UNITS = {"avx512_bf16", "amx_bf16"}  # the processor's own; without them torch emulates
POLL_S = 0.2
STOP_S = 600.0
LAST_LINES = 15
# What a healthy rank prints when another one went away: a consequence, never the cause.
CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|recvValue failed|TCPStore.*(closed|failed)|NCCL.*(remote|aborted)|"
    r"evener: ending the ranks",
    re.IGNORECASE,
)

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
            has_bf16=bool(BF16_UNITS & set(found.facts[host].bf16_units or [])),
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
    return train_plan(prepared.id, prepared.places, prepared.port, spec, data, init_from, resume=resume), trees


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
    rundir.path.mkdir(parents=True, exist_ok=True)
    write_plan(rundir, plan)
    supervisor = (REMOTE / "supervisor.py").read_text()

    def begin(name: str) -> str | None:
        host = next(host for host in plan.hosts if host.name == name)
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
            sessions[name].call("runs", "start", run=host.run, spec=spec, supervisor=supervisor, code=host.code)
        except (RemoteError, HostError) as error:
            return str(error)
        return None

    told = for_each([host.name for host in plan.hosts], begin)
    failed = {name: error for name, error in told.items() if error is not None}
    if failed:
        stop(plan, now=True)
        if is_new:
            shutil.rmtree(rundir.path)
        name, error = next(iter(failed.items()))
        raise RunError(f"the run did not start on {name}: {error}", hint="evener doctor looks closer")
    tell(rundir, "launched", hosts=[host.name for host in plan.hosts], world_size=plan.world_size)


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
            done = mirror.is_done
            for line in next(steps):
                record = decoder.decode(line)
                if record.step > next_step:
                    next_step = record.step
                    observe(record)
            for follower in events.values():
                for line in next(follower):
                    observe(msgspec.json.decode(line))
            for name, host in mirror.hosts.items():
                if (host.error is not None) != (name in lost):
                    lost ^= {name}
                    on_lost(host)
            on_change(mirror)
            if not done:
                mirror.wait(POLL_S)
        states = {name: host.state or {} for name, host in mirror.hosts.items()}
    failure = first_failure(rundir, plan, states)
    if failure is not None:
        raise failure
    return states


def stop(plan: Plan, *, now: bool = False) -> dict[str, State | HostError]:
    """End the run on every host; returns when no process of it is left on those that can be reached."""

    def end(name: str) -> State | HostError:
        host = next(host for host in plan.hosts if host.name == name)
        try:
            session = open_session(name, host.host)
        except HostError as error:
            return error
        try:
            state: State = {}
            for item in session.stream("runs", "stop", run=host.run, now=now, timeout_s=STOP_S):
                state = item or {}
            return state
        except RemoteError as error:
            return HostError(f"{name}: {error.message}", check="ssh.unreachable", host=name)
        except HostError as error:
            return error
        finally:
            session.close()

    return for_each([host.name for host in plan.hosts], end)


def states(plan: Plan) -> dict[str, State | HostError]:
    """How the run is doing on every host."""

    def look(name: str) -> State | HostError:
        host = next(host for host in plan.hosts if host.name == name)
        try:
            session = open_session(name, host.host)
        except HostError as error:
            return error
        try:
            return session.call("runs", "status", run=host.run) or {"state": "gone", "status": None, "failures": []}
        except HostError as error:
            return error
        finally:
            session.close()

    return for_each([host.name for host in plan.hosts], look)


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
        host = next(host for host in plan.hosts if host.name == name)
        try:
            session = open_session(name, host.host)
            try:
                HostMirror(rundir, host).copy(session, until_end=False)
            finally:
                session.close()
        except HostError as error:
            return error
        return None

    copied = for_each([host.name for host in plan.hosts], copy)
    merge_events(rundir)
    return {name: error for name, error in copied.items() if error is not None}


def restore(rundir: RunDir, plan: Plan, sessions: Sessions, step: int) -> None:
    """Put checkpoint, manifest and records of a run that is resumed on every host that lacks them."""

    def put(name: str) -> None:
        host = next(host for host in plan.hosts if host.name == name)
        checkpoint = rundir.checkpoint_path(step)
        files = {f"checkpoints/{checkpoint.name}/{path.name}": path for path in checkpoint.iterdir()}
        files["manifest.json"] = rundir.manifest_path
        for rank in range(host.first_rank, host.first_rank + host.num_ranks):
            if rundir.steps_path(rank).exists():
                files[f"steps/rank-{rank}.jsonl"] = rundir.steps_path(rank)
        arrived = send_to(sessions[name], host.host.workdir, pack(files))
        sessions[name].call("runs", "adopt", run=host.run, tree=arrived.path)

    for_each([host.name for host in plan.hosts], put)


def bring_checkpoint(rundir: RunDir, plan: Plan) -> int | None:
    """Fetch the newest checkpoint from the first host, where it is not here yet; its step, None where there is none."""
    first = plan.hosts[0]
    with contextlib.closing(open_session(first.name, first.host)) as session:
        names: list[str] = session.call("runs", "checkpoints", run=first.run)
        if not names:
            return None
        newest = max(names)
        if not (rundir.checkpoints_path / newest).exists():
            rundir.checkpoints_path.mkdir(exist_ok=True)
            fetch(session, f"{first.run}/checkpoints/{newest}", rundir.checkpoints_path / newest)
    return int(newest.removeprefix("step-"))


def first_failure(rundir: RunDir, plan: Plan, states: Mapping[str, State]) -> EvenerError | None:
    """What failed first, as an error for a person; it is told in events.jsonl too. None of a run that did not fail."""
    told = [event for event in rundir.events() if event["event"] == "failure" and event.get("kind") != "exit"]
    ranks = [
        (failure["time"], name, failure) for name, state in states.items() for failure in state.get("failures", [])
    ]
    lost = {name: state["lost"] for name, state in states.items() if state.get("lost")}
    failed = {name: state for name, state in states.items() if state.get("status") not in (0, None)}
    if any(state.get("stopped") for state in states.values()) or not (ranks or lost or failed):
        return None
    if told:  # a rank said itself what was wrong
        host = plan.host_of(told[0]["rank"]).name
        return RunError(f"rank {told[0]['rank']} on {host}: {told[0]['error']}", hint=told[0]["hint"])
    if ranks:
        logs = {failure["rank"]: last_lines(rundir, name, failure["rank"]) for _, name, failure in ranks}
        _, host, failure = min(
            ranks, key=lambda one: (bool(CONSEQUENCE.search("\n".join(logs[one[2]["rank"]]))), one[0])
        )
        how, output = _ending(failure["exitcode"]), logs[failure["rank"]]
        who = f"rank {failure['rank']} on {host}"
        log = rundir.log_path(host, failure["rank"])
    elif lost:
        host, how = next(iter(lost.items()))
        who, output, log = host, last_lines(rundir, host, None), rundir.path / "logs" / f"{host}.log"
    else:
        host, state = next(iter(failed.items()))
        how, output = _ending(state["status"]), last_lines(rundir, host, None)
        who, log = f"the launcher on {host}", rundir.path / "logs" / f"{host}.log"
    rank = failure["rank"] if ranks else None
    tell(rundir, "failure", host=host, rank=rank, kind="exit", error=how, hint="", output=output)
    steps = rundir.checkpoint_steps()
    hint = f"all that it printed: {log}"
    if plan.kind == "train" and steps:
        hint += f"; evener train --resume {rundir} goes on from step {steps[-1]}"
    return RunError(f"{who} {how}", hint=hint, output="\n".join(output))


def last_lines(rundir: RunDir, host: str, rank: int | None, num: int = LAST_LINES) -> list[str]:
    """The end of a rank's log, or of the launcher's, without the time stamps."""
    path = rundir.path / "logs" / f"{host}.log" if rank is None else rundir.log_path(host, rank)
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()[-num:]
    return [line.split(" ", 2)[-1] if line.count(" ") > 1 else line for line in lines]


def _place_of(tree: Tree, place: Place) -> str:
    return f"{place.workdir}/trees/{tree.digest}"


def _ending(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"exited with status {exitcode}"


def _told(finding: Finding) -> str:
    where = f"{finding.host} → {finding.peer}" if finding.host and finding.peer else finding.host or ""
    return f"{finding.check}  {where}: {finding.evidence}\n    {finding.fix}"
