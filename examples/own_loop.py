import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evener

torch.manual_seed(0)  # the same data on every rank
points = torch.randn(4096, 2)
dataset = TensorDataset(points, (points.prod(1) > 0).long())  # which quadrant: 1 and 3, or 2 and 4?

spec = evener.parse_args(sys.argv[1:])  # the flags of `evener train`
with evener.join(spec) as run:  # join(spec, resume=True) goes on
    model = run.model(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
    for step in run.steps(dataset):  # measures, saves, verifies
        for x, y in step.micro_batches():  # this rank's share of the global batch
            step.backward(F.cross_entropy(model(x), y, reduction="sum"))  # a sum over samples
        step.update(optimizer)
        if step.index % 20 == 0 and run.last_record is not None:  # of the step before
            run.print_once(f"step {run.last_record.step}  loss {run.last_record.loss:.4f}")
    run.print_once(f"done; loss {run.last_record.loss:.4f}")
