"""Select hosts, predict a run, and print its status: shared by the verbs that start and follow runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

    from evener.core.base.errors import HostError
    from evener.core.cluster.finding import Finding
    from evener.core.cluster.fleet_file import Fleet
    from evener.core.run.prediction import Prediction
    from evener.core.run.resolve import ResolvedRun
    from evener.core.run.roster import RankSlot, Roster
    from evener.core.run.run_plan import Plan
    from evener.core.run.rundir import RunDir
    from evener.launch.launcher import PreparedFleet
    from evener.ssh.session import Sessions
    from evener.transfer.mirror import HostMirror

LOCAL_FLEET = "local"  # --fleet local: this machine, whatever fleet.toml says


def fleet_path(given: str | None) -> str | None:
    """Return the path of the fleet file: the given one, else fleet.toml if it exists; None is this machine alone."""
    from evener.core.cluster.fleet_file import DEFAULT_FLEET

    if given is not None:
        return None if given == LOCAL_FLEET else given
    return DEFAULT_FLEET if Path(DEFAULT_FLEET).exists() else None


def select_fleet(given: str | None, names: str | None) -> Fleet | None:
    """Return the hosts to train on, from the given fleet file or else fleet.toml; None is this machine alone."""
    from evener.core.cluster.fleet_file import load_fleet

    path = fleet_path(given)
    return _select_hosts(None if path is None else load_fleet(path), names)


def select_fleet_to_resume(given: str | None, names: str | None, previous_plan: Plan | None) -> Fleet | None:
    """Return the hosts of a resumed run: those it had, unless a fleet file is given.

    `previous_plan` is its plan, None for a worker that was started by hand. Links and rates that fleet.toml has of
    those hosts are added.
    """
    import msgspec

    from evener.core.base.errors import EvenerError
    from evener.core.cluster.fleet_file import DEFAULT_FLEET, load_fleet

    if given is not None:
        return select_fleet(given, names)
    if previous_plan is None or previous_plan.is_local_run:
        return _select_hosts(None, names)
    fleet = previous_plan.fleet
    with contextlib.suppress(EvenerError):
        known = load_fleet(DEFAULT_FLEET)
        if fleet.hosts.items() <= known.hosts.items():
            fleet = msgspec.structs.replace(fleet, link=known.link, links=known.links, rates=known.rates)
    return _select_hosts(fleet, names)


def _select_hosts(fleet: Fleet | None, names: str | None) -> Fleet | None:
    from evener.core.base.errors import UsageError
    from evener.core.cluster.fleet_file import select_hosts

    if fleet is None and names is not None:
        raise UsageError("--hosts names hosts of a fleet, but there is no fleet file", hint="--fleet FILE")
    return None if fleet is None else select_hosts(fleet, names)


def print_status(text: str) -> None:
    """Print one status line on stderr."""
    print(text, file=sys.stderr, flush=True)


def find_run(run: str) -> Path:
    """Return the directory of a run that is given by its path, or by the id that its processes carry on the hosts."""
    from evener.core.base.file_io import read_file

    for path in Path("runs").glob("*/plan.json"):
        if not Path(run).exists() and read_file(path).find(f'"id": "{run}"'.encode()) >= 0:
            return path.parent
    return Path(run)


def rundir_of(resolved: ResolvedRun) -> RunDir:
    """Return the run directory of a resolved spec, whose `out` is always set."""
    from evener.core.run.rundir import RunDir

    assert resolved.spec.out is not None
    return RunDir(resolved.spec.out)


def print_warnings(prepared: PreparedFleet) -> None:
    """Print the findings of the preflight, none of which is an error."""
    from evener.cli.terminal import make_console

    print_findings(make_console(stderr=True), prepared.findings)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print each finding with its host and evidence, and its fix on one line, so that it can be pasted."""
    from evener.cli import terminal

    for finding in findings:
        where = " → ".join(name for name in (finding.host, finding.peer) if name)
        terminal.print_text(
            console, f"{finding.severity}: {finding.check}{'  ' + where if where else ''}: {finding.evidence}"
        )
        console.print(f"hint:  {finding.fix}", soft_wrap=True)


