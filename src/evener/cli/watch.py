"""evener watch: serve a live page of runs, or show them in the terminal."""

from __future__ import annotations

import typer

from evener.core.base.escaped_output import print_escaped

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
    from evener.cli import watch_actions
    from evener.cli.run_output import print_status
    from evener.watch.auth import user_token
    from evener.watch.dashboard import Dashboard
    from evener.watch.http_app import RunActions
    from evener.watch.http_listener import dashboard_url, listen, serve_dashboard

    find = watch_actions.make_run_finder(run or [])
    if terminal:
        return watch_actions.watch_in_terminal(find)
    token, one = user_token(), listen(host, port)
    shared = host not in ("127.0.0.1", "localhost", "::1")
    if shared:
        watch_actions.print_shared_warning(one.getsockname()[1])

    def begin() -> None:
        print_escaped(dashboard_url(one, host, token), flush=True)
        print_status("Ctrl-C ends the page; the runs go on")

    with watch_actions.background_followers() as follow:
        hub = Dashboard(find, on_new_run=follow)
        actions = RunActions(
            stop=watch_actions.stop_run, save=watch_actions.save_checkpoint, can_control=watch_actions.can_control,
            sample=watch_actions.sample_text, can_sample=watch_actions.can_sample,
        )  # fmt: skip
        serve_dashboard(one, hub, actions, token, watch_actions.allowed_host_names(host), begin, print_status)
    return 0
