"""Shared by the page and the terminal view of `watch`: find runs, control them, and fetch records from their hosts."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from evener.cli.run_output import find_run, find_run_dirs, print_status
from evener.cli.sample import continue_texts
from evener.cli.terminal import make_console
from evener.core.base.errors import EvenerError, HostError, NoRoomError, UsageError
from evener.core.base.escaped_output import print_escaped
from evener.core.run.run_plan import read_plan, read_plan_if_present
from evener.core.run.rundir import RunDir
from evener.core.run.trust import is_foreign_run
from evener.launch import launcher
from evener.launch.follow_run import follow_run
from evener.launch.launcher import cached_states
from evener.transfer.mirror import RunMirror
from evener.watch import terminal_dashboard
from evener.watch.dashboard import Dashboard, PageView
from evener.watch.run_health import assess_health
from evener.watch.run_reader import RunReader

RUNS_FOLDER = "runs"


def make_run_finder(names: Sequence[str]) -> Callable[[], list[Path]]:
    """Return a function that lists the runs to watch: the named ones, which must exist, or else all in runs/."""
    if not names:
        if not Path(RUNS_FOLDER).is_dir():
            raise UsageError(f"{RUNS_FOLDER}: no such folder", hint="evener watch RUN; evener train makes runs/")
        return lambda: find_run_dirs(Path(RUNS_FOLDER))
    paths = [find_run(name) for name in names]
    for name, path in zip(names, paths, strict=True):
        if not (path / "plan.json").is_file() and not RunDir(path).is_run():
            hint = "evener runs lists those made here"
            raise UsageError(f"{name}: not a run directory: it has no manifest.json and no plan.json", hint=hint)
    return lambda: paths


def allowed_host_names(host: str) -> list[str]:
    """Return the host names that requests may use for a server that listens on `host`."""
    import psutil

    if host not in ("0.0.0.0", "::"):  # noqa: S104
        return [host]
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries
                 if entry.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
    return [socket.gethostname(), *(address.partition("%")[0] for address in addresses)]


def print_shared_warning(port: int) -> None:
    """Print what --host exposes, and the ssh tunnel that avoids it."""
    print_status(
        "warning: anyone with the address below can see and stop these runs; it is sent unencrypted, so anyone who "
        f"can listen on that network has it too\nhint:  without --host, on another machine: ssh -L {port}:127.0.0.1:"
        f"{port} THIS-MACHINE, and open the address there"
    )


# --- in the terminal --------------------------------------------------------------------------------------------------

SCREEN_INTERVAL_S, LINE_INTERVAL_S = 0.5, 5.0


def watch_in_terminal(find: Callable[[], Sequence[Path]]) -> int:
    """Show runs in the terminal until Ctrl-C; in a pipe print a line per run when it changes, until all have ended."""
    from rich.live import Live

    where, shown = make_console(), PageView("overview")
    with background_followers() as follow, contextlib.suppress(KeyboardInterrupt):
        hub = Dashboard(find, on_new_run=follow)
        if not where.is_interactive:
            printed: dict[str, str] = {}
            while True:
                while hub.read_new(shown):
                    pass
                now = time.time()
                for key, reader in hub.readers.items():
                    if printed.get(key) != (text := terminal_dashboard.status_line(key, reader, now)):
                        printed[key] = text
                        print_escaped(text, flush=True)
                if all(assess_health(reader, now).is_over for reader in hub.readers.values()):
                    return 0
                time.sleep(LINE_INTERVAL_S)
        with Live(console=where, screen=True, auto_refresh=False) as live:
            while True:
                is_more = hub.read_new(shown)
                live.update(
                    terminal_dashboard.render_frame(hub.readers, where.width, where.height, time.time()), refresh=True
                )
                time.sleep(0.0 if is_more else SCREEN_INTERVAL_S)
    return 0


# --- actions ----------------------------------------------------------------------------------------------------------


def can_control(reader: RunReader) -> bool:
    """Return whether the run was started by evener on this machine and has not ended."""
    manifest = reader.manifest
    return reader.plan is not None and not reader.is_foreign and (manifest is None or manifest.verdict == "running")


def stop_run(reader: RunReader) -> str:
    """Stop the run as `evener stop` does: its ranks finish their step, save and exit."""
    for ended in launcher.stop_and_record(reader.rundir, read_plan(reader.rundir)).values():
        if isinstance(ended, HostError):
            raise ended
    return "the run has ended"


def save_checkpoint(reader: RunReader) -> str:
    """Request a checkpoint now. Raise UsageError for a program that evener only launched."""
    if reader.manifest is not None and reader.manifest.program is not None:
        raise UsageError(f"{reader.manifest.program} saves its own checkpoints")
    launcher.request_checkpoint(reader.rundir, read_plan(reader.rundir))
    return f"requested after {reader.curves.steps_done:,} steps: an event reports when it is saved"


SAMPLE_TOKENS = 120


def can_sample(reader: RunReader) -> bool:
    """Return whether the run trains one of evener's models and has a local checkpoint."""
    manifest = reader.manifest
    has_model = manifest is not None and manifest.corpus is not None and manifest.shape is not None
    return has_model and bool(reader.rundir.checkpoint_steps())


