"""How is a lab's network changed from outside? By network.py, as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from evener.core.errors import EvenerError


class Switch:
    """network.py as a process of its own: started early, told later what to do."""

    def __enter__(self) -> Switch:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "evener.lab.network"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return self

    def do(self, desk: int, rootless: bool, **calls: dict[str, Any]) -> None:
        """Calls of network.py's Desk, one after the other: name=arguments."""
        said, _ = self._process.communicate(
            json.dumps({"desk": desk, "rootless": rootless, "calls": list(calls.items())})
        )
        if self._process.returncode:
            raise EvenerError(f"the lab's network cannot be changed: {', '.join(calls)}", output=said[-2000:])

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
