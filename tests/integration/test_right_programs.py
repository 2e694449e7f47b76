"""Launch correct programs: `evener launch` measures each, and names no mistake."""

from __future__ import annotations

import re

import pytest

from evener.core.run.rundir import RunDir
from tests.integration.right_programs import RIGHT_PROGRAMS, UNMEASURED_PROGRAMS
from tests.integration.test_launched_programs import Launch, launch
from tests.tiers import exhaustive

__all__ = ["launch"]
KNOWN_FALSE = {"averages_models_after_epochs": "20 updates without a collective are taken for a forgotten DDP"}


def run_without_finding(launch: Launch, program: str) -> str:
    """Launch a program on two ranks; return what it printed."""
    status, text = launch.run(program=program)
    assert status == 0, text
    assert "warning: " not in text, text
    assert "error: " not in text, text
    return text


@exhaustive
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in RIGHT_PROGRAMS if name not in KNOWN_FALSE),
        *(pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=why)) for name, why in KNOWN_FALSE.items()),
    ],
)
def test_right_program_is_measured_and_gives_no_finding(launch: Launch, name: str) -> None:
    text = run_without_finding(launch, RIGHT_PROGRAMS[name])
    rundir = RunDir(next(launch.folder.glob("runs/*")))
    num_updates = [int(number) for number in re.findall(r"updates (\d+)", text)]
    assert sorted(len(rundir.records(rank)) for rank in (0, 1)) == sorted(num_updates)
    manifest = rundir.manifest()
    assert manifest.verdict == "finished"
    assert manifest.result is not None
    assert manifest.result.replicas_agree is not False


@exhaustive
@pytest.mark.parametrize("name", UNMEASURED_PROGRAMS)
def test_program_with_rank_that_does_not_train_gives_no_finding(launch: Launch, name: str) -> None:
    run_without_finding(launch, UNMEASURED_PROGRAMS[name])
