"""Loops as people write them, each a few lines: `own.py NAME [plain|resume] FLAGS` trains one of LOOPS.

RESULT in the environment names a file for what this rank ends with. The images are random, and a fixed random network
says what is on them.
"""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import plain
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import evener
from evener.core.run.run_spec import parse_args

SAMPLES, CLASSES, STEPS = 480, 5, 30
_draw = torch.Generator().manual_seed(5)
X = torch.randn(SAMPLES, 1, 8, 8, generator=_draw)
Y = (X.flatten(1) @ torch.randn(64, CLASSES, generator=_draw)).argmax(1)
W = torch.rand(SAMPLES, generator=_draw) + 0.1


class Images:
    """evener's own protocol: samples drawn anew for each step."""

    def global_batch(self, seed, step, num_sequences):
        return np.random.default_rng([seed, step]).integers(SAMPLES, size=num_sequences)

    def num_tokens(self, samples):
        return len(samples)

    def load(self, samples, device):
        i = torch.from_numpy(samples)
        return X[i].to(device), Y[i].to(device), W[i].to(device)


class Net(nn.Module):
    """A small network whose parts the loops below replace."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.norm = nn.Identity()
        self.activation = nn.ReLU()
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.activation(self.norm(self.first(x.flatten(1))))
        return self.head(self.activation(self.second(x)))


def adamw(parameters, lr=1e-2):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr)


def cross_entropy(logits, y):
    return F.cross_entropy(logits, y, reduction="sum")


class Loop:
    """The loop itself, and what most have in common."""

    data = Images()

    def make(self, run) -> None:
        """Models, optimizers, states."""
        self.net = run.model(self.network())
        self.opt = run.optimizer(self.optimizer())

    def network(self):
        return Net()

    def optimizer(self):
        return adamw(self.net.parameters())

    def train(self, run) -> None:
        for step in run.steps(self.data):
            self.step = step
            for batch in step.micro_batches():
                self.learn(*batch)
            self.update()

    def learn(self, x, y, w) -> None:
        self.step.backward(cross_entropy(self.net(x), y))

    def update(self) -> None:
        self.step.update(self.opt)


class Cnn(Loop):
    def network(self):
        return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, CLASSES))


class Sgd(Loop):
    def optimizer(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Weights(Loop):
    """Every sample has a weight: the loss is their weighted mean."""

    class Data(Images):
        def num_tokens(self, samples):
            return float(W[torch.from_numpy(samples)].double().sum())

    data = Data()

    def learn(self, x, y, w):
        self.step.backward((F.cross_entropy(self.net(x), y, reduction="none") * w).sum())


class Unused(Loop):
    """A layer that forward never comes to."""

    def network(self):
        net = Net()
        net.extra = nn.Linear(3, 3)
        return net


class Sometimes(Unused):
    """A layer that some steps use: in the others an optimizer leaves it alone, and so its weights do not decay."""

    def network(self):
        net = Net()
        net.extra = nn.Linear(CLASSES, CLASSES)
        return net

    def learn(self, x, y, w):
        out = self.net(x)
        if self.step.index % 3 == 1:
            out = out + self.net.extra(out)
        self.step.backward(cross_entropy(out, y))


class OneRank(Sometimes):
    """A layer that only the samples of one class use, of which a rank may have none."""

    def learn(self, x, y, w):
        out = self.net(x)
        rare = (y == 0) & (x[:, 0, 0, 0] > 0.5)
        if rare.any():
            out = torch.where(rare[:, None], out + self.net.extra(out), out)
        self.step.backward(cross_entropy(out, y))


class Frozen(Loop):
    def network(self):
        net = Net()
        net.first.requires_grad_(False)
        return net


class Tied(Loop):
    """One module under two names, and one weight in two modules."""

    def network(self):
        net = Net()
        net.again = net.head
        net.norm = nn.Linear(16, 16)
        net.more = nn.Linear(16, 16)
        net.more.weight = net.norm.weight
        net.activation = nn.Sequential(net.more, nn.Tanh())
        return net


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


class Autograd(Loop):
    def network(self):
        net = Net()
        net.activation = type("Act", (nn.Module,), {"forward": lambda self, x: Swish.apply(x)})()
        return net


class Losses(Loop):
    """Two losses in one sum."""

    def learn(self, x, y, w):
        out = self.net(x)
        self.step.backward(cross_entropy(out, y) + 0.01 * out.square().sum())


class TwoBackwards(Loop):
    """Two forwards and two backwards in a micro-batch."""

    def learn(self, x, y, w):
        self.step.backward(cross_entropy(self.net(x), y))
        self.step.backward(0.01 * self.net(x).square().sum())


class ThreeBackwards(Loop):
    """Three, of different parts of the network, one of them through a kept graph."""

    def learn(self, x, y, w):
        out = self.net(x)
        first = cross_entropy(out, y)
        second = 0.02 * self.net.first.weight.square().sum() * len(x)
        self.step.backward(second)
        self.step.backward(first)
        self.step.backward(0.01 * self.net(x + 0.1).square().sum())


class Mean(Loop):
    """A mean, with what it was taken over."""

    def learn(self, x, y, w):
        self.step.backward(F.cross_entropy(self.net(x), y), len(x))


class MeanForSum(Loop):
    def learn(self, x, y, w):
        self.step.backward(F.cross_entropy(self.net(x), y))


class SumForMean(Loop):
    """A sum with a count, which belongs to a mean."""

    def learn(self, x, y, w):
        self.step.backward(F.cross_entropy(self.net(x), y, reduction="sum"), len(x))


class SumAndMean(Loop):
    def learn(self, x, y, w):
        self.step.backward(cross_entropy(self.net(x), y))
        self.step.backward(0.01 * self.net(x).square().mean())


class PenaltyOnWeights(Loop):
    """Once for each micro-batch, of however many samples."""

    def learn(self, x, y, w):
        penalty = 0.1 * sum(p.square().sum() for p in self.net.parameters())
        self.step.backward(cross_entropy(self.net(x), y) + penalty)


class OtherData(Loop):
    """Images that every rank draws for itself."""

    def make(self, run):
        super().make(run)
        self.data = TensorDataset(
            torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(run.rank)), Y, W
        )


class MeanOfSquares(Loop):
    """Noisy, and of few samples."""

    def network(self):
        net = Net()
        net.activation = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
        return net

    def learn(self, x, y, w):
        self.step.backward(F.mse_loss(self.net(x), F.one_hot(y, CLASSES).float()))


class Scheduler(Loop):
    """A learning rate that rises and falls."""

    def make(self, run):
        super().make(run)
        self.scheduler = run.state("scheduler", torch.optim.lr_scheduler.OneCycleLR(self.opt, 0.02, STEPS))

    def update(self):
        self.step.update(self.opt)
        self.scheduler.step()


class TwoOptimizers(Loop):
    """Matrices by SGD, vectors by AdamW, in one update: one clipping of one gradient."""

    def make(self, run):
        super().make(run)
        self.rest = run.optimizer(adamw(p for p in self.net.parameters() if p.ndim != 2))

    def optimizer(self):
        return torch.optim.SGD([p for p in self.net.parameters() if p.ndim == 2], 0.2, momentum=0.9)

    def update(self):
        self.step.update(self.opt, self.rest)


class Muon(TwoOptimizers):
    """It rounds the gradient to bf16: what is 1e-7 between one rank and two becomes 1e-3."""

    def optimizer(self):
        return torch.optim.Muon([p for p in self.net.parameters() if p.ndim == 2], 1e-2)


class MuonInFp32(Muon):
    """The same, its Newton-Schulz iteration in fp32: what is left is how gradients are added up."""

    def make(self, run):
        torch.optim._muon._zeropower_via_newtonschulz = self.newton_schulz
        super().make(run)

    @staticmethod
    def newton_schulz(grad, coefficients, steps, eps):
        a, b, c = coefficients
        x = grad.T if grad.size(0) > grad.size(1) else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if grad.size(0) > grad.size(1) else x


class OneAfterTheOther(TwoOptimizers):
    def update(self):
        self.step.update(self.opt)
        self.step.update(self.rest)


class Counting(torch.optim.Optimizer):
    """Adam's first moment with a count of steps that is an int, a rate that is a float and a mode that is text."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05, "mode": "warm"})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "rate": 1.0, "moment": torch.zeros_like(p)}
                state["count"] += 1
                state["rate"] *= 0.97
                state["moment"].lerp_(p.grad, 0.2)
                unbiased = state["moment"] / (1 - 0.8 ** state["count"])
                p -= group["lr"] * state["rate"] * (2.0 if group["mode"] == "warm" else 1.0) * unbiased
            if group["mode"] == "warm" and state["count"] == 9:
                group["mode"] = "cool"


