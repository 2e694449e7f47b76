"""Roster: the ranks that take part from one step on, their shares of the global batch, and the sync strategy.

Everything that may differ between two ranks or change during a run is in the Roster, and nowhere else. The planner
makes the first one and stores it in plan.json. The ranks compare it before their first step and take their work from it
alone. A change makes the next Roster, which all ranks adopt at the same step.

    rank slots of the hosts ──▶ initial_roster() ──▶ Roster 0 ──with_shares()──▶ Roster 1 ──▶ …
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from evener.core.base.errors import UsageError, did_you_mean
from evener.core.base.units import pluralize
from evener.core.cluster.fleet_file import HostConfig
from evener.core.run.run_spec import MachineSpec, RunSpec

Dtype = Literal["fp32", "bf16", "fp16"]
Backend = Literal["gloo", "nccl", "none"]
SyncKind = Literal["none", "ddp", "packed", "bf16", "int8", "int4", "powersgd", "fsdp", "hsdp", "zero1", "diloco"]

SHARDED_KINDS: tuple[SyncKind, ...] = ("fsdp", "hsdp", "zero1")
LOSSY_KINDS: tuple[SyncKind, ...] = ("bf16", "int8", "int4", "powersgd", "diloco")
MICRO_BATCH_TOKENS = 16384  # *assumption*: enough to keep a processor busy, few enough to fit in memory


# --- sync strategies --------------------------------------------------------------------------------------------------


# *Measured*: without a momentum two replicas lose less with H up to 3, more with H = 10; between them, *assumption*.
MAX_STEPS_WITHOUT_MOMENTUM = 4


class SyncSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A sync strategy, parsed from its name. `str()` returns the name that `parse_sync` reads.

    >>> str(SyncSpec(kind="diloco", every=100, bits=4, streamed=True))
    'diloco:100:int4:streamed'
    """

    kind: SyncKind
    sparse: bool = False  # gradients of lookup-only embedding tables are sent row by row
    rank: int = 0  # of PowerSGD's factors
    every: int = 1  # steps from one synchronization to the next
    bits: int = 32  # per value that DiLoCo sends
    streamed: bool = False  # DiLoCo's exchange overlaps the following steps

    @property
    def drifts(self) -> bool:
        """Return whether replicas drift: each steps with its own gradients, and weights are synchronized every `every`
        steps. Otherwise all ranks step with the same gradients, and replicas stay equal.
        """
        return self.kind == "diloco"

    @property
    def has_outer_momentum(self) -> bool:
        """Return whether DiLoCo's outer optimizer has a momentum: only if more than MAX_STEPS_WITHOUT_MOMENTUM steps
        lie between two synchronizations.
        """
        return self.drifts and self.every > MAX_STEPS_WITHOUT_MOMENTUM

    @property
    def is_exact(self) -> bool:
        """Return whether every step uses the sum of all ranks' gradients, exact up to rounding, as sums are taken in
        another order.
        """
        return self.kind not in LOSSY_KINDS

    @property
    def has_buckets(self) -> bool:
        """Return whether `train` exchanges gradients bucket by bucket in every step."""
        return self.kind != "none" and not self.drifts and not self.is_sharded

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds a part of the weights and of the optimizer's state between steps."""
        return self.kind in SHARDED_KINDS

    def __str__(self) -> str:
        words: list[str] = [self.kind]
        if self.kind == "powersgd":
            words.append(str(self.rank))
        if self.kind == "diloco":
            words.append(str(self.every))
            words += [f"int{self.bits}"] if self.bits < 32 else []
            words += ["streamed"] if self.streamed else []
        return ":".join(words) + ("+sparse" if self.sparse else "")


NO_SYNC, DDP = SyncSpec(kind="none"), SyncSpec(kind="ddp")
_GRAMMAR = re.compile(
    r"(?P<plain>none|fsdp|hsdp|zero1)|((?P<dense>ddp|packed|bf16|int8|int4)|powersgd:(?P<rank>[1-9]\d{0,5}))(?P<sparse>\+sparse)?"
    r"|diloco:(?P<every>[1-9]\d{0,5})(:int(?P<bits>8|4))?(?P<streamed>:streamed)?"
)
SYNC_EXAMPLES = ("none", "ddp", "packed", "bf16", "int8", "int4", "int8+sparse", "powersgd:4", "fsdp", "hsdp",
                 "zero1", "diloco:30")  # fmt: skip
