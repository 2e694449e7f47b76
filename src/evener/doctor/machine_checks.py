"""Check each machine: GPUs, memory, disk, resource limits, processor, power, clock, environment.

Pure: facts in, findings out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from evener.core.base.shell import quote_word
from evener.core.base.units import format_bytes, format_seconds, pluralize
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.roster import rank_without_gpu
from evener.doctor.context import CheckContext, describe_by_host, finding_for_hosts, join_names
from evener.doctor.facts import HostFacts, StartupLine

GIB = 2**30
MEMORY_LOW_BYTES, MEMORY_NEEDED_BYTES = GIB, 400e6  # a worker that has only imported torch takes 300 MB
DISK_LOW_BYTES, DISK_NEEDED_BYTES = 3e9, 300e6
STORED_LIMIT_BYTES = 50e9  # assumption: more than this of earlier runs deserves a look
SHM_LOW_BYTES = 256e6  # Docker gives 64 MB
SWAP_BUSY_BPS = 1e6
MAX_CLOCK_SKEW_S = 1.0
THROTTLED_FREQUENCY_SHARE = 0.5  # of the processor's maximum, while a core is busy
BASE_FILES_PER_RANK, FILES_PER_PEER = 128, 8
MIN_MEMLOCK_BYTES = GIB
GLOO_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT", "GLOO_LOG_LEVEL", "GLOO_DISABLE_CONNECTION_RETRIES",
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "GLOO_ENABLE_STORE_V2_API", "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT", "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_PATH",
}  # fmt: skip   # the names in libtorch_cpu.so of torch 2.13


def check_machines(context: CheckContext) -> list[Finding]:
    """Return findings about each host, and about the processors and variables of all together."""
    findings: list[Finding] = []
    for name, facts in context.facts.items():
        host = context.fleet.hosts[name]
        findings += [
            *_check_gpus(context, name, facts),
            *_check_memory_and_disk(context, name, facts),
            *_check_resource_limits(context, name, facts),
        ]
        findings += [*_check_cpu(context, name, facts, host), *_check_power(name, facts), *_check_clock(name, facts)]
        findings += _check_environment(context, name, facts)
    findings += _check_shared_cores(context.facts)
    return [*findings, *_check_unused_nccl_variables(context), *_check_slow_bf16(context)]


# --- GPUs --------------------------------------------------------------------------------------------------------


def _check_gpus(context: CheckContext, name: str, facts: HostFacts) -> Iterator[Finding]:
    requested = context.requested_device(name)
    if requested == "cpu":
        return
    alternative = "--device cpu" if context.machine.device == "cuda" else f'[hosts.{name}] devices = "cpu"'
    if facts.gpu_error is not None and not facts.gpus and (facts.gpu_cards or requested == "cuda"):
        cards = f"{facts.gpu_cards or 'no'} NVIDIA card{'s' * (facts.gpu_cards != 1)}"
        yield Finding(
            check="gpu.driver", severity="error" if requested == "cuda" else "warning", host=name,
            evidence=f"{cards} on the bus; {facts.gpu_error}",
            fix=f'on {name}: install the driver (Ubuntu: sudo ubuntu-drivers install) and reboot; or {alternative}',
        )  # fmt: skip
    elif requested == "cuda" and not facts.gpus:
        yield Finding(
            check="gpu.missing", severity="error", host=name,
            evidence="its ranks were asked to compute on GPUs, and there is no NVIDIA GPU",
            fix=alternative + ("; or docker run --gpus all" if facts.in_container else ""),
        )  # fmt: skip
    if facts.gpus and facts.torch_version is not None and facts.torch_version.endswith("+cpu"):
        release = facts.torch_version.partition("+")[0]
        yield Finding(
            check="gpu.missing", severity="error", host=name,
            evidence=f"{len(facts.gpus)} × {facts.gpus[0]}, but torch {facts.torch_version} is built without CUDA",
            fix=f"on {name}: {quote_word(facts.python)} -m pip install --force-reinstall torch=={quote_word(release)}; "
            f"or {alternative}",
        )  # fmt: skip
    if facts.gpu_iommu and len(facts.gpus) > 1:
        yield Finding(
            check="gpu.p2p", severity="info", host=name,
            evidence=f"an IOMMU translates between its {len(facts.gpus)} GPUs: on some boards direct copies freeze",
            fix="if a run hangs at 100 % GPU: NCCL_P2P_DISABLE=1, or iommu=pt on the kernel's command line",
        )  # fmt: skip


# --- memory, disk, limits ----------------------------------------------------------------------------------------


def _check_memory_and_disk(context: CheckContext, name: str, facts: HostFacts) -> Iterator[Finding]:
    free = facts.memory_free_bytes
    if free is not None and free < MEMORY_LOW_BYTES:
        yield Finding(
            check="mem.space",
            severity="error" if free < MEMORY_NEEDED_BYTES else "warning",
            host=name,
            evidence=f"{format_bytes(free)} of {format_bytes(facts.memory_bytes or 0)} are free; a rank needs "
            f"300 MB besides its model",
            fix=f"on {name}: ps aux --sort=-rss | head shows what could be ended",
        )
    if facts.swap_Bps is not None and facts.swap_Bps > SWAP_BUSY_BPS:
        yield Finding(
            check="mem.swap",
            severity="warning",
            host=name,
            evidence=f"it is swapping, {format_bytes(facts.swap_Bps)} a second; {format_bytes(free or 0)} of "
            f"memory are free",
            fix=f"on {name}: ps aux --sort=-rss | head shows what could be ended",
        )
    if facts.disk_writable is False:
        yield Finding(
            check="disk.space", severity="error", host=name,
            evidence=f"{facts.user or 'the user'} may not write to {facts.workdir}",
            fix=f'[hosts.{name}] workdir = "…" names a folder that may be written',
        )  # fmt: skip
    elif facts.disk_free_bytes is not None and facts.disk_free_bytes < DISK_LOW_BYTES:
        yield Finding(
            check="disk.space", severity="error" if facts.disk_free_bytes < DISK_NEEDED_BYTES else "warning", host=name,
            evidence=f"{format_bytes(facts.disk_free_bytes)} are free where {facts.workdir} is",
            fix=f'on {name}: du -xh {quote_word(facts.disk_folder or "/")} | sort -h | tail shows what takes it; or '
            f'[hosts.{name}] workdir = "…" on a larger disk',
        )  # fmt: skip
    if facts.stored_bytes is not None and facts.stored_bytes > STORED_LIMIT_BYTES:
        yield Finding(
            check="disk.stored", severity="info", host=name,
            evidence=f"{format_bytes(facts.stored_bytes)} of runs, code and data are in {facts.workdir}, more than "
            f"{format_bytes(STORED_LIMIT_BYTES)}",
            fix=f"{context.prune_command(name)} lists what is old and fetched; with --yes it removes that",
        )  # fmt: skip
    if facts.partial_checkpoints:
        yield Finding(
            check="disk.stored", severity="info", host=name,
            evidence=f"killed runs left {pluralize(facts.partial_checkpoints, 'half-written checkpoint')}, "
            f"{format_bytes(facts.partial_checkpoint_bytes)}",
            fix="a run removes its own at its next start (evener train --resume RUN)",
        )  # fmt: skip
    if facts.shm_bytes is not None and facts.shm_bytes < SHM_LOW_BYTES:
        yield Finding(
            check="shm.size",
            severity="warning",
            host=name,
            evidence=f"shared memory, /dev/shm, has {format_bytes(facts.shm_bytes)}: NCCL and DataLoader "
            f"workers need more",
            fix="docker run --shm-size=1g …, or --ipc=host"
            if facts.in_container
            else f"on {name}: sudo mount -o remount,size=1G /dev/shm",
        )


def _check_resource_limits(context: CheckContext, name: str, facts: HostFacts) -> Iterator[Finding]:
    world_size = sum(context.num_ranks(host) for host in context.facts)
    limits, user = "sudo tee /etc/security/limits.d/evener.conf", facts.user or "*"
    files = facts.limits.get("nofile")
    needed = BASE_FILES_PER_RANK + FILES_PER_PEER * world_size
    if files is not None and files.soft is not None and files.soft < needed:
        yield Finding(
            check="limit.nofile", severity="warning", host=name,
            evidence=f"{files.soft} open files are allowed, and {world_size} ranks may need {needed}",
            fix=_remove_ulimit_command(context, name, facts.limits_set_in.get("nofile"))
            or f"on {name}: echo {quote_word(f'{user} - nofile 65536')} | {limits}",
        )  # fmt: skip
    locked = facts.limits.get("memlock")
    if facts.has_infiniband and locked is not None and locked.soft is not None and locked.soft < MIN_MEMLOCK_BYTES:
        yield Finding(
            check="limit.memlock", severity="warning", host=name,
            evidence=f"{format_bytes(locked.soft)} of memory may be locked: InfiniBand needs more",
            fix=_remove_ulimit_command(context, name, facts.limits_set_in.get("memlock"))
            or f"on {name}: echo {quote_word(f'{user} - memlock unlimited')} | {limits}",
        )  # fmt: skip


def _remove_ulimit_command(context: CheckContext, name: str, line: StartupLine | None) -> str | None:
    """Return the command that replaces a line's ulimit by a command without effect, as the line may be all of a block.

    limits.d would have no effect: the shell reads its files later. None if no line is known.
    """
    if line is None:
        return None
    home, path = ("~/", line.file[2:]) if line.file.startswith("~/") else ("", line.file)
    sudo = "" if home else context.sudo_prefix(name)
    return f"on {name}: {sudo}sed -i.old '{line.line}s/ulimit [^;&|#]*/: /' {home}{quote_word(path)}"


# --- processor, power, clock -------------------------------------------------------------------------------------


def _check_cpu(context: CheckContext, name: str, facts: HostFacts, host: HostConfig) -> Iterator[Finding]:
    ranks = context.num_ranks(name)
    threads = host.threads or context.machine.threads or max(1, facts.cores // ranks)
    if ranks * threads > facts.cores:
        fits = max(1, facts.cores // ranks)
        fix = f"[hosts.{name}] " + (f"threads = {fits}" if fits * ranks <= facts.cores else f"ranks = {facts.cores}")
        if fits * ranks > facts.cores and threads > 1:
            fix += f"; [hosts.{name}] threads = 1"
        yield Finding(
            check="cpu.oversubscribed", severity="warning", host=name,
            evidence=f"{ranks} rank{'s' * (ranks > 1)} × {threads} thread{'s' * (threads > 1)} on {facts.cores} "
            f"core{'s' * (facts.cores > 1)}",
            fix=fix,
        )  # fmt: skip
    if facts.cpu_throttle_events:
        times = f"{facts.cpu_throttle_events} times during the check"
        yield _throttling_finding(
            name, f"its processor is too hot: throttled {times}", f"on {name}: free its vents; see sensors"
        )
    elif (
        facts.cpu_max_MHz
        and facts.cpu_limit_MHz
        and facts.cpu_limit_MHz < THROTTLED_FREQUENCY_SHARE * facts.cpu_max_MHz
    ):
        yield _throttling_finding(name, f"it is held to {facts.cpu_limit_MHz:.0f} of {facts.cpu_max_MHz:.0f} MHz",
                         f"on {name}: sudo cpupower frequency-set -u {facts.cpu_max_MHz:.0f}MHz")  # fmt: skip
    elif (
        facts.cpu_max_MHz and facts.cpu_busy_MHz and facts.cpu_busy_MHz < THROTTLED_FREQUENCY_SHARE * facts.cpu_max_MHz
    ):
        yield _throttling_finding(name, f"a busy core runs at {facts.cpu_busy_MHz:.0f} of {facts.cpu_max_MHz:.0f} MHz",
                         f"on {name}: plug it in; sudo cpupower frequency-set -g performance")  # fmt: skip


def _check_shared_cores(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Check that no hosts are containers, or hosts of a lab, that compute on the same cores of one machine."""
    for names in _groups_on_same_cores(facts):
        yield finding_for_hosts(
            names, "cpu.oversubscribed", "warning",
            f"{join_names(names)} share the cores of one machine: together they are slower than the rates that each "
            "reaches alone",
            "give each its own cores: docker run --cpuset-cpus=…; a lab does so, unless it has more hosts than cores, "
            "or names cores",
        )  # fmt: skip


