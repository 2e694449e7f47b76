"""What does a run train, and what of it must a checkpoint hold? Models, optimizers, and what else has a state."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from evener.core.errors import CheckpointError, UsageError
from evener.core.roster import Roster
from evener.core.units import plural
from evener.worker import checkpoint
from evener.worker.statetree import pack


class Stateful(Protocol):
    """Anything that can say what it is and become it again: a scheduler, an average of weights, a counter."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: tensors, numbers, text."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take up a state."""


USER = "user/"  # begins the names of states that the program named
Thing = TypeVar("Thing", bound=Stateful)


class Trained:
    """The models and optimizers of one rank, in the order in which the program named them."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.states: dict[str, Stateful] = {"scaler": scaler}
        self.scaler = scaler
        self.learns = True  # where not, its optimizers stand still: a replica that drifts, and has no share now

    @property
    def module(self) -> nn.Module:
        """The model; several as one, so that names of parameters begin with a model's number."""
        return self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)

    @functools.cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Of all models, once no model comes any more."""
        return list(self.module.parameters())

    @property
    def num_params(self) -> int:
        """Of all models."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember it; UsageError for one that wants to run forward itself."""
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__} runs forward and backward itself, several times a step: what the ranks "
                "exchange would be out of step",
                hint="an optimizer whose step() needs no closure",
            )
        self.optimizers.append(optimizer)
        self.add_state("optimizer" if len(self.optimizers) == 1 else f"optimizer-{len(self.optimizers)}", optimizer)

    def add_state(self, name: str, thing: Stateful) -> None:
        """Remember whatever has a state; UsageError where that cannot be saved under this name."""
        if name in self.states:
            raise UsageError(f"run.state({name!r}): there is one of that name", hint="another name")
        if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
            raise UsageError(
                f"run.state({name!r}): a {type(thing).__name__} has no state_dict and load_state_dict",
                hint="give what it knows as an object with these two methods",
            )
        self.states[name] = thing

    def check(self) -> None:
        """UsageError where a program has nothing to train, or what it has could not be saved."""
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
            pack(state, name)
        for optimizer in self.optimizers:
            # torch's schedulers mark the step that they count.
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not self._holds_scheduler_of(optimizer):
                raise UsageError(
                    f"run.steps: {type(optimizer).__name__} has a learning-rate scheduler that checkpoints would not "
                    "hold: a resumed run would begin its schedule again",
                    hint='scheduler = run.state("scheduler", scheduler)',
                )

    def _holds_scheduler_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is one of the program's states its scheduler, or an object that holds a scheduler's state?"""
        things = [thing for name, thing in self.states.items() if name.startswith(USER)]
        if any(getattr(thing, "optimizer", None) is optimizer for thing in things):
            return True
        others = [thing for thing in things if not isinstance(getattr(thing, "optimizer", None), torch.optim.Optimizer)]
        return any(_has_key(thing.state_dict(), "_last_lr") for thing in others)

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name: what replicas are compared by, and what is saved."""
        return checkpoint.weights_of(self.module)

    def state_dicts(self) -> dict[str, Any]:
        """What is saved beside the weights."""
        return {name: thing.state_dict() for name, thing in self.states.items()}

    def user_states(self) -> dict[str, Any]:
        """Of what the program named by itself."""
        return {name: thing.state_dict() for name, thing in self.states.items() if name.startswith(USER)}

    def load_states(self, states: dict[str, Any]) -> None:
        """Become what some of `state_dicts` say."""
        for name, state in states.items():
            if state or self.states[name] is not self.scaler:  # one that scales nothing has nothing to say
                self.states[name].load_state_dict(state)

    def load(self, folder: Path) -> None:
        """Become what a checkpoint holds; CheckpointError where it is of another program."""
        saved = checkpoint.load(folder)
        for name in sorted(saved.states.keys() ^ self.states.keys()):
            has, lacks = ("it", "this program") if name in saved.states else ("this program", "it")
            raise CheckpointError(f"{folder}: {has} has a state {name!r}, and {lacks} has none")
        checkpoint.put_weights(saved.weights, self.weights(), folder)
        self.load_states(saved.states)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for model in self.models:
            model.zero_grad()


def _has_key(state: Any, key: str) -> bool:
    """Somewhere in the dicts and lists of a state."""
    if isinstance(state, dict):
        return key in state or any(_has_key(value, key) for value in state.values())
    return isinstance(state, list | tuple) and any(_has_key(value, key) for value in state)


def batch_norms(module: nn.Module) -> list[str]:
    """Their names."""
    return [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def check_batch_norm(module: nn.Module, roster: Roster) -> None:
    """UsageError where batch statistics would depend on how many ranks there are.

    BatchNorm normalizes over a micro-batch. Any split of the machines trains the same model as long as all
    micro-batches have one size: on one rank that of the whole batch will do, on several what --micro-batch says.
    """
    names = batch_norms(module)
    sizes = {size for member in roster.members for size in member.micro_batches}
    one_size = roster.members[0].micro_batch if roster.world_size > 1 else max(sizes)
    if names and sizes != {one_size}:
        told = " and ".join(map(str, sorted(sizes)))
        raise UsageError(
            f"{names[0]} is a BatchNorm: it normalizes over a micro-batch; with {plural(roster.world_size, 'rank')} "
            f"these are of {told} sequences: another division would train another model",
            hint="--micro-batch N that divides every rank's share of --batch; or GroupNorm, which needs no batch",
        )
