"""evener verify: check that the replicas of a run are equal, and replay its steps on one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from evener.core.base.escaped_output import print_escaped
from evener.core.base.shell import quote_word

if TYPE_CHECKING:
    from evener.report.explain.replay_check import ReplayTolerance, ReplayVerdict
    from evener.report.read.replay_job import ReplayJob

EXAMPLES = "evener verify runs/mine\nevener verify runs/mine --replay 20"


def verify(
    run: str = typer.Argument(..., help="run directory"),
    other: str | None = typer.Argument(None, help="a second run, to compare the newest weights of both"),
    tolerance: float = typer.Option(0.0, min=0.0, help="largest absolute difference allowed"),
    replay: int | None = typer.Option(None, min=1, help="number of steps to replay on this machine and compare"),
    from_step: int | None = typer.Option(
        None,
        min=0,
        help="checkpoint to replay from; 0: the initial weights [newest with enough recorded steps]",
    ),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Check whether the replicas of a run agree bit for bit or within a tolerance, and show where they differ.

    Compares the hashes that all ranks took of their weights with each other and with the saved weights, and the whole
    states if ranks saved them. With a second run: compares the newest weights of both.
    With --replay: repeats steps from a checkpoint in one process on this machine, and compares losses and gradient
    norms with those that the ranks recorded. If they differ, says whether data, weights or the reduction were wrong.
    The run directory is not changed.
    Warns if a membership epoch of the run was decided twice (split brain): then steps of one side were lost.
    Exit status 1 if they differ by more than the tolerance.
    """
    import json
    import sys

    from evener.core.base.errors import UsageError
    from evener.core.run.rundir import RunDir
    from evener.launch.torch_subprocess import program_lines
    from evener.report.read.membership_changes import split_brains

    from pathlib import Path  # isort: skip

    for path in (run, other):
        if path is not None and not Path(path).is_dir():
            raise UsageError(f"{path}: no such directory", hint="ls runs/ shows the runs made here")
    if replay is not None:
        if other is not None or tolerance:
            raise UsageError("--replay: compares a run with itself, within what its arithmetic allows")
        return _replay(run, replay, from_step, as_json)
    if from_step is not None:
        raise UsageError(
            "--from-step: only with --replay", hint=f"evener verify {quote_word(run)} --replay 20 --from-step N"
        )
    comparison = json.loads(list(program_lines("evener.worker.compare_weights", run, *([other] if other else [])))[-1])
    largest = comparison["largest_difference"]
    passes = comparison["agree"] or (largest is not None and largest <= tolerance)
    twice = split_brains(RunDir(run).events())
    if as_json:
        print_escaped(json.dumps(comparison | {"passes": passes, "split_brains": twice}))
    else:
        for check in comparison["checks"]:
            print_escaped(f"{_format_check(check):>24}  {check['what']} ({check['tensors']} tensors)")
        print_escaped(_format_verdict(comparison["agree"], largest, passes))
        for sentence in twice:
            print_escaped(f"warning: {sentence}", file=sys.stderr)
    return 0 if passes else 1


