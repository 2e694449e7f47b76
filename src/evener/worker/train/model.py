"""The GPT that a GPTShape describes: a decoder-only transformer.

One model is both GPT-2 (learned positions, LayerNorm, GELU) and nanochat's (rotary positions, RMSNorm, ReLU², value
embeddings). After Radford et al. 2019 and Karpathy's nanoGPT and nanochat. Reading order: GPT,
TransformerBlock, Attention, MLP; then FastCpuDropout and causal_attention(), which exist for speed alone.

    B  sequences    T  positions    C  width    H  heads    D = C/H  head size    V  vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evener.core.model.shape import MLP_EXPANSION, GPTShape
from evener.worker.rank.linear_cross_entropy import linear_cross_entropy

ROTARY_BASE = 10_000.0  # Su et al. 2021
INIT_STD = 0.02  # GPT-2
STRIP_ROWS = 128  # 64 is as fast at T = 256 (measured, AMD EPYC)
MAX_BF16_STRIP_POSITIONS = 1024  # strips keep T² / 2 weights a head for backward, torch's fused kernel none


class GPT(nn.Module):
    """A decoder-only transformer with exactly the parameters that its shape counts.

    `checkpoint_activations` stores only the input of each block and recomputes the rest in backward: the same
    gradients, less memory, a third more FLOPs. The weights are drawn from torch's generator (`torch.manual_seed`).
    """

    def __init__(self, shape: GPTShape, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        shape.check()
        self.shape = shape
        self.checkpoint_activations = checkpoint_activations
        device = torch.get_default_device()
        with torch.device("meta"):  # not initialized by the modules but once, by init_weights
            self.token_embedding = Fp32Embedding(shape.vocab_size, shape.width)
            learned = shape.positions == "learned"
            self.position_embedding = nn.Embedding(shape.block_size, shape.width) if learned else None
            self.dropout = FastCpuDropout(shape.dropout)
            self.blocks = nn.ModuleList(TransformerBlock(shape, layer) for layer in range(shape.num_layers))
            self.norm = make_norm(shape)
            self.head = None if shape.tied_head else nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.to_empty(device=device)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize as GPT-2: N(0, 0.02²), residual projections divided by √(2·layers); biases 0, norms 1."""
        for name, weight in sorted(self.named_parameters()):  # by name: the order of construction does not matter
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() == 1:
                nn.init.ones_(weight)
            elif name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(weight, std=INIT_STD / math.sqrt(2 * self.shape.num_layers))
            else:
                nn.init.normal_(weight, std=INIT_STD)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) of tokens (B, T); with targets (B, T; -1 = ignored) the fp32 *sum* of token losses.

        A sum, because the micro-batches of a batch then add up however it is split; the caller divides by the global
        count.
        """
        x = self.features(tokens)
        if targets is None:
            return self.logits(x)
        if x.device.type == "cpu":
            return linear_cross_entropy(x.flatten(0, 1), self.head_weight, targets.flatten())
        return F.cross_entropy(
            self.logits(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-1, reduction="sum"
        )

    def features(self, tokens: Tensor) -> Tensor:
        """Return the input of the head, (B, T, C), of tokens (B, T)."""
        T = tokens.shape[1]
        assert self.shape.block_size >= T, f"{T} tokens in a block of {self.shape.block_size}"
        x = self.token_embedding(tokens)  # (B, T, C)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[:T]
        if self.shape.norm == "rmsnorm":
            x = F.rms_norm(x, x.shape[-1:])
        x = self.dropout(x)
        rotary = rotary_angles(T, self.shape.head_dim, x.device) if self.shape.positions == "rotary" else None
        for block in self.blocks:
            if self.checkpoint_activations:
                x = checkpoint(block, x, tokens, rotary, use_reentrant=False)
            else:
                x = block(x, tokens, rotary)
        return self.norm(x)

    @property
    def head_weight(self) -> Tensor:
        """The weight that turns features into logits: (V, C)."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of features (B, T, C)."""
        return F.linear(x, self.head_weight)

    def compile_blocks(self) -> None:
        """Compile each block with torch.compile: equal blocks share one compilation.

        Under DistributedDataParallel gradients are then still ready block by block, so that the all-reduce of buckets
        overlaps with backward.
        """
        for block in self.blocks:
            block.compile()

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        num_new: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue tokens (B, T) to (B, T + num_new). Temperature 0 always takes the likeliest token."""
        was_training = self.training
        self.eval()
        for _ in range(num_new):
            x = self.features(tokens[:, -self.shape.block_size :])[:, -1]  # (B, C)
            logits = self.logits(x).float()  # (B, V)
            if top_k is not None:
                smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < smallest_kept, -math.inf)
            if temperature == 0:
                new = logits.argmax(dim=-1, keepdim=True)
            else:
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            tokens = torch.cat((tokens, new), dim=1)
        self.train(was_training)
        return tokens


class TransformerBlock(nn.Module):
    def __init__(self, shape: GPTShape, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape, layer)
        self.mlp_norm = make_norm(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tokens, rotary)  # (B, T, C)
        return x + self.mlp(self.mlp_norm(x))  # (B, T, C)


class Attention(nn.Module):
    def __init__(self, shape: GPTShape, layer: int) -> None:
        super().__init__()
        self.heads = (shape.num_heads, shape.head_dim)
        self.qk_norm = shape.qk_norm
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        has_value_embedding = shape.has_value_embedding(layer)
        self.value_embedding = Fp32Embedding(shape.vocab_size, shape.width) if has_value_embedding else None
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)
        self.dropout = FastCpuDropout(shape.dropout)

    def forward(self, x: Tensor, tokens: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, *self.heads)).unbind(2)  # (B, T, H, D) each
        if self.value_embedding is not None:
            v = v + self.value_embedding(tokens).unflatten(-1, self.heads)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if self.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        y = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.dropout)  # (B, H, T, D)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))  # (B, T, C)


class MLP(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, MLP_EXPANSION * shape.width, bias=shape.bias)
        self.activation = ACTIVATIONS[shape.activation]
        self.down = nn.Linear(MLP_EXPANSION * shape.width, shape.width, bias=shape.bias)
        self.dropout = FastCpuDropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.activation(self.up(x))))  # (B, T, C) -> (B, T, 4C) -> (B, T, C)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": relu2,
}


def make_norm(shape: GPTShape) -> nn.Module:
    if shape.norm == "layernorm":
        return Fp32LayerNorm(shape.width, bias=shape.bias)
    return nn.RMSNorm(shape.width, elementwise_affine=False)


class Fp32Embedding(nn.Embedding):
    """An embedding that sums gradients in fp32, as autocast leaves it, also if its weight was gathered in bf16."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight.float())


