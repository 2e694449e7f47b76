"""How does a rank that comes learn what the others know? One of them sends it all that it has: weights, the states of
optimizers, schedulers and of what else the program named, and what the others found out in their rehearsal.
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
    """What is told of it before its states come."""

    code: str
    moved: list[str]  # buffers that forward changes


def heal(learner: Learner, keeper: Keeper, step: int, *, source: int, lacks: Sequence[int]) -> None:
    """The ranks at these places become what the source is, before `step`. All ranks call it together."""
    group, trained = learner.group, learner.trained
    known = Known(code=code_hash(), moved=sorted(learner.moved))
    told = from_json(group.gather(msgspec.json.encode(known))[source], Known)
    if group.rank in lacks and told.code != known.code:
        hint = "evener setup brings the same to all; evener add RUN --host HOST then lets it in"
        raise UsageError("code.mismatch: evener is another here than on the hosts that train", hint=hint)
    mine = {WEIGHTS: learner.sync.agreed(trained.weights())} | trained.state_dicts() if group.rank == source else {}
    states = hand_over(mine, group, source=source, lacks=lacks)
    if group.rank in lacks:
        put_weights(states.pop(WEIGHTS), trained.weights(), keeper.folder)
        trained.load_states(states)
        learner.moved |= set(told.moved)
        rng.begin(learner.spec.train.seed, step, group.number)
