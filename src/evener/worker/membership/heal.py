"""Transfer the state of a rank that trains to joining ranks: weights, the states of optimizers, schedulers and other
objects that the program registered, and the results of the warmup.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from evener.core.decoding import from_json
from evener.core.errors import UsageError
from evener.core.rundir import code_hash
from evener.worker import rng
from evener.worker.checkpoint import put_weights
from evener.worker.handover import hand_over
from evener.worker.keeper import Keeper
from evener.worker.membership import Learner

WEIGHTS = "weights"


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The header that precedes the states."""

    code: str
    moved: list[str]  # names of buffers that forward mutates


def heal(learner: Learner, keeper: Keeper, step: int, *, source: int, lacks: Sequence[int]) -> None:
    """Give the joining ranks the state of the source before `step`. All ranks call it together."""
    group, trained = learner.group, learner.trained
    header = Known(code=code_hash(), moved=sorted(learner.moved))
    source_header = from_json(group.gather(msgspec.json.encode(header))[source], Known)
    if group.rank in lacks and source_header.code != header.code:
        hint = "run evener setup, which installs the same on all hosts, then evener add RUN --host HOST"
        raise UsageError("code.mismatch: this host's evener code differs from that of the hosts that train", hint=hint)
    own_states = (
        {WEIGHTS: learner.sync.agreed(trained.weights())} | trained.state_dicts() if group.rank == source else {}
    )
    states = hand_over(own_states, group, source=source, lacks=lacks)
    if group.rank in lacks:
        put_weights(states.pop(WEIGHTS), trained.weights(), keeper.folder)
        trained.load_states(states)
        learner.moved |= set(source_header.moved)
        rng.begin(learner.spec.train.seed, step, group.number)
