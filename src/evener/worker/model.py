"""What is trained: the GPT that a GPTShape describes.

One model covers GPT-2 (learned positions, LayerNorm, GELU) and nanochat (rotary positions, RMSNorm, ReLU², value
embeddings); after Radford et al. 2019 and Karpathy's nanoGPT and nanochat.

    B  sequences    T  positions    C  width    H  heads    D = C/H  head size    V  vocabulary
"""

# ruff: noqa: N806  (B, T, C are what the field calls them)

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.core.shape import MLP_EXPANSION, GPTShape

ROTARY_BASE = 10_000.0  # Su et al. 2021
INIT_STD = 0.02
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def make_norm(shape: GPTShape) -> nn.Module:
    if shape.norm == "layernorm":
        return nn.LayerNorm(shape.width, bias=shape.bias)
    return nn.RMSNorm(shape.width, elementwise_affine=False)


def rotary_angles(num_positions: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, each (T, 1, D/2): the same for every head."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)  # (D/2)
    angles = torch.outer(torch.arange(num_positions, device=device), frequencies)[:, None, :]  # (T, 1, D/2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of numbers by their position's angles: a product of two rotated vectors sees their distance alone."""
    a, b = x.chunk(2, dim=-1)  # (B, T, H, D/2) each
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).type_as(x)  # (B, T, H, D)


def dropout(x: Tensor, p: float) -> Tensor:
    if p == 0 or x.device.type != "cpu":
        return F.dropout(x, p)
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    draws = words.view(torch.int16)[: x.numel()].view(x.shape)
    kept = max(1, round((1 - p) * 2**16))
    return x * ((draws < kept - 2**15).to(x.dtype) * (2**16 / kept))


def attend(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    if p == 0 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
    T, D = q.shape[-2:]
    q, k, v = q * D**-0.5, k.transpose(-2, -1).contiguous(), v.contiguous()
    strips = []
    for start in range(0, T, 128):
        end = min(start + 128, T)
        scores = q[:, :, start:end] @ k[..., :end]
        scores[..., start:] += torch.full((end - start, end - start), -math.inf).triu(1)
        strips.append(dropout(scores.softmax(-1), p) @ v[:, :, :end])
    return torch.cat(strips, dim=2)


class Attention(nn.Module):
    def __init__(self, shape: GPTShape, layer: int) -> None:
        super().__init__()
        self.heads = (shape.num_heads, shape.head_dim)
        self.qk_norm = shape.qk_norm
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)
        has_value_embedding = shape.has_value_embedding(layer)
        self.value_embedding = nn.Embedding(shape.vocab_size, shape.width) if has_value_embedding else None

    def forward(self, x: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, *self.heads)).unbind(2)  # (B, T, H, D) each
        if self.value_embedding is not None:
            v = v + self.value_embedding(tokens).unflatten(-1, self.heads)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if self.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D) each
        p = self.dropout if self.training else 0.0
        y = attend(q, k, v, p)
        y = self.out(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return dropout(y, p)


class MLP(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.activation]
        self.dropout = shape.dropout
        self.up = nn.Linear(shape.width, MLP_EXPANSION * shape.width, bias=shape.bias)
        self.down = nn.Linear(MLP_EXPANSION * shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(self.down(self.activation(self.up(x))), self.dropout if self.training else 0.0)


class Block(nn.Module):
    def __init__(self, shape: GPTShape, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape, layer)
        self.mlp_norm = make_norm(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tokens, rotary)  # (B, T, C)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer. `checkpoint_activations` trades a second forward pass for the blocks' memory.

    The weights are drawn from torch's global generator: `torch.manual_seed` before construction fixes them.
    """

    def __init__(self, shape: GPTShape, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        shape.check()
        self.shape = shape
        self.checkpoint_activations = checkpoint_activations
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.position_embedding = (
            nn.Embedding(shape.block_size, shape.width) if shape.positions == "learned" else None
        )
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers))
        self.norm = make_norm(shape)
        self.head = None if shape.tied_head else nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        for name, p in sorted(self.named_parameters()):
            if p.dim() >= 2:
                r = name.endswith((".out.weight", ".down.weight"))
                nn.init.normal_(p, std=INIT_STD / math.sqrt(2 * self.shape.num_layers) if r else INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        T = tokens.shape[1]
        x = self.token_embedding(tokens)  # (B, T, C)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[:T]
        if self.shape.norm == "rmsnorm":
            x = F.rms_norm(x, x.shape[-1:])
        x = dropout(x, self.shape.dropout if self.training else 0.0)
        rotary = rotary_angles(T, self.shape.head_dim, x.device) if self.shape.positions == "rotary" else None
        for block in self.blocks:
            x = block(x, tokens, rotary)
        x = self.norm(x)
        head = self.token_embedding if self.head is None else self.head
        logits = F.linear(x, head.weight)  # (B, T, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction="sum")
