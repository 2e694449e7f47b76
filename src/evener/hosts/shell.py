"""How is a program started on another machine? One fixed command for each host, over the user's own ssh.

Everything else travels on its stdin, so nothing is ever quoted for a shell. See `hosts/session.py` for what is said.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from evener.core.errors import HostError
from evener.core.fleet import Host

CONNECT_S = 5
ALIVE_EVERY_S = 5  # a connection that is silent for three of these is dead
# The line that tells why; with a jump host or a ProxyCommand, what follows it only says that there is no connection.
NO_WAY = re.compile(r"connect to host|could not resolve hostname|open failed: connect failed", re.IGNORECASE)
VERBOSE_S = 2.0  # by then it has told what a login needs
SMALL_S = 1.0  # the same where all that it sends is small
REFUSED = re.compile(r"permission denied \(|too many authentication failures|no supported auth", re.IGNORECASE)
OTHER_KEY = "is another than ssh remembers"  # a machine's host key
IS_IN = "Authenticated to"  # of ssh -v
# With one algorithm of each kind instead of all, no message before the login is longer than 1200 bytes.
SMALL = ("-o", "KexAlgorithms=curve25519-sha256", "-o", "Ciphers=aes128-ctr", "-o", "MACs=hmac-sha2-256")
NO_SHELL = re.compile(r"account is (?:currently )?not available", re.IGNORECASE)  # nologin(8)
LOGGED_IN = "evener-logged-in"  # what a shell says that runs a command at all
READS = "read what was meant for the program"
TOO_OLD = "evener needs another python than "
# Reads a program's length and text from stdin and becomes it. It sees neither PYTHON… variables, nor packages of the
# user's, nor files of the folder in which it starts: another torch or queue is what `doctor` is to find.
BOOT = (
    f"import sys;sys.version_info<(3,8)and sys.exit('{TOO_OLD}'+sys.version.split()[0]);"
    "sys.path=[p for p in sys.path if p];"
    "exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
)
FLAGS = ("-E", "-s", "-u")


class Shell(Protocol):
    """One machine's way in."""

    name: str

    def start(self) -> subprocess.Popen[bytes]:
        """A python on that machine that runs what it is sent; stdin, stdout and stderr are pipes."""

    def failure(self, status: int | None, stderr: str, stdout: str) -> HostError:
        """Why the python never answered; `status` is None while the program goes on."""


class Local:
    """This machine."""

    def __init__(self, name: str, host: Host) -> None:
        self.name, self._python = name, host.python or sys.executable

    def argv(self) -> list[str]:
        """The command."""
        return [str(Path(self._python).expanduser()), *FLAGS, "-c", BOOT]

    def start(self) -> subprocess.Popen[bytes]:
        try:
            return _pipe(self.argv())
        except OSError as error:
            raise self.failure(127, f"{self._python}: {error.strerror}", "") from None

    def failure(self, status: int | None, stderr: str, stdout: str) -> HostError:
        return _no_python(self.name, self._python, status, stderr)