class NoTensorState(Loop):
    def optimizer(self):
        return Counting(self.net.parameters())


class Groups(Loop):
    """Param groups whose values the loop changes as it goes."""

    def optimizer(self):
        matrices = [p for p in self.net.parameters() if p.ndim > 1]
        rest = [p for p in self.net.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.2, "note": "biases"}]
        return torch.optim.SGD(groups, 0.1, momentum=0.9)

    def update(self):
        self.step.update(self.opt)
        for group in self.opt.param_groups:
            group["lr"] *= 0.93


class Average:
    """An average of the weights toward which training is pulled: state of the program's own."""

    def __init__(self, net):
        self.weights = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.pull = 0.0

    def take(self, net):
        self.pull = min(0.05, self.pull + 0.004)
        for name, p in net.named_parameters():
            self.weights[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"weights": self.weights, "pull": self.pull}

    def load_state_dict(self, state):
        self.weights, self.pull = state["weights"], state["pull"]


class UserState(Loop):
    def make(self, run):
        super().make(run)
        self.average = run.state("average", Average(self.net))

    def learn(self, x, y, w):
        named = self.net.named_parameters()
        gap = sum((p - self.average.weights[name]).square().sum() for name, p in named)
        self.step.backward(cross_entropy(self.net(x), y) + self.average.pull * gap * len(x))

    def update(self):
        self.step.update(self.opt)
        self.average.take(self.net)


