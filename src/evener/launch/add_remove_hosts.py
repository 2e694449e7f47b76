"""Remove a host from a running run, let it rejoin, or add a new one."""

from __future__ import annotations

import contextlib
import posixpath
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.core.base.errors import HostError, RunError, UsageError
from evener.core.base.shell import quote_word
from evener.core.cluster.fleet_file import Fleet
from evener.core.model.corpus import load_corpus
from evener.core.model.pretrained import fine_tuning_packages
from evener.core.run.resolve import find_weights_file
from evener.core.run.run_plan import Plan, read_plan, write_plan
from evener.core.run.rundir import RunDir
from evener.core.run.trust import trust_plan_hosts
from evener.launch import launcher
from evener.launch.commands import PreparedHost, plan_with_added_host, plan_with_hosts
from evener.launch.launcher import Notify
from evener.launch.prepare_hosts import ConnectedHosts, prepare_hosts
from evener.launch.start_run import describe_pretrained, pretrained_on_host, withheld_data
from evener.node.remote.prune import TREE_PATH
from evener.ssh.session import RemoteError, Session, Sessions, connect, connect_run, open_run_session
from evener.transfer.checkpoint_transfer import exclusive_lock, restore_records
from evener.transfer.file_tree import describe_data, describe_files
from evener.transfer.mirror import GONE_STATE, SupervisorState, restart_on_host, to_host_error

LEAVE_TIMEOUT_S = 660.0  # for a step, which may take minutes, and a checkpoint


def remove_host(rundir: RunDir, plan: Plan, name: str) -> SupervisorState:
    """Remove a host from a run that continues without it; return its last state. HostError if it is unreachable."""
    host, state = plan.host(name), dict[str, Any]()
    try:
        with contextlib.closing(open_run_session(rundir, host)) as session:
            reason = "somebody asked for it"
            for item in session.stream(
                "run_control", "leave", run=host.run_folder(rundir), why=reason, timeout_s=LEAVE_TIMEOUT_S
            ):
                state = item or GONE_STATE
    except RemoteError as error:
        raise to_host_error(error, plan.fleet) from None
    return state


def rejoin_host(rundir: RunDir, plan: Plan, name: str, notify: Notify) -> None:
    """Let a host that left the run or went down take part again; send what it lacks, such as after a change of disk.

    RunError if it already takes part, or is not set up.
    """
    host, run = plan.host(name), plan.host(name).run_folder(rundir)
    try:
        with contextlib.closing(open_run_session(rundir, host)) as session:
            has_run = session.call("run_control", "status", run=run) is not None
            if not has_run:
                _check_rejoining_host(rundir, plan, name)
            _send_missing_trees(rundir, plan, name, session, notify)
            if has_run:
                restart_on_host(rundir, plan, name, session)
                return
            restore_records(rundir, host, session)
            if (reason := launcher.start_on_host(rundir, plan, name, session)) is not None:
                raise RunError(
                    f"{name} did not start: {reason}", hint=f"evener doctor{plan.fleet.cli_flag} looks closer"
                )
    except RemoteError as error:
        raise RunError(f"{name}: {error.message}", hint=f"evener runs; evener logs -f {quote_word(rundir)}") from None


def _check_rejoining_host(rundir: RunDir, plan: Plan, name: str) -> None:
    """Run the preflight for a host that has nothing of the run. RunError if it cannot take part as the plan says."""
    host = plan.host(name)
    others = msgspec.structs.replace(plan, hosts=[other for other in plan.hosts if other.name != name])
    with connect_run(rundir, plan) as (sessions, errors):
        if name in errors or len(sessions) < 2:
            raise errors.get(name) or next(iter(errors.values()))
        place = _preflight_newcomer(rundir, others, plan.fleet, sessions, name)
    parents = posixpath.dirname(place.run_dir), posixpath.dirname(host.run or "")
    if place.address != host.address or parents[0] != parents[1]:
        raise RunError(
            f"{name}: the plan has address {host.address} and folder {host.run}; "
            f"now they are {place.address} and {place.run_dir}",
            hint=f"evener stop {quote_word(rundir)}, then evener train --resume {quote_word(rundir)} --fleet FILE",
        )


