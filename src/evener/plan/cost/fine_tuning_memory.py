"""Memory of a fine-tuning's forward and backward: what autograd saves in transformers' modules, and the logits.

    B  sequences of a micro-batch    T  tokens of the longest    K  positions with logits    e  bytes of the arithmetic
    C, A, G, M  widths: of the residual stream, of queries, of keys and values, of the MLP's hidden layer

The tensors that a layer saves were read from `torch.autograd.graph.saved_tensors_hooks` over Llama, Qwen2 and GPT-2,
each storage counted once, as bytes of a token for each unit of width (transformers 5.23, torch 2.13, CPU, 2026-11-30).
"""

from __future__ import annotations

from evener.core.model.fine_tuning import FineTuning

FP32, BF16 = 4, 2
QUANTIZED_BYTES = {"nf4": 4.127 / 8, "int8": 1.0}  # of a weight, with its part of a block's scale [QLoRA, section 3]
# Resident bytes of a process that has imported transformers and peft and loaded a model, beyond those of evener's own
# worker: an *assumption*. The imports alone took 128 MB (*measured*, transformers 5.23, peft 0.21, 2026-11-30).
LIBRARY_BYTES = 190_000_000


# Of activations and gradients, free memory between blocks in use, as `memory.HEAP_FRAGMENTATION`: *fit* to the peaks of
# Llama of 31M parameters with micro-batches of 2 to 16 sequences of 512 tokens, 2026-11-30. LoRA frees the outputs of
# every adapter between tensors that stay. The heap grows where lengths differ from step to step: after 20 steps of 11
# sequences by 1.7, so that the peak was 30 % above this.
FULL_FRAGMENTATION, LORA_FRAGMENTATION = 0.35, 1.0


def heap_fragmentation(shape: FineTuning) -> float:
    """Return the bytes that glibc's heap takes more than a step allocates, relative to these."""
    return FULL_FRAGMENTATION if shape.model.lora_rank is None else LORA_FRAGMENTATION


def base_bytes(shape: FineTuning, element_bytes: int) -> int:
    """Return the bytes of the frozen weights, which a rank that computes in bf16 holds in bf16, and those of linear
    layers quantized if the run says so; and where all weights are trained in bf16, those of their casts.
    """
    if shape.model.lora_rank is None:
        return BF16 * shape.model.num_linear if element_bytes < FP32 else 0
    model = shape.model
    linear_bytes = element_bytes if model.quantization == "off" else QUANTIZED_BYTES[model.quantization]
    return round(element_bytes * (model.num_frozen - model.num_linear) + linear_bytes * model.num_linear)


def activation_bytes(
    shape: FineTuning,
    sequences: int,
    element_bytes: int,
    *,
    recompute: bool,
    chunk_rows: int | None,
    gradients_held: bool,
) -> list[int]:
    """Return the bytes of activations, logits and temporaries at the moments of a micro-batch that may be the worst:
    the gradient of the logits, the backward of the last layer, and that of the token embedding.

    `chunk_rows`: of how many tokens a CPU holds the logits at once; None: of all, as a GPU does. `gradients_held`: a
    weight's gradient is made beside the sum of those before. That of a head that is the token embedding's matrix, too,
    waits for the embedding's, and then for their sum.
    """
    layers, lengths, e = shape.layers, shape.lengths, element_bytes
    widest = lengths.of_micro_batch(sequences)
    tokens = sequences * lengths.max_tokens
    has_bf16_stream = e < FP32 and shape.model.lora_rank is not None  # as its frozen weights
    stream = tokens * layers.width * (BF16 if has_bf16_stream else FP32)
    layer = tokens * saved_bytes_per_token(shape, e)
    kept = layers.num_layers * stream + layer if recompute else layers.num_layers * layer
    if chunk_rows is None:
        logits = sequences * widest.max_logits * shape.model.vocab_size  # (B, K, V)
        with_target = widest.max_loss_tokens * shape.model.vocab_size  # those that count, in fp32
        of_loss = e * logits + FP32 * 2 * with_target + (e * with_target if e < FP32 else 0)
    else:  # and what the head multiplies, of tokens that count, with its gradient
        rows = min(chunk_rows, widest.max_loss_tokens)
        of_loss = e * rows * shape.model.vocab_size + 2 * FP32 * widest.max_loss_tokens * layers.width
    of_backward = 3 * e * tokens * layers.mlp_width + 2 * FP32 * tokens * layers.width
    of_embedding, table = 0, shape.model.vocab_size * layers.width
    if shape.model.lora_rank is None:
        of_loss += BF16 * table * (e < FP32)  # the head's weight as the product takes it
        if gradients_held:
            is_tied = sum(one.num_params == table for one in shape.model.gradients) == 1
            of_loss += FP32 * table
            of_backward += FP32 * table * is_tied
            of_embedding = FP32 * table * (3 if is_tied else 1)
    return [(layers.num_layers * stream if recompute else kept) + of_loss, kept + of_backward, of_embedding]


def saved_bytes_per_token(shape: FineTuning, e: int) -> int:
    """Return the bytes that autograd saves of one layer for each token.

    Attention saves q, k, v and its output, and linear layers their inputs. The norms save their input in fp32, what
    they have normalized if their weights are trained, and their output; a gated MLP both hidden layers, the
    activation and the product, GPT-2's five steps of its activation.
    """
    layers = shape.layers
    if not layers.has_gate:
        of_norms = 16 if e == FP32 else 12 if shape.model.lora_rank is None else 8
    elif shape.model.lora_rank is None:
        of_norms = 24 if e == FP32 else 26
    else:
        of_norms = 18 if e == FP32 else 12
    hidden = (4 if layers.has_gate else 5) * e * layers.mlp_width
    return of_norms * layers.width + 2 * e * (layers.attention_width + layers.kv_width) + hidden