class Fp32LayerNorm(nn.LayerNorm):
    """LayerNorm in fp32, as autocast leaves it on a CPU, also if its weight and bias were gathered in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x, self.normalized_shape, self.weight.float(), bias, self.eps)


def rotary_angles(num_positions: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position · frequency, (T, 1, D/2) each: the same for every head."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)  # (D/2)
    angles = torch.outer(torch.arange(num_positions, device=device), frequencies)  # (T, D/2)
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+D/2}) by their position's angles: products q·k then depend on the distance alone."""
    a, b = x.chunk(2, dim=-1)  # (B, T, H, D/2) each
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).type_as(x)  # (B, T, H, D)


class FastCpuDropout(nn.Dropout):
    """Dropout that is fast on a CPU.

    torch draws a number for each element, one after the other: 8 ns an element. Sixteen bits are enough for a decision,
    so a 64-bit draw makes four here: 3 ns (both measured on an AMD EPYC). p is rounded to a multiple of 2⁻¹⁶.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or x.device.type != "cpu":
            return super().forward(x)
        words = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 4),), device=x.device)
        draws = words.view(torch.int16)[: x.numel()].view(x.shape)  # uniform on -2¹⁵ … 2¹⁵-1
        num_kept = min(max(round((1 - self.p) * 2**16), 1), 2**16 - 1)  # of 2¹⁶ equally likely draws
        return x * ((draws < num_kept - 2**15).to(x.dtype) * (2**16 / num_kept))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: FastCpuDropout) -> Tensor:
    """Return softmax(q·kᵀ/√D)·v over the present and earlier positions, (B, H, T, D) each, with dropout on the weights.

    In training on a CPU it is written out, in strips of queries that end at the diagonal, where torch is slow: with
    dropout, for its fused kernel has none and its fallback computes the masked half of the weights too (strips are 1.7
    times as fast), and in bf16 (2.2 times at T = 256, 1.5 at 1024, 1.2 at 2048: measured forward and backward on an AMD
    EPYC, where MKL is slow in bf16). In bf16 strips round the scores, which the fused kernel does not: beside fp32 the
    result is 0.3 % off, fused 0.2 %; with scores of a deviation of 9 it is 1.2 % off.
    """
    p = dropout.p if dropout.training else 0.0
    if torch.is_autocast_enabled(q.device.type):  # once, for all strips
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    is_slow_bf16 = dropout.training and q.dtype == torch.bfloat16 and q.shape[2] <= MAX_BF16_STRIP_POSITIONS
    if q.device.type != "cpu" or not (p or is_slow_bf16):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
    T, D = q.shape[2:]
    q, k, v = q * D**-0.5, k.transpose(2, 3).contiguous(), v.contiguous()  # k (B, H, D, T)
    strips = []
    for start in range(0, T, STRIP_ROWS):
        end = min(start + STRIP_ROWS, T)
        scores = q[:, :, start:end] @ k[..., :end]  # (B, H, end - start, end)
        scores[..., start:].add_(scores.new_full((end - start, end - start), -math.inf).triu_(1))
        strips.append(dropout(scores.softmax(dim=-1)) @ v[:, :, :end])
    return torch.cat(strips, dim=2)
