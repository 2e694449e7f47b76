"""The planner's input and output: pure data, stored in a run's plan.json.

    Job + Cluster ──predict──▶ Prediction

A Prediction contains its input, so that it can be repeated with one change: a faster link, a host less, another batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from evener.core.cluster.link import LinkModel, Positive
from evener.core.model.fine_tuning import FineTuning, ModelShape
from evener.core.model.gradients import ProgramModel
from evener.core.model.shape import GPTShape
from evener.core.run.roster import Dtype, Member, RankSlot, Roster, initial_roster
from evener.core.run.run_spec import RunSpec
from evener.core.run.step_cost import StepCost

RateBasis = Literal["measured", "declared", "derived", "assumed"]  # derived: from another model's rate, by FLOPs
EXACT_SOURCE = "exact"  # the loss source of strategies whose penalty is 0 by construction


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training job: the requested run and the shape of its model."""

    spec: RunSpec
    shape: ModelShape
    noise_tokens: float | None = None  # gradient noise scale where the run starts or resumes; None: not measured
    distinct_tokens: list[float] = []  # mean number in 1, 2, 4, … sequences; empty: not measured

    @property
    def model(self) -> str:
        """The name of the preset, of the pretrained model, or of the user's program."""
        return self.spec.model.name if isinstance(self.shape, GPTShape) else self.shape.name

    @property
    def rate_name(self) -> str:
        """The name under which a fleet file keeps how fast a device trains the model."""
        return self.shape.rate_name if isinstance(self.shape, FineTuning) else self.model

    @property
    def unit(self) -> str:
        """Return what rates count: tokens, which carry loss, or of a user's program samples or batches."""
        return self.shape.unit if isinstance(self.shape, ProgramModel) else "tokens"

    @property
    def gpt_shape(self) -> GPTShape:
        """The shape of a model of evener's own."""
        assert isinstance(self.shape, GPTShape), f"{self.model} is no model of evener's own"
        return self.shape

    @property
    def tokens(self) -> int:
        """Tokens per step; of a fine-tuning on average, those that carry loss."""
        return round(self.spec.train.batch * self.shape.block_size)

    def padding_factor(self, micro_batch: float) -> float:
        """Return the FLOPs of a sequence in a micro-batch of so many over those of one alone: more where sequences of
        unequal lengths are padded.
        """
        return self.shape.padding_factor(micro_batch) if isinstance(self.shape, FineTuning) else 1.0

    def embedding_rows(self, sequences: int) -> float:
        """Return the mean number of embedding rows that this many sequences look up; one per token if not measured.

        0 where tables are sent whole: in a user's program and a pretrained model. Between two measured numbers and
        beyond the last, distinct tokens grow as a power of all tokens   [Heaps' law].

        >>> from evener.core.model.shape import preset_shape
        >>> job = Job(spec=RunSpec(), shape=preset_shape("d8", 32768, 256), distinct_tokens=[100.0, 160.0, 250.0])
        >>> [round(job.embedding_rows(sequences)) for sequences in (0, 1, 2, 3, 4, 8, 1 << 20)]
        [0, 100, 160, 208, 250, 391, 32768]
        """
        if not isinstance(self.shape, GPTShape):
            return 0.0
        distinct, vocab_size = self.distinct_tokens, self.shape.vocab_size
        if not distinct or not sequences:
            return min(sequences * self.shape.block_size, vocab_size)
        level = max(0, min(int(math.log2(sequences)), len(distinct) - 2))
        power = math.log2(distinct[level + 1] / distinct[level]) if len(distinct) > 1 else 1.0
        return min(distinct[level] * math.pow(sequences / 2**level, power), vocab_size)

    def initial_roster(self, slots: Sequence[RankSlot]) -> Roster:
        """Return the first Roster of a run on these slots if their speed is unknown."""
        return initial_roster(self.spec, slots, round(self.shape.block_size))


