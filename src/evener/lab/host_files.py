"""Generate the files of a host (/etc, sshd_config, keys) and the fleet file of a lab."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import subprocess
import sys
from pathlib import Path

from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.shell import quote_word
from evener.lab.lab_requirements import find_programs
from evener.lab.lab_spec import HostSpec
from evener.lab.programs.init import PATH

FLEET_HEAD = "# a lab of evener's"
PROXY = Path(__file__).parent / "programs" / "proxy.py"


def etc_files(name: str, spec: HostSpec, addresses: dict[str, str], home: Path, rootless: bool) -> dict[str, str]:
    """Return the files of a host's /etc that differ from this machine's: name → text."""
    user = pwd.getpwuid(os.getuid())
    shell = user.pw_shell if not user.pw_shell.endswith(("/nologin", "/false")) else ""
    entry = f"{user.pw_name}:*:{user.pw_uid}:{user.pw_gid}:{user.pw_gecos}:{home}:{shell or '/bin/sh'}"
    others = [line for line in Path("/etc/passwd").read_text().splitlines() if line.split(":")[0] != user.pw_name]
    loopback = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    if spec.loopback_hostname:
        loopback.append(f"127.0.1.1 {name}")
        addresses = {other: address for other, address in addresses.items() if other != name}
    differing = {
        "hostname": f"{name}\n",
        "hosts": "".join(
            f"{line}\n" for line in [*loopback, *(f"{address} {host}" for host, address in addresses.items())]
        ),
        "passwd": "".join(f"{line}\n" for line in [entry, *others]),
        "shadow": f"{user.pw_name}:*:1::::::\n",
        "resolv.conf": "# a lab has no name server\n",
    }
    if rootless:  # sshd cannot chown a terminal to a foreign group; without a tty group it does not try
        groups = Path("/etc/group").read_text().splitlines()
        differing["group"] = "".join(f"{line}\n" for line in groups if not line.startswith("tty:"))
    return differing


def sshd_config(folder: Path) -> str:
    """Return the sshd_config of a host; `folder` holds its host key. The key exchange is fast: tests log in often."""
    return f"""\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder.parent.parent}/id_ed25519.pub
PidFile none
StrictModes no
UsePAM no
KexAlgorithms curve25519-sha256
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintLastLog no
PermitUserEnvironment yes
MaxStartups 1000
MaxSessions 1000
AcceptEnv LANG LC_*
SetEnv PATH={PATH}
Subsystem sftp internal-sftp
"""


def make_keys(files: list[Path]) -> None:
    """Create an ed25519 key pair at each path."""
    [keygen] = find_programs("ssh-keygen")
    processes = [
        subprocess.Popen(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-C", "evener-lab", "-f", str(file)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for file in files
    ]  # fmt: skip
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise EvenerError("ssh-keygen cannot create a key", output=output)


def known_hosts(folder: Path, addresses: dict[str, str]) -> str:
    """Return the text of known_hosts: the host keys by address."""
    lines = []
    for name, address in addresses.items():
        kind, key, _ = (folder / "hosts" / name / "host_key.pub").read_text().split()
        lines.append(f"{address} {kind} {key}\n")
    return "".join(lines)


def fleet_text(lab: str, folder: Path, addresses: dict[str, str]) -> str:
    """Return the text of the fleet file, with the settings by which ssh reaches each host."""
    proxy = [sys.executable, "-I", "-S", str(PROXY), str(folder)]
    options = [
        f"ProxyCommand={shlex.join(proxy)} %h %p",
        "ProxyUseFdpass=yes",
        f"UserKnownHostsFile={folder}/known_hosts",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "IdentitiesOnly=yes",
    ]
    user = pwd.getpwuid(os.getuid()).pw_name
    tables = [f"{FLEET_HEAD}: hosts emulated on this machine, until `evener lab down {quote_word(lab)}`\n"]
    for name, address in addresses.items():
        tables.append(
            f"[hosts.{name}]\n"
            f"address = {_quoted(address)}\n"
            f"user = {_quoted(user)}\n"
            f"identity_file = {_quoted(f'{folder}/id_ed25519')}\n"
            f"ssh_options = [\n" + "".join(f"    {_quoted(option)},\n" for option in options) + "]\n"
            f"python = {_quoted(sys.executable)}\n"
        )
    return "\n".join(tables)


def check_fleet_file(file: Path) -> None:
    """Raise UsageError if a fleet file cannot be written or would overwrite one that a user wrote."""
    if not file.resolve().parent.is_dir():
        raise UsageError(f"{file}: no such folder")
    if file.exists() and not (file.is_file() and file.read_text(errors="replace").startswith(FLEET_HEAD)):
        raise UsageError(
            f"{file} is not a lab's fleet file and would be overwritten", hint="--out gives it another name"
        )


def write_fleet_file(file: Path, text: str) -> None:
    """Write the fleet file atomically."""
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(file)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None


def _quoted(text: str) -> str:
    """Return a TOML basic string."""
    return json.dumps(text, ensure_ascii=False)
