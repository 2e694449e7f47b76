"""evener train: train a model here or on a fleet. Its flags are the leaves of RunSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from evener.core.cluster.fleet_file import Fleet
    from evener.core.run.resolve import ResolvedRun
    from evener.core.run.run_plan import Plan
    from evener.core.run.run_spec import RunSpec

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

    from evener.cli import follow_output, logger_processes, start_run
    from evener.core.run.run_plan import read_plan_if_present
    from evener.core.run.rundir import RunDir
    from evener.corpus.token_check import check_token_ids
    from evener.report.read.run_summary import summarize_run, summary_json

    logged = logger_processes.select_loggers(log, None if resume is None else RunDir(resume))
    before = None if resume is None else read_plan_if_present(RunDir(resume))
    chosen = (
        start_run.select_fleet(fleet, hosts)
        if resume is None
        else start_run.select_fleet_to_resume(fleet, hosts, before)
    )
    resolved = _resolve_spec(spec_file, resume, flags)
    check_token_ids(resolved.corpus)
    if resolved.resume is not None:
        where = "this machine" if chosen is None else ", ".join(chosen.hosts)
        start_run.print_status(f"resuming from step {resolved.resume.step} on {where}")
    if chosen is None:
        status = _train_locally(before, resolved, logged, detach, dry_run, as_json)
    else:
        status = _train_on_fleet(chosen, before, resolved, logged, detach, dry_run, as_json)
    if status is not None:
        return status
    summary = summarize_run(start_run.rundir_of(resolved))
    rundir = start_run.rundir_of(resolved)
    if as_json:
        print(json.dumps(summary_json(summary) | start_run.checkpoint_info(rundir, read_plan_if_present(rundir))))
    else:
        follow_output.print_summary(summary)
        start_run.print_checkpoint(rundir, read_plan_if_present(rundir))
    return follow_output.exit_status(summary.manifest)


def _train_locally(before: Plan | None, resolved: ResolvedRun, logged: list[str], detach: bool, dry_run: bool,
          as_json: bool) -> int | None:  # fmt: skip
    """Train on this machine alone. Return the exit status if there is no result to report, else None.

    `before` is the plan of a run that is resumed.
    """
    import msgspec

    from evener.cli import follow_output, logger_processes, start_run
    from evener.launch import launcher, local_run

    rundir, resumes, to_plan = (
        start_run.rundir_of(resolved),
        resolved.resume is not None,
        start_run.with_previous_sync(resolved),
    )
    with local_run.open_local_session() as sessions:
        ranks, run_id = resolved.spec.machine.ranks, before.id if before else None
        prepared = local_run.prepare_local(sessions, rundir, ranks=ranks, run_id=run_id)
        roster = prepared.initial_roster(to_plan)
        prediction = start_run.predict_local_run(to_plan, prepared.rank_slots(resolved.spec.machine))
        roster = start_run.with_previous_buckets(
            prediction.option(prediction.chosen).roster if prediction else roster, resolved
        )
        plan, _ = launcher.plan_training(prepared, resolved, roster, resume=resumes)
        plan = msgspec.structs.replace(plan, prediction=prediction)
        if dry_run:
            start_run.print_plan(plan, as_json)
            return 0
        if detach:
            launcher.start(rundir, plan, sessions)
            logger_processes.defer_loggers(rundir, logged)
            start_run.print_detached(rundir)
            return 0
        with (logger_processes.feed_loggers(rundir, logged) as feeding,
              follow_output.display_run(resolved, plan, quiet=as_json) as observe):  # fmt: skip
            local_run.run_attached(rundir, plan, sessions, feeding(observe))
    if not rundir.is_run():
        start_run.print_status("stopped before the first step; nothing was saved")
        return 130
    return None


def _train_on_fleet(
    fleet: Fleet,
    before: Plan | None,
    resolved: ResolvedRun,
    logged: list[str],
    detach: bool,
    dry_run: bool,
    as_json: bool,
) -> int | None:
    """Train on a fleet. Return the exit status if there is no result to report, else None.

    `before` is the plan of a run that is resumed.
    """
    from evener.cli import fleet_training, follow_output, logger_processes, start_run
    from evener.core.base.errors import UsageError
    from evener.core.run.run_plan import read_plan_if_present
    from evener.launch.follow_run import follow_run
    from evener.ssh.session import connect

    rundir = start_run.rundir_of(resolved)
    existing = read_plan_if_present(rundir)
    if existing is not None and not existing.is_local_run and resolved.resume is None:
        # Its hosts may have newer records and checkpoints than its directory.
        raise UsageError(
            f"--out {rundir}: already contains a run", hint=f"evener train --resume {rundir}, or another --out"
        )
    with connect(fleet) as (sessions, errors):
        plan, trees, prepared = fleet_training.plan_fleet_training(fleet, sessions, errors, resolved, before)
        if dry_run:
            start_run.print_plan(plan, as_json)
            return 0
        fleet_training.start_fleet_training(plan, trees, prepared, sessions, resolved)
    if not as_json:
        start_run.print_placement(plan)
    if detach:
        logger_processes.defer_loggers(rundir, logged)
        start_run.print_detached(rundir)
        return 0
    try:
        with (logger_processes.feed_loggers(rundir, logged) as feeding,
              follow_output.display_run(resolved, plan, quiet=as_json) as observe):  # fmt: skip
            follow_run(rundir, plan, feeding(observe), start_run.print_connection_change, notify=start_run.print_status)
    except KeyboardInterrupt:
        start_run.print_detached(rundir)
        return 130
    return None


def _resolve_spec(spec_file: str | None, resume: str | None, flags: dict[str, str | bool | None]) -> ResolvedRun:
    """Build and check the spec from the TOML file and the flags; a resumed run starts from its own spec."""
    from pathlib import Path

    import msgspec

    from evener.cli.flags import explicit_values
    from evener.core.base.errors import UsageError
    from evener.core.run.resolve import default_run_path, resolve
    from evener.core.run.run_spec import make_spec

    texts = explicit_values(flags)
    base = None
    if resume is not None:
        if spec_file is not None or "out" in texts:
            raise UsageError("--resume: the run has its own spec and directory", hint="without --out and the TOML file")
        base = msgspec.structs.replace(_resumed_spec(resume), out=resume)
    spec = make_spec(Path(spec_file) if spec_file else None, texts, base)
    resolved = resolve(spec, resume=resume is not None)
    return msgspec.structs.replace(resolved, spec=msgspec.structs.replace(spec, out=spec.out or default_run_path(spec)))


def _resumed_spec(resume: str) -> RunSpec:
    """Return the spec of a run that is resumed, after fetching its records and newest checkpoint."""
    from evener.cli import start_run
    from evener.core.base.errors import HostError, UsageError
    from evener.core.run.run_plan import read_plan_if_present
    from evener.core.run.rundir import RunDir

    rundir = RunDir(resume)
    plan = read_plan_if_present(rundir)
    if plan is None:
        return rundir.manifest().spec
    if plan.spec is None:
        raise UsageError(f"{resume}: a program of your own, which evener cannot resume", hint="evener launch again")
    from evener.launch import launcher
    from evener.transfer import checkpoint_transfer

    for name, state in launcher.query_states(rundir, plan).items():
        if not isinstance(state, HostError) and state["state"] == "running":
            raise UsageError(
                f"{resume}: still running on {name}", hint=f"evener logs -f {resume}, or evener stop {resume}"
            )
    launcher.mirror_once(rundir, plan)
    try:
        checkpoint_transfer.fetch_checkpoints(rundir, plan, start_run.print_status)
    except HostError as error:
        start_run.print_status(f"warning: {error}; resuming from the newest checkpoint on this machine")
    return plan.spec


def register(app: typer.Typer) -> None:
    """Add `train`, with one option for every leaf of RunSpec."""
    from evener.cli.flags import CommandParameter, command_signature, spec_options

    options: list[CommandParameter] = [
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
    command.__signature__ = command_signature(options)  # type: ignore[attr-defined]
    app.command("train", epilog=EXAMPLES)(command)
