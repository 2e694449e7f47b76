"""The operations of a GPT's training step: the FLOPs of each, and the fewest bytes that it must move.

    N  tokens    T  block size    C  width    H  heads    V  vocabulary    e  bytes of an activation

The FLOPs sum to `GPTShape.flops_per_token()` a token. Bytes are those of an operation that reads each input once and
writes each output once, wherever caches keep them; matrices, gradients, the residual stream and the optimizer's state
have 4 bytes a number. So the larger of FLOPs / peak and bytes / bandwidth is the least time that an operation can take.
[Williams, Waterman & Patterson 2009]
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.core.model.shape import MLP_EXPANSION, GPTShape

Phase = Literal["forward", "backward", "both", "update"]
OperationName = Literal[
    "embedding", "dropout", "norms", "qkv", "attention", "attention output", "MLP up", "activation", "MLP down",
    "residuals", "head and loss", "clipping", "AdamW",
]  # fmt: skip
ADAMW_PASSES = 7  # reads a weight, its gradient and two moments, and writes all but the gradient
CLIPPING_PASSES = 3  # reads gradients for their norm; reads and writes them to scale them


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of a step, summed over all layers."""

    name: OperationName
    phase: Phase
    flops: int = 0  # of matrix products, as `flops_per_token` counts them: with the masked half of attention
    needed_flops: int = 0  # without the masked half
    bytes: int = 0


def step_operations(shape: GPTShape, num_sequences: int, element_bytes: int) -> list[Operation]:
    """Return the operations of one optimizer step over so many sequences of the block size, in the order of a step.

    `element_bytes` is the size of a number in the dtype of the arithmetic: 4 in fp32, 2 in bf16.

    >>> from evener.core.model.shape import preset_shape
    >>> char = preset_shape("char", vocab_size=65)
    >>> sum(one.flops for one in step_operations(char, 8, 4)) == 8 * 256 * char.flops_per_token()
    True
    """
    T, C, layers = shape.block_size, shape.width, shape.num_layers
    N, params = num_sequences * T, shape.num_params()
    e, hidden = element_bytes, MLP_EXPANSION * C
    stream = 4 * N * C  # bytes of the residual stream
    act = e * N * C  # bytes of an activation as wide as the stream
    num_tables = 1 + shape.num_value_embeddings(layers)

    def linear(name: OperationName, wide_in: int, wide_out: int) -> tuple[Operation, Operation]:
        flops, matrix = 2 * N * wide_in * wide_out * layers, 4 * wide_in * wide_out
        read, written = e * N * wide_in, e * N * wide_out
        return (
            Operation(name=name, phase="forward", flops=flops, needed_flops=flops,
                      bytes=layers * (read + matrix + written)),
            # gradients of the input and of the matrix, from that of the output, the input and the matrix
            Operation(name=name, phase="backward", flops=2 * flops, needed_flops=2 * flops,
                      bytes=layers * 2 * (read + matrix) + layers * written),
        )  # fmt: skip

    def elementwise(name: OperationName, forward: int, backward: int) -> tuple[Operation, Operation]:
        return (Operation(name=name, phase="forward", bytes=forward),
                Operation(name=name, phase="backward", bytes=backward))  # fmt: skip

    def attention() -> tuple[Operation, Operation]:
        flops = layers * 4 * N * T * C  # q·kᵀ and its product with v
        needed = layers * 2 * N * (T + 1) * C
        return (
            Operation(name="attention", phase="forward", flops=flops, needed_flops=needed, bytes=layers * 4 * act),
            Operation(name="attention", phase="backward", flops=2 * flops, needed_flops=2 * needed,
                      bytes=layers * 8 * act),
        )  # fmt: skip

    # the mask of each element that is dropped or kept, a byte, and the element before and after
    num_dropped = (2 * layers + 1) * N * C + layers * N * shape.num_heads * T // 2
    dropout = elementwise("dropout", num_dropped * (1 + 2 * e), num_dropped * (1 + 2 * e)) if shape.dropout else ()
    embedding = elementwise("embedding", num_tables * 2 * stream, num_tables * 3 * stream)
    head_flops, table = 6 * N * shape.vocab_size * C, 4 * shape.vocab_size * C
    pairs = [
        embedding,
        *([dropout] if dropout else []),
        # backward adds the gradient that passes by the norm in the residual stream
        elementwise("norms", (2 * layers + 1) * (stream + act), (2 * layers + 1) * (act + 3 * stream)),
        linear("qkv", C, 3 * C),
        attention(),
        linear("attention output", C, C),
        linear("MLP up", C, hidden),
        elementwise("activation", layers * 2 * e * N * hidden, layers * 3 * e * N * hidden),
        linear("MLP down", hidden, C),
        # an input of a sum has the gradient of the sum
        elementwise("residuals", 2 * layers * (2 * stream + act), 0),
    ]
    forward, backward = ([pair[i] for pair in pairs] for i in (0, 1))
    return [
        *forward,
        Operation(name="head and loss", phase="both", flops=head_flops, needed_flops=head_flops,
                  bytes=2 * table + 2 * stream),
        *reversed(backward),
        Operation(name="clipping", phase="update", bytes=CLIPPING_PASSES * 4 * params),
        Operation(name="AdamW", phase="update", bytes=ADAMW_PASSES * 4 * params),
    ]  # fmt: skip
