"""Drifting replicas lose no update, whenever and however often the membership changes."""

from __future__ import annotations

import json

import pytest

from ..tiers import exhaustive, exhaustively

# Each rank's weights go a step of their own each time, whatever they are. Without an outer momentum all end where they
# began plus the mean of what the ranks went, by tokens, however often and whenever an exchange failed.
REPLICAS = """
import faulthandler, json, math, os, random, sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from evener.core.run.peer_failure import is_peer_failure
from evener.core.run.roster import Roster, parse_sync
from evener.plan.cost import sync_traffic as plan
from evener.worker.rank.clock import HostClock
from evener.worker.rank.process_groups import ProcessGroups, _open_sockets
from evener.worker.sync.diloco import DiLoCo
from evener.worker.sync.streaming_diloco import StreamingDiLoCo

plan.FRAGMENT_BYTES = 8000  # several fragments
spec, CUTS, place, n = parse_sync(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
chance = random.Random(f"{spec} {n} {place}")

class World(ProcessGroups):
    def __init__(self):
        self.device, self.number_of_world = torch.device("cpu"), -1

    def begin(self):
        self.number_of_world += 1
        self.rank, self.world_size, self.member_ranks, self.backend = place, n, list(range(n)), "gloo"
        self._sockets_before, self._epoch_sockets = _open_sockets(), None
        mine = dist.PrefixStore(str(self.number_of_world), store)
        dist.init_process_group("gloo", store=mine, rank=place, world_size=n)
        soon = timedelta(seconds=2)  # Gloo misses an end now and then
        self.control_group, self.gradient_group = (dist.new_group(backend="gloo", timeout=soon) for _ in range(2))
        dist.barrier()  # no world is lost before all are in it
        self._epoch_sockets = _open_sockets() - self._sockets_before
        if self.number_of_world <= CUTS and self.number_of_world % n == place:
            threading.Timer(chance.uniform(0.0, 0.05) + (not self.number_of_world), self.shut_down_connections).start()

group = World()
group.begin()
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(40, 70), nn.LayerNorm(70), nn.Linear(70, 30), nn.Linear(30, 11))
momentum = None if sys.argv[3] == "its own" else lambda tokens: 0.0
sync = (StreamingDiLoCo if spec.streamed else DiLoCo)(group, HostClock(), lambda part: None, spec, momentum=momentum)
mine = torch.Generator().manual_seed(place)
parameters, stop, step = list(module.parameters()), math.inf, 0
began = torch.cat([one.detach().reshape(-1) for one in parameters])
went = torch.zeros_like(began, dtype=torch.float64)
tokens = float(1 + place)

def meet():
    global stop
    while True:
        group.shut_down_connections()
        sync.abort()
        group.leave_epoch()
        try:
            group.begin()
            sync.adopt_roster(Roster(members=[], sync=spec, backend="gloo"))
            if group.number_of_world > CUTS:
                told = [json.loads(one) for one in group.all_gather_bytes(json.dumps([stop, step]).encode())]
                stop = min(min(stop for stop, _ in told), max(step for _, step in told) + 2 * spec.every)
            return
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise

def again(do, *args):
    while True:
        try:
            return do(*args)
        except RuntimeError as error:
            if not is_peer_failure(error):
                raise
            meet()

faulthandler.dump_traceback_later(170, exit=True)
again(sync.wrap, module, True)
while step < stop:
    time.sleep(chance.uniform(0.0, 0.003))
    moves = [torch.randn(one.shape, generator=mine) * 1e-3 for one in parameters]
    with torch.no_grad():
        for parameter, move in zip(parameters, moves):
            parameter.add_(move)
    went += torch.cat([move.double().reshape(-1) for move in moves])
    sync.after_optimizer_step(tokens, sum(1.0 + one for one in range(n)))
    again(sync.after_step, step)
    step += 1
again(sync.merge_replicas)
momenta = [one.momentum for one in sync._fragments if spec.has_outer_momentum]
held = torch.cat([one.detach().reshape(-1) for one in parameters] + momenta)
everyone = [torch.empty_like(held) for _ in range(n)]
dist.all_gather(everyone, held)
mean = went * tokens / sum(1.0 + one for one in range(n))
dist.all_reduce(mean)
if place == 0:
    print(json.dumps([all(bool(held.equal(one)) for one in everyone),
                      float((held[: len(began)] - began - mean).abs().max()), float(mean.abs().max()),
                      group.number_of_world, step]))
sys.stdout.flush()
dist.barrier()
os._exit(0)
"""


