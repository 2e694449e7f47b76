"""What befalls machines at home, done to a lab at moments that a seed chooses, while a run goes on there.

A fault is a row: what happens, for how long, and what a run with `--membership live` is expected to make of it.
`schedule` is pure: the same seed, the same night.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evener.core.errors import EvenerError, UsageError
from evener.lab import cgroup
from evener.lab.host import Host
from evener.lab.lab import Lab

RANK, AGENT, SUPERVISOR = "evener.worker", "evener.agent", "supervisor.py"
CALM_S = (20.0, 60.0)  # between the end of one fault and the next: to be whole again
WORDS = 5  # of a command line, in which a program's name stands
CUT = "table inet evener_chaos"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row."""

    name: str
    what: str  # happens to {host}
    expects: str
    pause_s: float  # that the others lose at most
    lasts_s: tuple[float, ...] = ()  # of which one is chosen; none: it is over at once
    begin: Callable[[Lab, Host], object]
    end: Callable[[Lab, Host], object] = lambda lab, host: None


@dataclass(frozen=True, kw_only=True)
class Event:
    """When a fault befalls a host; `at_s` since the beginning."""

    at_s: float
    fault: Fault
    host: str
    lasts_s: float

    def __str__(self) -> str:
        lasts = f", for {self.lasts_s:.0f} s" if self.lasts_s else ""
        return f"{self.fault.what.format(host=self.host)}{lasts}"


