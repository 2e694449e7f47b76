"""Findings: problems on or between hosts, each with its evidence and the command that fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One detected problem. `check` is its stable id, the same in `doctor --json` and in the events of a run."""

    check: str  # "net.firewall"
    severity: Severity  # error: a run cannot start or cannot be right; warning: it will be slow or may break
    host: str | None = None  # the host on which to fix it
    peer: str | None = None  # the host at the other end, if any
    evidence: str  # what was observed
    fix: str  # the command or configuration line that fixes it


def sort_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, errors first; the sort is stable."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
