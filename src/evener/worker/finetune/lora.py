"""LoRA adapters (peft) whose products are added without copies of what they read and write.

peft casts the input of every adapter to fp32, which autocast casts back, and adds product by product: of a layer's
input a copy for each projection stays until backward, and each output is written three times more. Here the input is
kept once, as the layers share it, and the adapter's product is added in place.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LORA_ALPHA = 32  # TRL 1.16's (ModelConfig.lora_alpha), and of the first example of peft 0.21's README


def add_adapters(base: nn.Module, rank: int, *, has_dora: bool) -> Any:
    """Return the model with LoRA adapters on every linear layer but the head's   [Dettmers et al. 2023: QLoRA].

    With DoRA the norm of each row of the adapted weight is trained apart from its direction   [Liu et al. 2024].
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear
    from transformers.pytorch_utils import Conv1D

    config = LoraConfig(r=rank, lora_alpha=LORA_ALPHA, lora_dropout=0.0, use_dora=has_dora, target_modules="all-linear",
                        task_type="CAUSAL_LM")  # fmt: skip
    with warnings.catch_warnings():  # about names that peft still uses, and GPT-2's transposed weights
        warnings.simplefilter("ignore")
        model = get_peft_model(base, config)
    for layer in () if has_dora else model.modules():
        if type(layer) is Linear and type(layer.base_layer) in (nn.Linear, Conv1D):
            layer.__dict__["forward"] = types.MethodType(_forward, layer)
    return model


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Compute what the forward of a peft `Linear` does while it is trained."""
    if layer.disable_adapters or layer.merged:
        return type(layer).forward(layer, x)
    (name,) = layer.active_adapters
    base, a, b = layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight
    weight = base.weight.T if layer.fan_in_fan_out else base.weight  # (out, in)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    y: Tensor = _AdaptedLinear.apply(x.to(dtype), weight.to(dtype), base.bias, a, b, layer.scaling[name])  # type: ignore[no-untyped-call]
    return y


class _AdaptedLinear(torch.autograd.Function):
    """x·Wᵀ + bias + scaling·(x·Aᵀ)·Bᵀ with a frozen W: x (…, in), W (out, in), A (rank, in), B (out, rank)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor,
                scaling: float) -> Tensor:  # fmt: skip
        rows = x.flatten(0, -2)
        y = nn.functional.linear(rows, weight, None if bias is None else bias.to(x.dtype))
        low = rows @ a.to(x.dtype).T
        y.addmm_(low, b.to(x.dtype).T, alpha=scaling)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling = scaling
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x, weight, a, b, low = ctx.saved_tensors
        rows, of_rows = x.flatten(0, -2), of_y.flatten(0, -2).to(x.dtype)
        of_low = (of_rows @ b.to(x.dtype)).mul_(ctx.scaling)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (of_rows @ weight).addmm_(of_low, a.to(x.dtype)).view_as(x)
        of_a = (of_low.T @ rows).to(a.dtype)
        of_b = (of_rows.T @ low).mul_(ctx.scaling).to(b.dtype)
        return of_x, None, None, of_a, of_b, None
