"""evener watch: serve a live page of runs, or show them in the terminal."""

from __future__ import annotations

import typer

EXAMPLES = """
evener watch runs/mine
evener watch runs/a runs/b
evener watch --terminal runs/mine
"""


def watch(
    run: list[str] | None = typer.Argument(None, help="run directories, or runs' ids [all in runs/]"),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="listen on this address, so that others can connect"),
    terminal: bool = typer.Option(False, "--terminal", help="show the runs in the terminal instead of a browser"),
    port: int | None = typer.Option(None, min=1, max=65535, help="port to listen on [7447, or a free one]"),
) -> int:
    """Show runs in a browser while they go on: curves, where each step's time goes, events, and health. Ctrl-C ends the
    page, and the runs go on.

    The printed address contains a token that every request needs. With --host, others who have the address see the runs
    and can stop them. It is sent unencrypted, so use only a network that you trust.
    """
    from evener.cli import watching
    from evener.cli.fleets import say
    from evener.watch.guard import user_token
    from evener.watch.hub import Hub
    from evener.watch.serve import address, listen, serve
    from evener.watch.server import Actions

    find = watching.finder(run or [])
    if terminal:
        return watching.on_screen(find)
    token, one = user_token(), listen(host, port)
    shared = host not in ("127.0.0.1", "localhost", "::1")
    if shared:
        watching.tell_shared(one.getsockname()[1])

    def begin() -> None:
        print(address(one, host, token), flush=True)
        say("Ctrl-C ends the page; the runs go on")

    with watching.followers() as follow:
        hub = Hub(find, on_new=follow)
        actions = Actions(
            stop=watching.stop, save=watching.save, can_ask=watching.can_ask,
            sample=watching.sample, can_sample=watching.can_sample,
        )  # fmt: skip
        serve(one, hub, actions, token, watching.names_of(host), begin)
    return 0
