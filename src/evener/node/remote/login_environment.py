"""The variables of a login environment that are left out of the ranks' environment, and why.

A launcher tells its processes their rank, world size and rendezvous by variables. What an earlier experiment exported,
or another launcher set for the session in which evener runs, would reach ranks that evener starts.
"""

from __future__ import annotations

import re
from typing import Mapping  # noqa: UP035  python 3.8

# Set by torchrun, Slurm, Open MPI, MPICH and Intel MPI, MVAPICH, PMIx, LSF, Flux, and by evener for its own processes.
LAUNCHER_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_|CROSS_)?(RANK|WORLD_SIZE)|ROLE_NAME|NPROC_PER_NODE|NNODES|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_\w+|SLURM_\w+|OMPI_\w+|(PMI|PMIX|MPI|I_MPI|HYDRA|HYDI|MV2|PALS|FLUX|JSM|PRTE)_\w+"
    r"|EVENER_(AGENT|FAILURES|JOINED|ROSTER|SAYINGS|WORLD)"
)
# Other values of TORCH_DISTRIBUTED_DEBUG keep ranks from starting: DETAIL wraps process groups, which ends ranks that
# exchange gradients in hooks by SIGSEGV, and hangs if only some hosts set it; an unknown value ends `import torch`.
SAFE_DEBUG_LEVELS = ("OFF", "INFO")


def launcher_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that a launcher has set.

    >>> launcher_variables({"PATH": "/bin", "RANK": "0", "SLURM_NTASKS": "2", "RANKING": "1"})
    ['RANK', 'SLURM_NTASKS']
    """
    return sorted(name for name in environment if LAUNCHER_VARIABLES.fullmatch(name))


def debug_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables for debugging with values that keep ranks from starting or training.

    >>> debug_variables({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}), debug_variables({"TORCH_DISTRIBUTED_DEBUG": "INFO"})
    (['TORCH_DISTRIBUTED_DEBUG'], [])
    """
    level = environment.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    return [] if level.upper() in SAFE_DEBUG_LEVELS else ["TORCH_DISTRIBUTED_DEBUG"]


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a login environment that ranks get."""
    left_out = {*launcher_variables(environment), *debug_variables(environment)}
    return {name: value for name, value in environment.items() if name not in left_out}
