"""What is wrong with these machines, and which command mends it? Pure: facts in, findings out.

error: a run by evener would fail. warning: it would be slow or brittle, or whoever starts torchrun by hand would be hit
by what evener itself avoids. A healthy fleet has neither. What hosts have in common is told once.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from evener.core.errors import HostError
from evener.core.finding import Finding, Severity
from evener.core.fleet import Fleet, Host
from evener.core.units import seconds, size
from evener.hosts.facts import Facts, Process
from evener.hosts.pairs import Network
from evener.hosts.ways import Way

GIB = 2**30
PYTHON_NEEDED = (3, 11)
MEMORY_LOW_BYTES, MEMORY_NEEDED_BYTES = GIB, 400e6  # a worker that has only imported torch takes 300 MB
DISK_LOW_BYTES, DISK_NEEDED_BYTES = 3e9, 300e6
SHM_LOW_BYTES = 256e6  # Docker gives 64 MB
SWAP_BUSY_BPS = 1e6
SKEW_S = 1.0
THROTTLED = 0.5  # of the processor's maximum, while a core is busy
FILES_OF_A_RANK, FILES_A_PEER = 128, 8
MEMLOCK_BYTES = GIB
READ_BY_GLOO = {
    "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT", "GLOO_LOG_LEVEL", "GLOO_DISABLE_CONNECTION_RETRIES",
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "GLOO_ENABLE_STORE_V2_API", "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT", "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_PATH",
}  # fmt: skip   # the names in libtorch_cpu.so of torch 2.13


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known when the findings are made."""

    fleet: Fleet
    facts: Mapping[str, Facts]  # of the hosts that answered
    candidates: Mapping[str, Sequence[Way]]
    network: Network
    errors: Mapping[str, HostError]  # of those that did not
    port: int
    own_hash: str  # of the evener that asks

    @property
    def head(self) -> str | None:
        """The host of the rendezvous: the fleet's first."""
        first = next(iter(self.fleet.hosts))
        return first if first in self.facts else None

    @property
    def is_one_host(self) -> bool:
        """Nothing leaves it."""
        return len(self.fleet.hosts) == 1

    def uses_gpu(self, name: str) -> bool:
        """Will its ranks have a GPU each?"""
        return self.fleet.hosts[name].devices != "cpu" and bool(self.facts[name].gpus)

    def num_ranks(self, name: str) -> int:
        """Processes that a run starts there."""
        return self.fleet.hosts[name].ranks or (len(self.facts[name].gpus) if self.uses_gpu(name) else 1)


def check(seen: Seen) -> list[Finding]:
    """Every finding, in the order in which a person would mend them."""
    from evener.hosts.linkchecks import check_links
    from evener.hosts.netchecks import check_network

    found = [*_reachable(seen), *_same_machine(seen), *_versions(seen)]
    if not seen.is_one_host:
        found += [*check_network(seen), *check_links(seen)]
    found += _ports_and_processes(seen)
    for name, facts in seen.facts.items():
        host = seen.fleet.hosts[name]
        found += [*_gpu(seen, name, facts), *_room(name, facts), *_limits(seen, name, facts)]
        found += [*_processor(seen, name, facts, host), *_power(name, facts), *_clock(name, facts)]
        found += _environment(name, facts)
    return [*found, *_nccl_on_gloo(seen), *_slow_bf16(seen)]


def names_to_resolve(fleet: Fleet, facts: Mapping[str, Facts]) -> list[str]:
    """Names that somebody may use for a host: its own, the one in the fleet file, MASTER_ADDR."""
    names = [one.hostname for one in facts.values()]
    names += [host.address for host in fleet.hosts.values() if not host.is_local]
    names += [one.environment["MASTER_ADDR"] for one in facts.values() if "MASTER_ADDR" in one.environment]
    return list(dict.fromkeys(name.rpartition("@")[2] for name in names if not is_address(name)))


# --- can it be reached, is it what it seems, does it run the same ------------------------------------------------


