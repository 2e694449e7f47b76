"""Plan a run on prepared hosts and start it: the one way for trainings and users' scripts, here and on a fleet.

connect_hosts ─▶ prepare_hosts ─▶ plan_training or plan_script ─▶ started ─▶ follow_run ─▶ first failure, or result

As users expect of a local program, a run on this machine alone ends with the program that started it: Ctrl-C and
SIGTERM let the ranks finish their step and save, and a second one kills them. When this program is killed or its
terminal closed, the supervisor detects that its lock is released and acts as after one Ctrl-C. A detached run, and any
run on a fleet, continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.escaped_output import print_escaped
from evener.core.cluster.finding import Finding
from evener.core.cluster.host_info import local_host_info
from evener.core.model.pretrained import pretrained_files
from evener.core.run.prediction import Prediction
from evener.core.run.resolve import ResolvedRun, find_weights_file
from evener.core.run.roster import Roster
from evener.core.run.run_plan import Plan
from evener.core.run.run_spec import PRETRAINED_PREFIX, RunSpec
from evener.core.run.rundir import RunDir
from evener.launch import launcher
from evener.launch.commands import (
    PreparedFleet,
    PreparedHost,
    ScriptProject,
    script_plan,
    train_plan,
    withheld_variables,
)
from evener.launch.launcher import Notify
from evener.launch.script.passed_variables import PassedVariables
from evener.ssh.session import Sessions
from evener.transfer.checkpoint_transfer import restore_to_hosts
from evener.transfer.file_tree import FileTree, describe_data, describe_files, describe_project
from evener.transfer.secret_files import summarize_names

REMOVAL_TRIALS = 10  # of an empty run's folder


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can be started."""

    rundir: RunDir
    plan: Plan
    trees: list[FileTree]  # to send to its hosts
    warnings: list[Finding]  # of the preflight
    withheld: list[str] = []  # lines that name the files and variables that are not sent, as they may hold secrets
    passed_env: dict[str, str] = {}  # values of the plan's `passed_env`; only the hosts get them
    restored_step: int | None = None  # of the checkpoint here from which all hosts resume


def plan_training(
    prepared: PreparedFleet, resolved: ResolvedRun, roster: Roster, prediction: Prediction | None
) -> PlannedRun:
    """Plan a training with evener's own worker on all hosts, to which its corpus and weights or model are sent."""
    spec, resume = resolved.spec, resolved.resume
    weights = None if spec.model.init_from is None or resume else find_weights_file(spec.model.init_from)
    trees: list[FileTree] = []
    init_from: dict[str, str] = {}
    models: dict[str, str] = {}
    if prepared.is_local_run:
        data = {place.name: spec.data.data for place in prepared.hosts}
        if weights is not None:
            init_from = {place.name: str(weights) for place in prepared.hosts}
    else:
        trees.append(describe_data(spec.data.data))
        data = {place.name: _tree_path(trees[0], place) for place in prepared.hosts}
        if weights is not None:
            trees.append(describe_files({weights.name: weights}))
            init_from = {place.name: f"{_tree_path(trees[1], place)}/{weights.name}" for place in prepared.hosts}
        if spec.model.pretrained is not None:
            trees.append(describe_pretrained(spec.model.pretrained))
            models = {place.name: pretrained_on_host(spec, trees[-1], place.workdir) for place in prepared.hosts}
    plan = train_plan(
        prepared, spec, roster, data, init_from, models, resume=resume is not None, key=prepared.new_key()
    )
    return PlannedRun(
        rundir=resolved.rundir,
        plan=msgspec.structs.replace(plan, prediction=prediction),
        trees=trees,
        warnings=prepared.findings,
        withheld=withheld_data(spec.data.data, trees[0]) if trees else [],
        restored_step=None if resume is None or prepared.is_local_run else resume.step,
    )


def describe_pretrained(folder: Path) -> FileTree:
    """Return the tree of a pretrained model: what ranks read of its folder, within a folder of its name."""
    name = folder.absolute().name
    return describe_files({f"{name}/{file}": path for file, path in pretrained_files(folder).items()})


def pretrained_on_host(spec: RunSpec, tree: FileTree, workdir: str) -> str:
    """Return `--model` of the ranks on a host that was sent the tree of `describe_pretrained`."""
    return f"{PRETRAINED_PREFIX}{workdir}/trees/{tree.digest}/{spec.model.name}"


