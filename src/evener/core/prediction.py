"""What will a step cost? What the planner is told and what it answers: pure data, kept in a run's plan.json.

    Job + Cluster ──predict──▶ Prediction

Whoever has a Prediction can ask again with one thing changed: a faster link, a host less, another batch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evener.core.shape import GPTShape
from evener.core.step import StepCost


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, as far as its cost depends on it."""

    model: str  # the preset's name
    shape: GPTShape
    batch: int  # sequences of a global batch, over all ranks
    micro_batch: int  # largest number of sequences in one backward
    dtype: Literal["fp32", "bf16", "fp16"]  # of the arithmetic; weights, gradients and optimizer are fp32
    recompute: bool = False  # activation checkpointing

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.shape.block_size


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two ranks."""

    latency_s: float  # α: a small message, one way, with what the backend does for it
    bandwidth_Bps: float  # β: payload, while as much comes back


class HostRates(msgspec.Struct, frozen=True, kw_only=True):
    """One host, and what each of its equal ranks can do."""

    name: str
    device: str  # cpu, cuda
    num_ranks: int = 1
    tokens_per_s: float  # a rank's forward and backward of this job's model, in large micro-batches
    own_tokens_per_s: float | None = None  # alone, in the arithmetic that suits it; None: the job's
    pass_s: float = 0.0  # what a forward and backward costs apart from its tokens
    update_s: float = 0.0  # clipping and the update of all parameters
    data_s: float = 0.0  # waiting for input, a step
    cpus: float | None = None  # processors at work while a rank computes
    sync_Bps: float | None = None  # bytes that one processor's time sends, receives and adds in a second
    sum_Bps: float | None = None  # γ: bytes of a buffer to which one thread adds another, in a second
    copy_Bps: float | None = None  # of memory, read and written
    local: Wire | None = None  # between two of its ranks
    memory_bytes: int | None = None  # a CPU's: of the host, for all its ranks; a GPU's: of each
    bound_by: str | None = None  # "arithmetic" or "memory"; None: not known

    @property
    def all_tokens_per_s(self) -> float:
        """Of all its ranks together."""
        return self.num_ranks * self.tokens_per_s


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The machines as the planner sees them. Ranks are counted host after host."""

    hosts: list[HostRates]
    wires: dict[str, dict[str, Wire]]  # from host to host
    backend: str  # gloo, nccl
    assumed: list[str] = []  # sentences: what nobody measured, and what stands in for it

    @property
    def num_ranks(self) -> int:
        """Over all hosts."""
        return sum(host.num_ranks for host in self.hosts)

    def host_of(self, rank: int) -> HostRates:
        """Where a rank runs."""
        for host in self.hosts:
            if rank < host.num_ranks:
                return host
            rank -= host.num_ranks
        raise IndexError(rank)


class RankCost(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a step."""

    rank: int
    host: str
    share: int  # sequences of the global batch
    cost: StepCost
    sync_s: float  # collectives in flight, hidden or not
    bytes: int  # payload that it sends
    memory_bytes: int | None  # at its peak


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the job."""

    name: str  # unique among the options: "ddp", "attic alone", "ddp without laptop", "ddp, shares 11 : 5"
    sync: str  # none, ddp, ddp+sparse, bf16, int8, int4, powersgd:4, fsdp, zero1, diloco:100, diloco:100:int4:streamed
    hosts: list[str]
    ranks: list[RankCost]
    step_s: float
    tokens_per_s: float
    speedup_vs_best_host: float | None  # None: no host can hold the model alone, or its rate is not known
    bytes_per_rank: int  # of the rank that sends most
    loss_penalty: float | None  # relative to ddp: 0.01 = 1 % more loss; 0 = exact; None = nobody measured it
    loss_source: str = ""  # who did
    is_built: bool = True  # does `train` know how to run it?
    rejected_because: str = ""  # "" = recommended

    @property
    def slowest(self) -> RankCost:
        """The rank that the others wait for."""
        return min(self.ranks, key=lambda rank: rank.cost.wait_s or 0.0)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's answer."""

    job: Job
    cluster: Cluster
    verdict: str  # one sentence
    recommended: str  # an option's name
    chosen: str  # the option that this run is: what `train` was told may differ from what is recommended
    options: list[Option]
    advice: list[str] = []  # sentences: where it would pay, what to leave out, what to measure

    def option(self, name: str) -> Option:
        """The option of that name."""
        return next(option for option in self.options if option.name == name)