def hosts_on_same_cores(facts: Mapping[str, HostFacts]) -> dict[str, list[str]]:
    """Return, for each host, the other hosts that are on the same machine and compute on the same cores."""
    groups = _groups_on_same_cores(facts)
    return {name: [other for group in groups if name in group for other in group if other != name] for name in facts}


def _groups_on_same_cores(facts: Mapping[str, HostFacts]) -> list[list[str]]:
    """Return the groups of hosts whose cores overlap, where they may use more CPU time than these cores have."""
    groups: list[tuple[list[str], set[int]]] = []
    for name, host in facts.items():
        names, cores = [name], {*(host.allowed_cpus or ())}
        apart = []
        for others, their_cores in groups:
            if facts[others[0]].boot_id == host.boot_id is not None and cores & their_cores:
                names, cores = [*others, *names], cores | their_cores
            else:
                apart.append((others, their_cores))
        groups = [*apart, (names, cores)]
    return [names for names, cores in groups
            if len({facts[name].machine_id for name in names}) > 1  # of one machine_id: two names of one host
            and sum(facts[name].cpu_quota or facts[name].cores for name in names) > len(cores)]  # fmt: skip


def _throttling_finding(name: str, evidence: str, fix: str) -> Finding:
    return Finding(check="cpu.throttled", severity="warning", host=name, evidence=evidence, fix=fix)


