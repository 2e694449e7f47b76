"""What is wrong between machines, and which command mends it?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One obstacle. `check` is the stable id: the same in `doctor --json` and in the events of a run."""

    check: str  # "net.firewall"
    severity: Severity  # error: a run cannot start or cannot be right; warning: it will be slow or may break
    host: str | None = None  # the host where it is mended
    peer: str | None = None  # the other end, where there is one
    evidence: str  # what was seen
    fix: str  # the command or the line that mends it


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first; else in the order in which they were found."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