class Spectral(Loop):
    """Buffers that every forward moves."""

    def network(self):
        net = Net()
        net.head = nn.utils.parametrizations.spectral_norm(net.head)
        return net


class Replaced(Loop):
    """A buffer in whose place every forward puts another tensor."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x):
            before, self.mean = self.mean, 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - 0.5 * before

    def network(self):
        net = Net()
        net.norm = self.Centered()
        return net


class Normalizer(Loop):
    """A state that moves with every micro-batch, and samples that are disturbed by numpy's and Python's generators."""

    class Seen:
        def __init__(self) -> None:
            self.num = torch.zeros(1)

        def state_dict(self):
            return {"num": self.num}

        def load_state_dict(self, state):
            self.num = state["num"]

    def make(self, run):
        super().make(run)
        self.seen = run.state("seen", self.Seen())
        np.random.seed(run.rank)
        random.seed(run.rank)

    def learn(self, x, y, w):
        self.seen.num += len(x)
        noise = torch.from_numpy(np.random.randn(*x.shape)).float() * random.gauss(0, 0.1)
        self.step.backward(cross_entropy(self.net(x + noise), y) / (1 + self.seen.num / 1000))


class SharedBuffers(Loop):
    """Two buffers on one storage, one that is no tensor of its own shape in memory, one that is not saved."""

    def network(self):
        net = Net()
        table = torch.linspace(0.5, 1.5, 32).view(2, 16)
        net.register_buffer("table", table)
        net.register_buffer("row", table[1])
        net.register_buffer("turned", torch.arange(6.0).view(2, 3).T)
        net.register_buffer("scratch", torch.zeros(3), persistent=False)
        net.head = nn.Sequential(type("Scale", (nn.Module,), {"forward": lambda self, x: x * net.row})(), net.head)
        return net


class BatchNorm(Sgd):
    def network(self):
        net = Net()
        net.first = nn.Linear(64, 16, bias=False)  # the norm takes a bias away: its gradient would be rounding alone
        net.norm = nn.BatchNorm1d(16)
        return net


class Dropout(Loop):
    def network(self):
        net = Net()
        net.activation = nn.Sequential(nn.ReLU(), nn.Dropout(0.2))
        return net


class Scaled(Loop):
    """Loss scaling of the program's own."""

    def make(self, run):
        super().make(run)
        self.scaler = run.state("my-scaler", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4))

    def learn(self, x, y, w):
        self.step.backward(self.scaler.scale(cross_entropy(self.net(x), y)))

    def update(self):
        self.scaler.unscale_(self.opt)
        self.step.update(self.opt)
        self.scaler.update()


