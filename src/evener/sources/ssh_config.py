"""Import machines from an ssh configuration: its Host lines name them, and `ssh -G` says what applies to each.

`ssh -G` contacts nobody. A configuration may name programs to run (`Match exec`): ssh starts them with $SHELL, which is
`false` here, so that none runs and no such condition holds.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
from pathlib import Path

from evener.core.base.errors import EvenerError, UsageError
from evener.core.base.shell import quote_word
from evener.core.cluster.fleet_file import HostConfig
from evener.sources.import_hosts import (
    DEFAULT_SSH_PORT,
    MAX_HOSTS,
    USERNAME_PATTERN,
    HostList,
    ImportedHost,
    SkippedHost,
    is_ssh_address,
    read_text_file,
    run_list_reader,
)

MAX_FILES = 256  # with all that are included
# Options copied from a file that ssh does not read by itself, besides the address, user, port and first key of a host.
COPIED_OPTIONS = (
    "ProxyJump", "ProxyCommand", "ProxyUseFdpass", "UserKnownHostsFile", "GlobalKnownHostsFile", "KnownHostsCommand",
    "StrictHostKeyChecking", "CheckHostIP", "HostKeyAlias", "IdentitiesOnly", "IdentityAgent", "CertificateFile",
    "PKCS11Provider", "SecurityKeyProvider", "PubkeyAuthentication", "GSSAPIAuthentication", "PreferredAuthentications",
    "HostKeyAlgorithms", "PubkeyAcceptedAlgorithms", "KexAlgorithms", "Ciphers", "MACs", "AddressFamily", "BindAddress",
    "BindInterface", "ConnectTimeout",
)  # fmt: skip
GIT_FORGES = (
    "github.com", "gitlab.com", "bitbucket.org", "codeberg.org", "gitea.com", "gitee.com", "sr.ht", "dev.azure.com",
    "visualstudio.com", "salsa.debian.org", "gitlab.gnome.org", "framagit.org", "notabug.org", "launchpad.net",
    "aur.archlinux.org", "huggingface.co", "hf.co", "source.developers.google.com",
)  # fmt: skip
GIT_FORGE_PATTERN = re.compile(r"(git|github|gitlab|gitea|forgejo|gerrit|bitbucket|codeberg|git-codecommit)(\.|$)")
GERRIT_PORT = "29418"
MANUAL_HINT = "name the machines: evener fleet init local laptop=192.168.1.28"

SshSettings = dict[str, list[str]]  # by keyword in lower case


def import_ssh_config(file: Path | None = None) -> HostList:
    """Return the machines of ~/.ssh/config, or of another file, by their aliases.

    From a file that ssh does not read by default, settings are copied, as evener does not call `ssh -F FILE`.
    """
    default_file = Path.home() / ".ssh" / "config"
    path = file or default_file
    if file is None and not default_file.exists():
        raise UsageError(f"{default_file}: no such file: ssh knows no hosts by name", hint=MANUAL_HINT)
    aliases, _ = list_aliases(path)
    if not aliases:
        raise UsageError(f"{path}: no Host line of it names a machine", hint=MANUAL_HINT)
    is_known = path.resolve() in _default_config_files(default_file)
    defaults = {} if is_known else read_settings(Path(os.devnull), "localhost")
    listing = HostList()
    machines: dict[tuple[str, ...], str] = {}
    for alias in aliases:
        if not is_ssh_address(alias):
            listing.skipped.append(SkippedHost(alias, "not a name that every ssh accepts"))
            continue
        settings = read_settings(path, alias)
        route = [settings.get(keyword, [""])[0] for keyword in ("hostname", "port", "proxyjump", "proxycommand")]
        same = machines.setdefault(tuple(route), alias)
        if reason := _exclusion_reason(alias, settings, same):
            listing.skipped.append(SkippedHost(alias, reason))
        else:
            host = (
                HostConfig(address=alias)
                if is_known
                else _host_from_settings(f"{path}: Host {alias}", settings, defaults)
            )
            listing.hosts.append(ImportedHost(alias, host))
    if not is_known and listing.hosts:
        listing.notes.append(
            f"ssh does not read {path} by itself, so its settings for each host are written out; "
            f"with `Include {path.resolve()}` in ~/.ssh/config the aliases alone would suffice"
        )
    return listing


def list_aliases(file: Path) -> tuple[list[str], set[Path]]:
    """Return the names on Host lines that are no patterns, each once, and the files read: this and the included."""
    aliases: dict[str, None] = {}
    files: set[Path] = set()
    _collect_aliases(file, aliases, files)
    return list(aliases), files


def _collect_aliases(file: Path, aliases: dict[str, None], files: set[Path]) -> None:
    """Add a file's aliases, and the file itself. An Include below a Host line is only for that line: not read."""
    text = read_text_file(file)
    files.add(file.resolve())
    if len(files) > MAX_FILES:
        raise UsageError(f"{file}: more than {MAX_FILES} files include each other")
    is_for_all = True
    for number, line in enumerate(text.split("\n"), 1):
        match = re.match(r'\s*"?(host|match|include)\b["\s=]\s*=?(.*)', line, re.IGNORECASE)
        if match is None:
            continue
        try:
            keyword, words = match[1].lower(), shlex.split(match[2], comments=True)
        except ValueError as error:
            raise UsageError(f"{file}, line {number}: {str(error).lower()}") from None
        if keyword == "include" and is_for_all:
            for included in _included_files(words):
                if included.resolve() not in files:
                    _collect_aliases(included, aliases, files)
        elif keyword == "host":
            aliases |= dict.fromkeys(word for word in words if word and not set(word) & set("*?!"))
        if keyword != "include":
            is_for_all = [word.lower() for word in words] == (["*"] if keyword == "host" else ["all"])
    if len(aliases) > MAX_HOSTS:
        raise UsageError(f"{file}: more than {MAX_HOSTS} names of hosts")


