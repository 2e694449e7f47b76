"""Small pretrained models of three architectures with random weights, a tokenizer with a chat template, and chats."""

from __future__ import annotations

import json
from pathlib import Path

TEXT = "the a red blue small big horse cart pulls stops runs why how yes no please and then it is not here there"
WORDS = TEXT.split()
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES = ("llama", "gpt2", "qwen2")


def make_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Write a byte-level BPE tokenizer of 300 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    engine.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=engine, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def make_model(folder: Path, architecture: str = "llama", seed: int = 0, width: int = 32) -> Path:
    """Write a causal language model of two layers with random weights, large enough to matter, and its tokenizer."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {"vocab_size": 304, "max_position_embeddings": 128}
    if architecture == "gpt2":
        config = transformers.GPT2Config(vocab_size=304, n_positions=128, n_embd=width, n_layer=2, n_head=2,
                                         initializer_range=0.2)  # fmt: skip
    else:
        kind = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[architecture]
        config = kind(**sizes, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=architecture == "qwen2",
                      initializer_range=0.2)  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_chats(path: Path, num: int = 60) -> Path:
    """Write chats of one or two questions, of different lengths."""
    rows = []
    for i in range(num):
        messages = [{"role": "system", "content": "you are a horse"}] if i % 3 == 0 else []
        for turn in range(1 + i % 2):
            question = " ".join(WORDS[(i + turn + j) % len(WORDS)] for j in range(3 + i % 5))
            answer = " ".join(WORDS[(2 * i + 3 * turn + j) % len(WORDS)] for j in range(1 + i % 7))
            messages += [{"role": "user", "content": f"{question}?"}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n")
    return path
