"""Transfer the state of a rank that trains to joining ranks: weights, the states of optimizers, schedulers and other
objects that the program registered, and the results of the warmup.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.core.base.errors import UsageError
from evener.core.run.rundir import code_hash
from evener.worker.membership import TrainerView
from evener.worker.state import rng
from evener.worker.state.checkpoint import copy_weights
from evener.worker.state.checkpointer import Checkpointer
from evener.worker.state.send_states import send_states

WEIGHTS = "weights"


class TransferHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The message that each rank gathers before the source sends its states."""

    code_hash: str
    changed_buffers: list[str]  # names of buffers that forward mutates


def transfer_state(
    trainer: TrainerView, checkpointer: Checkpointer, step: int, *, source: int, joining_ranks: Sequence[int]
) -> None:
    """Send the state that rank `source` has before `step` to the joining ranks. All ranks call it together.

    Raise UsageError on a joining rank whose evener code differs from the source's.
    """
    group, trained = trainer.group, trainer.training_state
    header = TransferHeader(code_hash=code_hash(), changed_buffers=sorted(trainer.changed_buffers))
    source_header = group.all_gather(header, TransferHeader)[source]
    if group.rank in joining_ranks and source_header.code_hash != header.code_hash:
        hint = "run evener setup, which installs the same on all hosts, then evener add RUN --host HOST"
        raise UsageError("code.mismatch: this host's evener code differs from that of the hosts that train", hint=hint)
    own_states = (
        {WEIGHTS: trainer.sync.synced_weights(trained.named_weights())} | trained.state_dicts()
        if group.rank == source
        else {}
    )
    states = send_states(own_states, group, source=source, receivers=joining_ranks)
    if group.rank in joining_ranks:
        copy_weights(states.pop(WEIGHTS), trained.named_weights(), checkpointer.run_folder)
        trained.load_state_dicts(states)
        trainer.changed_buffers |= set(source_header.changed_buffers)
        rng.seed_generators(trainer.spec.train.seed, step, group.member_rank)