def _send_missing_trees(rundir: RunDir, plan: Plan, name: str, session: Session, notify: Notify) -> None:
    """Send the corpus, and the initial weights or the model, that a host's ranks read, if they are not there."""
    host, spec = plan.host(name), plan.spec
    assert spec is not None
    assert host.agent is not None
    wanted = {tree for word in host.agent.program for tree in TREE_PATH.findall(word)}
    workdir, digests = host.host.workdir, dict[str, int]()

    def is_there(tree: str) -> bool:
        found = session.call("content_store", "find_missing_blobs", workdir=workdir, digests=digests, tree=tree)
        return bool(found["is_there"])

    missing = [tree for tree in wanted if not is_there(tree)]
    if not missing:
        return
    _check_corpus(rundir, spec.data.data)
    trees = [describe_data(spec.data.data)]
    if spec.model.init_from is not None and set(missing) - {trees[0].digest}:
        weights = find_weights_file(spec.model.init_from)
        trees.append(describe_files({weights.name: weights}))
    if spec.model.pretrained is not None and set(missing) - {trees[0].digest}:
        trees.append(describe_pretrained(spec.model.pretrained))
    if set(missing) - {tree.digest for tree in trees}:
        raise UsageError(
            f"{name} lacks the corpus or initial weights of this run, and the copies here have changed since",
            hint=f"evener train --resume {quote_word(rundir)}, once it has ended, sends what is here now",
        )
    part = msgspec.structs.replace(plan, hosts=[host])
    launcher.stage_files([tree for tree in trees if tree.digest in missing], part, {name: session}, notify)


def add_host(rundir: RunDir, fleet: Fleet, name: str, notify: Notify) -> Plan:
    """Add a new host of `fleet` to a running run; return the new plan.

    UsageError, RunError or HostError if it cannot take part; the run is then unchanged. The run's hosts receive the new
    membership before the new host starts. Unreachable ones receive it from the others before any epoch that includes
    the new host.
    """
    with _add_host_lock(rundir):
        plan = read_plan(rundir)
        spec, hosts = plan.spec, {host.name: host.host for host in plan.hosts} | {name: fleet.hosts[name]}
        all_hosts = msgspec.structs.replace(fleet, hosts=hosts)
        if spec is None or name in {host.name for host in plan.hosts}:
            raise UsageError(
                f"{rundir} has a host {name} already", hint=f"evener runs; evener logs -f {quote_word(rundir)}"
            )
        newcomer_fleet = msgspec.structs.replace(fleet, hosts={name: fleet.hosts[name]})
        with connect_run(rundir, plan) as present, connect(newcomer_fleet) as new:
            sessions, errors = present[0] | new[0], present[1] | new[1]
            if name in errors or len(sessions) < 2:  # the new host, or all others
                raise errors.get(name) or next(iter(errors.values()))
            for unreachable in errors:
                notify(f"{unreachable} is unreachable: it will learn of {name} from the others")
            newcomer = _preflight_newcomer(rundir, plan, all_hosts, sessions, name)
            _check_corpus(rundir, spec.data.data)
            trees, model = [describe_data(spec.data.data)], None
            if spec.model.pretrained is not None:
                trees.append(describe_pretrained(spec.model.pretrained))
                model = pretrained_on_host(spec, trees[-1], newcomer.workdir)
            data = f"{newcomer.workdir}/trees/{trees[0].digest}"
            joined = plan_with_added_host(plan, newcomer, data, _next_version(), model)
            newcomer_plan = msgspec.structs.replace(joined, hosts=[joined.host(name)])
            for line in withheld_data(spec.data.data, trees[0]):
                notify(line)
            launcher.stage_files(trees, newcomer_plan, {name: sessions[name]}, notify)
            try:
                _send_membership(rundir, joined, sessions, name)
                write_plan(rundir, joined)
                trust_plan_hosts(joined)
                if (reason := launcher.start_on_host(rundir, joined, name, sessions[name])) is not None:
                    raise RunError(
                        f"{name} did not start: {reason}", hint=f"evener doctor{fleet.cli_flag} looks closer"
                    )
            except BaseException:
                # It may have started although the reply was lost.
                stopped = launcher.stop(rundir, newcomer_plan, now=True)[name]
                if not isinstance(stopped, HostError):
                    reverted = _plan_without_newcomer(joined, plan)
                    write_plan(rundir, reverted)
                    with contextlib.suppress(HostError):
                        _send_membership(rundir, reverted, sessions, name)
                raise
    return joined