def _reachable(seen: Seen) -> Iterator[Finding]:
    for name, error in seen.errors.items():
        yield Finding(check=error.check, severity="error", host=name, evidence=str(error), fix=error.hint)


def _same_machine(seen: Seen) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for name, facts in seen.facts.items():
        if facts.machine_id is None:
            continue
        other = first.setdefault(facts.machine_id, name)
        if other != name:
            yield Finding(
                check="rank.duplicate", severity="error", host=name, peer=other,
                evidence=f"{other} and {name} are one machine: {facts.hostname}, booted once, with one network",
                fix=f"take [hosts.{name}] out of the fleet file; ranks = 2 in [hosts.{other}] starts two there",
            )  # fmt: skip


def _versions(seen: Seen) -> Iterator[Finding]:
    lost = [name for name, facts in seen.facts.items() if facts.python_version is None]
    for name in lost:
        yield Finding(
            check="version.python", severity="error", host=name,
            evidence=f"{seen.facts[name].python} does not start", fix=f'evener setup, or [hosts.{name}] python = "…"',
        )  # fmt: skip
    facts = {name: one for name, one in seen.facts.items() if name not in lost}
    old = [name for name, one in facts.items() if _minor(one.python_version) < PYTHON_NEEDED]
    if old:
        yield _of(old, "version.python", "error",
                  f"{_each(old, lambda name: f'python {facts[name].python_version}')}; evener needs 3.11 or newer",
                  f"install python 3.11 there; then evener setup{_or_python(old)}")  # fmt: skip
    else:
        yield from _differing(
            {name: ".".join(map(str, _minor(one.python_version))) for name, one in facts.items()},
            "version.python", "python", "warning",
        )  # fmt: skip
    bare = [name for name, one in facts.items() if one.torch_version is None and name not in old]
    if bare:
        yield _of(bare, "version.torch", "error",
                  f"{_each(bare, lambda name: f'{facts[name].python} has no torch')}", "evener setup")  # fmt: skip
    yield from _differing(
        {name: one.torch_version.partition("+")[0] for name, one in facts.items() if one.torch_version},
        "version.torch", "torch", "error",
    )  # fmt: skip
    without = [name for name, one in facts.items() if one.evener_hash is None and name not in [*bare, *old]]
    if without:
        yield _of(without, "version.evener", "error",
                  f"{_each(without, lambda name: f'{facts[name].python} has no evener')}", "evener setup")  # fmt: skip
    other = [name for name, one in facts.items() if one.evener_hash not in (None, seen.own_hash)]
    if other:
        yield _of(other, "version.evener", "error",
                  _each(other, lambda name: f"its evener {facts[name].evener_version} is another than this machine's"),
                  "evener setup")  # fmt: skip


def _differing(versions: Mapping[str, str], check: str, what: str, severity: Severity) -> Iterator[Finding]:
    if len(set(versions.values())) < 2:
        return
    usual = Counter(versions.values()).most_common(1)[0][0]  # of equally many, the first host's
    usual_hosts = [name for name, version in versions.items() if version == usual]
    other = [name for name, version in versions.items() if version != usual]
    yield _of(other, check, severity,
              f"{_each(other, lambda name: f'{what} {versions[name]}')}; {listed(usual_hosts)}: {usual}",
              "evener setup")  # fmt: skip


# --- what else runs there ----------------------------------------------------------------------------------------


