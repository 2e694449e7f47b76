"""LoRA adapters of a causal language model that is made here, with transformers' Trainer and peft.

evener launch -- examples/lora.py
"""

import argparse
import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

LENGTH = 32  # tokens of a sample


def make_model() -> LlamaForCausalLM:
    """Return a Llama of 0.4M parameters, whose tokens are bytes."""
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def make_lines(number: int) -> list[str]:
    """Return sums such as "12 + 30 = 42"."""
    draw = random.Random(0)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(number)]
    return [f"{one} + {other} = {one + other}" for one, other in pairs]


def encode(line: str) -> dict[str, torch.Tensor]:
    """Return a sample whose tokens are bytes: 0 fills it up, and carries no loss."""
    tokens = torch.zeros(LENGTH, dtype=torch.long)
    content = torch.tensor([*line.encode()[: LENGTH - 1], ord("\n")])
    tokens[: len(content)] = content
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": tokens.where(tokens > 0, -100)}


def main(steps: int, batch: int) -> None:
    model = make_model()
    set_seed(0)  # adapters begin alike on all ranks, and in each number of ranks
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    settings = TrainingArguments(
        output_dir="lora",
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    settings.per_device_train_batch_size //= settings.world_size
    trainer = Trainer(model, settings, train_dataset=[encode(line) for line in make_lines(2000)])
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=24, help="samples of all ranks in a step")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.batch)
