"""What do `watch`'s page and screen have in common? Which runs there are, what can be done to them, and that records of
those on other hosts come home.
"""

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
    """Says which runs are watched: those named, which must be there; without names all that were made here."""
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
    """Directories of runs in a folder, those of benches too."""
    return sorted({path.parent for depth in ("*", "*/*") for name in ("manifest.json", "plan.json")
                   for path in folder.glob(f"{depth}/{name}")})  # fmt: skip


def names_of(host: str) -> list[str]:
    """By which names a browser may ask for what listens there."""
    import socket

    import psutil

    if host not in ("0.0.0.0", "::"):  # noqa: S104
        return [host]
    addresses = [one.address for of_interface in psutil.net_if_addrs().values() for one in of_interface
                 if one.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
    return [socket.gethostname(), *(address.partition("%")[0] for address in addresses)]


def tell_shared(port: int) -> None:
    """What --host means."""
    say("warning: whoever has the address below can see these runs and stop them; it travels unencrypted, so whoever "
        f"can listen on that network has it too\nhint:  without --host, on another machine: ssh -L {port}:127.0.0.1:"
        f"{port} THIS-MACHINE, and open the address there")  # fmt: skip


# --- in the terminal --------------------------------------------------------------------------------------------------

SCREEN_EVERY_S, LINES_EVERY_S = 0.5, 5.0


def on_screen(find: Callable[[], Sequence[Path]]) -> int:
    """Show runs here until Ctrl-C; in a pipe a line of each now and then, until all are over."""
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
            told: dict[str, str] = {}
            while True:
                while hub.look(shown):
                    pass
                now = time.time()
                for key, reader in hub.readers.items():
                    if told.get(key) != (text := screen.line(key, reader, now)):
                        told[key] = text
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


# --- what can be done -------------------------------------------------------------------------------------------------


def can_ask(reader: Reader) -> bool:
    """Was it started by evener, and has it not ended?"""
    manifest = reader.manifest
    return reader.plan is not None and (manifest is None or manifest.verdict == "running")


def stop(reader: Reader) -> str:
    """Let its ranks finish their step, save and leave, as `evener stop` does."""
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
    return "it has ended"


def save(reader: Reader) -> str:
    """Ask for a checkpoint now."""
    from evener.core.plan import read_plan
    from evener.launch import fleet as launcher

    launcher.save(reader.rundir, read_plan(reader.rundir))
    return f"asked after {reader.curves.done:,} steps: the event says when it is saved"


SAMPLE_TOKENS = 120


def can_sample(reader: Reader) -> bool:
    """Is it a model of evener's own, of which a checkpoint is here?"""
    manifest = reader.manifest
    has_model = manifest is not None and manifest.corpus is not None and manifest.shape is not None
    return has_model and bool(reader.rundir.checkpoint_steps())


def sample(reader: Reader) -> str:
    """Let its newest checkpoint write something: here, and not on the run's hosts. The same draws each time."""
    from evener.cli.sample import written

    folder = reader.rundir.whole_checkpoint(None)
    *_, text = written(reader.rundir, folder, "\n", SAMPLE_TOKENS)
    step = int(folder.name.rpartition("-")[2])
    reader.samples[step] = text.strip()
    return f"written after step {step:,}; it writes again after each checkpoint"


# --- records that come home -------------------------------------------------------------------------------------------


class _Over(Exception):  # noqa: N818  # no error: nobody follows any more
    """The page was closed."""


@contextlib.contextmanager
def followers() -> Iterator[Callable[[Reader], None]]:
    """Follow each run that is given and goes on without this program: as `evener logs -f` does, a thread each."""
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
    """Does it go on, and not with the terminal that started it, which follows it?"""
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
    """To its end, or until the page is closed. How it failed stands in the events, and in the page with them."""
    from evener.core.errors import EvenerError
    from evener.core.plan import read_plan
    from evener.launch.follow import follow

    def see(mirror: Mirror) -> None:
        if closing.is_set():
            raise _Over

    with contextlib.suppress(EvenerError, _Over):
        follow(rundir, read_plan(rundir), lambda news: None, lambda host: None, see)
