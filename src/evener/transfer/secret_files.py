"""The files of a project or data folder that are not sent unless the user names them: keys, passwords and tokens.

The rule is by name, at any depth and whether or not git tracks the file, and by content: a private key under any name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate
from pathlib import Path

from evener.core.base.file_io import open_file
from evener.node.remote.environment import PRIVATE_KEY

SECRET_FOLDERS = frozenset(
    (".ssh", ".aws", ".azure", ".gcloud", ".gnupg", ".huggingface", ".kube", ".docker", ".kaggle")
)
SECRET_NAMES = re.compile("|".join(map(translate, (
    ".env", ".env.*", "*.env", ".envrc", "*.tfvars", "*.tfstate", "*.tfstate.*", "*.keytab",
    "*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx",
    "credentials*", ".credentials*", ".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials", ".pgpass",
    ".htpasswd", ".boto", ".s3cfg", ".vault-token", ".dockercfg", "kaggle.json", "secrets.toml", "secrets.yaml",
    "secrets.yml", "secrets.json", "secret.*",
))))  # fmt: skip
MAX_KEY_FILE_BYTES = 1 << 20  # a private key is looked for in whole files up to this size
PRIVATE_KEY_BYTES = re.compile(PRIVATE_KEY.pattern.encode())
MAX_NAMES_SHOWN = 5


def has_secret_name(path: str) -> bool:
    """Return whether the name of a file, or of a folder above it, says that it holds a secret.

    >>> [has_secret_name(path) for path in ("a/.env.local", ".aws/config", "id_rsa", "id_rsa.pub", "keys.py")]
    [True, True, True, False, False]
    """
    *folders, name = path.lower().split("/")
    return (
        any(folder in SECRET_FOLDERS for folder in folders)
        or SECRET_NAMES.match(name) is not None
        or (name.startswith("id_") and "." not in name)
    )


def has_private_key(path: Path) -> bool:
    """Return whether a file holds a private key. Of a file too large for a key file, its first bytes are read."""
    try:
        with open_file(path) as file:
            return PRIVATE_KEY_BYTES.search(file.read(MAX_KEY_FILE_BYTES)) is not None
    except OSError:
        return False  # whoever sends the file reports it


def is_secret_file(name: str, path: Path) -> bool:
    """Return whether a file may hold a secret; `name` is its path in the tree. A link counts as the file behind it."""
    if has_secret_name(name) or (path.is_symlink() and has_secret_name(path.resolve().as_posix())):
        return True
    return has_private_key(path)


def summarize_names(names: Sequence[str]) -> str:
    """List the first names, and count the others.

    >>> summarize_names([".env", "tls/server.pem"]), summarize_names(list("abcdefgh"))
    ('.env, tls/server.pem', 'a, b, c, d, e and 3 more')
    """
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
