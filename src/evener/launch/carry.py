"""How does a checkpoint come home from a fleet, and go out to it again when the run is resumed?"""

from __future__ import annotations

import contextlib
import re
import shutil

from evener.core.errors import CheckpointError
from evener.core.files import digest_of
from evener.core.plan import Plan
from evener.core.rundir import RunDir, read_checkpoint
from evener.hosts.session import RemoteError, Sessions, for_each, open_session
from evener.launch.mirror import host_failed
from evener.launch.ship import WORK_S, fetch, send_to
from evener.launch.tree import pack


def bring_checkpoint(rundir: RunDir, plan: Plan) -> int | None:
    """Fetch the newest checkpoint from the first host, where it is not here yet; its step, None where there is none."""
    first = plan.hosts[0]
    if first.run is None:  # what it saves is here
        return max(rundir.checkpoint_steps(), default=None)
    with contextlib.closing(open_session(first.name, first.host)) as session:
        try:
            names: list[str] = session.call("runs", "checkpoints", run=first.run)
        except RemoteError as error:
            raise host_failed(error) from None
        steps = [int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d{6,12})", name))]
        if not steps:
            return None
        here = rundir.checkpoint_path(max(steps))
        if not here.exists():
            here.parent.mkdir(exist_ok=True)
            fetch(session, f"{first.run}/checkpoints/{here.name}", here)
            if any(not path.is_file() or path.is_symlink() for path in here.iterdir()):
                shutil.rmtree(here)
                raise CheckpointError(f"{first.name}: its checkpoint {here.name} holds more than files")
    return max(steps)


def restore(rundir: RunDir, plan: Plan, sessions: Sessions, step: int) -> None:
    """Put on every host of a run that is resumed what it has of it here: a host goes on from nothing of its own.

    Its own files may be those of an earlier start, after which the run went on elsewhere, to checkpoints of the same
    names.
    """
    checkpoint = rundir.checkpoint_path(step)
    parts = ["state.json", *read_checkpoint(checkpoint).files]
    wanted = digest_of(checkpoint / "state.json")

    def put(name: str) -> None:
        host, session = plan.host(name), sessions[name]
        run = host.folder(rundir)
        ranks = range(host.first_rank, host.first_rank + host.num_ranks)
        paths = [rundir.manifest_path, rundir.path / "logs" / f"{name}.log"]
        paths += [path for rank in ranks for path in (rundir.steps_path(rank), rundir.log_path(name, rank))]
        files = {path.relative_to(rundir.path).as_posix(): path for path in paths if path.exists()}
        try:
            is_there = session.call(
                "runs", "go_back", run=run, checkpoint=checkpoint.name, wanted=wanted, timeout_s=WORK_S
            )
            ours = {path: [file.size, file.digest] for path, file in pack(files).files.items()}
            lacking = session.call("runs", "lacking", run=run, files=ours, timeout_s=WORK_S)
            files = {path: files[path] for path in lacking}
            if not is_there:
                files |= {f"checkpoints/{checkpoint.name}/{part}": checkpoint / part for part in parts}
            if files:
                arrived = send_to(session, host.host.workdir, pack(files))
                session.call("runs", "adopt", run=run, tree=arrived.path, timeout_s=WORK_S)
        except RemoteError as error:
            raise host_failed(error) from None

    for_each([host.name for host in plan.hosts], put)
