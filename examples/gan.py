"""A small GAN: two models in DistributedDataParallel, two optimizers, points on a ring of eight spots.

evener launch -- examples/gan.py
"""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evener

NUM_SPOTS, NOISE = 8, 16


def draw_points(number: int) -> TensorDataset:
    """Return points (N, 2) of a ring of spots, each with noise (N, NOISE) from which the generator makes another point.

    The noise belongs to a sample, so that it is the same whatever rank has the sample.
    """
    draw = torch.Generator().manual_seed(0)
    angles = torch.randint(0, NUM_SPOTS, (number,), generator=draw) * (2 * math.pi / NUM_SPOTS)
    points = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(number, 2, generator=draw)
    return TensorDataset(points, torch.randn(number, NOISE, generator=draw))


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs)
    )


def main(epochs: int, batch: int) -> None:
    dist.init_process_group("gloo")
    data = draw_points(6000)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    generator = DistributedDataParallel(perceptron(NOISE, 2))
    critic = DistributedDataParallel(perceptron(2, 1))
    to_critic = torch.optim.Adam(critic.parameters(), lr=5e-4, betas=(0.5, 0.9))
    to_generator = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.9))
    loss = nn.functional.binary_cross_entropy_with_logits
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for points, noise in loader:
            real, fake = torch.ones(len(points), 1), torch.zeros(len(points), 1)
            made = generator(noise)
            # One forward pass for both: DDP wants a backward pass after each.
            scores = critic(torch.cat([points, made.detach()]))
            critic_loss = loss(scores, torch.cat([real, fake]))
            to_critic.zero_grad()
            critic_loss.backward()
            to_critic.step()
            evener.log(loss=critic_loss)
            to_generator.zero_grad()
            loss(critic.module(made), real).backward()  # outside DDP: nobody needs these gradients of the critic
            to_generator.step()
        if dist.get_rank() == 0:
            with torch.no_grad():
                distance = (generator.module(noise).norm(dim=1) - 1).abs().mean()
            print(f"epoch {epoch}: {distance:.2f} from the ring; the critic's loss {critic_loss:.3f}", flush=True)
    if dist.get_rank() == 0:
        torch.save(generator.module.state_dict(), "gan.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=60, help="points of all ranks in a step")
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.batch)
