"""Run all preflight checks. Pure: facts in, findings and their fixes out.

error: a run by evener would fail. warning: it would be slow or brittle, or torchrun started by hand would run into what
evener avoids. A healthy fleet has neither. A fault that hosts have in common is one finding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from evener.core.base.shell import quote_word
from evener.core.base.units import format_seconds
from evener.core.cluster.finding import Finding, Severity
from evener.core.cluster.fleet_file import Fleet
from evener.doctor.context import (
    CheckContext,
    describe_by_host,
    find_address_holder,
    finding_for_hosts,
    has_foreign_host_key,
    is_ip_address,
    join_names,
)
from evener.doctor.facts import HostFacts, HostProcess
from evener.doctor.firewall import check_port_protection
from evener.doctor.link_checks import check_links
from evener.doctor.machine_checks import check_machines
from evener.doctor.network_checks import check_network

ERROR_LINE = re.compile(r"(Fatal Python error|[\w.]*(Error|Exception)): ")

MIN_PYTHON_VERSION = (3, 11)


def run_checks(context: CheckContext) -> list[Finding]:
    """Return every finding, in the order in which a person would fix them."""
    findings = [
        *_check_reachable(context),
        *_check_duplicate_machines(context),
        *_check_shadowed_modules(context),
        *_check_versions(context),
    ]
    if not context.is_one_host:
        findings += [*check_network(context), *check_links(context)]
    findings += check_port_protection(
        context.port_protection,
        context.network.interfaces,
        {name: context.sudo_prefix(name) for name in context.port_protection},
    )
    return [*findings, *_check_ports_and_processes(context), *check_machines(context)]


def names_to_resolve(fleet: Fleet, facts: Mapping[str, HostFacts]) -> list[str]:
    """Return the names by which a host may be addressed: its own, the one in the fleet file, MASTER_ADDR."""
    names = [host_facts.hostname for host_facts in facts.values()]
    names += [host.address for host in fleet.hosts.values() if not host.is_local]
    names += [
        host_facts.environment["MASTER_ADDR"]
        for host_facts in facts.values()
        if "MASTER_ADDR" in host_facts.environment
    ]
    return list(dict.fromkeys(name.rpartition("@")[2] for name in names if not is_ip_address(name)))


# --- reachability, identity, versions ----------------------------------------------------------------------------


def _check_reachable(context: CheckContext) -> Iterator[Finding]:
    for name, error in context.errors.items():
        if (
            has_foreign_host_key(context, name)
            and find_address_holder(context, name, context.fleet.hosts[name].address) is not None
        ):
            continue  # another finding reports that another machine has its address
        yield Finding(check=error.check, severity="error", host=name, evidence=str(error), fix=error.hint)


def _check_duplicate_machines(context: CheckContext) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for name, facts in context.facts.items():
        if facts.machine_id is None:
            continue
        other = first.setdefault(facts.machine_id, name)
        if other != name:
            yield Finding(
                check="rank.duplicate", severity="error", host=name, peer=other,
                evidence=f"{other} and {name} are one machine: {facts.hostname}, booted once, with one network",
                fix=f"take [hosts.{name}] out of the fleet file; ranks = 2 in [hosts.{other}] starts two there",
            )  # fmt: skip


def _check_shadowed_modules(context: CheckContext) -> Iterator[Finding]:
    """Check that python starts with the variables of a session, and that no other file shadows its modules or torch."""
    for name, facts in context.facts.items():
        variable = facts.breaking_variable
        if variable is not None and not (facts.shadowed and variable == "PYTHONPATH"):
            what = f"does not start: {_error_line(facts.python_error)}" if facts.python_error else "finds no torch"
            yield Finding(
                check="env.shadowed", severity="error", host=name,
                evidence=f"{variable}={facts.environment.get(variable, '')} in its environment: with it "
                f"{facts.python} {what}",
                fix=context.unset_command(name, variable),
            )  # fmt: skip
        elif facts.shadowed:
            module, path = next(iter(facts.shadowed.items()))
            others = f", and {len(facts.shadowed) - 1} more" if len(facts.shadowed) > 1 else ""
            error = facts.python_error or facts.torch_error
            breaks = error is not None or "torch" in facts.shadowed
            yield Finding(
                check="env.shadowed", severity="error" if breaks else "warning", host=name,
                evidence=f"PYTHONPATH has {path}{others}: python imports it in place of {_owner_of_module(module)} own"
                + (f", and ends: {_error_line(error)}" if error else ""),
                fix=context.unset_command(name, "PYTHONPATH"),
            )  # fmt: skip
        elif facts.python_error is not None and facts.python_version is not None:
            yield Finding(
                check="env.shadowed", severity="error", host=name,
                evidence=f"{facts.python} starts only with -I; in its environment: {_error_line(facts.python_error)}",
                fix=f"on {name}: {quote_word(facts.python)} -c pass shows which file that is",
            )  # fmt: skip
        elif facts.torch_error is not None and facts.torch_version is not None:
            yield Finding(
                check="version.torch",
                severity="error",
                host=name,
                evidence=f"torch {facts.torch_version} is there, and cannot be imported: "
                f"{_error_line(facts.torch_error)}",
                fix=f"on {name}: {quote_word(facts.python)} -m pip uninstall -y torch; {context.setup_command()}",
            )


def _owner_of_module(module: str) -> str:
    return "torch's" if module == "torch" else "its"


def _error_line(output: str) -> str:
    """Return the line of a Python program's output that names the error: the last one if none does."""
    lines = output.splitlines()
    return next((line for line in reversed(lines) if ERROR_LINE.match(line)), lines[-1])


