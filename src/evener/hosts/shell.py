"""How is a program started on another machine? One fixed command for each host, over the user's own ssh.

Everything else travels on its stdin, so nothing is ever quoted for a shell. See `hosts/session.py` for what is said.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from evener.core.errors import HostError
from evener.core.fleet import Host

CONNECT_S = 5
ALIVE_EVERY_S = 5  # a connection that is silent for three of these is dead
# The line that tells why; with a jump host or a ProxyCommand, what follows it only says that there is no connection.
NO_WAY = re.compile(r"connect to host|could not resolve hostname|open failed: connect failed", re.IGNORECASE)
# Reads a program's length and text from stdin and becomes it.
BOOT = "import sys;exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"


class Shell(Protocol):
    """One machine's way in."""

    name: str

    def start(self) -> subprocess.Popen[bytes]:
        """A python on that machine that runs what it is sent; stdin, stdout and stderr are pipes."""

    def failure(self, status: int | None, stderr: str) -> HostError:
        """Why the python never answered."""


class Local:
    """This machine."""

    def __init__(self, name: str, host: Host) -> None:
        self.name, self._python = name, host.python or sys.executable

    def argv(self) -> list[str]:
        """The command."""
        return [str(Path(self._python).expanduser()), "-u", "-c", BOOT]

    def start(self) -> subprocess.Popen[bytes]:
        try:
            return _pipe(self.argv())
        except OSError as error:
            raise self.failure(127, f"{self._python}: {error.strerror}") from None

    def failure(self, status: int | None, stderr: str) -> HostError:
        return _no_python(self.name, self._python, status, stderr)


class SSH:
    """A machine that ssh reaches: the user's configuration, agent, keys and jump hosts apply."""

    def __init__(self, name: str, host: Host) -> None:
        self.name, self._host = name, host
        self._python = host.python or "python3"

    def argv(self) -> list[str]:
        """The command. Options come before the user's own, which win: ssh takes the first value that it meets."""
        host = self._host
        options = [
            *host.ssh_options,
            "BatchMode=yes",  # never asks: nobody may be there to answer
            f"ConnectTimeout={CONNECT_S}",
            f"ServerAliveInterval={ALIVE_EVERY_S}",
            "ServerAliveCountMax=3",
            "ClearAllForwardings=yes",
            "ControlMaster=no",  # a master of the user's is used, but ours never becomes one for others
        ]
        argv = ["ssh", "-T", "-e", "none"]
        for option in options:
            argv += ["-o", option]
        if host.identity_file:
            argv += ["-i", str(Path(host.identity_file).expanduser()), "-o", "IdentitiesOnly=yes"]
        if host.port:
            argv += ["-p", str(host.port)]
        if host.user:
            argv += ["-l", host.user]
        return [*argv, "--", host.address, f"{_word(self._python)} -u -c '{BOOT}'"]

    def start(self) -> subprocess.Popen[bytes]:
        try:
            return _pipe(self.argv())
        except FileNotFoundError:
            raise HostError(
                "this machine has no ssh", check="ssh.unreachable", host=self.name, hint="apt install openssh-client"
            ) from None

    def failure(self, status: int | None, stderr: str) -> HostError:
        if status == 255 or status is None:
            return ssh_failure(self.name, self._host, stderr)
        return _no_python(self.name, self._python, status, stderr)


def shell_of(name: str, host: Host) -> Local | SSH:
    """The way into a host."""
    return Local(name, host) if host.is_local else SSH(name, host)


def ssh_failure(name: str, host: Host, stderr: str) -> HostError:
    """Which of the three it was, from what ssh itself said; exit status 255 alone says only that it was ssh."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    login = f"{host.user}@{host.address}" if host.user else host.address
    port = f" -p {host.port}" if host.port else ""
    if re.search(r"host key verification failed|identification has changed", stderr, re.IGNORECASE):
        changed = "HAS CHANGED" in stderr
        known = f"[{host.address}]:{host.port}" if host.port else host.address
        return HostError(
            f"{name}: its host key {'is another than ssh remembers' if changed else 'is not known to ssh'}",
            check="ssh.hostkey",
            host=name,
            hint=f"if you trust the machine: ssh-keygen -R {known}; ssh{port} {login}, and look at the fingerprint"
            if changed
            else f"ssh{port} {login} once by hand, and compare the fingerprint",
            output=stderr,
        )
    if re.search(r"permission denied|too many authentication failures|no supported authentication", stderr, re.I):
        return HostError(
            f"{name}: ssh was refused: {said[-1]}",
            check="ssh.auth",
            host=name,
            hint=f"ssh-copy-id{port} {login}",
            output=stderr,
        )
    why = next((line for line in said if NO_WAY.search(line)), said[-1] if said else f"no answer within {CONNECT_S} s")
    return HostError(
        f"{name}: ssh cannot reach {login}{port}: {why.removeprefix('ssh: ')}",
        check="ssh.unreachable",
        host=name,
        hint=f"is it on, and does its sshd run? By hand: ssh{port} {login}",
        output=stderr,
    )


def _no_python(name: str, python: str, status: int | None, stderr: str) -> HostError:
    last = [line for line in stderr.splitlines() if line.strip()][-1:]
    return HostError(
        f"{name}: {python} does not start there (exit status {status}): {''.join(last) or 'it said nothing'}",
        check="version.python",
        host=name,
        hint=f'install python 3.11 or newer on {name}, or name its interpreter: [hosts.{name}] python = "…"',
        output=stderr,
    )


def _word(path: str) -> str:
    """The interpreter as one word of any shell; a leading ~ stays the shell's to expand."""
    if path.startswith("~/"):
        return "~/" + shlex.quote(path[2:])
    return shlex.quote(path)


def _pipe(argv: list[str]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in the terminal is the controller's to handle.
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
