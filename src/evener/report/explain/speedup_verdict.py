"""Judge whether the other machines helped: measured throughput against the best single host's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.core.base.shell import quote_command, quote_word
from evener.core.base.units import format_bit_rate, format_seconds, join_names, pluralize
from evener.core.cluster.fleet_file import fleet_flag
from evener.core.model.pretrained import PretrainedModel
from evener.core.run.prediction import Prediction
from evener.core.run.run_plan import read_plan_if_present
from evener.core.run.rundir import RunDir
from evener.plan.choice.advice import format_loss_change, format_throughput
from evener.plan.choice.options import MIN_GAIN
from evener.plan.choice.program_request import faster_launch, launch_flags
from evener.plan.choice.search import recommended_flags
from evener.report.explain.what_if import RunAlternatives
from evener.report.read.run_summary import RunSummary
from evener.report.read.stragglers import slowest_rank

MIN_SPEEDUP = 1.05  # a smaller ratio does not count as a speedup
MIN_LOST_SHARE = 0.15  # of a step, spent exchanging or waiting, before a program's launch can be improved
MAX_NAMED_HOSTS = 3  # hosts listed by name; of more, give the number


@dataclass(frozen=True)
class SpeedupVerdict:
    """The verdict, and a command that does better or measures it."""

    message: str
    hint: str = ""  # what the command is for
    command: str = ""

    @property
    def text(self) -> str:
        """The verdict and the command as one paragraph."""
        return f"{self.message} {self.hint}: {self.command}" if self.command else self.message


def speedup_verdict(summary: RunSummary, alternatives: RunAlternatives | None) -> SpeedupVerdict:
    """Return the verdict that a report begins with; `alternatives` are predicted from the run's records."""
    if not summary.tokens_per_s:
        return SpeedupVerdict(f"No step was recorded{summary.manifest.window_text}, so there is nothing to explain.")
    if len(summary.manifest.roster.hosts) > 1:
        return _multi_host_verdict(summary, summary.tokens_per_s, alternatives)
    trained, num = format_throughput(summary.tokens_per_s, summary.unit), summary.manifest.world_size
    (host,) = summary.manifest.roster.hosts
    if num == 1:
        return SpeedupVerdict(f"{host} alone trained {trained}; no other machine took part.")
    return _single_host_verdict(summary, f"{pluralize(num, 'process')} on {host} trained {trained}")


def _multi_host_verdict(
    summary: RunSummary, tokens_per_s: float, alternatives: RunAlternatives | None
) -> SpeedupVerdict:
    hosts = summary.manifest.roster.hosts
    who = join_names(hosts) if len(hosts) <= MAX_NAMED_HOSTS else f"{len(hosts)} hosts"
    trained = f"{who} trained {format_throughput(tokens_per_s, summary.unit)}"
    if alternatives is None or alternatives.best_single_host is None:
        message = _verdict_by_own_work(summary, trained)
        return SpeedupVerdict(message, *(_faster_launch(summary) if summary.manifest.program is not None else ()))
    alone, unit = alternatives.best_single_host, alternatives.prediction.job.unit
    ratio, name = tokens_per_s / alone.tokens_per_s, alone.roster.hosts[0]
    link = format_bit_rate(alternatives.prediction.cluster.slowest_link_Bps)
    rates = f"{trained} over {link}; {name} alone would have trained {format_throughput(alone.tokens_per_s, unit)}"
    if ratio >= MIN_SPEEDUP:
        verdict = f"It was worth it: {rates}: together they are {ratio:.2f} times as fast."
    elif ratio > 1 / MIN_SPEEDUP:
        verdict = f"It made no difference: {rates}."
    else:
        verdict = f"It was not worth it: {rates}: {name} alone is {1 / ratio:.2f} times as fast."
    if summary.manifest.program is not None:
        return SpeedupVerdict(verdict, *_better_launch(summary, alternatives.prediction))
    return _with_recommendation(summary, alternatives, verdict)


def _verdict_by_own_work(summary: RunSummary, trained: str) -> str:
    """Judge a run of which nothing was predicted by what its ranks did while they neither exchanged nor waited.

    A host alone would train its ranks' shares in that time: on the same cores, at the same batch of each rank.
    """
    rates: dict[str, float] = {}
    for rank in summary.ranks:
        cost = rank.typical
        work_s = (cost.data_s or 0.0) + (cost.compute_s or 0.0) + (cost.optimizer_s or 0.0)
        if not rank.tokens or not work_s or cost.compute_s is None:
            return f"{trained} together; what one of them alone would have trained is not known."
        host = summary.manifest.roster.members[rank.rank].host
        rates[host] = rates.get(host, 0.0) + rank.tokens / work_s
    name = max(rates, key=rates.__getitem__)
    ratio, alone = (summary.tokens_per_s or 0.0) / rates[name], format_throughput(rates[name], summary.unit)
    by = f"{name} alone, without exchanging and waiting, would have trained {alone}"
    if ratio >= MIN_SPEEDUP:
        return f"It was worth it: {trained}; {by}: together they are {ratio:.2f} times as fast."
    if ratio > 1 / MIN_SPEEDUP:
        return f"It made no difference: {trained}; {by}."
    return f"It was not worth it: {trained}; {by}: {1 / ratio:.2f} times as fast as together."


def _better_launch(summary: RunSummary, prediction: Prediction) -> tuple[str, str]:
    """Return how fast a program would be, and with which command, if launched as is predicted best; or ("", "")."""
    faster = faster_launch(prediction)
    if faster is None or len(faster.option.roster.hosts) < len(summary.manifest.roster.hosts):
        return "", ""  # the verdict names the one host
    best = faster.option
    hint = f"It would train {format_throughput(faster.tokens_per_s, prediction.job.unit)}"
    if not best.is_exact and (best.loss_penalty or 0) > 0:
        hint += f", loss {format_loss_change(best)} at equal samples"
    return hint, _launch_command(summary, launch_flags(best).split())