def _ports_and_processes(seen: Seen) -> Iterator[Finding]:
    for name, facts in seen.facts.items():
        left = {process.pid for process in facts.stale}
        if facts.port_holder is not None:
            holder = facts.port_holder
            look = f"on {name}: sudo ss -tlnp 'sport = :{facts.port}'"
            yield Finding(
                check="port.in-use", severity="warning", host=name,
                evidence=f"port {facts.port} is held by {_process(holder)}; evener will take another port",
                fix=look if holder.pid is None else _end(name, holder, is_stale=holder.pid in left),
            )  # fmt: skip
        for group in _by_run(facts.stale):
            others = f", and {len(group) - 1} more" if len(group) > 1 else ""
            yield Finding(
                check="proc.stale", severity="warning", host=name,
                evidence=f"left over, and nobody looks after it: {_process(group[0])}{others}",
                fix="evener stop --stale"
                if group[0].run
                else f"on {name}: kill {' '.join(str(one.pid) for one in group)}",
            )  # fmt: skip
        for process in facts.attached:
            yield Finding(
                check="tty.attached", severity="warning", host=name,
                evidence=f"ends when its terminal or ssh session does: {_process(process)}",
                fix="start it by evener launch, which detaches it; or inside tmux",
            )  # fmt: skip


def _end(name: str, process: Process, *, is_stale: bool) -> str:
    if process.run is not None:
        return "evener stop --stale" if is_stale else f"evener stop {process.run}"
    return f"on {name}: kill {process.pid}"


def _by_run(processes: Iterable[Process]) -> list[list[Process]]:
    groups: dict[str | None, list[Process]] = {}
    for process in processes:
        groups.setdefault(process.run, []).append(process)
    return list(groups.values())


def _process(process: Process) -> str:
    if process.pid is None:
        return "a process of another user, which only root may see"
    words = [f"pid {process.pid}"]
    words += [f"of {process.owner}"] if process.owner else []
    words += [f"for {seconds(process.age_s)}"] if process.age_s is not None else []
    words += [f"run {process.run}"] if process.run else []
    return f"{', '.join(words)}: {_short(process.command or 'its command is not known')}"


# --- graphics cards ----------------------------------------------------------------------------------------------


def _gpu(seen: Seen, name: str, facts: Facts) -> Iterator[Finding]:
    wanted = seen.fleet.hosts[name].devices
    if wanted == "cpu":
        return
    if facts.gpu_error is not None and not facts.gpus and (facts.gpu_cards or wanted == "cuda"):
        cards = f"{facts.gpu_cards or 'no'} NVIDIA card{'s' * (facts.gpu_cards != 1)}"
        yield Finding(
            check="gpu.driver", severity="error" if wanted == "cuda" else "warning", host=name,
            evidence=f"{cards} on the bus; {facts.gpu_error}",
            fix=f'on {name}: install the driver (Ubuntu: sudo ubuntu-drivers install) and reboot; or devices = "cpu"',
        )  # fmt: skip
    elif wanted == "cuda" and not facts.gpus:
        yield Finding(
            check="gpu.missing", severity="error", host=name, evidence="devices is cuda, and there is no NVIDIA GPU",
            fix=f'[hosts.{name}] devices = "cpu"' + ("; or docker run --gpus all" if facts.in_container else ""),
        )  # fmt: skip
    if facts.gpus and facts.torch_version is not None and facts.torch_version.endswith("+cpu"):
        release = facts.torch_version.partition("+")[0]
        yield Finding(
            check="gpu.missing", severity="error", host=name,
            evidence=f"{len(facts.gpus)} × {facts.gpus[0]}, but torch {facts.torch_version} is built without CUDA",
            fix=f"on {name}: {facts.python} -m pip install --force-reinstall torch=={release}; "
            f'or [hosts.{name}] devices = "cpu"',
        )  # fmt: skip
    if facts.gpu_iommu and len(facts.gpus) > 1:
        yield Finding(
            check="gpu.p2p", severity="info", host=name,
            evidence=f"an IOMMU translates between its {len(facts.gpus)} GPUs: on some boards direct copies freeze",
            fix="should a run stand still at 100 % GPU: NCCL_P2P_DISABLE=1, or iommu=pt on the kernel's command line",
        )  # fmt: skip


# --- room and limits ---------------------------------------------------------------------------------------------


