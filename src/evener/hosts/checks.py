"""Run all preflight checks. Pure: facts in, findings and their fixes out.

error: a run by evener would fail. warning: it would be slow or brittle, or torchrun started by hand would run into what
evener avoids. A healthy fleet has neither. A fault that hosts have in common is one finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from evener.core.finding import Finding, Severity
from evener.core.fleet import Fleet
from evener.core.units import seconds
from evener.hosts.facts import Facts, Process
from evener.hosts.linkchecks import check_links
from evener.hosts.machinechecks import check_machines
from evener.hosts.netchecks import check_network
from evener.hosts.private import check_private
from evener.hosts.seen import Seen, each, finding_of, holder_of, is_address, is_mistaken, listed

PYTHON_NEEDED = (3, 11)


def check(seen: Seen) -> list[Finding]:
    """Return every finding, in the order in which a person would fix them."""
    findings = [*_reachable(seen), *_same_machine(seen), *_shadowed(seen), *_versions(seen)]
    if not seen.is_one_host:
        findings += [*check_network(seen), *check_links(seen)]
    findings += check_private(seen.guards, seen.network.ways, {name: seen.sudo(name) for name in seen.guards})
    return [*findings, *_ports_and_processes(seen), *check_machines(seen)]


def names_to_resolve(fleet: Fleet, facts: Mapping[str, Facts]) -> list[str]:
    """Return the names by which a host may be addressed: its own, the one in the fleet file, MASTER_ADDR."""
    names = [host_facts.hostname for host_facts in facts.values()]
    names += [host.address for host in fleet.hosts.values() if not host.is_local]
    names += [
        host_facts.environment["MASTER_ADDR"]
        for host_facts in facts.values()
        if "MASTER_ADDR" in host_facts.environment
    ]
    return list(dict.fromkeys(name.rpartition("@")[2] for name in names if not is_address(name)))


# --- reachability, identity, versions ----------------------------------------------------------------------------


def _reachable(seen: Seen) -> Iterator[Finding]:
    for name, error in seen.errors.items():
        if is_mistaken(seen, name) and holder_of(seen, name, seen.fleet.hosts[name].address) is not None:
            continue  # another finding reports that another machine has its address
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


def _shadowed(seen: Seen) -> Iterator[Finding]:
    """Check that python starts in its environment, and that no other file shadows its modules or torch."""
    for name, facts in seen.facts.items():
        if facts.shadowed:
            module, path = next(iter(facts.shadowed.items()))
            others = f", and {len(facts.shadowed) - 1} more" if len(facts.shadowed) > 1 else ""
            error = facts.python_error or facts.torch_error
            breaks = error is not None or "torch" in facts.shadowed
            yield Finding(
                check="env.shadowed", severity="error" if breaks else "warning", host=name,
                evidence=f"PYTHONPATH has {path}{others}: python imports it in place of {_own(module)} own"
                + (f", and ends: {_last(error)}" if error else ""),
                fix=seen.unset(name, "PYTHONPATH"),
            )  # fmt: skip
        elif facts.python_error is not None and facts.python_version is not None:
            yield Finding(
                check="env.shadowed", severity="error", host=name,
                evidence=f"{facts.python} starts only with -I; in its environment: {_last(facts.python_error)}",
                fix=f"on {name}: {facts.python} -c pass shows which file that is",
            )  # fmt: skip
        elif facts.torch_error is not None and facts.torch_version is not None:
            yield Finding(
                check="version.torch", severity="error", host=name,
                evidence=f"torch {facts.torch_version} is there, and cannot be imported: {_last(facts.torch_error)}",
                fix=f"on {name}: {facts.python} -m pip uninstall -y torch; {seen.setup()}",
            )  # fmt: skip


def _own(module: str) -> str:
    return "torch's" if module == "torch" else "its"


def _last(said: str) -> str:
    return said.splitlines()[-1]


def _versions(seen: Seen) -> Iterator[Finding]:
    broken = [name for name, facts in seen.facts.items() if facts.python_version is None]
    for name in broken:
        error = seen.facts[name].python_error
        yield Finding(
            check="version.python", severity="error", host=name,
            evidence=f"{seen.facts[name].python} does not start{f': {_last(error)}' if error else ''}",
            fix=f'{seen.setup()}; or [hosts.{name}] python = "…"',
        )  # fmt: skip
    facts = {name: host_facts for name, host_facts in seen.facts.items() if name not in broken}
    outdated = [name for name, host_facts in facts.items() if _minor(host_facts.python_version) < PYTHON_NEEDED]
    if outdated:
        yield finding_of(outdated, "version.python", "error",
                  f"{each(outdated, lambda name: f'python {facts[name].python_version}')}; evener needs 3.11 or newer",
                  f"install python 3.11 there; then {seen.setup()}{_or_python(outdated)}")  # fmt: skip
    else:
        yield from _differing(
            {name: ".".join(map(str, _minor(host_facts.python_version))) for name, host_facts in facts.items()},
            "version.python", "python", "warning", seen.setup(),
        )  # fmt: skip
    no_torch = [name for name, host_facts in facts.items() if host_facts.torch_version is None and name not in outdated]
    if no_torch:
        yield finding_of(no_torch, "version.torch", "error",
                  f"{each(no_torch, lambda name: f'{facts[name].python} has no torch')}", seen.setup())  # fmt: skip
    yield from _differing(
        {name: host_facts.torch_version.partition("+")[0] for name, host_facts in facts.items()
         if host_facts.torch_version},
        "version.torch", "torch", "error", seen.setup(),
    )  # fmt: skip
    no_evener = [
        name
        for name, host_facts in facts.items()
        if host_facts.evener_hash is None and name not in [*no_torch, *outdated]
    ]
    if no_evener:
        yield finding_of(no_evener, "version.evener", "error",
                  f"{each(no_evener, lambda name: f'{facts[name].python} has no evener')}", seen.setup())  # fmt: skip
    differing = [name for name, host_facts in facts.items() if host_facts.evener_hash not in (None, seen.own_hash)]
    if differing:
        yield finding_of(differing, "version.evener", "error",
                  each(differing, lambda name: f"its evener {facts[name].evener_version} differs from this machine's"),
                  seen.setup())  # fmt: skip


def _differing(
    versions: Mapping[str, str], check: str, package: str, severity: Severity, fix: str
) -> Iterator[Finding]:
    if len(set(versions.values())) < 2:
        return
    common = Counter(versions.values()).most_common(1)[0][0]  # of equally many, the first host's
    common_hosts = [name for name, version in versions.items() if version == common]
    others = [name for name, version in versions.items() if version != common]
    yield finding_of(others, check, severity,
              f"{each(others, lambda name: f'{package} {versions[name]}')}; {listed(common_hosts)}: {common}",
              fix)  # fmt: skip


# --- ports and processes -----------------------------------------------------------------------------------------


def _ports_and_processes(seen: Seen) -> Iterator[Finding]:
    for name, facts in seen.facts.items():
        stale_pids = {process.pid for process in facts.stale}
        if facts.port_holder is not None:
            holder = facts.port_holder
            show_command = f"on {name}: sudo ss -tlnp 'sport = :{facts.port}'"
            yield Finding(
                check="port.in-use", severity="warning", host=name,
                evidence=f"port {facts.port} is held by {_process(holder)}; evener will take another port",
                fix=show_command if holder.pid is None else _end(seen, name, holder, is_stale=holder.pid in stale_pids),
            )  # fmt: skip
        for group in _by_run(facts.stale):
            others = f", and {len(group) - 1} more" if len(group) > 1 else ""
            yield Finding(
                check="proc.stale", severity="warning", host=name,
                evidence=f"left over, without a supervisor: {_process(group[0])}{others}",
                fix=f"evener stop --stale{seen.fleet.flag}"
                if group[0].run
                else f"on {name}: kill {' '.join(str(one.pid) for one in group)}",
            )  # fmt: skip
        for process in facts.attached:
            yield Finding(
                check="tty.attached", severity="warning", host=name,
                evidence=f"ends when its terminal or ssh session does: {_process(process)}",
                fix="start it by evener launch, which detaches it; or inside tmux",
            )  # fmt: skip


def _end(seen: Seen, name: str, process: Process, *, is_stale: bool) -> str:
    if process.run is not None:
        return f"evener stop --stale{seen.fleet.flag}" if is_stale else f"evener stop {process.run}"
    return f"on {name}: kill {process.pid}"


def _by_run(processes: Iterable[Process]) -> list[list[Process]]:
    groups: dict[str | None, list[Process]] = {}
    for process in processes:
        groups.setdefault(process.run, []).append(process)
    return list(groups.values())


def _process(process: Process) -> str:
    if process.pid is None:
        return "a process of another user, which only root may see"
    parts = [f"pid {process.pid}"]
    parts += [f"of {process.owner}"] if process.owner else []
    parts += [f"for {seconds(process.age_s)}"] if process.age_s is not None else []
    parts += [f"run {process.run}"] if process.run else []
    return f"{', '.join(parts)}: {_short(process.command or 'its command is not known')}"


def _or_python(hosts: Sequence[str]) -> str:
    return f'; or [hosts.{hosts[0]}] python = "…"' if len(hosts) == 1 else ""


def _short(command: str) -> str:
    command = " ".join(command.split())
    return command if len(command) <= 90 else command[:87] + "…"


def _minor(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (version or "0.0").split(".")[:2])
