"""A pretrained model that is fine-tuned: what is trained of it, as a module, with its loss.

The module's parameters are those that are trained: all weights, or LoRA adapters (peft). So only they are exchanged,
saved and compared. The frozen weights, which every rank reads from the same verified files, are not registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.core.base.errors import UsageError
from evener.core.model.pretrained import PretrainedModel
from evener.core.run.roster import Dtype
from evener.worker.finetune.libraries import load_model, load_random_model
from evener.worker.finetune.lora import add_adapters
from evener.worker.finetune.sample_rows import NO_TARGET
from evener.worker.rank.linear_cross_entropy import linear_cross_entropy

# Of the largest logit: above rounding, below what another sample changes. *Assumption*
PACKED_TOLERANCE, PACKED_TOLERANCE_BF16 = 1e-4, 3e-2


class FineTunedModel(nn.Module):
    """A causal language model of transformers, of which some parameters are trained."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_models = (base,)  # a tuple: the base is not registered, nor are its frozen weights
        inner = base.get_base_model() if hasattr(base, "get_base_model") else base
        self._accepted = inspect.signature(inner.forward).parameters
        self._heads = (_plain_head(inner),)  # a tuple for the same reason; None: its loss takes all logits
        self._quantized = [part for part in base.modules() if type(part).__module__.startswith("bitsandbytes.")]
        for name, parameter in base.named_parameters():
            if parameter.requires_grad:
                _register(self, name, parameter)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """Return the fp32 *sum* of the losses of tokens that have a target.

        All are (B, T). Where positions begin anew a sample does, and attends to no earlier one.
        """
        kept = (targets != NO_TARGET).any(dim=0).nonzero().squeeze(1)  # (K): the head is left out elsewhere
        targets = targets[:, kept]
        has_target = targets != NO_TARGET  # (B, K)
        (head,) = self._heads
        if head is not None and tokens.device.type == "cpu":
            x, is_input = self._head_input(head, tokens, positions, kept)
            if is_input:
                return linear_cross_entropy(x[has_target], head.weight, targets[has_target])
            self._heads = (None,)
        logits = self.logits(tokens, positions, kept)  # (B, K, V)
        return F.cross_entropy(logits[has_target].float(), targets[has_target], reduction="sum")

    def _head_input(self, head: nn.Linear, tokens: Tensor, positions: Tensor, kept: Tensor) -> tuple[Tensor, bool]:
        """Return what the head multiplies, (B, K, C), and whether the model's logits are its products alone: some
        models scale them or bound them afterwards.
        """
        inputs: list[Tensor] = []

        def pass_on(x: Tensor) -> Tensor:
            inputs.append(x)
            return x

        head.__dict__["forward"] = pass_on
        try:
            found = self.logits(tokens, positions, kept)
        finally:
            del head.__dict__["forward"]
        return found, len(inputs) == 1 and found is inputs[0]

    def logits(self, tokens: Tensor, positions: Tensor, kept: Tensor) -> Tensor:
        """Return logits (B, K, V) of tokens and positions (B, T) at K places of the sequences."""
        more = {"position_ids": positions, "logits_to_keep": kept}
        accepted = {name: value for name, value in more.items() if name in self._accepted}
        logits: Tensor = self.base_models[0](input_ids=tokens, **accepted, use_cache=False).logits
        return logits if "logits_to_keep" in accepted else logits[:, kept]

    def train(self, mode: bool = True) -> Self:
        self.base_models[0].train(mode)
        for layer in self._quantized:  # outside of training they compute in another, less exact way
            layer.train()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the base as well, which holds the same parameters."""
        self.base_models[0]._apply(fn, recurse)
        return self


def _plain_head(base: Any) -> nn.Linear | None:
    """Return the layer that makes the logits, if it only multiplies by its weight."""
    head = base.get_output_embeddings()
    return head if type(head) is nn.Linear and head.bias is None else None


def build_pretrained(
    folder: Path, shape: PretrainedModel, dtype: Dtype, *, recompute: bool, packing: bool
) -> FineTunedModel:
    """Load a model, and add LoRA adapters if the shape has them; A is drawn from torch's generator, B is 0.

    What is trained is in fp32. Frozen weights are quantized if the shape says so, else in bf16 where the rank computes
    in it: half the memory. Raise UsageError if samples that are packed into one sequence would attend to each other.
    """
    has_bf16_base = shape.lora_rank is not None and dtype == "bf16"
    base = load_model(folder, torch.bfloat16 if has_bf16_base else torch.float32, shape.quantization)
    if shape.lora_rank is not None:
        base = add_adapters(base, shape.lora_rank, has_dora=shape.has_dora)
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
    tolerance = PACKED_TOLERANCE_BF16 if has_bf16_base else PACKED_TOLERANCE
    if packing and not keeps_packed_apart(model, shape.vocab_size, tolerance):
        raise UsageError(
            f"--packing: in a {shape.architecture} of transformers the samples of a sequence attend to each other",
            hint="without --packing",
        )
    return model


def build_from_config(config: str, lora_rank: int | None, dtype: Dtype, *, has_dora: bool) -> FineTunedModel:
    """Return the model of a config.json with random weights, to measure how fast it trains."""
    has_bf16_base = lora_rank is not None and dtype == "bf16"
    base = load_random_model(config, torch.bfloat16 if has_bf16_base else torch.float32)
    if lora_rank is not None:
        base = add_adapters(base, lora_rank, has_dora=has_dora)
    base.train()
    return FineTunedModel(base)


@torch.no_grad()
def keeps_packed_apart(model: FineTunedModel, vocab_size: int, tolerance: float) -> bool:
    """Return whether two samples have the same logits in one sequence as alone."""
    lengths = (5, 7)
    tokens = torch.arange(1, 1 + sum(lengths)).remainder(vocab_size).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    packed = model.logits(tokens, positions, torch.arange(sum(lengths)))
    parts = zip(tokens.split(lengths, dim=1), positions.split(lengths, dim=1), strict=True)
    alone = torch.cat([model.logits(*part, torch.arange(part[0].shape[1])) for part in parts], dim=1)
    return bool((packed - alone).abs().max() <= tolerance * alone.abs().max())


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
