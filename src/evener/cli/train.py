"""evener train: train a model on this machine. Its flags are the leaves of RunSpec."""

from __future__ import annotations

import inspect
from typing import Any

import typer

EPILOG = "Example: `evener data verbs && evener train --data data/verbs --ranks 2 --steps 100`"

SPEC_FILE = typer.Argument(None, metavar="[SPEC.toml]", help="A run as TOML ([train] steps = 100). Flags win over it.")
RESUME = typer.Option(None, "--resume", metavar="RUN", help="Go on with this run from its newest checkpoint.")
DRY_RUN = typer.Option(False, "--dry-run", help="Print the exact command and environment, and start nothing.")
AS_JSON = typer.Option(False, "--json", help="Print one JSON object at the end.")


def train(spec_file: str | None, resume: str | None, dry_run: bool, as_json: bool, **flags: str | bool | None) -> int:
    """Train a model on this machine: one process, or --ranks N of them.

    Ctrl-C finishes the step, saves and leaves; --resume goes on, bit for bit.
    """
    import json

    from evener.cli import follow
    from evener.core.rundir import RunDir
    from evener.corpus.check import check_token_ids
    from evener.launch import local
    from evener.launch.torchrun import worker_argv, worker_env
    from evener.report.summary import as_result, summarize

    resolved = _resolved(spec_file, resume, flags)
    check_token_ids(resolved.corpus)
    spec, resumes = resolved.spec, resume is not None
    if dry_run:
        env, argv = worker_env(spec), worker_argv(spec, resume=resumes)
        print(json.dumps({"env": env, "argv": argv}) if as_json else follow.shell_line(env, argv))
        return 0
    with follow.screen(resolved, quiet=as_json) as observe:
        manifest = local.run(spec, observe, resume=resumes)
    summary = summarize(RunDir(spec.out or ""))
    if as_json:
        print(json.dumps(as_result(summary)))
    else:
        follow.tell_end(summary)
    return follow.exit_status(manifest)


def _resolved(spec_file: str | None, resume: str | None, flags: dict[str, str | bool | None]) -> Any:
    """What the user asked for, checked; a run that is resumed brings its own spec."""
    from pathlib import Path

    import msgspec

    from evener.core.errors import UsageError
    from evener.core.resolve import new_run_path, resolve
    from evener.core.rundir import RunDir
    from evener.core.spec import make_spec

    texts = {name: str(value).lower() if isinstance(value, bool) else value
             for name, value in flags.items() if value is not None}  # fmt: skip
    base = None
    if resume is not None:
        if spec_file is not None or "out" in texts:
            raise UsageError("--resume: a run has its own spec and place", hint="leave out --out and the TOML file")
        base = msgspec.structs.replace(RunDir(resume).manifest().spec, out=resume)
    spec = make_spec(Path(spec_file) if spec_file else None, texts, base)
    resolved = resolve(spec, resume=resume is not None)
    return msgspec.structs.replace(resolved, spec=msgspec.structs.replace(spec, out=spec.out or new_run_path(spec)))


def add_to(app: typer.Typer) -> None:
    """Add `train`, with one option for every leaf of RunSpec."""
    from evener.core.spec import FLAGS

    options: list[tuple[str, Any, Any]] = [
        ("spec_file", SPEC_FILE, str | None),
        ("resume", RESUME, str | None),
        ("dry_run", DRY_RUN, bool),
        ("as_json", AS_JSON, bool),
    ]
    for flag in FLAGS.values():
        switch = flag.kind == "yes or no"
        option = typer.Option(
            None,
            f"{flag.name}/--no-{flag.name[2:]}" if switch else flag.name,
            metavar=None if switch else flag.kind.replace(" ", "-").upper(),
            help=flag.help if switch or flag.default is None else f"{flag.help} [{flag.default}]",
            show_default=False,
            rich_help_panel=f"[{flag.section}]" if flag.section else "Options",
        )
        options.append((flag.field, option, bool | None if switch else str | None))

    def command(**values: Any) -> int:
        return train(**values)

    command.__doc__ = train.__doc__
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
         for name, default, annotation in options]
    )  # fmt: skip
    app.command("train", epilog=EPILOG)(command)
