"""Training state: the models, the optimizers and every other stateful object that a checkpoint must contain."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from evener.core.base.errors import CheckpointError, UsageError
from evener.core.base.units import pluralize
from evener.core.run.roster import Roster
from evener.worker.state import checkpoint
from evener.worker.state.state_serialization import flatten_state
from evener.worker.sync import Sync


class Stateful(Protocol):
    """An object with a state_dict: a learning-rate scheduler, an average of weights, a counter."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, text."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Load a state that `state_dict` returned."""


USER_STATE_PREFIX = "user/"  # prefix of the states that the training program named
StatefulT = TypeVar("StatefulT", bound=Stateful)


class TrainingState:
    """The models, optimizers and other states of one rank, in the order in which the program registered them."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.states: dict[str, Stateful] = {"scaler": scaler}
        self.scaler = scaler
        self._sync: Sync | None = None
        self.is_strategy_on_trial = False  # by --sync auto
        self.all_params_used = False  # whether every pass of a rank that has sequences uses every parameter
        self.is_learning = True  # False: a drifting replica without a share of the batch; its optimizers do not step

    @property
    def module(self) -> nn.Module:
        """The model; several are wrapped in one ModuleList, so that parameter names begin with the model's index."""
        return self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all models; cached, so read it only after the last model was added."""
        return list(self.module.parameters())

    @property
    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def sync(self) -> Sync:
        """The sync strategy in force; its state is saved as "sync". A run with --sync auto may change it."""
        assert self._sync is not None
        return self._sync

    @sync.setter
    def sync(self, sync: Sync) -> None:
        self._sync = self.states["sync"] = sync

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer; raise UsageError if its step() requires a closure."""
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__} runs forward and backward itself, several times a step: what the ranks "
                "exchange would be out of step",
                hint="an optimizer whose step() needs no closure",
            )
        self.optimizers.append(optimizer)
        self.add_state("optimizer" if len(self.optimizers) == 1 else f"optimizer-{len(self.optimizers)}", optimizer)

    def add_state(self, name: str, stateful: Stateful) -> None:
        """Register a stateful object; raise UsageError if it cannot be saved under this name."""
        if name in self.states:
            raise UsageError(f"run.state({name!r}): this name is taken", hint="another name")
        if not (
            callable(getattr(stateful, "state_dict", None)) and callable(getattr(stateful, "load_state_dict", None))
        ):
            raise UsageError(
                f"run.state({name!r}): a {type(stateful).__name__} has no state_dict and load_state_dict",
                hint="pass an object that has these two methods",
            )
        self.states[name] = stateful

    def check_trainable(self) -> None:
        """Raise UsageError if there is nothing to train, or a state that could not be saved."""
        if not self.models:
            raise UsageError("run.steps: no model was given", hint="model = run.model(MyModel()) comes first")
        if not self.optimizers:
            raise UsageError(
                "run.steps: no optimizer was given",
                hint="optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), 3e-4)) comes first",
            )
        for name, part in self.module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                raise UsageError(
                    f"run.steps: {name or 'the model'} has sparse gradients, which are neither clipped nor exchanged",
                    hint="sparse=False, and an optimizer for dense gradients",
                )
        ours = set(self.parameters)
        for optimizer in self.optimizers:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter not in ours:
                    raise UsageError(
                        f"run.steps: {type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that "
                        "no model has: its gradient would stay on each rank, and it would not be saved",
                        hint="run.model(module) for every module that is trained; a loss may be one",
                    )
        for name, state in self.state_dicts().items():
            flatten_state(state, name)
        for optimizer in self.optimizers:
            # torch's schedulers mark the step() that they wrap.
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not self._has_scheduler_of(optimizer):
                raise UsageError(
                    f"run.steps: {type(optimizer).__name__} has a learning-rate scheduler that checkpoints would not "
                    "contain: a resumed run would restart the schedule",
                    hint='scheduler = run.state("scheduler", scheduler)',
                )

    def _has_scheduler_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a registered state is this optimizer's scheduler, or contains a scheduler's state."""
        states = [state for name, state in self.states.items() if name.startswith(USER_STATE_PREFIX)]
        if any(getattr(state, "optimizer", None) is optimizer for state in states):
            return True
        others = [state for state in states if not isinstance(getattr(state, "optimizer", None), torch.optim.Optimizer)]
        return any(_contains_key(state.state_dict(), "_last_lr") for state in others)

    def named_weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name: what is compared across replicas and saved."""
        return checkpoint.named_weights(self.module)

    def state_dicts(self) -> dict[str, Any]:
        """Return the state of every registered object by name: what is saved with the weights."""
        return {name: state.state_dict() for name, state in self.states.items()}

    def user_state_dicts(self) -> dict[str, Any]:
        """Return, by name, the states of the objects that the program registered with `run.state`."""
        return {name: state.state_dict() for name, state in self.states.items() if name.startswith(USER_STATE_PREFIX)}

    def load_state_dicts(self, states: dict[str, Any]) -> None:
        """Load some or all of the states that `state_dicts` returned."""
        for name, state in states.items():
            if state or self.states[name] is not self.scaler:  # a disabled scaler refuses its empty state
                self.states[name].load_state_dict(state)

    def load_checkpoint(self, folder: Path) -> None:
        """Load a checkpoint; raise CheckpointError if its states or weights are those of another program."""
        weights, owners = self.named_weights(), self._state_owners()
        saved = checkpoint.load(folder, weights.get, lambda key: owners.get(key.rpartition("/")[0]))
        for name in sorted(saved.states.keys() ^ self.states.keys()):
            has, lacks = ("it", "this program") if name in saved.states else ("this program", "it")
            raise CheckpointError(f"{folder}: {has} has a state {name!r}, and {lacks} has none")
        checkpoint.copy_weights(saved.weights, weights, folder)
        self.load_state_dicts(saved.states)

    def _state_owners(self) -> dict[str, nn.Parameter]:
        """Return the parameter of each entry of the optimizers' states, by its path, as `flatten_state` names it."""
        named = [(name, state) for name, state in self.states.items() if isinstance(state, torch.optim.Optimizer)]
        return {f"{name}/state/{i}": parameter for name, optimizer in named for i, parameter in
                enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])}  # fmt: skip

    def zero_grad(self) -> None:
        for model in self.models:
            model.zero_grad()


