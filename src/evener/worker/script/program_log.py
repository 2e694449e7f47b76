"""Give evener the loss of a launched program's steps: by `evener.log`, or by what the program logs elsewhere.

evener.log(loss=loss)                      in the program: then nothing else counts
SummaryWriter.add_scalar("train/loss", …)  TensorBoard
wandb.log({"loss": …})                     Weights & Biases
Trainer.log({"loss": …})                   transformers
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

LOSS_NAME = re.compile(r"(train(ing)?[/_ ])?loss", re.IGNORECASE)
_take_loss: Callable[[float], None] | None = None  # of this process's measurement
_is_stated = False  # the program has called `log`


def log(*, loss: Any) -> None:
    """Give the loss of this optimizer step, a number or a tensor with one, to the run that `evener launch` measures.

    The run's loss is the mean over the ranks that give one. In a program that evener did not launch it does nothing.
    """
    global _is_stated
    _is_stated = True
    _pass_on(loss)


def _pass_on(loss: Any) -> None:
    if _take_loss is not None:
        _take_loss(float(loss.detach() if hasattr(loss, "detach") else loss))


def take_losses(take: Callable[[float], None]) -> dict[str, Callable[[ModuleType], None]]:
    """Pass the losses that the program gives to `take`; return what to change in the loggers' modules."""
    global _take_loss
    _take_loss = take
    return {
        "torch.utils.tensorboard.writer": lambda module: _replace(module.SummaryWriter, "add_scalar", _from_scalar),
        "tensorboardX.writer": lambda module: _replace(module.SummaryWriter, "add_scalar", _from_scalar),
        "wandb.sdk.wandb_run": lambda module: _replace(module.Run, "log", _from_mapping),
        "transformers.trainer": lambda module: _replace(module.Trainer, "log", _from_mapping),
    }


def _replace(owner: Any, name: str, take: Callable[..., None]) -> None:
    """Have a method of a class also call `take` with its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # what is logged may be anything
            take(*args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(owner, name, call)


def _from_scalar(tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
    if LOSS_NAME.fullmatch(tag) and not _is_stated:
        _pass_on(scalar_value)


def _from_mapping(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
    if _is_stated or "train_runtime" in values:  # transformers' mean of the whole run
        return
    for name, value in values.items():
        if LOSS_NAME.fullmatch(name):
            _pass_on(value)
            return
