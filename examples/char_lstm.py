"""A language model of characters: an LSTM on the source code of Python's argparse, with DistributedDataParallel.

evener launch -- examples/char_lstm.py
"""

import argparse
import string

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evener

CHARACTERS = string.printable  # the same on every host, whatever its Python
LENGTH = 64  # characters of a sample


def read_samples() -> TensorDataset:
    """Cut the text into samples of LENGTH characters and the one that follows."""
    with open(argparse.__file__, encoding="utf-8") as file:
        text = [CHARACTERS.index(one) for one in file.read() if one in CHARACTERS]
    number = (len(text) - 1) // LENGTH
    inputs = torch.tensor(text[: number * LENGTH]).view(number, LENGTH)
    targets = torch.tensor(text[1 : number * LENGTH + 1]).view(number, LENGTH)
    return TensorDataset(inputs, targets)


class CharLSTM(nn.Module):
    """Predict the next character: (B, T) to (B, T, characters)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 32)
        self.lstm = nn.LSTM(32, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(text))[0])


def continue_text(model: nn.Module, start: str, length: int) -> str:
    """Return the text that the model finds most likely to follow."""
    text = torch.tensor([[CHARACTERS.index(one) for one in start]])
    with torch.no_grad():
        for _ in range(length):
            text = torch.cat([text, model(text[:, -LENGTH:])[:, -1:].argmax(-1)], dim=1)
    return "".join(CHARACTERS[one] for one in text[0])


def main(epochs: int, batch: int, width: int) -> None:
    dist.init_process_group("gloo")
    data = read_samples()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(CharLSTM(width))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            evener.log(loss=loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}: {continue_text(model.module, 'def ', 40)!r}", flush=True)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "char_lstm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=48, help="samples of all ranks in a step")
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.batch, arguments.width)