class Clipped(Loop):
    """A clipping of the program's own, before evener's."""

    def update(self):
        nn.utils.clip_grad_value_(self.net.parameters(), 0.01)
        self.step.update(self.opt)


class TorchDataset(Loop):
    data = TensorDataset(X, Y, W)


class Loader(Loop):
    def train(self, run):
        self.data = DataLoader(TensorDataset(X, Y, W), batch_size=run.spec.train.batch, shuffle=True)
        super().train(run)


class Stream(Loop):
    class Numbers(IterableDataset):
        def __iter__(self):
            yield from zip(X, Y, W, strict=True)

    data = Numbers()


class Lbfgs(Loop):
    def optimizer(self):
        return torch.optim.LBFGS(self.net.parameters())


class ObjectInState(Scheduler):
    """A schedule with an object of the program's own: found when it is first saved, or before the first step."""

    def make(self, run):
        Loop.make(self, run)

        class Decay:
            def __call__(self, step):
                return 0.9**step

            def __init__(self):
                self.table = {1: object()}

        self.scheduler = run.state("scheduler", torch.optim.lr_scheduler.LambdaLR(self.opt, Decay()))


class ForgottenScheduler(Scheduler):
    def make(self, run):
        Loop.make(self, run)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.opt, 0.02, STEPS)


class ForgottenBesideAnother(ForgottenScheduler):
    """What is remembered is not the scheduler."""

    def make(self, run):
        super().make(run)
        run.state("average", Average(self.net))


class Together(Scheduler):
    """The scheduler lies in a state of the program's own."""

    def make(self, run):
        Loop.make(self, run)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.opt, 0.02, STEPS)
        run.state("all", self)

    def state_dict(self):
        return {"schedule": self.scheduler.state_dict()}

    def load_state_dict(self, state):
        self.scheduler.load_state_dict(state["schedule"])


class ForgottenOptimizer(Loop):
    def update(self):
        self.step.update(adamw(self.net.parameters()))


class ForgottenBackward(Loop):
    """As a loop that was not evener's before."""

    def learn(self, x, y, w):
        cross_entropy(self.net(x), y).backward()


class ForgottenUpdate(Loop):
    def update(self):
        pass


class TwoPasses(Loop):
    """Micro-batches once more before the update."""

    def update(self):
        for batch in self.step.micro_batches():
            self.learn(*batch)
        self.step.update(self.opt)


class UpdateInside(Loop):
    def learn(self, x, y, w):
        super().learn(x, y, w)
        self.step.update(self.opt)

    def update(self):
        pass


class BackwardOutside(Loop):
    """A penalty once a step, after the loop over micro-batches."""

    def update(self):
        self.step.backward(self.net.first.weight.square().sum())
        self.step.update(self.opt)


class EarlyStop(Sgd):
    """The program leaves its loop when it has had enough."""

    def train(self, run):
        for step in run.steps(self.data):
            self.step = step
            for batch in step.micro_batches():
                self.learn(*batch)
            self.update()
            if step.index == 19:
                break


class Explodes(Sgd):
    """The last update leaves a weight that is no number: no loss ever shows it."""

    def update(self):
        super().update()
        if self.step.index == STEPS - 1:
            with torch.no_grad():
                self.net.second.weight[2, 3] /= 0


class Unfreeze(Loop):
    """A layer that is trained from the tenth step on."""

    def optimizer(self):
        return torch.optim.AdamW(self.net.parameters(), 1e-2)

    def learn(self, x, y, w):
        self.net.first.requires_grad_(self.step.index >= 9)
        super().learn(x, y, w)


class Freeze(Loop):
    """A layer that is trained until the tenth step."""

    def learn(self, x, y, w):
        self.net.first.requires_grad_(self.step.index < 9)
        super().learn(x, y, w)


class SparseGradients(Loop):
    def network(self):
        return nn.Sequential(nn.Flatten(), Signs(), nn.Flatten(), nn.Linear(64 * 3, CLASSES))

    def optimizer(self):
        return torch.optim.SGD(self.net.parameters(), 1e-2)


