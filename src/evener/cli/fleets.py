"""Select hosts, predict a run, and print its status: shared by the verbs that start and follow runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

    from evener.core.errors import HostError
    from evener.core.finding import Finding
    from evener.core.fleet import Fleet
    from evener.core.plan import Plan
    from evener.core.prediction import Prediction
    from evener.core.resolve import Resolved
    from evener.core.roster import Roster, Seat
    from evener.core.rundir import RunDir
    from evener.hosts.session import Sessions
    from evener.launch.fleet import Prepared
    from evener.launch.mirror import HostMirror

HERE_ALONE = "local"  # --fleet local: this machine, whatever fleet.toml says


def fleet_path(given: str | None) -> str | None:
    """Return the path of the fleet file: the given one, else fleet.toml if it exists; None is this machine alone."""
    from evener.core.fleet import DEFAULT_FLEET

    if given is not None:
        return None if given == HERE_ALONE else given
    return DEFAULT_FLEET if Path(DEFAULT_FLEET).exists() else None


def chosen(given: str | None, names: str | None) -> Fleet | None:
    """Return the hosts to train on, from the given fleet file or else fleet.toml; None is this machine alone."""
    from evener.core.fleet import load_fleet

    path = fleet_path(given)
    return _only(None if path is None else load_fleet(path), names)


def chosen_again(given: str | None, names: str | None, before: Plan | None) -> Fleet | None:
    """Return the hosts of a resumed run: those it had, unless a fleet file is given.

    `previous_plan` is its plan, None for a worker that was started by hand. Links and rates that fleet.toml has of
    those hosts are added.
    """
    import msgspec

    from evener.core.errors import EvenerError
    from evener.core.fleet import DEFAULT_FLEET, load_fleet

    if given is not None:
        return chosen(given, names)
    if before is None or before.is_here:
        return _only(None, names)
    fleet = before.fleet
    with contextlib.suppress(EvenerError):
        known = load_fleet(DEFAULT_FLEET)
        if fleet.hosts.items() <= known.hosts.items():
            fleet = msgspec.structs.replace(fleet, link=known.link, links=known.links, rates=known.rates)
    return _only(fleet, names)


def _only(fleet: Fleet | None, names: str | None) -> Fleet | None:
    from evener.core.errors import UsageError
    from evener.core.fleet import only

    if fleet is None and names is not None:
        raise UsageError("--hosts names hosts of a fleet, but there is no fleet file", hint="--fleet FILE")
    return None if fleet is None else only(fleet, names)


def say(text: str) -> None:
    """Print one status line on stderr."""
    print(text, file=sys.stderr, flush=True)


def find_run(run: str) -> Path:
    """Return the directory of a run that is given by its path, or by the id that its processes carry on the hosts."""
    from evener.core.files import read_file

    for path in Path("runs").glob("*/plan.json"):
        if not Path(run).exists() and read_file(path).find(f'"id": "{run}"'.encode()) >= 0:
            return path.parent
    return Path(run)


def rundir_of(resolved: Resolved) -> RunDir:
    """Return the run directory of a resolved spec, whose `out` is always set."""
    from evener.core.rundir import RunDir

    assert resolved.spec.out is not None
    return RunDir(resolved.spec.out)


def tell_warnings(prepared: Prepared) -> None:
    """Print the findings of the preflight, none of which is an error."""
    from evener.cli.terminal import console

    tell_findings(console(stderr=True), prepared.findings)


def tell_findings(screen: Console, findings: Sequence[Finding]) -> None:
    """Print each finding with its host and evidence, and its fix on one line, so that it can be pasted."""
    from evener.cli import terminal

    for finding in findings:
        where = " → ".join(name for name in (finding.host, finding.peer) if name)
        terminal.say(screen, f"{finding.severity}: {finding.check}{'  ' + where if where else ''}: {finding.evidence}")
        screen.print(f"hint:  {finding.fix}", soft_wrap=True)


def predicted(fleet: Fleet, resolved: Resolved, seats: Sequence[Seat], *, as_asked: bool = False) -> Prediction | None:
    """Predict a run on these seats; print the prediction, the hosts left out, and a better option if there is one.

    Return None where too little was measured. `as_requested`: leave out no host, and recommend nothing else.
    """
    from evener.core.errors import UsageError
    from evener.plan.advice import price_in_loss
    from evener.plan.question import of_training
    from evener.plan.search import flags_of_recommended, in_a_line

    try:
        prediction = of_training(fleet, resolved.job, seats, leaves_out=not as_asked)
    except UsageError as unknown:  # errors that prevent the run itself are reported when it starts
        say(f"no prediction: {unknown}" + (f"; {unknown.hint}" if unknown.hint else ""))
        if resolved.spec.train.sync == "auto":
            say("--sync auto takes ddp when nothing can be predicted")
        return None
    for why in dict.fromkeys(prediction.left_out.values()):
        names = ", ".join(name for name, of_host in prediction.left_out.items() if of_host == why)
        say(f"left out: {names}: {why}\nhint:  --shares equal includes all hosts")
    say(f"predicted: {in_a_line(prediction)}")
    if resolved.spec.train.sync == "auto":
        chosen = prediction.option(prediction.chosen)
        say(f"--sync auto takes {chosen.roster.sync}{price_in_loss(chosen)}")
    if not as_asked and prediction.recommended != prediction.chosen:
        say(f"warning: {prediction.verdict}")
        if prediction.recommended:
            say(f"hint:  {flags_of_recommended(prediction)}")
    return prediction


def predicted_again(fleet: Fleet, resolved: Resolved, seats: Sequence[Seat], before: Plan) -> Prediction | None:
    """Predict a resumed run; reuse its previous prediction if neither the job nor the measurements have changed."""
    from evener.core.roster import NO_SYNC, asked_sync

    spec, was = resolved.spec, before.spec
    assert was is not None, "a script of the user's own is not resumed"
    same_work = (spec.data, spec.model, spec.machine) == (was.data, was.model, was.machine) and (
        (spec.train.batch, spec.train.micro_batch) == (was.train.batch, was.train.micro_batch)
    )
    places = [(seat.host, seat.device) for seat in seats]
    if (
        before.prediction
        and before.prediction.option(before.prediction.chosen).roster.sync in (NO_SYNC, asked_sync(spec))
        and not fleet.rates
        and same_work
        and places == [(seat.host, seat.device) for seat in before.prediction.cluster.seats]
    ):
        return before.prediction
    return predicted(fleet, resolved, seats)


def as_it_agrees(resolved: Resolved) -> Resolved:
    """Replace `--sync auto` of a resumed run by the strategy it had last, which its checkpoint belongs to."""
    import msgspec

    from evener.core.roster import NO_SYNC

    train = resolved.spec.train
    if resolved.resume is None or train.sync != "auto":
        return resolved
    had = rundir_of(resolved).manifest().roster.sync
    if had == NO_SYNC:
        return resolved
    spec = msgspec.structs.replace(resolved.spec, train=msgspec.structs.replace(train, sync=str(had)))
    return msgspec.structs.replace(resolved, spec=spec)


def as_before(roster: Roster, resolved: Resolved) -> Roster:
    """Return the roster with the bucket size of the resumed run: another size would change the order of summation."""
    import msgspec

    if resolved.resume is None:
        return roster
    was = rundir_of(resolved).manifest().roster
    return roster if was.sync != roster.sync else msgspec.structs.replace(roster, bucket_bytes=was.bucket_bytes)


def predicted_here(resolved: Resolved, seats: Sequence[Seat]) -> Prediction | None:
    """Predict a run on this machine alone, if fleet.toml has its rates."""
    import msgspec

    from evener.core.errors import EvenerError
    from evener.core.fleet import DEFAULT_FLEET, load_fleet

    try:
        fleet = load_fleet(DEFAULT_FLEET)
    except EvenerError:  # this run does not need the file
        return None
    for name, host in fleet.hosts.items():
        if host.is_local and name in fleet.rates:
            member = seats[0].host  # its name in the run's manifest
            alone = msgspec.structs.replace(fleet, hosts={member: host}, links={}, rates={member: fleet.rates[name]})
            return predicted(alone, resolved, seats)
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


def in_order(fleet: Fleet, names: list[str]) -> Fleet:
    """Return the fleet with its hosts in the order of `names`, and the hosts that are not named at the end."""
    import msgspec

    ordered = [name for name in names if name in fleet.hosts] + [name for name in fleet.hosts if name not in names]
    return msgspec.structs.replace(fleet, hosts={name: fleet.hosts[name] for name in ordered})


def tell_plan(plan: Plan) -> None:
    """Print which rank runs on which host, and where the rendezvous is."""
    if not plan.is_here:
        say(f"rendezvous on {plan.hosts[0].name}, {plan.address} port {plan.port}")
    for host in plan.hosts:
        last = host.first_rank + host.num_ranks - 1
        ranks = f"rank {host.first_rank}" if host.num_ranks == 1 else f"ranks {host.first_rank} to {last}"
        say(f"{host.name}: {ranks}" + ("" if plan.is_here else f", {host.interface} {host.address}"))
    agent = plan.hosts[0].agent
    if agent is not None:
        what = "the others go on" if agent.lives else "the others restart from the newest checkpoint"
        say(f"if a host is lost, {what}, and it rejoins when it is back")


def print_plan(plan: Plan, as_json: bool) -> None:
    """Print the plan of --dry-run: as JSON the object that the real call would use, else the command of each host."""
    import msgspec

    if as_json:
        print(msgspec.json.encode(plan).decode())
        return
    for host in plan.hosts:
        print(f"# on {host.name}\n{host.shell_line()}\n")


def left_alone(rundir: RunDir) -> None:
    """Print how to follow, stop and fetch a run that continues without this terminal."""
    from evener.core.plan import read_plan
    from evener.launch import fleet as launcher

    plan = read_plan(rundir)
    if all(state.get("state") == "ended" for state in launcher.known_states(rundir, plan).values()):
        say("the run has ended")
        tell_made(rundir, plan)
        return
    say(f"the run goes on without this terminal\nfollow:  evener logs -f {rundir}\nstop:    evener stop {rundir}")
    if not plan.is_here:
        say(f"fetch its results, now or at its end:  evener fetch {rundir}")


def weights(rundir: RunDir, plan: Plan | None) -> dict[str, Any]:
    """Return for JSON the newest local checkpoint, and the step and host of a newer one that only a host has."""
    local_steps, saved = rundir.checkpoint_steps(), rundir.saved_step()
    newer = None
    if plan is not None and not plan.is_here and saved is not None and saved > max(local_steps, default=-1):
        newer = {"step": saved, "host": plan.hosts[0].name}
    return {
        "checkpoint": str(rundir.checkpoint_path(local_steps[-1])) if local_steps else None,
        "newer_checkpoint": newer,
    }


def tell_weights(rundir: RunDir, plan: Plan | None) -> None:
    """Print where the newest weights are: in a local checkpoint, on a host, or nowhere."""
    info = weights(rundir, plan)
    if info["checkpoint"]:
        say(f"weights: {info['checkpoint']}")
    if newer := info["newer_checkpoint"]:
        say(f"weights of step {newer['step']}: only on {newer['host']}; evener fetch {rundir} copies them here")
    elif not info["checkpoint"] and (plan is None or plan.kind == "train"):
        say("weights: none saved")


def tell_made(rundir: RunDir, plan: Plan) -> None:
    """Print what an ended run produced: its weights, and the files that a script wrote on its hosts."""
    from evener.launch.fleet import known_states
    from evener.launch.written import written

    tell_weights(rundir, plan)
    outputs = written(plan, known_states(rundir, plan))
    for name, of_host in outputs.items():
        say(of_host.told(name))
    if outputs:
        say(f"fetch it: evener fetch {rundir}")


def on_lost(host: HostMirror) -> None:
    """Print that the connection to a host was lost, or is back."""
    if host.error is not None:
        say(f"{host.error}; retrying, the run goes on without the connection")
    else:
        say(f"{host.name}: connected again; no records were lost")


class Lines:
    """Print the output of all ranks as it arrives: `2 attic │ text`."""

    def __init__(
        self, rundir: RunDir, plan: Plan, hosts: set[str] | None = None, ranks: set[int] | None = None
    ) -> None:
        self._rundir, self._hosts, self._ranks = rundir, hosts, ranks
        self._followers: dict[str, Iterator[list[bytes]]] = {}
        self._width = 0
        self.add(plan)

    def add(self, plan: Plan) -> None:
        """Follow the hosts and ranks of a plan that are not followed yet."""
        from evener.core.files import follow_lines

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

    def print_new(self, *, stamps: bool = False) -> None:
        """Print the lines that are new since the last call, sorted by time stamp."""
        for stamp, label, _, text in self._new():
            shown = text.rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
            line = f"{label:{self._width}} │ {shown}"
            print(f"{stamp} {line}" if stamps else line, flush=True)

    def print_new_json(self) -> None:
        """Print the new lines as JSON, one object a line; rank is null for a launcher's own output."""
        import json

        for stamp, label, stream, text in self._new():
            rank, host = label.split()
            record = {"time": stamp, "host": host, "rank": None if rank == "-" else int(rank)}
            print(json.dumps(record | {"stream": "stdout" if stream in "Oo" else "stderr", "text": text}), flush=True)

    def _new(self) -> list[tuple[str, str, str, str]]:
        """Return the new lines as (time, label, O or E, text), sorted by time."""
        new = []
        for label, follower in self._followers.items():
            for line in next(follower):
                stamp, _, text = line.decode(errors="replace").partition(" ")
                new.append((stamp, label, text[:1], text[2:]))
        return sorted(new, key=lambda line: line[0])


@contextlib.contextmanager
def connected(path: str) -> Iterator[tuple[Fleet, Sessions, dict[str, HostError]]]:
    """Connect to all hosts of a fleet file; yield (fleet, sessions, errors)."""
    from evener.core.fleet import load_fleet
    from evener.hosts.session import connect

    fleet = load_fleet(path)
    with connect(fleet) as (sessions, errors):
        yield fleet, sessions, errors
