"""evener verify: do the replicas agree, and does one machine alone come to what the fleet did?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from evener.report.replayable import Replayable
    from evener.report.replayed import Tolerance, Verdict

EXAMPLES = "evener verify runs/mine\nevener verify runs/mine --replay 20"


def verify(
    run: str = typer.Argument(..., help="run directory"),
    other: str | None = typer.Argument(None, help="a second run, to compare their newest weights"),
    tolerance: float = typer.Option(0.0, min=0.0, help="largest absolute difference that passes"),
    replay: int | None = typer.Option(None, min=1, help="steps to take again, on this machine alone, and to compare"),
    from_step: int | None = typer.Option(
        None, min=0, help="checkpoint to replay from; 0: the seed's weights [newest that so many recorded steps follow]"
    ),
    as_json: bool = typer.Option(False, "--json", help="print one JSON object"),
) -> int:
    """Do the replicas of a run agree, to the bit or within what tolerance, and where not?

    Compares the hashes that every rank took of its own weights with each other and with the stored weights; and whole
    states where ranks left them. With a second run: the newest weights of both.
    With --replay: takes steps again from a checkpoint, in one process here, and compares their losses and gradient
    norms with what the ranks recorded; where they differ, says whether data, weights or the reduction were wrong. The
    run directory is not changed.
    Exit status 1 when they differ by more than the tolerance.
    """
    import json

    from evener.core.errors import UsageError
    from evener.launch.tool import lines_of

    from pathlib import Path  # isort: skip

    for path in (run, other):
        if path is not None and not Path(path).is_dir():
            raise UsageError(f"{path}: no such directory", hint="ls runs/ shows the runs made here")
    if replay is not None:
        if other is not None or tolerance:
            raise UsageError("--replay: compares a run with itself, within what its arithmetic allows")
        return _replay(run, replay, from_step, as_json)
    if from_step is not None:
        raise UsageError("--from-step: of what is replayed", hint=f"evener verify {run} --replay 20 --from-step N")
    found = json.loads(list(lines_of("evener.worker.compare", run, *([other] if other else [])))[-1])
    largest = found["largest_difference"]
    passes = found["agree"] or (largest is not None and largest <= tolerance)
    if as_json:
        print(json.dumps(found | {"passes": passes}))
    else:
        for check in found["checks"]:
            print(f"{_word(check):>24}  {check['what']} ({check['tensors']} tensors)")
        print(_verdict(found["agree"], largest, passes))
    return 0 if passes else 1


def _replay(run: str, num_steps: int, from_step: int | None, as_json: bool) -> int:
    """Take steps of a run again and say what follows."""
    import json
    import math

    import msgspec

    from evener.core.corpus import hash_content
    from evener.core.errors import UsageError
    from evener.core.rundir import RunDir
    from evener.launch.tool import lines_of
    from evener.report.replayable import replayable
    from evener.report.replayed import Point, judge_ranks, tolerance_of

    from pathlib import Path  # isort: skip

    rundir = RunDir(run)
    asked, was = replayable(rundir, num_steps, from_step), rundir.manifest().corpus
    assert was is not None
    is_sampled = was.content_hash.startswith("sampled-")
    corpus_changed = hash_content(Path(asked.corpus.path), sampled=is_sampled) != was.content_hash
    names = ("first", "num_steps", "dtype", "micro_batch", "spec", "corpus", "shape")
    request = {"run_dir": run} | {name: getattr(asked, name) for name in names}
    begun: dict[str, Any] = {}
    replayed: list[Point] = []
    for line in lines_of("evener.worker.replay", msgspec.json.encode(request).decode()):
        told = json.loads(line)
        if not begun:
            begun = told
            continue
        record = next(iter(asked.records.values()))[len(replayed)]
        if not math.isclose(told["lr"], record.lr, rel_tol=1e-9):
            raise UsageError(
                f"{run} cannot be replayed: step {record.step + 1} had a learning rate of {record.lr:g}, and with the "
                f"flags of its newest start it is {told['lr']:g}",
                hint="a step after that start can be: --from-step",
            )
        replayed.append(Point(step=told["step"], loss=told["loss"], norm=told["grad_norm"]))
    recorded = {rank: [Point(step=one.step, loss=one.loss, norm=one.grad_norm) for one in records]
                for rank, records in asked.records.items()}  # fmt: skip
    tolerance = tolerance_of(asked.dtypes, asked.syncs)
    verdict = judge_ranks(recorded, replayed, tolerance, clips=asked.spec.train.clip > 0,
                          corpus_changed=corpus_changed, unlike=begun["unlike"])  # fmt: skip
    if as_json:
        steps = [{"step": ours.step, "loss": ours.loss, "grad_norm": ours.norm, "recorded_loss": theirs.loss,
                  "recorded_grad_norm": theirs.norm}
                 for ours, theirs in zip(replayed, next(iter(recorded.values())), strict=False)]  # fmt: skip
        print(json.dumps({"run_dir": run, "first_step": asked.first, "device": begun["device"], "dtype": asked.dtype,
                          "passes": verdict.agrees, "verdict": msgspec.to_builtins(verdict),
                          "tolerance": msgspec.to_builtins(tolerance), "steps": steps}))  # fmt: skip
    else:
        _tell(asked, begun["device"], verdict, tolerance)
    return 0 if verdict.agrees else 1


def _tell(asked: Replayable, device: str, verdict: Verdict, tolerance: Tolerance) -> None:
    start = f"its checkpoint of step {asked.first}" if asked.first else "the weights of its seed"
    print(f"replayed steps {asked.first + 1} to {asked.first + asked.num_steps} from {start}, on {device} in "
          f"{asked.dtype}")  # fmt: skip
    if verdict.largest_loss is not None and verdict.largest_norm is not None:
        loss, norm = tolerance.later if asked.num_steps > 1 else tolerance.first
        allowed = "not compared" if norm is None else f"{norm:.0e} allowed"
        print(f"largest relative difference: loss {verdict.largest_loss:.1e} ({loss:.0e} allowed), gradient norm "
              f"{verdict.largest_norm:.1e} ({allowed}): {tolerance.why}")  # fmt: skip
    print(f"{'agree' if verdict.agrees else 'DIFFER'}: {verdict.sentence}")
    if not verdict.agrees and asked.resumed is not None:
        print(f"the run was resumed at step {asked.resumed}: if with other flags, these steps were taken with those "
              "before")  # fmt: skip


def _word(check: dict[str, Any]) -> str:
    if check["equal"]:
        return "equal to the bit"
    largest = check["largest_difference"]
    return f"differs in {check['tensor']}" if largest is None else f"differs by {largest:.3g}"


def _verdict(agree: bool, largest: float | None, passes: bool) -> str:
    if agree:
        return "agree to the bit: largest absolute difference 0"
    size = "not known: only hashes were kept" if largest is None else f"{largest:.3g}"
    return f"{'agree within the tolerance' if passes else 'DIFFER'}: largest absolute difference {size}"
