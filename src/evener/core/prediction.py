"""What will a step cost? What the planner is told and what it answers: pure data, kept in a run's plan.json.

    Job + Cluster ──predict──▶ Prediction

Whoever has a Prediction can ask again with one thing changed: a faster link, a host less, another batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from evener.core.link import Positive, Wire
from evener.core.roster import Dtype, Member, Roster, Seat, first_roster
from evener.core.shape import GPTShape
from evener.core.spec import RunSpec
from evener.core.step import StepCost

Basis = Literal["measured", "declared", "derived", "assumed"]  # derived: from another model's rate, by FLOPs
EXACT = "exact"  # the source of a penalty of 0 that nobody has to measure


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained: a run as it was asked for, and the shape of its model."""

    spec: RunSpec
    shape: GPTShape
    noise_tokens: float | None = None  # gradient noise scale at the point from which it goes on; None: not measured
    distinct_tokens: list[float] = []  # in 1, 2, 4, … sequences, in the mean; empty: nobody looked at its corpus

    @property
    def model(self) -> str:
        """The preset's name."""
        return self.spec.model.model

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.spec.train.batch * self.shape.block_size

    def rows(self, sequences: int) -> float:
        """Rows that so many sequences look up in a table, in the mean; where nobody looked at the corpus, one a token.

        Between two numbers that were seen, and beyond the last, tokens that differ grow as a power of all [Heaps].

        >>> from evener.core.shape import preset_shape
        >>> job = Job(spec=RunSpec(), shape=preset_shape("d8", 32768, 256), distinct_tokens=[100.0, 160.0, 250.0])
        >>> [round(job.rows(sequences)) for sequences in (0, 1, 2, 3, 4, 8, 1 << 20)]
        [0, 100, 160, 208, 250, 391, 32768]
        """
        seen, most = self.distinct_tokens, self.shape.vocab_size
        if not seen or not sequences:
            return min(sequences * self.shape.block_size, most)
        level = max(0, min(int(math.log2(sequences)), len(seen) - 2))
        power = math.log2(seen[level + 1] / seen[level]) if len(seen) > 1 else 1.0
        return min(seen[level] * math.pow(sequences / 2**level, power), most)

    def roster(self, seats: Sequence[Seat]) -> Roster:
        """The Roster with which a run on these seats begins of whose speed nobody knows anything."""
        return first_roster(self.spec, seats, self.shape.block_size)