@contextlib.contextmanager
def _add_host_lock(rundir: RunDir) -> Iterator[None]:
    """Lock the run against other additions of a host. RunError if another terminal is adding one."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(rundir, None, "add.lock"))
        except BlockingIOError:
            hint = "try again when that is done"
            raise RunError(f"{rundir}: another terminal is adding a host to it", hint=hint) from None
        yield


def _preflight_newcomer(rundir: RunDir, plan: Plan, whole: Fleet, sessions: Sessions, name: str) -> PreparedHost:
    """Run the preflight for the new host and the reachable ones; return the new host. RunError if it does not pass."""
    assert plan.spec is not None
    present = [host for host in plan.hosts if host.name in sessions]
    reached = msgspec.structs.replace(whole, hosts={name: whole.hosts[name] for name in sessions})
    # The run's port is in use on the others: check the connection on another one.
    probe_port = _find_free_port(sessions[present[0].name], present[0].address, plan.port + 1)
    model = plan.spec.model
    packages = () if model.pretrained is None else fine_tuning_packages(model.quantize)
    prepared = prepare_hosts(
        ConnectedHosts(fleet=reached, sessions=sessions, errors={}), rundir, plan.spec.machine, run_id=plan.id,
        port=probe_port, packages=packages,
    )  # fmt: skip
    places = {place.name: place for place in prepared.hosts}
    for host in present:
        address = places[host.name].address
        if address != host.address:
            hint = f'interface = "{host.interface}" under [hosts.{host.name}], if {name} is in that network too'
            raise RunError(f"{name} reaches {host.name} at {address}, and the run is at {host.address}", hint=hint)
    return places[name]


def _check_corpus(rundir: RunDir, folder: str) -> None:
    """Raise UsageError if the folder does not hold the corpus that the run trains on."""
    trained = rundir.manifest().corpus if rundir.is_run() else None
    if trained is not None and load_corpus(Path(folder)).content_hash != trained.content_hash:
        raise UsageError(
            f"{folder}: not the corpus on which {rundir} trains", hint="run it where the training was started"
        )


def _send_membership(rundir: RunDir, plan: Plan, sessions: Sessions, newcomer: str) -> None:
    """Send the membership files to the run's reachable hosts."""
    for host in plan.hosts:
        if host.name != newcomer and host.name in sessions:
            files = plan.membership_files(host.name)
            try:
                sessions[host.name].call("run_control", "put", run=host.run_folder(rundir), files=files)
            except RemoteError as error:
                raise to_host_error(error, plan.fleet) from None


def _plan_without_newcomer(joined: Plan, plan: Plan) -> Plan:
    """Return the plan without the new host, in a version newer than the one that agents may have received."""
    agents = [host.agent for host in plan.hosts if host.agent is not None]
    known_plan = msgspec.structs.replace(plan, hosts=joined.hosts[: len(plan.hosts)])
    return msgspec.structs.replace(plan_with_hosts(known_plan, agents[0].hosts, _next_version()), roster=plan.roster)


def _next_version() -> int:
    """Return a version higher than any earlier one, including one that was not recorded here."""
    return time.time_ns() // 1_000_000


def _find_free_port(session: Session, address: str, wanted: int) -> int | None:
    low = min(wanted + 1, 64_000)
    port: int | None = session.call(
        "sockets", "find_free_port", address=address, wanted=wanted, low=low, high=low + 1000
    )
    return port