def plan_script(
    prepared: PreparedFleet,
    rundir: RunDir,
    folder: Path,
    program: list[str],
    environment: Mapping[str, str],
    include: Sequence[str] = (),
    passed: PassedVariables | None = None,
    options: Sequence[str] = (),
    resume_args: Sequence[str] | None = None,
) -> PlannedRun:
    """Plan a user's program on all hosts, to which its project's folder is sent.

    Files of the folder that `include` names are sent even if git ignores them or they may hold secrets, and so are the
    variables in `passed`. `options` are those of `evener.worker.script`: "no-compat", "independent". With
    `resume_args` all ranks restart with these arguments when a host is lost. UsageError if there is no other host.
    """
    if resume_args is not None and len(prepared.hosts) == 1:
        raise UsageError("--membership restart: the run has a single host, which no other could replace")
    passed_env, shown = (dict(passed), passed.shown) if passed is not None else ({}, {})
    trees = [] if prepared.is_local_run else [describe_project(folder, include)]
    project = ScriptProject(str(folder), trees[0].digest, project_name(folder)) if trees else None
    unshown = [name for name in passed_env if name not in shown]
    plan = script_plan(
        prepared,
        program,
        environment,
        project,
        shown,
        unshown,
        script_options=options,
        resume_args=resume_args,
        key=prepared.new_key(),
    )
    withheld = []
    if trees and trees[0].withheld:
        names = summarize_names(trees[0].withheld)
        withheld.append(f"not sent, as they may hold secrets: {names}; --include PATH sends one")
    variables = [name for name in withheld_variables(environment) if name not in passed_env]
    if trees and variables:
        names = summarize_names(variables)
        withheld.append(f"variables not passed to the hosts, as they may hold secrets: {names}; --env NAME passes one")
    warnings = prepared.findings
    if prepared.is_local_run:  # this program's TORCH_… variables are forwarded to a script
        warnings = [finding for finding in warnings if finding.check != "env.debug"]
    return PlannedRun(
        rundir=rundir,
        plan=plan,
        trees=trees,
        warnings=warnings,
        withheld=withheld,
        passed_env={name: passed_env[name] for name in unshown},
    )


def withheld_data(folder: str, tree: FileTree) -> list[str]:
    """Return the line about the files of a data folder that are not sent; [] if there are none."""
    names = summarize_names(tree.withheld)
    reason = "they are hidden or may hold secrets, and no rank reads them"
    return [f"not sent with {folder}: {names}: {reason}"] if names else []


def project_name(folder: Path) -> str:
    """Return the name of a project's folder on the hosts: the folder's name and a hash of this machine and its path."""
    where = f"{local_host_info().host}:{folder}".encode("utf-8", "surrogateescape")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.") or "project"
    return f"{readable}-{hashlib.blake2b(where, digest_size=4).hexdigest()}"


@contextlib.contextmanager
def started(run: PlannedRun, sessions: Sessions, notify: Notify, *, detach: bool = False) -> Iterator[None]:
    """Send the files that the hosts lack, and start all ranks.

    A run on a fleet, or with `detach`, outlives the context. Any other run ends with it, at the latest; if it is a
    training that never began, because the request was wrong or it was stopped, its new run directory is removed.
    """
    rundir, plan = run.rundir, run.plan
    members = {host.name: sessions[host.name] for host in plan.hosts}
    launcher.stage_files(run.trees, plan, members, notify)
    if run.restored_step is not None:
        restore_to_hosts(rundir, plan, members, run.restored_step, notify)
    if detach or not plan.is_local_run:
        launcher.start(rundir, plan, members, passed_env=run.passed_env)
        launcher.record_preflight_warnings(rundir, plan, run.warnings)
        yield
        return
    is_new = not rundir.path.exists()

    def remove_empty_run() -> None:
        for _ in range(REMOVAL_TRIALS):  # a process that is about to end may write a file meanwhile
            if not is_new or plan.kind != "train" or rundir.is_run() or not rundir.path.exists():
                break
            shutil.rmtree(rundir.path, ignore_errors=True)
            time.sleep(0.1)

    with (
        launcher.start(rundir, plan, members, attached=True, passed_env=run.passed_env),
        _stop_on_signals(rundir, plan),
    ):
        try:
            yield
        except EvenerError as error:
            if error.exit_status == UsageError.exit_status:
                remove_empty_run()
            raise
    remove_empty_run()


@contextlib.contextmanager
def _stop_on_signals(rundir: RunDir, plan: Plan) -> Iterator[None]:
    """Stop the run on Ctrl-C and SIGTERM: the first lets the ranks save, the second kills them."""
    num_signals = 0

    def stop(now: bool) -> None:
        with contextlib.suppress(UsageError):  # the run has ended meanwhile, and its empty directory was removed
            launcher.stop(rundir, plan, now=now)

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1 and plan.grace_s:
            print_escaped("stopping after this step and a checkpoint; a second Ctrl-C stops at once", file=sys.stderr)
        now = num_signals > 1
        threading.Thread(target=stop, args=(now,), daemon=True).start()

    previous: dict[int, Any] = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _tree_path(tree: FileTree, place: PreparedHost) -> str:
    return f"{place.workdir}/trees/{tree.digest}"