def predict_run(
    fleet: Fleet, resolved: ResolvedRun, seats: Sequence[RankSlot], *, as_requested: bool = False
) -> Prediction | None:
    """Predict a run on these seats; print the prediction, the hosts left out, and a better option if there is one.

    Return None where too little was measured. `as_requested`: leave out no host, and recommend nothing else.
    """
    from evener.core.base.errors import UsageError
    from evener.plan.choice.advice import format_loss_penalty
    from evener.plan.choice.plan_request import predict_launch
    from evener.plan.choice.search import format_run_prediction, recommended_flags

    try:
        prediction = predict_launch(fleet, resolved.job, seats, may_leave_out=not as_requested)
    except UsageError as unknown:  # errors that prevent the run itself are reported when it starts
        print_status(f"no prediction: {unknown}" + (f"; {unknown.hint}" if unknown.hint else ""))
        if resolved.spec.train.sync == "auto":
            print_status("--sync auto takes ddp when nothing can be predicted")
        return None
    for why in dict.fromkeys(prediction.left_out.values()):
        names = ", ".join(name for name, of_host in prediction.left_out.items() if of_host == why)
        print_status(f"left out: {names}: {why}\nhint:  --shares equal includes all hosts")
    print_status(f"predicted: {format_run_prediction(prediction)}")
    if resolved.spec.train.sync == "auto":
        chosen = prediction.option(prediction.chosen)
        print_status(f"--sync auto takes {chosen.roster.sync}{format_loss_penalty(chosen)}")
    if not as_requested and prediction.recommended != prediction.chosen:
        print_status(f"warning: {prediction.verdict}")
        if prediction.recommended:
            print_status(f"hint:  {recommended_flags(prediction)}")
    return prediction


def predict_resumed_run(
    fleet: Fleet, resolved: ResolvedRun, seats: Sequence[RankSlot], previous_plan: Plan
) -> Prediction | None:
    """Predict a resumed run; reuse its previous prediction if neither the job nor the measurements have changed."""
    from evener.core.run.roster import NO_SYNC, requested_sync

    spec, was = resolved.spec, previous_plan.spec
    assert was is not None, "a script of the user's own is not resumed"
    same_work = (spec.data, spec.model, spec.machine) == (was.data, was.model, was.machine) and (
        (spec.train.batch, spec.train.micro_batch) == (was.train.batch, was.train.micro_batch)
    )
    places = [(seat.host, seat.device) for seat in seats]
    if (
        previous_plan.prediction
        and previous_plan.prediction.option(previous_plan.prediction.chosen).roster.sync
        in (NO_SYNC, requested_sync(spec))
        and not fleet.rates
        and same_work
        and places == [(seat.host, seat.device) for seat in previous_plan.prediction.cluster.seats]
    ):
        return previous_plan.prediction
    return predict_run(fleet, resolved, seats)


def with_previous_sync(resolved: ResolvedRun) -> ResolvedRun:
    """Replace `--sync auto` of a resumed run by the strategy it had last, which its checkpoint belongs to."""
    import msgspec

    from evener.core.run.roster import NO_SYNC

    train = resolved.spec.train
    if resolved.resume is None or train.sync != "auto":
        return resolved
    had = rundir_of(resolved).manifest().roster.sync
    if had == NO_SYNC:
        return resolved
    spec = msgspec.structs.replace(resolved.spec, train=msgspec.structs.replace(train, sync=str(had)))
    return msgspec.structs.replace(resolved, spec=spec)


def with_previous_buckets(roster: Roster, resolved: ResolvedRun) -> Roster:
    """Return the roster with the bucket size of the resumed run: another size would change the order of summation."""
    import msgspec

    if resolved.resume is None:
        return roster
    was = rundir_of(resolved).manifest().roster
    return roster if was.sync != roster.sync else msgspec.structs.replace(roster, bucket_bytes=was.bucket_bytes)


