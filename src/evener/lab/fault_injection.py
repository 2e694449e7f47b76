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

from evener.core.base.errors import UsageError
from evener.lab import cgroup
from evener.lab.emulated_lab import EmulatedLab
from evener.lab.host import LabHost

RANK_PROGRAM, AGENT_PROGRAM, SUPERVISOR_PROGRAM = "evener.worker", "evener.node.agent", "supervisor.py"
RECOVERY_S = (20.0, 60.0)  # between the end of one fault and the next, so that the run can recover
MAX_ARGV_WORDS = 5  # leading words of a command line that may name the program
NFT_TABLE = "table inet evener_chaos"


@dataclass(frozen=True, kw_only=True)
class ChaosFault:
    """One kind of fault: how it begins and ends, and the expected reaction of a run."""

    name: str
    description: str  # the fault in words; {host} is filled in
    expected: str
    max_pause_s: float  # the longest pause of the other hosts
    durations_s: tuple[float, ...] = ()  # one is drawn; empty: over at once
    requires: Literal["rate", "cpus", "disk"] | None = None  # field of HostSpec that every host must have set
    begin: Callable[[EmulatedLab, LabHost], object]
    end: Callable[[EmulatedLab, LabHost], object] = lambda lab, host: None


@dataclass(frozen=True, kw_only=True)
class ScheduledFault:
    """A fault on one host, `at_s` seconds after the start of the schedule."""

    at_s: float
    fault: ChaosFault
    host: str
    duration_s: float

    def __str__(self) -> str:
        lasts = f", for {self.duration_s:.0f} s" if self.duration_s else ""
        return f"{self.fault.description.format(host=self.host)}{lasts}"


