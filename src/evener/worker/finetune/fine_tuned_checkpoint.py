"""Load what a run has fine-tuned: its pretrained model with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from evener.worker.finetune.libraries import load_model
from evener.worker.finetune.lora import add_adapters
from evener.worker.finetune.model import FineTunedModel
from evener.worker.state.checkpoint import load_weights


class FineTunedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A fine-tuned model, as a request names it."""

    checkpoint: str  # a folder
    model: str  # the folder of the pretrained model
    lora_rank: int | None
    has_dora: bool

    def load(self) -> Any:
        """Return the model of transformers, or of peft if it has adapters, with the checkpoint's weights."""
        base = load_model(Path(self.model))
        if self.lora_rank is not None:
            base = add_adapters(base, self.lora_rank, has_dora=self.has_dora)
        load_weights(Path(self.checkpoint), FineTunedModel(base))  # the same parameters
        return base.eval()
