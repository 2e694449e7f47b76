"""What evener's calls mean, in plain torch on one process: the truth from outside for the loops beside this file.

A step is the whole global batch; a loss sum is divided by the number of tokens of the batch; nothing else happens.
"""

from __future__ import annotations

import numpy as np
import torch

from evener.worker.train.datasets import as_dataset


class Run:
    """Takes the place of `evener.join(spec)`."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self, spec) -> None:
        self.spec, self.models, self.losses = spec, [], []
        torch.manual_seed(spec.train.seed)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def model(self, module):
        self.models.append(module)
        return module

    def optimizer(self, optimizer):
        return optimizer

    def state(self, name, thing):
        return thing

    def steps(self, source):
        dataset = as_dataset(source, self.spec)
        for index in range(self.spec.train.steps):
            step = Step(self, dataset, index)
            yield step
            self.losses.append(float(step.loss))


class Step:
    """One optimizer step."""

    def __init__(self, run: Run, dataset, index: int) -> None:
        self.run, self.dataset, self.index = run, dataset, index
        self.samples = dataset.global_batch(run.spec.train.seed, index, run.spec.train.batch)
        self.tokens = dataset.num_tokens(self.samples)
        self.loss = torch.zeros((), dtype=torch.float64)

    def micro_batches(self):
        for model in self.run.models:
            model.zero_grad()
        size = self.run.spec.train.micro_batch or len(self.samples)
        for part in np.split(self.samples, range(size, len(self.samples), size)):
            yield self.dataset.load(part, self.run.device)

    def backward(self, loss, tokens: float = 1.0) -> None:
        (loss * tokens / self.tokens).backward()
        self.loss += loss.detach() * tokens / self.tokens

    def update(self, *optimizers) -> None:
        parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if clip := self.run.spec.train.clip:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
