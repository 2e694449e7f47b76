"""evener lab chaos: inject faults into a lab's hosts at seeded random times while a run goes on there."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Annotated

import typer

from evener.core.base.escaped_output import print_escaped


def chaos(
    name: Annotated[str | None, typer.Option(help="which lab, if several are up")] = None,
    seed: Annotated[int, typer.Option(help="the same seed gives the same faults at the same times")] = 1,
    minutes: Annotated[float, typer.Option(help="duration")] = 10.0,
    faults: Annotated[str | None, typer.Option(metavar="FAULT,…", help="only these kinds [all]")] = None,
    listed: Annotated[bool, typer.Option("--list", help="list every kind, and how a run is expected to react")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the schedule, and do nothing")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object for each fault")] = False,
) -> int:
    """Kill, stop, disconnect and slow down the hosts of a lab, one after the other, at times drawn from a seed.

    Start a run there first. Faults that are active when this ends, also by Ctrl-C, are repaired.
    """
    from evener.core.base.errors import UsageError
    from evener.lab.emulated_lab import EmulatedLab
    from evener.lab.fault_injection import FAULT_TABLE, find_faults, inject_faults, schedule_faults, split_supported

    if listed:
        return _list_faults(as_json)
    if not 0 < minutes < 10_000:
        raise UsageError(f"--minutes {minutes:g}: expected more than 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    kinds = find_faults([word.strip() for word in faults.split(",")]) if faults else list(FAULT_TABLE)
    lab = EmulatedLab.find(name)
    kinds, left_out = split_supported(kinds, lab)
    if left_out:
        names = ", ".join(fault.name for fault in left_out)
        flags = " ".join(f"--{fault.requires} …" for fault in left_out)
        hint = f"evener lab up {flags} makes hosts that support it"
        if faults:
            raise UsageError(f"{names}: the hosts of {lab.name} have no such limit of their own", hint=hint)
        print_escaped(f"left out: {names}; {hint}", file=sys.stderr)
    events = schedule_faults(seed, minutes, [host.name for host in lab.hosts], kinds)
    if not events:
        raise UsageError(f"--minutes {minutes:g}: too short for any fault", hint="--minutes 5")
    for event, begins in inject_faults(lab, events) if not dry_run else ((event, True) for event in events):
        at, now = time.time(), time.strftime("%H:%M:%S")
        if as_json:
            facts = {"fault": event.fault.name, "host": event.host, "begins": begins, "at_s": event.at_s,
                     "lasts_s": event.duration_s, "expects": event.fault.expected,
                     "pause_s": event.fault.max_pause_s}  # fmt: skip
            print_escaped(json.dumps(facts | ({} if dry_run else {"time": at})), flush=True)
        elif begins:
            when = f"{event.at_s:6.0f} s" if dry_run else now
            print_escaped(f"{when}  {event}", flush=True)
        elif event.duration_s:
            print_escaped(f"{now}  fault over", flush=True)
    if not as_json:
        print_escaped("next: evener report RUN shows what it cost", file=sys.stderr)
    return 0


def _list_faults(as_json: bool) -> int:
    from evener.cli.terminal import make_console, print_table
    from evener.lab.fault_injection import FAULT_TABLE, UNSUPPORTED_FAULTS

    if as_json:
        faults = [{"name": row.name, "what": row.description, "expects": row.expected,
                 "pause_s": row.max_pause_s, "lasts_s": list(row.durations_s)} for row in FAULT_TABLE]  # fmt: skip
        print_escaped(json.dumps({"faults": faults, "not_possible": UNSUPPORTED_FAULTS}))
        return 0
    screen = make_console()
    rows = [
        (
            row.name,
            " or ".join(f"{lasts_s:g} s" for lasts_s in row.durations_s) or "at once",
            f"{row.max_pause_s:g} s",
            f"{row.description}: {row.expected}".format(host="b"),
        )
        for row in FAULT_TABLE
    ]
    print_table(screen, ("fault", "lasts", "pause", "what happens to a host b, and how a run reacts"), rows,
          left_aligned=["lasts"], wrap_last=True)  # fmt: skip
    screen.print()
    print_table(screen, ("what no lab can do", "why"), list(UNSUPPORTED_FAULTS.items()), wrap_last=True)
    print_escaped("\nnext: evener lab chaos --seed 1 --minutes 10", file=sys.stderr)
    return 0