def _room(name: str, facts: Facts) -> Iterator[Finding]:
    free = facts.memory_free_bytes
    if free is not None and free < MEMORY_LOW_BYTES:
        yield Finding(
            check="mem.space", severity="error" if free < MEMORY_NEEDED_BYTES else "warning", host=name,
            evidence=f"{size(free)} of {size(facts.memory_bytes or 0)} are free; a rank takes 300 MB beside its model",
            fix=f"on {name}: ps aux --sort=-rss | head shows what could be ended",
        )  # fmt: skip
    if facts.swap_Bps is not None and facts.swap_Bps > SWAP_BUSY_BPS:
        yield Finding(
            check="mem.swap", severity="warning", host=name,
            evidence=f"it is swapping, {size(facts.swap_Bps)} a second; {size(free or 0)} of memory are free",
            fix=f"on {name}: ps aux --sort=-rss | head shows what could be ended",
        )  # fmt: skip
    if facts.disk_writable is False:
        yield Finding(
            check="disk.space", severity="error", host=name,
            evidence=f"{facts.user or 'the user'} may not write to {facts.workdir}",
            fix=f'[hosts.{name}] workdir = "…" names a folder that may be written',
        )  # fmt: skip
    elif facts.disk_free_bytes is not None and facts.disk_free_bytes < DISK_LOW_BYTES:
        yield Finding(
            check="disk.space", severity="error" if facts.disk_free_bytes < DISK_NEEDED_BYTES else "warning", host=name,
            evidence=f"{size(facts.disk_free_bytes)} are free where {facts.workdir} is",
            fix=f'on {name}: du -xh {facts.workdir} | sort -h | tail; or workdir = "…" on a larger disk',
        )  # fmt: skip
    if facts.shm_bytes is not None and facts.shm_bytes < SHM_LOW_BYTES:
        yield Finding(
            check="shm.size", severity="warning", host=name,
            evidence=f"shared memory, /dev/shm, has {size(facts.shm_bytes)}: NCCL and DataLoader workers need more",
            fix="docker run --shm-size=1g …, or --ipc=host"
            if facts.in_container
            else f"on {name}: sudo mount -o remount,size=1G /dev/shm",
        )  # fmt: skip


def _limits(seen: Seen, name: str, facts: Facts) -> Iterator[Finding]:
    world = sum(seen.num_ranks(one) for one in seen.facts)
    limits = "sudo tee /etc/security/limits.d/evener.conf"
    files = facts.limits.get("nofile")
    need = FILES_OF_A_RANK + FILES_A_PEER * world
    if files is not None and files.soft is not None and files.soft < need:
        yield Finding(
            check="limit.nofile", severity="warning", host=name,
            evidence=f"{files.soft} open files are allowed, and {world} ranks may need {need}",
            fix=f"on {name}: echo '{facts.user or '*'} - nofile 65536' | {limits}",
        )  # fmt: skip
    locked = facts.limits.get("memlock")
    if facts.has_infiniband and locked is not None and locked.soft is not None and locked.soft < MEMLOCK_BYTES:
        yield Finding(
            check="limit.memlock", severity="warning", host=name,
            evidence=f"{size(locked.soft)} of memory may be locked: InfiniBand needs more",
            fix=f"on {name}: echo '{facts.user or '*'} - memlock unlimited' | {limits}",
        )  # fmt: skip


# --- processor, power, clock -------------------------------------------------------------------------------------


