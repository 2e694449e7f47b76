"""An image classifier: a small convolutional network on digits that are drawn here, with DistributedDataParallel.

evener launch -- examples/digits.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evener

# The lit segments of a seven-segment display: top, upper left and right, middle, lower left and right, bottom.
SEGMENTS = [0x77, 0x12, 0x5D, 0x5B, 0x3A, 0x6B, 0x6F, 0x52, 0x7F, 0x7B]  # of 0 to 9, a bit each
PLACES = [(0, 0, 1, 6), (0, 0, 6, 1), (0, 5, 6, 1), (5, 0, 1, 6), (5, 0, 6, 1), (5, 5, 6, 1), (10, 0, 1, 6)]
SIZE = 16  # pixels


def draw_digits(number: int, seed: int) -> TensorDataset:
    """Draw digits at random places, with noise: images (N, 1, SIZE, SIZE) and their classes (N,)."""
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 10, (number,), generator=draw)
    images = 0.5 * torch.randn(number, 1, SIZE, SIZE, generator=draw)
    places = torch.randint(0, 5, (number, 2), generator=draw).tolist()
    for image, digit, (top, left) in zip(images, classes.tolist(), places, strict=True):
        for bit, (y, x, height, width) in enumerate(reversed(PLACES)):
            if SEGMENTS[digit] >> bit & 1:
                image[0, top + y : top + y + height, left + x : left + x + width] += 1
    return TensorDataset(images, classes)


def make_model() -> nn.Module:
    """Return a network of 24k parameters. GroupNorm looks at one image; BatchNorm would look at a rank's images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, 36), nn.ReLU(), nn.Linear(36, 10),
    )  # fmt: skip


def count_right(model: nn.Module, loader: DataLoader) -> torch.Tensor:
    """Return how many images of all ranks are classified right, and how many there are."""
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, classes in loader:
            counts += torch.tensor([(model(images).argmax(1) == classes).sum(), len(classes)])
    dist.all_reduce(counts)
    model.train()
    return counts


def main(epochs: int, batch: int) -> None:
    dist.init_process_group("gloo")
    data, held_out = draw_digits(3000, seed=1), draw_digits(600, seed=2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    evaluated = DataLoader(held_out, batch_size=100, sampler=DistributedSampler(held_out, shuffle=False))
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, classes in loader:
            loss = nn.functional.cross_entropy(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            evener.log(loss=loss)
        right, number = count_right(model, evaluated).tolist()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {right / number:.1%} of {number:.0f} new digits are right", flush=True)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "digits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=60, help="images of all ranks in a step")
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.batch)