def _replay(run: str, num_steps: int, from_step: int | None, as_json: bool) -> int:
    """Replay steps of a run, compare them with its records, and print the verdict; return the exit status."""
    import json
    import math

    import msgspec

    from evener.core.base.errors import UsageError
    from evener.core.model.corpus import hash_content
    from evener.core.run.rundir import RunDir
    from evener.launch.torch_subprocess import program_lines
    from evener.report.explain.replay_check import ReplayEvidence, ReplayPoint, compare_replay_by_rank, replay_tolerance
    from evener.report.read.replay_job import find_replay_job

    from pathlib import Path  # isort: skip

    rundir = RunDir(run)
    job, was = find_replay_job(rundir, num_steps, from_step), rundir.manifest().corpus
    assert was is not None
    is_sampled = was.content_hash.startswith("sampled-")
    corpus_changed = hash_content(Path(job.corpus.path), sampled=is_sampled) != was.content_hash
    names = ("first", "num_steps", "dtype", "micro_batch", "spec", "corpus", "shape")
    request = {"run_dir": run} | {name: getattr(job, name) for name in names}
    header: dict[str, Any] = {}
    replayed: list[ReplayPoint] = []
    for line in program_lines("evener.worker.replay", msgspec.json.encode(request).decode()):
        message = json.loads(line)
        if not header:
            header = message
            continue
        record = next(iter(job.records.values()))[len(replayed)]
        if not math.isclose(message["lr"], record.lr, rel_tol=1e-9):
            raise UsageError(
                f"{run} cannot be replayed: step {record.step + 1} had a learning rate of {record.lr:g}, and with the "
                f"flags of its newest start it is {message['lr']:g}",
                hint="a step after that start can be: --from-step",
            )
        replayed.append(ReplayPoint(step=message["step"], loss=message["loss"], grad_norm=message["grad_norm"]))
    recorded = {rank: [ReplayPoint(step=one.step, loss=one.loss, grad_norm=one.grad_norm) for one in records]
                for rank, records in job.records.items()}  # fmt: skip
    tolerance = replay_tolerance(job.dtypes, job.syncs)
    evidence = ReplayEvidence(has_grad_norms=job.spec.train.clip > 0, corpus_changed=corpus_changed,
                              mismatched_tensor=header["unlike"])  # fmt: skip
    verdict = compare_replay_by_rank(recorded, replayed, tolerance, evidence)
    if as_json:
        steps = [{"step": ours.step, "loss": ours.loss, "grad_norm": ours.grad_norm, "recorded_loss": theirs.loss,
                  "recorded_grad_norm": theirs.grad_norm}
                 for ours, theirs in zip(replayed, next(iter(recorded.values())), strict=False)]  # fmt: skip
        print_escaped(json.dumps({"run_dir": run, "first_step": job.first, "device": header["device"],
                          "dtype": job.dtype,
                          "passes": verdict.is_match, "verdict": msgspec.to_builtins(verdict),
                          "tolerance": msgspec.to_builtins(tolerance), "steps": steps}))  # fmt: skip
    else:
        _print_replay(job, header["device"], verdict, tolerance)
    return 0 if verdict.is_match else 1


def _print_replay(job: ReplayJob, device: str, verdict: ReplayVerdict, tolerance: ReplayTolerance) -> None:
    start = f"its checkpoint of step {job.first}" if job.first else "the weights of its seed"
    print_escaped(f"replayed steps {job.first + 1} to {job.first + job.num_steps} from {start}, on {device} in "
          f"{job.dtype}")  # fmt: skip
    if verdict.largest_loss is not None and verdict.largest_norm is not None:
        loss, norm = tolerance.later if job.num_steps > 1 else tolerance.first
        allowed = "not compared" if norm is None else f"{norm:.0e} allowed"
        print_escaped(f"largest relative difference: loss {verdict.largest_loss:.1e} ({loss:.0e} allowed), gradient "
              f"norm {verdict.largest_norm:.1e} ({allowed}): {tolerance.why}")  # fmt: skip
    print_escaped(f"{'agree' if verdict.is_match else 'DIFFER'}: {verdict.sentence}")
    if not verdict.is_match and job.later_start_step is not None:
        print_escaped(
            f"the run was resumed at step {job.later_start_step}: if its flags were changed then, these steps were "
            "taken with the earlier ones"
        )


def _format_check(check: dict[str, Any]) -> str:
    if check["equal"]:
        return "equal to the bit"
    largest = check["largest_difference"]
    return f"differs in {check['tensor']}" if largest is None else f"differs by {largest:.3g}"


def _format_verdict(agree: bool, largest: float | None, passes: bool) -> str:
    if agree:
        return "agree to the bit: largest absolute difference 0"
    size = "not known: only hashes were kept" if largest is None else f"{largest:.3g}"
    return f"{'agree within the tolerance' if passes else 'DIFFER'}: largest absolute difference {size}"
