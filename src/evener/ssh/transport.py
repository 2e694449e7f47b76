"""Transports: start Python on this machine, or on another by one fixed command over the user's own ssh.

Everything else is sent on its stdin, so nothing is ever quoted for a shell. `ssh/session.py` has the protocol.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from evener.core.base.errors import HostError
from evener.core.base.shell import quote_word
from evener.core.cluster.fleet_file import HostConfig

CONNECT_TIMEOUT_S = 5
KEEPALIVE_INTERVAL_S = 5  # a connection without a reply for three of these is dead
# The line that has the cause; with a jump host or a ProxyCommand, later lines only say that there is no connection.
CONNECT_FAILED = re.compile(r"connect to host|could not resolve hostname|open failed: connect failed", re.IGNORECASE)
VERBOSE_TIMEOUT_S = 2.0  # enough for ssh -v to print the steps of a login
SMALL_PACKETS_TIMEOUT_S = 1.0  # the same, with small packets only
AUTH_REFUSED = re.compile(r"permission denied \(|too many authentication failures|no supported auth", re.IGNORECASE)
HOST_KEY_CHANGED = "is another than ssh remembers"  # its host key; `has_foreign_host_key` matches this text
AUTHENTICATED = "Authenticated to"  # printed by ssh -v
# With one algorithm of each kind instead of all, no message before the login is longer than 1200 bytes.
SMALL_PACKET_OPTIONS = ("-o", "KexAlgorithms=curve25519-sha256", "-o", "Ciphers=aes128-ctr", "-o", "MACs=hmac-sha2-256")
LOGIN_DISABLED = re.compile(r"account is (?:currently )?not available", re.IGNORECASE)  # nologin(8)
LOGIN_MARKER = "evener-logged-in"  # printed by a login shell that runs our command
STDOUT_REDIRECTED = "sends what commands print to stderr"
STDOUT_LOST = "runs commands, and what they print is lost"
# Files that a shell reads when sshd starts it for a command, and what in them keeps the command from answering.
STARTUP_FILES = (
    "~/.bashrc ~/.bash_profile ~/.bash_login ~/.profile ~/.zshenv ~/.zshrc ~/.ssh/rc /etc/bash.bashrc /etc/profile "
    "/etc/zsh/zshenv"
)
STARTUP_COMMANDS = (
    r"(^|[[:space:];&|])(exec|exit|logout|read|sleep|cat|tmux|screen|byobu|zellij|bash|zsh|fish)([[:space:];]|$)"
)
INTERACTIVE_GUARD = "case $- in *i*) ;; *) return ;; esac"  # for sh, bash and zsh
STARTUP_LINE_MARKER, DIAGNOSED = "evener-startup-line", 57
# Prints the suspicious lines. It is passed as the command and on stdin: a shell that .bashrc starts reads stdin.
DIAGNOSIS = (
    f'for file in {STARTUP_FILES}; do case $file in "$HOME"/*) name="~${{file#"$HOME"}}" ;; *) name=$file ;; esac; '
    f"grep -nE '{STARTUP_COMMANDS}' \"$file\" 2>/dev/null "
    f'| while read -r line; do echo "{STARTUP_LINE_MARKER} $name:$line" >&2; done; done; exit {DIAGNOSED}'
)
STDIN_CONSUMED = "read what was meant for the program"
PYTHON_TOO_OLD = "evener needs another python than "
# Reads a program's length and text from stdin and runs it. It sees no PYTHON… variables, no user packages and no files
# of the folder in which it starts: `doctor` is to detect another torch or queue there, not to fail by it.
BOOTSTRAP = (
    f"import sys;sys.version_info<(3,8)and sys.exit('{PYTHON_TOO_OLD}'+sys.version.split()[0]);"
    "sys.path=[p for p in sys.path if p];"
    "exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
)
PYTHON_FLAGS = ("-I", "-u")  # -I: neither variables nor the current folder name modules


class Transport(Protocol):
    """Starts Python on one machine."""

    name: str

    def start(self) -> subprocess.Popen[bytes]:
        """Start a python there that runs the program it is sent; stdin, stdout and stderr are pipes."""

    def explain_failure(self, status: int | None, stderr: str, stdout: str) -> HostError:
        """Return why the python never answered; `status` is None while the process is still running."""


class LocalTransport:
    """Starts Python on this machine."""

    def __init__(self, name: str, host: HostConfig) -> None:
        self.name, self._python = name, host.python or sys.executable

    def argv(self) -> list[str]:
        """Return the command line."""
        return [str(Path(self._python).expanduser()), *PYTHON_FLAGS, "-c", BOOTSTRAP]

    def start(self) -> subprocess.Popen[bytes]:
        try:
            return _start_process(self.argv())
        except OSError as error:
            raise self.explain_failure(127, f"{self._python}: {error.strerror}", "") from None

    def explain_failure(self, status: int | None, stderr: str, stdout: str) -> HostError:
        return _python_error(self.name, self._python, status, stderr)


class SSHTransport:
    """Starts Python over ssh; the user's configuration, agent, keys and jump hosts apply."""

    def __init__(self, name: str, host: HostConfig) -> None:
        self.name, self._host = name, host
        self._python = host.python or "python3"

    def argv(self, *more: str) -> list[str]:
        """Return the command line. The host's ssh_options come first and win: ssh takes the first value it meets."""
        host = self._host
        options = [
            *host.ssh_options,
            "BatchMode=yes",  # never prompt: nobody may be there to answer
            f"ConnectTimeout={CONNECT_TIMEOUT_S}",
            f"ServerAliveInterval={KEEPALIVE_INTERVAL_S}",
            "ServerAliveCountMax=3",
            "ClearAllForwardings=yes",
            "ForwardAgent=no",
            "ControlMaster=no",  # use the user's master connection, but never become one
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
        return [
            *argv,
            "--",
            host.address,
            f'echo {LOGIN_MARKER}; {_quote_interpreter(self._python)} {" ".join(PYTHON_FLAGS)} -c "{BOOTSTRAP}"',
        ]

    def start(self) -> subprocess.Popen[bytes]:
        try:
            return _start_process(self.argv())
        except FileNotFoundError:
            raise HostError(
                "this machine has no ssh", check="ssh.unreachable", host=self.name, hint="apt install openssh-client"
            ) from None

    def explain_failure(self, status: int | None, stderr: str, stdout: str) -> HostError:
        if LOGIN_MARKER in stdout:
            if "invalid literal for int()" in stderr:
                return explain_login_failure(self.name, STDIN_CONSUMED, stderr, self._find_startup_line(r"read|cat"))
            if status is None:
                return explain_login_failure(
                    self.name, f"has started {self._python}, which has not answered yet", stderr
                )
            return _python_error(self.name, self._python, status, stderr)
        if "remote command" in stderr:  # "Cannot execute command-line and remote command."
            options = [option for option in self._host.ssh_options if not option.lower().startswith("remotecommand")]
            options.append("RemoteCommand=none")
            return HostError(
                f"{self.name}: ssh's own configuration has a RemoteCommand for it, and runs no other",
                check="ssh.shell", host=self.name, hint=f"[hosts.{self.name}] ssh_options = {json.dumps(options)}",
                output=stderr,
            )  # fmt: skip
        if status not in (255, None):
            output = " ".join(f"{stdout}\n{stderr}".split())[-200:] or "it printed nothing"
            error = explain_login_failure(
                self.name,
                f"ended (exit status {status}) before it ran a command: {output}",
                stderr,
                self._find_startup_line(r"exec|exit|logout|tmux|screen|byobu|zellij|bash|zsh|fish"),
            )
            if LOGIN_DISABLED.search(f"{stdout}\n{stderr}"):
                error.hint = f"on {self.name}: sudo usermod --shell /bin/bash {quote_word(self._host.user or 'USER')}"
            return error
        if AUTH_REFUSED.search(stderr):
            return explain_ssh_refusal(self.name, self._host, stderr, self._retry_verbose(VERBOSE_TIMEOUT_S))
        if LOGIN_MARKER in stderr:
            return explain_login_failure(
                self.name, STDOUT_REDIRECTED, stderr, self._find_startup_line(r"exec\s+\S*[<>]")
            )
        if status is None:
            with ThreadPoolExecutor() as pool:
                diagnosis = pool.submit(self._diagnose_login)
                attempts = [
                    pool.submit(self._retry_verbose, VERBOSE_TIMEOUT_S),
                    pool.submit(self._retry_verbose, SMALL_PACKETS_TIMEOUT_S, *SMALL_PACKET_OPTIONS),
                ]
            verbose, small_packets = (attempt.result() for attempt in attempts)
            ran, lines = diagnosis.result()
            if AUTHENTICATED in verbose and ran:
                return explain_login_failure(
                    self.name, STDOUT_LOST, verbose, _select_startup_line(lines, r"exec\s+\S*[<>&]")
                )
            if AUTHENTICATED in verbose:
                return explain_login_failure(
                    self.name, "has not run a command yet", verbose, _select_startup_line(lines, ".")
                )
            if (
                AUTHENTICATED in small_packets
                and "SSH2_MSG_KEXINIT sent" in verbose
                and "SSH2_MSG_NEWKEYS" not in verbose
            ):
                return self._mtu_black_hole_error(verbose)
        return explain_ssh_failure(self.name, self._host, stderr)

    def _find_startup_line(self, pattern: str) -> str | None:
        """Return the line of a shell's startup file that contains such a command, as "FILE:NUMBER:TEXT"."""
        return _select_startup_line(self._diagnose_login()[1], pattern)

    def _diagnose_login(self) -> tuple[bool, list[str]]:
        """Return whether a command runs there, and the suspicious lines of startup files: "FILE:NUMBER:TEXT"."""
        argv = [*self.argv()[:-1], f"sh -c {shlex.quote(DIAGNOSIS)}"]
        try:
            result = subprocess.run(argv, input=DIAGNOSIS + "\n", capture_output=True, text=True,
                                    timeout=VERBOSE_TIMEOUT_S, errors="replace", check=False)  # fmt: skip
        except (subprocess.TimeoutExpired, OSError):
            return False, []
        lines = [line.partition(f"{STARTUP_LINE_MARKER} ")[2] for line in result.stderr.splitlines()]
        return result.returncode == DIAGNOSED, [line for line in lines if line]

    def _retry_verbose(self, within_s: float, *options: str) -> str:
        """Return what `ssh -v` prints, always in English, about each step of another attempt."""
        try:
            result = subprocess.run(self.argv("-v", *options), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=within_s, errors="replace", check=False)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return (error.stderr or b"").decode(errors="replace")
        return result.stderr

    def _mtu_black_hole_error(self, verbose: str) -> HostError:
        address = self._host.address
        return HostError(
            f"{self.name}: ssh stalls during the key exchange, and logs in when its packets are small: large packets "
            f"to {address} are dropped without an ICMP error",
            check="net.mtu",
            host=self.name,
            hint=f"here, on the interface that `ip route get {quote_word(address)}` names: sudo ip link set dev … mtu "
            "1280; or fix what is on the path: a VPN, a tunnel, a switch with another MTU",
            output=verbose,
        )


def make_transport(name: str, host: HostConfig) -> LocalTransport | SSHTransport:
    """Return the transport for a host."""
    return LocalTransport(name, host) if host.is_local else SSHTransport(name, host)


def explain_ssh_failure(name: str, host: HostConfig, stderr: str) -> HostError:
    """Return why there is no connection, from the output of ssh; exit status 255 alone says only that ssh failed."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    login, port = _login_arguments(host)
    if re.search(r"host key verification failed|identification has changed", stderr, re.IGNORECASE):
        changed = "HAS CHANGED" in stderr
        known = f"[{host.address}]:{host.port}" if host.port else host.address
        return HostError(
            f"{name}: its host key {HOST_KEY_CHANGED if changed else 'is not known to ssh'}",
            check="ssh.hostkey",
            host=name,
            hint=f"is it the same machine, reinstalled, and not another with its address? Then: "
            f"ssh-keygen -R {quote_word(known)}; ssh{port} {login}, and look at the fingerprint"
            if changed
            else f"ssh{port} {login} once by hand, and compare the fingerprint",
            output=stderr,
        )
    cause = next(
        (line for line in lines if CONNECT_FAILED.search(line)),
        lines[-1] if lines else f"no answer within {CONNECT_TIMEOUT_S} s",
    )
    return HostError(
        f"{name}: ssh cannot reach {login}{port}: {cause.removeprefix('ssh: ')}",
        check="ssh.unreachable",
        host=name,
        hint=f"is it on, and does its sshd run? By hand: ssh{port} {login}",
        output=stderr,
    )


def explain_ssh_refusal(name: str, host: HostConfig, stderr: str, verbose: str) -> HostError:
    """Return why a host that answers refused the login, from ssh's output and that of a second attempt with -v."""
    login, port = _login_arguments(host)
    refused = next(line.strip() for line in stderr.splitlines() if AUTH_REFUSED.search(line))
    methods = re.search(r"\(([\w,-]+)\)\.?$", refused)
    denied = re.match(r"(\S+@\S+): Permission denied", refused)
    identity_file = str(Path(host.identity_file).expanduser()) if host.identity_file else None
    keys = re.findall(r"(?:Offering public key|Server accepts key): (\S+)", verbose)
    key = identity_file or (keys[-1] if keys else None)
    identity = f"-i {quote_word(key)} " if key and Path(key).exists() else ""
    check = "ssh.key"
    if denied and denied[1].partition("@")[2] not in (host.address, ""):
        check, reason = "ssh.auth", f"{denied[1]}, a jump host on the way to it, refuses this machine"
        hint = f"ssh {quote_word(denied[1])}, by hand, says more"
    elif re.search(r"too many authentication failures", stderr, re.IGNORECASE):
        reason = "this machine offered more keys than its server allows"
        hint = f"name the right one: [hosts.{name}] identity_file"
    elif re.search(r"partial success", verbose, re.IGNORECASE):
        check, reason = "ssh.auth", "it asks for more than a key, and nobody is there to answer"
        hint = "a key alone must suffice: see its sshd_config"
    elif re.search(r"agent refused|sign_and_send_pubkey: signing failed", verbose):
        reason, hint = (
            f"the agent does not sign with {key}",
            "ssh-add -l; confirm at the agent, or enter the card's PIN",
        )
    elif match := re.search(r"Permissions (\d+) for '([^']+)' are too open", verbose):
        reason, hint = (
            f"others may read its key {match[2]} (mode {match[1]}): ssh ignores it",
            f"chmod 600 {quote_word(match[2])}",
        )
    elif identity_file and not Path(identity_file).exists():
        reason = f"identity_file {identity_file} is not there"
        hint = f"ls ~/.ssh, and name the key's file in [hosts.{name}] identity_file"
    elif match := re.search(r'Load key "([^"]+)": Permission denied', verbose):
        reason, hint = (
            f"its key {match[1]} cannot be read",
            f"sudo chown $(id -un) {quote_word(match[1])}; chmod 600 {quote_word(match[1])}",
        )
    elif match := re.search(r'Load key "([^"]+)": (?:error in libcrypto|invalid format)', verbose):
        reason, hint = f"{match[1]} is no private key", f"ssh-keygen -y -f {quote_word(match[1])} says more"
    elif identity and re.search(r"Server accepts key|incorrect passphrase|bad passphrase|read_passphrase", verbose):
        reason, hint = f"its key {key} has a passphrase, and no agent that has it", f"ssh-add {quote_word(key)}"
    elif methods and "publickey" not in methods[1].split(","):
        reason = f"its server takes no keys, only: {methods[1].replace(',', ', ')}"
        hint = f"on {name}: PubkeyAuthentication yes in /etc/ssh/sshd_config, then sudo systemctl reload ssh"
    elif key is None:
        reason, hint = "this user has no ssh key", f"ssh-keygen -t ed25519, then ssh-copy-id{port} {login}"
    else:
        check, reason = "ssh.auth", f"it does not accept {key}"
        hint = f"ssh-copy-id {identity}{port.strip()}{' ' if port else ''}{login}"
    return HostError(f"{name}: ssh was refused: {reason}: {refused}", check=check, host=name, hint=hint, output=stderr)


def explain_login_failure(name: str, problem: str, output: str, startup_line: str | None = None) -> HostError:
    """Return the error for a login that worked and ran no command: due to the account's shell, or its startup files.

    `startup_line` is the line of a startup file, "FILE:NUMBER:TEXT", that is the likely cause.
    """
    message = f"{name}: ssh logs in, and the login shell there {problem}"
    if startup_line is not None:
        file, number, text = startup_line.split(":", 2)
        home, path = ("~/", file[2:]) if file.startswith("~/") else ("", file)
        sudo = "sudo " if file.startswith("/") else ""
        message += f"; line {number} of {file}: {' '.join(text.split())[:80]}"
        hint = (
            f"on {name}: {sudo}sed -i.old {quote_word(f'{number}i {INTERACTIVE_GUARD}')} {home}{quote_word(path)}  "
            "# the lines below it then run only in terminals"
        )
    else:
        hint = (
            f"on {name}: getent passwd $(id -un) shows the login shell. ~/.bashrc and ~/.profile must print, read and "
            "start nothing without a terminal ([[ $- == *i* ]] || return), and sshd_config must not set ForceCommand"
        )
    return HostError(message, check="ssh.shell", host=name, hint=hint, output=output)


def _select_startup_line(lines: Sequence[str], pattern: str) -> str | None:
    """Return the first line "FILE:NUMBER:TEXT" whose text matches a command, and is no comment.

    The files come from the host: a number that is none, or a file that was not asked for, is not taken.

    >>> _select_startup_line(["~/.bashrc:3:# exec zsh", "~/.bashrc:9:exec 1>&2"], "exec")
    '~/.bashrc:9:exec 1>&2'
    """
    for line in lines:
        file, number, text = [*line.split(":", 2), "", ""][:3]
        if (
            file in STARTUP_FILES.split()
            and number.isdigit()
            and re.search(rf"(^|[\s;&|])({pattern})", text.partition("#")[0])
        ):
            return line
    return None


def _login_arguments(host: HostConfig) -> tuple[str, str]:
    """Return (user@address, " -p PORT") as typed after `ssh`."""
    login = f"{host.user}@{host.address}" if host.user else host.address
    return quote_word(login), (f" -p {host.port}" if host.port else "")


def _python_error(name: str, python: str, status: int | None, stderr: str) -> HostError:
    last_line = [line for line in stderr.splitlines() if line.strip()][-1:]
    if last_line and last_line[0].startswith(PYTHON_TOO_OLD):
        return HostError(
            f"{name}: {python} is python {last_line[0].removeprefix(PYTHON_TOO_OLD)}; evener needs 3.11 there, "
            f"3.8 to inspect",
            check="version.python",
            host=name,
            hint=f'[hosts.{name}] python = "…", another one there; or install one: sudo apt install python3-venv, '
            "or uv python install 3.12",
            output=stderr,
        )
    return HostError(
        f"{name}: {python} does not start there (exit status {status}): {''.join(last_line) or 'it printed nothing'}",
        check="version.python",
        host=name,
        hint=f'install python 3.11 or newer on {name}, or name its interpreter: [hosts.{name}] python = "…"',
        output=stderr,
    )


def _quote_interpreter(path: str) -> str:
    """Quote the interpreter as one word for any shell; a leading ~ is left for the shell to expand."""
    if path.startswith("~/"):
        return "~/" + shlex.quote(path[2:])
    return shlex.quote(path)


def _start_process(argv: list[str]) -> subprocess.Popen[bytes]:
    # In a session of its own: Ctrl-C in the terminal is for the controller to handle.
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
