"""evener launch: run any program that torchrun can run, on a fleet or on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from evener.cli.trust import TRUST
from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evener.core.run.run_plan import Plan
    from evener.core.run.rundir import RunDir
    from evener.launch.script.predict_program import LaunchPrediction
    from evener.transfer.mirror import SupervisorState


EXAMPLES = "evener launch -- train.py --lr 1e-3"


def launch(
    program: list[str] = typer.Argument(..., metavar="-- SCRIPT.py …", help="a program; or -- -m MODULE …"),
    fleet: str | None = typer.Option(None, help="hosts to run on; local: this machine [fleet.toml if here]"),
    ranks: int | None = typer.Option(None, min=1, max=1024, help="processes on each host [one per GPU, else one]"),
    include: list[str] | None = typer.Option(
        None, help="send this path even if git ignores it, or if it is a file or folder of secrets; may be given again"
    ),
    env: list[str] | None = typer.Option(
        None, metavar="NAME[=VALUE]", help="a variable for the ranks, a secret too; may be given again"
    ),
    env_file: list[str] | None = typer.Option(
        None, metavar="FILE", help="a file of such variables, one a line; may be given again"
    ),
    sync: str = typer.Option(
        "ddp",
        metavar="NAME",
        help="how DDP models are synchronized: ddp, packed, bf16, int8, int4, powersgd:R, diloco:H; or auto, from "
        "the newest run of this program",
    ),
    shares: str = typer.Option("equal", help="shares of each batch by rank, such as 2:1; or auto, as for --sync"),
    membership: str = typer.Option(
        "fixed", metavar="fixed|restart", help="when a host is lost: end the run, or restart all ranks on the others"
    ),
    resume_args: str = typer.Option(
        "", metavar="ARGS", help="with restart: given to the program at every start but the first: '--resume latest'"
    ),
    independent: bool = typer.Option(
        False, "--independent", help="the ranks are meant to have nothing to do with each other, as in a sweep"
    ),
    no_compat: bool = typer.Option(False, "--no-compat", help="do not add to Gloo what programs for NCCL need"),
    no_measure: bool = typer.Option(False, "--no-measure", help="do not measure the program's steps"),
    out: str | None = typer.Option(None, help="run directory [runs/DATE-SCRIPT]"),
    private: bool = typer.Option(
        False, "--private", help="start only if firewalls block all but the run's hosts from its ports"
    ),
    port: int | None = typer.Option(None, min=1, max=65535, help="of the rendezvous [29500, or another free port]"),
    detach: bool = typer.Option(False, "--detach", help="start the run, and return"),
    trust: bool = TRUST,
    dry_run: bool = typer.Option(False, "--dry-run", help="print what each host would run, and start nothing"),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object at the end"),
) -> int:
    """Run a script of your own on every host of the fleet, or on this machine alone, as torchrun would.

    The current folder is sent to the hosts (in a git repository: what git does not ignore), always to the same place,
    so that scripts find the files that they wrote before; `evener fetch` copies these here. Files that may hold secrets
    (.env, keys, credentials) are not sent unless --include names them. Ranks get RANK, WORLD_SIZE, MASTER_ADDR, the
    right network interface, and the variables of NCCL, torch, Hugging Face and W&B that are set here. Variables that
    may hold secrets are left out: --env NAME passes one, and its value is not written to the run directory. `python`,
    `torchrun`, `accelerate launch` or `deepspeed` before the script are left out with their options, and `trl sft` is
    the module that it starts; `bash run.sh`, or a console script of a package, runs once a rank. On this machine Ctrl-C
    ends the run; on a fleet it only stops watching.
    """
    import contextlib
    import os
    import time
    from pathlib import Path

    import msgspec

    from evener.cli import follow_output, run_output
    from evener.cli.run_output import find_run_dirs
    from evener.cli.trust import approve_fleet
    from evener.core.base.errors import RunError, UsageError
    from evener.core.cluster.fleet_file import fleet_path, load_fleet
    from evener.core.run.roster import check_number_of_shares
    from evener.core.run.run_spec import MachineSpec
    from evener.core.run.rundir import RunDir
    from evener.launch.follow_run import follow_run
    from evener.launch.prepare_hosts import connect_hosts, prepare_hosts
    from evener.launch.script.passed_variables import read_passed_variables
    from evener.launch.script.predict_program import predict_program, program_digest
    from evener.launch.script.program_arguments import parse_program
    from evener.launch.script.script_options import (
        check_options,
        script_options,
        script_resume_args,
    )
    from evener.launch.start_run import plan_script, started
    from evener.transfer.file_tree import ignored_file_sizes, summarize_largest

    path = fleet_path(fleet)
    parsed = parse_program(program, Path.cwd().resolve())
    switches = {"independent": independent, "no_compat": no_compat, "no_measure": no_measure}
    measures = not (no_measure or independent)
    check_options(sync, shares, **switches)
    restarts = script_resume_args(membership, resume_args, shares, no_measure=not measures)
    passed = read_passed_variables([*parsed.variables, *(env or [])], env_file or [], os.environ)
    ranks = ranks or parsed.ranks or (parsed.total_ranks if path is None else None)
    if parsed.is_translated:
        run_output.print_status(parsed.describe(ranks))
    rundir = RunDir(out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{parsed.name}")
    if rundir.path.exists():
        raise UsageError(f"--out {rundir}: exists already", hint="another --out")
    with contextlib.ExitStack() as attachment:
        with connect_hosts(None if path is None else approve_fleet(load_fleet(path), trust)) as hosts:
            machine = MachineSpec(private=private)
            prepared = prepare_hosts(hosts.with_ranks(ranks), rundir, machine, port=port, cwd=parsed.project)
            digest = program_digest(parsed.project, parsed.argv)
            runs = find_run_dirs(rundir.path.parent)
            known: LaunchPrediction | str = ""
            if measures:
                of_hosts = None if path is None else hosts.fleet
                known = predict_program(runs, digest, prepared.rank_counts, sync, shares, of_hosts)
            sync, shares = _print_prediction(known, parsed.name, sync, shares)
            options = script_options(sync, shares, **switches)
            run = plan_script(
                prepared, rundir, parsed.project, parsed.argv, os.environ, include or [], passed, options, restarts
            )
            plan = msgspec.structs.replace(
                run.plan, program_digest=digest, prediction=None if isinstance(known, str) else known.prediction
            )
            run = msgspec.structs.replace(run, plan=plan)
            check_number_of_shares(shares, plan.world_size)
            run_output.print_warnings(run)
            if dry_run:
                run_output.print_plan(plan, as_json)
                return 0
            if run.trees and (skipped := ignored_file_sizes(parsed.project, run.trees[0])):
                run_output.print_status(
                    f"not sent, because git ignores it: {summarize_largest(skipped)}\nhint:  --include PATH sends it"
                )
            attachment.enter_context(started(run, hosts.sessions, run_output.print_status, detach=detach))
        run_output.print_placement(plan)
        run_output.print_status(f"run directory {rundir}")
        if detach:
            run_output.print_detached(rundir)
            return 0
        lines = run_output.RankLogPrinter(rundir, plan)
        try:
            states = follow_run(
                rundir,
                plan,
                follow_output.print_health_event,
                lambda mirror: None if as_json else lines.print_new(),
                notify=run_output.print_status,
            )
        except KeyboardInterrupt:
            run_output.print_detached(rundir)
            return 130
        except RunError:
            if not plan.is_local_run:
                run_output.print_outputs(rundir, plan)
            raise
    return _print_result(rundir, plan, states, as_json)


def _print_prediction(known: LaunchPrediction | str, name: str, sync: str, shares: str) -> tuple[str, str]:
    """Print what is known of a launch beforehand; return its strategy and shares, without "auto"."""
    from evener.cli.run_output import print_status
    from evener.plan.choice.program_request import advise_on_launch, launch_flags
    from evener.plan.choice.search import format_run_prediction

    if isinstance(known, str):
        if "auto" in (sync, shares):
            print_status(f"{name} starts with ddp and equal shares: {known}")
        return sync.replace("auto", "ddp"), shares.replace("auto", "equal")
    flags = launch_flags(known.prediction.option(known.prediction.chosen))
    how = f" with {flags}" if "auto" in (sync, shares) and flags else ""
    print_status(f"predicted from {known.run}{how}: {format_run_prediction(known.prediction)}")
    for advice in advise_on_launch(known.prediction):
        print_status(f"hint:  {advice.text}")
    return known.sync, known.shares


def _print_result(rundir: RunDir, plan: Plan, states: Mapping[str, SupervisorState], as_json: bool) -> int:
    """Print the result of the run, and return the exit status."""
    import json

    import msgspec

    from evener.cli import follow_output, run_output
    from evener.launch.root_cause import missing_gpu_message
    from evener.report.read.run_summary import summarize_run
    from evener.transfer.script_outputs import find_outputs

    stopped = any(state.get("stopped") for state in states.values())
    if as_json:
        files = {name: msgspec.to_builtins(one) for name, one in find_outputs(rundir, plan, states).items()}
        result = {"run_dir": str(rundir), "stopped": stopped, "hosts": states, "written": files}
        print_escaped(json.dumps(result | run_output.checkpoint_info(rundir, plan)))
    else:
        ended = [name for name, state in states.items() if state.get("status") == 0 or stopped]  # others were lost
        run_output.print_status(f"{'stopped' if stopped else 'finished'} on {', '.join(ended)}; logs in {rundir}/logs")
        if not stopped and (line := missing_gpu_message(rundir, plan, states)):
            run_output.print_status(f"warning: the program succeeded, but printed: {line}\n"
                       "hint:  it expects GPUs; does it have an option for CPUs?")  # fmt: skip
        run_output.print_outputs(rundir, plan)
        if rundir.is_run() and rundir.manifest().program is not None:
            follow_output.print_measured_steps(summarize_run(rundir))
    return 130 if stopped else 0