def _check_power(name: str, facts: HostFacts) -> Iterator[Finding]:
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
            check="power.sleep", severity="warning", host=name, evidence=f"a run would stop: {join_names(reasons)}",
            fix=f"on {name}: {'; '.join(fixes)}",
        )  # fmt: skip


def _check_clock(name: str, facts: HostFacts) -> Iterator[Finding]:
    offset, error = facts.clock_offset_s, facts.clock_error_s or 0.0
    if offset is not None and abs(offset) - error > MAX_CLOCK_SKEW_S:
        yield Finding(
            check="clock.skew", severity="warning", host=name,
            evidence=f"its clock is {format_seconds(abs(offset))} {'ahead' if offset > 0 else 'behind'}, give or take "
            f"{format_seconds(error)}",
            fix=f"on {name}: sudo sntp -sS time.apple.com"
            if facts.system.startswith("Darwin")
            else f"on {name}: sudo timedatectl set-ntp true",
        )  # fmt: skip


def _check_slow_bf16(context: CheckContext) -> Iterator[Finding]:
    slow = [name for name, facts in context.facts.items() if not context.uses_gpu(name) and facts.bf16_units == []]
    if slow:
        mixed = len(slow) < len(context.facts)
        yield finding_for_hosts(slow, "dtype.slow", "info",
                  f"{describe_by_host(slow, lambda name: 'its processor has no units for bf16')}"
                  + (", others have: each rank computes in its own type" if mixed else ""),
                  "leave --dtype at auto, which takes fp32 there")  # fmt: skip


