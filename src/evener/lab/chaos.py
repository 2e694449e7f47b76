"""Inject faults into a lab during a run, at moments that a seed chooses (chaos test).

A fault is a row: what happens, for how long, and how a run with `--membership live` is expected to react.
`schedule_faults` is pure: the same seed gives the same schedule.
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
from typing import Literal

from evener.core.errors import UsageError
from evener.lab import cgroup
from evener.lab.host import Host
from evener.lab.lab import Lab

RANK, AGENT, SUPERVISOR = "evener.worker", "evener.agent", "supervisor.py"
CALM_S = (20.0, 60.0)  # between the end of one fault and the next, so that the run can recover
WORDS = 5  # leading words of a command line that may name the program
CUT = "table inet evener_chaos"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault: how it begins and ends, and the expected reaction of a run."""

    name: str
    what: str  # the fault in words; {host} is filled in
    expects: str
    pause_s: float  # the longest pause of the other hosts
    lasts_s: tuple[float, ...] = ()  # one is drawn; empty: over at once
    needs: Literal["rate", "cpus", "disk"] | None = None  # field of HostSpec that every host must have set
    begin: Callable[[Lab, Host], object]
    end: Callable[[Lab, Host], object] = lambda lab, host: None


@dataclass(frozen=True, kw_only=True)
class Event:
    """A fault on one host, `at_s` seconds after the start of the schedule."""

    at_s: float
    fault: Fault
    host: str
    lasts_s: float

    def __str__(self) -> str:
        lasts = f", for {self.lasts_s:.0f} s" if self.lasts_s else ""
        return f"{self.fault.what.format(host=self.host)}{lasts}"