def pids_of(host: Host, program: str) -> list[int]:
    """Of the processes there that run it, the first one before what came of it."""
    found = []
    for pid in sorted(host.pids()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += [pid] * any(program.encode() in word for word in words[:WORDS])
    return found


def _ranks(host: Host) -> list[int]:
    """Not torchrun, which is of the same package."""
    return [pid for pid in pids_of(host, RANK) if pid not in pids_of(host, f"{RANK}.torchrun")]


def _signal(pids: Callable[[Host], list[int]], signum: signal.Signals) -> Callable[[Lab, Host], None]:
    def do(lab: Lab, host: Host) -> None:
        for pid in pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    return do


def _kill(program: str) -> Callable[[Lab, Host], None]:
    return _signal(lambda host: pids_of(host, program)[:1], signal.SIGKILL)


def _cable(plugged_in: bool) -> Callable[[Lab, Host], None]:
    return lambda lab, host: host.link_up(plugged_in)


def _drops(rule: str) -> Callable[[Lab, Host], None]:
    """Of what comes in, ssh's as well."""
    text = f"{CUT}\ndelete {CUT}\n{CUT} {{\n chain input {{\n  type filter hook input priority -5;\n  {rule}\n }}\n}}\n"

    def do(lab: Lab, host: Host) -> None:
        host.exec(["nft", "-f", "-"], stdin=text)

    return do


def _let_in(lab: Lab, host: Host) -> None:
    host.exec(["nft", "delete", *CUT.split()], check=False)


def _slow_link(lab: Lab, host: Host) -> None:
    bps = host.spec.up_bps
    if bps is None:
        raise EvenerError(f"the link of {host.name} has no rate to take a tenth of", hint="evener lab up --rate 1Gbit")
    host.set_rate(f"{bps // 10_000}kbit")


def _as_it_was(lab: Lab, host: Host) -> None:
    host.set_rate(f"{10 * (host.spec.up_bps or 0) // 1000}kbit")


def _cores(part: float) -> Callable[[Lab, Host], None]:
    def do(lab: Lab, host: Host) -> None:
        if host.spec.cpus is None:
            raise EvenerError(f"{host.name} has no limit of processor time", hint="evener lab up --cpus 0.6")
        cgroup.make(lab.name, host.name, part * host.spec.cpus, None)

    return do


def _runs(command: str) -> Callable[[Lab, Host], None]:
    def do(lab: Lab, host: Host) -> None:
        host.exec(["sh", "-ec", command])

    return do


OTHERS_GO_ON = "the others go on without {host}, and let it in again"
ROWS = (
    Fault(name="kill-rank", what="a rank of {host} is killed", expects=OTHERS_GO_ON, pause_s=5,
          begin=_signal(lambda host: _ranks(host)[:1], signal.SIGKILL)),
    Fault(name="kill-agent", what="the agent of {host} is killed", expects=OTHERS_GO_ON, pause_s=5, begin=_kill(AGENT)),
    Fault(name="kill-supervisor", what="the supervisor of {host} is killed", pause_s=5, begin=_kill(SUPERVISOR),
          expects="another one takes its place; at most as if its agent had been killed"),
    Fault(name="stop-rank", what="the ranks of {host} are stopped", lasts_s=(5, 60), pause_s=25,
          expects="5 s: all wait; 60 s: it is named within 15 s, and 10 s later the others go on",
          begin=_signal(_ranks, signal.SIGSTOP), end=_signal(_ranks, signal.SIGCONT)),
    Fault(name="lid", what="the lid of {host} is shut: all of it is stopped", lasts_s=(10, 60), pause_s=6,
          expects=OTHERS_GO_ON, begin=_signal(Host.pids, signal.SIGSTOP), end=_signal(Host.pids, signal.SIGCONT)),
    Fault(name="power", what="{host} loses its power", lasts_s=(5, 30), pause_s=6, expects=OTHERS_GO_ON,
          begin=lambda lab, host: host.power_off(), end=lambda lab, host: host.boot()),
    Fault(name="cable", what="the cable of {host} is pulled", lasts_s=(5, 30, 120), pause_s=6, expects=OTHERS_GO_ON,
          begin=_cable(False), end=_cable(True)),
    Fault(name="one-way", what="{host} hears nobody, and is heard", lasts_s=(5, 30), pause_s=6, expects=OTHERS_GO_ON,
          begin=_drops("iifname != lo drop"), end=_let_in),
    Fault(name="packets", what="{host} loses one packet in fifty", lasts_s=(30,), pause_s=30, end=_let_in,
          expects="steps are slower; at worst as if its cable were pulled",
          begin=_drops("iifname != lo numgen random mod 50 == 0 drop")),
    Fault(name="rate", what="the link of {host} has a tenth of its rate", lasts_s=(30,), pause_s=0, begin=_slow_link,
          end=_as_it_was, expects="steps are slower, nothing else"),
    Fault(name="half-speed", what="{host} is half as fast", lasts_s=(60,), pause_s=0, begin=_cores(0.5), end=_cores(1),
          expects="its share becomes smaller within 10 steps"),
    Fault(name="disk-full", what="the disk of {host} is full", lasts_s=(30,), pause_s=6,
          expects="no checkpoint is lost; all begin anew from the last",
          begin=_runs("fallocate -l $(df --output=avail -B1 ~/.evener | tail -1) ~/.evener/full || "
                       "dd if=/dev/zero of=$HOME/.evener/full bs=1M 2>/dev/null || true"),
          end=_runs("rm -f ~/.evener/full")),
    Fault(name="read-only", what="the disk of {host} can only be read", lasts_s=(30,), pause_s=6,
          expects="as if it were full",
          begin=_runs("mount -o remount,ro ~/.evener"), end=_runs("mount -o remount,rw ~/.evener")),
)  # fmt: skip
FAULTS: Mapping[str, Fault] = {row.name: row for row in ROWS}
# What no lab can do to a host by itself, and where it is tried instead.
NOT_HERE = {
    "a clock that jumps": "all hosts of a lab have this machine's clock; nothing in a run compares two hosts' clocks",
    "a bit that flips in a weight, NaN in a gradient": "from outside nobody finds them in memory: tests do it in ranks",
}


def schedule(seed: int, minutes: float, hosts: Sequence[str], faults: Sequence[Fault],
             calm_s: tuple[float, float] = CALM_S) -> list[Event]:  # fmt: skip
    """Faults one after the other, each of a kind and on a host that chance takes; the last is over in time.

    >>> [str(event) for event in schedule(1, 2, ["a", "b"], [FAULTS["power"]])]
    ['b loses its power, for 5 s']
    """
    chance, now, found = random.Random(seed), 0.0, list[Event]()
    while True:
        now += chance.uniform(*calm_s)
        fault = chance.choice(faults)
        host, lasts_s = chance.choice(hosts), chance.choice(fault.lasts_s or (0.0,))
        if now + lasts_s + calm_s[0] > 60 * minutes:
            return found
        found.append(Event(at_s=now, fault=fault, host=host, lasts_s=lasts_s))
        now += lasts_s


def find(names: Sequence[str]) -> list[Fault]:
    """By their names; UsageError where there is none."""
    for name in names:
        if name not in FAULTS:
            raise UsageError(f"no fault is called {name}: {', '.join(FAULTS)}", hint="evener lab chaos --list")
    return [FAULTS[name] for name in names]


def perform(lab: Lab, events: Sequence[Event]) -> Iterator[tuple[Event, bool]]:
    """Do it, each in its time: an event and True when it has begun, and False when it is over.

    Whatever was broken is mended on the way out.
    """
    began = time.monotonic()
    for event in events:
        host = lab.host(event.host)
        time.sleep(max(0.0, began + event.at_s - time.monotonic()))
        event.fault.begin(lab, host)
        try:
            yield event, True
            time.sleep(event.lasts_s)
        finally:
            event.fault.end(lab, host)
        yield event, False
