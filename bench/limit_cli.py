"""evener's command line, with bench/limit_rank.py in place of evener's own ranks: OPTIONS, then evener's arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from evener.cli.main import main
from evener.launch import commands

if __name__ == "__main__":
    OPTIONS, WORKER_COMMAND = sys.argv.pop(1), commands._worker_command

    def worker_command(*args: Any, **more: Any) -> tuple[list[str], dict[str, str]]:
        (_, module, *flags), env = WORKER_COMMAND(*args, **more)
        assert module == "evener.worker"
        return [str(Path(__file__).with_name("limit_rank.py")), OPTIONS, *flags], env

    commands._worker_command = worker_command
    main()