def _faster_launch(summary: RunSummary) -> tuple[str, str]:
    """Return what would save a program time that it spends exchanging and waiting, and the command; or ("", "").

    For a run from which nothing can be predicted.
    """
    manifest, costs = summary.manifest, [rank.typical for rank in summary.ranks]
    exposed = max((cost.exposed_sync_s or 0.0) / (cost.total_s or 1.0) for cost in costs)
    waiting = max((cost.wait_s or 0.0) / (cost.total_s or 1.0) for cost in costs)
    work_s = [(cost.data_s or 0.0) + (cost.compute_s or 0.0) + (cost.optimizer_s or 0.0) for cost in costs]
    flags, hints = [], []
    if waiting > MIN_LOST_SHARE and summary.unit == "samples" and all(work_s) and all(r.tokens for r in summary.ranks):
        rates = [(rank.tokens or 0.0) / seconds for rank, seconds in zip(summary.ranks, work_s, strict=True)]
        flags += ["--shares", ":".join(f"{rate / min(rates):.2g}" for rate in rates)]
        hints.append("batches divided by speed, for a DistributedSampler, accelerate or the Trainer")
    if exposed > MIN_LOST_SHARE and manifest.roster.sync.kind == "ddp":
        flags += ["--sync", "int8"]
        hints.append("a quarter of the bytes, for DistributedDataParallel and in reduce-scatters")
    if not flags:
        return "", ""
    return f"It may be faster with {join_names(hints)}", _launch_command(summary, flags)


def _launch_command(summary: RunSummary, flags: Sequence[str]) -> str:
    """Return the command that launches a program again on the same fleet, with these flags."""
    plan = read_plan_if_present(RunDir(summary.run_dir))
    where = "" if plan is None else plan.fleet.cli_flag
    return f"evener launch{where} {quote_command([*flags, '--', *summary.manifest.argv])}"


def _with_recommendation(summary: RunSummary, alternatives: RunAlternatives, message: str) -> SpeedupVerdict:
    """Add the set-up that the planner recommends instead, if it differs from the run's own and is faster."""
    prediction, measured = alternatives.prediction, alternatives.as_measured
    if not prediction.recommended or prediction.recommended == prediction.chosen:
        return SpeedupVerdict(message)
    best = prediction.option(prediction.recommended)
    if best.tokens_per_s < MIN_GAIN * measured.tokens_per_s:
        return SpeedupVerdict(message)
    steps = f" --steps {2 * summary.num_steps}" if summary.manifest.verdict == "finished" else ""
    hint = f"{best.name} would train {format_throughput(best.tokens_per_s)}"
    if not best.is_exact and (best.loss_penalty or 0) > 0:
        hint += f"; loss at equal tokens: {format_loss_change(best)}"
    command = f"evener train --resume {quote_word(summary.run_dir)}{steps} {recommended_flags(prediction)}"
    return SpeedupVerdict(message, hint, command)


def _own_command(summary: RunSummary) -> str:
    """Return the command that runs a program of the user's own on one rank, with another run directory."""
    manifest, out = summary.manifest, f"{summary.run_dir}-1-rank"
    if manifest.program is not None:
        where = _fleet_flag_of_run(summary) or "--fleet local"
        return f"evener launch {where} {quote_command(['--ranks', '1', '--out', out, '--', *manifest.argv])}"
    words, argv = ["torchrun", "--nproc-per-node", "1"], iter(manifest.argv)
    for word in argv:
        if word == "--out":
            next(argv, None)
        elif not word.startswith("--out="):
            words.append(word)
    return quote_command([*words, "--out", out])


def _single_host_verdict(summary: RunSummary, trained: str) -> SpeedupVerdict:
    """Return what several processes lose to communication, and a command that measures one process for comparison."""
    manifest, cost = summary.manifest, slowest_rank(summary).typical
    both_s = (cost.exposed_sync_s or 0.0) + (cost.wait_s or 0.0)
    lost = f"; {format_seconds(both_s)} of each step went to exchanging and waiting" if both_s else ""
    verdict = f"{trained}{lost}. Whether one process is as fast was not measured."
    if manifest.shape is None:  # a program of the user's own
        return SpeedupVerdict(verdict, "To measure it", _own_command(summary))
    data, model, batch = manifest.spec.data.data, manifest.spec.model.model, manifest.roster.batch
    where = _fleet_flag_of_run(summary)
    on_host = f" {where} --hosts {quote_word(manifest.roster.hosts[0])}" if where else ""
    if isinstance(manifest.shape, PretrainedModel):
        rank = manifest.shape.lora_rank
        adapters = [] if rank is None else ["--lora", str(rank), *["--dora"] * manifest.shape.has_dora]
        if manifest.shape.quantization != "off":
            adapters += ["--quantize", manifest.shape.quantization]
        words = ["evener", "train", data, "--model", model, *adapters,
                 "--batch", str(batch), "--steps", str(manifest.spec.train.steps)]  # fmt: skip
        return SpeedupVerdict(verdict, "To measure it", quote_command(words) + on_host)
    command = f"evener bench --data {quote_word(data)} --model {quote_word(model)} --batch {batch}"
    command += on_host or f" --ranks 1 --ranks {manifest.world_size}"
    return SpeedupVerdict(verdict, "To measure it", command)


def _fleet_flag_of_run(summary: RunSummary) -> str:
    """Return the flag that selects the run's fleet file; "" if the run was on this machine without one."""
    plan = read_plan_if_present(RunDir(summary.run_dir))
    return fleet_flag(plan.fleet.file) if plan is not None and plan.fleet.file else ""
