"""With which exact command and environment is a run started? Pure: what it returns can be printed and typed."""

from __future__ import annotations

import sys
from pathlib import Path

from evener.core.machine import usable_cores
from evener.core.spec import RunSpec, to_flags

GRACE_S = 3600  # torchrun's patience after it was told to stop: a worker saves first, and our launcher ends what hangs


def worker_argv(spec: RunSpec, *, resume: bool = False) -> list[str]:
    """The command of a run on this machine."""
    assert spec.out is not None
    args = [*to_flags(spec), *(["--resume"] if resume else [])]
    return module_argv(spec.machine.ranks, "evener.worker", args, Path(spec.out) / "logs")


def module_argv(num_ranks: int, module: str, args: list[str], logs: Path) -> list[str]:
    """The module itself for one process, torchrun over `num_ranks` of it for more."""
    return [sys.executable, *(_torchrun(num_ranks, logs) if num_ranks > 1 else []), "-m", module, *args]


def _torchrun(num_ranks: int, logs: Path) -> list[str]:
    return [
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",  # a port that is free
        "--local-addr=127.0.0.1",
        "--monitor-interval=0.1",
        f"--log-dir={logs / 'torchrun'}",
        f"--shutdown-timeout={GRACE_S}",
    ]


def worker_env(spec: RunSpec) -> dict[str, str]:
    """What is set on top of the caller's environment."""
    threads = spec.machine.threads or max(1, usable_cores() // spec.machine.ranks)
    return {"OMP_NUM_THREADS": str(threads), "EVENER_LOGS": "1", "PYTHONUNBUFFERED": "1"}
