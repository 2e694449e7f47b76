"""transformers' Trainer with evener's strategies, shares and restarts, named in code.

trainer = EvenerTrainer(model, args, train_dataset=data, sync="int8", shares="2:1")
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from evener.core.base.errors import UsageError
from evener.core.base.file_io import read_file, write_atomic
from evener.core.run.membership_epoch import has_dynamic_membership, read_rendezvous
from evener.worker.script.instrument import choose
from evener.worker.script.program_log import log
from evener.worker.script.report import launched_rank

try:
    import torch
    from accelerate.utils import SAFE_WEIGHTS_NAME
    from safetensors.torch import save_model
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise UsageError(f"evener.integrations.transformers: {error}", hint="pip install 'evener[hf]'") from None

NO_STEP = -1
ABSTAINS = -1  # a rank whose batch does not show how its loss is scaled
RUN_FILE = "evener_run"  # in a checkpoint that was written completely: the identifier of its run


def is_divided(for_one: float, for_two: float) -> bool | None:
    """Return whether a loss is divided by the number of items, from its values for 1 and 2 of them.

    None: they do not show it, as where a batch has no labels; a sum over them is 0, and a mean is not a number.
    """
    if not (math.isfinite(for_one) and math.isfinite(for_two)) or for_one == 0.0:
        return None
    return math.isclose(for_one, 2 * for_two, rel_tol=1e-3)


class MarkCheckpoints(TrainerCallback):
    """Write into each checkpoint which run it is of, because the next run has the same output folder."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the checkpoint that the Trainer has written, and complete it.

        With save_on_each_node, save_pretrained of transformers 5.23 writes the weights on the first rank of all alone.
        """
        if args.should_save:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            if not any(folder.glob("*.safetensors*")):
                save_model(kwargs["model"], str(folder / SAFE_WEIGHTS_NAME))
            write_atomic(folder / RUN_FILE, os.environ["EVENER_RUN"].encode())


class EvenerTrainer(Trainer):
    """Train as transformers' Trainer does, on ranks of unequal speed and over slow links.

    `sync` and `shares` are those of `evener launch`; what it was given other than the defaults takes precedence. Under
    another launcher that sets RANK and WORLD_SIZE they have the same effect. Where evener measures the program, each
    step's record has the mean loss of the global batch. Where `evener launch --membership restart` has restarted the
    ranks, `train` continues from the newest checkpoint of this run that all ranks have; therefore each host saves them.
    """

    def __init__(self, *args: Any, sync: str = "ddp", shares: str = "equal", **kwargs: Any) -> None:
        """Take the arguments of transformers' Trainer, and a strategy and shares. Raise UsageError as `choose` does."""
        self._batch_shares = choose(sync, shares, launched_rank(), int(os.environ.get("WORLD_SIZE", "1")))
        super().__init__(*args, **kwargs)
        if has_dynamic_membership():
            self.args.save_on_each_node = True
            self.add_callback(MarkCheckpoints())
        self._uses_num_items: bool | None = None  # None: not known yet
        self._step_loss: Any = 0.0  # of the micro-batches since the last update, weighted by this rank's share

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Return the loss of a micro-batch; at the last one before an update, give evener the loss of the step."""
        if self._uses_num_items is None and self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            self._uses_num_items = self._is_loss_divided(inputs)
            self.model_accepts_loss_kwargs = self._uses_num_items is not False
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss += loss
        if self.accelerator.sync_gradients:
            # evener weights by samples what the ranks give it
            log(loss=self._step_loss / (self._batch_shares.factor if self._batch_shares else 1.0))
            self._step_loss = 0.0
        return loss

    def _is_loss_divided(self, inputs: Any) -> bool | None:
        """Return whether the model divides its loss by num_items_in_batch; None if no rank's batch shows it.

        All ranks call it together and return the same. Models such as BertForSequenceClassification take it, as any
        keyword, and return a mean; by their signature the Trainer would multiply it by the number of ranks, and not
        divide it by the number of micro-batches.
        """
        model = self.accelerator.unwrap_model(self.model)
        model.eval()  # without dropout, until the step begins: no random number is drawn
        with torch.no_grad():
            inputs = self._prepare_inputs(inputs)
            losses: list[Any] = [
                self.compute_loss(model, {**inputs}, num_items_in_batch=torch.tensor(items)) for items in (1, 2)
            ]
        vote = {None: ABSTAINS, False: 0, True: 1}[is_divided(*map(float, losses))]
        votes = self.accelerator.gather(torch.tensor([vote], device=self.accelerator.device)).tolist()
        return None if max(votes) == ABSTAINS else max(votes) == 1

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; after a restart from the newest checkpoint of the run, unless another one is given."""
        if resume_from_checkpoint is None and has_dynamic_membership() and read_rendezvous().epoch.number > 0:
            resume_from_checkpoint = self._newest_checkpoint()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _newest_checkpoint(self) -> str | None:
        """Return the newest checkpoint of this run that all ranks have, or None. All ranks call it together."""
        folder, run = Path(self.args.output_dir or ""), os.environ["EVENER_RUN"].encode()
        marks = folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{RUN_FILE}")
        own = [int(mark.parent.name.rpartition("-")[2]) for mark in marks if read_file(mark) == run]
        padded = self.accelerator.pad_across_processes(
            torch.tensor([NO_STEP, *own], device=self.accelerator.device), pad_index=NO_STEP
        )
        steps = self.accelerator.gather(padded).tolist()
        common = [step for step in set(steps) - {NO_STEP} if steps.count(step) == self.accelerator.num_processes]
        return str(folder / f"{PREFIX_CHECKPOINT_DIR}-{max(common)}") if common else None
