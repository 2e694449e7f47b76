"""Entry point of one rank of a training run: `torchrun --nproc-per-node 2 -m evener.worker [SPEC.toml] --steps 100 …`.

The flags are those of `evener train`, except --ranks, which torchrun sets. `--resume` resumes the run in --out.
"""

from __future__ import annotations

import os
import sys

from evener.core.cluster.allocator import use_jemalloc
from evener.worker.record.heartbeat import start_heartbeat

if __name__ == "__main__":
    use_jemalloc()
    start_heartbeat()  # torch may hang while it is imported

import msgspec

from evener.core.base.errors import EvenerError
from evener.core.cluster.host_info import die_with_parent
from evener.core.run.membership_epoch import EXIT_REGROUP, agent_pid, has_dynamic_membership, is_elastic
from evener.core.run.resolve import resolve
from evener.core.run.run_plan import read_launcher_roster
from evener.core.run.run_spec import parse_args
from evener.corpus.token_check import check_token_ids
from evener.worker.membership.rollback import RegroupExit
from evener.worker.rank.process_groups import exit_immediately
from evener.worker.rank.user_errors import format_error, rank_exit_status


def main() -> int:
    args = sys.argv[1:]
    resume = "--resume" in args
    if is_elastic():  # without its agent nobody would announce the next epoch
        die_with_parent(agent_pid())
    try:
        spec = parse_args([arg for arg in args if arg != "--resume"])
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        spec = msgspec.structs.replace(spec, machine=msgspec.structs.replace(spec.machine, ranks=ranks))
        resolved = resolve(
            spec,
            resume=resume,
            has_dynamic_membership=has_dynamic_membership(),
            roster=read_launcher_roster(),
            num_local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )
        check_token_ids(resolved.corpus)
        from evener.worker.train.loop import train

        train(resolved)
    except RegroupExit:
        return EXIT_REGROUP
    except EvenerError as error:
        print(format_error(error), file=sys.stderr)
        return rank_exit_status(error)
    return 0


if __name__ == "__main__":
    exit_immediately(main())
