"""Change the sync strategy between two steps of a run, also between equal and drifting replicas.

    equal → drifting     replicas drift from the weights and optimizer states that all ranks have; the outer momentum
                         starts at 0
    drifting → equal     the replicas are merged as at the end of a run, residuals included, and all ranks take over the
                         optimizer states of the first rank that learns

No update is lost: what a lossy strategy has not sent yet goes out before replicas drift, in a step with exact sums. The
outer momentum is dropped at a merge, as at the end of a run.
"""

from __future__ import annotations

from evener.core.run.roster import Roster
from evener.worker.membership import TrainerView
from evener.worker.state.send_states import send_states
from evener.worker.sync.sync_factory import make_sync


def change_strategy(trainer: TrainerView, roster: Roster) -> None:
    """Synchronize by the Roster's strategy from its first step on. All ranks call it together, between two steps.

    If it fails, a rank cannot go on: its replica may be merged or not.
    """
    previous = trainer.sync
    previous.merge_replicas()
    if previous.drifts:
        _share_optimizer_states(trainer)
    replace_sync(trainer, roster)


def replace_sync(trainer: TrainerView, roster: Roster) -> None:
    """Put the Roster's strategy in the place of another one, whose state is discarded."""
    state, recorder = trainer.training_state, trainer.recorder
    state.sync.unwrap()
    state.sync = make_sync(roster, trainer.group, recorder.clock, recorder.lap, state.module)
    state.sync.wrap(state.module, all_params_used=state.all_params_used, is_under_way=True)
    recorder.adopt_strategy(roster)


def _share_optimizer_states(trainer: TrainerView) -> None:
    """Give all ranks the optimizer states of the first rank that learns, and whatever else is saved with them."""
    state, group = trainer.training_state, trainer.group
    source = group.all_gather(state.is_learning, bool).index(True)
    own = {name: one for name, one in state.state_dicts().items() if name != "sync"}
    others = [rank for rank in range(group.world_size) if rank != source]
    received = send_states(own, group, source=source, receivers=others)
    if group.rank != source:
        state.load_state_dicts(received)
    state.is_learning = True