def _check_versions(context: CheckContext) -> Iterator[Finding]:
    broken = [name for name, facts in context.facts.items() if facts.python_version is None]
    for name in broken:
        error = context.facts[name].python_error
        yield Finding(
            check="version.python", severity="error", host=name,
            evidence=f"{context.facts[name].python} does not start{f': {_error_line(error)}' if error else ''}",
            fix=f'{context.setup_command()}; or [hosts.{name}] python = "…"',
        )  # fmt: skip
    facts = {name: host_facts for name, host_facts in context.facts.items() if name not in broken}
    outdated = [
        name
        for name, host_facts in facts.items()
        if _parse_minor_version(host_facts.python_version) < MIN_PYTHON_VERSION
    ]
    if outdated:
        yield finding_for_hosts(
            outdated,
            "version.python",
            "error",
            f"{describe_by_host(outdated, lambda name: f'python {facts[name].python_version}')}; evener needs "
            f"3.11 or newer",
            f"install python 3.11 there; then {context.setup_command()}{_python_override_hint(outdated)}",
        )
    else:
        yield from _check_version_mismatch(
            {
                name: ".".join(map(str, _parse_minor_version(host_facts.python_version)))
                for name, host_facts in facts.items()
            },
            "version.python",
            "python",
            "warning",
            context.setup_command(),
        )
    no_torch = [
        name
        for name, host_facts in facts.items()
        if host_facts.torch_version is None and host_facts.breaking_variable is None and name not in outdated
    ]
    if no_torch:
        yield finding_for_hosts(
            no_torch,
            "version.torch",
            "error",
            f"{describe_by_host(no_torch, lambda name: f'{facts[name].python} has no torch')}",
            context.setup_command(),
        )
    yield from _check_version_mismatch(
        {name: host_facts.torch_version.partition("+")[0] for name, host_facts in facts.items()
         if host_facts.torch_version},
        "version.torch", "torch", "error", context.setup_command(),
    )  # fmt: skip
    no_evener = [
        name
        for name, host_facts in facts.items()
        if host_facts.evener_hash is None
        and host_facts.breaking_variable is None
        and name not in [*no_torch, *outdated]
    ]
    if no_evener:
        yield finding_for_hosts(
            no_evener,
            "version.evener",
            "error",
            f"{describe_by_host(no_evener, lambda name: f'{facts[name].python} has no evener')}",
            context.setup_command(),
        )
    lacking = [name for name, host_facts in facts.items() if host_facts.missing_packages and name not in outdated]
    if lacking:
        yield finding_for_hosts(
            lacking,
            "version.packages",
            "error",
            describe_by_host(
                lacking, lambda name: f"{facts[name].python} has no {' and no '.join(facts[name].missing_packages)}"
            ),
            context.setup_command("--extra hf"),
        )
    differing = [
        name for name, host_facts in facts.items() if host_facts.evener_hash not in (None, context.local_code_hash)
    ]
    if differing:
        yield finding_for_hosts(
            differing,
            "version.evener",
            "error",
            describe_by_host(
                differing, lambda name: f"its evener {facts[name].evener_version} differs from this machine's"
            ),
            context.setup_command(),
        )