class SSH:
    """A machine that ssh reaches: the user's configuration, agent, keys and jump hosts apply."""

    def __init__(self, name: str, host: Host) -> None:
        self.name, self._host = name, host
        self._python = host.python or "python3"

    def argv(self, *more: str) -> list[str]:
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
        argv = ["ssh", "-T", "-e", "none", *more]
        for option in options:
            argv += ["-o", option]
        if host.identity_file:
            argv += ["-i", str(Path(host.identity_file).expanduser()), "-o", "IdentitiesOnly=yes"]
        if host.port:
            argv += ["-p", str(host.port)]
        if host.user:
            argv += ["-l", host.user]
        return [*argv, "--", host.address, f'echo {LOGGED_IN}; {_word(self._python)} {" ".join(FLAGS)} -c "{BOOT}"']

    def start(self) -> subprocess.Popen[bytes]:
        try:
            return _pipe(self.argv())
        except FileNotFoundError:
            raise HostError(
                "this machine has no ssh", check="ssh.unreachable", host=self.name, hint="apt install openssh-client"
            ) from None

    def failure(self, status: int | None, stderr: str, stdout: str) -> HostError:
        if LOGGED_IN in stdout:
            if "invalid literal for int()" in stderr:
                return login_failure(self.name, READS, stderr)
            if status is None:
                return login_failure(self.name, f"has started {self._python}, which has not answered yet", stderr)
            return _no_python(self.name, self._python, status, stderr)
        if "remote command" in stderr:  # "Cannot execute command-line and remote command."
            options = [one for one in self._host.ssh_options if not one.lower().startswith("remotecommand")]
            options.append("RemoteCommand=none")
            return HostError(
                f"{self.name}: ssh's own configuration has a RemoteCommand for it, and runs no other",
                check="ssh.shell", host=self.name, hint=f"[hosts.{self.name}] ssh_options = {json.dumps(options)}",
                output=stderr,
            )  # fmt: skip
        if status not in (255, None):
            said = " ".join(f"{stdout}\n{stderr}".split())[-200:] or "it said nothing"
            why = login_failure(self.name, f"ended (exit status {status}) before it ran a command: {said}", stderr)
            if NO_SHELL.search(f"{stdout}\n{stderr}"):
                why.hint = f"on {self.name}: sudo usermod --shell /bin/bash {self._host.user or 'USER'}"
            return why
        if REFUSED.search(stderr):
            return ssh_refused(self.name, self._host, stderr, self._verbose(VERBOSE_S))
        if status is None:
            with ThreadPoolExecutor() as both:
                tried = [both.submit(self._verbose, VERBOSE_S), both.submit(self._verbose, SMALL_S, *SMALL)]
            verbose, small = (one.result() for one in tried)
            if IS_IN in verbose:
                return login_failure(self.name, "has not run a command yet", verbose)
            if IS_IN in small and "SSH2_MSG_KEXINIT sent" in verbose and "SSH2_MSG_NEWKEYS" not in verbose:
                return self._hole(verbose)
        return ssh_failure(self.name, self._host, stderr)

    def _verbose(self, within_s: float, *options: str) -> str:
        """What ssh tells of another attempt, step by step; all of it in English."""
        try:
            done = subprocess.run(self.argv("-v", *options), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=within_s, errors="replace", check=False)  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return (late.stderr or b"").decode(errors="replace")
        return done.stderr

    def _hole(self, verbose: str) -> HostError:
        address = self._host.address
        return HostError(
            f"{self.name}: ssh begins and stalls, and gets in when all that it sends is small: large packets vanish on "
            f"the way to {address}, and nobody is told",
            check="net.mtu",
            host=self.name,
            hint=f"here, on the interface that `ip route get {address}` names: sudo ip link set dev … mtu 1280; or "
            "mend what is on the way: a VPN, a tunnel, a switch with another MTU",
            output=verbose,
        )


def shell_of(name: str, host: Host) -> Local | SSH:
    """The way into a host."""
    return Local(name, host) if host.is_local else SSH(name, host)


