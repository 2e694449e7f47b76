"""evener lab chaos: break a lab's hosts at moments that a seed chooses, while a run goes on there."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Annotated

import typer


def chaos(
    name: Annotated[str | None, typer.Option(help="which lab, where several are up")] = None,
    seed: Annotated[int, typer.Option(help="the same seed, the same faults at the same moments")] = 1,
    minutes: Annotated[float, typer.Option(help="for so long")] = 10.0,
    faults: Annotated[str | None, typer.Option(metavar="FAULT,…", help="of these kinds [all]")] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="every kind, and what a run is expected to make of it")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="tell what would happen when, and do nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object for each fault")] = False,
) -> int:
    """Kill, stop, cut off and slow down the hosts of a lab, one after the other, at moments that a seed chooses.

    Start a run there first. What is broken when this ends, also by Ctrl-C, is mended.
    """
    from evener.core.errors import UsageError
    from evener.lab.chaos import ROWS, find, perform, possible, schedule
    from evener.lab.lab import Lab

    if listed:
        return _list(as_json)
    if not 0 < minutes < 10_000:
        raise UsageError(f"--minutes {minutes:g}: expected more than 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kinds = find([word.strip() for word in faults.split(",")]) if faults else list(ROWS)
    lab = Lab.find(name)
    kinds, left_out = possible(kinds, lab)
    if left_out:
        told, flags = ", ".join(one.name for one in left_out), " ".join(f"--{one.needs} …" for one in left_out)
        hint = f"evener lab up {flags} makes hosts that have it"
        if faults:
            raise UsageError(f"{told}: the hosts of {lab.name} have nothing of their own there", hint=hint)
        print(f"left out: {told}; {hint}", file=sys.stderr)
    events = schedule(seed, minutes, [host.name for host in lab.hosts], kinds)
    if not events:
        raise UsageError(f"--minutes {minutes:g}: no fault would be over in time", hint="--minutes 5")
    for event, begins in perform(lab, events) if not dry_run else ((event, True) for event in events):
        at, now = time.time(), time.strftime("%H:%M:%S")
        if as_json:
            facts = {"fault": event.fault.name, "host": event.host, "begins": begins, "at_s": event.at_s,
                     "lasts_s": event.lasts_s, "expects": event.fault.expects,
                     "pause_s": event.fault.pause_s}  # fmt: skip
            print(json.dumps(facts | ({} if dry_run else {"time": at})), flush=True)
        elif begins:
            when = f"{event.at_s:6.0f} s" if dry_run else now
            print(f"{when}  {event}", flush=True)
        elif event.lasts_s:
            print(f"{now}  that is over", flush=True)
    if not as_json:
        print("next: evener report RUN tells what it cost", file=sys.stderr)
    return 0


def _list(as_json: bool) -> int:
    from evener.cli.terminal import console, table
    from evener.lab.chaos import NOT_HERE, ROWS

    if as_json:
        told = [{"name": row.name, "what": row.what, "expects": row.expects,
                 "pause_s": row.pause_s, "lasts_s": list(row.lasts_s)} for row in ROWS]  # fmt: skip
        print(json.dumps({"faults": told, "not_possible": NOT_HERE}))
        return 0
    screen = console()
    rows = [(row.name, " or ".join(f"{one:g} s" for one in row.lasts_s) or "at once", f"{row.pause_s:g} s",
             f"{row.what}: {row.expects}".format(host="b")) for row in ROWS]  # fmt: skip
    table(screen, ("fault", "lasts", "pause", "what happens to a host b, and what a run makes of it"), rows,
          left=["lasts"], text=True)  # fmt: skip
    screen.print()
    table(screen, ("what no lab can do", "why"), list(NOT_HERE.items()), text=True)
    print("\nnext: evener lab chaos --seed 1 --minutes 10", file=sys.stderr)
    return 0
