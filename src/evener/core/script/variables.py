"""Environment variables by which the launcher instructs the ranks of a user's program; see `evener.worker.script`."""

from __future__ import annotations

# "", or options separated by commas: no-compat, independent, no-measure, no-gpu, sync=NAME, shares=2:1
OPTIONS_VARIABLE = "EVENER_SCRIPT"
PROGRAM_VARIABLE = "EVENER_PROGRAM"  # JSON: the words of the program, as torchrun takes them
FIRST_RANK_VARIABLE = (
    "EVENER_FIRST_RANK"  # of the host's ranks: the number in the run, also after a restart with others
)