def find_pids(host: LabHost, program: str) -> list[int]:
    """Return the pids that run a program on a host, in ascending order: parents before their children."""
    pids = []
    for pid in sorted(host.pids()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            pids += [pid] * any(program.encode() in word for word in words[:MAX_ARGV_WORDS])
    return pids


def _rank_pids(host: LabHost) -> list[int]:
    """Return the pids of the ranks, without torchrun, which is in the same package."""
    return [pid for pid in find_pids(host, RANK_PROGRAM) if pid not in find_pids(host, f"{RANK_PROGRAM}.torchrun")]


def _send_signal(
    pids: Callable[[LabHost], list[int]], signum: signal.Signals
) -> Callable[[EmulatedLab, LabHost], None]:
    def do(lab: EmulatedLab, host: LabHost) -> None:
        for pid in pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    return do


def _kill(program: str) -> Callable[[EmulatedLab, LabHost], None]:
    return _send_signal(lambda host: find_pids(host, program)[:1], signal.SIGKILL)


def _set_cable(plugged_in: bool) -> Callable[[EmulatedLab, LabHost], None]:
    return lambda lab, host: host.set_link_up(plugged_in)


def _drop_packets(rule: str) -> Callable[[EmulatedLab, LabHost], None]:
    """Return the function that adds an nftables rule for incoming packets, those of ssh included."""
    text = (
        f"{NFT_TABLE}\ndelete {NFT_TABLE}\n{NFT_TABLE} {{\n chain input {{\n  type filter hook input "
        f"priority -5;\n  {rule}\n }}\n}}\n"
    )

    def do(lab: EmulatedLab, host: LabHost) -> None:
        host.exec(["nft", "-f", "-"], stdin=text)

    return do


def _accept_packets(lab: EmulatedLab, host: LabHost) -> None:
    host.exec(["nft", "delete", *NFT_TABLE.split()], check=False)


def _slow_link(lab: EmulatedLab, host: LabHost) -> None:
    host.set_rate(f"{(host.spec.up_bps or 0) // 10_000}kbit")


def _restore_link(lab: EmulatedLab, host: LabHost) -> None:
    host.set_rate(f"{10 * (host.spec.up_bps or 0) // 1000}kbit")


def _limit_cpus(fraction: float) -> Callable[[EmulatedLab, LabHost], None]:
    def do(lab: EmulatedLab, host: LabHost) -> None:
        cgroup.make(lab.name, host.name, fraction * (host.spec.cpus or 0.0), None)

    return do


CONTINUE_AND_REJOIN = "the others continue without {host}, which rejoins afterwards"
FAULT_TABLE = (
    ChaosFault(
        name="kill-rank",
        description="a rank of {host} is killed",
        expected=CONTINUE_AND_REJOIN,
        max_pause_s=5,
        begin=_send_signal(lambda host: _rank_pids(host)[:1], signal.SIGKILL),
    ),
    ChaosFault(
        name="kill-agent",
        description="the agent of {host} is killed",
        expected=CONTINUE_AND_REJOIN,
        max_pause_s=5,
        begin=_kill(AGENT_PROGRAM),
    ),
    ChaosFault(
        name="kill-supervisor",
        description="the supervisor of {host} is killed",
        max_pause_s=5,
        begin=_kill(SUPERVISOR_PROGRAM),
        expected="a new one is started; at worst the same as a killed agent",
    ),
    ChaosFault(
        name="stop-rank",
        description="the ranks of {host} are stopped",
        durations_s=(5, 60),
        max_pause_s=25,
        expected="5 s: all wait; 60 s: the hang is reported within 15 s, and 10 s later the others continue",
        begin=_send_signal(_rank_pids, signal.SIGSTOP),
        end=_send_signal(_rank_pids, signal.SIGCONT),
    ),
    ChaosFault(
        name="lid",
        description="the lid of {host} is closed: all its processes are stopped",
        durations_s=(10, 60),
        max_pause_s=6,
        expected=CONTINUE_AND_REJOIN,
        begin=_send_signal(LabHost.pids, signal.SIGSTOP),
        end=_send_signal(LabHost.pids, signal.SIGCONT),
    ),
    ChaosFault(
        name="power",
        description="{host} loses its power",
        durations_s=(5, 30),
        max_pause_s=6,
        expected=CONTINUE_AND_REJOIN,
        begin=lambda lab, host: host.power_off(),
        end=lambda lab, host: host.boot(),
    ),
    ChaosFault(
        name="cable",
        description="the cable of {host} is pulled",
        durations_s=(5, 30, 120),
        max_pause_s=6,
        expected=CONTINUE_AND_REJOIN,
        begin=_set_cable(False),
        end=_set_cable(True),
    ),
    ChaosFault(
        name="one-way",
        description="{host} can send but not receive",
        durations_s=(5, 30),
        max_pause_s=6,
        expected=CONTINUE_AND_REJOIN,
        begin=_drop_packets("iifname != lo drop"),
        end=_accept_packets,
    ),
    ChaosFault(
        name="packets",
        description="{host} loses one packet in fifty",
        durations_s=(30,),
        max_pause_s=30,
        end=_accept_packets,
        expected="steps are slower; at worst the same as a pulled cable",
        begin=_drop_packets("iifname != lo numgen random mod 50 == 0 drop"),
    ),
    ChaosFault(
        name="rate",
        description="the link of {host} has a tenth of its rate",
        durations_s=(30,),
        max_pause_s=0,
        requires="rate",
        begin=_slow_link,
        end=_restore_link,
        expected="steps are slower, nothing else",
    ),
    ChaosFault(
        name="half-speed",
        description="{host} runs at half speed",
        durations_s=(60,),
        max_pause_s=0,
        requires="cpus",
        begin=_limit_cpus(0.5),
        end=_limit_cpus(1),
        expected="its share becomes smaller within 10 steps",
    ),
    ChaosFault(
        name="disk-full",
        description="the disk of {host} is full",
        durations_s=(30,),
        max_pause_s=6,
        requires="disk",
        expected="no checkpoint is lost; the others continue, and it rejoins when there is space",
        begin=lambda lab, host: host.fill_disk(True),
        end=lambda lab, host: host.fill_disk(False),
    ),
)
FAULTS_BY_NAME: Mapping[str, ChaosFault] = {row.name: row for row in FAULT_TABLE}
# Faults that a lab cannot inject into one host, and why, or where they are tested instead.
UNSUPPORTED_FAULTS = {
    "a clock that jumps": "all hosts of a lab have this machine's clock; nothing in a run compares two hosts' clocks",
    "a disk that becomes read-only": "the kernel does not remount it while a run has files open there; to a run "
    "it is the same as a full disk",
    "a bit that flips in a weight, NaN in a gradient": "another process cannot find them in memory: unit tests inject "
    "them in ranks",
}


def schedule_faults(seed: int, minutes: float, hosts: Sequence[str], faults: Sequence[ChaosFault],
             recovery_s: tuple[float, float] = RECOVERY_S) -> list[ScheduledFault]:  # fmt: skip
    """Return faults one after the other, with a random kind, host and duration; the last ends within `minutes`.

    >>> [str(event) for event in schedule_faults(1, 2, ["a", "b"], [FAULTS_BY_NAME["power"]])]
    ['b loses its power, for 5 s']
    """
    rng, now, events = random.Random(seed), 0.0, list[ScheduledFault]()
    while True:
        now += rng.uniform(*recovery_s)
        fault = rng.choice(faults)
        host, lasts_s = rng.choice(hosts), rng.choice(fault.durations_s or (0.0,))
        if now + lasts_s + recovery_s[0] > 60 * minutes:
            return events
        events.append(ScheduledFault(at_s=now, fault=fault, host=host, duration_s=lasts_s))
        now += lasts_s


def find_faults(names: Sequence[str]) -> list[ChaosFault]:
    """Return the faults with these names; raise UsageError for an unknown one."""
    for name in names:
        if name not in FAULTS_BY_NAME:
            raise UsageError(f"no fault is called {name}: {', '.join(FAULTS_BY_NAME)}", hint="evener lab chaos --list")
    return [FAULTS_BY_NAME[name] for name in names]


def split_supported(faults: Sequence[ChaosFault], lab: EmulatedLab) -> tuple[list[ChaosFault], list[ChaosFault]]:
    """Return (the faults that every host of the lab supports, the others)."""
    supported = [
        row for row in faults if row.requires is None or all(getattr(host.spec, row.requires) for host in lab.hosts)
    ]
    return supported, [row for row in faults if row not in supported]


def inject_faults(lab: EmulatedLab, events: Sequence[ScheduledFault]) -> Iterator[tuple[ScheduledFault, bool]]:
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
            time.sleep(event.duration_s)
        finally:
            event.fault.end(lab, host)
        yield event, False