# --- environment -------------------------------------------------------------------------------------------------


def check_left_out_variables(
    name: str, launcher: Sequence[str], debug: Sequence[str], unset_command: Callable[..., str]
) -> Iterator[Finding]:
    """Check for variables of a login environment that are left out of the ranks' environment.

    MASTER_ADDR and MASTER_PORT alone are set by hand, for torchrun, and judged with the rendezvous.
    """
    if {*launcher} - {"MASTER_ADDR", "MASTER_PORT"}:
        yield Finding(
            check="env.launcher-variables", severity="warning", host=name,
            evidence=f"its environment has {join_names(launcher)}, which another launcher sets. evener removes "
            "them from the ranks' environment, but torchrun started by hand would read them",
            fix=unset_command(*launcher),
        )  # fmt: skip
    if debug:
        yield Finding(
            check="env.debug", severity="warning", host=name,
            evidence=f"its environment has {join_names(debug)} with a value with which ranks crash or hang. evener "
            "removes it from the ranks' environment",
            fix=f"{unset_command(*debug)}  # {debug[0]}=INFO can be used",
        )  # fmt: skip


def _check_environment(context: CheckContext, name: str, facts: HostFacts) -> Iterator[Finding]:
    yield from check_left_out_variables(
        name, facts.launcher_variables, facts.debug_variables, partial(context.unset_command, name)
    )
    unread = sorted(
        variable for variable in facts.environment if variable.startswith("GLOO_") and variable not in GLOO_ENVIRONMENT
    )
    if unread:
        yield Finding(
            check="env.ineffective", severity="warning", host=name,
            evidence=f"{join_names(f'{variable}={facts.environment[variable]}' for variable in unread)}: "
            "Gloo reads no such variable",
            fix=context.unset_command(name, *unread)
            + ("  # its ports come from net.ipv4.ip_local_port_range" if "GLOO_PORT_RANGE" in unread else ""),
        )  # fmt: skip
    gloo = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    names = [interface.name for interface in facts.interfaces]
    unknown = [part for part in gloo.split(",") if part not in names]
    if len(gloo) > 1 and unknown:  # torch ignores a value of one letter
        yield Finding(
            check="env.interface-syntax", severity="warning", host=name,
            evidence=f"GLOO_SOCKET_IFNAME={gloo}: Gloo takes exact names, and there is no interface {unknown[0]}",
            fix=f"{context.unset_command(name, 'GLOO_SOCKET_IFNAME')}  # evener sets it for its runs",
        )  # fmt: skip
    nccl = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    if nccl and facts.gpus and not _matches_nccl_interface(nccl, names):
        yield Finding(
            check="env.interface-syntax", severity="warning", host=name,
            evidence=f"NCCL_SOCKET_IFNAME={nccl} matches none of {join_names(names)}",
            fix=f"{context.unset_command(name, 'NCCL_SOCKET_IFNAME')}  # evener sets it for its runs",
        )  # fmt: skip


