"""What is asked of `probe host`, and what does it find on one device?"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from evener.core.finding import Finding
from evener.core.fleet import Rates


class HostProbeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the probe is started with."""

    host: str  # as the findings shall name it
    model: str = "char"
    seconds: Annotated[float, Meta(gt=0)] = 12.0  # of sustained training
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Doing(msgspec.Struct, frozen=True, kw_only=True, tag="doing"):
    """A word on the way."""

    text: str


class Sustained(msgspec.Struct, frozen=True, kw_only=True):
    """Forward and backward of one micro-batch, again and again."""

    dtype: str
    micro_batch: int  # sequences
    tokens: int  # of one pass
    passes: int
    pass_p50_s: float
    pass_p95_s: float
    tokens_per_s: float
    first_third_tokens_per_s: float
    last_third_tokens_per_s: float
    first_third_cpus: float  # processors that the process was running on
    last_third_cpus: float
    first_third_Hz: float | None  # mean clock of the processors; None: the system does not tell
    last_third_Hz: float | None


class DeviceProbe(msgspec.Struct, frozen=True, kw_only=True, tag="device"):
    """One device, measured."""

    host: str
    device: str  # "cpu", "cuda:0"
    threads: int
    model: str
    rates: Rates
    sustained: Sustained
    findings: list[Finding]


HostTold = Doing | DeviceProbe