class Signs(nn.Module):
    """Each pixel's sign, embedded."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(128, 3, sparse=True)

    def forward(self, x):
        return self.table((x > 0).long() + 2 * torch.arange(64))


class LossWithParameters(Loop):
    """The loss has a parameter of its own, which was not given to run.model."""

    def make(self, run):
        self.temperature = nn.Parameter(torch.ones(()))
        super().make(run)

    def optimizer(self):
        return adamw([*self.net.parameters(), self.temperature])

    def learn(self, x, y, w):
        self.step.backward(cross_entropy(self.net(x) * self.temperature, y))


class Gan(Loop):
    """Two models, two optimizers, two passes and two updates a step; the noise is part of the data."""

    class Points:
        def global_batch(self, seed, step, num_sequences):
            return np.random.default_rng([seed, step]).standard_normal((num_sequences, 6)).astype("float32")

        def num_tokens(self, samples):
            return len(samples)

        def load(self, samples, device):
            return (torch.from_numpy(samples).to(device),)

    data = Points()

    def make(self, run):
        self.generator = run.model(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)))
        self.critic = run.model(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.of_generator = run.optimizer(torch.optim.Adam(self.generator.parameters(), 3e-3))
        self.of_critic = run.optimizer(torch.optim.Adam(self.critic.parameters(), 3e-3))

    def train(self, run):
        for step in run.steps(self.data):
            for (points,) in step.micro_batches():
                real, noise, _ = points.split(2, dim=1)
                step.backward(self.says(real * 0.5 + 2, 1.0) + self.says(self.generator(noise).detach(), 0.0))
            step.update(self.of_critic)
            for (points,) in step.micro_batches():
                step.backward(self.says(self.generator(points[:, 4:]), 1.0))
            step.update(self.of_generator)

    def says(self, points, what):
        logits = self.critic(points)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, what), reduction="sum")


class GanFrozen(Gan):
    """The critic is frozen while the generator learns."""

    def train(self, run):
        for step in run.steps(self.data):
            self.critic.requires_grad_(True)
            for (points,) in step.micro_batches():
                real, noise, _ = points.split(2, dim=1)
                step.backward(self.says(real * 0.5 + 2, 1.0) + self.says(self.generator(noise).detach(), 0.0))
            step.update(self.of_critic)
            self.critic.requires_grad_(False)
            for (points,) in step.micro_batches():
                step.backward(self.says(self.generator(points[:, 4:]), 1.0))
            step.update(self.of_generator)


class GanInOnePass(Gan):
    """Both losses in one pass: one exchange. The generator's gradient must not reach the critic."""

    def train(self, run):
        for step in run.steps(self.data):
            for (points,) in step.micro_batches():
                real, noise, _ = points.split(2, dim=1)
                fake = self.generator(noise)
                step.backward(self.says(real * 0.5 + 2, 1.0) + self.says(fake.detach(), 0.0))
                self.critic.requires_grad_(False)
                step.backward(self.says(fake, 1.0))
                self.critic.requires_grad_(True)
            step.update(self.of_critic, self.of_generator)


class TwoModels(Loop):
    """A backbone and a head of their own, one optimizer over both."""

    def make(self, run):
        self.net = run.model(Net())
        self.top = run.model(nn.Linear(CLASSES, CLASSES))
        self.opt = run.optimizer(adamw([*self.net.parameters(), *self.top.parameters()]))

    def learn(self, x, y, w):
        self.step.backward(cross_entropy(self.top(self.net(x).relu()), y))


LOOPS = {name: thing for name, thing in globals().items() if isinstance(thing, type) and issubclass(thing, Loop)}


def main() -> None:
    name, mode, flags = sys.argv[1], sys.argv[2], sys.argv[3:]
    loop, spec = LOOPS[name](), parse_args(flags)
    with plain.Run(spec) if mode == "plain" else evener.join(spec, resume=mode == "resume") as run:
        loop.make(run)
        loop.train(run)
    if result := os.environ.get("RESULT"):
        models = {name: model for name, model in vars(loop).items() if isinstance(model, nn.Module)}
        tensors = {f"{name}.{key}": value for name, net in models.items() for key, value in net.state_dict().items()}
        torch.save({"tensors": tensors, "losses": getattr(run, "losses", None)}, result)


if __name__ == "__main__":
    main()