def predict_local_run(resolved: ResolvedRun, seats: Sequence[RankSlot]) -> Prediction | None:
    """Predict a run on this machine alone, if fleet.toml has its rates."""
    import msgspec

    from evener.core.base.errors import EvenerError
    from evener.core.cluster.fleet_file import DEFAULT_FLEET, load_fleet

    try:
        fleet = load_fleet(DEFAULT_FLEET)
    except EvenerError:  # this run does not need the file
        return None
    for name, host in fleet.hosts.items():
        if host.is_local and name in fleet.rates:
            member = seats[0].host  # its name in the run's manifest
            alone = msgspec.structs.replace(fleet, hosts={member: host}, links={}, rates={member: fleet.rates[name]})
            return predict_run(alone, resolved, seats)
    return None


def with_ranks(fleet: Fleet, ranks: int | None, device: Literal["auto", "cpu", "cuda"] = "auto") -> Fleet:
    """Return the fleet with this number of ranks and this kind of device on every host."""
    import msgspec

    hosts = {
        name: msgspec.structs.replace(
            host, ranks=ranks or host.ranks, devices=host.devices if device == "auto" else device
        )
        for name, host in fleet.hosts.items()
    }
    return msgspec.structs.replace(fleet, hosts=hosts)


def reorder_hosts(fleet: Fleet, names: list[str]) -> Fleet:
    """Return the fleet with its hosts in the order of `names`, and the hosts that are not named at the end."""
    import msgspec

    ordered = [name for name in names if name in fleet.hosts] + [name for name in fleet.hosts if name not in names]
    return msgspec.structs.replace(fleet, hosts={name: fleet.hosts[name] for name in ordered})


def print_placement(plan: Plan) -> None:
    """Print which rank runs on which host, and where the rendezvous is."""
    if not plan.is_local_run:
        print_status(f"rendezvous on {plan.hosts[0].name}, {plan.address} port {plan.port}")
    for host in plan.hosts:
        last = host.first_rank + host.num_ranks - 1
        ranks = f"rank {host.first_rank}" if host.num_ranks == 1 else f"ranks {host.first_rank} to {last}"
        print_status(f"{host.name}: {ranks}" + ("" if plan.is_local_run else f", {host.interface} {host.address}"))
    agent = plan.hosts[0].agent
    if agent is not None:
        what = "the others go on" if agent.is_elastic else "the others restart from the newest checkpoint"
        print_status(f"if a host is lost, {what}, and it rejoins when it is back")


def print_plan(plan: Plan, as_json: bool) -> None:
    """Print the plan of --dry-run: as JSON the object that the real call would use, else the command of each host."""
    import msgspec

    if as_json:
        print(msgspec.json.encode(plan).decode())
        return
    for host in plan.hosts:
        print(f"# on {host.name}\n{host.shell_command()}\n")


def print_detached(rundir: RunDir) -> None:
    """Print how to follow, stop and fetch a run that continues without this terminal."""
    from evener.core.run.run_plan import read_plan
    from evener.launch import launcher

    plan = read_plan(rundir)
    if all(state.get("state") == "ended" for state in launcher.cached_states(rundir, plan).values()):
        print_status("the run has ended")
        print_outputs(rundir, plan)
        return
    print_status(
        f"the run goes on without this terminal\nfollow:  evener logs -f {rundir}\nstop:    evener stop {rundir}"
    )
    if not plan.is_local_run:
        print_status(f"fetch its results, now or at its end:  evener fetch {rundir}")


def checkpoint_info(rundir: RunDir, plan: Plan | None) -> dict[str, Any]:
    """Return for JSON the newest local checkpoint, and the step and host of a newer one that only a host has."""
    local_steps, saved = rundir.checkpoint_steps(), rundir.last_saved_step()
    newer = None
    if plan is not None and not plan.is_local_run and saved is not None and saved > max(local_steps, default=-1):
        newer = {"step": saved, "host": plan.hosts[0].name}
    return {
        "checkpoint": str(rundir.checkpoint_path(local_steps[-1])) if local_steps else None,
        "newer_checkpoint": newer,
    }


