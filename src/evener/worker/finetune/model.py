"""A pretrained model that is fine-tuned: what is trained of it, as a module, with its loss.

The module's parameters are those that are trained: all weights, or LoRA adapters (peft). So only they are exchanged,
saved and compared. The frozen weights, which every rank reads from the same verified files, are not registered.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from evener.core.base.errors import UsageError
from evener.core.model.pretrained import PretrainedModel
from evener.worker.finetune.libraries import load_model
from evener.worker.finetune.sample_rows import NO_TARGET

LORA_ALPHA = (
    32  # with it the best learning rate hardly depends on the rank   [Schulman et al. 2025, LoRA Without Regret]
)


class FineTunedModel(nn.Module):
    """A causal language model of transformers, of which some parameters are trained."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_models = (base,)  # a tuple: the base is not registered, nor are its frozen weights
        for name, parameter in base.named_parameters():
            if parameter.requires_grad:
                _register(self, name, parameter)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """Return the fp32 *sum* of the losses of tokens that have a target.

        All are (B, T). Where positions begin anew a sample does, and attends to no earlier one.
        """
        logits = self.base_models[0](input_ids=tokens, position_ids=positions, use_cache=False).logits  # (B, T, V)
        has_target = targets != NO_TARGET  # (B, T)
        return F.cross_entropy(logits[has_target].float(), targets[has_target], reduction="sum")

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return groups for an optimizer: matrices decay; vectors (biases and norms) do not."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def train(self, mode: bool = True) -> Self:
        self.base_models[0].train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the base as well, which holds the same parameters."""
        self.base_models[0]._apply(fn, recurse)
        return self


def build_pretrained(folder: Path, shape: PretrainedModel, *, recompute: bool) -> FineTunedModel:
    """Load a model, and add LoRA adapters if the shape has them; A is drawn from torch's generator, B is 0."""
    base = load_model(folder)
    if shape.lora_rank is not None:
        base = add_adapters(base, shape.lora_rank)
    if recompute:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.train()
    model = FineTunedModel(base)
    num_trained = sum(parameter.numel() for parameter in model.parameters())
    if shape.lora_rank is not None and num_trained != shape.num_params():
        raise UsageError(
            f"--lora {shape.lora_rank}: peft adds {num_trained} parameters to {folder}, and {shape.num_params()} were "
            f"expected of a {shape.architecture}: evener does not know all of its layers",
            hint="without --lora all weights are trained",
        )
    return model


def add_adapters(base: nn.Module, rank: int) -> Any:
    """Return the model with LoRA adapters on every linear layer but the head's   [Dettmers et al. 2023: QLoRA]."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules="all-linear",
                        task_type="CAUSAL_LM")  # fmt: skip
    return get_peft_model(base, config)


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name, as in the model that it comes from."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        child = root._modules[part]
        assert child is not None
        root = child
    root.register_parameter(leaf, parameter)