def sample_text(reader: RunReader) -> str:
    """Generate text with the newest checkpoint, on this machine rather than the run's hosts; always the same seed."""
    folder = reader.rundir.verified_checkpoint(None)
    *_, (text, _) = continue_texts(reader.rundir, folder, ["\n"], SAMPLE_TOKENS)
    step = int(folder.name.rpartition("-")[2])
    reader.samples[step] = text.strip()
    return f"written after step {step:,}; new text can be generated after each checkpoint"


# --- records from other hosts -----------------------------------------------------------------------------------------


RETRY_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # until a follower that an error has ended starts again; the last one repeats


class _FollowCancelled(Exception):  # noqa: N818  # not an error: following was cancelled
    """The page was closed."""


@contextlib.contextmanager
def background_followers() -> Iterator[Callable[[RunReader], None]]:
    """Yield a function that follows a detached run in a thread of its own, as `evener logs -f` does."""
    closing, threads = threading.Event(), list[threading.Thread]()

    def begin(reader: RunReader) -> None:
        if _needs_follower(reader.rundir):
            thread = threading.Thread(target=_follow_until_closed, args=(reader, closing), daemon=True)
            thread.start()
            threads.append(thread)

    try:
        yield begin
    finally:
        closing.set()
        for thread in threads:
            thread.join(3.0)


def _needs_follower(rundir: RunDir) -> bool:
    """Return whether the run goes on without the terminal that started it, which would follow it."""
    try:
        plan = read_plan_if_present(rundir)
        if plan is None or not plan.hosts or is_foreign_run(rundir):
            return False
        if plan.is_local_run and rundir.inside("host", "attached").exists():
            return False
        return any(state.get("state") != "ended" for state in cached_states(rundir, plan).values())
    except EvenerError:
        return False


def _follow_until_closed(reader: RunReader, closing: threading.Event) -> None:
    """Follow a run until it has ended or the page is closed; start again after an error, which the page shows.

    The run's own failure is recorded as an event, and needs no other report.
    """
    rundir, is_copied = reader.rundir, False

    def see(mirror: RunMirror) -> None:
        nonlocal is_copied
        if closing.is_set():
            raise _FollowCancelled
        is_copied = mirror.is_done
        if all(host.state is not None and host.error is None for host in mirror.hosts.values()):
            reader.follow_error = ""  # each host's files were copied at least once

    for retry_s in itertools.chain(RETRY_S, itertools.repeat(RETRY_S[-1])):
        try:
            follow_run(rundir, read_plan(rundir), lambda event: None, on_change=see)
            return
        except _FollowCancelled:
            return
        except Exception as error:  # whatever it is, the records must come home
            if is_copied and isinstance(error, EvenerError):
                return  # the run has ended: that is how
            full = NoRoomError.from_os_error(error) if isinstance(error, OSError) else None
            why = str(full or error) if full or isinstance(error, EvenerError) else f"{type(error).__name__}: {error}"
        if reader.follow_error != why:
            print_status(f"warning: the records of {rundir} do not arrive: {why}; trying again")
            reader.follow_error = why
        if closing.wait(retry_s):
            return
