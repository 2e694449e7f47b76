"""Reduce-scatters and all-gathers in pairs against what they are by definition."""

from __future__ import annotations

import pytest

from ..tiers import exhaustively

PROGRAM = """
import os, sys, torch, torch.distributed as dist
from evener.worker.script.gradient_compression import ProgramGroup
from evener.worker.sync.codecs import BlockwiseIntCodec
from evener.worker.sync.pairwise import PairwiseCollectives

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
groups = [ProgramGroup(rank, world, torch.device("cpu"), "gloo", dist.new_group(backend="gloo")) for _ in range(2)]
plain, coded = PairwiseCollectives(groups[0]), PairwiseCollectives(groups[1], BlockwiseIntCodec(8))

def numbers(other, dtype=torch.float32):
    # of another rank; whole numbers, whose sums are exact
    return torch.randint(-50, 50, (world, 300), generator=torch.Generator().manual_seed(other)).to(dtype)

def expected(dtype=torch.float32):
    return torch.stack([numbers(other, dtype)[rank] for other in range(world)]).double().sum(0)

for dtype in (torch.float32, torch.bfloat16, torch.int64):
    for is_mean in (False, True):
        output = torch.empty(300, dtype=dtype)
        if is_mean and dtype == torch.int64:
            continue
        done, sent_bytes = plain.reduce_scatter(list(numbers(rank, dtype)), output, is_mean=is_mean)
        done.result()
        right = (expected(dtype) / (world if is_mean else 1)).to(dtype)
        assert torch.equal(output, right), (dtype, is_mean)
        assert sent_bytes == (world - 1) * 300 * output.element_size()

# In place, as of parameters of which each rank has updated a part; the calls overlap.
whole, others = torch.full((world, 5), -1.0), torch.empty(world, 7)
whole[rank] = rank
first, _ = plain.all_gather(whole[rank], list(whole))
second, sent_bytes = plain.all_gather(torch.full((7,), 10.0 + rank), list(others))
second.result()
assert first.done() and sent_bytes == (world - 1) * 28
assert whole.tolist() == [[float(other)] * 5 for other in range(world)]
assert others.tolist() == [[10.0 + other] * 7 for other in range(world)]

# Encoded: what a step loses is sent in later ones, so that the error of the sum over steps does not grow.
generator, errors, total, right = torch.Generator().manual_seed(rank), [], torch.zeros(300), torch.zeros(300)
for step in range(40):
    coded.begin_scope(7)
    own, output = torch.randn(world, 300, generator=generator), torch.empty(300)
    done, sent_bytes = coded.reduce_scatter(list(own), output, is_mean=False)
    exact = torch.empty(300)
    plain.reduce_scatter(list(own), exact, is_mean=False)[0].result()
    done.result()
    total, right = total + output, right + exact
    errors.append((total - right).abs().max().item())
assert sent_bytes == (world - 1) * (512 + 4)  # two blocks of 256, each with a scale in bf16
assert 0 < max(errors) < 0.06 * (world - 1), errors  # half of 1/127 of the largest number of a block, from each peer
print("right", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, *exhaustively(3)])
def test_collectives_in_pairs_are_those_of_their_definition(run_script, ranks):
    done = run_script(PROGRAM, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("right") == ranks