def _matches_nccl_interface(value: str, names: Sequence[str]) -> bool:
    """Return whether NCCL_SOCKET_IFNAME matches an interface: prefixes, = before exact names, ^ before excluded ones.

    >>> [_matches_nccl_interface(value, ["lo", "eth0"]) for value in ("eth", "=eth", "^lo")]
    [True, False, True]
    """
    excludes = value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    patterns = value.lstrip("^=").split(",")
    matches = [any(name == pattern if exact else name.startswith(pattern) for pattern in patterns) for name in names]
    return not all(matches) if excludes else any(matches)


def _check_unused_nccl_variables(context: CheckContext) -> Iterator[Finding]:
    if context.machine.backend != "gloo" and rank_without_gpu(context.rank_slots()) is None:
        return
    ignored = {"NCCL_VERSION"}  # set by every image of NVIDIA's
    variables_by_host = {
        name: sorted(variable for variable in facts.environment if variable.startswith("NCCL_")
                     and variable not in ignored)
        for name, facts in context.facts.items()
    }  # fmt: skip
    hosts = [name for name, variables in variables_by_host.items() if variables]
    if hosts:
        yield finding_for_hosts(hosts, "env.ineffective", "info",
                  f"{describe_by_host(hosts, lambda name: join_names(variables_by_host[name]))}: its ranks use Gloo, "
                  "which reads none of them",
                  "nothing: evener sets Gloo's own GLOO_SOCKET_IFNAME for its runs")  # fmt: skip
