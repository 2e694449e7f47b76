"""evener plan --scale: what would 1, 2, 4, … 4096 ranks give? Simulated, as a table and two pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from evener.core.errors import UsageError
from evener.core.units import count, plural, size
from evener.plan.scale import Point, Scenario, scale
from evener.plan.sync import buckets, gradients
from evener.plan.thumb import nanogpt, sentences

if TYPE_CHECKING:
    from evener.cli.planned import Asked

MOST_RANKS = 1 << 20
JITTER, MTBF_DAYS = 0.02, 300.0  # *assumptions*
CHECKPOINT_S, RESTART_S = 20.0, 300.0  # *assumptions*: to write all weights, and from a failure to the next step


def tell(asked: Asked, counts: str, strong: bool, jitter: float | None, slow: str | None, mtbf_days: float | None,
         draw: str | None, as_json: bool) -> int:  # fmt: skip
    """Simulate, draw and print; jitter in percent."""
    scenario = _scenario(
        asked, strong, JITTER if jitter is None else jitter / 100, MTBF_DAYS if mtbf_days is None else mtbf_days
    )
    if slow is not None:
        scenario = _with_slow(scenario, slow)
    points = scale(scenario, parse_counts(counts))
    told = [*scenario.assumed, *asked.cluster.assumed]
    pictures = _draw(points, draw, asked.job.model) if draw is not None else []
    rule = sentences(nanogpt())
    if as_json:
        print(json.dumps({"points": [msgspec.to_builtins(point) | {"step_s": point.step_s} for point in points],
                          "assumed": told, "rule_of_thumb": rule, "pictures": pictures}))  # fmt: skip
        return 0
    _print(asked, scenario, points, told, rule, pictures)
    return 0


def parse_counts(text: str) -> list[int]:
    """Numbers of ranks; … goes on as the two before it did, by their ratio.

    >>> parse_counts("1,2,4,…,32"), parse_counts("8, 16"), parse_counts("3,9,...,81")
    ([1, 2, 4, 8, 16, 32], [8, 16], [3, 9, 27, 81])
    """
    wrong = UsageError(f"--scale {text}: expected numbers of ranks, growing", hint="for example 1,2,4,…,4096")
    words = [word.strip() for word in text.split(",")]
    found: list[int] = []
    for i, word in enumerate(words):
        if re.fullmatch(r"…|\.\.\.?", word):
            if len(found) < 2 or i + 1 >= len(words) or not words[i + 1].isdecimal():
                raise wrong
            ratio, last = found[-1] / found[-2], int(words[i + 1])
            while ratio > 1 and round(found[-1] * ratio) < last:
                found.append(round(found[-1] * ratio))
        elif word.isdecimal() and 1 <= int(word) <= MOST_RANKS and (not found or int(word) > found[-1]):
            found.append(int(word))
        else:
            raise wrong
    return found


def _scenario(asked: Asked, strong: bool, jitter: float, mtbf_days: float) -> Scenario:
    if len({host.tokens_per_s for host in asked.cluster.hosts}) > 1:
        raise UsageError("--scale: all its ranks are alike", hint="one rate: --compute-tokens-per-s 500")
    job, host = asked.job, asked.cluster.hosts[0]
    outer = asked.cluster.wires["node1"]["node2"]
    return Scenario(
        compute_s=job.tokens / host.tokens_per_s,
        sequences=job.batch,
        micro_batch=min(job.micro_batch, job.batch),
        sequence_tokens=job.shape.block_size,
        gradient_bytes=4 * job.shape.num_params(),
        buckets=buckets(gradients(job.shape)),
        per_node=host.num_ranks,
        inner=host.local or outer,
        outer=outer,
        has_trees=asked.cluster.backend == "nccl",
        kind="strong" if strong else "weak",
        jitter=jitter,
        mtbf_s=86400 * mtbf_days,
        checkpoint_s=CHECKPOINT_S,
        restart_s=RESTART_S,
        assumed=[
            "sums hide behind the transfer",
            f"a rank's compute time varies by {jitter:.0%} from step to step (lognormal; --jitter)",
            f"a node fails every {mtbf_days:g} days (--mtbf-days); a checkpoint takes {CHECKPOINT_S:.0f} s, a restart "
            f"{RESTART_S:.0f} s",
        ],
    )


def _with_slow(scenario: Scenario, text: str) -> Scenario:
    """The same with ranks that are slower for good: "0.01:1.5"."""
    try:
        share, factor = map(float, text.split(":"))
    except ValueError:
        share, factor = -1.0, 0.0
    if not (0 <= share <= 1 and 1 <= factor < 1e6):
        raise UsageError(f"--slow {text}: expected a share of the ranks and a factor", hint="--slow 0.01:1.5")
    told = f"of the ranks {share:.2%} take {factor:g} times as long in every step (--slow)"
    return msgspec.structs.replace(scenario, slow_share=share, slow_factor=factor, assumed=[*scenario.assumed, told])


def _draw(points: list[Point], folder: str, model: str) -> list[str]:
    from evener.report.scaling_sheet import efficiency_png, parts_png

    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        paths = [place / "efficiency.png", place / "parts.png"]
        efficiency_png(points, paths[0], title=f"{model}: what more ranks give, simulated")
        parts_png(points, paths[1], title=f"{model}: where a step goes, simulated")
    except OSError as error:
        raise UsageError(f"--draw {folder}: {error.strerror}", hint="a folder that may be written") from None
    return [str(path) for path in paths]


def _print(asked: Asked, scenario: Scenario, points: list[Point], told: list[str], rule: list[str],
           pictures: list[str]) -> None:  # fmt: skip
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from evener.report.scaling_sheet import HEAD, rows

    console = Console(highlight=False, emoji=False)
    last, job = points[-1], asked.job
    share = "shared by all ranks" if scenario.kind == "strong" else "a rank"
    console.print(
        f"[bold]{plural(last.ranks, 'rank')} train {count(last.tokens_per_s)} tokens/s, {last.efficiency:.0%} of "
        f"what as many single ones would; with failures {last.goodput:.0%}.[/bold]",
        soft_wrap=True,
    )  # fmt: skip
    console.print(
        f"{job.model}: {count(job.shape.num_params())} parameters, {size(scenario.gradient_bytes)} of gradients, "
        f"{plural(job.batch, 'sequence')} of {job.shape.block_size} tokens {share}; simulated",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in HEAD:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows(points):
        table.add_row(*row)
    console.print(table)
    console.print(
        "effic.: tokens/s of a rank against one rank alone. wait: of the mean rank for the slowest. fails, saves: how "
        "often a node does, and how often saving loses least. with both: efficiency with failures and checkpoints.\n",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    console.print("beside it, a rule of thumb (80-90 % at 8 ranks, 60-70 % at 64):", style="dim")
    for line in rule:
        console.print(f"  {line}", soft_wrap=True, style="dim")
    console.print("\nassumed, not measured:", style="dim")
    for line in told:
        console.print(f"  {line}", style="dim", soft_wrap=True)
    for path in pictures:
        console.print(path)
