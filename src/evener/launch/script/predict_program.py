"""Predict a user's program before it starts, from its newest run.

The run showed how fast each host computes, which gradients the program exchanges and when they are ready. From that
follow its steps with another strategy, other shares or, by what probing measured, other hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from evener.core.base.errors import EvenerError
from evener.core.base.file_io import read_file
from evener.core.cluster.fleet_file import Fleet
from evener.core.run.prediction import Prediction
from evener.core.run.roster import NO_SYNC
from evener.core.run.run_plan import fleet_of_run, read_plan_if_present, read_prediction
from evener.core.run.rundir import RunDir
from evener.plan.choice.plan_request import answer_request, change_request, request_from_run
from evener.plan.choice.program_request import launch_shares, move_program, with_links_probed_since

MAX_RUNS = 30  # the newest, of any program, that are looked at
MAX_FILES, MAX_FILE_BYTES = 200, 1 << 20


def program_digest(folder: Path, words: Sequence[str]) -> str:
    """Return a hash of a program's words, of the files in the folder that they name, such as its script and a
    configuration, and of the Python files beside the first of these.
    """
    digest = hashlib.blake2b(digest_size=16)
    paths, words = [], ["", *words]
    for before, word in pairwise(words):
        digest.update(word.encode("utf-8", "surrogateescape") + b"\0")
        path = folder / (f"{word.replace('.', '/')}.py" if before == "-m" else word)
        with contextlib.suppress(OSError):  # too long a name, or a folder that one may not enter
            paths += [path] if path.is_file() else []
    if paths:
        with contextlib.suppress(OSError):
            paths += sorted(paths[0].parent.glob("*.py"))[:MAX_FILES]
    for path in paths:
        with contextlib.suppress(OSError):
            if path.stat().st_size <= MAX_FILE_BYTES:
                digest.update(hashlib.blake2b(read_file(path), digest_size=16).digest())
    return digest.hexdigest()


@dataclass(frozen=True)
class LaunchPrediction:
    """Holds what an earlier run predicts of a launch."""

    prediction: Prediction
    run: str  # the earlier run
    sync: str  # as asked for, or in place of "auto"
    shares: str


def predict_program(
    runs: Sequence[Path], digest: str, hosts: Sequence[tuple[str, int]], sync: str, shares: str, fleet: Fleet | None
) -> LaunchPrediction | str:
    """Predict a launch from the newest run of the same program; return why not, if that is so.

    `runs`: of any programs; `hosts`: names and numbers of ranks, with what is known of them in `fleet`. A run on the
    same hosts is preferred: from one on others it follows by how fast probing found them. Links that were probed since
    the run are taken from `fleet`. Where `sync` or `shares` is "auto", take what is predicted to train fastest within
    the default loss budget.
    """
    found = [(rundir.manifest_path.stat().st_mtime, rundir) for path in runs
             if (rundir := RunDir(path)).manifest_path.exists()]  # fmt: skip
    here: list[RunDir] = []
    elsewhere: list[RunDir] = []
    for _, rundir in sorted(found, key=lambda one: one[0], reverse=True)[:MAX_RUNS]:
        try:
            plan = read_plan_if_present(rundir)
        except (EvenerError, OSError):  # of which program is not known
            continue
        if plan is not None and plan.program_digest == digest:
            is_here = [(host.name, host.num_ranks) for host in plan.hosts] == list(hosts)
            (here if is_here else elsewhere).append(rundir)
    reasons = []
    for rundir in [*here, *(elsewhere if fleet is not None else [])]:
        try:
            return _predict_from(rundir, sync, shares, fleet, None if rundir in here else hosts)
        except (EvenerError, OSError) as error:  # damaged, or it shows too little
            reasons.append(str(error))
    return next(
        iter(reasons), "there is no earlier run of it with these words on these hosts: the next launch knows more"
    )


def _predict_from(
    rundir: RunDir, sync: str, shares: str, fleet: Fleet | None, hosts: Sequence[tuple[str, int]] | None
) -> LaunchPrediction:
    """Predict a launch from a run; `hosts`: of `fleet`, if not those of the run."""
    manifest = rundir.manifest()
    records = [rundir.records(member.rank) for member in manifest.roster.members]
    known = fleet_of_run(rundir, manifest.roster.hosts)
    request = request_from_run(str(rundir), manifest, records, read_prediction(rundir), known)
    if fleet is not None and hosts is not None:
        job, cluster = move_program(request.job, request.cluster, fleet, hosts)
        request = msgspec.structs.replace(request, job=job, cluster=cluster, measured=None)
    elif fleet is not None:
        cluster = with_links_probed_since(request.cluster, fleet, manifest.ended or manifest.started)
        request = msgspec.structs.replace(request, cluster=cluster)
    if shares == "auto" and not manifest.can_divide:
        shares = "equal"
    prediction = answer_request(change_request(request, {"sync": sync, "shares": shares}, None))
    roster = prediction.option(prediction.chosen).roster
    return LaunchPrediction(
        prediction=prediction,
        run=str(rundir),
        sync=sync if sync != "auto" else "ddp" if roster.sync == NO_SYNC else str(roster.sync),
        shares=launch_shares(roster) if shares == "auto" else shares,
    )
