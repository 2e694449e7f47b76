"""evener train: train a model here or on a fleet. Its flags are the leaves of RunSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from evener.core.fleet import Fleet
    from evener.core.plan import Plan
    from evener.core.resolve import Resolved
    from evener.core.spec import RunSpec

EXAMPLES = (
    "evener train --data data/verbs --ranks 2 --steps 100 --out runs/mine\n"
    "evener train --resume runs/mine --steps 200\n"
    "evener train --fleet fleet.toml --data data/verbs --sync auto"
)

SPEC_FILE = typer.Argument(None, metavar="SPEC.toml", help="a run as TOML ([train] steps = 100); flags win over it")
RESUME = typer.Option(None, "--resume", metavar="RUN", help="resume this run from its newest checkpoint")
FLEET = typer.Option(
    None, "--fleet", metavar="FILE", help="hosts to train on; local: this machine [fleet.toml if here]"
)
HOSTS = typer.Option(None, "--hosts", metavar="NAME,…", help="only these hosts of the fleet [all]")
LOG = typer.Option(
    None, "--log", metavar="LOGGER", help="log each step to tensorboard, wandb, trackio or mlflow; may be given again"
)
DETACH = typer.Option(False, "--detach", help="start the run, and return")
DRY_RUN = typer.Option(False, "--dry-run", help="print the exact command and environment, and start nothing")
AS_JSON = typer.Option(False, "--json", help="print one JSON object at the end")


def train(spec_file: str | None, resume: str | None, fleet: str | None, hosts: str | None, log: list[str] | None,
          detach: bool, dry_run: bool, as_json: bool, **flags: str | bool | None) -> int:  # fmt: skip
    """Train a model on this machine, or on all hosts of a fleet.

    On this machine Ctrl-C finishes the step, saves a checkpoint and exits; a second Ctrl-C ends the run at once. On a
    fleet, and with --detach, the run goes on without this terminal; `evener stop` ends it. --resume continues from the
    newest checkpoint. The result is bit for bit the same on one rank, and on several with fixed shares. With --shares
    auto, where the shares follow the hosts' speed, it is the same within rounding.
    """
    import json

    from evener.cli import fleets, follow, loggers
    from evener.core.plan import find_plan
    from evener.core.rundir import RunDir
    from evener.corpus.check import check_token_ids
    from evener.report.summary import as_result, summarize

    logged = loggers.chosen(log, None if resume is None else RunDir(resume))
    before = None if resume is None else find_plan(RunDir(resume))
    chosen = fleets.chosen(fleet, hosts) if resume is None else fleets.chosen_again(fleet, hosts, before)
    resolved = _resolved(spec_file, resume, flags)
    check_token_ids(resolved.corpus)
    if resolved.resume is not None:
        where = "this machine" if chosen is None else ", ".join(chosen.hosts)
        fleets.say(f"resuming from step {resolved.resume.step} on {where}")
    if chosen is None:
        status = _here(before, resolved, logged, detach, dry_run, as_json)
    else:
        status = _on_fleet(chosen, before, resolved, logged, detach, dry_run, as_json)
    if status is not None:
        return status
    summary = summarize(fleets.rundir_of(resolved))
    rundir = fleets.rundir_of(resolved)
    if as_json:
        print(json.dumps(as_result(summary) | fleets.weights(rundir, find_plan(rundir))))
    else:
        follow.tell_end(summary)
        fleets.tell_weights(rundir, find_plan(rundir))
    return follow.exit_status(summary.manifest)


def _here(before: Plan | None, resolved: Resolved, logged: list[str], detach: bool, dry_run: bool,
          as_json: bool) -> int | None:  # fmt: skip
    """Train on this machine alone. Return the exit status if there is no result to report, else None.

    `before` is the plan of a run that is resumed.
    """
    import msgspec

    from evener.cli import fleets, follow, loggers
    from evener.launch import fleet as launcher
    from evener.launch import here

    rundir, resumes, to_plan = fleets.rundir_of(resolved), resolved.resume is not None, fleets.as_it_agrees(resolved)
    with here.this_machine_connected() as sessions:
        ranks, run_id = resolved.spec.machine.ranks, before.id if before else None
        prepared = here.prepare_here(sessions, rundir, ranks=ranks, run_id=run_id)
        roster = prepared.roster(to_plan)
        prediction = fleets.predicted_here(to_plan, prepared.seats(resolved.spec.machine))
        roster = fleets.as_before(prediction.option(prediction.chosen).roster if prediction else roster, resolved)
        plan, _ = launcher.plan_training(prepared, resolved, roster, resume=resumes)
        plan = msgspec.structs.replace(plan, prediction=prediction)
        if dry_run:
            fleets.print_plan(plan, as_json)
            return 0
        if detach:
            launcher.start(rundir, plan, sessions)
            loggers.leave(rundir, logged)
            fleets.left_alone(rundir)
            return 0
        with (loggers.fed(rundir, logged) as feeding,
              follow.screen(resolved, plan, quiet=as_json) as observe):  # fmt: skip
            here.stay_with(rundir, plan, sessions, feeding(observe))
    if not rundir.is_run():
        fleets.say("stopped before the first step; nothing was saved")
        return 130
    return None


def _on_fleet(fleet: Fleet, before: Plan | None, resolved: Resolved, logged: list[str], detach: bool, dry_run: bool,
              as_json: bool) -> int | None:  # fmt: skip
    """Train on a fleet. Return the exit status if there is no result to report, else None.

    `before` is the plan of a run that is resumed.
    """
    from evener.cli import fleet_run, fleets, follow, loggers
    from evener.core.errors import UsageError
    from evener.core.plan import find_plan
    from evener.hosts.session import connect
    from evener.launch.follow import follow as follow_run

    rundir = fleets.rundir_of(resolved)
    existing = find_plan(rundir)
    if existing is not None and not existing.is_here and resolved.resume is None:
        # Its hosts may have newer records and checkpoints than its directory.
        raise UsageError(
            f"--out {rundir}: already contains a run", hint=f"evener train --resume {rundir}, or another --out"
        )
    with connect(fleet) as (sessions, errors):
        plan, trees, prepared = fleet_run.planned(fleet, sessions, errors, resolved, before)
        if dry_run:
            fleets.print_plan(plan, as_json)
            return 0
        fleet_run.begin(plan, trees, prepared, sessions, resolved)
    if not as_json:
        fleets.tell_plan(plan)
    if detach:
        loggers.leave(rundir, logged)
        fleets.left_alone(rundir)
        return 0
    try:
        with (loggers.fed(rundir, logged) as feeding,
              follow.screen(resolved, plan, quiet=as_json) as observe):  # fmt: skip
            follow_run(rundir, plan, feeding(observe), fleets.on_lost, say=fleets.say)
    except KeyboardInterrupt:
        fleets.left_alone(rundir)
        return 130
    return None


def _resolved(spec_file: str | None, resume: str | None, flags: dict[str, str | bool | None]) -> Resolved:
    """Build and check the spec from the TOML file and the flags; a resumed run starts from its own spec."""
    from pathlib import Path

    import msgspec

    from evener.cli.flags import given
    from evener.core.errors import UsageError
    from evener.core.resolve import new_run_path, resolve
    from evener.core.spec import make_spec

    texts = given(flags)
    base = None
    if resume is not None:
        if spec_file is not None or "out" in texts:
            raise UsageError("--resume: the run has its own spec and directory", hint="without --out and the TOML file")
        base = msgspec.structs.replace(_spec_of(resume), out=resume)
    spec = make_spec(Path(spec_file) if spec_file else None, texts, base)
    resolved = resolve(spec, resume=resume is not None)
    return msgspec.structs.replace(resolved, spec=msgspec.structs.replace(spec, out=spec.out or new_run_path(spec)))


def _spec_of(resume: str) -> RunSpec:
    """Return the spec of a run that is resumed, after fetching its records and newest checkpoint."""
    from evener.cli import fleets
    from evener.core.errors import HostError, UsageError
    from evener.core.plan import find_plan
    from evener.core.rundir import RunDir

    rundir = RunDir(resume)
    plan = find_plan(rundir)
    if plan is None:
        return rundir.manifest().spec
    if plan.spec is None:
        raise UsageError(f"{resume}: a program of your own, which evener cannot resume", hint="evener launch again")
    from evener.launch import carry
    from evener.launch import fleet as launcher

    for name, state in launcher.states(rundir, plan).items():
        if not isinstance(state, HostError) and state["state"] == "running":
            raise UsageError(
                f"{resume}: still running on {name}", hint=f"evener logs -f {resume}, or evener stop {resume}"
            )
    launcher.catch_up(rundir, plan)
    try:
        carry.bring(rundir, plan, fleets.say)
    except HostError as error:
        fleets.say(f"warning: {error}; resuming from the newest checkpoint on this machine")
    return plan.spec


def add_to(app: typer.Typer) -> None:
    """Add `train`, with one option for every leaf of RunSpec."""
    from evener.cli.flags import Parameter, signature, spec_options

    options: list[Parameter] = [
        ("spec_file", SPEC_FILE, str | None),
        ("resume", RESUME, str | None),
        ("fleet", FLEET, str | None),
        ("hosts", HOSTS, str | None),
        ("log", LOG, list[str] | None),
        ("detach", DETACH, bool),
        ("dry_run", DRY_RUN, bool),
        ("as_json", AS_JSON, bool),
    ]
    options += spec_options()

    def command(**values: Any) -> int:
        return train(**values)

    command.__doc__ = train.__doc__
    command.__signature__ = signature(options)  # type: ignore[attr-defined]
    app.command("train", epilog=EXAMPLES)(command)