def _included_files(words: list[str]) -> list[Path]:
    """Return the files that exist; a relative name is relative to ~/.ssh, whichever file includes it."""
    patterns = (os.path.join(Path.home() / ".ssh", os.path.expanduser(word)) for word in words)
    return [Path(path) for pattern in patterns for path in sorted(glob.glob(pattern)) if not os.path.isdir(path)]


def read_settings(file: Path, alias: str) -> SshSettings:
    """Return what `ssh -G` prints for an alias: each setting with its values, also those that have a default."""
    # A name is not looked up, and a keyword that this ssh does not know is no error.
    options = ["-oCanonicalizeHostname=no", "-oIgnoreUnknown=*"]
    shell = shutil.which("false") or "/bin/false"
    done = run_list_reader(
        ["ssh", "-G", "-F", os.path.abspath(file), *options, alias],
        file, {"SHELL": shell}, "install OpenSSH's client: sudo apt install openssh-client",
    )  # fmt: skip
    if done.returncode != 0:
        problem = done.stderr.strip().partition("\n")[0].removeprefix(f"{os.path.abspath(file)}").lstrip(" :")
        raise UsageError(
            f"{file}: not read by ssh: {problem}", hint=f"ssh -G -F {quote_word(file)} {quote_word(alias)}"
        )
    settings: SshSettings = {}
    for line in done.stdout.splitlines():
        keyword, _, value = line.partition(" ")
        settings.setdefault(keyword, []).append(value)
    return settings


def _default_config_files(default_file: Path) -> set[Path]:
    """Return the files that ssh reads by default."""
    try:
        return list_aliases(default_file)[1] | {Path("/etc/ssh/ssh_config")}
    except EvenerError:  # it is missing or broken, which is not the question here
        return {Path("/etc/ssh/ssh_config")}


def _exclusion_reason(alias: str, settings: SshSettings, same: str) -> str:
    """Return why an alias is not a machine to train on; "" if it may be one."""
    names = (alias.lower(), *settings["hostname"])
    if (
        any(name == forge or name.endswith(f".{forge}") for name in names for forge in GIT_FORGES)
        or any(GIT_FORGE_PATTERN.match(name) for name in names)
        or settings["user"][0] in ("git", "gerrit", "aur")
        or settings["port"][0] == GERRIT_PORT
    ):
        return "a git forge"
    if alias == "local":
        return "that name means this machine in a fleet file: ssh needs another alias for it"
    return f"the same machine as {same}" if same != alias else ""


def _host_from_settings(where: str, settings: SshSettings, defaults: SshSettings) -> HostConfig:
    """Return the settings of an alias that differ from ssh's defaults as a host of fleet.toml."""
    own = {keyword: values for keyword, values in settings.items() if values != defaults.get(keyword)}
    address, user, port = settings["hostname"][0], own.get("user", [None])[0], int(settings["port"][0])
    if not is_ssh_address(address):
        raise UsageError(f"{where}: HostName {address!r} is neither a name nor an IP address")
    if user is not None and not USERNAME_PATTERN.fullmatch(user):
        raise UsageError(f"{where}: User {user!r}: expected a login name")
    key, *more_keys = own.get("identityfile", [None])
    options = [f"{option}={own[option.lower()][0]}" for option in COPIED_OPTIONS if option.lower() in own]
    return HostConfig(
        address=address,
        user=user,
        port=port if port != DEFAULT_SSH_PORT else None,
        identity_file=key,
        ssh_options=options + [f"IdentityFile={one}" for one in more_keys],
    )
