"""evener train: train a model here or on a fleet. Its flags are the leaves of RunSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from evener.cli.data import COLUMN_HELP
from evener.cli.trust import TRUST
from evener.core.base.escaped_output import print_escaped

if TYPE_CHECKING:
    from pathlib import Path

    from evener.core.run.resolve import ResolvedRun
    from evener.core.run.run_spec import RunSpec
    from evener.core.run.rundir import RunDir
    from evener.launch.resume import ResumedRun

EXAMPLES = (
    "evener train my.txt\n"
    "evener train my.txt --for 8h\n"
    "evener train --data data/verbs --ranks 2 --steps 100 --out runs/mine\n"
    "evener train --resume runs/mine --steps 200\n"
    "evener train my.txt --on local,laptop\n"
    "evener train chats.jsonl --model hf:./some-model --lora 16 --for 30min"
)

MIN_SAMPLED_S = 20.0  # a shorter run ends without a text by its model: that takes seconds
ARGUMENTS = typer.Argument(
    None, metavar="TEXT",
    help="what to train on: files, folders, tables (.jsonl .csv .tsv .parquet), - for standard input; or a folder that "
    "evener data or nanoGPT prepared. A name that ends in .toml is a run as TOML ([train] steps = 100), and flags win.",
)  # fmt: skip
TOKENIZER = typer.Option(
    None,
    "--tokenizer",
    metavar="byte|char|bpe|gpt2|FILE",
    help="of texts; FILE: a tokenizer.json, or the folder of a model with one [char or byte for small ones, else bpe]",
)
VOCAB_SIZE = typer.Option(None, "--vocab-size", help="of --tokenizer bpe [by the size of the text]")
COLUMN = typer.Option(None, "--column", metavar="NAME", help=COLUMN_HELP)
FOR = typer.Option(
    None, "--for", metavar="TIME", help="train for 30min, 8h or 2d; model, batch and steps that no flag sets are "
    "chosen so that the loss at the end is lowest [3min, without --steps and --tokens]; with hf:FOLDER for at most "
    "--epochs",
)  # fmt: skip
TOKENS = typer.Option(None, "--tokens", metavar="N", help="train on so many tokens, such as 20M")
EPOCHS = typer.Option(
    None, "--epochs", metavar="N", min=0.0, help="with --model hf:FOLDER: train on every sample so many times, without "
    "--steps [1]",
)  # fmt: skip
RESUME = typer.Option(None, "--resume", metavar="RUN", help="resume this run from its newest checkpoint")
FLEET = typer.Option(
    None, "--fleet", metavar="FILE", help="hosts to train on; local: this machine [fleet.toml if here]"
)
ON = typer.Option(
    None, "--on", metavar="NAME,…", help="train on these machines, as ssh knows them; local: this one. Makes their "
    "fleet file, checks, sets up and measures them, where that is not done yet",
)  # fmt: skip
YES = typer.Option(False, "--yes", help="with --on: install what a machine lacks without asking")
HOSTS = typer.Option(None, "--hosts", metavar="NAME,…", help="only these hosts of the fleet [all]")
LOG = typer.Option(
    None, "--log", metavar="LOGGER", help="log each step to tensorboard, wandb, trackio or mlflow; may be given again"
)
DETACH = typer.Option(False, "--detach", help="start the run, and return")
DRY_RUN = typer.Option(False, "--dry-run", help="print the exact command and environment, and start nothing")
AS_JSON = typer.Option(False, "--json", help="print one JSON object at the end")


def train(arguments: list[str] | None, tokenizer: str | None, vocab_size: int | None, column: str | None,
          for_time: str | None, tokens: str | None, epochs: float | None, resume: str | None, on: str | None,
          yes: bool, fleet: str | None, hosts: str | None, log: list[str] | None, detach: bool, trust: bool,
          dry_run: bool, as_json: bool, **flags: str | bool | None) -> int:  # fmt: skip
    """Train a model on this machine, or on all hosts of a fleet.

    On this machine Ctrl-C finishes the step, saves a checkpoint and exits; a second Ctrl-C ends the run at once. On a
    fleet, and with --detach, the run goes on without this terminal; `evener stop` ends it. --resume continues from the
    newest checkpoint. The result is bit for bit the same on one rank, and on several with fixed shares and an exact
    --sync by name. With --shares auto, where the shares follow the hosts' speed, it is the same within rounding.
    """
    import contextlib

    from evener.cli import follow_output, logger_processes, run_output
    from evener.cli.budget import limit_resumed, models_to_measure, parse_budget, spec_for_budget
    from evener.cli.epochs import check_epochs, spec_for_epochs
    from evener.cli.flags import explicit_values, split_arguments
    from evener.cli.on_machines import fleet_of_machines
    from evener.cli.trust import approve_fleet, approve_run
    from evener.core.model.pretrained import PretrainedModel
    from evener.core.run.resolve import resolve
    from evener.core.run.run_spec import given_fields
    from evener.core.run.rundir import RunDir
    from evener.corpus.token_check import check_token_ids
    from evener.launch.follow_run import follow_run
    from evener.launch.prepare_hosts import connect_hosts
    from evener.launch.resume import ResumedRun, lock_resume
    from evener.launch.start_run import started
    from evener.launch.start_training import check_out, choose_fleet, plan_on_hosts

    if on is not None:
        _check_on(on, resume, fleet, hosts)
    logged = logger_processes.select_loggers(log, None if resume is None else RunDir(resume))
    with contextlib.ExitStack() as attachment:
        with contextlib.ExitStack() as preparation:
            resumed = None if resume is None else ResumedRun(RunDir(resume))
            if resumed is not None and resumed.plan is not None:
                approve_run(resumed.rundir, trust)
            if resumed is not None:
                preparation.enter_context(lock_resume(resumed.rundir))
                resumed = ResumedRun(resumed.rundir)  # as it is now that nobody else resumes it
            chosen = None if on is not None else choose_fleet(fleet, hosts, resumed)
            if chosen is not None:
                approve_fleet(chosen, trust)
            texts = explicit_values(flags)
            file, paths = split_arguments(arguments or [])
            given = given_fields(file, texts)
            budget = parse_budget(for_time, tokens, given)
            of_texts = {"tokenizer": tokenizer, "vocab_size": vocab_size, "column": column}
            spec = _make_spec(file, paths, of_texts, resumed, texts)
            if resumed is not None:
                spec = limit_resumed(spec, given, budget, resumed.rundir)
            check_epochs(spec, epochs, is_resumed=resumed is not None)
            resolved = resolve(spec, resume=resumed is not None)  # reports mistakes before anything is measured
            check_token_ids(resolved.corpus)
            if on is not None:
                models = models_to_measure(spec, given)
                pretrained = spec.model if spec.model.pretrained is not None else None
                machines = fleet_of_machines(on, models, packages=resolved.packages, trust=trust, may_install=yes,
                                             pretrained=pretrained, is_dry=dry_run)  # fmt: skip
                chosen = choose_fleet(machines, None, None)
            if resumed is None and isinstance(resolved.shape, PretrainedModel):
                spec, length = spec_for_epochs(resolved, given, budget, epochs, chosen, is_dry=dry_run)
                if length:
                    run_output.print_status(length)
                resolved = resolve(spec)
            elif resumed is None:
                resolved = resolve(spec_for_budget(spec, given, budget, chosen, is_dry=dry_run))
            resolved = _with_run_path(resolved)
            if resolved.spec.train.lr == 0:
                run_output.print_status("--lr 0: the weights will not change")
            if resolved.resume is not None:
                where = "this machine" if chosen is None else ", ".join(chosen.hosts)
                run_output.print_status(f"resuming from step {resolved.resume.step} on {where}")
            else:
                check_out(resolved.rundir)
            connected = preparation.enter_context(connect_hosts(chosen))
            run = plan_on_hosts(connected, resolved, run_output.print_status, resumed=resumed)
            run_output.print_warnings(run)
            if dry_run:
                run_output.print_plan(run.plan, as_json)
                return 0
            attachment.enter_context(started(run, connected.sessions, run_output.print_status, detach=detach))
        if not as_json and not run.plan.is_local_run:
            run_output.print_placement(run.plan)
        if detach:
            logger_processes.defer_loggers(run.rundir, logged)
            run_output.print_detached(run.rundir)
            return 0
        try:
            # Ctrl-C stops an attached run only until it has ended: then it ends the wait for slow loggers.
            with (logger_processes.feed_loggers(run.rundir, logged) as feeding, attachment.pop_all(),
                  follow_output.display_run(resolved, run.plan, quiet=as_json) as observe):  # fmt: skip
                follow_run(run.rundir, run.plan, feeding(observe), notify=run_output.print_status)
        except KeyboardInterrupt:
            run_output.print_detached(run.rundir)
            return 130
    return _print_result(run.rundir, as_json)


def _print_result(rundir: RunDir, as_json: bool) -> int:
    """Print what became of a run that has ended; return the exit status."""
    import json

    from evener.cli import follow_output, run_output
    from evener.cli.sample import print_sample
    from evener.core.run.run_plan import read_plan_if_present
    from evener.report.read.run_summary import summarize_run, summary_json

    if not rundir.is_run():
        run_output.print_status("stopped before the first step; nothing was saved")
        return 130
    summary, plan = summarize_run(rundir), read_plan_if_present(rundir)
    status = follow_output.exit_status(summary.manifest)
    if as_json:
        print_escaped(json.dumps(summary_json(summary) | run_output.checkpoint_info(rundir, plan)))
    else:
        follow_output.print_summary(summary)
        run_output.print_checkpoint(rundir, plan)
        if (summary.elapsed_s or 0.0) > MIN_SAMPLED_S and status == 0:
            print_sample(rundir)
    return status


def _check_on(on: str, resume: str | None, fleet: str | None, hosts: str | None) -> None:
    """Raise UsageError if another flag says which machines train."""
    from evener.core.base.errors import UsageError

    for flag, given in (("--fleet", fleet), ("--hosts", hosts), ("--resume", resume)):
        if given is not None:
            raise UsageError(f"--on {on}: {flag} {given} says which machines train", hint="one of them")


def _make_spec(
    file: Path | None, paths: list[str], of_texts: dict[str, Any], resumed: ResumedRun | None, texts: dict[str, str]
) -> RunSpec:
    """Build the spec from the TOML file, the texts in `paths` and the flags; a resumed run starts from its own spec."""
    import msgspec

    from evener.cli import run_output
    from evener.cli.flags import check_names_data_once
    from evener.cli.hub_models import with_model_folder
    from evener.cli.text_data import prepared_folder, prepared_samples
    from evener.core.base.errors import UsageError
    from evener.core.run.run_spec import make_spec

    if resumed is not None and (file or paths or "out" in texts):
        raise UsageError("--resume: the run has its own spec, data and directory", hint="without --out and a file")
    check_names_data_once(paths, texts)
    base = None if resumed is None else resumed.fetch_spec(run_output.print_status)
    spec = make_spec(file, texts, base)
    if resumed is None:
        spec = with_model_folder(spec)
        if spec.model.pretrained is not None:
            data = prepared_samples(paths or [spec.data.data], spec, **of_texts)
        else:
            data = prepared_folder(paths or [spec.data.data], **of_texts, is_default=not paths and "data" not in texts)
        spec = msgspec.structs.replace(spec, data=msgspec.structs.replace(spec.data, data=data))
    return spec


def _with_run_path(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with a directory: --out, or the default one."""
    import msgspec

    from evener.core.run.resolve import default_run_path

    spec = resolved.spec
    return msgspec.structs.replace(resolved, spec=msgspec.structs.replace(spec, out=spec.out or default_run_path(spec)))


def register(app: typer.Typer) -> None:
    """Add `train`, with one option for every leaf of RunSpec."""
    from evener.cli.flags import CommandParameter, command_signature, spec_options

    options: list[CommandParameter] = [
        ("arguments", ARGUMENTS, list[str] | None),
        ("tokenizer", TOKENIZER, str | None),
        ("vocab_size", VOCAB_SIZE, int | None),
        ("column", COLUMN, str | None),
        ("for_time", FOR, str | None),
        ("tokens", TOKENS, str | None),
        ("epochs", EPOCHS, float | None),
        ("resume", RESUME, str | None),
        ("on", ON, str | None),
        ("yes", YES, bool),
        ("fleet", FLEET, str | None),
        ("hosts", HOSTS, str | None),
        ("log", LOG, list[str] | None),
        ("detach", DETACH, bool),
        ("trust", TRUST, bool),
        ("dry_run", DRY_RUN, bool),
        ("as_json", AS_JSON, bool),
    ]
    options += spec_options()

    def command(**values: Any) -> int:
        return train(**values)

    command.__doc__ = train.__doc__
    command.__signature__ = command_signature(options)  # type: ignore[attr-defined]
    app.command("train", epilog=EXAMPLES)(command)
