"""Change a lab's network from outside: run network.py as a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from evener.core.base.errors import EvenerError


class NetworkProcess:
    """network.py as a separate process: started early, so that its imports overlap with other work; called once."""

    def __enter__(self) -> NetworkProcess:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "evener.lab.network"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return self

    def call(self, controller_pid: int, rootless: bool, **calls: dict[str, Any]) -> None:
        """Call methods of network.py's `LabNetwork` in order: name=arguments. Raises EvenerError if one fails."""
        output, _ = self._process.communicate(
            json.dumps({"desk": controller_pid, "rootless": rootless, "calls": list(calls.items())})
        )
        if self._process.returncode:
            raise EvenerError(f"cannot change the lab's network: {', '.join(calls)}", output=output[-2000:])

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
