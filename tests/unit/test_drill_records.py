"""From doctor's records of each fault drill, the checks name that drill's fault and nothing else."""

from __future__ import annotations

import pytest

from evener.lab.drills.drill_catalog import DRILLS
from evener.lab.drills.drills_runs import RUN_DRILLS as OF_RUNS

from .. import drill_records

RECORDED = sorted(path.stem for path in drill_records.FOLDER.glob("*.json"))


def test_every_drill_of_doctor_has_a_record():
    assert set(RECORDED) == {name for name, drill in DRILLS.items() if drill not in OF_RUNS}


@pytest.mark.parametrize("name", RECORDED)
def test_each_drill_reports_only_its_fault(name):
    drill, found = DRILLS[name], drill_records.findings(drill_records.read(name))
    assert drill.expected_finding(found)
    assert drill.unexpected_findings(found) == []