_PARAMETER_HINTS = {
    "powersgd": "powersgd:R of rank R, from 1 to 999999",
    "diloco": "diloco:H, synchronizing every H steps, H from 1 to 999999; optionally :int8 or :int4, then :streamed",
    "hsdp": "hsdp, without more: it sends weights and the gradients in fp32, in every step",
    "fsdp": "fsdp, without more: it sends weights and the gradients in fp32, in every step",
    "zero1": "zero1, without more: it sends weights and the gradients in fp32, in every step",
}


PROGRAM_KINDS: tuple[SyncKind, ...] = ("ddp", "packed", "bf16", "int8", "int4", "powersgd", "diloco")


def check_sync_of_program(sync: SyncSpec) -> None:
    """Raise UsageError for a strategy that the DDP models of a user's own program cannot have."""
    if sync.kind not in PROGRAM_KINDS or sync.sparse:
        raise UsageError(f"--sync {sync}: not for a program of your own",
                         hint=f"--sync {', '.join(PROGRAM_KINDS[:-2])}, powersgd:4 or diloco:10")  # fmt: skip
    if sync.streamed:
        raise UsageError(
            f"--sync {sync}: not for a program of your own: what it saves would be one rank's own model at any time",
            hint=f"--sync {str(sync).removesuffix(':streamed')}",
        )
    if sync.drifts and not sync.has_outer_momentum:
        raise UsageError(
            f"--sync {sync}: not for a program of your own: so few steps need another learning rate",
            hint=f"diloco:{MAX_STEPS_WITHOUT_MOMENTUM + 1} or more",
        )


def parse_sync(text: str) -> SyncSpec:
    """Return the sync strategy of this name. Raise UsageError if there is none.

    >>> parse_sync("powersgd:4").rank, parse_sync("diloco:30:int8").bits, parse_sync("ddp") == DDP
    (4, 8, True)
    """
    matched = _GRAMMAR.fullmatch(text)
    if matched is None:
        hint = _PARAMETER_HINTS.get(re.split("[:+]", text)[0]) or did_you_mean(text, ["auto", *SYNC_EXAMPLES[1:]])
        raise UsageError(f"--sync {text}: no such strategy", hint=hint)
    sparse = bool(matched["sparse"])
    if name := matched["plain"] or matched["dense"]:
        return SyncSpec(kind=name, sparse=sparse)  # type: ignore[arg-type]  # the grammar has the same names
    if matched["rank"]:
        return SyncSpec(kind="powersgd", rank=int(matched["rank"]), sparse=sparse)
    bits, streamed = int(matched["bits"] or 32), bool(matched["streamed"])
    return SyncSpec(kind="diloco", every=int(matched["every"]), bits=bits, streamed=streamed)


# --- ranks and the roster ---------------------------------------------------------------------------------------------


class RankSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A device on a host where one rank can run."""

    host: str
    device: str  # cpu, cuda:0, cuda:1, …
    name: str = ""  # the manufacturer's name of the device
    has_bf16: bool = False  # in hardware


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a Roster, and its share of every step."""

    rank: int  # constant throughout the run; the names of the rank's files contain it
    host: str
    device: str  # cpu, cuda:0, …
    dtype: Dtype  # of forward and backward; weights, gradients and optimizer are fp32
    share: int  # sequences of the global batch; 0: the rank takes part in everything except forward and backward
    micro_batch: int  # largest number of sequences in one backward

    @property
    def is_gpu(self) -> bool:
        """Return whether the rank computes on a GPU."""
        return self.device != "cpu"

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Sequences in each micro-batch of the share: the fewest micro-batches within the limit, as equal as possible.

        >>> member = Member(rank=0, host="attic", device="cpu", dtype="fp32", share=11, micro_batch=4)
        >>> member.micro_batch_sizes
        [4, 4, 3]
        """
        return equal_shares(self.share, self.num_micro_batches) if self.share else []

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches; 0 without a share."""
        return num_micro_batches(self.share, self.micro_batch) if self.share else 0

    @property
    def largest_micro_batch(self) -> int:
        """Sequences in the largest (first) micro-batch; 0 without a share."""
        return -(-self.share // self.num_micro_batches) if self.share else 0

    @property
    def last_micro_batch(self) -> int:
        """Sequences in the last micro-batch; 0 without a share."""
        return self.share // self.num_micro_batches if self.share else 0


def num_micro_batches(share: int, micro_batch: int) -> int:
    """Return the number of micro-batches that a share needs.

    >>> num_micro_batches(17, 16), num_micro_batches(16, 16), num_micro_batches(0, 16)
    (2, 1, 0)
    """
    return -(-share // micro_batch)


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that take part from one step on, their shares of the global batch, and the sync strategy."""

    epoch: int = 0  # roster epoch: incremented with each change
    from_step: int = 0  # the first step that uses this Roster
    members: list[Member]  # in the order of the process group; equal to the order of ranks until a host has left
    sync: SyncSpec
    backend: Backend  # of the collectives; none: one rank
    bucket_bytes: int = 0  # largest gradient bucket; 0: the strategy's default
    round_shares: list[int] = []  # by rank, sequences of a round of `sync.every` batches, if its steps divide unequally
    why: str = ""  # the reason for the change from the previous Roster
    is_trial: bool = False  # a rank without a share, or a strategy, is tried; or a rank has just failed its trial

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def batch(self) -> int:
        """Sequences in the global batch."""
        return sum(member.share for member in self.members)

    @property
    def shares(self) -> list[int]:
        """Sequences of the global batch, by rank."""
        return [member.share for member in self.members]

    @property
    def has_equal_shares(self) -> bool:
        """Return whether the shares are as equal as whole sequences allow."""
        return self.mean_shares == equal_shares(self.batch, self.world_size)

    @property
    def mean_shares(self) -> list[float]:
        """Mean sequences a step, by rank, over the steps of a round."""
        return [share / self.sync.every for share in self.round_shares] or [float(share) for share in self.shares]

    @property
    def hosts(self) -> list[str]:
        """The host names, in the order of the ranks."""
        return list(dict.fromkeys(member.host for member in self.members))

    @property
    def dtypes_text(self) -> str:
        """The dtypes of all members as text: "bf16", or "bf16 and fp32"."""
        return " and ".join(dict.fromkeys(member.dtype for member in self.members))

    def rank_label(self, rank: int) -> str:
        """Return how messages name a rank: "rank 1" on one host; else its host, "b", or "b:0", "b:1" if b has two."""
        host = next((member.host for member in self.members if member.rank == rank), None)
        if len(self.hosts) == 1 or host is None:
            return f"rank {rank}"
        of_host = [member.rank for member in self.members if member.host == host]
        return host if len(of_host) == 1 else f"{host}:{of_host.index(rank)}"

    def divide_work(self, num: int) -> list[int]:
        """Divide `num` units of work among the ranks in proportion to their shares."""
        return weighted_shares(num, self.mean_shares)

    def num_passes(self, rank: int, work: Sequence[int]) -> int:
        """Return the number of forward passes in which a rank does its part of `work`, sequences by rank.

        With sharded weights it is the same on all ranks, as all take part in each gathering of the weights.
        """
        ranks = range(self.world_size) if self.sync.is_sharded else (rank,)
        return max(num_micro_batches(work[one], self.members[one].micro_batch) for one in ranks)

    def micro_batch_sizes(self, rank: int) -> list[int]:
        """Return the sequences in each micro-batch of a rank's share; with sharded weights the first may be empty."""
        num = self.num_passes(rank, self.shares)
        sizes = equal_shares(self.shares[rank], num) if num else []
        return sizes[::-1] if self.sync.is_sharded else sizes

    def at_step(self, step: int) -> Roster:
        """Return the Roster with the shares of one step, which may differ between the steps of a DiLoCo round."""
        if not self.round_shares:
            return self
        return self.replace_shares(step_shares(self.round_shares, self.sync.every, step - self.from_step))

    def replace_shares(self, shares: Sequence[int], micro_batch: int | None = None) -> Roster:
        """Return this Roster with other shares, which sum to the batch or to the `sync.every` batches of a round.

        In the latter case the shares may differ from step to step.
        """
        batch, every, is_of_round = self.batch, self.sync.every, sum(shares) != self.batch
        assert not is_of_round or sum(shares) == batch * every, f"shares {shares} of a batch of {batch}"
        step_shares = weighted_shares(batch, shares) if is_of_round else shares
        is_of_round = is_of_round and any(share % every for share in shares)
        if step_shares == self.shares and not is_of_round and micro_batch is None:
            return msgspec.structs.replace(self, round_shares=[]) if self.round_shares else self
        members = [msgspec.structs.replace(member, share=share, micro_batch=micro_batch or member.micro_batch)
                   for member, share in zip(self.members, step_shares, strict=True)]  # fmt: skip
        return msgspec.structs.replace(self, members=members, round_shares=list(shares) if is_of_round else [])

    def first_sequence(self, rank: int) -> int:
        """Return the index in the global batch of the first sequence of a rank's share; shares are contiguous."""
        return sum(self.shares[:rank])

    def largest_uniform_micro_batch(self) -> int | None:
        """Return the largest micro-batch that divides the global batch into two or more per rank, or None."""
        largest = self.batch // (2 * self.world_size)
        return next((size for size in range(largest, 0, -1) if self.batch % size == 0), None)

    def with_shares(self, shares: Sequence[int], from_step: int, micro_batch: int | None = None, *, why: str = "",
                    is_trial: bool = False) -> Roster:  # fmt: skip
        """Return the next Roster: these shares, with the current micro-batch limits or one limit for all ranks."""
        return msgspec.structs.replace(
            self.replace_shares(shares, micro_batch),
            epoch=self.epoch + 1,
            from_step=from_step,
            why=why,
            is_trial=is_trial,
        )

    def replace_sync(self, sync: SyncSpec, bucket_bytes: int = 0) -> Roster:
        """Return this Roster with another sync strategy and the same shares in every step."""
        return msgspec.structs.replace(self, sync=sync, bucket_bytes=bucket_bytes, round_shares=[])

    def with_sync(self, sync: SyncSpec, bucket_bytes: int, from_step: int, *, why: str,
                  is_trial: bool = False) -> Roster:  # fmt: skip
        """Return the next Roster: another sync strategy, everything else unchanged."""
        return msgspec.structs.replace(self.replace_sync(sync, bucket_bytes), epoch=self.epoch + 1, from_step=from_step,
                                       why=why, is_trial=is_trial)  # fmt: skip

    def renumber_ranks(self) -> Roster:
        """Return this Roster with the ranks renumbered 0, 1, … in their order, as a plan numbers them."""
        members = [msgspec.structs.replace(member, rank=rank) for rank, member in enumerate(self.members)]
        return msgspec.structs.replace(self, members=members)

    def for_hosts(self, hosts: Sequence[str], epoch: int, why: str) -> Roster:
        """Return the Roster of these hosts' ranks, in this order; they take over the shares of the other ranks."""
        members = [member for host in hosts for member in self.members if member.host == host]
        weights = [self.mean_shares[self.members.index(member)] for member in members]
        is_equal = self.has_equal_shares or not any(weights)
        shares = equal_shares(self.batch, len(members)) if is_equal else weighted_shares(self.batch, weights)
        is_single = len(members) == 1
        left = msgspec.structs.replace(
            self,
            epoch=epoch,
            members=[msgspec.structs.replace(m, share=share) for m, share in zip(members, shares, strict=True)],
            sync=NO_SYNC if is_single else self.sync,
            backend="none" if is_single else self.backend,
            round_shares=[],
            why=why,
        )
        return left.replace_sync(SyncSpec(kind="fsdp")) if why_not_hsdp(left) else left

    def for_single_rank(self, member: Member) -> Roster:
        """Return the Roster in which this member is the only rank and computes the whole batch."""
        return msgspec.structs.replace(self, members=[msgspec.structs.replace(member, share=self.batch)],
                                       sync=NO_SYNC, backend="none", round_shares=[])  # fmt: skip

    def with_weights(self, weights: Sequence[float], from_step: int) -> Roster:
        """Return the next Roster: shares in proportion to the ranks' weights, everything else unchanged."""
        return self.with_shares(weighted_shares(self.batch, weights), from_step, why="weights set by the program")


def requested_device(host: HostConfig, machine: MachineSpec) -> Literal["auto", "cpu", "cuda"]:
    """Return the device requested for the ranks of a host: `--device` takes precedence over the fleet file."""
    return machine.device if machine.device != "auto" else host.devices


def rank_devices(name: str, host: HostConfig, num_gpus: int, machine: MachineSpec) -> list[str]:
    """Return the device of each rank of a host: one rank per GPU, else the requested number of CPU ranks.

    Raise UsageError if GPUs were requested and the host has none.

    >>> rank_devices("attic", HostConfig(address="local"), 2, MachineSpec())
    ['cuda:0', 'cuda:1']
    >>> rank_devices("laptop", HostConfig(address="192.168.1.28", ranks=2), 0, MachineSpec())
    ['cpu', 'cpu']
    """
    requested = requested_device(host, machine)
    if requested == "cuda" and not num_gpus:
        raise UsageError(f"{name}: ranks asked for GPUs, and it has none", hint="--device cpu trains on the processor")
    if requested == "cpu" or not num_gpus:
        return ["cpu"] * (host.ranks or machine.ranks)
    return [f"cuda:{rank % num_gpus}" for rank in range(host.ranks or num_gpus)]


def choose_backend(slots: Sequence[RankSlot], requested: Literal["auto", "gloo", "nccl"]) -> Backend:
    """Return the collective backend for these slots: NCCL if each rank has a GPU to itself, else Gloo.

    NCCL moves GPU memory only and refuses two ranks on one GPU. Raise UsageError if it was requested nevertheless.
    """
    if len(slots) == 1:
        return "none"
    rank = rank_without_gpu(slots)
    if requested == "nccl" and rank is not None:
        device = slots[rank].device
        where = "the processor" if device == "cpu" else device
        where += ", as does another rank" if device.startswith("cuda") else ""
        raise UsageError(
            f"--backend nccl: rank {rank} on {slots[rank].host} trains on {where}",
            hint="--backend gloo, or a GPU for every rank",
        )
    if requested != "auto":
        return requested
    return "nccl" if rank is None else "gloo"


def rank_without_gpu(slots: Sequence[RankSlot]) -> int | None:
    """Return the first rank on a CPU or on a GPU of a lower rank, or None if each rank has a GPU to itself.

    >>> rank_without_gpu([RankSlot(host="attic", device="cuda:0"), RankSlot(host="attic", device="cuda:0")])
    1
    """
    taken: set[tuple[str, str]] = set()
    for rank, slot in enumerate(slots):
        if not slot.device.startswith("cuda") or (slot.host, slot.device) in taken:
            return rank
        taken.add((slot.host, slot.device))
    return None


def choose_dtypes(slots: Sequence[RankSlot], requested: Literal["auto", "fp32", "bf16", "fp16"]) -> list[Dtype]:
    """Return the dtype of each slot: the fastest one on its device, unless one dtype was requested for all.

    bf16 without hardware support is emulated, and slower than fp32. fp16 is fast on GPUs without bf16, but its loss
    scaling must be equal on all ranks, so it is chosen only if all slots are such GPUs. Raise UsageError if fp16 was
    requested on a CPU.

    >>> choose_dtypes([RankSlot(host="attic", device="cuda:0", has_bf16=True), RankSlot(host="laptop", device="cpu")],
    ...     "auto")
    ['bf16', 'fp32']
    """
    if requested == "fp16" and any(slot.device == "cpu" for slot in slots):
        raise UsageError("--dtype fp16: loss scaling needs a GPU", hint="--dtype bf16 or fp32")
    if requested != "auto":
        return [requested] * len(slots)
    if all(slot.device != "cpu" and not slot.has_bf16 for slot in slots):
        return ["fp16"] * len(slots)
    return ["bf16" if slot.has_bf16 else "fp32" for slot in slots]


def micro_batch_limit(spec: RunSpec, block_size: int | None) -> int:
    """Return the most sequences in one backward. `block_size`: tokens per sequence; None for a user's own program."""
    if spec.train.micro_batch is not None:
        return spec.train.micro_batch
    return spec.train.batch if block_size is None else max(1, MICRO_BATCH_TOKENS // block_size)


def requested_sync(spec: RunSpec) -> SyncSpec:
    """Return the requested strategy; ddp for "auto", which only the planner resolves."""
    return DDP if spec.train.sync == "auto" else parse_sync(spec.train.sync)


def check_sync_supported(spec: RunSpec) -> None:
    """Raise UsageError for what `train` cannot do with the requested strategy."""
    if not (sync := requested_sync(spec)).is_sharded:
        return
    if spec.model.compile == "on":
        raise UsageError(f"--sync {sync}: sharded weights are not compiled", hint="--compile off, or --sync ddp")
    if spec.machine.contention:
        raise UsageError(f"--contention: with --sync {sync} no rank can compute alone", hint="--sync ddp measures it")


def gather_dtype(roster: Roster) -> Dtype:
    """Return the dtype in which sharded weights are gathered: bf16 if all ranks compute in it, else fp32."""
    return "bf16" if all(member.dtype == "bf16" for member in roster.members) else "fp32"


def why_not_hsdp(roster: Roster) -> str:
    """Return why these ranks cannot run hsdp, if it is their strategy; "" if they can."""
    sizes = {sum(member.host == host for member in roster.members) for host in roster.hosts}
    if roster.sync.kind != "hsdp" or (len(roster.hosts) > 1 and len(sizes) == 1 and 1 not in sizes):
        return ""
    return "--sync hsdp needs several hosts with the same number of ranks, at least two on each"


def why_unsafe_in_fp16(roster: Roster) -> str:
    """Return why a strategy that adds residuals to later gradients would do harm in fp16; "" if it would not."""
    has_residuals = roster.sync.has_buckets and not roster.sync.is_exact
    if has_residuals and any(member.dtype == "fp16" for member in roster.members):
        return "its residuals would be of another loss scale than the next step's gradients"
    return ""


def initial_roster(spec: RunSpec, slots: Sequence[RankSlot], block_size: int | None) -> Roster:
    """Return the first Roster of a run on hosts of unknown speed: shares are equal, or in proportion to `--shares`.

    `slots` are in the order of ranks. Raise UsageError if a rank would have no share although its weight is not 0.
    """
    num_ranks, batch = len(slots), spec.train.batch
    weights = parse_shares(spec.machine.shares)
    if weights is None and num_ranks > batch:
        raise UsageError(
            f"{num_ranks} ranks, more than the {batch} sequences of one batch",
            hint=f"--batch {num_ranks} or more gives every rank something to do",
        )
    if weights is not None and len(weights) != num_ranks:
        counted = f"{pluralize(len(weights), 'share')} for {pluralize(num_ranks, 'rank')}"
        raise UsageError(f"--shares {spec.machine.shares}: {counted}",
                         hint=f"one for each: --shares {':'.join(['1'] * num_ranks)}; or --shares auto")  # fmt: skip
    shares = equal_shares(batch, num_ranks) if weights is None else weighted_shares(batch, weights)
    for rank, share in enumerate(shares):
        if weights is not None and weights[rank] and not share:
            raise UsageError(
                f"--shares {spec.machine.shares}: rank {rank}'s share of {batch} sequences is less than one",
                hint="a larger --batch, or 0 for a rank without a share",
            )
    sync = requested_sync(spec)
    if sync == NO_SYNC and num_ranks > 1:
        raise UsageError("--sync none: replicas that never synchronize are not one model", hint="--sync ddp")
    dtypes = choose_dtypes(slots, spec.model.dtype)
    limit = micro_batch_limit(spec, block_size)
    return Roster(
        members=[
            Member(rank=rank, host=slot.host, device=slot.device, dtype=dtype, share=share, micro_batch=limit)
            for rank, (slot, dtype, share) in enumerate(zip(slots, dtypes, shares, strict=True))
        ],
        sync=NO_SYNC if num_ranks == 1 else sync,
        backend=choose_backend(slots, spec.machine.backend),
    )


# --- shares of a batch ------------------------------------------------------------------------------------------------


def equal_shares(num_sequences: int, num_ranks: int) -> list[int]:
    """Divide a batch into shares of whole sequences, as equal as possible; the first ranks take the remainder.

    >>> equal_shares(16, 3)
    [6, 5, 5]
    """
    least, left_over = divmod(num_sequences, num_ranks)
    return [least + (rank < left_over) for rank in range(num_ranks)]


def weighted_shares(num_sequences: int, weights: Sequence[float]) -> list[int]:
    """Divide a batch into whole sequences in proportion to weights that are not all 0: each rank's quota rounded down,
    then one more to the largest remainders, ties to the first rank.   [Hamilton's method]

    >>> weighted_shares(16, [3, 1]), weighted_shares(7, [1, 0, 1]), weighted_shares(10, [1, 1, 1])
    ([12, 4], [4, 0, 3], [4, 3, 3])
    """
    total = math.fsum(weights)  # equal in every Python version, unlike sum()
    quotas = [num_sequences * weight / total for weight in weights]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (shares[rank] - quotas[rank], rank))
    for rank in by_remainder[: num_sequences - sum(shares)]:
        shares[rank] += 1
    return shares


def step_shares(round_shares: Sequence[int], num_steps: int, step: int) -> list[int]:
    """Return the shares of one step of a round of H = `num_steps`: every rank's mean share, rounded down or up.

    The remainders of the shares modulo H are laid end to end; position s belongs to step s mod H, so no rank gets two
    more sequences in one step. Steps are visited in strides of about 0.618 H, so that no rank leads or lags for long.

    >>> [step_shares([5, 3], 2, step) for step in range(2)]
    [[3, 1], [2, 2]]
    """
    golden = next(k for k in itertools.count(round(num_steps * 0.618)) if math.gcd(k, num_steps) == 1)
    shares, begin = [], 0
    for share in round_shares:
        least, left_over = divmod(share, num_steps)
        shares.append(least + ((golden * step - begin) % num_steps < left_over))
        begin += left_over
    return shares


def format_shares(shares: Sequence[float]) -> str:
    """Return the shares as text.

    >>> format_shares([9.1, 4.6, 2.3]), format_shares([11.0, 5.0])
    ('9.1 : 4.6 : 2.3', '11 : 5')
    """
    return " : ".join(f"{share:.1f}".removesuffix(".0") for share in shares)


def parse_shares(text: str) -> list[float] | None:
    """Return the ranks' weights from "3:1", or None for "auto" and "equal". Raise UsageError for anything else.

    >>> parse_shares("3:1"), parse_shares("2:0:1.5"), parse_shares("auto")
    ([3.0, 1.0], [2.0, 0.0, 1.5], None)
    """
    if text in ("auto", "equal"):
        return None
    try:
        weights = [float(word) for word in text.split(":")]
    except ValueError:
        weights = []
    if not weights or not all(0 <= weight < 1e9 for weight in weights) or not sum(weights):
        raise UsageError(
            f"--shares {text}: expected auto, equal, or one number per rank, at least one above 0",
            hint="for example 3:1",
        )
    return weights


def parse_sync_and_shares(sync: str, shares: str) -> tuple[SyncSpec, list[float] | None]:
    """Return the strategy and the ranks' weights, None for equal ones, of a user's own program.

    Raise UsageError if there are no such, if such a program cannot have them, or not both.
    """
    spec = parse_sync(sync)
    check_sync_of_program(spec)
    if shares == "equal":
        return spec, None
    weights = parse_shares(shares)
    if weights is None or not all(weights):
        raise UsageError(
            f"--shares {shares}: not for a program of your own",
            hint="auto, or a number above 0 for each rank, as in 2:1",
        )
    if spec.drifts:
        raise UsageError(
            f"--shares {shares} weights gradients, and with --sync {spec} ranks exchange none", hint="one of them"
        )
    return spec, weights


def check_number_of_shares(shares: str, num_ranks: int) -> None:
    """Raise UsageError unless there is a share for each rank, or all are equal."""
    if shares != "equal" and (number := len(shares.split(":"))) != num_ranks:
        raise UsageError(f"--shares {shares}: {pluralize(number, 'share')}, and {pluralize(num_ranks, 'rank')}")
