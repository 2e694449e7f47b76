"""evener train: train a model on this machine. Its flags are the leaves of RunSpec."""

from __future__ import annotations

import inspect
from typing import Any, Optional

import typer

EPILOG = (
    "Example: `evener data verbs && evener train --data data/verbs --model char --ranks 2 --steps 100`. "
    "The same names stand in a TOML file: `[train] steps = 100`."
)


def train(
    spec_file: Optional[str],  # noqa: UP045  typer reads it
    resume: Optional[str],  # noqa: UP045
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Train a model on this machine: one process, or --ranks N of them."""
    import json
    import sys
    from pathlib import Path

    import msgspec

    from evener.cli import follow
    from evener.core.errors import UsageError
    from evener.core.resolve import new_run_path, resolve
    from evener.core.rundir import RunDir
    from evener.core.spec import make_spec
    from evener.corpus.check import check_token_ids
    from evener.launch import local
    from evener.launch.torchrun import worker_argv, worker_env
    from evener.report.summary import as_result, summarize

    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in flags.items() if value is not None}
    base = None
    if resume is not None:
        if "out" in texts or spec_file:
            raise UsageError("--resume: the run directory has its own spec and place", hint="leave --out and the file away")
        base = msgspec.structs.replace(RunDir(resume).manifest().spec, out=resume)
    spec = make_spec(Path(spec_file) if spec_file else None, texts, base)
    resolved = resolve(spec, resume=resume is not None)
    check_token_ids(resolved.corpus)
    spec = msgspec.structs.replace(spec, out=spec.out or new_run_path(spec))
    if dry_run:
        env = worker_env(spec)
        argv = worker_argv(spec, resume=resume is not None)
        print(json.dumps({"env": env, "argv": argv}) if as_json else follow.shell_line(env, argv))
        return 0
    with follow.screen(spec, resolved, quiet=as_json) as observe:
        manifest = local.run(spec, observe, resume=resume is not None)
    summary = summarize(RunDir(spec.out))
    if as_json:
        json.dump(as_result(summary), sys.stdout)
        print()
    else:
        follow.tell_end(summary)
    return follow.exit_status(manifest)


def add_to(app: typer.Typer) -> None:
    """Give `train` one option for every leaf of RunSpec."""
    from evener.core.spec import FLAGS, RunSpec

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("spec_file", keyword, default=typer.Argument(None, metavar="[SPEC.toml]", help="a RunSpec as TOML; flags win over it"), annotation=Optional[str]),
        inspect.Parameter("resume", keyword, default=typer.Option(None, "--resume", metavar="RUN", help="go on with this run from its newest checkpoint"), annotation=Optional[str]),
        inspect.Parameter("dry_run", keyword, default=typer.Option(False, "--dry-run", help="print the exact command and environment, and start nothing"), annotation=bool),
        inspect.Parameter("as_json", keyword, default=typer.Option(False, "--json", help="print one JSON object at the end"), annotation=bool),
    ]  # fmt: skip
    for flag in FLAGS.values():
        names = [flag.name] if flag.kind != "yes or no" else [f"{flag.name}/--no-{flag.name[2:]}"]
        shown = "" if flag.default is None or flag.kind == "yes or no" else f" [{flag.default}]"
        option = typer.Option(
            None,
            *names,
            metavar=None if flag.kind == "yes or no" else flag.kind.replace(" ", "-").upper(),
            help=flag.help + shown,
            show_default=False,
            rich_help_panel=(RunSpec.__annotations__ and _panel(flag.section)),
        )
        annotation = Optional[bool] if flag.kind == "yes or no" else Optional[str]
        parameters.append(inspect.Parameter(flag.field, keyword, default=option, annotation=annotation))
    def command(**values: Any) -> int:
        return train(**values)

    command.__doc__ = train.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command("train", epilog=EPILOG)(command)


def _panel(section: str) -> str:
    return {"": "Options"}.get(section, section.capitalize())
