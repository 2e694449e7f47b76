"""What do the verbs that start and follow a run have in common?"""

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
    """The fleet file that a verb uses: the one given, else fleet.toml where there is one."""
    from evener.core.fleet import DEFAULT_FLEET

    if given is not None:
        return None if given == HERE_ALONE else given
    return DEFAULT_FLEET if Path(DEFAULT_FLEET).exists() else None


def chosen(given: str | None, names: str | None) -> Fleet | None:
    """The hosts that a training runs on: of the fleet file given, else of fleet.toml where there is one; None is this
    machine alone.
    """
    from evener.core.fleet import load_fleet

    path = fleet_path(given)
    return _only(None if path is None else load_fleet(path), names)


def chosen_again(given: str | None, names: str | None, before: Plan | None) -> Fleet | None:
    """The same of a run that is resumed: the hosts where it was, unless a file is given. `before` is its plan, None of
    a worker that was started by hand. What fleet.toml knows of those hosts is taken along.
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
        raise UsageError("--hosts names hosts of a fleet, and there is none", hint="--fleet FILE")
    return None if fleet is None else only(fleet, names)


def say(text: str) -> None:
    """One line for a person."""
    print(text, file=sys.stderr, flush=True)


def find_run(run: str) -> Path:
    """The directory of a run that is named by it, or by the id that its processes carry on the hosts."""
    from evener.core.files import read_file

    for path in Path("runs").glob("*/plan.json"):
        if not Path(run).exists() and read_file(path).find(f'"id": "{run}"'.encode()) >= 0:
            return path.parent
    return Path(run)


def rundir_of(resolved: Resolved) -> RunDir:
    """The directory of a run that is about to begin: by now it has one, asked for or not."""
    from evener.core.rundir import RunDir

    assert resolved.spec.out is not None
    return RunDir(resolved.spec.out)


def tell_warnings(prepared: Prepared) -> None:
    """What the preflight found that does not stand in the way."""
    from evener.cli.terminal import console

    tell_findings(console(stderr=True), prepared.findings)


def tell_findings(screen: Console, findings: Sequence[Finding]) -> None:
    """What, where, the evidence; and the next step in one line, so that it can be pasted."""
    from evener.cli import terminal

    for finding in findings:
        where = " → ".join(name for name in (finding.host, finding.peer) if name)
        terminal.say(screen, f"{finding.severity}: {finding.check}{'  ' + where if where else ''}: {finding.evidence}")
        screen.print(f"hint:  {finding.fix}", soft_wrap=True)


def predicted(fleet: Fleet, resolved: Resolved, seats: Sequence[Seat], *, as_asked: bool = False) -> Prediction | None:
    """What the planner says of a run on these seats, told in a line, whom it leaves out, and what would be better.

    None where it knows too little to say anything. `as_asked`: it leaves out none, and is not asked what is better.
    """
    from evener.core.errors import UsageError
    from evener.plan.advice import price_in_loss
    from evener.plan.question import of_training
    from evener.plan.search import flags_of_recommended, in_a_line

    try:
        prediction = of_training(fleet, resolved.job, seats, leaves_out=not as_asked)
    except UsageError as unknown:  # what stands in the run's own way is told by those who start it
        say(f"no prediction: {unknown}" + (f"; {unknown.hint}" if unknown.hint else ""))
        if resolved.spec.train.sync == "auto":
            say("--sync auto takes ddp where nothing can be predicted")
        return None
    for why in dict.fromkeys(prediction.left_out.values()):
        names = ", ".join(name for name, of_host in prediction.left_out.items() if of_host == why)
        say(f"left out: {names}: {why}\nhint:  --shares equal has all hosts take part")
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
    """The same of a run that is resumed: what was said of it before where nothing has changed and nobody knows more."""
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
    """A run that chooses its way to agree goes on with the one that it had last: its checkpoint is of that one."""
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
    """The Roster with the buckets of the run that is resumed: others would add ranks up in another order."""
    import msgspec

    if resolved.resume is None:
        return roster
    was = rundir_of(resolved).manifest().roster
    return roster if was.sync != roster.sync else msgspec.structs.replace(roster, bucket_bytes=was.bucket_bytes)


def predicted_here(resolved: Resolved, seats: Sequence[Seat]) -> Prediction | None:
    """The same of this machine alone, where fleet.toml has figures of it."""
    import msgspec

    from evener.core.errors import EvenerError
    from evener.core.fleet import DEFAULT_FLEET, load_fleet

    try:
        fleet = load_fleet(DEFAULT_FLEET)
    except EvenerError:  # a file that this run does not need
        return None
    for name, host in fleet.hosts.items():
        if host.is_local and name in fleet.rates:
            own = seats[0].host  # as the run's manifest will call it
            alone = msgspec.structs.replace(fleet, hosts={own: host}, links={}, rates={own: fleet.rates[name]})
            return predicted(alone, resolved, seats)
    return None


def with_ranks(fleet: Fleet, ranks: int | None, device: Literal["auto", "cpu", "cuda"] = "auto") -> Fleet:
    """The fleet with so many ranks on every host, and these on such devices."""
    import msgspec

    hosts = {
        name: msgspec.structs.replace(
            host, ranks=ranks or host.ranks, devices=host.devices if device == "auto" else device
        )
        for name, host in fleet.hosts.items()
    }
    return msgspec.structs.replace(fleet, hosts=hosts)


def in_order(fleet: Fleet, names: list[str]) -> Fleet:
    """The fleet with its hosts in this order, those that it does not name behind."""
    import msgspec

    ordered = [name for name in names if name in fleet.hosts] + [name for name in fleet.hosts if name not in names]
    return msgspec.structs.replace(fleet, hosts={name: fleet.hosts[name] for name in ordered})


def tell_plan(plan: Plan) -> None:
    """Which rank is where."""
    if not plan.is_here:
        say(f"rendezvous on {plan.hosts[0].name}, {plan.address} port {plan.port}")
    for host in plan.hosts:
        last = host.first_rank + host.num_ranks - 1
        ranks = f"rank {host.first_rank}" if host.num_ranks == 1 else f"ranks {host.first_rank} to {last}"
        say(f"{host.name}: {ranks}" + ("" if plan.is_here else f", {host.interface} {host.address}"))
    agent = plan.hosts[0].agent
    if agent is not None:
        what = "the others go on" if agent.lives else "the others begin again from the newest checkpoint"
        say(f"should a host be lost, {what}, and it is let in again when it is back")


def print_plan(plan: Plan, as_json: bool) -> None:
    """--dry-run: the very object that the real call would use, or what to type on each host."""
    import msgspec

    if as_json:
        print(msgspec.json.encode(plan).decode())
        return
    for host in plan.hosts:
        print(f"# on {host.name}\n{host.shell_line()}\n")


def left_alone(rundir: RunDir) -> None:
    """What to tell somebody who stops watching."""
    from evener.core.plan import read_plan
    from evener.launch import fleet as launcher

    plan = read_plan(rundir)
    if all(state.get("state") == "ended" for state in launcher.known_states(rundir, plan).values()):
        say("the run has ended")
        tell_made(rundir, plan)
        return
    say(f"the run goes on without this terminal\nsee it:  evener logs -f {rundir}\nend it:  evener stop {rundir}")
    if not plan.is_here:
        say(f"bring home what it makes, now or at its end:  evener fetch {rundir}")


def weights(rundir: RunDir, plan: Plan | None) -> dict[str, Any]:
    """As JSON tells it: the newest checkpoint that is here, and the host that alone has a newer one."""
    here, saved = rundir.checkpoint_steps(), rundir.saved_step()
    newer = None
    if plan is not None and not plan.is_here and saved is not None and saved > max(here, default=-1):
        newer = {"step": saved, "host": plan.hosts[0].name}
    return {"checkpoint": str(rundir.checkpoint_path(here[-1])) if here else None, "newer_checkpoint": newer}


def tell_weights(rundir: RunDir, plan: Plan | None) -> None:
    """Where the weights lie, and whether that is here."""
    found = weights(rundir, plan)
    if found["checkpoint"]:
        say(f"weights: {found['checkpoint']}")
    if newer := found["newer_checkpoint"]:
        say(f"weights of step {newer['step']}: on {newer['host']} alone; they come with: evener fetch {rundir}")
    elif not found["checkpoint"] and (plan is None or plan.kind == "train"):
        say("weights: it saved none")


def tell_made(rundir: RunDir, plan: Plan) -> None:
    """What a run that ended made: its weights, what a script wrote where it ran; and how it comes home."""
    from evener.launch.fleet import known_states
    from evener.launch.written import written

    tell_weights(rundir, plan)
    found = written(plan, known_states(rundir, plan))
    for name, of_host in found.items():
        say(of_host.told(name))
    if found:
        say(f"bring it home: evener fetch {rundir}")


def on_lost(host: HostMirror) -> None:
    """A host went out of sight, or came back."""
    if host.error is not None:
        say(f"{host.error}; trying again, the run goes on without it")
    else:
        say(f"{host.name}: seen again; nothing was missed")


class Lines:
    """What the ranks print, as it comes home: `2 attic │ text`."""

    def __init__(
        self, rundir: RunDir, plan: Plan, hosts: set[str] | None = None, ranks: set[int] | None = None
    ) -> None:
        self._rundir, self._hosts, self._ranks = rundir, hosts, ranks
        self._followers: dict[str, Iterator[list[bytes]]] = {}
        self._width = 0
        self.add(plan)

    def add(self, plan: Plan) -> None:
        """The hosts of a plan, as far as they are new."""
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
        """Print what came since the last time, in the order of its time stamps."""
        for stamp, label, _, text in self._new():
            shown = text.rstrip("\r").rpartition("\r")[2]  # of a progress bar, how it stands
            line = f"{label:{self._width}} │ {shown}"
            print(f"{stamp} {line}" if stamps else line, flush=True)

    def print_new_json(self) -> None:
        """The same as JSON lines; rank is null for a launcher's own output."""
        import json

        for stamp, label, stream, text in self._new():
            rank, host = label.split()
            told = {"time": stamp, "host": host, "rank": None if rank == "-" else int(rank)}
            print(json.dumps(told | {"stream": "stdout" if stream in "Oo" else "stderr", "text": text}), flush=True)

    def _new(self) -> list[tuple[str, str, str, str]]:
        """(time, label, O or E, text), by time."""
        new = []
        for label, follower in self._followers.items():
            for line in next(follower):
                stamp, _, text = line.decode(errors="replace").partition(" ")
                new.append((stamp, label, text[:1], text[2:]))
        return sorted(new, key=lambda one: one[0])


@contextlib.contextmanager
def connected(path: str) -> Iterator[tuple[Fleet, Sessions, dict[str, HostError]]]:
    """(fleet, sessions, errors) of a fleet file."""
    from evener.core.fleet import load_fleet
    from evener.hosts.session import connect

    fleet = load_fleet(path)
    with connect(fleet) as (sessions, errors):
        yield fleet, sessions, errors
