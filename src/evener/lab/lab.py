"""How does a program make a lab, break things in it and end it?

with Lab.up(LabSpec(name="attic"), out=Path("lab.toml")) as lab:
    lab.host("b").link_up(False)
    assert lab.host("a").exec(["ssh-keyscan", "-T1", "b"], check=False).stdout == ""
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

from evener.core.errors import UsageError
from evener.lab import files, make, state
from evener.lab.host import Host
from evener.lab.needs import check_machine, find_programs
from evener.lab.spec import LabSpec, without_limits
from evener.lab.state import LabFolder, LabState


class Lab:
    """A lab that is up. As a context manager it is ended on the way out."""

    def __init__(self, path: Path, made: LabState) -> None:
        self._folder = LabFolder(path, made)

    @classmethod
    def up(cls, spec: LabSpec, out: Path | None = None) -> Lab:
        """Make a lab and wait until every host answers; `out` is the fleet file to write.

        Raises:
            EvenerError: what is missing on this machine, or what is wrong with the spec. Nothing is left behind.
        """
        spec.check()
        check_machine(spec)
        if os.geteuid() != 0:
            spec = without_limits(spec)
        if out is not None:
            files.check_fleet_file(out)
        path = state.claim(spec.name)
        try:
            lab = cls(path, make.make(path, spec, out))
            for host in lab.hosts:
                host.equip()
            if out is not None:
                files.write_fleet_file(out, lab.state.fleet_text)
            state.save(path, lab.state)
        except BaseException:
            with state.locked():
                state.clean(path)
            raise
        return lab

    @classmethod
    def find(cls, name: str | None) -> Lab:
        """The lab of this name, which is up (or was, and has crashed); None: the one that is meant."""
        if name is None:
            names = state.lab_names()
            if not names:
                raise UsageError("no lab is up", hint="evener lab up")
            name = usual(names)
            if name is None:
                raise UsageError(f"which lab? {', '.join(names)}", hint=f"--name {shlex.quote(names[0])}")
        path = state.root() / name
        made = state.load(path)
        if made is None:
            labs = ", ".join(state.lab_names()) or "none"
            raise UsageError(f"no lab is called {name}; labs: {labs}", hint=f"evener lab up --name {name}")
        return cls(path, made)

    @property
    def path(self) -> Path:
        """Where everything about it is written."""
        return self._folder.path

    @property
    def state(self) -> LabState:
        """What it is now: its hosts may change."""
        return self._folder.state

    @property
    def name(self) -> str:
        """What `evener lab down` calls it."""
        return self.state.spec.name

    @property
    def rootless(self) -> bool:
        """Made by an ordinary user: no limits of processor and memory."""
        return self.state.rootless

    @property
    def hosts(self) -> list[Host]:
        """Every host, in the order of the spec."""
        return [Host(self._folder, name) for name in self.state.hosts]

    def host(self, name: str) -> Host:
        """One host."""
        if name not in self.state.hosts:
            lab, hosts = self.name, ", ".join(self.state.hosts)
            raise UsageError(f"lab {lab} has no host {name}; hosts: {hosts}", hint=f"evener lab status {lab}")
        return Host(self._folder, name)

    def is_alive(self) -> bool:
        """Whether its network and every host are there, but for hosts that were powered off."""
        return self.state.desk.is_alive() and all(host.is_alive() or host.is_off() for host in self.hosts)

    def down(self) -> None:
        """Remove every trace of it. Twice does no harm."""
        take_down(self.name)

    def ssh_argv(self, host: str, *command: str) -> list[str]:
        """`ssh` with the settings of the fleet file."""
        entry = tomllib.loads(self.state.fleet_text)["hosts"][host]
        options = [word for option in entry["ssh_options"] for word in ("-o", option)]
        [program] = find_programs("ssh")
        return [program, *options, "-i", entry["identity_file"], f"{entry['user']}@{entry['address']}", *command]

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()


def usual(names: Sequence[str]) -> str | None:
    """The lab that is meant where none is named: the only one, else the one that `lab up` makes without a --name."""
    return names[0] if len(names) == 1 else next((name for name in names if name == LabSpec().name), None)


def take_down(name: str) -> bool:
    """Remove every trace of a lab. Whether there was one."""
    with state.locked() as labs:
        was_there = (labs / name).exists()
        state.clean(labs / name)
    return was_there