def ssh_failure(name: str, host: Host, stderr: str) -> HostError:
    """Why there is no connection, from what ssh itself said; exit status 255 alone says only that it was ssh."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    login, port = _login(host)
    if re.search(r"host key verification failed|identification has changed", stderr, re.IGNORECASE):
        changed = "HAS CHANGED" in stderr
        known = f"[{host.address}]:{host.port}" if host.port else host.address
        return HostError(
            f"{name}: its host key {OTHER_KEY if changed else 'is not known to ssh'}",
            check="ssh.hostkey",
            host=name,
            hint=f"is it that machine, installed anew, and not another with its address? Then: ssh-keygen -R {known}; "
            f"ssh{port} {login}, and look at the fingerprint"
            if changed
            else f"ssh{port} {login} once by hand, and compare the fingerprint",
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


def ssh_refused(name: str, host: Host, stderr: str, verbose: str) -> HostError:
    """Why a host that answers lets nobody in, from what ssh said of a second attempt with -v."""
    login, port = _login(host)
    refused = next(line.strip() for line in stderr.splitlines() if REFUSED.search(line))
    methods = re.search(r"\(([\w,-]+)\)\.?$", refused)
    whom = re.match(r"(\S+@\S+): Permission denied", refused)
    named = str(Path(host.identity_file).expanduser()) if host.identity_file else None
    keys = re.findall(r"(?:Offering public key|Server accepts key): (\S+)", verbose)
    key = named or (keys[-1] if keys else None)
    own = f"-i {key} " if key and Path(key).exists() else ""
    check = "ssh.key"
    if whom and whom[1].partition("@")[2] not in (host.address, ""):
        check, why = "ssh.auth", f"{whom[1]}, on the way to it, does not let this machine in"
        hint = f"ssh {whom[1]}, by hand, says more"
    elif re.search(r"too many authentication failures", stderr, re.IGNORECASE):
        why = "this machine offered more keys than its server listens to"
        hint = f"name the right one: [hosts.{name}] identity_file"
    elif re.search(r"partial success", verbose, re.IGNORECASE):
        check, why = "ssh.auth", "it asks for more than a key, which nobody is there to give"
        hint = "a key alone must do: see its sshd_config"
    elif re.search(r"agent refused|sign_and_send_pubkey: signing failed", verbose):
        why, hint = f"the agent does not sign with {key}", "ssh-add -l; a card wants its PIN, an agent perhaps a yes"
    elif found := re.search(r"Permissions (\d+) for '([^']+)' are too open", verbose):
        why, hint = f"others may read its key {found[2]} (mode {found[1]}): ssh leaves it out", f"chmod 600 {found[2]}"
    elif named and not Path(named).exists():
        why = f"identity_file {named} is not there"
        hint = f"ls ~/.ssh, and name the key's file in [hosts.{name}] identity_file"
    elif found := re.search(r'Load key "([^"]+)": Permission denied', verbose):
        why, hint = f"its key {found[1]} cannot be read", f"sudo chown $(id -un) {found[1]}; chmod 600 {found[1]}"
    elif found := re.search(r'Load key "([^"]+)": (?:error in libcrypto|invalid format)', verbose):
        why, hint = f"{found[1]} is no private key", f"ssh-keygen -y -f {found[1]} says more"
    elif own and re.search(r"Server accepts key|incorrect passphrase|bad passphrase|read_passphrase", verbose):
        why, hint = f"its key {key} has a passphrase, and no agent that has it", f"ssh-add {key}"
    elif methods and "publickey" not in methods[1].split(","):
        why = f"its server takes no keys, only: {methods[1].replace(',', ', ')}"
        hint = f"on {name}: PubkeyAuthentication yes in /etc/ssh/sshd_config, then sudo systemctl reload ssh"
    elif key is None:
        why, hint = "this user has no key to show", f"ssh-keygen -t ed25519, then ssh-copy-id{port} {login}"
    else:
        check, why = "ssh.auth", f"it does not accept {key}"
        hint = f"ssh-copy-id {own}{port.strip()}{' ' if port else ''}{login}"
    return HostError(f"{name}: ssh was refused: {why}: {refused}", check=check, host=name, hint=hint, output=stderr)


def login_failure(name: str, what: str, output: str) -> HostError:
    """Somebody was let in, and then no command ran: the account's shell, or what it reads first."""
    return HostError(
        f"{name}: ssh logs in, and the login shell there {what}",
        check="ssh.shell",
        host=name,
        hint=f"on {name}: getent passwd $(id -un) names the shell; ~/.bashrc and ~/.profile must do nothing but set "
        "variables where no terminal is ([[ $- == *i* ]] || return), and sshd_config must force no command on you",
        output=output,
    )


def _login(host: Host) -> tuple[str, str]:
    """As it is typed after `ssh`: whom, and -p."""
    return (f"{host.user}@{host.address}" if host.user else host.address), (f" -p {host.port}" if host.port else "")


def _no_python(name: str, python: str, status: int | None, stderr: str) -> HostError:
    last = [line for line in stderr.splitlines() if line.strip()][-1:]
    if last and last[0].startswith(TOO_OLD):
        return HostError(
            f"{name}: {python} is python {last[0].removeprefix(TOO_OLD)}; evener needs 3.11 there, and 3.8 to look",
            check="version.python",
            host=name,
            hint=f'[hosts.{name}] python = "…", another one there; or install one: sudo apt install python3-venv, '
            "or uv python install 3.12",
            output=stderr,
        )
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