def print_checkpoint(rundir: RunDir, plan: Plan | None) -> None:
    """Print where the newest weights are: in a local checkpoint, on a host, or nowhere."""
    info = checkpoint_info(rundir, plan)
    if info["checkpoint"]:
        print_status(f"weights: {info['checkpoint']}")
    if newer := info["newer_checkpoint"]:
        print_status(
            f"weights of step {newer['step']}: only on {newer['host']}; evener fetch {rundir} copies them here"
        )
    elif not info["checkpoint"] and (plan is None or plan.kind == "train"):
        print_status("weights: none saved")


def print_outputs(rundir: RunDir, plan: Plan) -> None:
    """Print what an ended run produced: its weights, and the files that a script wrote on its hosts."""
    from evener.launch.launcher import cached_states
    from evener.transfer.script_outputs import find_outputs

    print_checkpoint(rundir, plan)
    outputs = find_outputs(plan, cached_states(rundir, plan))
    for name, of_host in outputs.items():
        print_status(of_host.summary(name))
    if outputs:
        print_status(f"fetch it: evener fetch {rundir}")


def print_connection_change(host: HostMirror) -> None:
    """Print that the connection to a host was lost, or is back."""
    if host.error is not None:
        print_status(f"{host.error}; retrying, the run goes on without the connection")
    else:
        print_status(f"{host.name}: connected again; no records were lost")


class RankLogPrinter:
    """Print the output of all ranks as it arrives: `2 attic │ text`."""

    def __init__(
        self, rundir: RunDir, plan: Plan, hosts: set[str] | None = None, ranks: set[int] | None = None
    ) -> None:
        self._rundir, self._hosts, self._ranks = rundir, hosts, ranks
        self._followers: dict[str, Iterator[list[bytes]]] = {}
        self._width = 0
        self.add_hosts(plan)

    def add_hosts(self, plan: Plan) -> None:
        """Follow the hosts and ranks of a plan that are not followed yet."""
        from evener.core.base.file_io import follow_lines

        self._width = max(len(f"{host.first_rank + host.num_ranks} {host.name}") for host in plan.hosts)
        for host in plan.hosts:
            if self._hosts is not None and host.name not in self._hosts:
                continue
            if self._ranks is None and (label := f"- {host.name}") not in self._followers:
                self._followers[label] = follow_lines(self._rundir.log_path(host.name, None))
            for rank in range(host.first_rank, host.first_rank + host.num_ranks):
                label = f"{rank} {host.name}"
                if label not in self._followers and (self._ranks is None or rank in self._ranks):
                    self._followers[label] = follow_lines(self._rundir.log_path(host.name, rank))

    def print_new(self, *, with_timestamps: bool = False) -> None:
        """Print the lines that are new since the last call, sorted by time stamp."""
        for stamp, label, _, text in self._new_lines():
            shown = text.rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
            line = f"{label:{self._width}} │ {shown}"
            print(f"{stamp} {line}" if with_timestamps else line, flush=True)

    def print_new_json(self) -> None:
        """Print the new lines as JSON, one object a line; rank is null for a launcher's own output."""
        import json

        for stamp, label, stream, text in self._new_lines():
            rank, host = label.split()
            record = {"time": stamp, "host": host, "rank": None if rank == "-" else int(rank)}
            print(json.dumps(record | {"stream": "stdout" if stream in "Oo" else "stderr", "text": text}), flush=True)

    def _new_lines(self) -> list[tuple[str, str, str, str]]:
        """Return the new lines as (time, label, O or E, text), sorted by time."""
        new = []
        for label, follower in self._followers.items():
            for line in next(follower):
                stamp, _, text = line.decode(errors="replace").partition(" ")
                new.append((stamp, label, text[:1], text[2:]))
        return sorted(new, key=lambda line: line[0])


@contextlib.contextmanager
def connect_fleet(path: str) -> Iterator[tuple[Fleet, Sessions, dict[str, HostError]]]:
    """Connect to all hosts of a fleet file; yield (fleet, sessions, errors)."""
    from evener.core.cluster.fleet_file import load_fleet
    from evener.ssh.session import connect

    fleet = load_fleet(path)
    with connect(fleet) as (sessions, errors):
        yield fleet, sessions, errors
