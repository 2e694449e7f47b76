"""Import machines from an ssh configuration, read as ssh_config(5) says: the first value that applies counts.

A machine is an alias: a word of a `HostConfig` line that is not a pattern. `Include` is followed; of `Match`, which may
run programs, only `Match all` is read.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from evener.core.base.errors import EvenerError, UsageError
from evener.core.cluster.fleet_file import HostConfig
from evener.sources.import_hosts import (
    DEFAULT_SSH_PORT,
    MAX_HOSTS,
    USERNAME_PATTERN,
    VALID_PORTS,
    HostList,
    ImportedHost,
    SkippedHost,
    is_ssh_address,
    read_text_file,
)

MAX_INCLUDE_DEPTH = 16  # nested Include, as in ssh
MAX_LINES = 50_000  # of all files together
# Keywords whose value is the rest of the line as written.
RAW_KEYWORDS = ("proxycommand", "localcommand", "remotecommand", "knownhostscommand")
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


class HostPatterns:
    """The patterns of a Host line; `aliases` are those that name one machine.

    >>> gpus = HostPatterns("gpu-*", "!gpu-9", "attic")
    >>> gpus.match("gpu-1"), gpus.match("gpu-9"), gpus.match("attic"), gpus.aliases
    (True, False, True, ['attic'])
    """

    def __init__(self, *words: str) -> None:
        self.aliases = [word for word in words if word and not set(word) & set("*?!")]
        self._names = frozenset(self.aliases)
        self._negated = [_compile_pattern(word[1:]) for word in words if word.startswith("!")]
        self._wildcards = [
            _compile_pattern(word) for word in words if word not in self._names and not word.startswith("!")
        ]

    def match(self, alias: str) -> bool:
        """Return whether the line applies to the alias typed after `ssh`."""
        if any(pattern.match(alias) for pattern in self._negated):
            return False
        return alias in self._names or any(pattern.match(alias) for pattern in self._wildcards)


SshSettings = dict[str, list[str]]  # by keyword in lower case: the first value counts


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern.replace("[", "[[]")))


MATCH_NONE, MATCH_ALL = HostPatterns(), HostPatterns("*")


class SshConfigBlock(NamedTuple):
    """Settings and their conditions: the Host line above them, and those above each Include that led to them."""

    conditions: tuple[HostPatterns, ...]
    settings: list[tuple[str, str]]


class SshConfig(NamedTuple):
    """The blocks of all files, in the order in which ssh reads them."""

    blocks: list[SshConfigBlock]
    files: set[Path]

    @property
    def aliases(self) -> list[str]:
        """Return each alias once, without those to which no block that names them applies."""
        aliases = {
            alias: None
            for block in self.blocks
            for alias in block.conditions[-1].aliases
            if all(patterns.match(alias) for patterns in block.conditions)
        }
        return list(aliases)

    def settings_for(self, alias: str) -> SshSettings:
        """Return the settings that apply to an alias."""
        values: SshSettings = {}
        for block in self.blocks:
            if all(patterns.match(alias) for patterns in block.conditions):
                for keyword, value in block.settings:
                    values.setdefault(keyword, []).append(value)
        return values


def resolve_hostname(alias: str, settings: SshSettings) -> str:
    """Return the host name that ssh would connect to, in lower case."""
    template = settings.get("hostname", ["%h"])[0]
    return re.sub("%[h%]", lambda match: alias if match[0] == "%h" else "%", template).lower()


def import_ssh_config(file: Path | None = None) -> HostList:
    """Return the machines of ~/.ssh/config, or of another file, by their aliases.

    The settings of a file that ssh does not read by itself are written out, as evener does not call `ssh -F FILE`.
    """
    default_file = Path.home() / ".ssh" / "config"
    path = file or default_file
    if file is None and not default_file.exists():
        raise UsageError(f"{default_file}: no such file: ssh knows no hosts by name", hint=MANUAL_HINT)
    config = parse_ssh_config(path)
    if not config.aliases:
        raise UsageError(f"{path}: no Host line of it names a machine", hint=MANUAL_HINT)
    is_known = path.resolve() in _default_config_files(default_file)
    listing = HostList()
    machines: dict[tuple[str, ...], str] = {}
    for alias in config.aliases:
        settings = config.settings_for(alias)
        address = resolve_hostname(alias, settings)
        route = [settings.get(keyword, [""])[0] for keyword in ("port", "proxyjump", "proxycommand")]
        same = machines.setdefault((address, *route), alias)
        if reason := _exclusion_reason(alias, address, settings, same):
            listing.skipped.append(SkippedHost(alias, reason))
        else:
            host = (
                HostConfig(address=alias)
                if is_known
                else _host_from_settings(f"{path}: Host {alias}", address, settings)
            )
            listing.hosts.append(ImportedHost(alias, host))
    if not is_known and listing.hosts:
        listing.notes.append(
            f"ssh does not read {path} by itself, so its settings for each host are written out, except Match; "
            f"with `Include {path.resolve()}` in ~/.ssh/config the aliases alone would suffice"
        )
    return listing


def parse_ssh_config(file: Path) -> SshConfig:
    """Parse a configuration with all that it includes. UsageError if ssh, too, would refuse it."""
    config = SshConfig([], set())
    _SshConfigParser(config).read(file, (), [])
    return config


class _SshConfigParser:
    """Parses one file after the other into blocks."""

    def __init__(self, config: SshConfig) -> None:
        self._config, self._lines, self._num_patterns = config, 0, 0

    def read(self, file: Path, outer: tuple[HostPatterns, ...], parents: list[Path]) -> None:
        if len(parents) > MAX_INCLUDE_DEPTH:
            raise UsageError(f"{parents[0]}: files include each other without end: … {parents[-1]}, {file}, …")
        lines = read_text_file(file).split("\n")
        self._config.files.add(file.resolve())
        self._lines += len(lines)
        if self._lines > MAX_LINES:
            raise UsageError(f"{(parents or [file])[0]}: more than {MAX_LINES} lines with all that it includes")
        block = self._block((*outer, MATCH_ALL))
        for number, line in enumerate(lines, 1):
            keyword, words = _parse_line(line, f"{file}, line {number}")
            if keyword == "host":
                self._num_patterns += len(words)
                if self._num_patterns > MAX_HOSTS:
                    raise UsageError(f"{file}, line {number}: more than {MAX_HOSTS} names and patterns of hosts")
                block = self._block((*outer, HostPatterns(*words)))
            elif keyword == "match":
                block = self._block((*outer, MATCH_ALL if [word.lower() for word in words] == ["all"] else MATCH_NONE))
            elif keyword == "include":
                for path in _included_files(words):
                    self.read(path, block.conditions, [*parents, file])
                block = self._block(block.conditions)
            elif keyword:
                block.settings.append((keyword, " ".join(words)))

    def _block(self, conditions: tuple[HostPatterns, ...]) -> SshConfigBlock:
        self._config.blocks.append(SshConfigBlock(conditions, []))
        return self._config.blocks[-1]


def _parse_line(line: str, where: str) -> tuple[str, list[str]]:
    """Parse `HostName = attic.lan  # comment` into (keyword in lower case, words)."""
    match = re.match(r'\s*"?([^\s="#]+)"?[ \t]*=?[ \t]*', line)
    if match is None:
        return "", []
    keyword, rest = match[1].lower(), line[match.end() :]
    if keyword in RAW_KEYWORDS:
        return keyword, [rest.strip()]
    try:
        return keyword, list(_split_words(rest))
    except ValueError:
        raise UsageError(f"{where}: a quotation mark that is not closed") from None


def _split_words(text: str) -> Iterator[str]:
    """Split words as ssh does; ValueError for a quotation that is not closed.

    >>> list(_split_words("gpu-1 'two words' # a comment"))
    ['gpu-1', 'two words']
    """
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        if text[position] == "#":
            return
        word, quote = [], ""
        while position < len(text) and (quote or not text[position].isspace()):
            char, following = text[position], text[position + 1 : position + 2]
            if char == "\\" and following and (following in "'\"\\" or (following == " " and not quote)):
                word.append(following)
                position += 1
            elif char == quote:
                quote = ""
            elif not quote and char in "'\"":
                quote = char
            else:
                word.append(char)
            position += 1
        if quote:
            raise ValueError(text)
        yield "".join(word)


def _included_files(words: list[str]) -> Iterator[Path]:
    """Yield the files that exist; a relative name is relative to ~/.ssh, whichever file includes it."""
    for word in words:
        path = os.path.join(Path.home() / ".ssh", os.path.expanduser(word))
        yield from (Path(match) for match in sorted(glob.glob(path)) if not os.path.isdir(match))


def _default_config_files(default_file: Path) -> set[Path]:
    """Return the files that ssh reads by itself."""
    try:
        return parse_ssh_config(default_file).files | {Path("/etc/ssh/ssh_config")}
    except EvenerError:  # it is missing or broken, which is not the question here
        return {Path("/etc/ssh/ssh_config")}


def _exclusion_reason(alias: str, address: str, settings: SshSettings, same: str) -> str:
    """Return why an alias is not a machine to train on; "" if it may be one."""
    names = (alias.lower(), address)
    if (
        any(name == forge or name.endswith(f".{forge}") for name in names for forge in GIT_FORGES)
        or any(GIT_FORGE_PATTERN.match(name) for name in names)
        or settings.get("user", [""])[0] in ("git", "gerrit", "aur")
        or settings.get("port", [""])[0] == GERRIT_PORT
    ):
        return "a git forge"
    if alias == "local":
        return "that name means this machine in a fleet file: ssh needs another alias for it"
    if not is_ssh_address(alias):
        return "not a name that every ssh accepts"
    return f"the same machine as {same}" if same != alias else ""


def _host_from_settings(where: str, address: str, settings: SshSettings) -> HostConfig:
    """Return the settings of an alias as a host of fleet.toml."""
    user, port = settings.get("user", [None])[0], settings.get("port", [str(DEFAULT_SSH_PORT)])[0]
    keys = settings.get("identityfile", [])
    if not is_ssh_address(address):
        raise UsageError(f"{where}: HostName {address!r} is neither a name nor an IP address")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) not in VALID_PORTS:
        raise UsageError(f"{where}: Port {port!r}: expected a whole number to {VALID_PORTS[-1]}")
    if user is not None and not USERNAME_PATTERN.fullmatch(user):
        raise UsageError(f"{where}: User {user!r}: expected a login name")
    options = [f"{key}={settings[key.lower()][0]}" for key in COPIED_OPTIONS if key.lower() in settings]
    return HostConfig(
        address=address,
        user=user,
        port=int(port) if int(port) != DEFAULT_SSH_PORT else None,
        identity_file=keys[0] if keys else None,
        ssh_options=options + [f"IdentityFile={key}" for key in keys[1:]],
    )
