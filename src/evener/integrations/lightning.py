"""A strategy of Lightning's Trainer with evener's sync strategies and shares, named in code.

trainer = lightning.Trainer(strategy=EvenerStrategy(sync="int8", shares="2:1"), accelerator="cpu")
"""

from __future__ import annotations

import os
from typing import Any

from evener.core.base.errors import UsageError
from evener.worker.script.instrument import choose
from evener.worker.script.program_log import log

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise UsageError(f"evener.integrations.lightning: {error}", hint="pip install 'evener[lightning]'") from None


class EvenerStrategy(DDPStrategy):
    """Train as Lightning's DDPStrategy does, on ranks of unequal speed and over slow links.

    `sync` and `shares` are those of `evener launch`; what it was given other than the defaults takes precedence. Other
    arguments are DDPStrategy's.
    Where evener measures the program, each step's record has the mean loss of the global batch; of several optimizers,
    the losses of the backward passes between the update of any before and that of the first one. The number of hosts is
    the launcher's, whatever `num_nodes` of the Trainer says.
    """

    def __init__(self, sync: str = "ddp", shares: str = "equal", **kwargs: Any) -> None:
        """Take a strategy and shares, and the keyword arguments of DDPStrategy."""
        super().__init__(**kwargs)
        self._sync, self._shares = sync, shares
        self._step_loss: Any = 0.0  # of the backward passes before the newest update, or since it
        self._has_updated = False  # since the newest backward pass

    @property
    def num_nodes(self) -> int:
        """The number of hosts, each with as many ranks as this one."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        ranks, of_host = (os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        self._num_nodes = int(ranks) // int(of_host) if ranks and of_host else num_nodes

    def setup_environment(self) -> None:
        """Make the process group, and choose the strategy and the shares for it."""
        super().setup_environment()
        choose(self._sync, self._shares, self.global_rank, self.world_size)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the gradients of a loss."""
        before, self._has_updated = 0.0 if self._has_updated else self._step_loss, False
        self._step_loss = before + closure_loss.detach()
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Update by an optimizer; after the first one, give evener the loss of the step."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._has_updated = True
        if optimizer is self.optimizers[0]:
            log(loss=self._step_loss)
        return result
