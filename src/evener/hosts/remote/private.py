"""What does this machine's packet filter say of a table? Standard library only, Python 3.8 or newer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def look(table: str) -> dict[str, Any]:
    """{"has_nft": is there any?, "told": may we ask?, "rules": nft's own JSON, empty of no such table, "ssh_port"}."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    found: dict[str, Any] = {"has_nft": False, "told": False, "rules": [],
                             "ssh_port": int(words[3]) if len(words) == 4 else None}  # fmt: skip
    nft = shutil.which("nft", path=PATH)
    if not sys.platform.startswith("linux") or nft is None:
        return found
    found["has_nft"] = True
    asked = [] if os.geteuid() == 0 else ["sudo", "-n"]
    try:
        done = subprocess.run([*asked, nft, "-j", "list", "table", "inet", table], stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=5, check=False)  # fmt: skip
        if done.returncode == 0:
            found.update(told=True, rules=json.loads(done.stdout.decode())["nftables"])
        else:
            found["told"] = b"No such file or directory" in done.stderr  # nft's words where there is no such table
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        pass
    return found
