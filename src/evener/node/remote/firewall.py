"""Read a table of this machine's packet filter (nftables). Standard library only, Python 3.8 or newer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from evener.node.remote.programs import find_program


def read_nft_table(table: str) -> dict[str, Any]:
    """Return {"has_nft", "is_readable", "rules": nft's own JSON, empty without such a table, "ssh_port"}.

    Reading takes root, or sudo without a password; else "is_readable" is false.
    """
    ssh_connection = os.environ.get("SSH_CONNECTION", "").split()
    answer: dict[str, Any] = {"has_nft": False, "is_readable": False, "rules": [],
                             "ssh_port": int(ssh_connection[3]) if len(ssh_connection) == 4 else None}  # fmt: skip
    nft = find_program("nft")
    if not sys.platform.startswith("linux") or nft is None:
        return answer
    answer["has_nft"] = True
    privilege = [] if os.geteuid() == 0 else ["sudo", "-n"]
    try:
        done = subprocess.run([*privilege, nft, "-j", "list", "table", "inet", table], stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=5, check=False)  # fmt: skip
        if done.returncode == 0:
            answer.update(is_readable=True, rules=json.loads(done.stdout.decode())["nftables"])
        else:
            answer["is_readable"] = (
                b"No such file or directory" in done.stderr
            )  # nft's message if there is no such table
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        pass
    return answer
