"""Shared by the page and the terminal view of `watch`: find runs, control them, and fetch records from their hosts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evener.cli.fleets import find_run, say

if TYPE_CHECKING:
    from evener.core.rundir import RunDir
    from evener.launch.mirror import Mirror
    from evener.watch.reader import Reader

FOLDER = "runs"


def finder(names: Sequence[str]) -> Callable[[], list[Path]]:
    """Return a function that lists the runs to watch: the named ones, which must exist, or else all in runs/."""
    from evener.core.errors import UsageError
    from evener.core.rundir import RunDir

    if not names:
        if not Path(FOLDER).is_dir():
            raise UsageError(f"{FOLDER}: no such folder", hint="evener watch RUN; evener train makes runs/")
        return lambda: runs_in(Path(FOLDER))
    paths = [find_run(name) for name in names]
    for name, path in zip(names, paths, strict=True):
        if not (path / "plan.json").is_file() and not RunDir(path).is_run():
            hint = "evener runs lists those made here"
            raise UsageError(f"{name}: not a run directory: it has no manifest.json and no plan.json", hint=hint)
    return lambda: paths


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories in a folder, those of benches too."""
    return sorted({path.parent for depth in ("*", "*/*") for name in ("manifest.json", "plan.json")
                   for path in folder.glob(f"{depth}/{name}")})  # fmt: skip


def names_of(host: str) -> list[str]:
    """Return the host names that requests may use for a server that listens on `host`."""
    import socket

    import psutil

    if host not in ("0.0.0.0", "::"):  # noqa: S104
        return [host]
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries
                 if entry.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
    return [socket.gethostname(), *(address.partition("%")[0] for address in addresses)]


def tell_shared(port: int) -> None:
    """Print what --host exposes, and the ssh tunnel that avoids it."""
    say("warning: anyone with the address below can see and stop these runs; it is sent unencrypted, so anyone who "
        f"can listen on that network has it too\nhint:  without --host, on another machine: ssh -L {port}:127.0.0.1:"
        f"{port} THIS-MACHINE, and open the address there")  # fmt: skip


# --- in the terminal --------------------------------------------------------------------------------------------------

SCREEN_EVERY_S, LINES_EVERY_S = 0.5, 5.0


def on_screen(find: Callable[[], Sequence[Path]]) -> int:
    """Show runs in the terminal until Ctrl-C; in a pipe print a line per run when it changes, until all have ended."""
    import time

    from rich.live import Live

    from evener.cli.terminal import console
    from evener.watch import screen
    from evener.watch.health import health
    from evener.watch.hub import Hub, View

    where, shown = console(), View("overview")
    with followers() as follow, contextlib.suppress(KeyboardInterrupt):
        hub = Hub(find, on_new=follow)
        if not where.is_interactive:
            printed: dict[str, str] = {}
            while True:
                while hub.look(shown):
                    pass
                now = time.time()
                for key, reader in hub.readers.items():
                    if printed.get(key) != (text := screen.line(key, reader, now)):
                        printed[key] = text
                        print(text, flush=True)
                if all(health(reader, now).is_over for reader in hub.readers.values()):
                    return 0
                time.sleep(LINES_EVERY_S)
        with Live(console=where, screen=True, auto_refresh=False) as live:
            while True:
                is_more = hub.look(shown)
                live.update(screen.frame(hub.readers, where.width, where.height, time.time()), refresh=True)
                time.sleep(0.0 if is_more else SCREEN_EVERY_S)
    return 0


# --- actions ----------------------------------------------------------------------------------------------------------


def can_ask(reader: Reader) -> bool:
    """Return whether the run was started by evener and has not ended."""
    manifest = reader.manifest
    return reader.plan is not None and (manifest is None or manifest.verdict == "running")


def stop(reader: Reader) -> str:
    """Stop the run as `evener stop` does: its ranks finish their step, save and exit."""
    from evener.core.errors import HostError
    from evener.core.plan import read_plan
    from evener.launch import fleet as launcher

    plan = read_plan(reader.rundir)
    ended = launcher.stop(reader.rundir, plan)
    launcher.catch_up(reader.rundir, plan)
    errors = [one for one in ended.values() if isinstance(one, HostError)]
    if errors:
        raise errors[0]
    launcher.conclude(reader.rundir, plan, {name: one for name, one in ended.items() if not isinstance(one, HostError)})
    return "the run has ended"


def save(reader: Reader) -> str:
    """Request a checkpoint now."""
    from evener.core.plan import read_plan
    from evener.launch import fleet as launcher

    launcher.save(reader.rundir, read_plan(reader.rundir))
    return f"requested after {reader.curves.done:,} steps: an event reports when it is saved"


SAMPLE_TOKENS = 120


def can_sample(reader: Reader) -> bool:
    """Return whether the run trains one of evener's models and has a local checkpoint."""
    manifest = reader.manifest
    has_model = manifest is not None and manifest.corpus is not None and manifest.shape is not None
    return has_model and bool(reader.rundir.checkpoint_steps())


def sample(reader: Reader) -> str:
    """Generate text with the newest checkpoint, on this machine rather than the run's hosts; always the same seed."""
    from evener.cli.sample import written

    folder = reader.rundir.whole_checkpoint(None)
    *_, text = written(reader.rundir, folder, "\n", SAMPLE_TOKENS)
    step = int(folder.name.rpartition("-")[2])
    reader.samples[step] = text.strip()
    return f"written after step {step:,}; new text can be generated after each checkpoint"


# --- records from other hosts -----------------------------------------------------------------------------------------


class _Over(Exception):  # noqa: N818  # not an error: following was cancelled
    """The page was closed."""


@contextlib.contextmanager
def followers() -> Iterator[Callable[[Reader], None]]:
    """Yield a function that follows a detached run in a thread of its own, as `evener logs -f` does."""
    closing, threads = threading.Event(), list[threading.Thread]()

    def begin(reader: Reader) -> None:
        if _is_to_be_followed(reader.rundir):
            thread = threading.Thread(target=_follow, args=(reader.rundir, closing), daemon=True)
            thread.start()
            threads.append(thread)

    try:
        yield begin
    finally:
        closing.set()
        for thread in threads:
            thread.join(3.0)


def _is_to_be_followed(rundir: RunDir) -> bool:
    """Return whether the run goes on without the terminal that started it, which would follow it."""
    from evener.core.errors import EvenerError
    from evener.core.plan import find_plan
    from evener.launch.fleet import known_states

    try:
        plan = find_plan(rundir)
        if plan is None or not plan.hosts or (plan.is_here and (rundir.path / "host" / "attached").exists()):
            return False
        return any(state.get("state") != "ended" for state in known_states(rundir, plan).values())
    except EvenerError:
        return False


def _follow(rundir: RunDir, closing: threading.Event) -> None:
    """Follow a run to its end or until the page is closed. Errors are recorded as events, which the page shows."""
    from evener.core.errors import EvenerError
    from evener.core.plan import read_plan
    from evener.launch.follow import follow

    def see(mirror: Mirror) -> None:
        if closing.is_set():
            raise _Over

    with contextlib.suppress(EvenerError, _Over):
        follow(rundir, read_plan(rundir), lambda news: None, lambda host: None, see)