@exhaustive
@pytest.mark.parametrize(
    ("sync", "ranks"),
    [
        ("diloco:4", 2),
        *exhaustively(
            ("diloco:6:int8:streamed", 2),
            ("diloco:6", 3),
            ("diloco:6:streamed", 2),
            ("diloco:6:streamed", 3),
            ("diloco:6:int8", 2),
            ("diloco:4:int8", 3),
            ("diloco:6:int8:streamed", 3),
        ),
    ],
)
def test_membership_change_at_any_time_loses_no_update(torchrun, sync, ranks):
    """The closed form: what each rank went, by tokens. Codes lose what they had left of flights that failed.

    torchrun has the store in which worlds meet: of a rank all connections are cut.
    """
    done = torchrun(REPLICAS, sync, "12", "none", ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    are_equal, off, length, cuts, steps = json.loads(done.stdout.splitlines()[-1])
    assert are_equal
    assert cuts >= 13
    assert off < (length / 50 if "int" in sync else 3e-6), (off, length, steps)


@exhaustive
@pytest.mark.parametrize("sync", ["diloco:6:int8", *exhaustively("diloco:6:streamed")])
def test_replicas_and_outer_momentum_are_equal_after_any_membership_change(torchrun, sync):
    done = torchrun(REPLICAS, sync, "12", "its own", ranks=3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])[0] is True


LOST_PEERS = """
import os, sys, threading, time
import torch.distributed as dist
from evener.core.run.membership_epoch import MembershipEpoch, Rendezvous
from evener.worker.rank import process_groups

place, num, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
lost = num - 2  # peers; the last rank is a fresh one
store = dist.TCPStore("127.0.0.1", port, num, place == 0, wait_for_workers=False)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    del os.environ[name]
process_groups._connect_store = lambda rendezvous, rank: dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
group = process_groups.ProcessGroups("cpu")

def join(number, rank):
    epoch = MembershipEpoch(number=number, hosts=["a", "b"])
    group.join_epoch(Rendezvous(epoch=epoch, port=port, first_rank=rank, world_size=2))

def lose_epochs():  # each when Gloo waits for its peer
    while True:
        time.sleep(0.05)
        if time.monotonic() - began > 0.7:
            group.shut_down_connections()

if 0 < place <= lost:  # it has told its address, and ends before anybody connects
    threading.Thread(target=join, args=[place, 1], daemon=True).start()
while store.num_keys() < lost:
    time.sleep(0.02)
if 0 < place <= lost:
    os._exit(0)
if place == 0:
    time.sleep(0.5)
    began = time.monotonic()
    threading.Thread(target=lose_epochs, daemon=True).start()
    for number in range(1, lost + 1):
        began = time.monotonic()
        try:
            join(number, 0)
            dist.barrier()
        except RuntimeError:
            print(f"failed {time.monotonic() - began:.1f}", flush=True)
        group.leave_epoch()
    began = float("inf")
    store.set("come", "")
else:
    store.wait(["come"])
join(num, int(place > 0))
dist.barrier()
if place == 0:
    print("joined", flush=True)
    store.set("end", "")
    time.sleep(1.0)  # the store is this process's
else:
    store.wait(["end"])
os._exit(0)
"""


def test_peer_that_is_lost_while_a_group_is_formed_hangs_nobody(run_script):
    """Of each pair one connects and the other waits, by their ports: seven pairs. A fresh rank can join afterwards."""
    done = run_script(LOST_PEERS, ranks=9)
    assert done.returncode == 0, done.stderr
    *failed, joined = done.stdout.splitlines()
    assert joined == "joined"
    took_s = [float(line.removeprefix("failed ")) for line in failed]
    assert len(took_s) == 7
    assert max(took_s) < 20, took_s
