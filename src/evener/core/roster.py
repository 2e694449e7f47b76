"""Who takes part from which step on, with what share of the global batch, and how do the replicas agree?

All that may differ between two ranks or change during a run stands here, and nowhere else. The planner makes the first
Roster, plan.json holds it, the ranks compare it before their first step and take their work from it alone. Whoever
changes it writes the next one, which all ranks take up at the same step.

    seats_of(host)… ──▶ first_roster() ──▶ Roster 0 ──with_shares()──▶ Roster 1 ──▶ …
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from evener.core.errors import UsageError
from evener.core.fleet import Host
from evener.core.spec import MachineSpec, RunSpec
from evener.core.units import plural

Dtype = Literal["fp32", "bf16", "fp16"]
Backend = Literal["gloo", "nccl", "none"]
Kind = Literal["none", "ddp", "packed", "bf16", "int8", "int4", "powersgd", "fsdp", "hsdp", "zero1", "diloco"]

BUILT: tuple[Kind, ...] = ("ddp", "packed", "bf16", "int8", "int4", "powersgd", "diloco")  # what `train` runs
MICRO_BATCH_TOKENS = 16384  # assumption: enough to fill a processor, little enough to fit


# --- how replicas agree -----------------------------------------------------------------------------------------------


class SyncSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas agree: a strategy's name, parsed once. `str()` writes it as `parse_sync` reads it.

    >>> str(SyncSpec(kind="diloco", every=100, bits=4, streamed=True))
    'diloco:100:int4:streamed'
    """

    kind: Kind
    sparse: bool = False  # tables that are only looked up go row by row
    rank: int = 0  # of PowerSGD's factors
    every: int = 1  # steps from one exchange to the next
    bits: int = 32  # of a value that DiLoCo sends
    streamed: bool = False  # DiLoCo's exchange runs beside the next steps

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
_NUMBERED = {
    "powersgd": "powersgd:R of rank R, of 1 to 999999",
    "diloco": "diloco:H, agreeing every H steps, of 1 to 999999; then :int8 or :int4, then :streamed, if wanted",
}


def parse_sync(text: str) -> SyncSpec:
    """The strategy that a text names; UsageError where none has that name.

    >>> parse_sync("powersgd:4").rank, parse_sync("diloco:30:int8").bits, parse_sync("ddp") == DDP
    (4, 8, True)
    """
    found = _GRAMMAR.fullmatch(text)
    if found is None:
        hint = _NUMBERED.get(text.partition(":")[0], f"one of {', '.join(SYNC_EXAMPLES)}")
        raise UsageError(f"--sync {text}: no such strategy", hint=hint)
    sparse = bool(found["sparse"])
    if name := found["plain"] or found["dense"]:
        return SyncSpec(kind=name, sparse=sparse)  # type: ignore[arg-type]  # the grammar has the same names
    if found["rank"]:
        return SyncSpec(kind="powersgd", rank=int(found["rank"]), sparse=sparse)
    bits, streamed = int(found["bits"] or 32), bool(found["streamed"])
    return SyncSpec(kind="diloco", every=int(found["every"]), bits=bits, streamed=streamed)