class HostRates(msgspec.Struct, frozen=True, kw_only=True):
    """What each of a host's equal ranks can do."""

    tokens_per_s: dict[Dtype, Positive]  # forward and backward of this job's model, in large micro-batches
    pass_s: float = 0.0  # what a forward and backward costs apart from its tokens
    update_s: float = 0.0  # clipping and the update of all parameters
    data_s: float = 0.0  # waiting for input, a step
    cpus: Positive | None = None  # processors at work while a rank computes
    sync_Bps: Positive | None = None  # bytes that one processor's time sends, receives and adds in a second
    sum_Bps: Positive | None = None  # γ: bytes of a buffer to which one thread adds another, in a second
    copy_Bps: Positive | None = None  # of memory, read and written
    coding_Bps: dict[str, Positive] = {}  # by strategy, bytes of gradients that one thread makes small and large again
    local: Wire | None = None  # between two of its ranks
    memory_bytes: int | None = None  # a CPU's: of the host, for all its ranks; a GPU's: of each
    bound_by: str | None = None  # "arithmetic", "memory" or "overhead"; None: not known
    watts: float | None = None  # of the whole host while it trains
    price_per_h: float | None = None  # of the whole host
    basis: Basis = "declared"  # of tokens_per_s


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The machines as the planner sees them. Which of them take part is a Roster's to say."""

    seats: list[Seat]  # where ranks can be, host after host, in the order in which they would be counted
    hosts: dict[str, HostRates]
    wire: Wire | None = None  # from any host to any other
    wires: dict[str, dict[str, Wire]] = {}  # from host to host, where it is another one
    are_links_measured: bool = False
    jitter: float = 0.0  # coefficient of variation of a rank's computing from step to step; lognormal
    late_s: float = 0.0  # what ranks wait in a step for one another, now for one, now for another; nothing of one alone
    assumed: list[str] = []  # sentences: what nobody measured, and what stands in for it

    @property
    def names(self) -> list[str]:
        """Of the hosts, in the order of the seats."""
        return list(dict.fromkeys(seat.host for seat in self.seats))

    @property
    def assumptions(self) -> list[str]:
        """All that was assumed, for a person."""
        if not self.jitter or len(self.seats) == 1:
            return self.assumed
        return [*self.assumed, f"a rank's computing varies by {self.jitter:.0%} from step to step"]

    def between(self, source: str, target: str) -> Wire:
        """From one of its hosts to another."""
        found = self.wires.get(source, {}).get(target, self.wire)
        assert found is not None, f"nothing joins {source} to {target}"
        return found

    @property
    def kinds_of_wires(self) -> set[Wire]:
        """Those between its hosts, alike ones once."""
        names = set(self.names)
        told = [wire for source in names for target, wire in self.wires.get(source, {}).items() if target in names]
        others = [self.wire] if self.wire is not None and len(told) < len(names) * (len(names) - 1) else []
        return {*told, *others}

    @property
    def slowest_Bps(self) -> float:
        """Of the links between its hosts, of which there are two at least."""
        return min(wire.bandwidth_Bps for wire in self.kinds_of_wires)

    def tokens_per_s(self, member: Member) -> float:
        """Of a rank: its forward and backward, in its arithmetic."""
        return self.hosts[member.host].tokens_per_s[member.dtype]


class RankCost(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a step."""

    cost: StepCost
    sync_s: float  # collectives in flight, hidden or not
    bytes: int  # payload that it sends
    memory_bytes: int | None  # at its peak


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the job."""

    name: str  # unique among the options: "ddp", "attic alone", "ddp without laptop", "ddp, shares 11 : 5"
    roster: Roster
    ranks: list[RankCost]  # by rank
    step_s: Positive
    tokens_per_s: float
    speedup_vs_best_host: float | None  # None: no host can hold the model alone, or its rate is not known
    bytes_per_rank: int  # of the rank that sends most
    loss_penalty: float | None  # relative to ddp: 0.01 = 1 % more loss; None = nobody measured it
    loss_source: str = ""  # who did, or EXACT; where nobody did, what was measured instead
    is_built: bool = True  # does `train` know how to run it?
    rejected_because: str = ""  # "" = recommended

    @property
    def is_exact(self) -> bool:
        """Does it lose nothing by itself? A penalty of 0 may be what was measured of one that does."""
        return self.loss_source == EXACT

    @property
    def last(self) -> Member:
        """The rank that the others wait for."""
        return min(self.roster.members, key=lambda member: self.ranks[member.rank].cost.wait_s or 0.0)

    @property
    def slowest(self) -> RankCost:
        """What it does in a step."""
        return self.ranks[self.last.rank]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's answer."""

    job: Job
    cluster: Cluster
    verdict: str  # one sentence
    recommended: str  # an option's name
    chosen: str  # the option that this run is: what `train` was told may differ from what is recommended
    options: list[Option]
    is_sync_ours: bool = False  # the job's strategy was chosen here
    notes: list[str] = []  # sentences: what is not as the fleet's file has it
    left_out: dict[str, str] = {}  # hosts that were there and take no part in this run, and why

    def option(self, name: str) -> Option:
        """The option of that name."""
        return next(option for option in self.options if option.name == name)

    def of(self, roster: Roster) -> Option | None:
        """What was predicted of a run with this Roster; None where it has other ranks than those it was chosen for."""
        chosen = next((option for option in self.options if option.name == self.chosen), None)
        ran = [member.rank for member in roster.members]
        return chosen if chosen and [member.rank for member in chosen.roster.members] == ran else None
