"""`train --on laptop,attic`: make the fleet file of these machines, check them, set them up and measure them.

Each step is a command that a person could give, and is printed as that. What has been done is not done again: the
fleet file is kept, a machine that has what a run needs is not set up, and what was measured for a model is not measured
again.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from evener.cli import doctor, probe, setup
from evener.cli.kept_fleets import kept_fleet_file, write_fleet_file
from evener.cli.run_output import print_status
from evener.cli.terminal import is_interactive, make_console, print_findings
from evener.cli.trust import approve_fleet, confirm
from evener.core.base.errors import EvenerError
from evener.core.base.shell import quote_word
from evener.core.cluster.finding import Finding
from evener.core.cluster.fleet_file import Fleet, fleet_flag, load_fleet, local_fleet_path
from evener.core.model.fine_tuning import rate_name
from evener.core.model.pretrained import FINE_TUNING_EXTRA, read_pretrained
from evener.core.run.run_spec import ModelSpec
from evener.doctor.preflight import run_preflight
from evener.ssh.session import connect

WIRE_SECONDS, HOST_SECONDS = 1.0, 3.0  # of quick probes


def measure_this_machine(models: Sequence[str], *, pretrained: ModelSpec | None = None, is_dry: bool = False) -> Fleet:
    """Return this machine as a fleet, with the rates of these models; measure what was not measured before.

    `models` are presets. `pretrained` is a model to fine-tune.

    Raise EvenerError if its fleet file cannot be written.
    """
    path = local_fleet_path()
    if not path.exists():
        write_fleet_file(path, '[hosts.here]\naddress = "local"\n')
    _measure(path, load_fleet(path), models, pretrained, is_dry=is_dry)
    return load_fleet(path)


def fleet_of_machines(
    names: str, models: Sequence[str], *, packages: Sequence[str], trust: bool, may_install: bool,
    pretrained: ModelSpec | None = None, is_dry: bool = False,
) -> str:  # fmt: skip
    """Return the path of the fleet file of these machines, when all of them are ready to train `models`, or to
    fine-tune `pretrained`.

    `names` are separated by commas, each as `evener fleet init` takes it; `packages` are what the run imports besides
    evener's own dependencies. Without `may_install` it asks before it installs anything. `is_dry`: nothing is installed
    or measured; the commands are printed. Raise EvenerError if a machine cannot take part.
    """
    path = kept_fleet_file(names)
    known = approve_fleet(load_fleet(path), trust)
    _show(f"doctor {fleet_flag(path)} --quick")
    findings = _blocking_findings(known, packages)
    if not is_dry and any("evener setup" in finding.fix for finding in findings):
        lacks = [finding for finding in findings if "evener setup" in finding.fix]
        _set_up(path, lacks, packages, may_install=may_install)
        findings = _blocking_findings(known, packages)
    if findings:
        print_findings(make_console(stderr=True), findings)
        raise EvenerError("these machines cannot train together yet", hint=f"mend it, and repeat; the hosts: {path}")
    _measure(path, known, models, pretrained, is_dry=is_dry)
    return str(path)


def _show(command: str) -> None:
    """Print the command that a step stands for."""
    print_status(f"$ evener {command}")


def _blocking_findings(known: Fleet, packages: Sequence[str]) -> list[Finding]:
    """Return what keeps these machines from training together."""
    with connect(known, connect_timeout_s=doctor.CONNECT_TIMEOUT_S) as (sessions, errors):
        return run_preflight(known, sessions, errors, quick=True, packages=packages).blocking_findings


def _set_up(path: Path, findings: list[Finding], packages: Sequence[str], *, may_install: bool) -> None:
    """Install what these findings say that machines lack. Raise EvenerError if that is not allowed, or fails."""
    named = list(dict.fromkeys(finding.host for finding in findings))
    hosts = [] if None in named else [host for host in named if host]  # a finding without a host is of several
    where, extra = ", ".join(hosts) or "these machines", [FINE_TUNING_EXTRA] if packages else []
    words = [f"--host {quote_word(host)}" for host in hosts] + [f"--extra {name}" for name in extra]
    command = " ".join([f"setup {fleet_flag(path)}", *words])
    if not may_install:
        what = " and ".join(["evener, torch", *packages] if packages else ["evener", "torch"])
        lacks_packages_alone = all(finding.check == "version.packages" for finding in findings)
        lack = findings[0].evidence if lacks_packages_alone else "evener is not installed there"
        if not is_interactive() or not confirm(f"Install {what} on {where}, in a folder of evener's own? [y/N] "):
            raise EvenerError(f"{where}: {lack}", hint=f"--yes; or evener {command}")
    _show(command)
    with _quiet():
        status = setup.setup(
            fleet=str(path), hosts=hosts, extra=extra, more=None, carry=False, trust=False, as_json=False
        )
    if status:
        raise EvenerError("these machines could not be set up", hint=f"the hosts: {path}")


def _measure(path: Path, known: Fleet, models: Sequence[str], pretrained: ModelSpec | None, *, is_dry: bool) -> None:
    """Measure what is not known yet: the links between the machines, and how fast each trains the models."""
    names = list(known.hosts)
    pairs = [(a, b) for a in names for b in names if a != b]
    if any(b not in known.links.get(a, {}) for a, b in pairs):
        _show(f"probe wire {fleet_flag(path)} --seconds {WIRE_SECONDS:g} --no-iperf3 --no-trials")
        if not is_dry:
            with _quiet():
                probe.wire(fleet=str(path), seconds=WIRE_SECONDS, no_iperf3=True, no_trials=True)
    missing = [model for model in models if not _is_measured(known, model)]
    if missing:
        of_models = ",".join(missing)
        _show(f"probe host {fleet_flag(path)} --model {quote_word(of_models)} --seconds {HOST_SECONDS:g}")
        if not is_dry:
            with _quiet():
                probe.host(fleet=str(path), model=of_models, seconds=HOST_SECONDS)
    if pretrained is not None and not _is_measured(known, *_rate_names(pretrained)):
        flags = {"--model": pretrained.model, "--lora": pretrained.lora, "--block-size": pretrained.block_size}
        given = " ".join(f"{flag} {quote_word(str(value))}" for flag, value in flags.items() if value is not None)
        given += " --dora" if pretrained.dora else ""
        _show(f"probe host {fleet_flag(path)} {given} --seconds {HOST_SECONDS:g}")
        if not is_dry:
            with _quiet():
                probe.host(fleet=str(path), model=pretrained.model, lora=pretrained.lora, dora=pretrained.dora,
                           block_size=pretrained.block_size, seconds=HOST_SECONDS)  # fmt: skip


def _rate_names(model: ModelSpec) -> list[str]:
    """Return the name under which a fleet file keeps the rate of a pretrained model; none if it cannot be probed.

    The layers of some are not known, and a quantized one may not fit into memory as a probe builds it.
    """
    assert model.pretrained is not None
    found = read_pretrained(model.pretrained, model.block_size, model.lora, has_dora=model.dora)
    return [] if found.layers is None or model.quantize != "off" else [rate_name(found)]


def _is_measured(known: Fleet, *models: str) -> bool:
    """Return whether the fleet file has the rates of these models on each device of each host."""
    return all(
        known.rates.get(name) and all(model in rates.models for rates in known.rates[name].values())
        for name in known.hosts
        for model in models
    )


def _quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """Keep a verb's tables to itself; its status lines go on, on stderr."""
    return contextlib.redirect_stdout(io.StringIO())