class HostRates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of one rank of a host; all ranks of a host are alike."""

    tokens_per_s: dict[Dtype, Positive]  # forward and backward of this job's model, in large micro-batches
    pass_s: float = 0.0  # fixed overhead of one micro-batch's forward and backward
    update_s: float = 0.0  # clipping and the update of all parameters
    data_s: float = 0.0  # waiting for input, per step
    cpus: Positive | None = None  # busy CPUs while a rank computes
    sync_Bps: Positive | None = None  # bytes sent, and as many received, per second of CPU time
    sum_Bps: Positive | None = None  # γ: bytes per second that one thread adds from one buffer to another
    copy_Bps: Positive | None = None  # memory bandwidth, bytes read and written
    coding_Bps: dict[str, Positive] = {}  # by strategy, gradient bytes that one thread encodes and decodes in a second
    local: LinkModel | None = None  # the link between two of its ranks
    memory_bytes: int | None = None  # CPU: of the host, for all its ranks; GPU: of each
    has_jemalloc: bool = False  # as the allocator of its ranks: see core.cluster.allocator
    bound_by: str | None = None  # "arithmetic", "memory" or "overhead"; None: not known
    watts: float | None = None  # of the whole host while it trains
    price_per_h: float | None = None  # of the whole host
    basis: RateBasis = "declared"  # the source of tokens_per_s
    shares_cores_with: list[str] = []  # hosts of the same machine that compute on the same cores


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The machines and links available to the planner. A Roster says which of them take part."""

    slots: list[RankSlot] = msgspec.field(name="seats")  # host after host, in the order of their ranks
    hosts: dict[str, HostRates]
    wire: LinkModel | None = None  # the default link between two hosts
    wires: dict[str, dict[str, LinkModel]] = {}  # from host to host, where the link is not the default
    are_links_measured: bool = False
    jitter: float = 0.0  # coefficient of variation of a rank's compute time from step to step; lognormal
    late_s: float = 0.0  # mean wait per step for a straggler that changes from step to step; 0 for a single rank
    assumed: list[str] = []  # sentences: what was not measured, and the assumption used instead

    @property
    def host_names(self) -> list[str]:
        """The host names, in the order of the slots."""
        return list(dict.fromkeys(slot.host for slot in self.slots))

    @property
    def assumptions(self) -> list[str]:
        """All assumptions, as sentences."""
        if not self.jitter or len(self.slots) == 1:
            return self.assumed
        return [*self.assumed, f"a rank's compute time varies by {self.jitter:.0%} from step to step"]

    def link_between(self, source: str, target: str) -> LinkModel:
        """Return the link from one host to another."""
        wire = self.wires.get(source, {}).get(target, self.wire)
        assert wire is not None, f"no link from {source} to {target}"
        return wire

    @property
    def distinct_links(self) -> set[LinkModel]:
        """The distinct links between its hosts."""
        names = set(self.host_names)
        explicit = [wire for source in names for target, wire in self.wires.get(source, {}).items() if target in names]
        default = [self.wire] if self.wire is not None and len(explicit) < len(names) * (len(names) - 1) else []
        return {*explicit, *default}

    @property
    def slowest_link_Bps(self) -> float:
        """The bandwidth of the slowest link between its hosts; needs at least two hosts."""
        return min(wire.bandwidth_Bps for wire in self.distinct_links)

    def tokens_per_s(self, member: Member) -> float:
        """Return the rate of a rank's forward and backward, in its dtype."""
        return self.hosts[member.host].tokens_per_s[member.dtype]


class RankCost(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted cost of one step on one rank."""

    cost: StepCost
    sync_s: float  # collectives in flight, hidden or not
    bytes: int  # payload that the rank sends
    memory_bytes: int | None  # peak


class PlanOption(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration in which the job can run, with its predicted cost."""

    name: str  # unique among the options: "ddp", "attic alone", "ddp without laptop", "ddp, shares 11 : 5"
    roster: Roster
    ranks: list[RankCost]  # by rank
    step_s: Positive
    tokens_per_s: float
    speedup_vs_best_host: float | None  # None: no host can hold the model alone, or its rate is not known
    bytes_per_rank: int  # of the rank that sends most
    # of training or validation loss, the larger one, relative to ddp: 0.01 = 1 % more; None = not measured
    loss_penalty: float | None
    loss_margin: float = 0.0  # loss_penalty ± loss_margin is a 90 % interval
    loss_source: str = ""  # a measurement or EXACT_SOURCE; if not measured, the closest measurement
    is_built: bool = True  # whether `train` can run it
    rejected_because: str = ""  # "" = recommended

    @property
    def is_exact(self) -> bool:
        """Return whether the strategy is exact (`SyncSpec.is_exact`). A lossy one that cost no loss in a run is not."""
        return self.roster.sync.is_exact

    @property
    def straggler(self) -> Member:
        """The rank that the others wait for."""
        return min(self.roster.members, key=lambda member: self.ranks[member.rank].cost.wait_s or 0.0)

    @property
    def straggler_cost(self) -> RankCost:
        """The step cost of the straggler."""
        return self.ranks[self.straggler.rank]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's output: all options, the recommended one and the one that the run uses."""

    job: Job
    cluster: Cluster
    verdict: str  # one sentence
    recommended: str  # an option's name
    chosen: str  # the option of this run, which the user may have set to another than the recommended one
    options: list[PlanOption]
    is_sync_ours: bool = False  # whether the planner chose the job's strategy
    notes: list[str] = []  # sentences: deviations from the fleet file
    left_out: dict[str, str] = {}  # available hosts that take no part in this run, and why

    def option(self, name: str) -> PlanOption:
        """Return the option of this name."""
        return next(option for option in self.options if option.name == name)

    def option_for(self, roster: Roster) -> PlanOption | None:
        """Return the chosen option if it has the ranks of this Roster, else None."""
        chosen = next((option for option in self.options if option.name == self.chosen), None)
        ranks = [member.rank for member in roster.members]
        return chosen if chosen and [member.rank for member in chosen.roster.members] == ranks else None