def _processor(seen: Seen, name: str, facts: Facts, host: Host) -> Iterator[Finding]:
    ranks = seen.num_ranks(name)
    threads = host.threads or max(1, facts.cores // ranks)
    if ranks * threads > facts.cores:
        fits = max(1, facts.cores // ranks)
        yield Finding(
            check="cpu.oversubscribed", severity="warning", host=name,
            evidence=f"{ranks} rank{'s' * (ranks > 1)} × {threads} thread{'s' * (threads > 1)} on {facts.cores} "
            f"core{'s' * (facts.cores > 1)}",
            fix=f"[hosts.{name}] " + (f"threads = {fits}" if fits * ranks <= facts.cores else f"ranks = {facts.cores}"),
        )  # fmt: skip
    if facts.cpu_throttle_events:
        times = f"{facts.cpu_throttle_events} times while we looked"
        yield _throttled(
            name, f"its processor is too hot: throttled {times}", f"on {name}: free its vents; see sensors"
        )
    elif facts.cpu_max_MHz and facts.cpu_limit_MHz and facts.cpu_limit_MHz < THROTTLED * facts.cpu_max_MHz:
        yield _throttled(name, f"it is held to {facts.cpu_limit_MHz:.0f} of {facts.cpu_max_MHz:.0f} MHz",
                         f"on {name}: sudo cpupower frequency-set -u {facts.cpu_max_MHz:.0f}MHz")  # fmt: skip
    elif facts.cpu_max_MHz and facts.cpu_busy_MHz and facts.cpu_busy_MHz < THROTTLED * facts.cpu_max_MHz:
        yield _throttled(name, f"a busy core runs at {facts.cpu_busy_MHz:.0f} of {facts.cpu_max_MHz:.0f} MHz",
                         f"on {name}: plug it in; sudo cpupower frequency-set -g performance")  # fmt: skip


def _throttled(name: str, evidence: str, fix: str) -> Finding:
    return Finding(check="cpu.throttled", severity="warning", host=name, evidence=evidence, fix=fix)


def _power(name: str, facts: Facts) -> Iterator[Finding]:
    reasons = []
    if facts.on_battery:
        reasons.append("it runs on its battery")
    if facts.lid_suspends:
        reasons.append("it sleeps when its lid is closed")
    if facts.idle_sleeps:
        reasons.append("it sleeps when nobody uses it")
    if reasons:
        awake = "sudo systemctl mask sleep.target suspend.target hibernate.target hybrid-sleep.target"
        awake = "sudo pmset -a sleep 0 disablesleep 1" if facts.system.startswith("Darwin") else awake
        fixes = ["plug it in"] if facts.on_battery else []
        fixes += [awake] if facts.lid_suspends or facts.idle_sleeps else []
        yield Finding(
            check="power.sleep", severity="warning", host=name, evidence=f"a run would stop: {listed(reasons)}",
            fix=f"on {name}: {'; '.join(fixes)}",
        )  # fmt: skip


def _clock(name: str, facts: Facts) -> Iterator[Finding]:
    offset, error = facts.clock_offset_s, facts.clock_error_s or 0.0
    if offset is not None and abs(offset) - error > SKEW_S:
        yield Finding(
            check="clock.skew", severity="warning", host=name,
            evidence=f"its clock is {seconds(abs(offset))} {'ahead' if offset > 0 else 'behind'}, give or take "
            f"{seconds(error)}",
            fix=f"on {name}: sudo sntp -sS time.apple.com"
            if facts.system.startswith("Darwin")
            else f"on {name}: sudo timedatectl set-ntp true",
        )  # fmt: skip


def _slow_bf16(seen: Seen) -> Iterator[Finding]:
    slow = [name for name, one in seen.facts.items() if not seen.uses_gpu(name) and one.bf16_units == []]
    if slow:
        mixed = len(slow) < len(seen.facts)
        yield _of(slow, "dtype.slow", "info",
                  f"{_each(slow, lambda name: 'its processor has no units for bf16')}"
                  + (", others have: all ranks compute in one type" if mixed else ""),
                  "leave --dtype at auto, which takes fp32 here")  # fmt: skip


# --- environment -------------------------------------------------------------------------------------------------


def _environment(name: str, facts: Facts) -> Iterator[Finding]:
    unread = sorted(one for one in facts.environment if one.startswith("GLOO_") and one not in READ_BY_GLOO)
    if unread:
        yield Finding(
            check="env.ineffective", severity="warning", host=name,
            evidence=f"{listed(f'{one}={facts.environment[one]}' for one in unread)}: Gloo reads no such variable",
            fix=f"on {name}: unset {' '.join(unread)}"
            + ("; Gloo's ports come from net.ipv4.ip_local_port_range" if "GLOO_PORT_RANGE" in unread else ""),
        )  # fmt: skip
    told = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    names = [one.name for one in facts.interfaces]
    wrong = [one for one in told.split(",") if one not in names]
    if len(told) > 1 and wrong:  # torch ignores a value of one letter
        yield Finding(
            check="env.interface-syntax", severity="warning", host=name,
            evidence=f"GLOO_SOCKET_IFNAME={told}: Gloo takes exact names, and there is no interface {wrong[0]}",
            fix=f"on {name}: unset GLOO_SOCKET_IFNAME; evener sets it for its runs",
        )  # fmt: skip
    nccl = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    if nccl and facts.gpus and not _nccl_matches(nccl, names):
        yield Finding(
            check="env.interface-syntax", severity="warning", host=name,
            evidence=f"NCCL_SOCKET_IFNAME={nccl} matches none of {listed(names)}",
            fix=f"on {name}: unset NCCL_SOCKET_IFNAME; evener sets it for its runs",
        )  # fmt: skip


def _nccl_matches(value: str, names: Sequence[str]) -> bool:
    """NCCL's syntax: prefixes, = before exact names, ^ before what is left out.

    >>> [_nccl_matches(value, ["lo", "eth0"]) for value in ("eth", "=eth", "^lo")]
    [True, False, True]
    """
    leaves_out = value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    words = value.lstrip("^=").split(",")
    hits = [any(name == word if exact else name.startswith(word) for word in words) for name in names]
    return not all(hits) if leaves_out else any(hits)


def _nccl_on_gloo(seen: Seen) -> Iterator[Finding]:
    if all(seen.uses_gpu(name) for name in seen.facts):
        return
    usual = {"NCCL_VERSION"}  # which every image of NVIDIA's sets
    found = {name: sorted(one for one in facts.environment if one.startswith("NCCL_") and one not in usual)
             for name, facts in seen.facts.items()}  # fmt: skip
    hosts = [name for name, variables in found.items() if variables]
    if hosts:
        yield _of(hosts, "env.ineffective", "info",
                  f"{_each(hosts, lambda name: listed(found[name]))}: this fleet runs on Gloo, which reads none of it",
                  "of Gloo's own: GLOO_SOCKET_IFNAME; evener sets it for its runs")  # fmt: skip


# --- words -------------------------------------------------------------------------------------------------------


def sudo(seen: Seen, name: str) -> str:
    """What a command needs in front of it there."""
    return "" if name in seen.facts and seen.facts[name].is_root else "sudo "


def is_address(text: str) -> bool:
    """A number, not a name?"""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _of(hosts: Sequence[str], check: str, severity: Severity, evidence: str, fix: str) -> Finding:
    """One finding for whatever number of hosts."""
    host = hosts[0] if len(hosts) == 1 else None
    return Finding(check=check, severity=severity, host=host, evidence=evidence, fix=fix)


def _each(hosts: Sequence[str], say: Callable[[str], str]) -> str:
    """'a: torch 2.12; b, c: torch 2.11': hosts with the same to be said stand together; one alone is not named."""
    groups: dict[str, list[str]] = {}
    for name in hosts:
        groups.setdefault(say(name), []).append(name)
    if len(hosts) == 1:
        return next(iter(groups))
    return "; ".join(f"{listed(names)}: {what}" for what, names in groups.items())


def _or_python(hosts: Sequence[str]) -> str:
    return f'; or [hosts.{hosts[0]}] python = "…"' if len(hosts) == 1 else ""


def listed(words: Iterable[str]) -> str:
    """All of a few, the first of many.

    >>> listed(["a", "b", "c"]), listed("abcdefgh")
    ('a, b, c', 'a, b, c, d and 4 more')
    """
    known = list(words)
    return ", ".join(known) if len(known) <= 5 else f"{', '.join(known[:4])} and {len(known) - 4} more"


def _short(command: str) -> str:
    command = " ".join(command.split())
    return command if len(command) <= 90 else command[:87] + "…"


def _minor(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (version or "0.0").split(".")[:2])