def _contains_key(state: Any, key: str) -> bool:
    """Return whether a dict anywhere in `state` has this key."""
    if isinstance(state, dict):
        return key in state or any(_contains_key(value, key) for value in state.values())
    return isinstance(state, list | tuple) and any(_contains_key(value, key) for value in state)


def batch_norm_names(module: nn.Module) -> list[str]:
    """Return the names of the BatchNorm modules."""
    return [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def check_batch_norm(module: nn.Module, roster: Roster) -> None:
    """Raise UsageError if a BatchNorm's batch statistics would depend on the number of ranks.

    BatchNorm normalizes over a micro-batch. Any split over the machines trains the same model as long as all
    micro-batches have one size: on one rank any size will do, on several it must be that of --micro-batch.
    """
    names = batch_norm_names(module)
    sizes = {size for member in roster.members for size in member.micro_batch_sizes}
    one_size = roster.members[0].micro_batch if roster.world_size > 1 else max(sizes)
    if names and sizes != {one_size}:
        sizes_text = " and ".join(map(str, sorted(sizes)))
        raise UsageError(
            f"{names[0]} is a BatchNorm: it normalizes over a micro-batch; with {pluralize(roster.world_size, 'rank')} "
            f"micro-batches have {sizes_text} sequences: another split of the batch would train another model",
            hint="--micro-batch N that divides every rank's share of --batch; or GroupNorm, which needs no batch",
        )