# --- who takes part ---------------------------------------------------------------------------------------------------


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A place that a rank can take."""

    host: str
    device: str  # cpu, cuda:0, cuda:1, …
    name: str = ""  # of the device, as its maker calls it
    has_bf16: bool = False  # in hardware


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of every step."""

    rank: int  # its number for as long as the run lasts, by which its files are named
    host: str
    device: str  # cpu, cuda:0, …
    dtype: Dtype  # of forward and backward; weights, gradients and optimizer are fp32
    share: int  # sequences of the global batch; 0: it takes part in everything but forward
    micro_batch: int  # largest number of sequences in one backward

    @property
    def is_gpu(self) -> bool:
        """Does it compute on a GPU?"""
        return self.device != "cpu"

    @property
    def micro_batches(self) -> list[int]:
        """Sequences of each micro-batch of its share: the fewest that are not too large, as equal as can be.

        >>> member = Member(rank=0, host="attic", device="cpu", dtype="fp32", share=11, micro_batch=4)
        >>> member.micro_batches
        [4, 4, 3]
        """
        return equal_shares(self.share, self.num_passes) if self.share else []

    @property
    def num_passes(self) -> int:
        """Number of micro-batches."""
        return num_passes(self.share, self.micro_batch) if self.share else 0

    @property
    def largest_pass(self) -> int:
        """Sequences of the first micro-batch; 0 without a share."""
        return -(-self.share // self.num_passes) if self.share else 0

    @property
    def last_pass(self) -> int:
        """Sequences of the last micro-batch; 0 without a share."""
        return self.share // self.num_passes if self.share else 0


def num_passes(share: int, micro_batch: int) -> int:
    """Micro-batches of which none is too large.

    >>> num_passes(17, 16), num_passes(16, 16), num_passes(0, 16)
    (2, 1, 0)
    """
    return -(-share // micro_batch)


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes part from this step on, with what share of the global batch, and how replicas agree."""

    epoch: int = 0  # grows with each change
    from_step: int = 0  # the first step that is divided like this
    members: list[Member]  # by place among them: where nobody has left, by rank
    sync: SyncSpec
    backend: Backend  # of the collectives; none: one rank
    bucket_bytes: int = 0  # of gradients that leave together, at most; 0: as is the strategy's habit
    round_shares: list[int] = []  # sequences by rank of `sync.every` batches, where those are not divided alike
    why: str = ""  # it follows the one before
    is_trial: bool = False  # a rank without a share is tried for a step, or that is over

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def batch(self) -> int:
        """Sequences of the global batch."""
        return sum(member.share for member in self.members)

    @property
    def shares(self) -> list[int]:
        """Sequences by rank."""
        return [member.share for member in self.members]

    @property
    def is_equal(self) -> bool:
        """Is the batch divided as equally as whole sequences allow?"""
        return self.mean_shares == equal_shares(self.batch, self.world_size)

    @property
    def mean_shares(self) -> list[float]:
        """Sequences by rank of a step, in the mean of a round."""
        return [share / self.sync.every for share in self.round_shares] or [float(share) for share in self.shares]

    @property
    def hosts(self) -> list[str]:
        """Their names, in the order of the ranks."""
        return list(dict.fromkeys(member.host for member in self.members))

    @property
    def dtypes(self) -> str:
        """The arithmetic of all members, for a person: one name where it is one."""
        return " and ".join(dict.fromkeys(member.dtype for member in self.members))

    def name_of(self, rank: int) -> str:
        """What a person calls a rank: on several hosts by its host, "b", or "b:0" and "b:1" where that has two."""
        host = next((member.host for member in self.members if member.rank == rank), None)
        if len(self.hosts) == 1 or host is None:
            return f"rank {rank}"
        of_host = [member.rank for member in self.members if member.host == host]
        return host if len(of_host) == 1 else f"{host}:{of_host.index(rank)}"

    def divide(self, num: int) -> list[int]:
        """So many pieces of work by rank, in proportion to the shares."""
        return weighted_shares(num, self.mean_shares)

    def at(self, step: int) -> Roster:
        """As it is for one step: with that step's shares, where those of a round are not alike."""
        if not self.round_shares:
            return self
        return self.divided(turn(self.round_shares, self.sync.every, step - self.from_step))

    def divided(self, shares: Sequence[int], micro_batch: int | None = None) -> Roster:
        """The same with other shares: of every batch, or of all of a round, whose steps need not be alike then."""
        batch, every, is_of_round = self.batch, self.sync.every, sum(shares) != self.batch
        assert not is_of_round or sum(shares) == batch * every, f"shares {shares} of a batch of {batch}"
        alike = weighted_shares(batch, shares) if is_of_round else shares
        is_of_round = is_of_round and any(share % every for share in shares)
        if alike == self.shares and not is_of_round and micro_batch is None:
            return msgspec.structs.replace(self, round_shares=[]) if self.round_shares else self
        members = [msgspec.structs.replace(member, share=share, micro_batch=micro_batch or member.micro_batch)
                   for member, share in zip(self.members, alike, strict=True)]  # fmt: skip
        return msgspec.structs.replace(self, members=members, round_shares=list(shares) if is_of_round else [])

    def first_sequence(self, rank: int) -> int:
        """Where a rank's part of the global batch begins: parts lie one behind the other."""
        return sum(self.shares[:rank])

    def micro_batch_of_two_each(self) -> int | None:
        """The largest size of which the whole batch consists, two and more for every rank; None where there is none."""
        largest = self.batch // (2 * self.world_size)
        return next((size for size in range(largest, 0, -1) if self.batch % size == 0), None)

    def with_shares(self, shares: Sequence[int], from_step: int, micro_batch: int | None = None, *, why: str = "",
                    is_trial: bool = False) -> Roster:  # fmt: skip
        """The next Roster: these shares, in micro-batches as before or of one size for all."""
        return msgspec.structs.replace(self.divided(shares, micro_batch), epoch=self.epoch + 1, from_step=from_step,
                                       why=why, is_trial=is_trial)  # fmt: skip

    def agreeing_by(self, sync: SyncSpec, bucket_bytes: int = 0) -> Roster:
        """The same, with another way to agree: all steps are divided alike."""
        return msgspec.structs.replace(self, sync=sync, bucket_bytes=bucket_bytes, round_shares=[])

    def with_sync(self, sync: SyncSpec, bucket_bytes: int, from_step: int, *, why: str) -> Roster:
        """The next Roster: another way to agree, all else as it is."""
        return msgspec.structs.replace(self.agreeing_by(sync, bucket_bytes), epoch=self.epoch + 1, from_step=from_step,
                                       why=why, is_trial=False)  # fmt: skip

    def by_place(self) -> Roster:
        """The same with ranks numbered by their places, as those of a plan are."""
        members = [msgspec.structs.replace(member, rank=place) for place, member in enumerate(self.members)]
        return msgspec.structs.replace(self, members=members)

    def among(self, hosts: Sequence[str], epoch: int, why: str) -> Roster:
        """The Roster of these hosts' ranks, in this order, with the others' parts divided among them."""
        members = [member for host in hosts for member in self.members if member.host == host]
        weights = [self.mean_shares[self.members.index(member)] for member in members]
        is_equal = self.is_equal or not any(weights)
        shares = equal_shares(self.batch, len(members)) if is_equal else weighted_shares(self.batch, weights)
        is_alone = len(members) == 1
        return msgspec.structs.replace(
            self,
            epoch=epoch,
            members=[msgspec.structs.replace(one, share=share) for one, share in zip(members, shares, strict=True)],
            sync=NO_SYNC if is_alone else self.sync,
            backend="none" if is_alone else self.backend,
            round_shares=[],
            why=why,
        )

    def of_one(self, member: Member) -> Roster:
        """The Roster of one of these ranks, with all of the batch."""
        return msgspec.structs.replace(self, members=[msgspec.structs.replace(member, share=self.batch)],
                                       sync=NO_SYNC, backend="none", round_shares=[])  # fmt: skip

    def with_weights(self, weights: Sequence[float], from_step: int) -> Roster:
        """The next Roster: shares in proportion to the ranks' weights, all else as it is."""
        return self.with_shares(weighted_shares(self.batch, weights), from_step, why="the program weighs its ranks so")


def wished_device(host: Host, machine: MachineSpec) -> Literal["auto", "cpu", "cuda"]:
    """What the ranks of a host were asked to compute on: `--device` wins over the host's table."""
    return machine.device if machine.device != "auto" else host.devices


def devices_of(name: str, host: Host, num_gpus: int, machine: MachineSpec) -> list[str]:
    """The device of each rank of a host: one rank a GPU, else as many on the processor as were asked for.

    UsageError where GPUs were asked for and there is none.

    >>> devices_of("attic", Host(address="local"), 2, MachineSpec())
    ['cuda:0', 'cuda:1']
    >>> devices_of("laptop", Host(address="192.168.1.28", ranks=2), 0, MachineSpec())
    ['cpu', 'cpu']
    """
    wish = wished_device(host, machine)
    if wish == "cuda" and not num_gpus:
        raise UsageError(f"{name}: ranks asked for GPUs, and it has none", hint="--device cpu trains on the processor")
    if wish == "cpu" or not num_gpus:
        return ["cpu"] * (host.ranks or machine.ranks)
    return [f"cuda:{rank % num_gpus}" for rank in range(host.ranks or num_gpus)]


def backend_of(seats: Sequence[Seat], wish: Literal["auto", "gloo", "nccl"]) -> Backend:
    """What moves the gradients between these seats: NCCL where each rank has a GPU of its own, else Gloo.

    NCCL moves GPU memory only, and refuses two ranks on one GPU: UsageError where it was asked for all the same.
    """
    if len(seats) == 1:
        return "none"
    rank = rank_without_gpu(seats)
    if wish == "nccl" and rank is not None:
        device = seats[rank].device
        where = "the processor" if device == "cpu" else device
        where += ", as does another rank" if device.startswith("cuda") else ""
        raise UsageError(
            f"--backend nccl: rank {rank} on {seats[rank].host} trains on {where}",
            hint="--backend gloo, or a GPU for every rank",
        )
    if wish != "auto":
        return wish
    return "nccl" if rank is None else "gloo"


def rank_without_gpu(seats: Sequence[Seat]) -> int | None:
    """The first rank on a processor, or on a GPU that a lower rank has; None where each has a GPU of its own.

    >>> rank_without_gpu([Seat(host="attic", device="cuda:0"), Seat(host="attic", device="cuda:0")])
    1
    """
    taken: set[tuple[str, str]] = set()
    for rank, seat in enumerate(seats):
        if not seat.device.startswith("cuda") or (seat.host, seat.device) in taken:
            return rank
        taken.add((seat.host, seat.device))
    return None


def dtypes_of(seats: Sequence[Seat], wish: Literal["auto", "fp32", "bf16", "fp16"]) -> list[Dtype]:
    """The arithmetic of each seat: what its own device is fast in, unless all were told one.

    bf16 without units for it is emulated, and slower than fp32. A GPU without them is fast in fp16, whose losses are
    scaled, alike on all ranks: only where all are such GPUs. UsageError where fp16 was asked for on a processor.

    >>> dtypes_of([Seat(host="attic", device="cuda:0", has_bf16=True), Seat(host="laptop", device="cpu")], "auto")
    ['bf16', 'fp32']
    """
    if wish == "fp16" and any(seat.device == "cpu" for seat in seats):
        raise UsageError("--dtype fp16: loss scaling needs a GPU", hint="--dtype bf16 or fp32")
    if wish != "auto":
        return [wish] * len(seats)
    if all(seat.device != "cpu" and not seat.has_bf16 for seat in seats):
        return ["fp16"] * len(seats)
    return ["bf16" if seat.has_bf16 else "fp32" for seat in seats]


def largest_micro_batch(spec: RunSpec, block_size: int | None) -> int:
    """Sequences in one backward, at most. `block_size`: tokens of a sequence; None of a program of the user's own."""
    if spec.train.micro_batch is not None:
        return spec.train.micro_batch
    return spec.train.batch if block_size is None else max(1, MICRO_BATCH_TOKENS // block_size)


def asked_sync(spec: RunSpec) -> SyncSpec:
    """The strategy that was asked for; ddp where the planner shall choose and nobody has planned."""
    return DDP if spec.train.sync == "auto" else parse_sync(spec.train.sync)


def check_built(spec: RunSpec) -> None:
    """UsageError where `train` cannot run the strategy that was asked for."""
    if (sync := asked_sync(spec)).kind not in ("none", *BUILT):
        raise UsageError(f"--sync {sync}: train cannot run it", hint=f"one of {', '.join(BUILT)}")


def harms_fp16(roster: Roster) -> bool:
    """Would what a lossy strategy has left to send be of another loss scale than the gradients of the next step?"""
    lossy = ("bf16", "int8", "int4", "powersgd")
    return roster.sync.kind in lossy and any(member.dtype == "fp16" for member in roster.members)


def first_roster(spec: RunSpec, seats: Sequence[Seat], block_size: int | None) -> Roster:
    """The Roster with which a run begins of whose speed nobody knows anything: shares equal, or as `--shares` tells.

    Seats are by rank. UsageError where a rank would have nothing to do that nobody asked to do nothing.
    """
    num_ranks, batch = len(seats), spec.train.batch
    told = parse_shares(spec.machine.shares)
    if told is None and num_ranks > batch:
        raise UsageError(
            f"{num_ranks} ranks, more than the {batch} sequences of one batch",
            hint=f"--batch {num_ranks} or more gives every rank something to do",
        )
    if told is not None and len(told) != num_ranks:
        counted = f"{plural(len(told), 'share')} for {plural(num_ranks, 'rank')}"
        raise UsageError(f"--shares {spec.machine.shares}: {counted}",
                         hint=f"one for each: --shares {':'.join(['1'] * num_ranks)}; or --shares auto")  # fmt: skip
    shares = equal_shares(batch, num_ranks) if told is None else weighted_shares(batch, told)
    for rank, share in enumerate(shares):
        if told is not None and told[rank] and not share:
            raise UsageError(
                f"--shares {spec.machine.shares}: of {batch} sequences rank {rank}'s part is less than one",
                hint="a larger --batch, or 0 for a rank that shall have none",
            )
    sync = asked_sync(spec)
    if sync == NO_SYNC and num_ranks > 1:
        raise UsageError("--sync none: replicas that never exchange are not one model", hint="--sync ddp")
    dtypes = dtypes_of(seats, spec.model.dtype)
    cut = largest_micro_batch(spec, block_size)
    return Roster(
        members=[
            Member(rank=rank, host=seat.host, device=seat.device, dtype=dtype, share=share, micro_batch=cut)
            for rank, (seat, dtype, share) in enumerate(zip(seats, dtypes, shares, strict=True))
        ],
        sync=NO_SYNC if num_ranks == 1 else sync,
        backend=backend_of(seats, spec.machine.backend),
    )


# --- how a batch is divided -------------------------------------------------------------------------------------------


def equal_shares(num_sequences: int, num_ranks: int) -> list[int]:
    """Whole sequences of every rank: as equal as they can be, the first ranks taking what is left over.

    >>> equal_shares(16, 3)
    [6, 5, 5]
    """
    least, left_over = divmod(num_sequences, num_ranks)
    return [least + (rank < left_over) for rank in range(num_ranks)]


def weighted_shares(num_sequences: int, weights: Sequence[float]) -> list[int]:
    """Whole sequences in proportion to weights that are not all 0: each its quota rounded down, then one more to the
    largest remainders, ties to the first rank.   [Hamilton's method]

    >>> weighted_shares(16, [3, 1]), weighted_shares(7, [1, 0, 1]), weighted_shares(10, [1, 1, 1])
    ([12, 4], [4, 0, 3], [4, 3, 3])
    """
    total = math.fsum(weights)  # as every Python has it
    quotas = [num_sequences * weight / total for weight in weights]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (shares[rank] - quotas[rank], rank))
    for rank in by_remainder[: num_sequences - sum(shares)]:
        shares[rank] += 1
    return shares


def turn(round_shares: Sequence[int], num_steps: int, step: int) -> list[int]:
    """Whole sequences by rank for one step of a round: in each, every rank has its mean share rounded down or up.

    What is left over of the shares lies end to end, and slot s is for step s mod H; no rank has two of a step, for it
    has fewer than H. Steps are taken in golden strides, so that nobody runs ahead for long.

    >>> [turn([5, 3], 2, step) for step in range(2)]
    [[3, 1], [2, 2]]
    """
    golden = next(k for k in itertools.count(round(num_steps * 0.618)) if math.gcd(k, num_steps) == 1)
    found, begin = [], 0
    for share in round_shares:
        least, left_over = divmod(share, num_steps)
        found.append(least + ((golden * step - begin) % num_steps < left_over))
        begin += left_over
    return found


def shares_text(shares: Sequence[float]) -> str:
    """For a person.

    >>> shares_text([9.1, 4.6, 2.3]), shares_text([11.0, 5.0])
    ('9.1 : 4.6 : 2.3', '11 : 5')
    """
    return " : ".join(f"{share:.1f}".removesuffix(".0") for share in shares)


def parse_shares(text: str) -> list[float] | None:
    """Weights of the ranks from "3:1"; None where they are not told one by one: "auto" and "equal".

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
            f"--shares {text}: expected auto, equal, or a number for each rank, at least one of them above 0",
            hint="for example 3:1",
        )
    return weights
