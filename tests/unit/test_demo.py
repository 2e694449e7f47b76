"""`evener demo`: what it says of its runs, and what it does where machines cannot be emulated."""

from __future__ import annotations

from types import SimpleNamespace

from evener.cli import bench_local, demo
from evener.core.base.errors import EvenerError
from evener.lab import lab_requirements


def test_outcome_is_measured_against_the_faster_machine_alone():
    runs = {"a alone": SimpleNamespace(tokens_per_s=1000.0), "ddp": SimpleNamespace(tokens_per_s=600.0),
            "int8": SimpleNamespace(tokens_per_s=1250.0)}  # fmt: skip
    bench = SimpleNamespace(runs=runs, base="a alone")
    assert demo._describe_outcome(bench, "int8") == [
        "Plain DDP on both machines is 0.60 times as fast as the faster one alone.",
        "evener's choice, int8, on both is 1.25 times as fast as the faster one alone.",
    ]
    del runs["ddp"]  # it failed
    assert len(demo._describe_outcome(bench, "int8")) == 1


def test_where_machines_cannot_be_emulated_processes_are_compared(monkeypatch, tmp_path, capsys):
    def lacks(spec):
        raise EvenerError("a lab needs sshd, not found here", hint="apt install openssh-server")

    compared = []
    monkeypatch.setattr(lab_requirements, "check_machine", lacks)
    monkeypatch.setattr(bench_local, "run_scaling_bench", lambda *given: compared.append(given) or 0)
    assert demo.demo(out=str(tmp_path / "demo")) == 0
    assert len(compared) == 1
    assert "a lab needs sshd, not found here" in capsys.readouterr().err