def _check_version_mismatch(
    versions: Mapping[str, str], check: str, package: str, severity: Severity, fix: str
) -> Iterator[Finding]:
    if len(set(versions.values())) < 2:
        return
    common = Counter(versions.values()).most_common(1)[0][0]  # of equally many, the first host's
    common_hosts = [name for name, version in versions.items() if version == common]
    others = [name for name, version in versions.items() if version != common]
    yield finding_for_hosts(
        others,
        check,
        severity,
        f"{describe_by_host(others, lambda name: f'{package} {versions[name]}')}; {join_names(common_hosts)}: {common}",
        fix,
    )


# --- ports and processes -----------------------------------------------------------------------------------------


def _check_ports_and_processes(context: CheckContext) -> Iterator[Finding]:
    for name, facts in context.facts.items():
        stale_pids = {process.pid for process in facts.stale}
        if facts.port_holder is not None:
            holder = facts.port_holder
            show_command = f"on {name}: sudo ss -tlnp 'sport = :{facts.port}'"
            yield Finding(
                check="port.in-use",
                severity="warning",
                host=name,
                evidence=f"port {facts.port} is held by {_describe_process(holder)}; evener will take another port",
                fix=show_command
                if holder.pid is None
                else _kill_command(context, name, holder, is_stale=holder.pid in stale_pids),
            )
        for group in _group_by_run(facts.stale):
            others = f", and {len(group) - 1} more" if len(group) > 1 else ""
            yield Finding(
                check="proc.stale", severity="warning", host=name,
                evidence=f"left over, without a supervisor: {_describe_process(group[0])}{others}",
                fix=f"evener stop --stale{context.fleet.cli_flag}"
                if group[0].run
                else f"on {name}: kill {' '.join(str(one.pid) for one in group)}",
            )  # fmt: skip
        for process in facts.attached:
            yield Finding(
                check="tty.attached", severity="warning", host=name,
                evidence=f"ends when its terminal or ssh session does: {_describe_process(process)}",
                fix="start it by evener launch, which detaches it; or inside tmux",
            )  # fmt: skip


def _kill_command(context: CheckContext, name: str, process: HostProcess, *, is_stale: bool) -> str:
    if process.run is not None:
        return f"evener stop --stale{context.fleet.cli_flag}" if is_stale else f"evener stop {quote_word(process.run)}"
    return f"on {name}: kill {process.pid}"


def _group_by_run(processes: Iterable[HostProcess]) -> list[list[HostProcess]]:
    groups: dict[str | None, list[HostProcess]] = {}
    for process in processes:
        groups.setdefault(process.run, []).append(process)
    return list(groups.values())


def _describe_process(process: HostProcess) -> str:
    if process.pid is None:
        return "a process of another user, which only root may see"
    parts = [f"pid {process.pid}"]
    parts += [f"of {process.owner}"] if process.owner else []
    parts += [f"for {format_seconds(process.age_s)}"] if process.age_s is not None else []
    parts += [f"run {process.run}"] if process.run else []
    return f"{', '.join(parts)}: {_truncate_command(process.command or 'its command is not known')}"


def _python_override_hint(hosts: Sequence[str]) -> str:
    return f'; or [hosts.{hosts[0]}] python = "…"' if len(hosts) == 1 else ""


def _truncate_command(command: str) -> str:
    command = " ".join(command.split())
    return command if len(command) <= 90 else command[:87] + "…"


def _parse_minor_version(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (version or "0.0").split(".")[:2])
