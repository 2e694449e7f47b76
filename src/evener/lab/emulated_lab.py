"""Emulate a lab of hosts on one machine: create it, break its hosts, remove it.

with EmulatedLab.up(LabSpec(name="attic"), out=Path("lab.toml")) as lab:
    lab.host("b").set_link_up(False)
    assert lab.host("a").exec(["ssh-keyscan", "-T1", "b"], check=False).stdout == ""
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path

from evener.core.base.errors import UsageError
from evener.core.base.shell import quote_word
from evener.core.cluster.fleet_file import parse_fleet
from evener.core.run.trust import trust_fleet
from evener.lab import create_lab, host_files, state
from evener.lab.host import LabHost
from evener.lab.lab_requirements import allowed_cores, check_machine, find_programs
from evener.lab.lab_spec import LabSpec, with_own_cores, without_limits
from evener.lab.state import LabFolder, LabState


class EmulatedLab:
    """A lab that is up. As a context manager it is removed on exit."""

    def __init__(self, path: Path, state: LabState) -> None:
        self._folder = LabFolder(path, state)

    @classmethod
    def up(cls, spec: LabSpec, out: Path | None = None) -> EmulatedLab:
        """Create a lab and wait until every host accepts logins; `out` is the fleet file to write.

        Where the spec names no cores, each host gets its own part of this machine's.

        Raises:
            EvenerError: if this machine lacks something or the spec is invalid. Nothing is left behind.
        """
        spec.check()
        check_machine(spec)
        spec = with_own_cores(spec, allowed_cores())
        if os.geteuid() != 0:
            spec = without_limits(spec)
        if out is not None:
            host_files.check_fleet_file(out)
        path = state.claim_name(spec.name)
        try:
            lab = cls(path, create_lab.create(path, spec, out))
            for host in lab.hosts:
                host.apply_spec()
            if out is not None:
                host_files.write_fleet_file(out, lab.state.fleet_text)
                trust_fleet(parse_fleet(lab.state.fleet_text, out))
            state.save(path, lab.state)
        except BaseException:
            with state.lock_labs():
                state.remove_lab(path)
            raise
        return lab

    @classmethod
    def find(cls, name: str | None) -> EmulatedLab:
        """Return the lab with this name, which is up or has crashed; None: the default lab (see `default_lab_name`)."""
        if name is None:
            names = state.lab_names()
            if not names:
                raise UsageError("no lab is up", hint="evener lab up")
            name = default_lab_name(names)
            if name is None:
                raise UsageError(f"which lab? {', '.join(names)}", hint=f"--name {quote_word(names[0])}")
        path = state.labs_root() / name
        lab_state = state.load(path)
        if lab_state is None:
            labs = ", ".join(state.lab_names()) or "none"
            raise UsageError(f"no lab is called {name}; labs: {labs}", hint=f"evener lab up --name {quote_word(name)}")
        return cls(path, lab_state)

    @property
    def path(self) -> Path:
        """Its state directory."""
        return self._folder.path

    @property
    def state(self) -> LabState:
        """Its current state, which changes with its hosts."""
        return self._folder.state

    @property
    def name(self) -> str:
        """Its name, as in `evener lab down NAME`."""
        return self.state.spec.name

    @property
    def rootless(self) -> bool:
        """Return whether an ordinary user created it: without limits of CPU, memory and disk."""
        return self.state.rootless

    @property
    def hosts(self) -> list[LabHost]:
        """The hosts, in the order of the spec."""
        return [LabHost(self._folder, name) for name in self.state.hosts]

    def host(self, name: str) -> LabHost:
        """Return the host with this name; raise UsageError if there is none."""
        if name not in self.state.hosts:
            lab, hosts = self.name, ", ".join(self.state.hosts)
            raise UsageError(
                f"lab {lab} has no host {name}; hosts: {hosts}", hint=f"evener lab status {quote_word(lab)}"
            )
        return LabHost(self._folder, name)

    def is_alive(self) -> bool:
        """Return whether the controller and every host that was not powered off run."""
        return self.state.controller.is_alive() and all(host.is_alive() or host.is_off() for host in self.hosts)

    def down(self) -> None:
        """Remove the lab completely. A second call does nothing."""
        take_down(self.name)

    def ssh_argv(self, host: str, *command: str) -> list[str]:
        """Return the ssh command line for a host, with the settings of the fleet file."""
        entry = tomllib.loads(self.state.fleet_text)["hosts"][host]
        options = [word for option in entry["ssh_options"] for word in ("-o", option)]
        [program] = find_programs("ssh")
        return [program, *options, "-i", entry["identity_file"], f"{entry['user']}@{entry['address']}", *command]

    def __enter__(self) -> EmulatedLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()


def default_lab_name(names: Sequence[str]) -> str | None:
    """Return the lab to use without a name: the only one, else the one that `lab up` creates without --name."""
    return names[0] if len(names) == 1 else next((name for name in names if name == LabSpec().name), None)


def take_down(name: str) -> bool:
    """Remove a lab completely; return whether there was one."""
    with state.lock_labs() as labs:
        existed = (labs / name).exists()
        state.remove_lab(labs / name)
    return existed
