"""Print the status and the results of runs: shared by the verbs that start, follow, stop and fetch them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from evener.cli.terminal import make_console, print_findings
from evener.core.base.escaped_output import print_escaped
from evener.core.base.file_io import follow_lines, read_file
from evener.core.base.shell import quote_word
from evener.core.run.run_plan import Plan, read_plan
from evener.core.run.rundir import RunDir
from evener.launch.launcher import cached_states
from evener.launch.start_run import PlannedRun
from evener.transfer.script_outputs import find_outputs


def print_status(text: str) -> None:
    """Print one status line on stderr."""
    print_escaped(text, file=sys.stderr, flush=True)


def find_run(run: str) -> Path:
    """Return the directory of a run that is given by its path, or by the id that its processes carry on the hosts."""
    for path in Path("runs").glob("*/plan.json"):
        with contextlib.suppress(OSError):  # no file, or a damaged one
            if not Path(run).exists() and read_file(path).find(f'"id": "{run}"'.encode()) >= 0:
                return path.parent
    return Path(run)


def find_run_dirs(folder: Path) -> list[Path]:
    """Return the run directories in a folder, those of benches too."""
    return sorted({path.parent for depth in ("*", "*/*") for name in ("manifest.json", "plan.json")
                   for path in folder.glob(f"{depth}/{name}")})  # fmt: skip


def print_warnings(run: PlannedRun) -> None:
    """Print the findings of the preflight, none of which is an error, and what is not sent to the hosts."""
    print_findings(make_console(stderr=True), run.warnings)
    for line in run.withheld:
        print_status(line)


def print_placement(plan: Plan) -> None:
    """Print which rank runs on which host, and where the rendezvous is."""
    if not plan.is_local_run:
        print_status(f"rendezvous on {plan.hosts[0].name}, {plan.address} port {plan.port}")
    for host in plan.hosts:
        last = host.first_rank + host.num_ranks - 1
        ranks = f"rank {host.first_rank}" if host.num_ranks == 1 else f"ranks {host.first_rank} to {last}"
        print_status(f"{host.name}: {ranks}" + ("" if plan.is_local_run else f", {host.interface} {host.address}"))
    agent = plan.hosts[0].agent
    if agent is not None:
        if agent.is_user_program:
            what = "the others restart, and it takes part from the next start on"
        else:
            what = "the others go on" if agent.is_elastic else "the others restart from the newest checkpoint"
            what += ", and it rejoins when it is back"
        print_status(f"if a host is lost, {what}")


def print_plan(plan: Plan, as_json: bool) -> None:
    """Print the plan of --dry-run: as JSON the object that the real call would use, else the command of each host.

    The run's key is not printed: the real call makes another one.
    """
    if as_json:
        print_escaped(json.dumps(json.loads(msgspec.json.encode(msgspec.structs.replace(plan, key="")))))
        return
    for host in plan.hosts:
        print_escaped(f"# on {host.name}\n{host.shell_command()}\n")
    if plan.key:
        print_status("each host reads the run's key from its EVENER_KEY_FILE, which a real start writes")


def print_detached(rundir: RunDir) -> None:
    """Print how to follow, stop and fetch a run that continues without this terminal."""
    plan = read_plan(rundir)
    if all(state.get("state") == "ended" for state in cached_states(rundir, plan).values()):
        print_status("the run has ended")
        print_outputs(rundir, plan)
        return
    print_status(
        f"the run goes on without this terminal; its id is {plan.id}\nfollow:  evener logs -f {quote_word(rundir)}\n"
        f"stop:    evener stop {quote_word(rundir)}"
    )
    if not plan.is_local_run:
        print_status(f"fetch its results, now or at its end:  evener fetch {quote_word(rundir)}")


def checkpoint_info(rundir: RunDir, plan: Plan | None) -> dict[str, Any]:
    """Return, for JSON, the newest checkpoint here and, if a host has saved a newer one, its step and that host."""
    local_steps, saved = rundir.checkpoint_steps(), rundir.last_saved_step()
    newer = None
    if plan is not None and not plan.is_local_run and saved is not None and saved > max(local_steps, default=-1):
        newer = {"step": saved, "host": plan.hosts[0].name}
    return {
        "checkpoint": str(rundir.checkpoint_path(local_steps[-1])) if local_steps else None,
        "newer_checkpoint": newer,
    }


def print_checkpoint(rundir: RunDir, plan: Plan | None) -> None:
    """Print where the newest weights are: in a local checkpoint, on a host, or nowhere."""
    info = checkpoint_info(rundir, plan)
    if info["checkpoint"]:
        print_status(f"weights: {info['checkpoint']}")
    if newer := info["newer_checkpoint"]:
        print_status(
            f"weights of step {newer['step']}: only on {newer['host']}; "
            f"evener fetch {quote_word(rundir)} copies them here"
        )
    elif not info["checkpoint"] and (plan is None or plan.kind == "train"):
        print_status("weights: none saved")


def print_outputs(rundir: RunDir, plan: Plan) -> None:
    """Print what an ended run produced: its weights, and the files that a script wrote on its hosts."""
    print_checkpoint(rundir, plan)
    outputs = find_outputs(rundir, plan, cached_states(rundir, plan))
    for name, of_host in outputs.items():
        print_status(of_host.summary(name))
    if outputs:
        print_status(f"fetch it: evener fetch {quote_word(rundir)}")


class RankLogPrinter:
    """Print the output of all ranks as it arrives: `2 attic │ text`."""

    def __init__(
        self, rundir: RunDir, plan: Plan, hosts: set[str] | None = None, ranks: set[int] | None = None
    ) -> None:
        self._rundir, self._hosts, self._ranks = rundir, hosts, ranks
        self._followers: dict[str, Iterator[list[bytes]]] = {}
        self._width = 0
        self.add_hosts(plan)

    def add_hosts(self, plan: Plan) -> None:
        """Follow the hosts and ranks of a plan that are not followed yet."""

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

    def print_new(self, *, with_timestamps: bool = False) -> None:
        """Print the lines that are new since the last call, sorted by time stamp."""
        for stamp, label, _, text in self._new_lines():
            shown = text.rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
            line = f"{label:{self._width}} │ {shown}"
            print_escaped(f"{stamp} {line}" if with_timestamps else line, flush=True)

    def print_new_json(self) -> None:
        """Print the new lines as JSON, one object a line; rank is null for a launcher's own output."""

        for stamp, label, stream, text in self._new_lines():
            rank, host = label.split()
            record = {"time": stamp, "host": host, "rank": None if rank == "-" else int(rank)}
            print_escaped(
                json.dumps(record | {"stream": "stdout" if stream in "Oo" else "stderr", "text": text}), flush=True
            )

    def _new_lines(self) -> list[tuple[str, str, str, str]]:
        """Return the new lines as (time, label, O or E, text), sorted by time."""
        new = []
        for label, follower in self._followers.items():
            for line in next(follower):
                stamp, _, text = line.decode(errors="replace").partition(" ")
                new.append((stamp, label, text[:1], text[2:]))
        return sorted(new, key=lambda line: line[0])
