"""Reduce-scatters and all-gathers in pairs against what they are by definition."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta

import pytest
import torch

from evener.worker.rank.comm_thread import CommThread
from evener.worker.script.gloo_completion import work_class

from ..tiers import exhaustively

PROGRAM = """
import os, sys, torch, torch.distributed as dist
from evener.worker.script.program_sync import ProgramGroup
from evener.worker.sync.bucket_queue import GradBucketSlice
from evener.worker.sync.codecs import BlockwiseIntCodec
from evener.worker.sync.quantized import QuantizedAllReduce
from evener.worker.sync.pairwise import PIECE_NUMEL, PairwiseCollectives

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
groups = [ProgramGroup(rank, world, torch.device("cpu"), "gloo", dist.new_group(backend="gloo")) for _ in range(3)]
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

# Lossless in fewer bytes: of each part the first piece fits in bf16, the second does not, a short last one does.
packs = PairwiseCollectives(groups[2], packs=True)
values = torch.randn(world, 2 * PIECE_NUMEL + 999, generator=torch.Generator().manual_seed(rank))
values[:, :PIECE_NUMEL] = values[:, :PIECE_NUMEL].bfloat16().float()
values[:, 2 * PIECE_NUMEL :] = values[:, 2 * PIECE_NUMEL :].bfloat16().float()
for kind, (numbers_of_ranks, num_bytes_each) in {
    "mixed": (values, [2, 4, 2]),
    "none": (values + 0.001, [4, 4, 4]),
    "all": (values.bfloat16().float(), [2, 2, 2]),
}.items():
    packed, exact = torch.empty(len(values[0])), torch.empty(len(values[0]))
    done, sent_bytes = packs.reduce_scatter(list(numbers_of_ranks), packed, is_mean=True)
    plain.reduce_scatter(list(numbers_of_ranks), exact, is_mean=True)[0].result()
    done.result()
    assert torch.equal(packed, exact), kind
    num_bytes = sum(num * of for num, of in zip((PIECE_NUMEL, PIECE_NUMEL, 999), num_bytes_each))
    assert sent_bytes == (world - 1) * (num_bytes + 3), kind  # and which pieces are bf16

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
optimizer = torch.optim.SGD([torch.zeros(1)])
generator, errors, total, right = torch.Generator().manual_seed(rank), [], torch.zeros(300), torch.zeros(300)
for step in range(40):
    coded.begin_update(optimizer)
    own, output = torch.randn(world, 300, generator=generator), torch.empty(300)
    done, sent_bytes = coded.reduce_scatter(list(own), output, is_mean=False)
    exact = torch.empty(300)
    plain.reduce_scatter(list(own), exact, is_mean=False)[0].result()
    done.result()
    coded.end_update(optimizer)
    total, right = total + output, right + exact
    errors.append((total - right).abs().max().item())
assert sent_bytes == (world - 1) * (512 + 4)  # two blocks of 256, each with a scale in bf16
assert 0 < max(errors) < 0.06 * (world - 1), errors  # half of 1/127 of the largest number of a block, from each peer
# An overflow is sent once, and does not stay; outside of an optimizer's step nothing is encoded.
coded.begin_update(optimizer)
coded.reduce_scatter(list(torch.full((world, 300), float("inf"))), output, is_mean=False)[0].result()
assert not output.isfinite().any()
coded.end_update(optimizer)
coded.begin_update(optimizer)
coded.reduce_scatter(list(own), output, is_mean=False)[0].result()
assert output.isfinite().all()
coded.end_update(optimizer)
coded.reduce_scatter(list(own), output, is_mean=False)[0].result()
assert torch.equal(output, exact)
# So it is where DDP's buckets are summed.
algorithm, parameter = QuantizedAllReduce(groups[1], BlockwiseIntCodec(8)), torch.nn.Parameter(torch.zeros(300))

def summed(value):
    view = torch.full((300,), value)
    algorithm.run(GradBucketSlice(0, (parameter,), [view], False))
    return view

assert not summed(float("inf")).isfinite().any()
assert torch.allclose(summed(1.0), torch.full((300,), float(world)), rtol=0.01)
print("right", flush=True)
dist.destroy_process_group()
"""

LOST_PEER = """
import os, torch
from datetime import timedelta
from torch.distributed import ReduceOp, distributed_c10d as c10d
from evener.worker.script.gloo_completion import PairwiseExchanges, complete_gloo

complete_gloo(c10d, PairwiseExchanges("ddp"), replaces_nccl=False)
c10d.init_process_group("gloo", timeout=timedelta(seconds=20))
part, whole = torch.empty(2), torch.ones(4)
for op in (ReduceOp.SUM, ReduceOp.MAX):  # in pairs, and by an all-reduce
    c10d.reduce_scatter_single(part, whole, op, async_op=True).wait()
    assert part.tolist() == [2.0, 2.0] if op == ReduceOp.SUM else [1.0, 1.0]
c10d.barrier()
if c10d.get_rank() == 1:
    os._exit(0)
for op in (ReduceOp.SUM, ReduceOp.MAX):
    try:
        c10d.reduce_scatter_single(part, whole, op, async_op=True).wait()
    except RuntimeError:
        print("raised", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("ranks", [2, *exhaustively(3)])
def test_collectives_in_pairs_are_those_of_their_definition(run_script, ranks):
    done = run_script(PROGRAM, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("right") == ranks


def test_waiting_for_a_lost_peer_raises(run_script):
    done = run_script(LOST_PEER, ranks=2)
    assert done.stdout.count("raised") == 2, done.stdout + done.stderr[-3000:]


def test_failed_exchange_raises_for_whoever_waits():
    from torch.distributed import distributed_c10d

    done = Future()
    work = work_class(distributed_c10d)(done, torch.zeros(1), lambda call: call)
    future, after = work.get_future(), []
    chained = work.get_future().then(lambda one: after.append(one))
    with pytest.raises(TimeoutError):
        work.wait(timedelta(seconds=0.01))
    done.set_exception(RuntimeError("the peer is gone"))
    with pytest.raises(RuntimeError, match="the peer is gone"):
        work.wait()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        future.wait()
    chained.wait()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        after[0].value()
    assert work.is_completed()
    assert not work.is_success()


def test_what_a_program_does_then_may_wait_for_another_exchange():
    """As a hook does that gathers what it has reduced."""
    from torch.distributed import distributed_c10d

    thread, make = CommThread(torch.device("cpu")), work_class(distributed_c10d)

    def exchange():
        return make(thread.submit(lambda: None), torch.ones(1), lambda call: call)

    chained = exchange().get_future().then(lambda one: exchange().get_future().wait()[0] + one.value()[0])
    assert chained.wait().item() == 2.0
    thread.close()
