"""Entry point of one rank of a training run: `torchrun --nproc-per-node 2 -m evener.worker [SPEC.toml] --steps 100 …`.

The flags are those of `evener train`, except --ranks, which torchrun sets. `--resume` resumes the run in --out.
"""

from __future__ import annotations

import os
import sys

from evener.worker.pulse import begin_pulse

if __name__ == "__main__":
    begin_pulse()  # torch may hang while it is imported

import msgspec

from evener.core.errors import EvenerError
from evener.core.machine import end_with
from evener.core.plan import told_roster
from evener.core.resolve import resolve
from evener.core.spec import parse_args
from evener.core.world import REGROUP, agent_pid, hosts_come_and_go, ranks_live_on
from evener.corpus.check import check_token_ids
from evener.worker.group import leave
from evener.worker.membership.back import Regroup
from evener.worker.mistakes import exit_status, in_words


def main() -> int:
    args = sys.argv[1:]
    resume = "--resume" in args
    if ranks_live_on():  # without its agent nobody would announce the next epoch
        end_with(agent_pid())
    try:
        spec = parse_args([arg for arg in args if arg != "--resume"])
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        spec = msgspec.structs.replace(spec, machine=msgspec.structs.replace(spec.machine, ranks=ranks))
        resolved = resolve(
            spec,
            resume=resume,
            in_world=hosts_come_and_go(),
            roster=told_roster(),
            ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )
        check_token_ids(resolved.corpus)
        from evener.worker.loop import train

        train(resolved)
    except Regroup:
        return REGROUP
    except EvenerError as error:
        print(in_words(error), file=sys.stderr)
        return exit_status(error)
    return 0


if __name__ == "__main__":
    leave(main())