def pids_of(host: Host, program: str) -> list[int]:
    """Return the pids that run a program on a host, in ascending order: parents before their children."""
    pids = []
    for pid in sorted(host.pids()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            pids += [pid] * any(program.encode() in word for word in words[:WORDS])
    return pids


def _ranks(host: Host) -> list[int]:
    """Return the pids of the ranks, without torchrun, which is in the same package."""
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
    """Return the function that adds an nftables rule for incoming packets, those of ssh included."""
    text = f"{CUT}\ndelete {CUT}\n{CUT} {{\n chain input {{\n  type filter hook input priority -5;\n  {rule}\n }}\n}}\n"

    def do(lab: Lab, host: Host) -> None:
        host.exec(["nft", "-f", "-"], stdin=text)

    return do


def _let_in(lab: Lab, host: Host) -> None:
    host.exec(["nft", "delete", *CUT.split()], check=False)


def _slow_link(lab: Lab, host: Host) -> None:
    host.set_rate(f"{(host.spec.up_bps or 0) // 10_000}kbit")


def _as_it_was(lab: Lab, host: Host) -> None:
    host.set_rate(f"{10 * (host.spec.up_bps or 0) // 1000}kbit")


def _cores(part: float) -> Callable[[Lab, Host], None]:
    def do(lab: Lab, host: Host) -> None:
        cgroup.make(lab.name, host.name, part * (host.spec.cpus or 0.0), None)

    return do


OTHERS_GO_ON = "the others continue without {host}, which rejoins afterwards"
ROWS = (
    Fault(name="kill-rank", what="a rank of {host} is killed", expects=OTHERS_GO_ON, pause_s=5,
          begin=_signal(lambda host: _ranks(host)[:1], signal.SIGKILL)),
    Fault(name="kill-agent", what="the agent of {host} is killed", expects=OTHERS_GO_ON, pause_s=5, begin=_kill(AGENT)),
    Fault(name="kill-supervisor", what="the supervisor of {host} is killed", pause_s=5, begin=_kill(SUPERVISOR),
          expects="a new one is started; at worst the same as a killed agent"),
    Fault(name="stop-rank", what="the ranks of {host} are stopped", lasts_s=(5, 60), pause_s=25,
          expects="5 s: all wait; 60 s: the hang is reported within 15 s, and 10 s later the others continue",
          begin=_signal(_ranks, signal.SIGSTOP), end=_signal(_ranks, signal.SIGCONT)),
    Fault(name="lid", what="the lid of {host} is closed: all its processes are stopped", lasts_s=(10, 60), pause_s=6,
          expects=OTHERS_GO_ON, begin=_signal(Host.pids, signal.SIGSTOP), end=_signal(Host.pids, signal.SIGCONT)),
    Fault(name="power", what="{host} loses its power", lasts_s=(5, 30), pause_s=6, expects=OTHERS_GO_ON,
          begin=lambda lab, host: host.power_off(), end=lambda lab, host: host.boot()),
    Fault(name="cable", what="the cable of {host} is pulled", lasts_s=(5, 30, 120), pause_s=6, expects=OTHERS_GO_ON,
          begin=_cable(False), end=_cable(True)),
    Fault(name="one-way", what="{host} can send but not receive", lasts_s=(5, 30), pause_s=6, expects=OTHERS_GO_ON,
          begin=_drops("iifname != lo drop"), end=_let_in),
    Fault(name="packets", what="{host} loses one packet in fifty", lasts_s=(30,), pause_s=30, end=_let_in,
          expects="steps are slower; at worst the same as a pulled cable",
          begin=_drops("iifname != lo numgen random mod 50 == 0 drop")),
    Fault(name="rate", what="the link of {host} has a tenth of its rate", lasts_s=(30,), pause_s=0, needs="rate",
          begin=_slow_link, end=_as_it_was, expects="steps are slower, nothing else"),
    Fault(name="half-speed", what="{host} runs at half speed", lasts_s=(60,), pause_s=0, needs="cpus",
          begin=_cores(0.5), end=_cores(1),
          expects="its share becomes smaller within 10 steps"),
    Fault(name="disk-full", what="the disk of {host} is full", lasts_s=(30,), pause_s=6, needs="disk",
          expects="no checkpoint is lost; the others continue, and it rejoins when there is space",
          begin=lambda lab, host: host.fill_disk(True), end=lambda lab, host: host.fill_disk(False)),
)  # fmt: skip
FAULTS: Mapping[str, Fault] = {row.name: row for row in ROWS}
# Faults that a lab cannot inject into one host, and why, or where they are tested instead.
NOT_HERE = {
    "a clock that jumps": "all hosts of a lab have this machine's clock; nothing in a run compares two hosts' clocks",
    "a disk that becomes read-only": "the kernel does not remount it while a run has files open there; to a run "
    "it is the same as a full disk",
    "a bit that flips in a weight, NaN in a gradient": "another process cannot find them in memory: unit tests inject "
    "them in ranks",
}


def schedule(seed: int, minutes: float, hosts: Sequence[str], faults: Sequence[Fault],
             calm_s: tuple[float, float] = CALM_S) -> list[Event]:  # fmt: skip
    """Return faults one after the other, with a random kind, host and duration; the last ends within `minutes`.

    >>> [str(event) for event in schedule(1, 2, ["a", "b"], [FAULTS["power"]])]
    ['b loses its power, for 5 s']
    """
    rng, now, events = random.Random(seed), 0.0, list[Event]()
    while True:
        now += rng.uniform(*calm_s)
        fault = rng.choice(faults)
        host, lasts_s = rng.choice(hosts), rng.choice(fault.lasts_s or (0.0,))
        if now + lasts_s + calm_s[0] > 60 * minutes:
            return events
        events.append(Event(at_s=now, fault=fault, host=host, lasts_s=lasts_s))
        now += lasts_s


def find(names: Sequence[str]) -> list[Fault]:
    """Return the faults with these names; raise UsageError for an unknown one."""
    for name in names:
        if name not in FAULTS:
            raise UsageError(f"no fault is called {name}: {', '.join(FAULTS)}", hint="evener lab chaos --list")
    return [FAULTS[name] for name in names]


def possible(faults: Sequence[Fault], lab: Lab) -> tuple[list[Fault], list[Fault]]:
    """Return (the faults that every host of the lab supports, the others)."""
    supported = [row for row in faults if row.needs is None or all(getattr(host.spec, row.needs) for host in lab.hosts)]
    return supported, [row for row in faults if row not in supported]


def perform(lab: Lab, events: Sequence[Event]) -> Iterator[tuple[Event, bool]]:
    """Inject each fault at its time; yield it with True when it begins and with False when it ends.

    A fault that is active when the generator is closed is ended.
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
