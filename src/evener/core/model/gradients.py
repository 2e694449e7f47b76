"""Gradients of a model: what a step exchanges, and when backward has completed it."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from evener.core.cluster.collective_results import Collective


class GradientTensor(msgspec.Struct, frozen=True, kw_only=True):
    """The gradient of one tensor."""

    name: str
    rows: int
    columns: int
    ready: float  # fraction of backward that is done when it is complete
    is_lookup: bool = False  # a table of which a step touches only the rows of its tokens
    is_linear: bool = False  # the weight of a linear layer, and nothing else

    @property
    def num_params(self) -> int:
        return self.rows * self.columns


class OwnCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that a program calls itself, and waits for, after the backward of its step."""

    collective: Collective
    size_bytes: float  # of the whole buffer


class OwnCollectives(msgspec.Struct, frozen=True, kw_only=True):
    """The collectives that a program itself called in one step, in order."""

    calls: tuple[OwnCollective, ...] = ()
    obstacle: str = ""  # what another link would change about the step in a way that one step does not show


class ProgramModel(msgspec.Struct, frozen=True, kw_only=True, tag="program"):
    """The model of a user's own program, as one step of a run showed it.

    It stands in the place of a `GPTShape`, whose rates count tokens and whose batch counts sequences.
    """

    name: str  # of the program
    unit: Literal["samples", "batches"]  # that its rates and batch count; a rank's batch, if samples were not seen
    gradients: tuple[GradientTensor, ...]  # of DDP, in the order in which backward completes them
    collectives: tuple[OwnCollective, ...] = ()  # of a program without DDP
    num_updated: int = 0  # parameters of its optimizer
    can_divide: bool = False  # whether `evener launch --shares` can divide its batches
    peak_memory_bytes: int | None = None  # of the rank that needed most
    flops: tuple[tuple[str, float], ...] = ()  # of one of the unit by dtype, on the first rank; (): not counted

    block_size: ClassVar[int] = 1  # a sample counts once
    has_sparse_embeddings: ClassVar[bool] = False  # all gradients are sent whole

    def num_params(self) -> int:
        """Return the number of parameters that had a gradient, or else that its optimizer updates."""
        return sum(tensor.num_params for tensor in self.gradients) or self.num_updated
